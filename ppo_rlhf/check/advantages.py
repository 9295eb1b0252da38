"""Which formula made the advantages and returns of a dump: see doctor.py.

A base is a formula for advantages before they are whitened, perhaps with a mistake. Its gamma and lambda are solved
for (Fit), and then it is whitened in each of several ways.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ppo_rlhf.check import faults, forms
from ppo_rlhf.check.doctor import WIRING, Arrays, Candidate, Doctor, largest, nice, root_mean_square, wiring
from ppo_rlhf.check.faults import Fault
from ppo_rlhf.report.derivation import written
from ppo_rlhf.rlvr import algebra

STARTS = [(1.0, 1.0), (1.0, 0.95), (0.98, 0.8)]  # gamma, lambda
SHIFTS = ((1, "late"), (-1, "early"))
PLACES = (("last", "end"), ("next", "step after it"))  # of the score
OF_SCALE = (  # mistakes that multiply the advantages of a group by a number
    *("by the variance", "divided by the variance", "divided by the standard error", "divided by the range"),
    *("divided by the mean absolute deviation", "multiplied by the deviation", "1 added to the deviation"),
    *("a large epsilon", "n / (n - 1) twice", "a mean of the others divided by n", "advantages doubled"),
)
BOOK = {fault.name: fault for fault in faults.of("group_advantages")}
Names = tuple[Fault, ...]
Way = tuple[str, Callable[[Tensor], Tensor], Names]  # to whiten: what is said of it, the function, and its mistakes


@dataclass(kw_only=True, frozen=True)
class Base(Candidate):
    """Advantages before they are whitened. predict takes gamma and lambda, too, or as many as `constants` says."""

    constants: int = 0

    @property
    def is_divided(self) -> bool:
        return self.words.startswith(("(score", "((score")) and ") / " in self.words


@dataclass(kw_only=True, frozen=True)
class Made(Candidate):
    """A base with its constants, whitened in some way."""

    base: Base
    constants: tuple[float, ...]
    how: str

    def before(self, arrays: Arrays) -> Tensor:
        return self.base.predict(arrays, *self.constants)


def same(x: Tensor) -> Tensor:
    return x


def of_first(x: Tensor, mask: Tensor) -> Tensor:
    """The number at the first token of each row: (rows,)."""
    return x.masked_fill(~Doctor.only_first(mask), 0).sum(1)


def spread(x: Tensor, mask: Tensor) -> Tensor:
    """One number per row, on each of its tokens."""
    return x.unsqueeze(1).expand(mask.shape).masked_fill(~mask, 0)


def numbers_of_parts(rows: int) -> list[int]:
    """Into how many equal parts, of two rows or more, processes or micro-batches may have cut a batch."""
    return [k for k in range(2, rows // 2 + 1) if rows % k == 0 and k <= 16]


def shifted(x: Tensor, shift: int) -> Tensor:
    """Each row moved by one column, with 0 where nothing comes in."""
    moved = x.roll(shift, 1)
    moved[:, 0 if shift > 0 else -1] = 0
    return moved


def is_constant(x: Tensor, where: Tensor, eps: float) -> bool:
    """Whether all tokens of a response have the same number."""
    rows = [row[there] for row, there in zip(x, where, strict=True) if there.any()]
    return all(float(row.max() - row.min()) <= 4 * eps * float(row.abs().max()) for row in rows)


# ---- Whitening -------------------------------------------------------------------------------------------------


def over_responses(mask: Tensor, f: Callable, a: Tensor) -> Tensor:
    """Whiten one number per response."""
    return spread(f(of_first(a, mask).unsqueeze(1), mask.any(1, keepdim=True))[:, 0], mask)


def with_large_epsilon(a: Tensor, mask: Tensor) -> Tensor:
    """As TRL's RLOO does."""
    return ((a - a[mask].mean()) / (a[mask].std() + 1e-4)).masked_fill(~mask, 0)


def in_parts(mask: Tensor, k: int, f: Callable, a: Tensor) -> Tensor:
    """Whiten each of k parts of the batch on its own."""
    return torch.cat([f(x, m) for x, m in zip(a.chunk(k), mask.chunk(k), strict=True)])


def whiteners(doctor: Doctor) -> list[Way]:
    """Ways to whiten (rows, width), the first of which does nothing."""
    mask, true_mask = doctor.mask, doctor.true_mask
    further = mask | doctor.following(mask)
    book = doctor.variants("whiten")
    right = [(f, names) for f, names in book if all(name.choice for name in names)]
    right = [(f, names) for f, names in right if WIRING["whitened per row"] not in names]
    found: list[Way] = [("", same, ())]

    def add(apply: Callable, functions: list, *mistakes: str, how: str = "") -> None:
        for f, names in functions:
            found.append((f", then whitened{how}", partial(apply, f), (*names, *wiring(*mistakes))))

    add(lambda f, a: f(a, mask), book)
    as_trl = [(with_large_epsilon, named("epsilon 1e-4"))] if mask.any(1).sum() > 1 else []
    add(partial(over_responses, mask), right + as_trl, "whitened over responses", how=" over responses")
    if (further != mask).any():
        add(lambda f, a: f(a, further), right, "whitened with the step after the end")
    for k in numbers_of_parts(len(mask)):
        add(partial(in_parts, mask, k), right, "whitened per process", how=f" in {k} parts")
    if (true_mask != mask).any():
        add(lambda f, a: f(a, true_mask), right)
    add(lambda f, a: -f(a, mask), right, "advantages with the wrong sign", how=" and negated")
    return [*found, (", negated", torch.neg, wiring("advantages with the wrong sign"))]


# ---- Bases by token --------------------------------------------------------------------------------------------


def with_score(a: Arrays, mask: Tensor, coefficient: float, at: str) -> Tensor:
    """Rewards of scores and of log-probs, which are not needed if the coefficient is 0."""
    nothing = torch.zeros(mask.shape, dtype=torch.float64)
    old, ref = (a["logprobs"], a["ref_logprobs"]) if coefficient else (nothing, nothing)
    return forms.token_rewards(a["scores"], old, ref, mask, coefficient, at)


def reward_arrays(doctor: Doctor) -> Iterator[tuple[str, Callable[[Arrays], Tensor], Names]]:
    """Rewards by token: those of the dump, or what they must have been."""
    found, told = doctor.arrays, doctor.batch.settings.get("kl_coef")
    has_rewards = "rewards" in found
    if has_rewards:
        yield "rewards", itemgetter("rewards"), ()
    has_penalty = not has_rewards and told is not None and {"logprobs", "ref_logprobs"} <= found.keys()
    names = wiring("the KL does not reach the advantages") if has_rewards else ()
    for coefficient, (at, place) in itertools.product([0.0, told] if has_penalty else [0.0], PLACES):
        if "scores" in found:
            words = f"rewards with the score at the {place} and a KL coefficient of {coefficient:g}"
            rewards = partial(with_score, mask=doctor.mask, coefficient=coefficient, at=at)
            yield "scores" if has_rewards else words, rewards, names


def whitened_rewards(doctor: Doctor) -> Iterator[tuple[str, Callable[[Arrays], Tensor], Names]]:
    """Rewards of the dump, if the trainer whitens them before GAE and dumps them as they were."""
    for f, of_f in doctor.variants("whiten") if doctor.has("rewards") else ():
        if all(name.choice for name in of_f) and WIRING["whitened per row"] not in of_f:
            white = lambda a, f=f: f(a["rewards"], doctor.mask, True)  # noqa: E731
            yield "rewards, whitened with the mean kept,", white, (*wiring("whitened rewards"), *of_f)


def score_is(doctor: Doctor, place: str) -> bool:
    """Whether the rewards have been explained with the score there."""
    return any(f.array == "rewards" and place in f.words for f in doctor.findings)


def regions(doctor: Doctor) -> list[tuple[Tensor, Names]]:
    """Masks of the steps that GAE may have gone over."""
    mask, true_mask = doctor.mask, doctor.true_mask
    further = mask | doctor.following(mask)
    found: list[tuple[Tensor, Names]] = [(mask, ())]
    if (further != mask).any():
        found.append((further, wiring("bootstrapped past the end") if score_is(doctor, "on the last token") else ()))
    if score_is(doctor, "on the step after"):
        found.reverse()
    if (true_mask != mask).any():
        found += [(true_mask, ()), (true_mask | doctor.following(true_mask), ())]
    return found


def gae(
    a: Arrays,
    gamma: float = 1.0,
    lam: float = 1.0,
    *,
    rewards: Callable[[Arrays], Tensor],
    mask: Tensor,
    form: Callable = forms.gae,
    of_values: Callable[[Tensor], Tensor] = same,
    of_rewards: Callable[[Tensor], Tensor] = same,
    of_advantages: Callable[[Tensor], Tensor] = same,
    critic: str = "values",
    plus: str = "",
    minus: str = "",
) -> Tensor:
    """GAE, or the sum of rewards where there are no values. of_...: moves an array. plus, minus: by response."""
    paid = of_rewards(rewards(a))
    values, lam = (of_values(a[critic]), lam) if "values" in a else (torch.zeros_like(paid), 1.0)
    made = of_advantages(form(paid, values, mask, gamma, lam)[0])
    made = made + spread(a[plus], mask) if plus else made
    return made - spread(a[minus], mask) if minus else made


def across(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, *, packs: Tensor, ends: bool
) -> tuple[Tensor]:
    """GAE of all rows of a pack (rows,) as one episode. ends: the value after each row is 0, as it should be."""
    if ends:
        first = of_first(values, mask).roll(-1).masked_fill(packs.diff(append=packs[:1] - 1) != 0, 0)
        rewards = rewards - gamma * first.unsqueeze(1) * Doctor.only_last(mask)
    made = torch.zeros_like(rewards)
    for rows in (packs == n for n in packs.unique()):
        flat = [x[rows].reshape(1, -1) for x in (rewards, values, mask)]
        made[rows] = forms.gae(*flat, gamma, lam)[0].reshape(made[rows].shape)
    return (made,)


def mistakes(doctor: Doctor, region: Tensor) -> Iterator[tuple[Names, dict[str, Any]]]:
    """Names of mistakes in GAE, and the arguments that make them."""
    other = {"one step", "without lambda"}  # they are lambdas of 0 and 1
    if (region | (region.flip(1).cumsum(1).flip(1) == 0)).all():  # there are no holes, only padding
        other.add("steps over masked tokens")
    for form, names in doctor.variants("gae"):
        if len(names) == 1 and names[0].name not in other:
            yield names, {"form": form}
    if "new_values" in doctor.arrays and "values" in doctor.arrays:
        yield wiring("values after the update"), {"critic": "new_values"}
    arrays = ["rewards", "advantages", *(["values"] if "values" in doctor.arrays else [])]
    for array, (shift, word) in itertools.product(arrays, SHIFTS):
        edge = {1: Doctor.only_first(region), -1: Doctor.only_last(region) if array == "advantages" else None}[shift]
        move = partial(shifted, shift=shift)
        yield wiring(f"{array} one token {word}"), {f"of_{array}": move, "unknown": edge}
    for shift, _ in SHIFTS if "values" in arrays else ():
        yield wiring("values of another row"), {"of_values": partial(torch.roll, shifts=shift, dims=0)}
    if "scores" in doctor.arrays:
        yield wiring("scores are added to the advantages"), {"plus": "scores"}


def token_bases(doctor: Doctor, sources: Callable = reward_arrays) -> Iterator[Base]:
    """GAE, or sums of rewards where there are no values, without and with mistakes.

    Rewards that are a mistake themselves have no other.
    """
    mask, everywhere, one = doctor.mask, torch.ones_like(doctor.mask), torch.zeros(len(doctor.mask))
    has_values, packs = "values" in doctor.arrays, [doctor.arrays["packs"]] if doctor.has("packs") else []

    def base(source: tuple, region: Tensor, names: Names, unknown: Tensor | None = None, **changes: Any) -> Base:
        what, rewards, of_rewards = source
        words = f"the sum of {what} from each token on, with gamma {{0}}"
        words = f"GAE with gamma {{0}}, lambda {{1}} of {what} and values" if has_values else words
        words += ", minus the baselines" if "minus" in changes else ""
        predict = partial(gae, rewards=rewards, mask=region, **changes)
        names = (*of_rewards, *names)
        return Base(words=words, predict=predict, names=names, constants=1 + has_values, unknown=unknown)

    for source in sources(doctor):
        for region, of_region in regions(doctor):
            yield base(source, region, of_region)
            if not has_values and "baselines" in doctor.arrays:
                yield base(source, region, of_region, minus="baselines")
            for names, changes in mistakes(doctor, region) if not source[2] else ():
                yield base(source, region, (*of_region, *names), **changes)
        if not source[2]:
            for pack, ends in itertools.product([one, *packs], (False, True)):
                yield base(source, mask, wiring("GAE across episodes"), form=partial(across, packs=pack, ends=ends))
            names = wiring("GAE across episodes", "bootstrapped from padding")
            yield base(source, everywhere, names, form=partial(across, packs=one, ends=False))
            yield base(source, everywhere, names[1:])


# ---- Bases by response -----------------------------------------------------------------------------------------


def penalised_bases(doctor: Doctor, y: Tensor, where: Tensor) -> Iterator[Base]:
    """A number for each response, as in response_bases, minus a KL penalty by token, with the coefficient that y has:
    REINFORCE++ and others, where there is no critic."""
    if {"values", "rewards"} & doctor.arrays.keys() or not doctor.has("scores", "logprobs", "ref_logprobs"):
        return
    mask, lengths, told = doctor.mask, doctor.mask.sum(1).double(), doctor.batch.settings.get("kl_coef")
    numbers = ["score", "score - mean", "score - mean of the others", "(score - mean) / std"]
    numbers += ["(score - mean) / (std with n + 1e-06)"]

    def kl_of(a: Arrays, name: str, is_sum: bool) -> Tensor:
        kl = forms.kl_estimate(a["logprobs"], a["ref_logprobs"], mask, name)
        return (kl.flip(1).cumsum(1).flip(1) if is_sum else kl).masked_fill(~mask, 0)

    usual = [(words, groups) for words, groups, names in groupings(doctor) if not names]
    for (words, groups), name, is_sum in itertools.product(usual, ("k1", "k2", "k3"), (True, False)):
        kl = kl_of(doctor.arrays, name, is_sum)
        values, estimates = estimators(doctor.arrays["scores"], groups, lengths)
        for number in numbers:
            i = next((i for i, (formula, _) in enumerate(estimates) if formula == number), None)
            if i is None:
                continue
            columns = torch.stack([spread(values[i], mask)[where], kl[where], torch.ones_like(kl[where])], 1)
            solved = torch.linalg.lstsq(columns, y[where].unsqueeze(1), driver="gelsd").solution[:, 0]
            of_score, of_kl, _ = solved.tolist()
            rounding = max(1e-3, 8 * max(doctor.batch.eps.values())) * largest(y[where])
            if of_score <= 0 or not of_kl or root_mean_square(columns @ solved - y[where]) > rounding:
                continue
            c = near(-of_kl / of_score, told)
            names = wiring(*of_coefficient(c, told))

            def predict(a: Arrays, i=i, c=c, name=name, is_sum=is_sum, groups=groups) -> Tensor:
                number = estimators(a["scores"], groups, lengths)[0][i]
                return spread(number, mask) - c * kl_of(a, name, is_sum)

            at = "from each token on" if is_sum else "of each token"
            yield Base(
                words=f"{number} of scores in {words}, {signed(c)} * {name} {at}",
                predict=predict,
                names=(*names, *wiring("another estimator")),
            )


def partition(groups: Tensor) -> Tensor:
    return groups.unsqueeze(1) == groups


def groupings(doctor: Doctor) -> list[tuple[str, Tensor, tuple[str, ...]]]:
    """Which responses may have been compared."""
    rows = torch.arange(len(doctor.mask))
    prompts, told = doctor.batch.prompts, doctor.arrays.get("groups")
    size = int(doctor.batch.settings.get("group_size", 0))
    found: list[tuple[str, Tensor, tuple[str, ...]]] = []
    if told is not None:
        found.append(("the dump's groups", told.long(), ()))
    if prompts is not None and len(prompts.unique()) < len(rows):
        found.append(("groups of one prompt", prompts, ()))
    known = [groups for _, groups, _ in found if len(groups.unique()) > 1]
    labels = [x for x in (prompts, told) if x is not None]

    def add(words: str, groups: Tensor, is_usual: bool) -> None:
        if any((partition(groups) == partition(other)).all() for _, other, _ in found):
            return
        # The same prompt may be drawn twice, which makes two groups, unless the dump says what the groups are.
        fits = all(len(x[groups == g].unique()) == 1 for x in labels for g in groups.unique())
        fits = fits and (told is None or len(groups.unique()) == len(told.unique()))
        found.append((words, groups, () if fits and is_usual else ("groups over the wrong rows",)))

    for n in range(2, len(rows)):
        is_usual = prompts is not None or (told is None and size in (0, n))
        add(f"groups of {n} rows", rows // n, is_usual)
        if len(rows) % n == 0:
            add(f"groups of {n} rows that are {len(rows) // n} apart", rows % (len(rows) // n), prompts is not None)
    for groups in known[:1] or [rows // max(size, 1)] * (1 < size < len(rows)):
        for shift in (1, -1):
            add("groups of rows that are moved by one", groups.roll(shift), False)
    is_known = bool(known) or 1 < size < len(rows)
    name = "statistics of the batch" if is_known else "a baseline of the batch"
    return [*found, ("the whole batch", torch.zeros_like(rows), (name,))]


Table = dict[str, tuple[Tensor, tuple[str, ...]]]  # numbers for each response, by what they are, and their mistakes


def numerators(x: Tensor, groups: Tensor, lengths: Tensor) -> Table:
    """What scores (rows,) are compared with."""
    n, total = algebra.by_group(torch.ones_like(x), groups), algebra.by_group(x, groups)
    mean, others = total / n, (n - 1).clamp(min=1)
    weighted = algebra.by_group(x * lengths, groups) / algebra.by_group(lengths, groups)
    of_nonzero = len(x) / (x != 0).sum().clamp(min=1)
    rows, kinds = torch.arange(len(x)), len(groups.unique())
    tiles, order = rows % kinds, rows * kinds // len(x)  # a view with its sizes in the wrong order
    tiled = algebra.by_group(x, tiles) / algebra.by_group(torch.ones_like(x), tiles)
    return {
        "score - mean": (x - mean, ()),
        "score - mean of the others": ((x - mean) * n / others, ()),
        "score - mean weighted by length": (x - weighted, ("another estimator",)),
        "(score - mean) rows / scores not 0": ((x - mean) * of_nonzero, ("scaled by the scores other than 0",)),
        "score": (x, ("not centred",)),
        "score - sum of the others / n": (x - (total - x) / n, ("a mean of the others divided by n",)),
        "score - sum / (n - 1)": (x - total / others, ("a mean divided by n minus 1",)),
        "score - sum of the others": (x - (total - x), ("a sum as a baseline",)),
        "score n / (n - 1) - mean": (x * n / others - mean, ("n / (n - 1) on the score alone",)),
        "(score - mean) (n / (n - 1))^2": ((x - mean) * (n / others) ** 2, ("n / (n - 1) twice",)),
        "score - maximum": (x - algebra.by_group(x, groups, "amax"), ("an extreme as a baseline",)),
        "score - minimum": (x - algebra.by_group(x, groups, "amin"), ("an extreme as a baseline",)),
        "score - mean of the batch": (x - x.mean(), ("statistics of the batch",)),
        "score - mean of the wrong rows": (x - tiled, ("groups over the wrong rows",)),
        "score - mean of the wrong rows, in order": (x - tiled[order], ("groups over the wrong rows",)),
    } | {f"score - mean of {words}": (x - mean[of], names) for words, of, names in other_groups(groups)}


def other_groups(groups: Tensor) -> list[tuple[str, Tensor, tuple[str, ...]]]:
    """Rows of other groups, from which each row may have its statistics."""
    kinds, number = groups.unique(return_inverse=True)
    first = torch.tensor([int((groups == g).nonzero()[0]) for g in kinds])
    if not 1 < len(kinds) < len(groups):
        return []
    rows, name = torch.arange(len(groups)), "statistics of groups in another order"
    orders = (rows % len(kinds), rows * len(kinds) // len(groups))  # repeated as a whole, and one by one
    found = [("groups in another order", first[order], (name,)) for order in orders if (order != number).any()]
    for words, shift in (("the group before", 1), ("the group after", -1)):
        found.append((words, first.roll(shift)[number], ("statistics of another group",)))
    return found


def divisors(x: Tensor, groups: Tensor, lengths: Tensor) -> Table:
    """What the difference is divided by, without an epsilon."""
    n, mean = algebra.by_group(torch.ones_like(x), groups), algebra.by_group(x, groups)
    mean, others = mean / n, (n - 1).clamp(min=1)
    squares, absolute = (algebra.by_group(gap, groups) for gap in ((x - mean) ** 2, (x - mean).abs() / n))
    std, biased = (squares / others).sqrt(), (squares / n).sqrt()
    of_others = (squares - (x - mean) ** 2 * n / others).clamp(min=0) / (n - 2).clamp(min=1)
    batch, all_biased = (x.std(correction=c).expand_as(x) for c in (min(1, len(x) - 1), 0))
    weights = algebra.by_group(lengths, groups)
    weighted = (x - algebra.by_group(x * lengths, groups) / weights) ** 2
    weighted = (algebra.by_group(weighted * lengths, groups) / weights).sqrt()
    high, low = (algebra.by_group(x, groups, name) for name in ("amax", "amin"))
    found: Table = {
        "std": (std, ()),
        "std with n": (biased, ("std with n",)),
        "std of the batch": (batch, ("deviation of the batch",)),
        "std of the batch with n": (all_biased, ("deviation of the batch", "std with n")),
        "std of the others": (of_others.sqrt(), ("statistics of the others",)),
        "variance": (std**2, ("divided by the variance",)),
        "variance with n": (biased**2, ("divided by the variance", "std with n")),
        "std weighted by length": (weighted, ("statistics weighted by length",)),
        "mean": (mean.abs(), ("another estimator",)),
        "standard error": (std / n.sqrt(), ("divided by the standard error",)),
        "mean absolute deviation": (absolute, ("divided by the mean absolute deviation",)),
        "range": (high - low, ("divided by the range",)),
        "root mean square": ((algebra.by_group(x**2, groups) / others).sqrt(), ("not centred",)),
        "root mean square with n": ((algebra.by_group(x**2, groups) / n).sqrt(), ("not centred", "std with n")),
        "1 / std": (1 / (std + 1e-12), ("multiplied by the deviation",)),
        "1 / std with n": (1 / (biased + 1e-12), ("multiplied by the deviation", "std with n")),
    }
    return found | {f"std of {words}": (std[of], names) for words, of, names in other_groups(groups)}


EPSILONS = {
    1e-6: (),
    1e-4: ("epsilon 1e-4",),
    1e-8: ("another epsilon",),
    1e-5: ("another epsilon",),
    0.1: ("a large epsilon",),
    0.0: ("another epsilon",),
    1.0: ("1 added to the deviation",),
}


def estimators(x: Tensor, groups: Tensor, lengths: Tensor) -> tuple[Tensor, list[tuple[str, tuple[str, ...]]]]:
    """Advantages (estimators, rows) of scores (rows,), and what each is called: all that the tables make."""
    above = numerators(x, groups, lengths)
    below: Table = {"": (torch.ones_like(x), ())}
    for (word, (divisor, of_divisor)), (eps, of_eps) in itertools.product(
        divisors(x, groups, lengths).items(), EPSILONS.items()
    ):
        word = f"({word} + {eps:g})" if of_eps and eps else word
        below[word if eps or not of_eps else f"{word} alone"] = divisor + eps, (*of_divisor, *of_eps)
    upper, lower = (torch.stack([value for value, _ in table.values()]) for table in (above, below))
    is_single = algebra.by_group(torch.ones_like(x), groups) == 1
    centred = above["score - mean"][0]
    value = upper.unsqueeze(1) / lower.clamp(min=1e-30)
    value[list(above).index("(score - mean) rows / scores not 0"), 1:] = 1e30  # nobody divides that
    value = value.flatten(0, 1)
    names = []
    for (over, (_, of_over)), (under, (_, of_under)) in itertools.product(above.items(), below.items()):
        of_both = ("a divided RLOO",) * (over == "score - mean of the others" and under != "")
        names.append((f"({over}) / {under}" if under else over, (*dict.fromkeys(of_over + of_under), *of_both)))
    value = torch.cat([value, x - (x - centred) / lower[1:].clamp(min=1e-30)])
    of_mean = [
        (f"score - mean / {under}", (*names, "only the mean is divided")) for under, (_, names) in below.items()
    ]
    names += of_mean[1:]
    if not is_single.any():
        return value, names
    names += [(words, (*of_words, "the score of a group of one")) for words, of_words in names]
    return torch.cat([value.masked_fill(is_single, 0), torch.where(is_single, x, value)]), names


def orders_of(rows: int) -> list[Tensor]:
    """Other orders of rows: moved by one, turned round, transposed."""
    right = torch.arange(rows)
    found = [right.roll(1), right.roll(-1), right.flip(0)]
    return found + [right.reshape(k, -1).T.flatten() for k in range(2, rows) if rows % k == 0]


@dataclass(kw_only=True, frozen=True)
class After:
    """What is done with advantages once they are whitened. apply: it takes `dim`, that of rows. before: where the
    target has them before it is done."""

    words: str
    apply: Callable[..., Tensor]
    before: Callable[[Tensor], Tensor]
    names: tuple[str, ...]


def afters(rows: int, y: Tensor) -> list[After]:
    """Rows in another order, and a bound if several of the numbers y have it."""
    found, bound = [], float(y.abs().max())
    for order in orders_of(rows):
        apply, before = (partial(torch.index_select, index=at) for at in (order, order.argsort()))
        names = ("advantages of another row",)
        found.append(After(words=", in another order", apply=apply, before=partial(before, dim=0), names=names))
    if bound and (y.abs() >= bound * (1 - 2**-9)).sum() > 1:
        words = f", clipped at {written(bound, 4)}"
        apply = lambda a, dim: a.clamp(-bound, bound)  # noqa: E731
        found.append(After(words=words, apply=apply, before=same, names=("clipped advantages",)))
    return found


def steps_after(doctor: Doctor, y: Tensor) -> list[tuple[str, Callable[[Tensor], Tensor], tuple[str, ...]]]:
    """What may be done with advantages (..., rows) once they are made."""
    lengths = doctor.mask.sum(1).clamp(min=1).double()
    found: list[tuple[str, Callable[[Tensor], Tensor], tuple[str, ...]]] = [("", same, ())]
    found.append((", negated", torch.neg, ("advantages with the wrong sign",)))
    found.append((", divided by the length", lambda a: a / lengths, ("advantages divided by the length",)))
    found.append((", doubled", lambda a: 2 * a, ("advantages doubled",)))
    different = {f"{x:.4g}" for x in y.tolist()}
    if len(different) >= 5:  # the same numbers in any order: that of y, from the least to the greatest
        rank = y.argsort().argsort()
        order = lambda a: a.sort(-1).values.index_select(-1, rank)  # noqa: E731
        found.append((", in another order", order, ("advantages of another row",)))
    return found + [(after.words, partial(after.apply, dim=-1), after.names) for after in afters(len(y), y)]


@cache
def named(*names: str) -> Names:
    return tuple(BOOK.get(name) or WIRING[name] for name in names)


@cache
def mistakes_in(names: tuple[str, ...]) -> int:
    return sum(not fault.choice for fault in named(*names))


def response_bases(
    doctor: Doctor, y: Tensor | None = None, shape: Tensor | None = None, is_whitened: bool = False
) -> list[Base]:
    """Estimators that compare a response with others: those that are nearest to y (rows,), or those without mistakes.

    shape: (rows, width), by which the number of a response is multiplied at each token. is_whitened: y is compared
    up to a factor and a constant.
    """
    found, mask = doctor.arrays, doctor.mask
    further = mask | doctor.following(mask)
    lengths, rows = mask.sum(1).double(), torch.arange(len(mask))
    totals: dict[str, tuple[Callable[[Arrays], Tensor], tuple[str, ...]]] = {}
    if "scores" in found:
        totals["scores"] = itemgetter("scores"), ()
    if "rewards" in found:
        totals["sums of rewards"] = lambda a: a["rewards"].masked_fill(~further, 0).sum(1), ()
        is_early = bool((found["rewards"] * mask * ~Doctor.only_last(mask)).any())
    else:
        for is_mean in (False, True):
            for c, names in coefficients_of_responses(doctor, y, is_mean):
                total = lambda a, c=c, n=is_mean: a["scores"] - c * kl_of_responses(a, mask, n)  # noqa: E731
                words = f"scores {signed(c)} * {'mean ' * is_mean}KL of the response"
                totals[words] = total, (*names, *("the KL of a response as a mean",) * is_mean)
    steps = steps_after(doctor, y) if y is not None else [("", same, ())]
    steps = steps[:2] if is_whitened else steps
    pool: list[tuple[float, int, Base]] = []

    def add(words: str, f: Callable[[Arrays], Tensor], names: Names, cost: float) -> None:
        def predict(a: Arrays) -> Tensor:
            made = spread(f(a), mask)
            return made if shape is None else made * shape

        pool.append((cost, len(pool), Base(words=words, predict=predict, names=names)))

    floor = 2e-6 * root_mean_square(y) if y is not None else 1.0

    def costs(made: Tensor, names: list[tuple[str, ...]]) -> Tensor:
        """How far advantages (..., rows) are from y; each mistake makes it half as much again."""
        wrong = torch.tensor([mistakes_in(x) + 0.1 * len(x) for x in names])
        return distances(made, y, lengths, is_whitened).clamp(min=floor) * 1.5**wrong

    for what, (total, of_total) in totals.items():
        nothing = (
            "the whole return on every token" if what == "sums of rewards" and is_early else "without a baseline"
        )
        for after, g, of_after in steps:
            names = (nothing, *of_total, *of_after)
            cost = 0.9 * float(costs(g(total(found)), [names]))
            add(what + after, lambda a, f=total, g=g: g(f(a)), named(*names), cost)
        if "baselines" in found:
            add(f"{what} - baselines", lambda a, f=total: f(a) - a["baselines"], named(*of_total), 0.0)
        orders = [(rows, ()), *((order, ("score of another row",)) for order in orders_of(len(rows)))]
        for (words, groups, of_groups), (at, of_order) in itertools.product(groupings(doctor), orders):
            if of_order and of_groups:
                continue
            if doctor.batch.unscored is not None:  # nothing is compared with what has no score
                groups = groups.where(~doctor.batch.unscored, groups.max() + 1 + rows)
            made, estimates = estimators(total(found)[at], groups, lengths)
            wrong = [names for _, names in estimates]
            for after, g, of_after in steps[: 1 if of_order or of_groups else None]:
                around = (*of_total, *of_order, *of_groups, *of_after)
                cost = costs(g(made), wrong) * 1.5 ** mistakes_in(around)
                for i in cost.argsort(stable=True)[:4].tolist():
                    formula, names = estimates[i]

                    def f(a: Arrays, i=i, g=g, groups=groups, total=total, at=at) -> Tensor:
                        return g(estimators(total(a)[at], groups, lengths)[0][i])

                    add(f"{formula} of {what} in {words}{after}", f, named(*around, *names), float(cost[i]))
    return [base for _, _, base in sorted(pool, key=itemgetter(0))[:40]]


def kl_of_responses(a: Arrays, mask: Tensor, is_mean: bool = False) -> Tensor:
    total = (a["logprobs"] - a["ref_logprobs"]).masked_fill(~mask, 0).sum(1)
    return total / mask.sum(1).clamp(min=1) if is_mean else total


def near(c: float, told: float | None) -> float:
    """A coefficient, or the one of the dump if it is the same but for rounding."""
    return told if told and abs(c - told) <= 2e-3 * told else c


def signed(c: float) -> str:
    """A coefficient that is subtracted, as it stands after what it is subtracted from."""
    return f"{'-' if c > 0 else '+'} {written(abs(c), 4)}"


def of_coefficient(c: float, told: float | None) -> tuple[str, ...]:
    """The mistakes in a KL coefficient."""
    names = ("KL with the wrong sign",) * (c < 0)
    if not told or abs(abs(c) - told) <= 0.01 * told:
        return names
    return (*names, "KL twice" if abs(abs(c) - 2 * told) < 0.02 * told else "another KL coefficient")


def coefficients_of_responses(
    doctor: Doctor, y: Tensor | None, is_mean: bool
) -> Iterator[tuple[float, tuple[str, ...]]]:
    """KL coefficients in totals of responses, and their mistakes: that of the dump, and by least squares from y
    (rows,)."""
    if not doctor.has("scores", "logprobs", "ref_logprobs") or doctor.is_reference("logprobs"):
        return
    told, members = doctor.batch.settings.get("kl_coef"), partition(groupings(doctor)[0][1]).double()
    if told:
        yield told, ()
    if y is None or len(y) < len(members.unique(dim=0)) + 4:
        return
    both = torch.stack([doctor.arrays["scores"], kl_of_responses(doctor.arrays, doctor.mask, is_mean)])
    both = both - both @ members / members.sum(1)
    of_score, of_kl = torch.linalg.lstsq(both.T, y.unsqueeze(1), driver="gelsd").solution[:, 0].tolist()
    is_plain = root_mean_square(both.T @ torch.tensor([of_score, of_kl], dtype=y.dtype) - y) < 1e-3 * largest(y)
    if of_score > 0 and is_plain and of_kl:
        c = near(-of_kl / of_score, told)
        if c != told and abs(c) > 1e-6:
            yield c, of_coefficient(c, told)


def distances(made: Tensor, y: Tensor | None, lengths: Tensor, is_whitened: bool) -> Tensor:
    """How far advantages (..., rows) are from y (rows,), as a root mean square over tokens."""
    if y is None:
        return torch.zeros(made.shape[:-1], dtype=made.dtype)
    w = lengths / lengths.sum()
    if is_whitened:
        made = made - (made * w).sum(-1, keepdim=True)
        y = y - (y * w).sum()
        slope = (made * y * w).sum(-1, keepdim=True) / (made**2 * w).sum(-1, keepdim=True).clamp(min=1e-24)
        made = made * slope.clamp(min=0)
    return ((made - y) ** 2 * w).sum(-1).sqrt()


def shapes(doctor: Doctor, target: Tensor, where: Tensor) -> Iterator[tuple[Tensor, Tensor, Names]]:
    """One number per response (rows,) and weights of tokens whose product advantages are, by mistake."""
    mask, eps = doctor.mask, doctor.batch.eps["advantages"]
    left, position = mask.flip(1).cumsum(1).flip(1) - 1, mask.cumsum(1).double()
    pairs = mask[:, :-1] & mask[:, 1:] & (target[:, 1:].abs() > 1e-6)
    decay = float((target[:, :-1][pairs] / target[:, 1:][pairs]).median()) if pairs.any() else 1.0
    found: list[tuple[Tensor, str]] = [
        (Doctor.only_last(mask), "advantages on the last token alone"),
        ((nice(decay) if decay > 0 else 1.0) ** left, "discounted advantages"),
        *((shifted(mask, shift), f"advantages one token {word}") for shift, word in SHIFTS),
        *((mask[order] & mask, "advantages of another row") for order in orders_of(len(mask))),
        (position / mask.shape[1], "advantages by position"),
        (position / mask.sum(1, keepdim=True).clamp(min=1), "advantages by position"),
    ]
    for shape, name in found:
        shape = shape.double().masked_fill(~where, 0)
        y = (target * shape).sum(1) / (shape**2).sum(1).clamp(min=1e-30)
        if root_mean_square((target - y.unsqueeze(1) * shape)[where]) < 8 * eps * root_mean_square(target[where]):
            yield y, shape, wiring(name)


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


def as_told(doctor: Doctor, constants: tuple[float, ...]) -> tuple[float, ...]:
    """Gamma and lambda of the dump, or these where it does not have them."""
    return tuple(doctor.batch.settings.get(key, c) for key, c in zip(("gamma", "lam"), constants, strict=False))


class Fit:
    """The constants with which a base is nearest to an array, up to whitening, and how near that is."""

    def __init__(
        self, doctor: Doctor, base: Base, target: Tensor, where: Tensor, labels: Tensor | None, known: tuple = ()
    ):
        """labels: equal for tokens that are whitened together; None: the base is the array itself. known: constants
        that are not to be changed."""
        self.doctor, self.base = doctor, base
        self.where = where if base.unknown is None else where & ~base.unknown
        self.y, self.labels = target[self.where], None if labels is None else labels[self.where]
        self.near = 1e-6 * root_mean_square(self.y)
        self.after: After | None = None
        self.constants: tuple[float, ...] = ()
        self.error = float("inf")
        self.is_known = bool(known)
        self.start([known] if known else [*(as_told(doctor, start) for start in STARTS), *STARTS])

    def residual(self, constants: Sequence[float]) -> Tensor:
        a = self.base.predict(self.doctor.arrays, *constants)[self.where]
        return self.y - a if self.labels is None else affine(self.y, a, self.labels)

    def start(self, starts: Sequence[tuple[float, ...]]) -> None:
        """Try some constants, and keep the best."""
        for constants in dict.fromkeys(start[: self.base.constants] for start in starts):
            error = root_mean_square(self.residual(constants))
            if error < self.error:
                self.constants, self.error = constants, error
            if self.error < self.near:
                break

    def refine(self, steps: int = 8) -> Fit:
        """Go on by Gauss and Newton's method, and take numbers with few digits if they are as good."""
        if self.is_known:
            return self
        for _ in range(steps if self.constants else 0):
            before = self.error
            if before < self.near:
                break
            there = [c + step for c, step in zip(self.constants, self.newton(), strict=True)]
            self.start([tuple(min(max(c, least), 1.0) for c, least in zip(there, (0.5, 0.0), strict=False))])
            if not self.error < before * (1 - 1e-4):
                break
        told = as_told(self.doctor, self.constants)
        for constants in [told] + [tuple(round(c, digits) for c in self.constants) for digits in (2, 3, 4)]:
            error = root_mean_square(self.residual(constants)) if constants != self.constants else self.error
            if error <= max(1.03 * self.error, self.near):
                self.constants, self.error = constants, error
                break
        return self

    def newton(self) -> list[float]:
        """The step of each constant."""
        here, slopes = self.residual(self.constants), []
        for i in range(len(self.constants)):
            there = [c - 1e-5 * (i == k) for k, c in enumerate(self.constants)]
            slopes.append((self.residual(there) - here) / -1e-5)
        return torch.linalg.lstsq(torch.stack(slopes, 1), -here, driver="gelsd").solution.tolist()


def made_by(doctor: Doctor, fit: Fit, ways: list[Way], array: str) -> Iterator[Made]:
    """The candidates of a fit, one for each way to whiten."""
    base, names = fit.base, [*fit.base.names, *(named(*fit.after.names) if fit.after else ())]
    told = as_told(doctor, fit.constants)
    for value, other, name in zip(fit.constants, told, ("another gamma", "another lambda"), strict=False):
        names += wiring(name) if abs(value - other) > 2e-3 else ()
    words = base.words.format(*(written(c, 4) for c in fit.constants))
    adds_values = array == "returns" and "values" in doctor.arrays
    value = base.predict(doctor.arrays, *fit.constants)

    def made(how: str, f: Callable[[Tensor], Tensor], names: Names) -> Made:
        def finished(x: Tensor, a: Arrays) -> Tensor:
            x = f(x) if fit.after is None else fit.after.apply(f(x), dim=0)
            return x + a["values"] if adds_values else x

        return Made(
            words=words + how + (fit.after.words if fit.after else "") + (" + values" if adds_values else ""),
            predict=lambda a: finished(base.predict(a, *fit.constants), a),
            names=names,
            now=finished(value, doctor.arrays),
            unknown=base.unknown,
            base=base,
            constants=fit.constants,
            how=how,
        )

    of_batch = wiring("statistics of the batch", "without a baseline")
    for how, f, of_f in ways:
        own = names
        if how == ", then whitened" and not base.is_divided and any(name in of_batch for name in names):
            # REINFORCE++: the mean over the tokens of the batch is the baseline.
            own = [*(name for name in names if name not in of_batch), *wiring("another estimator")]
        twice = wiring("normalised twice") if base.is_divided and how else ()
        yield made(how, f, (*own, *of_f, *twice))
    if base.unknown is not None and len(ways) > 1:  # what is not known is in the statistics, too
        x = value[fit.where]
        slope = torch.cov(torch.stack([x, fit.y]))[0, 1] / x.var().clamp(min=1e-30)
        constant = fit.y.mean() - slope * x.mean()
        yield made(", then shifted and scaled", lambda x: slope * x + constant, tuple(names))


def explain(doctor: Doctor, array: str, ways: list[Way]) -> tuple[Made | None, float, bool]:
    """The best candidate for advantages or returns, its largest difference, and whether that is rounding."""
    where = doctor.mask & doctor.true_mask
    target = doctor.arrays[array]
    target = target - doctor.arrays["values"] if array == "returns" and "values" in doctor.arrays else target
    rows = torch.arange(len(where)).unsqueeze(1).expand(where.shape)
    columns = torch.arange(where.shape[1]).expand(where.shape)
    parts = [rows * k // len(where) for k in numbers_of_parts(len(where))]
    whole = torch.zeros_like(rows) if len(ways) > 1 else None

    rounding = max(1e-4, 40 * max(doctor.batch.eps.values())) * root_mean_square(target[where])

    def fits(
        bases: list[Base], labels: Tensor | None, most: int, after: After | None = None, known: tuple = ()
    ) -> list[Fit]:
        """The nearest fits of some bases, of which those with mistakes come later."""
        y, there = target, where
        if after is not None:
            y = after.before(target)
            there = where & (after.before(where.double()) > 0.5) & (after.apply(y * 1.001, dim=0) - target != 0)
        found = [Fit(doctor, base, y, there, labels, known) for base in bases]
        if labels is whole and any(base.names for base in bases):  # mistakes: any of them may be near
            found = [fit.refine(2) for fit in found]
        found.sort(key=lambda fit: (fit.error + fit.near) * 1.5 ** len(fit.base.names))
        for fit in found[:most]:
            fit.refine().after = after
        # Whitening changes only a factor and a constant: what is far from the array before is far from it afterwards.
        return [fit for n, fit in enumerate(found[:most]) if n == 0 or fit.error < rounding]

    def stages() -> Iterator[list[Fit]]:
        """Fits, the plainest first. Responses that have one number each are explained by response, if they can be."""
        eps = doctor.batch.eps[array]
        has_totals = bool({"scores", "rewards"} & doctor.arrays.keys())
        if is_constant(target, where, eps) and has_totals:
            y = of_first(target, where)
            found = fits(response_bases(doctor, y), None, 40)
            if whole is not None:
                found += fits(response_bases(doctor, y, is_whitened=True), whole, 30)
            yield found
        bases = list(token_bases(doctor))
        plain = [base for base in bases if not base.is_wrong]
        nearest = fits(plain, whole, 6)
        yield nearest
        for labels in (None, whole):
            if found := fits(list(penalised_bases(doctor, target, where)), labels, 4):
                yield found
        if found := fits(list(token_bases(doctor, whitened_rewards)), whole, 4):
            yield found
        known = next((as_told(doctor, fit.constants) for fit in nearest), ())
        steps = afters(len(target), target[where]) if array == "advantages" else []
        apart = (*parts, rows, columns) if whole is not None else ()
        for constants in (known, ()):  # first those of the dump, or those that are nearest without a mistake
            yield [fit for labels in apart for fit in fits(plain, labels, 2, known=constants)]
            yield fits(bases, whole, 12, known=constants)
            for after in steps:
                yield fits(plain, whole, 2, after, constants)
            for y, shape, names in shapes(doctor, target, where) if has_totals and steps and constants else ():
                found = response_bases(doctor, y, shape)
                found = [dataclasses.replace(x, names=tuple(dict.fromkeys((*x.names, *names)))) for x in found]
                yield fits(found, None, 20)
            yield []

    pool: list[Made] = []
    best: Any = (None, float("inf"), False)
    for found in stages():
        pool = [*pool, *(candidate for fit in found for candidate in made_by(doctor, fit, ways, array))]
        chosen, _, is_explained = best = doctor.choose(array, pool, where)
        pool = [chosen] if chosen is not None else []
        if is_explained and not found:  # with a mistake
            break
        if is_explained and not chosen.constants:  # sums of rewards would explain it, too, where there are no others
            break
        if is_explained and not chosen.is_wrong and doctor.is_near(array, chosen, where):
            break
    return best


# ---- Advantages ------------------------------------------------------------------------------------------------


def check_advantages(doctor: Doctor) -> Made | None:
    """Explain the advantages. Returns what they were made of."""
    mask = doctor.mask
    if doctor.arrays["advantages"].ndim == 1:
        doctor.arrays["advantages"] = spread(doctor.arrays["advantages"], mask)
    if not largest(doctor.arrays["advantages"][mask]) and are_apart(doctor):
        doctor.add("advantages", names=wiring("advantages are 0"))
        return None
    best, gap, is_explained = explain(doctor, "advantages", whiteners(doctor))
    if best is None or not is_explained:
        lacks, moved = lacking(doctor), wiring(*(f"advantages one token {word}" for _, word in SHIFTS))
        found = [names for _, _, names in shapes(doctor, doctor.arrays["advantages"], mask) if names[0] in moved]
        if found and "scores" in lacks:  # each response has one number, but for a 0 at one end
            doctor.add("advantages", names=found[0])
        elif best is not None and (line := line_of(doctor, best)):
            words = f"they are {line}, where x is {best.words.removesuffix(best.how)}"
            doctor.add(
                "advantages", unexplained=f"{words}: whitened with other statistics, such as those of more rows"
            )
        else:
            doctor.unexplained("advantages", best, gap, lacks, mask)
        return None
    doctor.explained("advantages", best, gap, reference(doctor, best) if best.is_wrong else None, mask)
    doctor.findings[-1].asks |= best.is_wrong and is_by_chance(doctor, best)
    if best.base.constants and not best.base.is_wrong and score_is(doctor, "on the step after"):
        without = doctor.arrays | {"rewards": doctor.arrays["rewards"].masked_fill(doctor.following(mask), 0)}
        if torch.equal(best.predict(without)[mask], best.predict(doctor.arrays)[mask]):
            doctor.add("rewards", names=list(wiring("a score that no advantage sees")))
    return best


def is_by_chance(doctor: Doctor, best: Made) -> bool:
    """Whether advantages are so few different numbers that a mistake fits them by chance: of one size for a mistake
    that only scales them, or less than five for two mistakes."""
    sizes = {f"{x:.4g}" for x in doctor.arrays["advantages"][doctor.mask].abs().tolist()} - {"0"}
    names = [name.name for name in best.names if not name.choice]
    only_scales = all(name in OF_SCALE for name in names)
    return not best.constants and len(sizes) < (5 if len(names) > 1 else 2 if only_scales else 0)


def are_apart(doctor: Doctor) -> bool:
    """Whether scores or rewards differ within a group, or between rows where no group is known."""
    totals = [x for x in (doctor.arrays.get("scores"),) if x is not None]
    totals += [doctor.arrays["rewards"].sum(1)] if doctor.has("rewards") else []
    groups = doctor.arrays.get("groups", doctor.batch.prompts)
    groups = torch.zeros(len(doctor.mask)) if groups is None or doctor.has("values") else groups
    judged = ... if doctor.batch.unscored is None else ~doctor.batch.unscored
    return any(largest(x - algebra.by_group(x, groups[judged], "amin")) > 1e-3 for x in (x[judged] for x in totals))


def line_of(doctor: Doctor, made: Made) -> str:
    """How advantages follow from what is not whitened yet, if it is a multiple and a constant: as in a micro-batch,
    whose statistics are those of more rows. Empty if they do not, or if these could be any numbers."""
    x, y = made.before(doctor.arrays)[doctor.mask], doctor.arrays["advantages"][doctor.mask]
    rest = affine(y, x, torch.zeros(len(x), dtype=torch.long))
    rounding = max(3e-6, 4 * max(doctor.batch.eps.values())) * root_mean_square(y)
    if made.is_wrong or x.unique().numel() < 6 or root_mean_square(rest) > rounding:
        return ""
    slope = float(torch.cov(torch.stack([x, y]))[0, 1] / x.var())
    constant = float(y.mean() - slope * x.mean())
    sign = "-" if constant < 0 else "+"
    words = f" {sign} {written(abs(constant), 4)}" if abs(constant) > rounding else ""
    return f"{written(slope, 4)} * x{words}" if slope > 0 else ""


def reference(doctor: Doctor, best: Made) -> Callable[[Arrays], Tensor] | None:
    """The advantages without the mistakes, with the same constants."""
    constants = as_told(doctor, best.constants)
    formula = best.base.words.split(" of ")[0]
    if best.constants:
        right = next(token_bases(doctor), None)
    else:
        others = (base for base in response_bases(doctor) if not base.names)
        right = next((base for base in others if base.words.split(" of ")[0] == formula), None)
    if right is None:
        return None
    whiten = partial(forms.whiten, mask=doctor.mask) if best.how and not best.base.is_divided else same
    return lambda a: whiten(right.predict(a, *constants))


def lacking(doctor: Doctor) -> str:
    """What the dump would need so that its advantages could be explained."""
    found = doctor.arrays
    if not {"rewards", "scores"} & found.keys():
        return "rewards or scores"
    if is_constant(found["advantages"], doctor.mask, doctor.batch.eps["advantages"]):
        is_grouped = {"groups", "group_size"} & {*found, *doctor.batch.settings}
        return "" if is_grouped or doctor.batch.prompts is not None else "groups, or prompts"
    lost = [name for name in ("values, if there is a critic", "rewards") if name.split(",")[0] not in found]
    return ", and ".join(lost)


# ---- Returns ---------------------------------------------------------------------------------------------------


def plus_values(
    a: Arrays,
    source: Callable[[Arrays], Tensor],
    values: str = "values",
    shift: int = 0,
    rows: int = 0,
    sign: int = 1,
    moved: int = 0,
) -> Tensor:
    return (source(a) + sign * a[values].roll((rows, shift), (0, 1))).roll(moved, 1)


def returns_of_advantages(doctor: Doctor, made: Made | None) -> Iterator[Candidate]:
    """Returns that are advantages, whitened or not, and values. made: what the advantages were made of."""
    found, mask = doctor.arrays, doctor.mask
    whitened, has_values = wiring("returns of whitened advantages"), "values" in found
    sources: list[tuple[str, Callable[[Arrays], Tensor], Names]] = []
    if made is not None:
        words = "advantages before they were whitened" if made.base.constants else "advantages"
        raw = made.before(found)
        sources.append((words, lambda a: raw if a is found else made.before(a), ()))
    if "advantages" in found:
        is_raw = not has_critic(doctor) or is_not_whitened(doctor, made)
        sources.append(("advantages", itemgetter("advantages"), () if is_raw else whitened))
        for how, f, names in whiteners(doctor)[1:] if made is not None and not is_raw else ():
            names = (*whitened, *(name for name in names if name.choice))
            sources.append((f"advantages{how}", lambda a, f=f: f(raw if a is found else made.before(a)), names))

    def added(words: str, source: Callable[[Arrays], Tensor], *mistakes: str, values: str = "values", **how: Any):
        edge = how.get("shift", 0) or how.get("moved", 0)
        return Candidate(
            words=f"{words} {'-' if how.get('sign', 1) < 0 else '+'} {values}",
            predict=partial(plus_values, source=source, values=values, **how),
            names=wiring(*mistakes),
            unknown={0: None, 1: Doctor.only_first(mask), -1: doctor.only_last(mask)}[edge],
        )

    for words, source, names in sources:
        made_of = [added(words, source)] if has_values else []
        if has_values and whitened[0] not in names:
            made_of += [added(words, source, f"returns with values one token {w}", shift=n) for n, w in SHIFTS]
            made_of += [added(words, source, "returns with values of another row", rows=n) for n in (1, -1)]
            made_of += [added(words, source, "returns minus the values", sign=-1)]
            made_of += [added(words, source, f"returns one token {w}", moved=n) for n, w in SHIFTS]
        if "new_values" in found:
            made_of += [added(words, source, "returns with the new values", values="new_values")]
        no_values = wiring("returns without values") if has_values else ()
        made_of.append(Candidate(words=words, predict=source, names=no_values))
        yield from (dataclasses.replace(candidate, names=(*names, *candidate.names)) for candidate in made_of)
    if "rewards" in found:
        yield Candidate(words="rewards", predict=itemgetter("rewards"), names=wiring("returns are rewards"))
        if has_values:
            yield added("rewards", itemgetter("rewards"), "returns are rewards")
    if "scores" in found:
        of_scores = wiring("returns are scores")
        yield Candidate(words="scores", predict=lambda a: spread(a["scores"], mask), names=of_scores)


def has_critic(doctor: Doctor) -> bool:
    return bool({"values", "new_values", "value_loss"} & doctor.arrays.keys())


def is_not_whitened(doctor: Doctor, made: Made | None) -> bool:
    """Whether the advantages of the dump are what they were made of, or do not look whitened."""
    where, advantages = doctor.mask & doctor.true_mask, doctor.arrays["advantages"]
    if made is not None:
        return root_mean_square((made.before(doctor.arrays) - advantages)[where]) < 1e-6
    x = advantages[where]
    return x.numel() < 2 or abs(float(x.mean())) >= 1e-3 or abs(float(x.std()) - 1) >= 0.02


def check_returns(doctor: Doctor, made: Made | None) -> None:
    """Explain the returns. made: what the advantages were made of, where that is known."""
    found, where = doctor.arrays, doctor.mask & doctor.true_mask
    has_values = "values" in found
    best, gap, is_explained = doctor.choose("returns", returns_of_advantages(doctor, made), where)
    right = partial(plus_values, source=made.before) if made is not None and has_values else None
    if (not is_explained or best.is_wrong) and {"rewards", "scores"} & found.keys():
        ways = whiteners(doctor) if made is None else whiteners(doctor)[:1]
        alone, gap_alone, is_alone = explain(doctor, "returns", ways)
        if alone is not None and is_alone and not (is_explained and alone.is_wrong):
            is_explained = True
            names = alone.names
            if made is not None and len(alone.constants) == len(made.constants) == 2:
                if abs(alone.constants[1] - made.constants[1]) > 2e-3:
                    kept = (name for name in names if name.name != "another lambda")
                    names = (*kept, *wiring("a lambda of their own"))
            elif alone.how and has_critic(doctor):
                names = (*names, *wiring("returns of whitened advantages"))
            best, gap, right = dataclasses.replace(alone, names=names), gap_alone, None
    if best is not None and is_explained:
        if not has_critic(doctor):  # nothing learns from them
            best = dataclasses.replace(best, names=tuple(name for name in best.names if name.choice))
        doctor.explained("returns", best, gap, right, where)
    else:
        needs = "rewards or scores" if "rewards" not in found else ""
        doctor.unexplained("returns", best, gap, needs if has_values else "values, if there is a critic", where)
