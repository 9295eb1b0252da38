"""Which KL penalty and which place of the score made the rewards of a dump: see doctor.py.

A penalty is an estimate of two arrays of log-probs, at some tokens. A score is a number of each row, at some tokens.
Each of these is a table of what is right, what is a choice and what is a mistake, and their products are tried.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ppo_rlhf.check import forms
from ppo_rlhf.check.doctor import WIRING, Arrays, Candidate, Doctor, largest, nice, root_mean_square, wiring
from ppo_rlhf.check.faults import Fault
from ppo_rlhf.report.derivation import KL_FORMS, with_signs, written

Table = list[tuple[Any, tuple[Fault, ...]]]

# Mistakes of token_rewards in the book, by what they change.
PENALTIES = ("penalty of the response at its end", "penalty per length", "score in place of the penalty")
PLACES = (
    "score in the last column",
    "score at the number of tokens",
    "score on every token",
    "score broadcast along the tokens",
    "score of an empty response",
)
# Estimates from the log-probs p and q, without the mask.
ESTIMATES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "max({0} - ref_logprobs, 0)": (lambda p, q: (p - q).clamp(min=0), "KL clamped at 0"),
    "exp({0}) - exp(ref_logprobs)": (lambda p, q: p.exp() - q.exp(), "KL of probabilities"),
    "exp({0} - ref_logprobs) - 1": (lambda p, q: torch.expm1(p - q), "KL of probabilities"),
    "exp({0}) * ({0} - ref_logprobs)": (lambda p, q: p.exp() * (p - q), "KL weighted by the probability"),
    "exp(ref_logprobs) * ({0} - ref_logprobs)": (lambda p, q: q.exp() * (p - q), "KL weighted by the probability"),
    "{0}": (lambda p, q: p, "a penalty without the reference"),
}
# What every token pays, from the estimates x of single tokens and their number n.
TOTALS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, n: x.sum(1, keepdim=True),
    lambda x, n: x.sum(1, keepdim=True) / n,
    lambda x, n: x.cumsum(1),
    lambda x, n: x.flip(1).cumsum(1).flip(1),
]
# Shares of the score, from the index of each token, which begins with 1, and the number of tokens.
SHARES: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda i, n: 1 / n,
    lambda i, n: i / n,
    lambda i, n: (n + 1 - i) / n,
    lambda i, n: 2 * i / (n * (n + 1)),
]
# What is wrong with a factor: it is 0, negative, 2, or another number.
COEFFICIENTS = ("without a penalty", "KL with the wrong sign", "KL twice", "another KL coefficient")
SCALES = ("without the score", "score with the wrong sign", "score twice", "scores on another scale")
AT = {"last": "last token", "next": "step after the last token"}


def wrong(names: tuple[Fault, ...]) -> int:
    return sum(not name.choice for name in names)


def product(*tables: Table) -> Iterator[tuple[list[Any], tuple[Fault, ...]]]:
    """The products of tables that have at most one mistake."""
    for ways in itertools.product(*tables):
        names = tuple(name for _, of_way in ways for name in of_way)
        if wrong(names) < 2:
            yield [way for way, _ in ways], names


def orders(n: int) -> list[Tensor]:
    """Rows in another order: moved by one, reversed, or as tiles."""
    same = torch.arange(n)
    found = [same.roll(1), same.roll(-1), same.flip(0)] if n > 1 else []
    return found + [same.reshape(k, -1).T.flatten() for k in range(2, n) if n % k == 0]


# ---- The penalty -----------------------------------------------------------------------------------------------


def sources(doctor: Doctor) -> Table:
    """Two arrays of log-probs: their names, the tokens by which they are moved, and the orders of their rows."""
    pair, same, n = ("logprobs", "ref_logprobs"), slice(None), len(doctor.mask)
    found: Table = [((pair, (0, 0), (same, same)), ())]
    for other in itertools.combinations(("new_logprobs", "sampler_logprobs", *pair), 2):
        is_sampler = other == ("sampler_logprobs", "ref_logprobs")
        names = wiring("KL of the sampler's log-probs" if is_sampler else "KL of other log-probs")
        found += [((other, (0, 0), (same, same)), names)] if other != pair else []
    known = {name.name for finding in doctor.findings for name in finding.names}
    for kind, (p, q) in (("log-probs", (1, 0)), ("reference log-probs", (0, 1)), ("KL", (1, 1))):
        for shift, late, early in ((1, "late", "early"), (-1, "early", "late")):
            # If the array itself is shifted the other way, the rewards are in order.
            names = () if f"{kind} one token {early}" in known else wiring(f"{kind} one token {late}")
            found.append(((pair, (shift * p, shift * q), (same, same)), names))
    of_row = () if "log-probs of another row" in known else wiring("log-probs of another row")
    for order in orders(n):
        moved = [((same, order), of_row), ((order, same), of_row), ((order, order), wiring("KL of another row"))]
        found += [((pair, (0, 0), rows), names) for rows, names in moved]
    return [entry for entry in found if doctor.has(*entry[0][0])]


def estimates(doctor: Doctor) -> Table:
    """Estimates of the KL at each token: their words, and a function of two arrays of log-probs and a mask."""
    named = [(form, forms.kl_estimate, wiring(f"{form} as a penalty")) for form in ("k3", "k2", "abs")]
    named = [("k1", forms.kl_estimate, ()), *named]
    for form, mistake in (("k3", "k3 up"), ("k1", "clamped"), ("k3", "clamped")):
        named += [(form, f, names) for f, names in doctor.mistakes("kl_estimate", mistake)]
    found: Table = [((KL_FORMS[form], partial(f, name=form)), names) for form, f, names in named]
    for words, (f, name) in ESTIMATES.items():
        found.append(((words, lambda p, q, mask, f=f: f(p, q).masked_fill(~mask, 0)), wiring(name)))
    return found


def shapes(doctor: Doctor) -> Table:
    """Which tokens pay the estimates: a mask, and a function of the estimates and the mask."""

    def of_book(x: Tensor, mask: Tensor, f: Callable = forms.token_rewards) -> Tensor:
        return f(0 * x[:, 0], x, 0 * x, mask, kl_coef=1.0)

    mask = doctor.mask
    found: Table = [((mask, of_book), ()), ((mask | True, of_book), wiring("KL on padding"))]
    found += [((mask, partial(of_book, f=f)), names) for f, names in doctor.mistakes("token_rewards", *PENALTIES)]
    found += [((doctor.true_mask, of_book), ())] if (doctor.true_mask != mask).any() else []
    for f in TOTALS:
        total = lambda x, m, f=f: -f(x, m.sum(1, keepdim=True).clamp(min=1)) * m  # noqa: E731
        found.append(((mask, total), wiring("KL of the response on every token")))
    return found


def kl_rewards(
    arrays: Arrays, *, source: tuple[Any, ...], estimate: Callable, shape: Callable, mask: Tensor
) -> Tensor:
    """Rewards of the penalty alone, with the coefficient 1."""
    p, q = (arrays[name].roll(shift, 1)[order] for name, shift, order in zip(*source, strict=True))
    return shape(estimate(p, q, mask), mask)


def penalties(doctor: Doctor) -> Iterator[Candidate]:
    """KL penalties: of which log-probs, by which estimate, at which tokens."""
    edges = {1: doctor.only_first(doctor.mask), -1: doctor.only_last(doctor.mask)}
    for (source, (words, estimate), (mask, shape)), names in product(
        sources(doctor), estimates(doctor), shapes(doctor)
    ):
        (first, second), shifts, _ = source
        yield Candidate(
            words=with_signs(words.format(first).replace("ref_logprobs", second)),
            predict=partial(kl_rewards, source=source, estimate=estimate, shape=shape, mask=mask),
            names=names,
            unknown=edges.get(max(shifts) or min(shifts)),
        )


# ---- The score -------------------------------------------------------------------------------------------------


def values(doctor: Doctor, of_kl: list[Candidate]) -> Table:
    """The number of each row: words, and a function of the scores."""
    found: Table = [(("the score", lambda s: s), ())]
    found += [(("the score", lambda s, o=o: s[o]), wiring("score of another row")) for o in orders(len(doctor.mask))]
    found.append((("the absolute score", Tensor.abs), wiring("score without its sign")))
    found.append((("the same number", torch.ones_like), wiring("one score for all rows")))
    groups = doctor.arrays.get("groups", doctor.batch.prompts)
    if groups is not None and groups.unique().numel() < len(groups):

        def centred(s: Tensor) -> Tensor:
            return forms.group_advantages(s, groups, None, "dr_grpo")

        def normalised(s: Tensor) -> Tensor:
            return forms.group_advantages(s, groups, None, "grpo")

        found.append((("the score - mean of its group", centred), wiring("a baseline in the scores")))
        found.append((("(the score - mean) / std of its group", normalised), wiring("a baseline in the scores")))
    return found + [(way, wiring("scores on another scale")) for way in rescaled(doctor, of_kl)]


def rescaled(doctor: Doctor, of_kl: list[Candidate]) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Clipped and shifted scores, with the constants that what a plain penalty leaves at the end shows."""
    y, mask, scores = doctor.arrays["rewards"], doctor.mask, doctor.arrays["scores"]
    plain = [c.predict(doctor.arrays) for c in of_kl if not c.is_wrong and c.unknown is None]
    for at, kl in itertools.product(AT, plain):
        there = end(torch.ones_like(scores), mask, at) > 0
        inner = mask & ~there
        coefficient = (y * kl)[inner].sum() / (kl * kl)[inner].sum().clamp(min=1e-30)
        rest = (y - coefficient * kl).masked_fill(~there, 0).sum(1)
        is_left = root_mean_square((y - coefficient * kl)[inner]) > 0.02 * root_mean_square(y[inner])
        if is_left or len(scores) < 4 or float(rest.max() - rest.min()) < 0.01 * float(scores.max() - scores.min()):
            continue
        low, high = nice(float(rest.min()), within=1e-5), nice(float(rest.max()), within=1e-5)
        if ((scores > low) & (scores < high)).any():
            yield f"the score, clipped to [{low:g}, {high:g}],", partial(torch.clamp, min=low, max=high)
        centred = scores - scores.mean()
        slope = float((centred * rest).sum() / centred.square().sum().clamp(min=1e-30))
        if abs(slope) > 1e-3:
            scale, shift = abs(slope), nice(float(rest.mean()) / slope - float(scores.mean()), within=1e-5)
            if abs(shift) > 1e-3 * root_mean_square(scores):
                words = f"{scale:.4g} * (the score {'-' if shift < 0 else '+'} {abs(shift):.4g})"
                yield words, lambda s, scale=scale, shift=shift: scale * (s + shift)


def end(x: Tensor, mask: Tensor, at: str = "last", f: Callable = forms.token_rewards) -> Tensor:
    """Rewards that have a number of each row (rows,) at one token."""
    nothing = torch.zeros(mask.shape, dtype=torch.float64)
    return f(x, nothing, nothing, mask, score_at=at)


def patterns(doctor: Doctor) -> Table:
    """Where the number of a row is: words, and a function of the numbers."""
    mask = doctor.mask
    after = mask | doctor.following(mask)
    full = mask[:, -1:]  # rows in which an index past the end would be held at the last column
    masks = [
        ("score on the token before the last", mask & ~doctor.only_last(mask)),
        ("score on the token before the last", mask & (~doctor.only_last(mask) | full)),
        ("score two after the last token", after | doctor.following(after)),
        ("score on the first token", doctor.only_first(mask)),
    ]
    right = [mask] + ([doctor.true_mask] if (doctor.true_mask != mask).any() else [])
    found: Table = [((f" on the {AT[at]}", partial(end, mask=m, at=at)), ()) for m in right for at in AT]
    found += [(("", partial(end, mask=mask, f=f)), names) for f, names in doctor.mistakes("token_rewards", *PLACES)]
    found += [(("", partial(end, mask=m)), wiring(name)) for name, m in masks]
    for f in SHARES:
        weights = f(mask.cumsum(1).double(), mask.sum(1, keepdim=True).clamp(min=1)) * mask
        found.append((("", lambda x, w=weights: x.unsqueeze(1) * w), wiring("score spread over the tokens")))
    return found


def score_places(doctor: Doctor, of_kl: list[Candidate]) -> Iterator[Candidate]:
    """Scores: which number of each row, and at which tokens."""
    for ((number, value), (place, shape)), names in product(values(doctor, of_kl), patterns(doctor)):
        predict = lambda a, value=value, shape=shape: shape(value(a["scores"]))  # noqa: E731
        yield Candidate(words=number + place, predict=predict, names=names)


def missing_scores(doctor: Doctor) -> Iterator[Candidate]:
    """What the score may be if the dump lacks it: any number at the end."""
    last, after = doctor.only_last(doctor.mask), doctor.following(doctor.mask)
    after = after | (last & ~after.any(1, keepdim=True))
    for at, there in (("last", last), ("next", after)):
        words = f"a number, such as the score, which the dump lacks, on the {AT[at]}"
        yield Candidate(words=words, predict=nothing, unknown=there)


def nothing(arrays: Arrays) -> Tensor:
    return torch.zeros_like(arrays["rewards"])


# ---- Sums of both ----------------------------------------------------------------------------------------------


def check_rewards(doctor: Doctor) -> None:
    """Explain the rewards as a penalty and a score, each with a coefficient, and perhaps whitened."""
    mask, has_scores = doctor.mask, doctor.has("scores")
    step_after = mask | doctor.following(mask)
    none = Candidate(words="", predict=nothing)
    of_kl = [none, *penalties(doctor)]
    places = [none, *score_places(doctor, of_kl)] if has_scores else list(missing_scores(doctor))
    regions = ((mask | True, False), (step_after, False), (mask, False), (mask, True), (step_after, True))
    found = []
    for most, (where, is_white) in itertools.product((0, 1), regions if has_scores else regions[1:2]):
        few = ([c for c in candidates if wrong(c.names) <= most] for candidates in (of_kl, places))
        best, gap, is_explained = doctor.choose("rewards", sums(doctor, *few, where, is_white), where)
        # What is right within the mask does not clear rewards: those outside may be what is wrong.
        if is_explained and where is mask and not is_white and not best.is_wrong:
            continue
        found += [(best, gap, where)] if is_explained else []
        if is_explained and not best.is_wrong:
            break
    if found:
        best, gap, where = min(found, key=lambda entry: entry[0].weight)
        doctor.explained("rewards", best, gap, reference(doctor, best) if has_scores else None, where)
        return
    best, gap, _ = doctor.choose("rewards", sums(doctor, of_kl, places, step_after, False), step_after)
    lacking = [name for name in ("logprobs", "ref_logprobs") if not doctor.has(name)]
    doctor.unexplained("rewards", best, gap, " and ".join(lacking), step_after)


def sums(
    doctor: Doctor, of_kl: list[Candidate], places: list[Candidate], where: Tensor, is_white: bool
) -> Iterator[Candidate]:
    """The nearest sums of a penalty and a score, with the coefficients that fit best.

    is_white: they may be whitened, so a constant is added, and only the ratio of the coefficients counts.
    """
    y, told = doctor.arrays["rewards"][where], doctor.batch.settings.get("kl_coef")
    scores = torch.stack([place.predict(doctor.arrays)[where] for place in places])  # (places, entries)
    known = torch.stack([place.known(where)[where] for place in places])
    weights = torch.tensor([place.weight for place in places], dtype=y.dtype)
    floor, results = 3e-7 * root_mean_square(y), []
    for penalty in of_kl:
        kl, is_known = penalty.predict(doctor.arrays)[where], penalty.known(where)[where]
        there = (known & is_known).double()
        k, s, t = ((x - is_white * (x * there).sum(1, keepdim=True) / there.sum(1, keepdim=True).clamp(min=1)) * there
                   for x in (kl.expand_as(scores), scores, y.expand_as(scores)))  # fmt: skip
        kk, ss, ks, kt, st = ((a * b).sum(1) for a, b in ((k, k), (s, s), (k, s), (k, t), (s, t)))
        both = kk * ss - ks**2
        is_one = both <= 1e-12 * kk * ss  # of the two is 0, or they are proportional
        coefficients = torch.where(is_one, kt / kk.clamp(min=1e-30), (ss * kt - ks * st) / both)
        factors = torch.where(is_one, (kk <= 0) * st / ss.clamp(min=1e-30), (kk * st - ks * kt) / both)
        rest = t - coefficients.unsqueeze(1) * k - factors.unsqueeze(1) * s
        errors = rest.square().mean(1).sqrt().clamp(min=floor) * weights * penalty.weight
        for n, (place, error) in enumerate(zip(places, errors.tolist(), strict=True)):
            # A penalty that leaves something out must explain the rest.
            explains = penalty.unknown is None or abs(float(coefficients[n])) * largest(kl[is_known]) > 1e-7
            if explains:
                results.append((error, len(results), penalty, place, float(coefficients[n]), float(factors[n])))
    for _, _, penalty, place, coefficient, scale in sorted(results)[: 4 if is_white else 12]:
        if not is_white:
            yield weighted(doctor, penalty, place, coefficient, scale)
            if told and abs(coefficient - told) < 0.3 * told:  # rounding may make it another one
                yield weighted(doctor, penalty, place, told, scale)
        elif abs(scale) > 1e-9:
            for ratio in dict.fromkeys([coefficient / scale, told or coefficient / scale]):
                yield from whitened(doctor, weighted(doctor, penalty, place, ratio, 1.0))


def weighted(doctor: Doctor, penalty: Candidate, place: Candidate, coefficient: float, scale: float) -> Candidate:
    """A penalty and a score with their coefficients, rounded to numbers that are as good."""
    told, is_missing = doctor.batch.settings.get("kl_coef"), place.unknown is not None
    is_any = is_missing or WIRING["one score for all rows"] in place.names  # the factor is not that of the score
    coefficient, scale = nice(coefficient, told), scale if is_any else nice(scale, 1.0)
    coefficient *= largest(penalty.predict(doctor.arrays)) * abs(coefficient) > 1e-7
    scale *= bool(place.words) and abs(scale) > 1e-3
    names, terms = place.names, []
    if coefficient:
        names += penalty.names
        terms.append(f"{'-' if coefficient > 0 else '+'}{written(abs(coefficient), 5)} * ({penalty.words})")
    if coefficient or (told and doctor.has("logprobs", "ref_logprobs") and not doctor.is_reference("logprobs")):
        names += of_factor(coefficient / told if told else math.copysign(1, coefficient), *COEFFICIENTS)
    if scale or is_missing:
        terms.append(place.words if is_missing or scale == 1 else f"{written(scale, 5)} * {place.words}")
    if not is_any and (scale or (penalty.unknown is None and largest(doctor.arrays["scores"]) > 0)):
        names += of_factor(scale, *SCALES)

    def predict(arrays: Arrays) -> Tensor:
        return coefficient * penalty.predict(arrays) + scale * place.predict(arrays)

    unknown = place.unknown if is_missing else penalty.unknown
    return Candidate(words=" + ".join(terms) or "0", predict=predict, names=names, unknown=unknown)


def of_factor(factor: float, none: str, negative: str, twice: str, other: str) -> tuple[Fault, ...]:
    """What is wrong with a factor that must be 1."""
    if not factor:
        return wiring(none)
    names = wiring(negative) if factor < 0 else ()
    if abs(abs(factor) - 1) > 0.01:
        names += wiring(twice if abs(abs(factor) - 2) < 0.02 else other)
    return names


def whitened(doctor: Doctor, made: Candidate) -> Iterator[Candidate]:
    """Rewards that were whitened with the mean kept, as the original can do."""
    words = f"{made.words}, then whitened with the mean kept"
    for region in (doctor.mask, doctor.mask | doctor.following(doctor.mask)):
        for f, of_f in doctor.variants("whiten"):
            if "not scaled" in {name.name for name in of_f}:  # with the mean kept, that is nothing at all
                continue
            names = (*made.names, *wiring("whitened rewards"), *of_f)
            predict = partial(lambda a, f, region: f(made.predict(a), region, True), f=f, region=region)
            yield dataclasses.replace(made, words=words, predict=predict, names=names)


def reference(doctor: Doctor, best: Candidate) -> Callable[[Arrays], Tensor]:
    """What the reference gives: k1 with the dump's coefficient or one that fits, and the score at the end."""
    rewards, mask = doctor.arrays["rewards"], doctor.mask
    names = ("logprobs", "ref_logprobs") if doctor.has("logprobs", "ref_logprobs") else ("rewards", "rewards")
    d = (doctor.arrays[names[0]] - doctor.arrays[names[1]]) * (mask & ~doctor.only_last(mask))
    fits = abs(float((rewards * d).sum() / (d * d).sum().clamp(min=1e-30)))
    coefficient = doctor.batch.settings.get("kl_coef", fits)
    at = "next" if AT["next"] in best.words else "last"
    return lambda a: forms.token_rewards(a["scores"], a[names[0]], a[names[1]], mask, coefficient, at)
