"""Functions of OpenRLHF 0.11.2, for `python -m ppo_rlhf.check`.

Importing the package as a whole takes DeepSpeed, flash-attn and vLLM, which need a GPU. None of the functions below
use them, so their modules are loaded with stand-ins for these.
"""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import torch


class Finder:
    """Stands in for packages that are missing."""

    def find_spec(self, name, path=None, target=None):
        if name.startswith("flash_attn.ops"):  # a kernel that it can do without
            return None
        if name.partition(".")[0] in ("deepspeed", "vllm", "ring_flash_attn", "flash_attn"):
            return importlib.util.spec_from_loader(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = MagicMock(name=spec.name, __path__=[], __spec__=spec)
        return module

    def exec_module(self, module):
        pass


def empty_package(name):
    """The package without what its __init__ imports."""
    module = ModuleType(name)
    module.__path__ = [*importlib.util.find_spec(name).submodule_search_locations]
    sys.modules[name] = module


sys.meta_path.insert(0, Finder())
empty_package("openrlhf.models")
empty_package("openrlhf.trainer")
empty_package("openrlhf.trainer.ray")
sys.modules["openrlhf.trainer.ray.launcher"] = MagicMock()

from openrlhf.models import loss, utils  # noqa: E402
from openrlhf.trainer.ppo_utils import experience_maker, kl_controller as controllers, length_penalty  # noqa: E402

MAKER = experience_maker.RemoteExperienceMaker


def kl_estimate(logprobs, ref_logprobs, name):
    if name.endswith("+"):
        return utils.compute_approx_kl(logprobs, ref_logprobs, kl_estimator=name[:-1], unbiased_gradient=True)
    return utils.compute_approx_kl(logprobs, ref_logprobs, kl_estimator=name)


def kl_loss(logprobs, ref_logprobs, sampler_logprobs):
    """With unbiased_gradient, which is an option."""
    return utils.compute_approx_kl(logprobs, ref_logprobs, sampler_logprobs, "k3", unbiased_gradient=True)


def token_rewards(scores, logprobs, ref_logprobs, mask, kl_coef):
    kl = utils.compute_approx_kl(logprobs, ref_logprobs)
    return utils.compute_reward(scores, kl_coef, kl, action_mask=mask) * mask  # the next step masks it, as GAE does


def token_logprobs(logits, tokens, temperature):
    return utils.log_probs_from_logits(logits.clone(), tokens, temperature)


def kl_controller(kl_coef, kl, target, episodes, horizon):
    controller = controllers.AdaptiveKLController(kl_coef, target, horizon)
    controller.update(kl, episodes)
    return controller.value


def overlong_penalty(lengths, max_length, buffer, factor):
    experience = SimpleNamespace(response_length=lengths, rewards=torch.zeros(len(lengths)))
    length_penalty.apply_overlong_penalty([experience], max_length, buffer, factor)
    return experience.rewards


def gae(rewards, values, mask, gamma, lam):
    return MAKER.get_advantages_and_returns(None, values, rewards, mask, gamma, lam)


def reward_to_go(rewards, mask, gamma):
    return MAKER.get_cumulative_returns(None, rewards, mask, gamma)


NAMES = {"grpo": "group_norm", "dr_grpo": "dr_grpo", "rloo": "rloo"}


def group_advantages(scores, group_size, name):
    """The method that does all steps, for responses of one token, with no KL."""
    ones = torch.ones(len(scores), 1)
    numbers = {"info": {}, "kl": ones * 0, "action_mask": ones}
    experience = SimpleNamespace(rewards=scores, index=list(range(len(scores))), **numbers)
    advantage = SimpleNamespace(estimator=NAMES[name], gamma=1.0, lambd=1.0, no_std_norm=False)
    args = SimpleNamespace(
        algo=SimpleNamespace(advantage=advantage),
        rollout=SimpleNamespace(n_samples_per_prompt=group_size),
        reward=MagicMock(clip_range=None, overlong_buffer_len=None, stop_properly_penalty_coef=None),
    )
    maker = MAKER.__new__(MAKER)
    maker.strategy, maker.kl_ctl = SimpleNamespace(args=args), SimpleNamespace(value=0.0)
    maker.advantage_estimator = NAMES[name]
    experience_maker.apply_length_penalties = lambda *_: None
    return maker.compute_advantages_and_returns([experience])[0].advantages[:, 0]


def bounds_of(cliprange, cliprange_high):
    return {"clip_eps_low": cliprange, "clip_eps_high": cliprange if cliprange_high is None else cliprange_high}


def policy_loss(new_logprobs, logprobs, advantages, mask, cliprange, cliprange_high, dual_clip, tokens):
    criterion = loss.PolicyLoss(**bounds_of(cliprange, cliprange_high), dual_clip=dual_clip)
    return criterion(new_logprobs, logprobs, advantages, mask, batch_num_tokens=tokens)[0]


def gspo_loss(new_logprobs, logprobs, advantages, mask, cliprange, cliprange_high):
    criterion = loss.PolicyLoss(**bounds_of(cliprange, cliprange_high), policy_loss_type="gspo")
    return criterion(new_logprobs, logprobs, advantages, mask)[0]


def value_loss(new_values, values, returns, mask, cliprange, tokens):
    return loss.ValueLoss(cliprange)(new_values, values, returns, mask, batch_num_tokens=tokens)


def aggregate(losses, mask, mode, tokens, sequences):
    if mode not in ("token-mean", "seq-mean-token-mean"):
        raise NotImplementedError(mode)
    return loss.aggregate_loss(losses, mask, mode == "token-mean", 1, tokens, sequences)
