"""Samplers that live apart from the learner: they get weights with a version, and say with which they have sampled.

    load(weights, version)                              weights: the policy's parameters that learn, under their names
    sample(prompts, n, noise, temperature, version)     -> Sampled: ids, log-probs, finished, versions
    describe()                                          what must be the same wherever the policy is

All that goes in and out are numpy arrays, numbers and texts. An engine knows nothing of how it is called from afar.

Files and lines next to marks are those of verl-project/verl at commit b178a3c.
"""

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ppo_rlhf.lib.base import checkpoints, precision, processes
from ppo_rlhf.lib.base.errors import InputError, flag
from ppo_rlhf.lib.nets import pretrained
from ppo_rlhf.rlvr import problems
from ppo_rlhf.tldr import models, packing
from ppo_rlhf.tldr.responses import generate_until
from ppo_rlhf.train_policy import scaled_logits

Weights = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The facts about the policy that an engine needs."""

    base_model: str  # that the policy started from: a folder that every machine sees, or a name on the hub
    dtype: str  # as the argument of the training scripts
    pad: int  # one above the largest id that can be sampled
    stops: tuple[int, ...]
    trust_remote_code: bool = False
    lora: models.LoraArgs = field(default_factory=models.LoraArgs)
    seed: int = 1
    threads: int = 1  # of PyTorch on a CPU: with another number, sums are rounded otherwise
    # Of vLLM alone: the interpreter of its environment, and the most tokens of a prompt with its response.
    vllm_python: str = ""
    length: int = 0


class Sampled(NamedTuple):
    """Responses, n to each prompt one after the other."""

    # The ids are those that were drawn, never read back from text.
    responses: np.ndarray  # (rows, response_length), padding after the stop id
    logprobs: np.ndarray  # (rows, response_length), with which the tokens were drawn; 0 after the stop id
    finished: np.ndarray  # (rows,) bool, whether it ended with a stop id
    versions: np.ndarray  # (rows, 2), of the weights that drew the first token, and the last


class BuiltIn:
    """Samples as the synchronous script does: the same numbers, bit for bit, from the same rows at a time."""

    def __init__(self, spec: Spec):
        torch.set_num_threads(spec.threads)
        self.device = processes.default_device()
        self.spec, self.version = spec, -1
        self.model = models.load_base_model(spec)
        packing.enable(self.model)
        if spec.lora.rank:
            models.add_adapters(self.model, spec.lora, spec.seed)
        self.model.to(self.device)

    def describe(self) -> dict[str, str]:
        return description()

    @torch.no_grad()
    def load(self, weights: Weights, version: int) -> None:
        """Take these weights for what is sampled from now on. version: updates that they have seen."""
        parameters = checkpoints.trained_parameters(self.model)
        check_names(weights, parameters)
        for name, parameter in parameters.items():
            parameter.copy_(torch.tensor(weights[name]))
        self.version = version

    def sample(self, prompts: np.ndarray, n: int, noise: np.ndarray, temperature: float, version: int) -> Sampled:
        """n responses to each prompt (rows / n, context_length), which may be padded.

        noise: (rows, response_length) uniform numbers in [0, 1), one for each token: they settle what is drawn.
        """
        check_version(version, self.version)
        spec, contexts = self.spec, torch.tensor(prompts).repeat_interleave(n, 0).to(self.device)
        uniforms = torch.tensor(noise).to(processes.device_of_noise(self.device))
        with precision.mixed_precision(self.device, enabled=spec.dtype == "bfloat16"):
            responses, logprobs = generate_until(
                self.model, contexts, uniforms, spec.pad, spec.pad, temperature, spec.stops
            )
        finished = torch.isin(responses.cpu(), torch.tensor(spec.stops)).any(1)
        # Weights change between calls alone, so the first version is the last.
        versions = np.full((len(responses), 2), version)
        found = {"responses": responses.cpu(), "logprobs": logprobs.cpu(), "finished": finished}
        return Sampled(**{name: tensor.numpy() for name, tensor in found.items()}, versions=versions)


class Lost(RuntimeError):
    """An engine was ended from outside. Another may do what it had to do."""


class VLLM:
    """Samples with vLLM, in a process of its own with the Python of another environment: see engine_vllm.py.

    It draws from the same distribution, but not the same responses: a response's noise only gives its seed. And what
    vLLM has read before may change how it rounds, so a run is not repeated bit for bit.
    """

    def __init__(self, spec: Spec):
        self.spec, self.version = spec, -1
        with pretrained.model_errors(spec.base_model) as (path, revision):
            config = {"model": path, "revision": revision, "trust_remote_code": spec.trust_remote_code}
        self.pipe, theirs = Pipe()
        script, descriptor = Path(__file__).with_name("engine_vllm.py"), theirs.fileno()
        command = [spec.vllm_python, str(script), str(descriptor), str(os.getpid())]
        environment = os.environ | {"OMP_NUM_THREADS": str(spec.threads)}
        self.words = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        try:
            self.process = subprocess.Popen(
                command, pass_fds=[descriptor], env=environment, stdout=self.words, stderr=self.words
            )
        except OSError as error:
            raise InputError(f"{flag('vllm_python')} {spec.vllm_python}: {error.strerror}") from error
        theirs.close()
        settings = config | {"dtype": spec.dtype, "seed": spec.seed, "max_model_len": spec.length}
        self.vllm_version = self.ask("start", spec.pad, settings)
        self.check()

    @torch.no_grad()
    def check(self) -> None:
        """Refuse a vLLM that does not take weights as they are, or says other log-probs than those of a response."""
        torch.set_num_threads(self.spec.threads)
        model = models.load_base_model(self.spec).eval()
        self.parameters = {name: parameter.to("meta") for name, parameter in model.named_parameters()}
        # [V94] One prompt is sampled by weights that no file has, and read by a forward pass of ours.
        for parameter in model.parameters():
            parameter.mul_(1.05)
        self.load({name: parameter.float().numpy() for name, parameter in model.named_parameters()}, 0)
        width = max(1, self.spec.length // 2)
        prompt, noise = np.arange(width)[None] % self.spec.pad, np.random.default_rng(0).random((4, min(width, 8)))
        found, gaps = self.sample(prompt, 4, noise, 0.7, 0), []
        for ids, theirs in zip(found.responses, found.logprobs, strict=True):
            drawn = torch.tensor(ids[ids != self.spec.pad])
            with precision.mixed_precision(torch.device("cpu"), enabled=self.spec.dtype == "bfloat16"):
                read = model.base_model(torch.cat([torch.tensor(prompt[0]), drawn])[None])
                logits = scaled_logits(model, read.last_hidden_state[0, width - 1 : -1], self.spec.pad, 0.7)
            ours = logits.log_softmax(1).gather(1, drawn[:, None])[:, 0]
            gaps.append((ours - torch.tensor(theirs[: len(drawn)])).abs())
        check_gap(torch.cat(gaps).mean().item(), self.spec.dtype)
        self.version = -1

    def ask(self, *question: Any) -> Any:
        """The answer of the other process. Raises Lost if it was killed, an InputError if it has ended by itself."""
        try:
            self.pipe.send(question)
            return self.pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            if self.process.wait() < 0:
                raise Lost(f"vLLM was ended by signal {-self.process.returncode}") from error
            self.words.seek(0)
            lines = [line.strip() for line in self.words if line.strip()] or [f"status {self.process.returncode}"]
            said = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]+(Error|Exception|Exit): ", line)]
            last = (said or lines)[-1]
            raise InputError(f"{flag('vllm_python')} {self.spec.vllm_python}: vLLM has ended: {last}") from error

    def describe(self) -> dict[str, str]:
        return description() | {"vllm": self.vllm_version}

    def load(self, weights: Weights, version: int) -> None:
        """As BuiltIn's."""
        check_names(weights, self.parameters)
        self.ask("load", {name: np.asarray(array) for name, array in weights.items()})
        self.version = version

    def sample(self, prompts: np.ndarray, n: int, noise: np.ndarray, temperature: float, version: int) -> Sampled:
        """As BuiltIn's; noise gives each response its seed."""
        check_version(version, self.version)
        spec, rows = self.spec, prompts.repeat(n, 0)
        # The seed is the episode's own, so a piece that was lost is asked for again with the same.
        seeds = [int.from_bytes(hashlib.sha256(row.tobytes()).digest()[:7]) for row in noise]
        # vLLM takes any other temperature below 0.01 for 0.01.
        settings = {"temperature": 0.0 if temperature <= problems.GREEDY else temperature}
        settings |= {"max_tokens": noise.shape[1], "stop_token_ids": list(spec.stops)}
        answers = self.ask("sample", [row[row != spec.pad].tolist() for row in rows], seeds, settings)
        responses, logprobs = np.full(noise.shape, spec.pad), np.zeros(noise.shape, np.float32)
        for row, (ids, theirs) in enumerate(answers):
            if len(ids) < noise.shape[1] and not {*ids[-1:]} & {*spec.stops}:
                raise RuntimeError(f"vLLM has cut a response after {len(ids)} of {noise.shape[1]} tokens")
            responses[row, : len(ids)], logprobs[row, : len(ids)] = ids, theirs
        # Weights change between calls alone, as above.
        versions = np.full((len(rows), 2), version)
        finished = np.isin(responses, spec.stops).any(1)
        return Sampled(responses=responses, logprobs=logprobs, finished=finished, versions=versions)


def check_gap(gap: float, dtype: str) -> None:
    """Refuse an engine whose log-probs are not ours, although the weights are the same. gap: the mean, in nats."""
    # [V94] In bfloat16 the mean is 0.02 for the small world's model, and single tokens are much further off.
    limit = 0.05 if dtype == "bfloat16" else 1e-3
    if not gap <= limit:
        raise InputError(
            f"a sampler with the learner's weights computes other log-probs than the learner: they differ by "
            f"{gap:.2g} nats on average, and {limit:g} is the limit"
        )


def check_version(asked: int, loaded: int) -> None:
    if asked != loaded:
        raise RuntimeError(f"version {asked} of the weights is asked for, but version {loaded} is loaded")


def check_names(weights: Weights, parameters: Mapping[str, Tensor]) -> None:
    """Refuse weights that are not those of the model, by name and shape."""
    # A name that is missing or unknown is an error, not a warning: the old weights would sample on.
    if odd := sorted(set(weights) ^ set(parameters)):
        where = "unexpected" if odd[0] in weights else "missing"
        raise RuntimeError(f"of the weights that were sent, {odd[0]} is {where} ({len(odd)} such names)")
    if odd := [name for name, parameter in parameters.items() if weights[name].shape != tuple(parameter.shape)]:
        raise RuntimeError(f"{odd[0]} was sent in the shape {weights[odd[0]].shape}, not {parameters[odd[0]].shape}")


def description() -> dict[str, str]:
    """Facts that must be the same wherever a policy is computed; and, under `place`, where this process is."""
    package, digest = Path(__file__).parents[2], hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes())
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    return {"ppo_rlhf": digest.hexdigest()[:12], **versions, "place": f"{platform.node()}, process {os.getpid()}"}
