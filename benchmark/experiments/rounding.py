"""What rounding alone does to the demo of chapter 1: one seed, one reward model, passes of other sizes.

    python benchmark/experiments/rounding.py run --seeds 1 --workers 2
    python benchmark/experiments/rounding.py report --seeds 1

The sizes of passes, `local_micro_batch_size` and `local_rollout_batch_size`, change nothing but the order in which
numbers are added up. So the runs of a setting begin alike, until a digit flips a token. A variant is named by the
setting and the two sizes.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from benchmark import lab

FOLDER = lab.ROOT / "benchmark" / "runs" / "rounding"
REWARD = FOLDER / "reward"  # the folder in which the reward model is trained
LAST = 10  # updates that are averaged

SETTINGS = {  # arguments beside those of the preset
    "preset": "",
    "batch-128": "--ppo.batch_size 128 --ppo.total_episodes 25600",
}
SIZES = [(micro, rollout) for micro in (64, 56, 48, 40, 32) for rollout in (64, 48, 32, 16)]


def measure(folder: Path, meta: dict[str, Any], metrics: pd.DataFrame) -> dict[str, Any]:
    """Means over the last updates, and halfway."""
    end, middle = metrics.tail(LAST), metrics.iloc[len(metrics) // 2 - LAST : len(metrics) // 2]
    return {
        "gold": end["objective/gold_scores"].mean(),
        "gold_halfway": middle["objective/gold_scores"].mean(),
        "score": end["objective/scores"].mean(),
        "kl": end["objective/kl"].mean(),
        "minutes": metrics["time"].iloc[-1] / 60,
    }


def table(runs: pd.DataFrame) -> list[dict[str, str]]:
    """The distribution of the gold score over the runs of each setting."""
    rows = []
    for setting, group in runs.groupby(runs["variant"].str.rsplit("-", n=2).str[0], sort=False):
        gold = group["gold"]
        rows.append(
            {
                "setting": setting,
                "runs": str(len(gold)),
                "gold score, mean": f"{gold.mean():.2f}",
                "deviation": f"{gold.std():.2f}",
                "smallest": f"{gold.min():.2f}",
                "quartiles": " ".join(f"{gold.quantile(share):.2f}" for share in (0.25, 0.5, 0.75)),
                "largest": f"{gold.max():.2f}",
                "KL": f"{group['kl'].mean():.2f}",
            }
        )
    return rows


EXPERIMENT = lab.Experiment(
    name="rounding",
    script="ppo_rlhf/train_policy.py",
    common=f"--preset tales --trace_interval 0 --rewards.trained_model {REWARD}/model",
    variants={
        f"{setting}-{micro}-{rollout}": f"{arguments} --ppo.local_micro_batch_size {micro} "
        f"--ppo.local_rollout_batch_size {rollout}"
        for setting, arguments in SETTINGS.items()
        for micro, rollout in SIZES
    },
    curves=("objective/gold_scores", "objective/scores", "objective/kl"),
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
