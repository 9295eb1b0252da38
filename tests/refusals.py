"""What the table of refusals is made of: commands, damage to files, and a script that runs in this process."""

import ast
import contextlib
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
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from processes import OFFLINE, Result
from safetensors.torch import load_file, save_file

from ppo_rlhf.lib import learning_curves, processes
from ppo_rlhf.lib.run import Run
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
    box: bool = False
    """whether tyro answers, in a box"""
    processes: int = 1
    """how many there seem to be"""


def command(chapter: int, script: str, good_arguments: str) -> Callable[..., Row]:
    """A function that makes rows of a script. Their arguments follow good ones, and of two the last counts."""

    def row(
        arguments: str = "",
        *words: str,
        damage: Damage = lambda folder: None,
        box: bool = False,
        processes: int = 1,
        **environment: str,
    ) -> Row:
        return Row(
            chapter=chapter,
            script=script,
            arguments=shlex.split(good_arguments) + shlex.split(arguments),
            words=words,
            damage=damage,
            environment={"PPO_RLHF_CACHE": "cache", **environment},
            box=box,
            processes=processes,
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


def make_folder(path: str) -> Damage:
    """An empty folder, in place of what was there."""
    return all_of(remove(path), lambda folder: (folder / path).mkdir())


def link(path: str, target: str) -> Damage:
    """A symbolic link, in place of what was there."""
    return all_of(remove(path), lambda folder: (folder / path).symlink_to(target))


def edit(path: str, *keys: str | int, to: Any = KeyError) -> Damage:
    """Set a value deep in a JSON file; without `to`, remove it."""

    def damage(folder: Path) -> None:
        whole = inner = json.loads((folder / path).read_text())
        for key in keys[:-1]:
            inner = inner[key]
        if to is KeyError:
            del inner[keys[-1]]
        else:
            inner[keys[-1]] = to
        (folder / path).write_text(json.dumps(whole))

    return damage


def edit_bytes(path: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: write(path, change((folder / path).read_bytes()))(folder)


def edit_lines(path: str, change: Callable[[list[bytes]], list[bytes]]) -> Damage:
    return edit_bytes(path, lambda content: b"".join(change(content.splitlines(True))))


def edit_row(path: str, number: int, **changes: Any) -> Damage:
    """Change an object in a file of JSON lines."""

    def change(lines: list[bytes]) -> list[bytes]:
        row = json.loads(lines[number]) | changes
        return [*lines[:number], json.dumps(row).encode() + b"\n", *lines[number + 1 :]]

    return edit_lines(path, change)


def cut(path: str) -> Damage:
    """Only the first half of a file, as a full disk leaves it."""
    return edit_bytes(path, lambda content: content[: len(content) // 2])


def flip(path: str) -> Damage:
    """One other byte, near the end of a file."""
    return edit_bytes(path, lambda content: content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])


def edit_tensors(path: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    """Change the tensors of a safetensors file."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / path)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / path, {"format": "pt"})

    return damage


def edit_tensor(path: str, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    """Change one tensor of a safetensors file; name: the end of its name."""

    def change_one(tensors: dict[str, torch.Tensor]) -> None:
        names = [name] if name in tensors else [found for found in tensors if found.endswith(f".{name}")]
        (whole_name,) = names
        tensors[whole_name] = change(tensors[whole_name])

    return edit_tensors(path, change_one)


def not_finite(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * float("nan")


def fewer_positions(model: str, positions: int) -> Damage:
    weights = edit_tensor(f"{model}/model.safetensors", "wpe.weight", lambda tensor: tensor[:positions])
    return all_of(weights, edit(f"{model}/config.json", "n_positions", to=positions))


def fewer_tokens(model: str, tokens: int) -> Damage:
    """A smaller embedding with the same tokenizer."""
    weights = edit_tensor(f"{model}/model.safetensors", "wte.weight", lambda tensor: tensor[:tokens])
    return all_of(weights, edit(f"{model}/config.json", "vocab_size", to=tokens))


def other_words(model: str) -> Damage:
    """A tokenizer of as many tokens, in which `a` and `b` have changed places."""

    def damage(folder: Path) -> None:
        vocab = json.loads((folder / model / "tokenizer.json").read_text())["model"]["vocab"]
        for token, other in (("a", "b"), ("b", "a")):
            edit(f"{model}/tokenizer.json", "model", "vocab", token, to=vocab[other])(folder)

    return damage


# ---- Files -----------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes | str | None]:
    """Everything in a folder: bytes of files, targets of links, None for folders."""

    def content(entry: os.DirEntry) -> bytes | str | None:
        if entry.is_symlink():
            return os.readlink(entry)
        return None if entry.is_dir() else Path(entry).read_bytes()

    found, folders = {}, [str(folder)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                found[os.path.relpath(entry.path, folder)] = content(entry)
                folders += [entry.path] if found[os.path.relpath(entry.path, folder)] is None else []
    return found


class GoodFiles:
    """A folder that is put in order again after each row."""

    def __init__(self, folder: Path):
        self.folder, self.good = folder, contents(folder)

    def restore(self) -> None:
        now = contents(self.folder)
        different = [path for path in now if path not in self.good or now[path] != self.good[path]]
        for path in sorted(different, reverse=True):  # what is in a folder, before the folder
            place = self.folder / path
            place.rmdir() if now[path] is None else place.unlink()
        for path in sorted(path for path in self.good if path in different or path not in now):
            if self.good[path] is None:
                (self.folder / path).mkdir()
            else:
                (self.folder / path).write_bytes(self.good[path])


# ---- A script in this process ----------------------------------------------------------------------------------


class Accepted(BaseException):
    """A script has checked everything and begins to train."""


def accept(*_: Any, **__: Any) -> None:
    raise Accepted


@functools.cache
def main_of(script: str) -> tuple[types.CodeType, types.ModuleType]:
    """What is below a script's `if __name__ == "__main__"`, and the script as a module."""
    module = importlib.import_module(f"ppo_rlhf.{script.removesuffix('.py').replace('/', '.')}")
    last = ast.parse(Path(module.__file__).read_text()).body[-1]
    assert isinstance(last, ast.If) and "__main__" in ast.unparse(last.test)
    return compile(ast.Module(last.body, []), module.__file__, "exec"), module


def first_of(number: int) -> type[Accelerator]:
    """An Accelerator that sees so many processes, and a launcher that says it has started them."""

    class First(Accelerator):
        num_processes = number

        def __init__(self, **arguments: Any):
            super().__init__(**arguments)
            os.environ["WORLD_SIZE"] = str(number)  # only now, since accelerate would wait for the others

    return First


@contextlib.contextmanager
def modules_of(folder: Path) -> Iterator[None]:
    """Within the block, modules may be imported from a folder whose files change from row to row."""
    there = set(sys.modules)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for name in set(sys.modules) - there:
            if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


@contextlib.contextmanager
def started(row: Row, folder: Path) -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """Within the block, this process is one that a command has started in a folder; what it prints."""
    stdout, stderr = io.StringIO(), io.StringIO()
    AcceleratorState._reset_state(reset_partial_state=True)
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(sys, "argv", [row.script, *row.arguments])
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.chdir(folder)
        # accelerate sets variables, which must not stay.
        stack.enter_context(unittest.mock.patch.dict(os.environ, OFFLINE | row.environment))
        patch.setattr(learning_curves, "draw_learning_curves", lambda *_: None)
        if row.processes > 1:
            patch.setattr(processes, "Accelerator", first_of(row.processes))
        stack.enter_context(modules_of(folder))
        warned = stack.enter_context(warnings.catch_warnings(record=True))
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            try:
                yield stdout, stderr
            finally:
                AcceleratorState._reset_state(reset_partial_state=True)
                for warning in warned:
                    if not issubclass(warning.category, DeprecationWarning):
                        print(warning.message, file=sys.stderr)


def run(row: Row, folder: Path, *, to_the_end: bool = False) -> Result:
    """What `python <script> <arguments>` does in a folder until it begins to train; status 0: until then."""
    code, module = main_of(row.script)
    status = 0
    with started(row, folder) as (stdout, stderr), pytest.MonkeyPatch.context() as patch:
        if not to_the_end:
            patch.setattr(Run, "updates", accept)
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
