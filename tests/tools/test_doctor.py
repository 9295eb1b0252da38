"""`check --batch`: what is healthy is explained, mistakes are named, and what has no explanation is not healthy."""

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from runs import error_line
from safetensors.torch import save_file

from benchmark import doctor as corpus
from ppo_rlhf.check import __main__ as command, batch, dump, recompute
from ppo_rlhf.check.doctor import Candidate

HEALTHY = [(rows, kind, dtype) for dtype, rows, kind in (*corpus.SETTINGS, *corpus.OF_GROUP_SETTINGS)]


def arrays_of(kind="critic", rows=8, dtype="float32", loss=False, **wiring):
    """The arrays of one update. loss: also its loss, whose formulas are many."""
    arrays = {name: x[:rows] for name, x in corpus.rollout().items()}
    made = corpus.cast(corpus.update(arrays, {}, wiring, kind), dtype)
    return {name: x for name, x in made.items() if loss or name != "loss"}


def verdict(arrays, model=None):
    """Whether something is wrong, the names of faults and choices, and what is not explained."""
    found = batch.examine(dump.arranged(arrays), model)
    names = {fault.name for f in found.findings for fault in f.names}
    return bool(found.status), names, {f.array for f in found.findings if f.lacks or f.unexplained}


# ---- Healthy dumps ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "kind", "dtype"), HEALTHY)
def test_a_healthy_dump_is_explained_in_every_array(rows, kind, dtype):
    wrong, _, open_ = verdict(arrays_of(kind, rows, dtype, loss=True))
    assert not wrong and not open_


def slow_gae(rewards, values, lengths, gamma, lam):
    """By definition: the sum of (gamma lam)^k delta_{t+k} over the tokens of each row."""
    advantages = torch.zeros_like(rewards)
    for row, n in enumerate(lengths):
        v = [*values[row, :n].tolist(), 0.0]
        deltas = [float(rewards[row, t]) + gamma * v[t + 1] - v[t] for t in range(n)]
        for t in range(n):
            advantages[row, t] = sum((gamma * lam) ** k * deltas[t + k] for k in range(n - t))
    return advantages


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.973, 0.61)])
def test_the_constants_of_gae_are_found(gamma, lam):
    """The numbers are those of a sum by definition, whitened by numpy's formula with n - 1."""
    draw = torch.Generator().manual_seed(1)
    lengths = [5, 9, 3, 7]
    mask = torch.arange(9) < torch.tensor(lengths).unsqueeze(1)
    rewards, values = (torch.randn(4, 9, generator=draw, dtype=torch.float64) * mask for _ in range(2))
    raw = slow_gae(rewards, values, lengths, gamma, lam)
    white = (raw - raw[mask].mean()) / (raw[mask].var() + 1e-8).sqrt()
    made = {
        "response_ids": torch.arange(36).reshape(4, 9),
        "response_mask": mask.long(),
        "token_level_rewards": rewards,
    }
    made |= {"values": values, "advantages": white * mask, "returns": (raw + values) * mask}
    found = batch.examine(
        dump.arranged({name: x.float() if x.is_floating_point() else x for name, x in made.items()})
    )
    words = {f.array: f.words for f in found.findings}
    assert words["advantages"] == f"GAE with gamma {gamma:g}, lambda {lam:g} of rewards and values, then whitened"
    assert words["returns"] == "advantages before they were whitened + values"
    (choice,) = (fault for f in found.findings for fault in f.names)
    assert choice.choice and choice.name.endswith("with n minus 1")  # with either epsilon


@pytest.mark.parametrize("coefficient", [{"kl_coef": torch.tensor(0.3)}, {}])
def test_a_response_may_pay_for_its_divergence(coefficient):
    """As in TRL's RLOO: each total is compared with the mean of the others."""
    arrays = arrays_of("grpo", rows=16) | {"ref_logprobs": corpus.rollout()["ref_logprobs"][:16]}
    gap = (arrays["logprobs"] - arrays["ref_logprobs"]).double().masked_fill(~arrays["mask"], 0)
    totals = (arrays["scores"].double() - 0.3 * gap.sum(1)).view(4, 4)
    made = {"advantages": (totals - (totals.sum(1, keepdim=True) - totals) / 3).flatten().float()}
    kept = {name: x for name, x in arrays.items() if name not in ("kl_coef", "rewards")}
    assert verdict(kept | made | coefficient) == (False, set(), set())


def test_without_a_critic_returns_may_be_whitened():
    arrays = arrays_of("grpo", rows=16)
    mask = arrays["mask"]
    scores = arrays["scores"].double().view(4, 4)
    raw = (scores - scores.mean(1, keepdim=True)).flatten().unsqueeze(1).expand(mask.shape)
    white = ((raw - raw[mask].mean()) / raw[mask].std(correction=0)).masked_fill(~mask, 0).float()
    assert not verdict(arrays | {"advantages": white, "returns": white})[0]


def test_a_penalty_on_padding_is_no_score():
    """It is masked before GAE."""
    arrays = arrays_of(rows=16)
    padding = 0.05 * torch.arange(arrays["mask"].shape[1]).cos() * ~arrays["mask"]
    _, names, _ = verdict(arrays | {"rewards": arrays["rewards"] + padding})
    assert "a score that no advantage sees" not in names


def test_moved_advantages_are_seen_without_scores():
    """Each response has one number, and its last token that of the next response's prompt, which is 0."""
    arrays = arrays_of("grpo", rows=16)
    mask = arrays["mask"]
    moved = arrays["advantages"].reshape(16, -1)[:, :1].expand(mask.shape) * mask
    moved = torch.cat([moved[:, 1:], 0 * moved[:, :1]], 1)
    kept = {name: x for name, x in arrays.items() if name not in ("scores", "rewards", "values", "returns")}
    wrong, names, _ = verdict(kept | {"advantages": moved})
    assert wrong and "advantages one token early" in names


def test_advantages_from_values_after_the_update_are_named():
    arrays = arrays_of()
    mask = arrays["mask"]
    new = (arrays["values"] + 0.1 * torch.arange(mask.shape[1]).sin()).masked_fill(~mask, 0)
    raw = by_hand(arrays["rewards"].double(), new, mask.sum(1).tolist(), 1.0, 0.95)
    made = {"new_values": new, "advantages": raw.float(), "returns": (raw + new).float()}
    wrong, names, open_ = verdict(arrays | made)
    assert wrong and {"values after the update", "returns with the new values"} <= names
    assert open_ <= {"value_loss"}


@pytest.mark.parametrize("lost", ["rewards", "scores", "values", "ref_logprobs", "logprobs", "advantages"])
def test_a_missing_array_is_no_fault(lost):
    arrays = arrays_of(loss=True)
    del arrays[lost]
    wrong, _, _ = verdict(arrays)
    assert not wrong


# ---- Mistakes --------------------------------------------------------------------------------------------------

# Two names for the same numbers.
ALSO = {"log-probs of another row": "the ratio is not 1"}


@pytest.mark.parametrize("name", [*list(corpus.WIRING)[::3], *corpus.OF_GROUPS])
def test_a_mistake_in_what_a_function_is_given_is_named(name):
    is_grpo = name in corpus.OF_GROUPS
    changes = corpus.OF_GROUPS[name] if is_grpo else corpus.WIRING[name]
    wrong, names, _ = verdict(arrays_of("grpo" if is_grpo else "critic", **changes))
    assert wrong and names & {name, ALSO.get(name, name)}


@pytest.mark.parametrize(
    "title",
    [
        "kl_estimate: k3 upside down",
        "token_rewards: score on every token",
        "whiten: over padding",
        "gae: next value 0",
    ],
)
def test_a_mistake_of_the_book_is_named(title):
    (fault,) = (fault for fault in corpus.faults.FAULTS if fault.title == title)
    arrays = {name: x[:8] for name, x in corpus.rollout().items()}
    functions = {fault.function: fault.compiled}
    if fault.function == "kl_estimate":
        functions = {"kl_estimate": lambda new, ref, mask, _: fault.compiled(new, ref, mask, "k3")}
    wrong, names, _ = verdict(corpus.cast(corpus.update(arrays, functions, {}, "critic"), "float32"))
    assert wrong and fault.name in names


def test_two_mistakes_are_both_named():
    changes = corpus.WIRING["KL with the wrong sign"] | corpus.WIRING["returns of whitened advantages"]
    _, names, _ = verdict(arrays_of(**changes))
    assert {"KL with the wrong sign", "returns of whitened advantages"} <= names


def test_the_loss_is_explained_and_its_gradient():
    arrays = arrays_of()
    leaf = arrays["new_logprobs"].double().requires_grad_()
    mask, old, advantages = arrays["mask"], arrays["logprobs"].double(), arrays["advantages"].double()
    ratio = (leaf - old).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))[mask].sum() / mask.sum()
    (slope,) = torch.autograd.grad(loss, leaf)
    assert verdict(arrays | {"loss": loss.detach(), "gradient": slope})[:2] == (False, set())
    leaky = slope + 0.01 * mask
    assert "advantages are not detached" in verdict(arrays | {"loss": loss.detach(), "gradient": leaky})[1]
    free = (-advantages * (leaf.detach() - old).exp())[mask].mean()
    assert "the clip never acts" in verdict(arrays | {"loss": free})[1]


@pytest.mark.parametrize(
    ("form", "name", "is_fault"),
    [
        (lambda a, r, m: torch.minimum(-a * r, -a * r.clamp(0.8, 1.2))[m].mean(), "the smaller loss", True),
        (lambda a, r, m: torch.maximum(a * r, a * r.clamp(0.8, 1.2))[m].mean(), "of the wrong sign", True),
        (lambda a, r, m: torch.maximum(-a / r, -a / r.clamp(1 / 1.2, 1.25))[m].mean(), "ratio upside down", True),
        (lambda a, r, m: torch.maximum(-a * r, -a * r.clamp(0.8, 1.2))[m].sum(), "sum", False),
        (
            lambda a, r, m: torch.maximum(-a * r, -a * r.clamp(0.8, 1.2))[m].sum() / m.numel(),
            "divided by the width",
            False,
        ),
        (
            lambda a, r, m: torch.stack(
                [torch.maximum(-x * y, -x * y.clamp(0.8, 1.2))[z].mean() for x, y, z in zip(a, r, m, strict=True)]
            ).mean(),
            "mean of row means",
            False,
        ),
        (lambda a, r, m: -torch.maximum(-a * r, -a * r.clamp(0.8, 1.2))[m].mean(), "of the wrong sign", True),
        (
            lambda a, r, m: torch.maximum(-a * r, -(a * r).clamp(-0.2, 0.2))[m].mean(),
            "clips ratio times advantage",
            True,
        ),
        (lambda a, r, m: torch.maximum(-a * r, -a * r.clamp(0.8, 1))[m].mean(), "one bound is 1", True),
        (lambda a, r, m: torch.maximum(-a * r, -a * r.clamp(0.8, 1.2))[m].mean() / m.sum(), "divided twice", True),
        (
            lambda a, r, m: torch.maximum(-a.abs() * r, -a.abs() * r.clamp(0.8, 1.2))[m].mean(),
            "advantages without their sign",
            True,
        ),
        (
            lambda a, r, m: torch.maximum(-a.roll(1, 0) * r, -a.roll(1, 0) * r.clamp(0.8, 1.2)),
            "advantages of another row",
            True,
        ),
        (lambda a, r, m: torch.minimum(-a * r, -a * r.clamp(0.8, 1.2)), "the smaller loss", True),
        (
            lambda a, r, m: (-a * r.clamp(max=1.2) * arrays_of(rows=16)["new_logprobs"].double())[m].mean(),
            "another loss",
            False,
        ),
        (lambda a, r, m: (a * r).sum() * 0 + 0.1234567, None, False),
    ],
)
def test_one_number_shows_which_loss_it_is(form, name, is_fault):
    arrays = arrays_of(rows=16)
    a, ratio = arrays["advantages"].double(), (arrays["new_logprobs"].double() - arrays["logprobs"].double()).exp()
    wrong, names, open_ = verdict(arrays | {"loss": form(a, ratio, arrays["mask"]).float()})
    assert (wrong, open_) == (is_fault, set() if name else {"loss"})
    assert {*name.split(", ")} <= names if name else not names


@pytest.mark.parametrize(
    ("form", "name"),
    [
        (lambda v, old, r, m: ((v - r) ** 2 / 2)[m].mean(), None),
        (lambda v, old, r, m: ((v - r) ** 2)[m].mean(), "without its half"),
        (lambda v, old, r, m: -((v - r) ** 2 / 2)[m].mean(), "the value loss has the wrong sign"),
        (lambda v, old, r, m: ((v - old) ** 2 / 2)[m].mean(), "old values for returns"),
        (lambda v, old, r, m: ((old - r) ** 2 / 2)[m].mean(), "old values for new"),
    ],
)
def test_one_number_shows_which_value_loss_it_is(form, name):
    arrays = arrays_of(rows=16)
    old, returns = arrays["values"].double(), arrays["returns"].double()
    new = old + 0.1 * torch.randn(old.shape, generator=torch.Generator().manual_seed(5))
    made = {"new_values": new.float(), "value_loss": form(new.float().double(), old, returns, arrays["mask"]).float()}
    wrong, names, open_ = verdict(arrays | made)
    assert wrong == (name not in (None, "without its half")) and not open_ and names >= ({name} if name else set())


def test_a_loss_that_counts_tokens_of_tools_is_named():
    arrays = arrays_of("grpo", rows=16)
    whole, mask = arrays["mask"], arrays["mask"].clone()
    mask[:, 2:4] = False
    a = arrays["advantages"].double()
    ratio = (arrays["new_logprobs"].double() - arrays["logprobs"].double()).exp()
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))[whole].mean().float()
    assert "the mask includes tokens of tools" in verdict(arrays | {"mask": mask, "loss": loss})[1]


@pytest.mark.parametrize(("bonus", "lost"), [(0.0044, ""), (0.0069, ""), (0.0044, "ref_logprobs")])
def test_a_loss_with_an_entropy_bonus_and_a_penalty_is_not_explained_by_chance(bonus, lost):
    """Of thousands of formulas, some come as near as rounding to a number that none of them gives."""
    others = ("kl_coef", "rewards", "scores", "values", "returns")
    arrays = {name: x for name, x in arrays_of(rows=16).items() if name not in others}
    new, old, ref, a = (arrays[x].double() for x in ("new_logprobs", "logprobs", "ref_logprobs", "advantages"))
    ratio, d = (new - old).exp(), new - ref
    losses = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2)) + 0.05 * ((-d).exp() - 1 + d)
    arrays["loss"] = (losses[arrays["mask"]].mean() - bonus).float()
    found = batch.examine(dump.arranged({name: x for name, x in arrays.items() if name != lost}))
    (said,) = (f for f in found.findings if f.array == "loss")
    assert not said.names and said.lacks.startswith("losses by token, ")
    assert ("ref_logprobs, if it holds a KL" in said.lacks) == bool(lost) and not found.status


def test_a_number_that_many_losses_give_is_said_to_be_one():
    """In bfloat16, one digit more or less changes the formula that is nearest."""
    found = batch.examine(dump.arranged(arrays_of(rows=16, dtype="bfloat16", loss=True)))
    assert "formulas with a mistake fit as well" in next(f.words for f in found.findings if f.array == "loss")


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (
            lambda x, s: (x / (s.std(1, keepdim=True) + 1e-4)).flatten().roll(1),
            {"advantages of another row", "epsilon 1e-4"},
        ),
        (lambda x, s: x.roll(1, 1), {"advantages of another row"}),
        (
            lambda x, s: x.flatten()[torch.tensor([3, 0, 7, 1, 5, 2, 9, 4, 6, 15, 8, 10, 12, 11, 14, 13])],
            {"advantages of another row"},
        ),
        (lambda x, s: x / (s.std() + 1e-4), {"deviation of the batch", "epsilon 1e-4"}),
    ],
)
def test_rows_in_another_order_and_the_deviation_of_the_batch(change, names):
    """With 1e-4 added to the deviation, as TRL does."""
    arrays = arrays_of("grpo", rows=16)
    scores = arrays["scores"].view(4, 4)
    made = change(scores - scores.mean(1, keepdim=True), scores)
    wrong, found, _ = verdict(arrays | {"advantages": made.flatten()})
    assert wrong == ("advantages of another row" in names) and names <= found


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda x, s: x * s.std(1, keepdim=True), "multiplied by the deviation"),
        (lambda x, s: x / (s.std(1, keepdim=True) / 2 + 1e-6), "divided by the standard error"),
        (lambda x, s: x / x.abs().mean(1, keepdim=True), "divided by the mean absolute deviation"),
        (lambda x, s: x / (s.std(1, keepdim=True) + 1), "1 added to the deviation"),
        (lambda x, s: -x / (s.std(1, keepdim=True) + 1e-6), "advantages with the wrong sign"),
        (lambda x, s: s - s.amax(1, keepdim=True), "an extreme as a baseline"),
        (lambda x, s: s - (s.sum(1, keepdim=True) - s) / 4, "a mean of the others divided by n"),
        (lambda x, s: s - s.sum(1, keepdim=True) / 3, "a mean divided by n minus 1"),
        (lambda x, s: s * 4 / 3 - s.mean(1, keepdim=True), "n / (n - 1) on the score alone"),
        (lambda x, s: x / (s.std(1, keepdim=True) + 0.1), "a large epsilon"),
        (lambda x, s: x / (s.std(1, keepdim=True).roll(1, 0) + 1e-6), "statistics of another group"),
        (lambda x, s: (x / s.std(1, keepdim=True)).clamp(-0.5, 0.5), "clipped advantages"),
        (lambda x, s: s.view(8, 2) - s.view(8, 2).mean(1, keepdim=True), "groups over the wrong rows"),
        (lambda x, s: (s - s.mean(0).unsqueeze(1)) / s.std(1, keepdim=True), "groups over the wrong rows"),
        (lambda x, s: s - s.mean(1, keepdim=True) / (s.std(1, keepdim=True) + 1e-4), "only the mean is divided"),
    ],
)
def test_a_mistake_in_group_advantages_is_named(change, name):
    """Four groups of four, which the dump tells."""
    arrays = arrays_of("grpo", rows=16)
    scores = arrays["scores"].view(4, 4)
    made = change(scores - scores.mean(1, keepdim=True), scores)
    wrong, names, _ = verdict(arrays | {"advantages": made.flatten()})
    assert wrong and name in names


def by_hand(rewards, values, lengths, gamma, lam, after=lambda row, n: 0.0, delta=lambda r, v, w: r + w - v):
    """GAE of each row in plain Python. after: the value after the end. delta: of reward, value, gamma next value."""
    advantages = torch.zeros_like(rewards)
    for row, n in enumerate(lengths):
        later, following = 0.0, after(row, n)
        for t in reversed(range(n)):
            later = delta(float(rewards[row, t]), float(values[row, t]), gamma * following) + gamma * lam * later
            advantages[row, t], following = later, float(values[row, t])
    return advantages


def late(x):
    """Each row moved to the right by one token."""
    return torch.cat([0 * x[:, :1], x[:, :-1]], 1)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"after": lambda v: lambda row, n: float(v[row, n - 1])}, "bootstrapped from the last token"),
        ({"after": lambda v: lambda row, n: float([*v[:, 0], 0][row + 1])}, "bootstrapped from the next row"),
        ({"delta": lambda v: lambda r, own, following: r + following}, "the own value is not subtracted"),
        ({"delta": lambda v: lambda r, own, following: r + following + own}, "the own value is added"),
        ({"delta": lambda v: lambda r, own, following: r - 0.05 / 0.95 * following}, "the next value is subtracted"),
        ({"delta": lambda v: lambda r, own, following: 0.95 * r + following - own}, "the reward is discounted"),
        ({"white": lambda a, m: -a}, "advantages with the wrong sign"),
        ({"white": lambda a, m: a.roll(1, 0)}, "advantages of another row"),
        ({"white": lambda a, m: (a - a[m].mean()) * a[m].std(correction=0)}, "multiplied by the deviation"),
        ({"white": lambda a, m: (a - a[m].mean()) / (a[m].var(correction=0) + 1).sqrt()}, "1 added to the deviation"),
        ({"white": lambda a, m: (a + a[m].mean()) / a[m].std(correction=0)}, "the mean is added"),
        ({"white": lambda a, m: a / m.sum(1, keepdim=True)}, "a sum divided by the length"),
        ({"delta": lambda v: lambda r, own, following: r + 0.95 * own - own}, "the own value as the next"),
        ({"white": lambda a, m: late(a) / late(a)[m].std(correction=0)}, "advantages one token late"),
        ({"returns": lambda a, v: (a + v).roll(-1, 1)}, "returns one token early"),
        ({"returns": lambda a, v: a - v}, "returns minus the values"),
        ({"returns": lambda a, v: a + v.roll(1, 0)}, "returns with values of another row"),
    ],
)
def test_a_mistake_in_gae_or_after_it_is_named(change, name):
    draw = torch.Generator().manual_seed(5)
    lengths = [5, 9, 3, 7, 8, 6]
    mask = torch.arange(9) < torch.tensor(lengths).unsqueeze(1)
    rewards, values = (torch.randn(6, 9, generator=draw, dtype=torch.float64) * mask for _ in range(2))
    how = {key: change[key](values) for key in ("after", "delta") if key in change}
    raw = by_hand(rewards, values, lengths, 0.95, 0.9, **how)
    white = change.get("white", lambda a, m: a)(raw, mask)
    returns = change.get("returns", lambda a, v: a + v)(raw, values)
    made = {"response_ids": torch.arange(54).reshape(6, 9), "response_mask": mask.long(), "rewards": rewards}
    made |= {"values": values, "advantages": white * mask, "returns": returns * mask}
    made |= {"gamma": torch.tensor(0.95), "lam": torch.tensor(0.9)}
    wrong, names, open_ = verdict({key: x.float() if x.is_floating_point() else x for key, x in made.items()})
    assert wrong and name in names and open_ <= {"rewards"}


def given(arrays):
    """The rows, log-probs, coefficient and columns that the expected rewards below are made of."""
    mask = arrays["mask"]
    old, ref, new = (arrays[name].double() * mask for name in ("logprobs", "ref_logprobs", "new_logprobs"))
    return mask, old, ref, new, arrays["scores"].double(), mask.cumsum(1), mask.sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("penalty", "score", "names"),
    [
        (lambda p, q, n, m: n - q, None, "KL of other log-probs"),
        (lambda p, q, n, m: p - q.roll(1, 0) * m, None, "log-probs of another row"),
        (lambda p, q, n, m: (p - q).roll(1, 0) * m, None, "KL of another row"),
        (lambda p, q, n, m: (p - q).sum(1, keepdim=True), None, "KL of the response on every token"),
        (lambda p, q, n, m: (p - q).cumsum(1), None, "KL of the response on every token"),
        (lambda p, q, n, m: (p - q).relu(), None, "KL clamped at 0"),
        (lambda p, q, n, m: p.exp() - q.exp(), None, "KL of probabilities"),
        (lambda p, q, n, m: p.exp() * (p - q), None, "KL weighted by the probability"),
        (lambda p, q, n, m: p, None, "a penalty without the reference"),
        (None, lambda s, i, n: s.unsqueeze(1) / n, "score spread over the tokens"),
        (None, lambda s, i, n: s.unsqueeze(1) * i / n, "score spread over the tokens"),
        (None, lambda s, i, n: s.abs().unsqueeze(1) * (i == n), "score without its sign"),
        (None, lambda s, i, n: s.mean() * (i == n), "one score for all rows"),
        (None, lambda s, i, n: s[2] * (i == n), "one score for all rows"),
        (None, lambda s, i, n: s.clamp(s.quantile(0.3), s.max()).unsqueeze(1) * (i == n), "scores on another scale"),
        (None, lambda s, i, n: (2 * s - 0.4).unsqueeze(1) * (i == n), "scores on another scale"),
        (
            None,
            lambda s, i, n: (s - s.view(-1, 4).mean(1).repeat_interleave(4)).unsqueeze(1) * (i == n),
            "a baseline in the scores",
        ),
        (lambda p, q, n, m: q - p, lambda s, i, n: s.unsqueeze(1) / n, "KL with the wrong sign"),
        (lambda p, q, n, m: q - p, lambda s, i, n: s.unsqueeze(1) / n, "score spread over the tokens"),
    ],
)  # fmt: skip
def test_rewards_of_another_penalty_or_score_are_named(penalty, score, names):
    lost = ("values", "advantages", "returns")
    arrays = {name: x for name, x in arrays_of(rows=16).items() if name not in lost}
    if "sign" in names:  # scores of both signs
        arrays["scores"] = arrays["scores"] - arrays["scores"].mean()
    mask, p, q, new, scores, index, count = given(arrays)
    paid = penalty(p, q, new, mask) if penalty else p - q
    earned = score(scores, index, count) if score else scores.unsqueeze(1) * (index == count)
    _, found, open_ = verdict(arrays | {"rewards": ((-0.1 * paid + earned) * mask).float()})
    assert names in found and not open_
    wrong = {name for name in found if not batch.wiring(name)[0].choice}
    assert len(wrong) == (2 if penalty and score else 0 if batch.wiring(names)[0].choice else 1)


@pytest.mark.parametrize(
    ("name", "change", "array"),
    [
        ("probabilities", torch.exp, "logprobs"),
        ("negative log-probs", torch.neg, "ref_logprobs"),
        ("log-probs added up", lambda x: x.cumsum(1), "new_logprobs"),
        ("one log-prob for the whole response", lambda x: x.sum(1, keepdim=True).expand_as(x), "logprobs"),
        ("the sampler's log-probs times a factor", lambda x: 1.6 * x, "sampler_logprobs"),
        ("the mask includes padding", lambda x: x | True, "mask"),
        ("the mask of another row", lambda x: x.roll(1, 0), "mask"),
        ("the mask is without the first token", lambda x: x & (x.cumsum(1) > 1), "mask"),
    ],
)
def test_masks_and_log_probs_that_cannot_be_right(name, change, array):
    kept = ("query_responses", "mask", "logprobs", "ref_logprobs", "new_logprobs")
    arrays = {key: x for key, x in arrays_of(rows=8).items() if key in kept}
    arrays["sampler_logprobs"] = arrays["logprobs"] * 1
    arrays[array] = change(arrays[array])
    wrong, found, _ = verdict(arrays)
    assert wrong and name in found


def test_arrays_that_are_copies_of_each_other():
    arrays = {key: x for key, x in arrays_of().items() if "logprobs" in key or key in ("query_responses", "mask")}
    same = arrays | {"ref_logprobs": arrays["new_logprobs"]}
    assert verdict(same)[:2] == (True, {"the reference is the policy that is trained"})
    same = arrays | {"new_logprobs": arrays["logprobs"], "first": torch.tensor(0)}
    assert verdict(same)[:2] == (True, {"new log-probs are the old ones"})


def test_of_two_arrays_the_one_that_differs_where_texts_are_equal_is_wrong():
    kept = ("query_responses", "mask", "logprobs", "ref_logprobs")
    arrays = {key: x for key, x in arrays_of(rows=16).items() if key in kept}
    arrays["ref_logprobs"] = arrays["logprobs"].roll(5, 0)
    (finding,) = [f for f in batch.examine(dump.arranged(arrays)).findings if f.names]
    assert finding.names[0].name == "log-probs of another row" and finding.array.endswith("ref_logprobs")


@pytest.mark.parametrize("loss", [None, "plain", "k3"])
def test_a_penalty_that_is_not_in_the_rewards_may_be_in_the_loss(loss):
    arrays = arrays_of(rows=8, loss=True)
    mask, _, ref, new, scores, index, count = given(arrays)
    arrays["rewards"] = (scores.unsqueeze(1) * (index == count)).float()
    d = ((new - ref) * mask)[mask]
    arrays["loss"] = arrays["loss"] + (0.1 * (torch.exp(-d) - 1 + d).mean().float() if loss == "k3" else 0)
    del arrays["returns"]
    if not loss:
        del arrays["loss"]
    found = batch.examine(dump.arranged(arrays)).findings
    said = [f.asks for f in found for name in f.names if name.name == "without a penalty"]
    assert said == {None: [True], "plain": [False], "k3": []}[loss]


def test_what_other_trainers_do_on_purpose_is_no_fault():
    """REINFORCE++ whitens scores over the tokens of the batch; groups may agree; TRL keeps a tool mask apart."""
    arrays = arrays_of("grpo", rows=16)
    mask, scores = arrays["mask"], arrays["scores"].unsqueeze(1).expand(arrays["mask"].shape)
    whitened = (scores - scores[mask].mean()) / scores[mask].std()
    agreed = {"scores": torch.ones(16), "advantages": torch.zeros(mask.shape)}
    tools = torch.ones(mask.shape).index_fill(1, torch.tensor([1, 2]), 0)
    renamed = {("completion_mask" if name == "mask" else name): x for name, x in arrays.items()}
    apart = renamed | {"tool_mask": tools, "advantages": arrays["advantages"] * tools}
    for made in (arrays | {"advantages": whitened * mask}, arrays | agreed, apart):
        wrong, _, open_ = verdict(made)
        assert not wrong and not open_


def others(x, f):
    """A statistic of the other three of each group of four: (16,) -> (16,)."""
    groups = x.view(4, 4)
    rows = [[f(torch.cat([group[:i], group[i + 1 :]])) for i in range(4)] for group in groups]
    return torch.tensor(rows, dtype=x.dtype).flatten()


def less_mean(x):
    return (x.view(4, 4) - x.view(4, 4).mean(1, keepdim=True)).flatten()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda s, kl, n: (s - others(s, torch.mean)) / (others(s, torch.std) + 1e-6), "statistics of the others"),
        (lambda s, kl, n: less_mean(s) * 16 / (s != 0).sum(), "scaled by the scores other than 0"),
        (lambda s, kl, n: less_mean(s).unsqueeze(1) - 0.05 * kl**2 / 2, "another estimator"),
        (lambda s, kl, n: s.unsqueeze(1) - 0.03 * kl.flip(1).cumsum(1).flip(1), "another estimator"),
        (lambda s, kl, n: less_mean(s - 0.02 * kl.sum(1) / n), "the KL of a response as a mean"),
        (lambda s, kl, n: less_mean(s + 0.1 * kl.sum(1)), "KL with the wrong sign"),
        (lambda s, kl, n: less_mean(s - 0.2 * kl.sum(1)), "KL twice"),
        (lambda s, kl, n: less_mean(s).unsqueeze(1) + 0.1 * kl, "KL with the wrong sign"),
        (lambda s, kl, n: 0 * s, "advantages are 0"),
    ],
)
def test_estimators_of_other_trainers_and_their_mistakes(change, name):
    """NeMo-RL, GPG, REINFORCE++ with a baseline and without, and a KL in the score; 0.1 is the coefficient told."""
    arrays = arrays_of(rows=16)
    arrays = {key: x for key, x in arrays.items() if key not in ("rewards", "values", "returns")}
    mask = arrays["mask"]
    kl = (arrays["logprobs"].double() - arrays["ref_logprobs"].double()) * mask
    scores = arrays["scores"].double() - arrays["scores"].double().amin()
    is_fault = batch.wiring(name)[0].choice is False
    if not is_fault:
        del arrays["kl_coef"]
    made = change(scores, kl, mask.sum(1)).reshape(16, -1) * mask
    wrong, names, open_ = verdict(arrays | {"scores": scores.float(), "advantages": made.float()})
    assert wrong == is_fault and name in names and not open_


@pytest.mark.parametrize("rows", [[2, 3], [0, 5], [1, 2, 3]])
def test_a_small_batch_in_bfloat16_accuses_nobody(rows):
    """The constants are those of the dump: others would come as near."""
    arrays = {name: x[rows] for name, x in corpus.rollout().items()}
    made = corpus.cast(corpus.update(arrays, {}, {}, "critic"), "bfloat16")
    wrong, _, open_ = verdict({name: x for name, x in made.items() if name != "loss"})
    assert not wrong and not open_


OF_CRITIC = ("values", "returns", "new_values")


def waves(n):
    return (torch.arange(16.0).reshape(4, 4) * (n + 1)).sin()


def test_two_mistakes_that_rounding_does_not_tell_apart_are_asked_for():
    """In bfloat16, a gamma that is missing in the recursion is another lambda."""
    (fault,) = (fault for fault in corpus.faults.BOOK if fault.title == "gae: without gamma in the recursion")
    arrays = {name: x[:16] for name, x in corpus.rollout().items()}
    made = corpus.cast(corpus.update(arrays, {"gae": fault.compiled}, {}, "critic"), "bfloat16")
    found = batch.examine(dump.arranged({name: x for name, x in made.items() if name != "loss"}))
    said = [
        (f.asks, {name.name for name in f.names if not name.choice})
        for f in found.findings
        if f.array == "advantages"
    ]
    assert said == [(True, {"another lambda", "without gamma in the recursion"})]


@pytest.mark.parametrize(
    ("changes", "status", "name"),
    [
        ({"scores": torch.tensor([1.0, 1.0, 1.0, math.nan]), "groups": torch.zeros(4)}, 0, ""),
        ({"scores": torch.tensor([1.0, 2.0, 3.0, 4.0]), "groups": torch.arange(4)}, 0, ""),
        ({"scores": torch.tensor([1.0, 2.0, 3.0, 4.0]), "groups": torch.zeros(4)}, 1, "advantages are 0"),
        ({"loss": torch.tensor(math.nan)}, 1, "not finite"),
        ({"value_loss": torch.tensor(0.777)} | {name: waves(n) for n, name in enumerate(OF_CRITIC)}, 3, ""),
        ({"tool_mask": torch.ones(4, 3)}, 0, ""),
    ],
)
def test_odd_numbers_are_not_taken_for_others(changes, status, name):
    """Advantages of 0 are right where scores agree; a tool mask may begin with the second token."""
    ids = torch.arange(16).reshape(4, 4)
    arrays = {"response_ids": ids, "mask": ids >= 0, "advantages": torch.zeros(4)}
    arrays |= changes
    found = batch.examine(dump.arranged(arrays))
    assert found.status == status and name in ["", *(fault.name for f in found.findings for fault in f.names)]


@pytest.mark.parametrize(
    ("told", "bounds", "name"),
    [
        ({"cliprange_high": 0.28}, (0.1, 0.28), ""),
        ({"cliprange_high": 0.28}, (0.2, 0.2), "another clip range"),
        ({"cliprange": 0.2, "cliprange_high": 0.28}, (0.28, 0.28), "another clip range"),
        ({"cliprange": 0.2, "cliprange_high": 0.272}, (0.2, 0.272), ""),
    ],
)
def test_an_upper_bound_of_its_own(told, bounds, name):
    arrays = arrays_of("grpo", rows=8)
    ratio = (arrays["new_logprobs"].double() - arrays["logprobs"].double()).exp()
    a = arrays["advantages"].double()
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - bounds[0], 1 + bounds[1])) * arrays["mask"]
    wrong, names, open_ = verdict(arrays | told | {"loss": loss.float()})
    assert wrong == bool(name) and not open_ and name in ["", *names]


@pytest.mark.parametrize("name", ["score in the last column", "score on the token before the last"])
def test_a_wrong_place_of_the_score_is_seen_where_some_responses_fill_the_row(name):
    """Of these, an index that is held within the row leaves the score where it was."""
    arrays = arrays_of(rows=8)
    mask = arrays["mask"]
    cut = mask.shape[1] - int(mask.sum(1).max())
    kept = ("query_responses", "mask", "scores", "logprobs", "ref_logprobs", "rewards")
    made = {key: arrays[key][:, : arrays[key].shape[1] - cut] if key != "scores" else arrays[key] for key in kept}
    last = made["rewards"].abs().argmax(1, keepdim=True)  # where the score is
    moved = made["rewards"].scatter_add(1, last, -arrays["scores"].unsqueeze(1))
    before = torch.where(last < moved.shape[1] - 1, last - 1, last)
    place = before if name.endswith("before the last") else torch.full_like(last, moved.shape[1] - 1)
    moved = moved.scatter_add(1, place, arrays["scores"].unsqueeze(1))
    wrong, names, _ = verdict(made | {"rewards": moved})
    assert wrong and name in names


def test_numbers_of_one_size_accuse_nobody():
    """A group of four with two scores has advantages +-2, as OpenPipe's ART may have: many formulas give that."""
    ids = torch.arange(12).reshape(4, 3)
    arrays = {"response_ids": ids, "mask": ids >= 0, "scores": torch.tensor([1.0, 0.0, 0.0, 1.0])}
    arrays |= {"groups": torch.zeros(4, dtype=torch.long)}
    for size, asks in ((2.0, True), (1.0, False)):  # 1 if the deviation is divided by n, which is a choice
        found = batch.examine(dump.arranged(arrays | {"advantages": size * torch.tensor([1.0, -1.0, -1.0, 1.0])}))
        assert found.status == 0 and [f.asks for f in found.findings if f.array == "advantages"] == [asks]


def test_a_part_of_a_batch_whose_statistics_are_those_of_the_whole():
    """As in a dump from within a loss: the line is found."""
    arrays = arrays_of(rows=8)
    half = {key: x[:4] if x.ndim else x for key, x in arrays.items()}
    found = batch.examine(dump.arranged(half))
    said = [f.unexplained for f in found.findings if f.unexplained]
    assert found.status == 3 and len(said) == 1 and "whitened with other statistics" in said[0]


def test_a_response_without_a_score_has_no_advantage():
    """As TRL 1.16 has it: the statistics are those of the other three."""
    arrays = arrays_of("grpo", rows=16)
    scores = arrays["scores"].view(4, 4).double()
    made = torch.stack([(group - group.mean()) / (group.std() + 1e-6) for group in scores]).flatten()
    rest = scores[0, 1:]
    made[:4] = torch.cat([torch.zeros(1, dtype=made.dtype), (rest - rest.mean()) / (rest.std() + 1e-6)])
    unscored = arrays["scores"].index_fill(0, torch.tensor([0]), math.nan)
    wrong, names, open_ = verdict(arrays | {"scores": unscored, "advantages": made.float()})
    assert not wrong and not open_ and "not finite" not in names


def test_the_return_of_a_critic_with_lambda_1_is_a_choice():
    """Its targets are then the scores, where nothing else is rewarded and gamma is 1."""
    arrays = arrays_of(rows=8)
    mask, values, scores = arrays["mask"], arrays["values"], arrays["scores"]
    rewards = torch.zeros(mask.shape)
    rewards[torch.arange(8), mask.sum(1) - 1] = scores
    raw = by_hand(rewards.double(), values.double(), mask.sum(1).tolist(), 1.0, 0.9).float()
    kept = {key: arrays[key] for key in ("query_responses", "mask", "logprobs", "values", "scores")}
    made = {"rewards": rewards, "advantages": raw, "returns": scores.unsqueeze(1) * mask}
    wrong, names, open_ = verdict(kept | made)
    assert not wrong and not open_ and "a lambda of their own" in names


def test_an_accusation_must_be_near_everywhere():
    """The rounding of one large number would hide that all numbers are 0.3 away."""
    ids = torch.arange(900).reshape(30, 30)
    numbers = torch.ones(30, 30).index_put((torch.tensor(3), torch.tensor(7)), torch.tensor(1000.0))
    found = batch.Doctor(dump.arranged({"ids": ids, "mask": ids >= 0, "values": numbers.bfloat16() * 1.0078125}))
    found.arrays["rewards"] = found.arrays["values"] + 0.3
    found.batch.eps["rewards"] = 2**-23
    for names, expected in (((), True), (batch.wiring("score twice"), False)):
        candidate = Candidate(words="", predict=lambda a: a["values"], names=names)
        assert found.choose("rewards", [candidate], found.mask)[2] == expected


@pytest.mark.parametrize("is_moved", [True, False])
def test_an_end_that_may_not_be_missing_is_asked_for(is_moved):
    """Where every array is that of the token before, and where padding has the end's id."""
    arrays = {key: arrays_of(rows=8)[key] for key in ("query_responses", "mask", "logprobs")}
    ids, mask = arrays["query_responses"], arrays["mask"]
    width = mask.shape[1]
    if is_moved:  # the longest response fills its row
        cut = width - int(mask.sum(1).max())
        prompts = torch.zeros(8, ids.shape[1] - width)
        full, logprobs = (torch.cat([prompts, x], 1)[:, : ids.shape[1] - cut] for x in (mask, arrays["logprobs"]))
        ids = ids.masked_fill(~torch.cat([prompts == 0, mask], 1), 0)[:, : ids.shape[1] - cut]
        arrays = {"input_ids": ids, "mask": full.roll(-1, 1), "logprobs": logprobs.roll(-1, 1), "pad_id": 0}
    else:
        end = int(ids[0, -width:][mask[0]][-1])
        ids[:, -width:] = ids[:, -width:].masked_fill(~mask, end)
        arrays |= {"mask": mask & (mask.flip(1).cumsum(1).flip(1) > 1), "eos_id": end, "pad_id": end}
    found = [f for f in batch.examine(dump.arranged(arrays)).findings if f.array == "mask" and f.names]
    assert [(f.asks, [name.name for name in f.names]) for f in found] == [(True, ["the mask is without the end"])]


# ---- With the model --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda a: a["logprobs"], None),
        (lambda a: a["logprobs"].roll(1, 1), "log-probs one token late"),
        (lambda a: a["logprobs"].roll(-1, 1), "log-probs one token early"),
        (lambda a: a["logprobs"] + 0.1 * (a["values"] > 0), "log-probs of other weights"),
        (lambda a: a["ref_logprobs"], "log-probs of the reference"),
    ],
)
def test_the_model_shows_what_is_wrong_with_log_probs(change, name):
    arrays = arrays_of(rows=4)
    arrays["logprobs"] = change(arrays).contiguous()
    arrays = {key: arrays[key] for key in ("query_responses", "mask", "logprobs", "ref_logprobs")}
    arrays |= {"temperature": torch.tensor(0.7), "step": torch.tensor(3)}
    wrong, names, _ = verdict(arrays, corpus.MODEL)
    assert wrong == bool(name) and (not name or name in names)


@pytest.mark.parametrize("reader", ["bfloat16", "autocast", "stale"])
def test_rounding_is_told_from_stale_weights(reader):
    """Each moves log-probs by 0.01 to 0.02 nats, and only the first two are near what the model gives in bfloat16."""
    arrays = arrays_of(rows=8)
    model = recompute.load(corpus.MODEL)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weights in model.parameters() if reader == "stale" else ():
            weights += 0.01 * weights.std().nan_to_num(0) * torch.randn(weights.shape, generator=draw)
    model = model.bfloat16() if reader == "bfloat16" else model
    with torch.autocast("cpu", torch.bfloat16, enabled=reader == "autocast"), torch.no_grad():
        for row, mask in enumerate(arrays["mask"]):
            tokens = arrays["query_responses"][row]
            text = tokens[: -len(mask)][tokens[: -len(mask)] != tokens.max()]
            response = tokens[-len(mask) :][mask]
            logits = model(torch.cat([text, response]).unsqueeze(0)).logits[0, len(text) - 1 : -1].float() / 0.7
            arrays["logprobs"][row, mask] = logits.log_softmax(1).gather(1, response.unsqueeze(1))[:, 0]
    arrays = {key: arrays[key] for key in ("query_responses", "mask", "logprobs")} | {
        "temperature": torch.tensor(0.7)
    }
    kind = "weights" if reader == "stale" else "numerics"
    assert verdict(arrays, corpus.MODEL)[:2] == (True, {f"log-probs of other {kind}"})


def test_the_model_shows_another_temperature():
    arrays = arrays_of(rows=4)
    arrays = {key: arrays[key] for key in ("query_responses", "mask", "logprobs")} | {
        "temperature": torch.tensor(1.0)
    }
    wrong, names, _ = verdict(arrays, corpus.MODEL)
    assert wrong and names == {"log-probs at another temperature"}


# ---- What cannot be explained ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rewards", "advantages", "returns"])
def test_an_array_of_noise_is_neither_called_healthy_nor_a_fault(name):
    arrays = arrays_of()
    arrays[name] = torch.randn(arrays[name].shape, generator=torch.Generator().manual_seed(4)) * arrays["mask"]
    found = batch.examine(dump.arranged(arrays))
    assert found.status == 3 and {f.array for f in found.findings if f.unexplained} >= {name}


def test_what_a_dump_lacks_is_said():
    arrays = arrays_of()
    del arrays["values"], arrays["returns"]
    assert verdict(arrays)[::2] == (False, {"advantages"})


# ---- Files and names -------------------------------------------------------------------------------------------


def write(path: Path, arrays) -> Path:
    if path.suffix == ".safetensors":
        save_file(arrays, path)
    elif path.suffix == ".pt":
        torch.save(arrays, path)
    else:
        rows = len(arrays["mask"])
        found = [{name: (x[i] if x.ndim else x).tolist() for name, x in arrays.items()} for i in range(rows)]
        if path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in found))
        else:
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(found), path)
    return path


@pytest.mark.parametrize("kind", [".safetensors", ".pt", ".jsonl", ".parquet"])
def test_every_kind_of_file_says_the_same(kind, tmp_path):
    arrays = arrays_of(**corpus.WIRING["KL with the wrong sign"])
    found = batch.examine(dump.read(write(tmp_path / f"dump{kind}", arrays)))
    assert [fault.name for f in found.findings for fault in f.names] == ["KL with the wrong sign"]


def test_names_of_others_are_read():
    """verl's names, whole rows with an attention mask; TRL's padding mask, and prompts apart."""
    arrays = arrays_of()
    width = arrays["mask"].shape[1]
    tokens, mask = arrays["query_responses"], arrays["mask"]
    verl = {"prompts": tokens[:, :-width], "responses": tokens[:, -width:], "response_mask": mask.long()}
    verl |= {"old_log_probs": arrays["logprobs"], "ref_log_prob": arrays["ref_logprobs"], "values": arrays["values"]}
    scores = torch.zeros(mask.shape).masked_scatter(corpus.last(mask), arrays["scores"])
    verl |= {"token_level_scores": scores, "token_level_rewards": arrays["rewards"]}
    verl |= {"advantages": arrays["advantages"], "returns": arrays["returns"]}
    trl = {"prompt_ids": tokens[:, :-width], "completion_ids": tokens[:, -width:], "padding_mask": ~mask}
    trl |= {"old_per_token_logps": arrays["logprobs"], "scores": arrays["scores"], "rewards": arrays["rewards"]}
    trl |= {"ref_per_token_logps": arrays["ref_logprobs"], "values": arrays["values"]}
    trl |= {"advantages": arrays["advantages"], "returns": arrays["returns"]}
    assert verdict(verl) == verdict(trl) == (False, set(), set())


def test_rows_that_hold_several_episodes_are_cut():
    arrays = arrays_of(rows=4)
    names = ("mask", "logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns")
    width = arrays["mask"].shape[1]
    packed = {name: arrays[name].reshape(1, -1) for name in names}
    packed |= {"responses": arrays["query_responses"][:, -width:].reshape(1, -1)}
    packed["segments"] = torch.arange(1, 5).repeat_interleave(width).unsqueeze(0)
    wrong, _, open_ = verdict(packed)
    assert not wrong and not open_
    rewards, values, mask = (packed[name].reshape(2, -1) for name in ("rewards", "values", "mask"))
    raw = torch.zeros(rewards.shape)
    for row, columns in enumerate(map(torch.nonzero, mask)):  # two episodes in each, and nothing ends the first
        there, counted = columns[:, 0], len(columns)
        raw[row, there] = by_hand(rewards[row : row + 1, there], values[row : row + 1, there], [counted], 1, 0.95)[0]
    packed = {name: x.reshape(2, -1) for name, x in packed.items()}
    wrong, names, _ = verdict(packed | {"advantages": raw, "returns": (raw + values) * mask})
    assert wrong and "GAE across episodes" in names


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("dump.safetensors", None, "there is no such file"),
        ("dump.npz", b"", "a dump is a .safetensors"),
        ("dump.safetensors", b"no tensors", "cannot be read as .safetensors"),
        ("dump.pt", Path("x"), "cannot be read as .pt"),
        ("dump.jsonl", b"{", "cannot be read as .jsonl"),
        ("dump.jsonl", b"[1]\n", "arrays by name"),
        ("dump.jsonl", b'{"mask": [1, 1]}\n', "token ids are missing"),
        ("dump.jsonl", b'{"tokens": [1, 2]}\n', "a mask (rows, tokens) is missing"),
        ("dump.jsonl", b'{"tokens": [1], "mask": [1, 1]}\n', "they must fit"),
        ("dump.jsonl", b'{"tokens": [1, 2], "mask": [0, 0]}\n', "the mask counts no token"),
        ("dump.json", b'{"queries": [1], "responses": [[1, 2]], "mask": [[1, 1]]}', "do not fit together"),
        ("dump.jsonl", b'{"tokens": [1, 2], "mask": [1, 1], "values": [1, 2, 3, 4], "rewards": 2}\n', ""),
    ],
)
def test_a_bad_file_ends_in_one_line(name, content, message, tmp_path, monkeypatch, capsys):
    path = tmp_path / name
    if isinstance(content, Path):  # an object, which loading would build
        torch.save({"mask": content}, path)
    elif content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["check", "--batch", str(path)])
    if message:
        assert message in error_line(command.main)
    else:
        assert command.main() == 0


def test_the_page_shows_what_is_printed():
    page = (corpus.ROOT / "docs/check.md").read_text().split("## Functions")[0]
    shown = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    for change, expected in zip((corpus.OF_GROUPS["normalised twice"], {}), shown, strict=True):
        arrays = arrays_of("grpo", **change)
        kept = ("query_responses", "mask", "scores", "groups", "advantages")
        found = batch.examine(dump.arranged({name: arrays[name] for name in kept}))
        printed = [" ".join(line.split()) for line in batch.lines_of(found)]
        assert " ".join(" ".join(printed).split()).endswith(" ".join(expected.split()))


def test_the_command_ends_with_1_if_there_is_a_fault(tmp_path, monkeypatch, capsys):
    for change, status in ((None, 0), ("KL twice", 1)):
        path = write(tmp_path / "dump.pt", arrays_of(**(corpus.WIRING[change] if change else {})))
        monkeypatch.setattr(sys, "argv", ["check", "--batch", str(path)])
        assert command.main() == status
        printed = capsys.readouterr().out
        assert ("Fault in rewards: KL twice." in printed) == bool(change)
        assert "lambda 0.9" in printed and not math.isnan(status)
