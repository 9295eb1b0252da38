"""The commands of benchmark/curves/chapter2.sh are ones that the scripts take."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmark.curves import many_seeds
from ppo_rlhf.tldr import all as tldr_all

ROOT = Path(__file__).parent.parent
CHAPTER2 = ROOT / "benchmark/curves/chapter2.sh"
PAPER = ["1b", "1b-lora", "1b-subtract", "1b-k3"]


def commands(tmp_path: Path, *experiments: str) -> list[list[str]]:
    """The arguments that chapter2.sh gives many_seeds.py, one list for each experiment."""
    stub = tmp_path / "python"
    stub.write_text(f"#!{sys.executable}\nimport shlex, sys\nprint(shlex.join(sys.argv[2:]))\n")
    stub.chmod(0o755)
    result = subprocess.run(
        ["bash", str(CHAPTER2), *experiments],
        env={**os.environ, "PYTHON": str(stub)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return [shlex.split(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("experiment", [*PAPER, "posts"])
def test_arguments(tmp_path, experiment):
    """What the launcher gets, and what the script gets in its turn, can be parsed; the four seeds are the paper's."""
    import tyro

    (words,) = commands(tmp_path, experiment)
    args = tyro.cli(many_seeds.Args, args=words)
    seeds = [args.start_seed + number * args.seed_step for number in range(args.num_seeds)]
    assert seeds == ([1, 2, 3, 4] if experiment == "posts" else [44413, 55513, 66613, 77713])
    flags = args.command.partition("ppo_rlhf/tldr/all.py")[2]
    parsed = tldr_all.parse(shlex.split(flags))
    if experiment == "posts":
        assert parsed.preset == "posts"
        return
    assert parsed.base_model == "EleutherAI/pythia-1b-deduped"
    assert parsed.policy.dtype == parsed.sft.dtype == parsed.reward.dtype == "bfloat16"


def test_unknown_experiment():
    result = subprocess.run(["bash", str(CHAPTER2), "12b"], capture_output=True, text=True)
    assert result.returncode == 2 and "has no experiment 12b" in result.stderr


def test_a_model_without_safetensors_must_be_said():
    command = ["bash", str(CHAPTER2.with_name("chapter1.sh")), "cerebras-111m"]
    environment = {**os.environ, "PYTHON": "false", "MODEL": ""}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode != 0 and "MODEL: must name" in result.stderr and "safetensors" in result.stderr
