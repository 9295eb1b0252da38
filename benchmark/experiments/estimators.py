"""What the estimators of advantages do: chapter 3 on sums, five seeds of each.

    python benchmark/experiments/estimators.py run --workers 2          # all of them; repeat it to resume
    python benchmark/experiments/estimators.py run --only divide        # one part
    python benchmark/experiments/estimators.py run --only divide-maxrl  # one of a part
    python benchmark/experiments/estimators.py report                   # table and picture of what has finished
    python benchmark/experiments/estimators.py draw                     # both again, from its tables

There are three parts. The runs of a part and a seed differ in what the part is about, and in nothing else:

    estimators   every estimator of advantages but maxrl and gdpo, without a KL penalty
    divide       three answers to "divide by what?": dr_grpo by nothing, grpo by the standard deviation, maxrl by the
                 mean; with 16 samples of each problem at the end
    lengths      the group's scores divided by their standard deviation or not (grpo, dr_grpo); the losses of a
                 response divided by its own length or by the greatest

All have the same number of episodes. Estimators that compare the responses to a prompt get GROUP of them to each, the
others get one response to each prompt. The tables also have what was measured once of the forms of the KL penalty.
"""

import itertools
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from benchmark import lab
from benchmark.lab import CORRECT, GREEDY, SAMPLES, Column
from ppo_rlhf import rlvr_math

GROUP = 8
DIVIDED = ("dr_grpo", "grpo", "maxrl")
ELSEWHERE = ("maxrl", "gdpo")  # the part divide has the first; gdpo needs several sources (gdpo_and_ipo.py)
DIVISORS = {"own": "seq-mean-token-mean", "greatest": "seq-mean-token-sum-norm"}
LENGTHS = {"wrong": "val/sequence_lengths_incorrect", "right": "val/sequence_lengths_correct"}
CURVES = (CORRECT, *LENGTHS.values(), "policy/entropy_avg")
LAST = 3  # updates at the end that are averaged
ANY = "pass@16"
COLUMNS = (
    Column(head="correct, samples (%)", of="samples"),
    Column(head="correct, greedy (%)", of="greedy"),
    Column(head="one of 16 samples (%)", of=ANY, optional=True),
    *(Column(head=f"tokens, {name}", of=column, scale=1) for name, column in LENGTHS.items()),
    Column(head="KL (nats)", of="objective/true_kl", form=".2f", scale=1, optional=True),
    Column(head="its change", of="change", form="+.2f", scale=1, optional=True),
)


def advantage(name: str) -> str:
    """The arguments of an estimator."""
    group = f"--ppo.samples_per_prompt {GROUP} " if name in rlvr_math.IN_GROUPS else ""
    return f"{group}--ppo.critic_warmup {3 if name == 'gae' else 0} --ppo.advantage {name}"


def find_variants() -> dict[str, str]:
    found = {f"estimators-{name}": advantage(name) for name in rlvr_math.ESTIMATORS if name not in ELSEWHERE}
    found |= {f"divide-{name}": f"{advantage(name)} --eval_samples 16" for name in DIVIDED}
    for name, (length, mode) in itertools.product(("grpo", "dr_grpo"), DIVISORS.items()):
        found[f"lengths-{name}-{length}-length"] = f"{advantage(name)} --ppo.loss_aggregation {mode}"
    return found


def labels(name: str) -> dict[str, str]:
    """`lengths-grpo-own-length` is the variant `grpo, own length` of lengths."""
    part, _, variant = name.partition("-")
    return {
        "part": part,
        "variant": variant.replace("-", ", ", 1).replace("-", " ") if part == "lengths" else variant,
    }


def measure(folder: Path, meta: dict[str, Any], table: pd.DataFrame) -> dict[str, Any]:
    results = meta["results"]
    found = {"samples": results[SAMPLES if SAMPLES in results else "eval/mean@16"], "greedy": results[GREEDY]}
    found |= {ANY: results[f"eval/{ANY}"]} if f"eval/{ANY}" in results else {}
    return found | {name: table[name].tail(LAST).mean() for name in CURVES}


def table_of(runs: pd.DataFrame) -> list[dict[str, str]]:
    if "first_kl" in runs:
        runs = runs.assign(change=runs["objective/true_kl"] - runs["first_kl"])
    rows = lab.rows_of(runs, COLUMNS, by=("part", "variant"))
    named = ("estimators", "divide")  # as arguments of the script are
    return [{"part": part, "what": f"`{name}`" if part in named else name} | row for (part, name), row in rows]


def picture_of(runs: pd.DataFrame, updates: pd.DataFrame) -> Figure:
    """The part estimators: correct samples over updates, and held-out problems after the last."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    curves, final = figure.subplots(1, 2, width_ratios=(1.5, 1))
    runs, updates = (table[table["part"] == "estimators"] for table in (runs, updates))
    names = list(runs["variant"].unique())
    colors = dict(zip(names, itertools.cycle(mpl.color_sequences["tab10"])))
    for name in names:
        lab.draw_curve(curves, updates[updates["variant"] == name], name, smoothed=LAST, color=colors[name])
    lab.finish_panel(curves, "correct samples, problems not seen before")
    curves.legend(fontsize=8, frameon=False)
    for i, name in enumerate(reversed(names)):
        for what, marker in {"samples": "o", "greedy": "D"}.items():
            mean, half = lab.interval(list(runs.loc[runs["variant"] == name, what]))
            final.errorbar(mean, i, xerr=half, fmt=marker, markersize=5, capsize=2, color=colors[name])
    final.set_yticks(range(len(names)), reversed(names), fontsize=8)
    lab.finish_panel(final, "held-out problems: samples (o), greedy (◇)", "share correct")
    return figure


EXPERIMENT = lab.Experiment(
    name="estimators",
    script="ppo_rlhf/rlvr_policy.py",
    common="--preset sums --ppo.total_episodes 4096",
    variants=find_variants(),
    labels=labels,
    curves=CURVES,
    measure=measure,
    table=table_of,
    picture=picture_of,
)

if __name__ == "__main__":
    lab.main(EXPERIMENT, __doc__)
