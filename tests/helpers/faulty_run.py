"""python faulty_run.py <fault> <number> <script> <arguments>: a script of chapter 1 to which something happens.

At the call of that number (from 0) of a function it dies by kill -9; where the function writes, half of it is written
before. Or it gets a SIGTERM at the call, of two processes only the second. Or its files can't grow beyond so many
bytes, as on a full disk.
"""

import functools
import itertools
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from refusals import main_of

from ppo_rlhf import train_policy, train_reward

fault, number = sys.argv[1], int(sys.argv[2])
save_file = train_policy.save_file


def before_call(where: object, name: str, happen: Callable, counts: Callable = lambda *_: True) -> None:
    """counts: whether a call with these arguments is one."""
    function, calls = getattr(where, name), itertools.count()

    @functools.wraps(function)
    def wrapper(*arguments, **keywords):
        if counts(*arguments) and next(calls) == number:
            happen(*arguments)
        return function(*arguments, **keywords)

    setattr(where, name, wrapper)


def in_each(name: str, happen: Callable, *counts: Callable) -> None:
    """In both scripts, or the Run of both."""
    for script in (train_policy, train_reward):
        where = script if hasattr(script, name) else script.Run
        before_call(where, name, happen, *counts)


def is_checkpoint(*arguments: Any) -> bool:
    return "new.tmp" in map(str, Path(next(x for x in arguments if isinstance(x, Path))).parts)


def die(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_told_to_stop(*_) -> None:
    if os.environ.get("RANK", "1") == "1":
        os.kill(os.getpid(), signal.Signals[fault])


def die_within_a_row(of_run: train_policy.Run, step: int, metrics: dict[str, float]) -> None:
    with (of_run.folder / "metrics.csv").open("a") as file:
        file.write(",".join(map(str, [step, *metrics.values()]))[: 5 * len(metrics)])
    die()


def die_within_a_sample(of_run: train_policy.Run, step: int, samples: list[dict]) -> None:
    with (of_run.folder / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, **samples[0]})[:40])
    die()


def die_within_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(tensors, path)
    os.truncate(path, path.stat().st_size // 2)
    die()


def die_within_json(path: Path, value: Any) -> None:
    text = json.dumps(value)
    path.with_name(path.name + ".tmp").write_text(text[: len(text) // 2])
    die()


FAULTS = {
    "rollout": lambda: in_each("generate", die),
    "optimiser step": lambda: before_call(torch.optim.Adam, "step", die),
    "row of metrics": lambda: in_each("log", die_within_a_row),
    "sample": lambda: in_each("log_samples", die_within_a_sample),
    "tensors of a checkpoint": lambda: in_each("save_file", die_within_tensors, is_checkpoint),
    "checksum of a checkpoint": lambda: in_each("checksum", die),
    "JSON file": lambda: in_each("write_json", die_within_json),
    "name of a checkpoint": lambda: before_call(Path, "rename", die, is_checkpoint),
    "removal of a folder": lambda: before_call(shutil, "rmtree", die),
    "SIGTERM": lambda: in_each("log", be_told_to_stop),
    "SIGINT": lambda: in_each("log", be_told_to_stop),  # Ctrl-C
    "full disk": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (number, number)),
}

FAULTS[fault]()
sys.argv = sys.argv[3:]
code, module = main_of(Path(sys.argv[0]).name)
exec(code, vars(module))
