"""Which formula made the advantages and returns of a dump: see doctor.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_rlhf.check import forms
from ppo_rlhf.check.doctor import WIRING, Arrays, Candidate, Doctor, root_mean_square, wiring
from ppo_rlhf.check.faults import Fault
from ppo_rlhf.report.derivation import written
from ppo_rlhf.rlvr import algebra

STARTS = [(1.0, 0.95), (0.98, 0.8)]  # gamma, lambda
NICE = 3e-4  # a constant with few digits is taken if the fit is as good


@dataclass(kw_only=True, frozen=True)
class Base:
    """A way to make advantages before they are whitened; constants are gamma and lambda, or none."""

    words: str
    compute: Callable[..., Tensor]  # of arrays and constants
    names: tuple[Fault, ...] = ()
    constants: int = 2
    unknown: Tensor | None = None  # entries that depend on values or rewards that are not in the dump


# ---- Whitening -------------------------------------------------------------------------------------------------


def whiteners(doctor: Doctor) -> list[tuple[str, Callable[[Tensor], Tensor], tuple[Fault, ...]]]:
    """Ways to whiten (rows, width), the first of which does nothing."""
    mask = doctor.mask
    found: list = [("", lambda a: a, ())]
    for f, names in doctor.variants("whiten"):
        if any(name.name == "not the rewards" for name in names):
            continue
        found.append((", then whitened", lambda a, f=f: f(a, mask), names))
    first = mask & (mask.cumsum(1) == 1)
    for f, names in doctor.variants("whiten"):
        if all(name.choice for name in names) and WIRING["whitened per row"] not in names:

            def over_rows(a: Tensor, f: Callable = f) -> Tensor:
                each = a.masked_fill(~first, 0).sum(1, keepdim=True)
                return spread(f(each, mask.any(1, keepdim=True))[:, 0], mask)

            found.append((", then whitened over responses", over_rows, (*names, *wiring("whitened over responses"))))
    further = mask | doctor.following(mask)
    for f, names in doctor.variants("whiten"):
        if all(name.choice for name in names) and WIRING["whitened per row"] not in names:
            if (further != mask).any():
                found.append(
                    (
                        ", then whitened",
                        lambda a, f=f: f(a, further),
                        (*names, *wiring("whitened with the step after the end")),
                    )
                )
            for k in (k for k in range(2, len(mask) // 2 + 1) if len(mask) % k == 0 and k <= 16):
                parts = mask.split(len(mask) // k)

                def each(a: Tensor, f=f, parts=parts) -> Tensor:
                    return torch.cat([f(x, m) for x, m in zip(a.split(len(parts[0])), parts, strict=True)])

                found.append((f", then whitened in {k} parts", each, (*names, *wiring("whitened per process"))))
            if (doctor.true_mask != mask).any():
                found.append((", then whitened", lambda a, f=f: f(a, doctor.true_mask), names))
    return found


# ---- Bases by token --------------------------------------------------------------------------------------------


def reward_arrays(doctor: Doctor) -> Iterator[tuple[str, Callable[[Arrays], Tensor], tuple[Fault, ...]]]:
    """Rewards by token: those of the dump, or what they must have been."""
    found, mask = doctor.arrays, doctor.mask
    if "rewards" in found:
        yield "rewards", lambda a: a["rewards"], ()
        if "scores" in found:
            for at in ("last", "next"):
                yield (
                    "scores",
                    lambda a, at=at: forms.token_rewards(
                        a["scores"], 0 * a["rewards"], 0 * a["rewards"], mask, 0.0, at
                    ),
                    wiring("the KL does not reach the advantages"),
                )
        return
    if "scores" not in found:
        return
    nothing = torch.zeros(mask.shape, dtype=torch.float64)
    coefficients = [0.0]
    if {"logprobs", "ref_logprobs"} <= found.keys():
        told = doctor.batch.settings.get("kl_coef")
        coefficients += [told] if told is not None else []
    for coefficient in coefficients:
        for at in ("last", "next"):

            def made(a: Arrays, coefficient=coefficient, at=at) -> Tensor:
                old, ref = (a["logprobs"], a["ref_logprobs"]) if coefficient else (nothing, nothing)
                return forms.token_rewards(a["scores"], old, ref, mask, coefficient, at)

            yield (
                f"rewards with the score at the {'end' if at == 'last' else 'step after it'} "
                f"and a KL coefficient of {coefficient:g}",
                made,
                (),
            )


def token_bases(doctor: Doctor, plain: bool) -> Iterator[Base]:
    """GAE, or sums of rewards where there are no values. plain: without mistakes."""
    mask = doctor.mask
    step_after = mask | doctor.following(mask)
    everywhere = torch.ones_like(mask)
    has_values = "values" in doctor.arrays
    score_after = next((f.words for f in doctor.findings if f.array == "rewards"), "")
    is_after, is_at = "on the step after" in score_after, "on the last token" in score_after
    masks = [(mask, () if not is_after else None)]
    masks += (
        [(step_after, () if not is_at else wiring("bootstrapped past the end"))] if (step_after != mask).any() else []
    )
    masks = [(m, names if names is not None else ()) for m, names in masks]
    if is_after:
        masks.reverse()
    if (doctor.true_mask != mask).any():
        masks += [(doctor.true_mask, ()), (doctor.true_mask | doctor.following(doctor.true_mask), ())]

    def values(a: Arrays, change: Callable[[Tensor], Tensor] = lambda v: v) -> Tensor:
        return change(a["values"]) if has_values else torch.zeros(mask.shape, dtype=torch.float64)

    for what, rewards, of_rewards in reward_arrays(doctor):
        if plain and of_rewards:
            continue
        words = (
            f"GAE with gamma {{0}}, lambda {{1}} of {what} and values"
            if has_values
            else f"the sum of {what} from each token on, with gamma {{0}}"
        )
        for m, names in masks:
            if plain and any(not name.choice for name in names):
                continue

            def gae(a: Arrays, gamma=1.0, lam=1.0, f=forms.gae, m=m, rewards=rewards, change=lambda v: v) -> Tensor:
                lam = lam if has_values else 1.0
                answer = f(rewards(a), values(a, change), m, gamma, lam)
                return answer[0] if isinstance(answer, tuple) else answer

            n = 2 if has_values else 1
            yield Base(words=words, compute=gae, names=(*of_rewards, *names), constants=n)
            if plain or of_rewards:
                continue
            for f, of_f in doctor.variants("gae"):
                if (
                    of_f
                    and not any(name.choice for name in of_f)
                    and len(of_f) == 1
                    and of_f[0].name not in SAME_ADVANTAGES
                ):
                    yield Base(
                        words=words,
                        compute=lambda a, *c, f=f, g=gae: g(a, *c, f=f),
                        names=(*names, *of_f),
                        constants=n,
                    )
            first = m & (m.cumsum(1) == 1)
            for shift, word in ((1, "late"), (-1, "early")):
                if has_values:
                    yield Base(
                        words=words,
                        compute=lambda a, *c, g=gae, s=shift: g(a, *c, change=lambda v: v.roll(s, 1)),
                        names=(*names, *wiring(f"values one token {word}")),
                        unknown=first if shift > 0 else None,
                    )
                yield Base(
                    words=words,
                    compute=lambda a, *c, g=gae, s=shift, r=rewards: g(a, *c, rewards=lambda a: r(a).roll(s, 1)),
                    names=(*names, *wiring(f"rewards one token {word}")),
                    constants=n,
                    unknown=first if shift > 0 else None,
                )
            for order in [torch.arange(len(mask)).roll(s) for s in (1, -1)] if has_values and len(mask) > 1 else []:
                yield Base(
                    words=words,
                    compute=lambda a, *c, g=gae, o=order: g(a, *c, change=lambda v: v[o]),
                    names=(*names, *wiring("values of another row")),
                )
        if plain or of_rewards:
            continue

        def across(a: Arrays, gamma=1.0, lam=1.0, m=mask, rewards=rewards) -> Tensor:
            flat = [x.reshape(1, -1) for x in (rewards(a), values(a), m)]
            return forms.gae(*flat, gamma, lam if has_values else 1.0)[0].reshape(m.shape)

        n = 2 if has_values else 1
        yield Base(words=words, compute=across, names=wiring("GAE across episodes"), constants=n)
        yield Base(
            words=words,
            compute=lambda a, *c: across(a, *c, m=everywhere),
            names=wiring("GAE across episodes", "bootstrapped from padding"),
            constants=n,
        )
        yield Base(
            words=words,
            compute=lambda a, gamma=1.0, lam=1.0, r=rewards: forms.gae(r(a), values(a), everywhere, gamma, lam)[0],
            names=wiring("bootstrapped from padding"),
            constants=n,
        )


SAME_ADVANTAGES = (
    "one lambda in the targets",
    "one lambda in the advantages",
    "a negative lambda",
    "a lambda by the width",
    "one step",
    "without lambda",
)


# ---- Bases by response -----------------------------------------------------------------------------------------


def prompts_of(doctor: Doctor) -> Tensor | None:
    """A number for each row, equal where prompts are; None where the dump has no prompts."""
    batch = doctor.batch
    width = batch.mask.shape[1]
    start = batch.tokens.shape[1] - width
    found = []
    for row in range(len(batch.mask)):
        first = start + int(batch.mask[row].byte().argmax())
        first = max(first, batch.settings["context_length"]) if start == 0 else first
        found.append(tuple(batch.tokens[row, :first][batch.is_text[row, :first]].tolist()))
    return torch.tensor([found.index(x) for x in found]) if any(found) else None


def groupings(doctor: Doctor) -> list[tuple[str, Tensor, tuple[Fault, ...]]]:
    """Which responses may have been compared."""
    rows = len(doctor.mask)
    prompts, told = prompts_of(doctor), doctor.arrays.get("groups")
    size = int(doctor.batch.settings.get("group_size", 0))
    one = torch.zeros(rows, dtype=torch.long)
    found: list[tuple[str, Tensor, tuple[Fault, ...]]] = []
    divisors = [n for n in range(2, rows) if rows % n == 0]
    if told is not None:
        found.append(("the dump's groups", told.long(), ()))
    if prompts is not None and len(prompts.unique()) < rows:
        found.append(("groups of one prompt", prompts, ()))
    if size > 1 and rows % size == 0 and told is None:
        found.append((f"groups of {size} rows", torch.arange(rows) // size, ()))
    is_known = bool(found) and not (
        len(found) == 1 and prompts is not None and len(prompts.unique()) == 1 and told is None
    )
    for n in divisors:
        # The same prompt may be drawn twice, which makes two groups.
        groups = torch.arange(rows) // n
        fits = prompts is None or all(prompts[groups == g].unique().numel() == 1 for g in groups.unique())
        fits = fits and (told is None or all(told[groups == g].unique().numel() == 1 for g in groups.unique()))
        found.append(
            (
                f"groups of {n} rows",
                groups,
                ()
                if (fits and told is None and not size) or (fits and prompts is not None)
                else wiring("groups over the wrong rows"),
            )
        )
        groups = torch.arange(rows) % (rows // n)
        fits = prompts is not None and all(prompts[groups == g].unique().numel() == 1 for g in groups.unique())
        found.append(
            (
                f"groups of {n} rows that are {rows // n} apart",
                groups,
                () if fits else wiring("groups over the wrong rows"),
            )
        )
    found.append(
        ("the whole batch", one, wiring("statistics of the batch" if is_known else "a baseline of the batch"))
    )
    return found


EPSILONS = tuple((f"epsilon {e} in place of 1e-6", "1e-6", e) for e in ("1e-8", "1e-5", "0.0"))


def response_bases(doctor: Doctor) -> Iterator[Base]:
    """Estimators that compare a response with others, the same on all of its tokens."""
    found, mask = doctor.arrays, doctor.mask
    totals: list[tuple[str, Callable[[Arrays], Tensor]]] = []
    if "scores" in found:
        totals.append(("scores", lambda a: a["scores"]))
    if "rewards" in found:
        totals.append(
            ("sums of rewards", lambda a: a["rewards"].masked_fill(~(mask | doctor.following(mask)), 0).sum(1))
        )
    orders: list[tuple[int, int, tuple[Fault, ...]]] = [
        (0, 0, ())
    ]  # by how many rows scores and advantages are moved
    for shift in (1, -1) if len(mask) > 1 else ():
        orders.append((0, shift, wiring("advantages of another row")))
        orders.append((shift, 0, wiring("score of another row")))
    for what, total in totals:
        for before, after, of_order in orders:
            yield Base(
                words=what,
                compute=lambda a, t=total, s=before + after: spread(t(a).roll(s), mask),
                names=(*of_order, *wiring("without a baseline")),
                constants=0,
            )
            for words, groups, of_groups in groupings(doctor):
                for name in ("grpo", "dr_grpo", "rloo"):
                    for f, of_f in doctor.variants("group_advantages", *EPSILONS):
                        if any(bad in fault.name for fault in of_f for bad in OTHER_GROUPS):
                            continue
                        if of_order and not all(fault.choice for fault in of_f):
                            continue
                        if (
                            of_f
                            and name != "grpo"
                            and any(
                                "eps" in fault.name or "std" in fault.name or "divi" in fault.name for fault in of_f
                            )
                        ):
                            continue

                        def compute(a: Arrays, f=f, t=total, g=groups, n=name, b=before, s=after) -> Tensor:
                            return spread(f(t(a).roll(b), g, None, n).roll(s), mask)

                        yield Base(
                            words=f"{ESTIMATOR_WORDS[name]} of {what} in {words}",
                            compute=compute,
                            names=(*of_order, *of_groups, *of_f),
                            constants=0,
                        )
                if of_order:
                    continue
                yield from in_another_order(doctor, what, total, words, groups)
                for name in ("maxrl", "opo"):

                    def compute(a: Arrays, t=total, g=groups, n=name) -> Tensor:
                        rewards = torch.where(doctor.only_last(mask), t(a).unsqueeze(1), 0.0)
                        return algebra.ESTIMATORS[n](rewards, mask, g)[0]

                    yield Base(
                        words=f"{name} of {what} in {words}",
                        compute=compute,
                        names=(*of_groups, *wiring("another estimator")),
                        constants=0,
                    )
        if "baselines" in found:
            yield Base(
                words=f"{what} - baselines",
                compute=lambda a, t=total: spread(t(a) - a["baselines"], mask),
                constants=0,
            )


def in_another_order(
    doctor: Doctor, what: str, total: Callable[[Arrays], Tensor], words: str, groups: Tensor
) -> Iterator[Base]:
    """Means or deviations of groups that are given to rows in another order: repeated as a whole, not one by one."""
    sizes = groups.unique(return_counts=True)[1]
    if len(sizes) < 2 or sizes.min() != sizes.max() or sizes[0] < 2:
        return
    firsts = [int((groups == g).nonzero()[0]) for g in groups.unique()]
    tiled = torch.tensor(firsts).repeat(int(sizes[0]))
    same = torch.arange(len(groups))
    for mean_order, std_order in ((tiled, same), (same, tiled), (tiled, tiled)):
        for eps in (None, 1e-6, 1e-4, 1e-8):

            def compute(a: Arrays, m: Tensor = mean_order, s: Tensor = std_order, eps: float | None = eps) -> Tensor:
                x = total(a)
                centred = forms.group_advantages(x, groups, None, "dr_grpo")
                std = (algebra.by_group(centred**2, groups) / (sizes[0] - 1)).sqrt()
                x = x - (x - centred)[m]
                return spread(x if eps is None else x / (std[s] + eps), doctor.mask)

            form = "score - mean" if eps is None else "(score - mean) / std"
            yield Base(
                words=f"{form} of {what} in {words}",
                compute=compute,
                names=wiring("statistics of groups in another order"),
                constants=0,
            )


OTHER_GROUPS = ("by position", "interleaved", "every group", "over the batch", "always", "never")
ESTIMATOR_WORDS = {
    "grpo": "(score - mean) / std",
    "dr_grpo": "score - mean",
    "rloo": "score - mean of the others",
}


def spread(x: Tensor, mask: Tensor) -> Tensor:
    return x.unsqueeze(1).expand(mask.shape).masked_fill(~mask, 0)


# ---- Fitting ---------------------------------------------------------------------------------------------------


def affine(y: Tensor, a: Tensor, labels: Tensor) -> Tensor:
    """What is left of y (tokens,) once the best multiple of a and a constant are subtracted, for each label."""
    n = int(labels.max()) + 1 if len(labels) else 1

    def per_label(x: Tensor) -> Tensor:
        return torch.zeros(n, dtype=x.dtype).index_add(0, labels, x)[labels]

    count = per_label(torch.ones_like(y))
    y, a = y - per_label(y) / count, a - per_label(a) / count
    scale = per_label(a * a)
    return y - a * torch.where(scale > 1e-24, per_label(a * y) / scale.clamp(min=1e-24), 0)


class Fit:
    """The constants with which a base is nearest to an array, up to whitening, and how near that is."""

    def __init__(self, base: Base, doctor: Doctor, y: Tensor, where: Tensor, labels: Tensor | None):
        """labels: of the tokens (tokens,) that are whitened together; None: the base is the array itself."""
        self.base, self.doctor, self.y, self.where, self.labels = base, doctor, y, where, labels
        if base.unknown is not None and labels is not None:
            self.where = where & ~base.unknown
            self.y, self.labels = y[self.where[where]], labels[self.where[where]]
        self.size = root_mean_square(self.y)
        self.constants: tuple[float, ...] = ()
        self.error = float("inf")

    def residual(self, constants: Sequence[float]) -> Tensor:
        a = self.base.compute(self.doctor.arrays, *constants)[self.where]
        return self.y - a if self.labels is None else affine(self.y, a, self.labels)

    def start(self, starts: Sequence[tuple[float, ...]]) -> Fit:
        """Try some constants."""
        for constants in dict.fromkeys(start[: self.base.constants] for start in starts):
            error = root_mean_square(self.residual(constants))
            if error < self.error:
                self.constants, self.error = constants, error
            if self.error < 1e-6 * self.size:
                break
        return self

    def refine(self, steps: int = 8) -> Fit:
        """Go on by Gauss and Newton's method, and take numbers with few digits if they are as good."""
        for _ in range(steps):
            if not self.constants or self.error < 1e-6 * self.size:
                break
            here = self.residual(self.constants)
            slopes = [
                (self.residual([c - 1e-5 * (i == k) for k, c in enumerate(self.constants)]) - here) / -1e-5
                for i in range(len(self.constants))
            ]
            step = (
                torch.linalg.lstsq(torch.stack(slopes, 1), -here.unsqueeze(1), driver="gelsd").solution[:, 0].tolist()
            )
            before = self.error
            for shrink in (1.0, 0.3):
                there = tuple(
                    min(max(c + shrink * s, least), 1.0)
                    for c, s, least in zip(self.constants, step, (0.5, 0.0), strict=False)
                )
                self.start([there])
                if self.error < before:
                    break
            if not self.error < before * (1 - 1e-4):
                break
        told = self.doctor.batch.settings
        close = [tuple(told.get(key, c) for key, c in zip(("gamma", "lam"), self.constants, strict=False))]
        for constants in close + [tuple(round(c, digits) for c in self.constants) for digits in (2, 3, 4)]:
            error = root_mean_square(self.residual(constants)) if constants != self.constants else self.error
            if error <= max(1.03 * self.error, 1e-6 * self.size):
                self.constants, self.error = constants, error
                break
        return self


def candidates_of(fit: Fit, ways: list) -> Iterator[Candidate]:
    base, constants, doctor = fit.base, fit.constants, fit.doctor
    told = doctor.batch.settings
    names = list(base.names)
    for value, key, name in zip(constants, ("gamma", "lam"), ("another gamma", "another lambda"), strict=False):
        if key in told and abs(value - told[key]) > 2e-3:
            names += wiring(name)
    words = base.words.format(*(written(c, 4) for c in constants))
    divided = words.startswith("(score")
    value = base.compute(doctor.arrays, *constants)
    for how, f, of_f in ways:
        twice = wiring("normalised twice") if divided and how else ()
        yield Candidate(
            words=words + how,
            predict=lambda a, f=f: f(base.compute(a, *constants)),
            names=(*names, *of_f, *twice),
            now=f(value),
            unknown=base.unknown,
        )
    if base.unknown is not None and len(ways) > 1:  # what is not known is in the statistics, too
        there = fit.y, value[fit.where]
        slope = float(torch.cov(torch.stack(there))[0, 1] / there[1].var().clamp(min=1e-30))
        constant = float(there[0].mean() - slope * there[1].mean())
        yield Candidate(
            words=words + ", then shifted and scaled",
            predict=lambda a: slope * base.compute(a, *constants) + constant,
            names=tuple(names),
            unknown=base.unknown,
        )


def is_constant(x: Tensor, where: Tensor, eps: float) -> bool:
    """Whether all tokens of a response have the same number."""
    rows = [row[there] for row, there in zip(x, where, strict=True) if there.any()]
    return all(float(row.max() - row.min()) <= 4 * eps * float(row.abs().max()) for row in rows)


def explain(
    doctor: Doctor, array: str, target: Tensor, ways: list
) -> tuple[Candidate | None, float, bool, Base | None, tuple]:
    """The best candidate for advantages, or for what returns hold beyond values."""
    where = doctor.mask & doctor.true_mask
    y = target[where]
    rows = torch.arange(len(where)).unsqueeze(1).expand(where.shape)[where]
    columns = torch.arange(where.shape[1]).expand(where.shape)[where]
    parts = [rows * k // len(where) for k in range(2, len(where) // 2 + 1) if len(where) % k == 0 and k <= 16]
    exact = len(ways) == 1
    whole = None if exact else torch.zeros_like(rows)
    told = doctor.batch.settings
    starts = [
        (told.get("gamma", 1.0), told.get("lam", 1.0)),
        (told.get("gamma", 1.0), told.get("lam", 0.95)),
        *STARTS,
    ]
    doctor.arrays["_target"], doctor.batch.eps["_target"] = target, doctor.batch.eps[array]
    pool: list[tuple[Candidate, Fit]] = []
    best: tuple = (None, float("inf"), False, None, ())

    def consider(fits: list[Fit]) -> bool:
        """Add the candidates of some fits; whether the best of all is as near as can be, and without a mistake."""
        nonlocal best
        pool.extend((candidate, fit) for fit in fits for candidate in candidates_of(fit, ways))
        chosen, gap, is_explained = doctor.choose("_target", [candidate for candidate, _ in pool], where)
        if chosen is None:
            return False
        fit = next(fit for candidate, fit in pool if candidate is chosen)
        best = (chosen, gap, is_explained, fit.base, fit.constants)
        return is_explained and all(name.choice for name in chosen.names) and doctor.is_near("_target", chosen, where)

    def fits_of(bases: list[Base], labels: Tensor | None, most: int) -> list[Fit]:
        fits = [Fit(base, doctor, y, where, labels).start(starts if base.constants else [()]) for base in bases]
        if labels is whole and bases and any(base.names for base in bases):  # mistakes: any of them may be near
            fits = [fit.refine(2) for fit in fits]
        fits.sort(key=lambda fit: (fit.error + 1e-6 * fit.size) * 1.5 ** len(fit.base.names))
        return [fit.refine() for fit in fits[:most]]

    plain = list(token_bases(doctor, True))
    done = False
    if is_constant(target, where, doctor.batch.eps[array]):
        bases = list(response_bases(doctor))  # as they are, and up to whitening, where many are the same
        done = consider(fits_of(bases, None, 12) + fits_of(bases, whole, 30))
    if best[2]:  # by mistake, but explained: sums of rewards would explain it, too, where there are no others
        done = True
    done = done or consider(fits_of(plain, whole, 6))
    if not done and not exact:
        done = consider([fit for labels in (*parts, rows, columns) for fit in fits_of(plain, labels, 2)])
    if not done:
        consider(fits_of(list(token_bases(doctor, False)), whole, 12))
    del doctor.arrays["_target"]
    return best


def check_advantages(doctor: Doctor) -> tuple[Base, tuple] | None:
    """Explain the advantages. Returns what they were before they were whitened."""
    target, mask = doctor.arrays["advantages"], doctor.mask
    if target.ndim == 1:
        target = doctor.arrays["advantages"] = spread(target, mask)
    best, gap, is_explained, base, constants = explain(doctor, "advantages", target, whiteners(doctor))
    if not is_explained:
        lacks = lacking(doctor)
        doctor.unexplained("advantages", best, gap, lacks, mask)
        return None
    plain = None
    if any(not name.choice for name in best.names):
        plain = reference(doctor, base, constants, bool(", then" in best.words))
    doctor.explained("advantages", best, gap, plain, mask)
    return base, constants


def reference(doctor: Doctor, base: Base, constants: tuple, is_whitened: bool) -> Callable[[Arrays], Tensor] | None:
    """The advantages without the mistakes, with the same constants."""
    told = doctor.batch.settings
    if base.constants:
        constants = tuple(told.get(key, c) for key, c in zip(("gamma", "lam"), constants, strict=False))
        right = next(token_bases(doctor, True), None)
    else:
        right = next(
            (
                b
                for b in response_bases(doctor)
                if not b.names and b.words.split(" of ")[0] == base.words.split(" of ")[0]
            ),
            None,
        )
    if right is None:
        return None
    whiten = (
        (lambda a: forms.whiten(a, doctor.mask))
        if is_whitened and not (not base.constants and "/" in base.words)
        else (lambda a: a)
    )
    return lambda a: whiten(right.compute(a, *constants))


def lacking(doctor: Doctor) -> str:
    """What the dump would need so that its advantages could be explained."""
    found = doctor.arrays
    if "rewards" not in found and "scores" not in found:
        return "rewards or scores"
    target = found["advantages"]
    constant = all(
        float(target[r][w].max() - target[r][w].min()) <= 1e-4 for r, w in enumerate(doctor.mask) if w.any()
    )
    if constant:
        return (
            ""
            if "groups" in found or prompts_of(doctor) is not None or "group_size" in doctor.batch.settings
            else "groups, or prompts"
        )
    if "values" not in found:
        return "values"
    if "rewards" not in found:
        return "rewards"
    return ""


# ---- Returns ---------------------------------------------------------------------------------------------------


def check_returns(doctor: Doctor, made: tuple[Base, tuple] | None) -> None:
    found, mask = doctor.arrays, doctor.mask
    returns = found["returns"]
    where = mask & doctor.true_mask
    candidates: list[Candidate] = []
    before = None
    if made is not None:
        base, constants = made
        before = lambda a: base.compute(a, *constants)  # noqa: E731
        name = "advantages before they were whitened" if base.constants else "advantages"
        if "values" in found:
            candidates.append(Candidate(words=f"{name} + values", predict=lambda a: before(a) + a["values"]))
            for shift, word in ((1, "late"), (-1, "early")):
                candidates.append(
                    Candidate(
                        words=f"{name} + values",
                        predict=lambda a, s=shift: before(a) + a["values"].roll(s, 1),
                        names=wiring(f"returns with values one token {word}"),
                        unknown=mask & (mask.cumsum(1) == 1) if shift > 0 else doctor.only_last(mask),
                    )
                )
        candidates.append(
            Candidate(words=name, predict=before, names=wiring("returns without values") if "values" in found else ())
        )
    if "advantages" in found:
        if "values" in found:
            whole = found["advantages"][where]
            is_white = whole.numel() > 1 and abs(float(whole.mean())) < 1e-3 and abs(float(whole.std()) - 1) < 0.02
            same = (
                not is_white
                if made is None
                else root_mean_square((before(found) - found["advantages"])[where]) < 1e-6
            )
            candidates.append(
                Candidate(
                    words="advantages + values",
                    predict=lambda a: a["advantages"] + a["values"],
                    names=() if same else wiring("returns of whitened advantages"),
                )
            )
            if made is not None and not same:
                candidates += [
                    Candidate(
                        words=f"advantages{how} + values",
                        predict=lambda a, f=f: f(before(a)) + a["values"],
                        names=(*wiring("returns of whitened advantages"), *(n for n in names if n.choice)),
                    )
                    for how, f, names in whiteners(doctor)[1:]
                    if how
                ]
        candidates.append(
            Candidate(
                words="advantages",
                predict=lambda a: a["advantages"],
                names=wiring("returns without values") if "values" in found else (),
            )
        )
    if "rewards" in found:
        candidates.append(
            Candidate(words="rewards", predict=lambda a: a["rewards"], names=wiring("returns are rewards"))
        )
    best, gap, is_explained = doctor.choose("returns", candidates, where) if candidates else (None, 0.0, False)
    if not is_explained and ("rewards" in found or "scores" in found):
        values = found.get("values", torch.zeros_like(returns))
        ways = whiteners(doctor) if made is None else whiteners(doctor)[:1]
        alone, gap_alone, explained_alone, base, constants = explain(doctor, "returns", returns - values, ways)
        if explained_alone and alone is not None:
            names = alone.names
            if (
                made is not None
                and base.constants == 2
                and len(made[1]) == 2
                and abs(constants[1] - made[1][1]) > 2e-3
            ):
                names = (*(n for n in names if n.name != "another lambda"), *wiring("a lambda of their own"))
            elif ", then" in alone.words:
                names = (*names, *wiring("returns of whitened advantages"))
            words = f"{alone.words} + values" if "values" in found else alone.words
            doctor.explained(
                "returns",
                Candidate(words=words, predict=lambda a: alone.predict(a) + values, names=names),
                gap_alone,
                None,
                where,
            )
            return
    if not is_explained:
        lacks = (
            ""
            if "values" in found and "rewards" in found
            else ("values" if "values" not in found else "rewards or scores")
        )
        doctor.unexplained("returns", best, gap, lacks, where)
        return
    right = (lambda a: before(a) + a["values"]) if before and "values" in found else None
    doctor.explained("returns", best, gap, right, where)
