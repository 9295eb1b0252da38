"""How a model reads and writes tokens.

Files and lines next to marks are those of openai/lm-human-preferences at commit cbfd210.
"""

import hashlib
import math
from collections.abc import Collection
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_rlhf.lib.base import precision
from ppo_rlhf.lib.base.precision import KeyValueCache
from ppo_rlhf.lib.nets import packing

LOOK_EVERY = 4  # tokens; how often generation looks whether rows have ended

# ---- Models ----------------------------------------------------------------------------------------------------


def causal_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that attention adds to its scores: 0 where a position may look, the lowest number where it may not.

    mask: (batch, sequence_length), True for real tokens. Returns (batch, 1, sequence_length, sequence_length).
    """
    # [D15] A position, padding too, sees itself and the real tokens before it.   language/model.py#L101-L159
    itself = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
    visible = (mask.unsqueeze(1) | itself).tril().unsqueeze(1)
    return torch.zeros(visible.shape, dtype=dtype, device=mask.device).masked_fill(~visible, torch.finfo(dtype).min)


def read_tokens(lm_backbone: PreTrainedModel, tokens: Tensor, pad_id: int, columns: slice) -> Tensor:
    """Final hidden states of the language model at some columns, with padding anywhere in the tokens.

    tokens: (batch, sequence_length). Returns (batch, selected columns, width), after the last layer norm.
    """
    # [D13] Padding is never embedded: token 0 takes its place, and no token sees it.   language/model.py#L294-L300
    mask = tokens != pad_id  # (batch, sequence_length)
    input_ids = tokens.masked_fill(~mask, 0)
    # [D14] A position counts real tokens before it: 0, 1, 1, 1 for [x, pad, pad, a].   language/model.py#L265-L269
    position_ids = mask.cumsum(1) - mask.long()
    attention_mask = causal_mask(mask, lm_backbone.dtype)  # (batch, 1, sequence_length, sequence_length)
    hidden_states = lm_backbone.base_model(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
    ).last_hidden_state  # (batch, sequence_length, width)
    # [D16] Padding shows what the real token to its left shows: columns [0, 0, 0, 3].   language/model.py#L333-L341
    real_columns = torch.where(mask, torch.arange(tokens.shape[1], device=tokens.device), 0)
    last_real = real_columns.cummax(1).values[:, columns]  # (batch, selected columns)
    return hidden_states.gather(1, last_real.unsqueeze(2).expand(-1, -1, hidden_states.shape[2]))


def scaled_logits(lm_backbone: PreTrainedModel, hidden_states: Tensor, vocab_size: int, temperature: float) -> Tensor:
    """Logits over the tokenizer's ids, divided by the temperature: (..., vocab_size). In full precision even in
    bfloat16 runs, where rounded logits would move the log-prob of every token.
    """
    output_layer = lm_backbone.get_output_embeddings()
    hidden_states = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
    with torch.autocast(hidden_states.device.type, enabled=False):
        if getattr(output_layer, "weight", hidden_states).dtype == torch.bfloat16:  # a frozen model
            logits = F.linear(hidden_states, *(parameter.float() for parameter in output_layer.parameters()))
        else:
            logits = output_layer(hidden_states)
    if cap := getattr(getattr(lm_backbone, "config", None), "final_logit_softcapping", None):  # Gemma 2
        logits = cap * torch.tanh(logits / cap)
    # [D12] Ids above the tokenizer's largest, such as padding, are never sampled or scored.   policy.py#L58-L59
    # [D23] Log-probs and entropies are those of the scaled logits.   language/sample.py#L24-L30
    return logits[..., :vocab_size] / temperature


def read_before_responses(lm_backbone: PreTrainedModel, tokens: Tensor, responses: Tensor, pad_id: int) -> Tensor:
    """Final hidden states at the position before each token of the responses: (batch, response_length, width).

    tokens: (batch, length), queries and their responses, with padding anywhere. responses: (batch, response_length),
    the same responses, with padding at their end; the results there mean nothing.
    """
    packed = left_pad(tokens, pad_id)
    hidden_states = read_tokens(lm_backbone, packed, pad_id, slice(None))  # (batch, length, width)
    # In a row of `packed`, the response comes last. Its first token has this column, and each next one the next.
    first = packed.shape[1] - (responses != pad_id).sum(1, keepdim=True)  # (batch, 1)
    columns = first + torch.arange(responses.shape[1], device=responses.device)  # (batch, response_length)
    before = (columns - 1).clamp(max=packed.shape[1] - 1).unsqueeze(2)
    return hidden_states.gather(1, before.expand(-1, -1, hidden_states.shape[2]))


def response_statistics(
    lm_backbone: PreTrainedModel, tokens: Tensor, responses: Tensor, pad_id: int, temperature: float, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (nats, without gradient) of responses, each (batch, response_length).

    tokens, responses: as `read_before_responses` gets them. At padding, the results mean nothing.
    """
    # [D47] What the model says at position i is about token i + 1: hence the shift by one.   policy.py#L114-L126
    hidden_states = read_before_responses(lm_backbone, tokens, responses, pad_id)
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


def read_scalar(head: nn.Linear, hidden_states: Tensor) -> Tensor:
    """The head's number for each hidden state: (..., width) gives (...). In full precision even in bfloat16 runs."""
    with torch.autocast(hidden_states.device.type, enabled=False):
        return head(hidden_states.to(head.weight.dtype)).squeeze(-1)


class RewardModel(nn.Module):
    """A language model with a scalar head, read at the last real token: score = gain * head + bias."""

    def __init__(self, lm_backbone: PreTrainedModel, *, low_precision: bool = False):
        """low_precision: whether matrix products are in bfloat16."""
        super().__init__()
        self.lm_backbone, self.low_precision = lm_backbone, low_precision
        width = lm_backbone.config.hidden_size
        # [D29] A small random head: about 1 / sqrt(width) in every weight.   language/model.py#L248-L258
        self.reward_head = nn.Linear(width, 1)
        nn.init.normal_(self.reward_head.weight, std=1 / math.sqrt(width + 1))
        nn.init.zeros_(self.reward_head.bias)
        # [D31] [D32] Gain and bias are trainable parameters.   rewards.py#L48-L71
        self.gain = nn.Parameter(torch.ones(()))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, query_responses: Tensor, pad_id: int) -> Tensor:
        """Scores (batch,) of query_responses (batch, sequence_length); trailing padding does not count."""
        # [D30] The score is read at the last column, which shows the last real token.   rewards.py#L47
        with precision.mixed_precision(query_responses.device, enabled=self.low_precision):
            last = read_tokens(self.lm_backbone, query_responses, pad_id, slice(-1, None))  # (batch, 1, width)
            return self.gain * read_scalar(self.reward_head, last[:, 0]) + self.bias


# ---- Tokens: pad, generate, truncate ---------------------------------------------------------------------------


def left_pad(tokens: Tensor, pad_id: int) -> Tensor:
    """Move the padding of each row to its left; the order of the other tokens stays.

    tokens: (batch, length). [[5, P, 6, P]] gives [[P, P, 5, 6]].
    """
    # [D08] A stable sort by "is a real token".
    return tokens.gather(1, (tokens != pad_id).int().argsort(dim=1, stable=True))


def keyed_generator(*key: int | str) -> torch.Generator:
    """A CPU random generator that depends on the key alone, so that noise belongs to an episode, not a process."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


@torch.no_grad()
def generate(
    lm_backbone: PreTrainedModel, contexts: Tensor, uniforms: Tensor, pad_id: int, vocab_size: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample responses with a key-value cache.

    contexts: (batch, context_length) token ids, padding anywhere; uniforms: (batch, response_length) random numbers
    in [0, 1), one for each token, on a device that has float64. Returns responses and their log-probs (batch,
    response_length), and the hidden state before each token (batch, response_length, width).
    """
    # [D13] [D14] The same mask and positions as in `read_tokens`, for contexts whose padding is moved to the left.
    tokens = left_pad(contexts, pad_id)
    mask = tokens != pad_id  # (batch, context_length)
    position_ids = mask.cumsum(1) - mask.long()
    tokens = tokens.masked_fill(~mask, 0)
    # Keys and values of a whole episode have their place from the start, so that every step has the same shapes.
    length = contexts.shape[1] + uniforms.shape[1]
    cache = KeyValueCache(config=lm_backbone.config, max_cache_len=length)
    attention_mask = causal_mask(F.pad(mask, (0, uniforms.shape[1]), value=True), lm_backbone.dtype)
    masks = attention_mask.split([contexts.shape[1]] + [1] * uniforms.shape[1], dim=2)  # context, then each token
    responses, logprobs, hidden_states = [], [], []
    # [D22] [D24] Always response_length tokens; no top-k, no top-p.   language/sample.py#L24-L84
    for column in range(uniforms.shape[1]):
        hidden = lm_backbone.base_model(
            input_ids=tokens,
            attention_mask=masks[column],
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[:, -1]  # (batch, width)
        all_logprobs = F.log_softmax(scaled_logits(lm_backbone, hidden, vocab_size, temperature), dim=1)
        # [X01] Inverse CDF: the first token whose cumulative probability exceeds the uniform number, times the total,
        #       which rounding leaves a little off 1. In float64, since in float32 rare tokens could never be drawn.
        cdf = all_logprobs.to(uniforms.device).double().exp().cumsum(1)  # (batch, vocab_size)
        thresholds = uniforms[:, column : column + 1].double() * cdf[:, -1:]
        tokens = torch.searchsorted(cdf, thresholds, right=True).clamp(max=vocab_size - 1).to(hidden.device)
        # [D25] Log-probs are recorded as the tokens are sampled.   policy.py#L108-L112
        responses.append(tokens)
        logprobs.append(all_logprobs.gather(1, tokens))
        hidden_states.append(hidden)
        position_ids = position_ids[:, -1:] + 1
    return torch.cat(responses, 1).to(contexts.dtype), torch.cat(logprobs, 1), torch.stack(hidden_states, 1)


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
    """Sample responses as `generate` does, but only up to the first stop id of each; without any, all of them.

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
        # Every look waits for the device, so it is taken now and then. Rows that have ended leave when they are half.
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
        cache.take(own, len(contexts), rows, real)
        return hidden_states[:, -1]

    rows = torch.arange(len(contexts), device=contexts.device)
    last = packing.in_passes(read, plan, rows, tokens, mask, position_ids)
    if len(contexts) < len(copies):
        for layer in cache.layers:
            layer.keys, layer.values = (x.index_select(0, copies) for x in (layer.keys, layer.values))
    return last[copies], mask[copies], cache


def truncate_at(responses: Tensor, stop_id: int | tuple[int, ...] | None, after: int, pad_id: int) -> Tensor:
    """Replace everything after the first stop token at index >= after by padding; the stop token itself stays.

    responses: (batch, response_length). stop_id: of one token or of several; None: unchanged.
    """
    # [D48] What follows the stop token becomes padding; without one, nothing changes.   lm_tasks.py#L39-L52
    if stop_id is None:
        return responses
    stops = torch.isin(responses, responses.new_tensor(stop_id))  # (batch, response_length)
    stops = stops & (torch.arange(responses.shape[1], device=responses.device) >= after)
    stops_before = stops.cumsum(1) - stops.long()  # (batch, response_length)
    return responses.masked_fill(stops_before > 0, pad_id)


def has_stop(responses: Tensor, stop_id: int | tuple[int, ...] | None, after: int) -> Tensor:
    """Whether each response has a stop token at index >= after: (batch,) bool. stop_id None: all True."""
    # [D50] A stop token before index `after` does not count.   lm_tasks.py#L58-L65
    if stop_id is None:
        return torch.ones(responses.shape[0], dtype=torch.bool, device=responses.device)
    return torch.isin(responses[:, after:], responses.new_tensor(stop_id)).any(1)


def episode_noise(seed: int, update: int, batch: int, response_length: int) -> Tensor:
    """Uniform random numbers (batch, response_length) of a whole batch, the same at any number of processes."""
    # [X01] The original seeds each process; here the noise belongs to the episode.
    generator = keyed_generator(seed, "policy", update)
    return torch.rand(batch, response_length, generator=generator, dtype=torch.float64)


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
