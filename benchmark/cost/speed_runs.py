"""The processes that speed.py starts: one training run each, of ours or of TRL, with the times of its updates.

    python speed_runs.py ours|trl <settings.json> <result.json>

settings.json is made by speed.py. The result holds: `updates`, the time (seconds since the epoch) at which each
update ended; `peak_memory` in bytes (on a CPU, the resident memory of the process, on a GPU, its tensors);
`matmul_rate` in FLOP/s; `device`; and in chapter 3 `tokens`, of a query and of a response on average. TRL runs in an
environment of its own, so nothing of ppo_rlhf is imported before the run is known to be ours.
"""

import json
import lzma
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Settings = dict[str, Any]
Result = dict[str, Any]


def seconds_of(function: Callable[[], Any], device: torch.device, count: int) -> float:
    """The median time of a function, with what it has launched; the first two calls don't count."""
    found = []
    for _ in range(count + 2):
        synchronize(device)
        started = time.perf_counter()
        function()
        synchronize(device)
        found.append(time.perf_counter() - started)
    return statistics.median(found[2:])


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Square matrix products on this device now, in FLOP/s: the median of twenty, on a CPU of five."""

    def products(size: int, count: int) -> float:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        return seconds_of(lambda: a @ b, device, count)

    if device.type == "cuda":
        return 2 * 8192**3 / products(8192, 20)
    size = 256
    while size < 2048 and products(size, 1) < 0.05:  # a CPU without bfloat16 would take a minute for the largest
        size *= 2
    return 2 * size**3 / products(size, 5)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def as_argv(flags: dict[str, Any]) -> list[str]:
    return [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]


def problems_of(settings: Settings, tokenizer: Any) -> list[dict[str, Any]]:
    """Chapter 3's problems that fit, in the order of their file: prompt, end of the answer, tokens of the prompt."""
    rows, path = [], Path(settings["problems"], "problems_train.jsonl")
    text = path.read_bytes() if path.exists() else lzma.decompress(Path(f"{path}.xz").read_bytes())
    for line in text.decode().splitlines():
        problem = json.loads(line)
        prompt = problem["question"] + "\n"
        tokens = len(tokenizer(prompt)["input_ids"])
        if tokens <= settings["query_length"]:
            rows.append({"prompt": prompt, "end": problem["answer"].splitlines()[-1], "tokens": tokens})
    return rows


def mean_tokens(settings: Settings, rows: list[dict[str, Any]], responses: list[float]) -> dict[str, float]:
    """Of a query and of a response. Every run reads the same problems, the first ones."""
    count = settings["updates"] * settings["batch_size"] // settings["samples_per_prompt"]
    queries = [rows[i % len(rows)]["tokens"] for i in range(count)]
    return {"query": statistics.mean(queries), "response": statistics.mean(responses)}


def finish(updates: list[float], device: torch.device, settings: Settings, **more: Any) -> Result:
    """Everything that is measured at the end of a run."""
    if device.type == "cuda":
        peak_memory = torch.cuda.max_memory_allocated(device)
    else:
        peak_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    rate = matmul_rate(device, getattr(torch, settings["dtype"]))
    return {"updates": updates, "peak_memory": peak_memory, "matmul_rate": rate, "device": name} | more


# ---- Ours ------------------------------------------------------------------------------------------------------


def log_times(run_class: type, updates: list[float], lengths: list[float]) -> None:
    """Let every run of a chapter note when an update ends, and the mean tokens of chapter 3's responses."""
    log_untimed = run_class.log

    def log(run: Any, step: int, metrics: dict[str, float]) -> None:
        updates.append(time.time())
        if "val/sequence_lengths" in metrics:
            lengths.append(metrics["val/sequence_lengths"])
        log_untimed(run, step, metrics)

    run_class.log = log


def shared_flags(settings: Settings) -> dict[str, Any]:
    """The arguments of a run of ours that both chapters have."""
    micro_batch_size = settings["micro_batch_size"] or settings["batch_size"]
    return {
        "base_model": settings["model"],
        "dtype": settings["dtype"],
        "log_interval": 0,
        "save_interval": 0,
        "task.response_length": settings["response_length"],
        "ppo.total_episodes": settings["batch_size"] * settings["updates"],
        "ppo.batch_size": settings["batch_size"],
        "ppo.noptepochs": settings["epochs"],
        "ppo.local_micro_batch_size": micro_batch_size // settings["processes"],
        "ppo.local_rollout_batch_size": settings["batch_size"],
    }


def ours(settings: Settings) -> Result:
    """ppo_rlhf/train_policy.py as it is."""
    from ppo_rlhf import train_policy

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    updates = []
    log_times(train_policy.Run, updates, [])
    flags = shared_flags(settings) | {
        "task.query_dataset": settings["texts"],
        "task.query_length": settings["query_length"],
        "task.start_text": None,
        "task.end_text": None,
        "task.truncate_after": 0,
        "rewards.trained_model": settings["reward"],
        "ppo.whiten_groups": settings["whiten_groups"],
    }
    argv = as_argv(flags) + (["--compile"] if settings["compile"] else [])
    train_policy.train(train_policy.parse_args(train_policy.PRESETS, argv))
    return finish(updates, device, settings)


def rlvr(settings: Settings) -> Result:
    """ppo_rlhf/rlvr/policy.py with GRPO. Problems come in the order of their file, as in `grpo`."""
    from transformers import AutoTokenizer

    from ppo_rlhf.lib import command_line, run
    from ppo_rlhf.rlvr import policy as rlvr_policy, problems

    def in_order(count: int, batch: int, number: int, seed: int) -> torch.Tensor:
        return torch.arange(number * batch, (number + 1) * batch) % count

    problems.problems_of_batch = in_order
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    updates, responses = [], []
    log_times(run.Run, updates, responses)
    flags = shared_flags(settings) | {
        "preset": "sums-grpo",
        "trace_interval": 0,
        "eval_interval": 0,
        "eval_problems": 8,
        "eval_samples": 0,
        "task.problems": settings["problems"],
        "task.kind_column": "",
        "task.prompt_suffix": "\n",
        "task.prompt_length": settings["query_length"],
        "ppo.samples_per_prompt": settings["samples_per_prompt"],
        "ppo.nminibatches": settings["minibatches"],
        "ppo.lr": 1e-6,
    }
    argv = [*as_argv(flags), "--ppo.share_prefixes" if settings["share_prefixes"] else "--ppo.no-share_prefixes"]
    rlvr_policy.train(command_line.parse_args(rlvr_policy.PRESETS, argv))
    rows = problems_of(settings, AutoTokenizer.from_pretrained(settings["model"]))
    return finish(updates, device, settings, tokens=mean_tokens(settings, rows, responses))


# ---- TRL -------------------------------------------------------------------------------------------------------


def trl(settings: Settings) -> Result:
    """TRL's PPOTrainer, with a value network of its own as it wants it."""
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TrainerCallback,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    updates = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            updates.append(time.time())

    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    texts = [json.loads(line) for line in Path(settings["texts"]).read_text().splitlines()]
    queries = [tokenizer.encode(text)[: settings["query_length"]] for text in texts]
    policy, reference = (AutoModelForCausalLM.from_pretrained(settings["model"]) for _ in range(2))
    reward, value = (
        AutoModelForSequenceClassification.from_pretrained(settings["model"], num_labels=1) for _ in range(2)
    )
    micro_batch_size = settings["micro_batch_size"] or settings["batch_size"]
    config = PPOConfig(
        output_dir=settings["folder"],
        total_episodes=settings["batch_size"] * settings["updates"],
        per_device_train_batch_size=micro_batch_size,
        gradient_accumulation_steps=settings["batch_size"] // micro_batch_size,
        local_rollout_forward_batch_size=settings["batch_size"],
        num_mini_batches=1,
        num_ppo_epochs=settings["epochs"],
        response_length=settings["response_length"],
        temperature=0.7,
        learning_rate=1e-5,
        bf16=False,
        num_sample_generations=0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    dataset = Dataset.from_dict({"input_ids": queries})
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=reward,
        value_model=value,
        train_dataset=dataset,
        eval_dataset=dataset,
        callbacks=[Clock()],
    )
    trainer.train()
    return finish(updates, trainer.accelerator.device, settings)


def grpo(settings: Settings) -> Result:
    """TRL's GRPOTrainer, with TRL's own generation, and without gradient checkpointing, which would only slow it."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    updates, responses = [], []
    steps = settings["minibatches"] * settings["epochs"]  # of the optimiser, in an update
    minibatch_size = settings["batch_size"] // settings["minibatches"]
    micro_batch_size = settings["micro_batch_size"] or minibatch_size

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *more: Any, **kwargs: Any) -> None:
            if state.global_step % steps == 0:
                updates.append(time.time())

    def is_right(completions: list[str], completion_ids: list[list[int]], **columns: list) -> list[float]:
        responses.extend(map(len, completion_ids))
        return [float(text.endswith(end)) for text, end in zip(completions, columns["end"], strict=True)]

    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    rows = problems_of(settings, tokenizer)
    config = GRPOConfig(
        output_dir=settings["folder"],
        max_steps=steps * settings["updates"],
        per_device_train_batch_size=micro_batch_size,
        gradient_accumulation_steps=minibatch_size // micro_batch_size,
        steps_per_generation=settings["batch_size"] // micro_batch_size,
        num_generations=settings["samples_per_prompt"],
        shuffle_dataset=False,
        num_iterations=settings["epochs"],
        max_completion_length=settings["response_length"],
        learning_rate=1e-6,
        disable_dropout=True,
        gradient_checkpointing=False,
        bf16=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        reward_funcs=is_right,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
    )
    trainer.train()
    return finish(updates, trainer.accelerator.device, settings, tokens=mean_tokens(settings, rows, responses))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        print(__doc__)
        sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
    kind, settings_file, result_file = sys.argv[1:]
    settings = json.loads(Path(settings_file).read_text())
    runs = {1: {"ours": ours, "trl": trl}, 3: {"ours": rlvr, "trl": grpo}}
    result = runs[settings["chapter"]][kind](settings)
    if os.environ.get("RANK", "0") == "0":
        Path(result_file).write_text(json.dumps(result))
