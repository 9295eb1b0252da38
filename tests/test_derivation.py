"""derivation.py computes what the scripts compute, also in the recorded updates that the chapters' pages show."""

import random
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from ppo_rlhf import train_policy
from ppo_rlhf.lib.base.files import read_json
from ppo_rlhf.lib.services import derivation

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
    epochs = []
    for k in range(len(told["epochs"])):
        epochs.append([])
        for i, score in enumerate(theirs["scores"].tolist()):
            tokens = {name: told[name][i] for name in ("logprobs", "ref_logprobs", "values")}
            said = {name: [one[name][i] for one in told["epochs"]] for name in ("new_logprobs", "new_values")}
            episode = {"tokens": tokens, "numbers": {"scores": score}, "places": places, "epochs": said}
            of_script = derivation.settings_of(args, "train_policy")
            epochs[k].append(derivation.derive(episode | {"statistics": shared}, of_script, k))
    tables = {name: name for name in ("kl", "rewards", "whitened_rewards", "returns")}
    tables |= {"advantages": "raw_advantages", "whitened_advantages": "advantages"}
    found = {name: double([one[key] for one in epochs[0]]) for name, key in tables.items()}
    return found | {"epochs": [logged(epoch, settings["vf_coef"]) for epoch in epochs]}


def logged(episodes: list[dict], vf_coef: float) -> dict[str, float]:
    """An epoch's numbers under the names that train_policy.py logs."""

    def rows(name: str) -> torch.Tensor:
        return double([one[name] for one in episodes])

    policy, value = rows("share").sum().item(), rows("value_share").sum().item()
    return {
        "ppo/loss/policy": policy,
        "ppo/loss/value": value,
        "ppo/loss/total": policy + vf_coef * value,
        "ppo/policy/clipfrac": rows("is_clipped").mean().item(),
        "ppo/val/clipfrac": rows("value_is_clipped").mean().item(),
        "ppo/val/ratio": rows("ratio").mean().item(),
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
    ("step", "mistake"),
    [
        ("rewards", lambda score, kl, kl_coef: [-kl_coef * part + score / len(kl) for part in kl]),
        ("temporal_differences", lambda r, v, gamma: [a + b - c for a, b, c in zip(r, [*v[1:], v[-1]], v)]),  # noqa: B905
        ("advantages", lambda deltas, gamma, lam, right=derivation.advantages: right(deltas, gamma, lam * gamma)),
        ("returns", lambda advantages, values: advantages),
        ("clip", lambda number, low, high: number),
    ],
    ids=["score on every token", "value after the end", "gamma twice", "returns", "no clipping"],
)
def test_a_mistake_in_a_step_is_found(monkeypatch, step, mistake):
    monkeypatch.setattr(derivation, step, mistake)
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


# ---- Chapters 2 and 3: the recorded runs -----------------------------------------------------------------------

EXAMPLES = {
    chapter: read_json(ROOT / f"benchmark/results/{name}_update.json")
    for chapter, name in {2: "tldr_policy", 3: "rlvr_policy"}.items()
}


def section(chapter: int) -> str:
    page = (ROOT / f"docs/chapter{chapter}.md").read_text()
    return page.partition("## One update by hand\n")[2].partition("\n## ")[0]


def derived(told: dict, epoch: int = 0) -> list[dict]:
    """Every number of the episodes of a recording in an epoch."""
    settings, episodes = derivation.settings_of(told["args"], told["script"]), told["episodes"]
    group = episodes if settings["chapter"] == 3 else ()
    return [derivation.derive(episode, settings, epoch, group) for episode in episodes]


def counted(found: list[dict], name: str, flag: str) -> list[float]:
    """The entries of all rows where a flag is set."""
    return [x for one in found for x, keep in zip(one[name], one[flag], strict=True) if keep]


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
        assert np.abs(np.array(counted(epochs[0], name, flag)) - over_episodes(told, name, mask)).max() < 2e-5, name
    logged = {"loss/policy_avg": ("share", "learns"), "loss/value_avg": ("value_share", "value_learns")}
    for metric, names in logged.items():
        if metric in told["logged"]:
            mean = np.mean([sum(counted(one, *names)) for one in epochs])
            assert mean == pytest.approx(told["logged"][metric], abs=2e-6)
    tokens = sum(sum(one["learns"]) for one in epochs[0])
    for metric, (name, flag) in {
        "val/ratio": ("ratio", "learns"),
        "policy/clipfrac_avg": ("is_clipped", "learns"),
    }.items():
        mean = np.mean([sum(counted(one, name, flag)) / tokens for one in epochs])
        assert mean == pytest.approx(told["logged"][metric], abs=2e-6)
    scores = [one["score"] for one in epochs[0]]
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
    ours = [one["advantages"][0] for one in derived(EXAMPLES[3])]
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
