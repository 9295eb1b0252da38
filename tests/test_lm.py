"""tldr/responses.py beyond what chapter 1 has too: sampling that ends where the responses end."""

import pytest
import torch
from test_policy_math import PAD, VOCAB, prefer, token_ids
from torch.testing import assert_close

from ppo_rlhf import train_policy
from ppo_rlhf.tldr import responses as tldr_responses

ARCHITECTURES = ("gpt2", "gpt_neox", "llama", "qwen2")


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_logits_are_in_full_precision_in_a_bfloat16_run(tiny_models, weights, biased):
    """Those of weights that are in bfloat16 themselves, too."""
    model = tiny_models("gpt_neox").to(weights)
    layer = model.get_output_embeddings()
    if biased:
        layer.bias = torch.nn.Parameter(torch.linspace(-3, 3, VOCAB).to(weights))
    hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = train_policy.scaled_logits(model, hidden, VOCAB - 1, 0.7)
    expected = hidden.double().numpy() @ layer.weight.detach().double().numpy().T
    expected = (expected + (layer.bias.detach().double().numpy() if biased else 0))[:, : VOCAB - 1] / 0.7
    assert_close(logits, torch.from_numpy(expected).float(), atol=1e-5, rtol=1e-5)


def contexts_and_noise(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    contexts = token_ids(5, rows, 6)
    contexts[1, :4] = contexts[2, 3:] = contexts[3, 2:4] = PAD
    generator = torch.Generator().manual_seed(1)
    return contexts, torch.rand(rows, length, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("stop_ids", [{3}, {3, 7, 11, 20}, set(), set(range(VOCAB))])
def test_tokens_and_logprobs_are_those_of_generate_up_to_the_first_stop(tiny_models, architecture, stop_ids):
    model = tiny_models(architecture).double()
    contexts, uniforms = contexts_and_noise(12, 45)
    sampling = (contexts, uniforms, PAD, VOCAB, 8.0)  # so that every id is drawn now and then
    expected, wanted, _ = train_policy.generate(model, *sampling)
    responses, logprobs = tldr_responses.generate_until(model, *sampling, stop_ids)
    lengths = [next((i + 1 for i, token in enumerate(row) if token in stop_ids), 45) for row in expected.tolist()]
    assert stop_ids != {3, 7, 11, 20} or len(set(lengths)) > 3
    for row, length in enumerate(lengths):
        assert responses[row].tolist() == expected[row, :length].tolist() + [PAD] * (45 - length)
        assert_close(logprobs[row, :length], wanted[row, :length], atol=1e-12, rtol=0)
        assert (logprobs[row, length:] == 0).all()
    assert responses.dtype == contexts.dtype


def test_sampling_ends_with_the_last_response_and_rows_that_ended_leave(tiny_models, monkeypatch):
    model = tiny_models("gpt2").double()
    prefer(model, slice(9, 11))  # ids 9 and 10, about as often
    rows_of_steps, forward = [], model.base_model.forward

    def counted(input_ids, **options):
        rows_of_steps.append(len(input_ids))
        return forward(input_ids=input_ids, **options)

    monkeypatch.setattr(model.base_model, "forward", counted)
    contexts, uniforms = contexts_and_noise(16, 64)
    uniforms[:12] = 0.99
    uniforms[:12, 2] = uniforms[12:15, 10] = uniforms[15, 20] = 0.01  # the step in which each ends
    uniforms[12:15, :10] = uniforms[15, :20] = 0.99
    responses, _ = tldr_responses.generate_until(model, contexts, uniforms, PAD, VOCAB, 1.0, {9})
    assert (responses != PAD).sum(1).tolist() == [3] * 12 + [11] * 3 + [21]
    assert rows_of_steps == [16] * 4 + [4] * 8 + [1] * 12


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_attention_reads_no_room_for_later_tokens(tiny_models, monkeypatch, architecture):
    """Keys and values of 6 columns of context and of the tokens so far, though there is room for 20."""
    model, seen = tiny_models(architecture).double(), []
    attend = torch.nn.functional.scaled_dot_product_attention

    def counted(query, key, value, *more, **options):
        seen.append((key.shape[2], value.shape[2]))
        return attend(query, key, value, *more, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    contexts, uniforms = contexts_and_noise(12, 20)
    tldr_responses.generate_until(model, contexts, uniforms, PAD, VOCAB, 8.0, set())
    layers = model.config.num_hidden_layers
    assert seen[-19 * layers :] == [(6 + n, 6 + n) for n in range(1, 20) for _ in range(layers)]
    assert all(each <= (6, 6) for each in seen[: -19 * layers])
