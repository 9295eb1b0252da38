"""The log of a run of chapter 3: metrics, evaluations, samples, traces, panels of its picture.

None of this changes what is learned. `setup` is a Setup of rlvr_policy.py, and
`progress` its Progress.

Marks like [V55] name an implementation detail. The original is verl-project/verl at commit b178a3c; files and lines
next to marks are the original's. See docs/details.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ppo_rlhf import rlvr_data, rlvr_math
from ppo_rlhf.lib import cli, lm, problems, processes, rewards, run, texts, traces

# Shares that are logged only after more arithmetic: mean squares of ratio - 1, of all tokens and of fresh rows.
SQUARED_RATIO_GAP, FRESH_RATIO_GAP = "square", "first"


@torch.no_grad()
def token_statistics(
    mb: rlvr_data.Batch, new_logprobs: Tensor, entropies: Tensor, tokens: int, **flags: Tensor
) -> dict[str, Tensor]:
    """A micro-batch's shares of means over the tokens of its minibatch. tokens: how many the minibatch has."""
    log_ratio = (new_logprobs - mb.logprobs).masked_fill(~mb.loss_mask, 0).double()
    square = (log_ratio.exp() - 1) ** 2
    numbers = flags | {"policy/kl_old_new": -log_ratio, "policy/approxkl_avg": 0.5 * log_ratio**2}
    numbers |= {"policy/entropy_avg": entropies, "val/ratio": log_ratio.exp(), SQUARED_RATIO_GAP: square}
    # Samples of an older policy do not start at a ratio of 1.
    numbers |= {FRESH_RATIO_GAP: square * mb.fresh.unsqueeze(1)}
    return {
        name: rlvr_math.aggregate(x.double(), mb.loss_mask, "token-mean", tokens=tokens)
        for name, x in numbers.items()
    }


def update_metrics(
    setup: Any,
    episodes: rlvr_data.Rollout,
    generated: list[rlvr_data.Rollout],
    batch: rlvr_data.Batch,
    steps: dict[str, Tensor],
    number: int,
) -> dict[str, float]:
    """The metrics of an update. Every process adds its shares, and all get the same numbers.

    generated: all that was sampled for it; nothing, if what was left over filled the batch. steps: what update
    returned. Raises a NumericalError if the numbers are impossible.
    """
    accelerator, generated = setup.accelerator, generated or [episodes]
    names = ("mask", "stopped", "groups", "parts", "raw_scores", "scores", "from_tool", "responses")
    one = {name: torch.cat([getattr(part, name) for part in generated]) for name in names}
    live, lengths, right = one["mask"].any(1), one["mask"].sum(1), one["parts"][:, 0] > 0
    # [V79] Scores, lengths and the like are of all that was generated, as is the count of episodes.
    of_responses = {
        "objective/scores": one["scores"],
        "objective/verifiable_correct_rate": right,
        **{f"objective/{name}_reward": one["parts"][:, i] for i, name in enumerate(setup.sources)},
        "val/sequence_lengths": lengths,
        "val/stop_token_rate": one["stopped"],
        "val/groups_zero_std": ~torch.cat([rlvr_data.scores_differ(part) for part in generated]),
        "val/groups_all_right": rlvr_math.by_group((right | ~live).double(), one["groups"], "amin"),
        "val/groups_all_wrong": rlvr_math.by_group((~right | ~live).double(), one["groups"], "amin"),
    }
    if hasattr(setup.args, "tools"):  # of rlvr_tools.py
        of_responses["val/tool_tokens"] = one["from_tool"].sum(1)
        of_responses["val/tool_calls"] = answered_calls(setup, one["responses"], one["from_tool"])
    # [V55] A row without a token is in no mean.
    # Where there is no reference, nobody knows the KL: 0 would say that the policy does not move.
    has_reference = has_penalty(setup.args.rewards)
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
    errors = (batch.returns - batch.values).double()
    of_values = {
        "val/mean": batch.values,
        "val/returns": batch.returns,
        "square_of_return": batch.returns.double() ** 2,
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
    counts = {name: accelerator.reduce(steps[name], "sum") for name in ("tokens", "right_tokens") if name in steps}
    live_steps = {name: (count > 0).nonzero()[:, 0] for name, count in counts.items()}  # numbers of steps
    shares = {}
    for name, x in steps.items():
        if not name.endswith("grad_norm"):
            inds = live_steps["right_tokens" if name == "loss/nll_avg" else "tokens"]
            shares[name] = x[inds].sum() / max(len(inds), 1)
    m |= processes.sum_over_processes(shares | {FRESH_RATIO_GAP: steps[FRESH_RATIO_GAP][0]}, accelerator)
    m |= {name: x.mean().item() for name, x in steps.items() if name.endswith("grad_norm")}  # the same everywhere
    off = m["val/ratio"] - 1 if len(live_steps["tokens"]) else 0
    m |= {"val/ratio_var": m[SQUARED_RATIO_GAP] - off**2, "val/first_ratio_gap": math.sqrt(m[FRESH_RATIO_GAP])}
    if critic:
        variance_of_errors = m["square_of_error"] - m["error"] ** 2
        variance_of_returns = m["square_of_return"] - m["val/returns"] ** 2
        # Returns that differ by no more than rounding have nothing that a critic could explain.
        vary = variance_of_returns > 1e-12 * (m["square_of_return"] + m["square_of_error"])
        m["val/explained_var"] = 1 - variance_of_errors / variance_of_returns if vary else 0.0
    everyone = accelerator.gather(lengths)
    m |= {"val/sequence_lengths_min": everyone.min().item(), "val/sequence_lengths_max": everyone.max().item()}
    left_out = () if critic else ("loss/value_avg", "val/clipfrac_avg")
    left_out += () if setup.args.rewards.kl_loss_coef else ("loss/kl_avg",)
    metrics = {name: m[name] for name in m if "/" in name and name not in left_out}
    processes.check_update(metrics, number, setup.args.dtype, gap="val/first_ratio_gap")
    return metrics


def answered_calls(setup: Any, responses: Tensor, from_tool: Tensor) -> Tensor:
    """How many calls the tool answered in each response (rows,), empty answers included.

    responses: (rows, response_length); from_tool: of that shape, the tokens that the tool wrote.
    """
    call_end = texts.one_token(setup.tokenizer, setup.args.tools.call_end, "call_end")
    ends = (responses == call_end) & ~from_tool  # (rows, response_length), each ends a call
    # A call at the very end of a response has no room for an answer, and one after max_calls ends the response.
    return ends[:, :-1].sum(1).clamp(max=setup.args.tools.max_calls)


def has_penalty(rewards: Any) -> bool:
    """Whether the KL is penalised, so that there is a reference."""
    return bool(rewards.kl_coef or rewards.kl_loss_coef)


PATIENCE = 3  # updates


def say_if_nothing_is_learned(setup: Any, this_run: run.Run) -> None:
    """Say once what to do if no response is ever correct, or if all responses to a problem always score the same."""
    rows, args, flag = this_run.rows, setup.args, cli.flag
    if len(rows) == PATIENCE and not any(row["objective/verifiable_correct_rate"] for row in rows):
        ends = sum(row["val/stop_token_rate"] for row in rows) / PATIENCE
        run.say(
            f"No response was correct in {PATIENCE} updates, and {ends:.0%} of them ended: try easier problems, a "
            f"longer {flag('task.response_length')} ({args.task.response_length}), {flag('task.examples')}, or "
            f"another {flag('task.prompt_suffix')}; samples.jsonl has responses, and {flag('rewards.verifier')} "
            f"{args.rewards.verifier} must be able to read them"
        )
        return
    is_equal = [row["val/groups_zero_std"] == 1 for row in rows]
    before = any(all(is_equal[i : i + PATIENCE]) for i in range(len(rows) - PATIENCE))
    if args.ppo.samples_per_prompt > 1 and len(rows) >= PATIENCE and all(is_equal[-PATIENCE:]) and not before:
        right = sum(row["objective/verifiable_correct_rate"] for row in rows[-PATIENCE:]) / PATIENCE
        run.say(
            f"In {PATIENCE} updates, all responses to a problem had the same score, so nothing was learned; "
            f"{right:.0%} were correct. Try {'harder' if right > 0.5 else 'easier'} problems, a larger "
            f"{flag('ppo.samples_per_prompt')} ({args.ppo.samples_per_prompt}), a higher {flag('task.temperature')} "
            f"({args.task.temperature:g}), or {flag('ppo.filter_groups')}"
        )


def run_metrics(
    setup: Any, this_run: run.Run, progress: Any, number: int, lr: float, rounds: int
) -> dict[str, float]:
    """How far the run is. rounds: of this update; 0 if what was left over filled the batch."""
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
    }


def sample_rows(setup: Any, episodes: rlvr_data.Rollout, batch: rlvr_data.Batch) -> list[dict[str, Any]]:
    """The first group, at most four of it, or three single responses: texts, scores, mean advantages of tokens."""
    n = setup.args.ppo.samples_per_prompt
    few = slice(0, min(n, 4) if n > 1 else 3)
    rows = episodes.rows(few)
    mean = batch.advantages[few].sum(1) / rows.mask.sum(1).clamp(min=1)
    columns = {
        "prompt": [setup.problems.texts[i] for i in rows.problems],
        "response": problems.to_texts(setup.tokenizer, rows.responses, setup.ids),
        "answer": [setup.problems.answers[i] for i in rows.problems],
        "score": rows.scores.tolist(),
        "advantage": mean.tolist(),
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def what_epochs_computed(
    episodes: rlvr_data.Rollout, batch: rlvr_data.Batch, ppo: Any, count: int, accelerator: Accelerator
) -> dict[str, dict[str, Tensor]]:
    """The other parts of a trace of the first `count` episodes: `epochs` and `statistics`, see lib/traces.py."""
    statistics = traces.of_epochs(batch.seen, count)
    epochs = {name: statistics.pop(name) for name in ("new_logprobs", "new_values", "exact_kl")}
    statistics["kept"] = batch.mask[:count].any(1)
    if ppo.advantage == "remax":
        statistics["baselines"] = episodes.baselines[:count]
    if ppo.advantage in rlvr_math.WHITENED if ppo.whiten_advantages is None else ppo.whiten_advantages:
        estimate = partial(rlvr_math.ESTIMATORS[ppo.advantage], values=batch.values, baselines=episodes.baselines)
        lambdas = {"lam": ppo.lam, "lam_alpha": ppo.lam_alpha}
        raw, _ = estimate(batch.rewards, batch.mask, episodes.groups, gamma=ppo.gamma, **lambdas)
        reduce = partial(accelerator.reduce, reduction="sum")
        mean, deviation = traces.moments(raw, batch.mask, reduce)  # with which the whole batch was whitened
        statistics |= {"advantage_mean": mean.expand(count), "advantage_deviation": deviation.expand(count)}
    return {"epochs": epochs, "statistics": statistics | lambdas_of(ppo, count)}


def lambdas_of(ppo: Any, count: int) -> dict[str, Tensor]:
    """For traces of `count` episodes: the lambda of the critic's targets, which value pretraining changes."""
    if ppo.critic_explains is None:
        return {}
    lam = ppo.lam if ppo.critic_lam is None else ppo.critic_lam
    return {"critic_lam": torch.full((count,), lam, dtype=torch.float64)}


def keep_trace(
    this_run: run.Run,
    setup: Any,
    number: int,
    episodes: rlvr_data.Rollout,
    batch: rlvr_data.Batch,
    found: dict[str, Tensor],
    **options: Any,
) -> None:
    """Write these episodes with all their numbers. found: more numbers of their tokens. options: of Run.trace."""
    names = (
        "logprobs",
        "sampler_logprobs",
        "ref_logprobs",
        *(["values"] if setup.args.ppo.advantage == "gae" else []),
        *(["exact_kl"] if setup.args.rewards.kl_estimator == "full" else []),
    )
    of_tokens = {name: getattr(episodes, name) for name in names}
    of_tokens |= {"kl": batch.kl, "rewards": batch.rewards, "mask": batch.loss_mask, "scored": episodes.mask}
    of_tokens |= {"weights": batch.weights}
    if setup.args.ppo.advantage == "gae":
        of_tokens["returns"] = batch.returns
    of_episodes = {name: getattr(episodes, name) for name in ("scores", "raw_scores", "stopped", "groups")}
    of_episodes |= {name: episodes.parts[:, i] for i, name in enumerate(setup.sources)}
    if hasattr(setup.args, "tools"):
        of_tokens["tool"] = episodes.from_tool
    tokens = episodes.query_responses.tensor_split([-episodes.mask.shape[1]], dim=1)
    answers = [setup.problems.answers[i] for i in episodes.problems.tolist()]
    told = (setup.tokenizer, setup.ids.pad, *tokens, of_tokens | found, of_episodes)
    this_run.trace(number, *told, answer=answers, **options)


def evaluate(setup: Any, actor_critic: Any, samples: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Solve the held-out problems greedily, and by so many samples. Returns means and rows for evaluation.jsonl.

    Every process must call this.
    """
    # [V98] All problems of the split in their order, each once; strict and flexible.   metric_utils.py#L420-L640
    args, task, held_out = setup.args, setup.args.task, setup.held_out
    of_hashes = ["gsm8k_strict", "gsm8k_flexible", "gsm8k_format"] if task.answer_format == "hashes" else []
    names, field = list(dict.fromkeys([args.rewards.verifier, *of_hashes])), "rewards.verifier"
    verifiers = [rewards.load_verifier(name, field, task.response_prefix, on_all_processes=True) for name in names]
    chunk, shape = setup.sizes.local_rollout_batch, (len(held_out), 1, task.response_length)
    sample = partial(actor_critic.sample, setup.ids)
    by = partial(problems.solve, held_out, sample, verifiers, setup.tokenizer, setup.ids, chunk, setup.accelerator)
    with actor_critic.sampling():
        (greedy,) = by(problems.GREEDY, torch.full(shape, 0.5, dtype=torch.float64))
        noise = [lm.keyed_generator(args.seed, "evaluate", number) for number in range(samples)]
        uniforms = [torch.rand(shape, generator=generator, dtype=torch.float64) for generator in noise]
        sampled = by(args.eval_temperature, torch.cat(uniforms, 1)) if samples else []
    return problems.evaluation(held_out, task.kind_column, names, greedy, sampled)


PANELS = {
    "right samples": ["objective/verifiable_correct_rate"],
    "held-out accuracy, greedy": [],  # `panels` fills these two in
    "held-out accuracy by kind, greedy": [],
    "score": ["objective/scores", "objective/rlhf_reward"],
    "KL from the reference (nats)": ["objective/kl"],
    "length (tokens)": ["val/sequence_lengths", "val/sequence_lengths_correct", "val/sequence_lengths_incorrect"],
    "share of responses that end": ["val/stop_token_rate", "eval/stopped"],
    "entropy of the policy (nats per token)": ["policy/entropy_avg"],
    "policy loss": ["loss/policy_avg"],
    "value loss": ["loss/value_avg"],
    "clipped share of tokens": ["policy/clipfrac_avg", "policy/clipfrac_low_avg", "val/clipfrac_avg"],
    "explained variance of returns": ["val/explained_var"],
    "groups without a signal": ["val/groups_zero_std", "val/groups_all_right", "val/groups_all_wrong"],
    "gradient norm": ["policy/grad_norm", "value/grad_norm"],
    "approximate KL of the update (nats)": ["policy/approxkl_avg"],
}


def panels(args: Any, verifiers: list[str], evaluation: list[str]) -> dict[str, list[str]]:
    """The panels of learning_curves.png. verifiers: of the evaluations, whose metrics have these names."""
    of_kind = f"eval/{verifiers[0]}_{args.task.kind_column}_"
    found = PANELS | {
        "held-out accuracy, greedy": [f"eval/{name}" for name in verifiers],
        "held-out accuracy by kind, greedy": [name for name in evaluation if name.startswith(of_kind)],
    }
    if args.ppo.samples_per_prompt == 1:
        found.pop("groups without a signal")
    if hasattr(args, "tools"):
        found["answers of the tool per response"] = ["val/tool_calls"]
    return found
