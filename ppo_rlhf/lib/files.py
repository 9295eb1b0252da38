"""Paths, JSON files and locks of a run."""

import hashlib
import json
import os
import types
import typing
from pathlib import Path
from typing import Any

from ppo_rlhf.lib.errors import InputError


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"ppo": {"lr": 1}} becomes {"ppo.lr": 1}."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def fits(value: Any, hint: Any) -> bool:
    """Whether a value that was read from JSON has the type of a field."""
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(fits(value, choice) for choice in typing.get_args(hint))
    return type(value) is hint or (hint is float and type(value) is int)


def absolute(path: str) -> Path:
    """An absolute path. A link at its end is followed; one on the way, such as runs/ on another disk, is not."""
    folder = Path(os.path.abspath(path))
    while folder.is_symlink():
        folder = Path(os.path.abspath(folder.parent / folder.readlink()))
    return folder


def shown(path: Path) -> Path:
    """An absolute path as messages name it: relative to the current folder, if it lies there."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def root_of(resume: str, joint: dict[str, Any] | None = None) -> Path:
    """The folder that holds runs/ and models/ of a run that goes on or, without `resume`, begins.

    joint: of a stage of several.
    """
    if joint:
        return Path(joint["runs"]).absolute().parent
    return absolute(resume).parent.parent if resume else Path.cwd()


def find_path(path: str, root: Path) -> Path:
    """Where a path lies that a run was given: beside the run, in its root, or else in the current folder."""
    return root / path if root != Path.cwd() and os.path.exists(root / path) else Path(path)


def checksum(paths: list[Path]) -> str:
    """One SHA-256 of several files."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises OSError or ValueError."""
    try:
        return json.loads(path.read_text())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_meta(folder: Path) -> dict[str, Any]:
    try:
        meta = read_json(folder / "meta.json")
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} is not the folder of a run: {error}") from error
    if not isinstance(meta, dict) or not isinstance(meta.get("args"), dict):
        raise InputError(f"{folder} is not the folder of a run: its meta.json holds no arguments")
    kinds = {"wall_time": float, "finished": bool, "wandb_id": str | None, "joint": dict | None, "results": dict}
    kinds |= {"name": str, "id": str, "weights": dict}
    values = {name: meta[name] for name in kinds if name in meta}
    if meta.get("joint"):
        kinds |= {"joint.args": dict, "joint.timestamp": int}
        values |= {name: meta["joint"].get(name.removeprefix("joint.")) for name in kinds if "." in name}
    if broken := [name for name, value in values.items() if not fits(value, kinds[name])]:
        raise InputError(f"{folder / 'meta.json'} was damaged: {broken[0]} is {values[broken[0]]!r}")
    return meta


def replace_file(path: Path, text: str) -> None:
    """Write to a temporary name, then rename: a reader never sees half a file."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def lock_folder(folder: Path) -> int | None:
    """Keep other processes from writing to a folder, until this one ends; None where the file system has no locks."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    except BlockingIOError as error:
        os.close(descriptor)
        raise InputError(
            f"{shown(folder)} is in use: another process is writing to it; stop that one first"
        ) from error
    except OSError:
        os.close(descriptor)
        return None


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file. Its numbers must be finite: JSON has no others."""
    replace_file(path, json.dumps(value, indent=2, allow_nan=False) + "\n")
