"""What reading no padding is worth: updates of PPO as the scripts make them, compared with the same updates padded.

    python benchmark/cost/padding.py --cases tales gpt2 --kernels --output padding-chapter1.json
    python benchmark/cost/padding.py --cases posts pythia --kernels --output padding-chapter2.json

A network of random weights answers queries of given lengths, and its responses end where they are told to. One update
is timed: generation, log-probs and values, reference, reward model, the epochs of PPO. Ways to read:

    padded     every row at the longest of its batch, and as many tokens sampled as a response may have
    passes     rows of similar length together, as chapters 2 and 3 read with small models. It is not measured in
               chapter 1, which reads padding as it is
    unpadded   the real tokens alone: packing (lib/packing.py), as chapters 2 and 3 read with wide models. It is only
               measured with wide models, in chapter 1, too, which does without it; its sampler reads queries padded
    even       as many tokens in rows of one length, which have no padding to save

All take turns in one process, after a turn that does not count; a ratio compares two of the same turn. Two numbers
say what could be gained: `even`, with optimiser steps and all else that saving padding does not save, and tokens with
padding over tokens without. Attention grows faster than tokens, so long rows may gain more than the latter.

The lengths: `tales` and `gpt2` have queries of 24 to 64 tokens, mean 50, as prose cut at sentence ends has under
GPT-2's tokenizer, and responses of 24 tokens; `tales` is the small model with the 512 episodes of `--preset
sentiment`. `posts` has what the demo of chapter 2 has: posts of 65 to 81 tokens, summaries of 13 to 20, where 24 are
allowed, and minibatches of 8. `pythia` has posts of 100 to 512 tokens and summaries of 10 to 53, as TL;DR has.
"""

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import torch
import tyro
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmark.cost.speed import SHAPES, spread, spread_lengths
from benchmark.curves.compare import markdown
from ppo_rlhf import tldr_policy, train_policy
from ppo_rlhf.lib import cli, lm, networks as ours, packing, passes, processes
from ppo_rlhf.lib.errors import InputError, exit_with
from ppo_rlhf.lib.files import write_json
from ppo_rlhf.lib.run import commit, cpu_name

END = 0  # the stop token of all networks here


@dataclass(frozen=True)
class Case:
    chapter: int
    shape: str
    batch: int
    minibatches: int
    epochs: int
    queries: tuple[int, int, float]  # tokens of the shortest and the longest, and the mean
    responses: tuple[int, int, float]
    response_length: int  # tokens that a response may have


CASES = {
    "tales": Case(1, "tales", 512, 1, 4, (24, 64, 50), (24, 24, 24), 24),
    "gpt2": Case(1, "gpt2", 32, 1, 1, (24, 64, 50), (24, 24, 24), 24),
    "posts": Case(2, "tales", 64, 8, 4, (65, 81, 72), (13, 20, 16), 24),
    "pythia": Case(2, "pythia-160m", 8, 1, 1, (100, 512, 310), (10, 53, 31), 53),
}


def even(case: Case) -> Case:
    """The same number of tokens, in rows of one length."""
    query, response = round(case.queries[2]), round(case.responses[2])
    return replace(case, queries=(query, query, query), responses=(response, response, response))


@dataclass(frozen=True)
class Args:
    cases: tuple[Literal["tales", "gpt2", "posts", "pythia"], ...] = ("tales", "gpt2", "posts")
    """what is measured"""
    turns: int = 5
    """how often, each way"""
    device: Literal["cpu", "cuda"] = "cpu"
    """where"""
    kernels: bool = False
    """profile an update of each case, read as the scripts read, and say where its time goes; on a CPU only"""
    output: Path | None = None
    """file that gets everything measured, as JSON"""


@contextlib.contextmanager
def padded() -> Iterator[None]:
    """As before: every row at the longest of its batch, and sampling that knows no end."""

    def one_pass(lengths: Tensor, *_, **__) -> list[passes.Pass]:
        return [passes.Pass(torch.arange(len(lengths)), int(lengths.max()))]

    def generate(model, contexts, uniforms, pad_id, vocab_size, temperature, stop_ids) -> tuple[Tensor, Tensor]:
        responses, logprobs, _ = lm.generate(model, contexts, uniforms, pad_id, vocab_size, temperature)
        return lm.truncate_at(responses, next(iter(stop_ids), None), 0, pad_id), logprobs

    def read(model, tokens, responses, pad_id) -> Tensor:
        return lm.read_tokens(model, tokens, pad_id, slice(-responses.shape[1] - 1, -1))

    with contextlib.ExitStack() as stack:
        for where, name, replacement in (
            (passes, "plan_passes", one_pass),
            (passes, "pack", lambda tokens, pad_id, longest: tokens),
            (lm, "read_before_responses", read),
            (lm, "generate_until", generate),
        ):
            stack.enter_context(patch.object(where, name, replacement))
        yield


@contextlib.contextmanager
def packed(networks: list[PreTrainedModel]) -> Iterator[None]:
    """Networks read no padding, if they are wide."""
    packing.enable(*networks)
    yield
    for network in networks:
        if passes.is_packed(network):
            del network.base_model.is_packed, network.base_model.forward


def make_update(case: Case, device: torch.device) -> tuple[Callable[[], None], list[PreTrainedModel], float]:
    """A function that makes one update, the networks that it uses, and tokens with padding over tokens without."""
    torch.manual_seed(0)
    config = SHAPES[case.shape]()
    if hasattr(config, "activation_function"):
        config.activation_function = "gelu_pytorch_tanh"  # as load_pretrained sets it
    count = 4 if case.chapter == 2 else 3
    networks = [AutoModelForCausalLM.from_config(config).eval().to(device) for _ in range(count)]  # no dropout
    vocab = pad = config.vocab_size
    query_lengths = spread_lengths(*case.queries, case.batch)
    response_lengths = spread_lengths(*case.responses, case.batch)
    columns = torch.arange(case.queries[1])
    queries = torch.randint(1, vocab, (case.batch, len(columns)))
    queries = queries.masked_fill(columns < len(columns) - query_lengths.unsqueeze(1), pad)  # padded on the left
    uniforms = torch.rand(case.batch, case.response_length, dtype=torch.float64) / 2 + 0.5  # never the stop token
    if case.chapter == 2:
        uniforms.scatter_(1, response_lengths.unsqueeze(1) - 1, 0.0)  # the stop token, id 0
    queries_on, uniforms = queries.to(device), uniforms.to(device)
    update = update_of_chapter_1 if case.chapter == 1 else update_of_chapter_2
    tokens, real = case.batch * (len(columns) + case.response_length), int((query_lengths + response_lengths).sum())
    return update(case, networks, queries, queries_on, uniforms, pad), networks, tokens / real


def update_of_chapter_1(case, networks, queries, queries_on, uniforms, pad) -> Callable[[], None]:
    trained, reference, scoring = networks
    policy = train_policy.PolicyWithValueHead(trained).to(queries_on.device)
    reward_model = train_policy.RewardModel(scoring).to(queries_on.device)
    optimizer = train_policy.AdamTensorFlowStyle(policy.parameters(), lr=1e-6)
    ppo = train_policy.PpoArgs(noptepochs=case.epochs, nminibatches=case.minibatches, whiten_groups=1)
    permutations = train_policy.draw_permutations(1, 0, case.epochs, range(1), case.batch)

    ids = train_policy.TaskIds(prefix=[], suffix=[], pad=pad, eos=END, stop=None, context_length=queries.shape[1])
    settings = {"policy": policy, "reference": reference, "reward": reward_model, "scale": cli.Scale(), "monitor": {}}
    task = train_policy.TaskArgs(response_length=case.response_length, temperature=0.7)
    settings |= {"ids": ids, "task": task, "rows": case.batch}

    def update() -> None:
        rollout = train_policy.make_rollout(queries_on, uniforms, 0.0, **settings)
        train_policy.ppo_update(policy, optimizer, rollout, permutations, ppo, pad, 0.7)

    return update


def update_of_chapter_2(case, networks, queries, queries_on, uniforms, pad) -> Callable[[], None]:
    trained, reference, scoring, criticising = networks
    critic, reward_model = (
        lm.RewardModel(model.base_model).to(queries_on.device) for model in (criticising, scoring)
    )
    actor_critic = tldr_policy.ActorCritic(trained, critic, pad)
    optimizer = torch.optim.AdamW(actor_critic.parameters(), 1e-6, fused=True)
    accelerator = Accelerator(cpu=queries_on.device.type == "cpu")
    ppo = tldr_policy.PpoArgs(noptepochs=case.epochs, nminibatches=case.minibatches)
    minibatches = tldr_policy.draw_minibatches(1, 0, case.epochs, slice(0, case.batch), case.minibatches)
    by_length = partial(passes.by_length, pad_id=pad)
    sampling = {"stop_id": END, "temperature": 0.7, "new_tokens": case.response_length}
    reading = {"reference": ours.Reference(reference, None), "temperature": 0.7}

    def update() -> None:
        with torch.no_grad():
            responses, logprobs, values, _ = by_length(
                tldr_policy.respond, actor_critic, queries_on, uniforms, **sampling
            )
            tokens = torch.cat([queries_on, responses], dim=1)
            by_length(tldr_policy.reference_logprobs, actor_critic, tokens, responses, **reading)
            by_length(nn.Module.__call__, reward_model, tokens)
        mask, value_mask = tldr_policy.response_masks(responses, pad)
        rollout = tldr_policy.Rollout(
            query_responses=tokens,
            logprobs=logprobs,
            values=values,
            rewards=torch.zeros_like(values),
            mask=mask,
            value_mask=value_mask,
        )
        tldr_policy.ppo_update(actor_critic, optimizer, rollout, minibatches, ppo, pad, 0.7, accelerator)

    return update


# Kinds of kernels, by how the names of PyTorch's operations begin.
KINDS = {
    "matrix products": ("mm", "addmm", "bmm"),
    "attention": ("_scaled_dot_product",),
    "GELU": ("gelu",),
    "copies": ("copy_", "cat", "index", "gather"),
    "layer norm, sums, additions": ("native_layer_norm", "sum", "add"),
    "optimiser": ("_fused_adam",),
    "the rest": ("",),
}


def kind_of(operation: str) -> str:
    name = operation.removeprefix("aten::")
    return next(kind for kind, begins in KINDS.items() if name.startswith(begins))


def kernel_shares(update: Callable[[], None]) -> dict[str, float]:
    """The share of an update's time on a CPU that each kind of kernel takes, forward and backward."""
    with torch.profiler.profile() as profiled:
        update()
    seconds = dict.fromkeys(KINDS, 0.0)
    for row in profiled.key_averages():
        seconds[kind_of(row.key)] += row.self_cpu_time_total
    return {kind: time / sum(seconds.values()) for kind, time in seconds.items()}


def main(args: Args) -> None:
    if args.kernels and args.device != "cpu":
        raise InputError("--kernels goes with --device cpu")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda, but PyTorch finds no GPU")
    if args.output and args.output.exists():
        raise InputError(f"--output {args.output} exists; remove it or choose another name")
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
    processes.keep_freed_memory()
    machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "device": args.device}
    about = {"commit": commit(), "machine": machine, "torch": version("torch")}
    device, rows, measured = torch.device(args.device), [], {}
    for name in args.cases:
        case = CASES[name]
        ragged, networks, tokens = make_update(case, device)
        even_rows, _, _ = make_update(even(case), device)
        wide = SHAPES[case.shape]().hidden_size >= packing.LEAST_WIDTH
        ways = ["padded", *(["passes"] if case.chapter == 2 else []), *(["unpadded"] if wide else []), "even"]
        reading = {"padded": padded, "unpadded": partial(packed, networks)}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(args.turns + 1):
            for way in ways:
                one_update = even_rows if way == "even" else ragged
                with reading.get(way, contextlib.nullcontext)():
                    started = time.perf_counter()
                    one_update()
                    if args.device == "cuda":
                        torch.cuda.synchronize()
                    if turn:
                        seconds[way].append(time.perf_counter() - started)
        gains = {
            way: spread([before / after for before, after in zip(seconds["padded"], seconds[way], strict=True)])
            for way in ways
        }
        row = {"": name, "padded, s": f"{statistics.median(seconds['padded']):.3g}"}
        row |= {way: gains.get(way, "") for way in ("passes", "unpadded", "even")}
        rows.append(row | {"tokens": f"{tokens:.2f}"})
        print(markdown([rows[-1]]), flush=True)
        measured[name] = {"tokens": tokens, "seconds": seconds}
        if args.kernels:
            with packed(networks) if case.chapter == 2 else contextlib.nullcontext():
                measured[name]["kernels"] = kernel_shares(ragged)
        if args.output:
            cases = {name: asdict(CASES[name]) for name in measured}
            write_json(args.output, about | {"table": rows, "cases": cases, "measured": measured})
    print(markdown(rows))
    if args.kernels:
        shares = {name: case["kernels"] for name, case in measured.items()}
        print(markdown([{"": kind} | {name: f"{shares[name][kind]:.0%}" for name in shares} for kind in KINDS]))


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except InputError as error:
        exit_with(str(error))
    sys.exit(0)
