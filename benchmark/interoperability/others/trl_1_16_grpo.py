"""The loss of GRPOTrainer of TRL 1.16.0, for `python -m ppo_rlhf.check`.

The method `_compute_loss` is called with a stand-in for the trainer, whose model returns given log-probs. Advantages
and masks are computed within longer methods, which also generate, so they cannot be called.
"""

from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
from trl.trainer import utils
from trl.trainer.grpo_trainer import GRPOTrainer


def loss(loss_type, new_logprobs, logprobs, advantages, mask, tokens=None, ref_logprobs=None, **settings):
    trainer = MagicMock()
    trainer._get_per_token_logps_and_entropies.return_value = (new_logprobs, torch.zeros_like(mask.float()), None)
    trainer.accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x, gather_for_metrics=lambda x: x
    )
    trainer.args = SimpleNamespace(delta=None, use_bias_correction_kl=True, steps_per_generation=1)
    own = ("delta", "use_bias_correction_kl")
    trainer.args.__dict__.update({key: settings.pop(key) for key in own if key in settings})
    values = {"top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "aux_loss_enabled": False, "beta": 0.0}
    values |= {"importance_sampling_level": "token", "use_vllm": False, "_entropy_bonus_enabled": False}
    values |= {"epsilon_low": 0.2, "epsilon_high": 0.2}
    values |= {"loss_type": loss_type, "max_completion_length": mask.shape[1]}
    trainer.configure_mock(**(values | settings))
    trainer.model.training = False
    ids = torch.zeros(mask.shape, dtype=torch.long)
    inputs = {"prompt_ids": ids[:, :1], "prompt_mask": mask[:, :1].long(), "completion_ids": ids}
    inputs |= {"completion_mask": mask.long(), "advantages": advantages, "old_per_token_logps": logprobs}
    inputs |= {"ref_per_token_logps": ref_logprobs}
    inputs["num_items_in_batch"] = mask.sum() if tokens is None else torch.tensor(tokens)
    return GRPOTrainer._compute_loss(trainer, MagicMock(), inputs)


def policy_loss(new_logprobs, logprobs, advantages, mask, cliprange, cliprange_high, dual_clip, tokens):
    bounds = {"epsilon_low": cliprange, "epsilon_high": cliprange if cliprange_high is None else cliprange_high}
    return loss("dapo", new_logprobs, logprobs, advantages, mask, tokens, delta=dual_clip, **bounds)


def gspo_loss(new_logprobs, logprobs, advantages, mask, cliprange, cliprange_high):
    bounds = {"epsilon_low": cliprange, "epsilon_high": cliprange if cliprange_high is None else cliprange_high}
    given = (new_logprobs, logprobs, advantages, mask)
    return loss("grpo", *given, importance_sampling_level="sequence", **bounds)


def cispo_loss(new_logprobs, logprobs, advantages, mask, cliprange, cliprange_high):
    """Its epsilon_high is the bound itself, and there is no lower one."""
    bound = 1 + (cliprange if cliprange_high is None else cliprange_high)
    return loss("cispo", new_logprobs, logprobs, advantages, mask, epsilon_high=bound)


TYPES = {"token-mean": "dapo", "seq-mean-token-mean": "grpo"}
TYPES |= {"seq-mean-token-sum": "luspo", "seq-mean-token-sum-norm": "dr_grpo"}


def aggregate(losses, mask, mode, tokens):
    """With the ratio 1 and the advantages -losses, each token has its own loss."""
    zeros = torch.zeros_like(losses)
    if tokens is not None and mode != "token-mean":  # the trainer divides by the number of micro-batches instead
        raise NotImplementedError("counts are of the micro-batch")
    return loss(TYPES[mode], zeros, zeros, -losses, mask, tokens)


def kl_loss(logprobs, ref_logprobs, sampler_logprobs):
    """The penalty of each token on its own, with the default settings."""
    one = torch.ones(1, 1, dtype=torch.bool)
    columns = []
    for t in range(logprobs.shape[1]):
        of_tokens = (logprobs, sampler_logprobs, ref_logprobs)
        given = [[x[i : i + 1, t : t + 1] for x in of_tokens] for i in range(len(logprobs))]
        rows = [loss("dapo", p, q, torch.zeros(1, 1), one, ref_logprobs=r, beta=1.0) for p, q, r in given]
        columns.append(torch.stack(rows))
    return torch.stack(columns, dim=1)


def token_logprobs(logits, tokens, temperature):
    return utils.selective_log_softmax(logits / temperature, tokens)


def entropy(logits, temperature):
    return utils.entropy_from_logits(logits / temperature)
