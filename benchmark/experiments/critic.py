"""What four methods for the critic do on longer chains: rlvr_policy.py on sums-long, five seeds of each.

    python benchmark/experiments/critic.py run --workers 2          # all of them; repeat it to resume
    python benchmark/experiments/critic.py run --only gae rloo      # some of them, by name
    python benchmark/experiments/critic.py report                   # table and picture of what has finished
    python benchmark/experiments/critic.py draw                     # both again, from its tables

The problems have up to six steps. `gae` is PPO with a critic as in the preset sums. Each other variant with a critic
changes one thing of it, and `all` all four:

    critic_lam     the critic's targets are sums of rewards: lambda 1 in place of 0.95
    lam_alpha      the policy's lambda is 1 - 1 / length, which is 0.95 at 20 tokens, and higher for longer responses
    pretraining    the critic learns alone, with targets of lambda 1, until it explains 0.3 of the variance, for at
                   most 12 updates; the others have 3 updates in which it learns alone
    nll            a likelihood loss on correct responses, times 0.1

`rloo` has groups of eight in place of the critic. All runs have the same number of episodes, so what the critic takes
to learn alone, the policy lacks. Runs of a seed with a critic have the same problems in the same order, and the same
sampling noise.
"""

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from benchmark import lab
from benchmark.experiments.estimators import advantage
from benchmark.lab import CORRECT, GREEDY, SAMPLES, Column

METHODS = {
    "critic_lam": "--ppo.critic_lam 1",
    "lam_alpha": "--ppo.lam_alpha 1",
    "pretraining": "--ppo.critic_warmup 12 --ppo.critic_explains 0.3",
    "nll": "--ppo.nll_coef 0.1",
}
VARIANTS = {"gae": advantage("gae")}
VARIANTS |= {name: f"{advantage('gae')} {words}" for name, words in METHODS.items()}
VARIANTS |= {"all": f"{advantage('gae')} {' '.join(METHODS.values())}", "rloo": advantage("rloo")}
COLORS = dict(zip(VARIANTS, ("black", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#888888"), strict=True))
EXPLAINED, MOVED = "val/explained_var", "policy/approxkl_avg"
LAST = 3  # updates at the end that are averaged
COLUMNS = (
    Column(head="correct, while it learns (%)", of="course"),
    Column(head="correct, samples after it (%)", of="samples"),
    Column(head="correct, greedy after it (%)", of="greedy"),
    Column(head="more samples than gae", of="samples", form="+.1f", paired=True),
    Column(head="updates of the critic alone", of="alone", scale=1),
    Column(head="then explained", of="explained", form=".2f", scale=1),
    Column(head="explained at the end", of="explained_last", form=".2f", scale=1),
)


def measure(folder: Path, meta: dict[str, Any], table: pd.DataFrame) -> dict[str, Any]:
    found = {"samples": meta["results"][SAMPLES], "greedy": meta["results"][GREEDY], "course": table[CORRECT].mean()}
    if EXPLAINED in table:
        found["alone"] = int((table[MOVED] > 1e-8).to_numpy().argmax())
        found["explained"] = table[EXPLAINED].iloc[found["alone"]]  # as the policy begins to learn
        found["explained_last"] = table[EXPLAINED].tail(LAST).mean()
    return found


def table_of(runs: pd.DataFrame) -> list[dict[str, str]]:
    rows = lab.rows_of(runs, COLUMNS, baseline="variant == 'gae'")
    return [{"variant": f"`{name}`"} | row for (name,), row in rows]


def picture_of(runs: pd.DataFrame, updates: pd.DataFrame) -> Figure:
    """Correct samples, and the share of the returns' variance that the critic explains."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    panels = figure.subplots(1, 2)
    for name, color in COLORS.items():
        own, style = updates[updates["variant"] == name], "--" if name in ("gae", "rloo") else "-"
        for axes, column in zip(panels, EXPERIMENT.curves, strict=True):
            lab.draw_curve(axes, own, name, column=column, smoothed=LAST, color=color, linestyle=style)
    for axes, title in zip(panels, ("correct samples, problems not seen before", "explained variance"), strict=True):
        lab.finish_panel(axes, title)
    panels[1].set_ylim(-0.25, 1)
    panels[0].legend(fontsize=8, frameon=False)
    return figure


EXPERIMENT = lab.Experiment(
    name="critic",
    script="ppo_rlhf/rlvr_policy.py",
    common="--preset sums --base_model sums-long --task.problems sums-long --task.prompt_length 72 "
    "--task.response_length 120 --ppo.batch_size 128 --ppo.total_episodes 4096",
    variants=VARIANTS,
    curves=(CORRECT, EXPLAINED),
    measure=measure,
    table=table_of,
    picture=picture_of,
)

if __name__ == "__main__":
    lab.main(EXPERIMENT, __doc__)
