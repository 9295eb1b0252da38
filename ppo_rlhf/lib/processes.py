"""The processes that train together: their number, their shares, what they add up; sharded weights.

Files and lines next to marks are those of openai/lm-human-preferences at commit cbfd210.
"""

import contextlib
import ctypes
import datetime
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, reduce
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from ppo_rlhf.lib import errors
from ppo_rlhf.lib.errors import InputError, NumericalError, flag, typed

# How long processes wait for each other: for the first one's upload, or for a node whose downloads are slow.
COLLECTIVE_TIMEOUT = datetime.timedelta(hours=3)


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


def default_device() -> torch.device:
    """Where models run: on a GPU if PyTorch finds one, otherwise on the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_accelerator(*, sharding: bool = True) -> Accelerator:
    """The processes that the launcher started, on GPUs or, where there is none, on the CPU.

    sharding: whether the script can shard, should the launcher ask for it.
    """
    errors.environment_number("RANK", default=0, least=0)
    started = errors.environment_number("WORLD_SIZE", default=1, least=1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Launchers set OMP_NUM_THREADS=1 unasked, which leaves cores idle. PPO_RLHF_THREADS overrides.
    share = max(1, cores // errors.environment_number("LOCAL_WORLD_SIZE", default=1, least=1))
    threads = errors.environment_number("PPO_RLHF_THREADS", default=share, least=1, most=1024)
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true":
        raise InputError("DeepSpeed is not supported; benchmark/accelerate/zero2.yaml slices the same tensors")
    if not sharding and started > 1 and os.environ.get("ACCELERATE_USE_FSDP", "false") == "true":
        raise InputError(
            "chapter 1 keeps whole models on every process; launch without FSDP: benchmark/accelerate/ddp.yaml"
        )
    patience = InitProcessGroupKwargs(timeout=COLLECTIVE_TIMEOUT)
    try:
        accelerator = Accelerator(cpu=default_device().type == "cpu", kwargs_handlers=[patience])
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
    # [D75] [X13] The mean of each metric, in float64.   utils/core.py#L491-L524
    flat = torch.stack([value.detach().double() for value in values.values()])
    return dict(zip(values, accelerator.reduce(flat, "mean").tolist(), strict=True))


def sum_over_processes(values: dict[str, torch.Tensor], accelerator: Accelerator) -> dict[str, float]:
    """Add up 0-d tensors over all processes, in one flat vector: what each adds is a share of the whole."""
    flat = torch.stack([value.detach().double() for value in values.values()])
    return dict(zip(values, accelerator.reduce(flat, "sum").tolist(), strict=True))


def means_over(*parts: tuple[torch.Tensor, dict[str, torch.Tensor]], accelerator: Accelerator) -> dict[str, float]:
    """Means over what counts on all processes; 0 where nothing does. parts: a mask, and numbers of its shape."""
    sums = {f"count {number}": mask.sum() for number, (mask, _) in enumerate(parts)}
    for mask, numbers in parts:
        sums |= {name: values.double().masked_fill(~mask, 0).sum() for name, values in numbers.items()}
    totals = sum_over_processes(sums, accelerator)
    return {
        name: totals[name] / max(totals[f"count {number}"], 1)
        for number, (_, numbers) in enumerate(parts)
        for name in numbers
    }


def check_finite(values: dict[str, float], step: int, remedy: str) -> None:
    """Raise a NumericalError that names what is not finite, in the order given: causes first."""
    if broken := [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]:
        others = f" (and {len(broken) - 4} more)" if len(broken) > 4 else ""
        raise NumericalError(
            f"{', '.join(broken[:4])}{others} in step {step}; the run stops and saves nothing more; {remedy}"
        )


def anew_with_lower(argument: str) -> str:
    """Advice for a training that diverged: the remedy of check_finite."""
    return f"if it happens again after --resume, start again with a lower {flag(argument)}"


FIRST_RATIO_TOLERANCE = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 0.1}


def check_update(metrics: dict[str, float], update: int, dtype: str, gap: str = "ppo/val/first_ratio_gap") -> None:
    """Raise a NumericalError if the metrics of an update of PPO, over all processes, are impossible.

    gap: the one that says how far the ratio is off 1 before the first step.
    """
    check_finite(metrics, update, anew_with_lower("ppo.lr"))
    # [D25] Before the first step, the policy that trains is the one that sampled.
    if metrics[gap] > FIRST_RATIO_TOLERANCE[dtype]:
        raise NumericalError(
            f"the ratio is off 1 by {metrics[gap]:.2g} on the first pass of update {update}: rollout and training "
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


# ---- Sharding: a process keeps a slice of every weight, gradient and Adam moment -------------------------------


def sharding() -> bool:
    """Whether the launcher asks for networks that are sharded over its processes."""
    several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    return several and os.environ.get("ACCELERATE_USE_FSDP", "false") == "true"


def shard(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Shard a model over all processes (FSDP2). layers: the parts that are gathered one by one.

    With `fsdp_reshard_after_forward: false` weights that learn stay whole from forward to backward, and only
    gradients and moments are sliced: ZeRO-2. A parameter that is a single number, such as a gain, stays whole, and
    must not learn.
    """
    if os.environ.get("FSDP_VERSION", "2") != "2" or os.environ.get("FSDP_OFFLOAD_PARAMS", "false") == "true":
        raise InputError("only version 2 of FSDP, without offloading, is supported: benchmark/accelerate/fsdp2.yaml")
    # FSDP2 warns of in-place operations on what a module returns. No network here makes any.
    warnings.filterwarnings("ignore", message=".* returned a view tensor", category=UserWarning)
    scalars = {parameter for parameter in model.parameters() if parameter.dim() == 0}  # have no slices
    for module in [*layers, model]:
        fully_shard(module, reshard_after_forward=reshards_after_forward(model), ignored_params=scalars)


def reshards_after_forward(model: nn.Module) -> bool:
    """Whether weights are sliced again after a forward pass. Frozen weights are, because no backward pass follows."""
    learns = any(parameter.requires_grad for parameter in model.parameters())
    return not learns or os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "true"


def make_outermost(model: nn.Module) -> None:
    """Mark this model as the FSDP root. Otherwise whichever submodule runs first becomes the root."""
    model.begin = lambda: None
    register_fsdp_forward_method(model, "begin")
    model.begin()
    model.reshard()  # otherwise what it has gathered now would stay forever


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Within the block, parts of a sharded model may be called: everything around its layers is whole.

    Layers are gathered when they are called. At the end, all is sliced again.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    model.set_reshard_after_forward(False, recurse=False)
    model.unshard()
    yield
    model.set_reshard_after_forward(reshards_after_forward(model), recurse=False)
    reshard(model)


def reshard(model: nn.Module) -> None:
    """Keep only this process's slices of a sharded model."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def copy_slice(whole: Any, parameter: DTensor) -> None:
    """Copy this process's slice of a tensor into a sharded parameter. whole: can be sliced, as those of safe_open."""
    local, mesh = parameter.to_local(), parameter.device_mesh
    first = mesh.get_local_rank() * math.ceil(parameter.shape[0] / mesh.size())
    if len(local):
        local.copy_(whole[first : first + len(local)])


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor from the slices of all processes, which must all call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors to save, tied weights once; if sharded, on the first process. All processes must call this."""
    names = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    return {name: gather_for_saving(tensor) for name, tensor in model.state_dict().items() if name in names}


def gather_for_saving(tensor: torch.Tensor) -> torch.Tensor:
    """As full_tensor, but on the CPU of the first process, which saves. The others get the sum: is it finite?"""
    if not isinstance(tensor, DTensor):
        return tensor
    whole = tensor.full_tensor()
    return (whole if errors.is_first_process() else whole.sum()).cpu()


def sliced_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The inverse of full_tensor: this process's slice of a tensor, if `other` is one."""
    if isinstance(other, DTensor):
        return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements)
    return tensor


# ---- Shares ----------------------------------------------------------------------------------------------------


def split_evenly(field: str, value: int, parts: int, what: str) -> int:
    """value / parts, if that is exact. what: what the parts are, for the message."""
    if value % parts:
        offer = math.ceil(value / parts) * parts
        raise InputError(f"{typed(field)} {value} does not divide by {parts} ({what}); {flag(field)} {offer} does")
    return value // parts


def rows_at_a_time(prefix: str, group: Any, field: str, whole: int) -> int:
    """A memory knob, a field of a dataclass: how many of the rows to take at a time; 0: all.

    prefix: of its name on the command line.
    """
    size, name = getattr(group, field) or whole, prefix + field
    if whole % size:
        offer = math.gcd(size, whole)
        raise InputError(
            f"{typed(name)} {size} does not divide the {whole} of one process; {flag(name)} {offer} does"
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
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Apply a function to the indices of all rows, shared among the processes, a local batch at a time.

    function: indices (local_batch,) -> tensors (local_batch, ...). lengths: tokens of each row (rows,), so that rows
    of similar length come together. Returns the tensors of all rows, in order, on every process and on the CPU; every
    process must call this.
    """
    batch, chunks = local_batch * accelerator.num_processes, []
    order = torch.arange(rows) if lengths is None else lengths.argsort(descending=True, stable=True)
    for inds in order.split(batch):
        share, _ = deal(inds, batch, accelerator.process_index, accelerator.num_processes)
        gathered_rows = (accelerator.gather(tensor.contiguous())[: len(inds)].cpu() for tensor in function(share))
        chunks.append(tuple(gathered_rows))
    return tuple(torch.cat(parts)[order.argsort()] for parts in zip(*chunks, strict=True))


# ---- Gradients -------------------------------------------------------------------------------------------------


def average_gradients(model: nn.Module, accelerator: Accelerator | None = None) -> None:
    """Replace the gradients by their mean over all processes. No other wrapper of the model is needed for that.

    If a model is sharded, the backward pass has done so already. accelerator: its processes; None: those of
    torch.distributed.
    """
    # [D73] Before each step of the optimiser.   utils/core.py#L468-L488
    several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    if (accelerator.num_processes > 1 if accelerator else several) and not isinstance(model, FSDPModule):
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        mean = (accelerator.reduce if accelerator else reduce)(nn.utils.parameters_to_vector(gradients), "mean")
        nn.utils.vector_to_parameters(mean, gradients)


def gradient_norm(model: nn.Module) -> torch.Tensor:
    """Euclidean norm of all gradients together, 0-d. It is only looked at: nothing is clipped."""
    return nn.utils.get_total_norm([parameter.grad for parameter in model.parameters() if parameter.grad is not None])


def clip_gradients(optimizer: torch.optim.Optimizer, most: float) -> torch.Tensor:
    """Scale the gradients of its parameters to a norm of at most this; returns the norm before, 0-d."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return full_tensor(nn.utils.clip_grad_norm_(parameters, most))
