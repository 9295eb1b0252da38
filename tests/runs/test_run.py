"""The folder of a run (`Run` of train_policy.py, whose text is that of train_reward.py): logs and checkpoints."""

import csv
import dataclasses
import json
import math
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from runs import error_line, metrics_of, samples_of
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from ppo_rlhf import train_policy, train_reward
from ppo_rlhf.train_policy import AdamTensorFlowStyle, Args, RewardsArgs, Run, TaskArgs

pytestmark = pytest.mark.usefixtures("in_a_fresh_folder")


def start(folder: Path | str = "", first_step: int = 0) -> Run:
    run = Run(Args(resume=str(folder)), Accelerator(cpu=True), {"batch": 8})
    run.open_logs(first_step, {})
    return run


def with_steps(count: int) -> Run:
    """A run that has logged some steps: score and KL are the step and its square."""
    run = start()
    for step in range(count):
        run.log(step, {"objective/score": step, "objective/kl": step**2})
        run.log_samples(step, [{"query": f"query {step}"}])
    return run


# ---- Logs ------------------------------------------------------------------------------------------------------


def test_the_first_signal_waits_for_the_update_and_none_does_after_the_loop():
    """Then everything that was learned is in a checkpoint, and an evaluation may take long."""
    run = start()
    assert not run.told_to_stop()
    signal.raise_signal(signal.SIGINT)
    assert run.told_to_stop()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    start().stop_at_once()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_tensorboard_is_cut_back_to_the_checkpoint(monkeypatch):
    """It reads the files of a folder in the order of the seconds in their names."""
    before = start()
    for step in range(4):
        before.log(step, {"loss": step})
    before.accelerator.end_training()
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 1)
    after = start(before.folder, 2)
    for step in range(2, 6):
        after.log(step, {"loss": -step})
    after.finish("policy")
    events = EventAccumulator(str(before.folder)).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in events] == [(0, 0), (1, 1), (2, -2), (3, -3), (4, -4), (5, -5)]


def test_logs_are_cut_back_to_the_checkpoint_also_after_a_line_that_is_torn():
    folder = with_steps(5).folder
    for name, torn in (("metrics.csv", "5,2"), ("samples.jsonl", '{"step": 5, "que')):
        with (folder / name).open("a") as file:
            file.write(torn)
    start(folder, 3)
    assert [row["step"] for row in metrics_of(folder)] == [row["step"] for row in samples_of(folder)] == [0, 1, 2]


@pytest.mark.parametrize("name", ["metrics.csv", "samples.jsonl"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"\xff\n")])
def test_logs_that_are_missing_or_damaged_end_in_one_line(name, damage):
    folder = with_steps(3).folder
    damage(folder / name)
    assert f"{folder}: metrics.csv or samples.jsonl is damaged" in error_line(start, folder, 3)


def test_a_second_process_that_writes_to_the_run_is_noticed():
    """Whichever of the two is the later one. Nothing is overwritten."""
    folder = with_steps(3).folder
    one, other = start(folder, 3), start(folder, 3)
    one.log(3, {"objective/score": 3, "objective/kl": 9})
    message = f"{folder}: another process writes to this run"
    assert error_line(other.log, 3, {"objective/score": 3, "objective/kl": 9}) == message
    start(folder, 3)
    assert error_line(one.log, 4, {"objective/score": 4, "objective/kl": 16}) == message
    assert [row["step"] for row in metrics_of(folder)] == [0, 1, 2]


def test_a_tracker_that_does_not_start_ends_in_one_line(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    run = Run(Args(track=True), Accelerator(cpu=True), {})
    assert "--track: the tracker does not start: " in error_line(run.open_logs, 0, {})


def test_results_are_means_of_the_last_ten_steps():
    """Of steps 2 to 11: 65 / 10 and (506 - 1) / 10."""
    run = with_steps(12)
    assert run.last_means("score", "kl") == {"last_score": 6.5, "last_kl": 50.5}
    with (run.folder / "metrics.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 12


def test_a_resumed_run_goes_on_with_the_time_before(monkeypatch):
    clock = SimpleNamespace(time=time.time, monotonic=lambda: 1000.0)
    monkeypatch.setattr(train_policy, "time", clock)
    run = start()
    clock.monotonic = lambda: 1060.0
    run.save_meta()
    clock.monotonic = lambda: 5.0  # of another machine
    resumed = start(run.folder)
    clock.monotonic = lambda: 12.5
    assert resumed.seconds() == 67.5
    resumed.save_meta()
    assert json.loads((run.folder / "meta.json").read_text())["wall_time"] == 67.5


def test_a_resumed_run_needs_the_weights_with_which_it_began(tiny_world):
    model = shutil.copytree(tiny_world / "model", Path("model"))
    args = Args(base_model=str(model))
    run = Run(args, Accelerator(cpu=True), {})
    run.open_logs(0, {})
    resume = partial(Run, dataclasses.replace(args, resume=str(run.folder)), Accelerator(cpu=True), {})
    resume()
    weights = load_file(model / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] += 1e-3
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert error_line(resume) == f"--base_model: its weights are not those with which {run.folder} began"


def test_paths_of_a_run_are_looked_for_beside_it_and_then_in_the_current_folder(tmp_path, monkeypatch):
    """Texts that are no paths, such as a full stop, stay what they are."""
    here, beside = tmp_path / "here", tmp_path / "beside"
    for path in (here / "here.jsonl", here / "both.jsonl", beside / "both.jsonl", beside / "models/mine/reward"):
        path.mkdir(parents=True)
    monkeypatch.chdir(beside)
    task = TaskArgs(query_dataset="both.jsonl", end_text=".")
    run = Run(Args(task=task, rewards=RewardsArgs(trained_model="models/mine/reward")), Accelerator(cpu=True), {})
    run.open_logs(0, {})
    assert train_policy.saved_args(Args, run.folder) == run.args
    monkeypatch.chdir(here)
    args = train_policy.saved_args(Args, run.folder)
    assert args.task == dataclasses.replace(task, query_dataset=str(beside / "both.jsonl"))
    assert args.rewards.trained_model == str(beside / "models/mine/reward")
    shutil.rmtree(beside / "both.jsonl")
    assert train_policy.saved_args(Args, run.folder).task == task


@pytest.mark.parametrize("meta", [[], {}, {"args": {}, "wall_time": "a minute"}])
def test_a_damaged_meta_json_ends_in_one_line(meta):
    folder = start().folder
    (folder / "meta.json").write_text(json.dumps(meta))
    assert f"{folder} is not the folder of a run" in error_line(train_policy.read_meta, folder)


# ---- Checkpoints -----------------------------------------------------------------------------------------------


def trained(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after a step, in which a part does not learn."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).double())
    model[0].bias.requires_grad_(False)
    nn.init.constant_(model[0].weight, value)
    optimizer = AdamTensorFlowStyle(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    return model, optimizer


def test_a_checkpoint_survives_the_round_trip():
    run, (model, optimizer) = start(), trained(1.0)
    state = {"step": 5, "kl_coef": 0.1 + 0.2, "query_position": 640, "score_scale": (0.5, 2.0)}
    read = Run(Args(resume=str(run.folder)), Accelerator(cpu=True), {})
    assert read.resume(*trained(2.0), {"step": 0}, total=8) == {"step": 0}  # without a checkpoint, it begins anew
    run.save_checkpoint(model, optimizer, state)
    loaded, loaded_optimizer = trained(2.0)
    assert read.resume(loaded, loaded_optimizer, {}, total=8) == json.loads(json.dumps(state))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(loaded.get_parameter(name), parameter)
    found, expected = (each.state_dict() for each in (loaded_optimizer, optimizer))
    assert found["param_groups"] == expected["param_groups"]
    for index, moments in expected["state"].items():
        assert all(torch.equal(found["state"][index][name], moment) for name, moment in moments.items())
    assert run.resume(loaded, loaded_optimizer, {"step": 0}, total=8) == {"step": 0}  # this run does not resume
    # The newest two are kept, and one of the same step is replaced.
    for step, coefficient in ((9, 9.0), (10, 10.0), (10, 0.5)):
        run.save_checkpoint(model, optimizer, {"step": step, "kl_coef": coefficient})
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == ["10", "9"]
    assert read.resume(loaded, loaded_optimizer, {}, total=10) == {"step": 10, "kl_coef": 0.5}
    assert "more than the 9" in error_line(read.resume, loaded, loaded_optimizer, {}, total=9)


def flip_a_bit(checkpoint: Path) -> None:
    content = bytearray((checkpoint / "tensors.safetensors").read_bytes())
    content[-1] ^= 1
    (checkpoint / "tensors.safetensors").write_bytes(content)


def edit_the_state(checkpoint: Path) -> None:
    state = json.loads((checkpoint / "state.json").read_text())
    (checkpoint / "state.json").write_text(json.dumps(state | {"kl_coef": 0.5}))


DAMAGES: list[Callable[[Path], object]] = [
    flip_a_bit,
    edit_the_state,
    lambda checkpoint: (checkpoint / "tensors.safetensors").write_bytes(b""),
    lambda checkpoint: (checkpoint / "state.json").write_text("[]"),
    lambda checkpoint: (checkpoint / "state.json").unlink(),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_is_there(damage):
    run, (model, optimizer) = start(), trained(1.0)
    for step in (1, 2):
        run.save_checkpoint(model, optimizer, {"step": step, "kl_coef": 0.15})
    newest = run.folder / "checkpoints/2"
    damage(newest)
    read = Run(Args(resume=str(run.folder)), Accelerator(cpu=True), {})
    assert f"{newest} is damaged; remove it" in error_line(read.resume, model, optimizer, {}, total=8)
    newest.rename(run.folder / "removed")
    assert read.resume(model, optimizer, {}, total=8)["step"] == 1


def test_a_checkpoint_of_another_model_is_refused():
    run, (model, optimizer) = start(), trained(1.0)
    run.save_checkpoint(model, optimizer, {"step": 1})
    read = Run(Args(resume=str(run.folder)), Accelerator(cpu=True), {})
    other = nn.Sequential(*model, nn.Linear(1, 1))
    assert "checkpoints/1 is damaged" in error_line(read.resume, other, optimizer, {}, total=8)


def test_a_finished_run_without_checkpoints_is_not_begun_anew():
    folder = with_steps(3).folder
    start(folder).finish("policy")
    message = error_line(Run, Args(resume=str(folder)), Accelerator(cpu=True), {})
    assert message == f"{folder} is finished, and its checkpoints are gone, so it cannot be resumed"


def test_weights_that_are_not_finite_are_never_saved():
    run, (model, optimizer) = start(), trained(1.0)
    model[1].weight.data[0, 1] = math.inf
    message = error_line(run.save_checkpoint, model, optimizer, {"step": 3})
    assert message == "model.1.weight is not finite after step 3; nothing more is saved"
    assert not (run.folder / "checkpoints").exists()


def test_runs_of_the_same_second_get_folders_of_their_own(monkeypatch):
    monkeypatch.setattr(train_policy, "time", SimpleNamespace(time=lambda: 1_000_000.5, monotonic=time.monotonic))
    assert [start().folder.name[-7:] for _ in range(3)] == ["1000000", "1000001", "1000002"]


@pytest.mark.parametrize("script", [train_policy, train_reward])
def test_an_error_line_shows_no_password_and_does_not_command_the_terminal(script, capsys):
    def fail() -> None:
        raise script.InputError("https://me:secret@hub.test\nsays \x1b]0;owned\x07")

    with pytest.raises(SystemExit) as end:
        script.run_script(fail)
    assert (end.value.code, capsys.readouterr().err) == (2, "error: https://hub.test says \ufffd]0;owned\ufffd\n")
