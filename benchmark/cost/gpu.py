"""A step of the first hour on a GPU: what a CPU could not show. benchmark/gpu.sh makes all of them.

    python benchmark/cost/gpu.py machine
    python benchmark/cost/gpu.py ppo --trl                             # with TRL, from the package index
    python benchmark/cost/gpu.py numbers --rehearse --folder tried     # tiny, and on a CPU where there is no GPU

README.md says what each step is for. What a step has found is in <folder>/<step>.json and <step>.md after each of its
parts, whatever becomes of the next one. The exit status is 1 if it has found a problem.
"""

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
import tyro
from transformers import AutoConfig, AutoModelForCausalLM

from benchmark import worlds
from benchmark.cost import speed, speed_runs
from benchmark.curves.compare import markdown
from ppo_rlhf.train_policy import InputError, commit, run_script, write_json

ROOT = speed.ROOT


@dataclass(frozen=True)
class Args:
    step: tyro.conf.Positional[Literal["machine", "numbers", "ppo", "grpo"]]
    rehearse: bool = False
    """make everything tiny, also on a CPU: to find mistakes of this script before the day"""
    trl: bool = False
    """ppo and grpo: compare with TRL, which is fetched from the package index, once"""
    folder: Path = ROOT / "benchmark/results/gpu"
    """where the results are kept"""
    runs: Path = ROOT / "benchmark/runs/gpu"
    """where runs, models and TRL are kept"""


class Findings:
    """The results of a step, which are on disk after each `add`."""

    def __init__(self, args: Args):
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else speed.cpu_name()
        versions = {name: version(name) for name in ("torch", "transformers", "accelerate")}
        self.about = {"commit": commit(), "device": device, "rehearsal": args.rehearse, **versions}
        self.file = args.folder / args.step
        self.tables: dict[str, list[dict[str, str]]] = {}
        self.problems: list[str] = []
        self.details: dict[str, Any] = {}  # numbers that the tables round

    def add(self, title: str, *rows: dict[str, str]) -> None:
        """Add rows to a table."""
        self.tables.setdefault(title, []).extend(rows)
        lines = [f"# {self.file.name}", "", *(f"- {name}: {value}" for name, value in self.about.items())]
        lines += ["", *(f"- problem: {problem}" for problem in self.problems)]
        for name, table in self.tables.items():
            lines += ["", f"## {name}", "", markdown(table).rstrip() if table else "nothing"]
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.with_suffix(".md").write_text("\n".join(lines) + "\n")
        found = {"tables": self.tables, "problems": self.problems, "details": self.details}
        write_json(self.file.with_suffix(".json"), self.about | found)


def machine(args: Args, findings: Findings) -> None:
    device = speed_runs.DEVICE
    small = torch.zeros(64, device=device)
    large = torch.zeros(2**18 if args.rehearse else 2**30, dtype=torch.uint8, device=device)
    count = 20 if args.rehearse else 2000

    def launches() -> None:
        for _ in range(count):
            small.add_(1)

    def waits() -> None:
        for _ in range(count):
            small.add_(1)[0].item()

    found = {
        "a launch, µs": 1e6 * speed_runs.seconds_of(launches, 5) / count,
        "a launch, an index and a wait, µs": 1e6 * speed_runs.seconds_of(waits, 5) / count,
        "memory, GB/s": 2 * len(large) / speed_runs.seconds_of(large.clone, 5) / 1e9,
    }
    for dtype in TOLERANCES:
        found[f"matrix products in {dtype}, TFLOP/s"] = speed_runs.matmul_rate(getattr(torch, dtype)) / 1e12
    findings.add("The machine", *({"": name, "measured": f"{value:.3g}"} for name, value in found.items()))


# ---- Numbers next to the CPU's ---------------------------------------------------------------------------------

# How far a metric of the first update may be from the CPU's: relative, absolute. The noise of sampling is the same,
# and a token differs only if its number falls between two roundings of a probability. None of this has been tried on
# a GPU, so these are estimates.
TOLERANCES = {"float32": (1e-3, 1e-3), "bfloat16": (0.1, 0.05)}
NOT_COMPARED = "^time$|^eps$|time/|elapsed/|first_ratio_gap"  # times, and a metric that is larger on a GPU

COMMANDS = {
    "chapter 1": "train_both.py --preset tales --base_model {tales}/model --task.query_dataset {tales}/stories.txt "
    "--reward.label_dataset {tales}/labels/sentiment/offline_5k.json --reward.num_train 16 --reward.batch_size 8 "
    "--reward.rollout_batch_size 32 --reward.normalize_samples 32 --policy.ppo.total_episodes {episodes} "
    "--policy.ppo.batch_size {batch} --policy.ppo.whiten_groups 2 --policy.save_interval 0 "
    "--policy.trace_interval 0 --reward.dtype {dtype} --policy.dtype {dtype}",
    "chapter 2": "tldr/all.py --preset posts --base_model {posts}/model --task.posts {posts} "
    "--task.comparisons {posts} --sft.num_train 48 --sft.batch_size 24 --sft.eval_posts 8 --reward.batch_size 24 "
    "--reward.normalize_posts 0 --policy.ppo.total_episodes {episodes} --policy.ppo.batch_size {batch} "
    "--policy.ppo.nminibatches 2 --policy.save_interval 0 --policy.eval_interval 0 --policy.eval_posts 8 "
    "--policy.trace_interval 0 --sft.dtype {dtype} --reward.dtype {dtype} --policy.dtype {dtype}",
    "chapter 3, critic": "rlvr/policy.py --preset sums --base_model {sums}/model --task.problems {sums} "
    "--ppo.total_episodes {episodes} --ppo.batch_size {batch} --ppo.nminibatches 2 --save_interval 0 "
    "--eval_interval 0 --eval_problems 8 --eval_samples 0 --trace_interval 0 --dtype {dtype}",
}
GRPO = " --ppo.samples_per_prompt 4 --ppo.advantage grpo --ppo.critic_warmup 0"
COMMANDS["chapter 3, GRPO"] = COMMANDS["chapter 3, critic"] + GRPO


def write_worlds(folder: Path, width: int) -> dict[str, Path]:
    """Tiny worlds, each with a model of two layers and random weights. Returns their folders."""
    folders = {name: folder / name for name in ("tales", "posts", "sums")}
    tales = worlds.Tales(stories=300, train_comparisons=64, test_comparisons=32)
    worlds.write_tales(folders["tales"], tales, train_model=False)
    sizes = {"train_posts": 48, "validation_posts": 16, "train_comparisons": 48, "validation_comparisons": 16}
    worlds.write_posts(folders["posts"], worlds.Posts(**sizes), train_model=False)
    worlds.write_sums(folders["sums"], "sums", worlds.Sums(train_problems=64), train_model=False)
    for world in folders.values():
        shape = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8}
        config = AutoConfig.from_pretrained(world / "model", head_dim=width // 8, **shape)
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(world / "model")
    return folders


def start(words: list[str], folder: Path, **environment: str) -> subprocess.Popen:
    """Run a script of ours in a folder, which gets its output as log.txt."""
    folder.mkdir(parents=True)
    own = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", **environment}
    command = [sys.executable, str(ROOT / "ppo_rlhf" / words[0]), *words[1:]]
    with (folder / "log.txt").open("w") as log:
        return subprocess.Popen(command, cwd=folder, env=own, stdout=log, stderr=subprocess.STDOUT)


def far_off(ours: pd.Series, theirs: pd.Series, dtype: str) -> pd.Series:
    """How many times the tolerance each metric differs by; the farthest is the last. A nan differs from a number."""
    relative, absolute = TOLERANCES[dtype]
    compared = theirs[~theirs.index.str.contains(NOT_COMPARED) & ~(theirs.isna() & ours[theirs.index].isna())]
    off = (ours[compared.index] - compared).abs() / (absolute + relative * compared.abs())
    return off.fillna(math.inf).sort_values()


def numbers(args: Args, findings: Findings) -> None:
    shutil.rmtree(args.runs / "numbers", ignore_errors=True)
    folders = write_worlds(args.runs / "numbers", 32 if args.rehearse else 512)  # packing needs 512
    cases = [(name, dtype, []) for name in COMMANDS for dtype in TOLERANCES]
    if args.rehearse:
        cases = cases[0::4] + cases[3::4]  # each command once, both precisions
    else:
        cases.append(("chapter 1", "float32", ["--policy.compile"]))
    for number, (name, dtype, on_gpu) in enumerate(cases):
        title, place = " ".join([f"{name}, {dtype}", *on_gpu]), args.runs / "numbers" / str(number)
        sizes = {"batch": 16, "episodes": 16} if args.rehearse else {"batch": 64, "episodes": 192}
        words = COMMANDS[name].format(**folders, **sizes, dtype=dtype).split()
        both = {"cpu": start(words, place / "cpu", CUDA_VISIBLE_DEVICES="")}
        both["gpu"] = start([*words, *on_gpu], place / "gpu")
        failed = [where for where, process in both.items() if process.wait()]
        for where in failed:
            said = (place / where / "log.txt").read_text().split("\n")
            findings.problems.append(f"{title}, {where}: {next(filter(None, reversed(said)), 'it said nothing')}")
        rows = []
        for run in [] if failed else sorted((place / "cpu/runs").glob("*/")):
            stage = run.name.split("__")[0]
            (of_gpu,) = (place / "gpu/runs").glob(f"{stage}__*/")
            ours, theirs = (pd.read_csv(one / "metrics.csv").iloc[0] for one in (of_gpu, run))
            off = far_off(ours, theirs, dtype)
            for metric in off.index[off > 1]:
                said = f"{metric} is {ours[metric]:.5g}, not {theirs[metric]:.5g}"
                findings.problems.append(f"{title}, {stage}: beyond the tolerance: {said}")
            furthest = f"`{off.index[-1]}`, {off.iloc[-1]:.2g} tolerances"
            rows.append({"": title, "stage": f"`{stage}`", "metrics": str(len(off)), "furthest off": furthest})
        findings.add("The first update next to the CPU's", *rows)


# ---- Speed -----------------------------------------------------------------------------------------------------

SPEED = {
    "ppo": speed.Args(base_model="gpt2", batch_size=512, query_length=64, updates=4, pairs=2),
    "grpo": speed.Args(
        chapter=3,
        base_model="qwen2.5-0.5b",
        query_length=128,
        response_length=256,
        batch_size=128,
        minibatches=2,
        micro_batch_size=32,
        epochs=1,
        updates=2,
        pairs=1,
    ),
}
TINY = {"base_model": "tales", "query_length": 8, "response_length": 4, "batch_size": 8, "epochs": 1, "updates": 1}


def speeds(args: Args, findings: Findings) -> None:
    base = replace(SPEED[args.step], folder=args.runs / "speed")
    if args.rehearse:
        base = replace(base, **TINY, minibatches=1, micro_batch_size=0, pairs=1)
    cases = {dtype: replace(base, dtype=dtype) for dtype in TOLERANCES}
    if args.step == "ppo" and not args.rehearse:  # a CPU needs half a minute to compile
        for dtype in TOLERANCES:
            cases[f"{dtype}, compiled"] = replace(base, dtype=dtype, ours="--compile", pairs=1)
    if args.trl:  # which holds the logits of whole sequences
        cases["next to TRL"] = replace(base, pairs=1, trl=True, micro_batch_size=base.batch_size // 4)
    for name, case in cases.items():
        try:
            report = speed.report(case)
        except InputError as error:
            findings.problems.append(f"{name}: {error}")
            report = {"speed": [], "utilisation": []}
        findings.details[name] = report
        findings.add(f"{name}: speed", *report["speed"])
        findings.add(f"{name}: utilisation", *report["utilisation"])


STEPS: dict[str, Callable[[Args, Findings], None]] = {
    "machine": machine,
    "numbers": numbers,
    "ppo": speeds,
    "grpo": speeds,
}


def main(args: Args) -> None:
    if not args.rehearse and not torch.cuda.is_available():
        raise InputError("PyTorch finds no GPU; --rehearse goes without one")
    args = replace(args, runs=args.runs.resolve())
    findings = Findings(args)
    STEPS[args.step](args, findings)
    print(*findings.problems, f"results in {findings.file}.json and {findings.file}.md", sep="\n")
    sys.exit(int(bool(findings.problems)))


if __name__ == "__main__":
    run_script(lambda: main(tyro.cli(Args, description=__doc__)))
