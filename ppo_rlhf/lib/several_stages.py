"""Several training scripts in a row: one command line, one time stamp, one report at the end."""

import argparse
import contextlib
import dataclasses
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ppo_rlhf import train_policy
from ppo_rlhf.lib import command_line, files, processes, run
from ppo_rlhf.lib.errors import InputError, typed_as
from ppo_rlhf.train_both import messages_of

Args = TypeVar("Args")  # of a script, or of a stage


SHARED = ("preset", "seed", "base_model", "trust_remote_code", "task", "resume")  # arguments that all stages get


@contextlib.contextmanager
def flags_of(part: str, args: Any) -> Iterator[None]:
    """Within the block, messages name a stage's arguments as they are typed: ppo.lr is policy.ppo.lr."""
    own = [name for name in files.flatten(dataclasses.asdict(args)) if name.split(".")[0] not in SHARED]
    with messages_of(part, args), typed_as({name: f"{part}.{name}" for name in own}):
        yield


class Stages:
    """Trains one stage after another. When resumed, it skips the finished stages and continues the others."""

    def __init__(self, script: str, args: Args, *parts: str):
        """script: begins the name of the file that keeps the arguments. args: its own, with those of each part under
        its name.
        """
        self.whole, self.resume, self.accelerator = args, args.resume, processes.make_accelerator()
        shared = {name: getattr(args, name) for name in SHARED} | {"resume": ""}
        self.args = {part: dataclasses.replace(getattr(args, part), **shared) for part in parts}
        names = [stage.exp_name for stage in self.args.values()]
        if len(set(names)) < len(names):
            flags = ", ".join(f"--{part}.exp_name" for part in parts)
            raise InputError(f"{flags} are {', '.join(names)}; give each stage a name of its own")
        self.runs, self.models = Path("runs").absolute(), Path("models").absolute()
        self.timestamp = int(Path(args.resume).name.rpartition("__")[2]) if args.resume else run.shared_timestamp()
        self.file = arguments_file(script, self.runs, args.preset, args.seed, self.timestamp)
        self.joint = {"args": dataclasses.asdict(args), "timestamp": self.timestamp, "runs": str(self.runs)}
        self.folders: dict[str, Path] = {}  # of the stages' runs

    def begin(self) -> None:
        """Write a file by which --resume finds the arguments of all stages again."""
        if self.accelerator.is_main_process and not self.resume:
            self.file.parent.mkdir(exist_ok=True)
            files.write_json(self.file, dataclasses.asdict(self.whole))

    def train(self, part: str, train: Callable[[Args], Path], args: Args) -> Path:
        """Train one stage, resume it, or skip it if it is finished; returns models/<run>/<part>."""
        folder = self.folders[part] = self.runs / run.run_name(args, self.timestamp)
        begun = self.resume and (folder / "meta.json").exists()
        meta = processes.from_main(lambda: run.read_meta(folder) if begun else {})
        if meta.get("finished"):
            return self.models / folder.name / part
        if meta:
            # A stage may have been resumed with its own script, with other arguments for memory or tracking.
            args = dataclasses.replace(train_policy.saved_args(type(args), folder), resume=str(folder))
        elif self.resume and self.accelerator.is_main_process and not (folder / "checkpoints").exists():
            shutil.rmtree(folder, ignore_errors=True)  # interrupted before it had written anything to resume from
        with flags_of(part, args):
            return train(args)

    def report(self, title: str, rows: list[dict[str, Any]], sentences: list[str], **places: str) -> None:
        """Say in plain words what happened, on the main process.

        rows: held-out queries and what was written before and after the training, as run.print_pairs prints them;
        the first four are. places: where to find more, a path or a command.
        """
        run.print_pairs(title, rows[:4])
        print("", *sentences, "", sep="\n")
        for name, place in places.items():
            print(f"{name.replace('_', ' '):17}{place}")
        print(f"{'curves':17}python ppo_rlhf/report")
        for part, folder in self.folders.items():
            print(f"{part:17}{os.path.relpath(self.models / folder.name / part)}")


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
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--resume", default="")
    if not (resume := first.parse_known_args(argv)[0].resume):
        return command_line.parse_args(presets, argv, description)
    folder, cls = Path(resume).resolve(), type(next(iter(presets.values())))
    file = arguments_file(script, folder.parent, *folder.name.split("__")[-3:])
    if not file.is_file():
        raise InputError(f"--resume {resume}: {script} did not start that run; resume it with its own script")
    if folder.parent != Path("runs").resolve():
        raise InputError(f"--resume {resume}: resume in {folder.parents[1]}, where it began")
    saved = train_policy.from_json(cls, file.read_text(), f"{file} of another version: ")
    saved = dataclasses.replace(saved, resume=resume)
    args = command_line.parse(cls, argv, description, default=saved)
    begun, given = (files.flatten(dataclasses.asdict(each)) for each in (saved, args))
    if others := [name for name in begun if given[name] != begun[name]]:
        raise InputError(
            f"--{others[0]}: --resume takes the arguments with which {script} began; to change those of an "
            f"interrupted stage, resume it with its own script"
        )
    return saved


def arguments_file(script: str, runs: Path, *ends: str | int) -> Path:
    """Where a script such as tldr/all.py keeps its arguments. ends: of a run's name, preset, seed and time stamp."""
    return runs / f"{'__'.join([script.removesuffix('.py').replace('/', '_'), *map(str, ends)])}.json"
