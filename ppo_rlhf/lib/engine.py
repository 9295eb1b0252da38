"""Samplers that live apart from the learner: they get weights with a version, and say with which they have sampled.

    load(weights, version)                              weights: the policy's parameters that learn, under their names
    sample(prompts, n, noise, temperature, version)     -> Sampled: ids, log-probs, finished, versions
    describe()                                          what must be the same wherever the policy is

All that goes in and out are numpy arrays, numbers and texts. An engine knows nothing of how it is called from afar.

Files and lines beside marks are those of volcengine/verl at commit b178a3c.
"""

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from ppo_rlhf.lib import lm, models, precision, processes, run

Weights = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Spec:
    """What an engine must know of the policy."""

    base_model: str  # that the policy started from: a folder that every machine sees, or a name on the hub
    dtype: str  # as the argument of the training scripts
    pad: int  # one above the largest id that can be sampled
    stops: tuple[int, ...]
    trust_remote_code: bool = False
    lora: models.LoraArgs = field(default_factory=models.LoraArgs)
    seed: int = 1
    threads: int = 1  # of PyTorch on a CPU: with another number, sums are rounded otherwise


class Sampled(NamedTuple):
    """Responses, n to each prompt one after the other."""

    # [V93] Ids as they were drawn, never read back from text; their log-probs; whether it ended; whose it is.
    responses: np.ndarray  # (rows, response_length), padding after the stop id
    logprobs: np.ndarray  # (rows, response_length), with which the tokens were drawn; 0 after the stop id
    finished: np.ndarray  # (rows,) bool, whether it ended with a stop id
    versions: np.ndarray  # (rows, 2), of the weights that drew the first token, and the last


class BuiltIn:
    """Samples as the synchronous script does: the same numbers, bit for bit, from the same rows at a time."""

    def __init__(self, spec: Spec):
        torch.set_num_threads(spec.threads)
        if not torch.cuda.is_available():
            processes.keep_freed_memory()
        self.spec, self.version = spec, -1
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = models.load_base_model(spec)
        if spec.lora.rank:
            models.add_adapters(self.model, spec.lora, spec.seed)
        self.model.to(self.device)

    def describe(self) -> dict[str, str]:
        return description()

    @torch.no_grad()
    def load(self, weights: Weights, version: int) -> None:
        """Take these weights for what is sampled from now on. version: updates that they have seen."""
        parameters = run.trained_parameters(self.model)
        check_names(weights, parameters)
        for name, parameter in parameters.items():
            parameter.copy_(torch.tensor(weights[name]))
        self.version = version

    def sample(self, prompts: np.ndarray, n: int, noise: np.ndarray, temperature: float, version: int) -> Sampled:
        """n responses to each prompt (rows / n, context_length), which may be padded.

        noise: (rows, response_length) uniform numbers in [0, 1), one for each token: they settle what is drawn.
        """
        if version != self.version:
            raise RuntimeError(f"version {version} of the weights is asked for, but version {self.version} is loaded")
        ids, spec = (torch.tensor(prompts).repeat_interleave(n, 0), torch.tensor(noise)), self.spec
        contexts, uniforms = (tensor.to(self.device) for tensor in ids)
        with precision.mixed_precision(self.device, enabled=spec.dtype == "bfloat16"):
            responses, logprobs = lm.generate_until(
                self.model, contexts, uniforms, spec.pad, spec.pad, temperature, spec.stops
            )
        finished = torch.isin(responses.cpu(), torch.tensor(spec.stops)).any(1)
        # [V91] Weights change between calls alone, so the first version is the last.
        versions = np.full((len(responses), 2), version)
        return Sampled(responses.cpu().numpy(), logprobs.cpu().numpy(), finished.numpy(), versions)


def check_names(weights: Weights, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse weights that are not those of the model, by name and shape."""
    # [V92] A name that is missing or unknown is an error, not a warning: the old weights would sample on.
    if odd := sorted(set(weights) ^ set(parameters)):
        where = "unexpected" if odd[0] in weights else "missing"
        raise RuntimeError(f"of the weights that were sent, {odd[0]} is {where} ({len(odd)} such names)")
    if odd := [name for name, parameter in parameters.items() if weights[name].shape != tuple(parameter.shape)]:
        raise RuntimeError(f"{odd[0]} was sent in the shape {weights[odd[0]].shape}, not {parameters[odd[0]].shape}")


def description() -> dict[str, str]:
    """What must be the same wherever a policy is computed; and, under `place`, where this process is."""
    package, digest = Path(__file__).parent.parent, hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes())
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    return {"ppo_rlhf": digest.hexdigest()[:12], **versions, "place": f"{platform.node()}, process {os.getpid()}"}
