"""The book of mistakes: faults.toml.

An entry is named after the function or part that it breaks. It says what is wrong, with its mark in docs/reference,
if it has one: those that check knows do. `source` is a published report, or project and release in which the mistake
was read. With `choice = true` it isn't a mistake but another project's convention, with other numbers.

`edit` is a list: a part of that function of forms.py, what the wrong one has in its place, and so on for more parts.
Those entries are the faults that check knows by their numbers, and an exercise is the faulty text. A key such as
"small/ppo.py::whiten" has the same mistake in another function, for tests (tests/mistakes.py).
"""

import inspect
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ppo_rlhf.check import forms

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
        return edited(inspect.getsource(getattr(forms, self.function)), self.edits[form(self.function)])

    @cached_property
    def compiled(self) -> Callable:
        """The faulty function. It sees the rest of forms.py, without a fault."""
        namespace: dict[str, Any] = {}
        exec(compile(self.text, f"<{self.function} with a fault>", "exec"), vars(forms), namespace)
        return namespace[self.function]

    def __call__(self, **arguments: Any) -> Any:
        return self.compiled(**arguments)


def form(function: str) -> str:
    """The place of a function of forms.py."""
    return f"check/forms.py::{function}"


def pairs(texts: list[str]) -> Edits:
    """Edits from a list in which each text is followed by the one that takes its place."""
    return tuple(zip(texts[::2], texts[1::2], strict=True))


def read(function: str, name: str, entry: dict[str, Any]) -> Fault:
    says, _, mark = entry.get("says", "").removesuffix("]").partition(" [")
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


def edited(text: str, edits: Edits) -> str:
    """The text of a function with parts of it replaced, each of which it must have exactly once."""
    for right, wrong in edits:
        if text.count(right) != 1:
            raise ValueError(f"{right!r} is there {text.count(right)} times: {text}")
        text = text.replace(right, wrong)
    return text


def of(function: str) -> list[Fault]:
    """The faults that check knows of a function of forms.py."""
    return [fault for fault in FAULTS if fault.function == function]
