"""What is not the algorithm: command lines, processes, run folders, logs, pictures, checkpoints, error messages.

A run leaves `runs/<exp_name>__<preset>__<seed>__<time>/` with

    meta.json             arguments, derived sizes, commit, versions, device, wall time, results
    metrics.csv           one row per step, all metrics; TensorBoard event files hold the same
    samples.jsonl         the samples that were printed
    learning_curves.png   a picture of metrics.csv
    checkpoints/<step>/   everything needed to go on: tensors in safetensors, the rest in JSON

A run survives what may happen to it: kill -9 at any moment, a full disk, a signal to stop. `--resume runs/<run>` goes
on from its newest checkpoint and gives the numbers of a run that nothing happened to.
"""

import contextlib
import csv
import ctypes
import dataclasses
import datetime
import errno
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import io
import json
import math
import os
import platform
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import typing
import weakref
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
import tyro
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

KEEP_CHECKPOINTS = 2
# How long processes wait for each other: for the first one's upload, or for a node whose downloads are slow.
COLLECTIVE_TIMEOUT = datetime.timedelta(hours=3)


class InputError(ValueError):
    """Something that the user gave does not fit. The message is one line: what, what is wrong, what would do."""


class NumericalError(ValueError):
    """A number that the run depends on cannot be right. The message is one line: which, where, what is kept."""


class Stopped(BaseException):
    """The run was told to stop by SIGTERM. The message is one line: where, and how to go on."""


# ----------------------------------------------------------------------------------------------------------------
# Command line and processes
# ----------------------------------------------------------------------------------------------------------------

Args = TypeVar("Args")

# What may differ when a run goes on: its length, memory, tracking, output. All else would make it another run.
MAY_CHANGE = {
    "ppo.total_episodes",
    "resume",
    "track",
    "wandb_project_name",
    "wandb_entity",
    "upload_model",
    "hf_entity",
    "log_interval",
    "save_interval",
    "ppo.local_micro_batch_size",
    "ppo.local_rollout_batch_size",
    "local_micro_batch_size",
    "local_rollout_batch_size",
}


def parse_args(presets: dict[str, Args], argv: list[str] | None = None, description: str | None = None) -> Args:
    """Read the command line: --preset chooses the defaults, every other flag overrides one.

    With --resume runs/<run>, the defaults are the arguments that the run was started with.
    """
    argv = sys.argv[1:] if argv is None else argv
    resume, preset = flag_value(argv, "--resume"), flag_value(argv, "--preset")
    if resume:
        saved = saved_args(type(next(iter(presets.values()))), Path(resume), read_meta(Path(resume))["args"])
        args = tyro.cli(
            type(saved), args=argv, default=dataclasses.replace(saved, resume=resume), description=description
        )
        check_same_arguments(saved, args)
        return args
    if preset is not None and preset not in presets:
        raise InputError(f"--preset {preset}: unknown; there are {', '.join(presets)}")
    default = presets[preset] if preset else next(iter(presets.values()))
    return tyro.cli(type(default), args=argv, default=default, description=description)


def flag_value(argv: list[str], flag: str) -> str | None:
    """The value of `--flag value` or `--flag=value`, the last one if there are several."""
    value = None
    for i, word in enumerate(argv):
        if word == flag and i + 1 < len(argv):
            value = argv[i + 1]
        elif word.startswith(flag + "="):
            value = word.split("=", 1)[1]
    return value


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"ppo": {"lr": 1}} becomes {"ppo.lr": 1}."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def saved_args(cls: type[Args], folder: Path, values: dict[str, Any]) -> Args:
    """The arguments that meta.json in a run's folder holds."""
    try:
        args = from_dict(cls, values)
        check_values(args)
        return args
    except InputError as error:
        raise InputError(
            f"--resume {folder}: meta.json is not that of this script's runs, or damaged: {error}"
        ) from error


def fits(value: Any, hint: Any) -> bool:
    """Whether a value that was read from JSON has the type of a field."""
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(fits(value, choice) for choice in typing.get_args(hint))
    return type(value) is hint or (hint is float and type(value) is int)


def from_dict(cls: type[Args], values: dict[str, Any]) -> Args:
    """The inverse of dataclasses.asdict for nested dataclasses."""
    hints = typing.get_type_hints(cls)
    if not isinstance(values, dict) or set(values) != set(hints):
        differing = sorted(set(hints) ^ set(values if isinstance(values, dict) else ()))
        raise InputError(f"its arguments differ in {', '.join(differing[:5])}{', ...' if len(differing) > 5 else ''}")
    arguments = {}
    for name, hint in hints.items():
        nested = dataclasses.is_dataclass(hint)
        arguments[name] = from_dict(hint, values[name]) if nested else values[name]
        if not nested and not fits(values[name], hint):
            raise InputError(f"its argument {name} is {values[name]!r}, which it cannot be")
    return cls(**arguments)


def check_same_arguments(saved: Any, args: Any) -> None:
    """Refuse to go on with other arguments than the saved ones, but for those that may change; print those."""
    old, new = flatten(dataclasses.asdict(saved)), flatten(dataclasses.asdict(args))
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
    if allowed and is_first_process():
        print(f"resumed with {', '.join(allowed)}")


TYPED_AS: ContextVar[dict[str, str]] = ContextVar("TYPED_AS")  # of arguments with another name than their own


def typed(name: str) -> str:
    """The name under which an argument is typed, for messages: its own, or the one that `typed_as` gives it."""
    return TYPED_AS.get({}).get(name, name)


def flag(name: str) -> str:
    """An argument as it is typed, for messages: --ppo.lr, or --policy.ppo.lr in the stage of a policy."""
    return f"--{typed(name)}"


@contextlib.contextmanager
def typed_as(names: dict[str, str]) -> Iterator[None]:
    """Within the block, messages name these arguments of a script as the script that runs it has them."""
    outside = TYPED_AS.set(names)
    try:
        yield
    finally:
        TYPED_AS.reset(outside)


DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}  # of a write, which names no file


def run_script(main: Callable[[], Any]) -> None:
    """Run main(); turn an error that is the user's to mend into one line and exit status 2."""
    if sys.stdout is None:  # it was closed; a file must not take its number, which libraries may write to
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what its encoding lacks must not end a run
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    threading.excepthook = thread_failed
    try:
        with handler_of_sigterm(stop_now):
            main()
    except (InputError, NumericalError) as error:
        exit_with(str(error))
    except OSError as error:
        if error.filename is None and error.errno not in DISK_ERRORS:
            raise
        exit_with(f"{error.filename or 'writing failed'}: {error.strerror}")
    except SafetensorError as error:  # of a write; what cannot be read is an InputError
        exit_with(f"writing failed: {error}")
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        exit_with(
            "the memory does not suffice; smaller local_micro_batch_size and local_rollout_batch_size need less"
        )
    except Stopped as stopped:
        if is_first_process():
            print(visible(str(stopped)))
    except KeyboardInterrupt:
        if not is_first_process():
            sys.exit(130)
        exit_with("interrupted" + (f"; {Run.how_to_go_on}" if Run.how_to_go_on else ""), status=130)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@contextlib.contextmanager
def handler_of_sigterm(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """What SIGTERM does within the block; only the main thread can say."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def stop_now(signal_number: int, frame: Any) -> None:
    raise Stopped("stopped by SIGTERM" + (f"; {Run.how_to_go_on}" if Run.how_to_go_on else ""))


def thread_failed(failure: threading.ExceptHookArgs) -> None:
    """Say nothing of a full disk that TensorBoard's thread meets: the main thread meets it too, and tells."""
    if not (isinstance(failure.exc_value, OSError) and failure.exc_value.errno in DISK_ERRORS):
        threading.__excepthook__(failure)


def environment_number(name: str, default: int, least: int, most: int = 999_999) -> int:
    """A whole number among the environment's variables."""
    text = os.environ.get(name, str(default))
    if not re.fullmatch("[0-9]{1,6}", text) or not least <= int(text) <= most:
        raise InputError(f"{name} is {text!r}; it must be a number from {least} to {most}")
    return int(text)


def is_first_process() -> bool:
    """Whether this is the process that talks, also before accelerate has found the others."""
    return not re.fullmatch("0*[1-9][0-9]*", os.environ.get("RANK", "0"))


PATIENCE = 5.0  # seconds in which a launcher ends all processes after the first has failed


def exit_with(message: str, status: int = 2) -> None:
    """Print one line and exit. Another process than the first speaks only if the first has not failed as well."""
    message = visible(re.sub(r"(?<=://)[^/\s@]*@", "", " ".join(message.split())))  # an address may hold a password
    if is_first_process():
        print(f"error: {message}", file=sys.stderr)
    elif first_process_goes_on():
        print(f"error on process {os.environ['RANK']}: {message}", file=sys.stderr)
    sys.exit(status)


def first_process_goes_on() -> bool:
    """Whether the first process or its launcher, who listen where the processes meet, still do so after a while."""
    begun = time.monotonic()
    with contextlib.suppress(OSError, KeyError, ValueError):  # KeyError, ValueError: there is no such place
        while time.monotonic() - begun < PATIENCE:
            place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            socket.create_connection(place, timeout=PATIENCE).close()
            time.sleep(0.2)
        return True
    return False


def visible(text: str) -> str:
    """A text whose control characters, which could command a terminal, are shown as the signs for them.

    Line breaks and tabs stay.
    """
    signs = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
    return text.translate(signs | dict.fromkeys(range(0x7F, 0xA0), 0xFFFD))


def seconds_since(started: float) -> float:
    """Seconds since time.monotonic() was `started`; above 0, also where the clock stands still."""
    return max(time.monotonic() - started, 1e-9)


def keep_freed_memory() -> None:
    """Let the C library keep what a tensor leaves for the next tensor, instead of giving it back to the kernel.

    Otherwise a large tensor is new memory each time, which the kernel clears page by page as it is touched: a fifth
    of the training time of GPT-2 on a CPU. glibc only; elsewhere nothing happens.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(library, "mallopt"):
        m_trim_threshold, m_mmap_max = -1, -4  # malloc.h
        library.mallopt(m_mmap_max, 0)  # large tensors too come from the heap,
        library.mallopt(m_trim_threshold, -1)  # and the heap never shrinks


def make_accelerator() -> Accelerator:
    """The processes that the launcher started, on GPUs or, where there is none, on the CPU."""
    environment_number("RANK", default=0, least=0)
    started = environment_number("WORLD_SIZE", default=1, least=1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Launchers set OMP_NUM_THREADS=1 unasked, which leaves cores idle. PPO_RLHF_THREADS overrides.
    share = max(1, cores // environment_number("LOCAL_WORLD_SIZE", default=1, least=1))
    threads = environment_number("PPO_RLHF_THREADS", default=share, least=1, most=1024)
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true":
        raise InputError("DeepSpeed is not supported; benchmark/accelerate/zero2.yaml slices the same tensors")
    patience = InitProcessGroupKwargs(timeout=COLLECTIVE_TIMEOUT)
    try:
        accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[patience])
    except ValueError as error:
        raise InputError(f"the launcher's WORLD_SIZE does not fit its processes: {error}; use torchrun") from error
    if accelerator.num_processes != started:
        raise InputError(
            f"the launcher started {started} processes, but accelerate sees {accelerator.num_processes}; "
            f"on a machine without a GPU, use torchrun --nproc_per_node {started}"
        )
    if accelerator.device.type == "cpu":
        torch.set_num_threads(threads)
        keep_freed_memory()
    return accelerator


def mean_over_processes(values: dict[str, torch.Tensor], accelerator: Accelerator) -> dict[str, float]:
    """Reduce 0-d tensors over all processes, in one flat vector."""
    # [D75] [X13] openai/lm-human-preferences lm_human_preferences/utils/core.py#L491-L524 @cbfd210
    flat = torch.stack([value.detach().double() for value in values.values()])
    return dict(zip(values, accelerator.reduce(flat, "mean").tolist(), strict=True))


def check_finite(values: dict[str, float], step: int, remedy: str) -> None:
    """Raise a NumericalError that names what is not finite, in the order given: causes first."""
    if broken := [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]:
        others = f" (and {len(broken) - 4} more)" if len(broken) > 4 else ""
        raise NumericalError(
            f"{', '.join(broken[:4])}{others} in step {step}; the run stops and saves nothing more; {remedy}"
        )


def anew_with_lower(argument: str) -> str:
    """What to do about a training that diverged: the remedy of check_finite."""
    return f"if it happens again after --resume, begin anew with a lower {flag(argument)}"


def check_equal(name: str, value: float, accelerator: Accelerator) -> None:
    """Raise a NumericalError on every process if a number is not the same on all of them, bit for bit."""
    if accelerator.num_processes > 1:
        values = accelerator.gather(torch.tensor([value], dtype=torch.float64, device=accelerator.device))
        if (values != values[0]).any():
            raise NumericalError(f"{name} differs between processes: {values.tolist()}; the run stops")


def fail_together(problem: str) -> None:
    """Raise an InputError on every process if one of them has a problem; an empty text is none.

    For what may go wrong on one process alone, which the others would wait for.
    """
    problems: list[str] = [problem]
    if torch.distributed.is_initialized():
        problems = [""] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(problems, problem)
    if problem := next(filter(None, problems), ""):
        raise InputError(problem)


def import_function(name: str, field: str) -> Callable:
    """The function `package.module:name`. The module may lie in the current folder; the name may have dots."""
    module, _, path = name.partition(":")
    try:
        if importlib.util.find_spec(module.split(".")[0]) is None:
            sys.path.append("")
        function = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (Exception, SystemExit) as error:  # the module is the user's and may raise anything
        raise InputError(
            f"{flag(field)} {name}: {type(error).__name__}: {error}; write package.module:name"
        ) from error
    if not callable(function):
        raise InputError(f"{flag(field)} {name}: that is no function")
    return function


# ----------------------------------------------------------------------------------------------------------------
# Several stages in a row
# ----------------------------------------------------------------------------------------------------------------


def flags_of(part: str, args: Any, shared: Collection[str]) -> contextlib.AbstractContextManager[None]:
    """Within the block, messages name a stage's arguments as they are typed: ppo.lr is policy.ppo.lr.

    shared: arguments that all stages get and that keep their names.
    """
    own = [name for name in flatten(dataclasses.asdict(args)) if name.split(".")[0] not in (*shared, "resume")]
    return typed_as({name: f"{part}.{name}" for name in own})


def is_finished(run: Path, args: Any) -> bool:
    """Whether a run has reached its end, and these arguments do not move that end."""
    meta = read_meta(run)
    ppo = getattr(args, "ppo", None)  # other stages have none; their length does not change
    return meta.get("finished", False) and (not ppo or ppo.total_episodes == meta["args"]["ppo"]["total_episodes"])


class Stages:
    """Trains one stage after another under one time stamp; goes on with the stage that was cut off."""

    def __init__(self, args: Any, shared: Collection[str], accelerator: Accelerator):
        """args: of the script that runs the stages; args.resume is the folder of one of their runs, or empty.

        root: the folder that holds runs/ and models/.
        """
        self.resume, self.shared, self.accelerator = args.resume, shared, accelerator
        self.runs, self.timestamp = Path("runs").absolute(), shared_timestamp()
        if args.resume:
            folder, meta = absolute(args.resume), read_meta(Path(args.resume))
            if folder.name != meta.get("name", folder.name):
                raise InputError(
                    f"--resume {args.resume}: this run began as {meta['name']}, and the stages find each other by "
                    f"their names; give its folder that name again"
                )
            self.runs, self.timestamp = folder.parent, meta["joint"]["timestamp"]
        self.root = self.runs.parent
        self.joint = {"args": dataclasses.asdict(args), "timestamp": self.timestamp, "runs": str(self.runs)}

    def run_folder(self, args: Any) -> Path:
        """The folder of a stage's run, given the stage's arguments."""
        return self.runs / run_name(args, self.timestamp)

    def train(self, train: Callable[[Any, dict], Path], args: Any, part: str, kind: str) -> Path:
        """Train one stage, go on with it, or skip it if it is finished; returns models/<run>/<kind>."""
        run = self.run_folder(args)
        model = self.root / "models" / run.name / kind
        begun = bool(self.resume) and (run / "meta.json").exists()
        begun, finished = broadcast_object_list([(begun, begun and is_finished(run, args))])[0]
        if finished:
            return model
        if self.resume and not begun and self.accelerator.is_main_process:
            if list(run.glob("checkpoints/*")):
                raise InputError(f"{shown(run)} has checkpoints but no meta.json; it cannot go on")
            if model.exists():
                raise InputError(f"{shown(model)} is there, but its run {shown(run)} is not; bring that back")
            shutil.rmtree(run, ignore_errors=True)  # cut off before it had written anything to go on from
        with flags_of(part, args, self.shared):
            return train(dataclasses.replace(args, resume=str(run) if begun else ""), self.joint)


def joint_args(cls: type[Args], folder: Path, argv: list[str], script: str, description: str | None) -> Args:
    """The command line with --resume runs/<run>, one of several stages: the defaults are that script's arguments."""
    joint = read_meta(folder).get("joint")
    if not joint:
        raise InputError(f"--resume {folder}: {script} did not start that run; resume it with its own script")
    saved = dataclasses.replace(saved_args(cls, folder, joint["args"]), resume=str(folder))
    args = tyro.cli(cls, args=argv, default=saved, description=description)
    check_same_arguments(saved, args)
    return args


# ----------------------------------------------------------------------------------------------------------------
# Sharding: a process keeps a slice of every weight, gradient and Adam moment
# ----------------------------------------------------------------------------------------------------------------


def shard(model: nn.Module, layers: Collection[str], accelerator: Accelerator) -> None:
    """Shard a model over all processes (FSDP2) if the launcher asks for it.

    layers: class names of the parts that are gathered one by one. With `fsdp_reshard_after_forward: false` the
    weights stay whole from forward to backward, and only gradients and moments are sliced: ZeRO-2. A parameter that
    is a single number, such as a gain, stays whole, and must not learn.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "false") == "true" and accelerator.num_processes > 1:
        if os.environ.get("FSDP_VERSION", "2") != "2" or os.environ.get("FSDP_OFFLOAD_PARAMS", "false") == "true":
            raise InputError("of FSDP, version 2 without offloading is supported: benchmark/accelerate/fsdp2.yaml")
        scalars = {parameter for parameter in model.parameters() if parameter.dim() == 0}  # have no slices
        for module in [*(m for m in model.modules() if type(m).__name__ in layers), model]:
            fully_shard(module, reshard_after_forward=reshards_after_forward(), ignored_params=scalars)
        # FSDP takes the first module that is called for the outermost one. A rollout calls inner ones, so here is a
        # call of the outermost before; and back to slices, or what it has gathered now would stay for ever.
        model.begin = lambda: None
        register_fsdp_forward_method(model, "begin")
        model.begin()
        model.reshard()


def reshards_after_forward() -> bool:
    return os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "true"


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """All weights whole, on every process, for generation, which needs them at each token."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    yield
    for module in sharded:
        module.set_reshard_after_forward(reshards_after_forward(), recurse=False)
        module.reshard()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor from the slices of all processes, which must all call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a model saves, tied weights once, from the slices of all processes, which must all call this."""
    names = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    return {name: gather_for_saving(tensor) for name, tensor in model.state_dict().items() if name in names}


def gather_for_saving(tensor: torch.Tensor) -> torch.Tensor:
    """As whole, but on the CPU, where all of them have room."""
    return tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor


def sliced_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The inverse of whole: this process's slice of a tensor, if `other` is one."""
    if isinstance(other, DTensor):
        return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements)
    return tensor


# ----------------------------------------------------------------------------------------------------------------
# Sizes
# ----------------------------------------------------------------------------------------------------------------


def above_zero(prefix: str, group: Any, *fields: str) -> None:
    """Check that these fields of a dataclass are above 0. prefix: of their names on the command line."""
    for field in fields:
        if not getattr(group, field) > 0:
            raise InputError(f"{typed(prefix + field)} is {getattr(group, field)}; it must be above 0")


def at_least(least: int, prefix: str, group: Any, *fields: str) -> None:
    """Check that these fields of a dataclass are not too small. prefix: of their names on the command line."""
    for field in fields:
        if getattr(group, field) < least:
            raise InputError(f"{typed(prefix + field)} is {getattr(group, field)}; it must be at least {least}")


WANDB_MODES = ("online", "offline", "shared", "disabled")


def check_values(args: Any) -> None:
    """Check what holds for every script's arguments: finite numbers, texts that are Unicode, and the like."""
    values = flatten(dataclasses.asdict(args))
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{flag(name)} is {value}; it must be a finite number")
        if isinstance(value, int) and not abs(value) < 2**63:
            number = value if abs(value) < 10**30 else "a number of many digits"
            raise InputError(f"{flag(name)} is {number}; it must be below 2^63")
        if isinstance(value, str) and value.encode(errors="replace").decode() != value:
            raise InputError(f"{flag(name)} is {value!r}, which is not valid Unicode")
    if args.seed < 0:
        raise InputError(f"{flag('seed')} is {args.seed}; it must be at least 0")
    if "exp_name" in values and Path(args.exp_name).name != args.exp_name:
        raise InputError(f"{flag('exp_name')} {args.exp_name!r}: must be the name of a folder, not a path")
    if values.get("upload_model"):
        check_repository_name(args)
    if values.get("track") and os.environ.get("WANDB_MODE", "online") not in WANDB_MODES:
        raise InputError(
            f"{flag('track')}: WANDB_MODE is {os.environ['WANDB_MODE']!r}; it must be one of {', '.join(WANDB_MODES)}"
        )


def check_repository_name(args: Any) -> None:
    """Refuse, before the training, names of run and owner that the hub would refuse after it."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    longest = f"{args.hf_entity or 'owner'}/{run_name(args, 10**9)}-policy"
    try:
        validate_repo_id(longest)
    except HFValidationError as error:
        raise InputError(
            f"{flag('upload_model')}: {error} {flag('exp_name')} and {flag('hf_entity')} say what it is called"
        ) from error


def split_evenly(field: str, value: int, parts: int, what: str) -> int:
    """value / parts, if that is exact. what: what the parts are, for the message."""
    if value % parts:
        offer = math.ceil(value / parts) * parts
        raise InputError(f"{typed(field)} {value} does not divide by {parts} ({what}); {flag(field)} {offer} does")
    return value // parts


def rows_at_a_time(field: str, value: int, whole: int) -> int:
    """A memory knob: how many of the rows to take at a time; 0: all."""
    size = value or whole
    if whole % size:
        offer = math.gcd(size, whole)
        raise InputError(
            f"{typed(field)} {value} does not divide the {whole} of one process; {flag(field)} {offer} does"
        )
    return size


def deal(inds: torch.Tensor, batch: int, rank: int, processes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One process's share of a batch: indices (batch / processes,), and which of them count, bool of that shape.

    The last batch of a pass may be short. It is filled up with index 0, which counts as nothing, so that all
    processes take the same number of steps and every row of the data counts once.
    """
    filled = torch.zeros(batch, dtype=torch.long)
    filled[: len(inds)] = inds
    counts = torch.arange(batch) < len(inds)
    share = slice(rank * batch // processes, (rank + 1) * batch // processes)
    return filled[share], counts[share]


def map_rows(
    function: Callable[[torch.Tensor], tuple[torch.Tensor, ...]],
    rows: int,
    local_batch: int,
    accelerator: Accelerator,
) -> tuple[torch.Tensor, ...]:
    """Apply a function to the indices of all rows, shared among the processes, a local batch at a time.

    function: indices (local_batch,) -> tensors (local_batch, ...). Returns those of all rows, in order, on every
    process and on the CPU; every process must call this.
    """
    batch, chunks = local_batch * accelerator.num_processes, []
    for inds in torch.arange(rows).split(batch):
        share, _ = deal(inds, batch, accelerator.process_index, accelerator.num_processes)
        gathered_rows = (accelerator.gather(tensor.contiguous())[: len(inds)].cpu() for tensor in function(share))
        chunks.append(tuple(gathered_rows))
    return tuple(torch.cat(parts) for parts in zip(*chunks, strict=True))


# ----------------------------------------------------------------------------------------------------------------
# Run folder
# ----------------------------------------------------------------------------------------------------------------


def absolute(path: str) -> Path:
    """An absolute path. A link at its end is followed; one on the way, such as runs/ on another disk, is not."""
    folder = Path(os.path.abspath(path))
    while folder.is_symlink():
        folder = Path(os.path.abspath(folder.parent / folder.readlink()))
    return folder


def shown(path: Path) -> Path:
    """An absolute path as messages name it: relative to the current folder, if it lies there."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def root_of(resume: str, joint: dict[str, Any] | None = None) -> Path:
    """The folder that holds runs/ and models/ of a run that goes on or, without `resume`, begins.

    joint: of a stage of several.
    """
    if joint:
        return Path(joint["runs"]).absolute().parent
    return absolute(resume).parent.parent if resume else Path.cwd()


def find_path(path: str, root: Path) -> Path:
    """Where a path lies that a run was given: beside the run, in its root, or else in the current folder."""
    return root / path if root != Path.cwd() and os.path.exists(root / path) else Path(path)


def checksum(files: list[Path]) -> str:
    """One SHA-256 of several files."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises OSError or ValueError."""
    try:
        return json.loads(path.read_text())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_meta(folder: Path) -> dict[str, Any]:
    try:
        meta = read_json(folder / "meta.json")
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} is not the folder of a run: {error}") from error
    if not isinstance(meta, dict) or not isinstance(meta.get("args"), dict):
        raise InputError(f"{folder} is not the folder of a run: its meta.json holds no arguments")
    kinds = {"wall_time": float, "finished": bool, "wandb_id": str | None, "joint": dict | None, "results": dict}
    kinds |= {"name": str, "id": str, "weights": dict}
    values = {name: meta[name] for name in kinds if name in meta}
    if meta.get("joint"):
        kinds |= {"joint.args": dict, "joint.timestamp": int}
        values |= {name: meta["joint"].get(name.removeprefix("joint.")) for name in kinds if "." in name}
    if broken := [name for name, value in values.items() if not fits(value, kinds[name])]:
        raise InputError(f"{folder / 'meta.json'} was damaged: {broken[0]} is {values[broken[0]]!r}")
    return meta


def replace_file(path: Path, text: str) -> None:
    """Write to a temporary name, then rename: a reader never sees half a file."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def lock_folder(folder: Path) -> int | None:
    """Keep other processes from writing to a folder, until this one ends; None where the file system has no locks."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    except BlockingIOError as error:
        os.close(descriptor)
        raise InputError(
            f"{shown(folder)} is in use: another process is writing to it; stop that one first"
        ) from error
    except OSError:
        os.close(descriptor)
        return None


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file. Its numbers must be finite: JSON has no others."""
    replace_file(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def commit() -> str:
    """The commit of this project's checkout, marked when files differ from it; empty outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    command = [*git, "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError:  # no git
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


class Run:
    """The folder of one run, and everything that is written to it. Only the main process writes.

    The folder is absolute, because a reward function may change the current one.
    """

    how_to_go_on = ""  # of the run that this process began last, for whoever stops it

    def __init__(
        self,
        args: Any,
        accelerator: Accelerator,
        sizes: dict[str, int],
        joint: dict[str, Any] | None = None,
        weights: dict[str, list[Path]] | None = None,
    ):
        """args: the script's Args; sizes: derived sizes; joint: what train_both.py gives both runs; weights: files of
        the models that the arguments name, which must be the same when the run goes on.

        Nothing is written before start_logging.
        """
        self.args = args
        self.accelerator, self.is_main = accelerator, accelerator.is_main_process
        self.started = time.monotonic()
        if args.resume:
            self.folder = absolute(args.resume)
        else:
            runs, timestamp = (joint["runs"], joint["timestamp"]) if joint else ("runs", shared_timestamp())
            self.folder = Path(runs).absolute() / run_name(args, timestamp)
        self.model_folder = self.folder.parent.parent / "models" / self.folder.name
        self.rows: list[dict[str, float]] = []
        self._writers: list[Callable[[int, dict[str, float]], None]] = []
        self._sample_writers: list[Callable[[int, list[dict[str, Any]]], None]] = []
        self._closers: list[Callable[[], None]] = []
        self._unlock: Callable[[], None] = lambda: None
        self._progress: Any = None
        self._told_to_stop = self._stopping = False
        previous = read_meta(self.folder) if args.resume else {}
        self._was_finished = previous.get("finished", False)
        device = torch.cuda.get_device_name() if accelerator.device.type == "cuda" else cpu_name()
        # [D82] openai/lm-human-preferences lm_human_preferences/train_policy.py#L422-L436 @cbfd210
        self.meta: dict[str, Any] = {
            "name": previous.get("name", self.folder.name),
            "id": previous.get("id") or secrets.token_hex(8),  # names its checkpoints; a folder may be renamed
            "args": dataclasses.asdict(args),
            "joint": {name: joint[name] for name in ("args", "timestamp")} if joint else previous.get("joint"),
            "sizes": sizes,
            "num_processes": accelerator.num_processes,
            "threads": torch.get_num_threads(),
            "device": f"{accelerator.device.type}: {device}",
            "commit": commit(),
            "tags": [tag for tag in os.environ.get("WANDB_TAGS", "").split(",") if tag],
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "accelerate": importlib.metadata.version("accelerate"),
            },
            "wall_time": previous.get("wall_time", 0.0),
            "finished": False,
            "wandb_id": previous.get("wandb_id"),
            "results": {},
            "weights": self._check_weights(weights or {}, previous.get("weights", {})),
        }

    def _check_weights(self, files: dict[str, list[Path]], before: dict[str, str]) -> dict[str, str]:
        """Checksums of the models' weights, on the main process; an InputError if the run began with others."""
        sums = {name: checksum(paths) for name, paths in files.items() if paths} if self.is_main else {}
        other = [name for name, value in sums.items() if before.get(name, value) != value]
        fail_together(
            f"--resume {self.args.resume}: the weights in {shown(files[other[0]][0].parent)} are not those of the "
            f"{flag(other[0])} that this run began with; bring those back"
            if other
            else ""
        )
        return before | sums

    def seconds(self) -> float:
        """Wall time of the run so far, with the time before it was resumed."""
        return self.meta["wall_time"] + seconds_since(self.started)

    def save_meta(self, **changes: Any) -> None:
        if self.is_main:
            self.meta |= changes
            write_json(self.folder / "meta.json", self.meta)

    def start_logging(self, first_step: int, config: dict[str, Any] | None = None) -> None:
        """Make the folder and open the logs; drop what a run that was cut off had logged at first_step and later.

        config: what Weights & Biases gets besides the arguments.
        """
        if not self.is_main:
            return
        for parent in (self.folder.parent, self.model_folder.parent):
            if (parent.is_symlink() or parent.exists()) and not parent.is_dir():
                raise InputError(f"{shown(parent)} is a file or a link to nothing, not a folder; move it away")
        try:
            self.folder.mkdir(parents=True, exist_ok=bool(self.args.resume))
        except FileExistsError as error:
            raise InputError(
                f"{shown(self.folder)} exists already; did another run begin in the same second?"
            ) from error
        if (lock := lock_folder(self.folder)) is not None:
            self._unlock = weakref.finalize(self, os.close, lock)
        Run.how_to_go_on = f"--resume {shown(self.folder)} goes on"
        self._cut_logs(first_step)
        self.save_meta()
        sizes = [{"size": name, "value": value} for name, value in self.meta["sizes"].items()]
        print_table(self.meta["name"], sizes, show_lines=False)
        self._open_csv()
        self._open_tensorboard()
        if self.args.track:
            self._open_wandb(config or {})

    def _close_logs(self) -> None:
        for close in self._closers:
            close()

    def _cut_logs(self, first_step: int) -> None:
        """Keep what metrics.csv and samples.jsonl say of the steps before first_step; a cut last line is dropped."""
        metrics_file, samples_file = self.folder / "metrics.csv", self.folder / "samples.jsonl"
        try:
            lines = metrics_file.read_text().splitlines(keepends=True) if first_step else []
            samples = samples_file.read_text().splitlines(keepends=True) if first_step else []
            rows = list(csv.DictReader(line for line in lines if line.endswith("\n")))
            kept = [row for row in rows if float(row["step"]) < first_step]
            self.rows = [{name: float(value) for name, value in row.items()} for row in kept]
            samples = [line for line in samples if line.endswith("\n") and json.loads(line)["step"] < first_step]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InputError(f"{self.folder}: metrics.csv or samples.jsonl is damaged: {error}") from error
        if len(self.rows) != first_step or [row["step"] for row in self.rows] != list(range(first_step)):
            raise InputError(f"{metrics_file} holds {len(self.rows)} of the {first_step} steps before the checkpoint")
        replace_file(metrics_file, "".join(lines[: first_step + 1] if first_step else []))
        replace_file(samples_file, "".join(samples))

    def _open_csv(self) -> None:
        file = (self.folder / "metrics.csv").open("a", newline="")
        writer = csv.writer(file, lineterminator="\n")

        def write(step: int, metrics: dict[str, float]) -> None:
            if file.tell() == 0:
                writer.writerow(["step", *metrics])
            writer.writerow([step, *metrics.values()])
            file.flush()

        self._writers.append(write)
        self._closers.append(file.close)

    def _open_tensorboard(self) -> None:
        for event_file in self.folder.glob("events.out.tfevents.*"):
            event_file.unlink()
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            print("tensorboard is not installed; metrics go to metrics.csv only")
            return
        # [D78] Every step, 0-based, under the names of metrics.csv.
        #       openai/lm-human-preferences lm_human_preferences/utils/core.py#L596-L618 @cbfd210
        board = SummaryWriter(str(self.folder))
        board.add_text("arguments", "```json\n" + json.dumps(self.meta["args"], indent=2) + "\n```")

        def write(step: int, metrics: dict[str, float]) -> None:
            for name, value in metrics.items():
                board.add_scalar(name, value, step)

        for row in self.rows:
            write(int(row["step"]), {name: value for name, value in row.items() if name != "step"})
        self._writers.append(write)
        self._closers.append(board.close)

    def _open_wandb(self, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            print("wandb is not installed; metrics go to metrics.csv and TensorBoard only")
            return
        try:
            tracked = wandb.init(
                project=self.args.wandb_project_name,
                entity=self.args.wandb_entity,
                name=self.meta["name"],
                id=self.meta["wandb_id"],
                resume="allow",
                config=self.meta["args"] | config | {"commit": self.meta["commit"]},
                dir=str(self.folder),
                settings=wandb.Settings(disable_code=True, disable_git=True),  # a remote's address may hold a token
            )
        except wandb.errors.Error as error:
            if not self.args.resume:
                shutil.rmtree(self.folder)
            raise InputError(f"{flag('track')}: {error}; run `wandb login`, or set WANDB_MODE=offline") from error
        self.save_meta(wandb_id=tracked.id)

        def write_samples(step: int, samples: list[dict[str, Any]]) -> None:
            rows = [list(sample.values()) for sample in samples]
            tracked.log({"samples": wandb.Table(columns=list(samples[0]), data=rows)}, step=step)

        def close() -> None:
            if (picture := self.folder / "learning_curves.png").exists():
                tracked.summary["learning_curves"] = wandb.Image(str(picture))
            tracked.finish()

        self._writers.append(lambda step, metrics: tracked.log(metrics, step=step))
        self._sample_writers.append(write_samples)
        self._closers.append(close)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write one row of metrics, on the main process. step: 0-based."""
        if self.is_main:
            metrics = {name: float(value) for name, value in metrics.items()}
            self.rows.append({"step": step, **metrics})
            for write in self._writers:
                write(step, metrics)

    def last_mean(self, name: str, steps: int = 10) -> float | None:
        """Mean of a metric over the last steps; None on other processes than the main one."""
        values = [row[name] for row in self.rows[-steps:]]
        return sum(values) / len(values) if values else None

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Append samples to samples.jsonl and print them as a table."""
        if self.is_main:
            with (self.folder / "samples.jsonl").open("a") as file:
                file.writelines(json.dumps({"step": step, **sample}) + "\n" for sample in samples)
            for write in self._sample_writers:
                write(step, samples)
            rows = [{name: one_line(value) for name, value in sample.items()} for sample in samples]
            print_table(f"step {step}", rows, console=self._progress and self._progress.console)

    # ------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def progress(self, title: str, total: int, done: int = 0):
        """For the time of a loop: a bar with the time left; and SIGTERM waits for the checkpoint after the step.

        Yields advance(text), to be called once per step.
        """

        def on_sigterm(signal_number: int, frame: Any) -> None:
            self._told_to_stop = True

        with handler_of_sigterm(on_sigterm), self._bar(title, total, done) as advance:
            yield advance
        if self._told_to_stop:  # after the last step
            raise Stopped(f"stopped by SIGTERM after step {total}, with a checkpoint; {Run.how_to_go_on}")

    @contextlib.contextmanager
    def _bar(self, title: str, total: int, done: int):
        # [D79] [X16] openai/lm-human-preferences lm_human_preferences/train_policy.py#L311-L316 @cbfd210
        if not self.is_main:
            yield lambda text: None
            return
        try:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        except ImportError:
            print("rich is not installed; progress is printed as plain lines")
            Progress = None
        if Progress is None or not sys.stdout.isatty():
            step, every = done, max(1, total // 20)

            def advance_plain(text: str) -> None:
                nonlocal step
                step += 1
                if step % every == 0 or step == total:
                    left = seconds_since(begun) / (step - done) * (total - step)
                    print(f"{title} {step}/{total}, {left / 60:.1f} min left, {text}", flush=True)

            begun = time.monotonic()
            yield advance_plain
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
        )
        with Progress(*columns) as self._progress:
            task = self._progress.add_task(title, total=total, completed=done, text="")
            yield lambda text: self._progress.update(task, advance=1, text=text)
        self._progress = None

    def finish(self, panels: dict[str, list[str]], **results: Any) -> None:
        """Close the logs, draw the learning curves, record the results."""
        if not self.is_main:
            return
        draw_learning_curves(self.folder, self.rows, panels)
        self._close_logs()
        self.save_meta(finished=True, wall_time=round(self.seconds(), 1), results=results)
        self._unlock()

    # ------------------------------------------------------------------------------------------------------------

    def is_time_to_save(self, step: int, last_step: int) -> bool:
        """Whether a checkpoint is due after so many steps: at intervals, at the end, or because the run shall stop.

        SIGTERM, which clusters send before they take a machine away, may reach one process only.
        """
        told_to_stop = torch.tensor([float(self._told_to_stop)], device=self.accelerator.device)
        self._stopping = self.accelerator.reduce(told_to_stop, "sum").item() > 0
        return self._stopping or step == last_step or step % (self.args.save_interval or last_step) == 0

    def save_checkpoint(self, step: int, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        """Write checkpoints/<step> completely, then give it its name; keep the newest few [X05].

        Ends the run by raising Stopped if it was told to stop.
        """
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise NumericalError(f"{name} is not finite at step {step}; the run stops and saves nothing more")
        if self.is_main:
            self._write_checkpoint(step, tensors, state)
        if self._stopping:
            self._close_logs()
            self._unlock()
            raise Stopped(f"stopped by SIGTERM after step {step}, with a checkpoint; {Run.how_to_go_on}")

    def _write_checkpoint(self, step: int, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        folder = self.folder / "checkpoints"
        temporary = folder / f"{step}.tmp"
        contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            save_file(contiguous, temporary / "tensors.safetensors")
            state = {"run": self.meta["id"], "step": step, **state}
            write_json(temporary / "state.json", sealed(state, temporary / "tensors.safetensors"))
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise InputError(
                f"the checkpoint of step {step} cannot be written ({error}); those before it are kept"
            ) from error
        shutil.rmtree(folder / str(step), ignore_errors=True)
        temporary.rename(folder / str(step))
        for old in checkpoint_steps(self.folder)[:-KEEP_CHECKPOINTS]:
            shutil.rmtree(folder / str(old))
        write_json(self.folder / "meta.json", self.meta | {"wall_time": round(self.seconds(), 1)})

    def load_checkpoint(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        """Tensors and state of the newest checkpoint, on every process; None if there is none."""
        steps = broadcast_object_list([checkpoint_steps(self.folder)])[0]
        if not self.args.resume:
            return None
        if not steps:
            if self._was_finished:
                raise InputError(f"--resume {self.args.resume}: the run is finished, and its checkpoints are gone")
            return None
        folder = self.folder / "checkpoints" / str(steps[-1])
        file = folder / "tensors.safetensors"
        try:
            state = read_json(folder / "state.json")
            if not isinstance(state, dict) or state.get("step") != steps[-1]:
                raise ValueError("state.json does not name its step")
            unsealed = {name: value for name, value in state.items() if name != "sha256"}
            if sealed(unsealed, file) != state:
                raise ValueError("its files are not what was written")
            if unsealed.pop("run", self.meta["id"]) != self.meta["id"]:
                raise ValueError("it belongs to another run")
            return load_file(file), unsealed
        except (OSError, ValueError, SafetensorError) as error:
            raise InputError(
                f"checkpoint {folder} cannot be read ({type(error).__name__}: {error}); "
                f"remove that folder to go on from the one before"
            ) from error


def sealed(state: dict[str, Any], file: Path) -> dict[str, Any]:
    """A checkpoint's state with a checksum of itself and of the file with its tensors."""
    with file.open("rb") as tensors:
        digest = hashlib.file_digest(tensors, "sha256")
    digest.update(json.dumps(state).encode())
    return state | {"sha256": digest.hexdigest()}


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that learn, under their names."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What learns, and the optimiser's moments, under flat names, for a checkpoint. Every process must call this."""
    tensors = {f"model.{name}": parameter for name, parameter in trained_parameters(model).items()}
    for index, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": tensor for name, tensor in moments.items()}
    return {name: gather_for_saving(tensor) for name, tensor in tensors.items()}


@torch.no_grad()
def restore_training_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]
) -> None:
    """The inverse of training_state. The optimiser must have the model's trained parameters, in their order."""
    trained = trained_parameters(model)
    parameters = list(trained.values())
    shapes = {f"model.{name}": parameter.shape for name, parameter in trained.items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        names = (f"optimizer.{i}.{moment}" for i in optimizer.state_dict()["param_groups"][0]["params"])
        shapes |= {
            name: parameter.shape for name, parameter in zip(names, parameters, strict=True) if name in tensors
        }
    steps = {int(tensor) for name, tensor in tensors.items() if name.endswith(".step")}
    if len(steps) != 1 or shapes != {n: t.shape for n, t in tensors.items() if not n.endswith(".step")}:
        raise InputError("the checkpoint holds other tensors than the model that its arguments name")
    for name, parameter in trained.items():
        parameter.copy_(sliced_like(tensors[f"model.{name}"], parameter))
    state = optimizer.state_dict()
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, moment = name.split(".")
            slices = tensor if moment == "step" else sliced_like(tensor, parameters[int(index)])
            state["state"].setdefault(int(index), {})[moment] = slices
    for group in state["param_groups"]:
        if "steps" in group:  # an AdamTensorFlowStyle counts them
            (group["steps"],) = steps
    optimizer.load_state_dict(state)


def checkpoint_steps(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").glob("*") if re.fullmatch("[0-9]+", path.name))


def run_name(args: Any, timestamp: int) -> str:
    return f"{args.exp_name}__{args.preset}__{args.seed}__{timestamp}"


def shared_timestamp() -> int:
    """Seconds since 1970 that name no run yet, the main process's on every process."""
    timestamp = int(time.time())
    while list(Path("runs").glob(f"*__{timestamp}")):
        timestamp += 1
    return broadcast_object_list([timestamp])[0]


def one_line(value: Any) -> Any:
    """A text with its line breaks shown as marks, for a table; anything else as it is."""
    return value.replace("\n", "⏎") if isinstance(value, str) else value


def print_table(title: str, rows: list[dict[str, Any]], console: Any = None, show_lines: bool = True) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print(title, *(json.dumps(row) for row in rows), sep="\n")
        return
    table = Table(title=Text(visible(title)), show_lines=show_lines)
    for name in rows[0]:
        numeric = all(isinstance(row[name], float | int) for row in rows)
        table.add_column(name, justify="right" if numeric else "left", min_width=6 if numeric else None)
    for row in rows:
        cells = (f"{value:+.2f}" if isinstance(value, float) else str(value) for value in row.values())
        table.add_row(*(Text(visible(cell)) for cell in cells))
    (console or Console()).print(table)


def upload_model(folder: Path, entity: str, name: str) -> None:
    """Push a model's folder to the Hugging Face hub, with a model card."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    repository = f"{entity}/{name}" if entity else name
    card = f"# {name}\n\nTrained by ppo_rlhf. `ppo_rlhf.json` beside the weights names base model and task.\n"
    (folder / "README.md").write_text(f"---\nlibrary_name: transformers\ntags: [ppo_rlhf]\n---\n\n{card}")
    try:
        api = HfApi()
        repository = api.create_repo(repository, exist_ok=True).repo_id
        api.upload_folder(repo_id=repository, folder_path=str(folder))
    except (OSError, HfHubHTTPError, ValueError) as error:
        raise InputError(f"{folder} is saved, but could not be pushed to {repository}: {error}") from error


def draw_learning_curves(folder: Path, rows: list[dict[str, float]], panels: dict[str, list[str]]) -> None:
    """learning_curves.png: one panel per entry of {title: metrics}."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("matplotlib is not installed; no learning_curves.png")
        return
    panels = {
        title: drawn
        for title, names in panels.items()
        if (drawn := [name for name in names if rows and name in rows[0]])
    }
    if not panels:
        return
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(3.4 * columns, 2.5 * lines), layout="constrained")
    for axes, (title, names) in zip(
        figure.subplots(lines, columns, squeeze=False).flat, panels.items(), strict=False
    ):
        for name in names:
            axes.plot([row["step"] for row in rows], [row[name] for row in rows], label=name, linewidth=1.2)
        axes.set_title(title, fontsize=10)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        if len(names) > 1:
            axes.legend(fontsize=7)
    for axes in figure.axes[len(panels) :]:
        axes.set_axis_off()
    figure.savefig(folder / "learning_curves.png", dpi=110)
