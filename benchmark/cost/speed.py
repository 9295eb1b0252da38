"""Episodes per second of chapters 1 and 3, and of TRL on the same machine in the same minutes.

    python benchmark/cost/speed.py   # ours alone, the small model of tales
    python benchmark/cost/speed.py --base_model smollm2-135m --batch_size 32 --query_length 8 --trl
    python benchmark/cost/speed.py --base_model gpt2 --batch_size 512 --query_length 64 --dtype bfloat16 \\
        --ours=--compile --output speed.json

Both train the same model on the same queries for the same number of episodes, minibatches and epochs, in processes of
their own, in turn: ours, TRL, ours, TRL. The weights are random, but not those of sums. The first update of a run
warms up and does not count. Each figure is the median of all runs, with its range; a ratio compares runs of the same
turn. What remains different is said below the table.

Utilisation is the share of the device's rate of square matrix products. A forward pass is counted as 2 FLOPs for each
token and weight, a backward pass as 4: so the work of attention is left out, and queries count as if all their logits
were needed. An episode has a forward pass that generates, in chapter 1 two more, of the reference and of the reward
model, and a forward and a backward pass in each epoch. What an implementation computes beyond that does not count.

Chapter 3 is GRPO without a KL penalty. The model of sums ends its responses itself, random weights end none.
"""

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from benchmark.curves.compare import markdown
from ppo_rlhf import worlds
from ppo_rlhf.train_policy import InputError, commit, model_errors, read_text, run_script, write_json
from ppo_rlhf.train_reward import RewardModel, save_reward_model

ROOT = Path(__file__).resolve().parents[2]
TRL = {1: "1.12.0", 3: "1.16.0"}  # the release, by chapter: one that has PPO, and the newest
ENDS = {"bos_token_id": 0, "eos_token_id": 0}
SHAPES = {
    "tales": GPT2Config(vocab_size=1024, n_positions=128, n_embd=128, n_layer=4, n_head=4, **ENDS),
    "gpt2": GPT2Config(**ENDS),
    # As a Llama, without the biases of queries, keys and values: a Qwen2 could not have a tokenizer of words.
    "qwen2.5-0.5b": LlamaConfig(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        **ENDS,
    ),
}
FLAGS = (
    "--base_model {model} --dtype {dtype} --log_interval 0 --save_interval 0 --ppo.total_episodes {episodes} "
    "--ppo.batch_size {batch_size} --ppo.noptepochs {epochs} --ppo.local_micro_batch_size {local_micro_batch_size} "
    "--ppo.local_rollout_batch_size {batch_size} --task.response_length {response_length} "
)
FLAGS_OF_CHAPTER = {
    1: "--task.query_dataset {problems}/problems_train.jsonl --task.query_column question --task.start_text None "
    "--task.end_text None --task.truncate_after 0 --task.query_length {query_length} "
    "--rewards.trained_model {reward} --ppo.whiten_groups {whiten_groups}",
    3: "--preset sums-grpo --task.problems {problems} --task.prompt_length {query_length} --ppo.lr 1e-6 "
    "--ppo.samples_per_prompt {samples_per_prompt} --ppo.nminibatches {minibatches} --trace_interval 0 "
    "--eval_interval 0 --eval_problems 8 --eval_samples 0",
}
REMARKS = {
    1: "TRL runs in float32; it also trains a value network of the same size as the policy, which nearly doubles its "
    "work; it uses AdamW and whitens no rewards.",
    3: "TRL's GRPOTrainer runs in float32, generates by itself, without vLLM, and keeps activations as ours does; it "
    "reads every row at the length of the longest prompt and the longest response of its update.",
}


@dataclass(frozen=True)
class Args:
    chapter: Literal[1, 3] = 1
    """1: train_policy.py; 3: rlvr/policy.py with GRPO"""
    base_model: str = "tales"
    """shape of the model, whose weights are random: tales, gpt2, qwen2.5-0.5b, or smollm2-135m, if that was fetched;
    sums: the model and the problems of that world"""
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
    ours: str = ""
    """more arguments of our script, such as --ours=--compile in chapter 1"""
    trl: bool = False
    """compare with TRL, which is fetched from the package index, once"""
    updates: int = 3
    """measured updates of each run"""
    pairs: int = 5
    """how many runs of each"""
    folder: Path = ROOT / "benchmark/runs/speed"
    """where models, results and TRL are kept"""
    output: Path | None = None
    """file that gets everything measured, as JSON"""


def report(args: Args) -> dict[str, Any]:
    """Measure, and print the tables."""
    if args.micro_batch_size % args.processes:
        raise InputError(f"--micro_batch_size {args.micro_batch_size} does not divide by {args.processes} processes")
    if args.output and args.output.exists():
        raise InputError(f"--output {args.output} exists; remove it or choose another name")
    args = replace(args, folder=args.folder.resolve())
    settings = make_inputs(args)
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []} if args.trl else {"ours": []}
    for turn in range(args.pairs):
        for who in runs:
            runs[who].append(measure(args, who, settings))
            print(f"{turn + 1}/{args.pairs} {who}: {runs[who][-1]['episodes_per_second']:.3g} episodes/s", flush=True)
    utilisation = utilisation_table(args, settings, runs["ours"])
    tables = {"speed": speed_table(args, runs), "utilisation": utilisation}
    print("", *(markdown(table) for table in tables.values()), sep="\n")
    device = runs["ours"][0]["device"]
    print(f"{args.batch_size} episodes of {args.query_length} + {args.response_length} tokens, on {device}")
    print(f"medians [lowest, highest] of {args.pairs} runs of {args.updates} updates after the first")
    if args.trl:
        print(REMARKS[args.chapter])
    names = ("torch", "transformers", "accelerate", "tokenizers")
    found = {
        "commit": commit(),
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "device": device},
        "versions": {name: version(name) for name in names} | ({"trl": TRL[args.chapter]} if args.trl else {}),
        "arguments": {name: x for name, x in asdict(args).items() if name not in ("folder", "output")},
        **tables,
        "runs": runs,
    }
    if args.output:
        write_json(args.output, found)
    return found


def make_inputs(args: Args) -> dict[str, Any]:
    """Write a model, a reward model, and the problems that a run reads. Returns the settings of a run."""
    folder, updates = args.folder / args.base_model, 1 + args.updates
    micro_batch_size = args.micro_batch_size or args.batch_size // args.minibatches
    if args.base_model == "sums":
        world = worlds.DATA / "sums"
        model, tokenizer = (kind.from_pretrained(world / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
        problems = [json.loads(line) for line in read_text(world / "problems_train.jsonl").splitlines()]
    else:
        with model_errors(args.base_model) as (path, _):
            config = SHAPES.get(args.base_model) or AutoConfig.from_pretrained(path)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        vocabulary = {"<|endoftext|>": 0} | {f"w{i}": i for i in range(1, config.vocab_size)}
        words = Tokenizer(models.WordLevel(vocabulary, unk_token="<|endoftext|>"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>")
        rows = torch.randint(1, len(vocabulary), (4096, args.query_length)).tolist()
        problems = [{"question": " ".join(f"w{i}" for i in row), "answer": "#### 1", "steps": 1} for row in rows]
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    info = {"kind": "reward model", "base_model": "", "vocab_size": len(tokenizer), "task": {}}
    save_reward_model(folder / "reward", RewardModel(model), tokenizer, info)
    lengths = [len(tokenizer(f"{row['question']}\n")["input_ids"]) for row in problems]
    fitting = [i for i in range(len(problems)) if lengths[i] <= args.query_length]
    if args.chapter == 3:  # so that each is read once
        fitting = fitting[: updates * args.batch_size // args.samples_per_prompt]
    for split, rows in (("train", fitting), ("test", fitting[:8])):
        lines = (json.dumps(problems[i]) + "\n" for i in rows)
        (folder / f"problems_{split}.jsonl").write_text("".join(lines))
    settings = asdict(args) | {
        "model": str(folder / "model"),
        "reward": str(folder / "reward"),
        "problems": str(folder),
        "weights": model.num_parameters(),
        "query_tokens": statistics.mean(lengths[i] for i in fitting),
        "updates": updates,
        "episodes": updates * args.batch_size,
        "micro_batch_size": micro_batch_size,
        "local_micro_batch_size": micro_batch_size // args.processes,
        "whiten_groups": max(1, min(8, args.batch_size // 8)),
    }
    flags = (FLAGS + FLAGS_OF_CHAPTER[args.chapter]).split()
    return settings | {"flags": [word.format(**settings) for word in flags] + args.ours.split()}


def trl_folder(args: Args) -> Path:
    """A folder with the chapter's release of TRL, which runs with our versions of everything else; made once."""
    folder = args.folder / f"trl-{TRL[args.chapter]}"
    if not folder.exists():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*install, f"trl=={TRL[args.chapter]}"], check=True)
    return folder


def measure(args: Args, who: str, settings: dict[str, Any]) -> dict[str, Any]:
    """One run of ours or of TRL, in a new process."""
    folder = args.folder / "last"
    folder.mkdir(parents=True, exist_ok=True)
    file, result_file = folder / "settings.json", folder / "result.json"
    result_file.unlink(missing_ok=True)
    file.write_text(json.dumps(settings, default=str))
    command, environment = [sys.executable], {**os.environ, "PYTHONPATH": str(ROOT)}
    if who == "trl":
        environment["PYTHONPATH"] += f":{trl_folder(args)}"
    elif args.processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.processes)]
        threads = max(1, torch.get_num_threads() // args.processes)
        environment.setdefault("OMP_NUM_THREADS", str(threads))  # torchrun would make it 1
    command += [str(Path(__file__).with_name("speed_runs.py")), who, str(file), str(result_file)]
    started = time.time()
    with (folder / "log.txt").open("w") as log:
        status = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode
    if status:
        print(*(folder / "log.txt").read_text().splitlines()[-15:], sep="\n", file=sys.stderr)
        raise InputError(f"{who} ended with status {status}; the end of its log is above")
    result = json.loads(result_file.read_text())
    seconds = (result["updates"][-1] - result["updates"][0]) / args.updates
    return result | {
        "start_to_first_update": result["updates"][0] - started,
        "seconds_per_update": seconds,
        "episodes_per_second": args.batch_size / seconds,
    }


# ---- Tables ----------------------------------------------------------------------------------------------------


def cpu_name() -> str:
    """The processor's model on Linux, elsewhere its architecture."""
    known = Path("/proc/cpuinfo")
    found = re.search("model name\\s*: (.*)", known.read_text()) if known.exists() else None
    return found[1] if found else platform.machine()


def spread(values: list[float]) -> str:
    """Median and range."""
    low, middle, high = (
        f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
        for value in (min(values), statistics.median(values), max(values))
    )
    return f"{middle} [{low}, {high}]"


def speed_table(args: Args, runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, str]]:
    """One row for each of `runs` (its name: its runs); ratios against the first."""
    first = next(iter(runs))
    rows = []
    for name, measured in runs.items():
        speeds = [run["episodes_per_second"] for run in measured]
        pairs = zip(runs[first], measured, strict=True)
        ratios = [ours["episodes_per_second"] / theirs["episodes_per_second"] for ours, theirs in pairs]
        # Older files of chapter 1 have no tokens.
        tokens = [run["tokens"]["response"] if "tokens" in run else args.response_length for run in measured]
        row = {"": name, "episodes/s": spread(speeds)}
        row["tokens/s"] = spread([speed * n for speed, n in zip(speeds, tokens, strict=True)])
        if args.chapter == 3:
            row["tokens of a response"] = spread(tokens)
        row[f"{first}, times as fast"] = spread(ratios) if name != first else ""
        row["start to end of first update, s"] = spread([run["start_to_first_update"] for run in measured])
        row["peak memory of a process, GB"] = spread([run["peak_memory"] / 1e9 for run in measured])
        rows.append(row)
    return rows


def utilisation_table(args: Args, settings: dict[str, Any], measured: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The share of the device's rate of matrix products that the runs of ours used."""
    passes = (3 if args.chapter == 1 else 1) + 3 * args.epochs
    rows = []
    for run in measured:
        tokens = run["tokens"]["query"] + run["tokens"]["response"]
        work = 2 * settings["weights"] * tokens * passes * run["episodes_per_second"]
        rows.append(100 * work / (args.processes * run["matmul_rate"]))
    rates = [run["matmul_rate"] / 1e9 for run in measured]
    return [{"": "ours", "utilisation, %": spread(rows), "matrix products, GFLOP/s": spread(rates)}]


if __name__ == "__main__":
    run_script(lambda: report(tyro.cli(Args, description=__doc__)))
