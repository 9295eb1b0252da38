"""python doomed_run.py <place> <countdown> <script> <arguments>: a script that dies by kill -9 in a certain place.

It dies at the call of that number, from 0, of the place's function. Where the function writes, half of it is written.
"""

import functools
import json
import os
import runpy
import shutil
import signal
import sys
from pathlib import Path

import torch

from ppo_rlhf import train_policy, train_reward
from ppo_rlhf.lib import checkpoints, files, run

countdown = 0


def doom(where: object, name: str, last_words=lambda *arguments: None) -> None:
    function = getattr(where, name)

    @functools.wraps(function)
    def wrapper(*arguments, **keywords):
        global countdown
        if countdown == 0:
            last_words(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)
        countdown -= 1
        return function(*arguments, **keywords)

    setattr(where, name, wrapper)


save_file = checkpoints.save_file


def half_a_row(of_run: run.Run, step: int, metrics: dict[str, float]) -> None:
    with (of_run.folder / "metrics.csv").open("a") as file:
        file.write(",".join(map(str, [step, *metrics.values()]))[: 5 * len(metrics)])


def half_a_sample(of_run: run.Run, step: int, samples: list[dict]) -> None:
    with (of_run.folder / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, **samples[0]})[:40])


def half_the_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(tensors, path)
    os.truncate(path, path.stat().st_size // 2)


def half_the_text(path: Path, text: str) -> None:
    path.with_name(path.name + ".tmp").write_text(text[: len(text) // 2])


PLACES = {
    "rollout": lambda: [doom(script, "generate") for script in (train_policy, train_reward)],
    "optimiser step": lambda: doom(torch.optim.Adam, "step"),
    "row of metrics": lambda: doom(run.Run, "log", half_a_row),
    "sample": lambda: doom(run.Run, "log_samples", half_a_sample),
    "tensors of a checkpoint": lambda: doom(checkpoints, "save_file", half_the_tensors),
    "checksum of a checkpoint": lambda: doom(checkpoints, "sealed"),
    "JSON or log file": lambda: doom(files, "replace_file", half_the_text),
    "name of a checkpoint": lambda: doom(checkpoints, "checkpoint_steps"),
    "removal of a folder": lambda: doom(shutil, "rmtree"),
}

if __name__ == "__main__":
    countdown = int(sys.argv[2])
    PLACES[sys.argv[1]]()
    sys.argv = sys.argv[3:]
    runpy.run_path(sys.argv[0], run_name="__main__")
