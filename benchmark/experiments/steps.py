"""Where a reward is paid: PPO with a critic on sums, whose steps can be checked exactly. rlvr/policy.py.

    python benchmark/experiments/steps.py run --only end steps --seeds 10
    python benchmark/experiments/steps.py run --only trap once --seeds 3
    python benchmark/experiments/steps.py report --seeds 10       # the table of what has finished

Each right line of a solution earns an equal share of 1, the line of the answer too. `steps` pays it at the end of the
line, `end` all of it at the end of the response. In `trap`, each true equation earns 0.2, such as 8+6=14, as often as
the policy writes it, and the answer 1; in `once`, only an equation that wasn't there before.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from benchmark import lab
from benchmark.lab import cell
from ppo_rlhf.rlvr import problems
from ppo_rlhf.rlvr.steps import ends_of_steps, lines_of
from ppo_rlhf.tldr import models

# ---- Rewards ---------------------------------------------------------------------------------------------------


@cache
def solutions() -> dict[str, list[str]]:
    """The equations of each problem's solution, and its answer, by the text of its prompt."""
    rows = [row for split in ("train", "test") for _, row in problems.load_rows("sums", "problems", split)]
    return {f"{row['question']}\n": last_words(row["answer"]) for row in rows}


def last_words(text: str) -> list[str]:
    """Of each line its equation, or the answer: what a pupil writes before it does not matter."""
    return [line.split()[-1] for line in lines_of(text)]


def shares(prompt: str, response: str) -> list[float]:
    """What each line of a response earns."""
    solution = solutions().get(prompt, [])
    said = last_words(response)
    right = [written == wanted for written, wanted in zip(said, solution, strict=False)]
    return [one / len(solution) for one in right] + [0.0] * (len(said) - len(right))


def at_the_end(prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
    """A verifier: the sum of what its lines earn."""
    return [sum(shares(*pair)) for pair in zip(prompts, responses, strict=True)]


def at_each_step(
    prompts: list[str], responses: list[str], completion_ids: list[list[int]]
) -> list[list[tuple[int, float]]]:
    """A verifier: the last token of each line gets what the line earns."""
    tokenizer = tokenizer_of_sums()
    ends = [ends_of_steps(tokenizer, ids, {tokenizer.eos_token_id}) for ids in completion_ids]
    earned = map(shares, prompts, responses)
    return [
        [(place, share) for (place, _), share in zip(*of_one, strict=True)]
        for of_one in zip(ends, earned, strict=True)
    ]


@cache
def tokenizer_of_sums() -> Any:
    return models.load_tokenizer("sums")


def equation(problem: str, steps: list[str]) -> float:
    """A step's reward: a share for every equation that is true."""
    left, _, right = steps[-1].split()[-1].partition("=")
    for sign, of_two in {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}.items():
        one, found, other = left.partition(sign)
        if found and all(number.isdecimal() for number in (one, other, right)):
            return 0.2 * (of_two(int(one), int(other)) == int(right))
    return 0.0


def new_equation(problem: str, steps: list[str]) -> float:
    """A step's reward: a share for an equation that is true and that no earlier step had."""
    *before, newest = [step.split()[-1] for step in steps]
    return 0.0 if newest in before else equation(problem, steps)


# ---- Runs ------------------------------------------------------------------------------------------------------

MODULE = "benchmark.experiments.steps"
VARIANTS = {
    "end": f"--rewards.verifier {MODULE}:at_the_end",
    "steps": f"--rewards.verifier {MODULE}:at_each_step",
    "trap": f"--rewards.steps {MODULE}:equation",
    "once": f"--rewards.steps {MODULE}:new_equation",
}
EVERY, UPDATES = 5, 20
GREEDY = "eval/gsm8k_strict"
CURVES = (GREEDY, "objective/scores", "val/sequence_lengths", "val/stop_token_rate", "val/explained_var")


def measure(run: Path, meta: dict[str, Any], table: pd.DataFrame) -> dict[str, Any]:
    """The greedy accuracy before each EVERY-th update and after the last; length and score at both ends."""
    found = {f"after {n}": table[GREEDY].iloc[n] for n in range(0, UPDATES, EVERY)}
    found[f"after {UPDATES}"] = meta["results"][GREEDY]
    for name, column in (("tokens", "val/sequence_lengths"), ("score", "objective/scores")):
        found |= {f"{name} before": table[column].iloc[0], f"{name} after": table[column].tail(3).mean()}
    return found | {"minutes": meta["wall_time"] / 60}


def rows_of(runs: pd.DataFrame) -> list[dict[str, str]]:
    """One row for each variant."""
    rows = []
    for name, own in runs.groupby("variant", sort=False):
        row = {"variant": f"`{name}`", "seeds": str(len(own))}
        for n in range(0, UPDATES + 1, EVERY):
            row[f"after {n} (%)"] = cell(100 * own[f"after {n}"], ".1f")
        rows.append(row | {name: cell(own[name], ".2f") for name in ("tokens after", "score after")})
    return rows


EXPERIMENT = lab.Experiment(
    name="steps",
    script="ppo_rlhf/rlvr/policy.py",
    common=f"--preset sums --ppo.total_episodes {UPDATES * 256} --eval_interval {EVERY} --eval_problems 256 "
    "--eval_samples 0 --trace_interval 0 --log_interval 0 --save_interval 5",
    variants=VARIANTS,
    curves=CURVES,
    measure=measure,
    table=rows_of,
)

if __name__ == "__main__":
    lab.main(EXPERIMENT, __doc__)
