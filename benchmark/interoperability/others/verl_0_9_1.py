"""Functions of verl 0.9.1 for `python -m ppo_rlhf.check`: of core_algos, torch_functional, rollout_corr_helper."""

from types import SimpleNamespace

import torch
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.utils import torch_functional
from verl.workers.config import ActorConfig


class Config(SimpleNamespace):
    def get(self, name, default=None):
        return getattr(self, name, default)


def whiten(values, mask, keep_mean):
    return torch_functional.masked_whiten(values, mask, shift_mean=not keep_mean)


def response_mask(responses, stop_id):
    return torch_functional.get_response_mask(responses, stop_id)


def token_logprobs(logits, tokens, temperature):
    return torch_functional.logprobs_from_logits_v2(logits / temperature, tokens)


def entropy(logits, temperature):
    return torch_functional.entropy_from_logits(logits / temperature)


def kl_estimate(logprobs, ref_logprobs, name):
    return core_algos.kl_penalty(logprobs, ref_logprobs, name)


def kl_controller(kl_coef, kl, target, episodes, horizon):
    controller = core_algos.AdaptiveKLController(kl_coef, target, horizon)
    controller.update(kl, episodes)
    return controller.value


def gae(rewards, values, mask, gamma, lam):
    return core_algos.compute_gae_advantage_return(rewards, values, mask.to(values.dtype), gamma, lam)


def reward_to_go(rewards, mask, gamma):
    config = Config(gamma=gamma)
    mask = mask.to(rewards.dtype)
    return core_algos.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config)[1]


def group_advantages(scores, groups, name):
    mask, rewards = torch.ones(len(scores), 1), scores.unsqueeze(1)
    if name == "rloo":
        found = core_algos.compute_rloo_outcome_advantage(rewards, mask, groups.numpy())[0]
    else:
        divided = name == "grpo"
        found = core_algos.compute_grpo_outcome_advantage(
            rewards, mask, groups.numpy(), norm_adv_by_std_in_grpo=divided
        )[0]
    return found[:, 0]


def config_of(cliprange, cliprange_high, dual_clip=None, tokens=None):
    high = cliprange if cliprange_high is None else cliprange_high
    bounds = {"clip_ratio": cliprange, "clip_ratio_low": cliprange, "clip_ratio_high": high}
    bounds |= {"clip_ratio_c": 1e6 if dual_clip is None else dual_clip}  # its dual clip is always on
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **bounds)
    config.global_batch_info.update({} if tokens is None else {"batch_num_tokens": tokens, "dp_size": 1})
    return config


def policy_loss(new_logprobs, logprobs, advantages, mask, cliprange, cliprange_high, dual_clip, tokens):
    config = config_of(cliprange, cliprange_high, dual_clip, tokens)
    given = (logprobs, new_logprobs, advantages, mask.to(logprobs.dtype), "token-mean", config)
    return core_algos.compute_policy_loss_vanilla(*given)[0]


def gspo_loss(new_logprobs, logprobs, advantages, mask, cliprange, cliprange_high):
    config = config_of(cliprange, cliprange_high)
    given = (logprobs, new_logprobs, advantages, mask.to(logprobs.dtype), "seq-mean-token-mean", config)
    return core_algos.compute_policy_loss_gspo(*given)[0]


def cispo_loss(new_logprobs, logprobs, advantages, mask, cliprange, cliprange_high):
    config = config_of(cliprange, cliprange_high)
    given = (logprobs, new_logprobs, advantages, mask.to(logprobs.dtype), "token-mean", config)
    return core_algos.compute_policy_loss_cispo(*given)[0]


def value_loss(new_values, values, returns, mask, cliprange, tokens):
    mask = mask.to(values.dtype)
    return core_algos.compute_value_loss(new_values, returns, values, mask, cliprange, batch_num_tokens=tokens)[0]


def aggregate(losses, mask, mode, tokens, sequences, length):
    counts = {"batch_num_tokens": tokens, "global_batch_size": sequences, "loss_scale_factor": length}
    return core_algos.agg_loss(losses, mask.to(losses.dtype), mode, **counts)


def importance_weights(logprobs, sampler_logprobs, mask, kind, cap):
    mask = mask.to(logprobs.dtype)
    cap = min(cap, 1e9)
    found = rollout_corr_helper.compute_rollout_correction_weights(logprobs - sampler_logprobs, mask, kind, cap)
    return found[0]


REJECTIONS = {"token": "token_k1", "sequence": "seq_mean_k1"}


def rejection_mask(logprobs, sampler_logprobs, mask, kind, low, high):
    """Its bounds are on the inverse weight, as its documentation of k1 says."""
    bounds = f"{1 / high}_{1 / low}"
    given = (logprobs - sampler_logprobs, mask.to(logprobs.dtype), REJECTIONS[kind], bounds)
    return rollout_corr_helper.compute_rollout_rejection_mask(*given)[0]
