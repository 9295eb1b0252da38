"""The first hour on a GPU: what a CPU could not show, in steps that keep their results.

    bash benchmark/gpu.sh                                        # one H100 or H200: at most 45 minutes, an estimate
    bash benchmark/gpu.sh --trl_1_12 a/bin/python --trl_1_16 b/bin/python --vllm c/bin/python    # with those peers
    bash benchmark/gpu.sh --steps numbers ppo                    # some steps alone
    bash benchmark/gpu.sh --rehearse --folder tried              # every step, but tiny and on a CPU

    machine   the card: rates of matrix products, bandwidth, the time of a launch and of a wait
    numbers   a few updates of all chapters in float32 and bfloat16, and of chapter 1 compiled, next to the CPU's
              numbers for the same seeds
    ppo       episodes per second of GPT-2 with batch 512, compiled or not, next to TRL 1.12; the share of the card's
              rate; memory next to the formula
    grpo      the same of GRPO with the shape of Qwen2.5-0.5B, next to TRL 1.16
    passes    the time of a pass, and of a group of rows in attention: constants for passes.py and packing.py
    padding   what it gains to read no padding
    vllm      how far vLLM's log-probs are from ours, with and without batch invariance; are two runs bit-equal?

Each step is a process of its own and leaves <folder>/<step>.json, whatever becomes of the others, and of its own end.
When all have ended, <output> gets gpu.json and gpu.md. Repeat the command to do again what has not succeeded, or name
a step to do it in any case. A step that takes longer than it may is ended. The exit status is 1 if a step has failed
or has found a problem.
"""

import csv
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from transformers import AutoModelForCausalLM

from benchmark import worlds
from benchmark.cost import speed, speed_runs
from benchmark.curves.compare import markdown
from ppo_rlhf.lib.base.errors import InputError, exit_with
from ppo_rlhf.lib.base.files import write_json
from ppo_rlhf.lib.base.launch import default_device
from ppo_rlhf.lib.nets import lm, packing, passes
from ppo_rlhf.lib.services.run import commit, cpu_name

ROOT = speed.ROOT
SCRIPTS, HERE = ROOT / "ppo_rlhf", Path(__file__).parent


@dataclass(frozen=True)
class Args:
    rehearse: bool = False
    """make every step tiny, on the CPU: to find mistakes of this script before the day"""
    steps: tuple[str, ...] = ()
    """which steps, even if they were done before; none: all that were not"""
    trl_1_12: str = ""
    """interpreter of an environment with TRL 1.12, for ppo; `make`: one is made, from the package index"""
    trl_1_16: str = ""
    """the same with TRL 1.16, for grpo"""
    vllm: str = ""
    """interpreter of an environment with vLLM, for vllm"""
    folder: Path = ROOT / "benchmark/runs/gpu"
    """where runs and the results of steps are kept"""
    output: Path | None = None
    """folder that gets gpu.json and gpu.md; by default benchmark/results/gpu, and <folder> in a rehearsal"""
    alone: str = ""
    """used within: the one step that this process does"""


@dataclass
class Outcome:
    """What a step has found."""

    tables: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)


# ---- Commands --------------------------------------------------------------------------------------------------


def start(
    words: list[str | Path], folder: Path, *, new_session: bool = False, **environment: str
) -> subprocess.Popen:
    """Run Python with these words in a folder, which gets its output as log.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {**os.environ, "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", **environment}
    own.setdefault("PYTHONPATH", str(ROOT))
    with (folder / "log.txt").open("w") as log:
        command = [sys.executable, *map(str, words)]
        places = {"cwd": folder, "stdout": log, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, env=own, start_new_session=new_session, **places)


def last_words(folder: Path) -> str:
    """The last line that a command has printed."""
    lines = (folder / "log.txt").read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """The rows of a run's metrics.csv, times apart."""
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    times = {"elapsed/fps", "elapsed/time", "eps", "time"}
    return [{k: float(v) for k, v in row.items() if k not in times and "time/" not in k} for row in rows]


# ---- The machine -----------------------------------------------------------------------------------------------


def seconds_of(function: Callable[[], Any], device: torch.device, count: int) -> float:
    """The median time of a function, with what it has launched; the first two calls don't count."""
    found = []
    for _ in range(count + 2):
        speed_runs.synchronize(device)
        started = time.perf_counter()
        function()
        speed_runs.synchronize(device)
        found.append(time.perf_counter() - started)
    return statistics.median(found[2:])


def machine(args: Args) -> Iterator[Outcome]:
    device, few = default_device(), args.rehearse
    small, count = torch.zeros(64, device=device), 20 if few else 2000
    large = torch.zeros(2**18 if few else 2**30, dtype=torch.uint8, device=device)

    def launches() -> None:
        for _ in range(count):
            small.add_(1)

    def waits() -> None:
        for _ in range(count):
            small.add_(1)[0].item()

    launch = seconds_of(launches, device, 5) / count
    found = {
        "a launch, µs": 1e6 * launch,
        "a launch, an index and a wait, µs": 1e6 * seconds_of(waits, device, 5) / count,
        "memory, GB/s": 2 * len(large) / seconds_of(large.clone, device, 5) / 1e9,
    }
    for dtype in (torch.float32, torch.bfloat16):
        rate = 1e9 if few else speed_runs.matmul_rate(device, dtype)
        found[f"matrix products in {str(dtype).removeprefix('torch.')}, TFLOP/s"] = rate / 1e12
    rows = [{"": name, "measured": f"{value:.3g}"} for name, value in found.items()]
    yield Outcome({"the machine": rows}, details=found)


# ---- Numbers next to the CPU's ---------------------------------------------------------------------------------

# How far a metric of the first update may be from the CPU's: relative, absolute. The noise of sampling is the same,
# and a token differs only if its number falls between two roundings of a probability. None of this has been tried on
# a GPU, so these are estimates.
TOLERANCES = {"float32": (1e-3, 1e-3), "bfloat16": (0.1, 0.05)}
FEW_DTYPES = ("float32", "bfloat16", "float32", "bfloat16")  # of the cases of a rehearsal
GAPS = ("ppo/val/first_ratio_gap", "val/first_ratio_gap")


@dataclass(frozen=True)
class Case:
    script: str
    words: str
    flags: tuple[str, ...]  # prefixes of its --dtype
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    on_gpu: tuple[str, ...] = ()  # more words, on the GPU alone


def cases_of(folder: Path, few: bool) -> dict[str, Case]:
    """Commands of all chapters, in small worlds; those of chapters 2 and 3 are wide enough for packing.

    folder: has the worlds, or gets them.
    """
    shape = {"width": 16, "layers": 1, "heads": 2} if few else {"width": 512, "layers": 2, "heads": 8}
    steps = 2 if few else 40
    story, post, problem = (folder / name for name in ("tales", "posts", "sums"))
    if not problem.exists():
        sizes = worlds.Tales(
            **(shape | {"width": 16 if few else 128}),
            stories=300,
            lm_steps=steps,
            train_comparisons=64,
            test_comparisons=32,
        )
        worlds.write_tales(story, sizes, train_model=True)
        sizes = worlds.Posts(
            **shape,
            **{"train_posts": 48, "validation_posts": 16, "test_posts": 16, "train_comparisons": 48},
            **{"validation_comparisons": 16, "lm_quotes": 200, "lm_threads": 1_000, "lm_batch_size": 4},
            **{"lm_quote_steps": steps, "lm_thread_steps": steps},
        )
        worlds.write_posts(post, sizes, train_model=True)
        sizes = worlds.Sums(
            **shape,
            **{"train_problems": 64, "test_problems": 32, "lm_solutions": 2_000},
            **{"lm_short_steps": steps, "lm_steps": steps, "lm_batch_size": 8},
        )
        worlds.write_sums(problem, "sums", sizes, train_model=True)
    batch, updates = (16, 1) if few else (64, 3)
    ppo = f"ppo.total_episodes {batch * updates} --{{0}}ppo.batch_size {batch} --{{0}}save_interval 0"
    chapter1 = (
        f"--preset tales --base_model {story}/model --task.query_dataset {story}/stories.txt "
        f"--reward.label_dataset {story}/labels/sentiment/offline_5k.json --reward.num_train 16 "
        f"--reward.batch_size 8 --reward.rollout_batch_size 32 --reward.normalize_samples 32 "
        f"--policy.ppo.whiten_groups 2 "
        f"--policy.{ppo.format('policy.')} --policy.trace_interval 0"
    )
    chapter2 = (
        f"--preset posts --task.posts {post} --task.comparisons {post} --base_model {post}/model --sft.batch_size 24 "
        f"--sft.eval_posts 8 --reward.batch_size 24 --reward.normalize_posts 0 --policy.{ppo.format('policy.')} "
        f"--policy.ppo.nminibatches 2 --policy.eval_interval 0 --policy.eval_posts 8 --policy.trace_interval 0"
    )
    chapter3 = (
        f"--preset sums --base_model {problem}/model --task.problems {problem} --{ppo.format('')} --eval_interval 0 "
        f"--eval_problems 8 --eval_samples 0 --trace_interval 0 --ppo.nminibatches 2"
    )
    found = {
        "chapter 1": Case("train_both.py", chapter1, ("--reward.dtype", "--policy.dtype")),
        "chapter 1, compiled": Case(
            *("train_both.py", chapter1, ("--reward.dtype", "--policy.dtype"), ("float32",), ("--policy.compile",))
        ),
        "chapter 2": Case("tldr/all.py", chapter2, ("--sft.dtype", "--reward.dtype", "--policy.dtype")),
        "chapter 3, critic": Case("rlvr/policy.py", chapter3, ("--dtype",)),
        "chapter 3, GRPO": Case(
            "rlvr/policy.py",
            f"{chapter3} --ppo.samples_per_prompt 4 --ppo.advantage grpo --ppo.critic_warmup 0",
            ("--dtype",),
        ),
    }
    if few:
        del found["chapter 1, compiled"]
        found = {
            name: replace(case, dtypes=(dtype,))
            for (name, case), dtype in zip(found.items(), FEW_DTYPES, strict=True)
        }
    return found


def far_off(ours: dict[str, float], theirs: dict[str, float], dtype: str) -> Iterator[tuple[str, float]]:
    """Metrics and how many times the tolerance they differ by, if at all."""
    relative, absolute = TOLERANCES[dtype]
    for name, value in theirs.items():
        off = abs(ours[name] - value) / (absolute + relative * abs(value))
        if name not in GAPS and not (math.isnan(ours[name]) and math.isnan(value)):
            yield name, math.inf if math.isnan(off) else off


def numbers(args: Args) -> Iterator[Outcome]:
    outcome, rows = Outcome(), []
    if args.rehearse:
        outcome.left_out.append("chapter 1 compiled: a CPU needs half a minute for that")
    for name, case in cases_of(args.folder / "worlds", args.rehearse).items():
        for dtype in case.dtypes:
            place = args.folder / "numbers" / name.replace(", ", "-").replace(" ", "") / dtype
            shutil.rmtree(place, ignore_errors=True)
            words = [SCRIPTS / case.script, *case.words.split(), *(x for flag in case.flags for x in (flag, dtype))]
            both = {
                "cpu": start(words, place / "cpu", CUDA_VISIBLE_DEVICES=""),
                "gpu": start([*words, *case.on_gpu], place / "gpu"),
            }
            failed = [where for where, process in both.items() if process.wait()]
            outcome.problems += [f"{name}, {dtype}, {where}: {last_words(place / where)}" for where in failed]
            if failed:
                continue
            of_gpu = {run.name.split("__")[0]: run for run in (place / "gpu/runs").iterdir()}
            for run in sorted((place / "cpu/runs").iterdir()):
                stage = run.name.split("__")[0]
                ours, theirs = (metrics_of(one) for one in (of_gpu[stage], run))
                off = sorted(far_off(ours[0], theirs[0], dtype), key=lambda one: one[1])
                gap = next((ours[0][gap] for gap in GAPS if gap in ours[0]), math.nan)
                if off[-1][1] > 1:
                    beyond = ", ".join(
                        f"{metric} {ours[0][metric]:.5g}, not {theirs[0][metric]:.5g}" for metric, x in off if x > 1
                    )
                    outcome.problems.append(f"{name}, {stage}, {dtype}: beyond the tolerance: {beyond}")
                rows.append(
                    {"": f"{name}: `{stage}`", "dtype": dtype, "updates": str(len(ours)), "metrics": str(len(off))}
                    | {"beyond the tolerance": str(sum(x > 1 for _, x in off)), "furthest off": f"`{off[-1][0]}`"}
                    | {
                        "in tolerances": f"{off[-1][1]:.2g}",
                        "first_ratio_gap": "" if math.isnan(gap) else f"{gap:.2g}",
                    }
                )
                outcome.details[f"{name}, {stage}, {dtype}"] = {"gpu": ours, "cpu": theirs}
                outcome.tables["the first update next to the CPU's"] = rows
            yield outcome


# ---- Speed -----------------------------------------------------------------------------------------------------


def measure_speed(args: Args, outcome: Outcome, name: str, words: str, peer: str = "") -> dict[str, Any]:
    """What speed.py measures, with its tables; nothing if it fails. peer: an interpreter with TRL, `make` or none."""
    file = args.folder / f"speed-{name.replace(' ', '-')}.json"
    file.unlink(missing_ok=True)
    where = ["--device", "cpu" if args.rehearse else "cuda", "--folder", str(args.folder / "speed")]
    command = [HERE / "speed.py", *words.split(), *where, "--output", str(file)]
    if peer:
        command += ["--peer", "trl", *([] if peer == "make" else ["--peer_python", peer])]
    place = args.folder / f"log-{name.replace(' ', '-')}"
    if start(command, place).wait():
        outcome.problems.append(f"{name}: {last_words(place)}")
        return {}
    report = json.loads(file.read_text())
    outcome.details[name] = report
    outcome.tables |= {f"{name}: {table}": report[table] for table in ("speed", "utilisation")}
    return report


def ppo(args: Args) -> Iterator[Outcome]:
    outcome = Outcome()
    sizes = "--base_model gpt2 --batch_size 512 --query_length 64 --dtype float32 bfloat16 --updates 4 --pairs 2"
    if args.rehearse:
        sizes = (
            "--base_model tales --batch_size 8 --query_length 8 --response_length 4 --updates 1 --pairs 1 --epochs 1"
        )
        outcome.left_out.append("--compile: a CPU needs half a minute for that")
    report = measure_speed(args, outcome, "PPO", sizes)
    if report:
        config = speed.SHAPES[report["arguments"]["base_model"]]()
        with torch.device("meta"):
            parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        # The policy with its gradients and two moments, the reference and the reward model, all in float32.
        formula = 24 * parameters / 1e9
        outcome.tables["PPO: memory of a process, without activations by the formula"] = [
            {"": who, "peak, GB": f"{runs[0]['peak_memory'] / 1e9:.3g}", "formula, GB": f"{formula:.3g}"}
            for who, runs in report["runs"].items()
            if who.startswith("ours")
        ]
    yield outcome
    if not args.rehearse:
        measure_speed(args, outcome, "PPO compiled", f"{sizes} --compile --pairs 1")
        yield outcome
    if args.trl_1_12:  # TRL holds the logits of whole sequences, and so gets them in four parts
        few = "--dtype float32 --pairs 1 --micro_batch_size" + (" 4" if args.rehearse else " 128")
        measure_speed(args, outcome, "PPO next to TRL", f"{sizes} {few}", args.trl_1_12)
    else:
        outcome.left_out.append("TRL 1.12: --trl_1_12 names no interpreter")
    yield outcome


def grpo(args: Args) -> Iterator[Outcome]:
    outcome = Outcome()
    sizes = (
        "--chapter 3 --base_model qwen2.5-0.5b --query_length 128 --response_length 256 --mean_response 0 "
        "--batch_size 128 --minibatches 2 --micro_batch_size 32 --epochs 1 --dtype float32 bfloat16 --updates 2 "
        "--pairs 1"
    )
    if args.rehearse:
        sizes = (
            "--chapter 3 --base_model tales --query_length 8 --response_length 4 --mean_response 3 --batch_size 8 "
            "--samples_per_prompt 2 --epochs 1 --updates 1 --pairs 1"
        )
    measure_speed(args, outcome, "GRPO", sizes)
    yield outcome
    if args.trl_1_16:
        measure_speed(args, outcome, "GRPO next to TRL", f"{sizes} --dtype float32", args.trl_1_16)
    else:
        outcome.left_out.append("TRL 1.16: --trl_1_16 names no interpreter")
    yield outcome


# ---- Passes ----------------------------------------------------------------------------------------------------


def line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Least squares: a and b of y = a + b x, where each point counts by its relative error."""
    x, y = torch.tensor(points, dtype=torch.float64).T
    design = torch.stack([1 / y, x / y], 1)
    return tuple(torch.linalg.lstsq(design, torch.ones_like(y).unsqueeze(1)).solution[:, 0].tolist())


def fit_passes(costs: dict[int, float]) -> dict[str, float]:
    """The constants of passes.py from what a pass costs two models, in tokens. costs: by number of parameters."""
    (small, of_small), (large, of_large) = sorted(costs.items())
    launches = (of_small - of_large) / (1 / small - 1 / large)
    return {"COST_OF_LAUNCHES": launches, "COST_OF_WEIGHTS": of_large - launches / large}


def passes_step(args: Args) -> Iterator[Outcome]:
    device, few, points = default_device(), args.rehearse, {}
    outcome, costs, rows = Outcome(), {}, []
    for shape in ("tales", "sums" if few else "gpt2"):
        model = AutoModelForCausalLM.from_config(speed.SHAPES[shape]()).eval().to(device)
        parameters = sum(p.numel() for p in model.parameters())
        points[shape] = []
        for count in (1, 4) if few else (4, 16, 64, 128, 256):
            tokens = torch.randint(1, model.config.vocab_size, (count, 16 if few else 64), device=device)

            def one_pass(model=model, tokens=tokens) -> None:
                with torch.autocast(device.type, torch.bfloat16):
                    model(tokens, use_cache=False).logits.logsumexp(-1).sum().backward()

            points[shape].append((tokens.numel(), seconds_of(one_pass, device, 1 if few else 5)))
        fixed, per_token = line(points[shape])
        costs[parameters] = fixed / per_token
        rows.append({"": shape, "a pass, ms": f"{1e3 * fixed:.3g}", "a token, µs": f"{1e6 * per_token:.3g}"})
        rows[-1]["a pass, in tokens"] = f"{costs[parameters]:.3g}"
    found = fit_passes(costs)

    # Attention over the same rows as one group, and as several: what a group costs, in tokens of one row more.
    width, length, times = (2, 16, []) if few else (12, 512, [])
    for groups in (1, 2, 4):
        parts = [
            torch.randn(16 // groups, width, length, 64, device=device, requires_grad=True) for _ in range(groups)
        ]

        def attend(parts=parts) -> None:
            with torch.autocast(device.type, torch.bfloat16):
                sum(F.scaled_dot_product_attention(x, x, x, is_causal=True).sum() for x in parts).backward()

        times.append((groups - 1, seconds_of(attend, device, 1 if few else 10)))
    together, per_group = line(times)
    found["COST_OF_GROUP"] = per_group / together * 16 * length
    now = passes.COST_OF_WEIGHTS | {}, passes.COST_OF_LAUNCHES | {}, packing.COST_OF_GROUP | {}
    used = dict(
        zip(("COST_OF_WEIGHTS", "COST_OF_LAUNCHES", "COST_OF_GROUP"), (one["cuda"] for one in now), strict=True)
    )
    outcome.tables["the time of a pass, forward and backward"] = rows
    outcome.tables["constants for cuda"] = [
        {"": name, "in use": f"{used[name]:.3g}", "fitted": f"{found[name]:.3g}"} for name in used
    ]
    outcome.details |= {"passes": points, "groups": times, "fitted": found}
    yield outcome


def padding(args: Args) -> Iterator[Outcome]:
    """Rows of 100 to 500 tokens forward and backward: all at the longest; in passes of similar length; packed."""
    device, few, pad_id = default_device(), args.rehearse, 0
    model = AutoModelForCausalLM.from_config(speed.SHAPES["tales" if few else "pythia-160m"]()).eval().to(device)
    lengths = speed.spread_lengths(*((4, 16, 10, 6) if few else (100, 500, 300, 64)))
    columns = torch.arange(int(lengths.max()))
    tokens = torch.randint(1, model.config.vocab_size, (len(lengths), len(columns)))
    tokens = tokens.masked_fill(columns < len(columns) - lengths.unsqueeze(1), pad_id)

    def read(plan: list[passes.Pass]) -> None:
        for one in plan:
            rows = passes.pack(tokens[one.rows], pad_id, one.longest).to(device)
            with torch.autocast(device.type, torch.bfloat16):
                lm.read_tokens(model, rows, pad_id, slice(None)).sum().backward()

    count, whole = (1 if few else 10), [passes.Pass(rows=torch.arange(len(lengths)), longest=len(columns))]
    seconds = {"padded": seconds_of(lambda: read(whole), device, count)}
    plan = passes.plan_passes(lengths, model)
    seconds["in passes"] = seconds_of(lambda: read(plan), device, count)
    packing.enable(model)
    if passes.is_packed(model):
        seconds["packed"] = seconds_of(lambda: read(whole), device, count)
    seconds["without padding, if only tokens took time"] = seconds["padded"] * int(lengths.sum()) / tokens.numel()
    rows = [{"": way, "ms": f"{1e3 * x:.3g}", "speed": f"{seconds['padded'] / x:.2f}"} for way, x in seconds.items()]
    yield Outcome({"rows of different lengths, forward and backward": rows}, details=seconds)


# ---- vLLM ------------------------------------------------------------------------------------------------------

OUTPUT_LAYER = '"hf_overrides": {"head_dtype": "float32"},'  # of lib/services/engine_vllm.py


def vllm_words(code: Path, case: Case, dtype: str, python: str) -> list[str | Path]:
    """How a run with vLLM is started, from a copy of the package."""
    words = [code / "ppo_rlhf/rlvr/asynchronous.py", *case.words.split(), "--dtype", dtype, "--engine", "vllm"]
    return [*words, "--vllm_python", python]


def vllm(args: Args) -> Iterator[Outcome]:
    """Each way twice: an update of rlvr/asynchronous.py; vLLM samples its first batch with the learner's weights."""
    if not args.vllm:
        yield Outcome(left_out=["vLLM: --vllm names no interpreter"])
        return
    outcome, rows, ways = Outcome(), [], [("float32", True, "0")]
    if not args.rehearse:
        ways = [(dtype, head, invariant) for dtype in TOLERANCES for head in (True, False) for invariant in "01"]
        ways = [way for way in ways if way != ("float32", False, "1") and way != ("float32", False, "0")]
    case = cases_of(args.folder / "worlds", args.rehearse)["chapter 3, GRPO"]
    for dtype, head, invariant in ways:
        metrics, weights = [], []
        way = f"{dtype}, output layer in {'float32' if head else dtype}, VLLM_BATCH_INVARIANT={invariant}"
        for turn in range(2):
            place = args.folder / "vllm" / f"{dtype}-{head}-{invariant}-{turn}"
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(SCRIPTS, place / "code/ppo_rlhf", ignore=shutil.ignore_patterns("__pycache__"))
            engine = place / "code/ppo_rlhf/lib/services/engine_vllm.py"
            if OUTPUT_LAYER not in engine.read_text():
                raise RuntimeError(f"{engine} has no line {OUTPUT_LAYER}")
            if not head:
                engine.write_text(engine.read_text().replace(OUTPUT_LAYER, ""))
            words = vllm_words(place / "code", case, dtype, args.vllm)
            more = {"VLLM_BATCH_INVARIANT": invariant, "RAY_USAGE_STATS_ENABLED": "0"}
            more["PYTHONPATH"] = os.pathsep.join([str(place / "code"), os.environ.get("PYTHONPATH", "")])
            if start(words, place / "run", **more).wait():
                outcome.problems.append(f"{way}: {last_words(place / 'run')}")
                break
            (run,), (model,) = (place / "run/runs").iterdir(), (place / "run/models").glob("*/policy/*.safetensors")
            metrics.append(metrics_of(run))
            weights.append(model.read_bytes())
        if metrics:
            same = (
                "" if len(metrics) < 2 else "yes" if weights[0] == weights[1] and metrics[0] == metrics[1] else "no"
            )
            names = ("async/kl", "async/ess", "async/largest_gap")
            rows.append({"": way, **{f"`{x}`": f"{metrics[0][0][x]:.3g}" for x in names}, "two runs bit-equal": same})
            outcome.details[way] = metrics
            outcome.tables["log-probs of vLLM next to the learner's, in the first update"] = rows
        yield outcome


# ---- All steps -------------------------------------------------------------------------------------------------

STEPS: dict[str, tuple[Callable[[Args], Iterator[Outcome]], float]] = {  # and the minutes that each may take
    "machine": (machine, 1),
    "numbers": (numbers, 9),
    "ppo": (ppo, 9),
    "grpo": (grpo, 8),
    "passes": (passes_step, 2),
    "padding": (padding, 4),
    "vllm": (vllm, 12),
}


def do_alone(args: Args) -> None:
    """One step, in this process. A step yields what it has found so far, which is written each time."""
    started = time.monotonic()

    def write(outcome: Outcome, status: str) -> None:
        facts = {"status": status, "seconds": time.monotonic() - started, "commit": commit()}
        write_json(args.folder / f"{args.alone}.json", facts | {"rehearsal": args.rehearse} | finite(asdict(outcome)))

    for outcome in STEPS[args.alone][0](args):
        write(outcome, "unfinished")
    write(outcome, "problems" if outcome.problems else "done" if outcome.tables else "left out")


def finite(x: Any) -> Any:
    """The same, with words for numbers that JSON has not."""
    if isinstance(x, dict):
        return {key: finite(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [finite(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def words_of(args: Args) -> list[str]:
    """What the process of a step is called with."""
    given = {"folder": args.folder, "trl_1_12": args.trl_1_12, "trl_1_16": args.trl_1_16, "vllm": args.vllm}
    words = [word for name, value in given.items() if value for word in (f"--{name}", str(value))]
    return [*words, "--rehearse"] if args.rehearse else words


def do_all(args: Args) -> dict[str, dict[str, Any]]:
    """The results of all steps that were asked for, and of those that were done before."""
    args.folder.mkdir(parents=True, exist_ok=True)
    results = {}
    for name, (_, minutes) in STEPS.items():
        file = args.folder / f"{name}.json"
        known = json.loads(file.read_text()) if file.exists() else None
        again = known is None or known["status"] != "done"
        if name in args.steps or (again and not args.steps):
            file.unlink(missing_ok=True)
            print(f"{name}: at most {minutes} minutes", flush=True)
            log, reason = args.folder / f"step-{name}", ""
            process = start([HERE / "gpu.py", *words_of(args), "--alone", name], log, new_session=True)
            try:
                process.wait(60 * minutes)
            except subprocess.TimeoutExpired:
                reason = f"it took more than {minutes} minutes"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
                    process.wait()
            known = json.loads(file.read_text()) if file.exists() else {"status": "unfinished", "commit": commit()}
            if known["status"] == "unfinished":
                empty = {"rehearsal": args.rehearse, "tables": {}, "left_out": [], "problems": []}
                known = empty | known | {"status": "failed", "reason": reason or last_words(log)}
                write_json(file, known)
            words = [known["status"], known.get("reason", ""), *known["problems"], *known["left_out"]]
            print(*("  " + word for word in words if word), sep="\n", flush=True)
        if known:
            results[name] = known
    return results


def page(about: dict[str, Any], results: dict[str, dict[str, Any]]) -> str:
    """The Markdown page."""
    where = f"{about['device']}, torch {about['versions']['torch']}, transformers {about['versions']['transformers']}"
    lines = ["# The first hour on a GPU", "", f"`{about['command']}` at {about['commit']}: {where}."]
    if about["rehearsal"]:
        lines += ["", "This is a rehearsal on a CPU: every step is tiny, and no number means anything."]
    for name, result in results.items():
        took = f", {result['seconds']:.0f} s" if "seconds" in result else ""
        at = "" if result["commit"] == about["commit"] else f", at {result['commit']}"
        lines += ["", f"## {name}: {result['status']}{took}{at}"]
        notes = [result.get("reason", ""), *result["problems"], *(f"left out: {x}" for x in result["left_out"])]
        if any(notes):
            lines += ["", *(f"- {note}" for note in notes if note)]
        for title, rows in result["tables"].items():
            lines += ["", f"{title[0].upper()}{title[1:]}:", "", markdown(rows).rstrip()]
    return "\n".join(lines) + "\n"


def main(args: Args) -> int:
    absolute = {
        name: os.path.abspath(value)
        for name in ("trl_1_12", "trl_1_16", "vllm")
        if "/" in (value := getattr(args, name))
    }
    args = replace(args, folder=args.folder.resolve(), **absolute)
    if unknown := [name for name in args.steps if name not in STEPS]:
        raise InputError(f"--steps {unknown[0]}: one of {', '.join(STEPS)}")
    if args.alone:
        do_alone(args)
        return 0
    if not args.rehearse and not torch.cuda.is_available():
        raise InputError("PyTorch finds no GPU; --rehearse goes without one")
    results = do_all(args)
    name = cpu_name() if args.rehearse else torch.cuda.get_device_name()
    command = " ".join(["bash benchmark/gpu.sh", *sys.argv[1:]])
    about = {"command": command, "commit": commit(), "device": name, "rehearsal": args.rehearse}
    about["versions"] = {name: version(name) for name in ("torch", "transformers", "accelerate")}
    output = args.output or (args.folder if args.rehearse else ROOT / "benchmark/results/gpu")
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / "gpu.json", about | {"steps": results})
    (output / "gpu.md").write_text(page(about, results))
    print(f"results in {output / 'gpu.json'} and {output / 'gpu.md'}")
    return int(any(result["status"] in ("failed", "problems") for result in results.values()))


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Args, description=__doc__)))
    except InputError as error:
        exit_with(str(error))
