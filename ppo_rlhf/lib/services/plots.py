"""The picture of a run's metrics."""

from pathlib import Path

# Panels of chapter 1's scripts: for each title, the metrics that it shows.
PPO = {
    "score": ["objective/scores", "objective/gold_scores"],
    "KL from the reference (nats)": ["objective/kl"],
    "KL coefficient": ["objective/kl_coef"],
    "entropy of the policy (nats per token)": ["ppo/policy/entropy"],
    "policy loss": ["ppo/loss/policy"],
    "value loss": ["ppo/loss/value"],
    "value error and variance of returns": ["ppo/val/error", "ppo/returns/var"],
    "clipped share of tokens": ["ppo/policy/clipfrac", "ppo/val/clipfrac"],
}
REWARD = {
    "loss": ["train/loss"],
    "accuracy": ["train/accuracy"],
    "correlation with the ratings": ["train/corr"],
    "learning rate": ["train/lr"],
    "gain": ["train/gain"],
}


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
    width, height = 3.4 * columns, 2.5 * lines  # inches
    figure = Figure(figsize=(width, height))
    # Fixed margins in inches have room for titles and tick labels. The library could measure what these need, but it
    # would draw everything twice to do so.
    edges = {"left": 0.6 / width, "right": 1 - 0.08 / width, "bottom": 0.25 / height, "top": 1 - 0.25 / height}
    grid = figure.add_gridspec(lines, columns, **edges, wspace=0.26, hspace=0.25)
    for axes, (title, names) in zip(grid.subplots(squeeze=False).flat, panels.items(), strict=False):
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
