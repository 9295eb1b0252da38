"""Direct preference optimisation: a policy from comparisons, without a reward model and without sampling.

    python benchmark/experiments/dpo.py --base_model models/<run>/sft --output models/dpo     # on posts, a minute

Among all policies, the one that maximises reward - beta * KL is proportional to reference * exp(reward / beta). So
its reward is beta * log(policy / reference), plus a number that depends on the post alone and cancels between two
summaries of one post. DPO (Rafailov et al. 2023, arXiv 2305.18290) puts this into the loss of a reward model:

    1. log-probs of all compared summaries under the reference, which is the fine-tuned model
    2. a pass over the comparisons in random order: minimise -log sigmoid(beta * (log-ratio of chosen - of rejected))

The log-prob of a summary is a sum over its tokens, with the end-of-text token, at the temperature at which the policy
will be sampled. Data, models and tokens are those of chapter 2; the comparisons are those that tldr_reward.py reads.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ppo_rlhf import worlds
from ppo_rlhf.lib import cli, lm, models, passes, posts, processes, run

# ---- Arguments -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Args(cli.RunArgs):
    output: Path = Path("dpo")
    """folder that gets the trained policy"""
    beta: float = 0.1
    """how strongly the policy is held near the reference: reward per nat"""
    num_train: int = 0
    """comparisons to train on, the first of the data set; 0: all"""
    epochs: int = 1
    """passes over the comparisons"""
    batch_size: int = 8
    """comparisons per optimiser step"""
    lr: float = 3e-5
    """learning rate of the first step of AdamW; it falls linearly to 0. Higher ones overshoot in the first steps"""
    task: posts.TaskArgs = field(default_factory=lambda: posts.TASKS["posts"])
    """queries and responses"""


def train(args: Args, watch: Callable[[int, int, PreTrainedModel], None] | None = None) -> list[dict[str, float]]:
    """Train a policy and save it. watch(step, steps, policy) is called before each step and after the last.

    Returns the metrics of each step.
    """
    cli.check_values(args)
    cli.above_zero("", args, "beta", "lr")
    cli.at_least(1, "", args, "epochs", "batch_size")
    given, args = args, worlds.find_paths(args)
    tokenizer = models.load_tokenizer(args.base_model)
    ids = posts.task_ids(args.task, tokenizer)
    comparisons = posts.read_comparisons(args.task, tokenizer, "train", limit=args.num_train)
    policy = models.load_base_model(args)
    models.check_model(
        *(policy, args.base_model, args.task.query_length + args.task.comparison_length),
        *(ids.vocab_size, lm.read_tokens),
    )
    optimizer = torch.optim.AdamW(policy.parameters(), args.lr, weight_decay=0.0)
    reading = {"pad_id": ids.pad, "temperature": args.task.temperature, "vocab_size": ids.vocab_size}

    # 1. The policy is still the reference.
    with torch.no_grad():
        parts = [
            pair_logprobs(policy, *comparisons.tokens(inds), **reading)
            for inds in torch.arange(len(comparisons)).split(64)
        ]
    ref_logprobs = [torch.cat(side) for side in zip(*parts, strict=True)]  # two of (comparisons,)

    # 2. Passes over the comparisons.
    orders = [
        torch.randperm(len(comparisons), generator=lm.keyed_generator(args.seed, "comparisons", epoch))
        for epoch in range(args.epochs)
    ]
    batches = [inds for order in orders for inds in order.split(args.batch_size)]
    metrics = []
    for step, inds in enumerate(batches):
        if watch:
            watch(step, len(batches), policy)
        optimizer.param_groups[0]["lr"] = run.scheduled_lr(args.lr, "linear", step, len(batches))
        logprobs = pair_logprobs(policy, *comparisons.tokens(inds), **reading)
        losses, margins = dpo_losses(*logprobs, *(side[inds] for side in ref_logprobs), args.beta)
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        metrics.append({"loss": losses.mean().item(), "accuracy": (margins > 0).float().mean().item()})
        processes.check_finite(metrics[-1], step, processes.anew_with_lower("lr"))
    if watch:
        watch(len(batches), len(batches), policy)
    info = {"kind": "policy", "base_model": given.base_model, "vocab_size": ids.vocab_size}
    info |= {"task": vars(given.task), "reward_model": "", "function": "", "monitor": ""}
    models.save_language_model(args.output, policy, policy.state_dict(), tokenizer, info)
    return metrics


def pair_logprobs(
    policy: PreTrainedModel,
    queries: Tensor,
    chosen: Tensor,
    rejected: Tensor,
    *,
    pad_id: int,
    temperature: float,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """Log-probs of chosen and rejected summaries (batch, comparison_length) of the same posts: two of (batch,).

    queries: (batch, query_length). All padding is pad_id; the other tokens of a summary count, to its end.
    """
    summaries = torch.cat([chosen, rejected])  # (2 * batch, comparison_length)
    tokens = torch.cat([torch.cat([queries, queries]), summaries], dim=1)
    tokens = passes.pack(tokens, pad_id, int(passes.count_tokens(tokens, pad_id).max()))
    logprobs, _ = lm.response_statistics(policy, tokens, summaries, pad_id, temperature, vocab_size)
    chosen_logprobs, rejected_logprobs = logprobs.masked_fill(summaries == pad_id, 0).sum(1).chunk(2)
    return chosen_logprobs, rejected_logprobs


def dpo_losses(
    chosen_logprobs: Tensor, rejected_logprobs: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """Losses and margins of comparisons, from log-probs of summaries under policy and reference; all (batch,).

    margin = beta * (log pi(chosen) / ref(chosen) - log pi(rejected) / ref(rejected))     loss = -log sigmoid(margin)
    """
    margins = beta * ((chosen_logprobs - ref_chosen) - (rejected_logprobs - ref_rejected))
    return F.softplus(-margins), margins  # -log sigmoid(x) is softplus(-x)


PRESETS = {"posts": Args(preset="posts", exp_name="dpo")}

if __name__ == "__main__":
    cli.run_script(train, lambda argv: cli.parse_args(PRESETS, argv, __doc__))
