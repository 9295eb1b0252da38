"""The command line: arguments that all training scripts have, presets, --resume with the same arguments, and bounds.

A field of a script's arguments has its bounds in its type, as in lib/bounds.py. `check_bounds` refuses the rest.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import typing
from pathlib import Path
from typing import Any, Literal, TypeVar

import tyro
from annotated_types import Ge, Gt, Le, Lt

from ppo_rlhf.lib import errors, files, run
from ppo_rlhf.lib.bounds import NonNegativeInt, PositiveFloat, PositiveInt
from ppo_rlhf.lib.errors import InputError, flag
from ppo_rlhf.lib.processes import WITHOUT_FLOAT64, default_device

# ---- Presets and --resume --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunArgs:
    """The arguments that every training script has; a script adds its own, and other defaults."""

    preset: str = ""
    """names a set of defaults"""
    exp_name: str = ""
    """name of this experiment"""
    seed: NonNegativeInt = 1
    """seed of all random numbers"""
    base_model: str = ""
    """causal language model to start from: a folder, or a name on the hub"""
    trust_remote_code: bool = False
    """run Python code that comes with the base model"""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """arithmetic; bfloat16 keeps float32 weights and casts in matrix products"""
    gradient_checkpointing: bool = False
    """keep only the inputs of each layer of a trained network and compute the rest again in the backward pass; saves
    memory, costs a forward pass"""
    resume: str = ""
    """folder of a run to resume: runs/<run>; its arguments are taken from there"""
    save_interval: NonNegativeInt = 50
    """updates (of a reward model: steps) between checkpoints; 0: one at the end"""
    track: bool = False
    """log to the tracker as well"""
    tracker: Literal["wandb", "trackio"] = "wandb"
    """Weights & Biases; or Trackio, which needs no account and keeps everything on this machine"""
    wandb_project_name: str = "ppo_rlhf"
    """project on the tracker"""
    wandb_entity: str | None = None
    """team on Weights & Biases"""
    upload_model: bool = False
    """push the trained model to the Hugging Face hub"""
    hf_entity: str = ""
    """user or organisation on the hub; empty: whoever is logged in"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyRunArgs(RunArgs):
    """What the script of a policy adds to them, apart from the algorithm."""

    frozen_bfloat16: bool = False
    """reference and reward model in bfloat16: half their memory, and KL and scores that are rounded"""
    log_interval: NonNegativeInt = 10
    """updates between printed samples; 0: none"""
    trace_interval: NonNegativeInt = 0
    """updates between episodes that are kept with all their numbers, which report/ shows; 0: none"""
    trace_episodes: PositiveInt = 8
    """episodes of the batch that such a trace keeps, at most those of one process; in chapter 3 whole groups"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryArgs:
    """Memory knobs. They change how rows are divided, and numbers only by rounding.

    The defaults are for models of half a billion parameters with 150,000 tokens.
    """

    local_micro_batch_size: PositiveInt = 8
    """rows, such as episodes or labels, per forward and backward pass on one process, at most; a memory knob"""
    local_rollout_batch_size: PositiveInt = 64
    """rows per pass without gradients on one process, at most; a memory knob"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveKLArgs:
    """Of a controller of the KL coefficient."""

    target: PositiveFloat | None = None
    """KL divergence from the reference to hold, in nats per response; None keeps `kl_coef` fixed"""
    horizon: PositiveInt = 10_000
    """how slowly the coefficient follows, in episodes"""


Args = TypeVar("Args")

# Arguments that a resumed run may change: length, memory, tracking, output. Other changes would make another run.
MAY_CHANGE = {"ppo.total_episodes", "resume", "upload_model", "hf_entity", "track", "tracker"}
MAY_CHANGE |= {"wandb_project_name", "wandb_entity", "gradient_checkpointing", "ppo.share_prefixes"}
MAY_CHANGE |= {"log_interval", "save_interval", "trace_interval", "trace_episodes", "workers", "ray_address"}
MAY_CHANGE |= {group + knob.name for knob in dataclasses.fields(MemoryArgs) for group in ("", "ppo.")}


def parse_args(presets: dict[str, Args], argv: list[str] | None = None, description: str | None = None) -> Args:
    """Read the command line: --preset chooses the defaults, every other flag overrides one.

    With --resume runs/<run>, the defaults are the arguments that the run was started with.
    """
    argv = sys.argv[1:] if argv is None else argv
    resume, preset = flag_value(argv, "--resume"), flag_value(argv, "--preset")
    if resume:
        meta = run.read_meta(Path(resume))
        saved = saved_args(type(next(iter(presets.values()))), Path(resume), meta["args"], meta.get("commit"))
        args = parse(type(saved), argv, description, default=dataclasses.replace(saved, resume=resume))
        check_same_arguments(saved, args)
        return args
    if preset is not None and preset not in presets:
        raise InputError(f"--preset {preset}: unknown; there are {', '.join(presets)}")
    default = presets[preset] if preset else next(iter(presets.values()))
    return parse(type(default), argv, description, default=default)


COMMAND = re.compile(r"^ +(?:python|torchrun|accelerate launch) .*\n?", re.MULTILINE)


def parse(cls: type[Args], argv: list[str] | None = None, description: str | None = None, **options: Any) -> Args:
    """Read the command line with tyro.

    --help ends with the commands of the description, because tyro would break a long one into several lines, which
    cannot be copied.
    """
    try:
        try:
            args = tyro.cli(cls, args=argv, description=COMMAND.sub("", description or ""), **options)
        except SystemExit as end:
            if end.code == 0 and (commands := COMMAND.findall(description or "")):
                print("".join(commands).rstrip())
            sys.stdout.flush()
            raise
    except BrokenPipeError:  # the reader of --help, such as head, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)
    check_bounds(args)
    return args


def flag_value(argv: list[str], name: str) -> str | None:
    """The value of `--name value` or `--name=value`, the last one if there are several."""
    value = None
    for i, word in enumerate(argv):
        if word == name and i + 1 < len(argv):
            value = argv[i + 1]
        elif word.startswith(name + "="):
            value = word.split("=", 1)[1]
    return value


def saved_args(cls: type[Args], folder: Path, values: dict[str, Any], begun: str | None) -> Args:
    """The arguments that meta.json in a run's folder holds. begun: the commit there."""
    wrong = f"--resume {folder}: meta.json, written at commit {begun or 'unknown'}, is not of this version's runs"
    with errors.input_errors(wrong, InputError):
        return from_dict(cls, values)


def from_dict(cls: type[Args], values: dict[str, Any], prefix: str = "") -> Args:
    """The inverse of dataclasses.asdict for nested dataclasses, whose values must be within their bounds.

    prefix: of the fields' names.
    """
    hints = typing.get_type_hints(cls)
    if not isinstance(values, dict) or set(values) != set(hints):
        differing = sorted(set(hints) ^ set(values if isinstance(values, dict) else ()))
        raise InputError(f"its arguments differ in {', '.join(differing[:5])}{', ...' if len(differing) > 5 else ''}")
    arguments = {}
    for name, hint in hints.items():
        nested = dataclasses.is_dataclass(hint)
        arguments[name] = from_dict(hint, values[name], f"{prefix}{name}.") if nested else values[name]
        if not nested and not files.fits(values[name], hint):
            raise InputError(f"its argument {prefix}{name} is {values[name]!r}, which it cannot be")
    args = cls(**arguments)
    check_bounds(args, prefix)
    return args


def check_same_arguments(saved: Args, args: Args) -> None:
    """Refuse to resume with other arguments than the saved ones, except those that may change; print those."""
    old, new = files.flatten(dataclasses.asdict(saved)), files.flatten(dataclasses.asdict(args))
    allowed, refused = [], []
    for name in old:
        if old[name] != new[name] and name != "resume":
            may_change = re.sub(r"^(sft|reward|policy)\.", "", name) in MAY_CHANGE
            (allowed if may_change else refused).append(f"{name} {old[name]} -> {new[name]}")
    if refused:
        raise InputError(
            f"--resume {args.resume}: {', '.join(refused)} would make it another run; "
            f"only these may change: {', '.join(sorted(MAY_CHANGE - {'resume'}))}"
        )
    if allowed and errors.is_first_process():
        print(f"resumed with {', '.join(allowed)}")


# ---- Checks ----------------------------------------------------------------------------------------------------


def check_bounds(args: object, prefix: str = "") -> None:
    """Refuse values outside the bounds at their fields, such as Gt(0), and those that no run could compute with.

    prefix: of the fields' names on the command line.
    """
    for name, hint in typing.get_type_hints(type(args), include_extras=True).items():
        value, shown = getattr(args, name), flag(prefix + name)
        if dataclasses.is_dataclass(value):
            check_bounds(value, f"{prefix}{name}.")
        elif isinstance(value, float) and not abs(value) < 3.4e38:  # the end of float32
            raise InputError(f"{shown} is {value}; it must be finite, in float32 too")
        elif isinstance(value, int) and not abs(value) < 2**63:
            number = value if abs(value) < 10**30 else "a number of many digits"
            raise InputError(f"{shown} is {number}; it must be below 2^63")
        elif isinstance(value, str):
            files.check_text(value, f"{shown} {value!r}")
        # The bounds of `float | None` belong to its float.
        kinds = [] if value is None else [hint, *typing.get_args(hint)]
        for bound in (bound for kind in kinds for bound in getattr(kind, "__metadata__", ())):
            match bound:
                case Gt(limit) if not value > limit:
                    raise InputError(f"{shown} is {value}; it must be above {limit}")
                case Ge(limit) if not value >= limit:
                    raise InputError(f"{shown} is {value}; it must be at least {limit}")
                case Lt(limit) if not value < limit:
                    raise InputError(f"{shown} is {value}; it must be below {limit}")
                case Le(limit) if not value <= limit:
                    raise InputError(f"{shown} is {value}; it must be at most {limit}")


def check_run(args: RunArgs) -> None:
    """Refuse what no training script can do, such as a run whose name is no folder's, or not one for the hub."""
    check_bounds(args)
    if (folder := os.getcwd()).encode(errors="replace").decode() != folder:
        raise InputError(f"the name of the current folder, {folder!r}, is not valid Unicode; start in another one")
    if args.dtype == "float64" and default_device().type in WITHOUT_FLOAT64:
        raise InputError(f"{flag('dtype')} float64: {default_device().type}, an Apple GPU, has none; use float32")
    if Path(args.exp_name).name != args.exp_name:
        raise InputError(f"{flag('exp_name')} {args.exp_name!r}: must be the name of a folder, not a path")
    name = run.run_name(args, 10**9)
    if len(name.encode()) > 255:
        raise InputError(f"{flag('exp_name')} {args.exp_name[:20]}... is too long for the name of a folder")
    if args.track or args.upload_model:
        from ppo_rlhf.lib import tracking

        tracking.check(args, name)


def check_whole_update(total_episodes: int, batch_size: int) -> None:
    if total_episodes < batch_size:
        raise InputError(
            f"{flag('ppo.total_episodes')} is {total_episodes}, less than an update of {flag('ppo.batch_size')} "
            f"{batch_size}; {flag('ppo.total_episodes')} {batch_size} would do"
        )


def check_controller(adaptive_kl: AdaptiveKLArgs, episodes: int) -> None:
    """Refuse a target or a horizon that cannot be meant, with updates of so many episodes."""
    if adaptive_kl.target is None:
        return
    horizon = adaptive_kl.horizon
    if episodes >= 5 * horizon:  # 1 - 0.2 * episodes / horizon, the least factor of an update, must be above 0
        raise InputError(
            f"{flag('rewards.adaptive_kl.horizon')} {horizon}: an update of {flag('ppo.batch_size')} {episodes} "
            f"episodes could take the KL coefficient to 0 or below; {flag('rewards.adaptive_kl.horizon')} "
            f"{episodes // 5 + 1} would do"
        )
