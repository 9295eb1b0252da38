"""Pretrained models and our own: load, check, save.

Files and lines next to marks are those of openai/lm-human-preferences at commit cbfd210.
"""

import contextlib
import copy
import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from accelerate import Accelerator, init_empty_weights
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from ppo_rlhf.lib import errors, files, hub, lm, packing, passes, precision, processes
from ppo_rlhf.lib.errors import InputError, flag


def weight_files(args: Any) -> dict[str, list[Path]]:
    """The files with the weights of the models that a script's arguments name, as find_paths gives them.

    Of a model from the hub, those that were downloaded.
    """
    from huggingface_hub import try_to_load_from_cache

    of_rewards = getattr(args, "rewards", None)  # the policies' scripts have some
    named = {"base_model": args.base_model}
    named |= {f"rewards.{name}": getattr(of_rewards, name, "") for name in ("trained_model", "value_model")}
    found = {}
    for name, model in named.items():
        if not model:
            continue
        folder = Path(model)
        if not folder.is_dir():
            repository, _, revision = model.partition("@")
            config = try_to_load_from_cache(repository, "config.json", revision=revision or None)
            folder = Path(config).parent if isinstance(config, str) else folder
        found[name] = sorted(folder.absolute().glob("*.safetensors"))
    return found


PAD_TOKEN = "<|ppo_rlhf_pad|>"  # of the tokenizers that are saved with reward models and critics


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One above a tokenizer's largest id, which is its length unless its ids have holes; also our padding id.

    An id in a hole may be sampled, like any row of the output layer that has no text, and is decoded as nothing.
    PAD_TOKEN, which has the padding id, doesn't count.
    """
    return max(token for text, token in tokenizer.get_vocab().items() if text != PAD_TOKEN) + 1


def read_info(folder: Path) -> dict[str, Any]:
    """The content of ppo_rlhf.json, which is next to the weights of our models."""
    try:
        info = files.read_json(folder / "ppo_rlhf.json")
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} is not the folder of a model that was trained here: {error}") from error
    kinds = {"kind": str, "base_model": str, "vocab_size": int, "task": dict}
    if isinstance(info, dict) and info.get("kind") == "policy":
        kinds |= {"reward_model": str, "function": str, "monitor": str}
    if not isinstance(info, dict) or not all(files.fits(info.get(name), kind) for name, kind in kinds.items()):
        raise InputError(f"{folder / 'ppo_rlhf.json'} does not describe a model that was trained here")
    return info


# ---- Load ------------------------------------------------------------------------------------------------------


TOKENIZER_FILES = ("*token*", "*vocab*", "*.model", "*.py")  # a folder with a tokenizer has such a file


def load_tokenizer(base_model: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a base model."""
    with model_errors(base_model) as (path, revision):
        if Path(path).is_dir() and not any(any(Path(path).glob(pattern)) for pattern in TOKENIZER_FILES):
            raise InputError(f"{path} has no tokenizer; save one there with tokenizer.save_pretrained")
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
        if not tokenizer.encode("a", add_special_tokens=False):  # the library makes up an empty one
            raise OSError("it has no tokenizer")
        return tokenizer


def load_pretrained(
    base_model: str, dtype: torch.dtype, trust_remote_code: bool = False, auto_class: type = AutoModelForCausalLM
) -> PreTrainedModel:
    """A pretrained model from safetensors, without dropout. Saved again, its configuration has its own settings.

    Settings that ask for more outputs than hidden states, and a padding id that has no embedding, are dropped.
    """
    if auto_class is AutoModelForCausalLM and (Path(base_model) / "ppo_rlhf.json").is_file():
        # Where embeddings are tied, the library would make a language model of a reward model.
        check_kind(Path(base_model), f"{flag('base_model')} {base_model}", "policy", "sft model")
    with model_errors(base_model) as (path, revision):
        outputs = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code, **outputs)
        if config._attn_implementation == "flex_attention" and not torch.cuda.is_available():
            config._attn_implementation = None  # it has no backward pass on a CPU; the library chooses another
        if (settings := Path(path) / "generation_config.json").is_file():
            files.read_json(settings)  # the library would ignore a damaged file, and the stop ids in it
        text_config = config.get_text_config(decoder=True)
        if not 0 <= (getattr(text_config, "pad_token_id", 0) or 0) < getattr(text_config, "vocab_size", math.inf):
            text_config.pad_token_id = None
        # [D18] Dropout is never active, neither in rollouts nor in training.   policy.py#L48
        own_settings = dict(vars(config))
        for name, value in own_settings.items():
            if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
                setattr(config, name, 0.0)
        # [D17] The library's GPT-2 is the original's network: tanh-GELU, tied output layer, layer norm epsilon 1e-5.
        #       language/model.py#L14-L73
        #       `gelu_pytorch_tanh` is the same function as `gelu_new`, in one kernel instead of eight.
        for name, value in own_settings.items():
            if value == "gelu_new":
                setattr(config, name, "gelu_pytorch_tanh")
        changed = {name: value for name, value in own_settings.items() if getattr(config, name) != value}
        if "/" in (getattr(config, "_attn_implementation", None) or "") and not trust_remote_code:
            raise OSError(f"its attention is code from the hub; {flag('trust_remote_code')} runs it, if you trust it")
        if list(Path(path).glob("shard-*-model-*-of-*.safetensors")):
            raise OSError("it is one process's part of a distributed checkpoint; save it with save_pretrained")
        if processes.sharding():  # `place` reads the weights
            model = without_weights(auto_class, config, dtype, trust_remote_code)
            model.source = base_model
            read_generation_config(model, path, revision)
        else:
            model = read_whole(auto_class, path, revision, config, dtype, trust_remote_code)
        # [D66] The embedding of the token that the configuration names as padding learns like any other.
        model.get_input_embeddings().padding_idx = None
        model.config = model.base_model.config = copy.deepcopy(model.config)  # the layers keep theirs
        for name, value in changed.items():
            setattr(model.config, name, value)
        return model


def read_whole(
    auto_class: type,
    path: str,
    revision: str | None,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """A model with all its weights; an OSError if they are not those that its configuration means."""
    with without_pickles():
        model, loading = auto_class.from_pretrained(
            path,
            revision=revision,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            # The library would load adapters that are next to the weights, so it looks for them where none can be.
            adapter_kwargs={"subfolder": "config.json"},
        )
    if loading["missing_keys"]:
        missing = ", ".join(sorted(loading["missing_keys"])[:3])
        raise OSError(f"its weights lack {missing}")
    if loading["mismatched_keys"]:
        name, there, wanted = sorted(loading["mismatched_keys"])[0]
        raise OSError(f"its weights hold {name} of shape {tuple(there)}, but config.json means {tuple(wanted)}")
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise OSError("its weights hold numbers that are not finite")
    return model


@contextlib.contextmanager
def without_pickles() -> Iterator[None]:
    """Keep the library from loading pickles, which an index of safetensors or config.json may name nevertheless."""

    def refuse(file: Any, *_: Any, **__: Any) -> None:
        raise OSError(f"its weights are in {Path(file).name}, which is a pickle; only safetensors are read")

    load, torch.load = torch.load, refuse
    try:
        yield
    finally:
        torch.load = load


@contextlib.contextmanager
def own_code_errors(model: str) -> Iterator[None]:
    """Turns the library's refusal to run code that comes with a model into one line of ours."""
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        if "trust_remote_code" not in str(error):
            raise
        raise InputError(
            f"{model} needs Python code that comes with it; {flag('trust_remote_code')} runs that code, "
            f"if you trust it"
        ) from error


@contextlib.contextmanager
def safetensors_errors(base_model: str, name: str) -> Iterator[None]:
    """Says what to do if a model on the hub, or this revision of it, has pickles only."""
    os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"  # else the library asks a service to convert them, and waits
    try:
        yield
    except OSError as error:
        if "cannot be loaded with `safetensors`" not in str(error):
            raise
        raise InputError(
            f"{flag('base_model')} {base_model} has no safetensors on the hub; {flag('base_model')} {name}@<revision>"
            f" takes those of another revision (often refs/pr/<number>), or convert it with save_pretrained and give "
            f"the folder"
        ) from error


@contextlib.contextmanager
def model_errors(base_model: str) -> Iterator[tuple[str, str | None]]:
    """Yields a base model's folder and None, or its name on the hub and the revision, None where none is given.

    Turns what goes wrong in loading it into one line.
    """
    if not base_model:
        raise InputError(f"{flag('base_model')} is empty; give a folder, a name on the hub, or tales")
    path = Path(base_model)
    if path.is_dir() and not (path / "config.json").is_file():
        inside = sorted(config.parent for config in path.glob("*/config.json"))
        language_models = [folder for folder in inside if not (folder / "reward_head.safetensors").is_file()]
        offer = f"; give {language_models[0]}" if language_models else ""
        raise InputError(f"{path} is not the folder of a model: it has no config.json{offer}")
    remedy = "give the folder of a downloaded model, or use --preset tales"
    if not path.is_dir() and not hub.HUB_NAME.fullmatch(base_model):
        raise InputError(f"{flag('base_model')} {base_model}: no such folder; {remedy}")
    if not path.is_dir():
        name, _, revision = base_model.partition("@")
        with (
            hub.hub_errors(f"{flag('base_model')} {base_model}", remedy),
            own_code_errors(base_model),
            safetensors_errors(base_model, name),
        ):
            yield name, revision or None
        return
    from huggingface_hub.errors import StrictDataclassError

    what_the_library_raises = (
        *(OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, ImportError),
        *(SafetensorError, StrictDataclassError),
    )
    try:
        with own_code_errors(str(path)):
            yield str(path), None
    except InputError:
        raise
    except what_the_library_raises as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{path} is not a model that can be loaded from safetensors: {reason}") from error


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


def without_weights(
    model_class: type, config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    """A model with weights on the meta device, where they have a shape, but no numbers. Its buffers have theirs."""
    with init_empty_weights(include_buffers=False), no_init_weights():
        return model_class.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code).eval()


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
    processes.fail_together("" if finite else f"{model.source}: its weights hold numbers that are not finite")


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
    return whole.eval()


# ---- Check -----------------------------------------------------------------------------------------------------


def check_kind(folder: Path, what: str, *kinds: str) -> None:
    """Raise if a model that was trained here is of another kind. what: the argument that names it, and its value."""
    if (kind := read_info(folder)["kind"]) not in kinds:
        raise InputError(f"{what} is a {kind}; it must be a {' or '.join(kinds)}")


def check_vocabulary(model: str, what: str, other: str, trust_remote_code: bool = False) -> None:
    """Raise if an id means another text in one model than in another. what: the argument that names it."""
    tokenizers = [load_tokenizer(name, trust_remote_code) for name in (model, other)]
    sizes = [vocabulary_size(tokenizer) for tokenizer in tokenizers]
    remedy = "both must start from the same kind of model"
    if sizes[0] != sizes[1]:
        raise InputError(f"{what}: its tokenizer has {sizes[0]} tokens, that of {other} {sizes[1]}; {remedy}")
    tokens = [{token: text for text, token in tokenizer.get_vocab().items()} for tokenizer in tokenizers]
    for token in range(sizes[0]):
        texts = [by_id.get(token) for by_id in tokens]
        if texts[0] != texts[1]:
            raise InputError(f"{what}: its token {token} is {texts[0]!r}, that of {other} {texts[1]!r}; {remedy}")


def check_size(model: PreTrainedModel, what: str, length: int, vocab_size: int) -> None:
    """Raise if a model cannot read so many tokens or ids. what: the argument that names it, and its value."""
    rows = model.get_input_embeddings().num_embeddings
    if rows < vocab_size:
        raise InputError(f"{what} has an embedding of {rows} rows for a tokenizer of {vocab_size}")
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise InputError(
            f"{what} reads at most {longest} tokens, but query and response are {length}; "
            f"shorten {flag('task.query_length')} or {flag('task.response_length')}"
        )


@torch.no_grad()
def check_model(model: PreTrainedModel, base_model: str, length: int, vocab_size: int, read_tokens: Callable) -> None:
    """Raise if a base model cannot read so many tokens or ids, or if reading them our way gives other logits.

    Our way: with padding anywhere, which must not matter. vocab_size is the padding id, too. read_tokens: of the
    script, (model, tokens, pad_id, columns) -> hidden states.
    """
    what = f"{flag('base_model')} {base_model}"
    check_size(model, what, length, vocab_size)
    tokens = (torch.arange(length, device=model.device) % vocab_size).unsqueeze(0)
    logits, output_layer = model(input_ids=tokens).logits, model.get_output_embeddings()
    if not same_logits(output_layer(model.base_model(tokens).last_hidden_state), logits):
        raise InputError(f"{what} changes its logits after the output layer, which is not supported")

    columns, half, quarter = torch.arange(length, device=model.device), length // 2, length // 4
    if passes.is_packed(model, "shares_prefixes"):  # two rows of which the first half is read once
        rows = torch.cat([tokens, tokens.roll(quarter, 1).where(columns >= half, tokens)])
        if not same_logits(output_layer(read_tokens(model, rows, vocab_size, slice(None))), model(rows).logits):
            passes.UNFIT.add(type(model.base_model))
            errors.say_once(f"{what} does not read shared prefixes as it should: each row is read by itself")

    def agrees(places: torch.Tensor) -> bool:
        """Whether the first tokens, at these columns with padding in all others, have the logits from above."""
        row = torch.full_like(tokens, vocab_size)
        row[:, places] = tokens[:, : len(places)]
        hidden_states = read_tokens(model, row, vocab_size, slice(None))
        return same_logits(output_layer(hidden_states[:, places]), logits[:, : len(places)])

    try:
        at_all = agrees(columns)
        after_padding = agrees(columns[half:])
        around_padding = agrees(torch.cat([columns[:quarter], columns[quarter + half :]]))
    except (TypeError, ValueError, LookupError, RuntimeError) as error:
        raise InputError(f"{what} cannot be read with an attention mask of 4 dimensions: {error}") from error
    if not at_all:
        raise InputError(
            f"{what} does not attend to all of {length} tokens, query and response, which is not supported; if it "
            f"attends within a window, shorten {flag('task.query_length')} or {flag('task.response_length')}"
        )
    if not (after_padding and around_padding):
        raise InputError(
            f"{what} gives a text other logits when padding is "
            f"{'inside' if after_padding else 'before'} it, which is not supported: it reads tokens one after the "
            f"other (Mamba, RWKV) or takes distances from columns instead of position ids (ALiBi as in MPT; a window "
            f"as in GPT-Neo, which {flag('task.query_length')} and {flag('task.response_length')} below it avoid)"
        )


def same_logits(logits: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether logits (batch, length, ids) agree at each position, to a thousandth of what they vary over the ids."""
    distance = (logits - expected).square().mean(2).sqrt()  # (batch, length)
    return bool((distance <= 1e-3 * expected.std(2, correction=0)).all())


# ---- Our own models --------------------------------------------------------------------------------------------


def find_head(folder: Path) -> Path:
    """The file with the head of a reward model or critic."""
    head_file = folder / "reward_head.safetensors"
    if not folder.is_dir():
        raise InputError(f"reward model {folder}: no such folder")
    if not head_file.is_file():
        raise InputError(f"{folder} is not a reward model that was trained here: it has no {head_file.name}")
    return head_file


def load_reward_model(folder: Path, dtype: torch.dtype, trust_remote_code: bool = False) -> lm.RewardModel:
    """A reward model or critic that was saved here, in models/<run>/reward or value, bit for bit."""
    # [D44] Gain and bias are kept, and the scores are the same bit for bit.   train_reward.py#L292-L329
    head_file = find_head(folder)
    backbone = load_pretrained(str(folder), dtype, trust_remote_code, AutoModel)
    reward_model = lm.RewardModel(backbone)
    for own in (reward_model.gain, reward_model.bias, *reward_model.reward_head.parameters()):
        own.data = own.data.to(torch.promote_types(dtype, torch.float32))  # never in low precision
    try:
        head = load_file(head_file)
        if processes.sharding():  # `place` reads what belongs to the backbone
            head = {name: tensor for name, tensor in head.items() if not name.startswith("lm_backbone.")}
        missing = {"reward_head.weight", "reward_head.bias", "gain", "bias"} - set(head)
        unexpected = reward_model.load_state_dict(head, strict=False).unexpected_keys
    except (SafetensorError, RuntimeError) as error:
        raise InputError(f"{head_file} does not fit the model next to it: {error}") from error
    if missing or unexpected:
        raise InputError(f"{head_file} does not fit the model next to it: {', '.join([*missing, *unexpected])}")
    if not all(tensor.isfinite().all() for tensor in head.values()):
        raise InputError(f"{head_file} holds numbers that are not finite")
    return reward_model.requires_grad_(False)


def config_for_plots(given: Any, args: Any) -> dict[str, Any]:
    """Additional entries for Weights & Biases: the label file that the policy's reward model learned from.

    The plotting command of lm-human-preference-details (at ccc1953) selects runs by it. given: the arguments as they
    were typed; args: with the paths that they mean.
    """
    folder = args.rewards.trained_model
    info = read_info(Path(folder)) if folder else {}
    return {"rewards": dataclasses.asdict(given.rewards) | {"label_dataset": info.get("label_dataset")}}


def dtype_of_weights(args: Any, *, frozen: bool) -> torch.dtype:
    """The precision of the weights of a model that a script's arguments name. frozen: whether it never learns."""
    return torch.bfloat16 if frozen and args.frozen_bfloat16 else precision.weights_dtype(args.dtype)


def load_base_model(args: Any, auto_class: type = AutoModelForCausalLM, *, frozen: bool = False) -> PreTrainedModel:
    """The base model that a script's arguments name, in the precision of its weights."""
    dtype = dtype_of_weights(args, frozen=frozen)
    return load_pretrained(args.base_model, dtype, args.trust_remote_code, auto_class).requires_grad_(not frozen)


def load_scalar_model(args: Any, field: str, vocab_size: int, *, frozen: bool = False) -> lm.RewardModel:
    """The reward model or critic that this field of args.rewards names, checked to fit the base model."""
    folder = Path(getattr(args.rewards, field))
    what = f"{flag(f'rewards.{field}')} {folder}"
    dtype = dtype_of_weights(args, frozen=frozen)
    model = load_reward_model(folder, dtype, args.trust_remote_code)
    # A critic may start as a reward model, but its values are no scores.
    check_kind(folder, what, "reward model", *(["critic"] if field == "value_model" else []))
    check_vocabulary(str(folder), what, args.base_model, args.trust_remote_code)
    check_size(model.lm_backbone, what, args.task.query_length + args.task.response_length, vocab_size)
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


# ---- Layers ----------------------------------------------------------------------------------------------------


def layers(network: nn.Module) -> list[nn.Module]:
    """The layers of the language models in a network, which are alike and follow each other."""
    parts = list(network.modules())
    names = {name for part in parts if isinstance(part, PreTrainedModel) for name in part._no_split_modules or ()}
    return [part for part in parts if type(part).__name__ in names]


def checkpoint_layers(network: nn.Module) -> None:
    """Let passes with gradients keep only the inputs of a layer; the backward pass computes the rest again.

    Here and not by the library, which does so in train mode, and there for rollouts too, whose cache it refuses.
    """

    def checkpointed(forward: Callable) -> Callable:
        def forward_twice(*arguments: Any, **options: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*arguments, **options)
            return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False, **options)

        return forward_twice

    for layer in layers(network):
        layer.forward = checkpointed(layer.forward)
        layer.is_checkpointed = True  # for lib/memory.py


def compile_backbone(lm_backbone: PreTrainedModel) -> None:
    """Compile a language model that is not packed. Each line of packed tokens would be compiled again."""
    lm_backbone.base_model.compile(dynamic=False)


# ---- Adapters --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoraArgs:
    rank: int = 0
    """rank of the policy's low-rank adapters; 0: train all weights. The critic always trains all its weights"""
    alpha: float = 16.0
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


FINAL_NORM_BIASES = ("ln_f.bias", "final_layer_norm.bias", "norm.bias")  # GPT-2; GPT-NeoX; others


def unsharded(reward_model: lm.RewardModel, trust_remote_code: bool = False) -> lm.RewardModel:
    """A reward model with whole weights, on the first process: itself, unless it is sharded. All must call this."""
    if not any(isinstance(module, FSDPModule) for module in reward_model.modules()):
        return reward_model
    weights, config = processes.full_state_dict(reward_model), reward_model.lm_backbone.config
    if not errors.is_first_process():
        return reward_model
    plain = lm.RewardModel(AutoModel.from_config(config, trust_remote_code=trust_remote_code))
    plain.to(reward_model.gain.dtype).load_state_dict(weights, strict=False)  # tied weights come once
    return plain


def save_language_model(
    folder: Path,
    lm_backbone: PreTrainedModel,
    weights: dict[str, torch.Tensor] | None,
    tokenizer: PreTrainedTokenizerBase,
    info: dict,
) -> None:
    """Save as an ordinary causal language model, with its tokenizer and ppo_rlhf.json.

    weights: its whole state where it is sharded; None: as it is.
    """
    lm_backbone.save_pretrained(folder, state_dict=weights)
    files.give_usual_mode(folder)
    tokenizer.save_pretrained(folder)
    files.write_json(folder / "ppo_rlhf.json", info)


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
    = w h + c. Where that norm has no bias, c is in the configuration as `score_constant` and must be added.
    `reward_head.safetensors` keeps what this changed, so that `load_reward_model` restores our model bit for bit.
    """
    # [D44] Gain and bias are kept, and the scores are the same bit for bit.   train_reward.py#L292-L329
    backbone, pad_id = reward_model.lm_backbone.base_model, vocabulary_size(tokenizer)
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
    with_padding(tokenizer, pad_id).save_pretrained(folder)
    save_file(kept, folder / "reward_head.safetensors")
    files.give_usual_mode(folder)
    files.write_json(folder / "ppo_rlhf.json", info)


def with_padding(tokenizer: PreTrainedTokenizerBase, pad_id: int) -> PreTrainedTokenizerBase:
    """A copy of a tokenizer that pads texts on the right with our padding id, or refuses to pad.

    A sequence classifier reads the score at the last token that isn't the padding id of its configuration. If its
    tokenizer padded with another id, such as the end of text, the score would be that of a padding token.
    """
    padding = copy.deepcopy(tokenizer)
    padding.padding_side = "right"
    padding.add_special_tokens({"pad_token": PAD_TOKEN})
    if padding.pad_token_id != pad_id:  # the ids have a hole, and the new token is in it
        padding = copy.deepcopy(tokenizer)
        padding.pad_token = None
    return padding


def save_policy(folder: Path, policy: Any, tokenizer: PreTrainedTokenizerBase, args: Any) -> None:
    """Save as an ordinary causal language model, with the value head and ppo_rlhf.json next to the weights.

    policy: a PolicyWithValueHead; args: of its script, as they were given. Only the first process writes.
    """
    if not errors.is_first_process():
        return
    info = {
        "kind": "policy",
        "base_model": args.base_model,
        "reward_model": args.rewards.trained_model,
        "function": args.rewards.function,
        "monitor": args.rewards.monitor,
        "vocab_size": vocabulary_size(tokenizer),
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
    """policy: an ordinary causal language model, adapters merged in; value: the critic, as a reward model is saved.

    adapters: peft's handle, which saves them once more on their own, in policy/adapter. info: for ppo_rlhf.json.
    Every process must call this.
    """
    critic = unsharded(critic, trust_remote_code) if critic else None
    if adapters is not None and errors.is_first_process():
        save_adapters(folder / "policy" / "adapter", adapters)
        lm_backbone = adapters.merge_and_unload()
    weights = processes.full_state_dict(lm_backbone)
    if not errors.is_first_process():
        return
    info = {"vocab_size": vocabulary_size(tokenizer), **info}
    save_language_model(folder / "policy", lm_backbone, weights, tokenizer, info | {"kind": "policy"})
    if critic:
        kept = {name: info[name] for name in ("base_model", "vocab_size", "task")}
        save_reward_model(folder / "value", critic, tokenizer, kept | {"kind": "critic"}, trust_remote_code)


def save_adapters(folder: Path, adapters: nn.Module) -> None:
    """Save low-rank adapters as peft does, but without a path of this machine and without its empty model card."""
    adapters.save_pretrained(folder)
    (folder / "README.md").unlink()
    config = files.read_json(folder / "adapter_config.json")
    if Path(config["base_model_name_or_path"] or "").is_dir():
        files.write_json(folder / "adapter_config.json", config | {"base_model_name_or_path": None})
