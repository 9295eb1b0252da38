"""Experiments that compare variants of a run over several seeds: what the scripts in experiments/ have in common.

A script declares an Experiment: the command of each variant, what is measured of a finished run, and the columns of
the table. This module runs the variants for every seed (with curves/many_seeds.py, which resumes), keeps what it
measures in runs.csv (a row for each run) and updates.csv (a row for each update), and makes the table from runs.csv
alone. Means have 95 % intervals over seeds, Student's.
"""

import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import scipy.stats
import tyro
from pydantic import NonNegativeInt, PositiveInt

from benchmark.curves import many_seeds
from benchmark.curves.compare import markdown, read_numbers
from ppo_rlhf.train_policy import Arguments, InputError, checked, read_meta, run_script

ROOT = Path(__file__).resolve().parents[1]
KEYS = ["variant", "seed"]  # They say whose run a row is.


@dataclass(frozen=True)
class Args(Arguments):
    only: tuple[str, ...] = ()
    """which variants, by name; none: all"""
    seeds: PositiveInt = 5
    """how many seeds of each"""
    first_seed: NonNegativeInt = 1
    """the first of them"""
    workers: PositiveInt = 1
    """how many runs at once"""
    folder: str = ""
    """where runs are kept; empty: benchmark/runs/<experiment>"""
    output: str = ""
    """folder that gets runs.csv, updates.csv and <experiment>.md; empty: benchmark/results/<experiment>"""
    any_commit: bool = False
    """go on with runs that another commit of this project began"""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    name: str
    script: str
    """the training script, below the root"""
    common: str
    """arguments that all variants have"""
    variants: dict[str, str]
    """arguments by name"""
    curves: tuple[str, ...]
    """columns of metrics.csv that updates.csv keeps, where a run has them"""
    measure: Callable[[Path, dict[str, Any], pd.DataFrame], dict[str, Any]]
    """(run's folder, its meta.json, its metrics.csv) -> what is measured of it"""
    table: Callable[[pd.DataFrame], list[dict[str, str]]]
    """runs.csv -> rows"""
    run: str = ""
    """what the measured run's name begins with, where the script makes several"""

    def of(self, args: Args, *, output: bool = False) -> Path:
        """The folder of its runs or of its results."""
        given = args.output if output else args.folder
        return Path(given or ROOT / "benchmark" / ("results" if output else "runs") / self.name)


# ---- Run and report --------------------------------------------------------------------------------------------


def chosen(experiment: Experiment, args: Args) -> list[str]:
    """Names of the variants that were asked for."""
    for name in args.only:
        if name not in experiment.variants:
            raise InputError(f"--only {name}: there are {', '.join(experiment.variants)}")
    return list(dict.fromkeys(args.only or experiment.variants))


def jobs_of(experiment: Experiment, args: Args, name: str) -> list[many_seeds.Job]:
    """The jobs of a variant, one for each seed."""
    script = shlex.quote(str(ROOT / experiment.script))
    command = f"python {script} {experiment.common} {experiment.variants[name]}".strip()
    return many_seeds.find_jobs(
        many_seeds.Args(
            name=name,
            command=command,
            num_seeds=args.seeds,
            start_seed=args.first_seed,
            folder=str(experiment.of(args)),
            any_commit=args.any_commit,
        )
    )


def run(experiment: Experiment, args: Args) -> int:
    """Train all policies and report. Returns the exit status."""
    jobs = [job for name in chosen(experiment, args) for job in jobs_of(experiment, args, name)]
    jobs.sort(key=lambda job: job.seed)  # All variants of one seed come before the next seed.
    many_seeds.run_here(jobs, args.workers)
    if any(job.state == "finished" for job in jobs):
        report(experiment, args)
    return many_seeds.report(jobs)


def finished_runs(experiment: Experiment, args: Args) -> Iterator[tuple[dict[str, Any], Path, dict[str, Any]]]:
    """Whose run, its folder and its meta.json, of every finished one of the chosen variants and seeds."""
    for name in chosen(experiment, args):
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            for file in (experiment.of(args) / name / f"seed{seed}" / "runs").glob(f"{experiment.run}*/meta.json"):
                meta = read_meta(file.parent)
                if meta["finished"]:
                    yield {"variant": name, "seed": seed}, file.parent, meta


def report(experiment: Experiment, args: Args) -> int:
    """Measure the finished runs, keep the numbers, and write the table."""
    runs, updates = [], []
    for whose, folder, meta in finished_runs(experiment, args):
        table = read_numbers(folder / "metrics.csv")
        runs.append(whose | experiment.measure(folder, meta, table) | {"commit": meta["commit"][:7]})
        columns = [name for name in ("step", "episode", *experiment.curves) if name in table]
        updates.append(table[columns].assign(**whose))
    if not runs:
        raise InputError(f"{experiment.of(args)} holds no finished run")
    keep_tables(experiment.of(args, output=True), pd.DataFrame(runs), pd.concat(updates, ignore_index=True))
    return draw(experiment, args)


def draw(experiment: Experiment, args: Args) -> int:
    """The table, from runs.csv alone."""
    folder = experiment.of(args, output=True)
    runs = kept_table(folder / "runs.csv")
    text = markdown(experiment.table(runs))
    commits = ", ".join(sorted(set(runs["commit"])))
    (folder / f"{experiment.name}.md").write_text(f"{text}\n± is a 95 % interval over seeds. commit: {commits}\n")
    print(text)
    return 0


def keep_tables(folder: Path, runs: pd.DataFrame, updates: pd.DataFrame) -> None:
    """runs.csv and updates.csv of a folder. Rows of other runs that they have already are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, fresh, form in (("runs", runs, "%.6g"), ("updates", updates, "%.5g")):
        path = folder / f"{name}.csv"
        if path.is_file():
            old = kept_table(path)
            others = old[~pd.MultiIndex.from_frame(old[KEYS]).isin(pd.MultiIndex.from_frame(fresh[KEYS]))]
            fresh = pd.concat([others, fresh], ignore_index=True)
            fresh = fresh.sort_values("variant", key=lambda names: pd.factorize(names)[0], kind="stable")
        fresh.to_csv(path, index=False, float_format=form)


def kept_table(path: Path) -> pd.DataFrame:
    """A committed table."""
    try:
        return pd.read_csv(path, dtype={"variant": str, "commit": str})  # either may be made of digits alone
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def main(experiment: Experiment, description: str) -> None:
    """The command line of an experiment: run, report or draw."""
    commands = {"run": run, "report": report, "draw": draw}
    command, words = (sys.argv[1], sys.argv[2:]) if sys.argv[1:] else ("", [])
    if command not in commands:
        print(description)
        sys.exit(0 if command in ("-h", "--help") else 2)
    args = tyro.cli(Args, args=words, description=description)
    run_script(lambda: sys.exit(commands[command](experiment, checked(args))))


# ---- Statistics ------------------------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval, by Student's distribution; nan with fewer than two values."""
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return mean, math.nan
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1) / count)
    return mean, float(scipy.stats.t.ppf(0.975, count - 1)) * error


def p_value(values: Sequence[float]) -> float:
    """How likely a mean so far from 0 is by chance, by Student's distribution; nan with fewer than two values.

    If all values are equal, 1 for those that are 0, and 0 for others.
    """
    mean, half = interval(values)
    count = len(values)
    if count < 2:
        return math.nan
    if half == 0:
        return float(mean == 0)
    return float(2 * scipy.stats.t.sf(abs(mean) / (half / scipy.stats.t.ppf(0.975, count - 1)), count - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's corrected values of all of them together: with m of them, the smallest is multiplied by m, the next by
    m - 1, and so on; none is smaller than one before it, and none above 1. nan stays, and does not count.
    """
    order = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    corrected, least = [math.nan] * len(p_values), 0.0
    for rank, (p, i) in enumerate(order):
        corrected[i] = least = max(least, min(1.0, p * (len(order) - rank)))
    return corrected


def cell(values: pd.Series, form: str) -> str:
    """Mean and interval as a cell of a table; nothing where nothing was measured."""
    values = values.dropna()
    if not len(values):
        return ""
    mean, half = interval(list(values))
    return f"{mean:{form}} ± {half:{form}}"
