"""The house: who may import whom, how a script imports, and how long it may be."""

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import ppo_rlhf

PACKAGE = Path(ppo_rlhf.__file__).parent
PAGES_OF_CHAPTER_3 = ("rlvr_args", "rlvr_math", "rlvr_data", "rlvr_scores")
Sources = dict[str, str]  # name of a module below ppo_rlhf -> its text


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


SOURCES: Sources = {name_of(path): path.read_text() for path in PACKAGE.rglob("*.py")}


FOR_TYPES = "TYPE_CHECKING"  # False when a module runs


def imports(source: str, names: set[str]) -> tuple[set[str], set[str]]:
    """What a module imports from ppo_rlhf when it runs, anywhere in it: modules, and bare names as module:name."""
    modules, bare, tree = set(), set(), ast.parse(source)
    branches = (node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == FOR_TYPES)
    never_run = {part for branch in branches for line in branch.body for part in ast.walk(line)}
    for node in set(ast.walk(tree)) - never_run:
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


FLOORS = ("lib.base", "lib.nets", "lib.scoring", "lib.rewards", "lib.data", "lib.services", "worlds")  # from below


def floor_of(name: str) -> int:
    """A script stands above all floors."""
    return next((i for i, floor in enumerate(FLOORS) if f"{name}.".startswith(f"{floor}.")), len(FLOORS))


def trespasses(sources: Sources) -> set[tuple[str, str]]:
    """Imports that go up: from a room of lib to a higher one, a world or a script, or from a world to a script."""
    return {
        (name, other)
        for name, others in graph(sources).items()
        for other in others - {"lib"}
        if floor_of(other) > floor_of(name)
    }


def test_nothing_goes_in_a_circle():
    assert circle(SOURCES) == []


def test_imports_go_downwards():
    assert trespasses(SOURCES) == set()
    assert {"lib.base.errors", "lib.nets.lm", "worlds.tales", "train_policy"} <= set(SOURCES)


@pytest.mark.parametrize("name", sorted(name for name in SOURCES if name and "." not in name))
def test_a_script_imports_few_modules_and_no_bare_names_but_errors(name):
    if name in ("lib", "worlds"):
        return
    modules, bare = imports(SOURCES[name], set(SOURCES))
    allowed = {f"lib.base.errors:{error}" for error in ("InputError", "NumericalError", "Stopped")}
    if name in CHAPTER_1:  # their functions have the text that lib has
        allowed = {place for place in bare if place.startswith("lib.services.cli:")}
    if name in ("tldr_policy", "rlvr_policy"):  # those who use these scripts find it there, as in train_policy.py
        allowed.add("lib.nets.networks:AdaptiveKLController")
    if name == "rlvr_policy":  # whose types are on pages of their own, and are read like its own
        allowed |= {place for place in bare if place.split(":")[0] in PAGES_OF_CHAPTER_3}
    assert bare <= allowed
    most = 16 if name == "rlvr_policy" else 15  # checks and metrics; sample.py needs the data of three chapters
    assert len(modules) <= most, sorted(modules)


# ---- No circle is hidden: chapter 3 and the services say which of our types they take --------------------------

ERASED = {
    # Objects of Ray, which may be missing, and what a function that runs elsewhere returns.
    "rlvr_async": {"ray", "actor", "weights", "answer", "from_main()", "wait()", "connect()"},
    "lib.services.engine": {"ask()"},  # whatever a process of vLLM answers
    "lib.services.engine_vllm": {"model", "llm"},  # of vLLM
    "lib.services.run": {"frame"},  # of the interpreter
}


def erased(source: str) -> set[str]:
    """Parameters and fields that are annotated as Any, though * and ** may be; functions() that return Any."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found |= {node.target.id} if is_any(node.annotation) else set()
        elif isinstance(node, ast.arguments):
            named = (*node.posonlyargs, *node.args, *node.kwonlyargs)
            found |= {one.arg for one in named if is_any(one.annotation)}
        elif isinstance(node, ast.FunctionDef):
            found |= {f"{node.name}()"} if is_any(node.returns) else set()
    return found


def is_any(annotation: ast.expr | None) -> bool:
    return isinstance(annotation, ast.Name) and annotation.id == "Any"


TYPED = ("rlvr_", "train_", "lib.services.", "lib.scoring.scale")


@pytest.mark.parametrize("name", sorted(name for name in SOURCES if name.startswith(TYPED)))
def test_no_type_of_ours_is_any(name):
    assert erased(SOURCES[name]) <= ERASED.get(name, set())


# ---- Chapter 1's scripts are complete: what they import are services that a reader can skip --------------------

# The folder of a run, the command line, small worlds by name, published data.
SERVICES = {"lib.services.run", "lib.services.cli", "lib.data.sources", "worlds"}
CHAPTER_1 = {"train_policy": 1_150, "train_reward": 800}  # lines that each may have
MOST_LINES, MOST_OF_TRAIN = 3_160, 80  # of all that is imported with a script; of its train()


def at_the_top(source: str) -> str:
    """Only the imports of a module that are made when it is imported."""
    return "\n".join(ast.unparse(node) for node in ast.parse(source).body if isinstance(node, IMPORTS))


IMPORTS = (ast.Import, ast.ImportFrom)


def imported_with(name: str, sources: Sources) -> set[str]:
    """All modules of ours that are imported when this one is, without itself."""
    found = graph({module: at_the_top(source) for module, source in sources.items()})
    modules = {name}
    while more := {other for module in modules for other in found[module] if other in sources} - modules:
        modules |= more
    return modules - {name, "", "lib"}


def lines_of(source: str, function: str) -> int:
    (node,) = [node for node in ast.parse(source).body if getattr(node, "name", "") == function]
    return node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("name", CHAPTER_1)
def test_a_script_of_chapter_1_is_complete(name):
    modules, bare = imports(SOURCES[name], set(SOURCES))
    assert modules <= SERVICES and {place.split(":")[0] for place in bare} <= {"lib.services.cli"}
    assert len(SOURCES[name].splitlines()) <= CHAPTER_1[name]
    assert lines_of(SOURCES[name], "train") <= MOST_OF_TRAIN
    services = imported_with(name, SOURCES)
    assert "lib.base.errors" in services
    assert not {"lib.nets.models", "lib.nets.passes", "lib.nets.lm", "lib.data.texts"} & services
    assert sum(len(SOURCES[module].splitlines()) for module in services) <= MOST_LINES


def test_what_is_imported_with_a_module_is_found():
    sources = {
        "": "",
        "a": "from ppo_rlhf import b",
        "b": "import ppo_rlhf.c\ndef f():\n    import ppo_rlhf.d",
        "c": "",
    }
    assert imported_with("a", sources | {"d": ""}) == {"b", "c"}


# ---- Names at the call: a swap of two tensors of one shape must be seen ----------------------------------------

MOST_UNNAMED = 3  # values of a tuple that a call unpacks, fields of a named tuple that is built without names
SAY_NOTHING = {"told", "tools", "few", "quiet", "everywhere", "given"}
NAMED = {name for name in SOURCES if not name.startswith("small")}  # those are read from top to bottom


def long_tuples(source: str) -> set[str]:
    """Named tuples with many fields."""
    classes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef) and node.bases)
    tuples = (node for node in classes if ast.unparse(node.bases[0]).endswith("NamedTuple"))
    return {node.name for node in tuples if sum(isinstance(line, ast.AnnAssign) for line in node.body) > MOST_UNNAMED}


LONG_TUPLES = {name for source in SOURCES.values() for name in long_tuples(source)}


def unnamed(source: str) -> list[str]:
    """Where a module unpacks a literal in a call or a literal, or a name for one that is too long; names that say
    nothing; dataclasses that may be built without the names of their fields, and long named tuples that are."""
    found = []
    for scope in ast.walk(ast.parse(source)):
        if isinstance(scope, ast.FunctionDef | ast.Module):
            found += packed(scope)
        elif isinstance(scope, ast.ClassDef):
            decorators = [ast.unparse(decorator) for decorator in scope.decorator_list]
            found += [scope.name for text in decorators if "dataclass" in text and "kw_only" not in text]
        elif isinstance(scope, ast.Starred) and isinstance(scope.value, ast.Tuple | ast.List):
            found.append(ast.unparse(scope))
        elif isinstance(scope, ast.Call) and ast.unparse(scope.func).split(".")[-1] in LONG_TUPLES:
            found += [ast.unparse(scope)] * bool(scope.args)
        elif isinstance(scope, ast.Name | ast.arg):
            name = scope.arg if isinstance(scope, ast.arg) else scope.id
            found += [name] * (name in SAY_NOTHING)
    return found


def packed(scope: ast.FunctionDef | ast.Module) -> list[str]:
    """Names of long tuples that a call in the same function unpacks."""
    long = {
        target.id
        for node in ast.walk(scope)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and len(node.value.elts) > MOST_UNNAMED
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = (node for node in ast.walk(scope) if isinstance(node, ast.Call))
    starred = (argument.value for call in calls for argument in call.args if isinstance(argument, ast.Starred))
    return [value.id for value in starred if isinstance(value, ast.Name) and value.id in long]


@pytest.mark.parametrize("name", sorted(NAMED))
def test_values_have_names_at_the_call(name):
    allowed = {"tools"} if name in ("rlvr_args", "rlvr_tools", "worlds.sums") else set()  # --tools, and a module
    assert set(unnamed(SOURCES[name])) <= allowed


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
    "lib.base": "",
    "lib.base.a": "if TYPE_CHECKING:\n    from ppo_rlhf import script",
    "lib.base.b": "from ppo_rlhf.lib.base import a",
    "worlds": "",
    "script": "",
}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lib.base.a", "from ppo_rlhf.lib.base import b"),
        ("lib.base.a", "def f():\n    from ppo_rlhf.lib.base.b import name"),
        ("lib.base.a", "import ppo_rlhf.lib.base.b"),
    ],
)
def test_a_circle_is_found(module, source):
    assert circle(HOUSE) == [] and set(circle(HOUSE | {module: source})) == {"lib.base.a", "lib.base.b"}


@pytest.mark.parametrize(
    ("module", "source", "other"),
    [
        ("lib.base.a", "from ppo_rlhf import script", "script"),
        ("lib.base.a", "if TYPE_CHECKING:\n    pass\nelse:\n    from ppo_rlhf import script", "script"),
        ("lib.nets.a", "from ppo_rlhf.lib.data import b", "lib.data"),
        ("lib.base.a", "from ppo_rlhf import worlds", "worlds"),
        ("lib.base.a", "from ppo_rlhf.script import name", "script"),
        ("worlds", "from ppo_rlhf import script", "script"),
    ],
)
def test_an_import_that_goes_the_wrong_way_is_found(module, source, other):
    assert trespasses(HOUSE) == set() and trespasses(HOUSE | {module: source}) == {(module, other)}


def test_a_type_that_is_erased_is_found():
    source = "class A:\n    b: Any\n    c: int\ndef f(d: Any, *e: Any, g: dict[str, Any], h: Any = 0) -> Any: pass"
    assert erased(source) == {"b", "d", "h", "f()"}


def test_a_bare_name_is_found():
    modules, bare = imports("from ppo_rlhf.lib.base import a\nfrom ppo_rlhf.lib.base.b import name", set(HOUSE))
    assert (modules, bare) == ({"lib.base.a"}, {"lib.base.b:name"})


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


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f():\n    four = (1, 2, 3, 4)\n    g(*four)", ["four", "four"]),
        ("def f():\n    three = (1, 2, 3)\n    g(*three)", []),
        ("g(*(a, b), c)", ["*(a, b)"]),
        ("g(a, b, *([c] if d else []))", []),
        ("def f(told):\n    return told", ["told", "told"]),
        ("@dataclass(frozen=True)\nclass A:\n    a: int", ["A"]),
        ("data.Draw(1, 2, 3, requests=[])", ["data.Draw(1, 2, 3, requests=[])"]),
        ("@dataclass(kw_only=True)\nclass A:\n    a: int", []),
    ],
)
def test_what_has_no_name_at_the_call_is_found(source, found):
    assert unnamed(source) == found


# ---- How much there is -----------------------------------------------------------------------------------------

# Lines of Python and of tables. They fall with each step, and rise only in a commit that brings a capability.
AT_MOST = {"ppo_rlhf": 27_030, "benchmark": 4_616, "tests": 33_220}


@pytest.mark.parametrize("folder", AT_MOST)
def test_the_project_does_not_grow(folder):
    files = [path for kind in ("*.py", "*.toml") for path in (PACKAGE.parent / folder).rglob(kind)]
    lines = sum(len(path.read_text().splitlines()) for path in files if "runs" not in path.parts)
    assert AT_MOST[folder] - 300 < lines <= AT_MOST[folder], f"{folder}: {lines} lines; change AT_MOST"
