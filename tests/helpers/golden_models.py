"""The golden numbers, how ours are compared with them, and tiny GPT-2s with the weights stored there."""

import contextlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.testing import assert_close
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

from ppo_rlhf import train_policy, train_reward
from ppo_rlhf.check import cases as check

# What `python -m ppo_rlhf.check` needs is in the package.
GOLDEN = (Path(__file__).parents[1] / "golden", check.GOLDEN)
PAD = 27  # the padding id of the golden models; their vocabulary is 0..26
ACTIVATION = "gelu_new"
FLOAT32_EPS = 2**-23


def golden(name: str) -> Path:
    """The golden file of this name, such as verl/cases.json."""
    (path,) = [folder / name for folder in GOLDEN if (folder / name).is_file()]
    return path


def load_json(name: str) -> dict:
    return json.loads(golden(f"{name}.json").read_text())


def load_arrays(name: str) -> dict[str, torch.Tensor]:
    """The arrays of a file, those of real numbers in float64: what we compute from them then adds no rounding."""
    with np.load(golden(f"{name}.npz")) as file:
        arrays = {key: torch.from_numpy(file[key]) for key in file.files}
    return {key: array.double() if array.is_floating_point() else array for key, array in arrays.items()}


def under(arrays: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The arrays whose key starts with the prefix, without it."""
    return {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}


def cases(prefix: str) -> list[str]:
    """The names of the golden files <prefix><name>.npz."""
    return sorted(path.stem.removeprefix(prefix) for folder in GOLDEN for path in folder.glob(f"{prefix}*.npz"))


def golden_name(name: str) -> str:
    """`lm_backbone.transformer.h.0.ln_1.weight` gives `model/h0/ln_1/g`."""
    if name in ("gain", "bias"):
        return f"reward_norm/{name}"
    name = re.sub(r"^(value|reward)_head\.", r"heads.\1.", name)
    name = re.sub(r"^lm_backbone\.(transformer\.)?", "", name)
    name = re.sub(r"^h\.", "h", name).replace("wte.weight", "wte").replace("wpe.weight", "wpe")
    gain = "g" if "ln_" in name else "w"
    name = re.sub(r"\.weight$", f".{gain}", name)
    return "model/" + re.sub(r"\.bias$", ".b", name).replace(".", "/")


def by_parameter(model: torch.nn.Module, arrays: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The arrays under the names and in the shapes of the model's parameters: each array exactly once."""
    found = {name: arrays[golden_name(name)].reshape(p.shape) for name, p in model.named_parameters()}
    assert len(found) == len(arrays), sorted(set(arrays) - {golden_name(name) for name in found})
    return found


def load_weights(model: torch.nn.Module, arrays: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, array in by_parameter(model, arrays).items():
            model.get_parameter(name).copy_(array)


def gpt2_config(name: str) -> GPT2Config:
    sizes = {key: value for key, value in load_json("models")[name]["hparams"].items() if not key.endswith("pdrop")}
    return GPT2Config(
        vocab_size=sizes["n_vocab"],
        n_positions=sizes["n_ctx"],
        n_embd=sizes["n_embd"],
        n_layer=sizes["n_layer"],
        n_head=sizes["n_head"],
        activation_function=ACTIVATION,
        layer_norm_epsilon=1e-5,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )


def golden_policy(name: str, arrays: dict[str, torch.Tensor] | None = None) -> train_policy.PolicyWithValueHead:
    """The policy `test` or `tiny2`, with its stored weights or with others of the same shapes."""
    policy = train_policy.PolicyWithValueHead(GPT2LMHeadModel(gpt2_config(name))).double()
    load_weights(policy, load_arrays(f"weights_{name}_policy") if arrays is None else arrays)
    return policy


def golden_reward_model(name: str, arrays: dict[str, torch.Tensor] | None = None) -> train_reward.RewardModel:
    """The reward model `test` or `tiny2`, with its stored weights or with others of the same shapes."""
    reward_model = train_reward.RewardModel(GPT2Model(gpt2_config(name))).double()
    load_weights(reward_model, load_arrays(f"weights_{name}_reward") if arrays is None else arrays)
    return reward_model


def close(actual: torch.Tensor, expected: torch.Tensor, *, atol: float, rtol: float = FLOAT32_EPS, name="") -> None:
    def message(text: str) -> str:
        return f"{name} {text}"

    assert_close(actual, expected, atol=atol, rtol=rtol, check_dtype=False, msg=message)


@contextlib.contextmanager
def recorded(module, name: str) -> Iterator[list[tuple[tuple, tuple]]]:
    """Lists (arguments in their order, result) of each call of a module's function within the block."""
    function, calls = getattr(module, name), []

    def wrapper(*args, **kwargs):
        arguments = inspect.signature(function).bind(*args, **kwargs).arguments
        calls.append((tuple(arguments.values()), function(*args, **kwargs)))
        return calls[-1][1]

    setattr(module, name, wrapper)
    try:
        yield calls
    finally:
        setattr(module, name, function)


def steering_uniforms(lm_backbone, query_responses, response_length: int, pad_id: int, vocab_size: int, temperature):
    """Uniform numbers (batch, response_length) with which a sampler samples these responses."""
    before = slice(-response_length - 1, -1)
    hidden = train_policy.read_tokens(lm_backbone, query_responses, pad_id, before)
    probs = train_policy.scaled_logits(lm_backbone, hidden, vocab_size, temperature).softmax(2)
    tokens = query_responses[:, -response_length:].long().unsqueeze(2)
    return (probs.cumsum(2) - probs / 2).gather(2, tokens).squeeze(2)
