"""derivation.py computes what the scripts compute, also in the recorded updates that the chapters' pages show."""

import random
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from ppo_rlhf import train_policy
from ppo_rlhf.lib import traces
from ppo_rlhf.lib.files import read_json
from ppo_rlhf.report import derivation
from ppo_rlhf.rlvr import algebra

ROOT = Path(__file__).parent.parent
RECORDED = read_json(ROOT / "benchmark/results/one_update.json")


def double(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def invented(seed: int) -> dict:
    """Five episodes of seven tokens: many ratios and new values are outside of their ranges."""
    draw = partial(random.Random(seed).gauss, 0.0)

    def rows(deviation: float, around=None) -> list[list[float]]:
        return [[draw(deviation) + (around[i][t] if around else 0) for t in range(7)] for i in range(5)]

    logprobs, values = rows(1), rows(1)
    settings = {"kl_coef": 0.3, "penalty_reward_value": -1.5, "vf_coef": 0.25}
    settings |= {"gamma": 0.9, "lam": 0.6, "cliprange": 0.15, "cliprange_value": 0.25}
    return {
        "settings": settings,
        "raw_scores": [draw(2) for _ in range(5)],
        "stopped": [i % 2 == 0 for i in range(5)],
        **{"logprobs": logprobs, "ref_logprobs": rows(1, logprobs), "values": values},
        "epochs": [{"new_logprobs": rows(0.4, logprobs), "new_values": rows(0.8, values)} for _ in range(2)],
    }


def with_tensors(told: dict) -> dict:
    """The same numbers as train_policy.py computes them, in float64."""
    settings = told["settings"]
    names = ("gamma", "lam", "cliprange", "cliprange_value", "vf_coef")
    ppo = train_policy.PpoArgs(**{name: settings[name] for name in names})
    logprobs, values = double(told["logprobs"]), double(told["values"])
    scores = torch.where(torch.tensor(told["stopped"]), double(told["raw_scores"]), settings["penalty_reward_value"])
    rewards, _, kl = train_policy.compute_rewards(scores, logprobs, double(told["ref_logprobs"]), settings["kl_coef"])
    whitened = train_policy.whiten(rewards, keep_mean=True)
    advantages, _ = train_policy.compute_gae(whitened, values, ppo.gamma, ppo.lam)
    [whitened_advantages], [returns] = train_policy.group_advantages(rewards[None], values[None], ppo)
    epochs = []
    for epoch in told["epochs"]:
        new_logprobs, new_values = double(epoch["new_logprobs"]), double(epoch["new_values"])
        told_of_old = (logprobs, values, whitened_advantages, returns)
        epochs.append(train_policy.ppo_loss(new_logprobs, torch.zeros(1), new_values, *told_of_old, ppo)[1])
    tensors = {"scores": scores, "kl": kl, "rewards": rewards, "whitened_rewards": whitened}
    tensors |= {"advantages": advantages, "returns": returns, "whitened_advantages": whitened_advantages}
    return {**tensors, "epochs": epochs}


def by_hand(told: dict) -> dict:
    """The same numbers by `derive`, which gets the moments of the whole batch, as in a trace."""
    theirs, settings, places = with_tensors(told), told["settings"], list(range(len(told["logprobs"][0])))
    shared = {"kl_coef": settings["kl_coef"], **dict.fromkeys(("tokens", "values"), theirs["kl"].numel())}
    for name, x in (("reward", theirs["rewards"]), ("advantage", theirs["advantages"])):
        shared |= {f"{name}_mean": x.mean().item(), f"{name}_deviation": (x.var(correction=0) + 1e-8).sqrt().item()}
    names = ("gamma", "lam", "cliprange", "cliprange_value", "vf_coef")
    args = {"ppo": {"whiten_rewards": True} | {name: settings[name] for name in names}}
    of_script = derivation.settings_of(args, "train_policy")
    steps = derivation.steps_of(of_script)
    epochs = []
    for k in range(len(told["epochs"])):
        epochs.append([])
        for i, score in enumerate(theirs["scores"].tolist()):
            tokens = {name: told[name][i] for name in ("logprobs", "ref_logprobs", "values")}
            said = {name: [one[name][i] for one in told["epochs"]] for name in ("new_logprobs", "new_values")}
            episode = {"tokens": tokens, "numbers": {"scores": score}, "places": places, "epochs": said}
            epochs[k].append(derivation.derive(episode | {"statistics": shared}, of_script, steps, k))
    tables = {name: name for name in ("kl", "rewards", "whitened_rewards", "returns")}
    tables |= {"advantages": "raw_advantages", "whitened_advantages": "advantages"}
    found = {name: table(epochs[0], key) for name, key in tables.items()}
    return found | {"epochs": [logged(epoch, settings["vf_coef"]) for epoch in epochs]}


def table(episodes: list[list[dict]], name: str) -> torch.Tensor:
    """A number of all tokens (episodes, tokens)."""
    return double([[of_token[name] for of_token in episode] for episode in episodes])


def logged(episodes: list[list[dict]], vf_coef: float) -> dict[str, float]:
    """An epoch's numbers under the names that train_policy.py logs."""
    policy, value = table(episodes, "share").sum().item(), table(episodes, "value_share").sum().item()
    is_clipped = table(episodes, "clipped") > table(episodes, "unclipped")
    value_is_clipped = table(episodes, "value_clipped") > table(episodes, "value_free")
    return {
        "ppo/loss/policy": policy,
        "ppo/loss/value": value,
        "ppo/loss/total": policy + vf_coef * value,
        "ppo/policy/clipfrac": is_clipped.double().mean().item(),
        "ppo/val/clipfrac": value_is_clipped.double().mean().item(),
        "ppo/val/ratio": table(episodes, "ratio").mean().item(),
    }


def difference(ours: dict, theirs: dict) -> float:
    """The largest difference of two such dictionaries."""
    gaps = [(ours[name] - theirs[name]).abs().max().item() for name in ours if name != "epochs"]
    for one, other in zip(ours["epochs"], theirs["epochs"], strict=True):
        gaps += [abs(one[name] - float(other[name])) for name in one]
    return max(gaps)


# ---- The derivation and train_policy.py ------------------------------------------------------------------------


@pytest.mark.parametrize("told", [RECORDED, *map(invented, range(20))], ids=lambda told: told.get("commit", "random"))
def test_the_derivation_computes_what_train_policy_computes(told):
    assert difference(by_hand(told), with_tensors(told)) < 1e-12


def test_invented_episodes_use_every_branch():
    for epoch in by_hand(invented(0))["epochs"]:
        assert 0.1 < epoch["ppo/policy/clipfrac"] < 0.9 and 0.1 < epoch["ppo/val/clipfrac"] < 0.9


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("-kl_coef * kl + score", "-kl_coef * kl"),
        ("used_rewards + gamma * next_values - values", "used_rewards + gamma * values - values"),
        (
            "deltas + gamma * policy_lam * next_raw_advantages",
            "deltas + gamma ** 2 * policy_lam * next_raw_advantages",
        ),
        ("target_advantages + values", "target_advantages"),
        ("-used_advantages * clip(ratio, 1 - cliprange_low, 1 + cliprange_high)", "-used_advantages * ratio"),
        ("(raw_advantages - advantage_mean) / advantage_deviation", "raw_advantages / advantage_deviation"),
    ],
)
def test_a_mistake_in_a_step_is_found(monkeypatch, right, wrong):
    for row in [row for row in derivation.TABLE["step"] if row["expression"] == right]:
        monkeypatch.setitem(row, "expression", wrong)
    assert difference(by_hand(invented(0)), with_tensors(invented(0))) > 1e-3


def test_the_recorded_run_computed_the_same():
    """In float32, and with metrics that are means over the epochs."""
    logged_by_run, ours = RECORDED["train_policy"], by_hand(RECORDED)
    assert (ours["rewards"] - double(logged_by_run["rewards"])).abs().max() < 1e-6
    for name in ours["epochs"][0]:
        mean = sum(epoch[name] for epoch in ours["epochs"]) / len(ours["epochs"])
        assert mean == pytest.approx(logged_by_run[name], abs=2e-6), name
    assert ours["kl"].sum(1).mean().item() == pytest.approx(logged_by_run["objective/kl"], abs=1e-6)
    assert ours["returns"].mean().item() == pytest.approx(logged_by_run["ppo/returns/mean"], abs=1e-6)
    assert RECORDED["epochs"][0]["new_logprobs"] == [pytest.approx(row, abs=1e-5) for row in RECORDED["logprobs"]]


# ---- The derivation and rlvr/algebra.py ------------------------------------------------------------------------


def invented_groups(seed: int) -> dict[str, torch.Tensor]:
    """A batch of chapter 3 in float64: eight responses of at most nine tokens, in two groups."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(8, 9, generator=generator).double() for name in ("logprobs", "values", "new_values")}
    for name in ("ref_logprobs", "new_logprobs"):
        drawn[name] = drawn["logprobs"] + 0.4 * torch.randn(8, 9, generator=generator).double()
    drawn["scored"] = torch.arange(9) < torch.randint(1, 10, (8, 1), generator=generator)
    drawn |= {"scores": torch.randint(0, 3, (8,), generator=generator).double(), "groups": torch.arange(8) // 4}
    return drawn | {"baselines": torch.rand(8, generator=generator).double()}


def with_algebra(x: dict[str, torch.Tensor], s: dict) -> dict[str, torch.Tensor]:
    """What rlvr/algebra.py makes of the batch with the settings of a derivation."""
    mask = x["scored"]
    rewards, _, kl = algebra.compute_rewards(
        x["scores"], x["logprobs"], x["ref_logprobs"], mask, s["kl_coef"], s["kl_estimator"]
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
    mean, deviation = (number.item() for number in traces.moments(theirs["raw_advantages"], x["scored"]))
    episodes = []
    for i in range(8):
        n = int(x["scored"][i].sum())
        rows = {name: tensor[i, :n].tolist() for name, tensor in (x | theirs).items() if tensor.dim() == 2}
        names = ("logprobs", "ref_logprobs", "values", "rewards", "scored")
        shared = {"kl_coef": s["kl_coef"], "baselines": x["baselines"][i].item(), "tokens": int(x["scored"].sum())}
        score, baseline = x["scores"][i].item(), x["baselines"][i].item()
        episodes.append(
            {
                "places": list(range(n)),
                "tokens": {name: rows[name] for name in names} | {"mask": rows["scored"]},
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
            ours = double([of_token[name] for of_token in found])
            most = max(most, (ours - theirs[name][i, : len(ours)]).abs().nan_to_num(nan=9.0).max().item())
    return most


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_the_derivation_computes_what_algebra_computes(changes):
    for seed in range(3):
        assert differences_from_algebra(changes, seed) < 1e-6


@pytest.mark.parametrize(
    ("changes", "right", "wrong"),
    [
        ({"advantage": "grpo"}, "(total - group_mean) / (group_deviation + 1e-6)", "total - group_mean"),
        ({"advantage": "rloo"}, "group_size / (group_size - 1) * (total - group_mean)", "total - group_mean"),
        ({"advantage": "maxrl"}, "(total - group_mean) / (group_mean + 1e-6)", "total - group_mean"),
        ({"advantage": "opo"}, "total - group_weighted_mean", "total - group_mean"),
        ({"advantage": "remax"}, "sums - baselines", "sums"),
        ({"lam_alpha": 0.6}, "max(0, 1 - 1 / (lam_alpha * valued_tokens))", "lam"),
        ({"critic_lam": 1.0}, "deltas + gamma * critic_lam * next_own_targets", "raw_advantages"),
        (
            {"loss": "cispo"},
            "-clip(ratio, 1 - cliprange_low, 1 + cliprange_high) * used_advantages * new_logprobs",
            "0",
        ),
    ],
)
def test_a_mistake_in_an_estimator_is_found(changes, right, wrong, monkeypatch):
    changes = {"whiten_advantages": False} | changes
    for row in [row for row in derivation.TABLE["step"] if row["expression"] == right]:
        monkeypatch.setitem(row, "expression", wrong)
    assert differences_from_algebra(changes, 0) > 1e-3


def test_each_place_of_a_step_exists():
    """File, function and mark."""
    for row in derivation.TABLE["step"]:
        for place in row["where"]:
            file, function, mark = place.split()
            text = (ROOT / "ppo_rlhf" / file).read_text()
            assert f"def {function}(" in text and re.search(rf"\[{mark}\]", text), place


# ---- Chapters 2 and 3: the recorded runs -----------------------------------------------------------------------

EXAMPLES = {
    chapter: read_json(ROOT / f"benchmark/results/{name}_update.json")
    for chapter, name in {2: "tldr_policy", 3: "rlvr_policy"}.items()
}


def section(chapter: int) -> str:
    page = (ROOT / f"docs/chapter{chapter}.md").read_text()
    return page.partition("## One update by hand\n")[2].partition("\n## ")[0]


def derived(told: dict, epoch: int = 0) -> list[list[dict]]:
    """Every number of the episodes of a recording in an epoch."""
    settings, episodes = derivation.settings_of(told["args"], told["script"]), told["episodes"]
    steps, group = derivation.steps_of(settings), episodes if settings["chapter"] == 3 else ()
    return [derivation.derive(episode, settings, steps, epoch, group) for episode in episodes]


def counted(found: list[list[dict]], name: str, flag: str) -> list[float]:
    """A number of all tokens where a flag is set."""
    return [of_token[name] for one in found for of_token in one if of_token[flag]]


def over_episodes(told: dict, name: str, mask: str) -> np.ndarray:
    """The recorded numbers of all tokens that a mask keeps."""
    rows = [(episode["tokens"][name], episode["tokens"][mask]) for episode in told["episodes"]]
    return np.array([x for row, keep in rows for x, kept in zip(row, keep, strict=True) if kept])


@pytest.mark.parametrize("chapter", [2, 3])
def test_later_chapters_computed_the_same(chapter):
    """Every row that the run recorded, and the metrics that it logged."""
    told = EXAMPLES[chapter]
    epochs = [derived(told, k) for k in range(len(told["episodes"][0]["epochs"]["new_logprobs"]))]
    rows = {"kl": ("learns", "mask"), "advantages": ("learns", "mask")}
    rows |= {"rewards": ("valued", "value_mask"), "returns": ("valued", "value_mask")} if chapter == 2 else {}
    rows |= {"rewards": ("valued", "scored")} if chapter == 3 else {}
    for name, (flag, mask) in rows.items():
        ours = "raw_advantages" if (chapter, name) == (3, "advantages") else name
        assert np.abs(np.array(counted(epochs[0], ours, flag)) - over_episodes(told, name, mask)).max() < 2e-5, name
    logged = {"loss/policy_avg": ("share", "learns"), "loss/value_avg": ("value_share", "value_learns")}
    for metric, names in logged.items():
        if metric in told["logged"]:
            mean = np.mean([sum(counted(one, *names)) for one in epochs])
            assert mean == pytest.approx(told["logged"][metric], abs=2e-6)
    for metric, ours in {
        "val/ratio": lambda of_token: of_token["ratio"],
        "policy/clipfrac_avg": lambda of_token: of_token["clipped"] > of_token["unclipped"],
    }.items():
        learn = [of_token for one in epochs for episode in one for of_token in episode if of_token["learns"]]
        assert np.mean([*map(ours, learn)]) == pytest.approx(told["logged"][metric], abs=2e-6)
    scores = [one[0]["score"] for one in epochs[0]]
    assert np.mean(scores) == pytest.approx(told["logged"]["objective/scores"], abs=1e-6)


def test_chapter_2_shows_moments_of_the_tokens():
    """Mean and deviation of the advantages, over tokens only: numpy, from the recorded returns and values."""
    told = EXAMPLES[2]
    raw = over_episodes(told, "returns", "mask") - over_episodes(told, "values", "mask")
    statistics = told["episodes"][0]["statistics"]
    assert (raw.mean(), raw.std()) == pytest.approx(
        (statistics["advantage_mean"][0], statistics["advantage_deviation"][0]), abs=1e-5
    )
    steps = over_episodes(told, "returns", "value_mask") - over_episodes(told, "values", "value_mask")
    assert abs(steps.mean() - raw.mean()) > 0.01  # the steps after the end would change the mean


def test_chapter_3_shows_the_moments_of_the_group():
    totals = np.array([episode["numbers"]["scores"] for episode in EXAMPLES[3]["episodes"]])
    expected = (totals - totals.mean()) / totals.std(ddof=1)
    ours = [one[0]["raw_advantages"] for one in derived(EXAMPLES[3])]
    assert ours == pytest.approx(expected.tolist(), abs=1e-5)
    assert f"{expected.max():.2f}" == "2.47" and f"{expected.min():.2f}" == "-0.35"


def test_the_masks_that_chapter_2_draws():
    """Response 3: five tokens count, six values; the score is on the sixth step."""
    told, page = EXAMPLES[2], section(2)
    tokens = told["episodes"][2]["tokens"]
    for name, mask in {"token mask": "mask", "value mask": "value_mask"}.items():
        [line] = [line for line in page.splitlines() if line.startswith(f"{name} ")]
        assert line.count("x") == sum(tokens[mask])
    assert tokens["rewards"][5] == pytest.approx(told["episodes"][2]["numbers"]["scores"])


def test_the_masks_that_chapter_3_draws():
    told, page = EXAMPLES[3], section(3)
    drawn = re.findall(r"^response (\d)\s+(\d+) tokens x+[.]*\s+(\d+) padding$", page, flags=re.M)
    assert len(drawn) == 3
    for number, tokens, padding in drawn:
        mask = told["episodes"][int(number) - 1]["tokens"]["mask"]
        assert sum(mask) == int(tokens) and told["args"]["task"]["response_length"] == int(tokens) + int(padding)
