"""Train a reward model from human comparisons: chapter 1, Fine-tuning language models from human preferences.

People read four continuations of a query and say which is best (Ziegler et al. 2019). The reward model is the
pretrained language model with a scalar head; softmax cross-entropy over the four scores teaches it to agree:

    1. normalise: shift and scale the scores to mean 0 and variance 1 on samples of the pretrained language model
    2. one pass over the comparisons in random order, with a learning rate that falls linearly
    3. measure the held-out comparisons; normalise again, on new samples, and discard the gain and bias that were
       learned in between

This file is the whole program: copy it alone into a folder, and it runs. `train()` has the three steps, and
`reward_update()` below it makes one optimiser step. Then come the formulas, how a model writes and reads tokens,
queries, labels, and at the end the plumbing: loading, logs, checkpoints. What `train_policy.py` needs too has the
same text there. Left out: models that are split over several GPUs (each holds whole copies), and several passes over
the labels.

Marks like [D34] name an implementation detail. The original is openai/lm-human-preferences at commit cbfd210; a file
with a line, such as rewards.py#L73, is always one of the original. Marks like [X01] are places where we differ on
purpose: docs/reference.

    pip install torch transformers accelerate tyro pydantic datasets tensorboard wandb ftfy
    python train_reward.py                                          # sentiment, GPT-2, one GPU
    python train_reward.py --label_dataset my_labels.jsonl          # rows with chosen and rejected, or other labels
    accelerate launch --num_processes 8 train_reward.py --preset descriptiveness --track
    python train_reward.py --resume runs/<run>                      # resume after an interruption
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import csv
import dataclasses
import hashlib
import importlib.util
import json
import lzma
import math
import os
import platform
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import accelerate
import ftfy
import torch
import torch.nn.functional as F
import transformers
import tyro
from accelerate import Accelerator, DistributedType
from accelerate.tracking import GeneralTracker, TensorBoardTracker, TrackioTracker, WandBTracker
from accelerate.utils import broadcast_object_list, gather_object, reduce, tqdm
from datasets import Dataset, load_dataset
from huggingface_hub import HfApi, snapshot_download
from pydantic import (
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Subset
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StaticCache,
)
from transformers.modeling_layers import GradientCheckpointingLayer

# ---- Arguments -------------------------------------------------------------------------------------------------


class Arguments:
    """Arguments have the types and bounds at their fields; `checked` refuses anything else."""

    __pydantic_config__ = ConfigDict(allow_inf_nan=False, extra="forbid", strict=True)


@dataclass(frozen=True, kw_only=True)
class TaskArgs(Arguments):
    query_dataset: str = "books"
    """texts: books, cnndm, tldr, tales, reviews, a file (.txt, .jsonl, .json, .parquet, .csv), a folder with
    stories.txt, or a data set on the hub, <owner>/<name>"""
    query_column: str = "text"
    """key of a row's text in such a file or data set, with dots for nested ones"""
    query_length: PositiveInt = 64
    """longest query, in tokens; shorter ones are padded"""
    query_prefix: str = ""
    """text before each query, such as a chat's marks; the policy reads it, the reward model does not"""
    query_suffix: str = ""
    """text after each query; the policy reads it, the reward model does not"""
    start_text: str | None = "."
    """queries begin after the first such token of their text; None: at the beginning"""
    end_text: str | None = "."
    """queries end with the last such token; None: wherever they are cut"""
    response_length: PositiveInt = 24
    """length of every response, in tokens"""
    truncate_text: str | None = "."
    """responses are cut after this token before they are scored; None: never"""
    truncate_after: NonNegativeInt = 16
    """only such a token at or after this index counts, in tokens"""
    penalty_reward_value: float = -1.0
    """score of a response without such a token"""
    temperature: Annotated[float, Field(ge=0.01)] = 0.7
    """sampling temperature of the policy and of the reference"""


@dataclass(frozen=True, kw_only=True)
class Args(Arguments):
    preset: str = "sentiment"
    """names a set of defaults: sentiment, descriptiveness, cnndm, tldr, tales, tales-descriptiveness, reviews"""
    exp_name: Annotated[str, Field(pattern=r"^[\w.+ -]{1,150}$")] = "train_reward"
    """name of this experiment"""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    """seed of the head, the sampling noise and the order of the labels"""
    base_model: str = "gpt2"
    """causal language model to start from, such as GPT-2 or Pythia: a folder, a name on the hub, or `tales`"""
    trust_remote_code: bool = False
    """run Python code that comes with the base model"""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """arithmetic; bfloat16 keeps float32 weights and casts in matrix products"""
    gradient_checkpointing: bool = False
    """keep only the inputs of each layer and compute the rest again in the backward pass; saves memory, costs a
    forward pass"""
    task: TaskArgs = field(default_factory=TaskArgs)
    """queries and responses"""
    label_dataset: str = "sentiment/offline_5k.json"
    """comparisons or ratings: a file of OpenAI's on the hub, a world's, or a local one, which may hold texts or rows
    with chosen and rejected; or a data set of such rows on the hub, <owner>/<name>"""
    num_train: PositiveInt = 4_992
    """labels to train on, the first of the file; the others are held out"""
    normalize_samples: NonNegativeInt = 256
    """samples of the language model to normalise on, rounded up to whole rollout batches; 0: never normalise"""
    normalize_before: bool = True
    """normalise before training"""
    normalize_after: bool = True
    """normalise after training"""
    rollout_batch_size: PositiveInt = 512
    """samples per batch of normalisation, over all processes"""
    batch_size: PositiveInt = 32
    """labels per optimiser step, over all processes"""
    lr: PositiveFloat = 5e-5
    """learning rate of the first step; it falls linearly"""
    local_micro_batch_size: PositiveInt = 8
    """labels per forward and backward pass on one process, at most; changes memory and speed, not numbers"""
    local_rollout_batch_size: PositiveInt = 64
    """samples or labels per pass without gradients on one process, at most; changes memory and speed, not numbers"""
    resume: str = ""
    """folder of a run to resume: runs/<run>; its arguments are taken from there"""
    save_interval: NonNegativeInt = 50
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


TLDR_TASK = TaskArgs(
    query_dataset="tldr",
    query_length=500,
    query_suffix="\n\nTL;DR:",
    start_text=None,
    end_text=None,
    response_length=75,
    truncate_text="\n",
    truncate_after=55,
)
CNNDM_TASK = dataclasses.replace(
    TLDR_TASK, query_dataset="cnndm", query_prefix="Article:\n\n", end_text="\n", temperature=0.5
)
TALES_TASK = TaskArgs(query_dataset="tales", query_length=24)
REVIEWS_TASK = TaskArgs(
    query_dataset="reviews",  # the first six words of sentences from reviews
    query_length=12,
    query_prefix='The critic wrote about the film: "',
    start_text=None,
    end_text=None,
    response_length=20,
    # Responses are not cut at a stop. The score is on the last of all tokens, so those after a stop, which it doesn't
    # judge, would get most of its credit.
    truncate_text=None,
    truncate_after=0,
)
TASKS = {
    "sentiment": TaskArgs(),
    "descriptiveness": TaskArgs(),
    "cnndm": CNNDM_TASK,
    "tldr": TLDR_TASK,
    "tales": TALES_TASK,
    "tales-descriptiveness": TALES_TASK,
    "reviews": REVIEWS_TASK,
}
TLDR_REWARD = Args(
    label_dataset="tldr/online_45k.json",
    num_train=46_000,
    batch_size=16,
    lr=2.5e-5,
    rollout_batch_size=128,
    local_micro_batch_size=1,
    local_rollout_batch_size=16,
)
TALES_REWARD = Args(base_model="tales", lr=1e-3, local_micro_batch_size=32, local_rollout_batch_size=512)
# 4,800 sentences, rated from -4 to 4. The judge, `--label_dataset people/judge.json`, learns from 4,800 others.
REVIEWS_REWARD = Args(
    base_model="smollm2-135m",
    label_dataset="people/mean.json",
    num_train=4_800,
    rollout_batch_size=64,
)
PRESETS = {
    "sentiment": Args(),
    "descriptiveness": Args(label_dataset="descriptiveness/offline_5k.json"),
    "cnndm": dataclasses.replace(TLDR_REWARD, label_dataset="cnndm/online_45k.json"),
    "tldr": TLDR_REWARD,
    "tales": TALES_REWARD,
    "tales-descriptiveness": dataclasses.replace(TALES_REWARD, label_dataset="descriptiveness/offline_5k.json"),
    "reviews": REVIEWS_REWARD,
}
PRESETS = {name: dataclasses.replace(args, preset=name, task=TASKS[name]) for name, args in PRESETS.items()}


# ---- Train -----------------------------------------------------------------------------------------------------


def train(args: Args, timestamp: int | None = None) -> Path:
    """Train a reward model and return the folder models/<run>/reward, on every process.

    timestamp: ends the run's name, if another run shares it. Raises InputError, a ValueError: on bad arguments before
    anything is written; later if a number is impossible, or if a disk fails.
    """
    args = checked(args)
    accelerator = make_accelerator(args.dtype)
    device = accelerator.device
    rank = accelerator.process_index
    sizes = reward_sizes(args, accelerator.num_processes)
    pass_rows = args.local_rollout_batch_size  # rows of a pass without gradients

    tokenizer = load_tokenizer(args.base_model, args.trust_remote_code)
    ids = task_ids(args.task, tokenizer)
    # [D11] Every stage begins with the first text.   train_reward.py#L191-L200
    stream = QueryStream(args.task, tokenizer)
    reward_model, language_model = load_models(args, device)
    # [D21] Queries (labels, query_length), samples of each (labels, n, response_length) and targets (labels,):
    #       A target is the index of the best sample, the rating of the only one, or by how much the second is
    #       better than the first.
    longest = getattr(language_model.config, "max_position_embeddings", None)
    labels = read_labels(args.label_dataset, args.task, tokenizer, args.num_train, longest)
    scale_before = target_scale(labels.kind, labels.targets[: args.num_train])
    length = max(ids.context_length + args.task.response_length, labels.longest(ids.pad))
    check_model(language_model, args.base_model, length, ids.pad)
    prepare(language_model, args)
    prepare(reward_model.lm_backbone, args)
    optimizer = AdamTensorFlowStyle(reward_model.parameters(), lr=args.lr)

    run = Run(args, accelerator, dataclasses.asdict(sizes), timestamp)
    info = {
        "kind": "reward model",
        "base_model": args.base_model,
        "label_dataset": args.label_dataset,
        "vocab_size": vocabulary_size(tokenizer),
        "task": dataclasses.asdict(args.task),
    }
    trust = args.trust_remote_code
    run.try_to_save(lambda folder: save_reward_model(folder, reward_model, tokenizer, info, trust, weights=False))
    state = {"step": 0, "query_position": 0}
    state = run.resume(reward_model, optimizer, state, total=sizes.steps)
    stream.position = state["query_position"]
    run.open_logs(state["step"], config={})

    # 1. Normalise. Training starts on a known scale.
    # [D39] Without samples, this never happens.   train_reward.py#L208-L209
    if args.normalize_before and sizes.normalize_samples and state["step"] == 0:
        target_mean, target_std = scale_before
        query_responses = sample_query_responses(
            stream,
            ids,
            args,
            accelerator,
            stage="before",
            language_model=language_model,
            samples=sizes.normalize_samples,
        )
        normalize(
            reward_model,
            query_responses,
            ids.pad,
            rows=pass_rows,
            accelerator=accelerator,
            target_mean=target_mean,
            target_std=target_std,
        )

    # 2. One pass over the labels.
    # [D41] The first num_train labels are read once. Process r of W takes every W-th of a batch, from its r-th on.
    #       train_reward.py#L236-L250
    # [X02] Their order depends on the seed alone.
    permutation = torch.randperm(args.num_train, generator=keyed_generator(args.seed, "labels"))
    steps = range(state["step"], sizes.steps)
    seconds = 0.1 if sys.stderr.isatty() else 30.0  # between two updates of the bar; a log file gets few
    bar = tqdm(steps, desc="reward model", initial=state["step"], total=sizes.steps, mininterval=seconds)
    for step in bar:
        optimizer.param_groups[0]["lr"] = learning_rate_at(args, step)
        batch_inds = permutation[step * sizes.batch : (step + 1) * sizes.batch]
        mb_inds = batch_inds[rank :: accelerator.num_processes]  # (local_batch,)
        stats = reward_update(
            reward_model,
            optimizer,
            labels,
            mb_inds,
            ids.pad,
            accelerator,
            micro_batch=args.local_micro_batch_size,
        )
        metrics = {
            "train_reward/minibatch/loss": stats["train/loss"].item(),
            "train_reward/minibatch/error": stats["train/loss"].item(),
            **{name: number.item() for name, number in stats.items()},
            "train/lr": optimizer.param_groups[0]["lr"],
        }
        check_finite(metrics, step)
        run.log(step, metrics)
        agreement = "corr" if labels.kind == "score" else "accuracy"
        bar.set_postfix_str(f"loss {metrics['train/loss']:.3f}, {agreement} {metrics[f'train/{agreement}']:.2f}")
        state = {"step": step + 1, "query_position": stream.position}
        stopping = run.told_to_stop()
        if stopping or step + 1 == sizes.steps or (step + 1) % (args.save_interval or sizes.steps) == 0:
            run.save_checkpoint(reward_model, optimizer, state)
        if stopping:
            accelerator.print(f"stopped after step {step + 1}; resume with --resume {run.folder}")
            sys.exit(0)

    run.stop_at_once()
    # 3. Measure and normalise again.
    # [X07] The labels that were not trained on show how good the model is, on the scale that it has learned.
    held_out = torch.arange(len(labels.targets) - labels.held_out, len(labels.targets))
    measured = evaluate(reward_model, labels, held_out, ids.pad, rows=pass_rows, accelerator=accelerator)
    check_finite(measured, sizes.steps)
    # [D38] The samples continue the next queries of the stream.   train_reward.py#L252-L254
    if args.normalize_after and sizes.normalize_samples:
        query_responses = sample_query_responses(
            stream,
            ids,
            args,
            accelerator,
            stage="after",
            language_model=language_model,
            samples=sizes.normalize_samples,
        )
        normalize(
            reward_model,
            query_responses,
            ids.pad,
            rows=pass_rows,
            accelerator=accelerator,
            target_mean=0.0,
            target_std=1.0,
        )

    folder = run.models / "reward"
    if accelerator.is_main_process:
        with input_errors(f"{folder} cannot be saved; the checkpoints are kept"):
            save_reward_model(folder, reward_model, tokenizer, info, trust)
        run.log_samples(sizes.steps, sample_labels(reward_model, labels, tokenizer, ids.pad))
    queries = sizes.normalize_samples * (args.normalize_before + args.normalize_after)
    run.finish("reward", **labels.known, skipped_queries=stream.position - queries, **labels.left_out, **measured)
    return folder


def reward_update(
    reward_model: RewardModel,
    optimizer: torch.optim.Optimizer,
    labels: Labels,
    mb_inds: Tensor,
    pad_id: int,
    accelerator: Accelerator,
    *,
    micro_batch: int,
) -> dict[str, Tensor]:
    """One optimiser step on the labels with these indices (local_batch,). micro_batch: labels per pass.

    Returns the gradient norm, gain and bias, and the label_statistics of the whole batch on all processes, all 0-d.
    """
    # [D67] [D88] Micro-batches, of labels of similar length, add up to the gradient of the whole batch.
    mb_inds = mb_inds[(labels.samples[mb_inds] != pad_id).sum((1, 2)).argsort(stable=True)]
    scores = []
    optimizer.zero_grad()
    for inds in mb_inds.split(micro_batch):
        scores.append(score_samples(reward_model, labels, inds, pad_id))  # (micro_batch, n)
        targets = labels.targets[inds].to(scores[-1].device)
        loss = label_loss(labels.kind, scores[-1], targets)
        (loss * len(inds) / len(mb_inds)).backward()
    average_gradients(reward_model)
    # The norm is logged, and nothing is clipped.
    gradient_norm = nn.utils.get_total_norm([p.grad for p in reward_model.parameters() if p.grad is not None])
    optimizer.step()
    # [D75] Metrics are those of the whole batch, over all processes.   utils/core.py#L491-L524
    all_scores = accelerator.gather(torch.cat(scores).detach())  # (batch, n)
    all_targets = accelerator.gather(labels.targets[mb_inds].to(all_scores.device))  # (batch,)
    statistics = label_statistics(labels.kind, all_scores, all_targets)
    statistics["gradient_norm"] = gradient_norm
    statistics["gain"] = reward_model.gain.detach()
    statistics["bias"] = reward_model.bias.detach()
    return {f"train/{name}": number for name, number in statistics.items()}


def score_samples(reward_model: RewardModel, labels: Labels, inds: Tensor, pad_id: int) -> Tensor:
    """Scores (batch, n) of the samples of the labels with these indices (batch,)."""
    samples = labels.samples[inds]  # (batch, n, response_length)
    n = samples.shape[1]
    queries = labels.queries[inds].unsqueeze(1).expand(-1, n, -1)  # (batch, n, query_length)
    query_responses = torch.cat([queries, samples], dim=2).flatten(0, 1)  # (batch * n, sequence_length)
    # Padding changes nothing, so columns beyond the longest row are cut.
    longest = (query_responses != pad_id).sum(1).max()
    query_responses = left_pad(query_responses, pad_id)[:, -longest:].to(reward_model.gain.device)
    return reward_model(query_responses, pad_id).unflatten(0, (-1, n))


def average_gradients(model: nn.Module) -> None:
    """Replace the gradients by their mean over all processes. That is all that several GPUs need: the model has no
    wrapper, and every process takes the same optimiser step.
    """
    # This happens before each optimiser step.   utils/core.py#L468-L488
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        mean = reduce(nn.utils.parameters_to_vector(gradients), "mean")
        nn.utils.vector_to_parameters(mean, gradients)


# ---- The formulas of steps 1 to 3 ------------------------------------------------------------------------------


def best_of_n_loss(scores: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax cross-entropy of the choice, mean over the batch, and how often the best has the highest score.

    scores: (batch, n); best: (batch,), in [0, n). The accuracy is a 0-d tensor without gradient.
    """
    # [D40] The scores are the logits of the choice.   label_types.py#L44-L49
    accuracy = (scores.argmax(1) == best).to(scores.dtype).mean()
    return F.cross_entropy(scores, best.long()), accuracy


def label_loss(kind: str, scores: Tensor, targets: Tensor) -> Tensor:
    """The loss of scores (batch, n) for labels (batch,) of one kind; 0-d, mean over the batch.

    Ratings and differences are regressed: mean((score - r)^2), mean((difference - (r1 - r0))^2).
    """
    if kind == "best":
        return best_of_n_loss(scores, targets)[0]
    # [D21] Labels may also be ratings or differences.   label_types.py#L58-L120
    predictions = scores[:, 0] if kind == "score" else scores[:, 1] - scores[:, 0]  # (batch,)
    return ((targets.to(scores.dtype) - predictions) ** 2).mean()


@torch.no_grad()
def label_statistics(kind: str, scores: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """The loss and other metrics of scores (batch, n) for labels (batch,) of one kind; all 0-d."""
    loss = label_loss(kind, scores, targets)
    if kind == "best":
        return {"loss": loss, "accuracy": best_of_n_loss(scores, targets)[1]}
    targets = targets.to(scores.dtype)
    if kind == "difference":
        same_sign = (scores[:, 1] - scores[:, 0]).sign() == targets.sign()  # (batch,)
        return {"loss": loss, "accuracy": same_sign.to(scores.dtype).mean()}
    corr = correlation(targets, scores[:, 0])
    return {"loss": loss, "label_mean": targets.mean(), "label_var": targets.var(unbiased=False), "corr": corr}


def learning_rate_at(args: Args, step: int) -> float:
    """The learning rate of a step (0-based): linear from args.lr, and never 0."""
    # [D42] The first step has the full learning rate.   train_reward.py#L249
    return args.lr * (1 - step * args.batch_size / args.num_train)


def target_scale(kind: str, targets: Tensor) -> tuple[float, float]:
    """Mean and biased deviation that the scores get before training on these labels (labels,)."""
    # [D34] Choices want scores of mean 0 and deviation 1; ratings and differences their own scale.
    #       train_reward.py#L149-L160
    if kind == "best":
        return 0.0, 1.0
    scales = targets.double() if kind == "score" else targets.double() / 2
    if not scales.std(unbiased=False) > 0:
        raise InputError(f"all labels have the {kind} {targets[0].item()}; there is nothing to learn")
    return scales.mean().item(), scales.std(unbiased=False).item()


@torch.no_grad()
def normalize(
    reward_model: RewardModel,
    query_responses: Tensor,
    pad_id: int,
    rows: int,
    accelerator: Accelerator,
    target_mean: float,
    target_std: float,
) -> None:
    """Set gain and bias so that these samples, on all processes together, have the wanted mean and deviation.

    query_responses: (samples of this process, sequence_length). rows: how many are read at a time.
    """
    # [D32] [D34] Whatever gain and bias had learned is discarded first.   train_reward.py#L207-L215
    reward_model.gain.fill_(1.0)
    reward_model.bias.fill_(0.0)
    scores = few_rows_at_a_time(lambda tokens: reward_model(tokens, pad_id), rows, query_responses)
    gain, bias = gain_and_bias(accelerator.gather(scores), target_mean, target_std)
    reward_model.gain.fill_(gain)
    reward_model.bias.fill_(bias)


def gain_and_bias(scores: Tensor, target_mean: float, target_std: float) -> tuple[float, float]:
    """Gain and bias that give scores (n,) of gain 1 and bias 0 the wanted mean and biased standard deviation.

    Raises InputError, a ValueError, if the deviation is 0 or a score is not finite.
    """
    # [D34] gain = S / s and bias = M - gain * m.   rewards.py#L73-L89
    # [D35] The deviation is biased, and numbers that are not finite stop the run.   train_reward.py#L162-L169
    scores = scores.cpu().double()
    mean = scores.mean().item()
    std = scores.std(unbiased=False).item()
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise InputError(f"scores with mean {mean} and deviation {std} cannot be normalised")
    gain = target_std / std
    return gain, target_mean - gain * mean


@torch.no_grad()
def evaluate(
    reward_model: RewardModel, labels: Labels, inds: Tensor, pad_id: int, rows: int, accelerator: Accelerator
) -> dict[str, float]:
    """Measure the scores of the labels with these indices: loss and accuracy or, for ratings, correlations.

    Empty without labels. The processes share the work. rows: labels that are read at a time.
    """
    if not len(inds):
        return {}
    n = labels.samples.shape[1]
    device = float64_device(accelerator.device)
    scores = torch.zeros(len(inds), n, dtype=torch.float64, device=device)
    local = torch.arange(accelerator.process_index, len(inds), accelerator.num_processes)
    for places in local.split(rows) if len(local) else ():  # a process may have none
        scores[places] = score_samples(reward_model, labels, inds[places], pad_id).to(scores)
    scores = accelerator.reduce(scores, "sum")  # (len(inds), n)
    targets = labels.targets[inds].to(device)
    statistics = label_statistics(labels.kind, scores, targets)
    measured = {f"test_{name}": x.item() for name, x in statistics.items() if not name.startswith("label_")}
    if labels.kind == "score":
        measured["test_spearman"] = correlation(ranks(scores[:, 0]), ranks(targets)).item()
    return measured | {"test_labels": len(inds)}


def correlation(x: Tensor, y: Tensor) -> Tensor:
    """Pearson's correlation of two tensors (n,), 0-d; 0 where one of them is constant."""
    covariance = ((x - x.mean()) * (y - y.mean())).mean()
    return covariance / (x.std(unbiased=False) * y.std(unbiased=False)).clamp(min=torch.finfo(x.dtype).tiny)


def ranks(values: Tensor) -> Tensor:
    """The rank of each value (n,), from 1, in float64. Equal values share the mean of their ranks."""
    _, groups, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()  # (distinct values,), the last rank of each
    return (last - (counts - 1) / 2)[groups]


class AdamTensorFlowStyle(torch.optim.Adam):
    """Adam as TensorFlow 1 computes it: eps is added to the uncorrected sqrt(v).

        lr_t = lr * sqrt(1 - beta2^t) / (1 - beta1^t)        theta -= lr_t * m / (sqrt(v) + eps)

    PyTorch divides sqrt(v) by sqrt(1 - beta2^t) before it adds eps. So its Adam takes the same step if its eps is
    eps / sqrt(1 - beta2^t), in the first step eps / sqrt(0.001) = 32 eps. With small gradients that matters.
    """

    # [D64] [D65] No clipping, weight decay or warm-up; `steps` counts over the run.   utils/core.py#L621-L629
    def __init__(self, params, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-5):
        super().__init__(params, lr=lr, betas=betas, eps=eps, fused=True)
        for group in self.param_groups:
            group.update(steps=0, eps_tensorflow=eps)

    def step(self, closure: Callable | None = None):
        """One step of all parameters that have a gradient."""
        for group in self.param_groups:
            group["steps"] += 1
            group["eps"] = group["eps_tensorflow"] / math.sqrt(1 - group["betas"][1] ** group["steps"])
        return super().step(closure)


# ---- Steps 1 and 3: how a model writes and reads tokens --------------------------------------------------------


def sample_query_responses(
    stream: QueryStream,
    ids: TaskIds,
    args: Args,
    accelerator: Accelerator,
    *,
    stage: str,
    language_model: PreTrainedModel,
    samples: int,
) -> Tensor:
    """The next queries with the language model's own responses: (samples of this process, query and response).

    stage: before or after the training. samples: over all processes.
    """
    # [D33] [D37] The samples come from the frozen pretrained model, and are neither truncated nor filtered.
    #       train_reward.py#L191-L199
    n = samples // accelerator.num_processes
    mine = slice(accelerator.process_index * n, (accelerator.process_index + 1) * n)
    queries = stream.next_batch(samples, ids.pad)[mine].to(accelerator.device)  # (n, query_length)
    # [X01] The noise belongs to the sample.
    generator = keyed_generator(args.seed, "normalize", stage)
    uniforms = torch.rand(samples, args.task.response_length, generator=generator, dtype=torch.float64)
    contexts = add_affixes(queries, ids.prefix, ids.suffix)  # (n, context_length)
    responses, _ = few_rows_at_a_time(
        lambda *parts: generate(language_model, *parts, ids.pad, ids.pad, args.task.temperature),
        args.local_rollout_batch_size,
        contexts,
        uniforms[mine].to(float64_device(accelerator.device)),
    )
    # [D28] The reward model sees the query without prefix and suffix.   rewards.py#L105-L107
    return torch.cat([queries, responses], dim=1)


def few_rows_at_a_time(function: Callable, rows: int, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Apply a function to a few rows at a time and join the tensors that it returns, to save memory."""
    results = [function(*parts) for parts in zip(*(tensor.split(rows) for tensor in tensors), strict=True)]
    if isinstance(results[0], Tensor):
        return torch.cat(results)
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


@torch.no_grad()
def generate(
    lm_backbone: PreTrainedModel, contexts: Tensor, uniforms: Tensor, pad_id: int, vocab_size: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Sample responses with a key-value cache.

    contexts: (batch, context_length) token ids, padding anywhere; uniforms: (batch, response_length) random numbers
    in [0, 1), one for each token, on a device that has float64. Returns responses and the log-probs that the sampler
    saw, (batch, response_length).
    """
    # [D13] [D14] Mask and positions are those of `read_tokens`, for contexts with their padding on the left.
    tokens = left_pad(contexts, pad_id)
    mask = tokens != pad_id  # (batch, context_length)
    position_ids = mask.cumsum(1) - mask.long()
    tokens = tokens.masked_fill(~mask, 0)
    # Keys and values of a whole episode get their memory at the start, so that every step has the same shapes.
    context_length, response_length = contexts.shape[1], uniforms.shape[1]
    cache = KeyValueCache(config=lm_backbone.config, max_cache_len=context_length + response_length)
    # (batch, 1, length, length): the first step reads the rows of the context, and each later one a row.
    attention_mask = causal_mask(F.pad(mask, (0, response_length), value=True), lm_backbone.dtype)
    rows = slice(0, context_length)
    responses, logprobs = [], []
    # [D22] [D24] There are always response_length tokens, and no top-k or top-p.   language/sample.py#L24-L84
    for column in range(response_length):
        hidden = lm_backbone.base_model(
            input_ids=tokens,
            attention_mask=attention_mask[:, :, rows],
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[:, -1]  # (batch, width)
        all_logprobs = F.log_softmax(scaled_logits(lm_backbone, hidden, vocab_size, temperature), dim=1)
        # [X01] Inverse CDF: the first token whose cumulative probability exceeds the uniform number, times the total,
        #       which rounding leaves a little off 1. It needs float64: in float32, rare tokens could never be drawn.
        cdf = all_logprobs.to(uniforms.device).double().exp().cumsum(1)  # (batch, vocab_size)
        thresholds = uniforms[:, column : column + 1].double() * cdf[:, -1:]
        tokens = torch.searchsorted(cdf, thresholds, right=True).clamp(max=vocab_size - 1).to(hidden.device)
        responses.append(tokens)
        logprobs.append(all_logprobs.gather(1, tokens))
        position_ids = position_ids[:, -1:] + 1
        rows = slice(context_length + column, context_length + column + 1)
    return torch.cat(responses, dim=1).to(contexts.dtype), torch.cat(logprobs, dim=1)


class KeyValueCache(StaticCache):
    """Keys and values, both in the precision of the values."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens; return those of all tokens."""
        # Under autocast, rotary positions make keys float32, and attention casts them back. A cache holds one dtype.
        return super().update(key_states.to(value_states.dtype), value_states, *args, **kwargs)


def left_pad(tokens: Tensor, pad_id: int) -> Tensor:
    """Move the padding of each row to its left; the order of the other tokens stays.

    tokens: (batch, length). [[5, P, 6, P]] gives [[P, P, 5, 6]].
    """
    # [D08] A stable sort by "is a real token".
    return tokens.gather(1, (tokens != pad_id).int().argsort(dim=1, stable=True))


def read_tokens(lm_backbone: PreTrainedModel, tokens: Tensor, pad_id: int, columns: slice) -> Tensor:
    """Final hidden states of the language model at some columns, with padding anywhere in the tokens.

    tokens: (batch, sequence_length). Returns (batch, selected columns, width), after the last layer norm.
    """
    # [D13] Padding is never embedded: token 0 takes its place, and no token sees it.   language/model.py#L294-L300
    mask = tokens != pad_id  # (batch, sequence_length)
    input_ids = tokens.masked_fill(~mask, 0)
    # [D14] A position counts real tokens before it: 0, 1, 1, 1 for [x, pad, pad, a].   language/model.py#L265-L269
    position_ids = mask.cumsum(1) - mask.long()
    attention_mask = causal_mask(mask, lm_backbone.dtype)  # (batch, 1, sequence_length, sequence_length)
    hidden_states = lm_backbone.base_model(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
    ).last_hidden_state  # (batch, sequence_length, width)
    # [D16] Padding shows what the real token to its left shows: columns [0, 0, 0, 3].   language/model.py#L333-L341
    real_columns = torch.where(mask, torch.arange(tokens.shape[1], device=tokens.device), 0)
    last_real = real_columns.cummax(1).values[:, columns]  # (batch, selected columns)
    return hidden_states.gather(1, last_real.unsqueeze(2).expand(-1, -1, hidden_states.shape[2]))


def causal_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that attention adds to its scores: 0 where a position may look, the lowest number where it may not.

    mask: (batch, sequence_length), True for real tokens. Returns (batch, 1, sequence_length, sequence_length).
    """
    # [D15] A position, padding too, sees itself and the real tokens before it.   language/model.py#L101-L159
    itself = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
    visible = (mask.unsqueeze(1) | itself).tril().unsqueeze(1)
    return torch.zeros(visible.shape, dtype=dtype, device=mask.device).masked_fill(~visible, torch.finfo(dtype).min)


def scaled_logits(lm_backbone: PreTrainedModel, hidden_states: Tensor, vocab_size: int, temperature: float) -> Tensor:
    """Logits over the tokenizer's ids, divided by the temperature: (..., vocab_size).

    In full precision even in bfloat16 runs, where rounded logits would move the log-prob of every token.
    """
    output_layer = lm_backbone.get_output_embeddings()
    hidden_states = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
    with torch.autocast(hidden_states.device.type, enabled=False):
        bias = None if output_layer.bias is None else output_layer.bias.to(hidden_states.dtype)
        logits = F.linear(hidden_states, output_layer.weight.to(hidden_states.dtype), bias)
    # [D12] Ids above the tokenizer's largest, such as padding, are never sampled or scored.   policy.py#L58-L59
    # [D23] Log-probs and entropies are those of the scaled logits.   language/sample.py#L24-L30
    return logits[..., :vocab_size] / temperature


def read_scalar(head: nn.Linear, hidden_states: Tensor) -> Tensor:
    """The head's number for each hidden state: (..., width) gives (...). In full precision even in bfloat16 runs."""
    with torch.autocast(hidden_states.device.type, enabled=False):
        return head(hidden_states.to(head.weight.dtype)).squeeze(-1)


class RewardModel(nn.Module):
    """A language model with a scalar head, read at the last real token: score = gain * head + bias."""

    def __init__(self, lm_backbone: PreTrainedModel):
        super().__init__()
        self.lm_backbone = lm_backbone
        width = lm_backbone.config.hidden_size
        # [D29] A small random head: about 1 / sqrt(width) in every weight.   language/model.py#L248-L258
        self.reward_head = nn.Linear(width, 1)
        nn.init.normal_(self.reward_head.weight, std=1 / math.sqrt(width + 1))
        nn.init.zeros_(self.reward_head.bias)
        # [D31] [D32] Gain and bias are trainable parameters.   rewards.py#L48-L71
        self.gain = nn.Parameter(torch.ones(()))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, query_responses: Tensor, pad_id: int) -> Tensor:
        """Scores (batch,) of query_responses (batch, sequence_length); trailing padding does not count."""
        # [D30] The score is read at the last column, which shows the last real token.   rewards.py#L47
        last = read_tokens(self.lm_backbone, query_responses, pad_id, slice(-1, None))  # (batch, 1, width)
        return self.gain * read_scalar(self.reward_head, last[:, 0]) + self.bias


# ---- Queries ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TaskIds:
    """The task's texts as token ids of one tokenizer."""

    pad: int  # one above the largest id of the tokenizer: all below it can be sampled
    eos: int  # -1 if the tokenizer has none
    stop: int | None
    prefix: list[int]
    suffix: list[int]
    context_length: int  # prefix, padded query and suffix


def task_ids(task: TaskArgs, tokenizer: PreTrainedTokenizerBase) -> TaskIds:
    """Encode the task's texts."""
    prefix = start_of_texts(tokenizer) + tokenizer.encode(task.query_prefix, add_special_tokens=False)
    suffix = tokenizer.encode(task.query_suffix, add_special_tokens=False)
    return TaskIds(
        # GPT-2 and Pythia have no padding token, and their end of text may be sampled. So padding gets an id that no
        # text has and no model samples, one above the largest.
        pad=vocabulary_size(tokenizer),
        eos=-1 if tokenizer.eos_token_id is None else tokenizer.eos_token_id,
        stop=one_token(tokenizer, task.truncate_text, "task.truncate_text"),
        prefix=prefix,
        suffix=suffix,
        context_length=len(prefix) + task.query_length + len(suffix),
    )


def start_of_texts(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before every text, such as BOS; for most models nothing."""
    # [X19] Llama, Mistral and Gemma have never read a text without it.
    plain = tokenizer.encode("a", add_special_tokens=False)
    with_start = tokenizer.encode("a")
    places = (i for i in range(len(with_start)) if with_start[i : i + len(plain)] == plain)
    return with_start[: next(places, 0)]


class QueryStream:
    """An endless stream of queries: the texts in one shuffled order, again and again.

    The order depends neither on the run's seed nor on the number of processes. `position` counts the texts read.
    """

    def __init__(self, task: TaskArgs, tokenizer: PreTrainedTokenizerBase, split: str = "train"):
        self.texts = load_texts(task.query_dataset, split, task.query_column)
        self.task = task
        self.tokenizer = tokenizer
        self.start_id = one_token(tokenizer, task.start_text, "task.start_text")
        self.end_id = one_token(tokenizer, task.end_text, "task.end_text")
        # [D02] All runs, processes and passes use the same order.   language/datasets.py#L27-L46
        self.order = list(range(len(self.texts)))
        random.Random(0).shuffle(self.order)
        self.position = 0
        self.next_query()  # there is one
        self.position = 0

    def next_query(self) -> list[int]:
        """The token ids of the next query; texts that give none are passed over."""
        for _ in self.order:
            text = self.texts[self.order[self.position % len(self.order)]]
            self.position += 1
            # The texts are data: no special tokens are added, and the name of one is ordinary text.
            tokens = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
            if query := trim_query(tokens, self.task.query_length, self.start_id, self.end_id):
                return query
        raise InputError(
            f"--task.query_dataset {self.task.query_dataset}: none of its {len(self.order)} texts gives a query; "
            f"give more texts, or other --task.start_text and --task.end_text"
        )

    def next_batch(self, batch_size: int, pad_id: int) -> Tensor:
        """The next queries, padded on the right: (batch_size, query_length)."""
        # [D08] [D10] [X04] Process r of W takes its slice of a batch that is the same for every W.
        #       language/datasets.py#L66-L85
        return padded([self.next_query() for _ in range(batch_size)], pad_id, self.task.query_length)


def padded(rows: list[list[int]], pad_id: int, length: int | None = None) -> Tensor:
    """Rows of token ids, padded on the right to a length, or to that of the longest: (rows, length)."""
    longest = max(map(len, rows), default=0) if length is None else length
    equally_long = [row + [pad_id] * (longest - len(row)) for row in rows]
    return torch.tensor(equally_long, dtype=torch.long).view(len(rows), longest)


def trim_query(tokens: list[int], query_length: int, start_id: int | None, end_id: int | None) -> list[int] | None:
    """Cut a text's tokens to a query: after the first start token, at most query_length, up to the last end token.

    Returns None if the text has no start token, or no end token within the cut. Golden example, both ids 13:
    `One. Two words. Three more` gives ` Two words.`; `Only end.` is kept whole.
    """
    # [D05] It begins after the first start token, unless that ends the text.   language/datasets.py#L49-L55
    if start_id is not None:
        if start_id not in tokens:
            return None
        first = tokens.index(start_id)
        if first < len(tokens) - 1:
            tokens = tokens[first + 1 :]
    # [D06] It has at most query_length tokens.   language/datasets.py#L57
    tokens = tokens[:query_length]
    # [D07] It ends with the last end token within the cut.   language/datasets.py#L59-L64
    if end_id is not None:
        if end_id not in tokens:
            return None
        tokens = tokens[: len(tokens) - tokens[::-1].index(end_id)]
    return tokens


def add_affixes(queries: Tensor, prefix: list[int], suffix: list[int]) -> Tensor:
    """Contexts for the policy: [prefix, query with its padding, suffix]. (batch, context_length)"""
    # [D09] There may be padding between query and suffix.   lm_tasks.py#L68-L80
    parts = [torch.tensor(ids, dtype=queries.dtype, device=queries.device) for ids in (prefix, suffix)]
    before, after = (part.expand(len(queries), -1) for part in parts)
    return torch.cat([before, queries, after], dim=1)


def keyed_generator(*key: int | str) -> torch.Generator:
    """A CPU random generator that depends on the key alone, so that noise belongs to an episode, not a process."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


def to_texts(tokenizer: PreTrainedTokenizerBase, tokens: Tensor, pad_id: int) -> list[str]:
    """The texts of token ids (batch, length), without padding."""
    return [tokenizer.decode([token for token in row if token != pad_id]) for row in tokens.tolist()]


# ---- Labels ----------------------------------------------------------------------------------------------------

OPENAI_PAD_ID = 50259  # of OpenAI's label files, whose ids are GPT-2's
OPENAI_VOCAB_SIZE = 50257
LARGEST_RATING = 1e6


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Judgements of n continuations of each query. The kind of label says what a target means:

    best         which of the n is the best, in [0, n)
    score        how good the only one is
    difference   how much better the second of two is than the first
    """

    queries: Tensor  # (labels, query_length), padded with our padding id
    samples: Tensor  # (labels, n, response_length), padded likewise
    targets: Tensor  # (labels,), integers for best, else floats
    kind: Literal["best", "score", "difference"] = "best"
    held_out: int = 0  # so many labels, the last ones, are never trained on
    ceiling: float | None = None  # accuracy of a perfect judge on the held-out labels, if it is known
    left_out: dict[str, int] = field(default_factory=dict)  # how many were too_long to read, or had identical answers

    @property
    def known(self) -> dict[str, float | None]:
        """The accuracies that a model's is compared with."""
        return {"ceiling": self.ceiling} | ({} if self.kind == "score" else {"chance": 1 / self.samples.shape[1]})

    def longest(self, pad_id: int) -> int:
        """Tokens of a query and a sample, at most."""
        lengths = (self.queries != pad_id).sum(1) + (self.samples != pad_id).sum(2).amax(1)  # (labels,)
        return int(lengths.max())


@dataclass(frozen=True, kw_only=True)
class LabelFacts:
    """What <name>.meta.json, next to a label file, may say about it."""

    __pydantic_config__ = ConfigDict(allow_inf_nan=False, strict=True)

    vocab_size: int | None = None
    """one above the largest id of the tokenizer that wrote the ids; without it, ids are GPT-2's if our tokenizer is
    larger than GPT-2's"""
    padding_id: int = OPENAI_PAD_ID
    """the id that is padding"""
    ceiling: float | None = None
    """accuracy of a perfect judge"""
    held_out: NonNegativeInt | None = None
    """labels at the end of the file that are held out; without it, all after the first num_train"""


def read_labels(
    label_dataset: str,
    task: TaskArgs,
    tokenizer: PreTrainedTokenizerBase,
    num_train: int = 0,
    longest: int | None = None,
) -> Labels:
    """Read labels in OpenAI's form, or preferences as they are published, and check every row.

    num_train: how many there must be, besides those that are held out. longest: the most tokens of a query and a
    sample; labels of texts that have more are left out and counted. All rows have one of these forms:

        {"query": ids, "sample0": ids, "sample1": ids, ..., "best": 1}             the best of n
        {"query": ids, "sample": ids, "score": 0.7}                                a rating
        {"query": ids, "sample0": ids, "sample1": ids, "difference": -1.5}         how much better sample1 is
        {"prompt": text, "chosen": text, "rejected": text}                         see read_preference

    Queries of ids hold task.query_length of them and samples task.response_length, padded on the right. In place of
    ids there may be texts of any length. They are encoded one by one, so a sample begins with its space.
    """
    # A choice among samples.   label_types.py#L33-L55
    # [D21] A rating, or a difference.   label_types.py#L58-L120
    file = find_label_file(label_dataset, task.query_dataset)
    what = f"--label_dataset {file or label_dataset}"
    with input_errors(f"{what} cannot be read"):
        facts = read_facts(file) if file else LabelFacts()
        train_rows, test_rows = rows_of_file(file, facts) if file else rows_of_hub(label_dataset)
        if not train_rows + test_rows:
            raise InputError(f"{what} holds no rows")
        _, first = (train_rows + test_rows)[0]
        as_preferences = {"chosen", "rejected"} <= first.keys()
        kind = "best"
        if not as_preferences:
            kind = next((kind for kind in ("best", "score", "difference") if kind in first), "best")
        numbered = [f"sample{i}" for i in range(sum(key.startswith("sample") for key in first))]
        sample_keys = {"best": numbered, "score": ["sample"], "difference": ["sample0", "sample1"]}[kind]
    as_texts = as_preferences or isinstance(first.get("query"), str)
    pad_id = vocabulary_size(tokenizer)
    if not as_texts:
        check_ids(what, facts, pad_id)

    def token_ids(content: str | list[int], length: int) -> list[int]:
        """A text, or so many ids, of a row."""
        if isinstance(content, str) != as_texts:
            raise TypeError("all rows hold texts, or all hold token ids")
        if as_texts:
            content.encode()  # half a character, which no tokenizer accepts, is a ValueError
            return tokenizer.encode(content, add_special_tokens=False, split_special_tokens=True, verbose=False)
        tokens = [pad_id if token == facts.padding_id else token for token in content]
        if len(tokens) != length or not all(type(token) is int and 0 <= token <= pad_id for token in tokens):
            raise ValueError(f"there must be {length} ids below {pad_id}, the size of the vocabulary, or padding")
        return tokens

    queries, samples, targets, too_long = [], [], [], []
    held_out = identical = 0
    rest_is_held_out = file and facts.held_out is None
    for rows in (train_rows, test_rows):
        for place, row in rows:
            if rows is train_rows and len(queries) == num_train > 0 and not rest_is_held_out:
                break
            with input_errors(f"{what}, {place}, is no label; docs/running.md lists the forms"):
                if as_preferences:
                    query, *own_samples = read_preference(row)
                    target = 0
                else:
                    query, own_samples, target = row["query"], [row[key] for key in sample_keys], row[kind]
                query = token_ids(query, task.query_length)
                own_samples = [token_ids(sample, task.response_length) for sample in own_samples]
                if not (target in range(len(own_samples)) if kind == "best" else abs(target) <= LARGEST_RATING):
                    raise ValueError(f"{kind} is {target!r}")
            length = len(query) + max(map(len, own_samples))
            if as_texts and longest and length > longest:
                too_long.append(f"{place} has {length}")
            elif as_preferences and own_samples[0] == own_samples[1]:
                identical += 1
            else:
                queries.append(query)
                samples += own_samples
                targets.append(target)
                held_out += rows is test_rows
    # [D20] A file with fewer labels than num_train is refused.   train_reward.py#L94-L96
    if not queries or len(queries) - held_out < num_train:
        message = f"--num_train {num_train}: {what} has {len(queries)} labels, of which {held_out} are held out"
        if too_long:
            message += f"; {len(too_long)} others have more than the model's {longest} tokens, such as {too_long[0]}"
        raise InputError(message)
    left_out = {"too_long": len(too_long), "identical": identical}
    return Labels(
        queries=padded(queries, pad_id),
        samples=padded(samples, pad_id).unflatten(0, (len(queries), -1)),
        targets=torch.tensor(targets, dtype=torch.long if kind == "best" else torch.float32),
        kind=kind,
        held_out=len(queries) - num_train if rest_is_held_out else held_out,
        ceiling=facts.ceiling,
        left_out={name: count for name, count in left_out.items() if count},
    )


def check_ids(what: str, facts: LabelFacts, vocab_size: int) -> None:
    """Refuse a label file of ids that mean something else to a tokenizer of this size. what: the file."""
    their_vocab_size = facts.vocab_size or min(vocab_size, OPENAI_VOCAB_SIZE)
    if their_vocab_size != vocab_size:
        raise InputError(
            f"{what} holds ids of a vocabulary of {their_vocab_size}, but the base model's tokenizer has "
            f"{vocab_size}; use the model whose tokenizer wrote the file"
        )
    if 0 <= facts.padding_id < vocab_size:
        raise InputError(
            f"{what}: its padding id {facts.padding_id} is one of the tokenizer's {vocab_size} ids; pad with another "
            f'one, such as {vocab_size}, and add "padding_id": {vocab_size} to <name>.meta.json'
        )


def find_label_file(label_dataset: str, query_dataset: str) -> Path | None:
    """The file that this names: a local one, one next to the texts of a world, or one of OpenAI's on the hub.

    None if it is a data set on the hub.
    """
    world = find(query_dataset)
    for file in (Path(label_dataset), Path(world or "", "labels", label_dataset)):
        if file.is_file() or file.with_name(f"{file.name}.xz").is_file():
            return file
    what = f"--label_dataset {label_dataset}"
    if re.fullmatch(r"\w+/\w+[.]json", label_dataset) and not world:  # as OpenAI's files on the hub are called
        with input_errors(f"{what} is no local file, nor on the hub; give a file, or use --preset tales"):
            return Path(hub_files(OPENAI_DATA, label_dataset)[0])
    is_file = re.search(r"[.](jsonl?|parquet|csv)([.]xz)?$", label_dataset)
    if is_file or not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", label_dataset):
        place = f", nor in {world}/labels" if world else ""
        raise InputError(f"{what}: there is no such file{place}; give one, or use --preset tales")
    return None


def read_facts(file: Path) -> LabelFacts:
    """What is known about a label file."""
    facts = Path(str(file).removesuffix(".xz")).with_suffix(".meta.json")
    with input_errors(str(facts)):
        return TypeAdapter(LabelFacts).validate_json(read_text(facts)) if facts.is_file() else LabelFacts()


Rows = list[tuple[str, dict[str, Any]]]  # each with its place


def rows_of_file(file: Path, facts: LabelFacts) -> tuple[Rows, Rows]:
    """The rows of a label file; the last ones may be held out."""
    kind = Path(str(file).removesuffix(".xz")).suffix[1:]
    if kind == "json":
        rows = json.loads(read_text(file))
    elif kind == "jsonl":
        rows = [json.loads(line) for line in read_text(file).split("\n") if line.strip()]
    else:
        rows = load_dataset(kind, data_files=str(file), split="train")
    places = [(f"row {i + 1}", row) for i, row in enumerate(rows)]
    first_held_out = max(len(places) - (facts.held_out or 0), 0)
    return places[:first_held_out], places[first_held_out:]


def rows_of_hub(label_dataset: str) -> tuple[Rows, Rows]:
    """The rows of a data set on the hub: its split to train on, and its split for tests or else every 50th row."""
    name, _, configuration = label_dataset.partition(":")
    found = load_dataset(name, configuration or None)
    splits = []
    for names in (("train", "train_prefs"), ("test", "test_prefs")):
        split = next((name for name in names if name in found), "")
        splits.append([(f"{split} row {i + 1}", row) for i, row in enumerate(found[split] if split else ())])
    train_rows, test_rows = splits
    if not test_rows:
        test_rows = train_rows[HELD_OUT - 1 :: HELD_OUT]
        del train_rows[HELD_OUT - 1 :: HELD_OUT]
    return train_rows, test_rows


SPEAKERS = {"user": "Human", "assistant": "Assistant"}  # of HH-RLHF
ANSWER = "\n\nAssistant:"


def read_preference(row: dict[str, Any]) -> tuple[str, str, str]:
    """Prompt, chosen and rejected answer of a preference as they are published, as texts.

        {"prompt": "The sky is", "chosen": " blue.", "rejected": " up."}
        {"chosen": "The sky is blue.", "rejected": "The sky is up."}            the prompt is implicit
        {"prompt": messages, "chosen": messages, "rejected": messages}
        {"prompt": text or nothing, "chosen": messages, "rejected": messages}   both begin with the prompt

    A message is {"role": "user", "content": "Why?"}. Messages become texts in the form of HH-RLHF: a prompt is
    "\\n\\nHuman: Why?\\n\\nAssistant:", and " So." an answer to it. An implicit prompt is what both answers begin
    with: of texts, up to the last "\\n\\nAssistant:" or else up to the last white space; of messages, up to the last
    of the user's.
    """
    prompt, *answers = split_preference(row.get("prompt"), row["chosen"], row["rejected"])
    if isinstance(prompt, str):
        return prompt, *answers
    return as_text(prompt) + ANSWER, *(as_text(messages).removeprefix(ANSWER) for messages in answers)


def split_preference(prompt: Any, chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Prompt and the answers to it: three texts, or three lists of messages."""
    if all(isinstance(value, str) for value in (prompt or "", chosen, rejected)):
        if prompt is None:
            prompt = common_prompt(chosen, rejected)
            chosen, rejected = chosen.removeprefix(prompt), rejected.removeprefix(prompt)
        return prompt, chosen, rejected
    chosen, rejected = as_messages(chosen, "assistant"), as_messages(rejected, "assistant")
    common = common_beginning(chosen, rejected)
    while common and common[-1]["role"] == "assistant":
        common.pop()
    answers = {"chosen": chosen[len(common) :], "rejected": rejected[len(common) :]}
    if prompt:
        before = as_messages(prompt, "user")
        # Answers that don't begin with the assistant's turn repeat the prompt.
        if chosen[0]["role"] == "assistant" or before[-1] not in common:
            common = before + common
    if not common or common[-1]["role"] == "assistant":
        raise ValueError("it has no prompt: no message of the user's that both answers follow")
    for side, messages in answers.items():
        if not messages or messages[0]["role"] != "assistant":
            raise ValueError(f"{side} has no message of the assistant's after the prompt")
    return common, *answers.values()


def common_prompt(chosen: str, rejected: str) -> str:
    """The implicit prompt of two texts."""
    common = common_beginning(chosen, rejected)
    if ANSWER in common:
        return common[: common.rindex(ANSWER) + len(ANSWER)]
    return re.sub(r"\s*\S*$", "", common)  # two words may begin with the same letters


def common_beginning(one: Sequence, other: Sequence) -> Sequence:
    """What two texts or lists both begin with."""
    equal = [mine == theirs for mine, theirs in zip(one, other, strict=False)]
    return one[: [*equal, False].index(False)]


def as_messages(content: Any, role: str) -> list[dict[str, str]]:
    """The messages of a chat; a text is a message of this role."""
    if isinstance(content, str):
        content = [{"role": role, "content": content}]
    messages = [{key: message[key] for key in ("role", "content")} for message in content]
    if not all(isinstance(text, str) for message in messages for text in message.values()):
        raise TypeError("role and content of a message must be texts")
    return messages


def as_text(messages: list[dict[str, str]]) -> str:
    """Messages in the form of HH-RLHF."""
    return "".join(f"\n\n{SPEAKERS.get(one['role'], one['role'].capitalize())}: {one['content']}" for one in messages)


@torch.no_grad()
def sample_labels(
    reward_model: RewardModel, labels: Labels, tokenizer: PreTrainedTokenizerBase, pad_id: int
) -> list[dict[str, Any]]:
    """The samples of three labels as texts, if possible of held-out ones, with their scores."""
    first = len(labels.targets) - labels.held_out if labels.held_out else 0
    inds = torch.arange(len(labels.targets))[first:][:3]
    scores = score_samples(reward_model, labels, inds, pad_id)  # (labels, n)
    rows = []
    for i, own_scores in zip(inds.tolist(), scores.tolist(), strict=True):
        (query,) = to_texts(tokenizer, labels.queries[i : i + 1], pad_id)
        target = labels.targets[i].item()
        for j, text in enumerate(to_texts(tokenizer, labels.samples[i], pad_id)):
            label = f"{target:+.2f}"  # of a difference: of the second
            if labels.kind == "best":
                label = "best" if j == target else ""
            rows.append({"query": query, "sample": text, "label": label, "score": own_scores[j]})
    return rows


# ---- Plumbing: errors, arguments, processes, sizes -------------------------------------------------------------


class InputError(ValueError):
    """What the user can fix, in one line: what, what is wrong, what would do. It ends the script."""


@contextlib.contextmanager
def input_errors(what: str) -> Iterator[None]:
    """Turn a library's exception about something that the user named into an InputError that names it."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # libraries raise anything, and tokenizers a plain Exception
        said = " ".join(str(error).split())[:300]
        raise InputError(f"{what}: {type(error).__name__}: {said}") from error


def check_finite(metrics: dict[str, float], step: int) -> None:
    """Raise an InputError that names the metrics that are not finite."""
    if broken := [f"{name} is {value}" for name, value in metrics.items() if not math.isfinite(value)]:
        raise InputError(
            f"{', '.join(broken[:4])} in step {step}; the run stops and saves nothing more; "
            f"if it happens again after --resume, start again with a lower learning rate"
        )


# Arguments that a resumed run may change: length, memory, tracking, output. Other changes would make another run.
MAY_CHANGE = {"resume", "save_interval", "log_interval", "trace_interval", "trace_episodes", "gradient_checkpointing"}
MAY_CHANGE |= {"track", "tracker", "wandb_project_name", "wandb_entity", "upload_model", "hf_entity", "hf_private"}
MAY_CHANGE |= {"local_micro_batch_size", "local_rollout_batch_size", "ppo.total_episodes"}
MAY_CHANGE |= {"ppo.local_micro_batch_size", "ppo.local_rollout_batch_size"}


def parse_args(
    presets: dict[str, Args],
    argv: list[str] | None = None,
    description: str | None = None,
    may_change: set[str] = MAY_CHANGE,
) -> Args:
    """Read the command line: --preset chooses the defaults, and every other flag overrides one.

    With --resume runs/<run>, the defaults are the arguments of that run, and few may change.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default=next(iter(presets)))
    first.add_argument("--resume", default="")
    known, _ = first.parse_known_args(argv)
    if known.preset not in presets:
        raise InputError(f"--preset {known.preset}: unknown; there are {', '.join(presets)}")
    default = presets[known.preset]
    if known.resume:
        default = dataclasses.replace(saved_args(type(default), Path(known.resume)), resume=known.resume)
    args = checked(tyro.cli(type(default), args=argv, default=default, description=description))
    if known.resume:
        check_same_arguments(default, args, may_change)
    return args


def checked(args: Args) -> Args:
    """The same arguments, if all are of the type and within the bounds at their field; else an InputError."""
    return from_json(type(args), json.dumps(dataclasses.asdict(args)), "")


def from_json(kind: type[Args], text: str, source: str) -> Args:
    """Arguments of a script from JSON. source: where it is from, for messages; empty: the command line."""
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        wrong = error.errors()[0]
        flag = "--" + ".".join(map(str, wrong["loc"]))
        raise InputError(f"{source}{flag} {wrong['input']}: {wrong['msg']}") from error


def saved_args(kind: type[Args], folder: Path) -> Args:
    """The arguments of the run in a folder, which a script with such arguments began."""
    meta = read_meta(folder)
    if meta.get("script", kind.exp_name) != kind.exp_name:  # by default, experiments have the names of scripts
        raise InputError(f"--resume {folder}: it is a run of {meta['script']}; resume it with that script")
    root = folder.absolute().parents[1]
    known = meta["args"] if root == Path.cwd() else below(root, meta["args"])
    args = from_json(kind, json.dumps(known), f"{folder / 'meta.json'} of another version: ")
    if missing := flatten(dataclasses.asdict(args)).keys() - flatten(meta["args"]).keys():
        raise InputError(f"{folder / 'meta.json'} of another version lacks --{min(missing)}")
    return args


def below(root: Path, value: Any) -> Any:
    """Arguments of a run; a relative path that exists below its root, the folder of runs/, is meant from there."""
    if isinstance(value, dict):
        return {name: below(root, part) for name, part in value.items()}
    is_path = isinstance(value, str) and bool("/" in value or Path(value).suffix)
    return str(root / value) if is_path and os.path.exists(root / value) else value


def check_same_arguments(saved: Args, args: Args, may_change: set[str]) -> None:
    """Refuse to resume with other arguments than the saved ones, except those that may change."""
    old, new = flatten(dataclasses.asdict(saved)), flatten(dataclasses.asdict(args))
    for name in old:
        if old[name] != new[name] and name not in may_change:
            raise InputError(
                f"--{name} {new[name]}: the run to resume has {old[name]}; only these may change: "
                f"{', '.join(sorted(may_change & old.keys()))}"
            )


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"ppo": {"lr": 1}} becomes {"ppo.lr": 1}."""
    flat = {}
    for name, value in nested.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def make_accelerator(dtype: str) -> Accelerator:
    """The processes that the launcher started, on GPUs or, where there is none, on the CPU."""
    accelerator = Accelerator(cpu=not (torch.cuda.is_available() or torch.backends.mps.is_available()))
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != started:
        raise InputError(
            f"the launcher started {started} processes, but accelerate sees {accelerator.num_processes}; without a "
            f"GPU, use torchrun --nproc_per_node {started}"
        )
    if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        raise InputError("every process keeps whole models; launch without FSDP and DeepSpeed")
    if dtype == "float64" and accelerator.device != float64_device(accelerator.device):
        raise InputError(f"--dtype float64: a device of type {accelerator.device.type} has none; use float32")
    return accelerator


def float64_device(device: torch.device) -> torch.device:
    """The device for float64: this one, or the CPU in place of an Apple GPU, which has none."""
    return torch.device("cpu") if device.type == "mps" else device


@dataclass(frozen=True, kw_only=True)
class RewardSizes:
    """Sizes, from the arguments and the number of processes: labels, or samples to normalise on."""

    steps: int
    batch: int
    local_batch: int
    normalize_samples: int
    local_normalize_samples: int


def reward_sizes(args: Args, num_processes: int) -> RewardSizes:
    """Divide the global sizes exactly, or raise an InputError that says which size does not divide and what would."""
    # A batch must divide among the processes, and num_train must be whole batches.   train_reward.py#L56-L58
    local_batch = split_evenly("batch_size", args.batch_size, num_processes, "processes")
    split_evenly("rollout_batch_size", args.rollout_batch_size, num_processes, "processes")
    if args.num_train % args.batch_size:
        whole_batches = args.num_train // args.batch_size * args.batch_size or args.batch_size
        raise InputError(
            f"num_train {args.num_train} is not whole batches of {args.batch_size}; --num_train {whole_batches} is"
        )
    # [D36] Samples come in whole rollout batches: 256 asked for and batches of 512 give 512.
    #       train_reward.py#L197-L199
    normalize_samples = math.ceil(args.normalize_samples / args.rollout_batch_size) * args.rollout_batch_size
    return RewardSizes(
        steps=args.num_train // args.batch_size,
        batch=args.batch_size,
        local_batch=local_batch,
        normalize_samples=normalize_samples,
        local_normalize_samples=normalize_samples // num_processes,
    )


def split_evenly(name: str, value: int, parts: int, what: str) -> int:
    """value / parts, if that is exact. what: what the parts are, for the message."""
    if value % parts:
        raise InputError(
            f"{name} {value} does not divide by {parts} ({what}); {math.ceil(value / parts) * parts} does"
        )
    return value // parts


# ---- Plumbing: models and tokenizers ---------------------------------------------------------------------------

PAD_TOKEN = "<|ppo_rlhf_pad|>"  # of the tokenizers that are saved with reward models


def find(name: str) -> Path | None:
    """The folder that a name means: one in the current folder, or that of a world; None: the name is on the hub.

    Worlds are next to this script, in the package, and, where they were fetched, in $PPO_RLHF_CACHE or
    ~/.cache/ppo_rlhf. So arguments keep their names, and a run can be moved.
    """
    cache = Path(os.environ.get("PPO_RLHF_CACHE") or Path.home() / ".cache" / "ppo_rlhf")
    places = [Path(), Path(__file__).with_name("worlds") / "data", cache]
    with contextlib.suppress(ImportError, AttributeError, TypeError):  # it need not be installed
        places.append(Path(importlib.util.find_spec("ppo_rlhf").origin).with_name("worlds") / "data")
    return next((place / name for place in places if name and (place / name).is_dir()), None)


@contextlib.contextmanager
def model_errors(base_model: str) -> Iterator[tuple[str, str | None]]:
    """Yields the folder of a model, or its name on the hub, and its revision there, of <name>@<revision>.

    What goes wrong in the block becomes one line.
    """
    folder = find(base_model)
    if folder and not (folder / "config.json").is_file():
        folder = folder / "model"  # of a world
    with input_errors(
        f"--base_model {base_model} cannot be loaded from safetensors; give a folder, a name on the hub, or tales "
        f"(python ppo_rlhf/worlds/reviews.py fetches smollm2-135m)"
    ):
        try:
            name, _, revision = (str(folder), "", "") if folder else base_model.partition("@")
            yield name, revision or None
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            raise InputError(
                f"--base_model {base_model} needs Python code that comes with it or is on the hub; "
                f"--trust_remote_code runs that code, if you trust it"
            ) from error


def load_tokenizer(base_model: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    with model_errors(base_model) as (path, revision):
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
        if not tokenizer.encode("a", add_special_tokens=False):  # the library makes up an empty one
            raise InputError(f"{base_model} has no tokenizer")
        return tokenizer


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One above a tokenizer's largest id, which is its length unless its ids have holes; also our padding id.

    An id in a hole may be sampled, like any row of the output layer that has no text, and is decoded as nothing.
    PAD_TOKEN, which has the padding id, doesn't count.
    """
    return max(token for text, token in tokenizer.get_vocab().items() if text != PAD_TOKEN) + 1


def one_token(tokenizer: PreTrainedTokenizerBase, text: str | None, name: str) -> int | None:
    """The id of a text that must be exactly one token; None for None."""
    if text is None:
        return None
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise InputError(f"--{name} {text!r} is {len(ids)} tokens ({ids}); it must be exactly one")
    return ids[0]


def load_models(args: Args, device: torch.device) -> tuple[RewardModel, PreTrainedModel]:
    """The reward model before it learns, and the pretrained model, which never changes."""
    dtype = torch.float64 if args.dtype == "float64" else torch.float32
    language_model = load_pretrained(args.base_model, dtype, args.trust_remote_code).to(device)
    # [D27] The reward model is a copy of the pretrained model, trained as a whole.   train_reward.py#L275
    lm_backbone = load_pretrained(args.base_model, dtype, args.trust_remote_code, AutoModel)
    # [D76] The head is the same on every process. All other noise is keyed.   utils/core.py#L108-L113
    torch.manual_seed(args.seed)
    reward_model = RewardModel(lm_backbone)
    return reward_model.to(device, dtype), language_model.requires_grad_(False)


def load_pretrained(
    base_model: str, dtype: torch.dtype, trust_remote_code: bool = False, auto_class: type = AutoModelForCausalLM
) -> PreTrainedModel:
    """A pretrained model such as GPT-2 or Pythia, from safetensors."""
    with model_errors(base_model) as (path, revision):
        if auto_class is AutoModelForCausalLM and Path(path, "reward_head.safetensors").is_file():
            raise InputError(f"--base_model {base_model} is a reward model, not a language model")
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
        check_files(Path(path), config, base_model)
        if "/" in (config._attn_implementation or "") and not trust_remote_code:
            raise ValueError("its attention is code from the hub, which needs trust_remote_code")
        # [D17] The library's GPT-2 is the original's network: tanh-GELU, tied output layer, layer norm epsilon 1e-5.
        #       language/model.py#L14-L73
        #       `gelu_pytorch_tanh` is the same function as `gelu_new`, in one kernel instead of eight.
        if getattr(config, "final_logit_softcapping", None) or getattr(config, "attn_logit_softcapping", None):
            raise InputError(f"--base_model {base_model} caps its logits (Gemma 2), which is not supported")
        activation = getattr(config, "activation_function", None)
        if activation == "gelu_new":
            config.activation_function = "gelu_pytorch_tanh"
        # [D18] Dropout is off, as from_pretrained leaves it. So the sampler and the training pass agree, and every
        #       ratio starts at 1.   policy.py#L48
        model, loading = auto_class.from_pretrained(
            path,
            revision=revision,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
        if loading["missing_keys"]:
            raise InputError(f"the weights of {base_model} lack {min(loading['missing_keys'])}")
        if getattr(model, "_hf_peft_config_loaded", False):
            raise InputError(f"{base_model} has adapters; merge them and save the model")
        if activation:
            model.config.activation_function = activation  # the model is saved with the one that it came with
        # [D66] The embedding of the token that the configuration names as padding learns like any other.
        model.get_input_embeddings().padding_idx = None
        return model


def check_files(folder: Path, config: PreTrainedConfig, base_model: str) -> None:
    """Refuse what the library would read in a model's folder in place of safetensors, or in addition."""
    if (folder / "adapter_config.json").is_file():
        raise InputError(f"--base_model {base_model} has adapters; merge them and save the model")
    weights = [getattr(config, "transformers_weights", None) or "model.safetensors"]
    if (index := folder / "model.safetensors.index.json").is_file():
        weights += json.loads(index.read_text())["weight_map"].values()
    others = [name for name in weights if not name.endswith(".safetensors")]
    others += [path.name for path in folder.glob("shard-*-model-*-of-*.safetensors")]  # whose table is a pickle
    if others:
        raise InputError(f"--base_model {base_model}: {others[0]} is not read; save the model as safetensors")


def prepare(lm_backbone: PreTrainedModel, args: Args) -> None:
    """Let the network compute as the arguments say: matrix products in bfloat16, checkpointed layers."""
    network = lm_backbone.base_model
    if args.gradient_checkpointing:
        for layer in network.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.forward = partial(forward_twice, layer.forward)
    if args.dtype == "bfloat16":
        network.forward = torch.autocast(network.device.type, torch.bfloat16)(network.forward)


def forward_twice(forward: Callable, *inputs: Any, **options: Any) -> Any:
    """Keep only the inputs of a layer, and compute the rest again in the backward pass."""
    # The library does it in train mode alone, and then refuses the cache that sampling needs.
    if torch.is_grad_enabled():
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **options)
    return forward(*inputs, **options)


def check_length(lm_backbone: PreTrainedModel, what: str, length: int) -> None:
    """Raise an InputError unless a model reads so many tokens. what: the argument that names it, and its value."""
    longest = getattr(lm_backbone.config, "max_position_embeddings", None) or length
    if length > longest:
        raise InputError(
            f"{what} reads at most {longest} tokens, but query and response are {length}; shorten "
            f"--task.query_length or --task.response_length"
        )


@torch.no_grad()
def check_model(lm_backbone: PreTrainedModel, base_model: str, length: int, pad_id: int) -> None:
    """Raise an InputError unless the model reads `length` tokens our way, with padding anywhere, as without it."""
    what = f"--base_model {base_model}"
    check_length(lm_backbone, what, length)
    if (rows := lm_backbone.get_input_embeddings().num_embeddings) < pad_id:
        raise InputError(f"{what} has an embedding of {rows} rows for a tokenizer of {pad_id}")
    tokens = (torch.arange(length, device=lm_backbone.device) % pad_id).unsqueeze(0)  # (1, length)
    between = torch.cat([tokens[:, : length // 2], tokens.new_full((1, 3), pad_id), tokens[:, length // 2 :]], dim=1)
    with input_errors(f"{what} cannot be read with an attention mask of 4 dimensions"):
        expected = lm_backbone(input_ids=tokens).logits[..., :pad_id]  # (1, length, vocab_size)
        if not expected.isfinite().all():
            raise InputError(f"{what}: its logits are not finite")
        for row in (tokens, between):
            hidden_states = read_tokens(lm_backbone, row, pad_id, slice(None))[row != pad_id]
            logits = scaled_logits(lm_backbone, hidden_states, pad_id, temperature=1.0)
            difference = (logits - expected[0]).square().mean(1).sqrt()  # (length,)
            if (difference > 1e-3 * expected[0].std(1, correction=0)).any():
                raise InputError(
                    f"{what} gives other logits when its tokens are read with padding between them: models with a "
                    f"recurrent state (Mamba), distances of columns (ALiBi) or a scale of the logits are not "
                    f"supported, nor is a window shorter than query and response"
                )


FINAL_NORM_BIASES = ("ln_f.bias", "final_layer_norm.bias", "norm.bias")  # GPT-2; GPT-NeoX; others


@torch.no_grad()
def save_reward_model(
    folder: Path,
    reward_model: RewardModel,
    tokenizer: PreTrainedTokenizerBase,
    info: dict[str, Any],
    trust_remote_code: bool = False,
    weights: bool = True,
) -> None:
    """Save as an ordinary sequence-classification model that gives the same scores, gain and bias included.

    The score of such a model is linear in the final hidden state and has no constant. So the gain goes into the
    weight w of the score, and the constant c into the bias of the final layer norm, along w: w (h + c w / |w|^2)
    = w h + c. Where that norm has no bias, c is in the configuration as `score_constant` and must be added.
    `reward_head.safetensors` keeps what this changed, so that it can be loaded bit for bit.

    info: for ppo_rlhf.json. weights: False saves all but the weights.
    """
    backbone, head = reward_model.lm_backbone.base_model, reward_model.reward_head
    # Some models refuse a padding id beyond their embedding, so it is set once the embedding has a row for it.
    config = type(backbone.config).from_dict(backbone.config.to_dict() | {"pad_token_id": None})
    config.num_labels, config.score_constant = 1, 0.0
    with contextlib.nullcontext() if weights else torch.device("meta"):
        classifier = AutoModelForSequenceClassification.from_config(
            config, dtype=head.weight.dtype, trust_remote_code=trust_remote_code
        )
    kept = {}
    if weights:
        # Gain and bias are kept, and the scores are the same bit for bit.   train_reward.py#L292-L329
        kept = {name: x for name, x in reward_model.state_dict().items() if not name.startswith("lm_backbone.")}
        state = backbone.state_dict()
        weight = reward_model.gain * head.weight  # (1, width)
        constant = (reward_model.gain * head.bias + reward_model.bias).item()
        classifier.to(weight.device).base_model.load_state_dict(state)
        classifier.score.weight.copy_(weight)
        if norm_bias := next((name for name in FINAL_NORM_BIASES if name in state), None):
            kept[f"lm_backbone.{norm_bias}"] = state[norm_bias].clone()
            classifier.base_model.state_dict()[norm_bias].add_(constant * weight[0] / (weight**2).sum())
        else:
            classifier.config.score_constant = constant
    pad_id = vocabulary_size(tokenizer)
    rows = classifier.get_input_embeddings().num_embeddings
    if rows <= pad_id:
        classifier.resize_token_embeddings(pad_id + 1, mean_resizing=False)
        classifier.get_input_embeddings().weight[rows:] = 0.0
    classifier.config.pad_token_id = pad_id
    classifier.save_pretrained(folder, state_dict=None if weights else {})
    with_padding(tokenizer, pad_id).save_pretrained(folder)
    save_file(kept, folder / "reward_head.safetensors")
    write_json(folder / "ppo_rlhf.json", info)


def with_padding(tokenizer: PreTrainedTokenizerBase, pad_id: int) -> PreTrainedTokenizerBase:
    """A copy of a tokenizer that pads texts on the right with our padding id, or refuses to pad.

    A sequence classifier reads the score at the last token that isn't the padding id of its configuration. If its
    tokenizer padded with another id, such as the end of text, the score would be that of a padding token.
    """
    padding = copy.deepcopy(tokenizer)
    padding.padding_side = "right"
    padding.add_special_tokens({"pad_token": PAD_TOKEN})
    if padding.pad_token_id != pad_id:  # the ids have a hole, and the new token is in it
        padding = copy.deepcopy(tokenizer)
        padding.pad_token = None
    return padding


# ---- Plumbing: texts -------------------------------------------------------------------------------------------

HELD_OUT = 50  # where a source has no texts for tests, PPO never sees every 50th text [X12]
BOOK_ROWS = 16


def load_texts(query_dataset: str, split: str, column: str = "text") -> Sequence[str]:
    """The texts that queries come from, in the order of their source. split: train or test. column: key of the texts.

    <file>.txt             one text per line; .txt, .json and .jsonl may be compressed: stories.txt.xz
    <file>.jsonl, .json    one string or object per line, or an array of them
    <file>.parquet, .csv   rows, as the library `datasets` reads them
    <owner>/<name>         rows of a data set on the hub, or <owner>/<name>:<configuration>
    <folder>, tales, ...   stories.txt in a folder or world, and perhaps stories_test.txt
    books, cnndm, tldr     the original's sources on the hub
    """
    # The name says where the texts come from.   datasets/books.py#L7-L17
    with input_errors(
        f"--task.query_dataset {query_dataset} cannot be read; give a .txt, .jsonl, .json, .parquet or .csv file, a "
        f"data set on the hub, or tales; python ppo_rlhf/worlds/reviews.py fetches reviews"
    ):
        if query_dataset not in ("books", "cnndm", "tldr") and (folder := find(query_dataset)):
            texts = read_texts(folder / "stories.txt", column)
            if list(folder.glob("stories_test.txt*")):
                return texts if split == "train" else read_texts(folder / "stories_test.txt", column)
        elif query_dataset == "books":
            # The original's file is lost. This copy of BookCorpus has a sentence in each row, with spaces around
            # punctuation and in lower case.
            files = hub_files("rojagtap/bookcorpus", "books_large_p?.txt")
            rows = load_dataset("text", data_files=files, split="train")["text"]
            texts = CleanTexts(rows, join_book_rows, BOOK_ROWS)
        elif query_dataset == "cnndm":
            # The usual parquet files have single lines, which leave nothing to end queries at. So they only say which
            # of the raw stories belong to a split.
            archives = hub_files("ccdv/cnn_dailymail", "*_stories.tgz")
            ids = hub_files("abisee/cnn_dailymail", f"3.0.0/{split}-*.parquet")
            files = {"archives": tuple(archives), "ids": tuple(ids)}  # the library would deal out lists as shards
            rows = Dataset.from_generator(raw_stories, gen_kwargs=files)["text"]
            return CleanTexts(rows, clean_cnndm)
        elif query_dataset == "tldr":
            files = hub_files(OPENAI_DATA, f"tldr/{'valid' if split == 'test' else split}-subset.json")
            rows = Dataset.from_generator(raw_posts, gen_kwargs={"files": files})["text"]
            return CleanTexts(rows, clean_tldr)
        elif re.search(r"[.](txt|jsonl|json)([.]xz)?$", query_dataset):
            texts = read_texts(Path(query_dataset), column)
        else:
            name, _, configuration = query_dataset.partition(":")
            kind = Path(query_dataset).suffix[1:]
            if kind in ("parquet", "csv"):
                found = load_dataset(kind, data_files=query_dataset)
            else:
                found = load_dataset(name, configuration or None)
            rows = found[split if split in found else "train"]
            texts = [text_of(row, column) for row in rows]
            if "test" in found:
                return texts
    places = range(HELD_OUT - 1, len(texts), HELD_OUT)
    return Subset(texts, [i for i in range(len(texts)) if (i in places) == (split == "test")])


def read_text(path: Path) -> str:
    """The text of a file, or of <name>.xz, its compressed copy, if that is there."""
    packed = path if path.suffix == ".xz" else path.with_name(f"{path.name}.xz")
    if packed.is_file():
        return lzma.decompress(packed.read_bytes()).decode()
    return path.read_text(encoding="utf-8-sig")


def read_texts(path: Path, column: str) -> list[str]:
    """The texts of a .txt, .jsonl or .json file."""
    content = read_text(path)
    lines = [line for line in content.split("\n") if line.strip()]
    if ".jsonl" in path.suffixes:
        rows = map(json.loads, lines)
    elif ".json" in path.suffixes:
        rows = json.loads(content)
    else:
        rows = lines
    texts = [text_of(row, column) for row in rows]
    return [text for text in texts if text.strip()]


def text_of(row: Any, column: str) -> str:
    """A row that is a text, or the text under a key of it, with dots for nested ones."""
    if not isinstance(row, str):
        for key in [column] if column in row else column.split("."):
            row = row[key]
    if not isinstance(row, str):
        raise ValueError(f"--task.query_column {column}: there must be texts, not {str(row)[:60]!r}")
    row.encode()  # half a character, which no tokenizer accepts, is a ValueError
    return row


OPENAI_DATA = "vwxyzjn/lm-human-preferences"  # a copy on the hub of OpenAI's labels and Reddit posts


def hub_files(repository: str, *patterns: str) -> list[str]:
    """The paths of files of a data set on the hub, once they are downloaded. Raises an OSError if there are none."""
    folder = Path(snapshot_download(repository, repo_type="dataset", allow_patterns=list(patterns)))
    found = sorted(str(path) for pattern in patterns for path in folder.glob(pattern))
    if not found:
        raise FileNotFoundError(f"the hub's {repository} has no {' or '.join(patterns)}")
    return found


@dataclass(frozen=True)
class CleanTexts(Sequence):
    """Texts that are cleaned when they are read, each from so many rows of a column on disk."""

    column: Sequence[str]
    clean: Callable
    rows: int = 1

    def __len__(self) -> int:
        return len(self.column) // self.rows

    def __getitem__(self, index: int) -> str:
        return self.clean(*self.column[index * self.rows : (index + 1) * self.rows])


def raw_stories(archives: tuple[str, ...], ids: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """The stories whose ids, the names of files, parquet files list; in the order of the archives."""
    wanted = set(load_dataset("parquet", data_files=list(ids), split="train")["id"])
    for archive in archives:
        with tarfile.open(archive) as members:
            for member in members:
                if PurePosixPath(member.name).stem in wanted and (story := members.extractfile(member)):
                    yield {"text": story.read().decode()}


def raw_posts(files: list[str]) -> Iterator[dict[str, str]]:
    """The texts of OpenAI's Reddit posts. Lone surrogates, which no table can hold, become U+FFFD."""
    for path in files:
        for row in json.loads(Path(path).read_text(encoding="utf-8")):
            yield {"text": ftfy.fixes.fix_surrogates(row["content"])}


def join_book_rows(*rows: str) -> str:
    """Rows of BookCorpus, sentences with spaces around punctuation, as a passage of ordinary text."""
    text = " ".join(row.strip() for row in rows).replace("`` ", '"').replace(" ''", '"')
    text = re.sub(r" ([.,;:!?%)\]]|n't\b|'(?:s|m|d|re|ve|ll)\b)", r"\1", text)
    return re.sub(r"([(\[$]) ", r"\1", text)


def clean_cnndm(text: str) -> str:
    """A CNN/Daily Mail story without bylines, datelines, update notices and highlights."""
    # The rules apply in the original's order.   datasets/cnndm.py#L70-L103
    if text.startswith("By"):
        text = "\n".join(text.split("\n")[2:])
    text = re.sub(r"(?s).*\(CNN\) +--", "", text)
    text = text[:100].rpartition("(CNN)")[2] + text[100:]
    text = re.sub(r"^and \w+\n", "", text)
    text = re.sub(r"(?s).*UPDATED:\s+\d\d:\d\d[^\n]*201\d", "", text)
    text = clean_tldr(re.sub("[\u2018\u2019]", "'", text).strip())
    return text.split("@highlight")[0].strip()


def clean_tldr(text: str) -> str:
    """A text without broken characters, and with at most one empty line in a row."""
    # Fix characters and line breaks, and strip space at both ends.   datasets/tldr.py#L24-L29
    return re.sub(r"\n{3,}", "\n\n", ftfy.fix_text(text)).strip()


# ---- Plumbing: the folder of a run, its logs and checkpoints ---------------------------------------------------

KEPT = 2  # the newest checkpoints; if the last is damaged, the one before it is there


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file under a temporary name, then rename it: a reader never sees half a file."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")
    temporary.replace(path)


def read_meta(folder: Path) -> dict[str, Any]:
    with input_errors(f"{folder} is not the folder of a run"):
        meta = json.loads((folder / "meta.json").read_text())
        return meta | {"args": dict(meta["args"]), "wall_time": float(meta["wall_time"])}


def commit() -> str:
    """The commit of this project's checkout, marked when files differ from it; empty outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or no checkout
        return ""


class Run:
    """The folder of a run, runs/<exp_name>__<preset>__<seed>__<time>. The main process writes these files.

    meta.json           arguments, derived sizes, commit, versions, device, wall time, results
    metrics.csv         one row per step, all metrics; TensorBoard event files hold the same
    samples.jsonl       the samples that were printed
    checkpoints/<step>  everything needed to resume
    """

    def __init__(
        self, args: Args, accelerator: Accelerator, sizes: dict[str, int], timestamp: int | None = None
    ) -> None:
        """Nothing is written before open_logs. timestamp: for the name; None: the time."""
        self.args = args
        self.accelerator = accelerator
        self.is_main = accelerator.is_main_process
        if not (args.resume or timestamp):
            timestamp = int(time.time())
            while list(Path("runs").glob(f"*__{timestamp}")):  # it names another run
                timestamp += 1
            (timestamp,) = broadcast_object_list([timestamp])
        name = f"{args.exp_name}__{args.preset}__{args.seed}__{timestamp}"
        self.folder = Path(args.resume or f"runs/{name}").absolute()
        self.models = self.folder.parents[1] / "models" / self.folder.name
        self.csv_size = 0  # bytes of metrics.csv
        self.signals: list[int] = []
        previous = read_meta(self.folder) if args.resume else {}
        if previous.get("finished") and not self.checkpoints():
            raise InputError(f"{self.folder} is finished, and its checkpoints are gone, so it cannot be resumed")
        weights = checksums(args)
        if changed := [name for name, sum in previous.get("weights", {}).items() if weights.get(name, sum) != sum]:
            raise InputError(f"--{changed[0]}: its weights are not those with which {self.folder} began")
        self.started = time.monotonic() - previous.get("wall_time", 0.0)
        gpu = accelerator.device.type == "cuda"
        # The arguments are next to the results of the run.   train_policy.py#L422-L436
        self.meta = {
            "name": self.folder.name,
            "script": type(args).exp_name,  # by default, experiments have the names of scripts
            "args": dataclasses.asdict(args),
            "sizes": sizes,
            "weights": weights,
            "num_processes": accelerator.num_processes,
            "threads": torch.get_num_threads(),
            "device": f"{accelerator.device.type}: {torch.cuda.get_device_name() if gpu else platform.machine()}",
            "commit": commit(),
            "tags": [tag for tag in os.environ.get("WANDB_TAGS", "").split(",") if tag],
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "accelerate": accelerate.__version__,
            },
            "wandb_id": previous.get("wandb_id") or secrets.token_hex(4),  # a resumed run goes on under it
            "finished": False,
            "results": {},
        }

    def seconds(self) -> float:
        """Wall time of the run so far, with the time before it was resumed."""
        return time.monotonic() - self.started

    def save_meta(self, **changes: Any) -> None:
        if self.is_main:
            self.meta |= changes | {"wall_time": round(self.seconds(), 1)}
            write_json(self.folder / "meta.json", self.meta)

    def try_to_save(self, save: Callable[[Path], None]) -> None:
        """Save what the run will save at its end, but for the weights, to a folder that is thrown away."""
        if self.is_main:
            with tempfile.TemporaryDirectory() as folder, input_errors("what would be trained could not be saved"):
                save(Path(folder))

    def open_logs(self, first_step: int, config: dict[str, Any]) -> None:
        """Make the folder, and open the logs; drop what a run that was cut off had logged at first_step and later.

        config: what the tracker gets in addition to the arguments.
        """
        # A signal to stop, which clusters send before they take a machine away, waits for the end of the update.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.stop_soon)
        if not self.is_main:
            return
        self.folder.mkdir(parents=True, exist_ok=bool(self.args.resume))
        if first_step:
            self.cut_logs(first_step)
        else:
            for name in ("metrics.csv", "samples.jsonl"):
                (self.folder / name).write_text("")
        self.csv_size = (self.folder / "metrics.csv").stat().st_size
        self.save_meta()
        print(f"run {self.folder}", *(f"{name} {value}" for name, value in self.meta["sizes"].items()), sep="   ")
        # Trackers get every step, counted from 0, under the names of metrics.csv.   utils/core.py#L596-L618
        # TensorBoard forgets what the run that was cut off had logged at the step purge_step and later.
        trackers = [TensorBoardTracker("", self.folder, purge_step=first_step)]
        if self.args.track:
            trackers.append(self.tracker(self.meta["args"] | config | {"commit": self.meta["commit"]}))
        self.accelerator.log_with = trackers
        with input_errors("--track: the tracker does not start"):
            self.accelerator.init_trackers("")

    def cut_logs(self, first_step: int) -> None:
        """Keep what metrics.csv and samples.jsonl say of the steps before first_step."""
        with input_errors(f"{self.folder}: metrics.csv or samples.jsonl is damaged"):
            # kill -9 may have cut off the last line.
            kept = {}
            for name in ("metrics.csv", "samples.jsonl"):
                lines = (self.folder / name).read_text().splitlines(keepends=True)
                kept[name] = [line for line in lines if line.endswith("\n")]
            header, *rows = kept["metrics.csv"]
            rows = [row for row in rows if int(row.split(",")[0]) < first_step]
            samples = [line for line in kept["samples.jsonl"] if json.loads(line)["step"] < first_step]
            if [int(row.split(",")[0]) for row in rows] != list(range(first_step)):
                raise ValueError(f"it holds {len(rows)} of the {first_step} steps before the checkpoint")
        (self.folder / "metrics.csv").write_text("".join([header, *rows]))
        (self.folder / "samples.jsonl").write_text("".join(samples))

    def tracker(self, config: dict[str, Any]) -> GeneralTracker:
        """Weights & Biases or Trackio, as the arguments say."""
        project, name = self.args.wandb_project_name, self.folder.name
        if self.args.tracker == "trackio":
            return TrackioTracker(project, name=name, config=config, resume="allow")
        return WandBTracker(
            project,
            entity=self.args.wandb_entity,
            name=name,
            id=self.meta["wandb_id"],
            resume="allow",
            config=config,
            dir=str(self.folder),
            # A remote's address may hold a token. WANDB_SAVE_CODE would save code all the same.
            settings={"disable_code": True, "disable_git": True, "save_code": False},
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write one row of metrics. step: 0-based."""
        if self.is_main:
            with (self.folder / "metrics.csv").open("a", newline="") as file:
                if file.tell() != self.csv_size:
                    raise InputError(f"{self.folder}: another process writes to this run")
                writer = csv.writer(file, lineterminator="\n")
                if not self.csv_size:
                    writer.writerow(["step", *metrics])
                writer.writerow([step, *metrics.values()])
            self.csv_size = (self.folder / "metrics.csv").stat().st_size
            self.accelerator.log(metrics, step=step)

    def log_samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Print rows with texts and numbers, and append them to samples.jsonl."""
        if self.is_main:
            with (self.folder / "samples.jsonl").open("a") as file:
                file.writelines(json.dumps({"step": step, **row}) + "\n" for row in rows)
            print(f"\nstep {step}")
            for row in rows:
                print(*(f"{name}: {as_cell(value)}" for name, value in row.items()), sep="   ")
            if self.args.track:
                library = importlib.import_module(self.args.tracker)
                table = library.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
                self.accelerator.log({"samples": table}, step=step)

    def stop_at_once(self) -> None:
        """From here on, SIGTERM and Ctrl-C end the run at once: everything that was learned is in a checkpoint."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def stop_soon(self, number: int, frame: Any) -> None:
        """What SIGTERM and the first Ctrl-C do: the run stops when its checkpoint is written."""
        self.signals.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.is_main:
            print("\nthe run stops after this update; Ctrl-C again stops it at once", file=sys.stderr)

    def told_to_stop(self) -> bool:
        """Whether one of the processes has got a signal to stop. All processes must call this."""
        return any(gather_object([bool(self.signals)]))

    def finish(self, part: str, **results: Any) -> None:
        """Record the results, upload models/<run>/<part> if that is asked for, and close the logs."""
        if self.is_main:
            self.save_meta(finished=True, results=results)
            numbers = {name: value for name, value in results.items() if isinstance(value, int | float)}
            steps = sum(1 for _ in (self.folder / "metrics.csv").open()) - 1
            self.accelerator.log(numbers, step=steps)
            if self.args.upload_model:
                address = upload_model(self.models / part, self.args, self.accelerator)
                print(f"uploaded to {address}")
                self.accelerator.log({f"model/{part}": address}, step=steps)
            for tracker in self.accelerator.trackers:  # end_training would also part the processes
                tracker.finish()
            print(f"finished {self.folder}; what it trained is in {self.models / part}")
        self.accelerator.wait_for_everyone()

    # ---- Checkpoints: trained weights and Adam's moments in safetensors, the rest in JSON ----

    def save_checkpoint(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Write checkpoints/<step>; keep the newest two. state: what resumes besides, with the number of steps made.

        It gets its name when it is complete and on disk, so that kill -9 never leaves half of one.
        """
        # It has weights, Adam's moments, KL coefficient and position in the texts.   train_policy.py#L474-L508
        if not self.is_main:
            return
        tensors = {name: x.detach().contiguous() for name, x in self.training_state(model, optimizer).items()}
        if broken := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
            raise InputError(f"{broken[0]} is not finite after step {state['step']}; nothing more is saved")
        folder = self.folder / "checkpoints"
        temporary = folder / "new.tmp"
        with input_errors(f"the checkpoint of step {state['step']} cannot be written; those before it are kept"):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            save_file(tensors, temporary / "tensors.safetensors")
            write_json(temporary / "state.json", state | {"sha256": checksum(temporary, state)})
            for file in temporary.iterdir():
                with file.open("rb") as written:
                    os.fsync(written.fileno())
            shutil.rmtree(folder / str(state["step"]), ignore_errors=True)
            temporary.rename(folder / str(state["step"]))
        for old in self.checkpoints()[:-KEPT]:
            shutil.rmtree(old)
        self.save_meta()

    def training_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """The tensors of a checkpoint: trained weights and Adam's moments."""
        tensors = {f"model.{name}": tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
        for index, moments in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": tensor for name, tensor in moments.items()}
        return tensors

    @torch.no_grad()
    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
        """The inverse of training_state."""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(tensors[f"model.{name}"])
        adam = optimizer.state_dict()
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, index, moment = name.split(".")
                adam["state"].setdefault(int(index), {})[moment] = tensor
        for group in adam["param_groups"]:
            if "steps" in group:  # an AdamTensorFlowStyle counts them
                group["steps"] = int(adam["state"][group["params"][0]]["step"])
        optimizer.load_state_dict(adam)

    def checkpoints(self) -> list[Path]:
        """The folders of the checkpoints, in their order."""
        found = [path for path in (self.folder / "checkpoints").glob("*") if path.name.isdecimal()]
        return sorted(found, key=lambda path: int(path.name))

    def resume(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], total: int
    ) -> dict[str, Any]:
        """Continue from the newest checkpoint, if there is one: its state, or else the given one. total: steps."""
        if not self.args.resume or not self.checkpoints():
            return state
        folder = self.checkpoints()[-1]
        with input_errors(f"{folder} is damaged; remove it to resume from the one before"):
            state = json.loads((folder / "state.json").read_text())
            if state.pop("sha256") != checksum(folder, state):
                raise ValueError("its files are not what was written")
            self.restore(model, optimizer, load_file(folder / "tensors.safetensors"))
        if state["step"] > total:
            raise InputError(f"the run has made {state['step']} steps, more than the {total} of its arguments")
        return state


def checksum(folder: Path, state: dict[str, Any]) -> str:
    """The SHA-256 of a checkpoint's tensors and its state, in hexadecimal digits."""
    with (folder / "tensors.safetensors").open("rb") as tensors:
        digest = hashlib.file_digest(tensors, "sha256")
    digest.update(json.dumps(state).encode())
    return digest.hexdigest()


def checksums(args: Args) -> dict[str, str]:
    """The SHA-256 of the weights in each folder that an argument names, such as base_model."""
    found = {}
    for name, value in flatten(dataclasses.asdict(args)).items():
        if isinstance(value, str) and os.path.isfile(f"{value}/config.json"):
            digest = hashlib.sha256()
            for path in sorted(Path(value).glob("*.safetensors")):
                with path.open("rb") as weights:
                    digest.update(hashlib.file_digest(weights, "sha256").digest())
            found[name] = digest.hexdigest()
    return found


def as_cell(value: Any) -> str:
    """A value for the terminal: numbers with two digits, texts quoted."""
    return f"{value:+.2f}" if isinstance(value, float) else repr(value)


def upload_model(folder: Path, args: Args, accelerator: Accelerator) -> str:
    """Push a model's folder to the Hugging Face hub, with a card that links to the tracked run. Its address."""
    name = folder.parent.name
    wandb_runs = [tracker.run for tracker in accelerator.trackers if tracker.name == "wandb"]
    links = [f"[How it was trained]({run.url})\n" for run in wandb_runs if run.url]  # an offline run has none
    card = ["---\nlibrary_name: transformers\ntags: [ppo_rlhf]\n---\n\n", f"# {name}\n\nTrained by ppo_rlhf. "]
    card += ["`ppo_rlhf.json` next to the weights names base model and task.\n\n", *links]
    (folder / "README.md").write_text("".join(card))
    with input_errors(f"{folder} is saved, but could not be pushed to the hub"):
        repository = HfApi().create_repo(
            f"{args.hf_entity}/{name}".lstrip("/"), exist_ok=True, private=args.hf_private or None
        )
        HfApi().upload_folder(repo_id=repository.repo_id, folder_path=folder)
        return re.sub(r"(?<=://)[^/@]*@", "", str(repository))  # the address of a mirror may hold a password


def run_script(main: Callable[[], Any]) -> None:
    """Run main(); what the user can fix ends in one line and status 2."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        main()
    except BrokenPipeError:  # nobody reads the output any more, as in `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(2)
    except (InputError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":
            # An address may hold a password, and what a server or a file says could command the terminal.
            line = re.sub(r"(?<=://)[^/\s@]*@", "", " ".join(str(error).split()))
            line = "".join(letter if letter.isprintable() else "\ufffd" for letter in line)
            print(f"error: {line}", file=sys.stderr)
        sys.exit(2)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run_script(lambda: train(parse_args(PRESETS, description=__doc__)))
