"""Kill a joint run again and again, resume it each time, and compare it with a run that nothing happened to.

    python tests/soak.py --kills 24 --seed 1

It dies by kill -9: by the clock, or in a chosen place (doomed_run.py), also within the writing of a checkpoint and
while it is being resumed. All metrics (times apart), all samples and the final weights must be equal bit for bit.
The default takes about a minute.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from doomed_run import PLACES
from processes import SCRIPTS, Launched, launch
from runs import build_tiny_world, metrics_of, only, policy_arguments, reward_arguments, samples_of, world_arguments
from safetensors.torch import load_file

DOOMED = Path(__file__).parent / "doomed_run.py"
KINDS = ("train_reward", "train_policy")


def arguments_of_run(world: Path, kills: int) -> list[str]:
    """A joint run so long that it survives the kills, with a checkpoint after every second step."""
    reward = [*reward_arguments(world, "--reward."), "--reward.num_train", "64", "--reward.batch_size", "1"]
    policy = [*policy_arguments("--policy."), "--policy.ppo.total_episodes", str(16 * 8 * kills)]
    return [*world_arguments(world), *reward, *policy, "--policy.trace_interval", "20"]


def where_to_go_on(folder: Path) -> list[str]:
    """The arguments that resume a run that was cut off; none where it had not begun, and must begin anew."""
    begun = [run for kind in KINDS for run in folder.glob(f"runs/{kind}__*") if (run / "meta.json").exists()]
    if begun:
        return ["--resume", str(begun[-1])]
    shutil.rmtree(folder / "runs", ignore_errors=True)
    return []


def kill_once(folder: Path, arguments: list[str], rng: random.Random) -> str:
    """Run until a kill; returns where it died, or an empty text if the run came to its end first."""
    in_first_part = not list(folder.glob("runs/train_policy__*"))
    places = [place for place in PLACES if not in_first_part or place not in ("rollout", "sample")]
    place = rng.choice(["clock", "clock", "tensors of a checkpoint", *places])
    if place == "clock":
        launched = Launched("train_both.py", *arguments, folder=folder)
        time.sleep(rng.uniform(0.2, 2.0))
        launched.process.kill()
    else:
        command = (place, str(rng.randrange(5)), str(SCRIPTS / "train_both.py"), *arguments)
        launched = Launched(DOOMED, *command, folder=folder)
    result = launched.wait()
    if result.status not in (0, -9):
        raise AssertionError(f"{place}: ended with status {result.status}: {result.stderr}")
    return place if result.status == -9 else ""


def compare(folder: Path, undisturbed: Path) -> None:
    for kind in KINDS:
        run, expected = only(folder, f"runs/{kind}__*"), only(undisturbed, f"runs/{kind}__*")
        assert metrics_of(run) == metrics_of(expected), kind
        if kind == "train_policy":
            assert samples_of(run) == samples_of(expected)
        for pattern in (f"models/{kind}__*/*/model.safetensors", f"models/{kind}__*/*/*head.safetensors"):
            weights, expected_weights = (load_file(only(path, pattern)) for path in (folder, undisturbed))
            assert all(weights[name].equal(expected_weights[name]) for name in expected_weights), pattern


def soak(kills: int, seed: int, work: Path, world: Path, say: Callable[[str], None]) -> Counter:
    """Raises an AssertionError if the runs differ; returns how often the run died where."""
    rng, places = random.Random(seed), Counter()
    undisturbed, folder = work / "undisturbed", work / "disturbed"
    for path in (undisturbed, folder):
        path.mkdir()
    result = launch("train_both.py", *arguments_of_run(world, kills), folder=undisturbed)
    assert result.status == 0, result.stderr
    while places.total() < kills:
        begun = where_to_go_on(folder)
        place = kill_once(folder, begun or arguments_of_run(world, kills), rng)
        if not place:
            raise AssertionError(f"the run reached its end after {places.total()} kills")
        places[place] += 1
        steps = ", ".join(f"{run.name.split('__')[0]} {len(metrics_so_far(run))}" for run in folder.glob("runs/*"))
        say(f"kill {places.total():3}  {place:26} {steps}")
    result = launch("train_both.py", *(where_to_go_on(folder) or arguments_of_run(world, kills)), folder=folder)
    assert result.status == 0, result.stderr
    compare(folder, undisturbed)
    return places


def metrics_so_far(run: Path) -> list[str]:
    file = run / "metrics.csv"
    return file.read_text().splitlines()[1:] if file.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        places = soak(
            args.kills, args.seed, work, build_tiny_world(work / "world"), lambda line: print(line, flush=True)
        )
        steps = [len(metrics_of(only(work / "disturbed", f"runs/{kind}__*"))) for kind in KINDS]
    died = ", ".join(f"{place} {count}" for place, count in places.most_common())
    print(
        f"{args.kills} kills ({died}); {steps[0]} steps of the reward model and {steps[1]} updates: all numbers equal"
    )


if __name__ == "__main__":
    sys.exit(main())
