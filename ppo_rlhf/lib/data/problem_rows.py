"""Rows of problems: from files, from the hub, from reasoning-gym; and the question and the answer of a row.

Forms of a row, of which the first columns that are there count:

    question         a text, a number, or messages of a chat, the last of them the user's; a content may be a list of
                     parts that are texts. Columns: the one that --task.question_column names, else prompt (TRL 1.16,
                     verl at b178a3c) or problem
    answer           a text, a number, a list of one of these, or messages, of which the last counts. Columns: the one
                     that --task.answer_column names, else reward_model.ground_truth (verl at b178a3c), solution or
                     completion (TRL 1.16). A name with dots is that of a column within another

reasoning_gym:<task>,<setting>=<number>,... makes problems: size of them to train on, 10,000 if it isn't given, by the
given seed, and HELD_OUT others. A problem that is held out is not trained on.
"""

import ast
import csv
import difflib
import functools
import json
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from ppo_rlhf.lib import rewards
from ppo_rlhf.lib.base import files, hub_files
from ppo_rlhf.lib.base.errors import InputError, flag
from ppo_rlhf.lib.data import posts

FILES = (".jsonl", ".parquet", ".csv")
GENERATOR = "reasoning_gym:"
HELD_OUT, OTHER_SEED = 500, 2**20  # problems of a generator that are held out, and what is added to its seed for them
ON_HUB = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")  # owner, name and configuration of a data set
Messages = list[dict[str, str]]

# ---- Columns ---------------------------------------------------------------------------------------------------


def find(row: Mapping[str, Any], column: str, others: Iterable[str], what: str) -> tuple[str, Any]:
    """The first of these columns that a row has, and what is in it. column: the one that was asked for."""
    for name in (column, *others):
        value: Any = row
        for part in [name] if name in row else name.split("."):
            if isinstance(value, str) and value.lstrip().startswith("{"):  # a column of parquet may hold JSON
                value = json.loads(value)
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            return name, value
    raise InputError(f"{what} has nothing under {column!r}; it has {', '.join(map(repr, row))}")


def as_text(value: Any, what: str) -> str:
    """A text or a number as a text; of a list of one, that one."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, Decimal) and value.is_finite():  # a number of parquet
        value = f"{value.normalize():f}"
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value != value:
        raise InputError(f"{what} must be a text or a number; it is {str(value)[:60]!r}")
    text = value if isinstance(value, str) else str(value).removesuffix(".0")
    files.check_text(text, what)
    return text


def as_messages(value: Any, what: str) -> Messages | None:
    """The messages of a chat, or None if the value is another thing."""
    if not (isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value)):
        return None
    return [
        {
            "role": as_text(one.get("role"), f"{what} a message's role,"),
            "content": as_text(joined(one.get("content")), f"{what} a message's content,"),
        }
        for one in value
    ]


def joined(content: Any) -> Any:
    """The text of a content that is a list of parts, each with a text, as OpenAI writes them; else the content."""
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    return "".join(texts) if texts and all(isinstance(text, str) for text in texts) else content


def question_of(row: Mapping[str, Any], column: str, what: str) -> str | Messages:
    """The question of a row: a text, or messages if there are more than the user's one."""
    others = ("prompt", "problem") if column == "question" else ()
    name, value = find(row, column, others, what)
    messages = as_messages(value, f"{what}, {name!r},")
    if messages is None:
        return as_text(value, f"{what}, {name!r},")
    if messages[-1]["role"] != "user":
        raise InputError(f"{what}, {name!r}: the last message is the {messages[-1]['role']}'s; it must be the user's")
    return messages[0]["content"] if len(messages) == 1 else messages


def answer_of(row: Mapping[str, Any], column: str, what: str) -> str:
    """The answer of a row, from which --task.answer_format takes what a response must say."""
    others = ("reward_model.ground_truth", "solution", "completion") if column == "answer" else ()
    name, value = find(row, column, others, what)
    messages = as_messages(value, f"{what}, {name!r},")
    return messages[-1]["content"] if messages else as_text(value, f"{what}, {name!r},")


# ---- Files and the hub -----------------------------------------------------------------------------------------


def read_file(path: Path, field: str) -> list[posts.Row]:
    """The rows of a file of problems."""
    if path.suffix == ".jsonl":
        return posts.read_jsonl(path, field)
    what = f"{flag(f'task.{field}')} {path}"
    try:
        if path.suffix == ".csv":
            with path.open(encoding="utf-8-sig", newline="") as file:
                rows = [*csv.DictReader(file)]
        else:
            from pyarrow import parquet

            rows = parquet.read_table(path).to_pylist()
    except (OSError, ValueError, csv.Error) as error:  # pyarrow's errors are ValueErrors
        raise InputError(f"{what}: cannot be read: {' '.join(str(error).split())[:200]}") from error
    return [(f"{path}, row {number}", row) for number, row in enumerate(rows, 1)]


def is_elsewhere(source: str) -> bool:
    """Whether this names a generator or a data set on the hub."""
    return source.startswith(GENERATOR) or (
        ON_HUB.fullmatch(source) is not None and not source.endswith(FILES) and not Path(source).exists()
    )


def check_name(source: str, field: str) -> None:
    """Raise if a generator is not there. Nothing is downloaded."""
    if source.startswith(GENERATOR):
        generate(source, field)


def load(source: str, field: str, split: str) -> Iterable[posts.Row]:
    """Rows of a generator or a data set on the hub. split: train or test."""
    if source.startswith(GENERATOR):
        train, held_out = generate(source, field)
        return posts.hub_rows(source, split, train if split == "train" else held_out)
    name, _, configuration = source.partition(":")
    remedy = "give a file or a folder with problems_<split>.jsonl, or use --preset sums"
    what = f"{flag(f'task.{field}')} {source}"
    with hub_files.hub_data_errors(what, remedy):
        from datasets import get_dataset_split_names, load_dataset

        splits = get_dataset_split_names(name, configuration or None)
        if split not in splits:
            more = f"; name one for {flag('task.test_problems')}" if field == "problems" else ""
            raise InputError(f"{what} has no split {split}, but {', '.join(splits)}{more}")
        return posts.hub_rows(source, split, load_dataset(name, configuration or None, split=split))


# ---- reasoning-gym ---------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def generate(source: str, field: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of a generator to train on, and those that are held out."""
    what = f"{flag(f'task.{field}')} {source}"
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise InputError(f"{what} needs the extra `gym`: pip install -e '.[gym]' ({error})") from error
    name, *settings = source.removeprefix(GENERATOR).split(",")
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, 3, 0.5) or sorted(DATASETS)[:5]
        raise InputError(f"{what}: reasoning-gym has no {name}; it has {', '.join(near)} and others")
    config: dict[str, Any] = {"size": 10_000, "seed": 0}
    try:
        config |= {key: ast.literal_eval(value) for key, value in (setting.split("=") for setting in settings)}
        made = reasoning_gym.create_dataset(name, **config)
        others = {"seed": config["seed"] + OTHER_SEED, "size": HELD_OUT}
        held_out = reasoning_gym.create_dataset(name, **config | others)
    except (AssertionError, SyntaxError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{what}: reasoning-gym refuses these settings: {reason}; write <setting>=<value>"
        ) from error
    test = {entry["question"]: row_of(held_out, entry) for entry in held_out}
    train = [row_of(made, entry) for entry in made if entry["question"] not in test]
    if not train:
        raise InputError(f"{what} makes no problem that is not held out; choose settings with more problems")
    return train, [*test.values()]


def row_of(dataset: Any, entry: dict[str, Any]) -> dict[str, Any]:
    gold = rewards.Gold("" if entry["answer"] is None else entry["answer"])
    gold.score = functools.partial(dataset.score_answer, entry=entry)
    return {"question": entry["question"], "answer": gold}
