"""The networks of chapter 3: policy, critic and reference; how they read responses, are loaded and saved.

Marks like [V30] name an implementation detail. The original is verl-project/verl at commit b178a3c; files and lines
next to marks are the original's. See docs/reference.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.rlvr.algebra import read_logits
from ppo_rlhf.rlvr.arguments import Args
from ppo_rlhf.tldr import models, packing
from ppo_rlhf.tldr.responses import read_before_responses
from ppo_rlhf.train_policy import check_model, read_scalar, scaled_logits, vocabulary_size, weights_dtype
from ppo_rlhf.train_reward import RewardModel, prepare

# ---- How they read ---------------------------------------------------------------------------------------------


class ActorCritic(nn.Module):
    """The policy and, if the estimator has one, the critic; they share nothing."""

    def __init__(
        self,
        lm_backbone: PreTrainedModel,
        critic: RewardModel | None,
        vocab_size: int,
        temperature: float,
        *,
        entropy_learns: bool = True,
    ):
        """vocab_size: number of ids that can be sampled; the output layer may have more rows. entropy_learns: whether
        entropies have a gradient.
        """
        super().__init__()
        self.lm_backbone, self.critic = lm_backbone, critic
        self.vocab_size, self.temperature, self.entropy_learns = vocab_size, temperature, entropy_learns

    def forward(
        self, tokens: Tensor, responses: Tensor, mask: Tensor, pad_id: int, reference: Reference | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log-probs of response tokens, exact entropies, values (0 without a critic) and the exact KL from a
        reference, if one is given: four of (batch, response_length), 0 where masked.

        tokens: (batch, length), queries and responses with padding anywhere. responses: (batch, response_length), the
        same responses with padding at their end. mask: (batch, response_length), which of their tokens to read.
        """
        # [V30] What the networks say at a position is about the next token: hence the shift by one.
        #       dp_critic.py#L117
        at = mask.nonzero(as_tuple=True)  # a mask as an index would wait for the device each time
        labels = responses[at]  # (tokens,)
        states = [read_before_responses(self.lm_backbone, tokens, responses, pad_id)[at]]  # (tokens, width)
        if reference:
            states.append(reference.hidden_states(tokens, responses, pad_id)[at])
        read = partial(self.read_hidden, reference)
        logprobs, entropies, exact_kl = packing.few_logits_at_a_time(read, self.vocab_size, labels, *states)
        values = torch.zeros_like(logprobs)
        if self.critic:
            hidden = read_before_responses(self.critic.lm_backbone, tokens, responses, pad_id)[at]
            values = self.critic.gain * read_scalar(self.critic.reward_head, hidden) + self.critic.bias
        numbers = (logprobs, entropies, values, exact_kl)  # (tokens,) each
        return tuple(x.new_zeros(mask.shape).masked_scatter(mask, x) for x in numbers)

    def read_hidden(
        self, reference: Reference | None, labels: Tensor, hidden: Tensor, ref_hidden: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs of labels (tokens,), exact entropies and KLs there, from final hidden states (tokens, width)."""
        # [V13] [V15] Logits are at the sampler's temperature, in float32 or better.
        #       dp_actor.py#L259, dp_actor.py#L368
        logits = scaled_logits(self.lm_backbone, hidden, self.vocab_size, self.temperature)
        logprobs, entropies = read_logits(logits, labels, entropy_learns=self.entropy_learns)
        if reference is None:
            return logprobs, entropies, torch.zeros_like(logprobs)
        # [V51] The KL is a sum over the vocabulary, computed for a few tokens at a time.
        difference = F.log_softmax(logits, dim=1) - F.log_softmax(reference.logits(ref_hidden), dim=1)
        return logprobs, entropies, (logits.softmax(1) * difference).sum(1)


class Reference(models.Reference):
    """The model that the policy started from, or its teacher, at the policy's temperature."""

    # [V57] It never changes. Where nothing is penalised there is none.
    def __init__(self, lm_backbone: PreTrainedModel, adapters: nn.Module | None, vocab_size: int, temperature: float):
        super().__init__(lm_backbone, adapters)
        self.network = ActorCritic(lm_backbone, None, vocab_size, temperature)

    def logprobs(self, tokens: Tensor, responses: Tensor, mask: Tensor, pad_id: int) -> Tensor:
        """Log-probs (batch, response_length); arguments as of ActorCritic."""
        with self.in_use():
            return self.network(tokens, responses, mask, pad_id)[0]

    def hidden_states(self, tokens: Tensor, responses: Tensor, pad_id: int) -> Tensor:
        """Final hidden states before each token of the responses: (batch, response_length, width)."""
        with self.in_use():
            return read_before_responses(self.lm_backbone, tokens, responses, pad_id)

    def logits(self, hidden_states: Tensor) -> Tensor:
        with self.in_use():
            return scaled_logits(self.lm_backbone, hidden_states, self.network.vocab_size, self.network.temperature)


# ---- Load and save ---------------------------------------------------------------------------------------------


def load_networks(
    args: Args, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> tuple[ActorCritic, Reference | None, nn.Module | None]:
    """Policy with or without a critic, reference, and peft's handle of the policy's adapters, if there are any.

    Without a penalty there is no reference. A teacher takes its place.
    """
    task, shaping, vocab_size = args.task, args.rewards, vocabulary_size(tokenizer)
    length = task.prompt_length + task.response_length

    def ready(lm_backbone: PreTrainedModel, name: str, argument: str = "base_model") -> PreTrainedModel:
        """The model on the device, checked, and set to read as the arguments say."""
        lm_backbone.to(device)
        packing.enable(lm_backbone, share_prefixes=args.ppo.share_prefixes)
        if name:
            with models.named(argument), models.named("task.prompt_length", "task.query_length"):
                check_model(lm_backbone, name, length, vocab_size)
            packing.check_shared_prefixes(lm_backbone, length, vocab_size)
        prepare(lm_backbone, args)
        return lm_backbone

    lm_backbone = ready(models.load_base_model(args), args.base_model)
    critic = None
    if args.ppo.advantage == "gae":
        # [V70] The critic has its own backbone. By default that is the policy's start, and a new head, which says 0.
        critic = models.load_critic(args, tokenizer, length, zero_head=True).to(device)
        ready(critic.lm_backbone, "")
    actor_critic = ActorCritic(
        lm_backbone, critic, vocab_size, task.temperature, entropy_learns=args.ppo.entropy_coef > 0
    )
    adapters = models.add_adapters(lm_backbone, args.lora, args.seed).to(device) if args.lora.rank else None
    if not shaping.has_penalty:
        return actor_critic, None, adapters
    if shaping.teacher:
        models.check_vocabulary(shaping.teacher, "rewards.teacher", tokenizer, args.trust_remote_code)
        with models.named("rewards.teacher"):
            # In bfloat16, two ways of reading a token would differ too much for the check.
            teacher = models.load_base_model(dataclasses.replace(args, base_model=shaping.teacher))
        teacher = ready(teacher.requires_grad_(False), shaping.teacher, "rewards.teacher")
        teacher.to(weights_dtype(args, frozen=True))
        return actor_critic, Reference(teacher, None, vocab_size, task.temperature), adapters
    frozen = lm_backbone if adapters else ready(models.load_base_model(args, frozen=True), "")
    return actor_critic, Reference(frozen, adapters, vocab_size, task.temperature), adapters


def save_models(
    folder: Path,
    actor_critic: ActorCritic,
    adapters: nn.Module | None,
    tokenizer: PreTrainedTokenizerBase,
    args: Args,
    weights: bool = True,
) -> None:
    """Save the policy, and the critic if there is one. weights: whether theirs are saved, too."""
    info = {
        "task": dataclasses.asdict(args.task),
        "monitor": "",
        "function": args.rewards.verifier,
        "base_model": args.base_model,
        "reward_model": args.rewards.trained_model,
        "label": args.rewards.label,
    }
    if args.tools:
        info["tool"] = args.tools.tool
    models.save_policy_and_critic(
        folder,
        lm_backbone=actor_critic.lm_backbone,
        critic=actor_critic.critic,
        adapters=adapters,
        tokenizer=tokenizer,
        info=info,
        trust_remote_code=args.trust_remote_code,
        weights=weights,
    )
