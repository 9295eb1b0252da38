"""The first hour on a GPU, rehearsed on a CPU: the steps of benchmark/cost/gpu.py, tiny, and what failures leave."""

import json
import math
import os
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest
from processes import Launched
from runs import ROOT

from benchmark.cost import gpu

PEER = "/nowhere/bin/python"  # an interpreter that does not exist


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory) -> tuple[Path, dict]:
    """The folder of a rehearsal in which TRL 1.16 can't be started, and its JSON file."""
    folder = tmp_path_factory.mktemp("gpu")
    words = ["--rehearse", "--folder", ".", "--trl_1_16", PEER, "--steps", "machine", "numbers", "grpo"]
    result = Launched(ROOT / "benchmark/cost/gpu.py", *words, folder=folder).wait(1800)
    assert result.status == 1, result.stdout + result.stderr  # because of TRL
    return folder, json.loads((folder / "gpu.json").read_text())


def test_a_rehearsal_does_its_steps(rehearsal):
    """In a rehearsal both runs are the CPU's. So no metric is off, and each stage of each chapter is compared."""
    folder, report = rehearsal
    steps = report["steps"]
    assert {name: step["status"] for name, step in steps.items()} == {
        **dict.fromkeys(("machine", "numbers"), "done"),
        "grpo": "problems",
    }
    page = (folder / "gpu.md").read_text()
    for step in steps.values():
        for rows in step["tables"].values():
            assert rows and all(f"| {' | '.join(row.values())} |" in page for row in rows)
        assert all(problem in page for problem in step["problems"])
    (rows,) = steps["numbers"]["tables"].values()
    expected = "train_policy train_reward tldr_policy tldr_reward tldr_sft rlvr_policy rlvr_policy"
    assert [row["stage"].strip("`") for row in rows] == expected.split()
    assert all(row["furthest off"].endswith(", 0 tolerances") and int(row["metrics"]) > 3 for row in rows)
    (problem,) = steps["grpo"]["problems"]
    assert PEER in problem
    for dtype in ("float32", "bfloat16"):
        assert [row[""] for row in steps["grpo"]["tables"][f"grpo, {dtype}: speed"]] == ["ours"]


class Ended:
    """A process that has ended."""

    pid = 0

    def wait(self, timeout=None):
        return 1

    def poll(self):
        return 1


def test_repeating_keeps_what_is_done_and_one_failure_stops_no_other_step(rehearsal, tmp_path, monkeypatch):
    for file in rehearsal[0].glob("*.json"):
        shutil.copy(file, tmp_path)
    started = []

    def start(words, folder, **_):
        started.append(words[-1])
        folder.mkdir()
        (folder / "log.txt").write_text("Traceback\nMemoryError: no room\n")
        return Ended()

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
