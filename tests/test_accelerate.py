"""benchmark/accelerate: what the launcher makes of each configuration, and what the scripts make of the launcher."""

import datetime
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from accelerate.commands import launch as launcher
from accelerate.commands.config.config_args import load_config_from_file
from processes import launch_together
from runs import policy_arguments, world_arguments

from ppo_rlhf.lib.base import launch

FOLDER = Path(__file__).parent.parent / "benchmark/accelerate"
CONFIGS = {  # processes, nodes, sharded, weights given back after the forward pass
    "one_gpu": (1, 1, False, None),
    "ddp": (8, 1, False, None),
    "fsdp2": (8, 1, True, "true"),
    "zero2": (8, 1, True, "false"),
    "nodes": (16, 2, False, None),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_the_launcher_makes_of_it(name, monkeypatch):
    """Each file names its command, and the launcher reads it on a machine with eight GPUs. No file is left out."""
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(CONFIGS)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    processes, nodes, sharded, reshard = CONFIGS[name]
    file, text = str(FOLDER / f"{name}.yaml"), (FOLDER / f"{name}.yaml").read_text()
    assert f"accelerate launch --config_file benchmark/accelerate/{name}.yaml" in text
    assert yaml.safe_load(text)["compute_environment"] == "LOCAL_MACHINE"
    assert load_config_from_file(file).num_processes == processes  # it refuses words that it does not know
    words = ["--config_file", file, "script.py"]
    args, *_ = launcher._validate_launch_command(launcher.launch_command_parser().parse_args(words))
    assert (args.num_processes, args.num_machines, bool(args.use_fsdp)) == (processes, nodes, sharded)
    assert args.mixed_precision == "no" and not args.cpu
    if processes > 1:
        environment = launcher.prepare_multi_gpu_env(args)
        assert environment.get("ACCELERATE_USE_FSDP", "false") == str(sharded).lower()
        assert environment.get("FSDP_VERSION") == ("2" if sharded else None)
        assert environment.get("FSDP_RESHARD_AFTER_FORWARD") == reshard
        assert environment.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false") == "false"


def test_the_slurm_script_is_a_shell_script():
    script = FOLDER / "slurm.sh"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    assert re.search(r"--config_file benchmark/accelerate/nodes.yaml", script.read_text())


def test_deepspeed_is_refused(tiny_world, tmp_path):
    arguments = [*world_arguments(tiny_world), *policy_arguments(), "--rewards.function", "builtins:len"]
    for result in launch_together(2, "train_policy.py", *arguments, folder=tmp_path, ACCELERATE_USE_DEEPSPEED="true"):
        assert result.status == 2 and "Traceback" not in result.stderr
    assert not (tmp_path / "runs").exists()


LATE = """
import datetime, os, pathlib, sys, time
from ppo_rlhf.lib.base import launch

gone, seconds = pathlib.Path("gone"), int(sys.argv[1])
launch.PATIENCE.timeout = datetime.timedelta(seconds=seconds)
try:
    accelerator = launch.make_accelerator()
    if accelerator.is_main_process:
        time.sleep(3)
        while seconds < 60 and not gone.exists():  # an impatient process is kept waiting until it has gone
            time.sleep(0.05)
    accelerator.wait_for_everyone()
finally:
    if os.environ["RANK"] == "1":
        gone.touch()
"""


def test_the_others_wait_while_the_first_process_uploads(tmp_path):
    """As long as PATIENCE says, in place of the libraries' ten minutes on GPUs."""
    assert datetime.timedelta(hours=1) <= launch.PATIENCE.timeout <= datetime.timedelta(hours=12)
    (tmp_path / "late.py").write_text(LATE)
    assert [result.status for result in launch_together(2, tmp_path / "late.py", "60", folder=tmp_path)] == [0, 0]
    (tmp_path / "gone").unlink()
    _, impatient = launch_together(2, tmp_path / "late.py", "1", folder=tmp_path)
    assert impatient.status == 1 and "imed out" in impatient.stderr
