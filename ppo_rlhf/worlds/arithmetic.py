"""Arithmetic: sums and differences of two small numbers, for chapter 3 with a real language model.

    {"question": "What is 7 + 5?", "answer": "12", "operation": "sum"}

A world of problems only; the preset `arithmetic` gives them to SmolLM2-135M-Instruct (smollm.py). That model solves
some of them, and hardly any with numbers of two digits, from which it could not learn. The numbers are from 1 to
LARGEST, and differences are not negative.

There are so few problems that a run meets each of them several times. So what is held out is held out thoroughly:
where 7 + 5 is a problem of the test split, neither 7 + 5 nor 5 + 7 is one of the train split.

    python ppo_rlhf/worlds/arithmetic.py    # write the problems, unless they are there, and say where
"""

import random
from pathlib import Path
from typing import Any

from ppo_rlhf.lib.base import errors, files
from ppo_rlhf.worlds import building

LARGEST = 19
HELD_OUT = 50  # sums, and as many differences
SEED = 1  # of what is held out and of the order; not the seed of a training run


def row_of(left: int, sign: str, right: int) -> dict[str, Any]:
    answer = left + right if sign == "+" else left - right
    kind = {"+": "sum", "-": "difference"}[sign]
    return {"question": f"What is {left} {sign} {right}?", "answer": str(answer), "operation": kind}


def split_problems() -> dict[str, list[dict[str, Any]]]:
    """The rows of both splits."""
    rng, numbers = random.Random(SEED), range(1, LARGEST + 1)
    pairs = [(left, right) for left in numbers for right in numbers]
    splits: dict[str, list[dict[str, Any]]] = {"test": [], "train": []}
    for sign, possible in {"+": pairs, "-": [(left, right) for left, right in pairs if left >= right]}.items():
        kinds = sorted({tuple(sorted(pair)) for pair in possible})  # a sum and the same turned around are one
        held_out = {kind: rng.sample(kind, 2) for kind in rng.sample(kinds, HELD_OUT)}
        for kind, (left, right) in held_out.items():
            splits["test"].append(row_of(left, sign, right) if sign == "+" else row_of(kind[1], sign, kind[0]))
        splits["train"] += [row_of(a, sign, b) for a, b in possible if tuple(sorted((a, b))) not in held_out]
    for rows in splits.values():
        rng.shuffle(rows)
    return splits


def build_world(folder: Path) -> None:
    with building.new_world(folder, "arithmetic") as place:
        for split, rows in split_problems().items():
            (place / f"problems_{split}.jsonl").write_text(files.json_lines(rows))


def find_world() -> Path:
    """The folder of the problems; it is written if it does not exist."""
    return building.find("arithmetic", [LARGEST, HELD_OUT, SEED], build_world)


def main() -> None:
    world, splits = find_world(), split_problems()
    print(f"{world}: {len(splits['train'])} problems to train on, and {len(splits['test'])} held out, such as")
    for row in splits["test"][:4]:
        print(f"{row['question']} {row['answer']}")


if __name__ == "__main__":
    errors.run_script(main)
