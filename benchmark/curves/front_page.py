"""Draw the picture of the front page from one run of chapter 1: what PPO raises, and how far the policy moves.

    python benchmark/curves/front_page.py                                          # draws static/front_page.png again
    python benchmark/curves/front_page.py --run runs/<run> --output picture.png    # the same picture of your run

The left panel has the reward model's score and the gold score; the right one has the KL divergence from the language
model, and the target of the KL controller. Thin lines are single updates. A point of a thick line is the mean of an
update and of up to nine before it, so it begins where the thin line does.
"""

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import tyro
from matplotlib.figure import Figure

from ppo_rlhf.lib.base.errors import InputError, exit_with
from ppo_rlhf.lib.services.run import read_meta

STATIC = Path(__file__).resolve().parent.parent.parent / "static"
SMOOTHED = 10  # updates in a mean, the newest included
BLUE, ORANGE = "#0072b2", "#d55e00"


@dataclass(frozen=True)
class Args:
    run: Path = STATIC / "demo"
    """folder of a policy's run on tales, with metrics.csv and meta.json"""
    output: Path = STATIC / "front_page.png"
    """where the picture goes"""


def draw(run: Path) -> Figure:
    target = read_meta(run)["args"]["rewards"]["adaptive_kl"]["target"]
    metrics = pd.read_csv(run / "metrics.csv")
    panels = {
        "score of the responses": {"objective/gold_scores": "gold score", "objective/scores": "reward model's score"},
        "KL divergence from the language model (nats)": {"objective/kl": "KL of the policy"},
    }
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    for axes, (title, curves) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for (metric, label), color in zip(curves.items(), (ORANGE, BLUE), strict=False):
            if metric not in metrics:
                raise InputError(f"{run / 'metrics.csv'} has no {metric}; runs with --preset tales have it")
            axes.plot(metrics["step"], metrics[metric], color=color, alpha=0.3, linewidth=0.8)
            smooth = metrics[metric].rolling(SMOOTHED, min_periods=1).mean()
            axes.plot(metrics["step"], smooth, color=color, linewidth=2, label=label)
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("update")
        axes.grid(alpha=0.3)
    if target is not None:
        axes.axhline(target, color="black", linestyle="--", linewidth=1.2, label=f"target: {target:g}")
    for axes in figure.axes:
        axes.legend(loc="lower right", fontsize=10, frameon=False)
    return figure


def digest(run: Path) -> str:
    """Of the numbers that were drawn. The picture keeps it, so a test can tell whether it is that of the run."""
    return hashlib.sha256((run / "metrics.csv").read_bytes()).hexdigest()


def main(args: Args) -> int:
    draw(args.run).savefig(args.output, dpi=100, metadata={"Description": digest(args.run), "Software": None})
    print(args.output)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Args, description=__doc__)))
    except (InputError, OSError) as error:
        exit_with(str(error))
