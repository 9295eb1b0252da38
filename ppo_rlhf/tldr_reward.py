"""Train a reward model from pairs of summaries: chapter 2, TL;DR summarisation, stage 2 of 3.

People read two summaries of a post and say which is better (Stiennon et al. 2020). The reward model is the fine-tuned
model of `tldr_sft.py` with a scalar head in place of the output layer, read at the end of the summary:

    1. one pass over the comparisons in random order: minimise -log sigmoid(score of chosen - score of rejected)
    2. how often does it agree with people on held-out comparisons? Overall, by split, batch and confidence
    3. normalise: shift the scores so that the mean score of the reference summaries is 0

Next: `tldr_policy.py`. Marks like [T25] name an implementation detail. The original is
vwxyzjn/summarize_from_feedback_details at commit ee77a9a, which reproduced OpenAI's; its file and line stand beside
the mark. [X20] and the like are places where we differ on purpose; see DETAILS.md.

    python ppo_rlhf/tldr_reward.py --preset tales --base_model models/<run>/sft        # no network, two minutes
    python ppo_rlhf/tldr_reward.py --base_model models/<run>/sft --dtype bfloat16 --local_micro_batch_size 8
    accelerate launch --num_processes 8 ppo_rlhf/tldr_reward.py --base_model models/<run>/sft --dtype bfloat16 --track
    python ppo_rlhf/tldr_reward.py --resume runs/<run>                                 # go on after an interruption
"""

import csv
import dataclasses
import hashlib
import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.data import (
    check_model,
    find_paths,
    load_pretrained,
    load_tokenizer,
    model_errors,
    vocabulary_size,
    weight_files,
)
from ppo_rlhf.run import (
    InputError,
    Run,
    above_zero,
    anew_with_lower,
    at_least,
    check_finite,
    check_values,
    deal,
    flag,
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
    Comparisons,
    Posts,
    TldrTaskArgs,
    read_comparisons,
    read_posts,
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
    exp_name: str = "tldr_reward"
    """name of this experiment"""
    seed: int = 44413
    """seed of the head and of the order of the comparisons"""
    base_model: str = ""
    """model to start from: the folder of a fine-tuned model, models/<run>/sft, or a name on the hub"""
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
    """comparisons to train on, the first of the data set; 0: all"""
    batch_size: int = 64
    """comparisons per optimiser step, over all processes"""
    lr: float = 3e-6
    """learning rate of the first step"""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """how the learning rate falls to zero"""
    adam_eps: float = 1e-5
    """epsilon of AdamW"""
    weight_decay: float = 0.01
    """weight decay of AdamW"""
    normalize_posts: int = 0
    """posts whose reference summaries get a mean score of 0, the first of the data set; 0: all"""
    local_micro_batch_size: int = 0
    """comparisons per forward and backward pass on one process; a memory knob; 0: the whole local batch"""
    local_rollout_batch_size: int = 64
    """comparisons (two texts each) or posts that one process scores at a time; a memory knob"""
    task: TldrTaskArgs = field(default_factory=TldrTaskArgs)
    """queries and responses"""


PRESETS = {
    "tldr": Args(task=TASKS["tldr"]),
    "tales": Args(preset="tales", seed=1, batch_size=8, lr=3e-4, normalize_posts=2_048, task=TASKS["tales"]),
}

# ----------------------------------------------------------------------------------------------------------------
# Batch sizes: batch (all processes) > local batch (one process) > micro-batch (one forward pass)
# ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairSizes:
    """What follows from the arguments, the number of comparisons and the number of processes."""

    comparisons: int
    steps: int
    batch: int
    local_batch: int
    local_micro_batch: int


def check_pair_arguments(args: Args) -> None:
    """Refuse numbers that cannot be meant."""
    check_values(args)
    above_zero("", args, "lr", "adam_eps")
    at_least(1, "", args, "batch_size", "local_rollout_batch_size")
    at_least(0, "", args, "num_train", "weight_decay", "normalize_posts", "local_micro_batch_size", "save_interval")
    if not args.base_model:
        raise InputError(f"{flag('base_model')} is empty; give the folder of a fine-tuned model, models/<run>/sft")


def pair_sizes(args: Args, comparisons: int, num_processes: int) -> PairSizes:
    """Divide the global sizes exactly, or say which size does not divide and what would."""
    local_batch = split_evenly("batch_size", args.batch_size, num_processes, "processes")
    return PairSizes(
        comparisons=comparisons,
        steps=math.ceil(comparisons / args.batch_size),
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


def keyed_generator(*key: int | str) -> torch.Generator:
    """A CPU random generator that depends on the key alone, so that noise belongs to an episode, not a process."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


# ----------------------------------------------------------------------------------------------------------------
# Mathematics
# ----------------------------------------------------------------------------------------------------------------


def pairwise_losses(chosen_scores: torch.Tensor, rejected_scores: torch.Tensor) -> torch.Tensor:
    """-log sigmoid(chosen - rejected) of each pair: (batch,), nats."""
    # [T25] vwxyzjn/summarize_from_feedback_details reward.py#L405-L411 @ee77a9a
    return F.softplus(rejected_scores - chosen_scores)


def prefers_chosen(chosen_scores: torch.Tensor, rejected_scores: torch.Tensor) -> torch.Tensor:
    """Whether the chosen summary has the higher score: (batch,) bool. A tie is wrong."""
    # [T26] vwxyzjn/summarize_from_feedback_details reward.py#L410 @ee77a9a
    return chosen_scores > rejected_scores


# ----------------------------------------------------------------------------------------------------------------
# Update
# ----------------------------------------------------------------------------------------------------------------


def score_pairs(
    reward_model: RewardModel, queries: torch.Tensor, chosen: torch.Tensor, rejected: torch.Tensor, pad_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of chosen and rejected summaries (batch, comparison_length) of the same posts: two of (batch,)."""
    # [T25] Both in one forward pass.
    # [T19] [T20] A score is read at the last token that is no padding, wherever the padding lies.
    #       vwxyzjn/summarize_from_feedback_details reward.py#L211-L236, reward.py#L462-L484 @ee77a9a
    tokens = trim_padding(torch.cat([queries, queries]), torch.cat([chosen, rejected]), pad_id=pad_id)
    chosen_scores, rejected_scores = reward_model(tokens, pad_id).chunk(2)
    return chosen_scores, rejected_scores


def pairs_update(
    reward_model: RewardModel,
    optimizer: torch.optim.Optimizer,
    comparisons: Comparisons,
    inds: torch.Tensor,
    counts: torch.Tensor,
    pad_id: int,
    micro_batch: int,
    accelerator: Accelerator | None = None,
) -> dict[str, torch.Tensor]:
    """One optimiser step on comparisons with these indices (local_batch,); those that do not count weigh nothing.

    Returns numbers, 0-d, whose mean over processes is loss, accuracy and mean scores of the whole batch, and the
    gradient norm.
    """
    device = reward_model.gain.device
    processes = accelerator.num_processes if accelerator else 1
    count = counts.sum().to(device)
    count = accelerator.reduce(count, "sum") if accelerator else count
    sums = torch.zeros(4, device=device, dtype=torch.float64)
    # [T47] Gradients of micro-batches add up, and we step when all are done; accelerate's own counter is not used.
    optimizer.zero_grad()
    for micro_inds, micro_counts in zip(inds.split(micro_batch), counts.split(micro_batch), strict=True):
        queries, chosen, rejected = (
            t[micro_inds].to(device) for t in (comparisons.queries, comparisons.chosen, comparisons.rejected)
        )
        weights = micro_counts.to(device)  # (micro_batch,)
        scores = score_pairs(reward_model, queries, chosen, rejected, pad_id)  # two of (micro_batch,)
        losses = pairwise_losses(*scores)
        ((losses * weights).sum() / count * processes).backward()  # gradients are averaged over processes
        rows = torch.stack([losses, prefers_chosen(*scores), *scores]).detach().double()  # (4, micro_batch)
        sums += (rows * weights).sum(1)
    if accelerator is not None and not isinstance(reward_model, FSDPModule):  # which does it in the backward pass
        average_gradients(reward_model, accelerator)
    gradient = whole(gradient_norm(reward_model))
    optimizer.step()
    # [T30] vwxyzjn/summarize_from_feedback_details reward.py#L420-L503 @ee77a9a
    names = ("loss", "accuracy", "chosen_rewards", "rejected_rewards")
    stats = {f"train/rm/{name}": total / count * processes for name, total in zip(names, sums, strict=True)}
    return stats | {"train/rm/gradient_norm": gradient}


# ----------------------------------------------------------------------------------------------------------------
# Evaluation and normalisation
# ----------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def agreement(
    reward_model: RewardModel, comparisons: Comparisons, pad_id: int, chunk: int, accelerator: Accelerator
) -> tuple[dict[str, float], list[dict]]:
    """Agreement with people: accuracy overall and by split, batch and confidence, and one row for each comparison."""
    # [T28] [X22] Every comparison counts once.
    #       vwxyzjn/summarize_from_feedback_details reward.py#L238-L269, reward.py#L434-L452 @ee77a9a
    device = accelerator.device

    def score(inds: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors = (t[inds].to(device) for t in (comparisons.queries, comparisons.chosen, comparisons.rejected))
        return score_pairs(reward_model, *tensors, pad_id)

    scores = map_rows(score, len(comparisons), chunk, accelerator)  # two of (comparisons,)
    correct = prefers_chosen(*scores).tolist()
    rows = [
        {**group, "chosen_reward": chosen, "rejected_reward": rejected, "correct": int(right)}
        for group, chosen, rejected, right in zip(
            comparisons.groups, *(s.tolist() for s in scores), correct, strict=True
        )
    ]
    groups: dict[str, list[int]] = {"accuracy": [row["correct"] for row in rows]}
    for row in rows:
        for kind in ("split", "batch", "confidence"):
            groups.setdefault(f"accuracy/{kind}/{row[kind]}", []).append(row["correct"])
    return {name: sum(values) / len(values) for name, values in sorted(groups.items())}, rows


@torch.no_grad()
def shift_to_references(
    reward_model: RewardModel, posts: Posts, pad_id: int, chunk: int, accelerator: Accelerator
) -> dict[str, float]:
    """Set the bias so that the reference summaries of these posts have a mean score of 0; the scale stays.

    Returns the shift, and deviation and extremes of their scores after it.
    """
    # [T29] vwxyzjn/summarize_from_feedback_details reward.py#L456-L520 @ee77a9a
    device = accelerator.device

    def score(inds: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tokens = trim_padding(posts.queries[inds], posts.references[inds], pad_id=pad_id)
        return (reward_model(tokens.to(device), pad_id),)

    (scores,) = map_rows(score, len(posts), chunk, accelerator)
    mean = scores.double().mean().item()
    reward_model.bias.sub_(mean)
    # [X33] vwxyzjn/summarize_from_feedback_details reward.py#L495 @ee77a9a
    results = {"std": scores.double().std(unbiased=False), "min": scores.min() - mean, "max": scores.max() - mean}
    return {"eval/rm/shift": -mean} | {f"eval/rm/normalized_{name}": value.item() for name, value in results.items()}


# ----------------------------------------------------------------------------------------------------------------
# Logging, the saved reward model
# ----------------------------------------------------------------------------------------------------------------

PANELS = {
    "loss (nats)": ["train/rm/loss"],
    "accuracy": ["train/rm/accuracy"],
    "mean score": ["train/rm/chosen_rewards", "train/rm/rejected_rewards"],
    "learning rate": ["train/rm/lr"],
}


FINAL_NORM_BIASES = ("ln_f.bias", "final_layer_norm.bias", "norm.bias")  # GPT-2; GPT-NeoX; others


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


# ----------------------------------------------------------------------------------------------------------------
# Train
# ----------------------------------------------------------------------------------------------------------------


def train(args: Args, joint: dict | None = None) -> Path:
    """Train a reward model and return the folder models/<run>/reward, on every process.

    joint: arguments, time stamp and runs/ folder of tldr_all.py, if it runs this. Raises InputError, a ValueError:
    bad arguments before anything is written, a disk that fails whenever it fails.
    """
    accelerator = make_accelerator()
    check_pair_arguments(args)
    given, args = args, find_paths(args, joint)  # given: what meta.json and the saved models name
    device, dtype = accelerator.device, torch.float64 if args.dtype == "float64" else torch.float32
    autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    tokenizer = load_tokenizer(args.base_model, args.trust_remote_code)
    ids = tldr_ids(args.task, tokenizer)
    comparisons = read_comparisons(args.task, tokenizer, "train", limit=args.num_train)
    held_out = {
        "validation": read_comparisons(args.task, tokenizer, "validation"),
        "validation_cnndm": read_comparisons(args.task, tokenizer, "validation", articles=True),
    }
    held_out = {name: rows for name, rows in held_out.items() if len(rows)}
    posts = read_posts(args.task, tokenizer, "train", args.normalize_posts)
    sizes = pair_sizes(args, len(comparisons), accelerator.num_processes)
    language_model = load_pretrained(args.base_model, dtype, args.trust_remote_code).to(device)
    longest = max(rows.longest(ids.pad) for rows in (comparisons, *held_out.values(), posts))
    check_model(language_model, args.base_model, longest, ids.pad, read_tokens)
    with model_errors(args.base_model), torch.device("meta"):  # what it is saved as exists for this kind of model
        AutoModelForSequenceClassification.from_config(
            language_model.config, trust_remote_code=args.trust_remote_code
        )
    # [T18] A random head on the body of the fine-tuned model. The seed is the same on every process.
    #       vwxyzjn/summarize_from_feedback_details reward.py#L173-L208 @ee77a9a
    torch.manual_seed(args.seed)
    reward_model = RewardModel(language_model.base_model).to(device, dtype)
    # [X23] Nothing is learned beside the head: the gain stays 1, and the bias waits for step 3.
    reward_model.gain.requires_grad_(False)
    reward_model.bias.requires_grad_(False)
    reward_model.forward = autocast()(reward_model.forward)
    shard(reward_model, reward_model.lm_backbone._no_split_modules or (), accelerator)
    trained = [parameter for parameter in reward_model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, args.lr, eps=args.adam_eps, weight_decay=args.weight_decay, fused=True)

    run = Run(given, accelerator, dataclasses.asdict(sizes), joint, weight_files(args))
    first_step = 0
    if checkpoint := run.load_checkpoint():
        tensors, state = checkpoint
        first_step = state["step"]
        restore_training_state(reward_model, optimizer, tensors)
    run.start_logging(first_step)

    # 1. One pass over the comparisons.
    # [T27] [X22] One order for all processes, so that each comparison is seen once.
    #       vwxyzjn/summarize_from_feedback_details reward.py#L82, reward.py#L278-L293 @ee77a9a
    order = torch.randperm(len(comparisons), generator=keyed_generator(args.seed, "comparisons"))
    with run.progress("reward model", sizes.steps, first_step) as advance:
        for step in range(first_step, sizes.steps):
            # [X32] One step of the schedule for each optimiser step, the last, smaller one too.
            #       vwxyzjn/summarize_from_feedback_details reward.py#L420 @ee77a9a
            lr = scheduled_lr(args.lr, args.schedule, step, sizes.steps)
            for group in optimizer.param_groups:
                group["lr"] = lr
            inds, counts = deal(
                order[step * sizes.batch : (step + 1) * sizes.batch],
                sizes.batch,
                accelerator.process_index,
                accelerator.num_processes,
            )
            stats = pairs_update(
                reward_model, optimizer, comparisons, inds, counts, ids.pad, sizes.local_micro_batch, accelerator
            )
            means = mean_over_processes(stats, accelerator)
            check_finite(means, step, anew_with_lower("lr"))
            run.log(step, means | {"train/rm/lr": lr})
            advance(f"loss {means['train/rm/loss']:.3f}, accuracy {means['train/rm/accuracy']:.2f}")
            if run.is_time_to_save(step + 1, sizes.steps):
                run.save_checkpoint(step + 1, training_state(reward_model, optimizer), {})

    results: dict = {"ceiling": comparisons.ceiling, "identical": comparisons.identical, "cut": comparisons.cut}
    with autocast(), gathered(reward_model):
        # 2. Agreement with people.
        for name, rows in held_out.items():
            accuracy, table = agreement(reward_model, rows, ids.pad, args.local_rollout_batch_size, accelerator)
            means = {
                f"{name}/{side}": fmean(row[side] for row in table) for side in ("chosen_reward", "rejected_reward")
            }
            check_finite(means, sizes.steps, anew_with_lower("lr"))
            results |= {f"eval/rm/{name}/{key}": value for key, value in accuracy.items()}
            if accelerator.is_main_process:
                with (run.folder / f"{name}.csv").open("w", newline="") as file:
                    writer = csv.DictWriter(file, list(table[0]), lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(table)

        # 3. Normalise.
        normalised = shift_to_references(reward_model, posts, ids.pad, args.local_rollout_batch_size, accelerator)
        check_finite(normalised, sizes.steps, anew_with_lower("lr"))
        results |= normalised

    folder, plain = run.model_folder / "reward", unsharded(reward_model, args.trust_remote_code)
    if accelerator.is_main_process:
        info = {"kind": "reward model", "base_model": given.base_model, "vocab_size": ids.pad}
        info |= {"label_dataset": given.task.comparisons, "task": dataclasses.asdict(given.task)}
        save_reward_model(folder, plain, tokenizer, info, args.trust_remote_code)
    run.finish(PANELS, **results)
    if args.upload_model and accelerator.is_main_process:
        upload_model(folder, args.hf_entity, run.model_folder.name)
    accelerator.wait_for_everyone()
    return folder


if __name__ == "__main__":
    run_script(lambda: train(parse_args(PRESETS, description=__doc__)))
