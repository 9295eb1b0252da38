"""Kill workers and learner of a run again and again, and compare it with one that nothing happened to.

    python tests/soak_async.py --kills 20 --seed 1

Workers die by kill -9, or stop and never go on; the learner dies by kill -9 and is resumed. The run samples two
updates ahead with two workers; the other one has one worker. All metrics, times apart, and the final weights must be
equal bit for bit. The default takes some minutes.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from processes import Launched, launch
from runs import build_tiny_sums, metrics_of, only
from safetensors.torch import load_file

SETTINGS = (
    "--preset sums --staleness 2 --ppo.batch_size 16 --ppo.nminibatches 2 --ppo.local_rollout_batch_size 4 "
    "--ppo.lr 0.003 --save_interval 2 --log_interval 0 --trace_interval 0 --eval_interval 0 --eval_samples 0 "
    "--eval_problems 4 --task.response_length 40 --time_out 60"
)


def descendants(pid: int) -> list[int]:
    """All processes that a process has started, and those that these have started."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):  # it has ended
            continue
        children.setdefault(parent, []).append(int(status.parent.name))
    found, todo = [], [pid]
    while todo:
        todo += (more := children.get(todo.pop(), []))
        found += more
    return found


def workers_of(pid: int) -> list[int]:
    """The processes below this one that sample."""
    found = []
    for child in descendants(pid):
        try:
            if Path(f"/proc/{child}/cmdline").read_text().startswith("ray::BuiltIn"):
                found.append(child)
        except OSError:
            continue
    return found


def rows_of(folder: Path) -> int:
    files = list(folder.glob("runs/*/metrics.csv"))
    return len(files[0].read_text().splitlines()[1:]) if files else 0


def soak(kills: int, seed: int, work: Path, world: Path) -> Counter:
    """Raises an AssertionError if the runs differ; returns how often what was done to which."""
    rng, done = random.Random(seed), Counter()
    undisturbed, folder = work / "undisturbed", work / "disturbed"
    words = [*SETTINGS.split(), "--base_model", f"{world}/model", "--task.problems", str(world)]
    words += ["--ppo.total_episodes", str(16 * 8 * kills)]
    for path in (undisturbed, folder):
        path.mkdir()
    result = launch("rlvr/asynchronous.py", *words, "--workers", "1", folder=undisturbed)
    assert result.status == 0, result.stdout + result.stderr
    running = Launched("rlvr/asynchronous.py", *words, "--workers", "2", folder=folder)
    while done.total() < kills:
        before, begun = rows_of(folder), time.monotonic()
        while rows_of(folder) < before + 2 and running.process.is_alive() and time.monotonic() < begun + 120:
            time.sleep(0.05)
        time.sleep(rng.uniform(0, 0.3))
        assert running.process.is_alive(), f"it ended after {done.total()} kills: {running.wait().stderr}"
        what, workers = rng.choice(["worker killed"] * 3 + ["worker stopped", "learner killed"]), []
        if what == "learner killed":
            running.process.kill()
            running.wait()
            begun = [run for run in folder.glob("runs/*") if (run / "meta.json").exists()]
            if not begun:
                shutil.rmtree(folder / "runs", ignore_errors=True)
            again = ["--resume", str(begun[0])] if begun else [*words, "--workers", "2"]
            running = Launched("rlvr/asynchronous.py", *again, folder=folder)
        elif workers := workers_of(running.process.pid):
            os.kill(rng.choice(workers), signal.SIGKILL if what == "worker killed" else signal.SIGSTOP)
        else:
            continue
        done[what] += 1
        print(f"{done.total():3} {what:15} after update {rows_of(folder)}", flush=True)
    result = running.wait(600)
    assert result.status == 0, result.stdout + result.stderr
    ours, theirs = (metrics_of(only(path, "runs/*")) for path in (folder, undisturbed))
    assert len(ours) == len(theirs) == 8 * kills
    for one, other in zip(ours, theirs, strict=True):
        differing = {name for name in other if "time/" not in name and one[name] != other[name]}
        assert not differing, (one["step"], differing)
    for name in ("policy", "value"):
        weights, expected = (
            load_file(only(path, f"models/*/{name}/model.safetensors")) for path in (folder, undisturbed)
        )
        assert all(weights[key].equal(expected[key]) for key in expected), name
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work, begun = Path(name), time.monotonic()
        done = soak(args.kills, args.seed, work, build_tiny_sums(work / "world"))
        rows = rows_of(work / "disturbed")
    said = ", ".join(f"{what} {count}" for what, count in done.most_common())
    print(f"{args.kills} times: {said}; {rows} updates, all numbers equal; {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
