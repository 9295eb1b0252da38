"""Diagnosis of a function's numbers: which cases match and, if not all, which known fault has the same numbers."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from ppo_rlhf.check import calls, cases, faults
from ppo_rlhf.check.cases import Case

Answer = dict[str, Tensor] | str
OPTIONS = {"name", "mode", "kind", "style", "score_at"}  # arguments of which a function may refuse some values
REFUSALS = ("raises KeyError", "raises ValueError", "raises AssertionError")
SECONDS = 10.0  # that the search for combined faults may take
UNSEEN = (
    "It got no part of a minibatch, so a mean of each micro-batch would pass unseen. Let it take `tokens`, or "
    "check your loop with `accumulate`."
)
SMALLEST = 0.1  # errors of numbers that are all smaller than this are relative to it


@dataclass
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
    """whether all results had a gradient, where one was to be compared"""
    failed: list[dict] = field(default_factory=list)
    """of the cases that do not match: name, source, and what is wrong there"""
    diagnoses: list[list[faults.Fault]] = field(default_factory=list)
    """faults whose numbers these are; two in a list are combined"""
    nearest: list[tuple[faults.Fault, int]] = field(default_factory=list)
    """if there is no diagnosis: faults that have the numbers of some failed cases, and of how many"""
    hints: list[str] = field(default_factory=list)
    missing: str = ""
    """result that the function doesn't give, such as the returns of gae"""
    unseen: str = ""
    """what could not be checked, and how it can be"""

    @property
    def ok(self) -> bool:
        return self.matches == self.cases > 0


def distance(given: Tensor, expected: Tensor, mask: Tensor | None) -> float:
    """The largest error, relative to the largest expected number. NaN in one of them alone is infinite."""
    expected = expected.double()
    if mask is not None and mask.shape == expected.shape:
        given, expected = given[mask], expected[mask]
    if not expected.numel():
        return 0.0
    both = (given == expected) | (given.isnan() & expected.isnan())
    gap = torch.where(both, 0, (given - expected).abs()).nan_to_num(torch.inf, posinf=torch.inf)
    finite = expected[expected.isfinite()].abs()
    scale = max(finite.max().item() if len(finite) else 0.0, SMALLEST)
    return gap.max().item() / scale


def agree(answer: dict[str, Tensor], other: Answer, case: Case) -> bool:
    """Whether two functions gave the same numbers, as far as both gave some."""
    if isinstance(other, str):
        return False
    names = [name for name in answer if name in other]
    # How far NaN spreads in a result depends on the order of operations.
    names = [name for name in names if not (answer[name].isnan().any() and other[name].isnan().any())]
    enough = 5 * case.tolerance  # float32 in one of them, float64 in the other
    return all(distance(answer[name], other[name], case.mask) <= enough for name in names)


def size(case: Case) -> int:
    """Numbers in the tensors of a case's arguments."""
    return sum(x.numel() for x in case.arguments.values() if isinstance(x, Tensor))


def answer_of(function: Callable, case: Case) -> Answer:
    """The result of a fault in a case; a text if it raises."""
    try:
        return calls.outputs_of(function, case, torch.float64)
    except Exception as error:  # faults may fail in many ways, like the code that they represent
        return str(error) or type(error).__name__


def judge(function: str, answers: dict[int, Answer], left_out: dict[str, int]) -> Report:
    """The report of a function. answers: by the index of a case."""
    all_cases = cases.all_cases()[function]
    answers, refused = without_refused(all_cases, answers)
    report, wrong = Report(function, left_out=left_out | refused), []
    for index, answer in answers.items():
        case = all_cases[index]
        report.cases += 1
        if isinstance(answer, str):
            report.error = torch.inf
            report.failed.append({"index": index, "case": case.name, "source": case.source, "wrong": answer})
            wrong.append(index)
            continue
        errors = {name: distance(x, case.expected[name], case.mask) for name, x in answer.items()}
        report.gradients &= "gradient" not in case.expected or "gradient" in answer
        report.error = max([report.error, *errors.values()])
        if max(errors.values()) <= case.tolerance:
            report.matches += 1
        else:
            wrong.append(index)
            name = max(errors, key=errors.__getitem__)
            words = difference(answer[name], case.expected[name].double(), case.mask)
            entry = {"index": index, "case": case.name, "source": case.source, "wrong": f"{name}{words}"}
            report.failed.append(entry)
        report.missing = next((name for name in case.expected if name not in {*answer, "gradient"}), report.missing)
    report.failed.sort(key=lambda entry: size(all_cases[entry["index"]]))
    if function in cases.PARTS and not any(all_cases[index].source == "parts add up" for index in answers):
        report.unseen = UNSEEN
    if wrong:
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


def difference(given: Tensor, expected: Tensor, mask: Tensor | None, most: int = 3) -> str:
    """The first entries that differ: ` [0, 2] is 1.5, not 1.25; ...`."""
    apart = ~torch.isclose(given, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    if mask is not None and mask.shape == apart.shape:
        apart &= mask
    if not apart.ndim:
        return f" is {given.item():.6g}, not {expected.item():.6g}"
    entries = [
        f"{place} is {given[tuple(place)]:.6g}, not {expected[tuple(place)]:.6g}"
        for place in apart.nonzero().tolist()
    ]
    more = f"; {len(entries) - most} more" if len(entries) > most else ""
    return f" {'; '.join(entries[:most])}{more}"


def diagnose(report: Report, answers: dict[int, tuple[Case, Answer]], wrong: list[int]) -> None:
    """Look for one fault, then two, then three that explain every answer; else for faults that explain some."""
    report.hints = list(hints(answers, wrong))
    answers = {index: pair for index, pair in answers.items() if not isinstance(pair[1], str)}
    wrong = [index for index in wrong if index in answers]  # what raises an error speaks for itself
    if not wrong:
        return
    known = faults.of(report.function)
    order = [*wrong, *(index for index in answers if index not in wrong)]  # those that exclude most come first

    def explains(function: Callable) -> bool:
        return all(agree(answers[i][1], answer_of(function, answers[i][0]), answers[i][0]) for i in order)

    end = time.monotonic() + SECONDS
    for number in (1, 2, 3):
        for some in combinations(known, number):
            function = faults.together(some)
            if function is not None and explains(function):
                report.diagnoses.append(list(some))
            if time.monotonic() > end:
                break
        if report.diagnoses:
            break
    if not report.diagnoses:
        for fault in known:
            count = sum(agrees_where_wrong(fault, *answers[index]) for index in wrong)
            if count:
                report.nearest.append((fault, count))
        report.nearest = sorted(report.nearest, key=lambda pair: -pair[1])[:3]


def agrees_where_wrong(fault: faults.Fault, case: Case, answer: Answer) -> bool:
    """Whether a fault has the same numbers. NaN in both says too little."""
    return not any(x.isnan().any() for x in answer.values()) and agree(answer, answer_of(fault, case), case)


def hints(answers: dict[int, tuple[Case, Answer]], wrong: list[int]) -> Iterator[str]:
    """The properties that the failed cases have in common."""
    sources = [answers[index][0].source for index in wrong]
    of_all = [case.source for case, _ in answers.values()]
    for source in dict.fromkeys(sources):
        if set(sources) == {source} != {"golden"} and len(sources) < len(of_all):
            yield f"only cases of one kind fail: {source}"
    factors = set()
    for index in wrong:
        case, answer = answers[index]
        if isinstance(answer, str):
            return
        for name, x in answer.items():
            expected = case.expected[name].double()
            if case.mask is not None and case.mask.shape == expected.shape:
                x, expected = x[case.mask], expected[case.mask]
            if not expected.numel():
                continue
            kept = expected.abs() > 0.1 * expected.abs().max()  # where rounding is small
            if not kept.any():
                continue
            ratio = (x[kept] / expected[kept]).nan_to_num(torch.inf)
            if ratio.isinf().any() or (ratio - ratio.flatten()[0]).abs().max() > 5e-3 * ratio.abs().max():
                return
            factors.add(round(ratio.median().item(), 2))
    if len(factors) == 1 and factors != {1.0} and len(wrong) > 1:
        yield f"where it fails, every number is {factors.pop():g} times the expected one"
