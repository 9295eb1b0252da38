"""Diagnosis of a function's numbers: which cases match and, if not all, which known fault has the same numbers."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations, islice

import torch
from torch import Tensor

from ppo_rlhf.check import calls, cases, changes, faults
from ppo_rlhf.check.cases import Case

Answer = dict[str, Tensor] | str
OPTIONS = {"name", "mode", "kind", "style", "score_at"}  # arguments of which a function may refuse some values
REFUSALS = ("raises KeyError", "raises ValueError", "raises AssertionError")
TRIES = 1500  # of combined faults, each time; a second
MOST = 3  # explanations, and entries that differ
UNSEEN = (
    "It got no part of a minibatch, so a mean of each micro-batch would pass unseen. Let it take `tokens`, or "
    "check your loop with `accumulate`."
)
SMALLEST = 0.1  # errors of numbers that are all smaller than this are relative to it


@dataclass(kw_only=True)
class Report:
    """The verdict on one function."""

    function: str
    cases: int = 0
    """compared"""
    matches: int = 0
    error: float = 0.0
    """largest, relative to the largest expected number of the case"""
    left_out: dict[str, int] = field(default_factory=dict)
    """why a case was not compared, and how many"""
    gradients: bool = True
    """whether all results had a gradient, where one that is not 0 was to be compared"""
    failed: list[dict] = field(default_factory=list)
    """of the cases that do not match: name, source, and what is wrong there"""
    diagnoses: list[list[faults.Fault]] = field(default_factory=list)
    """faults whose numbers these are; two in a list are combined"""
    changes: list[str] = field(default_factory=list)
    """if there is no diagnosis: changes of the form that give these numbers"""
    nearest: list[tuple[faults.Fault, int]] = field(default_factory=list)
    """if there is neither: faults that have the numbers of most failed cases, and of how many"""
    hints: list[str] = field(default_factory=list)
    missing: str = ""
    """result that the function doesn't give, such as the returns of gae"""
    unseen: str = ""
    """what could not be checked, and how it can be"""

    @property
    def ok(self) -> bool:
        return self.matches == self.cases > 0


def distance(actual: Tensor, expected: Tensor, mask: Tensor | None) -> float:
    """The largest error, relative to the largest expected number. NaN in one of them alone is infinite."""
    expected = expected.double()
    if mask is not None and mask.shape == expected.shape:
        actual, expected = actual[mask], expected[mask]
    if not expected.numel():
        return 0.0
    both = (actual == expected) | (actual.isnan() & expected.isnan())
    gap = torch.where(both, 0, (actual - expected).abs()).nan_to_num(torch.inf, posinf=torch.inf)
    finite = expected[expected.isfinite()].abs()
    scale = max(finite.max().item() if len(finite) else 0.0, SMALLEST)
    return gap.max().item() / scale


def agree(answer: dict[str, Tensor], other: Answer, case: Case) -> bool:
    """Whether two functions gave the same numbers, as far as both gave some."""
    if isinstance(other, str):
        return False
    enough = 5 * cases.TOLERANCE  # float32 in one of them, float64 in the other
    for name in answer.keys() & other.keys():
        actual, expected = answer[name], other[name]
        if case.mask is not None and case.mask.shape == actual.shape:
            actual, expected = actual[case.mask], expected[case.mask]
        if not actual.numel():
            continue
        gap = (actual - expected).abs().max().item()
        if math.isfinite(gap):
            if gap > enough * max(expected.abs().max().item(), SMALLEST):
                return False
        # How far NaN spreads in a result depends on the order of operations.
        elif not (actual.isnan().any() and expected.isnan().any()) and distance(actual, expected, None) > enough:
            return False
    return True


def size(case: Case) -> int:
    """Numbers in the tensors of a case's arguments."""
    return sum(x.numel() for x in case.arguments.values() if isinstance(x, Tensor))


def answer_of(function: Callable, case: Case) -> Answer:
    """The result of a fault in a case; a text if it raises."""
    arguments = calls.converted(case.arguments, torch.float64)  # it may write into them
    leaves = calls.leaves_of(arguments, case.gradient_of) if case.gradient_of else []
    try:
        return calls.results_of(case.run(function, arguments), case, leaves)
    except Exception as error:  # faults may fail in many ways, like the code that they represent
        return str(error) or type(error).__name__


def judge(function: str, answers: dict[int, Answer], left_out: dict[str, int]) -> Report:
    """The report of a function. answers: by the index of a case."""
    all_cases = cases.all_cases()[function]
    answers, refused = without_refused(all_cases, answers)
    report, wrong = Report(function=function, left_out=left_out | refused), []
    for index, answer in answers.items():
        case = all_cases[index]
        report.cases += 1
        error, words = torch.inf, answer
        if not isinstance(answer, str):
            errors = {name: distance(x, case.expected[name], case.mask) for name, x in answer.items()}
            name = max(errors, key=errors.__getitem__)
            entries = difference(answer[name], case.expected[name].double(), case.mask)
            error, words = errors[name], f"{name}{entries}"
            slope = case.expected.get("gradient")
            report.gradients &= slope is None or "gradient" in answer or not slope.any()
            report.missing = next((n for n in case.expected if n not in {*answer, "gradient"}), report.missing)
        report.error = max(report.error, error)
        if error <= cases.TOLERANCE:
            report.matches += 1
        else:
            wrong.append(index)
            report.failed.append({"index": index, "case": case.name, "source": case.source, "wrong": words})
    report.failed.sort(key=lambda entry: size(all_cases[entry["index"]]))
    if function in cases.PARTS and not any(all_cases[index].source == "parts add up" for index in answers):
        report.unseen = UNSEEN
    if wrong:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of faults that divide by 0 or worse
            diagnose(report, {index: (all_cases[index], answer) for index, answer in answers.items()}, wrong)
    return report


def without_refused(all_cases: list[Case], answers: dict[int, Answer]) -> tuple[dict[int, Answer], dict[str, int]]:
    """The answers, without options that the function refuses by name; and those, with the number of cases.

    An option is refused if the function raises an error that names it wherever it is asked for: KeyError: 'k3+'.
    """
    refused: dict[str, list[int]] = {}
    taken = set()
    for index, answer in answers.items():
        for key in OPTIONS & all_cases[index].arguments.keys():
            option = all_cases[index].arguments[key]
            if isinstance(answer, str) and answer.startswith(REFUSALS) and option in answer:
                refused.setdefault(f"{key} {option} is refused", []).append(index)
            else:
                taken.add(f"{key} {option} is refused")
    refused = {reason: found for reason, found in refused.items() if reason not in taken}
    left = {
        index: answer for index, answer in answers.items() if not any(index in found for found in refused.values())
    }
    return left, {reason: len(found) for reason, found in refused.items()}


def difference(actual: Tensor, expected: Tensor, mask: Tensor | None) -> str:
    """The first entries that differ: ` [0, 2] is 1.5, not 1.25; ...`."""
    apart = ~torch.isclose(actual, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    if mask is not None and mask.shape == apart.shape:
        apart &= mask
    if not apart.ndim:
        return f" is {actual.item():.6g}, not {expected.item():.6g}"
    entries = [
        f"{place} is {actual[tuple(place)]:.6g}, not {expected[tuple(place)]:.6g}"
        for place in apart.nonzero().tolist()
    ]
    more = f"; {len(entries) - MOST} more" if len(entries) > MOST else ""
    return f" {'; '.join(entries[:MOST])}{more}"


def diagnose(report: Report, answers: dict[int, tuple[Case, Answer]], wrong: list[int]) -> None:
    """Look for what explains every answer: a known fault, a change of the form, or two; else for what fits most."""
    report.hints = list(hints(answers, wrong))
    answers = {index: pair for index, pair in answers.items() if not isinstance(pair[1], str)}
    wrong = sorted([index for index in wrong if index in answers], key=lambda index: size(answers[index][0]))
    if not wrong:  # what raises an error speaks for itself
        return
    name, known = report.function, faults.of(report.function)
    order = [*wrong, *(index for index in answers if index not in wrong)]  # those that exclude most come first
    some_wrong = [wrong[0], wrong[-1]]

    def agrees(function: Callable, index: int) -> bool:
        case, answer = answers[index]
        return agree(answer, answer_of(function, case), case)

    def explains(function: Callable | None) -> bool:
        return function is not None and all(agrees(function, index) for index in order)

    def together(number: int) -> list[list[faults.Fault]]:
        """Known faults that explain every answer."""
        tried = islice(combinations(known, number), TRIES)
        return [list(some) for some in tried if explains(some[0] if number == 1 else faults.together(some))]

    def explaining(tried: Iterable[tuple[str, changes.Change]]) -> list[str]:
        """The words of the first changes that explain every answer."""
        found = (before + change.words() for before, change in tried if explains(change.call))
        return list(islice(found, MOST))

    report.diagnoses = together(1)
    report.changes = [] if report.diagnoses else explaining(("", change) for change in changes.of(name))
    for number in (2, 3):
        if not report.diagnoses and not report.changes:
            report.diagnoses = together(number)
        if not report.diagnoses and not report.changes and number == 2:
            half = halves(name, known, agrees, some_wrong)
            both = ((f"{words} together with ", x) for words, text in half for x in changes.of(name, text))
            report.changes = explaining(islice(both, 2 * TRIES))
    if report.diagnoses or report.changes:
        return
    for fault in known:
        count = sum(agrees_where_wrong(fault, *answers[index]) for index in wrong)
        if 2 * count > len(wrong):
            report.nearest.append((fault, count))
    report.nearest = sorted(report.nearest, key=lambda pair: -pair[1])[:MOST]


def halves(
    name: str, known: list[faults.Fault], agrees: Callable[[Callable, int], bool], wrong: list[int]
) -> list[tuple[str, str]]:
    """Known faults and changes that give the numbers of some wrong cases: their words and texts, the best first."""
    found = [(sum(agrees(fault, index) for index in wrong), f'"{fault.name}"', fault.text) for fault in known]
    for change in changes.of(name):
        count = sum(agrees(change.call, index) for index in wrong)
        found += [(count, change.words(), change.text())] if count else []
    found.sort(key=lambda each: -each[0])
    return [(words, text) for _, words, text in found]


def agrees_where_wrong(fault: faults.Fault, case: Case, answer: Answer) -> bool:
    """Whether a fault has the same numbers. NaN in both says too little."""
    return not any(x.isnan().any() for x in answer.values()) and agree(answer, answer_of(fault, case), case)


def compared(case: Case, answer: Answer) -> Iterator[tuple[Tensor, Tensor]]:
    """Numbers of an answer and the expected ones, where they count."""
    for name, x in answer.items() if isinstance(answer, dict) else ():
        expected = case.expected[name].double()
        if case.mask is not None and case.mask.shape == expected.shape:
            x, expected = x[case.mask], expected[case.mask]
        if expected.numel():
            yield x.double(), expected


def bounds(pairs: list[tuple[Tensor, Tensor]]) -> Iterator[str]:
    """If all numbers that differ are one number, or two, and the expected ones beyond: the numbers are clamped."""
    x, expected = (torch.cat([pair[i].flatten() for pair in pairs]) if pairs else torch.zeros(0) for i in (0, 1))
    apart = ~torch.isclose(x, expected, rtol=1e-4, atol=1e-5)
    for word, sign in (("below", 1), ("above", -1)):
        here = apart & (sign * (x - expected) > 0)
        if here.any() and (x[here] - x[here][0]).abs().max() < 1e-5 and (sign * (x - x[here][0]) > -1e-5).all():
            yield f"no number is {word} {x[here][0].item():.4g}, where the expected ones go on"


def hints(answers: dict[int, tuple[Case, Answer]], wrong: list[int]) -> Iterator[str]:
    """The properties that the failed cases have in common."""
    sources = [answers[index][0].source for index in wrong]
    of_all = [case.source for case, _ in answers.values()]
    for source in dict.fromkeys(sources):
        if set(sources) == {source} != {"golden"} and len(sources) < len(of_all):
            yield f"only cases of one kind fail: {source}"
    pairs = [pair for index in wrong for pair in compared(*answers[index])]
    yield from bounds(pairs)
    factors = set()
    for index in wrong:
        case, answer = answers[index]
        if isinstance(answer, str):
            return
        for x, expected in compared(case, answer):
            kept = expected.abs() > 0.1 * expected.abs().max()  # where rounding is small
            if not kept.any():
                continue
            ratio = (x[kept] / expected[kept]).nan_to_num(torch.inf)
            if ratio.isinf().any() or (ratio - ratio.flatten()[0]).abs().max() > 5e-3 * ratio.abs().max():
                return
            factors.add(round(ratio.median().item(), 2))
    if len(factors) == 1 and factors != {1.0} and len(wrong) > 1:
        yield f"where it fails, every number is {factors.pop():g} times the expected one"
