"""What traces cost: a run's first updates again, each of them traced.

    python benchmark/cost/trace_cost.py --run runs/<run>   # of chapter 1, 2 or 3, where that run was started

Every update is timed, and what its trace takes after it; the first does not count. A run with --trace_interval N
traces one update in N, so the share of its time is that of a trace divided by N. The new run stops when enough is
measured, and leaves a folder below runs/ whose name begins with trace_cost.
"""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tyro

from ppo_rlhf import rlvr_policy, tldr_policy, train_policy
from ppo_rlhf.lib import cli, run, traces
from ppo_rlhf.lib.errors import InputError

SCRIPTS = {
    "train_policy": (train_policy, traces.Recorder, "record"),
    "tldr_policy": (tldr_policy, traces.Recorder, "record"),
    "rlvr_policy": (rlvr_policy, traces.Recorder, "record"),
}


@dataclass(frozen=True)
class Args:
    run: str
    """folder of a run of PPO, whose arguments are taken"""
    updates: int = 15
    """updates to measure"""


class Enough(Exception):
    """As many updates as asked for are measured."""


def measure(train: Callable, args: Any, owner: Any, name: str, updates: int) -> list[tuple[float, float]]:
    """Seconds of each update, and of its trace, which `owner.name` makes."""
    seconds: list[tuple[float, float]] = []
    keep = getattr(owner, name)
    began = time.perf_counter()

    def trace(*arguments: Any) -> None:
        nonlocal began
        over = time.perf_counter()
        keep(*arguments)
        ended = time.perf_counter()
        seconds.append((over - began, ended - over))
        began = ended
        if len(seconds) > updates:
            raise Enough

    with patch.object(owner, name, trace), contextlib.suppress(Enough):
        train(args)
    return seconds[1:]


def main(args: Args) -> None:
    meta = run.read_meta(Path(args.run))
    saved, updates = meta["args"], meta["sizes"].get("updates", 0)
    if meta.get("script") not in SCRIPTS:
        raise InputError(f"{args.run} is no run of {', '.join(SCRIPTS)}")
    script, owner, name = SCRIPTS[meta["script"]]
    given = cli.from_dict(script.Args, saved)
    if not given.trace_interval:
        raise InputError(f"{args.run} was started without --trace_interval")
    if args.updates >= updates:
        raise InputError(f"{args.run} has only {updates} updates; --updates {updates - 1} or fewer would work")
    repeated = dataclasses.replace(given, exp_name="trace_cost", trace_interval=1)
    measured = measure(script.train, repeated, owner, name, args.updates)
    update, trace = (statistics.median(column) for column in zip(*measured, strict=True))
    print(f"an update takes {update:.3f} s, and its trace {trace:.3f} s more (medians): {trace / update:.1%}")
    print(f"one in {given.trace_interval} is traced: {trace / update / given.trace_interval:.2%}")


if __name__ == "__main__":
    cli.run_script(main, lambda argv: tyro.cli(Args, args=argv, description=__doc__))
