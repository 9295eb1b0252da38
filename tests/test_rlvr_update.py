"""Chapter 3's models, rollout and update on tiny networks: what must not matter, and what must."""

import copy
import dataclasses
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from oracles import on_processes
from test_rlvr_math import batch_from, numbers, rollout_of, setup_of
from torch.testing import assert_close

from ppo_rlhf import train_policy, train_reward
from ppo_rlhf.rlvr import algebra, policy as rlvr_policy, problems
from ppo_rlhf.rlvr.algebra import ESTIMATORS, Rollout
from ppo_rlhf.rlvr.arguments import Args, PpoArgs, RewardsArgs, ppo_sizes
from ppo_rlhf.rlvr.policy import ActorCritic, Correction, Pool, Reference, update
from ppo_rlhf.tldr import packing, responses as tldr_responses

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
    reference = Reference(ActorCritic(third, None, PAD, TEMPERATURE), None)
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
@pytest.mark.parametrize("tokens_of_a_piece", [4_096, 5])
def test_what_is_read_is_what_the_library_says_of_the_row_alone(
    tiny_models, monkeypatch, architecture, tokens_of_a_piece
):
    monkeypatch.setattr(packing, "MOST_LOGITS", tokens_of_a_piece * PAD)
    actor_critic, reference = networks(tiny_models, architecture)
    tokens, mask = tokens_and_mask()
    responses, longest = tokens[:, CONTEXT:], int((tokens != PAD).sum(1).max())
    found = actor_critic(packing.pack(tokens, PAD, longest), responses, mask, PAD, reference)
    for one, other in zip(found, actor_critic(tokens, responses, mask, PAD, reference), strict=True):  # not packed
        assert_close(one, other, atol=1e-9, rtol=0)
    assert all((x[~mask] == 0).all() for x in found)
    for row in range(len(tokens)):
        alone = tokens[row][tokens[row] != PAD].unsqueeze(0)
        n = LENGTHS[row]
        with torch.no_grad():
            logits = actor_critic.lm_backbone(input_ids=alone).logits[0, -n - 1 : -1, :PAD] / TEMPERATURE
            theirs = reference.network.lm_backbone(input_ids=alone).logits[0, -n - 1 : -1, :PAD] / TEMPERATURE
            hidden = actor_critic.critic.lm_backbone(input_ids=alone).last_hidden_state[0, -n - 1 : -1]
        p, log_p, log_q = logits.softmax(1), logits.log_softmax(1), theirs.log_softmax(1)
        logprobs, values, entropies, kl = (x[row, :n] for x in found)
        assert_close(logprobs, log_p.gather(1, alone[0, -n:, None])[:, 0], atol=1e-9, rtol=0)
        assert_close(values, actor_critic.critic.reward_head(hidden)[:, 0], atol=1e-9, rtol=0)
        assert_close(entropies, -(p * log_p).sum(1), atol=1e-9, rtol=0)
        assert_close(kl, (p * (log_p - log_q)).sum(1), atol=1e-9, rtol=0)


def test_logits_in_chunks_have_the_same_gradient(tiny_models, monkeypatch):
    tokens, mask = tokens_and_mask()
    found = []
    for tokens_of_a_piece in (4_096, 3):
        monkeypatch.setattr(packing, "MOST_LOGITS", tokens_of_a_piece * PAD)
        actor_critic, reference = networks(tiny_models)
        logprobs, values, entropies, kl = actor_critic(tokens, tokens[:, CONTEXT:], mask, PAD, reference)
        (logprobs * numbers(1, *mask.shape) + values + entropies - 2 * kl).sum().backward()
        found.append([p.grad for p in actor_critic.parameters() if p.grad is not None])
    for one, other in zip(*found, strict=True):
        assert_close(one, other, atol=1e-10, rtol=1e-9)


def test_no_column_is_computed_beyond_the_longest_row(tiny_models, monkeypatch):
    actor_critic, reference = networks(tiny_models)
    tokens, mask = tokens_and_mask([2, 3, 1])  # prompts of 6, 5 and 4 tokens
    read, shapes = train_policy.read_tokens, []
    monkeypatch.setattr(
        tldr_responses, "read_tokens", lambda model, x, *more: shapes.append(x.shape) or read(model, x, *more)
    )
    function = partial(rlvr_policy.read_responses, reference=reference, exact=True, recorded=False)
    packing.by_length(
        function, actor_critic, tokens, tokens[:, CONTEXT:], mask, torch.zeros(mask.shape), pad_id=PAD, rows=3
    )
    assert shapes == [(3, 8)] * 4  # policy, critic, and the reference twice


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_prompt_is_read_once_for_all_its_responses(tiny_models, architecture):
    """Two prompts, four responses to each, the same as if each row were alone."""
    model, tokens = tiny_models(architecture, ARCHITECTURES[architecture]).double(), tokens_and_mask()[0]
    prompts = tokens[[1, 4], :CONTEXT].repeat_interleave(4, 0)  # of 5 and 2 tokens
    uniforms = torch.rand(8, RESPONSE, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    sample, rows = (
        partial(tldr_responses.generate_until, pad_id=PAD, vocab_size=PAD, temperature=1.0, stop_ids={STOP}),
        [],
    )
    alone = [sample(model, prompts[i : i + 1], uniforms[i : i + 1]) for i in range(8)]
    hook = model.base_model.register_forward_pre_hook(
        lambda _, args, inputs: rows.append(len((*args, *inputs.values())[0])), with_kwargs=True
    )
    responses, logprobs = sample(model, prompts, uniforms)
    hook.remove()
    assert sum(rows[: rows.index(8)]) == 2  # before the first token that all eight read
    assert torch.equal(responses, torch.cat([one for one, _ in alone]))
    assert_close(logprobs, torch.cat([one for _, one in alone]), atol=1e-12, rtol=0)
    assert len(responses.unique(dim=0)) > 2


def problems_of(prompts: list[list[int]], texts: list[str], answers: list[str]) -> problems.Problems:
    columns = {"prompts": prompts, "texts": texts, "answers": answers, "kinds": [""] * len(prompts)}
    columns["messages"] = [[] for _ in prompts]
    return problems.Problems(**columns, too_long=0, unscorable=0, empty=0)


def test_evaluations_read_a_prompt_once_for_all_its_samples(tiny_models):
    """Three problems, four samples of each, at most ten rows at a time; the same as one sample at a time."""
    model, tokens = tiny_models("llama", PAD).double(), tokens_and_mask()[0]
    prompts = [row[row != PAD].tolist() for row in tokens[:3, :CONTEXT]]
    held_out = problems_of(prompts, list("abc"), list("xyz"))
    ids = problems.TaskIds(pad=PAD, stops=(STOP,))
    tokenizer = SimpleNamespace(decode=lambda row, **_: " ".join(map(str, row)))
    verifiers = [lambda prompts, texts, answers: [len(text) + ord(a) for text, a in zip(texts, answers, strict=True)]]
    verifiers.append(lambda prompts, texts, answers: judged.append(len(texts)) or [float(p == "b") for p in prompts])
    sample = partial(tldr_responses.generate_until, model, pad_id=PAD, vocab_size=PAD, stop_ids=ids.stops)
    process = SimpleNamespace(num_processes=1, process_index=0, device="cpu", gather=lambda x: x)
    rows, judged = [], []
    solve = partial(problems.solve, held_out, sample, verifiers, tokenizer, ids, 10, process, 1.0)
    uniforms = torch.rand(3, 4, RESPONSE, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    alone = [solve(uniforms[:, [i]])[0] for i in range(4)]
    hook = model.base_model.register_forward_pre_hook(
        lambda _, args, inputs: rows.append((*args, *inputs.values())[0].shape), with_kwargs=True
    )
    together = solve(uniforms)
    hook.remove()
    assert sum(n for n, columns in rows if columns > 1) == 3 and judged[4:] == [8, 4]  # none fills up the last pass
    assert max(n for n, _ in rows) == 8
    assert [one.texts for one in together] == [one.texts for one in alone]
    assert len({text for one in together for text in one.texts}) > 6
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one.lengths, other.lengths) and torch.equal(one.stopped, other.stopped)
        assert torch.equal(one.right, other.right) and one.right[:, 1].tolist() == [0, 1, 0]


def test_what_the_sampler_recorded_is_not_read_again(tiny_models):
    """V82: the policy reads nothing; the critic's values are those of a full reading."""
    actor_critic, reference = networks(tiny_models)
    tokens, mask = tokens_and_mask()
    place, recorded = (tokens, tokens[:, CONTEXT:], mask), numbers(5, *mask.shape)
    with torch.no_grad():
        _, values, _, _ = actor_critic(*place, PAD)
        read = []
        hook = actor_critic.lm_backbone.base_model.register_forward_pre_hook(lambda *_: read.append(1))
        settings = {"pad_id": PAD, "reference": reference, "exact": False}
        found = rlvr_policy.read_responses(actor_critic, *place, recorded, **settings, recorded=True)
        assert not read and torch.equal(found[0], recorded.masked_fill(~mask, 0)) and torch.equal(found[1], values)
        assert_close(found[2], reference.logprobs(*place, PAD))
        rlvr_policy.read_responses(actor_critic, *place, recorded, **settings, recorded=False)
        hook.remove()
    assert read


# ---- Update ----------------------------------------------------------------------------------------------------


def make_episodes(actor_critic: ActorCritic, reference: Reference, seed: int = 1) -> tuple[Rollout, torch.Tensor]:
    """Two groups of four, from another policy than the one that learns, so that ratios are not 1; their rewards."""
    tokens, mask = tokens_and_mask()
    with torch.no_grad():
        logprobs, values, _, _ = actor_critic(tokens, tokens[:, CONTEXT:], mask, PAD)
        ref_logprobs = reference.logprobs(tokens, tokens[:, CONTEXT:], mask, PAD)
    logprobs = (logprobs + 0.3 * numbers(seed, *mask.shape)).masked_fill(~mask, math.nan)
    values = (values + numbers(seed + 1, *mask.shape)).masked_fill(~mask, math.nan)
    episodes = rollout_of(
        mask,
        query_responses=tokens,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        values=values,
        groups=torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]),
        parts=torch.tensor([1.0, 0, 0, 1, 0, 1, 1, 0]).double().unsqueeze(1),
        baselines=numbers(seed + 3, len(tokens)),
    )
    return episodes, numbers(seed + 2, *mask.shape).masked_fill(~mask, math.nan)


def batch_of(episodes: Rollout, rewards: torch.Tensor, ppo: PpoArgs, process, **options) -> algebra.Batch:
    """Steps 6 and 7 up to the losses, as in `train`."""
    reduce = partial(process.reduce, reduction="sum")
    estimate = rlvr_policy.compute_advantages(episodes, rewards, ppo, reduce, weights=[1.0])
    correction = Correction(episodes=episodes, **options)
    return batch_from(correction, rewards, estimate)


def updated(tiny_models, processes: int = 1, change=lambda *given: given, policy_learns: bool = True, **settings):
    """Parameters after an update of a batch, and its steps, as each process has them."""
    settings = {"batch_size": 8, "nminibatches": 2, "noptepochs": 2, "lr": 1e-2, "critic_lr": 1e-2} | settings
    shaping = settings.pop("rewards", RewardsArgs())
    settings = {"samples_per_prompt": 4, "total_episodes": 8, "max_grad_norm": 0.5} | settings
    args = Args(ppo=PpoArgs(**settings), rewards=shaping)
    sizes = ppo_sizes(args.ppo, processes)
    made = networks(tiny_models, critic=args.ppo.advantage == "gae")

    def on_process(process):
        actor_critic, reference = copy.deepcopy(made)
        episodes, rewards = change(*make_episodes(actor_critic, reference))
        rank = process.process_index
        mine = slice(rank * sizes.local_batch, (rank + 1) * sizes.local_batch)
        batch = batch_of(episodes.rows(mine), rewards[mine], args.ppo, process)
        parameters = dict(actor_critic.named_parameters())
        chosen = {
            "policy": [p for name, p in parameters.items() if name.startswith("lm_backbone")],
            "value": [p for name, p in parameters.items() if name.startswith("critic")],
        }
        optimizers = {name: torch.optim.SGD(ps, lr=0.1) for name, ps in chosen.items() if ps}
        setup = setup_of(args, PAD, process)
        steps = update(
            setup,
            batch,
            actor_critic=actor_critic,
            reference=reference,
            optimizers=optimizers,
            minibatches=tldr_responses.draw_minibatches(
                args.seed, 0, args.ppo.noptepochs, mine, args.ppo.nminibatches
            ),
            policy_learns=policy_learns,
        )
        return parameters, steps

    return on_processes(processes, on_process)


def same_parameters(one: dict, other: dict, **tolerance) -> None:
    for name, parameter in one.items():
        assert_close(parameter, other[name], **{"atol": 1e-9, "rtol": 0} | tolerance)


VARIANTS = {
    "gae": {"entropy_coef": 0.1, "dual_clip": 3.0},
    "grpo in sequences": {"advantage": "grpo", "loss_aggregation": "seq-mean-token-mean"},
    "norm": {"advantage": "dr_grpo", "loss_aggregation": "seq-mean-token-sum-norm"},
    "kl": {"advantage": "rloo", "loss_aggregation": "seq-mean-token-sum", "rewards": RewardsArgs(kl_loss_coef=0.5)},
    "exact kl": {"advantage": "remax", "rewards": RewardsArgs(kl_loss_coef=0.5, kl_loss_estimator="full")},
    "critic": {"lam": 0.9, "critic_lam": 1.0, "lam_alpha": 0.8, "nll_coef": 0.3},
    "likelihood in sequences": {"advantage": "maxrl", "nll_coef": 0.3, "loss_aggregation": "seq-mean-token-sum"},
    "gspo": {"advantage": "grpo", "loss": "gspo", "loss_aggregation": "seq-mean-token-mean"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_micro_batches_and_processes_change_nothing(tiny_models, variant):
    settings = VARIANTS[variant]
    ((whole, steps),) = updated(tiny_models, **settings)
    ((in_parts, _),) = updated(tiny_models, local_micro_batch_size=1, **settings)
    same_parameters(whole, in_parts)
    shares = updated(tiny_models, processes=2, local_micro_batch_size=2, **settings)
    for parameters, _ in shares:
        same_parameters(whole, parameters)
    for name, expected in steps.items():
        of_both = [found[name] for _, found in shares]
        assert_close(of_both[0] if name.endswith("norm") else sum(of_both), expected, atol=1e-9, rtol=1e-9)
    start, _ = networks(tiny_models, critic=settings.get("advantage", "gae") == "gae")
    moved = [(p - start.get_parameter(name)).abs().max() for name, p in whole.items()]
    assert max(moved) > 1e-4


def test_counts_of_micro_batches_would_be_noticed(tiny_models, monkeypatch):
    """A negative control of the test above: every micro-batch divided by its own count."""
    right = algebra.aggregate
    monkeypatch.setattr(algebra, "aggregate", lambda losses, mask, mode, **counts: right(losses, mask, mode))
    ((whole, _),) = updated(tiny_models)
    ((in_parts, _),) = updated(tiny_models, local_micro_batch_size=1)
    with pytest.raises(AssertionError):
        same_parameters(whole, in_parts)


def test_what_is_masked_reaches_no_gradient(tiny_models):
    def cut(episodes: Rollout, rewards: torch.Tensor) -> tuple[Rollout, torch.Tensor]:
        mask = episodes.loss_mask.clone()
        mask[1], mask[4, :3] = False, False
        return dataclasses.replace(episodes, loss_mask=mask), rewards

    def spoil(episodes: Rollout, rewards: torch.Tensor) -> tuple[Rollout, torch.Tensor]:
        out = {name: getattr(episodes, name).masked_fill(~episodes.mask, -1e9) for name in ("logprobs", "values")}
        return dataclasses.replace(episodes, **out), rewards.masked_fill(~episodes.mask, -1e9)

    ((clean, _),) = updated(tiny_models, change=cut)
    ((spoiled, _),) = updated(tiny_models, change=lambda *given: spoil(*cut(*given)))
    same_parameters(clean, spoiled)
    assert all(p.isfinite().all() for p in clean.values())


def test_minibatches_tear_groups_apart_but_advantages_were_computed_before(tiny_models, monkeypatch):
    seen = []
    right = algebra.token_losses

    def watched(new_logprobs, logprobs, advantages, *more, **bounds):
        seen.append(advantages.detach())
        return right(new_logprobs, logprobs, advantages, *more, **bounds)

    monkeypatch.setattr(algebra, "token_losses", watched)
    updated(tiny_models, advantage="grpo", nminibatches=4, noptepochs=1)
    batch, rewards = make_episodes(*networks(tiny_models))
    expected, _ = ESTIMATORS["grpo"](rewards, batch.mask, batch.groups)
    (order,) = tldr_responses.draw_minibatches(Args().seed, 0, 1, slice(0, 8), 4)
    assert len(seen) == 4 and all(len(rows) == 2 for rows in order)
    lengths = (batch.query_responses != PAD).sum(1)
    for advantages, rows in zip(seen, order, strict=True):
        assert_close(advantages, expected[rows[lengths[rows].argsort(descending=True, stable=True)]])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_rejected_token_leaves_the_loss_but_not_the_advantages(tiny_models, name):
    actor_critic, reference = networks(tiny_models)
    episodes, rewards = make_episodes(actor_critic, reference)
    cut = dataclasses.replace(episodes, loss_mask=episodes.mask & (torch.arange(RESPONSE) < 2))
    for whitened in (False, True):
        ppo = PpoArgs(advantage=name, whiten_advantages=whitened)
        advantages = partial(rlvr_policy.compute_advantages, ppo=ppo, reduce=torch.clone, weights=[1.0])
        whole, narrowed = (advantages(one, rewards)[0] for one in (episodes, cut))
        assert whole.equal(narrowed) and whole.any()


# Terms of the policy's loss: the name in the log; an aggregation of losses, which that of nll_coef doesn't follow;
# the term by hand, from log-probs, entropies and whether the response is correct, at the tokens of the loss.
TERMS = {
    "nll_coef": ("nll_avg", "seq-mean-token-sum", lambda logprobs, _, right: -logprobs[right].mean()),
    "entropy_coef": ("entropy_avg", "token-mean", lambda _, entropies, right: -entropies.mean()),
}


@pytest.mark.parametrize("coef", TERMS)
def test_a_term_of_the_loss_moves_the_policy_by_its_own_gradient(tiny_models, coef):
    """Next to another loss. The likelihood loss is a plain mean of -log p over all tokens of correct responses."""
    name, aggregation, by_hand = TERMS[coef]
    settings = {"advantage": "grpo", "nminibatches": 1, "noptepochs": 1, "max_grad_norm": 1e9, "lr": 0.1}
    settings["loss_aggregation"] = aggregation

    def cut(episodes: Rollout, rewards: torch.Tensor) -> tuple[Rollout, torch.Tensor]:
        loss_mask = episodes.mask.clone()
        loss_mask[3, :2] = loss_mask[5] = False  # both are correct
        return dataclasses.replace(episodes, loss_mask=loss_mask), rewards

    ((with_it, steps),) = updated(tiny_models, change=cut, **{coef: 0.3}, **settings)
    ((without, plain),) = updated(tiny_models, change=cut, **settings)
    actor_critic, reference = networks(tiny_models, critic=False)
    episodes, _ = cut(*make_episodes(actor_critic, reference))
    tokens, mask = episodes.query_responses, episodes.loss_mask
    logprobs, _, entropies, _ = actor_critic(tokens, tokens[:, CONTEXT:], episodes.mask, PAD)
    right = (episodes.parts > 0).expand(mask.shape)[mask]
    term = by_hand(logprobs[mask], entropies[mask], right)
    term.backward()
    logged = steps[f"loss/{name}"].item() * (-1 if coef == "entropy_coef" else 1)
    assert logged == pytest.approx(term.item(), rel=1e-9) and "loss/nll_avg" not in plain
    assert (steps["objective/loss"] - plain["objective/loss"]).item() == pytest.approx(0.3 * term.item(), rel=1e-9)
    for parameter_name, parameter in actor_critic.named_parameters():
        moved = with_it[parameter_name] - without[parameter_name]
        expected = torch.zeros_like(moved) if parameter.grad is None else -0.1 * 0.3 * parameter.grad
        assert_close(moved, expected, atol=1e-9, rtol=1e-6)


def test_without_a_correct_response_the_likelihood_loss_does_nothing(tiny_models):
    settings = {"advantage": "grpo", "loss_aggregation": "seq-mean-token-sum"}
    wrong = lambda episodes, rewards: (dataclasses.replace(episodes, parts=0 * episodes.parts), rewards)  # noqa: E731
    ((nothing, _),) = updated(tiny_models, change=wrong, nll_coef=0.3, **settings)
    ((without, _),) = updated(tiny_models, **settings)
    same_parameters(nothing, without)


def test_each_step_has_the_gradient_of_its_own_minibatch(tiny_models):
    """The networks do not move, so the order of two minibatches changes only the order of the gradients."""
    actor_critic, reference = networks(tiny_models)
    episodes, rewards = make_episodes(actor_critic, reference)
    args, norms = Args(ppo=PpoArgs(batch_size=8, nminibatches=2)), []
    optimizers = {"policy": torch.optim.SGD(actor_critic.lm_backbone.parameters(), lr=0.0)}
    optimizers["value"] = torch.optim.SGD(actor_critic.critic.parameters(), lr=0.0)
    for order in (torch.arange(8).view(2, 4), torch.arange(8).view(2, 4).flip(0)):
        (steps,) = on_processes(
            1,
            lambda p, order=order: update(
                setup_of(args, PAD, p),
                batch_of(episodes, rewards, args.ppo, p),
                actor_critic=actor_critic,
                reference=reference,
                optimizers=optimizers,
                minibatches=order[None],
                policy_learns=True,
            ),
        )
        norms.append([steps[f"{name}/grad_norm"] for name in optimizers])
    for one, other in zip(*norms, strict=True):
        assert_close(one, other.flip(0), rtol=1e-9, atol=0)
        assert abs(one[0] / one[1] - 1) > 0.01


def test_counts_of_a_minibatch_are_those_of_all_processes():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0]]).bool()
    counts = rlvr_policy.minibatch_counts(mask, lambda x: x + torch.tensor([10, 20, 30]))  # another process's
    assert counts == {"tokens": 13, "sequences": 22, "episodes": 33, "length": 3}


def test_the_critic_learns_alone_during_its_warm_up(tiny_models):
    start, _ = networks(tiny_models)
    ((parameters, _),) = updated(tiny_models, policy_learns=False)
    for name, parameter in parameters.items():
        moved = (parameter - start.get_parameter(name)).abs().max() > 0
        assert not (moved and name.startswith("lm_backbone")), name
    assert (parameters["critic.reward_head.weight"] != start.critic.reward_head.weight).any()


def test_weights_of_another_sampler_scale_the_losses(tiny_models):
    actor_critic, reference = networks(tiny_models, critic=False)
    (episodes, rewards), found = make_episodes(actor_critic, reference), []
    args = Args(ppo=PpoArgs(batch_size=8, nminibatches=1, advantage="rloo", samples_per_prompt=4))
    for weights in (None, torch.full(episodes.mask.shape, 2.0).double()):
        network = copy.deepcopy(actor_critic)
        optimizers = {"policy": torch.optim.SGD(network.parameters(), lr=0.0)}
        (steps,) = on_processes(
            1,
            lambda p, network=network, optimizers=optimizers, weights=weights: update(
                setup_of(args, PAD, p),
                batch_of(episodes, rewards, args.ppo, p, weights=weights),
                actor_critic=network,
                reference=reference,
                optimizers=optimizers,
                minibatches=torch.arange(8).view(1, 1, 8),
                policy_learns=True,
            ),
        )
        found.append(steps["policy/grad_norm"])
    assert_close(found[1], 2 * found[0])


# ---- Dynamic sampling ------------------------------------------------------------------------------------------


def rounds_of(scores: list[list[float]], width: int = 3) -> partial:
    """A roll_out whose rounds have these scores, two to a group."""

    def roll_out(number: int) -> Rollout:
        of_round = torch.tensor(scores[number], dtype=torch.float64)
        rows, groups = len(of_round), 100 * number + torch.arange(len(of_round)) // 2
        tokens = torch.full((rows, width + number), number)
        return rollout_of(
            torch.ones(rows, 2, dtype=torch.bool), raw_scores=of_round, groups=groups, query_responses=tokens
        )

    return roll_out


def fill(pool: Pool, roll_out) -> tuple[Rollout, list[Rollout]]:
    """Steps 1 to 4 as in `train`."""
    while not pool.is_full():
        pool.add(roll_out(pool.rounds))
    return pool.take()


def test_surplus_groups_are_the_first_of_the_next_update():
    ppo = PpoArgs(batch_size=4, samples_per_prompt=2, filter_groups=True, nminibatches=1)
    roll_out = rounds_of([[1, 1, 0, 1, 0, 0, 1, 0], [1, 0, 0, 1, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0, 0, 1]])

    def check(process):
        pool = Pool(ppo, PAD, process)
        batch, generated = fill(pool, roll_out)
        assert batch.groups.tolist() == [1, 1, 3, 3] and pool.rounds == 1 and len(generated) == 1
        batch, _ = fill(pool, roll_out)
        assert batch.groups.tolist() == [100, 100, 101, 101] and pool.surplus.groups.tolist() == [102, 102]
        pool = Pool(ppo, PAD, process, rounds=pool.rounds, surplus=pool.surplus)  # as after an interruption
        batch, _ = fill(pool, roll_out)
        assert batch.groups.tolist() == [102, 102, 200, 200]
        assert pool.surplus.groups.tolist() == [201, 201, 203, 203]
        assert batch.query_responses.tolist()[0] == [PAD, 1, 1, 1, 1] and pool.rounds == 3
        batch, generated = fill(pool, roll_out)
        assert batch.groups.tolist() == [201, 201, 203, 203] and not generated
        return True

    assert on_processes(1, check) == [True]


def test_without_a_filter_a_round_is_a_batch():
    ppo = PpoArgs(batch_size=4, samples_per_prompt=2, nminibatches=1)
    roll_out = rounds_of([[1, 1, 0, 1], [0, 0, 0, 0]])

    def check(process):
        pool = Pool(ppo, PAD, process)
        for number in range(2):
            batch, generated = fill(pool, roll_out)
            assert generated == [batch] and pool.rounds == number + 1 and pool.surplus is None
            assert batch.groups.tolist() == [100 * number] * 2 + [100 * number + 1] * 2
        return True

    assert on_processes(1, check) == [True]


def test_the_limit_of_rounds_names_the_scores(monkeypatch):
    monkeypatch.setattr(rlvr_policy, "MOST_ROUNDS", 2)
    ppo = PpoArgs(batch_size=4, samples_per_prompt=2, filter_groups=True, nminibatches=1)
    roll_out = rounds_of([[1, 1, 0, 0], [1, 0, 1, 1]])
    with pytest.raises(ValueError, match=r"--ppo.filter_groups: 2 rounds .* 2 of 4 episodes .* 0.625"):
        on_processes(1, lambda process: fill(Pool(ppo, PAD, process), roll_out))


def test_two_processes_share_a_filtered_batch():
    ppo = PpoArgs(batch_size=4, samples_per_prompt=2, filter_groups=True, nminibatches=1)
    everything = rounds_of([[1, 1, 0, 1, 0, 0, 1, 0]])

    def fill_mine(process):
        part = slice(4 * process.process_index, 4 * process.process_index + 4)
        return fill(Pool(ppo, PAD, process), lambda n: everything(n).rows(part))

    batches = [batch.groups.tolist() for batch, _ in on_processes(2, fill_mine)]
    assert batches == [[1, 1], [3, 3]]


# ---- Sizes -----------------------------------------------------------------------------------------------------


def test_steps_per_update_and_prompts_follow():
    sizes = ppo_sizes(
        PpoArgs(total_episodes=1_000, batch_size=40, samples_per_prompt=5, nminibatches=2, noptepochs=3), 4
    )
    assert (sizes.updates, sizes.steps_per_update, sizes.problems, sizes.local_batch) == (25, 6, 8, 10)
    assert (sizes.batch, sizes.local_minibatch) == (40, 5)


@pytest.mark.parametrize(
    ("settings", "processes", "words"),
    [
        ({"batch_size": 10, "samples_per_prompt": 4}, 1, "--ppo.batch_size 12 does"),
        ({"batch_size": 12, "samples_per_prompt": 4, "nminibatches": 1}, 2, "--ppo.batch_size 16 does"),
        ({"batch_size": 10, "nminibatches": 4}, 1, "--ppo.batch_size 12 does"),
    ],
)
def test_sizes_that_do_not_divide_offer_one_that_does(settings, processes, words):
    with pytest.raises(ValueError, match=words):
        ppo_sizes(PpoArgs(**settings), processes)
