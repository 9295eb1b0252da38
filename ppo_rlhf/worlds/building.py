"""How a world of other people's data gets into the cache: once, in a folder named by a hash of what it is made of."""

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ppo_rlhf.lib import errors, files


def find(name: str, made_of: list[Any], build: Callable[[Path], None]) -> Path:
    """The folder of a world made of this; if it does not exist, `build` fills a new one.

    It is in $PPO_RLHF_CACHE or ~/.cache/ppo_rlhf. With several processes the first one builds and the others
    wait.
    """
    folder = files.cache_folder() / f"{name}-{hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:12]}"
    if not folder.exists() and errors.is_first_process():
        started = time.monotonic()
        folder.parent.mkdir(parents=True, exist_ok=True)
        # It gets its name when it is complete, so that nobody reads half a world.
        place = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent))
        try:
            build(place)
            place.rename(folder)
        except OSError:
            if not folder.exists():  # else another run has built the same world in the meantime
                raise
        finally:
            shutil.rmtree(place, ignore_errors=True)
        print(f"{name}: {folder} is ready after {time.monotonic() - started:.0f} s", flush=True)
    while not folder.exists():
        time.sleep(1)
    return folder
