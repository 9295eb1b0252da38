"""Traces as the report reads them: episodes of an update with every number of every token.

A training script writes what its loop had, for all episodes of the main process, with `Run.write_trace` of
train_policy.py. What else is shown follows from that and is derived here. That includes the mean and deviation with
which a minibatch was whitened over all processes, although the file has the rows of one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from ppo_rlhf.report import derivation
from ppo_rlhf.rlvr import algebra
from ppo_rlhf.train_policy import read_meta

Tensors = dict[str, Tensor]  # by name


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Episodes of an update (0-based). There are texts of the first ones; others are in a group with these."""

    update: int
    queries: list[str]
    responses: list[list[str]]  # the text of each token; empty for padding
    texts: dict[str, list[str]]  # more texts of each episode, such as reference answers
    tokens: Tensors  # (episodes, response_length)
    episodes: Tensors  # (episodes,)
    epochs: Tensors  # (episodes, epochs, response_length), what each epoch computed before its optimiser step
    statistics: Tensors  # (episodes,) or (episodes, epochs), what an episode shares with others


def path_of(run_folder: Path, update: int | str) -> Path:
    return run_folder / "traces" / f"{update}.safetensors"


def kept(run_folder: Path) -> list[int]:
    """The updates that have a trace, in their order. Those of older versions, which came in pairs, are left out."""
    updates = [int(path.stem) for path in run_folder.glob("traces/*.safetensors") if path.stem.isdecimal()]
    return sorted(update for update in updates if not path_of(run_folder, f"{update}_again").exists())


def read(run_folder: Path, update: int) -> Trace:
    """The trace of an update. Whatever is wrong with the file raises some exception."""
    meta = read_meta(run_folder)
    parts: dict[str, Tensors] = {"tokens": {}, "episodes": {}, "epochs": {}}
    with safe_open(path_of(run_folder, update), "pt") as file:
        texts = json.loads(file.metadata()["texts"])
        for name in file.keys():  # noqa: SIM118, it is no dictionary
            part, column = name.split(".", 1)
            parts[part][column] = file.get_tensor(name)
    tokens, episodes, epochs = parts.values()
    settings = derivation.settings_of(meta["args"], meta["script"])
    if settings["chapter"] == 2:
        tokens["mask"] = tokens.pop("scored")
    statistics = {name: episodes.pop(name) for name in ("kept", "baselines") if name in episodes}
    statistics |= statistics_of(tokens, epochs, statistics.get("kept"), settings, meta["args"]["ppo"])
    tokens |= derived_tokens(tokens, epochs, settings)
    queries, responses = texts.pop("queries"), [pieces(row) for row in texts.pop("beginnings")]
    # The first episodes, and others of their groups.
    rows = torch.arange(len(tokens["ids"])) < len(responses)
    if "groups" in episodes:
        rows = torch.isin(episodes["groups"], episodes["groups"][rows])
    return Trace(
        update=update,
        queries=queries,
        responses=responses,
        texts=texts,
        tokens={name: tensor[rows] for name, tensor in tokens.items()},
        episodes={NAMES.get(name, name): x[rows] for name, x in episodes.items() if name not in NOT_SHOWN},
        epochs={name: epochs[name][:, rows].transpose(0, 1) for name in OF_EPOCHS if name in epochs},
        statistics={name: tensor[rows] for name, tensor in statistics.items()},
    )


OF_EPOCHS = ("advantages", "returns", "new_logprobs", "new_values", "exact_kl")  # (epochs, rows, response_length)
NAMES = {"score": "scores", "raw_score": "raw_scores", "eos_rate": "stopped"}  # of an episode, in other chapters
# These numbers of an episode are logged, and follow from its tokens.
NOT_SHOWN = {"kl", "entropy", "non_score_reward", "response_length", "sampler_gap"}


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


def derived_tokens(tokens: Tensors, epochs: Tensors, settings: dict[str, Any]) -> Tensors:
    """What else the page shows of tokens: how the update moved them, and advantages and returns of the last epoch."""
    found = {name: epochs[name][-1] for name in ("advantages", "returns") if name in epochs}
    advantages = found.get("advantages", tokens.get("advantages"))
    old = tokens["sampler_logprobs" if settings["correction"] == "bypass" else "logprobs"]
    found["ratio"] = torch.exp(tokens["new_logprobs"] - old)
    # Chapter 3's losses include those of the other chapters.
    _, found["clipped"], _ = algebra.token_losses(
        tokens["new_logprobs"],
        old,
        advantages,
        mask=tokens.get("mask", torch.ones_like(old)).bool(),
        loss=settings["loss"],
        low=settings["cliprange_low"],
        high=settings["cliprange_high"],
        dual_clip=settings["dual_clip"],
        trust_region=settings["trust_region"],
    )
    return found


# ---- What episodes share ---------------------------------------------------------------------------------------


def statistics_of(
    tokens: Tensors, epochs: Tensors, is_kept: Tensor | None, settings: dict[str, Any], ppo: dict[str, Any]
) -> Tensors:
    """Divisors of losses, means and deviations of whitening: (rows,) or (rows, epochs) under each name.

    is_kept: (rows,) bool, False for those that chapter 3 has left out whole. ppo: the arguments of that name.
    """
    rows, length = tokens["ids"].shape
    if settings["chapter"] == 1:
        # (epochs, groups, group_batch): each group's part of a minibatch is whitened by itself.
        orders = epochs["permutations"]
        _, groups, group_batch = orders.shape
        orders = orders + torch.arange(0, rows, group_batch).unsqueeze(1)
        minibatches = orders.reshape(len(orders), groups * ppo["nminibatches"], -1)
        count = torch.full(minibatches.shape[:2], ppo["batch_size"] // ppo["nminibatches"] * length)
        numbers = {"tokens": count, "values": count}
    elif settings["chapter"] == 2:
        minibatches = epochs["minibatches"]  # (epochs, nminibatches, local_minibatch)
        numbers = {"tokens": epochs["token_counts"], "values": epochs["value_counts"]}
    else:
        minibatches = epochs["minibatches"]
        names = ("tokens", "sequences", "episodes", "right_tokens")
        numbers = {name: epochs[name] for name in names if name in epochs}
        numbers["length"] = torch.full(minibatches.shape[:2], length)
    if settings["chapter"] < 3:
        numbers |= whitening(tokens, epochs, minibatches, settings)
    # The minibatch of each row: (epochs, rows).
    places = (minibatches.unsqueeze(3) == torch.arange(rows)).any(2).int().argmax(1)
    found = {name: table.gather(1, places).T for name, table in numbers.items()}
    if "raw_advantages" in tokens:  # chapter 3 whitens the whole batch
        mask = tokens["scored"].bool() & is_kept.bool().unsqueeze(1)
        of_batch = line(tokens["raw_advantages"], tokens["advantages"], mask)
        for name, number in zip(("advantage_mean", "advantage_deviation"), of_batch, strict=True):
            found[name] = number.expand(rows)
    return found


def whitening(tokens: Tensors, epochs: Tensors, minibatches: Tensor, settings: dict[str, Any]) -> Tensors:
    """Means and deviations with which rewards and advantages were whitened, of each minibatch: (epochs, number).

    minibatches: (epochs, number, rows), the rows that were whitened together.
    """
    values, rewards = tokens["values"].double(), tokens["rewards"].double()
    value_mask = tokens.get("value_mask", torch.ones_like(values)).bool()
    values = values.masked_fill(~value_mask, 0)
    mask = tokens.get("mask", value_mask).bool()  # in chapter 1, everything counts
    names = ["advantage_mean", "advantage_deviation"]
    names += ["reward_mean", "reward_deviation"] * settings["whiten_rewards"]
    found = {name: torch.zeros(minibatches.shape[:2]).double() for name in names}
    for epoch, of_epoch in enumerate(minibatches):
        returns, whitened = epochs["returns"][epoch].double(), epochs["advantages"][epoch]
        raw_advantages = returns - values
        whitened_rewards = rewards_of(returns, values, settings["gamma"], settings["lam"])
        for k, rows in enumerate(of_epoch):
            numbers = line(raw_advantages[rows], whitened[rows], mask[rows])
            if settings["whiten_rewards"]:
                numbers += line(rewards[rows], whitened_rewards[rows], value_mask[rows], keep_mean=True)
            for name, number in zip(names, numbers, strict=True):
                found[name][epoch, k] = number
    return found


def rewards_of(returns: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """The rewards of which GAE makes these returns; all (rows, response_length), and 0 after the last value."""
    advantages = returns - values
    next_advantages, next_values = (F.pad(x[:, 1:], (0, 1)) for x in (advantages, values))
    return advantages + values - gamma * (next_values + lam * next_advantages)


def line(raw: Tensor, whitened: Tensor, mask: Tensor, *, keep_mean: bool = False) -> tuple[Tensor, Tensor]:
    """Mean and deviation with which `whiten` of the scripts has made the one of the other where the mask is True.

    They may be of more rows than these, but raw is mean + deviation * whitened in all rows, a straight line, whose
    slope and intercept any rows tell. keep_mean: as of `whiten`. Unknown, and NaN, if all are the same here and not
    elsewhere.
    """
    x, y = whitened[mask].double(), raw[mask].double()
    if len(y.unique()) < 2:
        same = (x - (y if keep_mean else 0)).abs() < 0.01
        deviation = 1e-4 if same.all() else torch.nan  # the root of what `whiten` adds to the variance
        return y.mean(), y.new_tensor(deviation)
    from_mean = x - x.mean()
    deviation = (from_mean * y).sum() / (from_mean**2).sum()
    intercept = y.mean() - deviation * x.mean()
    return intercept / (1 - deviation) if keep_mean else intercept, deviation
