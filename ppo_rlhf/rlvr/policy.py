"""PPO, GRPO and their relatives with verifiable rewards: chapter 3.

A language model (the policy) solves problems, and a verifier decides whether a response is correct. Reinforcement
learning makes correct responses likelier, and a penalty on the KL divergence may keep the policy near the model that
it started from (the reference). The main differences from chapter 2: the score comes from a rule, not from a model;
a problem may get several responses, a group, whose mean takes the place of the critic; generation stops at a stop id.
In chapter 1, a group is something else: a slice of the batch that is whitened together.
Each update does eight things, the steps of `train()` below:

    1. draw problems
    2. generate n responses to each
    3. log-probs and values of the responses, log-probs of the reference
    4. score: verifiers, punishments of responses that do not end or are too long
    5. per-token rewards: KL penalty on every token, score on the last
    6. advantages, by one of ESTIMATORS, and returns
    7. epochs over minibatches: one of six losses, one of four ways to aggregate it
    8. adapt the KL coefficient and log

The arguments are in rlvr/arguments.py, the formulas of steps 5 to 7 in rlvr/algebra.py, and with them the tensors
that the steps hand to each other. Here the functions of the algorithm come after `train()` in its order, then traces,
loading and saving. rlvr/asynchronous.py and rlvr/tools.py run this loop with another step 2. small/grpo.py is one
setting of this script in a few lines; read it first.

Marks like [V33] name an implementation detail. The original is verl-project/verl at commit b178a3c; files and lines
next to marks are the original's. See docs/reference.

    python ppo_rlhf/rlvr/policy.py --preset sums                # no network: a world of word problems, in minutes
    python ppo_rlhf/rlvr/policy.py --preset gsm8k-grpo --ppo.advantage rloo
    accelerate launch --num_processes 8 ppo_rlhf/rlvr/policy.py --preset gsm8k --ppo.local_micro_batch_size 8
    python ppo_rlhf/rlvr/policy.py --resume runs/<run>          # resume after an interruption
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.lib import checkpoints, command_line, errors, layers, pretrained, processes, run, traces
from ppo_rlhf.lib.errors import InputError, NumericalError, flag
from ppo_rlhf.rlvr import (
    algebra,
    arguments as rlvr_arguments,
    metrics as rlvr_metrics,
    problems,
    rewards as verifiers,
)
from ppo_rlhf.rlvr.algebra import Batch, EntropyController, Reweigh, Rollout, response_mask
from ppo_rlhf.rlvr.arguments import PRESETS, Args, PpoArgs, RewardsArgs, Setup, Source
from ppo_rlhf.tldr import chat_templates, classifiers, models, packing
from ppo_rlhf.tldr.responses import draw_minibatches, generate_until, read_before_responses
from ppo_rlhf.train_policy import (
    AdaptiveKLController,
    average_gradients,
    episode_noise,
    few_rows_at_a_time,
    read_scalar,
    read_tokens,
    scaled_logits,
)
from ppo_rlhf.train_reward import RewardModel

# ---- Train -----------------------------------------------------------------------------------------------------


def train(args: Args, new_sampler: Callable[[Setup, ActorCritic], Sampler] | None = None) -> Path:
    """Train a policy, and a critic if the estimator has one; return the folder models/<run>/policy, on every process.

    new_sampler: makes what samples the responses; None: Sampler. Raises InputError, a ValueError: on bad arguments
    before anything is written; later if a disk or a verifier fails.
    """
    setup, actor_critic, reference = load(args)
    args, ppo, sizes, rank = setup.args, setup.args.ppo, setup.sizes, setup.accelerator.process_index
    reduce = partial(setup.accelerator.reduce, reduction="sum")
    sampler = (new_sampler or Sampler)(setup, actor_critic)
    optimizers = make_optimizers(actor_critic, ppo)
    this_run, progress = start_run(setup, actor_critic, optimizers)
    pool, controller = progress.pool, progress.controller
    rows = slice(rank * sizes.local_batch, (rank + 1) * sizes.local_batch)  # this process's episodes

    with sampler.at_work(this_run, progress):
        for number in this_run.updates("RLVR", "episodes", first=progress.first_update, total=sizes.updates):
            sampler.begin_update(number)
            if args.eval_interval and number % args.eval_interval == 0:  # metrics repeat the newest result
                with this_run.saved_if_it_fails(), actor_critic.sampling():
                    progress.evaluation |= rlvr_metrics.evaluate(setup, sampler.respond, with_samples=number == 0)[0]

            with this_run.saved_if_it_fails(), actor_critic.sampling():
                while not pool.is_full():  # one round is enough, unless groups are filtered
                    # 1. Draw problems. Every process draws the whole round and takes its rows.
                    draw = draw_problems(setup, pool.rounds, rank)

                    # 2. Generate responses, each up to its first stop id. All responses to a problem are a group.
                    samples = sampler.sample(draw)

                    # 3. Read the responses as training will: log-probs and values, and the reference's log-probs.
                    # 4. Score them. A verifier judges the whole text, so a response has one score.
                    pool.add(make_rollout(setup, samples, actor_critic=actor_critic, reference=reference))
                episodes, generated = pool.take()

            # 5. Compute per-token rewards. The score judges the whole response, so it is on the last token. The KL
            #    divergence is a sum over tokens, so each token pays for its own part.
            rewards, non_score_rewards, kl = token_rewards(episodes, controller.value, args.rewards.kl_estimator)

            # 6. Compute advantages and returns: how much better did it go than expected? A critic learns what to
            #    expect from the text so far. Without one, the mean score of the group shows how well the policy
            #    usually does on this problem. That is good enough where the score comes only at the end.
            correction = sampler.correct(episodes, number)  # of a sampler that is not the policy
            advantages, returns = compute_advantages(
                correction.episodes,
                rewards,
                ppo=ppo,
                reduce=reduce,
                weights=setup.weights,
                baseline=non_score_rewards if args.has_exact_baseline else None,
            )

            # 7. Optimise, in epochs over minibatches. The ratio says how much more likely a token has become since it
            #    was sampled. The advantages were measured under the old policy and mean less the further the policy
            #    moves away from it. So the loss is clipped: beyond the clip range, nothing is gained by moving on.
            batch = make_batch(
                correction,
                rewards=rewards,
                non_score_rewards=non_score_rewards,
                kl=kl,
                advantages=advantages,
                returns=returns,
                number=number,
                verifier=args.rewards.verifier,
            )
            before = this_run.seconds_of_update()
            steps = update(
                setup,
                batch,
                actor_critic=actor_critic,
                reference=reference,
                optimizers=optimizers,
                # [V75] A minibatch has episodes, not groups; seed, update and epoch settle them.
                #       ray_trainer.py#L1455
                minibatches=draw_minibatches(args.seed, number, ppo.noptepochs, rows, ppo.nminibatches),
                # [V71] In the first critic_warmup updates, the policy does not move at all.   ray_trainer.py#L1604
                policy_learns=number >= ppo.critic_warmup,
                bonus=progress.bonus,
            )
            training = this_run.seconds_of_update() - before

            # 8. Adapt the KL coefficient and log. The controller sees the KL averaged over all processes.
            # [V53] [V54] It is the sum over a response, not the mean over tokens.   core_algos.py#L152-L173
            metrics = rlvr_metrics.update_metrics(
                setup, number, episodes=episodes, generated=generated, batch=batch, steps=steps
            )
            metrics |= rlvr_metrics.run_metrics(
                setup,
                this_run,
                number,
                kl_coef=controller.value,
                rounds=len(generated),
                all_rounds=pool.rounds,
                training=training,
            )
            metrics |= correction.metrics | sampler.metrics()
            if ppo.adaptive_entropy.target is not None:
                metrics["objective/entropy_coef"] = progress.bonus.coef
            controller.update(metrics.get("objective/kl", 0.0), sizes.batch)
            this_run.end_of_update(
                number,
                metrics | progress.evaluation,
                f"correct {metrics['objective/verifiable_correct_rate']:.3f}",
                samples=partial(rlvr_metrics.sample_rows, setup, episodes, batch),
                trace=partial(
                    record_trace,
                    this_run,
                    sampler,
                    reference,
                    number,
                    episodes=episodes,
                    batch=batch,
                    kl_coef=controller.value,
                ),
                checkpoint=training_state(sampler, optimizers, progress, made=number + 1),
            )
    return finish(this_run, sampler)


# ---- Steps 1 and 2: problems, responses ------------------------------------------------------------------------


class Request(NamedTuple):
    """What a sampler is to answer."""

    contexts: Tensor  # (rows, context_length), padded on the left
    uniforms: Tensor  # (rows, response_length), a random number for each token
    temperature: float


class Draw(NamedTuple):
    """Step 1: this process's rows of a round."""

    round: int  # how many rounds came before it, since the run began
    problems: Tensor  # (rows,), numbers of the problems, each n times
    groups: Tensor  # (rows,), equal for the responses to one problem
    requests: list[Request]  # one for all rows; with remax, a second one for the greedy responses


class Samples(NamedTuple):
    """Step 2: the answers to the requests of a draw."""

    draw: Draw
    answers: list[tuple[Tensor, Tensor]]  # to each, responses and their log-probs, both (rows, response_length)
    version: int  # updates that the sampling policy had seen
    on_policy: bool  # whether that is the policy that learns, and the log-probs are in its arithmetic


def draw_problems(setup: Setup, round_number: int, rank: int, local_problems: int = 0) -> Draw:
    """Step 1 for a process. round_number: rounds before this one, since the run began.

    local_problems: how many it gets; 0: its part of a batch.
    """
    args, n, device = setup.args, setup.args.ppo.samples_per_prompt, setup.accelerator.device
    local_rows = local_problems * n or setup.sizes.local_batch
    rows = slice(rank * local_rows, (rank + 1) * local_rows)
    number = local_rows // n * setup.accelerator.num_processes  # of problems, for all processes
    drawn = problems.problems_of_batch(len(setup.problems), number, round_number, args.seed)
    repeated = drawn.repeat_interleave(n)
    groups = round_number * number + torch.arange(len(repeated))[rows] // n
    queries = setup.problems.batch(repeated.tolist(), setup.ids.pad)[rows]  # (local_rows, context_length)
    uniforms = episode_noise(args.seed, round_number, len(repeated), args.task.response_length)[rows]
    uniforms = uniforms.to(processes.device_of_noise(device))
    requests = [Request(queries.to(device), uniforms, args.task.temperature)]
    if args.ppo.advantage == "remax":
        # [V41] Each prompt gets one more response, the greedy one. It is no episode.   ray_trainer.py#L1404-L1443
        greedy = Request(queries[::n].to(device), torch.full_like(uniforms[::n], 0.5), problems.GREEDY)
        requests.append(greedy)
    return Draw(round=round_number, problems=repeated[rows], groups=groups, requests=requests)


class Sampler:
    """Step 2 in this process, by the policy that learns.

    rlvr/asynchronous.py has a sampler that is ahead of the learner; that of rlvr/tools.py lets responses call a tool.
    """

    def __init__(
        self,
        setup: Setup,
        actor_critic: ActorCritic,
        generate: Callable[..., tuple[Tensor, Tensor]] = generate_until,
    ):
        self.setup, self.actor_critic, self.generate, self.version = setup, actor_critic, generate, 0

    def at_work(self, this_run: run.Run, progress: Progress) -> contextlib.AbstractContextManager[None]:
        """While a run trains."""
        return contextlib.nullcontext()

    def begin_update(self, number: int) -> None:
        """To be called before anything is sampled for an update."""
        self.version = number

    def sample(self, draw: Draw) -> Samples:
        """Responses to the requests of a draw; within `sampling`."""
        answers = [
            few_rows_at_a_time(
                partial(self.respond, temperature=temperature),
                self.setup.sizes.local_rollout_batch,
                contexts,
                uniforms,
            )
            for contexts, uniforms, temperature in draw.requests
        ]
        return Samples(draw=draw, answers=answers, version=self.version, on_policy=True)

    # [V14] Only the stop ids of the model's generation config are used: no penalty, no top-k, no top-p.
    #       hf_rollout.py#L94
    def respond(self, contexts: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Responses of the policy, padding after the stop id, and their log-probs; within `sampling`."""
        return self.generate(
            self.actor_critic.lm_backbone,
            contexts,
            uniforms,
            pad_id=self.setup.ids.pad,
            vocab_size=self.setup.ids.vocab_size,
            stop_ids=self.setup.ids.stops,
            temperature=temperature,
        )

    def correct(self, episodes: Rollout, number: int) -> Correction:
        """What update `number` learns from, if another policy has sampled. Every process must call this."""
        return Correction(episodes=episodes)

    def metrics(self) -> dict[str, float]:
        """Of the sampler itself, since the last update."""
        return {}

    def state(self, made: int) -> dict[str, dict[str, Tensor]]:
        """For a checkpoint after so many updates: what the sampler needs to go on.

        It gets it back in `progress.sampler_state`.
        """
        return {}


# ---- Steps 3 and 4: log-probs and values, scores ---------------------------------------------------------------


def make_rollout(
    setup: Setup, samples: Samples, *, actor_critic: ActorCritic, reference: Reference | None
) -> Rollout:
    """Steps 3 and 4 for this process's rows of a round."""
    args, ids, draw, device = setup.args, setup.ids, samples.draw, setup.accelerator.device
    queries, (responses, sampler_logprobs) = draw.requests[0].contexts, samples.answers[0]
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
    query_responses, exact = torch.cat([queries, responses], dim=1), args.rewards.kl_estimator == "full"
    logprobs, values, ref_logprobs, exact_kl = packing.by_length(
        read_responses,
        actor_critic,
        query_responses,
        responses,
        mask,
        sampler_logprobs,
        pad_id=ids.pad,
        rows=args.ppo.local_micro_batch_size,
        reference=reference,
        exact=exact,
        recorded=samples.on_policy and args.dtype != "bfloat16" and not exact,
    )

    # 4. Score.
    parts, raw_scores = score_responses(setup, draw.problems, queries=queries, responses=responses)
    # What cannot be scored has no token that counts.
    mask = mask & raw_scores.isfinite().unsqueeze(1)
    parts, raw_scores = parts.nan_to_num(0), raw_scores.nan_to_num(0)
    lengths = (responses != ids.pad).sum(1)  # (rows,), with a tool's tokens, as response_length
    scores = punish(raw_scores, lengths, stopped, args.rewards, args.task.response_length)
    baselines = torch.zeros_like(scores)
    if args.ppo.advantage == "remax":
        n, (greedy, _) = args.ppo.samples_per_prompt, samples.answers[1]
        _, raw = score_responses(setup, draw.problems[::n], queries=queries[::n], responses=greedy)
        lengths, ends = (greedy != ids.pad).sum(1), response_mask(greedy, ids.stops)[1]  # (rows / n,) each
        punished = punish(raw.nan_to_num(0), lengths, ends, args.rewards, args.task.response_length)
        baselines = punished.repeat_interleave(n)
        mask = mask & raw.isfinite().repeat_interleave(n).unsqueeze(1)
    return Rollout(
        query_responses=query_responses,
        mask=mask,
        # A sampler's correction may leave tokens out of the loss. Files hold no tensor twice, hence the copy.
        loss_mask=mask.clone(),
        from_tool=from_tool,
        logprobs=logprobs,
        sampler_logprobs=sampler_logprobs,
        ref_logprobs=ref_logprobs,
        exact_kl=exact_kl,
        values=values,
        parts=parts,
        raw_scores=raw_scores,
        scores=scores,
        baselines=baselines,
        stopped=stopped,
        problems=draw.problems.to(device),
        groups=draw.groups.to(device),
        versions=torch.full_like(draw.groups, samples.version).to(device),
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
    """Step 3 for some rows: log-probs, values, the reference's log-probs, exact KLs, four of (rows, response_length).

    The policy's own log-probs take the place of the reference's if there is no reference. tokens, responses, mask: as
    in ActorCritic.forward. exact: whether exact KLs are needed; otherwise they are 0. recorded: whether the log-probs
    are the sampler's.
    """
    old = actor_critic(
        tokens,
        responses,
        mask,
        pad_id,
        reference=reference if exact else None,
        recorded=sampler_logprobs if recorded else None,
    )
    ref_logprobs = reference.logprobs(tokens, responses, mask, pad_id) if reference else old.logprobs
    return old.logprobs, old.values, ref_logprobs, old.exact_kl


def score_responses(setup: Setup, inds: Tensor, queries: Tensor, responses: Tensor) -> tuple[Tensor, Tensor]:
    """The value of each source (rows, sources), and the weighted sum (rows,): NaN where one of them cannot say.

    inds: numbers of the problems (rows,).
    """
    source, texts = setup.problems, problems.to_texts(setup.tokenizer, responses, setup.ids)
    prompts, answers, rows = source.known_of(inds)
    messages = [source.messages[i] for i in inds]
    # [V23] [V18] Verifiers judge the response alone; the prompt may hold an example's answer.
    #       reward_manager/naive.py#L74-L91
    values = [
        function(prompts, texts, answers, rows, queries=queries, responses=responses, messages=messages)
        for function, _ in setup.sources.values()
    ]
    parts = torch.stack([processes.widened(value, responses.device) for value in values], 1)
    return parts, parts @ parts.new_tensor([weight for _, weight in setup.sources.values()])


def punish(
    raw_scores: Tensor, lengths: Tensor, stopped: Tensor, shaping: RewardsArgs, response_length: int
) -> Tensor:
    """Scores (rows,) after punishments of responses that do not end, or that come near the greatest length."""
    # [V24] The punishment comes after the sum.
    penalty = shaping.missing_stop_penalty
    forms = {"none": raw_scores, "replace": torch.full_like(raw_scores, -penalty), "subtract": raw_scores - penalty}
    scores = torch.where(stopped, raw_scores, forms[shaping.missing_stop])
    if shaping.overlong_buffer:
        scores = scores + verifiers.overlong_punishment(lengths, response_length, shaping.overlong_buffer, factor=1.0)
    return scores


# ---- How a batch is filled -------------------------------------------------------------------------------------

MOST_ROUNDS = 10  # of generation in an update; groups that never differ would fill no batch


class Pool:
    """Collects what is sampled until it makes a batch: in one round or, with filter_groups, in several."""

    def __init__(
        self,
        ppo: PpoArgs,
        pad_id: int,
        accelerator: Accelerator,
        *,
        rounds: int = 0,
        surplus: Rollout | None = None,
    ):
        """rounds: made since the run began. surplus: what the last batch has left over."""
        self.ppo, self.pad_id, self.accelerator, self.rounds, self.surplus = ppo, pad_id, accelerator, rounds, surplus
        self.generated: list[Rollout] = []  # by this process, for the current batch
        self.kept = [surplus] if surplus else []  # groups of all processes whose scores differ

    def is_full(self) -> bool:
        """Whether there is a batch; an InputError if there is still none after MOST_ROUNDS of generation."""
        if not self.ppo.filter_groups:
            return bool(self.generated)
        filled, wanted = sum(len(part.groups) for part in self.kept), self.ppo.batch_size
        if filled < wanted and len(self.generated) == MOST_ROUNDS:
            mean = torch.cat([one.raw_scores for one in self.generated]).mean()
            raise InputError(
                f"{flag('ppo.filter_groups')}: {MOST_ROUNDS} rounds of generation did not fill a batch: only "
                f"{filled} of {wanted} episodes are in groups whose scores differ; the mean score is "
                f"{mean.item():.3f}"
            )
        return filled >= wanted

    def add(self, rollout: Rollout) -> None:
        """Take in this process's rows of a round. Every process must call this."""
        self.rounds += 1
        self.generated.append(rollout)
        if self.ppo.filter_groups:
            # [V78] Only groups whose raw scores differ are kept; the others have no signal.
            gathered = {name: self.accelerator.gather(x.contiguous()) for name, x in rollout.tensors().items()}
            whole = Rollout(**gathered)
            self.kept.append(whole.rows(algebra.scores_differ(whole.raw_scores, whole.mask.any(1), whole.groups)))

    def take(self) -> tuple[Rollout, list[Rollout]]:
        """This process's part of the batch, and all that it has generated for it. Makes room for the next batch."""
        generated, self.generated = self.generated, []
        if not self.ppo.filter_groups:
            return generated[0], generated
        whole = algebra.join(self.kept, self.pad_id)
        local_batch = self.ppo.batch_size // self.accelerator.num_processes
        # [V78] What is left over comes first in the next batch, in its order.
        self.surplus = whole.rows(slice(self.ppo.batch_size, None))
        self.kept = [self.surplus]
        start = self.accelerator.process_index * local_batch
        return whole.rows(slice(start, start + local_batch)), generated


@dataclass(kw_only=True)
class Progress:
    """The state that one update hands to the next, in addition to the networks; a checkpoint keeps it."""

    first_update: int  # when this process started or resumed the run
    controller: AdaptiveKLController
    bonus: EntropyController
    pool: Pool
    evaluation: dict[str, float]  # the newest
    sampler_state: dict[str, dict[str, Tensor]]  # what the sampler's state() has put into the checkpoint


# ---- Steps 5 and 6: rewards, advantages ------------------------------------------------------------------------


def token_rewards(episodes: Rollout, kl_coef: float, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Step 5: rewards, the KL penalty in them, and the KL, as compute_rewards gives them. name: of the estimate."""
    # [V88] The KL is that of the policy that learns, although another may have sampled.
    ref_logprobs = episodes.ref_logprobs
    if name == "full":
        # The exact KL takes the place of k1, which is logprobs - ref_logprobs.
        ref_logprobs, name = episodes.logprobs - episodes.exact_kl, "k1"
    return algebra.compute_rewards(
        episodes.scores, episodes.logprobs, ref_logprobs, mask=episodes.mask, kl_coef=kl_coef, name=name
    )


@dataclass(frozen=True, kw_only=True)
class Correction:
    """The batch from which an update learns, of episodes that another policy may have sampled."""

    episodes: Rollout  # with the masks and the old log-probs of the loss
    weights: Tensor | None = None  # (rows, response_length), factors of the losses; None: 1
    reweigh: Reweigh | None = None  # None: no more factors
    metrics: dict[str, float] = field(default_factory=dict)  # how far the sampler is from the learner


def compute_advantages(
    episodes: Rollout,
    rewards: Tensor,
    ppo: PpoArgs,
    reduce: Callable[[Tensor], Tensor],
    weights: Sequence[float] = (),
    baseline: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Step 6: advantages, whitened if the estimator needs it, and returns, 0 without a critic.

    weights: of the sources of the score, which only gdpo needs. baseline: (rows, response_length), to be subtracted;
    None: nothing.
    """
    advantages, returns = estimate_advantages(episodes, rewards, ppo, weights)
    if baseline is not None:
        advantages = advantages - baseline
    if ppo.whitens:
        advantages = algebra.whiten(advantages, episodes.mask, keep_mean=False, reduce=reduce)
    return advantages, torch.zeros_like(advantages) if returns is None else returns


def estimate_advantages(
    episodes: Rollout, rewards: Tensor, ppo: PpoArgs, weights: Sequence[float]
) -> tuple[Tensor, Tensor | None]:
    """Advantages, not whitened, and returns if there is a critic."""
    return algebra.ESTIMATORS[ppo.advantage](
        rewards,
        # [V32] They are of all tokens of the response. Tokens that are left out of the loss are not left out here.
        episodes.mask,
        episodes.groups,
        values=episodes.values,
        baselines=episodes.baselines,
        parts=episodes.parts,
        weights=weights,
        gamma=ppo.gamma,
        lam=ppo.lam,
        critic_lam=ppo.critic_lam,
        lam_alpha=ppo.lam_alpha,
    )


# ---- Step 7: update --------------------------------------------------------------------------------------------


def make_batch(
    correction: Correction,
    *,
    rewards: Tensor,
    non_score_rewards: Tensor,
    kl: Tensor,
    advantages: Tensor,
    returns: Tensor,
    number: int,
    verifier: str = "",
) -> Batch:
    """The batch of update `number`. verifier: its name says which of its values mean a correct response."""
    episodes, weights = correction.episodes, correction.weights
    return Batch(
        **vars(episodes),
        rewards=rewards,
        non_score_rewards=non_score_rewards,
        kl=kl,
        advantages=advantages,
        returns=returns,
        weights=torch.ones_like(episodes.logprobs) if weights is None else weights,
        right=verifiers.is_right(episodes.parts[:, 0], verifier),
        fresh=episodes.versions == number,
        reweigh=correction.reweigh,
    )


def update(
    setup: Setup,
    batch: Batch,
    *,
    actor_critic: ActorCritic,
    reference: Reference | None,
    optimizers: dict[str, torch.optim.Optimizer],
    minibatches: Tensor,
    policy_learns: bool,
    bonus: EntropyController,
) -> dict[str, Tensor]:
    """Step 7: all epochs over one batch.

    minibatches: this process's episodes in each, (epochs, minibatches, local_minibatch). Returns numbers of the
    optimiser steps, (steps,): gradient norms, and of everything else this process's share; the shares of all
    processes add up.
    """
    args, ppo, accelerator, pad_id = setup.args, setup.args.ppo, setup.accelerator, setup.ids.pad
    kl_coef, kl_name = args.rewards.loss_kl
    needs_exact_kl = kl_coef and kl_name == "full"
    lengths = packing.count_tokens(batch.query_responses, pad_id)  # (local_batch,), on the CPU as minibatches
    reduce = partial(accelerator.reduce, reduction="sum")
    steps: list[dict[str, Tensor]] = []
    for b_inds in minibatches:  # an epoch
        for mb_inds in b_inds:  # (local_minibatch,)
            mb = batch.rows(mb_inds.to(batch.logprobs.device))
            counts = minibatch_counts(mb.loss_mask, reduce)
            right_tokens = minibatch_counts(mb.right_mask, reduce)["tokens"] if ppo.nll_coef else 0
            divisors = counts | {"right_tokens": right_tokens}
            batch.seen.append((mb_inds, {name: torch.full(mb_inds.shape, n) for name, n in divisors.items()}))
            shares: list[dict[str, Tensor]] = []  # what is logged of each micro-batch
            for optimizer in optimizers.values():
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
                micro_batch = mb.rows(rows)
                new = actor_critic(
                    tokens,
                    micro_batch.responses,
                    micro_batch.loss_mask,
                    pad_id,
                    reference=reference if needs_exact_kl else None,
                )
                loss, share = micro_batch_loss(
                    new,
                    micro_batch,
                    args,
                    counts=counts,
                    right_tokens=right_tokens,
                    entropy_coef=bonus.value,
                )
                (loss * accelerator.num_processes).backward()  # gradients will be averaged over processes
                shares.append(share)
                outputs = {"new_logprobs": new.logprobs, "exact_kl": new.exact_kl, "new_values": new.values}
                batch.seen.append((mb_inds[rows], {name: x.detach() for name, x in outputs.items()}))
            average_gradients(actor_critic)
            norms = step(optimizers, ppo.max_grad_norm, policy_learns=policy_learns)
            steps.append({name: sum(share[name] for share in shares) for name in shares[0]} | norms)
            if bonus.target is not None and policy_learns and counts["tokens"]:
                bonus.update(reduce(steps[-1]["policy/entropy_avg"]).item())
    return {name: torch.stack([one[name] for one in steps]) for name in steps[0]}


def minibatch_counts(mask: Tensor, reduce: Callable[[Tensor], Tensor]) -> dict[str, int]:
    """The divisors of aggregate for a minibatch. mask: of this process's rows. reduce: sums over all processes."""
    # [V60] [V61] These are counts of the whole minibatch on all processes, so that the weight of a token does not
    #       depend on its micro-batch and process.   dp_actor.py#L575-L578, dp_critic.py#L240-L245
    numbers = torch.stack([mask.sum(), mask.any(1).sum(), mask.new_tensor(len(mask), dtype=torch.long)])
    tokens, sequences, episodes = (int(number) for number in reduce(numbers).tolist())
    return {"tokens": tokens, "sequences": sequences, "episodes": episodes, "length": mask.shape[1]}


def micro_batch_loss(
    new: Reading, mb: Batch, args: Args, *, counts: dict[str, int], right_tokens: int, entropy_coef: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """A micro-batch's share of the loss of policy and critic, and of what is logged, without gradient. All 0-d.

    new: what the networks say now. counts, right_tokens: of the whole minibatch. entropy_coef: of the bonus.
    """
    ppo, (kl_coef, kl_name) = args.ppo, args.rewards.loss_kl
    total = partial(algebra.aggregate, mask=mb.loss_mask, mode=ppo.loss_aggregation, **counts)
    losses, clipped, clipped_below = policy_losses(new.logprobs, mb, ppo)
    kl = kl_in_loss(new.logprobs, mb, exact_kl=new.exact_kl, shaping=args.rewards)
    # [V83] The weights are those of the policy that this update began with.   core_algos.py#L1237
    losses = mb.weights * losses
    if kl_name != "full":  # the exact KL does not depend on which token was drawn
        kl = mb.weights * kl
    flags = {"policy/clipfrac_avg": clipped, "policy/clipfrac_low_avg": clipped_below}
    if mb.reweigh:
        # [V84] Where the loss has no ratio, the weights are those of the policy of this step.
        factors = mb.reweigh(new.logprobs, mb)
        losses = factors * losses
        flags["async/masked_share"] = factors == 0
    v_losses, flags["val/clipfrac_avg"] = algebra.value_losses(
        new.values, mb.values, mb.returns, mask=mb.loss_mask, cliprange_value=ppo.cliprange_value
    )
    policy_loss, value_loss = total(losses), total(v_losses)
    kl_loss, entropy = total(kl), total(new.entropies)
    # [V49] [V68] All terms have the same divisor. They are logged without their coefficients.   losses.py#L158-L172
    loss = policy_loss + kl_coef * kl_loss - entropy_coef * entropy
    share = rlvr_metrics.token_statistics(mb, new.logprobs, new.entropies, tokens=counts["tokens"], flags=flags)
    if ppo.nll_coef:
        # [V108] The mean is over the tokens of correct responses in the minibatch. The weights above are not in it.
        nll = algebra.aggregate(-new.logprobs, mb.right_mask, "token-mean", tokens=right_tokens)
        loss = loss + ppo.nll_coef * nll
        share["loss/nll_avg"], share["right_tokens"] = nll, mb.right_mask.sum()
    share["objective/loss"], share["tokens"] = loss, mb.loss_mask.sum()
    share["loss/policy_avg"], share["loss/value_avg"] = policy_loss, value_loss
    share["loss/kl_avg"], share["loss/entropy_avg"] = kl_loss, entropy
    # Policy and critic share no parameter, so the sum of their losses has the gradient of each.
    return loss + value_loss, {name: x.detach() for name, x in share.items()}


def policy_losses(new_logprobs: Tensor, mb: Batch, ppo: PpoArgs) -> tuple[Tensor, Tensor, Tensor]:
    """The policy's loss per token, which tokens a bound changed, which the dual clip changed: see token_losses."""
    return algebra.token_losses(
        new_logprobs,
        mb.logprobs,
        mb.advantages,
        mask=mb.loss_mask,
        loss=ppo.loss,
        low=algebra.lower_clip_range(ppo.loss, ppo.cliprange_low),
        high=ppo.cliprange_high,
        dual_clip=ppo.dual_clip,
        trust_region=ppo.trust_region,
    )


def kl_in_loss(new_logprobs: Tensor, mb: Batch, exact_kl: Tensor, shaping: RewardsArgs) -> Tensor:
    """The KL penalty of each token (micro_batch, response_length), without its coefficient; 0 if there is none."""
    coef, name = shaping.loss_kl
    if name == "full" or not coef:
        return exact_kl
    kl = algebra.kl_estimate(new_logprobs, mb.ref_logprobs, mask=mb.loss_mask, name=name)
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
    if policy_learns:
        optimizers["policy"].step()
    return {f"{name}/grad_norm": norm for name, norm in norms.items()}


# ---- Networks --------------------------------------------------------------------------------------------------


class Reading(NamedTuple):
    """What the networks say about the tokens of responses: four of (rows, response_length), 0 where masked."""

    logprobs: Tensor
    values: Tensor  # 0 without a critic
    entropies: Tensor  # exact, in nats; 0 if the log-probs were known
    exact_kl: Tensor  # from the reference, in nats; 0 if it was not asked for


class ActorCritic(models.MixedPrecision):
    """The policy and, if the estimator has one, the critic; they share nothing."""

    entropy_learns = True  # whether the entropy has a gradient

    def __init__(
        self,
        lm_backbone: PreTrainedModel,
        critic: RewardModel | None,
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

    def forward(
        self,
        tokens: Tensor,
        responses: Tensor,
        mask: Tensor,
        pad_id: int,
        reference: Reference | None = None,
        recorded: Tensor | None = None,
    ) -> Reading:
        """Log-probs of response tokens, values, exact entropies and, given a reference, exact KLs from it.

        tokens: (batch, length), queries and responses with padding anywhere. responses: (batch, response_length), the
        same responses with padding at their end. mask: (batch, response_length), which of their tokens to read.
        recorded: their log-probs if these are known; then only the critic reads.
        """
        # [V30] What the networks say at a position is about the next token: hence the shift by one.
        #       dp_critic.py#L117
        at = mask.nonzero(as_tuple=True)  # a mask as an index would wait for the device each time
        labels = responses[at]  # (tokens,)
        with self.autocast():
            if recorded is None:
                states = [read_before_responses(self.lm_backbone, tokens, responses, pad_id)[at]]  # (tokens, width)
                if reference:
                    states.append(reference.hidden_states(tokens, responses, pad_id)[at])
                read = partial(self.read_hidden, reference)
                logprobs, entropies, exact_kl = packing.few_logits_at_a_time(read, self.vocab_size, labels, *states)
            else:
                logprobs = recorded[at]
                entropies = exact_kl = torch.zeros_like(logprobs)
            values = torch.zeros_like(logprobs)
            if self.critic:
                hidden = read_before_responses(self.critic.lm_backbone, tokens, responses, pad_id)[at]
                values = self.critic.gain * read_scalar(self.critic.reward_head, hidden) + self.critic.bias
        numbers = (logprobs, values, entropies, exact_kl)  # (tokens,) each, in the order of Reading
        return Reading._make(x.new_zeros(mask.shape).masked_scatter(mask, x) for x in numbers)

    def read_hidden(
        self, reference: Reference | None, labels: Tensor, hidden: Tensor, ref_hidden: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs of labels (tokens,), exact entropies and KLs there, from final hidden states (tokens, width)."""
        # [V13] [V15] At the temperature of the sampler, in float32 or better.   dp_actor.py#L259, dp_actor.py#L368
        logits = scaled_logits(self.lm_backbone, hidden, self.vocab_size, self.temperature)
        logprobs, entropies = algebra.read_logits(logits, labels, entropy_learns=self.entropy_learns)
        if reference is None:
            return logprobs, entropies, torch.zeros_like(logprobs)
        # [V51] The sum over the vocabulary, a few tokens at a time.
        difference = F.log_softmax(logits, dim=1) - F.log_softmax(reference.logits(ref_hidden), dim=1)
        return logprobs, entropies, (logits.softmax(1) * difference).sum(1)


class Reference(models.Reference):
    """The model that the policy started from, or its teacher, at the policy's temperature."""

    # [V57] It never changes. Where nothing is penalised there is none.
    def __init__(self, network: ActorCritic, adapters: nn.Module | None):
        """network: without a critic."""
        super().__init__(network.lm_backbone, adapters)
        self.network = network

    def logprobs(self, tokens: Tensor, responses: Tensor, mask: Tensor, pad_id: int) -> Tensor:
        """Log-probs (batch, response_length); arguments as of ActorCritic."""
        with self.in_use():
            return self.network(tokens, responses, mask, pad_id).logprobs

    def hidden_states(self, tokens: Tensor, responses: Tensor, pad_id: int) -> Tensor:
        """Final hidden states before each token of the responses: (batch, response_length, width)."""
        with self.in_use():
            return read_before_responses(self.lm_backbone, tokens, responses, pad_id)

    def logits(self, hidden_states: Tensor) -> Tensor:
        with self.in_use():
            return scaled_logits(self.lm_backbone, hidden_states, self.network.vocab_size, self.network.temperature)


# ---- Traces ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def record_trace(
    this_run: run.Run,
    sampler: Sampler,
    reference: Reference | None,
    number: int,
    *,
    episodes: Rollout,
    batch: Batch,
    kl_coef: float,
) -> None:
    """Keep whole groups of the batch, and of responses to the first problems of all, with the same noise each time.

    kl_coef: for the rewards of these responses. Every process must call this.
    """
    setup, actor_critic, accelerator = sampler.setup, sampler.actor_critic, sampler.setup.accelerator
    ppo, shaping = setup.args.ppo, setup.args.rewards
    n, most = ppo.samples_per_prompt, setup.sizes.local_batch // ppo.samples_per_prompt
    groups, groups_again = (min(math.ceil(k / n), most) for k in (setup.args.trace_episodes, traces.TRACED))

    def keep(numbers: dict[str, Any], count: int, problems: Tensor, *, again: bool = False) -> None:
        """Keep the first so many episodes. problems: (rows,), those that the episodes answer."""
        traces.keep(
            this_run,
            number,
            numbers,
            episodes=count,
            tokenizer=setup.tokenizer,
            pad_id=setup.ids.pad,
            texts={"answer": [setup.problems.answers[i] for i in problems[:count].tolist()]},
            again=again,
        )

    # Groups that the policy has just learned from, with what it says of them now.
    rows = slice(groups * n)
    old = batch.rows(rows)
    new = actor_critic(old.query_responses, old.responses, episodes.mask[rows], setup.ids.pad)
    numbers = trace_numbers(setup, episodes, batch)
    numbers |= {
        "new_logprobs": new.logprobs,
        "entropies": new.entropies,
        "clipped": policy_losses(new.logprobs, old, ppo)[1],
        "ratio": torch.exp(new.logprobs - old.logprobs),
        "statistics.kept": batch.mask.any(1),
    }
    if ppo.advantage == "remax":
        numbers["statistics.baselines"] = episodes.baselines
    if ppo.whitens:  # the mean and deviation of the whole batch, before
        raw_advantages, _ = estimate_advantages(batch, batch.rewards, ppo, setup.weights)
        mean, deviation = traces.moments(raw_advantages, batch.mask, partial(accelerator.reduce, reduction="sum"))
        numbers["statistics.advantage_mean"] = mean.expand(len(batch.mask))
        numbers["statistics.advantage_deviation"] = deviation.expand(len(batch.mask))
    numbers |= traces.of_passes(batch.seen, numbers, groups * n, accelerator)
    keep(numbers, groups * n, episodes.problems)

    # Steps 1 to 6 for the first problems. A user's function may count its calls or draw random numbers, so traces do
    # not call it. In its place, all scores are 0 at first, because NaN would leave all tokens out, and then unknown.
    may_score = verifiers.keeps_nothing(shaping.verifier, shaping.format)
    silent = (lambda prompts, *_, **__: torch.zeros(len(prompts)).double(), 0.0)
    quiet = setup if may_score else dataclasses.replace(setup, sources=dict.fromkeys(setup.sources, silent))
    with actor_critic.sampling():
        draw = draw_problems(setup, 0, accelerator.process_index, local_problems=groups_again)
        samples = Sampler.sample(sampler, draw)
        again = make_rollout(quiet, samples, actor_critic=actor_critic, reference=reference)
    if not may_score:
        names = ("scores", "raw_scores", "parts")
        unknown = {name: torch.full_like(getattr(again, name), math.nan) for name in names}
        again = dataclasses.replace(again, **unknown)
    rewards, non_score_rewards, kl = token_rewards(again, kl_coef, shaping.kl_estimator)
    # They are whitened among themselves.
    advantages, returns = compute_advantages(
        again,
        rewards,
        ppo=ppo,
        reduce=torch.clone,
        weights=quiet.weights,
        baseline=non_score_rewards if setup.args.has_exact_baseline else None,
    )
    batch_again = make_batch(
        Correction(episodes=again),
        rewards=rewards,
        non_score_rewards=non_score_rewards,
        kl=kl,
        advantages=advantages,
        returns=returns,
        number=number,
        verifier=shaping.verifier,
    )
    numbers = trace_numbers(setup, again, batch_again)
    if not may_score:
        del numbers["advantages"]
    numbers["statistics.kl_coef"] = torch.full((len(again.mask),), kl_coef, dtype=torch.float64)
    keep(numbers, len(again.mask), again.problems, again=True)


def trace_numbers(setup: Setup, episodes: Rollout, batch: Batch) -> dict[str, Any]:
    """What a trace keeps of episodes, as lib/traces.py takes it."""
    numbers = {
        "query_responses": episodes.query_responses,
        "scored": episodes.mask,
        "mask": batch.loss_mask,
        "logprobs": episodes.logprobs,
        "sampler_logprobs": episodes.sampler_logprobs,
        "rewards": batch.rewards,
        "advantages": batch.advantages,
        "weights": batch.weights,
        "scores": episodes.scores,
        "raw_scores": episodes.raw_scores,
        "sources": {name: episodes.parts[:, i] for i, name in enumerate(setup.sources)},
        "stopped": episodes.stopped,
        "groups": episodes.groups,
    }
    if setup.args.rewards.has_penalty:  # otherwise there is no reference, and nothing to say about it
        numbers |= {"ref_logprobs": episodes.ref_logprobs, "kl": batch.kl}
    if setup.args.rewards.kl_estimator == "full":
        numbers["exact_kl"] = episodes.exact_kl
    if setup.args.ppo.advantage == "gae":
        numbers |= {"values": batch.values, "returns": batch.returns}
    if setup.args.tools:
        numbers["tool"] = episodes.from_tool
    return numbers


# ---- Plumbing: what is loaded, checkpoints, the saved models ---------------------------------------------------


def load(args: Args) -> tuple[Setup, ActorCritic, Reference | None]:
    """Check the arguments, read the problems and load the networks. Nothing is written yet."""
    accelerator = processes.make_accelerator()
    rlvr_arguments.check_arguments(args)
    for doubt in rlvr_arguments.doubts(args):
        errors.say(doubt)
    sizes = rlvr_arguments.ppo_sizes(args.ppo, accelerator.num_processes)
    tokenizer = pretrained.load_tokenizer(args.base_model, args.trust_remote_code)
    read_problems = partial(
        problems.read_problems,
        args.task,
        tokenizer,
        verifier=args.rewards.verifier,
        keep_rows=":" in args.rewards.verifier + args.rewards.format,
    )
    train_problems, held_out = read_problems("train"), read_problems("test", args.eval_problems)
    rlvr_arguments.check_problems(train_problems, sizes)
    if train_problems.unscorable:
        errors.say(
            f"{train_problems.unscorable} problems to train on are left out, because "
            f"{flag('rewards.verifier')} {args.rewards.verifier} accepts no response to them"
        )
    with errors.typed_as({"task.query_length": "task.prompt_length"}):
        actor_critic, reference, adapters = load_networks(args, tokenizer, accelerator)
        ids = problems.task_ids(args.task, tokenizer, actor_critic.lm_backbone.generation_config)
        trial = train_problems.known_of([0, -1])
        sources = load_sources(args, tokenizer, ids, accelerator, train_problems.messages, trial=trial)
    setup = Setup(
        args=args,
        sizes=sizes,
        tokenizer=tokenizer,
        ids=ids,
        problems=train_problems,
        held_out=held_out,
        sources=sources,
        adapters=adapters,
        accelerator=accelerator,
    )
    return setup, actor_critic, reference


def load_sources(
    args: Args,
    tokenizer: PreTrainedTokenizerBase,
    ids: problems.TaskIds,
    accelerator: Accelerator,
    dialogues: Iterable[chat_templates.Messages] = (),
    *,
    trial: tuple[list[str], list[str], Sequence[verifiers.Columns]] = verifiers.MADE_UP,
) -> dict[str, Source]:
    """What scores, under its name, with its weight; the verifier first.

    dialogues: of the problems to train on. trial: two of the problems, as load_verifier takes them.
    """
    shaping, start_of = args.rewards, partial(problems.response_start, args.task)

    def text_source(name: str, field: str) -> Callable[..., Tensor]:
        verifier = verifiers.load_verifier(name, field, start_of, trial=trial, on_all_processes=True)
        return lambda *columns, **_: torch.tensor(verifier(*columns), dtype=torch.float64)

    def model_source(*columns: list, **rows: Any) -> Tensor:
        scores = processes.widened(score(**rows))  # (rows,)
        # Only functions of texts may say that a response cannot be scored.
        if not scores.isfinite().all():
            raise NumericalError("the reward model gives scores that are not finite; the run stops")
        return scores

    # [V117] Where a teacher judges the tokens, the verifier says which responses are correct, and that is all.
    weight = 0.0 if shaping.teacher else 1.0
    sources = {"verifier": (text_source(shaping.verifier, "rewards.verifier"), weight)}
    if shaping.format:
        sources["format"] = text_source(shaping.format, "rewards.format"), 1.0
    if classifiers.is_foreign(shaping.trained_model):
        score = classifiers.load_scorer(args, tokenizer, ids.pad, device=accelerator.device, dialogues=dialogues)
    elif shaping.trained_model:
        reward_model = models.load_scalar_model(args, "trained_model", tokenizer, frozen=True)
        packing.enable(reward_model.lm_backbone)
        reward_model.to(accelerator.device)
        score = models.response_scorer(reward_model, ids.pad, rows=args.ppo.local_rollout_batch_size)
    if shaping.trained_model:
        sources["reward_model"] = model_source, shaping.trained_weight
    return sources


def load_networks(
    args: Args, tokenizer: PreTrainedTokenizerBase, accelerator: Accelerator
) -> tuple[ActorCritic, Reference | None, nn.Module | None]:
    """Policy with or without a critic, reference, and peft's handle of the policy's adapters, if there are any.

    Without a penalty there is no reference. A teacher takes its place.
    """
    task = args.task
    length, vocab_size = task.prompt_length + task.response_length, pretrained.vocabulary_size(tokenizer)
    lm_backbone = models.load_base_model(args)
    packing.enable(lm_backbone, share_prefixes=args.ppo.share_prefixes)
    critic = None
    if args.ppo.advantage == "gae":
        # [V70] The critic has its own backbone. By default that is the policy's start, and a new head, which says 0.
        critic = models.load_critic(args, tokenizer, zero_head=True)
        packing.enable(critic.lm_backbone, share_prefixes=args.ppo.share_prefixes)
    actor_critic = ActorCritic(
        lm_backbone,
        critic,
        vocab_size,
        task.temperature,
        low_precision=args.dtype == "bfloat16",
        entropy_learns=args.ppo.entropy_coef > 0 or args.ppo.adaptive_entropy.target is not None,
    )
    if args.gradient_checkpointing:
        layers.checkpoint_layers(actor_critic)
    actor_critic.to(accelerator.device)
    models.check_model(lm_backbone, args.base_model, length, vocab_size, read_tokens)
    adapters, reference = None, None
    if args.lora.rank:
        adapters = models.add_adapters(lm_backbone, args.lora, args.seed)
    if args.rewards.has_penalty:
        frozen = lm_backbone
        if args.rewards.teacher:
            frozen = load_teacher(args, vocab_size, accelerator.device)
        elif adapters is None:
            frozen = models.load_base_model(args, frozen=True)
            packing.enable(frozen, share_prefixes=args.ppo.share_prefixes)
            frozen.to(accelerator.device)
        network = ActorCritic(frozen, None, vocab_size, task.temperature)
        reference = Reference(network, None if args.rewards.teacher else adapters)
    return actor_critic, reference, adapters


def load_teacher(args: Args, vocab_size: int, device: torch.device) -> PreTrainedModel:
    """The teacher, if its ids mean the same texts as the policy's and it reads padding as the policy does."""
    name, length = args.rewards.teacher, args.task.prompt_length + args.task.response_length
    names = {"base_model": "rewards.teacher", "task.query_length": errors.typed("task.query_length")}
    with errors.typed_as(names):
        teacher = models.load_base_model(dataclasses.replace(args, base_model=name)).requires_grad_(False)
        what = f"{flag('base_model')} {name}"
        pretrained.check_vocabulary(name, what, args.base_model, args.trust_remote_code)
        packing.enable(teacher, share_prefixes=args.ppo.share_prefixes)
        models.check_model(teacher.to(device), name, length, vocab_size, read_tokens)
    # In bfloat16, two ways of reading a token would differ too much for that check.
    return teacher.to(pretrained.dtype_of_weights(args, frozen=True))


def make_optimizers(actor_critic: ActorCritic, ppo: PpoArgs) -> dict[str, torch.optim.Optimizer]:
    """One for the policy, and one for the critic if there is one."""
    # [V73] AdamW, with constant learning rates and PyTorch's epsilon of 1e-8.
    return {
        name: torch.optim.AdamW(
            list(checkpoints.trained_parameters(network).values()),
            ppo.critic_lr if name == "value" else ppo.lr,
            betas=(0.9, ppo.beta2),
            weight_decay=ppo.weight_decay,
            fused=True,
        )
        for name, network in trained_networks(actor_critic).items()
    }


def trained_networks(actor_critic: ActorCritic) -> dict[str, nn.Module]:
    return {"policy": actor_critic.lm_backbone} | ({"value": actor_critic.critic} if actor_critic.critic else {})


def start_run(
    setup: Setup, actor_critic: ActorCritic, optimizers: dict[str, torch.optim.Optimizer]
) -> tuple[run.Run, Progress]:
    """Make the run's folder, or resume from its newest checkpoint."""
    args, accelerator, parts = setup.args, setup.accelerator, {}

    def restore(tensors: dict[str, Tensor]) -> None:
        """The inverse of training_state."""
        for key, tensor in tensors.items():
            name, key = key.split("/", 1)
            parts.setdefault(name, {})[key] = tensor
        for name, network in trained_networks(actor_critic).items():
            checkpoints.restore_training_state(network, optimizers[name], parts.pop(name, {}))

    this_run = run.Run(args, accelerator, dataclasses.asdict(setup.sizes))
    this_run.rehearse(partial(save_models, setup=setup, actor_critic=actor_critic))
    state = this_run.resume(restore)
    surplus = {name: tensor.to(accelerator.device) for name, tensor in parts.pop("surplus", {}).items()}
    left_over = Rollout(**surplus) if surplus else None
    adaptive_kl, entropy = args.rewards.adaptive_kl, args.ppo.adaptive_entropy
    progress = Progress(
        first_update=state["step"],
        controller=AdaptiveKLController(
            state.get("kl_coef", args.rewards.reward_kl), target=adaptive_kl.target, horizon=adaptive_kl.horizon
        ),
        bonus=EntropyController(
            state.get("entropy_coef", args.ppo.entropy_coef),
            entropy.target,
            delta=entropy.delta,
            low=entropy.min,
            high=entropy.max,
            last=state.get("last_entropy", math.inf),
        ),
        pool=Pool(args.ppo, setup.ids.pad, accelerator, rounds=state.get("rounds", 0), surplus=left_over),
        evaluation=state.get("evaluation", {}),
        sampler_state=parts,
    )
    this_run.start_logging(progress.first_update)
    this_run.save_meta(first_prompt=setup.problems.texts[0])
    return this_run, progress


def training_state(
    sampler: Sampler, optimizers: dict[str, torch.optim.Optimizer], progress: Progress, made: int
) -> Callable[[], tuple[dict[str, Tensor], dict[str, Any]]]:
    """A function that gives the content of a checkpoint after so many updates: tensors, and the rest.

    It may be called until the next optimiser step. What the next rollout changes is kept now.
    """
    surplus, bonus = progress.pool.surplus, progress.bonus
    numbers = {
        "kl_coef": progress.controller.value,
        "entropy_coef": bonus.coef,
        "rounds": progress.pool.rounds,
        "evaluation": dict(progress.evaluation),
    }
    if math.isfinite(bonus.last):  # JSON has no infinity
        numbers["last_entropy"] = bonus.last

    def content() -> tuple[dict[str, Tensor], dict[str, Any]]:
        trained = trained_networks(sampler.actor_critic)
        parts = {name: checkpoints.training_state(network, optimizers[name]) for name, network in trained.items()}
        parts |= sampler.state(made)
        if surplus:
            parts["surplus"] = surplus.tensors()
        return {f"{name}/{key}": tensor for name, part in parts.items() for key, tensor in part.items()}, numbers

    return content


def save_models(folder: Path, setup: Setup, actor_critic: ActorCritic, weights: bool = True) -> None:
    """Save the policy, and the critic if there is one. weights: whether theirs are saved, too."""
    if not errors.is_first_process():
        return
    args = setup.args
    info = {
        "task": dataclasses.asdict(args.task),
        "monitor": "",
        "function": args.rewards.verifier,
        "base_model": args.base_model,
        "reward_model": args.rewards.trained_model,
        "label": args.rewards.label,
    }
    if args.tools:
        info["tool"] = args.tools.tool
    models.save_policy_and_critic(
        folder,
        lm_backbone=actor_critic.lm_backbone,
        critic=actor_critic.critic,
        adapters=setup.adapters,
        tokenizer=setup.tokenizer,
        info=info,
        trust_remote_code=args.trust_remote_code,
        weights=weights,
    )


def finish(this_run: run.Run, sampler: Sampler) -> Path:
    """Evaluate, save the models and report the results. Returns the policy's folder."""
    setup, actor_critic = sampler.setup, sampler.actor_critic
    args, verifier = setup.args, setup.args.rewards.verifier
    with this_run.saved_if_it_fails(), actor_critic.sampling():
        evaluation, rows = rlvr_metrics.evaluate(setup, sampler.respond, with_samples=True)
    this_run.write_evaluation("validation", rows)
    save_models(this_run.model_folder, setup, actor_critic)
    last = this_run.last_means(*(["scores", "kl"] if args.rewards.has_penalty else ["scores"]))
    left_out = {name: getattr(setup.problems, name) for name in ("too_long", "unscorable", "empty")}
    parts = ["policy", "value"] if actor_critic.critic else ["policy"]
    this_run.finish(*parts, **evaluation, **last, **left_out)
    rlvr_metrics.report(this_run, verifier, kind_column=args.task.kind_column, after=evaluation, rows=rows)
    return this_run.model_folder / "policy"


if __name__ == "__main__":
    errors.run_script(lambda: train(command_line.parse_args(PRESETS, description=__doc__)))
