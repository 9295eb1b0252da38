"""benchmark/curves/replay.py: openrlbenchmark draws two small runs against OpenAI's curves without a network."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from processes import HELPERS, launch
from runs import error_line, interrupt

from benchmark.curves import replay

pytest.importorskip("openrlbenchmark", reason="openrlbenchmark needs Python 3.11 to 3.13")
REPLAY = Path(replay.__file__)
OFFLINE_RUN = HELPERS / "offline_run.py"
RUNS = "runs/train_policy*"


@pytest.fixture(scope="module")
def two_runs(both, tmp_path_factory):
    """A folder with runs/ of a policy, and with the same run with other numbers."""
    copy = both.copy(tmp_path_factory.mktemp("replay") / "copy")
    run = copy.run("train_policy")
    other = shutil.copytree(run, run.with_name("train_policy__tales__2"))
    table = pd.read_csv(run / "metrics.csv", index_col="step")
    (1.5 * table).to_csv(other / "metrics.csv")
    return copy.folder


def cells(path: Path, row: str) -> list[tuple[float, float]]:
    """Mean and deviation of each metric in a row of a table that openrlbenchmark wrote."""
    table = pd.read_csv(path, index_col=0)
    return [tuple(map(float, cell.split(" ± "))) for cell in table.loc[row]]


def test_our_runs_against_openais(two_runs):
    result = launch(OFFLINE_RUN, str(REPLAY), "--runs", RUNS, folder=two_runs, COLUMNS="200")
    assert result.status == 0, result.stderr[-2000:]
    assert (two_runs / "replay.png").read_bytes()[:4] == b"\x89PNG"
    tables = [pd.read_csv(path) for path in two_runs.glob(f"{RUNS}/metrics.csv")]
    ours = cells(two_runs / "replay/tales.csv", "ppo_rlhf, train_policy")
    theirs = cells(two_runs / "replay/tales.csv", "openai/lm-human-preferences, 124M")
    published = pd.read_csv(replay.REFERENCE)
    published = published.query(
        "source_figure == 'ours1.png' and implementation == @replay.OPENAI and task == 'sentiment'"
    )
    assert len(ours) == len(theirs) == len(replay.METRICS) == 17
    for names, (mean, std), (their_mean, their_std) in zip(replay.METRICS, ours, theirs, strict=True):
        ends = [table[names[0]][-100:].mean() for table in tables]
        assert (mean, std) == pytest.approx((np.mean(ends), np.std(ends)), abs=6e-5)
        curve = published[published["metric"] == names[0]][-100:]
        # Half of ten seeds lie above the mean and half below, so that the deviation with n - 1 is the published one.
        deviation = curve["std"].fillna(0).mean() * np.sqrt(9 / 10)
        assert (their_mean, their_std) == pytest.approx((curve["mean"].mean(), deviation), abs=6e-5)


def test_a_run_that_is_not_finished_counts_as_running(two_runs, tmp_path):
    """Which the tool leaves out."""
    folder = shutil.copytree(two_runs, tmp_path / "copy")
    run = next(folder.glob(RUNS))
    assert replay.our_run(run).state == "finished"
    interrupt(run)
    assert replay.our_run(run).state == "running"


def test_the_published_command_asks_for_the_published_metrics(tmp_path):
    """openrlbenchmark.sh, of which an interpreter is told that prints its arguments."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    command = ["bash", str(REPLAY.with_name("openrlbenchmark.sh")), "chapter1", "me"]
    words = subprocess.check_output(command, env={**os.environ, "PYTHON": str(python)}, text=True).split("\n")
    theirs, ours = ([part.partition("=") for part in word[1:].split("&")] for word in words if word[:1] == "?")
    for side, column, project in ((theirs, 1, "lm-human-preferences"), (ours, 2, "ppo_rlhf")):
        metrics = [value for name, _, value in side if name == "metrics"]
        assert metrics == [names[column] for names in replay.METRICS] and ("wpn", "=", project) in side
    assert ours[0] == ("we", "=", "me")


def test_bad_input(tmp_path, two_runs, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter").touch()
    run = next(two_runs.glob(RUNS))
    shutil.copytree(two_runs, tmp_path / "copy")
    for runs, message in (
        (["nowhere*"], "--runs nowhere*: no such folder"),
        ([str(run)], "--folder mine was not made by this script"),
        ([str(run), f"copy/{RUNS}"], "is there twice"),
    ):
        assert message in error_line(replay.main, replay.Args(runs=runs, folder=Path("mine")), [])
    assert (tmp_path / "mine/letter").exists()
