"""Experiments that compare variants of a run over several seeds: what the scripts in experiments/ have in common.

A script declares an Experiment: the command of each variant, what is measured of a finished run, the columns of the
table, and the picture. This module runs the variants for every seed (with curves/many_seeds.py, which resumes), keeps
what it measures in runs.csv (a row for each run) and updates.csv (a row for each update), and makes table and picture
of these two alone. Means have 95 % intervals over seeds, Student's; a difference is taken seed by seed.
"""

import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import scipy.stats
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark.curves import many_seeds
from benchmark.curves.compare import markdown, read_numbers
from ppo_rlhf.lib.base.errors import InputError, exit_with
from ppo_rlhf.lib.services.run import read_meta

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmark" / "results"
KEYS = ("part", "staleness", "variant", "way", "seed")  # whose run a row is, those of them that a table has

# Of chapter 3's runs: arguments, columns of metrics.csv, and results of the last evaluation.
QUIET = "--eval_samples 2 --eval_interval 0 --log_interval 0 --trace_interval 0 --save_interval 0"
CORRECT = "objective/verifiable_correct_rate"
SAMPLES, GREEDY = "eval/mean@2", "eval/gsm8k_strict"


@dataclass(frozen=True)
class Args:
    only: tuple[str, ...] = ()
    """which variants, by name or by what their names begin with, up to a hyphen; none: all"""
    seeds: int = 5
    """how many seeds of each"""
    first_seed: int = 1
    """the first of them"""
    workers: int = 1
    """how many runs at once"""
    folder: Path | None = None
    """where runs are kept; by default benchmark/runs/<experiment>"""
    output: Path | None = None
    """folder that gets runs.csv, updates.csv and <experiment>.md; by default benchmark/results/<experiment>"""
    pictures: Path = ROOT / "static"
    """folder that gets the picture"""
    policy: str = ""
    """other arguments of the training script than those that all variants have in common"""
    any_commit: bool = False
    """go on with runs that another commit of this project began"""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table: mean and interval of a number."""

    head: str
    of: str
    form: str = ".1f"
    scale: float = 100
    paired: bool = False
    """whether it is the difference from the baseline's run of the same seed"""
    optional: bool = False
    """whether it is left out where runs.csv has no such column; otherwise its cells are empty"""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    name: str
    script: str
    """the training script, below the root"""
    common: str
    """arguments that all variants have, unless --policy gives others"""
    fixed: str = QUIET
    """further arguments that all have in any case"""
    variants: dict[str, str]
    """arguments by name"""
    curves: tuple[str, ...] = (CORRECT,)
    """columns of metrics.csv that updates.csv keeps, where a run has them"""
    measure: Callable[[Path, dict[str, Any], pd.DataFrame], dict[str, Any]]
    """(run's folder, its meta.json, its metrics.csv) -> what is measured of it"""
    labels: Callable[[str], dict[str, Any]] = field(default=lambda name: {"variant": name})
    """the columns of the CSVs that name a variant"""
    table: Callable[[pd.DataFrame], list[dict[str, str]]]
    """runs.csv -> rows"""
    picture: Callable[[pd.DataFrame, pd.DataFrame], Figure] | None = None
    """(runs.csv, updates.csv) -> the picture"""
    also: Callable[[Args], None] | None = None
    """what else a report writes"""

    def of(self, args: Args, *, output: bool = False) -> Path:
        """The folder of its runs or of its results."""
        given = args.output if output else args.folder
        return given or ROOT / "benchmark" / ("results" if output else "runs") / self.name


# ---- Run and report --------------------------------------------------------------------------------------------


def chosen(experiment: Experiment, args: Args) -> list[str]:
    """Names of the variants that were asked for."""
    found: dict[str, None] = {}
    for word in args.only or experiment.variants:
        names = [word] if word in experiment.variants else []
        names = names or [name for name in experiment.variants if name.startswith(f"{word}-")]
        if not names:
            raise InputError(f"--only {word}: there are {', '.join(experiment.variants)}")
        found |= dict.fromkeys(names)
    return list(found)


def jobs_of(experiment: Experiment, args: Args, name: str) -> list[many_seeds.Job]:
    """The jobs of a variant, one for each seed."""
    words = [args.policy or experiment.common, experiment.fixed, experiment.variants[name]]
    command = " ".join(["python", shlex.quote(str(ROOT / experiment.script)), *filter(None, words)])
    where = {"name": name, "folder": experiment.of(args), "any_commit": args.any_commit}
    return many_seeds.find_jobs(
        many_seeds.Args(command=command, num_seeds=args.seeds, start_seed=args.first_seed, **where)
    )


def run(experiment: Experiment, args: Args) -> int:
    """Train all policies and report. Returns the exit status."""
    jobs = [job for name in chosen(experiment, args) for job in jobs_of(experiment, args, name)]
    jobs.sort(key=lambda job: job.seed)  # a whole comparison of one seed first
    launcher = many_seeds.Args(name=experiment.name, workers=args.workers)
    many_seeds.run_here(launcher, jobs)
    if any(job.state == "finished" for job in jobs):
        report(experiment, args)
    return many_seeds.report(launcher, jobs)


def finished_runs(experiment: Experiment, args: Args) -> Iterator[tuple[dict[str, Any], Path, dict[str, Any]]]:
    """Whose run, its folder and its meta.json, of every finished one of the chosen variants and seeds."""
    for name in chosen(experiment, args):
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            for file in (experiment.of(args) / name / f"seed{seed}" / "runs").glob("*/meta.json"):
                meta = read_meta(file.parent)
                if meta["finished"]:
                    yield experiment.labels(name) | {"seed": seed}, file.parent, meta


def report(experiment: Experiment, args: Args) -> int:
    """Measure the finished runs, keep the numbers, and write table and picture."""
    runs, updates = [], []
    for whose, folder, meta in finished_runs(experiment, args):
        table = read_numbers(folder / "metrics.csv")
        runs.append(whose | experiment.measure(folder, meta, table) | {"commit": meta["commit"][:7]})
        columns = [name for name in ("step", "episode", *experiment.curves) if name in table]
        updates.append(table[columns].assign(**whose))
    if not runs:
        raise InputError(f"{experiment.of(args)} holds no finished run")
    keep_tables(experiment.of(args, output=True), pd.DataFrame(runs), pd.concat(updates, ignore_index=True))
    if experiment.also:
        experiment.also(args)
    return draw(experiment, args)


def draw(experiment: Experiment, args: Args) -> int:
    """Table and picture, from runs.csv and updates.csv."""
    folder = experiment.of(args, output=True)
    runs, updates = (kept_table(folder / f"{name}.csv") for name in ("runs", "updates"))
    text = markdown(experiment.table(runs))
    named = {"learning rate": "lr", "commit": "commit"}
    words = [
        f"{word}: {', '.join(sorted(set(runs[x].dropna().astype(str))))}" for word, x in named.items() if x in runs
    ]
    (folder / f"{experiment.name}.md").write_text(f"{text}\n± is a 95 % interval over seeds. {'; '.join(words)}\n")
    if experiment.picture:
        args.pictures.mkdir(parents=True, exist_ok=True)
        experiment.picture(runs, updates).savefig(args.pictures / f"{experiment.name}.png", dpi=110)
    print(text)
    return 0


def keep_tables(folder: Path, runs: pd.DataFrame, updates: pd.DataFrame) -> None:
    """runs.csv and updates.csv of a folder. Rows of other runs that they have already are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, fresh, form in (("runs", runs, "%.6g"), ("updates", updates, "%.5g")):
        path, whose = folder / f"{name}.csv", [key for key in KEYS if key in fresh]
        if path.is_file():
            old = pd.read_csv(path, dtype={"commit": str})
            others = old[~pd.MultiIndex.from_frame(old[whose]).isin(pd.MultiIndex.from_frame(fresh[whose]))]
            fresh = pd.concat([others, fresh], ignore_index=True)
            places = {value: place for place, value in enumerate(fresh[whose[0]].unique())}
            fresh = fresh.sort_values(whose[0], key=lambda column, places=places: column.map(places), kind="stable")
        fresh.to_csv(path, index=False, float_format=form)


def kept_table(path: Path) -> pd.DataFrame:
    """A committed table."""
    try:
        return pd.read_csv(path, dtype={"commit": str})
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def command_line(commands: dict[str, Callable[[Any], int]], args: type, description: str, argv: list[str]) -> int:
    """Run the command that the first argument names, with the other arguments as `args`; otherwise print the help."""
    command, words = (argv[0], argv[1:]) if argv else ("", [])
    if command in commands:
        read = tyro.cli(args, args=words, description=description)
        if read.seeds < (least := min(1, args().seeds)):
            raise InputError(f"--seeds is {read.seeds}; it must be at least {least}")
        return commands[command](read)
    print(description)
    return 0 if command in ("-h", "--help") else 2


def main(experiment: Experiment, description: str) -> None:
    """The command line of an experiment: run, report or draw."""
    commands = {
        name: lambda args, do=do: do(experiment, args)
        for name, do in (("run", run), ("report", report), ("draw", draw))
    }
    try:
        sys.exit(command_line(commands, Args, description, sys.argv[1:]))
    except InputError as error:
        exit_with(str(error))


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
    return f"{mean:{form}} ± {half:{form.removeprefix('+')}}"


def rows_of(
    runs: pd.DataFrame, columns: Sequence[Column], *, baseline: str = "", by: Sequence[str] = ("variant",)
) -> Iterator[tuple[tuple, dict[str, str]]]:
    """For each variant, the values of `by` that name it, and its row: seeds, then columns.

    baseline: a condition on a run of the variant that paired columns are compared with, whose own cells stay empty.
    """
    compared = runs.query(baseline).set_index("seed") if baseline else None
    for key, group in runs.groupby(list(by), sort=False):
        own, row = group.set_index("seed"), {"seeds": str(len(group))}
        for column in columns:
            if column.optional and column.of not in own:
                continue
            values = own.get(column.of, pd.Series(dtype=float))
            if column.paired:
                same = len(group.query(baseline)) > 0
                values = values.iloc[:0] if same else values - compared[column.of]
            row[column.head] = cell(column.scale * values, column.form)
        yield key, row


# ---- Pictures --------------------------------------------------------------------------------------------------


def draw_curve(
    axes: Axes,
    own: pd.DataFrame,
    label: str,
    *,
    column: str = CORRECT,
    smoothed: int = 7,
    band: float = 0.0,
    **style: Any,
) -> None:
    """Mean over seeds at each update, of each seed's mean over so many updates up to it; band: how visible the
    interval is. So no point looks ahead, and the first stays where it is."""
    if column not in own or own[column].isna().all():  # also if there are no rows
        return
    seeds = own.pivot(index="step", columns="seed", values=column).dropna()
    seeds = seeds.rolling(smoothed, min_periods=1).mean()
    mean, half = map(pd.Series, zip(*(interval(list(row)) for row in seeds.to_numpy()), strict=True))
    (line,) = axes.plot(seeds.index, mean, label=label, linewidth=1.6, **style)
    if band:
        axes.fill_between(seeds.index, mean - half, mean + half, color=line.get_color(), alpha=band, linewidth=0)


def finish_panel(axes: Axes, title: str, xlabel: str = "update") -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(xlabel, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
