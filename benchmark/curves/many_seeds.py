"""Run one command for many seeds, one after another or several at once, on this machine or through Slurm.

    python benchmark/curves/many_seeds.py --name tales --num_seeds 10 --workers 2 \\
        --command "python ppo_rlhf/train_both.py --preset tales"

Every seed gets a folder of its own, <folder>/<name>/seed<seed>/, and the command runs there with --seed <seed> added:

    runs/, models/   what the command leaves
    log.txt          what it prints
    job.json         command, commit, how often it was started, how it ended

Give the same line again after an interruption, however hard: what is finished is skipped, what was cut off goes on
from its last checkpoint, what failed is tried again. Ctrl-C and SIGTERM let the commands write a checkpoint first; a
second one kills them. Several launchers may share one folder; a seed is run by one of them. The exit status is 0 if
every seed is finished.

Words of the command with a slash in them that name an existing file are made absolute. `{seed}` in a word becomes the
seed; without any, `--seed <seed>` is appended. `python`, `accelerate` and `torchrun` are those of the environment of
this file. Where several commands of more than one process run at once, let each find its
port: `torchrun --standalone`.
"""

import contextlib
import functools
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

import tyro

from ppo_rlhf.lib.base.console import print_table
from ppo_rlhf.lib.base.errors import InputError, exit_with
from ppo_rlhf.lib.base.files import read_json, write_json
from ppo_rlhf.lib.services import run as ppo_run
from ppo_rlhf.lib.services.run import lock_folder

ROOT = Path(__file__).resolve().parents[2]
LOG_LINES = 15  # of a command that failed


@dataclass(frozen=True)
class Args:
    name: str
    """name of the experiment: its folder"""
    command: str = ""
    """what to run for each seed; with --show, without it: whatever was run"""
    num_seeds: int = 10
    """how many seeds"""
    start_seed: int = 1
    """the first seed; the others follow"""
    seed_step: int = 1
    """distance from one seed to the next"""
    workers: int = 1
    """how many seeds at once; cores and GPUs are shared out evenly. With Slurm: how many jobs at once"""
    folder: Path = ROOT / "benchmark" / "runs"
    """where experiments are kept"""
    show: bool = False
    """print the table of progress and run nothing"""
    any_commit: bool = False
    """go on with seeds that another commit of this project began"""
    slurm_template: Path | None = None
    """submit a job array made from this file instead of running anything here"""


@dataclass
class Job:
    """One seed of an experiment, as its folder tells it."""

    seed: int
    folder: Path
    command: str
    state: str = "waiting"
    """waiting, cut off, failed, running, elsewhere or finished"""
    record: dict[str, Any] = field(default_factory=dict)
    process: subprocess.Popen | None = None
    lock: int | None = None
    slot: int = 0
    started: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.folder.parent.name} seed {self.seed}"

    @property
    def seconds(self) -> float:
        return self.record.get("seconds", 0.0) + (time.time() - self.started if self.process else 0.0)

    def last_lines(self, count: int) -> list[str]:
        """The end of the log."""
        try:
            with (self.folder / "log.txt").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 20_000))
                lines = file.read().decode(errors="replace").splitlines()
        except FileNotFoundError:
            return []
        return [line.rstrip() for line in lines if line.strip()][-count:]


# ---- Jobs ------------------------------------------------------------------------------------------------------


@functools.cache
def commit() -> str:
    """The commit of this checkout when the launcher first asked: one for all of its seeds."""
    return ppo_run.commit()


@functools.cache
def describe() -> str:
    """The checkout in git's words, for people: the last tag and the commits since, or the commit."""
    command = ["git", "-C", str(ROOT), "describe", "--tags", "--always", "--dirty"]
    with contextlib.suppress(OSError):  # no git
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return ""


def find_jobs(args: Args) -> list[Job]:
    """The jobs of an experiment, with the state that their folders show; without a command, those that have one."""
    jobs = []
    seeds = [args.start_seed + number * args.seed_step for number in range(args.num_seeds)]
    if not args.command:
        names = [folder.name.removeprefix("seed") for folder in (args.folder / args.name).glob("seed*")]
        seeds = sorted(int(name) for name in names if name.isdigit())
    for seed in seeds:
        job = Job(seed, args.folder.resolve() / args.name / f"seed{seed}", args.command)
        jobs.append(job)
        job.record = read_record(job.folder)
        if not job.record:
            continue
        if args.command and job.record["command"] != args.command:
            raise InputError(
                f"{job.folder} holds another command's run: {job.record['command']}; give another --name"
            )
        if job.record["finished"]:
            job.state = "finished"
            continue
        job.state = "failed" if job.record["status"] else "cut off"
        if args.show:
            try:
                job.lock = lock_folder(job.folder)
                release(job)
            except InputError:
                job.state = "running"
        if job.record["commit"] != commit() and not (args.any_commit or args.show):
            raise InputError(
                f"{job.folder} was begun at commit {job.record['commit']}, and this is {commit()}; "
                f"check that one out, or give --any_commit"
            )
    return jobs


def read_record(folder: Path) -> dict[str, Any]:
    """What job.json says of a seed; nothing if it was never started."""
    if not (folder / "job.json").exists():
        return {}
    try:
        record = read_json(folder / "job.json")
        return {key: record[key] for key in ("command", "commit", "finished", "status", "starts")} | record
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder / 'job.json'} was damaged ({error}); remove that folder to begin anew") from error


def run_to_resume(folder: Path) -> Path | None:
    """The newest run of a seed that can go on. Folders of runs that never got as far as meta.json are removed."""
    runs = [run for run in (folder / "runs").glob("*") if run.is_dir()]
    runs.sort(key=lambda run: run.stat().st_mtime)
    for run in [run for run in runs if not (run / "meta.json").exists()]:
        shutil.rmtree(run)
        runs.remove(run)
    return runs[-1] if runs else None


def all_finished(folder: Path) -> bool:
    """Whether every run of a seed has reached its end: a command that was told to stop also ends with status 0."""
    try:
        metas = [read_json(meta) for meta in (folder / "runs").glob("*/meta.json")]
        return all(meta["finished"] for meta in metas)
    except (ValueError, KeyError, TypeError):  # damaged; once the seed is started again, its script says so
        return False


def words_of(job: Job) -> list[str]:
    """The command of a seed, word by word."""
    words = []
    for word in shlex.split(job.command):
        flag, equals, value = word.rpartition("=")
        value = os.path.abspath(value) if "/" in value and Path(value).exists() else value
        words.append((flag + equals + value).replace("{seed}", str(job.seed)))
    if "{seed}" not in job.command:
        words += ["--seed", str(job.seed)]
    if run := run_to_resume(job.folder):
        words += ["--resume", str(run)]
    return words


def environment_of(job: Job, workers: int) -> dict[str, str]:
    """The environment of a seed: tags, this interpreter first on the path, its share of cores and GPUs."""
    environment = dict(os.environ)
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    tags = [environment.get("WANDB_TAGS", ""), describe(), commit()]
    environment["WANDB_TAGS"] = ",".join(dict.fromkeys(tag for tag in tags if tag))
    if workers > 1:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        environment.setdefault("PPO_RLHF_THREADS", str(max(1, cores // workers)))
        gpus = visible_gpus()
        share = max(1, len(gpus) // workers)
        if gpus:
            first = job.slot * share % len(gpus)
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first : first + share])
    return environment


@functools.cache
def visible_gpus() -> list[str]:
    """Ids of the GPUs that this process may use."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    except OSError:  # no NVIDIA driver
        return []
    return [str(index) for index in range(len(listed.stdout.splitlines()))] if listed.returncode == 0 else []


def start(job: Job, workers: int) -> bool:
    """Start a seed. False if another launcher runs it, or has finished it since we looked."""
    job.folder.mkdir(parents=True, exist_ok=True)
    try:
        job.lock = lock_folder(job.folder)
    except InputError:
        job.state = "elsewhere"
        return False
    job.record = read_record(job.folder)
    if job.record.get("finished"):
        job.state = "finished"
        release(job)
        return False
    words = words_of(job)
    now = {"command": job.command, "seed": job.seed, "commit": commit(), "git": describe(), "finished": False}
    job.record |= now | {"starts": job.record.get("starts", 0) + 1, "status": None}
    write_json(job.folder / "job.json", job.record)
    with (job.folder / "log.txt").open("a") as log:
        print(f"$ {shlex.join(words)}", file=log, flush=True)
        try:
            # The command inherits the lock: it holds while the command lives, whatever happens to this process.
            job.process = subprocess.Popen(
                words,
                cwd=job.folder,
                env=environment_of(job, workers),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[] if job.lock is None else [job.lock],
            )
        except OSError as error:
            if job.record["starts"] == 1:  # nothing has run: the name stays free for the corrected command
                (job.folder / "job.json").unlink()
            release(job)
            raise InputError(f"--command: {words[0]}: {error.strerror}") from error
    job.state, job.started = "running", time.time()
    return True


def end(job: Job, stopping: bool) -> None:
    """Record how a seed's process has ended. What was told to stop has no status of its own."""
    seconds, status = round(job.seconds, 1), None if stopping else job.process.returncode
    job.process = None
    finished = status == 0 and all_finished(job.folder)
    job.state = "finished" if finished else "failed" if status else "cut off"
    job.record |= {"finished": finished, "status": status, "seconds": seconds}
    write_json(job.folder / "job.json", job.record)
    release(job)


def release(job: Job) -> None:
    if job.lock is not None:
        os.close(job.lock)
        job.lock = None


# ---- Here ------------------------------------------------------------------------------------------------------


def rows_of(jobs: list[Job]) -> list[dict[str, Any]]:
    """The table of progress."""
    return [
        {
            "experiment": job.name,
            "state": job.state,
            "minutes": f"{job.seconds / 60:.1f}",
            "starts": job.record.get("starts", 0),
            "commit": job.record.get("commit", "")[:7],
            "last line of the log": "".join(job.last_lines(1))[:80],
        }
        for job in jobs
    ]


def say(job: Job, jobs: list[Job]) -> None:
    states = [other.state for other in jobs]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    print(f"{job.name}: {job.state} after {job.seconds / 60:.1f} min ({counts})", flush=True)


def run_here(args: Args, jobs: list[Job]) -> None:
    """Run all jobs that are not finished, `workers` at a time. SIGTERM and Ctrl-C stop them, a second one kills."""
    received: list[int] = []
    passed_on = 0
    waiting, running = [job for job in jobs if job.state != "finished"], []
    # The handler only takes note, so that a signal that comes while a seed is being started reaches that one too.
    handlers = {
        number: signal.signal(number, lambda number, frame: received.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        while running or (waiting and not received):
            while waiting and len(running) < args.workers and not received:
                job = waiting.pop(0)
                job.slot = min(set(range(args.workers)) - {other.slot for other in running})
                if start(job, args.workers):
                    running.append(job)
                say(job, jobs)
            if passed_on < len(received):
                send(running, signal.SIGKILL if len(received) > 1 else signal.SIGTERM)
                passed_on = len(received)
            time.sleep(0.2)
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                end(job, stopping=bool(received))
                say(job, jobs)
    finally:
        send(running, signal.SIGTERM)  # only after an error of our own
        for number, handler in handlers.items():
            signal.signal(number, handler)


def send(jobs: list[Job], signal_number: int) -> None:
    """A signal to the commands, and to everything that they started."""
    for job in jobs:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(job.process.pid, signal_number)


def report(args: Args, jobs: list[Job]) -> int:
    """Print the table and the end of each failed command's log. Returns the exit status."""
    print_table(args.name, rows_of(jobs), show_lines=False)
    for job in jobs:
        if job.state == "failed":
            print(f"\n{job.name} failed with status {job.record['status']}; the end of {job.folder / 'log.txt'}:")
            print(*(f"    {line}" for line in job.last_lines(LOG_LINES)), sep="\n")
    return 0 if all(job.state == "finished" for job in jobs) else 1


# ---- Through Slurm ---------------------------------------------------------------------------------------------


def submit(args: Args) -> None:
    """Fill the template's {{marks}} and hand it to sbatch. Each task of the array runs this file for one seed."""
    own = [sys.executable, str(Path(__file__).resolve()), "--name", args.name, "--command", args.command]
    own += ["--folder", str(args.folder.resolve()), "--num_seeds", "1"] + ["--any_commit"] * args.any_commit
    folder = args.folder.resolve() / args.name
    last_seed = args.start_seed + (args.num_seeds - 1) * args.seed_step
    step = f":{args.seed_step}" if args.seed_step > 1 else ""
    marks = {
        "name": args.name,
        "folder": str(folder),
        "array": f"{args.start_seed}-{last_seed}{step}%{args.workers}",
        "here": shlex.quote(os.getcwd()),
        "command": shlex.join(own) + ' --start_seed "$SLURM_ARRAY_TASK_ID"',
    }
    try:
        text = args.slurm_template.read_text()
    except OSError as error:
        raise InputError(f"--slurm_template {args.slurm_template}: {error.strerror}") from error
    for mark, value in marks.items():
        text = text.replace("{{" + mark + "}}", value)
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "slurm.sh"
    script.write_text(text)
    try:
        result = subprocess.run(["sbatch", str(script)])
    except FileNotFoundError as error:
        raise InputError(f"sbatch is not on this machine; {script} is what it would get") from error
    if result.returncode:
        raise InputError(f"sbatch refused {script} with status {result.returncode}")


# ----------------------------------------------------------------------------------------------------------------


def main(args: Args) -> int:
    if min(args.num_seeds, args.workers, args.seed_step) < 1 or args.start_seed < 0:
        raise InputError("--num_seeds, --seed_step and --workers must be at least 1, --start_seed at least 0")
    if Path(args.name).name != args.name or args.name in ("", ".."):
        raise InputError(f"--name {args.name!r}: must be the name of a folder, not a path")
    try:
        empty = not shlex.split(args.command)
    except ValueError as error:
        raise InputError(f"--command {args.command}: {error}") from error
    if empty and not args.show:
        raise InputError("--command is missing; only --show can do without")
    jobs = find_jobs(args)
    if not jobs:
        raise InputError(f"--show: {args.folder / args.name} holds no seeds")
    if args.slurm_template and not args.show:
        submit(args)
        return 0
    if not args.show:
        run_here(args, jobs)
    return report(args, jobs)


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Args, description=__doc__)))
    except (InputError, OSError) as error:  # such as a full disk
        exit_with(str(error))
