"""How models read rows: in passes of similar length, packed, what they begin with once, and until responses end.

Whatever is saved, hidden states and gradients are those of each row alone, as the library reads it; and the tokens
that are read are counted. Golden numbers of whole updates have rows of different lengths.
"""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import VOCAB
from oracles import gradients, numbers
from runs import error_line
from torch.testing import assert_close
from transformers import PreTrainedModel

from ppo_rlhf import train_policy
from ppo_rlhf.sample import without_padding
from ppo_rlhf.tldr import models, packing, responses as tldr_responses
from ppo_rlhf.train_reward import prepare

PAD = VOCAB
CONTEXT, RESPONSE = 6, 7


@pytest.fixture
def any_width(monkeypatch):
    monkeypatch.setattr(packing, "LEAST_WIDTH", 1)


def drawn(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(1, 26, (rows, columns), generator=torch.Generator().manual_seed(0))


def ragged() -> torch.Tensor:
    """Padding before, inside and behind; a row of padding alone, and a full one."""
    tokens = drawn(12, 20)
    for row in range(12):
        tokens[row, : row % 7] = tokens[row, 20 - row * 5 % 8 :] = PAD
    tokens[::3, 8:10], tokens[5] = PAD, PAD
    tokens[0] = 1
    return tokens


def grouped() -> torch.Tensor:
    """Two prompts of 6 and 3 tokens, four responses to each; the third is empty. Two responses begin alike for 2
    tokens, and two are the same from the fourth token on, which must not be shared.
    """
    tokens = drawn(8, CONTEXT + RESPONSE)
    tokens[:, :CONTEXT] = tokens[[0] * 4 + [4] * 4, :CONTEXT]
    tokens[4:, :3] = PAD
    tokens[1, CONTEXT : CONTEXT + 2] = tokens[0, CONTEXT : CONTEXT + 2]
    tokens[7, CONTEXT + 3 :] = tokens[5, CONTEXT + 3 :]
    for row, length in enumerate([7, 3, 0, 5, 2, 7, 4, 6]):
        tokens[row, CONTEXT + length :] = PAD
    return tokens


class Read:
    """Counts the tokens that a model reads, padding included."""

    def __init__(self, model: torch.nn.Module):
        self.tokens = 0
        model.get_input_embeddings().register_forward_pre_hook(self.count)

    def count(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self.tokens += inputs[0].numel()


def least(tokens: torch.Tensor, *, shares: bool = False) -> int:
    """What has to be read: real tokens, what is in the last column, and one token for all other padding."""
    rows = torch.cat([tokens[:, :-1], tokens[:, -1:].where(tokens[:, -1:] != PAD, 0)], dim=1)
    beginnings = [tuple(row[: end + 1]) for row in without_padding(rows, PAD) for end in range(len(row))]
    return len(set(beginnings) if shares else beginnings) + 1


def read_alone(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Hidden states of each row, read by the library, and 0 at padding."""
    found = torch.zeros(*tokens.shape, model.config.hidden_size, dtype=model.dtype)
    for row, real in enumerate(tokens != PAD):
        if real.any():
            found[row, real] = model.base_model(input_ids=tokens[row, real].unsqueeze(0)).last_hidden_state[0]
    return found


def read(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    return train_policy.read_tokens(model, tokens, PAD, slice(None)) * (tokens != PAD).unsqueeze(2)


# ---- The plan --------------------------------------------------------------------------------------------------

LENGTHS = torch.tensor([7, 3, 9, 9, 1, 4, 12, 2, 7, 5])
MODEL = torch.nn.Linear(1, 1)


@pytest.mark.parametrize(("cost", "sizes"), [(0, [1, 2, 2, 1, 1, 1, 1, 1]), (4, [2, 3, 3, 2]), (math.inf, [10])])
def test_a_pass_ends_where_padding_costs_more_than_another(cost, sizes, monkeypatch):
    """Of 12, 9, 9, 7, 7, 5, 4, 3, 2 and 1 tokens. With 4, a third row would make the padding 3 + 3."""
    monkeypatch.setitem(packing.COST_OF_PASS, "cpu", cost)
    plan = packing.plan_passes(LENGTHS, MODEL)
    assert [len(one.rows) for one in plan] == sizes
    assert torch.cat([one.rows for one in plan]).tolist() == LENGTHS.argsort(descending=True, stable=True).tolist()
    of_four = packing.plan_passes(LENGTHS, MODEL, rows=4)
    assert max(len(one.rows) for one in of_four) == min(4, max(sizes))
    assert all(one.longest == LENGTHS[one.rows].max() for one in of_four)


def test_groups_stay_together_in_small_passes(tiny_models):
    model, tokens = tiny_models("gpt2"), grouped()
    lengths = packing.count_tokens(tokens, PAD)
    assert packing.find_shared(model, tokens, tokens != PAD) is None
    packing.enable(model, share_prefixes=True)
    for rows, sizes in ((0, [8]), (4, [4, 4]), (3, [3, 3, 2])):
        passes = list(packing.micro_batches(model, lengths, tokens, torch.arange(8), pad_id=PAD, rows=rows))
        assert [len(own) for _, own in passes] == sizes
        order = torch.cat([own for _, own in passes]).tolist()
        assert sorted(map(sorted, (order[:4], order[4:]))) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        for packed, own in passes:
            assert without_padding(packed, PAD) == without_padding(tokens[own], PAD)
    different = tokens[[0, 4]]
    assert packing.find_shared(model, different, different != PAD) is None  # there is nothing to share


# ---- Reading ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [ragged, grouped])
@pytest.mark.parametrize(("cost", "checkpointing"), [(0, False), (7, True), (10**6, False)])
@pytest.mark.parametrize("architecture", packing.TRIED)
def test_it_reads_the_same(tiny_models, monkeypatch, architecture, cost, checkpointing, rows):
    """Wide models read no padding, narrow ones read what rows share once. cost: of a group, in tokens."""
    shares = rows is grouped
    monkeypatch.setattr(packing, "LEAST_WIDTH", 512 if shares else 1)
    monkeypatch.setitem(packing.COST_OF_GROUP, "cpu", cost)
    model, tokens = tiny_models(architecture).double(), rows()
    weights = numbers(3, *tokens.shape, model.config.hidden_size)
    expected = read_alone(model, tokens)
    (expected * weights).sum().backward()
    wanted = gradients(model)
    model.zero_grad()
    packing.enable(model, share_prefixes=shares)
    assert packing.is_packed(model) != shares
    if checkpointing:
        prepare(model, SimpleNamespace(gradient_checkpointing=True, dtype="float64"))
    counted = Read(model)
    found = read(model, tokens)
    (found * weights).sum().backward()
    assert counted.tokens == least(tokens, shares=shares) < 0.8 * tokens.numel()
    # Norms of Llama and Qwen compute in float32, whatever the weights are.
    tolerance = 1e-11 if architecture in ("gpt2", "gpt_neox") else 1e-4
    assert_close(found, expected.detach(), atol=tolerance, rtol=tolerance)
    assert_close(gradients(model), wanted, atol=10 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("share_prefixes", [False, True])
def test_adapters_read_the_same(tiny_models, any_width, share_prefixes):
    model, tokens = tiny_models("llama").double(), grouped()
    before = read_alone(model, tokens)
    packing.enable(model, share_prefixes=share_prefixes)
    adapters = models.add_adapters(model, models.LoraArgs(rank=4, target_modules="all-linear"), 1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    counted = Read(model)
    found = read(model, tokens)
    assert counted.tokens == least(tokens, shares=share_prefixes)
    assert (found - before).abs().max() > 0.1
    with adapters.disable_adapter():
        assert_close(read(model, tokens), before, atol=1e-4, rtol=1e-4)
    assert_close(found, read_alone(model, tokens), atol=1e-4, rtol=1e-4)


def test_what_is_packed(tiny_models, any_width, monkeypatch):
    refused = [tiny_models("gpt2") for _ in range(4)]
    refused[0].set_attn_implementation("eager")
    refused[1].config.model_type = "another"
    refused[2].__class__ = type("Own", (type(refused[2]),), {"__module__": "modeling_own"})
    packing.enable(*refused[:3])
    monkeypatch.setattr(packing, "LEAST_WIDTH", refused[3].config.hidden_size + 1)
    packing.enable(refused[3])
    assert not any(map(packing.is_packed, refused))


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_loaded_models_are_packed_where_a_script_asks_for_it(tiny_models, tmp_path, any_width, architecture):
    """Also their layers, which have another configuration than the model; the one that is saved does not change."""
    tiny_models(architecture).save_pretrained(tmp_path / "model")
    loaded, tokens = train_policy.load_pretrained(str(tmp_path / "model"), torch.float32), ragged()
    assert not packing.is_packed(loaded)
    for _ in range(2):
        packing.enable(loaded)  # once more changes nothing
    counted = Read(loaded)
    assert_close(read(loaded, tokens), read_alone(loaded, tokens), atol=1e-4, rtol=1e-4)
    assert counted.tokens == least(tokens) + (tokens != PAD).sum()
    loaded.save_pretrained(tmp_path / "again")
    first, again = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("model", "again"))
    assert first == again


def test_other_calls_reach_the_library(tiny_models, any_width):
    """A mask of another kind, and whatever else is asked for."""
    model, tokens = tiny_models("llama").double(), ragged()[[3, 3]]
    mask, length = train_policy.causal_mask(tokens != PAD, torch.float64), tokens.shape[1]
    ids, positions = tokens.masked_fill(tokens == PAD, 0), torch.arange(length).expand_as(tokens)
    arguments = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, "use_cache": False}
    calls = {
        "one row of positions": {"position_ids": positions[:1]},
        "a cache of the library's own": {"use_cache": True},
        "no mask": {"attention_mask": None},
        "two dimensions": {"attention_mask": (tokens != PAD).long()},
        "one for all rows": {"attention_mask": mask[:1]},
        "more": {"output_hidden_states": True},
    }
    answers = {name: model.base_model(**arguments | call) for name, call in calls.items()}
    packing.enable(model)
    counted = Read(model)
    for name, expected in answers.items():
        found = model.base_model(**arguments | calls[name])
        assert_close(found.last_hidden_state, expected.last_hidden_state, atol=1e-10, rtol=1e-10, msg=name)
        assert (found.past_key_values is None) == (expected.past_key_values is None), name
    assert counted.tokens == len(calls) * tokens.numel()
    model.base_model(**arguments)
    assert counted.tokens == len(calls) * tokens.numel() + least(tokens)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_model_that_shares_otherwise_is_refused(tiny_models, monkeypatch, wrong):
    """Such as one whose positions go on after each response."""
    right = packing.rows_to_line

    def with_other_positions(backbone, inputs, options):
        if packing.reads_rows(**options):
            later = torch.arange(2).unsqueeze(1) * (options["position_ids"] >= CONTEXT)
            options = options | {"position_ids": options["position_ids"] + later}
        return right(backbone, inputs, options)

    if wrong:
        monkeypatch.setattr(packing, "rows_to_line", with_other_positions)
    model = tiny_models("gpt2")
    packing.enable(model, share_prefixes=True)
    if wrong:
        assert "--ppo.no-share_prefixes" in error_line(packing.check_shared_prefixes, model, 24, VOCAB)
    else:
        packing.check_shared_prefixes(model, 24, VOCAB)


# ---- Sampling --------------------------------------------------------------------------------------------------


def contexts_and_noise(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return ragged()[6:, :10], torch.rand(6, length, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("architecture", packing.TRIED)
@pytest.mark.parametrize("stop_ids", [{3, 7, 11, 20}, set(), set(range(VOCAB))])
def test_tokens_and_logprobs_are_those_of_generate_up_to_the_first_stop(
    tiny_models, any_width, architecture, stop_ids
):
    """Those of chapter 1, by a model that reads padding and by one that doesn't."""
    model = tiny_models(architecture).double()
    contexts, uniforms = contexts_and_noise(45)
    sampling = (contexts, uniforms, PAD, VOCAB, 8.0)  # so that every id is drawn now and then
    expected, wanted = train_policy.generate(model, *sampling)
    lengths = [next((i + 1 for i, token in enumerate(row) if token in stop_ids), 45) for row in expected.tolist()]
    for packed in (False, True):
        if packed:
            packing.enable(model)
        responses, logprobs = tldr_responses.generate_until(model, *sampling, stop_ids)
        for row, length in enumerate(lengths):
            assert responses[row].tolist() == expected[row, :length].tolist() + [PAD] * (45 - length)
            assert_close(logprobs[row, :length], wanted[row, :length], atol=1e-6, rtol=0)
            assert (logprobs[row, length:] == 0).all()
    counted, contexts = Read(model), train_policy.left_pad(contexts, PAD)
    tldr_responses.read_contexts(model, contexts, PAD, 9)
    assert counted.tokens == least(contexts)


def test_sampling_ends_with_the_last_response_and_rows_that_ended_leave(tiny_models, monkeypatch):
    model = tiny_models("gpt2").double()
    rows_of_steps, forward = [], model.base_model.forward

    def counted(input_ids, **options):
        rows_of_steps.append(len(input_ids))
        return forward(input_ids=input_ids, **options)

    monkeypatch.setattr(model.base_model, "forward", counted)
    # The stop id is the last one, and a number near 1 draws it.
    contexts, uniforms = drawn(16, 6), torch.zeros(16, 64, dtype=torch.float64)
    uniforms[:12, 2] = uniforms[12:15, 10] = uniforms[15, 20] = 1 - 1e-12  # the step in which each ends
    responses, _ = tldr_responses.generate_until(model, contexts, uniforms, PAD, VOCAB, 1.0, {VOCAB - 1})
    assert (responses != PAD).sum(1).tolist() == [3] * 12 + [11] * 3 + [21]
    assert rows_of_steps == [16] * 4 + [4] * 8 + [1] * 12


@pytest.mark.parametrize("of_longer", [-40, 7], ids=["shorter", "longer"])
def test_a_window_as_long_as_a_row_may_be_shorter_than_the_line(tiny_models, any_width, of_longer):
    """A sliding window, which is to be as long as the longest row at least."""
    model, tokens = tiny_models("mistral").double(), ragged()
    window = int((tokens != PAD).sum()) + of_longer
    assert window > tokens.shape[1]
    config = type(model.config).from_dict(model.config.to_dict() | {"sliding_window": window})
    windowed = type(model)(config).double()
    windowed.load_state_dict(model.state_dict())
    packing.enable(windowed)
    assert_close(read(windowed, tokens), read_alone(model, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", packing.TRIED)
def test_bfloat16(tiny_models, any_width, architecture):
    """Where rotary positions leave queries and keys in float32: what is read is what is sampled, but for rounding."""
    model, (contexts, uniforms) = tiny_models(architecture), contexts_and_noise(9)
    packing.enable(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        responses, sampled = tldr_responses.generate_until(model, contexts, uniforms, PAD, VOCAB, 0.7, set())
        rows = torch.cat([contexts, responses], dim=1)
        found, _ = tldr_responses.response_statistics(model, rows, responses, PAD, 0.7, VOCAB)
    assert 0 < (found - sampled).abs().mean() < 0.05


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_logits_are_in_full_precision_in_a_bfloat16_run(tiny_models, weights):
    """Those of weights that are in bfloat16 themselves, too; with a bias, which few models have."""
    model = tiny_models("gpt_neox").to(weights)
    layer = model.get_output_embeddings()
    layer.bias = torch.nn.Parameter(torch.linspace(-3, 3, VOCAB).to(weights))
    hidden = numbers(1, 5, 16).float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = train_policy.scaled_logits(model, hidden, VOCAB - 1, 0.7)
    expected = torch.nn.functional.linear(hidden.double(), layer.weight.double(), layer.bias.double()) / 0.7
    assert_close(logits, expected[:, :-1].detach().float(), atol=1e-5, rtol=1e-5)
