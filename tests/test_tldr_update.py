"""The updates and models of chapter 2 on tiny networks, against slow oracles that read every row without padding."""

import copy
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from oracles import (
    entries,
    gradients,
    masks_of,
    numbers,
    on_processes,
    slow_gae,
    slow_mean,
    slow_policy_loss,
    slow_rewards,
    slow_value_loss,
    slow_whiten,
    spoil,
    states,
)
from runs import metrics_of, only
from torch import nn
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.pytorch_utils import Conv1D

from ppo_rlhf.lib import pretrained
from ppo_rlhf.lib.errors import InputError, NumericalError
from ppo_rlhf.lib.reward_model_files import save_reward_model
from ppo_rlhf.tldr import packing, policy as tldr_policy, reward as tldr_reward
from ppo_rlhf.tldr.models import (
    LoraArgs,
    Reference,
    add_adapters,
    load_critic,
    load_reward_model,
    save_policy_and_critic,
)
from ppo_rlhf.tldr.policy import (
    ActorCritic,
    Args,
    PpoArgs,
    RewardsArgs,
    Rollout,
    load_networks,
    ppo_update,
    punish_missing_eos,
    respond,
    update_metrics,
)
from ppo_rlhf.tldr.posts import Comparisons, TaskArgs, TaskIds
from ppo_rlhf.tldr.responses import draw_minibatches
from ppo_rlhf.tldr.reward import pairs_update, score_pairs
from ppo_rlhf.tldr.sft import LanguageModel, sft_update
from ppo_rlhf.train_policy import has_stop, load_pretrained
from ppo_rlhf.train_reward import RewardModel

PAD, EOS, STOP = 29, 28, 26
IDS = TaskIds(pad=PAD, eos=EOS, stops=(EOS,))
ARCHITECTURES = {"gpt2": 29, "gpt_neox": 40, "llama": 29, "qwen2": 40}  # rows of the embedding; spare rows in two
CONTEXT, RESPONSE, TEMPERATURE = 6, 5, 0.7
LENGTHS = [1, 5, 5, 4, 2, 3, 5, 1]  # tokens of each response; row 2 alone does not end
EVERYTHING = torch.arange(8).view(1, 1, 8)  # one epoch of one minibatch


def token_ids(seed: int, *shape: int) -> torch.Tensor:
    """Random tokens 1..25: no padding, no token that ends anything, and not 0, as which padding is looked up."""
    return torch.randint(1, STOP, shape, generator=torch.Generator().manual_seed(seed))


def scalar_model(lm_backbone, kind: type = RewardModel) -> RewardModel:
    """A reward model, with a head, gain and bias that are not those of the start."""
    model = kind(lm_backbone)
    with torch.no_grad():
        model.reward_head.weight.copy_(numbers(1, 1, 16))
        model.reward_head.bias.fill_(0.3)
        model.gain.fill_(1.7)
        model.bias.fill_(-0.4)
    return model.double()


def make_actor_critic(tiny_models, architecture: str = "gpt2") -> ActorCritic:
    """Policy and critic, of different weights, in float64."""
    rows = ARCHITECTURES[architecture]
    critic = scalar_model(tiny_models(architecture, rows, seed=1).base_model)
    return ActorCritic(tiny_models(architecture, rows).double(), critic, PAD)


def ragged_rows(lengths: list[int] = LENGTHS, seed: int = 0) -> torch.Tensor:
    """Posts of 1 to CONTEXT tokens, padded on the left, and truncated responses of these lengths."""
    tokens = token_ids(seed, len(lengths), CONTEXT + RESPONSE)
    for i, length in enumerate(lengths):
        tokens[i, : i % CONTEXT] = PAD
        tokens[i, CONTEXT + length :] = PAD
        if i != 2:
            tokens[i, CONTEXT + length - 1] = EOS
    return tokens


def unpadded(row: torch.Tensor) -> torch.Tensor:
    """A row's tokens without its padding, (1, length)."""
    return row[row != PAD].unsqueeze(0)


def slow_log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def slow_logprobs(lm_backbone, row: torch.Tensor, temperature: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs of a row's tokens but the first, and entropies there, by the library's own forward pass."""
    tokens = unpadded(row)
    with torch.no_grad():
        logits = lm_backbone(input_ids=tokens).logits[0, :-1, :PAD].double().numpy()
    table = slow_log_softmax(logits / temperature)
    logprobs = np.array([table[t, token] for t, token in enumerate(tokens[0, 1:].tolist())])
    return logprobs, -(np.exp(table) * table).sum(-1)


def slow_scalars(model, row: torch.Tensor) -> np.ndarray:
    """What a reward model's head says after each token of a row, by the library's own forward pass."""
    with torch.no_grad():
        hidden = model.lm_backbone.base_model(input_ids=unpadded(row)).last_hidden_state[0].numpy()
    weight, bias = model.reward_head.weight.detach().numpy()[0], model.reward_head.bias.item()
    return np.array([model.gain.item() * (h @ weight + bias) + model.bias.item() for h in hidden])


def alone(step: Callable):
    """What a step gives on one process."""
    (result,) = on_processes(1, step)
    return result


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


class CountingSGD(torch.optim.SGD):
    """Plain gradient descent that counts its steps."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        return super().step(closure)


# ---- Policy and critic as they read ----------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_left_padded_equals_unpadded(tiny_models, architecture: str):
    """T16, T35, T38, defect 6: log-probs, entropies and values are those of each row alone, GPT-2 included."""
    actor_critic, tokens = make_actor_critic(tiny_models, architecture), ragged_rows()
    with torch.no_grad():
        logprobs, entropies, values = actor_critic(tokens, tokens[:, CONTEXT:], PAD, TEMPERATURE)
    for i, length in enumerate(LENGTHS):
        row_logprobs, row_entropies = slow_logprobs(actor_critic.lm_backbone, tokens[i], TEMPERATURE)
        assert_close(logprobs[i, :length].numpy(), row_logprobs[-length:], atol=1e-9, rtol=0)
        assert_close(entropies[i, :length].numpy(), row_entropies[-length:], atol=1e-9, rtol=0)
        scalars = slow_scalars(actor_critic.critic, tokens[i])[-length - 1 :]  # the state before, then those after
        count = states(length, RESPONSE)
        assert_close(values[i, :count].numpy(), scalars[:count], atol=1e-9, rtol=0)


# ---- Supervised fine-tuning ------------------------------------------------------------------------------------


def library_loss(model, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over all predicted tokens, row by row and with a gradient, by the library's forward pass."""
    losses = []
    for row in map(unpadded, tokens):
        if row.shape[1] > 1:
            table = model(input_ids=row).logits[0, :-1, :PAD].log_softmax(-1)
            losses += [-table[t, token] for t, token in enumerate(row[0, 1:].tolist())]
    return torch.stack(losses).mean()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_language_model_equals_a_loop(tiny_models, architecture: str):
    """T21: every token but the first of a text is predicted, the end-of-text token among them."""
    lm_backbone, tokens = tiny_models(architecture, ARCHITECTURES[architecture]).double(), ragged_rows()
    with torch.no_grad():
        logprobs = LanguageModel(lm_backbone, PAD)(tokens, PAD)
    for row, tokens_of_row in zip(logprobs.numpy(), tokens, strict=True):
        expected, _ = slow_logprobs(lm_backbone, tokens_of_row)
        real = (tokens_of_row != PAD).numpy()
        predicted = real[1:] & (np.cumsum(real)[:-1] > 0)
        assert_close(row[predicted], expected, atol=1e-9, rtol=0)
        assert (row[~predicted] == 0).all()


@pytest.mark.parametrize("micro_batch", [1, 2, 8])
def test_sft_update_equals_the_library(tiny_models, micro_batch: int):
    """T22: loss and gradient are those of the mean over all tokens, in whatever parts the rows are read."""
    tokens = ragged_rows()
    tokens[5] = PAD  # a row that fills up a batch
    expected_model = tiny_models("gpt_neox", 40).double()
    expected = library_loss(expected_model, tokens)
    expected.backward()
    model = LanguageModel(tiny_models("gpt_neox", 40).double(), PAD)
    optimizer = CountingSGD(model.parameters(), lr=0.1)
    before = weights_of(model)
    stats = alone(partial(sft_update, model, optimizer, tokens, PAD, rows=micro_batch))
    assert stats["train/sft/loss"] == pytest.approx(expected.item(), abs=1e-9)
    assert stats["train/sft/tokens"] == sum(max(0, len(unpadded(row)[0]) - 1) for row in tokens)
    wanted = gradients(expected_model)
    assert_close(gradients(model), wanted, atol=1e-9, rtol=0)
    assert stats["train/sft/gradient_norm"] == pytest.approx(math.sqrt((wanted.numpy() ** 2).sum()))
    assert optimizer.steps == 1
    for name, parameter in model.named_parameters():
        assert_close(parameter.detach(), before[name] - 0.1 * parameter.grad, atol=1e-12, rtol=0)


# ---- Reward model ----------------------------------------------------------------------------------------------


def make_comparisons(count: int = 6) -> Comparisons:
    """Posts with two summaries of different lengths, one of which does not end."""
    rows = [ragged_rows([LENGTHS[(i + shift) % 8] for i in range(count)], seed=shift) for shift in (1, 2)]
    return Comparisons(
        queries=rows[0][:, :CONTEXT],
        chosen=rows[0][:, CONTEXT:],
        rejected=rows[1][:, CONTEXT:],
        groups=[{}] * count,
        cut=0,
        identical=0,
        ceiling=None,
    )


def slow_pair_scores(model, comparisons: Comparisons, index: int) -> list[float]:
    sides = (comparisons.chosen, comparisons.rejected)
    rows = (torch.cat([comparisons.queries[index], side[index]]) for side in sides)
    return [slow_scalars(model, row)[-1] for row in rows]


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 8])
def test_pairs_update_equals_a_loop(tiny_models, micro_batch: int):
    """T25, T27: pairs that fill up the batch weigh nothing; micro-batches add up to the whole batch."""
    comparisons = make_comparisons()
    inds, counts = torch.tensor([4, 1, 5, 2, 3, 0, 0, 0]), torch.arange(8) < 5
    model = scalar_model(tiny_models("gpt2"), tldr_reward.RewardModel)
    pairs = [slow_pair_scores(model, comparisons, i) for i in inds[:5].tolist()]
    losses = [math.log1p(math.exp(rejected - chosen)) for chosen, rejected in pairs]
    expected = {
        "loss": np.mean(losses),
        "accuracy": np.mean([chosen > rejected for chosen, rejected in pairs]),
        "chosen_rewards": np.mean([chosen for chosen, _ in pairs]),
        "rejected_rewards": np.mean([rejected for _, rejected in pairs]),
    }
    assert 0 < expected["accuracy"] < 1
    optimizer = CountingSGD(model.parameters(), lr=0.0)
    step = partial(pairs_update, model, optimizer, comparisons, inds, counts, PAD)
    stats = alone(partial(step, rows=micro_batch))
    for name, value in expected.items():
        assert stats[f"train/rm/{name}"] == pytest.approx(value, abs=1e-9), name
    assert optimizer.steps == 1

    other = scalar_model(
        tiny_models("gpt2"), tldr_reward.RewardModel
    )  # the gradient, from five pairs in one pass each
    for i in inds[:5].tolist():
        tensors = (t[i : i + 1] for t in (comparisons.queries, comparisons.chosen, comparisons.rejected))
        chosen, rejected = score_pairs(other, *tensors, PAD, comparisons.lengths(PAD)[i])
        (-torch.sigmoid(chosen - rejected).log().sum() / 5).backward()
    assert_close(gradients(model), gradients(other), atol=1e-9, rtol=0)
    norm = math.sqrt((gradients(other).numpy() ** 2).sum())
    assert stats["train/rm/gradient_norm"] == pytest.approx(norm)


# ---- PPO update ------------------------------------------------------------------------------------------------


def make_rollout(actor_critic: ActorCritic, noise: float = 0.3, lengths: list[int] = LENGTHS) -> Rollout:
    """Ragged responses, whose log-probs and values differ by noise from what policy and critic now say.

    Beyond the end stand NaN, infinities and large numbers.
    """
    tokens, (mask, value_mask) = ragged_rows(lengths), masks_of(lengths, RESPONSE)
    with torch.no_grad():
        logprobs, _, values = actor_critic(tokens, tokens[:, CONTEXT:], PAD, TEMPERATURE)
    logprobs = logprobs + noise * numbers(1, *logprobs.shape)
    values = values + noise * numbers(2, *values.shape)
    rewards = numbers(3, *values.shape).masked_fill(~value_mask, 0)
    return Rollout(
        query_responses=tokens,
        logprobs=spoil(logprobs, mask),
        values=spoil(values, value_mask),
        rewards=rewards,
        mask=mask,
        value_mask=value_mask,
    )


def rows_of(rollout: Rollout, rows: slice) -> Rollout:
    tensors = {name: value[rows] for name, value in vars(rollout).items() if isinstance(value, torch.Tensor)}
    return replace(rollout, **tensors, seen=[])


def update(
    actor_critic: ActorCritic,
    rollout: Rollout,
    minibatches: torch.Tensor,
    ppo: PpoArgs,
    accelerator=None,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, float]:
    """Means over the steps; without an optimizer nothing is learnt, and the last gradient stays in the models."""
    optimizer = optimizer or torch.optim.SGD(actor_critic.parameters(), lr=0.0)
    step = partial(ppo_update, actor_critic, optimizer, rollout, minibatches, ppo, PAD, TEMPERATURE)
    steps = step(accelerator) if accelerator else alone(step)
    assert {numbers.shape for numbers in steps.values()} == {(minibatches.shape[0] * minibatches.shape[1],)}
    means = {name: numbers.mean().item() for name, numbers in steps.items()}
    return means | {"first": steps["square_of_ratio_minus_1"][0].item()}


def slow_minibatch_metrics(
    actor_critic: ActorCritic,
    rollout: Rollout,
    inds: list[int],
    ppo: PpoArgs,
    temperature: float = TEMPERATURE,
) -> dict[str, float]:
    """Section 8: means over the tokens, and over the values, of one minibatch, each row read without padding."""
    width = rollout.mask.shape[1]
    lengths = [int(rollout.mask[i].sum()) for i in inds]
    counts = [states(length, width) for length in lengths]
    logprobs, values, rewards = (t[inds].numpy() for t in (rollout.logprobs, rollout.values, rollout.rewards))
    new_logprobs, entropies, new_values = np.zeros((3, len(inds), width))
    for row, (i, length, count) in enumerate(zip(inds, lengths, counts, strict=True)):
        tokens = rollout.query_responses[i]
        of_row = slow_logprobs(actor_critic.lm_backbone, tokens, temperature)
        new_logprobs[row, :length], entropies[row, :length] = (found[-length:] for found in of_row)
        new_values[row, :count] = slow_scalars(actor_critic.critic, tokens)[-length - 1 :][:count]
    if ppo.whiten_rewards:
        rewards = slow_whiten(rewards, counts, keep_mean=True)
    advantages = slow_gae(rewards, values, lengths, ppo.gamma, ppo.lam)
    returns = advantages + np.where(rollout.value_mask[inds].numpy(), values, 0)
    whitened = slow_whiten(advantages, lengths)
    pg_loss, pg_clipfrac, approxkl, _ = slow_policy_loss(new_logprobs, logprobs, whitened, lengths, ppo.cliprange)
    vf_loss, vf_clipfrac, _ = slow_value_loss(new_values, values, returns, counts, ppo.cliprange_value)
    ratios = np.exp(np.array(entries(new_logprobs, lengths)) - np.array(entries(logprobs, lengths)))
    return {
        "loss/policy_avg": pg_loss,
        "loss/value_avg": vf_loss,
        "policy/approxkl_avg": approxkl,
        "policy/clipfrac_avg": pg_clipfrac,
        "policy/entropy_avg": slow_mean(entropies, lengths),
        "val/clipfrac_avg": vf_clipfrac,
        "val/ratio": ratios.mean(),
        "square_of_ratio_minus_1": ((ratios - 1) ** 2).mean(),
        "val/vpred": slow_mean(new_values, counts),
        "val/error": slow_mean((new_values - returns) ** 2, counts),
        "val/mean": slow_mean(values, counts),
        "square_of_value": slow_mean(values**2, counts),
        "returns/mean": slow_mean(returns, counts),
        "square_of_return": slow_mean(returns**2, counts),
    }


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox"])
@pytest.mark.parametrize(
    "changes", [{}, {"whiten_rewards": True, "gamma": 0.9, "lam": 0.8}], ids=["default", "other"]
)
def test_metrics_of_one_step_equal_a_slow_oracle(tiny_models, architecture: str, changes: dict):
    """T42, T44, T45, section 8, defects 3 and 4: what counts, and nothing else, is in every number."""
    actor_critic = make_actor_critic(tiny_models, architecture)
    ppo, rollout = PpoArgs(noptepochs=1, **changes), make_rollout(actor_critic)
    found = update(actor_critic, rollout, EVERYTHING, ppo)
    expected = slow_minibatch_metrics(actor_critic, rollout, list(range(8)), ppo)
    expected["first"] = expected["square_of_ratio_minus_1"]  # of the first minibatch
    expected["gradient_norm"] = math.sqrt((gradients(actor_critic).numpy() ** 2).sum())
    assert found == pytest.approx(expected, abs=1e-9)
    assert 0 < expected["policy/clipfrac_avg"] < 1 and 0 < expected["val/clipfrac_avg"] < 1
    assert expected["policy/entropy_avg"] > 0


@pytest.mark.parametrize("micro_batch", [8, 1])
def test_metrics_are_means_over_minibatches(tiny_models, micro_batch: int):
    """T48, section 8: no slot of a statistic stays empty, whatever the number of epochs and minibatches."""
    actor_critic = make_actor_critic(tiny_models)
    ppo = PpoArgs(noptepochs=2, nminibatches=2, local_micro_batch_size=micro_batch)
    rollout = make_rollout(actor_critic)
    minibatches = draw_minibatches(1, 0, 2, slice(0, 8), 2)
    found = update(actor_critic, rollout, minibatches, ppo)
    rows = [slow_minibatch_metrics(actor_critic, rollout, inds.tolist(), ppo) for inds in minibatches.flatten(0, 1)]
    for name in rows[0]:
        assert found[name] == pytest.approx(np.mean([row[name] for row in rows]), abs=1e-9), name
    assert found["first"] == pytest.approx(rows[0]["square_of_ratio_minus_1"], abs=1e-9)


def test_the_ratio_begins_at_one(tiny_models):
    """T34: exactly, where rollout and update read the same rows; then the policy moves away."""
    actor_critic = make_actor_critic(tiny_models).float()
    rollout = make_rollout(actor_critic, noise=0.0)
    tokens, reading = (rollout.query_responses, rollout.responses), {"pad_id": PAD, "temperature": TEMPERATURE}
    with torch.no_grad():
        logprobs, _, values = packing.by_length(nn.Module.__call__, actor_critic, *tokens, **reading)
    rollout = replace(rollout, logprobs=logprobs, values=values, rewards=rollout.rewards.float())
    metrics = update(actor_critic, rollout, EVERYTHING, PpoArgs(noptepochs=1))
    assert metrics["val/ratio"] == 1
    for name in ("first", "square_of_ratio_minus_1", "val/clipfrac_avg"):
        assert metrics[name] == 0, name
    assert metrics["policy/approxkl_avg"] == metrics["policy/clipfrac_avg"] == 0
    assert metrics["loss/policy_avg"] == pytest.approx(0, abs=1e-6)  # minus the mean of whitened advantages

    optimizer = torch.optim.AdamW(actor_critic.parameters(), lr=1e-3)
    metrics = update(actor_critic, rollout, EVERYTHING.expand(3, 1, 8), PpoArgs(), optimizer=optimizer)
    assert metrics["first"] == 0 < metrics["policy/approxkl_avg"]


# ---- Two processes equal one, however unequal their tokens are -------------------------------------------------


def one_and_two(step: Callable[..., tuple]) -> tuple[tuple, list[tuple]]:
    """What step(process, local rows) gives on one process, and on two."""
    (alone,) = on_processes(1, lambda process: step(process, slice(0, 8)))
    pair = on_processes(
        2, lambda process: step(process, slice(4 * process.process_index, 4 * process.process_index + 4))
    )
    return alone, pair


def assert_same_step(alone: tuple, pair: list[tuple], shares: bool = False) -> None:
    """The same gradient and metrics on every process; shares: the metrics add up."""
    gradient, metrics = alone
    for other, stats in pair:
        assert_close(other, gradient, atol=1e-9, rtol=0)
        if not shares:
            assert stats == pytest.approx(metrics, abs=1e-9)
    if shares:
        assert {name: sum(stats[name] for _, stats in pair) for name in metrics} == pytest.approx(metrics, abs=1e-9)


@pytest.mark.parametrize("micro_batch", [8, 1])
def test_two_processes_equal_one_in_ppo(tiny_models, micro_batch: int):
    """T45, defect 11: sums, counts and whitening are those of the minibatch on all processes together."""
    original, ppo = make_actor_critic(tiny_models), PpoArgs(local_micro_batch_size=micro_batch)
    rollout = make_rollout(original, lengths=[1, 1, 5, 1, 5, 5, 4, 3])
    models = [copy.deepcopy(original) for _ in range(2)]

    def step(process, rows: slice) -> tuple:
        actor_critic = models[process.process_index]
        count = rows.stop - rows.start
        stats = update(
            actor_critic, rows_of(rollout, rows), torch.arange(count).view(1, 1, -1), ppo, accelerator=process
        )
        return gradients(actor_critic).clone(), stats

    assert_same_step(*one_and_two(step), shares=True)


def test_two_processes_equal_one_in_sft(tiny_models):
    """T22."""
    tokens, models = ragged_rows(), [LanguageModel(tiny_models("gpt2").double(), PAD) for _ in range(2)]
    tokens[1:4] = PAD

    def step(process, rows: slice) -> tuple:
        model = models[process.process_index]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        stats = sft_update(model, optimizer, tokens[rows], PAD, process, rows=2)
        return gradients(model).clone(), {name: float(value) for name, value in stats.items()}

    assert_same_step(*one_and_two(step))


def test_two_processes_equal_one_on_pairs(tiny_models):
    """T25, T27: also where only one of them has pairs that count for nothing."""
    comparisons, models = (
        make_comparisons(),
        [scalar_model(tiny_models("gpt2"), tldr_reward.RewardModel) for _ in range(2)],
    )
    inds, counts = torch.tensor([4, 1, 5, 2, 3, 0, 0, 0]), torch.arange(8) < 5

    def step(process, rows: slice) -> tuple:
        model = models[process.process_index]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        of_process = (comparisons, inds[rows], counts[rows], PAD, process)
        stats = pairs_update(model, optimizer, *of_process, rows=2)
        return gradients(model).clone(), {name: float(value) for name, value in stats.items()}

    assert_same_step(*one_and_two(step))


# ---- Metrics that follow from the means ------------------------------------------------------------------------


STEPS = (  # what the update says of each step, besides the gradient norm
    *("loss/policy_avg", "loss/value_avg", "policy/approxkl_avg", "policy/clipfrac_avg", "val/clipfrac_avg"),
    *("policy/entropy_avg", "val/ratio", "square_of_ratio_minus_1", "val/vpred", "val/error", "val/mean"),
    *("returns/mean", "square_of_value", "square_of_return"),
)


def test_finished_metrics():
    """Section 8: variances over tokens and values, explained variance, RLHF reward, episodes per second.

    Of two processes with two episodes each, after three optimiser steps; a process's numbers are its shares.
    """
    kl, penalties = (numbers(i, 4, 3) for i in (1, 2))
    scores, stopped = numbers(3, 4), torch.tensor([True, False, True, True])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]]).bool()
    logprobs, gaps = spoil(numbers(4, 4, 3), mask), numbers(5, 4, 3).abs().masked_fill(~mask, 0)
    gold = numbers(6, 4)
    shares = {name: numbers(10 + i, 2, 3).abs() for i, name in enumerate(STEPS)}  # (processes, steps)
    norms = numbers(9, 3).abs()

    def metrics_on(process) -> dict[str, float]:
        rows = slice(2 * process.process_index, 2 * process.process_index + 2)
        nothing = torch.full((2, 3), math.nan)
        parts = dict.fromkeys((field.name for field in fields(Rollout)), nothing)
        numbers_of = {"logprobs": logprobs, "mask": mask, "stopped": stopped, "scores": scores, "kl": kl}
        numbers_of |= {"raw_scores": scores + 1, "non_score_rewards": penalties, "sampler_gap": gaps}
        parts |= {name: tensor[rows] for name, tensor in numbers_of.items()}
        rollout = Rollout(**parts | {"monitored": {"gold": gold[rows]}})
        steps = {name: found[process.process_index] for name, found in shares.items()} | {"gradient_norm": norms / 2}
        steps["square_of_ratio_minus_1"] = steps["square_of_ratio_minus_1"] * torch.tensor([1e-8, 1, 1])
        setup = SimpleNamespace(args=Args(ppo=PpoArgs(batch_size=4)), accelerator=process)
        this_run = SimpleNamespace(seconds=lambda: 8.0)
        return update_metrics(setup, this_run, 2, rollout=rollout, steps=steps, kl_coef=0.07, lr=2e-6)

    first, second = on_processes(2, metrics_on)
    assert first == second
    means = {name: found.sum(0).mean().item() for name, found in shares.items()}
    squares = shares["square_of_ratio_minus_1"].sum(0).numpy() * [1e-8, 1, 1]
    rewards, variance = penalties.sum(1), means["square_of_return"] - means["returns/mean"] ** 2
    assert first == pytest.approx(
        {
            "objective/kl": kl.sum(1).mean().item(),
            "objective/entropy": -logprobs[mask].sum().item() / 4,
            "objective/non_score_reward": rewards.mean().item(),
            "objective/scores": scores.mean().item(),
            "objective/raw_scores": scores.mean().item() + 1,
            "objective/eos_rate": 0.75,
            "objective/response_length": 9 / 4,
            "objective/sampler_gap": np.mean(
                [row[:n].mean() for row, n in zip(gaps.numpy(), (2, 3, 1, 3), strict=True)]
            ),
            "objective/gold": gold.mean().item(),
            "objective/kl_coef": 0.07,
            "objective/rlhf_reward": (scores + rewards).mean().item(),
            "loss/policy_avg": means["loss/policy_avg"],
            "loss/value_avg": means["loss/value_avg"],
            "policy/approxkl_avg": means["policy/approxkl_avg"],
            "policy/clipfrac_avg": means["policy/clipfrac_avg"],
            "policy/entropy_avg": means["policy/entropy_avg"],
            "val/clipfrac_avg": means["val/clipfrac_avg"],
            "val/ratio": means["val/ratio"],
            "val/ratio_var": squares.mean() - (means["val/ratio"] - 1) ** 2,
            "val/first_ratio_gap": math.sqrt(squares[0]),
            "val/vpred": means["val/vpred"],
            "val/error": means["val/error"],
            "val/mean": means["val/mean"],
            "val/var": means["square_of_value"] - means["val/mean"] ** 2,
            "val/num_eos_tokens": 3,
            "val/var_explained": 1 - means["val/error"] / max(variance, 1e-12),
            "returns/mean": means["returns/mean"],
            "returns/var": variance,
            "gradient_norm": norms.mean().item(),
            "lr": 2e-6,
            "episode": 3 * 4,
            "eps": 3 * 4 / 8.0,
            "time": 8.0,
        }
    )


def test_numbers_too_large_to_be_squared_stop_the_run():
    """In one line, as everything that is not finite."""
    found = {name: torch.ones(1, dtype=torch.float64) for name in STEPS}
    found["val/mean"], found["square_of_value"] = (torch.tensor([x], dtype=torch.float64) for x in (1e170, math.inf))
    tokens = torch.ones(2, 3)
    parts = dict.fromkeys((field.name for field in fields(Rollout)), tokens)
    parts |= dict.fromkeys(("scores", "raw_scores", "stopped"), tokens[:, 0]) | {"mask": tokens.bool()}
    rollout = Rollout(**parts | {"monitored": {}})

    def metrics_on(process) -> dict[str, float]:
        setup, steps = SimpleNamespace(args=Args(), accelerator=process), found | {"gradient_norm": torch.ones(1)}
        this_run = SimpleNamespace(seconds=lambda: 8.0)
        return update_metrics(setup, this_run, 2, rollout=rollout, steps=steps, kl_coef=0.07, lr=2e-6)

    with pytest.raises(NumericalError, match=r"^val/var is inf in step 2;"):
        alone(metrics_on)


# ---- Summaries -------------------------------------------------------------------------------------------------


def summaries(actor_critic: ActorCritic, ids: TaskIds, temperature: float, rows: int = 64, length: int = 12) -> tuple:
    """Contexts with padding on the left, and what `respond` gives for them."""
    contexts = ragged_rows([1, 3] * (rows // 2))[:, :CONTEXT]
    uniforms = torch.rand(rows, length, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    settings = {"pad_id": ids.pad, "stop_ids": ids.stops, "temperature": temperature}
    return contexts, *respond(actor_critic, contexts, uniforms, **settings)


@pytest.mark.parametrize("stop", [EOS, STOP])
@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox"])
def test_summaries_end_where_they_stop(tiny_models, architecture: str, stop: int):
    """T33, T36, T39, 1.3: after the stop token all is padding, another one that could end a text ends nothing."""
    ids, temperature = replace(IDS, stops=(stop,)), 5.0
    actor_critic = make_actor_critic(tiny_models, architecture)
    contexts, responses, logprobs, values, gap = summaries(actor_critic, ids, temperature)
    lengths = []
    for row in responses.tolist():
        lengths.append(row.index(stop) + 1 if stop in row else len(row))
        assert PAD not in row[: lengths[-1]] and row[lengths[-1] :] == [PAD] * (12 - lengths[-1])
    assert len(set(lengths)) > 5
    other = STOP if stop == EOS else EOS
    assert any(other in row[: length - 1] for row, length in zip(responses.tolist(), lengths, strict=True))
    finished = has_stop(responses, stop, 0)
    assert finished.tolist() == [stop in row for row in responses.tolist()]
    assert 0 < finished.sum() < len(finished)
    scores = punish_missing_eos(torch.arange(64.0), finished, "replace", 1.0)
    assert scores.tolist() == [i if stop in row else -1.0 for i, row in enumerate(responses.tolist())]

    rows = torch.cat([contexts, responses], 1)
    for i in range(0, 64, 7):  # T34: log-probs and values are those of the training pass, on each row alone
        length, count = lengths[i], states(lengths[i], 12)
        expected, _ = slow_logprobs(actor_critic.lm_backbone, rows[i], temperature)
        assert_close(logprobs[i, :length].numpy(), expected[-length:], atol=1e-9, rtol=0)
        scalars = slow_scalars(actor_critic.critic, rows[i])[-length - 1 :]
        assert_close(values[i, :count].numpy(), scalars[:count], atol=1e-9, rtol=0)
    assert gap.max() < 1e-9
    assert gap[responses == PAD].eq(0).all()


@pytest.mark.parametrize("architecture", ["gpt_neox", "qwen2"])
def test_reserved_ids_are_never_sampled(tiny_models, architecture: str):
    """T14, defect 12: the output layer has 40 rows and likes the last eleven best, the tokenizer has 29 tokens."""
    actor_critic = make_actor_critic(tiny_models, architecture)
    with torch.no_grad():
        actor_critic.lm_backbone.get_output_embeddings().weight[PAD:] *= 50
    contexts, responses, logprobs, _, _ = summaries(actor_critic, IDS, 5.0)
    sampled = responses[responses != PAD]
    assert 0 <= sampled.min() <= sampled.max() < PAD
    with torch.no_grad():
        logits = actor_critic.lm_backbone(input_ids=unpadded(contexts[0])).logits[0, -1].double()
    assert logits.argmax() >= PAD
    table = slow_log_softmax(logits[:PAD].numpy() / 5.0)
    assert logprobs[0, 0].item() == pytest.approx(table[responses[0, 0]], abs=1e-9)


# ---- Reference, adapters, the saved models ---------------------------------------------------------------------


@dataclass(frozen=True)
class Adapted:
    """A policy with adapters and a critic after three steps, the weights before, and the arguments."""

    actor_critic: ActorCritic
    reference: Reference
    before: dict[str, torch.Tensor]
    args: Args


@pytest.fixture(scope="module")
def saved_models(tiny_models, tiny_tokenizer, tmp_path_factory) -> Path:
    """The folder of sft/ and reward/: a GPT-2 and a reward model, in float64."""
    folder = tmp_path_factory.mktemp("models")
    tiny_models("gpt2").double().save_pretrained(folder / "sft")
    tiny_tokenizer.save_pretrained(folder / "sft")
    backbone = tiny_models("gpt2", seed=1).base_model
    info = {"kind": "reward model", "base_model": "", "vocab_size": PAD, "task": {}}
    save_reward_model(folder / "reward", scalar_model(backbone), tiny_tokenizer, info)
    return folder


def arguments(models: Path, lora: LoraArgs) -> Args:
    return Args(
        base_model=str(models / "sft"),
        dtype="float64",
        lora=lora,
        task=TaskArgs(query_length=CONTEXT, response_length=RESPONSE),
        rewards=RewardsArgs(trained_model=str(models / "reward")),
    )


def networks(args: Args, tokenizer) -> tuple[ActorCritic, Reference]:
    (found,) = on_processes(1, lambda process: load_networks(args, tokenizer, process))
    return found


@pytest.fixture
def adapted(saved_models: Path, tiny_tokenizer) -> Adapted:
    args = arguments(saved_models, LoraArgs(rank=2, alpha=4.0))
    actor_critic, reference = networks(args, tiny_tokenizer)
    before = weights_of(actor_critic)
    rollout = make_rollout(actor_critic)
    learning = [parameter for parameter in actor_critic.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-2)
    update(actor_critic, rollout, EVERYTHING.expand(3, 1, 8), PpoArgs(), optimizer=optimizer)
    return Adapted(actor_critic, reference, before, args)


def reference_logprobs(actor_critic: ActorCritic, reference: Reference, tokens: torch.Tensor) -> torch.Tensor:
    settings = {"pad_id": PAD, "reference": reference, "temperature": TEMPERATURE}
    return tldr_policy.reference_logprobs(actor_critic, tokens, tokens[:, CONTEXT:], **settings)


def test_without_its_adapters_a_policy_is_the_reference(adapted: Adapted):
    """T35, X35: exactly the model it began as, also after steps; and they are on again afterwards."""
    tokens, mask = ragged_rows(), masks_of(LENGTHS, RESPONSE)[0]
    base = load_pretrained(adapted.args.base_model, torch.float64)
    expected = reference_logprobs(adapted.actor_critic, Reference(base, None), tokens)
    with torch.no_grad():
        policy, _, _ = adapted.actor_critic(tokens, tokens[:, CONTEXT:], PAD, TEMPERATURE)
        assert torch.equal(reference_logprobs(adapted.actor_critic, adapted.reference, tokens), expected)
        again, _, _ = adapted.actor_critic(tokens, tokens[:, CONTEXT:], PAD, TEMPERATURE)
    assert torch.equal(again, policy)
    assert ((policy - expected).abs()[mask] > 1e-4).float().mean() > 0.9
    for i, length in enumerate(LENGTHS):
        row = slow_logprobs(base, tokens[i], TEMPERATURE)[0]
        assert_close(expected[i, :length].numpy(), row[-length:], atol=1e-9, rtol=0)


def test_only_adapters_and_critic_learn(adapted: Adapted):
    """T32, X35: all of the critic but gain and bias, and no weight of the base model."""
    after = weights_of(adapted.actor_critic)
    moved = {name for name, weight in after.items() if not torch.equal(weight, adapted.before[name])}
    adapters = {name for name in after if "lora_" in name}
    critic = {name for name in after if name.startswith("critic.")} - {"critic.gain", "critic.bias"}
    assert adapters and moved == adapters | critic
    assert {name for name, p in adapted.actor_critic.named_parameters() if p.requires_grad} == moved


def classifier_scores(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """By the library alone; the constant of models whose last norm has no bias stands in the configuration."""
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        logits = classifier(input_ids=tokens, attention_mask=(tokens != PAD).long()).logits
    return logits.squeeze(1) + classifier.config.score_constant


def right_padded(tokens: torch.Tensor) -> torch.Tensor:
    rows = torch.full_like(tokens, PAD)
    for i, row in enumerate(tokens):
        rows[i, : (row != PAD).sum()] = row[row != PAD]
    return rows


def test_saved_policy_and_critic_are_those_that_learnt(adapted: Adapted, tiny_tokenizer, tmp_path: Path):
    """Adapters are merged into an ordinary language model; the critic opens as a classifier."""
    tokens = ragged_rows()
    with torch.no_grad():
        logprobs, _, _ = adapted.actor_critic(tokens, tokens[:, CONTEXT:], PAD, TEMPERATURE)
    scores = [slow_scalars(adapted.actor_critic.critic, row)[-1] for row in tokens]
    parts = (adapted.actor_critic.lm_backbone, adapted.actor_critic.critic, adapted.reference.adapters)
    save_policy_and_critic(tmp_path, *parts, tiny_tokenizer, {"base_model": "", "task": {"temperature": 0.7}}, False)
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float64)
    assert not any("lora" in name for name, _ in policy.named_parameters())
    for i, length in enumerate(LENGTHS):
        row, _ = slow_logprobs(policy, tokens[i], TEMPERATURE)
        assert_close(logprobs[i, :length].numpy(), row[-length:], atol=1e-9, rtol=0)
    names = {"adapter_model.safetensors", "adapter_config.json"}
    assert {path.name for path in (tmp_path / "policy/adapter").iterdir()} == names
    assert adapted.args.base_model not in (tmp_path / "policy/adapter/adapter_config.json").read_text()
    assert classifier_scores(tmp_path / "value", right_padded(tokens)).tolist() == pytest.approx(scores, abs=1e-9)
    loaded = load_reward_model(tmp_path / "value", torch.float64)
    assert loaded(tokens, PAD).tolist() == pytest.approx(scores, abs=1e-9)


def tied_model(tiny_models, architecture: str):
    """A model whose output layer has the weight of its embedding."""
    model = tiny_models(architecture).double()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return model


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_adapters_on_all_linear_layers_are_part_of_what_is_saved(tiny_models, tiny_tokenizer, tmp_path, architecture):
    model, tokens = tied_model(tiny_models, architecture), torch.arange(12)[None]
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)} - {"lm_head"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapters = add_adapters(model, LoraArgs(rank=2, target_modules="all-linear"), 1)
    assert set(adapters.base_model.targeted_module_names) == linear
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        unadapted = tied_model(tiny_models, architecture)(input_ids=tokens).logits
        save_policy_and_critic(
            tmp_path, model, None, adapters, tiny_tokenizer, {"base_model": "", "task": {"temperature": 0.7}}, False
        )
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float64)
        assert_close(saved(input_ids=tokens).logits, expected, atol=1e-9, rtol=0)
    assert not saved.get_output_embeddings().weight.ne(saved.get_input_embeddings().weight).any()
    assert (expected - unadapted).abs().mean() > 0.1


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_by_default_adapters_are_on_queries_and_values_of_the_attention_alone(tiny_models, architecture):
    """As the help says, whatever version of peft is installed."""
    adapters = add_adapters(tiny_models(architecture), LoraArgs(rank=2), 1)
    assert {name.rpartition(".")[2] for name in adapters.base_model.targeted_module_names} == {"q_proj", "v_proj"}


@pytest.mark.parametrize(
    ("architecture", "target_modules", "words"),
    [
        ("gpt2", "c_attn, lm_head", "lm_head has the same weight as transformer.wte"),
        ("gpt2", "wte", "transformer.wte has the same weight as lm_head"),
        ("llama", "embed_tokens", "model.embed_tokens has the same weight as lm_head"),
        ("llama", "q_proj,o_prj", "has no layer 'o_prj'; it has down_proj, embed_tokens, gate_proj"),
        ("llama", "all-linear,v_proj", "has no layer 'all-linear'"),
        ("llama", "norm", "does not fit the base model"),
    ],
)
def test_layers_that_cannot_have_adapters_are_named(tiny_models, architecture, target_modules, words):
    """Merged into one of two tied layers, an adapter would change the other, which was trained without it."""
    lora = LoraArgs(rank=2, target_modules=target_modules)
    with pytest.raises(InputError, match=f"^--lora.target_modules.* {words}"):
        add_adapters(tied_model(tiny_models, architecture), lora, 1)


def test_without_adapters_the_reference_is_a_model_of_its_own(saved_models: Path, tiny_tokenizer):
    """T32, T35: frozen, and the same model as the policy until that learns."""
    actor_critic, reference = networks(arguments(saved_models, LoraArgs()), tiny_tokenizer)
    assert not any(parameter.requires_grad for parameter in reference.lm_backbone.parameters())
    assert all(parameter.requires_grad for parameter in actor_critic.lm_backbone.parameters())
    rollout, mask = make_rollout(actor_critic, noise=0.0), masks_of(LENGTHS, RESPONSE)[0]
    before = reference_logprobs(actor_critic, reference, rollout.query_responses)
    assert torch.equal(before[mask], rollout.logprobs[mask])
    optimizer = torch.optim.SGD(actor_critic.parameters(), lr=0.1)
    update(actor_critic, rollout, EVERYTHING, PpoArgs(), optimizer=optimizer)
    assert torch.equal(reference_logprobs(actor_critic, reference, rollout.query_responses), before)
    with torch.no_grad():
        logprobs, _, _ = actor_critic(rollout.query_responses, rollout.responses, PAD, TEMPERATURE)
    assert ((logprobs - before).abs()[mask] > 1e-6).all()


def test_adapters_begin_the_same_on_every_process(saved_models: Path, tiny_tokenizer):
    """And the policy with them begins as the reference."""
    args, found = arguments(saved_models, LoraArgs(rank=2)), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        actor_critic, reference = networks(args, tiny_tokenizer)
        found.append({name: weight for name, weight in weights_of(actor_critic).items() if "lora_" in name})
    assert found[0] and found[0].keys() == found[1].keys()
    assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items())
    mask, tokens = masks_of(LENGTHS, RESPONSE)[0], ragged_rows()
    with torch.no_grad():
        logprobs, _, _ = actor_critic(tokens, tokens[:, CONTEXT:], PAD, TEMPERATURE)
    assert_close(logprobs[mask], reference_logprobs(actor_critic, reference, tokens)[mask], atol=1e-12, rtol=0)


def test_the_critic_starts_as_the_reward_model(saved_models: Path, tiny_models, tiny_tokenizer):
    """T32: with its constant; without a reward model, as the base model with a new head."""
    tokens, args = ragged_rows(), arguments(saved_models, LoraArgs())
    lm_backbone = load_pretrained(args.base_model, torch.float64)
    critic = load_critic(args, PAD)
    expected = [slow_scalars(scalar_model(tiny_models("gpt2", seed=1).base_model), row)[-1] for row in tokens]
    assert critic(tokens, PAD).tolist() == pytest.approx(expected, abs=1e-9)
    frozen = {name for name, parameter in critic.named_parameters() if not parameter.requires_grad}
    assert frozen == {"gain", "bias"}

    fresh = load_critic(replace(args, rewards=RewardsArgs()), PAD)
    embeddings = (model.get_input_embeddings().weight.detach() for model in (fresh.lm_backbone, lm_backbone))
    assert torch.equal(*embeddings)
    assert (fresh.gain.item(), fresh.bias.item(), fresh.reward_head.bias.item()) == (1, 0, 0)
    assert fresh.lm_backbone is not lm_backbone.base_model


# ---- A whole update, as train() puts it together ---------------------------------------------------------------


def write_posts(folder: Path, count: int = 20) -> None:
    """Posts of different lengths, in letters that the tiny tokenizer knows."""
    for split in ("train", "validation", "test"):
        rows = [
            {
                "id": str(i),
                "subreddit": "a",
                "title": "b",
                "post": "cat. dog"[: 1 + i % 8],
                "summary": "cat"[: 1 + i % 3],
            }
            for i in range(count)
        ]
        (folder / f"posts_{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(("end", "form"), [(EOS, "replace"), (0, "subtract")])
def test_first_update_of_a_run_equals_a_slow_oracle(
    saved_models: Path, tiny_models, tmp_path: Path, monkeypatch, end: int, form: str
):
    """T35, T37, T39, T42, T43, section 8: from recorded summaries to the row of metrics.csv.

    What `respond` says beyond the end is replaced by NaN, infinities and large numbers on its way.
    """
    recorded: list[tuple[torch.Tensor, ...]] = []

    def spoiling(actor_critic, contexts, uniforms, **settings):
        responses, logprobs, values, sampler_gap = respond(actor_critic, contexts, uniforms, **settings)
        mask, value_mask = masks_of((responses != PAD).sum(1).tolist(), 8)
        contexts = nn.functional.pad(contexts, (48 - contexts.shape[1], 0), value=PAD)
        recorded.append((torch.cat([contexts, responses], 1), logprobs))
        return responses, spoil(logprobs, mask), spoil(values, value_mask), sampler_gap

    monkeypatch.setattr(tldr_policy, "respond", spoiling)
    monkeypatch.setattr(pretrained, "end_ids", lambda *_: (end,))
    monkeypatch.chdir(tmp_path)
    write_posts(tmp_path)
    ppo = PpoArgs(total_episodes=32, batch_size=32, noptepochs=1, lr=1e-3, local_rollout_batch_size=8)
    args = Args(
        base_model=str(saved_models / "sft"),
        dtype="float64",
        eval_posts=2,
        task=TaskArgs(posts=str(tmp_path), query_length=48, response_length=8, temperature=4.0),
        rewards=RewardsArgs(
            trained_model=str(saved_models / "reward"), missing_eos=form, missing_eos_penalty=2.5, kl_estimator="k3"
        ),
        ppo=replace(ppo, local_micro_batch_size=4),
    )
    tldr_policy.train(args)
    metrics = metrics_of(only(tmp_path, "runs/*"))[0]

    rows, logprobs = (torch.cat(parts) for parts in zip(*recorded[:4], strict=True))
    responses, stop = rows[:, -8:].tolist(), end
    lengths = [row.index(stop) + 1 if stop in row else 8 for row in responses]
    finished = [stop in row for row in responses]
    assert 0 < sum(finished) < 32 and any(EOS in row and stop not in row for row in responses) == (stop != EOS)
    policy, reward_model = tiny_models("gpt2").double(), scalar_model(tiny_models("gpt2", seed=1).base_model)
    raw = np.array([slow_scalars(reward_model, row)[-1] for row in rows])
    punished = np.full(32, -2.5) if form == "replace" else raw - 2.5
    scores = np.where(finished, raw, punished)
    ref_logprobs = np.zeros((32, 8))
    for i, length in enumerate(lengths):
        ref_logprobs[i, :length] = slow_logprobs(policy, rows[i], 4.0)[0][-length:]
    _, kl = slow_rewards(scores, logprobs, ref_logprobs, lengths, 0.05, "k3")
    expected = {
        "objective/kl": kl.sum(1).mean(),
        "objective/kl_coef": 0.05,
        "objective/entropy": -math.fsum(entries(logprobs, lengths)) / 32,
        "objective/non_score_reward": -0.05 * kl.sum(1).mean(),
        "objective/scores": scores.mean(),
        "objective/raw_scores": raw.mean(),
        "objective/rlhf_reward": scores.mean() - 0.05 * kl.sum(1).mean(),
        "objective/eos_rate": np.mean(finished),
        "objective/response_length": np.mean(lengths),
        "val/num_eos_tokens": sum(finished),
        "val/first_ratio_gap": 0.0,
        "lr": 1e-3,
        "episode": 32,
    }
    assert expected["objective/entropy"] > 0
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-7), name
