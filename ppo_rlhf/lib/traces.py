"""Traces of chapters 2 and 3: a few episodes of an update with every number of every token, which report/ shows.

traces/<update>.safetensors in a run's folder holds episodes of the batch, <update>_again.safetensors responses to
queries that are the same each time. Its tensors are `tokens.<name>` (episodes, response_length), `episodes.<name>`
(episodes,), `epochs.<name>` (episodes, epochs, response_length), which is what each epoch computed before its
optimiser step, and `statistics.<name>` (episodes,) or (episodes, epochs), which is what an episode shares with
others: the KL coefficient, the mean and deviation of its group, the divisor of its loss. The texts are in the
metadata, so that a trace is read without the tokenizer. A run without a reference has no `ref_logprobs` and no `kl`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.lib import processes
from ppo_rlhf.lib.errors import InputError

TRACED = 8  # queries that are answered again each time
PARTS = ("tokens", "episodes", "epochs", "statistics")  # of a Trace, with tensors by name


@dataclass(frozen=True, kw_only=True)
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


def write(run_folder: Path, trace: Trace) -> None:
    """Write to a temporary name, then rename: a reader never sees half a trace."""
    tensors = {f"{part}.{name}": tensor for part in PARTS for name, tensor in getattr(trace, part).items()}
    texts = {"queries": trace.queries, "responses": trace.responses, "texts": trace.texts}
    path = path_of(run_folder, trace.update, trace.again)
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(copies, temporary, metadata={"texts": json.dumps(texts)})
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"the trace of update {trace.update} cannot be written ({error})") from error


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
    count, values = reduce(mask.sum()).clamp(min=1), processes.widened(values).masked_fill(~mask, 0)
    mean = reduce(values.sum()) / count
    variance = reduce(((values - mean).masked_fill(~mask, 0) ** 2).sum()) / count
    return mean, (variance + 1e-8).sqrt()


def of_passes(
    seen: list[Seen], numbers: Mapping[str, Any], episodes: int, accelerator: Accelerator
) -> dict[str, Tensor]:
    """What the passes of an update computed for the first episodes, and what these share with others of a minibatch.

    numbers: of the whole local batch, as `keep` takes them. Every process must call this.
    """
    found = {}
    for name, tensor in of_epochs([*seen, *statistics(seen, numbers, accelerator)], episodes).items():
        found[f"{'epochs' if tensor.dim() > 2 else 'statistics'}.{name}"] = tensor
    return found


def statistics(seen: list[Seen], batch: Mapping[str, Any], accelerator: Accelerator) -> list[Seen]:
    """Mean and deviation with which each minibatch was whitened, and how many tokens and values count in it.

    The rows of a minibatch are (local_minibatch,) where all of it is whitened together, and (groups, rows) where
    each group is by itself; of groups, the first is kept.
    """
    everything, found = torch.ones_like(batch["logprobs"], dtype=torch.bool), []
    mask, value_mask = batch.get("mask", everything), batch.get("value_mask", everything)
    total = partial(accelerator.reduce, reduction="sum")
    for rows, numbers in seen:
        if "returns" not in numbers:
            continue
        counts = {"tokens": total(mask[rows].sum()), "values": total(value_mask[rows].sum())}
        returns, reduce = numbers["returns"], total
        if rows.dim() > 1:
            rows, returns, reduce = rows[0], returns[0], torch.clone
        of_rewards = moments(batch["rewards"][rows], value_mask[rows], reduce)
        of_advantages = moments(returns - batch["values"][rows], mask[rows], reduce)
        of_all = dict(zip(("reward_mean", "reward_deviation"), of_rewards, strict=True)) | counts
        of_all |= dict(zip(("advantage_mean", "advantage_deviation"), of_advantages, strict=True))
        found.append((rows, {name: x.expand(rows.shape) for name, x in of_all.items()}))
    return found


# ---- What a script keeps ---------------------------------------------------------------------------------------

# Numbers of tokens that a trace keeps. `scored` says what was scored, `mask` and `value_mask` what the losses count;
# without them, everything.
KEPT = {"scored", "mask", "value_mask", "tool", "logprobs", "sampler_logprobs", "ref_logprobs", "new_logprobs"}
KEPT |= {"kl", "exact_kl", "rewards", "values", "new_values", "advantages", "returns", "weights"}
KEPT |= {"entropies", "ratio", "clipped"}


def keep(
    run: Any,
    update: int,
    numbers: Mapping[str, Any],
    *,
    episodes: int,
    tokenizer: PreTrainedTokenizerBase,
    pad_id: int,
    texts: dict[str, list[str]] | None = None,
    again: bool = False,
) -> None:
    """Write the first episodes of an update, on the main process. run: a Run of run.py.

    again: whether their queries are the same each time. texts: more texts of these episodes, such as reference
    answers. numbers, of at least so many rows, by name:

        query_responses              token ids (rows, context_length + response_length)
        the names of KEPT            numbers of tokens (rows, response_length)
        any name, (rows,)            numbers of episodes, such as scores and stopped
        any name, a dictionary       of more numbers of episodes
        a name with a dot            a tensor under its name in the file, such as statistics.kept

    Nothing else is kept.
    """
    if not run.is_main:
        return
    parts: dict[str, dict[str, Tensor]] = {part: {} for part in PARTS}
    for name, value in numbers.items():
        if isinstance(value, dict):
            parts["episodes"] |= value
        elif "." in name:
            kind, column = name.split(".", 1)
            parts[kind][column] = value
        elif isinstance(value, Tensor) and value.dim() == 1:
            parts["episodes"][name] = value
        elif name in KEPT:
            parts["tokens"][name] = value
    response_length = numbers["logprobs"].shape[1]
    queries, responses = numbers["query_responses"][:episodes].tensor_split([-response_length], dim=1)
    parts["tokens"]["ids"] = responses
    trace = Trace(
        update=update,
        again=again,
        queries=[tokenizer.decode([token for token in row if token != pad_id]) for row in queries.tolist()],
        responses=[pieces(tokenizer, row, pad_id) for row in responses.tolist()],
        texts=texts or {},
        **{part: {name: values[:episodes] for name, values in of_part.items()} for part, of_part in parts.items()},
    )
    write(run.folder, trace)


# ---- What the scripts share -----------------------------------------------------------------------------------


def scorer_of_traces(score: Callable[..., Tensor], function: str) -> Callable[..., Tensor]:
    """The scorer for responses that only a trace shows: `score`, or one that says NaN where that calls a user's code.

    function: what `score` calls, package.module:name, or an empty text. A function of the user's may count its calls
    or draw random numbers, and a trace must not change a run's scores. Those of this package keep nothing.
    """
    if not function or function.startswith("ppo_rlhf."):
        return score
    return lambda queries, *_: torch.full((len(queries),), math.nan, device=queries.device)
