"""Chapter 2 against numbers of the paper's code and of TRL (tests/golden/tldr), and mistakes that they detect.

As in test_golden.py each check is a plain function that reads ours from their module when it runs: a negative control
puts a wrong one there. Whole runs are those of the scripts' `train()` (golden_tldr.py).
"""

import tempfile
from functools import partial
from types import SimpleNamespace

import mistakes
import pytest
import torch
from golden_models import close, under
from golden_tldr import (
    AS_STORED,
    CASES,
    EOS,
    PAD,
    Arrays,
    case_and_arrays,
    golden_tokenizer,
    gpt2_tokenizer,
    language_model,
    names_of,
    original_policy_run,
    our_names,
    reward_run,
    scalar_model,
    sft_run,
    trl_policy_run,
)
from runs import write_rows

from ppo_rlhf import train_policy, train_reward
from ppo_rlhf.tldr import policy as tldr_policy, posts, reward as tldr_reward, sft as tldr_sft
from ppo_rlhf.tldr.posts import TaskArgs
from ppo_rlhf.train_policy import InputError

# Largest differences that the golden numbers allow, from their README. We compute in float64; they were computed and
# stored in float32.
LOGPROB, VALUE, LOSS, MARGIN, GRADIENT = 6e-6, 2e-6, 1e-6, 2e-6, 2e-7
WEIGHT = 1.2e-5  # after a run
CONSTANT = 5e-5  # what no pair of summaries determines moves by rounding


@pytest.fixture(autouse=True)
def as_stored(monkeypatch):
    for where, name, replacement in AS_STORED:
        monkeypatch.setattr(where, name, replacement)


def column(run: SimpleNamespace, name: str) -> torch.Tensor:
    """A metric of a run, by its steps."""
    return torch.tensor([row[name] for row in run.metrics], dtype=torch.float64)


def close_weights(actual: Arrays, expected: Arrays, *, atol: float, without: tuple[str, ...] = ()) -> None:
    """An embedding of ours may have a row more, for padding."""
    assert expected
    for name, weight in expected.items():
        if name not in without:
            close(actual[name][: len(weight)].detach(), weight, atol=atol, name=name)


# ---- Mathematics -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names_of("advantages"))
def test_advantages(name):
    """Penalty, masks, rewards, GAE and whitening of made-up rollouts."""
    case, arrays = case_and_arrays(name)
    given, expected = under(arrays, "in/"), under(arrays, "out/")
    ppo = {key: value for key, value in case["ppo"].items() if key != "kl_coef"}
    penalty = ("none", 0.0) if case["penalty"] is None else ("replace", -case["penalty"])
    responses = train_policy.truncate_at(given["responses"], EOS, 0, PAD)
    finished = train_policy.has_stop(responses, EOS, 0)
    scores = tldr_policy.punish_missing_eos(given["scores"], finished, *penalty)
    mask, value_mask = tldr_policy.response_masks(responses, PAD)
    rewards, non_score_rewards, kl = tldr_policy.compute_rewards(
        scores, given["logprobs"], given["ref_logprobs"], mask, case["ppo"]["kl_coef"], "k1"
    )
    advantages, returns = tldr_policy.compute_advantages(
        rewards, given["values"], mask, value_mask, tldr_policy.PpoArgs(**ppo), torch.clone
    )
    close(responses, expected["postprocessed_responses"], atol=0)
    close(finished, expected["contain_eos_token"], atol=0)
    close(mask, ~expected["padding_mask"], atol=0)
    close(value_mask, ~expected["padding_mask_p1"], atol=0)
    close(scores, expected["scores"], atol=VALUE)
    close(kl, expected["kl"], atol=VALUE)
    close(non_score_rewards, expected["non_score_reward"], atol=VALUE)
    close(advantages, expected["advantages"], atol=VALUE)
    close(returns, expected["returns"], atol=VALUE)


def test_defaults():
    """Settings that the original has too."""
    given = CASES["defaults"]["defaults"]
    sft, reward, ppo, texts = (given[f"{name}.py"] for name in ("sft", "reward", "ppo", "tldr_dataset"))
    policy = tldr_policy.PRESETS["tldr"]
    for args, theirs in ((tldr_sft.PRESETS["tldr"], sft), (tldr_reward.PRESETS["tldr"], reward), (policy.ppo, ppo)):
        settings = theirs["optimizer_settings"]
        assert (args.lr, 1e-5, args.weight_decay) == tuple(settings[key] for key in ("lr", "eps", "weight_decay"))
        # The published runs had eight processes.
        assert args.batch_size == 8 * theirs["gradient_accumulation_steps"] * theirs["local_micro_batch_size"]
    assert tldr_sft.PRESETS["tldr"].epochs == sft["num_train_epochs"]
    for key in ("cliprange", "cliprange_value", "gamma", "lam", "noptepochs", "vf_coef", "whiten_rewards"):
        assert getattr(policy.ppo, key) == ppo["ppo"][key], key
    for key in ("total_episodes", "nminibatches"):
        assert getattr(policy.ppo, key) == ppo[key], key
    rewards, task, summaries = policy.rewards, policy.task, texts["tldr_params"]
    assert (rewards.kl_coef, rewards.kl_estimator) == (ppo["ppo"]["kl_coef"], "k1")
    assert (rewards.missing_eos, -rewards.missing_eos_penalty) == ("replace", ppo["penalty_reward_value"])
    assert (task.temperature, task.eval_temperature) == (ppo["temperature"], sft["temperature"])
    assert (task.query_length, task.article_query_length) == (summaries["length"], texts["cnndm_params"]["length"])
    assert task.response_length == ppo["response_length"] == summaries["max_sft_response_length"]
    assert task.comparison_length == summaries["max_rm_response_length"]


# ---- Texts -----------------------------------------------------------------------------------------------------

GPT2 = gpt2_tokenizer()


def without_padding(row: torch.Tensor) -> list[int]:
    return row[row != len(GPT2)].tolist()


def test_queries():
    """Queries of 18 posts and 2 articles, cut to several lengths."""
    case, encoder = CASES["texts_queries"], posts.Encoder(GPT2, posts.task_ids(TaskArgs(), GPT2))
    for row in case["rows"]:
        limits = TaskArgs(query_length=row["limit"], article_query_length=row["limit"])
        query, expected = encoder.query(row["info"], limits), row["query_token"]
        if "article" in row["info"]:
            assert expected[-1:] == encoder.encode("\n")  # which the original strips before a summary follows
            expected = expected[:-1]
        assert query == expected, row["query"]
        assert row["padding"] == row["limit"] - len(row["query_token"])
    for limit, _ in case["too_tight"]:
        with pytest.raises(InputError):
            encoder.query(case["rows"][0]["info"], TaskArgs(query_length=limit))


def test_comparisons():
    case = CASES["texts_comparisons"]
    with tempfile.TemporaryDirectory() as folder:
        for split, rows in case["rows"].items():
            write_rows(f"{folder}/comparisons_{split}.jsonl", *rows)
        task = TaskArgs(comparisons=folder)
        for split, expected in case["results"].items():
            articles = split.endswith("_cnndm")
            found = posts.read_comparisons(task, GPT2, split.removesuffix("_cnndm"), articles=articles)
            assert len(found) == len(expected)
            for i, row in enumerate(expected):
                query = row["query_token"][:-1] if articles else row["query_token"]
                assert without_padding(found.queries[i]) == query
                assert without_padding(found.chosen[i]) == row["chosen_token"]
                assert without_padding(found.rejected[i]) == row["rejected_token"]
                group = {"split": row["split"], "batch": row["batch"], "confidence": str(row["extra.confidence"])}
                assert found.groups[i] == group


# ---- Policy, critic and reward model as they read --------------------------------------------------------------


@pytest.mark.parametrize("name", names_of("forward"))
def test_forward(name):
    """Log-probs, entropies, values and scores in both layouts; of rows with padding as of each row alone."""
    case, arrays = case_and_arrays(name)
    expected, responses = under(arrays, "out/"), arrays["in/responses"]
    policy = language_model(case, under(arrays, "policy/"))
    weights = {f"lm_backbone.{key}": weight for key, weight in under(arrays, "backbone/").items()}
    weights |= {key: weight for key, weight in arrays.items() if key.startswith("scalar_head.")}
    models = [
        scalar_model(case, weights, -case["config_bias"], kind)
        for kind in (train_reward.RewardModel, tldr_reward.RewardModel)
    ]
    truncated = train_policy.truncate_at(responses, EOS, 0, PAD)
    tokens, scored = (torch.cat([arrays["in/queries"], texts], dim=1) for texts in (responses, truncated))
    with torch.no_grad():
        actor_critic = tldr_policy.ActorCritic(policy, models[0], case["output_rows"])
        logprobs, entropies, values = actor_critic(tokens, responses, PAD, case["temperature"])
        scores = [model(layout, PAD) for model in models for layout in (scored, arrays["in/joint"])]
        of_tokenizer, _, _ = tldr_policy.ActorCritic(policy, models[0], PAD)(
            tokens, responses, PAD, case["temperature"]
        )
    unpadded = {key: expected.get(f"unpadded_{key}", expected[key]) for key in ("logprobs", "values", "scores")}
    close(logprobs, unpadded["logprobs"], atol=LOGPROB)
    close(values, unpadded["values"], atol=VALUE)
    for of_layout in scores:
        close(of_layout, unpadded["scores"], atol=VALUE)
    # [T16] The original gives no positions, so GPT-2's numbers are right for rows without padding only.
    right = torch.ones(len(tokens), dtype=torch.bool)
    if "differs" in case:
        right = (arrays["in/queries"] != PAD).all(1)
    assert right.any()
    close(entropies[right], expected["entropy"][right], atol=LOGPROB)
    close(logprobs[right], expected["logprobs"][right], atol=LOGPROB)
    # [T14] Over the tokenizer's ids: the given logits, without the spare rows.
    table = expected["logits"][..., :PAD].log_softmax(2)
    renormalised = table.gather(2, responses.long().unsqueeze(2)).squeeze(2)
    close(of_tokenizer[right], renormalised[right], atol=LOGPROB)


# ---- Whole runs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names_of("sft"))
def test_sft_run(name):
    """Losses, first gradient, weights, held-out loss, summaries and ROUGE."""
    case, arrays = case_and_arrays(name)
    run = sft_run(case, arrays)
    losses = arrays["micro_loss"].view(len(run.metrics), -1).mean(1)
    close(column(run, "train/sft/loss"), losses, atol=LOSS)
    gradient = {key.removeprefix("lm_backbone."): value for key, value in run.first_gradient.items()}
    close_weights(gradient, our_names(under(arrays, "first_gradient/")), atol=GRADIENT)
    close_weights(run.sft.state_dict(), our_names(under(arrays, "final/")), atol=WEIGHT)
    # [X31] The original's `test/losses` count the first token of a text that is padded on the left.
    predicted = (arrays["test/query_reference_response_token"] != PAD).sum(1) - 1
    held_out = (arrays["test/losses_padded_right"] * predicted).sum() / predicted.sum()
    assert run.results["test/sft/loss"] == pytest.approx(held_out.item(), abs=LOSS)
    texts = case["rouge"]
    assert run.summaries == texts["responses"]
    means = {key: sum(scores) / len(scores) for key, scores in texts["scores"].items()}
    assert {key: run.results[f"test/sft/rouge/{key}"] for key in means} == pytest.approx(means)


@pytest.mark.parametrize("name", names_of("reward"))
def test_reward_run(name):
    """Losses, learning rates, first gradient, weights, agreement by group, and the shift."""
    case, arrays = case_and_arrays(name)
    run = reward_run(case, arrays)
    tolerances = {"loss": LOSS, "accuracy": LOSS, "chosen_rewards": CONSTANT, "rejected_rewards": CONSTANT}
    for key, atol in tolerances.items():
        means = arrays[f"micro/{key}"].view(len(run.metrics), -1).mean(1)
        close(column(run, f"train/rm/{key}"), means, atol=atol, name=key)
    close(column(run, "train/rm/lr"), arrays["step_lr"], atol=1e-9)
    close_weights(run.first_gradient, our_names(under(arrays, "first_gradient/"), scalar_model=True), atol=GRADIENT)
    weights, final = run.reward.state_dict(), our_names(under(arrays, "final/"), scalar_model=True)
    free = ("reward_head.bias", "lm_backbone.ln_f.bias", "lm_backbone.final_layer_norm.bias")
    close_weights(weights, final, atol=WEIGHT, without=free)
    close_weights(weights, {key: final[key] for key in free if key in final}, atol=CONSTANT)
    accuracies = {key: x for key, x, _ in case["scalars"] if "/accuracy" in key and key.startswith("eval/")}
    assert len(accuracies) == 20
    assert {key: run.results[key] for key in accuracies} == pytest.approx(accuracies)
    # [T29] After the shift the references have the mean 0.
    assert run.results["eval/rm/shift"] == pytest.approx(-case["config_bias"], abs=CONSTANT)
    texts = torch.cat([arrays["posts/query_token"], arrays["posts/reference_response_token"]], dim=1)
    references, expected = run.reward(texts.long(), PAD).detach(), arrays["posts_score_order"] - case["config_bias"]
    close(references.sort().values, expected.sort().values, atol=MARGIN)
    close(references.mean(), torch.tensor(0.0), atol=VALUE)
    statistics = {"std": expected.std(unbiased=False), "min": expected.min(), "max": expected.max()}
    for key, number in statistics.items():
        assert run.results[f"eval/rm/normalized_{key}"] == pytest.approx(number.item(), abs=MARGIN)


def of_micro_batches(run: SimpleNamespace, function: str, part: int, accumulation: int) -> torch.Tensor:
    """A number of each micro-batch that a loss gave; it has a share of 1 / accumulation."""
    return torch.stack([result[part].detach() for _, result in run.calls[function]]) * accumulation


def ratios_of(run: SimpleNamespace, accumulation: int) -> torch.Tensor:
    """The mean ratio of each micro-batch, from what the policy's loss got."""
    given = [arguments for arguments, _ in run.calls["policy_loss"]]
    shares = [(new - old)[mask].detach().exp().sum() / count for new, old, _, mask, _, count in given]
    return torch.stack(shares) * accumulation


# In every pass of ppo_gpt2_leftpad the original lacks positions. test_forward shows that alone, and TRL's run has the
# right ones.
@pytest.mark.parametrize("name", [name for name in names_of("ppo") if "T16" not in CASES[name]["differs"]])
def test_policy_run(name):
    """Losses and statistics of every micro-batch, first gradient, weights, metrics, held-out summaries."""
    case, arrays = case_and_arrays(name)
    updates = [under(arrays, f"update{i}/") for i in range(case["updates"])]
    rows = arrays["micro/micro_batch_inds"].long()  # (micro-batches, rows)
    accumulation = case["accumulation"]
    run = original_policy_run(case, arrays)
    of = partial(of_micro_batches, run, accumulation=accumulation)
    # The original's statistics of tokens are over all positions.
    update_of = torch.arange(len(rows)) * len(updates) // len(rows)
    masks = torch.stack([~updates[i]["padding_mask"][inds] for i, inds in zip(update_of, rows, strict=True)])
    share = masks.double().mean((1, 2))
    ratios = ratios_of(run, accumulation) * share + 1 - share
    statistics = {"pg_loss": of("policy_loss", 0), "ratio": ratios, "vf_loss": of("value_loss", 0)}
    statistics |= {"pg_clipfrac": of("policy_loss", 1) * share, "approxkl": of("policy_loss", 2) * share}
    for key, numbers in statistics.items():
        stored = torch.cat([update[f"{key}_stats"].flatten() for update in updates])
        close(numbers, stored, atol=LOSS, name=key)

    for part, prefix in (("policy", "lm_backbone."), ("critic", "critic.")):
        if gradient := under(arrays, f"first_gradient/{part}/"):
            close_weights(under(run.first_gradient, prefix), our_names(gradient), atol=GRADIENT)
    after = under(arrays, f"update{len(updates) - 1}/after/")
    close_weights(run.policy.state_dict(), our_names(under(after, "policy/")), atol=WEIGHT)
    close_weights(run.value.state_dict(), our_names(under(after, "critic/")), atol=WEIGHT)

    for i, (row, update) in enumerate(zip(run.metrics, updates, strict=True)):
        expected = {key.removeprefix("ppo/"): value for key, value, number in case["scalars"] if number == i + 1}
        masked = update["padding_mask"].sum(1).double().mean().item()
        metrics = {key: row[key] for key in DIRECT} | {
            "objective/entropy": row["objective/entropy"] - masked,
            "objective/score_total": row["objective/rlhf_reward"],
            "val/ratio_var": ratios[update_of == i].var().item(),  # [X34] of the means of micro-batches
        }
        if masked == 0:
            metrics |= {key: row[key] for key in ("policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg")}
        for key, value in metrics.items():
            assert value == pytest.approx(expected[key], abs=LOGPROB), key
        # [X34] The original counts end-of-text tokens before it truncates.
        assert row["val/num_eos_tokens"] == update["contain_eos_token"].sum()

    held_out, (_, table) = under(arrays, "evaluation0/"), run.calls["evaluate"][0][1]
    for key in ("score", "reference_score"):
        assert [row[f"{key}s"] for row in table] == pytest.approx(held_out[key].tolist(), abs=VALUE)
    words = [row[(row != EOS) & (row != PAD)].tolist() for row in held_out["postprocessed_response_token"]]
    assert [row["response"] for row in table] == golden_tokenizer().batch_decode(words)


DIRECT = (
    *("objective/kl", "objective/non_score_reward", "objective/scores", "loss/policy_avg", "loss/value_avg"),
    *("val/clipfrac_avg", "lr", "episode"),
)


@pytest.mark.parametrize("name", names_of("trl"))
def test_trl_run(name):
    """Two updates of TRL: metrics, and what the trained policy and critic say."""
    case, arrays = case_and_arrays(name)
    updates = [under(arrays, f"update{i}/") for i in range(case["updates"])]
    run = trl_policy_run(case, arrays)
    ratios = ratios_of(run, 1)
    for i, (row, update, expected) in enumerate(zip(run.metrics, updates, case["metrics"], strict=True)):
        share = (~update["padding_mask"]).double().mean().item()
        steps = len(ratios) // len(updates)
        metrics = {key: row[key] for key in (*DIRECT, "objective/entropy", "policy/clipfrac_avg")} | {
            "objective/rlhf_reward": row["objective/rlhf_reward"],
            "policy/approxkl_avg": row["policy/approxkl_avg"] * share,
            "val/ratio": row["val/ratio"] * share + 1 - share,
            "val/ratio_var": (ratios[i * steps : (i + 1) * steps] * share).var().item(),
        }
        for key, value in metrics.items():
            assert value == pytest.approx(expected[key], abs=LOGPROB), key
    after = (
        language_model(case, under(arrays, "after/policy/")),
        scalar_model(case, under(arrays, "after/value/")),
    )
    responses = updates[-1]["postprocessed_responses"]
    tokens, masks = torch.cat([updates[-1]["queries"], responses], dim=1), tldr_policy.response_masks(responses, PAD)
    with torch.no_grad():
        ours, theirs = (
            tldr_policy.ActorCritic(*models, case["output_rows"])(tokens, responses, PAD, 0.7)
            for models in ((run.policy, run.value), after)
        )
    close(ours[0][masks[0]], theirs[0][masks[0]], atol=LOGPROB)
    close(ours[2][masks[1]], theirs[2][masks[1]], atol=LOGPROB)


# ---- Negative controls: each deliberate mistake makes a test fail ----------------------------------------------

test_mistake_is_detected, test_rebuilt_functions_pass = mistakes.tests_of(globals())
