"""What a run survives: signals, a second writer, a full disk, a read-only folder, damaged files; and going on then.

Each fault leaves the last good checkpoint and one clear line. soak.py has kill -9.
"""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from processes import SCRIPTS, Launched, Result, launch, launch_together, start_together
from runs import both_arguments, metrics_of, only, policy_arguments, reward_arguments, samples_of, world_arguments
from safetensors.torch import load_file
from torch.testing import assert_close

LIMITED = Path(__file__).parent / "limited_run.py"


def error_line(result: Result) -> str:
    """The one line of a run that ended with status 2."""
    assert result.status == 2, result.stdout + result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.strip()]
    assert line.startswith("error: ")
    return line


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
    run = tmp_path / "runs" / policy_run.name
    shutil.copytree(policy_run, run)
    shutil.rmtree(run / "checkpoints" / "4")
    meta = json.loads((run / "meta.json").read_text())
    (run / "meta.json").write_text(json.dumps(meta | {"finished": False}))
    return run


def resume(run: Path, *arguments: str, **environment: str) -> Result:
    return launch("train_policy.py", "--resume", str(run), *arguments, folder=run.parent.parent, **environment)


def check_goes_on(run: Path, undisturbed: Path) -> None:
    """The run goes on to the end and gives the numbers of one that nothing happened to, bit for bit."""
    result = resume(run)
    assert result.status == 0, result.stderr
    assert metrics_of(run) == metrics_of(undisturbed)
    assert samples_of(run) == samples_of(undisturbed)
    weights = [
        load_file(folder.parent.parent / "models" / folder.name / "policy/model.safetensors")
        for folder in (run, undisturbed)
    ]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


# ---- SIGTERM and Ctrl-C ----------------------------------------------------------------------------------------


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
    assert f"{stopped}; resume with --resume runs/{run.name}" in result.stdout
    assert len(metrics_of(run)) == step < 1000
    assert not json.loads((run / "meta.json").read_text())["finished"]
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
    many_steps = ("--reward.num_train", "64", "--reward.batch_size", "1")
    launched = Launched("train_both.py", *both_arguments(tiny_world), *many_steps, folder=tmp_path)
    run = wait_for_rows(launched, "runs/train_reward__*", 1, tmp_path)
    launched.process.terminate()
    result = launched.wait(60)
    assert result.status == 0 and "stopped by SIGTERM" in result.stdout
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [run.name]
    result = launch("train_both.py", "--resume", str(run), folder=tmp_path)
    assert result.status == 0, result.stderr
    assert len(metrics_of(run)) == 64 and only(tmp_path, "models/train_policy__*/policy")


def test_ctrl_c_says_how_to_go_on(arguments, tmp_path):
    launched = Launched("train_policy.py", *arguments, folder=tmp_path)
    run = wait_for_rows(launched, "runs/*", 1, tmp_path)
    os.kill(launched.process.pid, signal.SIGINT)
    result = launched.wait(60)
    assert result.status == 130
    assert result.stderr.strip() == f"error: interrupted; resume with --resume runs/{run.name}"


# ---- Two writers -----------------------------------------------------------------------------------------------


def test_a_run_that_is_being_written_is_not_resumed(arguments, tmp_path):
    launched = Launched("train_policy.py", *arguments, folder=tmp_path)
    run = wait_for_rows(launched, "runs/*", 1, tmp_path)
    assert "is in use: another process is writing to it" in error_line(resume(run))
    launched.process.terminate()
    assert launched.wait(60).status == 0
    assert [row["step"] for row in metrics_of(run)] == list(range(checkpoints(run)[-1]))


# ---- Disks -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_does_not_fit_on_the_disk(cut_off, policy_run):
    """A file may grow to 150 kB; the tensors of the checkpoint are larger, everything else is smaller."""
    command = ("150000", str(SCRIPTS / "train_policy.py"), "--resume", str(cut_off))
    line = error_line(launch(LIMITED, *command, folder=cut_off.parent.parent))
    assert "the checkpoint of step 4 cannot be written" in line and "those before it are kept" in line
    assert checkpoints(cut_off) == [2]
    check_goes_on(cut_off, policy_run)


@pytest.mark.parametrize("size", ["1000", "10000"])
def test_a_disk_that_is_full_at_once(cut_off, policy_run, size):
    command = (size, str(SCRIPTS / "train_policy.py"), "--resume", str(cut_off))
    assert "File too large" in error_line(launch(LIMITED, *command, folder=cut_off.parent.parent))
    assert checkpoints(cut_off) == [2]
    check_goes_on(cut_off, policy_run)


def test_a_model_that_does_not_fit_on_the_disk(policy_run, tmp_path):
    """The run is at its end, and all checkpoints are written; the file of the model's weights is too large."""
    run = tmp_path / "runs" / policy_run.name
    shutil.copytree(policy_run, run)
    size = (policy_run.parent.parent / "models" / policy_run.name / "policy/model.safetensors").stat().st_size
    command = (str(size - 1), str(SCRIPTS / "train_policy.py"), "--resume", str(run))
    assert "writing failed" in error_line(launch(LIMITED, *command, folder=tmp_path))
    assert checkpoints(run) == [2, 4]
    check_goes_on(run, policy_run)


def test_a_new_run_on_a_full_disk(arguments, tmp_path):
    command = ("1000", str(SCRIPTS / "train_policy.py"), *arguments)
    assert "File too large" in error_line(launch(LIMITED, *command, folder=tmp_path))


def test_a_read_only_folder(arguments, tmp_path):
    tmp_path.chmod(0o555)
    line = error_line(launch(LIMITED, "0", str(SCRIPTS / "train_policy.py"), *arguments, folder=tmp_path))
    tmp_path.chmod(0o755)
    assert "runs" in line and "Permission denied" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("which", [".", "checkpoints"])
def test_a_run_whose_folder_became_read_only(cut_off, policy_run, which):
    before = files_below(cut_off)
    (cut_off / which).chmod(0o555)
    command = ("0", str(SCRIPTS / "train_policy.py"), "--resume", str(cut_off))
    line = error_line(launch(LIMITED, *command, folder=cut_off.parent.parent))
    (cut_off / which).chmod(0o755)
    assert "Permission denied" in line
    assert checkpoints(cut_off) == [2]
    if which == ".":
        assert files_below(cut_off) == before
    check_goes_on(cut_off, policy_run)


# ---- Going on with something else ------------------------------------------------------------------------------


def test_what_may_change_is_named(cut_off, policy_run):
    result = resume(cut_off, "--ppo.local_micro_batch_size", "4", "--log_interval", "2", "--save_interval", "3")
    assert result.status == 0, result.stderr
    for change in ("log_interval 1 -> 2", "save_interval 2 -> 3", "ppo.local_micro_batch_size 0 -> 4"):
        assert change in result.stdout
    for row, expected in zip(metrics_of(cut_off), metrics_of(policy_run), strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_finished_run_goes_on_if_it_shall_be_longer(policy_run, tmp_path):
    run = tmp_path / "runs" / policy_run.name
    shutil.copytree(policy_run, run)
    result = resume(run, "--ppo.total_episodes", "96")
    assert result.status == 0, result.stderr
    rows = metrics_of(run)
    assert rows[:4] == metrics_of(policy_run) and [row["step"] for row in rows] == list(range(6))
    assert rows[5]["ppo/lr"] == pytest.approx(2e-4 / 6)


def test_a_joint_run_becomes_longer(tiny_world, tmp_path):
    result = launch("train_both.py", *both_arguments(tiny_world), folder=tmp_path)
    assert result.status == 0, result.stderr
    run = only(tmp_path, "runs/train_policy__*")
    result = launch("train_both.py", "--resume", str(run), "--policy.ppo.total_episodes", "80", folder=tmp_path)
    assert result.status == 0, result.stderr
    assert len(metrics_of(run)) == 5 and len(metrics_of(only(tmp_path, "runs/train_reward__*"))) == 5


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
        assert json.loads((resumed / "meta.json").read_text())["num_processes"] == processes
        for row, expected in zip(metrics_of(resumed), metrics_of(policy_run), strict=True):
            assert row == pytest.approx(expected, rel=1e-4, abs=1e-6)
        weights, expected = (
            load_file(path.parent.parent / "models" / path.name / "policy/model.safetensors")
            for path in (resumed, policy_run)
        )
        assert_close(weights, expected, rtol=0, atol=1e-5)


def test_the_reward_trainer_survives_the_same(tiny_world, tmp_path):
    """A signal, a second writer, a full disk, and it goes on to the numbers of an undisturbed run."""
    many_steps = ("--num_train", "64", "--batch_size", "1")
    arguments = [*world_arguments(tiny_world), *reward_arguments(tiny_world), *many_steps]
    undisturbed, folder = tmp_path / "undisturbed", tmp_path / "disturbed"
    for path in (undisturbed, folder):
        path.mkdir()
    assert launch("train_reward.py", *arguments, folder=undisturbed).status == 0
    launched = Launched("train_reward.py", *arguments, folder=folder)
    run = wait_for_rows(launched, "runs/*", 1, folder)
    launched.process.terminate()
    result = launched.wait(60)
    assert result.status == 0 and "stopped by SIGTERM" in result.stdout, result.stderr
    step = checkpoints(run)[-1]
    command = ("150000", str(SCRIPTS / "train_reward.py"), "--resume", str(run))
    assert "cannot be written" in error_line(launch(LIMITED, *command, folder=folder))
    assert checkpoints(run)[-1] == step < 64
    assert launch("train_reward.py", "--resume", str(run), folder=folder).status == 0
    assert metrics_of(run) == metrics_of(only(undisturbed, "runs/*"))
    heads = [load_file(only(path, "models/*/reward/reward_head.safetensors")) for path in (undisturbed, folder)]
    assert all(heads[0][name].equal(heads[1][name]) for name in heads[0])
