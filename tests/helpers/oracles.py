"""What tests of tensors share: numbers, masks with garbage beyond the end, and processes that are threads."""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

GARBAGE = (math.nan, math.inf, -math.inf, 1e30)  # what a masked place may hold


def double(*numbers) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def spoil(tensor: torch.Tensor, mask: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """The tensor with NaN, infinities and large numbers in its masked places."""
    picks = torch.randint(0, len(GARBAGE), tensor.shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(mask, tensor, torch.tensor(GARBAGE, dtype=tensor.dtype)[picks])


class Process:
    """One of several processes, which are threads here: `reduce` and `gather` of accelerate.Accelerator."""

    def __init__(self, rank: int, barrier: threading.Barrier, slots: list):
        self.process_index, self.num_processes, self.device = rank, len(slots), torch.device("cpu")
        self.is_main_process = rank == 0
        self._barrier, self._slots = barrier, slots

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._slots[self.process_index] = tensor
        self._barrier.wait()
        tensors = list(self._slots)
        self._barrier.wait()
        return tensors

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        total = sum(self._exchange(tensor))
        return {"sum": total, "mean": total / self.num_processes}[reduction]

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(tensor))


RUNNING = threading.local()  # its `process`: the one that a thread is


def average_gradients(model: torch.nn.Module) -> None:
    """What the scripts' function does on real processes: replace the gradients by their mean over all of them."""
    gradients_of_one = [p.grad for p in model.parameters() if p.grad is not None]
    mean = RUNNING.process.reduce(torch.nn.utils.parameters_to_vector(gradients_of_one), "mean")
    torch.nn.utils.vector_to_parameters(mean, gradients_of_one)


def on_processes(count: int, function: Callable[[Process], object]) -> list:
    """What a function returns on each of so many processes."""
    barrier, slots = threading.Barrier(count, timeout=60), [None] * count

    def run(rank: int) -> object:
        try:
            RUNNING.process = Process(rank, barrier, slots)
            return function(RUNNING.process)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def states(length: int, width: int) -> int:
    """How many values of a response count: one more than tokens, where there is a column for it."""
    return length + 1 if length < width else width


def masks_of(lengths: list[int], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the tokens and of the values. lengths: how many tokens of each response count."""
    counted = (lengths, [states(length, width) for length in lengths])
    tokens, values = (torch.arange(width) < torch.tensor(counts).unsqueeze(1) for counts in counted)
    return tokens, values
