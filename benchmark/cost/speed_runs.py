"""A process that speed.py starts: one training run, of ours or of TRL, with the time at which each update ends.

    python speed_runs.py ours|trl <settings.json> <result.json>

TRL has an environment of its own, so nothing of ppo_rlhf is imported before the run is known to be ours.
"""

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


def seconds_of(function: Callable[[], Any], count: int) -> float:
    """The median time of a function, with what it has launched; the first two calls don't count."""
    found = []
    for _ in range(count + 2):
        started = time.perf_counter()
        function()
        if GPU:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return statistics.median(found[2:])


def matmul_rate(dtype: torch.dtype) -> float:
    """FLOP/s of square matrix products now."""
    size, count = (8192, 20) if GPU else (1024, 5)
    a, b = (torch.randn(size, size, device=DEVICE).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: a @ b, count)


def ours(settings: dict[str, Any], updates: list[float], responses: list[float]) -> None:
    """train_policy.py or rlvr/policy.py as they are; their runs note the time when they log an update."""
    from ppo_rlhf import train_policy
    from ppo_rlhf.rlvr import policy as rlvr_policy

    script = train_policy if settings["chapter"] == 1 else rlvr_policy
    log = train_policy.Run.log

    def log_with_time(run: train_policy.Run, step: int, metrics: dict[str, float]) -> None:
        updates.append(time.time())
        responses.append(metrics.get("val/sequence_lengths", settings["response_length"]))
        log(run, step, metrics)

    train_policy.Run.log = log_with_time
    script.train(train_policy.parse_args(script.PRESETS, settings["flags"]))


def trl(settings: dict[str, Any], updates: list[float], responses: list[float]) -> None:
    """TRL's PPOTrainer or GRPOTrainer, which generates by itself and keeps all activations, as ours does."""
    import transformers
    from datasets import Dataset

    steps = settings["minibatches"] * settings["epochs"] if settings["chapter"] == 3 else 1  # reported in an update

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *more: Any, **kwargs: Any) -> None:
            if state.global_step % steps == 0:
                updates.append(time.time())

    def is_right(completions: list[str], completion_ids: list[list[int]], **columns: list) -> list[float]:
        responses.extend(map(len, completion_ids))
        return [float(text.endswith(end)) for text, end in zip(completions, columns["end"], strict=True)]

    def load(kind: str, **more: Any) -> torch.nn.Module:
        auto_class = getattr(transformers, f"AutoModelFor{kind}")
        return auto_class.from_pretrained(settings["model"], dtype=torch.float32, **more)

    tokenizer = transformers.AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    lines = Path(settings["problems"], "problems_train.jsonl").read_text().splitlines()
    problems = [json.loads(line) for line in lines]
    batch_size, micro_batch_size = settings["batch_size"], settings["micro_batch_size"]
    arguments = {
        "output_dir": ".",
        "per_device_train_batch_size": micro_batch_size,
        "gradient_accumulation_steps": batch_size // settings["minibatches"] // micro_batch_size,
        "bf16": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    if settings["chapter"] == 1:
        from trl.experimental.ppo import PPOConfig, PPOTrainer

        responses.append(settings["response_length"])
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
        dataset = Dataset.from_dict({"input_ids": [tokenizer.encode(row["question"]) for row in problems]})
        config = PPOConfig(
            **arguments,
            total_episodes=batch_size * settings["updates"],
            local_rollout_forward_batch_size=batch_size,
            num_mini_batches=1,
            num_ppo_epochs=settings["epochs"],
            response_length=settings["response_length"],
            temperature=0.7,
            learning_rate=1e-5,
            num_sample_generations=0,
        )
        trainer = PPOTrainer(
            args=config,
            processing_class=tokenizer,
            model=load("CausalLM"),
            ref_model=load("CausalLM"),
            reward_model=load("SequenceClassification", num_labels=1),
            value_model=load("SequenceClassification", num_labels=1),
            train_dataset=dataset,
            eval_dataset=dataset,
            callbacks=[Clock()],
        )
    else:
        from trl import GRPOConfig, GRPOTrainer

        rows = [{"prompt": f"{row['question']}\n", "end": row["answer"].splitlines()[-1]} for row in problems]
        config = GRPOConfig(
            **arguments,
            max_steps=steps * settings["updates"],
            steps_per_generation=batch_size // micro_batch_size,
            num_generations=settings["samples_per_prompt"],
            shuffle_dataset=False,
            num_iterations=settings["epochs"],
            max_completion_length=settings["response_length"],
            learning_rate=1e-6,
            disable_dropout=True,
            gradient_checkpointing=False,
        )
        trainer = GRPOTrainer(
            args=config,
            processing_class=tokenizer,
            model=load("CausalLM"),
            reward_funcs=is_right,
            train_dataset=Dataset.from_list(rows),
            callbacks=[Clock()],
        )
    trainer.train()


if __name__ == "__main__":
    who, settings_file, result_file = sys.argv[1:]
    settings = json.loads(Path(settings_file).read_text())
    updates: list[float] = []  # seconds since the epoch
    responses: list[float] = []  # tokens
    {"ours": ours, "trl": trl}[who](settings, updates, responses)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result = {
        "updates": updates,
        "tokens": {"query": settings["query_tokens"], "response": statistics.mean(responses)},
        "peak_memory": torch.cuda.max_memory_allocated() if GPU else resident,  # bytes
        "matmul_rate": matmul_rate(getattr(torch, settings["dtype"])),
        "device": torch.cuda.get_device_name() if GPU else "cpu",
    }
    if os.environ.get("RANK", "0") == "0":
        Path(result_file).write_text(json.dumps(result))
