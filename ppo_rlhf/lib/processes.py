"""The processes that a launcher started: where they run, how they share rows, what they add up and agree on.

Files and lines next to marks are those of openai/lm-human-preferences at commit cbfd210.
"""

import datetime
import math
import os
import sys
from collections.abc import Callable, Collection
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list
from torch import nn

from ppo_rlhf.lib import errors
from ppo_rlhf.lib.errors import InputError, NumericalError, flag, typed

# How long processes wait for each other: for the first one's upload, or for a node whose downloads are slow.
PATIENCE = InitProcessGroupKwargs(timeout=datetime.timedelta(hours=3))


def default_device() -> torch.device:
    """Where models run: on a GPU if PyTorch finds one, NVIDIA's, AMD's or Apple's, otherwise on the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


WITHOUT_FLOAT64 = {"mps"}  # kinds of devices: Apple's GPUs


def widened(values: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """The same numbers in float64, or in float32 on a device that has no float64. device: None: where they are."""
    device = device or values.device
    return values.to(torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64).to(device)


def device_of_noise(device: torch.device) -> torch.device:
    """Where the random numbers are with which a model on this device samples. They need float64."""
    return torch.device("cpu") if device.type in WITHOUT_FLOAT64 else device


def make_accelerator() -> Accelerator:
    """The processes that the launcher started, on GPUs or, where there is none, on the CPU."""
    for name in ("DEEPSPEED", "FSDP"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false") == "true":
            raise InputError(
                f"{name} is not supported: every process keeps whole models; launch with "
                f"benchmark/accelerate/ddp.yaml; frozen models may be in bfloat16, and chapters 2 and 3 have LoRA"
            )
    accelerator = Accelerator(cpu=default_device().type == "cpu", kwargs_handlers=[PATIENCE])
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != started:
        raise InputError(
            f"the launcher started {started} processes, but accelerate sees {accelerator.num_processes}; "
            f"on a machine without a GPU, use torchrun --nproc_per_node {started}"
        )
    # Launchers set OMP_NUM_THREADS=1 unasked, which leaves cores idle. PPO_RLHF_THREADS overrides.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    threads = os.environ.get("PPO_RLHF_THREADS", str(share))
    if not threads.isdecimal() or not 1 <= int(threads) <= 1024:
        raise InputError(f"PPO_RLHF_THREADS is {threads!r}; it must be a number from 1 to 1024")
    torch.set_num_threads(int(threads))
    return accelerator


def sum_over_processes(values: dict[str, torch.Tensor], accelerator: Accelerator) -> dict[str, float]:
    """Add up 0-d tensors over all processes, in one flat vector: what each adds is a share of the whole."""
    flat = torch.stack([widened(value.detach()) for value in values.values()])
    return dict(zip(values, accelerator.reduce(flat, "sum").tolist(), strict=True))


def means_over(*parts: tuple[torch.Tensor, dict[str, torch.Tensor]], accelerator: Accelerator) -> dict[str, float]:
    """Means over what counts on all processes; 0 where nothing does. parts: a mask, and numbers of its shape."""
    sums = {f"count {number}": mask.sum() for number, (mask, _) in enumerate(parts)}
    for mask, numbers in parts:
        sums |= {name: widened(values).masked_fill(~mask, 0).sum() for name, values in numbers.items()}
    totals = sum_over_processes(sums, accelerator)
    return {
        name: totals[name] / max(totals[f"count {number}"], 1)
        for number, (_, numbers) in enumerate(parts)
        for name in numbers
    }


def check_finite(values: dict[str, float], step: int, learning_rate: str) -> None:
    """Raise a NumericalError that names what is not finite, in the order given: causes first.

    learning_rate: the argument that may be too high.
    """
    if broken := [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]:
        others = f" (and {len(broken) - 4} more)" if len(broken) > 4 else ""
        raise NumericalError(
            f"{', '.join(broken[:4])}{others} in step {step}; the run stops and saves nothing more; "
            f"if it happens again after --resume, start again with a lower {flag(learning_rate)}"
        )


FIRST_RATIO_TOLERANCE = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 0.1}


def check_update(
    metrics: dict[str, float],
    update: int,
    dtype: str,
    monitored: Collection[str] = (),
) -> None:
    """Raise a NumericalError if the metrics of an update of PPO, over all processes, are impossible.

    monitored: objectives that may be NaN.
    """
    only_logged = {f"objective/{name}" for name in monitored}
    trained = {name: value for name, value in metrics.items() if name not in only_logged}
    check_finite(trained, update, "ppo.lr")
    # [D25] Before the first step, the policy that trains is the one that sampled.
    if (gap := metrics["val/first_ratio_gap"]) > FIRST_RATIO_TOLERANCE[dtype]:
        raise NumericalError(
            f"the ratio is off 1 by {gap:.2g} on the first pass of update {update}: rollout and training "
            f"pass disagree about the policy; the run stops and saves nothing more"
        )


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


Made = TypeVar("Made")  # what a function returns


def on_main(function: Callable[[], Made]) -> Made | None:
    """The result of a function on the main process, and None on the others; or its InputError on every process.

    Every process must call this.
    """
    made, problem = None, ""
    if errors.is_first_process():
        try:
            made = function()
        except InputError as error:
            problem = str(error)
    fail_together(problem)
    return made


def from_main(function: Callable[[], Made]) -> Made:
    """The result of a function on the main process, on every process. Every process must call this.

    Such as what is found in a folder, which may look different to another process a moment later.
    """
    return broadcast_object_list([on_main(function)])[0]


# ---- Shares ----------------------------------------------------------------------------------------------------


def split_evenly(field: str, value: int, parts: int, what: str) -> int:
    """value / parts, if that is exact. what: what the parts are, for the message."""
    if value % parts:
        offer = math.ceil(value / parts) * parts
        raise InputError(f"{typed(field)} {value} does not divide by {parts} ({what}); {flag(field)} {offer} does")
    return value // parts


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
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Apply a function to the indices of all rows, shared among the processes, a local batch at a time.

    function: indices (local_batch,), fewer the last time, -> tensors (local_batch, ...). lengths: tokens of each row
    (rows,), so that rows of similar length come together. Returns the tensors of all rows, in order, on every process
    and on the CPU; every process must call this.
    """
    processes, chunks = accelerator.num_processes, []
    order = torch.arange(rows) if lengths is None else lengths.argsort(descending=True, stable=True)
    for inds in order.split(local_batch * processes):
        # A process repeats a row only where it would have one fewer: calls of a user's function may cost money.
        batch = math.ceil(len(inds) / processes) * processes
        share, _ = deal(inds, batch, accelerator.process_index, processes)
        gathered_rows = (accelerator.gather(tensor.contiguous())[: len(inds)].cpu() for tensor in function(share))
        chunks.append(tuple(gathered_rows))
    return tuple(torch.cat(parts)[order.argsort()] for parts in zip(*chunks, strict=True))


# ---- Gradients -------------------------------------------------------------------------------------------------


def gradient_norm(model: nn.Module) -> torch.Tensor:
    """Euclidean norm of all gradients together, 0-d. It is only looked at: nothing is clipped."""
    return nn.utils.get_total_norm([parameter.grad for parameter in model.parameters() if parameter.grad is not None])


def clip_gradients(optimizer: torch.optim.Optimizer, most: float) -> torch.Tensor:
    """Scale the gradients of its parameters to a norm of at most this; returns the norm before, 0-d."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return nn.utils.clip_grad_norm_(parameters, most)


# ---- Memory ----------------------------------------------------------------------------------------------------


def peak_memory() -> int:
    """The most bytes that this process has held so far: of its GPU, if it has used one."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    import resource  # not on every system

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
