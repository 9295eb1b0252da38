"""What rounding alone does to chapter 1's preset tales: one seed, one reward model, passes of other sizes.

    python benchmark/experiments/rounding.py run --seeds 1 --workers 2
    python benchmark/experiments/rounding.py run --seeds 3 --first_seed 2 --only preset-64-64 head2e-3-64-64
    python benchmark/experiments/rounding.py report --seeds 4

With other flags, for as many episodes and optimiser steps, does the policy fall behind less often?

The size of a pass with gradients, `local_micro_batch_size`, changes nothing but the order in which numbers are added
up. So all runs begin alike, until a digit flips a token. (In four runs, the size of a pass without gradients changed
no digit.)
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from benchmark import lab

FOLDER = lab.ROOT / "benchmark" / "runs" / "rounding"
REWARD = FOLDER / "reward"  # the folder in which the reward model is trained
LAST = 640  # episodes that are averaged at the end
EARLY = 2_560  # episodes at the beginning

SIZES = (*range(64, 35, -2), 32, 28, 24, 20, 16)
FLAGS = {  # beside --preset tales
    "preset": "",
    "head2e-3": " --ppo.value_head_lr 2e-3",
    "episodes128": " --ppo.batch_size 128 --ppo.nminibatches 2",
    "rate1e-4": " --ppo.lr 1e-4",
    "horizon3000": " --rewards.adaptive_kl.horizon 3000",
}


def measure(folder: Path, meta: dict[str, Any], metrics: pd.DataFrame) -> dict[str, Any]:
    """Means over the last episodes, those before the middle, and the early ones."""
    episodes = meta["args"]["ppo"]["batch_size"]
    updates, half = LAST // episodes, len(metrics) // 2
    end, middle, early = metrics.tail(updates), metrics.iloc[half - updates : half], metrics.head(EARLY // episodes)
    return {
        "gold": end["objective/gold_scores"].mean(),
        "gold_halfway": middle["objective/gold_scores"].mean(),
        "kl": end["objective/kl"].mean(),
        "entropy": end["objective/entropy"].mean(),
        "explained_early": early["ppo/val/var_explained"].mean(),
    }


def table(runs: pd.DataFrame) -> list[dict[str, str]]:
    """Two rows for each set of flags: of the runs of seed 1, and of other seeds."""

    def spread(values: pd.Series) -> str:
        return f"{values.min():.2f}, {values.mean():.2f}, {values.max():.2f}"

    presets = runs["variant"].str.split(r"-\d+-64$", regex=True).str[0]
    return [
        {
            "beside `--preset tales`": FLAGS[preset].strip(),
            "runs": f"seed 1, sizes: {len(group)}" if first else f"other seeds: {len(group)}",
            "gold score at the end: lowest, mean, highest": spread(group["gold"]),
            "halfway": spread(group["gold_halfway"]),
            "KL": spread(group["kl"]),
            "entropy of a response, nats": spread(group["entropy"]),
            "share of the variance that the critic explains, first 2,560 episodes": spread(group["explained_early"]),
        }
        for (preset, first), group in runs.groupby([presets, runs["seed"] == 1], sort=False)
    ]


EXPERIMENT = lab.Experiment(
    name="rounding",
    script="ppo_rlhf/train_policy.py",
    common=f"--preset tales --trace_interval 0 --rewards.trained_model {REWARD}/model",
    variants={
        f"{preset}-{size}-64": f"{flags} --ppo.local_micro_batch_size {size} --ppo.local_rollout_batch_size 64"
        for preset, flags in FLAGS.items()
        for size in SIZES
    },
    curves=("objective/gold_scores", "objective/kl", "objective/entropy", "ppo/val/var_explained"),
    measure=measure,
    table=table,
)


def train_reward_model() -> None:
    """Once, for all runs."""
    REWARD.mkdir(parents=True, exist_ok=True)
    script = lab.ROOT / "ppo_rlhf" / "train_reward.py"
    subprocess.run([sys.executable, script, "--preset", "tales"], cwd=REWARD, check=True)
    (model,) = REWARD.glob("models/*/reward")
    (REWARD / "model").symlink_to(model)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"] and not (REWARD / "model").exists():
        train_reward_model()
    lab.main(EXPERIMENT, str(__doc__))
