"""PPO against a reward model: chapter 1, Fine-tuning language models from human preferences (Ziegler et al. 2019).

A language model (the policy) writes continuations of queries. A reward model, trained from human comparisons
by `train_reward.py`, scores them. PPO raises the score, and a penalty on the KL divergence from the model that we
started from (the reference) keeps the text fluent. Each update has eight steps:

    1. sample queries
    2. generate responses; compute their log-probs and values
    3. log-probs of the reference
    4. truncate the responses at the stop token and score them
    5. per-token rewards: KL penalty on every sampled token, also after the stop; score on the last of them
    6. advantages and returns (GAE), for each minibatch again
    7. PPO epochs over minibatches
    8. adapt the KL coefficient and log

This file is the whole program: copy it alone into a folder, and it runs. To learn the method, begin at `train()`,
below the presets. It has steps 1 to 5 and 8, and `ppo_update()` below it steps 6 and 7, because each minibatch
whitens its own rewards and advantages. Then come the formulas, how a model reads and writes tokens, queries, and at
the end the plumbing: loading, logs, checkpoints.
What `train_reward.py` needs too has the same text there. Left out: models that are split over several GPUs (each
holds whole copies), responses that end early (all have the same length), and an entropy bonus.

Marks like [D54] name an implementation detail. The original is openai/lm-human-preferences at commit cbfd210; a file
with a line, such as policy.py#L48, is always one of the original. Marks like [X01] are places where we differ on
purpose: docs/reference.

    pip install torch transformers accelerate tyro pydantic datasets tensorboard wandb ftfy
    python train_policy.py --rewards.function my_rewards:score      # GPT-2, one GPU, a reward of your own
    python train_policy.py                                          # the newest reward model in models/
    accelerate launch --num_processes 8 train_policy.py --track
    python train_policy.py --resume runs/<run>                      # resume after an interruption

A response without a full stop gets -1 in place of its score, unless --task.truncate_text is None.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import hashlib
import importlib.util
import json
import lzma
import math
import os
import pkgutil
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
import traceback
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
    NonNegativeFloat,
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
    AutoTokenizer,
    GenerationConfig,
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
class AdaptiveKLArgs(Arguments):
    target: PositiveFloat | None = None
    """KL divergence from the reference to hold, in nats per response; None keeps `kl_coef` fixed"""
    horizon: PositiveInt = 10_000
    """how slowly the coefficient follows, in episodes"""


@dataclass(frozen=True, kw_only=True)
class RewardsArgs(Arguments):
    trained_model: str = ""
    """a reward model of train_reward.py: models/<run>/reward; empty: the newest of this preset below models/, unless
    there is a function"""
    function: str = ""
    """package.module:name of a function in place of a reward model: (texts of queries, texts of truncated responses)
    -> list of floats; of a response, it gets what is before the first end-of-text token"""
    monitor: str = ""
    """package.module:name of such a function that is only logged, as objective/<name>"""
    normalize_samples: NonNegativeInt = 256
    """samples of the language model on which scores of `function` get mean 0 and deviation 1, the scale for which the
    KL coefficient and the critic are meant; 0: scores stay as they are"""
    kl_coef: NonNegativeFloat = 0.15
    """weight of the KL penalty at the start, reward per nat"""
    adaptive_kl: AdaptiveKLArgs = field(default_factory=lambda: AdaptiveKLArgs(target=6.0))
    """controller of the KL coefficient"""


@dataclass(frozen=True, kw_only=True)
class PpoArgs(Arguments):
    total_episodes: PositiveInt = 1_000_000
    """responses to train on, over all updates; rounded up to whole updates"""
    batch_size: PositiveInt = 512
    """episodes (query and response) per update, over all processes"""
    nminibatches: PositiveInt = 1
    """optimiser steps per pass over the batch"""
    noptepochs: PositiveInt = 4
    """passes over the batch per update"""
    lr: PositiveFloat = 1e-5
    """learning rate of the first update; it falls linearly"""
    value_head_lr: PositiveFloat | None = None
    """the same for the value head alone, which starts at 0 and has far to go; None: that of all other weights"""
    vf_coef: NonNegativeFloat = 0.1
    """weight of the value loss"""
    cliprange: PositiveFloat = 0.2
    """the probability ratio is clipped to 1 +- this"""
    cliprange_value: PositiveFloat = 0.2
    """new values are clipped to old values +- this"""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """discount per token"""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """lambda of generalised advantage estimation"""
    whiten_rewards: bool = True
    """scale the rewards of each group's minibatch to variance 1 (advantages always are)"""
    whiten_groups: PositiveInt = 8
    """groups: slices of the batch, each whitened with its own mean and variance; in the original, one per process
    [X03]"""
    local_micro_batch_size: PositiveInt = 8
    """episodes per forward and backward pass on one process, at most; changes memory and speed, not numbers"""
    local_rollout_batch_size: PositiveInt = 64
    """episodes per pass without gradients on one process, at most; changes memory and speed, not numbers"""


@dataclass(frozen=True, kw_only=True)
class Args(Arguments):
    preset: str = "sentiment"
    """names a set of defaults: sentiment, descriptiveness, cnndm, tldr, tales, tales-descriptiveness, reviews"""
    exp_name: Annotated[str, Field(pattern=r"^[\w.+ -]{1,150}$")] = "train_policy"
    """name of this experiment"""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    """seed of the sampling noise and the permutations"""
    base_model: str = "gpt2"
    """causal language model to start from, such as GPT-2 or Pythia: a folder, a name on the hub, or `tales`"""
    trust_remote_code: bool = False
    """run Python code that comes with the base model"""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """arithmetic; bfloat16 keeps float32 weights and casts in matrix products"""
    frozen_bfloat16: bool = False
    """reference and reward model in bfloat16: half their memory, and KL and scores that are rounded"""
    gradient_checkpointing: bool = False
    """keep only the inputs of each layer and compute the rest again in the backward pass; saves memory, costs a
    forward pass"""
    compile: bool = False
    """compile the models with torch.compile: half a minute, and then fewer and larger kernels; meant for GPUs"""
    task: TaskArgs = field(default_factory=TaskArgs)
    """queries and responses"""
    rewards: RewardsArgs = field(default_factory=RewardsArgs)
    """score and KL penalty"""
    ppo: PpoArgs = field(default_factory=PpoArgs)
    """the optimisation"""
    resume: str = ""
    """folder of a run to resume: runs/<run>; its arguments are taken from there"""
    save_interval: NonNegativeInt = 50
    """updates between checkpoints; 0: one at the end"""
    log_interval: NonNegativeInt = 10
    """updates between printed samples; 0: none"""
    trace_interval: NonNegativeInt = 0
    """updates between those whose episodes are kept with all their numbers, which report/ shows; 0: none"""
    trace_episodes: PositiveInt = 8
    """episodes of such an update that report/ shows"""
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
SENTIMENT = Args(ppo=PpoArgs(local_micro_batch_size=24))
# Summaries do without reward whitening.   launch.py#L166
SUMMARIES_PPO = PpoArgs(
    batch_size=32, lr=2e-6, whiten_rewards=False, local_micro_batch_size=4, local_rollout_batch_size=16
)
TALES = Args(
    base_model="tales",
    trace_interval=20,
    rewards=RewardsArgs(
        adaptive_kl=AdaptiveKLArgs(target=6.0, horizon=1_000),  # It acts soon, because there are few episodes.
        monitor="ppo_rlhf.worlds.tales:sentiment.gold_scores",
    ),
    ppo=PpoArgs(total_episodes=12_800, batch_size=64, lr=2e-4, local_micro_batch_size=64),
)
DESCRIPTIVENESS = dataclasses.replace(TALES.rewards, monitor="ppo_rlhf.worlds.tales:descriptiveness.gold_scores")
# A real language model sees few episodes: it learns from each once, in two steps an update; the controller acts soon.
REVIEWS = Args(
    base_model="smollm2-135m",
    trace_interval=10,
    rewards=RewardsArgs(
        kl_coef=0.05,
        adaptive_kl=AdaptiveKLArgs(target=12.0, horizon=400),
        monitor="ppo_rlhf.worlds.reviews:vader",
    ),
    ppo=PpoArgs(
        total_episodes=2_688,
        batch_size=128,
        nminibatches=2,
        noptepochs=1,
        whiten_groups=1,
        lr=1e-4,
        value_head_lr=3e-3,
        # These need 6 GB. Larger passes need 11 GB and are 8 % faster.
        local_micro_batch_size=16,
        local_rollout_batch_size=32,
    ),
)
PRESETS = {
    "sentiment": SENTIMENT,
    "descriptiveness": SENTIMENT,  # with another reward model
    "cnndm": Args(rewards=RewardsArgs(kl_coef=0.01, adaptive_kl=AdaptiveKLArgs()), ppo=SUMMARIES_PPO),
    "tldr": Args(rewards=RewardsArgs(kl_coef=0.03, adaptive_kl=AdaptiveKLArgs()), ppo=SUMMARIES_PPO),
    "tales": TALES,
    "tales-descriptiveness": dataclasses.replace(TALES, rewards=DESCRIPTIVENESS),
    "reviews": REVIEWS,
}
PRESETS = {name: dataclasses.replace(args, preset=name, task=TASKS[name]) for name, args in PRESETS.items()}


# ---- Train -----------------------------------------------------------------------------------------------------
#
# How a batch is divided, with the numbers of the default, GPT-2 on one process:
#
#     batch         512 episodes, one update; every process has an equal part, its local batch
#     group          64 of them (8 groups): the slice that is whitened with its own mean and variance
#     minibatch     512: 1 / nminibatches of every group, one optimiser step; 4 epochs make 4 steps
#     micro-batch   a part of the minibatch in one forward and backward pass; changes memory, not numbers


def train(args: Args, timestamp: int | None = None) -> Path:
    """Train a policy and return the folder models/<run>/policy, on every process.

    timestamp: ends the run's name, if another run shares it. Raises InputError, a ValueError: on bad arguments before
    anything is written; later if a number is impossible, or if a disk or a function fails.
    """
    args = checked(args)
    accelerator = make_accelerator(args.dtype)
    device = accelerator.device
    args = with_newest_reward_model(args, accelerator)
    task, ppo = args.task, args.ppo
    sizes = ppo_sizes(args, accelerator.num_processes)
    rank = accelerator.process_index
    mine = slice(rank * sizes.local_batch, (rank + 1) * sizes.local_batch)  # this process's rows of the batch
    groups = range(rank * sizes.local_groups, (rank + 1) * sizes.local_groups)
    pass_rows = ppo.local_rollout_batch_size  # rows of a pass without gradients

    tokenizer = load_tokenizer(args.base_model, args.trust_remote_code)
    ids = task_ids(task, tokenizer)
    # [D11] Every stage begins with the first text.   train_policy.py#L454-L457
    stream = QueryStream(task, tokenizer)
    policy, reference = load_policy_and_reference(args, ids, device)
    reward_model = load_reward_model(args, tokenizer, device) if args.rewards.trained_model else None
    score_function = import_function(args.rewards.function, "rewards.function")
    monitor = import_function(args.rewards.monitor, "rewards.monitor")
    # [D66] All parameters learn, embeddings and value head too.   utils/core.py#L621-L629
    # [X17] The value head starts at 0, so it may need larger steps than what was pretrained.
    param_groups = [
        {"params": policy.lm_backbone.parameters(), "first_lr": ppo.lr},
        {"params": policy.value_head.parameters(), "first_lr": ppo.value_head_lr or ppo.lr},
    ]
    optimizer = AdamTensorFlowStyle(param_groups, lr=ppo.lr)
    adaptive_kl = args.rewards.adaptive_kl
    controller = AdaptiveKLController(args.rewards.kl_coef, adaptive_kl.target, adaptive_kl.horizon)

    run = Run(args, accelerator, dataclasses.asdict(sizes), timestamp)
    run.try_to_save(lambda folder: save_policy(folder, policy, tokenizer, args, weights=False))
    state = {"step": 0, "kl_coef": controller.value, "query_position": 0, "score_scale": (0.0, 1.0)}
    state = run.resume(policy, optimizer, state, total=sizes.updates)
    if score_function and args.rewards.normalize_samples and state["step"] == 0:
        state["score_scale"] = scale_of_scores(args, ids, stream, policy, score_function, accelerator)
    controller.value = state["kl_coef"]
    stream.position = state["query_position"]
    score_mean, score_std = state["score_scale"]
    run.open_logs(state["step"], config_for_plots(args))

    updates = range(state["step"], sizes.updates)
    seconds = 0.1 if sys.stderr.isatty() else 30.0  # between two updates of the bar; a log file gets few
    bar = tqdm(updates, desc="PPO", initial=state["step"], total=sizes.updates, mininterval=seconds)
    for update in bar:
        started = time.monotonic()
        # 1. Sample queries. Every process draws the whole batch and takes its rows, a slice with whole groups. [X04]
        queries = stream.next_batch(sizes.batch, ids.pad)[mine].to(device)  # (local_batch, query_length)
        uniforms = episode_noise(args.seed, update, sizes.batch, task.response_length)[mine]
        uniforms = uniforms.to(float64_device(device))  # (local_batch, response_length)

        with torch.no_grad():
            # 2. Generate responses. Compute their log-probs and values, all (local_batch, response_length).
            contexts = add_affixes(queries, ids.prefix, ids.suffix)  # (local_batch, context_length)
            responses, sampled_logprobs = few_rows_at_a_time(
                lambda contexts, uniforms: generate(
                    policy.lm_backbone, contexts, uniforms, ids.pad, vocab_size=ids.pad, temperature=task.temperature
                ),
                pass_rows,
                contexts,
                uniforms,
            )
            # (local_batch, context_length + response_length)
            context_responses = torch.cat([contexts, responses], dim=1)
            # [D25] The policy reads what it wrote, just as in step 7, so the ratio starts at 1.   policy.py#L108-L112
            logprobs, _, values = few_rows_at_a_time(
                lambda tokens: policy(tokens, ids.pad, ids.context_length, task.temperature),
                pass_rows,
                context_responses,
            )

            # 3. Compute the reference's log-probs, at the policy's temperature: (local_batch, response_length).
            ref_logprobs, _, _ = few_rows_at_a_time(
                lambda tokens: response_logprobs(
                    reference, tokens, ids.pad, ids.context_length, task.temperature, vocab_size=ids.pad
                ),
                pass_rows,
                context_responses,
            )

            # 4. Truncate the responses, (local_batch, response_length), and score them, (local_batch,).
            truncated_responses = truncate_at(responses, ids.stop, task.truncate_after, ids.pad)
            # [D28] [D49] The scorer reads query and truncated response, but no prefix and suffix.
            #       train_policy.py#L396-L402
            if reward_model:
                query_responses = torch.cat([queries, truncated_responses], dim=1)
                raw_scores = few_rows_at_a_time(
                    lambda tokens: reward_model(tokens, ids.pad), pass_rows, query_responses
                )
            with run.checkpoint_if_it_fails(policy, optimizer, state):
                texts = texts_of(tokenizer, queries, truncated_responses, ids)
                if score_function:
                    function_scores = call(score_function, *texts).to(logprobs)
                    # [X18] A function's scores get the scale that a normalised reward model has.
                    raw_scores = (function_scores - score_mean) / score_std
                if monitor:
                    monitored = call(monitor, *texts).to(logprobs)
            # [D50] Without a stop token, a penalty takes the place of the score. On the scale of normalised scores,
            #       -1 is one deviation below the mean.   train_policy.py#L384-L390
            stopped = has_stop(truncated_responses, ids.stop, task.truncate_after)
            scores = torch.where(stopped, raw_scores, task.penalty_reward_value)

            # 5. Compute per-token rewards. The score judges the text as a whole, so it is on the last of all tokens,
            #    also if the response was truncated before it. The KL divergence is a sum over tokens, so each token
            #    pays for its own part.
            # [D53] The penalty uses the coefficient that the last update left.   train_policy.py#L293-L297
            rewards, non_score_rewards, kl = compute_rewards(scores, logprobs, ref_logprobs, controller.value)

        # 6. Compute advantages and returns, and 7. optimise: `ppo_update` does both for each minibatch.
        # [D63] All steps of an update have the same rate. It falls linearly, but not to 0.   train_policy.py#L78-L84
        for param_group in optimizer.param_groups:
            param_group["lr"] = param_group["first_lr"] * (1 - update / sizes.updates)
        rollout = Rollout(context_responses=context_responses, logprobs=logprobs, values=values, rewards=rewards)
        permutations = draw_permutations(args.seed, update, ppo.noptepochs, groups, group_batch=sizes.group_batch)
        traced = args.trace_interval and (update % args.trace_interval == 0 or update + 1 == sizes.updates)
        passes = {} if traced else None
        stats = ppo_update(
            policy,
            optimizer,
            rollout,
            permutations,
            ppo,
            pad_id=ids.pad,
            temperature=task.temperature,
            passes=passes,
        )

        # 8. Adapt the KL coefficient and log. What is logged of each episode, (local_batch,):
        objectives = {
            "kl": kl.sum(1),
            "entropy": -logprobs.sum(1),  # of the sampled tokens; ppo/policy/entropy is the exact one
            "score": scores,
            "non_score_reward": non_score_rewards.sum(1),
            "raw_score": raw_scores,
            "stopped": stopped,
            "response_length": (truncated_responses != ids.pad).sum(1),
            "sampler_gap": (logprobs - sampled_logprobs).abs().mean(1),  # rounding, if sampler and reader agree
        }
        if score_function:
            objectives["function_score"] = function_scores
        if monitor:
            objectives[monitor_name(args)] = monitored
        stats |= {f"objective/{name}": numbers.to(kl.dtype).mean() for name, numbers in objectives.items()}
        stats["ppo/val/num_eos_tokens"] = (responses == ids.eos).sum() * accelerator.num_processes
        metrics = means_over_processes(stats, accelerator)
        metrics["objective/kl_coef"] = controller.value
        metrics["objective/score_total"] = metrics["objective/score"] + metrics["objective/non_score_reward"]
        metrics["ppo/val/var_explained"] = 1 - metrics["ppo/val/error"] / max(metrics["ppo/returns/var"], 1e-12)
        metrics["ppo/val/ratio_var"] = metrics.pop("squared_ratio_gap") - (metrics["ppo/val/ratio"] - 1) ** 2
        metrics["ppo/lr"] = optimizer.param_groups[0]["lr"]
        metrics["ppo/global_step"] = update
        metrics["ppo/episode"] = (update + 1) * sizes.batch
        metrics["elapsed/updates"] = update + 1
        metrics["elapsed/episodes"] = (update + 1) * sizes.batch
        metrics["elapsed/steps/serial"] = (update + 1) * task.response_length
        metrics["elapsed/steps/total"] = (update + 1) * sizes.batch * task.response_length
        metrics["elapsed/fps"] = int(sizes.batch * task.response_length / (time.monotonic() - started))
        metrics["elapsed/time"] = run.seconds()
        metrics |= {alias: metrics[name] for alias, name in ALIASES.items()}
        check_update(metrics, update, args.dtype)
        run.log(update, metrics)
        bar.set_postfix_str(f"score {metrics['objective/score']:+.2f}, KL {metrics['objective/kl']:z.2f}")
        if args.log_interval and update % args.log_interval == 0:
            run.log_samples(update, sample_rows(tokenizer, queries, truncated_responses, objectives, ids.pad))
        if traced:
            with torch.no_grad():  # Read the responses again after learning.
                new_logprobs, entropies, new_values = few_rows_at_a_time(
                    lambda tokens: policy(tokens, ids.pad, ids.context_length, task.temperature),
                    pass_rows,
                    context_responses,
                )
            tokens = {
                "ids": responses,
                "scored": truncated_responses != ids.pad,
                "logprobs": logprobs,
                "ref_logprobs": ref_logprobs,
                "kl": kl,
                "rewards": rewards,
                "values": values,
                "new_logprobs": new_logprobs,
                "new_values": new_values,
                "entropies": entropies,
            }
            passes["permutations"] = permutations
            run.write_trace(update, tokenizer, contexts, tokens=tokens, episodes=objectives, epochs=passes)
        # [D70] [D71] The controller sees the KL averaged over all processes.   train_policy.py#L299-L305
        controller.update(metrics["objective/kl"], sizes.batch)
        state = {
            "step": update + 1,
            "kl_coef": controller.value,
            "query_position": stream.position,
            "score_scale": (score_mean, score_std),
        }
        stopping = run.told_to_stop()
        if stopping or update + 1 == sizes.updates or (update + 1) % (args.save_interval or sizes.updates) == 0:
            run.save_checkpoint(policy, optimizer, state)
        if stopping:
            accelerator.print(f"stopped after update {update + 1}; resume with --resume {run.folder}")
            sys.exit(0)

    run.stop_at_once()
    folder = run.models / "policy"
    if accelerator.is_main_process:
        with input_errors(f"{folder} cannot be saved; the checkpoints are kept"):
            save_policy(folder, policy, tokenizer, args)
    skipped = stream.position - sizes.updates * sizes.batch
    run.finish("policy", skipped_queries=skipped, **run.last_means("score", "kl", "kl_coef"))
    return folder


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Episodes of one process, its part of the batch."""

    context_responses: Tensor  # (local_batch, context_length + response_length)
    logprobs: Tensor  # (local_batch, response_length), under the policy that sampled
    values: Tensor  # (local_batch, response_length), of the critic at that time
    rewards: Tensor  # (local_batch, response_length), KL penalty and score, not whitened


def ppo_update(
    policy: PolicyWithValueHead,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    permutations: Tensor,
    ppo: PpoArgs,
    pad_id: int,
    temperature: float,
    passes: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Steps 6 and 7: all epochs of PPO on one rollout.

    permutations: (epochs, groups, group_batch), each row an order of that group's episodes, for the groups of this
    process; the first has the first group_batch episodes of the rollout, and so on. Minibatch k holds slice k of
    every group's order. passes: a dictionary that gets what each epoch computed of each episode, (epochs,
    local_batch, response_length).

    Returns 0-d means over the optimiser steps, and how far the ratio was off 1 before the first one.
    """
    epochs, groups, group_batch = permutations.shape
    context_length = rollout.context_responses.shape[1] - rollout.rewards.shape[1]
    b_inds = permutations + torch.arange(groups).unsqueeze(1) * group_batch  # (epochs, groups, group_batch)
    b_inds = b_inds.to(rollout.rewards.device)
    if passes is not None:
        for name in ("advantages", "returns", "new_logprobs", "new_values"):
            passes[name] = rollout.rewards.new_zeros(epochs, *rollout.rewards.shape)
    steps = []  # what is logged of each optimiser step
    for epoch in range(epochs):
        for mb_inds in b_inds[epoch].chunk(ppo.nminibatches, dim=1):  # (groups, group_minibatch)
            # 6. Compute advantages and returns. The critic's values say how well a response was going to do anyway.
            #    What is left, the advantage, says what the sampled token added, with much less noise.
            mb_values = rollout.values[mb_inds]  # (groups, group_minibatch, response_length)
            mb_advantages, mb_returns = group_advantages(rollout.rewards[mb_inds], mb_values, ppo)
            stats = {
                "ppo/val/mean": mb_values.mean(),
                "ppo/val/var": mb_values.var((1, 2), unbiased=False).mean(),  # mean over the groups
                "ppo/returns/mean": mb_returns.mean(),
                "ppo/returns/var": mb_returns.var((1, 2), unbiased=False).mean(),
            }
            if passes is not None:
                passes["advantages"][epoch, mb_inds] = mb_advantages
                passes["returns"][epoch, mb_inds] = mb_returns

            # 7. Make one optimiser step. Micro-batches add up to the gradient of the whole minibatch. [D67] [D88]
            optimizer.zero_grad()
            for part in torch.arange(mb_inds.numel()).split(ppo.local_micro_batch_size):
                inds = mb_inds.flatten()[part]  # (micro_batch,); what follows is (micro_batch, response_length)
                logprobs = rollout.logprobs[inds]
                advantages = mb_advantages.flatten(0, 1)[part]
                returns = mb_returns.flatten(0, 1)[part]
                new_logprobs, entropies, new_values = policy(
                    rollout.context_responses[inds], pad_id, context_length, temperature
                )
                pg_loss, pg_clipfrac, approxkl = policy_loss(new_logprobs, logprobs, advantages, ppo.cliprange)
                vf_loss, vf_clipfrac = value_loss(new_values, rollout.values[inds], returns, ppo.cliprange_value)
                # [D61] No entropy bonus; every token has the same weight.   train_policy.py#L357
                loss = pg_loss + ppo.vf_coef * vf_loss
                share = len(inds) / mb_inds.numel()
                (loss * share).backward()

                ratio = torch.exp(new_logprobs - logprobs)
                add(stats, "ppo/loss/policy", share * pg_loss)
                add(stats, "ppo/loss/value", share * vf_loss)
                add(stats, "ppo/loss/total", share * loss)
                add(stats, "ppo/policy/approxkl", share * approxkl)
                add(stats, "ppo/policy/clipfrac", share * pg_clipfrac)
                add(stats, "ppo/policy/entropy", share * entropies.mean())
                add(stats, "ppo/val/clipfrac", share * vf_clipfrac)
                add(stats, "ppo/val/vpred", share * new_values.mean())
                add(stats, "ppo/val/error", share * ((new_values - returns) ** 2).mean())
                add(stats, "ppo/val/ratio", share * ratio.mean())
                add(stats, "squared_ratio_gap", share * ((ratio - 1) ** 2).mean())
                add(stats, "ppo/val/advantage", share * advantages.mean())
                add(stats, "ppo/val/advantage_var", share * (advantages**2).mean())  # a whole group's mean is 0
                if passes is not None:
                    passes["new_logprobs"][epoch, inds] = new_logprobs.detach()
                    passes["new_values"][epoch, inds] = new_values.detach()
            average_gradients(policy)
            # The norm is logged, and nothing is clipped.
            stats["ppo/gradient_norm"] = nn.utils.get_total_norm(
                [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
            )
            optimizer.step()
            steps.append(stats)
    means = {name: torch.stack([step[name] for step in steps]).mean() for name in steps[0]}
    means["ppo/val/first_ratio_gap"] = steps[0]["squared_ratio_gap"].sqrt()  # 0 but for rounding
    return means


def add(stats: dict[str, Tensor], name: str, value: Tensor) -> None:
    """Add what a micro-batch contributes to a number of its minibatch."""
    stats[name] = stats.get(name, 0) + value.detach()


def average_gradients(model: nn.Module) -> None:
    """Replace the gradients by their mean over all processes. That is all that several GPUs need: the model has no
    wrapper, and every process takes the same optimiser step.
    """
    # This happens before each optimiser step.   utils/core.py#L468-L488
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        mean = reduce(nn.utils.parameters_to_vector(gradients), "mean")
        nn.utils.vector_to_parameters(mean, gradients)


def group_advantages(rewards: Tensor, values: Tensor, ppo: PpoArgs) -> tuple[Tensor, Tensor]:
    """Step 6 for one minibatch: whitened advantages and returns. Every group whitens with its own statistics.

    rewards, values: (groups, group_minibatch, response_length). Returns two tensors of that shape.
    """
    # [D55] Rewards are whitened here, minibatch by minibatch, so that the critic's targets keep their scale while
    #       scores and coefficient change. Only the spread is made 1. The mean stays: a return adds up the rewards of
    #       all tokens that follow, so a mean taken from each would make returns depend on how many follow.
    #       train_policy.py#L323-L325
    # [D77] A group is the part of a minibatch that one process of the original has.   train_policy.py#L158-L159
    if ppo.whiten_rewards:
        rewards = torch.stack([whiten(group, keep_mean=True) for group in rewards])
    advantages, returns = compute_gae(rewards.flatten(0, 1), values.flatten(0, 1), ppo.gamma, ppo.lam)
    # [D58] Advantages are always whitened, once the returns are made.   train_policy.py#L338-L339
    advantages = torch.stack([whiten(group, keep_mean=False) for group in advantages.view_as(values)])
    return advantages, returns.view_as(values)


# ---- The formulas of steps 5 to 8 ------------------------------------------------------------------------------


def compute_rewards(
    scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, kl_coef: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Per-token rewards: -kl_coef * kl, and the score on top of the last token.

    scores: (batch,); log-probs: (batch, response_length). Returns rewards, non_score_rewards and kl, of that shape.
    """
    # [D51] [D52] Every token pays, also after the stop; the score is on the last.   train_policy.py#L149-L154
    kl = logprobs - ref_logprobs  # nats; one sample of the divergence, which may be negative
    non_score_rewards = -kl_coef * kl
    rewards = non_score_rewards.clone()
    rewards[:, -1] += scores
    return rewards, non_score_rewards, kl


def whiten(values: Tensor, *, keep_mean: bool) -> Tensor:
    """Shift and scale to mean 0 and variance 1 over all elements; keep_mean adds the mean back.

    The variance is biased, and 1e-8 is added to it: (x - mean) / sqrt(var + 1e-8).
    """
    # [D54] The biased variance, over all elements.   utils/core.py#L336-L341
    mean = values.mean()
    variance = values.var(unbiased=False)
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    return whitened + mean if keep_mean else whitened


def compute_gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation; the value after the last token is 0.

        delta_t = r_t + gamma * V_{t+1} - V_t        A_t = delta_t + gamma * lam * A_{t+1}        R_t = A_t + V_t

    rewards, values: (batch, response_length). Returns advantages (not whitened) and returns, of that shape.
    """
    # [D56] [D57] Values are the rollout's, advantages not yet whitened; rewards may be.   train_policy.py#L327-L336
    advantages = torch.zeros_like(values)
    next_advantage = next_value = torch.zeros_like(values[:, 0])  # (batch,)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = next_advantage = delta + gamma * lam * next_advantage
        next_value = values[:, t]
    return advantages, advantages + values


def policy_loss(
    new_logprobs: Tensor, logprobs: Tensor, advantages: Tensor, cliprange: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Clipped surrogate: mean(max(-A * ratio, -A * clip(ratio, 1 +- range))), ratio = exp(new - old).

    Tensors: (batch, response_length). Returns the loss and, detached, clipped share and 0.5 * mean((new - old)^2).
    """
    # [D60] The larger of the two counts, so a token gains nothing by moving further.   train_policy.py#L350-L360
    ratio = torch.exp(new_logprobs - logprobs)  # (batch, response_length)
    losses = -advantages * ratio
    clipped_losses = -advantages * torch.clamp(ratio, 1 - cliprange, 1 + cliprange)
    clipfrac = (clipped_losses > losses).to(losses.dtype).mean()
    approxkl = 0.5 * ((new_logprobs - logprobs) ** 2).mean().detach()
    return torch.maximum(losses, clipped_losses).mean(), clipfrac, approxkl


def value_loss(new_values: Tensor, values: Tensor, returns: Tensor, cliprange_value: float) -> tuple[Tensor, Tensor]:
    """Clipped value loss: 0.5 * mean(max((V - R)^2, (clip(V, V_old +- range) - R)^2)), and the share of clipped."""
    # [D59] The larger error counts: no gradient once V has left its range towards R.   train_policy.py#L343-L348
    clipped_values = torch.clamp(new_values, values - cliprange_value, values + cliprange_value)
    losses = (new_values - returns) ** 2  # (batch, response_length)
    clipped_losses = (clipped_values - returns) ** 2  # (batch, response_length)
    clipfrac = (clipped_losses > losses).to(losses.dtype).mean()
    return 0.5 * torch.maximum(losses, clipped_losses).mean(), clipfrac


def draw_permutations(seed: int, update: int, epochs: int, groups: range, group_batch: int) -> Tensor:
    """Orders in which each group visits its episodes: (epochs, groups, group_batch), fresh ones in each epoch."""
    # [D62] [X02] Every epoch visits the same episodes in a fresh order.   train_policy.py#L180-L196
    orders = [
        torch.randperm(group_batch, generator=keyed_generator(seed, "permutation", update, epoch, group))
        for epoch in range(epochs)
        for group in groups
    ]
    return torch.stack(orders).unflatten(0, (epochs, len(groups)))


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


class AdaptiveKLController:
    """Raises the KL coefficient while the divergence is above the target, lowers it while it is below.

    error = clip(kl / target - 1, -0.2, 0.2)        kl_coef *= 1 + error * episodes / horizon
    """

    def __init__(self, kl_coef: float, target: float | None, horizon: float):
        """target None: the coefficient stays as it is."""
        self.value = kl_coef
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, episodes: int) -> None:
        """kl: mean over the batch, nats per response; episodes: how many the update used, over all processes."""
        # [D69] The step is proportional to the relative error, which is clipped.   train_policy.py#L115-L124
        # [D72] Without a target, the coefficient is fixed.   train_policy.py#L107-L112
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.value *= 1 + error * episodes / self.horizon


# ---- Steps 2 to 4: how a model writes and reads tokens ---------------------------------------------------------


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


def response_logprobs(
    lm_backbone: PreTrainedModel,
    context_responses: Tensor,
    pad_id: int,
    context_length: int,
    temperature: float,
    vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and hidden states of responses that a language model reads.

    context_responses: (batch, context_length + response_length). Returns log-probs and entropies (nats, without
    gradient), each (batch, response_length), and the hidden states (batch, response_length, width).
    """
    # [D47] What the model says at position i is about token i + 1: hence the shift by one. Where the context ends in
    #       padding, that column shows what the last real token before it shows.   policy.py#L114-L126
    hidden_states = read_tokens(lm_backbone, context_responses, pad_id, slice(context_length - 1, -1))
    responses = context_responses[:, context_length:]
    responses = responses.masked_fill(responses == pad_id, 0)  # (batch, response_length)
    all_logprobs = F.log_softmax(scaled_logits(lm_backbone, hidden_states, vocab_size, temperature), dim=2)
    logprobs = all_logprobs.gather(2, responses.long().unsqueeze(2)).squeeze(2)  # (batch, response_length)
    with torch.no_grad():
        entropies = -(all_logprobs.exp() * all_logprobs).sum(2)  # (batch, response_length)
    return logprobs, entropies, hidden_states


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


class PolicyWithValueHead(nn.Module):
    """A causal language model with a scalar head on its final hidden state: actor and critic share the trunk."""

    def __init__(self, lm_backbone: PreTrainedModel, vocab_size: int | None = None):
        """vocab_size: number of ids that can be sampled, if the output layer has more rows than the tokenizer."""
        super().__init__()
        self.lm_backbone = lm_backbone
        self.vocab_size = vocab_size or lm_backbone.config.vocab_size
        # [D46] The value head starts at exactly zero.   language/model.py#L364-L370
        self.value_head = nn.Linear(lm_backbone.config.hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(
        self, query_responses: Tensor, pad_id: int, context_length: int, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs of the response tokens, entropies (nats) and values at each of their positions.

        query_responses, with affixes: (batch, context_length + response_length). Results: (batch, response_length).
        """
        logprobs, entropies, hidden_states = response_logprobs(
            self.lm_backbone, query_responses, pad_id, context_length, temperature, vocab_size=self.vocab_size
        )
        # [D26] A value belongs to the position before the response token, as its log-prob does.   policy.py#L125
        return logprobs, entropies, read_scalar(self.value_head, hidden_states)


class RewardModel(nn.Module):
    """A language model with a scalar head, read at the last real token: score = gain * head + bias."""

    def __init__(self, lm_backbone: PreTrainedModel):
        super().__init__()
        self.lm_backbone = lm_backbone
        self.reward_head = nn.Linear(lm_backbone.config.hidden_size, 1)
        self.gain = nn.Parameter(torch.ones(()))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, query_responses: Tensor, pad_id: int) -> Tensor:
        """Scores (batch,) of query_responses (batch, sequence_length); trailing padding does not count."""
        # [D30] The score is read at the last column, which shows the last real token.   rewards.py#L47
        last = read_tokens(self.lm_backbone, query_responses, pad_id, slice(-1, None))  # (batch, 1, width)
        return self.gain * read_scalar(self.reward_head, last[:, 0]) + self.bias


def truncate_at(responses: Tensor, stop_id: int | tuple[int, ...] | None, after: int, pad_id: int) -> Tensor:
    """Replace everything after the first stop token at index >= after by padding; the stop token itself stays.

    responses: (batch, response_length). stop_id: of one token or of several; None: unchanged.
    """
    # [D48] What follows the stop token becomes padding; without one, nothing changes.   lm_tasks.py#L39-L52
    if stop_id is None:
        return responses
    stops = torch.isin(responses, responses.new_tensor(stop_id))  # (batch, response_length)
    stops = stops & (torch.arange(responses.shape[1], device=responses.device) >= after)
    stops_before = stops.cumsum(1) - stops.long()  # (batch, response_length)
    return responses.masked_fill(stops_before > 0, pad_id)


def has_stop(responses: Tensor, stop_id: int | tuple[int, ...] | None, after: int) -> Tensor:
    """Whether each response has a stop token at index >= after: (batch,) bool. stop_id None: all True."""
    # [D50] A stop token before index `after` does not count.   lm_tasks.py#L58-L65
    if stop_id is None:
        return torch.ones(responses.shape[0], dtype=torch.bool, device=responses.device)
    return torch.isin(responses[:, after:], responses.new_tensor(stop_id)).any(1)


# ---- Step 1: queries, and the functions of texts that may score their responses --------------------------------


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


def episode_noise(seed: int, update: int, batch: int, response_length: int) -> Tensor:
    """Uniform random numbers (batch, response_length) of a whole batch, the same at any number of processes."""
    # [X01] The original seeds each process; here the noise belongs to the episode.
    generator = keyed_generator(seed, "policy", update)
    return torch.rand(batch, response_length, generator=generator, dtype=torch.float64)


def keyed_generator(*key: int | str) -> torch.Generator:
    """A CPU random generator that depends on the key alone, so that noise belongs to an episode, not a process."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


def to_texts(tokenizer: PreTrainedTokenizerBase, tokens: Tensor, pad_id: int) -> list[str]:
    """The texts of token ids (batch, length), without padding."""
    return [tokenizer.decode([token for token in row if token != pad_id]) for row in tokens.tolist()]


def texts_of(
    tokenizer: PreTrainedTokenizerBase, queries: Tensor, truncated_responses: Tensor, ids: TaskIds
) -> tuple[list[str], list[str]]:
    """What functions get: the texts of queries and of responses, these up to the end of text."""
    ended = (truncated_responses == ids.eos).cumsum(1) > 0  # (batch, response_length)
    written = truncated_responses.masked_fill(ended, ids.pad)
    return to_texts(tokenizer, queries, ids.pad), to_texts(tokenizer, written, ids.pad)


def import_function(name: str, argument: str) -> Callable | None:
    """The function package.module:name, whose module may be in the current folder; None for no name."""
    if not name:
        return None
    try:
        # What is installed, and what a library tries to import, is never taken from the current folder.
        if importlib.util.find_spec(re.split("[.:]", name)[0]) is None:
            sys.path.append("")
        return pkgutil.resolve_name(name)
    except (Exception, SystemExit) as error:  # the module is the user's and may raise anything
        raise InputError(f"--{argument} {name}: {type(error).__name__}: {error}") from error


def call(function: Callable, queries: list[str], responses: list[str]) -> Tensor:
    """A user's function of texts: its scores (batch,), in float64. All processes call it together.

    Raises an InputError on all of them if it fails on one.
    """
    scores, problem = [], ""
    try:
        with torch.no_grad():
            scores = [float(score) for score in function(queries, responses)]
    except Exception as error:  # the function is the user's and may raise anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
    if not problem and len(scores) != len(responses):
        problem = f"it returned {len(scores)} scores for {len(responses)} responses"
    if not all(map(math.isfinite, scores)):
        problem = f"it returned {next(score for score in scores if not math.isfinite(score))}"
    if problem := next(filter(None, gather_object([problem])), ""):
        raise InputError(f"the function {getattr(function, '__name__', function)}: {problem}")
    return torch.tensor(scores, dtype=torch.float64)


@torch.no_grad()
def scale_of_scores(
    args: Args,
    ids: TaskIds,
    stream: QueryStream,
    policy: PolicyWithValueHead,
    function: Callable,
    accelerator: Accelerator,
) -> tuple[float, float]:
    """Mean and biased deviation of a function's scores for responses of the model that we start from."""
    # [X18] The KL coefficient and the critic are meant for scores of mean 0 and deviation 1.
    samples, mine = args.rewards.normalize_samples, slice(accelerator.process_index, None, accelerator.num_processes)
    queries = stream.next_batch(samples, ids.pad)[mine].to(accelerator.device)  # (n, query_length)
    generator = keyed_generator(args.seed, "scale of the function")
    uniforms = torch.rand(samples, args.task.response_length, generator=generator, dtype=torch.float64)[mine]
    responses, _ = few_rows_at_a_time(
        lambda contexts, uniforms: generate(
            policy.lm_backbone, contexts, uniforms, ids.pad, vocab_size=ids.pad, temperature=args.task.temperature
        ),
        args.ppo.local_rollout_batch_size,
        add_affixes(queries, ids.prefix, ids.suffix),
        uniforms.to(float64_device(accelerator.device)),
    )
    truncated_responses = truncate_at(responses, ids.stop, args.task.truncate_after, ids.pad)
    own_scores = call(function, *texts_of(stream.tokenizer, queries, truncated_responses, ids))
    scores = torch.tensor(gather_object(own_scores.tolist()), dtype=torch.float64)
    mean, std = scores.mean().item(), scores.std(unbiased=False).item()
    return mean, std if std > 1e-10 * abs(mean) else 1.0  # scores that are equal, but for rounding, keep their scale


# ---- Step 8: what is logged ------------------------------------------------------------------------------------

# lm-human-preference-details (at ccc1953) has other names for some numbers. Its plotting commands find them.
ALIASES = {
    "objective/scores": "objective/score",
    "ppo/loss/policy_avg": "ppo/loss/policy",
    "ppo/loss/value_avg": "ppo/loss/value",
    "ppo/policy/entropy_avg": "ppo/policy/entropy",
    "ppo/policy/approxkl_avg": "ppo/policy/approxkl",
    "ppo/policy/clipfrac_avg": "ppo/policy/clipfrac",
    "ppo/val/clipfrac_avg": "ppo/val/clipfrac",
}

# The names objective/<name> that the function of --rewards.monitor cannot have.
OBJECTIVES = {"kl", "entropy", "score", "non_score_reward", "raw_score", "stopped", "response_length", "sampler_gap"}
OBJECTIVES |= {"function_score", "score_total", "scores", "kl_coef"}


def monitor_name(args: Args) -> str:
    """The monitor is logged as objective/<name>, by the name of its function."""
    return re.split("[:.]", args.rewards.monitor)[-1]


def means_over_processes(stats: dict[str, Tensor], accelerator: Accelerator) -> dict[str, float]:
    """Means of 0-d tensors over all processes, which must all call this."""
    # [D75] The mean of each metric over all processes, in float64.   utils/core.py#L491-L524
    device = float64_device(accelerator.device)
    flat = torch.stack([value.detach().to(device).double() for value in stats.values()])
    return dict(zip(stats, accelerator.reduce(flat, "mean").tolist(), strict=True))


def check_update(metrics: dict[str, float], update: int, dtype: str) -> None:
    """Raise an InputError if a metric is impossible. Nothing more is saved then."""
    check_finite(metrics, update)
    tolerance = 0.1 if dtype == "bfloat16" else 1e-3
    for name in ("ppo/val/first_ratio_gap", "objective/sampler_gap"):
        # [D25] Before the first step, the policy that trains is the one that sampled.
        if metrics[name] > tolerance:
            raise InputError(f"{name} is {metrics[name]:.2g} in update {update}: sampler and training pass disagree")


def check_finite(metrics: dict[str, float], step: int) -> None:
    """Raise an InputError that names the metrics that are not finite."""
    if broken := [f"{name} is {value}" for name, value in metrics.items() if not math.isfinite(value)]:
        raise InputError(
            f"{', '.join(broken[:4])} in step {step}; the run stops and saves nothing more; "
            f"if it happens again after --resume, start again with a lower learning rate"
        )


def sample_rows(
    tokenizer: PreTrainedTokenizerBase,
    queries: Tensor,
    truncated_responses: Tensor,
    objectives: dict[str, Tensor],
    pad_id: int,
) -> list[dict[str, Any]]:
    """The first three episodes as texts, with their numbers."""
    # [D80] The log shows some samples at intervals.   train_policy.py#L264-L279
    # [X06] The total uses the KL coefficient that made these rewards.
    columns = {
        "query": to_texts(tokenizer, queries[:3], pad_id),
        "response": to_texts(tokenizer, truncated_responses[:3], pad_id),
        "score": objectives["score"].tolist(),
        "kl": objectives["kl"].tolist(),
        "score - kl_coef * kl": (objectives["score"] + objectives["non_score_reward"]).tolist(),
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=False)]


def config_for_plots(args: Args) -> dict[str, Any]:
    """An additional entry for the tracker: the label file that the reward model learned from.

    The plotting command of lm-human-preference-details (at ccc1953) selects runs by it.
    """
    folder = args.rewards.trained_model
    label_dataset = read_info(folder).get("label_dataset") if folder else None
    return {"rewards": dataclasses.asdict(args.rewards) | {"label_dataset": label_dataset}}


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
class PpoSizes:
    """Sizes, from the arguments and the number of processes, in episodes unless the name says otherwise."""

    updates: int
    batch: int
    local_batch: int
    local_groups: int
    group_batch: int


def ppo_sizes(args: Args, num_processes: int) -> PpoSizes:
    """Divide the global sizes exactly, or raise an InputError that says which size does not divide and what would."""
    ppo, task = args.ppo, args.task
    slices = ppo.whiten_groups * ppo.nminibatches
    # The original asks for eight episodes.   train_policy.py#L69-L75
    if ppo.whiten_rewards and ppo.batch_size < 8 * slices:
        raise InputError(
            f"ppo.whiten_rewards needs at least 8 episodes per group and minibatch, and --ppo.batch_size "
            f"{ppo.batch_size} gives fewer; {8 * slices} is enough; fewer --ppo.whiten_groups need less"
        )
    split_evenly("ppo.batch_size", ppo.batch_size, slices, "whiten_groups x nminibatches")
    local_groups = split_evenly("ppo.whiten_groups", ppo.whiten_groups, num_processes, "processes")
    if task.truncate_after > task.response_length:
        raise InputError(f"--task.truncate_after {task.truncate_after} must be at most {task.response_length}")
    if args.rewards.trained_model and args.rewards.function:
        raise InputError("give one of --rewards.trained_model and --rewards.function")
    if monitor_name(args) in OBJECTIVES:
        raise InputError(
            f"--rewards.monitor {args.rewards.monitor}: objective/{monitor_name(args)} is another metric; give the "
            f"function another name"
        )
    horizon = args.rewards.adaptive_kl.horizon
    # In an update, the controller multiplies the coefficient by at least 1 - 0.2 * batch_size / horizon.
    if args.rewards.adaptive_kl.target and ppo.batch_size >= 5 * horizon:
        raise InputError(
            f"--rewards.adaptive_kl.horizon {horizon}: an update of {ppo.batch_size} episodes could take the KL "
            f"coefficient to 0 or below; {ppo.batch_size // 5 + 1} would do"
        )
    return PpoSizes(
        # [D63] Rounded up: the last update has a whole batch too.   train_policy.py#L78-L84
        updates=math.ceil(ppo.total_episodes / ppo.batch_size),
        batch=ppo.batch_size,
        local_batch=ppo.batch_size // num_processes,
        local_groups=local_groups,
        group_batch=ppo.batch_size // ppo.whiten_groups,
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


def read_info(folder: str | Path) -> dict[str, Any]:
    """The content of ppo_rlhf.json, which is next to the weights of models that were trained here."""
    with input_errors(f"{folder} is not the folder of a model that was trained here"):
        return {**json.loads(Path(folder, "ppo_rlhf.json").read_text())}


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


def weights_dtype(args: Args, *, frozen: bool) -> torch.dtype:
    """The precision of a model's weights. frozen: whether it never learns."""
    if frozen and args.frozen_bfloat16:
        return torch.bfloat16
    return torch.float64 if args.dtype == "float64" else torch.float32


def prepare(lm_backbone: PreTrainedModel, args: Args) -> None:
    """Let the network compute as the arguments say: matrix products in bfloat16, checkpointed layers, compiled."""
    network = lm_backbone.base_model
    if args.gradient_checkpointing:
        for layer in network.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.forward = partial(forward_twice, layer.forward)
    if args.dtype == "bfloat16":
        network.forward = torch.autocast(network.device.type, torch.bfloat16)(network.forward)
    if args.compile:
        network.compile(dynamic=False)


def forward_twice(forward: Callable, *inputs: Any, **options: Any) -> Any:
    """Keep only the inputs of a layer, and compute the rest again in the backward pass."""
    # The library does it in train mode alone, and then refuses the cache that sampling needs.
    if torch.is_grad_enabled():
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **options)
    return forward(*inputs, **options)


def load_policy_and_reference(
    args: Args, ids: TaskIds, device: torch.device
) -> tuple[PolicyWithValueHead, PreTrainedModel]:
    """Two copies of the pretrained model: one to train, with a value head, and one that never changes."""
    # [D45] Policy and reference are two copies, so that the first KL is 0.   train_policy.py#L441-L452
    dtype, frozen_dtype = weights_dtype(args, frozen=False), weights_dtype(args, frozen=True)
    lm_backbone = load_pretrained(args.base_model, dtype, args.trust_remote_code).to(device)
    reference = load_pretrained(args.base_model, frozen_dtype, args.trust_remote_code).to(device)
    check_model(lm_backbone, args.base_model, ids.context_length + args.task.response_length, ids.pad)
    prepare(lm_backbone, args)
    prepare(reference, args)
    policy = PolicyWithValueHead(lm_backbone, ids.pad).to(device, dtype)
    return policy, reference.requires_grad_(False)


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


def with_newest_reward_model(args: Args, accelerator: Accelerator) -> Args:
    """Without a reward model and a function, the newest reward model of the preset below models/ counts."""
    if args.rewards.trained_model or args.rewards.function or args.resume:
        return args
    found = []
    for info in Path("models").glob(f"*__{args.preset}__*__*/reward/ppo_rlhf.json"):
        _, preset, _, timestamp = info.parents[1].name.rsplit("__", 3)
        if preset == args.preset and "query_dataset" in read_info(info.parent)["task"]:
            found.append((int(timestamp), str(info.parent)))
    # Another process may have looked a moment later, so the first one says which.
    (newest,) = broadcast_object_list([max(found)[1] if found else ""])
    if not newest:
        raise InputError(
            f"models/ has no reward model of the preset {args.preset}; train one with train_reward.py --preset "
            f"{args.preset}, or give --rewards.trained_model or --rewards.function"
        )
    accelerator.print(f"reward model {newest}, the newest of the preset {args.preset}")
    return dataclasses.replace(args, rewards=dataclasses.replace(args.rewards, trained_model=newest))


def load_reward_model(args: Args, tokenizer: PreTrainedTokenizerBase, device: torch.device) -> RewardModel:
    """A reward model of train_reward.py, whose ids mean the same as the policy's."""
    folder = args.rewards.trained_model
    head_file = Path(folder, "reward_head.safetensors")
    if not head_file.is_file():
        raise InputError(
            f"--rewards.trained_model {folder}: there is no {head_file}; give models/<run>/reward, or score with any "
            f"other model in a function, --rewards.function"
        )
    if (kind := read_info(folder).get("kind")) != "reward model":
        raise InputError(f"--rewards.trained_model {folder} is a {kind}; it must be a reward model")
    words = [each.get_vocab() for each in (tokenizer, load_tokenizer(folder, args.trust_remote_code))]
    if words[0] != {text: token for text, token in words[1].items() if text != PAD_TOKEN}:
        raise InputError(f"--rewards.trained_model {folder} has another tokenizer than {args.base_model}")
    dtype = weights_dtype(args, frozen=True)
    reward_model = RewardModel(load_pretrained(folder, dtype, args.trust_remote_code, AutoModel))
    check_length(
        reward_model.lm_backbone,
        f"--rewards.trained_model {folder}",
        args.task.query_length + args.task.response_length,
    )
    if args.dtype == "float64":
        reward_model.double()  # the heads, too
    # Head, gain and bias, and what saving as a classifier changed in the language model.   train_reward.py#L292-L329
    with input_errors(f"{head_file} does not fit the model next to it"):
        backbone = reward_model.lm_backbone.state_dict(prefix="lm_backbone.")
        reward_model.load_state_dict(backbone | load_file(head_file))
    prepare(reward_model.lm_backbone, args)
    return reward_model.requires_grad_(False).to(device)


def save_policy(
    folder: Path, policy: PolicyWithValueHead, tokenizer: PreTrainedTokenizerBase, args: Args, weights: bool = True
) -> None:
    """Save as an ordinary causal language model, with the value head next to it; its weights only if asked for."""
    policy.lm_backbone.generation_config = sampling_config(
        policy.lm_backbone.generation_config, tokenizer, args.task.temperature
    )
    policy.lm_backbone.save_pretrained(folder, state_dict=None if weights else {})
    tokenizer.save_pretrained(folder)
    save_file(policy.value_head.state_dict(), folder / "value_head.safetensors")
    info = {
        "kind": "policy",
        "base_model": args.base_model,
        "reward_model": args.rewards.trained_model,
        "function": args.rewards.function,
        "monitor": args.rewards.monitor,
        "vocab_size": vocabulary_size(tokenizer),
        "task": dataclasses.asdict(args.task),
    }
    write_json(folder / "ppo_rlhf.json", info)


def sampling_config(
    own: GenerationConfig, tokenizer: PreTrainedTokenizerBase, temperature: float
) -> GenerationConfig:
    """The generation_config.json of a policy: how it was sampled in training. own: that of the base model."""
    ends, known = end_ids(tokenizer, own), range(vocabulary_size(tokenizer))
    return GenerationConfig(
        do_sample=True,
        temperature=temperature,
        top_p=1.0,
        top_k=0,
        bos_token_id=own.bos_token_id if own.bos_token_id in known else None,
        eos_token_id=ends[0] if len(ends) == 1 else ends or None,
        pad_token_id=own.pad_token_id if own.pad_token_id in known else None,
    )


def end_ids(tokenizer: PreTrainedTokenizerBase, own: GenerationConfig) -> list[int]:
    """The tokens that end a text for the tokenizer, or for the model whose generation_config this is."""
    theirs = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    known = range(vocabulary_size(tokenizer))  # some have -1, which means none
    return sorted({token for token in (*theirs, tokenizer.eos_token_id) if token in known})


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
    traces/<step>       with --trace_interval: episodes with all their numbers, for report/
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

    def last_means(self, *names: str) -> dict[str, float]:
        """Means of objectives over the last ten steps, as last_<name>; empty on other processes than the main one."""
        if not self.is_main:
            return {}
        with (self.folder / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))[-10:]
        return {f"last_{name}": sum(float(row[f"objective/{name}"]) for row in rows) / len(rows) for name in names}

    def write_trace(
        self,
        update: int,
        tokenizer: PreTrainedTokenizerBase,
        contexts: Tensor,
        *,
        tokens: dict[str, Tensor],
        episodes: dict[str, Tensor],
        epochs: dict[str, Tensor],
        **texts: list[str],
    ) -> None:
        """Keep the episodes of an update of this process for report/, as traces/<update>.safetensors.

        tokens: numbers (local_batch, response_length) by name, with `ids`; episodes: (local_batch,); epochs: what
        each epoch computed, (epochs, local_batch, response_length). Texts of the first trace_episodes, query and
        response up to each token, are in the metadata, so that nobody needs the tokenizer; so are more `texts`.
        """
        if self.is_main:
            shown, pad_id = self.args.trace_episodes, vocabulary_size(tokenizer)
            texts["queries"] = to_texts(tokenizer, contexts[:shown], pad_id)
            ids = tokens["ids"][:shown].cpu()
            later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
            texts["beginnings"] = [
                to_texts(tokenizer, row.expand(len(row), -1).masked_fill(later, pad_id), pad_id) for row in ids
            ]
            parts = {"tokens": tokens, "episodes": episodes, "epochs": epochs}
            tensors = {f"{part}.{name}": tensor for part, found in parts.items() for name, tensor in found.items()}
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            file = self.folder / "traces" / f"{update}.safetensors"
            file.parent.mkdir(exist_ok=True)
            save_file(tensors, file.with_suffix(".tmp"), metadata={"texts": json.dumps(texts)})
            file.with_suffix(".tmp").replace(file)

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

    @contextlib.contextmanager
    def checkpoint_if_it_fails(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> Iterator[None]:
        """If a function of the user's fails within the block, leave a checkpoint of the updates that are finished."""
        try:
            yield
        except InputError as error:
            if not state["step"]:
                raise
            self.save_checkpoint(model, optimizer, state)
            raise InputError(f"{error}; resume after update {state['step']} with --resume {self.folder}") from error

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
