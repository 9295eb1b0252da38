"""The mathematics of chapter 2 against numbers by hand (H1 to H7) and slow oracles on responses of any length."""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from golden_models import load_json
from torch.testing import assert_close

from ppo_rlhf.lib.lm import episode_noise, has_stop, truncate_at
from ppo_rlhf.lib.models import scheduled_lr
from ppo_rlhf.lib.posts import rouge, trim_padding
from ppo_rlhf.lib.processes import deal, map_rows
from ppo_rlhf.tldr_policy import (
    PpoArgs,
    compute_advantages,
    compute_gae,
    compute_rewards,
    draw_minibatches,
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
GARBAGE = (math.nan, math.inf, -math.inf, 1e30)  # what a masked place may hold


def double(*numbers) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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


def states(length: int, width: int = WIDTH) -> int:
    """How many values of a response count: one more than tokens, where there is a column for it."""
    return length + 1 if length < width else width


def slow_mask(lengths: list[int], width: int = WIDTH) -> torch.Tensor:
    return torch.tensor([[t < length for t in range(width)] for length in lengths])


def masks_of(lengths: list[int], width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    return slow_mask(lengths, width), slow_mask([states(length, width) for length in lengths], width)


def spoil(tensor: torch.Tensor, mask: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """The tensor with NaN, infinities and large numbers in its masked places."""
    picks = torch.randint(0, len(GARBAGE), tensor.shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(mask, tensor, torch.tensor(GARBAGE, dtype=tensor.dtype)[picks])


class Process:
    """One of several processes, which are threads here: `reduce` and `gather` of accelerate.Accelerator."""

    def __init__(self, rank: int, barrier: threading.Barrier, slots: list):
        self.process_index, self.num_processes, self.device = rank, len(slots), torch.device("cpu")
        self.is_main_process = rank == 0
        self._barrier, self._slots = barrier, slots

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._slots[self.process_index] = tensor
        self._barrier.wait()
        tensors = list(self._slots)
        self._barrier.wait()
        return tensors

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        total = sum(self._exchange(tensor))
        return {"sum": total, "mean": total / self.num_processes}[reduction]

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(tensor))


def on_processes(count: int, function: Callable[[Process], object]) -> list:
    """What a function returns on each of so many processes."""
    barrier, slots = threading.Barrier(count, timeout=60), [None] * count

    def run(rank: int) -> object:
        try:
            return function(Process(rank, barrier, slots))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


# ---- Slow oracles: loops over what counts, which never see what stands beyond the end --------------------------


def entries(x, lengths: list[int]) -> list[float]:
    return [float(x[i, t]) for i, length in enumerate(lengths) for t in range(length)]


def slow_mean(x, lengths: list[int]) -> float:
    found = entries(x, lengths)
    return math.fsum(found) / len(found)


def slow_whiten(x, lengths: list[int], keep_mean: bool = False) -> np.ndarray:
    found, whitened = entries(x, lengths), np.zeros(x.shape)
    mean = math.fsum(found) / len(found)
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in found) / len(found) + 1e-8)
    for i, length in enumerate(lengths):
        for t in range(length):
            whitened[i, t] = (float(x[i, t]) - mean) / deviation + (mean if keep_mean else 0)
    return whitened


def slow_rewards(scores, logprobs, ref_logprobs, lengths, kl_coef, estimator) -> tuple[np.ndarray, np.ndarray]:
    """Rewards and divergences; the score stands on the step after the last token, or on the last column."""
    width = logprobs.shape[1]
    rewards, kl = np.zeros(logprobs.shape), np.zeros(logprobs.shape)
    for i, length in enumerate(lengths):
        for t in range(length):
            log_of_inverse = float(ref_logprobs[i, t]) - float(logprobs[i, t])
            kl[i, t] = -log_of_inverse if estimator == "k1" else math.exp(log_of_inverse) - 1 - log_of_inverse
            rewards[i, t] -= kl_coef * kl[i, t]
        rewards[i, length if length < width else width - 1] += float(scores[i])
    return rewards, kl


def slow_gae(rewards, values, lengths: list[int], gamma: float, lam: float) -> np.ndarray:
    """The closed form on the states of each response: A_t = sum over k of (gamma lam)^k delta_{t+k}."""
    advantages = np.zeros(values.shape)
    for i, length in enumerate(lengths):
        last = states(length, values.shape[1])
        for t in range(last):
            for k in range(last - t):
                after = float(values[i, t + k + 1]) if t + k + 1 < last else 0.0
                delta = float(rewards[i, t + k]) + gamma * after - float(values[i, t + k])
                advantages[i, t] += (gamma * lam) ** k * delta
    return advantages


def slow_policy_loss(new, old, advantages, lengths, cliprange) -> tuple[float, float, float, np.ndarray]:
    """Loss, clipped share, approxkl, and the gradient of the loss in the new log-probs."""
    losses, clipped, squares, gradient = [], [], [], np.zeros(new.shape)
    count = sum(lengths)
    for i, length in enumerate(lengths):
        for t in range(length):
            difference, advantage = float(new[i, t]) - float(old[i, t]), float(advantages[i, t])
            ratio = math.exp(difference)
            free = -advantage * ratio
            bound = -advantage * min(max(ratio, 1 - cliprange), 1 + cliprange)
            losses.append(max(free, bound))
            clipped.append(bound > free)
            squares.append(difference**2)
            gradient[i, t] = 0.0 if bound > free else -advantage * ratio / count
    return np.mean(losses), np.mean(clipped), np.mean(squares) / 2, gradient


def slow_value_loss(new, old, returns, lengths, cliprange) -> tuple[float, float, np.ndarray]:
    """Loss, clipped share, and the gradient of the loss in the new values; lengths: of the states."""
    losses, clipped, gradient = [], [], np.zeros(new.shape)
    for i, length in enumerate(lengths):
        for t in range(length):
            value, before, target = float(new[i, t]), float(old[i, t]), float(returns[i, t])
            free, bound = (
                (value - target) ** 2,
                (min(max(value, before - cliprange), before + cliprange) - target) ** 2,
            )
            losses.append(max(free, bound) / 2)
            clipped.append(bound > free)
            gradient[i, t] = 0.0 if bound > free else (value - target) / sum(lengths)
    return np.mean(losses), np.mean(clipped), gradient


# ---- By hand: the golden numbers H2 to H7 ----------------------------------------------------------------------

VALUES = [0.1, 0.2, 0.3, 0.4, 0.5]
# Response, truncated, tokens that count, values that count, index of the score, and the score where the model says 3.
H2 = {
    "ends early": ([7, 8, EOS, 9, 9], [7, 8, EOS, PAD, PAD], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], 3, 3.0),
    "does not end": ([7, 8, 9, 9, 9], [7, 8, 9, 9, 9], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1], 4, -1.0),
    "ends at T - 1": ([7, 8, 9, 9, EOS], [7, 8, 9, 9, EOS], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1], 4, 3.0),
}


@pytest.mark.parametrize("name", H2)
def test_h2_truncation_masks_and_score(name: str):
    """T36, T39, T40, T41, T43."""
    response, truncated, tokens, values, index, score = H2[name]
    responses = truncate_at(torch.tensor([response]), EOS, 0, PAD)
    assert responses.tolist() == [truncated]
    mask, value_mask = response_masks(responses, PAD)
    assert mask.dtype == value_mask.dtype == torch.bool
    assert (mask.int().tolist(), value_mask.int().tolist()) == ([tokens], [values])
    scores = punish_missing_eos(double(3.0), has_stop(responses, EOS, 0), "replace", 1.0)
    assert scores.tolist() == [score]
    rewards, _, _ = compute_rewards(scores, *torch.zeros(2, 1, 5, dtype=torch.float64), mask, 0.05, "k1")
    assert rewards.tolist() == [[score if t == index else 0.0 for t in range(5)]]


def h3_masks() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([[True, True, True, False, False]]), torch.tensor([[True, True, True, True, False]])


def test_h3_rewards_advantages_and_returns():
    """T42, T43, T44; and T52: whitening with the variance of a sample, as TRL has it, is something else."""
    mask, value_mask = h3_masks()
    zeros = torch.zeros(1, 5, dtype=torch.float64)
    rewards, _, kl = compute_rewards(double(1.0), zeros, zeros, mask, 0.05, "k1")
    assert_close(rewards, double([0, 0, 0, 1.0, 0]))
    assert_close(kl, zeros)
    whitened, returns = compute_advantages(rewards, double(VALUES), mask, value_mask, PpoArgs(), torch.clone)
    assert_close(returns, double([0.899675, 0.9365, 0.97, 1.0, 0.0]), atol=1e-12, rtol=0)
    masked_values = double([0.1, 0.2, 0.3, 0.4, 0.0])
    assert_close(returns - masked_values, double([0.799675, 0.7365, 0.67, 0.6, 0.0]), atol=1e-12, rtol=0)
    assert_close(whitened, double([1.21414177, 0.02093348, -1.23507524, 0, 0]), atol=5e-9, rtol=0)

    of_trl = double([0.99134319, 0.01709212, -1.00843531, 0, 0])
    assert (whitened - of_trl).abs().max() > 0.2
    advantages = np.array([0.799675, 0.7365, 0.67])
    with_sample_variance = (advantages - advantages.mean()) / np.sqrt(advantages.var(ddof=1) + 1e-8)
    assert_close(with_sample_variance, of_trl[0, :3].numpy(), atol=5e-9, rtol=0)  # so these are TRL's numbers


def test_h3b_a_response_that_does_not_end():
    mask = torch.ones(1, 5, dtype=torch.bool)
    zeros = torch.zeros(1, 5, dtype=torch.float64)
    rewards, _, _ = compute_rewards(double(-1.0), zeros, zeros, mask, 0.05, "k1")
    whitened, returns = compute_advantages(rewards, double(VALUES), mask, mask, PpoArgs(), torch.clone)
    expected = double([-0.85077187, -1.0008125, -1.15875, -1.325, -1.5])
    assert_close(returns - double(VALUES), expected, atol=5e-9, rtol=0)
    assert_close(whitened, torch.from_numpy(slow_whiten(expected, [5])), atol=1e-7, rtol=0)


@pytest.mark.parametrize("filler", [1.0, math.nan, -math.inf])
def test_h3c_padding_adds_no_entropy(filler: float):
    """T42: the original's filler 1.0 made it 4."""
    mask = h3_masks()[0]
    minus_logprobs = -double([-2.0, -2.0, -2.0, filler, filler])
    assert masked_mean(minus_logprobs, mask, torch.tensor(1)).item() == 6.0
    if filler == 1.0:
        assert minus_logprobs.sum().item() == 4.0


def test_h4_pairwise_loss():
    """T25."""
    chosen, rejected = double(1.0, 0.2), double(0.5, 0.9)
    assert pairwise_losses(chosen, rejected).mean().item() == pytest.approx(0.78863152, abs=5e-9)
    assert prefers_chosen(chosen, rejected).tolist() == [True, False]


def test_h5_a_token_weighs_the_same_in_any_micro_batch():
    """T45, defect 2: the mean of means of sequences is another number."""
    losses, mask = double([1.0, 1, 0, 0], [0.0, 0, 0, 0]), slow_mask([2, 4], 4)
    count = mask.sum()
    assert masked_mean(losses, mask, mask.sum()).item() == pytest.approx(1 / 3)
    parts = [masked_mean(losses[i : i + 1], mask[i : i + 1], count) for i in range(2)]
    assert sum(parts).item() == pytest.approx(1 / 3)
    means = [masked_mean(losses[i : i + 1], mask[i : i + 1], mask[i : i + 1].sum()).item() for i in range(2)]
    assert np.mean(means) == 0.5


def test_h6_learning_rate():
    """T46."""
    assert scheduled_lr(3e-6, "linear", 0, 1953) == 3e-6
    assert scheduled_lr(3e-6, "linear", 1952, 1953) == pytest.approx(1.5361e-9, rel=2e-5)


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.5), ("k3", 0.10653066)])
def test_h7_estimators_of_the_divergence(estimator: str, expected: float):
    rewards, non_score_rewards, kl = compute_rewards(
        double(2.0), double([-1.0, -1.0]), double([-1.5, -1.5]), torch.ones(1, 2, dtype=torch.bool), 0.1, estimator
    )
    assert_close(kl, double([expected, expected]), atol=5e-9, rtol=0)
    assert_close(non_score_rewards, double([-0.1 * expected] * 2), atol=5e-9, rtol=0)
    assert_close(rewards, double([-0.1 * expected, 2 - 0.1 * expected]), atol=5e-9, rtol=0)


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


def test_the_gradient_of_k3_vanishes_near_the_reference():
    """A tenth of the distance: a tenth of the true gradient, and a hundredth of that of k3."""
    logits, ref_logits = (double(*ENUMERATION[name]) for name in ("logits", "ref_logits"))
    for golden in ENUMERATION["near_reference"]:
        between = ref_logits + golden["scale"] * (logits - ref_logits)
        kl, true = divergence_gradient(between, ref_logits)
        assert (kl, true.norm().item()) == pytest.approx((golden["kl"], golden["norm_true"]), rel=1e-9)
        for estimator in ("k1", "k3"):
            gradient = penalty_gradient(between, ref_logits, estimator)
            share = (gradient.norm() / true.norm()).item()
            assert share == pytest.approx(golden[f"{estimator}_in_reward_over_true"], rel=1e-6)
            assert cosine(gradient, true) == pytest.approx(golden[f"{estimator}_in_reward_cos"], abs=1e-6)
    near, nearer = (
        penalty_gradient(ref_logits + scale * (logits - ref_logits), ref_logits, "k3").norm().item()
        for scale in (1e-2, 1e-3)
    )
    assert near / nearer == pytest.approx(100, rel=0.05)


# ---- Masks, and the end-of-text trick --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_masks_of_ragged_responses_equal_loops(seed: int):
    """T40, T41."""
    responses, lengths = ragged_responses(seed)
    mask, value_mask = response_masks(torch.tensor(responses), PAD)
    assert torch.equal(mask, slow_mask(lengths))
    assert torch.equal(value_mask, slow_mask([states(length) for length in lengths]))


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
    x, mask = numbers(seed, 12, WIDTH), slow_mask(lengths)
    expected = slow_mean(x, lengths)
    assert masked_mean(spoil(x, mask), mask, mask.sum()).item() == pytest.approx(expected)
    assert masked_mean(x, mask, torch.tensor(100)).item() == pytest.approx(expected * sum(lengths) / 100)


@pytest.mark.parametrize("keep_mean", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_masked_whiten_equals_a_loop(seed: int, keep_mean: bool):
    """T44: what does not count is 0 afterwards, also where the mean is added back."""
    _, lengths = ragged_responses(seed)
    x, mask = 3 * numbers(seed, 12, WIDTH) - 7, slow_mask(lengths)
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
    mask, scores = slow_mask(lengths), numbers(seed, 12)
    logprobs, ref_logprobs = numbers(seed + 10, 12, WIDTH), numbers(seed + 20, 12, WIDTH)
    expected, expected_kl = slow_rewards(scores, logprobs, ref_logprobs, lengths, 0.3, estimator)
    rewards, non_score_rewards, kl = compute_rewards(
        scores, spoil(logprobs, mask, 1), spoil(ref_logprobs, mask, 2), mask, 0.3, estimator
    )
    assert_close(rewards.numpy(), expected)
    assert_close(kl.numpy(), expected_kl)
    assert_close(non_score_rewards.numpy(), -0.3 * expected_kl)


@pytest.mark.parametrize("end", [0, 3, WIDTH - 2, WIDTH - 1, None])
def test_the_score_stands_after_the_last_token(end: int | None):
    """T43. end: index of the end-of-text token. At T - 1, or nowhere, there is no step after: the last column."""
    length = WIDTH if end is None else end + 1
    logprobs = torch.zeros(1, WIDTH, dtype=torch.float64)
    rewards, _, _ = compute_rewards(double(2.5), logprobs, logprobs, slow_mask([length]), 0.05, "k1")
    place = WIDTH - 1 if end is None or end == WIDTH - 1 else end + 1
    assert rewards.nonzero().tolist() == [[0, place]]
    assert rewards.sum().item() == 2.5


@pytest.mark.parametrize("whiten_rewards", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 0.0), (1.0, 1.0)])
def test_masked_advantages_equal_loops(gamma: float, lam: float, whiten_rewards: bool):
    """T44: GAE on the states that count; what the critic says beyond them does not leak in."""
    for seed in SEEDS:
        _, lengths = ragged_responses(seed)
        mask, value_mask = masks_of(lengths)
        rewards, values = numbers(seed, 12, WIDTH).masked_fill(~value_mask, 0), numbers(seed + 10, 12, WIDTH)
        ppo = PpoArgs(gamma=gamma, lam=lam, whiten_rewards=whiten_rewards)
        slow = slow_whiten(rewards, [states(n) for n in lengths], keep_mean=True) if whiten_rewards else rewards
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
    mask, value_mask = masks_of(lengths)
    rewards, values = numbers(0, 12, WIDTH).masked_fill(~value_mask, 0), numbers(1, 12, WIDTH)
    ppo = PpoArgs(whiten_rewards=whiten_rewards)
    slow = slow_whiten(rewards, [states(n) for n in lengths], keep_mean=True) if whiten_rewards else rewards
    expected = slow_whiten(slow_gae(slow, values, lengths, 1.0, 0.95), lengths)

    def share(process: Process) -> torch.Tensor:
        rows = slice(process.process_index * 4, process.process_index * 4 + 4)
        tensors = (tensor[rows] for tensor in (rewards, values, mask, value_mask))
        return compute_advantages(*tensors, ppo, partial(process.reduce, reduction="sum"))[0]

    assert_close(torch.cat(on_processes(3, share)).numpy(), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_losses_equal_loops(seed: int):
    """T45, section 8: loss, clipped share and approxkl are means over what counts."""
    _, lengths = ragged_responses(seed)
    mask, value_mask = masks_of(lengths)
    new, old, target = (numbers(10 * seed + i, 12, WIDTH) / (3 - i) for i in range(3))
    loss, clipfrac, approxkl = policy_loss(new, old, target, mask, 0.2, mask.sum())
    *expected, _ = slow_policy_loss(new, old, target, lengths, 0.2)
    assert [loss.item(), clipfrac.item(), approxkl.item()] == pytest.approx(expected)
    assert 0 < clipfrac < 1
    loss, clipfrac = value_loss(new, old, target, value_mask, 0.2, value_mask.sum())
    *expected, _ = slow_value_loss(new, old, target, [states(length) for length in lengths], 0.2)
    assert [loss.item(), clipfrac.item()] == pytest.approx(expected)
    assert 0 < clipfrac < 1


def loss_and_gradient(loss: Callable, new: torch.Tensor, *others: torch.Tensor) -> tuple[float, torch.Tensor]:
    new = new.clone().requires_grad_()
    value = loss(new, *others)[0]
    value.backward()
    return value.item(), new.grad


@pytest.mark.parametrize("seed", SEEDS)
def test_garbage_in_masked_places_reaches_neither_loss_nor_gradient(seed: int):
    """T42, defect 3: NaN and infinities there change nothing, and the gradient there is 0."""
    _, lengths = ragged_responses(seed)
    mask, value_mask = masks_of(lengths)
    clean = [numbers(10 * seed + i, 12, WIDTH) / (3 - i) for i in range(3)]

    value, gradient = loss_and_gradient(
        lambda *tensors: policy_loss(*tensors, mask, 0.2, mask.sum()),
        *(spoil(x, mask, i) for i, x in enumerate(clean)),
    )
    expected, _, _, slow_gradient = slow_policy_loss(*clean, lengths, 0.2)
    assert value == pytest.approx(expected)
    assert_close(gradient.numpy(), slow_gradient)
    assert gradient[~mask].eq(0).all()

    value, gradient = loss_and_gradient(
        lambda *tensors: value_loss(*tensors, value_mask, 0.2, value_mask.sum()),
        *(spoil(x, value_mask, i) for i, x in enumerate(clean)),
    )
    expected, _, slow_gradient = slow_value_loss(*clean, [states(length) for length in lengths], 0.2)
    assert value == pytest.approx(expected)
    assert_close(gradient.numpy(), slow_gradient)
    assert gradient[~value_mask].eq(0).all()


@pytest.mark.parametrize("micro_batch", [1, 2, 5, 12])
def test_micro_batches_with_the_whole_count_add_up(micro_batch: int):
    """T45: numbers and gradients; without the count, the mean of parts would be something else."""
    _, lengths = ragged_responses(1)
    mask, value_mask = masks_of(lengths)
    new, old, target = (numbers(i, 12, WIDTH) / (3 - i) for i in range(3))
    for loss, counted, slow_lengths, slow in (
        (policy_loss, mask, lengths, slow_policy_loss),
        (value_loss, value_mask, [states(length) for length in lengths], slow_value_loss),
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


def longest_common(a: list[str], b: list[str]) -> int:
    if not a or not b:
        return 0
    if a[-1] == b[-1]:
        return longest_common(a[:-1], b[:-1]) + 1
    return max(longest_common(a[:-1], b), longest_common(a, b[:-1]))


def slow_rouge(response: str, reference: str) -> dict[str, float]:
    """Words are what stands between spaces."""
    ours, theirs = response.split(), reference.split()

    def f_measure(common: int, of_ours: int, of_theirs: int) -> float:
        return 2 * common / (of_ours + of_theirs) if common else 0.0

    scores = {"rougeL": f_measure(longest_common(ours, theirs), len(ours), len(theirs))}
    for n in (1, 2):
        first, second = ([tuple(w[i : i + n]) for i in range(len(w) - n + 1)] for w in (ours, theirs))
        common = sum(min(first.count(gram), second.count(gram)) for gram in set(first))
        scores[f"rouge{n}"] = f_measure(common, len(first), len(second))
    return scores


def test_rouge_by_hand():
    """T23: two of three words, one of two pairs, and the same two words in order. No stemming: cats are no cat."""
    scores = rouge(["the cat sat", "cats", ""], ["the cat ate", "cat", "a reference"])
    assert scores == pytest.approx({"rouge1": 2 / 9, "rouge2": 1 / 6, "rougeL": 2 / 9})


def test_rouge_is_the_mean_over_examples():
    """T23, defect 14."""
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(["we", "saw", "my", "dog", "run"], n)) for n in random.integers(0, 7, 40)]
    responses, references = texts[:20], texts[20:]
    found = [slow_rouge(*pair) for pair in zip(responses, references, strict=True)]
    expected = {name: np.mean([row[name] for row in found]) for name in ("rouge1", "rouge2", "rougeL")}
    assert rouge(responses, references) == pytest.approx(expected)
    assert len({round(value, 6) for value in expected.values()}) == 3
