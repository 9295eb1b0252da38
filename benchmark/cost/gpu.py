"""The first hour on a GPU: what a CPU could not show, in steps that keep their results.

    bash benchmark/gpu.sh                                        # one H100 or H200: at most half an hour, an estimate
    bash benchmark/gpu.sh --trl_1_12 make --trl_1_16 make        # and TRL, in environments of its own
    bash benchmark/gpu.sh --steps numbers ppo                    # some steps alone
    bash benchmark/gpu.sh --rehearse --folder tried              # every step, but tiny and on a CPU

Each step is a process of its own and leaves <folder>/<step>.json, whatever becomes of the others. Results come
together in benchmark/results/gpu. Repeat the command to do again what has not succeeded, or name a step to do it in
any case. A step that takes longer than it may is ended. The exit status is 1 if a step has failed or found a problem.
cost/README.md says what each step is for.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
import tyro

from benchmark import worlds
from benchmark.cost import speed, speed_runs
from benchmark.curves.compare import markdown
from ppo_rlhf.lib.errors import InputError, exit_with
from ppo_rlhf.lib.processes import default_device
from ppo_rlhf.lib.run import commit

ROOT = speed.ROOT


@dataclass(frozen=True)
class Args:
    rehearse: bool = False
    """make every step tiny, on the CPU: to find mistakes of this script before the day"""
    steps: tuple[Literal["machine", "numbers", "ppo", "grpo"], ...] = ()
    """which steps, even if they were done before; none: all that were not"""
    trl_1_12: str = ""
    """absolute path of an interpreter that has TRL 1.12, for ppo; `make`: one is made, from the package index"""
    trl_1_16: str = ""
    """the same with TRL 1.16, for grpo"""
    folder: Path = ROOT / "benchmark/runs/gpu"
    """where runs and the results of steps are kept; a rehearsal leaves gpu.json and gpu.md there, too"""
    alone: str = ""
    """used within: the one step that this process does"""


@dataclass
class Outcome:
    """What a step has found so far."""

    file: str
    commit: str
    status: str = "failed"  # in the end done, or problems
    tables: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)  # numbers that the tables round

    def save(self) -> None:
        Path(self.file).write_text(json.dumps(asdict(self), indent=1))


def start(words: list[str | Path], folder: Path, new_session: bool = False, **environment: str) -> subprocess.Popen:
    """Run Python with these words in a folder, which gets its output as log.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {"PYTHONPATH": str(ROOT), **os.environ, "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", **environment}
    with (folder / "log.txt").open("w") as log:
        where = {"cwd": folder, "stdout": log, "stderr": subprocess.STDOUT, "start_new_session": new_session}
        return subprocess.Popen([sys.executable, *map(str, words)], env=own, **where)


def last_words(folder: Path) -> str:
    """The last line that a command has printed."""
    lines = (folder / "log.txt").read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def machine(args: Args, outcome: Outcome) -> None:
    device = default_device()
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
        "a launch, µs": 1e6 * speed_runs.seconds_of(launches, device, 5) / count,
        "a launch, an index and a wait, µs": 1e6 * speed_runs.seconds_of(waits, device, 5) / count,
        "memory, GB/s": 2 * len(large) / speed_runs.seconds_of(large.clone, device, 5) / 1e9,
    }
    for dtype in TOLERANCES:
        rate = 1e9 if args.rehearse else speed_runs.matmul_rate(device, getattr(torch, dtype))
        found[f"matrix products in {dtype}, TFLOP/s"] = rate / 1e12
    outcome.tables["the machine"] = [{"": name, "measured": f"{value:.3g}"} for name, value in found.items()]


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
    "--task.comparisons {posts} --sft.batch_size 24 --sft.eval_posts 8 --reward.batch_size 24 "
    "--reward.normalize_posts 0 --policy.ppo.total_episodes {episodes} --policy.ppo.batch_size {batch} "
    "--policy.ppo.nminibatches 2 --policy.save_interval 0 --policy.eval_interval 0 --policy.eval_posts 8 "
    "--policy.trace_interval 0 --sft.dtype {dtype} --reward.dtype {dtype} --policy.dtype {dtype}",
    "chapter 3, critic": "rlvr/policy.py --preset sums --base_model {sums}/model --task.problems {sums} "
    "--ppo.total_episodes {episodes} --ppo.batch_size {batch} --ppo.nminibatches 2 --save_interval 0 "
    "--eval_interval 0 --eval_problems 8 --eval_samples 0 --trace_interval 0 --dtype {dtype}",
}
GRPO = " --ppo.samples_per_prompt 4 --ppo.advantage grpo --ppo.critic_warmup 0"
COMMANDS["chapter 3, GRPO"] = COMMANDS["chapter 3, critic"] + GRPO


def write_worlds(folder: Path, few: bool) -> None:
    """Small worlds whose models have learned next to nothing, wide enough for packing unless in a rehearsal."""
    shape = {"width": 16, "layers": 1, "heads": 2} if few else {"width": 512, "layers": 2, "heads": 8}
    sizes = worlds.Tales(stories=300, lm_steps=2, train_comparisons=64, test_comparisons=32, **shape)
    worlds.write_tales(folder / "tales", sizes, train_model=True)
    sizes = worlds.Posts(
        train_posts=48,
        validation_posts=16,
        train_comparisons=48,
        validation_comparisons=16,
        lm_quotes=200,
        lm_threads=1_000,
        lm_quote_steps=2,
        lm_thread_steps=2,
        **shape,
    )
    worlds.write_posts(folder / "posts", sizes, train_model=True)
    sizes = worlds.Sums(train_problems=64, lm_solutions=2_000, lm_short_steps=2, lm_steps=2, **shape)
    worlds.write_sums(folder / "sums", "sums", sizes, train_model=True)


def far_off(ours: pd.Series, theirs: pd.Series, dtype: str) -> pd.Series:
    """How many times the tolerance each metric differs by; the farthest is the last. A nan differs from a number."""
    relative, absolute = TOLERANCES[dtype]
    compared = theirs[~theirs.index.str.contains(NOT_COMPARED) & ~(theirs.isna() & ours[theirs.index].isna())]
    off = (ours[compared.index] - compared).abs() / (absolute + relative * compared.abs())
    return off.fillna(math.inf).sort_values()


def numbers(args: Args, outcome: Outcome) -> None:
    batch, updates = (16, 1) if args.rehearse else (64, 3)
    shutil.rmtree(args.folder / "worlds", ignore_errors=True)
    write_worlds(args.folder / "worlds", args.rehearse)
    folders = {name: args.folder / "worlds" / name for name in ("tales", "posts", "sums")}
    cases = [(name, dtype, "") for name in COMMANDS for dtype in TOLERANCES]
    if args.rehearse:
        cases = [cases[0], cases[3], cases[4], cases[7]]  # each command once, both precisions
    else:
        cases.append(("chapter 1", "float32", "--policy.compile"))
    rows = outcome.tables.setdefault("the first update next to the CPU's", [])
    for name, dtype, on_gpu in cases:
        title = f"{name}, {dtype} {on_gpu}".strip()
        place = args.folder / "numbers" / title.replace(", ", "-").replace(" ", "")
        shutil.rmtree(place, ignore_errors=True)
        words = COMMANDS[name].format(**folders, dtype=dtype, batch=batch, episodes=batch * updates).split()
        words[0] = str(ROOT / "ppo_rlhf" / words[0])
        both = {
            "cpu": start(words, place / "cpu", CUDA_VISIBLE_DEVICES=""),
            "gpu": start([*words, *on_gpu.split()], place / "gpu"),
        }
        failed = [where for where, process in both.items() if process.wait()]
        outcome.problems += [f"{title}, {where}: {last_words(place / where)}" for where in failed]
        for run in [] if failed else sorted((place / "cpu/runs").glob("*/")):
            stage = run.name.split("__")[0]
            (of_gpu,) = (place / "gpu/runs").glob(f"{stage}__*/")
            ours, theirs = (pd.read_csv(one / "metrics.csv").iloc[0] for one in (of_gpu, run))
            off = far_off(ours, theirs, dtype)
            for metric in off.index[off > 1]:
                said = f"{metric} is {ours[metric]:.5g}, not {theirs[metric]:.5g}"
                outcome.problems.append(f"{title}, {stage}: beyond the tolerance: {said}")
            furthest = f"`{off.index[-1]}`, {off.iloc[-1]:.2g} tolerances"
            rows.append({"": title, "stage": f"`{stage}`", "metrics": str(len(off)), "furthest off": furthest})
        outcome.save()


# ---- Speed -----------------------------------------------------------------------------------------------------


SPEED = {  # what speed.py measures, on a GPU and in a rehearsal
    "ppo": (
        "--base_model gpt2 --batch_size 512 --query_length 64 --updates 4 --pairs 2",
        "--batch_size 8 --query_length 8 --response_length 4 --epochs 1 --updates 1 --pairs 1",
    ),
    "grpo": (
        "--chapter 3 --base_model qwen2.5-0.5b --query_length 128 --response_length 256 --batch_size 128 "
        "--minibatches 2 --micro_batch_size 32 --epochs 1 --updates 2 --pairs 1",
        "--chapter 3 --query_length 8 --response_length 4 --batch_size 8 --epochs 1 --updates 1 --pairs 1",
    ),
}


def speeds(args: Args, outcome: Outcome) -> None:
    step = args.alone
    words = SPEED[step][args.rehearse]
    runs = {f"{step}, {dtype}": f"{words} --dtype {dtype}" for dtype in TOLERANCES}
    if step == "ppo" and not args.rehearse:  # a CPU needs half a minute to compile
        for dtype in TOLERANCES:
            runs[f"ppo, {dtype}, compiled"] = f"{words} --dtype {dtype} --compile --pairs 1"
        words += " --micro_batch_size 128"  # TRL holds the logits of whole sequences
    if trl := {"ppo": args.trl_1_12, "grpo": args.trl_1_16}[step]:
        runs[f"{step} next to TRL"] = f"{words} --pairs 1 --trl {trl}"
    for name, flags in runs.items():
        place = args.folder / "speed" / name.replace(", ", "-").replace(" ", "-")
        shutil.rmtree(place, ignore_errors=True)
        command = [ROOT / "benchmark/cost/speed.py", *flags.split(), "--device", "cpu" if args.rehearse else "cuda"]
        command += ["--folder", args.folder / "speed", "--output", "report.json"]
        if start(command, place).wait():
            outcome.problems.append(f"{name}: {last_words(place)}")
        else:
            report = json.loads((place / "report.json").read_text())
            outcome.details[name] = report
            outcome.tables[f"{name}: speed"] = report["speed"]
            outcome.tables[f"{name}: utilisation"] = report["utilisation"]
        outcome.save()


STEPS: dict[str, tuple[Callable[[Args, Outcome], None], float]] = {  # and the minutes that each may take
    "machine": (machine, 1),
    "numbers": (numbers, 9),
    "ppo": (speeds, 9),
    "grpo": (speeds, 8),
}


def do_all(args: Args) -> dict[str, Outcome]:
    """The results of all steps that were asked for, and of those that were done before."""
    results = {}
    for name, (_, minutes) in STEPS.items():
        file = args.folder / f"{name}.json"
        known = Outcome(**json.loads(file.read_text())) if file.exists() else None
        if name in args.steps or (not args.steps and (known is None or known.status != "done")):
            print(f"{name}: at most {minutes} minutes", flush=True)
            words = ["--folder", args.folder, "--trl_1_12", args.trl_1_12, "--trl_1_16", args.trl_1_16]
            words += ["--rehearse"] if args.rehearse else []
            log = args.folder / f"step-{name}"
            Outcome(file=str(file), commit=commit()).save()
            process = start([__file__, *words, "--alone", name], log, new_session=True)
            try:
                process.wait(None if args.rehearse else 60 * minutes)
                reason = last_words(log)
            except subprocess.TimeoutExpired:
                reason = f"it took more than {minutes} minutes"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
            known = Outcome(**json.loads(file.read_text()))
            if known.status == "failed":
                known.problems.append(reason)
                known.save()
            print(*(f"  {word}" for word in [known.status, *known.problems]), sep="\n", flush=True)
        if known:
            results[name] = known
    return results


def page(about: dict[str, Any], results: dict[str, Outcome]) -> str:
    """The Markdown page."""
    lines = ["# The first hour on a GPU", "", *(f"- {name}: {value}" for name, value in about.items())]
    for name, result in results.items():
        lines += ["", f"## {name}: {result.status}, at {result.commit}", "", *(f"- {x}" for x in result.problems)]
        for title, rows in result.tables.items():
            lines += ["", f"{title[0].upper()}{title[1:]}:", "", markdown(rows).rstrip() if rows else "nothing"]
    return "\n".join(lines) + "\n"


def main(args: Args) -> int:
    if args.alone:
        outcome = Outcome(file=str(args.folder / f"{args.alone}.json"), commit=commit())
        STEPS[args.alone][0](args, outcome)
        outcome.status = "problems" if outcome.problems else "done"
        outcome.save()
        return 0
    if not args.rehearse and not torch.cuda.is_available():
        raise InputError("PyTorch finds no GPU; --rehearse goes without one")
    args.folder.mkdir(parents=True, exist_ok=True)
    results = do_all(replace(args, folder=args.folder.resolve()))
    about = {name: version(name) for name in ("torch", "transformers", "accelerate")}
    about["command"] = " ".join(["bash benchmark/gpu.sh", *sys.argv[1:]])
    about["device"] = f"{speed.cpu_name()}, a rehearsal" if args.rehearse else torch.cuda.get_device_name()
    output = args.folder if args.rehearse else ROOT / "benchmark/results/gpu"
    output.mkdir(parents=True, exist_ok=True)
    steps = {name: asdict(result) for name, result in results.items()}
    (output / "gpu.json").write_text(json.dumps(about | {"steps": steps}, indent=1))
    (output / "gpu.md").write_text(page(about, results))
    print(f"results in {output / 'gpu.json'} and {output / 'gpu.md'}")
    return int(any(result.status != "done" for result in results.values()))


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Args, description=__doc__)))
    except InputError as error:
        exit_with(str(error))
