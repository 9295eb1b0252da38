"""The functions that `python -m ppo_rlhf.check` asks an adapter for, in their plainest correct form.

Names, arguments and defaults are those of the adapter's functions; docs/check.md has them as a table. Tensors are
(batch, response_length) unless a docstring says otherwise. A mask is True where an entry counts.

Each function is complete: an entry of faults.toml replaces a part of its text, and an exercise shows that
text. So nothing here is imported by the training scripts, and nothing is imported from them.
"""

import math

import torch
from torch import Tensor

# ---- Tokens ----------------------------------------------------------------------------------------------------


def truncate(responses: Tensor, stop_id: int, pad_id: int, after: int = 0) -> Tensor:
    """Replace what follows the first stop id by padding. The stop id stays. Not before index `after`."""
    stops = (responses == stop_id) & (torch.arange(responses.shape[1]) >= after)
    stops_before = stops.cumsum(1) - stops.long()
    return responses.masked_fill(stops_before > 0, pad_id)


def response_mask(responses: Tensor, stop_id: int) -> Tensor:
    """True up to and including the first stop id. Padding may have the same id."""
    stops = responses == stop_id
    return stops.cumsum(1) - stops.long() == 0


def has_stop(responses: Tensor, stop_id: int, after: int = 0) -> Tensor:
    """Whether a response contains the stop id at index `after` or later: (batch,) bool."""
    return (responses[:, after:] == stop_id).any(1)


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probs of tokens (batch, response_length) under logits (batch, response_length, vocab_size)."""
    all_logprobs = torch.log_softmax(logits / temperature, dim=2)
    return all_logprobs.gather(2, tokens.long().unsqueeze(2)).squeeze(2)


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats at each token, from logits (batch, response_length, vocab_size)."""
    all_logprobs = torch.log_softmax(logits / temperature, dim=2)
    return -(all_logprobs.exp() * all_logprobs).sum(2)


def response_logprobs(
    model, tokens: Tensor, attention_mask: Tensor, context_length: int, temperature: float = 1.0
) -> Tensor:
    """Log-probs of the response, tokens[:, context_length:], under a causal language model of Hugging Face.

    tokens, attention_mask: (batch, context_length + response_length). Contexts are padded on the left with the id 0,
    which is no other token.
    """
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=tokens, attention_mask=attention_mask.long(), position_ids=position_ids).logits
    logits = logits[:, context_length - 1 : -1] / temperature
    responses = tokens[:, context_length:]
    return torch.log_softmax(logits, dim=2).gather(2, responses.unsqueeze(2)).squeeze(2)


# ---- Rewards ---------------------------------------------------------------------------------------------------


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, name: str = "k1") -> Tensor:
    """Estimate of KL(policy || reference) at each sampled token, in nats. name: k1, abs, k2, k3, k1+, k2+ or k3+.

    With a plus, the value is that of the name and the gradient is that of k2.
    """
    d = (logprobs - ref_logprobs).masked_fill(~mask, 0)
    value = {"k1": d, "abs": d.abs(), "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}[name.removesuffix("+")]
    if name.endswith("+"):
        value = value.detach() + d**2 / 2 - (d**2 / 2).detach()
    return value


def token_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    kl_coef: float = 0.1,
    score_at: str = "last",
) -> Tensor:
    """-kl_coef * (logprobs - ref_logprobs) at each token, and the score (batch,) once. 0 at masked entries.

    score_at: "last" is the last token; "next" the entry after it, if there is one (chapter 2's convention).
    """
    d = (logprobs - ref_logprobs).masked_fill(~mask, 0)
    rewards = -kl_coef * d
    columns = torch.arange(mask.shape[1])
    last = torch.where(mask, columns, -1).amax(1)
    at = last if score_at == "last" else (last + 1).clamp(max=mask.shape[1] - 1)
    is_last = (columns == at.unsqueeze(1)) & mask.any(1, keepdim=True)
    return rewards + torch.where(is_last, scores.unsqueeze(1), 0)


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """What a response near the greatest length loses, as a number <= 0: (batch,).

    It rises linearly over the last `buffer` tokens, and no response loses more than `factor`.
    """
    over = lengths - (max_length - buffer)
    return -factor * (over / buffer).clamp(0, 1)


def kl_controller(kl_coef: float, kl: float, target: float, episodes: int, horizon: int) -> float:
    """The KL coefficient after a batch of `episodes` responses with a mean KL of `kl` nats per response."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * episodes / horizon)


def best_of_n_loss(scores: Tensor, best: Tensor) -> Tensor:
    """-log softmax of the score of the best of n responses, 0-d. scores: (batch, n); best: (batch,)."""
    chosen = torch.log_softmax(scores, dim=1).gather(1, best.long().unsqueeze(1))
    return -chosen.mean()


# ---- Advantages ------------------------------------------------------------------------------------------------


def whiten(values: Tensor, mask: Tensor, keep_mean: bool = False) -> Tensor:
    """Shift and scale to mean 0 and variance 1 over all entries that count. keep_mean adds the mean back."""
    values = values.masked_fill(~mask, 0)
    count = mask.sum().clamp(min=1)
    mean = values.sum() / count
    variance = ((values - mean) ** 2).masked_fill(~mask, 0).sum() / count
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    whitened = whitened + mean if keep_mean else whitened
    return whitened.masked_fill(~mask, 0)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 1.0) -> tuple[Tensor, Tensor]:
    """Advantages, not whitened, and returns. The value after the last token is 0. Masked tokens are skipped."""
    advantages = torch.zeros_like(values)
    next_advantage = next_value = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = next_advantage
    returns = advantages + values
    return advantages.masked_fill(~mask, 0), returns.masked_fill(~mask, 0)


def reward_to_go(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """The discounted sum of the rewards from each token on. Masked tokens are skipped, without a step of gamma."""
    returns, later = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        later = torch.where(mask[:, t], rewards[:, t] + gamma * later, later)
        returns[:, t] = later
    return returns.masked_fill(~mask, 0)


def group_advantages(
    scores: Tensor, groups: Tensor | None = None, group_size: int | None = None, name: str = "grpo"
) -> Tensor:
    """Advantages (batch,) from scores (batch,) of several responses to each prompt. name: grpo, dr_grpo or rloo.

    groups: (batch,) int, equal for the responses to one prompt. If they are consecutive and equally many, group_size
    says how many, and a function may use that instead. A group of one gets 0, and so does one of equal scores.
    """
    groups = torch.arange(len(scores)) // group_size if groups is None else groups
    advantages = torch.zeros_like(scores)
    for group in groups.unique():
        members = groups == group
        x, n = scores[members], members.sum()
        centred = x - x.mean()
        if n == 1:
            advantages[members] = 0
        elif name == "grpo":
            std = (centred.square().sum() / (n - 1)).sqrt()
            advantages[members] = centred / (std + 1e-6)
        else:
            advantages[members] = centred * n / (n - 1) if name == "rloo" else centred
    return advantages


# ---- Losses ----------------------------------------------------------------------------------------------------


def policy_loss(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cliprange: float = 0.2,
    cliprange_high: float | None = None,
    dual_clip: float | None = None,
    tokens: int | None = None,
) -> Tensor:
    """PPO's clipped loss, 0-d: the sum over the tokens that count, divided by their number.

    cliprange_high: the upper bound's, if it differs. dual_clip: where A < 0, a token's loss is at most -A dual_clip.
    tokens: the tokens of the whole minibatch, if this is only a part of it; the losses of the parts then add up.
    """
    advantages = advantages.masked_fill(~mask, 0)
    ratio = torch.exp((new_logprobs - logprobs).masked_fill(~mask, 0))
    high = cliprange if cliprange_high is None else cliprange_high
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + high))
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * dual_clip), losses)
    count = mask.sum() if tokens is None else tokens
    return losses.masked_fill(~mask, 0).sum() / count


def gspo_loss(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cliprange: float = 0.2,
    cliprange_high: float | None = None,
) -> Tensor:
    """GSPO's loss, 0-d: PPO's clip with one ratio per response; mean over responses of the mean over their tokens.

    The ratio is exp(mean of new - old). advantages: (batch, response_length), equal within a response.
    """
    lengths = mask.sum(1).clamp(min=1)
    log_ratio = (new_logprobs - logprobs).masked_fill(~mask, 0)
    ratio = torch.exp(log_ratio.sum(1) / lengths).unsqueeze(1)
    advantages = advantages.masked_fill(~mask, 0)
    high = cliprange if cliprange_high is None else cliprange_high
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + high))
    return (losses.sum(1) / lengths).sum() / mask.any(1).sum()


def cispo_loss(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cliprange: float = 0.2,
    cliprange_high: float | None = None,
) -> Tensor:
    """CISPO's loss, 0-d: the mean over tokens of -clip(ratio) A log p, with no gradient through the ratio."""
    new_logprobs, advantages = new_logprobs.masked_fill(~mask, 0), advantages.masked_fill(~mask, 0)
    ratio = torch.exp(new_logprobs - logprobs.masked_fill(~mask, 0))
    high = cliprange if cliprange_high is None else cliprange_high
    weights = ratio.clamp(1 - cliprange, 1 + high).detach()
    return -(weights * advantages * new_logprobs).sum() / mask.sum()


def value_loss(
    new_values: Tensor,
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    cliprange: float = 0.2,
    tokens: int | None = None,
) -> Tensor:
    """Half the larger of (V - R)^2 and (clip(V, V_old +- cliprange) - R)^2, summed and divided by the tokens: 0-d."""
    new_values, values, returns = (x.masked_fill(~mask, 0) for x in (new_values, values, returns))
    clipped_values = torch.clamp(new_values, values - cliprange, values + cliprange)
    losses = 0.5 * torch.maximum((new_values - returns) ** 2, (clipped_values - returns) ** 2)
    count = mask.sum() if tokens is None else tokens
    return losses.sum() / count


def aggregate(
    losses: Tensor,
    mask: Tensor,
    mode: str = "token-mean",
    tokens: int | None = None,
    sequences: int | None = None,
    length: int | None = None,
) -> Tensor:
    """One number from losses. With s_i the sum over response i, which has n_i tokens:

    token-mean: sum of s_i / tokens. seq-mean-token-sum: sum of s_i / sequences. seq-mean-token-mean: sum of
    s_i / n_i / sequences. seq-mean-token-sum-norm: sum of s_i / (sequences * length).

    tokens, sequences: of the whole minibatch, if this is only a part of it. sequences: responses with a token, but
    all responses in seq-mean-token-sum-norm, where the weight of a token doesn't depend on the other responses.
    length: the longest that may be; None is the width. Without a token, the result is 0.
    """
    losses, lengths = losses.masked_fill(~mask, 0), mask.sum(1)
    tokens = max(lengths.sum(), 1) if tokens is None else tokens
    sequences = len(mask) if sequences is None and mode == "seq-mean-token-sum-norm" else sequences
    sequences = max((lengths > 0).sum(), 1) if sequences is None else sequences
    length = mask.shape[1] if length is None else length
    if mode == "token-mean":
        return losses.sum() / tokens
    if mode == "seq-mean-token-sum":
        return losses.sum() / sequences
    if mode == "seq-mean-token-mean":
        return (losses.sum(1) / lengths.clamp(min=1)).sum() / sequences
    return losses.sum() / (sequences * length)


def accumulate(losses: list[Tensor], masks: list[Tensor], generation_tokens: int | None = None) -> Tensor:
    """The token mean of a minibatch that comes in micro-batches, or that several processes share: 0-d.

    losses, masks: a tensor (rows, response_length) for each part. generation_tokens: the tokens of all responses that
    were generated together, of which this minibatch is a part.
    """
    tokens = sum(mask.sum() for mask in masks)
    total = 0.0
    for part, mask in zip(losses, masks, strict=True):
        total = total + part.masked_fill(~mask, 0).sum() / tokens
    return total


def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
    """A loss per token whose gradient is that of KL(policy || reference), though another policy has sampled.

    Only the expected gradient is checked, by enumeration, so any form with that gradient is correct. Here it is k2
    times the detached ratio.
    """
    d = logprobs - ref_logprobs
    ratio = torch.exp(logprobs - sampler_logprobs).detach()
    losses = ratio * d**2 / 2
    return losses.masked_fill(~mask, 0)


# ---- Corrections for another sampler ---------------------------------------------------------------------------


def importance_weights(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    kind: str = "token",
    cap: float = math.inf,
) -> Tensor:
    """min(p / q, cap) of each token, or of its whole response (kind "sequence"), without a gradient."""
    log_ratio = (logprobs - sampler_logprobs).masked_fill(~mask, 0).detach()
    if kind == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True).expand(mask.shape)
    return log_ratio.exp().clamp(max=cap).masked_fill(~mask, 0)


def rejection_mask(
    logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, kind: str, low: float, high: float
) -> Tensor:
    """The tokens with low <= p / q <= high. kind "sequence": those of responses whose geometric mean is within."""
    log_ratio = (logprobs - sampler_logprobs).masked_fill(~mask, 0)
    if kind == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    ratio = log_ratio.exp()
    return mask & (ratio >= low) & (ratio <= high)


# ---- Optimiser and statistics ----------------------------------------------------------------------------------


def adam_step(
    parameter: Tensor,
    gradient: Tensor,
    m: Tensor,
    v: Tensor,
    step: int,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-5,
    style: str = "torch",
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of Adam: new parameter, m and v, each (size,). step: 1 at the first step.

    style: where eps is added. "torch": to the corrected root. "tensorflow": to the root of v itself.
    """
    m = beta1 * m + (1 - beta1) * gradient
    v = beta2 * v + (1 - beta2) * gradient**2
    root = (1 - beta2**step) ** 0.5
    eps = eps * root if style == "torch" else eps
    return parameter - lr * root / (1 - beta1**step) * m / (v.sqrt() + eps), m, v


def explained_variance(values: list[Tensor], returns: list[Tensor], masks: list[Tensor]) -> Tensor:
    """1 - mean of (returns - values)^2 / variance of returns, over all micro-batches together: 0-d."""
    r = torch.cat([x[mask] for x, mask in zip(returns, masks, strict=True)])
    error = r - torch.cat([x[mask] for x, mask in zip(values, masks, strict=True)])
    return 1 - error.square().mean() / r.var(correction=0)
