"""What tests of whole runs share: the arguments of small runs, and reading what a run left."""

import contextlib
import csv
import dataclasses
import io
import json
import shutil
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmark import worlds
from ppo_rlhf import train_policy, train_reward
from ppo_rlhf.report import derivation, learning_curves, page
from ppo_rlhf.train_policy import InputError

ROOT = Path(__file__).parents[2]

TINY_WORLD = worlds.Tales(
    stories=300,
    width=16,
    layers=1,
    heads=2,
    lm_steps=60,
    lm_batch_size=8,
    train_comparisons=64,
    test_comparisons=32,
)

TINY_POSTS = worlds.Posts(
    train_posts=48,
    validation_posts=16,
    test_posts=16,
    train_comparisons=48,
    validation_comparisons=16,
    width=16,
    layers=1,
    heads=2,
    lm_quote_steps=5,
    lm_thread_steps=5,
    lm_quotes=200,
    lm_threads=1_000,
    lm_batch_size=4,
)

TINY_SUMS = worlds.Sums(
    train_problems=64,
    test_problems=32,
    width=16,
    layers=1,
    heads=2,
    lm_solutions=2_000,
    lm_short_steps=5,
    lm_steps=5,
    lm_batch_size=8,
)

TINY_TOOLS = dataclasses.replace(TINY_SUMS, error_rate=0.25, calls=1.0, lm_steps=40, lm_lr=1e-2)

TIMES = {"elapsed/fps", "elapsed/time", "eps", "time", "time/from_scratch", "time/training"}


def build_tiny_world(folder: Path) -> Path:
    """A very small tales world: model/, stories.txt, labels/<task>/offline_5k.json; and .xz of these."""
    worlds.write_tales(folder, TINY_WORLD, train_model=True)
    worlds.compress(folder)
    return folder


def build_tiny_posts(folder: Path) -> Path:
    """A very small world of posts: model/, posts_<split>.jsonl, comparisons_<split>.jsonl."""
    worlds.write_posts(folder, TINY_POSTS, train_model=True)
    return folder


def build_tiny_sums(folder: Path, sizes: worlds.Sums = TINY_SUMS) -> Path:
    """A very small world of sums: model/, problems_<split>.jsonl, and .xz of these."""
    worlds.write_sums(folder, "sums", sizes, train_model=True)
    worlds.compress(folder)
    return folder


def world_arguments(world: Path, reward: Path | None = None) -> list[str]:
    words = f"--preset tales --base_model {world}/model --task.query_dataset {world}/stories.txt".split()
    return words + (["--rewards.trained_model", str(reward)] if reward else [])


def posts_arguments(world: Path) -> list[str]:
    return f"--preset posts --task.posts {world} --task.comparisons {world}".split()


def sums_arguments(world: Path) -> list[str]:
    """Chapter 3: updates of 16 episodes in 2 minibatches, and in every second update 8 held-out problems."""
    sizes = (
        "--dtype float64 --ppo.batch_size 16 --ppo.nminibatches 2 --ppo.local_micro_batch_size 256 "
        "--eval_interval 2 --eval_samples 2 --eval_problems 8 --task.response_length 20 --log_interval 1"
    )
    return ["--preset", "sums", "--base_model", f"{world}/model", "--task.problems", str(world), *sizes.split()]


def reward_arguments(world: Path, prefix: str = "--") -> list[str]:
    """Five steps of 8 labels, a checkpoint after every second."""
    words = (
        f"{prefix}label_dataset {world}/labels/sentiment/offline_5k.json {prefix}num_train 40 {prefix}batch_size 8 "
        f"{prefix}rollout_batch_size 32 {prefix}normalize_samples 32 {prefix}save_interval 2"
    )
    return words.split()


def policy_arguments(prefix: str = "--") -> list[str]:
    """Four updates of 16 episodes in 2 groups, a checkpoint after every second, and no traces."""
    words = (
        f"{prefix}ppo.total_episodes 64 {prefix}ppo.batch_size 16 {prefix}ppo.whiten_groups 2 "
        f"{prefix}rewards.normalize_samples 16 "
        f"{prefix}save_interval 2 {prefix}log_interval 1 {prefix}trace_interval 0"
    )
    return words.split()


def both_arguments(world: Path) -> list[str]:
    return [*world_arguments(world), *reward_arguments(world, "--reward."), *policy_arguments("--policy.")]


def trained(script: ModuleType, folder: Path, words: Iterable[str]) -> Path:
    """Train in a folder, in this process; returns the folder of the run."""
    with contextlib.chdir(folder):
        script.train(train_policy.parse_args(script.PRESETS, list(words)))
    return only(folder, "runs/*")


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """The rows of a run's metrics.csv, times apart."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [{k: float(v) for k, v in row.items() if k not in TIMES} for row in csv.DictReader(file)]


def rows_of(file: Path) -> list[Any]:
    """What a file of JSON lines holds."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def write_rows(file: str | Path, *rows: dict[str, Any]) -> None:
    """A file of JSON lines, in a folder that is made if there is none."""
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))


def samples_of(folder: Path) -> list[dict[str, Any]]:
    return rows_of(folder / "samples.jsonl")


def meta_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "meta.json").read_text())


def check_close(run: Path, expected: Path, **tolerance: float) -> None:
    """The metrics of two runs, times apart, are the same but for rounding."""
    for row, expected_row in zip(metrics_of(run), metrics_of(expected), strict=True):
        assert row == pytest.approx(expected_row, **tolerance)


def interrupt(folder: Path) -> None:
    """Make a run as if it had been killed on its way to its last checkpoint."""
    shutil.rmtree(max((folder / "checkpoints").iterdir(), key=lambda path: int(path.name)))
    (folder / "meta.json").write_text(json.dumps(meta_of(folder) | {"finished": False, "results": {}}))
    for table in ("evaluation.jsonl", "evaluation_test.jsonl"):
        (folder / table).unlink(missing_ok=True)


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def full_names(cell: str) -> list[str]:
    """Names in full of a cell of metrics.toml, `loss/policy; value`: a folder holds for the names after it."""
    names: list[str] = []
    for name in cell.split("; "):
        folder = names[-1].rpartition("/")[0] if names and "/" not in name else ""
        names.append(f"{folder}/{name}" if folder else name)
    return names


def explained_metrics(chapter: int) -> set[str]:
    """The names of the metrics that metrics.toml explains for a chapter, where <x> stands for any text."""
    (rows,) = (table["rows"] for table in learning_curves.METRICS["meanings"] if table["chapter"] == chapter)
    return {name for cell, _ in rows for name in full_names(cell)}


def error_line(function, *args, **kwargs) -> str:
    """The message of the InputError that the call raises: one line."""
    with pytest.raises((InputError, train_policy.InputError, train_reward.InputError)) as caught:
        function(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def tar(files: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return content.getvalue()


def lines_of(run: Path) -> Iterator[tuple[dict, derivation.Line]]:
    """How the tokens of every second episode of a run are derived, in its last epoch."""
    one_run = page.read_run(run)
    settings = page.settings_of(one_run)
    steps = derivation.steps_of(settings)
    for update in one_run.kept():
        for episode, group in [*page.with_groups(one_run.episodes(update))][::2]:
            last = len(episode["epochs"].get("new_logprobs", [0])) - 1
            numbers = derivation.derive(episode, settings, steps, last, group)
            for lines in derivation.lines_of(episode, steps, numbers, last):
                yield from ((episode, line) for line in lines)
