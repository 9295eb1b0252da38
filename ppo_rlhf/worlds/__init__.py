"""Small worlds with a known truth, a real language model with real people's ratings, and what a run's paths mean.

A world is a plain folder, read like any local files. Its name may be used in place of a path: `--base_model tales` is
the language model in data/tales, `--base_model smollm2-135m` that of smollm.py, `--task.posts posts` are the posts in
data/posts. Scripts replace the names by the paths (`find_paths`), so that nothing else needs to know of worlds. What
reads the data of a later chapter is imported when a script reads some.

    tales         stories and choices among their continuations, for chapter 1; tales.py says what is chosen
    posts         posts, summaries and comparisons, for chapter 2; posts.py says which are preferred
    sums          word problems of one to four steps, for chapter 3, as GSM8K has them. The language model has learned
                  from pupils who err, and most of whom are in a hurry and stop after two steps
    sums-tools    the same problems; the pupils err more often, but sometimes call a calculator: `[7+5]`
    arithmetic    sums and differences of two numbers of at most 19, for smollm.py
"""

import importlib
from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from ppo_rlhf.lib.base import hub
from ppo_rlhf.lib.base.errors import InputError, flag
from ppo_rlhf.lib.data import sources
from ppo_rlhf.lib.nets import pretrained


def of(world: str) -> Any:
    """The module of a world."""
    return importlib.import_module(f"ppo_rlhf.worlds.{world}")


def reader(module: str) -> Any:
    """A module that reads data."""
    return importlib.import_module(f"ppo_rlhf.{module}")


DATA = Path(__file__).with_name("data")


def packaged(*names: str, part: str = "") -> dict[str, Callable[[], Path]]:
    """The folders of small worlds, or a part of each: data of the package, which benchmark/worlds.py has written."""
    return {name: lambda name=name: DATA / name / part for name in names}


PROBLEMS = packaged("arithmetic", "sums", "sums-tools")
POSTS = packaged("posts") | {"reviews": lambda: of("reviews").find_world()}
# The arguments that may be paths, and the names that stand in place of one: of worlds, and of data on the hub.
WORLDS: dict[str, dict[str, Callable[[], Path]]] = {
    "base_model": {
        "smollm2-135m": lambda: of("smollm").find_model(),
        **packaged("tales", "posts", "sums", "sums-tools", part="model"),
    },
    "label_dataset": {},
    "task.query_dataset": packaged("tales") | {"reviews": lambda: of("reviews").find_world()},
    "task.posts": POSTS,
    "task.comparisons": POSTS,
    "task.problems": PROBLEMS,
    "task.test_problems": PROBLEMS,
    "rewards.trained_model": {},
    "rewards.value_model": {},
}
OTHER_NAMES = {
    "task.query_dataset": {*sources.HUB_TEXTS, "dummy"},
    "task.posts": {"tldr"},
    "task.comparisons": {"tldr"},
    "task.problems": {"gsm8k"},
    "task.test_problems": {"gsm8k"},
}
# What reads the data that an argument names, and says what is wrong with a path to nothing.
READERS: dict[str, Callable[[str], Any]] = {
    "task.query_dataset": sources.load_texts,
    "task.posts": lambda path: reader("tldr.posts").load_rows(path, "posts", "train"),
    "task.comparisons": lambda path: reader("tldr.posts").load_rows(path, "comparisons", "train"),
    "task.problems": lambda path: reader("rlvr.problems").load_rows(path, "problems", "train"),
    "task.test_problems": lambda path: reader("rlvr.problems").load_rows(path, "test_problems", ""),
}
MAY_BE_EMPTY = ("task.test_problems", "rewards.trained_model", "rewards.value_model")


def find_value(argument: str, value: str) -> str:
    """The value of an argument; a world becomes the path that it means.

    What a world takes from the package index is fetched.
    """
    if value in WORLDS[argument]:
        return str(WORLDS[argument][value]())
    return value


def find_paths(args: Any, unused: Collection[str] = ()) -> Any:
    """A script's arguments, with the paths that they mean.

    unused: arguments that the script does not read; nothing is fetched for them. A run keeps its arguments as they
    were given, so that its folder and the files next to it can be moved together.
    """

    def found(group: Any, prefix: str) -> Any:
        values = {field.name: getattr(group, field.name) for field in fields(group)}
        parts = {name: found(part, f"{prefix}{name}.") for name, part in values.items() if is_dataclass(part)}
        read = [name for name in values if prefix + name in WORLDS and prefix + name not in unused]
        meant = {name: find_value(prefix + name, values[name]) for name in read}
        return replace(group, **parts, **meant)

    return found(args, "")


def check_names(args: Any, unused: Collection[str] = ()) -> None:
    """Raise an InputError if a script's arguments name a model, data or a function that is not there.

    It loads, builds and downloads nothing, so that a slip is found at once. The parameters are those of find_paths;
    unused may have rewards.trained_model, if an earlier stage will make it.
    """
    shaping = getattr(args, "rewards", None)
    for argument in WORLDS:
        part, _, field = argument.rpartition(".")
        value = getattr(getattr(args, part, None) if part else args, field, None)
        if value is not None and argument not in unused:
            check_name(argument, value)
    made_here = "rewards.trained_model" in unused
    if hasattr(shaping, "function") and not made_here and bool(shaping.function) == bool(shaping.trained_model):
        raise InputError(f"give one of {flag('rewards.trained_model')} and {flag('rewards.function')}")
    if getattr(shaping, "label", "") and (
        made_here or not reader("lib.nets.foreign").is_foreign(shaping.trained_model)
    ):
        raise InputError(f"{flag('rewards.label')} {shaping.label}: only a reward model from elsewhere has labels")
    if hasattr(shaping, "verifier"):
        reader("lib.rewards").import_functions(shaping)
    elif hasattr(shaping, "function"):
        reader("lib.scoring.scorers").import_functions(shaping)


def check_name(argument: str, value: str) -> None:
    """Raise an InputError if the value of an argument is neither a path to something nor a name."""
    path = Path(value)
    if value in (*WORLDS[argument], *OTHER_NAMES.get(argument, ())) or (not value and argument in MAY_BE_EMPTY):
        return
    if not value and argument in READERS:
        raise InputError(f"{flag(argument)} is empty; name a file or a folder")
    if argument == "base_model" and (path.is_dir() or not hub.HUB_NAME.fullmatch(value)):
        with pretrained.model_errors(str(path) if value else ""):
            pass
    elif argument == "rewards.trained_model" and reader("lib.nets.foreign").is_foreign(str(path)):
        reader("lib.nets.foreign").check_name(str(path))
    elif argument.startswith("rewards."):
        pretrained.find_head(path, f"{flag(argument)} {value}")
    elif argument in ("task.problems", "task.test_problems") and reader("rlvr.problem_rows").is_elsewhere(value):
        reader("rlvr.problem_rows").check_name(value, argument.removeprefix("task."))
    elif argument in READERS and not path.exists():
        READERS[argument](str(path))
