"""The doctor of batch.py: candidates for an array, and what mask, log-probs and rewards show.

Each array of the dump is compared with candidates: the functions of forms.py, those with a mistake of the book
(faults.toml), and the same with a mistake in what they are given (batch.toml). Constants, such as gamma, are solved
for. A candidate explains an array if it is as close as rounding lets it be. The plainest one is taken: one with a
mistake must be twice as close as one without.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppo_rlhf.check import dump, faults, forms
from ppo_rlhf.check.dump import Batch
from ppo_rlhf.check.faults import Fault
from ppo_rlhf.report.derivation import KL_FORMS, with_signs, written

TABLES = faults.tomllib.loads(Path(__file__).with_name("batch.toml").read_text())
WIRING = {name: faults.read("wiring", name, entry) for name, entry in TABLES["wiring"].items()}
ROUNDING = 1e-6  # of the largest number in an array: sums in float32
DRAWS = 4  # of rounding errors in what a candidate is given
Arrays = dict[str, Tensor]
# Mistakes of token_rewards in the book, by what they change.
PENALTIES = ("penalty of the response at its end", "penalty per length", "score in place of the penalty")
PLACES = (
    "score in the last column",
    "score at the number of tokens",
    "score on every token",
    "score broadcast along the tokens",
    "score of an empty response",
    "score on the first token",
)


@dataclass(kw_only=True, frozen=True)
class Candidate:
    """A way in which an array may have come about."""

    words: str
    predict: Callable[[Arrays], Tensor]
    names: tuple[Fault, ...] = ()
    now: Tensor | None = None  # of the arrays of the dump, where it is known

    unknown: Tensor | None = None  # entries that depend on what is not in the dump

    @property
    def is_wrong(self) -> bool:
        return any(not name.choice for name in self.names)

    @property
    def weight(self) -> float:
        """By how much closer it must be than the reference."""
        return 2.0 ** sum(1 if not name.choice else 0.3 for name in self.names)


@dataclass(kw_only=True)
class Finding:
    """What is said of an array."""

    array: str
    words: str = ""  # the formula, with its constants
    gap: float | None = None  # largest difference
    names: list[Fault] = field(default_factory=list)
    where: str = ""  # the token where it is seen best
    unexplained: str = ""  # how far the nearest formula is
    lacks: str = ""  # what the dump would need
    asks: bool = False  # whether the names are only possible


def wiring(*names: str) -> tuple[Fault, ...]:
    return tuple(WIRING[name] for name in names)


# ---- Candidates and their distance -----------------------------------------------------------------------------


@cache
def variants(function: str, more: tuple[tuple[str, str, str], ...] = ()) -> list[tuple[Callable, tuple[Fault, ...]]]:
    """A function of forms.py, and with each mistake of the book, or with one and a choice.

    more: other choices, each a name, a part of its text and what takes its place.
    """
    own = [
        dataclasses.replace(
            WIRING["another epsilon"], name=name, function=function, edits={faults.form(function): ((old, new),)}
        )
        for name, old, new in more
    ]
    book = (
        [fault for fault in faults.of(function) if not fault.name.startswith(("returns", "whitened ", "NaN"))]
        + own
        + [fault for fault in WIRING.values() if faults.form(function) in fault.edits]
    )
    source, found = inspect.getsource(getattr(forms, function)), []
    for names in [(), *((fault,) for fault in book), *itertools.combinations(book, 2)]:
        if len(names) == 2 and not any(fault.choice for fault in names):
            continue
        text = source
        try:
            for fault in names:
                text = faults.edited(text, fault.edits[faults.form(function)])
        except ValueError:  # both change the same part
            continue
        namespace: dict[str, Any] = {}
        exec(compile(text, f"<{function}>", "exec"), vars(forms), namespace)
        names = tuple(WIRING["whitened per row"] if fault.title == "whiten: each row" else fault for fault in names)
        found.append((namespace[function], names))
    return found


def root_mean_square(x: Tensor) -> float:
    return float((x**2).mean().sqrt()) if x.numel() else 0.0


class Doctor:
    """The findings about one batch."""

    def __init__(self, batch: Batch):
        self.batch, self.mask, self.arrays = batch, batch.mask, batch.arrays
        self.findings: list[Finding] = []
        self.generator = torch.Generator().manual_seed(1)
        self.true_mask = self.mask

    def variants(self, function: str, *more: tuple[str, str, str]) -> list[tuple[Callable, tuple[Fault, ...]]]:
        """Those that can have these shapes: some raise an error unless there are as many rows as tokens."""
        square = self.mask.shape[0] == self.mask.shape[1]
        return [
            (f, names)
            for f, names in variants(function, more)
            if square or not any("broadcast" in name.name for name in names)
        ]

    # ---- Judging candidates ------------------------------------------------------------------------------------

    def noise(self, target: str, candidate: Candidate, where: Tensor) -> tuple[float, float]:
        """How far rounding may move a candidate from an array: at most, and as a root mean square."""
        middle = candidate.predict(self.arrays)
        most, squares = 0.0, 0.0
        for _ in range(DRAWS):
            moved = {
                name: x
                * (
                    1
                    + self.batch.eps.get(name, 2**-23) * torch.empty_like(x).uniform_(-1, 1, generator=self.generator)
                )
                for name, x in self.arrays.items()
            }
            difference = (candidate.predict(moved) - middle)[where]
            most = max(most, float(difference.abs().max()) if difference.numel() else 0.0)
            squares += root_mean_square(difference) ** 2 / DRAWS
        there = self.arrays[target][where]
        eps = self.batch.eps[target]
        own = eps / 3**0.5 * root_mean_square(there)
        scale = float(there.abs().max()) if there.numel() else 0.0
        floor = ROUNDING * scale + 1e-12
        return 4 * most + 2 * eps * scale + floor, (squares + own**2) ** 0.5 + floor

    def choose(
        self, target: str, candidates: Iterable[Candidate], where: Tensor
    ) -> tuple[Candidate | None, float, bool]:
        """The best of the candidates, its largest difference, and whether that is rounding."""
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
        gap = self.gap(target, chosen, where).abs()
        largest = float(gap.max()) if gap.numel() else 0.0
        return chosen, largest, largest <= self.noise(target, chosen, where)[0]

    def fitting(self, target: str, candidates: Iterable[Candidate], where: Tensor) -> list[Candidate]:
        """The candidates that are as near to an array as rounding lets them be, the plainest first."""
        near = sorted(((float(self.gap(target, c, where).abs().max()), n, c) for n, c in enumerate(candidates)))[:40]
        fits = [c for gap, _, c in near if gap <= self.noise(target, c, where)[0]]
        return sorted(fits, key=lambda candidate: candidate.weight)

    def gap(self, target: str, candidate: Candidate, where: Tensor) -> Tensor:
        now = candidate.now if candidate.now is not None else candidate.predict(self.arrays)
        return (now - self.arrays[target])[where & ~candidate.unknown if candidate.unknown is not None else where]

    def is_near(self, target: str, candidate: Candidate, where: Tensor) -> bool:
        """Whether no other candidate could be much nearer to an array, because of rounding."""
        gap = root_mean_square(self.gap(target, candidate, where))
        return gap <= 3 * self.noise(target, candidate, where)[1]

    def place(self, target: str, plain: Callable[[Arrays], Tensor] | Tensor, where: Tensor) -> str:
        """The token where an array is farthest from what the reference would give."""
        expected = plain if isinstance(plain, Tensor) else plain(self.arrays)
        gap = (self.arrays[target] - expected).abs().masked_fill(~where, -1)
        if float(gap.max()) <= 0:
            return ""
        row, column = divmod(int(gap.argmax()), gap.shape[1])
        is_, would = self.arrays[target][row, column], expected[row, column]
        return f"row {row}, token {column}: {written(float(is_), 4)}, the reference gives {written(float(would), 4)}"

    def add(self, array: str, words: str = "", **more: Any) -> Finding:
        self.findings.append(Finding(array=array, words=words, **more))
        return self.findings[-1]

    # ---- The mask ----------------------------------------------------------------------------------------------

    def check_mask(self, eos_ids: Sequence[int] = ()) -> None:
        """Compare the mask with what the token ids show: padding, the end token, prompts, tools."""
        batch, mask = self.batch, self.mask
        width, tokens, says = mask.shape[1], batch.responses, []
        columns = torch.arange(width)
        last = torch.where(mask, columns, -1).amax(1)
        short = mask.any(1) & (last < width - 1)
        pad = dump.pad_of(batch)
        ends = {*eos_ids, *([int(batch.settings["eos_id"])] if "eos_id" in batch.settings else [])}
        after = columns > last.unsqueeze(1)
        text_after = (batch.is_text[:, -width:] if batch.settings["has_attention"] else tokens != pad) & after
        one_more = (
            short
            & (text_after.sum(1) == 1)
            & text_after.gather(1, (last + 1).clamp(max=width - 1).unsqueeze(1))[:, 0]
        )
        padded = short & (last < width - 2)
        rows = torch.arange(len(mask))
        at_end, before_end = tokens[rows, last.clamp(min=0)], tokens[rows, (last - 1).clamp(min=0)]
        end_ids = torch.tensor(sorted(ends), dtype=tokens.dtype)
        one_is_left = padded.any() and (text_after.sum(1) <= 1).all() and one_more.sum() * 2 > short.sum()
        if one_is_left or (short.any() and pad in ends and not torch.isin(at_end[short], end_ids).any()):
            says.append("the mask is without the end")
        over = mask & ~batch.is_text[:, -width:] if batch.settings["has_attention"] else torch.zeros_like(mask)
        twice = (at_end == pad) & (mask.sum(1) > 1)
        known = torch.isin(before_end, end_ids)
        filled = [
            x[rows, last.clamp(min=0)][short].unique().numel() == 1
            for x in (self.arrays.get("logprobs"), self.arrays.get("ref_logprobs"))
            if x is not None and short.sum() > 1
        ]
        if over.any() or (short.any() and twice[short].all() and (known[short].all() or (filled and all(filled)))):
            says.append("the mask is one too long")
        elif not ends and short.sum() > 2 and twice[short].all() and before_end[short].unique().numel() == 1:
            self.add("mask", names=[WIRING["the mask is one too long"]], asks=True)
        start = batch.settings["context_length"] if not batch.has_context else 0
        first = batch.is_text.byte().argmax(1)
        if mask[:, :start].any() or (
            batch.settings["ids_name"] in dump.WHOLE and not batch.has_context and mask[rows, first].all()
        ):
            says.append("the mask includes the prompt")
        tools = self.arrays.pop("tool_mask", None)
        if tools is None and {"sampler_logprobs", "logprobs"} <= self.arrays.keys():
            # Engines write 0 where they did not sample.
            zero = (self.arrays["sampler_logprobs"] == 0) & mask & (self.arrays["logprobs"] < -0.1)
            tools = 1 - zero.double() if zero.any() else None
        if tools is not None and (mask & (tools < 0.5)).any():
            says.append("the mask includes tokens of tools")
        if "the mask is without the end" in says:
            self.true_mask = mask | self.following(mask)
        elif "the mask is one too long" in says:
            self.true_mask = mask & (columns != last.unsqueeze(1)) if not over.any() else mask & ~over
        row = int(short.byte().argmax()) if short.any() else 0
        ended = torch.isin(at_end, end_ids).sum() if ends else None
        count = f"; {ended} of them end with an end token" if ended is not None else ""
        self.add(
            "mask",
            f"{int(mask.sum())} tokens in {int(mask.any(1).sum())} responses{count}",
            names=list(wiring(*says)),
            where=f"row {row} counts up to token {int(last[row])}, id {int(at_end[row])}" if says else "",
        )
        if batch.not_finite:
            for name in batch.not_finite:
                self.add(name, names=list(wiring("not finite")))

    @staticmethod
    def following(mask: Tensor) -> Tensor:
        """The step after the last token of each row, where there is one."""
        columns = torch.arange(mask.shape[1])
        last = torch.where(mask, columns, -1).amax(1, keepdim=True)
        return (columns == last + 1) & mask.any(1, keepdim=True)

    # ---- Log-probs ---------------------------------------------------------------------------------------------

    def check_logprobs(self) -> None:
        """Compare the log-probs in the dump with each other."""
        mask, found = self.mask, self.arrays
        names = [name for name in ("logprobs", "ref_logprobs", "new_logprobs", "sampler_logprobs") if name in found]
        for name in names:
            if (found[name][mask] > 1e-3).any():
                where = self.place(name, torch.zeros_like(found[name]), mask & (found[name] > 1e-3))
                self.add(name, names=list(wiring("log-probs above 0")), where=where.split(", the")[0])
        late, early, other = {}, {}, {}
        for a, b in itertools.permutations(names, 2):
            x, y = found[a], found[b]
            apart = root_mean_square((x - y)[mask])
            both = mask[:, 1:] & mask[:, :-1]
            shifted = root_mean_square((x[:, 1:] - y[:, :-1])[both])
            if both.sum() > 4 and apart > 0.1 and shifted < 0.3 * apart:
                late.setdefault(a, []).append(b)
                early.setdefault(b, []).append(a)
            elif apart > 0.5 and len(mask) > 2 and self.rows_fit(x, y):
                other.setdefault(a, []).append(b)
        for name in names:
            kind = "reference log-probs" if name == "ref_logprobs" else "log-probs"
            others = len(names) - 1
            if len(late.get(name, [])) == others > 1 or (others == 1 and name != "ref_logprobs" and name in late):
                self.add(
                    name, names=list(wiring(f"{kind} one token late")), where=self.versus(name, late[name][0], -1)
                )
            if len(early.get(name, [])) == others > 1 or (others == 1 and name != "ref_logprobs" and name in early):
                self.add(
                    name, names=list(wiring(f"{kind} one token early")), where=self.versus(name, early[name][0], 1)
                )
            if name in other and (len(other[name]) == others):
                self.add(name, names=list(wiring("log-probs of another row")))
                break
        if {"logprobs", "ref_logprobs"} <= found.keys() and mask.any():
            gap = (found["logprobs"] - found["ref_logprobs"])[mask]
            words = f"KL from logprobs: {written(float(gap.mean()), 3)} nats per token"
            if not any(finding.array == "ref_logprobs" for finding in self.findings):
                same = float(gap.abs().max()) < 1e-5
                step = self.batch.settings.get("step")
                self.add(
                    "ref_logprobs",
                    words,
                    names=list(wiring("the reference is the policy")) if same and step != 0 else [],
                    asks=step is None,
                )
        self.check_sampler()

    def versus(self, name: str, other: str, shift: int) -> str:
        """Where a shifted array is farthest from another one, and what fits there."""
        other_there = self.arrays[other].roll(-shift, 1)
        gap = ((self.arrays[name] - self.arrays[other]).abs() - (self.arrays[name] - other_there).abs()).masked_fill(
            ~self.mask, -1
        )
        gap[:, 0 if shift < 0 else -1] = -1
        row, column = divmod(int(gap.argmax()), gap.shape[1])
        values = [written(float(x[row, column]), 4) for x in (self.arrays[name], self.arrays[other], other_there)]
        place = f"row {row}, token {column}: {values[0]}"
        return f"{place}; {other} has {values[1]} there, and {values[2]} at token {column + shift}"

    def rows_fit(self, x: Tensor, y: Tensor) -> bool:
        """Whether most rows of x are those of y in another order."""
        fits = 0
        for row in range(len(x)):
            both = self.mask[row] & self.mask
            gaps = torch.stack([root_of(x[row][m] - y[k][m]) for k, m in enumerate(both)])
            fits += bool(gaps.min() < 0.3 * gaps[row]) and int(gaps.argmin()) != row
        return fits * 2 > len(x)

    def check_sampler(self) -> None:
        if not {"logprobs", "sampler_logprobs"} <= self.arrays.keys():
            return
        sampled = self.mask & (self.arrays["sampler_logprobs"] != 0)
        gap = (self.arrays["sampler_logprobs"] - self.arrays["logprobs"])[sampled]
        if not gap.numel():
            return
        words = f"logprobs + noise of {written(root_mean_square(gap), 2)} nats" if gap.any() else "equal to logprobs"
        names: tuple[Fault, ...] = ()
        if any(finding.array == "sampler_logprobs" and finding.names for finding in self.findings):
            return
        if gap.numel() > 9 and float(gap.min()) > -1e-3 and float(gap.mean()) > 0.01:
            names = wiring("log-probs of the sampler's nucleus")
        self.add("sampler_logprobs", words, names=list(names))

    def replace(self, finding: Finding) -> None:
        """Say this of an array, in place of what a comparison of arrays has said."""
        self.findings = [
            f for f in self.findings if f.array != finding.array or (f.names and not f.asks and not finding.names)
        ]
        self.findings.append(finding)

    @property
    def wrong(self) -> bool:
        """Whether there is a fault, or an array that has all it needs and is not explained."""
        return any(f.unexplained or (not f.asks and any(not name.choice for name in f.names)) for f in self.findings)

    def verdict(self) -> str:
        count = sum(1 for f in self.findings for name in f.names if not name.choice and not f.asks)
        left = [f.array for f in self.findings if f.unexplained or f.lacks]
        found = f"{count} fault{'s' if count != 1 else ''} found" if count else "No fault found"
        rest = f"not explained: {', '.join(left)}" if left else "every array that follows from others is explained"
        return f"{found}; {rest}."

    # ---- Rewards -----------------------------------------------------------------------------------------------

    def penalties(self) -> list[Candidate]:
        """KL penalties per token with the coefficient 1, as rewards."""
        found: list[Candidate] = []
        sources = [("logprobs", "", 0, ()), ("sampler_logprobs", "", 0, wiring("KL of the sampler's log-probs"))]
        known = {name.name for finding in self.findings for name in finding.names}
        for array, kind in (("logprobs", "log-probs"), ("ref_logprobs", "reference log-probs")):
            for shift, late, other in ((1, "late", "early"), (-1, "early", "late")):
                # If the array itself is shifted the other way, the rewards are in order.
                wrong = () if f"{kind} one token {other}" in known else wiring(f"{kind} one token {late}")
                sources.append(("logprobs", array, shift, wrong))
        forms_of_kl = [
            (name, forms.kl_estimate, wiring(f"{name} as a penalty") if name != "k1" else ())
            for name in ("k1", "k3", "k2", "abs")
        ]
        forms_of_kl += [
            ("k3", f, names)
            for f, names in self.variants("kl_estimate")
            if len(names) == 1 and "k3 up" in names[0].name
        ]
        forms_of_kl += [
            (name, f, names)
            for name in ("k1", "k3")
            for f, names in self.variants("kl_estimate")
            if len(names) == 1 and "clamped" in names[0].name
        ]
        shapes = [
            (f, names)
            for f, names in self.variants("token_rewards")
            if len(names) == 0 or (len(names) == 1 and names[0].name in PENALTIES)
        ]
        masks = [(self.mask, ()), (torch.ones_like(self.mask), wiring("KL on padding"))]
        masks += [(self.true_mask, ())] if (self.true_mask != self.mask).any() else []
        for array, shifted, shift, wrong in sources:
            if not {array, "ref_logprobs"} <= self.arrays.keys():
                continue
            edge = self.only_last(self.mask) if shift < 0 else self.mask & (self.mask.cumsum(1) == 1)
            for name, estimate, of_name in forms_of_kl:
                for (shape, of_shape), (mask, of_mask) in itertools.product(shapes, masks):
                    if len(wrong) + len(of_shape) + len(of_mask) > 1 or (shift and (of_shape or of_mask)):
                        continue

                    def predict(
                        a: Arrays,
                        array: str = array,
                        shifts: tuple[int, int] = (
                            shift * (shifted == "logprobs"),
                            shift * (shifted == "ref_logprobs"),
                        ),
                        estimate: Callable = estimate,
                        name: str = name,
                        shape: Callable = shape,
                        mask: Tensor = mask,
                    ) -> Tensor:
                        new, ref = a[array].roll(shifts[0], 1), a["ref_logprobs"].roll(shifts[1], 1)
                        d = estimate(new, ref, mask, name)
                        nothing = torch.zeros_like(d)
                        return shape(nothing[:, 0], d, nothing, mask, kl_coef=1.0, score_at="last")

                    found.append(
                        Candidate(
                            words=with_signs(KL_FORMS[name].format(array)),
                            predict=predict,
                            names=(*wrong, *of_name, *of_shape, *of_mask),
                            unknown=edge if shift else None,
                        )
                    )
        return found

    def score_places(self) -> list[Candidate]:
        """The scores alone, as rewards."""
        n = len(self.mask)
        orders = [(lambda x: x, ())]
        permutations = [torch.arange(n).roll(shift) for shift in (1, -1)] + [torch.arange(n).flip(0)]
        permutations += [torch.arange(n).reshape(k, -1).T.flatten() for k in range(2, n) if n % k == 0]
        orders += [
            (lambda x, order=order: x[order], wiring("score of another row")) for order in permutations if n > 1
        ]
        mask, two = self.mask, self.mask | self.following(self.mask)
        two_after = two | self.following(two)
        before = mask & ~self.only_last(mask)
        functions = [
            (f, at, m, names)
            for f, names in self.variants("token_rewards")
            if len(names) == 0 or (len(names) == 1 and names[0].name in PLACES)
            for at, m in (("last", mask), ("next", mask))
            if at == "last" or not names
        ]
        f = forms.token_rewards
        starts = mask & (mask.cumsum(1) == 1)
        for m, name in (
            (before, "score on the token before the last"),
            (two_after, "score two after the last token"),
            (starts, "score on the first token"),
        ):
            functions.append((forms.token_rewards, "last", m, wiring(name)))
        f = forms.token_rewards
        if (self.true_mask != mask).any():
            functions += [(f, "last", self.true_mask, ()), (f, "next", self.true_mask, ())]
        found = []
        for (order, of_order), (f, at, m, names) in itertools.product(orders, functions):
            if of_order and names:
                continue

            def predict(a: Arrays, order=order, f=f, at=at, m=m) -> Tensor:
                nothing = torch.zeros(m.shape, dtype=torch.float64)
                return f(order(a["scores"]), nothing, nothing, m, kl_coef=0.0, score_at=at)

            words = "the score on the last token" if at == "last" else "the score on the step after the last token"
            found.append(
                Candidate(words=words if not names else "the score", predict=predict, names=(*of_order, *names))
            )
        return found

    @staticmethod
    def only_last(mask: Tensor) -> Tensor:
        return mask & (mask.flip(1).cumsum(1).flip(1) == 1)

    def check_rewards(self) -> None:
        rewards, mask = self.arrays["rewards"], self.mask
        step_after = mask | self.following(mask)
        nothing = Candidate(words="", predict=lambda a: torch.zeros_like(rewards))
        penalties = [nothing, *self.penalties()]
        places = [nothing, *self.score_places()] if "scores" in self.arrays else [nothing]
        if "scores" not in self.arrays:
            self.rewards_without_scores(penalties)
            return
        for where, shift in ((mask | True, False), (step_after, False), (mask, True), (step_after, True)):
            best, gap, explained = self.choose("rewards", self.sums(penalties, places, where, shift), where)
            if explained:
                break
        if not explained:
            best, gap, _ = self.choose("rewards", self.sums(penalties, places, step_after, False), step_after)
            lacks = "" if "ref_logprobs" in self.arrays and "logprobs" in self.arrays else "logprobs and ref_logprobs"
            self.unexplained("rewards", best, gap, lacks, step_after)
            return
        self.explained("rewards", best, gap, self.reference_rewards(best), where)

    def sums(
        self, penalties: list[Candidate], places: list[Candidate], where: Tensor, shift: bool
    ) -> Iterator[Candidate]:
        """Penalty and score with the coefficients that fit best. shift: rewards may be whitened, too."""
        y = self.arrays["rewards"][where]
        parts = [torch.stack([c.predict(self.arrays)[where] for c in group]) for group in (penalties, places)]
        weights = torch.tensor([place.weight for place in places], dtype=y.dtype)
        results = []
        for i, penalty in enumerate(penalties):
            there = torch.ones_like(y) if penalty.unknown is None else (~penalty.unknown[where]).to(y.dtype)
            terms = [parts[0][i].expand_as(parts[1]), parts[1], *([torch.ones_like(parts[1])] if shift else [])]
            columns, known = torch.stack(terms, 2) * there.unsqueeze(1), y * there  # (places, entries, terms)
            right = columns.mT @ known.unsqueeze(1)
            solutions = torch.linalg.pinv(columns.mT @ columns, rtol=1e-12, hermitian=True) @ right
            errors = (known - (columns @ solutions).squeeze(2)).square().mean(1).sqrt() * weights * penalty.weight
            size = float((parts[0][i] * there).abs().max())
            for j, (error, solution) in enumerate(zip(errors.tolist(), solutions[..., 0].tolist(), strict=True)):
                # One that leaves something out must explain the rest.
                if penalty.unknown is None or abs(solution[0]) * size > 1e-7:
                    results.append((error, i, j, solution))
        results.sort(key=lambda result: result[0])
        for _, i, j, solution in results[:12]:
            coefficient, scale, *_ = solution
            yield from self.reward(penalties[i], places[j], coefficient, scale, shift)
            told = self.batch.settings.get("kl_coef")
            if told and not shift and abs(coefficient - told) < 0.3 * told:  # rounding may make it another one
                yield from self.reward(penalties[i], places[j], told, scale, shift)

    def reward(
        self, penalty: Candidate, place: Candidate, coefficient: float, scale: float, shift: bool
    ) -> Iterator[Candidate]:
        names = [*penalty.names, *place.names]
        told = self.batch.settings.get("kl_coef")
        if shift:
            if abs(scale) < 1e-9:
                return
            coefficient, scale = coefficient / scale, 1.0
        size = float(penalty.predict(self.arrays).abs().max()) * abs(coefficient)
        has_penalty, has_score = size > 1e-7, bool(place.words) and abs(scale) > 1e-3
        coefficient = nice(coefficient, told)
        if not has_penalty:
            names = [name for name in names if name not in penalty.names]
            names += (
                wiring("without a penalty")
                if told and {"logprobs", "ref_logprobs"} <= self.arrays.keys() and not self.same_reference()
                else ()
            )
        elif coefficient < 0:
            names += wiring("KL with the wrong sign")
        if has_penalty and told and abs(abs(coefficient) - told) > 0.01 * told:
            names += wiring(
                "KL twice" if abs(abs(coefficient) - 2 * told) < 0.02 * told else "another KL coefficient"
            )
        if penalty.unknown is not None and not has_penalty:
            return
        if not has_score and penalty.unknown is None and float(self.arrays["scores"].abs().max()) > 0:
            names += wiring("without the score")
        rounded = nice(scale, 1.0)
        if has_score and abs(rounded - 1) > 1e-3:
            names += wiring(
                "score twice"
                if abs(rounded - 2) < 1e-3
                else "score with the wrong sign"
                if abs(rounded + 1) < 1e-3
                else "scores on another scale"
            )
        scale = rounded if has_score else 0.0
        coefficient = coefficient if has_penalty else 0.0
        terms = [f"-{written(coefficient, 5)} * ({penalty.words})" if has_penalty else ""]
        terms += [("" if scale == 1 else f"{written(scale, 5)} * ") + place.words if has_score else ""]
        words = " + ".join(filter(None, terms)) or "0"

        def predict(a: Arrays) -> Tensor:
            return coefficient * penalty.predict(a) + scale * place.predict(a)

        if not shift:
            yield Candidate(words=words, predict=predict, names=tuple(names), unknown=penalty.unknown)
            return
        for region in (self.mask, self.mask | self.following(self.mask)):
            for f, of_f in self.variants("whiten"):
                yield Candidate(
                    words=f"{words}, then whitened with the mean kept",
                    predict=lambda a, f=f, region=region: f(predict(a), region, True),
                    names=(*names, *wiring("whitened rewards"), *of_f),
                )

    def same_reference(self) -> bool:
        return float((self.arrays["logprobs"] - self.arrays["ref_logprobs"])[self.mask].abs().max()) < 1e-5

    def reference_rewards(self, best: Candidate) -> Callable[[Arrays], Tensor] | None:
        """What the reference gives: k1 with the dump's coefficient or one that fits, and the score at the end."""
        found = self.arrays
        if not {"logprobs", "ref_logprobs"} <= found.keys():
            return lambda a: forms.token_rewards(a["scores"], 0 * a["rewards"], 0 * a["rewards"], self.mask)
        kl = forms.kl_estimate(found["logprobs"], found["ref_logprobs"], self.mask)
        size = float((kl * kl).sum())
        slope = -float((found["rewards"] * kl)[self.mask & ~self.only_last(self.mask)].sum()) / max(size, 1e-30)
        coefficient = self.batch.settings.get("kl_coef", abs(slope))
        at = "next" if "after" in best.words else "last"
        return lambda a: forms.token_rewards(
            a["scores"], a["logprobs"], a["ref_logprobs"], self.mask, coefficient, at
        )

    def rewards_without_scores(self, penalties: list[Candidate]) -> None:
        """Explain the penalty alone; what is left at the end is the score."""
        mask, rewards = self.mask, self.arrays["rewards"]
        candidates, places = [], {}
        for words, place in (
            ("last token", self.only_last(mask)),
            (
                "step after the last token",
                self.following(mask) | (self.only_last(mask) & (self.following(mask).sum(1, keepdim=True) == 0)),
            ),
        ):
            for penalty in penalties:
                where = (mask | self.following(mask)) & ~place
                p = penalty.predict(self.arrays)
                size = float((p[where] ** 2).sum())
                coefficient = nice(
                    float((p * rewards)[where].sum()) / size if size else 0.0, self.batch.settings.get("kl_coef")
                )
                names = (*penalty.names, *(wiring("KL with the wrong sign") if coefficient < 0 else ()))
                text = f"-{written(coefficient, 5)} * ({penalty.words}) + " if coefficient and size else ""
                candidates.append(
                    Candidate(
                        words=f"{text}a number, such as the score, which the dump lacks, on the {words}",
                        predict=lambda a, c=coefficient, p=penalty, at=place: torch.where(
                            at, rewards, c * p.predict(a)
                        ),
                        names=names,
                    )
                )
                places[candidates[-1].words] = place
        where = mask | self.following(mask)
        best, gap, explained = self.choose("rewards", candidates, where)
        if not explained:
            lacks = "" if {"logprobs", "ref_logprobs"} <= self.arrays.keys() else "logprobs and ref_logprobs"
            self.unexplained("rewards", best, gap, lacks, where)
            return
        self.explained("rewards", best, gap, None, where)

    # ---- What is said of an explained array, and of one that is not ----------------------------------------------

    def explained(self, array: str, best: Candidate, gap: float, plain: Callable | None, where: Tensor) -> None:
        wrong = [name for name in best.names if not name.choice]
        self.add(
            array,
            best.words,
            gap=gap,
            names=list(best.names),
            where=self.place(array, plain, where) if wrong and plain is not None else "",
        )

    def unexplained(self, array: str, best: Candidate | None, gap: float, lacks: str, where: Tensor) -> None:
        if lacks:
            self.add(array, lacks=lacks)
        elif best is None:
            self.add(array, unexplained="no formula applies")
        else:
            self.add(
                array,
                unexplained=f"the nearest formula ({best.words}) is {written(gap, 3)} away",
                where=self.place(array, best.predict, where),
            )


def root_of(x: Tensor) -> Tensor:
    return (x**2).mean().sqrt() if x.numel() else torch.tensor(float("inf"), dtype=torch.float64)


def nice(x: float, told: float | None = None) -> float:
    """A number with few digits that is as good as x, or the one that was told."""
    for other in (*([told] if told is not None else []), *(float(f"{x:.{digits}g}") for digits in (1, 2, 3, 4))):
        if abs(other - x) <= 2e-4 * abs(x):
            return other
    return x
