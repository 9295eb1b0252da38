"""Train a reward model from human comparisons: chapter 1, Fine-tuning language models from human preferences.

People read four continuations of a query and say which is best (Ziegler et al. 2019). The reward model is the
pretrained language model with a scalar head; softmax cross-entropy over the four scores teaches it to agree:

    1. normalise: shift and scale the scores to mean 0 and variance 1 on samples of the pretrained language model
    2. one pass over the comparisons in random order, with a learning rate that falls linearly
    3. normalise again, on new samples, and discard the gain and bias that were learned in between

What is imported of ours is machinery, which you can skip: the command line, a run's folder with its logs and
checkpoints, several processes, and files of models, texts and labels.

Marks like [D34] name an implementation detail. The original is openai/lm-human-preferences at commit cbfd210; its
file and line are next to the mark. [X01] and the like are places where we differ on purpose; see docs/reference.

    python ppo_rlhf/train_reward.py --preset tales                                   # no network, a minute or two
    python ppo_rlhf/train_reward.py                                                  # sentiment, GPT-2, one GPU
    accelerate launch --num_processes 8 ppo_rlhf/train_reward.py --preset descriptiveness --track
    python ppo_rlhf/train_reward.py --resume runs/<run>                              # resume after an interruption
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import reduce
from annotated_types import Ge
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, StaticCache

from ppo_rlhf.lib import (
    checkpoints,
    command_line,
    errors,
    label_files,
    layers,
    pretrained,
    processes,
    reward_model_files,
    run,
    text_sources,
)
from ppo_rlhf.lib.bounds import NonNegativeInt, PositiveFloat, PositiveInt
from ppo_rlhf.lib.errors import InputError, NumericalError, flag, typed
from ppo_rlhf.lib.pretrained import vocabulary_size

# ---- Arguments -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TaskArgs:
    query_dataset: str = "books"
    """texts: books, cnndm, tldr, tales, reviews, dummy, a file (.txt, .jsonl, .json, .parquet, .csv), a folder with
    stories.txt, or a data set on the hub, <owner>/<name>"""
    query_column: str = "text"
    """key of a row's text in such a file or data set, with dots for nested ones"""
    query_length: PositiveInt = 64
    """longest query, in tokens; shorter ones are padded"""
    query_prefix: str = ""
    """text before each query, such as a chat's marks; the policy reads it, the reward model does not"""
    query_suffix: str = ""
    """text after each query; the policy reads it, the reward model does not"""
    start_text: str | None = "."
    """queries begin after the first such token of their text; None: at the beginning"""
    end_text: str | None = "."
    """queries end with the last such token; None: wherever they are cut"""
    response_length: PositiveInt = 24
    """length of every response, in tokens"""
    truncate_text: str | None = "."
    """responses are cut after this token before they are scored; None: never"""
    truncate_after: NonNegativeInt = 16
    """only such a token at or after this index counts, in tokens"""
    penalty_reward_value: float = -1.0
    """score of a response without such a token"""
    temperature: Annotated[float, Ge(0.01)] = 0.7
    """sampling temperature of the policy and of the reference"""


TLDR_TASK = TaskArgs(
    query_dataset="tldr",
    query_length=500,
    query_suffix="\n\nTL;DR:",
    start_text=None,
    end_text=None,
    response_length=75,
    truncate_text="\n",
    truncate_after=55,
)
CNNDM_TASK = dataclasses.replace(
    TLDR_TASK, query_dataset="cnndm", query_prefix="Article:\n\n", end_text="\n", temperature=0.5
)
TALES_TASK = TaskArgs(query_dataset="tales", query_length=24)
REVIEWS_TASK = TaskArgs(
    query_dataset="reviews",  # the first six words of sentences from reviews
    query_length=12,
    query_prefix='The critic wrote about the film: "',
    start_text=None,
    end_text=None,
    response_length=20,
    # Not cut at a stop: the score is on the last of all tokens, so those after a stop, which it doesn't judge, would
    # get most of its credit.
    truncate_text=None,
    truncate_after=0,
)
TASKS = {
    "sentiment": TaskArgs(),
    "descriptiveness": TaskArgs(),
    "cnndm": CNNDM_TASK,
    "tldr": TLDR_TASK,
    "tales": TALES_TASK,
    "tales-descriptiveness": TALES_TASK,
    "reviews": REVIEWS_TASK,
}


@dataclass(frozen=True, kw_only=True)
class Args(command_line.MemoryArgs, command_line.RunArgs):
    preset: str = "sentiment"
    """names a set of defaults: sentiment, descriptiveness, cnndm, tldr, tales, tales-descriptiveness, reviews"""
    exp_name: str = "train_reward"
    seed: NonNegativeInt = 1
    """seed of the head, the sampling noise and the order of the labels"""
    base_model: str = "gpt2"
    """causal language model to start from: a folder, a name on the hub, or `tales`"""
    label_dataset: str = "sentiment/offline_5k.json"
    """comparisons or ratings: a file of OpenAI's on the hub, a world's, or a local one, which may hold texts or rows
    with chosen and rejected; or a data set of such rows on the hub, <owner>/<name>"""
    num_train: PositiveInt = 4_992
    """labels to train on, the first of the file; the others are held out"""
    batch_size: PositiveInt = 32
    """labels per optimiser step, over all processes"""
    lr: PositiveFloat = 5e-5
    """learning rate of the first step; it falls linearly"""
    normalize_samples: NonNegativeInt = 256
    """samples of the language model to normalise on, rounded up to whole rollout batches; 0: never normalise"""
    normalize_before: bool = True
    """normalise before training"""
    normalize_after: bool = True
    """normalise after training"""
    rollout_batch_size: PositiveInt = 512
    """samples per batch of normalisation, over all processes"""
    task: TaskArgs = field(default_factory=TaskArgs)


TLDR_REWARD = Args(
    label_dataset="tldr/online_45k.json",
    num_train=46_000,
    batch_size=16,
    lr=2.5e-5,
    rollout_batch_size=128,
    local_micro_batch_size=1,
    local_rollout_batch_size=16,
)
TALES_REWARD = Args(base_model="tales", lr=1e-3, local_micro_batch_size=32, local_rollout_batch_size=512)
# 4,800 sentences, rated from -4 to 4. The judge, `--label_dataset people/judge.json`, learns from 4,800 others.
REVIEWS_REWARD = Args(
    base_model="smollm2-135m",
    label_dataset="people/mean.json",
    num_train=4_800,
    rollout_batch_size=64,
)
PRESETS = {
    "sentiment": Args(),
    "descriptiveness": Args(label_dataset="descriptiveness/offline_5k.json"),
    "cnndm": dataclasses.replace(TLDR_REWARD, label_dataset="cnndm/online_45k.json"),
    "tldr": TLDR_REWARD,
    "tales": TALES_REWARD,
    "tales-descriptiveness": dataclasses.replace(TALES_REWARD, label_dataset="descriptiveness/offline_5k.json"),
    "reviews": REVIEWS_REWARD,
}
PRESETS = {name: dataclasses.replace(args, preset=name, task=TASKS[name]) for name, args in PRESETS.items()}


# ---- Train -----------------------------------------------------------------------------------------------------


def train(args: Args, joint: dict | None = None) -> Path:
    """Train a reward model and return the folder models/<run>/reward, on every process. joint: of train_both.py.

    Raises InputError, a ValueError: bad arguments before anything is written, a disk when it fails.
    """
    accelerator = processes.make_accelerator()
    device = accelerator.device
    rank = accelerator.process_index
    sizes = reward_sizes(args, accelerator.num_processes)
    # A slip is found before anything is loaded.
    label_files.find_label_file(args.label_dataset, args.task.query_dataset)
    tokenizer = pretrained.load_tokenizer(args.base_model, args.trust_remote_code)
    ids = task_ids(args.task, tokenizer)
    # [D21] Queries (labels, query_length), samples of each (labels, n, response_length) and targets (labels,):
    #       A target is the index of the best sample, the rating of the only one, or by how much the second is
    #       better than the first.
    longest = pretrained.longest_text(args.base_model, args.trust_remote_code)
    labels = label_files.read_labels(
        args.label_dataset, args.task, tokenizer, num_train=args.num_train, longest=longest
    )
    scale_before = target_scale(labels.kind, labels.targets[: args.num_train])
    # [D11] Every stage begins with the first text.   train_reward.py#L191-L200
    stream = QueryStream(args.task, tokenizer)
    reward_model, language_model = load_models(args, ids, labels, device)
    optimizer = AdamTensorFlowStyle(reward_model.parameters(), lr=args.lr)
    pass_rows = args.local_rollout_batch_size  # rows of a pass without gradients
    this_run = run.Run(args, accelerator, dataclasses.asdict(sizes), joint)
    save = partial(save_reward_model, reward_model=reward_model, tokenizer=tokenizer, args=args)
    this_run.rehearse(save)
    # Of the newest checkpoint; {"step": 0} if there is none.
    state = this_run.resume(partial(checkpoints.restore_training_state, reward_model, optimizer))
    stream.position = state.get("query_position", stream.position)
    this_run.start_logging(state["step"])

    def normalize_now(stage: str, target_mean: float, target_std: float) -> None:
        sample_and_normalize(
            stream,
            ids,
            args,
            accelerator,
            stage=stage,
            target_mean=target_mean,
            target_std=target_std,
            reward_model=reward_model,
            language_model=language_model,
            samples=sizes.normalize_samples,
            rows=pass_rows,
        )

    # 1. Normalise.
    if args.normalize_before and state["step"] == 0:
        normalize_now("before", *scale_before)

    # 2. One pass over the labels.
    # [D41] The first num_train labels, each once; process r of W takes every W-th of a batch, from its r-th on.
    #       train_reward.py#L236-L250
    # [X02] Their order depends on the seed alone.
    permutation = torch.randperm(args.num_train, generator=keyed_generator(args.seed, "labels"))
    for step in this_run.updates("reward model", "labels", first=state["step"], total=sizes.steps):
        optimizer.param_groups[0]["lr"] = learning_rate_at(args, step)
        batch_inds = permutation[step * sizes.batch : (step + 1) * sizes.batch]
        mb_inds = batch_inds[rank :: accelerator.num_processes]  # (local_batch,)
        stats = reward_update(
            reward_model,
            optimizer,
            labels,
            mb_inds=mb_inds,
            pad_id=ids.pad,
            accelerator=accelerator,
            micro_batch=args.local_micro_batch_size,
        )
        # [D75] The mean of each metric over all processes, in float64.   utils/core.py#L491-L524
        flat = accelerator.reduce(torch.stack([processes.widened(x.detach()) for x in stats.values()]), "mean")
        means = dict(zip(stats, flat.tolist(), strict=True))
        processes.check_finite(means, step, "lr")
        metrics = {
            "train_reward/minibatch/loss": means["train/loss"],
            "train_reward/minibatch/error": means["train/loss"],
            **means,
            "train/lr": learning_rate_at(args, step),
        }
        agreement = "corr" if labels.kind == "score" else "accuracy"
        status = f"loss {means['train/loss']:.3f}, {agreement} {means[f'train/{agreement}']:.2f}"
        this_run.end_of_update(
            step,
            metrics,
            status,
            checkpoint=lambda: (
                checkpoints.training_state(reward_model, optimizer),
                {"query_position": stream.position},
            ),
        )

    # [X07] The labels that were not trained on show how good the model is, on the scale that it has learned.
    held_out = torch.arange(len(labels.targets) - labels.held_out, len(labels.targets))
    measured = evaluate(reward_model, labels, held_out, pad_id=ids.pad, rows=pass_rows, accelerator=accelerator)
    processes.check_finite(measured, sizes.steps, "lr")

    # 3. Normalise again.
    # [D38] On the next queries of the stream.   train_reward.py#L252-L254
    if args.normalize_after:
        normalize_now("after", 0.0, 1.0)

    folder = this_run.model_folder / "reward"
    if accelerator.is_main_process:
        save(folder)
    queries = sizes.normalize_samples * (args.normalize_before + args.normalize_after)
    if accelerator.is_main_process:
        shown = label_files.shown_labels(labels)
        with torch.no_grad():
            scores = score_samples(reward_model, labels, shown, ids.pad)
        this_run.log_samples(sizes.steps, label_files.sample_rows(labels, shown, scores, tokenizer, ids.pad))
    this_run.finish(
        "reward", **labels.known, skipped_queries=stream.position - queries, **labels.left_out, **measured
    )
    return folder


# ---- 1. and 3. Normalisation -----------------------------------------------------------------------------------


def target_scale(kind: str, targets: Tensor) -> tuple[float, float]:
    """Mean and biased deviation that the scores shall have before training on these labels (labels,)."""
    # [D34] Choices want scores of mean 0 and deviation 1; ratings and differences their own scale.
    #       train_reward.py#L149-L160
    if kind == "best":
        return 0.0, 1.0
    scales = targets.double() if kind == "score" else targets.double() / 2
    if not scales.std(unbiased=False) > 0:
        raise InputError(f"all labels have the {kind} {targets[0].item()}; there is nothing to learn")
    return scales.mean().item(), scales.std(unbiased=False).item()


def sample_and_normalize(
    stream: QueryStream,
    ids: TaskIds,
    args: Args,
    accelerator: Accelerator,
    *,
    stage: str,
    target_mean: float,
    target_std: float,
    reward_model: RewardModel,
    language_model: PreTrainedModel,
    samples: int,
    rows: int,
) -> None:
    """Normalise on the language model's own responses to the next queries.

    stage: before or after the training. samples: over all processes. rows: how many are written or read at a time.
    """
    # [D39] Without samples, never.   train_reward.py#L208-L209
    if not samples:
        return
    # [D33] [D37] The samples come from the frozen pretrained model, and are neither truncated nor filtered.
    #       train_reward.py#L191-L199
    n = samples // accelerator.num_processes
    rank = accelerator.process_index
    mine = slice(rank * n, (rank + 1) * n)
    queries = stream.next_batch(samples, ids.pad)[mine].to(accelerator.device)  # (n, query_length)
    # [X01] The noise belongs to the sample.
    generator = keyed_generator(args.seed, "normalize", stage)
    uniforms = torch.rand(samples, args.task.response_length, generator=generator, dtype=torch.float64)
    noise = uniforms[mine].to(processes.device_of_noise(queries.device))  # (n, response_length)
    contexts = add_affixes(queries, ids.prefix, ids.suffix)  # (n, context_length)
    with torch.autocast(accelerator.device.type, torch.bfloat16, enabled=reward_model.low_precision):
        responses, _, _ = few_rows_at_a_time(
            lambda *parts: generate(language_model, *parts, ids.pad, ids.pad, args.task.temperature),
            rows,
            contexts,
            noise,
        )
    # [D28] The reward model sees the query without prefix and suffix.   rewards.py#L105-L107
    query_responses = torch.cat([queries, responses], dim=1)  # (n, query_length + response_length)
    normalize(
        reward_model,
        query_responses,
        ids.pad,
        rows=rows,
        accelerator=accelerator,
        target_mean=target_mean,
        target_std=target_std,
    )


@torch.no_grad()
def normalize(
    reward_model: RewardModel,
    query_responses: Tensor,
    pad_id: int,
    rows: int,
    accelerator: Accelerator,
    target_mean: float,
    target_std: float,
) -> None:
    """Set gain and bias so that these samples, on all processes together, have the wanted mean and deviation.

    query_responses: (samples of this process, sequence_length). rows: how many are read at a time.
    """
    # [D32] [D34] Whatever gain and bias had learned is discarded first.   train_reward.py#L207-L215
    reward_model.gain.fill_(1.0)
    reward_model.bias.fill_(0.0)
    scores = few_rows_at_a_time(lambda tokens: reward_model(tokens, pad_id), rows, query_responses)
    gain, bias = gain_and_bias(accelerator.gather(scores), target_mean, target_std)
    reward_model.gain.fill_(gain)
    reward_model.bias.fill_(bias)


def gain_and_bias(scores: Tensor, target_mean: float, target_std: float) -> tuple[float, float]:
    """Gain and bias that give scores (n,) of gain 1 and bias 0 the wanted mean and biased standard deviation.

    Raises NumericalError, a ValueError, if the deviation is 0 or a score is not finite.
    """
    # [D34] gain = S / s and bias = M - gain * m.   rewards.py#L73-L89
    # [D35] The deviation is biased, and numbers that are not finite stop the run.   train_reward.py#L162-L169
    scores = scores.cpu().double()
    mean = scores.mean().item()
    std = scores.std(unbiased=False).item()
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise NumericalError(f"scores with mean {mean} and deviation {std} cannot be normalised")
    gain = target_std / std
    return gain, target_mean - gain * mean


# ---- 2. The update ---------------------------------------------------------------------------------------------


def learning_rate_at(args: Args, step: int) -> float:
    """The learning rate of a step (0-based): linear from args.lr, and never 0."""
    # [D42] The first step has all of lr.   train_reward.py#L249
    return args.lr * (1 - step * args.batch_size / args.num_train)


def reward_update(
    reward_model: RewardModel,
    optimizer: torch.optim.Optimizer,
    labels: label_files.Labels,
    mb_inds: Tensor,
    pad_id: int,
    accelerator: Accelerator,
    *,
    micro_batch: int,
) -> dict[str, Tensor]:
    """One optimiser step on the labels with these indices (local_batch,). micro_batch: labels per pass.

    Returns the gradient norm, gain and bias, and the label_statistics of the whole batch on all processes, all 0-d.
    """
    scores = []
    # [D67] [D88] Micro-batches, of labels of similar length, add up to the gradient of the whole batch.
    mb_inds = mb_inds[(labels.samples[mb_inds] != pad_id).sum((1, 2)).argsort(stable=True)]
    optimizer.zero_grad()
    for inds in mb_inds.split(micro_batch):
        scores.append(score_samples(reward_model, labels, inds, pad_id))  # (micro_batch, n)
        targets = labels.targets[inds].to(scores[-1].device)
        (label_loss(labels.kind, scores[-1], targets) * len(inds) / len(mb_inds)).backward()
    average_gradients(reward_model)
    gradient_norm = nn.utils.get_total_norm([p.grad for p in reward_model.parameters() if p.grad is not None])
    optimizer.step()
    # Statistics of the whole batch, over all processes.
    all_scores = accelerator.gather(torch.cat(scores).detach())  # (batch, n)
    all_targets = accelerator.gather(labels.targets[mb_inds].to(all_scores.device))  # (batch,)
    statistics = label_statistics(labels.kind, all_scores, all_targets)
    statistics["gradient_norm"] = gradient_norm
    statistics["gain"] = reward_model.gain
    statistics["bias"] = reward_model.bias
    return {f"train/{name}": value for name, value in statistics.items()}


def score_samples(reward_model: RewardModel, labels: label_files.Labels, inds: Tensor, pad_id: int) -> Tensor:
    """Scores (batch, n) of the samples of the labels with these indices (batch,)."""
    samples = labels.samples[inds]  # (batch, n, response_length)
    n = samples.shape[1]
    queries = labels.queries[inds].unsqueeze(1).expand(-1, n, -1)  # (batch, n, query_length)
    query_responses = torch.cat([queries, samples], dim=2).flatten(0, 1)  # (batch * n, sequence_length)
    # Padding changes nothing, so there is only what the longest row leaves.
    longest = (query_responses != pad_id).sum(1).max()
    query_responses = left_pad(query_responses, pad_id)[:, -longest:].to(reward_model.gain.device)
    return reward_model(query_responses, pad_id).unflatten(0, (-1, n))


def label_loss(kind: str, scores: Tensor, targets: Tensor) -> Tensor:
    """The loss of scores (batch, n) for labels (batch,) of one kind; 0-d, mean over the batch.

    Ratings and differences are regressed: mean((score - r)^2), mean((difference - (r1 - r0))^2).
    """
    if kind == "best":
        return best_of_n_loss(scores, targets)[0]
    # [D21] Labels may also be ratings or differences.   label_types.py#L58-L120
    predictions = scores[:, 0] if kind == "score" else scores[:, 1] - scores[:, 0]  # (batch,)
    return ((targets.to(scores.dtype) - predictions) ** 2).mean()


def best_of_n_loss(scores: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax cross-entropy of the choice, mean over the batch, and how often the best has the highest score.

    scores: (batch, n); best: (batch,), in [0, n). The accuracy is a 0-d tensor without gradient.
    """
    # [D40] The scores are the logits of the choice.   label_types.py#L44-L49
    accuracy = (scores.argmax(1) == best).to(scores.dtype).mean()
    return F.cross_entropy(scores, best.long()), accuracy


@torch.no_grad()
def label_statistics(kind: str, scores: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """The loss and other metrics of scores (batch, n) for labels (batch,) of one kind; all 0-d."""
    loss = label_loss(kind, scores, targets)
    if kind == "best":
        return {"loss": loss, "accuracy": best_of_n_loss(scores, targets)[1]}
    targets = targets.to(scores.dtype)
    if kind == "difference":
        same_sign = (scores[:, 1] - scores[:, 0]).sign() == targets.sign()  # (batch,)
        return {"loss": loss, "accuracy": same_sign.to(scores.dtype).mean()}
    corr = correlation(targets, scores[:, 0])
    return {"loss": loss, "label_mean": targets.mean(), "label_var": targets.var(unbiased=False), "corr": corr}


@torch.no_grad()
def evaluate(
    reward_model: RewardModel,
    labels: label_files.Labels,
    inds: Tensor,
    pad_id: int,
    rows: int,
    accelerator: Accelerator,
) -> dict[str, float]:
    """How good the scores of the labels with these indices are: loss and accuracy or, for ratings, correlations.

    Empty without labels. The processes share the work. rows: labels that are read at a time.
    """
    if not len(inds):
        return {}
    device = reward_model.gain.device
    n = labels.samples.shape[1]
    scores = processes.widened(torch.zeros(len(inds), n, device=device))
    local = torch.arange(accelerator.process_index, len(inds), accelerator.num_processes)
    for places in local.split(rows) if len(local) else ():  # a process may have none
        scores[places] = score_samples(reward_model, labels, inds[places], pad_id).to(scores.dtype)
    scores = accelerator.reduce(scores, "sum")  # (len(inds), n)
    targets = labels.targets[inds].to(device)
    statistics = label_statistics(labels.kind, scores, targets)
    measured = {f"test_{name}": x.item() for name, x in statistics.items() if not name.startswith("label_")}
    if labels.kind == "score":
        measured["test_spearman"] = correlation(ranks(scores[:, 0]), ranks(targets)).item()
    return measured | {"test_labels": len(inds)}


def correlation(x: Tensor, y: Tensor) -> Tensor:
    """Pearson's correlation of two tensors (n,), 0-d; 0 where one of them is constant."""
    covariance = ((x - x.mean()) * (y - y.mean())).mean()
    return covariance / (x.std(unbiased=False) * y.std(unbiased=False)).clamp(min=torch.finfo(x.dtype).tiny)


def ranks(values: Tensor) -> Tensor:
    """The rank of each value (n,), from 1, in float64. Equal values share the mean of their ranks."""
    _, groups, counts = values.unique(return_inverse=True, return_counts=True)
    last = processes.widened(counts.cumsum(0))  # (distinct values,), the last rank of each
    return (last - (counts - 1) / 2)[groups]


def average_gradients(model: nn.Module) -> None:
    """Replace the gradients by their mean over all processes. That is all that several GPUs need: the model has no
    wrapper, and every process takes the same optimiser step.
    """
    # Before each step of the optimiser.   utils/core.py#L468-L488
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        mean = reduce(nn.utils.parameters_to_vector(gradients), "mean")
        nn.utils.vector_to_parameters(mean, gradients)


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


# ---- How queries are made, and how a model writes and reads tokens ---------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TaskIds:
    """The task's texts as token ids of one tokenizer."""

    pad: int  # one above the largest id of the tokenizer: all below it can be sampled
    eos: int  # -1 if the tokenizer has none
    stop: int | None
    prefix: list[int]
    suffix: list[int]
    context_length: int  # prefix, padded query and suffix


def task_ids(task: TaskArgs, tokenizer: PreTrainedTokenizerBase) -> TaskIds:
    """Encode the task's texts."""
    command_line.check_task(task)
    prefix = tokenizer.encode(task.query_prefix, add_special_tokens=False)
    prefix = [*pretrained.start_of_plain(tokenizer), *prefix]
    suffix = tokenizer.encode(task.query_suffix, add_special_tokens=False)
    return TaskIds(
        # GPT-2 and Pythia have no padding token, and their end of text may be sampled. So padding gets an id that no
        # text has and no model samples, one above the largest.
        pad=vocabulary_size(tokenizer),
        eos=-1 if tokenizer.eos_token_id is None else tokenizer.eos_token_id,
        stop=pretrained.one_token(tokenizer, task.truncate_text, "truncate_text"),
        prefix=prefix,
        suffix=suffix,
        context_length=len(prefix) + task.query_length + len(suffix),
    )


class QueryStream:
    """An endless stream of queries: the texts in one shuffled order, again and again.

    The order depends neither on the run's seed nor on the number of processes. `position` counts the texts read; a
    stream that starts at the position of another one continues where that one stopped.
    """

    def __init__(self, task: TaskArgs, tokenizer: PreTrainedTokenizerBase, position: int = 0, split: str = "train"):
        self.texts = text_sources.load_texts(task.query_dataset, split, task.query_column)
        self.task = task
        self.tokenizer = tokenizer
        self.position = position
        # [D02] All runs, processes and passes use the same order.   language/datasets.py#L27-L46
        self.order = list(range(len(self.texts)))
        random.Random(0).shuffle(self.order)
        self.start_id = pretrained.one_token(tokenizer, task.start_text, "start_text")
        self.end_id = pretrained.one_token(tokenizer, task.end_text, "end_text")
        if not self.first(1, pad_id=0).numel():
            raise InputError(
                f"{flag('task.query_dataset')} {task.query_dataset}: none of its {len(self.texts)} texts gives a "
                f"query; give more texts, or see {flag('task.start_text')} and {flag('task.end_text')}"
            )

    def tokens(self, place: int) -> list[int]:
        """Token ids of a text, by its place among all that are read, pass after pass."""
        # The texts are data: no special tokens are added, and the name of one is ordinary text.
        text = self.texts[self.order[place % len(self.order)]]
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)

    def trim(self, tokens: list[int]) -> list[int] | None:
        return trim_query(tokens, self.task.query_length, self.start_id, self.end_id)

    def next_query(self) -> list[int] | None:
        """The next query; None if a whole pass over the texts gives none."""
        for _ in range(len(self.texts)):
            self.position += 1
            if query := self.trim(self.tokens(self.position - 1)):
                return query
        return None

    def next_batch(self, batch_size: int, pad_id: int) -> Tensor:
        """The next queries, padded on the right: (batch_size, query_length)."""
        # [D08] [D10] [X04] Process r of W takes its slice of a batch that is the same for every W.
        #       language/datasets.py#L66-L85
        return padded([self.next_query() for _ in range(batch_size)], pad_id, self.task.query_length)

    def first(self, n: int, pad_id: int) -> Tensor:
        """The first n queries of all, or as many as there are: (n, query_length). The position stays the same."""
        position = self.position
        self.position = 0
        queries = []
        while len(queries) < n and (query := self.next_query()) and self.position <= len(self.texts):
            queries.append(query)
        self.position = position
        return padded(queries, pad_id, self.task.query_length)


def padded(rows: list[list[int]], pad_id: int, length: int | None = None) -> Tensor:
    """Rows of token ids, padded on the right to a length, or to that of the longest: (rows, length)."""
    longest = max(map(len, rows), default=0) if length is None else length
    return torch.tensor([row + [pad_id] * (longest - len(row)) for row in rows], dtype=torch.long).view(-1, longest)


def trim_query(tokens: list[int], query_length: int, start_id: int | None, end_id: int | None) -> list[int] | None:
    """Cut a text's tokens to a query: after the first start token, at most query_length, up to the last end token.

    Returns None if the text has no start token, or no end token within the cut. Golden example, both ids 13:
    `One. Two words. Three more` gives ` Two words.`; `Only end.` is kept whole.
    """
    # [D05] After the first start token; if that is the last one, from the beginning.   language/datasets.py#L49-L55
    if start_id is not None:
        if start_id not in tokens:
            return None
        first = tokens.index(start_id)
        if first < len(tokens) - 1:
            tokens = tokens[first + 1 :]
    # [D06] At most so many of them.   language/datasets.py#L57
    tokens = tokens[:query_length]
    # [D07] Up to the last end token within the cut.   language/datasets.py#L59-L64
    if end_id is not None:
        if end_id not in tokens:
            return None
        tokens = tokens[: len(tokens) - tokens[::-1].index(end_id)]
    return tokens


def add_affixes(queries: Tensor, prefix: list[int], suffix: list[int]) -> Tensor:
    """Contexts for the policy: [prefix, query with its padding, suffix]. (batch, context_length)"""
    # [D09] There may be padding between query and suffix.   lm_tasks.py#L68-L80
    parts = [torch.tensor(ids, dtype=queries.dtype, device=queries.device) for ids in (prefix, suffix)]
    before, after = (part.expand(len(queries), -1) for part in parts)
    return torch.cat([before, queries, after], dim=1)


def keyed_generator(*key: int | str) -> torch.Generator:
    """A CPU random generator that depends on the key alone, so that noise belongs to an episode, not a process."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


def few_rows_at_a_time(function: Callable, rows: int, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Apply a function to so many rows at a time and join the tensors that it returns: the same in less memory."""
    results = [function(*parts) for parts in zip(*(tensor.split(rows) for tensor in tensors), strict=True)]
    if isinstance(results[0], Tensor):
        return torch.cat(results)
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


@torch.no_grad()
def generate(
    lm_backbone: PreTrainedModel, contexts: Tensor, uniforms: Tensor, pad_id: int, vocab_size: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample responses with a key-value cache.

    contexts: (batch, context_length) token ids, padding anywhere; uniforms: (batch, response_length) random numbers
    in [0, 1), one for each token, on a device that has float64. Returns responses and their log-probs (batch,
    response_length), and the hidden state before each token (batch, response_length, width).
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
        cdf = all_logprobs.to(uniforms.device).double().exp().cumsum(1)  # (batch, vocab_size)
        thresholds = uniforms[:, column : column + 1].double() * cdf[:, -1:]
        tokens = torch.searchsorted(cdf, thresholds, right=True).clamp(max=vocab_size - 1).to(hidden.device)
        # [D25] Log-probs are recorded as the tokens are sampled.   policy.py#L108-L112
        responses.append(tokens)
        logprobs.append(all_logprobs.gather(1, tokens))
        hidden_states.append(hidden)
        position_ids = position_ids[:, -1:] + 1
    return torch.cat(responses, 1).to(contexts.dtype), torch.cat(logprobs, 1), torch.stack(hidden_states, 1)


class KeyValueCache(StaticCache):
    """Keys and values, both in the precision of the values."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Add those of new tokens; return those of all tokens."""
        # Under autocast, rotary positions make keys float32, and attention casts them back. A cache holds one dtype.
        return super().update(key_states.to(value_states.dtype), value_states, *args, **kwargs)


def left_pad(tokens: Tensor, pad_id: int) -> Tensor:
    """Move the padding of each row to its left; the order of the other tokens stays.

    tokens: (batch, length). [[5, P, 6, P]] gives [[P, P, 5, 6]].
    """
    # [D08] A stable sort by "is a real token".
    return tokens.gather(1, (tokens != pad_id).int().argsort(dim=1, stable=True))


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
    if cap := getattr(getattr(lm_backbone, "config", None), "final_logit_softcapping", None):  # Gemma 2
        logits = cap * torch.tanh(logits / cap)
    # [D12] Ids above the tokenizer's largest, such as padding, are never sampled or scored.   policy.py#L58-L59
    # [D23] Log-probs and entropies are those of the scaled logits.   language/sample.py#L24-L30
    return logits[..., :vocab_size] / temperature


def read_scalar(head: nn.Linear, hidden_states: Tensor) -> Tensor:
    """The head's number for each hidden state: (..., width) gives (...). In full precision even in bfloat16 runs."""
    with torch.autocast(hidden_states.device.type, enabled=False):
        return head(hidden_states.to(head.weight.dtype)).squeeze(-1)


class RewardModel(nn.Module):
    """A language model with a scalar head, read at the last real token: score = gain * head + bias."""

    def __init__(self, lm_backbone: PreTrainedModel, *, low_precision: bool = False):
        """low_precision: whether matrix products are in bfloat16."""
        super().__init__()
        self.lm_backbone = lm_backbone
        self.low_precision = low_precision
        width = lm_backbone.config.hidden_size
        # [D29] A small random head: about 1 / sqrt(width) in every weight.   language/model.py#L248-L258
        self.reward_head = nn.Linear(width, 1)
        nn.init.normal_(self.reward_head.weight, std=1 / math.sqrt(width + 1))
        nn.init.zeros_(self.reward_head.bias)
        # [D31] [D32] Gain and bias are trainable parameters.   rewards.py#L48-L71
        self.gain = nn.Parameter(torch.ones(()))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, query_responses: Tensor, pad_id: int) -> Tensor:
        """Scores (batch,) of query_responses (batch, sequence_length); trailing padding does not count."""
        # [D30] The score is read at the last column, which shows the last real token.   rewards.py#L47
        with torch.autocast(query_responses.device.type, torch.bfloat16, enabled=self.low_precision):
            last = read_tokens(self.lm_backbone, query_responses, pad_id, slice(-1, None))  # (batch, 1, width)
            return self.gain * read_scalar(self.reward_head, last[:, 0]) + self.bias


# ---- Plumbing: sizes, loading, saving --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RewardSizes:
    """Sizes, from the arguments and the number of processes: labels, or samples to normalise on."""

    steps: int
    batch: int
    local_batch: int
    normalize_samples: int
    local_normalize_samples: int


def reward_sizes(args: Args, num_processes: int) -> RewardSizes:
    """Divide the global sizes exactly, or say which size does not divide and what would."""
    command_line.check_run(args)
    # A batch must divide among the processes, and num_train must be whole batches.   train_reward.py#L56-L58
    local_batch = processes.split_evenly("batch_size", args.batch_size, num_processes, "processes")
    processes.split_evenly("rollout_batch_size", args.rollout_batch_size, num_processes, "processes")
    if args.num_train % args.batch_size:
        whole_batches = args.num_train // args.batch_size * args.batch_size or args.batch_size
        raise InputError(
            f"{typed('num_train')} {args.num_train} is not whole batches of {args.batch_size}; "
            f"{flag('num_train')} {whole_batches} is"
        )
    # [D36] Samples come in whole rollout batches: 256 asked for and batches of 512 give 512.
    #       train_reward.py#L197-L199
    normalize_samples = math.ceil(args.normalize_samples / args.rollout_batch_size) * args.rollout_batch_size
    return RewardSizes(
        steps=args.num_train // args.batch_size,
        batch=args.batch_size,
        local_batch=local_batch,
        normalize_samples=normalize_samples,
        local_normalize_samples=normalize_samples // num_processes,
    )


def load_pretrained(
    base_model: str, dtype: torch.dtype, trust_remote_code: bool = False, auto_class: type = AutoModelForCausalLM
) -> PreTrainedModel:
    """A pretrained model such as GPT-2 or Pythia, from safetensors, without dropout."""
    with pretrained.model_errors(base_model) as (path, revision):
        config = pretrained.read_config(path, revision, trust_remote_code, auto_class=auto_class)
        our_values = {}
        for name, value in vars(config).items():
            # [D18] Without dropout, sampler and training pass agree, and every ratio starts at 1.   policy.py#L48
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                our_values[name] = 0.0
            # [D17] The library's GPT-2 is the original's network: tanh-GELU, tied output layer, layer norm epsilon
            #       1e-5.   language/model.py#L14-L73
            #       `gelu_pytorch_tanh` is the same function as `gelu_new`, in one kernel instead of eight.
            if value == "gelu_new":
                our_values[name] = "gelu_pytorch_tanh"
        their_values = {name: getattr(config, name) for name in our_values}
        vars(config).update(our_values)
        model, loading = auto_class.from_pretrained(
            path,
            revision=revision,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # checked_model names them
            adapter_kwargs=pretrained.NO_ADAPTER,
        )
        # [D66] The embedding of the token that the configuration names as padding learns like any other.
        model.get_input_embeddings().padding_idx = None
        # The model is saved with the values that it came with.
        return pretrained.checked_model(model, loading, their_values)


def load_models(
    args: Args, ids: TaskIds, labels: label_files.Labels, device: torch.device
) -> tuple[RewardModel, PreTrainedModel]:
    """The reward model before it learns, and the pretrained model, which never changes."""
    dtype = pretrained.dtype_of_weights(args, frozen=False)
    language_model = load_pretrained(args.base_model, dtype, args.trust_remote_code).to(device)
    longest = max(ids.context_length + args.task.response_length, int(labels.lengths(ids.pad).max()))
    pretrained.check_model(language_model, args.base_model, longest, ids.pad, read_tokens)
    # [D76] For the head, the same on every process; all other noise is keyed.   utils/core.py#L108-L113
    torch.manual_seed(args.seed)
    # [D27] The reward model is a copy of the pretrained model, trained as a whole.   train_reward.py#L275
    lm_backbone = load_pretrained(args.base_model, dtype, args.trust_remote_code, AutoModel)
    if args.gradient_checkpointing:
        layers.checkpoint_layers(lm_backbone)
    reward_model = RewardModel(lm_backbone, low_precision=args.dtype == "bfloat16")
    return reward_model.to(device, dtype), language_model.requires_grad_(False)


def save_reward_model(
    folder: Path, reward_model: RewardModel, tokenizer: PreTrainedTokenizerBase, args: Args, weights: bool = True
) -> None:
    """Save as an ordinary sequence-classification model that gives the same scores; the weights only if asked for."""
    info = {
        "kind": "reward model",
        "base_model": args.base_model,
        "label_dataset": args.label_dataset,
        "vocab_size": vocabulary_size(tokenizer),
        "task": dataclasses.asdict(args.task),
    }
    reward_model_files.save_reward_model(
        folder, reward_model, tokenizer, info, trust_remote_code=args.trust_remote_code, weights=weights
    )


if __name__ == "__main__":
    errors.run_script(lambda: train(command_line.parse_args(PRESETS, description=__doc__)))
