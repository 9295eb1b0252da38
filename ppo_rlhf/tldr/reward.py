"""Train a reward model from pairs of summaries: chapter 2, TL;DR summarisation, stage 2 of 3.

People read two summaries of a post and say which is better (Stiennon et al. 2020). The reward model is the fine-tuned
model of `tldr/sft.py` with a scalar head in place of the output layer, read at the end of the summary:

    1. one pass over the comparisons in random order: minimise -log sigmoid(score of chosen - score of rejected)
    2. measure how often it agrees with people on held-out comparisons: overall, by split, batch and confidence
    3. normalise: shift the scores so that the mean score of the reference summaries is 0

Next: `tldr/policy.py`. Marks like [T25] name an implementation detail. The original is
vwxyzjn/summarize_from_feedback_details at commit ee77a9a, which reproduced OpenAI's; files and lines next to marks
are the original's. [X22] and the like are places where we differ on purpose; see docs/reference.

    python ppo_rlhf/tldr/reward.py --preset posts --base_model models/<run>/sft        # no network, two minutes
    python ppo_rlhf/tldr/reward.py --base_model models/<run>/sft --dtype bfloat16 --local_micro_batch_size 8
    accelerate launch --num_processes 8 ppo_rlhf/tldr/reward.py --base_model models/<run>/sft --dtype bfloat16 --track
    python ppo_rlhf/tldr/reward.py --resume runs/<run>                                 # resume after an interruption
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf import train_reward
from ppo_rlhf.lib import checkpoints, command_line, errors, layers, pretrained, processes, run
from ppo_rlhf.lib.bounds import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from ppo_rlhf.lib.errors import InputError
from ppo_rlhf.lib.reward_model_files import save_reward_model
from ppo_rlhf.tldr import models, packing, posts
from ppo_rlhf.tldr.sft import cosine_lr
from ppo_rlhf.train_policy import keyed_generator, read_tokens

# ---- Arguments -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Args(command_line.MemoryArgs, command_line.RunArgs):
    preset: str = "tldr"
    """names a set of defaults: tldr, posts, reviews"""
    exp_name: str = "tldr_reward"
    seed: NonNegativeInt = 44413
    """seed of the head and of the order of the comparisons"""
    base_model: str = ""
    """model to start from: the folder of a fine-tuned model, models/<run>/sft, or a name on the hub"""
    save_interval: NonNegativeInt = 200
    """steps between checkpoints; 0: one at the end"""
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
    local_rollout_batch_size: PositiveInt = 64
    """comparisons (two texts each) or posts that one process scores at a time; a memory knob"""
    task: posts.TaskArgs = field(default_factory=posts.TaskArgs)
    """queries and responses"""


PRESETS = {
    "tldr": Args(task=posts.TASKS["tldr"]),
    "posts": Args(preset="posts", seed=1, batch_size=8, lr=3e-4, normalize_posts=2_048, task=posts.TASKS["posts"]),
    "reviews": Args(
        preset="reviews", seed=1, batch_size=32, lr=5e-5, normalize_posts=512, task=posts.TASKS["reviews"]
    ),
}


def train(args: Args, joint: dict | None = None) -> Path:
    """Train a reward model and return the folder models/<run>/reward, on every process.

    joint: of tldr/all.py. Raises InputError, a ValueError: on bad arguments before anything is written; later if a
    disk fails.
    """
    accelerator = processes.make_accelerator()
    data = check(args, accelerator.num_processes)
    tokenizer, ids, comparisons = data.tokenizer, data.ids, data.comparisons
    steps = math.ceil(len(comparisons) / args.batch_size)
    sizes = {
        "comparisons": len(comparisons),
        "steps": steps,
        "batch": args.batch_size,
        "local_batch": args.batch_size // accelerator.num_processes,
    }
    reward_model = load_reward_model(args, data.longest, ids.vocab_size, accelerator)
    trained = [parameter for parameter in reward_model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, args.lr, eps=1e-5, weight_decay=args.weight_decay, fused=True)

    this_run = run.Run(args, accelerator, sizes, joint)
    info = {
        "kind": "reward model",
        "base_model": args.base_model,
        "vocab_size": ids.vocab_size,
        "label_dataset": args.task.comparisons,
        "task": dataclasses.asdict(args.task),
    }
    save = partial(
        save_reward_model,
        reward_model=reward_model,
        tokenizer=tokenizer,
        info=info,
        trust_remote_code=args.trust_remote_code,
    )
    this_run.rehearse(save)
    first_step = this_run.resume(partial(checkpoints.restore_training_state, reward_model, optimizer))["step"]
    this_run.start_logging(first_step)

    # 1. One pass over the comparisons.
    # [T27] [X22] One order for all processes, so that each comparison is seen once.
    #       reward.py#L82, reward.py#L278-L293
    order = torch.randperm(len(comparisons), generator=keyed_generator(args.seed, "comparisons"))
    for step in this_run.updates("reward model", "comparisons", first=first_step, total=steps):
        # [X32] One step of the schedule for each optimiser step, the last, smaller one too.   reward.py#L420
        optimizer.param_groups[0]["lr"] = lr = cosine_lr(args.lr, step, steps)
        mb_inds, counts = processes.deal(
            order[step * args.batch_size : (step + 1) * args.batch_size],
            args.batch_size,
            accelerator.process_index,
            accelerator.num_processes,
        )
        metrics = pairs_update(
            reward_model,
            optimizer,
            comparisons,
            mb_inds=mb_inds,
            counts=counts,
            pad_id=ids.pad,
            accelerator=accelerator,
            rows=args.local_micro_batch_size,
        )
        processes.check_finite(metrics, step, "lr")
        this_run.end_of_update(
            step,
            metrics | {"train/rm/lr": lr},
            f"loss {metrics['train/rm/loss']:.3f}, accuracy {metrics['train/rm/accuracy']:.2f}",
            checkpoint=lambda: (checkpoints.training_state(reward_model, optimizer), {}),
        )

    # 2. Agreement with people.
    results: dict = {"ceiling": comparisons.ceiling, "identical": comparisons.identical, "cut": comparisons.cut}
    chunk = args.local_rollout_batch_size
    with reward_model.sampling():
        for name, rows in data.held_out.items():
            accuracy, table = agreement(reward_model, rows, ids.pad, chunk, accelerator)
            sides = ("chosen_reward", "rejected_reward")
            means = {f"{name}/{side}": fmean(row[side] for row in table) for side in sides}
            processes.check_finite(means, steps, "lr")
            results |= {f"eval/rm/{name}/{key}": value for key, value in accuracy.items()}
            this_run.write_table(name, table)
            if name == "validation":
                this_run.log_samples(steps, sample_rows(rows, table, tokenizer, ids))

        # 3. Normalise.
        normalised = shift_to_references(reward_model, data.train_posts, ids.pad, chunk, accelerator)
        processes.check_finite(normalised, steps, "lr")
        results |= normalised

    folder = this_run.model_folder / "reward"
    if accelerator.is_main_process:
        save(folder)
    this_run.finish("reward", **results)
    return folder


class RewardModel(models.MixedPrecision, train_reward.RewardModel):
    """A reward model whose gain and bias do not learn: the gain stays 1, and step 3 sets the bias."""

    def __init__(self, lm_backbone: PreTrainedModel, *, low_precision: bool = False):
        super().__init__(lm_backbone)
        self.low_precision = low_precision
        # The class is that of chapter 1, where gain and bias learn.
        self.gain.requires_grad_(False)
        self.bias.requires_grad_(False)

    def forward(self, query_responses: Tensor, pad_id: int) -> Tensor:
        """Scores (batch,) of query_responses (batch, sequence_length)."""
        with self.autocast():
            return super().forward(query_responses, pad_id)


def pairs_update(
    reward_model: train_reward.RewardModel,
    optimizer: torch.optim.Optimizer,
    comparisons: posts.Comparisons,
    mb_inds: Tensor,
    counts: Tensor,
    pad_id: int,
    accelerator: Accelerator,
    *,
    rows: int,
) -> dict[str, float]:
    """One optimiser step on the comparisons with these indices (local_batch,). counts: which of them have a weight.

    rows: comparisons of a micro-batch, at most. Returns the metrics of the step: loss, accuracy and mean scores of
    the whole batch on all processes, and gradient norm.
    """
    device = reward_model.gain.device
    count = accelerator.reduce(counts.sum().to(device), "sum")
    sums = processes.widened(torch.zeros(4, device=device))
    # Gradients of micro-batches add up. We step when all are done, without accelerate's counter.
    optimizer.zero_grad()
    lengths = comparisons.lengths(pad_id)[mb_inds]  # (local_batch,), of the longer text of each
    for one in packing.plan_passes(2 * lengths, reward_model, rows):
        queries, chosen, rejected, weights = (
            t.to(device) for t in (*comparisons.tokens(mb_inds[one.rows]), counts[one.rows])
        )
        # Two tensors of (micro_batch,). A row of the plan has both texts of a comparison.
        scores = score_pairs(reward_model, queries, chosen, rejected, pad_id, one.longest // 2)
        losses = pairwise_losses(*scores)
        loss = (losses * weights).sum() / count  # this micro-batch's share
        (loss * accelerator.num_processes).backward()  # gradients will be averaged over processes
        numbers = torch.stack([losses, prefers_chosen(*scores), *scores]).detach()
        numbers = processes.widened(numbers)  # (4, micro_batch)
        sums += (numbers * weights).sum(1)
    processes.average_gradients(reward_model, accelerator)
    gradient_norm = processes.gradient_norm(reward_model)
    optimizer.step()
    # The names are the reproduction's.   reward.py#L420-L503
    names = ("loss", "accuracy", "chosen_rewards", "rejected_rewards")
    shares = {f"train/rm/{name}": total / count for name, total in zip(names, sums, strict=True)}
    return processes.sum_over_processes(shares, accelerator) | {"train/rm/gradient_norm": gradient_norm.item()}


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


@torch.no_grad()
def agreement(
    reward_model: train_reward.RewardModel,
    comparisons: posts.Comparisons,
    pad_id: int,
    chunk: int,
    accelerator: Accelerator,
) -> tuple[dict[str, float], list[dict]]:
    """Agreement with people: accuracy overall and by split, batch and confidence, and one row for each comparison."""
    # [X22] Every comparison counts once.   reward.py#L238-L269, reward.py#L434-L452
    device = accelerator.device

    lengths = comparisons.lengths(pad_id)  # (comparisons,)

    def score(inds: Tensor) -> tuple[Tensor, ...]:
        tensors = (tokens.to(device) for tokens in comparisons.tokens(inds))
        return score_pairs(reward_model, *tensors, pad_id, int(lengths[inds].max()))

    # Two tensors of (comparisons,).
    scores = processes.map_rows(score, len(comparisons), chunk, accelerator, lengths)
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
    comparisons: posts.Comparisons, table: list[dict], tokenizer: PreTrainedTokenizerBase, ids: posts.TaskIds
) -> list[dict]:
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
    # [T29] Shifted, not scaled.   reward.py#L456-L520
    device = accelerator.device

    def score(inds: Tensor) -> tuple[Tensor, ...]:
        tokens = posts.trim_padding(some_posts.queries[inds], some_posts.references[inds], pad_id=pad_id)
        return (reward_model(tokens.to(device), pad_id),)

    (scores,) = processes.map_rows(score, len(some_posts), chunk, accelerator, some_posts.lengths(pad_id))
    scores = processes.widened(scores)
    mean = scores.mean().item()
    reward_model.bias.sub_(mean)
    # Of the scores after the shift, with the biased deviation.   reward.py#L495
    return {
        "eval/rm/shift": -mean,
        "eval/rm/normalized_std": scores.std(unbiased=False).item(),
        "eval/rm/normalized_min": scores.min().item() - mean,
        "eval/rm/normalized_max": scores.max().item() - mean,
    }


# ---- Plumbing: data, the model to start from -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Data:
    """What the arguments name."""

    tokenizer: PreTrainedTokenizerBase
    ids: posts.TaskIds
    comparisons: posts.Comparisons
    held_out: dict[str, posts.Comparisons]
    train_posts: posts.Posts
    longest: int  # tokens of the longest text


def check(args: Args, num_processes: int) -> Data:
    """Refuse what can be refused before any weights are loaded; find and read what the arguments name."""
    check_arguments(args, num_processes)
    tokenizer = pretrained.load_tokenizer(args.base_model, args.trust_remote_code)
    ids = posts.task_ids(args.task, tokenizer)
    comparisons = posts.read_comparisons(args.task, tokenizer, "train", limit=args.num_train)
    held_out = {"validation": posts.read_comparisons(args.task, tokenizer, "validation")}
    if len(articles := posts.read_comparisons(args.task, tokenizer, "validation", articles=True)):
        held_out["validation_cnndm"] = articles
    train_posts = posts.read_posts(args.task, tokenizer, "train", args.normalize_posts)
    rows_of = {"posts": train_posts, "train": comparisons, **held_out}
    lengths = {name: int(rows.lengths(ids.pad).max()) for name, rows in rows_of.items()}
    longest = max(lengths, key=lambda name: lengths[name])
    # Messages name the arguments that limit the longest rows.
    limits = {}
    if longest == "validation_cnndm":
        limits["task.query_length"] = "task.article_query_length"
    if longest != "posts":
        limits["task.response_length"] = "task.comparison_length"
    with errors.typed_as(limits):
        # The library must have a classifier for the model, as which it is saved.
        classifier = pretrained.empty_model(
            args.base_model, args.trust_remote_code, AutoModelForSequenceClassification
        )
        pretrained.check_size(
            classifier, f"{errors.flag('base_model')} {args.base_model}", lengths[longest], ids.vocab_size
        )
    return Data(
        tokenizer=tokenizer,
        ids=ids,
        comparisons=comparisons,
        held_out=held_out,
        train_posts=train_posts,
        longest=lengths[longest],
    )


def check_arguments(args: Args, num_processes: int) -> None:
    """Refuse numbers that cannot be meant, before anything is read."""
    command_line.check_run(args)
    if not args.base_model:
        raise InputError(
            f"{errors.flag('base_model')} is empty; give the folder of a fine-tuned model, models/<run>/sft"
        )
    processes.split_evenly("batch_size", args.batch_size, num_processes, "processes")


def load_reward_model(args: Args, longest: int, vocab_size: int, accelerator: Accelerator) -> RewardModel:
    """A random head on the body of the fine-tuned model; an InputError if that cannot read so many tokens or ids."""
    language_model = models.load_base_model(args).to(accelerator.device)
    packing.enable(language_model)
    models.check_model(language_model, args.base_model, longest, vocab_size, read_tokens)
    backbone = language_model.base_model
    # [T18] A random head on the body of the fine-tuned model. The seed is the same on every process.
    #       reward.py#L173-L208
    torch.manual_seed(args.seed)
    reward_model = RewardModel(backbone, low_precision=args.dtype == "bfloat16")
    if args.gradient_checkpointing:
        layers.checkpoint_layers(reward_model)
    return reward_model.to(accelerator.device, backbone.dtype)


if __name__ == "__main__":
    errors.run_script(lambda: train(command_line.parse_args(PRESETS, description=__doc__)))
