"""Passes over rows of similar length: planned as they should be, they change nothing but what is read.

Each update of both chapters, with rows of ragged lengths, is compared with one that reads all rows at once and in the
padding that they were given. What the networks read is counted.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from oracles import gradients, numbers, on_processes
from test_policy_math import PAD, VOCAB, token_ids
from test_tldr_update import make_actor_critic, scalar_model
from torch.testing import assert_close

from ppo_rlhf import train_policy
from ppo_rlhf.rlvr import policy as rlvr_policy
from ppo_rlhf.tldr import (
    packing,
    policy as tldr_policy,
    posts,
    responses as tldr_responses,
    reward as tldr_reward,
    sft as tldr_sft,
)

ARCHITECTURES = ("gpt2", "gpt_neox", "llama", "qwen2")
ROWS, CONTEXT, RESPONSE, TEMPERATURE = 48, 40, 6, 0.7


# ---- The plan --------------------------------------------------------------------------------------------------

LENGTHS = torch.tensor([7, 3, 9, 9, 1, 4, 12, 2, 7, 5])
MODEL = torch.nn.Linear(1_000, 999)  # 999,000 parameters and a bias of 999


def rows_of(plan: list[packing.Pass]) -> list[list[int]]:
    return [one.rows.tolist() for one in plan]


def test_passes_of_so_many_rows():
    plan = packing.plan_passes(LENGTHS, MODEL, rows=4)
    assert rows_of(plan) == [[6, 2, 3, 0], [8, 9, 5, 1], [7, 4]]
    assert [one.longest for one in plan] == [12, 7, 2]


@pytest.mark.parametrize(("cost", "sizes"), [(0, [1, 2, 2, 1, 1, 1, 1, 1]), (4, [2, 3, 3, 2]), (math.inf, [10])])
def test_a_pass_ends_where_padding_costs_more_than_another(cost, sizes, monkeypatch):
    """Of 12, 9, 9, 7, 7, 5, 4, 3, 2 and 1 tokens. With 4, a third row would make the padding 3 + 3."""
    monkeypatch.setitem(packing.COST_OF_PASS, "cpu", cost)
    plan = packing.plan_passes(LENGTHS, MODEL)
    assert [len(one.rows) for one in plan] == sizes
    assert sorted(itertools.chain(*rows_of(plan))) == list(range(10))
    assert max(len(one.rows) for one in packing.plan_passes(LENGTHS, MODEL, rows=2)) == min(2, max(sizes))


def test_rows_come_back_in_their_order():
    table, plan = numbers(1, 10, 3), packing.plan_passes(LENGTHS, MODEL, rows=3)

    def twice(rows: torch.Tensor, lengths: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert longest == lengths.max()
        return 2 * rows, lengths

    doubled, lengths = packing.in_passes(twice, plan, table, LENGTHS)
    assert doubled.equal(2 * table) and lengths.equal(LENGTHS)
    assert packing.in_passes(lambda rows, _: rows[:, 0], plan, table).equal(table[:, 0])


# ---- What is read ----------------------------------------------------------------------------------------------


def ragged(seed: int = 0, *, padding_inside: bool) -> torch.Tensor:
    """Contexts of 2 to CONTEXT tokens with responses of RESPONSE tokens, or of 1 to RESPONSE and padding."""
    tokens = token_ids(seed, ROWS, CONTEXT + RESPONSE)
    for i in range(ROWS):
        missing = i * 7 % (CONTEXT - 1)
        if padding_inside:
            tokens[i, CONTEXT - missing : CONTEXT] = PAD
        else:
            tokens[i, :missing] = PAD
            tokens[i, CONTEXT + 1 + i % RESPONSE :] = PAD
    return tokens


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("padding_inside", [True, False])
def test_packed_tokens_read_the_same(tiny_models, architecture, padding_inside):
    model, tokens = tiny_models(architecture).double(), ragged(padding_inside=padding_inside)[:, 10:]
    longest = int((tokens != PAD).sum(1).max())
    packed, responses = packing.pack(tokens, PAD, longest), tokens[:, CONTEXT - 10 :]
    assert packed.shape[1] == longest
    expected = train_policy.read_tokens(model, tokens, PAD, slice(CONTEXT - 11, -1))
    for rows in (packed, tokens):
        read = tldr_responses.read_before_responses(model, rows, responses, PAD)
        assert_close(read, expected, atol=1e-12, rtol=0)
    last = slice(-1, None)
    read, expected = (train_policy.read_tokens(model, rows, PAD, last) for rows in (packed, tokens))
    assert_close(read, expected, atol=1e-12, rtol=0)
    assert packing.pack(tokens, PAD, tokens.shape[1]) is tokens


class Read:
    """Counts the tokens that networks read, padding included."""

    def __init__(self, *networks: torch.nn.Module):
        self.tokens = 0
        for network in networks:
            network.get_input_embeddings().register_forward_pre_hook(self.count)

    def count(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self.tokens += inputs[0].numel()


def everything_at_once(lengths, *_, **__) -> list[packing.Pass]:
    return [packing.Pass(rows=torch.arange(len(lengths)), longest=10**6)]


def as_it_is(lm_backbone, tokens, responses, pad_id):
    return train_policy.read_tokens(lm_backbone, tokens, pad_id, slice(-responses.shape[1] - 1, -1))


def policy_of_chapter_2(tiny_models) -> tuple[Callable, torch.nn.Module, int]:
    tokens = ragged(padding_inside=False)
    actor_critic = make_actor_critic(tiny_models)
    mask, value_mask = tldr_policy.response_masks(tokens[:, CONTEXT:], PAD)
    names = ("logprobs", "values", "rewards")
    drawn = {name: numbers(seed, ROWS, RESPONSE) - 3 for seed, name in enumerate(names, 1)}
    rollout = tldr_policy.Rollout(query_responses=tokens, **drawn, mask=mask, value_mask=value_mask)
    minibatches = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1)).view(1, 1, -1)
    ppo = tldr_policy.PpoArgs(local_micro_batch_size=ROWS)

    def update() -> dict[str, torch.Tensor]:
        optimizer = torch.optim.SGD(actor_critic.parameters(), lr=0.0)
        arguments = (actor_critic, optimizer, rollout, minibatches, ppo, PAD, TEMPERATURE)
        return on_processes(1, lambda process: tldr_policy.ppo_update(*arguments, process))[0]

    return update, actor_critic, 2 * int((tokens != PAD).sum())  # policy and critic


def reward_model_of_chapter_2(tiny_models) -> tuple[Callable, torch.nn.Module, int]:
    chosen, rejected = (ragged(seed, padding_inside=False) for seed in (0, 1))
    model = scalar_model(tiny_models("gpt2").base_model, tldr_reward.RewardModel)
    model.gain.requires_grad_(False)
    comparisons = posts.Comparisons(
        queries=chosen[:, :CONTEXT],
        chosen=chosen[:, CONTEXT:],
        rejected=rejected[:, CONTEXT:],
        groups=[],
        cut=0,
        identical=0,
        ceiling=None,
    )
    inds, counts = torch.arange(ROWS), torch.arange(ROWS) != 5

    def update() -> dict[str, float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        step = partial(tldr_reward.pairs_update, model, optimizer, comparisons, inds, counts, PAD)
        return on_processes(1, partial(step, rows=ROWS))[0]

    return update, model, 2 * int(comparisons.lengths(PAD).sum())


def model_of_sft(tiny_models) -> tuple[Callable, torch.nn.Module, int]:
    tokens = ragged(padding_inside=False)
    tokens[7] = PAD  # a row that fills the batch up
    model = tldr_sft.LanguageModel(tiny_models("gpt2"), VOCAB).double()

    def update() -> dict[str, float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        step = partial(tldr_sft.sft_update, model, optimizer, tokens, PAD, rows=ROWS)
        return on_processes(1, step)[0]

    return update, model, int((tokens != PAD).sum())


UPDATES = [policy_of_chapter_2, reward_model_of_chapter_2, model_of_sft]


def numbers_of(update: Callable, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What an update returns, and the gradients."""
    return {**update(), "gradients": gradients(model)}


def same_numbers(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found["gradients"].count_nonzero() > 1_000
    for name, value in found.items():
        atol, rtol = (1e-11, 1e-9) if name == "gradients" else (1e-9, 1e-7)
        assert_close(value, expected[name], atol=atol, rtol=rtol, msg=name)


def networks_in(model: torch.nn.Module) -> list[torch.nn.Module]:
    found = [module for module in model.children() if hasattr(module, "get_input_embeddings")]
    return found + [module.lm_backbone for module in model.children() if hasattr(module, "lm_backbone")]


@pytest.mark.parametrize("case", UPDATES, ids=lambda case: case.__name__)
def test_passes_change_what_is_read_and_nothing_else(tiny_models, monkeypatch, case):
    update, model, real = case(tiny_models)
    monkeypatch.setitem(packing.COST_OF_PASS, "cpu", 16)  # of models so small, one pass would pay
    read = Read(*networks_in(model))
    found, in_passes = numbers_of(update, model), read.tokens
    monkeypatch.setattr(packing, "plan_passes", everything_at_once)
    for module in (tldr_responses, tldr_policy, rlvr_policy):
        monkeypatch.setattr(module, "read_before_responses", as_it_is)
    same_numbers(found, numbers_of(update, model))
    # Of the padding that there was, less than a quarter is left.
    at_once = read.tokens - in_passes
    assert real <= in_passes < real + (at_once - real) / 4
