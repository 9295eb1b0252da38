"""`python -m ppo_rlhf.check` for tests: as a function, and as a command."""

from collections.abc import Callable
from pathlib import Path

from processes import Result, launch
from runs import ROOT

from ppo_rlhf.check import cases, child, diagnosis
from ppo_rlhf.check.diagnosis import Report


def report_of(name: str, function: Callable) -> Report:
    """What the command says of a function, without a process of its own."""
    answers = {index: child.answer(function, case) for index, case in enumerate(cases.all_cases()[name])}
    return diagnosis.judge(name, answers)


def run(*arguments: str | Path, folder: Path) -> Result:
    """Run the command. Both it and the process of the adapter have imported PyTorch already."""
    return launch(ROOT / "ppo_rlhf/check/__main__.py", *map(str, arguments), folder=folder)
