"""Answers as vLLM does to what vllm_sampler.py asks of it, by PyTorch, one token at a time and without a cache."""

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


# Without the last two, vLLM would bend the distribution by the model's generation_config.json, and would give
# log-probs of another temperature.
NEEDED = {
    "revision": None,
    "dtype": "float32",
    "hf_overrides": {"head_dtype": "float32"},
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "enable_chunked_prefill": False,
    "generation_config": "vllm",
    "logprobs_mode": "processed_logprobs",
}


class LLM:
    def __init__(self, *, model, max_model_len, **settings):
        assert settings.items() >= NEEDED.items()
        self.length = max_model_len
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
            logits = (self.head.packed @ hidden)[: self.processor.org_vocab_size]
            assert len(ids) + len(found) < self.length
            scaled = (logits / max(params.temperature, 1e-9)).log_softmax(0)
            drawn = torch.multinomial(scaled.exp(), 1, generator=generator) if params.temperature else logits.argmax()
            found.append(int(drawn))
            logprobs.append({found[-1]: SimpleNamespace(logprob=float(scaled[found[-1]]))})
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=found, logprobs=logprobs)])
