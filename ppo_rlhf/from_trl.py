"""A model with a value head that TRL saved, in the form of its version 0.11.4, as a policy and a critic of ours.

    python ppo_rlhf/from_trl.py <folder> models/old    # writes models/old/policy and models/old/value

The folder is one that `AutoModelForCausalLMWithValueHead.save_pretrained` wrote: a language model with two more
tensors, `v_head.summary.weight` and `v_head.summary.bias`. Names may begin with `pretrained_model.`, as they do in a
wrapped model's own weights. Chapters 2 and 3 and loop.py have critics apart from the policy, so ours is a copy of the
language model with that head. Its values are those of TRL's model in eval mode.
"""

import copy
import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ppo_rlhf.lib import command_line, errors, files, pretrained
from ppo_rlhf.lib.errors import InputError
from ppo_rlhf.train_reward import RewardModel, save_reward_model

UNREADABLE = (OSError, SafetensorError, RuntimeError, ValueError, LookupError, TypeError, AttributeError)


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
    with errors.typed_as({"base_model": "tokenizer"}):
        tokenizer = pretrained.load_tokenizer(args.tokenizer or str(args.folder))
    info = {"kind": "critic", "base_model": str(args.folder), "vocab_size": pretrained.vocabulary_size(tokenizer)}
    pretrained.check_size(policy, str(args.folder), 0, info["vocab_size"])
    with errors.input_errors(f"{args.folder} has a critic that cannot be saved", ValueError):
        save_reward_model(args.output / "value", critic, tokenizer, info)
    policy.generation_config = pretrained.sampling_config(None, tokenizer, temperature=1.0)
    policy.save_pretrained(args.output / "policy")
    tokenizer.save_pretrained(args.output / "policy")
    print(f"policy  {args.output / 'policy'}\ncritic  {args.output / 'value'}")


def load(folder: Path) -> tuple[PreTrainedModel, RewardModel]:
    """The language model, and a critic of its own whose value is the head's, both in float32 and eval mode.

    Raises an InputError if the folder has no value head, weights that do not fit config.json, parts elsewhere, or a
    pickle with more than tensors.
    """
    with errors.input_errors(f"{folder} cannot be read as a model with a value head", *UNREADABLE):
        tensors = {name.removeprefix("pretrained_model."): tensor for name, tensor in read_tensors(folder).items()}
        head = {name: tensors.pop(f"v_head.summary.{name}", None) for name in ("weight", "bias")}
        if any(tensor is None for tensor in head.values()):
            raise OSError("it has no v_head.summary.weight and v_head.summary.bias")
        if not (folder / "config.json").is_file():
            raise OSError("it has no config.json; if it holds adapters, merge them, as docs/from_trl.md says")
        config = pretrained.read_config(str(folder), None, False, auto_class=AutoModelForCausalLM)
        shapes = [tuple(tensor.shape) for tensor in head.values()]
        if shapes != [(1, config.hidden_size), (1,)]:
            raise OSError(
                f"its v_head.summary has the shapes {shapes}, but config.json means width {config.hidden_size}"
            )
        kind = type(pretrained.without_weights(AutoModelForCausalLM, config, torch.float32, trust_remote_code=False))
        model, loading = kind.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # checked_model names them
        )
        policy = pretrained.checked_model(model, loading, {})
        unknown = sorted(loading["unexpected_keys"])
        if any(name.startswith("v_head.") for name in unknown):
            raise OSError(f"its value head has more than v_head.summary: {', '.join(unknown[:3])}")
    if unknown:  # such as masks that older versions of the library saved
        few = ", ".join(unknown[:3])
        errors.say(f"{folder}: left out, since its language model has no such tensors: {few}; {len(unknown)} in all")
    critic = RewardModel(copy.deepcopy(policy.base_model)).eval()
    critic.reward_head.load_state_dict(head)
    return policy, critic


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a model by their names: of one file, or of the parts that an index names."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return read_file(folder / name)
        if index.is_file():
            parts = sorted(set(files.read_json(index)["weight_map"].values()))
            if outside := [part for part in parts if Path(part).name != part]:
                raise OSError(f"{index.name} names {outside[0]}; all parts must be in the folder itself")
            return {name: tensor for part in parts for name, tensor in read_file(folder / part).items()}
    raise OSError("it has neither model.safetensors nor pytorch_model.bin, nor an index of their parts")


def read_file(file: Path) -> dict[str, Tensor]:
    """The tensors of one file. A pickle may hold code, so nothing but tensors is read from one."""
    if file.suffix == ".safetensors":
        return load_file(file)
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # about forms of pickles
            return torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError) as error:
        raise OSError(f"{file.name} is no pickle of tensors alone; what else is in it could be code") from error


if __name__ == "__main__":
    errors.run_script(lambda: convert(command_line.parse(Args, description=__doc__)))
