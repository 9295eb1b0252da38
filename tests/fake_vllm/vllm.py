"""Answers as vLLM does to what vllm_sampler.py asks of it, by PyTorch, one token at a time and without a cache.

As vLLM, it bends the distribution where a setting is left out: see LLM.
"""

from types import SimpleNamespace

import torch
from transformers import AutoConfig, AutoModelForCausalLM


class SamplingParams:
    def __init__(self, *, seed, temperature, max_tokens, stop_token_ids, logprobs, detokenize, ignore_eos):
        assert temperature == 0 or temperature >= 0.01
        self.seed, self.temperature, self.max_tokens, self.stops = seed, temperature, max_tokens, stop_token_ids
        assert logprobs == 0 and not detokenize and ignore_eos


class LogitsProcessor:
    org_vocab_size = 10**9


class ParallelLMHead:
    """Computes with a packed copy of its weights, which a reload leaves as it was."""

    def __init__(self, layer):
        self.layer, self.quant_method = layer, self

    def process_weights_after_loading(self, layer):
        self.packed = self.layer.weight.detach().clone()


class LLM:
    def __init__(self, *, model, revision, dtype, seed, trust_remote_code, skip_tokenizer_init, enforce_eager, **own):
        assert dtype == "float32" and skip_tokenizer_init and enforce_eager and revision is None
        assert own["enable_chunked_prefill"] is False and own["load_format"] == "dummy"
        assert own["hf_overrides"] == {"head_dtype": "float32"}
        self.bent = own.get("generation_config") != "vllm"
        self.raw = own.get("logprobs_mode") != "processed_logprobs"
        self.length = own["max_model_len"]
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float32).eval()
        self.head, self.processor = ParallelLMHead(self.model.lm_head), LogitsProcessor()
        self.head.process_weights_after_loading(None)

    def collective_rpc(self, name, kwargs):
        assert name == "reload_weights"
        self.model.load_state_dict(dict(kwargs["weights_iterator"]), strict=False)

    def modules(self):
        return [self.head, self.processor]

    def apply_model(self, function):
        return [function(self)]

    def reset_prefix_cache(self):
        return True

    @torch.no_grad()
    def generate(self, prompts, params, use_tqdm):
        return [self.answer(prompt["prompt_token_ids"], one) for prompt, one in zip(prompts, params, strict=True)]

    def answer(self, ids, params):
        generator, found, logprobs = torch.Generator().manual_seed(params.seed), [], []
        while len(found) < params.max_tokens and not (found and found[-1] in params.stops):
            hidden = self.model.base_model(torch.tensor([ids + found])).last_hidden_state[0, -1]
            logits = (self.head.packed @ hidden)[: self.processor.org_vocab_size] * (1.3 if self.bent else 1)
            assert len(ids) + len(found) < self.length
            processed = (logits / max(params.temperature, 1e-9)).log_softmax(0)
            likeliest = params.temperature == 0
            token = int(logits.argmax() if likeliest else torch.multinomial(processed.exp(), 1, generator=generator))
            found.append(token)
            logprobs.append(
                {token: SimpleNamespace(logprob=float((logits.log_softmax(0) if self.raw else processed)[token]))}
            )
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=found, logprobs=logprobs)])
