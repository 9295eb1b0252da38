"""Arguments of chapter 3: what they mean, presets, how a batch is divided, and which are refused.

Marks like [V99] name an implementation detail. The original is verl-project/verl at commit b178a3c; files and lines
next to marks are the original's. See docs/reference.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from ppo_rlhf.rlvr import algebra, problem_rows, problems
from ppo_rlhf.tldr import models
from ppo_rlhf.train_policy import AdaptiveKLArgs, Arguments, InputError, split_evenly

# ---- Arguments -------------------------------------------------------------------------------------------------

ZeroToOne = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class RewardsArgs(Arguments):
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
    steps: str = ""
    """what rewards each step, or line, of a response at its end: a sequence classifier, which reads the problem and
    all up to there, or package.module:name of a function (problem, steps so far) -> float; empty: nothing"""
    trained_weight: float = 1.0
    """weight of the reward model's score in the score, and of the steps' rewards"""
    value_model: str = ""
    """folder of the model that the critic starts from; empty: the reward model, or the base model with a new head"""
    kl_coef: NonNegativeFloat = 0.001
    """weight of the KL penalty in the reward at the start, reward per nat"""
    kl_estimator: Literal["k1", "abs", "k2", "k3", "full"] = "k1"
    """estimate of the KL in the reward: k1 = log(policy/reference), abs, k2, k3: see kl_estimate; full: exact. Of the
    estimates, only k1 has the gradient of the KL there"""
    kl_loss_coef: NonNegativeFloat = 0.0
    """weight of the KL penalty in the loss, per nat"""
    kl_loss_estimator: Literal["k2", "k3", "abs", "k1+", "k2+", "k3+", "full"] = "k3"
    """estimate of the KL in the loss, where its slope acts and not its value"""
    adaptive_kl: AdaptiveKLArgs = field(default_factory=AdaptiveKLArgs)
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
    def has_functions(self) -> bool:
        """Whether functions of the user's judge texts: they may ask for a problem's columns, and reward tokens."""
        return ":" in self.verifier + self.format

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
class PpoArgs(Arguments):
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
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
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
    trust_region: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """with ipo and dppo, a token has no loss once its probability is further than this from the old one"""
    cliprange_value: PositiveFloat | None = 0.5
    """new values are clipped to old values +- this, in units of reward; None: not clipped"""
    entropy_coef: NonNegativeFloat = 0.0
    """weight of the entropy bonus, per nat"""
    nll_coef: NonNegativeFloat = 0.0
    """weight of the mean of -log p over the tokens of correct responses, per nat"""
    filter_groups: bool = False
    """leave out groups whose responses all have the same score, and generate until the batch is full (DAPO)"""
    local_micro_batch_size: PositiveInt = 8
    """episodes per forward and backward pass on one process, at most; changes memory and speed, not numbers"""
    local_rollout_batch_size: PositiveInt = 256
    """responses that one process samples at a time, at most; changes memory and speed, not numbers"""
    share_prefixes: bool = True
    """read what several rows begin with, such as a prompt, once, where it pays; changes memory and speed alone"""

    @property
    def why_not_tokens(self) -> str:
        """Why tokens of a response cannot get rewards of their own; empty: they can."""
        if self.advantage in algebra.OF_TOKENS:
            return ""
        return f"--ppo.advantage {self.advantage} compares whole responses; take gae"

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened over the batch."""
        return self.advantage in algebra.WHITENED if self.whiten_advantages is None else self.whiten_advantages


@dataclass(frozen=True, kw_only=True)
class Args(Arguments):
    preset: str = "gsm8k"
    """names a set of defaults: gsm8k, gsm8k-grpo, dr-grpo, rloo, sums, sums-grpo, arithmetic"""
    exp_name: Annotated[str, Field(pattern=r"^[\w.+ -]{1,150}$")] = "rlvr_policy"
    """name of this experiment"""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    """seed of the sampling noise, the order of the problems and the minibatches"""
    base_model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    """causal language model to start from: a folder, a name on the hub, `sums` or `smollm2-135m`"""
    trust_remote_code: bool = False
    """run Python code that comes with the base model"""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """arithmetic; bfloat16 keeps float32 weights and casts in matrix products"""
    frozen_bfloat16: bool = False
    """reference and reward model in bfloat16: half their memory, and KL and scores that are rounded"""
    gradient_checkpointing: bool = False
    """keep only the inputs of each layer and compute the rest again in the backward pass; saves memory, costs a
    forward pass"""
    eval_interval: NonNegativeInt = 10
    """updates between evaluations on the held-out problems, the first one before the first update; 0: only at the
    end"""
    eval_problems: NonNegativeInt = 0
    """how many held-out problems an evaluation has, the first ones; 0: all"""
    eval_samples: NonNegativeInt = 0
    """sampled responses to each of them before the first update and after the last, in addition to the greedy one"""
    task: problems.TaskArgs = field(default_factory=problems.TaskArgs)
    """problems, prompts and responses"""
    rewards: RewardsArgs = field(default_factory=RewardsArgs)
    """scores and KL penalty"""
    ppo: PpoArgs = field(default_factory=PpoArgs)
    """the optimisation"""
    lora: models.LoraArgs = field(default_factory=models.LoraArgs)
    """low-rank adapters"""
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
    tools = None  # no argument here; in rlvr/tools.py

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
LONG_TASK = dataclasses.replace(problems.TASKS["gsm8k"], response_length=1_024)
# [V99] Arguments of verl's logged run, of its recipes and of TRL 1.16; docs/reference says what differs.
PRESETS = {
    "gsm8k": Args(dtype="bfloat16", ppo=PpoArgs(entropy_coef=0.001)),
    "gsm8k-grpo": Args(
        dtype="bfloat16",
        eval_interval=5,
        task=LONG_TASK,
        rewards=RewardsArgs(kl_coef=0.0, kl_loss_coef=0.001),
        ppo=PpoArgs(batch_size=1_280, samples_per_prompt=5, nminibatches=2, advantage="grpo", dual_clip=3.0),
    ),
    "dr-grpo": Args(
        dtype="bfloat16",
        eval_interval=5,
        task=LONG_TASK,
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
    steps_per_update: int  # of the optimiser
    batch: int
    problems: int  # of a batch; each is a group
    local_batch: int
    local_minibatch: int


def ppo_sizes(args: Args, num_processes: int) -> PpoSizes:
    """Check the arguments, and divide the global sizes exactly, or raise an InputError that says what would do."""
    ppo, n = args.ppo, args.ppo.samples_per_prompt
    check_arguments(args)
    split_evenly("--ppo.batch_size", ppo.batch_size, n * num_processes, "samples_per_prompt x processes")
    minibatches = ppo.nminibatches * num_processes
    return PpoSizes(
        updates=ppo.total_episodes // ppo.batch_size,
        steps_per_update=ppo.noptepochs * ppo.nminibatches,
        batch=ppo.batch_size,
        problems=ppo.batch_size // n,
        local_batch=ppo.batch_size // num_processes,
        local_minibatch=split_evenly("--ppo.batch_size", ppo.batch_size, minibatches, "nminibatches x processes"),
    )


def check_arguments(args: Args) -> None:
    """Raise an InputError where a run would do something else than its arguments say, and not say so."""
    task, ppo, shaping = args.task, args.ppo, args.rewards
    n, advantage = ppo.samples_per_prompt, f"--ppo.advantage {ppo.advantage}"
    by_scorer = "reasoning_gym" in (shaping.verifier, shaping.format)
    for name, source in (("problems", task.problems), ("test_problems", task.test_problems)):
        refuse(
            by_scorer and problem_rows.evaluates_text(source) and not shaping.evaluate_text,
            f"--task.{name} {source}: its scorer evaluates what the policy writes as Python, with your rights, "
            f"though only arithmetic, in a process with limits and, where the system offers it, no network; if you "
            f"accept the risk that is left, add --rewards.evaluate_text",
        )
    refuse(ppo.total_episodes < ppo.batch_size, "--ppo.total_episodes is less than an update of --ppo.batch_size")
    # [V35] verl would train on raw rewards.   core_algos.py#L309-L311
    refuse(n < 2 and ppo.advantage in algebra.IN_GROUPS, f"{advantage} needs --ppo.samples_per_prompt 2 or more")
    # [V78] Scores that contain a reward model's score are never equal.
    refuse(n < 2 and ppo.filter_groups, "--ppo.filter_groups needs --ppo.samples_per_prompt 2 or more")
    refuse(
        ppo.filter_groups and shaping.trained_model, "with --rewards.trained_model, --ppo.filter_groups never acts"
    )
    # [V112] Nothing but the sources enters these advantages. Where there is only one, GDPO's code does plain GRPO.
    if ppo.advantage == "gdpo":
        penalties = shaping.kl_coef or shaping.overlong_buffer or shaping.missing_stop != "none"
        one = not (shaping.format or shaping.trained_model)
        refuse(one, f"{advantage} scales each source alone; add --rewards.format or --rewards.trained_model")
        refuse(penalties, f"{advantage} has no --rewards.kl_coef (kl_loss_coef acts), overlong_buffer, missing_stop")
        refuse(
            ppo.filter_groups, f"{advantage} may learn from groups with equal sums, which --ppo.filter_groups drops"
        )
    # [V117] A teacher judges each token, and other estimators compare what whole responses got.
    if shaping.teacher:
        of_tokens = ppo.advantage in algebra.OF_TOKENS
        refuse(
            not of_tokens, f"{advantage} compares responses, but --rewards.teacher judges tokens; take reinforce++"
        )
        odd = shaping.kl_estimator not in ("k1", "full")
        refuse(odd, f"--rewards.teacher: with --rewards.kl_estimator {shaping.kl_estimator}, its gradient is no KL's")
    refuse(shaping.steps and ppo.why_not_tokens, f"--rewards.steps judges single steps, but {ppo.why_not_tokens}")
    refuse(shaping.steps and args.tools, "--rewards.steps: lines with a tool's answer are no steps of the policy")
    # [V51] The exact KL in reward and loss, with equal coefficients and advantages that nothing rescales, has the
    #       gradient of the KL of whole responses. In the reward alone, its gradient points away from the reference.
    has_target, horizon = shaping.adaptive_kl.target is not None, shaping.adaptive_kl.horizon
    if shaping.reward_kl and shaping.kl_estimator == "full":
        in_loss = (shaping.kl_loss_coef, shaping.kl_loss_estimator) == (shaping.kl_coef, "full") and not has_target
        refuse(
            not (shaping.teacher or in_loss),
            "--rewards.kl_estimator full needs --rewards.kl_loss_estimator full, with the same coefficient and no "
            "--rewards.adaptive_kl.target: in the reward alone its gradient points away from the reference",
        )
        refuse(
            ppo.whitens or ppo.advantage == "grpo",
            "--rewards.kl_estimator full needs advantages that nothing rescales, since the loss has the rest of its "
            "gradient: --ppo.whiten_advantages False, and --ppo.advantage rloo, not grpo",
        )
    # [V56] A coefficient that cannot have an effect is an error.   verl/utils/config.py#L181
    refuse(has_target and not shaping.kl_coef, "--rewards.adaptive_kl.target moves --rewards.kl_coef, which is 0")
    # In an update, the controller multiplies the coefficient by at least 1 - 0.2 * batch_size / horizon.
    too_quick = has_target and ppo.batch_size >= 5 * horizon
    refuse(
        too_quick, f"--rewards.adaptive_kl.horizon {horizon}: at least {ppo.batch_size // 5 + 1} for this batch_size"
    )
    warms_up = ppo.critic_warmup and ppo.advantage != "gae"
    refuse(warms_up, f"--ppo.critic_warmup {ppo.critic_warmup}: {advantage} has no critic; give 0")
    no_dual_clip = ppo.dual_clip and (ppo.loss != "ppo" or ppo.dual_clip <= 1 + ppo.cliprange_high)
    refuse(no_dual_clip, "--ppo.dual_clip is for --ppo.loss ppo, and above 1 + --ppo.cliprange_high")
    other = ppo.loss == "gspo" and ppo.loss_aggregation != "seq-mean-token-mean"
    refuse(other, "--ppo.loss gspo goes with --ppo.loss_aggregation seq-mean-token-mean alone")
    longer = shaping.overlong_buffer > task.response_length
    refuse(longer, f"--rewards.overlong_buffer must be at most --task.response_length {task.response_length}")


def refuse(wrong: object, message: str) -> None:
    if wrong:
        raise InputError(message)


def check_problems(problem_set: problems.Problems, sizes: PpoSizes) -> None:
    """Raise an InputError if there are fewer problems than a round of generation draws."""
    refuse(
        len(problem_set) < sizes.problems,
        f"--task.problems has {len(problem_set)} problems, fewer than the {sizes.problems} that are drawn at a time "
        f"(--ppo.batch_size / --ppo.samples_per_prompt)",
    )
