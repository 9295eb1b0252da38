"""Step 4 of chapter 3: what scores responses, the weighted sum of what it says, and punishments.

Marks like [V23] name an implementation detail. The original is verl-project/verl at commit b178a3c; files and lines
beside marks are the original's. See docs/reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.lib import rewards
from ppo_rlhf.lib.base import processes
from ppo_rlhf.lib.base.errors import NumericalError
from ppo_rlhf.lib.nets import foreign, templates
from ppo_rlhf.rlvr import arguments as rlvr_arguments, episodes as rlvr_episodes, problems
from ppo_rlhf.tldr import models, packing


def load_sources(
    args: rlvr_arguments.Args,
    tokenizer: PreTrainedTokenizerBase,
    ids: problems.TaskIds,
    accelerator: Accelerator,
    dialogues: Iterable[templates.Messages] = (),
) -> dict[str, rlvr_episodes.Source]:
    """What scores, under its name, with its weight; the verifier first. dialogues: of the problems to train on."""
    shaping, start_of = args.rewards, partial(problems.response_start, args.task)

    def of_texts(name: str, field: str) -> Callable[..., Tensor]:
        says = rewards.load_verifier(name, field, start_of, on_all_processes=True)
        return lambda *columns, **_: torch.tensor(says(*columns), dtype=torch.float64)

    sources = {"verifier": (of_texts(shaping.verifier, "rewards.verifier"), 1.0)}
    if shaping.format:
        sources["format"] = of_texts(shaping.format, "rewards.format"), shaping.format_weight
    if foreign.is_foreign(shaping.trained_model):
        score = foreign.load_scorer(args, tokenizer, ids.pad, device=accelerator.device, dialogues=dialogues)
    elif shaping.trained_model:
        reward_model = models.load_scalar_model(args, "trained_model", ids.vocab_size, frozen=True)
        packing.enable(reward_model.lm_backbone)
        reward_model.to(accelerator.device)
        score = models.response_scorer(reward_model, ids.pad, rows=args.ppo.local_rollout_batch_size)
    if shaping.trained_model:

        def of_model(*texts: list[str], **read: Any) -> Tensor:
            scores = processes.widened(score(**read))  # (rows,)
            # Only functions of texts may say that a response cannot be scored.
            if not scores.isfinite().all():
                raise NumericalError("the reward model gives scores that are not finite; the run stops")
            return scores

        sources["reward_model"] = of_model, shaping.trained_weight
    return sources


def score_responses(
    setup: rlvr_episodes.Setup, inds: Tensor, queries: Tensor, responses: Tensor
) -> tuple[Tensor, Tensor]:
    """The value of each source (rows, sources), and the weighted sum (rows,): NaN where one of them cannot say.

    inds: numbers of the problems (rows,).
    """
    source, texts = setup.problems, problems.to_texts(setup.tokenizer, responses, setup.ids)
    columns = (source.texts, source.answers, source.messages)
    prompts, answers, messages = ([column[i] for i in inds] for column in columns)
    functions, weights = zip(*setup.sources.values(), strict=True)
    # [V23] [V18] Verifiers judge the response alone; the prompt may hold an example's answer.
    #       reward_manager/naive.py#L74-L91
    more = {"queries": queries, "responses": responses, "messages": messages}
    said = [processes.widened(function(prompts, texts, answers, **more), responses.device) for function in functions]
    parts = torch.stack(said, 1)
    return parts, parts @ parts.new_tensor(weights)


def punish(
    raw_scores: Tensor, lengths: Tensor, stopped: Tensor, shaping: rlvr_arguments.RewardsArgs, response_length: int
) -> Tensor:
    """Scores (rows,) after punishments of responses that do not end, or that come near the greatest length."""
    # [V24] The punishment comes after the sum.
    penalty = shaping.missing_stop_penalty
    forms = {"none": raw_scores, "replace": torch.full_like(raw_scores, -penalty), "subtract": raw_scores - penalty}
    scores = torch.where(stopped, raw_scores, forms[shaping.missing_stop])
    if shaping.overlong_buffer:
        scores = scores + rewards.overlong_punishment(lengths, response_length, shaping.overlong_buffer, factor=1.0)
    return scores
