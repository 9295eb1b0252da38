"""The process that runs somebody else's code: it calls the functions of an adapter and writes what they return.

    python -m ppo_rlhf.check.child adapter.py [function ...]

A line of JSON goes out for each case, before it is called and after. The adapter's own output goes to stderr.
`gae:18` is a function of which only case 18 is called.
"""

import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import ppo_rlhf
from ppo_rlhf.check import calls, cases

NOT_THEIRS = ("<frozen", *(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, ppo_rlhf.__file__)))


def load(path: Path) -> ModuleType:
    """The adapter as a module; modules next to it can be imported."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location("adapter", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["adapter"] = module
    spec.loader.exec_module(module)
    return module


def provided(module: ModuleType) -> dict[str, Callable]:
    return {name: vars(module)[name] for name in cases.NAMES if callable(vars(module).get(name))}


def others(module: ModuleType) -> list[str]:
    """Functions that were written in the adapter under names that mean nothing here."""
    found = {name for name, x in vars(module).items() if inspect.isfunction(x) and x.__module__ == "adapter"}
    return sorted(name for name in found - set(cases.NAMES) if not name.startswith("_"))


def answer(function: Callable, case: cases.Case) -> dict[str, Any]:
    """The message about a case: its outputs, why it was left out, or what is wrong."""
    try:
        outputs = calls.outputs_of(function, case)
        return {"outputs": {name: [list(x.shape), x.flatten().tolist()] for name, x in outputs.items()}}
    except calls.LeftOut as reason:
        return {"left_out": str(reason)}
    except calls.Wrong as reason:
        return {"wrong": str(reason)}
    except BaseException as error:  # an adapter may also call sys.exit()
        return {"wrong": f"raises {one_line(error)}"}


def one_line(error: BaseException) -> str:
    """The error, and the innermost line of the adapter's code or of what it calls, torch aside."""
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(NOT_THEIRS)]
    place = f" ({Path(theirs[-1].filename).name}, line {theirs[-1].lineno})" if theirs else ""
    return f"{type(error).__name__}{f': {text[:160]}' if text else ''}{place}"


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)

    def say(**message: Any) -> None:
        print(json.dumps(message), file=out, flush=True)

    path, names = Path(sys.argv[1]).resolve(), sys.argv[2:]
    known = cases.all_cases()  # before code runs that may change how tensors are made
    sys.argv = [str(path)]  # which the adapter may parse
    try:
        module = load(path)
    except BaseException as error:
        say(failed=f"cannot be imported: {one_line(error)}")
        return
    functions = provided(module)
    say(provided=list(functions), others=others(module))
    for which in names or functions:
        name, _, only = which.partition(":")
        for index, case in enumerate(known[name]):
            if only in ("", str(index)):
                say(function=name, case=index)
                say(**answer(functions[name], case))
    say(done=True)


if __name__ == "__main__":
    main()
