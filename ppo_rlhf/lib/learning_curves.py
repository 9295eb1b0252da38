"""The picture of a run's metrics, and which metrics share a panel."""

import textwrap
import tomllib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

METRICS = tomllib.loads((Path(__file__).parents[1] / "metrics.toml").read_text("utf-8"))


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


def panels_of(metrics: Iterable[str], own: dict[str, list[str]]) -> list[tuple[dict[str, Any], list[str]]]:
    """The panels of metrics.toml that show any of these metrics, each with those. own: from own_metrics."""
    panels = []
    for panel in METRICS["panel"]:
        wanted = panel["metrics"] + own.get(panel["title"], [])
        names = [name for name in metrics if any(fnmatchcase(name, pattern) for pattern in wanted)]
        names = [name for name in names if name != "objective/scores" or "objective/score" not in names]  # the same
        if names:
            panels.append((panel, names))
    return panels


def draw_learning_curves(folder: Path, rows: list[dict[str, float]], args: dict[str, Any]) -> None:
    """Draw learning_curves.png in the folder of a run with these arguments."""
    from matplotlib.figure import Figure

    metrics = without_groups_of_one(rows[0] if rows else [], args)
    if not (panels := panels_of(metrics, own_metrics([args]))):
        return
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    width, height = 3.4 * columns, 2.6 * lines  # inches
    figure = Figure(figsize=(width, height))
    # Fixed margins in inches have room for titles and tick labels. The library could measure what these need, but it
    # would draw everything twice to do so.
    edges = {"left": 0.6 / width, "right": 1 - 0.08 / width, "bottom": 0.25 / height, "top": 1 - 0.35 / height}
    grid = figure.add_gridspec(lines, columns, **edges, wspace=0.26, hspace=0.3)
    for axes, (panel, names) in zip(grid.subplots(squeeze=False).flat, panels, strict=False):
        for name in names:
            axes.plot([row["step"] for row in rows], [row[name] for row in rows], label=name, linewidth=1.2)
        axes.set_title(textwrap.fill(panel["title"], 44), fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        if len(names) > 1:
            axes.legend(fontsize=7)
    for axes in figure.axes[len(panels) :]:
        axes.set_axis_off()
    figure.savefig(folder / "learning_curves.png", dpi=110)
