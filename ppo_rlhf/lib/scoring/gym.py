"""Problems and scorers of the library reasoning-gym. It runs in a worker, see worker.py."""

import functools
import importlib.metadata
import json
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS


def call(function: str, *arguments: Any) -> Any:
    """What one of the functions below returns."""
    return {"tasks": tasks, "make": make, "score": score}[function](*arguments)


def tasks() -> tuple[str, list[str]]:
    """The version of the library, and the names of its tasks."""
    return importlib.metadata.version("reasoning-gym"), sorted(DATASETS)


@functools.lru_cache(maxsize=4)
def dataset(task: str, settings: str) -> Any:
    return reasoning_gym.create_dataset(task, **json.loads(settings))


def make(task: str, settings: str, number: int) -> dict[str, Any]:
    """The problem with a number, from 0 on. settings: a JSON object. `score` needs the entry."""
    entry = dataset(task, settings)[number]
    answer = "" if entry["answer"] is None else entry["answer"]
    packed = json.dumps(pack(entry))
    try:
        own_score = score(task, settings, packed, answer)
    except Exception:  # of any kind: the scorer is another's
        own_score = 0.0
    return {"question": entry["question"], "answer": answer, "entry": packed, "own_score": own_score}


def score(task: str, settings: str, entry: str, answer: str) -> float:
    """What the task's scorer gives an answer to an entry."""
    return float(dataset(task, settings).score_answer(answer, unpack(json.loads(entry))))


def pack(value: Any) -> Any:
    """The value as JSON can hold it, which has neither tuples nor keys that are no texts."""
    match value:
        case dict():
            return {"dict": [[pack(key), pack(item)] for key, item in value.items()]}
        case tuple():
            return {"tuple": [pack(item) for item in value]}
        case list():
            return [pack(item) for item in value]
    return value


def unpack(value: Any) -> Any:
    """What `pack` was given."""
    match value:
        case {"dict": items}:
            return {unpack(key): unpack(item) for key, item in items}
        case {"tuple": items}:
            return tuple(unpack(item) for item in items)
        case list():
            return [unpack(item) for item in value]
    return value
