"""The mathematics of chapter 2 against slow oracles on responses of any length."""

import math
from functools import partial

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
    slow_gae,
    slow_mask,
    slow_mean,
    slow_policy_loss,
    slow_rewards,
    slow_value_loss,
    slow_whiten,
    spoil,
    states,
)
from torch.testing import assert_close

from ppo_rlhf.lib.base.processes import deal, map_rows
from ppo_rlhf.lib.data.posts import trim_padding
from ppo_rlhf.lib.nets.lm import draw_minibatches, episode_noise, has_stop, truncate_at
from ppo_rlhf.lib.nets.models import scheduled_lr
from ppo_rlhf.tldr_policy import (
    PpoArgs,
    compute_advantages,
    compute_gae,
    compute_rewards,
    masked_mean,
    policy_loss,
    posts_of_update,
    punish_missing_eos,
    response_masks,
    value_loss,
    whiten,
)
from ppo_rlhf.tldr_reward import pairwise_losses, prefers_chosen
from ppo_rlhf.tldr_sft import next_token_mask

WIDTH, EOS, PAD = 7, 28, 29
SEEDS = range(4)


def ragged_responses(seed: int, rows: int = 12) -> tuple[list[list[int]], list[int]]:
    """Truncated responses (rows, WIDTH) and how many tokens each has, the one that ends it included.

    Rows 0 to 3: an end-of-text token at index 0, at the last index, nowhere, and one before the last.
    """
    random = np.random.default_rng(seed)
    lengths = [1, WIDTH, WIDTH, WIDTH - 1, *random.integers(1, WIDTH + 1, rows - 4).tolist()]
    responses = []
    for row, length in enumerate(lengths):
        tokens = random.integers(0, EOS, length).tolist()
        if row != 2:
            tokens[-1] = EOS
        responses.append(tokens + [PAD] * (WIDTH - length))
    return responses, lengths


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


# ---- Masks, and the end-of-text trick --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_masks_of_ragged_responses_equal_loops(seed: int):
    """T40, T41."""
    responses, lengths = ragged_responses(seed)
    mask, value_mask = response_masks(torch.tensor(responses), PAD)
    assert torch.equal(mask, slow_mask(lengths, WIDTH))
    assert torch.equal(value_mask, slow_mask([states(length, WIDTH) for length in lengths], WIDTH))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("form", "expected"), [("replace", [3.0, -1.5, -1.5]), ("subtract", [3.0, 0.5, -5.5]), ("none", [3.0, 2.0, -4.0])]
)
def test_responses_that_do_not_end_are_punished(form: str, expected: list[float], dtype: torch.dtype):
    """T39."""
    scores = torch.tensor([3.0, 2.0, -4.0], dtype=dtype)
    punished = punish_missing_eos(scores, torch.tensor([True, False, False]), form, 1.5)
    assert_close(punished, torch.tensor(expected, dtype=dtype))
    assert scores.tolist() == [3.0, 2.0, -4.0]


@pytest.mark.parametrize("stop", [EOS, 26])
def test_a_custom_stop_token_ends_and_saves_a_response(stop: int):
    """1.3: truncation, masks, the end-of-text trick and the place of the score follow the same token."""
    sampled = [[1, EOS, 26, 2, 3], [1, 2, 26, 26, EOS], [1, 2, 3, 4, EOS], [1, 2, 3, 4, 26], [EOS, 1, 2, 3, 4]]
    responses = truncate_at(torch.tensor(sampled), stop, 0, PAD)
    finished = has_stop(responses, stop, 0)
    scores = punish_missing_eos(double(5.0, 6, 7, 8, 9), finished, "replace", 1.0)
    mask, value_mask = response_masks(responses, PAD)
    zeros = torch.zeros(5, 5, dtype=torch.float64)
    rewards, _, _ = compute_rewards(scores, zeros, zeros, mask, 0.05, "k1")
    for i, row in enumerate(sampled):
        length = row.index(stop) + 1 if stop in row else 5
        assert responses[i].tolist() == row[:length] + [PAD] * (5 - length)
        assert (mask[i].sum().item(), value_mask[i].sum().item()) == (length, states(length, 5))
        score = 5.0 + i if stop in row else -1.0
        assert rewards[i].tolist() == [score if t == min(length, 4) else 0.0 for t in range(5)]


# ---- Masked means, whitening, rewards, advantages, losses: loops over ragged responses -------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_masked_mean_equals_a_loop(seed: int):
    _, lengths = ragged_responses(seed)
    x, mask = numbers(seed, 12, WIDTH), slow_mask(lengths, WIDTH)
    expected = slow_mean(x, lengths)
    assert masked_mean(spoil(x, mask), mask, mask.sum()).item() == pytest.approx(expected)
    assert masked_mean(x, mask, torch.tensor(100)).item() == pytest.approx(expected * sum(lengths) / 100)


@pytest.mark.parametrize("keep_mean", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_masked_whiten_equals_a_loop(seed: int, keep_mean: bool):
    """T44: what does not count is 0 afterwards, also where the mean is added back."""
    _, lengths = ragged_responses(seed)
    x, mask = 3 * numbers(seed, 12, WIDTH) - 7, slow_mask(lengths, WIDTH)
    expected = slow_whiten(x, lengths, keep_mean)
    assert_close(whiten(spoil(x, mask), mask, keep_mean=keep_mean, reduce=torch.clone).numpy(), expected)


def test_whitening_one_entry_gives_its_mean():
    for keep_mean, mean in ((False, 0.0), (True, 3.0)):
        whitened = whiten(double([3.0, 9.0]), torch.tensor([[True, False]]), keep_mean=keep_mean, reduce=torch.clone)
        assert whitened.tolist() == [[mean, 0.0]]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("seed", SEEDS)
def test_masked_rewards_equal_loops(seed: int, estimator: str):
    """T42, T43: log-probs beyond the end, whatever they are, do not count."""
    _, lengths = ragged_responses(seed)
    mask, scores = slow_mask(lengths, WIDTH), numbers(seed, 12)
    logprobs, ref_logprobs = numbers(seed + 10, 12, WIDTH), numbers(seed + 20, 12, WIDTH)
    expected, expected_kl = slow_rewards(scores, logprobs, ref_logprobs, lengths, 0.3, estimator)
    rewards, non_score_rewards, kl = compute_rewards(
        scores, spoil(logprobs, mask, 1), spoil(ref_logprobs, mask, 2), mask, 0.3, estimator
    )
    assert_close(rewards.numpy(), expected)
    assert_close(kl.numpy(), expected_kl)
    assert_close(non_score_rewards.numpy(), -0.3 * expected_kl)


@pytest.mark.parametrize("whiten_rewards", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 0.0), (1.0, 1.0)])
def test_masked_advantages_equal_loops(gamma: float, lam: float, whiten_rewards: bool):
    """T44: GAE on the states that count; what the critic says beyond them does not leak in."""
    for seed in SEEDS:
        _, lengths = ragged_responses(seed)
        mask, value_mask = masks_of(lengths, WIDTH)
        rewards, values = numbers(seed, 12, WIDTH).masked_fill(~value_mask, 0), numbers(seed + 10, 12, WIDTH)
        ppo = PpoArgs(gamma=gamma, lam=lam, whiten_rewards=whiten_rewards)
        slow = (
            slow_whiten(rewards, [states(n, WIDTH) for n in lengths], keep_mean=True) if whiten_rewards else rewards
        )
        expected = slow_gae(slow, values, lengths, gamma, lam)
        masked_values = np.where(value_mask.numpy(), values.numpy(), 0)
        for given in (values, spoil(values, value_mask, seed)):
            advantages, returns = compute_advantages(rewards, given, mask, value_mask, ppo, torch.clone)
            assert_close(returns.numpy(), expected + masked_values)
            assert_close(advantages.numpy(), slow_whiten(expected, lengths))


@pytest.mark.parametrize("whiten_rewards", [False, True])
def test_processes_whiten_together(whiten_rewards: bool):
    """T44, defect 11: statistics of the whole minibatch, however its rows are shared and however long they are."""
    _, lengths = ragged_responses(0)
    mask, value_mask = masks_of(lengths, WIDTH)
    rewards, values = numbers(0, 12, WIDTH).masked_fill(~value_mask, 0), numbers(1, 12, WIDTH)
    ppo = PpoArgs(whiten_rewards=whiten_rewards)
    slow = slow_whiten(rewards, [states(n, WIDTH) for n in lengths], keep_mean=True) if whiten_rewards else rewards
    expected = slow_whiten(slow_gae(slow, values, lengths, 1.0, 0.95), lengths)

    def share(process: Process) -> torch.Tensor:
        rows = slice(process.process_index * 4, process.process_index * 4 + 4)
        tensors = (tensor[rows] for tensor in (rewards, values, mask, value_mask))
        return compute_advantages(*tensors, ppo, partial(process.reduce, reduction="sum"))[0]

    assert_close(torch.cat(on_processes(3, share)).numpy(), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_losses_and_gradients_equal_loops_whatever_is_in_masked_places(seed: int):
    """T42, T45, section 8, defect 3: loss, clipped share and approxkl are means over what counts."""
    _, lengths = ragged_responses(seed)
    mask, value_mask = masks_of(lengths, WIDTH)
    clean = [numbers(10 * seed + i, 12, WIDTH) / (3 - i) for i in range(3)]
    for loss, counted, slow_lengths, slow in (
        (policy_loss, mask, lengths, slow_policy_loss),
        (value_loss, value_mask, [states(length, WIDTH) for length in lengths], slow_value_loss),
    ):
        new, *others = (spoil(x, counted, i) for i, x in enumerate(clean))
        found = loss(new.requires_grad_(), *others, counted, 0.2, counted.sum())
        found[0].backward()
        *expected, slow_gradient = slow(*clean, slow_lengths, 0.2)
        assert [number.item() for number in found] == pytest.approx(expected)
        assert 0 < found[1] < 1
        assert_close(new.grad.numpy(), slow_gradient)


@pytest.mark.parametrize("micro_batch", [1, 2, 5, 12])
def test_micro_batches_with_the_whole_count_add_up(micro_batch: int):
    """T45: numbers and gradients; without the count, the mean of parts would be something else."""
    _, lengths = ragged_responses(1)
    mask, value_mask = masks_of(lengths, WIDTH)
    new, old, target = (numbers(i, 12, WIDTH) / (3 - i) for i in range(3))
    for loss, counted, slow_lengths, slow in (
        (policy_loss, mask, lengths, slow_policy_loss),
        (value_loss, value_mask, [states(length, WIDTH) for length in lengths], slow_value_loss),
    ):
        leaf, sums, means = new.clone().requires_grad_(), 0.0, []
        for tensors in zip(*(tensor.split(micro_batch) for tensor in (leaf, old, target, counted)), strict=True):
            share = torch.stack(loss(*tensors, 0.2, counted.sum()))
            share[0].backward(retain_graph=True)
            sums = sums + share.detach()
            means.append(loss(*tensors, 0.2, tensors[-1].sum())[0].item())
        *expected, gradient = slow(new, old, target, slow_lengths, 0.2)
        assert sums.tolist() == pytest.approx(expected)
        assert_close(leaf.grad.numpy(), gradient)
        assert (abs(np.mean(means) - expected[0]) < 1e-9) == (micro_batch == 12)


# ---- Learning rate, posts, minibatches, shares of processes ----------------------------------------------------


def test_schedules():
    """1.1: from the full rate, without warm-up; 0 would come after the last step."""
    cosine = [4.0, 2 + math.sqrt(2), 2.0, 2 - math.sqrt(2)]
    expected = {"linear": [4.0, 3.0, 2.0, 1.0], "cosine": cosine, "constant": [4.0] * 4}
    for schedule, rates in expected.items():
        assert [scheduled_lr(4.0, schedule, step, 4) for step in range(4)] == pytest.approx(rates)


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
