"""Our functions against numbers computed by the code of 2019 (tests/golden/README.md), and mistakes that they detect.

Each check is a plain function, so that the tests and the negative controls at the end call the same code. A check
reads our functions from their module when it runs: a negative control puts a wrong one there.
"""

import json
import math
import random

import golden_models
import mistakes
import pytest
import torch
from accelerate import Accelerator
from golden_models import (
    FLOAT32_EPS,
    PAD,
    by_parameter,
    cases,
    close,
    golden_policy,
    golden_reward_model,
    load_arrays,
    load_json,
    steering_uniforms,
    under,
)
from transformers import GPT2Config, GPT2LMHeadModel

from ppo_rlhf import train_policy, train_reward
from ppo_rlhf.train_policy import InputError

# Largest differences that the golden numbers allow, from their README. We compute in float64; they were computed and
# stored in float32, so one unit in the last place of the stored number comes on top.
LOGPROB, VALUE, ADVANTAGE, PPO_LOSS, STATISTIC = 8e-6, 2e-6, 4e-7, 3e-7, 1e-6
GRADIENT = 4e-6  # relative to the largest entry of each variable
REWARD_GRADIENT, REWARD_WEIGHT, PPO_WEIGHT = 2e-6, 2e-6, 2e-7


# ---- Mathematics: cases 1, 6, 7, 8, 9 --------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({key.split("/")[0] for key in load_arrays("case1_whiten")}))
def test_whiten(name):
    arrays = under(load_arrays("case1_whiten"), f"{name}/")
    values = arrays["input"]
    scale = 1 / math.sqrt(values.var(unbiased=False).item() + 1e-8)  # how much rounding of the input is magnified
    atol = ADVANTAGE + FLOAT32_EPS * values.abs().max().item() * scale
    for key, keep_mean in (("shift_mean_true", False), ("shift_mean_false", True)):
        close(train_policy.whiten(values, keep_mean=keep_mean), arrays[key], atol=atol)


# ---- Tokens: cases 5 and 10 ------------------------------------------------------------------------------------


class CharacterTokenizer:
    """One token per character: a..z are 0..25, everything else is a full stop, 26."""

    def encode(self, text: str, **options) -> list[int]:
        return [ord(character) - ord("a") if "a" <= character <= "z" else 26 for character in text]


QUERIES = load_json("case10_query_sampling")


def stream_of(stories: list[str], tmp_path, **task) -> train_policy.QueryStream:
    """A stream that gives the texts in this order: they are written so that its shuffle puts them there."""
    order = list(range(len(stories)))
    random.Random(0).shuffle(order)
    shuffled = dict(zip(order, stories, strict=True))
    path = tmp_path / "texts.json"
    path.write_text(json.dumps([shuffled[i] for i in range(len(stories))]))
    return train_policy.QueryStream(train_policy.TaskArgs(query_dataset=str(path), **task), CharacterTokenizer())


@pytest.mark.parametrize("name", QUERIES["runs"])
def test_trim_query(name):
    run, encode = QUERIES["runs"][name], CharacterTokenizer().encode
    start_id, end_id = (encode(text)[0] if text else None for text in (run["start_text"], run["end_text"]))
    for text, expected in run["tokens"].items():
        tokens = encode(QUERIES["texts"][text])
        assert tokens == QUERIES["encoded"][text]
        query = train_policy.trim_query(tokens, run["query_length"], start_id, end_id)
        unpadded = None if expected is None else [token for token in expected if token != PAD]
        assert query == unpadded, text


def test_query_stream_without_usable_text(tmp_path):
    with pytest.raises(InputError):
        stream_of([QUERIES["texts"]["no_start_token"]], tmp_path)


def test_query_stream_repeats_across_batches(tmp_path):
    case = QUERIES["repeat_and_batch"]
    stream = stream_of(case["texts"], tmp_path, query_length=case["query_length"])
    batches = [stream.next_batch(case["batch_size"], PAD).tolist() for _ in case["batches"]]
    assert batches == case["batches"]


def test_add_affixes():
    case, encode = QUERIES["query_formatter"], CharacterTokenizer().encode
    contexts = train_policy.add_affixes(torch.tensor(case["queries"]), encode(case["prefix"]), encode(case["suffix"]))
    assert contexts.tolist() == case["formatted"]


# ---- The policy: cases 2, 3 and 11 -----------------------------------------------------------------------------


def contexts_of(arrays: dict[str, torch.Tensor]) -> torch.Tensor:
    return train_policy.add_affixes(
        arrays["queries"], arrays["prefix_tokens"].tolist(), arrays["suffix_tokens"].tolist()
    )


@pytest.mark.parametrize("name", cases("case3_forward_"))
def test_forward(name):
    arrays = load_arrays(f"case3_forward_{name}")
    policy, temperature = golden_policy(name.split("_")[0]), arrays["temperature"].item()
    contexts = contexts_of(arrays)
    query_responses = torch.cat([contexts, arrays["responses"]], dim=1)
    close(query_responses, arrays["full_tokens"], atol=0)
    with torch.no_grad():
        logprobs, entropies, values = policy(query_responses, PAD, contexts.shape[1], temperature)
    close(logprobs, arrays["logprobs"], atol=LOGPROB)
    close(entropies, arrays["entropies"], atol=LOGPROB)
    close(values, arrays["values"], atol=VALUE)


@pytest.mark.parametrize("name", cases("case3_forward_"))
def test_sampler(name):
    """The responses that the original sampled."""
    arrays = load_arrays(f"case3_forward_{name}")
    policy, temperature = golden_policy(name.split("_")[0]), arrays["temperature"].item()
    contexts = contexts_of(arrays)
    query_responses = torch.cat([contexts, arrays["sampled_responses"]], dim=1)
    with torch.no_grad():
        uniforms = steering_uniforms(
            policy.lm_backbone,
            query_responses,
            response_length=arrays["sampled_responses"].shape[1],
            pad_id=PAD,
            vocab_size=policy.vocab_size,
            temperature=temperature,
        )
        responses, sampled_logprobs = train_policy.generate(
            policy.lm_backbone, contexts, uniforms, PAD, policy.vocab_size, temperature
        )
        logprobs, _, values = policy(query_responses, PAD, contexts.shape[1], temperature)
    close(responses, arrays["sampled_responses"], atol=0)
    for each in (sampled_logprobs, logprobs):
        close(each, arrays["sampled_logprobs"], atol=LOGPROB)
    close(values, arrays["sampled_values"], atol=VALUE)


@pytest.mark.parametrize("name", cases("case2_loss_"))
def test_ppo_loss(name):
    """One optimiser step of the original: advantages, returns, losses, statistics, gradients."""
    case, arrays = load_json("case2_loss_meta")[name], load_arrays(f"case2_loss_{name}")
    policy = golden_policy(case["model"])
    hyperparameters = ("vf_coef", "cliprange", "cliprange_value", "gamma", "lam", "whiten_rewards")
    settings = {key: case[key] for key in hyperparameters}
    ppo = train_policy.PpoArgs(**settings, local_micro_batch_size=case["batch"])
    query_responses = torch.cat([contexts_of(arrays), arrays["responses"]], dim=1)
    rollout = rollout_of(query_responses, arrays)
    permutations = torch.arange(case["batch"]).view(1, 1, -1)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)  # the gradients stay where they are
    passes: dict[str, torch.Tensor] = {}  # advantages, returns, and what is read anew
    metrics = train_policy.ppo_update(
        policy, optimizer, rollout, permutations, ppo, PAD, case["temperature"], passes=passes
    )
    for key, (numbers,) in passes.items():
        close(numbers, arrays[key], atol=LOGPROB, name=key)
    close(metrics["ppo/loss/total"], arrays["loss"], atol=PPO_LOSS)
    statistics = under(arrays, "stats/")
    assert len(statistics) == 13
    for key, expected in statistics.items():
        close(metrics[f"ppo/{key}"], expected, atol=STATISTIC, name=key)
    for key, expected in by_parameter(policy, under(arrays, "grad/")).items():
        atol = GRADIENT * expected.abs().max().item()
        close(policy.get_parameter(key).grad, expected, atol=atol, name=key)


def rollout_of(query_responses: torch.Tensor, arrays: dict[str, torch.Tensor]) -> train_policy.Rollout:
    numbers = {name: arrays[name] for name in ("logprobs", "values", "rewards")}
    return train_policy.Rollout(context_responses=query_responses, **numbers)


@pytest.mark.parametrize("name", cases("case11_ppo_step_"))
def test_ppo_steps(name):
    """Two whole updates: reference, scores, rewards, epochs, metrics and weights, from the stored responses."""
    meta, arrays = load_json("case11_ppo_step_meta")[name], load_arrays(f"case11_ppo_step_{name}")
    task, hparams = meta["hparams"]["task"], meta["hparams"]["ppo"]
    encode, temperature = CharacterTokenizer().encode, task["policy"]["temperature"]
    policy = golden_policy(meta["model"], under(arrays, "policy_initial/"))
    reference = golden_policy(meta["model"], under(arrays, "ref_policy/")).lm_backbone
    reward_model = golden_reward_model(meta["model"], under(arrays, "reward_model/"))
    ppo = train_policy.PpoArgs(**hparams, whiten_groups=1)
    optimizer = train_policy.AdamTensorFlowStyle(policy.parameters(), lr=ppo.lr)
    prefix, suffix = encode(task["query_prefix"]), encode(task["query_suffix"])
    ids = train_policy.TaskIds(
        pad=PAD,
        eos=-1,
        stop=None,
        prefix=prefix,
        suffix=suffix,
        context_length=len(prefix) + task["query_length"] + len(suffix),
    )
    for update, expected in enumerate(meta["steps"]):
        step = under(arrays, f"step{update}/")
        contexts = train_policy.add_affixes(step["queries"], prefix, suffix)
        query_responses = torch.cat([contexts, step["responses"]], dim=1)
        with torch.no_grad():
            logprobs, _, values = policy(query_responses, PAD, ids.context_length, temperature)
            ref_logprobs = train_policy.response_logprobs(
                reference, query_responses, PAD, ids.context_length, temperature, ids.pad
            )[0]
            truncated = train_policy.truncate_at(step["responses"], ids.stop, task["truncate_after"], PAD)
            scores = reward_model(torch.cat([step["queries"], truncated], dim=1), PAD)
        close(logprobs, step["logprobs"], atol=LOGPROB)
        close(values, step["values"], atol=VALUE)
        close(ref_logprobs, step["ref_logprobs"], atol=LOGPROB)
        close(truncated, step["postprocessed_responses"], atol=0)
        close(scores, step["scores"], atol=VALUE)
        rewards, non_score_rewards, kl = train_policy.compute_rewards(
            step["scores"], step["logprobs"], step["ref_logprobs"], expected["kl_coef_used"]
        )
        close(rewards, step["rewards"], atol=ADVANTAGE)
        close(non_score_rewards, step["non_score_reward"], atol=ADVANTAGE)

        rollout = rollout_of(query_responses, step)
        # The replay of test_train_policy.py has this formula, and that of the explained variance.
        optimizer.param_groups[0]["lr"] = ppo.lr * (1 - update / meta["nupdates"])
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected["lr"], rel=1e-6)
        permutations = step["permutations"].long().unsqueeze(1)  # (epochs, 1, batch)
        stats = train_policy.ppo_update(policy, optimizer, rollout, permutations, ppo, PAD, temperature)
        for key, numbers in under(step, "minibatch_stats/").items():
            close(stats[f"ppo/{key}"], numbers.mean(), atol=STATISTIC, name=key)
        for key, weights in by_parameter(policy, under(step, "policy_after/")).items():
            close(policy.get_parameter(key).detach(), weights, atol=PPO_WEIGHT, name=key)

        metrics = {key: number.item() for key, number in stats.items()} | {
            "objective/kl": kl.sum(1).mean().item(),
            "objective/entropy": -step["logprobs"].sum(1).mean().item(),
            "objective/score": step["scores"].mean().item(),
            "objective/score_total": (step["scores"] + non_score_rewards.sum(1)).mean().item(),
        }
        metrics["ppo/val/var_explained"] = 1 - metrics["ppo/val/error"] / metrics["ppo/returns/var"]
        for key, number in expected["recorded_stats"].items():
            if not key.startswith(("elapsed/", "objective/kl_coef")):
                tolerance = STATISTIC + FLOAT32_EPS * abs(number)
                assert metrics[key] == pytest.approx(number, rel=0, abs=tolerance), key


# ---- The reward model: case 4 ----------------------------------------------------------------------------------


def labels_of(arrays: dict[str, torch.Tensor]) -> train_reward.Labels:
    samples = [array for key, array in sorted(arrays.items()) if key.startswith("labels/sample")]
    (kind,) = {"best", "score", "difference"} & {key.removeprefix("labels/") for key in arrays}
    return train_reward.Labels(
        queries=arrays["labels/query"],
        samples=torch.stack(samples, dim=1),
        targets=arrays[f"labels/{kind}"],
        kind=kind,
    )


@pytest.mark.parametrize("name", cases("case4_reward_loss_"))
def test_reward_loss(name):
    case, arrays = load_json("case4_reward_loss_meta")[name], load_arrays(f"case4_reward_loss_{name}")
    weights = load_arrays(f"weights_{case['model']}_reward")
    weights |= {"reward_norm/gain": arrays["gain"], "reward_norm/bias": arrays["bias"]}
    reward_model = golden_reward_model(case["model"], weights)
    labels = labels_of(arrays)
    scores = train_reward.score_samples(reward_model, labels, torch.arange(case["batch"]), PAD)
    close(scores.detach(), arrays["rewards_per_sample"], atol=VALUE)
    tokens = torch.cat([labels.queries.unsqueeze(1).expand(-1, scores.shape[1], -1), labels.samples], dim=2)
    padded_scores = reward_model(tokens.flatten(0, 1), PAD).view_as(scores)  # as `normalize` reads what was truncated
    close(padded_scores.detach(), arrays["rewards_per_sample"], atol=VALUE)
    optimizer = torch.optim.SGD(reward_model.parameters(), lr=0.0)  # the gradients stay where they are
    inds = torch.arange(case["batch"])
    stats = train_reward.reward_update(
        reward_model, optimizer, labels, inds, PAD, Accelerator(cpu=True), micro_batch=len(inds)
    )
    statistics = under(arrays, "stats/")
    close(statistics.pop("error"), statistics["loss"], atol=0)
    for key, expected in statistics.items():
        close(stats[f"train/{key}"], expected, atol=STATISTIC, name=key)
    for key, expected in by_parameter(reward_model, under(arrays, "grad/")).items():
        close(reward_model.get_parameter(key).grad, expected, atol=REWARD_GRADIENT, name=key)


def check_normalization(reward_model, samples: dict[str, torch.Tensor], event: dict) -> None:
    tokens = torch.cat([samples["queries"], samples["responses"]], dim=1)
    train_reward.normalize(reward_model, tokens, PAD, 32, Accelerator(cpu=True), event["new_mean"], event["new_std"])
    assert reward_model.gain.item() == pytest.approx(event["gain"], rel=0, abs=REWARD_WEIGHT)
    assert reward_model.bias.item() == pytest.approx(event["bias"], rel=0, abs=REWARD_WEIGHT)


@pytest.mark.parametrize("name", cases("case4_reward_train_"))
def test_reward_training(name):
    """Normalise, six steps, normalise: gain, bias, losses, weights, and the scores of the final model."""
    meta, arrays = load_json("case4_reward_train_meta")[name], load_arrays(f"case4_reward_train_{name}")
    args = train_reward.Args(lr=meta["lr"], batch_size=meta["batch_size"], num_train=meta["num_train"])
    reward_model = golden_reward_model(meta["model"], under(arrays, "initial/"))
    optimizer = train_reward.AdamTensorFlowStyle(reward_model.parameters(), lr=args.lr)
    events = meta["normalization_events_in_order"]
    labels = labels_of(arrays)

    scale = train_reward.target_scale(labels.kind, labels.targets)
    assert scale == pytest.approx((events[1]["new_mean"], events[1]["new_std"]), rel=1e-6)
    check_normalization(reward_model, under(arrays, "normalize_call_0/"), events[1])
    for step, inds in enumerate(arrays["batch_indices"].long()):
        optimizer.param_groups[0]["lr"] = train_reward.learning_rate_at(args, step)
        close(torch.tensor(optimizer.param_groups[0]["lr"]), arrays["batch_lr"][step], atol=1e-9)
        stats = train_reward.reward_update(
            reward_model, optimizer, labels, inds, PAD, Accelerator(cpu=True), micro_batch=len(inds)
        )
        for key, number in meta["stats_per_step"][step].items():
            if key != "error":  # another name of the loss
                close(stats[f"train/{key}"], torch.tensor(number), atol=STATISTIC, name=key)
    if meta["normalize_after"]:
        learned, after = events[2:]
        assert reward_model.gain.item() == pytest.approx(learned["reset_from_gain"], rel=0, abs=REWARD_WEIGHT)
        assert reward_model.bias.item() == pytest.approx(learned["reset_from_bias"], rel=0, abs=REWARD_WEIGHT)
        check_normalization(reward_model, under(arrays, "normalize_call_2/"), after)

    for key, weights in by_parameter(reward_model, under(arrays, "final/")).items():
        close(reward_model.get_parameter(key).detach(), weights, atol=REWARD_WEIGHT, name=key)
    tokens = torch.cat([arrays["probe/queries"], arrays["probe/responses"]], dim=1)
    with torch.no_grad():
        close(reward_model(tokens, PAD), arrays["probe/rewards_after_all"], atol=REWARD_WEIGHT)


def test_initial_heads():
    """As many draws of the heads as the original was measured on: 5,120 numbers, standard error 1 %."""
    stats = load_json("case4_init_stats")
    sizes = {"vocab_size": 27, "n_positions": 8, "n_embd": 256, "n_layer": 1, "n_head": 4}
    backbone, weights = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)), []
    for seed in range(stats["reward_head"]["draws"] // 256):
        torch.manual_seed(seed)
        head = train_reward.RewardModel(backbone).reward_head
        weights.append(head.weight.detach())
        assert head.bias.item() == stats["reward_head"]["bias"]
    assert torch.cat(weights).std().item() == pytest.approx(stats["reward_head"]["std"], rel=0.04)
    value_head = train_policy.PolicyWithValueHead(backbone).value_head
    assert value_head.weight.eq(0).all().item() == stats["value_head"]["all_zero"]
    assert value_head.bias.item() == stats["value_head"]["bias"]


# ---- Negative controls: each deliberate mistake makes a test fail ----------------------------------------------

test_mistake_is_detected, test_rebuilt_functions_pass = mistakes.tests_of(globals())


@pytest.mark.parametrize(
    ("test", "name"),
    [(test_forward, "test_nopad_t07"), (test_ppo_loss, "default"), (test_reward_training, "best_of_4_norm_both")],
)
def test_another_gelu_is_detected(test, name, monkeypatch):
    """The exact one, which the library would compute."""
    monkeypatch.setattr(golden_models, "ACTIVATION", "gelu")
    with pytest.raises(AssertionError):
        test(name)
