"""Train a reward model, then a policy against it: `train_reward.py` and `train_policy.py` in a row.

Preset, seed, base model and task are given once. Every other argument of the two reaches them as --reward.* and
--policy.*, for example --reward.lr 1e-4 --policy.ppo.noptepochs 2.

    accelerate launch ppo_rlhf/train_both.py --preset tales                               # no network, one CPU
    torchrun --nproc_per_node 2 ppo_rlhf/train_both.py --preset tales                     # two processes on a CPU
    accelerate launch ppo_rlhf/train_both.py                                              # sentiment, GPT-2, one GPU
    accelerate launch --num_processes 8 ppo_rlhf/train_both.py --preset descriptiveness --reward.track --policy.track
    python ppo_rlhf/train_both.py --resume runs/<run>                                     # either of the two runs
"""

import dataclasses
import json
import re
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppo_rlhf import sample, tales, train_policy, train_reward
from ppo_rlhf.data import TASKS, TaskArgs
from ppo_rlhf.run import (
    InputError,
    flag_value,
    from_dict,
    import_function,
    make_accelerator,
    parse_args,
    read_meta,
    run_name,
    run_script,
    shared_timestamp,
)


@dataclass(frozen=True)
class Args:
    preset: str = "sentiment"
    """names a set of defaults: sentiment, descriptiveness, cnndm, tldr, tales, tales-descriptiveness"""
    seed: int = 1
    """seed of both parts"""
    base_model: str = "gpt2"
    """causal language model that both parts start from: a folder, a name on the hub, or `tales`"""
    resume: str = ""
    """folder of either of the two runs to go on with; all arguments are taken from there"""
    task: TaskArgs = field(default_factory=TaskArgs)
    """queries and responses of both parts"""
    reward: train_reward.Args = field(default_factory=train_reward.Args)
    """arguments of train_reward.py"""
    policy: train_policy.Args = field(default_factory=train_policy.Args)
    """arguments of train_policy.py"""


PRESETS = {
    name: Args(
        preset=name,
        base_model=train_policy.PRESETS[name].base_model,
        task=TASKS[name],
        reward=train_reward.PRESETS[name],
        policy=train_policy.PRESETS[name],
    )
    for name in TASKS
}
EVALUATION_QUERIES = 512


def parse(argv: list[str]) -> tuple[Args, int | None]:
    """The arguments, and the time stamp of the runs to go on with."""
    for flag in argv:
        if match := re.match(r"--(?:reward|policy)\.((?:preset|seed|base.model|resume|task)\b[^=]*)", flag):
            raise InputError(f"{match[0]}: both parts share it; give --{match[1]}")
        if re.match(r"--policy\.rewards\.(trained.model|function)", flag):
            raise InputError(f"{flag.split('=')[0]}: the reward model is trained here; use train_policy.py")
    if resume := flag_value(argv, "--resume"):
        if len([flag for flag in argv if flag.startswith("--")]) > 1:
            raise InputError("--resume takes all arguments from the run; give no others")
        saved = read_meta(Path(resume))["joint"]
        if not saved:
            raise InputError(
                f"--resume {resume}: that run was not started by train_both.py; resume it with its own script"
            )
        return from_dict(Args, saved["args"]), saved["timestamp"]
    return parse_args(PRESETS, argv, __doc__), None


def train(args: Args, timestamp: int | None = None) -> tuple[Path, Path]:
    """Train both parts; return the folders of the reward model and of the policy, on every process.

    timestamp: that of two runs to go on with; None: begin.
    """
    accelerator = make_accelerator()
    resuming, timestamp = timestamp is not None, shared_timestamp(timestamp)
    shared = {"preset": args.preset, "seed": args.seed, "base_model": args.base_model, "task": args.task}
    reward_args, policy_args = (dataclasses.replace(part, **shared) for part in (args.reward, args.policy))
    train_reward.reward_sizes(reward_args, accelerator.num_processes)
    train_policy.ppo_sizes(policy_args.ppo, accelerator.num_processes)
    if policy_args.rewards.monitor:
        import_function(policy_args.rewards.monitor, "policy.rewards.monitor")

    joint = {"args": dataclasses.asdict(args), "timestamp": timestamp}

    def stage(part: Any, part_args: Any, kind: str) -> Path:
        """Train one part, go on with it, or skip it if it is finished."""
        name = run_name(part_args, timestamp)
        if resuming and (Path("runs") / name).exists():
            if read_meta(Path("runs") / name)["finished"]:
                return Path("models") / name / kind
            part_args = dataclasses.replace(part_args, resume=str(Path("runs") / name))
        return part.train(part_args, joint)

    reward_folder = stage(train_reward, reward_args, "reward")
    rewards = dataclasses.replace(policy_args.rewards, trained_model=str(reward_folder))
    policy_folder = stage(train_policy, dataclasses.replace(policy_args, rewards=rewards), "policy")
    if accelerator.is_main_process:
        report(reward_folder, policy_folder)
    accelerator.wait_for_everyone()
    return reward_folder, policy_folder


def report(reward_folder: Path, policy_folder: Path) -> None:
    """Let both models continue EVALUATION_QUERIES held-out queries, and say in plain words what happened."""
    reward_run, policy_run = (Path("runs") / folder.parent.name for folder in (reward_folder, policy_folder))
    reward_meta, policy_meta = read_meta(reward_run), read_meta(policy_run)
    comparison = sample.Comparison(sample.Args(policy=str(policy_folder)))
    queries = comparison.task_queries(EVALUATION_QUERIES)
    rows = [row for key, chunk in enumerate(queries.split(64)) for row in comparison.rows(chunk, key)]
    (policy_run / "comparison.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sample.print_rows("Held-out queries, continued by the language model and by the trained policy", rows[:4])
    base, policy = (
        {key: [row[f"{name} {key}"] for row in rows] for key in comparison.scorers} for name in ("base", "policy")
    )
    before, after = ({key: statistics.fmean(values) for key, values in scores.items()} for scores in (base, policy))
    minutes = {name: meta["wall_time"] / 60 for name, meta in (("reward", reward_meta), ("policy", policy_meta))}
    learned, lines = reward_meta["results"], [""]

    if "test_accuracy" in learned:
        lines.append(
            f"The reward model finds the annotator's choice in {learned['test_accuracy']:.1%} of "
            f"{learned['test_labels']:,} held-out comparisons. Chance is {learned['chance']:.0%}."
        )
        if learned["ceiling"]:
            share = (learned["test_accuracy"] - learned["chance"]) / (learned["ceiling"] - learned["chance"])
            lines.append(
                f"The annotator is noisy: a perfect judge would reach {learned['ceiling']:.1%}. "
                f"So it has learned {share:.0%} of what can be learned."
            )
    lines.append(f"PPO raised its score from {before['score']:+.2f} to {after['score']:+.2f}.")
    if "gold" in base:
        deviations = (after["gold"] - before["gold"]) / statistics.stdev(base["gold"])
        lines.append(
            f"The gold score, which PPO never saw, went from {before['gold']:+.2f} to {after['gold']:+.2f}: "
            f"{deviations:.1f} standard deviations of the language model's own."
        )
    if comparison.task.query_dataset == "tales":
        shares = [tales.grammatical_share([row[name] for row in rows]) for name in ("base", "policy")]
        lines.append(
            f"The grammar of the tales allows {shares[0]:.1%} of its sentences, {shares[1]:.1%} of the policy's."
        )
    target = policy_meta["args"]["rewards"]["adaptive_kl"]["target"]
    lines += [
        f"The policy is {policy_meta['results']['last_kl']:.1f} nats per response from the language model, in the "
        f"mean of the last ten updates{f'; the target is {target:g}' if target else ''}.",
        f"It took {sum(minutes.values()):.1f} minutes: the reward model {minutes['reward']:.1f}, "
        f"the policy {minutes['policy']:.1f}.",
        "",
        f"learning curves  {policy_run / 'learning_curves.png'}",
        f"                 {reward_run / 'learning_curves.png'}",
        f"samples          {policy_run / 'comparison.jsonl'}",
        f"models           {policy_folder}",
        f"                 {reward_folder}",
        f"read more        python ppo_rlhf/sample.py --policy {policy_folder}",
    ]
    print(*lines, sep="\n")


def main() -> None:
    args, timestamp = parse(sys.argv[1:])
    train(args, timestamp)


if __name__ == "__main__":
    run_script(main)
