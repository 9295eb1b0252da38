"""benchmark/accelerate: what the launcher makes of each configuration, and what the scripts make of the launcher."""

import re
import subprocess

import pytest
import yaml
from accelerate.commands import launch as launcher
from accelerate.commands.config.config_args import load_config_from_file
from runs import ROOT

FOLDER = ROOT / "benchmark/accelerate"
CONFIGS = {  # processes, nodes
    "one_gpu": (1, 1),
    "ddp": (8, 1),
    "nodes": (16, 2),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_the_launcher_makes_of_it(name, monkeypatch):
    """Each file names its command, and the launcher reads it on a machine with eight GPUs. No file is left out."""
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(CONFIGS)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    processes, nodes = CONFIGS[name]
    file, text = str(FOLDER / f"{name}.yaml"), (FOLDER / f"{name}.yaml").read_text()
    assert f"accelerate launch --config_file benchmark/accelerate/{name}.yaml" in text
    assert yaml.safe_load(text)["compute_environment"] == "LOCAL_MACHINE"
    assert load_config_from_file(file).num_processes == processes  # it refuses words that it does not know
    words = ["--config_file", file, "script.py"]
    args, *_ = launcher._validate_launch_command(launcher.launch_command_parser().parse_args(words))
    assert (args.num_processes, args.num_machines, bool(args.use_fsdp)) == (processes, nodes, False)
    assert args.mixed_precision == "no" and not args.cpu


def test_the_slurm_script_is_a_shell_script():
    script = FOLDER / "slurm.sh"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    assert re.search(r"--config_file benchmark/accelerate/nodes.yaml", script.read_text())
