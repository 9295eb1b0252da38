"""What happens if the tool's tokens are trained on: rlvr_tools.py on sums-tools, five seeds of each.

    python benchmark/experiments/tools.py run --workers 2           # all of them; repeat it to resume
    python benchmark/experiments/tools.py report                    # the table of what has finished
    python benchmark/experiments/tools.py draw                      # the picture again, from its tables
    # the mistake alone, with arguments of rlvr_tools.py
    python benchmark/experiments/tools.py with in-the-loss --preset sums-tools

A run with the mistake treats the tool's tokens as if the policy had sampled them: they are in loss, KL and advantage.
Their old log-probs are those of the policy that sampled the rest. Everything else is the same: problems, their order,
sampling noise, and the language model that all runs start from. In that model's training, the tool's tokens were
masked, too.

Means over runs have 95 % intervals over seeds, Student's.
"""

import json
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
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
    cell,
    finish_panel,
    keep_tables,
    kept_tables,
)
from ppo_rlhf import rlvr_tools
from ppo_rlhf.lib import cli, lm
from ppo_rlhf.lib.errors import InputError, exit_with, run_script
from ppo_rlhf.lib.run import read_meta

ROOT = Path(__file__).resolve().parents[2]
MASKED, MISTAKE = VARIANTS = ("masked", "in-the-loss")
CURVES = (RIGHT, "policy/grad_norm", "policy/approxkl_avg", "policy/clipfrac_avg")

# ---- What is run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Args:
    seeds: int = 5
    """how many seeds of each"""
    workers: int = 1
    """how many runs at once"""
    folder: Path = ROOT / "benchmark" / "runs" / "tools"
    """where runs are kept"""
    output: Path = ROOT / "benchmark" / "results" / "tools"
    """folder that gets runs.csv, updates.csv and tools.md"""
    pictures: Path = ROOT / "static"
    """folder that gets tools.png"""
    policy: str = "--preset sums-tools"
    """what all runs have in common: arguments of rlvr_tools.py"""
    any_commit: bool = False
    """go on with runs that another commit of this project began"""


def with_mistake(name: str, argv: list[str]) -> Callable[[], Any]:
    """What rlvr_tools.py does with these arguments and, in-the-loss, the mistake: a function without arguments."""
    if name not in VARIANTS:
        raise InputError(f"{name} is none of {', '.join(VARIANTS)}")
    if name == MISTAKE:
        rlvr_tools.converse = without_holes(rlvr_tools.converse)
    return lambda: rlvr_tools.train(cli.parse_args(rlvr_tools.PRESETS, argv, rlvr_tools.__doc__))


def without_holes(converse: Callable) -> Callable:
    """A sampler that gives the tool's tokens the log-probs that the policy has for them, in place of NaN."""

    @torch.no_grad()
    def changed(
        model: Any,
        contexts: Any,
        uniforms: Any,
        pad_id: int,
        vocab_size: int,
        temperature: float,
        *others: Any,
        **talk: Any,
    ) -> Any:
        responses, logprobs = converse(model, contexts, uniforms, pad_id, vocab_size, temperature, *others, **talk)
        whole = torch.cat([contexts, responses], 1)
        read, _ = lm.response_statistics(model, whole, responses, pad_id, temperature, vocab_size)
        return responses, torch.where(logprobs.isnan(), read.to(logprobs.dtype), logprobs)

    return changed


def jobs_of(args: Args, name: str, seeds: Iterable[int]) -> list[many_seeds.Job]:
    """The jobs of one variant, one for each seed."""
    command = f"python {shlex.quote(__file__)} with {name} {args.policy} {EVALUATION} {QUIET}"
    common = {"name": name, "command": command, "num_seeds": 1, "folder": args.folder}
    experiments = (many_seeds.Args(**common, start_seed=seed, any_commit=args.any_commit) for seed in seeds)
    return [job for experiment in experiments for job in many_seeds.find_jobs(experiment)]


def run(args: Args) -> int:
    """Train all policies and report. Returns the exit status."""
    jobs = [job for name in VARIANTS for job in jobs_of(args, name, range(1, args.seeds + 1))]
    jobs.sort(key=lambda job: job.seed)  # both runs of a seed first
    launcher = many_seeds.Args(name="tools", workers=args.workers)
    many_seeds.run_here(launcher, jobs)
    if any(job.state == "finished" for job in jobs):
        report(args)
    return many_seeds.report(launcher, jobs)


# ---- Report ----------------------------------------------------------------------------------------------------


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
                responses = [
                    json.loads(line)["response"]
                    for line in file.with_name("evaluation.jsonl").read_text().splitlines()
                ]
                found["calls"] = sum(response.count("]") for response in responses) / len(responses)
                found["errors"] = sum(response.count("error: ") for response in responses) / len(responses)
                found |= {column: table[column].mean() for column in CURVES}
                runs.append(whose | found | {"commit": meta["commit"][:7]})
                updates.append(table[["step", "episode", *CURVES]].assign(**whose))
    if not runs:
        raise InputError(f"{args.folder} holds no finished run")
    return pd.DataFrame(runs), pd.concat(updates, ignore_index=True)


SHARES = {"while it learns": RIGHT, "samples after it": "samples", "greedy after it": "greedy"}


def table_of(runs: pd.DataFrame) -> list[dict[str, str]]:
    """One row for each variant; differences are from the run of the same seed without the mistake.

    The share of correct samples while it learns is the mean of all updates. Of two policies that end with the same
    share, it tells which was faster.
    """
    masked, rows = runs[runs["variant"] == MASKED].set_index("seed"), []
    for name, own in runs.groupby("variant", sort=False):
        row = {"the tool's tokens": name.replace("-", " "), "seeds": str(len(own))}
        for words, column in SHARES.items():
            lost = own.set_index("seed")[column] - masked[column] if name == MISTAKE else pd.Series(dtype=float)
            row |= {
                f"right, {words} (%)": cell(100 * own[column], ".1f"),
                f"difference, {words}": cell(100 * lost, "+.1f"),
            }
        row |= {"calls per response": cell(own["calls"], ".2f"), "errors per response": cell(own["errors"], ".3f")}
        row |= {"gradient norm": cell(own["policy/grad_norm"], ".2f")}
        rows.append(row | {"clipped (%)": cell(100 * own["policy/clipfrac_avg"], ".2f")})
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
    (args.output / "tools.md").write_text(f"{text}\n± is a 95 % interval over seeds. commit: {commits}\n")
    args.pictures.mkdir(parents=True, exist_ok=True)
    picture_of(updates).savefig(args.pictures / "tools.png", dpi=110)
    print(text)
    return 0


SMOOTHED = 7  # updates: one has few problems


def picture_of(updates: pd.DataFrame) -> Figure:
    """Right samples over updates: the mean of the seeds, each smoothed over SMOOTHED updates, and its interval."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, color in zip(VARIANTS, ("#0072b2", "#d55e00"), strict=True):
        own = updates[updates["variant"] == name]
        if not len(own):
            continue
        seeds = own.pivot(index="step", columns="seed", values=RIGHT).dropna()
        seeds = seeds.rolling(SMOOTHED, center=True, min_periods=1).mean()
        mean, half = map(pd.Series, zip(*(interval(list(row)) for row in seeds.to_numpy()), strict=True))
        axes.plot(seeds.index, mean, label=name.replace("-", " "), color=color, linewidth=1.6)
        axes.fill_between(seeds.index, mean - half, mean + half, color=color, alpha=0.15, linewidth=0)
    finish_panel(axes, "right samples,\nproblems not seen before")
    axes.legend(fontsize=8, frameon=False, title="the tool's tokens", title_fontsize=8)
    return figure


COMMANDS = {"run": run, "report": report, "draw": draw}


def main(argv: list[str]) -> int:
    if argv[:1] == ["with"] and len(argv) >= 2:
        run_script(with_mistake(argv[1], argv[2:]))
        return 0
    return many_seeds.command_line(COMMANDS, Args, __doc__, argv)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as error:
        exit_with(str(error))
