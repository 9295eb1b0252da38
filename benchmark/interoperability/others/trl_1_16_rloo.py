"""The loss of RLOOTrainer of TRL 1.16.0, for `python -m ppo_rlhf.check`, called with a stand-in for the trainer.

Its ratio is that of a whole response, the product over its tokens, and so only responses of one token are compared.
"""

from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
from trl.trainer.rloo_trainer import RLOOTrainer


def policy_loss(new_logprobs, logprobs, advantages, mask, cliprange, cliprange_high):
    if mask.shape[1] > 1:
        raise NotImplementedError("the ratio is that of a response")
    trainer = MagicMock()
    trainer._get_per_token_logps_and_entropies.return_value = (new_logprobs, torch.zeros_like(mask.float()), None)
    trainer.accelerator = SimpleNamespace(gather=lambda x: x, reduce=lambda x, **_: x)
    high = cliprange if cliprange_high is None else cliprange_high
    trainer.configure_mock(aux_loss_enabled=False, epsilon_low=cliprange, epsilon_high=high)
    ids = torch.zeros(mask.shape, dtype=torch.long)
    inputs = {"prompt_ids": ids, "prompt_mask": mask.long(), "completion_ids": ids, "completion_mask": mask.long()}
    inputs |= {"old_logps": logprobs.sum(1), "advantages": advantages[:, 0]}
    return RLOOTrainer._compute_loss(trainer, MagicMock(), inputs)
