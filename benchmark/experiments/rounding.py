"""What rounding alone does to the demo of chapter 1: one seed, one reward model, passes of other sizes.

    python benchmark/experiments/rounding.py run --seeds 1 --workers 2
    python benchmark/experiments/rounding.py report --seeds 1

The same for other presets, of as many episodes and optimiser steps: does one of them move less?

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
LAST = 640  # episodes that are averaged

SIZES = (64, 62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 32, 28, 24, 20, 16)
PRESETS = {
    "preset": "",
    "episodes128": " --ppo.batch_size 128 --ppo.nminibatches 2",
    "rate1e-4": " --ppo.lr 1e-4",
    "rate1.5e-4": " --ppo.lr 1.5e-4",
    "head2e-3": " --ppo.value_head_lr 2e-3",
    "horizon3000": " --rewards.adaptive_kl.horizon 3000",
}


def measure(folder: Path, meta: dict[str, Any], metrics: pd.DataFrame) -> dict[str, Any]:
    """Means over the last episodes, and halfway."""
    updates = LAST // meta["args"]["ppo"]["batch_size"]
    end, middle = metrics.tail(updates), metrics.iloc[len(metrics) // 2 - updates : len(metrics) // 2]
    return {
        "gold": end["objective/gold_scores"].mean(),
        "gold_halfway": middle["objective/gold_scores"].mean(),
        "score": end["objective/scores"].mean(),
        "kl": end["objective/kl"].mean(),
        "entropy": end["objective/entropy"].mean(),
        "entropy_halfway": middle["objective/entropy"].mean(),
    }


def table(runs: pd.DataFrame) -> list[dict[str, str]]:
    """A row for each run."""
    return [
        {
            "preset": run["variant"].rsplit("-", 2)[0],
            "rows in a pass": run["variant"].rsplit("-", 2)[1],
            "gold score, last 640 episodes": f"{run['gold']:.2f}",
            "halfway": f"{run['gold_halfway']:.2f}",
            "score": f"{run['score']:.2f}",
            "KL": f"{run['kl']:.2f}",
            "entropy of a response, nats": f"{run['entropy']:.1f}",
            "entropy halfway": f"{run['entropy_halfway']:.1f}",
        }
        for _, run in runs.iterrows()
    ]


EXPERIMENT = lab.Experiment(
    name="rounding",
    script="ppo_rlhf/train_policy.py",
    common=f"--preset tales --trace_interval 0 --rewards.trained_model {REWARD}/model",
    variants={
        f"{preset}-{size}-64": f"{flags} --ppo.local_micro_batch_size {size} --ppo.local_rollout_batch_size 64"
        for preset, flags in PRESETS.items()
        for size in SIZES
    },
    curves=("objective/gold_scores", "objective/scores", "objective/kl", "objective/entropy"),
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
