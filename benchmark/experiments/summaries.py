"""Chapter 2 with a real language model: SFT, a reward model of pairs of single ratings, and seeds of PPO with LoRA.

    python benchmark/experiments/summaries.py run --seeds 3       # everything; repeat it to resume
    python benchmark/experiments/summaries.py report --seeds 3    # the table of what has finished

The preset is `reviews`: a post is the beginning of a sentence from a film review, and its summary is the rest. SFT,
reward model and judge have one seed. The fine-tuned model and each policy end all held-out beginnings of the test
split with the same noise, and the judge, a reward model of chapter 1 that learned from other people's ratings,
compares the two.
"""

import json
import statistics
from pathlib import Path
from typing import Any

import pandas as pd

from benchmark import lab
from benchmark.experiments import people
from benchmark.lab import Args
from ppo_rlhf import sample
from ppo_rlhf.lib.base.files import read_json

SFT = {"reviews": "ppo_rlhf/tldr/sft.py --preset reviews --max_memory 8"}
REWARDS = {
    "pairs": "ppo_rlhf/tldr/reward.py --preset reviews --max_memory 8 --base_model ../../sfts/reviews",
    "judge": "ppo_rlhf/train_reward.py --preset reviews --label_dataset people/judge.json",
}
CURVES = {"score": "objective/scores", "VADER": "objective/vader", "KL": "objective/kl"}
SHOWN = [*CURVES, "wins", "judge difference", "vader difference", "held-out KL"]  # columns of the table
STARTS = ("sft-reviews", "reward-pairs")  # folders of what policies start from


def held_out(run: Path, rewards: Path) -> list[dict[str, Any]]:
    """Rows of held_out.jsonl: beginnings, their ends before and after PPO, and what is said of them.

    The judge reads texts without the end-of-text token, as it did in training.
    """
    kept = run / "held_out.jsonl"
    if not kept.is_file():
        rows = sample.sample(
            sample.Args(policy=str(run.parents[1] / "models" / run.name / "policy"), n=people.HELD_OUT)
        )
        for side in ("base", "policy"):
            scores = people.judge(rewards / "judge", [row["query"] + row[side] for row in rows])
            rows = [row | {f"{side} judge": score} for row, score in zip(rows, scores, strict=True)]
        kept.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return people.texts_of(run)


def measure(run: Path, meta: dict[str, Any], table: pd.DataFrame) -> dict[str, Any]:
    """The numbers of a finished run, and of SFT and the reward model that it started from."""
    folder = run.parents[3]
    results = {}
    for name in STARTS:
        (file,) = (folder / name / "seed1" / "runs").glob("*/meta.json")
        results |= read_json(file)["results"]
    found = {"accuracy": results["eval/rm/validation/accuracy"], "ceiling": results["ceiling"]}
    found |= {"ends before": results["validation/sft/eos_rate"], "ends after": meta["results"]["validation/eos_rate"]}
    found |= {name: table[column].tail(people.LAST).mean() for name, column in CURVES.items()}
    rows = held_out(run, folder / "rewards")
    for line in sample.changes(rows):
        name = line.pop("")
        found |= {f"{name} {column}": value for column, value in line.items()}
    found |= {"beginnings": len(rows), "held-out KL": statistics.fmean(row["kl"] for row in rows)}
    found |= {"wins": statistics.fmean(row["policy judge"] > row["base judge"] for row in rows)}
    found |= people.habit(*([row[side] for row in rows] for side in ("base", "policy")))
    return found | {"minutes": meta["wall_time"] / 60}


EXPERIMENT = lab.Experiment(
    name="summaries",
    script="ppo_rlhf/tldr/policy.py",
    common="--preset reviews --log_interval 0 --max_memory 8 --base_model ../../sfts/reviews",
    variants={"preset": "--rewards.trained_model ../../rewards/pairs"},
    curves=(*CURVES.values(), "objective/eos_rate", "objective/kl_coef", "val/var_explained"),
    measure=measure,
    table=lambda runs: lab.means(runs, SHOWN),
    also=lambda args: people.keep_texts(EXPERIMENT, args),
)


def run(experiment: lab.Experiment, args: Args) -> int:
    """Train SFT, reward models and policies, and report. Returns the exit status."""
    ready = lab.train_first(experiment, args, "sft", SFT) and lab.train_first(experiment, args, "reward", REWARDS)
    return lab.run(experiment, args) if ready else 1


if __name__ == "__main__":
    lab.main(EXPERIMENT, __doc__, run)
