"""A real language model learns arithmetic: rlvr/policy.py with the preset arithmetic, five seeds of three methods.

    python benchmark/experiments/arithmetic.py run                     # all of them; repeat it to resume
    python benchmark/experiments/arithmetic.py run --only dr_grpo      # some of them, by name
    python benchmark/experiments/arithmetic.py report                  # the table of what has finished

`dr_grpo` is the preset. `gae` has a critic in place of the groups' means, which learns alone at first, and
`reinforce++` has neither. All else is the same, and so are the problems and the noise of a seed.
"""

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd

from benchmark import lab
from benchmark.lab import cell
from ppo_rlhf.rlvr import rewards

VARIANTS = {
    "dr_grpo": "",
    "gae": "--ppo.advantage gae --ppo.critic_warmup 3",
    "reinforce++": "--ppo.advantage reinforce++",
}
LAST = 3  # updates at the end that are averaged
SHARES = {"greedy": "eval/gsm8k_flexible", "samples": "eval/mean@4", "pass@4": "eval/pass@4", "ends": "eval/stopped"}
CURVES = {"entropy": "policy/entropy_avg", "equal groups": "val/groups_zero_std", "KL": "objective/kl"}


def measure(run: Path, meta: dict[str, Any], table: pd.DataFrame) -> dict[str, Any]:
    """The numbers of a finished run, before and after."""
    found = {}
    for name, column in SHARES.items():
        found[f"{name} before"] = table[column].iloc[0]
        found[f"{name} after"] = meta["results"][column]
    for name, column in CURVES.items():
        found[f"{name} before"] = table[column].iloc[0]
        found[f"{name} after"] = table[column].tail(LAST).mean()
    solved = [json.loads(line) for line in (run / "evaluation.jsonl").read_text().splitlines()]
    numbers = [re.search(rewards.NUMBER, row["response"]) is not None for row in solved]
    found["a number after"] = sum(numbers) / len(numbers)
    found["minutes"] = meta["wall_time"] / 60
    return found


def means_of(runs: pd.DataFrame) -> list[dict[str, str]]:
    """One row for each variant, and one for what all started from."""
    first = runs.drop_duplicates("seed").assign(variant="before")
    rows = []
    for name, own in [("before", first), *runs.groupby("variant", sort=False)]:
        when = "before" if name == "before" else "after"
        row = {"variant": f"`{name}`" if when == "after" else name, "seeds": str(len(own))}
        for share in (*SHARES, "equal groups"):
            row[f"{share} (%)"] = cell(100 * own[f"{share} {when}"], ".1f")
        row["a number (%)"] = cell(100 * own["a number after"], ".1f") if when == "after" else ""
        for column in ("entropy", "KL"):
            row[column] = cell(own[f"{column} {when}"], ".2f")
        row["minutes"] = cell(own["minutes"], ".1f") if when == "after" else ""
        rows.append(row)
    return rows


EXPERIMENT = lab.Experiment(
    name="arithmetic",
    script="ppo_rlhf/rlvr/policy.py",
    common="--preset arithmetic --log_interval 0",
    variants=VARIANTS,
    curves=tuple(CURVES.values()),
    measure=measure,
    table=means_of,
)

if __name__ == "__main__":
    lab.main(EXPERIMENT, __doc__)
