"""Run one command for many seeds, one after another or several at once.

    python benchmark/curves/many_seeds.py --name tales --num_seeds 10 --workers 2 \\
        --command "python ppo_rlhf/train_both.py --preset tales"

Every seed gets a folder of its own, <folder>/<name>/seed<seed>/, and the command runs there with --seed <seed> added:

    runs/, models/   what the command leaves
    log.txt          what it prints
    job.json         command, commit, how often it was started, how it ended

Give the same line again after an interruption: finished seeds are skipped, interrupted ones resume from their last
checkpoint, failed ones are tried again. Ctrl-C and SIGTERM let the commands write a checkpoint first; a second one
kills them. The exit status is 0 if every seed is finished.

Words of the command with a slash in them that name an existing file are made absolute. The commands python,
accelerate and torchrun are those of the environment of this file.
"""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import tyro
from pydantic import NonNegativeInt, PositiveInt

from ppo_rlhf.train_policy import Arguments, InputError, checked, commit, run_script, write_json

ROOT = Path(__file__).resolve().parents[2]
LOG_LINES = 15  # of a command that failed


@dataclass(frozen=True)
class Args(Arguments):
    name: str
    """name of the experiment: its folder"""
    command: str
    """what to run for each seed"""
    num_seeds: PositiveInt = 10
    """how many seeds"""
    start_seed: NonNegativeInt = 1
    """the first seed; the others follow"""
    seed_step: PositiveInt = 1
    """distance from one seed to the next"""
    workers: PositiveInt = 1
    """how many seeds at once; cores and GPUs are shared out evenly"""
    folder: str = str(ROOT / "benchmark/runs")
    """where experiments are kept"""
    show: bool = False
    """print the table of progress and run nothing"""
    any_commit: bool = False
    """go on with seeds that another commit of this project began"""


@dataclass
class Job:
    """One seed of an experiment."""

    seed: int
    folder: Path
    command: str
    record: dict[str, Any] = field(default_factory=dict)
    """what job.json says; nothing if the seed was never started"""

    @property
    def name(self) -> str:
        return f"{self.folder.parent.name} seed {self.seed}"

    @property
    def state(self) -> str:
        """A seed that was started and has not ended is running, or was interrupted: `started`."""
        if not self.record:
            return "waiting"
        if self.record["finished"]:
            return "finished"
        return "failed" if self.record["status"] else "started"

    def update(self, **changes: Any) -> None:
        """Change what job.json says."""
        self.record.update(changes)
        write_json(self.folder / "job.json", self.record)


# ---- Jobs ------------------------------------------------------------------------------------------------------


def find_jobs(args: Args) -> list[Job]:
    """The jobs of an experiment, with what their folders say of them."""
    jobs = []
    for number in range(args.num_seeds):
        seed = args.start_seed + number * args.seed_step
        job = Job(seed, Path(args.folder).resolve() / args.name / f"seed{seed}", args.command)
        jobs.append(job)
        if not (job.folder / "job.json").exists():
            continue
        job.record = json.loads((job.folder / "job.json").read_text())
        if job.record["command"] != args.command:
            raise InputError(
                f"{job.folder} holds another command's run: {job.record['command']}; give another --name"
            )
        if job.state != "finished" and job.record["commit"] != commit() and not (args.any_commit or args.show):
            raise InputError(
                f"{job.folder} was begun at commit {job.record['commit']}, and this is {commit()}; "
                f"check that one out, or give --any_commit"
            )
    return jobs


def words_of(job: Job) -> list[str]:
    """The command of a seed, word by word. It resumes the newest run."""
    words = [
        os.path.abspath(word) if "/" in word and Path(word).exists() else word for word in shlex.split(job.command)
    ]
    words += ["--seed", str(job.seed)]
    runs = sorted((job.folder / "runs").glob("*/"), key=lambda run: run.stat().st_mtime)
    while runs and not (runs[-1] / "meta.json").exists():  # it was killed before it began
        shutil.rmtree(runs.pop())
    if runs:
        words += ["--resume", str(runs[-1])]
    return words


def environment_of(slot: int, workers: int) -> dict[str, str]:
    """This interpreter first on the path, and a worker's share of cores and GPUs."""
    environment = dict(os.environ)
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    if workers > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // workers)))
        every_gpu = ",".join(map(str, range(torch.cuda.device_count())))
        gpus = environment.get("CUDA_VISIBLE_DEVICES", every_gpu).split(",")
        share = max(1, len(gpus) // workers)
        first = slot * share % len(gpus)
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first : first + share])
    return environment


def start(job: Job, slot: int, workers: int) -> subprocess.Popen:
    words = words_of(job)
    job.folder.mkdir(parents=True, exist_ok=True)
    with (job.folder / "log.txt").open("a") as log:
        print(f"$ {shlex.join(words)}", file=log, flush=True)
        try:
            process = subprocess.Popen(
                words,
                cwd=job.folder,
                env=environment_of(slot, workers),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that a signal reaches everything that the command starts
            )
        except OSError as error:
            raise InputError(f"--command: {words[0]}: {error.strerror}") from error
    starts = job.record.get("starts", 0) + 1
    job.update(command=job.command, seed=job.seed, commit=commit(), starts=starts, finished=False, status=None)
    return process


def end(job: Job, status: int | None, seconds: float) -> None:
    """Record how a seed's process has ended. Status 0 is not enough: a run that was told to stop ends so, too."""
    metas = [json.loads(file.read_text()) for file in (job.folder / "runs").glob("*/meta.json")]
    finished = status == 0 and all(meta["finished"] for meta in metas)
    job.update(finished=finished, status=status, seconds=job.record.get("seconds", 0.0) + round(seconds, 1))


# ---- Running ---------------------------------------------------------------------------------------------------


def run_here(jobs: list[Job], workers: int) -> None:
    """Run all jobs that are not finished, `workers` at a time. SIGTERM and Ctrl-C stop them, a second one kills."""
    waiting = [job for job in jobs if job.state != "finished"]
    running: dict[int, tuple[Job, subprocess.Popen, float]] = {}  # by worker
    received: list[int] = []
    passed_on = 0

    def send(number: int) -> None:
        for _, process, _ in running.values():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(process.pid, number)

    # The handler only takes note, so that a signal that comes while a seed is being started reaches that one too.
    handlers = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        handlers[number] = signal.signal(number, lambda number, frame: received.append(number))
    try:
        while running or (waiting and not received):
            for slot in range(workers):
                if slot not in running and waiting and not received:
                    job = waiting.pop(0)
                    running[slot] = (job, start(job, slot, workers), time.monotonic())
                    print(f"{job.name}: started", flush=True)
            count = len(received)  # another signal may come while this one is passed on
            if passed_on < count:
                send(signal.SIGKILL if count > 1 else signal.SIGTERM)
                passed_on = count
            time.sleep(0.2)
            for slot, (job, process, began) in list(running.items()):
                if process.poll() is not None:
                    del running[slot]
                    end(job, None if received else process.returncode, time.monotonic() - began)
                    print(f"{job.name}: {job.state}, {len(waiting)} waiting", flush=True)
    finally:
        send(signal.SIGTERM)  # only after an error of our own
        for number, handler in handlers.items():
            signal.signal(number, handler)


def report(jobs: list[Job]) -> int:
    """Print the table and the end of each failed command's log. Returns the exit status."""
    for job in jobs:
        minutes, starts = job.record.get("seconds", 0) / 60, job.record.get("starts", 0)
        commit_of_run = job.record.get("commit", "")[:7]
        print(f"{job.name:<32} {job.state:<8} {minutes:6.1f} minutes, starts: {starts}, {commit_of_run}")
    for job in jobs:
        if job.state == "failed":
            log = job.folder / "log.txt"
            print(f"\n{job.name} failed with status {job.record['status']}; the end of {log}:")
            lines = log.read_text(errors="replace").splitlines()
            print(*(f"    {line}" for line in lines[-LOG_LINES:]), sep="\n")
    return 0 if all(job.state == "finished" for job in jobs) else 1


def main(args: Args) -> int:
    jobs = find_jobs(args)
    if not args.show:
        run_here(jobs, args.workers)
    return report(jobs)


if __name__ == "__main__":
    run_script(lambda: sys.exit(main(checked(tyro.cli(Args, description=__doc__)))))
