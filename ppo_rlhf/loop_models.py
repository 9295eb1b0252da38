"""The models of loop.py: a policy, a critic and a reference, each of a name, a folder or a loaded model.

What the critic is, by the argument `critic`:

    critic      all weights of the policy learn               adapters of the policy learn
    None        a copy of the policy, with a value head       adapters of its own on the policy's frozen weights,
                                                              with a value head
    "shared"    a value head on the policy's hidden states    a value head on the policy's hidden states
    a model     that model, all of whose weights learn        the same

With adapters, the policy without them is the reference, so one set of frozen weights serves all three.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.activations import ACT2FN, NewGELUActivation

from ppo_rlhf.tldr import models, packing
from ppo_rlhf.tldr.policy import ActorCritic, Args
from ppo_rlhf.tldr.responses import read_before_responses, statistics_after
from ppo_rlhf.train_policy import (
    InputError,
    check_model,
    input_errors,
    load_pretrained,
    read_scalar,
    vocabulary_size,
    weights_dtype,
)
from ppo_rlhf.train_reward import RewardModel, prepare

SHARED = "shared"


@dataclass(frozen=True, kw_only=True)
class Networks:
    actor_critic: ActorCritic
    reference: models.Reference  # has peft's handle of the policy's adapters
    critic_adapters: nn.Module | None  # peft's handle of the critic's own

    def copied(self, dtype: torch.dtype) -> tuple[PreTrainedModel, nn.Module, RewardModel]:
        """Copies of policy, peft's handle of its adapters, and critic, whose adapters are merged, to be saved."""
        policy, critic = self.actor_critic.lm_backbone, self.actor_critic.critic
        adapters, critic_adapters = self.reference.adapters, self.critic_adapters
        if critic.lm_backbone is policy.base_model:
            policy, adapters, critic = copy.deepcopy((policy, adapters, critic))
        else:
            # Each is copied alone: merging one's adapters into weights that both have would change the other.
            policy, adapters = copy.deepcopy((policy, adapters))
            critic, critic_adapters = copy.deepcopy((critic, critic_adapters))
        policy.to(dtype)
        critic.to(dtype)
        if critic_adapters is not None:
            critic_adapters.merge_and_unload()
        return policy, adapters, critic


class SharedActorCritic(ActorCritic):
    """The policy, and a critic that is a value head on the policy's hidden states. Both read a row in one pass."""

    def __init__(self, lm_backbone: PreTrainedModel, critic: RewardModel, vocab_size: int, *, value_gradient: bool):
        """critic: its language model is the policy's. value_gradient: whether the value loss changes that."""
        super().__init__(lm_backbone, critic, vocab_size)
        self.value_gradient = value_gradient

    def forward(
        self, query_responses: Tensor, responses: Tensor, pad_id: int, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As of ActorCritic."""
        hidden_states = read_before_responses(self.lm_backbone, query_responses, responses, pad_id)
        logprobs, entropies = statistics_after(
            self.lm_backbone, hidden_states, responses, pad_id, temperature, self.vocab_size
        )
        seen = hidden_states if self.value_gradient else hidden_states.detach()
        return logprobs, entropies, read_scalar(self.critic.reward_head, seen)


def make_networks(
    model: Any,
    critic: str | Path | RewardModel | None,
    reference: str | Path | PreTrainedModel | None,
    lora: Any,
    *,
    value_gradient: bool,
    args: Args,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    device: torch.device,
) -> Networks:
    """Load or take all models, and join them. length: of rows with which reading them is tried, in tokens.

    A loaded policy is changed in place, a loaded reference is copied. Messages name the model --base_model.
    """
    adapters = model if is_of_peft(model) else None
    if adapters is not None and lora is not None:
        raise InputError("the model has adapters already; leave lora out")
    if adapters is not None or lora is not None:
        if reference is not None:
            raise InputError("with lora, the reference is the policy without its adapters; leave it out")
        if args.frozen_bfloat16 and args.dtype != "bfloat16":
            raise InputError(f"with lora, frozen_bfloat16 needs dtype bfloat16, not {args.dtype}")
    policy = language_model(model, args)
    if lora is not None:
        adapters = models.add_adapters(policy, lora, args.seed)
    check_what_learns(policy, adapters)
    # Every copy is made before the networks are joined, which changes how they read rows.
    frozen = make_reference(reference, policy, args, tokenizer) if adapters is None else None
    value_model, critic_adapters = make_critic(critic, policy, adapters, args, tokenizer)
    vocab_size = vocabulary_size(tokenizer)
    networks = [policy, frozen] if frozen else [policy]
    if critic == SHARED:
        actor_critic = SharedActorCritic(policy, value_model, vocab_size, value_gradient=value_gradient)
    else:
        actor_critic = ActorCritic(policy, value_model, vocab_size)
        networks.append(value_model.lm_backbone)
    if not args.frozen_bfloat16:  # else the device may have no room for what follows
        actor_critic.to(device)
    packing.enable(*networks)
    check_model(policy, args.base_model, length, vocab_size)
    if args.frozen_bfloat16:
        for weight in (frozen or policy).parameters():
            if not weight.requires_grad:
                weight.data = weight.data.bfloat16()
    actor_critic.to(device)
    for network in networks:
        prepare(network.to(device), args)
    return Networks(
        actor_critic=actor_critic,
        reference=models.Reference(frozen or policy, adapters),
        critic_adapters=critic_adapters,
    )


# ---- The policy and the reference ------------------------------------------------------------------------------


def is_of_peft(model: Any) -> bool:
    return hasattr(model, "get_base_model")  # peft is slow to import, and used by few


def language_model(model: Any, args: Args) -> PreTrainedModel:
    """A causal language model of a name, a folder, a loaded model, or one of peft's, whose adapters stay inside.

    A loaded one is changed in place, and computes what it would if `load_pretrained` had loaded it.
    """
    dtype = weights_dtype(args, frozen=False)
    if isinstance(model, str | Path):
        return load_pretrained(str(model), dtype, args.trust_remote_code)
    of_peft = is_of_peft(model)
    if of_peft and model.active_peft_config.peft_type != "LORA":
        raise InputError(f"--base_model has adapters of the kind {model.active_peft_config.peft_type}, not LoRA")
    model = model.get_base_model() if of_peft else model
    if not isinstance(model, PreTrainedModel):
        raise InputError(f"--base_model is a {type(model).__name__}, no language model of transformers or of peft")
    if hasattr(model, "peft_config") and not of_peft:
        raise InputError(
            "--base_model: the model has adapters inside, which could not be saved; give what get_peft_model or "
            "peft.AutoPeftModelForCausalLM.from_pretrained(folder, is_trainable=True) returns, or merge them"
        )
    if model.config.is_encoder_decoder or model.get_output_embeddings() is None:
        raise InputError(f"--base_model is a {type(model).__name__}; it must be a causal language model")
    return as_if_loaded_here(model.to(dtype))


def make_reference(
    reference: Any, policy: PreTrainedModel, args: Args, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """The reference, which learns nothing; a loaded one is copied. None: the policy as it is now."""
    if reference is None:
        return copy.deepcopy(policy).requires_grad_(False)
    if isinstance(reference, str | Path):
        models.check_vocabulary(str(reference), "reference", tokenizer, args.trust_remote_code)
    else:
        reference = copy.deepcopy(reference)
    with models.named("reference"):
        frozen = language_model(reference, args)
    if frozen.get_input_embeddings().num_embeddings != policy.get_input_embeddings().num_embeddings:
        raise InputError("reference has another number of token embeddings than the model")
    return frozen.requires_grad_(False)


def as_if_loaded_here(model: PreTrainedModel) -> PreTrainedModel:
    """What `load_pretrained` changes, with its reasons there, in a loaded model. Dropout is off in eval mode."""
    if getattr(model.config, "final_logit_softcapping", None) or getattr(
        model.config, "attn_logit_softcapping", None
    ):
        raise InputError(f"a {type(model).__name__} that caps its logits (Gemma 2) is not supported")
    for part in list(model.modules()):
        for name, child in part.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(part, name, ACT2FN["gelu_pytorch_tanh"])
    model.get_input_embeddings().padding_idx = None
    return model.eval()


def lora_of(lora: Any) -> Any:
    """LoraArgs, or peft's LoraConfig, of either or of a dictionary of its arguments; None: no adapters."""
    if isinstance(lora, Mapping) and lora.keys() <= {field.name for field in dataclasses.fields(models.LoraArgs)}:
        lora = models.LoraArgs(**lora)
    if isinstance(lora, models.LoraArgs):
        return lora if lora.rank else None
    if lora is None:
        return None
    from peft import LoraConfig

    if isinstance(lora, Mapping):
        with input_errors("lora has arguments neither of LoraArgs nor of peft's LoraConfig"):
            lora = LoraConfig(**lora)
    if not isinstance(lora, LoraConfig):
        raise InputError(f"lora is a {type(lora).__name__}; it must be a dictionary, LoraArgs or peft's LoraConfig")
    return copy.deepcopy(lora)  # peft writes into it


def check_what_learns(policy: PreTrainedModel, adapters: nn.Module | None) -> None:
    """Raise an InputError if nothing learns, or something that neither reading nor the reference would know of."""
    learning = [name for name, weight in policy.named_parameters() if weight.requires_grad]
    if not learning:
        raise InputError(
            "no weight of the model learns, because requires_grad is False for all; peft loads with is_trainable=True"
        )
    if adapters is None:
        return
    if others := [name for name in learning if "lora_" not in name]:
        raise InputError(
            f"{others[0]} learns, but isn't of LoRA: with adapters, the reference is the policy without them, so "
            f"nothing else may learn (bias, modules_to_save)"
        )
    if len(adapters.active_adapters) > 1:
        raise InputError(f"adapters {adapters.active_adapters} are in use; set_adapter one of them")
    if hasattr(policy.get_output_embeddings(), "lora_A"):
        raise InputError("the output layer has an adapter, which would not be read; leave it out of target_modules")


# ---- The critic ------------------------------------------------------------------------------------------------


def make_critic(
    critic: str | Path | RewardModel | None,
    policy: PreTrainedModel,
    adapters: nn.Module | None,
    args: Args,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[RewardModel, nn.Module | None]:
    """The critic, and peft's handle of its own adapters, if it has any."""
    dtype = weights_dtype(args, frozen=False)
    if critic == SHARED:
        return with_head(policy.base_model, args.seed, dtype), None
    if critic is None and adapters is not None:
        second = twin(adapters)
        return with_head(second.get_base_model().base_model, args.seed, dtype), second
    if critic is None:
        return models.with_new_head(copy.deepcopy(policy.base_model), args.seed), None
    if isinstance(critic, RewardModel):
        as_if_loaded_here(critic.lm_backbone)
        if critic.lm_backbone.get_input_embeddings().num_embeddings < vocabulary_size(tokenizer):
            raise InputError("critic has fewer token embeddings than the tokenizer has ids")
        return models.critic_that_learns(critic.to(dtype)), None
    if not isinstance(critic, str | Path):
        raise InputError(
            f"critic is a {type(critic).__name__}; give its folder or name, a RewardModel, or {SHARED!r}"
        )
    models.check_vocabulary(str(critic), "critic", tokenizer, args.trust_remote_code)
    with models.named("critic"):
        return models.load_any_critic(str(critic), dtype, args.seed, args.trust_remote_code), None


def twin(adapters: nn.Module) -> nn.Module:
    """A copy of a model of peft, with adapters of its own on the very same frozen weights."""
    frozen = {id(weight): weight for weight in adapters.parameters() if not weight.requires_grad}
    return copy.deepcopy(adapters, frozen)


def with_head(trunk: PreTrainedModel, seed: int, dtype: torch.dtype) -> RewardModel:
    """A critic of a network of which what learns stays the same, with the head that `models.with_new_head` gives."""
    torch.manual_seed(seed)
    critic = RewardModel(trunk)
    critic.reward_head.to(dtype)
    critic.gain.requires_grad_(False)
    critic.bias.requires_grad_(False)
    return critic
