"""vLLM's side of engine.VLLM: a process with the Python of another environment, which has vLLM and not this package.

It answers what it is asked through a pipe, and ends with whoever asks, or with an error of its own. Tested with vLLM
0.32.0, on a CPU. Files and lines next to marks are those of verl-project/verl at commit b178a3c.
"""

import os
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

Answers = list[tuple[list[int], list[float]]]


def start(vocab_size: int, settings: dict[str, Any]) -> tuple[Any, str]:
    """vLLM with a model of random weights that draws ids below vocab_size; and its version."""
    # One process, so that weights are handed over as they are. On a CPU: no cores of its own, 1 GiB for keys.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    wishes = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ |= {name: value for name, value in wishes.items() if name not in os.environ}
    import torch
    import vllm

    def cut_logits(model: Any) -> None:
        """Rows of the output layer above the tokenizer's ids have no text."""
        for module in model.modules():
            if type(module).__name__ == "LogitsProcessor":
                module.org_vocab_size = vocab_size

    on_gpu = torch.cuda.is_available()
    own = {
        # [V14] Nothing of the model's own generation config.   vllm_async_server.py#L216
        "generation_config": "vllm",
        # [V15] Logits in full precision, as the learner's are: see train_policy.scaled_logits.
        "hf_overrides": {"head_dtype": "float32"},
        # [V94] Log-probs of the distribution that is sampled from.   rollout.yaml#L77
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": True,  # ids go in and come out
        "enforce_eager": not on_gpu,
        # vLLM rewinds the generator of a prompt that is read in parts; on a CPU it cannot.
        "enable_chunked_prefill": on_gpu,
        "load_format": "dummy",  # weights come by `load` alone, so that it cannot fail unseen
    }
    llm = vllm.LLM(**settings, **own)
    llm.apply_model(cut_logits)
    return llm, vllm.__version__


def load(llm: Any, weights: dict[str, Any]) -> None:
    """Put weights, numpy arrays under their names, in the place of those that are there."""
    import torch

    tensors = [(name, torch.from_numpy(array.copy())) for name, array in weights.items()]
    # vLLM has a way of its own to change weights under a running engine.
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
    llm.apply_model(pack_output_layer)
    # What the old weights made of a prompt is kept no longer.
    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM did not give up what the old weights had read")


def pack_output_layer(model: Any) -> None:
    """Pack its weights for the CPU again: tied to the embedding, it has none of its own that would be loaded."""
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead":
            module.quant_method.process_weights_after_loading(module)


def sample(llm: Any, prompts: list[list[int]], seeds: list[int], settings: dict[str, Any]) -> Answers:
    """Ids up to the first stop id, and their log-probs, of one response to each prompt with a seed of its own."""
    from vllm import SamplingParams

    # [V14] Every field that would bend the distribution is given; one that is left out takes another's default.
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "ignore_eos": True, "detokenize": False}
    # [V94] 0: of the token that was drawn, and of no others.
    params = [SamplingParams(seed=seed, logprobs=0, **neutral, **settings) for seed in seeds]
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    found = []
    for answer in answers:
        ids, logprobs = list(answer.outputs[0].token_ids), answer.outputs[0].logprobs
        found.append((ids, [one[token].logprob for token, one in zip(ids, logprobs, strict=True)]))
    return found


def leave_with(parent: int) -> None:
    """End this process when its parent has gone, even in the middle of an answer."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    """Answer, until there is nobody to ask."""
    threading.Thread(target=leave_with, args=[int(sys.argv[2])], daemon=True).start()
    pipe, llm = Connection(int(sys.argv[1])), None
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            return
        if name == "start":
            llm, answer = start(*arguments)
        else:
            answer = {"load": load, "sample": sample}[name](llm, *arguments)
        pipe.send(answer)


if __name__ == "__main__":
    main()
