"""The processes that train together: what they add up, and weights that are sharded over them.

lib/base/launch.py has what chapter 1 needs of them, too.

Files and lines next to marks are those of openai/lm-human-preferences at commit cbfd210.
"""

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from ppo_rlhf.lib.base.checkpoints import gather_for_saving
from ppo_rlhf.lib.base.errors import InputError
from ppo_rlhf.lib.base.launch import (
    sum_over_processes,
    widened,
)


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


# ---- Shares ----------------------------------------------------------------------------------------------------


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


def average_gradients(model: nn.Module, accelerator: Accelerator) -> None:
    """Replace the gradients by their mean over all processes. No other wrapper of the model is needed for that.

    If a model is sharded, the backward pass has done so already.
    """
    # Before each step of the optimiser.   utils/core.py#L468-L488
    if accelerator.num_processes > 1 and not isinstance(model, FSDPModule):
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        mean = accelerator.reduce(nn.utils.parameters_to_vector(gradients), "mean")
        nn.utils.vector_to_parameters(mean, gradients)


def gradient_norm(model: nn.Module) -> torch.Tensor:
    """Euclidean norm of all gradients together, 0-d. It is only looked at: nothing is clipped."""
    return nn.utils.get_total_norm([parameter.grad for parameter in model.parameters() if parameter.grad is not None])


def clip_gradients(optimizer: torch.optim.Optimizer, most: float) -> torch.Tensor:
    """Scale the gradients of its parameters to a norm of at most this; returns the norm before, 0-d."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return full_tensor(nn.utils.clip_grad_norm_(parameters, most))
