"""Rollouts of chapter 3 without models, and stand-ins for a policy that their updates train."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import torch

from ppo_rlhf.rlvr import asynchronous as rlvr_async
from ppo_rlhf.rlvr.algebra import Rollout, whiten
from ppo_rlhf.rlvr.networks import ActorCritic
from ppo_rlhf.rlvr.policy import compute_advantages, ppo_update

MASK = torch.tensor(
    [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 0], [1, 0, 0, 0, 0]]
).bool()


def rollout_of(mask: torch.Tensor = MASK, **fields: torch.Tensor) -> Rollout:
    """A rollout with these fields, and nothing in the others; responses alone, without prompts."""
    rows = len(mask)
    names = ("logprobs", "sampler_logprobs", "ref_logprobs", "exact_kl", "values", "advantages", "returns")
    given = dict.fromkeys(names, torch.zeros(mask.shape, dtype=torch.float64))
    given |= dict.fromkeys(("raw_scores", "scores", "baselines"), torch.zeros(rows, dtype=torch.float64))
    given |= dict.fromkeys(("problems", "groups", "age"), torch.zeros(rows, dtype=torch.long))
    given |= {"parts": torch.zeros(rows, 1), "stopped": torch.ones(rows, dtype=torch.bool)}
    given |= {"query_responses": torch.ones(rows, 1 + mask.shape[1], dtype=torch.long)}
    given |= {"weights": torch.ones(mask.shape, dtype=torch.float64)}
    return Rollout(**given | {"mask": mask, "loss_mask": mask} | fields)


ALONE = SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1, process_index=0)


class StandIn(torch.nn.Module):
    """In place of a policy: parameters, and how log-probs of responses, and exact KLs, are read from them."""

    critic = None

    def __init__(self, parameters: torch.Tensor, read: Callable):
        super().__init__()
        self.table, self.read = torch.nn.Parameter(parameters.clone()), read

    @property
    def lm_backbone(self):
        return self

    def forward(self, tokens, responses, mask, pad_id, reference):
        logprobs, exact_kl = (x.masked_fill(~mask, 0) for x in self.read(self.table, tokens, mask))
        zeros = torch.zeros_like(logprobs)
        return logprobs, zeros, zeros, exact_kl


def updated_stand_in(
    network: StandIn, episodes: Rollout, rewards: torch.Tensor, args: rlvr_async.Args
) -> dict[str, torch.Tensor]:
    """Steps of an update of rlvr/asynchronous.py, of episodes of one update before; network.table.grad stays."""
    sampler = rlvr_async.SamplerAhead(None)
    sampler.args, sampler.accelerator, sampler.update, sampler.publishing = args, ALONE, 1, 0.0
    batch, _ = sampler.correct(dataclasses.replace(episodes, rewards=rewards))
    advantages, returns = compute_advantages(batch, args.ppo)
    if args.ppo.whitens:
        advantages = whiten(advantages, batch.mask, keep_mean=False)
    return ppo_update(
        network,
        torch.optim.SGD(network.parameters(), lr=0.0),
        dataclasses.replace(batch, advantages=advantages, returns=returns),
        torch.arange(len(batch.mask))[None, None],
        args,
        ALONE,
        pad_id=-1,
        correct_losses=sampler.correct_losses,
    )


def read_tables(
    logits: torch.Tensor, ref_logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the script reads of tokens (...) from logits (..., vocab_size): log-probs, the reference's, exact KLs."""
    output_layer = SimpleNamespace(weight=torch.eye(logits.shape[-1]), bias=None)
    backbone = SimpleNamespace(get_output_embeddings=lambda: output_layer)
    policy = SimpleNamespace(
        lm_backbone=backbone, vocab_size=logits.shape[-1], temperature=temperature, entropy_learns=False
    )
    reference = SimpleNamespace(logits=lambda hidden: hidden / temperature)
    flat, ref_flat, labels = logits.flatten(0, -2), ref_logits.flatten(0, -2), tokens.flatten()
    logprobs, _, exact = ActorCritic.read_hidden(policy, reference, labels, flat, ref_flat)
    ref_logprobs, _, _ = ActorCritic.read_hidden(policy, None, labels, ref_flat)
    return logprobs.view_as(tokens), ref_logprobs.view_as(tokens), exact.view_as(tokens)
