"""Save networks as folders that other programs can open, and push these to the hub.

Files and lines next to marks are those of openai/lm-human-preferences at commit cbfd210.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ppo_rlhf.lib import errors, files, lm, models, sharding
from ppo_rlhf.lib.errors import InputError


def save_policy(folder: Path, policy: Any, tokenizer: PreTrainedTokenizerBase, args: Any) -> None:
    """Save as an ordinary causal language model, with the value head and ppo_rlhf.json next to the weights.

    policy: a PolicyWithValueHead; args: its script's arguments, as the user gave them. Only the first process writes.
    """
    if not errors.is_first_process():
        return
    info = {
        "kind": "policy",
        "base_model": args.base_model,
        "reward_model": args.rewards.trained_model,
        "function": args.rewards.function,
        "monitor": args.rewards.monitor,
        "vocab_size": models.vocabulary_size(tokenizer),
        "task": dataclasses.asdict(args.task),
    }
    save_language_model(folder, policy.lm_backbone, None, tokenizer, info)
    save_file(policy.value_head.state_dict(), folder / "value_head.safetensors")
    files.give_usual_mode(folder)


def save_policy_and_critic(
    folder: Path,
    lm_backbone: PreTrainedModel,
    critic: lm.RewardModel | None,
    adapters: nn.Module | None,
    tokenizer: PreTrainedTokenizerBase,
    info: dict[str, Any],
    trust_remote_code: bool,
) -> None:
    """Save an ordinary causal language model in policy/, adapters merged, and the critic in value/ if there is one.

    The critic is saved like a reward model. adapters: peft's handle, which saves the adapters a second time, on their
    own, in policy/adapter. info: for ppo_rlhf.json. Every process must call this.
    """
    critic = unsharded(critic, trust_remote_code) if critic else None
    if adapters is not None and errors.is_first_process():
        save_adapters(folder / "policy" / "adapter", adapters)
        lm_backbone = adapters.merge_and_unload()
    weights = sharding.full_state_dict(lm_backbone)
    if not errors.is_first_process():
        return
    info = {"vocab_size": models.vocabulary_size(tokenizer), **info}
    save_language_model(folder / "policy", lm_backbone, weights, tokenizer, info | {"kind": "policy"})
    if critic:
        kept = {name: info[name] for name in ("base_model", "vocab_size", "task")}
        save_reward_model(folder / "value", critic, tokenizer, kept | {"kind": "critic"}, trust_remote_code)


def save_language_model(
    folder: Path,
    lm_backbone: PreTrainedModel,
    weights: dict[str, torch.Tensor] | None,
    tokenizer: PreTrainedTokenizerBase,
    info: dict,
) -> None:
    """Save as an ordinary causal language model, with its tokenizer and ppo_rlhf.json.

    weights: the whole state of a sharded model; None for any other model.
    """
    lm_backbone.save_pretrained(folder, state_dict=weights)
    files.give_usual_mode(folder)
    tokenizer.save_pretrained(folder)
    files.write_json(folder / "ppo_rlhf.json", info)


def save_adapters(folder: Path, adapters: nn.Module) -> None:
    """Save low-rank adapters as peft does, but without paths of this machine and without peft's empty model card."""
    adapters.save_pretrained(folder)
    (folder / "README.md").unlink()
    config = files.read_json(folder / "adapter_config.json")
    if Path(config["base_model_name_or_path"] or "").is_dir():
        files.write_json(folder / "adapter_config.json", config | {"base_model_name_or_path": None})


# ---- Reward models and critics ---------------------------------------------------------------------------------


FINAL_NORM_BIASES = ("ln_f.bias", "final_layer_norm.bias", "norm.bias")  # GPT-2; GPT-NeoX; others


def save_reward_model(
    folder: Path,
    reward_model: lm.RewardModel,
    tokenizer: PreTrainedTokenizerBase,
    info: dict,
    trust_remote_code: bool = False,
) -> None:
    """Save as an ordinary sequence-classification model that gives the same scores, gain and bias included.

    The score of such a model is linear in the final hidden state and has no constant. So the gain goes into the
    weight w of the score, and the constant c into the bias of the final layer norm, along w: w (h + c w / |w|^2)
    = w h + c. If that norm has no bias, the configuration holds c as `score_constant`, and it must be added.
    `reward_head.safetensors` keeps the original values, so that `load_reward_model` restores our model bit for bit.
    """
    # [D44] Gain and bias are kept, and the scores are the same bit for bit.   train_reward.py#L292-L329
    backbone, pad_id = reward_model.lm_backbone.base_model, models.vocabulary_size(tokenizer)
    kept = {name: tensor for name, tensor in reward_model.state_dict().items() if not name.startswith("lm_backbone.")}
    weight = reward_model.gain.detach() * reward_model.reward_head.weight.detach()  # (1, width)
    constant = (reward_model.gain * reward_model.reward_head.bias + reward_model.bias).item()
    # Some models refuse a padding id beyond their embedding, so it is set once the embedding has a row for it.
    config = type(backbone.config).from_dict(backbone.config.to_dict() | {"pad_token_id": None})
    config.num_labels = 1
    norm_bias = next((name for name in FINAL_NORM_BIASES if name in backbone.state_dict()), None)
    config.score_constant = 0.0 if norm_bias else constant
    classifier = AutoModelForSequenceClassification.from_config(
        config, dtype=weight.dtype, trust_remote_code=trust_remote_code
    ).to(weight.device)
    classifier.base_model.load_state_dict(backbone.state_dict())
    with torch.no_grad():
        classifier.score.weight.copy_(weight)
        if norm_bias:
            kept[f"lm_backbone.{norm_bias}"] = backbone.state_dict()[norm_bias].clone()
            classifier.base_model.state_dict()[norm_bias].add_(constant * weight[0] / (weight**2).sum())
        rows = classifier.get_input_embeddings().num_embeddings
        if rows <= pad_id:
            classifier.resize_token_embeddings(pad_id + 1, mean_resizing=False)
            classifier.get_input_embeddings().weight[rows:] = 0.0
    classifier.config.pad_token_id = pad_id
    classifier.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(kept, folder / "reward_head.safetensors")
    files.give_usual_mode(folder)
    files.write_json(folder / "ppo_rlhf.json", info)


def unsharded(reward_model: lm.RewardModel, trust_remote_code: bool = False) -> lm.RewardModel:
    """The reward model, with whole weights on the first process if it is sharded. Every process must call this."""
    if not any(isinstance(module, FSDPModule) for module in reward_model.modules()):
        return reward_model
    weights, config = sharding.full_state_dict(reward_model), reward_model.lm_backbone.config
    if not errors.is_first_process():
        return reward_model
    plain = lm.RewardModel(AutoModel.from_config(config, trust_remote_code=trust_remote_code))
    plain.to(reward_model.gain.dtype).load_state_dict(weights, strict=False)  # of tied weights, one is there
    return plain


# ---- The hub ---------------------------------------------------------------------------------------------------


def upload_model(folder: Path, entity: str, name: str) -> None:
    """Push a model's folder to the Hugging Face hub, with a model card."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    repository = f"{entity}/{name}" if entity else name
    card = f"# {name}\n\nTrained by ppo_rlhf. `ppo_rlhf.json` beside the weights names base model and task.\n"
    (folder / "README.md").write_text(f"---\nlibrary_name: transformers\ntags: [ppo_rlhf]\n---\n\n{card}")
    try:
        api = HfApi()
        repository = api.create_repo(repository, exist_ok=True).repo_id
        api.upload_folder(repo_id=repository, folder_path=str(folder))
    except (OSError, HfHubHTTPError, ValueError) as error:
        raise InputError(f"{folder} is saved, but could not be pushed to {repository}: {error}") from error
