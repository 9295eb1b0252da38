"""Mistakes of the book (ppo_rlhf/check/faults.toml) in our own functions, for tests that must reject them."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping

import pytest

from ppo_rlhf.check import faults


def places(title: str, files: tuple[str, ...]) -> Iterator[str]:
    """Where a mistake can be put in these files, such as train_policy.py::whiten."""
    return (place for place in faults.named(title).edits if place.partition("::")[0] in files)


def titles(file: str, *functions: str, without: tuple[str, ...] = ()) -> list[str]:
    """The mistakes in some functions and classes of a file, or in all."""
    found = []
    for fault in faults.BOOK:
        there = [place.partition("::")[2].partition(".")[0] for place in fault.edits if place.startswith(f"{file}::")]
        if any((not functions or name in functions) and name not in without for name in there):
            found.append(fault.title)
    return found


def tests_of(checks: Mapping[str, list[Callable[[], None]]], files: tuple[str, ...]) -> tuple[Callable, Callable]:
    """Two tests: each mistake of these files makes its checks fail; functions that are rebuilt without one don't."""

    @pytest.mark.parametrize("mistake", checks)
    def mistake_is_detected(mistake, monkeypatch):
        put(mistake, files, monkeypatch)
        for check in checks[mistake]:
            with pytest.raises(AssertionError):
                check()

    def rebuilt_functions_pass(monkeypatch):
        put_unchanged(checks, files, monkeypatch)
        for check in {check for some in checks.values() for check in some}:
            check()

    return mistake_is_detected, rebuilt_functions_pass


def put(title: str, files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a mistake into all functions of these files that the book has it for."""
    there = list(places(title, files))
    assert there, f"{title} is in none of {files}"
    for place in there:
        replace(place, faults.named(title).edits[place], monkeypatch)


def put_unchanged(some: Iterable[str], files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Put all functions that these mistakes are in back in place: rebuilt from their text, without a mistake."""
    for place in {place for title in some for place in places(title, files)}:
        replace(place, (), monkeypatch)


def replace(place: str, edits: faults.Edits, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, name = faults.holder_of(place)
    right, wrong = getattr(holder, name), faults.compiled(place, edits)
    importers = [module for key, module in sys.modules.items() if key.startswith("ppo_rlhf.")]
    for place_of_it in [holder, *(module for module in importers if vars(module).get(name) is right)]:
        monkeypatch.setattr(place_of_it, name, wrong)
    for table in [x for x in vars(holder).values() if isinstance(x, dict)]:  # such as that of the estimators
        for key in [key for key, x in table.items() if x is right]:
            monkeypatch.setitem(table, key, wrong)
