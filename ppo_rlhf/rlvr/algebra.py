"""The algebra of chapter 3: KL estimates, rewards, advantages, losses, and corrections for another sampler.

First comes the Rollout, the tensors that the steps of an update hand on. The rest are functions of tensors and
numbers; rlvr/policy.py and rlvr/asynchronous.py call them. They follow the eight steps: masks (2), the KL estimates
and rewards (5), the estimators of the advantages (6), the losses (7). The last part compares the policy that learns
with the one that sampled.

Tensors are (batch, response_length) unless a docstring says otherwise. A mask is True where the policy wrote a token,
its stop id included. Other entries, even NaN, reach no result and no gradient; results are 0 there.

Marks like [V33] name an implementation detail. The original is verl-project/verl at commit b178a3c; files and lines
next to marks are the original's, if they don't begin with another name: GDPO is NVlabs/GDPO at commit b080e63, and
PRIME is PrimeIntellect-ai/prime-rl at commit 559b447. See docs/reference.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ppo_rlhf.tldr.shares import widened

# ---- What the steps hand on ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Episodes, a row for each: what the steps say of them. None: not computed yet, or not needed.

    All are (rows, response_length), unless a comment says otherwise. In a mask, True is a token of the policy.
    """

    # 2. Responses
    query_responses: Tensor  # (rows, context_length + response_length), padded on the left and after the stop id
    written: Tensor | None = None  # bool, the tokens that the policy wrote, with the stop id
    mask: Tensor  # bool, those of them that count: none where the response cannot be scored
    loss_mask: Tensor  # bool, those of them that are trained on
    sampler_logprobs: Tensor | None = None  # with which the tokens were drawn
    stopped: Tensor | None = None  # (rows,) bool, whether the response ends with a stop id
    problems: Tensor | None = None  # (rows,), numbers of the problems
    groups: Tensor | None = None  # (rows,), equal for the responses to one problem; each draw of it has a number
    age: Tensor | None = None  # (rows,), updates since the weights that sampled it; groups may be left over
    # 3. Log-probs and values
    logprobs: Tensor  # under the policy below the line in the ratio
    ref_logprobs: Tensor | None = None  # the policy's own where there is no reference
    exact_kl: Tensor | None = None  # where the reward needs it, otherwise 0
    values: Tensor | None = None  # 0 without a critic
    weights: Tensor | None = None  # factors of the losses: 1, unless a sampler's `correct` says otherwise
    # 4. Scores
    parts: Tensor | None = None  # (rows, sources), what verifiers and reward model say
    token_scores: Tensor | None = None  # what they give to single tokens, as for a step of the solution; otherwise 0
    right: Tensor | None = None  # (rows,) bool, whether the verifier accepts the response
    raw_scores: Tensor | None = None  # (rows,), the weighted sum of the parts
    scores: Tensor | None = None  # (rows,), after punishments
    baselines: Tensor | None = None  # (rows,), score of the greedy response, for remax; otherwise 0
    # 5. and 6.
    rewards: Tensor | None = None  # KL penalty and score
    non_score_rewards: Tensor | None = None  # the KL penalty
    kl: Tensor | None = None  # nats
    advantages: Tensor | None = None
    returns: Tensor | None = None  # targets of the critic; 0 without one

    @property
    def responses(self) -> Tensor:
        """The responses alone: (rows, response_length)."""
        return self.query_responses[:, -self.mask.shape[1] :]

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def rows(self, inds: Tensor | slice) -> Self:
        return dataclasses.replace(self, **{name: tensor[inds] for name, tensor in self.tensors().items()})


# ---- Tokens ----------------------------------------------------------------------------------------------------


def response_mask(responses: Tensor, stop_ids: Collection[int]) -> tuple[Tensor, Tensor]:
    """Which tokens (batch, response_length) belong to a response, its stop id included; which responses (batch,) end.

    With stop ids 8 and 9, [[5, 9, 8, 7]] gives [[1, 1, 0, 0]] and [1].
    """
    # [V09] [V10] There may be several stop ids, and one of them may be the model's padding (ours is above all ids).
    #       So only the position of the first stop id says where a response ends.   torch_functional.py#L342
    stops = torch.isin(responses, torch.tensor(sorted(stop_ids), dtype=responses.dtype, device=responses.device))
    return stops.cumsum(1) - stops.long() == 0, stops.any(1)


def read_logits(logits: Tensor, tokens: Tensor, *, entropy_learns: bool) -> tuple[Tensor, Tensor]:
    """Log-probs of tokens (...) under logits (..., vocab_size), and exact entropies there, in nats: two of (...).

    entropy_learns: whether the entropies have a gradient.
    """
    all_logprobs = F.log_softmax(logits, dim=-1)
    logprobs = all_logprobs.gather(-1, tokens.long().unsqueeze(-1)).squeeze(-1)
    # [V68] The entropy is a sum over the vocabulary. It needs a gradient only where there is a bonus.
    #       core_algos.py#L1782
    with torch.set_grad_enabled(entropy_learns and torch.is_grad_enabled()):
        return logprobs, -(all_logprobs.exp() * all_logprobs).sum(-1)


# ---- Step 5: the KL divergence from the reference, and rewards -------------------------------------------------

ROUNDING = 1e-4  # nats by which float32 log-probs of one policy may differ from pass to pass


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, name: str) -> Tensor:
    """Per-token estimates (batch, response_length) of KL(policy || reference) from sampled tokens, in nats.

    With d = log p(policy) - log p(reference), which is large where the policy likes its token more:

        k1 = d        abs = |d|        k2 = d^2 / 2        k3 = exp(-d) - 1 + d

    The slope of abs is the sign of d, and 0 where |d| is at most ROUNDING.
    The mean of k1 over sampled tokens is the KL; single tokens, and whole batches, may be negative.
    In the reward, k1 has the gradient of the whole response's KL, because the return of a token includes the KL of
    all tokens after it. As a loss, an estimate acts only through its slope, and only on the token that it was
    computed for. The slope of k1 is 1 everywhere. It moves nothing, because the mean of the gradient of log p is 0.
    The slope of k2 gives the gradient of the reverse KL of the next token, KL(policy || reference), given the text so
    far; the slope of k3 that of the forward KL, KL(reference || policy). `k1+`, `k2+` and `k3+` have the value of
    the name and the slope of k2, and are to be multiplied by the detached ratio.
    """
    d = (logprobs - ref_logprobs).masked_fill(~mask, 0)
    forms = {"k1": (d, 1), "k2": (d**2 / 2, d)}  # value and slope
    # Two passes of the same policy may round differently. Such a difference must not get a slope of 1 or -1.
    forms["abs"] = d.abs(), d.sign() * (d.abs() > ROUNDING)
    # `expm1` is exact where d is near 0, where k3 is a difference of two almost equal numbers.
    inverse_ratio_less_1 = torch.expm1((-d).clamp(max=20))
    # [V52] Far below the reference, k3 keeps growing and pulls back with a slope of -10. verl clamps its value, which
    #       leaves it no slope there.   core_algos.py#L1890-L1896
    forms["k3"] = (inverse_ratio_less_1 + d, (-inverse_ratio_less_1).clamp(min=-10))
    value, slope = forms[name.removesuffix("+")]
    # [V50] With a plus, the value is that of the name and the slope is that of k2.   core_algos.py#L1841-L1864
    slope = torch.as_tensor(d if name.endswith("+") else slope)
    return value.detach() + slope.detach() * (d - d.detach())  # a number with this value and this slope


def compute_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    kl_coef: float,
    name: str,
    token_scores: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Per-token rewards: -kl_coef * kl on every token, and the score on the last.

    scores: (batch,); log-probs and mask: (batch, response_length). Returns rewards, non_score_rewards and kl, of that
    shape. name: of the KL estimate. token_scores (batch, response_length): parts of the score that belong to single
    tokens; the last token gets what is left. A row without a token carries no score.
    """
    # [V48] Here the KL is a cost of the token, and the returns of all tokens before it include it.
    #       ray_trainer.py#L86-L108
    kl = kl_estimate(logprobs, ref_logprobs, mask, name).detach()
    non_score_rewards = -kl_coef * kl
    # [V27] The score counts once, on the last valid token. verl writes the score of an empty response into its
    #       padding.   reward_manager/naive.py#L100
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)  # (batch, response_length)
    # [V121] Wherever it is paid, the score of a response is the sum of what its tokens get. So a punishment that
    #        replaces a score takes back what steps have earned.
    token_scores = torch.zeros_like(kl) if token_scores is None else token_scores.masked_fill(~mask, 0)
    left = (scores - token_scores.sum(1)).unsqueeze(1)  # (batch, 1)
    rewards = non_score_rewards + token_scores.to(kl.dtype)
    return torch.where(last, rewards + left.to(kl.dtype), rewards), non_score_rewards, kl


# ---- Step 6: advantages ----------------------------------------------------------------------------------------

# An estimator takes rewards, mask and groups, and what it needs of values, baselines, parts, gamma and lambdas. It
# returns advantages, which are not yet whitened, and the critic's targets if there is a critic. groups (batch,) are
# equal for responses to one prompt; baselines (batch,) is a number for each row; parts (batch, sources) is what each
# source of the score says; everything else is (batch, response_length). A row without a valid token counts nowhere.
# A new one needs an entry in ESTIMATORS, in --ppo.advantage of rlvr/arguments.py, and in report/derivation.toml.
Estimate = tuple[Tensor, Tensor | None]


def gae(
    rewards: Tensor,
    mask: Tensor,
    groups: Tensor,
    *,
    values: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    critic_lam: float | None = None,
    lam_alpha: float | None = None,
    **_,
) -> Estimate:
    """Generalised advantage estimation over valid tokens; the value after the last of them is 0.

    delta_t = r_t + gamma * V_{t+1} - V_t        A_t = delta_t + gamma * lam * A_{t+1}        R_t = A_t + V_t

    The A_t in R_t, the critic's target, may have a lambda of its own: critic_lam; None: the same. With lam_alpha, the
    policy's lambda is 1 - 1 / (lam_alpha * |y|), or 0 if that is negative, for a response of |y| tokens.
    """
    critic_lam, policy_lam = lam if critic_lam is None else critic_lam, lam
    if lam_alpha is not None:
        # [V106] With a fixed lambda, the score reaches the first token times lam^|y|, which is 0.2 at 0.95 and 30
        #        tokens. Here it is about exp(-1 / lam_alpha), however long the response is.
        policy_lam = 1 - 1 / (lam_alpha * mask.sum(1).to(values.dtype)).clamp(min=1)  # (batch,)
    advantages = sums_of_errors(rewards, mask, values, gamma=gamma, lam=policy_lam)
    # [V105] At critic_lam 1, the targets are sums of rewards without any value in them. Lower ones mix in what the
    #        critic already says, which carries its errors from token to token.
    same = lam_alpha is None and critic_lam == lam
    of_targets = advantages if same else sums_of_errors(rewards, mask, values, gamma=gamma, lam=critic_lam)
    return advantages.masked_fill(~mask, 0), (of_targets + values).masked_fill(~mask, 0)


def sums_of_errors(rewards: Tensor, mask: Tensor, values: Tensor, gamma: float, lam: float | Tensor) -> Tensor:
    """The A_t of gae (batch, response_length); what is masked means nothing. lam: a number, or one a row (batch,)."""
    # [V31] A response that was cut off counts as ended, because its score already judges the cut text.
    #       core_algos.py#L215
    advantages = torch.zeros_like(values)
    next_advantage = next_value = torch.zeros_like(values[:, 0])  # (batch,)
    for t in reversed(range(values.shape[1])):
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * next_advantage
        # [V29] A hole in the mask is skipped, without a step of gamma.   core_algos.py#L215-L263
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = next_advantage
    return advantages


def by_group(x: Tensor, groups: Tensor, reduce: str = "sum") -> Tensor:
    """The sum (amax, amin) of x (batch,) over the group of each row, the responses to its problem: (batch,)."""
    # [V08] A group has a number. The same prompt twice in a batch makes two groups.   ray_trainer.py#L1375-L1384
    if not len(groups):
        return x
    numbers = (groups.unsqueeze(1) == groups).byte().argmax(1)  # the first row of each row's group: (batch,)
    return torch.zeros_like(x).scatter_reduce(0, numbers, x, reduce, include_self=False)[numbers]


def scores_differ(scores: Tensor, live: Tensor, groups: Tensor) -> Tensor:
    """Which rows are in a group whose live rows, those with a valid token, have different scores. All: (batch,)."""
    # [V34] Scores are all equal if the largest is the smallest. Rounding may make the mean of equal numbers differ
    #       from them, so their deviations from it would not be exactly 0.   core_algos.py#L267-L330
    largest = by_group(scores.masked_fill(~live, -math.inf), groups, "amax")
    return largest > by_group(scores.masked_fill(~live, math.inf), groups, "amin")


def centred_scores(rewards: Tensor, mask: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three of (batch,): the sum of a response's rewards minus its group's mean; the group's size; that mean.

    The first is exactly 0 in a group of one, and where all are equal.
    """
    # [V32] The sum is over valid tokens. A row without any is left out of its group.   core_algos.py#L304
    live = mask.any(1)
    totals = rewards.masked_fill(~mask, 0).sum(1)  # (batch,)
    size = by_group(live.to(totals.dtype), groups)
    mean = by_group(totals, groups) / size.clamp(min=1)
    centred = totals - mean
    # [V35] A group of one teaches nothing; verl passes its raw reward on.   core_algos.py#L309-L311
    return centred.masked_fill(~scores_differ(totals, live, groups) | ~live, 0), size, mean


def grpo(rewards: Tensor, mask: Tensor, groups: Tensor, **_) -> Estimate:
    """(R - mean) / (std + 1e-6) in each group, the same for all tokens of a response; std with n - 1."""
    # [V33] If one of 8 responses is correct, it gets +2.47 and each wrong one gets -0.35.   core_algos.py#L267-L330
    centred, size, _ = centred_scores(rewards, mask, groups)
    std = (by_group(centred**2, groups) / (size - 1).clamp(min=1)).sqrt()
    return to_tokens(centred / (std + 1e-6), mask), None


def dr_grpo(rewards: Tensor, mask: Tensor, groups: Tensor, **_) -> Estimate:
    """R - mean in each group, not divided: prompts that are easy or hard weigh no more than others."""
    # [V36] [V37] This is the estimator of Dr. GRPO. verl has two implementations, one of which drops an option.
    #       core_algos.py#L267-L357
    return to_tokens(centred_scores(rewards, mask, groups)[0], mask), None


def maxrl(rewards: Tensor, mask: Tensor, groups: Tensor, **_) -> Estimate:
    """(R - mean) / (mean + 1e-6) in each group; 0 where the mean is not above 0, except for rounding."""
    # [V109] With scores of 0 and 1, the mean is the share of correct responses, and this is the gradient of its
    #        logarithm. If one of 8 responses is right, it gets +7, and +1/7 if only one is wrong.
    centred, size, mean = centred_scores(rewards, mask, groups)
    # Scores of both signs may cancel, except for rounding, which is then all that there is of the mean.
    absolute = by_group((centred + mean).abs().masked_fill(~mask.any(1), 0), groups) / size.clamp(min=1)
    return to_tokens((centred / (mean + 1e-6)).masked_fill(mean <= 1e-5 * absolute, 0), mask), None


def gdpo(rewards: Tensor, mask: Tensor, groups: Tensor, *, parts: Tensor, weights: Sequence[float], **_) -> Estimate:
    """GRPO of each source of the score alone, then their weighted sum, to be whitened over the tokens of the batch.

    weights: of the sources.
    """
    # [V112] GRPO of the sum takes 1 + 0 for 0 + 1, whichever of the two is rare in the group.
    #        GDPO verl-GDPO/verl/trainer/ppo/ray_trainer.py#L175-L202
    live = mask.any(1, keepdim=True)  # (batch, 1)
    each = zip(parts.to(rewards.dtype).split(1, dim=1), weights, strict=True)
    return to_tokens(sum(weight * grpo(part, live, groups)[0] for part, weight in each)[:, 0], mask), None


def rloo(rewards: Tensor, mask: Tensor, groups: Tensor, **_) -> Estimate:
    """R minus the mean of the others in the group, which is n / (n - 1) * (R - mean)."""
    # [V38] The others' mean leaves one out.   core_algos.py#L477-L524
    centred, size, _ = centred_scores(rewards, mask, groups)
    return to_tokens(centred * size / (size - 1).clamp(min=1), mask), None


def opo(rewards: Tensor, mask: Tensor, groups: Tensor, **_) -> Estimate:
    """R minus a mean of the group in which each response is weighted by its length."""
    # [V42] This baseline has the least variance if the gradients of all tokens are equally long.
    #       core_algos.py#L529-L579
    centred, *_ = centred_scores(rewards, mask, groups)
    lengths = mask.sum(1).to(centred.dtype)
    mean = by_group(centred * lengths, groups) / by_group(lengths, groups).clamp(min=1)
    return to_tokens(centred - mean, mask), None


def reinforce_pp(rewards: Tensor, mask: Tensor, groups: Tensor, *, gamma: float = 1.0, **_) -> Estimate:
    """REINFORCE++: the discounted sum of the rewards from a token on, to be whitened over the batch."""
    # [V39] This is GAE without values, and so it skips holes too. verl (until 8a1bf6d) forgot the rewards after one.
    #       core_algos.py#L583-L617
    return gae(rewards, mask, groups, values=torch.zeros_like(rewards), gamma=gamma, lam=1.0)[0], None


def reinforce_pp_baseline(rewards: Tensor, mask: Tensor, groups: Tensor, **_) -> Estimate:
    """R - mean in each group, to be whitened over the tokens of the batch, where long responses weigh more."""
    # [V40] Score and KL are centred together, as in verl; OpenRLHF (3c3be62) centres the score alone.
    #       core_algos.py#L425-L473
    return dr_grpo(rewards, mask, groups)


def remax(rewards: Tensor, mask: Tensor, groups: Tensor, *, baselines: Tensor, **_) -> Estimate:
    """The sum of the rewards from a token on, minus the score of the greedy response to the prompt (baselines)."""
    # [V41] The baseline holds no KL penalty, but the return does.   core_algos.py#L622-L654
    returns = gae(rewards, mask, groups, values=torch.zeros_like(rewards))[0]
    return (returns - baselines.unsqueeze(1)).masked_fill(~mask, 0), None


def to_tokens(x: Tensor, mask: Tensor) -> Tensor:
    """A number for each response (batch,) on each of its tokens (batch, response_length)."""
    return x.unsqueeze(1).expand(mask.shape).masked_fill(~mask, 0)


ESTIMATORS: dict[str, Callable[..., Estimate]] = {
    "gae": gae,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "maxrl": maxrl,
    "gdpo": gdpo,
    "rloo": rloo,
    "opo": opo,
    "reinforce++": reinforce_pp,
    "reinforce++-baseline": reinforce_pp_baseline,
    "remax": remax,
}
# For these, rewards of tokens may count. (For remax, too, it matters where they are, but it subtracts a whole score.)
OF_TOKENS = ("gae", "reinforce++")
IN_GROUPS = ("grpo", "dr_grpo", "maxrl", "gdpo", "rloo", "opo", "reinforce++-baseline")
# [V47] These are whitened by default. After GRPO, subtracting the mean over tokens would give an advantage to groups
#       without a signal. In gdpo and reinforce++-baseline it does so, here as in the originals.
WHITENED = ("gae", "gdpo", "reinforce++", "reinforce++-baseline")


def whiten(
    values: Tensor, mask: Tensor, *, keep_mean: bool, reduce: Callable[[Tensor], Tensor] = torch.clone
) -> Tensor:
    """Shift and scale the valid entries to mean 0 and variance 1; keep_mean adds the mean back. 0 elsewhere.

    values, mask: (batch, response_length). reduce: sums a tensor over all processes; by default there is one.
    """
    # [V44] The statistics are those of the whole batch on all processes, in float64, so that 1 and 8 processes agree.
    #       core_algos.py#L215-L263
    count = reduce(widened(mask.sum())).clamp(min=1)
    mean = reduce(widened(values.masked_fill(~mask, 0)).sum()) / count
    centred = (values - mean).masked_fill(~mask, 0)
    # [V45] [V46] The variance is divided by n, so that one token, or none, gives 0.   torch_functional.py#L322
    variance = reduce((widened(centred) ** 2).sum()) / count
    whitened = centred * torch.rsqrt(variance + 1e-8) + (mean if keep_mean else 0)
    return whitened.masked_fill(~mask, 0).to(values.dtype)


# ---- Step 7: losses --------------------------------------------------------------------------------------------

NO_ADVANTAGE = 1e-12  # units of score: more than rounding in float64 leaves of equal scores up to 1,000


def token_losses(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss: str,
    *,
    low: float,
    high: float,
    dual_clip: float | None = None,
    trust_region: float = 0.3,
) -> tuple[Tensor, Tensor, Tensor]:
    """The policy's loss per token, which tokens a bound changed or left out, and which the dual clip changed.

    All tensors are (batch, response_length). With the ratio r = exp(new - old) and its bounds 1 - low and 1 + high:

        ppo         max(-A r, -A clip(r)); with a dual clip c and A < 0, at most -A c
        gspo        the same with the r of the whole sequence, exp(mean of new - old), which hardly leaves 1: its
                    bounds are 3e-4 and 4e-4 where those of ppo are 0.2
        cispo       -clip(r) A log p, with no gradient through the clip: no token ever loses its gradient. With
                    low = 1 there is only an upper bound, and this is REINFORCE with a truncated importance weight
        ipo         -A r if the token's probability is at most trust_region from the old one, and 0 otherwise
        dppo        the same, but only tokens that have moved the way that A pushes them get 0
        reinforce   -A log p
    """
    new_logprobs, logprobs, advantages = (x.masked_fill(~mask, 0) for x in (new_logprobs, logprobs, advantages))
    # What rounding leaves of an advantage, where the responses to a prompt score the same, is none: no bound acts.
    advantages = advantages.masked_fill(advantages.abs() < NO_ADVANTAGE, 0)
    log_ratio, nothing = new_logprobs - logprobs, torch.zeros_like(mask)
    if loss == "reinforce":
        # [V64] With one step per batch, this has the gradient of ppo.   core_algos.py#L1984-L2060
        return -advantages * new_logprobs, nothing, nothing
    if loss == "gspo":
        # [V65] There is one ratio per sequence; each token has the gradient of its own log-prob.
        #       core_algos.py#L1254-L1325
        mean = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)  # (batch, 1)
        log_ratio = (new_logprobs - new_logprobs.detach() + mean.detach()).clamp(max=10)
    else:
        log_ratio = log_ratio.clamp(-20, 20)
    ratio = torch.exp(log_ratio)
    if loss in ("ipo", "dppo"):
        # [V113] A bound of the ratio is tight for rare tokens and loose for likely ones: 0.001 may not become 0.002,
        #        but 0.8 may become 0.96. What matters to the distribution is the difference.
        #        PRIME src/prime_rl/trainer/rl/loss.py#L109-L161, PRIME loss.py#L164-L196
        moved = new_logprobs.detach().exp() - logprobs.exp()
        left_out = ((moved.abs() if loss == "ipo" else moved * advantages.sign()) > trust_region) & mask
        return (-advantages * ratio).masked_fill(left_out, 0), left_out, nothing
    clipped_ratio = ratio.clamp(1 - low, 1 + high)
    if loss == "cispo":
        # [V66] The bounds are distances from 1.   core_algos.py#L1722-L1780
        return -clipped_ratio.detach() * advantages * new_logprobs, (ratio != clipped_ratio) & mask, nothing
    # [V58] [V63] The lower bound and the upper may differ, as in DAPO's clip-higher.   core_algos.py#L1160-L1250
    losses, clipped_losses = -advantages * ratio, -advantages * clipped_ratio
    clipped = (clipped_losses > losses) & mask
    losses = torch.maximum(losses, clipped_losses)
    if dual_clip is None or loss == "gspo":
        return losses, clipped, nothing
    # [V59] A token of a wrong answer that became more than c times as likely has a constant loss, and so no gradient.
    #       core_algos.py#L1160-L1250
    bound = -advantages * dual_clip
    clipped_below = (advantages < 0) & (losses > bound) & mask
    return torch.where(clipped_below, bound, losses), clipped, clipped_below


def lower_clip_range(loss: str, cliprange_low: float | None) -> float:
    """The `low` of token_losses: what was asked for, or the default of the loss if that is None."""
    # [V66] MiniMax-M1 and ScaleRL bound the ratio of cispo only from above, because a lower bound would raise weights
    #       that ought to be small. verl has one.   core_algos.py#L1722-L1780
    if cliprange_low is None:
        return 1.0 if loss == "cispo" else 0.2
    return cliprange_low


def value_losses(
    new_values: Tensor, values: Tensor, returns: Tensor, mask: Tensor, cliprange_value: float | None
) -> tuple[Tensor, Tensor]:
    """Half the larger of (V - R)^2 and (clip(V, V_old +- range) - R)^2 per token; which ones the clip changed.

    All tensors are (batch, response_length). cliprange_value None: no clip.
    """
    # [V69] Policy and critic share no parameter, and each has its own learning rate and gradient clip. So the loss
    #       needs no coefficient, which AdamW would hardly notice.   core_algos.py#L1799-L1838
    new_values, values, returns = (x.masked_fill(~mask, 0) for x in (new_values, values, returns))
    bound = math.inf if cliprange_value is None else cliprange_value
    clipped_values = torch.clamp(new_values, values - bound, values + bound)
    losses, clipped_losses = (new_values - returns) ** 2, (clipped_values - returns) ** 2
    return 0.5 * torch.maximum(losses, clipped_losses), clipped_losses > losses


def aggregate(
    losses: Tensor,
    mask: Tensor,
    mode: str,
    *,
    tokens: int | None = None,
    sequences: int | None = None,
    episodes: int | None = None,
    length: int | None = None,
) -> Tensor:
    """One number from losses (batch, response_length): with s_i the sum over response i of |i| tokens,

        token-mean                sum of s_i / tokens
        seq-mean-token-sum        sum of s_i / sequences
        seq-mean-token-mean       sum of s_i / |i| / sequences
        seq-mean-token-sum-norm   sum of s_i / (episodes * length)

    The counts are those of the whole minibatch on all processes, so that micro-batches and processes add up; None:
    those of this tensor. sequences: rows that are not empty; episodes: all rows; length: the longest that may be.

    The weight of a token, in a minibatch of a response of 2 tokens and one of 8, with response_length 10:

        token-mean                1/10 and 1/10    longer answers elsewhere in the minibatch make it smaller
        seq-mean-token-sum        1/2  and 1/2     a response's weight is proportional to its length
        seq-mean-token-mean       1/4  and 1/16    a short correct answer gains more per token, and a long wrong
                                                   loses less, so that wrong answers grow
        seq-mean-token-sum-norm   1/20 and 1/20    whatever the others' lengths (Dr. GRPO)
    """
    # [V60] [V61] The counts are of the minibatch, not of what a process holds at a time.
    #       core_algos.py#L1025-L1080
    lengths, losses = mask.sum(1), losses.masked_fill(~mask, 0)
    if mode == "token-mean":
        return losses.sum() / max(lengths.sum() if tokens is None else tokens, 1)
    if mode == "seq-mean-token-sum-norm":
        return losses.sum() / max((episodes or len(mask)) * (length or mask.shape[1]), 1)
    sums = losses.sum(1) / lengths.clamp(min=1) if mode == "seq-mean-token-mean" else losses.sum(1)
    return sums.sum() / max((lengths > 0).sum() if sequences is None else sequences, 1)


# ---- Off-policy: the sampler was another policy, or its arithmetic was different -------------------------------

# logprobs are the learner's; sampler_logprobs are those with which the tokens were drawn. The importance weight of a
# token is w = exp(logprobs - sampler_logprobs).


def log_weights(logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, kind: str) -> Tensor:
    """log w (batch, response_length): of each token; of its whole sequence; or the mean over the sequence."""
    log_w = (logprobs - sampler_logprobs).detach().masked_fill(~mask, 0)
    if kind == "token":
        return log_w
    total = log_w.sum(1, keepdim=True)
    return (total if kind == "sequence" else total / mask.sum(1, keepdim=True).clamp(min=1)).expand_as(log_w)


def importance_weights(logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, kind: str, cap: float) -> Tensor:
    """min(w, cap), detached, of each token or of its whole sequence: (batch, response_length), 0 where masked."""
    # [V85] Weights of sequences are unbiased except for the cap, and have a high variance. Weights of tokens are
    #       biased, and have a low one.   rollout_corr_helper.py#L481-L598
    weights = log_weights(logprobs, sampler_logprobs, mask, kind).clamp(-20, 20).exp()
    return weights.clamp(max=cap).masked_fill(~mask, 0)


def rejection_mask(
    logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, kind: str, low: float, high: float
) -> Tensor:
    """The tokens whose w is within low..high, or the tokens of responses for which a number of theirs is within.

    kind: token; sequence, by the geometric mean of a response's w; product, by the product of them.
    """
    # [V87] The bounds are on w itself. Those that verl calls k1 are on 1 / w.   rollout_corr_helper.py#L156-L372
    # [V111] The product is `sequence_mask` of TRL 1.16. In long responses it is far from 1 even if every w is near 1.
    level = {"token": "token", "sequence": "mean", "product": "sequence"}[kind]
    w = log_weights(logprobs, sampler_logprobs, mask, level).exp()
    return mask & (w >= low) & (w <= high)


def off_policy_mask(
    new_logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, mask: Tensor, delta: float
) -> Tensor:
    """False at tokens that are blamed, in responses with a mean of log(sampler / new) above delta, in nats.

    All tensors are (batch, response_length).
    """
    # [V110] The policy would no longer write such a response, so pushing it down further teaches little and is noisy.
    gap = -log_weights(new_logprobs, sampler_logprobs, mask, "mean")
    return ~((advantages < 0) & (gap > delta) & mask)


def mismatch(logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How far the learner is from the sampler: 0-d tensors, over valid tokens and rows that are not empty.

    All are 0 where there is no token.
    """
    # [V89] [V90] The same policy is some way from itself too, if two engines compute it.
    #       rollout_corr_helper.py#L834-L940
    live = mask.any(1)
    logprobs, sampler_logprobs = (x.detach().masked_fill(~mask, 0)[live] for x in (logprobs, sampler_logprobs))
    mask = mask[live]
    log_w, lengths = logprobs - sampler_logprobs, mask.sum(1)
    weights = log_w.clamp(-20, 20).exp()[mask]  # (tokens,)
    sequence_weights = log_w.sum(1).clamp(-20, 20).exp()  # (rows,)
    log_ppl, sampler_log_ppl = (-x.sum(1) / lengths for x in (logprobs, sampler_logprobs))
    numbers = {
        "kl": -log_w[mask].mean(),
        "k3": (torch.expm1(log_w.clamp(-20, 20)) - log_w)[mask].mean(),
        "chi2_token": (weights**2).mean() - 1,
        "chi2_sequence": (sequence_weights**2).mean() - 1,
        "perplexity": log_ppl.exp().mean(),
        "sampler_perplexity": sampler_log_ppl.exp().mean(),
        "log_perplexity_gap": (log_ppl - sampler_log_ppl).mean(),
        "largest_gap": F.pad(log_w[mask].abs(), (0, 1)).max(),
        "ess": weights.mean() ** 2 / (weights**2).mean(),
    }
    return numbers if live.any() else {name: torch.zeros_like(number) for name, number in numbers.items()}
