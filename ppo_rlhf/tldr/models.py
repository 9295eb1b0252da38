"""Pretrained models and our own: load, check, save.

Files and lines next to marks are those of openai/lm-human-preferences at commit cbfd210.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ppo_rlhf.lib.base import errors, files, precision
from ppo_rlhf.lib.base.bounds import NonNegativeInt, PositiveFloat
from ppo_rlhf.lib.base.errors import InputError, flag
from ppo_rlhf.lib.nets import pretrained
from ppo_rlhf.lib.nets.classifier import save_reward_model
from ppo_rlhf.lib.nets.pretrained import (
    check_reward_model,
    checked_model,
    dtype_of_weights,
    find_head,
    is_dropout,
    load_head,
    model_errors,
    read_config,
    same_logits,
    vocabulary_size,
)
from ppo_rlhf.tldr import packing
from ppo_rlhf.train_reward import RewardModel

# ---- Load ------------------------------------------------------------------------------------------------------


def load_pretrained(
    base_model: str, dtype: torch.dtype, trust_remote_code: bool = False, auto_class: type = AutoModelForCausalLM
) -> PreTrainedModel:
    """A pretrained model from safetensors, without dropout. Saved again, its configuration has its own settings.

    Settings that ask for more outputs than hidden states, and special tokens that have no embedding, are dropped.
    """
    with model_errors(base_model) as (path, revision):
        config = read_config(path, revision, trust_remote_code, auto_class=auto_class)
        # [D18] Without dropout, sampler and training pass agree, and every ratio starts at 1.   policy.py#L48
        ours = {name: 0.0 for name, value in vars(config).items() if is_dropout(name, value)}
        # [D17] The library's GPT-2 is the original's network: tanh-GELU, tied output layer, layer norm epsilon 1e-5.
        #       language/model.py#L14-L73
        #       `gelu_pytorch_tanh` is the same function as `gelu_new`, in one kernel instead of eight.
        ours |= {name: "gelu_pytorch_tanh" for name, value in vars(config).items() if value == "gelu_new"}
        own_settings = {name: getattr(config, name) for name in ours}
        vars(config).update(ours)
        model, loading = auto_class.from_pretrained(
            path,
            revision=revision,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # checked_model names them
        )
        # [D66] The embedding of the token that the configuration names as padding learns like any other.
        model.get_input_embeddings().padding_idx = None
        return checked_model(model, loading, own_settings)


def read_whole(
    auto_class: type,
    path: str,
    revision: str | None,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    trust_remote_code: bool,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model with all its weights, and what the library says about them."""
    return auto_class.from_pretrained(
        path,
        revision=revision,
        config=config,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # checked_model names them
    )


@torch.no_grad()
def check_model(model: PreTrainedModel, base_model: str, length: int, vocab_size: int, read_tokens: Callable) -> None:
    """As in pretrained.py; and a model that reads shared prefixes in another way reads each row by itself."""
    pretrained.check_model(model, base_model, length, vocab_size, read_tokens)
    if packing.is_packed(model, "shares_prefixes"):  # two rows of which the first half is read once
        tokens = (torch.arange(length, device=model.device) % vocab_size).unsqueeze(0)
        second_half = torch.arange(length, device=model.device) >= length // 2
        rows = torch.cat([tokens, tokens.roll(length // 4, 1).where(second_half, tokens)])
        logits = model.get_output_embeddings()(read_tokens(model, rows, vocab_size, slice(None)))
        if not same_logits(logits, model(rows).logits):
            packing.UNFIT.add(type(model.base_model))
            what = f"{flag('base_model')} {base_model}"
            errors.say_once(f"{what} does not read shared prefixes as it should: each row is read by itself")


# ---- Our own models --------------------------------------------------------------------------------------------


def load_reward_model(folder: Path, dtype: torch.dtype, trust_remote_code: bool = False) -> RewardModel:
    """A reward model or critic that was saved here, in models/<run>/reward or value, bit for bit."""
    # Gain and bias are kept, and the scores are the same bit for bit.   train_reward.py#L292-L329
    find_head(folder)
    backbone = load_pretrained(str(folder), dtype, trust_remote_code, AutoModel)
    reward_model = RewardModel(backbone)
    load_head(reward_model, folder)
    return reward_model.requires_grad_(False)


def load_base_model(args: Any, auto_class: type = AutoModelForCausalLM, *, frozen: bool = False) -> PreTrainedModel:
    """The base model that a script's arguments name, in the precision of its weights."""
    dtype = dtype_of_weights(args, frozen=frozen)
    return load_pretrained(args.base_model, dtype, args.trust_remote_code, auto_class).requires_grad_(not frozen)


def load_scalar_model(args: Any, field: str, vocab_size: int, *, frozen: bool = False) -> RewardModel:
    """The reward model or critic that this field of args.rewards names, checked to fit the base model."""
    folder, dtype = Path(getattr(args.rewards, field)), dtype_of_weights(args, frozen=frozen)
    model = load_reward_model(folder, dtype, args.trust_remote_code)
    check_reward_model(model.lm_backbone, args, vocab_size, field)
    return model


class MixedPrecision(nn.Module):
    """A network whose matrix products are computed in bfloat16 if `low_precision`; its weights never are in it."""

    low_precision = False

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """The precision of what is computed within the block."""
        return precision.mixed_precision(next(self.parameters()).device, enabled=self.low_precision)

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """For rollouts and evaluations: the precision of the training, no gradients."""
        with torch.no_grad(), self.autocast():
            yield


# ---- Adapters --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LoraArgs:
    rank: NonNegativeInt = 0
    """rank of the policy's low-rank adapters; 0: train all weights. The critic always trains all its weights"""
    alpha: PositiveFloat = 16.0
    """the adapters' output is scaled by alpha / rank"""
    target_modules: str = ""
    """layers that get adapters, names separated by commas; all-linear: every linear layer but the output layer;
    empty: peft's choice for the model, which is only q_proj and v_proj of the attention for Llama, Mistral, Qwen"""


def add_adapters(lm_backbone: PreTrainedModel, lora: LoraArgs, seed: int) -> nn.Module:
    """[X35] Freeze a model and add low-rank adapters to its layers. Returns peft's handle for switching them off."""
    from peft import LoraConfig, TaskType, get_peft_model  # slow, and used by few runs

    names = [name.strip() for name in lora.target_modules.split(",")]
    target_modules = None if not lora.target_modules else "all-linear" if names == ["all-linear"] else names
    if isinstance(target_modules, list):
        check_target_modules(lm_backbone, target_modules)
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM, r=lora.rank, lora_alpha=lora.alpha, target_modules=target_modules
    )
    torch.manual_seed(seed)  # the same adapters on every process
    try:
        with warnings.catch_warnings():  # of an attribute that peft reads by its old name, and one that it corrects
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`|fan_in_fan_out")
            return get_peft_model(lm_backbone, config)
    except ValueError as error:
        raise InputError(
            f"{flag('lora.target_modules')} {lora.target_modules!r} does not fit the base model: {error}"
        ) from error


def check_target_modules(lm_backbone: PreTrainedModel, names: list[str]) -> None:
    """Raise if one of these names fits no layer of a model, or one that shares its weight with another layer.

    An adapter changes one of two such layers. Merged into the weight that both have, it would change the other, too,
    so that the model that is saved would not be the one that was trained.
    """
    what = f"{flag('lora.target_modules')} {','.join(names)!r}"
    weights = {name: getattr(module, "weight", None) for name, module in lm_backbone.named_modules()}
    layers = {name: weight for name, weight in weights.items() if weight is not None}
    for name in names:
        fitting = [layer for layer in layers if f".{layer}".endswith(f".{name}")]
        if not fitting:
            there = sorted({layer.rpartition(".")[2] for layer, weight in layers.items() if weight.dim() == 2})
            raise InputError(
                f"{what}: the base model has no layer {name!r}; it has {', '.join(there)}; all-linear, by itself, "
                f"means every linear layer except the output layer"
            )
        for layer in fitting:
            if shared := [other for other in layers if other != layer and layers[other] is layers[layer]]:
                raise InputError(
                    f"{what}: {layer} has the same weight as {shared[0]}, so it cannot have an adapter; all-linear "
                    f"means every linear layer except the output layer"
                )


# ---- Save ------------------------------------------------------------------------------------------------------


def save_language_model(
    folder: Path, lm_backbone: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, info: dict, weights: bool = True
) -> None:
    """Save as an ordinary causal language model, with tokenizer and ppo_rlhf.json; without weights, all but these."""
    if errors.is_first_process():
        lm_backbone.save_pretrained(folder, state_dict=None if weights else {})
        tokenizer.save_pretrained(folder)
        files.write_json(folder / "ppo_rlhf.json", info)


def save_policy_and_critic(
    folder: Path,
    lm_backbone: PreTrainedModel,
    critic: RewardModel | None,
    adapters: nn.Module | None,
    tokenizer: PreTrainedTokenizerBase,
    info: dict[str, Any],
    trust_remote_code: bool,
    weights: bool = True,
) -> None:
    """policy: an ordinary causal language model, adapters merged in; value: the critic, as a reward model is saved.

    adapters: peft's handle, which saves them once more on their own, in policy/adapter. info: for ppo_rlhf.json.
    weights: whether those of the two models are saved, too.
    """
    if adapters is not None and errors.is_first_process():
        save_adapters(folder / "policy" / "adapter", adapters)
        lm_backbone = adapters.merge_and_unload() if weights else lm_backbone
    info = {"vocab_size": vocabulary_size(tokenizer), **info}
    own, temperature = lm_backbone.generation_config, info["task"]["temperature"]
    lm_backbone.generation_config = pretrained.sampling_config(own, tokenizer, temperature)
    save_language_model(folder / "policy", lm_backbone, tokenizer, info | {"kind": "policy"}, weights)
    if critic and errors.is_first_process():
        kept = {name: info[name] for name in ("base_model", "vocab_size", "task")} | {"kind": "critic"}
        save_reward_model(folder / "value", critic, tokenizer, kept, trust_remote_code, weights)


def save_adapters(folder: Path, adapters: nn.Module) -> None:
    """Save low-rank adapters as peft does, but without a path of this machine and without its empty model card."""
    adapters.save_pretrained(folder)
    (folder / "README.md").unlink()
    config = files.read_json(folder / "adapter_config.json")
    if Path(config["base_model_name_or_path"] or "").is_dir():
        files.write_json(folder / "adapter_config.json", config | {"base_model_name_or_path": None})


def scheduled_lr(lr: float, schedule: str, step: int, steps: int) -> float:
    """The learning rate of a step (0-based) out of so many, without warm-up; it would be 0 after the last.

    cosine: lr * (1 + cos(pi * step / steps)) / 2        linear: lr * (1 - step / steps)
    """
    if schedule == "cosine":
        return lr * (1 + math.cos(math.pi * step / steps)) / 2
    return lr * (1 - step / steps) if schedule == "linear" else lr
