"""What can be called of PPOTrainer of TRL 1.12.0, for `python -m ppo_rlhf.check`.

Its GAE and losses are inside train(), and can't be called.
"""

import torch
from trl.experimental.ppo import ppo_trainer
from trl.experimental.utils import first_true_indices
from trl.trainer import utils


def whiten(values, mask, keep_mean):
    return ppo_trainer.masked_whiten(values, mask, shift_mean=not keep_mean)


def truncate(responses, stop_id, pad_id):
    return ppo_trainer.truncate_response(stop_id, pad_id, responses)


def response_mask(responses, stop_id):
    return torch.arange(responses.shape[1]) <= first_true_indices(responses == stop_id).unsqueeze(1)


def token_logprobs(logits, tokens, temperature):
    return utils.selective_log_softmax(logits / temperature, tokens)


def entropy(logits, temperature):
    return utils.entropy_from_logits(logits / temperature)
