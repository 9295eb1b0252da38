"""The scale of a function's scores [X18]."""

from __future__ import annotations

import math

import torch
from accelerate import Accelerator

from ppo_rlhf.lib.base import launch


class Scale:
    """Puts scores of a function on the scale of a normalised reward model: (score - mean) / std.

    KL coefficient and critic are meant for that scale. Until `fit` is called, scores stay as they are.
    """

    def __init__(self) -> None:
        self.mean, self.std = 0.0, 1.0

    def fit(self, scores: torch.Tensor, accelerator: Accelerator) -> None:
        """Take mean and biased deviation of scores (n,), on all processes together.

        A function that gives all of them the same score, but for rounding, keeps its deviation.
        """
        scores = launch.widened(scores)
        sums = {"n": scores.new_tensor(len(scores)), "sum": scores.sum()}
        sums = launch.sum_over_processes(sums, accelerator)
        if sums["n"]:
            self.mean = sums["sum"] / sums["n"]
            squares = {"squares": ((scores - self.mean) ** 2).sum()}
            std = math.sqrt(launch.sum_over_processes(squares, accelerator)["squares"] / sums["n"])
            self.std = std if std > 1e-10 * abs(self.mean) else 1.0

    def to_list(self) -> list[float]:
        return [self.mean, self.std]

    def apply(self, scores: torch.Tensor) -> torch.Tensor:
        return (scores - self.mean) / self.std

    def undo(self, scores: torch.Tensor) -> torch.Tensor:
        """What the function said."""
        return scores * self.std + self.mean
