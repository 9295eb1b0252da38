"""Chapter 3's mathematics against slow oracles and by hand: masks, rewards, estimators, KL forms, losses, weights."""

import dataclasses
import itertools
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from golden_models import load_json
from oracles import double, numbers, spoil
from rollouts import ALONE, MASK, StandIn, read_tables, rollout_of, updated_stand_in
from torch.testing import assert_close

from ppo_rlhf.rlvr import asynchronous as rlvr_async
from ppo_rlhf.rlvr.algebra import (
    ESTIMATORS,
    IN_GROUPS,
    OF_TOKENS,
    compute_rewards,
    kl_estimate,
    lower_clip_range,
    mismatch,
    off_policy_mask,
    rejection_mask,
    response_mask,
    scores_differ,
    token_losses,
)
from ppo_rlhf.rlvr.arguments import Args, PpoArgs, RewardsArgs
from ppo_rlhf.rlvr.metrics import sample_rows, update_metrics
from ppo_rlhf.rlvr.policy import (
    compute_advantages,
    draw_problems,
    groups_that_differ,
    joined,
    kl_in_loss,
    punish,
    token_rewards,
)

ROWS, LENGTH = 6, 5
GROUPS = torch.tensor([7, 7, 7, 3, 3, 3])  # row 3 counts nowhere


def spoiled(seed: int) -> torch.Tensor:
    return spoil(numbers(seed, ROWS, LENGTH), MASK)


def sources_of(rewards: torch.Tensor) -> dict:
    """What two sources of the score say of each row, and their weights."""
    return {"parts": rewards[:, :1] ** torch.tensor([1, 2]), "weights": (1.0, 0.5)}


# ---- Problems, masks and rewards -------------------------------------------------------------------------------


class Numbered(list):
    """Problems whose prompts are their numbers."""

    def batch(self, rows: list[int], pad_id: int) -> torch.Tensor:
        return torch.tensor(rows).unsqueeze(1)


def test_the_rows_of_a_group_are_of_one_problem():
    """Those of every round have numbers of their own, because what is left over may meet the next round."""
    args, seen = Args(ppo=PpoArgs(samples_per_prompt=3, batch_size=12)), []
    for round_number in (2, 3):
        drawn, groups, prompts, _ = draw_problems(args, Numbered(range(10)), 0, round_number)
        assert prompts[:, 0].equal(drawn)
        seen += zip(groups.tolist(), drawn.tolist(), strict=True)
    assert len({group for group, _ in seen}) == len(set(seen)) == 8 and sorted(seen)[::3] == sorted(set(seen))


def test_a_response_ends_at_the_first_of_its_stop_ids():
    responses = torch.tensor([[5, 9, 8, 7], [8, 8, 8, 8], [5, 6, 7, 5]])
    mask, stopped = response_mask(responses, {9, 8})
    assert mask.int().tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert stopped.tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("shaping", "expected"),
    [
        (RewardsArgs(missing_stop="none", missing_stop_penalty=2.0), [1, 1]),
        (RewardsArgs(missing_stop="replace", missing_stop_penalty=2.0), [1, -2]),
        (RewardsArgs(missing_stop="subtract", missing_stop_penalty=2.0), [1, -1]),
        (RewardsArgs(overlong_buffer=4), [0.5, 0]),
        (RewardsArgs(missing_stop="replace", missing_stop_penalty=2.0, overlong_buffer=4), [0.5, -3]),
    ],
)
def test_what_does_not_end_or_is_long_is_punished(shaping, expected):
    """After 8 tokens with a stop id, and after the greatest length, 10, without one; both have the score 1."""
    assert punish(torch.ones(2), torch.tensor([8, 10]), torch.tensor([True, False]), shaping, 10).tolist() == expected


# ---- Estimators ------------------------------------------------------------------------------------------------


def compact(x: torch.Tensor) -> torch.Tensor:
    """What counts in each row, moved to its beginning."""
    return x.gather(1, (~MASK).int().argsort(dim=1, stable=True))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_step_over_what_is_masked(name):
    """Whatever is there: golden numbers say what they are where everything counts."""
    rewards, values, baselines = spoiled(1), spoiled(2), numbers(3, ROWS)
    settings = {"baselines": baselines, "gamma": 0.9, "lam": 0.8} | sources_of(rewards)
    found = ESTIMATORS[name](rewards, MASK, GROUPS, values=values, **settings)
    expected = ESTIMATORS[name](compact(rewards), compact(MASK), GROUPS, values=compact(values), **settings)
    for one, other in zip(found, expected, strict=True):
        if name == "gae" or one is not None:
            assert_close(compact(one), other, atol=1e-12, rtol=1e-12)
            assert (one[~MASK] == 0).all() and one.dtype == torch.float64 and one[MASK].any()


@pytest.mark.parametrize("name", IN_GROUPS)
@pytest.mark.parametrize("scores", [[], [1.0], [0.1, 0.1, 0.1], [1 / 3 + 1e8] * 5])
def test_groups_of_one_and_of_equal_scores_get_exactly_0(name, scores):
    """And so does a batch of no responses."""
    rewards = torch.tensor(scores, dtype=torch.float64).unsqueeze(1)
    mask, groups = torch.ones_like(rewards).bool(), torch.zeros(len(scores))
    assert (ESTIMATORS[name](rewards, mask, groups, **sources_of(rewards))[0] == 0).all()


@pytest.mark.parametrize("scores", [[-1, 0, 0.5], [0.1, 0.2, -0.3], [100.1, -40.05, -60.05]])
def test_maxrl_is_0_where_the_mean_is_not_above_0_but_for_rounding(scores):
    """There is no share of correct responses: of [0.1, 0.2, -0.3], rounding leaves 1e-17."""
    rewards = double(*scores)[:, None]
    maxrl = partial(ESTIMATORS["maxrl"], rewards, torch.ones_like(rewards).bool(), torch.zeros(3))
    assert (maxrl()[0] == 0).all()
    rewards[0] += 0.01  # a mean that is small, but above rounding
    assert maxrl()[0].any() == (sum(scores) > -0.01)


def test_which_advantages_are_whitened():
    assert {name for name in ESTIMATORS if PpoArgs(advantage=name).whitens} == {
        *("gae", "gdpo", "reinforce++", "reinforce++-baseline")
    }
    assert PpoArgs(advantage="grpo", whiten_advantages=True).whitens
    assert not PpoArgs(advantage="gae", whiten_advantages=False).whitens


# ---- KL: exact enumeration of a policy with three tokens -------------------------------------------------------

ENUMERATION = load_json("verl/kl_enumeration")
SEQUENCES = torch.tensor(list(itertools.product(range(3), repeat=2)))  # all of two tokens
STATES = torch.stack([torch.zeros(9, dtype=torch.long), 1 + SEQUENCES[:, 0]], 1)  # row of the table at each token
EVERYWHERE = torch.ones(9, 2, dtype=torch.bool)


def table(name: str) -> torch.Tensor:
    return torch.tensor(ENUMERATION[name], dtype=torch.float64)


def sequence_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """Log-probs (9, 2) of the tokens of all sequences under a table of logits (4, 3)."""
    logprobs = logits.log_softmax(1)[STATES]  # (9, 2, 3)
    return logprobs.gather(2, SEQUENCES.unsqueeze(2)).squeeze(2)


def exact_kl(logits: torch.Tensor, ref_logits: torch.Tensor) -> torch.Tensor:
    """The script's own sum over the vocabulary, at each token (9, 2)."""
    return read_tables(logits[STATES], ref_logits[STATES], SEQUENCES)[2]


def golden_gradient(name: str) -> torch.Tensor:
    (stored,) = [one for where in ("on_policy", "off_policy") for one in ENUMERATION[where] if one["name"] == name]
    return torch.tensor(stored["grad"], dtype=torch.float64)


def close_gradients(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert_close(found, expected, atol=1e-9, rtol=0)


def expected_gradient(losses: torch.Tensor, logits: torch.Tensor, sampler: torch.Tensor) -> torch.Tensor:
    """Of the sum of the losses (9, 2) over a sequence, when that policy samples."""
    probs = sequence_logprobs(sampler).sum(1, keepdim=True).exp().detach()  # (9, 1)
    return torch.autograd.grad((probs * losses).sum(), logits)[0]


def gradient_as_loss(name: str, sampler: torch.Tensor) -> torch.Tensor:
    logits, ref_logits = table("logits").requires_grad_(), table("ref_logits")
    mb = rollout_of(EVERYWHERE, logprobs=sequence_logprobs(sampler), ref_logprobs=sequence_logprobs(ref_logits))
    shaping = RewardsArgs(kl_loss_coef=1.0, kl_loss_estimator=name)
    losses = kl_in_loss(sequence_logprobs(logits), mb, exact_kl(logits, ref_logits), shaping)
    return expected_gradient(losses, logits, sampler)


def gradient_in_reward(name: str, scale: float = 1.0, gamma: float = 1.0) -> torch.Tensor:
    """scale: of the way from the reference to the policy."""
    ref_logits = table("ref_logits")
    logits = (ref_logits + scale * (table("logits") - ref_logits)).requires_grad_()
    logprobs, exact = sequence_logprobs(logits), exact_kl(logits, ref_logits).detach()
    old = {"logprobs": logprobs.detach(), "ref_logprobs": sequence_logprobs(ref_logits), "exact_kl": exact}
    rewards, _, _ = token_rewards(rollout_of(EVERYWHERE, **old), 1.0, name)
    advantages, _ = ESTIMATORS["reinforce++"](rewards, EVERYWHERE, torch.arange(9), gamma=gamma)
    losses, _, _ = token_losses(logprobs, old["logprobs"], advantages, EVERYWHERE, "reinforce", low=0.2, high=0.2)
    return expected_gradient(losses, logits, logits)


@pytest.mark.parametrize("name", ["abs", "k2", "k3"])
def test_near_the_reference_k2_and_k3_in_the_reward_do_not_pull_back(name):
    for near in ENUMERATION["near_reference"]:
        ratio = gradient_in_reward(name, near["scale"]).norm() / near["norm_true"]
        assert ratio.item() == pytest.approx(near[f"{name}_in_reward_over_true"], abs=1e-8)


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3", "k1+", "k2+", "k3+"])
def test_gradient_of_the_kl_in_the_loss(name):
    """With a plus, that of the KL of the next token, whichever policy samples."""
    on, off = "true gradient, prefixes held fixed", "true gradient, prefixes of the sampler held fixed"
    if not name.endswith("+"):
        on, off = f"{name} per token as loss", f"{name} as loss, no correction"
    close_gradients(gradient_as_loss(name, table("logits")), golden_gradient(on))
    close_gradients(gradient_as_loss(name, table("sampler_logits")), golden_gradient(off))


@pytest.mark.parametrize("correction", ["decoupled", "bypass"])
@pytest.mark.parametrize("name", ["abs", "k2", "k3", "k1+", "k2+", "k3+", "full"])
def test_gradient_of_the_kl_in_the_loss_with_a_sampler_that_is_not_the_policy_of_the_clip(name, correction):
    """Three policies over three tokens: mu has sampled, the learner was prox when the batch came, and is new."""
    mu, prox, ref = double([0.5, 0.25, 0.25], [0.2, 0.5, 0.3], [0.3, 0.3, 0.4])
    logits, drawn = double(0.4, -0.7, 0.1), torch.tensor([0, 0, 1, 2])  # four rows: each token as often as mu says
    new = logits.softmax(0)
    d, old = torch.log(new / ref), prox if correction == "decoupled" else mu  # as which policy a sampled token counts
    # With a plus, or over the vocabulary, the gradient is that of KL(new || ref).
    weighted = {"abs": old * d.sign(), "k2": old * d, "k3": old * (1 - ref / new)}.get(name, new * d)

    def read(table, tokens, mask):
        logprobs = table.log_softmax(0)
        exact = (logprobs.exp() * (logprobs - ref.log())).sum()
        return logprobs[tokens[:, -1:]], exact.expand(mask.shape)

    policies = {"sampler_logprobs": mu, "logprobs": prox, "ref_logprobs": ref}
    of_tokens = {field: p.log()[drawn].unsqueeze(1) for field, p in policies.items()}
    tokens = drawn.unsqueeze(1).expand(4, 2)
    batch = rollout_of(torch.ones(4, 1, dtype=torch.bool), query_responses=tokens, **of_tokens)
    args = rlvr_async.Args(
        correction=correction,
        correction_cap=0.9 if name == "full" else 9.0,  # no weight is on the exact KL
        ppo=PpoArgs(advantage="reinforce++"),
        rewards=RewardsArgs(kl_loss_coef=1.0, kl_loss_estimator=name),
    )
    network = StandIn(logits, read)
    updated_stand_in(network, batch, torch.zeros(4, 1, dtype=torch.float64), args)
    close_gradients(network.table.grad, weighted - new * weighted.sum())


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3", "full"])
def test_gradient_of_the_kl_in_the_reward(name):
    """Only k1 has the gradient of the KL. Others point away from it, and the exact KL needs a loss besides."""
    gradient, true = gradient_in_reward(name), golden_gradient("true gradient of the sequence KL")
    close_gradients(gradient, golden_gradient(f"{name} in the reward, gamma = lambda = 1"))
    if name == "k1":
        close_gradients(gradient, true)
        own_cost = golden_gradient("k1 in the reward, only the token's own cost (gamma lambda = 0)")
        close_gradients(gradient_in_reward("k1", gamma=0.0), own_cost)
    else:
        assert (gradient * true).sum() < 0
    if name == "full":
        close_gradients(gradient_as_loss("full", table("logits")) + gradient, true)


@pytest.mark.parametrize("advantage", OF_TOKENS)
@pytest.mark.parametrize("place", ["where it is earned", "half of it later", "on the last token", "too soon"])
def test_gradient_of_rewards_of_tokens(place, advantage):
    """That of their expected sum, wherever they are placed, and whatever a critic says of the text so far.

    Each beginning earns something. A score has a part besides, which belongs to no token. Only what is placed before
    the token that earns it teaches something else.
    """
    logits = table("logits").requires_grad_()
    earned = torch.stack([numbers(1, 3)[SEQUENCES[:, 0]], numbers(2, 9)], 1)  # (9, 2)
    scores = earned.sum(1) + numbers(3, 9)
    logprobs = sequence_logprobs(logits)
    true = torch.autograd.grad((logprobs.sum(1).exp() * scores).sum(), logits, retain_graph=True)[0]
    first = {"where it is earned": 1, "half of it later": 0.5, "on the last token": 0, "too soon": 1}[place]
    token_scores = torch.stack([earned[:, 0] * first, earned[:, 0] * (1 - first) + earned[:, 1]], 1)
    if place == "too soon":
        token_scores = token_scores.flip(1)
    old = {"logprobs": logprobs.detach(), "ref_logprobs": logprobs.detach(), "values": numbers(4, 4)[STATES]}
    mb = rollout_of(EVERYWHERE, scores=scores, token_scores=token_scores, **old)
    rewards, *_ = token_rewards(mb, 1.0, "k1")
    ppo = PpoArgs(advantage=advantage, lam=1.0, whiten_advantages=False, loss="reinforce")
    advantages, _ = compute_advantages(dataclasses.replace(mb, rewards=rewards), ppo)
    losses, *_ = token_losses(logprobs, old["logprobs"], advantages, EVERYWHERE, "reinforce", low=0.2, high=0.2)
    found = -expected_gradient(losses, logits, logits)
    assert torch.allclose(found, true, atol=1e-9, rtol=0) == (place != "too soon")


def test_what_no_token_got_of_a_score_is_on_the_last():
    """In rows with holes, of which one has no token. On the last token, a whole score is the ordinary one."""
    kl, scores, some = spoiled(1), numbers(2, ROWS), spoiled(3)
    at = {"mask": MASK, "kl_coef": 0.3, "name": "k1"}
    whole, penalty, _ = compute_rewards(scores, kl, torch.zeros_like(kl), **at)
    found, _, _ = compute_rewards(scores, kl, torch.zeros_like(kl), **at, token_scores=some)
    last = [4, 1, 3, None, 3, 0]
    for row, place in enumerate(last):
        placed = [0.0 if not own else float(x) for own, x in zip(MASK[row], some[row], strict=True)]
        if place is not None:
            placed[place] += float(scores[row]) - sum(placed)
        assert (found - penalty)[row].tolist() == pytest.approx(placed, abs=1e-12)
    everything = torch.zeros_like(kl)
    for row, place in enumerate(last):
        if place is not None:
            everything[row, place] = scores[row]
    assert compute_rewards(scores, kl, torch.zeros_like(kl), **at, token_scores=everything)[0].equal(whole)


TAUGHT = "true gradient of the sequence KL", "true gradient, prefixes held fixed"  # with gamma 1, and with 0


def gradient_from_teacher(name: str, gamma: float, *, has_baseline: bool) -> torch.Tensor:
    """Steps 5 to 7 with a teacher in place of the reference, over all sequences.

    has_baseline: whether the exact KL of its own token is left out of an advantage.
    """
    logits, ref_logits = table("logits").requires_grad_(), table("ref_logits")
    ppo = PpoArgs(advantage="reinforce++", whiten_advantages=False, gamma=gamma, loss="reinforce")
    args = Args(rewards=RewardsArgs(teacher="a model", kl_estimator=name), ppo=ppo)
    logprobs, exact = sequence_logprobs(logits), exact_kl(logits, ref_logits)
    old = {"logprobs": logprobs.detach(), "ref_logprobs": sequence_logprobs(ref_logits), "exact_kl": exact.detach()}
    mb = rollout_of(EVERYWHERE, **old)
    rewards, _, _ = token_rewards(mb, args.rewards.reward_kl, name)
    baseline = -old["exact_kl"] if has_baseline else None
    advantages, _ = compute_advantages(dataclasses.replace(mb, rewards=rewards), ppo, baseline=baseline)
    is_left_out = name == "full" and gamma == 0 and has_baseline  # nothing else is in the advantages
    assert (advantages.abs().max().item() < 1e-12) == is_left_out
    losses, _, _ = token_losses(logprobs, old["logprobs"], advantages, EVERYWHERE, "reinforce", low=0.2, high=0.2)
    in_loss = args.rewards.loss_kl[0] * kl_in_loss(logprobs, mb, exact, args.rewards)
    return expected_gradient(losses + in_loss, logits, logits)


@pytest.mark.parametrize("has_baseline", [True, False])
@pytest.mark.parametrize("name", ["k1", "full"])
def test_gradient_of_learning_from_a_teacher(name, has_baseline):
    """With gamma 1, that of the KL of whole responses; with 0, that of the KL at each token, prefixes held fixed.

    The exact KL of the token itself is a baseline that changes neither, whether the rest is sampled or exact.
    """
    of_sequences, of_tokens = (golden_gradient(true) for true in TAUGHT)
    assert (of_sequences - of_tokens).norm() > 0.1 * of_sequences.norm()
    close_gradients(gradient_from_teacher(name, 1.0, has_baseline=has_baseline), of_sequences)
    close_gradients(gradient_from_teacher(name, 0.0, has_baseline=has_baseline), of_tokens)


def test_a_baseline_in_closed_form_is_for_an_exact_kl_without_a_critic():
    for name, advantage, has_one in (
        ("full", "reinforce++", True),
        ("full", "gae", False),
        ("k1", "reinforce++", False),
    ):
        shaping = RewardsArgs(teacher="a model", kl_estimator=name)
        assert Args(rewards=shaping, ppo=PpoArgs(advantage=advantage)).has_exact_baseline == has_one


def test_rounding_does_not_choose_the_slope_of_abs():
    """Two passes of one policy, of different shapes, differ by rounding either way."""
    d = double([1e-6, -1e-6, 9e-5, -2e-4, 0.5, -0.5, 0.0]).requires_grad_()
    kl = kl_estimate(d, torch.zeros_like(d), torch.ones_like(d).bool(), "abs")
    assert kl.equal(d.abs())
    assert torch.autograd.grad(kl.sum(), d)[0].tolist() == [[0, 0, 0, -1, 1, -1, 0]]


def test_k3_is_exact_where_two_policies_hardly_differ():
    """In float32, at the distances that two ways to compute one policy have."""
    d = torch.tensor([[1e-4, -1e-4, 1e-5, -1e-5]])
    zeros, mask, exact = torch.zeros(1, 4), torch.ones(1, 4).bool(), d.double()
    k3 = kl_estimate(d, zeros, mask, "k3")
    assert_close(k3.double(), exact**2 / 2 - exact**3 / 6, rtol=0.02, atol=0)
    assert mismatch(d, zeros, mask)["k3"].item() == pytest.approx((exact**2).mean().item() / 2, rel=0.02)


# ---- Losses ----------------------------------------------------------------------------------------------------


def test_cispo_has_a_lower_bound_only_if_one_is_asked_for():
    """Golden numbers of verl have one."""
    new, mask = double([0.05, 0.9, 5.0]).log(), torch.ones(1, 3).bool()
    bounds = {"low": lower_clip_range("cispo", None), "high": PpoArgs().cliprange_high}
    _, clipped, _ = token_losses(new, torch.zeros(1, 3), torch.ones(1, 3), mask, "cispo", **bounds)
    assert clipped.tolist() == [[False, False, True]]


@pytest.mark.parametrize("loss", ["ppo", "gspo", "dppo"])
@pytest.mark.parametrize(("advantage", "acts"), [(1e-17, False), (-1e-17, False), (1e-9, True), (-1e-9, True)])
def test_no_bound_acts_on_an_advantage_that_is_rounding(loss, advantage, acts):
    """All responses score the same and the KL penalties differ in the 17th digit, as before the first step."""
    ratio = math.log(5 if advantage > 0 else 0.1)
    old, mask = torch.full((1, 2), -1.7, dtype=torch.float64), torch.ones(1, 2).bool()
    bounds = {"low": 0.2, "high": 0.2, "dual_clip": 3.0, "trust_region": 0.1}
    _, *flags = token_losses(old + ratio, old, torch.full_like(old, advantage), mask, loss, **bounds)
    assert [bool(flag.any()) for flag in flags] == [acts, False]


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "ipo"])
def test_an_overflowing_ratio_stays_finite(loss):
    new, mask = torch.tensor([[80.0, 80.0], [-80.0, -80.0]]), torch.ones(2, 2).bool()
    for sign in (1, -1):
        losses, _, _ = token_losses(new, -new, sign * torch.ones(2, 2), mask, loss, low=0.2, high=0.2)
        assert losses.isfinite().all()


# ---- Off-policy, dynamic sampling ------------------------------------------------------------------------------


def test_responses_are_rejected_by_their_product():
    """The products of the ratios are 2, 2 and 1/2."""
    logprobs = torch.tensor([[0.5, 4.0], [2.0, math.nan], [0.5, math.nan]]).log()
    for (low, high), expected in {(0.49, 2.01): [1, 1, 1], (0.6, 2.01): [1, 1, 0], (0.4, 1.9): [0, 0, 1]}.items():
        kept = rejection_mask(logprobs, torch.zeros(3, 2), ~logprobs.isnan(), "product", low, high)
        assert kept.any(1).tolist() == expected and kept[0, 0] == kept[0, 1]


def test_blame_of_unlikely_responses_is_masked():
    """Equation 9 of DeepSeek-V3.2: the means of log(sampler / new) are 0.6, 0.4 and 0.6, the bound is 0.5."""
    gaps = torch.tensor([[1.0, 0.2], [0.4, 0.4], [0.6, math.nan]])
    advantages = torch.tensor([[-1.0, 1.0], [-1.0, -1.0], [-1.0, -1.0]])
    kept = off_policy_mask(-gaps, torch.zeros(3, 2), advantages, ~gaps.isnan(), 0.5)
    assert kept.tolist() == [[False, True], [True, True], [False, True]]


def test_mismatch_is_that_of_valid_tokens():
    """Golden numbers of verl have the other metrics."""
    logprobs, sampler = spoiled(1), spoiled(2)
    found = mismatch(logprobs, sampler, MASK)
    weights = (logprobs - sampler)[MASK].exp()
    assert found["largest_gap"].item() == pytest.approx(weights.log().abs().max().item())
    assert found["ess"].item() == pytest.approx(1 / ((weights / weights.mean()) ** 2).mean().item())
    assert all(value.dim() == 0 and value.isfinite() for value in found.values())


def test_groups_with_a_signal_are_those_whose_scores_differ():
    scores, live = torch.tensor([0.1 * 3, 0.3, 1.0, 0.0, 0.5, 0.5], dtype=torch.float64), MASK.any(1)
    groups = torch.tensor([0, 0, 1, 1, 2, 2])
    assert scores_differ(scores, live, groups).tolist() == [True, True, *[False] * 4]  # .1 * 3 isn't .3; row 3 is out
    rows = rollout_of(raw_scores=scores, scores=scores - torch.arange(6), groups=groups)  # punished, each otherwise
    assert groups_that_differ(rows, ALONE).groups.tolist() == [0, 0]


def test_rows_of_several_rounds_have_padding_before_shorter_queries():
    shorter = rollout_of(MASK[4:], query_responses=torch.tensor([[5, 6, 7, 8, 9]] * 2))  # no query
    both = joined([rollout_of(MASK[:2]), shorter], pad_id=3).query_responses
    assert both.tolist() == [[1] * 6] * 2 + [[3, 5, 6, 7, 8, 9]] * 2


# ---- Metrics ---------------------------------------------------------------------------------------------------


def test_metrics_are_those_of_what_counts():
    """Response 3 has no score, response 5 is rejected. The second of three minibatches has no token."""
    kept = MASK & (torch.arange(ROWS) != 5).unsqueeze(1)
    kl, values, returns = (numbers(seed, ROWS, LENGTH) for seed in range(3))
    right = torch.tensor([1, 0, 1, 0, 1, 1]).bool()
    made = rollout_of(
        kl=kl.masked_fill(~MASK, 0),
        values=values,
        returns=returns + 3,
        advantages=torch.ones_like(kl).masked_fill(~MASK, 0),
        right=right,
        groups=torch.arange(ROWS) // 2,
        **dict.fromkeys(("rewards", "non_score_rewards"), torch.zeros_like(kl)),
    )
    batch = dataclasses.replace(made, mask=kept)
    steps = {"tokens": [4, 0, 8], "val/ratio": [1.1, 0, 1.3], "squared_ratio_gap": [0.02, 0, 0.12]}
    steps |= {"squared_ratio_gap of new": [0.02, 0, 0.12], "policy/grad_norm": [1.0, 0, 2.0]}
    steps = {name: torch.tensor(row, dtype=torch.float64) for name, row in steps.items()}
    args = Args(ppo=PpoArgs(advantage="gae"), rewards=RewardsArgs(kl_coef=0.1))
    found = update_metrics(args, made, made, batch, steps, ["verifier"], {}, ALONE)
    errors = (returns + 3 - values)[kept]
    expected = {
        "objective/kl": kl[MASK].sum() / 5,
        "objective/kl_per_token": kl[MASK].mean(),
        "objective/verifiable_correct_rate": 4 / 5,
        "val/groups_all_right": 3 / 5,  # of responses: those of the last two groups, without response 3
        "val/unscorable": 1 / 6,
        "val/mean": values[kept].mean(),
        "val/returns": returns[kept].mean() + 3,
        "val/explained_var": 1 - errors.var(correction=0) / returns[kept].var(correction=0),
        "val/ratio": 1.2,
        "val/ratio_var": 0.07 - 0.2**2,
        "val/first_ratio_gap": 0.02**0.5,
        "policy/grad_norm": 1.0,
    }
    expected = {name: float(value) for name, value in expected.items()}
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-9)


def test_samples_show_the_mean_advantage_of_their_tokens():
    batch = rollout_of(advantages=numbers(1, ROWS, LENGTH).masked_fill(~MASK, 0), problems=torch.arange(ROWS))
    source = SimpleNamespace(texts="abcdef", answers="ABCDEF")
    ids = SimpleNamespace(pad=3, stops=(1,))
    rows = sample_rows(batch, source, SimpleNamespace(decode=str), ids, 6)
    assert [(row["prompt"], row["answer"]) for row in rows] == [*zip("abcd", "ABCD", strict=True)]
    means = [float(own[mask].mean()) if mask.any() else 0 for own, mask in zip(batch.advantages, MASK, strict=True)]
    assert [row["advantage"] for row in rows] == pytest.approx(means[:4], rel=1e-9)
