"""The log of a run of chapter 3: metrics, evaluations, samples, what a trace keeps, the closing report.

None of this changes what is learned.

Marks like [V55] name an implementation detail. The original is verl-project/verl at commit b178a3c; files and lines
next to marks are the original's. See docs/reference.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.rlvr import algebra, problems, rewards
from ppo_rlhf.rlvr.algebra import Rollout
from ppo_rlhf.rlvr.arguments import Args
from ppo_rlhf.tldr.shares import means_over, sum_over_processes, widened
from ppo_rlhf.train_policy import InputError, Run, check_finite, keyed_generator


def update_metrics(
    args: Args,
    sampled: Rollout,
    rollout: Rollout,
    batch: Rollout,
    steps: dict[str, Tensor],
    sources: list[str],
    more: dict[str, Tensor],
    accelerator: Accelerator,
) -> dict[str, float]:
    """The metrics of an update. Every process adds its shares, and all get the same numbers.

    sampled: all that was generated for it; rollout: the episodes of the batch; batch: the same as they were learned
    from. steps: what ppo_update returned. sources: names of the parts of a score. more: numbers of what was sampled
    (rows,), under their names.
    """
    has_critic = args.ppo.advantage == "gae"
    # Scores, lengths and the like are of all that was generated, as is the count of episodes.
    live, lengths, right = sampled.mask.any(1), sampled.mask.sum(1), sampled.right
    response_numbers = more | {
        "objective/scores": sampled.scores,
        "objective/verifiable_correct_rate": right,
        **{f"objective/{name}_reward": sampled.parts[:, i] for i, name in enumerate(sources)},
        "val/sequence_lengths": lengths,
        "val/stop_token_rate": sampled.stopped,
        "val/groups_zero_std": ~algebra.scores_differ(sampled.raw_scores, live, sampled.groups),
        "val/groups_all_right": algebra.by_group(widened(right | ~live), sampled.groups, "amin"),
        "val/groups_all_wrong": algebra.by_group(widened(~right | ~live), sampled.groups, "amin"),
    }
    episode_numbers = {
        "objective/non_score_reward": rollout.non_score_rewards.sum(1),
        "objective/rlhf_reward": rollout.rewards.sum(1),
        "objective/entropy": -rollout.logprobs.masked_fill(~rollout.mask, 0).sum(1),
    }
    token_numbers = {"objective/sampler_gap": (rollout.logprobs - rollout.sampler_logprobs).abs()}
    # Where there is no reference, nobody knows the KL: 0 would say that the policy does not move.
    if args.rewards.has_penalty:
        episode_numbers["objective/kl"] = rollout.kl.sum(1)
        token_numbers["objective/kl_per_token"] = rollout.kl
    if args.ppo.filter_groups:  # [V78] groups that were left over come from an older policy
        episode_numbers["train/staleness_mean"] = rollout.age
    loss_numbers = {"val/advantages_mean": batch.advantages, "val/advantages_abs_mean": batch.advantages.abs()}
    if has_critic:
        gaps = widened(batch.returns - batch.values)
        loss_numbers |= {
            "val/mean": batch.values,
            "val/returns": batch.returns,
            "square_of_return": widened(batch.returns) ** 2,
            "error": gaps,
            "square_of_error": gaps**2,
        }
    # [V55] A row without a token is in no mean.
    metrics = means_over(
        (live, response_numbers),
        (rollout.mask.any(1), episode_numbers),
        (rollout.mask, token_numbers),
        (batch.mask, loss_numbers),
        (live & right, {"val/sequence_lengths_correct": lengths}),
        (torch.ones_like(live), {"val/unscorable": ~live}),
        (live & ~right, {"val/sequence_lengths_incorrect": lengths}),
        accelerator=accelerator,
    )
    # [V55] A minibatch in which no token counts is in no mean either.
    counts = {name: accelerator.reduce(steps[name], "sum") for name in ("tokens", "right_tokens") if name in steps}
    live_steps = {name: (count > 0).nonzero()[:, 0] for name, count in counts.items()}  # numbers of steps
    shares = {}
    for name, x in steps.items():
        if name.endswith("grad_norm"):
            metrics[name] = x.mean().item()  # the same everywhere
        else:
            inds = live_steps["right_tokens" if name == "loss/nll_avg" else "tokens"]
            shares[name] = x[inds].sum() / max(len(inds), 1)
    shares["first_gap"] = steps["squared_ratio_gap of new"][0]
    shares["val/num_stop_token_ids"] = sampled.stopped.sum()
    metrics |= sum_over_processes(shares, accelerator)
    off = metrics["val/ratio"] - 1 if len(live_steps["tokens"]) else 0
    metrics["val/ratio_var"] = metrics["squared_ratio_gap"] - off**2
    metrics["val/first_ratio_gap"] = math.sqrt(metrics["first_gap"])
    if has_critic:
        variance_of_errors = metrics["square_of_error"] - metrics["error"] ** 2
        variance_of_returns = metrics["square_of_return"] - metrics["val/returns"] ** 2
        # Returns that differ by no more than rounding have nothing that a critic could explain.
        vary = variance_of_returns > 1e-12 * (metrics["square_of_return"] + metrics["square_of_error"])
        metrics["val/explained_var"] = 1 - variance_of_errors / variance_of_returns if vary else 0.0
    all_lengths = accelerator.gather(lengths)
    metrics["val/sequence_lengths_min"] = all_lengths.min().item()
    metrics["val/sequence_lengths_max"] = all_lengths.max().item()
    return {name: value for name, value in metrics.items() if "/" in name}


def check_update(metrics: dict[str, float], update: int, dtype: str) -> None:
    """Raise an InputError if a metric is impossible. Nothing more is saved then."""
    check_finite(metrics, update)
    # [D25] Before the first step, the policy that trains is the one that read its responses.
    if (gap := metrics["val/first_ratio_gap"]) > (0.1 if dtype == "bfloat16" else 1e-3):
        raise InputError(f"val/first_ratio_gap is {gap:.2g} in update {update}: rollout and training pass disagree")


def sample_rows(
    batch: Rollout,
    problem_set: problems.Problems,
    tokenizer: PreTrainedTokenizerBase,
    ids: problems.TaskIds,
    n: int,
) -> list[dict[str, Any]]:
    """The first group, at most four of it, or three single responses: texts, scores, mean advantages of tokens.

    n: responses to a problem.
    """
    rows = batch.rows(slice(0, min(n, 4) if n > 1 else 3))
    mean = rows.advantages.sum(1) / rows.mask.sum(1).clamp(min=1)
    columns = {
        "prompt": [problem_set.texts[i] for i in rows.problems],
        "response": problems.to_texts(tokenizer, rows.responses, ids),
        "answer": [problem_set.answers[i] for i in rows.problems],
        "score": rows.scores.tolist(),
        "advantage": mean.tolist(),
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def trace_numbers(
    args: Args, rollout: Rollout, batch: Rollout, now: dict[str, Tensor], sources: list[str], pad_id: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a trace keeps of each token (rows, response_length), and of each episode (rows,).

    rollout, batch: as of update_metrics. now: what the networks say after the update, and raw_advantages.
    """
    tokens = {
        "ids": rollout.responses,
        "scored": rollout.mask,
        "mask": batch.loss_mask,
        "logprobs": rollout.logprobs,
        "sampler_logprobs": rollout.sampler_logprobs,
        "rewards": rollout.rewards,
        "advantages": batch.advantages,
        "weights": batch.weights,
        "new_logprobs": now["new_logprobs"],
        "entropies": now["entropies"],
    }
    if args.ppo.whitens:
        tokens["raw_advantages"] = now["raw_advantages"]
    if args.rewards.has_penalty:  # otherwise there is no reference, and nothing to say about it
        tokens |= {"ref_logprobs": rollout.ref_logprobs, "kl": rollout.kl}
    if args.rewards.kl_estimator == "full":
        tokens["exact_kl"] = rollout.exact_kl
    if args.ppo.advantage == "gae":
        tokens |= {"values": batch.values, "returns": batch.returns, "new_values": now["new_values"]}
    if args.rewards.steps or args.rewards.has_functions:
        tokens["token_scores"] = rollout.token_scores
    if args.tools:
        tokens["tool"] = (rollout.responses != pad_id) & ~rollout.written
    episodes = {
        "scores": rollout.scores,
        "raw_scores": rollout.raw_scores,
        **{name: rollout.parts[:, i] for i, name in enumerate(sources)},
        "stopped": rollout.stopped,
        "groups": rollout.groups,
        "kept": batch.mask.any(1),
    }
    if args.ppo.advantage == "remax":
        episodes["baselines"] = rollout.baselines
    # Files hold no tensor twice.
    return tokens | {"mask": batch.loss_mask.clone()}, episodes


def evaluate(
    args: Args,
    held_out: problems.Problems,
    respond: Callable[..., tuple[Tensor, Tensor]],
    tokenizer: PreTrainedTokenizerBase,
    ids: problems.TaskIds,
    accelerator: Accelerator,
    *,
    with_samples: bool,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Solve the held-out problems greedily and, with_samples, by eval_samples of each, too.

    respond: of a sampler. Returns means and rows for evaluation.jsonl. Every process must call this.
    """
    # [V98] All problems of the split in their order, each once; strict and flexible.   metric_utils.py#L420-L640
    task, shaping = args.task, args.rewards
    fields = {shaping.verifier: "rewards.verifier"}
    if task.answer_format == "hashes":
        for name in ("gsm8k_strict", "gsm8k_flexible", "gsm8k_format"):
            fields.setdefault(name, "rewards.verifier")
    if shaping.format:
        fields[shaping.format] = "rewards.format"
    start_of = partial(problems.response_start, task)
    trial = held_out.trial(tokenizer)
    verifiers = [
        rewards.load_verifier(name, field, start_of, trial=trial, on_all_processes=True)
        for name, field in fields.items()
    ]
    local_batch = min(args.ppo.local_rollout_batch_size, args.ppo.batch_size // accelerator.num_processes)

    def solve(temperature: float, uniforms: Tensor) -> list[problems.Solved]:
        return problems.solve(
            held_out,
            respond,
            verifiers,
            tokenizer,
            ids,
            local_batch=local_batch,
            accelerator=accelerator,
            temperature=temperature,
            uniforms=uniforms,
        )

    shape = (len(held_out), 1, task.response_length)
    (greedy,) = solve(problems.GREEDY, torch.full(shape, 0.5, dtype=torch.float64))
    samples = []
    if with_samples and args.eval_samples:
        generators = [keyed_generator(args.seed, "evaluate", number) for number in range(args.eval_samples)]
        noise = [torch.rand(shape, generator=generator, dtype=torch.float64) for generator in generators]
        samples = solve(task.temperature, torch.cat(noise, 1))
    return problems.evaluation(held_out, task.kind_column, names=[*fields], greedy=greedy, samples=samples)


def report(run: Run, after: dict[str, float], rows: list[dict[str, Any]]) -> None:
    """Print in plain words what has become of the held-out problems, and where to read more.

    after: the last evaluation, rows: of it; the result before the first update is in the first row of the metrics.
    """
    verifier, kind_column = run.args.rewards.verifier, run.args.task.kind_column
    both = [row for row in rows if row.get("a_right_sample") and row.get("a_wrong_sample")]
    if both:
        print("\nHeld-out problems after training: a correct sample and a wrong one")
    columns = {"problem": "prompt", "answer": "answer", "right": "a_right_sample", "wrong": "a_wrong_sample"}
    for row in both[:4]:
        print("", *(f"{title:<8}{row[key].strip()!r}" for title, key in columns.items()), sep="\n")
    names = {"correct, likeliest response": f"eval/{verifier}"}
    for name in after:
        if name.startswith(prefix := f"eval/{verifier}_{kind_column}_"):
            names[f"    {kind_column} {name.removeprefix(prefix)}"] = name
    names |= {f"correct, samples: {name[5:]}": name for name in after if name.startswith("eval/pass@")}
    names |= {"tokens, likeliest response": "eval/length", "tokens, samples": "eval/sampled_length"}
    with (run.folder / "metrics.csv").open(newline="") as file:
        before = next(csv.DictReader(file))
    print(f"\n{f'{len(rows):,} held-out problems':<30}{'before':>9}{'after':>9}")
    for title, name in names.items():
        form = "{:.1f}" if name.endswith("length") else "{:.1%}"
        cells = [form.format(float(numbers[name])) if name in numbers else "-" for numbers in (before, after)]
        print(f"{title:<30}{cells[0]:>9}{cells[1]:>9}")
    print(
        "pass@k: one of k samples, or more, is correct.",
        f"It took {run.seconds() / 60:.1f} minutes.\n",
        f"solutions        {run.folder / 'evaluation.jsonl'}",
        f"samples          {run.folder / 'samples.jsonl'}",
        f"model            {run.models / 'policy'}",
        "curves           python ppo_rlhf/report",
        sep="\n",
    )
