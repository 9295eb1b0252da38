"""Chapter 2 in a row: `tldr/sft.py`, `tldr/reward.py`, `tldr/policy.py`, and a win rate at the end.

Preset, seed, base model and task are given once. All other arguments belong to one stage and
begin with its name: --sft.*, --reward.* or --policy.*, for example --sft.lr 1e-5 --policy.ppo.noptepochs 2.

    python ppo_rlhf/tldr/all.py --preset posts                                         # no network, one CPU
    torchrun --nproc_per_node 2 ppo_rlhf/tldr/all.py --preset posts                    # two processes on a CPU
    accelerate launch --num_processes 8 ppo_rlhf/tldr/all.py --sft.track --reward.track --policy.track     # Pythia 1B
    python ppo_rlhf/tldr/all.py --resume runs/<run>                                    # any of the three runs
"""

import dataclasses
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppo_rlhf import judge, train_policy
from ppo_rlhf.lib import errors, pretrained, run, several_stages
from ppo_rlhf.lib.bounds import NonNegativeInt
from ppo_rlhf.tldr import policy as tldr_policy, posts, reward as tldr_reward, sft as tldr_sft


@dataclass(frozen=True, kw_only=True)
class Args:
    preset: str = "tldr"
    """names a set of defaults: tldr, posts, reviews"""
    seed: NonNegativeInt = 44413
    """seed of all three stages"""
    base_model: str = "EleutherAI/pythia-1b-deduped"
    """causal language model that SFT starts from: a folder, a name on the hub, `posts` or `smollm2-135m`"""
    trust_remote_code: bool = False
    """run Python code that comes with the base model"""
    resume: str = ""
    """folder of one of the three runs to resume, runs/<run>, with the arguments that they began with"""
    task: posts.TaskArgs = field(default_factory=posts.TaskArgs)
    """queries and responses of all three stages"""
    sft: tldr_sft.Args = field(default_factory=tldr_sft.Args)
    """arguments of tldr/sft.py"""
    reward: tldr_reward.Args = field(default_factory=tldr_reward.Args)
    """arguments of tldr/reward.py"""
    policy: tldr_policy.Args = field(default_factory=tldr_policy.Args)
    """arguments of tldr/policy.py"""


PRESETS = {
    name: Args(
        preset=name,
        seed=tldr_sft.PRESETS[name].seed,
        base_model=tldr_sft.PRESETS[name].base_model,
        task=posts.TASKS[name],
        sft=tldr_sft.PRESETS[name],
        reward=tldr_reward.PRESETS[name],
        policy=tldr_policy.PRESETS[name],
    )
    for name in posts.TASKS
}
SCRIPT = "tldr/all.py"
ROUGE = {"rouge/rouge1": "ROUGE-1", "rouge/rouge2": "ROUGE-2", "rouge/rougeL": "ROUGE-L"}


def parse(argv: list[str]) -> Args:
    return several_stages.parse(PRESETS, argv, script=SCRIPT, policy_script="tldr/policy.py", description=__doc__)


def train(args: Args) -> tuple[Path, Path, Path]:
    """Train all stages; return the folders of the fine-tuned model, reward model and policy, on every process."""
    stages = several_stages.Stages(SCRIPT, args, "sft", "reward", "policy")
    processes = stages.accelerator.num_processes
    sft_args, reward_args, policy_args = stages.args["sft"], stages.args["reward"], stages.args["policy"]
    # What is wrong with the arguments or data of a later stage is said before the first begins. Numbers come first,
    # because data may take minutes to read. Tokenizer and configuration are the same before SFT and after it.
    for part, stage_args in (("sft", sft_args), ("reward", reward_args)):
        with several_stages.flags_of(part, stage_args):
            train_policy.checked(stage_args)
            train_policy.split_evenly("--batch_size", stage_args.batch_size, processes, "processes")
    with several_stages.flags_of("policy", policy_args):
        tldr_policy.ppo_sizes(policy_args, processes, scores_are_named=False)
    with several_stages.flags_of("reward", reward_args):
        tldr_reward.read_data(reward_args, pretrained.load_tokenizer(args.base_model, args.trust_remote_code))

    stages.begin()
    sft_folder = stages.train("sft", lambda args: tldr_sft.train(args, stages.timestamp), sft_args)
    base_model = os.path.relpath(sft_folder)
    reward_args = dataclasses.replace(reward_args, base_model=base_model)
    reward_folder = stages.train("reward", lambda args: tldr_reward.train(args, stages.timestamp), reward_args)
    rewards = dataclasses.replace(policy_args.rewards, trained_model=os.path.relpath(reward_folder))
    policy_args = dataclasses.replace(policy_args, base_model=base_model, rewards=rewards)
    policy_folder = stages.train("policy", lambda args: tldr_policy.train(args, stages.timestamp), policy_args)
    if stages.accelerator.is_main_process:
        report(stages)
    stages.accelerator.wait_for_everyone()
    return sft_folder, reward_folder, policy_folder


def report(stages: several_stages.Stages) -> None:
    """Say in plain words what happened, on held-out posts."""
    sft, reward, policy = (run.read_meta(folder) for folder in stages.folders.values())
    learned, results = reward["results"], policy["results"]
    rouge = [f"{name} {sft['results'][f'validation/sft/{key}']:.3f}" for key, name in ROUGE.items()]
    sentences = [
        f"After supervised fine-tuning: {', '.join(rouge)}; {sft['results']['validation/sft/eos_rate']:.1%} of the "
        f"summaries end.",
        f"The reward model agrees with the annotator in {learned['eval/rm/validation/accuracy']:.1%} of the held-out "
        f"comparisons. Chance is 50%.",
    ]
    if ceiling := learned["ceiling"]:
        share = (learned["eval/rm/validation/accuracy"] - 0.5) / (ceiling - 0.5)
        sentences.append(
            f"The annotator is noisy: a perfect judge would reach {ceiling:.1%}. "
            f"So it has learned {share:.0%} of what can be learned."
        )
    sentences.append(
        f"The policy is {results['last_kl']:.1f} nats per summary from the fine-tuned model, averaged over the last "
        f"ten updates; {results['validation/eos_rate']:.1%} of its held-out summaries end."
    )
    rows = sft_and_policy_rows(stages.folders["sft"], stages.folders["policy"])
    if gold := policy["args"]["rewards"]["monitor"]:
        sentences += compare_by_gold(gold, stages.folders["sft"], stages.folders["policy"], len(rows))
    minutes = [meta["wall_time"] / 60 for meta in (sft, reward, policy)]
    sentences.append(
        f"It took {sum(minutes):.1f} minutes: SFT {minutes[0]:.1f}, reward model {minutes[1]:.1f}, "
        f"PPO {minutes[2]:.1f}."
    )
    policy_run = os.path.relpath(stages.folders["policy"])
    stages.report(
        "Held-out posts, summarised after SFT and after PPO",
        rows,
        sentences,
        summaries=f"{policy_run}/evaluation.jsonl",
        judge_them=f"python ppo_rlhf/judge.py --candidate {policy_run} --endpoint.url <address> "
        f"--endpoint.model <name>",
    )


def sft_and_policy_rows(sft_run: Path, policy_run: Path) -> list[dict[str, Any]]:
    """The summaries of both stages of the same held-out posts, side by side.

    Each stage has summarised the first posts of the split, as many as its eval_posts says.
    """
    after_sft, after_ppo = (
        map(json.loads, (folder / "evaluation.jsonl").read_text().splitlines()) for folder in (sft_run, policy_run)
    )
    return [
        {
            "post": policy["query"],
            "reference": policy["reference"],
            "SFT": sft["response"],
            "PPO": policy["response"],
            "PPO score": policy["scores"],
        }
        for sft, policy in zip(after_sft, after_ppo, strict=False)
    ]


def compare_by_gold(function: str, sft_run: Path, policy_run: Path, posts: int) -> list[str]:
    """Mean gold scores of reference, SFT and PPO on the first posts, and win rates of PPO, as sentences."""
    lines = []
    for baseline, name in (("reference", "the reference summaries"), (str(sft_run), "those after SFT")):
        result = judge.judge(
            judge.Args(candidate=str(policy_run), baseline=baseline, n=posts, gold=function), shown=False
        )
        lines.append(
            f"Judged by {function.split(':')[-1]}, which PPO never saw, the policy's summaries win against {name} in "
            f"{result['win_rate']:.1%} of {result['rows']:,} posts (95% interval {result['win_rate_low']:.1%} to "
            f"{result['win_rate_high']:.1%}; ties count half): "
            f"{result['candidate_score']:+.2f} against {result['baseline_score']:+.2f} "
            f"on average, at {result['candidate_length']:.1f} against {result['baseline_length']:.1f} tokens."
        )
    return lines


if __name__ == "__main__":
    errors.run_script(lambda: train(parse(sys.argv[1:])))
