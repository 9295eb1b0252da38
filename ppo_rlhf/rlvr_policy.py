"""PPO, GRPO and their relatives with verifiable rewards: chapter 3.

A language model (the policy) solves problems, and a verifier decides whether a response is correct. Reinforcement
learning makes correct responses likelier, and a penalty on the KL divergence may keep the policy near the model that
it started from (the reference). The main differences from chapter 2: the score comes from a rule, not from a model;
a problem may get several responses, a group, whose mean takes the place of the critic; generation stops at a stop id.
Each update does eight things, the steps of `train()` below:

    1. draw problems
    2. generate n responses to each
    3. log-probs and values of the responses, log-probs of the reference
    4. score: verifiers, punishments of responses that do not end or are too long
    5. per-token rewards: KL penalty on every token, score on the last
    6. advantages, by one of ESTIMATORS, and returns
    7. epochs over minibatches: one of four losses, one of four ways to aggregate it
    8. adapt the KL coefficient and log

The formulas of steps 5 to 7 are in rlvr_math.py. The sizes of batches come before `train()`, the functions of the
algorithm after it in its order, and metrics, loading and saving last. rlvr_async.py calls the same functions, with
samplers in other processes. small/grpo.py is one setting of this script in a few lines; read it first.

Marks like [V33] name an implementation detail. The original is verl-project/verl at commit b178a3c; files and lines
next to marks are the original's. See docs/details.

    python ppo_rlhf/rlvr_policy.py --preset sums                # no network: a world of word problems, in minutes
    python ppo_rlhf/rlvr_policy.py --preset gsm8k-grpo --ppo.advantage rloo
    accelerate launch --num_processes 8 ppo_rlhf/rlvr_policy.py --preset gsm8k --ppo.local_micro_batch_size 8
    python ppo_rlhf/rlvr_policy.py --resume runs/<run>          # resume after an interruption
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf import rlvr_checks, rlvr_metrics, worlds
from ppo_rlhf.lib import (
    checkpoints,
    cli,
    errors,
    lm,
    models,
    networks,
    packing,
    passes,
    problems,
    processes,
    rewards,
    run,
    traces,
)
from ppo_rlhf.lib.errors import InputError
from ppo_rlhf.lib.networks import AdaptiveKLController
from ppo_rlhf.rlvr_data import Batch, Draw, Pool, Request, Rollout, Sampled, make_batch
from ppo_rlhf.rlvr_math import (  # noqa: F401 (those who import rlvr_policy find these names here, too)
    ESTIMATORS,
    IN_GROUPS,
    WHITENED,
    aggregate,
    compute_rewards,
    importance_weights,
    kl_estimate,
    lower_clip_range,
    mismatch,
    read_logits,
    rejection_mask,
    response_mask,
    token_losses,
    value_losses,
    whiten,
)
from ppo_rlhf.rlvr_scores import Source, has_ended, load_sources, punish, score_responses

# ---- Arguments -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RewardsArgs:
    verifier: str = "gsm8k_strict"
    """what checks responses: gsm8k_strict, gsm8k_flexible, boxed, answer_line, or package.module:name of a function
    (prompts, responses, answers: texts) -> list of floats. A response that gets None or NaN counts nowhere"""
    verifier_weight: float = 1.0
    """weight of the verifier's value in the score"""
    format: str = ""
    """a second verifier, of the form: gsm8k_format, think_answer, think_answer_tags, or a function; empty: none"""
    format_weight: float = 1.0
    """weight of the second verifier's value in the score"""
    trained_model: str = ""
    """folder of a reward model, models/<run>/reward, whose score is added; empty: none"""
    trained_weight: float = 1.0
    """weight of the reward model's score in the score"""
    value_model: str = ""
    """folder of the model that the critic starts from; empty: the reward model, or the base model with a new head"""
    kl_coef: float = 0.001
    """weight of the KL penalty in the reward at the start, reward per nat"""
    kl_estimator: Literal["k1", "abs", "k2", "k3", "full"] = "k1"
    """estimate of the KL in the reward: k1 = log(policy/reference), abs, k2, k3: see kl_estimate; full: exact"""
    kl_loss_coef: float = 0.0
    """weight of the KL penalty in the loss, per nat"""
    kl_loss_estimator: Literal["k2", "k3", "abs", "k1+", "k2+", "k3+", "full"] = "k3"
    """estimate of the KL in the loss, where its slope acts and not its value"""
    adaptive_kl: cli.AdaptiveKLArgs = field(default_factory=cli.AdaptiveKLArgs)
    """controller of the KL coefficient in the reward"""
    missing_stop: Literal["none", "replace", "subtract"] = "none"
    """score of a response that does not end. replace: minus the penalty; subtract: lowered by the penalty"""
    missing_stop_penalty: float = 1.0
    """units of score, for missing_stop"""
    min_response_length: int = 0
    """tokens; for missing_stop and mask_truncated, a shorter response counts as one that does not end"""
    overlong_buffer: int = 0
    """over this many tokens before response_length, a punishment rises from 0; 0: no punishment"""
    overlong_factor: float = 1.0
    """units of score that a response of response_length tokens loses by overlong_buffer"""
    mask_truncated: bool = False
    """leave responses that do not end out of the loss; they stay in their group's baseline"""


@dataclass(frozen=True)
class PpoArgs:
    total_episodes: int = 111_360
    """responses to train on, over all updates; rounded down to whole updates"""
    batch_size: int = 256
    """episodes (prompt and response) per update, over all processes"""
    samples_per_prompt: int = 1
    """responses to each prompt, a group; so an update has batch_size / samples_per_prompt prompts"""
    nminibatches: int = 4
    """optimiser steps per pass over the batch"""
    noptepochs: int = 1
    """passes over the batch per update"""
    lr: float = 1e-6
    """learning rate of the policy"""
    critic_lr: float = 1e-5
    """learning rate of the critic"""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """how both learning rates change from update to update; linear and cosine fall to 0 at the end of the run"""
    lr_warmup: int = 0
    """updates over which both learning rates rise linearly to lr and critic_lr"""
    critic_warmup: int = 0
    """updates at the start in which only the critic learns"""
    critic_explains: float | None = None
    """value pretraining: these updates end when the critic explains this share of the variance of the returns, and
    its targets in them are sums of rewards (critic_lam 1). None: all of these updates, with the usual targets"""
    beta2: float = 0.999
    """second beta of AdamW; the first is 0.9"""
    adam_eps: float = 1e-8
    """epsilon of AdamW"""
    weight_decay: float = 0.01
    """weight decay of AdamW"""
    max_grad_norm: float = 1.0
    """the gradients of policy and critic are each scaled down to this norm"""
    advantage: Literal[
        "gae", "grpo", "dr_grpo", "maxrl", "rloo", "opo", "reinforce++", "reinforce++-baseline", "remax"
    ] = "gae"
    """estimator of the advantages; only gae has a critic"""
    whiten_advantages: bool | None = None
    """scale the advantages of the batch to mean 0 and variance 1; None: as the estimator needs"""
    gamma: float = 1.0
    """discount per token; only gae and reinforce++ read it"""
    lam: float = 1.0
    """lambda of generalised advantage estimation"""
    critic_lam: float | None = None
    """lambda of the critic's targets; None: lam"""
    lam_alpha: float | None = None
    """the policy's lambda is 1 - 1 / (this x the tokens of the response), in place of lam; None: lam"""
    loss: Literal["ppo", "gspo", "cispo", "reinforce"] = "ppo"
    """loss of the policy; see token_losses"""
    loss_aggregation: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """how losses of tokens become one number; see aggregate"""
    cliprange_low: float | None = None
    """the probability ratio is clipped to 1 - this; None: 0.2, but 1 (no lower bound, as published) for cispo"""
    cliprange_high: float = 0.2
    """and to 1 + this; about 4e-4 for gspo, and 3 to 7 for cispo as in ScaleRL, whose upper bound is 4 to 8"""
    dual_clip: float | None = None
    """a token of a bad response whose ratio exceeds this is no longer pushed down; None: no such bound"""
    cliprange_value: float | None = 0.5
    """new values are clipped to old values +- this, in units of reward; None: not clipped"""
    entropy_coef: float = 0.0
    """weight of the entropy bonus, per nat"""
    nll_coef: float = 0.0
    """weight of the mean of -log p over the tokens of correct responses, per nat"""
    value_head: Literal["zero", "normal"] = "zero"
    """how a new head of the critic starts. zero: all first values are 0; normal: random, as in verl"""
    filter_groups: bool = False
    """leave out groups whose responses all have the same score, and generate until the batch is full (DAPO)"""
    prompts_per_round: int = 0
    """with filter_groups: prompts that are sampled at a time; 0: as many as the batch has"""
    max_generation_rounds: int = 10
    """with filter_groups: rounds of generation per update, at most"""
    local_micro_batch_size: int = 0
    """episodes per forward and backward pass on one process; a memory knob; 0: as many as are fast"""
    local_micro_batch_tokens: int = 0
    """tokens of such a pass, padding included; a memory knob; 0: any number"""
    share_prefixes: bool = False
    """read tokens with which several rows begin, such as a prompt, once for all, where it pays; a memory knob"""
    local_rollout_batch_size: int = 0
    """episodes per pass of generation and scoring on one process; a memory knob; 0: all of a process"""


@dataclass(frozen=True)
class Args(cli.RunArgs):
    preset: str = "gsm8k"
    """names a set of defaults: gsm8k, gsm8k-grpo, dr-grpo, dapo, rloo, sums, sums-grpo,
    arithmetic"""
    exp_name: str = "rlvr_policy"
    seed: int = 1
    """seed of the sampling noise, the order of the problems and the minibatches"""
    base_model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    """model to start from: a folder, or a name on the hub"""
    log_interval: int = 10
    """updates between printed samples; 0: none"""
    trace_interval: int = 0
    """updates between episodes that are kept with all their numbers, which report.py shows; 0: none"""
    trace_episodes: int = 8
    """episodes of the batch that such a trace keeps, at most those of one process; whole groups"""
    save_interval: int = 50
    """updates between checkpoints; 0: one at the end"""
    frozen_bfloat16: bool = False
    """reference and reward model in bfloat16: half their memory, but rounded KL and scores"""
    eval_interval: int = 10
    """updates between evaluations on the held-out problems, the first one before the first update; 0: only at the
    end"""
    eval_problems: int = 0
    """how many held-out problems an evaluation has, the first ones; 0: all"""
    eval_samples: int = 0
    """sampled responses to each of them before the first update and after the last, in addition to the greedy one"""
    eval_temperature: float = 1.0
    """sampling temperature of the eval_samples"""
    task: problems.TaskArgs = field(default_factory=problems.TaskArgs)
    """problems, prompts and responses"""
    rewards: RewardsArgs = field(default_factory=RewardsArgs)
    """scores and KL penalty"""
    ppo: PpoArgs = field(default_factory=PpoArgs)
    """the optimisation"""
    lora: models.LoraArgs = field(default_factory=models.LoraArgs)
    """low-rank adapters"""


SUMS = Args(
    base_model="sums",
    trace_interval=15,
    eval_problems=512,
    eval_samples=16,
    task=problems.TASKS["sums"],
    rewards=RewardsArgs(kl_coef=0.0),
    ppo=PpoArgs(
        total_episodes=70 * 256,
        nminibatches=2,
        lr=3e-4,
        critic_lr=1e-3,
        critic_warmup=5,
        beta2=0.95,
        weight_decay=0.0,
        lam=0.95,
        cliprange_value=None,
    ),
)
SUMS_GRPO = dataclasses.replace(SUMS.ppo, samples_per_prompt=8, critic_warmup=0, advantage="grpo")
# [V99] Arguments of verl's logged run, of its recipes and of TRL 1.16; docs/details says what differs.
PRESETS = {
    "gsm8k": Args(dtype="bfloat16", ppo=PpoArgs(entropy_coef=0.001)),
    "gsm8k-grpo": Args(
        dtype="bfloat16",
        eval_interval=5,
        task=dataclasses.replace(problems.TASKS["gsm8k"], response_length=1_024),
        rewards=RewardsArgs(kl_coef=0.0, kl_loss_coef=0.001),
        ppo=PpoArgs(batch_size=1_280, samples_per_prompt=5, nminibatches=2, advantage="grpo", dual_clip=3.0),
    ),
    "dr-grpo": Args(
        dtype="bfloat16",
        eval_interval=5,
        task=dataclasses.replace(problems.TASKS["gsm8k"], response_length=1_024),
        rewards=RewardsArgs(kl_coef=0.0),
        ppo=PpoArgs(
            total_episodes=111_616,
            batch_size=1_024,
            samples_per_prompt=8,
            nminibatches=8,
            weight_decay=0.0,
            advantage="dr_grpo",
            loss_aggregation="seq-mean-token-sum-norm",
        ),
    ),
    # DAPO as verl has it: its token mean is over a minibatch, the paper's over the responses to one question.
    "dapo": Args(
        dtype="bfloat16",
        eval_interval=5,
        eval_samples=1,
        task=dataclasses.replace(
            problems.TASKS["gsm8k"],
            prompt_length=2_048,
            response_length=2_048,
            prompt_suffix='\nThink step by step. The last line of your response is "Answer: " and the answer.',
        ),
        rewards=RewardsArgs(verifier="answer_line", kl_coef=0.0, overlong_buffer=512),
        ppo=PpoArgs(
            total_episodes=111_616,
            batch_size=1_024,
            samples_per_prompt=16,
            nminibatches=16,
            lr_warmup=10,
            weight_decay=0.1,
            advantage="grpo",
            cliprange_high=0.28,
            dual_clip=10.0,
            filter_groups=True,
            prompts_per_round=192,
        ),
    ),
    "rloo": Args(
        dtype="bfloat16",
        rewards=RewardsArgs(kl_coef=0.05),
        ppo=PpoArgs(
            total_episodes=111_616,
            batch_size=512,
            samples_per_prompt=2,
            nminibatches=1,
            weight_decay=0.0,
            advantage="rloo",
            loss_aggregation="seq-mean-token-sum",
        ),
    ),
    "sums": SUMS,
    "sums-grpo": dataclasses.replace(SUMS, ppo=SUMS_GRPO),
    # A real language model, on two CPU cores in minutes. Without a KL penalty it forgets how to answer anything else.
    "arithmetic": Args(
        base_model="smollm2-135m",
        save_interval=0,
        eval_samples=4,
        eval_temperature=0.7,
        task=problems.TASKS["arithmetic"],
        rewards=RewardsArgs(verifier="gsm8k_flexible", kl_coef=0.0, kl_loss_coef=0.001),
        ppo=PpoArgs(
            total_episodes=40 * 64,
            batch_size=64,
            samples_per_prompt=8,
            nminibatches=1,
            lr=1e-5,
            weight_decay=0.0,
            advantage="dr_grpo",
            loss_aggregation="seq-mean-token-sum-norm",
            share_prefixes=True,
        ),
    ),
}
PRESETS = {name: dataclasses.replace(args, preset=name) for name, args in PRESETS.items()}


# ---- Sizes -----------------------------------------------------------------------------------------------------
#
# How a batch is divided, with the numbers of the default, gsm8k, on one process:
#
#     batch         256 episodes, one update; every process has an equal part, its local batch
#     group           1 of them, 8 in sums-grpo: the responses to one problem, whose scores are compared
#     round         256 that are generated at a time: a batch, unless prompts_per_round says otherwise
#     minibatch      64: 1 / nminibatches of the batch, one optimiser step
#     pass          a part of the minibatch, or micro-batch, that is read at a time; changes memory, not numbers


@dataclass(frozen=True)
class PpoSizes:
    """Sizes, from the arguments and the number of processes, in episodes unless the name says otherwise."""

    updates: int
    steps_per_update: int  # of the optimisers; a run prints all sizes when it starts
    batch: int
    round: int
    round_prompts: int
    local_batch: int
    local_round: int
    local_rollout_batch: int
    local_minibatch: int


def ppo_sizes(ppo: PpoArgs, num_processes: int) -> PpoSizes:
    """Divide the global sizes exactly, or say which size does not divide and what would."""
    cli.at_least(1, "ppo.", ppo, "batch_size", "samples_per_prompt", "nminibatches", "noptepochs")
    cli.at_least(1, "ppo.", ppo, "max_generation_rounds")
    cli.at_least(0, "ppo.", ppo, "prompts_per_round", "local_rollout_batch_size")
    cli.at_least(0, "ppo.", ppo, "local_micro_batch_size", "local_micro_batch_tokens")
    cli.at_least(ppo.batch_size, "ppo.", ppo, "total_episodes")
    n, split, typed = ppo.samples_per_prompt, processes.split_evenly, cli.typed
    prompts = split("ppo.batch_size", ppo.batch_size, n, typed("ppo.samples_per_prompt"))
    split("ppo.batch_size", ppo.batch_size, n * num_processes, f"{typed('ppo.samples_per_prompt')} x processes")
    slices = num_processes * ppo.nminibatches
    local_minibatch = split("ppo.batch_size", ppo.batch_size, slices, f"processes x {typed('ppo.nminibatches')}")
    processes.rows_at_a_time("ppo.", ppo, "local_micro_batch_size", local_minibatch)
    round_prompts = ppo.prompts_per_round if ppo.filter_groups and ppo.prompts_per_round else prompts
    local_round = n * split("ppo.prompts_per_round", round_prompts, num_processes, "processes")
    return PpoSizes(
        updates=ppo.total_episodes // ppo.batch_size,
        steps_per_update=ppo.noptepochs * ppo.nminibatches,
        batch=ppo.batch_size,
        round=round_prompts * n,
        round_prompts=round_prompts,
        local_batch=ppo.batch_size // num_processes,
        local_round=local_round,
        local_rollout_batch=processes.rows_at_a_time("ppo.", ppo, "local_rollout_batch_size", local_round),
        local_minibatch=local_minibatch,
    )


# ---- Train -----------------------------------------------------------------------------------------------------


def train(args: Args, joint: dict | None = None, loader: Callable[..., tuple] | None = None) -> Path:
    """Train a policy, and a critic if the estimator has one; return the folder models/<run>/policy, on every process.

    joint: of a script that runs this as one of several stages. loader: what to call in place of `load`, such as a
    function that changes how the policy samples. Raises InputError, a ValueError: on bad arguments before anything is
    written; later if a disk or a verifier fails.
    """
    setup, actor_critic, reference = (loader or load)(args, joint)
    args, sizes, accelerator = setup.args, setup.sizes, setup.accelerator
    rank, reduce = accelerator.process_index, partial(accelerator.reduce, reduction="sum")
    optimizers = make_optimizers(actor_critic, args.ppo)
    this_run, progress = start_run(setup, actor_critic, optimizers, joint)
    pool, controller = progress.pool, progress.controller
    trace = partial(trace_episodes, this_run, setup, actor_critic, reference)

    for number in this_run.updates("RLVR", progress.first_update, sizes.updates):
        lr = set_learning_rates(optimizers, args.ppo, number, sizes.updates)
        if args.eval_interval and number % args.eval_interval == 0:  # metrics repeat the newest result
            samples = args.eval_samples if number == 0 else 0
            with this_run.before_update(number):
                progress.evaluation |= rlvr_metrics.evaluate(setup, actor_critic, samples)[0]

        with actor_critic.sampling():
            while not pool.is_full():  # one round is enough, unless groups are filtered
                # 1. Draw problems. Every process draws the whole round and takes its rows.
                draw = draw_problems(setup, pool.rounds, rank)

                # 2. Generate responses, each up to its first stop id. All responses to a problem are a group.
                sampled = generate(setup, actor_critic, draw)

                # 3. Read the responses as training will: log-probs and values, and the reference's log-probs.
                # 4. Score them. A verifier judges the whole text, so a response has one score.
                pool.add(rollout(setup, actor_critic, reference, draw, sampled, version=number))
            episodes, generated = pool.take()

        # 5. Compute per-token rewards. The score judges the whole response, so it is on the last token. The KL
        #    divergence is a sum over tokens, so each token pays for its own part.
        rewards = token_rewards(episodes, controller.value, args.rewards.kl_estimator)
        ppo, policy_learns = ppo_of_update(args.ppo, progress.explained, number)

        # 6. Compute advantages and returns: how much better did it go than expected? A critic learns what to expect
        #    from the text so far. Without one, the mean score of the group shows how well the policy usually does on
        #    this problem, and that is a good enough expectation where the score comes only at the end.
        advantages, returns = compute_advantages(episodes, rewards[0], ppo, reduce)

        # 7. Optimise, in epochs over minibatches. The ratio says how much more likely a token has become since it was
        #    sampled. The advantages were measured under the old policy and mean less the further the policy moves
        #    away from it. So the loss is clipped: beyond the clip range, nothing is gained by moving on.
        batch = make_batch(episodes, rewards, advantages, returns, number)
        orders = [draw_minibatches(args.seed, number, epoch, sizes, rank) for epoch in range(ppo.noptepochs)]
        steps = update(
            *(actor_critic, optimizers, reference, batch, orders, args, setup.ids.pad, accelerator),
            policy_learns=policy_learns,
        )

        # 8. Adapt the KL coefficient and log. The controller sees the KL averaged over all processes.
        metrics = rlvr_metrics.update_metrics(setup, episodes, generated, batch, steps, number)
        metrics |= rlvr_metrics.run_metrics(setup, this_run, progress, number, lr, len(generated))
        controller.update(metrics.get("objective/kl", 0.0), sizes.batch)
        progress.explained = max(progress.explained, metrics.get("val/explained_var", 0.0))
        this_run.end_of_update(
            *(number, metrics | progress.evaluation, f"correct {metrics['objective/verifiable_correct_rate']:.3f}"),
            samples=partial(rlvr_metrics.sample_rows, setup, episodes, batch),
            trace=partial(trace, number, episodes, batch, controller, ppo),
            checkpoint=partial(training_state, actor_critic, optimizers, progress),
        )
        rlvr_metrics.say_if_nothing_is_learned(setup, this_run)
    return finish(setup, this_run, actor_critic)


@dataclass(frozen=True)
class Setup:
    """The parts of a run that no update changes."""

    given: Args  # as they were typed, with names such as `sums` that are not yet paths
    args: Args
    sizes: PpoSizes
    tokenizer: PreTrainedTokenizerBase
    ids: problems.TaskIds
    problems: problems.Problems  # to train on
    held_out: problems.Problems
    sources: dict[str, Source]  # what scores, under its name; the verifier first
    adapters: nn.Module | None  # peft's handle of the policy's adapters
    accelerator: Accelerator


# ---- Steps 1 to 4: problems, responses, scores -----------------------------------------------------------------


def draw_problems(setup: Setup, round_number: int, rank: int) -> Draw:
    """Step 1 for a process. round_number: rounds before this one, since the run began."""
    args, sizes, n, device = setup.args, setup.sizes, setup.args.ppo.samples_per_prompt, setup.accelerator.device
    drawn = problems.problems_of_batch(len(setup.problems), sizes.round_prompts, round_number, args.seed)
    rows, everything = slice(rank * sizes.local_round, (rank + 1) * sizes.local_round), drawn.repeat_interleave(n)
    groups = round_number * sizes.round_prompts + torch.arange(len(everything))[rows] // n
    queries = setup.problems.batch(everything.tolist(), setup.ids.pad)[rows]  # (local_round, context_length)
    uniforms = lm.episode_noise(args.seed, round_number, sizes.round, args.task.response_length)[rows].to(device)
    requests = [Request(queries.to(device), uniforms, args.task.temperature)]
    if args.ppo.advantage == "remax":
        # [V41] Each prompt gets one more response, the greedy one. It is no episode.   ray_trainer.py#L1404-L1443
        greedy = Request(queries[::n].to(device), torch.full_like(uniforms[::n], 0.5), problems.GREEDY)
        requests.append(greedy)
    return Draw(everything[rows], groups, requests)


def generate(setup: Setup, actor_critic: ActorCritic, draw: Draw) -> list[Sampled]:
    """Step 2: responses to the requests of a draw."""
    chunk = setup.sizes.local_rollout_batch
    return [
        passes.few_rows_at_a_time(
            partial(actor_critic.sample, setup.ids, temperature=temperature), chunk, contexts, uniforms
        )
        for contexts, uniforms, temperature in draw.requests
    ]


def rollout(
    setup: Setup,
    actor_critic: ActorCritic,
    reference: Reference | None,
    draw: Draw,
    sampled: list[Sampled],
    *,
    version: int,
    on_policy: bool = True,
) -> Rollout:
    """Steps 3 and 4 for this process's rows of a round.

    version: updates of the sampling policy. on_policy: whether that policy learns, and the built-in sampler was used.
    """
    args, ids, task, shaping = setup.args, setup.ids, setup.args.task, setup.args.rewards
    n, device, queries = args.ppo.samples_per_prompt, setup.accelerator.device, draw.requests[0].contexts
    (responses, sampler_logprobs), *greedy = sampled
    mask, stopped = response_mask(responses, ids.stops)
    # [V101] A tool's tokens are context for later tokens, but they are in no loss, no KL and no advantage. Nor is the
    #        padding of a response that ends without a stop id, at one call too many.
    from_tool = sampler_logprobs.isnan()
    sampler_logprobs = sampler_logprobs.masked_fill(from_tool, 0)
    mask = mask & ~from_tool & (responses != ids.pad)

    # 3. Compute log-probs, values and the reference's log-probs.
    # [V76] [V82] The log-probs are those that the first step of training will compute again, so that the ratio starts
    #       at 1. In full precision the sampler has recorded them; otherwise the responses are read as training will.
    #       The sampler's log-probs are kept, too.   dp_actor.py#L543, dp_actor.py#L590
    query_responses, exact = torch.cat([queries, responses], dim=1), shaping.kl_estimator == "full"
    limits = {"rows": args.ppo.local_micro_batch_size, "most_tokens": args.ppo.local_micro_batch_tokens}
    logprobs, values, ref_logprobs, exact_kl = passes.by_length(
        *(read_responses, actor_critic, query_responses, responses, mask, sampler_logprobs),
        **{"pad_id": ids.pad, "reference": reference, "exact": exact} | limits,
        recorded=on_policy and args.dtype != "bfloat16" and not exact,
    )

    # 4. Score.
    prompts, answers = (
        [column[i] for i in draw.problems] for column in (setup.problems.texts, setup.problems.answers)
    )
    parts, raw_scores = score_responses(setup, prompts, answers, queries, responses)
    # [V22] What cannot be scored has no token that counts.
    mask = mask & raw_scores.isfinite().unsqueeze(1)
    parts, raw_scores = parts.nan_to_num(0), raw_scores.nan_to_num(0)
    lengths = (responses != ids.pad).sum(1)  # (rows,), with a tool's tokens, as response_length
    scores = punish(raw_scores, lengths, stopped, shaping, task.response_length)
    # [V109] Only scores of 0 and 1 have a mean that is the share of correct responses.
    if args.ppo.advantage == "maxrl" and (scores < 0).any():
        errors.say_once(
            f"{cli.flag('ppo.advantage')} maxrl: there are negative scores; it divides by the mean of the scores, "
            f"which ought to be the share of right responses, and leaves out groups in which that is not above 0"
        )
    baselines = torch.zeros_like(scores)
    for likeliest, _ in greedy:
        greedy_lengths, greedy_stopped = (likeliest != ids.pad).sum(1), response_mask(likeliest, ids.stops)[1]
        _, raw = score_responses(setup, prompts[::n], answers[::n], queries[::n], likeliest)
        baselines = punish(raw.nan_to_num(0), greedy_lengths, greedy_stopped, shaping, task.response_length)
        baselines = baselines.repeat_interleave(n)
        mask = mask & raw.isfinite().repeat_interleave(n).unsqueeze(1)
    cut = shaping.mask_truncated & ~has_ended(lengths, stopped, shaping)
    per_row = {"parts": parts, "raw_scores": raw_scores, "scores": scores, "baselines": baselines, "stopped": stopped}
    per_row |= {"problems": draw.problems, "groups": draw.groups, "versions": torch.full_like(draw.groups, version)}
    return Rollout(
        *(
            query_responses,
            mask,
            mask & ~cut.unsqueeze(1),
            logprobs,
            ref_logprobs,
            values,
            sampler_logprobs,
            from_tool,
            exact_kl,
        ),
        **{name: tensor.to(device) for name, tensor in per_row.items()},
    )


def read_responses(
    actor_critic: ActorCritic,
    tokens: Tensor,
    responses: Tensor,
    mask: Tensor,
    sampler_logprobs: Tensor,
    *,
    pad_id: int,
    reference: Reference | None,
    exact: bool,
    recorded: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, values, log-probs of the reference and, if asked for, exact KLs: four of the mask's shape.

    tokens, responses, mask: as in ActorCritic.forward. recorded: whether the log-probs are the sampler's.
    """
    known = sampler_logprobs if recorded else None
    logprobs, values, _, exact_kl = actor_critic(tokens, responses, mask, pad_id, reference if exact else None, known)
    ref_logprobs = reference.logprobs(tokens, responses, mask, pad_id) if reference else logprobs
    return logprobs, values, ref_logprobs, exact_kl


# ---- Steps 5 and 6: rewards, advantages ------------------------------------------------------------------------


def token_rewards(episodes: Rollout, kl_coef: float, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Step 5: rewards, the KL penalty in them, and the KL, as compute_rewards gives them. name: of the estimate."""
    ref_logprobs = episodes.ref_logprobs
    if name == "full":
        # The exact KL takes the place of k1, which is logprobs - ref_logprobs.
        ref_logprobs, name = episodes.logprobs - episodes.exact_kl, "k1"
    return compute_rewards(episodes.scores, episodes.logprobs, ref_logprobs, episodes.mask, kl_coef, name)


def ppo_of_update(ppo: PpoArgs, explained: float, number: int) -> tuple[PpoArgs, bool]:
    """The arguments of update `number`, and whether the policy learns in it.

    explained: the largest share of the variance of the returns that the critic has explained so far.
    """
    pretrains = ppo.critic_explains is not None
    if number >= ppo.critic_warmup or (pretrains and explained >= ppo.critic_explains):
        return ppo, True
    # [V107] The policy stays as it is, so the critic may learn what its responses really earn. With a lower lambda, a
    #        new critic would learn from its own first values, and would call early tokens worth less than they are.
    return dataclasses.replace(ppo, critic_lam=1.0) if pretrains else ppo, False


def compute_advantages(
    episodes: Rollout, rewards: Tensor, ppo: PpoArgs, reduce: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Step 6: advantages, whitened if the estimator needs it, and returns, 0 without a critic."""
    # [V32] They are of all tokens of the response. Tokens that are left out of the loss are not left out here.
    estimate = partial(ESTIMATORS[ppo.advantage], values=episodes.values, baselines=episodes.baselines)
    lambdas = {"lam": ppo.lam, "critic_lam": ppo.critic_lam, "lam_alpha": ppo.lam_alpha}
    advantages, returns = estimate(rewards, episodes.mask, episodes.groups, gamma=ppo.gamma, **lambdas)
    if ppo.advantage in WHITENED if ppo.whiten_advantages is None else ppo.whiten_advantages:
        advantages = whiten(advantages, episodes.mask, keep_mean=False, reduce=reduce)
    return advantages, torch.zeros_like(advantages) if returns is None else returns


# ---- Step 7: update --------------------------------------------------------------------------------------------


def draw_minibatches(seed: int, number: int, epoch: int, sizes: PpoSizes, rank: int) -> Tensor:
    """Rows of the local batch in each minibatch of an epoch: (nminibatches, local_minibatch).

    Of every nminibatches episodes in a row, each minibatch gets one at random. So a group is spread over minibatches.
    """
    # [V75] They depend on seed, update and epoch, and are the same at any number of processes.
    #       ray_trainer.py#L1455
    nminibatches = sizes.local_batch // sizes.local_minibatch
    generator = lm.keyed_generator(seed, "minibatches", number, epoch)
    order = torch.rand(sizes.batch // nminibatches, nminibatches, generator=generator).argsort(1)
    inds = order + nminibatches * torch.arange(len(order)).unsqueeze(1)  # (batch / nminibatches, nminibatches)
    share = slice(rank * sizes.local_minibatch, (rank + 1) * sizes.local_minibatch)
    return inds[share].T - rank * sizes.local_batch


def update(
    actor_critic: ActorCritic,
    optimizers: dict[str, torch.optim.Optimizer],
    reference: Reference | None,
    batch: Batch,
    orders: list[Tensor],
    args: Args,
    pad_id: int,
    accelerator: Accelerator,
    *,
    policy_learns: bool,
    reweigh: Callable[[Tensor, Batch], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Step 7: all epochs over one batch.

    orders: for each epoch, this process's rows of each minibatch. reweigh: see micro_batch_loss. Returns numbers of
    the optimiser steps, (steps,): gradient norms, and of everything else this process's share; the shares of all
    processes add up.
    """
    ppo, device = args.ppo, batch.logprobs.device
    exact = args.rewards.kl_loss_coef and args.rewards.kl_loss_estimator == "full"
    lengths = passes.count_tokens(batch.query_responses, pad_id)  # (local_batch,), on the CPU as orders
    limits = {"rows": ppo.local_micro_batch_size, "most_tokens": ppo.local_micro_batch_tokens}
    reduce = partial(accelerator.reduce, reduction="sum")
    steps: list[dict[str, Tensor]] = []
    for minibatches in orders:  # an epoch
        for mb_inds in minibatches:  # (local_minibatch,)
            mb = batch.rows(mb_inds.to(device))
            counts = minibatch_counts(mb.loss_mask, reduce)
            right_tokens = minibatch_counts(mb.right_mask, reduce)["tokens"] if ppo.nll_coef else 0
            seen = counts | {"right_tokens": right_tokens}
            batch.seen.append((mb_inds, {name: torch.full(mb_inds.shape, n) for name, n in seen.items()}))
            shares: list[dict[str, Tensor]] = []  # what is logged of each micro-batch
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            # [V77] A micro-batch has rows of similar length: little padding, and the same sum.
            for tokens, inds, *rows in passes.micro_batches(
                *(actor_critic, lengths[mb_inds], mb.query_responses, mb_inds, *mb.tensors().values()),
                **{"pad_id": pad_id} | limits,
            ):
                micro_batch = Batch(*rows)
                found = actor_critic(
                    *(tokens, micro_batch.responses, micro_batch.loss_mask, pad_id), reference if exact else None
                )
                loss, share = micro_batch_loss(*found, micro_batch, counts, right_tokens, args, reweigh)
                batch.see(inds, *found)
                (loss * accelerator.num_processes).backward()  # gradients will be averaged over processes
                shares.append(share)
            processes.average_gradients(actor_critic, accelerator)
            norms = step(optimizers, ppo.max_grad_norm, policy_learns=policy_learns)
            steps.append({name: sum(share[name] for share in shares) for name in shares[0]} | norms)
    return {name: torch.stack([one[name] for one in steps]) for name in steps[0]}


def minibatch_counts(mask: Tensor, reduce: Callable[[Tensor], Tensor]) -> dict[str, int]:
    """The divisors of aggregate for a minibatch. mask: of this process's rows. reduce: sums over all processes."""
    # [V60] [V61] These are counts of the whole minibatch on all processes, so that the weight of a token does not
    #       depend on its micro-batch and process.   dp_actor.py#L575-L578, dp_critic.py#L240-L245
    numbers = torch.stack([mask.sum(), mask.any(1).sum(), mask.new_tensor(len(mask), dtype=torch.long)])
    tokens, sequences, episodes = (int(number) for number in reduce(numbers).tolist())
    return {"tokens": tokens, "sequences": sequences, "episodes": episodes, "length": mask.shape[1]}


def micro_batch_loss(
    new_logprobs: Tensor,
    new_values: Tensor,
    entropies: Tensor,
    exact_kl: Tensor,
    mb: Batch,
    counts: dict[str, int],
    right_tokens: int,
    args: Args,
    reweigh: Callable[[Tensor, Batch], Tensor] | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A micro-batch's share of the loss of policy and critic, and of what is logged, without gradient. All 0-d.

    The first four are (micro_batch, response_length), as ActorCritic gives them. counts, right_tokens: of the whole
    minibatch. reweigh: a function of new_logprobs and mb, which gives more factors of the policy's losses, or None.
    """
    ppo, shaping = args.ppo, args.rewards
    mean_of = partial(aggregate, mask=mb.loss_mask, mode=ppo.loss_aggregation, **counts)
    losses, clipped, clipped_below = token_losses(
        *(new_logprobs, mb.logprobs, mb.advantages, mb.loss_mask, ppo.loss), **bounds(ppo)
    )
    kl = kl_in_loss(new_logprobs, mb, exact_kl, shaping)
    # [V83] The weights are those of the policy that this update began with.   core_algos.py#L1237
    losses = mb.weights * losses
    if shaping.kl_loss_estimator != "full":  # the exact KL does not depend on which token was drawn
        kl = mb.weights * kl
    if reweigh:
        # [V84] Where the loss has no ratio, the weights are those of the policy of this step.
        factors = reweigh(new_logprobs, mb)
        losses = factors * losses
    v_losses, v_clipped = value_losses(new_values, mb.values, mb.returns, mb.loss_mask, ppo.cliprange_value)
    policy_loss, kl_loss, entropy, value_loss = map(mean_of, (losses, kl, entropies, v_losses))
    # [V49] [V68] All terms have the same divisor. They are logged without their coefficients.   losses.py#L158-L172
    loss = policy_loss + shaping.kl_loss_coef * kl_loss - ppo.entropy_coef * entropy
    share = {"objective/loss": loss, "loss/policy_avg": policy_loss, "loss/value_avg": value_loss}
    share |= {"loss/kl_avg": kl_loss, "loss/entropy_avg": entropy, "tokens": mb.loss_mask.sum()}
    if ppo.nll_coef:
        # [V108] The mean is over the tokens of correct responses in the minibatch. The weights above are not in it.
        nll = aggregate(-new_logprobs, mb.right_mask, "token-mean", tokens=right_tokens)
        loss = loss + ppo.nll_coef * nll
        share |= {"objective/loss": loss, "loss/nll_avg": nll, "right_tokens": mb.right_mask.sum()}
    flags = {"policy/clipfrac_avg": clipped, "policy/clipfrac_low_avg": clipped_below, "val/clipfrac_avg": v_clipped}
    flags |= {"async/masked_share": factors == 0} if reweigh else {}
    share |= rlvr_metrics.token_statistics(mb, new_logprobs, entropies, counts["tokens"], **flags)
    # Policy and critic share no parameter, so the sum of their losses has the gradient of each.
    return loss + value_loss, {name: x.detach() for name, x in share.items()}


def bounds(ppo: PpoArgs) -> dict[str, float | None]:
    """The bounds of the ratio, for token_losses."""
    low = lower_clip_range(ppo.loss, ppo.cliprange_low)
    return {"low": low, "high": ppo.cliprange_high, "dual_clip": ppo.dual_clip}


def kl_in_loss(new_logprobs: Tensor, mb: Batch, exact_kl: Tensor, shaping: RewardsArgs) -> Tensor:
    """The KL penalty of each token (micro_batch, response_length), without its coefficient; 0 if there is none."""
    name = shaping.kl_loss_estimator
    if name == "full" or not shaping.kl_loss_coef:
        return exact_kl
    kl = kl_estimate(new_logprobs, mb.ref_logprobs, mb.loss_mask, name)
    # [V50] The detached ratio keeps the estimate correct when the policy has moved. With k3+ this is the unbiased
    #       estimate of DeepSeek-V3.2.   core_algos.py#L1841-L1864
    ratio = torch.exp((new_logprobs.detach() - mb.logprobs).masked_fill(~mb.loss_mask, 0).clamp(-20, 20))
    return kl * ratio if name.endswith("+") else kl


def step(
    optimizers: dict[str, torch.optim.Optimizer], max_grad_norm: float, *, policy_learns: bool
) -> dict[str, Tensor]:
    """One step of each network that learns. Returns the gradient norms, from before they are clipped."""
    # [V72] The gradients of critic and policy are each clipped, over the whole minibatch.   dp_critic.py#L134-L151
    norms = {name: processes.clip_gradients(optimizer, max_grad_norm) for name, optimizer in optimizers.items()}
    if "value" in optimizers:
        optimizers["value"].step()
    # [V71] In the first critic_warmup updates, the policy does not move at all.   ray_trainer.py#L1604
    if policy_learns:
        optimizers["policy"].step()
    return {f"{name}/grad_norm": norm for name, norm in norms.items()}


# ---- Networks --------------------------------------------------------------------------------------------------


class ActorCritic(models.MixedPrecision):
    """The policy and, if the estimator has one, the critic; they share nothing."""

    entropy_learns = True  # whether the entropy has a gradient
    generate = staticmethod(lm.generate_until)  # rlvr_tools.py has another

    def __init__(
        self,
        lm_backbone: PreTrainedModel,
        critic: lm.RewardModel | None,
        vocab_size: int,
        temperature: float,
        *,
        low_precision: bool = False,
        entropy_learns: bool = True,
    ):
        """vocab_size: number of ids that can be sampled; the output layer may have more rows."""
        super().__init__()
        self.lm_backbone, self.critic, self.low_precision = lm_backbone, critic, low_precision
        self.vocab_size, self.temperature, self.entropy_learns = vocab_size, temperature, entropy_learns

    # [V14] Only the stop ids of the model's generation config are used: no penalty, no top-k, no top-p.
    #       hf_rollout.py#L94
    def sample(
        self, ids: problems.TaskIds, contexts: Tensor, uniforms: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """The built-in sampler: responses, padding after the stop id, and their log-probs; within `sampling`."""
        return self.generate(self.sampler, contexts, uniforms, ids.pad, ids.vocab_size, temperature, ids.stops)

    def forward(
        self,
        tokens: Tensor,
        responses: Tensor,
        mask: Tensor,
        pad_id: int,
        reference: Reference | None = None,
        recorded: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log-probs of response tokens, values, exact entropies and, given a reference, exact KLs from it.

        tokens: (batch, length), queries and responses with padding anywhere. responses: (batch, response_length), the
        same responses with padding at their end. mask: (batch, response_length), which of their tokens to read.
        recorded: their log-probs if these are known; then only the critic reads, and entropies are 0. Returns four of
        the mask's shape, 0 where masked, and where there is no critic or no reference.
        """
        # [V30] What the networks say at a position is about the next token: hence the shift by one.
        #       dp_critic.py#L117
        at = mask.nonzero(as_tuple=True)  # a mask as an index would wait for the device each time
        place, labels = (tokens, responses, pad_id), responses[at]  # labels: (tokens,)
        with self.autocast():
            if recorded is None:
                states = [lm.read_before_responses(self.lm_backbone, *place)[at]]  # (tokens, width)
                if reference:
                    states.append(reference.hidden_states(*place)[at])
                read = partial(self.read_hidden, reference)
                logprobs, entropies, exact_kl = passes.few_logits_at_a_time(read, self.vocab_size, labels, *states)
            else:
                logprobs = recorded[at]
                entropies = exact_kl = torch.zeros_like(logprobs)
            values = torch.zeros_like(logprobs)
            if self.critic:
                read_by_critic = lm.read_before_responses(self.critic.lm_backbone, *place)[at]
                values = self.critic.gain * lm.read_scalar(self.critic.reward_head, read_by_critic) + self.critic.bias
        return tuple(x.new_zeros(mask.shape).masked_scatter(mask, x) for x in (logprobs, values, entropies, exact_kl))

    def read_hidden(
        self, reference: Reference | None, labels: Tensor, hidden: Tensor, ref_hidden: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs of labels (tokens,), exact entropies and KLs there, from final hidden states (tokens, width)."""
        # [V13] [V15] At the temperature of the sampler, in float32 or better.   dp_actor.py#L259, dp_actor.py#L368
        logits = lm.scaled_logits(self.lm_backbone, hidden, self.vocab_size, self.temperature)
        logprobs, entropies = read_logits(logits, labels, entropy_learns=self.entropy_learns)
        if reference is None:
            return logprobs, entropies, torch.zeros_like(logprobs)
        # [V51] The sum over the vocabulary, a few tokens at a time.
        difference = F.log_softmax(logits, dim=1) - F.log_softmax(reference.logits(ref_hidden), dim=1)
        return logprobs, entropies, (logits.softmax(1) * difference).sum(1)


class Reference(networks.Reference):
    """The model that the policy started from, at the policy's temperature."""

    # [V57] It never changes. Where nothing is penalised there is none.
    def __init__(self, network: ActorCritic, adapters: nn.Module | None):
        """network: without a critic."""
        super().__init__(network.lm_backbone, adapters)
        self.network = network

    def logprobs(self, tokens: Tensor, responses: Tensor, mask: Tensor, pad_id: int) -> Tensor:
        """Log-probs (batch, response_length); arguments as of ActorCritic."""
        with self.in_use():
            return self.network(tokens, responses, mask, pad_id)[0]

    def hidden_states(self, tokens: Tensor, responses: Tensor, pad_id: int) -> Tensor:
        """Final hidden states before each token of the responses: (batch, response_length, width)."""
        with self.in_use():
            return lm.read_before_responses(self.lm_backbone, tokens, responses, pad_id)

    def logits(self, hidden_states: Tensor) -> Tensor:
        with self.in_use():
            return lm.scaled_logits(
                self.lm_backbone, hidden_states, self.network.vocab_size, self.network.temperature
            )


# ---- Traces ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def trace_episodes(
    this_run: run.Run,
    setup: Setup,
    actor_critic: ActorCritic,
    reference: Reference | None,
    number: int,
    episodes: Rollout,
    batch: Batch,
    controller: AdaptiveKLController,
    ppo: PpoArgs,
) -> None:
    """Keep a few episodes with all their numbers, which report.py shows: whole groups of the batch, and responses to
    the first problems of all, with the same noise each time. Both are read with the policy after the update.

    ppo: of this update. The advantages of the latter are whitened among themselves. Every process must call this.
    """
    sizes, n = setup.sizes, ppo.samples_per_prompt
    most = sizes.local_batch // n
    prompts, few = (min(math.ceil(k / n), most) for k in (traces.TRACED, setup.args.trace_episodes))
    few = slice(few * n)
    computed = rlvr_metrics.what_epochs_computed(episodes, batch, ppo, few.stop, setup.accelerator)
    episodes, batch = episodes.rows(few), batch.rows(few)
    new_logprobs, _, entropies, _ = actor_critic(
        episodes.query_responses, episodes.responses, episodes.mask, setup.ids.pad
    )
    _, clipped, _ = token_losses(
        *(new_logprobs, batch.logprobs, batch.advantages, batch.loss_mask, ppo.loss), **bounds(ppo)
    )
    found = {"advantages": batch.advantages, "new_logprobs": new_logprobs, "entropies": entropies, "clipped": clipped}
    found |= {"ratio": torch.exp(new_logprobs - batch.logprobs)}
    keep = partial(rlvr_metrics.keep_trace, this_run, setup, number)
    keep(episodes, batch, found, **computed)

    everywhere = prompts * setup.accelerator.num_processes
    few_sizes = dataclasses.replace(sizes, round=everywhere * n, round_prompts=everywhere, local_round=prompts * n)
    # A user's function may count its calls or draw random numbers, so it is not called here. All scores are 0 in its
    # place, because NaN would leave all tokens out.
    known = rewards.keeps_nothing(setup.args.rewards.verifier, setup.args.rewards.format)
    silent = (lambda prompts, *_: torch.zeros(len(prompts)).double(), 0.0)
    sources = setup.sources if known else dict.fromkeys(setup.sources, silent)
    few_setup = dataclasses.replace(setup, sizes=few_sizes, sources=sources)
    with actor_critic.sampling():
        draw = draw_problems(few_setup, 0, setup.accelerator.process_index)
        sampled = generate(few_setup, actor_critic, draw)
        again = rollout(few_setup, actor_critic, reference, draw, sampled, version=number + 1)
    if not known:
        nan = {name: torch.full_like(getattr(again, name), math.nan) for name in ("scores", "raw_scores", "parts")}
        again = dataclasses.replace(again, **nan)
    shaped = token_rewards(again, controller.value, setup.args.rewards.kl_estimator)
    advantages, returns = compute_advantages(again, shaped[0], ppo, torch.clone)
    found = {"advantages": advantages} if known else {}
    statistics = {"kl_coef": torch.full((len(again.scores),), controller.value, dtype=torch.float64)}
    statistics |= rlvr_metrics.lambdas_of(ppo, len(again.scores))
    keep(again, make_batch(again, shaped, advantages, returns, number), found, statistics=statistics, again=True)


# ---- Plumbing: networks and sources to load, learning rates, checkpoints, the saved models ---------------------


def check_arguments(args: Args) -> None:
    """Refuse what cannot be meant."""
    rlvr_checks.check_arguments(args, usual=PRESETS.get(args.preset, Args()))


def load(args: Args, joint: dict | None = None) -> tuple[Setup, ActorCritic, Reference | None]:
    """Check the arguments, read the problems and load the networks. Nothing is written yet. joint: as of `train`."""
    accelerator = processes.make_accelerator()
    check_arguments(args)
    worlds.check_names(args, joint)
    for doubt in rlvr_checks.doubts(args):
        run.say(doubt)
    sizes = ppo_sizes(args.ppo, accelerator.num_processes)
    given, args = args, worlds.find_paths(args, joint)
    tokenizer = models.load_tokenizer(args.base_model, args.trust_remote_code)
    read_problems = partial(problems.read_problems, args.task, tokenizer, verifier=args.rewards.verifier)
    train_problems, held_out = read_problems("train"), read_problems("test", args.eval_problems)
    rlvr_checks.check_problems(train_problems, sizes)
    with cli.typed_as({"task.query_length": "task.prompt_length"}):
        actor_critic, reference, adapters = load_networks(args, tokenizer, accelerator)
        ids = problems.task_ids(args.task, tokenizer, actor_critic.lm_backbone.generation_config)
        sources = load_sources(args, ids, accelerator)
    told = (given, args, sizes, tokenizer, ids, train_problems, held_out, sources, adapters, accelerator)
    return Setup(*told), actor_critic, reference


def load_networks(
    args: Args, tokenizer: PreTrainedTokenizerBase, accelerator: Accelerator
) -> tuple[ActorCritic, Reference | None, nn.Module | None]:
    """Policy with or without a critic, reference, and peft's handle of the policy's adapters, if there are any.

    They are sharded over the processes if the launcher asks for it. Without a penalty there is no reference.
    """
    if args.lora.rank and processes.sharding():
        raise InputError(f"{cli.flag('lora.rank')} does not go with FSDP")
    task, low_precision = args.task, args.dtype == "bfloat16"
    length, vocab_size = task.prompt_length + task.response_length, models.vocabulary_size(tokenizer)
    lm_backbone = models.load_base_model(args)
    packing.enable(lm_backbone, share_prefixes=args.ppo.share_prefixes)
    critic = None
    if args.ppo.advantage == "gae":
        # [V70] The critic has its own backbone. By default that is the policy's start, and a new head, which says 0.
        critic = networks.load_critic(args, vocab_size, zero_head=args.ppo.value_head == "zero")
        packing.enable(critic.lm_backbone, share_prefixes=args.ppo.share_prefixes)
    modes = {"low_precision": low_precision, "entropy_learns": args.ppo.entropy_coef > 0}
    actor_critic = ActorCritic(lm_backbone, critic, vocab_size, task.temperature, **modes)
    if args.gradient_checkpointing:
        models.checkpoint_layers(actor_critic)
    models.place(actor_critic, accelerator)
    with processes.gathered(actor_critic):
        models.check_model(lm_backbone, args.base_model, length, vocab_size, lm.read_tokens)
    adapters, reference = None, None
    if args.lora.rank:
        adapters = models.add_adapters(lm_backbone, args.lora, args.seed)
    if rlvr_metrics.has_penalty(args.rewards):
        frozen = lm_backbone
        if adapters is None:
            frozen = models.load_base_model(args, frozen=True)
            packing.enable(frozen, share_prefixes=args.ppo.share_prefixes)
            models.place(frozen, accelerator)
        reference = Reference(ActorCritic(frozen, None, vocab_size, task.temperature), adapters)
    return actor_critic, reference, adapters


def make_optimizers(actor_critic: ActorCritic, ppo: PpoArgs) -> dict[str, torch.optim.Optimizer]:
    """One for the policy, and one for the critic if there is one."""
    # [V73] AdamW, with constant learning rates unless a schedule is asked for.
    settings = {"betas": (0.9, ppo.beta2), "eps": ppo.adam_eps, "weight_decay": ppo.weight_decay, "fused": True}
    rates = {"policy": ppo.lr, "value": ppo.critic_lr}
    return {
        name: torch.optim.AdamW(list(checkpoints.trained_parameters(network).values()), rates[name], **settings)
        for name, network in networks_of(actor_critic).items()
    }


def networks_of(actor_critic: ActorCritic) -> dict[str, nn.Module]:
    return {"policy": actor_critic.lm_backbone} | ({"value": actor_critic.critic} if actor_critic.critic else {})


def set_learning_rates(
    optimizers: dict[str, torch.optim.Optimizer], ppo: PpoArgs, number: int, updates: int
) -> float:
    """Set the learning rates of an update (0-based); returns the policy's."""
    factor = run.scheduled_lr(1.0, ppo.schedule, number, updates) * min(1, (number + 1) / max(ppo.lr_warmup, 1))
    for name, optimizer in optimizers.items():
        optimizer.param_groups[0]["lr"] = factor * (ppo.critic_lr if name == "value" else ppo.lr)
    return factor * ppo.lr


@dataclass
class Progress:
    """The state that one update hands to the next, in addition to the networks; a checkpoint keeps it."""

    first_update: int  # when this process started or resumed the run
    controller: AdaptiveKLController
    pool: Pool
    evaluation: dict[str, float]  # the newest
    explained: float  # the largest share of the variance of the returns that the critic has explained, at least 0
    others: dict[str, dict[str, Tensor]]  # parts of the checkpoint that only rlvr_async.py knows


def start_run(
    setup: Setup, actor_critic: ActorCritic, optimizers: dict[str, torch.optim.Optimizer], joint: dict | None = None
) -> tuple[run.Run, Progress]:
    """Make the run's folder, or resume from its newest checkpoint. joint: as of `train`."""
    args, accelerator, parts = setup.args, setup.accelerator, {}

    def restore(tensors: dict[str, Tensor]) -> None:
        """The inverse of training_state."""
        for key, tensor in tensors.items():
            name, key = key.split("/", 1)
            parts.setdefault(name, {})[key] = tensor
        for name, network in networks_of(actor_critic).items():
            checkpoints.restore_training_state(network, optimizers[name], parts.pop(name, {}))

    inputs = models.weight_files(args) | worlds.data_files(args.task, "problems", "test_problems", "examples")
    length = args.task.prompt_length + args.task.response_length
    minibatch = {"rows": setup.sizes.local_minibatch, "length": length}
    of_pass = passes.limit(args, accelerator, actor_critic, **minibatch)
    this_run = run.Run(setup.given, accelerator, dataclasses.asdict(setup.sizes) | of_pass, joint, inputs)
    state = this_run.resume_with(restore)
    surplus = {name: tensor.to(accelerator.device) for name, tensor in parts.pop("surplus", {}).items()}
    if surplus:  # of a checkpoint that an older version wrote
        surplus.setdefault("from_tool", torch.zeros_like(surplus["mask"]))
    left_over = (
        Rollout(**{part.name: surplus[part.name] for part in dataclasses.fields(Rollout)}) if surplus else None
    )
    kl_coef = state.get("kl_coef", args.rewards.kl_coef)
    progress = Progress(
        first_update=state["step"],
        controller=AdaptiveKLController(kl_coef, **vars(args.rewards.adaptive_kl)),
        pool=Pool(args.ppo, setup.ids.pad, accelerator, rounds=state.get("rounds", 0), surplus=left_over),
        evaluation=state.get("evaluation", {}),
        explained=state.get("explained", 0.0),
        others=parts,
    )
    this_run.start_logging(progress.first_update)
    this_run.save_meta(first_prompt=setup.problems.texts[0])
    return this_run, progress


def training_state(
    actor_critic: ActorCritic,
    optimizers: dict[str, torch.optim.Optimizer],
    progress: Progress,
    others: Callable[[], dict[str, dict[str, Tensor]]] = dict,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The content of a checkpoint: tensors, and the rest. others: gives parts that only rlvr_async.py knows."""
    pool, trained = progress.pool, networks_of(actor_critic)
    parts = {name: checkpoints.training_state(network, optimizers[name]) for name, network in trained.items()}
    parts |= ({"surplus": pool.surplus.tensors()} if pool.surplus else {}) | others()
    tensors = {f"{name}/{key}": tensor for name, part in parts.items() for key, tensor in part.items()}
    numbers = {"kl_coef": progress.controller.value, "explained": progress.explained, "rounds": pool.rounds}
    return tensors, numbers | {"evaluation": progress.evaluation}


def finish(setup: Setup, this_run: run.Run, actor_critic: ActorCritic) -> Path:
    """Evaluate, save the models and report the results. Returns the policy's folder."""
    given, args, verifier = setup.given, setup.args, setup.args.rewards.verifier
    evaluation, rows = rlvr_metrics.evaluate(setup, actor_critic, args.eval_samples)
    this_run.write_evaluation("validation", rows)
    info = {"task": dataclasses.asdict(given.task), "monitor": "", "function": given.rewards.verifier}
    info |= {"base_model": given.base_model, "reward_model": given.rewards.trained_model}
    info |= {"tool": args.tools.tool} if hasattr(args, "tools") else {}
    parts = (actor_critic.lm_backbone, actor_critic.critic, setup.adapters)
    told = (setup.tokenizer, info, args.trust_remote_code)
    models.save_policy_and_critic(this_run.model_folder, *parts, *told)
    names = ["scores", "kl"] if rlvr_metrics.has_penalty(args.rewards) else ["scores"]
    last = {f"last_{name}": this_run.last_mean(f"objective/{name}") for name in names}
    left_out = {name: getattr(setup.problems, name) for name in ("too_long", "unscorable", "empty")}
    panels = rlvr_metrics.panels(args, [name for name in rows[0] if f"eval/{name}" in evaluation], list(evaluation))
    this_run.finish(panels, **evaluation, **last, **left_out)
    problems.report(this_run, verifier, args.task.kind_column, evaluation, rows)
    this_run.upload("policy", *(["value"] if actor_critic.critic else []))
    return this_run.model_folder / "policy"


if __name__ == "__main__":
    cli.run_script(train, lambda argv: cli.parse_args(PRESETS, argv, __doc__))
