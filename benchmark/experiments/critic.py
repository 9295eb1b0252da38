"""What four methods for the critic do on longer chains: rlvr_policy.py on sums-long, five seeds of each.

    python benchmark/experiments/critic.py run --workers 2          # all of them; repeat it to resume
    python benchmark/experiments/critic.py run --only gae rloo      # some of them, by name
    python benchmark/experiments/critic.py report                   # table and picture of what has finished
    python benchmark/experiments/critic.py draw                     # both again, from its tables

The problems have up to six steps. `gae` is PPO with a critic as in the preset sums. Each other variant with a critic
changes one thing of it, and `all` all four:

    critic_lam     the critic's targets are sums of rewards: lambda 1 in place of 0.95
    lam_alpha      the policy's lambda is 1 - 1 / length, which is 0.95 at 20 tokens, and higher for longer responses
    pretraining    the critic learns alone, with targets of lambda 1, until it explains 0.3 of the variance, for at
                   most 12 updates; the others have 3 updates in which it learns alone
    nll            a likelihood loss on correct responses, times 0.1

`rloo` has groups of eight in place of the critic. All runs have the same number of episodes, so what the critic takes
to learn alone, the policy lacks. Runs of a seed with a critic have the same problems in the same order, and the same
sampling noise.

Means over runs have 95 % intervals over seeds, Student's.
"""

import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
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
SCRIPT = ROOT / "ppo_rlhf/rlvr_policy.py"
METHODS = {
    "critic_lam": "--ppo.critic_lam 1",
    "lam_alpha": "--ppo.lam_alpha 1",
    "pretraining": "--ppo.critic_warmup 12 --ppo.critic_explains 0.3",
    "nll": "--ppo.nll_coef 0.1",
}
VARIANTS = {"gae": advantage("gae")}
VARIANTS |= {name: f"{advantage('gae')} {words}" for name, words in METHODS.items()}
VARIANTS |= {"all": f"{advantage('gae')} {' '.join(METHODS.values())}", "rloo": advantage("rloo")}

# ---- What is run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Args:
    only: tuple[str, ...] = tuple(VARIANTS)
    """which runs"""
    seeds: int = 5
    """how many seeds of each"""
    workers: int = 1
    """how many runs at once"""
    folder: Path = ROOT / "benchmark" / "runs" / "critic"
    """where runs are kept"""
    output: Path = ROOT / "benchmark" / "results" / "critic"
    """folder that gets runs.csv, updates.csv and critic.md"""
    pictures: Path = ROOT / "static"
    """folder that gets critic.png"""
    policy: str = (
        "--preset sums --base_model sums-long --task.problems sums-long --task.prompt_length 72 "
        "--task.response_length 120 --ppo.batch_size 128 --ppo.total_episodes 4096"
    )
    """what all runs have in common: arguments of rlvr_policy.py"""
    any_commit: bool = False
    """go on with runs that another commit of this project began"""


def jobs_of(args: Args, name: str, seeds: Iterable[int]) -> list[many_seeds.Job]:
    """The jobs of one variant, one for each seed."""
    command = f"python {shlex.quote(str(SCRIPT))} {args.policy} {EVALUATION} {QUIET} {VARIANTS[name]}"
    common = {"name": name, "command": command, "num_seeds": 1, "folder": args.folder}
    experiments = (many_seeds.Args(**common, start_seed=seed, any_commit=args.any_commit) for seed in seeds)
    return [job for experiment in experiments for job in many_seeds.find_jobs(experiment)]


def run(args: Args) -> int:
    """Train all policies and report. Returns the exit status."""
    if unknown := set(args.only) - set(VARIANTS):
        raise InputError(f"--only {' '.join(sorted(unknown))}: there are {', '.join(VARIANTS)}")
    jobs = [job for name in args.only for job in jobs_of(args, name, range(1, args.seeds + 1))]
    jobs.sort(key=lambda job: job.seed)  # a whole comparison of one seed first
    launcher = many_seeds.Args(name="critic", workers=args.workers)
    many_seeds.run_here(launcher, jobs)
    if any(job.state == "finished" for job in jobs):
        report(args)
    return many_seeds.report(launcher, jobs)


# ---- Report ----------------------------------------------------------------------------------------------------

EXPLAINED, MOVED = "val/explained_var", "policy/approxkl_avg"
CURVES = (RIGHT, EXPLAINED)
LAST = 3  # updates at the end that are averaged


def read_runs(args: Args) -> tuple[pd.DataFrame, pd.DataFrame]:
    """One row per finished run, with its last evaluation; one per update, with CURVES."""
    runs, updates = [], []
    for name in VARIANTS:
        for seed in range(1, args.seeds + 1):
            for file in (args.folder / name / f"seed{seed}" / "runs").glob("*/meta.json"):
                meta = read_meta(file.parent)
                if not meta["finished"]:
                    continue
                table = read_numbers(file.with_name("metrics.csv"))
                whose = {"variant": name, "seed": seed}
                found = {"samples": meta["results"][SAMPLES], "greedy": meta["results"][GREEDY]}
                found["course"] = table[RIGHT].mean()
                if EXPLAINED in table:
                    found["alone"] = int((table[MOVED] > 1e-8).to_numpy().argmax())
                    found["explained"] = table[EXPLAINED].iloc[found["alone"]]  # as the policy begins to learn
                    found["explained_last"] = table[EXPLAINED].tail(LAST).mean()
                runs.append(whose | found | {"commit": meta["commit"][:7]})
                columns = [column for column in CURVES if column in table]
                updates.append(table[["step", "episode", *columns]].assign(**whose))
    if not runs:
        raise InputError(f"{args.folder} holds no finished run")
    return pd.DataFrame(runs), pd.concat(updates, ignore_index=True)


SHARES = {"while it learns": "course", "samples after it": "samples", "greedy after it": "greedy"}


def table_of(runs: pd.DataFrame) -> list[dict[str, str]]:
    """One row for each variant; differences are from the run of gae of the same seed."""
    plain, rows = runs[runs["variant"] == "gae"].set_index("seed"), []
    for name, own in runs.groupby("variant", sort=False):
        row = {"variant": f"`{name}`", "seeds": str(len(own))}
        for words, column in SHARES.items():
            row[f"right, {words} (%)"] = cell(100 * own[column], ".1f")
        more = own.set_index("seed")["samples"] - plain["samples"] if name != "gae" else pd.Series(dtype=float)
        row["more samples than gae"] = cell(100 * more, "+.1f")
        row["updates of the critic alone"] = cell(own["alone"], ".1f")
        row["then explained"] = cell(own["explained"], ".2f")
        rows.append(row | {"explained at the end": cell(own["explained_last"], ".2f")})
    return rows


def report(args: Args) -> int:
    """Write table and picture of what is finished."""
    keep_tables(args.output, *read_runs(args))
    return draw(args)


def draw(args: Args) -> int:
    """Table and picture once more, from runs.csv and updates.csv."""
    runs, updates = kept_tables(args.output)
    text = markdown(table_of(runs))
    commits = ", ".join(sorted(set(runs["commit"].astype(str))))
    (args.output / "critic.md").write_text(f"{text}\n± is a 95 % interval over seeds. commit: {commits}\n")
    args.pictures.mkdir(parents=True, exist_ok=True)
    picture_of(updates).savefig(args.pictures / "critic.png", dpi=110)
    print(text)
    return 0


COLORS = dict(zip(VARIANTS, ("black", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#888888"), strict=True))


def picture_of(updates: pd.DataFrame) -> Figure:
    """Right samples, and the share of the returns' variance that the critic explains: means over seeds, smoothed."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    panels = figure.subplots(1, 2)
    for name, color in COLORS.items():
        own = updates[updates["variant"] == name]
        for axes, column in zip(panels, CURVES, strict=True):
            if not len(own) or own[column].isna().all():
                continue
            seeds = own.pivot(index="step", columns="seed", values=column).dropna()
            seeds = seeds.rolling(LAST, center=True, min_periods=1).mean()
            means, _ = zip(*(interval(list(row)) for row in seeds.to_numpy()), strict=True)
            style = "--" if name in ("gae", "rloo") else "-"
            axes.plot(seeds.index, means, style, label=name, color=color, linewidth=1.6)
    for axes, title in zip(panels, ("right samples, problems not seen before", "explained variance"), strict=True):
        finish_panel(axes, title)
    panels[1].set_ylim(-0.25, 1)
    panels[0].legend(fontsize=8, frameon=False)
    return figure


COMMANDS = {"run": run, "report": report, "draw": draw}


def main(argv: list[str]) -> int:
    return many_seeds.command_line(COMMANDS, Args, __doc__, argv)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as error:
        exit_with(str(error))
