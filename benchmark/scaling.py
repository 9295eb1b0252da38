"""What an update of train_policy.py costs on other machines and with other models: a model of its time, checked.

    python benchmark/scaling.py                # writes the tables of scaling.md, from benchmark/results/speed
    python benchmark/scaling.py bandwidth      # measures this machine's memory

The parts of an update, for a process that has b of the batch's episodes. F are the FLOPs that speed.py counts, P the
model's parameters, l its layers, R the rate of matrix products, e the share of R that products of the model's shapes
reach, W the memory's bandwidth, B the interconnect's, N the processes:

    pass          F / (e R) + bytes of the elementwise kernels / W
    generation    a pass over the context, then for each token the larger of F / (e R) and bytes of the weights / W,
                  and bytes of the cache / W + l * overhead; in bfloat16 one more pass, for the log-probs
    scoring       a pass of the reference, a pass of the reward model
    training      for each epoch a pass forward and backward, and an optimiser step of 40 P bytes / W
    communication for each epoch an all-reduce of 2 (N - 1) / N * 4 P bytes / B; with FSDP2 the weights gathered twice
                  and the gradients scattered, 3 (N - 1) / N, and the weights gathered once for the rollout

Elementwise kernels read and write 30 numbers of 4 bytes per token, layer and unit of width in a forward pass (two
layer norms 4, two residuals 6, GELU 8, copies of queries, keys and values 6, attention 4, its result 2), twice that
in a backward pass; and 6 per logit in a forward, 10 in a backward pass, 16 to sample, which is done in float64.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import speed
import torch
import tyro
from compare import markdown
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, PretrainedConfig

RESULTS = Path(__file__).with_name("results") / "speed"
PAGE = Path(__file__).with_name("scaling.md")
START, END = "<!-- written by scaling.py -->", "<!-- end -->"
MEMORY, OVERHEAD = 34e9, 1e-3  # of the machine of the results: measured with `bandwidth`; fitted to the small model
SHAPES: dict[str, Callable[[], PretrainedConfig]] = speed.SHAPES | {
    "gpt2-xl": lambda: GPT2Config(n_embd=1600, n_layer=48, n_head=25, **speed.ENDS),
    "pythia-6.9b": lambda: GPTNeoXConfig(
        **speed.PYTHIA | {"vocab_size": 50432},
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        intermediate_size=16384,
    ),
}


@dataclass(frozen=True)
class Args:
    what: tyro.conf.Positional[Literal["tables", "bandwidth"]] = "tables"
    """write the tables of scaling.md, or measure the bandwidth of this machine's memory"""


@dataclass(frozen=True)
class Machine:
    """One process's device, and its share of the interconnect."""

    matmul: float
    """rate of square matrix products, FLOP/s"""
    memory: float
    """bandwidth of its memory, bytes/s"""
    overhead: float
    """seconds that a layer takes in a generation step beside arithmetic and memory: launches, Python"""
    interconnect: float = float("inf")
    """bytes/s that a process sends and receives in an all-reduce"""
    efficiency: float = 0.85
    """share of `matmul` that the products of the model reach"""
    bytes_per_number: int = 4
    """of the cache, and of weights in a matrix product"""


@dataclass(frozen=True)
class Work:
    """The model and the sizes of an update."""

    base_model: str
    query_length: int
    response_length: int
    batch_size: int
    epochs: int = 4
    processes: int = 1
    sharded: bool = False


def parameters(config: PretrainedConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


def update_seconds(work: Work, machine: Machine) -> dict[str, float]:
    """Seconds of each part of an update."""
    config = SHAPES[work.base_model]()
    numbers, width, layers = parameters(config), config.hidden_size, config.num_hidden_layers
    flops = speed.flops_per_episode(config, work.query_length, work.response_length, work.epochs)
    episodes, length = work.batch_size / work.processes, work.query_length + work.response_length
    rate, memory, size = machine.efficiency * machine.matmul, machine.memory, machine.bytes_per_number
    logit_flops = 2 * width * config.vocab_size * episodes  # of one token of every response
    trunk_flops = flops["generation"] * episodes - work.response_length * logit_flops
    trunk = episodes * length * layers * width * 30 * 4 / memory
    logits = episodes * work.response_length * config.vocab_size * 4 / memory

    context = (trunk_flops / rate + trunk) * work.query_length / length
    cache = episodes * length * layers * width * 2 * size / memory
    looked_up = 0 if config.tie_word_embeddings else width * config.vocab_size  # of these, a step reads a row each
    step = max((trunk_flops / length + logit_flops) / rate, (numbers - looked_up) * size / memory)
    generation = context + work.response_length * (step + cache + layers * machine.overhead) + 16 * logits
    if size == 2:
        generation += flops["generation"] * episodes / rate + trunk + 6 * logits
    scoring = flops["scoring"] * episodes / rate + 2 * trunk + 6 * logits
    passes = flops["training"] * episodes / rate + work.epochs * (3 * trunk + 16 * logits)
    share = work.processes if work.sharded else 1
    optimiser = work.epochs * 40 * numbers / share / memory
    sent = (3 * work.epochs + 1 if work.sharded else 2 * work.epochs) * (work.processes - 1) / work.processes
    return {
        "generation": generation,
        "scoring": scoring,
        "training": passes + optimiser,
        "communication": sent * 4 * numbers / machine.interconnect,
    }


def process_memory(work: Work) -> float:
    """Bytes of weights, gradients, moments, reference and reward model in one process; activations come on top."""
    numbers = parameters(SHAPES[work.base_model]())
    frozen = 2 * 4 * numbers
    if work.sharded:
        return 16 * numbers / work.processes + 4 * numbers + frozen  # whole weights during a rollout
    sent = 8 * numbers if work.processes > 1 else 0  # the gradients in one vector, and its mean
    return 16 * numbers + frozen + sent


# ---- Against what was measured ---------------------------------------------------------------------------------


def measured(results: Path) -> list[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    """Name, arguments and runs of everything of ours that ran as one process."""
    found = []
    for file in sorted(results.glob("*.json")):
        report = json.loads(file.read_text())
        if report["machine"]["device"] != "cpu":
            continue  # MEMORY and OVERHEAD are not its numbers
        for name, runs in report["runs"].items():
            if name.startswith("ours") and runs[0]["processes"] == 1:
                found.append((f"{file.stem}, {name}", report["arguments"], runs))
    return found


def check_rows(results: Path) -> list[dict[str, str]]:
    """Predicted and measured seconds of each phase."""
    rows = []
    for name, arguments, runs in measured(results):
        sizes = {key: arguments[key] for key in ("base_model", "query_length", "response_length", "batch_size")}
        low = "bfloat16" in name or arguments["dtype"] == ["bfloat16"]
        matmul = statistics.median(run["matmul_rate"] for run in runs)
        machine = Machine(matmul, MEMORY, OVERHEAD, bytes_per_number=2 if low else 4)
        predicted = update_seconds(Work(**sizes, epochs=arguments["epochs"]), machine)
        phases = [speed.phase_seconds(run) for run in runs]
        seen = {phase: statistics.median(seconds[phase] for seconds in phases) for phase in phases[0]}
        predicted["all"] = sum(predicted.values())
        seen["all"] = statistics.median(run["seconds_per_update"] for run in runs)
        row = {"": name}
        for phase in ("generation", "scoring", "training", "all"):
            row[f"{phase}, s"] = f"{predicted[phase]:.3g} / {seen[phase]:.3g}"
        rows.append(row | {"predicted / measured": f"{predicted['all'] / seen['all']:.2f}"})
    return rows


# ---- Predictions -----------------------------------------------------------------------------------------------

# An H100 (SXM): 989 TFLOP/s of bfloat16 and 3.35 TB/s by its data sheet, of which 70 % and 80 % are assumed; NVLink
# 450 GB/s in each direction, 400 Gbit/s of network for each GPU between nodes, of both 80 %. A layer of the library
# is assumed to take 250 microseconds in a step when Python launches its kernels one by one, 40 when compiled.
H100 = Machine(0.7 * 989e12, 0.8 * 3.35e12, 250e-6, 0.8 * 450e9, bytes_per_number=2)
NODES = replace(H100, interconnect=0.8 * 50e9)
PREDICTED = {
    "one GPU": (H100, 1, False),
    "one GPU, compiled": (replace(H100, overhead=40e-6), 1, False),
    "8 GPUs": (H100, 8, False),
    "8 GPUs, FSDP2": (H100, 8, True),
    "8 nodes, 64 GPUs": (NODES, 64, False),
    "8 nodes, 64 GPUs, FSDP2": (NODES, 64, True),
}


def prediction_rows(base_model: str, batch_size: int) -> list[dict[str, str]]:
    """Updates of episodes of 64 + 24 tokens."""
    rows = []
    for name, (machine, processes, sharded) in PREDICTED.items():
        work = Work(base_model, 64, 24, batch_size, processes=processes, sharded=sharded)
        seconds = update_seconds(work, machine)
        total = sum(seconds.values())
        rows.append(
            {
                base_model: name,
                "GB of a process": f"{process_memory(work) / 1e9:.0f}",
                **{f"{part}, s": f"{value:.3g}" for part, value in seconds.items()},
                "update, s": f"{total:.3g}",
                "episodes/s": f"{batch_size / total:,.0f}",
            }
        )
    return rows


# ---- The page --------------------------------------------------------------------------------------------------


def tables() -> str:
    """Everything between the marks of scaling.md."""
    parts = ["Predicted / measured seconds of an update:", markdown(check_rows(RESULTS))]
    for base_model, batch_size in (("gpt2", 512), ("gpt2-xl", 512), ("pythia-6.9b", 512)):
        parts += [f"{base_model}, {batch_size} episodes of 64 + 24 tokens, predicted:"]
        parts += [markdown(prediction_rows(base_model, batch_size))]
    return "\n\n".join(part.strip() for part in parts)


def write_page() -> None:
    before, _, after = PAGE.read_text().partition(START)
    _, _, after = after.partition(END)
    PAGE.write_text(f"{before}{START}\n{tables()}\n{END}{after}")


def bandwidth() -> float:
    """Bytes/s that this machine reads and writes while it copies 256 MB."""
    source, target, seconds = torch.ones(2**26), torch.empty(2**26), []
    for _ in range(25):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return 2 * source.numel() * source.itemsize / statistics.median(seconds[5:])


def main(args: Args) -> None:
    if args.what == "bandwidth":
        print(f"{bandwidth() / 1e9:.3g} GB/s")
    else:
        write_page()
        print(f"written: {PAGE}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
