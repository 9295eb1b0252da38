"""vLLM as the sampler of rlvr/asynchronous.py, in a Ray actor. It needs vLLM in the same environment.

Tested with vLLM 0.32.0, on a CPU. Files and lines next to marks are those of verl-project/verl at commit b178a3c.
"""

import os
from typing import Any

import numpy as np
import torch

from ppo_rlhf.rlvr import arguments as rlvr_arguments, problems, samplers
from ppo_rlhf.train_policy import model_errors


class VLLMSampler:
    """Draws from the same distribution as TorchSampler, but not the same responses.

    A response's noise only gives its seed. And what vLLM has read before may change how it rounds, so a run is not
    repeated bit for bit.
    """

    def __init__(self, args: rlvr_arguments.Args, ids: problems.TaskIds, threads: int):
        torch.set_num_threads(threads)
        # One process, so that weights are handed over as they are. On a CPU: no cores of its own, 1 GiB for keys.
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        import vllm

        self.vllm, self.ids, self.version = vllm, ids, -1
        on_gpu = torch.cuda.is_available()
        with model_errors(args.base_model) as place:
            path, revision = place
        self.llm = vllm.LLM(
            model=path,
            revision=revision,
            trust_remote_code=args.trust_remote_code,
            dtype=args.dtype,
            seed=args.seed,
            max_model_len=args.task.prompt_length + args.task.response_length,
            # [V14] Nothing of the model's own generation config.   vllm_async_server.py#L216
            generation_config="vllm",
            # [V15] Logits in full precision, as the learner's are: see train_policy.scaled_logits.
            hf_overrides={"head_dtype": "float32"},
            # [V94] Log-probs of the distribution that is sampled from.   rollout.yaml#L77
            logprobs_mode="processed_logprobs",
            skip_tokenizer_init=True,  # ids go in and come out
            enforce_eager=not on_gpu,
            # vLLM rewinds the generator of a prompt that is read in parts; on a CPU it cannot.
            enable_chunked_prefill=on_gpu,
            load_format="dummy",  # weights come by `load` alone, so that it cannot fail unseen
        )
        self.llm.apply_model(self.cut_logits)

    def cut_logits(self, model: Any) -> None:
        """Rows of the output layer above the tokenizer's ids have no text."""
        for module in model.modules():
            if type(module).__name__ == "LogitsProcessor":
                module.org_vocab_size = self.ids.vocab_size

    def load(self, weights: samplers.Weights) -> None:
        tensors = [(name, torch.tensor(array)) for name, array in weights.items()]
        # vLLM has a way of its own to change weights under a running engine.
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
        self.llm.apply_model(pack_output_layer)
        # What the old weights made of a prompt is kept no longer.
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not give up what the old weights had read")

    def sample(
        self,
        weights: samplers.Weights,
        version: int,
        prompts: np.ndarray,
        n: int,
        noise: np.ndarray,
        temperature: float,
    ) -> tuple[np.ndarray, np.ndarray]:
        """As TorchSampler's; noise gives each response its seed."""
        if version != self.version:
            self.load(weights)
            self.version = version
        rows = [row[row != self.ids.pad].tolist() for row in prompts.repeat(n, 0)]
        params = [
            self.vllm.SamplingParams(
                seed=int(uniforms[0] * 2**53),  # the episode's own: what was lost is asked for again with the same
                # vLLM takes any other temperature below 0.01 for 0.01.
                temperature=0.0 if temperature <= problems.GREEDY else temperature,
                max_tokens=noise.shape[1],
                stop_token_ids=list(self.ids.stops),
                ignore_eos=True,
                logprobs=0,  # [V94] of the token that was drawn, and of no others
                detokenize=False,
            )
            for uniforms in noise
        ]
        answers = self.llm.generate([{"prompt_token_ids": row} for row in rows], params, use_tqdm=False)
        responses, logprobs = np.full(noise.shape, self.ids.pad), np.zeros(noise.shape, np.float32)
        for row, answer in enumerate(answers):
            drawn = answer.outputs[0]
            ids = list(drawn.token_ids)
            responses[row, : len(ids)] = ids
            logprobs[row, : len(ids)] = [
                of_place[token].logprob for token, of_place in zip(ids, drawn.logprobs, strict=True)
            ]
        return responses, logprobs


def pack_output_layer(model: Any) -> None:
    """Pack its weights for the CPU again: tied to the embedding, it has none of its own that would be loaded."""
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead":
            module.quant_method.process_weights_after_loading(module)
