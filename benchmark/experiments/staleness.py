"""What staleness does to learning, and what correcting for it does: rlvr_async.py on sums, five seeds of each.

    python benchmark/experiments/staleness.py run --workers 2                 # all of them; repeat it to resume
    python benchmark/experiments/staleness.py run --only 0 8-none --seeds 2   # some of them, by name
    python benchmark/experiments/staleness.py report                          # table and picture of what has finished
    python benchmark/experiments/staleness.py draw                            # the picture again, from its tables

With staleness K, a batch is sampled by the weights of K updates ago. There are four ways to take that:

    decoupled   a weight leads from the policy that has sampled to the one that learns; the clip is around the latter
    bypass      plain PPO: old log-probs are the sampler's, and the clip acts on all that has changed since
    masked      bypass, and a response that has become less likely by MASK nats per token is not blamed any more
    none        old log-probs are the learner's, and nothing makes up for the age

So `8-none` is the run with K = 8 and nothing corrected. With K = 0 the ways differ by rounding alone; it is run once.
All runs have the same number of updates and of episodes; those of a seed also have the same problems in the same
order, and the same sampling noise.

How far the sampler is off, and what the clip does, are means over the last LATER of the updates: of 32, over those
whose batches can be 8 updates old. What is clipped, and approxkl, are of the ratio in the loss: with bypass, that of
the new policy to the sampler. Means over runs have 95 % intervals over seeds, Student's.
"""

import math
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark.curves import many_seeds
from benchmark.curves.compare import markdown, read_numbers
from benchmark.experiments.ablations import interval
from benchmark.experiments.estimators import (
    EVALUATION,
    GREEDY,
    QUIET,
    RIGHT,
    SAMPLES,
    advantage,
    cell,
    finish_panel,
    keep_tables,
    kept_tables,
)
from ppo_rlhf.lib.errors import InputError, exit_with
from ppo_rlhf.lib.run import read_meta

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "ppo_rlhf/rlvr_async.py"
STALENESS = (0, 1, 2, 4, 8)
WAYS = ("decoupled", "bypass", "masked", "none")
MASK = 0.05  # nats
SAME = "any"  # the way of staleness 0

# ---- What is run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """Runs that differ in the seed alone."""

    staleness: int
    way: str

    @property
    def name(self) -> str:
        return f"{self.staleness}-{self.way}" if self.staleness else "0"

    @property
    def words(self) -> str:
        """Arguments of rlvr_async.py."""
        if self.way == "masked":
            return f"--staleness {self.staleness} --correction bypass --off_policy_mask {MASK}"
        return f"--staleness {self.staleness} --correction {self.way if self.staleness else 'none'}"


VARIANTS = [Variant(0, SAME), *(Variant(staleness, way) for staleness in STALENESS[1:] for way in WAYS)]


@dataclass(frozen=True)
class Args:
    only: tuple[str, ...] = tuple(variant.name for variant in VARIANTS)
    """which runs"""
    seeds: int = 5
    """how many seeds of each"""
    workers: int = 1
    """how many runs at once; each has a Ray of its own, with one process that samples"""
    folder: Path = ROOT / "benchmark" / "runs" / "staleness"
    """where runs are kept"""
    output: Path = ROOT / "benchmark" / "results" / "staleness"
    """folder that gets runs.csv, updates.csv and staleness.md"""
    pictures: Path = ROOT / "static"
    """folder that gets staleness.png"""
    policy: str = "--preset sums --ppo.total_episodes 4096 --ppo.batch_size 128"
    """what all runs have in common: arguments of rlvr_async.py"""
    any_commit: bool = False
    """go on with runs that another commit of this project began"""


def arguments(args: Args, variant: Variant) -> str:
    """Those of rlvr_async.py, but for the seed."""
    return f"{advantage('rloo')} {args.policy} {EVALUATION} {QUIET} {variant.words}"


def jobs_of(args: Args, variant: Variant, seeds: Iterable[int]) -> list[many_seeds.Job]:
    """The jobs of one variant, one for each seed."""
    command = f"python {shlex.quote(str(SCRIPT))} {arguments(args, variant)}"
    common = {"name": variant.name, "command": command, "num_seeds": 1, "folder": args.folder}
    experiments = (many_seeds.Args(**common, start_seed=seed, any_commit=args.any_commit) for seed in seeds)
    return [job for experiment in experiments for job in many_seeds.find_jobs(experiment)]


def run(args: Args) -> int:
    """Train all policies and report. Returns the exit status."""
    if unknown := set(args.only) - {variant.name for variant in VARIANTS}:
        names = ", ".join(variant.name for variant in VARIANTS)
        raise InputError(f"--only {' '.join(sorted(unknown))}: there are {names}")
    chosen = [variant for variant in VARIANTS if variant.name in args.only]
    jobs = [job for variant in chosen for job in jobs_of(args, variant, range(1, args.seeds + 1))]
    jobs.sort(key=lambda job: job.seed)  # a whole comparison of one seed first
    launcher = many_seeds.Args(name="staleness", workers=args.workers)
    many_seeds.run_here(launcher, jobs)
    if any(job.state == "finished" for job in jobs):
        report(args)
    return many_seeds.report(launcher, jobs)


# ---- Report ----------------------------------------------------------------------------------------------------

KL, ESS, CLIPPED, APPROX_KL = "async/kl", "async/ess", "policy/clipfrac_avg", "policy/approxkl_avg"
CURVES, MASKED = (RIGHT, KL, ESS, CLIPPED, APPROX_KL), "async/masked_share"
LATER = 0.75


def read_runs(args: Args) -> tuple[pd.DataFrame, pd.DataFrame]:
    """One row per finished run, with its evaluation and means over the last LATER; one per update, with CURVES."""
    runs, updates = [], []
    for variant in VARIANTS:
        for seed in range(1, args.seeds + 1):
            for file in (args.folder / variant.name / f"seed{seed}" / "runs").glob("*/meta.json"):
                meta = read_meta(file.parent)
                if not meta["finished"]:
                    continue
                table = read_numbers(file.with_name("metrics.csv"))
                whose = {"staleness": variant.staleness, "way": variant.way, "seed": seed}
                found = {"samples": meta["results"][SAMPLES], "greedy": meta["results"][GREEDY]}
                later = table.tail(math.ceil(LATER * len(table)))
                found |= {name: later[name].mean() for name in (*CURVES, MASKED) if name in later}
                runs.append(whose | found | {"lr": meta["args"]["ppo"]["lr"], "commit": meta["commit"][:7]})
                updates.append(table[["step", "episode", *CURVES]].assign(**whose))
    if not runs:
        raise InputError(f"{args.folder} holds no finished run")
    return pd.DataFrame(runs), pd.concat(updates, ignore_index=True)


def table_of(runs: pd.DataFrame) -> list[dict[str, str]]:
    """One row for each variant."""
    fresh, rows = runs[runs["staleness"] == 0].set_index("seed")["samples"], []
    for (staleness, way), own in runs.groupby(["staleness", "way"], sort=False):
        lost = own.set_index("seed")["samples"] - fresh if staleness else pd.Series(dtype=float)
        rows.append(
            {"staleness": str(staleness), "way": way, "seeds": str(len(own))}
            | {f"right, {of} (%)": cell(100 * own[of], ".1f") for of in ("samples", "greedy")}
            | {"beside 0, same seed": cell(100 * lost, "+.1f")}
            | {"`async/kl` (nats)": cell(own[KL], ".4f"), "`async/ess`": cell(own[ESS], ".3f")}
            | {"clipped (%)": cell(100 * own[CLIPPED], ".2f"), "`approxkl`": cell(own[APPROX_KL], ".5f")}
            | ({"masked (%)": cell(100 * own[MASKED], ".2f")} if MASKED in own else {})
        )
    return rows


def report(args: Args) -> int:
    """Write table and picture of what is finished."""
    keep_tables(args.output, *read_runs(args))
    return draw(args)


def draw(args: Args) -> int:
    """Table and picture once more, from runs.csv and updates.csv."""
    runs, updates = kept_tables(args.output)
    text = markdown(table_of(runs))
    commits, rates = (", ".join(sorted(set(runs[name].astype(str)))) for name in ("commit", "lr"))
    words = f"± is a 95 % interval over seeds. learning rate: {rates}; commit: {commits}"
    (args.output / "staleness.md").write_text(f"{text}\n{words}\n")
    args.pictures.mkdir(parents=True, exist_ok=True)
    picture_of(runs, updates).savefig(args.pictures / "staleness.png", dpi=110)
    print(text)
    return 0


# ---- Picture ---------------------------------------------------------------------------------------------------

STYLES = {SAME: ("black", "D"), "decoupled": ("#0072b2", "o"), "bypass": ("#d55e00", "s")}
STYLES |= {"masked": ("#cc79a7", "v"), "none": ("#009e73", "^")}
SHOWN = {"0": "-", "2-decoupled": "--", "8-decoupled": "-", "8-bypass": "-", "8-none": "-"}  # learning curves
SMOOTHED = 7  # updates: one has few problems


def picture_of(runs: pd.DataFrame, updates: pd.DataFrame) -> Figure:
    """Some learning curves; what is right in the end, and how far the sampler was off, over staleness."""
    figure = Figure(figsize=(11, 3.9), layout="constrained")
    curves, final, distance = panels = figure.subplots(1, 3, width_ratios=(1.25, 1, 1))
    for variant in VARIANTS:
        if variant.name in SHOWN:
            draw_curve(curves, updates, variant)
    finish_panel(curves, "right samples,\nproblems not seen before")
    draw_over_staleness(final, runs, "samples")
    finish_panel(final, "right samples, held-out problems,\nafter the last update", "staleness (updates)")
    draw_over_staleness(distance, runs[runs["staleness"] > 0], KL)  # at 0 there is rounding alone
    distance.set_yscale("log")
    finish_panel(distance, "how far the sampler is off:\nKL per token (nats)", "staleness (updates)")
    for axes in panels:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, frameon=False, title="staleness" if axes is curves else None, title_fontsize=8)
    return figure


def draw_curve(axes: Axes, updates: pd.DataFrame, variant: Variant) -> None:
    """Mean over seeds at each update, each seed smoothed over SMOOTHED updates, and the 95 % interval as a band."""
    own = updates[(updates["staleness"] == variant.staleness) & (updates["way"] == variant.way)]
    if not len(own):
        return
    seeds = own.pivot(index="step", columns="seed", values=RIGHT).dropna()
    seeds = seeds.rolling(SMOOTHED, center=True, min_periods=1).mean()
    mean, half = map(pd.Series, zip(*(interval(list(row)) for row in seeds.to_numpy()), strict=True))
    color, label = STYLES[variant.way][0], variant.name.replace("-", ", ")
    axes.plot(seeds.index, mean, SHOWN[variant.name], label=label, linewidth=1.6, color=color)
    axes.fill_between(seeds.index, mean - half, mean + half, color=color, alpha=0.12, linewidth=0)


def draw_over_staleness(axes: Axes, runs: pd.DataFrame, column: str) -> None:
    """Mean and interval of each way, side by side at each staleness; what staleness 0 gives is a line across."""
    for way, aside in zip(STYLES, (0, -0.15, -0.05, 0.05, 0.15), strict=True):
        own = runs[runs["way"] == way].groupby("staleness")[column]
        points = {STALENESS.index(staleness) + aside: interval(list(values)) for staleness, values in own}
        if not points:
            continue
        means, halves = zip(*points.values(), strict=True)
        color, marker = STYLES[way]
        style = {"color": color, "marker": marker, "markersize": 5, "capsize": 2, "linewidth": 1.4}
        axes.errorbar(list(points), means, yerr=halves, label="0" if way == SAME else way, **style)
        if way == SAME:
            axes.axhline(*means, color=color, linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(STALENESS)), map(str, STALENESS))
    axes.set_xlim(-0.4, len(STALENESS) - 0.6)


COMMANDS = {"run": run, "report": report, "draw": draw}


def main(argv: list[str]) -> int:
    return many_seeds.command_line(COMMANDS, Args, __doc__, argv)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as error:
        exit_with(str(error))
