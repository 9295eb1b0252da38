"""The log of a run of chapter 3: metrics, evaluations, samples, traces.

None of this changes what is learned.

Marks like [V55] name an implementation detail. The original is verl-project/verl at commit b178a3c; files and lines
next to marks are the original's. See docs/reference.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ppo_rlhf.lib import rewards
from ppo_rlhf.lib.base import errors, processes
from ppo_rlhf.lib.base.errors import flag
from ppo_rlhf.lib.nets import pretrained
from ppo_rlhf.lib.scoring import tools
from ppo_rlhf.lib.services import run, traces
from ppo_rlhf.rlvr import algebra, arguments as rlvr_arguments, episodes as rlvr_episodes, problems
from ppo_rlhf.train_policy import keyed_generator

# Shares that are logged only after more arithmetic: mean squares of ratio - 1, of all tokens and of fresh rows.
SQUARED_RATIO_GAP, FRESH_RATIO_GAP = "square", "first"
# What is logged of the critic's steps. With minibatches of its own, it has another number of steps than the policy.


@torch.no_grad()
def token_statistics(
    mb: rlvr_episodes.Batch, new_logprobs: Tensor, entropies: Tensor, tokens: int, **flags: Tensor
) -> dict[str, Tensor]:
    """A micro-batch's shares of means over the tokens of its minibatch. tokens: how many the minibatch has."""
    log_ratio = (new_logprobs - mb.logprobs).masked_fill(~mb.loss_mask, 0)
    log_ratio = processes.widened(log_ratio)
    square = (log_ratio.exp() - 1) ** 2
    numbers = flags | {"policy/kl_old_new": -log_ratio, "policy/approxkl_avg": 0.5 * log_ratio**2}
    numbers |= {"policy/entropy_avg": entropies, "val/ratio": log_ratio.exp(), SQUARED_RATIO_GAP: square}
    # Samples of an older policy do not start at a ratio of 1.
    numbers |= {FRESH_RATIO_GAP: square * mb.fresh.unsqueeze(1)}
    return {
        name: algebra.aggregate(processes.widened(x), mb.loss_mask, "token-mean", tokens=tokens)
        for name, x in numbers.items()
    }


def update_metrics(
    setup: rlvr_episodes.Setup,
    number: int,
    *,
    episodes: rlvr_episodes.Rollout,
    generated: list[rlvr_episodes.Rollout],
    batch: rlvr_episodes.Batch,
    steps: dict[str, Tensor],
) -> dict[str, float]:
    """The metrics of update `number`. Every process adds its shares, and all get the same numbers.

    generated: all that was sampled for it; nothing, if what was left over filled the batch. steps: what update
    returned. Raises a NumericalError if the numbers are impossible.
    """
    accelerator, generated = setup.accelerator, generated or [episodes]
    names = ("mask", "stopped", "groups", "parts", "raw_scores", "scores", "from_tool", "responses")
    one = {name: torch.cat([getattr(part, name) for part in generated]) for name in names}
    live, lengths, right = (
        one["mask"].any(1),
        one["mask"].sum(1),
        rewards.is_right(one["parts"][:, 0], setup.args.rewards.verifier),
    )
    # Scores, lengths and the like are of all that was generated, as is the count of episodes.
    of_responses = {
        "objective/scores": one["scores"],
        "objective/verifiable_correct_rate": right,
        **{f"objective/{name}_reward": one["parts"][:, i] for i, name in enumerate(setup.sources)},
        "val/sequence_lengths": lengths,
        "val/stop_token_rate": one["stopped"],
        "val/groups_zero_std": ~torch.cat([rlvr_episodes.scores_differ(part) for part in generated]),
        "val/groups_all_right": algebra.by_group(processes.widened(right | ~live), one["groups"], "amin"),
        "val/groups_all_wrong": algebra.by_group(processes.widened(~right | ~live), one["groups"], "amin"),
    }
    if setup.args.tools:
        of_responses["val/tool_tokens"] = one["from_tool"].sum(1)
        of_responses["val/tool_calls"] = answered_calls(setup, one["responses"], one["from_tool"])
    # [V55] A row without a token is in no mean.
    # Where there is no reference, nobody knows the KL: 0 would say that the policy does not move.
    has_reference = setup.args.rewards.has_penalty
    of_episodes = {"objective/kl": batch.kl.sum(1)} if has_reference else {}
    of_episodes |= {
        "objective/non_score_reward": batch.non_score_rewards.sum(1),
        "objective/rlhf_reward": batch.rewards.masked_fill(~episodes.mask, 0).sum(1),
        "objective/entropy": -episodes.logprobs.masked_fill(~episodes.mask, 0).sum(1),
    }
    if setup.args.ppo.filter_groups:  # [V78] groups that were left over come from an older policy
        of_episodes["train/staleness_mean"] = number - episodes.versions
    of_tokens = {"objective/sampler_gap": (episodes.logprobs - episodes.sampler_logprobs).abs()}
    of_tokens |= {"objective/kl_per_token": batch.kl} if has_reference else {}
    of_advantages = {"val/advantages_mean": batch.advantages, "val/advantages_abs_mean": batch.advantages.abs()}
    errors = processes.widened(batch.returns - batch.values)
    of_values = {
        "val/mean": batch.values,
        "val/returns": batch.returns,
        "square_of_return": processes.widened(batch.returns) ** 2,
    }
    of_values |= {"error": errors, "square_of_error": errors**2}
    critic = "value/grad_norm" in steps
    m = processes.means_over(
        (live, of_responses),
        (episodes.mask.any(1), of_episodes),
        (episodes.mask, of_tokens),
        (batch.mask, of_advantages | (of_values if critic else {})),
        (live & right, {"val/sequence_lengths_correct": lengths}),
        (torch.ones_like(live), {"val/unscorable": ~live}),
        (live & ~right, {"val/sequence_lengths_incorrect": lengths}),
        accelerator=accelerator,
    )
    # [V55] A minibatch in which no token counts is in no mean either.
    names = [name for name in ("tokens", "right_tokens") if name in steps]
    counts = {name: accelerator.reduce(steps[name], "sum") for name in names}
    live_steps = {name: (count > 0).nonzero()[:, 0] for name, count in counts.items()}  # numbers of steps
    shares = {}
    for name, x in steps.items():
        if not name.endswith("grad_norm"):
            inds = live_steps["right_tokens" if name == "loss/nll_avg" else "tokens"]
            shares[name] = x[inds].sum() / max(len(inds), 1)
    shares |= {FRESH_RATIO_GAP: steps[FRESH_RATIO_GAP][0], "val/num_stop_token_ids": one["stopped"].sum()}
    m |= processes.sum_over_processes(shares, accelerator)
    m |= {name: x.mean().item() for name, x in steps.items() if name.endswith("grad_norm")}  # the same everywhere
    off = m["val/ratio"] - 1 if len(live_steps["tokens"]) else 0
    m |= {"val/ratio_var": m[SQUARED_RATIO_GAP] - off**2, "val/first_ratio_gap": math.sqrt(m[FRESH_RATIO_GAP])}
    if critic:
        variance_of_errors = m["square_of_error"] - m["error"] ** 2
        variance_of_returns = m["square_of_return"] - m["val/returns"] ** 2
        # Returns that differ by no more than rounding have nothing that a critic could explain.
        vary = variance_of_returns > 1e-12 * (m["square_of_return"] + m["square_of_error"])
        m["val/explained_var"] = 1 - variance_of_errors / variance_of_returns if vary else 0.0
    all_lengths = accelerator.gather(lengths)
    m |= {"val/sequence_lengths_min": all_lengths.min().item(), "val/sequence_lengths_max": all_lengths.max().item()}
    left_out = () if critic else ("loss/value_avg", "val/clipfrac_avg")
    left_out += () if setup.args.rewards.kl_loss_coef else ("loss/kl_avg",)
    metrics = {name: m[name] for name in m if "/" in name and name not in left_out}
    processes.check_update(metrics, number, setup.args.dtype, gap="val/first_ratio_gap")
    return metrics


def answered_calls(setup: rlvr_episodes.Setup, responses: Tensor, from_tool: Tensor) -> Tensor:
    """How many calls the tool answered in each response (rows,), empty answers included.

    responses: (rows, response_length); from_tool: of that shape, the tokens that the tool wrote.
    """
    call_end = pretrained.one_token(setup.tokenizer, setup.args.tools.call_end, "call_end")
    ends = (responses == call_end) & ~from_tool  # (rows, response_length), each ends a call
    # A call at the very end of a response has no room for an answer, and one after MAX_CALLS ends the response.
    return ends[:, :-1].sum(1).clamp(max=tools.MAX_CALLS)


PATIENCE = 3  # updates


def say_if_nothing_is_learned(setup: rlvr_episodes.Setup, this_run: run.Run) -> None:
    """Say once if nothing gets a score, nothing is correct, or all responses to a problem always score the same."""
    rows, args = this_run.rows, setup.args
    if not this_run.is_main:  # the others have no rows
        return
    if rows[-1]["val/unscorable"] == 1:
        if all(row["val/unscorable"] < 1 for row in rows[:-1]):
            errors.say(
                f"No response of update {len(rows)} got a score, so nothing was learned: {flag('rewards.verifier')} "
                f"{args.rewards.verifier}, or what else scores, returned None or NaN for each; samples.jsonl has some"
            )
        return
    if len(rows) == PATIENCE and not any(row["objective/verifiable_correct_rate"] for row in rows):
        ends = sum(row["val/stop_token_rate"] for row in rows) / PATIENCE
        errors.say(
            f"No response was correct in {PATIENCE} updates, and {ends:.0%} of them ended: try easier problems, a "
            f"longer {flag('task.response_length')} ({args.task.response_length}), or another "
            f"{flag('task.prompt_suffix')}; samples.jsonl has responses, and {flag('rewards.verifier')} "
            f"{args.rewards.verifier} must be able to read them"
        )
        return
    is_equal = [row["val/groups_zero_std"] == 1 for row in rows]
    before = any(all(is_equal[i : i + PATIENCE]) for i in range(len(rows) - PATIENCE))
    if args.ppo.samples_per_prompt > 1 and len(rows) >= PATIENCE and all(is_equal[-PATIENCE:]) and not before:
        right = sum(row["objective/verifiable_correct_rate"] for row in rows[-PATIENCE:]) / PATIENCE
        errors.say(
            f"In {PATIENCE} updates, all responses to a problem had the same score, so nothing was learned; "
            f"{right:.0%} were correct. Try {'harder' if right > 0.5 else 'easier'} problems, a larger "
            f"{flag('ppo.samples_per_prompt')} ({args.ppo.samples_per_prompt}), a higher {flag('task.temperature')} "
            f"({args.task.temperature:g}), or {flag('ppo.filter_groups')}"
        )


def run_metrics(
    setup: rlvr_episodes.Setup,
    this_run: run.Run,
    progress: rlvr_episodes.Progress,
    number: int,
    lr: float,
    rounds: int,
    training: float,
) -> dict[str, float]:
    """How far the run is. rounds: of this update; 0 if what was left over filled the batch. training: seconds of its
    epochs.
    """
    seconds, episode = this_run.seconds(), progress.pool.rounds * setup.sizes.round
    return {
        "objective/kl_coef": progress.controller.value,
        "lr": lr,
        "epoch": episode / setup.args.ppo.samples_per_prompt / len(setup.problems),
        "train/used_episodes": (number + 1) * setup.sizes.batch,
        "train/rounds": rounds,
        "episode": episode,
        "eps": episode / seconds,
        "time": seconds,
        "time/from_scratch": seconds,
        "time/training": training,
    }


def sample_rows(
    setup: rlvr_episodes.Setup, episodes: rlvr_episodes.Rollout, batch: rlvr_episodes.Batch
) -> list[dict[str, Any]]:
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


def numbers_of_trace(
    setup: rlvr_episodes.Setup,
    ppo: rlvr_arguments.PpoArgs,
    *,
    episodes: rlvr_episodes.Rollout,
    batch: rlvr_episodes.Batch,
) -> dict[str, Any]:
    """What a trace keeps of episodes, as the recorder of lib/services/traces.py takes it. ppo: of the update."""
    # Without a penalty there is no reference, and nothing to say about it.
    has_reference = setup.args.rewards.has_penalty
    names = ["query_responses", "logprobs", "sampler_logprobs", "scores", "raw_scores", "stopped", "groups"]
    names += ["ref_logprobs"] if has_reference else []
    names += ["exact_kl"] if setup.args.rewards.kl_estimator == "full" else []
    numbers: dict[str, Any] = {name: getattr(episodes, name) for name in names}
    names = ["rewards", "weights", "advantages"] + (["values", "returns"] if ppo.advantage == "gae" else [])
    names += ["kl"] if has_reference else []
    numbers |= {name: getattr(batch, name) for name in names} | {"mask": batch.loss_mask, "scored": episodes.mask}
    numbers["sources"] = {name: episodes.parts[:, i] for i, name in enumerate(setup.sources)}
    numbers |= {"tool": episodes.from_tool} if setup.args.tools else {}
    if ppo.critic_explains is not None:  # value pretraining changes the lambda of the critic's targets
        lam = ppo.lam if ppo.critic_lam is None else ppo.critic_lam
        numbers["statistics.critic_lam"] = torch.full((len(episodes.scores),), lam, dtype=torch.float64)
    return numbers | {"problem": episodes.problems.unsqueeze(1)}  # which is not kept, but names the answer


def record_trace(
    this_run: run.Run,
    setup: rlvr_episodes.Setup,
    number: int,
    *,
    episodes: rlvr_episodes.Rollout,
    batch: rlvr_episodes.Batch,
    raw_advantages: Callable[[], Tensor],
    kl_coef: float,
    ppo: rlvr_arguments.PpoArgs,
    network: nn.Module,
    again: Callable[..., tuple[rlvr_episodes.Rollout, rlvr_episodes.Batch]],
) -> None:
    """Write both traces of an update: whole groups of the batch, and of the same problems each time.

    raw_advantages: of the batch, before they were whitened. ppo: of this update. network: the policy after it. again:
    does steps 1 to 6 for a setup, a number of problems, and a function that changes the episodes before step 5. Every
    process must call this.
    """
    n, answers = ppo.samples_per_prompt, setup.problems.answers
    most = setup.sizes.local_batch // n
    prompts, kept = (min(math.ceil(k / n), most) for k in (traces.TRACED, setup.args.trace_episodes))

    def after_update(_: dict[str, Any], rows: slice) -> dict[str, Tensor]:
        old = batch.rows(rows)
        new = network(old.query_responses, old.responses, episodes.mask[rows], setup.ids.pad)
        _, clipped, _ = algebra.token_losses(
            new.logprobs, old.logprobs, old.advantages, mask=old.loss_mask, loss=ppo.loss, **ppo.bounds
        )
        ratio = torch.exp(new.logprobs - old.logprobs)
        return {"new_logprobs": new.logprobs, "entropies": new.entropies, "clipped": clipped, "ratio": ratio}

    # A user's function may count its calls or draw random numbers, so traces do not call it. In its place, all scores
    # are 0 at first, because NaN would leave all tokens out, and then unknown.
    known = rewards.keeps_nothing(setup.args.rewards.verifier, setup.args.rewards.format)

    def with_known_scores(episodes: rlvr_episodes.Rollout) -> rlvr_episodes.Rollout:
        names = () if known else ("scores", "raw_scores", "parts")
        nan = {name: torch.full_like(getattr(episodes, name), math.nan) for name in names}
        return dataclasses.replace(episodes, **nan)

    def numbers_again(_: float) -> dict[str, Any]:
        silent = (lambda prompts, *_, **__: torch.zeros(len(prompts)).double(), 0.0)
        sources = setup.sources if known else dict.fromkeys(setup.sources, silent)
        found, made = again(dataclasses.replace(setup, sources=sources), prompts, with_known_scores)
        numbers = numbers_of_trace(setup, ppo, episodes=found, batch=made)
        return {name: value for name, value in numbers.items() if known or name != "advantages"}

    numbers = numbers_of_trace(setup, ppo, episodes=episodes, batch=batch)
    numbers |= {"seen": batch.seen, "statistics.kept": batch.mask.any(1)}
    numbers |= {"statistics.baselines": episodes.baselines} if ppo.advantage == "remax" else {}
    if ppo.whitens:  # the mean and deviation of the whole batch
        reduce = partial(setup.accelerator.reduce, reduction="sum")
        mean, deviation = traces.moments(raw_advantages(), batch.mask, reduce)
        numbers["statistics.advantage_mean"] = mean.expand(len(batch.mask))
        numbers["statistics.advantage_deviation"] = deviation.expand(len(batch.mask))
    recorder = traces.Recorder(
        this_run.folder,
        this_run.accelerator,
        setup.tokenizer,
        setup.ids.pad,
        episodes=kept * n,
        after_update=after_update,
        answer_fixed_queries=numbers_again,
        numbers=dict,
        texts=lambda numbers: {"answer": [answers[i] for i in numbers["problem"].flatten().tolist()]},
    )
    recorder.record(number, numbers, kl_coef)


def evaluate(
    setup: rlvr_episodes.Setup, respond: Callable[..., rlvr_episodes.Sampled], *, with_samples: bool
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Solve the held-out problems greedily and, with_samples, by eval_samples of each, too.

    respond: of a sampler. Returns means and rows for evaluation.jsonl. Every process must call this.
    """
    # [V98] All problems of the split in their order, each once; strict and flexible.   metric_utils.py#L420-L640
    args, task, held_out, shaping = setup.args, setup.args.task, setup.held_out, setup.args.rewards
    of_hashes = ["gsm8k_strict", "gsm8k_flexible", "gsm8k_format"] if task.answer_format == "hashes" else []
    named = dict.fromkeys((shaping.verifier, *of_hashes), "rewards.verifier")
    named |= {shaping.format: "rewards.format"} if shaping.format else {}
    start_of = partial(problems.response_start, task)
    verifiers = [rewards.load_verifier(*pair, start_of, on_all_processes=True) for pair in named.items()]
    settings = {"tokenizer": setup.tokenizer, "ids": setup.ids, "accelerator": setup.accelerator}
    settings |= {"local_batch": setup.sizes.local_rollout_batch}
    solve = partial(problems.solve, held_out, respond, verifiers, **settings)
    shape = (len(held_out), 1, task.response_length)
    greedy_noise = torch.full(shape, 0.5, dtype=torch.float64)
    (greedy,), samples = solve(temperature=problems.GREEDY, uniforms=greedy_noise), []
    if with_samples and args.eval_samples:
        generators = [keyed_generator(args.seed, "evaluate", number) for number in range(args.eval_samples)]
        noise = [torch.rand(shape, generator=generator, dtype=torch.float64) for generator in generators]
        samples = solve(temperature=args.eval_temperature, uniforms=torch.cat(noise, 1))
    return problems.evaluation(held_out, task.kind_column, names=[*named], greedy=greedy, samples=samples)


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
    greedy = f"eval/{verifier}"
    of_kind, pass_at = f"{greedy}_{kind_column}_", "eval/pass@"
    names = {"correct, likeliest response": greedy}
    names |= {f"    {kind_column} {name[len(of_kind) :]}": name for name in after if name.startswith(of_kind)}
    names |= {f"correct, samples: {name[5:]}": name for name in after if name.startswith(pass_at)}
    names |= {"tokens, likeliest response": "eval/length", "tokens, samples": "eval/sampled_length"}
    print(f"\n{f'{len(rows):,} held-out problems':<30}{'before':>9}{'after':>9}")
    for said, name in names.items():
        form = "{:.1f}" if name.endswith("length") else "{:.1%}"
        cells = [form.format(numbers[name]) if name in numbers else "-" for numbers in (this_run.rows[0], after)]
        print(f"{said:<30}{cells[0]:>9}{cells[1]:>9}")
    places = {"learning curves": "learning_curves.png", "solutions": "evaluation.jsonl", "samples": "samples.jsonl"}
    print(
        "pass@k: one of k samples, or more, is correct.",
        f"It took {this_run.meta['wall_time'] / 60:.1f} minutes.\n",
        *(f"{said:<17}{this_run.folder / name}" for said, name in places.items()),
        f"model            {this_run.model_folder / 'policy'}",
        sep="\n",
    )
