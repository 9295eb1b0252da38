"""One learner and many sampling GPUs, simulated: what staleness buys, and when.

    python benchmark/experiments/asynchrony.py                         # writes asynchrony.md's tables and picture
    python benchmark/experiments/asynchrony.py --runs runs/<run> ...   # compares it with runs of rlvr_async.py

The batch of update t is sampled with the weights of version max(t - K, 0), those after as many updates; K is the
staleness. A batch is cut into pieces of equally many rows. A sampling GPU that is free takes the next piece in order,
waits until the version for it is published, loads this unless it holds it, and generates the piece. All rows of a
piece begin together, each leaves when its response ends, and the GPU is free when the longest has ended. The learner
takes batch after batch, each when all its pieces are there: it trains, sends the new weights, and goes on. Nothing is
dropped: who is ahead waits.

How long things take is as in scaling.py, H100s by their data sheet, the sampling ones compiled:

    piece     contexts of its rows + step * longest response + token * tokens of all its responses
    learn     the pass of the reference, one for the log-probs of the learner's weights, training, communication
    publish   2 bytes for each parameter over the network of one GPU; load, on a sampling GPU, as much

The length of a response is log-normal, cut at what a response may have. All simulations sample the same lengths.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import simpy
import tyro
from matplotlib.figure import Figure

from benchmark.cost.scaling import NODES, PREDICTED, SHAPES, Machine, Work, parameters, part_seconds
from benchmark.curves.compare import markdown
from ppo_rlhf.lib import run
from ppo_rlhf.lib.errors import InputError, exit_with

PAGE = Path(__file__).with_name("asynchrony.md")
FIGURE = Path(__file__).parents[2] / "static" / "asynchrony.png"
START, END = "<!-- written by asynchrony.py -->", "<!-- end -->"
GPU: Machine = PREDICTED["one GPU, compiled"][0]
QUERY, LONGEST, BATCH = 128, 1024, 960  # tokens of a prompt, tokens of a response at most, responses of an update
MEDIAN, SIGMA = 300, 0.7  # of a response's tokens; standard deviation of their logarithm
PIECES = (80, 64, 48, 32, 24, 16)  # rows; 80 of full length need 48 GB of cache in addition to 14 GB of weights
STALENESS = (0, 1, 2, 4, 8)
SAMPLERS = (1, 2, 4, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64)
LEARNERS = (4, 6, 8, 12, 16, 24, 32, 48)  # fewer have no room for weights and moments
SPLITS = ((8, SIGMA), (16, SIGMA), (32, SIGMA), (64, SIGMA), (128, SIGMA), (32, 0.0), (32, 1.2))  # GPUs, sigma
UPDATES, WARM_UP = 60, 20  # simulated; those of them that do not count


@dataclass(frozen=True)
class Args:
    runs: tuple[Path, ...] = ()
    """folders of runs to compare with, the first with staleness 0 and one worker; none: write the page"""


# ---- How long things take --------------------------------------------------------------------------------------


def draw_lengths(sigma: float, seed: int = 0) -> np.ndarray:
    """Tokens of responses (UPDATES, BATCH)."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEDIAN), sigma, (UPDATES, BATCH))
    return np.clip(drawn.round(), 1, LONGEST)


@cache
def piece_parts(length: int) -> tuple[float, float, float]:
    """Seconds of a sampling GPU for a row's context, for a step, and besides for each row in a step.

    length: tokens of a response on average; that much cache a step reads. A line through two sizes of a piece: with
    less than some 220 rows a step waits for the weights, and every further row adds the same.
    """
    sizes = (1, max(PIECES))
    few, many = (part_seconds(Work("pythia-6.9b", QUERY, length, rows, epochs=1), GPU) for rows in sizes)
    token = (many["tokens"] - few["tokens"]) / (sizes[1] - sizes[0]) / length
    return few["context"], few["tokens"] / length - token, token


def piece_seconds(lengths: np.ndarray, rows: int) -> np.ndarray:
    """Of a sampling GPU for each piece (updates, pieces), from the tokens of responses (updates, batch)."""
    context, step, token = piece_parts(round(lengths.mean()))
    pieces = lengths.reshape(len(lengths), -1, rows)
    return rows * context + step * pieces.max(2) + token * pieces.sum(2)


@cache
def learn_seconds(gpus: int, length: int) -> float:
    """Of an update whose responses have so many tokens on average, sharded over these GPUs, eight in a node."""
    work = Work("pythia-6.9b", QUERY, length, BATCH, epochs=1, processes=gpus, sharded=True)
    parts = part_seconds(work, GPU if gpus <= 8 else replace(GPU, interconnect=NODES.interconnect))
    return 2 * parts["log-probs"] + parts["training"] + parts["communication"]


@cache
def publish_seconds() -> float:
    return 2 * parameters(SHAPES["pythia-6.9b"]()) / NODES.interconnect


# ---- The simulation --------------------------------------------------------------------------------------------


def simulate(
    pieces: np.ndarray, learn: np.ndarray | float, samplers: int, staleness: int, publish: float = 0, load: float = 0
) -> tuple[np.ndarray, np.ndarray]:
    """When each update ends (updates,), in seconds, and how late each piece is (updates, pieces).

    pieces: seconds of a sampling GPU for each piece of each batch; learn: of the learner for each update, or for any;
    publish, load: seconds, as above. A piece is late by the versions between the newest weights when it is begun and
    the update that trains on it. The weights that generate it are still older, unless these are the newest.
    """
    world = simpy.Environment()
    generated = [[world.event() for _ in of_batch] for of_batch in pieces]
    published = [world.event() for _ in range(len(pieces) + 1)]  # by version
    learn, ends, late = np.broadcast_to(learn, len(pieces)), np.zeros(len(pieces)), np.zeros(pieces.shape)
    work, newest = iter(np.ndindex(pieces.shape)), 0  # who is free takes the next piece of the one list

    def sampler() -> Iterator[simpy.Event]:
        held = 0
        for t, piece in work:
            version = max(t - staleness, 0)
            yield published[version]
            if held != version:
                yield world.timeout(load)
                held = version
            late[t, piece] = t - newest
            yield world.timeout(pieces[t, piece])
            generated[t][piece].succeed()

    def learner() -> Iterator[simpy.Event]:
        nonlocal newest
        published[0].succeed()
        for t in range(len(pieces)):
            yield world.all_of(generated[t])
            yield world.timeout(learn[t])
            ends[t] = world.now
            yield world.timeout(publish)
            newest = t + 1
            published[newest].succeed()

    world.process(learner())
    for _ in range(samplers):
        world.process(sampler())
    world.run()
    return ends, late


def measure(lengths: np.ndarray, learners: int, samplers: int, staleness: int, send: float) -> tuple[float, float]:
    """Episodes per second and mean lateness, with the fastest of PIECES, of equals the largest.

    send: seconds to publish, and to load. By turns: all GPUs are learners and samplers, staleness 0, nothing to send.
    """
    found, learn = [], learn_seconds(learners, round(lengths.mean()))
    for rows in PIECES:
        ends, late = simulate(piece_seconds(lengths, rows), learn, samplers, staleness, send, send)
        episodes = BATCH * (UPDATES - WARM_UP) / (ends[-1] - ends[WARM_UP - 1])
        found.append((episodes, late[WARM_UP:].mean()))
    return max(found, key=lambda one: round(one[0], 1))


def bound(lengths: np.ndarray, learners: int, samplers: int) -> float:
    """Episodes per second if the learner never waits, or the samplers never wait: the smaller of the two."""
    learn = learn_seconds(learners, round(lengths.mean())) + publish_seconds()
    return BATCH / max(learn, min(piece_seconds(lengths, rows).sum(1).mean() for rows in PIECES) / samplers)


def check_rows(folders: tuple[Path, ...]) -> list[dict[str, str]]:
    """Predicted and measured seconds of an update in runs of rlvr_async.py, of one learning process.

    The first must have staleness 0 and one worker, else InputError. It gives the times: while its learner waits, the
    worker loads and samples, each piece for equally long; what is neither that nor publishing is learning. The first
    updates, in which workers start and the queue fills, do not count.
    """
    runs = [(run.read_meta(folder), pd.read_csv(folder / "metrics.csv")) for folder in folders]
    settings, metrics = [(meta["args"].get("staleness"), meta["args"].get("workers")) for meta, _ in runs], runs[0][1]
    if settings[0] != (0, 1) or (None, None) in settings:
        raise InputError("--runs must be of rlvr_async.py, and the first of them of --staleness 0 --workers 1")
    waiting, publish = metrics["time/waiting"].to_numpy()[1:], metrics["time/weight_sync"].to_numpy()[1:]
    learn, rows = np.diff(metrics["time"]) - waiting - publish, []
    for (meta, metrics), (staleness, workers) in zip(runs, settings, strict=True):
        count = math.ceil(meta["sizes"]["round"] / meta["sizes"]["local_rollout_batch"])
        pieces = np.repeat(waiting[:, None] / count, count, axis=1)
        ends, _ = simulate(pieces, learn, workers, staleness, publish=publish.mean())
        predicted, seen = (np.diff(times)[staleness + 1 :].mean() for times in (ends, metrics["time"]))
        row = {"K": staleness, "workers": workers, "pieces": count, "predicted, s": f"{predicted:.3g}"}
        row |= {"measured, s": f"{seen:.3g}", "predicted / measured": f"{predicted / seen:.2f}"}
        rows.append({name: str(value) for name, value in row.items()})
    return rows


# ---- The page --------------------------------------------------------------------------------------------------


def row_of(samplers: int) -> dict[str, float]:
    """Episodes per second of each way to use these GPUs and 8 that learn; for each staleness how late pieces are."""
    lengths = draw_lengths(SIGMA)
    row = {"by turns": measure(lengths, 8 + samplers, 8 + samplers, 0, send=0.0)[0]}
    for k in STALENESS:
        row[f"K = {k}"], row[f"late, K = {k}"] = measure(lengths, 8, samplers, k, publish_seconds())
    return row | {"bound": bound(lengths, 8, samplers)}


def split_row(gpus: int, sigma: float) -> dict[str, str]:
    """Of so many GPUs in all: by turns, and apart with the number of learning GPUs that is fastest."""
    lengths = draw_lengths(sigma)
    row = {"GPUs": str(gpus), "sigma": str(sigma), "mean length": f"{lengths.mean():.0f}"}
    row["by turns"] = f"{measure(lengths, gpus, gpus, 0, send=0.0)[0]:.0f}"
    for k in (1, 2, 4):
        splits = ((measure(lengths, n, gpus - n, k, publish_seconds())[0], n) for n in LEARNERS if n < gpus)
        row[f"K = {k}"] = "{:.0f} ({})".format(*max(splits))
    return row


def draw(table: pd.DataFrame, path: Path) -> None:
    """Throughput and lateness over the number of sampling GPUs, the table's index."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(table["bound"], color="#0072b2", linewidth=9, alpha=0.3, label="bound")
    labels = {"": "episodes per second", "late, ": "versions behind, the newest weights"}
    for axes, (kind, label) in zip((left, right), labels.items(), strict=True):
        for i, k in enumerate(STALENESS):  # light and wide below dark and narrow
            axes.plot(table[f"{kind}K = {k}"], color=str(0.8 - i / 5), linewidth=5 - i, label=f"K = {k}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks := [2**i for i in range(7)], [str(tick) for tick in ticks])
        axes.set(xlabel="sampling GPUs, beside 8 that learn", ylabel=label)
        axes.grid(alpha=0.3)
    left.plot(table["by turns"], color="#d55e00", linestyle="--", linewidth=2, label="by turns, on all GPUs")
    left.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


def write_page() -> None:
    table = pd.DataFrame([row_of(samplers) for samplers in SAMPLERS], index=SAMPLERS)
    speeds = table.filter(regex="^(?!late)").map("{:.3g}".format).reset_index(names="sampling GPUs").astype(str)
    splits = [split_row(*of) for of in SPLITS]
    before, _, after = PAGE.read_text().partition(START)
    written = f"{markdown(speeds.to_dict('records'))}\n{markdown(splits)}"
    PAGE.write_text(f"{before}{START}\n{written}{END}{after.partition(END)[2]}")
    draw(table, FIGURE)
    print(f"written: {PAGE}, {FIGURE}")


if __name__ == "__main__":
    try:
        runs = tyro.cli(Args, description=__doc__).runs
        print(markdown(check_rows(runs))) if runs else write_page()
    except (InputError, OSError) as error:
        exit_with(str(error))
