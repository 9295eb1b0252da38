"""Problems and scorers of the library reasoning-gym. It runs in a worker, see confined_worker.py.

A source is reasoning_gym:<task>,<setting>=<value>,... as in rlvr/problem_rows.py.
"""

import ast
import difflib
import functools
import importlib.metadata
import pickle
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS


def call(function: str, *arguments: Any) -> Any:
    """What one of the functions below returns."""
    return {"describe": describe, "make": make, "score": score}[function](*arguments)


@functools.lru_cache(maxsize=4)
def dataset(source: str, held_out: int = 0) -> Any:
    """The problems of a source, by number. held_out: how many others there are, by another seed; 0: its own."""
    task, *words = source.partition(":")[2].split(",")
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, 3, 0.5) or sorted(DATASETS)[:5]
        raise ValueError(f"there is no {task}, but {', '.join(near)} and others")
    settings = {name: ast.literal_eval(value) for name, value in (word.split("=") for word in words)}
    settings = {"size": 10_000, "seed": 0} | settings
    if held_out:
        settings |= {"size": held_out, "seed": settings["seed"] + 2**20}
    return reasoning_gym.create_dataset(task, **settings)


def describe(source: str) -> tuple[str, int]:
    """The version of the library, and how many problems a source has. One of them is made, to try the settings."""
    make(source, 0, 0)
    return importlib.metadata.version("reasoning-gym"), len(dataset(source))


def make(source: str, held_out: int, number: int) -> dict[str, str]:
    """The problem with a number, from 0 on. `score` needs the entry."""
    entry = dataset(source, held_out)[number]
    answer = "" if entry["answer"] is None else entry["answer"]
    # JSON has neither tuples nor keys that are no texts. Only a worker, with its limits, reads this again.
    return {"question": entry["question"], "answer": answer, "entry": pickle.dumps(entry).hex()}


def score(source: str, entry: str, answer: str) -> float:
    """What the task's scorer gives an answer to an entry."""
    return float(dataset(source).score_answer(answer, pickle.loads(bytes.fromhex(entry))))
