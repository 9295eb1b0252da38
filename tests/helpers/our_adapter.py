"""Our own functions under the names that `python -m ppo_rlhf.check` asks for.

**named: arguments that have the same names in ours.
"""

import torch

from ppo_rlhf import train_policy, train_reward
from ppo_rlhf.rlvr import algebra, rewards
from ppo_rlhf.tldr import policy as tldr_policy


def truncate(responses, stop_id, pad_id, after):
    return train_policy.truncate_at(responses, stop_id, after, pad_id)


def response_mask(responses, stop_id):
    return algebra.response_mask(responses, {stop_id})[0]


def has_stop(**named):
    return train_policy.has_stop(**named)


def token_logprobs(logits, tokens, temperature):
    return algebra.read_logits(logits / temperature, tokens, entropy_learns=False)[0]


def entropy(logits, temperature):
    tokens = torch.zeros(logits.shape[:2], dtype=torch.long)
    return algebra.read_logits(logits / temperature, tokens, entropy_learns=True)[1]


def response_logprobs(model, tokens, attention_mask, context_length, temperature):
    vocab_size = model.config.vocab_size
    tokens = tokens.masked_fill(~attention_mask, vocab_size)
    return train_policy.response_logprobs(model, tokens, vocab_size, context_length, temperature, vocab_size)[0]


def token_rewards(scores, logprobs, ref_logprobs, mask, kl_coef, score_at):
    chapter = tldr_policy if score_at == "next" else algebra
    return chapter.compute_rewards(scores, logprobs, ref_logprobs, mask, kl_coef, "k1")[0]


def overlong_penalty(lengths, max_length, buffer, factor):
    return rewards.overlong_punishment(lengths, max_length, buffer, factor)


def kl_controller(kl_coef, kl, target, episodes, horizon):
    controller = train_policy.AdaptiveKLController(kl_coef, target, horizon)
    controller.update(kl, episodes)
    return controller.value


def best_of_n_loss(**named):
    return train_reward.best_of_n_loss(**named)


def whiten(**named):
    return algebra.whiten(**named)


def gae(mask, **named):
    return algebra.gae(mask=mask, groups=torch.arange(len(mask)), **named)


def reward_to_go(rewards, mask, gamma):
    return algebra.reinforce_pp(rewards, mask, torch.arange(len(mask)), gamma=gamma)[0]


def group_advantages(scores, groups=None, group_size=None, name="grpo"):
    groups = torch.arange(len(scores)) // group_size if groups is None else groups
    mask = torch.ones(len(scores), 1, dtype=torch.bool)
    return algebra.ESTIMATORS[name](scores.unsqueeze(1), mask, groups)[0].squeeze(1)


def token_loss(name, mode, mask, cliprange, cliprange_high, tokens=None, **named):
    high = cliprange if cliprange_high is None else cliprange_high
    losses = algebra.token_losses(mask=mask, loss=name, low=cliprange, high=high, **named)[0]
    return algebra.aggregate(losses, mask, mode, tokens=tokens)


def policy_loss(**named):
    return token_loss("ppo", "token-mean", **named)


def gspo_loss(**named):
    return token_loss("gspo", "seq-mean-token-mean", **named)


def cispo_loss(**named):
    return token_loss("cispo", "token-mean", **named)


def value_loss(mask, cliprange, tokens, **named):
    losses, _ = algebra.value_losses(mask=mask, cliprange_value=cliprange, **named)
    return algebra.aggregate(losses, mask, "token-mean", tokens=tokens)


def aggregate(sequences, **named):
    return algebra.aggregate(sequences=sequences, episodes=sequences, **named)


def accumulate(losses, masks):
    tokens = sum(int(mask.sum()) for mask in masks)
    parts = zip(losses, masks, strict=True)
    return sum(algebra.aggregate(part, mask, "token-mean", tokens=tokens) for part, mask in parts)


def kl_estimate(**named):
    return algebra.kl_estimate(**named)


def importance_weights(**named):
    return algebra.importance_weights(**named)


def rejection_mask(**named):
    return algebra.rejection_mask(**named)


def kl_loss(logprobs, ref_logprobs, sampler_logprobs, mask):
    ratio = torch.exp(logprobs - sampler_logprobs).detach()
    return ratio * algebra.kl_estimate(logprobs, ref_logprobs, mask, "k3+")


def adam_step(parameter, gradient, m, v, step, lr, beta1, beta2, eps, style):
    parameter = torch.nn.Parameter(parameter)
    kind = train_policy.AdamTensorFlowStyle if style == "tensorflow" else torch.optim.Adam
    optimizer = kind([parameter], lr=lr, betas=(beta1, beta2), eps=eps)
    state = {"step": torch.tensor(step - 1.0), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
    optimizer.state[parameter] = state
    optimizer.param_groups[0]["steps"] = step - 1
    parameter.grad = gradient
    optimizer.step()
    return parameter.detach(), state["exp_avg"], state["exp_avg_sq"]
