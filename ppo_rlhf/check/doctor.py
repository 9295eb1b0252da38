"""The doctor of batch.py: how candidates for an array are judged, and what is said of the array.

Each array of the dump is compared with candidates: the functions of forms.py, those with a mistake of the book
(faults.toml), and the same with a mistake in what they are given (batch.toml). Constants, such as gamma, are solved
for. A candidate explains an array if it is as close as rounding lets it be. The plainest one is taken: one with a
mistake must be twice as close as one without.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppo_rlhf.check import faults
from ppo_rlhf.check.dump import Batch
from ppo_rlhf.check.faults import Fault
from ppo_rlhf.report.derivation import written

TABLES = faults.tomllib.loads(Path(__file__).with_name("batch.toml").read_text())
WIRING = {name: faults.read("wiring", name, entry) for name, entry in TABLES["wiring"].items()}
CHOICES = {  # mistakes of the book that other trainers make on purpose, under the names that they have here
    "whiten: each row": "whitened per row",
    "whiten: always with the mean": "whitened with the mean kept",
    "whiten: epsilon 1e-5": "another epsilon",
    "whiten: epsilon at the deviation": "another epsilon",
}
ROUNDING = 3e-6  # of the largest number in an array: recursions and sums in float32
ROUNDING_OF_ONE = 1e-6  # of one number, which many formulas would fit if it had fewer digits
DRAWS = 4  # of rounding errors in what a candidate is given
Arrays = dict[str, Tensor]
Variants = list[tuple[Callable, tuple[Fault, ...]]]


@dataclass(kw_only=True, frozen=True)
class Candidate:
    """A way in which an array may have come about."""

    words: str
    predict: Callable[[Arrays], Tensor]
    names: tuple[Fault, ...] = ()
    now: Tensor | None = None  # of the arrays of the dump, where it is known
    unknown: Tensor | None = None  # entries that depend on what is not in the dump
    rivals: tuple[Fault, ...] = ()  # mistakes of others that fit as well, though their numbers differ

    @property
    def is_wrong(self) -> bool:
        return any(not name.choice for name in self.names)

    @property
    def weight(self) -> float:
        """By how much closer it must be than the reference."""
        return 2.0 ** sum(1 if not name.choice else 0.3 for name in self.names)

    def known(self, where: Tensor) -> Tensor:
        """The entries among some that it predicts."""
        return where if self.unknown is None else where & ~self.unknown


@dataclass(kw_only=True)
class Finding:
    """What is said of an array."""

    array: str
    words: str = ""  # the formula, with its constants
    gap: float | None = None  # largest difference
    names: Sequence[Fault] = ()
    where: str = ""  # the token where it is seen best
    unexplained: str = ""  # how far the nearest formula is
    lacks: str = ""  # what the dump would need
    asks: bool = False  # whether the names are only possible

    @property
    def faults(self) -> list[Fault]:
        return [name for name in self.names if not name.choice and not self.asks]


def wiring(*names: str) -> tuple[Fault, ...]:
    """The entries of batch.toml with these names."""
    return tuple(WIRING[name] for name in names)


@cache
def variants(function: str) -> Variants:
    """A function of forms.py, and with each mistake of the book and of batch.toml, or with one and a choice."""
    place = faults.form(function)
    book = [fault for fault in faults.of(function) if not fault.name.startswith(("returns", "whitened ", "NaN"))]
    book += [fault for fault in WIRING.values() if place in fault.edits]
    pairs = [pair for pair in itertools.combinations(book, 2) if any(fault.choice for fault in pair)]
    found = []
    for names in [(), *((fault,) for fault in book), *pairs]:
        edits = {place: tuple(edit for fault in names for edit in fault.edits[place])}
        try:
            compiled = dataclasses.replace(book[0], edits=edits).compiled
        except ValueError:  # both change the same part
            continue
        found.append((compiled, tuple(WIRING.get(CHOICES.get(fault.title, ""), fault) for fault in names)))
    return found


def nice(x: float, told: float | None = None, within: float = 2e-4) -> float:
    """A number with few digits that is as good as x, or the one that was told."""
    for other in (*([told] if told is not None else []), *(float(f"{x:.{digits}g}") for digits in (1, 2, 3, 4))):
        if abs(other - x) <= within * abs(x):
            return other
    return x


def root_mean_square(x: Tensor) -> float:
    return float((x**2).mean().sqrt()) if x.numel() else 0.0


def largest(x: Tensor) -> float:
    """The largest absolute value."""
    return float(x.abs().max()) if x.numel() else 0.0


def last_columns(mask: Tensor) -> Tensor:
    """The column of the last token of each row, -1 for none: (rows,)."""
    return torch.where(mask, torch.arange(mask.shape[1]), -1).amax(1)


class Doctor:
    """The findings about one batch."""

    def __init__(self, batch: Batch):
        self.batch, self.mask, self.arrays = batch, batch.mask, batch.arrays
        self.findings: list[Finding] = []
        self.generator = torch.Generator().manual_seed(1)
        self.true_mask = self.mask

    def has(self, *names: str) -> bool:
        """Whether the dump has all of these arrays."""
        return all(name in self.arrays for name in names)

    def is_reference(self, name: str) -> bool:
        """Whether log-probs are those of the reference."""
        if name == "ref_logprobs" or not self.has(name, "ref_logprobs"):
            return False
        return largest((self.arrays[name] - self.arrays["ref_logprobs"])[self.mask]) < 1e-5

    @staticmethod
    def following(mask: Tensor) -> Tensor:
        """The step after the last token of each row, where there is one."""
        last = last_columns(mask).unsqueeze(1)
        return (torch.arange(mask.shape[1]) == last + 1) & (last >= 0)

    @staticmethod
    def only_last(mask: Tensor) -> Tensor:
        """The last token of each row."""
        return mask & (mask.flip(1).cumsum(1).flip(1) == 1)

    @staticmethod
    def only_first(mask: Tensor) -> Tensor:
        """The first token of each row."""
        return mask & (mask.cumsum(1) == 1)

    # ---- Candidates and their distance -------------------------------------------------------------------------

    def variants(self, function: str) -> Variants:
        """Those that can have these shapes: some raise an error unless there are as many rows as tokens."""
        square = self.mask.shape[0] == self.mask.shape[1]
        found = variants(function)
        return [(f, names) for f, names in found if square or not any("broadcast" in name.name for name in names)]

    def mistakes(self, function: str, *parts: str) -> Variants:
        """A function of forms.py with each mistake whose name has one of these parts."""
        single = [(f, names) for f, names in self.variants(function) if len(names) == 1]
        return [(f, names) for f, names in single if any(part in names[0].name for part in parts)]

    def rounded(self) -> Arrays:
        """The arrays of the dump with rounding errors, drawn anew at each call."""
        moved = {}
        for name, x in self.arrays.items():
            errors = torch.empty_like(x).uniform_(-1, 1, generator=self.generator)
            moved[name] = x * (1 + self.batch.eps.get(name, 2**-23) * errors)
        return moved

    def noise(self, target: str, candidate: Candidate, where: Tensor) -> tuple[float, float]:
        """How far rounding may move a candidate from an array: at most, and as a root mean square."""
        middle = candidate.predict(self.arrays)
        moves = [(candidate.predict(self.rounded()) - middle)[where] for _ in range(DRAWS)]
        squares = sum(root_mean_square(move) ** 2 for move in moves) / DRAWS
        there, eps = self.arrays[target][where], self.batch.eps[target]
        if target in ("advantages", "returns"):  # what they are made of is multiplied in the dtype of values
            eps = max(eps, self.batch.eps.get("values", 0))
        own = eps / 3**0.5 * root_mean_square(there)
        floor = (ROUNDING if there.ndim else ROUNDING_OF_ONE) * largest(there) + 1e-12
        most = 4 * max(largest(move) for move in moves) + 2 * eps * largest(there)
        return most + floor, (squares + own**2) ** 0.5 + floor

    def gap(self, target: str, candidate: Candidate, where: Tensor) -> Tensor:
        """The differences of a candidate from an array, at the entries that it knows."""
        now = candidate.now if candidate.now is not None else candidate.predict(self.arrays)
        return (now - self.arrays[target])[candidate.known(where)]

    def is_near(self, target: str, candidate: Candidate, where: Tensor) -> bool:
        """Whether no other candidate could be much nearer to an array, because of rounding."""
        gap = root_mean_square(self.gap(target, candidate, where))
        return gap <= 3 * self.noise(target, candidate, where)[1]

    def choose(
        self, target: str, candidates: Iterable[Candidate], where: Tensor
    ) -> tuple[Candidate | None, float, bool]:
        """The best of the candidates, its largest difference, and whether that is rounding."""
        candidates = list(candidates)
        floor = 3e-7 * root_mean_square(self.arrays[target][where])
        best: dict[bool, tuple[float, Candidate]] = {}  # without a mistake, and with one
        for candidate in candidates:
            cost = max(root_mean_square(self.gap(target, candidate, where)), floor) * candidate.weight
            if cost < best.get(candidate.is_wrong, (float("inf"),))[0] * (1 - 1e-9):
                best[candidate.is_wrong] = cost, candidate
        if not best:
            return None, float("inf"), False
        chosen = min(best.values(), key=lambda entry: entry[0])[1]
        if chosen.is_wrong and False in best and self.is_near(target, best[False][1], where):
            chosen = best[False][1]
        gap = largest(self.gap(target, chosen, where))
        is_explained = gap <= self.noise(target, chosen, where)[0]
        if chosen.is_wrong and is_explained:  # an accusation must be near everywhere, not only where it is worst
            is_explained = self.is_near(target, chosen, where)
            chosen = dataclasses.replace(chosen, rivals=self.rivals(target, chosen, candidates, where))
        return chosen, gap, is_explained

    def rivals(
        self, target: str, chosen: Candidate, candidates: Sequence[Candidate], where: Tensor
    ) -> tuple[Fault, ...]:
        """The mistakes of candidates that rounding does not tell from the chosen one, but that are not the same."""
        floor = 1e-6 * root_mean_square(self.arrays[target][where])
        least = root_mean_square(self.gap(target, chosen, where))
        found, now = list(chosen.rivals), chosen.predict(self.arrays)
        for other in candidates:
            apart = [name for name in other.names if not name.choice and name not in chosen.names]
            is_as_plain = other.weight <= 1.01 * chosen.weight
            if not apart or not is_as_plain or other.unknown is not chosen.unknown:
                continue
            if root_mean_square(self.gap(target, other, where)) > 2 * least + floor:
                continue
            differs = largest((other.predict(self.arrays) - now)[where]) > 4 * floor
            found += [name for name in apart if name not in found] if differs else []
        return tuple(found)

    def fitting(self, target: str, candidates: Iterable[Candidate], where: Tensor) -> list[Candidate]:
        """The candidates that are as near to an array as rounding lets them be, the plainest first."""
        near = sorted((largest(self.gap(target, c, where)), n, c) for n, c in enumerate(candidates))[:40]
        fits = [c for gap, _, c in near if gap <= self.noise(target, c, where)[0]]
        return sorted(fits, key=lambda candidate: candidate.weight)

    # ---- What is said of an array ------------------------------------------------------------------------------

    def add(self, array: str, words: str = "", **more: Any) -> Finding:
        """Say something of an array."""
        self.findings.append(Finding(array=array, words=words, **more))
        return self.findings[-1]

    def explained(self, array: str, best: Candidate, gap: float, plain: Callable | None, where: Tensor) -> None:
        """Say how an array came about. plain: what the reference would give."""
        place = self.place(array, plain, where) if best.is_wrong and plain is not None else ""
        rivals = best.rivals[:2] if best.is_wrong else ()
        self.add(array, best.words, gap=gap, names=(*best.names, *rivals), where=place, asks=bool(rivals))

    def unexplained(self, array: str, best: Candidate | None, gap: float, lacks: str, where: Tensor) -> None:
        """Say that no candidate explains an array, or what the dump lacks for it."""
        if lacks:
            self.add(array, lacks=lacks)
        elif best is None:
            self.add(array, unexplained="no formula applies")
        else:
            away = f"the nearest formula ({best.words}) is {written(gap, 3)} away"
            self.add(array, unexplained=away, where=self.place(array, best.predict, best.known(where)))

    def place(self, target: str, plain: Callable[[Arrays], Tensor] | Tensor, where: Tensor) -> str:
        """The token where an array is farthest from what the reference would give."""
        if not self.arrays[target].ndim:
            return ""
        expected = plain if isinstance(plain, Tensor) else plain(self.arrays)
        gap = (self.arrays[target] - expected).abs().masked_fill(~where, -1)
        if float(gap.max()) <= 0:
            return ""
        row, column = divmod(int(gap.argmax()), gap.shape[1])
        is_, would = (written(float(x[row, column]), 4) for x in (self.arrays[target], expected))
        return f"row {row}, token {column}: {is_}, the reference gives {would}"

    @property
    def status(self) -> int:
        """The exit status: 1 for a fault, else 3 for an array that has all it needs and is not explained, else 0."""
        if any(finding.faults for finding in self.findings):
            return 1
        return 3 if any(finding.unexplained for finding in self.findings) else 0

    def verdict(self) -> str:
        """How many faults there are, and which arrays are not explained, in a sentence."""
        count = sum(len(finding.faults) for finding in self.findings)
        left = [finding.array for finding in self.findings if finding.unexplained or finding.lacks]
        found = f"{count} fault{'s' if count != 1 else ''} found" if count else "No fault found"
        rest = f"not explained: {', '.join(left)}" if left else "every computed array is explained"
        return f"{found}; {rest}."
