"""run.py: command lines, run folders, logs, checkpoints, error messages."""

import dataclasses
import json
import math
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from refusals import with_value
from runs import error_line, meta_of, metrics_of, samples_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from ppo_rlhf import train_policy, train_reward
from ppo_rlhf.lib import command_line, errors, files, run as run_module
from ppo_rlhf.lib.command_line import flag_value, from_dict, parse_args
from ppo_rlhf.lib.errors import InputError, NumericalError, run_script
from ppo_rlhf.lib.reward_functions import import_function
from ppo_rlhf.lib.run import Run, one_line, print_table

pytestmark = pytest.mark.usefixtures("in_a_fresh_folder")
SCRIPTS = [train_policy, train_reward]


@dataclass(frozen=True)
class PartArgs:
    lr: float = 0.1
    target: float | None = None


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
    part: PartArgs = field(default_factory=PartArgs)


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


def metrics_at(step: int) -> dict[str, float]:
    return {"loss": 1 / (step + 3), "objective/kl": 0.1 * step - 1e-12}


def start(accelerator, folder: Path | str = "", first_step: int = 0, **arguments) -> Run:
    run = Run(FakeArgs(resume=str(folder), **arguments), accelerator, {"batch": 8})
    run.start_logging(first_step)
    return run


def log(run: Run, steps: range, sign: int = 1) -> None:
    for step in steps:
        run.log(step, {name: sign * value for name, value in metrics_at(step).items()})
        run.log_samples(step, [{"query": f"q{step}", "score": float(sign)}])
    run.finish()


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


# ---- Logs ------------------------------------------------------------------------------------------------------


def test_tensorboard_holds_the_same_numbers(accelerator):
    run = start(accelerator)
    log(run, range(4))
    events = read_events(run.folder)
    assert set(events) == set(metrics_at(0))
    for name, points in events.items():
        assert [step for step, _ in points] == [0, 1, 2, 3]
        assert [value for _, value in points] == pytest.approx(
            [metrics_at(step)[name] for step in range(4)], rel=1e-6
        )


def test_a_run_leaves_its_arguments_sizes_and_results(accelerator):
    run = start(accelerator)
    assert not meta_of(run.folder)["finished"]
    run.log(0, metrics_at(0))
    assert len(metrics_of(run.folder)) == 1  # a row is on disk as soon as it is logged
    run.finish(accuracy=0.5)
    meta = meta_of(run.folder)
    assert meta["args"] == dataclasses.asdict(FakeArgs())
    assert (meta["sizes"], meta["num_processes"]) == ({"batch": 8}, 1)
    assert meta["finished"] is True
    assert meta["results"] == {"accuracy": 0.5}
    assert run.folder.parent == Path("runs").absolute()
    assert run.folder.name.startswith("test__small__3__")
    assert (run.folder / "learning_curves.png").read_bytes().startswith(b"\x89PNG")


def test_only_the_main_process_writes(tmp_path):
    other = SimpleNamespace(is_main_process=False, num_processes=2, device=torch.device("cpu"))
    other.wait_for_everyone = lambda: None
    run = start(other)
    log(run, range(2))
    run.save_checkpoint(1, {"x": torch.ones(1)}, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("first_step", [0, 2, 4])
def test_logs_are_cut_back_to_the_checkpoint(accelerator, first_step):
    before = start(accelerator)
    log(before, range(4))
    time.sleep(1)  # TensorBoard reads files of one second in the order of their names
    after = start(Accelerator(cpu=True), before.folder, first_step)
    assert after.folder == before.folder
    log(after, range(first_step, 6), sign=-1)
    signs = [1 if step < first_step else -1 for step in range(6)]
    expected = [signs[step] * metrics_at(step)["loss"] for step in range(6)]

    assert [(row["step"], row["loss"]) for row in metrics_of(after.folder)] == list(enumerate(expected))
    assert [(sample["step"], sample["score"]) for sample in samples_of(after.folder)] == list(enumerate(signs))
    points = read_events(after.folder)["loss"]
    assert [step for step, _ in points] == list(range(6))
    assert [value for _, value in points] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("row", ["3,0.1", "1"])
def test_what_was_cut_off_is_dropped(accelerator, row):
    before = start(accelerator)
    log(before, range(3))
    for name, torn in (("metrics.csv", row), ("samples.jsonl", '{"step": 3, "que')):
        with (before.folder / name).open("a") as file:
            file.write(torn)
    log(start(accelerator, before.folder, first_step=3), range(3, 5))
    assert [row["step"] for row in metrics_of(before.folder)] == list(range(5))
    assert [sample["step"] for sample in samples_of(before.folder)] == list(range(5))


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
    run.save_checkpoint(5, tensors, {"kl_coef": 0.1 + 0.2, "query_position": 640})
    loaded, state = load(accelerator, run.folder)
    assert state == {"step": 5, "kl_coef": 0.1 + 0.2, "query_position": 640}
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def test_without_a_checkpoint_a_run_begins_anew(run, accelerator):
    assert load(accelerator, run.folder) is None
    run.save_checkpoint(1, {"x": torch.ones(1)}, {})
    assert run.resume(print) == {"step": 0}  # this run does not resume


def test_the_newest_two_checkpoints_are_kept(accelerator):
    run = start(accelerator)
    for step in (2, 9, 10, 11):
        run.save_checkpoint(step, {"x": torch.full((2,), float(step))}, {})
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == ["10", "11"]
    tensors, state = load(accelerator, run.folder)
    assert (state["step"], tensors["x"][0].item()) == (11, 11.0)


def test_a_checkpoint_is_replaced_by_one_of_the_same_step(run, accelerator):
    for value in (1.0, 2.0):
        run.save_checkpoint(4, {"x": torch.tensor(value)}, {})
    assert load(accelerator, run.folder)[0]["x"] == 2.0


def test_a_half_written_checkpoint_is_ignored(run, accelerator):
    run.save_checkpoint(4, {"x": torch.ones(1)}, {})
    leftover = run.folder / "checkpoints" / "5.tmp"
    leftover.mkdir()
    (leftover / "tensors.safetensors").write_bytes(b"half")
    assert load(accelerator, run.folder)[1]["step"] == 4
    run.save_checkpoint(5, {"x": torch.ones(1)}, {})
    assert load(accelerator, run.folder)[1]["step"] == 5
    assert not leftover.exists()


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(run, accelerator, monkeypatch):
    run.save_checkpoint(4, {"x": torch.ones(1)}, {})

    def full_disk(*_):
        raise OSError("no space")

    with monkeypatch.context() as patch, pytest.raises(InputError, match=r"no space.*those before it are kept"):
        patch.setattr(files, "write_json", full_disk)
        run.save_checkpoint(5, {"x": torch.ones(1)}, {})
    assert load(accelerator, run.folder)[1]["step"] == 4


def test_a_current_folder_that_is_not_unicode_is_refused(tmp_path, monkeypatch):
    os.mkdir(os.fsencode(tmp_path) + b"/bad\xff")
    monkeypatch.chdir(os.fsencode(tmp_path) + b"/bad\xff")
    message = error_line(command_line.check_run, train_policy.Args())
    folder = f"'{tmp_path}/bad\\udcff'"
    assert message == f"the name of the current folder, {folder}, is not valid Unicode; start in another one"


# ---- Arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("script", "name"), [(script, name) for script in SCRIPTS for name in script.PRESETS])
def test_from_dict_inverts_asdict(script, name):
    args = replace(script.PRESETS[name], seed=9, wandb_entity="team")
    assert from_dict(script.Args, json.loads(json.dumps(dataclasses.asdict(args)))) == args


def test_from_dict_refuses_what_it_does_not_know():
    assert "momentum" in error_line(
        from_dict, FakeArgs, dataclasses.asdict(FakeArgs()) | {"part": {"lr": 0.2, "momentum": 0.9}}
    )
    assert "exp_name" in error_line(from_dict, FakeArgs, {"part": {"lr": 0.2}})


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        ([], None),
        (["--preset", "tldr"], "tldr"),
        (["--preset=tldr"], "tldr"),
        (["--seed", "1", "--preset", "tldr", "--preset=cnndm"], "cnndm"),
        (["--preset=a=b"], "a=b"),
        (["--preset"], None),
        (["--preset-file", "x", "--presets=y"], None),
    ],
)
def test_flag_value(argv, value):
    assert flag_value(argv, "--preset") == value


def saved_run(args) -> Path:
    folder = Path("runs/earlier")
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text(json.dumps({"args": dataclasses.asdict(args)}))
    return folder


@pytest.mark.parametrize("script", SCRIPTS)
def test_resume_takes_the_saved_arguments(script):
    saved = replace(script.PRESETS["tldr"], seed=11, exp_name="mine")
    folder = saved_run(saved)
    assert parse_args(script.PRESETS, ["--resume", str(folder)]) == replace(saved, resume=str(folder))
    assert parse_args(script.PRESETS, [f"--resume={folder}"]) == replace(saved, resume=str(folder))


@pytest.mark.parametrize(("script", "group"), [(train_policy, "ppo."), (train_reward, "")])
def test_memory_knobs_and_output_may_change(script, group):
    flags = f"--{group}local-micro-batch-size 8 --{group}local-rollout-batch-size 16 --save-interval 5 --track"
    folder = saved_run(script.PRESETS["tales"])
    args = parse_args(script.PRESETS, ["--resume", str(folder), *flags.split()])
    knobs = args.ppo if group else args
    assert (knobs.local_micro_batch_size, knobs.local_rollout_batch_size) == (8, 16)
    assert (args.save_interval, args.track) == (5, True)


EPISODES, INTERVAL = "policy.ppo.total_episodes", "policy.save_interval"


def changed(args, changes: dict):
    """Arguments with other values for some, such as policy.ppo.lr."""
    for name, value in changes.items():
        args = with_value(args, name, value)
    return args


def test_import_function():
    assert import_function("math:sqrt", "rewards.function")(9) == 3
    score = import_function("ppo_rlhf.worlds.tales:sentiment.gold_scores", "rewards.monitor")
    assert score([""], ["happy"]) == [1.0]


# ---- The script's own process ----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [InputError("label file x.json: no"), NumericalError("loss is nan")])
def test_an_error_of_the_user_is_one_line_and_status_2(capsys, error):
    def main():
        raise error

    with pytest.raises(SystemExit) as caught:
        run_script(main)
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.err == f"error: {error}\n"
    assert printed.out == ""


@pytest.mark.parametrize("how_to_go_on", ["", "resume with --resume runs/x"])
def test_ctrl_c_speaks_of_resume_only_when_a_run_has_begun(accelerator, capsys, monkeypatch, how_to_go_on):
    monkeypatch.setattr(errors, "how_to_go_on", "")
    if how_to_go_on:
        how_to_go_on = f"; resume with --resume {start(accelerator).folder}"
    capsys.readouterr()

    def main():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as caught:
        run_script(main)
    assert caught.value.code == 130
    assert capsys.readouterr().err == f"error: interrupted{how_to_go_on}\n"


def test_control_characters_do_not_reach_the_terminal(capsys):
    def main():
        print_table("a \x1b[2J", [{"text": one_line("one\n\x1b]0;owned\x07\x9b1m two"), "n": 1.0}])
        raise InputError("the server says \x1b]0;owned\x07\n\x7f")

    with pytest.raises(SystemExit):
        run_script(main)
    printed = capsys.readouterr()
    assert printed.err == "error: the server says ␛]0;owned␇ \ufffd\n"
    assert "one⏎␛]0;owned␇\ufffd1m two" in printed.out and "a ␛[2J" in printed.out
    assert not set(printed.out + printed.err) & {"\x1b", "\x07", "\x9b", "\x7f"}


def test_weights_that_are_not_finite_are_never_saved(run):
    with pytest.raises(NumericalError, match="second is not finite at step 3"):
        run.save_checkpoint(3, {"first": torch.ones(2), "second": torch.tensor([1.0, math.inf])}, {})
    assert not (run.folder / "checkpoints").exists()


def test_runs_of_the_same_second_get_folders_of_their_own(accelerator, monkeypatch):
    monkeypatch.setattr(run_module.time, "time", lambda: 1_000_000.5)
    assert [start(accelerator).folder.name[-7:] for _ in range(3)] == ["1000000", "1000001", "1000002"]


def test_a_table_takes_any_text(capsys):
    print_table("[/b] title", [{"query": "[/i] \\[ text", "score": 1.0}])
    assert "[/i]" in capsys.readouterr().out
