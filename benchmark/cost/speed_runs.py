"""The processes that speed.py starts: one training run each, of ours or of a peer, with the times of its updates.

    python speed_runs.py ours|trl <settings.json> <result.json>

settings.json is made by speed.py. The result holds: `updates`, the time (seconds since the epoch) at which each
update ended; `phases`, seconds in each part of each update (ours only); `peak_memory` in bytes (on a CPU, the
resident memory of the process, on a GPU, its tensors); `matmul_rate` in FLOP/s; `device`; and in chapter 3 `tokens`:
of a query and of a response on average, and of the shortest and the longest response. A peer runs in an environment
of its own, so nothing of ppo_rlhf is imported before it is known to be ours.
"""

import json
import os
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Settings = dict[str, Any]
Result = dict[str, Any]


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Square matrix products on this device now, in FLOP/s: the median of twenty, on a CPU of five."""

    def products(size: int, count: int) -> float:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        seconds = []
        for _ in range(count + 2):
            synchronize(device)
            started = time.perf_counter()
            a @ b
            synchronize(device)
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[2:])

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


def tokens_of(queries: list[int], responses: list[int]) -> dict[str, float]:
    """What chapter 3 says of lengths. queries, responses: tokens of each."""
    means = {"query": statistics.mean(queries), "response": statistics.mean(responses)}
    return means | {"shortest_response": min(responses), "longest_response": max(responses)}


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


class Stopwatch:
    """Seconds spent in functions. On a GPU, events in its stream are read at the end, so that nothing waits."""

    def __init__(self, device: torch.device):
        self.device = device
        self.spans: dict[str, list[tuple]] = defaultdict(list)

    def mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def around(self, phase: str, function: Callable) -> Callable:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self.mark()
            result = function(*args, **kwargs)
            self.spans[phase].append((start, self.mark()))
            return result

        return timed

    def seconds(self) -> dict[str, float]:
        """Of each phase, over the whole run."""
        if self.device.type != "cuda":
            return {phase: sum(end - start for start, end in spans) for phase, spans in self.spans.items()}
        torch.cuda.synchronize()
        return {phase: sum(s.elapsed_time(e) for s, e in spans) / 1000 for phase, spans in self.spans.items()}


def ours(settings: Settings) -> Result:
    """ppo_rlhf/train_policy.py as it is, with a stopwatch around the functions that it calls."""
    from ppo_rlhf import train_policy
    from ppo_rlhf.lib.services import cli
    from ppo_rlhf.lib.services.run import Run

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    watch, updates, phases = Stopwatch(device), [], []

    def log(run: Run, step: int, metrics: dict[str, float]) -> None:
        updates.append(time.time())
        seconds = watch.seconds()
        phases.append(seconds | {"scoring": seconds["scoring"] - seconds["generation"]})
        watch.spans.clear()
        log_untimed(run, step, metrics)

    add_affixes, compute_rewards, begun = train_policy.add_affixes, train_policy.compute_rewards, []

    def begin_rollout(*args: Any) -> Any:
        begun.append(watch.mark())
        return add_affixes(*args)

    def end_rollout(*args: Any) -> Any:
        watch.spans["scoring"].append((begun[-1], watch.mark()))  # with the generation in it
        return compute_rewards(*args)

    log_untimed, Run.log = Run.log, log
    train_policy.generate = watch.around("generation", train_policy.generate)
    train_policy.add_affixes = begin_rollout
    train_policy.compute_rewards = end_rollout
    train_policy.ppo_update = watch.around("training", train_policy.ppo_update)

    flags = {
        "base_model": settings["model"],
        "dtype": settings["dtype"],
        "log_interval": 0,
        "save_interval": 0,
        "task.query_dataset": settings["texts"],
        "task.query_length": settings["query_length"],
        "task.start_text": None,
        "task.end_text": None,
        "task.response_length": settings["response_length"],
        "task.truncate_after": 0,
        "rewards.trained_model": settings["reward"],
        "ppo.total_episodes": settings["batch_size"] * settings["updates"],
        "ppo.batch_size": settings["batch_size"],
        "ppo.noptepochs": settings["epochs"],
        "ppo.whiten_groups": settings["whiten_groups"],
        "ppo.local_micro_batch_size": settings["micro_batch_size"] // settings["processes"],
    }
    argv = as_argv(flags) + (["--compile"] if settings["compile"] else [])
    train_policy.train(cli.parse_args(train_policy.PRESETS, argv))
    return finish(updates, device, settings, phases=phases)


def rlvr(settings: Settings) -> Result:
    """ppo_rlhf/rlvr/policy.py as it is, with GRPO, and a stopwatch around the functions that it calls.

    Scoring is everything between sampling and training: the policy reads its responses, and the verifier judges them.
    Problems come in the order of their file, as in `grpo`.
    """
    from ppo_rlhf.lib.data import problems
    from ppo_rlhf.lib.services import cli
    from ppo_rlhf.lib.services.run import Run
    from ppo_rlhf.rlvr import policy as rlvr_policy

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    watch, updates, phases, queries, responses = Stopwatch(device), [], [], [], []

    def rollout(setup: Any, *args: Any, **kwargs: Any) -> Any:
        result = rollout_timed(setup, *args, **kwargs)
        length = setup.args.task.response_length
        queries.extend((result.query_responses[:, :-length] != setup.ids.pad).sum(1).tolist())
        responses.extend(result.mask.sum(1).tolist())
        return result

    def log(run: Run, step: int, metrics: dict[str, float]) -> None:
        updates.append(time.time())
        phases.append(watch.seconds())
        watch.spans.clear()
        log_untimed(run, step, metrics)

    def in_order(count: int, batch: int, number: int, seed: int) -> torch.Tensor:
        return torch.arange(number * batch, (number + 1) * batch) % count

    problems.problems_of_batch = in_order
    rollout_timed, rlvr_policy.rollout = watch.around("scoring", rlvr_policy.rollout), rollout
    log_untimed, Run.log = Run.log, log
    rlvr_policy.Sampler.sample = watch.around("generation", rlvr_policy.Sampler.sample)
    rlvr_policy.update = watch.around("training", rlvr_policy.update)

    flags = {
        "preset": "sums-grpo",
        "base_model": settings["model"],
        "dtype": settings["dtype"],
        "log_interval": 0,
        "save_interval": 0,
        "trace_interval": 0,
        "eval_interval": 0,
        "eval_problems": 8,
        "eval_samples": 0,
        "task.problems": settings["problems"],
        "task.kind_column": "",
        "task.prompt_suffix": "\n",
        "task.prompt_length": settings["query_length"],
        "task.response_length": settings["response_length"],
        "ppo.total_episodes": settings["batch_size"] * settings["updates"],
        "ppo.batch_size": settings["batch_size"],
        "ppo.samples_per_prompt": settings["samples_per_prompt"],
        "ppo.nminibatches": settings["minibatches"],
        "ppo.noptepochs": settings["epochs"],
        "ppo.lr": 1e-6,
        "ppo.local_micro_batch_size": settings["micro_batch_size"] // settings["processes"],
    }
    argv = [*as_argv(flags), "--ppo.share_prefixes" if settings["share_prefixes"] else "--ppo.no-share_prefixes"]
    rlvr_policy.train(cli.parse_args(rlvr_policy.PRESETS, argv))
    return finish(updates, device, settings, phases=phases, tokens=tokens_of(queries, responses))


# ---- Peers -----------------------------------------------------------------------------------------------------


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
        bf16=settings["dtype"] == "bfloat16",
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

    updates, queries, responses = [], [], []
    steps = settings["minibatches"] * settings["epochs"]  # of the optimiser, in an update
    minibatch_size = settings["batch_size"] // settings["minibatches"]
    micro_batch_size = settings["micro_batch_size"] or minibatch_size

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *more: Any, **kwargs: Any) -> None:
            if state.global_step % steps == 0:
                updates.append(time.time())

    def is_right(completions: list[str], completion_ids: list[list[int]], **columns: list) -> list[float]:
        queries.extend(columns["tokens"])
        responses.extend(map(len, completion_ids))
        return [float(text.endswith(end)) for text, end in zip(completions, columns["end"], strict=True)]

    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    problems = (Path(settings["problems"]) / "problems_train.jsonl").read_text().splitlines()
    rows = [
        {"prompt": row["question"] + "\n", "end": row["answer"].splitlines()[-1]} for row in map(json.loads, problems)
    ]
    rows = [row | {"tokens": len(tokenizer(row["prompt"])["input_ids"])} for row in rows]
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
        bf16=settings["dtype"] == "bfloat16",
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
        train_dataset=Dataset.from_list([row for row in rows if row["tokens"] <= settings["query_length"]]),
        callbacks=[Clock()],
    )
    trainer.train()
    return finish(updates, trainer.accelerator.device, settings, tokens=tokens_of(queries, responses))


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
