"""Models and tokenizers, before they are loaded: which files, how texts begin and end, and what is wrong with them.

All that is wrong ends in one line that names the argument and says what would do.

Files and lines next to marks are those of verl-project/verl at commit b178a3c.
"""

import contextlib
import copy
import functools
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
from transformers.activations import ACT2FN, NewGELUActivation
from transformers.initialization import no_init_weights

from ppo_rlhf import worlds
from ppo_rlhf.lib import files, hub
from ppo_rlhf.lib.errors import InputError, flag, input_errors, say_once

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
    with input_errors(f"{folder} is not the folder of a model that was trained here", OSError, ValueError):
        info = files.read_json(folder / "ppo_rlhf.json")
    if not isinstance(info, dict) or not isinstance(info.get("kind"), str):
        raise InputError(f"{folder / 'ppo_rlhf.json'} does not describe a model that was trained here")
    return info


# ---- How texts begin and end -----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def start_of_plain(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before every text by itself, such as BOS; for most models nothing. A line says so."""
    bare = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a")
    places = (i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    first = whole[: next(places, 0)]
    # [X19] Llama, Mistral and Gemma have never read a text without it.
    if first:
        say_once(f"every prompt begins with {tokenizer.decode(first)}, as all texts do for this tokenizer")
    return first


def end_ids(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None = None) -> tuple[int, ...]:
    """All ids that end a text: the tokenizer's, and those that the model's generation_config.json names.

    generation_config: None is that of the model whose tokenizer load_tokenizer has loaded.
    """
    # [V10] A set: what ends a text for the tokenizer, and what ends a response for the model.
    #       workers/fsdp_workers.py#L945-L949
    generation_config = generation_config or getattr(tokenizer, "generation_config", None)
    theirs = generation_config.eos_token_id if generation_config else None
    ends = {tokenizer.eos_token_id, *(theirs if isinstance(theirs, list) else [theirs])} - {None, -1}  # -1: none
    if any(type(end) is not int for end in ends):
        raise InputError(f"the model's generation_config.json names the token {theirs!r} as its end; give its number")
    return tuple(sorted(ends))


def sampling_config(
    own: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase, temperature: float
) -> GenerationConfig:
    """The generation_config.json of a policy: how it was sampled in training. own: that of the base model."""
    # [V14] With the base model's top-k or penalty, the library would write as no policy was trained to.
    ids = {name: getattr(own, name, None) for name in ("bos_token_id", "pad_token_id")}
    ends = end_ids(tokenizer, own)
    ids["eos_token_id"] = ends[0] if len(ends) == 1 else list(ends) or None
    config = GenerationConfig(do_sample=True, temperature=temperature, top_p=1.0, top_k=0, **ids)
    drop_outside_ids(config, vocabulary_size(tokenizer))
    return config


# ---- Load ------------------------------------------------------------------------------------------------------


def load_tokenizer(base_model: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a base model, with the model's generation_config, which may name more ends of a text."""
    with model_errors(base_model) as (path, revision):
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
        if not tokenizer.encode("a", add_special_tokens=False):  # the library makes up an empty one
            raise OSError("it has no tokenizer")
        if (settings := Path(path, "generation_config.json")).is_file():
            with input_errors(str(settings), ValueError):
                files.read_json(settings)  # of a damaged file, with its ends of a text, the library says no word
        with contextlib.suppress(OSError):  # there is none
            tokenizer.generation_config = GenerationConfig.from_pretrained(path, revision=revision)
        return tokenizer


def drop_outside_ids(config: PreTrainedConfig | GenerationConfig, vocab_size: int) -> None:
    """Drop special tokens of a configuration whose ids are not in 0..vocab_size - 1, such as -1, which means none."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = getattr(config, name, None)
        if isinstance(token, int) and not 0 <= token < vocab_size:
            setattr(config, name, None)


OUTPUTS = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}  # settings of a model


def read_config(path: str, revision: str | None, trust_remote_code: bool, *, auto_class: type) -> PreTrainedConfig:
    """The configuration of a model, which outputs no more than hidden states and names no special token without an
    embedding. Raises an OSError if its weights cannot be read here.

    auto_class: the library's class that will load the model.
    """
    if auto_class is AutoModelForCausalLM and (Path(path) / "ppo_rlhf.json").is_file():
        # Where embeddings are tied, the library would make a language model of a reward model.
        check_kind(Path(path), f"{flag('base_model')} {path}", "policy", "sft model")
    config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code, **OUTPUTS)
    if not hasattr(config, "hidden_size"):
        raise OSError("it reads more than texts; save its language model alone")
    if getattr(config, "attn_logit_softcapping", None):
        config._attn_implementation = "eager"  # of what runs everywhere, only this caps attention's logits (Gemma 2)
    if config._attn_implementation == "flex_attention" and not torch.cuda.is_available():
        config._attn_implementation = None  # it ends the interpreter on a CPU; the library chooses another
    text_config = config.get_text_config(decoder=True)
    drop_outside_ids(text_config, getattr(text_config, "vocab_size", sys.maxsize))
    if "/" in (getattr(config, "_attn_implementation", None) or "") and not trust_remote_code:
        raise OSError(f"its attention is code from the hub; {flag('trust_remote_code')} runs it, if you trust it")
    if list(Path(path).glob("shard-*-model-*-of-*.safetensors")):  # whose table of contents is a pickle
        raise OSError("it is one process's part of a distributed checkpoint; save it with save_pretrained")
    return config


# The library would load an adapter that is next to the weights, so it looks for one where none can be.
NO_ADAPTER = {"subfolder": "config.json"}


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
    model.config = model.base_model.config = copy.deepcopy(model.config)  # the layers keep theirs
    for name, value in own_settings.items():
        setattr(model.config, name, value)
    return model


def as_if_loaded_here(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model that somebody has loaded, in place, compute what it would if `load_pretrained` had loaded it.

    See there and in `read_config` for the reasons. Dropout is off while the model is in eval mode.
    """
    config = model.config
    if not hasattr(config, "hidden_size"):
        raise InputError(f"a {type(model).__name__} reads more than texts; give its language model alone")
    for name, value in OUTPUTS.items():
        setattr(config, name, value)
    text_config = config.get_text_config(decoder=True)
    drop_outside_ids(text_config, getattr(text_config, "vocab_size", sys.maxsize))
    if getattr(config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
    elif config._attn_implementation == "flex_attention" and not torch.cuda.is_available():
        model.set_attn_implementation("sdpa")
    for part in list(model.modules()):
        for name, child in part.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(part, name, ACT2FN["gelu_pytorch_tanh"])
    model.get_input_embeddings().padding_idx = None
    return model.eval()


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
def model_errors(base_model: str) -> Iterator[tuple[str, str | None]]:
    """Yields a base model's folder and None, or its name on the hub and the revision, None where none is typed.

    base_model: a folder, a world's model, or a name on the hub. Turns what goes wrong in loading it into one line.
    """
    what = f"{flag('base_model')} {base_model}"
    base_model = worlds.find_value("base_model", base_model)
    remedy = "give the folder of a downloaded model, or use --preset tales"
    folder = Path(base_model)
    is_folder = bool(base_model) and folder.is_dir()
    if is_folder and not (folder / "config.json").is_file():
        raise InputError(f"{what} is not the folder of a model: it has no config.json; {remedy}")
    if not is_folder and not hub.HUB_NAME.fullmatch(base_model):
        raise InputError(f"{what}: no such folder; {remedy}")
    name, _, revision = (base_model, "", "") if is_folder else base_model.partition("@")
    reachable = is_folder or hub.hub_is_reachable()
    os.environ["DISABLE_SAFETENSORS_CONVERSION"] = (
        "1"  # else the library asks a service to convert pickles, and waits
    )
    try:
        with without_pickles():
            yield name, revision or None
    except InputError:
        raise
    except Exception as error:  # the library, and code that comes with a model, may raise anything
        if "trust_remote_code" in str(error):
            trust = f"{flag('trust_remote_code')} runs that code, if you trust it"
            raise InputError(f"{what} needs Python code that comes with it; {trust}") from error
        reason = " ".join(str(error).split())[:300] if reachable else "without a network, the hub cannot be reached"
        raise InputError(f"{what} cannot be loaded from safetensors: {reason}; {remedy}") from error


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
    logits = model(input_ids=tokens).logits
    if not logits.isfinite().all():
        raise InputError(f"{what}: its logits are not finite, and neither may its weights be; load or train it again")
    cap = getattr(model.config, "final_logit_softcapping", None)
    columns = torch.arange(length, device=model.device)
    quarter, half = length // 4, length // 2

    def agrees(places: torch.Tensor) -> bool:
        """Whether the first tokens, at these columns with padding in all others, have the logits from above."""
        row = torch.full_like(tokens, vocab_size)
        row[:, places] = tokens[:, : len(places)]
        hidden_states = read_tokens(model, row, vocab_size, slice(None))[:, places]
        read = model.get_output_embeddings()(hidden_states)
        read = cap * torch.tanh(read / cap) if cap else read
        return same_logits(read, logits[:, : len(places)])

    around_padding = torch.cat([columns[:quarter], columns[quarter + half :]])
    try:
        can_be_read = agrees(columns) and agrees(columns[half:]) and agrees(around_padding)
    except (TypeError, ValueError, LookupError, RuntimeError) as error:
        raise InputError(f"{what} cannot be read with an attention mask of 4 dimensions: {error}") from error
    if not can_be_read:
        raise InputError(
            f"{what} gives other logits when its tokens are read at positions that we choose, with padding between "
            f"them. Models with a recurrent state (Mamba), distances of columns (ALiBi), or a scale of the logits "
            f"are not supported, nor is a window shorter than query and response, {length} tokens; if that is it, "
            f"shorten {flag('task.query_length')} or {flag('task.response_length')}"
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
    head_file = folder / "reward_head.safetensors"
    if not head_file.is_file():
        raise InputError(
            f"{what or f'reward model {folder}'} is no reward model that was trained here: there is no {head_file}; "
            f"give models/<run>/reward, or score with any other model in a function, {flag('rewards.function')}"
        )
    return head_file


def load_head(reward_model: nn.Module, folder: Path) -> None:
    """Give a reward model or critic what is not in the classifier of its folder: head, gain, bias, and what saving
    changed in the language model.
    """
    head_file = find_head(folder)
    own_names = {"reward_head.weight", "reward_head.bias", "gain", "bias"}
    for own in (reward_model.gain, reward_model.bias, *reward_model.reward_head.parameters()):
        own.data = own.data.to(torch.promote_types(reward_model.lm_backbone.dtype, torch.float32))  # never in less
    with input_errors(f"{head_file} does not fit the model next to it", SafetensorError, RuntimeError, KeyError):
        head = load_file(head_file)
        unknown = reward_model.load_state_dict(head, strict=False).unexpected_keys
        if unknown or own_names - head.keys():
            raise KeyError(*unknown, *own_names - head.keys())


def dtype_of_weights(args: Any, *, frozen: bool) -> torch.dtype:
    """The precision of the weights of a model that a script's arguments name. frozen: whether it never learns."""
    learning = torch.float64 if args.dtype == "float64" else torch.float32
    return torch.bfloat16 if frozen and getattr(args, "frozen_bfloat16", False) else learning
