"""The processes that train together: what they add up, how they share rows, and the memory that one takes.

lib/base/launch.py has what chapter 1 needs of them, too.

Files and lines next to marks are those of openai/lm-human-preferences at commit cbfd210.
"""

import math
import sys
from collections.abc import Callable

import torch
from accelerate import Accelerator
from torch import nn

from ppo_rlhf.lib.base.launch import sum_over_processes, widened


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
    """Replace the gradients by their mean over all processes. No other wrapper of the model is needed for that."""
    # Before each step of the optimiser.   utils/core.py#L468-L488
    if accelerator.num_processes > 1:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        mean = accelerator.reduce(nn.utils.parameters_to_vector(gradients), "mean")
        nn.utils.vector_to_parameters(mean, gradients)


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
