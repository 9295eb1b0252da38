"""Small worlds with a known truth, a real language model with real people's ratings, and what a run's paths mean.

A world is a plain folder, read like any local files. Its name may be used in place of a path: `--base_model tales` is
the language model of tales.py, `--base_model smollm2-135m` that of smollm.py, `--task.posts posts` are the posts of
posts.py. Scripts replace the names by the paths
(`find_paths`), so that nothing else needs to know of worlds.
"""

from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from ppo_rlhf.lib import run, sources
from ppo_rlhf.worlds import posts, reviews, smollm, sums, tales

# The arguments that may be paths, and the names that stand in place of one: of worlds, and of data on the hub.
WORLDS: dict[str, dict[str, Callable[[], Path]]] = {
    "base_model": {
        "smollm2-135m": lambda: smollm.find_model(),
        "tales": lambda: tales.find_world() / "model",
        "posts": lambda: posts.find_world() / "model",
        "sums": lambda: sums.find_world() / "model",
        "sums-long": lambda: sums.find_world(sums.LongArgs()) / "model",
        "sums-tools": lambda: sums.find_world(sums.ToolsArgs()) / "model",
    },
    "label_dataset": {},
    "task.query_dataset": {"tales": lambda: tales.find_world(), "reviews": lambda: reviews.find_world()},
    "task.posts": {"posts": lambda: posts.find_world()},
    "task.comparisons": {"posts": lambda: posts.find_world()},
    "task.problems": {
        "sums": lambda: sums.find_world(),
        "sums-long": lambda: sums.find_world(sums.LongArgs()),
        "sums-tools": lambda: sums.find_world(sums.ToolsArgs()),
    },
    "task.test_problems": {
        "sums": lambda: sums.find_world(),
        "sums-long": lambda: sums.find_world(sums.LongArgs()),
        "sums-tools": lambda: sums.find_world(sums.ToolsArgs()),
    },
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


def find_value(argument: str, value: str, root: Path) -> str:
    """The value of an argument of a run with this root; a path or a world becomes the path that it means.

    A world that is not there is built.
    """
    if value in WORLDS[argument]:
        return str(WORLDS[argument][value]())
    return str(run.find_path(value, root)) if value and value not in OTHER_NAMES.get(argument, ()) else value


def find_paths(args: Any, joint: dict[str, Any] | None = None, unused: Collection[str] = ()) -> Any:
    """A script's arguments, with the paths that they mean. joint: as the script's train() gets it.

    unused: arguments that the script does not read; no world is built for them. A run keeps its arguments as they
    were given, so that its folder and the files next to it can be moved together.
    """

    def found(group: Any, prefix: str) -> Any:
        values = {field.name: getattr(group, field.name) for field in fields(group)}
        parts = {name: found(part, f"{prefix}{name}.") for name, part in values.items() if is_dataclass(part)}
        read = [name for name in values if prefix + name in WORLDS and prefix + name not in unused]
        paths = {name: find_value(prefix + name, values[name], run.root_of(args.resume, joint)) for name in read}
        return replace(group, **parts, **paths)

    return found(args, "")


# The files that a run reads in a folder of data, by the argument that names the folder.
IN_FOLDERS = {
    "task.query_dataset": "stories*.txt",
    "task.posts": "posts_*.jsonl",
    "task.comparisons": "comparisons_*.jsonl",
    "task.problems": "problems_*.jsonl",
    "task.test_problems": "problems_test.jsonl",
}


def data_files(task: Any, *names: str) -> dict[str, list[Path]]:
    """The local files that these fields of a task name, by argument, after find_paths. Data on the hub have none."""
    found = {}
    for argument, value in {f"task.{name}": getattr(task, name) for name in names}.items():
        path = Path(value).absolute()
        local = bool(value) and value not in OTHER_NAMES[argument]
        paths = sorted(path.glob(IN_FOLDERS[argument])) if path.is_dir() else [path]
        found[argument] = [path for path in paths if local and path.is_file()]
    return found
