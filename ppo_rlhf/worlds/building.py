"""How a world gets into the cache: built once, in a folder whose name is a hash of what the world is made of.

A small language model trained from scratch on another processor is another model: rounding differs, and training
amplifies it. Then runs differ by much more than two seeds do. So the language models of the usual worlds are part of
the package, in the folder trained/, and only a world with other settings trains its own.
`benchmark/train_worlds.py` trains those of the package again.
"""

import contextlib
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ppo_rlhf.lib.base import errors, files, paths
from ppo_rlhf.lib.base.errors import InputError

TRAINED = Path(__file__).with_name("trained")
WEIGHTS = "model/model.safetensors"


def name_with_hash(name: str, made_of: list[Any]) -> str:
    return f"{name}-{hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:12]}"


def find_trained(name: str, made_of: list[Any]) -> Path | None:
    """The folder of the package with the language model of a world made of this, or None: model/ and world.json."""
    folder = TRAINED / name_with_hash(name, made_of)
    return folder if (folder / WEIGHTS).exists() else None


def copy_trained(trained: Path, place: Path) -> dict[str, Any]:
    """Copy a trained language model and its tokenizer into a world. Returns the facts that belong to them."""
    (place / "model").mkdir()
    for file in (trained / "model").iterdir():  # copytree would raise an Error that hides a full disk
        shutil.copyfile(file, place / "model" / file.name)
    return read_facts(trained)


def find(name: str, made_of: list[Any], build: Callable[[Path], None]) -> Path:
    """The folder of a world made of these settings and this grammar; it is built if it does not exist.

    It is in $PPO_RLHF_CACHE or ~/.cache/ppo_rlhf. With several processes the first one builds and the others
    wait.
    """
    cache = paths.find_cache()
    trained = find_trained(name, made_of)
    weights = [hashlib.sha256((trained / WEIGHTS).read_bytes()).hexdigest()] if trained else []
    folder = cache / name_with_hash(name, [*made_of, *weights])
    if not folder.exists() and errors.environment_number("RANK", default=0, least=0) == 0:
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
    """A new folder next to that of a world, to build it in. What a killed process has left there for a day goes."""
    for path in folder.parent.glob(f"{folder.name}.*.tmp"):
        if path.stat().st_mtime < time.time() - 24 * 60 * 60:
            shutil.rmtree(path, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent))


def read_facts(world: Path) -> dict[str, Any]:
    """The description of a world: settings, size and loss of its language model, ceiling of accuracy."""
    try:
        return files.read_json(world / "world.json")
    except (OSError, ValueError) as error:
        raise InputError(f"{world}/world.json is damaged ({error}); remove {world}, and it is built again") from error
