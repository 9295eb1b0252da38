"""The book of mistakes: faults.toml, and the one way in which its edits are applied.

An entry is named after the function that it breaks. It says what is wrong, with its mark in docs/reference. `source`
is a published report, or project and release in which the mistake was read. With `choice = true` it isn't a mistake
but another project's convention, with other numbers.

`edit` is a list: a part of that function of forms.py, what the wrong one has in its place, and so on for more parts.
Those entries are the faults that check knows by their numbers, and an exercise is the faulty text. A key such as
"small/ppo.py::whiten" has the same mistake in another function, for tests.
"""

import __future__

import ast
import functools
import importlib
import textwrap
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = Path(__file__).parent.parent
Edits = tuple[tuple[str, str], ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Fault:
    function: str
    """that is broken"""
    name: str
    says: str
    mark: str
    source: str
    choice: bool
    edits: dict[str, Edits]
    """by place, such as small/ppo.py::whiten"""

    @property
    def title(self) -> str:
        return f"{self.function}: {self.name}"

    @cached_property
    def page(self) -> str:
        """Where the register explains the mark."""
        letter = ("D" if int(self.mark[1:]) < 20 else "T") if self.mark[0] == "X" else self.mark[0]
        return f"docs/reference/chapter{'DTV'.index(letter) + 1}.md#{self.mark}"

    @cached_property
    def text(self) -> str:
        """The faulty function of forms.py."""
        return edited(form(self.function), self.edits[form(self.function)])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return compiled(form(self.function), self.edits[form(self.function)])(*args, **kwargs)


def form(function: str) -> str:
    """The place of a function of forms.py."""
    return f"check/forms.py::{function}"


def pairs(texts: list[str]) -> Edits:
    """Edits from a list in which each text is followed by the one that takes its place."""
    return tuple(zip(texts[::2], texts[1::2], strict=True))


def read(function: str, name: str, entry: dict[str, Any]) -> Fault:
    says, _, mark = entry.get("says", "").removesuffix("]").rpartition(" [")
    edits = {form(function): pairs(entry["edit"])} if "edit" in entry else {}
    for places, texts in entry.items():
        files, colons, name_there = places.partition("::")
        for file in files.split(", ") if colons else []:
            edits[f"{file}::{name_there}"] = pairs(texts)
    return Fault(
        function=function,
        name=name,
        says=says,
        mark=mark,
        source=entry.get("source", ""),
        choice=entry.get("choice", False),
        edits=edits,
    )


def read_all(path: Path) -> list[Fault]:
    tables = tomllib.loads(path.read_text())
    return [read(function, name, entry) for function, found in tables.items() for name, entry in found.items()]


BOOK = read_all(Path(__file__).with_suffix(".toml"))
FAULTS = [fault for fault in BOOK if form(fault.function) in fault.edits]


# ---- Applying an edit ------------------------------------------------------------------------------------------


Node = ast.FunctionDef | ast.ClassDef


@cache
def definitions(file: str) -> dict[str, Node]:
    """Every function, class and method of a file of this package, by name: whiten, Controller.update."""
    found: dict[str, Node] = {}

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, Node):
                found[prefix + node.name] = node
                if isinstance(node, ast.ClassDef):
                    collect(node.body, f"{prefix}{node.name}.")

    collect(ast.parse((PACKAGE / file).read_text()).body, "")
    return found


def node_of(place: str) -> Node:
    file, _, name = place.partition("::")
    return definitions(file)[name]


@cache
def text_of(place: str) -> str:
    node = node_of(place)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = (PACKAGE / place.partition("::")[0]).read_text().splitlines(keepends=True)
    return "".join(lines[first - 1 : node.end_lineno])


@cache
def edited(place: str, edits: Edits) -> str:
    """The text of a function with parts of it replaced, each of which it must have exactly once."""
    text = text_of(place)
    for right, wrong in edits:
        if text.count(right) != 1:
            raise ValueError(f"{place} has {text.count(right)} times {right!r}")
        text = text.replace(right, wrong)
    return text


def edited_file(file: str, edits: dict[str, Edits]) -> str:
    """The text of a file with edits in some of its functions."""
    text = (PACKAGE / file).read_text()
    for place, of_one in edits.items():
        if place.startswith(f"{file}::"):
            text = text.replace(text_of(place), edited(place, of_one), 1)
    return text


def module_of(place: str) -> ModuleType:
    file = place.partition("::")[0].removesuffix(".py")
    return importlib.import_module(f"ppo_rlhf.{file.replace('/', '.')}")


def holder_of(place: str) -> tuple[Any, str]:
    """The module or class that has a function, and its name there."""
    *classes, name = place.partition("::")[2].split(".")
    return functools.reduce(getattr, classes, module_of(place)), name


@cache
def compiled(place: str, edits: Edits) -> Callable:
    """The function or class with its edits. It sees the rest of its module as it is when it runs."""
    name, found = place.rpartition("::")[2], {}
    text, flags = textwrap.dedent(edited(place, edits)), __future__.annotations.compiler_flag
    exec(compile(text, f"<{name} with a fault>", "exec", flags), vars(module_of(place)), found)
    return found[name.rpartition(".")[2]]


def of(function: str) -> list[Fault]:
    """The faults that check knows of a function of forms.py."""
    return [fault for fault in FAULTS if fault.function == function]


def named(title: str) -> Fault:
    """An entry of the book by its title, such as `whiten: not scaled`."""
    (found,) = (fault for fault in BOOK if fault.title == title)
    return found
