"""The house: who may import whom, and how much there is."""

import ast
import os
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from processes import launch

import ppo_rlhf
from benchmark import mass

PACKAGE = Path(ppo_rlhf.__file__).parent
Sources = dict[str, str]  # name of a module below ppo_rlhf -> its text


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


SOURCES: Sources = {name_of(path): path.read_text() for path in PACKAGE.rglob("*.py")}


def imports(source: str, names: set[str]) -> tuple[set[str], set[str]]:
    """What a module imports from ppo_rlhf, in functions and for types too: modules, and bare names as module:name."""
    modules, bare = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {
                name.name.removeprefix("ppo_rlhf.") for name in node.names if name.name.startswith("ppo_rlhf.")
            }
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ppo_rlhf":
            place = node.module.removeprefix("ppo_rlhf").removeprefix(".")
            for name in node.names:
                whole = f"{place}.{name.name}".removeprefix(".")
                if whole in names:
                    modules.add(whole)
                else:
                    bare.add(f"{place}:{name.name}")
    return modules, bare


def graph(sources: Sources) -> dict[str, set[str]]:
    """The modules that each module needs. A package stands for what its __init__ holds."""
    found = {}
    for name, source in sources.items():
        modules, bare = imports(source, set(sources))
        found[name] = modules | {place.split(":")[0] for place in bare}
    return found


def circle(sources: Sources) -> list[str]:
    """Modules that import each other in a circle; an empty list if none do."""
    try:
        TopologicalSorter(graph(sources)).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def is_below(name: str) -> bool:
    """Whether a module belongs to lib or to worlds, which are below all scripts."""
    return name.split(".")[0] in ("lib", "worlds")


def trespasses(sources: Sources) -> set[tuple[str, str]]:
    """Imports that go up: from lib or a world to a script."""
    return {
        (name, other)
        for name, others in graph(sources).items()
        for other in others
        if is_below(name) and not is_below(other)
    }


def test_nothing_goes_in_a_circle():
    assert circle(SOURCES) == []


def test_imports_go_downwards():
    assert trespasses(SOURCES) == set()
    assert {"lib.errors", "lib.pretrained", "worlds.tales", "train_policy"} <= set(SOURCES)


# ---- The small files are complete: they can be read, and carried away, alone -----------------------------------

LINES = {"small.ppo": 430, "small.grpo": 240}


def needs(source: str) -> set[str]:
    """The packages that a module imports, anywhere in it, beyond Python's own; a dot is a relative import."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." if node.level else node.module.split(".")[0])
    return found - sys.stdlib_module_names


@pytest.mark.parametrize("name", LINES)
def test_a_small_file_is_short_and_imports_nothing_of_ours(name):
    assert needs(SOURCES[name]) - {"safetensors"} == {"torch", "transformers"}
    assert len(SOURCES[name].splitlines()) <= LINES[name]


def test_nothing_imports_a_small_file():
    assert {name for name in SOURCES if name.startswith("small")} == LINES.keys()
    assert not {other for others in graph(SOURCES).values() for other in others if other.startswith("small")}


# ---- Negative controls -----------------------------------------------------------------------------------------

HOUSE = {
    "": "",
    "lib": "",
    "lib.a": "import torch",
    "lib.b": "from ppo_rlhf.lib import a",
    "worlds": "",
    "script": "",
}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lib.a", "from ppo_rlhf.lib import b"),
        ("lib.a", "def f():\n    from ppo_rlhf.lib.b import name"),
        ("lib.a", "import ppo_rlhf.lib.b"),
        ("lib.a", "if TYPE_CHECKING:\n    from ppo_rlhf.lib import b"),
    ],
)
def test_a_circle_is_found(module, source):
    assert circle(HOUSE) == [] and set(circle(HOUSE | {module: source})) == {"lib.a", "lib.b"}


@pytest.mark.parametrize(
    ("module", "source", "other"),
    [
        ("lib.a", "from ppo_rlhf import script", "script"),
        ("lib.a", "if TYPE_CHECKING:\n    from ppo_rlhf.script import name", "script"),
        ("lib.a", "from ppo_rlhf.script import name", "script"),
        ("worlds", "from ppo_rlhf import script", "script"),
    ],
)
def test_an_import_that_goes_the_wrong_way_is_found(module, source, other):
    assert trespasses(HOUSE) == set() and trespasses(HOUSE | {module: source}) == {(module, other)}


@pytest.mark.parametrize(
    ("source", "package"),
    [
        ("import torch, ppo_rlhf.lib", "ppo_rlhf"),
        ("def f():\n    from ppo_rlhf.lib import lm", "ppo_rlhf"),
        ("from .. import lib", "."),
        ("import numpy.linalg", "numpy"),
    ],
)
def test_what_a_small_file_must_not_import_is_found(source, package):
    assert needs("import json\nfrom torch import nn") == {"torch"} and package in needs(source)


# ---- Mass ------------------------------------------------------------------------------------------------------

AT_MOST = {"ppo_rlhf": 133_500, "benchmark": 29_700, "tests": 184_500}  # tokens; it may only fall


@pytest.mark.parametrize("folder", AT_MOST)
def test_the_project_does_not_grow(folder):
    tokens = sum(mass.tokens_of_files(folder).values())
    assert 0.97 * AT_MOST[folder] < tokens <= AT_MOST[folder], f"{folder} has {tokens:,} tokens; change AT_MOST"


OUTSIDE = {  # what a small run executes outside its script: functions, lines, files; they may only fall
    "train_policy.py --preset tales --rewards.function words:score --rewards.normalize_samples 64 "
    "--ppo.total_episodes 64": (102, 1_270, 13),
    "train_reward.py --preset tales --num_train 64 --batch_size 32 --normalize_samples 64": (89, 1_100, 12),
}


@pytest.mark.parametrize("command", OUTSIDE)
def test_little_happens_outside_a_script(command, tmp_path):
    (tmp_path / "words.py").write_text("def score(queries, responses):\n    return [len(x) for x in responses]\n")
    script, *words = command.split()
    program = [sys.executable, mass.__file__, "--run", str(PACKAGE / script), *words]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True)
    numbers = [int(number) for number in re.findall(r"\d+", done.stdout.splitlines()[-1])]
    assert len(numbers) == 3 and all(map(int.__le__, numbers, OUTSIDE[command])), done.stdout + done.stderr


def test_comments_and_docstrings_are_no_tokens():
    """Six in the assignment, five in the head of the function, two in its body."""
    source = '"""Of a module."""\n\nx = f(1)  # one\n\n\ndef g():\n    """Twice."""\n    return x\n'
    assert mass.tokens_of(source) == 6 + 5 + 2


# ---- Paths of older versions -----------------------------------------------------------------------------------

OLD = sorted(path.name for path in PACKAGE.glob("*_*.py") if "Moved to" in path.read_text())


def test_old_paths_lead_to_scripts(tmp_path):
    """Each names a script that is there; one of them is started."""
    assert len(OLD) == 7
    for name in OLD:
        source = (PACKAGE / name).read_text()
        place = source.split("Moved to ")[1].split(".py")[0]
        assert (PACKAGE / f"{place}.py").is_file() and f'"ppo_rlhf.{place.replace("/", ".")}"' in source
    result = launch("tldr_policy.py", "--help", folder=tmp_path)
    assert result.status == 0 and "--rewards.trained-model" in result.stdout
