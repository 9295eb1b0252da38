"""What an update of train_policy.py costs on other machines and with other models: a model of its time, checked.

    python benchmark/cost/scaling.py             # writes the tables of scaling.md, from benchmark/results/speed
    python benchmark/cost/scaling.py bandwidth   # measures this machine's memory

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

And what a process of chapter 2's PPO holds, its networks sharded (FSDP2). P are the parameters of policy and critic
together, s the bytes of a number in a matrix product, f those of a frozen weight; a layer has p parameters, and p0
lie around the layers of both networks. A pass reads t tokens, r of them of responses; there are v ids. Throughout:

    weights, gradients, moments          4 P / N, 4 P / N, 8 P / N
    frozen models                        f P / N

and besides, at four moments, of which the one with most counts:

    generation                copy that samples   s * parameters of the policy
                              cache               s * 2 * t * layers * width
                              logits              24 r v / response_length, of one token each, in float64 too
    scores and log-probs      copy that samples   as above
                              gathered            4 (p0 + 3 p): what is around the layers; one, and two on their way
                              activations         s * 12 t * width
                              logits              12 r v: themselves, log-probs, and one of both for the entropy
    a backward pass begins    gathered            4 (p0 + 4 p): also a layer's gradients
                              activations         s * 17 t * width for each layer of both networks; with
                                                  checkpointing, 4 t * width for each, and 17 for one
                              logits              12 r v
    a backward pass ends      gathered            12 p0: weights, gradients, and these in one vector

17 numbers for each unit of width: two layer norms 2, queries, keys and values 5 (rotary positions copy two),
attention 2, the middle of the feed-forward part 8. Where matrix products are in bfloat16, their weights are kept in
it too, 2 for each parameter, unless there is checkpointing.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from transformers import AutoModel, AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, PretrainedConfig

from benchmark.cost import memory, speed
from benchmark.curves.compare import markdown
from ppo_rlhf.lib import models
from ppo_rlhf.lib.memory import MOST_LOGITS

RESULTS = speed.ROOT / "benchmark/results/speed"
PAGE = Path(__file__).with_name("scaling.md")
START, END = "<!-- written by scaling.py -->", "<!-- end -->"
MEMORY_START, MEMORY_END = "<!-- memory, written by scaling.py -->", "<!-- end of memory -->"
MEMORY, OVERHEAD = 25.7e9, 7.5e-4  # of the machine of the results: measured; fitted to the small model
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
    """seconds that a layer takes in a generation step in addition to arithmetic and memory: launches, Python"""
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
    parts = part_seconds(work, machine)
    generation = sum(parts.pop(name) for name in ("context", "tokens", "log-probs"))
    return {"generation": generation} | parts


def part_seconds(work: Work, machine: Machine) -> dict[str, float]:
    """The same, but generation in three: context, tokens of the response, and in bfloat16 the pass for log-probs."""
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
    tokens = work.response_length * (step + cache + layers * machine.overhead) + 16 * logits
    one_more_pass = flops["generation"] * episodes / rate + trunk + 6 * logits
    scoring = flops["scoring"] * episodes / rate + 2 * trunk + 6 * logits
    passes = flops["training"] * episodes / rate + work.epochs * (3 * trunk + 16 * logits)
    share = work.processes if work.sharded else 1
    optimiser = work.epochs * 40 * numbers / share / memory
    sent = (3 * work.epochs + 1 if work.sharded else 2 * work.epochs) * (work.processes - 1) / work.processes
    return {
        "context": context,
        "tokens": tokens,
        "log-probs": one_more_pass if size == 2 else 0,
        "scoring": scoring,
        "training": passes + optimiser,
        "communication": sent * 4 * numbers / machine.interconnect,
    }


def process_memory(work: Work) -> float:
    """Bytes of weights, gradients, moments, reference and reward model in one process of chapter 1, or sharded.

    Activations come on top.
    """
    numbers = parameters(SHAPES[work.base_model]())
    if work.sharded:
        return 24 * numbers / work.processes + 2 * numbers  # with the copy that samples, in bfloat16
    sent = 8 * numbers if work.processes > 1 else 0  # the gradients in one vector, and its mean
    return 24 * numbers + sent


# ---- What a process of chapter 2 holds -------------------------------------------------------------------------


@dataclass(frozen=True)
class Knobs:
    """The settings besides the model on which the memory of chapter 2's PPO depends."""

    processes: int
    sequence_length: int
    """tokens of query and response"""
    response_length: int
    rows: int
    """episodes of a process that are generated and scored at a time"""
    micro_batch: int
    checkpointing: bool = True
    frozen_bytes: int = 2
    """of a weight of reference and reward model"""
    product_bytes: int = 2
    """of a number in a matrix product"""


def memory_of(config: PretrainedConfig, knobs: Knobs) -> dict[str, dict[str, float]]:
    """Bytes of each kind at four moments of an update: two of the rollout, two of the training."""
    with torch.device("meta"):
        policy, critic = AutoModelForCausalLM.from_config(config), AutoModel.from_config(config)
    of_policy, of_critic = (sum(p.numel() for p in network.parameters()) for network in (policy, critic))
    width, layers, size = config.hidden_size, config.num_hidden_layers, knobs.product_bytes
    layer = sum(p.numel() for p in models.layers(critic)[0].parameters())
    both = of_policy + of_critic
    outer = both - 2 * layers * layer
    slices = both / knobs.processes
    always = {"weights": 4 * slices, "gradients": 4 * slices, "moments": 8 * slices}
    always |= {"frozen models": knobs.frozen_bytes * slices}
    copy = {"copy that samples": size * of_policy}

    def logits(rows: int) -> float:
        return 12 * min(rows * knobs.response_length * config.vocab_size, MOST_LOGITS)

    tokens, micro_tokens = knobs.rows * knobs.sequence_length, knobs.micro_batch * knobs.sequence_length
    of_layer = size * 17 * micro_tokens * width
    if knobs.checkpointing:
        kept = 2 * layers * 4 * micro_tokens * width + of_layer
    else:
        kept = 2 * layers * (of_layer + (2 * layer if size == 2 else 0))
    return {
        "generation": always
        | copy
        | {"cache": size * 2 * tokens * layers * width, "logits": 24 * knobs.rows * config.vocab_size},
        "scores and log-probs": always
        | copy
        | {
            "gathered": 4 * (outer + 3 * layer),
            "activations": size * 12 * tokens * width,
            "logits": logits(knobs.rows),
        },
        "a backward pass begins": always
        | {"gathered": 4 * (outer + 4 * layer), "activations": kept, "logits": logits(knobs.micro_batch)},
        "a backward pass ends": always | {"gathered": 12 * outer},
    }


def most(config: PretrainedConfig, knobs: Knobs) -> dict[str, float]:
    """Bytes at most, in the rollout and in the training."""
    totals = [sum(kinds.values()) for kinds in memory_of(config, knobs).values()]
    return {"rollout": max(totals[:2]), "training": max(totals[2:])}


# ---- Against what was measured ---------------------------------------------------------------------------------


def measured(results: Path) -> list[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    """Name, arguments and runs of everything of ours that ran as one process, in chapter 1, on rows of one length."""
    found = []
    for file in sorted(results.glob("*.json")):
        report = json.loads(file.read_text())
        if report["machine"]["device"] != "cpu":
            continue  # MEMORY and OVERHEAD are not its numbers
        if report["arguments"].get("chapter") == 3 or report["arguments"].get("shortest_query"):
            continue  # the formula is of chapter 1, with rows of one length
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


def memory_check_rows(report: Path) -> list[dict[str, str]]:
    """Predicted and measured megabytes of a process, at most, in the rollout and in the training."""
    rows = []
    for run in json.loads(report.read_text())["runs"]:
        knobs = Knobs(
            processes=run["processes"],
            sequence_length=run["sequence_length"],
            response_length=run["response_length"],
            rows=run["rows"],
            micro_batch=run["micro_batch"],
            checkpointing="checkpointing" in run["setting"],
            frozen_bytes=2 if "bfloat16" in run["setting"] else 4,
            product_bytes=4,
        )
        predicted = most(memory.SHAPES[run["base_model"]](), knobs)
        row = {"": f"{run['base_model']}, {run['processes']} processes, {run['setting']}"}
        for phase, size in predicted.items():
            row[f"{phase}, MB"] = f"{size / 1e6:.0f} / {run[phase] / 1e6:.0f}"
        rows.append(row | {f"{phase}, ratio": f"{size / run[phase]:.2f}" for phase, size in predicted.items()})
    return rows


def memory_rows() -> list[dict[str, str]]:
    """Gigabytes of a process of chapter2.sh 6.9b at each moment, each kind a row."""
    moments = memory_of(SHAPES["pythia-6.9b"](), PAPER)
    kinds = list(dict.fromkeys(kind for found in moments.values() for kind in found))
    rows = [{"GB": kind} | {m: f"{found.get(kind, 0) / 1e9:.1f}" for m, found in moments.items()} for kind in kinds]
    return [*rows, {"GB": "all"} | {m: f"{sum(found.values()) / 1e9:.1f}" for m, found in moments.items()}]


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
                "GB of a process": f"{process_memory(work) / 1e9:.1f}",
                **{f"{part}, s": f"{value:.3g}" for part, value in seconds.items()},
                "update, s": f"{total:.3g}",
                "episodes/s": f"{batch_size / total:,.0f}",
            }
        )
    return rows


# PPO of benchmark/curves/chapter2.sh 6.9b: 512 posts of at most 512 tokens and summaries of 53, on eight GPUs.
PAPER = Knobs(processes=8, sequence_length=565, response_length=53, rows=16, micro_batch=4)


# ---- The page --------------------------------------------------------------------------------------------------


def tables() -> str:
    """Everything between the marks of scaling.md."""
    parts = ["Predicted / measured seconds of an update:", markdown(check_rows(RESULTS))]
    for base_model, batch_size in (("gpt2", 512), ("gpt2-xl", 512), ("pythia-6.9b", 512)):
        parts += [f"{base_model}, {batch_size} episodes of 64 + 24 tokens, predicted:"]
        parts += [markdown(prediction_rows(base_model, batch_size))]
    return "\n\n".join(part.strip() for part in parts)


def memory_tables() -> str:
    """Everything between the marks of memory in scaling.md."""
    parts = ["Predicted / measured megabytes of a process, at most:", markdown(memory_check_rows(memory.RESULT))]
    parts += ["`chapter2.sh 6.9b`, a process of eight, predicted:", markdown(memory_rows())]
    return "\n\n".join(part.strip() for part in parts)


def write_page() -> None:
    page = PAGE.read_text()
    for start, content, end in ((START, tables(), END), (MEMORY_START, memory_tables(), MEMORY_END)):
        before, _, after = page.partition(start)
        page = f"{before}{start}\n{content}\n{end}{after.partition(end)[2]}"
    PAGE.write_text(page)


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
