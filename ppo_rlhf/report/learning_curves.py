"""The picture of a run's metrics, and which metrics share a panel."""

import fnmatch
import itertools
import textwrap
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

METRICS = tomllib.loads((Path(__file__).parents[1] / "metrics.toml").read_text("utf-8"))
COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#888888"]  # of curves


def own_metrics(args: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """By title of a panel, the metrics that runs with these arguments name after their monitor and verifier."""
    rewards = [of_run.get("rewards", {}) for of_run in args]
    monitors = dict.fromkeys(of_run["monitor"] for of_run in rewards if of_run.get("monitor"))
    verifiers = dict.fromkeys(of_run["verifier"] for of_run in rewards if "verifier" in of_run)
    names = [name.rsplit(".", 1)[-1].rsplit(":", 1)[-1] for name in monitors]
    return {
        "Score": [f"objective/{name}" for name in names],
        "Held-out queries": [f"eval/{name}" for name in verifiers],
    }


def without_groups_of_one(metrics: Iterable[str], args: dict[str, Any]) -> list[str]:
    """Metrics of a run with these arguments, but none of groups if a group has one response: they say nothing."""
    alone = args.get("ppo", {}).get("samples_per_prompt") == 1
    return [name for name in metrics if not (alone and name.startswith("val/groups_"))]


def panels_of(
    metrics: Iterable[str], own: dict[str, list[str]]
) -> list[tuple[dict[str, Any], list[tuple[str, str, str]]]]:
    """The panels of metrics.toml that show any of these metrics, each with those as (metric, label, colour).

    own: from own_metrics.
    """
    panels = []
    for panel in METRICS["panel"]:
        words = dict(panel["metrics"])
        for name in own.get(panel["title"], []):
            words.setdefault(name, name.rpartition("/")[2].replace("_", " "))
        labels = {}
        for pattern, label in words.items():
            for name in fnmatch.filter(metrics, pattern):
                labels[name] = label.replace("*", name[len(pattern) - 1 :])
        if {"objective/score", "objective/scores"} <= labels.keys():  # the same
            del labels["objective/scores"]
        # Words without a metric keep their colour, so that it means the same in each run. Others get what is left.
        colors = dict(zip(dict.fromkeys(words.values()), COLORS, strict=False))
        taken = {colors.get(label) for label in labels.values()}
        left = itertools.cycle([color for color in COLORS if color not in taken] or COLORS)
        lines = [(name, label, colors.get(label) or next(left)) for name, label in labels.items()]
        if lines:
            panels.append((panel, lines))
    return panels


def draw_learning_curves(folder: Path, rows: list[dict[str, float]], args: dict[str, Any]) -> None:
    """Draw learning_curves.png in the folder of a run with these arguments."""
    metrics = without_groups_of_one(rows[0] if rows else [], args)
    metrics = [name for name in metrics if "@" not in name]  # rows only repeat its value before training
    if not (panels := panels_of(metrics, own_metrics([args]))):
        return
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    width, height = 3.3 * columns, 2.6 * lines  # inches
    figure = Figure(figsize=(width, height))
    # Fixed margins in inches have room for titles and tick labels. The library could measure what these need, but it
    # would draw everything twice to do so.
    grid = figure.add_gridspec(lines, columns, wspace=0.32, hspace=0.42)
    grid.update(left=0.75 / width, right=1 - 0.08 / width, bottom=0.5 / height, top=1 - 0.45 / height)
    for axes, (panel, curves) in zip(grid.subplots(squeeze=False).flat, panels, strict=False):
        for name, label, color in reversed(curves):  # the first is in front
            axes.plot(
                [row["step"] for row in rows], [row[name] for row in rows], label=label, color=color, linewidth=1.4
            )
        axes.set_title(textwrap.fill(panel["title"], 34), fontsize=11)
        axes.tick_params(labelsize=11)
        axes.ticklabel_format(axis="y", scilimits=(-3, 5))  # 0.0001 as 1 and 1e-4
        axes.grid(alpha=0.3)
        if len(curves) > 1:
            axes.legend(fontsize=11, framealpha=0.6, borderpad=0.2, labelspacing=0.2, reverse=True)
    for axes in figure.axes[len(panels) :]:
        axes.set_axis_off()
    figure.supxlabel("update", fontsize=11, y=0.08 / height)
    figure.savefig(folder / "learning_curves.png", dpi=165)
