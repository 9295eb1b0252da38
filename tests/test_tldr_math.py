"""Chapter 2 by enumeration and loops: what the penalty does, rates, batches, pairs. Golden numbers prove the rest."""

import math

import numpy as np
import pytest
import torch
from golden_models import load_json
from oracles import (
    Process,
    double,
    masks_of,
    numbers,
    on_processes,
    slow_policy_loss,
    slow_value_loss,
    spoil,
    states,
)
from torch.testing import assert_close

from ppo_rlhf.lib.processes import deal, map_rows
from ppo_rlhf.tldr.models import cosine_lr
from ppo_rlhf.tldr.policy import compute_gae, compute_rewards, policy_loss, posts_of_update, value_loss
from ppo_rlhf.tldr.posts import trim_padding
from ppo_rlhf.tldr.responses import draw_minibatches
from ppo_rlhf.tldr.reward import pairwise_losses, prefers_chosen
from ppo_rlhf.tldr.sft import next_token_mask
from ppo_rlhf.train_policy import episode_noise

EOS, PAD = 28, 29
SEEDS = range(4)


# ---- What the penalty does to a policy, by going through all 9 sequences of 2 tokens out of 3 ------------------

SEQUENCES = torch.cartesian_prod(torch.arange(3), torch.arange(3))  # (9, 2)
ENUMERATION = load_json("kl_enumeration")


def sequence_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """Log-probs (9, 2) of the tokens. logits: (4, 3), those of the first token, then those after each first token."""
    table, (first, second) = logits.log_softmax(1), SEQUENCES.T
    return torch.stack([table[0, first], table[1 + first, second]], dim=1)


def penalty_gradient(logits: torch.Tensor, ref_logits: torch.Tensor, estimator: str) -> torch.Tensor:
    """Expected policy gradient (4, 3) of the penalty alone, with the coefficient 1: sum of p * grad log p * cost."""
    logits = logits.clone().requires_grad_()
    logprobs = sequence_logprobs(logits)
    everything = torch.ones(9, 2, dtype=torch.bool)
    rewards, _, _ = compute_rewards(
        torch.zeros(9, dtype=torch.float64),
        logprobs.detach(),
        sequence_logprobs(ref_logits),
        everything,
        1.0,
        estimator,
    )
    to_come, _ = compute_gae(
        rewards, torch.zeros_like(rewards), torch.ones_like(rewards).bool(), gamma=1.0, lam=1.0
    )  # (9, 2)
    objective = (logprobs.detach().sum(1).exp() * (logprobs * to_come).sum(1)).sum()
    return -torch.autograd.grad(objective, logits)[0]


def divergence_gradient(logits: torch.Tensor, ref_logits: torch.Tensor) -> tuple[float, torch.Tensor]:
    """KL divergence from the reference and its gradient (4, 3), by the definition: sum of p * (log p - log q)."""
    logits = logits.clone().requires_grad_()
    logprobs, ref_logprobs = (sequence_logprobs(each).sum(1) for each in (logits, ref_logits))
    kl = (logprobs.exp() * (logprobs - ref_logprobs)).sum()
    return kl.item(), torch.autograd.grad(kl, logits)[0]


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a * b).sum() / (a.norm() * b.norm())).item()


def test_only_k1_has_the_gradient_of_the_divergence():
    """Far from the reference, the gradient of k3 even points away: a step down its slope raises the divergence."""
    logits, ref_logits = (double(*ENUMERATION[name]) for name in ("logits", "ref_logits"))
    gradients = ENUMERATION["gradients"]
    kl, true = divergence_gradient(logits, ref_logits)
    assert kl == pytest.approx(gradients["true"]["value"], rel=1e-12)
    assert_close(true, double(*gradients["true"]["grad"]), atol=1e-11, rtol=0)
    for estimator in ("k1", "k3"):
        golden, gradient = gradients[f"{estimator} in the reward"], penalty_gradient(logits, ref_logits, estimator)
        assert_close(gradient, double(*golden["grad"]), atol=1e-11, rtol=0)
        assert gradient.norm().item() == pytest.approx(golden["norm"], rel=1e-9)
        assert cosine(gradient, true) == pytest.approx(golden["cosine_with_true"], abs=1e-9)
        after, _ = divergence_gradient(logits - 0.1 * gradient, ref_logits)
        assert after < kl if estimator == "k1" else after > kl
    assert_close(penalty_gradient(logits, ref_logits, "k1"), true)


# ---- Losses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_losses_and_gradients_equal_loops_whatever_is_in_masked_places(seed: int):
    """T42, T45, section 8, defect 3: loss, clipped share and approxkl are means over what counts."""
    width, lengths = 7, [1, 7, 7, 6, 4, 2, 5, 3]
    mask, value_mask = masks_of(lengths, width)
    clean = [numbers(10 * seed + i, len(lengths), width) / (3 - i) for i in range(3)]
    for loss, counted, slow_lengths, slow in (
        (policy_loss, mask, lengths, slow_policy_loss),
        (value_loss, value_mask, [states(length, width) for length in lengths], slow_value_loss),
    ):
        new, *others = (spoil(x, counted, i) for i, x in enumerate(clean))
        found = loss(new.requires_grad_(), *others, counted, 0.2, counted.sum())
        found[0].backward()
        *expected, slow_gradient = slow(*clean, slow_lengths, 0.2)
        assert [number.item() for number in found] == pytest.approx(expected)
        assert 0 < found[1] < 1
        assert_close(new.grad.numpy(), slow_gradient)


# ---- Learning rate, posts, minibatches, shares of processes ----------------------------------------------------


def test_cosine_lr():
    """1.1: from the full rate, without warm-up; 0 would come after the last step."""
    rates = [4.0, 2 + math.sqrt(2), 2.0, 2 - math.sqrt(2)]
    assert [cosine_lr(4.0, step, 4) for step in range(4)] == pytest.approx(rates)


@pytest.mark.parametrize(("posts", "batch"), [(10, 4), (7, 3), (5, 5), (3, 8), (12, 4), (1, 2)])
def test_posts_come_in_passes_without_a_gap(posts: int, batch: int):
    """Batches may lie across passes; each pass has every post once, in an order of its own."""
    updates = 6 * posts
    drawn = [posts_of_update(3, posts, update, batch) for update in range(updates)]
    assert all(len(inds) == batch for inds in drawn)
    stream = torch.cat(drawn).tolist()
    passes = [stream[i : i + posts] for i in range(0, len(stream) - posts + 1, posts)]
    assert all(sorted(order) == list(range(posts)) for order in passes)
    if posts > 4:
        assert len({tuple(order) for order in passes}) > len(passes) / 2
        assert posts_of_update(4, posts, 0, batch).tolist() != stream[:batch]


@pytest.mark.parametrize(("batch", "nminibatches"), [(16, 1), (16, 2), (24, 3), (8, 8)])
def test_minibatches_share_the_batch_out(batch: int, nminibatches: int):
    """T48: every episode once per epoch; of nminibatches episodes in a row each minibatch gets one."""
    (inds,) = draw_minibatches(1, 0, 1, slice(0, batch), nminibatches)
    assert inds.shape == (nminibatches, batch // nminibatches)
    assert sorted(inds.flatten().tolist()) == list(range(batch))
    for minibatch in inds.tolist():
        assert sorted(i // nminibatches for i in minibatch) == list(range(batch // nminibatches))


def test_minibatches_do_not_depend_on_the_number_of_processes():
    """Defect 11: each process has its part of the very same minibatches."""
    batch, nminibatches = 24, 3
    expected = [set(row) for row in draw_minibatches(1, 5, 3, slice(0, batch), nminibatches)[2].tolist()]
    for processes in (2, 4, 8):
        local = batch // processes
        union: list[set[int]] = [set() for _ in range(nminibatches)]
        for rank in range(processes):
            part = draw_minibatches(1, 5, 3, slice(rank * local, (rank + 1) * local), nminibatches)[2]
            assert part.shape == (nminibatches, local // nminibatches)
            assert sorted(part.flatten().tolist()) == list(range(local))
            for minibatch, inds in zip(union, part.tolist(), strict=True):
                minibatch |= {rank * local + i for i in inds}
        assert union == expected


def test_minibatches_and_noise_belong_to_seed_update_and_epoch():
    drawn = [draw_minibatches(*key, 2, slice(0, 64), 2).tolist() for key in ((1, 0), (2, 0), (1, 1))]
    assert len({str(inds) for epochs in drawn for inds in epochs}) == 6
    assert drawn[0] == draw_minibatches(1, 0, 2, slice(0, 64), 2).tolist()
    assert drawn[0][:1] == draw_minibatches(1, 0, 1, slice(0, 64), 2).tolist()
    first, second, other = (episode_noise(seed, 3, 8, 5) for seed in (1, 1, 2))
    assert torch.equal(first, second) and not torch.equal(first, other)


@pytest.mark.parametrize(("rows", "batch", "processes"), [(16, 8, 2), (13, 8, 4), (3, 8, 4), (7, 7, 1), (9, 4, 2)])
def test_every_row_is_dealt_once(rows: int, batch: int, processes: int):
    """T27, defect 1: over all batches and processes, what counts is each index once; shares have equal size."""
    order, seen = torch.randperm(rows, generator=torch.Generator().manual_seed(0)), []
    for inds in order.split(batch):
        for rank in range(processes):
            share, counts = deal(inds, batch, rank, processes)
            assert len(share) == len(counts) == batch // processes
            assert share[~counts].eq(0).all()
            seen += share[counts].tolist()
    assert seen == order.tolist()


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 8, 11])
def test_map_rows_gives_every_row_once_and_in_order(processes: int, rows: int):
    """Defect 1: rows that fill up the last batch are dropped again."""
    table = torch.arange(rows * 2.0).view(rows, 2)

    def mapped(process: Process) -> tuple[torch.Tensor, ...]:
        return map_rows(lambda inds: (table[inds] * 10, inds), rows, 4, process)

    for values, inds in on_processes(processes, mapped):
        assert torch.equal(values, table * 10)
        assert inds.tolist() == list(range(rows))


# ---- Pairs, next tokens, padding, ROUGE ------------------------------------------------------------------------


def test_pairwise_losses_equal_a_loop():
    """T25; also where exp would overflow."""
    chosen = torch.cat([5 * numbers(0, 20), double(900.0, -900.0)])
    rejected = torch.cat([5 * numbers(1, 20), double(-900.0, 900.0)])
    expected = [
        max(b - a, 0) + math.log1p(math.exp(-abs(b - a)))
        for a, b in zip(chosen.tolist(), rejected.tolist(), strict=True)
    ]
    assert pairwise_losses(chosen, rejected).tolist() == pytest.approx(expected)


def test_a_tie_is_wrong():
    """A tie counts as wrong."""
    assert prefers_chosen(double(1.0, 1.0, 1.0), double(1.0, 1.0 - 1e-9, 1.0 + 1e-9)).tolist() == [False, True, False]


def test_tokens_that_are_predicted():
    """T21: those with a token before them, the first of a row and what follows padding apart; EOS is one of them."""
    tokens = torch.tensor([[PAD, PAD, 5, 6, EOS, PAD], [1, 2, 3, 4, 5, EOS], [PAD] * 6, [7, PAD, PAD, PAD, PAD, PAD]])
    expected = [[0, 0, 1, 1, 0], [1, 1, 1, 1, 1], [0] * 5, [0] * 5]
    assert next_token_mask(tokens, PAD).int().tolist() == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_trimmed_padding_equals_a_loop(seed: int):
    """Columns that are padding in every row go, the order of what is left stays."""
    random = np.random.default_rng(seed)
    left = [[PAD] * n + [1] * (5 - n) for n in random.integers(1, 5, 6)]
    right = [[2] * n + [PAD] * (4 - n) for n in random.integers(1, 4, 6)]
    rows = [a + b for a, b in zip(left, right, strict=True)]
    kept = [c for c in range(9) if c == 0 or any(row[c] != PAD for row in rows)]
    trimmed = trim_padding(torch.tensor(left), torch.tensor(right), pad_id=PAD)
    assert trimmed.tolist() == [[row[c] for c in kept] for row in rows]
    assert trimmed.shape[1] < 9


def test_trimming_nothing_but_padding_leaves_a_column():
    assert trim_padding(torch.full((2, 4), PAD), pad_id=PAD).tolist() == [[PAD], [PAD]]
