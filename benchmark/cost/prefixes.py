"""Chapter 3's training passes with and without shared prefixes, for prompts and responses of many lengths.

    python benchmark/cost/prefixes.py --output prefixes.json
    python benchmark/cost/prefixes.py --memory --output prefixes-memory.json
    python benchmark/cost/prefixes.py --prompts 500 --responses 100 --pairs 5

A pass reads a few groups of responses forward and backward, with a model of Qwen2.5-0.5B's shape that has few layers
and random weights; both ways take turns, in one process. The sum of the hidden states before each response token
takes the place of the loss: the output layer reads the same tokens either way, and is left out. Each response is
random, so only the prompts are shared; it has from half to one and a half times the mean length. Times are medians,
after a pass of each that warms up. With --memory, each way has a process of its own instead, which makes two passes;
what is reported is the most that it held, less what it held before.

An estimate follows for a GPU. It is arithmetic, not a measurement: the FLOPs of matrix products with weights, and of
attention, of each way.
"""

import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2Model

from benchmark.curves.compare import markdown
from ppo_rlhf.lib import lm, packing, passes, processes
from ppo_rlhf.lib.files import write_json
from ppo_rlhf.lib.run import commit, cpu_name

PAD, WIDTH, LAYERS_OF_QWEN = 1_000, 896, 24
WAYS = ("each", "shared")


@dataclass(frozen=True)
class Args:
    prompts: tuple[int, ...] = (50, 100, 500, 2000)
    """tokens of a prompt"""
    responses: tuple[int, ...] = (50, 200, 500)
    """tokens of a response, on average"""
    group: int = 8
    """responses to each prompt"""
    tokens: int = 4000
    """of a pass, about: it has as many groups as fit, at least one"""
    layers: int = 2
    """of the model; Qwen2.5-0.5B has 24"""
    pairs: int = 3
    """how often each way is timed"""
    memory: bool = False
    """measure peak memory instead of time"""
    alone: str = ""
    """measure the memory of one way, shared or each, and print it; for internal use"""
    output: Path | None = None
    """file that gets everything measured, as JSON"""


def make_model(layers: int) -> PreTrainedModel:
    """Qwen2.5-0.5B's shape with few layers and a small vocabulary."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
    return Qwen2Model(Qwen2Config(vocab_size=PAD, num_hidden_layers=layers, **sizes, attn_implementation="sdpa"))


def make_rows(args: Args, prompt: int, response: int) -> tuple[Tensor, Tensor]:
    """Rows (batch, length) of a pass and their responses (batch, response_length), padded at the end."""
    groups = max(1, args.tokens // (args.group * (prompt + response)))
    generator = torch.Generator().manual_seed(prompt + response)
    rows = groups * args.group
    prompts = torch.randint(0, PAD, (groups, prompt), generator=generator).repeat_interleave(args.group, 0)
    lengths = torch.linspace(0.5 * response, 1.5 * response, rows).round().long()
    lengths = lengths[torch.randperm(rows, generator=generator)]
    responses = torch.randint(0, PAD, (rows, int(lengths.max())), generator=generator)
    responses[torch.arange(responses.shape[1]) >= lengths.unsqueeze(1)] = PAD
    return torch.cat([prompts, responses], 1), responses


def run_pass(model: PreTrainedModel, tokens: Tensor, responses: Tensor) -> Tensor:
    """Forward and backward; returns the gradient of the first layer's first weight."""
    model.zero_grad(set_to_none=True)
    lengths = passes.count_tokens(tokens, PAD)
    for packed, few in passes.micro_batches(model, lengths, tokens, responses, pad_id=PAD):
        lm.read_before_responses(model, packed, few, PAD)[few != PAD].sum().backward()
    return next(model.layers[0].parameters()).grad


def gflops(args: Args, rows: Tensor, shares: bool, layers: int) -> float:
    """Of a pass: 6 for each token and weight, 12 * width for each token, layer and key that it attends to."""
    lengths = passes.count_tokens(rows, PAD)
    weights = sum(p.numel() for p in make_model(1).layers.parameters())
    tokens = int(passes.prefix_tree(rows.masked_fill(rows == PAD, -1))[0].max()) + 1 if shares else int(lengths.sum())
    keys = float((lengths.double() ** 2 / 2).sum())
    return layers * (6 * tokens * weights + 12 * WIDTH * keys) / 1e9


def measure(args: Args, prompt: int, response: int) -> dict[str, Any]:
    """Seconds or bytes of both ways, at one pair of lengths."""
    tokens, responses = make_rows(args, prompt, response)
    found: dict[str, Any] = {"prompt": prompt, "response": response, "rows": len(tokens)}
    found["tokens"] = int((tokens != PAD).sum())
    found["gflop of 24 layers"] = {way: gflops(args, tokens, way == "shared", LAYERS_OF_QWEN) for way in WAYS}
    if args.memory:
        return found | {"memory": {way: peak_memory(args, prompt, response, way) for way in WAYS}}
    model = make_model(args.layers)
    packing.enable(model, share_prefixes=True)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    gradients = {}
    for _ in range(1 + args.pairs):
        for way, times in seconds.items():
            model.shares_prefixes = way == "shared"
            started = time.perf_counter()
            gradients[way] = run_pass(model, tokens, responses)
            times.append(time.perf_counter() - started)
    difference = (gradients["shared"] - gradients["each"]).norm() / gradients["each"].norm()
    found["difference of gradients"] = float(difference)
    return found | {"seconds": {way: times[1:] for way, times in seconds.items()}}


def peak_memory(args: Args, prompt: int, response: int, way: str) -> int:
    """Bytes that a pass adds at its peak, in a process of its own."""
    command = [sys.executable, __file__, "--prompts", str(prompt), "--responses", str(response)]
    sizes = {"group": args.group, "tokens": args.tokens, "layers": args.layers, "alone": way}
    command += [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    return int(subprocess.run(command, check=True, capture_output=True).stdout)


def measure_memory(args: Args) -> int:
    """Bytes at the peak of a process that reads one way."""
    tokens, responses = make_rows(args, args.prompts[0], args.responses[0])
    model = make_model(args.layers)
    packing.enable(model, share_prefixes=args.alone == "shared")
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    for _ in range(2):
        run_pass(model, tokens, responses)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def row_of(found: dict[str, Any]) -> dict[str, str]:
    row = {"prompt + response": f"{found['prompt']} + {found['response']}", "rows": str(found["rows"])}
    if "memory" in found:
        memory = {way: held / 1e9 for way, held in found["memory"].items()}
        return row | {"each row, GB": f"{memory['each']:.2f}", "shared, GB": f"{memory['shared']:.2f}"}
    each, shared = found["seconds"].values()
    ratios = [one / other for one, other in zip(each, shared, strict=True)]
    work = found["gflop of 24 layers"]
    row |= {"each row, s": f"{statistics.median(each):.3g}", "shared, s": f"{statistics.median(shared):.3g}"}
    row["times as fast"] = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
    return row | {"estimate of 24 layers' FLOPs, times as many": f"{work['each'] / work['shared']:.2f}"}


def main(args: Args) -> None:
    processes.keep_freed_memory()
    if args.alone:
        print(measure_memory(args))
        return
    machine = {"cpu": cpu_name(), "threads": torch.get_num_threads()}
    arguments = {name: value for name, value in asdict(args).items() if name not in ("output", "alone")}
    report: dict[str, Any] = {"commit": commit(), "machine": machine, "arguments": arguments, "measured": []}
    for prompt, response in itertools.product(args.prompts, args.responses):
        report["measured"].append(measure(args, prompt, response))
        print(json.dumps(row_of(report["measured"][-1]), ensure_ascii=False), flush=True)
        if args.output:
            write_json(args.output, report)
    print(markdown([row_of(one) for one in report["measured"]]))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
