"""Several training scripts in a row: one command line, one time stamp, one report at the end."""

import contextlib
import dataclasses
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ppo_rlhf.lib import command_line, files, processes, run
from ppo_rlhf.lib.errors import InputError, typed_as

Args = TypeVar("Args")  # of a script, or of a stage


SHARED = ("preset", "seed", "base_model", "trust_remote_code", "task", "resume")  # arguments that all stages get


def flags_of(part: str, args: command_line.RunArgs) -> contextlib.AbstractContextManager[None]:
    """Within the block, messages name a stage's arguments as they are typed: ppo.lr is policy.ppo.lr."""
    own = [name for name in files.flatten(dataclasses.asdict(args)) if name.split(".")[0] not in SHARED]
    return typed_as({name: f"{part}.{name}" for name in own})


class Stages:
    """Trains one stage after another. When resumed, it skips the finished stages and continues the others."""

    def __init__(self, args: Args, *parts: str):
        """args: of the script that runs the stages, with those of each part under its name."""
        self.resume, self.accelerator = args.resume, processes.make_accelerator()
        shared = {name: getattr(args, name) for name in SHARED} | {"resume": ""}
        self.args = {part: dataclasses.replace(getattr(args, part), **shared) for part in parts}
        names = [stage.exp_name for stage in self.args.values()]
        if len(set(names)) < len(names):
            flags = ", ".join(f"--{part}.exp_name" for part in parts)
            raise InputError(f"{flags} are {', '.join(names)}; give each stage a name of its own")
        self.runs, self.timestamp = Path("runs").absolute(), run.shared_timestamp()
        if args.resume:
            self.runs = Path(args.resume).absolute().parent
            self.timestamp = run.read_meta(Path(args.resume))["joint"]["timestamp"]
        self.models = self.runs.with_name("models")
        self.joint = {"args": dataclasses.asdict(args), "timestamp": self.timestamp, "runs": str(self.runs)}
        self.folders: dict[str, Path] = {}  # of the stages' runs

    def train(self, part: str, train: Callable[[Args, dict], Path], args: Args) -> Path:
        """Train one stage, resume it, or skip it if it is finished; returns models/<run>/<part>."""
        folder = self.folders[part] = self.runs / run.run_name(args, self.timestamp)
        begun = self.resume and (folder / "meta.json").exists()
        meta = processes.from_main(lambda: run.read_meta(folder) if begun else {})
        if meta.get("finished"):
            return self.models / folder.name / part
        if meta:
            # A stage may have been resumed with its own script, with other arguments for memory or tracking.
            own = command_line.saved_args(type(args), folder, meta["args"], meta.get("commit"))
            args = dataclasses.replace(own, resume=str(folder))
        elif self.resume and self.accelerator.is_main_process and not (folder / "checkpoints").exists():
            shutil.rmtree(folder, ignore_errors=True)  # interrupted before it had written anything to resume from
        with flags_of(part, args):
            return train(args, self.joint)

    def report(self, title: str, rows: list[dict[str, Any]], sentences: list[str], **places: str) -> None:
        """Say in plain words what happened, on the main process.

        rows: held-out queries and what was written before and after the training, as run.print_pairs prints them;
        the first four are. places: where to find more, a path or a command.
        """
        run.print_pairs(title, rows[:4])
        print("", *sentences, "", sep="\n")
        for name, place in places.items():
            print(f"{name.replace('_', ' '):17}{place}")
        for part, folder in self.folders.items():
            print(f"{part:17}{os.path.relpath(folder / 'learning_curves.png')}")
            print(f"{'':17}{os.path.relpath(self.models / folder.name / part)}")


def parse(presets: dict[str, Args], argv: list[str], *, script: str, policy_script: str, description: str) -> Args:
    """Read the command line of a script that runs several stages, which share some arguments.

    With --resume runs/<run>, one of the stages, the arguments are those with which the stages were started.
    policy_script: the one that takes a reward model from elsewhere.
    """
    for flag in argv:  # in the patterns, a dot also matches the hyphen that may replace an underscore
        shared = "|".join(SHARED).replace("_", ".")
        if match := re.match(rf"--(?:sft|reward|policy)\.((?:no.)?(?:{shared})\b[^=]*)", flag):
            raise InputError(f"{match[0]}: all stages share it; give --{match[1]}")
        if re.match(r"--policy\.rewards\.(trained.model|function)", flag):
            raise InputError(f"{flag.split('=')[0]}: the reward model is trained here; use {policy_script}")
    if not (resume := command_line.flag_value(argv, "--resume")):
        return command_line.parse_args(presets, argv, description)
    meta = run.read_meta(Path(resume))
    if not (joint := meta.get("joint")):
        raise InputError(f"--resume {resume}: {script} did not start that run; resume it with its own script")
    cls = type(next(iter(presets.values())))
    saved = command_line.saved_args(cls, Path(resume), joint["args"], meta.get("commit"))
    saved = dataclasses.replace(saved, resume=resume)
    args = command_line.parse(cls, argv, description, default=saved)
    begun, given = (files.flatten(dataclasses.asdict(each)) for each in (saved, args))
    if others := [name for name in begun if given[name] != begun[name]]:
        raise InputError(
            f"--{others[0]}: --resume takes the arguments with which {script} began; to change those of an "
            f"interrupted stage, resume it with its own script"
        )
    return saved
