"""How a world of other people's data gets into the cache: once, in a folder named by a hash of what it is made of."""

import contextlib
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ppo_rlhf.lib.base import errors, files
from ppo_rlhf.lib.base.errors import InputError


def find(name: str, made_of: list[Any], build: Callable[[Path], None]) -> Path:
    """The folder of a world made of this; it is built if it does not exist.

    It is in $PPO_RLHF_CACHE or ~/.cache/ppo_rlhf. With several processes the first one builds and the others
    wait.
    """
    folder = files.cache_folder() / f"{name}-{hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:12]}"
    if not folder.exists() and errors.is_first_process():
        build(folder)
    while not folder.exists():
        time.sleep(1)
    check_files(folder)
    return folder


SIZES = "sizes.json"  # a file of a world: the bytes of its files, by their paths


def sizes_of(world: Path) -> dict[str, int]:
    """The bytes of a world's files, except those of its description, by their paths."""
    files_there = (path for path in world.rglob("*") if path.is_file() and path.name not in (SIZES, "world.json"))
    return {path.relative_to(world).as_posix(): path.stat().st_size for path in sorted(files_there)}


def check_files(world: Path) -> None:
    """Raise an InputError if a file of a world is gone or has another size than when the world was built."""
    if not (world / SIZES).is_file():  # it was built by an older version
        return
    try:
        sizes, there = files.read_json(world / SIZES), sizes_of(world)
        broken = [name for name, size in sizes.items() if there.get(name) != size]
    except (OSError, ValueError, AttributeError):
        broken = [SIZES]
    if broken:
        raise InputError(f"{world}/{broken[0]} is damaged or gone; remove {world}, and it is built again")


@contextlib.contextmanager
def new_world(folder: Path, name: str) -> Iterator[Path]:
    """For the time of building a world: another folder next to its own, which is renamed when it is complete."""
    started = time.monotonic()
    place = begin_building(folder)
    try:
        yield place
        files.write_json(place / SIZES, sizes_of(place))
        try:
            place.rename(folder)
        except OSError:
            if not folder.exists():  # else another run has built the same world in the meantime
                raise
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print(f"{name}: {folder} is ready after {time.monotonic() - started:.0f} s", flush=True)


def begin_building(folder: Path) -> Path:
    """A new folder next to that of a world, to build it in. What a killed process has left there for a day goes."""
    for path in folder.parent.glob(f"{folder.name}.*.tmp"):
        if path.stat().st_mtime < time.time() - 24 * 60 * 60:
            shutil.rmtree(path, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent))


def read_facts(world: Path) -> dict[str, Any]:
    """What is known of a world."""
    try:
        return files.read_json(world / "world.json")
    except (OSError, ValueError) as error:
        raise InputError(f"{world}/world.json is damaged ({error}); remove {world}, and it is built again") from error
