"""The log of a run of chapter 3: metrics, evaluations, samples.

None of this changes what is learned.

Marks like [V55] name an implementation detail. The original is verl-project/verl at commit b178a3c; files and lines
next to marks are the original's. See docs/reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ppo_rlhf.lib import pretrained, processes, run
from ppo_rlhf.rlvr import algebra, problems, rewards, tool_functions
from ppo_rlhf.rlvr.algebra import Batch, Rollout
from ppo_rlhf.rlvr.arguments import Setup
from ppo_rlhf.train_policy import keyed_generator

# Shares that are logged only after more arithmetic: mean squares of ratio - 1, of all tokens and of fresh rows.
SQUARED_RATIO_GAP, FRESH_RATIO_GAP = "square", "first"


@torch.no_grad()
def token_statistics(
    mb: Batch, new_logprobs: Tensor, entropies: Tensor, tokens: int, flags: dict[str, Tensor]
) -> dict[str, Tensor]:
    """A micro-batch's shares of means over the tokens of its minibatch. tokens: how many the minibatch has.

    flags: more numbers of tokens (micro_batch, response_length), under the names of their means.
    """
    log_ratio = processes.widened((new_logprobs - mb.logprobs).masked_fill(~mb.loss_mask, 0))
    square = (log_ratio.exp() - 1) ** 2
    numbers = flags | {
        "policy/kl_old_new": -log_ratio,
        "policy/approxkl_avg": 0.5 * log_ratio**2,
        "policy/entropy_avg": entropies,
        "val/ratio": log_ratio.exp(),
        SQUARED_RATIO_GAP: square,
        FRESH_RATIO_GAP: square * mb.fresh.unsqueeze(1),  # samples of an older policy do not start at a ratio of 1
    }
    return {
        name: algebra.aggregate(processes.widened(x), mb.loss_mask, "token-mean", tokens=tokens)
        for name, x in numbers.items()
    }


def update_metrics(
    setup: Setup,
    number: int,
    *,
    episodes: Rollout,
    generated: list[Rollout],
    batch: Batch,
    steps: dict[str, Tensor],
) -> dict[str, float]:
    """The metrics of update `number`. Every process adds its shares, and all get the same numbers.

    generated: all that was sampled for it; nothing, if what was left over filled the batch. steps: what update
    returned. Raises a NumericalError if the numbers are impossible.
    """
    accelerator, critic = setup.accelerator, "value/grad_norm" in steps
    # Scores, lengths and the like are of all that was generated, as is the count of episodes.
    sampled = algebra.join(generated or [episodes], setup.ids.pad)
    live, lengths = sampled.mask.any(1), sampled.mask.sum(1)
    right = rewards.is_right(sampled.parts[:, 0], setup.args.rewards.verifier)
    response_numbers = {
        "objective/scores": sampled.scores,
        "objective/verifiable_correct_rate": right,
        **{f"objective/{name}_reward": sampled.parts[:, i] for i, name in enumerate(setup.sources)},
        "val/sequence_lengths": lengths,
        "val/stop_token_rate": sampled.stopped,
        "val/groups_zero_std": ~algebra.scores_differ(sampled.raw_scores, live, sampled.groups),
        "val/groups_all_right": algebra.by_group(processes.widened(right | ~live), sampled.groups, "amin"),
        "val/groups_all_wrong": algebra.by_group(processes.widened(~right | ~live), sampled.groups, "amin"),
    }
    if setup.args.tools:
        response_numbers["val/tool_tokens"] = sampled.from_tool.sum(1)
        response_numbers["val/tool_calls"] = answered_calls(setup, sampled.responses, sampled.from_tool)
    episode_numbers = {
        "objective/non_score_reward": batch.non_score_rewards.sum(1),
        "objective/rlhf_reward": batch.rewards.masked_fill(~episodes.mask, 0).sum(1),
        "objective/entropy": -episodes.logprobs.masked_fill(~episodes.mask, 0).sum(1),
    }
    token_numbers = {"objective/sampler_gap": (episodes.logprobs - episodes.sampler_logprobs).abs()}
    # Where there is no reference, nobody knows the KL: 0 would say that the policy does not move.
    if setup.args.rewards.has_penalty:
        episode_numbers["objective/kl"] = batch.kl.sum(1)
        token_numbers["objective/kl_per_token"] = batch.kl
    if setup.args.ppo.filter_groups:  # [V78] groups that were left over come from an older policy
        episode_numbers["train/staleness_mean"] = number - episodes.versions
    loss_numbers = {"val/advantages_mean": batch.advantages, "val/advantages_abs_mean": batch.advantages.abs()}
    if critic:
        gaps = processes.widened(batch.returns - batch.values)
        loss_numbers |= {
            "val/mean": batch.values,
            "val/returns": batch.returns,
            "square_of_return": processes.widened(batch.returns) ** 2,
            "error": gaps,
            "square_of_error": gaps**2,
        }
    # [V55] A row without a token is in no mean.
    metrics = processes.means_over(
        (live, response_numbers),
        (episodes.mask.any(1), episode_numbers),
        (episodes.mask, token_numbers),
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
    shares[FRESH_RATIO_GAP] = steps[FRESH_RATIO_GAP][0]
    shares["val/num_stop_token_ids"] = sampled.stopped.sum()
    metrics |= processes.sum_over_processes(shares, accelerator)
    off = metrics["val/ratio"] - 1 if len(live_steps["tokens"]) else 0
    metrics["val/ratio_var"] = metrics[SQUARED_RATIO_GAP] - off**2
    metrics["val/first_ratio_gap"] = math.sqrt(metrics[FRESH_RATIO_GAP])
    if critic:
        variance_of_errors = metrics["square_of_error"] - metrics["error"] ** 2
        variance_of_returns = metrics["square_of_return"] - metrics["val/returns"] ** 2
        # Returns that differ by no more than rounding have nothing that a critic could explain.
        vary = variance_of_returns > 1e-12 * (metrics["square_of_return"] + metrics["square_of_error"])
        metrics["val/explained_var"] = 1 - variance_of_errors / variance_of_returns if vary else 0.0
    all_lengths = accelerator.gather(lengths)
    metrics["val/sequence_lengths_min"] = all_lengths.min().item()
    metrics["val/sequence_lengths_max"] = all_lengths.max().item()
    left_out = set() if critic else {"loss/value_avg", "val/clipfrac_avg"}
    if not setup.args.rewards.loss_kl[0]:
        left_out.add("loss/kl_avg")
    logged = {name: value for name, value in metrics.items() if "/" in name and name not in left_out}
    processes.check_update(logged, number, setup.args.dtype)
    return logged


def answered_calls(setup: Setup, responses: Tensor, from_tool: Tensor) -> Tensor:
    """How many calls the tool answered in each response (rows,), empty answers included.

    responses: (rows, response_length); from_tool: of that shape, the tokens that the tool wrote.
    """
    call_end = pretrained.one_token(setup.tokenizer, setup.args.tools.call_end, "call_end")
    ends = (responses == call_end) & ~from_tool  # (rows, response_length), each ends a call
    # A call at the very end of a response has no room for an answer, and one after MAX_CALLS ends the response.
    return ends[:, :-1].sum(1).clamp(max=tool_functions.MAX_CALLS)


def run_metrics(
    setup: Setup,
    this_run: run.Run,
    number: int,
    *,
    kl_coef: float,
    rounds: int,
    all_rounds: int,
    training: float,
) -> dict[str, float]:
    """How far the run is.

    rounds: of generation for this update; 0 if what was left over filled the batch. all_rounds: since the run began.
    training: seconds of the update's epochs.
    """
    seconds, episode = this_run.seconds(), all_rounds * setup.sizes.batch
    return {
        "objective/kl_coef": kl_coef,
        "lr": setup.args.ppo.lr,
        "epoch": episode / setup.args.ppo.samples_per_prompt / len(setup.problems),
        "train/used_episodes": (number + 1) * setup.sizes.batch,
        "train/rounds": rounds,
        "episode": episode,
        "eps": episode / seconds,
        "time": seconds,
        "time/from_scratch": seconds,
        "time/training": training,
    }


def sample_rows(setup: Setup, episodes: Rollout, batch: Batch) -> list[dict[str, Any]]:
    """The first group, at most four of it, or three single responses: texts, scores, mean advantages of tokens."""
    n = setup.args.ppo.samples_per_prompt
    printed = slice(0, min(n, 4) if n > 1 else 3)
    rows = episodes.rows(printed)
    mean = batch.advantages[printed].sum(1) / rows.mask.sum(1).clamp(min=1)
    columns = {
        "prompt": [setup.problems.texts[i] for i in rows.problems],
        "response": problems.to_texts(setup.tokenizer, rows.responses, setup.ids),
        "answer": [setup.problems.answers[i] for i in rows.problems],
        "score": rows.scores.tolist(),
        "advantage": mean.tolist(),
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def evaluate(
    setup: Setup, respond: Callable[..., tuple[Tensor, Tensor]], *, with_samples: bool
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Solve the held-out problems greedily and, with_samples, by eval_samples of each, too.

    respond: of a sampler. Returns means and rows for evaluation.jsonl. Every process must call this.
    """
    # [V98] All problems of the split in their order, each once; strict and flexible.   metric_utils.py#L420-L640
    args, task, held_out, shaping = setup.args, setup.args.task, setup.held_out, setup.args.rewards
    fields = {shaping.verifier: "rewards.verifier"}
    if task.answer_format == "hashes":
        for name in ("gsm8k_strict", "gsm8k_flexible", "gsm8k_format"):
            fields.setdefault(name, "rewards.verifier")
    if shaping.format:
        fields[shaping.format] = "rewards.format"
    start_of = partial(problems.response_start, task)
    solve = partial(
        problems.solve,
        held_out,
        respond,
        [
            rewards.load_verifier(name, field, start_of, trial=held_out.known_of([0, -1]), on_all_processes=True)
            for name, field in fields.items()
        ],
        tokenizer=setup.tokenizer,
        ids=setup.ids,
        local_batch=setup.sizes.local_rollout_batch,
        accelerator=setup.accelerator,
    )
    shape = (len(held_out), 1, task.response_length)
    (greedy,) = solve(temperature=problems.GREEDY, uniforms=torch.full(shape, 0.5, dtype=torch.float64))
    samples = []
    if with_samples and args.eval_samples:
        generators = [keyed_generator(args.seed, "evaluate", number) for number in range(args.eval_samples)]
        noise = [torch.rand(shape, generator=generator, dtype=torch.float64) for generator in generators]
        samples = solve(temperature=args.eval_temperature, uniforms=torch.cat(noise, 1))
    return problems.evaluation(held_out, task.kind_column, names=[*fields], greedy=greedy, samples=samples)


def report(
    this_run: run.Run, verifier: str, kind_column: str, after: dict[str, float], rows: list[dict[str, Any]]
) -> None:
    """Print in plain words what has become of the held-out problems, and where to read more.

    after: the last evaluation, rows: of it; the result before the first update is in the first row of the metrics.
    """
    if not this_run.is_main:
        return
    both = [row for row in rows if row.get("a_right_sample") and row.get("a_wrong_sample")]
    columns = {"problem": "prompt", "answer": "answer", "right": "a_right_sample", "wrong": "a_wrong_sample"}
    shown = [{title: row[key].strip() for title, key in columns.items()} for row in both[:4]]
    if shown:
        run.print_table("Held-out problems after training: a correct sample and a wrong one", shown)
    names = {"correct, likeliest response": f"eval/{verifier}"}
    for name in after:
        if name.startswith(prefix := f"eval/{verifier}_{kind_column}_"):
            names[f"    {kind_column} {name.removeprefix(prefix)}"] = name
    names |= {f"correct, samples: {name[5:]}": name for name in after if name.startswith("eval/pass@")}
    names |= {"tokens, likeliest response": "eval/length", "tokens, samples": "eval/sampled_length"}
    print(f"\n{f'{len(rows):,} held-out problems':<30}{'before':>9}{'after':>9}")
    for title, name in names.items():
        form = "{:.1f}" if name.endswith("length") else "{:.1%}"
        cells = [form.format(numbers[name]) if name in numbers else "-" for numbers in (this_run.rows[0], after)]
        print(f"{title:<30}{cells[0]:>9}{cells[1]:>9}")
    places = {"learning curves": "learning_curves.png", "solutions": "evaluation.jsonl", "samples": "samples.jsonl"}
    print(
        "pass@k: one of k samples, or more, is correct.",
        f"It took {this_run.meta['wall_time'] / 60:.1f} minutes.\n",
        *(f"{title:<17}{this_run.folder / name}" for title, name in places.items()),
        f"model            {this_run.model_folder / 'policy'}",
        sep="\n",
    )
