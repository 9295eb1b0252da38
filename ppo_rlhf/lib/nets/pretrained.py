"""Models that were pretrained or trained here, before they are loaded: which files, and what is wrong with them.

All that is wrong ends in one line that names the argument and says what would do.
"""

import contextlib
import copy
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from ppo_rlhf.lib.base import files, hub
from ppo_rlhf.lib.base.errors import InputError, flag

PAD_TOKEN = "<|ppo_rlhf_pad|>"  # of the tokenizers that are saved with reward models and critics


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One above a tokenizer's largest id, which is its length unless its ids have holes; also our padding id.

    An id in a hole may be sampled, like any row of the output layer that has no text, and is decoded as nothing.
    PAD_TOKEN, which has the padding id, doesn't count.
    """
    return max(token for text, token in tokenizer.get_vocab().items() if text != PAD_TOKEN) + 1


def one_token(tokenizer: PreTrainedTokenizerBase, text: str | None, field: str) -> int | None:
    """The id of a text that must be exactly one token; None for None."""
    if text is None:
        return None
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise InputError(f"{flag(f'task.{field}')} {text!r} is {len(ids)} tokens ({ids}); it must be exactly one")
    return ids[0]


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
    """The tokenizer of a base model, with the model's generation_config, which may name more ends of a text."""
    with model_errors(base_model) as (path, revision):
        if Path(path).is_dir() and not any(any(Path(path).glob(pattern)) for pattern in TOKENIZER_FILES):
            raise InputError(f"{path} has no tokenizer; save one there with tokenizer.save_pretrained")
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
        if not tokenizer.encode("a", add_special_tokens=False):  # the library makes up an empty one
            raise OSError("it has no tokenizer")
        with contextlib.suppress(OSError):  # there is none, or read_config refuses it
            tokenizer.generation_config = GenerationConfig.from_pretrained(path, revision=revision)
        return tokenizer


def drop_outside_ids(config: PreTrainedConfig | GenerationConfig, vocab_size: int) -> None:
    """Drop special tokens of a configuration whose ids are not in 0..vocab_size - 1, such as -1, which means none."""

    def is_there(token: Any) -> bool:
        return type(token) is not int or 0 <= token < vocab_size

    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        found = getattr(config, name, None)
        if isinstance(found, list):
            setattr(config, name, [token for token in found if is_there(token)] or None)
        elif not is_there(found):
            setattr(config, name, None)


def read_config(path: str, revision: str | None, trust_remote_code: bool, *, auto_class: type) -> PreTrainedConfig:
    """The configuration of a model, which outputs no more than hidden states and names no special token without an
    embedding. Raises an OSError if its weights cannot be read here.

    auto_class: the library's class that will load the model.
    """
    if auto_class is AutoModelForCausalLM and (Path(path) / "ppo_rlhf.json").is_file():
        # Where embeddings are tied, the library would make a language model of a reward model.
        check_kind(Path(path), f"{flag('base_model')} {path}", "policy", "sft model")
    outputs = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}
    config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code, **outputs)
    if config._attn_implementation == "flex_attention" and not torch.cuda.is_available():
        config._attn_implementation = None  # it has no backward pass on a CPU; the library chooses another
    if not hasattr(config, "hidden_size"):
        raise OSError("it reads more than texts; save its language model alone")
    if getattr(config, "attn_logit_softcapping", None):
        config._attn_implementation = "eager"  # of what runs everywhere, only this caps attention's logits (Gemma 2)
    if (settings := Path(path) / "generation_config.json").is_file():
        files.read_json(settings)  # the library would ignore a damaged file, and the stop ids in it
    text_config = config.get_text_config(decoder=True)
    drop_outside_ids(text_config, getattr(text_config, "vocab_size", sys.maxsize))
    if "/" in (getattr(config, "_attn_implementation", None) or "") and not trust_remote_code:
        raise OSError(f"its attention is code from the hub; {flag('trust_remote_code')} runs it, if you trust it")
    if list(Path(path).glob("shard-*-model-*-of-*.safetensors")):
        raise OSError("it is one process's part of a distributed checkpoint; save it with save_pretrained")
    return config


def is_dropout(name: str, value: Any) -> bool:
    """Whether a setting of a configuration is a probability of dropout."""
    return ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float)


# Options of from_pretrained. The library would load adapters that are next to the weights, so it looks for them where
# none can be. Weights of other shapes than the configuration's are left to checked_model.
SAFETENSORS_ONLY = {
    "use_safetensors": True,
    "ignore_mismatched_sizes": True,
    "adapter_kwargs": {"subfolder": "config.json"},
}


def without_weights(
    model_class: type, config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    """A model with weights on the meta device, where they have a shape, but no numbers. Its buffers have theirs."""
    with init_empty_weights(include_buffers=False), no_init_weights():
        return model_class.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code).eval()


def empty_model(base_model: str, trust_remote_code: bool, auto_class: type) -> PreTrainedModel:
    """A model without weights, as its configuration means it, to check what a later stage will load."""
    with model_errors(base_model) as (path, revision):
        config = read_config(path, revision, trust_remote_code, auto_class=auto_class)
        return without_weights(auto_class, config, torch.float32, trust_remote_code)


def checked_model(
    model: PreTrainedModel, loading: dict[str, Any] | None, own_settings: dict[str, Any]
) -> PreTrainedModel:
    """A loaded model, or an OSError if its weights are not those that its configuration means.

    loading: what from_pretrained says; None: it has no weights yet. own_settings: what the configuration said before
    it was changed for us, which is what is saved again.
    """
    if loading and loading["missing_keys"]:
        missing = ", ".join(sorted(loading["missing_keys"])[:3])
        raise OSError(f"its weights lack {missing}")
    if loading and loading["mismatched_keys"]:
        name, there, wanted = sorted(loading["mismatched_keys"])[0]
        raise OSError(f"its weights hold {name} of shape {tuple(there)}, but config.json means {tuple(wanted)}")
    if loading and not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise OSError("its weights hold numbers that are not finite")
    model.config = model.base_model.config = copy.deepcopy(model.config)  # the layers keep theirs
    for name, value in own_settings.items():
        setattr(model.config, name, value)
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


def without_config(folder: Path) -> str:
    """What is wrong with a folder that has no config.json."""
    if not (folder / "adapter_config.json").is_file():
        return "it has no config.json"
    try:
        base = files.read_json(folder / "adapter_config.json")["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError):
        base = "a model"
    return f"it is an adapter of {base}; merge it first (peft: merge_and_unload)"


@contextlib.contextmanager
def model_errors(base_model: str) -> Iterator[tuple[str, str | None]]:
    """Yields a base model's folder and None, or its name on the hub and the revision, None where none is typed.

    Turns what goes wrong in loading it into one line.
    """
    if not base_model:
        raise InputError(f"{flag('base_model')} is empty; give a folder, a name on the hub, or tales")
    path = Path(base_model)
    if path.is_dir() and not (path / "config.json").is_file():
        inside = sorted(config.parent for config in path.glob("*/config.json"))
        language_models = [folder for folder in inside if not (folder / "reward_head.safetensors").is_file()]
        offer = f"; give {language_models[0]}" if language_models else ""
        raise InputError(f"{path} is not the folder of a model: {without_config(path)}{offer}")
    remedy = "give the folder of a downloaded model, or use --preset tales"
    if not path.is_dir() and not hub.HUB_NAME.fullmatch(base_model):
        raise InputError(f"{flag('base_model')} {base_model}: no such folder; {remedy}")
    if not path.is_dir():
        name, _, revision = base_model.partition("@")
        with (
            without_pickles(),
            hub.hub_errors(f"{flag('base_model')} {base_model}", remedy),
            own_code_errors(base_model),
            safetensors_errors(base_model, name),
        ):
            yield name, revision or None
        return
    from huggingface_hub.errors import StrictDataclassError

    what_the_library_raises = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError)
    what_the_library_raises += (ImportError, SafetensorError, StrictDataclassError)
    try:
        with without_pickles(), own_code_errors(str(path)):
            yield str(path), None
    except InputError:
        raise
    except what_the_library_raises as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{path} is not a model that can be loaded from safetensors: {reason}") from error


# ---- Check -----------------------------------------------------------------------------------------------------


def check_kind(folder: Path, what: str, *kinds: str) -> None:
    """Raise if a model that was trained here is of another kind. what: the argument that names it, and its value."""
    if (kind := read_info(folder)["kind"]) not in kinds:
        raise InputError(f"{what} is a {kind}; it must be a {' or '.join(kinds)}")


def check_vocabulary(model: str, what: str, other: str, trust_remote_code: bool = False) -> None:
    """Raise if an id means another text in one model than in another. what: the argument that names it."""
    words = [load_tokenizer(name, trust_remote_code).get_vocab() for name in (model, other)]
    own, others = ({token: text for text, token in known.items() if text != PAD_TOKEN} for known in words)
    if differ := [token for token in sorted(own | others) if own.get(token) != others.get(token)]:
        texts = f"its token {differ[0]} is {own.get(differ[0])!r}, that of {other} {others.get(differ[0])!r}"
        sizes = f"they have {len(own)} and {len(others)}"
        raise InputError(f"{what}: {texts} ({sizes}); both must start from the same kind of model")


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
    logits, cap = model(input_ids=tokens).logits, getattr(model.config, "final_logit_softcapping", None)

    def output_layer(hidden_states: torch.Tensor) -> torch.Tensor:
        logits = model.get_output_embeddings()(hidden_states)
        return cap * torch.tanh(logits / cap) if cap else logits

    if not same_logits(output_layer(model.base_model(tokens).last_hidden_state), logits):
        raise InputError(f"{what} changes its logits after the output layer, which is not supported")

    columns, half, quarter = torch.arange(length, device=model.device), length // 2, length // 4

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


def check_reward_model(
    lm_backbone: PreTrainedModel, args: Any, vocab_size: int, field: str = "trained_model"
) -> None:
    """Raise unless the reward model or critic that this field of args.rewards names fits the base model.

    lm_backbone: of the loaded model.
    """
    folder = getattr(args.rewards, field)
    what = f"{flag(f'rewards.{field}')} {folder}"
    # A critic may start as a reward model, but its values are no scores.
    check_kind(Path(folder), what, "reward model", *(["critic"] if field == "value_model" else []))
    check_vocabulary(folder, what, args.base_model, args.trust_remote_code)
    check_size(lm_backbone, what, args.task.query_length + args.task.response_length, vocab_size)


def find_head(folder: Path, what: str = "") -> Path:
    """The file with the head of a reward model or critic. what: the argument that names it, and its value."""
    head_file, what = folder / "reward_head.safetensors", what or f"reward model {folder}"
    if not folder.is_dir():
        raise InputError(f"{what}: no such folder")
    if not head_file.is_file():
        raise InputError(
            f"{what} is not a reward model of ours: it has no {head_file.name}; give models/<run>/reward"
        )
    return head_file


def load_head(reward_model: nn.Module, folder: Path) -> None:
    """Give a reward model or critic what is not in the classifier of its folder: head, gain, bias, and what saving
    changed in the language model.
    """
    head_file = find_head(folder)
    for own in (reward_model.gain, reward_model.bias, *reward_model.reward_head.parameters()):
        own.data = own.data.to(torch.promote_types(reward_model.lm_backbone.dtype, torch.float32))  # never in less
    try:
        head = load_file(head_file)
    except SafetensorError as error:
        raise InputError(f"{head_file} does not fit the model next to it: {error}") from error
    state = reward_model.state_dict()
    problems = sorted({"reward_head.weight", "reward_head.bias", "gain", "bias"} - head.keys() | head.keys() - state)
    problems += [name for name in head if name in state and head[name].shape != state[name].shape]
    if problems:
        raise InputError(f"{head_file} does not fit the model next to it: {', '.join(problems)}")
    if not all(tensor.isfinite().all() for tensor in head.values()):
        raise InputError(f"{head_file} holds numbers that are not finite")
    reward_model.load_state_dict(head, strict=False)


def config_for_plots(typed: Any, args: Any) -> dict[str, Any]:
    """Additional entries for Weights & Biases: the label file that the policy's reward model learned from.

    The plotting command of lm-human-preference-details (at ccc1953) selects runs by it. typed: the arguments as they
    were typed; args: with the paths that they mean.
    """
    folder = args.rewards.trained_model
    info = read_info(Path(folder)) if (Path(folder) / "ppo_rlhf.json").is_file() else {}
    return {"rewards": dataclasses.asdict(typed.rewards) | {"label_dataset": info.get("label_dataset")}}


def dtype_of_weights(args: Any, *, frozen: bool) -> torch.dtype:
    """The precision of the weights of a model that a script's arguments name. frozen: whether it never learns."""
    learning = torch.float64 if args.dtype == "float64" else torch.float32
    return torch.bfloat16 if frozen and getattr(args, "frozen_bfloat16", False) else learning
