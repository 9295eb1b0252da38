"""PPO against a reward model: chapter 2, TL;DR summarisation, stage 3 of 3.

The fine-tuned model of `tldr/sft.py` (the policy) summarises posts, and the reward model of `tldr/reward.py` scores
the summaries. PPO raises the score, and a penalty on the KL divergence from where the policy started (the reference)
keeps the text fluent. The main differences from chapter 1: a summary ends with the end-of-text token, and nothing
after it counts; a summary without one is punished (the end-of-text trick); the critic is a network of its own, which
starts as a copy of the reward model. Each update does eight things, the steps of `train()` below:

    1. sample posts
    2. generate summaries, up to the end-of-text token; keep their log-probs and values
    3. log-probs of the reference
    4. score the summaries; punish those that do not end
    5. per-token rewards: KL penalty on every token, score on the step after the last
    6. advantages and returns (GAE), for each minibatch again
    7. PPO epochs over minibatches
    8. adapt the KL coefficient and log

Steps 6 and 7 are the loop of `ppo_update`, because each minibatch whitens its own advantages. Every `eval_interval`
updates, held-out posts are summarised first. The sizes of batches come before `train()`, the functions of the
algorithm after it in its order, and metrics, loading and saving last.

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
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.lib import checkpoints, command_line, errors, files, layers, pretrained, processes, run, traces
from ppo_rlhf.lib.bounds import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ZeroToOne
from ppo_rlhf.lib.errors import InputError
from ppo_rlhf.tldr import classifiers, models, packing, posts, reward_functions
from ppo_rlhf.tldr.responses import draw_minibatches, generate_until, read_before_responses, response_statistics
from ppo_rlhf.train_policy import (
    AdaptiveKLController,
    average_gradients,
    episode_noise,
    has_stop,
    keyed_generator,
    read_scalar,
    read_tokens,
)
from ppo_rlhf.train_reward import RewardModel

# ---- Arguments -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RewardsArgs:
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
    x"""
    adaptive_kl: command_line.AdaptiveKLArgs = field(default_factory=command_line.AdaptiveKLArgs)
    """controller of the KL coefficient"""
    missing_eos: Literal["replace", "subtract", "none"] = "replace"
    """score of a summary that does not end: with replace it becomes minus the penalty, with subtract it is lowered by
    the penalty, with none it stays"""
    missing_eos_penalty: NonNegativeFloat = 1.0
    """the penalty for that"""


@dataclass(frozen=True, kw_only=True)
class PpoArgs(command_line.MemoryArgs):
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
    gamma: ZeroToOne = 1.0
    """discount per token"""
    lam: ZeroToOne = 0.95
    """lambda of generalised advantage estimation"""
    whiten_rewards: bool = False
    """scale the rewards of each minibatch to variance 1 (advantages always are)"""


@dataclass(frozen=True, kw_only=True)
class Args(command_line.PolicyRunArgs):
    preset: str = "tldr"
    """names a set of defaults: tldr, posts, reviews"""
    exp_name: str = "tldr_policy"
    seed: NonNegativeInt = 44413
    """seed of the sampling noise, the order of the posts and the minibatches"""
    base_model: str = ""
    """model to start from: the folder of a fine-tuned model, models/<run>/sft, or a name on the hub"""
    eval_interval: NonNegativeInt = 20
    """updates between evaluations on the first 64 held-out posts, from update 0 on; 0: only at the end"""
    eval_posts: NonNegativeInt = 0
    """held-out posts to summarise after training; 0: all"""
    task: posts.TaskArgs = field(default_factory=posts.TaskArgs)
    """queries and responses"""
    rewards: RewardsArgs = field(default_factory=RewardsArgs)
    """score and KL penalty"""
    ppo: PpoArgs = field(default_factory=PpoArgs)
    """the optimisation"""
    lora: models.LoraArgs = field(default_factory=models.LoraArgs)
    """low-rank adapters"""


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
            adaptive_kl=command_line.AdaptiveKLArgs(target=6.0, horizon=300),
            missing_eos_penalty=3.0,
        ),
        ppo=PpoArgs(
            total_episodes=1_280, batch_size=32, nminibatches=2, noptepochs=2, lr=5e-4, local_micro_batch_size=16
        ),
        lora=models.LoraArgs(rank=16, target_modules="all-linear"),
    ),
}


EVAL_PROMPTS = 64  # held-out posts of an evaluation during training

# ---- Sizes -----------------------------------------------------------------------------------------------------
#
# How a batch is divided, with the numbers of the default, Pythia 1B on one process:
#
#     batch         512 episodes, one update; every process has an equal part, its local batch
#     group          no such thing here: a whole minibatch, on all processes, is whitened together
#     minibatch     512: 1 / nminibatches of the batch, one optimiser step; 4 epochs make 4 steps
#     pass          a part of the minibatch, or micro-batch, that is read at a time; changes memory, not numbers


@dataclass(frozen=True, kw_only=True)
class PpoSizes:
    """Sizes, from the arguments and the number of processes, in episodes unless the name says otherwise."""

    updates: int
    batch: int
    local_batch: int
    local_rollout_batch: int


def ppo_sizes(ppo: PpoArgs, num_processes: int) -> PpoSizes:
    """Divide the global sizes exactly, or say which size does not divide and what would."""
    command_line.check_whole_update(ppo.total_episodes, ppo.batch_size)
    slices, what = num_processes * ppo.nminibatches, f"processes x {errors.typed('ppo.nminibatches')}"
    processes.split_evenly("ppo.batch_size", ppo.batch_size, slices, what)
    local_batch = ppo.batch_size // num_processes
    return PpoSizes(
        updates=ppo.total_episodes // ppo.batch_size,
        batch=ppo.batch_size,
        local_batch=local_batch,
        local_rollout_batch=min(ppo.local_rollout_batch_size, local_batch),
    )


# ---- Train -----------------------------------------------------------------------------------------------------


def train(args: Args, joint: dict | None = None) -> Path:
    """Train a policy and a critic; return the folder models/<run>/policy, on every process. joint: of tldr/all.py.

    Raises InputError, a ValueError: on bad arguments before anything is written; later if a disk or a function fails.
    """
    accelerator = processes.make_accelerator()
    setup = check(args, accelerator.num_processes)
    args, sizes, ids, scale = setup.args, setup.sizes, setup.ids, setup.scale
    task, ppo = args.task, args.ppo
    actor_critic, reference = load_networks(args, setup.tokenizer, accelerator)
    score = load_scorer(args, setup.tokenizer, ids, accelerator)
    setup = dataclasses.replace(setup, accelerator=accelerator, score=score)
    # [T46] One optimiser for both networks, and one learning rate, constant within an update.   ppo.py#L575-L577
    optimizer = torch.optim.AdamW(
        [parameter for parameter in actor_critic.parameters() if parameter.requires_grad],
        ppo.lr,
        eps=ppo.adam_eps,
        weight_decay=ppo.weight_decay,
        fused=True,
    )
    adaptive_kl = args.rewards.adaptive_kl
    controller = AdaptiveKLController(args.rewards.kl_coef, adaptive_kl.target, adaptive_kl.horizon)
    this_run = run.Run(args, accelerator, dataclasses.asdict(sizes), joint)
    save = partial(save_models, setup=setup, actor_critic=actor_critic, adapters=reference.adapters)
    this_run.rehearse(save)
    # From the newest checkpoint; {"step": 0} if there is none.
    resumed = this_run.resume(partial(checkpoints.restore_training_state, actor_critic, optimizer))
    controller.value = resumed.get("kl_coef", controller.value)
    scale.mean, scale.std = resumed.get("score_scale", (scale.mean, scale.std))
    evaluation = {name: math.nan if mean is None else mean for name, mean in resumed.get("evaluation", {}).items()}
    if has_own_scale(args.rewards) and args.rewards.normalize_samples and resumed["step"] == 0:
        # [X18] The KL coefficient and the critic are meant for scores of mean 0 and deviation 1.
        scale.fit(scores_of_base_model(setup, actor_critic))
    this_run.start_logging(resumed["step"])
    rows = slice(accelerator.process_index * sizes.local_batch, (accelerator.process_index + 1) * sizes.local_batch)

    for update in this_run.updates("PPO", "episodes", first=resumed["step"], total=sizes.updates):
        optimizer.param_groups[0]["lr"] = lr = ppo.lr * (1 - update / sizes.updates)
        if args.eval_interval and update % args.eval_interval == 0:  # metrics repeat the newest result
            with this_run.saved_if_it_fails():
                prompts = setup.held_out["validation"].first(EVAL_PROMPTS)
                evaluation, evaluation_rows = evaluate_policy(setup, actor_critic, prompts, update)
            if update == 0:
                this_run.write_evaluation("before", evaluation_rows)

        # 1. Sample posts. Every process draws the whole batch and takes its rows.
        drawn = posts_of_update(args.seed, len(setup.train_posts), update=update, batch=sizes.batch)  # (batch,)
        batch = setup.train_posts.rows(drawn[rows])
        uniforms = episode_noise(args.seed, update, sizes.batch, task.response_length)[rows]

        # 2. Generate summaries, 3. read them with the reference, 4. score them, 5. compute per-token rewards.
        with this_run.saved_if_it_fails():
            rollout = make_rollout(
                setup, actor_critic, reference, batch=batch, uniforms=uniforms, kl_coef=controller.value
            )

        # 6. Compute advantages and returns, and 7. optimise: `ppo_update` does both for each minibatch.
        minibatches = draw_minibatches(args.seed, update, ppo.noptepochs, rows, ppo.nminibatches)
        steps = ppo_update(
            actor_critic,
            optimizer,
            rollout=rollout,
            minibatches=minibatches,
            ppo=ppo,
            pad_id=ids.pad,
            temperature=task.temperature,
            accelerator=accelerator,
        )

        # 8. Adapt the KL coefficient and log. The controller sees the KL averaged over all processes.
        metrics = update_metrics(
            setup, this_run, update, rollout=rollout, steps=steps, kl_coef=controller.value, lr=lr
        )
        controller.update(metrics["objective/kl"], sizes.batch)
        state = {
            "kl_coef": controller.value,
            "score_scale": [scale.mean, scale.std],
            "evaluation": files.without_nan(evaluation),
        }
        this_run.end_of_update(
            update,
            metrics | evaluation,
            f"score {metrics['objective/scores']:+.2f}, KL {metrics['objective/kl']:.2f}, "
            f"{100 * metrics['objective/eos_rate']:.0f} % end",
            samples=partial(sample_rows, setup, rollout),
            trace=partial(
                record_trace,
                setup,
                this_run,
                update,
                actor_critic=actor_critic,
                reference=reference,
                rollout=rollout,
                kl_coef=controller.value,
            ),
            # The counterpart of `resume` above.
            checkpoint=lambda state=state: (checkpoints.training_state(actor_critic, optimizer), state),
        )

    results = {}
    for split, held_out in setup.held_out.items():
        with this_run.saved_if_it_fails():
            means, evaluation_rows = evaluate_policy(setup, actor_critic, held_out, sizes.updates)
        this_run.write_evaluation(split, evaluation_rows)
        for name, mean in means.items():
            results[name.replace("eval", split, 1)] = mean
        for name, mean in posts.rouge(evaluation_rows).items():
            results[f"{split}/rouge/{name}"] = mean
    save(this_run.model_folder)
    results |= this_run.last_means("scores", "kl", "eos_rate")
    this_run.finish("policy", "value", **results, too_long=setup.train_posts.too_long)
    return this_run.model_folder / "policy"


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


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The parts of a run that no update changes. `train` adds the last two, once everything else is checked."""

    args: Args
    sizes: PpoSizes
    tokenizer: PreTrainedTokenizerBase
    ids: posts.TaskIds
    train_posts: posts.Posts
    held_out: dict[str, posts.Posts]  # of the splits validation and test
    monitor: dict[str, reward_functions.Scorer]  # what is only logged, under its name
    scale: Scale = field(default_factory=Scale)  # of the scores of a function
    score: reward_functions.Scorer | None = None  # (queries, responses, references) -> (rows,), before it is scaled
    accelerator: Accelerator | None = None


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Episodes of one process, its part of the batch. PPO needs the first six tensors; the rest is for the logs.

    After a response's end, rewards are 0, and log-probs and values mean nothing.
    """

    query_responses: Tensor  # (local_batch, context_length + response_length), padding after the stop token
    logprobs: Tensor  # (local_batch, response_length), under the policy that sampled
    values: Tensor  # (local_batch, response_length), of the critic at that time
    rewards: Tensor  # (local_batch, response_length), KL penalty and score, not whitened
    mask: Tensor  # (local_batch, response_length) bool, of the tokens
    value_mask: Tensor  # (local_batch, response_length) bool, of the values
    references: Tensor | None = None  # (local_batch, response_length), the summaries of the data
    stopped: Tensor | None = None  # (local_batch,) bool, whether the summary ends
    raw_scores: Tensor | None = None  # (local_batch,), on the scale of a reward model
    scores: Tensor | None = None  # (local_batch,), after the end-of-text trick
    ref_logprobs: Tensor | None = None  # (local_batch, response_length)
    kl: Tensor | None = None  # (local_batch, response_length), nats
    non_score_rewards: Tensor | None = None  # (local_batch, response_length), the KL penalty
    sampler_gap: Tensor | None = None  # (local_batch, response_length), distance of log-probs from the sampler's
    monitored: dict[str, Tensor] = field(default_factory=dict)  # (local_batch,) each
    seen: list[traces.Seen] = field(default_factory=list)  # what each pass of training computed, for traces

    @property
    def queries(self) -> Tensor:
        """The posts alone: (local_batch, context_length)."""
        return self.query_responses[:, : -self.logprobs.shape[1]]

    @property
    def responses(self) -> Tensor:
        """The responses alone: (local_batch, response_length)."""
        return self.query_responses[:, -self.logprobs.shape[1] :]


# ---- Steps 1 to 5: posts, summaries, scores, rewards ---------------------------------------------------------


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


@torch.no_grad()
def make_rollout(
    setup: Setup,
    actor_critic: ActorCritic,
    reference: models.Reference,
    *,
    batch: posts.Posts,
    uniforms: Tensor,
    kl_coef: float,
) -> Rollout:
    """Steps 2 to 5 for some posts (rows). uniforms: (rows, response_length) random numbers, one for each token."""
    ids, task, shaping = setup.ids, setup.args.task, setup.args.rewards
    device = setup.accelerator.device
    pass_rows = setup.args.ppo.local_rollout_batch_size
    references = batch.references.to(device)
    queries = posts.trim_padding(batch.queries, pad_id=ids.pad).to(device)  # (rows, context_length)
    with actor_critic.sampling():
        # 2. Generate summaries, up to the end-of-text token; record their log-probs and values: all of
        #    (rows, response_length).
        responses, logprobs, values, sampler_gap = packing.by_length(
            respond,
            actor_critic,
            queries,
            uniforms.to(processes.device_of_noise(device)),
            pad_id=ids.pad,
            rows=pass_rows,
            new_tokens=task.response_length,
            stop_ids=ids.stops,
            temperature=task.temperature,
        )

        # 3. Compute the reference's log-probs: (rows, response_length).
        query_responses = torch.cat([queries, responses], dim=1)
        ref_logprobs = packing.by_length(
            reference_logprobs,
            actor_critic,
            query_responses,
            responses,
            pad_id=ids.pad,
            rows=pass_rows,
            reference=reference,
            temperature=task.temperature,
        )

        # 4. Score the summaries, on the scale of a reward model; punish those that do not end.
        raw_scores = setup.scale.apply(setup.score(queries, responses, references))  # (rows,)
        stopped = has_stop(responses, ids.stops, 0)  # (rows,)
        scores = punish_missing_eos(
            raw_scores, stopped, form=shaping.missing_eos, penalty=shaping.missing_eos_penalty
        )

        # 5. Compute per-token rewards. The score judges the whole summary, so it comes once, when the summary is
        #    complete. The KL divergence is a sum over tokens, so each token pays for its own part.
        mask, value_mask = response_masks(responses, ids.pad)  # (rows, response_length)
        rewards, non_score_rewards, kl = compute_rewards(
            scores,
            logprobs=logprobs,
            ref_logprobs=ref_logprobs,
            mask=mask,
            kl_coef=kl_coef,
            kl_estimator=shaping.kl_estimator,
        )
    return Rollout(
        query_responses=query_responses,
        logprobs=logprobs,
        values=values,
        rewards=rewards,
        mask=mask,
        value_mask=value_mask,
        references=references,
        stopped=stopped,
        raw_scores=raw_scores,
        scores=scores,
        ref_logprobs=ref_logprobs,
        kl=kl,
        non_score_rewards=non_score_rewards,
        sampler_gap=sampler_gap,
        monitored={name: function(queries, responses, references) for name, function in setup.monitor.items()},
    )


@torch.no_grad()
def respond(
    actor_critic: ActorCritic,
    contexts: Tensor,
    uniforms: Tensor,
    *,
    pad_id: int,
    stop_ids: Collection[int],
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sample responses to contexts (batch, context_length), with a random number for each token.

    Returns the responses, with padding after the stop token, their log-probs as training computes them, their values,
    and the distance of these log-probs from the sampler's: four of (batch, response_length).
    """
    # [T36] What follows the first stop token is padding; the token itself stays.   ppo.py#L350-L355, ppo.py#L632
    # [T33] Nobody looks at what follows, so it is not sampled.   ppo.py#L494-L495, ppo.py#L542-L549
    responses, sampled_logprobs = generate_until(
        actor_critic.lm_backbone, contexts, uniforms, pad_id, actor_critic.vocab_size, temperature, stop_ids
    )
    # [T34] The old log-probs are those of the training pass, so that the ratio starts at 1, but for rounding.
    #       ppo.py#L321-L335, ppo.py#L617-L619
    query_responses = torch.cat([contexts, responses], dim=1)
    logprobs, _, values = packing.by_length(
        nn.Module.__call__, actor_critic, query_responses, responses, pad_id=pad_id, temperature=temperature
    )
    sampler_gap = (logprobs - sampled_logprobs).abs().masked_fill(responses == pad_id, 0)
    return responses, logprobs, values, sampler_gap


def reference_logprobs(
    actor_critic: ActorCritic,
    query_responses: Tensor,
    responses: Tensor,
    *,
    pad_id: int,
    reference: models.Reference,
    temperature: float,
) -> Tensor:
    """Log-probs (batch, response_length) of the reference; tokens as `ActorCritic` gets them."""
    # [T35] At the policy's temperature, and over the same ids.   ppo.py#L623-L627
    with reference.in_use():
        logprobs, _ = response_statistics(
            reference.lm_backbone, query_responses, responses, pad_id, temperature, actor_critic.vocab_size
        )
    return logprobs


class ActorCritic(models.MixedPrecision):
    """The policy and the critic, two networks that share nothing.

    The critic is a reward model that is read before every token of the response, and not only at its end.
    """

    # [T32] It starts as the reward model, so its value after the end of text is the score.   ppo.py#L471-L500
    def __init__(
        self, lm_backbone: PreTrainedModel, critic: RewardModel, vocab_size: int, *, low_precision: bool = False
    ):
        """vocab_size: number of ids that can be sampled; the output layer may have more rows [T14]."""
        super().__init__()
        self.lm_backbone = lm_backbone
        self.critic = critic
        self.vocab_size = vocab_size
        self.low_precision = low_precision

    def forward(
        self, query_responses: Tensor, responses: Tensor, pad_id: int, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs of the response tokens, entropies (nats) and values at each of their positions.

        query_responses: (batch, length), posts and their responses, with padding anywhere. responses: (batch,
        response_length), the same responses, with padding at their end. Returns three tensors of (batch,
        response_length); what they hold at padding means nothing.
        """
        with self.autocast():
            logprobs, entropies = response_statistics(
                self.lm_backbone, query_responses, responses, pad_id, temperature, self.vocab_size
            )
            # [T38] A value belongs to the position before the response token, as its log-prob does.
            #       ppo.py#L637-L640
            backbone = self.critic.lm_backbone
            hidden_states = read_before_responses(backbone, query_responses, responses, pad_id)
            values = self.critic.gain * read_scalar(self.critic.reward_head, hidden_states) + self.critic.bias
        return logprobs, entropies, values


def punish_missing_eos(
    scores: Tensor, stopped: Tensor, form: Literal["replace", "subtract", "none"], penalty: float
) -> Tensor:
    """Scores (batch,) after the end-of-text trick, which lowers those of responses that have not stopped (batch,)."""
    # [T39] The score of a summary without the stop token becomes minus the penalty, or is lowered by it, or stays.
    #       ppo.py#L662-L667, TRL ppo_trainer.py#L758-L759
    punished = {"replace": torch.full_like(scores, -penalty), "subtract": scores - penalty, "none": scores}
    return torch.where(stopped, scores, punished[form])


# ---- Steps 5 to 7: rewards, advantages, losses -----------------------------------------------------------------
#
# A mask is True where an entry counts. Other entries, even NaN, reach neither a result nor a gradient.


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


K3_WARNING = (
    "as a reward, its gradient vanishes near the reference and can point away from it further out; that of k1 is the "
    "gradient of the KL divergence"
)


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
    # [T43] The score is the reward of the step after the last token, where there is one.   ppo.py#L679-L685
    step_after = mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)  # each token, (batch, response_length)
    position = step_after.max(1, keepdim=True).values.clamp(max=mask.shape[1] - 1)  # (batch, 1)
    rewards = non_score_rewards.scatter_add(1, position, scores.unsqueeze(1).to(x.dtype))
    return rewards, non_score_rewards, kl


def ppo_update(
    actor_critic: ActorCritic,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    minibatches: Tensor,
    ppo: PpoArgs,
    pad_id: int,
    temperature: float,
    accelerator: Accelerator,
    before_step: Callable[[int, dict[str, Tensor]], None] | None = None,
) -> dict[str, Tensor]:
    """Steps 6 and 7: all epochs of PPO on one rollout.

    minibatches: this process's episodes in each, (epochs, nminibatches, local_minibatch). before_step: called before
    each optimiser step with its number, from 0, and with the numbers that are returned of it. Returns numbers of the
    optimiser steps, (steps,), most under the name that they are logged with: this process's share of the mean over
    what counts in the minibatch, and of the gradient norm. The shares of all processes add up.
    """
    reduce, device = partial(accelerator.reduce, reduction="sum"), rollout.rewards.device
    lengths = packing.count_tokens(rollout.query_responses, pad_id)  # (local_batch,), on the CPU as minibatches
    steps: list[dict[str, Tensor]] = []  # what is logged of each optimiser step
    for b_inds in minibatches:  # of an epoch
        for cpu_inds in b_inds:  # (local_minibatch,)
            mb_inds = cpu_inds.to(device)

            # 6. Compute advantages and returns. The critic's values say how well a summary was going to do anyway.
            #    What is left, the advantage, says what the sampled token added, with much less noise.
            mb_mask, mb_value_mask = rollout.mask[mb_inds], rollout.value_mask[mb_inds]  # (local_minibatch, length)
            mb_values = rollout.values[mb_inds]
            mb_advantages, mb_returns = compute_advantages(
                rollout.rewards[mb_inds],
                values=mb_values,
                mask=mb_mask,
                value_mask=mb_value_mask,
                ppo=ppo,
                reduce=reduce,
            )
            rollout.seen.append((mb_inds, {"advantages": mb_advantages, "returns": mb_returns}))

            # 7. Make one optimiser step. The ratio says how much more likely a token has become since it was sampled.
            #    Advantages were measured under the old policy and mean less the further the policy moves away from
            #    it. So the losses are clipped: beyond the clip range, nothing is gained by moving on.
            # [T45] [X21] Every sum is divided by what counts in the whole minibatch, on all processes: a token has
            #       the same weight in whatever micro-batch and process it is.
            count, value_count = reduce(mb_mask.sum()), reduce(mb_value_mask.sum())
            # [T48] Gradients of micro-batches add up. We step when all are done, without accelerate's counter.
            #       ppo.py#L721
            optimizer.zero_grad()
            shares: list[dict[str, Tensor]] = []  # what is logged of each micro-batch
            for tokens, rows in packing.micro_batches(
                actor_critic,
                lengths[cpu_inds],
                rollout.query_responses[mb_inds],
                torch.arange(len(mb_inds)),
                pad_id=pad_id,
                rows=ppo.local_micro_batch_size,
            ):
                # tokens: (micro_batch, length); rows of the minibatch: (micro_batch,); others: (micro_batch,
                # response_length)
                inds = mb_inds[rows]
                logprobs, mask, value_mask = rollout.logprobs[inds], mb_mask[rows], mb_value_mask[rows]
                new_logprobs, entropies, new_values = actor_critic(
                    tokens, rollout.responses[inds], pad_id, temperature
                )
                rollout.seen.append(
                    (inds, {"new_logprobs": new_logprobs.detach(), "new_values": new_values.detach()})
                )
                pg_loss, pg_clipfrac, approxkl = policy_loss(
                    new_logprobs,
                    logprobs=logprobs,
                    advantages=mb_advantages[rows],
                    mask=mask,
                    cliprange=ppo.cliprange,
                    count=count,
                )
                vf_loss, vf_clipfrac = value_loss(
                    new_values,
                    values=mb_values[rows],
                    returns=mb_returns[rows],
                    mask=value_mask,
                    cliprange_value=ppo.cliprange_value,
                    count=value_count,
                )
                loss = pg_loss + ppo.vf_coef * vf_loss
                (loss * accelerator.num_processes).backward()  # gradients will be averaged over processes
                statistics = token_statistics(
                    new_logprobs,
                    entropies=entropies,
                    new_values=new_values,
                    logprobs=logprobs,
                    returns=mb_returns[rows],
                    mask=mask,
                    value_mask=value_mask,
                    count=count,
                    value_count=value_count,
                )
                shares.append(
                    {
                        "loss/policy_avg": pg_loss.detach(),
                        "policy/clipfrac_avg": pg_clipfrac,
                        "policy/approxkl_avg": approxkl,
                        "loss/value_avg": vf_loss.detach(),
                        "val/clipfrac_avg": vf_clipfrac,
                        **statistics,
                    }
                )
            average_gradients(actor_critic)
            gradient_norm = processes.gradient_norm(actor_critic)
            values, returns = processes.widened(mb_values), processes.widened(mb_returns)
            step = {name: sum(share[name] for share in shares) for name in shares[0]} | {
                "val/mean": masked_mean(values, mb_value_mask, value_count),
                "square_of_value": masked_mean(values**2, mb_value_mask, value_count),
                "returns/mean": masked_mean(returns, mb_value_mask, value_count),
                "square_of_return": masked_mean(returns**2, mb_value_mask, value_count),
                "gradient_norm": gradient_norm / accelerator.num_processes,
            }
            if before_step is not None:
                before_step(len(steps), step)
            optimizer.step()
            steps.append(step)
    return {name: torch.stack([step[name] for step in steps]) for name in steps[0]}


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
    # [X25] Over the whole minibatch, on all processes.
    return whiten(advantages, mask, keep_mean=False, reduce=reduce), returns


def whiten(values: Tensor, mask: Tensor, *, keep_mean: bool, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Shift and scale what counts to mean 0 and variance 1; keep_mean adds the mean back. 0 where masked.

    values, mask: (batch, response_length). The variance is biased [T52], and 1e-8 is added to it. reduce: sums a
    tensor over all processes.
    """
    # [T44] The masked mean and variance.   ppo.py#L235-L241, ppo.py#L687-L704
    count = reduce(mask.sum())
    mean = reduce(values.masked_fill(~mask, 0).sum()) / count
    variance = reduce(((values - mean) ** 2).masked_fill(~mask, 0).sum()) / count
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    return (whitened + mean if keep_mean else whitened).masked_fill(~mask, 0)


def compute_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the values that count; the value after the last of them is 0.

        delta_t = r_t + gamma * V_{t+1} - V_t        A_t = delta_t + gamma * lam * A_{t+1}        R_t = A_t + V_t

    rewards, values, mask (of the values): (batch, response_length). Returns advantages (not whitened) and returns, of
    that shape, 0 where masked. A hole in the mask, such as what another speaker says, is skipped: t + 1 is the next
    value that counts.
    """
    # [T44] Whatever comes after is set to 0, so that nothing leaks in.   ppo.py#L235-L241, ppo.py#L687-L704
    rewards, values = rewards.masked_fill(~mask, 0), values.masked_fill(~mask, 0)
    # [D56] [D57] Backwards in time; returns are advantages before whitening, plus values.
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
    # [T45] Sums over what counts, divided by the count of the whole minibatch.   ppo.py#L731-L759
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
    # [T45] Sums over what counts, divided by the count of the whole minibatch.   ppo.py#L731-L759
    new_values, values, returns = (tensor.masked_fill(~mask, 0) for tensor in (new_values, values, returns))
    clipped_values = torch.clamp(new_values, values - cliprange_value, values + cliprange_value)
    losses = (new_values - returns) ** 2  # (batch, response_length)
    clipped_losses = (clipped_values - returns) ** 2  # (batch, response_length)
    clipfrac = masked_mean((clipped_losses > losses).to(losses.dtype), mask, count)
    return 0.5 * masked_mean(torch.maximum(losses, clipped_losses), mask, count), clipfrac


def masked_mean(values: Tensor, mask: Tensor, count: Tensor) -> Tensor:
    """The sum of the entries that the mask keeps, divided by a count: 0-d. values, mask: of one shape."""
    return values.masked_fill(~mask, 0).sum() / count


@torch.no_grad()
def token_statistics(
    new_logprobs: Tensor,
    entropies: Tensor,
    new_values: Tensor,
    logprobs: Tensor,
    returns: Tensor,
    mask: Tensor,
    value_mask: Tensor,
    count: Tensor,
    value_count: Tensor,
) -> dict[str, Tensor]:
    """A micro-batch's share of means over tokens or values; tensors are (micro_batch, response_length)."""
    # [X34] Masked positions are left out.   ppo.py#L722-L771
    ratio = torch.exp((new_logprobs - logprobs).masked_fill(~mask, 0))
    return {
        "policy/entropy_avg": masked_mean(entropies, mask, count),
        "val/ratio": masked_mean(ratio, mask, count),
        "square_of_ratio_minus_1": masked_mean((ratio - 1) ** 2, mask, count),
        "val/vpred": masked_mean(new_values, value_mask, value_count),
        "val/error": masked_mean((new_values - returns) ** 2, value_mask, value_count),
    }


# ---- Step 8: metrics -------------------------------------------------------------------------------------------


# Under these names a run without a monitor logs an objective, an evaluation or a column of its tables.
TAKEN = {"kl", "entropy", "non_score_reward", "scores", "raw_scores", "eos_rate", "response_length", "sampler_gap"}
TAKEN |= {"kl_coef", "rlhf_reward", "function_score", "reference_scores", *posts.COLUMNS}


def update_metrics(
    setup: Setup,
    this_run: run.Run,
    update: int,
    *,
    rollout: Rollout,
    steps: dict[str, Tensor],
    kl_coef: float,
    lr: float,
) -> dict[str, float]:
    """The metrics of an update: means over all episodes, means over all optimiser steps, and how far the run is.

    steps: what ppo_update returns. kl_coef: what the rewards were made with. Every process adds its shares, and all
    get the same numbers. Raises a NumericalError if they are impossible.
    """
    args, accelerator = setup.args, setup.accelerator
    more = {
        "raw_scores": rollout.raw_scores,
        "sampler_gap": rollout.sampler_gap.sum(1) / rollout.mask.sum(1),
        **rollout.monitored,
    }
    if has_own_scale(args.rewards):
        more["function_score"] = setup.scale.undo(rollout.raw_scores)
    metrics = algorithm_metrics(rollout, steps, accelerator, kl_coef=kl_coef, more=more)
    metrics["lr"] = lr
    # Episodes so far, and episodes per second since the start.   TRL ppo_trainer.py#L660-L911
    metrics["episode"] = (update + 1) * args.ppo.batch_size
    metrics["time"] = this_run.seconds()
    metrics["eps"] = metrics["episode"] / metrics["time"]
    processes.check_update(metrics, update, args.dtype, monitored=rollout.monitored)
    processes.check_equal("objective/kl_coef", kl_coef, accelerator)
    return metrics


def algorithm_metrics(
    rollout: Rollout,
    steps: dict[str, Tensor],
    accelerator: Accelerator,
    *,
    kl_coef: float,
    more: dict[str, Tensor],
) -> dict[str, float]:
    """The metrics of an update that don't depend on the script. more: of each episode, (local_batch,) by name."""
    objectives = {  # of each episode, (local_batch,)
        "kl": rollout.kl.sum(1),
        "entropy": -rollout.logprobs.masked_fill(~rollout.mask, 0).sum(1),
        "non_score_reward": rollout.non_score_rewards.sum(1),
        "scores": rollout.scores,
        "eos_rate": rollout.stopped,
        "response_length": rollout.mask.sum(1),
        **more,
    }
    shares = {}
    for name, values in objectives.items():
        shares[f"objective/{name}"] = processes.widened(values).mean() / accelerator.num_processes
    for name, values in steps.items():
        shares[name] = values.mean()
    shares["square_of_first_gap"] = steps["square_of_ratio_minus_1"][0]
    shares["val/num_eos_tokens"] = rollout.stopped.sum()
    means = processes.sum_over_processes(shares, accelerator)
    metrics = {name: mean for name, mean in means.items() if not name.startswith("square_of_")}
    # [X34] Variances over tokens and values; summaries that end.
    metrics["val/first_ratio_gap"] = math.sqrt(means["square_of_first_gap"])
    metrics["val/ratio_var"] = variance(means["square_of_ratio_minus_1"], means["val/ratio"] - 1)
    metrics["val/var"] = variance(means["square_of_value"], means["val/mean"])
    metrics["returns/var"] = variance(means["square_of_return"], means["returns/mean"])
    metrics["val/var_explained"] = 1 - means["val/error"] / max(metrics["returns/var"], 1e-12)
    metrics["objective/kl_coef"] = kl_coef
    metrics["objective/rlhf_reward"] = means["objective/scores"] + means["objective/non_score_reward"]
    return metrics


def variance(mean_square: float, mean: float) -> float:
    """E[x^2] - E[x]^2; infinite where the squares are."""
    return mean_square - mean**2 if math.isfinite(mean_square) else mean_square


def sample_rows(setup: Setup, rollout: Rollout) -> list[dict]:
    """A few episodes to print."""
    rows = posts.evaluation_rows(
        setup.tokenizer,
        setup.ids,
        rollout.queries[:3],
        rollout.responses[:3],
        rollout.references[:3],
        scores=rollout.scores[:3],
        kl=rollout.kl[:3].sum(1),
    )
    return posts.sample_table(rows)


@torch.no_grad()
def record_trace(
    setup: Setup,
    this_run: run.Run,
    update: int,
    *,
    actor_critic: ActorCritic,
    reference: models.Reference,
    rollout: Rollout,
    kl_coef: float,
) -> None:
    """Keep episodes of the batch, and summaries of the first held-out posts with the same noise each time.

    kl_coef: for the rewards of these summaries. Every process must call this.
    """
    args, ids, task = setup.args, setup.ids, setup.args.task

    def keep(numbers: dict[str, Any], episodes: int, *, again: bool = False) -> None:
        references = posts.without_ends(numbers["references"][:episodes], setup.tokenizer, ids)
        texts = {"reference": posts.to_texts(setup.tokenizer, references, ids.pad)}
        traces.keep(
            this_run,
            update,
            numbers,
            episodes=episodes,
            tokenizer=setup.tokenizer,
            pad_id=ids.pad,
            texts=texts,
            again=again,
        )

    # Episodes that the policy has just learned from, with what it says of them now.
    episodes = min(args.trace_episodes, len(rollout.logprobs))
    new_logprobs, entropies, new_values = actor_critic(
        rollout.query_responses[:episodes], rollout.responses[:episodes], ids.pad, task.temperature
    )
    # Whitened over the whole batch, not over one minibatch.
    advantages, returns = compute_advantages(
        rollout.rewards,
        values=rollout.values,
        mask=rollout.mask,
        value_mask=rollout.value_mask,
        ppo=args.ppo,
        reduce=partial(setup.accelerator.reduce, reduction="sum"),
    )
    advantages = advantages[:episodes]
    ratio = torch.exp(new_logprobs - rollout.logprobs[:episodes])
    clipped_ratio = ratio.clamp(1 - args.ppo.cliprange, 1 + args.ppo.cliprange)
    numbers = dict(vars(rollout))
    numbers |= traces.of_passes(rollout.seen, numbers, episodes, setup.accelerator)
    numbers |= {
        "new_logprobs": new_logprobs,
        "entropies": entropies,
        "new_values": new_values,
        "advantages": advantages,
        "returns": returns[:episodes],
        "ratio": ratio,
        "clipped": advantages * (clipped_ratio - ratio) < 0,
    }
    keep(numbers, episodes)

    # A trace must not call functions of the user's.
    without_user_code = dataclasses.replace(
        setup,
        score=traces.scorer_of_traces(setup.score, args.rewards.function),
        monitor={name: traces.scorer_of_traces(score, args.rewards.monitor) for name, score in setup.monitor.items()},
    )
    held_out = setup.held_out["validation"].first(traces.TRACED)
    again = make_rollout(
        without_user_code,
        actor_critic,
        reference,
        batch=held_out,
        uniforms=episode_noise(args.seed, 0, len(held_out), task.response_length),
        kl_coef=kl_coef,
    )
    numbers = dict(vars(again))
    numbers["statistics.kl_coef"] = torch.full((len(held_out),), kl_coef, dtype=torch.float64)
    keep(numbers, len(held_out), again=True)


# ---- Evaluation ------------------------------------------------------------------------------------------------


def evaluate_policy(
    setup: Setup, actor_critic: ActorCritic, held_out: posts.Posts, update: int
) -> tuple[dict[str, float], list[dict]]:
    """Summarise held-out posts at the temperature of evaluations. Returns means and the rows of evaluation.jsonl.

    There is no penalty for summaries that do not end. Raises a NumericalError that names the update if a mean is not
    finite.
    """
    args, ids, scale = setup.args, setup.ids, setup.scale
    judges = {"scores": lambda *tokens: scale.apply(setup.score(*tokens)), **setup.monitor}

    def measure(queries: Tensor, responses: Tensor, references: Tensor) -> list[Tensor]:
        """What each judge says of summaries and of references."""
        return [judge(queries, texts, references) for judge in judges.values() for texts in (responses, references)]

    with actor_critic.sampling():
        responses, *measured = posts.summarise(
            actor_critic.lm_backbone,
            held_out,
            ids=ids,
            task=args.task,
            generator=keyed_generator(args.seed, "evaluate"),
            chunk=setup.sizes.local_rollout_batch,
            accelerator=setup.accelerator,
            measure=measure,
        )
    columns = [prefix + name for name in judges for prefix in ("", "reference_")]
    numbers = dict(zip(columns, measured, strict=True))
    rows = posts.evaluation_rows(setup.tokenizer, ids, held_out.queries, responses, held_out.references, **numbers)
    means = {f"eval/{name}": processes.widened(values).mean().item() for name, values in numbers.items()}
    means["eval/eos_rate"] = processes.widened(has_stop(responses, ids.stops, 0)).mean().item()
    means["eval/response_length"] = processes.widened((responses != ids.pad).sum(1)).mean().item()
    monitored = {f"eval/{prefix}{name}" for name in setup.monitor for prefix in ("", "reference_")}
    trained = {name: mean for name, mean in means.items() if name not in monitored}
    processes.check_finite(trained, update, "the reward model or function must give every summary a number")
    return means, rows


# ---- Plumbing: networks and scorers to load, checkpoints, the saved models -------------------------------------


def check(args: Args, num_processes: int, *, scores_are_named: bool = True) -> Setup:
    """Refuse what can be refused before any weights are loaded; find and read what the arguments name.

    scores_are_named: whether they must name what scores; False if an earlier stage will make it.
    """
    command_line.check_run(args)
    command_line.check_controller(args.rewards.adaptive_kl, args.ppo.batch_size)
    if args.rewards.kl_estimator == "k3":
        errors.say_once(f"{errors.flag('rewards.kl_estimator')} k3: {K3_WARNING}")
    if not args.base_model:
        raise InputError(
            f"{errors.flag('base_model')} is empty; give the folder of a fine-tuned model, models/<run>/sft"
        )
    sizes = ppo_sizes(args.ppo, num_processes)
    has_one_source = bool(args.rewards.function) != bool(args.rewards.trained_model)
    if scores_are_named and not has_one_source:
        raise InputError(f"give one of {errors.flag('rewards.trained_model')} and {errors.flag('rewards.function')}")
    if args.rewards.label and not classifiers.is_foreign(args.rewards.trained_model):
        raise InputError(
            f"{errors.flag('rewards.label')} {args.rewards.label} does nothing without a reward model from "
            f"elsewhere; leave it empty"
        )
    tokenizer = pretrained.load_tokenizer(args.base_model, args.trust_remote_code)
    ids = posts.task_ids(args.task, tokenizer)
    if args.lora.rank:
        base = pretrained.empty_model(args.base_model, args.trust_remote_code, AutoModelForCausalLM)
        models.add_adapters(base, args.lora, args.seed)
    if folder := args.rewards.value_model:
        pretrained.find_head(Path(folder), f"{errors.flag('rewards.value_model')} {folder}")
        critic = pretrained.empty_model(folder, args.trust_remote_code, AutoModel)
        pretrained.check_reward_model(critic, args, ids.vocab_size, "value_model")
    of_texts = partial(posts.text_scorer, tokenizer=tokenizer, ids=ids)
    return Setup(
        args=args,
        sizes=sizes,
        tokenizer=tokenizer,
        ids=ids,
        train_posts=posts.read_posts(args.task, tokenizer, "train"),
        held_out={
            split: posts.read_posts(args.task, tokenizer, split, args.eval_posts) for split in ("validation", "test")
        },
        monitor=reward_functions.load_monitor(args.rewards.monitor, TAKEN, of_texts),
    )


def load_networks(
    args: Args, tokenizer: PreTrainedTokenizerBase, accelerator: Accelerator
) -> tuple[ActorCritic, models.Reference]:
    """Policy, critic and reference."""
    vocab_size = pretrained.vocabulary_size(tokenizer)
    return join_networks(
        models.load_base_model(args),
        models.load_critic(args, tokenizer),
        None if args.lora.rank else models.load_base_model(args, frozen=True),
        args=args,
        length=args.task.query_length + args.task.response_length,
        vocab_size=vocab_size,
        device=accelerator.device,
    )


def join_networks(
    lm_backbone: PreTrainedModel,
    critic: RewardModel,
    frozen: PreTrainedModel | None,
    *,
    args: Any,
    length: int,
    vocab_size: int,
    device: torch.device,
) -> tuple[ActorCritic, models.Reference]:
    """Three loaded models as they are trained. frozen: the reference; None: the policy without the adapters it gets.

    args: base_model, dtype, gradient_checkpointing, lora and seed are read. length: of the longest row, in tokens.
    """
    packing.enable(lm_backbone, critic.lm_backbone)
    actor_critic = ActorCritic(lm_backbone, critic, vocab_size, low_precision=args.dtype == "bfloat16")
    if args.gradient_checkpointing:
        layers.checkpoint_layers(actor_critic)
    actor_critic.to(device)
    models.check_model(lm_backbone, args.base_model, length, vocab_size, read_tokens)
    if frozen is None:
        return actor_critic, models.Reference(lm_backbone, models.add_adapters(lm_backbone, args.lora, args.seed))
    packing.enable(frozen)
    frozen.to(device)
    return actor_critic, models.Reference(frozen, None)


def has_own_scale(shaping: RewardsArgs) -> bool:
    """Whether scores come from a function or a reward model from elsewhere, whose scale may be any."""
    return bool(shaping.function) or classifiers.is_foreign(shaping.trained_model)


def load_scorer(
    args: Args, tokenizer: PreTrainedTokenizerBase, ids: posts.TaskIds, accelerator: Accelerator
) -> reward_functions.Scorer:
    """The scorer of (queries, truncated responses, reference summaries); a reward model reads no references."""
    if args.rewards.function:
        return posts.text_scorer(args.rewards.function, "rewards.function", tokenizer, ids)
    if classifiers.is_foreign(args.rewards.trained_model):
        bare = partial(posts.bare, ids=ids)
        return classifiers.load_scorer(args, tokenizer, ids.pad, device=accelerator.device, bare=bare)
    reward_model = models.load_scalar_model(args, "trained_model", tokenizer, frozen=True)
    packing.enable(reward_model.lm_backbone)
    reward_model.to(accelerator.device)
    # [T37] The post with the truncated summary.   ppo.py#L635-L641
    return models.response_scorer(reward_model, ids.pad, rows=args.ppo.local_rollout_batch_size)


def scores_of_base_model(setup: Setup, actor_critic: ActorCritic) -> Tensor:
    """Scores (n,) of summaries that the policy samples of the first posts before it learns; this process's share."""
    args, accelerator = setup.args, setup.accelerator
    with actor_critic.sampling():
        _, scores = posts.summarise(
            actor_critic.lm_backbone,
            setup.train_posts.first(args.rewards.normalize_samples),
            ids=setup.ids,
            task=args.task,
            generator=keyed_generator(args.seed, "scale of the function"),
            chunk=setup.sizes.local_rollout_batch,
            accelerator=accelerator,
            measure=lambda *tokens: [setup.score(*tokens)],
            temperature=args.task.temperature,
        )
    return scores[accelerator.process_index :: accelerator.num_processes].to(accelerator.device)


def save_models(
    folder: Path, setup: Setup, actor_critic: ActorCritic, adapters: nn.Module | None, weights: bool = True
) -> None:
    """Save policy and critic, both as ordinary models. weights: whether theirs are saved, too."""
    # They open with the library.   ppo.py#L842-L861
    if not errors.is_first_process():
        return
    args = setup.args
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
        lm_backbone=actor_critic.lm_backbone,
        critic=actor_critic.critic,
        adapters=adapters,
        tokenizer=setup.tokenizer,
        info=info,
        trust_remote_code=args.trust_remote_code,
        weights=weights,
    )


if __name__ == "__main__":
    errors.run_script(lambda: train(command_line.parse_args(PRESETS, description=__doc__)))
