"""What staleness does to learning, and what correcting for it does: rlvr_async.py on sums, five seeds of each.

    python benchmark/experiments/staleness.py run --workers 2                 # all of them; repeat it to resume
    python benchmark/experiments/staleness.py run --only 0 8-none --seeds 2   # some of them, by name
    python benchmark/experiments/staleness.py report                          # table and picture of what has finished
    python benchmark/experiments/staleness.py draw                            # the picture again, from its tables

With staleness K, a batch is sampled by the weights of K updates ago. There are four ways to take that:

    decoupled   a weight leads from the policy that has sampled to the one that learns; the clip is around the latter
    bypass      plain PPO: old log-probs are the sampler's, and the clip acts on all that has changed since
    masked      bypass, and a response that has become less likely by MASK nats per token is not blamed any more
    none        old log-probs are the learner's, and nothing makes up for the age

So `8-none` is the run with K = 8 and nothing corrected. With K = 0 the ways differ by rounding alone; it is run once.
All runs have the same number of updates and of episodes; those of a seed also have the same problems in the same
order, and the same sampling noise. Each run has a Ray of its own, with one process that samples.

How far the sampler is off, and what the clip does, are means over the last LATER of the updates: of 32, over those
whose batches can be 8 updates old. What is clipped, and approxkl, are of the ratio in the loss: with bypass, that of
the new policy to the sampler.
"""

import math
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark import lab
from benchmark.experiments.estimators import advantage
from benchmark.lab import CORRECT, GREEDY, SAMPLES, Column

STALENESS = (0, 1, 2, 4, 8)
WAYS = ("decoupled", "bypass", "masked", "none")
MASK = 0.05  # nats
SAME = "any"  # the way of staleness 0
KL, ESS, CLIPPED, APPROX_KL = "async/kl", "async/ess", "policy/clipfrac_avg", "policy/approxkl_avg"
CURVES, MASKED = (CORRECT, KL, ESS, CLIPPED, APPROX_KL), "async/masked_share"
LATER = 0.75
COLUMNS = (
    Column(head="correct, samples (%)", of="samples"),
    Column(head="correct, greedy (%)", of="greedy"),
    Column(head="beside 0, same seed", of="samples", form="+.1f", paired=True),
    Column(head="`async/kl` (nats)", of=KL, form=".4f", scale=1),
    Column(head="`async/ess`", of=ESS, form=".3f", scale=1),
    Column(head="clipped (%)", of=CLIPPED, form=".2f"),
    Column(head="`approxkl`", of=APPROX_KL, form=".5f", scale=1),
    Column(head="masked (%)", of=MASKED, form=".2f", optional=True),
)


def labels(name: str) -> dict[str, Any]:
    staleness, _, way = name.partition("-")
    return {"staleness": int(staleness), "way": way or SAME}


def words(name: str) -> str:
    """Arguments of rlvr_async.py."""
    staleness, way = labels(name).values()
    if way == "masked":
        return f"--staleness {staleness} --correction bypass --off_policy_mask {MASK}"
    return f"--staleness {staleness} --correction {way if staleness else 'none'}"


def measure(folder: Path, meta: dict[str, Any], table: pd.DataFrame) -> dict[str, Any]:
    later = table.tail(math.ceil(LATER * len(table)))
    found = {"samples": meta["results"][SAMPLES], "greedy": meta["results"][GREEDY]}
    found |= {name: later[name].mean() for name in (*CURVES, MASKED) if name in later}
    return found | {"lr": meta["args"]["ppo"]["lr"]}


def table_of(runs: pd.DataFrame) -> list[dict[str, str]]:
    rows = lab.rows_of(runs, COLUMNS, baseline="staleness == 0", by=("staleness", "way"))
    return [{"staleness": str(staleness), "way": way} | row for (staleness, way), row in rows]


STYLES = {SAME: ("black", "D"), "decoupled": ("#0072b2", "o"), "bypass": ("#d55e00", "s")}
STYLES |= {"masked": ("#cc79a7", "v"), "none": ("#009e73", "^")}
SHOWN = {"0": "-", "2-decoupled": "--", "8-decoupled": "-", "8-bypass": "-", "8-none": "-"}  # learning curves


def picture_of(runs: pd.DataFrame, updates: pd.DataFrame) -> Figure:
    """Some learning curves; what is right in the end, and how far the sampler was off, over staleness."""
    figure = Figure(figsize=(11, 3.9), layout="constrained")
    curves, final, distance = panels = figure.subplots(1, 3, width_ratios=(1.25, 1, 1))
    for name, line in SHOWN.items():
        staleness, way = labels(name).values()
        own = updates[(updates["staleness"] == staleness) & (updates["way"] == way)]
        style = {"color": STYLES[way][0], "linestyle": line}
        lab.draw_curve(curves, own, name.replace("-", ", "), band=0.12, **style)
    lab.finish_panel(curves, "correct samples,\nproblems not seen before")
    draw_over_staleness(final, runs, "samples")
    lab.finish_panel(final, "correct samples, held-out problems,\nafter the last update", "staleness (updates)")
    draw_over_staleness(distance, runs[runs["staleness"] > 0], KL)  # at 0 there is rounding alone
    distance.set_yscale("log")
    lab.finish_panel(distance, "how far the sampler is off:\nKL per token (nats)", "staleness (updates)")
    for axes in panels:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, frameon=False, title="staleness" if axes is curves else None, title_fontsize=8)
    return figure


def draw_over_staleness(axes: Axes, runs: pd.DataFrame, column: str) -> None:
    """Mean and interval of each way, side by side at each staleness; what staleness 0 gives is a line across."""
    for way, aside in zip(STYLES, (0, -0.15, -0.05, 0.05, 0.15), strict=True):
        own = runs[runs["way"] == way].groupby("staleness")[column]
        points = {STALENESS.index(staleness) + aside: lab.interval(list(values)) for staleness, values in own}
        if not points:
            continue
        means, halves = zip(*points.values(), strict=True)
        color, marker = STYLES[way]
        style = {"color": color, "marker": marker, "markersize": 5, "capsize": 2, "linewidth": 1.4}
        axes.errorbar(list(points), means, yerr=halves, label="0" if way == SAME else way, **style)
        if way == SAME:
            axes.axhline(*means, color=color, linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(STALENESS)), map(str, STALENESS))
    axes.set_xlim(-0.4, len(STALENESS) - 0.6)


EXPERIMENT = lab.Experiment(
    name="staleness",
    script="ppo_rlhf/rlvr_async.py",
    common="--preset sums --ppo.total_episodes 4096 --ppo.batch_size 128",
    fixed=f"{advantage('rloo')} {lab.QUIET}",
    variants={name: words(name) for name in ("0", *(f"{age}-{way}" for age in STALENESS[1:] for way in WAYS))},
    labels=labels,
    curves=CURVES,
    measure=measure,
    table=table_of,
    picture=picture_of,
)

if __name__ == "__main__":
    lab.main(EXPERIMENT, __doc__)
