"""train_policy.py: properties of models, sampling and updates that golden numbers (test_golden.py) don't see."""

import json
import math
from functools import partial

import pytest
import torch
from oracles import gradients, numbers
from small_models import ARCHITECTURES, PAD, VOCAB, token_ids
from torch.testing import assert_close
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GPT2Config

from ppo_rlhf.tldr import responses as tldr_responses
from ppo_rlhf.train_policy import (
    AdamTensorFlowStyle,
    AdaptiveKLArgs,
    Args,
    InputError,
    PolicyWithValueHead,
    PpoArgs,
    RewardsArgs,
    Rollout,
    check_model,
    draw_permutations,
    episode_noise,
    generate,
    keyed_generator,
    load_pretrained,
    ppo_sizes,
    ppo_update,
    read_tokens,
)

QUERY, RESPONSE, TEMPERATURE = 6, 5, 0.7


def uniform(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def tiny_policy(tiny_models, architecture: str = "gpt2") -> PolicyWithValueHead:
    policy = PolicyWithValueHead(tiny_models(architecture, ARCHITECTURES[architecture]), VOCAB)
    with torch.no_grad():
        policy.value_head.weight.copy_(numbers(1, 1, 16))
        policy.value_head.bias.fill_(0.5)
    return policy


# ---- Functions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("least", [2, 101, 10**18 + 3])
def test_a_horizon_with_which_the_coefficient_could_fall_to_0_is_refused(least):
    """And the least one that will do is offered. The least factor of an update is 1 - episodes / (5 * horizon)."""

    def check(horizon: int) -> None:
        rewards = RewardsArgs(adaptive_kl=AdaptiveKLArgs(target=6.0, horizon=horizon))
        ppo = PpoArgs(batch_size=5 * (least - 1), whiten_groups=1, whiten_rewards=False)
        ppo_sizes(Args(rewards=rewards, ppo=ppo), 1)

    check(least)
    with pytest.raises(InputError, match=f"--rewards.adaptive_kl.horizon {least - 1}: .* {least} would do"):
        check(least - 1)


# ---- Update ----------------------------------------------------------------------------------------------------


def test_gradients_of_a_step_are_gone_in_the_next_pass(tiny_models):
    policy, held = tiny_policy(tiny_models), []
    zeros = dict.fromkeys(("logprobs", "values", "rewards"), torch.zeros(8, RESPONSE))
    rollout = Rollout(context_responses=token_ids(0, 8, QUERY + RESPONSE), **zeros)
    optimizer = AdamTensorFlowStyle(policy.parameters(), lr=1e-3)
    policy.register_forward_pre_hook(lambda *_: held.append(sum(p.grad is not None for p in policy.parameters())))
    permutations = draw_permutations(1, 0, 2, range(2), 4)
    ppo_update(policy, optimizer, rollout, permutations, PpoArgs(noptepochs=2), PAD, TEMPERATURE)
    assert held == [0, 0]


def test_permutations_visit_each_episode_once_and_belong_to_the_group():
    permutations = draw_permutations(1, 0, 3, range(4), 16)
    orders = permutations.view(12, 16)
    assert (orders.sort(1).values == torch.arange(16)).all() and len(orders.unique(dim=0)) == 12
    assert torch.equal(draw_permutations(1, 0, 3, range(2, 4), 16), permutations[:, 2:])


# ---- Models: padding -------------------------------------------------------------------------------------------

UNPADDED = token_ids(5, 1, QUERY - 2 + RESPONSE)
PLACES = {"left": [0, 1], "inside": [1, 3], "right": [4, 5]}  # columns of the query that hold padding


def padded_at(columns: list[int]) -> torch.Tensor:
    row = UNPADDED[0].tolist()
    for column in columns:
        row.insert(column, PAD)
    return torch.tensor([row])


PADDED = torch.cat([padded_at(columns) for columns in PLACES.values()])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_of_padding_give_no_nan(tiny_models, architecture):
    policy = tiny_policy(tiny_models, architecture)
    tokens = torch.full((2, QUERY + RESPONSE), PAD)
    tokens[0, QUERY - 1 :] = 1
    outputs = policy(tokens, PAD, QUERY, TEMPERATURE)
    sum(output.sum() for output in outputs).backward()
    sampled = generate(policy.lm_backbone, tokens, uniform(2, 3), PAD, VOCAB, TEMPERATURE)
    assert all(tensor.isfinite().all() for tensor in (*outputs, gradients(policy), *sampled))


# ---- Models: what is loaded ------------------------------------------------------------------------------------


def config_of(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("auto_class", [AutoModelForCausalLM, AutoModel])
def test_dropout_and_gelu_change_where_a_model_is_loaded_and_not_where_it_is_saved(tiny_models, tmp_path, auto_class):
    """No dropout, and another kernel of the same function. Whoever trains what is saved has the base model's."""
    model = tiny_models("gpt2").double()
    model.config.resid_pdrop = 0.25
    model.save_pretrained(tmp_path / "base")
    loaded = load_pretrained(str(tmp_path / "base"), torch.float64, auto_class=auto_class)
    assert not any(module.training for module in loaded.modules())
    assert {type(layer.mlp.act).__name__ for layer in loaded.base_model.h} == {"GELUTanh"}
    found, expected = (lm.base_model(input_ids=UNPADDED).last_hidden_state for lm in (loaded, model))
    assert_close(found, expected, atol=1e-12, rtol=0)
    loaded.save_pretrained(tmp_path / "saved")
    config = config_of(tmp_path / "saved")
    assert [config[name] for name in ("resid_pdrop", "attn_pdrop", "activation_function")] == [0.25, 0.0, "gelu_new"]


def test_the_embedding_of_a_padding_token_learns(tiny_models, tmp_path):
    """The library would leave it out of the gradient. What is saved names it as before."""
    model, token = tiny_models("llama"), UNPADDED[0, 1].item()
    model.config.pad_token_id = model.generation_config.pad_token_id = token
    model.save_pretrained(tmp_path / "base")
    loaded = load_pretrained(str(tmp_path / "base"), torch.float64)
    hidden_states = read_tokens(loaded, UNPADDED, PAD, slice(None))
    (gradient,) = torch.autograd.grad(hidden_states[..., 0].sum(), loaded.get_input_embeddings().weight)
    assert_close(gradient.any(1), torch.isin(torch.arange(len(gradient)), UNPADDED))
    loaded.save_pretrained(tmp_path / "saved")
    generation = json.loads((tmp_path / "saved/generation_config.json").read_text())
    assert config_of(tmp_path / "saved")["pad_token_id"] == generation["pad_token_id"] == token


@pytest.mark.parametrize("settings", [{"output_hidden_states": True}, {"pad_token_id": -1}], ids=str)
def test_odd_settings_of_a_base_model_do_not_keep_it_from_training(tiny_models, tmp_path, settings):
    model, found = tiny_models("llama"), []
    for name, of_config in (("plain", {}), ("odd", settings)):
        model.save_pretrained(tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps(config_of(tmp_path / name) | of_config))
        loaded = load_pretrained(str(tmp_path / name), torch.float32)
        check_model(loaded, name, 12, VOCAB)
        logprobs, _, _ = PolicyWithValueHead(loaded)(UNPADDED, PAD, QUERY - 2, TEMPERATURE)
        found.append([logprobs, *torch.autograd.grad(logprobs.sum(), [*loaded.base_model.parameters()])])
        loaded.save_pretrained(tmp_path / "saved")
    assert_close(*found, atol=0, rtol=0)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved")(input_ids=UNPADDED).logits.isfinite().all()


@pytest.mark.parametrize("settings", [{"return_dict": False}, {"pad_token_id": VOCAB}], ids=str)
def test_settings_that_no_model_can_have_are_refused(tiny_models, tmp_path, settings):
    """Also where a library only asserts something, or finds no attribute."""
    tiny_models("llama").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_of(tmp_path) | settings))
    with pytest.raises(InputError, match="--base_model"):
        check_model(load_pretrained(str(tmp_path), torch.float32), str(tmp_path), 12, VOCAB)


def small_model(architecture: str, **sizes):
    """A causal language model with random weights, large enough to show what a token of another place changes."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCAB} | sizes
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(architecture, **sizes, **tokens)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape) * (parameter.ndim > 1))
    return model.eval()


HEADS = {"intermediate_size": 32, "num_key_value_heads": 2}
STATES = {"num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8}


@pytest.mark.parametrize(
    ("architecture", "sizes", "message"),
    [
        ("mistral", HEADS | {"sliding_window": 7}, "gives other logits"),
        ("bloom", {}, "cannot be read with an attention mask of 4 dimensions"),
        ("mpt", {"d_model": 16, "n_layers": 2, "n_heads": 2}, "gives other logits"),  # its positions are columns
        ("granite", HEADS | {"logits_scaling": 8.0}, "gives other logits"),
        ("mamba2", STATES, "gives other logits"),
        ("gpt2", {"layer_norm_epsilon": math.nan}, "its logits are not finite"),
    ],
)
def test_models_that_read_otherwise_are_refused(architecture, sizes, message):
    model = small_model(architecture, **sizes)
    with pytest.raises(InputError, match=message):
        check_model(model, architecture, QUERY + RESPONSE, VOCAB)
    if "sliding_window" in sizes:  # where no row is longer
        check_model(model, architecture, 7, VOCAB)


@pytest.mark.parametrize("cap", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_models_that_cap_their_logits_are_refused(cap, tmp_path):
    caps = dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping")) | {cap: 30.0}
    small_model("gemma2", **HEADS, head_dim=8, **caps).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="caps its logits"):
        load_pretrained(str(tmp_path), torch.float32)


SUPPORTED = {
    "gptj": {"rotary_dim": 4},
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 16},
    "falcon": {},
    "mistral": HEADS | {"sliding_window": 11},
    "lfm2": HEADS,
}


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_models_that_honour_mask_and_positions_are_taken(architecture):
    model = small_model(architecture, **SUPPORTED[architecture])
    for length in (1, 2, 3, QUERY + RESPONSE):
        check_model(model, architecture, length, VOCAB)


def test_log_probs_are_the_librarys(tiny_models):
    """Sampled and read again."""
    model, contexts = tiny_models("llama"), UNPADDED[:1, :QUERY].repeat(3, 1)
    with torch.no_grad():
        responses, sampled = generate(model, contexts, uniform(3, 12), PAD, VOCAB, TEMPERATURE)
        tokens = torch.cat([contexts, responses], 1)
        read, _ = tldr_responses.response_statistics(model, tokens, responses, PAD, TEMPERATURE, VOCAB)
        logits = model(input_ids=tokens).logits[:, QUERY - 1 : -1]
    expected = (logits / TEMPERATURE).log_softmax(2).gather(2, responses.unsqueeze(2)).squeeze(2)
    for found in (sampled, read):
        assert_close(found, expected, atol=1e-5, rtol=0)


# ---- Sampling --------------------------------------------------------------------------------------------------


def prefer(model, ids: slice | int) -> None:
    """Make a GPT-2 give these tokens a logit of about 200, whatever it reads."""
    with torch.no_grad():
        model.base_model.ln_f.weight.zero_()
        model.base_model.ln_f.bias.fill_(1.0)
        model.get_output_embeddings().weight[ids] = 200.0 / 16


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sampler_agrees_with_the_forward_pass_whatever_the_padding(tiny_models, architecture):
    """Padding anywhere equals no padding."""
    policy, uniforms = tiny_policy(tiny_models, architecture), uniform(1, 12).expand(3, -1)
    contexts, unpadded = PADDED[:, :QUERY], UNPADDED[:, : QUERY - 2]
    with torch.no_grad():
        responses, sampled = generate(policy.lm_backbone, contexts, uniforms, PAD, VOCAB, TEMPERATURE)
        logprobs, _, values = policy(torch.cat([contexts, responses], 1), PAD, QUERY, TEMPERATURE)
        alone, _ = generate(policy.lm_backbone, unpadded, uniforms[:1], PAD, VOCAB, TEMPERATURE)
        read_alone, _, values_alone = policy(torch.cat([unpadded, alone], 1), PAD, QUERY - 2, TEMPERATURE)
    assert torch.equal(responses, alone.expand(3, -1))
    for each in (sampled, logprobs):
        assert_close(each, read_alone.expand(3, -1), atol=1e-5, rtol=0)
    assert_close(values, values_alone.expand(3, -1), atol=1e-5, rtol=0)


def test_eos_does_not_end_a_response(tiny_models):
    model, eos = tiny_models("gpt2"), VOCAB - 1
    prefer(model, eos)
    responses, _ = generate(model, token_ids(0, 2, 3), uniform(2, 7), PAD, VOCAB, 1.0)
    assert responses.tolist() == [[eos] * 7] * 2


@pytest.mark.parametrize("sample", [generate, partial(tldr_responses.generate_until, stop_ids=())])
def test_ids_beyond_the_tokenizer_are_never_sampled(tiny_models, sample):
    model = tiny_models("gpt2", rows=40)
    prefer(model, slice(VOCAB, None))
    uniforms = torch.cat([uniform(199, 7), torch.full((1, 7), 1 - 2**-24)])
    contexts = token_ids(0, 200, 3)
    responses, logprobs, *_ = sample(model, contexts, uniforms, PAD, VOCAB, 1.0)
    assert 0 <= responses.min() <= responses.max() < VOCAB
    assert responses.unique().numel() > 10
    expected = model(contexts).logits[:, -1, :VOCAB].log_softmax(1).gather(1, responses[:, :1])
    assert_close(logprobs[:, :1], expected, atol=1e-5, rtol=0)


def sampled_from(logits: torch.Tensor, uniforms: torch.Tensor, temperature: float) -> list[int]:
    """The tokens that `generate` samples, one for each number, from a model that predicts the same for every text."""
    model, output_layer = torch.nn.Module(), torch.nn.Linear(1, len(logits), bias=False)
    output_layer.weight.data = logits.unsqueeze(1)
    output = type("Output", (), {"last_hidden_state": torch.ones(len(uniforms), 1, 1)})
    model.config, model.dtype = GPT2Config(n_layer=1), torch.float32
    model.base_model = lambda **inputs: output
    model.get_output_embeddings = lambda: output_layer
    contexts, vocab_size = torch.zeros(len(uniforms), 1, dtype=torch.long), len(logits)
    return generate(model, contexts, uniforms.unsqueeze(1), vocab_size, vocab_size, temperature)[0][:, 0].tolist()


def test_a_token_without_probability_is_not_sampled():
    logits = torch.full((VOCAB,), -1e4)
    logits[5] = 0.0
    assert sampled_from(logits, torch.tensor([0, 1 - 2**-53], dtype=torch.float64), 1.0) == [5, 5]


def test_every_token_of_a_large_vocabulary_can_be_drawn():
    """Also those with a probability below the resolution of float32 near 1, some 6e-8."""
    logits = 2 * torch.randn(50_257, generator=torch.Generator().manual_seed(0))
    probs = torch.log_softmax(logits / 0.7, dim=0).double().exp()
    middles = (probs.cumsum(0) - probs / 2) / probs.sum()
    tokens = torch.arange(0, 50_257, 97)
    assert (probs[tokens] < 1e-8).sum() > 50
    assert sampled_from(logits, middles[tokens], 0.7) == tokens.tolist()


def test_noise_belongs_to_the_episode():
    """It depends on seed and update alone, as all noise does on the key of its generator."""
    noise = episode_noise(1, 0, 16, 5)
    assert torch.equal(noise, episode_noise(1, 0, 16, 5)) and 0 <= noise.min() <= noise.max() < 1
    assert not any(torch.equal(noise, episode_noise(*key, 16, 5)) for key in ((2, 0), (1, 1)))
    keys = [(1, "policy", 0), (1, "policy", "0"), (12, "policy", 0), (1, "2policy", 0)]
    assert len({torch.rand((), generator=keyed_generator(*key)).item() for key in keys}) == len(keys)
