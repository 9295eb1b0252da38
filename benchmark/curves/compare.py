"""Compare learning curves with published ones: verdict at fixed updates, exit status. replay.py draws them.

    # our runs of a task against OpenAI's, and against those of lm-human-preference-details
    python benchmark/curves/compare.py --ours 'benchmark/runs/sentiment/*/runs/*' --theirs openai/lm-human-preferences
    # your runs of the small world against those of this repository
    python benchmark/curves/compare.py --ours 'runs/*' --theirs benchmark/results/tales/curves.csv
    # what is known to agree: one published implementation against the other
    python benchmark/curves/compare.py --ours lm-human-preference-details --theirs openai/lm-human-preferences

A set of curves is given as run folders (patterns of the shell), as a CSV file that this script wrote, or as the name
of an implementation in reference/lm_human_preferences.csv. Runs are grouped by preset. The seeds of a preset become
their mean and their standard deviation (with n - 1) at each update. Both are smoothed as in the published figures:
every run is interpolated onto 10,000 points, mean and deviation are taken at each point, and both are averaged over a
centred window of 100 points, one hundredth of the figure's x axis. Between two updates the noise of both is averaged,
so these deviations are up to a fifth below those at single updates.

The verdict takes the difference of the two means at a few updates and divides it by its standard error:

    z = (ours - theirs) / sqrt(std_ours^2 / n_ours + std_theirs^2 / n_theirs + reading_error^2)

Inside is |z| <= 3. With ten seeds on either side that is a distance of 1.3 standard deviations over seeds. The means
are averaged over a window and the deviations are not those of such averages but larger, so with ten seeds z is too
small rather than too large, and a small difference may pass. With few seeds the deviations themselves are uncertain,
and points fall outside by chance. A deviation that could not be read from a figure, that of a single seed, or one
that is nothing but rounding, below a millionth of the mean, as of seeds that are nearly equal, is taken to be the
other side's; where neither is known, a point is not judged. Means that agree to rounding, of seeds that do so too,
are inside. The exit status is 0 if all are inside, 1 if not, 2 for bad input.
"""

import glob
import math
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tyro

from ppo_rlhf.train_policy import InputError, read_meta, run_script, write_json

REFERENCE = Path(__file__).resolve().parent / "reference"
GRID = 10_000  # points per curve, and
WINDOW = 100  # points per window, as openrlbenchmark has it
POINTS = 100  # of a curve in curves.csv, at most
CHECKPOINTS = (100, 250, 500, 1000, 1500)  # updates, and the last
Z_LIMIT = 3.0
ROUNDING = 1e-6  # of a mean; curves.csv keeps six digits
LEAST = 1e-12  # what is smaller is rounding, whatever the mean
PUBLISHED_FIGURES = ("ours1.png", "lm-human-preference.png")  # the first shows deviations
PUBLISHED_SEEDS = {"sentiment": 10, "descriptiveness": 10, "tldr": 1}
FEW_SEEDS = 5
HIDDEN_PIXELS = 1.7  # a band that the line hides is narrower than this

# Section by section, in the order of the published figure.
METRICS = (
    "objective/scores",
    "objective/gold_scores",
    "objective/kl",
    "objective/kl_coef",
    "objective/entropy",
    "objective/score_total",
    "objective/non_score_reward",
    "ppo/loss/total",
    "ppo/loss/value",
    "ppo/loss/policy",
    "ppo/policy/clipfrac",
    "ppo/policy/entropy",
    "ppo/policy/approxkl",
    "ppo/returns/mean",
    "ppo/returns/var",
    "ppo/val/clipfrac",
    "ppo/val/error",
    "ppo/val/mean",
    "ppo/val/var",
    "ppo/val/vpred",
    "ppo/val/var_explained",
    "train_reward/minibatch/loss",
)


@dataclass(frozen=True)
class Args:
    ours: tuple[str, ...]
    """run folders (patterns in quotes), a curves.csv, or the name of a published implementation"""
    theirs: str = ""
    """a curves.csv, the name of a published implementation, or nothing: then curves are only aggregated"""
    output: Path = Path("comparison")
    """folder that gets curves.csv, verdict.md and verdict.csv"""
    metrics: tuple[str, ...] = METRICS
    """which metrics, where both sides have them"""


# ----------------------------------------------------------------------------------------------------------------
# Curves: a table with the columns implementation, task, metric, update, mean, std, seeds, window, mean_error.
# window: of the smoothing, in updates; mean_error: of reading a figure. nan: not known.
# ----------------------------------------------------------------------------------------------------------------


def read_runs(folders: Iterable[Path]) -> tuple[dict[str, list[pd.DataFrame]], dict[str, list[str]]]:
    """Metrics of finished runs and what the runs say of themselves.

    Returns {task: one table per run, indexed by update} and {"commit": [...], "device": [...], "versions": [...]}.
    The runs of reward models are among them; their index is the step of their own training.
    """
    runs: dict[str, list[pd.DataFrame]] = {}
    seen: dict[tuple, Path] = {}
    arguments: dict[tuple, dict[str, Any]] = {}
    facts: dict[str, set[str]] = {"commit": set(), "device": set(), "versions": set()}
    for folder in sorted(folders):
        meta = read_meta(folder)
        table = read_numbers(folder / "metrics.csv").set_index("step")
        try:
            finished, task, seed = meta["finished"], meta["args"]["preset"], meta["args"]["seed"]
        except KeyError as error:
            raise InputError(f"{folder / 'meta.json'} was damaged: it has no {error}") from error
        if not finished:
            print(f"left out, because it is not finished: {folder}")
            continue
        kind = "policy" if "ppo" in meta["args"] else "reward model"
        if (task, kind, seed) in seen:
            raise InputError(
                f"{folder} and {seen[task, kind, seed]} are both a {kind}, {task}, seed {seed}; choose one"
            )
        seen[task, kind, seed] = folder
        own = shared_arguments(meta["args"])
        expected = arguments.setdefault((task, kind), own)
        if own != expected:
            differing = sorted(name for name in own if own[name] != expected.get(name))
            raise InputError(f"{folder} has other arguments than another seed of {task}: {', '.join(differing)}")
        facts["commit"].add(meta["commit"])
        facts["device"].add(f"{meta['device']}, {meta['num_processes']} x {meta['threads']} threads")
        facts["versions"].add(", ".join(f"{name} {version}" for name, version in meta["versions"].items()))
        runs.setdefault(task, []).append(table)
    if not runs:
        raise InputError("none of these runs is finished")
    return runs, {name: sorted(values) for name, values in facts.items()}


def shared_arguments(args: dict[str, Any]) -> dict[str, Any]:
    """The arguments that must be the same for all seeds."""
    rewards = {name: value for name, value in args.get("rewards", {}).items() if name != "trained_model"}
    return {name: value for name, value in args.items() if name not in ("seed", "resume")} | {"rewards": rewards}


def smooth(seeds: Sequence[pd.Series], window: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One metric of several seeds, smoothed as in the published figures.

    seeds: values, indexed by update; window: updates. Returns updates, mean and deviation over seeds (nan if there is
    one), each (points,).
    """
    first, last = min(series.index[0] for series in seeds), max(series.index[-1] for series in seeds)
    x = np.linspace(first, last, GRID)
    values = np.stack([np.interp(x, series.index, series) for series in seeds])
    points = max(1, round(window / max(last - first, 1) * GRID))
    table = pd.DataFrame(values.T)

    def roll(curve: pd.Series) -> np.ndarray:
        return curve.rolling(points, min_periods=1, center=True).mean().to_numpy()

    return x, roll(table.mean(axis=1)), roll(table.std(axis=1))


def aggregate(runs: dict[str, list[pd.DataFrame]], metrics: Sequence[str], theirs: pd.DataFrame) -> pd.DataFrame:
    """Curves of all tasks and metrics, smoothed over the windows that theirs have, else over a hundredth of a run."""
    curves = []
    for task, tables in runs.items():
        for metric in metrics:
            seeds = [table[metric] for table in tables if metric in table]
            if not seeds:
                continue
            if any(len(series) == 0 or series.isna().any() for series in seeds):
                raise InputError(f"{metric} of {task} has gaps")
            length = int(seeds[0].index[-1])
            if any(series.index[-1] != length for series in seeds):
                raise InputError(f"the seeds of {task} differ in length")
            windows = curve_of(theirs, task, metric)["window"]
            window = windows.iloc[0] if len(windows) else length / 100
            x, mean, std = smooth(seeds, window)
            updates = sorted({*range(0, length, max(1, math.ceil(length / POINTS))), *checkpoints(length)})
            at = np.searchsorted(x, updates).clip(max=GRID - 1)
            columns = {"update": updates, "mean": mean[at], "std": std[at]}
            who = {"implementation": "ppo_rlhf", "task": task, "metric": metric}
            curves.append(pd.DataFrame(who | columns | {"seeds": len(seeds), "window": window, "mean_error": 0.0}))
    if not curves:
        raise InputError(f"these runs have none of the metrics {', '.join(metrics)}")
    return pd.concat(curves, ignore_index=True)


def published(implementation: str) -> pd.DataFrame:
    """The curves of one implementation in reference/, with their errors and the window of their smoothing."""
    table = pd.read_csv(REFERENCE / "lm_human_preferences.csv", keep_default_na=False, na_values=["NaN", ""])
    table = table[table["implementation"] == implementation]
    errors = pd.read_csv(REFERENCE / "errors.csv")
    table = table.merge(errors, how="left", on=["source_figure", "implementation", "task", "metric"])

    # Where two figures show a curve, the one that shows deviations.
    preference = table["source_figure"].map(PUBLISHED_FIGURES.index)
    table = table[preference == preference.groupby([table["task"], table["metric"]]).transform("min")].copy()

    # A window is a hundredth of the x axis of its figure.
    length = table.groupby(["source_figure", "task"])["step"].transform("max")
    table["window"] = length * WINDOW / GRID
    table["update"] = table["update"].fillna(table["step"])  # of the reward model's own training
    table["seeds"] = table["task"].map(PUBLISHED_SEEDS)

    # A band that the line hides has a deviation of at most the line's width.
    hidden = table["note"].fillna("").str.contains("std_hidden")
    table.loc[hidden, "std"] = HIDDEN_PIXELS * table.loc[hidden, "pixel"]
    return table


def read_numbers(path: Path, columns: Sequence[str] = ()) -> pd.DataFrame:
    """A table; those columns, or else all, must hold numbers."""
    try:
        table = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as a table: {error}") from error
    if not len(table):
        raise InputError(f"{path} has no rows")
    for column in columns or table.columns:
        if column in table and not pd.api.types.is_numeric_dtype(table[column]):
            raise InputError(f"{path}: {column} holds something that is not a number")
    return table


def curve_of(curves: pd.DataFrame, task: str, metric: str) -> pd.DataFrame:
    return curves[(curves["task"] == task) & (curves["metric"] == metric)]


def read_curves(path: Path) -> pd.DataFrame:
    """A curves.csv that this script wrote."""
    numbers = ("update", "mean", "std", "seeds", "window", "mean_error")
    table = read_numbers(path, numbers)
    if missing := sorted({"implementation", "task", "metric", *numbers} - set(table)):
        raise InputError(f"{path} is not a table of curves: it has no column {', '.join(missing)}")
    return table


def load(sources: Sequence[str], metrics: Sequence[str], theirs: pd.DataFrame):
    """The curves that the command line names, and what is known of the runs: (table, facts)."""
    implementations = pd.read_csv(REFERENCE / "errors.csv")["implementation"].unique()
    if len(sources) == 1 and sources[0] in implementations:
        return published(sources[0]), {}
    if len(sources) == 1 and sources[0].endswith(".csv"):
        return read_curves(Path(sources[0])), {}
    folders = {Path(match) for source in sources for match in glob.glob(source)}
    if not folders:
        raise InputError(
            f"{' '.join(sources)}: no run folder, no curves.csv and none of {', '.join(sorted(implementations))}"
        )
    runs, facts = read_runs(folders)
    return aggregate(runs, metrics, theirs), facts


# ---- Verdict ---------------------------------------------------------------------------------------------------


def checkpoints(last: int) -> list[int]:
    """The updates at which curves are compared."""
    return [*(update for update in CHECKPOINTS if update < last), last]


def value_at(curve: pd.DataFrame, column: str, update: int) -> float:
    """A column of a curve at an update: linear between its points, nan where a neighbour is unknown."""
    exact = curve[curve["update"] == update]
    if len(exact):
        return float(exact[column].iloc[0])
    return float(np.interp(update, curve["update"], curve[column]))


def standardised(ours: dict[str, float], theirs: dict[str, float]) -> float:
    """The difference of two means divided by its standard error; nan if neither deviation is known.

    Each side: mean, std, seeds, mean_error. An unknown deviation, or one of rounding, is taken to be the other's.
    """
    difference = ours["mean"] - theirs["mean"]
    stds = [side["std"] for side in (ours, theirs)]
    rounding = max(LEAST, *(ROUNDING * abs(side["mean"]) for side in (ours, theirs)))
    if all(value <= rounding for value in (abs(difference), *stds)):
        return 0.0
    known = [std for std in stds if std == 0.0 or std > rounding]
    if not known:
        return math.nan
    error = 0.0
    for side in (ours, theirs):
        std = side["std"] if side["std"] in known else known[0]
        reading = 0.0 if math.isnan(side["mean_error"]) else side["mean_error"]
        error += std**2 / side["seeds"] + reading**2
    if error == 0.0:
        return 0.0 if difference == 0.0 else math.copysign(math.inf, difference)
    return difference / math.sqrt(error)


def compare(ours: pd.DataFrame, theirs: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    """One row per task, metric and checkpoint that both sides have."""
    rows = []
    for task in ours["task"].unique():
        for metric in metrics:
            sides = [curve_of(curves, task, metric) for curves in (ours, theirs)]
            if not all(len(side) for side in sides):
                continue
            first = max(side["update"].min() for side in sides)
            last = int(min(side["update"].max() for side in sides))
            for update in checkpoints(last):
                if update < first:
                    continue
                columns = ("mean", "std", "seeds", "mean_error")
                us, them = ({name: value_at(side, name, update) for name in columns} for side in sides)
                z = standardised(us, them)
                inside = "not judged" if math.isnan(z) else "inside" if abs(z) <= Z_LIMIT else "outside"
                numbers = {
                    "ours": us["mean"],
                    "ours_std": us["std"],
                    "theirs": them["mean"],
                    "theirs_std": them["std"],
                }
                rows.append({"task": task, "metric": metric, "update": update, **numbers, "z": z, "verdict": inside})
    if not rows:
        raise InputError("the two sides have no task and metric in common")
    return pd.DataFrame(rows)


def not_compared(ours: pd.DataFrame, theirs: pd.DataFrame) -> list[str]:
    """One line for each task of ours of which they lack all curves or some."""
    lines = []
    for task in ours["task"].unique():
        own, known = (curves[curves["task"] == task]["metric"].unique() for curves in (ours, theirs))
        lacking = [metric for metric in own if metric not in known]
        if lacking:
            what = "everything" if len(lacking) == len(own) else ", ".join(lacking)
            lines.append(f"{task}, not compared, because the other side does not have it: {what}")
    return lines


def summary(verdict: pd.DataFrame) -> list[str]:
    """One line per task, and one for all."""
    lines = []
    for task, rows in verdict.groupby("task", sort=False):
        judged = rows[rows["verdict"] != "not judged"]
        worst = judged.loc[judged["z"].abs().idxmax()] if len(judged) else None
        line = f"{task}: {(judged['verdict'] == 'inside').sum()} of {len(judged)} inside"
        if worst is not None:
            line += f"; the largest |z| is {abs(worst['z']):.1f}, {worst['metric']} at update {worst['update']}"
        if len(judged) < len(rows):
            line += f"; {len(rows) - len(judged)} not judged, because no deviation is known"
        lines.append(line)
    judged = verdict[verdict["verdict"] != "not judged"]
    outside = int((judged["verdict"] == "outside").sum())
    if not len(judged):
        return [*lines, "nothing could be judged"]
    return [*lines, f"{outside} of {len(judged)} are outside" if outside else f"all {len(judged)} are inside"]


# ---- Output ----------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    return "?" if math.isnan(value) else f"{value:.3g}" if abs(value) > LEAST else "0"


def markdown(rows: Iterable[dict[str, str]]) -> str:
    rows = list(rows)
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def verdict_rows(verdict: pd.DataFrame, ours: str, theirs: str) -> list[dict[str, str]]:
    return [
        {
            "task": row.task,
            "metric": f"`{row.metric}`",
            "update": str(row.update),
            ours: f"{number(row.ours)} ± {number(row.ours_std)}",
            theirs: f"{number(row.theirs)} ± {number(row.theirs_std)}",
            "z": "?" if math.isnan(row.z) else f"{row.z:+.1f}",
            "": row.verdict if row.verdict == "inside" else f"**{row.verdict}**",
        }
        for row in verdict.itertuples()
    ]


def main(args: Args) -> int:
    theirs = pd.DataFrame(columns=["task", "metric", "window"])
    if args.theirs:
        theirs, _ = load([args.theirs], args.metrics, theirs)
    ours, facts = load(args.ours, args.metrics, theirs)
    if args.theirs and theirs["implementation"].iloc[0] == ours["implementation"].iloc[0]:
        theirs = theirs.assign(implementation=args.theirs)
    args.output.mkdir(parents=True, exist_ok=True)
    facts["command"] = [shlex.join(["python", "benchmark/curves/compare.py", *sys.argv[1:]])]
    write_json(args.output / "facts.json", facts)
    ours.to_csv(args.output / "curves.csv", index=False, float_format="%.6g")
    if not args.theirs:
        print(f"{args.output / 'curves.csv'} has the curves of {', '.join(ours['task'].unique())}")
        return 0
    verdict = compare(ours, theirs, args.metrics)
    lines = not_compared(ours, theirs) + summary(verdict)
    if (fewest := int(ours["seeds"].min())) < FEW_SEEDS:
        lines.insert(0, f"seeds: {fewest}; with fewer than {FEW_SEEDS}, points may be outside by chance")
    names = [side["implementation"].iloc[0] for side in (ours, theirs)]
    header = "".join(f"{name}: {'; '.join(values)}\n\n" for name, values in facts.items())
    verdict.to_csv(args.output / "verdict.csv", index=False, float_format="%.6g")
    table = markdown(verdict_rows(verdict, *names))
    (args.output / "verdict.md").write_text(header + table + "\n" + "\n\n".join(lines) + "\n")
    print(table, *lines, sep="\n")
    return 0 if set(verdict["verdict"]) <= {"inside", "not judged"} and "inside" in set(verdict["verdict"]) else 1


if __name__ == "__main__":
    run_script(lambda: sys.exit(main(tyro.cli(Args, description=__doc__))))
