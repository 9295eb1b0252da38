"""Chapter 2's updates and models on tiny networks: what must change nothing, what is logged, reference and adapters.

Golden numbers (test_golden_tldr.py) prove the numbers of one process without adapters.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from oracles import gradients, masks_of, numbers, on_processes, spoil
from test_policy_math import PAD, token_ids
from torch import nn
from torch.testing import assert_close
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from ppo_rlhf.tldr import packing, policy as tldr_policy, reward as tldr_reward
from ppo_rlhf.tldr.models import LoraArgs, add_adapters, load_critic, save_policy
from ppo_rlhf.tldr.policy import (
    ActorCritic,
    Args,
    PpoArgs,
    RewardsArgs,
    Rollout,
    load_networks,
    ppo_update,
    update_metrics,
)
from ppo_rlhf.tldr.posts import Comparisons, TaskArgs
from ppo_rlhf.train_policy import InputError, load_pretrained
from ppo_rlhf.train_reward import RewardModel, save_reward_model

CONTEXT, RESPONSE, TEMPERATURE = 6, 5, 0.7
LENGTHS = [1, 5, 5, 4, 2, 3, 5, 1]  # tokens of each response


def scalar_model(lm_backbone, kind: type = RewardModel) -> RewardModel:
    """A reward model, with a head, gain and bias that are not those of the start."""
    model = kind(lm_backbone)
    with torch.no_grad():
        model.reward_head.weight.copy_(numbers(1, 1, 16))
        model.reward_head.bias.fill_(0.3)
        model.gain.fill_(1.7)
        model.bias.fill_(-0.4)
    return model.double()


def make_actor_critic(tiny_models) -> ActorCritic:
    """Policy and critic, of different weights, in float64."""
    critic = scalar_model(tiny_models("gpt2", seed=1).base_model)
    return ActorCritic(tiny_models("gpt2").double(), critic, PAD)


def ragged_rows(seed: int = 0) -> torch.Tensor:
    """Eight posts of 1 to CONTEXT tokens, padded on the left, and truncated responses."""
    tokens = token_ids(seed, 8, CONTEXT + RESPONSE)
    for row, length in enumerate(LENGTHS):
        tokens[row, : row % CONTEXT] = PAD
        tokens[row, CONTEXT + length :] = PAD
    return tokens


def read(actor_critic: ActorCritic, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return actor_critic(tokens, tokens[:, CONTEXT:], PAD, TEMPERATURE)


# ---- Updates ---------------------------------------------------------------------------------------------------


def make_rollout(actor_critic: ActorCritic, noise: float) -> Rollout:
    """Log-probs and values that differ by noise from what policy and critic now say.

    Beyond the end of a response are NaN, infinities and large numbers.
    """
    tokens, (mask, value_mask) = ragged_rows(), masks_of(LENGTHS, RESPONSE)
    logprobs, _, values = read(actor_critic, tokens)
    return Rollout(
        query_responses=tokens,
        logprobs=spoil(logprobs + noise * numbers(1, *mask.shape), mask),
        values=spoil(values + noise * numbers(2, *mask.shape), value_mask),
        rewards=numbers(3, *mask.shape).masked_fill(~value_mask, 0),
        mask=mask,
        value_mask=value_mask,
    )


def ppo_step(actor_critic, rollout: Rollout, process, lr: float = 0.0) -> dict[str, torch.Tensor]:
    return ppo_update(
        actor_critic,
        torch.optim.SGD(actor_critic.parameters(), lr=lr),
        rollout,
        torch.arange(len(rollout.mask)).view(1, 1, -1),  # one minibatch
        PpoArgs(),
        PAD,
        TEMPERATURE,
        process,
    )


def test_comparisons_that_fill_up_a_batch_change_nothing(tiny_models):
    """[T27] Those of row 0, which then counts once."""
    chosen, rejected = ragged_rows(1), ragged_rows(2).flip(0)
    comparisons = Comparisons(
        queries=chosen[:, :CONTEXT],
        chosen=chosen[:, CONTEXT:],
        rejected=rejected[:, CONTEXT:],
        groups=[{}] * 8,
        cut=0,
        identical=0,
        ceiling=None,
    )
    inds, found = torch.tensor([4, 1, 5, 2, 3, 0, 0, 0]), []
    for batch in (5, 8):
        model = scalar_model(tiny_models("gpt2").base_model, tldr_reward.RewardModel)
        optimizer, counts = torch.optim.SGD(model.parameters(), lr=0.0), torch.arange(batch) < 5
        update = partial(
            tldr_reward.pairs_update, model, optimizer, comparisons, inds[:batch], counts, PAD, micro_batch=3
        )
        on_processes(1, update)
        found.append(gradients(model))
    assert found[0].any()
    assert_close(found[1], found[0], atol=1e-9, rtol=0)


def test_the_ratio_begins_at_one(tiny_models):
    """[T34] Exactly, where rollout and update read the same rows; then the policy moves away."""
    actor_critic = make_actor_critic(tiny_models).float()
    rollout = make_rollout(actor_critic, 0.0)
    with torch.no_grad():
        logprobs, _, values = packing.by_length(
            nn.Module.__call__,
            actor_critic,
            rollout.query_responses,
            rollout.query_responses[:, CONTEXT:],
            pad_id=PAD,
            temperature=TEMPERATURE,
        )
    rollout = replace(rollout, logprobs=logprobs, values=values, rewards=rollout.rewards.float())
    first, second = (
        on_processes(1, lambda process: ppo_step(actor_critic, rollout, process, lr=0.1))[0] for _ in range(2)
    )
    assert first["val/ratio"] == 1
    assert first["first_squared_ratio_gap"] == first["policy/approxkl_avg"] == first["val/clipfrac_avg"] == 0
    assert second["policy/approxkl_avg"] > 0


def test_metrics_are_those_of_all_episodes_tokens_and_values(tiny_models):
    """What is beyond the end of a response reaches none; golden numbers prove the other metrics."""
    actor_critic = make_actor_critic(tiny_models)
    rollout = make_rollout(actor_critic, 1e-5)
    mask, value_mask = rollout.mask, rollout.value_mask
    scores, stopped = numbers(4, 8), torch.arange(8) != 2
    objectives = {"kl": numbers(5, 8), "non_score_reward": numbers(6, 8), "scores": scores, "eos_rate": stopped}

    def metrics_on(process) -> dict[str, float]:
        return update_metrics(objectives, ppo_step(actor_critic, rollout, process), 0.07, process)

    (found,) = on_processes(1, metrics_on)
    new_logprobs, _, new_values = read(actor_critic, rollout.query_responses)
    _, returns = tldr_policy.compute_advantages(
        rollout.rewards, rollout.values, mask, value_mask, PpoArgs(), torch.clone
    )
    off = (new_logprobs - rollout.logprobs)[mask].exp() - 1
    values, returns, new_values = (x[value_mask] for x in (rollout.values, returns, new_values))
    error = (new_values - returns).square().mean()
    expected = {
        "objective/eos_rate": 7 / 8,
        "objective/rlhf_reward": (scores + numbers(6, 8)).mean(),
        "val/ratio_var": off.var(correction=0),
        "val/first_ratio_gap": off.square().mean().sqrt(),
        "val/num_eos_tokens": 7,
        "val/vpred": new_values.mean(),
        "val/error": error,
        "val/mean": values.mean(),
        "val/var": values.var(correction=0),
        "val/var_explained": 1 - error / returns.var(correction=0),
        "returns/mean": returns.mean(),
        "returns/var": returns.var(correction=0),
    }
    assert {name: found[name] for name in expected} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, rel=1e-6, abs=0
    )


# ---- Reference, critic, adapters -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved_models(tiny_models, tiny_tokenizer, tmp_path_factory) -> Path:
    """The folder of sft/ and reward/: a GPT-2 and a reward model, in float64."""
    folder = tmp_path_factory.mktemp("models")
    tiny_models("gpt2").double().save_pretrained(folder / "sft")
    tiny_tokenizer.save_pretrained(folder / "sft")
    reward_model = scalar_model(tiny_models("gpt2", seed=1).base_model)
    info = {"kind": "reward model", "base_model": "", "vocab_size": PAD, "task": {}}
    save_reward_model(folder / "reward", reward_model, tiny_tokenizer, info)
    return folder


def arguments(models: Path, rank: int = 0) -> Args:
    return Args(
        base_model=str(models / "sft"),
        dtype="float64",
        lora=LoraArgs(rank=rank),
        task=TaskArgs(query_length=CONTEXT, response_length=RESPONSE),
        rewards=RewardsArgs(trained_model=str(models / "reward")),
    )


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("rank", [0, 2])
def test_the_reference_stays_what_the_policy_began_as(saved_models, tiny_tokenizer, rank):
    """[T35] [X35] Adapters are on again afterwards; they and the critic learn, but neither its gain nor its bias."""
    device = torch.device("cpu")
    (actor_critic, reference), other = (
        load_networks(arguments(saved_models, rank), tiny_tokenizer, device) for _ in range(2)
    )
    tokens, mask = ragged_rows(), masks_of(LENGTHS, RESPONSE)[0]

    def of_reference() -> torch.Tensor:
        return tldr_policy.reference_logprobs(reference, tokens, tokens[:, CONTEXT:], PAD, TEMPERATURE, PAD)

    began, before = of_reference(), weights_of(actor_critic)
    assert_close(read(actor_critic, tokens)[0][mask], began[mask], atol=1e-12, rtol=0)
    for name, weight in weights_of(other[0]).items():
        assert torch.equal(weight, before[name]), name  # every process begins with the same adapters
    rollout = make_rollout(actor_critic, 0.3)
    optimizer = torch.optim.AdamW([p for p in actor_critic.parameters() if p.requires_grad], lr=1e-2)
    minibatches = torch.arange(8).expand(3, 1, 8)
    on_processes(
        1,
        lambda process: ppo_update(
            actor_critic, optimizer, rollout, minibatches, PpoArgs(), PAD, TEMPERATURE, process
        ),
    )
    learnt = read(actor_critic, tokens)[0]
    assert torch.equal(of_reference()[mask], began[mask])
    assert torch.equal(read(actor_critic, tokens)[0], learnt)
    assert ((learnt - began).abs()[mask] > 1e-4).float().mean() > 0.9
    moved = {name for name, weight in weights_of(actor_critic).items() if not torch.equal(weight, before[name])}
    learns = {name for name in before if name.startswith("critic.") or not rank or "lora_" in name}
    assert moved == learns - {"critic.gain", "critic.bias"}


def test_the_critic_starts_as_the_reward_model(saved_models, tiny_models, tiny_tokenizer):
    """[T32] With its constant; without a reward model, as the base model with a new head."""
    tokens, args = ragged_rows(), arguments(saved_models)
    expected = scalar_model(tiny_models("gpt2", seed=1).base_model)(tokens, PAD)
    assert_close(load_critic(args, tiny_tokenizer)(tokens, PAD), expected, atol=1e-12, rtol=0)
    new = load_critic(replace(args, rewards=RewardsArgs()), tiny_tokenizer)
    base = load_pretrained(args.base_model, torch.float64)
    assert torch.equal(new.lm_backbone.wte.weight, base.base_model.wte.weight)
    assert (new.gain.item(), new.bias.item(), new.reward_head.bias.item()) == (1, 0, 0)


def tied_model(tiny_models, architecture: str, folder: Path):
    """A model whose output layer has the weight of its embedding, loaded from a folder."""
    model = tiny_models(architecture).double()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(folder)
    return load_pretrained(str(folder), torch.float64)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_adapters_on_all_linear_layers_are_part_of_what_is_saved(tiny_models, tiny_tokenizer, tmp_path, architecture):
    model, tokens = tied_model(tiny_models, architecture, tmp_path / "base"), torch.arange(12)[None]
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)} - {"lm_head"}
    unadapted = model(input_ids=tokens).logits
    adapters = add_adapters(model, LoraArgs(rank=2, target_modules="all-linear"), 1)
    assert set(adapters.base_model.targeted_module_names) == linear
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    expected = model(input_ids=tokens).logits
    assert (expected - unadapted).abs().mean() > 0.1
    info = {"base_model": "", "task": {"temperature": 0.7}}
    save_policy(tmp_path, model, adapters, tiny_tokenizer, info)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert_close(saved(input_ids=tokens).logits, expected, atol=1e-9, rtol=0)
    assert torch.equal(saved.get_output_embeddings().weight, saved.get_input_embeddings().weight)
    adapter = tmp_path / "adapter"
    assert {path.name for path in adapter.iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] is None  # a path


@pytest.mark.parametrize(
    ("target_modules", "words"),
    [("c_attn, lm_head", "lm_head has the same weight as transformer.wte"), ("ln_f", "does not fit the base model")],
)
def test_layers_that_cannot_have_adapters_are_named(tiny_models, tmp_path, target_modules, words):
    """Merged into one of two tied layers, an adapter would change the other, which was trained without it."""
    model = tied_model(tiny_models, "gpt2", tmp_path)
    with pytest.raises(InputError, match=f"^--lora.target_modules.* {words}"):
        add_adapters(model, LoraArgs(rank=2, target_modules=target_modules), 1)
