"""A model with a value head that TRL saved, in the form of its version 0.11.4, as a policy and a critic of ours.

    python ppo_rlhf/from_trl.py <folder> models/old    # writes models/old/policy and models/old/value

The folder is one that `AutoModelForCausalLMWithValueHead.save_pretrained` wrote: a language model with two more
tensors, `v_head.summary.weight` and `v_head.summary.bias`. Names may begin with `pretrained_model.`, as they do in a
wrapped model's own weights. Chapters 2 and 3 and loop.py have critics apart from the policy, so ours is a copy of the
language model with that head. Its values are those of TRL's model in eval mode.
"""

import copy
import json
import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ppo_rlhf.tldr import models
from ppo_rlhf.train_policy import InputError, input_errors, run_script, sampling_config, vocabulary_size
from ppo_rlhf.train_reward import RewardModel, save_reward_model


@dataclass(frozen=True, kw_only=True)
class Args:
    folder: tyro.conf.Positional[Path]
    """what TRL saved"""
    output: tyro.conf.Positional[Path]
    """a new folder, which gets `policy`, for --base_model, and `value`, for --rewards.value_model"""
    tokenizer: str = ""
    """folder or name on the hub of a model with the same tokenizer; empty: it is in the folder"""


def convert(args: Args) -> None:
    """Write a policy and a critic. Raises an InputError before anything is written."""
    if args.output.exists():
        raise InputError(f"{args.output} is there already; name a new folder")
    policy, critic = load(args.folder)
    with models.named("tokenizer"):
        tokenizer = models.load_tokenizer(args.tokenizer or str(args.folder))
    vocab_size, rows = vocabulary_size(tokenizer), policy.get_input_embeddings().num_embeddings
    if rows < vocab_size:
        raise InputError(f"{args.folder} has an embedding of {rows} rows for a tokenizer of {vocab_size}")
    info = {"kind": "critic", "base_model": str(args.folder), "vocab_size": vocab_size}
    with input_errors(f"{args.folder} has a critic that cannot be saved"):
        save_reward_model(args.output / "value", critic, tokenizer, info)
    ends = getattr(tokenizer, "generation_config", policy.generation_config)
    policy.generation_config = sampling_config(ends, tokenizer, temperature=1.0)
    policy.save_pretrained(args.output / "policy")
    tokenizer.save_pretrained(args.output / "policy")
    print(f"policy  {args.output / 'policy'}\ncritic  {args.output / 'value'}")


def load(folder: Path) -> tuple[PreTrainedModel, RewardModel]:
    """The language model, and a critic of its own whose value is the head's, both in float32 and eval mode.

    Raises an InputError if the folder has no value head, weights that do not fit config.json, or a pickle with more
    than tensors.
    """
    with input_errors(f"{folder} cannot be read as a model with a value head"):
        if not (folder / "config.json").is_file():
            raise ValueError("it has no config.json; if it holds adapters, merge them, as docs/from_trl.md says")
        tensors = {name.removeprefix("pretrained_model."): tensor for name, tensor in read_tensors(folder).items()}
        head = {name: tensors.pop(f"v_head.summary.{name}") for name in ("weight", "bias")}
        if more := [name for name in tensors if name.startswith("v_head.")]:
            raise ValueError(f"its value head has more than v_head.summary: {more[0]}")
        # A name that config.json gives its attention could be code from the hub.
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, attn_implementation="eager")
        with torch.device("meta"):
            kind = type(AutoModelForCausalLM.from_config(config, trust_remote_code=False))
        policy, loading = kind.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the library would not say which
        )
        if wrong := [*sorted(loading["missing_keys"]), *sorted(loading["mismatched_keys"])]:
            raise ValueError(f"its weights are not those that config.json means: {wrong[0]}")
        critic = RewardModel(copy.deepcopy(policy.base_model)).eval()
        critic.reward_head.load_state_dict(head)
    if unknown := sorted(loading["unexpected_keys"]):  # such as masks, which older versions of the library saved
        few = ", ".join(unknown[:3])
        print(f"{folder}: left out, since its language model has no such tensors: {few}; {len(unknown)} in all")
    return policy, critic


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a model by their names: of one file, or of the parts that an index names."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return read_file(folder / name)
        if index.is_file():
            parts = set(json.loads(index.read_text())["weight_map"].values())
            if elsewhere := [part for part in parts if Path(part).name != part]:
                raise ValueError(f"{index.name} names {elsewhere[0]}, which is outside of the folder")
            return {name: tensor for part in parts for name, tensor in read_file(folder / part).items()}
    raise ValueError("it has neither model.safetensors nor pytorch_model.bin, nor an index of their parts")


def read_file(file: Path) -> dict[str, Tensor]:
    """The tensors of one file. A pickle may hold code, so nothing but tensors is read from one."""
    if file.suffix == ".safetensors":
        return load_file(file)
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # about forms of pickles
            return torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{file.name} is no pickle of tensors alone; what else is in it could be code") from error


if __name__ == "__main__":
    run_script(lambda: convert(tyro.cli(Args, description=__doc__)))
