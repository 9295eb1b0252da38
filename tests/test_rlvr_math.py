"""Chapter 3's mathematics against slow oracles and by hand: masks, rewards, estimators, KL forms, losses, weights."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from golden_models import load_json
from oracles import on_processes
from torch.testing import assert_close

from ppo_rlhf.rlvr import asynchronous as rlvr_async
from ppo_rlhf.rlvr.algebra import (
    ESTIMATORS,
    IN_GROUPS,
    Batch,
    Rollout,
    aggregate,
    kl_estimate,
    lower_clip_range,
    mismatch,
    off_policy_mask,
    rejection_mask,
    response_mask,
    scores_differ,
    token_losses,
    value_losses,
    whiten,
)
from ppo_rlhf.rlvr.arguments import Args, PpoArgs, RewardsArgs
from ppo_rlhf.rlvr.policy import (
    ActorCritic,
    Correction,
    Reading,
    compute_advantages,
    kl_in_loss,
    make_batch,
    policy_losses,
    punish,
    token_rewards,
    update,
)

ROWS, LENGTH = 6, 5
MASK = torch.tensor(
    [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 0], [1, 0, 0, 0, 0]]
)
MASK = MASK.bool()
GROUPS = torch.tensor([7, 7, 7, 3, 3, 3])  # row 3 counts nowhere


def numbers(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape or (ROWS, LENGTH), generator=generator, dtype=torch.float64)


def spoiled(x: torch.Tensor, mask: torch.Tensor = MASK) -> torch.Tensor:
    return x.masked_fill(~mask, math.nan)


def sources_of(rewards: torch.Tensor) -> dict:
    """What two sources of the score say of each row, and their weights."""
    return {"parts": rewards[:, :1] ** torch.tensor([1, 2]), "weights": (1.0, 0.5)}


def rollout_of(mask: torch.Tensor = MASK, **fields: torch.Tensor) -> Rollout:
    """A rollout with these fields, and nothing in the others; responses alone, without prompts."""
    rows = len(mask)
    given = {field.name: torch.zeros(mask.shape, dtype=torch.float64) for field in dataclasses.fields(Rollout)}
    given |= dict.fromkeys(("raw_scores", "scores", "baselines"), torch.zeros(rows, dtype=torch.float64))
    given |= dict.fromkeys(("problems", "groups", "versions"), torch.zeros(rows, dtype=torch.long))
    given |= {"parts": torch.zeros(rows, 1), "stopped": torch.ones(rows, dtype=torch.bool)}
    given |= {"query_responses": torch.ones(rows, 1 + mask.shape[1], dtype=torch.long)}
    return Rollout(**given | {"mask": mask, "loss_mask": mask} | fields)


def batch_from(
    correction: Correction, rewards: torch.Tensor, estimate: tuple[torch.Tensor, torch.Tensor], number: int = 0
) -> Batch:
    """The batch of an update. rewards: in place of the KL and its penalty, too. estimate: advantages and returns."""
    return make_batch(
        correction,
        rewards=rewards,
        non_score_rewards=rewards,
        kl=rewards,
        advantages=estimate[0],
        returns=estimate[1],
        number=number,
    )


ALONE = SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1, process_index=0)


def setup_of(args: Args, pad: int, accelerator=ALONE) -> SimpleNamespace:
    """What `update` reads of a Setup."""
    return SimpleNamespace(args=args, ids=SimpleNamespace(pad=pad), accelerator=accelerator)


class StandIn(torch.nn.Module):
    """In place of a policy: parameters, and how log-probs of responses, and exact KLs, are read from them."""

    critic = None

    def __init__(self, parameters: torch.Tensor, read: Callable):
        super().__init__()
        self.table, self.read = torch.nn.Parameter(parameters.clone()), read

    def forward(self, tokens, responses, mask, pad_id, reference):
        logprobs, exact_kl = (x.masked_fill(~mask, 0) for x in self.read(self.table, tokens, mask))
        zeros = torch.zeros_like(logprobs)
        return Reading(logprobs=logprobs, values=zeros, entropies=zeros, exact_kl=exact_kl)


def updated_stand_in(
    network: StandIn, episodes: Rollout, rewards: torch.Tensor, args: rlvr_async.Args
) -> dict[str, torch.Tensor]:
    """Steps of an update of rlvr/asynchronous.py, of episodes of one update before; network.table.grad stays."""
    correction = rlvr_async.correct(episodes, args, 1, ALONE)
    estimate = compute_advantages(correction.episodes, rewards, args.ppo, torch.clone)
    batch = batch_from(correction, rewards, estimate, 1)
    return update(
        setup_of(args, -1),
        batch,
        actor_critic=network,
        reference=None,
        optimizers={"policy": torch.optim.SGD(network.parameters(), lr=0.0)},
        minibatches=torch.arange(len(batch.mask))[None, None],
        policy_learns=True,
    )


# ---- Masks and rewards -----------------------------------------------------------------------------------------


def test_a_response_ends_at_the_first_of_its_stop_ids():
    responses = torch.tensor([[5, 9, 8, 7], [8, 8, 8, 8], [5, 6, 7, 5], [5, 5, 5, 9]])
    mask, stopped = response_mask(responses, {9, 8})
    assert mask.int().tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert stopped.tolist() == [True, True, False, True]
    mask, stopped = response_mask(responses, [])
    assert mask.all() and not stopped.any()


@pytest.mark.parametrize(("form", "expected"), [("none", [1, 1]), ("replace", [1, -2]), ("subtract", [1, -1])])
def test_what_does_not_end_is_punished(form, expected):
    shaping = RewardsArgs(missing_stop=form, missing_stop_penalty=2.0)
    scores = punish(torch.ones(2), torch.tensor([3, 10]), torch.tensor([True, False]), shaping, 10)
    assert scores.tolist() == expected


def test_the_overlong_punishment_is_added_to_the_score():
    shaping = RewardsArgs(overlong_buffer=4)
    scores = punish(torch.ones(4), torch.tensor([1, 6, 8, 10]), torch.ones(4).bool(), shaping, 10)
    assert scores.tolist() == [1, 1, 0.5, 0]


# ---- Estimators ------------------------------------------------------------------------------------------------


def compact(x: torch.Tensor) -> torch.Tensor:
    """What counts in each row, moved to its beginning."""
    return x.gather(1, (~MASK).int().argsort(dim=1, stable=True))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_step_over_what_is_masked(name):
    """Whatever is there: golden numbers say what they are where everything counts."""
    rewards, values, baselines = spoiled(numbers(1)), spoiled(numbers(2)), numbers(3, ROWS)
    settings = {"baselines": baselines, "gamma": 0.9, "lam": 0.8} | sources_of(rewards)
    found = ESTIMATORS[name](rewards, MASK, GROUPS, values=values, **settings)
    expected = ESTIMATORS[name](compact(rewards), compact(MASK), GROUPS, values=compact(values), **settings)
    for one, other in zip(found, expected, strict=True):
        if name == "gae" or one is not None:
            assert_close(compact(one), other, atol=1e-12, rtol=1e-12)
            assert (one[~MASK] == 0).all() and one.dtype == torch.float64 and one[MASK].any()


@pytest.mark.parametrize("name", IN_GROUPS)
@pytest.mark.parametrize("scores", [[1.0], [0.1, 0.1, 0.1], [1 / 3 + 1e8] * 5])
def test_groups_of_one_and_of_equal_scores_get_exactly_0(name, scores):
    rewards = torch.tensor(scores, dtype=torch.float64).unsqueeze(1)
    everywhere = torch.ones(rewards.shape, dtype=torch.bool)
    groups = torch.zeros(len(scores), dtype=torch.long)
    advantages, _ = ESTIMATORS[name](rewards, everywhere, groups, **sources_of(rewards))
    assert (advantages == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "scores", [[-1, 0, 0.5], [-1, 1], [0.7, -0.4, -0.3], [0.1, 0.2, -0.3], [100.1, -40.05, -60.05]]
)
def test_maxrl_is_0_where_the_mean_is_not_above_0_but_for_rounding(scores, dtype):
    """There is no share of correct responses: of [0.1, 0.2, -0.3], rounding leaves 1e-17."""
    rewards = torch.tensor(scores, dtype=dtype)[:, None]
    assert (ESTIMATORS["maxrl"](rewards, torch.ones_like(rewards).bool(), torch.zeros(len(scores)))[0] == 0).all()
    rewards[0] += 0.01  # a mean that is small, but above rounding
    expected = (rewards[:, 0] - rewards.mean()) / (rewards.mean() + 1e-6) if rewards.mean() > 0 else 0 * rewards[:, 0]
    found = ESTIMATORS["maxrl"](rewards, torch.ones_like(rewards).bool(), torch.zeros(len(scores)))[0][:, 0]
    assert_close(found, expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_batch_of_no_responses_has_no_advantages(name):
    nothing, mask = torch.zeros(0, 3), torch.zeros(0, 3).bool()
    settings = {"values": nothing, "baselines": nothing[:, 0]} | sources_of(nothing)
    assert ESTIMATORS[name](nothing, mask, torch.zeros(0), **settings)[0].shape == (0, 3)


def test_maxrl_has_the_gradient_of_the_log_of_the_success_rate():
    """By enumeration of all 81 groups of 4 from three answers, of which one is right.

    log p is minus the sum of (1 - p)^k / k over all k. Groups of n have the gradient of the first n - 1 terms.
    """
    logits = torch.tensor([0.3, -0.2, 0.1]).double().requires_grad_()
    logprobs, groups = logits.log_softmax(0), torch.cartesian_prod(*[torch.arange(3)] * 4)
    probs = logprobs.detach()[groups].sum(1).exp()  # (81,)
    rewards = (groups == 0).double()
    flat = rewards.flatten().unsqueeze(1)
    ids = torch.arange(81).repeat_interleave(4)
    advantages, _ = ESTIMATORS["maxrl"](flat, torch.ones_like(flat).bool(), ids)
    mean_of_group = (advantages.view(81, 4) * logprobs[groups]).mean(1)
    (found,) = torch.autograd.grad((probs * mean_of_group).sum(), logits, retain_graph=True)
    p = logprobs[0].exp()
    series = -sum((1 - p) ** k / k for k in range(1, 4))
    (expected,) = torch.autograd.grad(series, logits)
    assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "whitened"), [("gae", True), ("grpo", False), ("gdpo", True), ("reinforce++", True), ("rloo", False)]
)
@pytest.mark.parametrize("asked", [None, True, False])
def test_which_advantages_are_whitened(name, whitened, asked):
    ppo, rewards = PpoArgs(advantage=name, whiten_advantages=asked), numbers(1)
    parts, weights = sources_of(rewards).values()
    told = rollout_of(values=numbers(2), groups=GROUPS, parts=parts), rewards, ppo
    ((advantages, _),) = on_processes(1, lambda process: compute_advantages(*told, summed(process), weights))
    mean, variance = advantages[MASK].mean().item(), advantages[MASK].var(correction=0).item()
    is_white = abs(mean) < 1e-9 and abs(variance - 1) < 1e-6
    assert is_white == (whitened if asked is None else asked)


def summed(process) -> Callable[[torch.Tensor], torch.Tensor]:
    return partial(process.reduce, reduction="sum")


@pytest.mark.parametrize("keep_mean", [False, True])
def test_whitening_on_two_processes_is_that_on_one(keep_mean):
    values = spoiled(numbers(1)).float()

    def share(process, rows: int) -> torch.Tensor:
        part = slice(rows * process.process_index, rows * (process.process_index + 1))
        return whiten(values[part], MASK[part], keep_mean=keep_mean, reduce=summed(process))

    (whole,) = on_processes(1, partial(share, rows=6))
    assert_close(torch.cat(on_processes(2, partial(share, rows=3))), whole, atol=1e-7, rtol=0)
    assert whole.dtype == torch.float32
    valid = values[MASK].double()
    expected = (valid - valid.mean()) / (valid.var(correction=0) + 1e-8).sqrt() + keep_mean * valid.mean()
    assert_close(whole[MASK], expected.float(), atol=1e-6, rtol=1e-6)


def test_the_epsilon_of_whitening_is_within_the_root():
    """The variance is 1e-8, as is the epsilon: 1e-4 / (2e-8)^0.5."""
    values = torch.tensor([[1e-4, -1e-4]], dtype=torch.float64)
    whitened = whiten(values, torch.ones(1, 2).bool(), keep_mean=False)
    assert whitened[0].tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])


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


def expectation(losses: torch.Tensor, sampler: torch.Tensor) -> torch.Tensor:
    """Of the sum over a sequence, when that policy samples: 9 times the mean of what weighs as often as it occurs."""
    weights = sequence_logprobs(sampler).sum(1, keepdim=True).exp().detach()  # (9, 1)
    return 9 * aggregate(weights * losses, EVERYWHERE, "seq-mean-token-sum")


def exact_kl(logits: torch.Tensor, ref_logits: torch.Tensor) -> torch.Tensor:
    """The script's own sum over the vocabulary, at each token (9, 2)."""
    backbone = SimpleNamespace(get_output_embeddings=lambda: lambda hidden: hidden)
    network = ActorCritic.__new__(ActorCritic)
    torch.nn.Module.__init__(network)
    network.vocab_size, network.temperature = 3, 1.0
    object.__setattr__(network, "lm_backbone", backbone)
    reference = SimpleNamespace(logits=lambda hidden: hidden)
    states = STATES.flatten()
    return network.read_hidden(reference, SEQUENCES.flatten(), logits[states], ref_logits[states])[2].view(9, 2)


def gradient_as_loss(name: str, sampler: torch.Tensor) -> tuple[float, torch.Tensor]:
    logits, ref_logits = table("logits").requires_grad_(True), table("ref_logits")
    logprobs, ref_logprobs = sequence_logprobs(logits), sequence_logprobs(ref_logits)
    mb = rollout_of(EVERYWHERE, logprobs=sequence_logprobs(sampler).detach(), ref_logprobs=ref_logprobs)
    if name == "k1":  # which the script refuses as a loss
        losses = kl_estimate(logprobs, ref_logprobs, EVERYWHERE, "k1")
    else:
        shaping = RewardsArgs(kl_loss_coef=1.0, kl_loss_estimator=name)
        losses = kl_in_loss(logprobs, mb, exact_kl(logits, ref_logits), shaping)
    value = expectation(losses, sampler)
    return value.item(), torch.autograd.grad(value, logits)[0]


def gradient_in_reward(name: str, scale: float = 1.0, gamma: float = 1.0) -> torch.Tensor:
    ref_logits = table("ref_logits")
    logits = (ref_logits + scale * (table("logits") - ref_logits)).requires_grad_(True)
    logprobs, ref_logprobs = sequence_logprobs(logits), sequence_logprobs(ref_logits)
    kept = {"logprobs": logprobs.detach(), "ref_logprobs": ref_logprobs}
    batch = rollout_of(EVERYWHERE, exact_kl=exact_kl(logits, ref_logits).detach(), **kept)
    rewards, _, _ = token_rewards(batch, 1.0, name)
    advantages, _ = ESTIMATORS["reinforce++"](rewards, EVERYWHERE, torch.arange(9), gamma=gamma)
    losses, _, _ = token_losses(logprobs, logprobs.detach(), advantages, EVERYWHERE, "reinforce", low=0.2, high=0.2)
    return torch.autograd.grad(expectation(losses, logits), logits)[0]


def stored(name: str, where: str = "on_policy") -> dict:
    (found,) = [one for one in ENUMERATION[where] if one["name"] == name]
    return found


AS_LOSS = {
    "k1": "k1 per token as loss",
    "abs": "abs per token as loss",
    "k2": "k2 per token as loss",
    "k3": "k3 per token as loss",
    "k1+": "k1+ (value of k1, gradient of k2) as loss",
    "k3+": "k3+ (value of k3, gradient of k2) as loss",
    "k2+": "k2 per token as loss",
    "full": "full (exact sum over the vocabulary) as loss",
}


@pytest.mark.parametrize("name", AS_LOSS)
def test_gradient_of_the_kl_in_the_loss(name):
    value, gradient = gradient_as_loss(name, table("logits"))
    assert value == pytest.approx(stored(AS_LOSS[name])["value"], abs=1e-9)
    assert_close(gradient, torch.tensor(stored(AS_LOSS[name])["grad"], dtype=torch.float64), atol=2e-10, rtol=0)


OFF_POLICY = {name: f"{name} as loss, no correction" for name in ("k1", "abs", "k2", "k3")}
OFF_POLICY |= {f"{name}+": "true gradient, prefixes of the sampler held fixed" for name in ("k1", "k2", "k3")}


@pytest.mark.parametrize("name", OFF_POLICY)
def test_gradient_of_the_kl_in_the_loss_when_another_policy_samples(name):
    _, gradient = gradient_as_loss(name, table("sampler_logits"))
    expected = torch.tensor(stored(OFF_POLICY[name], "off_policy")["grad"], dtype=torch.float64)
    assert_close(gradient, expected, atol=2e-10, rtol=0)


@pytest.mark.parametrize("correction", ["decoupled", "bypass"])
@pytest.mark.parametrize("name", ["abs", "k2", "k3", "k1+", "k2+", "k3+", "full"])
def test_gradient_of_the_kl_in_the_loss_with_a_sampler_that_is_not_the_policy_of_the_clip(name, correction):
    """Three policies over three tokens: mu has sampled, the learner was prox when the batch came, and is new."""
    mu, prox, ref = np.array([0.5, 0.25, 0.25]), np.array([0.2, 0.5, 0.3]), np.array([0.3, 0.3, 0.4])
    logits, drawn = np.array([0.4, -0.7, 0.1]), np.array([0, 0, 1, 2])  # four rows: each token as often as mu says
    new = np.exp(logits) / np.exp(logits).sum()
    d = np.log(new / ref)
    old = {"decoupled": prox, "bypass": mu}[correction]  # after which policy a sampled token counts
    slopes = {"abs": np.sign(d), "k2": d, "k3": 1 - ref / new}
    weighted = old * slopes[name] if name in slopes else new * d
    expected = weighted - new * weighted.sum()
    if name not in slopes:  # the gradient of KL(new || ref)
        assert expected == pytest.approx(new * (d - (new * d).sum()), abs=1e-12)

    def read(table, tokens, mask):
        logprobs = table.log_softmax(0)
        exact = (logprobs.exp() * (logprobs - torch.from_numpy(ref).log())).sum()
        return logprobs[tokens[:, -1:]], exact.expand(mask.shape)

    of_tokens = {"sampler_logprobs": mu, "logprobs": prox, "ref_logprobs": ref}
    of_tokens = {field: torch.from_numpy(np.log(p)[drawn])[:, None] for field, p in of_tokens.items()}
    tokens = torch.tensor([[5, token] for token in drawn])
    batch = rollout_of(torch.ones(4, 1, dtype=torch.bool), query_responses=tokens, **of_tokens)
    network, cap = StandIn(torch.from_numpy(logits), read), 0.9 if name == "full" else 9.0
    args = rlvr_async.Args(
        correction=correction,
        correction_cap=cap,
        ppo=PpoArgs(advantage="reinforce++"),
        rewards=RewardsArgs(kl_loss_coef=1.0, kl_loss_estimator=name),
    )
    updated_stand_in(network, batch, torch.zeros(4, 1, dtype=torch.float64), args)
    assert network.table.grad.numpy() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3", "full"])
def test_gradient_of_the_kl_in_the_reward(name):
    expected = torch.tensor(stored(f"{name} in the reward, gamma = lambda = 1")["grad"], dtype=torch.float64)
    assert_close(gradient_in_reward(name), expected, atol=2e-10, rtol=0)


def test_only_k1_in_the_reward_has_the_gradient_of_the_kl():
    true = torch.tensor(stored("true gradient of the sequence KL")["grad"], dtype=torch.float64)
    assert_close(gradient_in_reward("k1"), true, atol=2e-10, rtol=0)
    own_cost = stored("k1 in the reward, only the token's own cost (gamma lambda = 0)")["grad"]
    assert_close(gradient_in_reward("k1", gamma=0.0), torch.tensor(own_cost, dtype=torch.float64), atol=2e-10, rtol=0)
    _, of_loss = gradient_as_loss("full", table("logits"))
    assert_close(of_loss + gradient_in_reward("full"), true, atol=1e-9, rtol=0)
    for name in ("k2", "k3", "full"):
        gradient = gradient_in_reward(name)
        assert torch.cosine_similarity(gradient.flatten(), true.flatten(), dim=0) < 0  # it points away


@pytest.mark.parametrize("near", ENUMERATION["near_reference"], ids=lambda near: str(near["scale"]))
def test_near_the_reference_k2_and_k3_in_the_reward_do_not_pull_back(near):
    for name in ("abs", "k2", "k3"):
        ratio = gradient_in_reward(name, near["scale"]).norm() / near["norm_true"]
        assert ratio.item() == pytest.approx(near[f"{name}_in_reward_over_true"], abs=1e-8)


def test_rounding_does_not_choose_the_slope_of_abs():
    """Two passes of one policy, of different shapes, differ by rounding either way."""
    d = torch.tensor([[1e-6, -1e-6, 9e-5, -2e-4, 0.5, -0.5, 0.0]]).double().requires_grad_(True)
    kl = kl_estimate(d, torch.zeros_like(d), torch.ones_like(d).bool(), "abs")
    assert kl[0].tolist() == d.abs()[0].tolist()
    assert torch.autograd.grad(kl.sum(), d)[0].tolist() == [[0, 0, 0, -1, 1, -1, 0]]


def test_k3_and_its_slope_are_exact_where_two_policies_hardly_differ():
    """In float32, at the distances that two ways to compute one policy have."""
    d = torch.tensor([[1e-4, -1e-4, 1e-5, -1e-5, 1e-6, -1e-6, 1e-8]])
    logprobs, mask = d.clone().requires_grad_(True), torch.ones(1, 7, dtype=torch.bool)
    k3 = kl_estimate(logprobs, torch.zeros(1, 7), mask, "k3")
    (slope,) = torch.autograd.grad(k3.sum(), logprobs)
    expected = d.double() ** 2 / 2 - d.double() ** 3 / 6
    assert (k3 >= 0).all() and k3[0, :4].tolist() == pytest.approx(expected[0, :4].tolist(), rel=0.02)
    assert slope[0].tolist() == pytest.approx((d.double() - d.double() ** 2 / 2)[0].tolist(), rel=1e-6)
    off = mismatch(d.repeat(1000, 1), torch.zeros(1000, 7), mask.expand(1000, 7))
    assert off["k3"].item() == pytest.approx(expected.mean().item(), rel=0.02)


# ---- Losses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "ipo", "dppo", "reinforce"])
def test_losses_do_not_see_what_is_masked(loss):
    given = [numbers(seed) for seed in (1, 2, 3)]
    found = []
    for tensors in (given, [spoiled(x) for x in given]):
        new = tensors[0].clone().requires_grad_(True)
        losses, *flags = token_losses(new, *tensors[1:], MASK, loss, low=0.2, high=0.3)
        found.append([losses, *flags, torch.autograd.grad(losses.sum(), new)[0]])
    for one, other in zip(*found, strict=True):
        assert one.equal(other) and (one[~MASK] == 0).all()


@pytest.mark.parametrize(("low", "weights"), [(None, [0.05, 0.9, 1.2]), (0.2, [0.8, 0.9, 1.2])])
def test_cispo_has_a_lower_bound_only_if_one_is_asked_for(low, weights):
    ratios, mask = torch.tensor([[0.05, 0.9, 5.0]], dtype=torch.float64), torch.ones(1, 3, dtype=torch.bool)
    new = ratios.log().requires_grad_(True)
    mb = SimpleNamespace(logprobs=torch.zeros(1, 3), advantages=torch.ones(1, 3), loss_mask=mask)
    losses, clipped, _ = policy_losses(new, mb, PpoArgs(loss="cispo", cliprange_low=low))
    assert (-torch.autograd.grad(losses.sum(), new)[0])[0].tolist() == pytest.approx(weights)
    assert clipped[0].tolist() == [low is not None, False, True]
    assert lower_clip_range("ppo", None) == 0.2


@pytest.mark.parametrize("loss", ["ipo", "dppo"])
@pytest.mark.parametrize("bound", [0.05, 0.3])
def test_a_token_has_a_loss_while_its_probability_is_near_the_old_one(loss, bound):
    """Token by token in plain numbers, over random cases. In the last column, the old probability is almost 0."""
    seen = set()
    for seed in range(0, 60, 3):
        new, old, advantages = (numbers(seed + i) for i in range(3))
        new, old = -new.abs(), -old.abs()
        new[:, -1], old[:, -1] = -1e-3, -800.0
        x = spoiled(new).requires_grad_()
        losses, left_out, _ = token_losses(
            x, spoiled(old), spoiled(advantages), MASK, loss, low=0.2, high=0.2, trust_region=bound
        )
        (slope,) = torch.autograd.grad(losses.sum(), x)
        for row, t in itertools.product(range(ROWS), range(LENGTH)):
            advantage, p, q = advantages[row, t].item(), math.exp(new[row, t]), math.exp(old[row, t])
            out = abs(p - q) > bound if loss == "ipo" else (p - q if advantage > 0 else q - p) > bound
            expected = 0 if out or not MASK[row, t] else -advantage * (p / q if q else math.exp(20))
            assert losses[row, t].item() == pytest.approx(expected)
            assert slope[row, t].item() == pytest.approx(expected if q else 0)  # a ratio above e^20 is constant
            assert left_out[row, t] == (out and bool(MASK[row, t]))
            seen.add((p > q, advantage > 0, out))
    assert len(seen) == (8 if loss == "ipo" else 6)  # with dppo, no token is left out that moves against its push


@pytest.mark.parametrize("loss", ["ppo", "gspo", "dppo"])
@pytest.mark.parametrize(("advantage", "acts"), [(1e-17, False), (-1e-17, False), (1e-9, True), (-1e-9, True)])
def test_no_bound_acts_on_an_advantage_that_is_rounding(loss, advantage, acts):
    """All responses score the same and the KL penalties differ in the 17th digit, as before the first step."""
    ratio = math.log(5 if advantage > 0 else 0.1)
    old, mask = torch.full((1, 2), -1.7, dtype=torch.float64), torch.ones(1, 2).bool()
    bounds = {"low": 0.2, "high": 0.2, "dual_clip": 3.0, "trust_region": 0.1}
    _, *flags = token_losses(old + ratio, old, torch.full_like(old, advantage), mask, loss, **bounds)
    assert [bool(flag.any()) for flag in flags] == [acts, False]


@pytest.mark.parametrize("loss", ["ppo", "gspo", "ipo", "dppo"])
def test_a_loss_of_0_has_a_gradient(loss):
    """A right response and a wrong one, before the first step: advantages cancel in the loss, not in its gradient."""
    advantages = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    logprobs, mask = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]]), torch.ones(2, 2).bool()
    new_logprobs = logprobs.clone().requires_grad_(True)
    losses, _, _ = token_losses(new_logprobs, logprobs, advantages, mask, loss, low=0.2, high=0.2)
    value = aggregate(losses, mask, "seq-mean-token-mean")
    value.backward()
    assert value.item() == 0
    assert new_logprobs.grad.tolist() == [[-0.25, -0.25], [0.25, 0.25]]  # descent: the first up, the second down


@pytest.mark.parametrize(("loss", "largest"), [("ppo", math.exp(20)), ("gspo", math.exp(10)), ("cispo", 1.2 * 80)])
def test_an_overflowing_ratio_stays_finite(loss, largest):
    new, mask = torch.tensor([[80.0, 80.0], [-80.0, -80.0]]), torch.ones(2, 2).bool()
    for sign in (1, -1):
        losses, _, _ = token_losses(new, -new, sign * torch.ones(2, 2), mask, loss, low=0.2, high=0.2)
        assert losses.isfinite().all()
    assert losses.max().item() == pytest.approx(largest)


def test_values_without_a_clip_are_a_plain_square():
    values, old, returns = numbers(1), numbers(2), numbers(3)
    losses, clipped = value_losses(spoiled(values), spoiled(old), spoiled(returns), MASK, None)
    assert_close(losses, (0.5 * (values - returns) ** 2).masked_fill(~MASK, 0))
    assert not clipped.any()


# ---- Off-policy ------------------------------------------------------------------------------------------------


def test_responses_are_rejected_by_their_product():
    """The products are 2, 2, 1/2, none, 2 and 1/2."""
    logprobs = spoiled(torch.log(torch.tensor([[0.5, 4.0, 1.0, 1.0, 1.0]])).double().repeat(ROWS, 1))
    zeros = spoiled(torch.zeros(ROWS, LENGTH, dtype=torch.float64))
    of_bounds = {(0.49, 2.01): [1] * ROWS, (0.6, 2.01): [1, 1, 0, 0, 1, 0], (0.4, 1.9): [0, 0, 1, 0, 0, 1]}
    for (low, high), expected in of_bounds.items():
        kept = rejection_mask(logprobs, zeros, MASK, "product", low, high)
        assert kept.equal(MASK & torch.tensor(expected).bool().unsqueeze(1))


def test_blame_of_unlikely_responses_is_masked_by_hand():
    """Equation 9 of DeepSeek-V3.2: row by row, the mean over tokens of log(sampler / new) against delta."""
    new, sampler = spoiled(numbers(5)), spoiled(numbers(6) + 0.7)
    advantages = spoiled(numbers(7))
    for delta in (0.05, 0.5, 4.0):
        kept = off_policy_mask(new, sampler, advantages, MASK, delta)
        some = []
        for row in range(ROWS):
            valid = [t for t in range(LENGTH) if MASK[row, t]]
            gaps = [float(sampler[row, t] - new[row, t]) for t in valid]
            for t in range(LENGTH):
                out = t in valid and float(advantages[row, t]) < 0 and sum(gaps) / len(gaps) > delta
                assert kept[row, t] == (not out)
                some.append(out)
        assert any(some) == (delta < 4.0) and not all(some)
    assert off_policy_mask(sampler, sampler, advantages, MASK, 1e-9).all()


def test_mismatch_is_that_of_valid_tokens():
    logprobs, sampler = numbers(1), numbers(2)
    found = mismatch(spoiled(logprobs), spoiled(sampler), MASK)
    log_w = (logprobs - sampler)[MASK]
    assert found["kl"].item() == pytest.approx(-log_w.mean().item())
    assert found["largest_gap"].item() == pytest.approx(log_w.abs().max().item())
    weights = log_w.exp()
    assert found["ess"].item() == pytest.approx(1 / ((weights / weights.mean()) ** 2).mean().item())
    assert all(value.dim() == 0 for value in found.values())


# ---- Dynamic sampling ------------------------------------------------------------------------------------------


def test_groups_with_a_signal_are_those_whose_scores_differ():
    scores, live = torch.tensor([0.1 * 3, 0.3, 1.0, 0.0, 0.5, 0.5], dtype=torch.float64), MASK.any(1)
    differ = scores_differ(scores, live, torch.tensor([0, 0, 1, 1, 1, 1]))
    assert differ.tolist() == [True, True, True, True, True, True]  # .1 * 3 is not .3; row 3 is out
    assert not scores_differ(torch.full((6,), 0.1).double() * 3, live, GROUPS).any()
