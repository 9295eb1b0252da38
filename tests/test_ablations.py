"""benchmark/experiments/ablations.py and overoptimisation.py: what they change, and their arithmetic."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from processes import launch
from runs import both_arguments, metrics_of, only, policy_arguments, reward_arguments, world_arguments

from benchmark.experiments import ablations, overoptimisation

ABLATIONS = Path(ablations.__file__)
DETAILS = (ablations.ROOT / "docs/details/chapter1.md").read_text()
POLICY = [
    name for name, ablation in ablations.ABLATIONS.items() if not (ablation.reward or ablation.own_reward_model)
]


def with_ablation(name: str, script: str, arguments: list[str], folder: Path) -> Path:
    result = launch(ABLATIONS, "with", name, f"ppo_rlhf/{script}.py", *arguments, folder=folder)
    assert result.status == 0, result
    return folder


def policy_run(name: str, world: Path, reward: Path, folder: Path) -> list[dict[str, float]]:
    arguments = [*world_arguments(world), *policy_arguments(), "--rewards.trained_model", str(reward)]
    return metrics_of(only(with_ablation(name, "train_policy", arguments, folder), "runs/*"))


@pytest.fixture(scope="module")
def baseline(tiny_world, tiny_reward, tmp_path_factory):
    """Metrics of the plain script."""
    folder = tmp_path_factory.mktemp("plain")
    arguments = [*world_arguments(tiny_world), *policy_arguments(), "--rewards.trained_model", str(tiny_reward)]
    assert launch("train_policy.py", *arguments, folder=folder).status == 0
    return metrics_of(only(folder, "runs/*"))


def test_the_baseline_is_the_plain_script(baseline, tiny_world, tiny_reward, tmp_path):
    assert policy_run("baseline", tiny_world, tiny_reward, tmp_path) == baseline


# What is different already in the first update of a run that begins with the same samples; else, later.
FIRST = {
    "no-reward-whitening": "ppo/returns/mean",
    "no-advantage-whitening": "ppo/val/advantage_var",
    "no-kl": "objective/kl_coef",
    "random-value-head": "ppo/val/mean",
    "torch-adam": "ppo/policy/approxkl",
    "lambda-1": "ppo/returns/var",
    "lambda-0": "ppo/returns/var",
    "gamma-0.9": "ppo/returns/mean",
    "one-epoch": "ppo/policy/approxkl",
}
LATER = {"constant-learning-rate": "ppo/policy/approxkl", "fixed-kl": "objective/kl_coef"}


@pytest.mark.parametrize("name", [*FIRST, *LATER])
def test_an_ablation_changes_what_it_names(name, baseline, tiny_world, tiny_reward, tmp_path):
    rows = policy_run(name, tiny_world, tiny_reward, tmp_path)
    metric = (FIRST | LATER)[name]
    assert rows[0]["objective/entropy"] == baseline[0]["objective/entropy"]  # the same samples
    changed = [abs(row[metric] - plain[metric]) > 1e-9 for row, plain in zip(rows, baseline, strict=True)]
    assert changed[0] == (name in FIRST) and any(changed)
    if name == "no-advantage-whitening":
        assert abs(rows[0]["ppo/val/advantage_var"] - 1) > 1e-3 > abs(baseline[0]["ppo/val/advantage_var"] - 1)
    if name == "fixed-kl":
        assert {row["objective/kl_coef"] for row in rows} == {0.15}


def test_every_policy_ablation_is_tried_above():
    """But for those that need more than a few updates of a tiny model before anything is clipped or penalised."""
    rare = {"baseline", "no-value-clipping", "no-policy-clipping", "no-score-penalty"}
    assert set(FIRST) | set(LATER) | rare == set(POLICY)


@pytest.mark.parametrize("name", ["not-normalised-before", "not-normalised-after", "never-normalised"])
def test_ablations_of_the_reward_model(name, tiny_world, tmp_path):
    arguments = [*world_arguments(tiny_world), *reward_arguments(tiny_world)]
    folder = with_ablation(name, "train_reward", arguments, tmp_path)
    first = metrics_of(only(folder, "runs/*"))[0]
    assert (abs(first["train/gain"] - 1) > 0.01) == (name == "not-normalised-after")  # one step moves it less
    meta = json.loads((only(folder, "runs/*") / "meta.json").read_text())
    switches = (meta["args"]["normalize_before"], meta["args"]["normalize_after"], meta["args"]["normalize_samples"])
    expected = {"before": (False, True, 32), "after": (True, False, 32), "normalised": (True, True, 0)}
    assert switches == expected[name.split("-")[-1]]


def test_lines_are_where_they_were():
    """Each replacement is found in a script, and stands in all of the copies."""
    sources = {name: (ablations.ROOT / f"ppo_rlhf/{name}.py").read_text() for name in ablations.SCRIPTS}
    for name, ablation in ablations.ABLATIONS.items():
        for old, new in ablation.lines.items():
            assert any(old in source for source in sources.values()) and old != new, name
            for source in sources.values():
                changed, found = ablations.replaced(source, {old: new})
                assert found == ({old} if old in source else set()) and old not in changed.replace(new, "")


def test_a_line_that_is_gone_is_an_error(monkeypatch):
    """Also where another of its lines is still there."""
    gone = ablations.Ablation("D00", "nothing", lines={ablations.POSITIONS: "pass", "no such line": ""})
    with pytest.raises(ValueError, match="no training script has what this ablation replaces: no such line"):
        ablations.change_scripts(gone)


def test_positions_that_count_padding_by_hand():
    """As if the padding before the last real token stood to the left of the row."""
    expression = ablations.ABLATIONS["positions-count-padding"].lines[ablations.POSITIONS]
    mask = torch.tensor([[1, 0, 0, 1, 1], [0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 0, 1, 0]]).bool()
    names = {"mask": mask}
    exec(expression, names)
    real = [row[kept].tolist() for row, kept in zip(names["position_ids"], mask, strict=True)]
    assert real == [[2, 3, 4], [2, 3, 4], [0, 1, 2], [2, 3]]


def test_positions_with_padding(tiny_world, tmp_path):
    """The same lines stand in both training scripts; train_both.py runs both with the ablation."""
    name, folders = "positions-count-padding", (tmp_path / "plain", tmp_path / "ablated")
    for folder in folders:
        folder.mkdir()
    assert launch("train_both.py", *both_arguments(tiny_world), folder=folders[0]).status == 0
    with_ablation(name, "train_both", both_arguments(tiny_world), folders[1])
    for kind in ("train_reward", "train_policy"):
        plain, ablated = (metrics_of(only(folder, f"runs/{kind}*"))[0] for folder in folders)
        assert plain != ablated, kind


def test_flags_reach_both_parts(tiny_world, tmp_path):
    with_ablation("fixed-kl", "train_both", both_arguments(tiny_world), tmp_path)
    meta = json.loads((only(tmp_path, "runs/train_policy*") / "meta.json").read_text())
    assert meta["args"]["rewards"]["adaptive_kl"]["target"] is None


def test_details_exist():
    for name, ablation in ablations.ABLATIONS.items():
        assert name == "baseline" or f'id="{ablation.detail}"' in DETAILS, name


# ------------------------------------------------------------------------------------------------ report


def effects_table() -> pd.DataFrame:
    columns = dict.fromkeys(ablations.EFFECTS, 0.0)
    rows = [("baseline", 1, 1.0), ("baseline", 2, 2.0), ("baseline", 3, 6.0), ("one-epoch", 1, 2.0)]
    rows += [("one-epoch", 2, 4.0), ("one-epoch", 3, 9.0), ("no-kl", 1, 5.0)]
    return pd.DataFrame(
        [{"ablation": name, "seed": seed, **columns, "gold score": gold} for name, seed, gold in rows]
    )


def test_differences_by_hand():
    """Differences 1, 2, 3: mean 2, standard error 1 / sqrt(3). Student's 97.5 % point with 2 degrees is 4.3027."""
    table = ablations.differences(effects_table()).set_index("ablation")
    assert table.loc["one-epoch", "gold score"] == 2.0 and table.loc["one-epoch", "seeds"] == 3
    assert table.loc["one-epoch", "gold score +-"] == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    assert table.loc["baseline", "gold score"] == 3.0
    assert table.loc["no-kl", "gold score"] == 4.0 and math.isnan(table.loc["no-kl", "gold score +-"])


def write_policy(folder: Path, name: str, seed: int, kl: float, **meta) -> None:
    run = folder / f"policy-{name}/seed{seed}/runs/run"
    run.mkdir(parents=True)
    columns = {column: np.full(20, kl) for column, _ in ablations.EFFECTS.values()}
    columns["objective/kl"] = np.where(np.arange(20) == 5, 30.0, kl)
    pd.DataFrame(columns).to_csv(run / "metrics.csv")
    (run / "meta.json").write_text(json.dumps({"args": {}, "finished": True, "commit": "abc"} | meta))


def test_report(tmp_path):
    for seed in (1, 2, 3):
        write_policy(tmp_path / "runs", "baseline", seed, kl=1.0 + seed)
        write_policy(tmp_path / "runs", "one-epoch", seed, kl=1.5 + seed, finished=seed < 3)
    record = {"command": "", "commit": "", "finished": False, "status": 2, "starts": 1}
    (tmp_path / "runs/policy-one-epoch/seed3/job.json").write_text(json.dumps(record))
    (tmp_path / "runs/policy-one-epoch/seed3/runs/began").mkdir()  # and never got as far as meta.json
    write_policy(tmp_path / "runs", "no-kl", 1, kl=1.0, finished=False)
    (tmp_path / "runs/policy-no-kl/seed1/job.json").write_text(json.dumps(record))
    arguments = ["--folder", "runs", "--output", "out"]
    result = launch(ABLATIONS, "report", *arguments, folder=tmp_path)
    assert result.status == 0, result
    (row,) = [line for line in result.stdout.splitlines() if "`one-epoch`" in line]
    assert re.search(
        r"\[D62\].*#D62.*\| 2, 1 failed \| \*\*\+0.50 ± 0.00\*\* \| \*\*\+0.50 ± 0.00\*\* \| \+0.00 ± 0.00", row
    ), row
    (gone,) = [line for line in result.stdout.splitlines() if "`no-kl`" in line]
    assert gone.endswith("| 0, 1 failed |  |  |  |  |")
    assert "commit: abc" in (tmp_path / "out/ablations.md").read_text()
    assert (tmp_path / "out/ablations.png").read_bytes()[:4] == b"\x89PNG"
    nothing = launch(ABLATIONS, "report", "--folder", "nowhere", folder=tmp_path)
    assert nothing.status == 2 and "no baseline in nowhere is finished yet" in nothing.stderr


def test_run_goes_on_where_it_stopped(tiny_world, tmp_path):
    """Reward models first, one for the baseline and one for the ablation that changes it; then the policies."""
    policy = " ".join(["train_policy.py", *world_arguments(tiny_world), *policy_arguments()])
    reward = " ".join(["train_reward.py", *world_arguments(tiny_world), *reward_arguments(tiny_world)])
    arguments = ["--policy", policy, "--reward", reward, "--seeds", "1", "--workers", "2"]
    arguments += ["--folder", str(tmp_path / "runs"), "--output", str(tmp_path / "out")]
    result = launch(ABLATIONS, "run", *arguments, "--only", "never-normalised", "--any_commit", folder=tmp_path)
    assert result.status == 0, result
    names = {"reward-baseline", "reward-never-normalised", "policy-baseline", "policy-never-normalised"}
    assert {path.name for path in (tmp_path / "runs").iterdir()} == names
    again = launch(ABLATIONS, "run", *arguments, "--only", "never-normalised", "--any_commit", folder=tmp_path)
    assert again.status == 0 and "running" not in again.stdout
    assert len((tmp_path / "out/ablations.csv").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    "words, message",
    [
        (["with", "nothing-like-it", "ppo_rlhf/train_policy.py"], "nothing-like-it is none of the ablations"),
        (["with", "no-kl", "ppo_rlhf/sample.py"], "ppo_rlhf/sample.py is none of"),
        (["run", "--only", "no-such"], "--only no-such: there are baseline"),
    ],
)
def test_bad_input(words, message, tmp_path):
    result = launch(ABLATIONS, *words, folder=tmp_path)
    assert result.status == 2 and message in result.stderr and result.stderr.count("\n") == 1, result


# ------------------------------------------------------------------------------------------------ over-optimisation


def test_fit_finds_what_was_put_in():
    d = np.linspace(0, 6, 50)
    gold = np.where(d > 0, d * (1.5 - 0.7 * np.log(np.maximum(d, 1e-9))), 0)
    assert overoptimisation.fit(d, gold) == pytest.approx((1.5, 0.7))


def test_overoptimisation_of_made_up_runs(tmp_path):
    """Gold scores of deviation 2 and mean 1 in the language model, on the curve with alpha 1.5 and beta 0.5."""
    for seed in (1, 2, 3):
        run = tmp_path / f"runs/{seed}"
        run.mkdir(parents=True)
        d = np.linspace(0.1, 5, 40) + 0.01 * seed
        gold = 1 + 2 * d * (1.5 - 0.5 * np.log(d))
        columns = {
            "step": range(40),
            "objective/kl": d**2,
            "objective/gold_scores": gold,
            "objective/raw_score": 3 * d,
        }
        pd.DataFrame(columns).to_csv(run / "metrics.csv", index=False)
        args = {"seed": seed, "rewards": {"trained_model": f"models/reward{seed}/reward"}}
        (run / "meta.json").write_text(json.dumps({"args": args, "commit": "abc"}))
        (tmp_path / f"runs/reward{seed}").mkdir()
        reward = {"args": {}, "results": {"test_accuracy": seed / 10}}
        (tmp_path / f"runs/reward{seed}/meta.json").write_text(json.dumps(reward))
        own = [{"base gold": 1 + sign * math.sqrt(2), "base score": sign / math.sqrt(2)} for sign in (-1, 1)]
        (run / "comparison.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    script = ABLATIONS.parent / "overoptimisation.py"
    result = launch(script, "--runs", "made up=runs/*", "--output", "out", folder=tmp_path)
    assert result.status == 0, result
    row, *seeds = [line for line in result.stdout.splitlines() if "made up" in line]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:5] == ["3", "10 %, 20 %, 30 %", "1.50 [1.50, 1.50]", "0.50 [0.50, 0.50]"]
    assert cells[6] == "not seen"  # exp(alpha / beta - 1) is 7.4, and d ends at 5
    table = pd.read_csv(tmp_path / "out/overoptimisation.csv")
    np.testing.assert_allclose(table["proxy"], 3 * table["d"], rtol=1e-3)
    assert [line.split(" | ")[1:3] for line in seeds] == [["1", "10 %"], ["2", "20 %"], ["3", "30 %"]]
    d = 5.03 - 2 * 4.9 / 39  # the middle of the last five updates of seed 3; a mean of five is a little lower
    assert seeds[2].split(" | ")[3] == f"{d * (1.5 - 0.5 * math.log(d)):.1f} at d = {d:.1f}"
    assert (tmp_path / "out/overoptimisation.png").exists()
    more = "--runs", "out/overoptimisation.csv", "--output", "again", "--figure", "new/picture.png"
    again = launch(script, *more, folder=tmp_path)
    assert again.status == 0 and again.stdout == result.stdout and (tmp_path / "new/picture.png").exists()
    csvs = [(tmp_path / f"{folder}/overoptimisation.csv").read_text() for folder in ("out", "again")]
    assert csvs[0] == csvs[1]
    (tmp_path / "damaged.csv").write_text("a,b\n1,2\n")
    assert launch(script, "--runs", "damaged.csv", folder=tmp_path).status == 2
    assert launch(script, "--runs", "x=nowhere/*", "--output", "out", folder=tmp_path).status == 2
