"""Over-optimisation on tales: gold score and proxy score against the distance from the language model.

    python benchmark/overoptimisation.py --runs '320 labels=benchmark/runs/overoptimisation-320/*/runs/*'

PPO sees the proxy, a reward model. What we want is the gold score, which only a simulated annotator can know. Without
a controller and with a small KL coefficient the policy wanders off, and the two part. Both are drawn over d = sqrt(KL
from the language model), less their mean for the language model and in its standard deviations, as `comparison.jsonl`
of train_both.py has them.

Gao, Schulman and Hilton 2022 (Scaling laws for reward model overoptimization, arXiv 2210.10760) find for the gold
score

    R(d) = d (alpha - beta log d)

in reinforcement learning. alpha and beta are fitted here by least squares over all updates of all seeds, with d > 0;
the intervals (95 %) come from drawing seeds with replacement. R rises until log d = alpha / beta - 1, and falls from
there.
"""

import glob
import json
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import tyro
from compare import COLORS, markdown
from matplotlib.figure import Figure

from ppo_rlhf.run import InputError, exit_with, find_folder, read_meta

WINDOW = 5  # updates of a run that are averaged for a point of the picture
RESAMPLINGS = 2000
GOLD, PROXY = "objective/gold_scores", "objective/raw_score"


@dataclass(frozen=True)
class Args:
    runs: tuple[str, ...]
    """experiments, each as name=pattern of the folders of its policy runs"""
    output: Path = Path("overoptimisation")
    """folder that gets overoptimisation.csv, .md and .png"""


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
    trained_model = find_folder(meta["args"]["rewards"]["trained_model"], folder.resolve().parent.parent)
    learned = read_meta(folder.parent / trained_model.parent.name)["results"]
    return table.assign(commit=meta["commit"], accuracy=100 * learned["test_accuracy"])


def fit(d: np.ndarray, gold: np.ndarray) -> tuple[float, float]:
    """alpha and beta of gold = d (alpha - beta log d), by least squares over d > 0."""
    d, gold = d[d > 0], gold[d > 0]
    (alpha, beta), *_ = np.linalg.lstsq(np.stack([d, -d * np.log(d)], axis=1), gold, rcond=None)
    return float(alpha), float(beta)


def fit_with_intervals(table: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """alpha and beta (2,), and their 95 % intervals over seeds (2, 2): lower ends, upper ends."""
    seeds = [group for _, group in table.groupby("seed")]
    random = np.random.default_rng(0)
    fits = []
    for _ in range(RESAMPLINGS):
        drawn = [seeds[i] for i in random.integers(len(seeds), size=len(seeds))]
        fits.append(fit(np.concatenate([t["d"] for t in drawn]), np.concatenate([t["gold"] for t in drawn])))
    return np.array(fit(table["d"].to_numpy(), table["gold"].to_numpy())), np.percentile(fits, [2.5, 97.5], axis=0)


def main(args: Args) -> int:
    tables = {}
    for word in args.runs:
        name, _, pattern = word.partition("=")
        folders = [folder for folder in sorted(glob.glob(pattern)) if (Path(folder) / "comparison.jsonl").exists()]
        if not folders:
            raise InputError(f"--runs {word}: no finished policy run of train_both.py; write name=pattern")
        tables[name] = pd.concat([read_run(Path(folder)) for folder in folders], ignore_index=True)
    args.output.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    rows = []
    panels = figure.subplots(1, len(tables), sharey=True, sharex=True, squeeze=False)[0]
    for axes, (name, table) in zip(panels, tables.items(), strict=True):
        (alpha, beta), (low, high) = fit_with_intervals(table)
        peak = math.exp(alpha / beta - 1) if beta > 0 else math.inf
        rows.append(
            {
                "experiment": name,
                "seeds": str(table["seed"].nunique()),
                "reward models find": ", ".join(f"{x:.0f} %" for x in table.groupby("seed")["accuracy"].first()),
                "alpha": f"{alpha:.2f} [{low[0]:.2f}, {high[0]:.2f}]",
                "beta": f"{beta:.2f} [{low[1]:.2f}, {high[1]:.2f}]",
                "largest d seen": f"{table['d'].max():.1f}",
                "R is largest at d =": f"{peak:.1f}" if peak < table["d"].max() else "not seen",
            }
        )
        for _, seed in table.groupby("seed"):
            smooth = seed[["d", "gold", "proxy"]].rolling(WINDOW).mean()
            axes.plot(smooth["d"], smooth["proxy"], color=COLORS[1], linewidth=0.8, alpha=0.5)
            axes.plot(smooth["d"], smooth["gold"], color=COLORS[0], linewidth=0.8, alpha=0.5)
        d = np.linspace(0.05, table["d"].max(), 200)
        axes.plot(d, d * (alpha - beta * np.log(d)), color="black", linestyle="--", linewidth=1.5)
        axes.set_title(f"{name}\n$\\alpha$ = {alpha:.2f}, $\\beta$ = {beta:.2f}", fontsize=10)
        axes.set_xlabel("d = sqrt(KL from the language model)", fontsize=9)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("standard deviations of the language model", fontsize=9)
    lines = [panels[0].plot([], [], color=color, linewidth=2)[0] for color in COLORS]
    lines += panels[0].plot([], [], color="black", linestyle="--")
    names = ["gold score", "proxy score (reward model)", "fit of the gold score: $d\\,(\\alpha - \\beta\\,\\log d)$"]
    figure.legend(lines, names, loc="outside upper center", ncols=3, fontsize=9, frameon=False)
    figure.savefig(args.output / "overoptimisation.png", dpi=110)
    every = pd.concat([table.assign(experiment=name) for name, table in tables.items()], ignore_index=True)
    every.drop(columns="commit").to_csv(args.output / "overoptimisation.csv", index=False, float_format="%.5g")
    commits = ", ".join(sorted(set(every["commit"])))
    (args.output / "overoptimisation.md").write_text(f"{markdown(rows)}\ncommit: {commits}\n")
    print(markdown(rows))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Args, description=__doc__)))
    except InputError as error:
        exit_with(str(error))
