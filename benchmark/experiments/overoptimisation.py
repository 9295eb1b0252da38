"""Over-optimisation on tales: gold score and proxy score against the distance from the language model.

    python benchmark/experiments/overoptimisation.py --runs '320 labels=benchmark/runs/overoptimisation-320/*/runs/*'
    # draw and fit the committed runs again
    python benchmark/experiments/overoptimisation.py --runs benchmark/results/overoptimisation/overoptimisation.csv

PPO sees the proxy, a reward model. What we want is the gold score, which only a simulated annotator can know. Without
a controller and with a small KL coefficient the policy wanders off, and the two part. Both are drawn over d = sqrt(KL
from the language model), less their mean for the language model and in its standard deviations, as `comparison.jsonl`
of train_both.py has them.

Gao, Schulman and Hilton 2022 (Scaling laws for reward model overoptimization, arXiv 2210.10760) find for the gold
score

    R(d) = d (alpha - beta log d)

in reinforcement learning. alpha and beta are fitted here by least squares over all updates of all seeds, with d > 0.
R rises until log d = alpha / beta - 1, and falls from there. The intervals hold the middle 95 % of fits to seeds
drawn with replacement. With four seeds that is too narrow: about eight in ten of such intervals would hold the true
number.
"""

import glob
import itertools
import json
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import tyro
from matplotlib.figure import Figure

from benchmark.curves.compare import COLORS, markdown
from ppo_rlhf.lib.errors import InputError, exit_with
from ppo_rlhf.lib.run import find_path, read_meta

WINDOW = 5  # updates of a run that are averaged for a point of the picture
RESAMPLINGS = 2000
STYLES = ("-", "--", ":", "-.")  # one for each seed
GOLD, PROXY = "objective/gold_scores", "objective/raw_score"


@dataclass(frozen=True)
class Args:
    runs: tuple[str, ...]
    """experiments, each as name=pattern of the folders of its policy runs; or one overoptimisation.csv"""
    output: Path = Path("overoptimisation")
    """folder that gets overoptimisation.csv and .md"""
    figure: Path | None = None
    """the picture; by default overoptimisation.png in the same folder"""


def read_run(folder: Path) -> pd.DataFrame:
    """One row per update of a policy run: seed, update, d, and gold and proxy as the module's docstring has them.

    And what share of held-out comparisons the reward model finds: accuracy, in %.
    """
    meta = read_meta(folder)
    try:
        metrics = pd.read_csv(folder / "metrics.csv")
        rows = [json.loads(line) for line in (folder / "comparison.jsonl").read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} is not a finished policy run of train_both.py: {error}") from error
    table = pd.DataFrame({"seed": meta["args"]["seed"], "update": metrics["step"]})
    table["d"] = np.sqrt(metrics["objective/kl"].clip(lower=0))
    for name, column, key in (("gold", GOLD, "base gold"), ("proxy", PROXY, "base score")):
        own = [row[key] for row in rows]
        table[name] = (metrics[column] - statistics.fmean(own)) / statistics.stdev(own)
    trained_model = find_path(meta["args"]["rewards"]["trained_model"], folder.resolve().parent.parent)
    learned = read_meta(folder.parent / trained_model.parent.name)["results"]
    if "test_accuracy" not in learned:
        raise InputError(f"{trained_model.parent.name} says nothing of held-out comparisons")
    return table.assign(accuracy=100 * learned["test_accuracy"], commit=meta["commit"][:7])


def read_experiments(args: Args) -> dict[str, pd.DataFrame]:
    """The rows of all runs of each experiment, seeds in order."""
    if len(args.runs) == 1 and args.runs[0].endswith(".csv"):
        try:
            table = pd.read_csv(args.runs[0], dtype={"commit": str})
            return {str(name): rows for name, rows in table.groupby("experiment", sort=False)}
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"--runs {args.runs[0]} cannot be read: {error}") from error
    experiments = {}
    for word in args.runs:
        name, _, pattern = word.partition("=")
        folders = [folder for folder in sorted(glob.glob(pattern)) if (Path(folder) / "comparison.jsonl").exists()]
        if not folders:
            raise InputError(f"--runs {word}: no finished policy run of train_both.py; write name=pattern")
        if name in experiments:
            raise InputError(f"--runs {word}: {name} is there twice")
        table = pd.concat([read_run(Path(folder)) for folder in folders], ignore_index=True)
        experiments[name] = table.sort_values(["seed", "update"]).assign(experiment=name)
    return experiments


def fit(d: np.ndarray, gold: np.ndarray) -> tuple[float, float]:
    """alpha and beta of gold = d (alpha - beta log d), by least squares over d > 0."""
    d, gold = d[d > 0], gold[d > 0]
    (alpha, beta), *_ = np.linalg.lstsq(np.stack([d, -d * np.log(d)], axis=1), gold, rcond=None)
    return float(alpha), float(beta)


def fit_with_intervals(table: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """alpha and beta (2,), and their bootstrap intervals over seeds (2, 2): lower ends, upper ends."""
    seeds = [group for _, group in table.groupby("seed")]
    random = np.random.default_rng(0)
    fits = []
    for _ in range(RESAMPLINGS):
        drawn = [seeds[i] for i in random.integers(len(seeds), size=len(seeds))]
        fits.append(fit(np.concatenate([t["d"] for t in drawn]), np.concatenate([t["gold"] for t in drawn])))
    return np.array(fit(table["d"].to_numpy(), table["gold"].to_numpy())), np.percentile(fits, [2.5, 97.5], axis=0)


def summarise(name: str, table: pd.DataFrame) -> dict[str, str]:
    """One row: what the reward models had learned, and the fit."""
    (alpha, beta), (low, high) = fit_with_intervals(table)
    peak = math.exp(min(alpha / beta - 1, 100)) if beta > 0 else math.inf
    return {
        "experiment": name,
        "seeds": str(table["seed"].nunique()),
        "reward models find": ", ".join(f"{x:.0f} %" for x in table.groupby("seed")["accuracy"].first()),
        "alpha": f"{alpha:.2f} [{low[0]:.2f}, {high[0]:.2f}]",
        "beta": f"{beta:.2f} [{low[1]:.2f}, {high[1]:.2f}]",
        "largest d seen": f"{table['d'].max():.1f}",
        "R is largest at d =": f"{peak:.1f}" if peak < table["d"].max() else "not seen",
        "commit": ", ".join(sorted(set(table["commit"]))),
    }


def describe_seed(seed: pd.DataFrame) -> dict[str, str]:
    """One row: where a seed's gold score was highest, and both scores at the end, means over WINDOW updates."""
    smooth = seed[["d", "gold", "proxy"]].rolling(WINDOW).mean()
    best, last = smooth.loc[smooth["gold"].idxmax()], smooth.iloc[-1]
    return {
        "experiment": seed["experiment"].iloc[0],
        "seed": str(seed["seed"].iloc[0]),
        "reward model finds": f"{seed['accuracy'].iloc[0]:.0f} %",
        "highest gold score": f"{best['gold']:.1f} at d = {best['d']:.1f}",
        "gold score at the end": f"{round(last['gold'], 1) + 0.0} at d = {last['d']:.1f}",  # + 0.0: no -0.0
        "proxy score at the end": f"{last['proxy']:.1f}",
    }


def draw(experiments: dict[str, pd.DataFrame], path: Path) -> None:
    """One panel per experiment, one style of line per seed."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, len(experiments), sharey=True, sharex=True, squeeze=False)[0]
    for axes, (name, table) in zip(panels, experiments.items(), strict=True):
        alpha, beta = fit(table["d"].to_numpy(), table["gold"].to_numpy())
        for (_, seed), style in zip(table.groupby("seed"), itertools.cycle(STYLES)):
            smooth = seed[["d", "gold", "proxy"]].rolling(WINDOW).mean()
            for score, color in zip(("gold", "proxy"), COLORS, strict=True):
                axes.plot(smooth["d"], smooth[score], color=color, linestyle=style, linewidth=1.1)
            axes.plot([], [], color="gray", linestyle=style, label=f"{seed['accuracy'].iloc[0]:.0f} %")
        d = np.linspace(0.05, table["d"].max(), 200)
        axes.plot(d, d * (alpha - beta * np.log(d)), color="black", linewidth=2.5, alpha=0.4)
        axes.set_title(f"{name}\n$\\alpha$ = {alpha:.2f}, $\\beta$ = {beta:.2f}", fontsize=10)
        axes.set_xlabel("d = sqrt(KL from the language model)", fontsize=9)
        axes.legend(title="reward model finds", fontsize=8, title_fontsize=8, loc="upper left", frameon=False)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("gain, in standard deviations of the\nlanguage model's scores", fontsize=9)
    lines = [panels[0].plot([], [], color=color, linewidth=2)[0] for color in COLORS]
    lines += panels[0].plot([], [], color="black", linewidth=2.5, alpha=0.4)
    names = ["gold score", "proxy score (reward model)", "fit of all gold scores: $d\\,(\\alpha - \\beta\\,\\log d)$"]
    figure.legend(lines, names, loc="outside upper center", ncols=3, fontsize=9, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(args: Args) -> int:
    experiments = read_experiments(args)
    every = pd.concat(experiments.values(), ignore_index=True)
    fits = markdown([summarise(name, table) for name, table in experiments.items()])
    seeds = markdown([describe_seed(seed) for _, seed in every.groupby(["experiment", "seed"], sort=False)])
    args.output.mkdir(parents=True, exist_ok=True)
    draw(experiments, args.figure or args.output / "overoptimisation.png")
    every.to_csv(args.output / "overoptimisation.csv", index=False, float_format="%.5g")
    (args.output / "overoptimisation.md").write_text(f"{fits}\n{seeds}")
    print(fits, seeds, sep="\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Args, description=__doc__)))
    except (InputError, OSError) as error:
        exit_with(str(error))
