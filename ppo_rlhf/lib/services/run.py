"""A run: its folder, its logs, and its life from the first step to the end, with signals to stop and resumption.

A run leaves `runs/<exp_name>__<preset>__<seed>__<time>/` with

    meta.json             arguments, derived sizes, commit, versions, device, wall time, results
    metrics.csv           one row per step, all metrics; TensorBoard event files hold the same
    samples.jsonl         the samples that were printed
    learning_curves.png   a picture of metrics.csv
    traces/<step>         with --trace_interval: a few episodes with all their numbers, for report.py
    checkpoints/<step>/   everything needed to resume: tensors in safetensors, the rest in JSON

A run survives kill -9 at any moment, a full disk, a signal to stop and functions of the user's that fail. `--resume
runs/<run>` continues from the newest checkpoint and gives the same numbers as an uninterrupted run.

Files and lines next to marks are those of openai/lm-human-preferences at commit cbfd210.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import hashlib
import importlib
import importlib.metadata
import importlib.util
import io
import json
import math
import os
import platform
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.lib.base import checkpoints, console, errors, files, launch, paths
from ppo_rlhf.lib.base.errors import InputError, NumericalError, SharedError, Stopped, flag
from ppo_rlhf.lib.nets import pretrained
from ppo_rlhf.lib.services import traces


def checksum(parts: list[Path]) -> str:
    """One SHA-256 of several files."""
    digest = hashlib.sha256()
    for part in parts:
        with part.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def read_meta(folder: Path) -> dict[str, Any]:
    with errors.input_errors(f"{folder} is not the folder of a run", OSError, ValueError):
        meta = files.read_json(folder / "meta.json")
    if not isinstance(meta, dict) or not isinstance(meta.get("args"), dict):
        raise InputError(f"{folder} is not the folder of a run: its meta.json holds no arguments")
    kinds = {"wall_time": float, "finished": bool, "wandb_id": str | None, "joint": dict | None, "results": dict}
    kinds |= {"name": str, "script": str, "id": str, "inputs": dict}
    values = {name: meta[name] for name in kinds if name in meta}
    if meta.get("joint") and isinstance(meta["joint"], dict):
        kinds |= {"joint.args": dict, "joint.timestamp": int}
        values |= {name: meta["joint"].get(name.removeprefix("joint.")) for name in kinds if "." in name}
    if broken := [name for name, value in values.items() if not files.fits(value, kinds[name])]:
        raise InputError(f"{folder / 'meta.json'} was damaged: {broken[0]} is {values[broken[0]]!r}")
    return meta


def read_records(path: Path) -> list[list[str]]:
    """The header and the rows of a metrics.csv, without a last row that was cut off. Raises OSError or ValueError.

    The header may have several lines, because a metric's name may hold any text.
    """
    with path.open(newline="", encoding="utf-8") as file:
        text = file.read()
    try:
        records = list(csv.reader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise ValueError(str(error)) from error
    return records if text.endswith("\n") else records[:-1]


def lock_folder(folder: Path) -> int | None:
    """Keep other processes from writing to a folder, until this one ends; None where the file system has no locks."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    except BlockingIOError as error:
        os.close(descriptor)
        raise InputError(
            f"{paths.shown(folder)} is in use: another process is writing to it; stop that one first"
        ) from error
    except OSError:
        os.close(descriptor)
        return None


def seconds_since(started: float) -> float:
    """Seconds since time.monotonic() was `started`; above 0, even if the clock stops."""
    return max(time.monotonic() - started, 1e-9)


ROOT = Path(__file__).parents[3]  # of a checkout; elsewhere the folder in which the package is installed


def git(*words: str) -> str:
    """The output of git in this project's checkout; empty elsewhere, as in another repository."""

    def output(*words: str) -> str:
        result = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, encoding="utf-8")
        return result.stdout.strip() if result.returncode == 0 else ""

    file = "ppo_rlhf/lib/services/run.py"
    try:
        return output(*words) if output("ls-files", "--full-name", file) == file else ""
    except OSError:  # no git
        return ""


def commit() -> str:
    """The commit of this project's checkout, marked when files differ from it; empty outside a checkout."""
    return git("describe", "--always", "--dirty", "--abbrev=40")


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


SAME_SIGNAL = 2.0  # seconds in which a launcher passes a SIGTERM on to processes that a cluster has sent it already


class Run:
    """The folder of one run, and everything that is written to it. Only the main process writes.

    The folder is absolute, because a reward function may change the current one.
    """

    def __init__(
        self,
        args: Any,
        accelerator: Accelerator,
        sizes: dict[str, int],
        joint: dict[str, Any] | None = None,
        inputs: dict[str, list[Path]] | None = None,
    ):
        """args: the script's Args, with the fields of cli.RunArgs; sizes: derived sizes; joint: what train_both.py
        gives both runs; inputs: files of the models and the data that the arguments name, which must be the same
        when the run is resumed.

        Nothing is written before start_logging.
        """
        self.args = args
        self.accelerator, self.is_main = accelerator, accelerator.is_main_process
        self.started = time.monotonic()
        if args.resume:
            self.folder = paths.absolute(args.resume)
        else:
            runs, timestamp = (joint["runs"], joint["timestamp"]) if joint else ("runs", shared_timestamp())
            self.folder = Path(runs).absolute() / run_name(args, timestamp)
        self.model_folder = paths.beside(self.folder.parent) / "models" / self.folder.name
        self.rows: list[dict[str, float]] = []
        self.writers: list[Callable[[int, dict[str, float]], None]] = []
        self.table_writers: list[Callable[[str, list[dict[str, Any]], int], None]] = []  # (name, rows, step)
        self.result_writers: list[Callable[[dict[str, Any]], None]] = []  # of numbers at the end, and addresses
        self.address = ""  # of the run on the web
        self.closers: list[Callable[[], None]] = []
        self._unlock: Callable[[], None] = lambda: None
        self._progress: Any = None
        self._told_to_stop = self._stopping = self._told_size = False
        previous = read_meta(self.folder) if args.resume else {}
        self._was_finished = previous.get("finished", False)
        device = torch.cuda.get_device_name() if accelerator.device.type == "cuda" else cpu_name()
        # The arguments are next to the results of the run.   train_policy.py#L422-L436
        self.meta: dict[str, Any] = {
            "name": previous.get("name", self.folder.name),
            "script": script_of(args),
            "id": previous.get("id") or secrets.token_hex(8),  # names its checkpoints; a folder may be renamed
            "args": dataclasses.asdict(args),
            "joint": {name: joint[name] for name in ("args", "timestamp")} if joint else previous.get("joint"),
            "sizes": sizes,
            "num_processes": accelerator.num_processes,
            "threads": torch.get_num_threads(),
            "device": f"{accelerator.device.type}: {device}",
            "commit": commit(),
            "tags": [tag for tag in os.environ.get("WANDB_TAGS", "").split(",") if tag],
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "accelerate": importlib.metadata.version("accelerate"),
            },
            "wall_time": previous.get("wall_time", 0.0),
            "finished": False,
            "wandb_id": previous.get("wandb_id"),
            "results": {},
            "inputs": self._check_inputs(inputs or {}, previous.get("inputs", {})),
        }

    def _check_inputs(self, inputs: dict[str, list[Path]], before: dict[str, str]) -> dict[str, str]:
        """Checksums of the input files, on the main process; an InputError if the run began with others."""
        sums = {name: checksum(parts) for name, parts in inputs.items() if parts} if self.is_main else {}
        problem = ""
        for name, value in sums.items():
            if before.get(name, value) != value:
                place = inputs[name][0].parent if len(inputs[name]) > 1 else inputs[name][0]
                problem = (
                    f"--resume {self.args.resume}: {paths.shown(place)} is not what {flag(name)} was when this "
                    f"run began; bring that back"
                )
        launch.fail_together(problem)
        return before | sums

    def seconds(self) -> float:
        """Wall time of the run so far, with the time before it was resumed."""
        return self.meta["wall_time"] + seconds_since(self.started)

    def save_meta(self, **changes: Any) -> None:
        if self.is_main:
            self.meta |= changes
            files.write_json(self.folder / "meta.json", self.meta)

    def rehearse(self, save: Callable[..., None]) -> None:
        """Try to save what the run will save at its end, but for the weights, before it trains.

        save: (folder, weights) writes into a folder. Every process must call this; the main process saves.
        """
        self._save = save

        def saved() -> None:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    save(Path(folder), weights=False)
                except Exception as error:  # the library and a model's own code may raise anything
                    if isinstance(error, InputError) or (isinstance(error, OSError) and error.errno):
                        raise
                    model = f"{flag('base_model')} {self.args.base_model}"
                    raise InputError(
                        f"what would be trained from {model} could not be saved: {type(error).__name__}: {error}"
                    ) from error

        launch.on_main(saved)

    def save(self, part: str) -> Path:
        """Save models/<run>/<part>, as it was rehearsed; returns it. The main process saves."""
        if self.is_main:
            self._save(self.model_folder / part)
        return self.model_folder / part

    def start_logging(self, first_step: int, config: dict[str, Any] | None = None, note: str = "") -> None:
        """Make the folder and open the logs; drop what a run that was cut off had logged at first_step and later.

        config: what Weights & Biases gets in addition to the arguments. note: a line to print below the sizes.
        """
        if not self.is_main:
            return
        for parent in (self.folder.parent, self.model_folder.parent):
            if (parent.is_symlink() or parent.exists()) and not parent.is_dir():
                raise InputError(f"{paths.shown(parent)} is a file or a link to nothing, not a folder; move it away")
        try:
            self.folder.mkdir(parents=True, exist_ok=bool(self.args.resume))
        except FileExistsError as error:
            raise InputError(
                f"{paths.shown(self.folder)} exists already; did another run begin in the same second?"
            ) from error
        if (lock := lock_folder(self.folder)) is not None:
            self._unlock = weakref.finalize(self, os.close, lock)
        errors.how_to_go_on = f"resume with --resume {paths.shown(self.folder)}"
        self._cut_logs(first_step)
        self.save_meta()
        sizes = [{"size": name, "value": value} for name, value in self.meta["sizes"].items()]
        print(f"run {paths.shown(self.folder)}")
        console.print_table("", sizes, show_lines=False)
        if note:
            print(note)
        self._open_csv()
        from ppo_rlhf.lib.services import tracking

        tracking.open_tensorboard(self)
        if self.args.track:
            config = self.meta["args"] | (config or {}) | {"commit": self.meta["commit"]}
            tracking.OPEN[self.args.tracker](self, config)

    def close_logs(self) -> None:
        for close in self.closers:
            close()

    def _cut_logs(self, first_step: int) -> None:
        """Keep what metrics.csv and samples.jsonl say of the steps before first_step; a cut last line is dropped."""
        metrics_file, samples_file = self.folder / "metrics.csv", self.folder / "samples.jsonl"
        damaged = f"{self.folder}: metrics.csv or samples.jsonl is damaged"
        with errors.input_errors(damaged, ValueError, TypeError, KeyError, RecursionError):
            header, *rows = read_records(metrics_file) if first_step else [[]]
            samples = samples_file.read_text().splitlines(keepends=True) if first_step else []
            numbers = [dict(zip(header, map(float, row), strict=True)) for row in rows]
            self.rows = [row for row in numbers if row["step"] < first_step]
            samples = [line for line in samples if line.endswith("\n") and json.loads(line)["step"] < first_step]
        if len(self.rows) != first_step or [row["step"] for row in self.rows] != list(range(first_step)):
            raise InputError(f"{metrics_file} holds {len(self.rows)} of the {first_step} steps before the checkpoint")
        kept = io.StringIO(newline="")
        csv.writer(kept, lineterminator="\n").writerows([header, *rows[:first_step]] if first_step else [])
        files.replace_file(metrics_file, kept.getvalue())
        files.replace_file(samples_file, "".join(samples))
        if (self.folder / "traces").exists():
            traces.cut(self.folder, first_step)

    def _open_csv(self) -> None:
        file = (self.folder / "metrics.csv").open("a", newline="")
        writer = csv.writer(file, lineterminator="\n")

        def write(step: int, metrics: dict[str, float]) -> None:
            if file.tell() == 0:
                writer.writerow(["step", *metrics])
            writer.writerow([step, *metrics.values()])
            file.flush()

        self.writers.append(write)
        self.closers.append(file.close)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write one row of metrics, on the main process. step: 0-based."""
        if self.is_main:
            metrics = {name: float(value) for name, value in metrics.items()}
            self.rows.append({"step": step, **metrics})
            for write in self.writers:
                write(step, metrics)

    def last_means(self, *names: str) -> dict[str, float | None]:
        """Means of objectives over the last ten steps, as last_<name>; None on other processes than the main one."""
        values = {f"last_{name}": [row[f"objective/{name}"] for row in self.rows[-10:]] for name in names}
        return {name: sum(last) / len(last) if last else None for name, last in values.items()}

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Append samples to samples.jsonl and print them as a table."""
        if self.is_main:
            with (self.folder / "samples.jsonl").open("a") as file:
                file.writelines(json.dumps({"step": step, **sample}) + "\n" for sample in samples)
            for write in self.table_writers:
                write("samples", samples, step)
            rows = [{name: console.one_line(value) for name, value in sample.items()} for sample in samples]
            console.print_table(f"step {step}", rows, console=self._progress and self._progress.console)

    def write_table(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Write rows with the same keys to <name>.csv, and as a table where the run is tracked."""
        if self.is_main:
            with (self.folder / f"{name}.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
            for write in self.table_writers:
                write(name, rows, len(self.rows))

    def write_evaluation(self, split: str, rows: list[dict[str, Any]]) -> None:
        """Answers to held-out queries: evaluation.jsonl of the validation split, else evaluation_<split>.jsonl."""
        if self.is_main:
            name = "evaluation.jsonl" if split == "validation" else f"evaluation_{split}.jsonl"
            (self.folder / name).write_text(files.json_lines(map(files.without_nan, rows)))

    def is_time_to_trace(self, step: int) -> bool:
        """Whether episodes of a step are kept: at intervals, from the first on, and those of the last."""
        every = self.args.trace_interval
        return every > 0 and (step % every == 0 or step + 1 == self.meta["sizes"]["updates"])

    def recorder(self, tokenizer: PreTrainedTokenizerBase, pad_id: int, **options: Any) -> traces.Recorder:
        """What keeps episodes of updates in traces/: a traces.Recorder with these options."""
        return traces.Recorder(self.folder, self.accelerator, tokenizer, pad_id, **options)

    # ------------------------------------------------------------------------------------------------------------

    def updates(self, title: str, first: int, total: int) -> Iterator[int]:
        """The updates of a training loop, from `first` on, with a progress bar. Each ends with `end_of_update`."""
        self._saved = self._made = first
        with self.progress(title, total, first) as self._advance:
            for update in range(first, total):
                self._update_started = time.monotonic()
                yield update

    @contextlib.contextmanager
    def before_update(self, update: int) -> Iterator[None]:
        """Within the block, SIGTERM stops the run at once if there is nothing that a checkpoint doesn't hold.

        And the same as saved_if_it_fails.
        """
        at_once = errors.handler_of(signal.SIGTERM, errors.stop_now)
        with at_once if update == self._saved else contextlib.nullcontext(), self.saved_if_it_fails():
            yield

    @contextlib.contextmanager
    def saved_if_it_fails(self) -> Iterator[None]:
        """If a function of the user's fails within the block, a checkpoint of the updates that are finished is left.

        The block must not change what a checkpoint holds: it may sample and score. Every process must call this.
        """
        try:
            yield
        except InputError as error:
            together = self.accelerator.num_processes == 1 or isinstance(error, SharedError)
            if not self._made or not together:  # if one fails alone, the others are elsewhere
                raise
            if self._made > self._saved:
                self.save_checkpoint(self._made, *self._checkpoint())
            self.close_logs()
            self._unlock()
            line = f"{error}; the run stops after update {self._made}, with a checkpoint"
            raise InputError(errors.with_how_to_go_on(line)) from error

    def seconds_of_update(self) -> float:
        """Wall time since the current update began."""
        return seconds_since(self._update_started)

    def end_of_update(
        self,
        update: int,
        metrics: dict[str, float],
        status: str,
        *,
        samples: Callable[[], list[dict[str, Any]]],
        trace: Callable[[], None],
        checkpoint: Callable[[], tuple[dict[str, torch.Tensor], dict[str, Any]]],
    ) -> None:
        """All that is kept of an update (0-based). Every process must call this.

        status: for the progress bar. The functions are called only if it is time for them: samples gives rows
        to print, trace keeps a few episodes with all their numbers, checkpoint gives tensors and state. Ends the run
        by raising Stopped after the checkpoint, if it was told to stop. checkpoint may also be called later, within
        saved_if_it_fails."""
        self._made, self._checkpoint = update + 1, checkpoint
        self.log(update, metrics)
        if self.args.log_interval and update % self.args.log_interval == 0:
            self.log_samples(update, samples())
        if self.is_time_to_trace(update):
            trace()
        speed = self.meta["sizes"]["batch"] / self.seconds_of_update()
        self._advance(f"{speed:.0f} episodes/s, {status}")
        # Weights, Adam's moments, KL coefficient, position in the texts.   train_policy.py#L474-L508
        if self.is_time_to_save(update + 1, self.meta["sizes"]["updates"]):
            self.save_checkpoint(update + 1, *checkpoint())

    @contextlib.contextmanager
    def progress(self, title: str, total: int, done: int = 0):
        """For the time of a loop: a bar with the time left; and SIGTERM waits for the checkpoint after the step.

        A second SIGTERM ends the process at once. Yields advance(text), to be called once per step.
        """
        first_signal = math.inf

        def on_sigterm(signal_number: int, frame: Any) -> None:
            nonlocal first_signal
            now = time.monotonic()
            if now - first_signal > SAME_SIGNAL:
                errors.leave(0, errors.with_how_to_go_on("stopped by SIGTERM"))
            first_signal, self._told_to_stop = min(first_signal, now), True

        try:
            with errors.handler_of(signal.SIGTERM, on_sigterm), self._bar(title, total, done) as advance:
                yield advance
        except BaseException:
            self._unlock()  # the exception may keep this object alive, but the run may be resumed
            raise
        if self._told_to_stop:  # after the last step
            raise Stopped(f"stopped by SIGTERM after step {total}, with a checkpoint; {errors.how_to_go_on}")

    @contextlib.contextmanager
    def _bar(self, title: str, total: int, done: int):
        # Progress and speed, on the first process.   train_policy.py#L311-L316
        if not self.is_main:
            yield lambda text: None
            return
        if not sys.stdout.isatty():
            step, every = done, max(1, total // 20)

            def advance_plain(text: str) -> None:
                nonlocal step
                step += 1
                if step % every == 0 or step == total:
                    left = seconds_since(begun) / (step - done) * (total - step)
                    print(f"{title} {step}/{total}, {left / 60:.1f} min left, {text}", flush=True)

            begun = time.monotonic()
            yield advance_plain
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        title_and_bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        left = (TimeRemainingColumn(), TextColumn("{task.fields[text]}"))
        with Progress(*title_and_bar, *left) as self._progress:
            task = self._progress.add_task(title, total=total, completed=done, text="")
            yield lambda text: self._progress.update(task, advance=1, text=text)
        self._progress = None

    def finish(self, **results: Any) -> None:
        """Draw the learning curves, record the results, close the logs, and say where everything is.

        Logs of a run that uploads its models stay open until `upload`.
        """
        if not self.is_main:
            return
        from ppo_rlhf.lib.base import processes
        from ppo_rlhf.lib.services import plots

        results = files.without_nan(results)
        plots.draw_learning_curves(self.folder, self.rows, dataclasses.asdict(self.args))
        for write in self.result_writers:
            write({name: value for name, value in results.items() if value is not None})
        if not self.args.upload_model:
            self.close_logs()
        held = round(processes.peak_memory() / 2**20)
        self.save_meta(finished=True, wall_time=round(self.seconds(), 1), peak_mib=held, results=results)
        checkpoints.remove_old(self.folder, self.args.keep_checkpoints or 1)
        self._unlock()
        print(f"finished {paths.shown(self.folder)}; what it trained is in {paths.shown(self.model_folder)}")

    def upload(self, *parts: str) -> None:
        """Push models/<run>/<part> to the hub, if the arguments say so. Every process must call this."""
        if self.args.upload_model and self.is_main:
            from ppo_rlhf.lib.services import tracking

            try:
                for part in parts:
                    name = self.model_folder.name if len(parts) == 1 else f"{self.model_folder.name}-{part}"
                    folder = self.model_folder / part
                    address = tracking.upload_model(
                        folder, self.args.hf_entity, name, self.address, private=self.args.hf_private
                    )
                    for write in self.result_writers:
                        write({f"model/{part}": address})
            finally:
                self.close_logs()
        self.accelerator.wait_for_everyone()

    # ------------------------------------------------------------------------------------------------------------

    def is_time_to_save(self, step: int, last_step: int) -> bool:
        """Whether a checkpoint is due after so many steps: at intervals, at the end, or because the run shall stop.

        SIGTERM, which clusters send before they take a machine away, may reach one process only.
        """
        told_to_stop = torch.tensor([float(self._told_to_stop)], device=self.accelerator.device)
        self._stopping = self.accelerator.reduce(told_to_stop, "sum").item() > 0
        return self._stopping or step == last_step or step % (self.args.save_interval or last_step) == 0

    def save_checkpoint(self, step: int, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        """Write checkpoints/<step>. Ends the run by raising Stopped if it was told to stop."""
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise NumericalError(f"{name} is not finite at step {step}; the run stops and saves nothing more")
        if self.is_main:
            keep = self.args.keep_checkpoints
            size = checkpoints.write(self.folder, self.meta["id"], step, tensors, state, keep or 2)
            if not self._told_size:
                kept = f"the newest {keep} are kept" if keep else "two are kept, and one once the run has finished"
                print(f"a checkpoint has {size / 1e6:,.1f} MB; {kept} ({flag('keep_checkpoints')})", flush=True)
            self._told_size = True
            files.write_json(self.folder / "meta.json", self.meta | {"wall_time": round(self.seconds(), 1)})
        self._saved = step
        if self._stopping:
            self.close_logs()
            self._unlock()
            raise Stopped(f"stopped by SIGTERM after step {step}, with a checkpoint; {errors.how_to_go_on}")

    def load_checkpoint(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        """Tensors and state of the newest checkpoint, on every process; None if there is none."""
        steps = broadcast_object_list([checkpoints.checkpoint_steps(self.folder)])[0]
        if not self.args.resume:
            return None
        if not steps:
            if self._was_finished:
                raise InputError(f"--resume {self.args.resume}: the run is finished, and its checkpoints are gone")
            return None
        return checkpoints.read(self.folder, self.meta["id"], steps[-1])

    def resume(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Put model and optimiser where the newest checkpoint left them. Its state; {"step": 0} if there is none."""
        return self.resume_with(lambda tensors: checkpoints.restore_training_state(model, optimizer, tensors))

    def resume_with(self, restore: Callable[[dict[str, torch.Tensor]], None]) -> dict[str, Any]:
        """As resume, with what takes a checkpoint's tensors.

        Raises an InputError if the run has made more updates than its arguments ask for.
        """
        checkpoint = self.load_checkpoint()
        if not checkpoint:
            return {"step": 0}
        tensors, state = checkpoint
        made, updates = state["step"], self.meta["sizes"].get("updates", math.inf)
        if made > updates:
            raise InputError(
                f"{flag('ppo.total_episodes')} makes {updates} updates, but this run has made {made}; "
                f"{flag('ppo.total_episodes')} {made * self.meta['sizes']['batch']} is enough"
            )
        restore(tensors)
        return state


# ---- Names, tables, learning rates -----------------------------------------------------------------------------


def script_of(args: Any) -> str:
    """The training script whose Args these are, such as train_policy: their `script`, or the file that has them."""
    if script := vars(type(args)).get("script"):
        return script
    file = Path(sys.modules[type(args).__module__].__file__ or "")
    chapter = f"{file.parent.name}_" if file.parent.name in ("tldr", "rlvr") else ""
    return chapter + file.stem


def run_name(args: Any, timestamp: int) -> str:
    return f"{args.exp_name}__{args.preset}__{args.seed}__{timestamp}"


def shared_timestamp() -> int:
    """Seconds since 1970 that name no run yet, the main process's on every process."""
    timestamp = int(time.time())
    while list(Path("runs").glob(f"*__{timestamp}")):
        timestamp += 1
    return broadcast_object_list([timestamp])[0]


def newest_model(preset: str, part: str, task_field: str) -> Path | None:
    """The newest models/<run>/<part> of a preset that was trained from here; None if there is none.

    task_field: a field of the task that no other chapter's preset of this name has.
    """
    found = {}  # by time stamp
    for info in Path("models").glob(f"*/{part}/ppo_rlhf.json"):
        *_, own_preset, _, timestamp = ["", "", *info.parents[1].name.split("__")]  # see run_name
        if own_preset == preset and timestamp.isdigit() and task_field in pretrained.read_info(info.parent)["task"]:
            found[int(timestamp)] = info.parent
    return found[max(found)] if found else None


def describe_model(folder: Path, info: dict[str, Any]) -> None:
    """Write ppo_rlhf.json next to the weights of a model that was saved, and give them the usual mode."""
    files.give_usual_mode(folder)
    files.write_json(folder / "ppo_rlhf.json", info)
