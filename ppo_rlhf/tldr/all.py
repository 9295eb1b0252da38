"""Chapter 2 in a row: `tldr/sft.py`, `tldr/reward.py`, `tldr/policy.py`, and a win rate at the end.

Preset, seed, base model and task are given once. All other arguments belong to one stage and
begin with its name: --sft.*, --reward.* or --policy.*, for example --sft.lr 1e-5 --policy.ppo.noptepochs 2.
What the stages share with those of chapter 1 is in `train_both.py`.

    python ppo_rlhf/tldr/all.py --preset posts                                         # no network, one CPU
    torchrun --nproc_per_node 2 ppo_rlhf/tldr/all.py --preset posts                    # two processes on a CPU
    accelerate launch --num_processes 8 ppo_rlhf/tldr/all.py --sft.track --reward.track --policy.track     # Pythia 1B
    python ppo_rlhf/tldr/all.py --resume runs/<run>                                    # any of the three runs
"""

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from pydantic import NonNegativeInt

from ppo_rlhf import judge, train_both
from ppo_rlhf.tldr import models, policy as tldr_policy, posts, reward as tldr_reward, sft as tldr_sft
from ppo_rlhf.train_policy import (
    Arguments,
    InputError,
    checked,
    load_pretrained,
    make_accelerator,
    read_meta,
    run_script,
    split_evenly,
)


@dataclass(frozen=True, kw_only=True)
class Args(Arguments):
    script: ClassVar[str] = "tldr_all"  # begins the name of the file that keeps the arguments
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
ROUGE = {"rouge/rouge1": "ROUGE-1", "rouge/rouge2": "ROUGE-2", "rouge/rougeL": "ROUGE-L"}


def train(args: Args) -> tuple[Path, Path, Path]:
    """Train all stages; return the folders of the fine-tuned model, reward model and policy, on every process.

    Raises InputError, a ValueError, before the first stage starts if anything is wrong with the arguments of any.
    """
    args = checked(args)
    with train_both.messages_of("policy", args.policy):
        accelerator = make_accelerator(args.policy.dtype)
    sft_args, reward_args, policy_args = (
        train_both.part_args(args, part) for part in (args.sft, args.reward, args.policy)
    )
    check(sft_args, reward_args, policy_args, accelerator)
    timestamp = train_both.begin(args, accelerator)

    sft_folder = train_both.train_part(tldr_sft, "sft", sft_args, timestamp, accelerator)
    base_model = os.path.relpath(sft_folder)
    reward_args = dataclasses.replace(reward_args, base_model=base_model)
    reward_folder = train_both.train_part(tldr_reward, "reward", reward_args, timestamp, accelerator)
    rewards = dataclasses.replace(policy_args.rewards, trained_model=os.path.relpath(reward_folder))
    policy_args = dataclasses.replace(policy_args, base_model=base_model, rewards=rewards)
    policy_folder = train_both.train_part(tldr_policy, "policy", policy_args, timestamp, accelerator)

    if accelerator.is_main_process:
        report(sft_folder, reward_folder, policy_folder)
    accelerator.wait_for_everyone()
    return sft_folder, reward_folder, policy_folder


def check(
    sft_args: tldr_sft.Args, reward_args: tldr_reward.Args, policy_args: tldr_policy.Args, accelerator: Accelerator
) -> None:
    """Say what is wrong with the arguments or data of a later stage before the first begins.

    Numbers come first, because data may take minutes to read. Tokenizer and configuration are the same before SFT
    and after it.
    """
    processes = accelerator.num_processes
    names = [part.exp_name for part in (sft_args, reward_args, policy_args)]
    if len(set(names)) < len(names):
        raise InputError(f"the exp_names of the stages are {', '.join(names)}; give each stage a name of its own")
    for kind, part in (("sft", sft_args), ("reward", reward_args)):
        with train_both.messages_of(kind, part):
            split_evenly("--batch_size", part.batch_size, processes, "processes")
    with train_both.messages_of("policy", policy_args):
        tldr_policy.ppo_sizes(policy_args, processes, scores_are_named=False)
        tokenizer = models.load_tokenizer(policy_args.base_model, policy_args.trust_remote_code)
        ids = posts.task_ids(policy_args.task, tokenizer)
        if policy_args.rewards.monitor:
            posts.text_scorer(policy_args.rewards.monitor, "rewards.monitor", tokenizer, ids)
        if policy_args.rewards.value_model:
            length = policy_args.task.query_length + policy_args.task.response_length
            models.load_scalar_model(policy_args, "value_model", tokenizer, length)
        if policy_args.lora.rank:
            base = load_pretrained(policy_args.base_model, torch.float32, policy_args.trust_remote_code)
            models.add_adapters(base, policy_args.lora, policy_args.seed)
    with train_both.messages_of("reward", reward_args):
        tldr_reward.read_data(reward_args, tokenizer)


# ---- Report ----------------------------------------------------------------------------------------------------


def report(*models_of_stages: Path) -> None:
    """Say in plain words what happened, on held-out posts. models_of_stages: sft, reward, policy in models/<run>."""
    runs = [folder.parents[2] / "runs" / folder.parent.name for folder in models_of_stages]
    sft_run, _, policy_run = map(os.path.relpath, runs)
    sft, reward, policy = map(read_meta, runs)
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
    rows = sft_and_policy_rows(Path(sft_run), Path(policy_run))
    if gold := policy["args"]["rewards"]["monitor"]:
        sentences += compare_by_gold(gold, sft_run, policy_run, len(rows))
    minutes = [meta["wall_time"] / 60 for meta in (sft, reward, policy)]
    sentences.append(
        f"It took {sum(minutes):.1f} minutes: SFT {minutes[0]:.1f}, reward model {minutes[1]:.1f}, "
        f"PPO {minutes[2]:.1f}."
    )
    print("\nHeld-out posts, summarised after SFT and after PPO")
    for row in rows[:4]:
        train_both.print_row(row)
    print("", *sentences, "", sep="\n")
    print(f"summaries   {policy_run}/evaluation.jsonl")
    print(
        f"judge them  python ppo_rlhf/judge.py --candidate {policy_run} --endpoint.url <address> "
        f"--endpoint.model <name>"
    )
    print("curves      python ppo_rlhf/report")
    for folder in models_of_stages:
        print(f"{folder.name:10}  {os.path.relpath(folder)}")


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


def compare_by_gold(function: str, sft_run: str, policy_run: str, posts: int) -> list[str]:
    """Mean gold scores of reference, SFT and PPO on the first posts, and win rates of PPO, as sentences."""
    lines = []
    for baseline, name in (("reference", "the reference summaries"), (sft_run, "those after SFT")):
        result = judge.judge(judge.Args(candidate=policy_run, baseline=baseline, n=posts, gold=function), shown=False)
        lines.append(
            f"Judged by {function.split(':')[-1]}, which PPO never saw, the policy's summaries win against {name} in "
            f"{result['win_rate']:.1%} of {result['rows']:,} posts (95% interval {result['win_rate_low']:.1%} to "
            f"{result['win_rate_high']:.1%}; ties count half): "
            f"{result['candidate_score']:+.2f} against {result['baseline_score']:+.2f} "
            f"on average, at {result['candidate_length']:.1f} against {result['baseline_length']:.1f} tokens."
        )
    return lines


if __name__ == "__main__":
    run_script(lambda: train(train_both.parse(presets=PRESETS, description=__doc__)))
