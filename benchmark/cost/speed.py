"""Episodes per second of chapters 1 and 3, and of other implementations on the same machine in the same minutes.

    python benchmark/cost/speed.py   # ours alone, the small model of tales
    python benchmark/cost/speed.py --base_model smollm2-135m --batch_size 32 --query_length 8 --peer trl
    python benchmark/cost/speed.py --device cuda --base_model gpt2 --batch_size 512 --query_length 64 \\
        --dtype bfloat16 --compile --output speed.json

Everyone trains the same model on the same queries for the same number of episodes, minibatches and epochs, in
processes of their own, in turn: ours, the peers, ours, the peers. The weights are random; only those of sums and of
smollm2-135m, the real model, are trained. The first update of a run warms up and does not count. Each figure is the
median of all runs, with its range. What remains different is said below the table.

A ratio compares runs of the same turn. Model FLOP utilisation is the share of the device's rate of matrix products
that the products of the model itself make up. The product of (n, k) and (k, m) has 2 n k m FLOPs; so a forward pass
has 2 FLOPs per token and weight of a linear layer, and 4 * width FLOPs per token, layer and key that the token
attends to; a backward pass has twice that. An episode needs

    generation    a forward pass over query and response, logits at the response
    scoring       chapter 1, two more: the reference with logits at the response, the reward model without logits;
                  chapter 3, which has neither here, one in bfloat16, in which the policy reads its response, and none
                  in float32, in which the sampler's log-probs are kept
    training      per epoch, forward and backward over query and response, logits at the response

What an implementation computes beyond that does not count. The rate is that of square products of 2048 (on a
GPU 8192, on a slow CPU fewer) rows in the precision of the run, measured at the end of each run of ours.

Chapter 3 is GRPO without a KL penalty. Its responses end where the model ends them, and so differ in length: that of
sums writes 5 to 88 tokens, and random weights are given a chance of ending that is the same at every token.
"""

import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.pytorch_utils import Conv1D

from benchmark.curves.compare import markdown
from ppo_rlhf import worlds
from ppo_rlhf.lib.base.errors import InputError, exit_with
from ppo_rlhf.lib.base.files import write_json
from ppo_rlhf.lib.nets.classifier import save_reward_model
from ppo_rlhf.lib.nets.lm import RewardModel
from ppo_rlhf.lib.services.run import commit, cpu_name
from ppo_rlhf.worlds import smollm

ROOT = Path(__file__).resolve().parents[2]
TRL = {1: "1.12.0", 3: "1.16.0"}  # the release, by chapter: one that has PPO, and the newest
PLACES = ("folder", "output", "peer_python")  # arguments that say nothing about what was measured
WARM_UP = 1  # updates of each run that do not count
ENDS = {"bos_token_id": 0, "eos_token_id": 0}
PYTHIA = {
    **ENDS,
    "vocab_size": 50304,
    "max_position_embeddings": 2048,
    "rotary_pct": 0.25,
    "use_parallel_residual": True,
}
SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    "tales": lambda: GPT2Config(vocab_size=1024, n_positions=128, n_embd=128, n_layer=4, n_head=4, **ENDS),
    "gpt2": lambda: GPT2Config(**ENDS),
    "sums": lambda: LlamaConfig(
        **ENDS,
        vocab_size=400,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        tie_word_embeddings=True,
    ),
    # As a Llama, without the biases of queries, keys and values: a Qwen2 could not have a tokenizer of words.
    "qwen2.5-0.5b": lambda: LlamaConfig(
        **ENDS,
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "pythia-160m": lambda: GPTNeoXConfig(
        **PYTHIA, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072
    ),
    "smollm2-135m": lambda: LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        tie_word_embeddings=True,
        num_attention_heads=9,
        num_key_value_heads=3,
    ),
}
REAL = "smollm2-135m"  # its weights are not random
REMARKS = {
    1: {
        "trl": "TRL runs in float32; it also trains a value network of the same size as the policy, which "
        "nearly doubles its work; it uses AdamW and whitens no rewards.",
    },
    3: {
        "trl": "TRL's GRPOTrainer runs in float32, generates by itself, without vLLM, and keeps activations as ours "
        "does; it reads every row at the length of the longest prompt and the longest response of its update.",
    },
}


@dataclass(frozen=True)
class Args:
    chapter: Literal[1, 3] = 1
    """1: train_policy.py; 3: rlvr/policy.py with GRPO"""
    base_model: Literal["tales", "gpt2", "pythia-160m", "sums", "qwen2.5-0.5b", "smollm2-135m"] = "tales"
    """shape of the model, whose weights are random; sums, in chapter 3: the model and the problems of that world;
    smollm2-135m: the real model"""
    query_length: int = 24
    """tokens of a query, or of the longest; sums: that a problem may have"""
    shortest_query: int = 0
    """tokens of the shortest query, if they differ; the mean then lies 0.65 of the way from here to the longest, as
    with prose that is cut at sentence ends"""
    response_length: int = 24
    """tokens of a response; in chapter 3 the most that it may have"""
    mean_response: float = 24.0
    """chapter 3, random weights: mean tokens of a response, if there were no longest; 0: none ends by itself"""
    batch_size: int = 64
    """episodes per update"""
    samples_per_prompt: int = 8
    """chapter 3: responses to each prompt"""
    minibatches: int = 1
    """chapter 3: optimiser steps per epoch"""
    micro_batch_size: int = 0
    """episodes per forward and backward pass, over all processes; 0: the whole minibatch"""
    epochs: int = 4
    """passes over each batch"""
    dtype: tuple[Literal["float32", "bfloat16"], ...] = ("float32",)
    """arithmetic of ours; with several, ours runs with each. The peers run in float32"""
    processes: tuple[int, ...] = (1,)
    """processes of ours; with several, ours runs with each"""
    share_prefixes: tuple[bool, ...] = (True,)
    """chapter 3: whether ours reads what rows begin with once for all of them; with several, ours runs with each"""
    compile: bool = False
    """chapter 1: compile our models"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one"""
    peer: tuple[Literal["trl"], ...] = ()
    """implementations to compare with ours"""
    peer_python: str = ""
    """interpreter of an environment with this TRL; by default one is made from the package index"""
    updates: int = 3
    """measured updates of each run"""
    pairs: int = 5
    """how many runs of each"""
    folder: Path = ROOT / "benchmark" / "runs" / "speed"
    """where models, results and the peers' environment are kept"""
    output: Path | None = None
    """file that gets everything measured, as JSON"""


# ---- FLOPs -----------------------------------------------------------------------------------------------------


def flops_per_episode(
    config: PretrainedConfig,
    query_length: float,
    response_length: float,
    epochs: int,
    chapter: int = 1,
    dtype: str = "float32",
) -> dict[str, float]:
    """FLOPs of the matrix products that one episode needs, by phase."""
    with torch.device("meta"):
        trunk = AutoModelForCausalLM.from_config(config).base_model
    weights = sum(m.weight.numel() for m in trunk.modules() if isinstance(m, torch.nn.Linear | Conv1D))
    length = round(query_length + response_length)
    keys = length * (length + 1) // 2  # token t attends to t tokens
    attention = 4 * config.hidden_size * config.num_hidden_layers * keys
    trunk_pass = 2 * weights * length + attention
    logits = 2 * config.hidden_size * config.vocab_size * response_length
    scoring = 2 * trunk_pass + logits
    if chapter == 3:
        scoring = trunk_pass + logits if dtype == "bfloat16" else 0
    return {
        "generation": trunk_pass + logits,
        "scoring": scoring,
        "training": 3 * epochs * (trunk_pass + logits),
    }


# ---- What everyone trains --------------------------------------------------------------------------------------


def make_inputs(args: Args) -> dict[str, str]:
    """A model and what it is trained on, made once. Returns their paths."""
    if args.chapter == 1:
        return make_queries(args)
    if args.base_model == "sums":
        world = worlds.DATA / "sums"
        return {"model": str(world / "model"), "problems": str(world)}
    return make_problems(args)


def the_model(base_model: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model of this shape with random weights, and a tokenizer whose tokens are words; or the real model."""
    if base_model == REAL:
        folder = smollm.find_model()
        return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = SHAPES[base_model]()
    return AutoModelForCausalLM.from_config(config), word_tokenizer(config.vocab_size)


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Its tokens are the words w1, w2 and so on, and token 0 the end of a text."""
    words = {"<|endoftext|>": 0} | {f"w{i}": i for i in range(1, vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def random_texts(args: Args, tokenizer: PreTrainedTokenizerBase, shortest: int, longest: int) -> list[str]:
    """Texts of so many random words, each of them one token."""
    space = "Ġ" if args.base_model == REAL else ""  # a real tokenizer's words have a space in front
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    words = [token.removeprefix(space) for token in tokens if token.startswith(space)]
    words = [word for word in words if word.isascii() and word.isalnum()]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(len(words), (4096, longest), generator=generator).tolist()
    lengths = spread_lengths(shortest, longest, mean_query(args), 4096).tolist()
    start = " " if space else ""
    return [start + " ".join(words[i] for i in row[:length]) for row, length in zip(rows, lengths, strict=True)]


def write_jsonl(path: Path, rows: Iterable[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_queries(args: Args) -> dict[str, str]:
    """Chapter 1: a model with random weights, a reward model, and texts that queries are cut from."""
    folder = args.folder / args.base_model
    paths = {name: str(folder / name) for name in ("model", "reward")}
    if not (folder / "reward" / "config.json").exists():
        model, tokenizer = the_model(args.base_model)
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        info = {"kind": "reward model", "base_model": "", "vocab_size": len(tokenizer), "task": {}}
        save_reward_model(folder / "reward", RewardModel(model), tokenizer, info)
    texts = folder / f"texts-{args.shortest_query}-{args.query_length}.jsonl"
    if not texts.exists():
        longest = args.query_length if args.shortest_query else 256
        tokenizer = AutoTokenizer.from_pretrained(paths["model"])
        write_jsonl(texts, random_texts(args, tokenizer, args.shortest_query or longest, longest))
    return paths | {"texts": str(texts)}


def make_problems(args: Args) -> dict[str, str]:
    """Chapter 3: a model with random weights that ends its responses now and then, and problems of random words."""
    folder = args.folder / args.base_model / f"{args.shortest_query}-{args.query_length}-{args.mean_response:g}"
    if not (folder / "problems_train.jsonl").exists():
        model, tokenizer = the_model(args.base_model)
        if args.mean_response and args.base_model != REAL:
            end_after(model, args.mean_response)
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        line_break = int(args.base_model == REAL)  # the one behind a problem is a token there
        shortest, longest = args.shortest_query or args.query_length, args.query_length
        texts = random_texts(args, tokenizer, shortest - line_break, longest - line_break)
        rows = [{"question": text, "answer": "#### 1"} for text in texts]
        write_jsonl(folder / "problems_test.jsonl", rows[:8])
        write_jsonl(folder / "problems_train.jsonl", rows[8:])
    return {"model": str(folder / "model"), "problems": str(folder)}


def end_after(model: PreTrainedModel, tokens: float) -> None:
    """Give the end of a text, token 0, a chance of about 1 / tokens wherever this model with random weights is."""
    norms = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    if not norms:
        raise InputError("--mean_response: the norms of this model have no bias, so only 0 is possible")
    end, others = model.get_output_embeddings().weight[0], model.config.vocab_size - 1
    with torch.no_grad():  # the last norm's bias is added to what the output layer reads, at every token
        norms[-1].bias += math.log(others / (tokens - 1)) * end / end.square().sum()


def mean_query(args: Args) -> float:
    """Mean tokens of a query."""
    shortest = args.shortest_query or args.query_length
    return shortest + 0.65 * (args.query_length - shortest)


def spread_lengths(shortest: int, longest: int, mean: float, count: int) -> torch.Tensor:
    """So many lengths, the same each time, from shortest to longest with about this mean: (count,)."""
    if shortest == longest:
        return torch.full((count,), longest)
    steepness = (longest - shortest) / (mean - shortest) - 1  # the mean of u^steepness is 1 / (1 + steepness)
    u = torch.linspace(0, 1, count, dtype=torch.float64) ** steepness
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
    return (shortest + (longest - shortest) * u).round().long()[order]


def peers_python(args: Args) -> str:
    """The interpreter of an environment with TRL and the versions of ours of what both need; made once."""
    if args.peer_python:
        return args.peer_python
    trl = f"trl=={TRL[args.chapter]}"
    folder = args.folder / f"peers-{trl}"
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        venv.create(folder, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "--quiet"]
        torch_as_ours = f"torch=={version('torch').split('+')[0]}"
        subprocess.run([*install, torch_as_ours], check=True)
        same = [torch_as_ours, *(f"{name}=={version(name)}" for name in ("transformers", "accelerate"))]
        subprocess.run([*install, trl, *same, "tyro", "pandas", "tensorboard", "rich"], check=True)
        (folder / "installed").touch()
    return str(python)


# ---- Run and report --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Runner:
    """Who runs: a row of the table."""

    name: str
    kind: Literal["ours", "trl"]
    python: str
    dtype: str
    processes: int = 1
    share_prefixes: bool = True


def runners(args: Args) -> list[Runner]:
    """Ours, in each precision, with each number of processes, with shared prefixes or without, and the peers."""
    who = []
    for dtype, processes, shares in itertools.product(args.dtype, args.processes, args.share_prefixes):
        words = ["ours"] + [dtype] * (len(args.dtype) > 1)
        words += [f"{processes} process{'es' * (processes > 1)}"] * (len(args.processes) > 1)
        words += ["shared prefixes" if shares else "each row"] * (len(args.share_prefixes) > 1)
        who.append(Runner(", ".join(words), "ours", sys.executable, dtype, processes, shares))
    return who + [Runner(peer, peer, peers_python(args), "float32") for peer in args.peer]


def measure(args: Args, who: Runner, inputs: dict[str, str]) -> dict[str, Any]:
    """One run of one implementation, in a new process."""
    folder = args.folder / "last"
    folder.mkdir(parents=True, exist_ok=True)
    settings = inputs | {
        "chapter": args.chapter,
        "folder": str(folder),
        "query_length": args.query_length,
        "response_length": args.response_length,
        "batch_size": args.batch_size,
        "samples_per_prompt": args.samples_per_prompt,
        "minibatches": args.minibatches,
        "micro_batch_size": args.micro_batch_size,
        "epochs": args.epochs,
        "dtype": who.dtype,
        "share_prefixes": who.share_prefixes,
        "compile": args.compile,
        "updates": WARM_UP + args.updates,
        "processes": who.processes,
        "whiten_groups": max(1, min(8, args.batch_size // 8)),
    }
    write_json(folder / "settings.json", settings)
    result_file = folder / "result.json"
    result_file.unlink(missing_ok=True)
    script = str(Path(__file__).with_name("speed_runs.py"))
    command = [who.python, script, who.kind, str(folder / "settings.json"), str(result_file)]
    if who.processes > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(who.processes)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if args.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    started = time.time()
    with (folder / "log.txt").open("w") as log:
        status = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode
    if status or not result_file.exists():
        end = "\n".join((folder / "log.txt").read_text().splitlines()[-15:])
        print(end, file=sys.stderr)
        raise InputError(f"{who.name} ended with status {status}; the end of its log is above")
    result = json.loads(result_file.read_text())
    seconds = (result["updates"][-1] - result["updates"][WARM_UP - 1]) / args.updates
    return result | {
        "start_to_first_update": result["updates"][0] - started,
        "seconds_per_update": seconds,
        "episodes_per_second": args.batch_size / seconds,
    }


def spread(values: list[float]) -> str:
    """Median and range."""
    low, middle, high = (
        f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
        for value in (min(values), statistics.median(values), max(values))
    )
    return f"{middle} [{low}, {high}]"


def phase_seconds(run: dict[str, Any]) -> dict[str, float]:
    """Mean seconds of an update in each phase; the rest is what no phase holds."""
    phases = run["phases"][WARM_UP:]
    seconds = {name: statistics.mean(update[name] for update in phases) for name in phases[0]}
    return seconds | {"rest": run["seconds_per_update"] - sum(seconds.values())}


def speed_table(args: Args, runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, str]]:
    """One row for each of `runs` (its name: its runs); ratios against the first."""
    first = next(iter(runs))
    rows = []
    for name, measured in runs.items():
        speeds = [run["episodes_per_second"] for run in measured]
        pairs = zip(runs[first], measured, strict=True)
        ratios = [ours["episodes_per_second"] / theirs["episodes_per_second"] for ours, theirs in pairs]
        tokens = [response_tokens(args, run) for run in measured]
        rows.append(
            {
                "": name,
                "episodes/s": spread(speeds),
                "tokens/s": spread([speed * n for speed, n in zip(speeds, tokens, strict=True)]),
                **({"tokens of a response": spread(tokens)} if args.chapter == 3 else {}),
                f"{first}, times as fast": spread(ratios) if name != first else "",
                "start to end of first update, s": spread([run["start_to_first_update"] for run in measured]),
                "peak memory of a process, GB": spread([run["peak_memory"] / 1e9 for run in measured]),
            }
        )
    return rows


def response_tokens(args: Args, run: dict[str, Any]) -> float:
    """Mean tokens of a response."""
    return run["tokens"]["response"] if args.chapter == 3 else args.response_length


PHASES = {
    "generation": ["generation"],
    "scoring": ["scoring"],
    "training": ["training"],
    "rest": ["rest"],
    "scoring and training": ["scoring", "training"],
    "all": ["generation", "scoring", "training", "rest"],
}


def utilisation_table(args: Args, runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, str]]:
    """One row per implementation of ours and phase: share of the time, and share of the rate of matrix products."""
    rows = []
    for name, measured in runs.items():
        response = statistics.mean(response_tokens(args, run) for run in measured)
        query = statistics.mean(run["tokens"]["query"] for run in measured) if args.chapter == 3 else mean_query(args)
        dtype = next(dtype for dtype in args.dtype if dtype in name or len(args.dtype) == 1)
        flops = flops_per_episode(SHAPES[args.base_model](), query, response, args.epochs, args.chapter, dtype)
        for what, phases in PHASES.items():
            seconds = [sum(phase_seconds(run)[phase] for phase in phases) for run in measured]
            work = sum(flops.get(phase, 0) for phase in phases)
            shares = [100 * t / run["seconds_per_update"] for t, run in zip(seconds, measured, strict=True)]
            used = [
                100 * work * args.batch_size / (t * run["processes"]) / run["matmul_rate"]
                for t, run in zip(seconds, measured, strict=True)
            ]
            rows.append(
                {
                    "": name,
                    "phase": what,
                    "share of the time, %": spread(shares),
                    "GFLOP per episode": f"{work / 1e9:.3g}" if work else "",
                    "utilisation, %": spread(used) if work else "",
                }
            )
    return rows


def main(args: Args) -> int:
    if args.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda, but PyTorch finds no GPU")
    for processes in args.processes:
        if args.micro_batch_size % processes:
            raise InputError(f"--micro_batch_size {args.micro_batch_size} does not divide by {processes} processes")
    if args.compile and args.chapter == 3:
        raise InputError("--compile goes with --chapter 1")
    if args.share_prefixes != (True,) and args.chapter == 1:
        raise InputError("--share_prefixes goes with --chapter 3")
    if args.shortest_query > args.query_length:
        raise InputError(f"--shortest_query {args.shortest_query} is above --query_length {args.query_length}")
    if args.output and args.output.exists():
        raise InputError(f"--output {args.output} exists; remove it or choose another name")
    inputs, who = make_inputs(args), runners(args)
    runs: dict[str, list[dict[str, Any]]] = {runner.name: [] for runner in who}
    for turn in range(args.pairs):
        for runner in who:
            runs[runner.name].append(measure(args, runner, inputs) | {"processes": runner.processes})
            speed = runs[runner.name][-1]["episodes_per_second"]
            print(f"{turn + 1}/{args.pairs} {runner.name}: {speed:.3g} episodes/s", flush=True)
    ours = {runner.name: runs[runner.name] for runner in who if runner.kind == "ours"}
    tables = {"speed": speed_table(args, runs), "utilisation": utilisation_table(args, ours)}
    print("", *(markdown(table) for table in tables.values()), sep="\n")
    for runner in who:
        if runner.kind == "ours":
            rates = spread([run["matmul_rate"] / 1e9 for run in runs[runner.name]])
            device = runs[runner.name][0]["device"]
            print(f"{runner.name}: matrix products of {rates} GFLOP/s for a process, {runner.dtype}, {device}")
    queries = f"{args.shortest_query} to {args.query_length}" if args.shortest_query else args.query_length
    work = f"{args.minibatches} minibatches, {args.epochs} epochs" if args.chapter == 3 else f"{args.epochs} epochs"
    print(f"{args.batch_size} episodes of {queries} + {args.response_length} tokens, {work}")
    print(f"medians [lowest, highest] of {args.pairs} runs of {args.updates} updates after the first")
    print(*(REMARKS[args.chapter][peer] for peer in args.peer), sep="\n")
    if args.output:
        versions = {name: version(name) for name in ("torch", "transformers", "accelerate", "tokenizers")}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "commit": commit(),
            "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "device": next(iter(ours.values()))[0]["device"]},
            "versions": versions | ({"trl": TRL[args.chapter]} if "trl" in args.peer else {}),
            "arguments": {name: value for name, value in asdict(args).items() if name not in PLACES},
            **tables,
            "runs": runs,
        }
        write_json(args.output, report)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Args, description=__doc__)))
    except InputError as error:
        exit_with(str(error))
