"""Does the critic learn sooner if its head has a learning rate of its own? Chapter 1's world tales, three seeds.

    python benchmark/experiments/value_head.py run --seeds 3      # repeat it to resume

`2019` has one rate for all weights, as the original; `3e-3` gives the value head another one. The reward is the
annotator's own formula, and variants share the queries and the noise of a seed.
"""

from pathlib import Path
from typing import Any

import pandas as pd

from benchmark import lab

SCORE, KL, EXPLAINED = "objective/score", "objective/kl", "ppo/val/var_explained"
PARTS = ((0, 20), (20, 60), (60, 200))  # updates


def measure(run: Path, meta: dict[str, Any], table: pd.DataFrame) -> dict[str, float]:
    """Means of a finished run over some of its updates."""
    explained = {f"explained, {a} to {b - 1}": table[EXPLAINED].iloc[a:b].mean() for a, b in PARTS}
    return explained | {"score": table[SCORE].tail(20).mean(), "KL": table[KL].tail(20).mean()}


EXPERIMENT = lab.Experiment(
    name="value-head",
    script="ppo_rlhf/train_policy.py",
    common="--preset tales --trace_interval 0 --rewards.function ppo_rlhf.worlds.tales:sentiment.gold_scores",
    variants={"2019": "", "3e-3": "--ppo.value_head_lr 3e-3"},
    curves=(SCORE, KL, EXPLAINED),
    measure=measure,
    table=lambda runs: lab.means(runs, [name for name in runs if name not in (*lab.KEYS, "commit")]),
)

if __name__ == "__main__":
    lab.main(EXPERIMENT, __doc__)
