"""train_policy.py as a whole: a run against its replay from proven parts, and mistakes that the replay rejects.

The replay is the algorithm written out once more, in plain loops. What it takes from train_policy.py are functions
that the golden numbers prove (the forward pass, the sampler, truncation, whitening, GAE, the losses, Adam), and two
that tests of their own prove (noise and permutations).
"""

import csv
import json
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from mistakes import put, put_unchanged, titles
from replays import RewardModel, mean, queries_in_order, stories_of, task_of, to_texts, trained_on
from runs import meta_of, metrics_of, only, samples_of
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoTokenizer, GPT2LMHeadModel

from ppo_rlhf import train_both, train_policy
from ppo_rlhf.train_policy import (
    AdamTensorFlowStyle,
    AdaptiveKLArgs,
    Args,
    InputError,
    PolicyWithValueHead,
    compute_gae,
    draw_permutations,
    episode_noise,
    generate,
    has_stop,
    parse_args,
    policy_loss,
    response_logprobs,
    truncate_at,
    value_loss,
    whiten,
)
from ppo_rlhf.worlds.tales import sentiment

UPDATES, BATCH, GROUPS, EPOCHS, MINIBATCHES = 3, 32, 2, 2, 2


# ---- The replay ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Left:
    """What a run leaves, or should."""

    metrics: list[dict[str, float]]
    samples: list[dict]
    weights: dict[str, torch.Tensor]


def replay(args: Args, world: Path) -> Left:
    """What a run with these arguments must leave, on one process or on many."""
    task, ppo = args.task, args.ppo
    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    pad, (stop,) = len(tokenizer), tokenizer.encode(".")
    prefix, suffix = tokenizer.encode(task.query_prefix), tokenizer.encode(task.query_suffix)
    context_length = len(prefix) + task.query_length + len(suffix)
    model, reference = (GPT2LMHeadModel.from_pretrained(world / "model", dtype=torch.float64) for _ in range(2))
    policy = PolicyWithValueHead(model, pad).double()
    reward_model = RewardModel(Path(args.rewards.trained_model))
    parts = [{"params": policy.lm_backbone.parameters()}, {"params": policy.value_head.parameters()}]
    optimizer = AdamTensorFlowStyle(parts, lr=0.0)
    stream, kl_coef = queries_in_order(trained_on(stories_of(world)), tokenizer), args.rewards.kl_coef
    metrics, samples = [], []

    for update in range(UPDATES):
        queries = [next(stream) for _ in range(BATCH)]
        contexts = torch.tensor([prefix + query + suffix for query in queries])
        noise = episode_noise(args.seed, update, BATCH, task.response_length)
        with torch.no_grad():
            responses, _ = generate(model, contexts, noise, pad, pad, task.temperature)
            query_responses = torch.cat([contexts, responses], dim=1)
            logprobs, _, values = policy(query_responses, pad, context_length, task.temperature)
            ref_logprobs, _, _ = response_logprobs(
                reference, query_responses, pad, context_length, task.temperature, pad
            )
            truncated = truncate_at(responses, stop, task.truncate_after, pad)
            scored = torch.cat([torch.tensor(queries), truncated], dim=1).tolist()
            scores = [reward_model.score([token for token in row if token != pad]) for row in scored]
            raw_scores = torch.tensor(scores, dtype=torch.float64)
        stopped = has_stop(responses, stop, task.truncate_after)
        scores = torch.where(stopped, raw_scores, task.penalty_reward_value)
        kl = logprobs - ref_logprobs
        rewards = -kl_coef * kl
        rewards[:, -1] += scores

        stats: list[dict] = []
        norms: list[float] = []
        ratios: list[torch.Tensor] = []
        group_batch, group_minibatch = BATCH // GROUPS, BATCH // GROUPS // MINIBATCHES
        for epoch_order in draw_permutations(args.seed, update, EPOCHS, range(GROUPS), group_batch):
            for minibatch in range(MINIBATCHES):
                optimizer.zero_grad()
                for group in range(GROUPS):
                    order = epoch_order[group][minibatch * group_minibatch : (minibatch + 1) * group_minibatch]
                    inds = group * group_batch + order
                    advantages, returns = compute_gae(
                        whiten(rewards[inds], keep_mean=True), values[inds], ppo.gamma, ppo.lam
                    )
                    advantages = whiten(advantages, keep_mean=False)
                    new_logprobs, entropies, new_values = policy(
                        query_responses[inds], pad, context_length, task.temperature
                    )
                    pg_loss, pg_clipfrac, approxkl = policy_loss(
                        new_logprobs, logprobs[inds], advantages, ppo.cliprange
                    )
                    vf_loss, vf_clipfrac = value_loss(new_values, values[inds], returns, ppo.cliprange_value)
                    loss = pg_loss + ppo.vf_coef * vf_loss
                    (loss / GROUPS).backward()
                    ratios.append((new_logprobs - logprobs[inds]).detach().exp())
                    stats.append(
                        {
                            "loss/policy": pg_loss.detach(),
                            "loss/value": vf_loss.detach(),
                            "loss/total": loss.detach(),
                            "policy/approxkl": approxkl,
                            "policy/clipfrac": pg_clipfrac,
                            "policy/entropy": entropies.mean(),
                            "val/clipfrac": vf_clipfrac,
                            "returns/mean": returns.mean(),
                            "returns/var": ((returns - returns.mean()) ** 2).mean(),
                            "val/mean": values[inds].mean(),
                            "val/var": ((values[inds] - values[inds].mean()) ** 2).mean(),
                            "val/vpred": new_values.detach().mean(),
                            "val/error": ((new_values.detach() - returns) ** 2).mean(),
                            "val/advantage": advantages.mean(),
                            "val/advantage_var": ((advantages - advantages.mean()) ** 2).mean(),
                        }
                    )
                norms.append(math.sqrt(sum(float((p.grad**2).sum()) for p in policy.parameters())))
                for part, lr in zip(optimizer.param_groups, (ppo.lr, ppo.value_head_lr), strict=True):
                    part["lr"] = lr * (1 - update / UPDATES)
                optimizer.step()

        of_epochs = {name: mean([row[name] for row in stats]) for name in stats[0]}
        texts = to_texts(tokenizer, truncated)
        row = {
            "step": update,
            "objective/kl": mean(kl.sum(1)),
            "objective/kl_coef": kl_coef,
            "objective/score": mean(scores),
            "objective/scores": mean(scores),
            "objective/raw_score": mean(raw_scores),
            "objective/non_score_reward": -kl_coef * mean(kl.sum(1)),
            "objective/score_total": mean(scores) - kl_coef * mean(kl.sum(1)),
            "objective/entropy": -mean(logprobs.sum(1)),
            "objective/stopped": mean(stopped),
            "objective/response_length": mean((truncated != pad).sum(1)),
            "objective/sampler_gap": 0.0,
            "objective/gold_scores": mean(sentiment.gold_scores([], texts)),
            **{f"ppo/{name}": number for name, number in of_epochs.items()},
            **{
                f"ppo/{name}_avg": of_epochs[name]
                for name in (
                    "loss/policy",
                    "loss/value",
                    "policy/entropy",
                    "policy/approxkl",
                    "policy/clipfrac",
                    "val/clipfrac",
                )
            },
            "ppo/val/ratio": float(torch.stack(ratios).mean()),
            "ppo/val/ratio_var": float(torch.stack(ratios).var(unbiased=False)),
            "ppo/val/num_eos_tokens": responses.flatten().tolist().count(tokenizer.eos_token_id),
            "ppo/val/first_ratio_gap": float(((torch.stack(ratios[:GROUPS]) - 1) ** 2).mean().sqrt()),
            "ppo/val/var_explained": 1 - of_epochs["val/error"] / of_epochs["returns/var"],
            "ppo/gradient_norm": mean(norms),
            "ppo/lr": ppo.lr * (1 - update / UPDATES),
            "ppo/global_step": update,
            "ppo/episode": (update + 1) * BATCH,
            "elapsed/updates": update + 1,
            "elapsed/episodes": (update + 1) * BATCH,
            "elapsed/steps/serial": (update + 1) * task.response_length,
            "elapsed/steps/total": (update + 1) * BATCH * task.response_length,
        }
        metrics.append(row)
        if update % args.log_interval == 0:
            for i in range(3):
                (query,) = to_texts(tokenizer, torch.tensor(queries[i : i + 1]))
                numbers = {"score": float(scores[i]), "kl": float(kl[i].sum())}
                total = {"score - kl_coef * kl": numbers["score"] - kl_coef * numbers["kl"]}
                samples.append({"step": update, "query": query, "response": texts[i]} | numbers | total)
        error = min(max(row["objective/kl"] / args.rewards.adaptive_kl.target - 1, -0.2), 0.2)
        kl_coef *= 1 + error * BATCH / args.rewards.adaptive_kl.horizon
    weights = {f"lm_backbone.{name}": tensor for name, tensor in model.state_dict().items()}
    weights |= {f"value_head.{name}": tensor for name, tensor in policy.value_head.state_dict().items()}
    return Left(metrics, samples, weights)


# ---- A run is its replay ---------------------------------------------------------------------------------------


def left_in(folder: Path) -> Left:
    this_run, weights = only(folder, "runs/*"), {}
    for file, prefix in (("model", "lm_backbone"), ("value_head", "value_head")):
        tensors = load_file(only(folder, f"models/*/policy/{file}.safetensors"))
        weights |= {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}
    return Left(metrics_of(this_run), samples_of(this_run), weights)


def run_in(folder: Path, args: Args, patch: pytest.MonkeyPatch) -> Left:
    """Run train_policy.train in this process."""
    folder.mkdir(exist_ok=True)
    patch.chdir(folder)
    train_policy.train(args)
    return left_in(folder)


def check_same(left: Left, expected: Left) -> None:
    for rows, expected_rows in ((left.metrics, expected.metrics), (left.samples, expected.samples)):
        assert len(rows) == len(expected_rows)
        for row, expected_row in zip(rows, expected_rows, strict=True):
            assert set(row) == set(expected_row)
            for name, value in expected_row.items():
                near = value if isinstance(value, str) else pytest.approx(value, rel=1e-9, abs=1e-12)
                assert row[name] == near, f"{name} in step {row['step']}"
    assert set(left.weights) == set(expected.weights) - {"lm_backbone.lm_head.weight"}  # tied to the embedding
    for name, weight in left.weights.items():
        assert_close(weight, expected.weights[name], rtol=1e-9, atol=1e-12)


@pytest.fixture(scope="module")
def args(tiny_world, tiny_reward) -> Args:
    """Three updates, the last of which is only half asked for.

    With a target near the KL of update 1, so that the next coefficient depends on that KL. That KL does not depend on
    the target: the KL of update 0 is 0, and the change after it is the largest there is.
    """
    words = (
        f"--seed 2 --base_model {tiny_world}/model --dtype float64 --log_interval 2 --save_interval 0 "
        f"--rewards.trained_model {tiny_reward} --rewards.monitor ppo_rlhf.worlds.tales:sentiment.gold_scores "
        f"--rewards.adaptive_kl.horizon 100 --ppo.total_episodes {UPDATES * BATCH - 16} --ppo.batch_size {BATCH} "
        f"--ppo.nminibatches {MINIBATCHES} --ppo.noptepochs {EPOCHS} --ppo.whiten_groups {GROUPS} --ppo.lr 0.01 "
        f"--ppo.value_head_lr 0.03 --ppo.cliprange 0.05 --ppo.cliprange_value 0.03 --ppo.gamma 0.99 "
        f"--ppo.local_micro_batch_size 8"
    )
    args = replace(parse_args(train_policy.PRESETS, words.split()), task=task_of(tiny_world))
    target = 1.1 * replay(args, tiny_world).metrics[1]["objective/kl"]
    return replace(args, rewards=replace(args.rewards, adaptive_kl=AdaptiveKLArgs(target=target, horizon=100)))


@pytest.fixture(scope="module")
def expected(args, tiny_world) -> Left:
    return replay(args, tiny_world)


@pytest.fixture(scope="module")
def finished(args, tmp_path_factory) -> Path:
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("policy")
    with pytest.MonkeyPatch.context() as patch:
        run_in(folder, args, patch)
    return folder


def test_a_policy_run_is_its_replay(finished, expected):
    check_same(left_in(finished), expected)
    objectives = {name.removeprefix("objective/") for name in expected.metrics[0] if "objective/" in name}
    assert objectives == train_policy.OBJECTIVES - {"function_score"} | {"gold_scores"}
    results = meta_of(only(finished, "runs/*"))["results"]
    for name in ("score", "kl", "kl_coef"):  # of the last ten updates, if there are so many
        value = mean([row[f"objective/{name}"] for row in expected.metrics])
        assert results[f"last_{name}"] == pytest.approx(value, rel=1e-9)


# What a checkpoint may have to hold besides the weights.
HELD = {
    "groups of parameters": "--preset tales --ppo.value_head_lr 0.01 --frozen_bfloat16 --trace_interval 1",
    "low precision": "--preset reviews --dtype bfloat16 --gradient_checkpointing",
    "the scale of a function": "--preset tales --rewards.function test_train_policy:length_of "
    "--rewards.normalize_samples 16 --task.truncate_text Mara",
}


@pytest.mark.parametrize("words", HELD.values(), ids=HELD)
def test_a_run_that_failed_goes_on_as_if_nothing_had_happened(words, tiny_world, tiny_reward, tmp_path, monkeypatch):
    """Only the time continues from what meta.json says."""
    scorer = "" if "function" in words else f"--rewards.trained_model {tiny_reward}"
    words += f" {scorer} --base_model {tiny_world}/model --task.query_dataset {tiny_world}/stories.txt"
    words += " --task.query_length 16 --task.response_length 12 --task.truncate_after 0 --ppo.batch_size 16"
    words += " --ppo.whiten_groups 1 --ppo.total_episodes 48 --ppo.local_micro_batch_size 16 --save_interval 1"
    args = parse_args(train_policy.PRESETS, words.split())
    whole = run_in(tmp_path / "whole", args, monkeypatch)
    ppo_update, updates = train_policy.ppo_update, iter(range(3))

    def fail_in_the_third(*arguments, **named):
        if next(updates) == 2:
            raise MemoryError
        return ppo_update(*arguments, **named)

    monkeypatch.setattr(train_policy, "ppo_update", fail_in_the_third)
    with pytest.raises(MemoryError):
        run_in(tmp_path / "failed", args, monkeypatch)
    monkeypatch.setattr(train_policy, "ppo_update", ppo_update)
    failed = only(tmp_path, "failed/runs/*")
    (failed / "meta.json").write_text(json.dumps(meta_of(failed) | {"wall_time": 1000.0}))
    train_policy.train(parse_args(train_policy.PRESETS, ["--resume", str(failed)]))
    left = left_in(tmp_path / "failed")
    assert len(whole.metrics) == 3 and left.metrics == whole.metrics and left.samples == whole.samples
    with (failed / "metrics.csv").open(newline="") as file:
        times = [float(row["elapsed/time"]) for row in csv.DictReader(file)]
    assert times[1] < 900 and 1000 < times[2] <= meta_of(failed)["wall_time"] + 0.1
    assert all(torch.equal(weight, left.weights[name]) for name, weight in whole.weights.items())


# ---- Negative controls: the replay rejects each of these mistakes ----------------------------------------------


FILES = ("train_policy.py",)
WHERE = ("train", "group_advantages", "compute_gae", "draw_permutations", "ppo_update", "ppo_sizes", "sample_rows")
MISTAKES = titles("train_policy.py", *WHERE)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_detected(mistake, args, expected, tmp_path, monkeypatch):
    put(mistake, FILES, monkeypatch)
    with pytest.raises((AssertionError, InputError)):
        check_same(run_in(tmp_path, args, monkeypatch), expected)


def test_a_function_without_a_mistake_passes(args, expected, tmp_path, monkeypatch):
    put_unchanged(MISTAKES, FILES, monkeypatch)
    check_same(run_in(tmp_path, args, monkeypatch), expected)


# ---- What stops a run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "rounding", "too_far"), [("float32", 1e-5, 2e-3), ("bfloat16", 0.05, 0.2)])
def test_a_ratio_that_does_not_begin_at_one_is_an_error(dtype, rounding, too_far):
    metrics = dict.fromkeys(("ppo/val/first_ratio_gap", "objective/sampler_gap"), rounding)
    train_policy.check_update(metrics, 7, dtype)
    for name in metrics:
        with pytest.raises(InputError, match=f"{name} is {too_far} in update 7"):
            train_policy.check_update(metrics | {name: too_far}, 7, dtype)


def test_a_sampler_that_disagrees_with_training_stops_the_run(args, tmp_path, monkeypatch):
    right = train_policy.generate

    def shifted(*arguments, **settings):
        responses, logprobs = right(*arguments, **settings)
        return responses, logprobs + 0.01

    monkeypatch.setattr(train_policy, "generate", shifted)
    with pytest.raises(InputError, match=r"objective/sampler_gap is 0\.01 in update 0"):
        run_in(tmp_path, args, monkeypatch)
    assert not (tmp_path / "models").exists() and not list(tmp_path.glob("runs/*/checkpoints"))


# ---- The scale of a function -----------------------------------------------------------------------------------


SEEN: list[list[float]] = []  # what the function has returned


def length_of(queries: list[str], responses: list[str]) -> list[float]:
    SEEN.append([1000.0 + 7 * len(response) for response in responses])
    return SEEN[-1]


@pytest.mark.parametrize("samples", [24, 0])
def test_scores_of_a_function_are_put_on_the_scale_of_a_reward_model(args, samples, tmp_path, monkeypatch):
    """On texts of the language model they have mean 0 and deviation 1. Without samples they stay as they are."""
    rewards = replace(
        args.rewards, trained_model="", function="test_train_policy:length_of", monitor="", normalize_samples=samples
    )
    task = replace(args.task, truncate_text=None)  # so that no penalty takes the place of a score
    SEEN.clear()
    metrics = run_in(tmp_path, replace(args, rewards=rewards, task=task), monkeypatch).metrics
    center, deviation = 0.0, 1.0
    if samples:
        of_language_model = SEEN.pop(0)
        center, deviation = mean(of_language_model), statistics.pstdev(of_language_model)
        assert len(of_language_model) == samples and deviation > 7
    for row, scores in zip(metrics, map(mean, SEEN), strict=True):
        assert row["objective/function_score"] == pytest.approx(scores, rel=1e-6)
        assert row["objective/score"] == pytest.approx((scores - center) / deviation, rel=1e-6, abs=1e-5)


def constant(queries: list[str], responses: list[str]) -> list[float]:
    return [0.1] * len(responses)


def test_a_function_without_a_spread_keeps_its_scale(args, tmp_path, monkeypatch):
    """Apart from rounding: the mean of 24 times 0.1 is not quite 0.1."""
    rewards = replace(args.rewards, trained_model="", function="test_train_policy:constant", normalize_samples=24)
    metrics = run_in(tmp_path, replace(args, rewards=rewards), monkeypatch).metrics
    assert [row["objective/raw_score"] for row in metrics] == pytest.approx([0.0] * UPDATES, abs=1e-12)


# ---- One source of scores, one task ----------------------------------------------------------------------------


def test_a_policy_finds_the_newest_reward_model(in_a_fresh_folder, monkeypatch):
    """Of its preset, and of chapter 1; on all processes that of the first. A resumed run keeps its own."""
    args = replace(train_policy.PRESETS["sentiment"], base_model="nobody/none")
    names = ["train_reward__sentiment__1__20", "other__sentiment__2__100", "my__sentiment__1__tales__1__998"]
    names += ["tldr_reward__sentiment__1__997"]
    for name in names:
        info = {"kind": "reward model", "base_model": "", "vocab_size": 1}
        info["task"] = {"comparisons": ""} if name.startswith("tldr") else {"query_dataset": ""}
        folder = Path("models", name, "reward")
        folder.mkdir(parents=True)
        (folder / "ppo_rlhf.json").write_text(json.dumps(info))
    Path("models/train_reward__sentiment__1__1000/reward").mkdir(parents=True)  # not saved yet
    accelerator = Accelerator(cpu=True)
    found = train_policy.with_newest_reward_model(args, accelerator)
    assert found.rewards.trained_model == "models/other__sentiment__2__100/reward"
    resumed = replace(args, resume="runs/a")
    assert train_policy.with_newest_reward_model(resumed, accelerator) is resumed
    monkeypatch.setattr(train_policy, "broadcast_object_list", lambda objects: ["models/of the first/reward"])
    found = train_policy.with_newest_reward_model(args, accelerator)
    assert found.rewards.trained_model == "models/of the first/reward"


@pytest.mark.parametrize(
    "words",
    [
        ["--reward.task.temperature", "1"],  # all stages share it
        ["--policy.no-trust-remote-code=1"],
        ["--policy.rewards.trained-model", "x"],  # the reward model is trained here
    ],
)
def test_a_joint_run_refuses_what_is_not_a_stage_s_own(words):
    with pytest.raises(InputError, match=words[0].partition("=")[0]):
        train_both.parse(["--preset", "tales", *words])
