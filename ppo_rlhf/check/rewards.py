"""Which KL penalty and which place of the score made the rewards of a dump: see doctor.py."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from ppo_rlhf.check import forms
from ppo_rlhf.check.doctor import Arrays, Candidate, Doctor, largest, wiring
from ppo_rlhf.check.faults import Fault
from ppo_rlhf.report.derivation import KL_FORMS, with_signs, written

# Mistakes of token_rewards in the book, by what they change.
PENALTIES = ("penalty of the response at its end", "penalty per length", "score in place of the penalty")
PLACES = (
    "score in the last column",
    "score at the number of tokens",
    "score on every token",
    "score broadcast along the tokens",
    "score of an empty response",
)
# What is wrong with a factor: it is 0, negative, 2, or another number.
COEFFICIENTS = ("without a penalty", "KL with the wrong sign", "KL twice", "another KL coefficient")
SCALES = ("without the score", "score with the wrong sign", "score twice", "scores on another scale")
AT = {"last": "last token", "next": "step after the last token"}


# ---- The penalty -----------------------------------------------------------------------------------------------


def kl_rewards(
    arrays: Arrays, *, source: str, shifts: tuple[int, int], kl: Callable, form: str, shape: Callable, mask: Tensor
) -> Tensor:
    """Rewards of the penalty alone, with the coefficient 1.

    shifts: by how many tokens the source and the reference are moved. shape: a variant of token_rewards.
    """
    new, ref = arrays[source].roll(shifts[0], 1), arrays["ref_logprobs"].roll(shifts[1], 1)
    d = kl(new, ref, mask, form)
    return shape(0 * d[:, 0], d, 0 * d, mask, kl_coef=1.0)


def penalties(doctor: Doctor) -> Iterator[Candidate]:
    """KL penalties: of which log-probs, by which estimate, at which tokens."""
    mask, plain, estimate = doctor.mask, forms.token_rewards, forms.kl_estimate
    sources = [("logprobs", (0, 0), ()), ("sampler_logprobs", (0, 0), wiring("KL of the sampler's log-probs"))]
    known = {name.name for finding in doctor.findings for name in finding.names}
    for kind, (new, ref) in (("log-probs", (1, 0)), ("reference log-probs", (0, 1))):
        for shift, late, early in ((1, "late", "early"), (-1, "early", "late")):
            # If the array itself is shifted the other way, the rewards are in order.
            wrong = () if f"{kind} one token {early}" in known else wiring(f"{kind} one token {late}")
            sources.append(("logprobs", (shift * new, shift * ref), wrong))
    estimates = [("k1", estimate, ()), *((k, estimate, wiring(f"{k} as a penalty")) for k in ("k3", "k2", "abs"))]
    for form, mistake in (("k3", "k3 up"), ("k1", "clamped"), ("k3", "clamped")):
        estimates += [(form, f, names) for f, names in doctor.mistakes("kl_estimate", mistake)]
    shapes = [(plain, mask, ()), (plain, mask | True, wiring("KL on padding"))]
    shapes += [(f, mask, names) for f, names in doctor.mistakes("token_rewards", *PENALTIES)]
    shapes += [(plain, doctor.true_mask, ())] if (doctor.true_mask != mask).any() else []
    mixed = itertools.product(sources, estimates, shapes)
    for (source, shifts, wrong), (form, kl, of_kl), (shape, m, of_shape) in mixed:
        shift, is_plain = sum(shifts), shape is plain and m is mask
        if doctor.has(source, "ref_logprobs") and (is_plain or not (shift or (wrong and of_shape))):
            edge = doctor.only_last(mask) if shift < 0 else doctor.only_first(mask)
            yield Candidate(
                words=with_signs(KL_FORMS[form].format(source)),
                predict=partial(kl_rewards, source=source, shifts=shifts, kl=kl, form=form, shape=shape, mask=m),
                names=(*wrong, *of_kl, *of_shape),
                unknown=edge if shift else None,
            )


# ---- The score -------------------------------------------------------------------------------------------------


def score_rewards(arrays: Arrays, *, order: Tensor, shape: Callable, at: str, mask: Tensor) -> Tensor:
    """Rewards of the score alone. order: whose score each row has."""
    nothing = torch.zeros(mask.shape, dtype=torch.float64)
    return shape(arrays["scores"][order], nothing, nothing, mask, score_at=at)


def score_places(doctor: Doctor) -> Iterator[Candidate]:
    """Scores: of which row, and at which tokens, with at most one mistake."""
    mask, n, plain = doctor.mask, len(doctor.mask), forms.token_rewards
    same = torch.arange(n)
    orders = [same.roll(1), same.roll(-1), same.flip(0)] if n > 1 else []
    orders += [same.reshape(k, -1).T.flatten() for k in range(2, n) if n % k == 0]
    after = mask | doctor.following(mask)
    masks = {
        "score on the token before the last": mask & ~doctor.only_last(mask),
        "score two after the last token": after | doctor.following(after),
        "score on the first token": doctor.only_first(mask),
    }
    right = [(plain, at, mask) for at in AT]
    right += [(plain, at, doctor.true_mask) for at in AT] if (doctor.true_mask != mask).any() else []
    ways = [(same, *way, ()) for way in right]
    ways += [(same, f, "last", mask, names) for f, names in doctor.mistakes("token_rewards", *PLACES)]
    ways += [(same, plain, "last", m, wiring(name)) for name, m in masks.items()]
    ways += [(order, *way, wiring("score of another row")) for order in orders for way in right]
    for order, shape, at, m, names in ways:
        words = "the score" if names and order is same else f"the score on the {AT[at]}"
        predict = partial(score_rewards, order=order, shape=shape, at=at, mask=m)
        yield Candidate(words=words, predict=predict, names=names)


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
    places = [none, *score_places(doctor)] if has_scores else list(missing_scores(doctor))
    regions = ((mask | True, False), (step_after, False), (mask, True), (step_after, True))
    for where, is_white in regions if has_scores else regions[1:2]:
        best, gap, is_explained = doctor.choose("rewards", sums(doctor, of_kl, places, where, is_white), where)
        if is_explained:
            doctor.explained("rewards", best, gap, reference(doctor, best) if has_scores else None, where)
            return
    best, gap, _ = doctor.choose("rewards", sums(doctor, of_kl, places, step_after, False), step_after)
    lacks = "" if doctor.has("logprobs", "ref_logprobs") else "logprobs and ref_logprobs"
    doctor.unexplained("rewards", best, gap, lacks, step_after)


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
    results = []
    for penalty in of_kl:
        kl, is_known = penalty.predict(doctor.arrays)[where], penalty.known(where)[where]
        there = known & is_known
        terms = [kl.expand_as(scores), scores, *([torch.ones_like(scores)] if is_white else [])]
        columns, target = torch.stack(terms, 2) * there.unsqueeze(2), (y * there).unsqueeze(2)
        inverse = torch.linalg.pinv(columns.mT @ columns, rtol=1e-12, hermitian=True)
        solutions = inverse @ columns.mT @ target  # (places, terms, 1)
        errors = (target - columns @ solutions).square().mean((1, 2)).sqrt() * weights * penalty.weight
        for place, error, factors in zip(places, errors.tolist(), solutions[..., 0].tolist(), strict=True):
            # A penalty that leaves something out must explain the rest.
            if penalty.unknown is None or abs(factors[0]) * largest(kl[is_known]) > 1e-7:
                results.append((error, len(results), penalty, place, *factors[:2]))
    for _, _, penalty, place, coefficient, scale in sorted(results)[:12]:
        if not is_white:
            yield weighted(doctor, penalty, place, coefficient, scale)
            if told and abs(coefficient - told) < 0.3 * told:  # rounding may make it another one
                yield weighted(doctor, penalty, place, told, scale)
        elif abs(scale) > 1e-9:
            yield from whitened(doctor, weighted(doctor, penalty, place, coefficient / scale, 1.0))


def weighted(doctor: Doctor, penalty: Candidate, place: Candidate, coefficient: float, scale: float) -> Candidate:
    """A penalty and a score with their coefficients, rounded to numbers that are as good."""
    told, is_missing = doctor.batch.settings.get("kl_coef"), place.unknown is not None
    coefficient, scale = nice(coefficient, told), nice(scale, 1.0)
    coefficient *= largest(penalty.predict(doctor.arrays)) * abs(coefficient) > 1e-7
    scale *= bool(place.words) and abs(scale) > 1e-3
    names, terms = place.names, []
    if coefficient:
        names += penalty.names
        terms.append(f"-{written(coefficient, 5)} * ({penalty.words})")
    if coefficient or (told and doctor.has("logprobs", "ref_logprobs") and not doctor.is_reference("logprobs")):
        names += of_factor(coefficient / told if told else math.copysign(1, coefficient), *COEFFICIENTS)
    if scale or is_missing:
        terms.append(place.words if is_missing or scale == 1 else f"{written(scale, 5)} * {place.words}")
    if scale or (not is_missing and penalty.unknown is None and largest(doctor.arrays["scores"]) > 0):
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


def nice(x: float, told: float | None = None) -> float:
    """A number with few digits that is as good as x, or the one that was told."""
    for other in (*([told] if told is not None else []), *(float(f"{x:.{digits}g}") for digits in (1, 2, 3, 4))):
        if abs(other - x) <= 2e-4 * abs(x):
            return other
    return x
