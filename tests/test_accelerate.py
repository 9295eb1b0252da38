"""benchmark/accelerate: what the launcher makes of each configuration, and what the scripts make of the launcher."""

import datetime
import re
import subprocess

import pytest
import yaml
from accelerate.commands import launch as launcher
from accelerate.commands.config.config_args import load_config_from_file
from processes import launch_together
from runs import ROOT

from ppo_rlhf.lib import processes
from ppo_rlhf.lib.errors import InputError

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


@pytest.mark.parametrize("name", ["DEEPSPEED", "FSDP"])
def test_weights_in_slices_are_refused(name, monkeypatch):
    """In one line, which names what a model that does not fit needs instead."""
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(InputError, match=rf"^{name} is not supported.*frozen models .*bfloat16.*LoRA"):
        processes.make_accelerator()


LATE = """
import datetime, os, pathlib, sys, time
from ppo_rlhf.lib import processes

gone, seconds = pathlib.Path("gone"), int(sys.argv[1])
processes.PATIENCE.timeout = datetime.timedelta(seconds=seconds)
try:
    accelerator = processes.make_accelerator()
    if accelerator.is_main_process:
        time.sleep(2)
        while seconds < 60 and not gone.exists():  # an impatient process is kept waiting until it has gone
            time.sleep(0.05)
    accelerator.wait_for_everyone()
finally:
    if os.environ["RANK"] == "1":
        gone.touch()
"""


def test_the_others_wait_while_the_first_process_uploads(tmp_path):
    """As long as PATIENCE says, in place of the libraries' ten minutes on GPUs."""
    assert datetime.timedelta(hours=1) <= processes.PATIENCE.timeout <= datetime.timedelta(hours=12)
    (tmp_path / "late.py").write_text(LATE)
    assert [result.status for result in launch_together(2, tmp_path / "late.py", "60", folder=tmp_path)] == [0, 0]
    (tmp_path / "gone").unlink()
    _, impatient = launch_together(2, tmp_path / "late.py", "1", folder=tmp_path)
    assert impatient.status == 1 and "imed out" in impatient.stderr
