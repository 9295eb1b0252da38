"""What the table of refusals is made of: commands, damage to files, and a script that runs in this process."""

import ast
import contextlib
import copy
import dataclasses
import functools
import importlib
import io
import json
import os
import shlex
import shutil
import sys
import types
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from processes import OFFLINE, Result
from safetensors.torch import load_file, save_file

from ppo_rlhf import train_policy, train_reward
from ppo_rlhf.rlvr import asynchronous as rlvr_async

# ---- Rows ------------------------------------------------------------------------------------------------------

Damage = Callable[[Path], None]  # of the folder that the script runs in


@dataclass(frozen=True, kw_only=True)
class Row:
    chapter: int
    """of the good files that the script finds"""
    script: str
    arguments: list[str]
    words: tuple[str, ...] = ()
    """what the line must contain"""
    damage: Damage = lambda folder: None
    environment: dict[str, str] = field(default_factory=dict)


def command(chapter: int, script: str, good_arguments: str) -> Callable[..., Row]:
    """A function that makes rows of a script. Their arguments follow good ones, and of two the last counts."""

    def row(arguments: str = "", *words: str, damage: Damage = Row.damage, **environment: str) -> Row:
        return Row(
            chapter=chapter,
            script=script,
            arguments=shlex.split(good_arguments) + shlex.split(arguments),
            words=words,
            damage=damage,
            environment={"PPO_RLHF_CACHE": "cache", **environment},
        )

    return row


# ---- Damage ----------------------------------------------------------------------------------------------------


def all_of(*damages: Damage) -> Damage:
    def damage(folder: Path) -> None:
        for one in damages:
            one(folder)

    return damage


def remove(path: str) -> Damage:
    def damage(folder: Path) -> None:
        if (folder / path).is_dir():
            shutil.rmtree(folder / path)
        else:
            (folder / path).unlink(missing_ok=True)

    return damage


def write(path: str, content: Any) -> Damage:
    """A file with these bytes, this text or this JSON, in place of what was there."""

    def damage(folder: Path) -> None:
        remove(path)(folder)
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        (folder / path).write_bytes(text.encode() if isinstance(text, str) else text)

    return damage


def changed(row: Any, *keys: str | int, to: Any = KeyError) -> Any:
    """A copy of a row, or of several, with another value deep inside; without `to`, with none."""
    whole = inner = copy.deepcopy(row)
    for key in keys[:-1]:
        inner = inner[key]
    if to is KeyError:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = to
    return whole


def edit(path: str, *keys: str | int, to: Any = KeyError) -> Damage:
    """Set a value deep in a JSON file; without `to`, remove it."""

    def damage(folder: Path) -> None:
        row = json.loads((folder / path).read_text())
        (folder / path).write_text(json.dumps(changed(row, *keys, to=to)))

    return damage


def edit_lines(path: str, change: Callable[[list[bytes]], list[bytes]]) -> Damage:
    def damage(folder: Path) -> None:
        lines = (folder / path).read_bytes().splitlines(keepends=True)
        (folder / path).write_bytes(b"".join(change(lines)))

    return damage


def edit_tensors(path: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    """Change the tensors of a safetensors file."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / path)
        change(tensors)
        save_file(tensors, folder / path, {"format": "pt"})

    return damage


def seal(checkpoint: Path) -> None:
    """Give a checkpoint whose tensors were changed a checksum that fits."""
    state = json.loads((checkpoint / "state.json").read_text())
    del state["sha256"]
    write("state.json", state | {"sha256": train_policy.checksum(checkpoint, state)})(checkpoint)


def contents(folder: Path) -> dict[Path, bytes | None]:
    """Everything in a folder: the bytes of files, and None for the rest."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


# ---- A script in this process ----------------------------------------------------------------------------------


class Accepted(BaseException):
    """A script has checked everything and begins to train."""


def accept(*_: Any, **__: Any) -> None:
    raise Accepted


@functools.cache
def main_of(script: str | types.ModuleType) -> tuple[types.CodeType, types.ModuleType]:
    """What is below a script's `if __name__ == "__main__"`, and the script as a module."""
    module = script
    if isinstance(script, str):
        module = importlib.import_module(f"ppo_rlhf.{script.removesuffix('.py').replace('/', '.')}")
    last = ast.parse(Path(module.__file__).read_text()).body[-1]
    assert isinstance(last, ast.If) and "__main__" in ast.unparse(last.test)
    return compile(ast.Module(last.body, []), module.__file__, "exec"), module


@contextlib.contextmanager
def started(row: Row, folder: Path) -> Iterator[pytest.MonkeyPatch]:
    """Within the block, this process is one that a command has started in a folder, and may import modules there."""
    there = set(sys.modules)
    importlib.invalidate_caches()
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        patch.setattr(sys, "argv", [row.script, *row.arguments])
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.chdir(folder)
        try:
            # accelerate sets variables, which must not stay.
            with unittest.mock.patch.dict(os.environ, OFFLINE | row.environment):
                yield patch
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            for name in set(sys.modules) - there:
                if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
                    del sys.modules[name]
            for warning in warned:
                if not issubclass(warning.category, DeprecationWarning):
                    print(warning.message, file=sys.stderr)


def run(row: Row, folder: Path, *, to_the_end: bool = False) -> Result:
    """What `python <script> <arguments>` does in a folder until it begins to train; status 0: until then."""
    code, module = main_of(row.script)
    status, stdout, stderr = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr), started(row, folder) as patch:
        if not to_the_end:
            for script in (train_policy.Run, train_reward.Run):
                patch.setattr(script, "open_logs", accept)
        patch.setattr(rlvr_async, "connect", accept)  # to Ray, after its checks
        try:
            exec(code, vars(module))
        except SystemExit as end:
            status = end.code
        except Accepted:
            pass
    return Result(status, stdout.getvalue(), stderr.getvalue())


# ---- Arguments -----------------------------------------------------------------------------------------------


def with_value(group: Any, name: str, value: Any) -> Any:
    """A script's arguments with another value for one, such as ppo.lr."""
    first, _, rest = name.partition(".")
    return dataclasses.replace(group, **{first: with_value(getattr(group, first), rest, value) if rest else value})


class Hostile:
    """Leaves a file when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple:
        return open, (str(self.marker), "w")
