"""Reading rows without their padding: tokens stand behind one another, and attention alone knows where a row ends.

Embeddings, matrix products and norms see one line of tokens. Attention sees rows again, a few of similar length at a
time. What is small beside a model's matrix products is then all that unequal lengths cost.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ppo_rlhf.lib import precision, processes

NAME = "sdpa_unpadded"  # of the attention here, among the library's
TRIED = ("gpt2", "gpt_neox", "llama", "mistral", "opt", "qwen2", "qwen3")  # by the tests
# Cutting rows out costs copies, which grow with the width; it saves matrix products, which grow with its square.
# On a CPU, GPT-2 (768 wide) gains all that there is to gain; the small models of the worlds (128) gain nothing.
LEAST_WIDTH = 512


def prepare(model: PreTrainedModel) -> None:
    """Let a model be read without padding from now on, if it is one of those that were tried, and wide enough."""
    config = model.config
    wide = getattr(config, "hidden_size", 0) >= LEAST_WIDTH
    if wide and config.model_type in TRIED and config._attn_implementation in ("sdpa", NAME):
        model.set_attn_implementation(NAME)
        model.base_model.reads_no_padding = True


@dataclass(frozen=True)
class Group:
    """Rows that attention sees together, padded on the right, where a causal mask hides it."""

    rows: int
    longest: int
    tokens: int
    spread: Tensor | None  # (rows * longest,): which of the group's tokens stands there; None: rows are of one length
    collect: Tensor | None  # (tokens,): where each token stands


def plan_groups(lengths: list[int], cost: int, device: torch.device) -> list[Group]:
    """Divide rows, the longest first, into groups. lengths: tokens of each row; cost: of another group, in tokens."""
    groups = []
    for start, end in pairwise([*processes.starts_that_pay(lengths, cost), len(lengths)]):
        longest, tokens = lengths[start], sum(lengths[start:end])
        shape = (end - start, longest)
        if tokens == shape[0] * longest:
            groups.append(Group(*shape, tokens, None, None))
            continue
        real = torch.arange(longest) < torch.tensor(lengths[start:end]).unsqueeze(1)  # (rows, longest)
        collect = real.flatten().nonzero()[:, 0]
        spread = torch.zeros(real.numel(), dtype=torch.long).index_copy(0, collect, torch.arange(tokens))
        groups.append(Group(*shape, tokens, spread.to(device), collect.to(device)))
    return groups


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    row_groups: list[Group] | None = None,
    **settings,
) -> tuple[Tensor, None]:
    """The library's attention, for each group by itself; without groups, as it is.

    query, key, value: (1, heads, tokens, head width), the groups' tokens behind one another. Returns (1, tokens,
    heads, head width).
    """
    if row_groups is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    outputs, sizes = [], [group.tokens for group in row_groups]
    for group, *line in zip(
        row_groups, *(states[0].split(sizes, dim=1) for states in (query, key, value)), strict=True
    ):
        if group.spread is not None:
            line = [states.index_select(1, group.spread) for states in line]
        rows = [states.unflatten(1, (group.rows, group.longest)).transpose(0, 1) for states in line]
        output = sdpa_attention_forward(module, *rows, None, **settings)[0].flatten(
            0, 1
        )  # (rows * longest, heads, ...)
        outputs.append(output if group.collect is None else output.index_select(0, group.collect))
    return torch.cat(outputs).unsqueeze(0), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def read(
    lm_backbone: PreTrainedModel,
    input_ids: Tensor,
    position_ids: Tensor,
    mask: Tensor,
    cache: precision.KeyValueCache | None = None,
) -> Tensor:
    """Final hidden states (batch, length, width) of a prepared model.

    input_ids, position_ids, mask: (batch, length), True for real tokens, each of which sees those before it in its
    row; padding sees nothing but itself. cache: empty, gets keys and values of the real tokens, in their columns.
    """
    lengths, order = mask.sum(1).sort(descending=True, stable=True)
    ends, real = lengths.cumsum(0), mask[order]
    # Where each token stands in the line. All padding is one token, at its end: id 0 at position 0, alone.
    first = torch.empty_like(ends).index_copy(0, order, ends - lengths)  # of each row
    places = torch.where(mask, first.unsqueeze(1) + mask.cumsum(1) - 1, ends[-1])  # (batch, length)
    line = [torch.cat([x[order][real], x.new_zeros(1)]).unsqueeze(0) for x in (input_ids, position_ids)]
    cost = processes.cost_of_launches(lm_backbone)
    groups = plan_groups([length for length in lengths.tolist() if length] + [1], cost, mask.device)
    own = cache and precision.KeyValueCache(config=lm_backbone.config, max_cache_len=line[0].shape[1])
    hidden_states = lm_backbone.base_model(
        input_ids=line[0],
        position_ids=line[1],
        attention_mask=input_ids.new_zeros(1, 1, 1, 1),  # or the library would make one
        row_groups=groups,
        past_key_values=own,
        use_cache=cache is not None,
    ).last_hidden_state[0]  # (tokens, width)
    if cache is not None:
        row, column = real.nonzero(as_tuple=True)
        cache.take(own, len(mask), order[row], column, mask.shape[1])
    return hidden_states.index_select(0, places.flatten()).unflatten(0, places.shape)
