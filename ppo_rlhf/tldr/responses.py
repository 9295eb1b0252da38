"""Responses of any length: sample them up to a stop token, and read them, in few passes of little padding.

Files and lines next to marks are those of openai/lm-human-preferences at commit cbfd210.
"""

from collections.abc import Collection
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ppo_rlhf.tldr import packing
from ppo_rlhf.train_policy import KeyValueCache, causal_mask, keyed_generator, left_pad, read_tokens, scaled_logits

LOOK_EVERY = 4  # tokens; how often generation looks whether rows have ended

# ---- Read responses --------------------------------------------------------------------------------------------


def read_before_responses(lm_backbone: PreTrainedModel, tokens: Tensor, responses: Tensor, pad_id: int) -> Tensor:
    """Final hidden states at the position before each token of the responses: (batch, response_length, width).

    tokens: (batch, length), queries and their responses, with padding anywhere. responses: (batch, response_length),
    the same responses, with padding at their end. At the first padding that is the state after the response; what
    follows means nothing.
    """
    moved = left_pad(tokens, pad_id)
    hidden_states = read_tokens(lm_backbone, moved, pad_id, slice(None))  # (batch, length, width)
    # In a row of `moved`, the response comes last. Its first token has this column, and each next one the next.
    first = moved.shape[1] - (responses != pad_id).sum(1, keepdim=True)  # (batch, 1)
    columns = first + torch.arange(responses.shape[1], device=responses.device)  # (batch, response_length)
    before = (columns - 1).clamp(max=moved.shape[1] - 1).unsqueeze(2)
    return hidden_states.gather(1, before.expand(-1, -1, hidden_states.shape[2]))


def response_statistics(
    lm_backbone: PreTrainedModel, tokens: Tensor, responses: Tensor, pad_id: int, temperature: float, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (nats, without gradient) of responses, each (batch, response_length).

    tokens, responses: as `read_before_responses` gets them. At padding, the results mean nothing.
    """
    # [D47] What the model says at position i is about token i + 1: hence the shift by one.   policy.py#L114-L126
    hidden_states = read_before_responses(lm_backbone, tokens, responses, pad_id)
    return statistics_after(lm_backbone, hidden_states, responses, pad_id, temperature, vocab_size)


def statistics_after(
    lm_backbone: PreTrainedModel,
    hidden_states: Tensor,
    responses: Tensor,
    pad_id: int,
    temperature: float,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """The same, from what `read_before_responses` returns."""
    responses = responses.masked_fill(responses == pad_id, 0)  # (batch, response_length)
    read = partial(token_logprobs, lm_backbone, vocab_size, temperature)
    return packing.few_logits_at_a_time(read, responses.shape[1] * vocab_size, hidden_states, responses)


def token_logprobs(
    lm_backbone: PreTrainedModel, vocab_size: int, temperature: float, hidden_states: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (batch, length) of tokens of that shape after hidden states (batch, length, width)."""
    all_logprobs = F.log_softmax(scaled_logits(lm_backbone, hidden_states, vocab_size, temperature), dim=2)
    logprobs = all_logprobs.gather(2, tokens.long().unsqueeze(2)).squeeze(2)  # (batch, length)
    with torch.no_grad():
        entropies = -(all_logprobs.exp() * all_logprobs).sum(2)  # (batch, length)
    return logprobs, entropies


# ---- Generate --------------------------------------------------------------------------------------------------


@torch.no_grad()
def generate_until(
    lm_backbone: PreTrainedModel,
    contexts: Tensor,
    uniforms: Tensor,
    pad_id: int,
    vocab_size: int,
    temperature: float,
    stop_ids: Collection[int],
) -> tuple[Tensor, Tensor]:
    """Sample responses as `generate` of train_policy.py does, but each only up to its first stop id.

    Returns responses, padding after the stop id, and their log-probs, 0 there: two of (batch, response_length).
    """
    width = contexts.shape[1]
    hidden, mask, cache = read_contexts(lm_backbone, left_pad(contexts, pad_id), pad_id, uniforms.shape[1])
    states = [(layer.keys, layer.values) for layer in cache.layers]
    position_ids = mask.sum(1, keepdim=True)  # of the next token: (rows, 1)
    seen = F.pad(mask, (0, uniforms.shape[1]), value=False)  # by a response token; no response token is there yet
    token_mask = torch.zeros(seen.shape, dtype=lm_backbone.dtype, device=seen.device)
    token_mask = token_mask.masked_fill(~seen, torch.finfo(lm_backbone.dtype).min)[:, None, None]
    stops = torch.tensor(sorted(stop_ids), device=contexts.device, dtype=torch.long)
    rows = torch.arange(len(contexts), device=contexts.device)  # those that are still sampled
    ended = torch.zeros_like(rows, dtype=torch.bool)
    responses = contexts.new_full(uniforms.shape, pad_id)
    logprobs = contexts.new_zeros(uniforms.shape, dtype=torch.promote_types(lm_backbone.dtype, torch.float32))
    for column in range(uniforms.shape[1]):
        all_logprobs = F.log_softmax(scaled_logits(lm_backbone, hidden, vocab_size, temperature), dim=1)
        cdf = all_logprobs.to(uniforms.device).double().exp().cumsum(1)  # (rows, vocab_size)
        thresholds = uniforms[rows.to(uniforms.device), column : column + 1].double() * cdf[:, -1:]
        tokens = torch.searchsorted(cdf, thresholds, right=True).clamp(max=vocab_size - 1).to(hidden.device)
        responses[rows, column] = torch.where(ended, pad_id, tokens[:, 0]).to(responses.dtype)
        logprobs[rows, column] = all_logprobs.gather(1, tokens)[:, 0].masked_fill(ended, 0).to(logprobs.dtype)
        ended = ended | torch.isin(tokens[:, 0], stops)
        if column + 1 == uniforms.shape[1]:
            break
        # Looking waits for the device, so it is done every few tokens. Once half of the rows have ended, these leave.
        if column % LOOK_EVERY == LOOK_EVERY - 1 and 2 * (left := int((~ended).sum())) <= len(rows):
            if not left:
                break
            kept = (~ended).nonzero()[:, 0]
            rows, ended, tokens, position_ids, token_mask = (
                tensor[kept] for tensor in (rows, ended, tokens, position_ids, token_mask)
            )
            states = [tuple(x.index_select(0, kept) for x in both) for both in states]  # faster than x[kept]
        # Attention gets the columns that are filled. The room for later tokens would cost as much as they do.
        filled = width + column + 1
        token_mask[..., filled - 1] = 0
        for layer, both in zip(cache.layers, states, strict=True):
            layer.keys, layer.values = (x[:, :, :filled] for x in both)
        hidden = lm_backbone.base_model(
            input_ids=tokens,
            attention_mask=token_mask[..., :filled],
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[:, -1]  # (rows, width)
        position_ids = position_ids + 1
    return responses, logprobs


def read_contexts(
    lm_backbone: PreTrainedModel, contexts: Tensor, pad_id: int, response_length: int
) -> tuple[Tensor, Tensor, KeyValueCache]:
    """Read contexts (batch, context_length), padded on the left, in passes of similar length.

    Returns the last hidden state of each (batch, width), which of its columns are real, and the cache of keys and
    values, with room for the response.
    """
    # A prompt is read once for all its responses, which are next to each other.
    contexts, copies = contexts.unique_consecutive(dim=0, return_inverse=True)  # copies: (batch,)
    mask, length = contexts != pad_id, contexts.shape[1]  # (batch, context_length)
    position_ids, tokens = mask.cumsum(1) - mask.long(), contexts.masked_fill(~mask, 0)
    cache = KeyValueCache(config=lm_backbone.config, max_cache_len=length + response_length)
    # Rows of a pass keep their order: their place changes how sums are rounded, and small/grpo.py does not sort them.
    plan = packing.plan_passes(mask.sum(1).cpu(), lm_backbone)
    plan = [packing.Pass(rows=one.rows.sort().values, longest=one.longest) for one in plan]

    def read(rows: Tensor, tokens: Tensor, mask: Tensor, position_ids: Tensor, longest: int) -> Tensor:
        real = slice(length - longest, length)
        own = KeyValueCache(config=lm_backbone.config, max_cache_len=longest)
        hidden_states = lm_backbone.base_model(
            input_ids=tokens[:, real],
            attention_mask=causal_mask(mask[:, real], lm_backbone.dtype),
            position_ids=position_ids[:, real],
            past_key_values=own,
            use_cache=True,
        ).last_hidden_state
        copy_rows(own, cache, len(contexts), rows, real)
        return hidden_states[:, -1]

    rows = torch.arange(len(contexts), device=contexts.device)
    last = packing.in_passes(read, plan, rows, tokens, mask, position_ids)
    if len(contexts) < len(copies):
        for layer in cache.layers:
            layer.keys, layer.values = (x.index_select(0, copies) for x in (layer.keys, layer.values))
    return last[copies], mask[copies], cache


def copy_rows(source: KeyValueCache, target: KeyValueCache, batch: int, rows: Tensor, columns: slice) -> None:
    """Copy a cache to these rows and columns of that of a batch. The next token comes after the columns."""
    for layer, part in zip(target.layers, source.layers, strict=True):
        if not layer.is_initialized:
            states = (part.keys, part.values)
            layer.lazy_initialization(*(x.new_empty(batch, *x.shape[1:]) for x in states))
        layer.keys[rows, :, columns], layer.values[rows, :, columns] = part.keys, part.values
        layer.cumulative_length.fill_(columns.stop)


# ---- Minibatches -----------------------------------------------------------------------------------------------


def draw_minibatches(seed: int, update: int, epochs: int, episodes: slice, nminibatches: int) -> Tensor:
    """Rows of the local batch in each minibatch: (epochs, nminibatches, local_minibatch).

    episodes: this process's slice of the batch. Of every nminibatches episodes in a row, each minibatch gets one at
    random. So all processes have equally many episodes of each minibatch, and the minibatch of an episode does not
    depend on the number of processes.
    """
    # One permutation of everything would not share the minibatches evenly.
    b_inds = []
    for epoch in range(epochs):
        generator = keyed_generator(seed, "minibatches", update, epoch)
        rows = torch.rand(episodes.stop // nminibatches, nminibatches, generator=generator).argsort(1)
        starts = torch.arange(len(rows)).unsqueeze(1) * nminibatches  # (rows, 1)
        b_inds.append((rows + starts)[episodes.start // nminibatches :].T - episodes.start)
    return torch.stack(b_inds)
