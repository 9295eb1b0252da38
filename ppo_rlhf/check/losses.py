"""Which formula made the losses of a dump, and whether ratios are what they must be: see doctor.py.

A loss is a product of tables: advantages, ratio, clip, sign and reduction, and then what is added to it. The first
rows of a table, without a name, are the reference; a choice has the name of one. Combinations without a mistake are
tried first, then those with one, and of losses by token those with two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.autograd.functional import jacobian
from torch.nn.functional import huber_loss, pad

from ppo_rlhf.check import faults, forms
from ppo_rlhf.check.doctor import WIRING, Arrays, Candidate, Doctor, nice, root_mean_square, wiring
from ppo_rlhf.check.faults import Fault
from ppo_rlhf.report.derivation import written
from ppo_rlhf.rlvr import algebra

Row = tuple[str, Callable]  # the name of a mistake or choice, and what it computes
FAR = 1.0  # nats per token: farther than an update moves a policy
RANGES = [(0.2, 0.2), (0.2, 0.28), (0.1, 0.1), (0.3, 0.3)]
OTHER_RANGES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
COEFFICIENTS = [*(digit * 10.0**power for power in range(-4, 0) for digit in (1, 2, 4, 5)), 1.0]
BOUNDS = (2.0, 3.0, 5.0, 10.0, float("inf"))  # of importance weights
PRECISE = 1e-5  # relative rounding up to which one number can tell two mistakes at once
REACH = 100  # tolerances around one number, within which the numbers of other formulas are counted
CHANCE = 0.01  # formulas that may be expected to fit one number by chance, if one that fits is to be believed
SINGLE = 3e-7  # relative rounding of one number in float32


def mean_of_rows(x: Tensor, mask: Tensor) -> Tensor:
    return ((x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).expand_as(x)


def scaled(x: Tensor, of: Tensor) -> Tensor:
    """x by mean and standard deviation of some numbers, as PyTorch's std() has it."""
    return (x - of.mean()) / (of.std() + 1e-8)


def weights(a: Arrays) -> Tensor:
    return (a["logprobs"] - a["sampler_logprobs"]).exp()


# Each sees the arrays and the mask.
ADVANTAGES: list[Row] = [
    ("", lambda a, m: a["advantages"]),
    ("of the wrong sign", lambda a, m: -a["advantages"]),
    *(("advantages of another row", lambda a, m, n=n: a["advantages"].roll(n, 0)) for n in (1, -1)),
    ("advantages of another row", lambda a, m: a["advantages"].flip(0)),
    ("advantages of another token", lambda a, m: pad((a["advantages"] * m)[:, 1:], (0, 1))),
    ("advantages of another token", lambda a, m: pad((a["advantages"] * m)[:, :-1], (1, 0))),
    ("advantages without their sign", lambda a, m: a["advantages"].abs()),
    ("advantages of the whole row", lambda a, m: mean_of_rows(a["advantages"], m)),
    ("whitens", lambda a, m: forms.whiten(a["advantages"], m)),
    ("whitens", lambda a, m: scaled(a["advantages"], a["advantages"][m])),
    ("whitens", lambda a, m: scaled(mean_of_rows(a["advantages"], m), mean_of_rows(a["advantages"], m)[:, 0])),
    *(("truncated importance weights", lambda a, m, c=c: a["advantages"] * weights(a).clamp(max=c)) for c in BOUNDS),
    *(("weights upside down", lambda a, m, c=c: a["advantages"] * (1 / weights(a)).clamp(max=c)) for c in BOUNDS),
    ("advantages before whitening", lambda a, m: a["returns"] - a["values"]),
    ("returns for advantages", lambda a, m: a["returns"]),
    ("rewards for advantages", lambda a, m: a["rewards"]),
    ("scores for advantages", lambda a, m: a["scores"].unsqueeze(1).expand(m.shape)),
]
NEEDS = {
    "advantages before whitening": {"returns", "values"},
    "truncated importance weights": {"logprobs", "sampler_logprobs"},
    "weights upside down": {"logprobs", "sampler_logprobs"},
    "returns for advantages": {"returns"},
    "rewards for advantages": {"rewards"},
    "scores for advantages": {"scores"},
    "ratio to the reference": {"ref_logprobs"},
    "advantages for returns": {"advantages"},
    "rewards for returns": {"rewards"},
}
RATIOS: list[Row] = [
    ("", lambda a, m: (a["new_logprobs"] - a["logprobs"]).exp()),
    ("ratio upside down", lambda a, m: (a["logprobs"] - a["new_logprobs"]).exp()),
    ("difference for ratio", lambda a, m: a["new_logprobs"] - a["logprobs"]),
    ("difference for ratio", lambda a, m: 1 + a["new_logprobs"] - a["logprobs"]),
    ("ratio to the reference", lambda a, m: (a["new_logprobs"] - a["ref_logprobs"]).exp()),
    ("ratio without the old", lambda a, m: a["new_logprobs"].exp()),
    ("ratio of the new to itself", lambda a, m: (a["new_logprobs"] - a["new_logprobs"].detach()).exp()),
    (
        "ratio of the whole response",
        lambda a, m: (mean_of_rows(a["new_logprobs"] - a["logprobs"], m) * m.sum(1, True)).exp(),
    ),
]


def larger(a: Tensor, r: Tensor, clipped: Tensor) -> Tensor:
    return torch.maximum(-a * r, -a * clipped)


def another(loss: str, dual_clip: float | None = None, bounds: tuple[float, float] | None = None) -> Callable:
    """A loss of algebra.py. bounds: its own, if they are not PPO's."""

    def losses(a: Tensor, r: Tensor, low: float, high: float, new: Tensor, mask: Tensor) -> Tensor:
        old = new.detach() - r.detach().log()
        low, high = bounds or (low, high)
        return algebra.token_losses(new, old, a, mask, loss, low=low, high=high, dual_clip=dual_clip)[0]

    return losses


# Each sees advantages, ratio, the bounds' distances from 1, new log-probs and the mask.
CLIPS: list[Row] = [
    ("", lambda a, r, low, high, *_: larger(a, r, r.clamp(1 - low, 1 + high))),
    ("the smaller loss", lambda a, r, low, high, *_: -larger(-a, r, r.clamp(1 - low, 1 + high))),
    ("the clip never acts", lambda a, r, *_: -a * r),
    ("only the clipped", lambda a, r, low, high, *_: -a * r.clamp(1 - low, 1 + high)),
    ("clips the log ratio", lambda a, r, low, high, *_: larger(a, r, r.log().clamp(-low, high).exp())),
    ("clips the log ratio", lambda a, r, low, high, *_: larger(a, r, r.log().clamp(1 - low, 1 + high))),
    ("clips ratio times advantage", lambda a, r, low, high, *_: torch.maximum(-a * r, -(a * r).clamp(-low, high))),
    ("one bound is missing", lambda a, r, low, high, *_: larger(a, r, r.clamp(max=1 + high))),
    ("one bound is missing", lambda a, r, low, high, *_: larger(a, r, r.clamp(min=1 - low))),
    ("one bound is 1", lambda a, r, low, high, *_: larger(a, r, r.clamp(1 - low, 1))),
    ("one bound is 1", lambda a, r, low, high, *_: larger(a, r, r.clamp(1, 1 + high))),
    (
        "dual clip of good tokens",
        lambda a, r, low, high, *_: torch.minimum(larger(a, r, r.clamp(1 - low, 1 + high)), -3 * a),
    ),
    *(("another loss", another("ppo", dual_clip=c)) for c in (3.0, 1.4)),  # 1.4: ROLL's
    ("another loss", another("cispo", bounds=(1.0, 0.2))),  # only an upper bound
    ("another loss", another("gspo", bounds=(3e-4, 4e-4))),
    *(("another loss", another(kind)) for kind in ("gspo", "cispo", "reinforce")),
]
SIGNS: list[Row] = [("", lambda x: x), ("of the wrong sign", lambda x: -x)]


def of_rows(first: bool, share: int) -> Callable:
    def reduce(x: Tensor, m: Tensor) -> Tensor:
        n = max(len(x) // share, 1)
        rows = slice(None, n) if first else slice(-n, None)
        return forms.aggregate(x[rows], m[rows])

    return reduce


def with_holes(mask: Tensor) -> Tensor:
    """From the first token of each row to the last one."""
    return (mask.cumsum(1) > 0) & (mask.flip(1).cumsum(1).flip(1) > 0)


REDUCTIONS: list[Row] = [
    ("", forms.aggregate),
    ("mean of row means", lambda x, m: forms.aggregate(x, m, "seq-mean-token-mean")),
    ("a sum over tokens", lambda x, m: forms.aggregate(x, m, "seq-mean-token-sum")),
    ("divided by the width", lambda x, m: forms.aggregate(x, m, "seq-mean-token-sum-norm")),
    ("divided by the width", lambda x, m: forms.aggregate(x, m, "seq-mean-token-sum-norm") * len(m)),
    ("sum", lambda x, m: forms.aggregate(x, m, tokens=1)),
    ("a mask of other tokens", lambda x, m: forms.aggregate(x, pad(m[:, 1:], (0, 1)))),
    ("a mask of other tokens", lambda x, m: forms.aggregate(x, pad(m[:, :-1], (1, 0)))),
    ("the mask includes tokens of tools", lambda x, m: forms.aggregate(x, with_holes(m))),
    ("ignores the mask", lambda x, m: x.mean()),
    ("of masked tokens", lambda x, m: x.sum() / m.sum()),
    ("divided twice", lambda x, m: forms.aggregate(x, m) / m.sum()),
    ("divided twice", lambda x, m: forms.aggregate(x, m) / len(m)),
    ("divided twice", lambda x, m: forms.aggregate(x, m, "seq-mean-token-sum-norm") / m.sum()),
    ("divided twice", lambda x, m: forms.aggregate(x, m, "seq-mean-token-sum") / m.sum()),
    *(("a part of the rows", of_rows(first, share)) for first in (True, False) for share in (2, 4)),
]
BY_TOKEN: list[Row] = [("", lambda x, m: x)]


def shares(reductions: Sequence[Row], mask: Tensor) -> Tensor:
    """By how much each reduction multiplies the loss of each token: (reductions, rows, width). All are sums."""
    nothing = torch.zeros(mask.shape, dtype=torch.float64)
    return torch.stack([jacobian(lambda x, f=f: f(x, mask), nothing) for _, f in reductions])


def numbers(losses: Tensor, share: Tensor) -> Tensor:
    """What each reduction makes of the losses by token: (reductions,). A token that does not count may be NaN."""
    return (share * losses.where(share != 0, 0)).sum((1, 2))


# Of new values, old values, targets and the bound.
VALUE_TARGETS: list[Row] = [
    ("", lambda a: a["returns"]),
    ("advantages for returns", lambda a: a["advantages"]),
    ("rewards for returns", lambda a: a["rewards"]),
    ("old values for returns", lambda a: a["values"]),
]
VALUES: list[Row] = [("", lambda a: a["new_values"]), ("old values for new", lambda a: a["values"])]


def worse(new: Tensor, clipped: Tensor, target: Tensor) -> Tensor:
    return torch.maximum((new - target) ** 2, (clipped - target) ** 2)


VALUE_ERRORS: list[Row] = [
    ("", lambda v, old, r, c: worse(v, torch.clamp(v, old - c, old + c), r)),
    ("", lambda v, old, r, c: (v - r) ** 2),
    (
        "the smaller error",
        lambda v, old, r, c: torch.minimum((v - r) ** 2, (torch.clamp(v, old - c, old + c) - r) ** 2),
    ),
    ("only the clipped", lambda v, old, r, c: (torch.clamp(v, old - c, old + c) - r) ** 2),
    ("clips the old value", lambda v, old, r, c: worse(v, torch.clamp(old, v - c, v + c), r)),
    ("relative clip", lambda v, old, r, c: worse(v, torch.clamp(v, old - c * old.abs(), old + c * old.abs()), r)),
    ("clipped around the returns", lambda v, old, r, c: (torch.clamp(v, r - c, r + c) - r) ** 2),
    ("clipped around 0", lambda v, old, r, c: worse(v, v.clamp(-c, c), r)),
    ("absolute error", lambda v, old, r, c: (v - r).abs()),
    ("Huber's error", lambda v, old, r, c: 2 * huber_loss(v, r, reduction="none")),
]
SCALES: list[Row] = [
    ("", lambda x: x / 2),
    ("without its half", lambda x: x),
    ("the value loss has the wrong sign", lambda x: -x / 2),
    *(("with its coefficient", lambda x, c=c: c * x / 2) for c in (0.1, 0.5, 0.01, 0.05, 0.2, 0.25)),
]
BOOK = ("policy_loss", "value_loss", "kl_estimate", "gspo_loss", "accumulate")


@cache
def named(name: str, function: str = "policy_loss") -> tuple[Fault, ...]:
    """A mistake or choice of batch.toml, or one of the book, of that function if it has one."""
    if not name:
        return ()
    of_book = [f for f in faults.BOOK if f.name == name and f.function in BOOK]
    return (WIRING.get(name) or min(of_book, key=lambda f: f.function != function),)


def rows_of(
    doctor: Doctor, tables: Sequence[Sequence[Row]], mistakes: int, choices: int
) -> Iterator[tuple[Row, ...]]:
    """A row of each table that the dump has arrays for, with so many mistakes in all, and at most so many choices."""
    if not tables:
        yield from [()] * (mistakes == 0)
        return
    for row in tables[0]:
        wrong = [not fault.choice for fault in named(row[0])]
        left, free = mistakes - sum(wrong), choices - wrong.count(False)
        if left >= 0 and free >= 0 and NEEDS.get(row[0], set()) <= doctor.arrays.keys():
            yield from ((row, *rest) for rest in rows_of(doctor, tables[1:], left, free))


# ---- The ratio -------------------------------------------------------------------------------------------------


def check_ratio(doctor: Doctor) -> None:
    """Whether the ratio is 1, or near it."""
    found, mask = doctor.arrays, doctor.mask
    if {"new_logprobs", "logprobs"} <= found.keys() and mask.any():
        gap = found["new_logprobs"] - found["logprobs"]
        said = any(f.names for f in doctor.findings if f.array in ("new_logprobs", "logprobs"))
        largest, size = float(gap[mask].abs().max()), root_mean_square(gap[mask])
        rounding = 1e-4 + 2 * max(doctor.batch.eps[name] for name in ("new_logprobs", "logprobs")) * float(
            found["logprobs"][mask].abs().max()
        )
        ratio = gap[mask].exp()
        first = doctor.batch.settings.get("first")
        names = wiring("the ratio is not 1") if largest > rounding and (first == 1 or size > FAR) else ()
        words = (
            "the ratio to logprobs is 1"
            if largest <= rounding
            else f"the ratio to logprobs is from {written(float(ratio.min()), 3)} to {written(float(ratio.max()), 3)}"
        )
        if largest > rounding and not names and first is None:
            words += "; before the first step (`first` 1 in the dump), it must be 1"
        where = doctor.place("new_logprobs", found["logprobs"], mask) if names else ""
        doctor.add("new_logprobs", words, names=[] if said else list(names), where=where, asks=first != 1)
        if "ratio" in found:
            best, far, ok = doctor.choose(
                "ratio",
                [Candidate(words="exp(new_logprobs - logprobs)", predict=lambda a: RATIOS[0][1](a, mask))],
                mask,
            )
            doctor.add(
                "ratio",
                best.words,
                gap=far,
                names=[] if ok else list(wiring("the ratio of other log-probs")),
                where="" if ok else doctor.place("ratio", best.predict, mask),
            )


# ---- The policy's loss -----------------------------------------------------------------------------------------


def bounds_of(doctor: Doctor) -> list[tuple[str, tuple[float, float]]]:
    told, high = (doctor.batch.settings.get(name) for name in ("cliprange", "cliprange_high"))
    if not told and not high:
        return [("", bounds) for bounds in RANGES]
    if not told:
        lows = dict.fromkeys([*(low for low, _ in RANGES), high])
        return [*(("", (low, high)) for low in lows), *(("another clip range", bounds) for bounds in RANGES)]
    others = {*OTHER_RANGES, told / 10, told / 2, 2 * told, 10 * told} - {told}
    higher = [("", (told, 0.28))] if told < 0.28 and not high else []
    equal = [("another clip range", (c, c)) for c in ((told, high) if high and high != told else ())]
    rest = [("another clip range", (c, c)) for c in sorted(others - {high})]
    return [("", (told, high or told)), *higher, *equal, *rest]


def policy_losses(doctor: Doctor, mistakes: int) -> Iterator[Candidate]:
    """Losses of the policy as one number, or by token, with so many mistakes."""
    mask, by_token = doctor.mask, doctor.arrays["loss"].ndim == 2
    choices = 2 if not mistakes and doctor.batch.eps["loss"] < PRECISE else 1
    reductions = BY_TOKEN if by_token else REDUCTIONS
    tables = (bounds_of(doctor), ADVANTAGES, RATIOS, CLIPS, SIGNS, reductions)
    share = None if by_token else shares(reductions, mask)
    of_dump = cache(lambda f: f(doctor.arrays, mask))
    ratio = of_dump(RATIOS[0][1])[mask]

    def by_tokens(a: Arrays, rows: tuple[Row, ...], given: Callable) -> Tensor:
        (low, high), advantages, ratio, clip, sign = (f for _, f in rows)
        return sign(clip(given(advantages), given(ratio), low, high, a["new_logprobs"], mask))

    for rows, group in itertools.groupby(rows_of(doctor, tables, mistakes, choices), lambda x: x[:-1]):
        losses = by_tokens(doctor.arrays, rows, of_dump)
        found = [losses] if share is None else numbers(losses, share)
        low, high = rows[0][1]
        is_seen = bool(((ratio < 1 - low) | (ratio > 1 + high)).any())
        words = f"ppo with the bounds {low:g} and {high:g}"
        for *_, (name, reduce) in group:
            yield Candidate(
                words=words if is_seen else f"{words}, which no ratio leaves, so nothing is seen of the clip",
                predict=lambda a, rows=rows, reduce=reduce: reduce(by_tokens(a, rows, lambda f: f(a, mask)), mask),
                names=tuple(fault for name in (*(name for name, _ in rows), name) for fault in named(name)),
                now=found[reductions.index((name, reduce))],
            )


def estimates(doctor: Doctor) -> Iterator[tuple[str, Callable, tuple[Fault, ...]]]:
    """Estimates of a KL by token, of which the loss may hold a multiple."""
    mask, k = doctor.mask, forms.kl_estimate
    for new, other, name in (
        ("new_logprobs", "ref_logprobs", ""),
        ("logprobs", "ref_logprobs", "KL of the old log-probs"),
        ("new_logprobs", "logprobs", "KL to the old policy"),
    ):
        if other in doctor.arrays:
            for words in ("k3", "k1", "k2"):
                yield words, lambda a, n=new, o=other, w=words: k(a[n], a[o], mask, w), named(name)
    if "ref_logprobs" in doctor.arrays:
        for name, f in (
            ("k3 upside down", lambda new, ref: k(ref, new, mask, "k3")),
            ("k3 with a wrong sign in it", lambda new, ref: k(new, ref, mask, "k3") - 2 * k(new, ref, mask)),
            ("k3 with a wrong sign in it", lambda new, ref: k(ref, new, mask, "k3") - 2 * k(ref, new, mask)),
            ("k3 without its constant", lambda new, ref: k(new, ref, mask, "k3") + 1),
        ):
            yield "k3", lambda a, f=f: f(a["new_logprobs"], a["ref_logprobs"]), named(name, "kl_estimate")


def additions(doctor: Doctor) -> Iterator[tuple[str, str, Callable[[Arrays], Tensor], tuple[Fault, ...]]]:
    """What else may be in the loss: a KL and its reduction, and the critic's loss."""
    mask, by_token = doctor.mask, doctor.arrays["loss"].ndim == 2
    penalised = any(f.array == "rewards" and " * (" in f.words for f in doctor.findings)
    for words, estimate, names in estimates(doctor):
        for mode, reduce in BY_TOKEN if by_token else REDUCTIONS[:5]:
            yield (
                f"{words}{mode and ', ' + mode}",
                mode,
                lambda a, e=estimate, r=reduce: r(e(a), mask),
                (*names, *(wiring("KL in reward and loss") if penalised else ())),
            )
    for array in () if by_token else ("value_loss", "new_values"):
        if array == "value_loss" and array in doctor.arrays:
            yield "the critic's loss", "", lambda a: a["value_loss"].mean(), wiring("with the critic's loss")
        elif {array, "new_values", "values", "returns"} <= doctor.arrays.keys():
            for c in value_losses(doctor, 0, one_number=True):
                yield "the critic's loss", "", c.predict, wiring("with the critic's loss")


def coefficients(
    doctor: Doctor, bases: Sequence[Candidate], now: Tensor, told: float | None
) -> Iterator[tuple[Candidate, float]]:
    """The coefficients with which something gives the loss, or nearly, if it is added to losses of the policy.

    That of one number is told or has one digit, because some coefficient always fits.
    """
    loss = doctor.arrays["loss"]
    if loss.ndim:
        for base in bases:
            rest, there = (loss - base.now)[doctor.mask], now[doctor.mask]
            solved = float((rest * there).sum() / (there**2).sum())
            if solved and math.isfinite(solved):
                yield base, nice(solved, told)
        return
    if not bases:
        return
    sizes = torch.tensor(COEFFICIENTS + ([told, 2 * told] if told else []), dtype=torch.float64)
    allowed = torch.cat([sizes, -sizes])
    rest = loss - torch.stack([base.now for base in bases])  # (bases,)
    nearest = allowed[(rest.unsqueeze(1) / now - allowed).abs().argmin(1)]
    reach = REACH * (1e-4 + 2 * doctor.batch.eps["loss"]) * loss.abs()
    for n in ((nearest * now - rest).abs() < reach).nonzero().flatten().tolist():
        if not bases[n].is_wrong or nearest[n].abs() == told:
            yield bases[n], float(nearest[n])


def with_additions(doctor: Doctor, mistakes: int) -> Iterator[Candidate]:
    """Losses of the policy with a KL or the critic's loss, whose coefficient is told or a number with few digits."""
    loss, kl_coef = doctor.arrays["loss"], doctor.batch.settings.get("kl_coef")
    found = [(words, mode, f, f(doctor.arrays), names) for words, mode, f, names in additions(doctor)]
    modes = {name for name, _ in REDUCTIONS[1:5]}
    for own in range(min(mistakes, 1) + 1 if loss.ndim or kl_coef else 1):
        bases = [c for c in policy_losses(doctor, own) if len(c.names) < 2 or not mistakes or loss.ndim]
        bases = [c for c in bases if not any(x.name == "a part of the rows" for x in c.names)]
        for words, mode, f, now, names in found:
            is_kl = words != "the critic's loss"
            told = kl_coef if is_kl else None
            alike = [c for c in bases if not is_kl or (modes & {x.name for x in c.names} or {""}) == {mode}]
            for base, c in coefficients(doctor, alike, now, told):
                of_c = wiring("KL with the wrong sign") if c < 0 else ()
                if told and abs(abs(c) - told) > 0.01 * told:
                    of_c += wiring("KL twice" if abs(abs(c) - 2 * told) < 0.01 * told else "another KL coefficient")
                names_here = (*base.names, *names, *of_c)
                if sum(not name.choice for name in names_here) == mistakes:
                    yield Candidate(
                        words=f"{base.words}, + {c:g} * {words}",
                        predict=lambda a, b=base, f=f, c=c: b.predict(a) + c * f(a),
                        names=names_here,
                        now=base.now + c * now,
                    )


def explain(doctor: Doctor, array: str, kinds: Sequence[Callable], mistakes: int) -> list[Candidate]:
    """The candidates that fit, the plainest first, without a mistake or with as few as can be, and not with more.

    One with names for one number is believed only if hardly any formula as plain is expected to fit it by chance.
    """
    where = doctor.mask if doctor.arrays[array].ndim else torch.ones((), dtype=torch.bool)
    is_precise = bool(where.ndim) or max(doctor.batch.eps.values()) < PRECISE
    tried: list[tuple[float, float]] = []  # weight and gap, of one number
    for number, kind in itertools.product(range(min(mistakes, 2 if is_precise else 1) + 1), kinds):
        candidates = [c for c in kind(doctor, number) if bool(doctor.gap(array, c, where).isfinite().all())]
        fits = doctor.fitting(array, candidates, where)
        tried += [] if where.ndim else [(c.weight, float(doctor.gap(array, c, where))) for c in candidates]
        if fits:
            sure = fits if where.ndim else [c for c in fits if kind is kinds[0] and not c.names]
            return sure or [c for c in fits if by_chance(doctor, array, c, tried) <= CHANCE]
    return []


def by_chance(doctor: Doctor, array: str, candidate: Candidate, tried: Sequence[tuple[float, float]]) -> float:
    """How many formulas as plain as a candidate are expected to be as near to one number as it is, by chance.

    The distinct numbers that they give within many tolerances, but not within one, show how dense they are.
    """
    where = torch.ones((), dtype=torch.bool)
    tolerance, size = doctor.noise(array, candidate, where)[0], float(doctor.arrays[array].abs())
    gaps = [gap / tolerance for weight, gap in tried if weight <= 1.01 * candidate.weight]
    dense = len({round(gap) for gap in gaps if 1 < abs(gap) < REACH}) / REACH
    gap = max(float(doctor.gap(array, candidate, where).abs()), SINGLE * size)
    return dense * gap / tolerance


def leave_open(doctor: Doctor, array: str, candidates: Iterator[Candidate], lacks: str) -> None:
    """Say that no formula fits, or what it would need."""
    where = doctor.mask if doctor.arrays[array].ndim else torch.ones((), dtype=torch.bool)
    if array == "loss" and not where.ndim and lacks not in ("logprobs", "new_logprobs"):
        more = "because one number may hold more, such as an entropy bonus"
        lacks = f"losses by token, {more}{lacks and ', or ' + lacks}"
    best, gap, _ = doctor.choose(array, candidates, where)
    doctor.unexplained(array, best, gap, lacks, where)


def say(doctor: Doctor, array: str, fits: list[Candidate], kinds: Sequence[Callable]) -> Candidate:
    """Say how an array was made; if several mistakes fit, that it is one of them."""
    found = doctor.arrays
    where = doctor.mask if found[array].ndim else torch.ones((), dtype=torch.bool)
    gaps = [float(doctor.gap(array, c, where).abs().max()) for c in fits]
    best, gap = fits[0], gaps[0]
    if not best.is_wrong:
        words = best.words
        if doctor.batch.eps[array] > PRECISE and not found[array].ndim:
            others = doctor.fitting(array, [c for kind in kinds[:1] for c in kind(doctor, 1)], where)
            words += f"; {len(others)} formulas with a mistake fit as well" if others else ""
        doctor.add(array, words, gap=gap, names=list(best.names))
        return best
    floor = 1e-7 * float(found[array].abs().max())
    plainest = [(g, c) for g, c in zip(gaps, fits, strict=True) if c.weight <= 1.01 * best.weight]
    least = max(min(plainest, key=lambda entry: entry[0])[0], floor)
    near = [c for g, c in plainest if max(g, floor) <= 4 * least]
    names = list(dict.fromkeys(name for c in near for name in c.names if not name.choice))
    first = near[0].predict(found)
    is_one = len({c.names for c in near}) == 1
    if is_one or all(
        float((c.predict(found) - first).abs().max()) <= floor for c in near
    ):  # one number with several names
        doctor.add(array, near[0].words, gap=gap, names=list(near[0].names))
        return near[0]
    doctor.add(array, unexplained=f"no formula fits without a mistake, and {len(names)} with one do")
    doctor.add(array, names=names[:3], asks=True)
    return near[0]


def check_loss(doctor: Doctor) -> None:
    found, mask = doctor.arrays, doctor.mask
    assumed = [name for name in ("new_logprobs", "logprobs") if name not in found]
    if "advantages" not in found or len(assumed) > 1:
        doctor.add("loss", lacks="advantages and new_logprobs")
        return
    for name in assumed:
        found[name] = found["logprobs" if name == "new_logprobs" else "new_logprobs"].clone()
        doctor.batch.eps[name] = doctor.batch.eps["loss"]
    kinds = (policy_losses, with_additions)
    most = 2 if found["loss"].ndim and "ref_logprobs" in found else 1  # one number fits many formulas
    fits = explain(doctor, "loss", kinds, mistakes=0 if assumed else most)
    if fits:
        best = say(doctor, "loss", fits, kinds)
        is_critic = not mean_of_rows(found["advantages"], mask).sub(found["advantages"])[mask].abs().max() < 1e-3
        if (
            is_critic
            and doctor.batch.eps["loss"] < PRECISE
            and "divided by the width" in {name.name for name in best.names}
        ):
            doctor.add("loss", names=list(named("mean over padding")), asks=True)
        if "gradient" in found:
            check_gradient(doctor, best)
    else:
        where = mask if found["loss"].ndim else torch.ones((), dtype=torch.bool)
        best, *_ = doctor.choose("loss", policy_losses(doctor, 0), where)
        rest = (found["loss"] - best.predict(found))[where]
        is_more = not where.ndim or float(rest.min()) > -1e-5 * float(found["loss"].abs().max())
        of_kl = "ref_logprobs, if it holds a KL" if is_more and "ref_logprobs" not in found else ""
        leave_open(doctor, "loss", policy_losses(doctor, 0), assumed[0] if assumed else of_kl)
    for name in assumed:
        del found[name]


def check_gradient(doctor: Doctor, best: Candidate) -> None:
    """Compare the gradient by new log-probs with that of the formula that explains the loss."""
    found, mask = doctor.arrays, doctor.mask
    leaf, there = found["new_logprobs"].clone().requires_grad_(), found["gradient"]
    total, slopes = best.predict(found | {"new_logprobs": leaf}), []
    for _, reduce in REDUCTIONS[:5] if total.ndim else [("", lambda x, m: x)]:
        slopes += torch.autograd.grad(reduce(total, mask), leaf, retain_graph=True)
    expected = min(slopes, key=lambda slope: float((slope - there)[mask].abs().max()))
    rounding = 1e-4 * float(expected.abs().max()) + 2 * doctor.batch.eps["gradient"] * float(there[mask].abs().max())
    gap = float((there - expected)[mask].abs().max())
    factor = float((there * expected)[mask].sum() / (expected[mask] ** 2).sum().clamp(min=1e-30))
    if gap <= rounding:
        name, words = "", "the gradient of that loss"
        outside = float(there[~mask].abs().max()) if not mask.all() else 0.0
        name = "padding has a gradient" if outside > rounding and not expected[~mask].any() else ""
    elif float(there[mask].abs().max()) < 1e-9 < float(expected.abs().max()):
        name, words = "the loss has no gradient", "not that of the loss"
    elif float((there - factor * expected)[mask].abs().max()) <= rounding * max(1, abs(factor)):
        words = f"{written(factor, 4)} times that of the loss"
        name = "the gradient has the wrong sign" if factor < 0 else "the gradient is on another scale"
    else:
        name, words = "advantages are not detached", "not that of the loss"
    doctor.add(
        "gradient",
        words,
        gap=gap,
        names=list(named(name)),
        where=doctor.place("gradient", expected, mask) if name else "",
    )


# ---- The critic's loss -----------------------------------------------------------------------------------------


def value_losses(doctor: Doctor, mistakes: int, one_number: bool = False) -> Iterator[Candidate]:
    """Losses of the critic, with so many mistakes."""
    found, mask, told = doctor.arrays, doctor.mask, doctor.batch.settings.get("cliprange")
    by_token = not one_number and found["value_loss"].ndim == 2
    bounds = [("", c) for c in dict.fromkeys([*([told] if told else []), 0.2, 0.5, 0.1, 0.05])]
    regions = [("", mask), ("", mask | doctor.following(mask))]
    reductions = [("mean over padding" if name == "divided by the width" else name, f) for name, f in REDUCTIONS]
    tables = (bounds, regions, VALUE_TARGETS, VALUES, VALUE_ERRORS, SCALES, BY_TOKEN if by_token else reductions)
    for rows in rows_of(doctor, tables, mistakes, choices=1):

        def predict(a: Arrays, rows=rows) -> Tensor:
            bound, region, target, new, error, scale, reduce = (f for _, f in rows)
            return reduce(scale(error(new(a), a["values"], target(a), bound)), region)

        bound, after = rows[0][1], ", the step after the end too" if rows[1][1] is not mask else ""
        clip = f", clipped to {bound:g}" if rows[4] is not VALUE_ERRORS[1] else ""
        yield Candidate(
            words=f"half the squared error{clip}{after}",
            predict=predict,
            names=tuple(fault for name, _ in rows for fault in named(name, "value_loss")),
        )


def check_value_loss(doctor: Doctor) -> None:
    found = doctor.arrays
    assumed = [name for name in ("new_values", "values") if name not in found]
    lacks = [name for name in ("returns",) if name not in found] + (assumed if len(assumed) > 1 else [])
    if lacks:
        doctor.add("value_loss", lacks=" and ".join(lacks))
        return
    for name in assumed:
        found[name] = found["values" if name == "new_values" else "new_values"].clone()
        doctor.batch.eps[name] = doctor.batch.eps["value_loss"]
    fits = explain(doctor, "value_loss", (value_losses,), mistakes=0 if assumed else 2)
    if fits:
        say(doctor, "value_loss", fits, (value_losses,))
    else:
        leave_open(doctor, "value_loss", value_losses(doctor, 0), assumed[0] if assumed else "")
    for name in assumed:
        del found[name]
