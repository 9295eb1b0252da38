"""Train a reward model, then a policy against it: `train_reward.py` and `train_policy.py` in a row.

Preset, seed, base model and task are given once. Every other argument of the two reaches them as --reward.*
and --policy.*, for example --reward.lr 1e-4 --policy.ppo.noptepochs 2.

    python ppo_rlhf/train_both.py --preset tales                                          # no network, one CPU
    torchrun --nproc_per_node 2 ppo_rlhf/train_both.py --preset tales                     # two processes on a CPU
    python ppo_rlhf/train_both.py                                                         # sentiment, GPT-2, one GPU
    accelerate launch --num_processes 8 ppo_rlhf/train_both.py --preset descriptiveness --reward.track --policy.track
    python ppo_rlhf/train_both.py --resume runs/<run>                                     # either of the two runs

Files and lines next to marks are those of openai/lm-human-preferences at commit cbfd210.
"""

import dataclasses
import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ppo_rlhf import sample, train_policy, train_reward, worlds
from ppo_rlhf.lib.base import files
from ppo_rlhf.lib.base.bounds import NonNegativeInt
from ppo_rlhf.lib.base.errors import InputError
from ppo_rlhf.lib.nets import pretrained
from ppo_rlhf.lib.services import cli, run, sequence
from ppo_rlhf.worlds import reviews, tales


@dataclass(frozen=True, kw_only=True)
class Args:
    preset: str = "sentiment"
    """names a set of defaults: sentiment, descriptiveness, cnndm, tldr, tales, tales-descriptiveness, reviews"""
    seed: NonNegativeInt = 1
    """seed of both parts"""
    base_model: str = "gpt2"
    """causal language model that both parts start from: a folder, a name on the hub, or `tales`"""
    trust_remote_code: bool = False
    """run Python code that comes with the base model"""
    resume: str = ""
    """folder of either of the two runs to resume: runs/<run>; the arguments are those of the newest of them"""
    judge: str = ""
    """another reward model of train_reward.py, which judges the texts at the end and trains nothing"""
    task: train_policy.TaskArgs = field(default_factory=train_policy.TaskArgs)
    """queries and responses of both parts"""
    reward: train_reward.Args = field(default_factory=train_reward.Args)
    """arguments of train_reward.py"""
    policy: train_policy.Args = field(default_factory=train_policy.Args)
    """arguments of train_policy.py"""


PRESETS = {
    name: Args(
        preset=name,
        base_model=train_policy.PRESETS[name].base_model,
        task=train_policy.TASKS[name],
        reward=train_reward.PRESETS[name],
        policy=train_policy.PRESETS[name],
    )
    for name in train_policy.TASKS
}
EVALUATION_QUERIES = 400
SHARED = ("preset", "seed", "base_model", "trust_remote_code", "task")  # arguments that both parts get


def parse(argv: list[str]) -> Args:
    names = {"script": "train_both.py", "policy_script": "train_policy.py"}
    return sequence.parse(PRESETS, argv, **names, description=__doc__)


def train(args: Args) -> tuple[Path, Path]:
    """Train both parts; return the folders of the reward model and of the policy, on every process."""
    stages = sequence.Stages(args, SHARED)
    accelerator = stages.accelerator
    # Both have one task, and the policy one source of scores.   train_policy.py#L408-L417
    shared = {name: getattr(args, name) for name in SHARED}
    reward_args, policy_args = (dataclasses.replace(part, **shared) for part in (args.reward, args.policy))
    # Whatever is wrong with the policy's arguments or the judge is said before the reward model is trained. All else
    # that the policy needs, such as a base model that is long enough, the reward model needs too.
    with sequence.flags_of("reward", reward_args, SHARED):
        train_reward.reward_sizes(reward_args, accelerator.num_processes)
    with sequence.flags_of("policy", policy_args, SHARED):
        train_policy.check_ppo_arguments(policy_args)
        train_policy.ppo_sizes(policy_args.ppo, accelerator.num_processes)
    cli.check_task(args.task)
    found = worlds.find_paths(args)
    tokenizer = pretrained.load_tokenizer(found.base_model, args.trust_remote_code)
    with sequence.flags_of("policy", policy_args, SHARED):
        train_policy.load_monitor(policy_args.rewards.monitor, tokenizer, pretrained.vocabulary_size(tokenizer))
    texts = sample.Continuations(dataclasses.asdict(args.task), tokenizer, source="")
    texts.held_out(1)  # the report at the end needs such queries
    if args.judge:
        no_weights = {"device": torch.device("meta"), "trust_remote_code": args.trust_remote_code}
        sample.load_judge("judge", args.judge, "", texts=texts, policy=found.base_model, **no_weights)
    if reward_args.exp_name == policy_args.exp_name:
        raise InputError(f"--reward.exp_name and --policy.exp_name are both {policy_args.exp_name}; give two names")

    reward_folder = stages.train(train_reward.train, reward_args, "reward", "reward")
    trained_model = os.path.relpath(reward_folder)
    policy_args = dataclasses.replace(
        policy_args, rewards=dataclasses.replace(policy_args.rewards, trained_model=trained_model)
    )
    policy_folder = stages.train(train_policy.train, policy_args, "policy", "policy")
    if accelerator.is_main_process:
        report(stages.runs, reward_folder, policy_folder, args)
    accelerator.wait_for_everyone()
    return reward_folder, policy_folder


def report(runs: Path, reward_folder: Path, policy_folder: Path, joint: Args) -> None:
    """Let both models continue held-out queries, at most EVALUATION_QUERIES; say in plain words what happened.

    joint: of this script.
    """
    reward_run, policy_run = (runs / folder.parent.name for folder in (reward_folder, policy_folder))
    reward_meta, policy_meta = run.read_meta(reward_run), run.read_meta(policy_run)
    args = sample.Args(
        policy=str(policy_folder),
        reward_model=str(reward_folder),
        judge=joint.judge,
        trust_remote_code=joint.trust_remote_code,
    )
    comparison = sample.Comparison(args, trust_functions=True)  # they were named on the command line
    queries, _ = comparison.task_queries(EVALUATION_QUERIES)
    rows = [row for key, chunk in enumerate(queries.split(64)) for row in comparison.rows(chunk, key)]
    (policy_run / "comparison.jsonl").write_text(files.json_lines(rows))
    sample.print_rows("Held-out queries, continued by the language model and by the trained policy", rows[:4])
    sample.print_changes(rows)
    print(
        "",
        *summary(rows, reward_meta, policy_meta),
        "",
        f"learning curves  {policy_run / 'learning_curves.png'}",
        f"                 {reward_run / 'learning_curves.png'}",
        f"samples          {policy_run / 'comparison.jsonl'}",
        f"models           {policy_folder}",
        f"                 {reward_folder}",
        f"read more        python ppo_rlhf/sample.py --policy {policy_folder}",
        sep="\n",
    )


def summary(rows: list[dict], reward_meta: dict, policy_meta: dict) -> list[str]:
    """A sentence for each result. rows: queries with both continuations and their scores, as in comparison.jsonl."""
    measures = [name.removeprefix("base ") for name in rows[0] if name.startswith("base ")]
    monitor = next((name for name in measures if name not in ("score", "judge", "log-prob")), None)
    scorers = ["score", *([monitor] if monitor else [])]
    base, policy = ({key: [row[f"{name} {key}"] for row in rows] for key in scorers} for name in ("base", "policy"))
    before, after = ({key: statistics.fmean(values) for key, values in scores.items()} for scores in (base, policy))
    minutes = {name: meta["wall_time"] / 60 for name, meta in (("reward", reward_meta), ("policy", policy_meta))}
    learned, lines = reward_meta["results"], []

    if "test_corr" in learned:
        lines.append(
            f"The reward model's scores have a correlation of {learned['test_corr']:.3f} with the ratings of "
            f"{learned['test_labels']:,} held-out texts."
        )
    if policy_meta["args"]["task"]["query_dataset"] == "reviews":
        people = reviews.facts()
        lines.append(
            f"There, a single person's rating has {people['one_person']:.3f} with the mean of the others, and VADER, "
            f"a lexicon with rules, {people['vader']:.3f} with the mean of all."
        )
    if "test_accuracy" in learned:
        lines.append(
            f"The reward model finds the annotator's choice in {learned['test_accuracy']:.1%} of "
            f"{learned['test_labels']:,} held-out comparisons. Chance is {learned['chance']:.0%}."
        )
        if learned["ceiling"] and learned["ceiling"] > learned["chance"]:
            share = (learned["test_accuracy"] - learned["chance"]) / (learned["ceiling"] - learned["chance"])
            lines.append(
                f"The annotator is noisy: a perfect judge would reach {learned['ceiling']:.1%}. "
                f"So it has learned {share:.0%} of what can be learned."
            )
    lines.append(
        f"On {len(rows)} held-out {'query' if len(rows) == 1 else 'queries'}, PPO took its score from "
        f"{before['score']:+.2f} to {after['score']:+.2f}."
    )
    if monitor:
        deviation = statistics.stdev(base[monitor]) if len(rows) > 1 else 0.0
        gain = (after[monitor] - before[monitor]) / deviation if deviation else 0.0
        name = "The gold score" if monitor == "gold" else f"The function {monitor}"
        lines.append(
            f"{name}, which PPO never saw, went from {before[monitor]:+.2f} to {after[monitor]:+.2f}"
            + (f": {gain:.1f} standard deviations of the language model's own." if deviation else ".")
        )
    if policy_meta["args"]["task"]["query_dataset"] == "tales":
        shares = [tales.grammatical_share([row[name] for row in rows]) for name in ("base", "policy")]
        lines.append(
            f"The grammar could have written {shares[0]:.1%} of the language model's sentences, "
            f"and {shares[1]:.1%} of the policy's."
        )
    target = policy_meta["args"]["rewards"]["adaptive_kl"]["target"]
    lines += [
        f"The policy is {policy_meta['results']['last_kl']:.1f} nats per response from the language model, "
        f"averaged over the last ten updates{f'; the target is {target:g}' if target else ''}.",
        f"It took {sum(minutes.values()):.1f} minutes: the reward model {minutes['reward']:.1f}, "
        f"the policy {minutes['policy']:.1f}.",
    ]
    return lines


if __name__ == "__main__":
    cli.run_script(train, parse)
