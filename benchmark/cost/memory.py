"""The most that a process holds in an update of chapter 2's PPO, measured: what scaling.py's formula is checked by.

    python benchmark/cost/memory.py   # two sizes, two and four processes: benchmark/results/memory.json

Each measurement is a run of tldr_policy.py with random weights, on a CPU, its networks sharded with FSDP2 (gloo). Of
its second update it keeps the most that the process had resident in the rollout and in the training, less what it had
before the networks were loaded, and less the same of a run with networks of no size: what libraries take. Large
tensors are given back to the kernel when they are freed, so that what is left is tensors.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tyro
from transformers import GPTNeoXConfig, PretrainedConfig

from benchmark.cost import speed
from ppo_rlhf.lib.files import write_json
from ppo_rlhf.lib.run import commit, cpu_name

RESULT = speed.ROOT / "benchmark/results/memory.json"


def shape(width: int, layers: int, heads: int, vocab_size: int) -> Callable[[], PretrainedConfig]:
    return lambda: GPTNeoXConfig(
        **speed.PYTHIA | {"vocab_size": vocab_size},
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
    )


SHAPES = {"17M": shape(384, 6, 6, 8192), "48M": shape(512, 10, 8, 16384)}
NOTHING = "nothing"
PROCESSES = (2, 4)
QUERY_LENGTH, RESPONSE_LENGTH = 96, 32  # tokens of a post with its prompt, and of a summary
LOCAL_BATCH = 8  # summaries of one process in an update
SETTINGS = {  # arguments of tldr_policy.py other than sizes, and episodes in a micro-batch
    "as it is": (8, []),
    "checkpointing, frozen models in bfloat16": (2, ["--gradient_checkpointing", "--frozen_bfloat16"]),
}


@dataclass(frozen=True)
class Args:
    folder: Path = speed.ROOT / "benchmark" / "runs" / "memory"
    """where models and posts are kept"""
    output: Path = RESULT
    """file that gets what was measured, as JSON"""


def make_inputs(args: Args, base_model: str) -> dict[str, str]:
    """A model with random weights, a reward model and posts that are a little too long. Returns their paths."""
    speed.SHAPES[base_model] = SHAPES.get(base_model) or shape(8, 1, 1, 256)
    inputs = speed.make_inputs(speed.Args(base_model=base_model, folder=args.folder))
    folder = args.folder / base_model
    post = {"id": "0", "subreddit": "w1", "title": "w2", "post": "w3 " * (QUERY_LENGTH - 12), "summary": "w4"}
    for split in ("train", "validation", "test"):
        (folder / f"posts_{split}.jsonl").write_text((json.dumps(post) + "\n") * 64)
    return inputs | {"posts": str(folder)}


def measure(args: Args, base_model: str, processes: int, setting: str) -> dict[str, int]:
    """One run: bytes at most in the rollout and in the training, of whichever process has most; tokens of a row."""
    inputs, (micro_batch, flags) = make_inputs(args, base_model), SETTINGS[setting]
    folder = args.folder / "last"
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("peaks-*.json"):
        file.unlink()
    sizes = {
        "base_model": inputs["model"],
        "rewards.trained_model": inputs["reward"],
        "task.posts": inputs["posts"],
        "task.query_length": QUERY_LENGTH,
        "task.response_length": RESPONSE_LENGTH,
        "ppo.batch_size": LOCAL_BATCH * processes,
        "ppo.total_episodes": 2 * LOCAL_BATCH * processes,
        "ppo.noptepochs": 1,
        "ppo.local_micro_batch_size": micro_batch,
        "eval_interval": 0,
        "log_interval": 0,
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command += [__file__, "run", *(word for name, value in sizes.items() for word in (f"--{name}", str(value)))]
    environment = {**os.environ, "PYTHONPATH": str(speed.ROOT), "PPO_RLHF_THREADS": "1"}
    environment |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "MALLOC_MMAP_THRESHOLD_": str(2**16)}
    with (folder / "log.txt").open("w") as log:
        subprocess.run([*command, *flags], cwd=folder, env=environment, stdout=log, stderr=log, check=True)
    peaks = [json.loads(file.read_text()) for file in folder.glob("peaks-*.json")]
    return {key: max(peak[key] for peak in peaks) for key in peaks[0]}


# ---- One process -----------------------------------------------------------------------------------------------


def resident(which: str) -> int:
    """Bytes: VmRSS, what is resident now, or VmHWM, the most that was since the last `forget_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which))
    return 1024 * int(line.split()[1])


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def run(argv: list[str]) -> None:
    """tldr_policy.py, up to the end of its second update."""
    from ppo_rlhf import tldr_policy
    from ppo_rlhf.lib import cli, processes

    load_networks, ppo_update = tldr_policy.load_networks, tldr_policy.ppo_update
    seen: dict[str, int] = {}
    updates: list[int] = []

    def measured_load(*arguments: Any) -> Any:
        seen["before"] = resident("VmRSS")
        return load_networks(*arguments)

    def measured_update(actor_critic: Any, optimizer: Any, **arguments: Any) -> Any:
        seen["rollout"] = resident("VmHWM") - seen["before"]
        seen["sequence_length"] = arguments["rollout"].query_responses.shape[1]
        forget_peak()
        result = ppo_update(actor_critic, optimizer, **arguments)
        seen["training"] = resident("VmHWM") - seen["before"]
        updates.append(1)
        if len(updates) == 2:
            del seen["before"]
            Path(f"peaks-{os.environ['RANK']}.json").write_text(json.dumps(seen))
            processes.fail_together("")  # waits for all
            os._exit(0)
        forget_peak()
        return result

    processes.keep_freed_memory = lambda: None
    tldr_policy.load_networks, tldr_policy.ppo_update = measured_load, measured_update
    tldr_policy.train(cli.parse_args(tldr_policy.PRESETS, argv))


def main(args: Args) -> None:
    found = []
    for processes in PROCESSES:
        for setting, (micro_batch, _) in SETTINGS.items():
            libraries = measure(args, NOTHING, processes, setting)
            for base_model in SHAPES:
                run = measure(args, base_model, processes, setting)
                run |= {phase: run[phase] - libraries[phase] for phase in ("rollout", "training")}
                sizes = {"base_model": base_model, "processes": processes, "setting": setting}
                sizes |= {"micro_batch": micro_batch, "rows": LOCAL_BATCH}
                found.append(sizes | {"response_length": RESPONSE_LENGTH} | run)
                print(json.dumps(found[-1]), flush=True)
    versions = {name: version(name) for name in ("torch", "transformers")}
    machine = {"cpu": cpu_name(), "cores": os.cpu_count()}
    write_json(args.output, {"commit": commit(), "machine": machine, "versions": versions, "runs": found})


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(sys.argv[2:])
    else:
        main(tyro.cli(Args, description=__doc__))
