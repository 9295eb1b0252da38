"""Traces: a few episodes of an update with every number of every token, which report.py shows.

traces/<update>.safetensors in a run's folder holds episodes of the batch, <update>_again.safetensors responses to
queries that are the same each time. Its tensors are `tokens.<name>` (episodes, response_length), `episodes.<name>`
(episodes,), `epochs.<name>` (episodes, epochs, response_length), which is what each epoch computed before its
optimiser step, and `statistics.<name>` (episodes,) or (episodes, epochs), which is what an episode shares with
others: the KL coefficient, the mean and deviation of its group, the divisor of its loss. The texts are in the
metadata, so that a trace is read without the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.lib import files, rewards, scorers
from ppo_rlhf.lib.errors import InputError

TRACED = 8  # queries that are answered again each time


@dataclass(frozen=True)
class Trace:
    """The episodes that are kept of an update (0-based)."""

    update: int
    again: bool  # whether the queries are the same each time, and not of the batch
    queries: list[str]
    responses: list[list[str]]  # the text of each token; empty for padding
    tokens: dict[str, Tensor]  # (episodes, response_length)
    episodes: dict[str, Tensor]  # (episodes,)
    texts: dict[str, list[str]]  # more texts of each episode, such as reference answers
    epochs: dict[str, Tensor] = field(default_factory=dict)  # (episodes, epochs, response_length)
    statistics: dict[str, Tensor] = field(default_factory=dict)  # (episodes,) or (episodes, epochs)


def path_of(run_folder: Path, update: int, again: bool = False) -> Path:
    return run_folder / "traces" / f"{update}{'_again' * again}.safetensors"


def kept(run_folder: Path) -> list[tuple[int, bool]]:
    """The traces in a folder: updates in their order, each with its flag `again`."""
    names = (path.name for path in (run_folder / "traces").glob("*.safetensors"))
    found = (re.fullmatch(r"([0-9]+)(_again)?\.safetensors", name) for name in names)
    return sorted((int(match[1]), bool(match[2])) for match in found if match)


def write(run_folder: Path, trace: Trace) -> None:
    """Write to a temporary name, then rename: a reader never sees half a trace."""
    tensors = {f"tokens.{name}": tensor for name, tensor in trace.tokens.items()}
    for part in ("episodes", "epochs", "statistics"):
        tensors |= {f"{part}.{name}": tensor for name, tensor in getattr(trace, part).items()}
    texts = {"queries": trace.queries, "responses": trace.responses, "texts": trace.texts}
    path = path_of(run_folder, trace.update, trace.again)
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(copies, temporary, metadata={"texts": json.dumps(texts | {"sha256": checksum(copies, texts)})})
        files.give_usual_mode(temporary)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"the trace of update {trace.update} cannot be written ({error})") from error


def checksum(tensors: dict[str, Tensor], texts: dict[str, Any]) -> str:
    """One SHA-256 of everything in a trace."""
    digest = hashlib.sha256(json.dumps(texts).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def read(run_folder: Path, update: int, again: bool = False) -> Trace:
    """The trace of an update; an InputError if the file is damaged."""
    path = path_of(run_folder, update, again)
    parts: dict[str, dict[str, Tensor]] = {part: {} for part in ("tokens", "episodes", "epochs", "statistics")}
    try:
        with safe_open(path, "pt") as file:
            texts = json.loads(file.metadata()["texts"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dictionary
        written = texts.pop("sha256", None)  # older traces have none
        if written not in (None, checksum(tensors, texts)):
            raise ValueError("it is not what was written")
        for name, tensor in tensors.items():
            kind, column = name.split(".", 1)
            parts[kind][column] = tensor
        return Trace(update, again, **parts, **texts)
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise InputError(f"{path} is damaged ({type(error).__name__}: {error}); remove it") from error


def cut(run_folder: Path, first_update: int) -> None:
    """Remove the traces of an update and all after it, which will be made again."""
    for update, again in kept(run_folder):
        if update >= first_update:
            path_of(run_folder, update, again).unlink()


def pieces(tokenizer: PreTrainedTokenizerBase, tokens: list[int], pad_id: int) -> list[str]:
    """The text that each token adds to those before it; empty for padding.

    A character whose bytes are shared by several tokens belongs to the last of them.
    """
    found, start, whole = [], 0, 0  # a token is decoded after those from `start`; those before `whole` are shown
    for end, token in enumerate(tokens, 1):
        if token == pad_id:
            found.append("")
            start = whole = end
            continue
        before = tokenizer.decode(tokens[start:whole])
        text = tokenizer.decode(tokens[start:end])
        if text.endswith("\ufffd") and end < len(tokens):
            found.append("")
            continue
        found.append(text[len(before) :])
        start, whole = whole, end
    return found


def of_tokens(
    update: int,
    again: bool,
    tokenizer: PreTrainedTokenizerBase,
    pad_id: int,
    queries: Tensor,
    responses: Tensor,
    tokens: dict[str, Tensor],
    episodes: dict[str, Tensor],
    texts: dict[str, list[str]],
    epochs: dict[str, Tensor],
    statistics: dict[str, Tensor],
) -> Trace:
    """The trace of as many episodes as `tokens` has rows; the other arguments may have more.

    queries: (rows, context_length) and responses: (rows, response_length) token ids.
    """
    n = len(next(iter(tokens.values())))
    return Trace(
        update,
        again,
        [tokenizer.decode([token for token in row if token != pad_id]) for row in queries[:n].tolist()],
        [pieces(tokenizer, row, pad_id) for row in responses[:n].tolist()],
        {"ids": responses[:n], **tokens},
        {name: values[:n] for name, values in episodes.items()},
        {name: values[:n] for name, values in texts.items()},
        {name: values[:n] for name, values in epochs.items()},
        {name: values[:n] for name, values in statistics.items()},
    )


# ---- What the epochs of an update computed ---------------------------------------------------------------------

# Rows of the local batch, and numbers of them, (rows, ...). A training loop appends what it has anyway.
Seen = tuple[Tensor, dict[str, Tensor]]


def of_epochs(seen: list[Seen], episodes: int) -> dict[str, Tensor]:
    """The numbers of each epoch for the first rows of the local batch: (episodes, epochs, ...) under each name.

    Every epoch sees a row once, so a number's k-th appearance is that of epoch k.
    """
    found: dict[str, list[list[Tensor]]] = {}
    for rows, numbers in seen:
        for name, tensor in numbers.items():
            of_rows = found.setdefault(name, [[] for _ in range(episodes)])
            for place, row in enumerate(rows.flatten().tolist()):
                if row < episodes:
                    of_rows[row].append(tensor.flatten(0, rows.dim() - 1)[place].detach())
    return {name: torch.stack([torch.stack(of_row) for of_row in of_rows]) for name, of_rows in found.items()}


def moments(values: Tensor, mask: Tensor, reduce: Callable[[Tensor], Tensor] = torch.clone) -> tuple[Tensor, Tensor]:
    """Mean and deviation with which `whiten` of the scripts scales values where the mask is True: two 0-d tensors."""
    count, values = reduce(mask.sum()).clamp(min=1), values.double().masked_fill(~mask, 0)
    mean = reduce(values.sum()) / count
    variance = reduce(((values - mean).masked_fill(~mask, 0) ** 2).sum()) / count
    return mean, (variance + 1e-8).sqrt()


def statistics_of_minibatches(
    seen: list[Seen],
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    value_mask: Tensor,
    reduce: Callable[[Tensor], Tensor] = torch.clone,
) -> list[Seen]:
    """Mean and deviation with which each minibatch was whitened, and how many tokens and values count in it.

    The tensors are those of the local batch, (local_batch, response_length). reduce: sums over all processes.
    """
    found = []
    for rows, numbers in seen:
        if "returns" in numbers:
            of_rewards = moments(rewards[rows], value_mask[rows], reduce)
            of_advantages = moments(numbers["returns"] - values[rows], mask[rows], reduce)
            told = dict(zip(("reward_mean", "reward_deviation"), of_rewards, strict=True))
            told |= dict(zip(("advantage_mean", "advantage_deviation"), of_advantages, strict=True))
            told |= {"tokens": reduce(mask[rows].sum()), "values": reduce(value_mask[rows].sum())}
            found.append((rows, {name: x.expand(rows.shape) for name, x in told.items()}))
    return found


# ---- What the scripts share -----------------------------------------------------------------------------------


def scorer_of_traces(score: scorers.Scorer, function: str) -> scorers.Scorer:
    """The scorer for responses that only a trace shows: `score`, or one that says NaN where that calls a user's code.

    Such a function may count its calls or draw random numbers, and a trace must not change a run's scores.
    """
    return score if rewards.keeps_nothing(function) else lambda queries, *_: torch.full((len(queries),), math.nan)


def after_update(
    logprobs: Tensor, new_logprobs: Tensor, entropies: Tensor, advantages: Tensor, cliprange: float
) -> dict[str, Tensor]:
    """The effect of the update on tokens; all are (episodes, response_length)."""
    ratio = torch.exp(new_logprobs - logprobs)
    clipped = advantages * (ratio.clamp(1 - cliprange, 1 + cliprange) - ratio) < 0
    return {"new_logprobs": new_logprobs, "entropies": entropies, "ratio": ratio, "clipped": clipped}
