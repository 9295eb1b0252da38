"""Packed rows, which are read one after the other and without padding, give the same numbers."""

import copy
import json

import pytest
import torch
from oracles import gradients, numbers
from test_passes import RESPONSE, ROWS, TEMPERATURE, UPDATES, Read, networks_in, numbers_of, ragged, same_numbers
from test_policy_math import PAD, VOCAB
from torch.testing import assert_close
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from ppo_rlhf import train_policy, train_reward
from ppo_rlhf.lib import precision
from ppo_rlhf.lib.layers import checkpoint_layers
from ppo_rlhf.tldr import models, packing, responses as tldr_responses

COSTS = (0, 7, 10**6)  # of a group, in tokens: a group for each length, a few, one for all


@pytest.fixture
def any_width(monkeypatch):
    monkeypatch.setattr(packing, "LEAST_WIDTH", 1)


def in_groups_of(cost: int, monkeypatch) -> None:
    monkeypatch.setitem(packing.COST_OF_GROUP, "cpu", cost)


def hard_rows() -> torch.Tensor:
    """Padding before, inside and behind; a row of padding alone, and a full one."""
    tokens = ragged(padding_inside=False)
    tokens[::3] = ragged(1, padding_inside=True)[::3]
    tokens[5], tokens[9] = PAD, tokens[9].where(tokens[9] != PAD, 1)
    return tokens


def read_tokens_of(tokens: torch.Tensor) -> int:
    """What is read of rows: real tokens, what stands in the last column, and one token for all other padding."""
    last_column = torch.arange(tokens.shape[1]) == tokens.shape[1] - 1
    return int(((tokens != PAD) | last_column).sum()) + 1


# ---- Groups ----------------------------------------------------------------------------------------------------


def test_groups_by_hand(monkeypatch):
    one_length_each = packing.plan_groups([5, 5, 3, 1], torch.device("cpu"))
    sizes = [(group.rows, group.longest, group.tokens) for group in one_length_each]
    assert sizes == [(2, 5, 10), (1, 3, 3), (1, 1, 1)]
    assert all(group.from_line is None and group.to_line is None for group in one_length_each)
    in_groups_of(100, monkeypatch)
    (together,) = packing.plan_groups([4, 2, 1], torch.device("cpu"))
    assert (together.rows, together.longest, together.tokens) == (3, 4, 7)
    assert together.to_line.tolist() == [0, 1, 2, 3, 4, 5, 8]
    rows = together.from_line.view(3, 4)
    assert rows[0].tolist() == [0, 1, 2, 3] and rows[1, :2].tolist() == [4, 5] and rows[2, :1].tolist() == [6]
    assert rows.max() < 7


def test_what_is_packed(tiny_models, any_width, monkeypatch):
    model = tiny_models("gpt2")
    packing.enable(model)
    assert packing.is_packed(model) and packing.is_packed(model.base_model)
    assert packing.is_packed(train_reward.RewardModel(model.base_model))
    assert "unpadded" not in json.dumps(model.config.to_dict())
    eager, other = tiny_models("gpt2"), tiny_models("gpt2")
    eager.set_attn_implementation("eager")
    other.config.model_type = "another"
    code_of_its_own = tiny_models("gpt2")
    code_of_its_own.__class__ = type("Own", (type(code_of_its_own),), {"__module__": "modeling_own"})
    for refused in (eager, other, code_of_its_own):
        packing.enable(refused)
        assert not packing.is_packed(refused)
    narrow = tiny_models("gpt2")
    monkeypatch.setattr(packing, "LEAST_WIDTH", narrow.config.hidden_size + 1)
    packing.enable(narrow)
    assert not packing.is_packed(narrow)


@pytest.mark.parametrize("architecture", packing.TRIED)
def test_loaded_models_are_packed_where_a_script_asks_for_it(tiny_models, tmp_path, any_width, architecture):
    """Also their layers, which have another configuration than the model; the one that is saved does not change."""
    tiny_models(architecture).save_pretrained(tmp_path / "model")
    loaded, tokens = train_policy.load_pretrained(str(tmp_path / "model"), torch.float32), hard_rows()
    assert not packing.is_packed(loaded) and "forward" not in vars(loaded.base_model)
    expected = train_policy.read_tokens(loaded, tokens, PAD, slice(None))
    packing.enable(loaded)
    counted = Read(loaded)
    assert packing.is_packed(loaded)
    assert_close(train_policy.read_tokens(loaded, tokens, PAD, slice(None)), expected, atol=1e-4, rtol=1e-4)
    assert counted.tokens == read_tokens_of(tokens)
    loaded.save_pretrained(tmp_path / "again")
    first, again = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("model", "again"))
    assert first == again


def test_one_pass_unless_its_size_is_limited(tiny_models, any_width, monkeypatch):
    model, lengths = tiny_models("gpt2"), torch.tensor([50, 4, 2, 9])
    monkeypatch.setitem(packing.COST_OF_PASS, "cpu", 0)
    assert len(packing.plan_passes(lengths, model)) == 4
    packing.enable(model)
    assert [one.rows.tolist() for one in packing.plan_passes(lengths, model)] == [[0, 3, 1, 2]]
    assert [one.rows.tolist() for one in packing.plan_passes(lengths, model, rows=2)] == [[0, 3], [1, 2]]


# ---- Reading ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("architecture", packing.TRIED)
def test_it_reads_the_same(tiny_models, any_width, monkeypatch, architecture, cost):
    """Hidden states, log-probs and gradients, against a mask of four dimensions over padded rows."""
    model, tokens = tiny_models(architecture).double(), hard_rows()
    weights = numbers(3, *tokens.shape, model.config.hidden_size)

    def read() -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        hidden_states = train_policy.read_tokens(model, tokens, PAD, slice(None))
        (hidden_states * weights).sum().backward()
        return hidden_states.detach(), gradients(model)

    expected = read()
    in_groups_of(cost, monkeypatch)
    packing.enable(model)
    counted = Read(model)
    found = read()
    assert counted.tokens == read_tokens_of(tokens) < tokens.numel() * 0.7
    assert found[1].count_nonzero() > 1_000
    # Norms of Llama and Qwen compute in float32, whatever the weights are.
    tolerance = 1e-10 if architecture in ("gpt2", "gpt_neox") else 1e-4
    assert_close(found, expected, atol=tolerance, rtol=tolerance)
    for script in (train_policy, train_reward):
        assert script.read_tokens(model, tokens, PAD, slice(None)).equal(found[0])


def test_without_padding_nothing_stands_in_for_it(tiny_models, any_width, monkeypatch):
    """Rows of one length are one group, whatever a group costs: nothing is copied."""
    model, tokens = tiny_models("gpt2").double(), hard_rows().clamp(max=PAD - 1)
    expected = train_policy.read_tokens(model, tokens, PAD, slice(None))
    packing.enable(model)
    counted, plan, groups = Read(model), packing.plan_groups, []
    monkeypatch.setattr(packing, "plan_groups", lambda *arguments: groups.append(plan(*arguments)) or groups[-1])
    for cost in COSTS:
        in_groups_of(cost, monkeypatch)
        assert_close(train_policy.read_tokens(model, tokens, PAD, slice(None)), expected, atol=1e-10, rtol=1e-10)
    assert counted.tokens == len(COSTS) * tokens.numel()
    rows, longest = tokens.shape
    whole = packing.Group(rows=rows, longest=longest, tokens=tokens.numel(), from_line=None, to_line=None)
    assert groups == [[whole]] * len(COSTS)


def test_other_calls_reach_the_library(tiny_models, any_width):
    """A mask of another kind, and whatever else is asked for."""
    model, tokens = tiny_models("llama").double(), hard_rows()[[3, 3]]
    mask = train_policy.causal_mask(tokens != PAD, torch.float64)
    ids, positions = tokens.masked_fill(tokens == PAD, 0), torch.arange(tokens.shape[1]).expand_as(tokens)
    arguments = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, "use_cache": False}
    room = torch.nn.functional.pad(mask, (0, tokens.shape[1]), value=torch.finfo(mask.dtype).min)
    calls = {
        "no positions": {name: value for name, value in arguments.items() if name != "position_ids"},
        "one row of positions": arguments | {"position_ids": positions[:1]},
        "another cache": arguments | {"past_key_values": DynamicCache(config=model.config), "use_cache": True},
        "a cache of the library's own": arguments | {"use_cache": True},
        "no mask": arguments | {"attention_mask": None},
        "two dimensions": arguments | {"attention_mask": (tokens != PAD).long()},
        "True and False": arguments | {"attention_mask": mask == 0},
        "one for all rows": arguments | {"attention_mask": mask[:1]},
        "embeddings": arguments | {"input_ids": None, "inputs_embeds": model.get_input_embeddings()(ids).detach()},
        "filled": arguments | {"attention_mask": torch.cat([mask, mask], dim=3), "use_cache": True},
        "more": arguments | {"output_hidden_states": True},
    }

    def answer(name: str) -> BaseModelOutputWithPast:
        call = copy.deepcopy(calls[name])
        if name == "filled":
            cache = precision.KeyValueCache(config=model.config, max_cache_len=2 * tokens.shape[1])
            before = {"attention_mask": room, "use_cache": True, "output_hidden_states": False}
            model.base_model(**arguments | before, past_key_values=cache)
            call["past_key_values"] = cache
        return model.base_model(**call)

    expected = {name: answer(name) for name in calls}
    packing.enable(model)
    counted = Read(model)  # it does not see embeddings
    for name in calls:
        found = answer(name)
        assert_close(found.last_hidden_state, expected[name].last_hidden_state, atol=1e-10, rtol=1e-10, msg=name)
        assert (found.past_key_values is None) == (expected[name].past_key_values is None), name
    assert len(found.hidden_states) == model.config.num_hidden_layers + 1
    assert counted.tokens == 11 * tokens.numel()  # what fills the cache counts too
    model.base_model(**arguments)
    assert counted.tokens == 11 * tokens.numel() + read_tokens_of(tokens)


def test_a_row_that_sees_its_neighbour_is_noticed(tiny_models, any_width, monkeypatch):
    """The same line cut a token too late: the comparison above can fail."""
    model, tokens = tiny_models("llama").double(), hard_rows()
    expected = train_policy.read_tokens(model, tokens, PAD, slice(None))
    packing.enable(model)
    plan = packing.plan_groups

    def shifted(lengths: list[int], *others) -> list[packing.Group]:
        return plan([lengths[0] + 1, *lengths[1:-2], lengths[-2] + lengths[-1] - 1], *others)

    monkeypatch.setattr(packing, "plan_groups", shifted)
    assert (train_policy.read_tokens(model, tokens, PAD, slice(None)) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("case", UPDATES, ids=lambda case: case.__name__)
@pytest.mark.parametrize(("cost", "checkpointing"), [(0, False), (7, True)])
def test_updates_are_the_same(tiny_models, any_width, monkeypatch, case, cost, checkpointing):
    """Each chapter's updates: the same numbers and gradients, and no padding is read."""
    in_groups_of(cost, monkeypatch)
    update, model, real = case(tiny_models)
    if checkpointing:
        for network in networks_in(model):
            checkpoint_layers(network)
    expected = numbers_of(update, model)
    for network in networks_in(model):
        packing.enable(network)
        assert packing.is_packed(network)
    counted = Read(*networks_in(model))
    same_numbers(numbers_of(update, model), expected)
    assert real < counted.tokens <= real + 8  # a token for the padding of each pass


# ---- Sampling --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("architecture", packing.TRIED)
def test_it_samples_the_same(tiny_models, any_width, monkeypatch, architecture, cost):
    """Chapter 1 fills a cache of its own, so it reads the padding of contexts as it is, of packed models, too."""
    model, contexts = tiny_models(architecture).double(), hard_rows()[:, :-RESPONSE]
    uniforms = torch.rand(ROWS, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    arguments = (model, contexts, uniforms, PAD, VOCAB, TEMPERATURE)

    def sample() -> list[torch.Tensor]:
        found = [module.generate(*arguments) for module in (train_policy, train_reward)]
        return [
            tensor for tensors in (*found, tldr_responses.generate_until(*arguments, {3, 4})) for tensor in tensors
        ]

    expected = sample()
    in_groups_of(cost, monkeypatch)
    packing.enable(model)
    counted, packed = Read(model), train_policy.left_pad(contexts, PAD)
    tldr_responses.read_contexts(model, packed, PAD, 9)
    assert counted.tokens == read_tokens_of(packed)
    of_contexts = {train_policy: packed.numel(), train_reward: packed.numel()}
    for module, tokens in of_contexts.items():
        counted.tokens = 0
        module.generate(*arguments)
        assert counted.tokens == tokens + 8 * ROWS  # and one for each token but the last
    for one, other in zip(sample(), expected, strict=True):
        assert_close(one, other, atol=1e-6, rtol=0)


def with_window(model: PreTrainedModel, window: int) -> PreTrainedModel:
    """The same model with a sliding window, which is to be as long as the longest row at least."""
    config = type(model.config).from_dict(model.config.to_dict() | {"sliding_window": window})
    windowed = type(model)(config).double()
    windowed.load_state_dict(model.state_dict())
    return windowed


@pytest.mark.parametrize("window", ["a row", "shorter", "as long as all tokens", "longer"])
def test_a_window_as_long_as_a_row_may_be_shorter_than_the_line(tiny_models, any_width, window):
    model, contexts = tiny_models("mistral").double(), hard_rows()[:, :-RESPONSE]
    row, line = contexts.shape[1] + 9, int((contexts != PAD).sum())
    lengths = {"a row": row, "shorter": line - 40, "as long as all tokens": line, "longer": line + 7}
    assert sorted(lengths.values()) == list(lengths.values())
    windowed = with_window(model, lengths[window])
    packing.enable(windowed)
    uniforms = torch.rand(ROWS, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected, found = (
        train_policy.generate(each, contexts, uniforms, PAD, VOCAB, TEMPERATURE) for each in (model, windowed)
    )
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, atol=1e-6, rtol=0)


@pytest.mark.parametrize("architecture", packing.TRIED)
def test_bfloat16(tiny_models, any_width, architecture):
    """Where rotary positions leave queries and keys in float32: what is read is what is sampled, but for rounding."""
    model, contexts = tiny_models(architecture), hard_rows()[:, :-RESPONSE]
    packing.enable(model)
    uniforms = torch.rand(ROWS, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        responses, sampled, _ = train_policy.generate(model, contexts, uniforms, PAD, VOCAB, TEMPERATURE)
        rows = torch.cat([contexts, responses], dim=1)
        read, _ = tldr_responses.response_statistics(model, rows, responses, PAD, TEMPERATURE, VOCAB)
    assert 0 < (read - sampled).abs().mean() < 0.05


def test_adapters_read_no_padding_either(tiny_models, any_width):
    model, tokens = tiny_models("llama").double(), hard_rows()
    before = train_policy.read_tokens(model, tokens, PAD, slice(None))
    packing.enable(model)
    adapters = models.add_adapters(model, models.LoraArgs(rank=4, target_modules="all-linear"), 1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    counted = Read(model)
    found = train_policy.read_tokens(model, tokens, PAD, slice(None))
    assert counted.tokens == read_tokens_of(tokens)
    del model.base_model.is_packed, model.base_model.forward
    assert_close(found, train_policy.read_tokens(model, tokens, PAD, slice(None)), atol=1e-4, rtol=1e-4)
    assert (found - before).abs().max() > 0.1
    with adapters.disable_adapter():
        assert_close(train_policy.read_tokens(model, tokens, PAD, slice(None)), before, atol=1e-4, rtol=1e-4)
