"""Apply a function to rows of similar length, so that a model reads little padding.

A pass is one call of a model: rows of similar length, in as few columns as the longest of them needs. Which rows come
together changes memory and speed, and numbers only by rounding. packing.py goes further for wide models: it lets
them read the rows of a pass without any padding.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ppo_rlhf.lib.nets import memory

limit = memory.limit_passes  # which the scripts find here


def few_rows_at_a_time(function: Callable, rows: int, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Apply a function to so many rows at a time and join the tensors that it returns: the same in less memory."""
    results = [function(*parts) for parts in zip(*(tensor.split(rows) for tensor in tensors), strict=True)]
    if isinstance(results[0], Tensor):
        return torch.cat(results)
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


def by_length(
    function: Callable,
    model: nn.Module,
    tokens: Tensor,
    *others: Tensor,
    pad_id: int,
    rows: int = 0,
    most_tokens: int = 0,
    new_tokens: int = 0,
    **settings,
) -> Tensor | tuple[Tensor, ...]:
    """Call function(model, tokens, *others, pad_id=..., **settings) on a few rows of similar length at a time.

    tokens: (batch, length) token ids with padding anywhere; the function gets them packed, in fewer columns. others:
    tensors with a row for each row of tokens. rows, most_tokens: of a pass, at most; 0: as many as are fast and fit.
    new_tokens: how many the function appends to each row, if it generates. Returns what the function returns, a
    tensor or several, with the rows in the order in which they were given.
    """
    lengths = count_tokens(tokens, pad_id) + new_tokens  # (batch,)
    shared = find_shared(model, tokens, tokens != pad_id)
    plan = plan_passes(lengths, model, rows, most_tokens, uses=max(1, new_tokens), shared=shared)

    def call(tokens: Tensor, *others_and_longest: Tensor | int) -> Tensor | tuple[Tensor, ...]:
        *others, longest = others_and_longest
        return function(model, pack(tokens, pad_id, longest - new_tokens), *others, pad_id=pad_id, **settings)

    return in_passes(call, plan, tokens, *others)


def count_tokens(tokens: Tensor, pad_id: int) -> Tensor:
    """How many tokens of each row (batch, length) are not padding: (batch,), on the CPU. Waits for the device."""
    return (tokens != pad_id).sum(1).cpu()


def micro_batches(
    model: nn.Module,
    lengths: Tensor,
    tokens: Tensor,
    *others: Tensor,
    pad_id: int,
    rows: int = 0,
    most_tokens: int = 0,
) -> Iterator[tuple[Tensor, ...]]:
    """Divide a minibatch into passes: yields the packed tokens of each pass, and its rows of the other tensors.

    tokens: (minibatch, length) token ids. lengths: as count_tokens gives them (minibatch,). rows, most_tokens: of a
    pass, at most; 0: as many as are fast and fit.
    """
    shared = find_shared(model, tokens, tokens != pad_id)
    for one in plan_passes(lengths, model, rows, most_tokens, shared=shared):
        yield pack(tokens[one.rows], pad_id, one.longest), *(tensor[one.rows] for tensor in others)


def pack(tokens: Tensor, pad_id: int, longest: int) -> Tensor:
    """The same rows in as few columns as the longest of them needs, their padding on the left.

    tokens: (batch, length). With longest 3, [[5, P, 6, P], [7, 8, P, 9]] gives [[P, 5, 6], [7, 8, 9]].
    """
    if longest >= tokens.shape[1]:
        return tokens
    order = (tokens != pad_id).int().argsort(dim=1, stable=True)  # padding first
    return tokens.gather(1, order)[:, -longest:]


# ---- The plan --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pass:
    rows: Tensor  # indices, on the CPU
    longest: int  # tokens of the longest of these rows


def plan_passes(
    lengths: Tensor, model: nn.Module, rows: int = 0, tokens: int = 0, uses: int = 1, shared: tuple | None = None
) -> list[Pass]:
    """Divide rows into passes of similar length, the longest first, or into passes of rows that begin alike.

    lengths: tokens of each row (rows,), on the CPU. rows, tokens: how many a pass has at most, padding included; with
    neither, there are as many passes as pay, and one where no padding is read. A pass that would hold more than
    memory.budget is divided further. model: what reads them. uses: how often it is called in a pass, for each token
    if it generates. shared: from find_shared.
    """
    order = shared[1] if shared else lengths.argsort(descending=True, stable=True)
    ordered, count = lengths[order].tolist(), len(lengths)
    if not count:
        return []
    if tokens:
        starts = starts_within(ordered, tokens, rows)
    elif rows:
        starts = list(range(0, count, rows))
    elif shared or is_packed(model):
        starts = [0]
    else:
        starts = starts_that_pay(ordered, uses * cost_of_pass(model))
    if torch.is_grad_enabled():
        most = memory.tokens_that_fit(model, memory.budget, "training")
    else:
        most = memory.tokens_that_fit(model, memory.budget / 2, "reading")  # the other half is for a cache
    parts = pairwise([*starts, count])
    starts = [start + place for start, end in parts for place in starts_within(ordered[start:end], most)]
    plan = list(order.tensor_split(starts[1:]))
    return [Pass(rows=rows, longest=max(lengths[rows].tolist())) for rows in plan]


def is_packed(model: nn.Module, how: str = "is_packed") -> bool:
    """Whether lib/nets/packing.py was applied to this language model, or to all that are part of this network.

    how: is_packed, or shares_prefixes.
    """
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel) and part is part.base_model]
    return bool(parts) and all(getattr(part, how, False) for part in parts)


MOST_LEFT = 0.8  # of all tokens. If fewer are repeated, reading them once saves no more than its copies cost.
UNFIT: set[type] = set()  # models that were seen to read shared prefixes in another way


def find_shared(model: nn.Module, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor] | None:
    """The prefix_tree of rows (batch, length), if the model shares prefixes and enough of the real tokens repeat."""
    if not is_packed(model, "shares_prefixes") or UNFIT.intersection(map(type, model.modules())) or not len(tokens):
        return None
    ids = tokens.masked_fill(~mask, -1).cpu()
    numbers, order = prefix_tree(ids.gather(1, (ids < 0).int().argsort(dim=1, stable=True)))
    return (numbers, order) if numbers.max() + 1 <= MOST_LEFT * (ids >= 0).sum() else None


def prefix_tree(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Number tokens so that two have the same number if they, and all tokens before them in their rows, are equal.

    ids: (rows, length), -1 for padding, at the end. Returns the numbers (rows, length), -1 for padding, and an order
    of the rows that keeps equal beginnings together. [[5, 6, 7], [5, 6, 8]] gives [[0, 1, 2], [0, 1, 3]].
    """
    order = ids.unique(dim=0, return_inverse=True)[1].argsort(stable=True)
    ordered = ids[order]
    repeated = (ordered[1:] == ordered[:-1]).cumprod(1).bool()  # from the row above
    new = F.pad(~repeated, (0, 0, 1, 0), value=True) & (ordered >= 0)
    first = torch.arange(len(ids)).unsqueeze(1).where(new, 0).cummax(0).values  # in which row a token was new
    numbers = (new.flatten().cumsum(0) - 1).view_as(new).gather(0, first).masked_fill(ordered < 0, -1)
    return numbers[order.argsort()], order


def starts_within(ordered: list[int], tokens: float, rows: int = 0) -> list[int]:
    """Where to divide rows, so that a pass has at most so many rows and tokens, or is a single row that is longer.

    ordered: tokens of each row. Masks and hidden states are padded, so padding counts. rows: 0 for any number.
    """
    starts, longest = [0], 0
    for row, length in enumerate(ordered):
        longest, size = max(longest, length), row - starts[-1]  # of the pass so far
        if size and (size == rows or (size + 1) * longest > tokens):
            starts.append(row)
            longest = length
    return starts


# A pass costs more than its tokens: weights are read and kernels are launched, however few tokens there are. The
# smaller the model, the more tokens it could read while kernels are launched. The GPU's numbers are estimates.
COST_OF_WEIGHTS = {"cpu": 96, "cuda": 512}  # tokens
COST_OF_LAUNCHES = {"cpu": 10**8, "cuda": 2 * 10**11}  # tokens times parameters


def cost_of_pass(model: nn.Module) -> int:
    """The cost of a pass of a model in addition to its tokens, in tokens."""
    parameters = list(model.parameters())
    kind = "cpu" if parameters[0].device.type == "cpu" else "cuda"
    return COST_OF_WEIGHTS[kind] + COST_OF_LAUNCHES[kind] // sum(parameter.numel() for parameter in parameters)


def starts_that_pay(ordered: list[int], cost: int) -> list[int]:
    """Where to divide rows, the longest first, so that tokens, padding included, and passes together cost least.

    ordered: tokens of each row. A pass begins where the length changes. The cheapest division up to a place is the
    cheapest one up to the beginning of its last pass, and that pass.
    """
    places = [i for i in range(len(ordered)) if i == 0 or ordered[i] != ordered[i - 1]] + [len(ordered)]
    cheapest, last = [0], [0]  # for the rows before each place: the cost, and the place where the last pass begins
    for end in range(1, len(places)):
        costs = [cheapest[k] + ordered[places[k]] * (places[end] - places[k]) + cost for k in range(end)]
        cheapest.append(min(costs))
        last.append(costs.index(cheapest[end]))
    starts, place = [], len(places) - 1
    while place:
        place = last[place]
        starts.append(places[place])
    return starts[::-1]


# ---- Apply a function ------------------------------------------------------------------------------------------


def in_passes(function: Callable, plan: list[Pass], *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Apply a function to the rows of each pass, and put the rows of the tensors that it returns back in order.

    function: (rows of each tensor, longest) -> a tensor or several, with a row for each row. A named tuple stays one.
    """
    back = torch.cat([one.rows for one in plan]).argsort()
    results = [function(*(tensor[one.rows] for tensor in tensors), one.longest) for one in plan]
    if isinstance(results[0], Tensor):
        return torch.cat(results)[back]
    make = getattr(results[0], "_make", tuple)
    return make(torch.cat(parts)[back] for parts in zip(*results, strict=True))


def few_logits_at_a_time(function: Callable, numbers: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Apply a function to a batch, a few rows at a time if it holds many numbers for each row, as for logits.

    numbers: how many, for each row. Tensors and what the function returns have the same rows. If the batch is
    divided, the backward pass computes each part again, so that only the numbers of one part are ever held.
    """
    rows = max(1, memory.MOST_LOGITS // max(1, numbers))
    if rows >= len(tensors[0]):
        return function(*tensors)
    parts = zip(*(tensor.split(rows) for tensor in tensors), strict=True)
    results = [checkpoint(function, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))
