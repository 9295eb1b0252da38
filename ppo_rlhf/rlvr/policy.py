"""PPO, GRPO and their relatives with verifiable rewards: chapter 3.

A language model (the policy) solves problems, and a verifier decides whether a response is correct. Reinforcement
learning makes correct responses likelier, and a penalty on the KL divergence may keep the policy near the model that
it started from (the reference). The main differences from chapter 2: the score comes from a rule, not from a model,
and is on the last token, not on the step after it; a problem may get several responses, a group, whose mean takes the
place of the critic (in chapter 1, a group is something else: a slice of the batch that is whitened together);
advantages are computed and whitened once, for the whole batch; learning rates are constant; gradients are clipped.
Each update does eight things, the steps of `train()` below:

    1. draw problems
    2. generate n responses to each
    3. log-probs and values of the responses, log-probs of the reference
    4. score: verifiers, punishments of responses that do not end or are too long
    5. per-token rewards: KL penalty on every token, score on the last
    6. advantages, by one of ESTIMATORS, such as gae (PPO), grpo or rloo, and returns
    7. epochs over minibatches: one of six losses, one of four ways to aggregate it
    8. adapt the KL coefficient and log

`train()` has all steps, and `ppo_update()` below it step 7; the functions of steps 1 to 6 follow in this order, but
for step 3, which is in rlvr/networks.py; step 8 is in rlvr/metrics.py. The arguments are in rlvr/arguments.py, the
formulas of steps 5 to 7 and the tensors that steps hand on in rlvr/algebra.py, problems in rlvr/problems.py,
verifiers in rlvr/rewards.py, rewards of a solution's lines in rlvr/steps.py. Logs are those of `train_policy.py`;
checkpoints also hold groups that are left over and the sampler's tensors: see `Run`.
rlvr/asynchronous.py and rlvr/tools.py run this loop with another `Sampler`. small/grpo.py is one setting of this
script in a few lines; read it first.

Marks like [V33] name an implementation detail. The original is verl-project/verl at commit b178a3c; files and lines
next to marks are the original's. See docs/reference.

    python ppo_rlhf/rlvr/policy.py --preset sums                # no network: a world of word problems, in minutes
    python ppo_rlhf/rlvr/policy.py --preset gsm8k-grpo --ppo.advantage rloo
    accelerate launch --num_processes 8 ppo_rlhf/rlvr/policy.py --preset gsm8k --ppo.local_micro_batch_size 8
    python ppo_rlhf/rlvr/policy.py --resume runs/<run>          # resume after an interruption
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import tqdm
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf import train_policy
from ppo_rlhf.rlvr import arguments, metrics as rlvr_metrics, problems, steps as rlvr_steps
from ppo_rlhf.rlvr.algebra import (
    ESTIMATORS,
    Rollout,
    aggregate,
    compute_rewards,
    kl_estimate,
    lower_clip_range,
    response_mask,
    scores_differ,
    token_losses,
    value_losses,
    whiten,
)
from ppo_rlhf.rlvr.arguments import PRESETS, Args, PpoArgs, RewardsArgs
from ppo_rlhf.rlvr.networks import ActorCritic, Reference, load_networks, save_models
from ppo_rlhf.rlvr.rewards import is_right, load_verifier, overlong_punishment, token_scores_of
from ppo_rlhf.tldr import classifiers, models, packing
from ppo_rlhf.tldr.policy import punish_missing_eos, write_evaluation
from ppo_rlhf.tldr.responses import draw_minibatches, generate_until
from ppo_rlhf.tldr.shares import widened
from ppo_rlhf.train_policy import (
    AdaptiveKLController,
    InputError,
    add,
    average_gradients,
    checked,
    episode_noise,
    few_rows_at_a_time,
    float64_device,
    input_errors,
    make_accelerator,
    parse_args,
    run_script,
)
from ppo_rlhf.train_reward import prepare

MAY_CHANGE = train_policy.MAY_CHANGE | {"ppo.share_prefixes"}
MOST_ROUNDS = 10  # of generation in an update; groups that never differ would fill no batch

# ---- Train -----------------------------------------------------------------------------------------------------


def train(args: Args, sampler: Sampler | None = None, timestamp: int | None = None) -> Path:
    """Train a policy, and a critic if the estimator has one; return the folder models/<run>/policy, on every process.

    sampler: who writes the responses; None: the policy. timestamp: ends the run's name, if another run shares it.
    Raises InputError, a ValueError: on bad arguments before anything is written; later if a number is impossible, or
    if a disk or a verifier fails.
    """
    args = checked(args)
    accelerator = make_accelerator(args.dtype)
    device = accelerator.device
    task, ppo, shaping = args.task, args.ppo, args.rewards
    sizes = arguments.ppo_sizes(args, accelerator.num_processes)
    n = ppo.samples_per_prompt
    rank = accelerator.process_index
    mine = slice(rank * sizes.local_batch, (rank + 1) * sizes.local_batch)  # this process's rows of a batch

    tokenizer = models.load_tokenizer(args.base_model, args.trust_remote_code)
    read_problems = partial(
        problems.read_problems, task, tokenizer, verifier=shaping.verifier, keep_rows=shaping.has_functions
    )
    train_problems = read_problems("train")
    held_out = read_problems("test", args.eval_problems)
    arguments.check_problems(train_problems, sizes)
    actor_critic, reference, adapters = load_networks(args, tokenizer, device)
    ids = problems.task_ids(task, tokenizer, actor_critic.lm_backbone.generation_config)
    sources = load_sources(args, tokenizer, ids, train_problems, device)
    source_weights = [weight for _, weight in sources.values()]
    # [V73] AdamW, with constant learning rates and PyTorch's epsilon of 1e-8; policy and critic each have theirs.
    rates = {actor_critic.lm_backbone: ppo.lr, actor_critic.critic: ppo.critic_lr}
    param_groups = [
        {"params": [p for p in network.parameters() if p.requires_grad], "lr": lr}
        for network, lr in rates.items()
        if network
    ]
    optimizer = torch.optim.AdamW(param_groups, betas=(0.9, ppo.beta2), weight_decay=ppo.weight_decay, fused=True)
    needs_exact_kl = shaping.kl_estimator == "full"  # in the reward
    adaptive_kl = shaping.adaptive_kl
    controller = AdaptiveKLController(shaping.reward_kl, adaptive_kl.target, adaptive_kl.horizon)

    sampler = sampler or Sampler()
    run = Run(args, accelerator, dataclasses.asdict(sizes), timestamp, sampler)
    run.try_to_save(lambda folder: save_models(folder, actor_critic, adapters, tokenizer, args, weights=False))
    state = {"step": 0, "kl_coef": controller.value, "rounds": 0, "evaluation": {}}
    state = run.resume(actor_critic, optimizer, state, total=sizes.updates)
    controller.value = state["kl_coef"]
    rounds = state["rounds"]  # of generation, since the run began
    evaluation = state["evaluation"]  # the newest
    surplus = run.surplus  # with filter_groups, what the last batch has left over
    sampler.begin(
        args,
        actor_critic.lm_backbone,
        tokenizer,
        ids,
        train_problems,
        accelerator,
        rounds=rounds,
        stored=run.of_sampler,
    )
    run.open_logs(state["step"], config={})

    updates = range(state["step"], sizes.updates)
    seconds = 0.1 if sys.stderr.isatty() else 30.0  # between two changes of the bar; a log file gets few
    bar = tqdm(updates, desc="RLVR", initial=state["step"], total=sizes.updates, mininterval=seconds)
    for update in bar:
        sampler.begin_update(update)
        with torch.no_grad(), run.checkpoint_if_it_fails(actor_critic, optimizer, state):
            if args.eval_interval and update % args.eval_interval == 0:  # metrics repeat the newest result
                found, rows = rlvr_metrics.evaluate(
                    args, held_out, sampler.respond, tokenizer, ids, accelerator, with_samples=update == 0
                )
                evaluation = evaluation | found
                if update == 0:
                    write_evaluation(run, "evaluation_before", rows)

            generated: list[Rollout] = []  # by this process, for this update
            # Without filter_groups, there is one round, of this process's rows. With it, groups whose scores differ
            # are gathered from all processes, round after round, until the batch is full.
            kept = [surplus] if surplus else []
            wanted = sizes.batch if ppo.filter_groups else sizes.local_batch
            while sum(len(each.mask) for each in kept) < wanted:
                check_rounds(generated, kept, wanted)
                # 1. Draw problems. Every process draws the whole round and takes its rows, whole groups.
                draw = draw_problems(args, train_problems, ids.pad, rounds)
                inds, groups, queries, uniforms = (rows[mine] for rows in draw)
                queries, uniforms = queries.to(device), uniforms.to(float64_device(device))

                # 2. Generate responses, each up to its first stop id: (local_batch, response_length), as all that
                #    follows, unless a comment says otherwise. All responses to a problem are a group.
                responses, sampler_logprobs = sampler.sample(rounds, queries, uniforms, task.temperature)
                # [V10] [V11] What is outside of the mask, even NaN, has no effect.
                in_response, stopped = response_mask(responses, ids.stops)  # stopped: (local_batch,)
                # [V101] Text that a tool has put into a response has no log-prob. It is context for later tokens, but
                #        in no loss, no KL and no advantage. Nor is the padding of a response that a tool broke off.
                written = in_response & ~sampler_logprobs.isnan() & (responses != ids.pad)
                if ppo.advantage == "remax":
                    # [V41] Each prompt gets one more response, the greedy one. It is no episode. At that temperature,
                    #       any noise draws the likeliest token.   ray_trainer.py#L1404-L1443
                    greedy, _ = sampler.sample(
                        rounds, queries[::n], torch.full_like(uniforms[::n], 0.5), problems.GREEDY
                    )  # (local_batch / n, response_length)

                # 3. Compute log-probs and values, and the reference's log-probs.
                # [V76] [V82] Without a critic, the sampler's log-probs will do if it computes as training does. That
                #       saves an eighth of the time. Otherwise the policy reads what was sampled, just as in step 7,
                #       so the ratio starts at 1. The sampler's are kept besides.   dp_actor.py#L543, dp_actor.py#L590
                query_responses = torch.cat([queries, responses], dim=1)  # (local_batch, context + response_length)
                if sampler.computes_as_training and not actor_critic.critic and not needs_exact_kl:
                    logprobs = sampler_logprobs.masked_fill(~written, 0)
                    values = exact_kl = torch.zeros_like(logprobs)
                else:
                    logprobs, _, values, exact_kl = packing.by_length(
                        lambda tokens, responses, mask: actor_critic(
                            tokens, responses, mask, ids.pad, reference if needs_exact_kl else None
                        ),
                        query_responses,
                        responses,
                        written,
                        model=actor_critic,
                        pad_id=ids.pad,
                        rows=ppo.local_micro_batch_size,
                    )
                ref_logprobs = logprobs.clone()  # a copy, because the file of a checkpoint holds no tensor twice
                if reference:
                    ref_logprobs = packing.by_length(
                        lambda tokens, responses, mask: reference.logprobs(tokens, responses, mask, ids.pad),
                        query_responses,
                        responses,
                        written,
                        model=reference.lm_backbone,
                        pad_id=ids.pad,
                        rows=ppo.local_micro_batch_size,
                    )

                # 4. Score. A verifier judges the whole text, so a response has one score: raw_scores is
                #    (local_batch,), and parts has a column for each source. Rewards of a solution's lines
                #    (--rewards.steps) belong to single tokens: token_scores has these parts of the scores.
                parts, raw_scores, token_scores = score_responses(
                    sources, train_problems, inds, queries, responses, tokenizer, ids, written
                )
                mask = written & raw_scores.isfinite().unsqueeze(1)  # what cannot be scored has no token that counts
                lengths = (responses != ids.pad).sum(1)
                scores = punish(raw_scores.nan_to_num(0), lengths, stopped, shaping, task.response_length)
                baselines = torch.zeros_like(scores)
                if ppo.advantage == "remax":
                    _, raw_baselines, _ = score_responses(
                        sources, train_problems, inds[::n], queries[::n], greedy, tokenizer, ids, greedy != ids.pad
                    )  # (local_batch / n,)
                    _, greedy_stopped = response_mask(greedy, ids.stops)
                    lengths = (greedy != ids.pad).sum(1)
                    baselines = punish(
                        raw_baselines.nan_to_num(0), lengths, greedy_stopped, shaping, task.response_length
                    )
                    baselines = baselines.repeat_interleave(n)
                    mask = mask & raw_baselines.isfinite().repeat_interleave(n).unsqueeze(1)
                rollout = Rollout(
                    query_responses=query_responses,
                    written=written,
                    mask=mask,
                    loss_mask=mask.clone(),
                    logprobs=logprobs,
                    sampler_logprobs=sampler_logprobs.nan_to_num(0),
                    ref_logprobs=ref_logprobs,
                    exact_kl=exact_kl,
                    values=values.clone(),
                    weights=torch.ones_like(logprobs),
                    parts=parts.nan_to_num(0),
                    token_scores=token_scores,
                    right=is_right(parts[:, 0], shaping.verifier),
                    raw_scores=raw_scores.nan_to_num(0),
                    scores=scores,
                    baselines=baselines,
                    stopped=stopped,
                    problems=inds.to(device),
                    groups=groups.to(device),
                    age=torch.zeros_like(groups).to(device),
                )
                rounds += 1
                generated.append(rollout)
                kept.append(groups_that_differ(rollout, accelerator) if ppo.filter_groups else rollout)
            rollout = joined(kept, ids.pad)
            if ppo.filter_groups:
                # [V78] What is left over comes first in the next batch, in its order.
                surplus = rollout.rows(slice(sizes.batch, None))
                surplus = dataclasses.replace(surplus, age=surplus.age + 1)
                rollout = rollout.rows(mine)

            # 5. Compute per-token rewards. The score judges the whole response, so it is on the last token, except
            #    for the rewards of lines. The KL divergence is a sum over tokens, so each pays for its own part.
            rewards, non_score_rewards, kl = token_rewards(rollout, controller.value, shaping.kl_estimator)
            rollout = dataclasses.replace(rollout, rewards=rewards, non_score_rewards=non_score_rewards, kl=kl)

            # 6. Compute advantages and returns: how much better did it go than expected? A critic learns what to
            #    expect from the text so far. Without one, the mean score of the group shows how well the policy
            #    usually does on this problem. That is good enough where the score comes only at the end.
            batch, sampler_metrics = sampler.correct(rollout)  # the same, if the policy has sampled it
            # An exact KL costs the same whichever token is drawn, so it says nothing about the token.
            own_kl = non_score_rewards if args.has_exact_baseline else None
            raw_advantages, returns = compute_advantages(batch, ppo, source_weights, own_kl)
            advantages = raw_advantages
            if ppo.whitens:
                reduce = partial(accelerator.reduce, reduction="sum")
                advantages = whiten(raw_advantages, batch.mask, keep_mean=False, reduce=reduce)
            batch = dataclasses.replace(batch, advantages=advantages, returns=returns)

        # 7. Optimise, in epochs over minibatches. The ratio says how much more likely a token has become since it was
        #    sampled. The advantages were measured under the old policy and mean less the further the policy moves
        #    away from it. So the loss is clipped: beyond the clip range, nothing is gained by moving on.
        # [V75] A minibatch has episodes, not groups; seed, update and epoch settle them.   ray_trainer.py#L1455
        minibatches = draw_minibatches(args.seed, update, ppo.noptepochs, mine, ppo.nminibatches)
        traced = args.trace_interval and (update % args.trace_interval == 0 or update + 1 == sizes.updates)
        passes = {} if traced else None
        started = time.monotonic()
        steps = ppo_update(
            actor_critic,
            optimizer,
            batch,
            minibatches,
            args,
            accelerator,
            pad_id=ids.pad,
            reference=reference,
            # [V71] In the first critic_warmup updates, the policy does not move at all.   ray_trainer.py#L1604
            policy_learns=update >= ppo.critic_warmup,
            correct_losses=sampler.correct_losses,
            passes=passes,
        )
        training = time.monotonic() - started

        # 8. Adapt the KL coefficient and log.
        sampled = joined(generated or [rollout], ids.pad)
        metrics = rlvr_metrics.update_metrics(
            args, sampled, rollout, batch, steps, [*sources], sampler.objectives(sampled), accelerator
        )
        metrics |= sampler_metrics | evaluation
        episode = rounds * sizes.batch
        metrics["objective/kl_coef"] = controller.value
        metrics["lr"] = ppo.lr
        metrics["epoch"] = episode / n / len(train_problems)
        metrics["episode"] = episode  # all that were generated
        metrics["train/used_episodes"] = (update + 1) * sizes.batch
        metrics["train/rounds"] = len(generated)  # 0 if what was left over filled the batch
        metrics["eps"] = episode / run.seconds()
        metrics["time"] = metrics["time/from_scratch"] = run.seconds()
        metrics["time/training"] = training
        rlvr_metrics.check_update(metrics, update, args.dtype)
        run.log(update, metrics)
        bar.set_postfix_str(f"correct {metrics['objective/verifiable_correct_rate']:.3f}")
        if args.log_interval and update % args.log_interval == 0:
            run.log_samples(update, rlvr_metrics.sample_rows(batch, train_problems, tokenizer, ids, n))
        if traced:
            with torch.no_grad():  # what the networks say of the responses after they have learned from them
                new_logprobs, entropies, new_values, _ = packing.by_length(
                    lambda tokens, responses, mask: actor_critic(tokens, responses, mask, ids.pad),
                    rollout.query_responses,
                    rollout.responses,
                    rollout.mask,
                    model=actor_critic,
                    pad_id=ids.pad,
                    rows=ppo.local_micro_batch_size,
                )
            now = {"new_logprobs": new_logprobs, "entropies": entropies, "new_values": new_values}
            now["raw_advantages"] = raw_advantages
            tokens, episodes = rlvr_metrics.trace_numbers(args, rollout, batch, now, [*sources], ids.pad)
            answers = [train_problems.answers[i] for i in rollout.problems[: args.trace_episodes].tolist()]
            passes["minibatches"] = minibatches
            contexts = rollout.query_responses[:, : -task.response_length]
            run.write_trace(
                update, tokenizer, contexts, tokens=tokens, episodes=episodes, epochs=passes, answer=answers
            )
        # [V53] [V54] The controller sees the KL averaged over all processes. It is the sum over a response, not the
        #       mean over tokens.   core_algos.py#L152-L173
        controller.update(metrics.get("objective/kl", 0.0), sizes.batch)
        state = {"step": update + 1, "kl_coef": controller.value, "rounds": rounds, "evaluation": evaluation}
        run.surplus = surplus
        stopping = run.told_to_stop()
        if stopping or update + 1 == sizes.updates or (update + 1) % (args.save_interval or sizes.updates) == 0:
            run.save_checkpoint(actor_critic, optimizer, state)
        if stopping:
            accelerator.print(f"stopped after update {update + 1}; resume with --resume {run.folder}")
            sys.exit(0)

    run.stop_at_once()
    with torch.no_grad(), run.checkpoint_if_it_fails(actor_critic, optimizer, state):
        evaluation, rows = rlvr_metrics.evaluate(
            args, held_out, sampler.respond, tokenizer, ids, accelerator, with_samples=True
        )
    write_evaluation(run, "evaluation", rows)
    if accelerator.is_main_process:
        with input_errors(f"{run.models} cannot be saved; the checkpoints are kept"):
            save_models(run.models, actor_critic, adapters, tokenizer, args)
    names = ["scores", "kl"] if reference else ["scores"]
    left_out = {name: getattr(train_problems, name) for name in ("too_long", "unscorable", "empty")}
    run.finish("policy", **evaluation, **run.last_means(*names), **left_out)
    if accelerator.is_main_process:
        rlvr_metrics.report(run, evaluation, rows)
    return run.models / "policy"


# (losses, new_logprobs, rollout) -> the losses, corrected, and more numbers of tokens, under the names of their means
CorrectLosses = Callable[[Tensor, Tensor, Rollout], tuple[Tensor, dict[str, Tensor]]]


def ppo_update(
    actor_critic: ActorCritic,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    minibatches: Tensor,
    args: Args,
    accelerator: Accelerator,
    *,
    pad_id: int,
    reference: Reference | None = None,
    policy_learns: bool = True,
    correct_losses: CorrectLosses | None = None,
    passes: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Step 7: all epochs over one batch.

    optimizer: of the parameters of both networks. rollout: this process's episodes, with query_responses, loss_mask,
    logprobs and advantages; with a critic, values and returns; ref_logprobs if the loss has a KL, weights and age if
    they are not 1 and 0, right for nll_coef. minibatches: rows of it, (epochs, nminibatches, local_minibatch).
    reference: for the exact KL in the loss. policy_learns: otherwise only the critic moves. passes: a dictionary that
    gets what each epoch computed of each episode, (epochs, rows, response_length), and the divisors of the losses,
    (epochs, nminibatches).

    Returns numbers of the optimiser steps, (steps,): gradient norms, and of everything else this process's share; the
    shares of all processes add up.
    """
    ppo, (kl_coef, kl_name) = args.ppo, args.rewards.loss_kl
    reduce = partial(accelerator.reduce, reduction="sum")
    lengths = packing.count_tokens(rollout.query_responses, pad_id)  # (rows,), on the CPU as minibatches
    needs_exact_kl = kl_coef and kl_name == "full"
    has_critic = actor_critic.critic is not None
    if passes is not None:
        names = {"new_logprobs": True, "new_values": has_critic, "exact_kl": needs_exact_kl}
        shape = (len(minibatches), *rollout.logprobs.shape)
        passes |= {name: rollout.logprobs.new_zeros(shape) for name, exists in names.items() if exists}
        counted = ("tokens", "sequences", "episodes", "right_tokens")
        passes |= {name: torch.zeros(minibatches.shape[:2], dtype=torch.long) for name in counted}
    steps = []  # what is logged of each optimiser step
    for epoch, b_inds in enumerate(minibatches):
        for number, mb_inds in enumerate(b_inds):  # (local_minibatch,)
            mb = rollout.rows(mb_inds.to(rollout.logprobs.device))
            counts = minibatch_counts(mb.loss_mask, reduce)
            right_tokens = 0
            if ppo.nll_coef:
                right_tokens = minibatch_counts(mb.loss_mask & mb.right.unsqueeze(1), reduce)["tokens"]
            mean_over_tokens = partial(aggregate, mode="token-mean", tokens=counts["tokens"])
            stats: dict[str, Tensor] = {}
            optimizer.zero_grad()
            # [V77] A micro-batch has rows of similar length: little padding, and the same sum.
            for tokens, rows in packing.micro_batches(
                actor_critic,
                lengths[mb_inds],
                mb.query_responses,
                torch.arange(len(mb_inds)),
                pad_id=pad_id,
                rows=ppo.local_micro_batch_size,
            ):
                part = mb.rows(rows)  # (micro_batch, response_length), as all that follows
                mask = part.loss_mask
                total = partial(aggregate, mask=mask, mode=ppo.loss_aggregation, **counts)
                new_logprobs, entropies, new_values, exact_kl = actor_critic(
                    tokens, part.responses, mask, pad_id, reference if needs_exact_kl else None
                )
                losses, clipped, clipped_below = token_losses(
                    new_logprobs,
                    part.logprobs,
                    part.advantages,
                    mask,
                    ppo.loss,
                    low=lower_clip_range(ppo.loss, ppo.cliprange_low),
                    high=ppo.cliprange_high,
                    dual_clip=ppo.dual_clip,
                    trust_region=ppo.trust_region,
                )
                numbers = {"policy/clipfrac_avg": clipped, "policy/clipfrac_low_avg": clipped_below}
                # [V83] The weights are those of the policy that this update began with.   core_algos.py#L1237
                weights = 1 if part.weights is None else part.weights
                losses = weights * losses
                if correct_losses:
                    losses, more = correct_losses(losses, new_logprobs, part)
                    numbers |= more
                # [V49] [V68] Losses, entropy and KL have the same divisor. They are logged without coefficients.
                #       losses.py#L158-L172
                loss = total(losses)
                entropy = total(entropies)
                add(stats, "loss/policy_avg", loss)
                add(stats, "loss/entropy_avg", entropy)
                if kl_coef:
                    kl = kl_in_loss(new_logprobs, part, exact_kl, args.rewards)
                    if kl_name != "full":  # the exact KL does not depend on which token was drawn
                        kl = weights * kl
                    add(stats, "loss/kl_avg", total(kl))
                    loss = loss + kl_coef * total(kl)
                loss = loss - ppo.entropy_coef * entropy
                if ppo.nll_coef:
                    # [V108] The mean is over the tokens of correct responses in the minibatch. The weights above are
                    #        not in it.
                    right_mask = mask & part.right.unsqueeze(1)
                    nll = aggregate(-new_logprobs, right_mask, "token-mean", tokens=right_tokens)
                    add(stats, "loss/nll_avg", nll)
                    add(stats, "right_tokens", right_mask.sum())
                    loss = loss + ppo.nll_coef * nll
                add(stats, "objective/loss", loss)
                if has_critic:
                    v_losses, v_clipped = value_losses(
                        new_values, part.values, part.returns, mask, ppo.cliprange_value
                    )
                    add(stats, "loss/value_avg", total(v_losses))
                    numbers["val/clipfrac_avg"] = v_clipped
                    # Policy and critic share no parameter, so the sum of their losses has the gradient of each.
                    loss = loss + total(v_losses)
                (loss * accelerator.num_processes).backward()  # gradients will be averaged over processes

                log_ratio = widened((new_logprobs.detach() - part.logprobs).masked_fill(~mask, 0))
                numbers["policy/kl_old_new"] = -log_ratio
                numbers["policy/approxkl_avg"] = 0.5 * log_ratio**2
                numbers["policy/entropy_avg"] = entropies
                numbers["val/ratio"] = log_ratio.exp()
                numbers["squared_ratio_gap"] = gap = (log_ratio.exp() - 1) ** 2
                # Groups that are left over were sampled by another policy, so their ratio does not start at 1.
                numbers["squared_ratio_gap of new"] = gap if part.age is None else gap * (part.age == 0).unsqueeze(1)
                for name, values in numbers.items():
                    add(stats, name, mean_over_tokens(widened(values), mask))
                add(stats, "tokens", mask.sum())
                if passes is not None:
                    found = {"new_logprobs": new_logprobs, "new_values": new_values, "exact_kl": exact_kl}
                    for name in found.keys() & passes.keys():
                        passes[name][epoch, mb_inds[rows]] = found[name].detach()
            average_gradients(actor_critic)
            # [V72] The gradients of critic and policy are each clipped, over the whole minibatch.
            #       dp_critic.py#L134-L151
            for name, network in (("policy", actor_critic.lm_backbone), ("value", actor_critic.critic)):
                if network:
                    norm = nn.utils.clip_grad_norm_(network.parameters(), ppo.max_grad_norm)
                    stats[f"{name}/grad_norm"] = norm
            if not policy_learns:
                for parameter in actor_critic.lm_backbone.parameters():
                    parameter.grad = None  # a gradient of 0 would not stop AdamW's moments and weight decay
            optimizer.step()
            steps.append(stats)
            if passes is not None:
                for name, count in (counts | {"right_tokens": right_tokens}).items():
                    if name in passes:
                        passes[name][epoch, number] = count
    return {name: torch.stack([step[name] for step in steps]) for name in steps[0]}


def minibatch_counts(mask: Tensor, reduce: Callable[[Tensor], Tensor]) -> dict[str, int]:
    """The divisors of aggregate for a minibatch. mask: of this process's rows. reduce: sums over all processes."""
    # [V60] [V61] These are counts of the whole minibatch on all processes, so that the weight of a token does not
    #       depend on its micro-batch and process.   dp_actor.py#L575-L578, dp_critic.py#L240-L245
    numbers = torch.stack([mask.sum(), mask.any(1).sum(), mask.new_tensor(len(mask), dtype=torch.long)])
    tokens, sequences, episodes = (int(number) for number in reduce(numbers).tolist())
    return {"tokens": tokens, "sequences": sequences, "episodes": episodes, "length": mask.shape[1]}


def kl_in_loss(new_logprobs: Tensor, part: Rollout, exact_kl: Tensor, shaping: RewardsArgs) -> Tensor:
    """The KL penalty of each token (micro_batch, response_length), without its coefficient."""
    _, name = shaping.loss_kl
    if name == "full":
        return exact_kl
    kl = kl_estimate(new_logprobs, part.ref_logprobs, mask=part.loss_mask, name=name)
    # [V50] The detached ratio keeps the estimate correct when the policy has moved. With k3+ this is the unbiased
    #       estimate of DeepSeek-V3.2.   core_algos.py#L1841-L1864
    ratio = torch.exp((new_logprobs.detach() - part.logprobs).masked_fill(~part.loss_mask, 0).clamp(-20, 20))
    return kl * ratio if name.endswith("+") else kl


# ---- Steps 1 and 2: problems, responses ------------------------------------------------------------------------


def draw_problems(
    args: Args, problem_set: problems.Problems, pad_id: int, round_number: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Step 1 for all processes: numbers of the problems, each n times, and of their groups, both (batch,); prompts
    (batch, context_length), padded on the left; random numbers for the tokens to be sampled (batch, response_length).

    round_number: rounds before this one, since the run began.
    """
    batch, n = args.ppo.batch_size, args.ppo.samples_per_prompt
    inds = problems.problems_of_batch(len(problem_set), batch // n, round_number, args.seed).repeat_interleave(n)
    groups = (round_number * batch + torch.arange(batch)) // n
    uniforms = episode_noise(args.seed, round_number, batch, args.task.response_length)
    return inds, groups, problem_set.batch(inds.tolist(), pad_id), uniforms


class Sampler:
    """Who writes the responses: here the policy itself, so that there is nothing to correct.

    It is a class only for the two other scripts of this chapter, which override its methods: in rlvr/tools.py a tool
    answers within responses, and in rlvr/asynchronous.py other processes sample with weights that may be older.
    """

    def begin(
        self,
        args: Args,
        lm_backbone: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        ids: problems.TaskIds,
        problem_set: problems.Problems,
        accelerator: Accelerator,
        *,
        rounds: int = 0,
        stored: dict[str, Tensor] | None = None,
    ) -> None:
        """Called once, before anything is sampled. rounds: made so far; stored: `tensors` of a checkpoint."""
        self.args, self.lm_backbone, self.tokenizer, self.ids = args, lm_backbone, tokenizer, ids
        self.problem_set, self.accelerator = problem_set, accelerator

    @property
    def computes_as_training(self) -> bool:
        """Whether its log-probs are those of the policy, in training arithmetic."""
        return self.args.dtype != "bfloat16"

    def begin_update(self, update: int) -> None:
        """Called before anything is sampled for an update."""

    # [V14] Only the stop ids of the model's generation config are used: no penalty, no top-k, no top-p.
    #       hf_rollout.py#L94
    def respond(self, contexts: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """The learner's own responses, with padding after the stop id, and their log-probs; NaN where a tool has
        written, 0 after the end. Evaluations call this, too.
        """
        ids = self.ids
        return generate_until(self.lm_backbone, contexts, uniforms, ids.pad, ids.vocab_size, temperature, ids.stops)

    def sample(
        self, round_number: int, contexts: Tensor, uniforms: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Responses to this process's rows of a round: here those of `respond`, a few rows at a time."""
        respond = partial(self.respond, temperature=temperature)
        return few_rows_at_a_time(respond, self.args.ppo.local_rollout_batch_size, contexts, uniforms)

    def correct(self, rollout: Rollout) -> tuple[Rollout, dict[str, float]]:
        """The batch as it is to be learned from, and metrics. Every process calls this."""
        return rollout, {}

    def correct_losses(self, losses: Tensor, new_logprobs: Tensor, rollout: Rollout) -> tuple[Tensor, dict]:
        """The policy's losses, corrected with what the newest policy says, and numbers of tokens to log."""
        return losses, {}

    def objectives(self, rollout: Rollout) -> dict[str, Tensor]:
        """More numbers of responses (rows,) to log."""
        return {}

    def tensors(self, step: int) -> dict[str, Tensor]:
        """For a checkpoint after so many updates: what `begin` needs to go on."""
        return {}


def check_rounds(generated: list[Rollout], kept: list[Rollout], wanted: int) -> None:
    """Raise an InputError if a batch is not full after MOST_ROUNDS of generation."""
    if len(generated) == MOST_ROUNDS:
        mean = torch.cat([each.raw_scores for each in generated]).mean()
        raise InputError(
            f"--ppo.filter_groups: {MOST_ROUNDS} rounds of generation did not fill a batch: only "
            f"{sum(len(each.mask) for each in kept)} of {wanted} episodes are in groups whose scores differ; the "
            f"mean score is {mean.item():.3f}"
        )


def groups_that_differ(rollout: Rollout, accelerator: Accelerator) -> Rollout:
    """Of the rows of all processes, those in groups whose raw scores differ. Every process must call this."""
    # [V78] The other groups have no signal.
    whole = Rollout(**{name: accelerator.gather(x.contiguous()) for name, x in rollout.tensors().items()})
    return whole.rows(scores_differ(whole.raw_scores, whole.mask.any(1), whole.groups))


def joined(rollouts: Sequence[Rollout], pad_id: int) -> Rollout:
    """All their rows, with padding before shorter queries."""
    width = max(each.query_responses.shape[1] for each in rollouts)
    tensors = {name: [getattr(each, name) for each in rollouts] for name in rollouts[0].tensors()}
    tensors["query_responses"] = [
        F.pad(tokens, (width - tokens.shape[1], 0), value=pad_id) for tokens in tensors["query_responses"]
    ]
    return Rollout(**{name: torch.cat(parts) for name, parts in tensors.items()})


# ---- Step 4: scores --------------------------------------------------------------------------------------------

# (prompts, texts, answers, columns, queries=, responses=, messages=) -> values (rows,), of which single tokens get
# (rows, response_length), or None: no token does; and its weight in the score
Source = tuple[Callable[..., tuple[Tensor, Tensor | None]], float]


def score_responses(
    sources: dict[str, Source],
    problem_set: problems.Problems,
    inds: Tensor,
    queries: Tensor,
    responses: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    ids: problems.TaskIds,
    written: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The value of each source (rows, sources); the weighted sum (rows,), NaN where one of them cannot say; and what
    single tokens get of this sum (rows, response_length).

    inds: numbers of the problems (rows,). written: (rows, response_length), the tokens of the policy.
    """
    texts = problems.to_texts(tokenizer, responses, ids)
    prompts, answers, columns = problem_set.known_of(inds)
    columns = problems.with_tokens(columns, responses, ids.pad, written)
    messages = [problem_set.messages[i] for i in inds]
    # [V23] [V18] Verifiers judge the response alone; the prompt may hold an example's answer.
    #       reward_manager/naive.py#L74-L91
    parts, token_scores = [], torch.zeros(responses.shape, dtype=torch.float64)
    for function, weight in sources.values():
        value, of_tokens = function(
            prompts, texts, answers, columns, queries=queries, responses=responses, messages=messages
        )
        parts.append(widened(value, responses.device))
        if of_tokens is not None:
            token_scores += weight * of_tokens
    parts = torch.stack(parts, 1)
    scores = parts @ parts.new_tensor([weight for _, weight in sources.values()])
    return parts, scores, token_scores.to(responses.device, parts.dtype)


def punish(
    raw_scores: Tensor, lengths: Tensor, stopped: Tensor, shaping: RewardsArgs, response_length: int
) -> Tensor:
    """Scores (rows,) after punishments of responses that do not end, or that come near the greatest length."""
    # [V24] The punishment comes after the sum.
    scores = punish_missing_eos(raw_scores, stopped, shaping.missing_stop, penalty=shaping.missing_stop_penalty)
    if shaping.overlong_buffer:
        scores = scores + overlong_punishment(lengths, response_length, shaping.overlong_buffer, factor=1.0)
    return scores


def load_sources(
    args: Args,
    tokenizer: PreTrainedTokenizerBase,
    ids: problems.TaskIds,
    problem_set: problems.Problems,
    device: torch.device,
) -> dict[str, Source]:
    """What scores, under its name, with its weight; the verifier first."""
    shaping = args.rewards

    def text_source(name: str, field: str) -> Callable[..., tuple[Tensor, Tensor]]:
        verifier = load_verifier(
            name,
            field,
            partial(problems.response_start, args.task),
            trial=problem_set.trial(tokenizer),
            why_not_tokens=args.ppo.why_not_tokens,
            on_all_processes=True,
        )

        def judge(*columns: list, responses: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
            values = verifier(*columns)
            return torch.tensor(values, dtype=torch.float64), token_scores_of(values, responses.shape[1])

        return judge

    def model_source(*columns: list, **rows: Any) -> tuple[Tensor, None]:
        scores = widened(score(**rows))  # (rows,)
        # Only functions of texts may say that a response cannot be scored.
        if not scores.isfinite().all():
            raise InputError("the reward model gives scores that are not finite; the run stops")
        return scores, None

    # [V117] Where a teacher judges the tokens, the verifier says which responses are correct, and that is all.
    sources = {"verifier": (text_source(shaping.verifier, "rewards.verifier"), 0.0 if shaping.teacher else 1.0)}
    if shaping.format:
        sources["format"] = text_source(shaping.format, "rewards.format"), 1.0
    if classifiers.is_foreign(shaping.trained_model):
        score = classifiers.load_scorer(args, tokenizer, ids.pad, device=device, dialogues=problem_set.messages)
    elif shaping.trained_model:
        length = args.task.prompt_length + args.task.response_length
        reward_model = models.load_scalar_model(args, "trained_model", tokenizer, length, frozen=True)
        packing.enable(reward_model.lm_backbone)
        prepare(reward_model.lm_backbone, args)
        reward_model.to(device)
        score = models.response_scorer(reward_model, ids.pad, rows=args.ppo.local_rollout_batch_size)
    if shaping.trained_model:
        sources["reward_model"] = model_source, shaping.trained_weight
    if shaping.steps:
        sources["steps"] = rlvr_steps.load_judge(args, tokenizer, ids, problem_set, device), shaping.trained_weight
    return sources


# ---- Steps 5 and 6: rewards, advantages ------------------------------------------------------------------------


def token_rewards(rollout: Rollout, kl_coef: float, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Step 5: rewards, the KL penalty in them, and the KL, as compute_rewards gives them. name: of the estimate."""
    # [V88] The KL is that of the policy that learns, although another may have sampled.
    ref_logprobs = rollout.ref_logprobs
    if name == "full":
        # The exact KL takes the place of k1, which is logprobs - ref_logprobs.
        ref_logprobs, name = rollout.logprobs - rollout.exact_kl, "k1"
    return compute_rewards(
        rollout.scores,
        rollout.logprobs,
        ref_logprobs,
        rollout.mask,
        kl_coef,
        name,
        token_scores=rollout.token_scores,
    )


def compute_advantages(
    rollout: Rollout,
    ppo: PpoArgs,
    source_weights: Sequence[float] = (),
    baseline: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Step 6: advantages, not yet whitened, and returns, 0 without a critic.

    source_weights: of the sources of the score, which only gdpo needs. baseline: to be subtracted; None: nothing.
    """
    advantages, returns = ESTIMATORS[ppo.advantage](
        rollout.rewards,
        # [V32] This is not loss_mask: a token that is left out of the loss still counts here.
        rollout.mask,
        rollout.groups,
        values=rollout.values,
        baselines=rollout.baselines,
        parts=rollout.parts,
        weights=source_weights,
        gamma=ppo.gamma,
        lam=ppo.lam,
        critic_lam=ppo.critic_lam,
        lam_alpha=ppo.lam_alpha,
    )
    if baseline is not None:
        advantages = advantages - baseline
    return advantages, torch.zeros_like(advantages) if returns is None else returns


# ---- Plumbing: checkpoints -------------------------------------------------------------------------------------


class Run(train_policy.Run):
    """A run whose checkpoints also hold groups that are left over, and what the sampler needs."""

    surplus: Rollout | None = None
    of_sampler: dict[str, Tensor] | None = None  # its `tensors`, from the checkpoint

    def __init__(
        self, args: Args, accelerator: Accelerator, sizes: dict[str, int], timestamp: int | None, sampler: Sampler
    ):
        super().__init__(args, accelerator, sizes, timestamp)
        self.sampler = sampler

    def save_checkpoint(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        self.step = state["step"]
        super().save_checkpoint(model, optimizer, state)

    def training_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        surplus = self.surplus.tensors() if self.surplus else {}
        tensors = {f"surplus.{name}": tensor for name, tensor in surplus.items()}
        tensors |= {f"sampler.{name}": tensor for name, tensor in self.sampler.tensors(self.step).items()}
        return super().training_state(model, optimizer) | tensors

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
        super().restore(model, optimizer, tensors)
        parts: dict[str, dict[str, Tensor]] = {"surplus": {}, "sampler": {}}
        for name, tensor in tensors.items():
            part, _, key = name.partition(".")
            if part in parts:
                parts[part][key] = tensor
        self.of_sampler = parts["sampler"]
        if parts["surplus"]:
            device = self.accelerator.device
            self.surplus = Rollout(**{name: tensor.to(device) for name, tensor in parts["surplus"].items()})


if __name__ == "__main__":
    run_script(lambda: train(parse_args(PRESETS, description=__doc__, may_change=MAY_CHANGE)))
