"""PPO against a reward model: chapter 1, Fine-tuning language models from human preferences (Ziegler et al. 2019).

A language model (the policy) writes continuations of queries. A reward model, trained from human comparisons
by `train_reward.py`, scores them. PPO raises the score, and a penalty on the KL divergence from the model that we
started from (the reference) keeps the text fluent. Each update does eight things, the steps of `train()` below:

    1. sample queries
    2. generate responses; keep their log-probs and values
    3. log-probs of the reference
    4. truncate the responses at the stop token and score them
    5. per-token rewards: KL penalty on every sampled token, also after the stop; score on the last of them
    6. advantages and returns (GAE), for each minibatch again
    7. PPO epochs over minibatches
    8. adapt the KL coefficient and log

Steps 6 and 7 are the loop of `ppo_update`, because each minibatch whitens its own rewards and advantages. The sizes
of batches come before `train()`, the functions of the algorithm after it in its order, and loading and saving last.

Marks like [D54] name an implementation detail. The original is openai/lm-human-preferences at commit cbfd210; files
and lines next to marks are the original's. Marks like [X01] are places where we differ on purpose; see docs/details.

    python ppo_rlhf/train_both.py --preset tales                    # no network: reward model, then this, in minutes
    python ppo_rlhf/train_policy.py --rewards.trained_model models/<run>/reward                      # one GPU, GPT-2
    accelerate launch --num_processes 8 ppo_rlhf/train_policy.py --rewards.trained_model models/<run>/reward --track
    python ppo_rlhf/train_policy.py --resume runs/<run>             # resume after an interruption
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf import worlds
from ppo_rlhf.lib import checkpoints, cli, models, passes, precision, processes, run, scorers, texts, traces
from ppo_rlhf.lib.errors import InputError

# ---- Arguments -------------------------------------------------------------------------------------------------

# Controllers of the KL coefficient. The target is 6 nats per response. QUICK is for tales, which has few episodes.
ADAPTIVE, QUICK = cli.AdaptiveKLArgs(target=6.0), cli.AdaptiveKLArgs(target=6.0, horizon=1_000)
FIXED = cli.AdaptiveKLArgs(target=None)


@dataclass(frozen=True)
class RewardsArgs:
    trained_model: str = ""
    """folder of the reward model that train_reward.py saved: models/<run>/reward"""
    function: str = ""
    """package.module:name of a function (queries, responses: texts) -> list of floats, in place of a reward model;
    with a third parameter it also gets the reference answers, here None"""
    monitor: str = ""
    """package.module:name of such a function that is only logged, as objective/<name>"""
    normalize_samples: int = 256
    """samples of the language model on which scores of `function` get mean 0 and deviation 1, the scale for which
    the KL coefficient and the critic are meant; 0: scores stay as the function gives them"""
    kl_coef: float = 0.15
    """weight of the KL penalty at the start, reward per nat"""
    adaptive_kl: cli.AdaptiveKLArgs = field(default_factory=lambda: ADAPTIVE)
    """controller of the KL coefficient"""


@dataclass(frozen=True)
class PpoArgs:
    total_episodes: int = 1_000_000
    """responses to train on, over all updates; rounded up to whole updates"""
    batch_size: int = 512
    """episodes (query and response) per update, over all processes"""
    nminibatches: int = 1
    """optimiser steps per pass over the batch"""
    noptepochs: int = 4
    """passes over the batch per update"""
    lr: float = 1e-5
    """learning rate of the first update; it falls linearly"""
    value_head_lr: float | None = None
    """the same for the value head alone, which starts at 0 and has far to go; None: that of all other weights"""
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
    whiten_rewards: bool = True
    """scale the rewards of each group's minibatch to variance 1 (advantages always are)"""
    whiten_groups: int = 8
    """slices of the batch, each whitened with its own mean and variance; the original: one per process [X03]"""
    local_micro_batch_size: int = 0
    """episodes per forward and backward pass on one process; a memory knob; 0: as many as are fast"""
    local_micro_batch_tokens: int = 0
    """tokens of such a pass, padding included; a memory knob; 0: any number"""
    local_rollout_batch_size: int = 0
    """episodes per pass of generation and scoring on one process; a memory knob; 0: the whole local batch"""


@dataclass(frozen=True)
class Args(cli.RunArgs):
    preset: str = "sentiment"
    """names a set of defaults: sentiment, descriptiveness, cnndm, tldr, tales, tales-descriptiveness, reviews"""
    exp_name: str = "train_policy"
    seed: int = 1
    """seed of the sampling noise and the permutations"""
    base_model: str = "gpt2"
    """causal language model to start from: a folder, a name on the hub, or `tales`"""
    frozen_bfloat16: bool = False
    """reference and reward model in bfloat16: half their memory, and KL and scores that are rounded"""
    compile: bool = False
    """compile the models with torch.compile: half a minute, and then fewer and larger kernels; meant for GPUs"""
    log_interval: int = 10
    """updates between printed samples; 0: none"""
    trace_interval: int = 0
    """updates between episodes that are kept with all their numbers, which report.py shows; 0: none"""
    trace_episodes: int = 8
    """episodes of the batch that such a trace keeps, at most those of one process and one whitened group"""
    task: texts.TaskArgs = field(default_factory=texts.TaskArgs)
    """queries and responses"""
    rewards: RewardsArgs = field(default_factory=RewardsArgs)
    """score and KL penalty"""
    ppo: PpoArgs = field(default_factory=PpoArgs)
    """the optimisation"""


# [D87] [X09] Summaries do without reward whitening.   launch.py#L166
SUMMARIES_PPO = PpoArgs(batch_size=32, lr=2e-6, whiten_rewards=False)
TALES = {"base_model": "tales", "trace_interval": 20, "ppo": PpoArgs(total_episodes=12_800, batch_size=64, lr=2e-4)}
GOLD = "ppo_rlhf.worlds.tales:{}.gold_scores"
# A real language model and few episodes: two epochs of two minibatches, and a controller that reacts within them.
REVIEWS = PpoArgs(
    total_episodes=1_536,
    batch_size=32,
    nminibatches=2,
    noptepochs=2,
    lr=3e-5,
    value_head_lr=3e-3,
    whiten_groups=2,
)
REVIEWS_REWARDS = RewardsArgs(
    kl_coef=0.05,
    adaptive_kl=cli.AdaptiveKLArgs(target=4.0, horizon=200),
    monitor="ppo_rlhf.worlds.reviews:vader",
)
PRESETS = {
    "sentiment": Args(),
    "descriptiveness": Args(),  # with another reward model
    "cnndm": Args(rewards=RewardsArgs(kl_coef=0.01, adaptive_kl=FIXED), ppo=SUMMARIES_PPO),
    "tldr": Args(rewards=RewardsArgs(kl_coef=0.03, adaptive_kl=FIXED), ppo=SUMMARIES_PPO),
    "tales": Args(rewards=RewardsArgs(adaptive_kl=QUICK, monitor=GOLD.format("sentiment")), **TALES),
    "tales-descriptiveness": Args(
        rewards=RewardsArgs(adaptive_kl=QUICK, monitor=GOLD.format("descriptiveness")), **TALES
    ),
    "reviews": Args(base_model="smollm2-135m", trace_interval=10, rewards=REVIEWS_REWARDS, ppo=REVIEWS),
}
PRESETS = {name: dataclasses.replace(args, preset=name, task=texts.TASKS[name]) for name, args in PRESETS.items()}


# ---- Sizes -----------------------------------------------------------------------------------------------------
#
# How a batch is divided, with the numbers of the default, GPT-2 on one process:
#
#     batch         512 episodes, one update; every process has an equal part, its local batch
#     group          64 of them (8 groups): the slice that is whitened with its own mean and variance
#     minibatch     512: 1 / nminibatches of every group, one optimiser step; 4 epochs make 4 steps
#     micro-batch   a part of the minibatch in one forward and backward pass; changes memory, not numbers


@dataclass(frozen=True)
class PpoSizes:
    """Sizes, from the arguments and the number of processes, in episodes unless the name says otherwise."""

    updates: int
    batch: int
    local_batch: int
    local_groups: int
    group_batch: int


def ppo_sizes(ppo: PpoArgs, num_processes: int) -> PpoSizes:
    """Divide the global sizes exactly, or say which size does not divide and what would."""
    cli.at_least(1, "ppo.", ppo, "total_episodes", "batch_size", "nminibatches", "noptepochs", "whiten_groups")
    cli.at_least(0, "ppo.", ppo, "local_micro_batch_size", "local_micro_batch_tokens", "local_rollout_batch_size")
    local_groups = processes.split_evenly("ppo.whiten_groups", ppo.whiten_groups, num_processes, "processes")
    slices = ppo.whiten_groups * ppo.nminibatches
    what = f"{cli.typed('ppo.whiten_groups')} x {cli.typed('ppo.nminibatches')}"
    group_minibatch = processes.split_evenly("ppo.batch_size", ppo.batch_size, slices, what)
    # [D68] The original asks for eight episodes.   train_policy.py#L69-L75
    if ppo.whiten_rewards and group_minibatch < 8:
        raise InputError(
            f"{cli.typed('ppo.whiten_rewards')} needs at least 8 episodes per group and minibatch, and "
            f"{cli.typed('ppo.batch_size')} {ppo.batch_size} gives {group_minibatch}; "
            f"{cli.flag('ppo.batch_size')} {8 * slices} is enough; fewer {cli.flag('ppo.whiten_groups')} need less"
        )
    local_batch = ppo.batch_size // num_processes
    processes.rows_at_a_time("ppo.", ppo, "local_rollout_batch_size", local_batch)
    processes.rows_at_a_time("ppo.", ppo, "local_micro_batch_size", local_groups * group_minibatch)
    return PpoSizes(
        # [D63] Rounded up: the last update has a whole batch too.   train_policy.py#L78-L84
        updates=math.ceil(ppo.total_episodes / ppo.batch_size),
        batch=ppo.batch_size,
        local_batch=local_batch,
        local_groups=local_groups,
        group_batch=ppo.batch_size // ppo.whiten_groups,
    )


# ---- Train -----------------------------------------------------------------------------------------------------


def train(args: Args, joint: dict | None = None) -> Path:
    """Train a policy and return the folder models/<run>/policy, on every process. joint: what train_both.py gives.

    Raises InputError, a ValueError: on bad arguments before anything is written; later if a disk or a function fails.
    """
    accelerator = processes.make_accelerator(sharding=False)
    check_arguments(args)
    worlds.check_names(args, joint)
    sizes = ppo_sizes(args.ppo, accelerator.num_processes)
    given, args = args, worlds.find_paths(args, joint)  # names such as `tales`, which meta.json keeps, become paths
    task, ppo, device = args.task, args.ppo, accelerator.device
    tokenizer = models.load_tokenizer(args.base_model, args.trust_remote_code)
    ids = texts.task_ids(task, tokenizer)
    # [D11] Every stage begins with the first text.   train_policy.py#L454-L457
    stream = texts.QueryStream(task, tokenizer)
    policy, reference = load_policy_and_reference(args, ids, device)
    # [D66] All parameters learn, embeddings and value head too.   utils/core.py#L621-L629
    groups_of_weights = [{"params": part.parameters()} for part in (policy.lm_backbone, policy.value_head)]
    optimizer = AdamTensorFlowStyle(groups_of_weights, lr=ppo.lr)
    score, monitor = load_scorer(args, tokenizer, device), load_monitor(args, tokenizer)
    controller = AdaptiveKLController(args.rewards.kl_coef, **vars(args.rewards.adaptive_kl))
    inputs = models.weight_files(args) | worlds.data_files(task, "query_dataset")
    minibatch = {"rows": sizes.local_batch // ppo.nminibatches, "length": ids.context_length + task.response_length}
    of_pass = passes.limit(args, accelerator, policy, **minibatch)
    this_run = run.Run(given, accelerator, dataclasses.asdict(sizes) | of_pass, joint, inputs)
    scale = scorers.Scale()
    first_update = resume(this_run, policy, optimizer, controller, stream, scale)
    if args.rewards.function and args.rewards.normalize_samples and first_update == 0:
        scale.fit(scores_of_language_model(args, ids, stream, reference, score, accelerator), accelerator)
    this_run.start_logging(first_update, models.config_for_plots(given, args), stream.left_out())
    rows, groups = local_slices(sizes, accelerator.process_index)
    by_length = partial(passes.by_length, pad_id=ids.pad, rows=ppo.local_rollout_batch_size)
    tools = (tokenizer, ids, stream, policy, reference, score, scale, monitor, controller)
    trace = partial(trace_episodes, this_run, args, *tools)

    for update in this_run.updates("PPO", first_update, sizes.updates):
        with torch.no_grad(), precision.mixed_precision(device, enabled=policy.low_precision):
            # 1. Sample queries. Every process draws the whole batch and takes its rows.
            queries = stream.next_batch(sizes.batch, ids.pad)[rows].to(device)  # (local_batch, query_length)
            contexts = texts.add_affixes(queries, ids.prefix, ids.suffix)  # (local_batch, context_length)

            # 2. Generate responses; record their log-probs and values: all of (local_batch, response_length).
            uniforms = episode_noise(args.seed, update, sizes.batch, task.response_length)[rows].to(device)
            sampling = {"temperature": task.temperature, "new_tokens": task.response_length}
            responses, logprobs, values, sampler_gap = by_length(respond, policy, contexts, uniforms, **sampling)

            # 3. Compute the reference's log-probs: (local_batch, response_length).
            context_responses = torch.cat([contexts, responses], dim=1)
            ref_logprobs = by_length(reference_logprobs, reference, context_responses, ids=ids, task=task)

            # 4. Truncate the responses and score them.
            truncated_responses = truncate_at(responses, ids.stop, task.truncate_after, ids.pad)
            # [X18] The scores of a function get the scale that a normalised reward model has.
            raw_scores = scale.apply(score(queries, truncated_responses))  # (local_batch,)
            # [D50] Without a stop token, a penalty takes the place of the score.   train_policy.py#L384-L390
            stopped = has_stop(truncated_responses, ids.stop, task.truncate_after)  # (local_batch,)
            scores = torch.where(stopped, raw_scores, task.penalty_reward_value)  # (local_batch,)

            # 5. Compute per-token rewards. The score judges the whole text, so it is on the last token. The KL
            #    divergence is a sum over tokens, so each token pays for its own part.
            # [D53] The penalty uses the coefficient that the last update left.   train_policy.py#L293-L297
            rewards, non_score_rewards, kl = compute_rewards(scores, logprobs, ref_logprobs, controller.value)

        # 6. Compute advantages and returns, and 7. optimise: `ppo_update` does both for each minibatch.
        # [X17] The value head starts at 0, so it may need larger steps than what was pretrained.
        for weights, first_lr in zip(optimizer.param_groups, (ppo.lr, ppo.value_head_lr or ppo.lr), strict=True):
            weights["lr"] = learning_rate(ppo, update, first_lr)
        rollout = Rollout(context_responses, logprobs, values, rewards)
        permutations = draw_permutations(args.seed, update, ppo.noptepochs, groups, sizes.group_batch)
        stats = ppo_update(policy, optimizer, rollout, permutations, ppo, ids.pad, task.temperature)

        # 8. Adapt the KL coefficient and log.
        monitored = {name: function(queries, truncated_responses) for name, function in monitor.items()}
        if args.rewards.function:
            monitored["function_score"] = scale.undo(raw_scores)
        told = (queries, truncated_responses, stopped, raw_scores, scores, ref_logprobs, kl, non_score_rewards)
        episodes = Episodes(*told, sampler_gap, monitored, controller.value)
        metrics = update_metrics(this_run, args, update, ids, rollout, episodes, stats)
        # [D70] [D71] The controller sees the KL averaged over all processes.   train_policy.py#L299-L305
        controller.update(metrics["objective/kl"], sizes.batch)
        this_run.end_of_update(
            *(update, metrics),
            f"score {metrics['objective/score']:+.2f}, KL {metrics['objective/kl']:.2f}, "
            f"{100 * metrics['objective/stopped']:.0f} % end",
            samples=partial(sample_rows, tokenizer, ids, episodes),
            trace=partial(trace, update, rollout, episodes),
            checkpoint=partial(training_state, policy, optimizer, controller, stream, scale),
        )
    return finish(this_run, policy, tokenizer, stream, given)


# ---- Steps 1 to 3: how a model writes and reads tokens ---------------------------------------------------------


def episode_noise(seed: int, update: int, batch: int, response_length: int) -> Tensor:
    """Uniform random numbers (batch, response_length) of a whole batch, the same at any number of processes."""
    # [X01] The original seeds each process; here the noise belongs to the episode.
    generator = keyed_generator(seed, "policy", update)
    return torch.rand(batch, response_length, generator=generator, dtype=torch.float64)


def keyed_generator(*key: int | str) -> torch.Generator:
    """A CPU random generator that depends on the key alone, so that noise belongs to an episode, not a process."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


@torch.no_grad()
def respond(
    policy: PolicyWithValueHead, contexts: Tensor, uniforms: Tensor, *, pad_id: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sample responses to contexts (batch, context_length), with a random number for each token.

    Returns four tensors of (batch, response_length): responses, their log-probs and values, and the distance of the
    log-probs from the sampler's, which is 0 unless in low precision.
    """
    responses, sampled_logprobs, hidden_states = generate(
        policy.lm_backbone, contexts, uniforms, pad_id, policy.vocab_size, temperature
    )
    if policy.low_precision:
        # In low precision the sampler rounds otherwise than training does, and the ratio would not start at 1.
        logprobs, _, values = policy(torch.cat([contexts, responses], 1), pad_id, contexts.shape[1], temperature)
    else:
        # [D25] [D26] The log-probs and values that the sampler saw become the old ones, so the ratio starts at 1.
        logprobs, values = sampled_logprobs, read_scalar(policy.value_head, hidden_states)
    return responses, logprobs, values, (logprobs - sampled_logprobs).abs()


@torch.no_grad()
def generate(
    lm_backbone: PreTrainedModel, contexts: Tensor, uniforms: Tensor, pad_id: int, vocab_size: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
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
    cache = precision.KeyValueCache(config=lm_backbone.config, max_cache_len=length)
    attention_mask = causal_mask(F.pad(mask, (0, uniforms.shape[1]), value=True), lm_backbone.dtype)
    masks = attention_mask.split([contexts.shape[1]] + [1] * uniforms.shape[1], dim=2)  # context, then each token
    responses, logprobs, hidden_states = [], [], []
    # [D22] [D24] Always response_length tokens; no top-k, no top-p.   language/sample.py#L24-L84
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
        # [D25] Log-probs are recorded as the tokens are sampled.   policy.py#L108-L112
        responses.append(tokens)
        logprobs.append(all_logprobs.gather(1, tokens))
        hidden_states.append(hidden)
        position_ids = position_ids[:, -1:] + 1
    return torch.cat(responses, 1).to(contexts.dtype), torch.cat(logprobs, 1), torch.stack(hidden_states, 1)


def left_pad(tokens: Tensor, pad_id: int) -> Tensor:
    """Move the padding of each row to its left; the order of the other tokens stays.

    tokens: (batch, length). [[5, P, 6, P]] gives [[P, P, 5, 6]].
    """
    # [D08] A stable sort by "is a real token".
    return tokens.gather(1, (tokens != pad_id).int().argsort(dim=1, stable=True))


@torch.no_grad()
def reference_logprobs(
    reference: PreTrainedModel, context_responses: Tensor, *, pad_id: int, ids: texts.TaskIds, task: texts.TaskArgs
) -> Tensor:
    """Log-probs (batch, response_length) of the reference, at the policy's temperature.

    context_responses: (batch, context_length + response_length).
    """
    context_length = context_responses.shape[1] - task.response_length
    logprobs, _, _ = response_logprobs(
        reference, context_responses, pad_id, context_length, task.temperature, ids.vocab_size
    )
    return logprobs


def response_logprobs(
    lm_backbone: PreTrainedModel,
    context_responses: Tensor,
    pad_id: int,
    context_length: int,
    temperature: float,
    vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers of a language model for responses that it reads.

    context_responses: (batch, context_length + response_length). Returns log-probs and entropies (nats, without
    gradient), each (batch, response_length), and the hidden states (batch, response_length, width).
    """
    # [D47] What the model says at position i is about token i + 1: hence the shift by one.   policy.py#L114-L126
    hidden_states = read_tokens(lm_backbone, context_responses, pad_id, slice(context_length - 1, -1))
    responses = context_responses[:, context_length:]
    responses = responses.masked_fill(responses == pad_id, 0)  # (batch, response_length)
    all_logprobs = F.log_softmax(scaled_logits(lm_backbone, hidden_states, vocab_size, temperature), dim=2)
    logprobs = all_logprobs.gather(2, responses.long().unsqueeze(2)).squeeze(2)  # (batch, response_length)
    with torch.no_grad():
        entropies = -(all_logprobs.exp() * all_logprobs).sum(2)  # (batch, response_length)
    return logprobs, entropies, hidden_states


def read_tokens(lm_backbone: PreTrainedModel, tokens: Tensor, pad_id: int, columns: slice) -> Tensor:
    """Final hidden states of the language model at some columns, with padding anywhere in the tokens.

    tokens: (batch, sequence_length). Returns (batch, selected columns, width), after the last layer norm.
    """
    # [D13] Padding is never embedded: token 0 takes its place, and no token sees it.   language/model.py#L294-L300
    mask = tokens != pad_id  # (batch, sequence_length)
    input_ids = tokens.masked_fill(~mask, 0)
    # [D14] A position counts real tokens before it: 0, 1, 1, 1 for [x, pad, pad, a].   language/model.py#L265-L269
    position_ids = mask.cumsum(1) - mask.long()
    attention_mask = causal_mask(mask, lm_backbone.dtype)  # (batch, 1, sequence_length, sequence_length)
    hidden_states = lm_backbone.base_model(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
    ).last_hidden_state  # (batch, sequence_length, width)
    # [D16] Padding shows what the real token to its left shows: columns [0, 0, 0, 3].   language/model.py#L333-L341
    real_columns = torch.where(mask, torch.arange(tokens.shape[1], device=tokens.device), 0)
    last_real = real_columns.cummax(1).values[:, columns]  # (batch, selected columns)
    return hidden_states.gather(1, last_real.unsqueeze(2).expand(-1, -1, hidden_states.shape[2]))


def causal_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that attention adds to its scores: 0 where a position may look, the lowest number where it may not.

    mask: (batch, sequence_length), True for real tokens. Returns (batch, 1, sequence_length, sequence_length).
    """
    # [D15] A position, padding too, sees itself and the real tokens before it.   language/model.py#L101-L159
    itself = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
    visible = (mask.unsqueeze(1) | itself).tril().unsqueeze(1)
    return torch.zeros(visible.shape, dtype=dtype, device=mask.device).masked_fill(~visible, torch.finfo(dtype).min)


def scaled_logits(lm_backbone: PreTrainedModel, hidden_states: Tensor, vocab_size: int, temperature: float) -> Tensor:
    """Logits over the tokenizer's ids, divided by the temperature: (..., vocab_size). In full precision even in
    bfloat16 runs, where rounded logits would move the log-prob of every token.
    """
    output_layer = lm_backbone.get_output_embeddings()
    hidden_states = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
    with torch.autocast(hidden_states.device.type, enabled=False):
        if getattr(output_layer, "weight", hidden_states).dtype == torch.bfloat16:  # a frozen model
            logits = F.linear(hidden_states, *(parameter.float() for parameter in output_layer.parameters()))
        else:
            logits = output_layer(hidden_states)
    # [D12] Ids above the tokenizer's largest, such as padding, are never sampled or scored.   policy.py#L58-L59
    # [D23] Log-probs and entropies are those of the scaled logits.   language/sample.py#L24-L30
    return logits[..., :vocab_size] / temperature


def read_scalar(head: nn.Linear, hidden_states: Tensor) -> Tensor:
    """The head's number for each hidden state: (..., width) gives (...). In full precision even in bfloat16 runs."""
    with torch.autocast(hidden_states.device.type, enabled=False):
        return head(hidden_states.to(head.weight.dtype)).squeeze(-1)


class PolicyWithValueHead(nn.Module):
    """A causal language model with a scalar head on its final hidden state: actor and critic share the trunk."""

    def __init__(self, lm_backbone: PreTrainedModel, vocab_size: int | None = None, *, low_precision: bool = False):
        """vocab_size: number of ids that can be sampled, if the output layer has more rows than the tokenizer;
        low_precision: whether matrix products are in bfloat16.
        """
        super().__init__()
        self.lm_backbone = lm_backbone
        self.vocab_size = vocab_size or lm_backbone.config.vocab_size
        self.low_precision = low_precision
        # [D46] The value head starts at exactly zero.   language/model.py#L364-L370
        self.value_head = nn.Linear(lm_backbone.config.hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(
        self, query_responses: Tensor, pad_id: int, context_length: int, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs of the response tokens, entropies (nats) and values at each of their positions.

        query_responses, with affixes: (batch, context_length + response_length). Results: (batch, response_length).
        """
        with precision.mixed_precision(query_responses.device, enabled=self.low_precision):
            logprobs, entropies, hidden_states = response_logprobs(
                self.lm_backbone, query_responses, pad_id, context_length, temperature, self.vocab_size
            )
            # [D26] A value belongs to the position before the response token, as its log-prob does.   policy.py#L125
            return logprobs, entropies, read_scalar(self.value_head, hidden_states)


# ---- Steps 4 to 7: scores, rewards, advantages, losses ---------------------------------------------------------


def truncate_at(responses: Tensor, stop_id: int | None, after: int, pad_id: int) -> Tensor:
    """Replace everything after the first stop token at index >= after by padding; the stop token itself stays.

    responses: (batch, response_length). stop_id None: unchanged.
    """
    # [D48] What follows the stop token becomes padding; without one, nothing changes.   lm_tasks.py#L39-L52
    if stop_id is None:
        return responses
    stops = (responses == stop_id) & (torch.arange(responses.shape[1], device=responses.device) >= after)
    stops_before = stops.cumsum(1) - stops.long()  # (batch, response_length)
    return responses.masked_fill(stops_before > 0, pad_id)


def has_stop(responses: Tensor, stop_id: int | None, after: int) -> Tensor:
    """Whether each response has a stop token at index >= after: (batch,) bool. stop_id None: all True."""
    # [D50] A stop token before index `after` does not count.   lm_tasks.py#L58-L65
    if stop_id is None:
        return torch.ones(responses.shape[0], dtype=torch.bool, device=responses.device)
    return (responses[:, after:] == stop_id).any(1)


def compute_rewards(
    scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, kl_coef: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Per-token rewards: -kl_coef * kl, and the score on top of the last token.

    scores: (batch,); log-probs: (batch, response_length). Returns rewards, non_score_rewards and kl, of that shape.
    """
    # [D51] [D52] Every token pays, also after the stop; the score is on the last.   train_policy.py#L149-L154
    kl = logprobs - ref_logprobs  # nats; one sample of the divergence, which may be negative
    non_score_rewards = -kl_coef * kl
    rewards = non_score_rewards.clone()
    rewards[:, -1] += scores
    return rewards, non_score_rewards, kl


@dataclass(frozen=True)
class Rollout:
    """The data of one process's part of the batch that training needs."""

    context_responses: Tensor  # (local_batch, context_length + response_length)
    logprobs: Tensor  # (local_batch, response_length), under the policy that sampled
    values: Tensor  # (local_batch, response_length), of the critic at that time
    rewards: Tensor  # (local_batch, response_length), KL penalty and score, not whitened
    seen: list[traces.Seen] = field(default_factory=list)  # what each pass of training computed, for traces


def draw_permutations(seed: int, update: int, epochs: int, groups: range, group_batch: int) -> Tensor:
    """Orders in which each group visits its episodes: (epochs, groups, group_batch), fresh ones in each epoch."""
    # [D62] [X02] Every epoch visits the same episodes in a fresh order.   train_policy.py#L180-L196
    orders = [
        torch.randperm(group_batch, generator=keyed_generator(seed, "permutation", update, epoch, group))
        for epoch in range(epochs)
        for group in groups
    ]
    return torch.stack(orders).unflatten(0, (epochs, len(groups)))


def ppo_update(
    policy: PolicyWithValueHead,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    permutations: Tensor,
    ppo: PpoArgs,
    pad_id: int,
    temperature: float,
) -> dict[str, Tensor]:
    """Steps 6 and 7: all epochs of PPO on one rollout.

    permutations: (epochs, groups, group_batch), each row an order of that group's episodes; group g owns the slice
    [g * group_batch, (g + 1) * group_batch) of the rollout. Minibatch k holds slice k of every group's order.
    Returns 0-d means of what `ppo_loss` and `group_statistics` say, the gradient norm, and the first ratio gap.
    """
    epochs, groups, group_batch = permutations.shape
    group_minibatch = group_batch // ppo.nminibatches
    device, response_length = rollout.rewards.device, rollout.rewards.shape[1]
    b_inds = permutations + torch.arange(groups).unsqueeze(1) * group_batch  # (epochs, groups, group_batch)
    lengths = passes.count_tokens(rollout.context_responses, pad_id)  # (local_batch,), on the CPU as b_inds
    limits = {"rows": ppo.local_micro_batch_size, "most_tokens": ppo.local_micro_batch_tokens}
    steps = []  # what is logged of each optimiser step
    for epoch in range(epochs):
        for minibatch in range(ppo.nminibatches):
            slice_of_group = slice(minibatch * group_minibatch, (minibatch + 1) * group_minibatch)
            inds = b_inds[epoch, :, slice_of_group]  # (groups, group_minibatch)
            mb_inds = inds.to(device, non_blocking=True)

            # 6. Compute advantages and returns. The critic's values say how well a response was going to do anyway.
            #    What is left, the advantage, says what the sampled token added, with much less noise.
            mb_values = rollout.values[mb_inds]  # (groups, group_minibatch, response_length)
            mb_advantages, mb_returns = group_advantages(rollout.rewards[mb_inds], mb_values, ppo)
            rollout.seen.append((inds, {"advantages": mb_advantages, "returns": mb_returns}))

            # 7. Make one optimiser step. Micro-batches add up to the gradient of the whole minibatch. [D67] [D88]
            mb_tokens, mb_logprobs = rollout.context_responses[mb_inds], rollout.logprobs[mb_inds]
            mb = [x.flatten(0, 1) for x in (mb_tokens, inds, mb_logprobs, mb_values, mb_advantages, mb_returns)]
            shares = []  # what is logged of each micro-batch, times its share of the minibatch
            optimizer.zero_grad()
            for tokens, rows, *old in passes.micro_batches(
                policy, lengths[inds.flatten()], *mb, pad_id=pad_id, **limits
            ):
                # tokens: (micro_batch, context_length + response_length); all others: (micro_batch, response_length)
                context_length = tokens.shape[1] - response_length
                new_logprobs, entropies, new_values = policy(tokens, pad_id, context_length, temperature)
                rollout.seen.append(
                    (rows, {"new_logprobs": new_logprobs.detach(), "new_values": new_values.detach()})
                )
                loss, info = ppo_loss(new_logprobs, entropies, new_values, *old, ppo)
                share = len(tokens) / inds.numel()
                (loss * share).backward()
                shares.append({name: value * share for name, value in info.items()})
            processes.average_gradients(policy)
            gradient_norm = processes.gradient_norm(policy)
            optimizer.step()
            means = {name: torch.stack([share[name] for share in shares]).sum() for name in shares[0]}
            steps.append({"ppo/gradient_norm": gradient_norm} | means | group_statistics(mb_values, mb_returns))
    means = {name: torch.stack([step[name] for step in steps]).mean() for name in steps[0]}
    return means | {"ppo/val/first_ratio_gap": steps[0][SQUARED_RATIO_GAP].sqrt()}  # 0 but for rounding


def group_advantages(rewards: Tensor, values: Tensor, ppo: PpoArgs) -> tuple[Tensor, Tensor]:
    """Step 6 for one minibatch: whitened advantages and returns. Every group whitens with its own statistics.

    rewards, values: (groups, group_minibatch, response_length). Returns two tensors of that shape.
    """
    # [D55] Rewards are whitened here, minibatch by minibatch. They keep their mean: without it, the return of a
    #       token would change by the mean times the number of tokens left.   train_policy.py#L323-L325
    # [D77] A group is the part of a minibatch that one process of the original has.   train_policy.py#L158-L159
    if ppo.whiten_rewards:
        rewards = torch.stack([whiten(group, keep_mean=True) for group in rewards])
    advantages, returns = compute_gae(rewards.flatten(0, 1), values.flatten(0, 1), ppo.gamma, ppo.lam)
    # [D58] Advantages are always whitened, once the returns are made.   train_policy.py#L338-L339
    advantages = torch.stack([whiten(group, keep_mean=False) for group in advantages.view_as(values)])
    return advantages, returns.view_as(values)


def whiten(values: Tensor, *, keep_mean: bool) -> Tensor:
    """Shift and scale to mean 0 and variance 1 over all elements; keep_mean adds the mean back.

    The variance is biased, and 1e-8 is added to it: (x - mean) / sqrt(var + 1e-8).
    """
    # [D54] The biased variance, over every element given.   utils/core.py#L336-L341
    mean, variance = values.mean(), values.var(unbiased=False)
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    return whitened + mean if keep_mean else whitened


def compute_gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation; the value after the last token is 0.

        delta_t = r_t + gamma * V_{t+1} - V_t        A_t = delta_t + gamma * lam * A_{t+1}        R_t = A_t + V_t

    rewards, values: (batch, response_length). Returns advantages (not whitened) and returns, of that shape.
    """
    # [D56] [D57] The rollout's values; advantages not yet whitened; rewards may be.   train_policy.py#L327-L336
    advantages = torch.zeros_like(values)
    next_advantage = next_value = torch.zeros_like(values[:, 0])  # (batch,)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = next_advantage = delta + gamma * lam * next_advantage
        next_value = values[:, t]
    return advantages, advantages + values


SQUARED_RATIO_GAP = "squared_ratio_gap"  # mean of (ratio - 1)^2, for the variance of the ratio


def ppo_loss(
    new_logprobs: Tensor,
    entropies: Tensor,
    new_values: Tensor,
    logprobs: Tensor,
    values: Tensor,
    advantages: Tensor,
    returns: Tensor,
    ppo: PpoArgs,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch, and its metrics: means over its tokens, without gradient. All 0-d.

    Every tensor given is (micro_batch, response_length).
    """
    pg_loss, pg_clipfrac, approxkl = policy_loss(new_logprobs, logprobs, advantages, ppo.cliprange)
    vf_loss, vf_clipfrac = value_loss(new_values, values, returns, ppo.cliprange_value)
    # [D61] No entropy bonus; every token has the same weight.   train_policy.py#L357
    loss = pg_loss + ppo.vf_coef * vf_loss
    with torch.no_grad():
        ratio = torch.exp(new_logprobs - logprobs)  # (micro_batch, response_length)
        return loss, {
            "ppo/loss/policy": pg_loss.detach(),
            "ppo/loss/value": vf_loss.detach(),
            "ppo/loss/total": loss.detach(),
            "ppo/policy/approxkl": approxkl,
            "ppo/policy/clipfrac": pg_clipfrac,
            "ppo/val/clipfrac": vf_clipfrac,
            "ppo/policy/entropy": entropies.mean(),
            "ppo/val/vpred": new_values.mean(),
            "ppo/val/error": ((new_values - returns) ** 2).mean(),
            "ppo/val/ratio": ratio.mean(),
            SQUARED_RATIO_GAP: ((ratio - 1) ** 2).mean(),
            "ppo/val/advantage": advantages.mean(),
            "ppo/val/advantage_var": (advantages**2).mean(),  # the mean is 0
        }


def policy_loss(
    new_logprobs: Tensor, logprobs: Tensor, advantages: Tensor, cliprange: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Clipped surrogate: mean(max(-A * ratio, -A * clip(ratio, 1 +- range))), ratio = exp(new - old).

    Tensors: (batch, response_length). Returns the loss and, detached, clipped share and 0.5 * mean((new - old)^2).
    """
    # [D60] The larger of the two counts, so a token gains nothing by moving further.   train_policy.py#L350-L360
    ratio = torch.exp(new_logprobs - logprobs)  # (batch, response_length)
    losses = -advantages * ratio
    clipped_losses = -advantages * torch.clamp(ratio, 1 - cliprange, 1 + cliprange)
    clipfrac = (clipped_losses > losses).to(losses.dtype).mean()
    approxkl = 0.5 * ((new_logprobs - logprobs) ** 2).mean().detach()
    return torch.maximum(losses, clipped_losses).mean(), clipfrac, approxkl


def value_loss(new_values: Tensor, values: Tensor, returns: Tensor, cliprange_value: float) -> tuple[Tensor, Tensor]:
    """Clipped value loss: 0.5 * mean(max((V - R)^2, (clip(V, V_old +- range) - R)^2)), and the share of clipped."""
    # [D59] The larger error counts: no gradient once V leaves its range towards R.   train_policy.py#L343-L348
    clipped_values = torch.clamp(new_values, values - cliprange_value, values + cliprange_value)
    losses = (new_values - returns) ** 2  # (batch, response_length)
    clipped_losses = (clipped_values - returns) ** 2  # (batch, response_length)
    clipfrac = (clipped_losses > losses).to(losses.dtype).mean()
    return 0.5 * torch.maximum(losses, clipped_losses).mean(), clipfrac


def group_statistics(values: Tensor, returns: Tensor) -> dict[str, Tensor]:
    """Mean and biased variance of each group's minibatch, averaged. Arguments: (groups, group_minibatch, length)."""
    return {
        "ppo/val/mean": values.mean(),
        "ppo/val/var": values.var((1, 2), unbiased=False).mean(),
        "ppo/returns/mean": returns.mean(),
        "ppo/returns/var": returns.var((1, 2), unbiased=False).mean(),
    }


class AdamTensorFlowStyle(torch.optim.Adam):
    """Adam as TensorFlow 1 computes it: eps is added to the uncorrected sqrt(v).

        lr_t = lr * sqrt(1 - beta2^t) / (1 - beta1^t)        theta -= lr_t * m / (sqrt(v) + eps)

    PyTorch divides sqrt(v) by sqrt(1 - beta2^t) before it adds eps. So its Adam takes the same step if its eps is
    eps / sqrt(1 - beta2^t), in the first step eps / sqrt(0.001) = 32 eps. With small gradients that matters.
    """

    # [D64] [D65] No clipping, weight decay or warm-up; `steps` counts over the run.   utils/core.py#L621-L629
    def __init__(self, params, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-5):
        super().__init__(params, lr=lr, betas=betas, eps=eps, fused=True)
        for group in self.param_groups:
            group.update(steps=0, eps_tensorflow=eps)

    def step(self, closure: Callable | None = None):
        """One step of all parameters that have a gradient."""
        for group in self.param_groups:
            group["steps"] += 1
            group["eps"] = group["eps_tensorflow"] / math.sqrt(1 - group["betas"][1] ** group["steps"])
        return super().step(closure)


def learning_rate(ppo: PpoArgs, update: int, first_lr: float | None = None) -> float:
    """The learning rate of an update (0-based), constant within it: linear from first_lr or ppo.lr, and never 0."""
    # [D63] All steps of an update have the same rate.   train_policy.py#L78-L84
    first_lr = ppo.lr if first_lr is None else first_lr
    return first_lr * (1 - update / math.ceil(ppo.total_episodes / ppo.batch_size))


# ---- Step 8: metrics, KL coefficient ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Episodes:
    """Further data of one process's part of the batch, for the log only; PPO does not need it."""

    queries: Tensor  # (local_batch, query_length)
    responses: Tensor  # (local_batch, response_length), truncated: what was scored
    stopped: Tensor  # (local_batch,), whether there is a stop token
    raw_scores: Tensor  # (local_batch,), of the reward model
    scores: Tensor  # (local_batch,), with the penalty where there is no stop token
    ref_logprobs: Tensor  # (local_batch, response_length)
    kl: Tensor  # (local_batch, response_length)
    non_score_rewards: Tensor  # (local_batch, response_length)
    sampler_gap: Tensor  # (local_batch, response_length)
    monitored: dict[str, Tensor]  # (local_batch,) each
    kl_coef: float  # that the rewards were made with


def update_metrics(
    this_run: run.Run,
    args: Args,
    update: int,
    ids: texts.TaskIds,
    rollout: Rollout,
    episodes: Episodes,
    stats: dict[str, Tensor],
) -> dict[str, float]:
    """All metrics of an update, over all processes; all must call this. Stops the run if they are impossible."""
    accelerator = this_run.accelerator
    means = processes.mean_over_processes(objectives(rollout, episodes, ids.pad) | stats, accelerator)
    responses = rollout.context_responses[:, -rollout.logprobs.shape[1] :]
    eos_tokens = {"ppo/val/num_eos_tokens": (responses == ids.eos).sum()}
    means |= processes.sum_over_processes(eos_tokens, accelerator)
    processes.check_update(means, update, args.dtype)
    processes.check_equal("objective/kl_coef", episodes.kl_coef, accelerator)
    return finish_metrics(means, update, args, episodes.kl_coef, this_run.seconds_of_update(), this_run.seconds())


def objectives(rollout: Rollout, episodes: Episodes, pad_id: int) -> dict[str, Tensor]:
    """The log of the episodes of this process: 0-d means over them, in float64."""
    of_episodes = {
        "kl": episodes.kl.sum(1),
        "entropy": -rollout.logprobs.sum(1),
        "score": episodes.scores,
        "non_score_reward": episodes.non_score_rewards.sum(1),
        "raw_score": episodes.raw_scores,
        "stopped": episodes.stopped,
        **episodes.monitored,
        "response_length": (episodes.responses != pad_id).sum(1),
        "sampler_gap": episodes.sampler_gap,
    }
    return {f"objective/{name}": values.double().mean() for name, values in of_episodes.items()}


def finish_metrics(
    means: dict[str, float], update: int, args: Args, kl_coef: float, update_seconds: float, run_seconds: float
) -> dict[str, float]:
    """All metrics of an update: the means over all processes, and what follows from them.

    Names that the original has mean what they mean there. Those that lm-human-preference-details (at
    ccc1953) added (`objective/scores`, `_avg`) hold the same numbers, for its plotting commands.
    """
    ppo = args.ppo
    metrics = {name: mean for name, mean in means.items() if name != SQUARED_RATIO_GAP}
    metrics["objective/kl_coef"] = kl_coef
    metrics["objective/score_total"] = means["objective/score"] + means["objective/non_score_reward"]
    metrics["objective/scores"] = means["objective/score"]
    metrics["ppo/val/ratio_var"] = means[SQUARED_RATIO_GAP] - (means["ppo/val/ratio"] - 1) ** 2
    metrics["ppo/val/var_explained"] = 1 - means["ppo/val/error"] / max(means["ppo/returns/var"], 1e-12)
    for name in ("loss/policy", "loss/value", "policy/entropy", "policy/approxkl", "policy/clipfrac", "val/clipfrac"):
        metrics[f"ppo/{name}_avg"] = means[f"ppo/{name}"]
    metrics["ppo/lr"] = learning_rate(ppo, update)
    metrics["ppo/episode"] = metrics["elapsed/episodes"] = (update + 1) * ppo.batch_size
    tokens = ppo.batch_size * args.task.response_length
    metrics |= {"elapsed/steps/serial": (update + 1) * args.task.response_length}
    metrics |= {"elapsed/updates": update + 1, "elapsed/steps/total": (update + 1) * tokens}
    return metrics | {"elapsed/fps": int(tokens / update_seconds), "elapsed/time": run_seconds}


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
        # [D69] The step is proportional to the relative error, which is clipped.   train_policy.py#L115-L124
        # [D72] Without a target, fixed.   train_policy.py#L107-L112
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.value *= 1 + error * episodes / self.horizon


# ---- Plumbing: sizes, loading, panels --------------------------------------------------------------------------


def check_arguments(args: Args) -> None:
    """Refuse numbers that cannot be meant."""
    cli.check_values(args)
    cli.at_least(0, "", args, "log_interval", "save_interval", "trace_interval")
    cli.at_least(1, "", args, "trace_episodes")
    cli.at_least(0, "rewards.", args.rewards, "kl_coef")
    cli.at_least(0, "ppo.", args.ppo, "vf_coef", "gamma", "lam")
    cli.at_least(0, "rewards.", args.rewards, "normalize_samples")
    cli.above_zero("ppo.", args.ppo, "lr", "cliprange", "cliprange_value")
    if args.ppo.value_head_lr is not None:
        cli.above_zero("ppo.", args.ppo, "value_head_lr")
    cli.check_controller(args.rewards.adaptive_kl, args.ppo.batch_size)


def local_slices(sizes: PpoSizes, rank: int) -> tuple[slice, range]:
    """The rows of the batch that belong to a process, and the groups in them."""
    # [X04] A process takes a contiguous slice of the batch.
    rows = slice(rank * sizes.local_batch, (rank + 1) * sizes.local_batch)
    return rows, range(rank * sizes.local_groups, (rank + 1) * sizes.local_groups)


def load_policy_and_reference(
    args: Args, ids: texts.TaskIds, device: torch.device
) -> tuple[PolicyWithValueHead, PreTrainedModel]:
    """Two copies of the pretrained model: one to train, with a value head, and one that never changes."""
    # [D45] Policy and reference are two copies, so that the first KL is 0.   train_policy.py#L441-L452
    # [D74] [X14] Every process reads the same files.   train_policy.py#L482-L495
    lm_backbone, reference = (models.load_base_model(args, frozen=frozen).to(device) for frozen in (False, True))
    longest = ids.context_length + args.task.response_length
    models.check_model(lm_backbone, args.base_model, longest, ids.pad, read_tokens)
    if args.gradient_checkpointing:
        models.checkpoint_layers(lm_backbone)
    if args.compile:
        models.compile_backbone(lm_backbone)
        models.compile_backbone(reference)
    policy = PolicyWithValueHead(lm_backbone, ids.vocab_size, low_precision=args.dtype == "bfloat16")
    return policy.to(device, precision.weights_dtype(args.dtype)), reference


def load_scorer(args: Args, tokenizer: PreTrainedTokenizerBase, device: torch.device) -> scorers.Scorer:
    """The scorer of (queries, truncated responses): the reward model or the function that the arguments name."""
    pad_id, function = models.vocabulary_size(tokenizer), args.rewards.function
    if function:
        return scorers.text_scorer(function, "rewards.function", tokenizer, pad_id, on_all_processes=True)
    reward_model = models.load_scalar_model(args, "trained_model", pad_id, frozen=True).to(device)
    if args.compile:
        models.compile_backbone(reward_model.lm_backbone)

    @torch.no_grad()
    def score(queries: Tensor, responses: Tensor) -> Tensor:
        # [D28] [D49] The query alone and the truncated response.   train_policy.py#L396-L402
        query_responses = torch.cat([queries, responses], dim=1)
        limits = {"pad_id": pad_id, "rows": args.ppo.local_rollout_batch_size}
        return passes.by_length(nn.Module.__call__, reward_model, query_responses, **limits)

    return score


@torch.no_grad()
def scores_of_language_model(
    args: Args,
    ids: texts.TaskIds,
    stream: texts.QueryStream,
    reference: PreTrainedModel,
    score: scorers.Scorer,
    accelerator: Accelerator,
) -> Tensor:
    """Scores (n,) that a function gives to this process's share of the language model's own truncated texts."""
    task, device = args.task, accelerator.device
    mine = slice(accelerator.process_index, None, accelerator.num_processes)
    samples, generator = args.rewards.normalize_samples, keyed_generator(args.seed, "scale of the function")
    queries = stream.first(samples, ids.pad)[mine].to(device)  # (n, query_length)
    uniforms = torch.rand(samples, task.response_length, generator=generator, dtype=torch.float64)
    uniforms = uniforms[mine][: len(queries)].to(device)  # (n, response_length)

    def respond(reference: PreTrainedModel, contexts: Tensor, uniforms: Tensor, *, pad_id: int) -> Tensor:
        return generate(reference, contexts, uniforms, pad_id, ids.vocab_size, task.temperature)[0]

    contexts = texts.add_affixes(queries, ids.prefix, ids.suffix)
    rows = args.ppo.local_rollout_batch_size or args.ppo.batch_size // accelerator.num_processes
    with precision.mixed_precision(device, enabled=args.dtype == "bfloat16"):
        responses = passes.by_length(respond, reference, contexts, uniforms, pad_id=ids.pad, rows=rows)
    return score(queries, truncate_at(responses, ids.stop, task.truncate_after, ids.pad))


# Names under objective/ that are taken, so no function to monitor can have them.
OBJECTIVES = {"kl", "entropy", "score", "non_score_reward", "raw_score", "stopped", "response_length", "sampler_gap"}
OBJECTIVES |= {"kl_coef", "score_total", "scores", "function_score"}


def load_monitor(args: Args, tokenizer: PreTrainedTokenizerBase) -> dict[str, scorers.Scorer]:
    """The function that is only logged, under its name; an empty dictionary if there is none."""
    pad_id = models.vocabulary_size(tokenizer)
    of_texts = partial(scorers.text_scorer, tokenizer=tokenizer, pad_id=pad_id, on_all_processes=True)
    return scorers.load_monitor(args.rewards.monitor, OBJECTIVES, of_texts)


def resume(
    this_run: run.Run,
    policy: PolicyWithValueHead,
    optimizer: torch.optim.Optimizer,
    controller: AdaptiveKLController,
    stream: texts.QueryStream,
    scale: scorers.Scale,
) -> int:
    """Restore everything from the newest checkpoint, if there is one. Returns the first update to make."""
    state = this_run.resume(policy, optimizer)
    controller.value = state.get("kl_coef", controller.value)
    scale.mean, scale.std = state.get("score_scale", (0.0, 1.0))
    stream.position = state.get("query_position", stream.position)
    return state["step"]


def training_state(
    policy: PolicyWithValueHead,
    optimizer: torch.optim.Optimizer,
    controller: AdaptiveKLController,
    stream: texts.QueryStream,
    scale: scorers.Scale,
) -> tuple[dict[str, Tensor], dict]:
    """The content of a checkpoint: weights, Adam's moments, KL coefficient, position in the texts, scores' scale."""
    # [D81] The counterpart of `resume`.   train_policy.py#L474-L508
    state = {"kl_coef": controller.value, "query_position": stream.position}
    state["score_scale"] = [scale.mean, scale.std]
    return checkpoints.training_state(policy, optimizer), state


def sample_rows(tokenizer: PreTrainedTokenizerBase, ids: texts.TaskIds, episodes: Episodes) -> list[dict]:
    """A few episodes to print."""
    # [X06] The total uses the KL coefficient that made these rewards.
    total = episodes.scores + episodes.non_score_rewards.sum(1)  # (local_batch,)
    shown = {"score": episodes.scores, "kl": episodes.kl.sum(1), "score - kl_coef * kl": total}
    return texts.sample_rows(tokenizer, ids, episodes.queries, episodes.responses, **shown)


@torch.no_grad()
def trace_episodes(
    this_run: run.Run,
    args: Args,
    tokenizer: PreTrainedTokenizerBase,
    ids: texts.TaskIds,
    stream: texts.QueryStream,
    policy: PolicyWithValueHead,
    reference: PreTrainedModel,
    score: scorers.Scorer,
    scale: scorers.Scale,
    monitor: dict[str, scorers.Scorer],
    controller: AdaptiveKLController,
    update: int,
    rollout: Rollout,
    episodes: Episodes,
) -> None:
    """Keep a few episodes with all their numbers, which report.py shows: some of the batch, and answers to the first
    queries of all, with the same noise each time. Both are read with the policy after the update.

    Advantages of the batch are those of its first group, whitened over all episodes of the group: what the losses
    had, if there is one minibatch.
    """
    task, ppo = args.task, args.ppo
    group = slice(ppo.batch_size // ppo.whiten_groups)
    few = slice(min(args.trace_episodes, group.stop))
    tokens, logprobs, rewards, values = (
        x[few] for x in (rollout.context_responses, rollout.logprobs, rollout.rewards, rollout.values)
    )
    new_logprobs, entropies, new_values = policy(tokens, ids.pad, ids.context_length, task.temperature)
    advantages, returns = group_advantages(rollout.rewards[group][None], rollout.values[group][None], ppo)
    advantages, returns = advantages[0, few], returns[0, few]
    of_tokens = {"logprobs": logprobs, "ref_logprobs": episodes.ref_logprobs[few], "kl": episodes.kl[few]}
    of_tokens |= {"scored": episodes.responses[few] != ids.pad, "rewards": rewards, "values": values}
    of_tokens |= {"new_values": new_values, "advantages": advantages, "returns": returns}
    of_tokens |= traces.after_update(logprobs, new_logprobs, entropies, advantages, ppo.cliprange)
    of_episodes = {"scores": episodes.scores, "raw_scores": episodes.raw_scores, "stopped": episodes.stopped}
    of_episodes |= {name: episodes.monitored[name] for name in monitor}
    # A group's part of a minibatch is whitened together; a loss is the mean over the whole minibatch.
    of_group = [(rows[0], {name: x[0] for name, x in seen.items()}) for rows, seen in rollout.seen if rows.dim() > 1]
    everywhere = torch.ones_like(rollout.rewards, dtype=torch.bool)
    shared = traces.statistics_of_minibatches(of_group, rollout.rewards, rollout.values, everywhere, everywhere)
    statistics = traces.of_epochs(shared, few.stop)
    counted = torch.full_like(statistics["tokens"], ppo.batch_size // ppo.nminibatches * task.response_length)
    statistics |= {"tokens": counted, "values": counted.clone()}
    epochs = traces.of_epochs(rollout.seen, few.stop)
    contexts, responses = tokens.tensor_split([ids.context_length], dim=1)
    told = (update, tokenizer, ids.pad, contexts, responses, of_tokens, of_episodes)
    this_run.trace(*told, epochs, statistics)

    queries = stream.first(traces.TRACED, ids.pad).to(tokens.device)
    contexts = texts.add_affixes(queries, ids.prefix, ids.suffix)
    uniforms = episode_noise(args.seed, 0, len(queries), task.response_length).to(tokens.device)
    with precision.mixed_precision(tokens.device, enabled=policy.low_precision):
        responses, logprobs, values, _ = respond(
            policy, contexts, uniforms, pad_id=ids.pad, temperature=task.temperature
        )
        ref_logprobs = reference_logprobs(
            reference, torch.cat([contexts, responses], 1), pad_id=ids.pad, ids=ids, task=task
        )
        truncated_responses = truncate_at(responses, ids.stop, task.truncate_after, ids.pad)
        stopped = has_stop(truncated_responses, ids.stop, task.truncate_after)
        quiet = traces.scorer_of_traces(score, args.rewards.function)
        raw_scores = scale.apply(quiet(queries, truncated_responses).to(tokens.device))
        scores = torch.where(stopped, raw_scores, task.penalty_reward_value)
        rewards, _, kl = compute_rewards(scores, logprobs, ref_logprobs, controller.value)
    of_tokens = {"logprobs": logprobs, "ref_logprobs": ref_logprobs, "kl": kl, "rewards": rewards, "values": values}
    of_tokens |= {"scored": truncated_responses != ids.pad}
    of_episodes = {"scores": scores, "raw_scores": raw_scores, "stopped": stopped}
    for name, function in monitor.items():
        of_episodes[name] = traces.scorer_of_traces(function, args.rewards.monitor)(queries, truncated_responses)
    statistics = {"kl_coef": torch.full((len(queries),), controller.value, dtype=torch.float64)}
    told = (update, tokenizer, ids.pad, contexts, responses, of_tokens, of_episodes)
    this_run.trace(*told, statistics=statistics, again=True)


def finish(
    this_run: run.Run,
    policy: PolicyWithValueHead,
    tokenizer: PreTrainedTokenizerBase,
    stream: texts.QueryStream,
    given: Args,
) -> Path:
    """Save the policy, record the results and draw the curves. Returns the policy's folder."""
    folder = this_run.model_folder / "policy"
    models.save_policy(folder, policy, tokenizer, given)
    last = {f"last_{name}": this_run.last_mean(f"objective/{name}") for name in ("score", "kl", "kl_coef")}
    sizes = this_run.meta["sizes"]
    this_run.finish(PANELS, **last, skipped_queries=stream.position - sizes["updates"] * sizes["batch"])
    this_run.upload("policy")
    return folder


PANELS = {
    "score": ["objective/scores", "objective/gold_scores"],
    "KL from the reference (nats)": ["objective/kl"],
    "KL coefficient": ["objective/kl_coef"],
    "entropy of the policy (nats per token)": ["ppo/policy/entropy"],
    "policy loss": ["ppo/loss/policy"],
    "value loss": ["ppo/loss/value"],
    "value error and variance of returns": ["ppo/val/error", "ppo/returns/var"],
    "clipped share of tokens": ["ppo/policy/clipfrac", "ppo/val/clipfrac"],
}


if __name__ == "__main__":
    cli.run_script(train, lambda argv: cli.parse_args(PRESETS, argv, __doc__))
