"""What tests compare with: formulas as slow loops over what counts, and processes that are threads."""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
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


def on_processes(count: int, function: Callable[[Process], object]) -> list:
    """What a function returns on each of so many processes."""
    barrier, slots = threading.Barrier(count, timeout=60), [None] * count

    def run(rank: int) -> object:
        try:
            return function(Process(rank, barrier, slots))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


# ---- Loops that never see what is beyond the end. lengths: how many tokens of each response count ----------------


def states(length: int, width: int) -> int:
    """How many values of a response count: one more than tokens, where there is a column for it."""
    return length + 1 if length < width else width


def slow_mask(lengths: list[int], width: int) -> torch.Tensor:
    return torch.tensor([[t < length for t in range(width)] for length in lengths])


def masks_of(lengths: list[int], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the tokens and of the values."""
    return slow_mask(lengths, width), slow_mask([states(length, width) for length in lengths], width)


def entries(x, lengths: list[int]) -> list[float]:
    return [float(x[i, t]) for i, length in enumerate(lengths) for t in range(length)]


def slow_whiten(x, lengths: list[int], keep_mean: bool = False) -> np.ndarray:
    found, whitened = entries(x, lengths), np.zeros(x.shape)
    mean = math.fsum(found) / len(found)
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in found) / len(found) + 1e-8)
    for i, length in enumerate(lengths):
        for t in range(length):
            whitened[i, t] = (float(x[i, t]) - mean) / deviation + (mean if keep_mean else 0)
    return whitened


def slow_gae(rewards, values, lengths: list[int], gamma: float, lam: float) -> np.ndarray:
    """The closed form on the states of each response: A_t = sum over k of (gamma lam)^k delta_{t+k}."""
    advantages = np.zeros(values.shape)
    for i, length in enumerate(lengths):
        last = states(length, values.shape[1])
        for t in range(last):
            for k in range(last - t):
                after = float(values[i, t + k + 1]) if t + k + 1 < last else 0.0
                delta = float(rewards[i, t + k]) + gamma * after - float(values[i, t + k])
                advantages[i, t] += (gamma * lam) ** k * delta
    return advantages


def slow_policy_loss(new, old, advantages, lengths, cliprange) -> tuple[float, float, float, np.ndarray]:
    """Loss, clipped share, approxkl, and the gradient of the loss in the new log-probs."""
    losses, clipped, squares, gradient = [], [], [], np.zeros(new.shape)
    count = sum(lengths)
    for i, length in enumerate(lengths):
        for t in range(length):
            difference, advantage = float(new[i, t]) - float(old[i, t]), float(advantages[i, t])
            ratio = math.exp(difference)
            free = -advantage * ratio
            bound = -advantage * min(max(ratio, 1 - cliprange), 1 + cliprange)
            losses.append(max(free, bound))
            clipped.append(bound > free)
            squares.append(difference**2)
            gradient[i, t] = 0.0 if bound > free else -advantage * ratio / count
    return np.mean(losses), np.mean(clipped), np.mean(squares) / 2, gradient


def slow_value_loss(new, old, returns, lengths, cliprange) -> tuple[float, float, np.ndarray]:
    """Loss, clipped share, and the gradient of the loss in the new values; lengths: of the states."""
    losses, clipped, gradient = [], [], np.zeros(new.shape)
    for i, length in enumerate(lengths):
        for t in range(length):
            value, before, target = float(new[i, t]), float(old[i, t]), float(returns[i, t])
            free, bound = (
                (value - target) ** 2,
                (min(max(value, before - cliprange), before + cliprange) - target) ** 2,
            )
            losses.append(max(free, bound) / 2)
            clipped.append(bound > free)
            gradient[i, t] = 0.0 if bound > free else (value - target) / sum(lengths)
    return np.mean(losses), np.mean(clipped), gradient
