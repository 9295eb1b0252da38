"""Arguments of chapter 3: what they mean, presets, how a batch is divided, which are refused, and what they name.

Marks like [V99] name an implementation detail. The original is verl-project/verl at commit b178a3c; files and lines
next to marks are the original's. See docs/reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Annotated, Literal

from accelerate import Accelerator
from annotated_types import Ge, Gt, Lt
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.lib import command_line, processes
from ppo_rlhf.lib.bounds import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ZeroToOne
from ppo_rlhf.lib.errors import InputError, flag, typed
from ppo_rlhf.rlvr import algebra, problem_rows, problems
from ppo_rlhf.tldr import classifiers, models

# ---- Arguments -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RewardsArgs:
    verifier: str = "gsm8k_strict"
    """what checks responses: gsm8k_strict, gsm8k_flexible, boxed, exact, reasoning_gym, or package.module:name of a
    function (prompts, responses, answers: texts) -> list of floats, or one for TRL or verl, as docs/chapter3.md says.
    A response with None or NaN counts nowhere"""
    evaluate_text: bool = False
    """allow tasks of reasoning-gym whose scorers evaluate an answer as Python. The risk: what the policy writes runs
    with your rights, though only arithmetic, in a process with limits and, where the system offers it, no network"""
    format: str = ""
    """a second verifier, of the form, whose value is added: gsm8k_format, think_answer, or a function; empty: none"""
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
    adaptive_kl: command_line.AdaptiveKLArgs = field(default_factory=command_line.AdaptiveKLArgs)
    """controller of the KL coefficient in the reward"""
    missing_stop: Literal["none", "replace", "subtract"] = "none"
    """score of a response that does not end. replace: minus the penalty; subtract: lowered by the penalty"""
    missing_stop_penalty: NonNegativeFloat = 1.0
    """units of score, for missing_stop"""
    overlong_buffer: NonNegativeInt = 0
    """over this many tokens before response_length, a punishment rises from 0; 0: no punishment"""
    teacher: str = ""
    """a model, in a folder or on the hub, that teaches in place of the scores: the reward of a token is its log-prob
    under the teacher minus that under the policy (kl_estimator k1), or the exact KL (full); empty: none"""

    @property
    def has_penalty(self) -> bool:
        """Whether a KL is in reward or loss, so that there is a reference, or a teacher in its place."""
        return bool(self.teacher or self.kl_coef or self.kl_loss_coef)

    @property
    def reward_kl(self) -> float:
        """Weight of the KL in the reward at the start, reward per nat."""
        return 1.0 if self.teacher else self.kl_coef

    @property
    def loss_kl(self) -> tuple[float, str]:
        """Weight of the KL in the loss, per nat, and its estimate."""
        # [V115] The exact KL from a teacher has a part of its gradient in the loss: that of the next token.
        if self.teacher:
            return float(self.kl_estimator == "full"), "full"
        return self.kl_loss_coef, self.kl_loss_estimator


@dataclass(frozen=True, kw_only=True)
class AdaptiveEntropyArgs:
    """Of a controller of the entropy coefficient."""

    target: PositiveFloat | None = None
    """entropy below which the coefficient rises, and above which it falls and there is no bonus, in nats per token;
    None keeps `entropy_coef` fixed"""
    delta: PositiveFloat = 0.005
    """how far the coefficient moves after each optimiser step"""
    min: NonNegativeFloat = 0.0
    """the coefficient's lower bound"""
    max: PositiveFloat = 1.0
    """its upper bound"""


@dataclass(frozen=True, kw_only=True)
class PpoArgs(command_line.MemoryArgs):
    total_episodes: PositiveInt = 111_360
    """responses to train on, over all updates; rounded down to whole updates"""
    batch_size: PositiveInt = 256
    """episodes (prompt and response) per update, over all processes"""
    samples_per_prompt: PositiveInt = 1
    """responses to each problem, a group; so an update has batch_size / samples_per_prompt problems"""
    nminibatches: PositiveInt = 4
    """optimiser steps per pass over the batch"""
    noptepochs: PositiveInt = 1
    """passes over the batch per update"""
    lr: PositiveFloat = 1e-6
    """learning rate of the policy"""
    critic_lr: PositiveFloat = 1e-5
    """learning rate of the critic"""
    critic_warmup: NonNegativeInt = 0
    """updates at the start in which only the critic learns"""
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
    gamma: ZeroToOne = 1.0
    """discount per token; only gae and reinforce++ read it"""
    lam: ZeroToOne = 1.0
    """lambda of generalised advantage estimation"""
    critic_lam: ZeroToOne | None = None
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
    """weight of the entropy bonus, per nat, at the start"""
    adaptive_entropy: AdaptiveEntropyArgs = field(default_factory=AdaptiveEntropyArgs)
    """controller of the entropy coefficient"""
    nll_coef: NonNegativeFloat = 0.0
    """weight of the mean of -log p over the tokens of correct responses, per nat"""
    filter_groups: bool = False
    """leave out groups whose responses all have the same score, and generate until the batch is full (DAPO)"""
    local_rollout_batch_size: PositiveInt = 256
    """responses that one process samples at a time, at most; a memory knob"""
    share_prefixes: bool = True
    """read tokens with which several rows begin, such as a prompt, once for all, where it pays; a memory knob"""

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
class Args(command_line.PolicyRunArgs):
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
    # This is no argument.
    tools = None  # in rlvr/tools.py ToolsArgs

    @property
    def has_exact_baseline(self) -> bool:
        """Whether advantages leave out what the exact KL of their own token costs."""
        # [V115] That cost is the same whichever token is drawn: a baseline in closed form. A critic learns one.
        exact = self.rewards.teacher and self.rewards.kl_estimator == "full"
        return bool(exact) and self.ppo.advantage != "gae"


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
#     round         256 that are generated at a time: a batch; with filter_groups, a batch may need several rounds
#     minibatch      64: 1 / nminibatches of the batch, one optimiser step
#     pass          a part of the minibatch, or micro-batch, that is read at a time; changes memory, not numbers


@dataclass(frozen=True, kw_only=True)
class PpoSizes:
    """Sizes, from the arguments and the number of processes, in episodes unless the name says otherwise."""

    updates: int
    steps_per_update: int  # of the optimisers; a run prints all sizes when it starts
    batch: int
    problems: int  # of a batch; each is a group
    local_batch: int
    local_rollout_batch: int
    local_minibatch: int


def ppo_sizes(ppo: PpoArgs, num_processes: int) -> PpoSizes:
    """Divide the global sizes exactly, or say which size does not divide and what would."""
    command_line.check_whole_update(ppo.total_episodes, ppo.batch_size)
    n, steps = ppo.samples_per_prompt, ppo.nminibatches
    split = partial(processes.split_evenly, "ppo.batch_size", ppo.batch_size)
    split(n * num_processes, f"{typed('ppo.samples_per_prompt')} x processes")
    return PpoSizes(
        updates=ppo.total_episodes // ppo.batch_size,
        steps_per_update=ppo.noptepochs * steps,
        batch=ppo.batch_size,
        problems=ppo.batch_size // n,
        local_batch=ppo.batch_size // num_processes,
        local_rollout_batch=min(ppo.local_rollout_batch_size, ppo.batch_size // num_processes),
        local_minibatch=split(num_processes * steps, f"processes x {typed('ppo.nminibatches')}"),
    )


# ---- Checks ----------------------------------------------------------------------------------------------------


def check_arguments(args: Args) -> None:
    """Raise an InputError for arguments that cannot be meant."""
    ppo, shaping = args.ppo, args.rewards
    command_line.check_run(args)
    command_line.check_controller(shaping.adaptive_kl, ppo.batch_size)
    for problem in (*impossible(args), *without_effect(args)):
        raise InputError(problem)


def evaluated(args: Args) -> list[str]:
    """The arguments that name a task whose scorer evaluates an answer as Python, if that scorer is the verifier."""
    by_scorer = "reasoning_gym" in (args.rewards.verifier, args.rewards.format)
    names = ("task.problems", "task.test_problems")
    return [name for name in names if by_scorer and problem_rows.evaluates_text(attrgetter(name)(args))]


def impossible(args: Args) -> Iterator[str]:
    """Arguments that do not go together."""
    ppo, shaping = args.ppo, args.rewards
    for name in evaluated(args) if not shaping.evaluate_text else ():
        yield (
            f"{flag(name)} {attrgetter(name)(args)}: its scorer evaluates what the policy writes as Python, with "
            f"your rights, though only arithmetic, in a process with limits and, where the system offers it, no "
            f"network; if you accept the risk that is left, add {flag('rewards.evaluate_text')}"
        )
    n, full_in_loss = ppo.samples_per_prompt, shaping.kl_loss_coef and shaping.kl_loss_estimator == "full"
    # [V35] verl would train on raw rewards.   core_algos.py#L309-L311
    if ppo.advantage in algebra.IN_GROUPS and n < 2:
        yield (
            f"{flag('ppo.advantage')} {ppo.advantage} compares the responses to a problem; "
            f"{flag('ppo.samples_per_prompt')} {n} must be at least 2"
        )
    # [V112] Nothing but the sources enters these advantages. Where there is only one, GDPO's code does plain GRPO.
    if ppo.advantage == "gdpo":
        if not (shaping.format or shaping.trained_model):
            yield (
                f"{flag('ppo.advantage')} gdpo scales each of several sources of the score alone; there is only the "
                f"verifier. Add {flag('rewards.format')} or {flag('rewards.trained_model')}, or take grpo"
            )
        penalties = {
            "rewards.kl_coef": shaping.kl_coef,
            "rewards.overlong_buffer": shaping.overlong_buffer,
            "rewards.missing_stop": shaping.missing_stop != "none",
        }
        for name, acts in penalties.items():
            if acts:
                yield (
                    f"{flag(name)} {attrgetter(name)(args)} does nothing with {flag('ppo.advantage')} gdpo, which "
                    f"compares what each source says; {flag('rewards.kl_loss_coef')} penalises the KL in the loss"
                )
        if ppo.filter_groups:
            yield (
                f"{flag('ppo.filter_groups')} leaves out groups whose sums are all equal, but their sources may "
                f"differ, from which {flag('ppo.advantage')} gdpo learns; leave one of the two out"
            )
    if ppo.filter_groups and n < 2:
        yield f"{flag('ppo.filter_groups')} needs {flag('ppo.samples_per_prompt')} 2 or more"
    # [V117] A teacher judges each token, and these estimators compare what whole responses got.
    if shaping.teacher and ppo.advantage not in ("gae", "reinforce++"):
        yield (
            f"{flag('ppo.advantage')} {ppo.advantage} compares whole responses, but {flag('rewards.teacher')} judges "
            f"each token; reinforce++ and gae have an advantage for each"
        )
    if shaping.teacher and shaping.kl_estimator not in ("k1", "full"):
        yield (
            f"{flag('rewards.kl_estimator')} {shaping.kl_estimator} in the reward has another gradient than the KL "
            f"from {flag('rewards.teacher')}; take k1 or full"
        )
    # [V51] The exact KL in reward and loss, with equal coefficients and advantages that nothing rescales, has the
    #       gradient of the KL of whole responses. In the reward alone, its gradient points away from the reference.
    unequal = shaping.kl_loss_coef != shaping.kl_coef or shaping.adaptive_kl.target is not None
    full_in_reward = shaping.reward_kl and shaping.kl_estimator == "full"
    if full_in_reward and not shaping.teacher and (not full_in_loss or unequal):
        yield (
            f"{flag('rewards.kl_estimator')} full goes with {flag('rewards.kl_loss_estimator')} full and a "
            f"{flag('rewards.kl_loss_coef')} that is {flag('rewards.kl_coef')}, and no "
            f"{flag('rewards.adaptive_kl.target')}: in the reward alone its gradient points away from the reference"
        )
    if full_in_reward and (ppo.whitens or ppo.advantage == "grpo"):
        yield (
            f"{flag('rewards.kl_estimator')} full needs advantages that nothing rescales, since the loss has the "
            f"rest of its gradient: {flag('ppo.whiten_advantages')} False, and {flag('ppo.advantage')} rloo, not grpo"
        )
    # [V56] A coefficient that cannot have an effect is an error.   verl/utils/config.py#L181
    if shaping.adaptive_kl.target is not None and not shaping.kl_coef:
        yield f"{flag('rewards.adaptive_kl.target')} moves {flag('rewards.kl_coef')}, which is 0 and stays so"
    entropy = ppo.adaptive_entropy
    if entropy.target is not None and not entropy.min <= ppo.entropy_coef <= entropy.max:
        yield (
            f"{flag('ppo.entropy_coef')} {ppo.entropy_coef} must be from {flag('ppo.adaptive_entropy.min')} "
            f"{entropy.min} to {flag('ppo.adaptive_entropy.max')} {entropy.max}"
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
    # [V78] Scores that contain a reward model's score are never equal.
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
    """Arguments that were given although nothing reads them: their value is not that of the preset."""
    ppo, shaping = args.ppo, args.rewards
    usual = PRESETS.get(args.preset, Args())
    critic = "ppo.lam ppo.cliprange_value rewards.value_model ppo.critic_lam ppo.lam_alpha"
    clips = ("ppo", "gspo", "cispo")
    scores = "rewards.format rewards.trained_model rewards.missing_stop rewards.overlong_buffer ppo.filter_groups"
    penalties = "rewards.kl_coef rewards.kl_loss_coef rewards.adaptive_kl.target"
    bounds = "ppo.adaptive_entropy.delta ppo.adaptive_entropy.min ppo.adaptive_entropy.max"
    lam_is_read = ppo.lam_alpha is None or ppo.critic_lam is None or ppo.advantage != "gae"
    # [V56] Each row has arguments, whether something reads them, and what would.
    readers = [
        (critic, ppo.advantage == "gae", f"{flag('ppo.advantage')} gae"),
        ("ppo.lam", lam_is_read, f"{flag('ppo.lam_alpha')} None or {flag('ppo.critic_lam')} None"),
        ("ppo.gamma", ppo.advantage in ("gae", "reinforce++"), f"{flag('ppo.advantage')} gae or reinforce++"),
        ("ppo.cliprange_low ppo.cliprange_high", ppo.loss in clips, f"{flag('ppo.loss')} ppo, gspo or cispo"),
        ("ppo.trust_region", ppo.loss in ("ipo", "dppo"), f"{flag('ppo.loss')} ipo or dppo"),
        (bounds, ppo.adaptive_entropy.target is not None, flag("ppo.adaptive_entropy.target")),
        (f"{scores} {penalties}", not shaping.teacher, f"an empty {flag('rewards.teacher')}"),
        ("rewards.evaluate_text", evaluated(args), "a task of reasoning-gym whose scorer evaluates text"),
        ("rewards.label", classifiers.is_foreign(shaping.trained_model), "a reward model from elsewhere"),
        ("rewards.trained_weight", shaping.trained_model, flag("rewards.trained_model")),
        ("rewards.missing_stop_penalty", shaping.missing_stop != "none", flag("rewards.missing_stop")),
        ("rewards.kl_estimator", shaping.has_penalty, flag("rewards.kl_coef")),
        ("rewards.kl_loss_estimator", shaping.kl_loss_coef, flag("rewards.kl_loss_coef")),
        ("rewards.adaptive_kl.horizon", shaping.adaptive_kl.target, flag("rewards.adaptive_kl.target")),
    ]
    for names, is_read, reader in readers:
        for name in names.split():
            value, default = (attrgetter(name)(one) for one in (args, usual))
            if not is_read and value != default:
                yield f"{flag(name)} {value} does nothing without {reader}; leave it at {default!r}"


def doubts(args: Args) -> Iterator[str]:
    """Warnings about settings that may be a mistake."""
    ppo, shaping = args.ppo, args.rewards
    estimator = f"{flag('rewards.kl_estimator')} {shaping.kl_estimator}"
    # [V48] verl and TRL 1.16 offer these without a warning.   ray_trainer.py#L86-L108
    if shaping.kl_coef and shaping.kl_estimator in ("abs", "k2", "k3"):
        yield (
            f"{estimator}: in the reward, its gradient vanishes near the reference and can point away from it "
            f"further out; that of k1 is the gradient of the KL divergence"
        )
    # [V34] In a group whose scores are all equal, only the penalties differ, and they are divided by how much they
    #       differ. verl does the same.   core_algos.py#L267-L330
    if shaping.kl_coef and ppo.advantage == "grpo" and not ppo.filter_groups:
        yield (
            f"{flag('ppo.advantage')} grpo divides by the group's standard deviation. Where all scores are equal, "
            f"that of the KL penalty is left, and however small {flag('rewards.kl_coef')} {shaping.kl_coef:g} is, "
            f"advantages are about 1; {flag('rewards.kl_loss_coef')} or {flag('ppo.advantage')} dr_grpo avoids that"
        )
    # [V56] Both penalties at once are allowed, with a warning.   verl/utils/config.py#L181
    if shaping.kl_coef and shaping.kl_loss_coef and shaping.kl_estimator != "full":
        yield f"{flag('rewards.kl_coef')} and {flag('rewards.kl_loss_coef')} both penalise the KL"
    if shaping.adaptive_kl.target is not None and shaping.kl_estimator in ("abs", "k2"):
        yield f"{flag('rewards.adaptive_kl.target')} is in nats of KL, which {estimator} does not estimate"
    if ppo.loss == "gspo" and max(algebra.lower_clip_range(ppo.loss, ppo.cliprange_low), ppo.cliprange_high) > 0.01:
        yield (
            f"{flag('ppo.loss')} gspo: the ratio of a whole response hardly leaves 1, so a clip range above 0.01 "
            f"never acts; its authors take {flag('ppo.cliprange_low')} 3e-4 and {flag('ppo.cliprange_high')} 4e-4"
        )
    # [V109] Below 0, a mean would turn advantages around, so such groups are left out.
    if ppo.advantage == "maxrl" and (shaping.kl_coef or shaping.missing_stop != "none" or shaping.overlong_buffer):
        yield (
            f"{flag('ppo.advantage')} maxrl divides by the mean of the scores, which ought to be the share of right "
            f"responses. Penalties in the score change it, and groups in which it is not above 0 teach nothing; "
            f"{flag('rewards.kl_loss_coef')} penalises the KL without that"
        )
    # [V36] Half of Dr. GRPO is in the aggregation of the loss.
    if ppo.advantage == "dr_grpo" and ppo.loss_aggregation != "seq-mean-token-sum-norm":
        yield (
            f"{flag('ppo.advantage')} dr_grpo is Dr. GRPO only with {flag('ppo.loss_aggregation')} "
            f"seq-mean-token-sum-norm"
        )


def check_problems(source: problems.Problems, sizes: PpoSizes) -> None:
    """Raise an InputError if there are fewer problems than a round of generation draws."""
    if len(source) < sizes.problems:
        raise InputError(
            f"{flag('task.problems')} has {len(source)} problems, fewer than the {sizes.problems} that are drawn at "
            f"a time ({flag('ppo.batch_size')} / {flag('ppo.samples_per_prompt')})"
        )


# ---- Setup -----------------------------------------------------------------------------------------------------

# (prompts, texts, answers, queries=, responses=, messages=) -> (rows,); and its weight
Source = tuple[Callable[..., Tensor], float]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the arguments name, apart from the networks that learn: the parts of a run that no update changes."""

    args: Args
    sizes: PpoSizes
    tokenizer: PreTrainedTokenizerBase
    ids: problems.TaskIds
    problems: problems.Problems  # to train on
    held_out: problems.Problems
    sources: dict[str, Source]  # what scores, under its name; the verifier first
    adapters: nn.Module | None  # peft's handle of the policy's adapters
    accelerator: Accelerator

    @property
    def weights(self) -> list[float]:
        """Of the sources."""
        return [weight for _, weight in self.sources.values()]
