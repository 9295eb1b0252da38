"""What a run survives: kill -9, SIGTERM, Ctrl-C, a full disk; and continuing with something else.

Each fault leaves the last good checkpoint, and at most one line.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from processes import HELPERS, SCRIPTS, Result, launch, launch_together
from runs import check_close, interrupt, meta_of, metrics_of
from safetensors.torch import load_file
from torch.testing import assert_close
from whole_runs import Whole, check_same

FAULTY = HELPERS / "faulty_run.py"


def faulty(fault: str, number: int, script: str, *arguments: str) -> list[str]:
    """The command line of a script to which something happens."""
    return [str(FAULTY), fault, str(number), str(SCRIPTS / script), *arguments]


def error_line(result: Result) -> str:
    """The one line of a run that ended with status 2."""
    assert result.status == 2, result.stdout + result.stderr
    *bars, line = [line for line in result.stderr.splitlines() if line.strip()]
    assert line.startswith("error: ") and all(bar.startswith("PPO: ") for bar in bars)
    return line


def checkpoints(run: Path) -> list[int]:
    return sorted(int(path.name) for path in (run / "checkpoints").iterdir() if path.suffix != ".tmp")


def traces_of(run: Whole) -> list[bytes]:
    return [path.read_bytes() for path in sorted(run.run("train_policy").glob("traces/*"))]


def check_equal(run: Whole, undisturbed: Whole) -> None:
    """All numbers, times apart, bit for bit."""
    check_same(run, undisturbed)
    assert traces_of(run) == traces_of(undisturbed)


def check_rounded(run: Whole, undisturbed: Whole) -> None:
    """The numbers of the policy, but for rounding."""
    check_close(run.run("train_policy"), undisturbed.run("train_policy"), rel=1e-4, abs=1e-6)
    weights = [load_file(one.model("policy") / "model.safetensors") for one in (run, undisturbed)]
    assert_close(*weights, rtol=0, atol=1e-5)


# ---- kill -9, SIGTERM, Ctrl-C ---------------------------------------------------------------------------------

# What happens each time that the run is started, and at which call.
FAULTS = [
    ("JSON file", 0),  # there is nothing to resume yet
    ("rollout", 0),
    ("tensors of a checkpoint", 0),
    ("SIGINT", 1),
    ("checksum of a checkpoint", 1),  # the first call is for the checkpoint that is read
    ("name of a checkpoint", 0),
    ("optimiser step", 3),  # from here on in the second stage
    ("tensors of a checkpoint", 0),
    ("removal of a folder", 0),
    ("JSON file", 2),
    ("SIGTERM", 0),
    ("row of metrics", 0),
    ("sample", 0),
    ("rollout", 1),
]


def resume(folder: Path) -> list[str]:
    """The arguments that resume a joint run at its last stage; none if there is nothing to resume."""
    begun = sorted(folder.glob("runs/*/meta.json"))  # train_policy is before train_reward
    return ["--resume", str(begun[0].parent)] if begun else []


def test_a_joint_run_that_dies_again_and_again_gives_the_numbers_of_one_that_does_not(both, tmp_path):
    for fault, number in FAULTS:
        arguments = resume(tmp_path) or both.arguments
        result = launch(*faulty(fault, number, both.script, *arguments), folder=tmp_path)
        if fault in ("SIGTERM", "SIGINT"):
            run = Path(resume(tmp_path)[-1])
            step = len(metrics_of(run))
            assert result.status == 0 and re.search(
                f"stopped after [a-z]+ {step}; resume with --resume {run}", result.stdout
            )
            assert (run / f"checkpoints/{step}").is_dir() and not meta_of(run)["finished"]
        else:
            assert result.status == -9, (fault, result)
    result = launch(both.script, *resume(tmp_path), folder=tmp_path)
    assert result.status == 0, result.stderr
    check_equal(replace(both, folder=tmp_path), both)


@pytest.fixture
def cut_off(both, tmp_path) -> Whole:
    """A copy of the run as if it had been cut off in its third update, after the checkpoint of the second."""
    copy = both.copy(tmp_path / "cut_off")
    interrupt(copy.run("train_policy"))
    return copy


def test_sigterm_to_one_of_two_processes_stops_both_and_one_can_go_on(both, cut_off):
    run = cut_off.run("train_policy")
    command = faulty("SIGTERM", 0, "train_policy.py", "--resume", str(run))
    results = launch_together(2, *command, folder=cut_off.folder)
    assert [result.status for result in results] == [0, 0], results
    assert "stopped after update 3" in results[0].stdout and checkpoints(run) == [2, 3]
    assert meta_of(run)["num_processes"] == 2 and len(metrics_of(run)) == 3
    cut_off.resumed(run, script="train_policy.py")
    assert meta_of(run)["num_processes"] == 1
    check_rounded(cut_off, both)


# ---- Disks -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_does_not_fit_on_the_disk(both, cut_off):
    """At first no file can grow beyond 1 kB; then only the tensors of the checkpoint are too large."""
    run = cut_off.run("train_policy")
    for size, message in ((1_000, "File too large"), (150_000, "the checkpoint of step 4 cannot be written")):
        command = faulty("full disk", size, "train_policy.py", "--resume", str(run))
        assert message in error_line(launch(*command, folder=cut_off.folder))
        assert checkpoints(run) == [2]
    cut_off.resumed(run, script="train_policy.py")
    check_equal(cut_off, both)


def test_a_model_that_does_not_fit_on_the_disk(both, tmp_path):
    """The run is at its end, and all checkpoints are written; the file of the model's weights is too large."""
    copy = both.copy(tmp_path / "copy")
    run, weights = copy.run("train_policy"), copy.model("policy") / "model.safetensors"
    command = faulty("full disk", weights.stat().st_size - 1, "train_policy.py", "--resume", str(run))
    assert "File too large" in error_line(launch(*command, folder=copy.folder))
    assert checkpoints(run) == [2, 4]


def test_a_new_run_that_cannot_write(both, tmp_path):
    (tmp_path / "runs").touch()  # where a folder has to be
    line = error_line(launch(both.script, *both.arguments, folder=tmp_path))
    assert "runs" in line and [path.name for path in tmp_path.iterdir()] == ["runs"]


# ---- Continuing with something else ----------------------------------------------------------------------------


def test_a_finished_run_goes_on_if_it_gets_more_episodes(both, tmp_path):
    """One update more; it has the learning rate of the longer run."""
    copy = both.copy(tmp_path / "copy")
    run = copy.run("train_policy")
    copy.resumed(run, "--ppo.total_episodes", "80", script="train_policy.py")
    *rows, last = metrics_of(run)
    assert rows == metrics_of(both.run("train_policy")) and last["step"] == 4
    assert last["ppo/lr"] == pytest.approx(2e-4 / 5)
