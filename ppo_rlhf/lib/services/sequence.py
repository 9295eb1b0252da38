"""Several training scripts in a row: one command line and one time stamp; the interrupted stage is resumed."""

import contextlib
import dataclasses
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from accelerate.utils import broadcast_object_list

from ppo_rlhf.lib.base import files, processes
from ppo_rlhf.lib.base.errors import InputError, typed_as
from ppo_rlhf.lib.services import cli, run

Args = TypeVar("Args")  # of a script, or of a stage


def flags_of(part: str, args: cli.RunArgs, shared: Collection[str]) -> contextlib.AbstractContextManager[None]:
    """Within the block, messages name a stage's arguments as they are typed: ppo.lr is policy.ppo.lr.

    shared: arguments that all stages get and that keep their names.
    """
    own = [name for name in files.flatten(dataclasses.asdict(args)) if name.split(".")[0] not in (*shared, "resume")]
    return typed_as({name: f"{part}.{name}" for name in own})


def is_finished(folder: Path, args: cli.RunArgs) -> bool:
    """Whether a run has reached its end, and these arguments do not move that end."""
    meta = run.read_meta(folder)
    ppo = getattr(args, "ppo", None)  # other stages have none; their length does not change
    return meta.get("finished", False) and (not ppo or ppo.total_episodes == meta["args"]["ppo"]["total_episodes"])


class Stages:
    """Trains one stage after another under one time stamp; resumes the stage that was interrupted."""

    def __init__(self, args: Args, shared: Collection[str]):
        """args: of the script that runs the stages; args.resume is the folder of one of their runs, or empty.

        root: the folder that holds runs/ and models/.
        """
        self.resume, self.shared, self.accelerator = args.resume, shared, processes.make_accelerator()
        self.runs, self.timestamp = Path("runs").absolute(), run.shared_timestamp()
        if args.resume:
            folder, meta = Path(args.resume).absolute(), run.read_meta(Path(args.resume))
            self.runs, self.timestamp = folder.parent, meta["joint"]["timestamp"]
        self.root = self.runs.parent
        self.joint = {"args": dataclasses.asdict(args), "timestamp": self.timestamp, "runs": str(self.runs)}

    def run_folder(self, args: cli.RunArgs) -> Path:
        """The folder of a stage's run, given the stage's arguments."""
        return self.runs / run.run_name(args, self.timestamp)

    def train(self, train: Callable[[Args, dict], Path], args: Args, part: str, kind: str) -> Path:
        """Train one stage, resume it, or skip it if it is finished; returns models/<run>/<kind>."""
        folder = self.run_folder(args)
        model = self.root / "models" / folder.name / kind
        begun = bool(self.resume) and (folder / "meta.json").exists()
        begun, finished = broadcast_object_list([(begun, begun and is_finished(folder, args))])[0]
        if finished:
            return model
        if self.resume and not begun and self.accelerator.is_main_process:
            if list(folder.glob("checkpoints/*")):
                raise InputError(f"{folder} has checkpoints but no meta.json; it cannot be resumed")
            if model.exists():
                raise InputError(f"{model} is there, but its run {folder} is not; bring that back")
            shutil.rmtree(folder, ignore_errors=True)  # interrupted before it had written anything to resume from
        with flags_of(part, args, self.shared):
            return train(dataclasses.replace(args, resume=str(folder) if begun else ""), self.joint)


def parse(presets: dict[str, Args], argv: list[str], *, script: str, policy_script: str, description: str) -> Args:
    """Read the command line of a script that runs several stages, which share some arguments.

    With --resume runs/<run>, one of the stages, the defaults are the arguments of that run. policy_script: the one
    that takes a reward model from elsewhere.
    """
    for flag in argv:  # in the patterns, a dot also matches the hyphen that may replace an underscore
        shared = "preset|seed|base.model|(?:no.)?trust.remote.code|resume|task"
        if match := re.match(rf"--(?:sft|reward|policy)\.((?:{shared})\b[^=]*)", flag):
            raise InputError(f"{match[0]}: all stages share it; give --{match[1]}")
        if re.match(r"--policy\.rewards\.(trained.model|function)", flag):
            raise InputError(f"{flag.split('=')[0]}: the reward model is trained here; use {policy_script}")
    if not (resume := cli.flag_value(argv, "--resume")):
        return cli.parse_args(presets, argv, description)
    folder, cls = Path(resume), type(next(iter(presets.values())))
    meta = run.read_meta(folder)
    joint = meta.get("joint")
    if not joint:
        raise InputError(f"--resume {folder}: {script} did not start that run; resume it with its own script")
    saved = cli.saved_args(cls, folder, joint["args"], meta.get("commit"))
    saved = dataclasses.replace(newest_args(saved, folder, joint["timestamp"]), resume=str(folder))
    args = cli.parse(cls, argv, description, default=saved)
    cli.check_same_arguments(saved, args)
    return args


def newest_args(saved: Args, folder: Path, timestamp: int) -> Args:
    """The arguments of several stages in a row as the last stage that has begun was given them.

    saved: as one of the stages was given them, whose run is in this folder. A stage keeps those with which it ended,
    so one before the last may not know of a change.
    """
    for part in ("policy", "reward", "sft"):  # the last comes first
        if stage := getattr(saved, part, None):
            stage = dataclasses.replace(stage, preset=saved.preset, seed=saved.seed)
            newest = folder.absolute().parent / run.run_name(stage, timestamp)
            if (newest / "meta.json").exists():
                meta = run.read_meta(newest)
                joint, begun = meta.get("joint") or {}, meta.get("commit")
                own = cli.saved_args(type(stage), newest, meta["args"], begun)
                saved = cli.saved_args(type(saved), newest, joint.get("args", {}), begun)
                # A stage may have been resumed with its own script, too.
                return dataclasses.replace(saved, **{part: with_changes(getattr(saved, part), own)})
    return saved


def with_changes(args: Args, newer: Args, prefix: str = "") -> Args:
    """Arguments, or a group of them, in which those that may change have newer values."""
    values = {}
    for field in dataclasses.fields(args):
        old, new = getattr(args, field.name), getattr(newer, field.name)
        if dataclasses.is_dataclass(old):
            values[field.name] = with_changes(old, new, f"{prefix}{field.name}.")
        elif prefix + field.name in cli.MAY_CHANGE - {"resume"}:
            values[field.name] = new
    return dataclasses.replace(args, **values)
