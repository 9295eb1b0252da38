"""lib/derivation.py computes what the scripts compute, and the pages of the three chapters show those numbers."""

import copy
import json
import random
import re
from functools import partial

import numpy as np
import pytest
import torch

from benchmark.experiments import one_update
from ppo_rlhf import train_policy
from ppo_rlhf.lib import derivation
from ppo_rlhf.lib.files import read_json

RECORDED = read_json(one_update.RECORDINGS[1])
PAGE = (one_update.ROOT / "docs/chapter1.md").read_text()


def double(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def invented(seed: int) -> dict:
    """Five episodes of seven tokens: many ratios and new values are outside of their ranges."""
    draw = partial(random.Random(seed).gauss, 0.0)

    def rows(deviation: float, around=None) -> list[list[float]]:
        return [[draw(deviation) + (around[i][t] if around else 0) for t in range(7)] for i in range(5)]

    logprobs, values = rows(1), rows(1)
    settings = {"kl_coef": 0.3, "target": 2.0, "horizon": 100.0, "penalty_reward_value": -1.5, "vf_coef": 0.25}
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
    controller = train_policy.AdaptiveKLController(
        settings["kl_coef"], target=settings["target"], horizon=settings["horizon"]
    )
    controller.update(kl.sum(1).mean().item(), len(scores))
    tensors = {"scores": scores, "kl": kl, "rewards": rewards, "whitened_rewards": whitened}
    tensors |= {"advantages": advantages, "returns": returns, "whitened_advantages": whitened_advantages}
    return {**tensors, "epochs": epochs, "next_kl_coef": controller.value}


def by_hand(told: dict) -> dict:
    update = derivation.update(told, told["settings"])
    names = ("scores", "kl", "rewards", "advantages", "returns")
    tables = {name: double(getattr(update, name)) for name in names}
    tables |= {name: double(getattr(update, name).rows) for name in ("whitened_rewards", "whitened_advantages")}
    return {**tables, "epochs": [logged(epoch) for epoch in update.epochs], "next_kl_coef": update.next_kl_coef}


def logged(epoch: derivation.Epoch) -> dict[str, float]:
    """An epoch's numbers under the names that train_policy.py logs."""

    def mean(rows, number) -> float:
        numbers = [number(entry) for row in rows for entry in row]
        return sum(numbers) / len(numbers)

    return {
        "ppo/loss/policy": epoch.policy_loss,
        "ppo/loss/value": epoch.value_loss,
        "ppo/loss/total": epoch.total_loss,
        "ppo/policy/clipfrac": mean(epoch.policy_terms, lambda term: term.is_clipped),
        "ppo/val/clipfrac": mean(epoch.value_terms, lambda term: term.is_clipped),
        "ppo/val/ratio": mean(epoch.ratios, float),
    }


def difference(ours: dict, theirs: dict) -> float:
    """The largest difference of two such dictionaries."""
    tensors = [name for name, value in theirs.items() if isinstance(value, torch.Tensor)]
    gaps = [(ours[name] - theirs[name]).abs().max().item() for name in tensors]
    for one, other in zip(ours["epochs"], theirs["epochs"], strict=True):
        gaps += [abs(one[name] - float(other[name])) for name in one]
    return max([*gaps, abs(ours["next_kl_coef"] - theirs["next_kl_coef"])])


# ---- The derivation and train_policy.py ------------------------------------------------------------------------


@pytest.mark.parametrize("told", [RECORDED, *map(invented, range(20))], ids=lambda told: told.get("commit", "random"))
def test_the_derivation_computes_what_train_policy_computes(told):
    assert difference(by_hand(told), with_tensors(told)) < 1e-12


def test_invented_episodes_use_every_branch():
    update = derivation.update(invented(0), invented(0)["settings"])
    for name in ("policy_terms", "value_terms"):
        clipped = [term.is_clipped for epoch in update.epochs for row in getattr(epoch, name) for term in row]
        assert 0.1 < sum(clipped) / len(clipped) < 0.9


@pytest.mark.parametrize(
    ("step", "mistake"),
    [
        ("rewards", lambda score, kl, kl_coef: [-kl_coef * part + score / len(kl) for part in kl]),
        ("temporal_differences", lambda r, v, gamma: [a + b - c for a, b, c in zip(r, [*v[1:], v[-1]], v)]),  # noqa: B905
        ("advantages", lambda deltas, gamma, lam, right=derivation.advantages: right(deltas, gamma, lam * gamma)),
        ("returns", lambda advantages, values: advantages),
        ("clip", lambda number, low, high: number),
        ("score", lambda raw_score, stopped, penalty: raw_score),
    ],
    ids=["score on every token", "value after the end", "gamma twice", "returns", "no clipping", "no penalty"],
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
    assert ours["scores"].mean().item() == pytest.approx(logged_by_run["objective/score"], abs=1e-6)
    assert ours["returns"].mean().item() == pytest.approx(logged_by_run["ppo/returns/mean"], abs=1e-6)
    assert ours["next_kl_coef"] == pytest.approx(logged_by_run["next_kl_coef"], abs=1e-8)


def test_the_first_ratio_is_1():
    first = derivation.update(RECORDED, RECORDED["settings"]).epochs[0]
    assert max(abs(ratio - 1) for row in first.ratios for ratio in row) < 1e-5


def test_the_panel_of_the_report_shows_the_numbers_of_the_page():
    """`derive`, which report.py shows, for the episodes of the recorded update: the same numbers in every step."""
    by_page, settings = derivation.update(RECORDED, RECORDED["settings"]), RECORDED["settings"]
    args = {"ppo": {name: settings[name] for name in ("gamma", "lam", "cliprange", "cliprange_value", "vf_coef")}}
    args["ppo"]["whiten_rewards"] = True
    of_panel = derivation.settings_of(args, "train_policy")
    rewards, advantages = by_page.whitened_rewards, by_page.whitened_advantages
    shared = {"kl_coef": settings["kl_coef"], "reward_mean": rewards.mean, "reward_deviation": rewards.deviation}
    shared |= {"advantage_mean": advantages.mean, "advantage_deviation": advantages.deviation}
    n = len(RECORDED["logprobs"][0])
    shared["tokens"] = shared["values"] = n * len(RECORDED["logprobs"])
    compared = 0
    for i, score in enumerate(by_page.scores):
        tokens = {name: RECORDED[name][i] for name in ("logprobs", "ref_logprobs", "values")}
        epochs = {name: [told[name][i] for told in RECORDED["epochs"]] for name in ("new_logprobs", "new_values")}
        episode = {"tokens": tokens, "numbers": {"scores": score}, "places": list(range(n)), "epochs": epochs}
        for k, epoch in enumerate(by_page.epochs):
            found = derivation.derive(episode | {"statistics": shared}, of_panel, k)
            expected = {
                **{name: getattr(by_page, name)[i] for name in ("kl", "rewards", "deltas", "returns")},
                "whitened_rewards": rewards.rows[i],
                "raw_advantages": by_page.advantages[i],
                "advantages": advantages.rows[i],
                "ratio": epoch.ratios[i],
                "loss": [term.loss for term in epoch.policy_terms[i]],
                "is_clipped": [term.is_clipped for term in epoch.policy_terms[i]],
                "value_loss": [term.loss / 2 for term in epoch.value_terms[i]],
                "value_is_clipped": [term.is_clipped for term in epoch.value_terms[i]],
            }
            for name, row in expected.items():
                assert found[name] == pytest.approx(row, rel=1e-12, abs=1e-12), (i, k, name)
                compared += len(row)
    assert compared == 8 * 6 * len(by_page.epochs) * 12


# ---- The page --------------------------------------------------------------------------------------------------


def strays(page: str) -> set[str]:
    """Decimal numbers of the page that the command does not print, and that are no setting of the run."""
    printed = "\n".join(one_update.blocks(RECORDED))
    known = set(re.findall(r"\d+\.\d+", printed)) | {str(value) for value in RECORDED["settings"].values()}
    known |= set(re.findall(r"\d+\.\d+", RECORDED["command"]))
    known.add(str(train_policy.PRESETS["tales"].task.temperature))
    # If the ratio of Dorothea, whose whitened advantage is -1.423, were 1.3: both numbers of the loss.
    known |= {"0.8", "1.2", "1.3", f"{1.423 * 1.2:.3f}", f"{1.423 * 1.3:.3f}"}
    head, _, demo = page.partition("## The demo\n")  # its numbers are those of the run: test_readme.py
    page = head + demo.partition("\n## ")[2]
    return {number for number in re.findall(r"(?<![\w.])\d+\.\d+", page) if number not in known}


def test_the_page_shows_what_the_command_prints():
    places = [PAGE.find(block) for block in one_update.blocks(RECORDED)]
    assert -1 not in places and places == sorted(places)
    assert RECORDED["command"] in " ".join(PAGE.replace("\\\n", "").split())
    assert RECORDED["commit"][:7] in PAGE and "dirty" not in RECORDED["commit"]


def test_the_prose_has_no_other_numbers():
    assert strays(PAGE) == set()
    assert strays(PAGE + " The ratio is 7.913.") == {"7.913"}


def test_another_recording_gives_another_page():
    other = copy.deepcopy(RECORDED)
    other["values"][one_update.SHOWN[1][0]][-1] += 0.01
    assert any(block not in PAGE for block in one_update.blocks(other))


# ---- Chapters 2 and 3: the recorded runs and their pages -------------------------------------------------------

EXAMPLES = {chapter: read_json(one_update.RECORDINGS[chapter]) for chapter in (2, 3)}
BLOCKS = one_update.BLOCKS


def section(chapter: int) -> str:
    page = (one_update.ROOT / f"docs/chapter{chapter}.md").read_text()
    return page.partition("## One update by hand\n")[2].partition("\n## ")[0]


def over_episodes(told: dict, name: str, mask: str) -> np.ndarray:
    """The recorded numbers of all tokens that a mask keeps."""
    rows = [(episode["tokens"][name], episode["tokens"][mask]) for episode in told["episodes"]]
    return np.array([x for row, keep in rows for x, kept in zip(row, keep, strict=True) if kept])


@pytest.mark.parametrize("chapter", [2, 3])
def test_later_chapters_computed_the_same(chapter):
    """Every row that the run recorded, and the metrics that it logged."""
    told = EXAMPLES[chapter]
    epochs = [one_update.derived(told, k) for k in range(len(told["episodes"][0]["epochs"]["new_logprobs"]))]
    rows = {"kl": ("learns", "mask"), "advantages": ("learns", "mask")}
    rows |= {"rewards": ("valued", "value_mask"), "returns": ("valued", "value_mask")} if chapter == 2 else {}
    rows |= {"rewards": ("valued", "scored")} if chapter == 3 else {}
    for name, (flag, mask) in rows.items():
        ours = [x for one in epochs[0] for x in one_update.only(one, name, flag)]
        assert np.abs(np.array(ours) - over_episodes(told, name, mask)).max() < 2e-5, name
    logged = {"loss/policy_avg": ("share", "learns"), "loss/value_avg": ("value_share", "value_learns")}
    for metric, names in logged.items():
        if metric in told["logged"]:
            mean = np.mean([one_update.total(one, *names) for one in epochs])
            assert mean == pytest.approx(told["logged"][metric], abs=2e-6)
    tokens = sum(sum(one["learns"]) for one in epochs[0])
    for metric, (name, flag) in {
        "val/ratio": ("ratio", "learns"),
        "policy/clipfrac_avg": ("is_clipped", "learns"),
    }.items():
        mean = np.mean([one_update.total(one, name, flag) / tokens for one in epochs])
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
    ours = [one["advantages"][0] for one in one_update.derived(EXAMPLES[3])]
    assert ours == pytest.approx(expected.tolist(), abs=1e-5)
    assert f"{expected.max():.2f}" == "2.47" and f"{expected.min():.2f}" == "-0.35"


def stray_numbers(page: str, told: dict, chapter: int) -> set[str]:
    """Decimal numbers of a section that the command does not print, and that are no setting of the run."""
    settings = json.dumps({name: told["args"][name] for name in ("rewards", "ppo")})
    printed = "\n".join([*BLOCKS[chapter](told), settings, str(one_update.MOVED)])
    known = set(re.findall(r"\d+\.\d+", printed))
    return {number for number in re.findall(r"(?<![\w.])\d+\.\d+", page) if number not in known}


@pytest.mark.parametrize("chapter", [2, 3])
def test_pages_of_later_chapters_show_what_the_command_prints(chapter):
    told, page = EXAMPLES[chapter], section(chapter)
    places = [page.find(block) for block in BLOCKS[chapter](told)]
    assert -1 not in places and places == sorted(places)
    whole = (one_update.ROOT / f"docs/chapter{chapter}.md").read_text()
    assert told["command"] in " ".join(whole.replace("\\\n", "").split())
    assert told["commit"][:7] in whole and "dirty" not in told["commit"]
    assert stray_numbers(page, told, chapter) == set()
    assert stray_numbers(page + " The ratio is 7.913.", told, chapter) == {"7.913"}


@pytest.mark.parametrize("chapter", [2, 3])
def test_another_recording_gives_another_section(chapter):
    other = copy.deepcopy(EXAMPLES[chapter])
    other["episodes"][one_update.SHOWN[chapter][0]]["tokens"]["logprobs"][0] += 0.01
    assert any(block not in section(chapter) for block in BLOCKS[chapter](other))


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
