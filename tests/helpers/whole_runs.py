"""Whole runs that many tests look at: each is made once in a session of pytest, however many workers it has.

A test that changes a run's folder works on a copy (`Whole.copy`).
"""

import fcntl
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from processes import Result, launch, launch_together
from runs import meta_of, metrics_of, only, rows_of


@dataclass(frozen=True)
class Whole:
    """A run that came to its end, as it was started."""

    folder: Path  # where it was started; `stdout` in it is what it printed
    script: str
    arguments: list[str]
    processes: int = 1

    def run(self, script: str = "") -> Path:
        """Its folder below runs/. script: the stage's, such as train_policy, where there are several."""
        return only(self.folder, f"runs/{script}*")

    def model(self, kind: str) -> Path:
        return only(self.folder, f"models/*/{kind}")

    def copy(self, folder: Path) -> "Whole":
        """The same run, in a folder that isn't there yet."""
        return replace(self, folder=Path(shutil.copytree(self.folder, folder)))

    def made(self, **environment: str | bool) -> "Whole":
        """Run it, to its end."""
        self.folder.mkdir(exist_ok=True, parents=True)
        if self.processes == 1:
            results = [launch(self.script, *self.arguments, folder=self.folder, **environment)]
        else:
            results = launch_together(self.processes, self.script, *self.arguments, folder=self.folder, **environment)
        for result in results:
            assert result.status == 0, result.stdout + result.stderr
        (self.folder / "stdout").write_text(results[0].stdout)
        return self

    def resumed(self, run: Path, *words: str, script: str = "") -> Result:
        """Go on with one of its runs, to the end. script: the one of a stage; else its own."""
        result = launch(script or self.script, "--resume", str(run), *words, folder=self.folder)
        assert result.status == 0, result.stdout + result.stderr
        return result


MadeOnce = Callable[[str, Callable[[Path], object]], Path]


def folder_made_once(factory: pytest.TempPathFactory) -> MadeOnce:
    """A function (name, make) -> the folder of that name, which make(folder) has filled.

    The first worker of pytest that asks for it makes it, and the others wait.
    """
    base = factory.getbasetemp()
    # The folders of the workers are next to each other.
    common = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "made_once"
    common.mkdir(exist_ok=True)

    def made_once(name: str, make: Callable[[Path], object]) -> Path:
        folder, complete = common / name, common / f"{name}.complete"
        with (common / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not complete.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
                folder.mkdir()
                make(folder)
                complete.touch()
        return folder

    return made_once


def whole(made_once: MadeOnce, name: str, run: Whole, **environment: str | bool) -> Whole:
    """A run, made once under this name. run: its folder doesn't matter."""
    folder = made_once(name, lambda folder: replace(run, folder=folder).made(**environment))
    return replace(run, folder=folder)


def check_same(run: Whole, expected: Whole) -> None:
    """Metrics, times apart, results, tables and the files of all models, bit for bit."""
    for one, other in zip(*(sorted(each.folder.glob("runs/*/")) for each in (run, expected)), strict=True):
        assert str(metrics_of(one)) == str(metrics_of(other))  # some may be NaN
        assert meta_of(one)["results"] == meta_of(other)["results"]
        for table in other.glob("*.jsonl"):
            assert rows_of(one / table.name) == rows_of(table)
    check_same_weights(run.folder, expected.folder)


def check_same_weights(folder: Path, expected: Path) -> None:
    """The files of all models that were saved in two folders, bit for bit."""
    weights = [sorted(each.glob("models/**/*.safetensors")) for each in (folder, expected)]
    assert weights[0]
    for one, other in zip(*weights, strict=True):
        assert one.name == other.name and one.read_bytes() == other.read_bytes()
