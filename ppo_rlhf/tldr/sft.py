"""Supervised fine-tuning: chapter 2, TL;DR summarisation, stage 1 of 3.

A pretrained language model learns to summarise posts by imitating the summaries that people wrote (Stiennon et
al. 2020). This is ordinary language modelling on post and summary together. The model learns the form of the task,
and that a summary ends with the end-of-text token:

    1. one pass over the posts in random order: AdamW, with a learning rate that falls to zero on a cosine
    2. summarise held-out posts at a temperature near zero, and compare with the reference summaries (ROUGE)

`train()` has both steps, and `sft_update()` below it makes one optimiser step. Loading, logs and checkpoints are
those of `train_policy.py`. Next: `tldr/reward.py` and `tldr/policy.py`; `tldr/all.py` runs all three.

Marks like [T21] name an implementation detail. The original is vwxyzjn/summarize_from_feedback_details at commit
ee77a9a, which reproduced OpenAI's; files and lines next to marks are the original's. Marks like [X21] are places
where we differ on purpose: docs/reference.

    python ppo_rlhf/tldr/sft.py --preset posts                            # no network, two minutes
    python ppo_rlhf/tldr/sft.py --dtype bfloat16 --local_micro_batch_size 8             # Pythia 1B, one GPU
    accelerate launch --num_processes 8 ppo_rlhf/tldr/sft.py --dtype bfloat16 --local_micro_batch_size 8 --track
    python ppo_rlhf/tldr/sft.py --resume runs/<run>                       # resume after an interruption
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import tqdm
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.tldr import models, packing, posts
from ppo_rlhf.tldr.shares import deal
from ppo_rlhf.train_policy import (
    Arguments,
    Run,
    average_gradients,
    check_finite,
    check_model,
    checked,
    has_stop,
    input_errors,
    keyed_generator,
    load_pretrained,
    make_accelerator,
    parse_args,
    read_tokens,
    run_script,
    scaled_logits,
    split_evenly,
    weights_dtype,
)
from ppo_rlhf.train_reward import prepare

# ---- Arguments -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Args(Arguments):
    preset: str = "tldr"
    """names a set of defaults: tldr, posts, reviews"""
    exp_name: Annotated[str, Field(pattern=r"^[\w.+ -]{1,150}$")] = "tldr_sft"
    """name of this experiment"""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 44413
    """seed of the order of the posts and of the sampling noise"""
    base_model: str = "EleutherAI/pythia-1b-deduped"
    """causal language model to start from: a folder, a name on the hub, `posts` or `smollm2-135m`"""
    trust_remote_code: bool = False
    """run Python code that comes with the base model"""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """arithmetic; bfloat16 keeps float32 weights and casts in matrix products"""
    gradient_checkpointing: bool = False
    """keep only the inputs of each layer and compute the rest again in the backward pass; saves memory, costs a
    forward pass"""
    task: posts.TaskArgs = field(default_factory=posts.TaskArgs)
    """queries and responses"""
    num_train: NonNegativeInt = 0
    """posts to train on, the first of the data set; 0: all"""
    epochs: PositiveInt = 1
    """passes over the posts"""
    batch_size: PositiveInt = 128
    """posts per optimiser step, over all processes"""
    lr: PositiveFloat = 3e-6
    """learning rate of the first step; it falls to 0 along a cosine"""
    weight_decay: NonNegativeFloat = 0.01
    """weight decay of AdamW"""
    eval_posts: NonNegativeInt = 0
    """held-out posts of each split to summarise after training; 0: all"""
    local_micro_batch_size: PositiveInt = 8
    """posts per forward and backward pass on one process, at most; changes memory and speed, not numbers"""
    local_rollout_batch_size: PositiveInt = 64
    """posts per pass without gradients on one process, at most; changes memory and speed, not numbers"""
    resume: str = ""
    """folder of a run to resume: runs/<run>; its arguments are taken from there"""
    save_interval: NonNegativeInt = 200
    """steps between checkpoints; 0: one at the end"""
    track: bool = False
    """log to a tracker as well, in addition to metrics.csv and TensorBoard"""
    tracker: Literal["wandb", "trackio"] = "wandb"
    """Weights & Biases; or Trackio, which needs no account and keeps everything on this machine"""
    wandb_project_name: str = "ppo_rlhf"
    """project on the tracker"""
    wandb_entity: str | None = None
    """team on Weights & Biases"""
    upload_model: bool = False
    """push the trained model to the Hugging Face hub"""
    hf_entity: str = ""
    """user or organisation on the hub; empty: whoever is logged in"""
    hf_private: bool = False
    """make the repository on the hub private"""


PRESETS = {
    "tldr": Args(task=posts.TASKS["tldr"]),
    # SFT sees few posts. Its summaries still repeat and invent statements, so PPO has something to improve.
    "posts": Args(
        preset="posts",
        seed=1,
        base_model="posts",
        num_train=1_536,
        batch_size=16,
        lr=5e-4,
        eval_posts=512,
        local_micro_batch_size=16,
        task=posts.TASKS["posts"],
    ),
    "reviews": Args(
        preset="reviews",
        seed=1,
        base_model="smollm2-135m",
        num_train=4_096,
        batch_size=32,
        lr=5e-5,
        eval_posts=128,
        local_micro_batch_size=32,
        task=posts.TASKS["reviews"],
    ),
}


# ---- Train -----------------------------------------------------------------------------------------------------


def train(args: Args, timestamp: int | None = None) -> Path:
    """Fine-tune a language model and return the folder models/<run>/sft, on every process.

    timestamp: ends the run's name, if another run shares it. Raises InputError, a ValueError: on bad arguments before
    anything is written; later if a number is impossible, or if a disk fails.
    """
    args = checked(args)
    accelerator = make_accelerator(args.dtype)
    device = accelerator.device
    task = args.task
    local_batch = split_evenly("--batch_size", args.batch_size, accelerator.num_processes, "processes")

    tokenizer = models.load_tokenizer(args.base_model, args.trust_remote_code)
    ids = posts.task_ids(task, tokenizer)
    train_posts = posts.read_posts(task, tokenizer, "train", args.num_train)
    held_out = {split: posts.read_posts(task, tokenizer, split, args.eval_posts) for split in ("validation", "test")}
    steps_per_epoch = math.ceil(len(train_posts) / args.batch_size)
    sizes = {
        "posts": len(train_posts),
        "steps_per_epoch": steps_per_epoch,
        "steps": args.epochs * steps_per_epoch,
        "batch": args.batch_size,
        "local_batch": local_batch,
    }
    # [T17] There is no dropout.   sft.py#L153-L157
    dtype = weights_dtype(args, frozen=False)
    lm_backbone = load_pretrained(args.base_model, dtype, args.trust_remote_code).to(device)
    packing.enable(lm_backbone)
    check_model(lm_backbone, args.base_model, task.query_length + task.response_length, ids.pad)
    prepare(lm_backbone, args)
    model = LanguageModel(lm_backbone, ids.vocab_size)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, eps=1e-5, weight_decay=args.weight_decay, fused=True)

    run = Run(args, accelerator, sizes, timestamp)
    info = {
        "kind": "sft model",
        "base_model": args.base_model,
        "vocab_size": ids.vocab_size,
        "task": dataclasses.asdict(task),
    }
    run.try_to_save(lambda folder: models.save_language_model(folder, lm_backbone, tokenizer, info, weights=False))
    state = run.resume(model, optimizer, {"step": 0}, total=sizes["steps"])
    run.open_logs(state["step"], config={})

    # 1. Pass over the posts. Their order depends on the seed alone.
    steps = range(state["step"], sizes["steps"])
    seconds = 0.1 if sys.stderr.isatty() else 30.0  # between two updates of the bar; a log file gets few
    bar = tqdm(steps, desc="SFT", initial=state["step"], total=sizes["steps"], mininterval=seconds)
    for step in bar:
        # [X32] One step of the schedule for each optimiser step, the last, smaller one too.   sft.py#L405
        optimizer.param_groups[0]["lr"] = cosine_lr(args.lr, step, sizes["steps"])
        epoch, batch = divmod(step, steps_per_epoch)
        order = torch.randperm(len(train_posts), generator=keyed_generator(args.seed, "posts", epoch))
        batch_inds = order[batch * args.batch_size : (batch + 1) * args.batch_size]
        # (local_batch,); the last batch of a pass may be short, and `counts` says which of its rows are none.
        mb_inds, counts = deal(batch_inds, args.batch_size, accelerator.process_index, accelerator.num_processes)
        # The query and its reference are one text. It makes no difference where the padding is.
        #       tldr_dataset.py#L202-L212
        tokens = torch.cat([train_posts.queries[mb_inds], train_posts.references[mb_inds]], dim=1)
        tokens = tokens.masked_fill(~counts.unsqueeze(1), ids.pad).to(device)  # (local_batch, length)
        metrics = sft_update(model, optimizer, tokens, ids.pad, accelerator, micro_batch=args.local_micro_batch_size)
        metrics["train/sft/lr"] = optimizer.param_groups[0]["lr"]
        check_finite(metrics, step)
        run.log(step, metrics)
        bar.set_postfix_str(f"loss {metrics['train/sft/loss']:.3f}")
        state = {"step": step + 1}
        stopping = run.told_to_stop()
        if stopping or step + 1 == sizes["steps"] or (step + 1) % (args.save_interval or sizes["steps"]) == 0:
            run.save_checkpoint(model, optimizer, state)
        if stopping:
            accelerator.print(f"stopped after step {step + 1}; resume with --resume {run.folder}")
            sys.exit(0)

    run.stop_at_once()
    # 2. Summarise held-out posts.
    results = {"too_long": train_posts.too_long}
    for split, split_posts in held_out.items():
        scores, rows = summarise_held_out(
            model, split_posts, split, tokenizer=tokenizer, ids=ids, args=args, accelerator=accelerator
        )
        check_finite(scores, sizes["steps"])
        results |= scores
        if accelerator.is_main_process:
            name = "evaluation.jsonl" if split == "validation" else f"evaluation_{split}.jsonl"
            (run.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        if split == "validation":
            run.log_samples(sizes["steps"], posts.sample_table(rows[:3]))

    folder = run.models / "sft"
    if accelerator.is_main_process:
        with input_errors(f"{folder} cannot be saved; the checkpoints are kept"):
            models.save_language_model(folder, lm_backbone, tokenizer, info)
    run.finish("sft", **results)
    return folder


def sft_update(
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    pad_id: int,
    accelerator: Accelerator,
    *,
    micro_batch: int,
) -> dict[str, float]:
    """One optimiser step on texts (local_batch, length). A row that is all padding has no effect.

    micro_batch: texts per pass, at most. Returns the metrics of the step: loss and number of predicted tokens of the
    whole batch on all processes, and gradient norm.
    """
    # [T22] [X21] The loss is the mean over all tokens of the batch, so that a token of a long text counts as much as
    #       one of a short text, however the batch is split.   sft.py#L390-L409
    count = accelerator.reduce(next_token_mask(tokens, pad_id).sum(), "sum")
    total = torch.zeros((), device=tokens.device)
    # Gradients of micro-batches, of texts of similar length, add up. We step when all are done, without accelerate's
    # counter.
    optimizer.zero_grad()
    lengths = packing.count_tokens(tokens, pad_id)
    for (mb_tokens,) in packing.micro_batches(model, lengths, tokens, pad_id=pad_id, rows=micro_batch):
        loss = -model(mb_tokens, pad_id).sum() / count  # this micro-batch's share
        (loss * accelerator.num_processes).backward()  # gradients will be averaged over processes
        total = total + loss.detach()
    average_gradients(model)
    # The norm is logged, and nothing is clipped.
    gradient_norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    optimizer.step()
    # The names of metrics are the reproduction's.   sft.py#L407-L425
    return {
        "train/sft/loss": accelerator.reduce(total, "sum").item(),
        "train/sft/tokens": count.item(),
        "train/sft/gradient_norm": gradient_norm.item(),
    }


def next_token_mask(tokens: Tensor, pad_id: int) -> Tensor:
    """Where a token has a token before it: (batch, length) gives (batch, length - 1) bool."""
    # [X31] The first token of a text is not predicted, wherever the padding is.
    real = tokens != pad_id
    return real[:, 1:] & real[:, :-1]


def cosine_lr(lr: float, step: int, steps: int) -> float:
    """The learning rate of a step (0-based) out of so many, without warm-up; it would be 0 after the last."""
    return lr * (1 + math.cos(math.pi * step / steps)) / 2


# ---- How the model reads and writes ----------------------------------------------------------------------------


class LanguageModel(nn.Module):
    """A causal language model that gives the log-prob of each token of a text."""

    def __init__(self, lm_backbone: PreTrainedModel, vocab_size: int):
        """vocab_size: number of ids of the tokenizer; the output layer may have more rows [T14]."""
        super().__init__()
        self.lm_backbone = lm_backbone
        self.vocab_size = vocab_size

    def forward(self, tokens: Tensor, pad_id: int) -> Tensor:
        """Log-probs (batch, length - 1) of tokens (batch, length), without the first; 0 where there is no token."""
        # [T15] Padding is masked and never embedded.   sft.py#L205-L212
        # [T16] Positions are always given. The original gives none, which is correct for rotary ones only.
        #       ppo.py#L358-L368, reward.py#L223-L233
        hidden_states = read_tokens(self.lm_backbone, tokens, pad_id, slice(0, -1))  # (batch, length - 1, width)
        # [T21] Every token but the first is predicted, those of the query and the end-of-text token too.
        #       sft.py#L389-L399
        mask = next_token_mask(tokens, pad_id)
        targets = tokens[:, 1:].masked_fill(~mask, 0)  # (batch, length - 1)
        numbers = targets.shape[1] * self.vocab_size  # logits of a row
        (logprobs,) = packing.few_logits_at_a_time(self.logprobs_of, numbers, hidden_states, targets)
        return logprobs.masked_fill(~mask, 0.0)

    def logprobs_of(self, hidden_states: Tensor, targets: Tensor) -> tuple[Tensor]:
        """Log-probs of tokens (batch, length) after hidden states (batch, length, width)."""
        logits = scaled_logits(self.lm_backbone, hidden_states, self.vocab_size, temperature=1.0)
        return (-F.cross_entropy(logits.transpose(1, 2), targets.long(), reduction="none"),)


@torch.no_grad()
def summarise_held_out(
    model: LanguageModel,
    held_out: posts.Posts,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    ids: posts.TaskIds,
    args: Args,
    accelerator: Accelerator,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Summarise held-out posts. Returns loss, ROUGE and share of finished summaries, and the rows of the table."""

    def loss_of(queries: Tensor, responses: Tensor, references: Tensor) -> tuple[Tensor, ...]:
        """Log-probs and numbers of the predicted tokens of each text, post and reference."""
        tokens = posts.trim_padding(queries, references, pad_id=ids.pad)
        return model(tokens, ids.pad).sum(1), next_token_mask(tokens, ids.pad).sum(1)

    # [T23] At a temperature near zero, against the references.   sft.py#L215-L281, sft.py#L411-L425
    responses, logprobs, counts = posts.summarise(
        model.lm_backbone,
        held_out,
        ids,
        args.task,
        keyed_generator(args.seed, "evaluate", split),
        args.local_rollout_batch_size,
        accelerator,
        measure=loss_of,
    )
    finished = has_stop(responses, ids.stops, 0)  # (posts,)
    rows = posts.evaluation_rows(tokenizer, ids, held_out.queries, responses, held_out.references)
    results = {f"{split}/sft/loss": -logprobs.double().sum().item() / counts.sum().item()}
    results |= {f"{split}/sft/rouge/{name}": value for name, value in posts.rouge(rows).items()}
    results[f"{split}/sft/eos_rate"] = finished.double().mean().item()
    return results, rows


if __name__ == "__main__":
    run_script(lambda: train(parse_args(PRESETS, description=__doc__)))
