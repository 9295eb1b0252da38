"""The same global batch, however it is divided: processes, micro-batches, rollout batches. The run stays the same.

Sums of floating-point numbers in another order differ in their last digits. So updates in float32 agree to 1e-4
and those in float64 to 1e-9, and every sampled token is the same. One flipped token would part two runs for good.
"""

import itertools
import json
from pathlib import Path

import pytest
from replays import labels_of
from runs import meta_of, metrics_of, policy_arguments, reward_arguments, samples_of, world_arguments
from whole_runs import Whole

BATCH, HORIZON = 32, 1000  # the second is that of the KL controller in the tales preset


def same(run: list[dict[str, float]], expected: list[dict[str, float]], dtype: str) -> None:
    tolerance = {"float32": {"rel": 1e-4, "abs": 1e-6}, "float64": {"rel": 1e-9, "abs": 1e-12}}[dtype]
    assert len(run) == len(expected) > 2
    for row, expected_row in zip(run, expected, strict=True):
        assert row == pytest.approx(expected_row, **tolerance)


# ---- The policy ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy_run(tmp_path_factory, tiny_world, tiny_reward):
    """A function (processes, parts, dtype, minibatches) -> a run's folder. parts: of each batch and minibatch."""

    def make(processes: int, parts: int, dtype: str, nminibatches: int, kl_target: float = 6.0) -> Path:
        words = f"--ppo.batch_size {BATCH} --ppo.total_episodes {3 * BATCH} --save_interval 0 --dtype {dtype}"
        words += f" --ppo.nminibatches {nminibatches} --rewards.adaptive_kl.target {kl_target}"
        # The last part of a minibatch is smaller.
        words += f" --ppo.local_micro_batch_size {BATCH // nminibatches // processes // parts + 1}"
        words += f" --ppo.local_rollout_batch_size {BATCH // processes // parts}"
        arguments = [*world_arguments(tiny_world, tiny_reward), *policy_arguments(), *words.split()]
        run = Whole(tmp_path_factory.mktemp("run"), "train_policy.py", arguments, processes).made().run()
        assert meta_of(run)["num_processes"] == processes
        return run

    return make


def texts_of(run: Path) -> list[tuple[str, str]]:
    """Queries and responses that the run shows, the first three of each update."""
    return [(sample["query"], sample["response"]) for sample in samples_of(run)]


@pytest.mark.parametrize(
    ("dtype", "nminibatches", "ways"), [("float64", 2, [(1, 4), (2, 2)]), ("float32", 1, [(2, 1)])]
)
def test_policy(dtype, nminibatches, ways, policy_run):
    # A KL that the second update is near to, so that the controller follows it and is not clipped throughout.
    kl_target = 0.9 * metrics_of(policy_run(1, 1, dtype, nminibatches))[1]["objective/kl"]
    reference = policy_run(1, 1, dtype, nminibatches, kl_target)
    expected = metrics_of(reference)
    coefficients = [row["objective/kl_coef"] for row in expected]
    changes = [after / before - 1 for before, after in itertools.pairwise(coefficients)]
    assert any(0 < abs(change) < 0.19 * BATCH / HORIZON for change in changes)
    assert all(row["objective/stopped"] > 0 for row in expected)  # some scores count
    for processes, parts in ways:
        run = policy_run(processes, parts, dtype, nminibatches, kl_target)
        assert texts_of(run) == texts_of(reference)
        same(metrics_of(run), expected, dtype)


# ---- The reward model ------------------------------------------------------------------------------------------


def reward_run(folder: Path, world: Path, processes: int, parts: int, labels: Path) -> list[dict]:
    """Five steps of 8 labels in float64, normalised before and after; the last row is about the held-out labels."""
    words = [*world_arguments(world), *reward_arguments(world), "--dtype", "float64", "--label_dataset", str(labels)]
    words += ["--local_micro_batch_size", str(8 // processes // parts)]
    words += ["--local_rollout_batch_size", str(32 // processes // parts)]
    run = Whole(folder, "train_reward.py", words, processes).made().run()
    results = meta_of(run)["results"]
    return [*metrics_of(run), {name: x for name, x in results.items() if name.startswith("test_")}]


@pytest.mark.parametrize("kind", ["best", "score"])
def test_reward_model(tiny_world, tmp_path, kind):
    rows, labels = labels_of(tiny_world, kind), tmp_path / "labels.json"
    labels.write_text(json.dumps(rows))
    expected = reward_run(tmp_path / "whole", tiny_world, 1, 1, labels)
    same(reward_run(tmp_path / "two", tiny_world, 2, 2, labels), expected, "float64")
    if kind == "score":
        means = [row["train/label_mean"] for row in expected[:-1]]
        assert sum(means) / 5 == pytest.approx(sum(row["score"] for row in rows[:40]) / 40, rel=1e-6)
