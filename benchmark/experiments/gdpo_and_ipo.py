"""Two methods of 2026 next to what they replace: chapter 3 on sums, five seeds of each.

    python benchmark/experiments/gdpo_and_ipo.py run --workers 2        # all of them; repeat it to resume
    python benchmark/experiments/gdpo_and_ipo.py run --only loss        # one part
    python benchmark/experiments/gdpo_and_ipo.py report                 # table of what has finished

    sources    gdpo, grpo and dr_grpo with two sources of the score: the verifier, and `retells`, which asks for a
               style that three in ten samples have at first
    loss       ppo, which clips the ratio, and ipo, with 16 optimiser steps on each batch, so that a bound matters

Runs are short: 10 and 6 updates of 64 episodes, in groups of eight. The samples of training are measured, whose
problems are new. Runs of a seed have the same problems in the same order, and the same sampling noise.
"""

from pathlib import Path
from typing import Any

import pandas as pd

from benchmark import lab
from benchmark.experiments.estimators import advantage
from benchmark.lab import CORRECT, Column

TWO_SOURCES = "--rewards.format benchmark.experiments.gdpo_and_ipo:retells --ppo.total_episodes 640"
MANY_STEPS = f"{advantage('dr_grpo')} --ppo.noptepochs 4 --ppo.nminibatches 4 --ppo.total_episodes 384 --ppo.loss"
VARIANTS = {f"sources-{name}": f"{advantage(name)} {TWO_SOURCES}" for name in ("grpo", "gdpo", "dr_grpo")}
VARIANTS |= {f"loss-{name}": f"{MANY_STEPS} {name}" for name in ("ppo", "ipo")}
BASELINES = {"sources": "grpo", "loss": "ppo"}
SCORES, LEFT_OUT, APPROX_KL = "objective/scores", "policy/clipfrac_avg", "policy/approxkl_avg"
LAST = 3  # updates at the end that are averaged
COLUMNS = (
    Column(head="correct, all updates (%)", of="course"),
    Column(head="difference", of="course", form="+.1f", paired=True),
    Column(head="correct, last updates (%)", of="last"),
    Column(head="its difference", of="last", form="+.1f", paired=True),
    Column(head="retells, all updates (%)", of="retells_course", optional=True),
    Column(head="difference of that", of="retells_course", form="+.1f", paired=True, optional=True),
    Column(head="retells, last updates (%)", of="retells", optional=True),
    Column(head="and its difference", of="retells", form="+.1f", paired=True, optional=True),
    Column(head="clipped or left out (%)", of=LEFT_OUT),
    Column(head="`approxkl`", of=APPROX_KL, form=".4f", scale=1),
)


def retells(prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
    """1 where every step begins with a sentence, as in `She finds 6. 8+6=14`."""
    steps = [response.split("####")[0].strip().split("\n") for response in responses]
    return [float(all(". " in line for line in lines)) for lines in steps]


def labels(name: str) -> dict[str, str]:
    part, _, variant = name.partition("-")
    return {"part": part, "variant": variant}


def measure(folder: Path, meta: dict[str, Any], table: pd.DataFrame) -> dict[str, Any]:
    course, last = table.mean(), table.tail(LAST).mean()
    found = {"course": course[CORRECT], "last": last[CORRECT]}
    if meta["args"]["rewards"]["format"]:
        found |= {"retells_course": course[SCORES] - course[CORRECT], "retells": last[SCORES] - last[CORRECT]}
    return found | {name: course[name] for name in (LEFT_OUT, APPROX_KL)}


def table_of(runs: pd.DataFrame) -> list[dict[str, str]]:
    rows = []
    for part, own in runs.groupby("part", sort=False):
        found = lab.rows_of(own, COLUMNS, baseline=f"variant == '{BASELINES[part]}'")
        rows += [{"part": part, "what": f"`{name}`"} | row for (name,), row in found]
    return rows


EXPERIMENT = lab.Experiment(
    name="gdpo-and-ipo",
    script="ppo_rlhf/rlvr_policy.py",
    common="--preset sums --ppo.batch_size 64",
    fixed=f"{lab.QUIET} --eval_problems 16 --eval_samples 0",
    variants=VARIANTS,
    labels=labels,
    curves=(CORRECT, SCORES, LEFT_OUT, APPROX_KL),
    measure=measure,
    table=table_of,
)

if __name__ == "__main__":
    lab.main(EXPERIMENT, __doc__)
