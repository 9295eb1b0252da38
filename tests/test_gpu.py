"""The first hour on a GPU, rehearsed on a CPU: the steps of benchmark/cost/gpu.py, tiny, and what failures leave."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from processes import launch

from benchmark.cost import gpu
from ppo_rlhf.lib.nets import passes
from ppo_rlhf.lib.services import cli, engine_vllm
from ppo_rlhf.rlvr import asynchronous as rlvr_async

ROOT = Path(__file__).parent.parent
PEER = "/nowhere/bin/python"  # an interpreter that does not exist


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory) -> tuple[Path, dict]:
    """The folder of a rehearsal in which TRL 1.12 can't be started, and its JSON file."""
    folder = tmp_path_factory.mktemp("gpu")
    result = launch(ROOT / "benchmark/cost/gpu.py", "--rehearse", "--folder", ".", "--trl_1_12", PEER, folder=folder)
    assert result.status == 1, result.stdout + result.stderr  # because of TRL
    return folder, json.loads((folder / "gpu.json").read_text())


def test_a_rehearsal_does_every_step(rehearsal):
    folder, report = rehearsal
    steps = report["steps"]
    assert list(steps) == list(gpu.STEPS) and report["rehearsal"] and report["commit"]
    status = {name: step["status"] for name, step in steps.items()}
    assert status == dict.fromkeys(gpu.STEPS, "done") | {"ppo": "problems", "vllm": "left out"}
    # What is on the page comes from the steps.
    page = (folder / "gpu.md").read_text()
    for step in steps.values():
        for rows in step["tables"].values():
            for row in rows:
                assert f"| {' | '.join(row.values())} |" in page
        assert all(note in page for note in step["left_out"] + step["problems"])


def test_the_same_numbers_on_both_sides(rehearsal):
    """In a rehearsal both runs are the CPU's. So no metric is off, and each stage of each chapter is compared."""
    rows = next(iter(rehearsal[1]["steps"]["numbers"]["tables"].values()))
    stages = [row[""].partition("`")[2].rstrip("`") for row in rows]
    expected = "train_policy train_reward tldr_policy tldr_reward tldr_sft rlvr_policy rlvr_policy"
    assert stages == expected.split()
    assert all(row["beyond the tolerance"] == "0" and row["in tolerances"] == "0" for row in rows)
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16"}


def test_a_peer_that_fails_leaves_our_numbers(rehearsal):
    step = rehearsal[1]["steps"]["ppo"]
    assert len(step["problems"]) == 1 and PEER in step["problems"][0]
    assert [row[""] for row in step["tables"]["PPO: speed"]] == ["ours"]
    (memory,) = step["tables"]["PPO: memory of a process, without activations by the formula"]
    assert float(memory["formula, GB"]) == pytest.approx(24 * 940_672 / 1e9, rel=0.01)  # the model of tales


class Ended:
    """A process that ends at once, or never."""

    def __init__(self, words, folder, **_):
        self.words, self.pid = words, 0

    def wait(self, timeout=None):
        return 1

    def poll(self):
        return 1


def test_repeating_keeps_what_is_done_and_one_failure_stops_no_other_step(rehearsal, tmp_path, monkeypatch):
    folder, report = rehearsal
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("runs", "models", "worlds"))
    started = []
    monkeypatch.setattr(gpu, "start", lambda words, *where, **_: started.append(words[-1]) or Ended(words, *where))
    results = gpu.do_all(gpu.Args(rehearse=True, folder=tmp_path))
    again = [name for name, step in report["steps"].items() if step["status"] != "done"]
    assert started == again == ["ppo", "vllm"]
    for name, step in results.items():
        assert step["status"] == ("failed" if name in again else "done")
        assert name in again or step == report["steps"][name]
    gpu.do_all(gpu.Args(rehearse=True, folder=tmp_path, steps=("numbers",)))
    assert started == [*again, "numbers"]


def test_a_step_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "STEPS", {"machine": (gpu.machine, 0.001)})
    step = gpu.do_all(gpu.Args(rehearse=True, folder=tmp_path))["machine"]
    assert step["status"] == "failed" and step["reason"] == "it took more than 0.001 minutes"


def test_a_step_that_fails_half_way_keeps_what_it_had_found(tmp_path, monkeypatch):
    def half(args):
        yield gpu.Outcome({"numbers": [{"a": "1"}]})
        raise MemoryError("no room")

    def start(words, folder, **_):
        folder.mkdir()
        with pytest.raises(MemoryError):
            gpu.do_alone(dataclasses.replace(args, alone=words[-1]))
        (folder / "log.txt").write_text("Traceback\nMemoryError: no room\n")
        return Ended(words, folder)

    args = gpu.Args(rehearse=True, folder=tmp_path)
    monkeypatch.setattr(gpu, "STEPS", {"half": (half, 1)})
    monkeypatch.setattr(gpu, "start", start)
    step = gpu.do_all(args)["half"]
    assert (step["status"], step["reason"]) == ("failed", "MemoryError: no room")
    assert step["tables"] == {"numbers": [{"a": "1"}]}
    about = {"device": "x", "versions": {"torch": "1", "transformers": "2"}, "command": "c", "commit": step["commit"]}
    page = gpu.page(about | {"rehearsal": True}, {"half": step})
    assert "## half: failed" in page and "- MemoryError: no room" in page and "| 1 |" in page


def test_what_is_beyond_a_tolerance():
    cpu = {"a": 2.0, "b": math.nan, "c": 0.0, "val/first_ratio_gap": 0.0}
    gpus = {"a": 2.0 + 1.5 * (1e-3 + 2e-3), "b": math.nan, "c": 5e-4, "val/first_ratio_gap": 0.5}
    assert dict(gpu.far_off(gpus, cpu, "float32")) == pytest.approx({"a": 1.5, "c": 0.5})
    assert dict(gpu.far_off(gpus | {"c": math.nan}, cpu, "float32"))["c"] == math.inf


def test_constants_are_found_again():
    """From the times of passes whose costs are known, with the constants for the CPU."""
    costs = {}
    for parameters, per_token in ((10**6, 1e-6), (10**8, 1e-4)):
        cost = passes.COST_OF_WEIGHTS["cpu"] + passes.COST_OF_LAUNCHES["cpu"] / parameters
        fixed, slope = gpu.line([(tokens, per_token * (tokens + cost)) for tokens in (64, 256, 1024)])
        costs[parameters] = fixed / slope
    expected = {"COST_OF_WEIGHTS": passes.COST_OF_WEIGHTS["cpu"], "COST_OF_LAUNCHES": passes.COST_OF_LAUNCHES["cpu"]}
    assert gpu.fit_passes(costs) == pytest.approx(expected)


def test_the_command_with_vllm(rehearsal):
    """Its words are those of rlvr/asynchronous.py, and the line that it takes out is there. vLLM is not tried."""
    case = gpu.cases_of(rehearsal[0] / "worlds", few=True)["chapter 3, GRPO"]
    script, *words = map(str, gpu.vllm_words(ROOT, case, "bfloat16", "/x/python"))
    args = cli.parse_args(rlvr_async.PRESETS, words)
    assert Path(script).exists() and (args.engine, args.vllm_python, args.dtype) == ("vllm", "/x/python", "bfloat16")
    rlvr_async.check_arguments(args)
    assert gpu.OUTPUT_LAYER in Path(engine_vllm.__file__).read_text()


def test_the_shell_script_finds_an_interpreter(tmp_path):
    """The first that has the packages; here one that says what it is called with."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 0\necho "$PYTHONPATH" "$@"\n')
    python.chmod(0o755)
    command = ["bash", str(ROOT / "benchmark/gpu.sh"), "--rehearse", "--folder", "x"]
    environment = {"PATH": os.environ["PATH"]}
    found = subprocess.run(command, env=environment | {"PYTHON": str(python)}, capture_output=True, text=True)
    assert found.stdout.split() == [str(ROOT), "benchmark/cost/gpu.py", "--rehearse", "--folder", "x"]
    none = subprocess.run(command, env=environment | {"PYTHON": "/bin/false"}, capture_output=True, text=True)
    assert none.returncode == 2 and "PYTHON=<interpreter>" in none.stderr
