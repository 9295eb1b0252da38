"""ppo_rlhf/loop.py: it is chapter 2's update, takes batches from anywhere, and refuses what doesn't fit."""

import copy
import io
import itertools
import json
import math
import pickle
import re
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracles import numbers
from peft import LoraConfig, PeftModel, get_peft_model
from processes import HELPERS
from runs import ROOT, error_line, metrics_of, trained, write_rows
from small_models import classifier
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils import logging
from whole_runs import Whole

from benchmark.cost import loop_memory
from ppo_rlhf import loop
from ppo_rlhf.loop import PPO, Batch
from ppo_rlhf.tldr import models, packing, policy
from ppo_rlhf.train_policy import InputError
from ppo_rlhf.train_reward import RewardModel

SIZES = {"dtype": "float64", "response_length": 6, "lr": 1e-2, "kl_coef": 0.3, "nminibatches": 2, "noptepochs": 2}
QUERIES = ["a cat", "the dog sat", "b", "on a mat"]
SCORES = [1.1, -2.3, 0.7, 3.3]  # no numbers of float32


@pytest.fixture(scope="module")
def model(tiny_models, tiny_tokenizer, tmp_path_factory) -> str:
    """The folder of a language model in float64, with a token for each letter."""
    folder = tmp_path_factory.mktemp("model")
    tiny_models("gpt2").double().save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return str(folder)


ADAPTERS = {"rank": 2}
KINDS = {
    "separate": {},
    "shared": {"critic": "shared"},
    "stopped": {"critic": "shared", "value_gradient": False},
    "adapters": {"lora": ADAPTERS},
    "shared with adapters": {"critic": "shared", "lora": ADAPTERS},
}


def weights_of(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def queries_of(rollout: policy.Rollout) -> Tensor:
    return rollout.query_responses[:, : -rollout.rewards.shape[1]]


def read(batch: Batch) -> tuple[Tensor, ...]:
    """What policy, critic and reference said of the policy's tokens."""
    return tuple(x[batch.rollout.mask] for x in (batch.rollout.logprobs, batch.rollout.values, batch.ref_logprobs))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- It is chapter 2's update ----------------------------------------------------------------------------------


def test_two_steps_change_the_weights_as_the_script_does_bit_for_bit(model, tmp_path, monkeypatch):
    """A run of tldr/policy.py, whose queries, equally long, the loop gets as token ids; and what both log.

    The loop has a step after every response. So the script gets a column more, for responses that fill theirs. Its
    critic is a copy, because where in memory weights begin changes how sums are rounded.
    """
    for split in ("train", "validation", "test"):
        rows = [{"post": post, "summary": "sat"} for post in ("a cat", "a dog", "on it", "b e f")]
        write_rows(tmp_path / f"posts_{split}.jsonl", *rows)
    words = f"--base_model {model} --dtype float64 --seed 1 --task.posts {tmp_path} --task.query_format plain "
    words += "--task.query_length 32 --task.response_length 6 --eval_interval 0 --ppo.lr 1e-2 --ppo.nminibatches 2 "
    words += "--ppo.noptepochs 2 --ppo.batch_size 4 --ppo.total_episodes 8 --rewards.kl_coef 0.3 "
    words += "--rewards.function ours:scores --rewards.normalize_samples 0 --rewards.missing_eos none"
    seen, right = [], policy.ppo_update

    def ppo_update(actor_critic, optimizer, rollout, *arguments, **options):
        seen.append((actor_critic, queries_of(rollout)))
        return right(actor_critic, optimizer, rollout, *arguments, **options)

    def one_column_more(*arguments, **options):
        return tuple(
            F.pad(x, (0, 1), value=end) for x, end in zip(sample(*arguments, **options), (29, 0), strict=True)
        )

    sample, load_critic = policy.generate_until, models.load_critic
    monkeypatch.setattr(models, "load_critic", lambda *arguments: copy.deepcopy(load_critic(*arguments)))
    monkeypatch.setattr(policy, "generate_until", one_column_more)
    monkeypatch.setattr(policy, "ppo_update", ppo_update)
    monkeypatch.setattr(policy, "load_scorer", lambda *_: lambda *_: torch.tensor(SCORES, dtype=torch.float64))
    expected = metrics_of(trained(policy, tmp_path, words.split()))
    ppo = PPO(model, **SIZES)
    before, metrics = weights_of(ppo.actor_critic), []
    for (_, queries), row in zip(seen, expected, strict=True):
        ppo.optimizer.param_groups[0]["lr"] = row["lr"]
        metrics.append(ppo.step(ppo.generate([tokens[tokens != ppo.pad_id] for tokens in queries]), SCORES))
    assert same(weights_of(ppo.actor_critic), weights_of(seen[0][0]))
    assert not same(before, weights_of(ppo.actor_critic))
    assert [{name: row[name] for name in metrics[0]} for row in expected] == metrics
    assert all(row["val/first_ratio_gap"] < 1e-12 for row in metrics) and abs(metrics[0]["objective/kl"]) < 1e-12


def test_two_processes_are_one(tiny_world, tmp_path):
    """With each kind of critic; with rewards on tokens, and lengths of their own."""
    script, words = str(HELPERS / "loop_run.py"), [f"{tiny_world}/model", "metrics.json"]
    runs = [Whole(tmp_path / str(count), script, words, count).made() for count in (1, 2)]
    one, two = (json.loads((run.folder / "metrics.json").read_text()) for run in runs)
    assert "val/mean is nan" in one[3]["error"] and one[3].pop("error") == two[3].pop("error")
    for row, other in zip(one, two, strict=True):
        assert row.pop("kind") == other.pop("kind")
        assert row == pytest.approx(other, rel=1e-7, abs=1e-9)
    assert abs(one[1]["objective/kl"] / 0.03 - 1) < 0.1  # within the clip range of the controller
    assert len(one) == 10 and len({row["loss/value_avg"] for row in one if row.get("loss/value_avg")}) == 9


# ---- Batches from elsewhere ------------------------------------------------------------------------------------


def test_a_batch_from_elsewhere_is_read_as_one_that_was_generated(model):
    ppo = PPO(model, **SIZES)
    generated = ppo.generate(QUERIES)
    again = ppo.batch(QUERIES, generated.response_ids)
    assert (again.queries, again.responses, again.stopped) == (
        generated.queries,
        generated.responses,
        generated.stopped,
    )
    assert_close(read(again), read(generated), rtol=1e-9, atol=1e-12)


def test_a_response_has_the_same_values_alone_and_next_to_a_longer_one(model):
    """The score is on the step after the last token, also of the longest, up to the last position of the model."""
    ppo = PPO(model, **SIZES)
    long = [3] * (64 - len(QUERIES[0]))
    alone, beside = ppo.batch(QUERIES[:1], [[1, 2, 28]]), ppo.batch(QUERIES[:1] * 2, [[1, 2, 28], long])
    for batch in (alone, beside):
        counted = batch.rollout.value_mask[:, :4]
        assert counted[0].all() and batch.rollout.value_mask[0].sum() == 4
    assert beside.rollout.value_mask[1].sum() == len(long) + 1
    assert_close(beside.rollout.values[0, :4], alone.rollout.values[0], rtol=1e-9, atol=1e-12)


def test_a_text_that_begins_with_bos_gets_no_second_one(model, tiny_tokenizer):
    """As the output of a chat template does."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<eos> $A", None, [("<eos>", 28)])
    batch = PPO(model, tokenizer=tokenizer, **SIZES).generate(["<eos>a cat", "a cat", [0, 27, 2, 0, 19]])
    pad, words = 29, [0, 27, 2, 0, 19]
    assert queries_of(batch.rollout).tolist() == [[28, *words], [28, *words], [*words, pad]]


def test_advantages_skip_what_somebody_else_says():
    """They are those of the policy's tokens alone, one after the other."""
    rewards, values = numbers(0, 2, 50, 8)
    own = numbers(1, 50, 8) < 0
    found = policy.compute_gae(rewards, values, own, 0.9, 0.8)
    for row, mine in enumerate(own):
        alone = (x[row, mine].unsqueeze(0) for x in (rewards, values, own))
        expected = policy.compute_gae(*alone, 0.9, 0.8)
        for ours, theirs in zip(found, expected, strict=True):
            assert_close(ours[row, mine], theirs[0], rtol=1e-12, atol=1e-12)
            assert not ours[row, ~mine].any()


def test_tokens_of_somebody_else_are_read_but_do_not_learn(model):
    """The score is on the state after the policy's last token; nothing is on tokens of the other side."""
    ppo = PPO(model, **SIZES)
    ids = [[1, 2, 3, 4, 5], [6, 7, 8]] * 2
    mask = [[1, 0, 0, 1, 0], [1, 1, 1]] * 2
    batch = ppo.batch(QUERIES, ids, mask)
    own = [[True, False, False, True, False, False], [True, True, True, False, False, False]] * 2
    counted = [[True, False, False, True, True, False], [True, True, True, True, False, False]] * 2
    assert batch.rollout.mask.tolist() == own and batch.rollout.value_mask.tolist() == counted
    metrics = ppo.step(batch, SCORES)
    assert metrics["objective/response_length"] == 2.5 and math.isfinite(metrics["objective/kl"])
    changed = ppo.batch(QUERIES, [[1, 9, 9, 4, 5], *ids[1:]], mask).rollout.logprobs
    assert (changed[0] != ppo.batch(QUERIES, ids, mask).rollout.logprobs[0])[3]  # it is read


# ---- Rewards where they happen ---------------------------------------------------------------------------------

ALL = list(itertools.product(range(3), repeat=2))  # responses of two tokens, where there are three tokens
FIRST, SECOND = [0.3, -1.1, 0.8], [[1.7, -0.2, 0.4], [-0.6, 2.1, 0.9], [0.1, -1.3, 0.5]]  # of a token, after a token
TOTALS = [FIRST[a] + SECOND[a][b] for a, b in ALL]
PLACES = {  # scores and rewards of all responses, which add up to the same
    "each token": (None, [[FIRST[a], SECOND[a][b]] for a, b in ALL]),
    "the last token": (None, [[(1, total)] for total in TOTALS]),
    "the step after": (None, [[(2, total)] for total in TOTALS]),
    "each a step later": (None, [[(2, SECOND[a][b]), (1, FIRST[a])] for a, b in ALL]),
    "tensors": (None, [torch.tensor([FIRST[a], SECOND[a][b]], dtype=torch.float64) for a, b in ALL]),
    "a half and a half": (None, [[(0, FIRST[a]), (1, SECOND[a][b] / 2), (1, SECOND[a][b] / 2)] for a, b in ALL]),
    "the score": (TOTALS, None),
    "the score and a token": ([SECOND[a][b] for a, b in ALL], [[(0, FIRST[a])] for a, b in ALL]),
    "before its token": (None, [[(0, total)] for total in TOTALS]),
}


@pytest.mark.parametrize("place", PLACES)
def test_the_expected_gradient_is_that_of_the_expected_sum_of_rewards(
    tiny_models, tiny_tokenizer, monkeypatch, place
):
    """Over all responses, wherever rewards come after what they are for; whatever the critic says."""
    content = json.loads(tiny_tokenizer.backend_tokenizer.to_str())
    content["model"]["vocab"], content["model"]["unk_token"] = {"a": 0, "b": 1, "c": 2}, "a"
    content["added_tokens"] = []
    three = type(tiny_tokenizer)(tokenizer_object=Tokenizer.from_str(json.dumps(content)))
    ppo = PPO(tiny_models("gpt2", 3), tokenizer=three, **SIZES | {"kl_coef": 0.0, "nminibatches": 1})
    seen, right = [], loop.ppo_update
    monkeypatch.setattr(loop, "ppo_update", lambda *all_, **more: seen.append(all_[2]) or right(*all_, **more))
    network = copy.deepcopy(ppo.actor_critic.lm_backbone)
    batch = ppo.batch([[0]] * 9, ALL)
    metrics = ppo.step(batch, *PLACES[place])
    assert metrics["objective/scores"] == pytest.approx(sum(TOTALS) / 9, rel=1e-6)
    (rollout,) = seen
    advantages, _ = policy.compute_gae(rollout.rewards, rollout.values, rollout.value_mask, gamma=1.0, lam=1.0)
    tokens = torch.tensor(ALL)
    logits = network(F.pad(tokens, (1, 0), value=0)).logits[:, :2] / ppo.task.temperature  # (9, 2, 3)
    logprobs = logits.log_softmax(2).gather(2, tokens.unsqueeze(2)).squeeze(2)  # (9, 2)
    probs = logprobs.sum(1).exp()
    weights = [*network.parameters()]
    expected = torch.autograd.grad((probs * torch.tensor(TOTALS)).sum(), weights, retain_graph=True)
    gained = (advantages[:, :2] * logprobs).sum(1)
    found = torch.autograd.grad((probs.detach() * gained).sum(), weights)
    largest = max((one - other).abs().max() for one, other in zip(found, expected, strict=True))
    assert largest > 1e-2 if place == "before its token" else largest < 1e-7


def test_rewards_are_at_their_tokens():
    """Of the policy's, or on the step after its last one, which the second response has at its end."""
    mask = torch.tensor([[1, 0, 0, 1, 0, 0], [1, 1, 1, 0, 0, 0]]).bool()
    placed = loop.place_rewards(mask, [5, 3], [[(0, 0.5), (3, 1.5), (5, 2.5)], [0.1, 0.2, 0.3]])
    assert placed.tolist() == [[0.5, 0, 0, 1.5, 2.5, 0], [0.1, 0.2, 0.3, 0, 0, 0]]
    assert loop.place_rewards(mask, [5, 3], [[], [(3, 7)]]).tolist() == [[0] * 6, [0, 0, 0, 7, 0, 0]]


def test_a_score_is_a_reward_of_the_step_after_the_last_token_bit_for_bit(model):
    """Of the policy's last one, whoever speaks then; with minibatches, whitened rewards and several epochs."""
    ids, mask = [[1, 2, 3, 4, 5], [6, 7, 8]] * 2, [[1, 0, 0, 1, 0], [1, 1, 1]] * 2
    after = [[(len(row), score)] for row, score in zip(ids, SCORES, strict=True)]
    results = []
    for given in ((SCORES,), (None, after), ([0.0] * 4, after), (SCORES, [[], [0.0] * 3, [0.0] * 5, []])):
        ppo = PPO(model, whiten_rewards=True, **SIZES)
        results.append((ppo.step(ppo.batch(QUERIES, ids, mask), *given), weights_of(ppo.actor_critic)))
    for metrics, weights in results[1:]:
        assert metrics == results[0][0] and same(weights, results[0][1])


# ---- What it starts from, and what it leaves -------------------------------------------------------------------


@pytest.mark.parametrize("architecture", packing.TRIED)
def test_a_loaded_model_learns_as_its_folder_does_bit_for_bit(tiny_models, tiny_tokenizer, tmp_path, architecture):
    """Also if it learned elsewhere before; it is policy, critic and reference, and ends texts with several tokens.

    Token 0, which begins, ends and pads, is in queries, so its embedding learns.
    """
    model = tiny_models(architecture, rows=32)
    zeros = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    dropout = dict.fromkeys(("attention_dropout", "hidden_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.5)
    vars(model.config).update(zeros | {name: rate for name, rate in dropout.items() if hasattr(model.config, name)})
    model.generation_config.update(**zeros | {"eos_token_id": [0, 7]})
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    of_loaded, metrics, weights = PPO(loaded, tokenizer=tokenizer, reference=loaded, **SIZES), [], []
    for ppo in (PPO(tmp_path, **SIZES), PPO(tmp_path, tokenizer=tokenizer, **SIZES), of_loaded):
        assert ppo.stop_ids == (0, 7, 28)
        metrics.append([])
        for _ in range(2):
            ppo.actor_critic.train()
            batch = ppo.generate(QUERIES)
            ppo.actor_critic.train()
            metrics[-1].append(ppo.step(batch, SCORES))
        weights.append(weights_of(ppo.actor_critic))
    assert metrics[0] == metrics[1] == metrics[2] and metrics[0][1]["objective/kl"] > 0
    assert same(weights[0], weights[1]) and same(weights[0], weights[2])
    assert same(weights_of(loaded), weights_of(of_loaded.actor_critic.lm_backbone))  # it is trained in place


def test_a_critic_from_a_classifier_says_what_the_classifier_says(model, tmp_path):
    folder = classifier("gpt2", tmp_path, AutoTokenizer.from_pretrained(model), ["LABEL_0"], 0)
    judge = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    ppo = PPO(model, critic=folder, **SIZES)
    ids = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 4, 7]]
    batch = ppo.batch(QUERIES, ids)
    query = queries_of(batch.rollout)[0]
    query = query[query != ppo.pad_id].tolist()
    for place in range(3):
        row = torch.tensor([[*query, *ids[0][:place]]])
        assert batch.rollout.values[0, place].item() == pytest.approx(judge(row).logits.item(), abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_saves_opens_elsewhere_and_as_its_critic(model, tmp_path, kind):
    given = AutoModelForCausalLM.from_pretrained(model).requires_grad_("lora" not in KINDS[kind])
    own = given.generation_config.to_dict()
    ppo = PPO(given, tokenizer=AutoTokenizer.from_pretrained(model), **KINDS[kind], **SIZES)
    for _ in range(2):
        ppo.step(ppo.generate(QUERIES), SCORES)
    before = weights_of(ppo.actor_critic)
    ppo.save(tmp_path / "mine")
    assert same(before, weights_of(ppo.actor_critic)) and given.generation_config.to_dict() == own
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "mine")
    row = torch.tensor([[1, 2, 3]])
    assert_close(again(row).logits, ppo.actor_critic.lm_backbone(row).logits)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    second = PPO(tmp_path / "mine", critic=tmp_path / "mine/critic", reference=loaded, **SIZES)
    first, of_second = (read(one.batch(QUERIES, ["abc"] * 4)) for one in (ppo, second))
    assert_close(first, of_second, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_head_reads_the_language_model_and_its_loss_changes_the_policy_only_if_it_may(model, kind):
    """The reward head of all kinds is the same at first, and so are the networks that it reads."""
    lm, policies, heads = AutoModelForCausalLM.from_pretrained(model), [], []
    for vf_coef in (0.0, 1.0):
        ppo = PPO(model, **KINDS[kind], **SIZES, vf_coef=vf_coef)
        batch = ppo.batch(["ab"] * 4, [[3, 4, 5]] * 4)
        states = lm(torch.tensor([[0, 1, 3, 4, 5]]), output_hidden_states=True).hidden_states[-1][0, 1:]
        head = ppo.actor_critic.critic.reward_head
        expected = (states @ head.weight[0] + head.bias).detach()
        assert_close(batch.rollout.values, expected.expand(4, 4), rtol=1e-9, atol=1e-12)
        ppo.step(batch, SCORES)
        policies.append(weights_of(ppo.actor_critic.lm_backbone))
        heads.append(weights_of(head))
    assert same(*policies) == (kind not in ("shared", "shared with adapters")) and not same(*heads)
    with ppo.reference.in_use():  # it is as the model was
        assert_close(
            ppo.reference.lm_backbone(states.new_ones(1, 3).long()).logits, lm(torch.ones(1, 3).long()).logits
        )


@pytest.mark.parametrize("kind", ["adapters", "shared with adapters"])
def test_with_adapters_there_is_one_set_of_frozen_weights_in_bfloat16_if_asked_for(model, tmp_path, kind):
    lm, sizes = AutoModelForCausalLM.from_pretrained(model), SIZES | {"dtype": "bfloat16"}
    ppo = PPO(model, frozen_bfloat16=True, gradient_checkpointing=True, **KINDS[kind], **sizes)
    frozen = [weight for weight in ppo.actor_critic.parameters() if not weight.requires_grad and weight.dim()]
    assert sum(weight.numel() for weight in frozen) == sum(weight.numel() for weight in lm.parameters())
    assert {weight.dtype for weight in frozen} == {torch.bfloat16}
    learning = [weight for weight in ppo.actor_critic.parameters() if weight.requires_grad]
    head, adapters = 17, 2 * (16 + 48) * 2  # rank 2, of c_attn in two layers
    assert sum(weight.numel() for weight in learning) == head + adapters * (2 if kind == "adapters" else 1)
    metrics = [ppo.step(ppo.generate(QUERIES), SCORES) for _ in range(2)]
    assert abs(metrics[1]["objective/kl"]) > 1e-3 and {weight.dtype for weight in learning} == {torch.float32}
    ppo.save(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()["transformer.h.0.attn.c_attn.weight"]
    learned = ppo.actor_critic.state_dict()["lm_backbone.transformer.h.0.attn.c_attn.base_layer.weight"]
    assert saved.dtype == torch.float32 and 0 < (saved - learned).norm() < 0.5 * saved.norm()
    assert (saved != saved.bfloat16()).any()  # merging did not round what was learned


def test_a_model_of_peft_is_taken_as_it_is_and_its_adapters_go_on_from_their_folder(model, tmp_path):
    config, tokenizer = LoraConfig(r=2, lora_alpha=16, fan_in_fan_out=True), AutoTokenizer.from_pretrained(model)
    results = []
    for lora in (config, {"r": 2, "lora_alpha": 16}, {"rank": 2}, models.LoraArgs(rank=2), None):
        given: Any = model
        if lora is None:
            torch.manual_seed(1)
            given = get_peft_model(AutoModelForCausalLM.from_pretrained(model), copy.deepcopy(config))
        ppo = PPO(given, tokenizer=tokenizer, lora=lora, **SIZES)
        results.append([ppo.step(ppo.generate(QUERIES), SCORES) for _ in range(2)])
    assert all(metrics == results[0] for metrics in results) and abs(results[0][1]["objective/kl"]) > 1e-3
    ppo.save(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(model)
    again = PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    second = PPO(again, tokenizer=tokenizer, critic=tmp_path / "critic", **SIZES)
    first, of_second = (read(one.batch(QUERIES, ["abc"] * 4)) for one in (ppo, second))
    assert_close(first, of_second, rtol=1e-12, atol=1e-12)
    refused = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "adapter")
    # Of two adapters, the one in use learns and is saved, whatever its name is.
    again.load_adapter(tmp_path / "adapter", "mine", is_trainable=True)
    again.set_adapter("mine")
    third = PPO(again, tokenizer=tokenizer, critic=tmp_path / "critic", **SIZES)
    third.step(third.generate(QUERIES), SCORES)
    third.save(tmp_path / "third")
    base = AutoModelForCausalLM.from_pretrained(model)
    alone = PeftModel.from_pretrained(base, tmp_path / "third/adapter", is_trainable=True)
    fourth = PPO(alone, tokenizer=tokenizer, critic=tmp_path / "third/critic", **SIZES)
    of_third, of_fourth = (read(one.batch(QUERIES, ["abc"] * 4)) for one in (third, fourth))
    assert_close(of_third, of_fourth, rtol=1e-12, atol=1e-12)
    assert "no weight of the model learns" in error_line(PPO, refused, tokenizer=tokenizer)
    assert "adapters already; leave lora out" in error_line(PPO, again, tokenizer=tokenizer, lora=config)


def test_adapters_save_nothing_of_the_critic(model, tiny_models, tiny_tokenizer, tmp_path):
    """Bytes of weights, gradients and Adam's moments: 16 for each that learns, 4 for each that doesn't.

    The critic is a smaller model with the same tokenizer.
    """
    tiny_models("llama").save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    ppo = PPO(model, critic=tmp_path, lora=models.LoraArgs(rank=2), **SIZES | {"dtype": "float32"})
    ppo.step(ppo.generate(QUERIES), SCORES)

    def bytes_of(weight: torch.nn.Parameter) -> int:
        moments = [entry for entry in ppo.optimizer.state[weight].values() if entry.shape == weight.shape]
        return sum(tensor.nbytes for tensor in [weight, *moments, weight.grad] if tensor is not None)

    critic = [*ppo.actor_critic.critic.lm_backbone.parameters()]
    frozen = [weight for weight in ppo.actor_critic.lm_backbone.parameters() if not weight.requires_grad]
    for weights, each, whole in ((critic, 16, tiny_models("llama").model), (frozen, 4, tiny_models("gpt2"))):
        assert sum(map(bytes_of, weights)) == each * sum(weight.numel() for weight in whole.parameters())


@pytest.mark.parametrize("kind", loop_memory.KINDS)
def test_computed_memory_is_that_of_weights_gradients_and_moments(tiny_models, tiny_tokenizer, kind):
    lm = tiny_models("llama")
    ppo = PPO(lm, tokenizer=tiny_tokenizer, response_length=4, **loop_memory.KINDS[kind])
    ppo.step(ppo.generate(QUERIES), SCORES)
    weights = {*ppo.actor_critic.parameters(), *ppo.reference.lm_backbone.parameters()}
    moments = [entry for state in ppo.optimizer.state.values() for entry in state.values()]
    kept = [*weights, *moments, *(weight.grad for weight in weights if weight.grad is not None)]
    found = sum(tensor.nbytes for tensor in kept if tensor.dim())  # without the critic's scale
    assert loop_memory.computed(lm.config)[kind] == pytest.approx(found / 1e9, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_state_and_a_stored_batch_go_on_with_the_same_numbers(model, tmp_path, kind):
    """Of an optimiser of one's own, its warm-up and its clipping; the batch waited for its scores.

    The one that goes on computes layers twice, which changes nothing.
    """

    def make(**more: Any) -> PPO:
        sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        return PPO(model, **KINDS[kind], optimizer=sgd, max_grad_norm=1e-3, kl_target=0.1, **without_lr, **more)

    without_lr = {name: value for name, value in SIZES.items() if name != "lr"}
    one, two = make(), make(gradient_checkpointing=True)
    warm_up = torch.optim.lr_scheduler.LinearLR(one.optimizer, 0.5, total_iters=2)
    before = weights_of(one.actor_critic)
    assert one.step(one.generate(QUERIES), SCORES)["lr"] == 0.05
    weights = {name: x for name, x in one.actor_critic.named_parameters() if x.requires_grad}
    moved = math.sqrt(sum(((x - before[name]) ** 2).sum().item() for name, x in weights.items()))
    # Four steps of SGD with a momentum of 0.9, each by a gradient of at most 1e-3.
    assert 0 < moved <= 0.05 * 1e-3 * (1 + 1.9 + 2.71 + 3.439) * 1.001
    warm_up.step()
    batch = one.generate(QUERIES)
    torch.save({"ppo": one.state_dict(), "batch": batch.state_dict()}, tmp_path / "state.pt")
    stored = torch.load(tmp_path / "state.pt", weights_only=True)
    again = Batch.from_state_dict(stored["batch"])
    assert "of the one whose state it has loaded" in error_line(two.step, replace(again, step=0), SCORES)
    two.load_state_dict(stored["ppo"])
    assert len(pickle.dumps(batch)) < 20_000
    assert one.step(batch, SCORES) == two.step(again, SCORES)
    assert same(weights_of(one.actor_critic), weights_of(two.actor_critic))
    assert one.step(one.generate(QUERIES), SCORES) == two.step(two.generate(QUERIES), SCORES)
    assert one.controller.value != 0.3


def test_a_state_has_the_reference_and_moments_that_are_not_shared(model):
    plain, other = PPO(model, **SIZES), PPO(model, **SIZES)
    plain.step(plain.generate(QUERIES), SCORES)
    other.reference.lm_backbone.get_output_embeddings().weight.data.zero_()
    other.load_state_dict(plain.state_dict())
    assert plain.step(plain.generate(QUERIES), SCORES) == other.step(other.generate(QUERIES), SCORES)
    assert same(weights_of(plain.actor_critic), weights_of(other.actor_critic))


def test_a_state_that_the_next_step_has_changed_is_no_earlier_state(model):
    ppo = PPO(model, **SIZES)
    state = ppo.state_dict()
    ppo.load_state_dict(state)
    copied = copy.deepcopy(state)
    expected = ppo.step(ppo.generate(QUERIES), SCORES)
    assert "which a step has changed" in error_line(ppo.load_state_dict, state) and ppo.steps == 1
    ppo.load_state_dict(copied)
    assert ppo.step(ppo.generate(QUERIES), SCORES) == expected


# ---- What a person's loop needs --------------------------------------------------------------------------------


def test_each_query_has_a_length_of_its_own_and_the_reference_the_same_random_numbers(model):
    ppo = PPO(model, **SIZES)
    batch, lengths = ppo.generate(QUERIES), [2, 6, 1, 4]
    assert ppo.reference_responses(QUERIES) == batch.responses
    ppo.draws = 0
    cut = ppo.generate(QUERIES, torch.tensor(lengths))
    ppo.draws = 0
    assert ppo.generate(QUERIES, list(np.array(lengths))).responses == cut.responses  # as TRL's LengthSampler draws
    whole = zip(batch.response_ids, lengths, strict=True)
    assert cut.response_ids == [ids[:length] for ids, length in whole] and max(map(len, batch.response_ids)) == 6
    assert ppo.reference_responses(QUERIES, lengths) == cut.responses
    ppo.step(batch, SCORES)
    assert ppo.draws == 1 and ppo.reference_responses(QUERIES) == batch.responses
    ppo.draws = 0
    assert ppo.generate(QUERIES).responses != batch.responses


def test_messages_are_read_through_the_chat_template(model, tiny_tokenizer):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = (
        "{% for one in messages %}{{ one.role[0] + one.content + '.' }}{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    ppo = PPO(model, tokenizer=tokenizer, **SIZES)
    turns = [{"role": "system", "content": "b c"}, {"role": "user", "content": "d"}]
    batch = ppo.generate([turns, turns[1:]])
    expected = [ppo.tokenizer.encode(text) for text in ("sb c.ud.a", "ud.a")]
    assert [row[row != ppo.pad_id].tolist() for row in queries_of(batch.rollout)] == expected
    again = ppo.batch([turns, turns[1:]], batch.response_ids)
    assert torch.equal(again.rollout.query_responses, batch.rollout.query_responses)


def test_it_logs_to_trackers_of_accelerate(model, tmp_path):
    ppo = PPO(model, log_with="tensorboard", tracker_project_name="mine", logging_dir=tmp_path, **SIZES)
    for step in range(2):
        metrics = ppo.step(ppo.generate(QUERIES), SCORES)
        ppo.log(metrics | {"my own": 0.5 + step})
    ppo.log({"late": 3.0}, step=9)
    events = EventAccumulator(str(tmp_path / "mine")).Reload()
    found = {name: [(one.step, one.value) for one in events.Scalars(name)] for name in ("my own", "late", "lr")}
    assert found["my own"] == [(0, 0.5), (1, 1.5)] and found["late"] == [(9, 3.0)]
    assert [step for step, _ in found["lr"]] == [0, 1] and set(metrics) <= set(events.Tags()["scalars"])


def test_it_is_a_guest_in_a_program(model, tmp_path, capfd):
    """It reads NumPy's numbers, and neither draws from PyTorch's generator, nor sets threads, nor prints."""
    PPO(model, **SIZES).save(tmp_path)
    torch.manual_seed(5)
    threads, verbosity = torch.get_num_threads(), logging.get_verbosity()
    logging.set_verbosity_warning()
    logging.enable_progress_bar()  # which a script in a test before may have switched off
    expected = torch.random.get_rng_state()
    capfd.readouterr()
    numbers = {
        "lr": np.float32(1e-2),
        "response_length": np.int64(6),
        "kl_horizon": 1e4,
        "kl_coef": torch.tensor(0.3),
    }
    ppo = PPO(tmp_path, critic=tmp_path / "critic", **SIZES | numbers)
    with_adapters = PPO(model, lora=ADAPTERS, **SIZES)
    for one in (ppo, with_adapters):
        metrics = one.step(one.generate(QUERIES), np.array(SCORES))
        assert {type(number) for number in metrics.values()} == {float}
        one.save(tmp_path / "mine")
    assert torch.equal(torch.random.get_rng_state(), expected) and torch.get_num_threads() == threads
    assert logging.get_verbosity() == logging.WARNING and logging.is_progress_bar_enabled()
    assert capfd.readouterr() == ("", "")
    logging.set_verbosity(verbosity)
    with pytest.warns(UserWarning, match="optimizer makes its own"):
        PPO(model, optimizer=partial(torch.optim.SGD, lr=0.1), **SIZES)


# ---- What is refused -------------------------------------------------------------------------------------------


def weights_change(ppo: PPO, batch: Batch) -> None:
    next(ppo.actor_critic.parameters()).data.mul_(1.1)


def values_are_lost(ppo: PPO, batch: Batch) -> None:
    batch.rollout.values[0, 0] = math.nan


def weights_are_lost(ppo: PPO, batch: Batch) -> None:
    """After the first of four optimiser steps."""
    ppo.optimizer.register_step_post_hook(lambda *_: next(ppo.actor_critic.parameters()).data.fill_(math.nan))


def weights_are_lost_at_last(ppo: PPO, batch: Batch) -> None:
    """After the last of four optimiser steps, so that no loss is lost with them."""

    def lose(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if max(state["step"] for state in optimizer.state.values()) == 4:
            next(ppo.actor_critic.parameters()).data.fill_(math.nan)

    ppo.optimizer.register_step_post_hook(lose)


def somebody_interrupts(ppo: PPO, batch: Batch) -> None:
    """The third optimiser step."""

    def interrupt(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if max(state["step"] for state in [{"step": 0}, *optimizer.state.values()]) == 2:
            raise KeyboardInterrupt("here")

    ppo.optimizer.register_step_pre_hook(interrupt)


@pytest.mark.parametrize(
    ("spoil", "error", "words", "optimizer_steps"),
    [
        (weights_change, InputError, "the ratio is off 1 by .* before optimiser step 1 of step 0", 0),
        (values_are_lost, InputError, "val/mean is nan.* before optimiser step 1 of step 0", 0),
        (weights_are_lost, InputError, "loss/policy_avg is nan.* before optimiser step 2 of step 0", 1),
        (weights_are_lost_at_last, InputError, "the weights are not finite after step 0", 4),
        (somebody_interrupts, KeyboardInterrupt, "here", 2),
    ],
)
def test_nothing_goes_on_after_half_an_update_but_from_a_state_of_before(
    model, tmp_path, spoil, error, words, optimizer_steps
):
    ppo, whole = PPO(model, **SIZES), PPO(model, **SIZES)
    own = ppo.state_dict()
    state, batch = copy.deepcopy(own), ppo.generate(QUERIES)
    expected = whole.step(whole.generate(QUERIES), SCORES)
    spoil(ppo, batch)
    before = weights_of(ppo.actor_critic)
    with pytest.raises(error, match=words):
        ppo.step(batch, SCORES)
    made = [int(state["step"]) for state in ppo.optimizer.state.values()] or [0]
    assert ppo.steps == 1 and max(made) == optimizer_steps
    assert same(before, weights_of(ppo.actor_critic)) == (optimizer_steps == 0)
    for call in (
        partial(ppo.generate, QUERIES),
        partial(ppo.batch, QUERIES, QUERIES),
        partial(ppo.step, batch, SCORES),
        partial(ppo.save, tmp_path / "mine"),
        ppo.state_dict,
    ):
        assert "step 0 did not come to its end" in error_line(call)
    assert "which a step has changed" in error_line(ppo.load_state_dict, own)
    assert not (tmp_path / "mine").exists()
    fresh = ppo if spoil in (weights_change, values_are_lost) else PPO(model, **SIZES)  # without the hook
    fresh.load_state_dict(state)
    assert fresh.step(fresh.generate(QUERIES), SCORES) == expected


def test_what_does_not_fit_is_refused_in_one_line_and_changes_nothing(model, tiny_models):
    ppo = PPO(model, **SIZES)
    batch, before = ppo.generate(QUERIES), weights_of(ppo.actor_critic)
    tokenizer = ppo.tokenizer
    tokenizer.pad_token = tokenizer.eos_token
    with_adapters, of_peft, not_json = (AutoModelForCausalLM.from_pretrained(model) for _ in range(3))
    with_adapters.add_adapter(LoraConfig(fan_in_fan_out=True))
    get_peft_model(of_peft, LoraConfig(fan_in_fan_out=True))  # changes the model itself
    not_json.config.note = object()
    of_two = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(fan_in_fan_out=True))
    of_two.add_adapter("other", LoraConfig(fan_in_fan_out=True))
    of_two.base_model.set_adapter(["default", "other"])
    other = ppo.batch(QUERIES, [[1] * 7, [2, 3, 4], [5], [6, 7]], [[1] * 7, [1, 0, 0], [1], [1, 1]])
    state = ppo.state_dict()
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 29, "n_positions": 8, "eos_token_id": 28}
    short = AutoModelForCausalLM.from_config(GPT2Config(**sizes, bos_token_id=None))
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=29, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    wrong = {
        "score 2 is nan": partial(ppo.step, batch, [1.0, math.nan, 0.0, 0.0]),
        "3 scores for 4 responses": partial(ppo.step, batch, [1.0, 2.0, 3.0]),
        "do not divide by nminibatches 2": partial(ppo.step, ppo.generate(QUERIES[:3]), [1.0, 2.0, 3.0]),
        "must be a list": partial(ppo.generate, "a cat"),
        "1 must be a text": partial(ppo.generate, [""]),
        "ids in 0..28": partial(ppo.batch, ["a"], [[29]]),
        "1 queries and 2 responses": partial(ppo.batch, ["a"], ["b", "c"]),
        "a token of the policy": partial(ppo.batch, ["a"], ["b"], [[0]]),
        "reads at most 64": partial(ppo.generate, [[1] * 1000]),
        "reads at most 8": partial(PPO(model, reference=short, **SIZES).generate, [[1] * 3]),
        "it must be a causal language model": partial(PPO, t5, tokenizer=tokenizer),
        "response_length 0: Input should be greater than 0": partial(ppo.generate, QUERIES, response_length=0),
        "dtype float16: Input should be 'float32'": partial(PPO, model, dtype="float16"),
        "queries must be a list": partial(ppo.generate, []),
        "lr -1.0: Input should be greater than 0": partial(PPO, model, lr=-1.0),
        "for each episode": partial(ppo.generate, {"input_ids": [[1]]}),
        "number 1 must be": partial(ppo.generate, torch.tensor([1, 2])),
        "0..28, not empty": partial(ppo.generate, [[True]]),
        "a list of numbers": partial(ppo.step, batch, [1.0, None, 0.0, 0.0]),
        "reference is a Linear": partial(PPO, model, reference=torch.nn.Linear(1, 1)),
        "another number of token embeddings": partial(PPO, model, reference=tiny_models("gpt2", 3)),
        "one entry for each token": partial(ppo.batch, ["a"], ["b"], [[1, 0]]),
        "of the same PPO": partial(PPO(model, **SIZES).step, batch, SCORES),
        "no argument batch_size": partial(PPO, model, batch_size=8),
        "a function that makes one": partial(PPO, model, optimizer=ppo.optimizer),
        "must be a function that makes": partial(PPO, model, optimizer=3),
        "tokenizer must be a loaded one": partial(PPO, model, tokenizer="gpt2"),
        "the state lacks actor_critic": partial(ppo.load_state_dict, None),
        "no state of a batch: 'rollout'": partial(Batch.from_state_dict, {}),
        "torch.no_grad or inference_mode": partial(torch.no_grad()(ppo.step), batch, SCORES),
        "list of numbers: only one": partial(ppo.step, batch, [torch.ones(2)] * 4),
        "kl_horizon inf": partial(PPO, model, kl_horizon=math.inf),
        "max_grad_norm is -1": partial(PPO, model, max_grad_norm=-1.0),
        "must be a list of numbers, not a dict": partial(ppo.step, batch, dict.fromkeys(range(4), 1.0)),
        "must be a list of numbers, not a str": partial(ppo.step, batch, "1234"),
        "must be a list of numbers, not a set": partial(ppo.step, batch, {1, 2, 3, 4}),
        "needs scores or rewards": partial(ppo.step, batch),
        "3 lists of rewards for 4": partial(ppo.step, batch, rewards=[[]] * 3),
        "there are 1 for 7 tokens": partial(ppo.step, other, rewards=[[1.0], [], [], []]),
        "rewards of response 1: 8 is no token of the policy's, nor 7": partial(
            ppo.step, other, rewards=[[(8, 1.0)], [], [], []]
        ),
        "rewards of response 2: 1 is no token": partial(ppo.step, other, SCORES, [[], [(1, 1.0)], [], []]),
        "rewards of response 2: 2 is no token": partial(ppo.step, other, rewards=[[], [1.0, 0.0, 1.0], [], []]),
        "rewards of response 2: -1 is no token": partial(ppo.step, other, rewards=[[], [(-1, 1.0)], [], []]),
        "rewards of response 3: that of 0 is nan": partial(ppo.step, other, rewards=[[], [], [(0, math.nan)], []]),
        "rewards of response 4: that of 1 is nan": partial(ppo.step, other, rewards=[[], [], [], [0.0, math.nan]]),
        "pairs of an index and a number": partial(ppo.step, other, rewards=[[(0.5, 1.0)], [], [], []]),
        "rewards of response 4: that of 0 is no number": partial(
            ppo.step, other, rewards=[[], [], [], torch.tensor([[0, 1.0], [1, 1.0]])]
        ),
        "scores must be a list of numbers, not a Tensor": partial(ppo.step, batch, torch.tensor(1.0)),
        "rewards of response 1 must be a list of numbers, not a Tensor": partial(
            ppo.step, batch, rewards=torch.ones(4)
        ),
        "mask of response 1 must be a list": partial(ppo.batch, ["a"], ["b"], [1]),
        "an entry of mask is no number": partial(ppo.batch, ["a"], ["b"], [[[1, 0]]]),
        "each episode, such as": partial(ppo.generate, torch.tensor(1)),
        "response_length [2]: Input": partial(ppo.generate, QUERIES[:1], [[2]]),
        "response_length must be a list": partial(ppo.generate, QUERIES[:1], {2: 3}),
        "adapters ['default', 'other'] are in use": partial(PPO, of_two, tokenizer=tokenizer),
        "top_p: the ratio and the KL": partial(ppo.generate, QUERIES, top_p=0.9),
        "PPO has no argument top_k: the ratio and the KL": partial(PPO, model, top_k=5),
        "max_new_tokens: it is response_length": partial(ppo.generate, QUERIES, max_new_tokens=5),
        "3 numbers for 4 queries": partial(ppo.generate, QUERIES, [1, 2, 3]),
        "response_length 0: Input": partial(ppo.generate, QUERIES, [1, 2, 3, 0]),
        "padded with token 28": partial(ppo.generate, torch.tensor([[1, 2], [28, 1]])),
        "number 1 is no chat": partial(ppo.generate, [[{"role": "user", "content": "a"}]]),
        "value_gradient is about": partial(PPO, model, value_gradient=False),
        "critic is a Linear": partial(PPO, model, critic=torch.nn.Linear(1, 1)),
        "fewer token embeddings than": partial(PPO, model, critic=RewardModel(tiny_models("gpt2", 3).base_model)),
        "lora is a int": partial(PPO, model, lora=4),
        "neither of LoraArgs nor": partial(PPO, model, lora={"rang": 4}),
        "with lora, the reference is": partial(PPO, model, lora={"rank": 2}, reference=model),
        "bias learns, but isn't of LoRA": partial(PPO, model, lora={"r": 2, "bias": "all"}),
        "frozen_bfloat16 needs dtype bfloat16": partial(PPO, model, lora={"rank": 2}, frozen_bfloat16=True),
        "no tracker": partial(ppo.log, {"score": 1.0}),
        "Unsupported logging capability: tensorbord": partial(PPO, model, log_with="tensorbord"),
        "the state lacks draws": partial(
            ppo.load_state_dict, {name: entry for name, entry in state.items() if name != "draws"}
        ),
        "state's optimizer is another one": partial(PPO(model, critic="shared", **SIZES).load_state_dict, state),
        "of the optimizer AdamW, not SGD": partial(
            PPO(model, optimizer=partial(torch.optim.SGD, lr=0.1)).load_state_dict, state
        ),
        "actor_critic differs in": partial(PPO(model, lora=ADAPTERS, **SIZES).load_state_dict, state),
        "cannot be saved: NotADirectoryError": partial(ppo.save, f"{model}/config.json/mine"),
        "no argument learning_rate": partial(PPO, model, learning_rate=1e-5),
        "lr 1e-5: Input should be a valid number": partial(PPO, model, lr="1e-5"),
        "model is a Linear": partial(PPO, torch.nn.Linear(1, 1), tokenizer=tokenizer),
        "needs its tokenizer": partial(PPO, AutoModelForCausalLM.from_pretrained(model)),
        "model ./nowhere cannot be loaded": partial(PPO, "./nowhere"),
        "critic ./nowhere cannot be loaded": partial(PPO, model, critic="./nowhere"),
        "the model has adapters inside": partial(PPO, with_adapters, tokenizer=tokenizer),
        "has adapters inside, which could not be saved": partial(PPO, of_peft, tokenizer=tokenizer),
        "no weight of the model learns": partial(PPO, tiny_models("gpt2").requires_grad_(False), tokenizer=tokenizer),
        "could not be saved after training: TypeError": partial(PPO, not_json, tokenizer=tokenizer),
    }
    for words, call in wrong.items():
        assert words in error_line(call)
    assert same(before, weights_of(ppo.actor_critic))
    ppo.step(batch, SCORES)
    assert "is of step 0" in error_line(ppo.step, batch, SCORES)


# ---- The page ------------------------------------------------------------------------------------------------------

PAGE = (ROOT / "docs/from_trl.md").read_text()
PROGRAMS = re.findall(r"```python\n(import .*?)```\n\n```\n(.*?)```", PAGE, re.DOTALL)  # and what they printed


def without_numbers(text: str) -> list[str]:
    """What is said of steps, with # for each number."""
    return re.findall(r"(?m)(?:^|step )#: [^\n]*", re.sub(r"-?\d+(\.\d+)?", "#", text))


@pytest.mark.parametrize("place", range(5), ids=["reward", "person", "classifier", "game", "turns"])
def test_the_programs_of_the_page_run_as_they_stand(tiny_world, tmp_path, monkeypatch, capsys, place):
    (code, printed), words = PROGRAMS[place], []
    if place == 2:
        tokenizer = AutoTokenizer.from_pretrained(tiny_world / "model")
        tokenizer.pad_token, labels = tokenizer.decode(0), ["NEGATIVE", "POSITIVE"]
        words = [classifier("gpt2", tmp_path / "judge", tokenizer, labels, 0, rows=len(tokenizer)), "POSITIVE"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["program.py", str(tiny_world / "model"), *words, "2"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("0.5\n1\n-1\n0\n" * 2))
    exec(compile(code, "program.py", "exec"), {"__name__": "__main__"})
    said = without_numbers(capsys.readouterr().out)
    assert code.count("\n") <= 40 and len(said) == 2 and set(said) == set(without_numbers(printed))
    if place == 0:
        AutoModelForCausalLM.from_pretrained("models/mine")
