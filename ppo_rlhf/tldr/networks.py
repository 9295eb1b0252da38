"""The other parts that PPO needs in chapters 2 and 3: a critic, a reference, a reward model, a KL controller.

Marks like [D69] name an implementation detail. OAI is openai/lm-human-preferences at commit cbfd210; verl is
verl-project/verl at commit b178a3c. See docs/reference.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from ppo_rlhf.lib.nets import foreign
from ppo_rlhf.tldr import models, packing
from ppo_rlhf.train_reward import RewardModel


class Reference:
    """The model that the policy started from. [X35] With adapters, it is the policy while they are switched off."""

    def __init__(self, lm_backbone: PreTrainedModel, adapters: nn.Module | None):
        """adapters: peft's handle of the adapters in lm_backbone, if there are any."""
        self.lm_backbone, self.adapters = lm_backbone, adapters

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Within the block, the language model is the reference, and has no gradient."""
        without_adapters = self.adapters.disable_adapter() if self.adapters else contextlib.nullcontext()
        with torch.no_grad(), without_adapters:
            yield


def load_critic(args: Any, vocab_size: int, *, zero_head: bool = False) -> RewardModel:
    """The critic before it learns: the model that the arguments name, or else the base model with a new head.

    zero_head: whether a new head starts at 0, so that all its values are 0, and not at random.
    """
    trained = args.rewards.trained_model
    if args.rewards.value_model or (trained and not foreign.is_foreign(trained)):
        name = "value_model" if args.rewards.value_model else "trained_model"
        critic = models.load_scalar_model(args, name, vocab_size)
    else:
        torch.manual_seed(args.seed)  # for the head, the same on every process
        backbone = models.load_base_model(args, AutoModel)
        critic = RewardModel(backbone).to(backbone.dtype)
        if zero_head:
            nn.init.zeros_(critic.reward_head.weight)
    critic.requires_grad_(True)
    critic.gain.requires_grad_(False)
    critic.bias.requires_grad_(False)
    return critic


def response_scorer(reward_model: RewardModel, pad_id: int, *, rows: int = 0) -> Callable[..., Tensor]:
    """A function that scores responses with a reward model.

    It takes queries (batch, query_length) and responses (batch, response_length), with our padding, and returns
    (batch,). It needs no messages. rows: how many it reads at a time, at most; 0: as many as are fast.
    """

    @torch.no_grad()
    def score(queries: Tensor, responses: Tensor, messages: Any = None) -> Tensor:
        tokens = torch.cat([queries, responses], dim=1)
        return packing.by_length(nn.Module.__call__, reward_model, tokens, pad_id=pad_id, rows=rows)

    return score
