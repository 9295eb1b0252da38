"""Episodes per second of train_policy.py, beside other implementations on the same machine in the same minutes.

    python benchmark/speed.py                                        # ours alone, the small model of tales
    python benchmark/speed.py --peer trl --query_length 64
    python benchmark/speed.py --peer details trl --details_path lm-human-preference-details --base_model gpt2 \\
        --batch_size 16 --dtype float32 bfloat16
    python benchmark/speed.py --query_length 64 --shortest_query 24 --peer trl
    python benchmark/speed.py --processes 1 2
    python benchmark/speed.py --device cuda --base_model gpt2 --batch_size 512 --query_length 64 --dtype bfloat16 \\
        --compile --output speed.json

Everyone trains the same randomly initialised model on the same queries for the same number of episodes and epochs, in
processes of their own, by turns: ours, the peers, ours, the peers. The first update of a run warms up and does not
count. Each figure is the median of all runs, with its range. What remains different is said below the table.

A ratio compares runs of the same turn. Model FLOP utilisation is the share of the device's rate of matrix products
that the products of the model itself make up. The product of (n, k) and (k, m) has 2 n k m FLOPs; so a forward pass
has 2 FLOPs per token and weight of a linear layer, and 4 * width FLOPs per token, layer and key that the token
attends to; a backward pass has twice that. An episode needs

    generation    a forward pass over query and response, logits at the response
    scoring       two more: the reference with logits at the response, the reward model without logits
    training      per epoch, forward and backward over query and response, logits at the response

What an implementation computes beyond that does not count. The rate is that of square products of 2048 (on a
GPU 8192) rows in the precision of the run, measured at the end of each run of ours.
"""

import json
import os
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
from compare import markdown
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, PretrainedConfig, PreTrainedTokenizerFast
from transformers.pytorch_utils import Conv1D

from ppo_rlhf.lib.errors import InputError, exit_with
from ppo_rlhf.lib.files import write_json
from ppo_rlhf.lib.models import save_reward_model
from ppo_rlhf.lib.run import commit, cpu_name
from ppo_rlhf.train_policy import RewardModel

ROOT = Path(__file__).resolve().parent.parent
TRL = "1.12.0"
DETAILS_SCRIPT = "lm_human_preference_details/train_policy_accelerate.py"
PLACES = ("folder", "output", "details_path")  # arguments that say nothing about what was measured
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
    "pythia-160m": lambda: GPTNeoXConfig(
        **PYTHIA, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072
    ),
    "pythia-410m": lambda: GPTNeoXConfig(
        **PYTHIA, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
}
REMARKS = {
    "trl": "TRL trains a value network beside the policy, of the same size, which nearly doubles its work; it uses "
    "AdamW and whitens no rewards.",
    "details": "lm-human-preference-details is its published script, in float32, with its TensorFlow-style Adam; it "
    "whitens the whole batch at once.",
}


@dataclass(frozen=True)
class Args:
    base_model: Literal["tales", "gpt2", "pythia-160m", "pythia-410m"] = "tales"
    """shape of the model; its weights are random"""
    query_length: int = 24
    """tokens of a query, or of the longest"""
    shortest_query: int = 0
    """tokens of the shortest query, if they differ; the mean then lies 0.65 of the way from here to the longest, as
    with prose that is cut at sentence ends"""
    response_length: int = 24
    """tokens of a response"""
    batch_size: int = 64
    """episodes per update"""
    micro_batch_size: int = 0
    """episodes per forward and backward pass, over all processes; 0: the whole batch"""
    epochs: int = 4
    """passes over each batch"""
    dtype: tuple[Literal["float32", "bfloat16"], ...] = ("float32",)
    """arithmetic of ours; with several, ours runs with each"""
    peer_dtype: Literal["float32", "bfloat16"] = "float32"
    """arithmetic of TRL; lm-human-preference-details has float32"""
    processes: tuple[int, ...] = (1,)
    """processes of ours; with several, ours runs with each"""
    compile: bool = False
    """compile our models"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one"""
    peer: tuple[Literal["trl", "details"], ...] = ()
    """whom to run beside ours"""
    details_path: Path | None = None
    """a checkout of lm-human-preference-details"""
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
    config: PretrainedConfig, query_length: float, response_length: int, epochs: int
) -> dict[str, int]:
    """FLOPs of the matrix products that one episode needs, by phase."""
    with torch.device("meta"):
        trunk = AutoModelForCausalLM.from_config(config).base_model
    weights = sum(m.weight.numel() for m in trunk.modules() if isinstance(m, torch.nn.Linear | Conv1D))
    length = round(query_length + response_length)
    keys = length * (length + 1) // 2  # token t attends to t tokens
    attention = 4 * config.hidden_size * config.num_hidden_layers * keys
    trunk_pass = 2 * weights * length + attention
    logits = 2 * config.hidden_size * config.vocab_size * response_length
    return {
        "generation": trunk_pass + logits,
        "scoring": 2 * trunk_pass + logits,
        "training": 3 * epochs * (trunk_pass + logits),
    }


# ---- What everyone trains --------------------------------------------------------------------------------------


def make_inputs(args: Args) -> dict[str, str]:
    """A model with random weights, its tokenizer, a reward model and texts, made once. Returns their paths."""
    folder = args.folder / args.base_model
    paths = {name: str(folder / name) for name in ("model", "reward")}
    if not (folder / "reward" / "config.json").exists():
        torch.manual_seed(0)
        config = SHAPES[args.base_model]()
        model = AutoModelForCausalLM.from_config(config)
        words = {"<|endoftext|>": 0} | {f"w{i}": i for i in range(1, config.vocab_size)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        info = {"kind": "reward", "base_model": "", "vocab_size": len(tokenizer), "task": {}}
        save_reward_model(folder / "reward", RewardModel(model), tokenizer, info)
    texts = folder / f"texts-{args.shortest_query}-{args.query_length}.jsonl"
    if not texts.exists():
        generator = torch.Generator().manual_seed(0)
        longest = args.query_length if args.shortest_query else 256  # tokens of a text; queries are cut from it
        ids = torch.randint(1, SHAPES[args.base_model]().vocab_size, (4096, longest), generator=generator)
        lengths = spread_lengths(args.shortest_query or longest, longest, mean_query(args), 4096)
        rows = (row[:length] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True))
        texts.write_text("".join(json.dumps(" ".join(f"w{i}" for i in row)) + "\n" for row in rows))
    return paths | {"texts": str(texts)}


def mean_query(args: Args) -> float:
    """Tokens of a query, in the mean."""
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
    folder = args.folder / "peers"
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        venv.create(folder, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, f"torch=={version('torch').split('+')[0]}"], check=True)
        same = [f"{name}=={version(name)}" for name in ("transformers", "accelerate")]
        subprocess.run([*install, f"trl=={TRL}", *same, "tyro", "pandas", "tensorboard", "rich"], check=True)
        (folder / "installed").touch()
    return str(python)


# ---- Run and report --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Runner:
    """Who runs: a row of the table."""

    name: str
    kind: Literal["ours", "trl", "details"]
    python: str
    dtype: str
    processes: int = 1


def runners(args: Args) -> list[Runner]:
    """Ours, in each precision and with each number of processes, and the peers."""
    who = []
    for dtype in args.dtype:
        for processes in args.processes:
            words = ["ours"] + [dtype] * (len(args.dtype) > 1)
            words += [f"{processes} process{'es' * (processes > 1)}"] * (len(args.processes) > 1)
            who.append(Runner(", ".join(words), "ours", sys.executable, dtype, processes))
    return who + [Runner(peer, peer, peers_python(args), args.peer_dtype) for peer in args.peer]


def measure(args: Args, who: Runner, inputs: dict[str, str]) -> dict[str, Any]:
    """One run of one implementation, in a new process."""
    folder = args.folder / "last"
    folder.mkdir(parents=True, exist_ok=True)
    settings = inputs | {
        "folder": str(folder),
        "details_script": str(args.details_path and (args.details_path / DETAILS_SCRIPT).resolve()),
        "query_length": args.query_length,
        "response_length": args.response_length,
        "batch_size": args.batch_size,
        "micro_batch_size": args.micro_batch_size,
        "epochs": args.epochs,
        "dtype": who.dtype,
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
        raise InputError(f"{who.name} ended with status {status}; the end of its log stands above")
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
        rows.append(
            {
                "": name,
                "episodes/s": spread(speeds),
                "tokens/s": spread([speed * args.response_length for speed in speeds]),
                f"{first}, times as fast": spread(ratios) if name != first else "",
                "start to end of first update, s": spread([run["start_to_first_update"] for run in measured]),
                "peak memory of a process, GB": spread([run["peak_memory"] / 1e9 for run in measured]),
            }
        )
    return rows


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
    flops = flops_per_episode(SHAPES[args.base_model](), mean_query(args), args.response_length, args.epochs)
    rows = []
    for name, measured in runs.items():
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
    if "details" in args.peer and args.query_length != args.response_length:
        raise InputError("--peer details cuts queries to --response_length; give both lengths the same number")
    if "details" in args.peer and args.shortest_query:
        raise InputError("--peer details wants queries of one length; leave --shortest_query out")
    if args.shortest_query > args.query_length:
        raise InputError(f"--shortest_query {args.shortest_query} is above --query_length {args.query_length}")
    if "details" in args.peer and args.details_path is None:
        raise InputError("--peer details needs --details_path, a checkout of lm-human-preference-details")
    if "details" in args.peer and not (args.details_path / DETAILS_SCRIPT).exists():
        raise InputError(f"--details_path {args.details_path} has no {DETAILS_SCRIPT}")
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
    print(f"{args.batch_size} episodes of {queries} + {args.response_length} tokens, {args.epochs} epochs")
    print(f"medians [lowest, highest] of {args.pairs} runs of {args.updates} updates after the first")
    print(*(REMARKS[peer] for peer in args.peer), sep="\n")
    print(f"arithmetic of TRL: {args.peer_dtype}" if "trl" in args.peer else "")
    if args.output:
        packages = ("torch", "transformers", "accelerate", "tokenizers")
        args.output.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "commit": commit(),
            "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "device": next(iter(ours.values()))[0]["device"]},
            "versions": {name: version(name) for name in packages} | ({"trl": TRL} if "trl" in args.peer else {}),
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
