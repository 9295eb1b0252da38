"""train_policy.py, keeping what each process sampled and the KL coefficient that it used.

`recorded/<rank>.safetensors` holds the context_responses of every update, (local_batch, sequence_length) each, and
`recorded/<rank>.json` the coefficients before and after every update. With NOISE_BELONGS_TO_THE_PROCESS set, the
sampling noise does: a mistake.
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
ppo_update, episode_noise = train_policy.ppo_update, train_policy.episode_noise
right_update = train_policy.AdaptiveKLController.update


def recorded_ppo_update(policy, optimizer, rollout, *arguments, **named):
    sampled.append(rollout.context_responses)
    return ppo_update(policy, optimizer, rollout, *arguments, **named)


def recorded_noise(seed: int, update: int, batch: int, response_length: int) -> torch.Tensor:
    mistake = rank if os.environ.get("NOISE_BELONGS_TO_THE_PROCESS") else 0
    return episode_noise(seed + mistake, update, batch, response_length)


def recorded_update(self, kl: float, episodes: int) -> None:
    before = self.value
    right_update(self, kl, episodes)
    coefficients.append([before, self.value])


train_policy.ppo_update, train_policy.episode_noise = recorded_ppo_update, recorded_noise
train_policy.AdaptiveKLController.update = recorded_update
errors.run_script(lambda: train_policy.train(command_line.parse_args(train_policy.PRESETS)))
folder = Path("recorded")
folder.mkdir(exist_ok=True)
save_file({f"{i:03}": tokens for i, tokens in enumerate(sampled)}, folder / f"{rank}.safetensors")
(folder / f"{rank}.json").write_text(json.dumps(coefficients))
