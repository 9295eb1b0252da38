"""The question and the answer of a row of problems; and problems that reasoning-gym makes.

Forms of a row, of which the first columns that are there count:

    question         a text, a number, or messages of a chat, the last of them the user's. Columns: the one that
                     --task.question_column names, else prompt (TRL 1.16, verl at b178a3c) or problem
    answer           a text, a number, or messages, of which the last counts; for a verifier of the user's also an
                     object, a list or a boolean, which becomes JSON text. Columns: the one that
                     --task.answer_column names, else reward_model.ground_truth (verl at b178a3c), solution or
                     completion (TRL 1.16). A name with dots is that of a column within another

reasoning_gym:<task>,<setting>=<number>,... makes problems: size of them to train on, 10,000 if it isn't given, by the
given seed, and HELD_OUT others. A problem that is held out is not trained on. The library makes and scores them in
processes of its own, since it isn't ours and its scorers read what a model writes.
"""

import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from datasets import Dataset
from datasets.exceptions import DatasetGenerationError

from ppo_rlhf.rlvr import rewards
from ppo_rlhf.rlvr.confined_worker import Worker
from ppo_rlhf.tldr import data_files, reward_functions
from ppo_rlhf.tldr.chat_templates import Messages
from ppo_rlhf.train_policy import InputError, input_errors

GENERATOR = "reasoning_gym:"
HELD_OUT = 500  # problems of a generator

# ---- Columns: what is wrong in a row is a ValueError, or whatever Python says of it ----------------------------


def question_of(row: Mapping[str, Any], column: str) -> str | Messages:
    """The question of a row: a text, or messages if there are more than the user's one."""
    others = ("prompt", "problem") if column == "question" else ()
    name, value = data_files.find(row, column, *others)
    messages = data_files.as_messages(value, "user")
    if messages[-1]["role"] != "user":
        raise ValueError(f"{name!r}: the last message is the {messages[-1]['role']}'s; it must be the user's")
    return messages[0]["content"] if len(messages) == 1 else messages


def answer_of(row: Mapping[str, Any], column: str, *, by_function: bool = False) -> tuple[str, str]:
    """The column of a row's answer, and the answer, from which --task.answer_format takes what a response must say.

    by_function: a function of the user's is the verifier, so that the answer may also be JSON, which is taken whole.
    """
    others = ("reward_model.ground_truth", "solution", "completion") if column == "answer" else ()
    name, value = data_files.find(row, column, *others)
    is_chat = isinstance(value, list) and any(isinstance(one, Mapping) and "content" in one for one in value)
    if not isinstance(value, bool | Mapping | list) or is_chat:
        return name, data_files.as_messages(value, "assistant")[-1]["content"]
    text = json.dumps(value, ensure_ascii=False, default=str)
    if not by_function:
        raise ValueError(
            f"{name!r} must be a text, a number, or messages; it is {text[:60]!r}, which only a function of your own "
            f"can read: --rewards.verifier package.module:name gets it as JSON text"
        )
    return name, reward_functions.JsonText(text)


# ---- reasoning-gym ---------------------------------------------------------------------------------------------

# Making a problem may take minutes. Scoring an answer takes a moment, unless the answer is meant to hold it up.
MAKER = Worker("ppo_rlhf.rlvr.reasoning_gym_calls:call", computing=600, seconds=3_600)
SCORER = Worker("ppo_rlhf.rlvr.reasoning_gym_calls:call", computing=5, seconds=60)
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


def evaluates_text(source: str) -> bool:
    """Whether a generator makes these problems whose scorer evaluates an answer as Python."""
    return source.startswith(GENERATOR) and task_of(source) in EVALUATED


def task_of(source: str) -> str:
    return source.removeprefix(GENERATOR).split(",")[0]


def ask_maker(what: str, *request: Any) -> Any:
    with input_errors(f"{what} needs the extra `gym`: pip install -e '.[gym]'"):
        result, problem = MAKER.ask(*request)
    if problem:
        raise InputError(f"{what}: reasoning-gym says: {problem}; write {GENERATOR}<task>,<setting>=<value>,...")
    return result


def make(source: str, size: int, version: str) -> Iterator[dict[str, Any]]:
    """All problems of a generator, those that are held out first. None of them is also among the others.

    version: of the library. Others may make other problems, so what is kept of one is for this version.
    """
    held_out = set()
    for number in range(HELD_OUT):
        row = ask_maker(source, "make", source, HELD_OUT, number)
        if row["question"] not in held_out:
            held_out.add(row["question"])
            yield row | {"split": "test"}
    for number in range(size):
        row = ask_maker(source, "make", source, 0, number)
        if row["question"] not in held_out:
            yield row | {"split": "train"}


def generate(source: str, field: str, split: str) -> Iterator[data_files.Row]:
    """The rows of a generator: train, or those that are held out.

    One process makes them, once, for the cache of `datasets`. The others wait for it at a lock.
    """
    version, size = ask_maker(f"--task.{field} {source}", "describe", source)
    kwargs = {"source": source, "size": size, "version": version}
    try:
        made = Dataset.from_generator(make, gen_kwargs=kwargs)
    except DatasetGenerationError as error:
        raise InputError(f"--task.{field} {error.__cause__}") from error
    MAKER.close()
    for where, row in data_files.with_places(made, source):
        if row["split"] == split:
            gold = rewards.Gold(row["answer"])
            gold.score = functools.partial(score, source, row["entry"], row["answer"])
            yield where, {"question": row["question"], "answer": gold}


def score(source: str, entry: str, gold: str, answer: str) -> float:
    """What the task's own scorer gives an answer, 0 to 1; 0 if it fails, ends or takes too long."""
    if task_of(source) in EVALUATED and answer != gold and not ARITHMETIC.fullmatch(answer):
        return 0.0
    value, _ = SCORER.ask("score", source, entry, answer)
    return value if isinstance(value, float) and 0 <= value <= 1 else 0.0
