"""train_policy.py: the mathematics against numbers by hand and slow oracles; properties of models and sampling."""

import itertools
import json
import math
import shutil
import weakref
from fractions import Fraction

import numpy as np
import pytest
import torch
from oracles import gradients, numbers
from torch.testing import assert_close
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GPT2Config, StaticCache

from ppo_rlhf import train_policy, train_reward
from ppo_rlhf.lib import command_line, reward_model_files
from ppo_rlhf.lib.errors import InputError
from ppo_rlhf.lib.pretrained import read_info, same_logits
from ppo_rlhf.tldr import packing, policy as tldr_policy, responses as tldr_responses
from ppo_rlhf.tldr.models import check_model
from ppo_rlhf.train_policy import (
    AdamTensorFlowStyle,
    PolicyWithValueHead,
    PpoArgs,
    Rollout,
    TaskArgs,
    draw_permutations,
    episode_noise,
    generate,
    has_stop,
    keyed_generator,
    left_pad,
    load_pretrained,
    ppo_update,
    read_tokens,
    task_ids,
    truncate_at,
)

VOCAB = PAD = 29
ARCHITECTURES = {"gpt2": 29, "gpt_neox": 40, "llama": 29, "qwen2": 40}  # rows of the embedding; spare rows in two
QUERY, RESPONSE, TEMPERATURE = 6, 5, 0.7


def token_ids(seed: int, *shape: int) -> torch.Tensor:
    """Random tokens 1..28: token 0 is free to stand for padding."""
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def uniform(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def tiny_policy(tiny_models, architecture: str = "gpt2") -> PolicyWithValueHead:
    policy = PolicyWithValueHead(tiny_models(architecture, ARCHITECTURES[architecture]), VOCAB)
    with torch.no_grad():
        policy.value_head.weight.copy_(numbers(1, 1, 16))
        policy.value_head.bias.fill_(0.5)
    return policy


# ---- By hand: the golden numbers G1 to G9 of the original's semantics ------------------------------------------


@pytest.mark.parametrize("script", [train_policy, tldr_policy])
def test_a_horizon_with_which_the_coefficient_could_fall_to_0_is_refused(script):
    """The factor of an update is at least 1 - episodes / (5 * horizon), here in exact arithmetic."""

    def check(horizon: int, episodes: int) -> None:
        command_line.check_controller(command_line.AdaptiveKLArgs(target=6.0, horizon=horizon), episodes)

    for horizon, episodes in itertools.product(range(1, 8), range(1, 50)):
        if 1 - Fraction(episodes, 5 * horizon) > 0:
            check(horizon, episodes)
            controller = script.AdaptiveKLController(0.15, 6.0, horizon)
            controller.update(0.0, episodes)
            assert controller.value > 0
            continue
        with pytest.raises(
            InputError, match=rf"--rewards.adaptive_kl.horizon {horizon}: .* {episodes} ep"
        ) as refused:
            check(horizon, episodes)
        offer = int(str(refused.value).split("--rewards.adaptive_kl.horizon ")[2].split()[0])
        check(offer, episodes)
        with pytest.raises(InputError):  # it is the least
            check(offer - 1, episodes)
    check(10**18, 5 * 10**18 - 1)


# ---- Slow oracles ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_left_pad_equals_a_loop(dtype):
    tokens = token_ids(0, 20, 9)
    tokens = torch.where(numbers(1, 20, 9) > 0, tokens, PAD).to(dtype)
    tokens[0], tokens[1] = PAD, 3
    expected = [[t for t in row if t == PAD] + [t for t in row if t != PAD] for row in tokens.tolist()]
    padded = left_pad(tokens, PAD)
    assert padded.tolist() == expected
    assert padded.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("after", [0, 2, 5, 6])
def test_truncation_equals_a_loop(dtype, after):
    responses = torch.randint(0, 4, (200, 6), generator=torch.Generator().manual_seed(0)).to(dtype)
    expected, stopped = [], []
    for row in responses.tolist():
        stops = [i for i, token in enumerate(row) if token == 3 and i >= after]
        kept = stops[0] + 1 if stops else 6
        expected.append(row[:kept] + [PAD] * (6 - kept))
        stopped.append(bool(stops))
    truncated = truncate_at(responses, 3, after, PAD)
    assert truncated.tolist() == expected
    assert truncated.dtype == dtype
    assert has_stop(responses, 3, after).tolist() == has_stop(truncated, 3, after).tolist() == stopped


def test_no_stop_token():
    responses = token_ids(0, 3, 4)
    assert torch.equal(truncate_at(responses, None, 0, PAD), responses)
    assert has_stop(responses, None, 0).tolist() == [True] * 3


# ---- Update ----------------------------------------------------------------------------------------------------


def make_rollout(episodes: int, dtype=torch.float64) -> Rollout:
    """Random episodes with padding in the queries, and log-probs near those that a flat policy would have."""
    query_responses = token_ids(0, episodes, QUERY + RESPONSE)
    query_responses[::3, 2:4] = PAD
    query_responses[1::3, 4:QUERY] = PAD
    logprobs = -3 + 0.5 * numbers(1, episodes, RESPONSE)
    values, rewards = numbers(2, episodes, RESPONSE), numbers(3, episodes, RESPONSE)
    numbers_of = {"logprobs": logprobs.to(dtype), "values": values.to(dtype), "rewards": rewards.to(dtype)}
    return Rollout(context_responses=query_responses, **numbers_of)


def test_gradients_of_a_step_are_gone_in_the_next_pass(tiny_models):
    policy, gradients_of_steps, held = tiny_policy(tiny_models), [], []
    optimizer = AdamTensorFlowStyle(policy.parameters(), lr=1e-3)
    optimizer.register_step_post_hook(
        lambda *_: gradients_of_steps.extend(weakref.ref(p.grad) for p in policy.parameters() if p.grad is not None)
    )
    policy.register_forward_pre_hook(lambda *_: held.append(sum(ref() is not None for ref in gradients_of_steps)))
    rollout, permutations = make_rollout(8, torch.float32), draw_permutations(1, 0, 2, range(2), 4)
    ppo_update(policy, optimizer, rollout, permutations, PpoArgs(noptepochs=2), PAD, TEMPERATURE)
    assert len(gradients_of_steps) > 50 and held == [0, 0]


def test_micro_batches_give_the_same_weights_and_metrics(tiny_models):
    rollout, permutations = make_rollout(8, torch.float32), draw_permutations(1, 0, 4, range(1), 8)
    weights, metrics = [], []
    for micro_batch in (8, 4, 1):
        policy = tiny_policy(tiny_models)
        optimizer = AdamTensorFlowStyle(policy.parameters(), lr=1e-3)
        ppo = PpoArgs(whiten_groups=1, local_micro_batch_size=micro_batch)
        metrics.append(ppo_update(policy, optimizer, rollout, permutations, ppo, PAD, TEMPERATURE))
        weights.append(torch.nn.utils.parameters_to_vector(policy.parameters()).detach())
        for name in metrics[0]:
            assert_close(metrics[-1][name], metrics[0][name], atol=1e-5, rtol=1e-5)
    assert_close(weights[1], weights[0], atol=1e-6, rtol=0)
    assert_close(weights[2], weights[0], atol=1e-6, rtol=0)
    start = torch.nn.utils.parameters_to_vector(tiny_policy(tiny_models).parameters()).detach()
    assert (weights[0] - start).abs().max() > 1e-3


def test_permutations_visit_each_episode_once_and_belong_to_the_group():
    permutations = draw_permutations(1, 0, 3, range(4), 16)
    assert permutations.shape == (3, 4, 16)
    assert all(sorted(order.tolist()) == list(range(16)) for order in permutations.flatten(0, 1))
    assert len({tuple(order.tolist()) for order in permutations.flatten(0, 1)}) == 12
    assert torch.equal(draw_permutations(1, 0, 3, range(2, 4), 16), permutations[:, 2:])


# ---- Models: padding -------------------------------------------------------------------------------------------

UNPADDED = token_ids(5, 1, QUERY - 2 + RESPONSE)
PLACES = {"left": [0, 1], "inside": [1, 3], "right": [4, 5]}  # columns of the query that hold padding


def padded_at(columns: list[int]) -> torch.Tensor:
    row = UNPADDED[0].tolist()
    for column in columns:
        row.insert(column, PAD)
    return torch.tensor([row])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padding_anywhere_equals_no_padding(tiny_models, architecture):
    policy = tiny_policy(tiny_models, architecture)
    expected = policy(UNPADDED, PAD, QUERY - 2, TEMPERATURE)
    for columns in PLACES.values():
        for actual, wanted in zip(policy(padded_at(columns), PAD, QUERY, TEMPERATURE), expected, strict=True):
            assert_close(actual, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_padding_holds_does_not_matter(tiny_models, architecture):
    """Padding is looked up as token 0, which no row here contains otherwise."""
    policy = tiny_policy(tiny_models, architecture)
    reward_model = train_reward.RewardModel(policy.lm_backbone)
    tokens = torch.cat([padded_at(columns) for columns in PLACES.values()])
    with torch.no_grad():
        logprobs, entropies, values = policy(tokens, PAD, QUERY, TEMPERATURE)
        for pad_id in (1000, -1):
            other = tokens.masked_fill(tokens == PAD, pad_id)
            for actual, wanted in zip(
                policy(other, pad_id, QUERY, TEMPERATURE), (logprobs, entropies, values), strict=True
            ):
                assert torch.equal(actual, wanted)
        scores = reward_model(tokens, PAD)
        policy.lm_backbone.get_input_embeddings().weight[0] += 5.0
        assert_close(policy(tokens, PAD, QUERY, TEMPERATURE)[2], values, atol=1e-5, rtol=0)
        assert_close(reward_model(tokens, PAD), scores, atol=1e-5, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_of_padding_give_no_nan(tiny_models, architecture):
    policy = tiny_policy(tiny_models, architecture)
    tokens = torch.cat([padded_at([0, 1]), torch.full((1, QUERY + RESPONSE), PAD)])
    tokens[0, : QUERY - 1] = PAD
    outputs = policy(tokens, PAD, QUERY, TEMPERATURE)
    sum(output.sum() for output in outputs).backward()
    assert all(output.isfinite().all() for output in outputs)
    assert gradients(policy).isfinite().all()
    _, logprobs, hidden = generate(policy.lm_backbone, tokens, uniform(2, 3), PAD, VOCAB, TEMPERATURE)
    assert logprobs.isfinite().all()
    assert hidden.isfinite().all()


@pytest.mark.parametrize("script", [train_policy, train_reward])
def test_what_each_position_sees(script):
    """x: a real token; P: padding. A row is a position, a column what it may look at."""
    real = torch.tensor([[True, False, True, True], [False, False, True, True]])  # x P x x, P P x x
    seen = [
        ["x...", "xP..", "x.x.", "x.xx"],
        ["P...", ".P..", "..x.", "..xx"],
    ]
    mask = script.causal_mask(real, torch.float64)
    assert mask.shape == (2, 1, 4, 4) and mask.dtype == torch.float64
    assert (mask[:, 0] == 0).tolist() == [[[c != "." for c in row] for row in rows] for rows in seen]
    assert (mask[mask != 0] == torch.finfo(torch.float64).min).all()


def test_forward_in_train_mode_repeats_itself(tiny_models, tmp_path):
    model = tiny_models("gpt2")
    model.config.resid_pdrop = model.config.embd_pdrop = model.config.attn_pdrop = 0.5
    model.save_pretrained(tmp_path)
    policy = PolicyWithValueHead(load_pretrained(str(tmp_path), torch.float32)).train()
    first, second = (policy(UNPADDED, PAD, QUERY - 2, TEMPERATURE) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("auto_class", [AutoModelForCausalLM, AutoModel])
def test_what_is_saved_keeps_its_dropout_and_its_gelu(tiny_models, tiny_tokenizer, tmp_path, auto_class):
    """So that whoever trains it further has the base model's; a reward model's, too."""
    model = tiny_models("gpt2")
    model.config.resid_pdrop = 0.25
    model.save_pretrained(tmp_path / "base")
    loaded = load_pretrained(str(tmp_path / "base"), torch.float32, auto_class=auto_class)
    assert {module.p for module in loaded.modules() if isinstance(module, torch.nn.Dropout)} == {0.0}
    loaded.save_pretrained(tmp_path / "saved")
    reward_model_files.save_reward_model(
        tmp_path / "reward", train_reward.RewardModel(loaded.base_model), tiny_tokenizer, {}
    )
    for kind in ("base", "saved", "reward"):
        config = json.loads((tmp_path / kind / "config.json").read_text())
        settings = [config[name] for name in ("resid_pdrop", "attn_pdrop", "activation_function")]
        assert settings == [0.25, 0.0, "gelu_new"]


@pytest.mark.parametrize("auto_class", [AutoModelForCausalLM, AutoModel])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_the_embedding_of_a_padding_token_learns(tiny_models, tmp_path, architecture, auto_class):
    """The library would leave it out of the gradient. What is saved names it as before."""
    model, token = tiny_models(architecture), UNPADDED[0, 1].item()
    model.config.pad_token_id = model.generation_config.pad_token_id = token
    model.save_pretrained(tmp_path / "base")
    loaded = load_pretrained(str(tmp_path / "base"), torch.float64, auto_class=auto_class)
    hidden_states = read_tokens(loaded, UNPADDED, PAD, slice(None))
    (gradient,) = torch.autograd.grad(hidden_states[..., 0].sum(), loaded.get_input_embeddings().weight)
    assert_close(gradient.any(1), torch.isin(torch.arange(len(gradient)), UNPADDED))
    loaded.save_pretrained(tmp_path / "saved")
    for name in ("config", "generation_config")[: 2 if auto_class is AutoModelForCausalLM else 1]:
        assert json.loads((tmp_path / f"saved/{name}.json").read_text())["pad_token_id"] == token


ODD_SETTINGS = {
    "attentions": {"output_attentions": True},
    "hidden states": {"output_hidden_states": True},
    "tuples": {"return_dict": False},
    "flex attention": {"_attn_implementation": "flex_attention"},
    "padding beyond the embedding": {"pad_token_id": VOCAB},
    "padding below 0": {"pad_token_id": -1},
}


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("settings", ODD_SETTINGS.values(), ids=ODD_SETTINGS)
def test_odd_settings_of_a_base_model_do_not_keep_it_from_training(tiny_models, tmp_path, architecture, settings):
    tiny_models(architecture).save_pretrained(tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "base")
    config = tmp_path / "base/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    found = []
    for name in ("base", "plain"):
        loaded = load_pretrained(str(tmp_path / name), torch.float32)
        assert loaded.config._attn_implementation == "sdpa"  # flex attention ends the interpreter on a CPU
        check_model(loaded, name, 12, VOCAB, read_tokens)
        logprobs, _, _ = PolicyWithValueHead(loaded)(UNPADDED, PAD, QUERY - 2, TEMPERATURE)
        found.append([logprobs, *torch.autograd.grad(logprobs.sum(), [*loaded.base_model.parameters()])])
        loaded.save_pretrained(tmp_path / "saved" / name)
    assert all(torch.equal(odd, plain) for odd, plain in zip(*found, strict=True))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved/base")
    assert saved(input_ids=UNPADDED).logits.isfinite().all()


def test_gelu_of_a_loaded_gpt2_is_the_same_function(tiny_models, tmp_path):
    """In another kernel: `gelu_pytorch_tanh` in place of `gelu_new`."""
    model = tiny_models("gpt2").double()
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(str(tmp_path), torch.float64)
    assert {type(layer.mlp.act).__name__ for layer in loaded.base_model.h} == {"GELUTanh"}
    logits, expected = (lm(input_ids=UNPADDED).logits for lm in (loaded, model))
    assert_close(logits, expected, atol=1e-12, rtol=0)


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCAB}
UNSUPPORTED = {  # the library's name of an architecture, and what makes it small
    "window": ("mistral", {"intermediate_size": 32, "num_key_value_heads": 2, "sliding_window": 7}),
    "alibi": ("bloom", {}),
    "scaled logits": ("granite", {"num_key_value_heads": 2, "intermediate_size": 32, "logits_scaling": 8.0}),
    "alibi of columns": ("mpt", {"d_model": 16, "n_layers": 2, "n_heads": 2}),
    "window of columns": (
        "gpt_neo",
        {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]], "window_size": 9},
    ),
    "states of Mamba-2": (
        "mamba2",
        {"num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    ),
    "states of RWKV": ("rwkv", {}),
}


def small_model(architecture: str, extra: dict):
    """A causal language model with random weights, large enough to show what a token of another place changes."""
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(architecture, **SMALL, **extra, **tokens)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape) * (parameter.ndim > 1))
    return model.eval()


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_models_that_read_otherwise_are_refused(name):
    model = small_model(*UNSUPPORTED[name])
    message = "cannot be read with an attention mask of 4 dimensions" if name == "alibi" else "gives other logits"
    with pytest.raises(InputError, match=message):
        check_model(model, name, QUERY + RESPONSE, VOCAB, read_tokens)
    if name.startswith("window"):
        check_model(model, name, 7, VOCAB, read_tokens)


HEADS = {"intermediate_size": 32, "num_key_value_heads": 2}
SUPPORTED = {
    "gpt2": {},
    "gpt_neox": {"intermediate_size": 32},
    "gptj": {"rotary_dim": 4},
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 16},
    "falcon": {},
    "gpt_bigcode": {},
    "biogpt": {"intermediate_size": 32},
    "llama": HEADS,
    "mistral": HEADS | {"sliding_window": 11},
    "mixtral": HEADS | {"num_local_experts": 2},
    "gemma": HEADS | {"head_dim": 8},
    "gemma2": HEADS | {"head_dim": 8, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.0},
    "gemma3_text": HEADS | {"head_dim": 8},
    "phi": HEADS,
    "olmo2": HEADS,
    "qwen3": HEADS | {"head_dim": 8},
    "lfm2": HEADS,
}


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_models_that_honour_mask_and_positions_are_taken(architecture):
    model = small_model(architecture, SUPPORTED[architecture])
    for length in (1, 2, 3, QUERY + RESPONSE):
        check_model(model, architecture, length, VOCAB, read_tokens)


CAPPED = {
    "gemma2": {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.0},
    "gemma3_text": {"final_logit_softcapping": 1.0},
}


@pytest.mark.parametrize("architecture", CAPPED)
def test_soft_capped_models_have_the_librarys_logprobs(tmp_path, architecture):
    """Sampled and read again, packed or not. Only eager attention of the library caps its logits."""
    model = small_model(architecture, HEADS | {"head_dim": 8} | CAPPED[architecture])
    model.save_pretrained(tmp_path)
    own = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    contexts, uniforms = UNPADDED[:1, :QUERY].repeat(3, 1), uniform(3, 12)

    @torch.no_grad()
    def of_library(responses: torch.Tensor) -> torch.Tensor:
        logits = own(input_ids=torch.cat([contexts, responses], 1)).logits[:, QUERY - 1 : -1, :VOCAB] / TEMPERATURE
        return logits.log_softmax(2).gather(2, responses.unsqueeze(2)).squeeze(2)

    loaded = load_pretrained(str(tmp_path), torch.float32)
    for packed in (False, True):
        if packed:
            packing.enable(loaded, share_prefixes=True)
        with torch.no_grad():
            responses, sampled, _ = generate(loaded, contexts, uniforms, PAD, VOCAB, TEMPERATURE)
            again, until = tldr_responses.generate_until(loaded, contexts, uniforms, PAD, VOCAB, TEMPERATURE, {VOCAB})
            tokens = torch.cat([contexts, responses], 1)
            read, _ = tldr_responses.response_statistics(loaded, tokens, responses, PAD, TEMPERATURE, VOCAB)
        assert torch.equal(responses, again)
        for logprobs in (sampled, until, read):
            assert_close(logprobs, of_library(responses), atol=1e-5, rtol=0)
    own.config.final_logit_softcapping = None  # the control: caps matter here
    assert (sampled - of_library(responses)).abs().max() > 0.1
    loaded.save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again/config.json").read_text())
    assert {name: saved[name] for name in CAPPED[architecture]} == CAPPED[architecture]


def test_a_model_of_pictures_and_texts_is_refused(tmp_path):
    config = AutoConfig.for_model("gemma3", text_config=SMALL, vision_config={"hidden_size": 8})
    config.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="it reads more than texts; save its language model alone"):
        load_pretrained(str(tmp_path), torch.float32)


@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e3])
def test_logits_are_the_same_to_a_thousandth_of_their_spread(spread):
    logits, noise = spread * numbers(0, 1, 5, 50_000), spread * numbers(1, 1, 5, 50_000)
    assert same_logits(logits, logits) and same_logits(logits + 5e-4 * noise, logits)
    one_position = torch.arange(5).eq(3).view(1, 5, 1)
    assert not same_logits(logits + 2e-3 * noise * one_position, logits)
    assert not same_logits(logits.masked_fill(one_position, math.nan), logits)


# ---- Sampling --------------------------------------------------------------------------------------------------


def prefer(model, ids: slice | int) -> None:
    """Make a GPT-2 give these tokens a logit of about 200, whatever it reads."""
    with torch.no_grad():
        model.base_model.ln_f.weight.zero_()
        model.base_model.ln_f.bias.fill_(1.0)
        model.get_output_embeddings().weight[ids] = 200.0 / 16


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sampler_agrees_with_the_forward_pass(tiny_models, architecture):
    policy = tiny_policy(tiny_models, architecture)
    contexts = torch.cat([padded_at(columns)[:, :QUERY] for columns in PLACES.values()])
    uniforms = uniform(3, 12)
    with torch.no_grad():
        responses, sampled, hidden = generate(policy.lm_backbone, contexts, uniforms, PAD, VOCAB, TEMPERATURE)
        logprobs, _, values = policy(torch.cat([contexts, responses], 1), PAD, QUERY, TEMPERATURE)
        assert_close(sampled, logprobs, atol=1e-5, rtol=0)
        assert_close(policy.value_head(hidden).squeeze(2), values, atol=1e-5, rtol=0)


@torch.no_grad()
def bfloat16_errors(policy: PolicyWithValueHead) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs in bfloat16, less what float32 says of the same tokens: the sampler's and those of training."""
    contexts = padded_at(PLACES["inside"])[:, :QUERY].expand(64, -1)
    with torch.autocast("cpu", torch.bfloat16):
        responses, sampled, _ = generate(policy.lm_backbone, contexts, uniform(64, 12), PAD, VOCAB, TEMPERATURE)
    query_responses = torch.cat([contexts, responses], 1)
    exact, _, _ = policy(query_responses, PAD, QUERY, TEMPERATURE)
    policy.low_precision = True
    logprobs, _, _ = policy(query_responses, PAD, QUERY, TEMPERATURE)
    return sampled - exact, logprobs - exact


def size(errors: torch.Tensor) -> float:
    return errors.square().mean().sqrt().item()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sampler_agrees_with_the_forward_pass_in_bfloat16(tiny_models, architecture):
    """Both round the same arithmetic to bfloat16 at the same places, at most in other orders.

    So the sampler errs by as much as training does, and errors that have nothing to do with each other are apart by
    sqrt(2) times their size. That size: logits, below 8 here, are rounded by up to 2^-6, as is what they are made of,
    in some 16 matrix products; sqrt(16) times 2^-6 is 2^-4.
    """
    sampled, trained = bfloat16_errors(tiny_policy(tiny_models, architecture))
    assert sampled.isfinite().all()
    assert 0 < size(trained) < 2**-4
    assert size(sampled - trained) < math.sqrt(2) * size(trained)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_cache_in_eight_bits_is_told_from_one_in_bfloat16(tiny_models, architecture, monkeypatch):
    def coarse(cache, keys, *others):
        return StaticCache.update(cache, keys.to(torch.float8_e4m3fn).bfloat16(), *others)

    monkeypatch.setattr(train_policy.KeyValueCache, "update", coarse)
    sampled, trained = bfloat16_errors(tiny_policy(tiny_models, architecture))
    assert size(sampled - trained) > math.sqrt(2) * size(trained)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padding_does_not_change_the_sample(tiny_models, architecture):
    model = tiny_models(architecture, ARCHITECTURES[architecture])
    uniforms = uniform(1, 8)
    expected, wanted, _ = generate(model, UNPADDED[:, : QUERY - 2], uniforms, PAD, VOCAB, TEMPERATURE)
    for columns in PLACES.values():
        responses, logprobs, _ = generate(model, padded_at(columns)[:, :QUERY], uniforms, PAD, VOCAB, TEMPERATURE)
        assert torch.equal(responses, expected)
        assert_close(logprobs, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_eos_does_not_end_a_response(tiny_models, dtype):
    model, eos = tiny_models("gpt2"), VOCAB - 1
    prefer(model, eos)
    contexts = token_ids(0, 50, 3).to(dtype)
    responses, logprobs, _ = generate(model, contexts, uniform(50, 7), PAD, VOCAB, 1.0)
    assert responses.shape == logprobs.shape == (50, 7)
    assert responses.eq(eos).all()
    assert responses.dtype == dtype


def test_a_policy_of_a_tokenizer_with_a_hole(tiny_models, tokenizer_with_a_hole, tmp_path):
    """Its largest id, 29, can be sampled; padding, 30, cannot. What is saved says so."""
    model = tiny_models("gpt2", rows=40)
    prefer(model, slice(29, None))
    model.save_pretrained(tmp_path / "base")
    args = train_policy.Args(base_model=str(tmp_path / "base"), task=TaskArgs(query_length=4, response_length=16))
    ids = task_ids(args.task, tokenizer_with_a_hole)
    policy, _ = train_policy.load_policy_and_reference(args, ids, torch.device("cpu"))
    responses, _, _ = generate(policy.lm_backbone, token_ids(0, 20, 3), uniform(20, 7), 30, policy.vocab_size, 1.0)
    assert responses.eq(29).all()
    train_policy.save_policy(tmp_path / "policy", policy, tokenizer_with_a_hole, args)
    assert read_info(tmp_path / "policy")["vocab_size"] == 30


def test_ids_beyond_the_tokenizer_are_never_sampled(tiny_models):
    model = tiny_models("gpt2", rows=40)
    prefer(model, slice(VOCAB, None))
    uniforms = torch.cat([uniform(199, 7), torch.full((1, 7), 1 - 2**-24)])
    contexts = token_ids(0, 200, 3)
    responses, logprobs, _ = generate(model, contexts, uniforms, PAD, VOCAB, 1.0)
    assert 0 <= responses.min() <= responses.max() < VOCAB
    assert responses.unique().numel() > 10
    expected = model(contexts).logits[:, -1, :VOCAB].log_softmax(1).gather(1, responses[:, :1])
    assert_close(logprobs[:, :1], expected, atol=1e-5, rtol=0)


class GivenLogits(torch.nn.Module):
    """A language model that predicts the same for every token, with an output layer that is the identity."""

    def __init__(self, logits: torch.Tensor):
        super().__init__()
        output = type("Output", (), {"last_hidden_state": logits.view(1, 1, -1)})
        self.config, self.dtype = GPT2Config(n_layer=1), torch.float32
        self.base_model = lambda **inputs: output
        self.get_output_embeddings = lambda: torch.nn.Identity()


def test_a_token_without_probability_is_not_sampled():
    logits = torch.full((VOCAB,), -1e4)
    logits[5] = 0.0
    context = torch.zeros(1, 1, dtype=torch.long)
    for uniforms in (torch.zeros(1, 1), torch.full((1, 1), 1 - 2**-53, dtype=torch.float64)):
        responses, _, _ = generate(GivenLogits(logits), context, uniforms, PAD, VOCAB, 1.0)
        assert responses.item() == 5


def test_every_token_of_a_large_vocabulary_can_be_drawn():
    """Also those with a probability below the resolution of float32 near 1, some 6e-8."""
    logits = 2 * torch.randn(50_257, generator=torch.Generator().manual_seed(0))
    probs = torch.log_softmax(logits / 0.7, dim=0).double().exp().numpy()
    assert (probs < 1e-8).sum() > 5_000
    middles = (np.cumsum(probs) - probs / 2) / probs.sum()
    tokens, context = list(range(0, 50_257, 97)), torch.zeros(1, 1, dtype=torch.long)
    drawn = [
        generate(GivenLogits(logits), context, u.view(1, 1), 50_257, 50_257, 0.7)[0].item()
        for u in torch.from_numpy(middles[tokens])
    ]
    assert drawn == tokens and (probs[tokens] < 1e-8).sum() > 50


@pytest.mark.parametrize("script", [train_policy, train_reward])
def test_frequencies_of_sampled_tokens(tiny_models, script):
    """Chi-square of 1e5 draws against softmax(logits / temperature); 28 degrees of freedom, 1e-4 beyond 65."""
    draws, context, model = 100_000, torch.tensor([[3]]), tiny_models("gpt2")
    uniforms = torch.rand(draws, 1, generator=keyed_generator("chi-square", 0))
    responses, _, _ = script.generate(model, context.expand(draws, -1), uniforms, PAD, VOCAB, 1.5)
    counts = np.bincount(responses[:, 0].numpy(), minlength=VOCAB)

    def chi_square(temperature: float) -> float:
        logits = model(context).logits[0, -1].detach().double().numpy() / temperature
        expected = draws * np.exp(logits) / np.exp(logits).sum()
        assert expected.min() > 5
        return ((counts - expected) ** 2 / expected).sum()

    assert chi_square(1.5) < 65
    assert chi_square(1.4) > 65


def test_noise_belongs_to_the_episode():
    noise = episode_noise(1, 0, 16, 5)
    assert torch.equal(noise, episode_noise(1, 0, 16, 5))
    assert 0 <= noise.min() <= noise.max() < 1
    others = [episode_noise(2, 0, 16, 5), episode_noise(1, 1, 16, 5)]
    assert not any(torch.equal(noise, other) for other in others)


def test_keyed_generators_repeat_and_differ():
    keys = [
        (1, "policy", 0),
        (1, "policy", 1),
        (2, "policy", 0),
        (1, "policy", "0"),
        (1, "policy"),
        (12, "policy", 0),
    ]
    first, second = (
        [tuple(torch.rand(4, generator=keyed_generator(*key)).tolist()) for key in keys] for _ in range(2)
    )
    assert first == second
    assert len(set(first)) == len(keys)
