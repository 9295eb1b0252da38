"""benchmark/curves/compare.py, on data where the answer is known."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from processes import launch
from refusals import Damage, edit, remove, write

from benchmark.curves import compare

COMPARE = Path(compare.__file__)
OPENAI, DETAILS = "openai/lm-human-preferences", "lm-human-preference-details"
FACTS = {"commit": "c", "device": "cpu: d", "num_processes": 1, "threads": 1, "versions": {"torch": "2"}}


def write_run(
    folder: Path, seed: int, table: pd.DataFrame, preset: str = "sentiment", finished: bool = True, **changes
) -> Path:
    """A run folder with metrics (index: step) and as much of meta.json as compare.py reads; changes: of arguments."""
    run = folder / f"train_policy__{preset}__{seed}__1"
    run.mkdir(parents=True)
    table.rename_axis("step").to_csv(run / "metrics.csv")
    args = {"preset": preset, "seed": seed, "exp_name": "train_policy", "ppo": {}}
    args["rewards"] = {"trained_model": f"m{seed}"}
    (run / "meta.json").write_text(json.dumps({"finished": finished, **FACTS, "args": args | changes}))
    return run


def published(implementation: str, task: str, metric: str) -> pd.DataFrame:
    return compare.curve_of(compare.published(implementation), task, metric)


# ------------------------------------------------------------------------------------------------ known answers


def test_two_published_implementations_agree(tmp_path):
    arguments = ["--ours", DETAILS, "--theirs", OPENAI, "--output", "out"]
    result = launch(COMPARE, *arguments, folder=tmp_path)
    assert result.status == 0, result.stdout[-1000:]
    verdict = pd.read_csv(tmp_path / "out/verdict.csv")
    assert set(verdict["verdict"]) == {"inside", "not judged"}
    judged = (verdict["verdict"] == "inside").sum()
    assert judged == 200 and result.stdout.splitlines()[-1] == f"all {judged} are inside"
    assert set(verdict["update"]) == {100, 250, 500, 1000, 1500, 1952}
    assert verdict.groupby("task")["metric"].nunique().to_dict() == {"sentiment": 17, "descriptiveness": 17}
    assert (tmp_path / "out/verdict.md").read_text().count("| inside |") == judged


@pytest.mark.parametrize("metric", ["objective/scores", "objective/kl", "ppo/loss/value", "ppo/val/vpred"])
@pytest.mark.parametrize("shift, judgement", [(2.0, "outside"), (-2.0, "outside"), (0.3, "inside")])
def test_a_shifted_curve_does_not_agree(metric, shift, judgement):
    """shift: in the larger of the two published deviations."""
    curves, theirs = compare.published(DETAILS), compare.published(OPENAI)
    place = pd.MultiIndex.from_frame(curves[["task", "metric", "update"]])
    other = theirs.set_index(["task", "metric", "update"])["std"].reindex(place).to_numpy()
    std = np.fmax(curves["std"], other).ffill()
    curves.loc[curves["metric"] == metric, "mean"] += shift * std
    verdict = compare.compare(curves, theirs, compare.METRICS)
    judged = verdict[verdict["verdict"] != "not judged"]
    assert set(judged[judged["metric"] == metric]["verdict"]) == {judgement}
    assert set(judged[judged["metric"] != metric]["verdict"]) == {"inside"}
    assert ("are outside" in compare.summary(verdict)[-1]) == (judgement == "outside")


def test_one_task_is_not_the_other(tmp_path):
    curves = compare.published(OPENAI)
    curves["task"] = curves["task"].map({"sentiment": "descriptiveness", "descriptiveness": "sentiment"})
    curves.dropna(subset="task").to_csv(tmp_path / "swapped.csv", index=False)
    arguments = ["--ours", "swapped.csv", "--theirs", OPENAI, "--output", "out"]
    assert launch(COMPARE, *arguments, folder=tmp_path).status == 1


@pytest.mark.parametrize("late, status", [(0, 0), (60, 1)])
def test_runs_drawn_from_the_published_curves_agree_unless_they_are_late(tmp_path, late, status):
    """Ten run folders: the published mean, an offset per seed and noise per update; late: updates."""
    random = np.random.default_rng(1)
    metrics = ("objective/scores", "objective/kl", "ppo/loss/value", "ppo/returns/mean")
    for seed in range(1, 11):
        columns = {}
        for metric in metrics:
            curve = published(OPENAI, "sentiment", metric)
            updates = np.arange(1954)
            mean = np.interp(updates - late, curve["update"], curve["mean"])
            std = curve["std"].median()
            columns[metric] = mean + std * (0.6 * random.normal() + 0.8 * random.normal(size=1954))
        write_run(tmp_path / "runs", seed, pd.DataFrame(columns))
    arguments = ["--ours", "runs/*", "--theirs", OPENAI, "--output", "out"]
    result = launch(COMPARE, *arguments, folder=tmp_path)
    assert result.status == status, result.stdout
    curves = pd.read_csv(tmp_path / "out/curves.csv")
    assert set(curves["metric"]) == set(metrics) and set(curves["seeds"]) == {10}
    assert set(curves["window"]) == {21.04}  # updates: a hundredth of the published x axis, 152 + 1952
    # The script reads what it has written.
    again = ["--ours", "out/curves.csv", "--theirs", OPENAI, "--output", "again"]
    assert launch(COMPARE, *again, folder=tmp_path).status == status
    one, two = (pd.read_csv(tmp_path / name / "verdict.csv") for name in ("out", "again"))
    pd.testing.assert_frame_equal(one, two, rtol=1e-3, atol=2e-3)


# ------------------------------------------------------------------------------------------------ the numbers


def test_standardised_difference_by_hand():
    ours = {"mean": 1.0, "std": 0.5, "seeds": 4, "mean_error": 0.0}
    theirs = {"mean": 0.0, "std": 1.0, "seeds": 9, "mean_error": 0.1}
    assert compare.standardised(ours, theirs) == pytest.approx(1 / np.sqrt(0.25 / 4 + 1 / 9 + 0.01))
    unknown = theirs | {"std": np.nan, "mean_error": np.nan}
    assert compare.standardised(ours, unknown) == pytest.approx(1 / np.sqrt(0.25 / 4 + 0.25 / 9))
    assert np.isnan(compare.standardised(ours | {"std": np.nan}, unknown))
    exact = ours | {"std": 0.0}
    assert compare.standardised(exact, exact) == 0.0
    assert compare.standardised(exact, exact | {"mean": 2.0}) == -np.inf


def test_a_deviation_of_rounding_is_none():
    ours = {"mean": 5.0, "std": 4e-16, "seeds": 2, "mean_error": 0.0}
    theirs = {"mean": 4.0, "std": 1.0, "seeds": 8, "mean_error": 0.0}
    assert compare.standardised(ours, theirs) == pytest.approx(1 / np.sqrt(1 / 2 + 1 / 8))
    assert compare.standardised(theirs, ours) == pytest.approx(-1 / np.sqrt(1 / 2 + 1 / 8))
    for std in (4e-16, 4e-7, np.nan):
        assert np.isnan(compare.standardised(ours, theirs | {"std": std}))
    assert compare.standardised(ours, theirs | {"mean": 5.000001, "std": 0.0}) == 0.0  # as far as curves.csv goes
    small = {"std": 2e-5, "seeds": 2}  # but no rounding
    assert compare.standardised(ours | small, theirs | small) == pytest.approx(1 / 2e-5)
    nothing = ours | {"mean": 3e-18, "std": 1e-18}
    assert compare.standardised(nothing, nothing | {"mean": 0.0}) == 0.0


def test_seeds_that_are_nearly_equal_are_not_judged():
    """Two seeds that differ in their last digit only, and two of another run; the constants of both agree."""
    sides = []
    for scale in (1.0, 1.1):
        seeds = [line() * [scale * (1 + seed * 2e-16), 1 + seed * 2e-16] for seed in (0, 1)]
        none = pd.DataFrame(columns=["task", "metric", "window"])
        sides.append(compare.aggregate({"tales": seeds}, ["objective/kl", "objective/scores"], none))
    assert (sides[0]["std"] < 1e-14).all() and (sides[0]["std"] > 0).any()
    verdict = compare.compare(*sides, ["objective/kl", "objective/scores"]).set_index("metric")["verdict"]
    assert verdict.to_dict() == {"objective/kl": "not judged", "objective/scores": "inside"}
    (said, _) = compare.summary(compare.compare(*sides, ["objective/kl", "objective/scores"]))
    assert said.startswith(
        "tales: 1 of 1 inside; the largest |z| is 0.0, objective/scores at update 20; 1 not judged"
    )


def test_smoothing_is_that_of_the_published_figures():
    """expt drew them, for openrlbenchmark: 10,000 points, 100 to a window."""
    expt = pytest.importorskip("expt", reason="openrlbenchmark needs Python 3.11 to 3.13")
    random = np.random.default_rng(0)
    seeds = [pd.Series(random.normal(size=301).cumsum()) for _ in range(4)]
    x, mean, std = compare.smooth(seeds, window=3.0)
    runs = [expt.Run(f"{i}", pd.DataFrame({"x": s.index, "y": s})) for i, s in enumerate(seeds)]
    grouped = expt.Hypothesis("h", runs).interpolate("x", n_samples=10_000).grouped
    expected = [
        curve["y"].rolling(100, min_periods=1, center=True).mean() for curve in (grouped.mean(), grouped.std())
    ]
    np.testing.assert_allclose(mean, expected[0], rtol=1e-10)
    np.testing.assert_allclose(std, expected[1], rtol=1e-10)
    np.testing.assert_allclose(x, expected[0].index)


def test_aggregate_of_one_table_by_hand():
    """Straight lines stay straight under smoothing, but for the ends."""
    tables = [pd.DataFrame({"objective/kl": slope * np.arange(201.0)}) for slope in (1, 2, 3)]
    curves = compare.aggregate(
        {"tales": tables}, ["objective/kl"], pd.DataFrame(columns=["task", "metric", "window"])
    )
    at = curves.set_index("update").loc[100]
    assert at["mean"] == pytest.approx(200, abs=0.05) and at["std"] == pytest.approx(100, abs=0.05)
    assert at["seeds"] == 3 and at["window"] == 2
    assert curves["update"].tolist() == list(range(0, 201, 2))


def test_a_point_between_two_of_a_curve():
    curve = pd.DataFrame({"update": [240, 260, 280], "mean": [1.0, 2.0, 4.0], "std": [0.1, np.nan, 0.3]})
    assert compare.value_at(curve, "mean", 250) == 1.5 and compare.value_at(curve, "mean", 280) == 4.0
    assert np.isnan(compare.value_at(curve, "std", 250)) and compare.value_at(curve, "std", 240) == 0.1


def test_published_curves_and_their_errors():
    curve = published(OPENAI, "sentiment", "objective/scores").set_index("update")
    assert curve.loc[1000, "mean"] == pytest.approx(1.70, abs=0.02)  # 1.698 over updates 927 to 1026
    assert set(curve["mean_error"]) == {0.0048} and set(curve["seeds"]) == {10}
    assert set(published(OPENAI, "tldr", "objective/kl")["seeds"]) == {1}
    loss = published(OPENAI, "sentiment", "train_reward/minibatch/loss")
    assert loss["update"].max() == 144 and loss["mean"].iloc[0] == pytest.approx(1.417, abs=0.001)
    # A band that hides behind the line is at most 1.7 pixels wide.
    raw = pd.read_csv(compare.REFERENCE / "lm_human_preferences.csv")
    hidden = raw[raw["note"].fillna("").str.contains("std_hidden") & (raw["implementation"] == DETAILS)].iloc[0]
    pixel = pd.read_csv(compare.REFERENCE / "errors.csv").query(
        "implementation == @DETAILS and task == @hidden.task and metric == @hidden.metric"
    )["pixel"]
    row = published(DETAILS, hidden["task"], hidden["metric"]).set_index("update").loc[hidden["update"]]
    assert row["std"] == pytest.approx(1.7 * pixel.iloc[0])


# ------------------------------------------------------------------------------------------------ input and output


def line(n: int = 21) -> pd.DataFrame:
    return pd.DataFrame({"objective/kl": np.arange(n, dtype=float), "objective/scores": np.ones(n)})


def test_aggregation_alone(tmp_path):
    for seed in (1, 2):
        write_run(tmp_path / "runs", seed, line() * seed, preset="tales")
    write_run(tmp_path / "runs", 3, line(), preset="tales", finished=False)
    result = launch(COMPARE, "--ours", "runs/*", "--output", "out", folder=tmp_path)
    assert result.status == 0 and "left out, because it is not finished: runs/train_policy__tales__3" in result.stdout
    curves = pd.read_csv(tmp_path / "out/curves.csv").set_index(["metric", "update"])
    scores = curves.loc["objective/scores", 20]
    assert (scores["mean"], scores["std"], scores["seeds"]) == (1.5, pytest.approx(0.707107), 2)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"curves.csv", "facts.json"}
    facts = json.loads((tmp_path / "out/facts.json").read_text())
    assert facts["commit"] == ["c"] and facts["device"] == ["cpu: d, 1 x 1 threads"]
    result = launch(COMPARE, "--ours", "out/curves.csv", "--output", "out/curves.csv", folder=tmp_path)
    assert result.status == 2 and result.stderr.count("\n") == 1, result


def test_few_seeds_are_said(tmp_path):
    write_run(tmp_path / "runs", 1, line(), preset="tales")
    assert launch(COMPARE, "--ours", "runs/*", "--output", "out", folder=tmp_path).status == 0
    few = launch(COMPARE, "--ours", "runs/*", "--theirs", "out/curves.csv", folder=tmp_path)
    assert "seeds: 1; with fewer than 5, points may be outside by chance" in few.stdout
    names = "| task | metric | update | ppo_rlhf | out/curves.csv | z |  |"  # both sides are called ppo_rlhf
    assert names in few.stdout and "| tales | `objective/scores` | 20 | 1 ± ? | 1 ± ? | ? |" in few.stdout


def test_what_the_other_side_lacks_is_said(tmp_path):
    for seed in (1, 2):
        write_run(tmp_path / "runs", seed, line() * seed, preset="tales")
        write_run(tmp_path / "runs", seed, line() * seed, preset="mine")
    (tmp_path / "part").mkdir()
    for seed in (1, 2):
        write_run(tmp_path / "part", seed, line()[["objective/kl"]] * seed, preset="tales")
    assert launch(COMPARE, "--ours", "part/*", "--output", "out", folder=tmp_path).status == 0
    result = launch(COMPARE, "--ours", "runs/*", "--theirs", "out/curves.csv", folder=tmp_path)
    lines = result.stdout.splitlines()
    assert "mine, not compared, because the other side does not have it: everything" in lines
    assert "tales, not compared, because the other side does not have it: objective/scores" in lines
    assert result.status == 0 and lines[-1] == "all 1 are inside"


def another(seed: int, rows: int = 21, **changes) -> Damage:
    """One more run, in a folder of its own."""
    return lambda run: write_run(run.parent.with_name("b"), seed, line(rows), **changes)


BAD = [  # what the line says, what is done to the folder of a run, and the arguments
    ("are both a policy, sentiment, seed 1; choose one", another(1), "--ours [ab]/*"),
    ("other arguments than another seed of sentiment: exp_name", another(2, exp_name="no-kl"), "--ours [ab]/*"),
    ("other arguments than another seed of sentiment: ppo", another(2, ppo={"lr": 1}), "--ours [ab]/*"),
    ("the seeds of sentiment differ in length", another(2, 22), "--ours [ab]/*"),
    ("objective/kl of sentiment has gaps", write("metrics.csv", "step,objective/kl\n0,1\n1,\n"), "--ours a/*"),
    ("holds something that is not a number", write("metrics.csv", "step,objective/kl\n0,much\n"), "--ours a/*"),
    ("metrics.csv has no rows", write("metrics.csv", "step,objective/kl\n"), "--ours a/*"),
    ("none of these runs is finished", edit("meta.json", "finished", to=False), "--ours a/*"),
    ("is not the folder of a run", remove("meta.json"), "--ours a/*"),
    ("no run folder, no curves.csv and none of", remove("meta.json"), "--ours nowhere/*"),
    ("is not a table of curves: it has no column", write("../../table.csv", "a,b\n1,2\n"), "--ours table.csv"),
    (
        "the two sides have no task and metric in common",
        edit("meta.json", "args", "preset", to="mine"),
        f"--ours a/* --theirs {OPENAI}",
    ),
]


@pytest.mark.parametrize(("message", "damage", "arguments"), BAD, ids=[message for message, *_ in BAD])
def test_bad_input(tmp_path, message, damage, arguments):
    damage(write_run(tmp_path / "a", 1, line()))
    result = launch(COMPARE, *arguments.split(), "--output", "out", folder=tmp_path)
    assert result.status == 2 and message in result.stderr and result.stderr.count("\n") == 1, result
