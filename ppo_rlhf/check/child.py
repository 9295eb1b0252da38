"""The process that runs somebody else's code: it calls the functions of an adapter and leaves what they return.

    python -m ppo_rlhf.check.child folder seconds adapter.py case function [function ...]

The folder gets a file `answers`. Until then, its file `place` says which case is being tried; one that takes longer
than some seconds ends the process. If a case is named, it is the only one. The adapter's own output goes to stderr.
"""

import importlib.util
import inspect
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

import ppo_rlhf
from ppo_rlhf.check import calls, cases
from ppo_rlhf.check.calls import Answer

NOT_THEIRS = ("<frozen", *(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, ppo_rlhf.__file__)))


def load(path: Path) -> ModuleType:
    """The adapter as a module; modules next to it can be imported."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location("adapter", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["adapter"] = module
    spec.loader.exec_module(module)
    return module


def others(module: ModuleType) -> list[str]:
    """Functions that were written in the adapter under names that mean nothing here."""
    found = {name for name, x in vars(module).items() if inspect.isfunction(x) and x.__module__ == "adapter"}
    return sorted(name for name in found - set(cases.NAMES) if not name.startswith("_"))


def answer(function: Callable, case: cases.Case) -> Answer:
    try:
        return calls.outputs_of(function, case)
    except (calls.LeftOut, calls.Refused) as reason:
        return reason
    except calls.Wrong as reason:
        return str(reason)
    except BaseException as error:  # an adapter may also call sys.exit()
        return f"raises {one_line(error)}"


def one_line(error: BaseException) -> str:
    """The error, and the innermost line of the adapter's code or of what it calls, torch aside."""
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(NOT_THEIRS)]
    place = f" ({Path(theirs[-1].filename).name}, line {theirs[-1].lineno})" if theirs else ""
    return f"{type(error).__name__}{f': {text[:160]}' if text else ''}{place}"


def main() -> None:
    folder, limit, path, only, *names = sys.argv[1:]
    answers_file, place, seconds = Path(folder) / "answers", Path(folder) / "place", int(limit)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    known = cases.all_cases()  # before code runs that may change how tensors are made
    path = Path(path).resolve()
    sys.argv = [str(path)]  # which the adapter may parse
    signal.alarm(seconds)
    try:
        module = load(path)
    except BaseException as error:
        answers_file.write_bytes(pickle.dumps(one_line(error)))
        return
    answers: dict[str, dict[int, Answer]] = {}
    for name in [name for name in names if callable(vars(module).get(name))]:
        answers[name] = {}
        for index, case in enumerate(known[name]):
            if only in ("", str(index)):
                place.write_text(f"{name}:{index}")
                signal.alarm(seconds)
                answers[name][index] = answer(vars(module)[name], case)
    answers_file.write_bytes(pickle.dumps((answers, others(module))))


if __name__ == "__main__":
    main()
