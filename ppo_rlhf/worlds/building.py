"""How a world gets into the cache: built once, in a folder whose name is a hash of what the world is made of."""

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ppo_rlhf.lib import errors, files
from ppo_rlhf.lib.errors import InputError


def find(name: str, made_of: list[Any], build: Callable[[Path], None]) -> Path:
    """The folder of a world made of these settings and this grammar; it is built if it does not exist.

    It is in $PPO_RLHF_CACHE or ~/.cache/ppo_rlhf. With several processes the first one builds and the others
    wait.
    """
    cache = Path(os.environ.get("PPO_RLHF_CACHE") or Path.home() / ".cache" / "ppo_rlhf")
    folder = cache / f"{name}-{hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:12]}"
    if not folder.exists() and errors.environment_number("RANK", default=0, least=0) == 0:
        build(folder)
    while not folder.exists():
        time.sleep(1)
    return folder


@contextlib.contextmanager
def new_world(folder: Path, name: str) -> Iterator[Path]:
    """For the time of building a world: another folder next to its own, which is renamed when it is complete."""
    started = time.monotonic()
    place = begin_building(folder)
    try:
        yield place
        files.give_usual_mode(place)
        try:
            place.rename(folder)
        except OSError:
            if not folder.exists():  # else another run has built the same world in the meantime
                raise
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print(f"{name}: {folder} is ready after {time.monotonic() - started:.0f} s", flush=True)


def begin_building(folder: Path) -> Path:
    """A new folder next to that of a world, to build it in. Leftovers of killed processes are removed.

    The name holds machine and process: several may build at once, and machines may share the cache.
    """
    machine = platform.node()
    pattern = re.compile(rf"{re.escape(folder.name)}\.(?:{re.escape(machine)}\.)?(\d{{1,9}})\.tmp")
    for path in folder.parent.glob("*.tmp"):
        name = pattern.fullmatch(path.name)
        if name and (int(name[1]) == os.getpid() or not is_running(int(name[1]))):
            shutil.rmtree(path, ignore_errors=True)
    place = folder.with_name(f"{folder.name}.{machine}.{os.getpid()}.tmp")
    place.mkdir(parents=True)
    return place


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)  # sends nothing
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        return True
    return True


def read_facts(world: Path) -> dict[str, Any]:
    """The description of a world: settings, size and loss of its language model, ceiling of accuracy."""
    try:
        return files.read_json(world / "world.json")
    except (OSError, ValueError) as error:
        raise InputError(f"{world}/world.json is damaged ({error}); remove {world}, and it is built again") from error
