"""python faulty_run.py <fault> <number> <script> <arguments>: a script to which something happens.

At the call of that number (from 0) of a function it dies by kill -9; where the function writes, half of it is written
before. Or it gets a SIGTERM at the call, of two processes only the second. Or its files can't grow beyond so many
bytes, as on a full disk.
"""

import functools
import itertools
import json
import os
import resource
import runpy
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from ppo_rlhf import train_policy, train_reward
from ppo_rlhf.lib import checkpoints, files, run

fault, number = sys.argv[1], int(sys.argv[2])
save_file = checkpoints.save_file


def before_call(where: object, name: str, happen: Callable) -> None:
    function, calls = getattr(where, name), itertools.count()

    @functools.wraps(function)
    def wrapper(*arguments, **keywords):
        if next(calls) == number:
            happen(*arguments)
        return function(*arguments, **keywords)

    setattr(where, name, wrapper)


def die(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_told_to_stop(*_) -> None:
    if os.environ.get("RANK", "1") == "1":
        os.kill(os.getpid(), signal.SIGTERM)


def die_within_a_row(of_run: run.Run, step: int, metrics: dict[str, float]) -> None:
    with (of_run.folder / "metrics.csv").open("a") as file:
        file.write(",".join(map(str, [step, *metrics.values()]))[: 5 * len(metrics)])
    die()


def die_within_a_sample(of_run: run.Run, step: int, samples: list[dict]) -> None:
    with (of_run.folder / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, **samples[0]})[:40])
    die()


def die_within_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(tensors, path)
    os.truncate(path, path.stat().st_size // 2)
    die()


def die_within_a_text(path: Path, text: str) -> None:
    path.with_name(path.name + ".tmp").write_text(text[: len(text) // 2])
    die()


FAULTS = {
    "rollout": lambda: [before_call(script, "generate", die) for script in (train_policy, train_reward)],
    "optimiser step": lambda: before_call(torch.optim.Adam, "step", die),
    "row of metrics": lambda: before_call(run.Run, "log", die_within_a_row),
    "sample": lambda: before_call(run.Run, "log_samples", die_within_a_sample),
    "tensors of a checkpoint": lambda: before_call(checkpoints, "save_file", die_within_tensors),
    "checksum of a checkpoint": lambda: before_call(checkpoints, "sealed", die),
    "JSON or log file": lambda: before_call(files, "replace_file", die_within_a_text),
    "name of a checkpoint": lambda: before_call(checkpoints, "checkpoint_steps", die),
    "removal of a folder": lambda: before_call(shutil, "rmtree", die),
    "SIGTERM": lambda: before_call(run.Run, "log", be_told_to_stop),
    "full disk": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (number, number)),
}

FAULTS[fault]()
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
