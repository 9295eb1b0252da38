"""benchmark/curves/replay.py: openrlbenchmark draws two small runs against OpenAI's curves without a network."""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from processes import Result, launch
from runs import only, policy_arguments, world_arguments

from benchmark.curves import replay

pytest.importorskip("openrlbenchmark", reason="openrlbenchmark needs Python 3.11 to 3.13")
REPLAY = Path(replay.__file__)
DOCUMENTATION = REPLAY.with_name("README.md").read_text()
OFFLINE_RUN = Path(__file__).parent / "offline_run.py"


@pytest.fixture(scope="module")
def two_runs(tiny_world, tiny_reward, tmp_path_factory):
    """A folder with runs/ of two seeds."""
    folder = tmp_path_factory.mktemp("replay")
    for seed in (1, 2):
        arguments = [*world_arguments(tiny_world, tiny_reward), *policy_arguments()]
        result = launch("train_policy.py", *arguments, "--seed", str(seed), folder=folder)
        assert result.status == 0, result
    return folder


def run(folder: Path, *arguments: str) -> Result:
    return launch(OFFLINE_RUN, str(REPLAY), "--runs", "runs/*", *arguments, folder=folder, COLUMNS="200")


def cells(path: Path, row: str) -> list[tuple[float, float]]:
    """Mean and deviation of each metric in a row of a table that openrlbenchmark wrote."""
    table = pd.read_csv(path, index_col=0)
    return [tuple(map(float, cell.split(" ± "))) for cell in table.loc[row]]


def test_our_runs_against_openais(two_runs):
    result = run(two_runs)
    assert result.status == 0, result.stderr[-2000:]
    assert (two_runs / "replay.png").read_bytes()[:4] == b"\x89PNG"
    tables = [pd.read_csv(path) for path in two_runs.glob("runs/*/metrics.csv")]
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


def test_the_published_command(two_runs, tiny_world):
    """The tables of the command in curves/README.md, on the one task and the label file that the small runs have."""
    command, _ = re.findall(r"python -m openrlbenchmark.rlops_multi_metrics (.*?)```", DOCUMENTATION, re.DOTALL)
    ours = {"<entity>": "local", "sentiment/offline_5k.json": str(tiny_world / "labels/sentiment/offline_5k.json")}
    command = (
        command.replace("\\\n", " ").replace(" descriptiveness/offline_5k.json", "").replace(" descriptiveness", "")
    )
    for theirs, mine in ours.items():
        command = command.replace(theirs, mine)
    words = shlex.split(command)
    assert words[-1] == "--scan-history"
    output = words.index("--output-filename")
    result = run(two_runs, "--output", "published", "--", *words[:output], *words[output + 2 : -1])
    assert result.status == 0, result.stderr[-2000:]
    table, default = (two_runs / name for name in ("published/sentiment.csv", "replay/tales.csv"))
    assert cells(table, "ppo_rlhf") == cells(default, "ppo_rlhf, train_policy")
    theirs = "openrlbenchmark/lm-human-preferences/124M ({})"
    assert cells(table, theirs) == cells(default, "openai/lm-human-preferences, 124M")


def test_the_stand_ins_have_the_published_mean_and_deviation():
    runs = [run for run in replay.published_runs() if run.config.get("task_id.value") == "descriptiveness"]
    scores = np.stack([run.table["ppo/objective/score"] for run in runs])
    curve = pd.read_csv(replay.REFERENCE).query(
        "source_figure == 'ours1.png' and implementation == @replay.OPENAI and task == 'descriptiveness'"
        " and metric == 'objective/scores'"
    )
    assert len(runs) == 10
    np.testing.assert_allclose(scores.mean(0), curve["mean"], rtol=1e-12)
    np.testing.assert_allclose(scores.std(0, ddof=1), curve["std"].fillna(0), atol=1e-12)
    # 16,908 seconds in the mean over the last twentieth of the updates
    assert runs[0].table["_runtime"].iloc[-1] == pytest.approx(16_908, rel=0.03)


def test_a_run_that_is_not_finished_counts_as_running(two_runs, tmp_path):
    """Which the tool leaves out."""
    run = tmp_path / "runs/unfinished"
    shutil.copytree(only(two_runs, "runs/*__1__*"), run)
    assert replay.our_run(run).state == "finished"
    meta = json.loads((run / "meta.json").read_text())
    (run / "meta.json").write_text(json.dumps(meta | {"finished": False}))
    assert replay.our_run(run).state == "running"


def test_bad_input(tmp_path, two_runs):
    result = launch(REPLAY, "--runs", "nowhere*", folder=tmp_path)
    assert result.status == 2 and result.stderr == "error: --runs nowhere*: no such folder\n"
    (tmp_path / "mine/dataset").mkdir(parents=True)
    (tmp_path / "mine/dataset/letter").touch()
    runs = str(only(two_runs, "runs/*__1__*"))
    result = launch(REPLAY, "--runs", runs, "--folder", "mine", folder=tmp_path)
    assert result.status == 2 and "--folder mine was not made by this script" in result.stderr
    assert (tmp_path / "mine/dataset/letter").exists()
    shutil.copytree(runs, tmp_path / "copy" / Path(runs).name)
    result = launch(REPLAY, "--runs", runs, "copy/*", folder=tmp_path)
    assert result.status == 2 and result.stderr.endswith("is there twice\n")
    result = launch(REPLAY, "--runs", str(tmp_path / "mine"), folder=tmp_path)
    assert result.status == 2 and "is not the folder of a run" in result.stderr
