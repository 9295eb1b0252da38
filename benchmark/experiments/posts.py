"""What PPO adds to supervised fine-tuning in chapter 2's demo, on held-out posts: gold scores, and who wins.

    python benchmark/experiments/posts.py run --workers 2      # five seeds; repeat it to resume
    python benchmark/experiments/posts.py report               # the table of what has finished

A summary wins against another of the same post if its gold score is higher; with equal ones, both have half a win.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmark import lab
from benchmark.lab import cell
from ppo_rlhf.train_policy import read_meta
from ppo_rlhf.worlds.posts import gold_scores

MEASURES = {  # after SFT → after PPO: columns of runs.csv, scale, digits
    "gold score": ("gold", 1, ".2f"),
    "tokens": ("tokens", 1, ".1f"),
    "summaries that end (%)": ("ends", 100, ".1f"),
}

GROUPS = ("shorter", "equally long", "longer")  # than the summary of the same post after SFT


def rate_at_equal_length(results: np.ndarray, differences: np.ndarray) -> tuple[float, float, float]:
    """The win rate at a difference in length of 0, and the ends of its 95 % interval, by logistic regression.

    results (rows,): 1 won, 0.5, or 0 lost. differences (rows,): how much longer the candidate's text is.
    """
    x = np.stack([np.ones(len(results)), differences / differences.std()], axis=1)  # (rows, 2)
    weights = np.zeros(2)
    for _ in range(20):  # Newton's method
        p = 1 / (1 + np.exp(-x @ weights))  # (rows,)
        hessian = x.T @ (x * (p * (1 - p))[:, None])  # (2, 2)
        weights += np.linalg.solve(hessian, x.T @ (results - p))
    margin = 1.96 * math.sqrt(np.linalg.inv(hessian)[0, 0])
    rate, low, high = (1 / (1 + math.exp(-logit)) for logit in (weights[0], weights[0] - margin, weights[0] + margin))
    return rate, low, high


def measure(run: Path, meta: dict[str, Any], table: pd.DataFrame) -> dict[str, Any]:
    """Compare the held-out summaries of a policy's run with those of the SFT run in the same folder."""
    (sft_run,) = run.parent.glob("tldr_sft__*")
    found: dict[str, Any] = {}
    golds, lengths = [], []
    for stage, folder in (("sft", sft_run), ("ppo", run)):
        rows = pd.read_json(folder / "evaluation.jsonl", lines=True)
        golds.append(np.array(gold_scores(list(rows["query"]), list(rows["response"]))))
        lengths.append(rows["tokens"].to_numpy())
        found |= {f"gold {stage}": golds[-1].mean(), f"tokens {stage}": lengths[-1].mean()}
    found["ends sft"] = read_meta(sft_run)["results"]["validation/sft/eos_rate"]
    found["ends ppo"] = meta["results"]["validation/eos_rate"]
    results = (1 + np.sign(np.round(golds[1] - golds[0], 6))) / 2
    difference = lengths[1] - lengths[0]
    for sign, name in zip((-1, 0, 1), GROUPS, strict=True):
        group = results[np.sign(difference) == sign]
        found |= {name: len(group), f"wins {name}": group.mean() if len(group) else math.nan}
    rate, low, high = rate_at_equal_length(results, difference)
    return found | {"wins": results.mean(), "wins at equal length": rate, "low": low, "high": high}


def rows_of(runs: pd.DataFrame) -> list[dict[str, str]]:
    """A row for each seed, and one for their mean."""
    rows = []
    for _, run in runs.iterrows():
        row = {"seed": f"{run['seed']}"}
        for title, (measured, scale, form) in MEASURES.items():
            row[title] = " → ".join(f"{scale * run[f'{measured} {stage}']:{form}}" for stage in ("sft", "ppo"))
        row["wins (%)"] = f"{100 * run['wins']:.1f}"
        for name in GROUPS:
            row[f"{name} summaries: wins"] = f"{100 * run[f'wins {name}']:.0f} % of {run[name]}"
        rate, low, high = (100 * run[name] for name in ("wins at equal length", "low", "high"))
        row["wins at equal length (%)"] = f"{rate:.1f} [{low:.1f}, {high:.1f}]"
        rows.append(row)
    row = {"seed": "mean"}
    for title, (measured, scale, form) in MEASURES.items():
        row[title] = " → ".join(cell(scale * runs[f"{measured} {stage}"], form) for stage in ("sft", "ppo"))
    row["wins (%)"] = cell(100 * runs["wins"], ".1f")
    for name in GROUPS:
        row[f"{name} summaries: wins"] = cell(100 * runs[f"wins {name}"], ".0f") + " %"
    row["wins at equal length (%)"] = cell(100 * runs["wins at equal length"], ".1f")
    return [*rows, row]


EXPERIMENT = lab.Experiment(
    name="posts",
    script="ppo_rlhf/tldr/all.py",
    common="--preset posts",
    variants={"preset": ""},
    curves=("objective/gold_scores", "objective/scores", "objective/kl", "eval/gold_scores"),
    measure=measure,
    table=rows_of,
    run="tldr_policy__",
)

if __name__ == "__main__":
    lab.main(EXPERIMENT, str(__doc__))
