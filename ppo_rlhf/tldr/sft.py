"""Supervised fine-tuning: chapter 2, TL;DR summarisation, stage 1 of 3.

A pretrained language model learns to summarise posts by imitating the summaries that people wrote (Stiennon et
al. 2020). This is ordinary language modelling on post and summary together. The model learns the form of the task,
and that a summary ends with the end-of-text token:

    1. one pass over the posts in random order: AdamW, with a learning rate that falls to zero on a cosine
    2. summarise held-out posts at a temperature near zero, and compare with the reference summaries (ROUGE)

Next: `tldr/reward.py` and `tldr/policy.py`; `tldr/all.py` runs all three. Marks like [T21] name an implementation
detail. The original is vwxyzjn/summarize_from_feedback_details at commit ee77a9a, which reproduced OpenAI's; files
and lines next to marks are the original's. Marks like [X21] are places where we differ on purpose: docs/reference.

    python ppo_rlhf/tldr/sft.py --preset posts                            # no network, two minutes
    python ppo_rlhf/tldr/sft.py --dtype bfloat16 --local_micro_batch_size 8             # Pythia 1B, one GPU
    accelerate launch --num_processes 8 ppo_rlhf/tldr/sft.py --dtype bfloat16 --local_micro_batch_size 8 --track
    python ppo_rlhf/tldr/sft.py --resume runs/<run>                       # resume after an interruption
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.lib import checkpoints, command_line, errors, layers, pretrained, processes, run
from ppo_rlhf.lib.bounds import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from ppo_rlhf.tldr import models, packing, posts
from ppo_rlhf.train_policy import average_gradients, has_stop, keyed_generator, read_tokens, scaled_logits

# ---- Arguments -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Args(command_line.MemoryArgs, command_line.RunArgs):
    preset: str = "tldr"
    """names a set of defaults: tldr, posts, reviews"""
    exp_name: str = "tldr_sft"
    seed: NonNegativeInt = 44413
    """seed of the order of the posts and of the sampling noise"""
    base_model: str = "EleutherAI/pythia-1b-deduped"
    """causal language model to start from: a folder, a name on the hub, `posts` or `smollm2-135m`"""
    save_interval: NonNegativeInt = 200
    """steps between checkpoints; 0: one at the end"""
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
    task: posts.TaskArgs = field(default_factory=posts.TaskArgs)
    """queries and responses"""


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


def train(args: Args, joint: dict | None = None) -> Path:
    """Fine-tune a language model and return the folder models/<run>/sft, on every process.

    joint: of tldr/all.py. Raises InputError, a ValueError: on bad arguments before anything is written; later if a
    disk fails.
    """
    accelerator = processes.make_accelerator()
    check_arguments(args, accelerator.num_processes)
    task, device = args.task, accelerator.device
    tokenizer = pretrained.load_tokenizer(args.base_model, args.trust_remote_code)
    ids = posts.task_ids(task, tokenizer)
    train_posts = posts.read_posts(task, tokenizer, "train", args.num_train)
    held_out = {split: posts.read_posts(task, tokenizer, split, args.eval_posts) for split in ("validation", "test")}
    steps_per_epoch = math.ceil(len(train_posts) / args.batch_size)
    steps = args.epochs * steps_per_epoch
    sizes = {
        "posts": len(train_posts),
        "steps_per_epoch": steps_per_epoch,
        "steps": steps,
        "batch": args.batch_size,
        "local_batch": args.batch_size // accelerator.num_processes,
    }
    # [T17] Without dropout.   sft.py#L153-L157
    lm_backbone = models.load_base_model(args)
    packing.enable(lm_backbone)
    model = LanguageModel(lm_backbone, ids.vocab_size, low_precision=args.dtype == "bfloat16")
    if args.gradient_checkpointing:
        layers.checkpoint_layers(model)
    model.to(accelerator.device)
    length = task.query_length + task.response_length
    models.check_model(lm_backbone, args.base_model, length, ids.vocab_size, read_tokens)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, eps=1e-5, weight_decay=args.weight_decay, fused=True)

    this_run = run.Run(args, accelerator, sizes, joint)
    info = {
        "kind": "sft model",
        "base_model": args.base_model,
        "vocab_size": ids.vocab_size,
        "task": dataclasses.asdict(args.task),
    }
    save = partial(models.save_language_model, lm_backbone=lm_backbone, tokenizer=tokenizer, info=info)
    this_run.rehearse(save)
    first_step = this_run.resume(partial(checkpoints.restore_training_state, model, optimizer))["step"]
    this_run.start_logging(first_step)

    # 1. Passes over the posts. Their order depends on the seed alone.
    for step in this_run.updates("SFT", "posts", first=first_step, total=steps):
        epoch, batch = divmod(step, steps_per_epoch)
        # [X32] One step of the schedule for each optimiser step, the last, smaller one too.   sft.py#L405
        optimizer.param_groups[0]["lr"] = lr = models.cosine_lr(args.lr, step, steps)
        order = torch.randperm(len(train_posts), generator=keyed_generator(args.seed, "posts", epoch))
        mb_inds, counts = processes.deal(
            order[batch * args.batch_size : (batch + 1) * args.batch_size],
            args.batch_size,
            accelerator.process_index,
            accelerator.num_processes,
        )
        # The query and its reference are one text. It makes no difference where the padding is.
        #       tldr_dataset.py#L202-L212
        tokens = torch.cat([train_posts.queries[mb_inds], train_posts.references[mb_inds]], dim=1)
        tokens = tokens.masked_fill(~counts.unsqueeze(1), ids.pad).to(device)  # (local_batch, length)
        metrics = sft_update(
            model,
            optimizer,
            tokens,
            pad_id=ids.pad,
            accelerator=accelerator,
            rows=args.local_micro_batch_size,
        )
        processes.check_finite(metrics, step, "lr")
        this_run.end_of_update(
            step,
            metrics | {"train/sft/lr": lr},
            f"loss {metrics['train/sft/loss']:.3f}",
            checkpoint=lambda: (checkpoints.training_state(model, optimizer), {}),
        )

    # 2. Summarise held-out posts.
    results = {"too_long": train_posts.too_long}
    for split, split_posts in held_out.items():
        scores, rows = summarise_held_out(
            model, split_posts, split, tokenizer=tokenizer, ids=ids, args=args, accelerator=accelerator
        )
        processes.check_finite(scores, steps, "lr")
        results |= scores
        this_run.write_evaluation(split, rows)
        if split == "validation":
            this_run.log_samples(steps, posts.sample_table(rows[:3]))

    folder = this_run.model_folder / "sft"
    save(folder)
    this_run.finish("sft", **results)
    return folder


class LanguageModel(models.MixedPrecision):
    """A causal language model that gives the log-prob of each token of a text."""

    def __init__(self, lm_backbone: PreTrainedModel, vocab_size: int, *, low_precision: bool = False):
        """vocab_size: number of ids of the tokenizer; the output layer may have more rows [T14]."""
        super().__init__()
        self.lm_backbone = lm_backbone
        self.vocab_size = vocab_size
        self.low_precision = low_precision

    def forward(self, tokens: Tensor, pad_id: int) -> Tensor:
        """Log-probs (batch, length - 1) of tokens (batch, length), without the first; 0 where there is no token."""
        # [T15] Padding is masked and never embedded.   sft.py#L205-L212
        # [T16] Positions are always given. The original gives none, which is correct for rotary ones only.
        #       ppo.py#L358-L368, reward.py#L223-L233
        with self.autocast():
            hidden_states = read_tokens(self.lm_backbone, tokens, pad_id, slice(0, -1))
            # [T21] Every token but the first is predicted, those of the query and the end-of-text token too.
            #       sft.py#L389-L399
            mask = next_token_mask(tokens, pad_id)
            targets = tokens[:, 1:].masked_fill(~mask, 0)
            (logprobs,) = packing.few_logits_at_a_time(
                self.logprobs_of, targets.shape[1] * self.vocab_size, hidden_states, targets
            )
            return logprobs.masked_fill(~mask, 0.0)

    def logprobs_of(self, hidden_states: Tensor, targets: Tensor) -> tuple[Tensor]:
        """Log-probs of tokens (batch, length) after hidden states (batch, length, width)."""
        logits = scaled_logits(self.lm_backbone, hidden_states, self.vocab_size, temperature=1.0)
        return (-F.cross_entropy(logits.transpose(1, 2), targets.long(), reduction="none"),)


def next_token_mask(tokens: Tensor, pad_id: int) -> Tensor:
    """Where a token has a token before it: (batch, length) gives (batch, length - 1) bool."""
    # [X31] The first token of a text is not predicted, wherever the padding is.
    real = tokens != pad_id
    return real[:, 1:] & real[:, :-1]


def sft_update(
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    pad_id: int,
    accelerator: Accelerator,
    *,
    rows: int,
) -> dict[str, float]:
    """One optimiser step on texts (local_batch, length). A row that is all padding has no effect.

    rows: of a micro-batch, at most. Returns the metrics of the step: loss and number of predicted tokens of the whole
    batch on all processes, and gradient norm.
    """
    # [T22] [X21] The loss is the mean over all tokens of the batch, so that a token of a long text counts as much as
    #       one of a short text, however the batch is split.   sft.py#L390-L409
    count = accelerator.reduce(next_token_mask(tokens, pad_id).sum(), "sum")
    total = torch.zeros((), device=tokens.device)
    # Gradients of micro-batches add up. We step when all are done, without accelerate's counter.
    optimizer.zero_grad()
    lengths = packing.count_tokens(tokens, pad_id)
    for (micro_batch,) in packing.micro_batches(model, lengths, tokens, pad_id=pad_id, rows=rows):
        loss = -model(micro_batch, pad_id).sum() / count  # this micro-batch's share
        (loss * accelerator.num_processes).backward()  # gradients will be averaged over processes
        total = total + loss.detach()
    average_gradients(model)
    gradient_norm = processes.gradient_norm(model)
    optimizer.step()
    # The names are the reproduction's.   sft.py#L407-L425
    metrics = processes.sum_over_processes({"train/sft/loss": total}, accelerator)
    return metrics | {"train/sft/tokens": count.item(), "train/sft/gradient_norm": gradient_norm.item()}


def summarise_held_out(
    model: LanguageModel,
    held_out: posts.Posts,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    ids: posts.TaskIds,
    args: Args,
    accelerator: Accelerator,
) -> tuple[dict[str, float], list[dict]]:
    """Summarise held-out posts. Returns loss, ROUGE and share of finished summaries, and the rows of the table."""

    def loss_of(queries: Tensor, responses: Tensor, references: Tensor) -> tuple[Tensor, ...]:
        """Log-probs and numbers of the predicted tokens of each text, post and reference."""
        tokens = posts.trim_padding(queries, references, pad_id=ids.pad)
        return model(tokens, ids.pad).sum(1), next_token_mask(tokens, ids.pad).sum(1)

    # [T23] At a temperature near zero, against the references.   sft.py#L215-L281, sft.py#L411-L425
    generator = keyed_generator(args.seed, "evaluate", split)
    with model.sampling():
        responses, logprobs, counts = posts.summarise(
            model.lm_backbone,
            held_out,
            ids,
            args.task,
            generator,
            args.local_rollout_batch_size,
            accelerator,
            measure=loss_of,
        )
    finished = has_stop(responses, ids.stops, 0)  # (posts,)
    rows = posts.evaluation_rows(tokenizer, ids, held_out.queries, responses, held_out.references)
    results = {f"{split}/sft/loss": -processes.widened(logprobs).sum().item() / counts.sum().item()}
    results |= {f"{split}/sft/rouge/{name}": value for name, value in posts.rouge(rows).items()}
    return results | {f"{split}/sft/eos_rate": processes.widened(finished).mean().item()}, rows


# ---- Checks ----------------------------------------------------------------------------------------------------


def check_arguments(args: Args, num_processes: int) -> None:
    """Refuse numbers that cannot be meant, before anything is read."""
    command_line.check_run(args)
    processes.split_evenly("batch_size", args.batch_size, num_processes, "processes")


if __name__ == "__main__":
    errors.run_script(lambda: train(command_line.parse_args(PRESETS, description=__doc__)))
