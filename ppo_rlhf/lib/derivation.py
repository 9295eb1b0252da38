"""One update of chapter 1 in plain arithmetic: a function for each step, on lists of numbers.

train_policy.py computes with tensors, many episodes at a time. This module computes the same numbers slowly, one
token after the other, so that each can be followed with a pocket calculator. It shares no code with train_policy.py,
and adds up a sum where train_policy.py uses a recursion. A test compares the two. docs/chapter1.md shows one update
in these numbers.

A row is a list with a number for each token of a response; rows have equal lengths. Log-probs and the KL divergence
are in nats.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Sequence[float]
Rows = Sequence[Row]


# ---- Steps 4 and 5: score and rewards --------------------------------------------------------------------------


def score(raw_score: float, stopped: bool, penalty: float) -> float:
    """What counts as the score of a response: a penalty takes its place if there is no stop token."""
    return raw_score if stopped else penalty


def kl(logprobs: Row, ref_logprobs: Row) -> list[float]:
    """Each token's part of the KL divergence: log p - log p_ref. One sample of it, so it may be negative."""
    return [logprob - ref_logprob for logprob, ref_logprob in zip(logprobs, ref_logprobs, strict=True)]


def rewards(score: float, kl: Row, kl_coef: float) -> list[float]:
    """r_t = -beta * KL_t, and the score in addition on the last token."""
    last = len(kl) - 1
    return [-kl_coef * part + (score if t == last else 0.0) for t, part in enumerate(kl)]


# ---- Step 6: advantages and returns ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Whitened:
    """Rows that were whitened together, and the two numbers that all of them share."""

    rows: list[list[float]]
    mean: float
    deviation: float


def whiten(rows: Rows, *, keep_mean: bool) -> Whitened:
    """(x - mean) / deviation over all numbers of a group; keep_mean adds the mean back.

    The variance divides by how many numbers there are, not by one less, and 1e-8 is added to it.
    """
    numbers = [number for row in rows for number in row]
    mean = math.fsum(numbers) / len(numbers)
    deviation = math.sqrt(math.fsum((number - mean) ** 2 for number in numbers) / len(numbers) + 1e-8)
    shift = mean if keep_mean else 0.0
    return Whitened([[(number - mean) / deviation + shift for number in row] for row in rows], mean, deviation)


def temporal_differences(rewards: Row, values: Row, gamma: float) -> list[float]:
    """delta_t = r_t + gamma * V_(t+1) - V_t: how much better a token did than the critic expected.

    Nothing follows the last token, so its next value is 0.
    """
    next_values = [*values[1:], 0.0]
    return [r + gamma * later - now for r, later, now in zip(rewards, next_values, values, strict=True)]


def advantages(deltas: Row, gamma: float, lam: float) -> list[float]:
    """A_t = delta_t + (gamma * lambda) * delta_(t+1) + (gamma * lambda)^2 * delta_(t+2) + ... to the last token."""
    return [
        math.fsum((gamma * lam) ** ahead * delta for ahead, delta in enumerate(deltas[t:]))
        for t in range(len(deltas))
    ]


def returns(advantages: Row, values: Row) -> list[float]:
    """R_t = A_t + V_t: what the critic should have said. The advantages are not whitened."""
    return [advantage + value for advantage, value in zip(advantages, values, strict=True)]


# ---- Step 7: losses --------------------------------------------------------------------------------------------


def ratio(new_logprob: float, logprob: float) -> float:
    """How much likelier the token has become since it was sampled: p_new / p_old."""
    return math.exp(new_logprob - logprob)


def clip(number: float, low: float, high: float) -> float:
    return min(max(number, low), high)


@dataclass(frozen=True)
class Term:
    """What a token adds to a loss before the mean is taken: the larger of two numbers."""

    free: float  # without clipping
    clipped: float

    @property
    def loss(self) -> float:
        return max(self.free, self.clipped)

    @property
    def is_clipped(self) -> bool:
        """Whether clipping decides. Then the loss does not depend on the model, and the token has no gradient."""
        return self.clipped > self.free


def policy_term(ratio: float, advantage: float, cliprange: float) -> Term:
    """-A * ratio and -A * clip(ratio, 1 - range, 1 + range)."""
    return Term(-advantage * ratio, -advantage * clip(ratio, 1 - cliprange, 1 + cliprange))


def value_term(new_value: float, value: float, return_: float, cliprange_value: float) -> Term:
    """(V - R)^2 and (clip(V, V_old - range, V_old + range) - R)^2. The loss takes half of the mean."""
    clipped_value = clip(new_value, value - cliprange_value, value + cliprange_value)
    return Term((new_value - return_) ** 2, (clipped_value - return_) ** 2)


# ---- Step 8: the KL coefficient --------------------------------------------------------------------------------


def kl_error(kl: float, target: float) -> float:
    """How far the KL per response is off its target, as a share of it, at most 0.2 either way."""
    return clip(kl / target - 1, -0.2, 0.2)


def next_kl_coef(kl_coef: float, error: float, episodes: int, horizon: float) -> float:
    """beta * (1 + error * episodes / horizon)"""
    return kl_coef * (1 + error * episodes / horizon)


# ---- All steps -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Epoch:
    """What one pass over the episodes computes, before its optimiser step."""

    ratios: list[list[float]]
    policy_terms: list[list[Term]]
    value_terms: list[list[Term]]
    policy_loss: float
    value_loss: float
    total_loss: float


@dataclass(frozen=True)
class Update:
    """Every number of an update; lists have an entry for each episode."""

    scores: list[float]
    kl: list[list[float]]
    rewards: list[list[float]]
    whitened_rewards: Whitened
    deltas: list[list[float]]
    advantages: list[list[float]]
    returns: list[list[float]]
    whitened_advantages: Whitened
    epochs: list[Epoch]
    mean_kl: float  # per response
    kl_error: float
    next_kl_coef: float


def update(recorded: Mapping[str, Any], settings: Mapping[str, float]) -> Update:
    """All steps, for one group whose rewards are whitened and which is one minibatch.

    recorded: raw_scores and stopped, a number for each episode; logprobs, ref_logprobs and values, rows; epochs, each
    with the rows new_logprobs and new_values that the models say before its step. settings: those of train_policy.py.
    """
    old_logprobs, values = recorded["logprobs"], recorded["values"]
    kl_coef, gamma = settings["kl_coef"], settings["gamma"]
    scores = [
        score(*told, settings["penalty_reward_value"])
        for told in zip(recorded["raw_scores"], recorded["stopped"], strict=True)
    ]
    kl_rows = [kl(*rows) for rows in zip(old_logprobs, recorded["ref_logprobs"], strict=True)]
    reward_rows = [rewards(*row, kl_coef) for row in zip(scores, kl_rows, strict=True)]
    whitened_rewards = whiten(reward_rows, keep_mean=True)
    deltas = [temporal_differences(*rows, gamma) for rows in zip(whitened_rewards.rows, values, strict=True)]
    advantage_rows = [advantages(row, gamma, settings["lam"]) for row in deltas]
    return_rows = [returns(*rows) for rows in zip(advantage_rows, values, strict=True)]
    whitened_advantages = whiten(advantage_rows, keep_mean=False)
    old = (old_logprobs, values, whitened_advantages.rows, return_rows)
    mean_kl = math.fsum(part for row in kl_rows for part in row) / len(kl_rows)
    error = kl_error(mean_kl, settings["target"])
    return Update(
        *(scores, kl_rows, reward_rows, whitened_rewards, deltas, advantage_rows, return_rows, whitened_advantages),
        [losses(one["new_logprobs"], one["new_values"], *old, settings) for one in recorded["epochs"]],
        *(mean_kl, error, next_kl_coef(kl_coef, error, len(scores), settings["horizon"])),
    )


def losses(
    new_logprobs: Rows,
    new_values: Rows,
    logprobs: Rows,
    values: Rows,
    advantages: Rows,
    returns: Rows,
    settings: Mapping[str, float],
) -> Epoch:
    """Step 7 for one pass: both losses are means over all tokens of all episodes. advantages: whitened."""

    def each(function, *tables: Rows) -> list[list]:
        return [[function(*told) for told in zip(*rows, strict=True)] for rows in zip(*tables, strict=True)]

    def mean(terms: list[list[Term]]) -> float:
        found = [term.loss for row in terms for term in row]
        return math.fsum(found) / len(found)

    ratios = each(ratio, new_logprobs, logprobs)
    policy_terms = each(lambda *told: policy_term(*told, settings["cliprange"]), ratios, advantages)
    value_terms = each(lambda *told: value_term(*told, settings["cliprange_value"]), new_values, values, returns)
    policy_loss, value_loss = mean(policy_terms), 0.5 * mean(value_terms)
    total_loss = policy_loss + settings["vf_coef"] * value_loss
    return Epoch(ratios, policy_terms, value_terms, policy_loss, value_loss, total_loss)
