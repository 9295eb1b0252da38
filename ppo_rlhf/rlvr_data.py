"""Samples and batches of chapter 3: tensors with a row for each episode, and how samples fill a batch.

Marks like [V78] name an implementation detail; see docs/details.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor

from ppo_rlhf import rlvr_math
from ppo_rlhf.lib import cli, traces
from ppo_rlhf.lib.errors import InputError

# ---- Steps 1 and 2: what a sampler gets and gives --------------------------------------------------------------


class Request(NamedTuple):
    """The request to a sampler."""

    contexts: Tensor  # (rows, context_length), padded on the left
    uniforms: Tensor  # (rows, response_length), a random number for each token
    temperature: float


class Draw(NamedTuple):
    """Step 1: this process's rows of a round."""

    problems: Tensor  # (local_round,), numbers of the problems, each n times
    groups: Tensor  # (local_round,), equal for the responses to one problem
    requests: list[Request]  # one for all rows; with remax, a second one for the greedy responses


Sampled = tuple[Tensor, Tensor]  # for a request: responses and their log-probs, both (rows, response_length)

# ---- Episodes --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
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
        return type(self)(*(tensor[inds] for tensor in self.tensors().values()))


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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
    seen: list[traces.Seen] = field(default_factory=list)  # what each pass of training computed, for traces

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in super().tensors().items() if name != "seen"}

    @property
    def right_mask(self) -> Tensor:
        """The tokens (rows, response_length) of correct responses that are trained on."""
        return self.loss_mask & self.right.unsqueeze(1)

    def see(
        self, rows: Tensor, new_logprobs: Tensor, new_values: Tensor, entropies: Tensor, exact_kl: Tensor
    ) -> None:
        """Remember for a trace what a pass computed for these rows (micro_batch,)."""
        found = {"new_logprobs": new_logprobs, "new_values": new_values, "exact_kl": exact_kl}
        self.seen.append((rows, {name: x.detach() for name, x in found.items()}))


def make_batch(
    episodes: Rollout,
    rewards: tuple[Tensor, Tensor, Tensor],
    advantages: Tensor,
    returns: Tensor,
    update: int,
    weights: Tensor | None = None,
) -> Batch:
    """The batch of an update. rewards: as compute_rewards gives them. weights None: 1 for every token."""
    kept = {part.name: getattr(episodes, part.name) for part in dataclasses.fields(Rows)}
    weights = torch.ones_like(episodes.logprobs) if weights is None else weights
    told = {"sampler_logprobs": episodes.sampler_logprobs, "right": episodes.parts[:, 0] > 0}
    return Batch(*kept.values(), *rewards, advantages, returns, weights, **told, fresh=episodes.versions == update)


# ---- How a batch is filled -------------------------------------------------------------------------------------


class Pool:
    """Collects what is sampled until it makes a batch: in one round or, with filter_groups, in several."""

    def __init__(
        self, ppo: Any, pad_id: int, accelerator: Accelerator, *, rounds: int = 0, surplus: Rollout | None = None
    ):
        """ppo: the arguments. rounds: made since the run began. surplus: what the last batch has left over."""
        self.ppo, self.pad_id, self.accelerator, self.rounds, self.surplus = ppo, pad_id, accelerator, rounds, surplus
        self.generated: list[Rollout] = []  # by this process, for the current batch
        self.kept = [surplus] if surplus else []  # groups of all processes whose scores differ

    def is_full(self) -> bool:
        """Whether there is a batch; an InputError if there is still none after max_generation_rounds."""
        if not self.ppo.filter_groups:
            return bool(self.generated)
        filled, wanted = sum(len(part.groups) for part in self.kept), self.ppo.batch_size
        if filled < wanted and len(self.generated) == self.ppo.max_generation_rounds:
            mean = torch.cat([one.raw_scores for one in self.generated]).mean()
            raise InputError(
                f"{cli.flag('ppo.max_generation_rounds')} {len(self.generated)} did not fill a batch: only {filled} "
                f"of {wanted} episodes are in groups whose scores differ; the mean score is {mean.item():.3f}"
            )
        return filled >= wanted

    def add(self, rollout: Rollout) -> None:
        """Take in this process's rows of a round. Every process must call this."""
        self.rounds += 1
        self.generated.append(rollout)
        if self.ppo.filter_groups:
            # [V78] Only groups whose raw scores differ are kept; the others have no signal.
            tensors = rollout.tensors().values()
            everyone = Rollout(*(self.accelerator.gather(tensor.contiguous()) for tensor in tensors))
            self.kept.append(everyone.rows(scores_differ(everyone)))

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
    padded = [
        dataclasses.replace(
            one, query_responses=F.pad(one.query_responses, (width - one.query_responses.shape[1], 0), value=pad_id)
        )
        for one in rollouts
    ]
    return Rollout(*(torch.cat(parts) for parts in zip(*(one.tensors().values() for one in padded), strict=True)))


def scores_differ(rollout: Rollout) -> Tensor:
    """Which rows (rows,) are in a group in which not all scores are equal. Rows without a score do not count."""
    live, scores, groups = rollout.mask.any(1), rollout.raw_scores, rollout.groups
    largest = rlvr_math.by_group(scores.masked_fill(~live, -math.inf), groups, "amax")
    return largest > rlvr_math.by_group(scores.masked_fill(~live, math.inf), groups, "amin")
