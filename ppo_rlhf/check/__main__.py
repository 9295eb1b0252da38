"""Hold anybody's RLHF code against golden numbers, exact enumeration and properties. docs/check.md explains it.

    python -m ppo_rlhf.check adapter.py            # every function of the adapter that has a known name
    python -m ppo_rlhf.check adapter.py --quiet           # only what is wrong
    python -m ppo_rlhf.check adapter.py --case gae:18     # the numbers of one case
    python -m ppo_rlhf.check --list                # functions, and the known faults with their numbers
    python -m ppo_rlhf.check --batch dump.pt       # explains the arrays of a batch of any trainer, and names mistakes
    python -m ppo_rlhf.check --exercise 7          # writes a broken function, and says later whether it is fixed

The adapter's code runs in a process of its own, which is stopped if a call takes longer than two minutes. Exit
status: 0 if everything matches (in a batch: no fault), 1 if something does not, 2 if nothing is wrong but a function
cannot be called, or if the adapter or dump cannot be used, or the adapter ends its process, 3 if there is no fault in
a batch but an array that no formula explains.
"""

import argparse
import inspect
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import torch

import ppo_rlhf
from ppo_rlhf.check import batch, cases, diagnosis, dump, faults, forms
from ppo_rlhf.check.calls import Answer
from ppo_rlhf.check.diagnosis import Report
from ppo_rlhf.train_policy import InputError, run_script

PACKAGE = Path(ppo_rlhf.__file__).parent
LIMIT = 120  # seconds for a call, or for importing the adapter with its libraries
MOST = 3  # diagnoses, failed cases, and so on that are printed of one function
WRAPPER = textwrap.TextWrapper(116, "  ", "    ", break_on_hyphens=False, break_long_words=False)
EXERCISES = [fault for fault in faults.FAULTS if not fault.choice]


# ---- Asking the child ------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    found = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": found, "TORCHDYNAMO_DISABLE": "1"}  # compiling takes longer than a call may


def require(python: str) -> None:
    """Raise an InputError if an interpreter cannot run the child."""
    try:
        command = [python, "-c", "import ppo_rlhf.check.child; print('ready')"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment())
    except OSError as error:
        raise InputError(f"--python {python} cannot be run: {error.strerror}") from error
    if not done.stdout.endswith("ready\n"):
        said = done.stderr.splitlines() or ["it does not run Python code"]
        raise InputError(f"--python {python} lacks what the check needs: {said[-1]}")


def ask(
    adapter: Path, only: str = "", case: str = "", python: str = sys.executable
) -> tuple[dict[str, dict[int, Answer]], list[str]]:
    """What each function of the adapter answers in each case, and the names of those that mean nothing here.

    only: one function; case: one case of each.
    """
    with tempfile.TemporaryDirectory() as folder:
        answers, place = Path(folder) / "answers", Path(folder) / "place"
        place.write_text("importing it")
        command = [
            python,
            "-W",
            "ignore::UserWarning",
            "-m",
            "ppo_rlhf.check.child",
        ]  # torch's would be above the table
        command += [folder, str(LIMIT), str(adapter), case, *([only] if only else cases.NAMES)]
        status = subprocess.run(command, env=environment()).returncode
        if not answers.exists():
            slow = status == -signal.SIGALRM
            reason = f"took longer than {LIMIT} seconds" if slow else f"ended its process with status {status}"
            raise InputError(f"{adapter}: {place.read_text()} {reason}")
        found = pickle.loads(answers.read_bytes())
    if isinstance(found, str):
        raise InputError(f"{adapter} cannot be imported: {found}")
    if not found[0]:
        raise InputError(nothing_to_check(adapter, only, found[1]))
    return found


def nothing_to_check(adapter: Path, only: str, others: list[str]) -> str:
    if only:
        return f"{adapter} has no function {only}"
    found = f", only {', '.join(others[:5])}" if others else ""
    return f"{adapter} has none of the functions that can be checked{found}; --list names them"


# ---- Output ----------------------------------------------------------------------------------------------------


def print_case(adapter: Path, which: str, python: str) -> bool:
    """Print the arguments of a case, what is expected, and what the adapter gave. Returns whether they agree."""
    name, _, number = which.partition(":")
    known = cases.all_cases().get(name, [])
    if not number.isdecimal() or int(number) >= len(known):
        raise InputError(f"--case {which}: name a function and a number of a case, such as gae:18")
    index, case = int(number), known[int(number)]
    answers, _ = ask(adapter, name, str(index), python)
    answer = answers[name][index]
    print(f"{name}:{index}: {case.name} ({case.source}). {' '.join((case.run.__doc__ or '').split())}".rstrip())
    for key, x in case.arguments.items():
        print(f"{key} = {'those of a small model' if isinstance(x, dict) else x}")
    torch.set_printoptions(precision=6, sci_mode=False)
    for key, x in case.expected.items():
        print(f"expected {key} = {x}")
    if not isinstance(answer, dict):
        print(f"yours: {answer}")
        return False
    for key, x in answer.items():
        print(f"your {key} = {x}")
    return diagnosis.judge(name, {index: answer}).ok


def print_table(reports: list[Report], others: list[str], failed_only: bool, *, solve: bool = True) -> None:
    """A row for each function, and below it what is wrong. failed_only: only what does not match."""
    shown = [report for report in reports if not (failed_only and report.ok)]
    width = max([len(report.function) for report in shown], default=0)
    if shown:
        print(f"{'function':{width}}  cases  match  largest error")
    for report in shown:
        error = "-" if not report.cases else f"{report.error:.1e}" if math.isfinite(report.error) else "no number"
        row = f"{report.function:{width}}  {report.cases:5}  {report.matches:5}  {error:>13}"
        print(f"{row}  {'; '.join(remarks(report))}".rstrip())
        lines = [] if report.ok else list(findings(report, solve))
        for line in [*lines, *filter(None, [report.unseen if report.cases else ""])]:
            print(WRAPPER.fill(line))
    if others and not failed_only:
        print(f"Not checked, because the names are not known: {', '.join(others)}")


def remarks(report: Report) -> Iterator[str]:
    if report.refused:
        yield "not called"
    if report.left_out:
        reasons = [f"{reason}: {count}" for reason, count in report.left_out.items()]
        yield f"{sum(report.left_out.values())} left out ({', '.join(reasons)})"
    if report.missing:
        yield f"{report.missing} were not given, so not compared"
    if not report.gradients:
        yield "values only, because the results have no gradient"


def findings(report: Report, solve: bool) -> Iterator[str]:
    """Lines about a function whose numbers do not match, or which has none."""
    if report.refused:
        yield f"No number of it is known, because it cannot be called: {report.refused}."
        return
    if not report.cases:
        yield f"Nothing could be compared. {report.function}{inspect.signature(getattr(forms, report.function))}"
        return
    known = cases.all_cases()[report.function]
    same: dict[str, list[int]] = {}  # cases in which the same is wrong, the smallest first
    for index, wrong in report.failed.items():
        same.setdefault(wrong, []).append(index)
    for wrong, found in list(same.items())[:MOST]:
        name, kind = known[found[0]].name, known[found[0]].source
        what = name if kind in name else f"{name} ({kind})"
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        yield f"{what}{more}: {wrong} (--case {report.function}:{found[0]})"
    if len(same) > MOST:
        yield f"and {sum(len(found) for found in list(same.values())[MOST:])} more cases"
    kinds = {known[index].source for index in report.failed}
    if len(kinds) == 1 and kinds != {"golden"} and len(report.failed) < report.cases:
        yield f"Only cases of one kind fail: {kinds.pop()}."
    if not solve:
        return
    for index, fault in enumerate(report.diagnoses[:MOST]):
        yield f'{"Or they" if index else "These"} are the numbers of "{fault.name}".'
        yield explained(fault)
    if len(report.diagnoses) > MOST:
        yield f"The same numbers have {len(report.diagnoses) - MOST} more."
    if not report.diagnoses and report.error < math.inf:
        yield "No known fault has these numbers. The option --case prints those of a case."


def explained(fault: faults.Fault) -> str:
    kind = "A choice, not a fault: " if fault.choice else ""
    return f"{kind}{fault.says} [{fault.mark}] {fault.page}{f'; see {fault.source}' if fault.source else ''}"


def print_list() -> None:
    for name in cases.NAMES:
        print(f"{name}{inspect.signature(getattr(forms, name))}")
        for fault in faults.of(name):
            number = f"{EXERCISES.index(fault) + 1:5}" if not fault.choice else "     "
            print(f"{number}  {fault.name} [{fault.mark}]{' (a choice)' if fault.choice else ''}")


# ---- Exercises -------------------------------------------------------------------------------------------------


def exercise(number: int) -> int:
    """Write a broken function to a file, or say whether the one in the file is fixed. Returns the exit status."""
    if not 1 <= number <= len(EXERCISES):
        raise InputError(f"--exercise {number}: there are exercises 1 to {len(EXERCISES)}")
    fault, path = EXERCISES[number - 1], Path(f"exercise_{number}.py")
    command = f"python -m ppo_rlhf.check --exercise {number}"
    if not path.exists():
        text = f"# Exercise {number}: {fault.function} is broken. Fix it, then run: {command}\n\n{source_of(fault)}"
        path.write_text(text)
        print(f"{text}\nThis is in {path}. Fix it there, then run the command again.")
        return 0
    answers, _ = ask(path, fault.function)
    report = diagnosis.judge(fault.function, answers[fault.function])
    print_table([report], [], False, solve=False)
    if report.ok:
        print(f"{fault.function} is fixed. What was wrong: {fault.says} [{fault.mark}] {fault.page}")
        if fault.source:
            print(f"Whom it happened to: {fault.source}")
        return 0
    print(f"{fault.function} is not fixed yet. `python -m ppo_rlhf.check {path}` says what is wrong.")
    return 1


def source_of(fault: faults.Fault) -> str:
    """A file that can be imported, with the faulty function in it."""
    used = [name for name in ("whiten", "reward_to_go") if name != fault.function and f"{name}(" in fault.text]
    needed = f"\nfrom ppo_rlhf.check.forms import {', '.join(used)}\n" if used else ""
    maths = "import math\n\n" if "math." in fault.text else ""
    return f"{maths}import torch\nfrom torch import Tensor\n{needed}\n\n{fault.text}"


# ---- The command -----------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ppo_rlhf.check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("adapter", nargs="?", type=Path, help="Python file with the functions to check")
    parser.add_argument("--quiet", action="store_true", help="print only what does not match")
    parser.add_argument("--python", default=sys.executable, help="interpreter that runs the adapter; it needs torch")
    parser.add_argument("--list", action="store_true", help="print the functions and the known faults")
    parser.add_argument(
        "--case", metavar="NAME:N", help="print the arguments and numbers of one case, such as gae:18"
    )
    parser.add_argument("--batch", type=Path, metavar="FILE", help="explain the arrays of a dumped batch")
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="with --batch: the policy, to recompute log-probs"
    )
    parser.add_argument("--reference", type=Path, metavar="FOLDER", help="with --batch: the reference model")
    parser.add_argument("--exercise", type=int, metavar="N", help="write broken function N, or check your correction")
    args = parser.parse_args()
    if args.list:
        print_list()
        return 0
    if args.exercise is not None:
        return exercise(args.exercise)
    if args.batch is not None:
        doctor = batch.examine(dump.read(args.batch), args.model, args.reference)
        for line in batch.lines_of(doctor):
            print(WRAPPER.fill(line).removeprefix("  "))
        return doctor.status
    if args.adapter is None:
        parser.error("name an adapter, or --list or --exercise N")
    if not args.adapter.is_file():
        raise InputError(f"{args.adapter} is no file")
    if args.adapter.suffix != ".py":
        raise InputError(f"{args.adapter} is no .py file")
    if args.python != sys.executable:
        require(args.python)
    if args.case:
        return 0 if print_case(args.adapter, args.case, args.python) else 1
    answers, others = ask(args.adapter, python=args.python)
    reports = [diagnosis.judge(name, found) for name, found in answers.items()]
    if not any(report.cases or report.refused for report in reports):
        raise InputError(f"{args.adapter}: nothing could be compared, because all cases were left out")
    print_table(reports, others, args.quiet)
    if all(report.ok or report.refused for report in reports):
        return 2 if any(report.refused for report in reports) else 0
    return 1


if __name__ == "__main__":
    run_script(lambda: sys.exit(main()))
