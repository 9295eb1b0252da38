"""How models read rows of tokens: a few rows of similar length at a time, and without padding.

A pass is one call of a model: rows of similar length, in as few columns as the longest of them needs. Which rows come
together changes memory and speed, and numbers only by rounding.

Sequence packing goes further: a model reads the real tokens of a batch one after the other, without any padding.
Embeddings, matrix products and norms see one line of tokens. Attention sees rows again, a few of similar length at a
time, because it must know where a row ends. So unequal lengths cost only what is small compared with a model's matrix
products. In chapters 2 and 3, `enable` follows where a model is loaded, and the second half of this file can be
skipped. Chapter 1 does without packing: there the code on the page is the code that runs.

A packed model is called as before, with rows, their padding and a mask of four dimensions. One hook of PyTorch's
replaces the rows by their line before the call, another one puts hidden states back into rows after it, and an
attention that is registered with the library does the rest. The hidden states at real tokens and in the last column
are the same; nobody looks at those of other padding. Other calls, such as those with one new token for each row,
reach the library's model as they are.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_outputs import BaseModelOutputWithPast

from ppo_rlhf.train_policy import InputError, KeyValueCache, read_tokens, scaled_logits

NAME = "sdpa_unpadded"  # the name of the attention here, among the library's
TRIED = ("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3")  # by the tests
# Cutting rows out costs copies, which grow with the width; it saves matrix products, which grow with its square.
# On a CPU it pays with GPT-2 (768 wide), and does not with the small models of the worlds (128).
LEAST_WIDTH = 512
# The cost of another pass, and of another group for attention, in tokens of padding: weights are read and kernels
# are launched, however few tokens there are. On a CPU, groups for each length were fastest with 32 rows of GPT-2's
# shape and 8 of Pythia 160M's. The GPU's numbers are estimates.
COST_OF_PASS = {"cpu": 250, "cuda": 4096}
COST_OF_GROUP = {"cpu": 0, "cuda": 4096}
MOST_LEFT = 0.8  # share of all tokens. If fewer are repeated, reading them once saves no more than its copies cost.
MOST_LOGITS = 2**28  # numbers that are held at a time: in float32, a gigabyte


# ---- A few rows at a time --------------------------------------------------------------------------------------


def by_length(
    function: Callable,
    tokens: Tensor,
    *others: Tensor,
    model: nn.Module,
    pad_id: int,
    rows: int = 0,
    new_tokens: int = 0,
) -> Tensor | tuple[Tensor, ...]:
    """Call function(tokens, *others) on a few rows of similar length at a time.

    tokens: (batch, length) token ids with padding anywhere; the function gets them in as few columns as the longest
    of its rows needs, their padding on the left. others: tensors with a row for each row of tokens. model: what reads
    the tokens, because some read no padding. rows: of a pass, at most; 0: any number. new_tokens: how many the
    function appends to each row, if it generates. Returns what the function returns, a tensor or several, with the
    rows in the order in which they were given.
    """
    lengths = count_tokens(tokens, pad_id) + new_tokens  # (batch,)
    shared = find_shared(model, tokens, tokens != pad_id)
    plan = plan_passes(lengths, model, rows, uses=max(1, new_tokens), shared=shared)

    def call(tokens: Tensor, *others_and_longest: Tensor | int) -> Tensor | tuple[Tensor, ...]:
        *others, longest = others_and_longest
        return function(pack(tokens, pad_id, longest - new_tokens), *others)

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
    rows: int,
) -> Iterator[tuple[Tensor, ...]]:
    """Divide a minibatch into passes: yields the packed tokens of each pass, and its rows of the other tensors.

    tokens: (minibatch, length) token ids. lengths: as count_tokens gives them (minibatch,). rows: of a pass, at most.
    """
    shared = find_shared(model, tokens, tokens != pad_id)
    for one in plan_passes(lengths, model, rows, shared=shared):
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
    lengths: Tensor, model: nn.Module, rows: int = 0, *, uses: int = 1, shared: tuple[Tensor, Tensor] | None = None
) -> list[Pass]:
    """Divide rows into passes of similar length, the longest first, or into passes of rows that begin alike.

    lengths: tokens of each row (rows,), on the CPU. model: what reads them. rows: of a pass, at most; 0: any number.
    uses: how often the model is called in a pass, for each token if it generates. shared: from find_shared.
    """
    if not len(lengths):
        return []
    order = shared[1] if shared else lengths.argsort(descending=True, stable=True)
    # Where no padding is read, only `rows` divides.
    cost = math.inf if shared or is_packed(model) else uses * COST_OF_PASS[kind_of(next(model.parameters()).device)]
    starts = starts_that_pay(lengths[order].tolist(), cost, rows or len(order))
    return [
        Pass(rows=rows_of_pass, longest=int(lengths[rows_of_pass].max()))
        for rows_of_pass in order.tensor_split(starts[1:])
    ]


def starts_that_pay(ordered: list[int], cost: float, rows: int) -> list[int]:
    """Where to divide rows, the longest first: after so many, or where one more would make the padding cost more than
    another pass.

    ordered: tokens of each row. cost: of a pass, in tokens.
    """
    starts, padding = [0], 0
    for row, length in enumerate(ordered):
        padding += ordered[starts[-1]] - length
        if padding > cost or row - starts[-1] == rows:
            starts.append(row)
            padding = 0
    return starts


def kind_of(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else "cuda"


def is_packed(model: nn.Module, how: str = "is_packed") -> bool:
    """Whether `enable` was applied to this language model, or to all that are part of this network.

    how: is_packed, or shares_prefixes.
    """
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel) and part is part.base_model]
    return bool(parts) and all(getattr(part, how, False) for part in parts)


def find_shared(model: nn.Module, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor] | None:
    """The prefix_tree of rows (batch, length), if the model shares prefixes and enough of the real tokens repeat."""
    if not is_packed(model, "shares_prefixes") or not len(tokens):
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
    rows = max(1, MOST_LOGITS // max(1, numbers))
    if rows >= len(tensors[0]):
        return function(*tensors)
    parts = zip(*(tensor.split(rows) for tensor in tensors), strict=True)
    results = [checkpoint(function, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


# ---- Packing ---------------------------------------------------------------------------------------------------


def enable(*models: PreTrainedModel, share_prefixes: bool = False) -> None:
    """Let models read packed rows from now on, each if its architecture was tried and it is wide enough.

    share_prefixes: whether what several rows begin with is read once for all of them; also by narrow models.
    """
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    for model in models:
        config, backbone = model.config, model.base_model
        tried = config.model_type in TRIED and type(model).__module__.startswith("transformers.")
        wide = getattr(config, "hidden_size", 0) >= LEAST_WIDTH
        if tried and config._attn_implementation in ("sdpa", NAME) and (wide or share_prefixes):
            model.set_attn_implementation(NAME)
            if not hasattr(backbone, "is_packed"):
                backbone.register_forward_pre_hook(rows_to_line, with_kwargs=True)
                backbone.register_forward_hook(line_to_rows, with_kwargs=True)
            backbone.is_packed, backbone.shares_prefixes = wide, share_prefixes


@torch.no_grad()
def check_shared_prefixes(model: PreTrainedModel, length: int, pad_id: int) -> None:
    """Raise an InputError if a causal language model shares prefixes, but reads such rows otherwise than alone.

    length: tokens of the rows with which this is tried.
    """
    if is_packed(model, "shares_prefixes"):  # two rows, of which the first half is read once
        tokens = (torch.arange(length, device=model.device) % pad_id).unsqueeze(0)
        second_half = torch.arange(length, device=model.device) >= length // 2
        rows = torch.cat([tokens, tokens.roll(length // 4, 1).where(second_half, tokens)])  # (2, length)
        logits = scaled_logits(model, read_tokens(model, rows, pad_id, slice(None)), pad_id, temperature=1.0)
        expected = model(rows).logits[..., :pad_id]
        difference = (logits - expected).square().mean(2).sqrt()  # (2, length)
        if (difference > 1e-3 * expected.std(2, correction=0)).any():
            raise InputError(
                "--ppo.share_prefixes: the model gives other logits when what two rows begin with is read once; "
                "--ppo.no-share_prefixes reads each row by itself"
            )


def rows_to_line(
    backbone: PreTrainedModel, inputs: tuple, options: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    """Before a call of a packed model with rows, put their tokens one after the other, in a line.

    None if the call stays as it is. A mask of numbers is taken for one of `causal_mask`. An empty cache gets the keys
    and values of the real tokens, in their columns. Ids and positions of padding are never read. With shared
    prefixes, the line has tokens that are repeated only once: of a group of responses [prompt, response 1, ...,
    response n]. Positions start again after the prompt, and attention gets whole rows.
    """
    if inputs or not reads_rows(**options):
        return None
    input_ids, position_ids, cache = options["input_ids"], options["position_ids"], options.get("past_key_values")
    device, (batch, length) = input_ids.device, input_ids.shape
    # The last position of a row sees all real tokens, and itself. So it is read, even if it is padding.
    mask = options["attention_mask"][:, 0, -1, :length] == 0  # (batch, length)
    shared = find_shared(backbone, input_ids, mask) if cache is None else None
    if not shared and not backbone.is_packed:
        return None
    real = mask.cpu()  # waits for the device, because what is computed depends on the lengths of rows
    lengths, order = real.sum(1).sort(descending=True, stable=True)
    rows, columns = real[order].nonzero(as_tuple=True)  # of each token in the line: (tokens,)
    rows, numbers, first = order[rows], torch.arange(len(rows)), slice(None)
    if shared:
        # [V120] What follows a token changes nothing about it. So repetitions of a token get one place in the line.
        numbers = shared[0][order][torch.arange(length) < lengths.unsqueeze(1)]  # (rows' tokens,)
        first = torch.from_numpy(np.unique(numbers, return_index=True)[1])  # (the line's tokens,)
    tokens = len(numbers[first])
    # One more token at the end of the line represents all padding. It sees only itself.
    stand_in = [1] if len(rows) < batch * length else []  # its length
    places = torch.full((batch, length), tokens).index_put((rows, columns), numbers)
    line_and_rows = ((numbers, tokens), (first, len(rows)))
    repeats = shared and [F.pad(x, (0, len(stand_in)), value=end).to(device) for x, end in line_and_rows]
    rows, columns = rows[first].to(device), columns[first].to(device)
    line = [F.pad(numbers[rows, columns], (0, len(stand_in))).unsqueeze(0) for numbers in (input_ids, position_ids)]
    return (), {
        "input_ids": line[0],
        "position_ids": line[1],
        "attention_mask": input_ids.new_zeros(1, 1, 1, 1),  # or the library would make one
        "past_key_values": None if cache is None else LineCache(cache, batch, length, rows, columns),
        "use_cache": cache is not None,
        "row_groups": plan_groups([*lengths.tolist(), *stand_in], device),  # these two for `attention`
        "repeats": repeats,
        "places": places.to(device),  # in the line of each token of the rows, for line_to_rows: (batch, length)
    }


def line_to_rows(
    backbone: PreTrainedModel, inputs: tuple, options: dict[str, Any], output: BaseModelOutputWithPast
) -> BaseModelOutputWithPast | None:
    """After such a call, put hidden states back into rows: (batch, length, width)."""
    places = options.get("places")
    if places is None:
        return None
    line = output.last_hidden_state[0]  # (the line's tokens, width)
    return BaseModelOutputWithPast(line.index_select(0, places.flatten()).unflatten(0, places.shape))


def reads_rows(
    input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None, **more
) -> bool:
    """Whether a model is called with rows, as the scripts call it, and with an empty cache or with none."""
    if more or input_ids is None or attention_mask is None or position_ids is None:
        return False
    batch, length = input_ids.shape
    mask_fits = attention_mask.is_floating_point() and attention_mask.shape[:3] == (batch, 1, length)
    is_empty = isinstance(past_key_values, KeyValueCache) and not past_key_values.is_initialized
    cache_fits = is_empty or (past_key_values is None and use_cache is False)
    return mask_fits and cache_fits and position_ids.shape == input_ids.shape


class LineCache:
    """Puts the keys and values of a line's tokens into their places in the cache of a batch."""

    def __init__(self, cache: KeyValueCache, batch: int, length: int, rows: Tensor, columns: Tensor):
        """rows, columns: of each token (tokens,) in the batch, whose next token comes to column `length`."""
        self.cache, self.batch, self.length = cache, batch, length
        self.tokens, self.places = len(rows), (rows, slice(None), columns)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_, **__) -> tuple[Tensor, Tensor]:
        """keys, values: (1, heads, a line's tokens, head width). They are all that attention sees, and come back."""
        layer = self.cache.layers[layer_idx]
        keys = keys.to(values.dtype)
        layer.lazy_initialization(*(states[:, :, :1].expand(self.batch, -1, -1, -1) for states in (keys, values)))
        layer.keys[self.places] = keys[0, :, : self.tokens].transpose(0, 1)
        layer.values[self.places] = values[0, :, : self.tokens].transpose(0, 1)
        layer.cumulative_length.fill_(self.length)
        return keys, values


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows that attention sees together, padded on the right, where a causal mask hides it."""

    rows: int
    longest: int
    tokens: int
    from_line: Tensor | None  # (rows * longest,): which of the group's tokens is there; None: there is no padding
    to_line: Tensor | None  # (tokens,): the place of each token


def plan_groups(lengths: list[int], device: torch.device) -> list[Group]:
    """Divide rows, the longest first, into groups. lengths: tokens of each row."""
    groups = []
    starts = starts_that_pay(lengths, COST_OF_GROUP[kind_of(device)], len(lengths))
    for start, end in pairwise([*starts, len(lengths)]):
        own = torch.tensor(lengths[start:end])
        rows, longest, tokens = len(own), lengths[start], int(own.sum())
        from_line = to_line = None
        if tokens < rows * longest:
            to_line = (torch.arange(longest) < own.unsqueeze(1)).flatten().nonzero()[:, 0]
            # Padding is hidden, so it may hold any of the tokens.
            from_line = (torch.arange(rows * longest) % tokens).index_copy(0, to_line, torch.arange(tokens))
            from_line, to_line = from_line.to(device), to_line.to(device)
        groups.append(Group(rows=rows, longest=longest, tokens=tokens, from_line=from_line, to_line=to_line))
    return groups


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    row_groups: list[Group] | None = None,
    repeats: list[Tensor] | None = None,
    **settings,
) -> tuple[Tensor, None]:
    """The library's attention. With groups, each group attends to itself only. With repeats, the line lacks what the
    groups repeat: the first tensor puts this into it, and the second one takes it out again.

    query, key, value: (1, heads, tokens, head width), the groups' tokens one after the other; key and value may have
    fewer heads. Returns (1, tokens, heads, head width). There is no dropout, which `load_pretrained` sets to 0.
    """
    if row_groups is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    if key.shape[1] < query.shape[1]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    if repeats:  # tokens are copied whole, with all heads
        query, key, value = (
            x.transpose(1, 2).index_select(1, repeats[0]).transpose(1, 2) for x in (query, key, value)
        )
    outputs, sizes = [], [group.tokens for group in row_groups]
    line = [states[0].split(sizes, dim=1) for states in (query, key, value)]
    for group, *parts in zip(row_groups, *line, strict=True):  # parts: three of (heads, tokens, head width)
        if group.from_line is not None:
            parts = [states.index_select(1, group.from_line) for states in parts]
        rows = [states.unflatten(1, (group.rows, group.longest)).transpose(0, 1) for states in parts]
        output = F.scaled_dot_product_attention(*rows, is_causal=True, scale=settings["scaling"])
        padded = output.transpose(1, 2).flatten(0, 1)  # (rows * longest, heads, head width)
        outputs.append(padded if group.to_line is None else padded.index_select(0, group.to_line))
    output = torch.cat(outputs)
    return (output.index_select(0, repeats[1]) if repeats else output).unsqueeze(0), None
