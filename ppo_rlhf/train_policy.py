"""PPO against a reward model: chapter 1, Fine-tuning language models from human preferences (Ziegler et al. 2019).

A language model (the policy) writes continuations of queries. A reward model, trained from human comparisons
by `train_reward.py`, scores them. PPO raises the score, and a penalty on the KL divergence from the model that we
started from (the reference) keeps the text fluent. Each update has eight steps:

    1. sample queries
    2. generate responses; keep their log-probs and values
    3. log-probs of the reference
    4. truncate the responses at the stop token and score them
    5. per-token rewards: KL penalty on every sampled token, also after the stop; score on the last of them
    6. advantages and returns (GAE), for each minibatch again
    7. PPO epochs over minibatches
    8. adapt the KL coefficient and log

`train()` is the loop and shows steps 1 to 5 and 8. `ppo_update()` has steps 6 and 7, because each minibatch whitens
its own rewards and advantages. What is imported of ours is machinery, which you can skip: the command line, a run's
folder with its logs, checkpoints and traces, several processes, files of models and texts, and functions of texts.

Marks like [D54] name an implementation detail. The original is openai/lm-human-preferences at commit cbfd210; a file
with a line, such as policy.py#L48, is always one of the original. Marks like [X01] are places where we differ on
purpose: docs/reference.

    python ppo_rlhf/train_both.py --preset tales                    # no network: reward model, then this, in minutes
    python ppo_rlhf/train_policy.py                         # GPT-2, one GPU, the newest reward model in models/
    accelerate launch --num_processes 8 ppo_rlhf/train_policy.py --track
    python ppo_rlhf/train_policy.py --resume runs/<run>             # resume after an interruption
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object, reduce
from annotated_types import Ge
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, StaticCache

from ppo_rlhf.lib import (
    checkpoints,
    command_line,
    errors,
    files,
    layers,
    pretrained,
    processes,
    reward_functions,
    run,
    text_sources,
    traces,
)
from ppo_rlhf.lib.bounds import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ZeroToOne
from ppo_rlhf.lib.errors import InputError, flag, typed
from ppo_rlhf.lib.pretrained import vocabulary_size

# ---- Arguments -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TaskArgs:
    query_dataset: str = "books"
    """texts: books, cnndm, tldr, tales, reviews, dummy, a file (.txt, .jsonl, .json, .parquet, .csv), a folder with
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
    temperature: Annotated[float, Ge(0.01)] = 0.7
    """sampling temperature of the policy and of the reference"""


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
    # Not cut at a stop: the score is on the last of all tokens, so those after a stop, which it doesn't judge, would
    # get most of its credit.
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

# Controllers of the KL coefficient. The target is 6 nats per response. QUICK is for tales, which has few episodes.
ADAPTIVE = command_line.AdaptiveKLArgs(target=6.0, horizon=10_000)
QUICK = command_line.AdaptiveKLArgs(target=6.0, horizon=1_000)
FIXED = command_line.AdaptiveKLArgs(target=None)


@dataclass(frozen=True, kw_only=True)
class RewardsArgs:
    trained_model: str = ""
    """a reward model of train_reward.py: models/<run>/reward; empty: the newest of this preset below models/, unless
    there is a function"""
    function: str = ""
    """package.module:name of a function (queries, responses: texts) -> list of floats, in place of a reward model;
    also one for TRL or verl, as docs/chapter3.md says; there are no answers and no columns here. Of a
    response, it gets what is before the first end-of-text token"""
    monitor: str = ""
    """package.module:name of such a function that is only logged, as objective/<name>"""
    normalize_samples: NonNegativeInt = 256
    """samples of the language model on which scores of `function` get mean 0 and deviation 1, the scale for which the
    KL coefficient and the critic are meant; 0: scores stay as they are"""
    kl_coef: NonNegativeFloat = 0.15
    """weight of the KL penalty at the start, reward per nat"""
    adaptive_kl: command_line.AdaptiveKLArgs = field(default_factory=lambda: ADAPTIVE)
    """controller of the KL coefficient"""


@dataclass(frozen=True, kw_only=True)
class PpoArgs(command_line.MemoryArgs):
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
    gamma: ZeroToOne = 1.0
    """discount per token"""
    lam: ZeroToOne = 0.95
    """lambda of generalised advantage estimation"""
    whiten_rewards: bool = True
    """scale the rewards of each group's minibatch to variance 1 (advantages always are)"""
    whiten_groups: PositiveInt = 8
    """groups: slices of the batch, each whitened with its own mean and variance; the original: one per process [X03].
    In chapter 3, a group is something else: the responses to one problem"""


@dataclass(frozen=True, kw_only=True)
class Args(command_line.PolicyRunArgs):
    preset: str = "sentiment"
    """names a set of defaults: sentiment, descriptiveness, cnndm, tldr, tales, tales-descriptiveness, reviews"""
    exp_name: str = "train_policy"
    seed: NonNegativeInt = 1
    """seed of the sampling noise and the permutations"""
    base_model: str = "gpt2"
    """causal language model to start from: a folder, a name on the hub, or `tales`"""
    compile: bool = False
    """compile the models with torch.compile: half a minute, and then fewer and larger kernels; meant for GPUs"""
    task: TaskArgs = field(default_factory=TaskArgs)
    """queries and responses"""
    rewards: RewardsArgs = field(default_factory=RewardsArgs)
    """score and KL penalty"""
    ppo: PpoArgs = field(default_factory=PpoArgs)
    """the optimisation"""


SENTIMENT = Args(ppo=PpoArgs(local_micro_batch_size=24))
# Summaries do without reward whitening.   launch.py#L166
SUMMARIES_PPO = PpoArgs(
    batch_size=32, lr=2e-6, whiten_rewards=False, local_micro_batch_size=4, local_rollout_batch_size=16
)
TALES = Args(
    base_model="tales",
    trace_interval=20,
    rewards=RewardsArgs(adaptive_kl=QUICK, monitor="ppo_rlhf.worlds.tales:sentiment.gold_scores"),
    ppo=PpoArgs(total_episodes=12_800, batch_size=64, lr=2e-4, local_micro_batch_size=64),
)
DESCRIPTIVENESS = dataclasses.replace(TALES.rewards, monitor="ppo_rlhf.worlds.tales:descriptiveness.gold_scores")
# A real language model sees few episodes: it learns from each once, in two steps an update; the controller acts soon.
REVIEWS = Args(
    base_model="smollm2-135m",
    trace_interval=10,
    rewards=RewardsArgs(
        kl_coef=0.05,
        adaptive_kl=command_line.AdaptiveKLArgs(target=12.0, horizon=400),
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
    "cnndm": Args(rewards=RewardsArgs(kl_coef=0.01, adaptive_kl=FIXED), ppo=SUMMARIES_PPO),
    "tldr": Args(rewards=RewardsArgs(kl_coef=0.03, adaptive_kl=FIXED), ppo=SUMMARIES_PPO),
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


def train(args: Args, joint: dict | None = None) -> Path:
    """Train a policy and return the folder models/<run>/policy, on every process. joint: what train_both.py gives.

    Raises InputError, a ValueError: on bad arguments before anything is written; later if a disk or a function fails.
    """
    accelerator = processes.make_accelerator()
    device = accelerator.device
    noise_device = processes.device_of_noise(device)
    check_ppo_arguments(args)
    args = with_newest_reward_model(args)
    sizes = ppo_sizes(args.ppo, accelerator.num_processes)
    task, ppo = args.task, args.ppo
    pass_rows = ppo.local_rollout_batch_size  # rows of a pass without gradients

    tokenizer = pretrained.load_tokenizer(args.base_model, args.trust_remote_code)
    ids = task_ids(task, tokenizer)
    # [D11] Every stage begins with the first text.   train_policy.py#L454-L457
    stream = QueryStream(task, tokenizer)
    policy, reference = load_policy_and_reference(args, ids, device)
    reward = load_reward(args, tokenizer, ids, device)
    scale = Scale()
    monitor = load_monitor(args.rewards.monitor, tokenizer, ids.pad)
    # [D66] All parameters learn, embeddings and value head too.   utils/core.py#L621-L629
    # [X17] The value head starts at 0, so it may need larger steps than what was pretrained.
    param_groups = [
        {"params": policy.lm_backbone.parameters(), "first_lr": ppo.lr},
        {"params": policy.value_head.parameters(), "first_lr": ppo.value_head_lr or ppo.lr},
    ]
    optimizer = AdamTensorFlowStyle(param_groups, lr=ppo.lr)
    adaptive_kl = args.rewards.adaptive_kl
    controller = AdaptiveKLController(args.rewards.kl_coef, adaptive_kl.target, adaptive_kl.horizon)
    this_run = run.Run(args, accelerator, dataclasses.asdict(sizes), joint)
    save = partial(save_policy, policy=policy, tokenizer=tokenizer, args=args)
    this_run.rehearse(save)
    # From the newest checkpoint; {"step": 0} if there is none.
    resumed = this_run.resume(partial(checkpoints.restore_training_state, policy, optimizer))
    controller.value = resumed.get("kl_coef", controller.value)
    stream.position = resumed.get("query_position", stream.position)
    scale.mean, scale.std = resumed.get("score_scale", (scale.mean, scale.std))
    if not isinstance(reward, RewardModel) and args.rewards.normalize_samples and resumed["step"] == 0:
        # [X18] The KL coefficient and the critic are meant for scores of mean 0 and deviation 1.
        scores = scores_of_base_model(args, accelerator, stream, ids, policy=policy, reward=reward, rows=pass_rows)
        scale.fit(scores)
    this_run.start_logging(resumed["step"], config_for_plots(args))
    rank = accelerator.process_index
    mine = slice(rank * sizes.local_batch, (rank + 1) * sizes.local_batch)  # this process's rows of the batch
    groups = range(rank * sizes.local_groups, (rank + 1) * sizes.local_groups)

    for update in this_run.updates("PPO", "episodes", first=resumed["step"], total=sizes.updates):
        # 1. Sample queries. Every process draws the whole batch and takes its rows, a slice with whole groups. [X04]
        queries = stream.next_batch(sizes.batch, ids.pad)[mine].to(device)  # (local_batch, query_length)
        uniforms = episode_noise(args.seed, update, sizes.batch, task.response_length)[mine].to(noise_device)

        with this_run.saved_if_it_fails(), torch.no_grad():
            with torch.autocast(device.type, torch.bfloat16, enabled=policy.low_precision):
                # 2. Generate responses. Keep their log-probs and values, all (local_batch, response_length).
                contexts = add_affixes(queries, ids.prefix, ids.suffix)  # (local_batch, context_length)
                responses, sampled_logprobs, hidden_states = write_responses(
                    policy, contexts, uniforms, ids.pad, task.temperature, rows=pass_rows
                )
                # (local_batch, context_length + response_length)
                context_responses = torch.cat([contexts, responses], dim=1)
                if policy.low_precision:
                    # In low precision the sampler rounds otherwise than training does, and the ratio would not
                    # start at 1. So the policy reads what it wrote.
                    logprobs, _, values = few_rows_at_a_time(
                        lambda tokens: policy(tokens, ids.pad, ids.context_length, task.temperature),
                        pass_rows,
                        context_responses,
                    )
                else:
                    # [D25] [D26] The log-probs and values that the sampler saw become the old ones. So the ratio
                    #       starts at 1.
                    logprobs = sampled_logprobs
                    values = read_scalar(policy.value_head, hidden_states)

                # 3. Compute the reference's log-probs, at the policy's temperature: (local_batch, response_length).
                ref_logprobs = reference_logprobs(reference, context_responses, ids, task.temperature, rows=pass_rows)

                # 4. Truncate the responses, (local_batch, response_length), and score them, (local_batch,).
                truncated_responses = truncate_at(responses, ids.stop, task.truncate_after, ids.pad)
                # [D28] [D49] The scorer reads query and truncated response, but no prefix and suffix.
                #       train_policy.py#L396-L402
                own_scores = score_responses(reward, queries, truncated_responses, pad_id=ids.pad, rows=pass_rows)
                # [X18] The scores of a function get the scale that a normalised reward model has. They are raw as
                #       long as the penalty below is not in them.
                raw_scores = scale.apply(own_scores)
                # [D50] Without a stop token, a penalty takes the place of the score.   train_policy.py#L384-L390
                stopped = has_stop(truncated_responses, ids.stop, task.truncate_after)
                scores = torch.where(stopped, raw_scores, task.penalty_reward_value)

                # 5. Compute per-token rewards. The score judges the text as a whole, so it is on the last of all
                #    tokens, also if the response was truncated before it. The KL divergence is a sum over tokens,
                #    so each token pays for its own part.
                # [D53] The penalty uses the coefficient that the last update left.   train_policy.py#L293-L297
                rewards, non_score_rewards, kl = compute_rewards(scores, logprobs, ref_logprobs, controller.value)

            # Of each episode, (local_batch,), this is logged.
            objectives = {
                "kl": kl.sum(1),
                "entropy": -logprobs.sum(1),  # of the sampled tokens; ppo/policy/entropy is the exact one
                "score": scores,
                "non_score_reward": non_score_rewards.sum(1),
                "raw_score": raw_scores,
                "stopped": stopped,
            }
            for name, function in monitor.items():
                objectives[name] = function(queries, truncated_responses)
            if not isinstance(reward, RewardModel):
                objectives["function_score"] = own_scores
            objectives["response_length"] = (truncated_responses != ids.pad).sum(1)
            objectives["sampler_gap"] = (logprobs - sampled_logprobs).abs().mean(1)
        batch = Rollout(
            context_responses=context_responses,
            logprobs=logprobs,
            values=values,
            rewards=rewards,
            queries=queries,
            truncated_responses=truncated_responses,
            ref_logprobs=ref_logprobs,
            kl=kl,
            objectives=objectives,
        )

        # 6. Compute advantages and returns, and 7. optimise: `ppo_update` does both for each minibatch.
        for param_group in optimizer.param_groups:
            param_group["lr"] = learning_rate(ppo, update, param_group["first_lr"])
        orders = draw_permutations(args.seed, update, ppo.noptepochs, groups, group_batch=sizes.group_batch)
        stats = ppo_update(policy, optimizer, batch, orders, ppo, pad_id=ids.pad, temperature=task.temperature)

        # 8. Adapt the KL coefficient and log.
        metrics = update_metrics(batch, stats, this_run, args, update=update, ids=ids, kl_coef=controller.value)
        # [D70] [D71] The controller sees the KL averaged over all processes.   train_policy.py#L299-L305
        controller.update(metrics["objective/kl"], sizes.batch)
        state = {
            "kl_coef": controller.value,
            "query_position": stream.position,
            "score_scale": [scale.mean, scale.std],
        }
        this_run.end_of_update(
            update,
            metrics,
            f"score {metrics['objective/score']:+.2f}, KL {metrics['objective/kl']:.2f}, "
            f"{100 * metrics['objective/stopped']:.0f} % end",
            samples=partial(sample_rows, tokenizer, ids.pad, batch),
            # The new coefficient is for other queries, which the policy answers as it is now.
            trace=partial(
                record_trace,
                this_run,
                update,
                batch,
                controller.value,
                stream=stream,
                ids=ids,
                policy=policy,
                reference=reference,
                reward=reward,
                scale=scale,
                monitor=monitor,
                rows=pass_rows,
            ),
            # The counterpart of `resume` above.   train_policy.py#L474-L508
            checkpoint=lambda state=state: (checkpoints.training_state(policy, optimizer), state),
        )
    folder = this_run.model_folder / "policy"
    if accelerator.is_main_process:
        save(folder)
    last = this_run.last_means("score", "kl", "kl_coef")
    this_run.finish("policy", **last, skipped_queries=stream.position - sizes.updates * sizes.batch)
    return folder


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Episodes of one process, its part of the batch. PPO needs the first four tensors; the rest is for the logs.

    `ppo_update` appends to `seen` what each of its passes computes.
    """

    context_responses: Tensor  # (local_batch, context_length + response_length)
    logprobs: Tensor  # (local_batch, response_length), under the policy that sampled
    values: Tensor  # (local_batch, response_length), of the critic at that time
    rewards: Tensor  # (local_batch, response_length), KL penalty and score, not whitened
    queries: Tensor | None = None  # (local_batch, query_length)
    truncated_responses: Tensor | None = None  # (local_batch, response_length)
    ref_logprobs: Tensor | None = None  # (local_batch, response_length)
    kl: Tensor | None = None  # (local_batch, response_length)
    objectives: dict[str, Tensor] = field(default_factory=dict)  # (local_batch,) each: what is logged of an episode
    seen: list = field(default_factory=list)  # rows and numbers of each pass of training


# ---- Step 1: queries -------------------------------------------------------------------------------------------


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
    command_line.check_task(task)
    prefix = tokenizer.encode(task.query_prefix, add_special_tokens=False)
    prefix = [*pretrained.start_of_plain(tokenizer), *prefix]
    suffix = tokenizer.encode(task.query_suffix, add_special_tokens=False)
    return TaskIds(
        # GPT-2 and Pythia have no padding token, and their end of text may be sampled. So padding gets an id that no
        # text has and no model samples, one above the largest.
        pad=vocabulary_size(tokenizer),
        eos=-1 if tokenizer.eos_token_id is None else tokenizer.eos_token_id,
        stop=pretrained.one_token(tokenizer, task.truncate_text, "truncate_text"),
        prefix=prefix,
        suffix=suffix,
        context_length=len(prefix) + task.query_length + len(suffix),
    )


class QueryStream:
    """An endless stream of queries: the texts in one shuffled order, again and again.

    The order depends neither on the run's seed nor on the number of processes. `position` counts the texts read; a
    stream that starts at the position of another one continues where that one stopped.
    """

    def __init__(self, task: TaskArgs, tokenizer: PreTrainedTokenizerBase, position: int = 0, split: str = "train"):
        self.texts = text_sources.load_texts(task.query_dataset, split, task.query_column)
        self.task = task
        self.tokenizer = tokenizer
        self.position = position
        # [D02] All runs, processes and passes use the same order.   language/datasets.py#L27-L46
        self.order = list(range(len(self.texts)))
        random.Random(0).shuffle(self.order)
        self.start_id = pretrained.one_token(tokenizer, task.start_text, "start_text")
        self.end_id = pretrained.one_token(tokenizer, task.end_text, "end_text")
        if not self.first(1, pad_id=0).numel():
            raise InputError(
                f"{flag('task.query_dataset')} {task.query_dataset}: none of its {len(self.texts)} texts gives a "
                f"query; give more texts, or see {flag('task.start_text')} and {flag('task.end_text')}"
            )

    def tokens(self, place: int) -> list[int]:
        """Token ids of a text, by its place among all that are read, pass after pass."""
        # The texts are data: no special tokens are added, and the name of one is ordinary text.
        text = self.texts[self.order[place % len(self.order)]]
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)

    def trim(self, tokens: list[int]) -> list[int] | None:
        return trim_query(tokens, self.task.query_length, self.start_id, self.end_id)

    def next_query(self) -> list[int] | None:
        """The next query; None if a whole pass over the texts gives none."""
        for _ in range(len(self.texts)):
            self.position += 1
            if query := self.trim(self.tokens(self.position - 1)):
                return query
        return None

    def next_batch(self, batch_size: int, pad_id: int) -> Tensor:
        """The next queries, padded on the right: (batch_size, query_length)."""
        # [D08] [D10] [X04] Process r of W takes its slice of a batch that is the same for every W.
        #       language/datasets.py#L66-L85
        return padded([self.next_query() for _ in range(batch_size)], pad_id, self.task.query_length)

    def first(self, n: int, pad_id: int) -> Tensor:
        """The first n queries of all, or as many as there are: (n, query_length). The position stays the same."""
        position = self.position
        self.position = 0
        queries = []
        while len(queries) < n and (query := self.next_query()) and self.position <= len(self.texts):
            queries.append(query)
        self.position = position
        return padded(queries, pad_id, self.task.query_length)


def padded(rows: list[list[int]], pad_id: int, length: int | None = None) -> Tensor:
    """Rows of token ids, padded on the right to a length, or to that of the longest: (rows, length)."""
    longest = max(map(len, rows), default=0) if length is None else length
    return torch.tensor([row + [pad_id] * (longest - len(row)) for row in rows], dtype=torch.long).view(-1, longest)


def trim_query(tokens: list[int], query_length: int, start_id: int | None, end_id: int | None) -> list[int] | None:
    """Cut a text's tokens to a query: after the first start token, at most query_length, up to the last end token.

    Returns None if the text has no start token, or no end token within the cut. Golden example, both ids 13:
    `One. Two words. Three more` gives ` Two words.`; `Only end.` is kept whole.
    """
    # [D05] After the first start token; if that is the last one, from the beginning.   language/datasets.py#L49-L55
    if start_id is not None:
        if start_id not in tokens:
            return None
        first = tokens.index(start_id)
        if first < len(tokens) - 1:
            tokens = tokens[first + 1 :]
    # [D06] At most so many of them.   language/datasets.py#L57
    tokens = tokens[:query_length]
    # [D07] Up to the last end token within the cut.   language/datasets.py#L59-L64
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


# ---- Steps 2 to 4: how a model writes and reads tokens ---------------------------------------------------------


def few_rows_at_a_time(function: Callable, rows: int, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Apply a function to so many rows at a time and join the tensors that it returns: the same in less memory."""
    results = [function(*parts) for parts in zip(*(tensor.split(rows) for tensor in tensors), strict=True)]
    if isinstance(results[0], Tensor):
        return torch.cat(results)
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


def write_responses(
    policy: PolicyWithValueHead, contexts: Tensor, uniforms: Tensor, pad_id: int, temperature: float, *, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What `generate` returns for contexts (batch, context_length), of which it gets so many rows at a time."""
    vocab_size = pad_id  # the padding id is one above the largest
    return few_rows_at_a_time(
        lambda *parts: generate(policy.lm_backbone, *parts, pad_id, vocab_size, temperature), rows, contexts, uniforms
    )


@torch.no_grad()
def generate(
    lm_backbone: PreTrainedModel, contexts: Tensor, uniforms: Tensor, pad_id: int, vocab_size: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample responses with a key-value cache.

    contexts: (batch, context_length) token ids, padding anywhere; uniforms: (batch, response_length) random numbers
    in [0, 1), one for each token, on a device that has float64. Returns responses and their log-probs (batch,
    response_length), and the hidden state before each token (batch, response_length, width).
    """
    # [D13] [D14] The same mask and positions as in `read_tokens`, for contexts whose padding is moved to the left.
    tokens = left_pad(contexts, pad_id)
    mask = tokens != pad_id  # (batch, context_length)
    position_ids = mask.cumsum(1) - mask.long()
    tokens = tokens.masked_fill(~mask, 0)
    # Keys and values of a whole episode have their place from the start, so that every step has the same shapes.
    length = contexts.shape[1] + uniforms.shape[1]
    cache = KeyValueCache(config=lm_backbone.config, max_cache_len=length)
    attention_mask = causal_mask(F.pad(mask, (0, uniforms.shape[1]), value=True), lm_backbone.dtype)
    masks = attention_mask.split([contexts.shape[1]] + [1] * uniforms.shape[1], dim=2)  # context, then each token
    responses, logprobs, hidden_states = [], [], []
    # [D22] [D24] Always response_length tokens; no top-k, no top-p.   language/sample.py#L24-L84
    for column in range(uniforms.shape[1]):
        hidden = lm_backbone.base_model(
            input_ids=tokens,
            attention_mask=masks[column],
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[:, -1]  # (batch, width)
        all_logprobs = F.log_softmax(scaled_logits(lm_backbone, hidden, vocab_size, temperature), dim=1)
        # [X01] Inverse CDF: the first token whose cumulative probability exceeds the uniform number, times the total,
        #       which rounding leaves a little off 1. In float64, since in float32 rare tokens could never be drawn.
        cdf = all_logprobs.to(uniforms.device).double().exp().cumsum(1)  # (batch, vocab_size)
        thresholds = uniforms[:, column : column + 1].double() * cdf[:, -1:]
        tokens = torch.searchsorted(cdf, thresholds, right=True).clamp(max=vocab_size - 1).to(hidden.device)
        # [D25] Log-probs are recorded as the tokens are sampled.   policy.py#L108-L112
        responses.append(tokens)
        logprobs.append(all_logprobs.gather(1, tokens))
        hidden_states.append(hidden)
        position_ids = position_ids[:, -1:] + 1
    return torch.cat(responses, 1).to(contexts.dtype), torch.cat(logprobs, 1), torch.stack(hidden_states, 1)


class KeyValueCache(StaticCache):
    """Keys and values, both in the precision of the values."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Add those of new tokens; return those of all tokens."""
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
    """The numbers of a language model for responses that it reads.

    context_responses: (batch, context_length + response_length). Returns log-probs and entropies (nats, without
    gradient), each (batch, response_length), and the hidden states (batch, response_length, width).
    """
    # [D47] What the model says at position i is about token i + 1: hence the shift by one.   policy.py#L114-L126
    hidden_states = read_tokens(lm_backbone, context_responses, pad_id, slice(context_length - 1, -1))
    responses = context_responses[:, context_length:]
    responses = responses.masked_fill(responses == pad_id, 0)  # (batch, response_length)
    all_logprobs = F.log_softmax(scaled_logits(lm_backbone, hidden_states, vocab_size, temperature), dim=2)
    logprobs = all_logprobs.gather(2, responses.long().unsqueeze(2)).squeeze(2)  # (batch, response_length)
    with torch.no_grad():
        entropies = -(all_logprobs.exp() * all_logprobs).sum(2)  # (batch, response_length)
    return logprobs, entropies, hidden_states


def reference_logprobs(
    reference: PreTrainedModel, context_responses: Tensor, ids: TaskIds, temperature: float, *, rows: int
) -> Tensor:
    """The reference's log-probs (batch, response_length), read so many rows at a time.

    context_responses: (batch, context_length + response_length).
    """
    logprobs, _, _ = few_rows_at_a_time(
        lambda tokens: response_logprobs(
            reference, tokens, ids.pad, ids.context_length, temperature, vocab_size=ids.pad
        ),
        rows,
        context_responses,
    )
    return logprobs


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
    """Logits over the tokenizer's ids, divided by the temperature: (..., vocab_size). In full precision even in
    bfloat16 runs, where rounded logits would move the log-prob of every token.
    """
    output_layer = lm_backbone.get_output_embeddings()
    hidden_states = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
    with torch.autocast(hidden_states.device.type, enabled=False):
        if getattr(output_layer, "weight", hidden_states).dtype == torch.bfloat16:  # a frozen model
            logits = F.linear(hidden_states, *(parameter.float() for parameter in output_layer.parameters()))
        else:
            logits = output_layer(hidden_states)
    if cap := getattr(getattr(lm_backbone, "config", None), "final_logit_softcapping", None):  # Gemma 2
        logits = cap * torch.tanh(logits / cap)
    # [D12] Ids above the tokenizer's largest, such as padding, are never sampled or scored.   policy.py#L58-L59
    # [D23] Log-probs and entropies are those of the scaled logits.   language/sample.py#L24-L30
    return logits[..., :vocab_size] / temperature


def read_scalar(head: nn.Linear, hidden_states: Tensor) -> Tensor:
    """The head's number for each hidden state: (..., width) gives (...). In full precision even in bfloat16 runs."""
    with torch.autocast(hidden_states.device.type, enabled=False):
        return head(hidden_states.to(head.weight.dtype)).squeeze(-1)


class PolicyWithValueHead(nn.Module):
    """A causal language model with a scalar head on its final hidden state: actor and critic share the trunk."""

    def __init__(self, lm_backbone: PreTrainedModel, vocab_size: int | None = None, *, low_precision: bool = False):
        """vocab_size: number of ids that can be sampled, if the output layer has more rows than the tokenizer;
        low_precision: whether matrix products are in bfloat16.
        """
        super().__init__()
        self.lm_backbone = lm_backbone
        self.vocab_size = vocab_size or lm_backbone.config.vocab_size
        self.low_precision = low_precision
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
        with torch.autocast(query_responses.device.type, torch.bfloat16, enabled=self.low_precision):
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


def score_responses(
    reward: RewardModel | reward_functions.Scorer,
    queries: Tensor,
    truncated_responses: Tensor,
    *,
    pad_id: int,
    rows: int,
) -> Tensor:
    """Scores (batch,) of a reward model, which reads so many rows at a time, or of a function, which gets all."""
    if not isinstance(reward, RewardModel):
        return reward(queries, truncated_responses)
    query_responses = torch.cat([queries, truncated_responses], dim=1)  # (batch, query_length + response_length)
    return few_rows_at_a_time(lambda tokens: reward(tokens, pad_id), rows, query_responses)


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


# ---- Steps 5 to 7: rewards, advantages, losses -----------------------------------------------------------------


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


def draw_permutations(seed: int, update: int, epochs: int, groups: range, group_batch: int) -> Tensor:
    """Orders in which each group visits its episodes: (epochs, groups, group_batch), fresh ones in each epoch."""
    # [D62] [X02] Every epoch visits the same episodes in a fresh order.   train_policy.py#L180-L196
    orders = [
        torch.randperm(group_batch, generator=keyed_generator(seed, "permutation", update, epoch, group))
        for epoch in range(epochs)
        for group in groups
    ]
    return torch.stack(orders).unflatten(0, (epochs, len(groups)))


def ppo_update(
    policy: PolicyWithValueHead,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    permutations: Tensor,
    ppo: PpoArgs,
    pad_id: int,
    temperature: float,
) -> dict[str, Tensor]:
    """Steps 6 and 7: all epochs of PPO on one rollout.

    permutations: (epochs, groups, group_batch), each row an order of that group's episodes, for the groups of this
    process; the first has the first group_batch episodes of the rollout, and so on. Minibatch k holds slice k of
    every group's order.

    Returns 0-d means of what `ppo_loss` says, of values and returns, the gradient norm, and the first ratio gap.
    """
    epochs, groups, group_batch = permutations.shape
    group_minibatch = group_batch // ppo.nminibatches
    context_length = rollout.context_responses.shape[1] - rollout.rewards.shape[1]
    device = rollout.rewards.device
    b_inds = permutations + torch.arange(groups).unsqueeze(1) * group_batch  # (epochs, groups, group_batch)
    steps = []  # what is logged of each optimiser step
    for epoch in range(epochs):
        for minibatch in range(ppo.nminibatches):
            slice_of_group = slice(minibatch * group_minibatch, (minibatch + 1) * group_minibatch)
            mb_inds = b_inds[epoch, :, slice_of_group].to(device, non_blocking=True)  # (groups, group_minibatch)

            # 6. Compute advantages and returns. The critic's values say how well a response was going to do anyway.
            #    What is left, the advantage, says what the sampled token added, with much less noise.
            mb_values = rollout.values[mb_inds]  # (groups, group_minibatch, response_length)
            mb_advantages, mb_returns = group_advantages(rollout.rewards[mb_inds], mb_values, ppo)
            rollout.seen.append((mb_inds, {"advantages": mb_advantages, "returns": mb_returns}))

            # 7. Make one optimiser step. Micro-batches add up to the gradient of the whole minibatch. [D67] [D88]
            shares = []  # what is logged of each micro-batch, times its share of the minibatch
            optimizer.zero_grad()
            for start in range(0, mb_inds.numel(), ppo.local_micro_batch_size):
                part = slice(start, start + ppo.local_micro_batch_size)
                inds = mb_inds.flatten()[part]  # (micro_batch,); what follows is (micro_batch, response_length)
                new_logprobs, entropies, new_values = policy(
                    rollout.context_responses[inds], pad_id, context_length, temperature
                )
                loss, info = ppo_loss(
                    new_logprobs=new_logprobs,
                    entropies=entropies,
                    new_values=new_values,
                    logprobs=rollout.logprobs[inds],
                    values=rollout.values[inds],
                    advantages=mb_advantages.flatten(0, 1)[part],
                    returns=mb_returns.flatten(0, 1)[part],
                    ppo=ppo,
                )
                rollout.seen.append(
                    (inds, {"new_logprobs": new_logprobs.detach(), "new_values": new_values.detach()})
                )
                share = len(inds) / mb_inds.numel()
                (loss * share).backward()
                shares.append({name: value * share for name, value in info.items()})
            average_gradients(policy)
            # Only looked at: nothing is clipped.
            gradient_norm = nn.utils.get_total_norm([p.grad for p in policy.parameters() if p.grad is not None])
            optimizer.step()
            means = {name: torch.stack([share[name] for share in shares]).sum() for name in shares[0]}
            for name, tensor in (("val", mb_values), ("returns", mb_returns)):  # means over the groups
                means[f"ppo/{name}/mean"] = tensor.mean()
                means[f"ppo/{name}/var"] = tensor.var((1, 2), unbiased=False).mean()
            steps.append({"ppo/gradient_norm": gradient_norm} | means)
    means = {name: torch.stack([step[name] for step in steps]).mean() for name in steps[0]}
    return means | {"ppo/val/first_ratio_gap": steps[0][SQUARED_RATIO_GAP].sqrt()}  # 0 but for rounding


def average_gradients(model: nn.Module) -> None:
    """Replace the gradients by their mean over all processes. That is all that several GPUs need: the model has no
    wrapper, and every process takes the same optimiser step.
    """
    # Before each step of the optimiser.   utils/core.py#L468-L488
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        mean = reduce(nn.utils.parameters_to_vector(gradients), "mean")
        nn.utils.vector_to_parameters(mean, gradients)


def group_advantages(rewards: Tensor, values: Tensor, ppo: PpoArgs) -> tuple[Tensor, Tensor]:
    """Step 6 for one minibatch: whitened advantages and returns. Every group whitens with its own statistics.

    rewards, values: (groups, group_minibatch, response_length). Returns two tensors of that shape.
    """
    # [D55] Rewards are whitened here, minibatch by minibatch. They keep their mean, and only their spread changes:
    #       without the mean, each return would lose it once for each token that is left.
    #       train_policy.py#L323-L325
    # [D77] A group is the part of a minibatch that one process of the original has.   train_policy.py#L158-L159
    if ppo.whiten_rewards:
        rewards = torch.stack([whiten(group, keep_mean=True) for group in rewards])
    advantages, returns = compute_gae(rewards.flatten(0, 1), values.flatten(0, 1), ppo.gamma, ppo.lam)
    # [D58] Advantages are always whitened, once the returns are made.   train_policy.py#L338-L339
    advantages = torch.stack([whiten(group, keep_mean=False) for group in advantages.view_as(values)])
    return advantages, returns.view_as(values)


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
    # [D56] [D57] The rollout's values; advantages not yet whitened; rewards may be.   train_policy.py#L327-L336
    advantages = torch.zeros_like(values)
    next_advantage = next_value = torch.zeros_like(values[:, 0])  # (batch,)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = next_advantage = delta + gamma * lam * next_advantage
        next_value = values[:, t]
    return advantages, advantages + values


SQUARED_RATIO_GAP = "squared_ratio_gap"  # mean of (ratio - 1)^2, for the variance of the ratio


def ppo_loss(
    new_logprobs: Tensor,
    entropies: Tensor,
    new_values: Tensor,
    logprobs: Tensor,
    values: Tensor,
    advantages: Tensor,
    returns: Tensor,
    ppo: PpoArgs,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch, and its metrics: means over its tokens, without gradient. All 0-d.

    Every tensor given is (micro_batch, response_length).
    """
    pg_loss, pg_clipfrac, approxkl = policy_loss(new_logprobs, logprobs, advantages, ppo.cliprange)
    vf_loss, vf_clipfrac = value_loss(new_values, values, returns, ppo.cliprange_value)
    # [D61] No entropy bonus; every token has the same weight.   train_policy.py#L357
    loss = pg_loss + ppo.vf_coef * vf_loss
    with torch.no_grad():
        ratio = torch.exp(new_logprobs - logprobs)  # (micro_batch, response_length)
        return loss, {
            "ppo/loss/policy": pg_loss.detach(),
            "ppo/loss/value": vf_loss.detach(),
            "ppo/loss/total": loss.detach(),
            "ppo/policy/approxkl": approxkl,
            "ppo/policy/clipfrac": pg_clipfrac,
            "ppo/val/clipfrac": vf_clipfrac,
            "ppo/policy/entropy": entropies.mean(),
            "ppo/val/vpred": new_values.mean(),
            "ppo/val/error": ((new_values - returns) ** 2).mean(),
            "ppo/val/ratio": ratio.mean(),
            SQUARED_RATIO_GAP: ((ratio - 1) ** 2).mean(),
            "ppo/val/advantage": advantages.mean(),
            "ppo/val/advantage_var": (advantages**2).mean(),  # over a whole group, the mean is 0
        }


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
    # [D59] The larger error counts: no gradient once V leaves its range towards R.   train_policy.py#L343-L348
    clipped_values = torch.clamp(new_values, values - cliprange_value, values + cliprange_value)
    losses = (new_values - returns) ** 2  # (batch, response_length)
    clipped_losses = (clipped_values - returns) ** 2  # (batch, response_length)
    clipfrac = (clipped_losses > losses).to(losses.dtype).mean()
    return 0.5 * torch.maximum(losses, clipped_losses).mean(), clipfrac


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


def learning_rate(ppo: PpoArgs, update: int, first_lr: float | None = None) -> float:
    """The learning rate of an update (0-based), constant within it: linear from first_lr or ppo.lr, and never 0."""
    # [D63] All steps of an update have the same rate.   train_policy.py#L78-L84
    first_lr = ppo.lr if first_lr is None else first_lr
    return first_lr * (1 - update / math.ceil(ppo.total_episodes / ppo.batch_size))


# ---- Step 8: metrics, KL coefficient ---------------------------------------------------------------------------


# Names under objective/ that a run logs anyway, so no function to monitor can have them.
OF_EPISODES = {"kl", "entropy", "score", "non_score_reward", "raw_score", "stopped", "response_length", "sampler_gap"}
OBJECTIVES = OF_EPISODES | {"kl_coef", "score_total", "scores", "function_score"}


def update_metrics(
    batch: Rollout, stats: dict[str, Tensor], this_run: run.Run, args: Args, update: int, ids: TaskIds, kl_coef: float
) -> dict[str, float]:
    """All metrics of an update, over all processes; all must call this. kl_coef: what its rewards were made with."""
    accelerator = this_run.accelerator
    local_means = {}  # of this process
    for name, values in batch.objectives.items():
        local_means[f"objective/{name}"] = processes.widened(values).mean()
    for name, value in stats.items():
        local_means[name] = processes.widened(value.detach())
    # [D75] The mean of each metric over all processes, in float64.   utils/core.py#L491-L524
    flat = accelerator.reduce(torch.stack(list(local_means.values())), "mean")
    means = dict(zip(local_means, flat.tolist(), strict=True))
    eos_tokens = (batch.context_responses[:, ids.context_length :] == ids.eos).sum()
    means["ppo/val/num_eos_tokens"] = float(accelerator.reduce(eos_tokens, "sum"))
    processes.check_update(means, update, args.dtype, monitored=batch.objectives.keys() - OBJECTIVES)
    processes.check_equal("objective/kl_coef", kl_coef, accelerator)
    return finish_metrics(
        means,
        update,
        args,
        kl_coef=kl_coef,
        update_seconds=this_run.seconds_of_update(),
        run_seconds=this_run.seconds(),
    )


def finish_metrics(
    means: dict[str, float], update: int, args: Args, kl_coef: float, update_seconds: float, run_seconds: float
) -> dict[str, float]:
    """All metrics of an update: the means over all processes, and what follows from them.

    Names that the original has mean what they mean there. Those that lm-human-preference-details (at
    ccc1953) added (`objective/scores`, `_avg`) hold the same numbers, for its plotting commands.
    """
    ppo = args.ppo
    metrics = {name: mean for name, mean in means.items() if name != SQUARED_RATIO_GAP}
    metrics["objective/kl_coef"] = kl_coef
    metrics["objective/score_total"] = means["objective/score"] + means["objective/non_score_reward"]
    metrics["objective/scores"] = means["objective/score"]
    metrics["ppo/val/ratio_var"] = means[SQUARED_RATIO_GAP] - (means["ppo/val/ratio"] - 1) ** 2
    metrics["ppo/val/var_explained"] = 1 - means["ppo/val/error"] / max(means["ppo/returns/var"], 1e-12)
    for name in ("loss/policy", "loss/value", "policy/entropy", "policy/approxkl", "policy/clipfrac", "val/clipfrac"):
        metrics[f"ppo/{name}_avg"] = means[f"ppo/{name}"]
    tokens = ppo.batch_size * args.task.response_length  # of an update
    metrics["ppo/lr"] = learning_rate(ppo, update)
    metrics["ppo/global_step"] = update
    metrics["ppo/episode"] = (update + 1) * ppo.batch_size
    metrics["elapsed/episodes"] = (update + 1) * ppo.batch_size
    metrics["elapsed/steps/serial"] = (update + 1) * args.task.response_length
    metrics["elapsed/updates"] = update + 1
    metrics["elapsed/steps/total"] = (update + 1) * tokens
    metrics["elapsed/fps"] = int(tokens / update_seconds)
    metrics["elapsed/time"] = run_seconds
    return metrics


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
        # [D72] Without a target, fixed.   train_policy.py#L107-L112
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.value *= 1 + error * episodes / self.horizon


# ---- What is shown of an update: samples and traces ------------------------------------------------------------


def sample_rows(tokenizer: PreTrainedTokenizerBase, pad_id: int, batch: Rollout) -> list[dict[str, str | float]]:
    """The first three episodes as texts, with their numbers."""
    # [D80] The log shows some samples at intervals.   train_policy.py#L264-L279
    numbers = batch.objectives
    # [X06] The total uses the KL coefficient that made these rewards.
    total = numbers["score"] + numbers["non_score_reward"]  # (local_batch,)
    rows = []
    for i in range(min(3, len(total))):
        query = [token for token in batch.queries[i].tolist() if token != pad_id]
        response = [token for token in batch.truncated_responses[i].tolist() if token != pad_id]
        row = {
            "query": tokenizer.decode(query),
            "response": tokenizer.decode(response),
            "score": numbers["score"][i].item(),
            "kl": numbers["kl"][i].item(),
            "score - kl_coef * kl": total[i].item(),
        }
        rows.append(row)
    return rows


@torch.no_grad()
def record_trace(
    this_run: run.Run,
    update: int,
    batch: Rollout,
    kl_coef: float,
    *,
    stream: QueryStream,
    ids: TaskIds,
    policy: PolicyWithValueHead,
    reference: PreTrainedModel,
    reward: RewardModel | reward_functions.Scorer,
    scale: Scale,
    monitor: dict[str, reward_functions.Scorer],
    rows: int,
) -> None:
    """Keep a few episodes of the batch, and the policy's responses to the first queries, with the same noise each
    time. Every process must call this.

    kl_coef: for the rewards of these responses. rows: how many a model reads or writes at a time.
    """
    args = this_run.args
    task = args.task
    device = this_run.accelerator.device
    keep = partial(traces.keep, this_run, update, tokenizer=stream.tokenizer, pad_id=ids.pad)

    # Episodes that the policy has just learned from, with what it says of them now.
    group = args.ppo.batch_size // args.ppo.whiten_groups
    episodes = min(args.trace_episodes, group)
    new_logprobs, entropies, new_values = few_rows_at_a_time(
        lambda tokens: policy(tokens, ids.pad, ids.context_length, task.temperature),
        rows,
        batch.context_responses[:episodes],
    )
    # Whitened over all episodes of the first group: what the losses had, if there is one minibatch.
    advantages, returns = group_advantages(batch.rewards[None, :group], batch.values[None, :group], args.ppo)
    advantages = advantages[0, :episodes]
    ratio = torch.exp(new_logprobs - batch.logprobs[:episodes])
    clipped_ratio = ratio.clamp(1 - args.ppo.cliprange, 1 + args.ppo.cliprange)
    numbers = trace_numbers(batch, ids.pad)
    numbers |= traces.of_passes(batch.seen, numbers, episodes, this_run.accelerator)
    numbers |= {
        "new_logprobs": new_logprobs,
        "entropies": entropies,
        "new_values": new_values,
        "advantages": advantages,
        "returns": returns[0, :episodes],
        "ratio": ratio,
        "clipped": advantages * (clipped_ratio - ratio) < 0,
    }
    keep(numbers, episodes=episodes)

    # The same queries each time. A trace must not call functions of the user's.
    if not isinstance(reward, RewardModel):
        reward = traces.scorer_of_traces(reward, args.rewards.function)
    queries = stream.first(traces.TRACED, ids.pad).to(device)  # (n, query_length)
    contexts = add_affixes(queries, ids.prefix, ids.suffix)  # (n, context_length)
    uniforms = episode_noise(args.seed, 0, len(queries), task.response_length).to(processes.device_of_noise(device))
    with torch.autocast(device.type, torch.bfloat16, enabled=policy.low_precision):
        responses, logprobs, hidden_states = write_responses(
            policy, contexts, uniforms, ids.pad, task.temperature, rows=rows
        )
        context_responses = torch.cat([contexts, responses], dim=1)  # (n, context_length + response_length)
        ref_logprobs = reference_logprobs(reference, context_responses, ids, task.temperature, rows=rows)
        truncated_responses = truncate_at(responses, ids.stop, task.truncate_after, ids.pad)
        own_scores = score_responses(reward, queries, truncated_responses, pad_id=ids.pad, rows=rows)
    raw_scores = scale.apply(own_scores)
    stopped = has_stop(truncated_responses, ids.stop, task.truncate_after)
    scores = torch.where(stopped, raw_scores, task.penalty_reward_value)
    rewards, _, kl = compute_rewards(scores, logprobs, ref_logprobs, kl_coef)
    objectives = {"score": scores, "raw_score": raw_scores, "stopped": stopped}
    for name, function in monitor.items():
        objectives[name] = traces.scorer_of_traces(function, args.rewards.monitor)(queries, truncated_responses)
    if not isinstance(reward, RewardModel):
        objectives["function_score"] = own_scores
    repeated = Rollout(
        context_responses=context_responses,
        logprobs=logprobs,
        values=read_scalar(policy.value_head, hidden_states),
        rewards=rewards,
        truncated_responses=truncated_responses,
        ref_logprobs=ref_logprobs,
        kl=kl,
        objectives=objectives,
    )
    numbers = trace_numbers(repeated, ids.pad)
    numbers["statistics.kl_coef"] = torch.full((len(queries),), kl_coef, dtype=torch.float64)
    keep(numbers, episodes=len(queries), again=True)


def trace_numbers(batch: Rollout, pad_id: int) -> dict[str, Any]:
    """The numbers of episodes under the names that report/ knows."""
    scores = batch.objectives
    # Beside these, the monitor has the name of its function.
    shown = ["stopped", "function_score", *(scores.keys() - OBJECTIVES)]
    return {
        "query_responses": batch.context_responses,
        "scored": batch.truncated_responses != pad_id,
        "logprobs": batch.logprobs,
        "ref_logprobs": batch.ref_logprobs,
        "kl": batch.kl,
        "rewards": batch.rewards,
        "values": batch.values,
        "scores": scores["score"],
        "raw_scores": scores["raw_score"],
        "objectives": {name: scores[name] for name in shown if name in scores},
    }


# ---- Plumbing: checks, sizes, loading, saving ------------------------------------------------------------------


def check_ppo_arguments(args: Args) -> None:
    """Refuse numbers that cannot be meant."""
    command_line.check_run(args)
    command_line.check_controller(args.rewards.adaptive_kl, args.ppo.batch_size)
    if args.rewards.trained_model and args.rewards.function:
        raise InputError(f"give one of {flag('rewards.trained_model')} and {flag('rewards.function')}")


@dataclass(frozen=True, kw_only=True)
class PpoSizes:
    """Sizes, from the arguments and the number of processes, in episodes unless the name says otherwise."""

    updates: int
    batch: int
    local_batch: int
    local_groups: int
    group_batch: int


def ppo_sizes(ppo: PpoArgs, num_processes: int) -> PpoSizes:
    """Divide the global sizes exactly, or say which size does not divide and what would."""
    local_groups = processes.split_evenly("ppo.whiten_groups", ppo.whiten_groups, num_processes, "processes")
    slices = ppo.whiten_groups * ppo.nminibatches
    what = f"{typed('ppo.whiten_groups')} x {typed('ppo.nminibatches')}"
    group_minibatch = processes.split_evenly("ppo.batch_size", ppo.batch_size, slices, what)
    # The original asks for eight episodes.   train_policy.py#L69-L75
    if ppo.whiten_rewards and group_minibatch < 8:
        raise InputError(
            f"{typed('ppo.whiten_rewards')} needs at least 8 episodes per group and minibatch, and "
            f"{typed('ppo.batch_size')} {ppo.batch_size} gives {group_minibatch}; "
            f"{flag('ppo.batch_size')} {8 * slices} is enough; fewer {flag('ppo.whiten_groups')} need less"
        )
    return PpoSizes(
        # [D63] Rounded up: the last update has a whole batch too.   train_policy.py#L78-L84
        updates=math.ceil(ppo.total_episodes / ppo.batch_size),
        batch=ppo.batch_size,
        local_batch=ppo.batch_size // num_processes,
        local_groups=local_groups,
        group_batch=ppo.batch_size // ppo.whiten_groups,
    )


def with_newest_reward_model(args: Args) -> Args:
    """Arguments that name no source of scores get the newest reward model of their preset; a line says which."""
    if args.rewards.trained_model or args.rewards.function or args.resume:
        return args
    newest = processes.from_main(lambda: run.newest_model(args.preset, "reward", "query_dataset"))
    if not newest:
        raise InputError(
            f"models/ has no reward model of the preset {args.preset}; train one with train_reward.py --preset "
            f"{args.preset}, or give {flag('rewards.trained_model')} or {flag('rewards.function')}"
        )
    errors.say(f"reward model {newest}, the newest of the preset {args.preset}")
    return dataclasses.replace(args, rewards=dataclasses.replace(args.rewards, trained_model=str(newest)))


def load_pretrained(
    base_model: str, dtype: torch.dtype, trust_remote_code: bool = False, auto_class: type = AutoModelForCausalLM
) -> PreTrainedModel:
    """A pretrained model such as GPT-2 or Pythia, from safetensors, without dropout."""
    with pretrained.model_errors(base_model) as (path, revision):
        config = pretrained.read_config(path, revision, trust_remote_code, auto_class=auto_class)
        our_values = {}
        for name, value in vars(config).items():
            # [D18] Without dropout, sampler and training pass agree, and every ratio starts at 1.   policy.py#L48
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                our_values[name] = 0.0
            # [D17] The library's GPT-2 is the original's network: tanh-GELU, tied output layer, layer norm epsilon
            #       1e-5.   language/model.py#L14-L73
            #       `gelu_pytorch_tanh` is the same function as `gelu_new`, in one kernel instead of eight.
            if value == "gelu_new":
                our_values[name] = "gelu_pytorch_tanh"
        their_values = {name: getattr(config, name) for name in our_values}
        vars(config).update(our_values)
        model, loading = auto_class.from_pretrained(
            path,
            revision=revision,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # checked_model names them
            adapter_kwargs=pretrained.NO_ADAPTER,
        )
        # [D66] The embedding of the token that the configuration names as padding learns like any other.
        model.get_input_embeddings().padding_idx = None
        # The model is saved with the values that it came with.
        return pretrained.checked_model(model, loading, their_values)


def load_policy_and_reference(
    args: Args, ids: TaskIds, device: torch.device
) -> tuple[PolicyWithValueHead, PreTrainedModel]:
    """Two copies of the pretrained model: one to train, with a value head, and one that never changes."""
    # [D45] Policy and reference are two copies, so that the first KL is 0.   train_policy.py#L441-L452
    dtype = pretrained.dtype_of_weights(args, frozen=False)
    frozen_dtype = pretrained.dtype_of_weights(args, frozen=True)
    lm_backbone = load_pretrained(args.base_model, dtype, args.trust_remote_code).to(device)
    reference = load_pretrained(args.base_model, frozen_dtype, args.trust_remote_code).to(device)
    longest = ids.context_length + args.task.response_length
    pretrained.check_model(lm_backbone, args.base_model, longest, ids.pad, read_tokens)
    if args.gradient_checkpointing:
        layers.checkpoint_layers(lm_backbone)
    if args.compile:
        lm_backbone.base_model.compile(dynamic=False)
        reference.base_model.compile(dynamic=False)
    policy = PolicyWithValueHead(lm_backbone, ids.pad, low_precision=args.dtype == "bfloat16")
    return policy.to(device, dtype), reference.requires_grad_(False)


def load_reward(
    args: Args, tokenizer: PreTrainedTokenizerBase, ids: TaskIds, device: torch.device
) -> RewardModel | reward_functions.Scorer:
    """The source of scores, checked to fit the base model: a function of the user's, which all processes call
    together, or a reward model that was trained here.
    """
    if name := args.rewards.function:
        return reward_functions.text_scorer(name, "rewards.function", tokenizer, ids.pad)
    folder = args.rewards.trained_model
    pretrained.find_head(Path(folder), f"{flag('rewards.trained_model')} {folder}")
    dtype = pretrained.dtype_of_weights(args, frozen=True)
    with errors.typed_as({"base_model": typed("rewards.trained_model")}):
        reward_model = RewardModel(load_pretrained(folder, dtype, args.trust_remote_code, AutoModel))
    # Gain and bias are kept, and the scores are the same bit for bit.   train_reward.py#L292-L329
    pretrained.load_head(reward_model, Path(folder))
    pretrained.check_reward_model(reward_model.lm_backbone, args, ids.pad)
    if args.compile:
        reward_model.lm_backbone.base_model.compile(dynamic=False)
    return reward_model.requires_grad_(False).to(device)


def load_monitor(name: str, tokenizer: PreTrainedTokenizerBase, pad_id: int) -> dict[str, reward_functions.Scorer]:
    """The function that is only logged, under its name; an empty dictionary if there is none."""
    of_texts = partial(reward_functions.text_scorer, tokenizer=tokenizer, pad_id=pad_id)
    return reward_functions.load_monitor(name, OBJECTIVES, of_texts)


def config_for_plots(args: Args) -> dict[str, Any]:
    """An additional entry for Weights & Biases: the label file that the reward model learned from.

    The plotting command of lm-human-preference-details (at ccc1953) selects runs by it.
    """
    folder = args.rewards.trained_model
    label_dataset = pretrained.read_info(Path(folder)).get("label_dataset") if folder else None
    return {"rewards": dataclasses.asdict(args.rewards) | {"label_dataset": label_dataset}}


class Scale:
    """Puts scores of a function on the scale of a normalised reward model: (score - mean) / std.

    KL coefficient and critic are meant for that scale. Until `fit` is called, scores stay as they are.
    """

    def __init__(self) -> None:
        self.mean = 0.0
        self.std = 1.0

    def fit(self, scores: Tensor) -> None:
        """Take mean and biased deviation of scores (n,), on all processes together.

        A function that gives all of them the same score, but for rounding, keeps its deviation.
        """
        # A process may have fewer scores than another.
        all_scores = torch.tensor(gather_object(scores.tolist()), dtype=torch.float64)
        if len(all_scores):
            self.mean = all_scores.mean().item()
            std = all_scores.std(unbiased=False).item()
            self.std = std if std > 1e-10 * abs(self.mean) else 1.0

    def apply(self, scores: Tensor) -> Tensor:
        return (scores - self.mean) / self.std

    def undo(self, scores: Tensor) -> Tensor:
        """What the function said."""
        return scores * self.std + self.mean


@torch.no_grad()
def scores_of_base_model(
    args: Args,
    accelerator: Accelerator,
    stream: QueryStream,
    ids: TaskIds,
    *,
    policy: PolicyWithValueHead,
    reward: reward_functions.Scorer,
    rows: int,
) -> Tensor:
    """What a function says, (n,), of responses that the policy writes before it learns: those of the base model.

    Each process writes its share of normalize_samples responses, to the first queries. rows: how many at a time.
    """
    samples = args.rewards.normalize_samples
    mine = slice(accelerator.process_index, None, accelerator.num_processes)
    queries = stream.first(samples, ids.pad)[mine].to(accelerator.device)  # (n, query_length)
    # [X01] The noise belongs to the sample.
    generator = keyed_generator(args.seed, "scale of the function")
    uniforms = torch.rand(samples, args.task.response_length, generator=generator, dtype=torch.float64)
    noise = uniforms[mine][: len(queries)].to(processes.device_of_noise(accelerator.device))  # (n, response_length)
    with torch.autocast(accelerator.device.type, torch.bfloat16, enabled=policy.low_precision):
        contexts = add_affixes(queries, ids.prefix, ids.suffix)  # (n, context_length)
        responses, _, _ = write_responses(policy, contexts, noise, ids.pad, args.task.temperature, rows=rows)
        return reward(queries, truncate_at(responses, ids.stop, args.task.truncate_after, ids.pad))


def save_policy(
    folder: Path, policy: PolicyWithValueHead, tokenizer: PreTrainedTokenizerBase, args: Args, weights: bool = True
) -> None:
    """Save as an ordinary causal language model, with the value head next to its weights, if these are saved."""
    own = policy.lm_backbone.generation_config
    policy.lm_backbone.generation_config = pretrained.sampling_config(own, tokenizer, args.task.temperature)
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
    files.write_json(folder / "ppo_rlhf.json", info)


if __name__ == "__main__":
    errors.run_script(lambda: train(command_line.parse_args(PRESETS, description=__doc__)))
