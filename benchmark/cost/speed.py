"""Episodes per second of chapters 1 and 3, and of TRL on the same machine in the same minutes.

    python benchmark/cost/speed.py   # ours alone, the small model of tales
    python benchmark/cost/speed.py --base_model smollm2-135m --batch_size 32 --query_length 8 --trl make
    python benchmark/cost/speed.py --device cuda --base_model gpt2 --batch_size 512 --query_length 64 \\
        --dtype bfloat16 --compile --output speed.json

Both train the same model on the same queries for the same number of episodes, minibatches and epochs, in processes of
their own, in turn: ours, TRL, ours, TRL. The weights are random; only those of sums and of smollm2-135m, the real
model, are trained. The first update of a run warms up and does not count. Each figure is the median of all runs, with
its range. What remains different is said below the table.

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

Chapter 3 is GRPO without a KL penalty. The model of sums ends its responses itself, after 5 to 88 tokens; random
weights end none.
"""

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Callable
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
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.pytorch_utils import Conv1D

from benchmark.curves.compare import markdown
from ppo_rlhf import worlds
from ppo_rlhf.lib.errors import InputError, exit_with
from ppo_rlhf.lib.files import write_json
from ppo_rlhf.lib.run import commit
from ppo_rlhf.train_reward import RewardModel, save_reward_model

ROOT = Path(__file__).resolve().parents[2]
TRL = {1: "1.12.0", 3: "1.16.0"}  # the release, by chapter: one that has PPO, and the newest
PLACES = ("folder", "output", "trl")  # arguments that say nothing about what was measured
WARM_UP = 1  # updates of each run that do not count
ENDS = {"bos_token_id": 0, "eos_token_id": 0}
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
    1: "TRL runs in float32; it also trains a value network of the same size as the policy, which nearly doubles its "
    "work; it uses AdamW and whitens no rewards.",
    3: "TRL's GRPOTrainer runs in float32, generates by itself, without vLLM, and keeps activations as ours does; it "
    "reads every row at the length of the longest prompt and the longest response of its update.",
}


def cpu_name() -> str:
    """The processor's model on Linux, elsewhere its architecture."""
    known = Path("/proc/cpuinfo")
    found = re.search("model name\\s*: (.*)", known.read_text()) if known.exists() else None
    return found[1] if found else platform.machine()


@dataclass(frozen=True)
class Args:
    chapter: Literal[1, 3] = 1
    """1: train_policy.py; 3: rlvr/policy.py with GRPO"""
    base_model: Literal["tales", "gpt2", "sums", "qwen2.5-0.5b", "smollm2-135m"] = "tales"
    """shape of the model, whose weights are random; sums, in chapter 3: the model and the problems of that world;
    smollm2-135m: the real model"""
    query_length: int = 24
    """tokens of a query; sums: that a problem may have"""
    response_length: int = 24
    """tokens of a response; in chapter 3 the most that it may have"""
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
    dtype: Literal["float32", "bfloat16"] = "float32"
    """arithmetic of ours; TRL runs in float32"""
    processes: int = 1
    """processes of ours"""
    share_prefixes: bool = True
    """chapter 3: ours reads what rows begin with once for all of them"""
    compile: bool = False
    """chapter 1: compile our models"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one"""
    trl: str = ""
    """compare with TRL: the interpreter of an environment that has it, or `make`, and one is made from the package
    index"""
    updates: int = 3
    """measured updates of each run"""
    pairs: int = 5
    """how many runs of each"""
    folder: Path = ROOT / "benchmark" / "runs" / "speed"
    """where models, results and TRL's environment are kept"""
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
) -> float:
    """FLOPs of the matrix products that one episode needs."""
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
    return trunk_pass + logits + scoring + 3 * epochs * (trunk_pass + logits)


# ---- What is trained -------------------------------------------------------------------------------------------


def make_inputs(args: Args) -> dict[str, str]:
    """A model, a reward model, and texts or problems, made once. Returns their paths."""
    if args.chapter == 3 and args.base_model == "sums":
        world = worlds.DATA / "sums"
        return {"model": str(world / "model"), "problems": str(world)}
    folder = args.folder / args.base_model / f"chapter{args.chapter}-{args.query_length}"
    paths = {
        "model": str(folder / "model"),
        "reward": str(folder / "reward"),
        "texts": str(folder / "texts.jsonl"),
        "problems": str(folder),
    }
    if not (folder / "texts.jsonl").exists():
        model, tokenizer = the_model(args.base_model)
        model.save_pretrained(paths["model"])
        tokenizer.save_pretrained(paths["model"])
        info = {"kind": "reward model", "base_model": "", "vocab_size": len(tokenizer), "task": {}}
        save_reward_model(folder / "reward", RewardModel(model), tokenizer, info)
        # The line break after a problem is a token of the real tokenizer.
        line_break = args.chapter == 3 and args.base_model == REAL
        texts = random_texts(args.base_model, tokenizer, args.query_length - line_break)
        problems = [{"question": text, "answer": "#### 1"} for text in texts]
        for name, rows in (("problems_test", problems[:8]), ("problems_train", problems[8:]), ("texts", texts)):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def the_model(base_model: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model of this shape with random weights, and a tokenizer whose tokens are words; or the real model."""
    if base_model == REAL:
        folder = worlds.find_value("base_model", REAL)
        return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = SHAPES[base_model]()
    words = {"<|endoftext|>": 0} | {f"w{i}": i for i in range(1, config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    return AutoModelForCausalLM.from_config(config), fast


def random_texts(base_model: str, tokenizer: PreTrainedTokenizerBase, length: int) -> list[str]:
    """Texts of so many random words, each of them one token."""
    space = "Ġ" if base_model == REAL else ""  # a real tokenizer's words have a space in front
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    words = [token.removeprefix(space) for token in tokens if token.startswith(space)]
    words = [word for word in words if word.isascii() and word.isalnum()]
    rows = torch.randint(len(words), (4096, length), generator=torch.Generator().manual_seed(0)).tolist()
    start = " " if space else ""
    return [start + " ".join(words[i] for i in row) for row in rows]


def trls_python(args: Args) -> str:
    """The interpreter of an environment with TRL and the versions of ours of what both need; made once."""
    if args.trl != "make":
        return args.trl
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


def measure(args: Args, who: str, inputs: dict[str, str]) -> dict[str, Any]:
    """One run of ours or of TRL, in a new process."""
    folder = args.folder / "last"
    folder.mkdir(parents=True, exist_ok=True)
    processes = args.processes if who == "ours" else 1
    settings = {
        **inputs,
        "chapter": args.chapter,
        "folder": str(folder),
        "query_length": args.query_length,
        "response_length": args.response_length,
        "batch_size": args.batch_size,
        "samples_per_prompt": args.samples_per_prompt,
        "minibatches": args.minibatches,
        "micro_batch_size": args.micro_batch_size,
        "epochs": args.epochs,
        "dtype": args.dtype if who == "ours" else "float32",
        "share_prefixes": args.share_prefixes,
        "compile": args.compile,
        "updates": WARM_UP + args.updates,
        "processes": processes,
        "whiten_groups": max(1, min(8, args.batch_size // 8)),
    }
    write_json(folder / "settings.json", settings)
    result_file = folder / "result.json"
    result_file.unlink(missing_ok=True)
    command = [sys.executable if who == "ours" else trls_python(args)]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command += [str(Path(__file__).with_name("speed_runs.py")), who, str(folder / "settings.json"), str(result_file)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if processes > 1:  # torchrun would give each process of chapter 1 one thread
        environment.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // processes)))
    if args.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    started = time.time()
    with (folder / "log.txt").open("w") as log:
        status = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode
    if status or not result_file.exists():
        end = "\n".join((folder / "log.txt").read_text().splitlines()[-15:])
        print(end, file=sys.stderr)
        raise InputError(f"{who} ended with status {status}; the end of its log is above")
    result = json.loads(result_file.read_text())
    seconds = (result["updates"][-1] - result["updates"][WARM_UP - 1]) / args.updates
    result["processes"] = processes
    result["start_to_first_update"] = result["updates"][0] - started
    result["seconds_per_update"] = seconds
    result["episodes_per_second"] = args.batch_size / seconds
    return result


def spread(values: list[float]) -> str:
    """Median and range."""
    low, middle, high = (
        f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
        for value in (min(values), statistics.median(values), max(values))
    )
    return f"{middle} [{low}, {high}]"


def response_tokens(args: Args, run: dict[str, Any]) -> float:
    """Mean tokens of a response."""
    return run["tokens"]["response"] if args.chapter == 3 else args.response_length


def speed_table(args: Args, runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, str]]:
    """One row for each of `runs` (its name: its runs); ratios against the first."""
    first = next(iter(runs))
    rows = []
    for name, measured in runs.items():
        speeds = [run["episodes_per_second"] for run in measured]
        pairs = zip(runs[first], measured, strict=True)
        ratios = [ours["episodes_per_second"] / theirs["episodes_per_second"] for ours, theirs in pairs]
        tokens = [response_tokens(args, run) for run in measured]
        row = {"": name, "episodes/s": spread(speeds)}
        row["tokens/s"] = spread([speed * n for speed, n in zip(speeds, tokens, strict=True)])
        if args.chapter == 3:
            row["tokens of a response"] = spread(tokens)
        row[f"{first}, times as fast"] = spread(ratios) if name != first else ""
        row["start to end of first update, s"] = spread([run["start_to_first_update"] for run in measured])
        row["peak memory of a process, GB"] = spread([run["peak_memory"] / 1e9 for run in measured])
        rows.append(row)
    return rows


def utilisation_table(args: Args, measured: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The share of the device's rate of matrix products that the runs of ours used."""
    query, response = args.query_length, args.response_length
    if args.chapter == 3:
        query, response = (statistics.mean(run["tokens"][part] for run in measured) for part in ("query", "response"))
    config = SHAPES[args.base_model]()
    work = flops_per_episode(config, query, response, args.epochs, args.chapter, args.dtype)
    used = [100 * work * run["episodes_per_second"] / (run["processes"] * run["matmul_rate"]) for run in measured]
    row = {"": "ours", "GFLOP per episode": f"{work / 1e9:.3g}", "utilisation, %": spread(used)}
    row["matrix products, GFLOP/s"] = spread([run["matmul_rate"] / 1e9 for run in measured])
    return [row]


def main(args: Args) -> int:
    if args.micro_batch_size % args.processes:
        raise InputError(f"--micro_batch_size {args.micro_batch_size} does not divide by {args.processes} processes")
    if args.output and args.output.exists():
        raise InputError(f"--output {args.output} exists; remove it or choose another name")
    inputs = make_inputs(args)
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []} if args.trl else {"ours": []}
    for turn in range(args.pairs):
        for who in runs:
            runs[who].append(measure(args, who, inputs))
            speed = runs[who][-1]["episodes_per_second"]
            print(f"{turn + 1}/{args.pairs} {who}: {speed:.3g} episodes/s", flush=True)
    tables = {"speed": speed_table(args, runs), "utilisation": utilisation_table(args, runs["ours"])}
    print("", *(markdown(table) for table in tables.values()), sep="\n")
    device = runs["ours"][0]["device"]
    print(f"{args.batch_size} episodes of {args.query_length} + {args.response_length} tokens, on {device}")
    print(f"medians [lowest, highest] of {args.pairs} runs of {args.updates} updates after the first")
    if args.trl:
        print(REMARKS[args.chapter])
    if args.output:
        versions = {name: version(name) for name in ("torch", "transformers", "accelerate", "tokenizers")}
        if args.trl:
            versions["trl"] = TRL[args.chapter]
        report = {
            "commit": commit(),
            "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "device": device},
            "versions": versions,
            "arguments": {name: value for name, value in asdict(args).items() if name not in PLACES},
            **tables,
            "runs": runs,
        }
        args.output.parent.mkdir(parents=True, exist_ok=True)
        write_json(args.output, report)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Args, description=__doc__)))
    except InputError as error:
        exit_with(str(error))
