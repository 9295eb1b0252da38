"""PPO against a reward model: chapter 2, TL;DR summarisation, stage 3 of 3.

The fine-tuned model of `tldr/sft.py` (the policy) summarises posts, and the reward model of `tldr/reward.py` scores
the summaries. PPO raises the score, and a penalty on the KL divergence from where the policy started (the reference)
keeps the text fluent. The main differences from chapter 1: a summary ends with the end-of-text token, and nothing
after it counts; a summary without one is punished (the end-of-text trick); the critic is a network of its own, which
starts as a copy of the reward model. Each update has eight steps:

    1. sample posts
    2. generate summaries, up to the end-of-text token; compute their log-probs and values
    3. log-probs of the reference
    4. score the summaries; punish those that do not end
    5. per-token rewards: KL penalty on every token, score on the step after the last
    6. advantages and returns (GAE), for each minibatch again
    7. PPO epochs over minibatches
    8. adapt the KL coefficient and log

`train()` has steps 1 to 5 and 8, `ppo_update()` below it steps 6 and 7, because each minibatch whitens its own
advantages. Then come the formulas, with masks for what does not count, how the networks read, the evaluation on
held-out posts, metrics, and at the end the plumbing. What is as in chapter 1 is imported from `train_policy.py`.

Marks like [T45] name an implementation detail. The original is vwxyzjn/summarize_from_feedback_details at commit
ee77a9a, which reproduced OpenAI's; files and lines next to marks are the original's. Marks like [D54] are details of
chapter 1, too: OAI is openai/lm-human-preferences at commit cbfd210, and TRL is huggingface/trl at commit f2cd577.
Where we differ on purpose, there is a mark like [X21]; see docs/reference.

    python ppo_rlhf/tldr/all.py --preset posts                  # no network: all three stages, in minutes
    python ppo_rlhf/tldr/policy.py --base_model models/<run>/sft --rewards.trained_model models/<run>/reward
    accelerate launch --num_processes 8 ppo_rlhf/tldr/policy.py --dtype bfloat16 --ppo.local_micro_batch_size 16 ...
    python ppo_rlhf/tldr/policy.py --resume runs/<run>          # resume after an interruption
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import tqdm
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.tldr import classifiers, models, packing, posts
from ppo_rlhf.tldr.responses import draw_minibatches, generate_until, read_before_responses, response_statistics
from ppo_rlhf.tldr.reward_functions import Scorer
from ppo_rlhf.tldr.shares import sum_over_processes, widened
from ppo_rlhf.train_policy import (
    AdaptiveKLArgs,
    AdaptiveKLController,
    Arguments,
    InputError,
    Run,
    add,
    average_gradients,
    check_finite,
    check_model,
    checked,
    episode_noise,
    float64_device,
    has_stop,
    input_errors,
    keyed_generator,
    make_accelerator,
    monitor_name,
    parse_args,
    read_scalar,
    run_script,
    split_evenly,
    to_texts,
    vocabulary_size,
)
from ppo_rlhf.train_reward import RewardModel, prepare

# ---- Arguments -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RewardsArgs(Arguments):
    trained_model: str = ""
    """folder of a reward model: models/<run>/reward, or any sequence classifier, also on the hub"""
    label: str = ""
    """of a reward model from elsewhere: the label whose logit is the score, as POSITIVE; empty: it has only one"""
    function: str = ""
    """package.module:name of a function (queries, responses: texts) -> list of floats, in place of a reward model;
    with a third parameter, or one named references or answer, it also gets the summaries of the data. Functions for
    TRL or verl are called as docs/chapter3.md says, without columns"""
    monitor: str = ""
    """package.module:name of such a function that is only logged, as objective/<name>"""
    normalize_samples: NonNegativeInt = 256
    """summaries of the base model on which scores of `function` or a model from elsewhere get mean 0 and deviation 1,
    the scale for which the KL coefficient and the critic are meant; 0: scores stay as they are"""
    value_model: str = ""
    """folder of the model that the critic starts from; empty: the reward model, or the base model with a new head"""
    kl_coef: NonNegativeFloat = 0.05
    """weight of the KL penalty at the start, reward per nat"""
    kl_estimator: Literal["k1", "k3"] = "k1"
    """estimate of a token's divergence; with x = log p(reference) - log p(policy), k1 is -x and k3 is exp(x) - 1 -
    x. As a reward, k3 has a gradient that vanishes near the reference and can point away from it further out"""
    adaptive_kl: AdaptiveKLArgs = field(default_factory=AdaptiveKLArgs)
    """controller of the KL coefficient"""
    missing_eos: Literal["replace", "subtract", "none"] = "replace"
    """score of a summary that does not end: with replace it becomes minus the penalty, with subtract it is lowered by
    the penalty, with none it stays"""
    missing_eos_penalty: NonNegativeFloat = 1.0
    """the penalty for that"""


@dataclass(frozen=True, kw_only=True)
class PpoArgs(Arguments):
    total_episodes: PositiveInt = 1_000_000
    """summaries to train on, over all updates; rounded down to whole updates"""
    batch_size: PositiveInt = 512
    """episodes (post and summary) per update, over all processes"""
    nminibatches: PositiveInt = 1
    """optimiser steps per pass over the batch"""
    noptepochs: PositiveInt = 4
    """passes over the batch per update"""
    lr: PositiveFloat = 3e-6
    """learning rate of the first update; it falls linearly"""
    adam_eps: PositiveFloat = 1e-5
    """epsilon of AdamW"""
    weight_decay: NonNegativeFloat = 0.01
    """weight decay of AdamW"""
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
    whiten_rewards: bool = False
    """scale the rewards of each minibatch to variance 1 (advantages always are)"""
    local_micro_batch_size: PositiveInt = 8
    """episodes per forward and backward pass on one process, at most; changes memory and speed, not numbers"""
    local_rollout_batch_size: PositiveInt = 64
    """episodes per pass without gradients on one process, at most; changes memory and speed, not numbers"""


@dataclass(frozen=True, kw_only=True)
class Args(Arguments):
    preset: str = "tldr"
    """names a set of defaults: tldr, posts, reviews"""
    exp_name: Annotated[str, Field(pattern=r"^[\w.+ -]{1,150}$")] = "tldr_policy"
    """name of this experiment"""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 44413
    """seed of the sampling noise, the order of the posts and the minibatches"""
    base_model: str = ""
    """model to start from: the folder of a fine-tuned model, models/<run>/sft, or a name on the hub"""
    trust_remote_code: bool = False
    """run Python code that comes with the base model"""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """arithmetic; bfloat16 keeps float32 weights and casts in matrix products"""
    frozen_bfloat16: bool = False
    """reference and reward model in bfloat16: half their memory, and KL and scores that are rounded"""
    gradient_checkpointing: bool = False
    """keep only the inputs of each layer and compute the rest again in the backward pass; saves memory, costs a
    forward pass"""
    task: posts.TaskArgs = field(default_factory=posts.TaskArgs)
    """queries and responses"""
    rewards: RewardsArgs = field(default_factory=RewardsArgs)
    """score and KL penalty"""
    ppo: PpoArgs = field(default_factory=PpoArgs)
    """the optimisation"""
    lora: models.LoraArgs = field(default_factory=models.LoraArgs)
    """low-rank adapters"""
    eval_interval: NonNegativeInt = 20
    """updates between evaluations on the first 64 held-out posts, from update 0 on; 0: only at the end"""
    eval_posts: NonNegativeInt = 0
    """held-out posts of each split to summarise after training; 0: all"""
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


PRESETS = {
    "tldr": Args(task=posts.TASKS["tldr"]),
    "posts": Args(
        preset="posts",
        seed=1,
        trace_interval=10,
        eval_interval=12,
        eval_posts=512,
        task=posts.TASKS["posts"],
        rewards=RewardsArgs(monitor="ppo_rlhf.worlds.posts:gold_scores", kl_coef=0.35),
        ppo=PpoArgs(total_episodes=3_840, batch_size=64, nminibatches=8, lr=1e-4),
    ),
    # A real language model and few episodes: adapters, two epochs of two minibatches, and a controller that reacts
    # within them. Many sentences have scores below -1, so not to end must cost more.
    "reviews": Args(
        preset="reviews",
        seed=1,
        trace_interval=10,
        eval_interval=10,
        eval_posts=128,
        task=posts.TASKS["reviews"],
        rewards=RewardsArgs(
            monitor="ppo_rlhf.worlds.reviews:vader",
            kl_coef=0.05,
            adaptive_kl=AdaptiveKLArgs(target=6.0, horizon=300),
            missing_eos_penalty=3.0,
        ),
        ppo=PpoArgs(
            total_episodes=1_280, batch_size=32, nminibatches=2, noptepochs=2, lr=5e-4, local_micro_batch_size=16
        ),
        lora=models.LoraArgs(rank=16, target_modules="all-linear"),
    ),
}

EVAL_PROMPTS = 64  # held-out posts of an evaluation during training

# ---- Train -----------------------------------------------------------------------------------------------------
#
# How a batch is divided, with the numbers of the preset tldr on one process:
#
#     batch         512 episodes, one update; every process has an equal part, its local batch
#     group          no such thing here: a whole minibatch, on all processes, is whitened together
#     minibatch     512: 1 / nminibatches of the batch, one optimiser step; 4 epochs make 4 steps
#     pass          a part of the minibatch, or micro-batch, that is read at a time; changes memory, not numbers


def train(args: Args, timestamp: int | None = None) -> Path:
    """Train a policy and a critic; return the folder models/<run>/policy, on every process; the critic is next to it.

    timestamp: ends the run's name, if another run shares it. Raises InputError, a ValueError: on bad arguments before
    anything is written; later if a number is impossible, or if a disk or a function fails.
    """
    args = checked(args)
    accelerator = make_accelerator(args.dtype)
    device = accelerator.device
    task, shaping, ppo = args.task, args.rewards, args.ppo
    sizes = ppo_sizes(args, accelerator.num_processes)
    rank = accelerator.process_index
    mine = slice(rank * sizes.local_batch, (rank + 1) * sizes.local_batch)  # this process's rows of the batch

    tokenizer = models.load_tokenizer(args.base_model, args.trust_remote_code)
    ids = posts.task_ids(task, tokenizer)
    train_posts = posts.read_posts(task, tokenizer, "train")
    held_out = {split: posts.read_posts(task, tokenizer, split, args.eval_posts) for split in ("validation", "test")}
    actor_critic, reference = load_networks(args, tokenizer, device)
    score = load_scorer(args, tokenizer, ids, device)
    monitor = posts.text_scorer(shaping.monitor, "rewards.monitor", tokenizer, ids) if shaping.monitor else None
    # [T46] One optimiser for both networks, and one learning rate, constant within an update.   ppo.py#L575-L577
    optimizer = torch.optim.AdamW(
        [parameter for parameter in actor_critic.parameters() if parameter.requires_grad],
        ppo.lr,
        eps=ppo.adam_eps,
        weight_decay=ppo.weight_decay,
        fused=True,
    )
    controller = AdaptiveKLController(shaping.kl_coef, shaping.adaptive_kl.target, shaping.adaptive_kl.horizon)

    # A few rows at a time, as few_rows_at_a_time of chapter 1, but of similar length.
    by_length = partial(packing.by_length, model=actor_critic, pad_id=ids.pad, rows=ppo.local_rollout_batch_size)

    run = Run(args, accelerator, dataclasses.asdict(sizes), timestamp)
    run.try_to_save(
        lambda folder: save_models(folder, actor_critic, reference.adapters, tokenizer, args, weights=False)
    )
    state = {"step": 0, "kl_coef": controller.value, "score_scale": (0.0, 1.0), "evaluation": {}}
    state = run.resume(actor_critic, optimizer, state, total=sizes.updates)
    if has_own_scale(shaping) and shaping.normalize_samples and state["step"] == 0:
        state["score_scale"] = scale_of_scores(args, ids, train_posts, actor_critic, score, accelerator)
    controller.value = state["kl_coef"]
    score_mean, score_std = state["score_scale"]
    evaluation = state["evaluation"]  # the newest result, which every row of metrics.csv repeats
    judges: dict[str, Scorer] = {"scores": lambda *tokens: (score(*tokens) - score_mean) / score_std}
    if monitor:
        judges[monitor_name(args)] = monitor
    run.open_logs(state["step"], config={})

    updates = range(state["step"], sizes.updates)
    seconds = 0.1 if sys.stderr.isatty() else 30.0  # between two updates of the bar; a log file gets few
    bar = tqdm(updates, desc="PPO", initial=state["step"], total=sizes.updates, mininterval=seconds)
    for update in bar:
        if args.eval_interval and update % args.eval_interval == 0:
            with run.checkpoint_if_it_fails(actor_critic, optimizer, state):
                prompts = held_out["validation"].first(EVAL_PROMPTS)
                evaluation, rows = evaluate("eval", actor_critic, prompts, judges, tokenizer, ids, args, accelerator)
            check_finite(evaluation, update)
            if update == 0:
                write_evaluation(run, "evaluation_before", rows)

        # 1. Sample posts. Every process draws the whole batch and takes its rows.
        batch = train_posts.rows(posts_of_update(args.seed, len(train_posts), update, sizes.batch)[mine])
        references = batch.references.to(device)  # (local_batch, response_length), what people wrote
        queries = posts.trim_padding(batch.queries, pad_id=ids.pad).to(device)  # (local_batch, context_length)
        uniforms = episode_noise(args.seed, update, sizes.batch, task.response_length)[mine]
        uniforms = uniforms.to(float64_device(device))  # (local_batch, response_length)

        with torch.no_grad():
            # 2. Generate summaries. Compute their log-probs and values, all (local_batch, response_length).
            # [T36] What follows the first stop token is padding; the token itself stays.
            #       ppo.py#L350-L355, ppo.py#L632
            # [T33] Nobody looks at what follows, so it is not sampled.   ppo.py#L494-L495, ppo.py#L542-L549
            responses, sampled_logprobs = by_length(
                lambda contexts, noise: generate_until(
                    actor_critic.lm_backbone,
                    contexts,
                    noise,
                    ids.pad,
                    vocab_size=ids.vocab_size,
                    temperature=task.temperature,
                    stop_ids=ids.stops,
                ),
                queries,
                uniforms,
                new_tokens=task.response_length,
            )
            query_responses = torch.cat([queries, responses], dim=1)  # (local_batch, context + response_length)
            # [T34] The policy reads what it wrote, just as in step 7, so the ratio starts at 1, but for rounding.
            #       ppo.py#L321-L335, ppo.py#L617-L619
            logprobs, _, values = by_length(
                lambda tokens, responses: actor_critic(tokens, responses, ids.pad, task.temperature),
                query_responses,
                responses,
            )

            # 3. Compute the reference's log-probs: (local_batch, response_length).
            ref_logprobs = by_length(
                lambda tokens, responses: reference_logprobs(
                    reference, tokens, responses, ids.pad, task.temperature, vocab_size=ids.vocab_size
                ),
                query_responses,
                responses,
            )

            # 4. Score the summaries, (local_batch,), and punish those that do not end.
            with run.checkpoint_if_it_fails(actor_critic, optimizer, state):
                source_scores = score(queries, responses, references)
                if monitor:
                    monitored = monitor(queries, responses, references)
            # [X18] Scores of a function, or of a reward model from elsewhere, get the scale of a normalised one.
            raw_scores = (source_scores - score_mean) / score_std
            stopped = has_stop(responses, ids.stops, 0)
            scores = punish_missing_eos(
                raw_scores, stopped, form=shaping.missing_eos, penalty=shaping.missing_eos_penalty
            )

            # 5. Compute per-token rewards. The score judges the whole summary, so it comes once, when the summary is
            #    complete. The KL divergence is a sum over tokens, so each token pays for its own part.
            mask, value_mask = response_masks(responses, ids.pad)  # (local_batch, response_length)
            rewards, non_score_rewards, kl = compute_rewards(
                scores, logprobs, ref_logprobs, mask, kl_coef=controller.value, kl_estimator=shaping.kl_estimator
            )

        # 6. Compute advantages and returns, and 7. optimise: `ppo_update` does both for each minibatch.
        optimizer.param_groups[0]["lr"] = ppo.lr * (1 - update / sizes.updates)
        rollout = Rollout(
            query_responses=query_responses,
            logprobs=logprobs,
            values=values,
            rewards=rewards,
            mask=mask,
            value_mask=value_mask,
        )
        minibatches = draw_minibatches(args.seed, update, ppo.noptepochs, mine, ppo.nminibatches)
        traced = args.trace_interval and (update % args.trace_interval == 0 or update + 1 == sizes.updates)
        passes = {} if traced else None
        stats = ppo_update(
            actor_critic,
            optimizer,
            rollout,
            minibatches,
            ppo,
            pad_id=ids.pad,
            temperature=task.temperature,
            accelerator=accelerator,
            passes=passes,
        )

        # 8. Adapt the KL coefficient and log. What is logged of each episode, (local_batch,):
        objectives = {
            "kl": kl.sum(1),
            "entropy": -logprobs.masked_fill(~mask, 0).sum(1),  # of the sampled tokens
            "non_score_reward": non_score_rewards.sum(1),
            "scores": scores,
            "eos_rate": stopped,
            "response_length": mask.sum(1),
            "raw_scores": raw_scores,
            # If sampler and reader agree, this is rounding.
            "sampler_gap": (logprobs - sampled_logprobs).abs().masked_fill(~mask, 0).sum(1) / mask.sum(1),
        }
        if has_own_scale(shaping):
            objectives["function_score"] = source_scores
        if monitor:
            objectives[monitor_name(args)] = monitored
        metrics = update_metrics(objectives, stats, controller.value, accelerator)
        metrics["lr"] = optimizer.param_groups[0]["lr"]
        # These are episodes so far, and episodes per second since the start.   TRL ppo_trainer.py#L660-L911
        metrics["episode"] = (update + 1) * sizes.batch
        metrics["time"] = run.seconds()
        metrics["eps"] = metrics["episode"] / metrics["time"]
        check_update(metrics, update, args.dtype)
        run.log(update, metrics | evaluation)
        bar.set_postfix_str(
            f"score {metrics['objective/scores']:+.2f}, KL {metrics['objective/kl']:z.2f}, "
            f"{metrics['objective/eos_rate']:.0%} end"
        )
        if args.log_interval and update % args.log_interval == 0:
            rows = posts.evaluation_rows(
                tokenizer,
                ids,
                queries[:3],
                responses[:3],
                references[:3],
                scores=scores[:3],
                kl=objectives["kl"][:3],
            )
            run.log_samples(update, posts.sample_table(rows))
        if traced:
            with torch.no_grad():  # Read the summaries again after learning.
                new_logprobs, entropies, new_values = by_length(
                    lambda tokens, responses: actor_critic(tokens, responses, ids.pad, task.temperature),
                    query_responses,
                    responses,
                )
            tokens = {
                "ids": responses,
                "scored": mask,
                "value_mask": value_mask,
                "logprobs": logprobs,
                "ref_logprobs": ref_logprobs,
                "kl": kl,
                "rewards": rewards,
                "values": values,
                "new_logprobs": new_logprobs,
                "new_values": new_values,
                "entropies": entropies,
            }
            shown = posts.without_ends(references[: args.trace_episodes], tokenizer, ids)
            run.write_trace(
                update,
                tokenizer,
                queries,
                tokens=tokens,
                episodes=objectives,
                epochs=passes,
                reference=to_texts(tokenizer, shown, ids.pad),
            )
        # The controller sees the KL averaged over all processes.
        controller.update(metrics["objective/kl"], sizes.batch)
        state = {
            "step": update + 1,
            "kl_coef": controller.value,
            "score_scale": (score_mean, score_std),
            "evaluation": evaluation,
        }
        stopping = run.told_to_stop()
        if stopping or update + 1 == sizes.updates or (update + 1) % (args.save_interval or sizes.updates) == 0:
            run.save_checkpoint(actor_critic, optimizer, state)
        if stopping:
            accelerator.print(f"stopped after update {update + 1}; resume with --resume {run.folder}")
            sys.exit(0)

    run.stop_at_once()
    results = {"too_long": train_posts.too_long}
    for split, split_posts in held_out.items():
        with run.checkpoint_if_it_fails(actor_critic, optimizer, state):
            means, rows = evaluate(split, actor_critic, split_posts, judges, tokenizer, ids, args, accelerator)
        check_finite(means, sizes.updates)
        write_evaluation(run, "evaluation" if split == "validation" else f"evaluation_{split}", rows)
        results |= means | {f"{split}/rouge/{name}": value for name, value in posts.rouge(rows).items()}

    if accelerator.is_main_process:
        with input_errors(f"{run.models} cannot be saved; the checkpoints are kept"):
            save_models(run.models, actor_critic, reference.adapters, tokenizer, args)
    run.finish("policy", **results, **run.last_means("scores", "kl", "eos_rate"))
    return run.models / "policy"


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Episodes of one process, its part of the batch. Where `mask` is False, log-probs mean nothing.

    `value_mask` has one place more, the step after the end, with its value and the score. Beyond it, values mean
    nothing, and rewards are 0.
    """

    query_responses: Tensor  # (local_batch, context_length + response_length), padding after the stop token
    logprobs: Tensor  # (local_batch, response_length), under the policy that sampled
    values: Tensor  # (local_batch, response_length), of the critic at that time
    rewards: Tensor  # (local_batch, response_length), KL penalty and score, not whitened
    mask: Tensor  # (local_batch, response_length) bool, of the tokens
    value_mask: Tensor  # (local_batch, response_length) bool, of the values


def ppo_update(
    actor_critic: ActorCritic,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    minibatches: Tensor,
    ppo: PpoArgs,
    pad_id: int,
    temperature: float,
    accelerator: Accelerator,
    passes: dict[str, Tensor] | None = None,
    before_step: Callable[[int, dict[str, Tensor]], None] | None = None,
) -> dict[str, Tensor]:
    """Steps 6 and 7: all epochs of PPO on one rollout.

    minibatches: this process's episodes in each, (epochs, nminibatches, local_minibatch), on the CPU. passes: a
    dictionary that gets the minibatches, what each epoch computed of each episode, (epochs, local_batch,
    response_length), and what the losses were divided by, (epochs, nminibatches). before_step: called before each
    optimiser step with its number, from 0, and what is logged of it; loop.py looks at these numbers.

    Returns 0-d means over the optimiser steps, and how far the ratio was off 1 before the first one. They are this
    process's shares of means over what counts: those of all processes add up.
    """
    reduce = partial(accelerator.reduce, reduction="sum")
    epochs, nminibatches, _ = minibatches.shape
    responses = rollout.query_responses[:, -rollout.rewards.shape[1] :]  # (local_batch, response_length)
    lengths = packing.count_tokens(rollout.query_responses, pad_id)  # (local_batch,), on the CPU
    if passes is not None:
        passes["minibatches"] = minibatches
        for name in ("advantages", "returns", "new_logprobs", "new_values"):
            passes[name] = rollout.rewards.new_zeros(epochs, *rollout.rewards.shape)
        for name in ("token_counts", "value_counts"):
            passes[name] = torch.zeros(epochs, nminibatches, dtype=torch.long)
    steps: list[dict[str, Tensor]] = []  # what is logged of each optimiser step
    for epoch in range(epochs):
        for number, mb_inds in enumerate(minibatches[epoch]):  # (local_minibatch,)
            # 6. Compute advantages and returns. The critic's values say how well a summary was going to do anyway.
            #    What is left, the advantage, says what the sampled token added, with much less noise.
            mb_mask, mb_value_mask = rollout.mask[mb_inds], rollout.value_mask[mb_inds]
            mb_values = rollout.values[mb_inds]  # (local_minibatch, response_length)
            mb_advantages, mb_returns = compute_advantages(
                rollout.rewards[mb_inds], mb_values, mb_mask, mb_value_mask, ppo=ppo, reduce=reduce
            )
            # [T45] [X21] Every sum is divided by what counts in the whole minibatch, on all processes: a token has
            #       the same weight in whatever micro-batch and process it is.
            count, value_count = reduce(mb_mask.sum()), reduce(mb_value_mask.sum())
            wide_values, wide_returns = widened(mb_values), widened(mb_returns)
            stats = {
                "val/mean": masked_mean(wide_values, mb_value_mask, value_count),
                "squared_value": masked_mean(wide_values**2, mb_value_mask, value_count),
                "returns/mean": masked_mean(wide_returns, mb_value_mask, value_count),
                "squared_return": masked_mean(wide_returns**2, mb_value_mask, value_count),
            }
            if passes is not None:
                passes["advantages"][epoch, mb_inds] = mb_advantages
                passes["returns"][epoch, mb_inds] = mb_returns
                passes["token_counts"][epoch, number] = count
                passes["value_counts"][epoch, number] = value_count

            # 7. Make one optimiser step. The ratio says how much more likely a token has become since it was sampled.
            #    Advantages were measured under the old policy and mean less the further the policy moves away from
            #    it. So the losses are clipped: beyond the clip range, nothing is gained by moving on.
            # [T48] Gradients of micro-batches add up. We step when all are done, without accelerate's counter.
            #       ppo.py#L721
            optimizer.zero_grad()
            for tokens, part in packing.micro_batches(
                actor_critic,
                lengths[mb_inds],
                rollout.query_responses[mb_inds],
                torch.arange(len(mb_inds)),
                pad_id=pad_id,
                rows=ppo.local_micro_batch_size,
            ):  # (micro_batch, length), (micro_batch,)
                inds = mb_inds[part]  # what follows is (micro_batch, response_length)
                logprobs, mask, value_mask = rollout.logprobs[inds], mb_mask[part], mb_value_mask[part]
                advantages, returns = mb_advantages[part], mb_returns[part]
                new_logprobs, entropies, new_values = actor_critic(tokens, responses[inds], pad_id, temperature)
                pg_loss, pg_clipfrac, approxkl = policy_loss(
                    new_logprobs, logprobs, advantages, mask, cliprange=ppo.cliprange, count=count
                )
                vf_loss, vf_clipfrac = value_loss(
                    new_values,
                    mb_values[part],
                    returns,
                    value_mask,
                    cliprange_value=ppo.cliprange_value,
                    count=value_count,
                )
                loss = pg_loss + ppo.vf_coef * vf_loss
                (loss * accelerator.num_processes).backward()  # gradients will be averaged over processes

                # [X34] Masked positions are left out.   ppo.py#L722-L771
                ratio = torch.exp((new_logprobs - logprobs).masked_fill(~mask, 0)).detach()
                add(stats, "loss/policy_avg", pg_loss)
                add(stats, "loss/value_avg", vf_loss)
                add(stats, "policy/approxkl_avg", approxkl)
                add(stats, "policy/clipfrac_avg", pg_clipfrac)
                add(stats, "policy/entropy_avg", masked_mean(entropies, mask, count))
                add(stats, "val/clipfrac_avg", vf_clipfrac)
                add(stats, "val/vpred", masked_mean(new_values, value_mask, value_count))
                add(stats, "val/error", masked_mean((new_values - returns) ** 2, value_mask, value_count))
                add(stats, "val/ratio", masked_mean(ratio, mask, count))
                add(stats, "squared_ratio_gap", masked_mean((ratio - 1) ** 2, mask, count))
                if passes is not None:
                    passes["new_logprobs"][epoch, inds] = new_logprobs.detach()
                    passes["new_values"][epoch, inds] = new_values.detach()
            average_gradients(actor_critic)
            # The norm is logged, and nothing is clipped.
            gradient_norm = nn.utils.get_total_norm(
                [parameter.grad for parameter in actor_critic.parameters() if parameter.grad is not None]
            )
            stats["gradient_norm"] = gradient_norm / accelerator.num_processes
            if before_step is not None:
                before_step(len(steps), stats)
            optimizer.step()
            steps.append(stats)
    means = {name: torch.stack([step[name] for step in steps]).mean() for name in steps[0]}
    means["first_squared_ratio_gap"] = steps[0]["squared_ratio_gap"]  # 0 but for rounding
    return means


# ---- The formulas of steps 1 and 4 to 7 ------------------------------------------------------------------------
#
# A mask is True where an entry counts. Other entries, even NaN, reach neither a result nor a gradient.


def posts_of_update(seed: int, num_posts: int, update: int, batch: int) -> Tensor:
    """Indices (batch,) of the posts of an update. Each pass over the posts has an order of its own."""
    # A batch may begin in one pass and end in the next.   ppo.py#L424-L431, ppo.py#L509-L513
    first, last = update * batch // num_posts, (update * batch + batch - 1) // num_posts
    orders = [
        torch.randperm(num_posts, generator=keyed_generator(seed, "posts", number))
        for number in range(first, last + 1)
    ]
    start = update * batch - first * num_posts
    return torch.cat(orders)[start : start + batch]


def punish_missing_eos(
    scores: Tensor, stopped: Tensor, form: Literal["replace", "subtract", "none"], penalty: float
) -> Tensor:
    """Scores (batch,) after the end-of-text trick, which lowers those of responses that have not stopped (batch,)."""
    # [T39] The score of a summary without the stop token becomes minus the penalty, or is lowered by it, or stays.
    #       ppo.py#L662-L667, TRL ppo_trainer.py#L758-L759
    punished = {"replace": torch.full_like(scores, -penalty), "subtract": scores - penalty, "none": scores}
    return torch.where(stopped, scores, punished[form])


def response_masks(truncated_responses: Tensor, pad_id: int) -> tuple[Tensor, Tensor]:
    """Which tokens of a response count, and which values: two of (batch, response_length) bool.

    Tokens count up to the one that ends the response, and one value more: that of the state after it. With padding
    P, [[7, 8, E, P, P]] gives [[1, 1, 1, 0, 0]] and [[1, 1, 1, 1, 0]].
    """
    # [T40] [T41] A response ends before its first padding, or at the last column; values count one place further.
    #       ppo.py#L636, ppo.py#L670-L677
    lengths = (truncated_responses != pad_id).sum(1, keepdim=True)  # (batch, 1)
    index = torch.arange(truncated_responses.shape[1], device=truncated_responses.device)
    return index < lengths, index < lengths + 1


def compute_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    kl_coef: float,
    kl_estimator: Literal["k1", "k3"],
) -> tuple[Tensor, Tensor, Tensor]:
    """Per-token rewards: -kl_coef * kl on every token, and the score on the step after the last token.

    scores: (batch,); log-probs and mask, which is that of the tokens: (batch, response_length). Returns rewards,
    non_score_rewards and kl, of that shape. A response that fills its row gets the score on its last token.
    """
    # [T42] What does not count is 0 in every sum.   ppo.py#L38, ppo.py#L675-L677
    x = (ref_logprobs - logprobs).masked_fill(~mask, 0)  # (batch, response_length)
    kl = -x if kl_estimator == "k1" else torch.expm1(x) - x
    non_score_rewards = -kl_coef * kl
    # [T43] The score is the reward of the step after the last token, where there is one. The critic starts as the
    #       reward model, so its value there is the score already, and the error (delta) of that step is 0: tokens get
    #       their credit from how the critic's values change.   ppo.py#L679-L685
    # The place after each token, 0 where masked: (batch, response_length).
    step_after = mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)
    position = step_after.max(1, keepdim=True).values.clamp(max=mask.shape[1] - 1)  # (batch, 1)
    rewards = non_score_rewards.scatter_add(1, position, scores.unsqueeze(1).to(x.dtype))
    return rewards, non_score_rewards, kl


def compute_advantages(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    value_mask: Tensor,
    ppo: PpoArgs,
    reduce: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Step 6 for one minibatch: whitened advantages and returns; every tensor is (batch, response_length)."""
    # [T44] Rewards are whitened if asked for, advantages always.   ppo.py#L235-L241, ppo.py#L687-L704
    if ppo.whiten_rewards:
        rewards = whiten(rewards, value_mask, keep_mean=True, reduce=reduce)
    advantages, returns = compute_gae(rewards, values, value_mask, gamma=ppo.gamma, lam=ppo.lam)
    # [X25] Advantages are whitened over the whole minibatch, on all processes: tokens alone count, while whitened
    #       rewards include the step after the last token, which has the score.
    return whiten(advantages, mask, keep_mean=False, reduce=reduce), returns


def whiten(values: Tensor, mask: Tensor, *, keep_mean: bool, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Shift and scale what counts to mean 0 and variance 1; keep_mean adds the mean back. 0 where masked.

    values, mask: (batch, response_length). The variance is biased [T52], and 1e-8 is added to it. reduce: sums a
    tensor over all processes.
    """
    # [T44] Mean and variance are those of what counts.   ppo.py#L235-L241, ppo.py#L687-L704
    count = reduce(mask.sum())
    mean = reduce(values.masked_fill(~mask, 0).sum()) / count
    variance = reduce(((values - mean) ** 2).masked_fill(~mask, 0).sum()) / count
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    return (whitened + mean if keep_mean else whitened).masked_fill(~mask, 0)


def compute_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the values that count; the value after the last of them is 0.

        delta_t = r_t + gamma * V_{t+1} - V_t        A_t = delta_t + gamma * lam * A_{t+1}        R_t = A_t + V_t

    rewards, values, mask (of the values): (batch, response_length). Returns advantages (not whitened) and returns, of
    that shape, 0 where masked. A hole in the mask, which only loop.py has, where a tool or a user speaks, is skipped:
    t + 1 is the next value that counts.
    """
    # [T44] Whatever comes after is set to 0, so that nothing leaks in.   ppo.py#L235-L241, ppo.py#L687-L704
    rewards, values = rewards.masked_fill(~mask, 0), values.masked_fill(~mask, 0)
    # [D56] [D57] The loop runs backwards in time; returns are advantages before whitening, plus values.
    #       OAI train_policy.py#L327-L336
    advantages = torch.zeros_like(values)
    next_advantage = next_value = torch.zeros_like(values[:, 0])  # (batch,)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = delta + gamma * lam * next_advantage
        next_advantage = torch.where(mask[:, t], advantages[:, t], next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
    advantages = advantages.masked_fill(~mask, 0)
    return advantages, advantages + values


def policy_loss(
    new_logprobs: Tensor, logprobs: Tensor, advantages: Tensor, mask: Tensor, cliprange: float, count: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Clipped surrogate: mean of max(-A * ratio, -A * clip(ratio, 1 +- range)), ratio = exp(new - old).

    All tensors are (batch, response_length), mask that of the tokens. count: what the sums are divided by.
    Returns the loss, the share of clipped tokens, and approxkl = half the mean of (new - old)^2, the last two
    detached.
    """
    # [T45] The loss is the sum over what counts, divided by the count of the whole minibatch.   ppo.py#L731-L759
    log_ratio = (new_logprobs - logprobs).masked_fill(~mask, 0)  # (batch, response_length)
    advantages, ratio = advantages.masked_fill(~mask, 0), torch.exp(log_ratio)
    losses = -advantages * ratio
    clipped_losses = -advantages * torch.clamp(ratio, 1 - cliprange, 1 + cliprange)
    clipfrac = masked_mean((clipped_losses > losses).to(losses.dtype), mask, count)
    approxkl = 0.5 * masked_mean(log_ratio**2, mask, count).detach()
    return masked_mean(torch.maximum(losses, clipped_losses), mask, count), clipfrac, approxkl


def value_loss(
    new_values: Tensor, values: Tensor, returns: Tensor, mask: Tensor, cliprange_value: float, count: Tensor
) -> tuple[Tensor, Tensor]:
    """Clipped value loss: half the mean of max((V - R)^2, (clip(V, V_old +- range) - R)^2), and the share of clipped.

    All tensors are (batch, response_length), mask that of the values. count: what the sum is divided by.
    """
    # [T45] The loss is the sum over what counts, divided by the count of the whole minibatch.   ppo.py#L731-L759
    new_values, values, returns = (tensor.masked_fill(~mask, 0) for tensor in (new_values, values, returns))
    clipped_values = torch.clamp(new_values, values - cliprange_value, values + cliprange_value)
    losses = (new_values - returns) ** 2  # (batch, response_length)
    clipped_losses = (clipped_values - returns) ** 2  # (batch, response_length)
    clipfrac = masked_mean((clipped_losses > losses).to(losses.dtype), mask, count)
    return 0.5 * masked_mean(torch.maximum(losses, clipped_losses), mask, count), clipfrac


def masked_mean(values: Tensor, mask: Tensor, count: Tensor) -> Tensor:
    """The sum of the entries that the mask keeps, divided by a count: 0-d. values, mask: of one shape."""
    return values.masked_fill(~mask, 0).sum() / count


# ---- Steps 2 and 3: how the networks read ----------------------------------------------------------------------


class ActorCritic(nn.Module):
    """The policy and the critic, two networks that share nothing.

    The critic is a reward model that is read before every token of the response, and not only at its end.
    """

    # [T32] It starts as the reward model, so its value after the end of text is the score.   ppo.py#L471-L500
    def __init__(self, lm_backbone: PreTrainedModel, critic: RewardModel, vocab_size: int):
        """vocab_size: number of ids that can be sampled; the output layer may have more rows [T14]."""
        super().__init__()
        self.lm_backbone = lm_backbone
        self.critic = critic
        self.vocab_size = vocab_size

    def forward(
        self, query_responses: Tensor, responses: Tensor, pad_id: int, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs of the response tokens, entropies (nats) and values at each of their positions.

        query_responses: (batch, length), posts and their responses, with padding anywhere. responses: (batch,
        response_length), the same responses once more, with padding at their end, because their columns are not known
        otherwise. Returns three tensors of (batch, response_length). At the first padding there is the value after
        the response's end; log-probs and entropies at padding, and later values, mean nothing.
        """
        logprobs, entropies = response_statistics(
            self.lm_backbone, query_responses, responses, pad_id, temperature, self.vocab_size
        )
        # [T38] A value belongs to the position before the response token, as its log-prob does.   ppo.py#L637-L640
        hidden_states = read_before_responses(self.critic.lm_backbone, query_responses, responses, pad_id)
        values = self.critic.gain * read_scalar(self.critic.reward_head, hidden_states) + self.critic.bias
        return logprobs, entropies, values


def reference_logprobs(
    reference: models.Reference,
    query_responses: Tensor,
    responses: Tensor,
    pad_id: int,
    temperature: float,
    vocab_size: int,
) -> Tensor:
    """Log-probs (batch, response_length) of the reference; tokens as `ActorCritic` gets them."""
    # [T35] They are at the policy's temperature, over the same ids.   ppo.py#L623-L627
    with reference.in_use():
        logprobs, _ = response_statistics(
            reference.lm_backbone, query_responses, responses, pad_id, temperature, vocab_size
        )
    return logprobs


# ---- Evaluation, and the scale of scores -----------------------------------------------------------------------


def evaluate(
    prefix: str,
    actor_critic: ActorCritic,
    held_out: posts.Posts,
    judges: dict[str, Scorer],
    tokenizer: PreTrainedTokenizerBase,
    ids: posts.TaskIds,
    args: Args,
    accelerator: Accelerator,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Summarise held-out posts at the temperature of evaluations. Returns <prefix>/<name>: mean, and a row per post.

    judges: what scores the summaries and the references, by name. Summaries that do not end are not penalised.
    """

    def measure(queries: Tensor, responses: Tensor, references: Tensor) -> list[Tensor]:
        return [judge(queries, texts, references) for judge in judges.values() for texts in (responses, references)]

    responses, *measured = posts.summarise(
        actor_critic.lm_backbone,
        held_out,
        ids,
        args.task,
        keyed_generator(args.seed, "evaluate"),
        args.ppo.local_rollout_batch_size,
        accelerator,
        measure=measure,
    )
    columns = [prefix + name for name in judges for prefix in ("", "reference_")]  # in the order of `measure`
    numbers = dict(zip(columns, measured, strict=True))  # (posts,) each
    rows = posts.evaluation_rows(tokenizer, ids, held_out.queries, responses, held_out.references, **numbers)
    numbers["eos_rate"] = has_stop(responses, ids.stops, 0)
    numbers["response_length"] = (responses != ids.pad).sum(1)
    return {f"{prefix}/{name}": widened(values).mean().item() for name, values in numbers.items()}, rows


def has_own_scale(shaping: RewardsArgs) -> bool:
    """Whether scores come from a function or a reward model from elsewhere, whose scale may be any."""
    return bool(shaping.function) or classifiers.is_foreign(shaping.trained_model)


def scale_of_scores(
    args: Args,
    ids: posts.TaskIds,
    train_posts: posts.Posts,
    actor_critic: ActorCritic,
    score: Scorer,
    accelerator: Accelerator,
) -> tuple[float, float]:
    """Mean and biased deviation of the scores of summaries that the policy samples before it learns."""
    # [X18] The KL coefficient and the critic are meant for scores of mean 0 and deviation 1.
    _, scores = posts.summarise(
        actor_critic.lm_backbone,
        train_posts.first(args.rewards.normalize_samples),
        ids,
        args.task,
        keyed_generator(args.seed, "scale of the function"),
        args.ppo.local_rollout_batch_size,
        accelerator,
        measure=lambda *tokens: [score(*tokens)],
        temperature=args.task.temperature,
    )
    mean, std = scores.double().mean().item(), scores.double().std(unbiased=False).item()
    return mean, std if std > 1e-10 * abs(mean) else 1.0  # scores that are equal, but for rounding, keep their scale


# ---- Step 8: what is logged ------------------------------------------------------------------------------------

# Names that the function of --rewards.monitor cannot have: of other objectives, and of columns of evaluation.jsonl.
RESERVED = {"kl", "entropy", "non_score_reward", "scores", "raw_scores", "eos_rate", "response_length", "sampler_gap"}
RESERVED |= {"kl_coef", "rlhf_reward", "function_score", "reference_scores", *posts.COLUMNS}


def update_metrics(
    objectives: dict[str, Tensor], stats: dict[str, Tensor], kl_coef: float, accelerator: Accelerator
) -> dict[str, float]:
    """The metrics of an update, over all processes, which must all call this.

    objectives: numbers of each episode, (local_batch,) by name. stats: what ppo_update returns. kl_coef: what the
    rewards were made with.
    """
    shares = {
        f"objective/{name}": widened(values).mean() / accelerator.num_processes for name, values in objectives.items()
    }
    shares["val/num_eos_tokens"] = objectives["eos_rate"].sum()  # summaries that end
    metrics = sum_over_processes(shares | stats, accelerator)
    # [X34] Variances are over all tokens and values.
    metrics["val/first_ratio_gap"] = math.sqrt(metrics.pop("first_squared_ratio_gap"))
    metrics["val/ratio_var"] = metrics.pop("squared_ratio_gap") - (metrics["val/ratio"] - 1) ** 2
    metrics["val/var"] = metrics.pop("squared_value") - metrics["val/mean"] ** 2
    metrics["returns/var"] = metrics.pop("squared_return") - metrics["returns/mean"] ** 2
    metrics["val/var_explained"] = 1 - metrics["val/error"] / max(metrics["returns/var"], 1e-12)
    metrics["objective/kl_coef"] = kl_coef
    metrics["objective/rlhf_reward"] = metrics["objective/scores"] + metrics["objective/non_score_reward"]
    return metrics


FIRST_RATIO_TOLERANCE = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 0.1}  # by --dtype


def check_update(metrics: dict[str, float], update: int, dtype: str) -> None:
    """Raise an InputError if a metric is impossible. Nothing more is saved then."""
    check_finite(metrics, update)
    for name in ("val/first_ratio_gap", "objective/sampler_gap"):
        # [D25] Before the first step, the policy that trains is the one that sampled.
        if (gap := metrics[name]) > FIRST_RATIO_TOLERANCE[dtype]:
            raise InputError(f"{name} is {gap:.2g} in update {update}: sampler and training pass disagree")


# ---- Plumbing: sizes, networks and scorers to load, what is written --------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PpoSizes:
    """Sizes, from the arguments and the number of processes, in episodes unless the name says otherwise."""

    updates: int
    batch: int
    local_batch: int


def ppo_sizes(args: Args, num_processes: int, scores_are_named: bool = True) -> PpoSizes:
    """Divide the global sizes exactly, or raise an InputError that says what is wrong with the arguments.

    scores_are_named: whether they must name what scores; False if an earlier stage will make it.
    """
    ppo, shaping = args.ppo, args.rewards
    if not args.base_model:
        raise InputError("--base_model is empty; give the folder of a fine-tuned model, models/<run>/sft")
    if scores_are_named and bool(shaping.function) == bool(shaping.trained_model):
        raise InputError("give one of --rewards.trained_model and --rewards.function")
    if shaping.label and not classifiers.is_foreign(shaping.trained_model):
        raise InputError(
            f"--rewards.label {shaping.label} does nothing without a reward model from elsewhere; leave it empty"
        )
    if monitor_name(args) in RESERVED:
        raise InputError(
            f"--rewards.monitor {shaping.monitor}: the name {monitor_name(args)} is taken; give the function another"
        )
    if ppo.total_episodes < ppo.batch_size:
        raise InputError(
            f"--ppo.total_episodes {ppo.total_episodes} is less than an update; {ppo.batch_size} would do"
        )
    slices = num_processes * ppo.nminibatches
    split_evenly("--ppo.batch_size", ppo.batch_size, slices, "processes x nminibatches")
    horizon = shaping.adaptive_kl.horizon
    # In an update, the controller multiplies the coefficient by at least 1 - 0.2 * batch_size / horizon.
    if shaping.adaptive_kl.target and ppo.batch_size >= 5 * horizon:
        raise InputError(
            f"--rewards.adaptive_kl.horizon {horizon}: an update of {ppo.batch_size} episodes could take the KL "
            f"coefficient to 0 or below; {ppo.batch_size // 5 + 1} would do"
        )
    return PpoSizes(
        updates=ppo.total_episodes // ppo.batch_size,
        batch=ppo.batch_size,
        local_batch=ppo.batch_size // num_processes,
    )


def load_networks(
    args: Args, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> tuple[ActorCritic, models.Reference]:
    """Policy, critic and reference."""
    length, vocab_size = args.task.query_length + args.task.response_length, vocabulary_size(tokenizer)
    lm_backbone, critic = models.load_base_model(args), models.load_critic(args, tokenizer, length)
    actor_critic = ActorCritic(lm_backbone, critic, vocab_size).to(device)
    packing.enable(lm_backbone, critic.lm_backbone)
    check_model(lm_backbone, args.base_model, length, vocab_size)
    prepare(lm_backbone, args)
    prepare(critic.lm_backbone, args)
    if args.lora.rank:
        return actor_critic, models.Reference(lm_backbone, models.add_adapters(lm_backbone, args.lora, args.seed))
    frozen = models.load_base_model(args, frozen=True).to(device)
    packing.enable(frozen)
    prepare(frozen, args)
    return actor_critic, models.Reference(frozen, None)


def load_scorer(args: Args, tokenizer: PreTrainedTokenizerBase, ids: posts.TaskIds, device: torch.device) -> Scorer:
    """The scorer of (queries, truncated responses, reference summaries); a reward model reads no references."""
    if args.rewards.function:
        return posts.text_scorer(args.rewards.function, "rewards.function", tokenizer, ids)
    if classifiers.is_foreign(args.rewards.trained_model):
        bare = partial(posts.bare, ids=ids)
        return classifiers.load_scorer(args, tokenizer, ids.pad, device=device, bare=bare)
    length = args.task.query_length + args.task.response_length
    reward_model = models.load_scalar_model(args, "trained_model", tokenizer, length, frozen=True).to(device)
    packing.enable(reward_model.lm_backbone)
    prepare(reward_model.lm_backbone, args)
    # [T37] The post with the truncated summary.   ppo.py#L635-L641
    return models.response_scorer(reward_model, ids.pad, rows=args.ppo.local_rollout_batch_size)


def write_evaluation(run: Run, name: str, rows: list[dict[str, Any]]) -> None:
    """Write <name>.jsonl in the run's folder, on the main process."""
    if run.is_main:
        (run.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def save_models(
    folder: Path,
    actor_critic: ActorCritic,
    adapters: nn.Module | None,
    tokenizer: PreTrainedTokenizerBase,
    args: Args,
    weights: bool = True,
) -> None:
    """Save policy and critic, both as ordinary models; their weights only if asked for."""
    # They open with the library.   ppo.py#L842-L861
    info = {
        "base_model": args.base_model,
        "task": dataclasses.asdict(args.task),
        "monitor": args.rewards.monitor,
        "function": args.rewards.function,
        "reward_model": args.rewards.trained_model,
        "label": args.rewards.label,
    }
    models.save_policy_and_critic(
        folder,
        actor_critic.lm_backbone,
        actor_critic.critic,
        adapters,
        tokenizer,
        info=info,
        trust_remote_code=args.trust_remote_code,
        weights=weights,
    )


if __name__ == "__main__":
    run_script(lambda: train(parse_args(PRESETS, description=__doc__)))
