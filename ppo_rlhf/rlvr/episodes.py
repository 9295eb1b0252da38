"""What the steps of chapter 3 hand to each other: samples, batches, how samples fill a batch, the state of a run.

Marks like [V78] name an implementation detail; see docs/reference.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.lib import rewards as verifiers
from ppo_rlhf.lib.base import errors
from ppo_rlhf.lib.base.errors import InputError
from ppo_rlhf.lib.services import traces
from ppo_rlhf.rlvr import algebra, arguments as rlvr_arguments, problems
from ppo_rlhf.train_policy import AdaptiveKLController

# ---- Steps 1 and 2: what a sampler gets and gives --------------------------------------------------------------


class Request(NamedTuple):
    """The request to a sampler."""

    contexts: Tensor  # (rows, context_length), padded on the left
    uniforms: Tensor  # (rows, response_length), a random number for each token
    temperature: float


class Draw(NamedTuple):
    """Step 1: this process's rows of a round."""

    round: int  # how many rounds came before it, since the run began
    problems: Tensor  # (local_round,), numbers of the problems, each n times
    groups: Tensor  # (local_round,), equal for the responses to one problem
    requests: list[Request]  # one for all rows; with remax, a second one for the greedy responses


Sampled = tuple[Tensor, Tensor]  # for a request: responses and their log-probs, both (rows, response_length)


class Samples(NamedTuple):
    """Step 2: the answers to the requests of a draw."""

    draw: Draw
    answers: list[Sampled]  # one for each request
    version: int  # updates that the sampling policy had seen
    on_policy: bool  # whether that is the policy that learns, and the log-probs are in its arithmetic


# ---- Episodes --------------------------------------------------------------------------------------------------


class Reading(NamedTuple):
    """What the networks say about the tokens of responses: four of (rows, response_length), 0 where masked."""

    logprobs: Tensor
    values: Tensor  # 0 without a critic
    entropies: Tensor  # exact, in nats; 0 if the log-probs were known
    exact_kl: Tensor  # from the reference, in nats; 0 if it was not asked for


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Tensors with a row for each episode. In a mask, True is a token that the policy wrote."""

    # [V11] What is outside of the mask, even NaN, has no effect.
    query_responses: Tensor  # (rows, context_length + response_length), padded on the left and after the stop id
    mask: Tensor  # (rows, response_length) bool, the tokens of the response; none where it cannot be scored
    loss_mask: Tensor  # (rows, response_length) bool, those of them that are trained on
    logprobs: Tensor  # (rows, response_length), under the old policy of the ratio, in training arithmetic
    ref_logprobs: Tensor  # (rows, response_length); the policy's own where there is no reference
    values: Tensor  # (rows, response_length); 0 without a critic

    @property
    def responses(self) -> Tensor:
        """The responses alone: (rows, response_length)."""
        return self.query_responses[:, -self.mask.shape[1] :]

    def tensors(self) -> dict[str, Tensor]:
        return {part.name: getattr(self, part.name) for part in dataclasses.fields(self)}

    def rows(self, inds: Tensor | slice) -> Self:
        return dataclasses.replace(self, **{name: tensor[inds] for name, tensor in self.tensors().items()})


@dataclass(frozen=True, kw_only=True)
class Rollout(Rows):
    """The samples, and what steps 1 to 4 found out about them."""

    sampler_logprobs: Tensor  # (rows, response_length), with which the tokens were drawn; 0 where a tool wrote
    from_tool: Tensor  # (rows, response_length) bool, the tokens that a tool wrote
    exact_kl: Tensor  # (rows, response_length), where the reward needs it, otherwise 0
    parts: Tensor  # (rows, sources), what verifiers and reward model say
    raw_scores: Tensor  # (rows,), their weighted sum
    scores: Tensor  # (rows,), after punishments
    baselines: Tensor  # (rows,), score of the greedy response, for remax; otherwise 0
    stopped: Tensor  # (rows,) bool, whether the response ends with a stop id
    problems: Tensor  # (rows,), numbers of the problems
    groups: Tensor  # (rows,), one number for each time that a prompt was drawn
    versions: Tensor  # (rows,), updates that the sampling policy had seen


Reweigh = Callable[[Tensor, "Batch"], Tensor]  # (new_logprobs, mb) -> more factors of the policy's losses


@dataclass(frozen=True, kw_only=True)
class Correction:
    """The batch from which an update learns, of episodes that another policy may have sampled."""

    episodes: Rollout  # with the masks and the old log-probs of the loss
    weights: Tensor | None = None  # (rows, response_length), factors of the losses; None: 1
    reweigh: Reweigh | None = None  # None: no more factors
    metrics: dict[str, float] = field(default_factory=dict)  # how far the sampler is from the learner


@dataclass(frozen=True, kw_only=True)
class Batch(Rows):
    """The input of the losses of step 7: the results of steps 5 and 6, and what else they need."""

    rewards: Tensor  # (rows, response_length), KL penalty and score
    non_score_rewards: Tensor  # (rows, response_length), the KL penalty
    kl: Tensor  # (rows, response_length), nats
    advantages: Tensor  # (rows, response_length)
    returns: Tensor  # (rows, response_length), targets of the critic; 0 without one
    weights: Tensor  # (rows, response_length), factors of the losses; 1 unless an older policy has sampled
    sampler_logprobs: Tensor  # (rows, response_length), with which the tokens were drawn
    right: Tensor  # (rows,) bool, whether the verifier accepts the response
    fresh: Tensor  # (rows,) bool, whether this update's policy has sampled the row
    reweigh: Reweigh | None = None  # gives more factors of the policy's losses; None: there are none
    seen: list[traces.Seen] = field(default_factory=list)  # what each pass of training computed, for traces

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in super().tensors().items() if name not in ("reweigh", "seen")}

    @property
    def right_mask(self) -> Tensor:
        """The tokens (rows, response_length) of correct responses that are trained on."""
        return self.loss_mask & self.right.unsqueeze(1)

    def see(self, rows: Tensor, new: Reading) -> None:
        """Remember for a trace what a pass computed for these rows (micro_batch,)."""
        found = {"new_logprobs": new.logprobs, "exact_kl": new.exact_kl, "new_values": new.values}
        self.seen.append((rows, {name: x.detach() for name, x in found.items()}))


def make_batch(
    correction: Correction,
    rewards: tuple[Tensor, Tensor, Tensor],
    estimate: tuple[Tensor, Tensor],
    number: int,
    verifier: str = "",
) -> Batch:
    """The batch of update `number`. rewards: as compute_rewards gives them; estimate: advantages and returns.

    verifier: its name says which of its values mean a correct response.
    """
    episodes, weights = correction.episodes, correction.weights
    found = {part.name: getattr(episodes, part.name) for part in dataclasses.fields(Rows)}
    found |= zip(("rewards", "non_score_rewards", "kl"), rewards, strict=True)
    found |= zip(("advantages", "returns"), estimate, strict=True)
    found |= {"sampler_logprobs": episodes.sampler_logprobs, "fresh": episodes.versions == number}
    right = verifiers.is_right(episodes.parts[:, 0], verifier)  # (rows,)
    found |= {"right": right, "reweigh": correction.reweigh}
    return Batch(**found, weights=torch.ones_like(episodes.logprobs) if weights is None else weights)


# ---- How a batch is filled -------------------------------------------------------------------------------------


MOST_ROUNDS = 10  # of generation in an update; groups that never differ would fill no batch


class Pool:
    """Collects what is sampled until it makes a batch: in one round or, with filter_groups, in several."""

    def __init__(
        self,
        ppo: rlvr_arguments.PpoArgs,
        pad_id: int,
        accelerator: Accelerator,
        *,
        rounds: int = 0,
        surplus: Rollout | None = None,
    ):
        """rounds: made since the run began. surplus: what the last batch has left over."""
        self.ppo, self.pad_id, self.accelerator, self.rounds, self.surplus = ppo, pad_id, accelerator, rounds, surplus
        self.generated: list[Rollout] = []  # by this process, for the current batch
        self.kept = [surplus] if surplus else []  # groups of all processes whose scores differ

    def is_full(self) -> bool:
        """Whether there is a batch; an InputError if there is still none after MOST_ROUNDS of generation."""
        if not self.ppo.filter_groups:
            return bool(self.generated)
        filled, wanted = sum(len(part.groups) for part in self.kept), self.ppo.batch_size
        if filled < wanted and len(self.generated) == MOST_ROUNDS:
            mean = torch.cat([one.raw_scores for one in self.generated]).mean()
            raise InputError(
                f"{errors.flag('ppo.filter_groups')}: {MOST_ROUNDS} rounds of generation did not fill a batch: only "
                f"{filled} of {wanted} episodes are in groups whose scores differ; the mean score is "
                f"{mean.item():.3f}"
            )
        return filled >= wanted

    def add(self, rollout: Rollout) -> None:
        """Take in this process's rows of a round. Every process must call this."""
        self.rounds += 1
        self.generated.append(rollout)
        if self.ppo.filter_groups:
            # [V78] Only groups whose raw scores differ are kept; the others have no signal.
            tensors = rollout.tensors().items()
            of_all = Rollout(**{name: self.accelerator.gather(tensor.contiguous()) for name, tensor in tensors})
            self.kept.append(of_all.rows(scores_differ(of_all)))

    def take(self) -> tuple[Rollout, list[Rollout]]:
        """This process's part of the batch, and all that it has generated for it. Makes room for the next batch."""
        generated, self.generated = self.generated, []
        if not self.ppo.filter_groups:
            return generated[0], generated
        whole, local_batch = join(self.kept, self.pad_id), self.ppo.batch_size // self.accelerator.num_processes
        # [V78] What is left over comes first in the next batch, in its order.
        self.surplus = whole.rows(slice(self.ppo.batch_size, None))
        self.kept = [self.surplus]
        start = self.accelerator.process_index * local_batch
        return whole.rows(slice(start, start + local_batch)), generated


def join(rollouts: list[Rollout], pad_id: int) -> Rollout:
    """All their rows, with padding before shorter queries."""
    width = max(one.query_responses.shape[1] for one in rollouts)
    tensors = {part.name: [getattr(one, part.name) for one in rollouts] for part in dataclasses.fields(Rollout)}
    tensors["query_responses"] = [
        F.pad(one, (width - one.shape[1], 0), value=pad_id) for one in tensors["query_responses"]
    ]
    return Rollout(**{name: torch.cat(parts) for name, parts in tensors.items()})


def scores_differ(rollout: Rollout) -> Tensor:
    """Which rows (rows,) are in a group in which not all scores are equal. Rows without a score do not count."""
    live, scores, groups = rollout.mask.any(1), rollout.raw_scores, rollout.groups
    largest = algebra.by_group(scores.masked_fill(~live, -math.inf), groups, "amax")
    return largest > algebra.by_group(scores.masked_fill(~live, math.inf), groups, "amin")


# ---- A run -----------------------------------------------------------------------------------------------------

# (prompts, texts, answers, queries=, responses=, messages=) -> (rows,); and its weight
Source = tuple[Callable[..., Tensor], float]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The parts of a run that no update changes."""

    typed_args: rlvr_arguments.Args  # with names such as `sums` that are not yet paths
    args: rlvr_arguments.Args
    sizes: rlvr_arguments.PpoSizes
    tokenizer: PreTrainedTokenizerBase
    ids: problems.TaskIds
    problems: problems.Problems  # to train on
    held_out: problems.Problems
    sources: dict[str, Source]  # what scores, under its name; the verifier first
    adapters: nn.Module | None  # peft's handle of the policy's adapters
    accelerator: Accelerator

    @property
    def weights(self) -> list[float]:
        """Of the sources."""
        return [weight for _, weight in self.sources.values()]


@dataclass(kw_only=True)
class Progress:
    """The state that one update hands to the next, in addition to the networks; a checkpoint keeps it."""

    first_update: int  # when this process started or resumed the run
    controller: AdaptiveKLController
    pool: Pool
    evaluation: dict[str, float]  # the newest
    explained: float  # the largest share of the variance of the returns that the critic has explained, at least 0
    of_sampler: dict[str, dict[str, Tensor]]  # parts of the checkpoint that are the sampler's
