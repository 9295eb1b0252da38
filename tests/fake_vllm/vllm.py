"""Answers as vLLM does to what engine_vllm.py asks of it, by PyTorch, one token at a time and without a cache.

As vLLM, it bends the distribution where a setting is left out: see LLM and SamplingParams.
"""

import os

import torch
from transformers import AutoModelForCausalLM

__version__ = "0.0.fake"


class SamplingParams:
    def __init__(self, *, seed, temperature, max_tokens, stop_token_ids, logprobs, detokenize, **other):
        self.seed, self.temperature, self.max_tokens, self.stops = seed, temperature, max_tokens, stop_token_ids
        self.allowed = other.pop("allowed_token_ids", None)
        assert logprobs == 0 and not detokenize and other.pop("ignore_eos")
        neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        assert other == neutral | {"presence_penalty": 0.0, "frequency_penalty": 0.0}


class Said:
    def __init__(self, **what):
        vars(self).update(what)


class LLM:
    def __init__(self, *, model, revision, dtype, seed, trust_remote_code, skip_tokenizer_init, enforce_eager, **own):
        assert dtype == "float32" and skip_tokenizer_init and enforce_eager and revision is None
        if os.environ.get("FAKE_VLLM") == "leaves at once":
            raise MemoryError("there is no room\nfor keys and values")
        self.bent = own.get("generation_config") != "vllm" or os.environ.get("FAKE_VLLM") == "bends"
        self.raw = own.get("logprobs_mode") != "processed_logprobs"
        assert own["enable_chunked_prefill"] is False
        self.model, self.packed = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), 0

    def collective_rpc(self, name, kwargs):
        assert name == "reload_weights"
        self.model.load_state_dict(dict(kwargs["weights_iterator"]), strict=False)

    def apply_model(self, function):
        return [function(self.model)]

    def reset_prefix_cache(self):
        return os.environ.get("FAKE_VLLM") != "remembers"

    @torch.no_grad()
    def generate(self, prompts, params, use_tqdm):
        return [self.answer(prompt["prompt_token_ids"], one) for prompt, one in zip(prompts, params, strict=True)]

    def answer(self, ids, params):
        generator, found, logprobs = torch.Generator().manual_seed(params.seed), [], []
        while len(found) < params.max_tokens and not (found and found[-1] in params.stops):
            logits = self.model(torch.tensor([ids + found])).logits[0, -1] * (1.3 if self.bent else 1)
            if params.allowed is not None:
                logits[[i for i in range(len(logits)) if i not in params.allowed]] = -torch.inf
            processed = (logits / params.temperature).log_softmax(0)
            token = int(torch.multinomial(processed.exp(), 1, generator=generator))
            found.append(token)
            logprobs.append({token: Said(logprob=float((logits.log_softmax(0) if self.raw else processed)[token]))})
        return Said(outputs=[Said(token_ids=found, logprobs=logprobs)])
