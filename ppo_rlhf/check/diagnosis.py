"""Diagnosis of a function's numbers: which cases match and, if not all, which known fault has the same numbers."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ppo_rlhf.check import calls, cases, faults
from ppo_rlhf.check.calls import Answer
from ppo_rlhf.check.cases import Case

OPTIONS = {"name", "mode", "kind", "style", "score_at"}  # arguments of which a function may refuse some values
REFUSALS = ("raises KeyError", "raises ValueError", "raises AssertionError")
MOST = 3  # entries that differ
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
    failed: dict[int, str] = field(default_factory=dict)
    """what is wrong in the cases that do not match, by their index, the smallest first"""
    diagnoses: list[faults.Fault] = field(default_factory=list)
    """faults whose numbers these are"""
    missing: str = ""
    """result that the function doesn't give, such as the returns of gae"""
    refused: str = ""
    """why the function cannot be called"""
    unseen: str = ""
    """what could not be checked, and how it can be"""

    @property
    def ok(self) -> bool:
        return self.matches == self.cases > 0


def counted(x: Tensor, mask: Tensor | None) -> Tensor:
    """The entries that are compared."""
    return x if mask is None or mask.shape != x.shape else x[mask]


def distance(actual: Tensor, expected: Tensor, mask: Tensor | None) -> float:
    """The largest error, relative to the largest expected number. NaN in one of them alone is infinite."""
    actual, expected = counted(actual, mask), counted(expected.double(), mask)
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
    for name in answer.keys() & other.keys():
        gap = distance(answer[name], other[name], case.mask)
        # How far NaN spreads in a result depends on the order of operations.
        if gap == math.inf and all(counted(x[name], case.mask).isnan().any() for x in (answer, other)):
            continue
        if gap > 5 * cases.TOLERANCE:  # float32 in one of them, float64 in the other
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


def judge(function: str, answers: dict[int, Answer]) -> Report:
    """The report of a function. answers: by the index of a case."""
    all_cases = cases.all_cases()[function]
    for answer in answers.values():
        if isinstance(answer, calls.Refused):  # in all cases, because they have one signature
            return Report(function=function, refused=str(answer))
    report, failed = Report(function=function), {}
    reasons = [str(answer) for answer in answers.values() if isinstance(answer, calls.LeftOut)]
    answers = {index: answer for index, answer in answers.items() if not isinstance(answer, calls.LeftOut)}
    refused = refusals(all_cases, answers)
    reasons += refused.values()
    answers = {index: answer for index, answer in answers.items() if index not in refused}
    report.left_out = {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}
    for index, answer in answers.items():
        case = all_cases[index]
        report.cases += 1
        error, words = torch.inf, answer
        if not isinstance(answer, str):
            errors = {name: distance(x, case.expected[name], case.mask) for name, x in answer.items()}
            name = max(errors, key=errors.__getitem__)
            error = errors[name]
            words = f"{name}{difference(answer[name], case.expected[name].double(), case.mask)}"
            slope = case.expected.get("gradient")
            report.gradients &= slope is None or "gradient" in answer or not slope.any()
            report.missing = next((n for n in case.expected if n not in {*answer, "gradient"}), report.missing)
        report.error = max(report.error, error)
        if error <= cases.TOLERANCE:
            report.matches += 1
        else:
            failed[index] = words
    report.failed = {index: failed[index] for index in sorted(failed, key=lambda index: size(all_cases[index]))}
    if function in cases.PARTS and not any(all_cases[index].source == "parts add up" for index in answers):
        report.unseen = UNSEEN
    # What raises an error speaks for itself. Those that exclude most faults come first.
    order = [index for index in [*report.failed, *answers] if not isinstance(answers[index], str)]
    if order and order[0] in failed:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of faults that divide by 0 or worse
            for fault in faults.of(function):
                if all(agree(answers[i], answer_of(fault, all_cases[i]), all_cases[i]) for i in order):
                    report.diagnoses.append(fault)
    return report


def refusals(all_cases: list[Case], answers: dict[int, Answer]) -> dict[int, str]:
    """The cases with an option that the function refuses, and the words for it.

    An option is refused if the function raises an error that names it wherever it is asked for: KeyError: 'k3+'.
    """
    asked: dict[tuple[str, str], list[int]] = {}
    for index in answers:
        for key in OPTIONS & all_cases[index].arguments.keys():
            asked.setdefault((key, all_cases[index].arguments[key]), []).append(index)
    refused = {}
    for (key, option), found in asked.items():
        texts = [answers[index] for index in found]
        if all(isinstance(text, str) and text.startswith(REFUSALS) and option in text for text in texts):
            for index in found:
                refused[index] = f"{key} {option} is refused"
    return refused


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
