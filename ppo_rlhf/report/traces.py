"""Traces as the report reads them: episodes of an update with every number of every token.

Chapters 2 and 3 have written what is shown (lib/traces.py). Chapter 1 has written what its training loop had, for all
episodes of the main process; what is shown of the first of them is derived here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ppo_rlhf.lib import run
from ppo_rlhf.lib.errors import InputError
from ppo_rlhf.lib.traces import PARTS, Trace, path_of

Parts = dict[str, dict[str, Tensor]]  # tensors by part, such as tokens, and name


def kept(run_folder: Path) -> list[tuple[int, bool]]:
    """The traces in a folder: updates in their order, each with its flag `again`."""
    names = (path.name for path in (run_folder / "traces").glob("*.safetensors"))
    found = (re.fullmatch(r"([0-9]+)(_again)?\.safetensors", name) for name in names)
    return sorted((int(match[1]), bool(match[2])) for match in found if match)


def read(run_folder: Path, update: int, again: bool = False) -> Trace:
    """The trace of an update; an InputError if the file is damaged."""
    path = path_of(run_folder, update, again)
    parts: Parts = {part: {} for part in PARTS}
    try:
        with safe_open(path, "pt") as file:
            texts = json.loads(file.metadata()["texts"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dictionary
        texts.pop("sha256", None)  # older traces have one
        for name, tensor in tensors.items():
            kind, column = name.split(".", 1)
            parts[kind][column] = tensor
        if "beginnings" in texts:
            responses = [pieces(row) for row in texts["beginnings"]]
            parts = of_chapter_1(parts, run.read_meta(run_folder)["args"]["ppo"], shown=len(responses))
            texts = {"queries": texts["queries"], "responses": responses, "texts": {}}
        return Trace(update=update, again=again, **parts, **texts)
    except (OSError, ValueError, TypeError, LookupError, RuntimeError, SafetensorError) as error:
        raise InputError(f"{path} is damaged ({type(error).__name__}: {error}); remove it") from error


def pieces(beginnings: list[str]) -> list[str]:
    """The text that each token adds to those before it. beginnings: a text up to each of its tokens.

    A character whose bytes are shared by several tokens belongs to the last of them.
    """
    found, shown = [], 0
    for end, text in enumerate(beginnings, 1):
        if text.endswith("\ufffd") and end < len(beginnings):
            found.append("")
        else:
            found.append(text[shown:])
            shown = len(text)
    return found


# What chapter 1 logs of an episode in an update, and the page doesn't show.
NOT_SHOWN = {"kl", "entropy", "non_score_reward", "response_length", "sampler_gap"}


def of_chapter_1(parts: Parts, ppo: dict[str, Any], shown: int) -> Parts:
    """What is shown of the first episodes. ppo: the arguments of that name."""
    tokens, of_epochs = parts["tokens"], parts["epochs"]
    permutations = of_epochs.pop("permutations")
    ratio = torch.exp(tokens["new_logprobs"] - tokens["logprobs"])
    advantages, returns = of_epochs["advantages"][-1], of_epochs["returns"][-1]
    clipped_ratio = ratio.clamp(1 - ppo["cliprange"], 1 + ppo["cliprange"])
    derived = {
        "advantages": advantages,
        "returns": returns,
        "ratio": ratio,
        "clipped": advantages * (clipped_ratio - ratio) < 0,
    }
    names = {"score": "scores", "raw_score": "raw_scores"}
    return {
        "tokens": {name: tensor[:shown] for name, tensor in (tokens | derived).items()},
        "episodes": {
            names.get(name, name): tensor[:shown]
            for name, tensor in parts["episodes"].items()
            if name not in NOT_SHOWN
        },
        "epochs": {name: tensor[:, :shown].transpose(0, 1) for name, tensor in of_epochs.items()},
        "statistics": statistics(tokens, of_epochs["returns"], permutations, ppo, shown),
    }


def statistics(
    tokens: dict[str, Tensor], returns: Tensor, permutations: Tensor, ppo: dict[str, Any], shown: int
) -> dict[str, Tensor]:
    """What the first episodes shared with their minibatch in each epoch: (shown, epochs) under each name.

    Mean and deviation with which their group's part of the minibatch was whitened, and how many tokens and values
    count in the whole minibatch. returns: (epochs, local_batch, response_length), permutations: (epochs, groups,
    group_batch), as `ppo_update` takes them.
    """
    epochs, _, group_batch = permutations.shape
    count = ppo["batch_size"] // ppo["nminibatches"] * tokens["rewards"].shape[1]
    found: dict[str, list[list[float]]] = {}
    for episode in range(shown):
        group, place = divmod(episode, group_batch)
        numbers: dict[str, list[float]] = {"tokens": [count] * epochs, "values": [count] * epochs}
        for epoch in range(epochs):
            slices = permutations[epoch, group].chunk(ppo["nminibatches"])
            (own,) = (part for part in slices if place in part)
            rows = own + group * group_batch
            raw_advantages = returns[epoch, rows] - tokens["values"][rows]
            for name, values in (("reward", tokens["rewards"][rows]), ("advantage", raw_advantages)):
                mean, deviation = values.mean(), (values.var(unbiased=False) + 1e-8).sqrt()
                numbers.setdefault(f"{name}_mean", []).append(mean.item())
                numbers.setdefault(f"{name}_deviation", []).append(deviation.item())
        for name, of_epochs in numbers.items():
            found.setdefault(name, []).append(of_epochs)
    return {name: torch.tensor(rows, dtype=torch.float64) for name, rows in found.items()}
