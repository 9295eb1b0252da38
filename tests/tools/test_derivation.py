"""derivation.py computes what the scripts compute, also in the recorded updates that the chapters' pages show."""

import json
import math
import re
import statistics
from collections.abc import Callable
from operator import itemgetter

import pytest
import torch
from oracles import double
from runs import ROOT

from ppo_rlhf.report import derivation
from ppo_rlhf.rlvr import algebra

RECORDED = {2: "tldr_policy_update", 3: "rlvr_policy_update"}


# ---- The derivation and rlvr/algebra.py ------------------------------------------------------------------------


def invented_groups(seed: int) -> dict[str, torch.Tensor]:
    """A batch of chapter 3 in float64: eight responses of at most nine tokens, in two groups."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(8, 9, generator=generator).double() for name in ("logprobs", "values", "new_values")}
    for name in ("ref_logprobs", "new_logprobs"):
        drawn[name] = drawn["logprobs"] + 0.4 * torch.randn(8, 9, generator=generator).double()
    drawn["scored"] = torch.arange(9) < torch.randint(1, 10, (8, 1), generator=generator)
    drawn["token_scores"] = torch.randint(0, 2, (8, 9), generator=generator).double()
    drawn |= {"scores": torch.randint(0, 3, (8,), generator=generator).double(), "groups": torch.arange(8) // 4}
    return drawn | {"baselines": torch.rand(8, generator=generator).double()}


def with_algebra(x: dict[str, torch.Tensor], s: dict) -> dict[str, torch.Tensor]:
    """What rlvr/algebra.py makes of the batch with the settings of a derivation."""
    mask = x["scored"]
    of_tokens = {"token_scores": x["token_scores"]} if s["advantage"] in algebra.OF_TOKENS else {}
    rewards, _, kl = algebra.compute_rewards(
        x["scores"], x["logprobs"], x["ref_logprobs"], mask, s["kl_coef"], s["kl_estimator"], **of_tokens
    )
    more = {"values": x["values"], "baselines": x["baselines"]}
    more |= {"parts": torch.stack([x["scores"], x["baselines"]], 1), "weights": [1.0, 0.5]}
    more |= {name: s[name] for name in ("gamma", "lam", "critic_lam", "lam_alpha")}
    raw, returns = algebra.ESTIMATORS[s["advantage"]](rewards, mask, x["groups"], **more)
    advantages = algebra.whiten(raw, mask, keep_mean=False) if s["whiten_advantages"] else raw
    bounds = {"low": s["cliprange_low"], "high": s["cliprange_high"]}
    bounds |= {name: s[name] for name in ("dual_clip", "trust_region")}
    losses, _, _ = algebra.token_losses(x["new_logprobs"], x["logprobs"], advantages, mask, s["loss"], **bounds)
    found = {"kl": kl, "rewards": rewards, "raw_advantages": raw, "advantages": advantages, "loss": losses}
    found["share"] = losses / mask.sum()
    if returns is not None:
        of_values = algebra.value_losses(x["new_values"], x["values"], returns, mask, s["cliprange_value"])
        found |= {"returns": returns, "value_loss": of_values[0]}
    return found


def episodes_of(x: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], s: dict) -> list[dict]:
    """The batch as a trace has it."""
    raw_advantages = theirs["raw_advantages"][x["scored"]]
    mean, deviation = raw_advantages.mean().item(), math.sqrt(raw_advantages.var(unbiased=False).item() + 1e-8)
    episodes = []
    for i in range(8):
        n = int(x["scored"][i].sum())
        rows = {name: tensor[i, :n].tolist() for name, tensor in (x | theirs).items() if tensor.dim() == 2}
        names = ("logprobs", "ref_logprobs", "values", "rewards", "scored")
        of_tokens = {"token_scores": rows["token_scores"]} if s["advantage"] in algebra.OF_TOKENS else {}
        shared = {"kl_coef": s["kl_coef"], "baselines": x["baselines"][i].item(), "tokens": int(x["scored"].sum())}
        score, baseline = x["scores"][i].item(), x["baselines"][i].item()
        episodes.append(
            {
                "places": list(range(n)),
                "tokens": {name: rows[name] for name in names} | {"mask": rows["scored"]} | of_tokens,
                "epochs": {name: [rows[name]] for name in ("new_logprobs", "new_values")},
                "statistics": shared | {"advantage_mean": mean, "advantage_deviation": deviation},
                "numbers": {"scores": score, "verifier": score, "format": baseline, "groups": int(x["groups"][i])},
            }
        )
    return episodes


SETTINGS = derivation.settings_of({"ppo": {"cliprange_value": 0.2, "cliprange_low": None}}, "rlvr_policy")
SETTINGS |= {
    "gamma": 0.9,
    "lam": 0.7,
    "cliprange_high": 0.2,
    "kl_coef": 0.2,
    "sources": {"verifier": 1.0, "format": 0.5},
}
CHANGES = [{"advantage": name, "whiten_advantages": name in algebra.WHITENED} for name in algebra.ESTIMATORS]
CHANGES += [
    {"loss": loss, "cliprange_low": 0.1, "cliprange_high": 0.3, "dual_clip": 1.4, "trust_region": 0.05}
    for loss in ("ppo", "gspo", "cispo", "ipo", "dppo", "reinforce")
]
CHANGES += [{"kl_estimator": name, "kl_coef": 0.4} for name in ("abs", "k2", "k3")]
CHANGES += [{"critic_lam": 1.0}, {"lam_alpha": 0.6}, {"critic_lam": 0.7, "lam_alpha": 0.2}]
CHANGES += [{"whiten_advantages": False}, {"advantage": "rloo"}, {"cliprange_value": None}]


def differences_from_algebra(changes: dict, seed: int) -> float:
    settings, x = SETTINGS | changes, invented_groups(seed)
    theirs, most = with_algebra(x, settings), 0.0
    episodes, steps = episodes_of(x, theirs, settings), derivation.steps_of(settings)
    for i, episode in enumerate(episodes):
        group = episodes[:4] if i < 4 else episodes[4:]
        found = derivation.derive(episode, settings, steps, group=group)
        for name in theirs.keys() - (set() if settings["whiten_advantages"] else {"advantages"}):
            ours = double(*(of_token[name] for of_token in found))
            most = max(most, (ours - theirs[name][i, : len(ours)]).abs().nan_to_num(nan=9.0).max().item())
    return most


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_the_derivation_computes_what_algebra_computes(changes):
    for seed in range(3):
        assert differences_from_algebra(changes, seed) < 1e-6


BY_HAND = {  # the KL in the loss, shares of the policy loss and of the KL loss
    # k3 of 1/2 under the reference and 1/4 under the policy is 2 - 1 - ln 2. Both advantages are 3.
    "k3 none": (1 - math.log(2), -1.5 / 2, 0.1 * (1 - math.log(2)) / 2),
    # The ratio of new to old is (1/4) / (1/2).
    "k3+ none": ((1 - math.log(2)) / 2, -1.5 / 2, 0.1 * (1 - math.log(2)) / 2 / 2),
    "k1+ none": (-math.log(2) / 2, -1.5 / 2, -0.1 * math.log(2) / 2 / 2),
    # The weight is 4.
    "k3+ decoupled": ((1 - math.log(2)) / 2, 4 * -1.5 / 2, 4 * 0.1 * (1 - math.log(2)) / 2 / 2),
    # The ratio of new to the sampler is (1/4) / (2/5), within the lower bound of 1/2. The weight is in it already.
    "k3+ bypass": ((1 - math.log(2)) * 0.625, 0.625 * -3 / 2, 0.1 * (1 - math.log(2)) * 0.625 / 2),
}


@pytest.mark.parametrize("kind", BY_HAND)
def test_ratio_and_weight_of_a_loss_by_hand(kind):
    """Both tokens have the same numbers, and only the last one is scored."""
    estimator, correction = kind.split()
    ppo = {"advantage": "gae", "gamma": 1.0, "lam": 1.0, "whiten_advantages": False, "cliprange_low": 0.5}
    penalty = {"kl_coef": 0.0, "kl_loss_coef": 0.1, "kl_loss_estimator": estimator}
    args = {"ppo": ppo | {"cliprange_high": 0.5}, "rewards": penalty, "correction": correction}
    settings, one = derivation.settings_of(args, "rlvr_policy"), [0.0, 0.0]
    logs = {"logprobs": 1 / 2, "ref_logprobs": 1 / 2, "sampler_logprobs": 2 / 5}
    tokens = {name: [math.log(p)] * 2 for name, p in logs.items()} | {"values": one, "weights": [4.0, 4.0]}
    episode = {
        "places": [0, 1],
        "tokens": tokens,
        "epochs": {"new_logprobs": [[math.log(1 / 4)] * 2], "new_values": [one]},
        "statistics": {"kl_coef": 0.0, "tokens": 2},
        "numbers": {"scores": 3.0, "verifier": 3.0, "groups": 0},
    }
    for token in derivation.derive(episode, settings, derivation.steps_of(settings)):
        found = (token["kl_loss"], token["share"], token["kl_share"])
        assert found == pytest.approx(BY_HAND[kind], rel=1e-12), kind


def test_each_place_of_a_step_exists():
    """File, function and mark."""
    for row in derivation.TABLE["step"]:
        for place in row["where"]:
            file, function, mark = place.split()
            text = (ROOT / "ppo_rlhf" / file).read_text()
            assert f"def {function}(" in text and re.search(rf"\[{mark}\]", text), place


# ---- The updates that the pages show ---------------------------------------------------------------------------


@pytest.mark.parametrize("chapter", RECORDED)
def test_the_recorded_runs_computed_the_same(chapter):
    """Every row that the run recorded, in float32, and metrics that it logged, which are means over the epochs.

    test_explain.py compares with a run of chapter 1.
    """
    told = json.loads((ROOT / f"benchmark/results/{RECORDED[chapter]}.json").read_text())
    settings, episodes = derivation.settings_of(told["args"], told["script"]), told["episodes"]
    steps, group = derivation.steps_of(settings), episodes if chapter == 3 else ()
    epochs = [  # of each, every number of its tokens
        [derivation.derive(episode, settings, steps, epoch, group) for episode in episodes]
        for epoch in range(len(episodes[0]["epochs"]["new_logprobs"]))
    ]
    compared = 0
    for episode, numbers in zip(episodes, epochs[-1], strict=True):
        for line in (line for lines in derivation.lines_of(episode, steps, numbers) for line in lines):
            if not math.isnan(line.recorded):
                assert line.value == pytest.approx(line.recorded, rel=0, abs=2e-5), line
                compared += 1
    assert compared >= 48

    def total(flag: str, number: Callable[[dict], float]) -> float:
        """The sum over the tokens with a flag, averaged over the epochs."""
        return math.fsum(number(x) for epoch in epochs for row in epoch for x in row if x[flag]) / len(epochs)

    def mean(flag: str, number: Callable[[dict], float]) -> float:
        return total(flag, number) / total(flag, lambda x: 1)

    found = {
        "loss/policy_avg": total("learns", itemgetter("share")),
        "policy/clipfrac_avg": mean("learns", lambda x: x["clipped"] > x["unclipped"]),
        "val/ratio": mean("learns", itemgetter("ratio")),
        "objective/kl": total("learns", itemgetter("kl")) / len(episodes),
        "objective/scores": statistics.fmean(one[0]["score"] for one in epochs[0]),
    }
    if chapter == 2:
        found["loss/value_avg"] = total("value_learns", itemgetter("value_share"))
        found["val/clipfrac_avg"] = mean("value_learns", lambda x: x["value_clipped"] > x["value_free"])
    assert found == pytest.approx({name: told["logged"][name] for name in found}, abs=2e-6)
