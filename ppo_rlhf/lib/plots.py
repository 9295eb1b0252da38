"""The picture of a run's metrics."""

from pathlib import Path


def draw_learning_curves(folder: Path, rows: list[dict[str, float]], panels: dict[str, list[str]]) -> None:
    """Draw learning_curves.png in a run's folder. panels: for each title, the metrics that its panel shows."""
    from matplotlib.figure import Figure

    panels = {
        title: drawn
        for title, names in panels.items()
        if (drawn := [name for name in names if rows and name in rows[0]])
    }
    if not panels:
        return
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(3.4 * columns, 2.5 * lines), layout="constrained")
    for axes, (title, names) in zip(
        figure.subplots(lines, columns, squeeze=False).flat, panels.items(), strict=False
    ):
        for name in names:
            axes.plot([row["step"] for row in rows], [row[name] for row in rows], label=name, linewidth=1.2)
        axes.set_title(title, fontsize=10)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        if len(names) > 1:
            axes.legend(fontsize=7)
    for axes in figure.axes[len(panels) :]:
        axes.set_axis_off()
    figure.savefig(folder / "learning_curves.png", dpi=110)
