"""Rows on several processes, for chapters 2 and 3: who reads which, and sums and means over all of them."""

import math
from collections.abc import Callable

import torch
from accelerate import Accelerator
from torch import Tensor

from ppo_rlhf.train_policy import float64_device


def widened(values: Tensor, device: torch.device | None = None) -> Tensor:
    """The same numbers in float64, or in float32 on an Apple GPU, which has none. device: None is where they are."""
    device = device or values.device
    return values.to(torch.float64 if float64_device(device) == device else torch.float32).to(device)


def sum_over_processes(values: dict[str, Tensor], accelerator: Accelerator) -> dict[str, float]:
    """Add up 0-d tensors over all processes, in one flat vector: what each adds is a share of the whole."""
    flat = torch.stack([widened(value.detach()) for value in values.values()])
    return dict(zip(values, accelerator.reduce(flat, "sum").tolist(), strict=True))


def means_over(*parts: tuple[Tensor, dict[str, Tensor]], accelerator: Accelerator) -> dict[str, float]:
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


def deal(inds: Tensor, batch: int, rank: int, processes: int) -> tuple[Tensor, Tensor]:
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
    function: Callable[[Tensor], tuple[Tensor, ...]],
    rows: int,
    local_batch: int,
    accelerator: Accelerator,
    lengths: Tensor | None = None,
) -> tuple[Tensor, ...]:
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
