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
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ppo_rlhf import sample, train_policy, train_reward
from ppo_rlhf.lib import command_line, errors, files, pretrained, run, several_stages
from ppo_rlhf.lib.bounds import NonNegativeInt
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
    """folder of either of the two runs to resume, runs/<run>, with the arguments that they began with"""
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


def parse(argv: list[str]) -> Args:
    return several_stages.parse(
        PRESETS, argv, script="train_both.py", policy_script="train_policy.py", description=__doc__
    )


def train(args: Args) -> tuple[Path, Path]:
    """Train both parts; return the folders of the reward model and of the policy, on every process."""
    # Both have one task, and the policy one source of scores.   train_policy.py#L408-L417
    stages = several_stages.Stages(args, "reward", "policy")
    processes = stages.accelerator.num_processes
    reward_args, policy_args = stages.args["reward"], stages.args["policy"]
    # Whatever is wrong with the policy's arguments is said before the reward model is trained. All else that the
    # policy needs, such as a base model that is long enough, the reward model needs too.
    with several_stages.flags_of("reward", reward_args):
        train_reward.reward_sizes(reward_args, processes)
    with several_stages.flags_of("policy", policy_args):
        train_policy.check_ppo_arguments(policy_args)
        train_policy.ppo_sizes(policy_args.ppo, processes)
    command_line.check_task(args.task)
    tokenizer = pretrained.load_tokenizer(args.base_model, args.trust_remote_code)
    with several_stages.flags_of("policy", policy_args):
        train_policy.load_monitor(policy_args.rewards.monitor, tokenizer, pretrained.vocabulary_size(tokenizer))
    train_policy.QueryStream(args.task, tokenizer, split="test")  # the report at the end needs such queries

    reward_folder = stages.train("reward", train_reward.train, reward_args)
    rewards = dataclasses.replace(policy_args.rewards, trained_model=os.path.relpath(reward_folder))
    policy_folder = stages.train("policy", train_policy.train, dataclasses.replace(policy_args, rewards=rewards))
    if stages.accelerator.is_main_process:
        report(stages, reward_folder, policy_folder, args)
    stages.accelerator.wait_for_everyone()
    return reward_folder, policy_folder


def report(stages: several_stages.Stages, reward_folder: Path, policy_folder: Path, args: Args) -> None:
    """Let both models continue held-out queries, at most EVALUATION_QUERIES; say in plain words what happened."""
    sampling = sample.Args(
        policy=str(policy_folder), reward_model=str(reward_folder), trust_remote_code=args.trust_remote_code
    )
    comparison = sample.Comparison(sampling, trusted=True)  # its functions were named on the command line
    rows = comparison.rows(comparison.queries(EVALUATION_QUERIES))
    file = stages.folders["policy"] / "comparison.jsonl"
    file.write_text(files.json_lines(map(files.without_nan, rows)))
    sample.print_changes(rows)
    stages.report(
        "Held-out queries, continued by the language model and by the trained policy",
        rows,
        summary(rows, *(run.read_meta(folder) for folder in stages.folders.values())),
        samples=os.path.relpath(file),
        read_more=f"python ppo_rlhf/sample.py --policy {os.path.relpath(policy_folder)}",
    )


def summary(rows: list[dict], reward_meta: dict, policy_meta: dict) -> list[str]:
    """A sentence for each result. rows: queries with both continuations and their scores, as in comparison.jsonl."""
    names = [key.removeprefix("base ") for key in rows[0] if key.startswith("base ")]
    monitor = next((name for name in names if name not in ("score", "log-prob")), None)
    learned, lines = reward_meta["results"], []

    def mean(name: str) -> float:
        return statistics.fmean(row[name] for row in rows)

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
        f"{mean('base score'):+.2f} to {mean('policy score'):+.2f}."
    )
    if monitor:
        before, after = mean(f"base {monitor}"), mean(f"policy {monitor}")
        deviation = statistics.stdev(row[f"base {monitor}"] for row in rows) if len(rows) > 1 else 0.0
        name = "The gold score" if monitor == "gold" else f"The function {monitor}"
        gain = (after - before) / deviation if deviation else 0.0
        lines.append(
            f"{name}, which PPO never saw, went from {before:+.2f} to {after:+.2f}"
            + (f": {gain:.1f} standard deviations of the language model's own." if deviation else ".")
        )
    if policy_meta["args"]["task"]["query_dataset"] == "tales":
        shares = [tales.grammatical_share([row[name] for row in rows]) for name in ("base", "policy")]
        lines.append(
            f"The grammar could have written {shares[0]:.1%} of the language model's sentences, "
            f"and {shares[1]:.1%} of the policy's."
        )
    target = policy_meta["args"]["rewards"]["adaptive_kl"]["target"]
    minutes = [meta["wall_time"] / 60 for meta in (reward_meta, policy_meta)]
    lines += [
        f"The policy is {policy_meta['results']['last_kl']:.1f} nats per response from the language model, "
        f"averaged over the last ten updates{f'; the target is {target:g}' if target else ''}.",
        f"It took {sum(minutes):.1f} minutes: the reward model {minutes[0]:.1f}, the policy {minutes[1]:.1f}.",
    ]
    return lines


if __name__ == "__main__":
    errors.run_script(lambda: train(parse(sys.argv[1:])))
