"""Supervised fine-tuning: chapter 2, TL;DR summarisation, stage 1 of 3.

A pretrained language model learns to summarise posts by imitating the summaries that people wrote (Stiennon et
al. 2020). It is ordinary language modelling on post and summary together; what makes it a stage of its own is that
the model learns the form of the task, and that a summary ends with the end-of-text token:

    1. one pass over the posts in random order, AdamW, learning rate on a cosine to zero
    2. summarise held-out posts, at a temperature near zero, and compare with the reference summaries (ROUGE)

Next: `tldr_reward.py` and `tldr_policy.py`; `tldr_all.py` runs all three. Marks like [T21] name an implementation
detail. The original is vwxyzjn/summarize_from_feedback_details at commit ee77a9a, which reproduced OpenAI's; its file
and line stand beside the mark. [X20] and the like are places where we differ on purpose; see DETAILS.md.

    python ppo_rlhf/tldr_sft.py --preset tales                            # no network, two minutes
    python ppo_rlhf/tldr_sft.py --dtype bfloat16 --local_micro_batch_size 8             # Pythia 1B, one GPU
    accelerate launch --num_processes 8 ppo_rlhf/tldr_sft.py --dtype bfloat16 --local_micro_batch_size 8 --track
    python ppo_rlhf/tldr_sft.py --resume runs/<run>                       # go on after an interruption
"""

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StaticCache

from ppo_rlhf.data import check_model, find_paths, load_pretrained, load_tokenizer, weight_files
from ppo_rlhf.run import (
    Run,
    above_zero,
    anew_with_lower,
    at_least,
    check_finite,
    check_values,
    deal,
    gathered,
    make_accelerator,
    map_rows,
    mean_over_processes,
    parse_args,
    restore_training_state,
    rows_at_a_time,
    run_script,
    shard,
    split_evenly,
    training_state,
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
class Args:
    preset: str = "tldr"
    """names a set of defaults: tldr, tales"""
    exp_name: str = "tldr_sft"
    """name of this experiment"""
    seed: int = 44413
    """seed of the order of the posts and of the sampling noise"""
    base_model: str = "EleutherAI/pythia-1b-deduped"
    """causal language model to start from: a folder, a name on the hub, or `tldr-tales`"""
    trust_remote_code: bool = False
    """run Python code that comes with the base model"""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """arithmetic; bfloat16 keeps float32 weights and casts in matrix products; the paper's choice"""
    resume: str = ""
    """folder of a run to go on with: runs/<run>; its arguments are taken from there"""
    save_interval: int = 200
    """steps between checkpoints; 0: one at the end"""
    track: bool = False
    """log to Weights & Biases"""
    wandb_project_name: str = "ppo_rlhf"
    """project on Weights & Biases"""
    wandb_entity: str | None = None
    """team on Weights & Biases"""
    upload_model: bool = False
    """push the trained model to the Hugging Face hub"""
    hf_entity: str = ""
    """user or organisation on the hub; empty: whoever is logged in"""
    num_train: int = 0
    """posts to train on, the first of the data set; 0: all"""
    epochs: int = 1
    """passes over the posts"""
    batch_size: int = 128
    """posts per optimiser step, over all processes"""
    lr: float = 3e-6
    """learning rate of the first step"""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """how the learning rate falls to zero"""
    adam_eps: float = 1e-5
    """epsilon of AdamW"""
    weight_decay: float = 0.01
    """weight decay of AdamW"""
    eval_posts: int = 0
    """held-out posts of each split to summarise after training; 0: all"""
    local_micro_batch_size: int = 0
    """posts per forward and backward pass on one process; a memory knob; 0: the whole local batch"""
    local_rollout_batch_size: int = 64
    """posts that one process summarises at a time; a memory knob"""
    task: TldrTaskArgs = field(default_factory=TldrTaskArgs)
    """queries and responses"""


PRESETS = {
    "tldr": Args(task=TASKS["tldr"]),
    "tales": Args(
        preset="tales", seed=1, base_model="tldr-tales", batch_size=16, lr=5e-4, eval_posts=512, task=TASKS["tales"]
    ),
}

# ----------------------------------------------------------------------------------------------------------------
# Batch sizes: batch (all processes) > local batch (one process) > micro-batch (one forward pass)
# ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SftSizes:
    """What follows from the arguments, the number of posts and the number of processes."""

    posts: int
    steps_per_epoch: int
    steps: int
    batch: int
    local_batch: int
    local_micro_batch: int


def check_sft_arguments(args: Args) -> None:
    """Refuse numbers that cannot be meant."""
    check_values(args)
    above_zero("", args, "lr", "adam_eps")
    at_least(1, "", args, "epochs", "batch_size", "local_rollout_batch_size")
    at_least(0, "", args, "num_train", "weight_decay", "eval_posts", "local_micro_batch_size", "save_interval")


def sft_sizes(args: Args, posts: int, num_processes: int) -> SftSizes:
    """Divide the global sizes exactly, or say which size does not divide and what would."""
    local_batch = split_evenly("batch_size", args.batch_size, num_processes, "processes")
    steps_per_epoch = math.ceil(posts / args.batch_size)
    return SftSizes(
        posts=posts,
        steps_per_epoch=steps_per_epoch,
        steps=args.epochs * steps_per_epoch,
        batch=args.batch_size,
        local_batch=local_batch,
        local_micro_batch=rows_at_a_time("local_micro_batch_size", args.local_micro_batch_size, local_batch),
    )


# ----------------------------------------------------------------------------------------------------------------
# Model
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


class LanguageModel(nn.Module):
    """A causal language model that says how likely it finds each token of a text."""

    def __init__(self, lm_backbone: PreTrainedModel, vocab_size: int):
        """vocab_size: number of ids of the tokenizer; the output layer may have more rows [T14]."""
        super().__init__()
        self.lm_backbone = lm_backbone
        self.vocab_size = vocab_size

    def forward(self, tokens: torch.Tensor, pad_id: int) -> torch.Tensor:
        """Log-probs (batch, length - 1) of tokens (batch, length), without the first; 0 where there is no token."""
        # [T15] vwxyzjn/summarize_from_feedback_details sft.py#L205-L212 @ee77a9a
        # [T16] Positions are always given. The original gives none, which is right for rotary ones only.
        #       vwxyzjn/summarize_from_feedback_details ppo.py#L358-L368, reward.py#L223-L233 @ee77a9a
        hidden_states = read_tokens(self.lm_backbone, tokens, pad_id, slice(0, -1))  # (batch, length - 1, width)
        logits = scaled_logits(self.lm_backbone, hidden_states, self.vocab_size, temperature=1.0)
        # [T21] Every token but the first is predicted, those of the query and the end-of-text token too.
        #       vwxyzjn/summarize_from_feedback_details sft.py#L389-L399 @ee77a9a
        mask = next_token_mask(tokens, pad_id)
        targets = tokens[:, 1:].masked_fill(~mask, 0)
        logprobs = -F.cross_entropy(logits.transpose(1, 2), targets.long(), reduction="none")
        return logprobs.masked_fill(~mask, 0.0)


def next_token_mask(tokens: torch.Tensor, pad_id: int) -> torch.Tensor:
    """Where a token has a token before it: (batch, length) gives (batch, length - 1) bool."""
    # [X31] The first token of a text is predicted from nothing, wherever its padding lies.
    real = tokens != pad_id
    return real[:, 1:] & real[:, :-1]


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


# ----------------------------------------------------------------------------------------------------------------
# Update
# ----------------------------------------------------------------------------------------------------------------


def sft_update(
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
    pad_id: int,
    micro_batch: int,
    accelerator: Accelerator | None = None,
) -> dict[str, torch.Tensor]:
    """One optimiser step on texts (local_batch, length); rows that are all padding count as nothing.

    Returns numbers, 0-d, whose mean over processes is the loss and the number of predicted tokens of the whole batch,
    and the gradient norm.
    """
    # [T22] [X21] The loss is the mean over all tokens of the batch, so that a token of a long text counts as much as
    #       one of a short text, however the batch is split.
    #       vwxyzjn/summarize_from_feedback_details sft.py#L390-L409 @ee77a9a
    count = next_token_mask(tokens, pad_id).sum()
    processes = accelerator.num_processes if accelerator else 1
    count = accelerator.reduce(count, "sum") if accelerator else count
    total = torch.zeros((), device=tokens.device)
    # [T47] Gradients of micro-batches add up, and we step when all are done; accelerate's own counter is not used.
    optimizer.zero_grad()
    for micro_tokens in tokens.split(micro_batch):
        logprobs = model(trim_padding(micro_tokens, pad_id=pad_id), pad_id)
        loss = -logprobs.sum() / count  # this micro-batch's share
        (loss * processes).backward()  # gradients are averaged over processes
        total = total + loss.detach()
    if accelerator is not None and not isinstance(model, FSDPModule):  # which does it in the backward pass
        average_gradients(model, accelerator)
    gradient = whole(gradient_norm(model))
    optimizer.step()
    return {"loss": total * processes, "tokens": count, "gradient_norm": gradient}


# ----------------------------------------------------------------------------------------------------------------
# Evaluation
# ----------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def summarise_held_out(
    model: LanguageModel,
    posts: Posts,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    ids: TldrIds,
    args: Args,
    accelerator: Accelerator,
) -> tuple[dict[str, float], list[dict]]:
    """Summarise held-out posts. Returns loss, ROUGE and share of finished summaries, and the rows of the table."""
    # [T23] vwxyzjn/summarize_from_feedback_details sft.py#L215-L281, sft.py#L411-L425 @ee77a9a
    device, task = accelerator.device, args.task
    generator = keyed_generator(args.seed, "evaluate", split)
    noise = torch.rand(len(posts), task.response_length, generator=generator, dtype=torch.float64)

    def of_rows(inds: torch.Tensor) -> tuple[torch.Tensor, ...]:
        queries, references = posts.queries[inds].to(device), posts.references[inds].to(device)
        contexts, texts = (trim_padding(*tokens, pad_id=ids.pad) for tokens in ((queries,), (queries, references)))
        responses, _, _ = generate(
            model.lm_backbone, contexts, noise[inds].to(device), ids.pad, ids.vocab_size, task.eval_temperature
        )
        return (
            truncate_at(responses, ids.stop, 0, ids.pad),
            model(texts, ids.pad).sum(1),
            next_token_mask(texts, ids.pad).sum(1),
        )

    responses, logprobs, counts = map_rows(of_rows, len(posts), args.local_rollout_batch_size, accelerator)
    finished = has_stop(responses, ids.stop, 0)  # (posts,)
    rows = evaluation_rows(tokenizer, ids.pad, posts.queries, responses, posts.references)
    scores = rouge([row["response"] for row in rows], [row["reference"] for row in rows])
    # [T24] vwxyzjn/summarize_from_feedback_details sft.py#L407-L425 @ee77a9a
    results = {f"{split}/sft/loss": -logprobs.double().sum().item() / counts.sum().item()}
    results |= {f"{split}/sft/rouge/{name}": value for name, value in scores.items()}
    return results | {f"{split}/sft/eos_rate": finished.double().mean().item()}, rows


# ----------------------------------------------------------------------------------------------------------------
# Logging, the saved model
# ----------------------------------------------------------------------------------------------------------------

PANELS = {
    "loss (nats per token)": ["train/sft/loss"],
    "learning rate": ["train/sft/lr"],
    "gradient norm": ["train/sft/gradient_norm"],
}


# ----------------------------------------------------------------------------------------------------------------
# Train
# ----------------------------------------------------------------------------------------------------------------


def train(args: Args, joint: dict | None = None) -> Path:
    """Fine-tune a language model and return the folder models/<run>/sft, on every process.

    joint: arguments, time stamp and runs/ folder of tldr_all.py, if it runs this. Raises InputError, a ValueError:
    bad arguments before anything is written, a disk that fails whenever it fails.
    """
    accelerator = make_accelerator()
    check_sft_arguments(args)
    given, args = args, find_paths(args, joint)  # given: what meta.json and the saved models name
    device, dtype = accelerator.device, torch.float64 if args.dtype == "float64" else torch.float32
    autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    tokenizer = load_tokenizer(args.base_model, args.trust_remote_code)
    ids = tldr_ids(args.task, tokenizer)
    posts = read_posts(args.task, tokenizer, "train", args.num_train)
    held_out = {split: read_posts(args.task, tokenizer, split, args.eval_posts) for split in ("validation", "test")}
    sizes = sft_sizes(args, len(posts), accelerator.num_processes)
    rouge(["a"], ["a"])  # a missing package is said now, not after the training
    # [T17] Without dropout.
    #       vwxyzjn/summarize_from_feedback_details sft.py#L153-L157 @ee77a9a
    lm_backbone = load_pretrained(args.base_model, dtype, args.trust_remote_code).to(device)
    length = args.task.query_length + args.task.response_length
    check_model(lm_backbone, args.base_model, length, ids.pad, read_tokens)
    model = LanguageModel(lm_backbone, ids.vocab_size)
    model.forward = autocast()(model.forward)
    shard(model, lm_backbone._no_split_modules or (), accelerator)
    optimizer = torch.optim.AdamW(
        model.parameters(), args.lr, eps=args.adam_eps, weight_decay=args.weight_decay, fused=True
    )

    run = Run(given, accelerator, dataclasses.asdict(sizes), joint, weight_files(args))
    first_step = 0
    if checkpoint := run.load_checkpoint():
        tensors, state = checkpoint
        first_step = state["step"]
        restore_training_state(model, optimizer, tensors)
    run.start_logging(first_step)

    # 1. Passes over the posts. Their order depends on the seed alone.
    with run.progress("SFT", sizes.steps, first_step) as advance:
        for step in range(first_step, sizes.steps):
            epoch, batch = divmod(step, sizes.steps_per_epoch)
            # [X32] One step of the schedule for each optimiser step, the last, smaller one too.
            #       vwxyzjn/summarize_from_feedback_details sft.py#L405 @ee77a9a
            lr = scheduled_lr(args.lr, args.schedule, step, sizes.steps)
            for group in optimizer.param_groups:
                group["lr"] = lr
            order = torch.randperm(len(posts), generator=keyed_generator(args.seed, "posts", epoch))
            inds, counts = deal(
                order[batch * sizes.batch : (batch + 1) * sizes.batch],
                sizes.batch,
                accelerator.process_index,
                accelerator.num_processes,
            )
            # [T09] The query and its reference are one text; where the padding lies makes no difference.
            #       vwxyzjn/summarize_from_feedback_details tldr_dataset.py#L202-L212 @ee77a9a
            tokens = torch.cat([posts.queries[inds], posts.references[inds]], dim=1)  # (local_batch, length)
            tokens = tokens.masked_fill(~counts.unsqueeze(1), ids.pad).to(device)
            stats = sft_update(model, optimizer, tokens, ids.pad, sizes.local_micro_batch, accelerator)
            means = mean_over_processes({f"train/sft/{name}": value for name, value in stats.items()}, accelerator)
            check_finite(means, step, anew_with_lower("lr"))
            run.log(step, means | {"train/sft/lr": lr})
            advance(f"loss {means['train/sft/loss']:.3f}")
            if run.is_time_to_save(step + 1, sizes.steps):
                run.save_checkpoint(step + 1, training_state(model, optimizer), {})

    # 2. Summarise held-out posts.
    results = {"too_long": posts.too_long}
    for split, split_posts in held_out.items():
        with autocast(), gathered(model):
            scores, rows = summarise_held_out(model, split_posts, split, tokenizer, ids, args, accelerator)
        check_finite(scores, sizes.steps, anew_with_lower("lr"))
        results |= scores
        if accelerator.is_main_process:
            name = "evaluation.jsonl" if split == "validation" else f"evaluation_{split}.jsonl"
            (run.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        if split == "validation":
            run.log_samples(sizes.steps, sample_table(rows[:3]))

    folder = run.model_folder / "sft"
    weights = whole_state(lm_backbone)
    if accelerator.is_main_process:
        lm_backbone.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)
        info = {"kind": "sft model", "base_model": given.base_model, "vocab_size": ids.pad}
        write_json(folder / "ppo_rlhf.json", info | {"task": dataclasses.asdict(given.task)})
    run.finish(PANELS, **results)
    if args.upload_model and accelerator.is_main_process:
        upload_model(folder, args.hf_entity, run.model_folder.name)
    accelerator.wait_for_everyone()
    return folder


if __name__ == "__main__":
    run_script(lambda: train(parse_args(PRESETS, description=__doc__)))
