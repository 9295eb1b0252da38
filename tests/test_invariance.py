"""The same global batch, however it is divided: processes, micro-batches, rollout batches. The run stays the same.

Sums of floating-point numbers in another order differ in their last digits. So updates in float32 agree to 1e-4
and those in float64 to 1e-9, and every sampled token is the same. One flipped token would part two runs for good.
"""

import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from processes import launch, launch_together
from runs import metrics_of, only, world_arguments
from safetensors.torch import load_file

BATCH, GROUPS, UPDATES = 32, 2, 3
HORIZON = 1000  # of the KL controller in the tales preset
TOLERANCE = {"float32": {"rel": 1e-4, "abs": 1e-6}, "float64": {"rel": 1e-9, "abs": 1e-12}}


@dataclass(frozen=True)
class Recorded:
    """What a run left: a row of metrics and all tokens of each update, and the KL coefficients of each process."""

    metrics: list[dict[str, float]]
    query_responses: list[torch.Tensor]  # (BATCH, sequence_length) for each update
    kl_coefs: list[list[list[float]]]  # of each process, before and after each update
    num_processes: int


def policy_run(
    folder: Path,
    world: Path,
    reward: Path,
    dtype: str,
    nminibatches: int,
    processes: int = 1,
    parts: int = 1,
    kl_target: float = 6.0,
    updates: int = UPDATES,
    **environment: str,
) -> Recorded:
    """A run of the tales preset with small batches. parts: micro-batches of a minibatch, and rollouts of a batch."""
    folder.mkdir()
    local_minibatch = BATCH // nminibatches // processes
    sizes = {
        "total_episodes": BATCH * updates,
        "batch_size": BATCH,
        "whiten_groups": GROUPS,
        "nminibatches": nminibatches,
        "local_micro_batch_size": local_minibatch // parts,
        "local_rollout_batch_size": BATCH // processes // parts,
    }
    arguments = [*world_arguments(world, reward), "--dtype", dtype]
    arguments += ["--rewards.adaptive_kl.target", str(kl_target)]
    arguments += [word for name, value in sizes.items() for word in (f"--ppo.{name}", str(value))]
    script = Path(__file__).parent / "recorded_run.py"
    if processes == 1:
        results = [launch(script, *arguments, folder=folder, **environment)]
    else:
        results = launch_together(processes, script, *arguments, folder=folder, **environment)
    for result in results:
        assert result.status == 0, result.stderr
    run = only(folder, "runs/*")
    tokens = [load_file(folder / f"recorded/{rank}.safetensors") for rank in range(processes)]
    return Recorded(
        metrics_of(run),
        [torch.cat([of_process[update] for of_process in tokens]) for update in sorted(tokens[0])],
        [json.loads((folder / f"recorded/{rank}.json").read_text()) for rank in range(processes)],
        json.loads((run / "meta.json").read_text())["num_processes"],
    )


def check_same(run: Recorded, reference: Recorded, dtype: str) -> None:
    assert len(run.metrics) == len(run.query_responses) == UPDATES
    for tokens, expected in zip(run.query_responses, reference.query_responses, strict=True):
        assert torch.equal(tokens, expected)
    for row, expected_row in zip(run.metrics, reference.metrics, strict=True):
        assert row == pytest.approx(expected_row, **TOLERANCE[dtype])
    assert all(coefficients == run.kl_coefs[0] for coefficients in run.kl_coefs)  # bit for bit
    changes = [after / before - 1 for before, after in run.kl_coefs[0]]
    assert any(0 < abs(change) < 0.19 * BATCH / HORIZON for change in changes)  # not clipped: it depends on the KL
    assert all(row["objective/stopped"] > 0 for row in run.metrics)  # some scores count


@pytest.fixture(scope="module")
def references(tmp_path_factory, tiny_world, tiny_reward):
    """A function (dtype, minibatches) -> a run that is not divided, and its KL target; each is made once."""

    @functools.cache
    def make(dtype: str, nminibatches: int) -> tuple[Recorded, float]:
        folder = tmp_path_factory.mktemp("reference")
        arguments = (tiny_world, tiny_reward, dtype, nminibatches)
        far = policy_run(folder / "far", *arguments, updates=2)
        # A KL that the second update is near to, so that the controller follows it and is not clipped throughout.
        kl_target = 0.9 * far.metrics[1]["objective/kl"]
        return policy_run(folder / "run", *arguments, kl_target=kl_target), kl_target

    return make


@pytest.mark.parametrize(
    ("dtype", "nminibatches", "processes", "parts"),
    [("float64", 2, 1, 4), ("float64", 2, 2, 2), ("float32", 1, 2, 1)],
)
def test_policy(dtype, nminibatches, processes, parts, references, tiny_world, tiny_reward, tmp_path):
    reference, kl_target = references(dtype, nminibatches)
    run = policy_run(tmp_path / "run", tiny_world, tiny_reward, dtype, nminibatches, processes, parts, kl_target)
    assert run.num_processes == processes
    assert len(run.kl_coefs) == processes
    check_same(run, reference, dtype)


def test_noise_that_belongs_to_the_process_is_detected(tiny_world, tiny_reward, tmp_path):
    arguments, mistake = (tiny_world, tiny_reward, "float32", 1), {"NOISE_BELONGS_TO_THE_PROCESS": "1"}
    one, two = (policy_run(tmp_path / str(n), *arguments, processes=n, **mistake) for n in (1, 2))
    assert two.query_responses[0][: BATCH // 2].equal(one.query_responses[0][: BATCH // 2])  # the first process's
    with pytest.raises(AssertionError, match="equal"):
        check_same(two, one, "float32")


def test_a_number_that_differs_is_detected(references):
    reference, _ = references("float64", 2)
    rows = [row | {"objective/entropy": row["objective/entropy"] * (1 + 1e-6)} for row in reference.metrics]
    with pytest.raises(AssertionError, match="approx"):
        check_same(dataclasses.replace(reference, metrics=rows), reference, "float64")


# ---- The reward model ------------------------------------------------------------------------------------------


def reward_run(
    folder: Path, world: Path, dtype: str, processes: int, parts: int, labels: Path | None = None
) -> list[dict[str, float]]:
    """Eight steps of 8 labels, normalised before and after; the last row is about the held-out labels."""
    folder.mkdir()
    sizes = {"num_train": 64, "batch_size": 8, "rollout_batch_size": 32, "normalize_samples": 32}
    sizes |= {"local_micro_batch_size": 8 // processes // parts, "local_rollout_batch_size": 32 // processes // parts}
    arguments = [*world_arguments(world), "--dtype", dtype]
    arguments += ["--label_dataset", str(labels or world / "labels/sentiment/offline_5k.json")]
    arguments += [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    if processes == 1:
        results = [launch("train_reward.py", *arguments, folder=folder)]
    else:
        results = launch_together(processes, "train_reward.py", *arguments, folder=folder)
    for result in results:
        assert result.status == 0, result.stderr
    meta = json.loads((only(folder, "runs/*") / "meta.json").read_text())
    assert meta["num_processes"] == processes
    held_out = {name: value for name, value in meta["results"].items() if name.startswith("test_")}
    return [*metrics_of(only(folder, "runs/*")), held_out]


def test_reward_model(tiny_world, tmp_path):
    expected = reward_run(tmp_path / "whole", tiny_world, "float64", processes=1, parts=1)
    for processes, parts in ((1, 4), (2, 2)):
        rows = reward_run(tmp_path / str(processes), tiny_world, "float64", processes, parts)
        assert len(rows) == 9
        for row, expected_row in zip(rows, expected, strict=True):
            assert row == pytest.approx(expected_row, **TOLERANCE["float64"])


def test_statistics_of_ratings_are_those_of_the_whole_batch(tiny_world, tmp_path):
    labels = json.loads((tiny_world / "labels/sentiment/offline_5k.json").read_text())
    rows = [{"query": row["query"], "sample": row["sample0"], "score": row["best"] - 1.5} for row in labels]
    file = tmp_path / "ratings.json"
    file.write_text(json.dumps(rows))
    one = reward_run(tmp_path / "one", tiny_world, "float64", processes=1, parts=1, labels=file)
    two = reward_run(tmp_path / "two", tiny_world, "float64", processes=2, parts=2, labels=file)
    assert {"train/label_mean", "train/label_var", "train/corr"} <= set(one[0])
    for row, expected in zip(two, one, strict=True):
        assert row == pytest.approx(expected, **TOLERANCE["float64"])
    means = [row["train/label_mean"] for row in one[:-1]]  # eight steps of 8 labels: all 64
    assert sum(means) / 8 == pytest.approx(sum(row["score"] for row in rows[:64]) / 64, rel=1e-6)
