"""Every number of a token, from its log-prob to its loss, in plain arithmetic: a function for each step.

The training scripts compute with tensors, many episodes at a time. This module computes the same numbers slowly, one
token after the other, so that each can be followed with a pocket calculator. It shares no code with the scripts, and
adds up a sum where they use a recursion. Tests compare the two. `derive` and `explain` do all steps, for an episode
of a trace of any chapter.

A row is a list with a number for each token of a response. Log-probs and the KL divergence are in nats.
"""

import math
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Sequence[float]


# ---- Steps 4 and 5: rewards -----------------------------------------------------------------------------------


def kl(logprobs: Row, ref_logprobs: Row) -> list[float]:
    """Each token's part of the KL divergence: log p - log p_ref. One sample of it, so it may be negative."""
    return [logprob - ref_logprob for logprob, ref_logprob in zip(logprobs, ref_logprobs, strict=True)]


def rewards(score: float, kl: Row, kl_coef: float) -> list[float]:
    """r_t = -beta * KL_t, and the score in addition on the last token."""
    last = len(kl) - 1
    return [-kl_coef * part + (score if t == last else 0.0) for t, part in enumerate(kl)]


# ---- Step 6: advantages and returns ----------------------------------------------------------------------------


def temporal_differences(rewards: Row, values: Row, gamma: float) -> list[float]:
    """delta_t = r_t + gamma * V_(t+1) - V_t: how much better a token did than the critic expected.

    Nothing follows the last token, so its next value is 0.
    """
    next_values = [*values[1:], 0.0][: len(values)]
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


def clip(number: float, low: float, high: float) -> float:
    return min(max(number, low), high)


def value_errors(new_value: float, value: float, return_: float, *, cliprange_value: float) -> tuple[float, float]:
    """(V - R)^2 and (clip(V, V_old - range, V_old + range) - R)^2. The token's loss is half of the larger.

    If that is the second, the loss does not depend on the model, and the token has no gradient.
    """
    clipped_value = clip(new_value, value - cliprange_value, value + cliprange_value)
    return (new_value - return_) ** 2, (clipped_value - return_) ** 2


# ---- Chapters 2 and 3: other forms of the same steps -----------------------------------------------------------


def kl_estimate(d: float, name: str) -> float:
    """An estimate of a token's part of the KL divergence from d = log p - log p_ref; k1+ has the value of k1."""
    return {"k1": d, "abs": abs(d), "k2": d * d / 2, "k3": math.expm1(min(-d, 20.0)) + d}[name.removesuffix("+")]


def group_advantage(total: float, totals: Row, lengths: Sequence[int], estimator: str) -> float:
    """The advantage of a response against its group. totals, lengths: of all responses of the group, this one too.

    A group of one, or one whose totals are all equal, teaches nothing: 0.
    """
    if max(totals) <= min(totals):
        return 0.0
    n, mean = len(totals), math.fsum(totals) / len(totals)
    if estimator == "rloo":
        return n / (n - 1) * (total - mean)
    if estimator == "grpo":
        return (total - mean) / (group_deviation(totals) + 1e-6)
    if estimator == "maxrl":
        return (total - mean) / (mean + 1e-6) if mean > least_mean(totals) else 0.0
    if estimator == "opo":
        return total - math.fsum(t * n for t, n in zip(totals, lengths, strict=True)) / sum(lengths)
    return total - mean  # dr_grpo, reinforce++-baseline


def least_mean(totals: Row) -> float:
    """What a mean must exceed for maxrl to divide by it: 0, but for rounding."""
    return 1e-5 * math.fsum(map(abs, totals)) / len(totals)


def group_deviation(totals: Row) -> float:
    """sqrt(sum of (R - mean)^2 / (n - 1)); 0 for a group of one."""
    mean = math.fsum(totals) / len(totals)
    return math.sqrt(math.fsum((total - mean) ** 2 for total in totals) / max(len(totals) - 1, 1))


def policy_lam(lam: float, alpha: float | None, length: int) -> float:
    """The lambda of the advantages of a response: lam, or 1 - 1 / (alpha * length), which is at least 0."""
    return lam if alpha is None else 1 - 1 / max(alpha * length, 1)


def is_masked(new_logprobs: Row, sampler_logprobs: Row, advantage: float, delta: float | None) -> bool:
    """Whether a token that is blamed has no policy loss, because its response became too unlikely. Rows: of that."""
    if delta is None or advantage >= 0:
        return False
    gaps = [old - new for new, old in zip(new_logprobs, sampler_logprobs, strict=True)]
    return math.fsum(gaps) / max(len(gaps), 1) > delta


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """A token's policy loss, before weights and divisor."""

    loss: float
    gradient: float  # by the token's new log-prob
    free: float  # without a clip
    clipped: float  # with the ordinary clip
    branch: str  # which of them counts: free, clipped or dual


def moved(new_logprob: float, ratio: float) -> float:
    """By how much the probability of a token has grown: p_new - p_old."""
    return math.exp(new_logprob) * (1 - 1 / ratio)


def token_loss(
    new_logprob: float,
    ratio: float,
    advantage: float,
    loss: str,
    low: float,
    high: float,
    dual_clip: float | None,
    trust_region: float,
) -> TokenLoss:
    """The forms of the policy loss: ppo and gspo, which has the ratio of the whole response; and the others."""
    if loss in ("ipo", "dppo"):
        change, free = moved(new_logprob, ratio), -advantage * ratio
        away = abs(change) if loss == "ipo" else change if advantage > 0 else -change
        if away > trust_region and advantage:
            return TokenLoss(loss=0.0, gradient=0.0, free=free, clipped=0.0, branch="clipped")
        return TokenLoss(loss=free, gradient=free, free=free, clipped=0.0, branch="free")
    inside = clip(ratio, 1 - low, 1 + high)
    if loss in ("reinforce", "cispo"):
        weight = inside if loss == "cispo" else 1.0
        found = -weight * advantage * new_logprob
        return TokenLoss(loss=found, gradient=-weight * advantage, free=found, clipped=found, branch="free")
    free, clipped = -advantage * ratio, -advantage * inside
    if dual_clip is not None and loss == "ppo" and advantage < 0 and max(free, clipped) > -advantage * dual_clip:
        return TokenLoss(loss=-advantage * dual_clip, gradient=0.0, free=free, clipped=clipped, branch="dual")
    if clipped > free:
        return TokenLoss(loss=clipped, gradient=0.0, free=free, clipped=clipped, branch="clipped")
    return TokenLoss(loss=free, gradient=-advantage * ratio, free=free, clipped=clipped, branch="free")


def divisor(aggregation: str, length: int, counts: Mapping[str, float]) -> float:
    """The divisor of a token's loss. length: of its response; counts: of the whole minibatch."""
    found = {
        "token-mean": counts["tokens"],
        "seq-mean-token-sum": counts["sequences"],
        "seq-mean-token-mean": counts["sequences"] * length,
        "seq-mean-token-sum-norm": counts["episodes"] * counts["length"],
    }
    return max(found[aggregation], 1)


# ---- One episode of a trace ------------------------------------------------------------------------------------

NAN = float("nan")


CHAPTERS = {"train": 1, "tldr": 2, "rlvr": 3}  # by the beginning of a script's name
WHITENED = ("gae", "gdpo", "reinforce++", "reinforce++-baseline")  # estimators, unless the arguments say otherwise


def settings_of(args: Mapping[str, Any], script: str) -> dict[str, Any]:
    """The arguments that a derivation needs, under one name in all chapters. args, script: of meta.json."""
    ppo, shaping = args.get("ppo", {}), args.get("rewards", {})
    estimator, loss, chosen = ppo.get("advantage", "gae"), ppo.get("loss", "ppo"), ppo.get("whiten_advantages")
    low, high = (ppo.get(name, ppo.get("cliprange", NAN)) for name in ("cliprange_low", "cliprange_high"))
    bound, way = ppo.get("cliprange_value", NAN), args.get("correction", "none")
    usual = {"gamma": NAN, "lam": NAN, "vf_coef": 1, "nll_coef": 0.0, "trust_region": 0.3}
    usual |= dict.fromkeys(("dual_clip", "lam_alpha", "critic_lam"))  # critic_lam: None is lam
    usual_of_shaping = {"kl_estimator": "k1", "kl_loss_coef": 0.0, "kl_loss_estimator": "k3"}
    names = {"verifier": "verifier", "format": "format", "trained": "reward_model"}
    switches = {"verifier": True, "format": shaping.get("format"), "trained": shaping.get("trained_model")}
    return {
        **{name: ppo.get(name, value) for name, value in usual.items()},
        **{name: shaping.get(name, value) for name, value in usual_of_shaping.items()},
        "chapter": CHAPTERS[script.split("_")[0]],
        "estimator": estimator,
        "loss": loss,
        "low": (1.0 if loss == "cispo" else 0.2) if low is None else low,
        "high": high,
        "cliprange_value": math.inf if bound is None else bound,
        "own_targets": any(ppo.get(name) is not None for name in ("critic_lam", "lam_alpha", "critic_explains")),
        "sources": {name: shaping.get(f"{key}_weight", 1.0) for key, name in names.items() if switches[key]},
        "aggregation": ppo.get("loss_aggregation", "token-mean"),
        "whiten_rewards": bool(ppo.get("whiten_rewards", False)),
        "whiten_advantages": estimator in WHITENED if chosen is None else chosen,
        "penalised": shaping.get("kl_coef", 1.0) > 0,
        # Chapter 3 loads no reference where nothing is penalised.
        "reference": not script.startswith("rlvr") or any(shaping.get(f"kl_{x}coef", 1.0) for x in ("", "loss_")),
        # An older policy may have sampled (rlvr/asynchronous.py).
        "correction": ("decoupled" if args.get("staleness") else "none") if way == "auto" else way,
        "level": args.get("correction_level", "token"),
        "cap": args.get("correction_cap", 0),
        "off_policy_mask": args.get("off_policy_mask"),
    }


def row_of(values: Sequence[float | None] | None, n: int) -> list[float]:
    return [NAN] * n if values is None else [NAN if value is None else value for value in values]


def marks(tokens: Mapping[str, Sequence[int]], n: int, chapter: int) -> dict[str, list[bool]]:
    """Which tokens pay for the KL, have a value and an advantage, are in the policy loss, and in the value loss."""
    names = ("mask", "value_mask", "scored")
    mask, value_mask, scored = ([bool(x) for x in tokens.get(name, [True] * n)] for name in names)
    if chapter == 3:
        return {"pays": scored, "valued": scored, "learns": mask, "value_learns": mask}
    # Chapter 1 has neither mask: everything counts.
    return {"pays": mask, "valued": value_mask, "learns": mask, "value_learns": value_mask}


def derive(
    episode: Mapping[str, Any], settings: Mapping[str, Any], epoch: int, group: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Every number of an episode's tokens, from what the models said: rows, and numbers of the whole episode.

    episode: as report.py reads it from a trace. epoch: 0-based. group: the episodes of its group, this one too. What
    follows from something that the trace lacks is NaN.
    """
    s, tokens, numbers, n = settings, episode["tokens"], episode["numbers"], len(episode["places"])
    shared = statistics_of(episode, epoch)
    said = {name: row_of(values[epoch], n) for name, values in episode.get("epochs", {}).items()}
    found: dict[str, Any] = {name: row_of(tokens.get(name), n) for name in ("logprobs", "ref_logprobs", "values")}
    found |= dict(shared) | marks(tokens, n, s["chapter"])
    valued = [t for t in range(n) if found["valued"][t]]
    last, beta = valued[-1] if valued else -1, shared["kl_coef"]

    # Steps 4 and 5: score and rewards.
    exact = row_of(tokens.get("exact_kl"), n)
    distances = kl(found["logprobs"], found["ref_logprobs"])
    pays = [s["reference"] and pays for pays in found["pays"]]
    found["kl"] = [
        (exact[t] if s["kl_estimator"] == "full" else kl_estimate(d, s["kl_estimator"])) if pays[t] else 0.0
        for t, d in enumerate(distances)
    ]
    found["score"] = number_of(numbers.get("scores"))
    found["rewards"] = [*rewards(found["score"], found["kl"][: last + 1], beta), *found["kl"][last + 1 :]]
    found["is_last"] = [t == last for t in range(n)]
    found["is_inner"] = [found["valued"][t] and t != last for t in range(n)]
    if not episode.get("statistics", {}).get("kept", 1):  # rejected whole, so it has no advantages
        found["valued"], valued = [False] * n, []
    used = found["rewards"]
    if s["whiten_rewards"]:
        mean, deviation = shared["reward_mean"], shared["reward_deviation"]
        used = found["whitened_rewards"] = [(reward - mean) / deviation + mean for reward in used]
    found["used_rewards"] = used

    # Step 6: advantages and returns.
    found |= advantages_of(episode, found, valued, settings, group)
    found["advantages"] = found["raw_advantages"]
    if s["whiten_advantages"]:
        mean, deviation = shared["advantage_mean"], shared["advantage_deviation"]
        found["advantages"] = [(advantage - mean) / deviation for advantage in found["raw_advantages"]]

    # Step 7: losses.
    found["is_right"] = [learns and number_of(numbers.get("verifier")) > 0 for learns in found["learns"]]
    return found | losses_of(found, said, row_of(tokens.get("sampler_logprobs"), n), tokens, shared, settings)


def number_of(value: float | None) -> float:
    return NAN if value is None else value


def statistics_of(episode: Mapping[str, Any], epoch: int) -> dict[str, float]:
    """The numbers that an episode shares with others in an epoch."""
    names = ("kl_coef", "reward_mean", "reward_deviation", "advantage_mean", "advantage_deviation", "tokens")
    names += ("values", "sequences", "episodes", "length", "baselines", "right_tokens", "critic_lam")
    shared = episode.get("statistics", {})
    values = {name: shared.get(name) for name in names}
    values = {name: value[epoch] if isinstance(value, list) else value for name, value in values.items()}
    return {{"values": "value_count"}.get(name, name): number_of(value) for name, value in values.items()}


def advantages_of(
    episode: Mapping[str, Any],
    found: Mapping[str, Any],
    valued: list[int],
    settings: Mapping[str, Any],
    group: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Step 6 before whitening, over the tokens that have a value."""
    n, estimator = len(episode["places"]), settings["estimator"]

    def spread(values: Row) -> list[float]:
        row = [0.0] * n
        for t, value in zip(valued, values, strict=True):
            row[t] = value
        return row

    rewards, values = ([found[name][t] for t in valued] for name in ("used_rewards", "values"))
    if estimator == "gae":
        deltas = temporal_differences(rewards, values, settings["gamma"])
        lam = policy_lam(settings["lam"], settings["lam_alpha"], len(valued))
        # In value pretraining, the trace says which lambda the targets had.
        chosen, recorded = settings["critic_lam"], found["critic_lam"]
        critic_lam = (settings["lam"] if chosen is None else chosen) if recorded != recorded else recorded
        raw, of_targets = (advantages(deltas, settings["gamma"], x) for x in (lam, critic_lam))
        rows = {"deltas": deltas, "raw_advantages": raw, "of_targets": of_targets}
        rows |= {"returns": returns(of_targets, values)}
        numbers = {"policy_lam": lam, "critic_lam": critic_lam, "valued_tokens": len(valued)}
        return {name: spread(row) for name, row in rows.items()} | numbers
    if estimator in ("reinforce++", "remax"):
        gamma = settings["gamma"] if estimator == "reinforce++" else 1.0
        sums = advantages(rewards, gamma, 1.0)
        less = found["baselines"] if estimator == "remax" else 0.0
        return {"sums": spread(sums), "raw_advantages": spread([x - less for x in sums])}
    # An episode that is left out whole, as one without a score is, is not compared.
    kept = [other for other in group if other.get("statistics", {}).get("kept", 1)]
    if estimator == "gdpo":
        scaled = scaled_sources(episode, kept, settings["sources"])
        total = math.fsum(weight * scaled[f"scaled_{name}"] for name, weight in settings["sources"].items())
        return scaled | {"raw_advantages": spread([total] * len(valued))}
    totals = [total_of(other) for other in kept] or [NAN]
    lengths = [sum(marks(other["tokens"], len(other["places"]), 3)["valued"]) for other in kept] or [0]
    total = math.fsum(rewards)
    advantage = group_advantage(total, totals, lengths=lengths, estimator=estimator)
    mean = math.fsum(totals) / len(totals)
    weighted = math.fsum(t * k for t, k in zip(totals, lengths, strict=True)) / max(sum(lengths), 1)
    of_group = {"total": total, "group_size": len(totals), "group_mean": mean, "group_weighted_mean": weighted}
    equal = max(totals) <= min(totals) or (estimator == "maxrl" and mean <= least_mean(totals))
    of_group |= {"totals": totals, "group_deviation": group_deviation(totals), "equal": equal}
    return of_group | {"raw_advantages": spread([advantage] * len(valued))}


def scaled_sources(
    episode: Mapping[str, Any], group: Sequence[Mapping[str, Any]], weights: Mapping[str, float]
) -> dict[str, float]:
    """What each source of the score says of an episode, mean and deviation of its group, and the scaled number."""
    found = {}
    for name, weight in weights.items():
        own, *rest = (number_of(one["numbers"].get(name)) for one in (episode, *group))
        of_group = rest or [own]
        found |= {name: own, f"weight_{name}": weight, f"deviation_{name}": group_deviation(of_group)}
        found[f"mean_{name}"] = math.fsum(of_group) / len(of_group)
        found[f"scaled_{name}"] = group_advantage(own, of_group, lengths=[1] * len(of_group), estimator="grpo")
    return found


def total_of(episode: Mapping[str, Any]) -> float:
    """The sum of an episode's recorded rewards."""
    rewards = row_of(episode["tokens"].get("rewards"), len(episode["places"]))
    counts = marks(episode["tokens"], len(rewards), 3)["valued"]
    return math.fsum(reward for reward, count in zip(rewards, counts, strict=True) if count)


def losses_of(
    found: Mapping[str, Any],
    said: Mapping[str, list[float]],
    sampler_logprobs: list[float],
    tokens: Mapping[str, Any],
    shared: Mapping[str, float],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Step 7 for one epoch: ratio, branch, gradient and shares of the losses. said: by the models in that epoch."""
    s, n = settings, len(found["logprobs"])
    new, new_values = (said.get(name, [NAN] * n) for name in ("new_logprobs", "new_values"))
    old = sampler_logprobs if s["correction"] == "bypass" else found["logprobs"]
    learns = [t for t in range(n) if found["learns"][t]]
    gaps = [new[t] - old[t] for t in range(n)]
    ratios = [math.exp(clip(gap, -20, 20)) if gap == gap else NAN for gap in gaps]
    sequence = math.fsum(gaps[t] for t in learns) / max(len(learns), 1) if learns else 0.0
    if s["loss"] == "gspo":
        ratios = [math.exp(min(sequence, 10.0)) if sequence == sequence else NAN] * n
    terms = [
        token_loss(*x, **{name: s[name] for name in ("loss", "low", "high", "dual_clip", "trust_region")})
        for x in zip(new, ratios, found["advantages"], strict=True)
    ]
    weights = row_of(tokens.get("weights", [1.0] * n), n)
    if s["correction"] == "bypass" and s["loss"] == "reinforce":
        total = math.fsum(gaps[t] for t in learns)
        logs = gaps if s["level"] == "token" else [total] * n
        weights = [min(math.exp(clip(gap, -20, 20)), s["cap"]) if gap == gap else NAN for gap in logs]
    of_response = [[row[t] for t in learns] for row in (new, sampler_logprobs)]
    masked = [is_masked(*of_response, advantage, s["off_policy_mask"]) for advantage in found["advantages"]]
    factors = [0.0 if out else w for out, w in zip(masked, weights, strict=True)]
    counts = {name: shared[name] for name in ("tokens", "sequences", "episodes", "length")}
    divided = divisor(s["aggregation"], max(len(learns), 1), counts)
    value_divided = shared["value_count"] if s["chapter"] < 3 else divided
    kl_name, kl_gaps = s["kl_loss_estimator"], kl(new, found["ref_logprobs"])
    exact = said.get("exact_kl", [NAN] * n)
    kl_losses = [
        exact[t]
        if kl_name == "full"
        else kl_estimate(kl_gaps[t], kl_name) * (math.exp(clip(gaps[t], -20, 20)) if kl_name.endswith("+") else 1.0)
        for t in range(n)
    ]
    of_values = zip(new_values, found["values"], found.get("returns", [NAN] * n), strict=True)
    errors = [value_errors(*x, cliprange_value=s["cliprange_value"]) for x in of_values]
    value_losses = [0.5 * max(pair) for pair in errors]
    value_is_clipped = [clipped > free for free, clipped in errors]
    branches = ("free", "clipped", "dual")

    def both(mask: str, flags: Sequence[bool]) -> list[bool]:
        return [counts_here and flag for counts_here, flag in zip(found[mask], flags, strict=True)]

    return {
        **{"old_logprobs": old, "new_logprobs": new, "new_values": new_values, "ratio": ratios, "weights": weights},
        "moved": [moved(*x) for x in zip(new, ratios, strict=True)],
        "log_ratio": [sequence] * n if s["loss"] == "gspo" else gaps,
        "clipped_ratio": [clip(ratio, 1 - s["low"], 1 + s["high"]) for ratio in ratios],
        **{f"is_{name}": both("learns", [term.branch == name for term in terms]) for name in branches},
        **{name: [getattr(term, name) for term in terms] for name in ("loss", "free", "clipped", "gradient")},
        "divisor": divided,
        "is_kept": both("learns", [not out for out in masked]),
        "is_masked": both("learns", masked),
        "share": [w * term.loss / divided for w, term in zip(factors, terms, strict=True)],
        "nll_share": [-s["nll_coef"] * logprob / max(shared["right_tokens"], 1) for logprob in new],
        "kl_loss": kl_losses,
        "kl_share": [
            s["kl_loss_coef"] * (1.0 if kl_name == "full" else w) * part / divided
            for w, part in zip(weights, kl_losses, strict=True)
        ],
        "value_free": [free for free, _ in errors],
        "value_clipped": [clipped for _, clipped in errors],
        "value_loss": value_losses,
        "value_is_free": both("value_learns", [not is_clipped for is_clipped in value_is_clipped]),
        "value_is_clipped": both("value_learns", value_is_clipped),
        "value_divisor": value_divided,
        "value_share": [loss / value_divided for loss in value_losses],
    }


# ---- Lines: formula, numbers, sentence -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Step:
    """A line of a derivation. In `numbers`, {x} is of the token, {next_x} of the next one that has a value, or 0."""

    result: str  # what it gives, under the name that `derive` has for it
    title: str
    formula: str
    numbers: str
    sentence: str
    where: tuple[str, ...]  # of each chapter, or of all: `file function mark`
    recorded: str = ""  # the recorded number that the result must equal
    only: str = ""  # a flag of the token, without which the line is left out
    divisor: str = ""  # by which rounding grows


GROUP_FORMS = {  # place, formula, numbers, sentence
    "grpo": (
        "grpo V33",
        "A_t = (R − μ) / (σ + 10⁻⁶)",
        "({total} − {group_mean}) / ({group_deviation} + 10⁻⁶)",
        "The deviation of the group is the unit, so a rare success counts for more.",
    ),
    "dr_grpo": (
        "dr_grpo V36",
        "A_t = R − μ",
        "{total} − {group_mean}",
        "The advantage is not divided by the deviation.",
    ),
    "reinforce++-baseline": (
        "reinforce_pp_baseline V40",
        "A_t = R − μ",
        "{total} − {group_mean}",
        "The batch is whitened after that.",
    ),
    "maxrl": (
        "maxrl V109",
        "A_t = (R − μ) / (μ + 10⁻⁶)",
        "({total} − {group_mean}) / ({group_mean} + 10⁻⁶)",
        "The mean, the share of correct responses, is the unit, so success at a hard prompt counts for more.",
    ),
    "rloo": (
        "rloo V38",
        "A_t = n / (n − 1) · (R − μ)",
        "{group_size} / ({group_size} − 1) · ({total} − {group_mean})",
        "This is the total minus the mean of the other responses.",
    ),
    "opo": (
        "opo V42",
        "A_t = R − Σ |y_i| R_i / Σ |y_i|",
        "{total} − {group_weighted_mean}",
        "In this mean, each response of the group is weighted by its length.",
    ),
}
KL_FORMS = {
    "k1": ("KL_t = log π(y_t) − log ρ(y_t)", "{logprobs} − {ref_logprobs}"),
    "abs": ("KL_t = |log π(y_t) − log ρ(y_t)|", "|{logprobs} − {ref_logprobs}|"),
    "k2": ("KL_t = ½ (log π(y_t) − log ρ(y_t))²", "½ ({logprobs} − {ref_logprobs})²"),
    "k3": (
        "KL_t = ρ/π − 1 + log π(y_t) − log ρ(y_t)",
        "exp({ref_logprobs} − {logprobs}) − 1 + {logprobs} − {ref_logprobs}",
    ),
    "full": ("KL_t = Σ_v π(v) (log π(v) − log ρ(v))", "{kl}"),
}
DIVISORS = {
    "token-mean": "tokens of the minibatch",
    "seq-mean-token-sum": "responses of the minibatch",
    "seq-mean-token-mean": "responses of the minibatch, times the tokens of this one",
    "seq-mean-token-sum-norm": "episodes of the minibatch, times the greatest length",
}


# Of each step: what it gives, its title, and other fields; then formula, numbers, sentence and places, a line each.
# `when` has flags that must be set, or with ! must not be. `steps` fills in what begins with $.
STEPS = """\
logprobs: log-prob
    log π(y_t | x, y_<t)
    {logprobs}
    How likely the policy found the token when it sampled it, in nats, read from the model.
    train_policy.py train D25, tldr/policy.py respond T36, rlvr/policy.py read_responses V76
ref_logprobs: log-prob, reference; when reference
    log ρ(y_t | x, y_<t)
    {ref_logprobs}
    How likely the model that training started from finds the same token.
    train_policy.py response_logprobs D47, tldr/policy.py reference_logprobs T35, rlvr/policy.py logprobs V57
kl: KL; only pays; recorded kl; when reference
    $kl_formula
    $kl_numbers
    $kl_sentence
    train_policy.py compute_rewards D51, tldr/policy.py compute_rewards T42, rlvr/algebra.py kl_estimate V48
rewards: reward; only is_inner; recorded rewards
    $inner_formula
    $inner_numbers
    $inner_sentence
    train_policy.py compute_rewards D52, tldr/policy.py compute_rewards T43, rlvr/algebra.py compute_rewards V27
rewards: reward; only is_last; recorded rewards
    $last_formula
    $last_numbers
    $last_sentence
    train_policy.py compute_rewards D52, tldr/policy.py compute_rewards T43, rlvr/algebra.py compute_rewards V27
whitened_rewards: whitened reward; only valued; divisor reward_deviation; when whiten_rewards
    r'_t = (r_t − μ_r) / σ_r + μ_r
    ({rewards} − {reward_mean}) / {reward_deviation} + {reward_mean}
    Rewards of all tokens that are whitened together get the deviation 1 and keep their mean μ_r.
    train_policy.py group_advantages D55, tldr/policy.py compute_advantages T44
values: value; only valued; when gae
    V_t
    {values}
    $value_sentence
    train_policy.py forward D26, tldr/policy.py forward T38, rlvr/policy.py forward V30
deltas: temporal difference; only valued; when gae
    δ_t = $symbol + γ · V_t+1 − V_t
    $reward + {gamma} · {next_values} − {values}
    How much better, or below 0 worse, things went than the critic had expected.
    train_policy.py compute_gae D56, tldr/policy.py compute_gae T44, rlvr/algebra.py gae V31
policy_lam: lambda; only valued; when gae lam_alpha
    λ = 1 − 1 / (α · |y|)
    max(0, 1 − 1 / ({lam_alpha} · {valued_tokens}))
    The longer the response, the closer to 1, so that its first token still hears of the score.
    rlvr/algebra.py gae V106
raw_advantages: advantage; only valued; recorded $recorded; when gae
    A_t = δ_t + γ λ · A_t+1
    {deltas} + {gamma} · {policy_lam} · {next_raw_advantages}
    A token also gets credit for what follows it, and less the further away that is.
    train_policy.py compute_gae D56, tldr/policy.py compute_gae T44, rlvr/algebra.py gae V31
of_targets: advantage for the critic; only valued; when gae own_targets
    G_t = δ_t + γ λ_V · G_t+1
    {deltas} + {gamma} · {critic_lam} · {next_of_targets}
    The critic's targets have a lambda of their own.
    rlvr/algebra.py gae V105
returns: return; only valued; recorded returns; when gae
    R_t = $target + V_t
    {of_targets} + {values}
    The critic should have said this.
    train_policy.py compute_gae D56, tldr/policy.py compute_gae T44, rlvr/algebra.py gae V31
sums: rewards from here on; only valued; when reinforce++
    G_t = r_t + γ · G_t+1
    {rewards} + {gamma} · {next_sums}
    Without a critic, a token gets everything that came after it.
    rlvr/algebra.py reinforce_pp V39
raw_advantages: advantage; only valued; recorded $recorded; when reinforce++
    A_t = G_t
    {sums}
    This is the advantage before whitening.
    rlvr/algebra.py reinforce_pp V39
sums: rewards from here on; only valued; when remax
    G_t = r_t + G_t+1
    {rewards} + {next_sums}
    Without a critic, a token gets everything that came after it.
    rlvr/algebra.py remax V41
raw_advantages: advantage; only valued; recorded $recorded; when remax
    A_t = G_t − s_greedy
    {sums} − {baselines}
    The score of the greedy response to the same prompt shows what was to be expected.
    rlvr/algebra.py remax V41
scaled_SOURCE: SOURCE, scaled; when gdpo
    z = (s − μ) / (σ + 10⁻⁶)
    ({SOURCE} − {mean_SOURCE}) / ({deviation_SOURCE} + 10⁻⁶)
    What this source says of the response, with the mean and deviation of the group.
    rlvr/algebra.py gdpo V112
raw_advantages: advantage; only valued; recorded $recorded; when gdpo
    A_t = Σ w z
    $sources
    All tokens of the response share it. A point is worth more where it is rare in the group.
    rlvr/algebra.py gdpo V112
total: total; when group
    R = Σ_t r_t
    {total}
    This is the whole reward of the response.
    rlvr/algebra.py centred_scores V32
group_mean: mean of the group; when group
    μ = Σ_i R_i / n
    ({totals}) / {group_size}
    The other responses to the same prompt show what was to be expected.
    rlvr/algebra.py centred_scores V32
group_deviation: deviation of the group; when group
    σ = √(Σ_i (R_i − μ)² / (n − 1))
    {group_deviation}
    It is 0 if all responses did equally well.
    rlvr/algebra.py $group_place
raw_advantages: advantage; only differ; recorded $recorded; when group
    $group_formula
    $group_numbers
    All tokens of the response share it. $group_sentence
    rlvr/algebra.py $group_place
raw_advantages: advantage; only equal; recorded $recorded; when group
    A_t = 0
    0
    $equal_sentence
    rlvr/algebra.py centred_scores V34
advantages: whitened advantage; only learns; recorded advantages; divisor advantage_deviation; when whiten_advantages
    A'_t = (A_t − μ_A) / σ_A
    ({raw_advantages} − {advantage_mean}) / {advantage_deviation}
    Advantages of all tokens that are whitened together get mean 0 and deviation 1, so that the size of a step does
    not depend on the scale of the scores.
    train_policy.py group_advantages D58, tldr/policy.py whiten T44, rlvr/algebra.py whiten V45
new_logprobs: new log-prob; only learns
    log π_new(y_t)
    {new_logprobs}
    The policy said this in the chosen epoch, before its optimiser step.
    train_policy.py ppo_update D62, tldr/policy.py ppo_update T48, rlvr/policy.py update V77
ratio: ratio; only learns; when gspo
    ratio = exp(mean over y of log π_new − log π)
    exp({log_ratio})
    The response has become this many times as likely, averaged over its tokens.
    train_policy.py policy_loss D60, tldr/policy.py policy_loss T45, rlvr/algebra.py token_losses V65
ratio: ratio; only learns; when !gspo !reinforce
    ratio_t = π_new(y_t) / π(y_t)
    exp({new_logprobs} − {old_logprobs})
    The token has become this many times as likely since it was sampled.
    $losses V58
loss: policy loss of the token; only learns; when reinforce
    −A_t · log π_new(y_t)
    −{advantages} · {new_logprobs}
    There is no ratio and no clip.
    $losses V64
loss: policy loss of the token; only learns; when cispo
    −clip(ratio_t) · A_t · log π_new(y_t)
    −{clipped_ratio} · {advantages} · {new_logprobs}
    The clipped ratio is only a weight, so every token keeps its gradient.
    $losses V66
moved: change of the probability; only learns; when trust_region
    π_new(y_t) − π(y_t)
    exp({new_logprobs}) − exp({old_logprobs})
    By how much the probability has grown since the token was sampled.
    $losses V113
loss: policy loss of the token; only is_free; when trust_region
    −A'_t · ratio_t
    −{advantages} · {ratio}
    The probability is still in the trust region.
    $losses V113
loss: policy loss of the token; only is_clipped; when trust_region
    0
    0
    The probability has left the trust region, so the token does not count.
    $losses V113
loss: policy loss of the token; only is_free; when clip
    max(−A'_t · ratio_t, −A'_t · clip(ratio_t, 1 − ε, 1 + ε))
    max({free}, {clipped})
    The first of the two counts: the loss is not clipped, and the token has a gradient.
    $losses V58
loss: policy loss of the token; only is_clipped; when clip
    max(−A'_t · ratio_t, −A'_t · clip(ratio_t, 1 − ε, 1 + ε))
    max({free}, {clipped})
    The second counts: the ratio has left its range in the direction that pays. The loss is constant.
    $losses V58
loss: policy loss of the token; only is_dual; when dual_clip
    −A'_t · c
    −{advantages} · {dual_clip}
    A token of a bad response that became much more likely has a constant loss (dual clip).
    $losses V59
gradient: gradient; only is_free
    ∂loss / ∂log π_new = $slope_formula
    $slope_numbers
    Descent makes the token more likely where this is below 0, and less likely where it is above.
    $losses $slope_mark
gradient: gradient; only is_clipped; when zeroed
    ∂loss / ∂log π_new = 0
    0
    In this epoch, the token teaches the policy nothing.
    $losses $slope_mark
gradient: gradient; only is_dual; when dual_clip
    ∂loss / ∂log π_new = 0
    0
    In this epoch, the token teaches the policy nothing.
    $losses $slope_mark
weights: importance weight; only learns; when weighted
    w_t = min(π / π_sampler, cap)
    {weights}
    Older weights have sampled the response. This factor corrects for it.
    train_policy.py policy_loss D60, tldr/policy.py policy_loss T45, rlvr/algebra.py importance_weights V85
share: share of the policy loss; only $shares
    $weight_formula / N
    $weight_numbers / {divisor}
    N is the divisor of the whole minibatch: $divisor.
    train_policy.py policy_loss D61, tldr/policy.py policy_loss T45, rlvr/algebra.py aggregate V60
share: share of the policy loss; only is_masked; when off_policy_mask
    0
    0
    The response became so unlikely that it is no longer blamed (off-policy mask).
    train_policy.py policy_loss D60, tldr/policy.py policy_loss T45, rlvr/algebra.py off_policy_mask V110
nll_share: share of the likelihood loss; only is_right; when nll_coef
    −μ · log π_new(y_t) / N_right
    −{nll_coef} · {new_logprobs} / {right_tokens}
    The response is right, so each of its tokens is made more likely, whatever its advantage.
    train_policy.py policy_loss D60, tldr/policy.py policy_loss T45, rlvr/policy.py micro_batch_loss V108
kl_loss: KL in the loss; only learns; when kl_loss_coef
    $kl_loss_formula
    $kl_loss_numbers
    In the loss, only the slope of this estimate acts.
    train_policy.py policy_loss D60, tldr/policy.py policy_loss T45, rlvr/policy.py kl_in_loss V49
kl_share: share of the KL loss; only learns; when kl_loss_coef
    β_loss · KL_t / N
    {kl_loss_coef} · {kl_loss} / {divisor}
    It has the divisor of the policy loss.
    train_policy.py policy_loss D61, tldr/policy.py policy_loss T45, rlvr/algebra.py aggregate V60
new_values: new value; only value_learns; when gae
    V_new
    {new_values}
    The critic said this in the chosen epoch, before its optimiser step.
    $value_losses
value_loss: value loss of the token; only value_is_free; when gae
    ½ max((V_new − R_t)², (clip(V_new, V_t − ε_V, V_t + ε_V) − R_t)²)
    ½ max({value_free}, {value_clipped})
    The first error counts: the critic has a gradient here.
    $value_losses
value_loss: value loss of the token; only value_is_clipped; when gae
    ½ max((V_new − R_t)², (clip(V_new, V_t − ε_V, V_t + ε_V) − R_t)²)
    ½ max({value_free}, {value_clipped})
    The second error counts: the critic has moved as far towards the return as it may.
    $value_losses
value_share: share of the value loss; only value_learns; when gae
    value loss_t / N_V
    {value_loss} / {value_divisor}
    N_V is what the minibatch's value loss is divided by.$value_weight
    $value_losses
"""


def steps(settings: Mapping[str, Any]) -> list[Step]:
    """The lines of a run's derivations, in the order of the algorithm."""
    flags, found = flags_of(settings), []
    for block in re.split(r"\n(?=\S)", string.Template(STEPS).substitute(texts_of(settings)).strip()):
        for source in settings["sources"] if "SOURCE" in block else ("",):
            head, formula, numbers, *sentence, where = map(str.strip, block.replace("SOURCE", source).split("\n"))
            (result, title), *fields = (head.split(": ", 1), *(field.split(" ", 1) for field in head.split("; ")[1:]))
            known = dict(fields)
            if all((flag.strip("!") in flags) != flag.startswith("!") for flag in known.pop("when", "").split()):
                step = Step(
                    result=result,
                    title=title.split("; ")[0].replace("_", " "),
                    formula=formula,
                    numbers=numbers,
                    sentence=" ".join(sentence),
                    where=tuple(where.split(", ")),
                    **known,
                )
                found.append(step)
    return found


def flags_of(s: Mapping[str, Any]) -> set[str]:
    """What `when` can ask for."""
    loss, bypass = s["loss"], s["correction"] == "bypass"
    flags = {
        "group": s["estimator"] in GROUP_FORMS,
        "trust_region": loss in ("ipo", "dppo"),
        "clip": loss in ("ppo", "gspo"),
        "zeroed": loss in ("ppo", "gspo", "ipo", "dppo"),
        "dual_clip": loss == "ppo" and s["dual_clip"] is not None,
        "weighted": s["correction"] == "decoupled" or (bypass and loss == "reinforce"),
    }
    flags |= {name: s[name] is not None for name in ("lam_alpha", "off_policy_mask")}
    as_they_are = ("reference", "whiten_rewards", "whiten_advantages", "own_targets", "nll_coef", "kl_loss_coef")
    flags |= {name: s[name] for name in as_they_are}
    return {s["estimator"], loss, *(name for name, on in flags.items() if on)}


def texts_of(s: Mapping[str, Any]) -> dict[str, str]:
    """What $ stands for."""
    full, penalised, weighted = s["kl_estimator"] == "full", s["penalised"], "weighted" in flags_of(s)
    found = dict(zip(("kl_formula", "kl_numbers"), KL_FORMS[s["kl_estimator"]], strict=True))
    found["kl_sentence"] = (
        "The exact divergence is a sum over the whole vocabulary, which the trace does not hold."
        if full
        else "It is above 0 where the policy finds the token likelier than the reference does."
    ) + (" The reward penalises it." if penalised else " β is 0, so the reward does not penalise it.")
    rewards = ("r_t = −β · KL_t", "−{kl_coef} · {kl}", "r_t = −β · KL_t + s", "−{kl_coef} · {kl} + {score}")
    names = ("inner_formula", "inner_numbers", "last_formula", "last_numbers")
    found |= zip(names, rewards if s["reference"] else ("r_t = 0", "0", "r_t = s", "{score}"), strict=True)
    found["inner_sentence"] = (
        "A token that moves the policy away from the reference pays for it."
        if penalised
        else "β is 0, so a token before the last has no reward."
    )
    found["last_sentence"] = (
        "The score s judges the whole response. It is on the step after the last token, if there is one."
        if s["chapter"] == 2
        else "The score s judges the whole response, so it is added once, at the end."
    )
    found["reward"], found["symbol"] = ("{whitened_rewards}", "r'_t") if s["whiten_rewards"] else ("{rewards}", "r_t")
    found["value_sentence"] = (
        "Before the token was written, the critic expected this sum of rewards from here on."
        if s["chapter"] == 1
        else "The critic, a network of its own, expected this sum of rewards before the token was written."
    )
    found["recorded"] = "" if s["whiten_advantages"] else "advantages"
    found["target"] = "G_t" if s["own_targets"] else "A_t"
    found["sources"] = " + ".join(f"{{weight_{name}}} · {{scaled_{name}}}" for name in s["sources"])
    names = ("group_place", "group_formula", "group_numbers", "group_sentence")
    found |= dict(zip(names, GROUP_FORMS.get(s["estimator"], ("", "", "", "")), strict=True))
    found["equal_sentence"] = (
        "All responses did equally well, or their mean is not above 0."
        if s["estimator"] == "maxrl"
        else "All responses of the group did equally well, so there is nothing to learn from their differences."
    )
    found["losses"] = "train_policy.py policy_loss D60, tldr/policy.py policy_loss T45, rlvr/algebra.py token_losses"
    found["value_losses"] = (
        "train_policy.py value_loss D59, tldr/policy.py value_loss T45, rlvr/algebra.py value_losses V69"
    )
    slopes = {
        "reinforce": ("−A_t", "−{advantages}"),
        "cispo": ("−clip(ratio_t) · A_t", "−{clipped_ratio} · {advantages}"),
    }
    slope = slopes.get(s["loss"], ("−A'_t · ratio_t", "−{advantages} · {ratio}"))
    found |= dict(zip(("slope_formula", "slope_numbers"), slope, strict=True))
    found["slope_mark"] = "V113" if s["loss"] in ("ipo", "dppo") else "V58"
    found["shares"] = "learns" if s["off_policy_mask"] is None else "is_kept"
    found["weight_formula"] = "w_t · loss_t" if weighted else "loss_t"
    found["weight_numbers"] = "{weights} · {loss}" if weighted else "{loss}"
    found["divisor"] = DIVISORS[s["aggregation"]]
    name = s["kl_loss_estimator"]
    formula, numbers = KL_FORMS[name.removesuffix("+")]
    formula, numbers = formula.replace("π", "π_new"), numbers.replace("{logprobs}", "{new_logprobs}")
    if name.endswith("+"):
        formula, numbers = f"{formula}, times ratio_t", f"({numbers}) · exp({{new_logprobs}} − {{old_logprobs}})"
    found |= {"kl_loss_formula": formula, "kl_loss_numbers": "{kl_loss}" if name == "full" else numbers}
    found["value_weight"] = f" The loss then counts {s['vf_coef']:g} times." if s["chapter"] < 3 else ""
    return found


@dataclass(frozen=True, kw_only=True)
class Line:
    """A step with the numbers of one token."""

    step: Step
    numbers: str  # filled in
    result: str  # the value in digits that follow from those of `numbers`
    value: float
    difference: float  # from the recorded number; 0 if none is recorded
    wrong: bool  # whether the difference is larger than rounding


ROUNDING = 2e-5  # of the largest number in a line, and of 0.1 at least


def explain(
    episode: Mapping[str, Any],
    settings: Mapping[str, Any],
    epoch: int,
    tokens: Iterable[int],
    group: Sequence[Mapping[str, Any]] = (),
) -> Iterator[tuple[list[Line], list[str]]]:
    """The derivation of each token's numbers, and the titles of lines that lack one. Arguments as of `derive`."""
    found, its_steps = derive(episode, settings, epoch, group), steps(settings)
    rows = episode["tokens"] | {name: values[epoch] for name, values in episode.get("epochs", {}).items()}
    rows = {name: row_of(row, len(episode["places"])) for name, row in rows.items()}
    for t in tokens:
        yield explain_token(its_steps, numbers_of(found, settings, t), {name: row[t] for name, row in rows.items()})


def explain_token(
    steps: Sequence[Step], numbers: Mapping[str, Any], recorded: Mapping[str, float]
) -> tuple[list[Line], list[str]]:
    """numbers: all of the token, as derived. recorded: those that the run has kept."""
    lines, missing = [], []
    for step in steps:
        if step.only and not numbers.get(step.only):
            continue
        names = re.findall(r"{(\w+)}", step.numbers)
        used = [x for name in names for x in (numbers[name] if isinstance(numbers[name], list) else [numbers[name]])]
        value = numbers[step.result]
        if any(x is None or x != x for x in [*used, value]):
            missing.append(step.title)
            continue
        expected = recorded.get(step.recorded, NAN)
        size = max(map(abs, [*used, value, 0.1])) / min(numbers.get(step.divisor, 1), 1)
        difference = 0.0 if expected != expected else value - expected
        divisor = re.search(r"/ \(?{(\w+)}", step.numbers)
        result, places = digits_of(
            value,
            used,
            adds=re.search(" [−+] ", step.numbers) is not None,
            divisor=numbers[divisor[1]] if divisor else 1.0,
        )
        filled = step.numbers.format(**{name: written(numbers[name], places) for name in names})
        wrong = abs(difference) > ROUNDING * size
        lines.append(Line(step=step, numbers=filled, result=result, value=value, difference=difference, wrong=wrong))
    return lines, list(dict.fromkeys(missing))


def numbers_of(found: Mapping[str, Any], settings: Mapping[str, Any], t: int) -> dict[str, Any]:
    """Numbers and flags of token t, of the next token that has a value, of its episode, and of the run."""
    names = ("gamma", "lam", "lam_alpha", "dual_clip", "kl_loss_coef", "nll_coef")
    numbers = {name: settings[name] for name in names}
    # A tool's tokens have no values. The next number is that of the token after them.
    following = next((later for later in range(t + 1, len(found["valued"])) if found["valued"][later]), None)
    for name, value in found.items():
        row = isinstance(value, list) and name != "totals"
        numbers[name] = value[t] if row else value
        if row:
            numbers[f"next_{name}"] = 0.0 if following is None else value[following]
    equal = bool(found.get("equal"))
    return numbers | {"equal": equal and numbers["valued"], "differ": not equal and numbers["valued"]}


def digits_of(value: float, used: Sequence[float], *, adds: bool, divisor: float) -> tuple[str, int]:
    """The result of a line in four digits, and how many decimals its numbers need, so that a reader finds these four.

    adds: whether numbers are added or subtracted. Of two that are nearly equal, or if the divisor is small, more
    digits are shown; a difference that is nothing but rounding is 0.
    """
    if adds and abs(value) < 1e-6 * max(map(abs, used)):
        return "0", 0
    return decimal(value, 4), decimals(value, 5) + decimals(min(abs(divisor), 1), 1) if adds else 0


def decimals(value: float, digits: int) -> int:
    """The decimals that so many significant digits take."""
    return max(0, digits - 1 - math.floor(math.log10(abs(value)))) if abs(value) > 1e-12 else 0


def decimal(value: float, digits: int, places: int = 0) -> str:
    """So many significant digits, or decimals if these are more; without zeros at the end, and never as 1e-5."""
    text = f"{value:.{min(max(decimals(value, digits), places), decimals(value, 8))}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text.replace("-0", "0") if float(text) == 0 else text


def written(value: float | list[float], places: int = 0) -> str:
    """Five digits, or more if that many decimals need them; in brackets if negative."""
    if isinstance(value, list):
        return " + ".join(written(one, places) for one in value)
    text = decimal(value, 5, places)
    return f"({text})" if text.startswith("-") else text
