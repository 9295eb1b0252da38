"""Rows of problems: from files, from the hub, from reasoning-gym; and the question and the answer of a row.

Forms of a row, of which the first columns that are there count:

    question         a text, a number, or messages of a chat, the last of them the user's; a content may be a list of
                     parts that are texts. Columns: the one that --task.question_column names, else prompt (TRL 1.16,
                     verl at b178a3c) or problem
    answer           a text, a number, a list of one of these, or messages, of which the last counts. Columns: the one
                     that --task.answer_column names, else reward_model.ground_truth (verl at b178a3c), solution or
                     completion (TRL 1.16). A name with dots is that of a column within another

reasoning_gym:<task>,<setting>=<number>,... makes problems: size of them to train on, 10,000 if it isn't given, by the
given seed, and HELD_OUT others. A problem that is held out is not trained on. The library makes and scores them in
processes of its own, since it isn't ours and its scorers read what a model writes.
"""

import ast
import csv
import difflib
import functools
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from ppo_rlhf.lib import rewards
from ppo_rlhf.lib.base import errors, files, hub
from ppo_rlhf.lib.base.errors import InputError, flag
from ppo_rlhf.lib.scoring.worker import Worker
from ppo_rlhf.tldr import posts

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
                try:
                    value = json.loads(value)
                except (ValueError, RecursionError) as error:
                    raise InputError(f"{what}, {name!r}: {value[:60]!r} is not JSON: {error}") from error
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
    """Raise if a generator is not there. It makes one problem, and nothing is downloaded."""
    if source.startswith(GENERATOR):
        find_generator(source, field)


def load(source: str, field: str, split: str) -> Iterable[posts.Row]:
    """Rows of a generator or a data set on the hub. split: train or test."""
    if source.startswith(GENERATOR):
        return generate(source, field, split)
    name, _, configuration = source.partition(":")
    remedy = "give a file or a folder with problems_<split>.jsonl, or use --preset sums"
    what = f"{flag(f'task.{field}')} {source}"
    with hub.hub_data_errors(what, remedy):
        from datasets import get_dataset_split_names, load_dataset

        splits = get_dataset_split_names(name, configuration or None)
        if split not in splits:
            more = f"; name one for {flag('task.test_problems')}" if field == "problems" else ""
            raise InputError(f"{what} has no split {split}, but {', '.join(splits)}{more}")
        return posts.hub_rows(source, split, load_dataset(name, configuration or None, split=split))


# ---- reasoning-gym ---------------------------------------------------------------------------------------------

# Making a problem may take minutes. Scoring an answer takes a moment, unless the answer is meant to hold it up.
MAKER = Worker("ppo_rlhf.lib.scoring.gym:call", computing=600, seconds=3_600)
SCORER = Worker("ppo_rlhf.lib.scoring.gym:call", computing=5, seconds=60)
# Tasks whose scorers evaluate an answer as Python, in reasoning-gym 0.1.25.
EVALUATED = (
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
)
# What they are given: numbers, operators, variables of one letter and some functions, but no attributes and no texts.
FUNCTIONS = "a?sin|a?cos|a?tan|sinh|cosh|tanh|exp|log|sqrt"
ARITHMETIC = re.compile(rf"(?:[0-9+\-*/^%(),\[\]\s]|\.(?!\s*[A-Za-z_])|(?<!\w)(?:[A-Za-z_]|{FUNCTIONS})(?!\w))*")


class Generator(NamedTuple):
    """A task of reasoning-gym and its settings."""

    what: str  # for messages
    task: str
    settings: dict[str, Any]
    version: str  # of the library

    @property
    def held_out(self) -> dict[str, Any]:
        """The settings that make the problems that are held out."""
        return self.settings | {"seed": self.settings["seed"] + OTHER_SEED, "size": HELD_OUT}

    def make(self, settings: dict[str, Any], number: int) -> dict[str, Any]:
        """A problem: a question, an answer, an entry for the scorer, and the score that it gives the answer."""
        return ask_maker(self.what, "make", self.task, json.dumps(settings), number)

    def rows(self) -> Iterator[dict[str, Any]]:
        """All problems, those that are held out first. None of them is also among the others."""
        questions = set()
        for number in range(HELD_OUT):
            row = self.make(self.held_out, number)
            if row["question"] not in questions:
                questions.add(row["question"])
                yield row | {"split": "test"}
        for number in range(self.settings["size"]):
            row = self.make(self.settings, number)
            if row["question"] not in questions:
                yield row | {"split": "train"}


def evaluates_text(source: str) -> bool:
    """Whether a generator makes these problems whose scorer evaluates an answer as Python."""
    return source.startswith(GENERATOR) and source.removeprefix(GENERATOR).split(",")[0] in EVALUATED


def ask(worker: Worker, what: str, *request: Any) -> tuple[Any, str]:
    """As Worker.ask. A process that was killed has no result, and an InputError says if the library isn't there."""
    try:
        return worker.ask(*request)
    except ImportError as error:
        raise InputError(f"{what} needs the extra `gym`: pip install -e '.[gym]' ({error})") from error
    except ChildProcessError as error:
        return None, str(error)


def ask_maker(what: str, *request: Any) -> Any:
    found, problem = ask(MAKER, what, *request)
    if problem:
        raise refused(what, problem)
    return found


def refused(what: str, why: str) -> InputError:
    reason = " ".join(why.split())
    return InputError(f"{what}: reasoning-gym refuses these settings: {reason}; write <setting>=<value>")


@functools.lru_cache(maxsize=2)
def find_generator(source: str, field: str) -> Generator:
    """The generator of this name. One problem has been made, to try its settings."""
    what = f"{flag(f'task.{field}')} {source}"
    task, *words = source.removeprefix(GENERATOR).split(",")
    version, tasks = ask_maker(what, "tasks")
    if task not in tasks:
        near = difflib.get_close_matches(task, tasks, 3, 0.5) or tasks[:5]
        raise InputError(f"{what}: reasoning-gym has no {task}; it has {', '.join(near)} and others")
    settings: dict[str, Any] = {"size": 10_000, "seed": 0}
    try:
        settings |= {key: ast.literal_eval(value) for key, value in (word.split("=") for word in words)}
        found = Generator(what=what, task=task, settings=settings, version=version)
        enough = settings["size"] > 0
        json.dumps(found.held_out)
    except (SyntaxError, TypeError, ValueError) as error:
        raise refused(what, str(error)) from error
    if not enough:
        raise InputError(f"{what} makes no problem that is not held out; choose settings with more problems")
    found.make(found.held_out, 0)
    return found


def generate(source: str, field: str, split: str) -> Iterator[posts.Row]:
    """The rows of a generator: train, or those that are held out.

    The first process makes them, once, and keeps them in the cache. The others wait for it.
    """
    found = find_generator(source, field)
    made_of = json.dumps([*found[1:], OTHER_SEED, HELD_OUT])
    name = f"reasoning_gym-{found.task}-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}.jsonl"
    path = files.cache_folder() / name
    if not path.exists() and errors.is_first_process():
        number = found.settings["size"] + HELD_OUT
        print(f"{source}: making {number:,} problems, which are kept in {path}", flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{name}.{os.getpid()}.tmp")
        try:
            with temporary.open("w") as file:
                file.writelines(json.dumps(row) + "\n" for row in found.rows())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    while not path.exists():
        time.sleep(1)
    MAKER.close()
    rows = [(where, row) for where, row in posts.read_jsonl(path, field) if row["split"] == split]
    if not rows:
        raise InputError(f"{found.what} makes no problem that is not held out; choose settings with more problems")
    settings = json.dumps(found.settings)
    for where, row in rows:
        gold = rewards.Gold(row["answer"])
        gold.own_score = row["own_score"]
        gold.score = functools.partial(score, found.what, found.task, settings, row["entry"], row["answer"])
        yield where, {"question": row["question"], "answer": gold}


def score(what: str, task: str, settings: str, entry: str, gold: str, answer: str) -> float:
    """What the task's own scorer gives an answer, 0 to 1; 0 if it fails, ends or takes too long."""
    if task in EVALUATED and answer != gold and not ARITHMETIC.fullmatch(answer):
        return 0.0
    found, _ = ask(SCORER, what, "score", task, settings, entry, answer)
    return found if isinstance(found, float) and 0 <= found <= 1 else 0.0
