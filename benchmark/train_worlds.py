"""Train the language models of the small worlds again, and put them into the package.

    python benchmark/train_worlds.py                # all five: about ten minutes on two CPU cores
    python benchmark/train_worlds.py --only sums    # one

Needed when settings or grammar of a world have changed. Until then, each machine trains the world's model itself, and
a test fails. Everything that was measured in that world must be measured again.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro

from ppo_rlhf.lib.base.errors import InputError, run_script
from ppo_rlhf.worlds import building, posts, sums, tales

# Name of a world: a function that finds it, and what it is made of.
WORLDS: dict[str, tuple[Callable[[], Path], list]] = {
    "tales": (tales.find_world, tales.made_of(tales.TalesArgs())),
    "posts": (posts.find_world, posts.made_of(posts.PostsArgs())),
    "sums": (sums.find_world, sums.made_of(sums.SumsArgs())),
    "sums-long": (lambda: sums.find_world(sums.LongArgs()), sums.made_of(sums.LongArgs())),
    "sums-tools": (lambda: sums.find_world(sums.ToolsArgs()), sums.made_of(sums.ToolsArgs())),
}


@dataclass(frozen=True)
class Args:
    only: tuple[str, ...] = ()
    """which worlds; empty: all"""
    built: Path | None = None
    """take them from this cache, where worlds have trained their own models, instead of training them"""


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    if unknown := set(args.only) - set(WORLDS):
        raise InputError(f"--only {' '.join(sorted(unknown))}: there are {', '.join(WORLDS)}")
    package, building.TRAINED = building.TRAINED, Path(os.devnull)  # find_world now finds no trained model
    with tempfile.TemporaryDirectory() as cache:
        os.environ["PPO_RLHF_CACHE"] = str(args.built or cache)
        for name in args.only or WORLDS:
            find_world, made_of = WORLDS[name]
            world = find_world()
            for old in package.glob(f"{name}-{'[0-9a-f]' * 12}"):
                shutil.rmtree(old)
            folder = package / building.name_with_hash(name, made_of)
            shutil.copytree(world / "model", folder / "model", copy_function=shutil.copyfile)
            shutil.copyfile(world / "world.json", folder / "world.json")
            print(f"{folder.relative_to(package.parent)} is from {world}", flush=True)


if __name__ == "__main__":
    run_script(main)
