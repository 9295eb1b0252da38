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
from accelerate import Accelerator
from safetensors import safe_open
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ppo_rlhf.lib.base import errors, files, launch, precision, processes
from ppo_rlhf.lib.base.bounds import NonNegativeInt, PositiveFloat
from ppo_rlhf.lib.base.errors import InputError, flag
from ppo_rlhf.lib.nets import pretrained, templates
from ppo_rlhf.lib.nets.classifier import save_reward_model
from ppo_rlhf.lib.nets.layers import layers
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
from ppo_rlhf.tldr import packing, passes
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
        if processes.sharding():  # `place` reads the weights
            model, loading = pretrained.without_weights(auto_class, config, dtype, trust_remote_code), None
            model.source = base_model
            read_generation_config(model, path, revision)
        else:
            model, loading = read_whole(auto_class, path, revision, config, dtype, trust_remote_code)
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
    if passes.is_packed(model, "shares_prefixes"):  # two rows of which the first half is read once
        tokens = (torch.arange(length, device=model.device) % vocab_size).unsqueeze(0)
        second_half = torch.arange(length, device=model.device) >= length // 2
        rows = torch.cat([tokens, tokens.roll(length // 4, 1).where(second_half, tokens)])
        logits = model.get_output_embeddings()(read_tokens(model, rows, vocab_size, slice(None)))
        if not same_logits(logits, model(rows).logits):
            passes.UNFIT.add(type(model.base_model))
            what = f"{flag('base_model')} {base_model}"
            errors.say_once(f"{what} does not read shared prefixes as it should: each row is read by itself")


# ---- Place: whole, or in slices --------------------------------------------------------------------------------


def place(network: nn.Module, accelerator: Accelerator) -> None:
    """Take a network to this process's device: all of it or, if the launcher asks for that, a slice of each weight.

    No process ever holds the whole of a sharded network: each reads its slices from the files.
    """
    if not processes.sharding():
        network.to(accelerator.device)
        return
    backbones = [part for part in network.modules() if isinstance(part, PreTrainedModel) and hasattr(part, "source")]
    for tensor in (*network.parameters(), *network.buffers()):
        if not tensor.is_meta:
            tensor.data = tensor.data.to(accelerator.device)
    processes.shard(network, layers(network))
    for backbone in backbones:
        read_slices(backbone, accelerator.device)
    processes.make_outermost(network)


def read_generation_config(model: PreTrainedModel, path: str, revision: str | None) -> None:
    """Give a model without weights the settings of generation, such as its stop ids, that it would be loaded with."""
    if model.can_generate():
        with contextlib.suppress(OSError):  # without the file they are those of config.json, which the model has
            model.generation_config = GenerationConfig.from_pretrained(path, revision=revision)


@torch.no_grad()
def read_slices(model: PreTrainedModel, device: torch.device) -> None:
    """Give a sharded model on the meta device this process's slices of its weights, from safetensors."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    model.tie_weights()
    for name, buffer in buffers.items():
        model.get_buffer(name).copy_(buffer)
    prefix, finite = f"{model.base_model_prefix}.", True
    with model_errors(model.source) as (path, revision), contextlib.ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, "pt")) for file in files_with_weights(path, revision)]
        found = {key: file for file in opened for key in [*file.keys()]}
        for name, parameter in model.named_parameters():
            # The tensors in reward_head.safetensors take precedence: see save_reward_model. The other files may be
            # those of a model with a head or without, and GPT-NeoX's have an older name of the output layer.
            names = (f"lm_backbone.{name}", name, name.removeprefix(prefix), prefix + name)
            names += (name.replace("lm_head.", "embed_out."),)
            key = next((other for other in names if other in found), None)
            if key is None:
                raise OSError(f"its weights lack {name}")
            weight = found[key].get_slice(key)
            if weight.get_shape() != list(parameter.shape):
                there, wanted = tuple(weight.get_shape()), tuple(parameter.shape)
                raise OSError(f"its weights hold {name} of shape {there}, but config.json means {wanted}")
            processes.copy_slice(weight, parameter)
            finite = finite and bool(parameter.to_local().isfinite().all())
    launch.fail_together("" if finite else f"{model.source}: its weights hold numbers that are not finite")


def files_with_weights(path: str, revision: str | None) -> list[Path]:
    """The safetensors of a model in a folder, or on the hub; an OSError if it has none."""
    from huggingface_hub import snapshot_download

    folder = Path(path)
    if not folder.is_dir():
        folder = Path(snapshot_download(path, revision=revision, allow_patterns=["model*.safetensors*"]))
    index = folder / "model.safetensors.index.json"
    names = set(files.read_json(index)["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    if not all((folder / name).is_file() for name in names):
        raise OSError("it cannot be loaded with `safetensors`: it has none")
    return [*(folder / name for name in sorted(names)), *folder.glob("reward_head.safetensors")]


@torch.no_grad()
def whole_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A sharded model in one piece, in this precision, gathered weight by weight. Every process must call this."""
    with torch.device("meta"):
        whole = type(model)(model.config)
    for parameter in whole.parameters():
        parameter.data = parameter.data.to(dtype)
    whole.to_empty(device=model.device)
    whole.tie_weights()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in (*whole.named_parameters(), *whole.named_buffers()):
        tensor.copy_(processes.full_tensor(tensors[name]))
    if passes.is_packed(model):
        packing.enable(whole)
    pretrained.hasten_few_rows(whole)
    return whole.eval()


# ---- Our own models --------------------------------------------------------------------------------------------


def load_reward_model(folder: Path, dtype: torch.dtype, trust_remote_code: bool = False) -> RewardModel:
    """A reward model or critic that was saved here, in models/<run>/reward or value, bit for bit."""
    # Gain and bias are kept, and the scores are the same bit for bit.   train_reward.py#L292-L329
    find_head(folder)
    backbone = load_pretrained(str(folder), dtype, trust_remote_code, AutoModel)
    reward_model = RewardModel(backbone)
    load_head(reward_model, folder, own_only=processes.sharding())  # `place` reads what belongs to the backbone
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
    copies: list[PreTrainedModel]

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """The precision of what is computed within the block."""
        # It would keep the casts of all layers to the end of the block: as much as the copy in one piece takes.
        keep_casts = not isinstance(self, FSDPModule)
        return precision.mixed_precision(
            next(self.parameters()).device, enabled=self.low_precision, keep_casts=keep_casts
        )

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """For rollouts and evaluations: the precision of the training, no gradients, a sampler."""
        with torch.no_grad(), self.autocast():
            self.copies = []
            yield
            self.copies = []
        processes.reshard(self)

    @property
    def sampler(self) -> PreTrainedModel:
        """The model that generates within `sampling`: the language model or, if that is sharded, a copy in one piece.

        The copy is in bfloat16 if matrix products are. Without it, each token would gather all layers.
        """
        if not isinstance(self, FSDPModule):
            return self.lm_backbone
        if not self.copies:
            dtype = torch.bfloat16 if self.low_precision else self.lm_backbone.dtype
            self.copies.append(whole_copy(self.lm_backbone, dtype))
        return self.copies[0]


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


def unsharded(reward_model: RewardModel, trust_remote_code: bool = False) -> RewardModel:
    """A reward model with whole weights, on the first process: itself, unless it is sharded. All must call this."""
    if not any(isinstance(module, FSDPModule) for module in reward_model.modules()):
        return reward_model
    weights, config = processes.full_state_dict(reward_model), reward_model.lm_backbone.config
    if not errors.is_first_process():
        return reward_model
    plain = RewardModel(AutoModel.from_config(config, trust_remote_code=trust_remote_code))
    plain.to(reward_model.gain.dtype).load_state_dict(weights, strict=False)  # tied weights come once
    return plain


def save_language_model(
    folder: Path, lm_backbone: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, info: dict, weights: bool = True
) -> None:
    """Save as an ordinary causal language model, with tokenizer and ppo_rlhf.json; without weights, all but these.

    Every process must call this, because the weights may be sharded.
    """
    state = processes.full_state_dict(lm_backbone) if weights else {}
    if errors.is_first_process():
        lm_backbone.save_pretrained(folder, state_dict=state)
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
    weights: whether those of the two models are saved, too. If so, every process must call this.
    """
    critic = unsharded(critic, trust_remote_code) if critic and weights else critic
    if adapters is not None and errors.is_first_process():
        save_adapters(folder / "policy" / "adapter", adapters)
        lm_backbone = adapters.merge_and_unload() if weights else lm_backbone
    info = {"vocab_size": vocabulary_size(tokenizer), **info}
    own, temperature = lm_backbone.generation_config, info["task"]["temperature"]
    lm_backbone.generation_config = templates.sampling_config(own, tokenizer, temperature)
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
