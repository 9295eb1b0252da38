"""What pip installs: all libraries that are imported are declared; the constraints leave CUDA's packages to torch."""

import functools
import re
import runpy
import sys
import tomllib
from collections import namedtuple
from pathlib import Path

import pytest
from imports import needs
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from runs import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = ROOT / ".ci/constraints.py"

OTHER_NAMES = {"yaml": "pyyaml"}  # of modules whose package has another name
# Other environments run the scripts that import these: a vLLM worker, and other libraries as peers.
ELSEWHERE = {"vllm", "trl", "verl", "tensordict", "openrlhf"}
# Functions that need them say so in one line where they are missing; Python 3.14 has no openrlbenchmark.
EXTRAS = {"ppo_rlhf": ["math", "async", "real", "judge", "gym", "trackio"], "benchmark": ["benchmark", "dev"]}
EXTRAS["tests"] = [*EXTRAS["ppo_rlhf"], *EXTRAS["benchmark"]]


@functools.cache
def imported(folder: Path) -> set[str]:
    """The names of the libraries that the Python files of a folder import, anywhere in them."""
    found, own = set(), {path.stem for path in folder.rglob("*.py")}
    for path in folder.rglob("*.py"):
        text = path.read_text()
        found |= needs(text) | set(re.findall(r'importorskip\("(\w+)', text))
    return found - own - {"."}


def declared(extras: list[str]) -> set[str]:
    """The names of the packages that pyproject.toml asks for."""
    groups = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras)]
    return {canonicalize_name(Requirement(text).name) for group in groups for text in group}


@pytest.mark.parametrize("folder", EXTRAS)
def test_every_library_that_is_imported_is_declared(folder):
    own = {"ppo_rlhf", "benchmark", "tests"}
    used = {canonicalize_name(OTHER_NAMES.get(name, name)) for name in imported(ROOT / folder) - own - ELSEWHERE}
    assert "torch" in used and used - declared(EXTRAS[folder]) == set()


def test_constraints_leave_to_torch_what_torch_pins(capsys):
    """Two versions of a CUDA package, with overlapping markers, once made the project impossible to install."""
    runpy.run_path(str(CONSTRAINTS))
    lines = [Requirement(line) for line in capsys.readouterr().out.splitlines()]
    names = [line.name for line in lines]
    assert "torch" in names and "numpy" in names
    assert not [name for name in names if name.startswith(("nvidia-", "cuda-", "triton"))]
    for python in ("3.11", "3.12", "3.13", "3.14"):
        environment = {"python_version": python, "python_full_version": f"{python}.0"}
        active = [line.name for line in lines if not line.marker or line.marker.evaluate(environment)]
        assert len(active) == len(set(active)), python


Version = namedtuple("Version", "major minor micro")


@pytest.mark.parametrize("version", [(3, 10), (3, 15)])
def test_another_python_is_refused_in_one_line(version, monkeypatch):
    monkeypatch.setattr(sys, "version_info", Version(*version, 0))
    with pytest.raises(SystemExit, match=r"this is Python 3\.\d+; ppo_rlhf needs 3.11 to 3.14: .*PYTHON=python3.13"):
        runpy.run_path(str(CONSTRAINTS))


def test_no_page_or_message_installs_the_package_by_its_name():
    """The name is not on the index, so another package could answer to it."""
    patterns = ("ppo_rlhf/**/*.py", "docs/**/*.md", "benchmark/**/*.md", "README.md")
    files = [path for pattern in patterns for path in ROOT.glob(pattern)]
    commands = [line for path in files for line in re.findall(r"pip install (.*)", path.read_text())]
    assert not [line for line in commands if "ppo-rlhf" in line or "ppo_rlhf" in line]
