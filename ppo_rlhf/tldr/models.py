"""The models of chapters 2 and 3: load language models, reward models and critics, add adapters, save all of them.

Chapter 1's `load_pretrained` reads the weights. Marks like [X35] name an implementation detail; see docs/reference.
Files and lines next to marks are those of openai/lm-human-preferences at commit cbfd210.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ppo_rlhf.lib import errors, files, pretrained
from ppo_rlhf.lib.bounds import NonNegativeInt, PositiveFloat
from ppo_rlhf.lib.errors import InputError, flag
from ppo_rlhf.tldr import classifiers, packing
from ppo_rlhf.train_policy import load_pretrained
from ppo_rlhf.train_reward import RewardModel, save_reward_model

# ---- Load ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def check_model(model: PreTrainedModel, base_model: str, length: int, vocab_size: int, read_tokens: Callable) -> None:
    """As in pretrained.py; and a model that reads shared prefixes in another way reads each row by itself."""
    pretrained.check_model(model, base_model, length, vocab_size, read_tokens)
    if packing.is_packed(model, "shares_prefixes"):  # two rows of which the first half is read once
        tokens = (torch.arange(length, device=model.device) % vocab_size).unsqueeze(0)
        second_half = torch.arange(length, device=model.device) >= length // 2
        rows = torch.cat([tokens, tokens.roll(length // 4, 1).where(second_half, tokens)])
        logits = model.get_output_embeddings()(read_tokens(model, rows, vocab_size, slice(None)))
        if not pretrained.same_logits(logits, model(rows).logits):
            packing.UNFIT.add(type(model.base_model))
            what = f"{flag('base_model')} {base_model}"
            errors.say_once(f"{what} does not read shared prefixes as it should: each row is read by itself")


def load_reward_model(folder: Path, dtype: torch.dtype, trust_remote_code: bool = False) -> RewardModel:
    """A reward model or critic that was saved here, in models/<run>/reward or value, bit for bit."""
    # Gain and bias are kept, and the scores are the same bit for bit.   train_reward.py#L292-L329
    pretrained.find_head(folder)
    backbone = load_pretrained(str(folder), dtype, trust_remote_code, AutoModel)
    reward_model = RewardModel(backbone)
    pretrained.load_head(reward_model, folder)
    return reward_model.requires_grad_(False)


def load_base_model(args: Any, auto_class: type = AutoModelForCausalLM, *, frozen: bool = False) -> PreTrainedModel:
    """The base model that a script's arguments name, in the precision of its weights."""
    dtype = pretrained.dtype_of_weights(args, frozen=frozen)
    return load_pretrained(args.base_model, dtype, args.trust_remote_code, auto_class).requires_grad_(not frozen)


def load_scalar_model(args: Any, field: str, vocab_size: int, *, frozen: bool = False) -> RewardModel:
    """The reward model or critic that this field of args.rewards names, checked to fit the base model."""
    folder, dtype = Path(getattr(args.rewards, field)), pretrained.dtype_of_weights(args, frozen=frozen)
    with errors.typed_as({"base_model": errors.typed(f"rewards.{field}")}):
        model = load_reward_model(folder, dtype, args.trust_remote_code)
    pretrained.check_reward_model(model.lm_backbone, args, vocab_size, field)
    return model


def load_critic(args: Any, vocab_size: int, *, zero_head: bool = False) -> RewardModel:
    """The critic before it learns: the model that the arguments name, or else the base model with a new head.

    zero_head: whether a new head starts at 0, so that all its values are 0, and not at random.
    """
    trained = args.rewards.trained_model
    if args.rewards.value_model or (trained and not classifiers.is_foreign(trained)):
        field = "value_model" if args.rewards.value_model else "trained_model"
        return critic_that_learns(load_scalar_model(args, field, vocab_size))
    critic = with_new_head(load_base_model(args, AutoModel), args.seed)
    if zero_head:
        nn.init.zeros_(critic.reward_head.weight)
    return critic


def with_new_head(backbone: PreTrainedModel, seed: int) -> RewardModel:
    """A critic from a base model, with a small random head, the same on every process."""
    torch.manual_seed(seed)
    return critic_that_learns(RewardModel(backbone).to(backbone.dtype))


def critic_that_learns(critic: RewardModel) -> RewardModel:
    """All weights of a critic learn, but not the scale of the scores that it may have had as a reward model."""
    critic.requires_grad_(True)
    critic.gain.requires_grad_(False)
    critic.bias.requires_grad_(False)
    return critic


def load_any_critic(model: str, dtype: torch.dtype, seed: int, trust_remote_code: bool = False) -> RewardModel:
    """A critic from a reward model or critic that was trained here, a sequence classifier with one label, or a base
    model, which gets a new head. model: a folder or a name on the hub.
    """
    if (Path(model) / "reward_head.safetensors").is_file():
        return critic_that_learns(load_reward_model(Path(model), dtype, trust_remote_code))
    with pretrained.model_errors(model) as (path, revision):
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    if not (config.architectures or [""])[0].endswith("ForSequenceClassification"):
        return with_new_head(load_pretrained(model, dtype, trust_remote_code, AutoModel), seed)
    classifier = load_pretrained(model, dtype, trust_remote_code, AutoModelForSequenceClassification)
    return critic_of_classifier(classifier, model)


def critic_of_classifier(classifier: PreTrainedModel, name: str) -> RewardModel:
    """The critic whose value is the logit of a sequence classifier with one label. name: for messages."""
    head = getattr(classifier, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise InputError(f"critic {name}: it must be a sequence classifier with one label, read at the last token")
    critic = RewardModel(classifier.base_model).to(classifier.dtype)
    critic.reward_head.load_state_dict({"bias": torch.zeros(1), **head.state_dict()})
    return critic_that_learns(critic)


def mixed_precision(device: torch.device, *, enabled: bool) -> contextlib.AbstractContextManager[None]:
    """Within the block, matrix products are in bfloat16, if that is enabled; weights stay in their precision."""
    if not enabled:
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


class MixedPrecision(nn.Module):
    """A network whose matrix products are computed in bfloat16 if `low_precision`; its weights never are in it."""

    low_precision = False

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """The precision of what is computed within the block."""
        return mixed_precision(next(self.parameters()).device, enabled=self.low_precision)

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """For rollouts and evaluations: the precision of the training, no gradients."""
        with torch.no_grad(), self.autocast():
            yield


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

    target_modules: str | list[str] | None = lora.target_modules or None
    if target_modules and target_modules != "all-linear":
        target_modules = [name.strip() for name in target_modules.split(",")]
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
            of_matrices = {layer.rpartition(".")[2] for layer, weight in layers.items() if weight.dim() == 2}
            raise InputError(f"{what}: the base model has no layer {name!r}; it has {', '.join(sorted(of_matrices))}")
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


def save_policy(
    folder: Path,
    lm_backbone: PreTrainedModel,
    adapters: nn.Module | None,
    tokenizer: PreTrainedTokenizerBase,
    info: dict[str, Any],
    weights: bool = True,
) -> None:
    """An ordinary causal language model, adapters merged in.

    adapters: peft's handle, which saves them once more on their own, in the folder `adapter` there. info: for
    ppo_rlhf.json. weights: whether those of the model are saved, too.
    """
    if adapters is not None and errors.is_first_process():
        save_adapters(folder / "adapter", adapters)
        lm_backbone = adapters.merge_and_unload() if weights else lm_backbone
    info = {"vocab_size": pretrained.vocabulary_size(tokenizer), **info, "kind": "policy"}
    lm_backbone.generation_config = pretrained.sampling_config(
        lm_backbone.generation_config, tokenizer, info["task"]["temperature"]
    )
    save_language_model(folder, lm_backbone, tokenizer, info, weights)


def save_critic(
    folder: Path,
    critic: RewardModel,
    tokenizer: PreTrainedTokenizerBase,
    info: dict[str, Any],
    trust_remote_code: bool = False,
    weights: bool = True,
) -> None:
    """The critic, as a reward model is saved; other arguments as of save_policy."""
    if errors.is_first_process():
        info = {"vocab_size": pretrained.vocabulary_size(tokenizer), "kind": "critic"} | {
            name: info[name] for name in ("base_model", "task")
        }
        save_reward_model(folder, critic, tokenizer, info=info, trust_remote_code=trust_remote_code, weights=weights)


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
    """Both in the folder of a run's models: `policy`, and `value` if there is a critic. Arguments as above."""
    save_policy(
        folder / "policy",
        lm_backbone,
        adapters=adapters,
        tokenizer=tokenizer,
        info=info,
        weights=weights,
    )
    if critic:
        save_critic(
            folder / "value",
            critic,
            tokenizer=tokenizer,
            info=info,
            trust_remote_code=trust_remote_code,
            weights=weights,
        )


def save_adapters(folder: Path, adapters: nn.Module) -> None:
    """Save low-rank adapters as peft does, but without a path of this machine and without its empty model card."""
    adapters.save_pretrained(folder)
    (folder / "README.md").unlink()
    config = files.read_json(folder / "adapter_config.json")
    if Path(config["base_model_name_or_path"] or "").is_dir():
        files.write_json(folder / "adapter_config.json", config | {"base_model_name_or_path": None})
