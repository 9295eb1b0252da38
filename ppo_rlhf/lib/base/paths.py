"""Where a run is, and what its relative paths mean."""

import os
from pathlib import Path
from typing import Any

from ppo_rlhf.lib.base.errors import InputError


def absolute(path: str) -> Path:
    """An absolute path. A link at its end is followed; one on the way, such as runs/ on another disk, is not."""
    folder = Path(os.path.abspath(path))
    while folder.is_symlink():
        folder = Path(os.path.abspath(folder.parent / folder.readlink()))
    return folder


def shown(path: Path) -> Path:
    """An absolute path as messages name it: relative to the current folder, if it is there."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def root_of(resume: str, joint: dict[str, Any] | None = None) -> Path:
    """The folder that holds runs/ and models/ of a run that is resumed or, without `resume`, begins.

    joint: of a stage of several.
    """
    if joint:
        return beside(Path(joint["runs"]).absolute())
    return beside(absolute(resume).parent) if resume else Path.cwd()


def beside(runs: Path) -> Path:
    """The folder that holds models/ of the runs in this folder, which is called runs unless they were moved."""
    return runs.parent if runs.name == "runs" else runs


def find_path(path: str, root: Path) -> Path:
    """The place of a path that a run was given: next to the run, in its root, or else in the current folder."""
    return root / path if root != Path.cwd() and os.path.exists(root / path) else Path(path)


def find_cache() -> Path:
    """The folder that holds worlds and made problems."""
    try:
        return Path(os.environ.get("PPO_RLHF_CACHE") or Path.home() / ".cache" / "ppo_rlhf")
    except RuntimeError as error:
        raise InputError(
            "there is no home folder for the cache of worlds; name a folder with the variable PPO_RLHF_CACHE"
        ) from error
