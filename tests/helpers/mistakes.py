"""Mistakes of the book (ppo_rlhf/check/faults.toml) in our own functions, for tests that must reject them."""

import __future__

import ast
import csv
import functools
import importlib
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ppo_rlhf.check import faults

PACKAGE = Path(__file__).parents[2] / "ppo_rlhf"
MATRIX = Path(__file__).parents[1] / "matrix.csv"  # written by benchmark/matrix.py
Node = ast.FunctionDef | ast.ClassDef


def named(title: str) -> faults.Fault:
    """An entry of the book by its title, such as `whiten: not scaled`."""
    (found,) = (fault for fault in faults.BOOK if fault.title == title)
    return found


def places(title: str, files: tuple[str, ...]) -> Iterator[str]:
    """Where a mistake can be put in these files, such as train_policy.py::whiten."""
    return (place for place in named(title).edits if place.partition("::")[0] in files)


def titles(file: str, *functions: str, without: tuple[str, ...] = ()) -> list[str]:
    """The mistakes in some functions and classes of a file, or in all."""
    found = []
    for fault in faults.BOOK:
        there = [place.partition("::")[2].partition(".")[0] for place in fault.edits if place.startswith(f"{file}::")]
        if any((not functions or name in functions) and name not in without for name in there):
            found.append(fault.title)
    return found


def rows_of_matrix(path: Path = MATRIX) -> list[list[str]]:
    """Of each row a mistake, its place, a test file, the test of the file that rejects it, and how many do."""
    with path.open(newline="") as file:
        return list(csv.reader(file))[1:]


def tests_of(test_file: Mapping[str, Any]) -> tuple[Callable, Callable]:
    """Two tests of a test file whose other tests take a name or nothing.

    A mistake makes the test fail that rejects it by matrix.csv, and functions that are rebuilt without one don't.
    """
    own = Path(test_file["__file__"]).name
    rows = [(title, place, test) for title, place, file, test, _ in rows_of_matrix() if file == own and test]

    def run(test: str) -> None:
        name, _, case = test.removesuffix("]").partition("[")
        test_file[name](*filter(None, [case]))

    @pytest.mark.parametrize(("mistake", "place", "test"), rows)
    def mistake_is_detected(mistake, place, test, monkeypatch):
        replace(place, named(mistake).edits[place], monkeypatch)
        with pytest.raises(AssertionError):
            run(test)

    def rebuilt_functions_pass(monkeypatch):
        for _, place, _ in rows:
            replace(place, (), monkeypatch)
        for test in {test for _, _, test in rows}:
            run(test)

    return mistake_is_detected, rebuilt_functions_pass


def put(title: str, files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a mistake into all functions of these files that the book has it for."""
    there = list(places(title, files))
    assert there, f"{title} is in none of {files}"
    for place in there:
        replace(place, named(title).edits[place], monkeypatch)


def put_unchanged(some: Iterable[str], files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Put all functions that these mistakes are in back in place: rebuilt from their text, without a mistake."""
    for place in {place for title in some for place in places(title, files)}:
        replace(place, (), monkeypatch)


def replace(place: str, edits: faults.Edits, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, name = holder_of(place)
    right, wrong = getattr(holder, name), compiled(place, edits)
    importers = [module for key, module in sys.modules.items() if key.startswith("ppo_rlhf.")]
    for place_of_it in [holder, *(module for module in importers if vars(module).get(name) is right)]:
        monkeypatch.setattr(place_of_it, name, wrong)
    for table in [x for x in vars(holder).values() if isinstance(x, dict)]:  # such as that of the estimators
        for key in [key for key, x in table.items() if x is right]:
            monkeypatch.setitem(table, key, wrong)


# ---- Applying an edit ------------------------------------------------------------------------------------------


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


def edited_file(file: str, edits: dict[str, faults.Edits]) -> str:
    """The text of a file with edits in some of its functions."""
    text = (PACKAGE / file).read_text()
    for place, of_one in edits.items():
        if place.startswith(f"{file}::"):
            text = text.replace(text_of(place), faults.edited(text_of(place), of_one), 1)
    return text


def module_of(place: str) -> ModuleType:
    file = place.partition("::")[0].removesuffix(".py")
    return importlib.import_module(f"ppo_rlhf.{file.replace('/', '.')}")


def holder_of(place: str) -> tuple[Any, str]:
    """The module or class that has a function, and its name there."""
    *classes, name = place.partition("::")[2].split(".")
    return functools.reduce(getattr, classes, module_of(place)), name


@cache
def compiled(place: str, edits: faults.Edits) -> Callable:
    """The function or class with its edits. It sees the rest of its module as it is when it runs."""
    name, found = place.rpartition("::")[2], {}
    text, flags = textwrap.dedent(faults.edited(text_of(place), edits)), __future__.annotations.compiler_flag
    exec(compile(text, f"<{name} with a fault>", "exec", flags), vars(module_of(place)), found)
    return found[name.rpartition(".")[2]]
