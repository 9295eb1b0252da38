"""The built-in sampler of rlvr/asynchronous.py, in a process of its own: a Ray actor.

It is sent weights, prompts and noise as numpy arrays and answers with ids and log-probs, as vllm_sampler.py does. The
class `Sampler` of rlvr/policy.py, with which the learner asks, is something else.
"""

from collections.abc import Mapping

import numpy as np
import torch

from ppo_rlhf.rlvr import arguments as rlvr_arguments, problems
from ppo_rlhf.tldr import models, packing
from ppo_rlhf.tldr.responses import generate_until
from ppo_rlhf.train_policy import float64_device
from ppo_rlhf.train_reward import prepare

Weights = Mapping[str, np.ndarray]  # the policy's parameters that learn, under their names


class TorchSampler:
    """Samples as the synchronous script does: the same numbers, bit for bit, from the same rows at a time."""

    def __init__(self, args: rlvr_arguments.Args, ids: problems.TaskIds, threads: int):
        """threads: of PyTorch on a CPU. With another number, sums are rounded otherwise."""
        torch.set_num_threads(threads)
        self.device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        self.args, self.ids, self.version = args, ids, -1
        self.model = models.load_base_model(args).to(self.device)
        packing.enable(self.model)
        prepare(self.model, args)
        if args.lora.rank:
            models.add_adapters(self.model, args.lora, args.seed)
        self.model.to(self.device)

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        parameters = {name: x for name, x in self.model.named_parameters() if x.requires_grad}
        sent = {(name, array.shape) for name, array in weights.items()}
        # A name that is missing or unknown is an error, not a warning: the old weights would sample on.
        if odd := sent ^ {(name, tuple(parameter.shape)) for name, parameter in parameters.items()}:
            raise RuntimeError(f"the weights that were sent are not the model's: see {min(odd)}")
        for name, parameter in parameters.items():
            parameter.copy_(torch.tensor(weights[name]))

    def sample(
        self, weights: Weights, version: int, prompts: np.ndarray, n: int, noise: np.ndarray, temperature: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """n responses to each prompt (rows / n, context_length), one after the other, and their log-probs.

        version: of the weights, which are loaded if the last call had others. So a call that was lost with its
        process can be made again in a new one. noise: (rows, response_length) uniform numbers in [0, 1), one for each
        token: they settle what is drawn. Returns (rows, response_length) twice, with padding and 0 after the stop id.
        The ids are those that were drawn, never read back from text.
        """
        if version != self.version:
            self.load(weights)
            self.version = version
        contexts = torch.tensor(prompts).repeat_interleave(n, 0).to(self.device)
        uniforms = torch.tensor(noise).to(float64_device(self.device))
        responses, logprobs = generate_until(
            self.model,
            contexts,
            uniforms,
            pad_id=self.ids.pad,
            vocab_size=self.ids.vocab_size,
            temperature=temperature,
            stop_ids=self.ids.stops,
        )
        return responses.cpu().numpy(), logprobs.cpu().numpy()
