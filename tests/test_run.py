"""run.py: command lines, run folders, logs, checkpoints, error messages."""

import dataclasses
import hashlib
import io
import itertools
import json
import math
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from processes import Launched, launch_together
from refusals import with_value
from runs import error_line, meta_of, metrics_of, only, samples_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from torch import nn

from ppo_rlhf import train_both, train_policy, train_reward
from ppo_rlhf.lib.base import console, errors, files, paths
from ppo_rlhf.lib.base.errors import InputError, NumericalError, Stopped, run_script
from ppo_rlhf.lib.base.launch import make_accelerator
from ppo_rlhf.lib.scoring.scorers import import_function
from ppo_rlhf.lib.services import cli, run as run_module
from ppo_rlhf.lib.services.cli import flag_value, from_dict, parse_args
from ppo_rlhf.lib.services.run import Run
from ppo_rlhf.tldr import all as tldr_all, policy as tldr_policy, reward as tldr_reward, sft as tldr_sft

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
    hf_private: bool = False
    dtype: str = "float32"
    keep_checkpoints: int | None = None
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
    """A step is one event. A resumed run writes all its steps again: one event for each metric would take a minute
    for 20,000 steps.
    """
    run = start(accelerator)
    log(run, range(4))
    events = read_events(run.folder)
    assert set(events) == set(metrics_at(0))
    for name, points in events.items():
        assert [step for step, _ in points] == [0, 1, 2, 3]
        assert [value for _, value in points] == pytest.approx(
            [metrics_at(step)[name] for step in range(4)], rel=1e-6
        )
    events = EventFileLoader(str(only(run.folder, "events.out.tfevents.*"))).Load()
    scalars = [[value.tag for value in event.summary.value] for event in events if event.HasField("summary")]
    assert [tags for tags in scalars if tags != ["arguments/text_summary"]] == [list(metrics_at(0))] * 4


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
    run = start(other)
    log(run, range(2))
    run.save_checkpoint(1, {"x": torch.ones(1)}, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("first_step", [0, 2, 4])
def test_logs_are_cut_back_to_the_checkpoint(accelerator, first_step):
    before = start(accelerator)
    log(before, range(4))
    before.finish()  # TensorBoard's writer must not outlive the files that are cut
    after = start(accelerator, before.folder, first_step)
    assert after.folder == before.folder.resolve()
    log(after, range(first_step, 6), sign=-1)
    signs = [1 if step < first_step else -1 for step in range(6)]
    expected = [signs[step] * metrics_at(step)["loss"] for step in range(6)]

    assert [(row["step"], row["loss"]) for row in metrics_of(after.folder)] == list(enumerate(expected))
    assert [(sample["step"], sample["score"]) for sample in samples_of(after.folder)] == list(enumerate(signs))
    points = read_events(after.folder)["loss"]
    assert [step for step, _ in points] == list(range(6))
    assert [value for _, value in points] == pytest.approx(expected, rel=1e-6)
    assert len(list(after.folder.glob("events.out.tfevents.*"))) == 1


@pytest.mark.parametrize("kind", ["a\nb", "a\r\nb", "\u2028\x85\f", '","'])
def test_a_name_may_hold_line_breaks(accelerator, kind):
    before = start(accelerator)
    for step in range(4):
        before.log(step, {f"eval/{kind}": step / 7})
    before.finish()
    after = start(accelerator, before.folder, first_step=3)
    after.log(3, {f"eval/{kind}": 3 / 7})
    after.finish()
    rows = [{"step": step, f"eval/{kind}": step / 7} for step in range(4)]
    assert metrics_of(before.folder) == rows == after.rows


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


def test_the_commit_is_this_projects_own(tmp_path, monkeypatch):
    """Not that of the user's repository in which the package is installed, whether or not git tracks it there."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=me", "-c", "user.email=me@example.com"]
    subprocess.run([*git, "init", "-q"], check=True)
    for root in (tmp_path, tmp_path / "site-packages"):
        file = root / "ppo_rlhf/lib/services/run.py"
        file.parent.mkdir(parents=True)
        file.write_text("")
        monkeypatch.setattr(run_module, "ROOT", root)
        assert run_module.commit() == ""
        subprocess.run([*git, "add", "-f", str(file)], check=True)
        subprocess.run([*git, "commit", "-qm", "x"], check=True)
        assert bool(run_module.commit()) == (root == tmp_path)


# ---- Checkpoints -----------------------------------------------------------------------------------------------


@pytest.fixture
def run(accelerator):
    return start(accelerator)


def load(accelerator, folder: Path):
    return Run(FakeArgs(resume=str(folder)), accelerator, {}).load_checkpoint()


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
    assert run.load_checkpoint() is None  # this run does not resume


@pytest.mark.parametrize(
    ("keep", "running", "finished"), [(None, ["10", "11"], ["11"]), (1, ["11"], ["11"]), (3, ["10", "11", "9"], None)]
)
def test_the_newest_checkpoints_are_kept(keep, running, finished, accelerator, capsys):
    """Two by default, and one once the run has finished. The first says how large it is: 500,000 float64 and more."""
    run = start(accelerator, keep_checkpoints=keep)
    for step in (2, 9, 10, 11):
        run.save_checkpoint(step, {"x": torch.full((500_000,), float(step), dtype=torch.float64)}, {})
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == running
    tensors, state = load(accelerator, run.folder)
    assert (state["step"], tensors["x"][0].item()) == (11, 11.0)
    assert capsys.readouterr().out.count("a checkpoint has 4.0 MB") == 1
    run.log(0, {"x": 1.0})
    run.finish()
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == (finished or running)


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


def test_a_checkpoint_belongs_to_the_run_that_wrote_it(accelerator):
    runs = [start(accelerator) for _ in range(2)]
    for step, run in enumerate(runs, 1):
        run.save_checkpoint(step, {"x": torch.full((2,), float(step))}, {})
        run.finish()
    renamed = runs[0].folder.rename(runs[0].folder.with_name("best"))
    assert load(accelerator, renamed)[1] == {"step": 1}
    shutil.copytree(runs[1].folder / "checkpoints" / "2", renamed / "checkpoints" / "2")
    message = error_line(load, accelerator, renamed)
    assert f"checkpoint {renamed}/checkpoints/2 cannot be read (ValueError: it belongs to another run); re" in message
    shutil.rmtree(renamed / "checkpoints" / "2")
    after = start(accelerator, renamed)
    after.save_checkpoint(3, {"x": torch.ones(2)}, {})
    assert load(accelerator, renamed)[1] == {"step": 3}


def test_the_folder_is_locked_until_the_last_word_is_written(accelerator, run, monkeypatch):
    written = []

    def write(path: Path, value: dict) -> None:
        with pytest.raises(InputError, match="in use"):
            run_module.lock_folder(run.folder)
        written.append(value)

    monkeypatch.setattr(files, "write_json", write)
    log(run, range(2))
    assert [meta["finished"] for meta in written] == [True]
    assert run_module.lock_folder(run.folder) is not None


def test_a_current_folder_that_is_not_unicode_is_refused(tmp_path, monkeypatch):
    os.mkdir(os.fsencode(tmp_path) + b"/bad\xff")
    monkeypatch.chdir(os.fsencode(tmp_path) + b"/bad\xff")
    message = error_line(cli.check_values, train_policy.Args())
    folder = f"'{tmp_path}/bad\\udcff'"
    assert message == f"the name of the current folder, {folder}, is not valid Unicode; start in another one"


# ---- Paths and weights -----------------------------------------------------------------------------------------


def test_links_on_the_way_to_a_run_are_not_followed_but_one_to_it_is(tmp_path, accelerator):
    """runs/ often is a link to a larger disk; models/ then stays beside the link."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to("disk")
    run = start(accelerator)
    run.finish()
    (tmp_path / "latest").symlink_to(f"runs/{run.folder.name}")
    (tmp_path / "newest").symlink_to("latest")
    for path in (f"runs/{run.folder.name}", f"runs/../runs/{run.folder.name}/", "latest", tmp_path / "newest"):
        again = start(accelerator, path)
        assert again.folder == tmp_path / "runs" / run.folder.name
        assert again.model_folder == tmp_path / "models" / run.folder.name
        again.finish()


def test_a_run_that_was_moved_out_of_runs_keeps_its_models_in_its_folder(tmp_path, accelerator):
    run = start(accelerator)
    run.finish()
    (tmp_path / "disk").mkdir()
    moved = shutil.move(run.folder, tmp_path / "disk" / "long")
    again = start(accelerator, moved)
    assert again.model_folder == tmp_path / "disk" / "models" / "long"
    assert paths.root_of("disk/long") == paths.root_of("", {"runs": "disk"}) == tmp_path / "disk"
    again.finish()


def test_a_path_is_looked_for_beside_the_run_first(tmp_path, monkeypatch):
    there, here = tmp_path / "there", tmp_path / "here"
    for path in (there / "both", there / "theirs", here / "both", here / "ours"):
        path.mkdir(parents=True)
    (there / "texts.txt").write_text("x")
    monkeypatch.chdir(here)
    assert paths.root_of("../there/runs/a") == there
    assert paths.root_of("", {"runs": "../there/runs"}).resolve() == there
    assert paths.root_of("") == paths.root_of("", {"runs": "runs"}) == here
    found = {path: paths.find_path(path, there) for path in ("both", "theirs", "ours", "texts.txt", "x" * 999)}
    assert found["both"] == there / "both" and found["theirs"] == there / "theirs"
    assert found["texts.txt"] == there / "texts.txt"
    assert found["ours"] == Path("ours") and found["x" * 999] == Path("x" * 999)
    assert paths.find_path(str(here / "both"), there) == here / "both"


def test_a_run_goes_on_with_the_files_that_it_began_with(accelerator, tmp_path):
    files = [tmp_path / f"model-{i}.safetensors" for i in range(2)]
    for i, file in enumerate(files):
        file.write_bytes(bytes([i]))

    def begin(resume: Path | str = "", **inputs: list[Path]) -> Run:
        run = Run(FakeArgs(resume=str(resume)), accelerator, {"batch": 8}, inputs=inputs)
        run.start_logging(0)
        run.finish()
        return run

    run = begin(base_model=files)
    sums = [hashlib.sha256(bytes([i])).digest() for i in range(2)]
    assert run.meta["inputs"] == {"base_model": hashlib.sha256(b"".join(sums)).hexdigest()}
    begin(run.folder, base_model=files, reward_model=files[:1])  # of the second nothing is known yet
    begin(run.folder, base_model=[])  # a model whose files are not known
    files[0].write_bytes(b"\1")
    changed = {
        ".": {"base_model": files},
        "model-1.safetensors": {"base_model": files[1:]},
        "model-0.safetensors": {"reward_model": files[:1]},
    }
    for place, inputs in changed.items():
        message = error_line(lambda inputs=inputs: begin(run.folder, **inputs))
        assert f"--resume {run.folder}: {place} is not what --{next(iter(inputs))} was when this run began" in message


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


def joint_run(own, joint) -> Path:
    """The folder of a stage's run, given its arguments and those of the script with several stages."""
    folder = Path("runs", run_module.run_name(replace(own, preset=joint.preset, seed=joint.seed), 7))
    folder.mkdir(parents=True)
    meta = {"args": dataclasses.asdict(own), "joint": {"args": dataclasses.asdict(joint), "timestamp": 7}}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


@pytest.mark.parametrize(
    ("script", "told", "expected"),
    [
        (train_both, {"reward": {}, "policy": {EPISODES: 640, INTERVAL: 3}}, {EPISODES: 640, INTERVAL: 3}),
        (tldr_all, {"sft": {}, "reward": {EPISODES: 640}}, {EPISODES: 640}),
        (tldr_all, {"sft": {EPISODES: 64}, "reward": {EPISODES: 640}, "policy": {EPISODES: 320}}, {EPISODES: 320}),
    ],
)
def test_any_stage_knows_what_a_later_one_was_told(script, told, expected):
    """Of arguments that may change. told: how those of a stage that has begun differ from the preset's."""
    args, folders = script.PRESETS["posts" if script is tldr_all else "tales"], []
    for stage, changes in told.items():
        joint = changed(args, changes)
        folders.append(joint_run(replace(getattr(joint, stage), resume="somewhere"), joint))
    for folder in folders:
        assert script.parse(["--resume", str(folder)]) == replace(changed(args, expected), resume=str(folder))


def test_a_joint_run_knows_what_a_stage_was_told_by_its_own_script():
    """And takes nothing else from it: the reward model is filled in anew."""
    args = train_both.PRESETS["tales"]
    own = changed(args.policy, {"ppo.total_episodes": 640, "rewards.trained_model": "models/mine"})
    folder = joint_run(own, args)
    assert train_both.parse(["--resume", str(folder)]) == replace(changed(args, {EPISODES: 640}), resume=str(folder))


def test_import_function():
    assert import_function("math:sqrt", "rewards.function")(9) == 3
    score = import_function("ppo_rlhf.worlds.tales:sentiment.gold_scores", "rewards.monitor")
    assert import_function("ppo_rlhf.tales:sentiment.gold_scores", "rewards.monitor") == score  # as runs had it once
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


@pytest.mark.parametrize("first_process", ["ended", "goes on"])
def test_another_process_says_its_error_only_if_the_first_goes_on(capsys, monkeypatch, first_process):
    clock = SimpleNamespace(monotonic=itertools.count(0, 20).__next__, sleep=lambda seconds: None)
    monkeypatch.setattr(errors, "time", clock)
    monkeypatch.setattr(errors, "PATIENCE", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        place = {"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listening.getsockname()[1])}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        if first_process == "ended":
            listening.close()
        with pytest.raises(SystemExit) as caught:
            run_script(lambda: from_dict(FakeArgs, {"x": 1}))
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error on process 1: its arguments differ") if first_process == "goes on" else said == ""


@pytest.mark.parametrize("how_to_go_on", ["", "resume with --resume runs/x"])
def test_ctrl_c_speaks_of_resume_only_when_a_run_has_begun(accelerator, capsys, monkeypatch, how_to_go_on):
    monkeypatch.setattr(errors, "how_to_go_on", "")
    if how_to_go_on:
        how_to_go_on = f"; resume with --resume runs/{start(accelerator).folder.name}"
    capsys.readouterr()
    monkeypatch.setattr(errors, "leave_at_the_next_signal", lambda *_: None)  # this process goes on

    def main():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as caught:
        run_script(main)
    assert caught.value.code == 130
    assert capsys.readouterr().err == f"error: interrupted{how_to_go_on}\n"


TIDIES_UP = """
import time
from ppo_rlhf.lib.base import errors

def main():
    print("begun", flush=True)
    try:
        time.sleep(1_000)
    finally:
        print("tidying up", flush=True)
        try:
            time.sleep(1_000)
        except BaseException:  # as in a destructor, where every exception is ignored
            time.sleep(1_000)

errors.how_to_go_on = "resume with --resume runs/x"
errors.run_script(main)
"""


@pytest.mark.parametrize(
    ("number", "status", "line"),
    [(signal.SIGTERM, 0, "stopped by SIGTERM"), (signal.SIGINT, 130, "error: interrupted")],
)
def test_a_second_signal_does_not_wait_for_what_is_tidied_up(tmp_path, number, status, line):
    (tmp_path / "tidies_up.py").write_text(TIDIES_UP)
    launched = Launched(tmp_path / "tidies_up.py", folder=tmp_path)
    for words in ("begun", "tidying up"):
        while words not in launched.stdout() and launched.process.is_alive():
            time.sleep(0.02)
        os.kill(launched.process.pid, number)
    result = launched.wait(60)
    assert (result.status, result.stderr) == (status, f"{line}; resume with --resume runs/x\n")


def test_a_second_sigterm_ends_a_loop_at_once(run, monkeypatch):
    """Unless it follows so soon that a launcher may have passed on the first."""
    left = []
    monkeypatch.setattr(errors, "leave", lambda *how: left.append(how))
    with pytest.raises(Stopped), run.progress("steps", 1):
        for same, expected in ((math.inf, 0), (math.inf, 0), (-1, 1)):
            monkeypatch.setattr(run_module, "SAME_SIGNAL", same)
            os.kill(os.getpid(), signal.SIGTERM)
            assert len(left) == expected
    assert left == [(0, f"stopped by SIGTERM; resume with --resume runs/{run.folder.name}")]


@pytest.mark.parametrize(
    ("told_at", "saved_at", "stopped"),
    [(5, None, "stopped by SIGTERM;"), (6, 6, "stopped by SIGTERM;"), (6, None, "stopped by SIGTERM after step 7,")],
)
def test_sigterm_does_not_wait_for_an_update_if_nothing_is_lost(run, monkeypatch, told_at, saved_at, stopped):
    """In an evaluation before the first update of this process, or before the first one after a checkpoint."""
    monkeypatch.setattr(errors, "leave_at_the_next_signal", lambda *_: None)
    with pytest.raises(Stopped, match=f"^{stopped}"):
        for update in run.updates("steps", 5, 7):
            with run.before_update(update):
                if update == told_at:
                    os.kill(os.getpid(), signal.SIGTERM)
            if update + 1 == saved_at:
                run.save_checkpoint(update + 1, {}, {})


def test_a_fork_ends_when_it_is_told_to(request):
    """As multiprocessing.Pool tells its workers, for which it then waits."""
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # another test may have left Ray's there, which exits
    request.addfinalizer(lambda: signal.signal(signal.SIGTERM, handler))
    told, (reading, writing) = [], os.pipe()
    of_script, of_loop = (partial(errors.handler_of, signal.SIGTERM, lambda *_, n=n: told.append(n)) for n in (1, 2))
    with of_script(), of_loop():
        fork = multiprocessing.get_context("fork").Process(target=lambda: (os.write(writing, b"1"), time.sleep(999)))
        fork.start()
        os.read(reading, 1)  # before it runs, a signal would be lost
        fork.terminate()
        fork.join(60)
        assert fork.exitcode == -signal.SIGTERM and not told
        os.kill(os.getpid(), signal.SIGTERM)
    assert told == [2]


ONE_FAILS = """
import itertools, os, types
import torch
from ppo_rlhf.lib.base import errors, launch

def main():
    accelerator = launch.make_accelerator()
    accelerator.reduce(torch.ones(1), "sum")
    if os.environ["RANK"] == "1":
        raise errors.InputError("it is only here")
    accelerator.reduce(torch.ones(1), "sum")

errors.PATIENCE = 60.0  # by a clock that runs ahead
errors.time = types.SimpleNamespace(monotonic=itertools.count(0, 20).__next__, sleep=lambda seconds: None)
errors.how_to_go_on = "resume with --resume runs/x"
errors.run_script(main)
"""


def test_the_first_process_says_in_one_line_that_another_has_ended(tmp_path):
    (tmp_path / "one_fails.py").write_text(ONE_FAILS)
    first, second = launch_together(2, tmp_path / "one_fails.py", folder=tmp_path)
    assert (second.status, second.stderr) == (2, "error on process 1: it is only here\n")
    assert (first.status, first.stderr) == (2, "error: another process has ended; resume with --resume runs/x\n")


def test_control_characters_do_not_reach_the_terminal(capsys):
    def main():
        console.print_table("a \x1b[2J", [{"text": console.one_line("one\n\x1b]0;owned\x07\x9b1m two"), "n": 1.0}])
        raise InputError("the server says \x1b]0;owned\x07\n\x7f")

    with pytest.raises(SystemExit):
        run_script(main)
    printed = capsys.readouterr()
    assert printed.err == "error: the server says ␛]0;owned␇ \ufffd\n"
    assert "one⏎␛]0;owned␇\ufffd1m two" in printed.out and "a ␛[2J" in printed.out
    assert not set(printed.out + printed.err) & {"\x1b", "\x07", "\x9b", "\x7f"}


def test_stdout_may_lack_characters_or_be_closed(monkeypatch):
    buffer = io.BytesIO()
    for stdout in (io.TextIOWrapper(buffer, encoding="latin-1"), None):
        monkeypatch.setattr(sys, "stdout", stdout)
        run_script(lambda: console.print_table("é 😀", [{"text": console.one_line("é\n😀")}]))
        assert not sys.stdout.isatty()
        sys.stdout.flush()
    assert "é ?" in buffer.getvalue().decode("latin-1")


@pytest.mark.parametrize(("processes_asked_for", "lines"), [(1, 0), (8, 1)])
def test_accelerate_may_start_one_process_of_several(accelerator, monkeypatch, capsys, processes_asked_for, lines):
    """The environment is the one that the launcher itself prepares for a machine without a GPU."""
    words = ["--num_processes", str(processes_asked_for), "--num_machines", "1", "--mixed_precision", "no"]
    launched = launch_command_parser().parse_args([*words, "--dynamo_backend", "no", "x.py"])
    launched.use_cpu = True  # what _validate_launch_command would find
    for name, value in prepare_simple_launcher_cmd_env(launched)[1].items():
        monkeypatch.setenv(name, value)
    errors.say_once.cache_clear()
    make_accelerator()
    assert capsys.readouterr().out.count("torchrun --nproc_per_node") == lines


def test_weights_that_are_not_finite_are_never_saved(run):
    with pytest.raises(NumericalError, match="second is not finite at step 3"):
        run.save_checkpoint(3, {"first": torch.ones(2), "second": torch.tensor([1.0, math.inf])}, {})
    assert not (run.folder / "checkpoints").exists()


def test_runs_of_the_same_second_get_folders_of_their_own(accelerator, monkeypatch):
    monkeypatch.setattr(run_module.time, "time", lambda: 1_000_000.5)
    assert [start(accelerator).folder.name[-7:] for _ in range(3)] == ["1000000", "1000001", "1000002"]


def test_a_clock_may_stand_still_or_be_set_back(accelerator, monkeypatch):
    monkeypatch.setattr(run_module.time, "monotonic", lambda: 7.0)
    run = start(accelerator)
    monkeypatch.setattr(run_module.time, "time", lambda: 0.0)
    assert 0 < run_module.seconds_since(7.0) <= run.seconds() < 1e-3
    task = train_policy.PRESETS["tales"].task
    args = train_policy.Args(task=task, ppo=train_policy.PpoArgs(batch_size=8))
    seconds = run_module.seconds_since(7.0), run.seconds()
    metrics = train_policy.finish_metrics(defaultdict(lambda: 1.0), 6, args, 0.1, *seconds)
    assert (metrics["ppo/global_step"], metrics["ppo/episode"]) == (6, 56)
    assert metrics["elapsed/fps"] == pytest.approx(8 * task.response_length / seconds[0])
    assert metrics["elapsed/fps"] > 1e6 and metrics["elapsed/time"] > 0
    for script in (train_policy, train_reward, tldr_policy, tldr_reward, tldr_sft):
        assert "time.time()" not in Path(script.__file__).read_text()


def test_a_table_takes_any_text(capsys):
    console.print_table("[/b] title", [{"query": "[/i] \\[ text", "score": 1.0}])
    assert "[/i]" in capsys.readouterr().out
