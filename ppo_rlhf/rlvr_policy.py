"""PPO, GRPO and their relatives with verifiable rewards: chapter 3.

A language model (the policy) solves problems, a verifier says of each response whether it is right, and reinforcement
learning makes right ones likelier, less a penalty on the KL divergence from where the policy started (the
reference). The main differences from chapter 2: the score comes from a rule, not from a model; there may be several
responses to a prompt, a group, whose mean takes the place of the critic; generation stops at a stop id. Each update
does eight things, and `train()` below reads so:

    1. draw problems
    2. generate n responses to each; their log-probs and values
    3. log-probs of the reference
    4. score: verifiers, punishments of what does not end or is too long
    5. per-token rewards: KL penalty on every token, score on the last
    6. advantages, by one of ESTIMATORS, and returns
    7. epochs over minibatches, in micro-batches: one of four losses, one of four ways to aggregate it
    8. log, and adapt the KL coefficient

Steps 1 to 4 are `rollout`, 6 and 7 `update`; rlvr_async.py uses both, with samplers elsewhere. Before the first
update, now and then, and after the last, held-out problems are solved.

Marks like [V33] name an implementation detail. The original is verl-project/verl at commit b178a3c; its file and line
stand beside the mark. See docs/details.

    python ppo_rlhf/rlvr_policy.py --preset sums                # no network: a world of word problems, in minutes
    python ppo_rlhf/rlvr_policy.py --preset gsm8k-grpo --ppo.advantage rloo
    accelerate launch --num_processes 8 ppo_rlhf/rlvr_policy.py --preset gsm8k --ppo.local_micro_batch_size 8
    python ppo_rlhf/rlvr_policy.py --resume runs/<run>          # go on after an interruption
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf import worlds
from ppo_rlhf.lib import cli, lm, models, passes, problems, processes, rewards as scorers, run
from ppo_rlhf.lib.errors import InputError, NumericalError

# ---- Arguments -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RewardsArgs:
    verifier: str = "gsm8k_strict"
    """what checks responses: gsm8k_strict, gsm8k_flexible, boxed, answer_line, or package.module:name of a function
    (prompts, responses, answers: texts) -> list of floats, where None or NaN is of a response that counts nowhere"""
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
    """estimate of the KL in the loss, where its slope acts, not its value"""
    adaptive_kl: cli.AdaptiveKLArgs = field(default_factory=cli.AdaptiveKLArgs)
    """controller of the KL coefficient in the reward"""
    missing_stop: Literal["none", "replace", "subtract"] = "none"
    """of a response that does not end: replace, its score becomes minus the penalty; subtract, it is lowered by it"""
    missing_stop_penalty: float = 1.0
    """units of score, for missing_stop"""
    min_response_length: int = 0
    """tokens; for missing_stop and mask_truncated, a shorter response counts as one that does not end"""
    overlong_buffer: int = 0
    """over so many tokens before response_length, a punishment rises from 0; 0: none"""
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
    """course of both learning rates from update to update; linear and cosine fall to 0 at the end of the run"""
    lr_warmup: int = 0
    """updates over which both learning rates rise linearly to lr and critic_lr"""
    critic_warmup: int = 0
    """updates at the start in which only the critic learns"""
    beta2: float = 0.999
    """second beta of AdamW; the first is 0.9"""
    adam_eps: float = 1e-8
    """epsilon of AdamW"""
    weight_decay: float = 0.01
    """weight decay of AdamW"""
    max_grad_norm: float = 1.0
    """gradients of policy and critic are scaled down to this norm, each for itself"""
    advantage: Literal["gae", "grpo", "dr_grpo", "rloo", "opo", "reinforce++", "reinforce++-baseline", "remax"] = (
        "gae"
    )
    """estimator of the advantages; only gae has a critic"""
    whiten_advantages: bool | None = None
    """scale the advantages of the batch to mean 0 and variance 1; None: as the estimator needs"""
    gamma: float = 1.0
    """discount per token; of gae and reinforce++ alone"""
    lam: float = 1.0
    """lambda of generalised advantage estimation"""
    loss: Literal["ppo", "gspo", "cispo", "reinforce"] = "ppo"
    """loss of the policy; see token_losses"""
    loss_aggregation: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """how losses of tokens become one number; see aggregate"""
    cliprange_low: float | None = None
    """the probability ratio is clipped to 1 - this; None: 0.2, but 1 for cispo, which as published has no lower bound
    (verl gives it one of 0.8)"""
    cliprange_high: float = 0.2
    """and to 1 + this; about 4e-4 for gspo, and 3 to 7 for cispo as in ScaleRL, whose upper bound is 4 to 8"""
    dual_clip: float | None = None
    """a token of a bad response whose ratio exceeds this is no longer pushed down; None: no such bound"""
    cliprange_value: float | None = 0.5
    """new values are clipped to old values +- this, in units of reward; None: not clipped"""
    entropy_coef: float = 0.0
    """weight of the entropy bonus, per nat"""
    value_head: Literal["zero", "normal"] = "zero"
    """how a new head of the critic begins: zero, all first values are 0; normal, random, as in verl"""
    filter_groups: bool = False
    """leave out groups whose responses all have the same score, and generate until the batch is full (DAPO)"""
    prompts_per_round: int = 0
    """with filter_groups: prompts that are sampled at a time; 0: as many as the batch has"""
    max_generation_rounds: int = 10
    """with filter_groups: how often, at most"""
    local_micro_batch_size: int = 0
    """episodes per forward and backward pass on one process; a memory knob; 0: as many as are fast"""
    local_micro_batch_tokens: int = 0
    """tokens of such a pass, padding included; a memory knob; 0: any number"""
    local_rollout_batch_size: int = 0
    """episodes per pass of generation and scoring on one process; a memory knob; 0: all of a process"""


@dataclass(frozen=True)
class Args(cli.RunArgs):
    preset: str = "gsm8k"
    """names a set of defaults: gsm8k, gsm8k-grpo, dapo, rloo, sums, sums-grpo"""
    exp_name: str = "rlvr_policy"
    seed: int = 1
    """seed of the sampling noise, the order of the problems and the minibatches"""
    base_model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    """model to start from: a folder, or a name on the hub"""
    log_interval: int = 10
    """updates between printed samples; 0: none"""
    trace_interval: int = 0
    """updates between episodes that are kept with all their numbers, which report.py shows; 0: none"""
    save_interval: int = 50
    """updates between checkpoints; 0: one at the end"""
    frozen_bfloat16: bool = False
    """reference and reward model in bfloat16: half their memory, and KL and scores that are rounded"""
    eval_interval: int = 10
    """updates between evaluations on the held-out problems, from before the first on; 0: only at the end"""
    eval_problems: int = 0
    """held-out problems of an evaluation, the first so many; 0: all"""
    eval_samples: int = 0
    """sampled responses to each of them before the first update and after the last, beside the greedy one"""
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
}
PRESETS = {name: dataclasses.replace(args, preset=name) for name, args in PRESETS.items()}


# ---- Train -----------------------------------------------------------------------------------------------------


def train(args: Args, joint: dict | None = None) -> Path:
    """Train a policy, and a critic if the estimator has one; return the folder models/<run>/policy, everywhere.

    joint: of a script that runs this as one of several stages. Raises InputError, a ValueError, before anything is
    written if it can.
    """
    learner = Learner(args, joint)
    setup, actor_critic, controller = learner.setup, learner.actor_critic, learner.controller
    roll_out = partial(rollout, setup, actor_critic, learner.reference, learner.sample)
    with learner.run.progress("RLVR", setup.sizes.updates, learner.first_update) as advance:
        for number in range(learner.first_update, setup.sizes.updates):
            learner.begin(number)
            # 1. to 4. Draw problems, generate, read, score; again, if groups are left out, until the batch is full.
            with actor_critic.sampling():
                found = fill_batch(setup, partial(roll_out, version=number), learner.rounds, learner.surplus)
            batch, generated, learner.surplus, learner.rounds = found

            # 5. Per-token rewards.
            batch = with_rewards(batch, controller.value, setup.args.rewards.kl_estimator)

            # 6. Advantages and returns, and 7. epochs over minibatches.
            steps, estimate = learner.update(number, batch)

            # 8. Log, and adapt the KL coefficient.
            advance(learner.log(number, batch, generated, steps, estimate))
            learner.save(number)
    return learner.finish()


class Learner:
    """What a run has, from before its first update to after its last."""

    def __init__(self, args: Args, joint: dict | None = None):
        self.accelerator = accelerator = processes.make_accelerator()
        check_arguments(args)
        if accelerator.is_main_process:
            for doubt in doubts(args):
                print(doubt)
        sizes = ppo_sizes(args.ppo, accelerator.num_processes)
        self.given = args  # with names such as `sums`, not yet paths: what meta.json and the saved models keep
        args = worlds.find_paths(args, joint)
        tokenizer = models.load_tokenizer(args.base_model, args.trust_remote_code)
        read_problems = partial(problems.read_problems, args.task, tokenizer, verifier=args.rewards.verifier)
        train_problems, held_out = read_problems("train"), read_problems("test", args.eval_problems)
        check_problems(train_problems, sizes)
        with cli.typed_as({"task.query_length": "task.prompt_length"}):
            self.actor_critic, self.reference, self.adapters = load_networks(args, tokenizer, accelerator)
            ids = problems.task_ids(args.task, tokenizer, self.actor_critic.lm_backbone.generation_config)
            sources = load_sources(args, ids, accelerator)
        self.setup = Setup(args, sizes, tokenizer, ids, train_problems, sources, accelerator)
        self.sample = partial(self.actor_critic.sample, ids)
        self.evaluate = partial(evaluate_policy, self.setup, self.actor_critic, self.sample, held_out)
        self.optimizers = make_optimizers(self.actor_critic, args.ppo)
        adaptive = args.rewards.adaptive_kl
        self.controller = AdaptiveKLController(args.rewards.kl_coef, adaptive.target, adaptive.horizon)
        inputs = models.weight_files(args) | worlds.data_files(args.task, "problems", "test_problems")
        self.run = run.Run(self.given, accelerator, dataclasses.asdict(sizes), joint, inputs)
        self.parts: dict[str, dict[str, Tensor]] = {}  # what else the checkpoint holds that the run goes on from
        self.surplus: Rollout | None = None
        state = self.run.resume_with(self.restore)
        self.first_update, self.rounds = state["step"], state.get("rounds", 0)
        self.evaluation = state.get("evaluation", {})
        self.controller.value = state.get("kl_coef", self.controller.value)
        self.run.start_logging(self.first_update)
        self.run.save_meta(first_prompt=train_problems.texts[0])

    def begin(self, number: int) -> None:
        """Set the learning rates of an update, and evaluate if it is time."""
        args = self.setup.args
        self.started = time.monotonic()
        self.lr = set_learning_rates(self.optimizers, args.ppo, number, self.setup.sizes.updates)
        if args.eval_interval and number % args.eval_interval == 0:  # metrics repeat the newest result
            self.evaluation |= self.evaluate(args.eval_samples if number == 0 else 0)[0]

    def update(self, number: int, batch: Rollout, weights: Weights | None = None) -> tuple[dict, Estimate]:
        """Steps 6 and 7: see the function update."""
        args, sizes, rank = self.setup.args, self.setup.sizes, self.accelerator.process_index
        orders = [draw_minibatches(args.seed, number, epoch, sizes, rank) for epoch in range(args.ppo.noptepochs)]
        networks = (self.actor_critic, self.optimizers, self.reference)
        options = {"version": number, "policy_learns": number >= args.ppo.critic_warmup, "weights": weights}
        return update(*networks, batch, orders, args, self.setup.ids.pad, self.accelerator, **options)

    def log(
        self,
        number: int,
        batch: Rollout,
        generated: list[Rollout],
        steps: dict[str, Tensor],
        estimate: Estimate,
        trained: Rollout | None = None,
        **more: float,
    ) -> str:
        """Step 8. trained: the batch as update took it, if that differs; steps and estimate: what update returned;
        more: other metrics. Returns what the bar says.
        """
        setup, sizes, controller, this_run = self.setup, self.setup.sizes, self.controller, self.run
        trained = trained or batch
        metrics = update_metrics(setup, batch, trained, generated or [batch], estimate, steps, number)
        seconds, episode = this_run.seconds(), self.rounds * sizes.round
        epoch = episode / setup.args.ppo.samples_per_prompt / len(setup.problems)
        metrics |= {"objective/kl_coef": controller.value, "lr": self.lr, "epoch": epoch}
        metrics |= {"train/used_episodes": (number + 1) * sizes.batch, "train/rounds": len(generated)}
        metrics |= {"episode": episode, "eps": episode / seconds, "time": seconds}
        controller.update(metrics["objective/kl"], sizes.batch)
        this_run.log(number, metrics | more | self.evaluation)
        if setup.args.log_interval and number % setup.args.log_interval == 0:
            this_run.log_samples(number, sample_rows(setup, batch, estimate[0]))
        if this_run.is_time_to_trace(number):  # a few episodes with all their numbers, for report.py
            by = (setup, self.actor_critic, self.reference, self.sample)
            this_run.trace_problems(*by, number, batch, trained, estimate[0], controller.value)
        speed = f"{len(generated) * sizes.round / run.seconds_since(self.started):.0f} episodes/s"
        return f"{speed}, right {metrics['objective/verifiable_correct_rate']:.3f}"

    def save(self, number: int, more: Callable[[], dict[str, dict[str, Tensor]]] = dict) -> None:
        """Write a checkpoint after an update, if it is time. more: gives other parts than networks and surplus."""
        if self.run.is_time_to_save(number + 1, self.setup.sizes.updates):
            networks = networks_of(self.actor_critic)
            parts = {name: run.training_state(network, self.optimizers[name]) for name, network in networks.items()}
            parts |= ({"surplus": self.surplus.tensors()} if self.surplus else {}) | more()
            tensors = {f"{name}/{key}": tensor for name, part in parts.items() for key, tensor in part.items()}
            state = {"kl_coef": self.controller.value, "rounds": self.rounds, "evaluation": self.evaluation}
            self.run.save_checkpoint(number + 1, tensors, state)

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of save."""
        for key, tensor in tensors.items():
            name, key = key.split("/", 1)
            self.parts.setdefault(name, {})[key] = tensor
        for name, network in networks_of(self.actor_critic).items():
            run.restore_training_state(network, self.optimizers[name], self.parts.pop(name, {}))
        surplus = {name: tensor.to(self.accelerator.device) for name, tensor in self.parts.pop("surplus", {}).items()}
        self.surplus = Rollout(**surplus) if surplus else None

    def finish(self) -> Path:
        """Evaluate, save the models, report."""
        given, args, this_run, actor_critic = self.given, self.setup.args, self.run, self.actor_critic
        evaluation, rows = self.evaluate(args.eval_samples)
        this_run.write_evaluation("validation", rows)
        info = {"task": dataclasses.asdict(given.task), "monitor": "", "function": given.rewards.verifier}
        info |= {"base_model": given.base_model, "reward_model": given.rewards.trained_model}
        parts = (actor_critic.lm_backbone, actor_critic.critic, self.adapters)
        told = (self.setup.tokenizer, info, args.trust_remote_code)
        models.save_policy_and_critic(this_run.model_folder, *parts, *told)
        last = {"last_scores": this_run.last_mean("objective/scores"), "last_kl": this_run.last_mean("objective/kl")}
        left_out = {name: getattr(self.setup.problems, name) for name in ("too_long", "unscorable", "empty")}
        verifiers = [name for name in rows[0] if f"eval/{name}" in evaluation]
        of_kind = f"eval/{verifiers[0]}_{args.task.kind_column}_"
        panels = PANELS | {
            "held-out accuracy, greedy": [f"eval/{name}" for name in verifiers],
            "held-out accuracy by kind, greedy": [name for name in evaluation if name.startswith(of_kind)],
        }
        if args.ppo.samples_per_prompt == 1:
            panels.pop("groups without a signal")
        this_run.finish(panels, **evaluation, **last, **left_out)
        problems.report(this_run, args.rewards.verifier, args.task.kind_column, evaluation, rows)
        this_run.upload("policy", *(["value"] if actor_critic.critic else []))
        return this_run.model_folder / "policy"


# ---- Networks, KL controller, evaluation -----------------------------------------------------------------------


class ActorCritic(models.MixedPrecision):
    """The policy and, if the estimator has one, the critic; they share nothing."""

    entropy_learns = True  # whether the entropy has a gradient

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

    # [V14] Nothing of the model's generation config but its stop ids: no penalty, no top-k, no top-p.
    #       hf_rollout.py#L94
    def sample(
        self, ids: problems.TaskIds, contexts: Tensor, uniforms: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """The built-in sampler: responses, padding after the stop id, and their log-probs; within `sampling`."""
        return lm.generate_until(self.sampler, contexts, uniforms, ids.pad, ids.vocab_size, temperature, ids.stops)

    def forward(
        self,
        query_responses: Tensor,
        mask: Tensor,
        pad_id: int,
        reference: Reference | None = None,
        longest: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log-probs of response tokens, values, exact entropies and, given a reference, exact KLs from it.

        query_responses: (batch, context_length + response_length); mask: (batch, response_length); longest: tokens of
        the longest row, if known. Returns four of the mask's shape, 0 where masked.
        """
        # [V30] What stands at a position is about the token after it, hence the shift by one.   dp_critic.py#L117
        length = mask.shape[1]
        place = (query_responses, pad_id, slice(-1 - length, -1), longest)
        labels = query_responses[:, -length:][mask]  # (tokens,)
        with self.autocast():
            hidden = lm.read_packed(self.lm_backbone, *place)[mask]  # (tokens, width)
            theirs = reference.hidden_states(*place)[mask] if reference else hidden[:, :0]
            read = partial(self.read_hidden, reference)
            logprobs, entropies, exact_kl = passes.few_logits_at_a_time(read, self.vocab_size, hidden, theirs, labels)
            values = torch.zeros_like(logprobs)
            if self.critic:
                read_by_critic = lm.read_packed(self.critic.lm_backbone, *place)[mask]
                values = self.critic.gain * lm.read_scalar(self.critic.reward_head, read_by_critic) + self.critic.bias
        found = (logprobs, values, entropies, exact_kl)
        return tuple(x.new_zeros(mask.shape).masked_scatter(mask, x) for x in found)

    def read_hidden(
        self, reference: Reference | None, hidden: Tensor, theirs: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs of labels (tokens,), exact entropies and KLs there, from final hidden states (tokens, width)."""
        # [V13] [V15] At the temperature of the sampler, in float32 or better.   dp_actor.py#L259, dp_actor.py#L368
        logits = lm.scaled_logits(self.lm_backbone, hidden, self.vocab_size, self.temperature)
        logprobs, entropies = read_logits(logits, labels, entropy_learns=self.entropy_learns)
        if reference is None:
            return logprobs, entropies, torch.zeros_like(logprobs)
        # [V51] The sum over the vocabulary, a few tokens at a time.
        difference = F.log_softmax(logits, dim=1) - F.log_softmax(reference.logits(theirs), dim=1)
        return logprobs, entropies, (logits.softmax(1) * difference).sum(1)


class Reference:
    """What the policy started from. With adapters, the policy itself while they are switched off."""

    # [V57] Frozen; where nothing is penalised there is none.
    def __init__(self, network: ActorCritic, adapters: nn.Module | None):
        """network: without a critic."""
        self.network, self.adapters = network, adapters

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        whole = self.adapters.disable_adapter() if self.adapters else processes.gathered(self.network.lm_backbone)
        with torch.no_grad(), whole:
            yield

    def logprobs(self, pad_id: int, query_responses: Tensor, mask: Tensor, longest: int | None = None) -> Tensor:
        """Log-probs (batch, response_length), at the policy's temperature."""
        with self.in_use():
            return self.network(query_responses, mask, pad_id, longest=longest)[0]

    def hidden_states(self, *place: Any) -> Tensor:
        with self.in_use():
            return lm.read_packed(self.network.lm_backbone, *place)

    def logits(self, hidden_states: Tensor) -> Tensor:
        network = self.network
        with self.in_use():
            return lm.scaled_logits(network.lm_backbone, hidden_states, network.vocab_size, network.temperature)


def read_logits(logits: Tensor, tokens: Tensor, *, entropy_learns: bool = True) -> tuple[Tensor, Tensor]:
    """Log-probs of tokens (...) under logits (..., vocab_size), and exact entropies there, in nats: two of (...).

    entropy_learns: whether the entropies have a gradient.
    """
    all_logprobs = F.log_softmax(logits, dim=-1)
    logprobs = all_logprobs.gather(-1, tokens.long().unsqueeze(-1)).squeeze(-1)
    # [V68] Summed over the vocabulary, with a gradient where there is a bonus.   core_algos.py#L1782
    with torch.set_grad_enabled(entropy_learns and torch.is_grad_enabled()):
        return logprobs, -(all_logprobs.exp() * all_logprobs).sum(-1)


class AdaptiveKLController:
    """Holds the KL divergence near a target, if there is one: `value` rises while it is above, falls while below.

    error = clip(kl / target - 1, -0.2, 0.2)        value *= 1 + error * episodes / horizon
    """

    def __init__(self, kl_coef: float, target: float | None, horizon: float):
        self.value, self.target, self.horizon = kl_coef, target, horizon

    def update(self, kl: float, episodes: int) -> None:
        """kl: nats per response, the mean over the batch; episodes: of the batch, over all processes."""
        # [V53] [V54] Of the sum over a response, not of the mean over tokens.   core_algos.py#L152-L173
        if self.target is not None:
            self.value *= 1 + min(max(kl / self.target - 1, -0.2), 0.2) * episodes / self.horizon


Sampler = Callable[..., tuple[Tensor, Tensor]]  # (contexts, uniforms, temperature=...) as ActorCritic.sample


def evaluate_policy(
    setup: Setup, actor_critic: ActorCritic, sample: Sampler, held_out: problems.Problems, samples: int
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Solve held-out problems, greedily and by so many samples. Returns means and the rows of evaluation.jsonl.

    Every process must call this.
    """
    # [V98] All of the split in its order, each problem once; strict and flexible.   metric_utils.py#L420-L640
    args, task = setup.args, setup.args.task
    of_hashes = ["gsm8k_strict", "gsm8k_flexible", "gsm8k_format"] if task.answer_format == "hashes" else []
    names, field = list(dict.fromkeys([args.rewards.verifier, *of_hashes])), "rewards.verifier"
    verifiers = [scorers.load_verifier(name, field, task.response_prefix, on_all_processes=True) for name in names]
    chunk, shape = setup.sizes.local_rollout_batch, (len(held_out), task.response_length)
    by = partial(problems.solve, held_out, sample, verifiers, setup.tokenizer, setup.ids, chunk, setup.accelerator)
    with actor_critic.sampling():
        greedy, sampled = by(problems.GREEDY, torch.full(shape, 0.5, dtype=torch.float64)), []
        for number in range(samples):
            generator = lm.keyed_generator(args.seed, "evaluate", number)
            uniforms = torch.rand(shape, generator=generator, dtype=torch.float64)
            sampled.append(by(args.eval_temperature, uniforms))
    return problems.evaluation(held_out, task.kind_column, names, greedy, sampled)


# ---- Rollout ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rollout:
    """What is known of episodes, one a row, when the learner gets them."""

    # [V11] A mask is True where the policy wrote a token. What stands elsewhere, be it NaN, reaches nothing.

    query_responses: Tensor  # (rows, context_length + response_length), padded on the left and after the stop id
    mask: Tensor  # (rows, response_length) bool, the tokens of the response; none where it cannot be scored
    loss_mask: Tensor  # (rows, response_length) bool, those of them that are trained on
    logprobs: Tensor  # (rows, response_length), under the policy when the rollout was read, in training arithmetic
    sampler_logprobs: Tensor  # (rows, response_length), with which the tokens were drawn
    ref_logprobs: Tensor  # (rows, response_length); the policy's own where there is no reference
    exact_kl: Tensor  # (rows, response_length), where it is needed, else 0
    values: Tensor  # (rows, response_length); 0 without a critic
    rewards: Tensor  # (rows, response_length), KL penalty and score; before with_rewards 0
    non_score_rewards: Tensor  # (rows, response_length), the KL penalty; before with_rewards 0
    kl: Tensor  # (rows, response_length), nats; before with_rewards 0
    parts: Tensor  # (rows, sources), what verifiers and reward model say
    raw_scores: Tensor  # (rows,), their weighted sum
    scores: Tensor  # (rows,), after punishments
    baselines: Tensor  # (rows,), score of the greedy response, for remax; else 0
    stopped: Tensor  # (rows,) bool, whether the response ends with a stop id
    problems: Tensor  # (rows,), numbers of the problems
    groups: Tensor  # (rows,), one number for each time that a prompt was drawn
    versions: Tensor  # (rows,), updates that the sampling policy had seen

    def rows(self, inds: Tensor | slice) -> Rollout:
        return Rollout(*(tensor[inds] for tensor in self.tensors().values()))

    def tensors(self) -> dict[str, Tensor]:
        return {part.name: getattr(self, part.name) for part in dataclasses.fields(self)}


def join(rollouts: list[Rollout], pad_id: int) -> Rollout:
    """All their rows, with padding before shorter queries."""
    width = max(one.query_responses.shape[1] for one in rollouts)
    padded = [
        dataclasses.replace(
            one, query_responses=F.pad(one.query_responses, (width - one.query_responses.shape[1], 0), value=pad_id)
        )
        for one in rollouts
    ]
    return Rollout(*(torch.cat(parts) for parts in zip(*(one.tensors().values() for one in padded), strict=True)))


Source = tuple[Callable[..., Tensor], float]  # (prompts, texts, answers, queries, responses) -> (rows,); its weight


@dataclass(frozen=True)
class Setup:
    """What the parts of a run have in common, and what no update changes."""

    args: Args
    sizes: PpoSizes
    tokenizer: PreTrainedTokenizerBase
    ids: problems.TaskIds
    problems: problems.Problems  # to train on
    sources: dict[str, Source]  # what scores, under its name; the verifier first
    accelerator: Accelerator


def fill_batch(
    setup: Setup, roll_out: Callable[[int], Rollout], rounds: int, surplus: Rollout | None
) -> tuple[Rollout, list[Rollout], Rollout | None, int]:
    """Steps 1 to 4: one round, or with filter_groups as many as the batch needs.

    rounds: made since the run began; surplus: groups that the last update left over, those of all processes. Returns
    this process's rows of the batch, and of all rounds; the new surplus, and the rounds made.
    """
    ppo, sizes, accelerator = setup.args.ppo, setup.sizes, setup.accelerator
    if not ppo.filter_groups:
        batch = roll_out(rounds)
        return batch, [batch], None, rounds + 1
    pool, generated = [surplus] if surplus else [], []
    # [V78] Groups whose scores differ, by the raw score; what is left over is the next update's, in its order.
    while sum(len(part.groups) for part in pool) < sizes.batch:
        if len(generated) == ppo.max_generation_rounds:
            mean, filled = torch.cat([one.raw_scores for one in generated]).mean(), sum(len(x.groups) for x in pool)
            raise InputError(
                f"{cli.flag('ppo.max_generation_rounds')} {len(generated)} did not fill a batch: only {filled} of "
                f"{sizes.batch} episodes are in groups whose scores differ; the mean score is {mean.item():.3f}"
            )
        generated.append(roll_out(rounds))
        rounds += 1
        everyone = Rollout(*(accelerator.gather(tensor.contiguous()) for tensor in generated[-1].tensors().values()))
        pool.append(everyone.rows(scores_differ(everyone)))
    whole, start = join(pool, setup.ids.pad), accelerator.process_index * sizes.local_batch
    share, rest = slice(start, start + sizes.local_batch), slice(sizes.batch, None)
    return whole.rows(share), generated, whole.rows(rest), rounds


def scores_differ(rollout: Rollout) -> Tensor:
    """Which rows (rows,) are of a group in which not all scores are the same; those without a score aside."""
    live, scores, groups = rollout.mask.any(1), rollout.raw_scores, rollout.groups
    largest = by_group(scores.masked_fill(~live, -math.inf), groups, "amax")
    return largest > by_group(scores.masked_fill(~live, math.inf), groups, "amin")


def rollout(
    setup: Setup,
    actor_critic: ActorCritic,
    reference: Reference | None,
    sample: Sampler,
    round_number: int,
    *,
    version: int,
) -> Rollout:
    """Steps 1 to 4: n responses to each of the prompts of a round, the rows of this process.

    sample: as ActorCritic.sample. version: updates that the policy has seen. round_number: rounds before this one.
    """
    args, ids, task, shaping = setup.args, setup.ids, setup.args.task, setup.args.rewards
    n, device, chunk = args.ppo.samples_per_prompt, setup.accelerator.device, setup.sizes.local_rollout_batch
    # 1. Draw problems.
    inds, groups, requests = draw_round(setup, round_number, setup.accelerator.process_index)
    prompts, answers = ([texts[i] for i in inds] for texts in (setup.problems.texts, setup.problems.answers))

    # 2. Generate responses, up to the first stop id; log-probs and values as the training pass has them.
    (responses, sampler_logprobs), *greedy = (
        passes.few_rows_at_a_time(partial(sample, temperature=temperature), chunk, queries, uniforms)
        for queries, uniforms, temperature in requests
    )
    queries = requests[0][0]
    mask, stopped = response_mask(responses, ids.stops)
    query_responses = torch.cat([queries, responses], dim=1)
    # [V76] [V82] What the first pass of training will find, so that the ratio starts at 1; the sampler's are kept.
    #       dp_actor.py#L543, dp_actor.py#L590
    exact_reference = reference if shaping.kl_estimator == "full" else None

    def read(tokens: Tensor, mask: Tensor, longest: int) -> tuple[Tensor, ...]:
        logprobs, values, _, exact_kl = actor_critic(tokens, mask, ids.pad, exact_reference, longest)
        # 3. Log-probs of the reference.
        theirs = reference.logprobs(ids.pad, tokens, mask, longest) if reference else logprobs
        return logprobs, values, theirs, exact_kl

    lengths = (query_responses != ids.pad).sum(1).cpu()
    knobs = (args.ppo.local_micro_batch_size, args.ppo.local_micro_batch_tokens)
    plan = passes.plan_passes(lengths, actor_critic, *knobs)
    logprobs, values, ref_logprobs, exact_kl = passes.in_passes(read, plan, query_responses, mask)

    # 4. Score.
    parts, raw_scores = score_responses(setup, prompts, answers, queries, responses)
    # [V22] What cannot be scored has no token that counts.
    mask = mask & raw_scores.isfinite().unsqueeze(1)
    parts, raw_scores = parts.nan_to_num(0), raw_scores.nan_to_num(0)
    scores = punish(raw_scores, mask.sum(1), stopped, shaping, task.response_length)
    baselines = torch.zeros_like(scores)
    for likeliest, _ in greedy:
        greedy_mask, greedy_stopped = response_mask(likeliest, ids.stops)
        _, raw = score_responses(setup, prompts[::n], answers[::n], queries[::n], likeliest)
        baselines = punish(raw.nan_to_num(0), greedy_mask.sum(1), greedy_stopped, shaping, task.response_length)
        baselines = baselines.repeat_interleave(n)
        mask = mask & raw.isfinite().repeat_interleave(n).unsqueeze(1)
    cut = shaping.mask_truncated & ~has_ended(mask.sum(1), stopped, shaping)
    per_token = {"logprobs": logprobs, "values": values, "ref_logprobs": ref_logprobs, "exact_kl": exact_kl}
    per_token |= {"sampler_logprobs": sampler_logprobs, "loss_mask": mask & ~cut.unsqueeze(1)}
    per_token |= dict.fromkeys(("rewards", "non_score_rewards", "kl"), torch.zeros_like(logprobs))
    per_row = {"parts": parts, "raw_scores": raw_scores, "scores": scores, "baselines": baselines, "stopped": stopped}
    per_row |= {"problems": inds, "groups": groups, "versions": torch.full_like(groups, version)}
    per_row = {name: tensor.to(device) for name, tensor in per_row.items()}
    return Rollout(query_responses=query_responses, mask=mask, **per_token, **per_row)


Request = tuple[Tensor, Tensor, float]  # to a sampler: contexts, uniforms, temperature


def draw_round(setup: Setup, round_number: int, rank: int) -> tuple[Tensor, Tensor, list[Request]]:
    """Step 1: problems and groups of a process's rows in a round, (local_round,), and what to ask a sampler for.

    All of them are drawn, n times.
    """
    args, sizes, n, device = setup.args, setup.sizes, setup.args.ppo.samples_per_prompt, setup.accelerator.device
    drawn = problems.problems_of_batch(len(setup.problems), sizes.round_prompts, round_number, args.seed)
    rows, everything = slice(rank * sizes.local_round, (rank + 1) * sizes.local_round), drawn.repeat_interleave(n)
    groups = round_number * sizes.round_prompts + torch.arange(len(everything))[rows] // n
    queries = setup.problems.batch(everything.tolist(), setup.ids.pad)[rows]  # (local_round, context_length)
    uniforms = lm.episode_noise(args.seed, round_number, sizes.round, args.task.response_length)[rows].to(device)
    requests = [(queries.to(device), uniforms, args.task.temperature)]
    if args.ppo.advantage == "remax":
        # [V41] One greedy response for each prompt more; it is no episode.   ray_trainer.py#L1404-L1443
        requests.append((queries[::n].to(device), torch.full_like(uniforms[::n], 0.5), problems.GREEDY))
    return everything[rows], groups, requests


def score_responses(
    setup: Setup, prompts: list[str], answers: list[str], queries: Tensor, responses: Tensor
) -> tuple[Tensor, Tensor]:
    """What each source says (rows, sources), and their weighted sum (rows,): NaN where one of them cannot say."""
    texts = problems.to_texts(setup.tokenizer, responses, setup.ids)
    functions, weights = zip(*setup.sources.values(), strict=True)
    # [V23] [V18] Of the response alone; the prompt may hold an example's answer.   reward_manager/naive.py#L74-L91
    said = [function(prompts, texts, answers, queries, responses).to(responses.device) for function in functions]
    parts = torch.stack(said, 1)
    return parts, parts @ parts.new_tensor(weights)


def punish(
    raw_scores: Tensor, lengths: Tensor, stopped: Tensor, shaping: RewardsArgs, response_length: int
) -> Tensor:
    """Scores (rows,) after what responses lose that do not end, or come near the greatest length."""
    # [V24] After the sum.
    ended = has_ended(lengths, stopped, shaping)
    penalty = shaping.missing_stop_penalty
    forms = {"none": raw_scores, "replace": torch.full_like(raw_scores, -penalty), "subtract": raw_scores - penalty}
    scores = torch.where(ended, raw_scores, forms[shaping.missing_stop])
    if shaping.overlong_buffer:
        scores = scores + scorers.overlong_punishment(
            lengths, response_length, shaping.overlong_buffer, shaping.overlong_factor
        )
    return scores


def has_ended(lengths: Tensor, stopped: Tensor, shaping: RewardsArgs) -> Tensor:
    """Which responses (rows,) end, of so many tokens each."""
    # [V25] One that is too short counts as one that does not end.
    return stopped & (lengths >= shaping.min_response_length)


def with_rewards(batch: Rollout, kl_coef: float, name: str) -> Rollout:
    """Step 5: the rollout with rewards, of the scores and of the KL that has this name."""
    exact = batch.logprobs - batch.exact_kl  # k1 is the difference of the two: here the exact KL
    ref_logprobs, name = (exact, "k1") if name == "full" else (batch.ref_logprobs, name)
    found = compute_rewards(batch.scores, batch.logprobs, ref_logprobs, batch.mask, kl_coef, name)
    return dataclasses.replace(batch, **dict(zip(("rewards", "non_score_rewards", "kl"), found, strict=True)))


def response_mask(responses: Tensor, stop_ids: Collection[int]) -> tuple[Tensor, Tensor]:
    """Which tokens (batch, response_length) belong to a response, its stop id included; which responses (batch,) end.

    With stop ids 8 and 9, [[5, 9, 8, 7]] gives [[1, 1, 0, 0]] and [1].
    """
    # [V09] [V10] A set of stop ids, one of which may be the model's padding (ours is above all ids): only the first
    #       one's place says where a response ends.   torch_functional.py#L342
    stops = torch.isin(responses, torch.tensor(sorted(stop_ids), dtype=responses.dtype, device=responses.device))
    return stops.cumsum(1) - stops.long() == 0, stops.any(1)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, name: str) -> Tensor:
    """Per-token estimates (batch, response_length) of KL(policy || reference) from sampled tokens, in nats.

    With d = log p(policy) - log p(reference), which is large where the policy likes its token more:

        k1 = d        abs = |d|        k2 = d^2 / 2        k3 = exp(-d) - 1 + d

    The mean of k1 over sampled tokens is the KL; single tokens, and whole batches, may be negative.
    In the reward, k1 has the gradient of the whole response's KL, because the return of a token includes the KL of
    all tokens after it. As a loss, an estimate acts only through its slope, and only on the token that it was
    computed for. The slope of k1 is 1 everywhere. It moves nothing, because the mean of the gradient of log p is 0.
    The slope of k2 gives the gradient of the reverse KL of the next token, KL(policy || reference), given the text so
    far; the slope of k3 that of the forward KL, KL(reference || policy). `k1+`, `k2+` and `k3+` have the value of
    the name and the slope of k2, and are to be multiplied by the detached ratio.
    """
    d = (logprobs - ref_logprobs).masked_fill(~mask, 0)
    forms = {"k1": (d, 1), "abs": (d.abs(), d.sign()), "k2": (d**2 / 2, d)}  # value and slope
    # `expm1` is exact where d is near 0, and k3 a difference of two almost equal numbers.
    inverse_ratio_less_1 = torch.expm1((-d).clamp(max=20))
    # [V52] Far below the reference k3 grows on, and pulls back with a slope of -10; verl's clamps leave it none.
    #       core_algos.py#L1890-L1896
    forms["k3"] = (inverse_ratio_less_1 + d, (-inverse_ratio_less_1).clamp(min=-10))
    value, slope = forms[name.removesuffix("+")]
    # [V50] A plus: the value of the name, the slope of k2.   core_algos.py#L1841-L1864
    slope = torch.as_tensor(d if name.endswith("+") else slope)
    return value.detach() + slope.detach() * (d - d.detach())


def compute_rewards(
    scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kl_coef: float, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Per-token rewards: -kl_coef * kl on every token, and the score on the last.

    scores: (batch,); log-probs and mask: (batch, response_length). Returns rewards, non_score_rewards and kl, of that
    shape. name: of the KL estimate. A row without a token carries no score.
    """
    # [V48] KL in the reward: a cost of the token, which the return of all tokens before it holds.
    #       ray_trainer.py#L86-L108
    kl = kl_estimate(logprobs, ref_logprobs, mask, name).detach()
    non_score_rewards = -kl_coef * kl
    # [V27] The score counts once, on the last valid token; verl writes that of an empty response behind its padding.
    #       reward_manager/naive.py#L100
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)  # (batch, response_length)
    rewards = torch.where(last, non_score_rewards + scores.unsqueeze(1).to(kl.dtype), non_score_rewards)
    return rewards, non_score_rewards, kl


# ---- Update ----------------------------------------------------------------------------------------------------


def draw_minibatches(seed: int, number: int, epoch: int, sizes: PpoSizes, rank: int) -> Tensor:
    """Rows of the local batch in each minibatch of an epoch: (nminibatches, local_minibatch).

    Of every nminibatches episodes in a row each minibatch gets one, at random; so groups are torn apart.
    """
    # [V75] By seed, update and epoch: the same at any number of processes.   ray_trainer.py#L1455
    nminibatches = sizes.local_batch // sizes.local_minibatch
    generator = lm.keyed_generator(seed, "minibatches", number, epoch)
    order = torch.rand(sizes.batch // nminibatches, nminibatches, generator=generator).argsort(1)
    inds = order + nminibatches * torch.arange(len(order)).unsqueeze(1)  # (batch / nminibatches, nminibatches)
    share = slice(rank * sizes.local_minibatch, (rank + 1) * sizes.local_minibatch)
    return inds[share].T - rank * sizes.local_batch


# Factors of the losses of sampled tokens, where another policy than that of `logprobs` has sampled them: fixed ones,
# (rows, response_length), or a function of the new log-probs of a micro-batch, and its rows.
Weights = Tensor | Callable[[Tensor, Rollout], Tensor]


def update(
    actor_critic: ActorCritic,
    optimizers: dict[str, torch.optim.Optimizer],
    reference: Reference | None,
    batch: Rollout,
    orders: list[Tensor],
    args: Args,
    pad_id: int,
    accelerator: Accelerator,
    *,
    version: int,
    policy_learns: bool = True,
    weights: Weights | None = None,
) -> tuple[dict[str, Tensor], Estimate]:
    """Steps 6 and 7: advantages, and all epochs over one batch.

    orders: for each epoch this process's rows of each minibatch. version: updates that the policy has seen. Returns
    numbers of the optimiser steps, (steps,): gradient norms, and of everything else this process's share, which add
    up over all processes; and the advantages and returns.
    """
    ppo, shaping = args.ppo, args.rewards
    reduce = partial(accelerator.reduce, reduction="sum")
    # 6. Advantages and returns, once for the whole batch, before minibatches tear groups apart.
    advantages, returns = compute_advantages(batch, ppo, reduce)
    exact_reference = reference if shaping.kl_loss_coef and shaping.kl_loss_estimator == "full" else None
    # 7. Epochs over minibatches.
    steps: list[dict[str, Tensor]] = []
    lengths, device = (batch.query_responses != pad_id).sum(1).cpu(), advantages.device
    knobs = (ppo.local_micro_batch_size, ppo.local_micro_batch_tokens)
    for order in orders:
        for mb_inds in order:  # (local_minibatch,), on the CPU
            # [V60] [V61] Counts of the whole minibatch on all processes: a token weighs the same in whatever
            #       micro-batch and process it is.   dp_actor.py#L575-L578, dp_critic.py#L240-L245
            counts = minibatch_counts(batch.loss_mask[mb_inds.to(device)], reduce)
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            shares: list[dict[str, Tensor]] = []
            # [V77] Rows of about one length at a time: little padding, and a sum that is the same.
            for micro_batch in passes.plan_passes(lengths[mb_inds], actor_critic, *knobs):
                inds = mb_inds[micro_batch.rows].to(device)
                mb, mb_advantages, mb_returns = batch.rows(inds), advantages[inds], returns[inds]
                mean_of = partial(aggregate, mask=mb.loss_mask, mode=ppo.loss_aggregation, **counts)
                new_logprobs, new_values, entropies, exact_kl = actor_critic(
                    mb.query_responses, mb.loss_mask, pad_id, exact_reference, micro_batch.longest
                )  # four of (micro_batch, response_length)
                losses, clipped, clipped_below = token_losses(
                    new_logprobs,
                    mb.logprobs,
                    mb_advantages,
                    mb.loss_mask,
                    ppo.loss,
                    **bounds(ppo),
                )
                kl = kl_in_loss(new_logprobs, mb, exact_kl, shaping)
                if callable(weights):
                    # [V84] The weights of the policy of this step, where the loss has no ratio.
                    losses = weights(new_logprobs, mb) * losses
                elif weights is not None:
                    # [V83] The weights of the policy that the steps began with.   core_algos.py#L1237
                    losses = weights[inds] * losses
                    if shaping.kl_loss_estimator != "full":  # which is the same whichever token was drawn
                        kl = weights[inds] * kl
                v_losses, v_clipped = value_losses(
                    new_values, mb.values, mb_returns, mb.loss_mask, ppo.cliprange_value
                )
                policy_loss, kl_loss = mean_of(losses), mean_of(kl)
                entropy, value_loss = mean_of(entropies), mean_of(v_losses)
                # [V49] [V68] All terms have one divisor, and what is logged of each stays as it is.
                #       losses.py#L158-L172
                loss = policy_loss + shaping.kl_loss_coef * kl_loss - ppo.entropy_coef * entropy
                # The networks share nothing: the sum has the gradient of each. Gradients are averaged over processes.
                ((loss + value_loss) * accelerator.num_processes).backward()
                losses_of = {"policy": policy_loss, "value": value_loss, "kl": kl_loss, "entropy": entropy}
                share = {"objective/loss": loss} | {f"loss/{name}_avg": x for name, x in losses_of.items()}
                share |= {"tokens": mb.loss_mask.sum()}
                flags = {"policy/clipfrac_avg": clipped, "policy/clipfrac_low_avg": clipped_below}
                flags |= {"val/clipfrac_avg": v_clipped}
                shares.append(
                    share | token_statistics(mb, new_logprobs, entropies, counts["tokens"], version, **flags)
                )
            processes.average_gradients(actor_critic, accelerator)
            # [V72] The critic, then the policy, each clipped for itself over the whole minibatch.
            #       dp_critic.py#L134-L151
            norms = {
                name: processes.clip_gradients(optimizer, ppo.max_grad_norm) for name, optimizer in optimizers.items()
            }
            if "value" in optimizers:
                optimizers["value"].step()
            # [V71] In the first critic_warmup updates, exactly, the policy is left alone.   ray_trainer.py#L1604
            if policy_learns:
                optimizers["policy"].step()
            sums = {name: sum(share[name].detach() for share in shares) for name in shares[0]}
            steps.append(sums | {f"{name}/grad_norm": norm for name, norm in norms.items()})
    return {name: torch.stack([step[name] for step in steps]) for name in steps[0]}, (advantages, returns)


def compute_advantages(batch: Rollout, ppo: PpoArgs, reduce: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Step 6: advantages, whitened if the estimator needs it, and returns, 0 without a critic."""
    # [V32] Over the tokens of the response; what is left out of the loss narrows the loss alone.
    estimate = partial(ESTIMATORS[ppo.advantage], values=batch.values, baselines=batch.baselines)
    advantages, returns = estimate(batch.rewards, batch.mask, batch.groups, gamma=ppo.gamma, lam=ppo.lam)
    if is_whitened(ppo):
        advantages = whiten(advantages, batch.mask, keep_mean=False, reduce=reduce)
    return advantages, torch.zeros_like(advantages) if returns is None else returns


def is_whitened(ppo: PpoArgs) -> bool:
    return ppo.advantage in WHITENED if ppo.whiten_advantages is None else ppo.whiten_advantages


def minibatch_counts(mask: Tensor, reduce: Callable[[Tensor], Tensor]) -> dict[str, int]:
    """What aggregate divides by, of a minibatch whose rows of this process have this mask."""
    numbers = torch.stack([mask.sum(), mask.any(1).sum(), mask.new_tensor(len(mask), dtype=torch.long)])
    tokens, sequences, episodes = (int(number) for number in reduce(numbers).tolist())
    return {"tokens": tokens, "sequences": sequences, "episodes": episodes, "length": mask.shape[1]}


def kl_in_loss(new_logprobs: Tensor, mb: Rollout, exact_kl: Tensor, shaping: RewardsArgs) -> Tensor:
    """The KL penalty of each token (micro_batch, response_length), without its coefficient; 0 if there is none."""
    name = shaping.kl_loss_estimator
    if name == "full" or not shaping.kl_loss_coef:
        return exact_kl
    kl = kl_estimate(new_logprobs, mb.ref_logprobs, mb.loss_mask, name)
    # [V50] Times the ratio, without its gradient, so that it is right also when the policy has moved. With k3+ this
    #       is the unbiased estimate of DeepSeek-V3.2.   core_algos.py#L1841-L1864
    ratio = torch.exp((new_logprobs.detach() - mb.logprobs).masked_fill(~mb.loss_mask, 0).clamp(-20, 20))
    return kl * ratio if name.endswith("+") else kl


# ---- Advantages ------------------------------------------------------------------------------------------------

# An estimator takes rewards, mask, groups, and of values, baselines, gamma and lam what it needs; it returns
# advantages, not yet whitened, and the critic's targets, if there is a critic. groups (batch,) are equal for
# responses to one prompt, baselines (batch,) is a number for each row; everything else is (batch, response_length).
# A row without a valid token counts nowhere.
Estimate = tuple[Tensor, Tensor | None]


def gae(
    rewards: Tensor, mask: Tensor, groups: Tensor, *, values: Tensor, gamma: float = 1.0, lam: float = 1.0, **_
) -> Estimate:
    """Generalised advantage estimation over valid tokens; the value after the last of them is 0.

    delta_t = r_t + gamma * V_{t+1} - V_t        A_t = delta_t + gamma * lam * A_{t+1}        R_t = A_t + V_t
    """
    # [V31] A response that was cut off counts as ended: its score already judges the cut text.   core_algos.py#L215
    advantages = torch.zeros_like(values)
    next_advantage = next_value = torch.zeros_like(values[:, 0])  # (batch,)
    for t in reversed(range(values.shape[1])):
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * next_advantage
        # [V29] A hole in the mask is jumped over, without a step of gamma.   core_algos.py#L215-L263
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = next_advantage
    return advantages.masked_fill(~mask, 0), (advantages + values).masked_fill(~mask, 0)


def by_group(x: Tensor, groups: Tensor, reduce: str = "sum") -> Tensor:
    """The sum (amax, amin) of x (batch,) over each row's group, at every row: (batch,)."""
    # [V08] By number, never by equal text: the same prompt twice in a batch is two groups.
    #       ray_trainer.py#L1375-L1384
    _, numbers = groups.unique(return_inverse=True)
    return torch.zeros_like(x).scatter_reduce(0, numbers, x, reduce, include_self=False)[numbers]


def centred_scores(rewards: Tensor, mask: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """A response's sum of rewards less its group's mean, and the size of the group: two of (batch,).

    Exactly 0 in a group of one, and where all are equal.
    """
    # [V32] Over valid tokens; a row without any is left out of its group.   core_algos.py#L304
    live = mask.any(1)
    totals = rewards.masked_fill(~mask, 0).sum(1)  # (batch,)
    size = by_group(live.to(totals.dtype), groups)
    centred = totals - by_group(totals, groups) / size.clamp(min=1)
    # [V34] Equal means largest = smallest: the deviations of equal floats from their mean need not be 0.
    largest = by_group(totals.masked_fill(~live, -math.inf), groups, "amax")
    smallest = by_group(totals.masked_fill(~live, math.inf), groups, "amin")
    # [V35] A group of one teaches nothing; verl passes its raw reward on.   core_algos.py#L309-L311
    return centred.masked_fill((largest <= smallest) | ~live, 0), size


def grpo(rewards: Tensor, mask: Tensor, groups: Tensor, **_) -> Estimate:
    """(R - mean) / (std + 1e-6) in each group, for all tokens of a response alike; std with n - 1."""
    # [V33] Of 8 responses, a single right one gets +2.47 and each wrong one -0.35.   core_algos.py#L267-L330
    centred, size = centred_scores(rewards, mask, groups)
    std = (by_group(centred**2, groups) / (size - 1).clamp(min=1)).sqrt()
    return to_tokens(centred / (std + 1e-6), mask), None


def dr_grpo(rewards: Tensor, mask: Tensor, groups: Tensor, **_) -> Estimate:
    """R - mean in each group, undivided: prompts that are easy or hard weigh no more than others."""
    # [V36] [V37] Dr. GRPO; one implementation, so that no option is lost.   core_algos.py#L267-L357
    return to_tokens(centred_scores(rewards, mask, groups)[0], mask), None


def rloo(rewards: Tensor, mask: Tensor, groups: Tensor, **_) -> Estimate:
    """R less the mean of the others in the group, which is n / (n - 1) * (R - mean)."""
    # [V38] Leave one out.   core_algos.py#L477-L524
    centred, size = centred_scores(rewards, mask, groups)
    return to_tokens(centred * size / (size - 1).clamp(min=1), mask), None


def opo(rewards: Tensor, mask: Tensor, groups: Tensor, **_) -> Estimate:
    """R less the mean of the group in which a response weighs as much as it is long."""
    # [V42] The baseline of least variance, if every token's gradient is as long.   core_algos.py#L529-L579
    centred, _ = centred_scores(rewards, mask, groups)
    lengths = mask.sum(1).to(centred.dtype)
    mean = by_group(centred * lengths, groups) / by_group(lengths, groups).clamp(min=1)
    return to_tokens(centred - mean, mask), None


def reinforce_pp(rewards: Tensor, mask: Tensor, groups: Tensor, *, gamma: float = 1.0, **_) -> Estimate:
    """REINFORCE++: the discounted sum of the rewards from a token on, to be whitened over the batch."""
    # [V39] GAE without values, and so across holes: verl (until 8a1bf6d) forgot the rewards after one.
    #       core_algos.py#L583-L617
    return gae(rewards, mask, groups, values=torch.zeros_like(rewards), gamma=gamma, lam=1.0)[0], None


def reinforce_pp_baseline(rewards: Tensor, mask: Tensor, groups: Tensor, **_) -> Estimate:
    """R - mean in each group, to be whitened over the tokens of the batch; so long responses weigh more in that."""
    # [V40] Score and KL are centred together, as in verl; OpenRLHF (3c3be62) centres the score alone.
    #       core_algos.py#L425-L473
    return dr_grpo(rewards, mask, groups)


def remax(rewards: Tensor, mask: Tensor, groups: Tensor, *, baselines: Tensor, **_) -> Estimate:
    """The sum of the rewards from a token on, less the score of the greedy response to the prompt, baselines."""
    # [V41] The baseline holds no KL penalty, the return does.   core_algos.py#L622-L654
    returns = gae(rewards, mask, groups, values=torch.zeros_like(rewards))[0]
    return (returns - baselines.unsqueeze(1)).masked_fill(~mask, 0), None


def to_tokens(x: Tensor, mask: Tensor) -> Tensor:
    """A number for each response (batch,) on each of its tokens (batch, response_length)."""
    return x.unsqueeze(1).expand(mask.shape).masked_fill(~mask, 0)


ESTIMATORS: dict[str, Callable[..., Estimate]] = {
    "gae": gae,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo,
    "reinforce++": reinforce_pp,
    "reinforce++-baseline": reinforce_pp_baseline,
    "remax": remax,
}
IN_GROUPS = ("grpo", "dr_grpo", "rloo", "opo", "reinforce++-baseline")
# [V47] By default. After GRPO, subtracting the mean over tokens would give groups without a signal an advantage; so
#       it does in reinforce++-baseline, here as in verl and OpenRLHF.
WHITENED = ("gae", "reinforce++", "reinforce++-baseline")


def whiten(
    values: Tensor, mask: Tensor, *, keep_mean: bool, reduce: Callable[[Tensor], Tensor] = torch.clone
) -> Tensor:
    """Shift and scale the valid entries to mean 0 and variance 1; keep_mean adds the mean back. 0 elsewhere.

    values, mask: (batch, response_length). reduce: sums a tensor over all processes; by default there is one.
    """
    # [V44] Over the whole batch on all processes, in float64: 1 and 8 processes agree.   core_algos.py#L215-L263
    count = reduce(mask.sum().double()).clamp(min=1)
    mean = reduce(values.masked_fill(~mask, 0).double().sum()) / count
    centred = (values - mean).masked_fill(~mask, 0)
    # [V45] [V46] Divided by n, so that one token, or none, gives 0.   torch_functional.py#L322
    variance = reduce((centred.double() ** 2).sum()) / count
    whitened = centred * torch.rsqrt(variance + 1e-8) + (mean if keep_mean else 0)
    return whitened.masked_fill(~mask, 0).to(values.dtype)


# ---- Losses ----------------------------------------------------------------------------------------------------


def token_losses(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss: str,
    *,
    low: float,
    high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The policy's loss per token, which tokens a bound of the clip changed, and which the dual clip did.

    All tensors are (batch, response_length). With the ratio r = exp(new - old) and its bounds 1 - low and 1 + high:

        ppo         max(-A r, -A clip(r)); with a dual clip c and A < 0, at most -A c
        gspo        the same with the r of the whole sequence, exp(mean of new - old), which hardly leaves 1: its
                    bounds are 3e-4 and 4e-4 where those of ppo are 0.2
        cispo       -clip(r) A log p, the clip taken as given: no token ever loses its gradient. With low = 1 there is
                    only an upper bound, and this is REINFORCE with a truncated importance weight
        reinforce   -A log p
    """
    new_logprobs, logprobs, advantages = (x.masked_fill(~mask, 0) for x in (new_logprobs, logprobs, advantages))
    log_ratio, nothing = new_logprobs - logprobs, torch.zeros_like(mask)
    if loss == "reinforce":
        # [V64] With one step per batch, the gradient of ppo.   core_algos.py#L1984-L2060
        return -advantages * new_logprobs, nothing, nothing
    if loss == "gspo":
        # [V65] One ratio per sequence; each token has the gradient of its own log-prob.   core_algos.py#L1254-L1325
        mean = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)  # (batch, 1)
        log_ratio = (new_logprobs - new_logprobs.detach() + mean.detach()).clamp(max=10)
    else:
        log_ratio = log_ratio.clamp(-20, 20)
    ratio = torch.exp(log_ratio)
    clipped_ratio = ratio.clamp(1 - low, 1 + high)
    if loss == "cispo":
        # [V66] Bounds as distances from 1.   core_algos.py#L1722-L1780
        return -clipped_ratio.detach() * advantages * new_logprobs, (ratio != clipped_ratio) & mask, nothing
    # [V58] [V63] The lower bound and the upper may differ, as in DAPO's clip-higher.   core_algos.py#L1160-L1250
    losses, clipped_losses = -advantages * ratio, -advantages * clipped_ratio
    clipped = (clipped_losses > losses) & mask
    losses = torch.maximum(losses, clipped_losses)
    if dual_clip is None or loss == "gspo":
        return losses, clipped, nothing
    # [V59] A token of a wrong answer that became more than c times as likely has a constant loss, and so no gradient.
    #       core_algos.py#L1160-L1250
    bound = -advantages * dual_clip
    clipped_below = (advantages < 0) & (losses > bound) & mask
    return torch.where(clipped_below, bound, losses), clipped, clipped_below


def bounds(ppo: PpoArgs) -> dict[str, float | None]:
    """The bounds of the ratio, for token_losses."""
    # [V66] MiniMax-M1 and ScaleRL bound cispo's ratio from above alone: a floor would lift weights that ought to be
    #       small. verl has one.   core_algos.py#L1722-L1780
    low = {"cispo": 1.0}.get(ppo.loss, 0.2) if ppo.cliprange_low is None else ppo.cliprange_low
    return {"low": low, "high": ppo.cliprange_high, "dual_clip": ppo.dual_clip}


def value_losses(
    new_values: Tensor, values: Tensor, returns: Tensor, mask: Tensor, cliprange_value: float | None
) -> tuple[Tensor, Tensor]:
    """Half the larger of (V - R)^2 and (clip(V, V_old +- range) - R)^2 per token; which ones the clip changed.

    All tensors are (batch, response_length). cliprange_value None: no clip.
    """
    # [V69] The critic has an optimiser of its own, and so no coefficient.   core_algos.py#L1799-L1838
    new_values, values, returns = (x.masked_fill(~mask, 0) for x in (new_values, values, returns))
    bound = math.inf if cliprange_value is None else cliprange_value
    clipped_values = torch.clamp(new_values, values - bound, values + bound)
    losses, clipped_losses = (new_values - returns) ** 2, (clipped_values - returns) ** 2
    return 0.5 * torch.maximum(losses, clipped_losses), clipped_losses > losses


def aggregate(
    losses: Tensor,
    mask: Tensor,
    mode: str,
    *,
    tokens: int | None = None,
    sequences: int | None = None,
    episodes: int | None = None,
    length: int | None = None,
) -> Tensor:
    """One number from losses (batch, response_length): with s_i the sum over response i of |i| tokens,

        token-mean                sum of s_i / tokens
        seq-mean-token-sum        sum of s_i / sequences
        seq-mean-token-mean       sum of s_i / |i| / sequences
        seq-mean-token-sum-norm   sum of s_i / (episodes * length)

    The counts are those of the whole minibatch on all processes, so that micro-batches and processes add up; None:
    those of this tensor. sequences: rows that are not empty; episodes: all rows; length: the longest that may be.

    What a token weighs, in a minibatch of a response of 2 tokens and one of 8, response_length 10:

        token-mean                1/10 and 1/10    longer answers elsewhere in the minibatch make it less
        seq-mean-token-sum        1/2  and 1/2     a response weighs as much as it is long
        seq-mean-token-mean       1/4  and 1/16    a short right answer is praised more per token, a long wrong one
                                                   blamed less: wrong answers grow
        seq-mean-token-sum-norm   1/20 and 1/20    whatever the others' lengths (Dr. GRPO)
    """
    # [V60] [V61] [V62] Counts of the minibatch, not of what a process holds at a time.   core_algos.py#L1025-L1080
    lengths, losses = mask.sum(1), losses.masked_fill(~mask, 0)
    if mode == "token-mean":
        return losses.sum() / max(lengths.sum() if tokens is None else tokens, 1)
    if mode == "seq-mean-token-sum-norm":
        return losses.sum() / max((episodes or len(mask)) * (length or mask.shape[1]), 1)
    sums = losses.sum(1) / lengths.clamp(min=1) if mode == "seq-mean-token-mean" else losses.sum(1)
    return sums.sum() / max((lengths > 0).sum() if sequences is None else sequences, 1)


@torch.no_grad()
def token_statistics(
    mb: Rollout, new_logprobs: Tensor, entropies: Tensor, tokens: int, version: int, **flags: Tensor
) -> dict[str, Tensor]:
    """A micro-batch's shares of means over the tokens of its minibatch, of which there are so many."""
    log_ratio = (new_logprobs - mb.logprobs).masked_fill(~mb.loss_mask, 0).double()
    square = (log_ratio.exp() - 1) ** 2
    fresh = (mb.versions == version).unsqueeze(1)  # what an earlier policy has sampled starts off 1
    numbers = flags | {"policy/kl_old_new": -log_ratio, "policy/approxkl_avg": 0.5 * log_ratio**2}
    numbers |= {"policy/entropy_avg": entropies, "val/ratio": log_ratio.exp()}
    numbers |= {"square": square, "first": square * fresh}
    return {name: aggregate(x.double(), mb.loss_mask, "token-mean", tokens=tokens) for name, x in numbers.items()}


# ---- Off-policy: the sampler was another policy, or computed otherwise -----------------------------------------

# logprobs are the learner's, sampler_logprobs those with which the tokens were drawn: w = exp(logprobs - sampler's).


def log_weights(logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, kind: str) -> Tensor:
    """log w (batch, response_length): of each token; of its whole sequence; or the mean over the sequence."""
    log_w = (logprobs - sampler_logprobs).detach().masked_fill(~mask, 0)
    if kind == "token":
        return log_w
    total = log_w.sum(1, keepdim=True)
    return (total if kind == "sequence" else total / mask.sum(1, keepdim=True).clamp(min=1)).expand_as(log_w)


def importance_weights(logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, kind: str, cap: float) -> Tensor:
    """min(w, cap), detached, of each token or of its whole sequence: (batch, response_length), 0 where masked."""
    # [V85] By sequence: unbiased but for the cap, and of high variance; by token: the other way round.
    #       rollout_corr_helper.py#L481-L598
    weights = log_weights(logprobs, sampler_logprobs, mask, kind).clamp(-20, 20).exp()
    return weights.clamp(max=cap).masked_fill(~mask, 0)


def rejection_mask(
    logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, kind: str, low: float, high: float
) -> Tensor:
    """The tokens with low <= w <= high; by sequence: of the responses whose geometric mean of w is within."""
    # [V87] Bounds on w itself; those of verl's k1 hold for 1 / w.   rollout_corr_helper.py#L156-L372
    w = log_weights(logprobs, sampler_logprobs, mask, "mean" if kind == "sequence" else kind).exp()
    return mask & (w >= low) & (w <= high)


def mismatch(logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How far the learner is from the sampler: 0-d tensors, over valid tokens and rows that are not empty.

    All are 0 where there is no token.
    """
    # [V89] [V90] Also of one and the same policy, if two engines compute it.   rollout_corr_helper.py#L834-L940
    live = mask.any(1)
    logprobs, sampler_logprobs = (x.detach().masked_fill(~mask, 0)[live] for x in (logprobs, sampler_logprobs))
    mask = mask[live]
    log_w, lengths = logprobs - sampler_logprobs, mask.sum(1)
    weights = log_w.clamp(-20, 20).exp()[mask]  # (tokens,)
    sequence_weights = log_w.sum(1).clamp(-20, 20).exp()  # (rows,)
    log_ppl, sampler_log_ppl = (-x.sum(1) / lengths for x in (logprobs, sampler_logprobs))
    found = {
        "kl": -log_w[mask].mean(),
        "k3": (torch.expm1(log_w.clamp(-20, 20)) - log_w)[mask].mean(),
        "chi2_token": (weights**2).mean() - 1,
        "chi2_sequence": (sequence_weights**2).mean() - 1,
        "perplexity": log_ppl.exp().mean(),
        "sampler_perplexity": sampler_log_ppl.exp().mean(),
        "log_perplexity_gap": (log_ppl - sampler_log_ppl).mean(),
        "largest_gap": F.pad(log_w[mask].abs(), (0, 1)).max(),
        "ess": weights.mean() ** 2 / (weights**2).mean(),
    }
    return found if live.any() else {name: torch.zeros_like(number) for name, number in found.items()}


# ---- Metrics, samples, pictures --------------------------------------------------------------------------------


def update_metrics(
    setup: Setup,
    batch: Rollout,
    trained: Rollout,
    generated: list[Rollout],
    estimate: Estimate,
    steps: dict[str, Tensor],
    version: int,
) -> dict[str, float]:
    """The metrics of an update. Every process adds its shares, and all get the same numbers.

    trained: the batch as update took it; generated: all that was sampled; estimate and steps: what update returned.
    Raises a NumericalError if the numbers cannot be right.
    """
    accelerator = setup.accelerator
    names = ("mask", "stopped", "groups", "parts", "raw_scores", "scores")
    one = {name: torch.cat([getattr(part, name) for part in generated]) for name in names}
    live, lengths, right = one["mask"].any(1), one["mask"].sum(1), one["parts"][:, 0] > 0
    advantages, returns = estimate
    # [V79] Scores, lengths and the like are of all that was generated; so episodes count what was generated too.
    of_responses = {
        "objective/scores": one["scores"],
        "objective/verifiable_correct_rate": right,
        **{f"objective/{name}_reward": one["parts"][:, i] for i, name in enumerate(setup.sources)},
        "val/sequence_lengths": lengths,
        "val/stop_token_rate": one["stopped"],
        "val/groups_zero_std": ~torch.cat([scores_differ(part) for part in generated]),
        "val/groups_all_right": by_group((right | ~live).double(), one["groups"], "amin"),
        "val/groups_all_wrong": by_group((~right | ~live).double(), one["groups"], "amin"),
    }
    # [V55] A row without a token is in no mean.
    of_episodes = {
        "objective/kl": batch.kl.sum(1),
        "objective/non_score_reward": batch.non_score_rewards.sum(1),
        "objective/rlhf_reward": batch.rewards.masked_fill(~batch.mask, 0).sum(1),
        "objective/entropy": -batch.logprobs.masked_fill(~batch.mask, 0).sum(1),
    }
    if setup.args.ppo.filter_groups:  # [V78] groups that were left over are as many updates old
        of_episodes["train/staleness_mean"] = version - batch.versions
    of_tokens = {
        "objective/kl_per_token": batch.kl,
        "objective/sampler_gap": (batch.logprobs - batch.sampler_logprobs).abs(),
    }
    of_advantages = {"val/advantages_mean": advantages, "val/advantages_abs_mean": advantages.abs()}
    errors = (returns - batch.values).double()
    of_values = {"val/mean": batch.values, "val/returns": returns, "square_of_return": returns.double() ** 2}
    of_values |= {"error": errors, "square_of_error": errors**2}
    critic = "value/grad_norm" in steps
    m = processes.means_over(
        (live, of_responses),
        (batch.mask.any(1), of_episodes),
        (batch.mask, of_tokens),
        (trained.mask, of_advantages | (of_values if critic else {})),
        (live & right, {"val/sequence_lengths_correct": lengths}),
        (torch.ones_like(live), {"val/unscorable": ~live}),
        (live & ~right, {"val/sequence_lengths_incorrect": lengths}),
        accelerator=accelerator,
    )
    # [V55] A minibatch in which no token counts is in no mean either.
    live_steps = accelerator.reduce(steps["tokens"], "sum") > 0  # (steps,)
    shares = {
        name: x[live_steps].sum() / live_steps.sum().clamp(min=1)
        for name, x in steps.items()
        if not name.endswith("grad_norm")
    }
    m |= processes.sum_over_processes(shares | {"first": steps["first"][0]}, accelerator)
    m |= {name: x.mean().item() for name, x in steps.items() if name.endswith("grad_norm")}  # the same everywhere
    off = m["val/ratio"] - 1 if live_steps.any() else 0
    m |= {"val/ratio_var": m["square"] - off**2, "val/first_ratio_gap": math.sqrt(m["first"])}
    if critic:
        variance_of_errors = m["square_of_error"] - m["error"] ** 2
        variance_of_returns = m["square_of_return"] - m["val/returns"] ** 2
        m["val/explained_var"] = 1 - variance_of_errors / max(variance_of_returns, 1e-12)
    everyone = accelerator.gather(lengths)
    m |= {"val/sequence_lengths_min": everyone.min().item(), "val/sequence_lengths_max": everyone.max().item()}
    of_critic = () if critic else ("loss/value_avg", "val/clipfrac_avg")
    metrics = {name: m[name] for name in m if "/" in name and name not in of_critic}
    processes.check_update(metrics, version, setup.args.dtype, gap="val/first_ratio_gap")
    return metrics


def sample_rows(setup: Setup, batch: Rollout, advantages: Tensor) -> list[dict[str, Any]]:
    """The first group, at most four of it, or three single responses: texts, scores, mean advantages of tokens."""
    n = setup.args.ppo.samples_per_prompt
    rows = batch.rows(slice(0, min(n, 4) if n > 1 else 3))
    responses = rows.query_responses[:, -rows.mask.shape[1] :]
    mean = advantages[: len(responses)].sum(1) / rows.mask.sum(1).clamp(min=1)
    columns = {
        "prompt": [setup.problems.texts[i] for i in rows.problems],
        "response": problems.to_texts(setup.tokenizer, responses, setup.ids),
        "answer": [setup.problems.answers[i] for i in rows.problems],
        "score": rows.scores.tolist(),
        "advantage": mean.tolist(),
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


PANELS = {
    "right samples": ["objective/verifiable_correct_rate"],
    "held-out accuracy, greedy": [],  # of the run's verifiers, which `finish` knows
    "held-out accuracy by kind, greedy": [],
    "score": ["objective/scores", "objective/rlhf_reward"],
    "KL from the reference (nats)": ["objective/kl"],
    "length (tokens)": ["val/sequence_lengths", "val/sequence_lengths_correct", "val/sequence_lengths_incorrect"],
    "share of responses that end": ["val/stop_token_rate", "eval/stopped"],
    "entropy of the policy (nats per token)": ["policy/entropy_avg"],
    "policy loss": ["loss/policy_avg"],
    "value loss": ["loss/value_avg"],
    "clipped share of tokens": ["policy/clipfrac_avg", "policy/clipfrac_low_avg", "val/clipfrac_avg"],
    "explained variance of returns": ["val/explained_var"],
    "groups without a signal": ["val/groups_zero_std", "val/groups_all_right", "val/groups_all_wrong"],
    "gradient norm": ["policy/grad_norm", "value/grad_norm"],
    "approximate KL of the update (nats)": ["policy/approxkl_avg"],
}

# ---- Plumbing: sizes, networks and sources to load, learning rates, checkpoints, the saved models --------------


def check_arguments(args: Args) -> None:
    """Refuse what cannot be meant."""
    ppo, shaping = args.ppo, args.rewards
    cli.check_values(args)
    cli.at_least(0, "", args, "log_interval", "save_interval", "trace_interval")
    cli.at_least(0, "", args, "eval_interval", "eval_problems", "eval_samples")
    cli.above_zero("", args, "eval_temperature")
    cli.at_least(0, "rewards.", shaping, "kl_coef", "kl_loss_coef", "missing_stop_penalty", "min_response_length")
    cli.at_least(0, "rewards.", shaping, "overlong_buffer", "overlong_factor")
    cli.at_least(0, "ppo.", ppo, "gamma", "lam", "weight_decay", "entropy_coef", "lr_warmup", "critic_warmup")
    cli.at_least(0, "lora.", args.lora, "rank")
    cli.above_zero("ppo.", ppo, "lr", "critic_lr", "cliprange_high", "adam_eps", "max_grad_norm")
    may_be_none = ("cliprange_low", "dual_clip", "cliprange_value")
    cli.above_zero("ppo.", ppo, *(name for name in may_be_none if getattr(ppo, name) is not None))
    cli.above_zero("lora.", args.lora, "alpha")
    cli.check_controller(shaping.adaptive_kl, ppo.batch_size)
    for problem in (*impossible(args), *without_effect(args)):
        raise InputError(problem)


def doubts(args: Args) -> Iterator[str]:
    """What is allowed, but may not be meant."""
    ppo, shaping, flag = args.ppo, args.rewards, cli.flag
    estimator = f"{flag('rewards.kl_estimator')} {shaping.kl_estimator}"
    # [V48] verl and TRL offer these without a word.   ray_trainer.py#L86-L108
    if shaping.kl_coef and shaping.kl_estimator in ("abs", "k2", "k3"):
        yield (
            f"{estimator}: in the reward, its gradient vanishes near the reference and can point away from it "
            f"further out; that of k1 is the gradient of the KL divergence"
        )
    # [V34] The penalties of a group whose scores are all equal differ, and are divided by how much they differ. verl
    #       does the same.   core_algos.py#L267-L330
    if shaping.kl_coef and ppo.advantage == "grpo" and not ppo.filter_groups:
        yield (
            f"{flag('ppo.advantage')} grpo divides by the group's standard deviation. Where all scores are equal, "
            f"that of the KL penalty is left, and however small {flag('rewards.kl_coef')} {shaping.kl_coef:g} is, "
            f"advantages are about 1; {flag('rewards.kl_loss_coef')} or {flag('ppo.advantage')} dr_grpo avoids that"
        )
    # [V56] Allowed, and said.   verl/utils/config.py#L181
    if shaping.kl_coef and shaping.kl_loss_coef and shaping.kl_estimator != "full":
        yield f"{flag('rewards.kl_coef')} and {flag('rewards.kl_loss_coef')} both penalise the KL"
    if shaping.adaptive_kl.target is not None and shaping.kl_estimator in ("abs", "k2"):
        yield f"{flag('rewards.adaptive_kl.target')} is in nats of KL, which {estimator} does not estimate"
    if ppo.loss == "gspo" and max(bounds(ppo)["low"], ppo.cliprange_high) > 0.01:
        yield (
            f"{flag('ppo.loss')} gspo: the ratio of a whole response hardly leaves 1, so a clip range above 0.01 "
            f"never acts; its authors take {flag('ppo.cliprange_low')} 3e-4 and {flag('ppo.cliprange_high')} 4e-4"
        )
    # [V36] Half of Dr. GRPO is in the loss.
    if ppo.advantage == "dr_grpo" and ppo.loss_aggregation != "seq-mean-token-sum-norm":
        yield (
            f"{flag('ppo.advantage')} dr_grpo is Dr. GRPO only with {flag('ppo.loss_aggregation')} "
            f"seq-mean-token-sum-norm"
        )


def impossible(args: Args) -> Iterator[str]:
    """What does not go together."""
    ppo, shaping, flag = args.ppo, args.rewards, cli.flag
    n, full_in_loss = ppo.samples_per_prompt, shaping.kl_loss_coef and shaping.kl_loss_estimator == "full"
    of_prompt = flag("ppo.samples_per_prompt")
    # [V35] verl trains on raw rewards then.   core_algos.py#L309-L311
    if ppo.advantage in IN_GROUPS and n < 2:
        yield (
            f"{flag('ppo.advantage')} {ppo.advantage} compares the responses to a prompt; "
            f"{of_prompt} {n} must be at least 2"
        )
    if ppo.filter_groups and n < 2:
        yield f"{flag('ppo.filter_groups')} needs {of_prompt} 2 or more"
    # [V51] With equal coefficients, and advantages that nothing rescales, they are the gradient of the sequence's KL;
    #       in the reward alone it points away.
    unequal = shaping.kl_loss_coef != shaping.kl_coef or shaping.adaptive_kl.target is not None
    full_in_reward = shaping.kl_coef and shaping.kl_estimator == "full"
    if full_in_reward and (not full_in_loss or unequal):
        yield (
            f"{flag('rewards.kl_estimator')} full goes with {flag('rewards.kl_loss_estimator')} full and a "
            f"{flag('rewards.kl_loss_coef')} that is {flag('rewards.kl_coef')}, and no "
            f"{flag('rewards.adaptive_kl.target')}: in the reward alone its gradient points away from the reference"
        )
    if full_in_reward and (is_whitened(ppo) or ppo.advantage == "grpo"):
        yield (
            f"{flag('rewards.kl_estimator')} full needs advantages that nothing rescales, since the loss has the "
            f"rest of its gradient: {flag('ppo.whiten_advantages')} False, and {flag('ppo.advantage')} rloo, not grpo"
        )
    # [V56] A coefficient that cannot act is an error.   verl/utils/config.py#L181
    if shaping.adaptive_kl.target is not None and not shaping.kl_coef:
        yield f"{flag('rewards.adaptive_kl.target')} moves {flag('rewards.kl_coef')}, which is 0 and stays so"
    if shaping.min_response_length and shaping.missing_stop == "none" and not shaping.mask_truncated:
        yield (
            f"{flag('rewards.min_response_length')} {shaping.min_response_length} does nothing without "
            f"{flag('rewards.missing_stop')} or {flag('rewards.mask_truncated')}"
        )
    if ppo.critic_warmup and ppo.advantage != "gae":
        yield (
            f"{flag('ppo.critic_warmup')} {ppo.critic_warmup} is for a critic, which {flag('ppo.advantage')} "
            f"{ppo.advantage} has none of; 0 switches it off"
        )
    if ppo.dual_clip is not None and (ppo.loss != "ppo" or ppo.dual_clip <= 1 + ppo.cliprange_high):
        yield (
            f"{flag('ppo.dual_clip')} {ppo.dual_clip} is for {flag('ppo.loss')} ppo, and above 1 + "
            f"{flag('ppo.cliprange_high')}; None switches it off"
        )
    if ppo.loss == "gspo" and ppo.loss_aggregation != "seq-mean-token-mean":
        yield f"{flag('ppo.loss')} gspo goes with {flag('ppo.loss_aggregation')} seq-mean-token-mean alone"
    # [V78] Sums with a reward model's score in them are never equal.
    if ppo.filter_groups and shaping.trained_model:
        yield (
            f"{flag('ppo.filter_groups')} leaves out groups whose scores are all equal, which they never are with "
            f"{flag('rewards.trained_model')}; leave one of the two out"
        )
    if shaping.overlong_buffer > args.task.response_length:
        yield (
            f"{flag('rewards.overlong_buffer')} {shaping.overlong_buffer} is more than "
            f"{flag('task.response_length')} {args.task.response_length}"
        )


def without_effect(args: Args) -> Iterator[str]:
    """Arguments that nothing reads, although they were given: their value is not the preset's."""
    ppo, shaping, flag = args.ppo, args.rewards, cli.flag
    of_critic, new_head = "ppo.lam ppo.cliprange_value rewards.value_model", "ppo.value_head"
    start = shaping.value_model or shaping.trained_model
    # [V56] Arguments; whether something reads them; what would.
    readers = [
        (of_critic, ppo.advantage == "gae", f"{flag('ppo.advantage')} gae"),
        (new_head, ppo.advantage == "gae" and not start, f"a new head of a critic, {flag('ppo.advantage')} gae"),
        ("ppo.gamma", ppo.advantage in ("gae", "reinforce++"), f"{flag('ppo.advantage')} gae or reinforce++"),
        ("ppo.cliprange_low ppo.cliprange_high", ppo.loss != "reinforce", f"a {flag('ppo.loss')} that has a ratio"),
        ("ppo.prompts_per_round ppo.max_generation_rounds", ppo.filter_groups, flag("ppo.filter_groups")),
        ("rewards.format_weight", shaping.format, flag("rewards.format")),
        ("rewards.trained_weight", shaping.trained_model, flag("rewards.trained_model")),
        ("rewards.overlong_factor", shaping.overlong_buffer, flag("rewards.overlong_buffer")),
        ("rewards.missing_stop_penalty", shaping.missing_stop != "none", flag("rewards.missing_stop")),
        ("rewards.kl_estimator", shaping.kl_coef or shaping.kl_loss_coef, flag("rewards.kl_coef")),
        ("rewards.kl_loss_estimator", shaping.kl_loss_coef, flag("rewards.kl_loss_coef")),
        ("rewards.adaptive_kl.horizon", shaping.adaptive_kl.target, flag("rewards.adaptive_kl.target")),
        ("eval_temperature", args.eval_samples, flag("eval_samples")),
    ]
    for names, is_read, reader in readers:
        for name in names.split():
            value, usual = (attrgetter(name)(one) for one in (args, PRESETS.get(args.preset, Args())))
            if not is_read and value != usual:
                yield f"{flag(name)} {value} does nothing without {reader}; leave it at {usual!r}"


@dataclass(frozen=True)
class PpoSizes:
    """What follows from the arguments and the number of processes, in episodes unless the name says otherwise.

    A round of generation is a batch, but for filter_groups. A batch is shared among processes: the local batch. A
    minibatch, one optimiser step, is 1 / nminibatches of the batch, and the local minibatch one process's part of it.
    """

    updates: int
    steps_per_update: int
    batch: int
    round: int
    round_prompts: int
    local_batch: int
    local_round: int
    local_rollout_batch: int
    local_minibatch: int
    local_micro_batch: int


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
        local_micro_batch=processes.rows_at_a_time("ppo.", ppo, "local_micro_batch_size", local_minibatch),
    )


def check_problems(source: problems.Problems, sizes: PpoSizes) -> None:
    if len(source) < sizes.round_prompts:
        raise InputError(
            f"{cli.flag('task.problems')} has {len(source)} problems, fewer than the {sizes.round_prompts} that are "
            f"drawn at a time ({cli.flag('ppo.batch_size')} / {cli.flag('ppo.samples_per_prompt')}, or "
            f"{cli.flag('ppo.prompts_per_round')})"
        )


def load_networks(
    args: Args, tokenizer: PreTrainedTokenizerBase, accelerator: Accelerator
) -> tuple[ActorCritic, Reference | None, nn.Module | None]:
    """Policy with or without a critic, reference, and peft's handle of the policy's adapters, if there are any.

    Sharded over the processes if the launcher asks for it. There is no reference where nothing is penalised.
    """
    if args.lora.rank and processes.sharding():
        raise InputError(f"{cli.flag('lora.rank')} does not go with FSDP")
    task, low_precision = args.task, args.dtype == "bfloat16"
    length, vocab_size = task.prompt_length + task.response_length, models.vocabulary_size(tokenizer)
    lm_backbone = models.load_base_model(args)
    critic = load_critic(args, vocab_size) if args.ppo.advantage == "gae" else None
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
    if args.rewards.kl_coef or args.rewards.kl_loss_coef:
        frozen = lm_backbone
        if adapters is None:
            frozen = models.load_base_model(args, frozen=True)
            models.place(frozen, accelerator)
        reference = Reference(ActorCritic(frozen, None, vocab_size, task.temperature), adapters)
    return actor_critic, reference, adapters


def load_critic(args: Args, vocab_size: int) -> lm.RewardModel:
    """The model that the critic starts from, ready to learn."""
    # [V70] A backbone of its own, from the policy's start; a new head says 0.
    if args.rewards.value_model or args.rewards.trained_model:
        name = "value_model" if args.rewards.value_model else "trained_model"
        critic = models.load_scalar_model(args, name, vocab_size)
    else:
        torch.manual_seed(args.seed)  # for the head, the same on every process
        backbone = models.load_base_model(args, AutoModel)
        critic = lm.RewardModel(backbone).to(backbone.dtype)
        if args.ppo.value_head == "zero":
            nn.init.zeros_(critic.reward_head.weight)
    critic.requires_grad_(True)
    critic.gain.requires_grad_(False)
    critic.bias.requires_grad_(False)
    return critic


def load_sources(args: Args, ids: problems.TaskIds, accelerator: Accelerator) -> dict[str, Source]:
    """What scores, under its name, with its weight; the verifier first."""
    shaping, prefix = args.rewards, args.task.response_prefix

    def of_texts(name: str, field: str) -> Callable[..., Tensor]:
        says = scorers.load_verifier(name, field, prefix, on_all_processes=True)
        return lambda prompts, texts, answers, *_: torch.tensor(says(prompts, texts, answers), dtype=torch.float64)

    sources = {"verifier": (of_texts(shaping.verifier, "rewards.verifier"), shaping.verifier_weight)}
    if shaping.format:
        sources["format"] = of_texts(shaping.format, "rewards.format"), shaping.format_weight
    if shaping.trained_model:
        model = models.load_scalar_model(args, "trained_model", ids.vocab_size, frozen=True)
        models.place(model, accelerator)

        def of_model(prompts: Any, texts: Any, answers: Any, queries: Tensor, responses: Tensor) -> Tensor:
            tokens = torch.cat([queries, responses], 1)
            at_once = {"pad_id": ids.pad, "rows": args.ppo.local_rollout_batch_size}
            scores = passes.by_length(nn.Module.__call__, model, tokens, **at_once).double()  # (rows,)
            # [V22] That a response cannot be scored is for functions of texts to say.
            if not scores.isfinite().all():
                raise NumericalError("the reward model gives scores that are not finite; the run stops")
            return scores

        sources["reward_model"] = of_model, shaping.trained_weight
    return sources


def make_optimizers(actor_critic: ActorCritic, ppo: PpoArgs) -> dict[str, torch.optim.Optimizer]:
    """One for the policy, and one for the critic if there is one."""
    # [V73] AdamW, its learning rates constant if nothing else is asked for.
    settings = {"betas": (0.9, ppo.beta2), "eps": ppo.adam_eps, "weight_decay": ppo.weight_decay, "fused": True}
    networks, rates = networks_of(actor_critic), {"policy": ppo.lr, "value": ppo.critic_lr}
    trained = {name: list(run.trained_parameters(network).values()) for name, network in networks.items()}
    return {name: torch.optim.AdamW(trained[name], rates[name], **settings) for name in networks}


def networks_of(actor_critic: ActorCritic) -> dict[str, nn.Module]:
    return {"policy": actor_critic.lm_backbone} | ({"value": actor_critic.critic} if actor_critic.critic else {})


def set_learning_rates(
    optimizers: dict[str, torch.optim.Optimizer], ppo: PpoArgs, number: int, updates: int
) -> float:
    """Those of an update (0-based); returns the policy's."""
    factor = run.scheduled_lr(1.0, ppo.schedule, number, updates) * min(1, (number + 1) / max(ppo.lr_warmup, 1))
    for name, optimizer in optimizers.items():
        optimizer.param_groups[0]["lr"] = factor * (ppo.critic_lr if name == "value" else ppo.lr)
    return factor * ppo.lr


if __name__ == "__main__":
    cli.run_script(train, lambda argv: cli.parse_args(PRESETS, argv, __doc__))
