"""The models of chapters 2 and 3: load language models, reward models and critics, add adapters, save all of them.

Chapter 1's `load_pretrained` reads the weights. Marks like [X35] name an implementation detail; see docs/reference.
Files and lines next to marks are those of openai/lm-human-preferences at commit cbfd210, next to marks like [V10]
those of verl-project/verl at commit b178a3c.
"""

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import NonNegativeInt, PositiveFloat
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ppo_rlhf import train_policy
from ppo_rlhf.tldr import packing
from ppo_rlhf.train_policy import (
    PAD_TOKEN,
    Arguments,
    InputError,
    check_length,
    input_errors,
    load_pretrained,
    model_errors,
    read_info,
    sampling_config,
    vocabulary_size,
    weights_dtype,
    write_json,
)
from ppo_rlhf.train_reward import RewardModel, save_reward_model

# ---- Load ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def named(argument: str, other: str = "base_model") -> Iterator[None]:
    """Within the block, messages name this argument in place of another one, that of the base model."""
    try:
        yield
    except InputError as error:
        raise InputError(str(error).replace(f"--{other}", f"--{argument}")) from error


def load_tokenizer(base_model: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a base model, with the model's generation_config, which may name more ends of a text."""
    tokenizer = train_policy.load_tokenizer(base_model, trust_remote_code)
    with model_errors(base_model) as (path, revision):
        if (file := Path(path, "generation_config.json")).is_file():
            json.loads(file.read_text())  # a damaged one may name ends of a text, and the library says nothing
        with contextlib.suppress(OSError):  # there is none
            tokenizer.generation_config = GenerationConfig.from_pretrained(path, revision=revision)
    return tokenizer


def end_ids(tokenizer: PreTrainedTokenizerBase, own: GenerationConfig | None = None) -> tuple[int, ...]:
    """All ids that end a text: the tokenizer's, and those that the model's generation_config.json names.

    own: None is that of the model whose tokenizer load_tokenizer has loaded.
    """
    # [V10] The set has the ids that end a text for the tokenizer, and those that end a response for the model.
    #       workers/fsdp_workers.py#L945-L949
    own = own or getattr(tokenizer, "generation_config", None) or GenerationConfig()
    return tuple(train_policy.end_ids(tokenizer, own))


def load_base_model(args: Any, auto_class: type = AutoModelForCausalLM, *, frozen: bool = False) -> PreTrainedModel:
    """The base model that a script's arguments name, in the precision of its weights."""
    dtype = weights_dtype(args, frozen=frozen)
    return load_pretrained(args.base_model, dtype, args.trust_remote_code, auto_class).requires_grad_(not frozen)


def was_trained_here(model: str) -> bool:
    """Whether this is the folder of a reward model or critic that was trained here."""
    return any(Path(model, name).is_file() for name in ("ppo_rlhf.json", "reward_head.safetensors"))


def load_reward_model(folder: str, dtype: torch.dtype, trust_remote_code: bool = False) -> RewardModel:
    """A reward model or critic that was saved here, in models/<run>/reward or value, bit for bit."""
    head_file = Path(folder, "reward_head.safetensors")
    if not head_file.is_file():
        raise InputError(
            f"--base_model {folder} is no reward model that was trained here: there is no {head_file}; give "
            f"models/<run>/reward, or score with any other model in a function, --rewards.function"
        )
    reward_model = RewardModel(load_pretrained(folder, dtype, trust_remote_code, AutoModel))
    if dtype == torch.float64:
        reward_model.double()  # the heads, too
    # Head, gain and bias, and what saving as a classifier changed in the language model.   train_reward.py#L292-L329
    with input_errors(f"{head_file} does not fit the model next to it"):
        backbone = reward_model.lm_backbone.state_dict(prefix="lm_backbone.")
        reward_model.load_state_dict(backbone | load_file(head_file))
    return reward_model.requires_grad_(False)


def load_scalar_model(
    args: Any, field: str, tokenizer: PreTrainedTokenizerBase, length: int, *, frozen: bool = False
) -> RewardModel:
    """The reward model or critic that this field of args.rewards names, checked to fit the policy's tokenizer.

    length: tokens of the longest query with its response.
    """
    folder, argument = getattr(args.rewards, field), f"rewards.{field}"
    with named(argument):
        model = load_reward_model(folder, weights_dtype(args, frozen=frozen), args.trust_remote_code)
    # A critic may start as a reward model, but its values are no scores.
    if field == "trained_model" and (kind := read_info(folder).get("kind")) != "reward model":
        raise InputError(f"--{argument} {folder} is a {kind}; it must be a reward model")
    check_vocabulary(folder, argument, tokenizer, args.trust_remote_code)
    check_length(model.lm_backbone, f"--{argument} {folder}", length)
    return model


def check_vocabulary(
    model: str, argument: str, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool = False
) -> None:
    """Raise an InputError unless a model's ids mean the same texts as a tokenizer's."""
    with named(argument):
        others = load_tokenizer(model, trust_remote_code).get_vocab()
    if tokenizer.get_vocab() != {text: token for text, token in others.items() if text != PAD_TOKEN}:
        raise InputError(f"--{argument} {model} has another tokenizer than the policy")


def load_critic(
    args: Any, tokenizer: PreTrainedTokenizerBase, length: int, *, zero_head: bool = False
) -> RewardModel:
    """The critic before it learns: the model that the arguments name, or else the base model with a new head.

    length: tokens of the longest query with its response. zero_head: whether a new head starts at 0, so that all its
    values are 0, and not at random.
    """
    trained = args.rewards.trained_model
    if args.rewards.value_model or (trained and was_trained_here(trained)):
        field = "value_model" if args.rewards.value_model else "trained_model"
        return critic_that_learns(load_scalar_model(args, field, tokenizer, length))
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
    if Path(model, "reward_head.safetensors").is_file():
        return critic_that_learns(load_reward_model(model, dtype, trust_remote_code))
    with model_errors(model) as (path, revision):
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
    (batch,). It needs neither references nor messages. rows: how many it reads at a time, at most; 0: as many as are
    fast.
    """

    @torch.no_grad()
    def score(queries: Tensor, responses: Tensor, *_: Any, **__: Any) -> Tensor:
        tokens = torch.cat([queries, responses], dim=1)
        return packing.by_length(
            lambda tokens: reward_model(tokens, pad_id), tokens, model=reward_model, pad_id=pad_id, rows=rows
        )

    return score


# ---- Adapters --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LoraArgs(Arguments):
    rank: NonNegativeInt = 0
    """rank of the policy's low-rank adapters; 0: train all weights. The critic always trains all its weights"""
    alpha: PositiveFloat = 16.0
    """the adapters' output is scaled by alpha / rank"""
    target_modules: str = ""
    """layers that get adapters, names separated by commas; all-linear: every linear layer but the output layer;
    empty: peft's choice for the model, which is only q_proj and v_proj of the attention for Llama, Mistral, Qwen"""


def add_adapters(lm_backbone: PreTrainedModel, lora: Any, seed: int) -> nn.Module:
    """[X35] Freeze a model and add low-rank adapters to its layers. Returns peft's handle for switching them off.

    lora: LoraArgs, or peft's LoraConfig.
    """
    from peft import LoraConfig, TaskType, get_peft_model  # slow, and used by few runs

    config = lora
    if isinstance(lora, LoraArgs):
        names: str | list[str] | None = lora.target_modules or None
        if names and names != "all-linear":
            names = [name.strip() for name in names.split(",")]
        config = LoraConfig(task_type=TaskType.CAUSAL_LM, r=lora.rank, lora_alpha=lora.alpha, target_modules=names)
    if isinstance(config.target_modules, set):
        check_target_modules(lm_backbone, sorted(config.target_modules))
    torch.manual_seed(seed)  # the same adapters on every process
    try:
        with warnings.catch_warnings():  # of an attribute that peft reads by its old name, and one that it corrects
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`|fan_in_fan_out")
            return get_peft_model(lm_backbone, config)
    except ValueError as error:
        raise InputError(
            f"--lora.target_modules {lora.target_modules!r} does not fit the base model: {error}"
        ) from error


def check_target_modules(lm_backbone: PreTrainedModel, names: list[str]) -> None:
    """Raise if one of these names fits no layer of a model, or one that shares its weight with another layer.

    An adapter changes one of two such layers. Merged into the weight that both have, it would change the other, too,
    so that the model that is saved would not be the one that was trained.
    """
    what = f"--lora.target_modules {','.join(names)!r}"
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
    lm_backbone.save_pretrained(folder, state_dict=None if weights else {})
    tokenizer.save_pretrained(folder)
    write_json(folder / "ppo_rlhf.json", info)


def save_policy(
    folder: Path,
    lm_backbone: PreTrainedModel,
    adapters: nn.Module | None,
    tokenizer: PreTrainedTokenizerBase,
    info: dict[str, Any],
    weights: bool = True,
) -> None:
    """An ordinary causal language model, adapters merged in. The main process saves.

    adapters: peft's handle, which saves them once more on their own, in the folder `adapter` there. info: for
    ppo_rlhf.json. weights: whether those of the model are saved, too.
    """
    if adapters is not None:
        save_adapters(folder / "adapter", adapters)
        lm_backbone = adapters.merge_and_unload() if weights else lm_backbone
    info = {"vocab_size": vocabulary_size(tokenizer), **info, "kind": "policy"}
    lm_backbone.generation_config = sampling_config(
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
    info = {name: info[name] for name in ("base_model", "task")}
    info |= {"vocab_size": vocabulary_size(tokenizer), "kind": "critic"}
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
    """Save low-rank adapters as peft does, but without a path of this machine and without its empty model card.

    Only those in use are saved, directly in the folder, whatever their name is.
    """
    (name,) = adapters.active_adapters
    adapters.save_pretrained(folder, selected_adapters=[name])
    (folder / "README.md").unlink()
    if name != "default":
        for file in (folder / name).iterdir():
            file.replace(folder / file.name)
        (folder / name).rmdir()
    config = json.loads((folder / "adapter_config.json").read_text())
    if Path(config["base_model_name_or_path"] or "").is_dir():
        write_json(folder / "adapter_config.json", config | {"base_model_name_or_path": None})
