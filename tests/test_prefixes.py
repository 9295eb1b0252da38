"""Rows that share what they begin with (--ppo.share_prefixes): the same numbers, and less to read."""

import itertools
from types import SimpleNamespace

import pytest
import test_rlvr_update
import torch
from oracles import gradients, numbers
from test_passes import Read
from test_rlvr_update import ARCHITECTURES, CONTEXT, PAD, RESPONSE, same_parameters, updated
from torch.testing import assert_close

from ppo_rlhf import train_policy
from ppo_rlhf.lib import errors, layers
from ppo_rlhf.rlvr.algebra import ESTIMATORS
from ppo_rlhf.rlvr.policy import RewardsArgs
from ppo_rlhf.tldr import models, packing

LENGTHS = [7, 3, 0, 5, 2, 7, 4, 6]  # of two groups of four; the third response is empty


def grouped() -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts of 6 and 3 tokens, four responses to each, and their masks. Two responses begin alike for 2 tokens,
    and from the fourth token on again, which must not be shared."""
    tokens = torch.randint(1, 26, (8, CONTEXT + RESPONSE), generator=torch.Generator().manual_seed(0))
    tokens[:, :CONTEXT] = tokens[[0] * 4 + [4] * 4, :CONTEXT]
    tokens[4:, :3] = PAD
    tokens[1, CONTEXT : CONTEXT + 2] = tokens[0, CONTEXT : CONTEXT + 2]
    tokens[7, CONTEXT + 3 :] = tokens[5, CONTEXT + 3 :]
    for row, length in enumerate(LENGTHS):
        tokens[row, CONTEXT + length :] = PAD
    return tokens, torch.arange(RESPONSE) < torch.tensor(LENGTHS).unsqueeze(1)


def unshared_of(tokens: torch.Tensor, pad_id: int) -> int:
    """How many different beginnings the rows have, counted one by one."""
    rows = [[token for token in row if token != pad_id] for row in tokens.tolist()]
    return len({tuple(row[: end + 1]) for row in rows for end in range(len(row))})


def without_history(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A mistake: equal tokens in the same place are taken as one, whatever is before them. So a response sees its
    neighbour.
    """
    real = {(j, i) for row in ids.tolist() for j, i in enumerate(row) if i >= 0}
    found = {place: number for number, place in enumerate(sorted(real))}
    places = [[found.get((j, i), -1) for j, i in enumerate(row)] for row in ids.tolist()]
    return torch.tensor(places), torch.arange(len(ids))


def with_positions_that_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake: the positions of the line."""
    right = packing.read

    def read(backbone, input_ids, position_ids, mask, cache=None, shared=None):
        if shared:
            position_ids = position_ids + torch.arange(len(input_ids)).unsqueeze(1) * (position_ids >= CONTEXT)
        return right(backbone, input_ids, position_ids, mask, cache, shared)

    monkeypatch.setattr(packing, "read", read)


# ---- The tree --------------------------------------------------------------------------------------------------


def test_a_tree_by_hand():
    ids = torch.tensor([[5, 6, 7, -1], [5, 8, 7, 9], [5, 6, 7, 9], [6, 6, -1, -1], [5, 6, 7, -1]])
    tree, order = packing.prefix_tree(ids)
    assert order.tolist() == [0, 4, 2, 1, 3]
    assert tree[0].tolist() == tree[4].tolist() == [*tree[2, :3].tolist(), -1]  # 5 6 7
    assert tree[0, 0] == tree[1, 0] and len({int(tree[i, 1]) for i in (0, 1, 3)}) == 3
    assert sorted(set(tree.flatten().tolist())) == [-1, 0, 1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("seed", range(5))
def test_a_tree_against_a_count_of_beginnings(seed):
    """Rows of few ids, so that many beginnings are equal, some rows are equal, and some are empty."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 2, (40, 9), generator=generator)
    ids[torch.arange(9) >= torch.randint(0, 10, (40, 1), generator=generator)] = -1
    tree, order = packing.prefix_tree(ids)
    beginnings: dict[int, set] = {}
    for row, of_row in zip(ids.tolist(), tree.tolist(), strict=True):
        for end, number in enumerate(of_row):
            assert (number < 0) == (row[end] < 0)
            beginnings.setdefault(number, set()).add(tuple(row[: end + 1]))
    beginnings.pop(-1)
    assert sorted(beginnings) == list(range(len(beginnings)))
    assert all(len(rows) == 1 for rows in beginnings.values())
    assert len(set.union(*beginnings.values())) == len(beginnings)
    assert order.sort().values.tolist() == list(range(40))
    ordered = [tuple(row) for row in ids[order].tolist()]
    assert len(list(itertools.groupby(ordered))) == len(set(ordered))


def test_groups_stay_together_in_small_passes(tiny_models):
    model, (tokens, _) = tiny_models("gpt2"), grouped()
    packing.enable(model, share_prefixes=True)
    lengths, shared = packing.count_tokens(tokens, PAD), packing.find_shared(model, tokens, tokens != PAD)
    (whole,) = packing.plan_passes(lengths, model, shared=shared)
    assert {frozenset(half.tolist()) for half in whole.rows.split(4)} == {frozenset(range(4)), frozenset(range(4, 8))}
    plan = packing.plan_passes(lengths, model, 3, shared=shared)
    assert torch.cat([one.rows for one in plan]).equal(whole.rows)
    assert [len(one.rows) for one in plan] == [3, 3, 2]
    assert packing.find_shared(tiny_models("gpt2"), tokens, tokens != PAD) is None
    different = tokens[[0, 4]]
    assert packing.find_shared(model, different, different != PAD) is None  # there is nothing to share


# ---- Reading ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", ["narrow", "wide"])
@pytest.mark.parametrize("cost", [0, 10**6])
@pytest.mark.parametrize("architecture", packing.TRIED)
def test_it_reads_the_same(tiny_models, monkeypatch, architecture, cost, width):
    """Hidden states and gradients against each row alone, as the library reads it; and what is read is counted."""
    monkeypatch.setattr(packing, "LEAST_WIDTH", {"narrow": 512, "wide": 1}[width])
    monkeypatch.setitem(packing.COST_OF_GROUP, "cpu", cost)
    model, (tokens, _) = tiny_models(architecture).double(), grouped()
    weights = numbers(3, *tokens.shape, model.config.hidden_size)
    expected = torch.zeros_like(weights)
    for row, real in enumerate(tokens != PAD):
        expected[row, real] = model.base_model(input_ids=tokens[row, real].unsqueeze(0)).last_hidden_state[0]
    (expected * weights).sum().backward()
    wanted = gradients(model)
    model.zero_grad()
    packing.enable(model, share_prefixes=True)
    assert packing.is_packed(model) == (width == "wide")
    counted, real = Read(model), (tokens != PAD).unsqueeze(2)
    found = train_policy.read_tokens(model, tokens, PAD, slice(None)) * real
    (found * weights).sum().backward()
    # The last column of five rows is padding, and is read as the token 0; one more token represents the rest.
    padded = torch.where(tokens[:, -1:] == PAD, 0, tokens[:, -1:])
    assert counted.tokens == unshared_of(torch.cat([tokens[:, :-1], padded], 1), PAD) + 1 < 0.7 * real.sum()
    # Norms of Llama and Qwen compute in float32, whatever the weights are.
    tolerance = 1e-12 if architecture in ("gpt2", "gpt_neox") else 1e-4
    assert_close(found, expected.detach(), atol=tolerance, rtol=tolerance)
    assert_close(gradients(model), wanted, atol=10 * tolerance, rtol=tolerance)


def test_float32_and_adapters(tiny_models):
    """To 1e-5 of the norm of each gradient, with adapters that learn."""
    model, (tokens, _) = tiny_models("llama"), grouped()
    packing.enable(model, share_prefixes=True)
    models.add_adapters(model, models.LoraArgs(rank=4, target_modules="all-linear"), 1)
    learns = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in learns.items():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(len(name)))
    weights, real = numbers(3, *tokens.shape, model.config.hidden_size).float(), (tokens != PAD).unsqueeze(2)
    counted, found = Read(model), []
    for shares in (True, False):
        model.zero_grad()
        model.base_model.shares_prefixes = shares
        hidden_states = train_policy.read_tokens(model, tokens, PAD, slice(None)) * real
        (hidden_states * weights).sum().backward()
        found.append([hidden_states.detach(), *(parameter.grad for parameter in learns.values())])
        counted.tokens, read = 0, counted.tokens
        assert (read < real.sum()) == shares
    assert len(learns) > 20
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


# ---- Updates ---------------------------------------------------------------------------------------------------

VARIANTS = {name: {"advantage": name} for name in ESTIMATORS} | {
    "gspo": {"advantage": "grpo", "loss": "gspo", "loss_aggregation": "seq-mean-token-mean"},
    "cispo": {"advantage": "rloo", "loss": "cispo", "loss_aggregation": "seq-mean-token-sum"},
    "reinforce": {"advantage": "remax", "loss": "reinforce", "loss_aggregation": "seq-mean-token-sum-norm"},
    "exact kl": {"advantage": "grpo", "rewards": RewardsArgs(kl_loss_coef=0.5, kl_loss_estimator="full")},
    "k3": {"entropy_coef": 0.1, "rewards": RewardsArgs(kl_loss_coef=0.5)},
    "cut groups": {"local_micro_batch_size": 2},
    "few rows": {"local_micro_batch_size": 3, "advantage": "grpo", "nminibatches": 1},
    "two processes": {"processes": 2},
    "two processes, cut": {"processes": 2, "local_micro_batch_size": 1, "advantage": "grpo"},
}


def rejected(episodes, rewards):
    """One response that counts nowhere, and one that is left out of the loss."""
    mask, loss_mask = episodes.mask.clone(), episodes.loss_mask.clone()
    mask[3] = loss_mask[3] = loss_mask[6] = False
    return type(episodes)(**episodes.tensors() | {"mask": mask, "loss_mask": loss_mask}), rewards


@pytest.fixture
def update_of(tiny_models, monkeypatch):
    """A function (shares, checkpointing, settings) -> parameters and numbers of an update, and the tokens read."""
    monkeypatch.setattr(test_rlvr_update, "tokens_and_mask", grouped)
    networks, right = test_rlvr_update.networks, test_rlvr_update.update

    def update(*, shares: bool, checkpointing: bool = False, architecture: str = "gpt2", **settings):
        count, embed = [0], torch.nn.Embedding.forward

        def made(*arguments, critic: bool = True):
            actor_critic, reference = networks(*arguments, architecture, critic)
            if shares:
                for part in (actor_critic.lm_backbone, actor_critic.critic and actor_critic.critic.lm_backbone):
                    packing.enable(*([part] if part else []), share_prefixes=True)
                packing.enable(reference.lm_backbone, share_prefixes=True)
            return actor_critic, reference

        def update_in_layers(*arguments, actor_critic, **options):
            if checkpointing:
                layers.checkpoint_layers(actor_critic)
            return right(*arguments, actor_critic=actor_critic, **options)

        def counted(module, ids):
            count[0] += ids.numel() * (module.num_embeddings == ARCHITECTURES[architecture])
            return embed(module, ids)

        with monkeypatch.context() as patched:
            patched.setattr(test_rlvr_update, "networks", made)
            patched.setattr(test_rlvr_update, "update", update_in_layers)
            patched.setattr(torch.nn.Embedding, "forward", counted)
            return updated(tiny_models, change=rejected, **settings), count[0]

    return update


@pytest.mark.parametrize("variant", VARIANTS)
def test_updates_are_the_same(update_of, variant):
    """Gradients, through a step of plain gradient descent, and all that is logged."""
    settings = VARIANTS[variant]
    expected, read = update_of(shares=False, **settings)
    found, read_once = update_of(shares=True, checkpointing=variant == "gae", **settings)
    if "cut" not in variant and "process" not in variant:
        assert read_once < 0.75 * read
    for (parameters, steps), (wanted, numbers_then) in zip(found, expected, strict=True):
        same_parameters(parameters, wanted, atol=1e-12)
        for name, number in steps.items():
            assert_close(number, numbers_then[name], atol=1e-11, rtol=1e-10, msg=name)


def test_mistakes_would_be_noticed(update_of, monkeypatch):
    """A response that sees its neighbour, and positions that go on after each response."""
    ((wanted, _),), _ = update_of(shares=False, architecture="gpt_neox")
    for mistake in ("neighbour", "positions"):
        with monkeypatch.context() as patched:
            if mistake == "neighbour":
                patched.setattr(packing, "prefix_tree", without_history)
            else:
                with_positions_that_go_on(patched)
            ((parameters, _),), _ = update_of(shares=True, architecture="gpt_neox")
        distance = max((one - wanted[name]).abs().max() for name, one in parameters.items())
        assert distance > 1e-5, mistake


# ---- Models that cannot ----------------------------------------------------------------------------------------


def test_models_that_cannot_share_read_each_row(tiny_models, monkeypatch):
    monkeypatch.setattr(packing, "TRIED", ("llama",))
    model, other = tiny_models("gpt2"), tiny_models("gpt2")
    packing.enable(model, other, share_prefixes=True)
    assert not packing.is_packed(model, "shares_prefixes") and "forward" not in vars(model.base_model)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_model_that_shares_otherwise_is_noticed_before_the_run(tiny_models, monkeypatch, capsys, wrong):
    errors.say_once.cache_clear()
    monkeypatch.setattr(packing, "UNFIT", set())
    model, critic, (tokens, _) = tiny_models("gpt2"), tiny_models("gpt2", seed=1), grouped()
    packing.enable(model, critic, share_prefixes=True)
    if wrong:
        with_positions_that_go_on(monkeypatch)
    for _ in range(2):
        models.check_model(model, "tiny", 24, PAD - 1, train_policy.read_tokens)
    said = "--base_model tiny does not read shared prefixes as it should: each row is read by itself\n"
    assert capsys.readouterr().out == said * wrong
    for network in (model, critic, SimpleNamespace(modules=critic.modules)):
        assert (packing.find_shared(network, tokens, tokens != PAD) is None) == wrong
