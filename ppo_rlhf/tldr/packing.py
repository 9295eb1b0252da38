"""Sequence packing: a model reads the real tokens of a batch one after the other, without any padding.

Embeddings, matrix products and norms see one line of tokens. Attention sees rows again, a few of similar length at a
time, because it must know where a row ends. So unequal lengths cost only what is small compared with a model's matrix
products. In chapters 2 and 3, `packing.enable` follows where a model is loaded. Chapter 1 does without packing: there
the code on the page is the code that runs.

A packed model is called as before, with rows, their padding and a mask of four dimensions. Its hidden states at real
tokens and in the last column are the same; nobody looks at those of other padding. All other calls, such as those
with one new token for each row, reach the library's own method.
"""

from dataclasses import dataclass
from itertools import pairwise
from types import MethodType

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_outputs import BaseModelOutputWithPast

from ppo_rlhf.lib.base import precision
from ppo_rlhf.tldr import passes

NAME = "sdpa_unpadded"  # of the attention here, among the library's
TRIED = ("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3")  # by the tests
# Cutting rows out costs copies, which grow with the width; it saves matrix products, which grow with its square.
# On a CPU it pays with GPT-2 (768 wide), and does not with the small models of the worlds (128).
LEAST_WIDTH = 512
# The cost of a group for attention, in tokens of padding. On a CPU 0 was fastest with 32 rows of GPT-2's
# shape and 8 of Pythia 160M's. The GPU's number is an estimate.
COST_OF_GROUP = {"cpu": 0, "cuda": 4096}


def enable(*models: PreTrainedModel, share_prefixes: bool = False) -> None:
    """Let models read packed rows from now on, each if its architecture was tried and it is wide enough.

    share_prefixes: whether what several rows begin with is read once for all of them; also by narrow models. To be
    called before a model is sharded.
    """
    for model in models:
        config, backbone = model.config, model.base_model
        tried = config.model_type in TRIED and type(model).__module__.startswith("transformers.")
        wide = getattr(config, "hidden_size", 0) >= LEAST_WIDTH
        fits = tried and config._attn_implementation in ("sdpa", NAME)
        if fits and (wide or share_prefixes):
            for part in backbone.modules():
                if hasattr(part, "config"):  # the layers of a loaded model have another one than the model
                    part.config._attn_implementation = NAME
            backbone.is_packed, backbone.shares_prefixes = wide, share_prefixes
            backbone.forward = MethodType(forward, backbone)


def forward(
    backbone: PreTrainedModel,
    input_ids: Tensor | None = None,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: precision.KeyValueCache | None = None,
    **options,
) -> BaseModelOutputWithPast:
    """Replaces a packed model's own method. It takes a mask of numbers to be one of `causal_mask`."""
    if reads_rows(input_ids, attention_mask, position_ids, past_key_values, **options):
        # The last position of a row sees all real tokens, and itself. So it is read, even if it is padding.
        real = attention_mask[:, 0, -1, : input_ids.shape[1]] == 0
        shared = passes.find_shared(backbone, input_ids, real) if past_key_values is None else None
        if shared or backbone.is_packed:
            return BaseModelOutputWithPast(read(backbone, input_ids, position_ids, real, past_key_values, shared))
    own = type(backbone).forward
    return own(
        backbone,
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        **options,
    )


def reads_rows(input_ids, attention_mask, position_ids, past_key_values, use_cache=None, **more) -> bool:
    """Whether a model is called with rows, as the scripts call it, and with an empty cache or with none."""
    if more or input_ids is None or attention_mask is None or position_ids is None:
        return False
    if isinstance(past_key_values, precision.KeyValueCache):
        cache_fits = not past_key_values.is_initialized
    else:
        cache_fits = past_key_values is None and use_cache is False
    batch, length = input_ids.shape
    mask_fits = attention_mask.is_floating_point() and attention_mask.shape[:3] == (batch, 1, length)
    return cache_fits and mask_fits and position_ids.shape == input_ids.shape


def read(
    backbone: PreTrainedModel,
    input_ids: Tensor,
    position_ids: Tensor,
    mask: Tensor,
    cache: precision.KeyValueCache | None = None,
    shared: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Final hidden states (batch, length, width) of a packed model.

    input_ids, position_ids, mask: (batch, length). The mask is True for real tokens, each of which sees those before
    it in its row. Ids and positions of padding are never read. cache: if given, it is empty and gets the keys and
    values of the real tokens, in their columns. shared: as of passes.find_shared; then the line has tokens that are
    repeated only once: of a group of responses [prompt, response 1, ..., response n]. Positions start again after the
    prompt, and attention gets whole rows.
    """
    device, (batch, length) = mask.device, mask.shape
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
    rows, columns, places = rows[first].to(device), columns[first].to(device), places.to(device)
    line = [F.pad(numbers[rows, columns], (0, len(stand_in))).unsqueeze(0) for numbers in (input_ids, position_ids)]
    answer = type(backbone).forward(
        backbone,
        input_ids=line[0],
        position_ids=line[1],
        attention_mask=input_ids.new_zeros(1, 1, 1, 1),  # or the library would make one
        row_groups=plan_groups([*lengths.tolist(), *stand_in], device),
        repeats=repeats,
        past_key_values=None if cache is None else LineCache(cache, batch, length, rows, columns),
        use_cache=cache is not None,
    )
    hidden_states = answer.last_hidden_state[0]  # (the line's tokens, width)
    return hidden_states.index_select(0, places.flatten()).unflatten(0, places.shape)


class LineCache:
    """Puts the keys and values of a line's tokens into their places in the cache of a batch."""

    def __init__(self, cache: precision.KeyValueCache, batch: int, length: int, rows: Tensor, columns: Tensor):
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
    cost = COST_OF_GROUP["cpu" if device.type == "cpu" else "cuda"]
    groups = []
    for start, end in pairwise([*passes.starts_that_pay(lengths, cost), len(lengths)]):
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


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
