"""What a run survives: signals, a full disk, a read-only folder, damaged files; and going on then.

Each fault leaves the last good checkpoint and one clear line. soak.py has kill -9.
"""

import shutil
import time
from pathlib import Path

import pytest
import torch
from processes import SCRIPTS, Launched, Result, launch, launch_together, start_together
from runs import (
    both_arguments,
    interrupt,
    meta_of,
    metrics_of,
    only,
    policy_arguments,
    samples_of,
    world_arguments,
)
from safetensors.torch import load_file
from torch.testing import assert_close

LIMITED = Path(__file__).parent / "limited_run.py"


def error_line(result: Result) -> str:
    """The one line of a run that ended with status 2."""
    assert result.status == 2, result.stdout + result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.strip()]
    assert line.startswith("error: ")
    return line


def limited(size: int, script: str, *arguments: str, folder: Path) -> str:
    """The error line of a script without root's rights, whose files may grow to so many bytes; 0: to any size."""
    return error_line(launch(LIMITED, str(size), str(SCRIPTS / script), *arguments, folder=folder))


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def wait_for_rows(launched: Launched, pattern: str, rows: int, folder: Path) -> Path:
    """The run's folder, once metrics.csv holds so many rows."""
    for _ in range(3000):
        if launched.process.exitcode is not None:
            break
        for file in folder.glob(f"{pattern}/metrics.csv"):
            if file.read_text().count("\n") > rows:  # one more for the header
                return file.parent
        time.sleep(0.02)
    raise AssertionError(launched.wait())


def checkpoints(run: Path) -> list[int]:
    return sorted(int(path.name) for path in (run / "checkpoints").iterdir())  # a *.tmp would raise


@pytest.fixture(scope="module")
def policy_run(tiny_world: Path, tiny_reward: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of four updates that nothing happened to, with the checkpoints of 2 and 4."""
    folder = tmp_path_factory.mktemp("undisturbed")
    arguments = [*world_arguments(tiny_world, tiny_reward), *policy_arguments()]
    result = launch("train_policy.py", *arguments, folder=folder)
    assert result.status == 0, result.stderr
    return only(folder, "runs/*")


@pytest.fixture
def cut_off(policy_run: Path, tmp_path: Path) -> Path:
    """A copy of that run as if it had been cut off in its third update, after the checkpoint of the second."""
    run = shutil.copytree(policy_run, tmp_path / "runs" / policy_run.name)
    interrupt(run)
    return run


def resume(run: Path, *arguments: str, **environment: str) -> Result:
    return launch("train_policy.py", "--resume", str(run), *arguments, folder=run.parent.parent, **environment)


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run.parent.parent / "models" / run.name / "policy/model.safetensors")


def check_goes_on(run: Path, undisturbed: Path) -> None:
    """The run goes on to the end and gives the numbers of one that nothing happened to, bit for bit."""
    result = resume(run)
    assert result.status == 0, result.stderr
    assert metrics_of(run) == metrics_of(undisturbed)
    assert samples_of(run) == samples_of(undisturbed)
    assert_close(weights_of(run), weights_of(undisturbed), rtol=0, atol=0)


# ---- SIGTERM ---------------------------------------------------------------------------------------------------


@pytest.fixture
def arguments(tiny_world: Path, tiny_reward: Path) -> list[str]:
    """The arguments of a run that goes on until it is stopped."""
    long = ["--ppo.total_episodes", "16000", "--save_interval", "0"]
    return [*world_arguments(tiny_world, tiny_reward), *policy_arguments(), *long]


def test_sigterm_saves_a_checkpoint_and_ends(arguments, tmp_path):
    launched = Launched("train_policy.py", *arguments, folder=tmp_path)
    run = wait_for_rows(launched, "runs/*", 2, tmp_path)
    launched.process.terminate()
    result = launched.wait(60)
    assert result.status == 0 and "Traceback" not in result.stderr
    (step,) = checkpoints(run)
    stopped = f"stopped by SIGTERM after step {step}, with a checkpoint"
    assert f"{stopped}; resume with --resume {run}" in result.stdout
    assert len(metrics_of(run)) == step < 1000
    assert not meta_of(run)["finished"]
    assert not (tmp_path / "models").exists()

    shorter = str(16 * (step + 1))  # one update more; it has the learning rate of the shorter run
    result = resume(run, "--ppo.total_episodes", shorter)
    assert result.status == 0, result.stderr
    assert f"resumed with ppo.total_episodes 16000 -> {shorter}" in result.stdout
    assert [row["step"] for row in metrics_of(run)] == list(range(step + 1))
    assert metrics_of(run)[-1]["ppo/lr"] == pytest.approx(2e-4 / (step + 1))


def test_sigterm_to_one_of_two_processes_stops_both(arguments, tmp_path):
    first, second = start_together(2, "train_policy.py", *arguments, folder=tmp_path)
    run = wait_for_rows(first, "runs/*", 1, tmp_path)
    second.process.terminate()
    results = first.wait(60), second.wait(60)
    assert [result.status for result in results] == [0, 0], results
    (step,) = checkpoints(run)
    assert f"stopped by SIGTERM after step {step}" in results[0].stdout
    assert len(metrics_of(run)) == step


def test_sigterm_stops_a_joint_run_in_its_first_stage(tiny_world, tmp_path):
    """The run can be resumed to its end, and a finished run goes on if it gets more episodes."""
    many_steps = ("--reward.num_train", "64", "--reward.batch_size", "1")
    launched = Launched("train_both.py", *both_arguments(tiny_world), *many_steps, folder=tmp_path)
    run = wait_for_rows(launched, "runs/train_reward__*", 1, tmp_path)
    launched.process.terminate()
    result = launched.wait(60)
    assert result.status == 0 and "stopped by SIGTERM" in result.stdout
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [run.name]
    assert len(metrics_of(run)) == checkpoints(run)[-1] < 64
    result = launch("train_both.py", "--resume", str(run), folder=tmp_path)
    assert result.status == 0, result.stderr
    assert len(metrics_of(run)) == 64 and only(tmp_path, "models/train_policy__*/policy")
    run, stage = only(tmp_path, "runs/train_policy__*"), files_below(run)
    rows = metrics_of(run)
    result = launch("train_policy.py", "--resume", str(run), "--ppo.total_episodes", "80", folder=tmp_path)
    assert result.status == 0, result.stderr
    assert metrics_of(run)[:4] == rows and [row["step"] for row in metrics_of(run)] == list(range(5))
    assert metrics_of(run)[4]["ppo/lr"] == pytest.approx(2e-4 / 5)
    assert files_below(only(tmp_path, "runs/train_reward__*")) == stage


# ---- Disks -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_does_not_fit_on_the_disk(cut_off, policy_run):
    """At first no file may grow beyond 1 kB, then 10 kB. Then the run's or the checkpoints' folder is read-only. Then
    a file may grow to 150 kB: the tensors of the checkpoint are larger, everything else is smaller.
    """
    resumed, folder = ("train_policy.py", "--resume", str(cut_off)), cut_off.parent.parent
    for size in (1_000, 10_000):
        assert "File too large" in limited(size, *resumed, folder=folder)
        assert checkpoints(cut_off) == [2]
    before = files_below(cut_off)
    for which in (".", "checkpoints"):
        (cut_off / which).chmod(0o555)
        line = limited(0, *resumed, folder=folder)
        (cut_off / which).chmod(0o755)
        assert "Permission denied" in line and checkpoints(cut_off) == [2]
        assert which == "checkpoints" or files_below(cut_off) == before
    line = limited(150_000, *resumed, folder=folder)
    assert "the checkpoint of step 4 cannot be written" in line and "those before it are kept" in line
    assert checkpoints(cut_off) == [2]
    check_goes_on(cut_off, policy_run)


def test_a_model_that_does_not_fit_on_the_disk(policy_run, tmp_path):
    """The run is at its end, and all checkpoints are written; the file of the model's weights is too large."""
    run = shutil.copytree(policy_run, tmp_path / "runs" / policy_run.name)
    size = (policy_run.parent.parent / "models" / policy_run.name / "policy/model.safetensors").stat().st_size
    assert "File too large" in limited(size - 1, "train_policy.py", "--resume", str(run), folder=tmp_path)
    assert checkpoints(run) == [2, 4]
    check_goes_on(run, policy_run)


def test_a_new_run_that_cannot_write(arguments, tmp_path):
    tmp_path.chmod(0o555)
    line = limited(0, "train_policy.py", *arguments, folder=tmp_path)
    tmp_path.chmod(0o755)
    assert "runs" in line and "Permission denied" in line
    assert not list(tmp_path.iterdir())
    assert "File too large" in limited(1_000, "train_policy.py", *arguments, folder=tmp_path)


# ---- Going on with something else ------------------------------------------------------------------------------


def test_what_may_change_is_named(cut_off, policy_run):
    result = resume(cut_off, "--ppo.local_micro_batch_size", "4", "--log_interval", "2", "--save_interval", "3")
    assert result.status == 0, result.stderr
    for change in ("log_interval 1 -> 2", "save_interval 2 -> 3", "ppo.local_micro_batch_size 64 -> 4"):
        assert change in result.stdout
    for row, expected in zip(metrics_of(cut_off), metrics_of(policy_run), strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_two_processes_go_on_as_one_and_one_as_two(cut_off, policy_run, tiny_world, tiny_reward, tmp_path):
    arguments = [*world_arguments(tiny_world, tiny_reward), *policy_arguments()]
    folder = tmp_path / "two"
    folder.mkdir()
    results = launch_together(2, "train_policy.py", *arguments, folder=folder)
    assert [result.status for result in results] == [0, 0], results
    run = only(folder, "runs/*")
    shutil.rmtree(run / "checkpoints" / "4")
    assert resume(run).status == 0
    results = launch_together(2, "train_policy.py", "--resume", str(cut_off), folder=tmp_path)
    assert [result.status for result in results] == [0, 0], results
    for resumed, processes in ((run, 1), (cut_off, 2)):
        assert meta_of(resumed)["num_processes"] == processes
        for row, expected in zip(metrics_of(resumed), metrics_of(policy_run), strict=True):
            assert row == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert_close(weights_of(resumed), weights_of(policy_run), rtol=0, atol=1e-5)
