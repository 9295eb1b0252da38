"""The first hour on a GPU, rehearsed on a CPU: the steps of benchmark/cost/gpu.py, tiny, and what failures leave."""

import json
import math
import os
import subprocess

import pandas as pd
import pytest
from processes import launch
from runs import ROOT

from benchmark.cost import gpu, speed
from ppo_rlhf.train_policy import InputError


@pytest.mark.parametrize("step", ["machine", "numbers"])
def test_a_rehearsal_of_a_step(step, tmp_path):
    """In a rehearsal both runs are the CPU's. So no metric is off, and each stage of each chapter is compared."""
    words = [step, "--rehearse", "--folder", "results", "--runs", "runs"]
    result = launch(ROOT / "benchmark/cost/gpu.py", *words, folder=tmp_path)
    assert result.status == 0, result.stdout + result.stderr
    found, page = ((tmp_path / f"results/{step}.{ending}").read_text() for ending in ("json", "md"))
    (rows,) = json.loads(found)["tables"].values()
    assert rows and all(f"| {' | '.join(row.values())} |" in page for row in rows)
    if step == "numbers":
        expected = "train_policy train_reward rlvr_policy tldr_policy tldr_reward tldr_sft rlvr_policy"
        assert [row["stage"].strip("`") for row in rows] == expected.split()
        assert all(row["furthest off"].endswith(", 0 tolerances") and int(row["metrics"]) > 3 for row in rows)


@pytest.mark.parametrize("step", ["ppo", "grpo"])
def test_speed_without_trl_is_kept_where_trl_fails(step, tmp_path, monkeypatch):
    def report(args: speed.Args) -> dict:
        if args.trl:
            raise InputError("trl ended with status 1")
        return {"speed": [{"": args.dtype}], "utilisation": []}

    monkeypatch.setattr(speed, "report", report)
    args = gpu.Args(step=step, trl=True, folder=tmp_path)
    gpu.speeds(args, gpu.Findings(args))
    found = json.loads((tmp_path / f"{step}.json").read_text())
    assert found["problems"] == ["next to TRL: trl ended with status 1"]
    for dtype in ("float32", "bfloat16"):
        assert found["tables"][f"{dtype}: speed"] == [{"": dtype}]


def test_what_is_beyond_a_tolerance():
    cpu = pd.Series({"a": 2.0, "b": math.nan, "c": 0.0, "val/first_ratio_gap": 0.0, "time/x": 1.0})
    gpus = pd.Series({"a": 2.0 + 1.5 * (1e-3 + 2e-3), "b": math.nan, "c": 5e-4, "val/first_ratio_gap": 0.5})
    gpus["time/x"] = 2.0
    assert dict(gpu.far_off(gpus, cpu, "float32")) == pytest.approx({"a": 1.5, "c": 0.5})
    gpus["c"] = math.nan
    assert dict(gpu.far_off(gpus, cpu, "float32"))["c"] == math.inf


@pytest.mark.parametrize("failing, status", [("none", 0), ("numbers", 1), ("ppo", 1)])
def test_the_shell_script_makes_all_steps_whatever_becomes_of_one(tmp_path, failing, status):
    """With the interpreter that it is told: here one that says what it is called with, fails, or does not end."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\n[ "$1" = -c ] && exit 0\necho "$PYTHONPATH" "$@"\n'
        f'[ "$2" = {failing} ] || exit 0\n[ "$2" = ppo ] && sleep 600\nexit 1\n'
    )
    python.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(python), "LIMIT": "2s"}
    command = ["bash", str(ROOT / "benchmark/gpu.sh"), "--rehearse"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [f"{ROOT} benchmark/cost/gpu.py {step} --rehearse" for step in ("machine", "numbers", "ppo", "grpo")]
    assert [line for line in found.stdout.splitlines() if "gpu.py" in line] == lines
    assert found.returncode == status and ("ppo took more than 2s" in found.stdout) == (failing == "ppo")
