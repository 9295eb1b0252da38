"""benchmark/curves/compare.py, on data where the answer is known."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from refusals import Damage, edit, write
from runs import error_line

from benchmark.curves import compare

OPENAI, DETAILS = "openai/lm-human-preferences", "lm-human-preference-details"
FACTS = {"commit": "c", "device": "cpu: d", "num_processes": 1, "threads": 1, "versions": {}, "wall_time": 1}


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


# ------------------------------------------------------------------------------------------------ known answers


@pytest.fixture
def run(tmp_path, monkeypatch, capsys) -> Callable[..., tuple[int, list[str]]]:
    """A function of patterns, of the other side and of an output: the exit status, and what is printed."""
    monkeypatch.chdir(tmp_path)

    def run(*ours: str, theirs: str = "", output: str = "out") -> tuple[int, list[str]]:
        status = compare.main(compare.Args(ours=ours, theirs=theirs, output=Path(output)))
        return status, capsys.readouterr().out.splitlines()

    return run


def test_two_published_implementations_agree(tmp_path, run):
    status, lines = run(DETAILS, theirs=OPENAI)
    assert status == 0 and lines[-1] == "all 200 are inside"
    verdict = pd.read_csv(tmp_path / "out/verdict.csv")
    assert verdict["verdict"].value_counts()["inside"] == 200 and "outside" not in set(verdict["verdict"])
    assert set(verdict["update"]) == {100, 250, 500, 1000, 1500, 1952}
    assert verdict.groupby("task")["metric"].nunique().to_dict() == {"sentiment": 17, "descriptiveness": 17}


@pytest.mark.parametrize("late, status", [(0, 0), (40, 1), (-40, 1)])
def test_runs_drawn_from_the_published_curves_agree_unless_they_are_late(tmp_path, run, late, status):
    """Ten run folders: the published mean, an offset per seed and noise per update. late: updates, of which 40 make
    a |z| of 3.6 to 3.8.
    """
    random = np.random.default_rng(1)
    metrics = ("objective/scores", "objective/kl", "ppo/loss/value", "ppo/returns/mean")
    curves = compare.published(OPENAI)
    for seed in range(1, 11):
        columns = {}
        for metric in metrics:
            curve = compare.curve_of(curves, "sentiment", metric)
            mean = np.interp(np.arange(1954) - late, curve["update"], curve["mean"])
            std = curve["std"].median()
            columns[metric] = mean + std * (0.6 * random.normal() + 0.8 * random.normal(size=1954))
        write_run(tmp_path / "runs", seed, pd.DataFrame(columns))
    found, lines = run("runs/*", theirs=OPENAI)
    assert found == status == ("are outside" in lines[-1])
    curves = pd.read_csv(tmp_path / "out/curves.csv")
    assert set(curves["metric"]) == set(metrics) and set(curves["seeds"]) == {10}
    assert set(curves["window"]) == {21.04}  # updates: a hundredth of the published x axis, 152 + 1952
    # The script reads what it has written.
    assert run("out/curves.csv", theirs=OPENAI, output="again")[0] == status
    one, two = (pd.read_csv(tmp_path / name / "verdict.csv") for name in ("out", "again"))
    pd.testing.assert_frame_equal(one, two, rtol=1e-3, atol=2e-3)


# ------------------------------------------------------------------------------------------------ the numbers


def test_standardised_difference_by_hand():
    ours = {"mean": 1.0, "std": 0.5, "seeds": 4, "mean_error": 0.0}
    theirs = {"mean": 0.0, "std": 1.0, "seeds": 9, "mean_error": 0.1}
    assert compare.standardised(ours, theirs) == pytest.approx(1 / np.sqrt(0.25 / 4 + 1 / 9 + 0.01))
    unknown = theirs | {"std": np.nan, "mean_error": np.nan}
    assert compare.standardised(ours, unknown) == pytest.approx(1 / np.sqrt(0.25 / 4 + 0.25 / 9))
    exact = ours | {"std": 0.0}
    assert compare.standardised(exact, exact) == 0.0
    assert compare.standardised(exact, exact | {"mean": 2.0}) == -np.inf


def test_a_deviation_of_rounding_is_none():
    """As of seeds that are nearly equal: the other side's counts, or the point isn't judged."""
    ours = {"mean": 5.0, "std": 4e-16, "seeds": 2, "mean_error": 0.0}
    theirs = {"mean": 4.0, "std": 1.0, "seeds": 8, "mean_error": 0.0}
    assert compare.standardised(ours, theirs) == pytest.approx(1 / np.sqrt(1 / 2 + 1 / 8))
    for std in (4e-7, np.nan):
        assert np.isnan(compare.standardised(ours, theirs | {"std": std}))
    assert compare.standardised(ours, theirs | {"mean": 5.000001, "std": 0.0}) == 0.0  # as far as curves.csv goes
    small = {"std": 2e-5, "seeds": 2}  # but no rounding
    assert compare.standardised(ours | small, theirs | small) == pytest.approx(1 / 2e-5)


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


def test_published_curves_and_their_errors():
    curves = compare.published(OPENAI)
    scores = compare.curve_of(curves, "sentiment", "objective/scores")
    assert compare.value_at(scores, "mean", 1000) == pytest.approx(1.70, abs=0.02)  # 1.698, updates 927 to 1026
    assert set(scores["mean_error"]) == {0.0048} and set(scores["seeds"]) == {10}
    assert set(compare.curve_of(curves, "tldr", "objective/kl")["seeds"]) == {1}
    # A band that hides behind the line is at most 1.7 pixels wide.
    raw = pd.read_csv(compare.REFERENCE / "lm_human_preferences.csv")
    hidden = raw[raw["note"].fillna("").str.contains("std_hidden") & (raw["implementation"] == DETAILS)].iloc[0]
    pixel = pd.read_csv(compare.REFERENCE / "errors.csv").query(
        "implementation == @DETAILS and task == @hidden.task and metric == @hidden.metric"
    )["pixel"]
    curve = compare.curve_of(compare.published(DETAILS), hidden["task"], hidden["metric"])
    assert compare.value_at(curve, "std", hidden["update"]) == pytest.approx(1.7 * pixel.iloc[0])


# ------------------------------------------------------------------------------------------------ input and output


def line(n: int = 21) -> pd.DataFrame:
    return pd.DataFrame({"objective/kl": np.arange(n, dtype=float), "objective/scores": np.ones(n)})


def test_runs_of_a_folder_become_curves(tmp_path, run):
    for seed in (1, 2):
        write_run(tmp_path / "runs", seed, line() * seed, preset="tales")
    write_run(tmp_path / "runs", 3, line(), preset="tales", finished=False)
    status, lines = run("runs/*")
    assert status == 0 and "left out, because it is not finished: runs/train_policy__tales__3" in "\n".join(lines)
    curves = pd.read_csv(tmp_path / "out/curves.csv").set_index(["metric", "update"])
    scores = curves.loc["objective/scores", 20]
    assert (scores["mean"], scores["std"], scores["seeds"]) == (1.5, pytest.approx(0.707107), 2)
    facts = json.loads((tmp_path / "out/facts.json").read_text())
    assert facts["commit"] == ["c"] and facts["device"] == ["cpu: d, 1 x 1 threads"]


def test_few_seeds_and_what_the_other_side_lacks_are_said(tmp_path, run):
    for preset in ("tales", "mine"):
        write_run(tmp_path / "runs", 1, line(), preset=preset)
    for seed in (1, 2):
        write_run(tmp_path / "part", seed, line()[["objective/kl"]] * seed, preset="tales")
    assert run("part/*")[0] == 0
    status, lines = run("runs/*", theirs="out/curves.csv", output="verdict")
    assert "seeds: 1; with fewer than 5, points may be outside by chance" in lines
    assert "| task | metric | update | ppo_rlhf | out/curves.csv | z |  |" in lines  # both sides are called ppo_rlhf
    assert "mine, not compared, because the other side does not have it: everything" in lines
    assert "tales, not compared, because the other side does not have it: objective/scores" in lines
    assert status == 0 and lines[-1] == "all 1 are inside"


def another(seed: int, rows: int = 21, **changes) -> Damage:
    """One more run, in a folder of its own."""
    return lambda run: write_run(run.parent.with_name("b"), seed, line(rows), **changes)


BAD = [  # what the line says, what is done to the folder of a run, and the two sides
    ("are both a policy, sentiment, seed 1; choose one", another(1), "[ab]/*"),
    ("other arguments than another seed of sentiment: exp_name", another(2, exp_name="no-kl"), "[ab]/*"),
    ("the seeds of sentiment differ in length", another(2, 22), "[ab]/*"),
    ("objective/kl of sentiment has gaps", write("metrics.csv", "step,objective/kl\n0,1\n1,\n"), "a/*"),
    (
        "the two sides have no task and metric in common",
        edit("meta.json", "args", "preset", to="mine"),
        "a/*",
        OPENAI,
    ),
]


@pytest.mark.parametrize(("message", "damage", "ours", "theirs"), [(*row, "")[:4] for row in BAD])
def test_bad_input(tmp_path, run, message, damage, ours, theirs):
    damage(write_run(tmp_path / "a", 1, line()))
    assert message in error_line(run, ours, theirs=theirs)
