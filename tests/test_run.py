"""run.py: command lines, run folders, logs, checkpoints, error messages."""

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from processes import read_by_nobody
from runs import error_line
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from ppo_rlhf import judge, train_policy
from ppo_rlhf.lib import command_line, errors, run as run_module
from ppo_rlhf.lib.command_line import flag_value
from ppo_rlhf.lib.errors import InputError, NumericalError, run_script
from ppo_rlhf.lib.run import Run, one_line, print_table

pytestmark = pytest.mark.usefixtures("in_a_fresh_folder")


@dataclass(frozen=True)
class FakeArgs:
    preset: str = "small"
    exp_name: str = "test"
    seed: int = 3
    resume: str = ""
    track: bool = False
    tracker: str = "wandb"
    wandb_project_name: str = "project"
    wandb_entity: str | None = None
    upload_model: bool = False
    hf_entity: str = ""
    dtype: str = "float32"


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


def start(accelerator, folder: Path | str = "", first_step: int = 0, **arguments) -> Run:
    run = Run(FakeArgs(resume=str(folder), **arguments), accelerator, {"batch": 8})
    run.start_logging(first_step)
    return run


# ---- Logs ------------------------------------------------------------------------------------------------------


def test_tensorboard_is_cut_back_to_the_checkpoint(accelerator, monkeypatch):
    """It reads the files of a folder in the order of the seconds in their names."""
    before = start(accelerator)
    for step in range(4):
        before.log(step, {"loss": step})
    before.finish()
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 1)
    after = start(Accelerator(cpu=True), before.folder, 2)
    for step in range(2, 6):
        after.log(step, {"loss": -step})
    after.finish()
    events = EventAccumulator(str(before.folder)).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in events] == [(0, 0), (1, 1), (2, -2), (3, -3), (4, -4), (5, -5)]


# ---- Checkpoints -----------------------------------------------------------------------------------------------


@pytest.fixture
def run(accelerator):
    return start(accelerator)


def load(accelerator, folder: Path):
    """The tensors and the state of the newest checkpoint; None if there is none."""
    found = []
    state = Run(FakeArgs(resume=str(folder)), accelerator, {}).resume(found.append)
    return (found[0], state) if found else None


def test_a_checkpoint_survives_the_round_trip(run, accelerator):
    tensors = {
        "half": torch.randn(3, 2).bfloat16(),
        "double": torch.randn(4, 3).double().t(),  # not contiguous
        "number": torch.tensor(7, dtype=torch.int64),
        "parameter": nn.Parameter(torch.randn(2)),
    }
    assert load(accelerator, run.folder) is None  # without a checkpoint, a run begins anew
    run.save_checkpoint(5, tensors, {"kl_coef": 0.1 + 0.2, "query_position": 640})
    loaded, state = load(accelerator, run.folder)
    assert state == {"step": 5, "kl_coef": 0.1 + 0.2, "query_position": 640}
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    assert run.resume(print) == {"step": 0}  # this run does not resume
    # The newest two are kept, and one of the same step is replaced.
    for step, value in ((9, 9.0), (10, 10.0), (10, 0.0)):
        run.save_checkpoint(step, {"x": torch.tensor(value)}, {})
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == ["10", "9"]
    assert load(accelerator, run.folder) == ({"x": torch.tensor(0.0)}, {"step": 10})


def test_a_current_folder_that_is_not_unicode_is_refused(tmp_path, monkeypatch):
    os.mkdir(os.fsencode(tmp_path) + b"/bad\xff")
    monkeypatch.chdir(os.fsencode(tmp_path) + b"/bad\xff")
    message = error_line(command_line.check_run, train_policy.Args())
    folder = f"'{tmp_path}/bad\\udcff'"
    assert message == f"the name of the current folder, {folder}, is not valid Unicode; start in another one"


# ---- Arguments -------------------------------------------------------------------------------------------------


def test_the_last_preset_counts():
    words = ["--preset", "tldr", "--preset=a=b", "--preset-file", "x", "--presets=y"]
    assert flag_value(words, "--preset") == "a=b" and flag_value(words[3:], "--preset") is None


@pytest.mark.parametrize("script", [judge, train_policy])
def test_the_beginning_of_the_help_can_be_read_alone(script):
    """That of train_policy.py is longer than what a stream holds back."""
    with read_by_nobody(), pytest.raises(SystemExit) as end:
        command_line.parse(script.Args, ["--help"], script.__doc__)
    assert end.value.code == 0


# ---- The script's own process ----------------------------------------------------------------------------------


def end_of(capsys, error: BaseException) -> tuple[int, str]:
    """Status and line with which a script ends that raises this."""

    def main():
        raise error

    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        run_script(main)
    printed = capsys.readouterr()
    assert printed.out == ""
    return caught.value.code, printed.err


def test_ctrl_c_speaks_of_resume_only_when_a_run_has_begun(accelerator, capsys, monkeypatch):
    monkeypatch.setattr(errors, "how_to_go_on", "")
    assert end_of(capsys, KeyboardInterrupt()) == (130, "error: interrupted\n")
    assert end_of(capsys, NumericalError("the loss is nan")) == (2, "error: the loss is nan\n")
    folder = start(accelerator).folder
    line = f"error: interrupted; resume with --resume {folder}\n"
    assert end_of(capsys, KeyboardInterrupt()) == (130, line)


def test_control_characters_do_not_reach_the_terminal(capsys):
    def main():
        text = one_line("[/b] one\n\x1b]0;owned\x07\x9b1m two")  # rich has marks in brackets
        print_table("a \x1b[2J", [{"text": text, "n": 1.0}])
        raise InputError("the server says \x1b]0;owned\x07\n\x7f")

    with pytest.raises(SystemExit):
        run_script(main)
    printed = capsys.readouterr()
    assert printed.err == "error: the server says ␛]0;owned␇ \ufffd\n"
    assert "[/b] one⏎␛]0;owned␇\ufffd1m two" in printed.out and "a ␛[2J" in printed.out
    assert not set(printed.out + printed.err) & {"\x1b", "\x07", "\x9b", "\x7f"}


def test_weights_that_are_not_finite_are_never_saved(run):
    with pytest.raises(NumericalError, match="second is not finite at step 3"):
        run.save_checkpoint(3, {"first": torch.ones(2), "second": torch.tensor([1.0, math.inf])}, {})
    assert not (run.folder / "checkpoints").exists()


def test_runs_of_the_same_second_get_folders_of_their_own(accelerator, monkeypatch):
    clock = SimpleNamespace(time=lambda: 1_000_000.5, monotonic=time.monotonic)
    monkeypatch.setattr(run_module, "time", clock)
    assert [start(accelerator).folder.name[-7:] for _ in range(3)] == ["1000000", "1000001", "1000002"]
