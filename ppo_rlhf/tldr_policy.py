"""PPO against a reward model: chapter 2, TL;DR summarisation, stage 3 of 3.

The fine-tuned model of `tldr_sft.py` (the policy) summarises posts, the reward model of `tldr_reward.py` scores the
summaries, and PPO raises the score, less a penalty on the KL divergence from where the policy started (the
reference). Three things differ from chapter 1: summaries end with the end-of-text token, and what comes after it
counts nowhere; a summary without one is punished (the end-of-text trick); the critic is a network of its own that
starts as a copy of the reward model. Each update does eight things, at times after one more, and `train()` below
reads so:

    0. every `eval_interval` updates, summarise held-out posts
    1. sample posts
    2. generate summaries, and cut them after the end-of-text token
    3. log-probs and values; log-probs of the reference
    4. score; punish summaries that do not end
    5. per-token rewards: KL penalty on every token, score after the last
    6. advantages and returns (GAE)
    7. PPO epochs over minibatches
    8. adapt the KL coefficient and log

Steps 6 and 7 stand in `tldr_ppo_update`. Start with `train()` at the bottom, then read from the top. Marks like [T45]
name an implementation detail. The original is vwxyzjn/summarize_from_feedback_details at commit ee77a9a, which
reproduced OpenAI's; its file and line stand beside the mark. Marks like [D54] are details that chapter 1 has
too. [X20] and the like are places where we differ on purpose; see DETAILS.md.

    python ppo_rlhf/tldr_all.py --preset tales                  # no network: all three stages, in minutes
    python ppo_rlhf/tldr_policy.py --base_model models/<run>/sft --rewards.trained_model models/<run>/reward
    accelerate launch --num_processes 8 ppo_rlhf/tldr_policy.py --dtype bfloat16 --ppo.local_micro_batch_size 16 ...
    python ppo_rlhf/tldr_policy.py --resume runs/<run>          # go on after an interruption
"""

import dataclasses
import hashlib
import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StaticCache,
)

from ppo_rlhf.data import (
    Scorer,
    check_model,
    check_size,
    check_vocabulary,
    find_paths,
    load_pretrained,
    load_tokenizer,
    read_info,
    text_scorer,
    vocabulary_size,
    weight_files,
)
from ppo_rlhf.run import (
    InputError,
    NumericalError,
    Run,
    above_zero,
    anew_with_lower,
    at_least,
    check_equal,
    check_finite,
    check_values,
    flag,
    gathered,
    make_accelerator,
    map_rows,
    mean_over_processes,
    parse_args,
    restore_training_state,
    rows_at_a_time,
    run_script,
    seconds_since,
    shard,
    split_evenly,
    training_state,
    typed,
    upload_model,
    whole,
    whole_state,
    write_json,
)
from ppo_rlhf.tldr_data import (
    TASKS,
    Posts,
    TldrIds,
    TldrTaskArgs,
    evaluation_rows,
    read_posts,
    rouge,
    sample_table,
    tldr_ids,
    trim_padding,
)

# ----------------------------------------------------------------------------------------------------------------
# Arguments
# ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KLControllerArgs:
    target: float | None = None
    """KL divergence from the reference to hold, in nats per summary; None keeps `kl_coef` fixed"""
    horizon: int = 10_000
    """how slowly the coefficient follows, in episodes"""


@dataclass(frozen=True)
class TldrRewardsArgs:
    trained_model: str = ""
    """folder of the reward model that tldr_reward.py saved: models/<run>/reward"""
    function: str = ""
    """package.module:name of a function (queries, responses: texts) -> list of floats, in place of a reward model;
    with a third parameter it also gets the reference answers, here the summaries of the data"""
    monitor: str = ""
    """package.module:name of such a function that is only logged, as objective/<name>"""
    value_model: str = ""
    """folder of the model that the critic starts from; empty: the reward model, or the base model with a new head"""
    kl_coef: float = 0.05
    """weight of the KL penalty at the start, reward per nat"""
    kl_estimator: Literal["k1", "k3"] = "k1"
    """of a token's divergence, with x = log p(reference) - log p(policy): k1 is -x, k3 is exp(x) - 1 - x"""
    adaptive_kl: KLControllerArgs = field(default_factory=KLControllerArgs)
    """controller of the KL coefficient"""
    missing_eos: Literal["replace", "subtract", "none"] = "replace"
    """of a summary that does not end: replace, its score becomes minus the penalty; subtract, it is lowered by it"""
    missing_eos_penalty: float = 1.0
    """the penalty for that"""


@dataclass(frozen=True)
class TldrPpoArgs:
    total_episodes: int = 1_000_000
    """summaries to train on, over all updates; rounded down to whole updates"""
    batch_size: int = 512
    """episodes (post and summary) per update, over all processes"""
    nminibatches: int = 1
    """optimiser steps per pass over the batch"""
    noptepochs: int = 4
    """passes over the batch per update"""
    lr: float = 3e-6
    """learning rate of the first update"""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """how the learning rate falls to zero"""
    adam_eps: float = 1e-5
    """epsilon of AdamW"""
    weight_decay: float = 0.01
    """weight decay of AdamW"""
    vf_coef: float = 0.1
    """weight of the value loss"""
    cliprange: float = 0.2
    """the probability ratio is clipped to 1 +- this"""
    cliprange_value: float = 0.2
    """new values are clipped to old values +- this"""
    gamma: float = 1.0
    """discount per token"""
    lam: float = 0.95
    """lambda of generalised advantage estimation"""
    whiten_rewards: bool = False
    """scale the rewards of each minibatch to variance 1 (advantages always are)"""
    local_micro_batch_size: int = 0
    """episodes per forward and backward pass on one process; a memory knob; 0: the whole minibatch"""
    local_rollout_batch_size: int = 0
    """episodes per pass of generation and scoring on one process; a memory knob; 0: the whole local batch"""


@dataclass(frozen=True)
class LoraArgs:
    rank: int = 0
    """rank of the policy's low-rank adapters; 0: train all weights. The critic always trains all of its own"""
    alpha: float = 16.0
    """the adapters' output is scaled by alpha / rank"""
    target_modules: str = ""
    """layers that get adapters, names separated by commas, or all-linear; empty: peft's choice for the model"""


@dataclass(frozen=True)
class Args:
    preset: str = "tldr"
    """names a set of defaults: tldr, tales"""
    exp_name: str = "tldr_policy"
    """name of this experiment"""
    seed: int = 44413
    """seed of the sampling noise, the order of the posts and the minibatches"""
    base_model: str = ""
    """model to start from: the folder of a fine-tuned model, models/<run>/sft, or a name on the hub"""
    trust_remote_code: bool = False
    """run Python code that comes with the base model"""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """arithmetic; bfloat16 keeps float32 weights and casts in matrix products; the paper's choice"""
    resume: str = ""
    """folder of a run to go on with: runs/<run>; its arguments are taken from there"""
    log_interval: int = 10
    """updates between printed samples; 0: none"""
    save_interval: int = 50
    """updates between checkpoints; 0: one at the end"""
    eval_interval: int = 20
    """updates between evaluations on held-out posts, from update 0 on; 0: only at the end"""
    eval_prompts: int = 64
    """held-out posts of such an evaluation"""
    eval_posts: int = 0
    """held-out posts to summarise after training; 0: all"""
    track: bool = False
    """log to Weights & Biases"""
    wandb_project_name: str = "ppo_rlhf"
    """project on Weights & Biases"""
    wandb_entity: str | None = None
    """team on Weights & Biases"""
    upload_model: bool = False
    """push the trained policy and the critic to the Hugging Face hub"""
    hf_entity: str = ""
    """user or organisation on the hub; empty: whoever is logged in"""
    task: TldrTaskArgs = field(default_factory=TldrTaskArgs)
    """queries and responses"""
    rewards: TldrRewardsArgs = field(default_factory=TldrRewardsArgs)
    """score and KL penalty"""
    ppo: TldrPpoArgs = field(default_factory=TldrPpoArgs)
    """the optimisation"""
    lora: LoraArgs = field(default_factory=LoraArgs)
    """low-rank adapters"""


PRESETS = {
    "tldr": Args(task=TASKS["tldr"]),
    "tales": Args(
        preset="tales",
        seed=1,
        eval_interval=12,
        eval_posts=512,
        task=TASKS["tales"],
        rewards=TldrRewardsArgs(monitor="ppo_rlhf.tldr_tales:gold_scores", kl_coef=0.6),
        ppo=TldrPpoArgs(total_episodes=3_840, batch_size=64, nminibatches=8, lr=1e-4),
    ),
}

# ----------------------------------------------------------------------------------------------------------------
# Batch sizes
# ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TldrPpoSizes:
    """What follows from the arguments and the number of processes, in episodes unless the name says otherwise.

    A batch is shared among processes: the local batch. A minibatch, one optimiser step, is 1 / nminibatches of the
    batch, and the local minibatch one process's part of it. A micro-batch is one forward pass.
    """

    updates: int
    batch: int
    local_batch: int
    local_rollout_batch: int
    local_minibatch: int
    local_micro_batch: int


def check_horizon(horizon: int, episodes: int) -> None:
    """Refuse a horizon with which 1 - 0.2 * episodes / horizon, the least factor of an update, is not above 0."""
    if episodes >= 5 * horizon:
        raise InputError(
            f"{flag('rewards.adaptive_kl.horizon')} {horizon}: an update of {flag('ppo.batch_size')} {episodes} "
            f"episodes could take the KL coefficient to 0 or below; {flag('rewards.adaptive_kl.horizon')} "
            f"{episodes // 5 + 1} would do"
        )


def check_tldr_arguments(args: Args) -> None:
    """Refuse numbers that cannot be meant."""
    check_values(args)
    at_least(0, "", args, "log_interval", "save_interval", "eval_interval", "eval_posts")
    at_least(1, "", args, "eval_prompts")
    at_least(0, "rewards.", args.rewards, "kl_coef", "missing_eos_penalty")
    at_least(0, "ppo.", args.ppo, "vf_coef", "gamma", "lam", "weight_decay")
    at_least(0, "lora.", args.lora, "rank")
    above_zero("ppo.", args.ppo, "lr", "cliprange", "cliprange_value", "adam_eps")
    above_zero("lora.", args.lora, "alpha")
    if args.rewards.adaptive_kl.target is not None:
        above_zero("rewards.adaptive_kl.", args.rewards.adaptive_kl, "target", "horizon")
        check_horizon(args.rewards.adaptive_kl.horizon, args.ppo.batch_size)
    if not args.base_model:
        raise InputError(f"{flag('base_model')} is empty; give the folder of a fine-tuned model, models/<run>/sft")


def tldr_ppo_sizes(ppo: TldrPpoArgs, num_processes: int) -> TldrPpoSizes:
    """Divide the global sizes exactly, or say which size does not divide and what would."""
    at_least(1, "ppo.", ppo, "batch_size", "nminibatches", "noptepochs")
    at_least(0, "ppo.", ppo, "local_micro_batch_size", "local_rollout_batch_size")
    at_least(ppo.batch_size, "ppo.", ppo, "total_episodes")
    slices = num_processes * ppo.nminibatches
    local_minibatch = split_evenly(
        "ppo.batch_size", ppo.batch_size, slices, f"processes x {typed('ppo.nminibatches')}"
    )
    local_batch = ppo.batch_size // num_processes
    return TldrPpoSizes(
        updates=ppo.total_episodes // ppo.batch_size,
        batch=ppo.batch_size,
        local_batch=local_batch,
        local_rollout_batch=rows_at_a_time("ppo.local_rollout_batch_size", ppo.local_rollout_batch_size, local_batch),
        local_minibatch=local_minibatch,
        local_micro_batch=rows_at_a_time("ppo.local_micro_batch_size", ppo.local_micro_batch_size, local_minibatch),
    )


# ----------------------------------------------------------------------------------------------------------------
# Models
# ----------------------------------------------------------------------------------------------------------------


def causal_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What attention adds to its scores: 0 where a position may look, the lowest number where it may not.

    mask: (batch, sequence_length), True for real tokens. Returns (batch, 1, sequence_length, sequence_length).
    """
    # [D15] A position sees the real tokens before it and itself, so that padding also sees something.
    #       openai/lm-human-preferences lm_human_preferences/language/model.py#L101-L159 @cbfd210
    itself = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
    visible = (mask.unsqueeze(1) | itself).tril().unsqueeze(1)
    return torch.zeros(visible.shape, dtype=dtype, device=mask.device).masked_fill(~visible, torch.finfo(dtype).min)


def read_tokens(lm_backbone: PreTrainedModel, tokens: torch.Tensor, pad_id: int, columns: slice) -> torch.Tensor:
    """Final hidden states of the language model at some columns, with padding anywhere in the tokens.

    tokens: (batch, sequence_length). Returns (batch, selected columns, width), after the last layer norm.
    """
    # [D13] Padding is never embedded: token 0 is looked up in its place, and no real token attends to it.
    #       openai/lm-human-preferences lm_human_preferences/language/model.py#L294-L300 @cbfd210
    mask = tokens != pad_id  # (batch, sequence_length)
    input_ids = tokens.masked_fill(~mask, 0)
    # [D14] The position of a token is the number of real tokens before it: [x, pad, pad, a, b] gives [0, 1, 1, 1, 2].
    #       openai/lm-human-preferences lm_human_preferences/language/model.py#L265-L269 @cbfd210
    position_ids = mask.cumsum(1) - mask.long()
    attention_mask = causal_mask(mask, lm_backbone.dtype)  # (batch, 1, sequence_length, sequence_length)
    hidden_states = lm_backbone.base_model(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
    ).last_hidden_state  # (batch, sequence_length, width)
    # [D16] A padding position shows what the nearest real token to its left shows: [0, 0, 0, 3, 4] in the example.
    #       openai/lm-human-preferences lm_human_preferences/language/model.py#L333-L341 @cbfd210
    real_columns = torch.where(mask, torch.arange(tokens.shape[1], device=tokens.device), 0)
    last_real = real_columns.cummax(1).values[:, columns]  # (batch, selected columns)
    return hidden_states.gather(1, last_real.unsqueeze(2).expand(-1, -1, hidden_states.shape[2]))


def scaled_logits(
    lm_backbone: PreTrainedModel, hidden_states: torch.Tensor, vocab_size: int, temperature: float
) -> torch.Tensor:
    """Logits over the tokenizer's ids, divided by the temperature, in float32 or better: (..., vocab_size)."""
    # [D12] Ids above the tokenizer's largest, padding among them, can neither be sampled nor scored.
    #       openai/lm-human-preferences lm_human_preferences/policy.py#L58-L59 @cbfd210
    logits = lm_backbone.get_output_embeddings()(hidden_states)[..., :vocab_size]
    # [D23] The temperature is part of the policy: log-probs and entropies are those of the scaled logits.
    #       openai/lm-human-preferences lm_human_preferences/language/sample.py#L24-L30 @cbfd210
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature


def response_logprobs(
    lm_backbone: PreTrainedModel,
    query_responses: torch.Tensor,
    pad_id: int,
    context_length: int,
    temperature: float,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a language model says of responses that it reads.

    query_responses: (batch, context_length + response_length). Returns log-probs and entropies (nats, without
    gradient), each (batch, response_length), and the hidden states (batch, response_length, width).
    """
    # [D47] What the model says at position i is about token i + 1: hence the shift by one.
    #       openai/lm-human-preferences lm_human_preferences/policy.py#L114-L126 @cbfd210
    hidden_states = read_tokens(lm_backbone, query_responses, pad_id, slice(context_length - 1, -1))
    responses = query_responses[:, context_length:]
    responses = responses.masked_fill(responses == pad_id, 0)  # (batch, response_length)
    all_logprobs = F.log_softmax(scaled_logits(lm_backbone, hidden_states, vocab_size, temperature), dim=2)
    logprobs = all_logprobs.gather(2, responses.long().unsqueeze(2)).squeeze(2)  # (batch, response_length)
    with torch.no_grad():
        entropies = -(all_logprobs.exp() * all_logprobs).sum(2)  # (batch, response_length)
    return logprobs, entropies, hidden_states


def read_scalar(head: nn.Linear, hidden_states: torch.Tensor) -> torch.Tensor:
    """The head's number for each hidden state: (..., width) gives (...). In full precision even in bfloat16 runs."""
    with torch.autocast(hidden_states.device.type, enabled=False):
        return head(hidden_states.to(head.weight.dtype)).squeeze(-1)


class RewardModel(nn.Module):
    """A language model with a scalar head, read at the last real token: score = gain * head + bias."""

    def __init__(self, lm_backbone: PreTrainedModel):
        super().__init__()
        self.lm_backbone = lm_backbone
        width = lm_backbone.config.hidden_size
        # [D29] A small random head: about 1 / sqrt(width) in every weight.
        #       openai/lm-human-preferences lm_human_preferences/language/model.py#L248-L258 @cbfd210
        self.reward_head = nn.Linear(width, 1)
        nn.init.normal_(self.reward_head.weight, std=1 / math.sqrt(width + 1))
        nn.init.zeros_(self.reward_head.bias)
        # [D31] [D32] Gain and bias are trainable parameters. Chapter 2 fixes them.
        #       openai/lm-human-preferences lm_human_preferences/rewards.py#L48-L71 @cbfd210
        self.gain = nn.Parameter(torch.ones(()))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, query_responses: torch.Tensor, pad_id: int) -> torch.Tensor:
        """Scores (batch,) of query_responses (batch, sequence_length); trailing padding does not count."""
        # [D30] The score is read at the last column, which shows the last real token.
        #       openai/lm-human-preferences lm_human_preferences/rewards.py#L47 @cbfd210
        hidden_states = read_tokens(self.lm_backbone, query_responses, pad_id, slice(-1, None))  # (batch, 1, width)
        return self.gain * read_scalar(self.reward_head, hidden_states[:, 0]) + self.bias


class ActorCritic(nn.Module):
    """The policy and the critic, two networks that share nothing.

    The critic is a reward model that is read before every token of the response, instead of at its end.
    """

    # [T32] vwxyzjn/summarize_from_feedback_details ppo.py#L471-L500 @ee77a9a
    def __init__(self, lm_backbone: PreTrainedModel, critic: RewardModel, vocab_size: int):
        """vocab_size: number of ids that can be sampled; the output layer may have more rows [T14]."""
        super().__init__()
        self.lm_backbone = lm_backbone
        self.critic = critic
        self.vocab_size = vocab_size

    def forward(
        self, query_responses: torch.Tensor, pad_id: int, context_length: int, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probs of the response tokens, entropies (nats) and values at each of their positions.

        query_responses: (batch, context_length + response_length). Returns three of (batch, response_length); what
        they hold at padding means nothing.
        """
        logprobs, entropies, _ = response_logprobs(
            self.lm_backbone, query_responses, pad_id, context_length, temperature, self.vocab_size
        )
        # [T38] A value belongs to the position before the response token, as its log-prob does.
        #       vwxyzjn/summarize_from_feedback_details ppo.py#L637-L640 @ee77a9a
        columns = slice(context_length - 1, -1)
        hidden_states = read_tokens(self.critic.lm_backbone, query_responses, pad_id, columns)
        values = self.critic.gain * read_scalar(self.critic.reward_head, hidden_states) + self.critic.bias
        return logprobs, entropies, values  # three of (batch, response_length)


# ----------------------------------------------------------------------------------------------------------------
# Optimiser
# ----------------------------------------------------------------------------------------------------------------


def scheduled_lr(lr: float, schedule: str, step: int, steps: int) -> float:
    """The learning rate of a step (0-based) out of so many, without warm-up; it would be 0 after the last.

    cosine: lr * (1 + cos(pi * step / steps)) / 2        linear: lr * (1 - step / steps)
    """
    if schedule == "cosine":
        return lr * (1 + math.cos(math.pi * step / steps)) / 2
    return lr * (1 - step / steps) if schedule == "linear" else lr


def average_gradients(model: nn.Module, accelerator: Accelerator) -> None:
    """Replace the gradients by their mean over all processes. No other wrapper of the model is needed for that."""
    # [D73] openai/lm-human-preferences lm_human_preferences/utils/core.py#L468-L488 @cbfd210
    if accelerator.num_processes > 1:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        mean = accelerator.reduce(nn.utils.parameters_to_vector(gradients), "mean")
        nn.utils.vector_to_parameters(mean, gradients)


def gradient_norm(model: nn.Module) -> torch.Tensor:
    """Euclidean norm of all gradients together, 0-d. It is only looked at: nothing is clipped."""
    return nn.utils.get_total_norm([parameter.grad for parameter in model.parameters() if parameter.grad is not None])


# ----------------------------------------------------------------------------------------------------------------
# Tokens: pad, generate, truncate
# ----------------------------------------------------------------------------------------------------------------


def left_pad(tokens: torch.Tensor, pad_id: int) -> torch.Tensor:
    """Move the padding of each row to its left; the order of the other tokens stays.

    tokens: (batch, length). [[5, P, 6, P]] gives [[P, P, 5, 6]].
    """
    # [D08] A stable sort by "is a real token".
    return tokens.gather(1, (tokens != pad_id).int().argsort(dim=1, stable=True))


def keyed_generator(*key: int | str) -> torch.Generator:
    """A CPU random generator that depends on the key alone, so that noise belongs to an episode, not a process."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


class KeyValueCache(StaticCache):
    """Keys and values, both in the precision of the values."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add those of new tokens; return those of all tokens."""
        # Under autocast, rotary positions make keys float32, and attention casts them back. A cache holds one dtype.
        return super().update(key_states.to(value_states.dtype), value_states, *args, **kwargs)


@torch.no_grad()
def generate(
    lm_backbone: PreTrainedModel,
    contexts: torch.Tensor,
    uniforms: torch.Tensor,
    pad_id: int,
    vocab_size: int,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sample responses with a key-value cache.

    contexts: (batch, context_length) token ids, padding anywhere; uniforms: (batch, response_length) random numbers
    in [0, 1), one for each token. Returns responses and their log-probs (batch, response_length), and the hidden
    state before each token (batch, response_length, width).
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
    # [D22] Always response_length tokens; nothing stops a response early.
    # [D24] No top-k, no top-p.
    #       openai/lm-human-preferences lm_human_preferences/language/sample.py#L24-L84 @cbfd210
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
        cdf = all_logprobs.double().exp().cumsum(1)  # (batch, vocab_size)
        thresholds = uniforms[:, column : column + 1].double() * cdf[:, -1:]
        tokens = torch.searchsorted(cdf, thresholds, right=True).clamp(max=vocab_size - 1)  # (batch, 1)
        # [D25] Log-probs are recorded as the tokens are sampled.
        #       openai/lm-human-preferences lm_human_preferences/policy.py#L108-L112 @cbfd210
        responses.append(tokens)
        logprobs.append(all_logprobs.gather(1, tokens))
        hidden_states.append(hidden)
        position_ids = position_ids[:, -1:] + 1
    return torch.cat(responses, 1).to(contexts.dtype), torch.cat(logprobs, 1), torch.stack(hidden_states, 1)


def truncate_at(responses: torch.Tensor, stop_id: int | None, after: int, pad_id: int) -> torch.Tensor:
    """Replace everything after the first stop token at index >= after by padding; the stop token itself stays.

    responses: (batch, response_length). stop_id None: unchanged.
    """
    # [D48] openai/lm-human-preferences lm_human_preferences/lm_tasks.py#L39-L52 @cbfd210
    if stop_id is None:
        return responses
    stops = (responses == stop_id) & (torch.arange(responses.shape[1], device=responses.device) >= after)
    stops_before = stops.cumsum(1) - stops.long()  # (batch, response_length)
    return responses.masked_fill(stops_before > 0, pad_id)


def has_stop(responses: torch.Tensor, stop_id: int | None, after: int) -> torch.Tensor:
    """Whether each response has a stop token at index >= after: (batch,) bool. stop_id None: all True."""
    # [D50] openai/lm-human-preferences lm_human_preferences/lm_tasks.py#L58-L65 @cbfd210
    if stop_id is None:
        return torch.ones(responses.shape[0], dtype=torch.bool, device=responses.device)
    return (responses[:, after:] == stop_id).any(1)


def response_masks(truncated_responses: torch.Tensor, pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens of a response count, and which values: two of (batch, response_length) bool.

    The tokens up to the one that ends the response, and one value more: that of the state after it. With padding P,
    [[7, 8, E, P, P]] gives [[1, 1, 1, 0, 0]] and [[1, 1, 1, 1, 0]].
    """
    # [T40] [T41] vwxyzjn/summarize_from_feedback_details ppo.py#L636, ppo.py#L670-L677 @ee77a9a
    lengths = (truncated_responses != pad_id).sum(1, keepdim=True)  # (batch, 1)
    index = torch.arange(truncated_responses.shape[1], device=truncated_responses.device)
    return index < lengths, index < lengths + 1


# ----------------------------------------------------------------------------------------------------------------
# Mathematics: KL controller, masked means, rewards, advantages, losses
# ----------------------------------------------------------------------------------------------------------------

# A mask is True where an entry counts. What stands elsewhere, be it NaN, reaches neither a result nor a gradient.


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
        # [D69] openai/lm-human-preferences lm_human_preferences/train_policy.py#L115-L124 @cbfd210
        # [D72] Without a target, fixed.
        #       openai/lm-human-preferences lm_human_preferences/train_policy.py#L107-L112 @cbfd210
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.value *= 1 + error * episodes / self.horizon


def masked_mean(values: torch.Tensor, mask: torch.Tensor, count: torch.Tensor | None = None) -> torch.Tensor:
    """Sum of the entries that count, over their number, or over another count: 0-d. values, mask: of one shape."""
    return values.masked_fill(~mask, 0).sum() / (mask.sum() if count is None else count)


def masked_whiten(
    values: torch.Tensor, mask: torch.Tensor, *, keep_mean: bool, reduce: Callable = lambda total: total
) -> torch.Tensor:
    """Shift and scale what counts to mean 0 and variance 1; keep_mean adds the mean back. 0 where nothing counts.

    values, mask: (batch, response_length). Chapter 1's `whiten` with a mask.
    The variance is biased [T52], and 1e-8 is added to it. reduce: sums a tensor over all processes.
    """
    # [T44] vwxyzjn/summarize_from_feedback_details ppo.py#L235-L241, ppo.py#L687-L704 @ee77a9a
    count = reduce(mask.sum())
    mean = reduce(values.masked_fill(~mask, 0).sum()) / count
    variance = reduce(((values - mean) ** 2).masked_fill(~mask, 0).sum()) / count
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    return (whitened + mean if keep_mean else whitened).masked_fill(~mask, 0)


def punish_missing_eos(
    scores: torch.Tensor, finished: torch.Tensor, form: Literal["replace", "subtract", "none"], penalty: float
) -> torch.Tensor:
    """Scores (batch,) after the end-of-text trick: those of responses that are not finished (batch,) are lower."""
    # [T39] vwxyzjn/summarize_from_feedback_details ppo.py#L662-L667 @ee77a9a
    #       subtract: huggingface/trl trl/experimental/ppo/ppo_trainer.py @f2cd577
    punished = {"replace": torch.full_like(scores, -penalty), "subtract": scores - penalty, "none": scores}
    return torch.where(finished, scores, punished[form])


K3_WARNING = (
    "as a reward, its gradient vanishes near the reference and can point away from it further out; that of k1 is the "
    "gradient of the KL divergence"
)


def masked_rewards(
    scores: torch.Tensor,
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    mask: torch.Tensor,
    kl_coef: float,
    kl_estimator: Literal["k1", "k3"] = "k1",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per-token rewards: -kl_coef * kl on what counts, and the score on the step after the last token.

    scores: (batch,); log-probs and mask, of the tokens: (batch, response_length). Returns rewards, non_score_rewards
    and kl, of that shape. A response that fills its row gets the score on its last token.

    As a reward, k1 has the gradient of the KL divergence. That of k3 lacks the gradient of KL(reference || policy) at
    each token, which near the reference is all of it.
    """
    # [T42] [X24] Nothing is filled in; what does not count is 0 in every sum.
    #       vwxyzjn/summarize_from_feedback_details ppo.py#L38, ppo.py#L675-L677 @ee77a9a
    x = (ref_logprobs - logprobs).masked_fill(~mask, 0)  # (batch, response_length)
    kl = -x if kl_estimator == "k1" else torch.expm1(x) - x
    non_score_rewards = -kl_coef * kl
    # [T43] The score is the reward of the step after the last token, where there is one.
    #       vwxyzjn/summarize_from_feedback_details ppo.py#L679-L685 @ee77a9a
    position = mask.sum(1, keepdim=True).clamp(max=mask.shape[1] - 1)  # (batch, 1)
    rewards = non_score_rewards.scatter_add(1, position, scores.unsqueeze(1).to(x.dtype))
    return rewards, non_score_rewards, kl


def compute_gae(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation; the value after the last token is 0.

        delta_t = r_t + gamma * V_{t+1} - V_t        A_t = delta_t + gamma * lam * A_{t+1}        R_t = A_t + V_t

    rewards, values: (batch, response_length). Returns advantages (not whitened) and returns, of that shape.
    """
    # [D56] [D57] openai/lm-human-preferences lm_human_preferences/train_policy.py#L327-L336 @cbfd210
    advantages = torch.zeros_like(values)
    next_advantage = next_value = torch.zeros_like(values[:, 0])  # (batch,)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = next_advantage = delta + gamma * lam * next_advantage
        next_value = values[:, t]
    return advantages, advantages + values


def masked_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    value_mask: torch.Tensor,
    ppo: TldrPpoArgs,
    reduce: Callable = lambda total: total,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Step 6 for one minibatch: whitened advantages and returns; every argument is (batch, response_length).

    reduce: sums a tensor over all processes.
    """
    # [T44] Values and rewards beyond the state after the last token are 0, so that nothing leaks into GAE from there.
    #       vwxyzjn/summarize_from_feedback_details ppo.py#L235-L241, ppo.py#L687-L704 @ee77a9a
    rewards, values = (tensor.masked_fill(~value_mask, 0) for tensor in (rewards, values))
    if ppo.whiten_rewards:
        rewards = masked_whiten(rewards, value_mask, keep_mean=True, reduce=reduce)
    advantages, returns = compute_gae(rewards, values, ppo.gamma, ppo.lam)
    # [X25] Per minibatch and over all processes, as chapter 1's groups.
    return masked_whiten(advantages, mask, keep_mean=False, reduce=reduce), returns


def masked_value_loss(
    new_values: torch.Tensor,
    values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    cliprange_value: float,
    count: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped value loss: half the mean of max((V - R)^2, (clip(V, V_old +- range) - R)^2), and the share of clipped.

    All tensors are (batch, response_length). Chapter 1's `value_loss` with a mask, of the values. count: what
    the sum is divided by; None: the number of values that count.
    """
    # [T45] vwxyzjn/summarize_from_feedback_details ppo.py#L731-L759 @ee77a9a
    new_values, values, returns = (tensor.masked_fill(~mask, 0) for tensor in (new_values, values, returns))
    clipped_values = torch.clamp(new_values, values - cliprange_value, values + cliprange_value)
    losses = (new_values - returns) ** 2  # (batch, response_length)
    clipped_losses = (clipped_values - returns) ** 2  # (batch, response_length)
    clipfrac = masked_mean((clipped_losses > losses).to(losses.dtype), mask, count)
    return 0.5 * masked_mean(torch.maximum(losses, clipped_losses), mask, count), clipfrac


def masked_policy_loss(
    new_logprobs: torch.Tensor,
    logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    cliprange: float,
    count: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Clipped surrogate: mean of max(-A * ratio, -A * clip(ratio, 1 +- range)), ratio = exp(new - old).

    All tensors are (batch, response_length). Chapter 1's `policy_loss` with a mask, of the tokens. count: what
    the sums are divided by; None: the number of tokens that count. Returns the loss, the share of clipped tokens, and
    approxkl = half the mean of (new - old)^2, the last two detached.
    """
    # [T45] vwxyzjn/summarize_from_feedback_details ppo.py#L731-L759 @ee77a9a
    log_ratio = (new_logprobs - logprobs).masked_fill(~mask, 0)  # (batch, response_length)
    advantages, ratio = advantages.masked_fill(~mask, 0), torch.exp(log_ratio)
    losses = -advantages * ratio
    clipped_losses = -advantages * torch.clamp(ratio, 1 - cliprange, 1 + cliprange)
    clipfrac = masked_mean((clipped_losses > losses).to(losses.dtype), mask, count)
    approxkl = 0.5 * masked_mean(log_ratio**2, mask, count).detach()
    return masked_mean(torch.maximum(losses, clipped_losses), mask, count), clipfrac, approxkl


# ----------------------------------------------------------------------------------------------------------------
# Rollout
# ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TldrRollout:
    """What one process remembers of its part of the batch while it trains on it."""

    query_responses: torch.Tensor  # (local_batch, context_length + response_length), truncated
    logprobs: torch.Tensor  # (local_batch, response_length), under the policy that sampled
    values: torch.Tensor  # (local_batch, response_length), of the critic at that time
    rewards: torch.Tensor  # (local_batch, response_length), KL penalty and score, not whitened
    mask: torch.Tensor  # (local_batch, response_length) bool, of the tokens
    value_mask: torch.Tensor  # (local_batch, response_length) bool, of the values


def in_chunks(function: Callable, size: int, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Apply a function to chunks of so many rows and join the tensors that it returns: the same in less memory."""
    chunks = [function(*chunk) for chunk in zip(*(tensor.split(size) for tensor in tensors), strict=True)]
    if isinstance(chunks[0], torch.Tensor):
        return torch.cat(chunks)
    return tuple(torch.cat(parts) for parts in zip(*chunks, strict=True))


def episode_noise(seed: int, update: int, batch: int, response_length: int) -> torch.Tensor:
    """Uniform random numbers (batch, response_length) of a whole batch, the same at any number of processes."""
    # [X01] The original seeds each process; here the noise belongs to the episode.
    generator = keyed_generator(seed, "policy", update)
    return torch.rand(batch, response_length, generator=generator, dtype=torch.float64)


def posts_of_update(seed: int, posts: int, update: int, batch: int) -> torch.Tensor:
    """Indices (batch,) of the posts of an update: one pass after the other, each in an order of its own."""
    # [T12] A batch may lie across two passes.
    #       vwxyzjn/summarize_from_feedback_details ppo.py#L424-L431, ppo.py#L509-L513 @ee77a9a
    first, last = update * batch // posts, (update * batch + batch - 1) // posts
    orders = [
        torch.randperm(posts, generator=keyed_generator(seed, "posts", number)) for number in range(first, last + 1)
    ]
    start = update * batch - first * posts
    return torch.cat(orders)[start : start + batch]


@torch.no_grad()
def summarise(
    actor_critic: ActorCritic, ids: TldrIds, temperature: float, contexts: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sample responses to contexts (batch, context_length).

    Returns four of (batch, response_length): responses, truncated; log-probs and values, which are those of the
    training pass; and the distance of these log-probs from those that the sampler saw.
    """
    # [T33] The end-of-text token stops nothing: always response_length tokens.
    #       vwxyzjn/summarize_from_feedback_details ppo.py#L494-L495, ppo.py#L542-L549 @ee77a9a
    responses, sampled_logprobs, _ = generate(
        actor_critic.lm_backbone, contexts, uniforms, ids.pad, actor_critic.vocab_size, temperature
    )
    # [T36] vwxyzjn/summarize_from_feedback_details ppo.py#L350-L355, ppo.py#L632 @ee77a9a
    responses = truncate_at(responses, ids.stop, 0, ids.pad)
    # [T34] [X26] The training pass says what the log-probs were, so that the ratio starts at 1, but for rounding.
    #       vwxyzjn/summarize_from_feedback_details ppo.py#L321-L335, ppo.py#L617-L619 @ee77a9a
    query_responses = torch.cat([contexts, responses], dim=1)
    logprobs, _, values = actor_critic(query_responses, ids.pad, contexts.shape[1], temperature)
    gap = (logprobs - sampled_logprobs).abs().masked_fill(responses == ids.pad, 0)
    return responses, logprobs, values, gap


# ----------------------------------------------------------------------------------------------------------------
# Update
# ----------------------------------------------------------------------------------------------------------------


def draw_minibatches(seed: int, update: int, epoch: int, episodes: range, nminibatches: int) -> torch.Tensor:
    """Rows of the local batch in each minibatch: (nminibatches, local_minibatch).

    episodes: this process's, of the global batch. Of every nminibatches episodes in a row each minibatch gets one, at
    random. So all processes have equally many episodes of each minibatch, and which minibatch an episode is in does
    not depend on the number of processes.
    """
    # [X27] One permutation of everything would not share the minibatches evenly.
    generator = keyed_generator(seed, "minibatches", update, epoch)
    rows = torch.rand(episodes.stop // nminibatches, nminibatches, generator=generator).argsort(1)
    inds = rows + torch.arange(len(rows)).unsqueeze(1) * nminibatches  # (rows, nminibatches)
    return inds[episodes.start // nminibatches :].T - episodes.start


@torch.no_grad()
def masked_statistics(
    new_logprobs: torch.Tensor,
    entropies: torch.Tensor,
    new_values: torch.Tensor,
    logprobs: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    value_mask: torch.Tensor,
    count: torch.Tensor,
    value_count: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """A micro-batch's share of the means over what counts; the arguments are (micro_batch, response_length)."""
    # [X34] Over what counts; the variance of the ratio is that of tokens.
    #       vwxyzjn/summarize_from_feedback_details ppo.py#L722-L771 @ee77a9a
    ratio = torch.exp((new_logprobs - logprobs).masked_fill(~mask, 0))
    return {
        "policy/entropy_avg": masked_mean(entropies, mask, count),
        "val/ratio": masked_mean(ratio, mask, count),
        "val/ratio_var": masked_mean(
            (ratio - 1) ** 2, mask, count
        ),  # about 1; finish_tldr_metrics moves it to the mean
        "val/vpred": masked_mean(new_values, value_mask, value_count),
        "val/error": masked_mean((new_values - returns) ** 2, value_mask, value_count),
    }


def moments(name: str, values: torch.Tensor, mask: torch.Tensor, count: torch.Tensor) -> dict[str, torch.Tensor]:
    """A process's share of mean and mean square of what counts, in float64; finish_tldr_metrics makes a variance."""
    values = values.double()
    return {
        f"{name}/mean": masked_mean(values, mask, count),
        f"{name}/square": masked_mean(values**2, mask, count),
    }


def tldr_ppo_update(
    actor_critic: ActorCritic,
    optimizer: torch.optim.Optimizer,
    rollout: TldrRollout,
    minibatches: list[torch.Tensor],
    ppo: TldrPpoArgs,
    pad_id: int,
    temperature: float,
    accelerator: Accelerator | None = None,
) -> dict[str, torch.Tensor]:
    """Steps 6 and 7: all epochs of PPO on one rollout.

    minibatches: for each optimiser step, this process's episodes in it, (local_minibatch,). Returns numbers, 0-d,
    whose mean over processes is a metric: the mean over what counts in a minibatch, averaged over the minibatches.
    """
    context_length = rollout.query_responses.shape[1] - rollout.logprobs.shape[1]
    processes = accelerator.num_processes if accelerator else 1
    reduce = partial(accelerator.reduce, reduction="sum") if accelerator else lambda total: total
    stats: list[dict[str, torch.Tensor]] = []
    for mb_inds in (inds.to(rollout.rewards.device) for inds in minibatches):
        # 6. Advantages and returns, in every epoch anew, since whitening depends on the minibatch.
        mb_mask, mb_value_mask = rollout.mask[mb_inds], rollout.value_mask[mb_inds]  # (local_minibatch, length)
        mb_values = rollout.values[mb_inds]
        mb_advantages, mb_returns = masked_advantages(
            rollout.rewards[mb_inds], mb_values, mb_mask, mb_value_mask, ppo, reduce
        )
        # [T45] [X21] Every sum is divided by what counts in the whole minibatch, on all processes: a token has the
        #       same weight in whatever micro-batch and process it is.
        count, value_count = reduce(mb_mask.sum()), reduce(mb_value_mask.sum())
        minibatch = (
            rollout.query_responses[mb_inds],
            rollout.logprobs[mb_inds],
            mb_values,
            mb_advantages,
            mb_returns,
            mb_mask,
            mb_value_mask,
        )
        # 7. One optimiser step.
        # [T47] [T48] Gradients of micro-batches add up, and we step when all are done, without accelerate's counter.
        #       vwxyzjn/summarize_from_feedback_details ppo.py#L721 @ee77a9a
        optimizer.zero_grad()
        micro_stats: list[dict[str, torch.Tensor]] = []
        for micro_batch in zip(
            *(tensor.split(ppo.local_micro_batch_size or len(mb_inds)) for tensor in minibatch), strict=True
        ):
            query_responses, logprobs, values, advantages, returns, mask, value_mask = micro_batch
            new_logprobs, entropies, new_values = actor_critic(query_responses, pad_id, context_length, temperature)
            pg_loss, pg_clipfrac, approxkl = masked_policy_loss(
                new_logprobs, logprobs, advantages, mask, ppo.cliprange, count
            )
            vf_loss, vf_clipfrac = masked_value_loss(
                new_values, values, returns, value_mask, ppo.cliprange_value, value_count
            )
            loss = pg_loss + ppo.vf_coef * vf_loss
            (loss * processes).backward()  # gradients are averaged over processes
            micro_stats.append(
                {
                    "loss/policy_avg": pg_loss.detach(),
                    "loss/value_avg": vf_loss.detach(),
                    "policy/approxkl_avg": approxkl,
                    "policy/clipfrac_avg": pg_clipfrac,
                    "val/clipfrac_avg": vf_clipfrac,
                    **masked_statistics(
                        *(new_logprobs, entropies, new_values, logprobs, returns),
                        *(mask, value_mask, count, value_count),
                    ),
                }
            )
        if accelerator is not None and not isinstance(actor_critic, FSDPModule):  # which does it in the backward pass
            average_gradients(actor_critic, accelerator)
        gradient = whole(gradient_norm(actor_critic))
        optimizer.step()
        shares = {
            **{name: sum(row[name] for row in micro_stats) for name in micro_stats[0]},
            **moments("val", mb_values, mb_value_mask, value_count),
            **moments("returns", mb_returns, mb_value_mask, value_count),
        }
        # Of each process a share of the whole mean, and means over processes are taken later.
        stats.append({name: share * processes for name, share in shares.items()} | {"gradient_norm": gradient})
    means = {name: torch.stack([row[name] for row in stats]).mean() for name in stats[0]}
    return means | {"val/first_ratio_gap": stats[0]["val/ratio_var"].clone()}  # squared, until finish_tldr_metrics


# ----------------------------------------------------------------------------------------------------------------
# Models to load
# ----------------------------------------------------------------------------------------------------------------


def load_reward_model(folder: Path, dtype: torch.dtype, trust_remote_code: bool = False) -> RewardModel:
    """A reward model or critic that was saved here, in models/<run>/reward or value, bit for bit."""
    # [D44] openai/lm-human-preferences lm_human_preferences/train_reward.py#L292-L329 @cbfd210
    head_file = folder / "reward_head.safetensors"
    if not folder.is_dir():
        raise InputError(f"reward model {folder}: no such folder")
    if not head_file.is_file():
        raise InputError(f"{folder} is not a reward model that was trained here: it has no {head_file.name}")
    reward_model = RewardModel(load_pretrained(str(folder), dtype, trust_remote_code, AutoModel)).to(dtype)
    try:
        head = load_file(head_file)
        missing = {"reward_head.weight", "reward_head.bias", "gain", "bias"} - set(head)
        unexpected = reward_model.load_state_dict(head, strict=False).unexpected_keys
    except (SafetensorError, RuntimeError) as error:
        raise InputError(f"{head_file} does not fit the model beside it: {error}") from error
    if missing or unexpected:
        raise InputError(f"{head_file} does not fit the model beside it: {', '.join([*missing, *unexpected])}")
    if not all(tensor.isfinite().all() for tensor in head.values()):
        raise InputError(f"{head_file} holds numbers that are not finite")
    return reward_model.requires_grad_(False)


class Reference:
    """What the policy started from. With adapters, the policy itself while they are switched off."""

    def __init__(self, lm_backbone: PreTrainedModel, adapters: nn.Module | None):
        self.lm_backbone, self.adapters = lm_backbone, adapters

    @torch.no_grad()
    def logprobs(
        self, ids: TldrIds, context_length: int, temperature: float, query_responses: torch.Tensor
    ) -> torch.Tensor:
        """Log-probs (batch, response_length) of query_responses (batch, context_length + response_length)."""
        # [T35] vwxyzjn/summarize_from_feedback_details ppo.py#L623-L627 @ee77a9a
        with self.adapters.disable_adapter() if self.adapters else gathered(self.lm_backbone):
            logprobs, _, _ = response_logprobs(
                self.lm_backbone, query_responses, ids.pad, context_length, temperature, vocab_size=ids.vocab_size
            )
        return logprobs


def add_adapters(lm_backbone: PreTrainedModel, lora: LoraArgs, seed: int) -> nn.Module:
    """Freeze a model and put low-rank adapters into its layers. Returns peft's handle, which can switch them off."""
    try:
        from peft import LoraConfig, TaskType, get_peft_model
    except ImportError as error:
        raise InputError(f"{flag('lora.rank')} needs the package `peft`") from error
    names = [name.strip() for name in lora.target_modules.split(",")]
    target_modules = None if not lora.target_modules else "all-linear" if names == ["all-linear"] else names
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM, r=lora.rank, lora_alpha=lora.alpha, target_modules=target_modules
    )
    torch.manual_seed(seed)  # the same adapters on every process
    try:
        return get_peft_model(lm_backbone, config)
    except ValueError as error:
        raise InputError(
            f"{flag('lora.target_modules')} {lora.target_modules!r} does not fit the base model: {error}"
        ) from error


def load_critic(
    args: Args, lm_backbone: PreTrainedModel, dtype: torch.dtype, tokenizer: PreTrainedTokenizerBase
) -> RewardModel:
    """The model that the critic starts from, ready to learn."""
    if folder := args.rewards.value_model or args.rewards.trained_model:
        critic = load_scalar_model(
            "value_model" if args.rewards.value_model else "trained_model", folder, args, dtype, tokenizer
        )
    else:
        torch.manual_seed(args.seed)  # for the head, the same on every process
        critic = RewardModel(load_pretrained(args.base_model, dtype, args.trust_remote_code, AutoModel)).to(dtype)
    critic.requires_grad_(True)
    critic.gain.requires_grad_(False)
    critic.bias.requires_grad_(False)
    return critic.to(lm_backbone.device)


def load_scalar_model(
    field: str, path: str, args: Args, dtype: torch.dtype, tokenizer: PreTrainedTokenizerBase
) -> RewardModel:
    """The reward model or critic in a folder, checked against the policy's tokenizer. field: of args.rewards."""
    what, vocab_size = f"{flag(f'rewards.{field}')} {path}", vocabulary_size(tokenizer)
    model = load_reward_model(Path(path), dtype, args.trust_remote_code)
    check_vocabulary(read_info(Path(path)), what, args.base_model, vocab_size)
    check_size(model.lm_backbone, what, args.task.query_length + args.task.response_length, vocab_size)
    return model


def load_networks(
    args: Args, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype, accelerator: Accelerator
) -> tuple[ActorCritic, Reference]:
    """Policy, critic and reference, sharded over the processes if the launcher asks for it."""
    device, length = accelerator.device, args.task.query_length + args.task.response_length
    vocab_size = vocabulary_size(tokenizer)
    lm_backbone = load_pretrained(args.base_model, dtype, args.trust_remote_code).to(device)
    check_model(lm_backbone, args.base_model, length, vocab_size, read_tokens)
    critic = load_critic(args, lm_backbone, dtype, tokenizer)
    layers = {*(lm_backbone._no_split_modules or ()), *(critic.lm_backbone._no_split_modules or ())}
    if args.lora.rank:
        reference = Reference(lm_backbone, add_adapters(lm_backbone, args.lora, args.seed))
    else:
        frozen = load_pretrained(args.base_model, dtype, args.trust_remote_code).to(device).requires_grad_(False)
        shard(frozen, layers, accelerator)
        reference = Reference(frozen, None)
    actor_critic = ActorCritic(lm_backbone, critic, vocab_size)
    shard(actor_critic, layers, accelerator)
    if args.lora.rank and isinstance(actor_critic, FSDPModule):
        raise InputError(f"{flag('lora.rank')} does not go with FSDP")
    return actor_critic, reference


def text_function(name: str, field: str, tokenizer: PreTrainedTokenizerBase, ids: TldrIds) -> Scorer:
    """Score with a function of texts; the texts do not show the end-of-text token."""
    scorer = text_scorer(name, field, tokenizer, ids.pad, with_references=True, on_all_processes=True)

    def score(queries: torch.Tensor, *summaries: torch.Tensor) -> torch.Tensor:
        return scorer(queries, *(tokens.masked_fill(tokens == ids.eos, ids.pad) for tokens in summaries))

    return score


def load_score(
    args: Args, tokenizer: PreTrainedTokenizerBase, ids: TldrIds, dtype: torch.dtype, device: torch.device
) -> Scorer:
    """What scores (queries, truncated responses, reference summaries); a reward model does not look at the last."""
    if bool(args.rewards.function) == bool(args.rewards.trained_model):
        raise InputError(f"give one of {flag('rewards.trained_model')} and {flag('rewards.function')}")
    if args.rewards.function:
        return text_function(args.rewards.function, "rewards.function", tokenizer, ids)
    reward_model = load_scalar_model("trained_model", args.rewards.trained_model, args, dtype, tokenizer).to(device)

    @torch.no_grad()
    def score(queries: torch.Tensor, responses: torch.Tensor, references: torch.Tensor) -> torch.Tensor:
        # [T37] vwxyzjn/summarize_from_feedback_details ppo.py#L635-L641 @ee77a9a
        return reward_model(trim_padding(queries, responses, pad_id=ids.pad), ids.pad)

    return score


TAKEN = (  # names under which a run without a monitor logs an objective, an evaluation or a column of its tables
    *("kl", "kl_coef", "entropy", "non_score_reward", "rlhf_reward", "scores", "raw_scores", "eos_rate"),
    *("response_length", "sampler_gap", "reference_scores"),
    *("query", "response", "reference", "tokens", "reference_tokens"),
)


def monitors(args: Args, tokenizer: PreTrainedTokenizerBase, ids: TldrIds) -> dict[str, Scorer]:
    """The function that is only logged, under its name; an empty dictionary if there is none."""
    if not args.rewards.monitor:
        return {}
    name = re.split("[:.]", args.rewards.monitor)[-1]
    if name in TAKEN:
        raise InputError(
            f"{flag('rewards.monitor')} {args.rewards.monitor}: the name {name} is taken; rename the function"
        )
    return {name: text_function(args.rewards.monitor, "rewards.monitor", tokenizer, ids)}


# ----------------------------------------------------------------------------------------------------------------
# Evaluation
# ----------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def score_references(
    scorers: dict[str, Scorer], chunk: int, accelerator: Accelerator, posts: Posts
) -> dict[str, torch.Tensor]:
    """Scores (posts,) of the reference summaries by each scorer, under its name."""

    def of_rows(inds: torch.Tensor) -> tuple[torch.Tensor, ...]:
        queries, references = (tokens[inds].to(accelerator.device) for tokens in (posts.queries, posts.references))
        return tuple(scorer(queries, references, references) for scorer in scorers.values())

    return dict(zip(scorers, map_rows(of_rows, len(posts), chunk, accelerator), strict=True))


@torch.no_grad()
def evaluate_policy(
    lm_backbone: PreTrainedModel,
    scorers: dict[str, Scorer],
    tokenizer: PreTrainedTokenizerBase,
    ids: TldrIds,
    args: Args,
    chunk: int,
    accelerator: Accelerator,
    posts: Posts,
    reference_scores: dict[str, torch.Tensor],
    update: int,
) -> tuple[dict[str, float], list[dict]]:
    """Summarise held-out posts at the temperature of evaluations. Returns means and the rows of evaluation.jsonl.

    The scores are those of the scorers, without a penalty for summaries that do not end. reference_scores: what
    score_references says of the posts. Raises a NumericalError that names the update if a mean is not finite.
    """
    # [T49] [T50] vwxyzjn/summarize_from_feedback_details ppo.py#L371-L416, ppo.py#L826-L840 @ee77a9a
    task, device = args.task, accelerator.device
    generator = keyed_generator(args.seed, "evaluate")
    noise = torch.rand(len(posts), task.response_length, generator=generator, dtype=torch.float64)

    def of_rows(inds: torch.Tensor) -> tuple[torch.Tensor, ...]:
        queries, references = posts.queries[inds].to(device), posts.references[inds].to(device)
        contexts = trim_padding(queries, pad_id=ids.pad)
        sampled, _, _ = generate(
            lm_backbone, contexts, noise[inds].to(device), ids.pad, ids.vocab_size, task.eval_temperature
        )
        responses = truncate_at(sampled, ids.stop, 0, ids.pad)
        return responses, *(scorer(queries, responses, references) for scorer in scorers.values())

    responses, *scores = map_rows(of_rows, len(posts), chunk, accelerator)
    numbers = {}
    for name, values in zip(scorers, scores, strict=True):
        numbers |= {name: values, f"reference_{name}": reference_scores[name]}
    rows = evaluation_rows(tokenizer, ids.pad, posts.queries, responses, posts.references, **numbers)
    means = {f"eval/{name}": values.double().mean().item() for name, values in numbers.items()}
    means["eval/eos_rate"] = has_stop(responses, ids.stop, 0).double().mean().item()
    means["eval/response_length"] = (responses != ids.pad).sum(1).double().mean().item()
    check_finite(means, update, "the reward model or function must give every summary a number")
    return means, rows


# ----------------------------------------------------------------------------------------------------------------
# Logging, checkpoints, the saved models
# ----------------------------------------------------------------------------------------------------------------

FINAL_NORM_BIASES = ("ln_f.bias", "final_layer_norm.bias", "norm.bias")  # GPT-2; GPT-NeoX; others

PANELS = {
    "score": ["objective/scores", "objective/gold_scores"],
    "KL from the reference (nats)": ["objective/kl"],
    "RLHF reward": ["objective/rlhf_reward"],
    "share of summaries that end": ["objective/eos_rate", "eval/eos_rate"],
    "length (tokens)": ["objective/response_length", "eval/response_length"],
    "held-out score": ["eval/scores", "eval/gold_scores"],
    "policy loss": ["loss/policy_avg"],
    "value loss": ["loss/value_avg"],
    "entropy of the policy (nats per token)": ["policy/entropy_avg"],
    "value error and variance of returns": ["val/error", "returns/var"],
    "clipped share of tokens": ["policy/clipfrac_avg", "val/clipfrac_avg"],
    "approximate KL of the update (nats)": ["policy/approxkl_avg"],
}


FIRST_RATIO_TOLERANCE = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 0.1}


def check_first_ratio(gap: float, update: int, dtype: str) -> None:
    """Raise a NumericalError if, before the first step, the policy that trains is not the one that sampled."""
    if gap > FIRST_RATIO_TOLERANCE[dtype]:
        raise NumericalError(
            f"the ratio is off 1 by {gap:.2g} on the first pass of update {update}: rollout and training pass "
            f"disagree about the policy; the run stops and saves nothing more"
        )


def finish_tldr_metrics(
    means: dict[str, float], update: int, args: Args, kl_coef: float, lr: float, run_seconds: float
) -> dict[str, float]:
    """All metrics of an update: the means over all processes, and what follows from them."""
    metrics = dict(means)
    metrics["objective/kl_coef"] = kl_coef
    metrics["objective/rlhf_reward"] = means["objective/scores"] + means["objective/non_score_reward"]
    metrics["val/ratio_var"] -= (means["val/ratio"] - 1) ** 2
    metrics["val/first_ratio_gap"] = math.sqrt(means["val/first_ratio_gap"])
    for name in ("val", "returns"):
        metrics[f"{name}/var"] = metrics.pop(f"{name}/square") - means[f"{name}/mean"] ** 2
    metrics["val/var_explained"] = 1 - means["val/error"] / max(metrics["returns/var"], 1e-12)
    episode = (update + 1) * args.ppo.batch_size
    # [T53] huggingface/trl trl/experimental/ppo/ppo_trainer.py#L660-L911 @f2cd577
    return metrics | {"lr": lr, "episode": episode, "eps": episode / run_seconds, "time": run_seconds}


def unsharded(reward_model: RewardModel, trust_remote_code: bool = False) -> RewardModel:
    """A reward model with whole weights: itself, unless it is sharded. Every process must call this."""
    if not any(isinstance(module, FSDPModule) for module in reward_model.modules()):
        return reward_model
    weights, config = whole_state(reward_model), reward_model.lm_backbone.config
    plain = RewardModel(AutoModel.from_config(config, trust_remote_code=trust_remote_code))
    plain.to(reward_model.gain.dtype).load_state_dict(weights, strict=False)  # tied weights come once
    return plain


def save_reward_model(
    folder: Path,
    reward_model: RewardModel,
    tokenizer: PreTrainedTokenizerBase,
    info: dict,
    trust_remote_code: bool = False,
) -> None:
    """Save as an ordinary sequence-classification model that gives the same scores, gain and bias included.

    The score of such a model is linear in the final hidden state and has no constant. So the gain goes into the
    weight w of the score, and the constant c into the bias of the final layer norm, along w: w (h + c w / |w|^2)
    = w h + c. Where that norm has no bias, c stands in the configuration as `score_constant` and must be added.
    `reward_head.safetensors` keeps what this changed, so that `load_reward_model` restores our model bit for bit.
    """
    # [D44] openai/lm-human-preferences lm_human_preferences/train_reward.py#L292-L329 @cbfd210
    backbone, pad_id = reward_model.lm_backbone.base_model, vocabulary_size(tokenizer)
    kept = {name: tensor for name, tensor in reward_model.state_dict().items() if not name.startswith("lm_backbone.")}
    weight = reward_model.gain.detach() * reward_model.reward_head.weight.detach()  # (1, width)
    constant = (reward_model.gain * reward_model.reward_head.bias + reward_model.bias).item()
    # Some models refuse a padding id beyond their embedding, so it is set once the embedding has a row for it.
    config = type(backbone.config).from_dict(backbone.config.to_dict() | {"pad_token_id": None})
    config.num_labels = 1
    norm_bias = next((name for name in FINAL_NORM_BIASES if name in backbone.state_dict()), None)
    config.score_constant = 0.0 if norm_bias else constant
    classifier = AutoModelForSequenceClassification.from_config(
        config, dtype=weight.dtype, trust_remote_code=trust_remote_code
    ).to(weight.device)
    classifier.base_model.load_state_dict(backbone.state_dict())
    with torch.no_grad():
        classifier.score.weight.copy_(weight)
        if norm_bias:
            kept[f"lm_backbone.{norm_bias}"] = backbone.state_dict()[norm_bias].clone()
            classifier.base_model.state_dict()[norm_bias].add_(constant * weight[0] / (weight**2).sum())
        rows = classifier.get_input_embeddings().num_embeddings
        if rows <= pad_id:
            classifier.resize_token_embeddings(pad_id + 1, mean_resizing=False)
            classifier.get_input_embeddings().weight[rows:] = 0.0
    classifier.config.pad_token_id = pad_id
    classifier.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(kept, folder / "reward_head.safetensors")
    write_json(folder / "ppo_rlhf.json", info)


def save_policy_and_critic(
    folder: Path,
    actor_critic: ActorCritic,
    adapters: nn.Module | None,
    tokenizer: PreTrainedTokenizerBase,
    args: Args,
    accelerator: Accelerator,
) -> None:
    """policy: an ordinary causal language model, adapters merged in; value: the critic, as a reward model is saved.

    adapters: peft's handle, which saves them once more on their own, in policy/adapter. Every process must call this.
    """
    # [T51] vwxyzjn/summarize_from_feedback_details ppo.py#L842-L861 @ee77a9a
    lm_backbone, critic = actor_critic.lm_backbone, unsharded(actor_critic.critic, args.trust_remote_code)
    if adapters is not None and accelerator.is_main_process:
        adapters.save_pretrained(folder / "policy" / "adapter")
        lm_backbone = adapters.merge_and_unload()
    weights = whole_state(lm_backbone)
    if not accelerator.is_main_process:
        return
    lm_backbone.save_pretrained(folder / "policy", state_dict=weights)
    tokenizer.save_pretrained(folder / "policy")
    info = {"base_model": args.base_model, "vocab_size": vocabulary_size(tokenizer)}
    info |= {"task": dataclasses.asdict(args.task)}
    rewards = {name: getattr(args.rewards, name) for name in ("function", "monitor")}
    rewards |= {"kind": "policy", "reward_model": args.rewards.trained_model}
    write_json(folder / "policy" / "ppo_rlhf.json", info | rewards)
    save_reward_model(folder / "value", critic, tokenizer, info | {"kind": "critic"}, args.trust_remote_code)


# ----------------------------------------------------------------------------------------------------------------
# Train
# ----------------------------------------------------------------------------------------------------------------


def train(args: Args, joint: dict | None = None) -> Path:
    """Train a policy and a critic; return the folder models/<run>/policy, on every process.

    joint: arguments, time stamp and runs/ folder of tldr_all.py, if it runs this. Raises InputError, a ValueError:
    bad arguments before anything is written, a disk or a function that fails whenever it fails.
    """
    accelerator = make_accelerator()
    check_tldr_arguments(args)
    if args.rewards.kl_estimator == "k3" and accelerator.is_main_process:
        print(f"{flag('rewards.kl_estimator')} k3: {K3_WARNING}")
    given, args = args, find_paths(args, joint)  # given: what meta.json and the saved models name
    device, dtype = accelerator.device, torch.float64 if args.dtype == "float64" else torch.float32
    autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    task, ppo, sizes = args.task, args.ppo, tldr_ppo_sizes(args.ppo, accelerator.num_processes)
    tokenizer = load_tokenizer(args.base_model, args.trust_remote_code)
    ids = tldr_ids(task, tokenizer)
    posts = read_posts(task, tokenizer, "train")
    held_out = {split: read_posts(task, tokenizer, split, args.eval_posts) for split in ("validation", "test")}
    rouge(["a"], ["a"])  # a missing package is said now, not after the training
    prompts = held_out["validation"].first(args.eval_prompts)
    score = load_score(args, tokenizer, ids, dtype, device)
    monitor = monitors(args, tokenizer, ids)
    actor_critic, reference = load_networks(args, tokenizer, dtype, accelerator)
    actor_critic.forward = autocast()(actor_critic.forward)
    # [T46] One optimiser for both networks, and one learning rate.
    #       vwxyzjn/summarize_from_feedback_details ppo.py#L575-L577 @ee77a9a
    trained = [parameter for parameter in actor_critic.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, ppo.lr, eps=ppo.adam_eps, weight_decay=ppo.weight_decay, fused=True)
    adaptive_kl = args.rewards.adaptive_kl
    controller = AdaptiveKLController(args.rewards.kl_coef, adaptive_kl.target, adaptive_kl.horizon)

    run = Run(given, accelerator, dataclasses.asdict(sizes), joint, weight_files(args))
    first_update, evaluation = 0, {}
    if checkpoint := run.load_checkpoint():
        tensors, state = checkpoint
        first_update, controller.value, evaluation = state["step"], state["kl_coef"], state["evaluation"]
        restore_training_state(actor_critic, optimizer, tensors)
    run.start_logging(first_update)
    rank = accelerator.process_index
    rows = slice(rank * sizes.local_batch, (rank + 1) * sizes.local_batch)
    scorers = {"scores": score, **monitor}
    summarise_posts = partial(summarise, actor_critic, ids, task.temperature)
    scores_of_references = autocast()(partial(score_references, scorers, sizes.local_rollout_batch, accelerator))
    reference_scores = scores_of_references(prompts) if args.eval_interval else {}
    evaluate_on = partial(
        evaluate_policy,
        actor_critic.lm_backbone,
        scorers,
        tokenizer,
        ids,
        args,
        sizes.local_rollout_batch,
        accelerator,
    )

    with run.progress("PPO", sizes.updates, first_update) as advance:
        for update in range(first_update, sizes.updates):
            started = time.monotonic()
            # [T46] Constant within an update.
            lr = scheduled_lr(ppo.lr, ppo.schedule, update, sizes.updates)
            for group in optimizer.param_groups:
                group["lr"] = lr
            with torch.no_grad(), autocast(), gathered(actor_critic):
                # 0. Summarise held-out posts, at times. The metrics repeat the newest result.
                if args.eval_interval and update % args.eval_interval == 0:
                    evaluation, _ = evaluate_on(prompts, reference_scores, update)

                # 1. Sample posts. Every process draws the whole batch and takes its rows.
                inds = posts_of_update(args.seed, len(posts), update, sizes.batch)[rows]  # (local_batch,)
                queries = trim_padding(posts.queries[inds], pad_id=ids.pad)  # (local_batch, context_length)
                queries, references = queries.to(device), posts.references[inds].to(device)
                noise = episode_noise(args.seed, update, sizes.batch, task.response_length)[rows].to(device)

                # 2. Generate summaries, and 3. their log-probs and values; log-probs of the reference.
                responses, logprobs, values, sampler_gap = in_chunks(
                    summarise_posts, sizes.local_rollout_batch, queries, noise
                )  # four of (local_batch, response_length)
                query_responses = torch.cat([queries, responses], dim=1)
                reference_of = partial(reference.logprobs, ids, queries.shape[1], task.temperature)
                ref_logprobs = in_chunks(reference_of, sizes.local_rollout_batch, query_responses)

                # 4. Score; punish summaries that do not end.
                raw_scores = in_chunks(
                    score, sizes.local_rollout_batch, queries, responses, references
                )  # (local_batch,)
                finished = has_stop(responses, ids.stop, 0)  # (local_batch,)
                scores = punish_missing_eos(
                    raw_scores, finished, args.rewards.missing_eos, args.rewards.missing_eos_penalty
                )

                # 5. Per-token rewards.
                mask, value_mask = response_masks(responses, ids.pad)
                rewards, non_score_rewards, kl = masked_rewards(
                    scores, logprobs, ref_logprobs, mask, controller.value, args.rewards.kl_estimator
                )

            # 6. Advantages and returns, and 7. PPO epochs.
            rollout = TldrRollout(query_responses, logprobs, values, rewards, mask, value_mask)
            minibatches = [
                mb_inds
                for epoch in range(ppo.noptepochs)
                for mb_inds in draw_minibatches(
                    args.seed, update, epoch, range(rows.start, rows.stop), ppo.nminibatches
                )
            ]
            stats = tldr_ppo_update(
                actor_critic, optimizer, rollout, minibatches, ppo, ids.pad, task.temperature, accelerator
            )

            # 8. Adapt the KL coefficient and log.
            objectives = {
                "objective/kl": kl.sum(1),
                "objective/entropy": -logprobs.masked_fill(~mask, 0).sum(1),
                "objective/non_score_reward": non_score_rewards.sum(1),
                "objective/scores": scores,
                "objective/raw_scores": raw_scores,
                "objective/eos_rate": finished,
                "objective/response_length": mask.sum(1),
                "objective/sampler_gap": sampler_gap.sum(1) / mask.sum(1),
                **{f"objective/{name}": scorer(queries, responses, references) for name, scorer in monitor.items()},
            }
            stats = {name: values.double().mean() for name, values in objectives.items()} | stats
            # Times the number of processes: the mean that is taken next is then the sum.
            stats["val/num_eos_tokens"] = finished.double().sum() * accelerator.num_processes
            means = mean_over_processes(stats, accelerator)
            check_finite(means, update, anew_with_lower("ppo.lr"))
            metrics = finish_tldr_metrics(means, update, args, controller.value, lr, run.seconds())
            check_first_ratio(metrics["val/first_ratio_gap"], update, args.dtype)
            check_equal("objective/kl_coef", controller.value, accelerator)
            run.log(update, metrics | evaluation)
            if args.log_interval and update % args.log_interval == 0:
                numbers = {"scores": scores[:3], "kl": kl.sum(1)[:3]}
                texts = (tokens[:3] for tokens in (queries, responses, references))
                samples = evaluation_rows(tokenizer, ids.pad, *texts, **numbers)
                run.log_samples(update, sample_table(samples))
            controller.update(metrics["objective/kl"], sizes.batch)
            speed = f"{sizes.batch / seconds_since(started):.0f} episodes/s"
            advance(f"{speed}, score {metrics['objective/scores']:+.2f}, KL {metrics['objective/kl']:.2f}")
            if run.is_time_to_save(update + 1, sizes.updates):
                state = {"kl_coef": controller.value, "evaluation": evaluation}
                run.save_checkpoint(update + 1, training_state(actor_critic, optimizer), state)

    results: dict[str, float] = {}
    for split, split_posts in held_out.items():
        with autocast(), gathered(actor_critic):
            means, table = evaluate_on(split_posts, scores_of_references(split_posts), sizes.updates)
        scores = rouge([row["response"] for row in table], [row["reference"] for row in table])
        means |= {f"eval/rouge/{name}": value for name, value in scores.items()}
        results |= {name.replace("eval", split, 1): value for name, value in means.items()}
        if accelerator.is_main_process:
            name = "evaluation.jsonl" if split == "validation" else f"evaluation_{split}.jsonl"
            (run.folder / name).write_text("".join(json.dumps(row) + "\n" for row in table))
    save_policy_and_critic(run.model_folder, actor_critic, reference.adapters, tokenizer, given, accelerator)
    last = {f"last_{name}": run.last_mean(f"objective/{name}") for name in ("scores", "kl", "eos_rate")}
    run.finish(PANELS, **results, **last, too_long=posts.too_long)
    if args.upload_model and accelerator.is_main_process:
        for part in ("policy", "value"):
            upload_model(run.model_folder / part, args.hf_entity, f"{run.model_folder.name}-{part}")
    accelerator.wait_for_everyone()
    return run.model_folder / "policy"


if __name__ == "__main__":
    run_script(lambda: train(parse_args(PRESETS, description=__doc__)))
