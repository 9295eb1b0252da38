"""A policy of sums teaches the language model that it began as: rlvr/policy.py with --rewards.teacher.

    make demo-rlvr                                            # the teacher: its newest policy in models/
    python benchmark/experiments/teacher.py run               # five seeds of each; repeat it to resume
    python benchmark/experiments/teacher.py report            # the table of what has finished

`sampled` compares the log-probs of sampled tokens, `exact` sums over the vocabulary, both with gamma 0, and `dr_grpo`
learns from the verifier alone. All see the same number of responses.
"""

from pathlib import Path
from typing import Any

import pandas as pd

from benchmark import lab
from benchmark.lab import ROOT, cell

POLICIES = sorted((ROOT / "models").glob("rlvr_policy__sums__*/policy"), key=lambda folder: folder.stat().st_mtime)
TEACHER = POLICIES[-1] if POLICIES else ROOT / "models" / "policy-of-make-demo-rlvr"
DISTIL = f"--rewards.teacher {TEACHER} --ppo.advantage reinforce++ --ppo.whiten_advantages False --ppo.gamma 0"
VARIANTS = {
    "sampled": DISTIL,
    "exact": f"{DISTIL} --rewards.kl_estimator full",
    "dr_grpo": "--ppo.advantage dr_grpo --ppo.samples_per_prompt 8 --ppo.loss_aggregation seq-mean-token-sum-norm",
}
EVERY, UPDATES, BATCH = 5, 20, 64
GREEDY = "eval/gsm8k_strict"
CURVES = (GREEDY, "objective/verifiable_correct_rate", "objective/kl", "policy/entropy_avg", "time/training")


def measure(run: Path, meta: dict[str, Any], table: pd.DataFrame) -> dict[str, Any]:
    """The greedy accuracy before each EVERY-th update and after the last, and the KL at both ends."""
    found = {f"after {n}": table[GREEDY].iloc[n] for n in range(0, UPDATES, EVERY)}
    found[f"after {UPDATES}"] = meta["results"][GREEDY]
    if "objective/kl" in table:
        found |= {"KL before": table["objective/kl"].iloc[0], "KL after": table["objective/kl"].tail(3).mean()}
    return found | {"minutes": meta["wall_time"] / 60}


def rows_of(runs: pd.DataFrame) -> list[dict[str, str]]:
    """One row for each variant."""
    rows = []
    for name, own in runs.groupby("variant", sort=False):
        row = {"variant": f"`{name}`", "seeds": str(len(own))}
        for n in range(0, UPDATES + 1, EVERY):
            row[f"after {n} (%)"] = cell(100 * own[f"after {n}"], ".1f")
        for column in ("KL before", "KL after"):
            row[column] = cell(own[column], ".2f") if own[column].notna().all() else ""
        rows.append(row)
    return rows


EXPERIMENT = lab.Experiment(
    name="teacher",
    script="ppo_rlhf/rlvr/policy.py",
    common=f"--preset sums --ppo.batch_size {BATCH} --ppo.total_episodes {UPDATES * BATCH} --ppo.nminibatches 1 "
    f"--ppo.critic_warmup 0 --eval_interval {EVERY} --eval_problems 256 --eval_samples 0 --trace_interval 0 "
    "--log_interval 0 --save_interval 0",
    variants=VARIANTS,
    curves=CURVES,
    measure=measure,
    table=rows_of,
)

if __name__ == "__main__":
    lab.main(EXPERIMENT, __doc__)
