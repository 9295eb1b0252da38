"""The first hour on a GPU, rehearsed on a CPU: the steps of benchmark/cost/gpu.py, tiny, and what failures leave."""

import json
import math
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import tyro
from processes import Launched
from runs import ROOT

from benchmark.cost import gpu, speed

PEER = "/nowhere/bin/python"  # an interpreter that does not exist


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory) -> tuple[Path, dict]:
    """The folder of a rehearsal, and its JSON file."""
    folder = tmp_path_factory.mktemp("gpu")
    words = ["--rehearse", "--folder", ".", "--steps", "machine", "numbers"]
    result = Launched(ROOT / "benchmark/cost/gpu.py", *words, folder=folder).wait(1800)
    assert result.status == 0, result.stdout + result.stderr
    return folder, json.loads((folder / "gpu.json").read_text())


def test_a_rehearsal_does_its_steps(rehearsal):
    """In a rehearsal both runs are the CPU's. So no metric is off, and each stage of each chapter is compared."""
    folder, report = rehearsal
    steps = report["steps"]
    assert {name: step["status"] for name, step in steps.items()} == {"machine": "done", "numbers": "done"}
    page = (folder / "gpu.md").read_text()
    for step in steps.values():
        for rows in step["tables"].values():
            assert rows and all(f"| {' | '.join(row.values())} |" in page for row in rows)
    (rows,) = steps["numbers"]["tables"].values()
    expected = "train_policy train_reward tldr_policy tldr_reward tldr_sft rlvr_policy rlvr_policy"
    assert [row["stage"].strip("`") for row in rows] == expected.split()
    assert all(row["furthest off"].endswith(", 0 tolerances") and int(row["metrics"]) > 3 for row in rows)


def ended(status: int) -> SimpleNamespace:
    """A process that has ended."""
    return SimpleNamespace(pid=0, wait=lambda timeout=None: status, poll=lambda: status)


@pytest.mark.parametrize("rehearse", [False, True])
def test_speed_without_trl_is_kept_where_trl_fails(tmp_path, monkeypatch, rehearse):
    """speed.py takes all the words that it gets, and says what went wrong."""

    def start(command, folder):
        args = tyro.cli(speed.Args, args=[str(word) for word in command[1:]])
        folder.mkdir(parents=True)
        (folder / "report.json").write_text(json.dumps({"speed": [{"": args.dtype}], "utilisation": []}))
        (folder / "log.txt").write_text(f"{args.trl} is not there")
        return ended(int(bool(args.trl)))

    monkeypatch.setattr(gpu, "start", start)
    for step in ("ppo", "grpo"):
        outcome = gpu.Outcome(file=str(tmp_path / "step.json"), commit="c")
        args = gpu.Args(rehearse=rehearse, folder=tmp_path / step, trl_1_12=PEER, trl_1_16=PEER, alone=step)
        gpu.speeds(args, outcome)
        assert outcome.problems == [f"{step} next to TRL: {PEER} is not there"]
        for dtype in ("float32", "bfloat16"):
            assert outcome.tables[f"{step}, {dtype}: speed"] == [{"": dtype}]


def test_repeating_keeps_what_is_done_and_one_failure_stops_no_other_step(rehearsal, tmp_path, monkeypatch):
    for file in rehearsal[0].glob("*.json"):
        shutil.copy(file, tmp_path)
    started = []

    def start(words, folder, **_):
        started.append(words[-1])
        folder.mkdir()
        (folder / "log.txt").write_text("Traceback\nMemoryError: no room\n")
        return ended(1)

    monkeypatch.setattr(gpu, "start", start)
    results = gpu.do_all(gpu.Args(rehearse=True, folder=tmp_path))
    assert started == ["ppo", "grpo"]
    for name, step in results.items():
        assert step.status == ("failed" if name in started else "done")
        assert name in started or step.tables == rehearsal[1]["steps"][name]["tables"]
    assert results["ppo"].problems == ["MemoryError: no room"] and not results["ppo"].tables


def test_a_step_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "STEPS", {"machine": (gpu.machine, 0.001)})
    step = gpu.do_all(gpu.Args(folder=tmp_path))["machine"]
    assert step.status == "failed" and step.problems == ["it took more than 0.001 minutes"]


def test_what_is_beyond_a_tolerance():
    cpu = pd.Series({"a": 2.0, "b": math.nan, "c": 0.0, "val/first_ratio_gap": 0.0, "time/x": 1.0})
    gpus = pd.Series({"a": 2.0 + 1.5 * (1e-3 + 2e-3), "b": math.nan, "c": 5e-4, "val/first_ratio_gap": 0.5})
    gpus["time/x"] = 2.0
    assert dict(gpu.far_off(gpus, cpu, "float32")) == pytest.approx({"a": 1.5, "c": 0.5})
    gpus["c"] = math.nan
    assert dict(gpu.far_off(gpus, cpu, "float32"))["c"] == math.inf


def test_the_shell_script_finds_an_interpreter(tmp_path):
    """The one that it is told, if it has the packages; here one that says what it is called with."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 0\necho "$PYTHONPATH" "$@"\n')
    python.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(python)}
    command = ["bash", str(ROOT / "benchmark/gpu.sh"), "--rehearse"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.stdout.split() == [str(ROOT), "benchmark/cost/gpu.py", "--rehearse"]
