"""The scale of a function's scores [X18]."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator

from ppo_rlhf.lib.base import launch

if TYPE_CHECKING:
    from ppo_rlhf.lib.services.run import Run
    from ppo_rlhf.train_policy import QueryStream, Rollout


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

    def fit_samples(
        self, run: Run, roll_out: Callable[..., Rollout], stream: QueryStream, pad_id: int, generator: torch.Generator
    ) -> None:
        """Fit the scale to what the policy writes before it learns, which is what the language model writes.

        Each process writes its share of as many responses as the run's arguments say, to the first queries.
        """
        args, accelerator = run.args, run.accelerator
        if samples := args.rewards.normalize_samples:
            mine = slice(accelerator.process_index, None, accelerator.num_processes)
            queries = stream.first(samples, pad_id)[mine].to(accelerator.device)  # (n, query_length)
            uniforms = torch.rand(samples, args.task.response_length, generator=generator, dtype=torch.float64)
            noise = uniforms[mine][: len(queries)]  # (n, response_length)
            rollout = roll_out(queries, noise.to(launch.device_of_noise(accelerator.device)), kl_coef=0.0, monitor={})
            self.fit(rollout.objectives["raw_score"], accelerator)

    def to_list(self) -> list[float]:
        return [self.mean, self.std]

    def apply(self, scores: torch.Tensor) -> torch.Tensor:
        return (scores - self.mean) / self.std

    def undo(self, scores: torch.Tensor) -> torch.Tensor:
        """What the function said."""
        return scores * self.std + self.mean
