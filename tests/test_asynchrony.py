"""benchmark/experiments/asynchrony.py against numbers by hand, a slow second version, and its page."""

import heapq
import json
import math
import statistics

import numpy as np
import pandas as pd
import pytest

from benchmark.cost.scaling import SHAPES, Machine, Work, part_seconds, update_seconds
from benchmark.cost.speed import flops_per_episode
from benchmark.experiments import asynchrony
from benchmark.experiments.asynchrony import simulate
from ppo_rlhf.lib.errors import InputError


def constant(updates: int, *pieces: float) -> np.ndarray:
    return np.tile(np.array(pieces), (updates, 1))


def test_taking_turns_is_the_sum_of_the_times():
    """Sampling 3, learning 2, publishing 1, loading 0.5; nobody loads the first weights."""
    ends, late = simulate(constant(3, 3.0), 2.0, samplers=1, staleness=0, publish=1.0, load=0.5)
    assert ends.tolist() == [5, 11.5, 18] and (late == 0).all()


@pytest.mark.parametrize(("learn", "expected"), [(2.0, [5, 8, 11, 14]), (4.0, [7, 11, 15, 19])])
@pytest.mark.parametrize("staleness", [1, 2, 8])
def test_side_by_side_the_slower_one_counts(learn, expected, staleness):
    ends, _ = simulate(constant(4, 3.0), learn, samplers=1, staleness=staleness)
    assert ends.tolist() == expected


def test_sending_weights_takes_time_on_both_sides():
    """From the second update on max(0.5 + 3, 2 + 1) = 3.5, or with learning 3 max(3.5, 4)."""
    for learn, period in ((2.0, 3.5), (3.0, 4.0)):
        ends, _ = simulate(constant(9, 3.0), learn, samplers=1, staleness=1, publish=1.0, load=0.5)
        assert np.diff(ends)[2:].tolist() == [period] * 6


def test_a_longer_queue_evens_out_what_varies():
    """Sampling 1, 5, 1, 5, ..., learning 3: two updates take 5 + 3 with K = 1, 3 + 3 with K = 2."""
    pieces = np.array([[1.0], [5.0]] * 3)
    assert simulate(pieces, 3.0, samplers=1, staleness=0)[0].tolist() == [4, 12, 16, 24, 28, 36]
    assert simulate(pieces, 3.0, samplers=1, staleness=1)[0].tolist() == [4, 9, 12, 17, 20, 25]
    assert simulate(pieces, 3.0, samplers=1, staleness=2)[0].tolist() == [4, 9, 12, 15, 18, 21]


def test_who_is_free_takes_the_next_piece():
    """Two GPUs, pieces of 3, 5 and 1: the first takes the third, and the batch is there after 5."""
    assert simulate(constant(2, 3.0, 5.0, 1.0), 2.0, samplers=2, staleness=0)[0].tolist() == [7, 14]
    assert simulate(constant(2, 3.0, 5.0, 1.0), 2.0, samplers=1, staleness=0)[0].tolist() == [11, 22]
    # Pieces of 4 and 1, learning 1: while one GPU has the 4, the other begins with the next batch, if K lets it.
    assert simulate(constant(4, 4.0, 1.0), 1.0, samplers=2, staleness=0)[0].tolist() == [5, 10, 15, 20]
    assert simulate(constant(4, 4.0, 1.0), 1.0, samplers=2, staleness=1)[0].tolist() == [5, 6, 10, 11]


def test_lateness_by_hand():
    """Sampling 3, learning 2, K = 3: batches begin at 0, 3, 6, ..., versions 1, 2, 3 are there at 5, 8, 11."""
    assert simulate(constant(5, 3.0), 2.0, samplers=1, staleness=3)[1][:, 0].tolist() == [0, 1, 1, 1, 1]
    # Learning 4, K = 3: the queue fills up, until the newest weights are those that K asks for.
    late = simulate(constant(20, 3.0), 4.0, samplers=1, staleness=3)[1][:, 0]
    assert late[-5:].tolist() == [3] * 5 and late.max() == 3 and (np.diff(late) >= 0).all()


def slow_version(
    pieces: np.ndarray, learn: np.ndarray, samplers: int, staleness: int, publish: float, load: float
) -> list[float]:
    """When each update ends, batch after batch, without events."""
    free, published, ends = [(0.0, gpu, 0) for gpu in range(samplers)], [0.0], []  # since when, who, which version
    for t, of_batch in enumerate(pieces):
        version, there = max(t - staleness, 0), []
        for seconds in of_batch:
            since, gpu, held = heapq.heappop(free)
            there.append(max(since, published[version]) + load * (held != version) + seconds)
            heapq.heappush(free, (there[-1], gpu, version))
        ends.append(max([*there, published[t]]) + learn[t])
        published.append(ends[-1] + publish)
    return ends


@pytest.mark.parametrize("staleness", asynchrony.STALENESS)
@pytest.mark.parametrize("samplers", [1, 2, 3, 7])
def test_events_find_what_the_slow_version_finds(samplers, staleness):
    random = np.random.default_rng(samplers)
    pieces, learn = random.lognormal(0, 1, (30, 4)), random.lognormal(1.5, 0.5, 30) / samplers
    arguments = (pieces, learn, samplers, staleness, 0.3, 0.2)
    ends, late = simulate(*arguments)
    assert ends == pytest.approx(slow_version(*arguments), rel=1e-12)
    assert (late <= np.minimum(np.arange(30), staleness)[:, None]).all() and (late >= 0).all()


def test_lengths():
    """The same under a seed; as many are cut as the normal distribution says."""
    lengths = asynchrony.draw_lengths(0.7, seed=3)
    assert (lengths == asynchrony.draw_lengths(0.7, seed=3)).all()
    assert (lengths != asynchrony.draw_lengths(0.7, seed=4)).mean() > 0.9
    assert np.median(lengths) == pytest.approx(300, rel=0.02)
    cut = 1 - statistics.NormalDist().cdf(math.log(1024 / 300) / 0.7)
    assert lengths.max() == 1024 and (lengths == 1024).mean() == pytest.approx(cut, abs=0.003)
    assert set(asynchrony.draw_lengths(0.0).flat) == {300}


def test_a_piece_takes_its_contexts_its_longest_row_and_all_tokens(monkeypatch):
    monkeypatch.setattr(asynchrony, "piece_parts", lambda length: (1.0, 10.0, 0.1))
    seconds = asynchrony.piece_seconds(np.array([[2.0, 4.0, 1.0, 3.0]]), rows=2)
    assert seconds == pytest.approx(np.array([[2 + 40 + 0.6, 2 + 30 + 0.4]]))


@pytest.mark.parametrize("rows", asynchrony.PIECES)
def test_a_piece_of_equal_lengths_takes_what_scaling_says(rows):
    parts = part_seconds(Work("pythia-6.9b", 128, 300, rows, epochs=1), asynchrony.GPU)
    (seconds,) = asynchrony.piece_seconds(np.full((1, rows), 300.0), rows)[0]
    assert seconds == pytest.approx(parts["context"] + parts["tokens"])


@pytest.mark.parametrize("size", [2, 4])
def test_generation_ends_with_one_more_pass_in_bfloat16_alone(size):
    work, machine = Work("gpt2", 64, 24, 512), Machine(1e12, float("inf"), 0.0, efficiency=1.0, bytes_per_number=size)
    one_pass = 512 * flops_per_episode(SHAPES["gpt2"](), 64, 24, 4)["generation"] / 1e12
    parts = part_seconds(work, machine)
    assert parts["log-probs"] == pytest.approx(one_pass if size == 2 else 0)
    assert parts["context"] + parts["tokens"] == pytest.approx(one_pass)
    assert update_seconds(work, machine)["generation"] == pytest.approx(2 * one_pass if size == 2 else one_pass)


@pytest.mark.parametrize(("gpus", "link"), [(8, 1e9), (16, asynchrony.NODES.interconnect)])
def test_learning_by_hand(monkeypatch, gpus, link):
    """Two passes that read, one forward and backward; four times all parameters on their way."""
    arithmetic = Machine(1e12, float("inf"), 0.0, interconnect=1e9, efficiency=1.0, bytes_per_number=2)
    monkeypatch.setattr(asynchrony, "GPU", arithmetic)
    flops = flops_per_episode(SHAPES["pythia-6.9b"](), 128, 300, epochs=1)
    reading, training = 960 * 2 * flops["generation"] / gpus, 960 * flops["training"] / gpus
    sent = 4 * (gpus - 1) / gpus * 4 * 6_857_302_016
    seconds = asynchrony.learn_seconds.__wrapped__(gpus, 300)
    assert seconds == pytest.approx((reading + training) / 1e12 + sent / link)
    assert asynchrony.publish_seconds() == pytest.approx(2 * 6_857_302_016 / 40e9)


# ---- Against runs ----------------------------------------------------------------------------------------------


def write_run(folder, staleness: int, workers: int, seconds: float, waiting: float) -> None:
    """Twelve updates of a run with two pieces in a batch; the first takes much longer."""
    folder.mkdir()
    meta = {"args": {"staleness": staleness, "workers": workers}, "sizes": {"round": 256, "local_rollout_batch": 128}}
    (folder / "meta.json").write_text(json.dumps(meta))
    time = 100 + seconds * np.arange(12)
    pd.DataFrame({"time": time, "time/waiting": waiting, "time/weight_sync": 1.0}).to_csv(folder / "metrics.csv")


def test_runs_are_predicted_from_the_first(tmp_path):
    """Waiting 4, so 2 for each of two pieces; publishing 1, learning 5.

    Two workers: 2 in place of 4. K = 1: 6 for learning and publishing, which is more than 4.
    """
    settings = {"a": (0, 1, 10.0, 4.0), "b": (0, 2, 8.0, 2.0), "c": (1, 1, 12.0, 0.0), "d": (1, 2, 6.0, 0.0)}
    for name, values in settings.items():
        write_run(tmp_path / name, *values)
    rows = asynchrony.check_rows(tuple(tmp_path / name for name in settings))
    assert [row["predicted, s"] for row in rows] == ["10", "8", "6", "6"]
    assert [row["measured, s"] for row in rows] == ["10", "8", "12", "6"]
    assert [row["predicted / measured"] for row in rows] == ["1.00", "1.00", "0.50", "1.00"]
    assert [(row["K"], row["workers"], row["pieces"]) for row in rows][1:3] == [("0", "2", "2"), ("1", "1", "2")]
    (tmp_path / "d" / "meta.json").write_text(json.dumps({"args": {}}))  # of a synchronous run
    for wrong in ("ba", "ad"):
        with pytest.raises(InputError, match="first of them of --staleness 0 --workers 1"):
            asynchrony.check_rows(tuple(tmp_path / name for name in wrong))


# ---- The page --------------------------------------------------------------------------------------------------


def test_the_page_holds_what_the_script_writes():
    """One row of its first table. In all, staleness makes no run slower, and none faster than the bound."""
    written = asynchrony.PAGE.read_text().split(asynchrony.START)[1].split(asynchrony.END)[0]
    names, _, *lines = [line.strip("| ").split(" | ") for line in written.strip().split("\n\n")[0].splitlines()]
    rows = {line[0]: dict(zip(names, map(float, line), strict=True)) for line in lines}
    assert list(rows) == [str(samplers) for samplers in asynchrony.SAMPLERS]
    again = asynchrony.row_of(24)
    assert {name: float(f"{again[name]:.3g}") for name in names[1:]} == {name: rows["24"][name] for name in names[1:]}
    for row in rows.values():
        speeds = [row[f"K = {k}"] for k in asynchrony.STALENESS]
        assert speeds == sorted(speeds) and speeds[-1] <= 1.01 * row["bound"]
