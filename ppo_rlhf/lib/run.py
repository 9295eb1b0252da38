"""A run: its folder, its logs, and its life from the first step to the end, with signals to stop and resumption.

A run leaves `runs/<exp_name>__<preset>__<seed>__<time>/` with

    meta.json             arguments, derived sizes, commit, versions, device, wall time, results
    metrics.csv           one row per step, all metrics; TensorBoard event files hold the same
    samples.jsonl         the samples that were printed
    learning_curves.png   a picture of metrics.csv
    traces/<step>         with --trace_interval: a few episodes with all their numbers, for report/
    checkpoints/<step>/   everything needed to resume: tensors in safetensors, the rest in JSON

A run survives kill -9 at any moment, a full disk, a signal to stop and functions of the user's that fail. `--resume
runs/<run>` continues from the newest checkpoint and gives the same numbers as an uninterrupted run.

Files and lines next to marks are those of openai/lm-human-preferences at commit cbfd210.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import importlib
import importlib.metadata
import json
import math
import os
import platform
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker
from accelerate.utils import broadcast_object_list, tqdm

from ppo_rlhf.lib import checkpoints, errors, files, learning_curves, tracking
from ppo_rlhf.lib.errors import InputError, NumericalError, Stopped, flag


def read_meta(folder: Path) -> dict[str, Any]:
    with errors.input_errors(f"{folder} is not the folder of a run", OSError, ValueError):
        meta = files.read_json(folder / "meta.json")
    if not isinstance(meta, dict) or not isinstance(meta.get("args"), dict):
        raise InputError(f"{folder} is not the folder of a run: its meta.json holds no arguments")
    return meta


def read_records(path: Path) -> list[list[str]]:
    """The header and the rows of a metrics.csv. Raises OSError or ValueError.

    A last row that was cut off, as by kill -9, is left out. A metric's name may hold line breaks.
    """
    with path.open(newline="", encoding="utf-8") as file:
        lines = file.readlines()
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    return list(csv.reader(lines))


def commit() -> str:
    """The commit of this project's checkout, marked when files differ from it; empty outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, encoding="utf-8").stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or no checkout
        return ""


class Run:
    """The folder of one run, and everything that is written to it. Only the main process writes."""

    def __init__(
        self, args: Any, accelerator: Accelerator, sizes: dict[str, int], joint: dict[str, Any] | None = None
    ):
        """args: the script's Args, with the fields of command_line.RunArgs. sizes: derived sizes. joint: what
        tldr/all.py gives its runs.

        Nothing is written before start_logging.
        """
        self.args = args
        self.accelerator, self.is_main = accelerator, accelerator.is_main_process
        if args.resume:
            self.folder = Path(args.resume).absolute()
        else:
            runs, timestamp = (joint["runs"], joint["timestamp"]) if joint else ("runs", shared_timestamp())
            self.folder = Path(runs).absolute() / run_name(args, timestamp)
        self.model_folder = self.folder.parents[1] / "models" / self.folder.name
        self.rows: list[dict[str, float]] = []
        self._told_to_stop = False
        previous = read_meta(self.folder) if args.resume else {}
        self._was_finished = previous.get("finished", False)
        self._started = time.monotonic() - previous.get("wall_time", 0.0)
        device = torch.cuda.get_device_name() if accelerator.device.type == "cuda" else platform.machine()
        # The arguments are next to the results of the run.   train_policy.py#L422-L436
        self.meta: dict[str, Any] = {
            "name": self.folder.name,
            "script": type(args).exp_name,  # by default, experiments have the names of scripts
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
            "wandb_id": previous.get("wandb_id") or secrets.token_hex(4),  # a resumed run goes on under it
            "finished": False,
            "results": {},
        }

    def seconds(self) -> float:
        """Wall time of the run so far, with the time before it was resumed."""
        return time.monotonic() - self._started

    def save_meta(self, **changes: Any) -> None:
        if self.is_main:
            self.meta |= changes
            self.meta["wall_time"] = round(self.seconds(), 1)
            files.write_json(self.folder / "meta.json", self.meta)

    def rehearse(self, save: Callable[..., None]) -> None:
        """Try to save what the run will save at its end, but for the weights, before it trains.

        save: (folder, weights) writes into a folder. The main process saves.
        """
        if self.is_main:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    save(Path(folder), weights=False)
                except Exception as error:  # the library and a model's own code may raise anything
                    model = f"{flag('base_model')} {self.args.base_model}"
                    raise InputError(
                        f"what would be trained from {model} could not be saved: {type(error).__name__}: {error}"
                    ) from error

    def start_logging(self, first_step: int, config: dict[str, Any] | None = None) -> None:
        """Make the folder and open the logs; drop what a run that was cut off had logged at first_step and later.

        config: what the tracker gets in addition to the arguments.
        """
        errors.how_to_go_on = f"resume with --resume {self.folder}"
        if not self.is_main:
            return
        self.folder.mkdir(parents=True, exist_ok=bool(self.args.resume))
        self._cut_logs(first_step)
        self.save_meta()
        print(f"run {self.folder}")
        print_table("", [{"size": name, "value": value} for name, value in self.meta["sizes"].items()], lines=False)
        # Every step, 0-based, under the names of metrics.csv.   utils/core.py#L596-L618
        # TensorBoard forgets what the run that was cut off had logged at the step purge_step and later.
        self.accelerator.log_with = [TensorBoardTracker("", self.folder, purge_step=first_step)]
        if self.args.track:
            config = self.meta["args"] | (config or {}) | {"commit": self.meta["commit"]}
            self.accelerator.log_with.insert(0, tracking.tracker_of(self, config))  # what may fail comes first
        try:
            self.accelerator.init_trackers("")
        except Exception as error:  # each tracker has errors of its own, as when nobody is logged in
            if not self.args.track:
                raise
            if not self.args.resume:
                shutil.rmtree(self.folder)  # there is nothing in it to go on with
            raise InputError(f"{flag('track')}: {error}; run `wandb login`, or set WANDB_MODE=offline") from error

    def _cut_logs(self, first_step: int) -> None:
        """Keep what metrics.csv and samples.jsonl say of the steps before first_step."""
        metrics_file, samples_file = self.folder / "metrics.csv", self.folder / "samples.jsonl"
        damaged = f"{self.folder}: metrics.csv or samples.jsonl is damaged"
        with errors.input_errors(damaged, ValueError, TypeError, KeyError):
            header, *rows = read_records(metrics_file) if first_step else [[]]
            numbers = [dict(zip(header, map(float, row), strict=True)) for row in rows]
            self.rows = [row for row in numbers if row["step"] < first_step]
            lines = samples_file.read_text().splitlines(keepends=True) if first_step else []
            whole = [line for line in lines if line.endswith("\n")]  # kill -9 may have cut off the last one
            samples = [line for line in whole if json.loads(line)["step"] < first_step]
        if [row["step"] for row in self.rows] != list(range(first_step)):
            raise InputError(f"{metrics_file} holds {len(self.rows)} of the {first_step} steps before the checkpoint")
        kept = files.csv_text([header, *rows[:first_step]] if first_step else [])
        files.replace_file(metrics_file, kept)
        files.replace_file(samples_file, "".join(samples))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write one row of metrics, on the main process. step: 0-based."""
        if self.is_main:
            metrics = {name: float(value) for name, value in metrics.items()}
            header = [] if self.rows else [["step", *metrics]]
            with (self.folder / "metrics.csv").open("a", newline="") as file:
                file.write(files.csv_text([*header, [step, *metrics.values()]]))
            self.rows.append({"step": step, **metrics})
            self.accelerator.log(metrics, step=step)

    def last_means(self, *names: str) -> dict[str, float | None]:
        """Means of objectives over the last ten steps, as last_<name>; None on other processes than the main one."""
        values = {f"last_{name}": [row[f"objective/{name}"] for row in self.rows[-10:]] for name in names}
        return {name: sum(last) / len(last) if last else None for name, last in values.items()}

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Append samples to samples.jsonl and print them as a table."""
        if self.is_main:
            with (self.folder / "samples.jsonl").open("a") as file:
                file.write(files.json_lines({"step": step, **sample} for sample in samples))
            if self.args.track:
                self._track_table("samples", samples, step)
            rows = [{name: one_line(value) for name, value in sample.items()} for sample in samples]
            print()  # below the progress bar
            print_table(f"step {step}", rows)

    def write_table(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Write rows with the same keys to <name>.csv, and as a table where the run is tracked."""
        if self.is_main:
            (self.folder / f"{name}.csv").write_text(files.csv_text([list(rows[0]), *(row.values() for row in rows)]))
            if self.args.track:
                self._track_table(name, rows, len(self.rows))

    def _track_table(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        library = importlib.import_module(self.args.tracker)
        table = library.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self.accelerator.log({name: table}, step=step)

    def write_evaluation(self, split: str, rows: list[dict[str, Any]]) -> None:
        """Answers to held-out queries: evaluation.jsonl of the validation split, else evaluation_<split>.jsonl."""
        if self.is_main:
            name = "evaluation.jsonl" if split == "validation" else f"evaluation_{split}.jsonl"
            (self.folder / name).write_text(files.json_lines(map(files.without_nan, rows)))

    # ------------------------------------------------------------------------------------------------------------

    def updates(self, title: str, unit: str, *, first: int, total: int) -> Iterator[int]:
        """The updates of a training loop, from `first` on. Each ends with `end_of_update`.

        A bar shows progress and speed, in units such as episodes. Until the loop ends, SIGTERM waits for the
        checkpoint after the update.
        """

        def stop_after_the_update(signal_number: int, frame: Any) -> None:
            self._told_to_stop = True

        self._saved = self._made = first
        # Progress and speed, on the first process.   train_policy.py#L311-L316
        # A log file gets a line from time to time.
        seconds = 0.1 if sys.stdout.isatty() else 30.0
        self._unit = unit
        self._bar = tqdm(
            total=total,
            initial=first,
            desc=title,
            file=sys.stdout,
            mininterval=seconds,
            maxinterval=2 * seconds,
            main_process_only=False,
            disable=not self.is_main,
        )
        with self._bar, errors.on_sigterm(stop_after_the_update):
            for update in range(first, total):
                self._update_started = time.monotonic()
                yield update

    @contextlib.contextmanager
    def saved_if_it_fails(self) -> Iterator[None]:
        """If a function of the user's fails within the block, a checkpoint of the updates that are finished is left.

        The block must not change what a checkpoint holds: it may sample and score.
        """
        try:
            yield
        except InputError as error:
            if not self._made:
                raise
            if self._made > self._saved:
                self.save_checkpoint(self._made, *self._checkpoint())
            line = f"{error}; the run stops after update {self._made}, with a checkpoint"
            raise InputError(errors.with_how_to_go_on(line)) from error

    def seconds_of_update(self) -> float:
        """Wall time since the current update began."""
        return time.monotonic() - self._update_started

    def end_of_update(
        self,
        update: int,
        metrics: dict[str, float],
        status: str,
        *,
        checkpoint: Callable[[], tuple[dict[str, torch.Tensor], dict[str, Any]]],
        samples: Callable[[], list[dict[str, Any]]] | None = None,
        trace: Callable[[], None] | None = None,
    ) -> None:
        """All that is kept of an update (0-based). Every process must call this.

        status: for the progress bar. The functions are called only if it is time for them: checkpoint gives tensors
        and state, samples gives rows to print, trace keeps a few episodes with all their numbers. Ends the run by
        raising Stopped after the checkpoint, if it was told to stop. checkpoint may also be called later, within
        saved_if_it_fails.
        """
        self._made, self._checkpoint = update + 1, checkpoint
        updates = self._bar.total
        self.log(update, metrics)
        if samples and self.args.log_interval and update % self.args.log_interval == 0:
            self.log_samples(update, samples())
        if trace and self.args.trace_interval and (update % self.args.trace_interval == 0 or update + 1 == updates):
            trace()
        speed = self.meta["sizes"]["batch"] / self.seconds_of_update()
        self._bar.set_postfix_str(f"{speed:.0f} {self._unit}/s, {status}", refresh=False)
        self._bar.update()
        # SIGTERM, which clusters send before they take a machine away, may reach one process only.
        told_to_stop = torch.tensor([float(self._told_to_stop)], device=self.accelerator.device)
        stopping = self.accelerator.reduce(told_to_stop, "sum").item() > 0
        # Weights, Adam's moments, KL coefficient, position in the texts.   train_policy.py#L474-L508
        if stopping or self._made == updates or self._made % (self.args.save_interval or updates) == 0:
            self.save_checkpoint(self._made, *checkpoint())
        if stopping:
            raise Stopped(errors.with_how_to_go_on(f"stopped by SIGTERM after step {self._made}, with a checkpoint"))

    def finish(self, *parts: str, **results: Any) -> None:
        """Draw the learning curves, record the results, and say where everything is.

        Then push models/<run>/<part> to the hub, if the arguments say so. Every process must call this.
        """
        if self.is_main:
            from ppo_rlhf.lib import processes

            results = files.without_nan(results)
            learning_curves.draw_learning_curves(self.folder, self.rows, dataclasses.asdict(self.args))
            numbers = {name: value for name, value in results.items() if isinstance(value, int | float)}
            self.accelerator.log(numbers, step=len(self.rows))
            self.save_meta(finished=True, peak_mib=round(processes.peak_memory() / 2**20), results=results)
            print(f"finished {self.folder}; what it trained is in {self.model_folder}")
            if self.args.upload_model:
                self.accelerator.log(tracking.upload_models(self, parts), step=len(self.rows))
            for tracker in self.accelerator.trackers:  # end_training would also part the processes, for later stages
                tracker.finish()
        self.accelerator.wait_for_everyone()

    # ------------------------------------------------------------------------------------------------------------

    def save_checkpoint(self, step: int, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        """Write checkpoints/<step>."""
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise NumericalError(f"{name} is not finite at step {step}; the run stops and saves nothing more")
        if self.is_main:
            checkpoints.write(self.folder, step, tensors, state)
            self.save_meta()
        self._saved = step

    def resume(self, restore: Callable[[dict[str, torch.Tensor]], None]) -> dict[str, Any]:
        """Continue from the newest checkpoint: its state; {"step": 0} if there is none.

        restore: takes the checkpoint's tensors. Raises an InputError if the run has made more updates than its
        arguments ask for.
        """
        steps = checkpoints.checkpoint_steps(self.folder) if self.args.resume else []
        if not steps:
            if self._was_finished:
                raise InputError(f"--resume {self.args.resume}: the run is finished, and its checkpoints are gone")
            return {"step": 0}
        made, updates = steps[-1], self.meta["sizes"].get("updates", math.inf)
        if made > updates:
            raise InputError(
                f"{flag('ppo.total_episodes')} makes {updates} updates, but this run has made {made}; "
                f"{flag('ppo.total_episodes')} {made * self.meta['sizes']['batch']} is enough"
            )
        tensors, state = checkpoints.read(self.folder, made)
        restore(tensors)
        return state


# ---- Names and tables ------------------------------------------------------------------------------------------


def run_name(args: Any, timestamp: int) -> str:
    return f"{args.exp_name}__{args.preset}__{args.seed}__{timestamp}"


def shared_timestamp() -> int:
    """Seconds since 1970 that name no run yet, the main process's on every process."""
    timestamp = int(time.time())
    while list(Path("runs").glob(f"*__{timestamp}")):
        timestamp += 1
    return broadcast_object_list([timestamp])[0]


def one_line(value: Any) -> Any:
    """A text with its line breaks shown as marks, for a table; anything else as it is."""
    return value.replace("\n", "⏎") if isinstance(value, str) else value


def print_pairs(title: str, rows: list[dict[str, Any]]) -> None:
    """Print texts side by side, and below each the numbers that are named after it: `policy score` below `policy`."""
    cells: list[dict[str, Any]] = []
    for row in rows:
        cells.append({})
        for name, value in row.items():
            text, _, number = name.partition(" ")
            if number:
                cells[-1][text] += f"\n{number} {value:+.2f}"
            else:
                cells[-1][name] = one_line(value.strip()) if isinstance(value, str) else value
    print_table(title, cells)


def print_table(title: str, rows: list[dict[str, Any]], *, lines: bool = True) -> None:
    """lines: between the rows."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(errors.visible(title)) if title else None, show_lines=lines)
    for name in rows[0]:
        numeric = all(isinstance(row[name], float | int) for row in rows)
        table.add_column(name, justify="right" if numeric else "left", min_width=6 if numeric else None)
    for row in rows:
        cells = (f"{value:+.2f}" if isinstance(value, float) else str(value) for value in row.values())
        table.add_row(*(Text(errors.visible(cell)) for cell in cells))
    Console().print(table)
