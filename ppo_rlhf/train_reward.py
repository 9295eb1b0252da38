"""Train a reward model from human comparisons: chapter 1, Fine-tuning language models from human preferences.

People read four continuations of a query and say which is best (Ziegler et al. 2019). The reward model is the
pretrained language model with a scalar head; softmax cross-entropy over the four scores teaches it to agree:

    1. normalise: shift and scale the scores to mean 0 and variance 1 on samples of the pretrained language model
    2. one pass over the comparisons in random order, with a learning rate that falls linearly
    3. normalise again, on new samples, and discard the gain and bias that were learned in between

Marks like [D34] name an implementation detail. The original is openai/lm-human-preferences at commit cbfd210; its
file and line are next to the mark. [X01] and the like are places where we differ on purpose; see docs/details.

    python ppo_rlhf/train_reward.py --preset tales                                   # no network, a minute or two
    python ppo_rlhf/train_reward.py                                                  # sentiment, GPT-2, one GPU
    accelerate launch --num_processes 8 ppo_rlhf/train_reward.py --preset descriptiveness --track
    python ppo_rlhf/train_reward.py --resume runs/<run>                              # resume after an interruption
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ppo_rlhf import worlds
from ppo_rlhf.lib import checkpoints, cli, label_files, models, passes, precision, processes, run, texts
from ppo_rlhf.lib.errors import InputError, NumericalError

# ---- Arguments -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Args(cli.RunArgs):
    preset: str = "sentiment"
    """names a set of defaults: sentiment, descriptiveness, cnndm, tldr, tales, tales-descriptiveness, reviews"""
    exp_name: str = "train_reward"
    seed: int = 1
    """seed of the head, the sampling noise and the order of the labels"""
    base_model: str = "gpt2"
    """causal language model to start from: a folder, a name on the hub, or `tales`"""
    save_interval: int = 50
    """steps between checkpoints; 0: one at the end"""
    label_dataset: str = "sentiment/offline_5k.json"
    """comparisons or ratings: a file of OpenAI's labels on the hub, one of a world's, or a local file, which may hold
    texts"""
    num_train: int = 4_992
    """labels to train on, the first of the file; the others are held out"""
    batch_size: int = 32
    """labels per optimiser step, over all processes"""
    lr: float = 5e-5
    """learning rate of the first step; it falls linearly"""
    normalize_samples: int = 256
    """samples of the language model to normalise on, rounded up to whole rollout batches; 0: never normalise"""
    normalize_before: bool = True
    """normalise before training"""
    normalize_after: bool = True
    """normalise after training"""
    rollout_batch_size: int = 512
    """samples per batch of normalisation, over all processes"""
    local_micro_batch_size: int = 0
    """labels per forward and backward pass on one process; a memory knob; 0: as many as are fast"""
    local_micro_batch_tokens: int = 0
    """tokens of such a pass, padding included; a memory knob; 0: any number"""
    local_rollout_batch_size: int = 0
    """samples or labels per pass without gradients on one process; a memory knob; 0: the local rollout batch"""
    task: texts.TaskArgs = field(default_factory=texts.TaskArgs)
    """queries and responses"""


SUMMARIES_REWARD = {"num_train": 46_000, "batch_size": 16, "lr": 2.5e-5, "rollout_batch_size": 128}
TALES_REWARD = {"base_model": "tales", "lr": 1e-3}
# 4,800 sentences, rated from -4 to 4. The judge, `--label_dataset people/judge.json`, learns from 4,800 others.
REVIEWS_REWARD = {"base_model": "smollm2-135m", "label_dataset": "people/mean.json", "num_train": 4_800}
PRESETS = {
    "sentiment": Args(),
    "descriptiveness": Args(label_dataset="descriptiveness/offline_5k.json"),
    "cnndm": Args(label_dataset="cnndm/online_45k.json", **SUMMARIES_REWARD),
    "tldr": Args(label_dataset="tldr/online_45k.json", **SUMMARIES_REWARD),
    "tales": Args(**TALES_REWARD),
    "tales-descriptiveness": Args(label_dataset="descriptiveness/offline_5k.json", **TALES_REWARD),
    "reviews": Args(**REVIEWS_REWARD, rollout_batch_size=256),
}
PRESETS = {name: dataclasses.replace(args, preset=name, task=texts.TASKS[name]) for name, args in PRESETS.items()}


# ---- Train -----------------------------------------------------------------------------------------------------


def train(args: Args, joint: dict | None = None) -> Path:
    """Train a reward model and return the folder models/<run>/reward, on every process. joint: of train_both.py.

    Raises InputError, a ValueError: bad arguments before anything is written, a disk when it fails.
    """
    accelerator = processes.make_accelerator(sharding=False)
    sizes, rank = reward_sizes(args, accelerator.num_processes), accelerator.process_index
    given = args  # with names such as `tales`, not yet paths: what meta.json and the saved models keep
    worlds.check_names(given, joint)
    args = worlds.find_paths(given, joint)
    label_file = label_files.find_label_file(args.label_dataset, args.task.query_dataset).absolute()
    device, dtype = accelerator.device, precision.weights_dtype(args.dtype)
    tokenizer = models.load_tokenizer(args.base_model, args.trust_remote_code)
    ids = texts.task_ids(args.task, tokenizer)
    labels = load_labels(args, tokenizer)
    scale_before = target_scale(labels.kind, labels.targets[: args.num_train])
    # [D11] Every stage begins with the first text.   train_reward.py#L191-L200
    stream = texts.QueryStream(args.task, tokenizer)
    longest_label = labels.queries.shape[1] + labels.samples.shape[2]
    language_model = load_language_model(args, ids, longest_label, dtype, device)
    # [D76] For the head, the same on every process; all other noise is keyed.   utils/core.py#L108-L113
    torch.manual_seed(args.seed)
    # [D27] The reward model is a copy of the pretrained model, trained as a whole.   train_reward.py#L275
    lm_backbone = models.load_pretrained(args.base_model, dtype, args.trust_remote_code, AutoModel)
    if args.gradient_checkpointing:
        models.checkpoint_layers(lm_backbone)
    reward_model = RewardModel(lm_backbone, low_precision=args.dtype == "bfloat16").to(device, dtype)
    optimizer = AdamTensorFlowStyle(reward_model.parameters(), lr=args.lr)

    inputs = models.weight_files(args) | worlds.data_files(args.task, "query_dataset")
    inputs["label_dataset"] = [label_file]
    length = labels.samples.shape[1] * (labels.queries.shape[1] + labels.samples.shape[2])  # of a label at most
    of_pass = passes.limit(args, accelerator, reward_model, rows=sizes.local_batch, length=length)
    this_run = run.Run(given, accelerator, dataclasses.asdict(sizes) | of_pass, joint, inputs)
    first_step = 0
    if checkpoint := this_run.load_checkpoint():
        tensors, state = checkpoint
        first_step, stream.position = state["step"], state["query_position"]
        checkpoints.restore_training_state(reward_model, optimizer, tensors)
    this_run.start_logging(first_step, note=stream.left_out())

    def normalize_now(stage: str, target_mean: float, target_std: float) -> None:
        # [D39] Without samples, never.   train_reward.py#L208-L209
        if args.normalize_samples:
            with precision.mixed_precision(device, enabled=reward_model.low_precision):
                samples = sample_to_normalize(language_model, stream, ids, args, sizes, stage, rank)
            normalize(reward_model, samples, ids.pad, sizes.local_rollout_batch, accelerator, target_mean, target_std)

    # 1. Normalise.
    if args.normalize_before and first_step == 0:
        normalize_now("before", *scale_before)

    # 2. One pass over the labels.
    # [D41] The first num_train labels, each once; process r of W takes every W-th of a batch, from its r-th on.
    #       train_reward.py#L236-L250
    # [X02] Their order depends on the seed alone.
    permutation = torch.randperm(args.num_train, generator=keyed_generator(args.seed, "labels"))
    limits = {"rows": args.local_micro_batch_size, "most_tokens": args.local_micro_batch_tokens}
    with this_run.progress("reward model", sizes.steps, first_step) as advance:
        for step in range(first_step, sizes.steps):
            optimizer.param_groups[0]["lr"] = learning_rate_at(args, step)
            inds = permutation[step * sizes.batch : (step + 1) * sizes.batch][rank :: accelerator.num_processes]
            stats = reward_update(reward_model, optimizer, labels, inds, ids.pad, accelerator, **limits)
            stats |= {"train/gain": reward_model.gain, "train/bias": reward_model.bias}
            means = processes.mean_over_processes(stats, accelerator)
            processes.check_finite(means, step, processes.anew_with_lower("lr"))
            loss = {f"train_reward/minibatch/{name}": means["train/loss"] for name in ("loss", "error")}
            this_run.log(step, loss | means | {"train/lr": learning_rate_at(args, step)})
            agreement = "accuracy" if "train/accuracy" in means else "corr"
            advance(f"loss {means['train/loss']:.3f}, {agreement} {means[f'train/{agreement}']:.2f}")
            if this_run.is_time_to_save(step + 1, sizes.steps):
                state = {"query_position": stream.position}
                this_run.save_checkpoint(step + 1, checkpoints.training_state(reward_model, optimizer), state)

    # [X07] The labels that were not trained on show how good the model is, on the scale that it has learned.
    first_held_out = len(labels.targets) - labels.held_out if labels.held_out else args.num_train
    held_out = torch.arange(first_held_out, len(labels.targets))
    measured = evaluate(reward_model, labels, held_out, ids.pad, sizes.local_rollout_batch, accelerator)
    processes.check_finite(measured, sizes.steps, processes.anew_with_lower("lr"))

    # 3. Normalise again.
    # [D38] On the next queries of the stream.   train_reward.py#L252-L254
    if args.normalize_after:
        normalize_now("after", 0.0, 1.0)

    folder = this_run.model_folder / "reward"
    if accelerator.is_main_process:
        info = {"kind": "reward model", "base_model": given.base_model, "label_dataset": given.label_dataset}
        info |= {"vocab_size": ids.vocab_size, "task": dataclasses.asdict(given.task)}
        models.save_reward_model(folder, reward_model, tokenizer, info, args.trust_remote_code)
    queries = sizes.normalize_samples * (args.normalize_before + args.normalize_after)
    known = {"ceiling": labels.ceiling} | ({} if labels.kind == "score" else {"chance": 1 / labels.samples.shape[1]})
    this_run.finish(PANELS, **known, skipped_queries=stream.position - queries, **measured)
    this_run.upload("reward")
    return folder


# ---- 1. and 3. Normalisation -----------------------------------------------------------------------------------


def target_scale(kind: label_files.LabelKind, targets: Tensor) -> tuple[float, float]:
    """Mean and biased deviation that the scores shall have before training on these labels (labels,)."""
    # [D34] Choices want scores of mean 0 and deviation 1; ratings and differences their own scale.
    #       train_reward.py#L149-L160
    if kind == "best":
        return 0.0, 1.0
    scales = targets.double() if kind == "score" else targets.double() / 2
    if not scales.std(unbiased=False) > 0:
        raise InputError(f"all labels have the {kind} {targets[0].item()}; there is nothing to learn")
    return scales.mean().item(), scales.std(unbiased=False).item()


def sample_to_normalize(
    language_model: PreTrainedModel,
    stream: texts.QueryStream,
    ids: texts.TaskIds,
    args: Args,
    sizes: RewardSizes,
    stage: str,
    rank: int,
) -> Tensor:
    """Queries and responses of the pretrained model: (local_normalize_samples, query_length + response_length)."""
    # [D33] [D37] The samples come from the frozen pretrained model, and are neither truncated nor filtered.
    #       train_reward.py#L191-L199
    task = args.task
    rows = slice(rank * sizes.local_normalize_samples, (rank + 1) * sizes.local_normalize_samples)
    queries = stream.next_batch(sizes.normalize_samples, ids.pad)[rows]  # (local_normalize_samples, query_length)
    # [X01] The noise belongs to the sample.
    generator = keyed_generator(args.seed, "normalize", stage)
    uniforms = torch.rand(sizes.normalize_samples, task.response_length, generator=generator, dtype=torch.float64)
    uniforms = uniforms[rows].to(language_model.device)  # (local_normalize_samples, response_length)

    def respond(language_model: PreTrainedModel, contexts: Tensor, uniforms: Tensor, *, pad_id: int) -> Tensor:
        return generate(language_model, contexts, uniforms, pad_id, ids.vocab_size, task.temperature)[0]

    contexts = texts.add_affixes(queries, ids.prefix, ids.suffix).to(language_model.device)
    limits = {"pad_id": ids.pad, "rows": sizes.local_rollout_batch}
    responses = passes.by_length(respond, language_model, contexts, uniforms, **limits)
    # [D28] The reward model sees the query without prefix and suffix.   rewards.py#L105-L107
    return torch.cat([queries.to(responses.device), responses], dim=1)


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
    scores = passes.by_length(nn.Module.__call__, reward_model, query_responses, pad_id=pad_id, rows=rows)
    gain, bias = gain_and_bias(accelerator.gather(scores), target_mean, target_std)
    reward_model.gain.fill_(gain)
    reward_model.bias.fill_(bias)


def gain_and_bias(scores: Tensor, target_mean: float, target_std: float) -> tuple[float, float]:
    """Gain and bias that give scores (n,) of gain 1 and bias 0 the wanted mean and biased standard deviation.

    Raises NumericalError, a ValueError, if the deviation is 0 or a score is not finite.
    """
    # [D34] gain = S / s and bias = M - gain * m.   rewards.py#L73-L89
    # [D35] The deviation is biased, and numbers that are not finite stop the run.   train_reward.py#L162-L169
    mean, std = scores.double().mean().item(), scores.double().std(unbiased=False).item()
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
    inds: Tensor,
    pad_id: int,
    accelerator: Accelerator,
    *,
    rows: int,
    most_tokens: int,
) -> dict[str, Tensor]:
    """One optimiser step on the labels with these indices (local_batch,).

    rows, most_tokens: labels or tokens of a micro-batch, at most; 0: as many as are fast. Returns the gradient norm,
    and the label_statistics of the whole batch on all processes, all 0-d.
    """
    device, scores, all_targets = reward_model.gain.device, [], []
    # [D67] [D88] Micro-batches add up to the gradient of the whole batch; we count them ourselves.
    optimizer.zero_grad()
    lengths, n = label_lengths(labels, inds, pad_id), labels.samples.shape[1]
    for one in passes.plan_passes(n * lengths, reward_model, rows, most_tokens):
        queries, samples, targets = (
            t[inds[one.rows]].to(device) for t in (labels.queries, labels.samples, labels.targets)
        )
        scores.append(score_samples(reward_model, queries, samples, pad_id, one.longest // n))  # (micro_batch, n)
        all_targets.append(targets)
        (label_loss(labels.kind, scores[-1], targets) * len(targets) / len(inds)).backward()
    processes.average_gradients(reward_model)
    gradient = processes.gradient_norm(reward_model)
    optimizer.step()
    # [X15] Statistics of the whole batch, over all processes.
    batch = torch.cat(scores).detach(), torch.cat(all_targets)  # (local_batch, n), (local_batch,)
    statistics = label_statistics(labels.kind, *accelerator.gather(batch))
    return {**{f"train/{name}": value for name, value in statistics.items()}, "train/gradient_norm": gradient}


def label_lengths(labels: label_files.Labels, inds: Tensor, pad_id: int) -> Tensor:
    """Tokens of query and longest sample of the labels with these indices: (local_batch,)."""
    queries, samples = labels.queries[inds] != pad_id, labels.samples[inds] != pad_id
    return queries.sum(1) + samples.sum(2).amax(1)


def score_samples(reward_model: RewardModel, queries: Tensor, samples: Tensor, pad_id: int, longest: int) -> Tensor:
    """Scores (batch, n) of samples (batch, n, response_length) to queries (batch, query_length).

    longest: tokens of the longest query with its sample.
    """
    n = samples.shape[1]
    query_responses = torch.cat([queries.unsqueeze(1).expand(-1, n, -1), samples], dim=2).flatten(0, 1)
    query_responses = passes.pack(query_responses, pad_id, longest)
    return reward_model(query_responses, pad_id).unflatten(0, (-1, n))


def label_loss(kind: label_files.LabelKind, scores: Tensor, targets: Tensor) -> Tensor:
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
def label_statistics(kind: label_files.LabelKind, scores: Tensor, targets: Tensor) -> dict[str, Tensor]:
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
    chunk: int,
    accelerator: Accelerator,
) -> dict[str, float]:
    """How good the scores of the labels with these indices are; empty without labels. The processes share the work.

    Loss and accuracy, or for ratings, which have no accuracy, the loss and the correlations of scores and ratings.
    """
    if not len(inds):
        return {}
    device, n = reward_model.gain.device, labels.samples.shape[1]
    scores = torch.zeros(len(inds), n, dtype=torch.float64, device=device)
    local = torch.arange(accelerator.process_index, len(inds), accelerator.num_processes)
    for one in passes.plan_passes(label_lengths(labels, inds[local], pad_id), reward_model, rows=chunk):
        rows = inds[local[one.rows]]
        queries, samples = (t[rows].to(device) for t in (labels.queries, labels.samples))
        scores[local[one.rows]] = score_samples(reward_model, queries, samples, pad_id, one.longest).double()
    scores = accelerator.reduce(scores, "sum")  # (len(inds), n)
    targets = labels.targets[inds].to(device)
    statistics = label_statistics(labels.kind, scores, targets)
    names = ("loss", "corr") if labels.kind == "score" else ("loss", "accuracy")
    measured = {f"test_{name}": statistics[name].item() for name in names}
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
    last = counts.cumsum(0).double()  # (distinct values,), the last rank of each
    return (last - (counts - 1) / 2)[groups]


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


# ---- How a model writes and reads tokens -----------------------------------------------------------------------


def keyed_generator(*key: int | str) -> torch.Generator:
    """A CPU random generator that depends on the key alone, so that noise belongs to an episode, not a process."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


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


class RewardModel(nn.Module):
    """A language model with a scalar head, read at the last real token: score = gain * head + bias."""

    def __init__(self, lm_backbone: PreTrainedModel, *, low_precision: bool = False):
        """low_precision: whether matrix products are in bfloat16."""
        super().__init__()
        self.lm_backbone, self.low_precision = lm_backbone, low_precision
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
        with precision.mixed_precision(query_responses.device, enabled=self.low_precision):
            last = read_tokens(self.lm_backbone, query_responses, pad_id, slice(-1, None))  # (batch, 1, width)
            return self.gain * read_scalar(self.reward_head, last[:, 0]) + self.bias


# ---- Plumbing: batch sizes, loading, curves --------------------------------------------------------------------


@dataclass(frozen=True)
class RewardSizes:
    """Sizes, from the arguments and the number of processes: labels, or samples to normalise on."""

    steps: int
    batch: int
    local_batch: int
    local_micro_batch: int
    normalize_samples: int
    local_normalize_samples: int
    local_rollout_batch: int


def reward_sizes(args: Args, num_processes: int) -> RewardSizes:
    """Divide the global sizes exactly, or say which size does not divide and what would."""
    cli.check_values(args)
    cli.above_zero("", args, "lr")
    cli.at_least(1, "", args, "num_train", "batch_size", "rollout_batch_size")
    cli.at_least(
        *(0, "", args, "normalize_samples", "save_interval"),
        *("local_micro_batch_size", "local_micro_batch_tokens", "local_rollout_batch_size"),
    )
    # [D43] A batch must divide among the processes, and num_train must be whole batches.   train_reward.py#L56-L58
    local_batch = processes.split_evenly("batch_size", args.batch_size, num_processes, "processes")
    local_rollout_batch = processes.split_evenly(
        "rollout_batch_size", args.rollout_batch_size, num_processes, "processes"
    )
    if args.num_train % args.batch_size:
        fitting = args.num_train // args.batch_size * args.batch_size or args.batch_size
        raise InputError(
            f"{cli.typed('num_train')} {args.num_train} is not whole batches of {args.batch_size}; "
            f"{cli.flag('num_train')} {fitting} is"
        )
    # [D36] Samples come in whole rollout batches: 256 asked for and batches of 512 give 512.
    #       train_reward.py#L197-L199
    normalize_samples = math.ceil(args.normalize_samples / args.rollout_batch_size) * args.rollout_batch_size
    return RewardSizes(
        steps=args.num_train // args.batch_size,
        batch=args.batch_size,
        local_batch=local_batch,
        local_micro_batch=processes.rows_at_a_time("", args, "local_micro_batch_size", local_batch),
        normalize_samples=normalize_samples,
        local_normalize_samples=normalize_samples // num_processes,
        local_rollout_batch=args.local_rollout_batch_size or local_rollout_batch,
    )


def load_labels(args: Args, tokenizer: PreTrainedTokenizerBase) -> label_files.Labels:
    """All labels of the file; an InputError if there are fewer than are to be trained on."""
    labels = label_files.read_labels(args.label_dataset, args.task, tokenizer)
    # [D20] A file with fewer labels than num_train is refused.   train_reward.py#L94-L96
    there = len(labels.targets) - (labels.held_out or 0)
    if there < args.num_train:
        besides = f", besides {labels.held_out} that are held out" if labels.held_out else ""
        raise InputError(
            f"{cli.flag('num_train')} {args.num_train}: {cli.flag('label_dataset')} {args.label_dataset} has "
            f"{there} labels{besides}"
        )
    return labels


def load_language_model(
    args: Args, ids: texts.TaskIds, longest_label: int, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """The pretrained model, which never changes; an InputError if it cannot be read, or saved as a reward model.

    longest_label: tokens of the longest query with the longest sample.
    """
    language_model = models.load_pretrained(args.base_model, dtype, args.trust_remote_code).to(device)
    longest = max(ids.context_length + args.task.response_length, longest_label)
    models.check_model(language_model, args.base_model, longest, ids.pad, read_tokens)
    with models.model_errors(args.base_model), torch.device("meta"):
        AutoModelForSequenceClassification.from_config(
            language_model.config, trust_remote_code=args.trust_remote_code
        )
    return language_model.requires_grad_(False)


PANELS = {
    "loss": ["train/loss"],
    "accuracy": ["train/accuracy"],
    "correlation with the ratings": ["train/corr"],
    "learning rate": ["train/lr"],
    "gain": ["train/gain"],
}


if __name__ == "__main__":
    cli.run_script(train, lambda argv: cli.parse_args(PRESETS, argv, __doc__))
