"""Arguments of chapter 3: what they mean, presets, and how a batch is divided. rlvr/checks.py refuses bad values.

Marks like [V99] name an implementation detail; see docs/reference. verl is verl-project/verl at commit b178a3c.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from ppo_rlhf.lib.base import errors, processes
from ppo_rlhf.lib.base.bounds import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from ppo_rlhf.lib.services import cli
from ppo_rlhf.rlvr import algebra, problems
from ppo_rlhf.tldr import models

# ---- Arguments -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RewardsArgs:
    verifier: str = "gsm8k_strict"
    """what checks responses: gsm8k_strict, gsm8k_flexible, boxed, exact, reasoning_gym, or package.module:name of a
    function (prompts, responses, answers: texts) -> list of floats. A response with None or NaN counts nowhere"""
    evaluate_text: bool = False
    """allow tasks of reasoning-gym whose scorers evaluate an answer as Python. The risk: what the policy writes runs
    with your rights, though only arithmetic, in a process with limits and, where the system offers it, no network"""
    format: str = ""
    """a second verifier, of the form: gsm8k_format, think_answer, or a function; empty: none"""
    format_weight: float = 1.0
    """weight of the second verifier's value in the score; 0: it is only logged and evaluated"""
    trained_model: str = ""
    """a reward model whose score is added: models/<run>/reward, or any sequence classifier, in a folder or on the
    hub; empty: none"""
    label: str = ""
    """of a reward model from elsewhere: the label whose logit is the score, as POSITIVE; empty: it has only one"""
    trained_weight: float = 1.0
    """weight of the reward model's score in the score"""
    value_model: str = ""
    """folder of the model that the critic starts from; empty: the reward model, or the base model with a new head"""
    kl_coef: NonNegativeFloat = 0.001
    """weight of the KL penalty in the reward at the start, reward per nat"""
    kl_estimator: Literal["k1", "abs", "k2", "k3", "full"] = "k1"
    """estimate of the KL in the reward: k1 = log(policy/reference), abs, k2, k3: see kl_estimate; full: exact"""
    kl_loss_coef: NonNegativeFloat = 0.0
    """weight of the KL penalty in the loss, per nat"""
    kl_loss_estimator: Literal["k2", "k3", "abs", "k1+", "k2+", "k3+", "full"] = "k3"
    """estimate of the KL in the loss, where its slope acts and not its value"""
    adaptive_kl: cli.AdaptiveKLArgs = field(default_factory=cli.AdaptiveKLArgs)
    """controller of the KL coefficient in the reward"""
    missing_stop: Literal["none", "replace", "subtract"] = "none"
    """score of a response that does not end. replace: minus the penalty; subtract: lowered by the penalty"""
    missing_stop_penalty: NonNegativeFloat = 1.0
    """units of score, for missing_stop"""
    overlong_buffer: NonNegativeInt = 0
    """over this many tokens before response_length, a punishment rises from 0; 0: no punishment"""

    @property
    def has_penalty(self) -> bool:
        """Whether the KL is penalised, so that there is a reference."""
        return bool(self.kl_coef or self.kl_loss_coef)


@dataclass(frozen=True, kw_only=True)
class PpoArgs(cli.MemoryArgs):
    total_episodes: PositiveInt = 111_360
    """responses to train on, over all updates; rounded down to whole updates"""
    batch_size: PositiveInt = 256
    """episodes (prompt and response) per update, over all processes"""
    samples_per_prompt: PositiveInt = 1
    """responses to each prompt, a group; so an update has batch_size / samples_per_prompt prompts"""
    nminibatches: PositiveInt = 4
    """optimiser steps per pass over the batch"""
    noptepochs: PositiveInt = 1
    """passes over the batch per update"""
    lr: PositiveFloat = 1e-6
    """learning rate of the policy"""
    critic_lr: PositiveFloat = 1e-5
    """learning rate of the critic"""
    lr_warmup: NonNegativeInt = 0
    """updates over which both learning rates rise linearly to lr and critic_lr"""
    critic_warmup: NonNegativeInt = 0
    """updates at the start in which only the critic learns"""
    critic_explains: Annotated[float, Gt(0), Lt(1)] | None = None
    """value pretraining: these updates end when the critic explains this share of the variance of the returns, and
    its targets in them are sums of rewards (critic_lam 1). None: all of these updates, with the usual targets"""
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.999
    """second beta of AdamW; the first is 0.9"""
    weight_decay: NonNegativeFloat = 0.01
    """weight decay of AdamW"""
    max_grad_norm: PositiveFloat = 1.0
    """the gradients of policy and critic are each scaled down to this norm"""
    advantage: Literal[
        "gae", "grpo", "dr_grpo", "maxrl", "gdpo", "rloo", "opo", "reinforce++", "reinforce++-baseline", "remax"
    ] = "gae"
    """estimator of the advantages; only gae has a critic"""
    whiten_advantages: bool | None = None
    """scale the advantages of the batch to mean 0 and variance 1; None: as the estimator needs"""
    gamma: NonNegativeFloat = 1.0
    """discount per token; only gae and reinforce++ read it"""
    lam: NonNegativeFloat = 1.0
    """lambda of generalised advantage estimation"""
    critic_lam: NonNegativeFloat | None = None
    """lambda of the critic's targets; None: lam"""
    lam_alpha: PositiveFloat | None = None
    """the policy's lambda is 1 - 1 / (this x the tokens of the response), in place of lam; None: lam"""
    loss: Literal["ppo", "gspo", "cispo", "ipo", "dppo", "reinforce"] = "ppo"
    """loss of the policy; see token_losses"""
    loss_aggregation: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """how losses of tokens become one number; see aggregate"""
    cliprange_low: PositiveFloat | None = None
    """the probability ratio is clipped to 1 - this; None: 0.2, but 1 (no lower bound, as published) for cispo"""
    cliprange_high: PositiveFloat = 0.2
    """and to 1 + this; about 4e-4 for gspo, and 3 to 7 for cispo as in ScaleRL, whose upper bound is 4 to 8"""
    dual_clip: PositiveFloat | None = None
    """a token of a bad response whose ratio exceeds this is no longer pushed down; None: no such bound"""
    trust_region: Annotated[float, Gt(0), Lt(1)] = 0.3
    """with ipo and dppo, a token has no loss once its probability is further than this from the old one"""
    cliprange_value: PositiveFloat | None = 0.5
    """new values are clipped to old values +- this, in units of reward; None: not clipped"""
    entropy_coef: NonNegativeFloat = 0.0
    """weight of the entropy bonus, per nat"""
    nll_coef: NonNegativeFloat = 0.0
    """weight of the mean of -log p over the tokens of correct responses, per nat"""
    filter_groups: bool = False
    """leave out groups whose responses all have the same score, and generate until the batch is full (DAPO)"""
    prompts_per_round: NonNegativeInt = 0
    """with filter_groups: prompts that are sampled at a time; 0: as many as the batch has"""
    local_rollout_batch_size: PositiveInt = 256
    """responses that one process samples at a time, at most; a memory knob"""
    share_prefixes: bool = True
    """read tokens with which several rows begin, such as a prompt, once for all, where it pays; a memory knob"""

    @property
    def bounds(self) -> dict[str, float | None]:
        """How far a token may move, for token_losses."""
        low = algebra.lower_clip_range(self.loss, self.cliprange_low)
        found = {"low": low, "high": self.cliprange_high, "dual_clip": self.dual_clip}
        return found | {"trust_region": self.trust_region}

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened over the batch."""
        return self.advantage in algebra.WHITENED if self.whiten_advantages is None else self.whiten_advantages


@dataclass(frozen=True, kw_only=True)
class ToolsArgs:
    tool: str = "calculator"
    """what answers calls: calculator, or package.module:name of a function (call text) -> text"""
    call_start: str = "["
    """text before a call. The call is the text between the last call_start of a turn and call_end"""
    call_end: str = "]"
    """text that ends a call: exactly one token, at which generation stops"""


@dataclass(frozen=True, kw_only=True)
class Args(cli.PolicyRunArgs):
    preset: str = "gsm8k"
    """names a set of defaults: gsm8k, gsm8k-grpo, dr-grpo, rloo, sums, sums-grpo, arithmetic"""
    exp_name: str = "rlvr_policy"
    seed: NonNegativeInt = 1
    """seed of the sampling noise, the order of the problems and the minibatches"""
    base_model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    """model to start from: a folder, or a name on the hub"""
    eval_interval: NonNegativeInt = 10
    """updates between evaluations on the held-out problems, the first one before the first update; 0: only at the
    end"""
    eval_problems: NonNegativeInt = 0
    """how many held-out problems an evaluation has, the first ones; 0: all"""
    eval_samples: NonNegativeInt = 0
    """sampled responses to each of them before the first update and after the last, in addition to the greedy one"""
    eval_temperature: Annotated[float, Ge(1e-6)] = 1.0
    """sampling temperature of the eval_samples"""
    task: problems.TaskArgs = field(default_factory=problems.TaskArgs)
    """problems, prompts and responses"""
    rewards: RewardsArgs = field(default_factory=RewardsArgs)
    """scores and KL penalty"""
    ppo: PpoArgs = field(default_factory=PpoArgs)
    """the optimisation"""
    lora: models.LoraArgs = field(default_factory=models.LoraArgs)
    """low-rank adapters"""
    # These are no arguments.
    script = "rlvr_policy"  # the other scripts have an Args of their own
    tools = None  # in rlvr/tools.py ToolsArgs


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
        local_micro_batch_size=128,
    ),
)
SUMS_GRPO = dataclasses.replace(SUMS.ppo, samples_per_prompt=8, critic_warmup=0, advantage="grpo")
# [V99] Arguments of verl's logged run, of its recipes and of TRL 1.16; docs/reference says what differs.
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
    # A real language model, on two CPU cores in minutes. The small KL penalty is there so that it forgets less of
    # else it could answer. A response that does not end scores 0: if the number alone counted, it would talk on.
    "arithmetic": Args(
        base_model="smollm2-135m",
        save_interval=0,
        eval_samples=4,
        eval_temperature=0.7,
        task=problems.TASKS["arithmetic"],
        rewards=RewardsArgs(
            verifier="gsm8k_flexible",
            missing_stop="replace",
            missing_stop_penalty=0.0,
            kl_coef=0.0,
            kl_loss_coef=0.001,
        ),
        ppo=PpoArgs(
            total_episodes=30 * 64,
            batch_size=64,
            samples_per_prompt=8,
            nminibatches=1,
            lr=1e-5,
            weight_decay=0.0,
            advantage="dr_grpo",
            loss_aggregation="seq-mean-token-sum-norm",
            local_micro_batch_size=64,
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


@dataclass(frozen=True, kw_only=True)
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
    cli.check_whole_update(ppo.total_episodes, ppo.batch_size)
    n, split, typed = ppo.samples_per_prompt, processes.split_evenly, errors.typed
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
        local_rollout_batch=min(ppo.local_rollout_batch_size, local_round),
        local_minibatch=local_minibatch,
    )
