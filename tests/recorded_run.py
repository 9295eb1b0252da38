"""train_policy.py, keeping what each process sampled and the KL coefficient that it used.

`recorded/<rank>.safetensors` holds the context_responses of every update, (local_batch, sequence_length) each, and
`recorded/<rank>.json` the coefficients before and after every update.
"""

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from ppo_rlhf import train_policy
from ppo_rlhf.lib import command_line, errors

rank = int(os.environ.get("RANK", 0))
sampled: list[torch.Tensor] = []  # of each update
coefficients: list[list[float]] = []
ppo_update, kl_update = train_policy.ppo_update, train_policy.AdaptiveKLController.update


def recorded_ppo_update(policy, optimizer, rollout, *arguments, **named):
    sampled.append(rollout.context_responses)
    return ppo_update(policy, optimizer, rollout, *arguments, **named)


def recorded_update(self, kl: float, episodes: int) -> None:
    before = self.value
    kl_update(self, kl, episodes)
    coefficients.append([before, self.value])


train_policy.ppo_update = recorded_ppo_update
train_policy.AdaptiveKLController.update = recorded_update
errors.run_script(lambda: train_policy.train(command_line.parse_args(train_policy.PRESETS)))
folder = Path("recorded")
folder.mkdir(exist_ok=True)
save_file({f"{i:03}": tokens for i, tokens in enumerate(sampled)}, folder / f"{rank}.safetensors")
(folder / f"{rank}.json").write_text(json.dumps(coefficients))
