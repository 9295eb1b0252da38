"""Train a reward model from pairs of summaries: chapter 2, TL;DR summarisation, stage 2 of 3.

People read two summaries of a post and say which is better (Stiennon et al. 2020). The reward model is the fine-tuned
model of `tldr/sft.py` with a scalar head in place of the output layer, read at the end of the summary:

    1. one pass over the comparisons in random order: minimise -log sigmoid(score of chosen - score of rejected)
    2. measure how often it agrees with people on held-out comparisons: overall, by split, batch and confidence
    3. normalise: shift the scores so that the mean score of the reference summaries is 0

`train()` has the three steps, and `pairs_update()` below it makes one optimiser step. The reward model is that of
`train_reward.py`; loading, logs and checkpoints are those of `train_policy.py`. Next: `tldr/policy.py`.

Marks like [T25] name an implementation detail. The original is vwxyzjn/summarize_from_feedback_details at commit
ee77a9a, which reproduced OpenAI's; files and lines next to marks are the original's. Marks like [X22] are places
where we differ on purpose: docs/reference.

    python ppo_rlhf/tldr/reward.py --preset posts --base_model models/<run>/sft        # no network, two minutes
    python ppo_rlhf/tldr/reward.py --base_model models/<run>/sft --dtype bfloat16 --local_micro_batch_size 8
    accelerate launch --num_processes 8 ppo_rlhf/tldr/reward.py --base_model models/<run>/sft --dtype bfloat16 --track
    python ppo_rlhf/tldr/reward.py --resume runs/<run>                                 # resume after an interruption
"""

from __future__ import annotations

import csv
import dataclasses
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import tqdm
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf import train_reward
from ppo_rlhf.tldr import models, packing, posts
from ppo_rlhf.tldr.sft import cosine_lr
from ppo_rlhf.tldr.shares import deal, map_rows
from ppo_rlhf.train_policy import (
    Arguments,
    InputError,
    Run,
    average_gradients,
    check_finite,
    check_model,
    checked,
    float64_device,
    input_errors,
    keyed_generator,
    load_pretrained,
    make_accelerator,
    model_errors,
    parse_args,
    run_script,
    split_evenly,
    weights_dtype,
)
from ppo_rlhf.train_reward import prepare, save_reward_model

# ---- Arguments -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Args(Arguments):
    preset: str = "tldr"
    """names a set of defaults: tldr, posts, reviews"""
    exp_name: Annotated[str, Field(pattern=r"^[\w.+ -]{1,150}$")] = "tldr_reward"
    """name of this experiment"""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 44413
    """seed of the head and of the order of the comparisons"""
    base_model: str = ""
    """model to start from: the folder of a fine-tuned model, models/<run>/sft, or a name on the hub"""
    trust_remote_code: bool = False
    """run Python code that comes with the base model"""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """arithmetic; bfloat16 keeps float32 weights and casts in matrix products"""
    gradient_checkpointing: bool = False
    """keep only the inputs of each layer and compute the rest again in the backward pass; saves memory, costs a
    forward pass"""
    task: posts.TaskArgs = field(default_factory=posts.TaskArgs)
    """queries and responses"""
    num_train: NonNegativeInt = 0
    """comparisons to train on, the first of the data set; 0: all"""
    batch_size: PositiveInt = 64
    """comparisons per optimiser step, over all processes"""
    lr: PositiveFloat = 3e-6
    """learning rate of the first step; it falls to 0 along a cosine"""
    weight_decay: NonNegativeFloat = 0.01
    """weight decay of AdamW"""
    normalize_posts: NonNegativeInt = 0
    """posts whose reference summaries get a mean score of 0, the first of the data set; 0: all"""
    local_micro_batch_size: PositiveInt = 8
    """comparisons per forward and backward pass on one process, at most; changes memory and speed, not numbers"""
    local_rollout_batch_size: PositiveInt = 64
    """comparisons (two texts each) or posts per pass without gradients on one process, at most; changes memory and
    speed, not numbers"""
    resume: str = ""
    """folder of a run to resume: runs/<run>; its arguments are taken from there"""
    save_interval: NonNegativeInt = 200
    """steps between checkpoints; 0: one at the end"""
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


PRESETS = {
    "tldr": Args(task=posts.TASKS["tldr"]),
    "posts": Args(preset="posts", seed=1, batch_size=8, lr=3e-4, normalize_posts=2_048, task=posts.TASKS["posts"]),
    "reviews": Args(
        preset="reviews", seed=1, batch_size=32, lr=5e-5, normalize_posts=512, task=posts.TASKS["reviews"]
    ),
}


# ---- Train -----------------------------------------------------------------------------------------------------


def train(args: Args, timestamp: int | None = None) -> Path:
    """Train a reward model and return the folder models/<run>/reward, on every process.

    timestamp: ends the run's name, if another run shares it. Raises InputError, a ValueError: on bad arguments before
    anything is written; later if a number is impossible, or if a disk fails.
    """
    args = checked(args)
    accelerator = make_accelerator(args.dtype)
    device = accelerator.device
    task = args.task
    local_batch = split_evenly("--batch_size", args.batch_size, accelerator.num_processes, "processes")
    pass_rows = args.local_rollout_batch_size  # rows of a pass without gradients
    if not args.base_model:
        raise InputError("--base_model is empty; give the folder of a fine-tuned model, models/<run>/sft")

    tokenizer = models.load_tokenizer(args.base_model, args.trust_remote_code)
    ids = posts.task_ids(task, tokenizer)
    data = read_data(args, tokenizer)
    comparisons = data.comparisons
    sizes = {
        "comparisons": len(comparisons),
        "steps": math.ceil(len(comparisons) / args.batch_size),
        "batch": args.batch_size,
        "local_batch": local_batch,
    }
    dtype = weights_dtype(args, frozen=False)
    language_model = load_pretrained(args.base_model, dtype, args.trust_remote_code).to(device)
    packing.enable(language_model)
    check_model(language_model, args.base_model, data.longest, ids.pad)
    prepare(language_model, args)
    # [T18] A random head on the body of the fine-tuned model. The seed is the same on every process.
    #       reward.py#L173-L208
    torch.manual_seed(args.seed)
    reward_model = RewardModel(language_model.base_model).to(device, dtype)
    trained = [parameter for parameter in reward_model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, args.lr, eps=1e-5, weight_decay=args.weight_decay, fused=True)

    run = Run(args, accelerator, sizes, timestamp)
    info = {
        "kind": "reward model",
        "base_model": args.base_model,
        "vocab_size": ids.vocab_size,
        "label_dataset": task.comparisons,
        "task": dataclasses.asdict(task),
    }
    trust = args.trust_remote_code
    run.try_to_save(lambda folder: save_reward_model(folder, reward_model, tokenizer, info, trust, weights=False))
    state = run.resume(reward_model, optimizer, {"step": 0}, total=sizes["steps"])
    run.open_logs(state["step"], config={})

    # 1. Pass over the comparisons, once.
    # [T27] [X22] One order for all processes, so that each comparison is seen once.
    #       reward.py#L82, reward.py#L278-L293
    order = torch.randperm(len(comparisons), generator=keyed_generator(args.seed, "comparisons"))
    steps = range(state["step"], sizes["steps"])
    seconds = 0.1 if sys.stderr.isatty() else 30.0  # between two updates of the bar; a log file gets few
    bar = tqdm(steps, desc="reward model", initial=state["step"], total=sizes["steps"], mininterval=seconds)
    for step in bar:
        # [X32] One step of the schedule for each optimiser step, the last, smaller one too.   reward.py#L420
        optimizer.param_groups[0]["lr"] = cosine_lr(args.lr, step, sizes["steps"])
        batch_inds = order[step * args.batch_size : (step + 1) * args.batch_size]
        # (local_batch,); the last batch may be short, and `counts` says which of its rows are none.
        mb_inds, counts = deal(batch_inds, args.batch_size, accelerator.process_index, accelerator.num_processes)
        metrics = pairs_update(
            reward_model,
            optimizer,
            comparisons,
            mb_inds,
            counts,
            ids.pad,
            accelerator,
            micro_batch=args.local_micro_batch_size,
        )
        metrics["train/rm/lr"] = optimizer.param_groups[0]["lr"]
        check_finite(metrics, step)
        run.log(step, metrics)
        bar.set_postfix_str(f"loss {metrics['train/rm/loss']:.3f}, accuracy {metrics['train/rm/accuracy']:.2f}")
        state = {"step": step + 1}
        stopping = run.told_to_stop()
        if stopping or step + 1 == sizes["steps"] or (step + 1) % (args.save_interval or sizes["steps"]) == 0:
            run.save_checkpoint(reward_model, optimizer, state)
        if stopping:
            accelerator.print(f"stopped after step {step + 1}; resume with --resume {run.folder}")
            sys.exit(0)

    run.stop_at_once()
    # 2. Measure the agreement with people.
    results = {"ceiling": comparisons.ceiling, "identical": comparisons.identical, "cut": comparisons.cut}
    for name, rows in data.held_out.items():
        accuracies, table = agreement(reward_model, rows, ids.pad, pass_rows, accelerator)
        means = {f"{name}/{side}": fmean(row[side] for row in table) for side in ("chosen_reward", "rejected_reward")}
        check_finite(means, sizes["steps"])
        results |= {f"eval/rm/{name}/{key}": value for key, value in accuracies.items()}
        if accelerator.is_main_process:
            with (run.folder / f"{name}.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, list(table[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(table)
        if name == "validation":
            run.log_samples(sizes["steps"], sample_rows(rows, table, tokenizer, ids))

    # 3. Normalise.
    normalised = shift_to_references(reward_model, data.train_posts, ids.pad, pass_rows, accelerator)
    check_finite(normalised, sizes["steps"])
    results |= normalised

    folder = run.models / "reward"
    if accelerator.is_main_process:
        with input_errors(f"{folder} cannot be saved; the checkpoints are kept"):
            save_reward_model(folder, reward_model, tokenizer, info, trust)
    run.finish("reward", **results)
    return folder


def pairs_update(
    reward_model: train_reward.RewardModel,
    optimizer: torch.optim.Optimizer,
    comparisons: posts.Comparisons,
    mb_inds: Tensor,
    counts: Tensor,
    pad_id: int,
    accelerator: Accelerator,
    *,
    micro_batch: int,
) -> dict[str, float]:
    """One optimiser step on the comparisons with these indices (local_batch,). counts: which of them have a weight.

    micro_batch: comparisons per pass, at most. Returns the metrics of the step: loss, accuracy and mean scores of the
    whole batch on all processes, and gradient norm.
    """
    device = reward_model.gain.device
    count = accelerator.reduce(counts.sum().to(device), "sum").item()
    sums = torch.zeros(4, dtype=torch.float64, device=float64_device(device))
    # Gradients of micro-batches, of texts of similar length, add up. We step when all are done, without accelerate's
    # counter.
    optimizer.zero_grad()
    lengths = comparisons.lengths(pad_id)[mb_inds]  # (local_batch,), of the longer text of each
    for one in packing.plan_passes(2 * lengths, reward_model, micro_batch):  # its rows have both texts
        queries, chosen, rejected = (tokens.to(device) for tokens in comparisons.tokens(mb_inds[one.rows]))
        weights = counts[one.rows].to(device)  # (micro_batch,), as all that follow
        chosen_scores, rejected_scores = score_pairs(
            reward_model, queries, chosen, rejected, pad_id, longest=one.longest // 2
        )
        losses = pairwise_losses(chosen_scores, rejected_scores)
        loss = (losses * weights).sum() / count  # this micro-batch's share
        (loss * accelerator.num_processes).backward()  # gradients will be averaged over processes
        right = prefers_chosen(chosen_scores, rejected_scores)
        numbers = torch.stack([losses, right, chosen_scores, rejected_scores]).detach()  # (4, micro_batch)
        sums += (numbers.to(sums) * weights.to(sums)).sum(1)
    average_gradients(reward_model)
    # The norm is logged, and nothing is clipped.
    gradient_norm = nn.utils.get_total_norm([p.grad for p in reward_model.parameters() if p.grad is not None])
    optimizer.step()
    loss, accuracy, chosen_mean, rejected_mean = accelerator.reduce(sums / count, "sum").tolist()
    # The names of metrics are the reproduction's.   reward.py#L420-L503
    return {
        "train/rm/loss": loss,
        "train/rm/accuracy": accuracy,
        "train/rm/chosen_rewards": chosen_mean,
        "train/rm/rejected_rewards": rejected_mean,
        "train/rm/gradient_norm": gradient_norm.item(),
    }


def score_pairs(
    reward_model: train_reward.RewardModel,
    queries: Tensor,
    chosen: Tensor,
    rejected: Tensor,
    pad_id: int,
    longest: int,
) -> tuple[Tensor, Tensor]:
    """Scores of chosen and rejected summaries (batch, comparison_length) of the same posts: two of (batch,).

    longest: tokens of the longest post with its summary.
    """
    # [T25] [T19] [T20] One pass reads both, each to its last real token.   reward.py#L211-L236, reward.py#L462-L484
    tokens = torch.cat([torch.cat([queries, queries]), torch.cat([chosen, rejected])], dim=1)
    tokens = packing.pack(tokens, pad_id, longest)
    chosen_scores, rejected_scores = reward_model(tokens, pad_id).chunk(2)
    return chosen_scores, rejected_scores


def pairwise_losses(chosen_scores: Tensor, rejected_scores: Tensor) -> Tensor:
    """-log sigmoid(chosen - rejected) of each pair: (batch,), nats."""
    # [T25] -log sigmoid(x) is softplus(-x).   reward.py#L405-L411
    return F.softplus(rejected_scores - chosen_scores)


def prefers_chosen(chosen_scores: Tensor, rejected_scores: Tensor) -> Tensor:
    """Whether the chosen summary has the higher score: (batch,) bool."""
    # A tie counts as wrong.   reward.py#L410
    return chosen_scores > rejected_scores


# ---- Steps 2 and 3 ---------------------------------------------------------------------------------------------


@torch.no_grad()
def agreement(
    reward_model: train_reward.RewardModel,
    comparisons: posts.Comparisons,
    pad_id: int,
    chunk: int,
    accelerator: Accelerator,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Agreement with people: accuracy overall and by split, batch and confidence, and one row for each comparison."""
    # [X22] Every comparison counts once.   reward.py#L238-L269, reward.py#L434-L452
    device = accelerator.device
    lengths = comparisons.lengths(pad_id)  # (comparisons,)

    def score(inds: Tensor) -> tuple[Tensor, ...]:
        tensors = (tokens.to(device) for tokens in comparisons.tokens(inds))
        return score_pairs(reward_model, *tensors, pad_id, int(lengths[inds].max()))

    # Two tensors of (comparisons,).
    scores = map_rows(score, len(comparisons), chunk, accelerator, lengths)
    columns = zip(comparisons.groups, *(s.tolist() for s in scores), prefers_chosen(*scores).tolist(), strict=True)
    rows = [
        {**group, "chosen_reward": chosen, "rejected_reward": rejected, "correct": int(correct)}
        for group, chosen, rejected, correct in columns
    ]
    groups: dict[str, list[int]] = {"accuracy": [row["correct"] for row in rows]}
    for row in rows:
        for kind in ("split", "batch", "confidence"):
            groups.setdefault(f"accuracy/{kind}/{row[kind]}", []).append(row["correct"])
    return {name: sum(values) / len(values) for name, values in sorted(groups.items())}, rows


def sample_rows(
    comparisons: posts.Comparisons,
    table: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    ids: posts.TaskIds,
) -> list[dict[str, Any]]:
    """The first comparisons to print, with their scores. table: of `agreement`."""
    tokens = comparisons.tokens(torch.arange(len(table[:3])))
    return [
        {
            "query": texts["query"],
            "chosen": texts["response"],
            "rejected": texts["reference"],
            "chosen_reward": row["chosen_reward"],
            "rejected_reward": row["rejected_reward"],
        }
        for texts, row in zip(posts.evaluation_rows(tokenizer, ids, *tokens), table, strict=False)
    ]


@torch.no_grad()
def shift_to_references(
    reward_model: train_reward.RewardModel, some_posts: posts.Posts, pad_id: int, chunk: int, accelerator: Accelerator
) -> dict[str, float]:
    """Set the bias so that the reference summaries of these posts have a mean score of 0; the scale stays.

    Returns the shift, and deviation and extremes of their scores after it.
    """
    # [T29] The scores are shifted, but not scaled.   reward.py#L456-L520
    device = accelerator.device

    def score(inds: Tensor) -> tuple[Tensor, ...]:
        tokens = posts.trim_padding(some_posts.queries[inds], some_posts.references[inds], pad_id=pad_id)
        return (reward_model(tokens.to(device), pad_id),)

    (scores,) = map_rows(score, len(some_posts), chunk, accelerator, some_posts.lengths(pad_id))
    scores = scores.double()
    mean = scores.mean().item()
    reward_model.bias.sub_(mean)
    # Of the scores after the shift, with the biased deviation.   reward.py#L495
    return {
        "eval/rm/shift": -mean,
        "eval/rm/normalized_std": scores.std(unbiased=False).item(),
        "eval/rm/normalized_min": scores.min().item() - mean,
        "eval/rm/normalized_max": scores.max().item() - mean,
    }


# ---- The model, and the data -----------------------------------------------------------------------------------


class RewardModel(train_reward.RewardModel):
    """Chapter 1's, but gain and bias do not learn: the gain stays 1, and step 3 sets the bias."""

    def __init__(self, lm_backbone: PreTrainedModel):
        super().__init__(lm_backbone)
        self.gain.requires_grad_(False)
        self.bias.requires_grad_(False)


@dataclass(frozen=True, kw_only=True)
class Data:
    comparisons: posts.Comparisons
    held_out: dict[str, posts.Comparisons]
    train_posts: posts.Posts
    longest: int  # tokens of the longest text


def read_data(args: Args, tokenizer: PreTrainedTokenizerBase) -> Data:
    """Read comparisons and posts; an InputError if the base model, of which only the settings are read, is too short
    for the longest text.
    """
    task, pad_id = args.task, posts.task_ids(args.task, tokenizer).pad
    comparisons = posts.read_comparisons(task, tokenizer, "train", limit=args.num_train)
    held_out = {"validation": posts.read_comparisons(task, tokenizer, "validation")}
    if len(articles := posts.read_comparisons(task, tokenizer, "validation", articles=True)):
        held_out["validation_cnndm"] = articles
    train_posts = posts.read_posts(task, tokenizer, "train", args.normalize_posts)
    # The keys are the arguments that limit the data.
    texts = {
        "--task.query_length or --task.response_length": [train_posts],
        "--task.query_length or --task.comparison_length": [comparisons, held_out["validation"]],
        "--task.article_query_length or --task.comparison_length": [articles] if len(articles) else [],
    }
    lengths = {flags: max((int(x.lengths(pad_id).max()) for x in rows), default=0) for flags, rows in texts.items()}
    longest = max(lengths, key=lengths.get)
    with model_errors(args.base_model) as (path, revision):
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=args.trust_remote_code)
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and lengths[longest] > most:
        raise InputError(
            f"--base_model {args.base_model} reads at most {most} tokens, but a post with its summary has "
            f"{lengths[longest]}; shorten {longest}"
        )
    return Data(comparisons=comparisons, held_out=held_out, train_posts=train_posts, longest=lengths[longest])


if __name__ == "__main__":
    run_script(lambda: train(parse_args(PRESETS, description=__doc__)))
