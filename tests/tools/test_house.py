"""The house: who may import whom, and how much there is."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from imports import needs

import ppo_rlhf
from benchmark import mass

PACKAGE = Path(ppo_rlhf.__file__).parent
Sources = dict[str, str]  # name of a module below ppo_rlhf -> its text


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


SOURCES: Sources = {name_of(path): path.read_text() for path in PACKAGE.rglob("*.py")}


def remedy(table: str, entry: str) -> str:
    """What to do about a limit of this file that is exceeded."""
    return (
        f"take something out, or raise {table}[{entry!r}] in tests/tools/test_house.py to a few per cent above that, "
        "and give the reason in the message of the commit"
    )


def graph(sources: Sources) -> dict[str, set[str]]:
    """The modules of ppo_rlhf that each module imports, in functions and for types too."""
    found: dict[str, set[str]] = {}
    for name, source in sources.items():
        others = found[name] = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                others |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                # `from ppo_rlhf.tldr import posts` imports a module; `from ppo_rlhf.tldr.posts import f` its name.
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                modules = {other for other in whole if other.removeprefix("ppo_rlhf.") in sources}
                others |= modules | ({node.module} if whole - modules else set())
        found[name] = {other.removeprefix("ppo_rlhf.") for other in others if other.startswith("ppo_rlhf.")}
    return found


def circle(sources: Sources) -> list[str]:
    """Modules that import each other in a circle; an empty list if none do."""
    try:
        TopologicalSorter(graph(sources)).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_nothing_goes_in_a_circle():
    assert circle(SOURCES) == []


CHAPTERS = {  # which rooms a room may import from, besides itself
    "train_policy": set(),
    "train_reward": set(),
    "train_both": {"train_policy", "train_reward"},
    "worlds": set(),
    "tldr": {"train_policy", "train_reward", "train_both", "judge"},  # its last stage asks the judge
    "rlvr": {"train_policy", "train_reward", "tldr"},
}


def upwards(sources: Sources) -> set[tuple[str, str]]:
    """Imports of a chapter from a later one, or from a tool."""
    arrows = {(name, other) for name, others in graph(sources).items() for other in others}
    rooms = {(name, other, name.split(".")[0], other.split(".")[0]) for name, other in arrows}
    return {(name, other) for name, other, a, b in rooms if a in CHAPTERS and b not in CHAPTERS[a] | {a}}


def test_later_chapters_build_on_earlier_ones():
    assert upwards(SOURCES) == set()
    wrong = SOURCES | {"tldr.posts": "from ppo_rlhf.rlvr import problems"}
    assert upwards(wrong) == {("tldr.posts", "rlvr.problems")}


def test_nothing_imports_a_small_file():
    assert not {other for others in graph(SOURCES).values() for other in others if other.startswith("small")}


# ---- The small files are complete: they can be read, and carried away, alone -----------------------------------

LINES = {"small.ppo": 445, "small.grpo": 240, "small.micro": 350, "small.estimators": 150}
NEEDS = {"small.micro": set(), "small.estimators": {"micro"}}


@pytest.mark.parametrize("name", LINES)
def test_a_small_file_is_short_and_imports_nothing_of_ours(name):
    assert needs(SOURCES[name]) - {"safetensors"} == NEEDS.get(name, {"torch", "transformers"})
    lines = len(SOURCES[name].splitlines())
    assert lines <= LINES[name], f"{name} has {lines} lines; {remedy('LINES', name)}"


# ---- Negative controls -----------------------------------------------------------------------------------------

HOUSE = {"": "", "room": "", "room.a": "import torch", "room.b": "from ppo_rlhf.room import a"}


def test_what_must_not_be_imported_is_found():
    """A circle, and packages beyond Python's own."""
    assert circle(HOUSE) == []
    for source in ("def f():\n    from ppo_rlhf.room.b import name", "import ppo_rlhf.room.b"):
        assert set(circle(HOUSE | {"room.a": source})) == {"room.a", "room.b"}
    source = "import json, numpy.linalg\ndef f():\n    from ppo_rlhf.room import a\n    from .. import room"
    assert needs(source) == {"numpy", "ppo_rlhf", "."}


# ---- Mass ------------------------------------------------------------------------------------------------------

AT_MOST = {"ppo_rlhf": 187_000, "benchmark": 42_000, "tests": 204_000}  # tokens; more only for what users get


@pytest.mark.parametrize("folder", AT_MOST)
def test_the_project_does_not_grow(folder):
    tokens = sum(mass.tokens_of_files(folder).values())
    assert tokens <= AT_MOST[folder], f"{folder} has {tokens:,} tokens; {remedy('AT_MOST', folder)}"


def test_comments_and_docstrings_are_no_tokens():
    """Six in the assignment, five in the head of the function, two in its body."""
    source = '"""Of a module."""\n\nx = f(1)  # one\n\n\ndef g():\n    """Twice."""\n    return x\n'
    assert mass.tokens_of(source) == 6 + 5 + 2
