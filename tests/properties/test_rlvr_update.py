"""Chapter 3's models, rollout and update on tiny networks: what must not matter, and what must."""

import copy
import dataclasses
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from oracles import average_gradients, numbers, on_processes
from rollouts import ALONE, StandIn, rollout_of
from torch.testing import assert_close

from ppo_rlhf import train_policy, train_reward
from ppo_rlhf.rlvr import policy as rlvr_policy, problems
from ppo_rlhf.rlvr.algebra import Rollout, whiten
from ppo_rlhf.rlvr.arguments import Args, PpoArgs, RewardsArgs, ppo_sizes
from ppo_rlhf.rlvr.networks import ActorCritic, Reference
from ppo_rlhf.rlvr.policy import compute_advantages, ppo_update
from ppo_rlhf.tldr import models, packing, responses as tldr_responses

PAD, STOP, CONTEXT, RESPONSE, TEMPERATURE = 29, 28, 6, 7, 0.7
LENGTHS = [1, 7, 3, 5, 7, 2, 4, 6]
ARCHITECTURES = {"gpt2": 29, "gpt_neox": 40, "llama": 29, "qwen2": 40}


def networks(tiny_models, architecture: str = "gpt2", critic: bool = True) -> tuple[ActorCritic, Reference]:
    """Policy, critic and reference of different weights, in float64."""
    rows = ARCHITECTURES[architecture]
    policy, other, third = (tiny_models(architecture, rows, seed=seed).double() for seed in (0, 1, 2))
    value = train_reward.RewardModel(other.base_model).double() if critic else None
    if critic:
        with torch.no_grad():
            value.reward_head.weight.copy_(numbers(1, 1, 16))
    reference = Reference(third, None, PAD, TEMPERATURE)
    return ActorCritic(policy, value, PAD, TEMPERATURE), reference


def tokens_and_mask(lengths: list[int] = LENGTHS) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of 1 to CONTEXT tokens, padded on the left, and responses of these lengths."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 26, (len(lengths), CONTEXT + RESPONSE), generator=generator)
    for row, length in enumerate(lengths):
        tokens[row, : row % CONTEXT] = PAD
        tokens[row, CONTEXT + length :] = PAD
    return tokens, torch.arange(RESPONSE) < torch.tensor(lengths).unsqueeze(1)


# ---- Models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_read_is_what_the_library_says_of_the_row_alone(tiny_models, monkeypatch, architecture):
    """Packed or not, with the logits of five tokens at a time."""
    monkeypatch.setattr(packing, "MOST_LOGITS", 5 * PAD)
    actor_critic, reference = networks(tiny_models, architecture)
    tokens, mask = tokens_and_mask()
    responses, packed = tokens[:, CONTEXT:], packing.pack(tokens, PAD, int((tokens != PAD).sum(1).max()))
    readings = [actor_critic(rows, responses, mask, PAD, reference) for rows in (packed, tokens)]
    for row, n in enumerate(LENGTHS):
        alone = tokens[row][tokens[row] != PAD].unsqueeze(0)
        before = slice(-n - 1, -1)  # the positions before the response's tokens
        with torch.no_grad():
            log_p, log_q = (
                (network.lm_backbone(input_ids=alone).logits[0, before, :PAD] / TEMPERATURE).log_softmax(1)
                for network in (actor_critic, reference)
            )
            hidden = actor_critic.critic.lm_backbone(input_ids=alone).last_hidden_state[0, before]
        expected = (
            log_p.gather(1, alone[0, -n:, None])[:, 0],
            -(log_p.exp() * log_p).sum(1),
            actor_critic.critic.reward_head(hidden)[:, 0],
            (log_p.exp() * (log_p - log_q)).sum(1),
        )
        for found in readings:
            assert_close(tuple(x[row, :n] for x in found), expected, atol=1e-9, rtol=0)
            assert all((x[~mask] == 0).all() for x in found)


def test_no_column_is_computed_beyond_the_longest_row(tiny_models, monkeypatch):
    actor_critic, reference = networks(tiny_models)
    tokens, mask = tokens_and_mask([2, 3, 1])  # prompts of 6, 5 and 4 tokens
    read, shapes = train_policy.read_tokens, []
    monkeypatch.setattr(
        tldr_responses, "read_tokens", lambda model, x, *more: shapes.append(x.shape) or read(model, x, *more)
    )
    packing.by_length(
        lambda tokens, responses, mask: actor_critic(tokens, responses, mask, PAD, reference),
        *(tokens, tokens[:, CONTEXT:], mask),
        model=actor_critic,
        pad_id=PAD,
        rows=3,
    )
    assert shapes == [(3, 8)] * 3  # policy, reference and critic


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_prompt_is_read_once_for_all_its_responses(tiny_models, architecture):
    """Two prompts, four responses to each, the same as if each row were alone. No spare id is sampled."""
    model, tokens = tiny_models(architecture, ARCHITECTURES[architecture]).double(), tokens_and_mask()[0]
    prompts = tokens[[1, 4], :CONTEXT].repeat_interleave(4, 0)  # of 5 and 2 tokens
    uniforms = torch.rand(8, RESPONSE, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    rows = []

    def sample(inds: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return tldr_responses.generate_until(model, prompts[inds], uniforms[inds], PAD, PAD, 1.0, {STOP})

    alone = [sample(slice(i, i + 1)) for i in range(8)]
    model.base_model.register_forward_pre_hook(
        lambda _, args, inputs: rows.append(len((*args, *inputs.values())[0])), with_kwargs=True
    )
    responses, logprobs = sample(slice(None))
    assert sum(rows[: rows.index(8)]) == 2  # before the first token that all eight read
    assert torch.equal(responses, torch.cat([one for one, _ in alone]))
    assert_close(logprobs, torch.cat([one for _, one in alone]), atol=1e-12, rtol=0)
    assert len(responses.unique(dim=0)) > 2 and responses.max() <= PAD


def test_evaluations_sample_several_responses_as_one_at_a_time():
    """Three problems, four samples of each, at most ten rows at a time."""
    held_out = problems.Problems(
        prompts=[[1], [2, 3], [4]],
        texts="abc",
        answers="xyz",
        kinds="",
        messages=[],
        too_long=0,
        unscorable=0,
        empty=0,
    )
    solve = partial(
        problems.solve,
        held_out,
        lambda contexts, noise, temperature: ((contexts[:, -1:] + 20 * noise).long(), noise),
        [lambda *texts: [float("1" in text or a + b == "by") for a, text, b in zip(*texts[:3], strict=True)]],
        SimpleNamespace(decode=lambda row, **_: " ".join(map(str, row))),
        problems.TaskIds(pad=PAD, stops=(STOP - 20,)),
        local_batch=10,
        accelerator=SimpleNamespace(**vars(ALONE), device="cpu"),
        temperature=1.0,
    )
    uniforms = torch.rand(3, 4, RESPONSE, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    together, alone = solve(uniforms=uniforms), [solve(uniforms=uniforms[:, [i]])[0] for i in range(4)]
    assert len({text for one in together for text in one.texts}) == 12
    for one, other in zip(together, alone, strict=True):
        assert one.texts == other.texts and one.right.equal(other.right)


def test_policy_and_reference_begin_as_the_same_distribution(tiny_models, tiny_tokenizer, tmp_path):
    """At the temperature that samples, or the KL would not be 0 before the first update."""
    model = tiny_models("gpt2")
    for part in (model, tiny_tokenizer):
        part.save_pretrained(tmp_path)
    tokenizer = models.load_tokenizer(str(tmp_path))
    task = problems.TaskArgs(prompt_length=CONTEXT, response_length=RESPONSE, temperature=TEMPERATURE)
    args = Args(base_model=str(tmp_path), task=task, ppo=PpoArgs(advantage="grpo"), rewards=RewardsArgs(kl_coef=0.1))
    actor_critic, reference, _ = rlvr_policy.load_networks(args, tokenizer, Accelerator(cpu=True).device)
    tokens = torch.randint(26, (4, CONTEXT + RESPONSE), generator=torch.Generator().manual_seed(1))
    rows = (tokens, tokens[:, CONTEXT:], torch.ones(4, RESPONSE).bool(), PAD)
    with torch.no_grad():
        logprobs = (model.eval()(tokens).logits[:, CONTEXT - 1 : -1] / TEMPERATURE).log_softmax(2)
        expected = logprobs.gather(2, rows[1].unsqueeze(2)).squeeze(2)
        for found in (actor_critic(*rows)[0], reference.logprobs(*rows)):
            assert_close(found, expected, atol=1e-5, rtol=0)


# ---- Update ----------------------------------------------------------------------------------------------------


def make_episodes(actor_critic: ActorCritic, reference: Reference) -> Rollout:
    """Two groups of four, from another policy than the one that learns, so that ratios are not 1, with rewards."""
    tokens, mask = tokens_and_mask()
    with torch.no_grad():
        logprobs, _, values, _ = actor_critic(tokens, tokens[:, CONTEXT:], mask, PAD)
        ref_logprobs = reference.logprobs(tokens, tokens[:, CONTEXT:], mask, PAD)
    logprobs = (logprobs + 0.3 * numbers(1, *mask.shape)).masked_fill(~mask, math.nan)
    values = (values + numbers(2, *mask.shape)).masked_fill(~mask, math.nan)
    right = torch.tensor([1, 0, 0, 1, 0, 1, 1, 0])
    return rollout_of(
        mask,
        query_responses=tokens,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        values=values,
        groups=torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]),
        parts=right.double().unsqueeze(1),
        right=right.bool(),
        baselines=numbers(4, len(tokens)),
        rewards=numbers(3, *mask.shape).masked_fill(~mask, math.nan),
    )


def with_advantages(episodes: Rollout, ppo: PpoArgs, process) -> Rollout:
    """Step 6, as in `train`."""
    advantages, returns = compute_advantages(episodes, ppo, source_weights=[1.0])
    if ppo.whitens:
        reduce = partial(process.reduce, reduction="sum")
        advantages = whiten(advantages, episodes.mask, keep_mean=False, reduce=reduce)
    return dataclasses.replace(episodes, advantages=advantages, returns=returns)


SGD = partial(torch.optim.SGD, lr=0.1)


def updated(
    tiny_models,
    processes: int = 1,
    change=lambda episodes: episodes,
    policy_learns: bool = True,
    optimizer=SGD,
    rewards: RewardsArgs | None = None,
    **settings,
):
    """Parameters after an update of a batch, and its steps, as each process has them."""
    settings = {"batch_size": 8, "samples_per_prompt": 4, "noptepochs": 2, "max_grad_norm": 0.5} | settings
    args = Args(ppo=PpoArgs(nminibatches=2, total_episodes=8, **settings), rewards=rewards or RewardsArgs())
    sizes = ppo_sizes(args, processes)
    made = networks(tiny_models, critic=args.ppo.advantage == "gae")

    def on_process(process):
        actor_critic, reference = copy.deepcopy(made)
        episodes = change(make_episodes(actor_critic, reference))
        rank = process.process_index
        mine = slice(rank * sizes.local_batch, (rank + 1) * sizes.local_batch)
        steps = ppo_update(
            actor_critic,
            optimizer([p for p in actor_critic.parameters() if p.requires_grad]),
            with_advantages(episodes.rows(mine), args.ppo, process),
            tldr_responses.draw_minibatches(args.seed, 0, args.ppo.noptepochs, mine, args.ppo.nminibatches),
            args,
            process,
            pad_id=PAD,
            reference=reference,
            policy_learns=policy_learns,
        )
        return dict(actor_critic.named_parameters()), steps

    return on_processes(processes, on_process)


def same_parameters(one: dict, other: dict) -> None:
    for name, parameter in one.items():
        assert_close(parameter, other[name], atol=1e-9, rtol=0)


VARIANTS = {
    "gae": {"entropy_coef": 0.1, "dual_clip": 3.0},
    "grpo in sequences": {"advantage": "grpo", "loss_aggregation": "seq-mean-token-mean"},
    "norm": {"advantage": "dr_grpo", "loss_aggregation": "seq-mean-token-sum-norm"},
    "kl": {"advantage": "rloo", "loss_aggregation": "seq-mean-token-sum", "rewards": RewardsArgs(kl_loss_coef=0.5)},
    "exact kl": {"advantage": "remax", "rewards": RewardsArgs(kl_loss_coef=0.5, kl_loss_estimator="full")},
    "critic": {"lam": 0.9, "critic_lam": 1.0, "lam_alpha": 0.8, "nll_coef": 0.3},
    "gspo": {"advantage": "grpo", "loss": "gspo", "loss_aggregation": "seq-mean-token-mean"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_micro_batches_and_processes_change_nothing(tiny_models, monkeypatch, variant):
    """Nor do logits of three tokens at a time, through which the gradient is computed a second time."""
    settings = VARIANTS[variant]
    monkeypatch.setattr(rlvr_policy, "average_gradients", average_gradients)
    ((whole, steps),) = updated(tiny_models, **settings)
    shares = updated(tiny_models, processes=2, local_micro_batch_size=2, **settings)
    for name, expected in steps.items():
        of_both = [found[name] for _, found in shares]
        assert_close(of_both[0] if name.endswith("norm") else sum(of_both), expected, atol=1e-9, rtol=1e-9)
    monkeypatch.setattr(packing, "MOST_LOGITS", 3 * PAD)
    in_parts = updated(tiny_models, local_micro_batch_size=1, **settings)
    for parameters, _ in (*shares, *in_parts):
        same_parameters(whole, parameters)
    start, _ = networks(tiny_models, critic=settings.get("advantage", "gae") == "gae")
    assert max((p - start.get_parameter(name)).abs().max() for name, p in whole.items()) > 1e-4


def test_what_is_masked_reaches_no_gradient(tiny_models):
    def cut(episodes: Rollout, filled: float) -> Rollout:
        loss_mask = episodes.loss_mask.clone()
        loss_mask[1] = loss_mask[4, :3] = False
        names = ("rewards", "logprobs", "values")
        spoiled = {name: getattr(episodes, name).masked_fill(~episodes.mask, filled) for name in names}
        return dataclasses.replace(episodes, loss_mask=loss_mask, **spoiled)

    ((clean, _),), ((spoiled, _),) = (
        updated(tiny_models, change=partial(cut, filled=filled)) for filled in (math.nan, -1e9)
    )
    same_parameters(clean, spoiled)
    assert all(p.isfinite().all() for p in clean.values())


@pytest.mark.parametrize("whitened", [False, True])
def test_a_rejected_token_leaves_the_loss_but_not_the_advantages(whitened):
    mask = tokens_and_mask()[1]
    episodes = rollout_of(mask, groups=torch.arange(8) // 4, rewards=numbers(1, 8, RESPONSE))
    cut = dataclasses.replace(episodes, loss_mask=mask & (torch.arange(RESPONSE) < 2))
    ppo = PpoArgs(advantage="grpo", whiten_advantages=whitened)
    whole, narrowed = (with_advantages(one, ppo, ALONE).advantages for one in (episodes, cut))
    assert whole.equal(narrowed) and whole.any()


class Terms(StandIn):
    """Parameters for log-probs and entropies, as they are."""

    def forward(self, tokens, responses, mask, pad_id, reference):
        logprobs, entropies = self.table.masked_fill(~mask, 0)
        return logprobs, entropies, torch.zeros_like(logprobs), torch.zeros_like(logprobs)


def test_terms_of_the_loss_have_their_own_gradients():
    """The likelihood loss is a plain mean over the trained tokens of all correct responses; a bonus has a minus."""
    _, mask = tokens_and_mask()
    loss_mask, right = mask.clone(), torch.arange(8) % 3 == 0
    loss_mask[3, :2] = loss_mask[6] = False  # both are correct
    network = Terms(torch.stack([numbers(0, *mask.shape), numbers(2, *mask.shape)]), None)
    ppo = PpoArgs(
        advantage="grpo",
        loss_aggregation="seq-mean-token-sum",
        nll_coef=0.3,
        entropy_coef=0.2,
        max_grad_norm=1e9,
    )
    steps = ppo_update(
        network,
        torch.optim.SGD(network.parameters(), lr=0.0),
        rollout_of(mask, loss_mask=loss_mask, right=right),
        torch.arange(8)[None, None],
        Args(ppo=ppo),
        ALONE,
        pad_id=PAD,
    )
    new_logprobs, entropies = network.table
    likelihood = -new_logprobs[loss_mask & right.unsqueeze(1)].mean()
    terms = 0.3 * likelihood - 0.2 * entropies[loss_mask].sum() / 7  # responses
    assert_close(steps["objective/loss"][0], terms.detach())
    assert_close(network.table.grad, torch.autograd.grad(terms, network.table)[0])


def test_a_step_is_that_of_its_minibatch_alone(tiny_models):
    """With its counts and gradient, where the networks don't move. Weights of another sampler scale its losses, and
    so do advantages, which are not whitened again.
    """
    actor_critic, reference = networks(tiny_models)
    args = Args(ppo=PpoArgs(batch_size=8, nminibatches=2))
    batch = with_advantages(make_episodes(actor_critic, reference), args.ppo, ALONE)

    def steps_of(batch: Rollout, minibatches: torch.Tensor) -> dict[str, torch.Tensor]:
        parameters = [p for p in actor_critic.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=0.0)
        return ppo_update(actor_critic, optimizer, batch, minibatches[None], args, ALONE, pad_id=PAD)

    halves = torch.arange(8).view(2, 4)
    steps = steps_of(batch, halves)
    alone = [steps_of(batch.rows(half), torch.arange(4)[None]) for half in halves]
    for name, found in steps.items():
        assert_close(found, torch.cat([one[name] for one in alone]), rtol=1e-9, atol=1e-12)
    first, second = steps["policy/grad_norm"].tolist()
    assert abs(first / second - 1) > 0.01
    scaled = dataclasses.replace(batch, weights=2 * batch.weights, advantages=3 * batch.advantages)
    assert_close(steps_of(scaled, halves)["policy/grad_norm"], 6 * steps["policy/grad_norm"])


def test_the_critic_learns_alone_during_its_warm_up(tiny_models):
    """The policy doesn't move at all: its optimiser has weight decay and moments, which a loss of 0 wouldn't stop."""
    start, _ = networks(tiny_models)
    optimizer = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1)
    ((parameters, _),) = updated(tiny_models, policy_learns=False, optimizer=optimizer)
    moved = {name for name, parameter in parameters.items() if parameter.ne(start.get_parameter(name)).any()}
    assert "critic.reward_head.weight" in moved and not any(name.startswith("lm_backbone") for name in moved)
