"""train_policy.py as a whole: a run against its replay from proven parts, and mistakes that the replay rejects.

The replay is the algorithm written out once more, in plain loops. What it takes from train_policy.py are functions
that the golden numbers prove (the forward pass, the sampler, truncation, whitening, GAE, the losses, Adam), and two
that tests of their own prove (noise and permutations).
"""

import itertools
import json
import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from mistakes import put, put_unchanged, titles
from processes import launch_together
from runs import metrics_of, only, policy_arguments, samples_of, world_arguments
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoTokenizer, GPT2LMHeadModel, PreTrainedTokenizerBase

from ppo_rlhf import sample, train_both, train_policy
from ppo_rlhf.lib import learning_curves, processes
from ppo_rlhf.lib.command_line import AdaptiveKLArgs, parse_args
from ppo_rlhf.lib.errors import InputError, NumericalError
from ppo_rlhf.tldr import posts
from ppo_rlhf.tldr.models import load_reward_model
from ppo_rlhf.train_policy import (
    AdamTensorFlowStyle,
    Args,
    PolicyWithValueHead,
    Scale,
    TaskArgs,
    compute_gae,
    draw_permutations,
    episode_noise,
    generate,
    has_stop,
    policy_loss,
    response_logprobs,
    truncate_at,
    value_loss,
    whiten,
)
from ppo_rlhf.worlds.tales import sentiment

UPDATES, BATCH, GROUPS, EPOCHS, MINIBATCHES = 3, 32, 2, 2, 2


def task_of(world: Path) -> TaskArgs:
    """Queries with padding between prefix and suffix, and responses some of which stop."""
    affixes = {"query_prefix": "Mara smiled.", "query_suffix": " Then"}
    return TaskArgs(
        query_dataset=f"{world}/stories.txt", query_length=24, truncate_after=4, temperature=0.8, **affixes
    )


# ---- The replay ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Left:
    """What a run leaves, or should. Golden numbers (test_ppo_steps) prove the metrics that a replay leaves out."""

    metrics: list[dict[str, float]]
    samples: list[dict]
    weights: dict[str, torch.Tensor]


def stories_of(world: Path) -> list[str]:
    return (world / "stories.txt").read_text().splitlines()


def trained_on(stories: list[str]) -> list[str]:
    """Without those that are held out: 49, 99, ..."""
    return [story for number, story in enumerate(stories) if number % 50 != 49]


def queries_in_order(stories: list[str], tokenizer: PreTrainedTokenizerBase, length: int = 24) -> Iterator[list[int]]:
    """The queries of a stage, from the first on, without end: whole sentences of stories, padded on the right."""
    stories = list(stories)
    random.Random(0).shuffle(stories)
    (stop,) = tokenizer.encode(".")
    for story in itertools.cycle(stories):
        tokens = tokenizer.encode(story)
        tokens = tokens[tokens.index(stop) + 1 :][:length]
        while tokens and tokens[-1] != stop:
            tokens.pop()
        if tokens:
            yield tokens + [len(tokenizer)] * (length - len(tokens))


def mean(numbers) -> float:
    return sum(float(number) for number in numbers) / len(numbers)


def replay(args: Args, world: Path) -> Left:
    """What a run with these arguments must leave, on one process or on many."""
    task, ppo = args.task, args.ppo
    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    pad, (stop,) = len(tokenizer), tokenizer.encode(".")
    prefix, suffix = tokenizer.encode(task.query_prefix), tokenizer.encode(task.query_suffix)
    context_length = len(prefix) + task.query_length + len(suffix)
    model, reference = (GPT2LMHeadModel.from_pretrained(world / "model", dtype=torch.float64) for _ in range(2))
    policy = PolicyWithValueHead(model, pad).double()
    reward_model = load_reward_model(Path(args.rewards.trained_model), torch.float64)
    parts = [{"params": policy.lm_backbone.parameters()}, {"params": policy.value_head.parameters()}]
    optimizer = AdamTensorFlowStyle(parts, lr=0.0)
    stream, kl_coef = queries_in_order(trained_on(stories_of(world)), tokenizer), args.rewards.kl_coef
    metrics, samples = [], []

    for update in range(UPDATES):
        queries = [next(stream) for _ in range(BATCH)]
        contexts = torch.tensor([prefix + query + suffix for query in queries])
        noise = episode_noise(args.seed, update, BATCH, task.response_length)
        with torch.no_grad():
            responses, _, _ = generate(model, contexts, noise, pad, pad, task.temperature)
            query_responses = torch.cat([contexts, responses], dim=1)
            logprobs, _, values = policy(query_responses, pad, context_length, task.temperature)
            ref_logprobs, _, _ = response_logprobs(
                reference, query_responses, pad, context_length, task.temperature, pad
            )
            truncated = truncate_at(responses, stop, task.truncate_after, pad)
            raw_scores = reward_model(torch.cat([torch.tensor(queries), truncated], dim=1), pad)
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
                            "returns/var": ((returns - returns.mean()) ** 2).mean(),
                            "val/advantage": advantages.mean(),
                            "val/advantage_var": ((advantages - advantages.mean()) ** 2).mean(),
                        }
                    )
                norms.append(math.sqrt(sum(float((p.grad**2).sum()) for p in policy.parameters())))
                for part, lr in zip(optimizer.param_groups, (ppo.lr, ppo.value_head_lr), strict=True):
                    part["lr"] = lr * (1 - update / UPDATES)
                optimizer.step()

        of_epochs = {name: mean([row[name] for row in stats]) for name in stats[0]}
        texts = posts.to_texts(tokenizer, truncated, pad)
        row = {
            "step": update,
            "objective/kl": mean(kl.sum(1)),
            "objective/kl_coef": kl_coef,
            "objective/score": mean(scores),
            "objective/scores": mean(scores),
            "objective/raw_score": mean(raw_scores),
            "objective/non_score_reward": -kl_coef * mean(kl.sum(1)),
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
            "ppo/gradient_norm": mean(norms),
            "ppo/lr": ppo.lr * (1 - update / UPDATES),
            "ppo/episode": (update + 1) * BATCH,
        }
        metrics.append(row)
        if update % args.log_interval == 0:
            for i in range(3):
                (query,) = posts.to_texts(tokenizer, torch.tensor(queries[i : i + 1]), pad)
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
    """Run train_policy.train in this process, without its picture."""
    folder.mkdir(exist_ok=True)
    patch.chdir(folder)
    patch.setattr(learning_curves, "draw_learning_curves", lambda *_: None)
    train_policy.train(args)
    return left_in(folder)


def check_same(left: Left, expected: Left) -> None:
    for rows, expected_rows in ((left.metrics, expected.metrics), (left.samples, expected.samples)):
        assert len(rows) == len(expected_rows)
        for row, expected_row in zip(rows, expected_rows, strict=True):
            assert set(row) >= set(expected_row)
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
        f"--ppo.value_head_lr 0.03 --ppo.cliprange 0.05 --ppo.cliprange_value 0.02 --ppo.gamma 0.99 "
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


# What a checkpoint may have to hold besides the weights.
HELD = {
    "groups of parameters": "--preset tales --ppo.value_head_lr 0.01 --frozen_bfloat16 --trace_interval 1",
    "low precision": "--preset reviews --dtype bfloat16 --gradient_checkpointing",
    "the scale of a function": "--preset tales --rewards.function test_train_policy:length_of "
    "--rewards.normalize_samples 16 --task.truncate_text Mara",
}


@pytest.mark.parametrize("words", HELD.values(), ids=HELD)
def test_a_run_that_failed_goes_on_as_if_nothing_had_happened(words, tiny_world, tiny_reward, tmp_path, monkeypatch):
    """Also while somebody keeps the exception, and with it the run that failed, but not its lock."""
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
    with pytest.raises(MemoryError) as kept:
        run_in(tmp_path / "failed", args, monkeypatch)
    monkeypatch.setattr(train_policy, "ppo_update", ppo_update)
    train_policy.train(parse_args(train_policy.PRESETS, ["--resume", str(only(tmp_path, "failed/runs/*"))]))
    left = left_in(tmp_path / "failed")
    assert kept and len(whole.metrics) == 3 and left.metrics == whole.metrics and left.samples == whole.samples
    assert all(torch.equal(weight, left.weights[name]) for name, weight in whole.weights.items())


# ---- Negative controls: the replay rejects each of these mistakes ----------------------------------------------


FILES = ("train_policy.py",)
WHERE = ("train", "group_advantages", "draw_permutations", "ppo_update", "ppo_sizes", "learning_rate", "sample_rows")
MISTAKES = titles("train_policy.py", *WHERE)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_detected(mistake, args, expected, tmp_path, monkeypatch):
    put(mistake, FILES, monkeypatch)
    with pytest.raises((AssertionError, NumericalError)):
        check_same(run_in(tmp_path, args, monkeypatch), expected)


def test_a_function_without_a_mistake_passes(args, expected, tmp_path, monkeypatch):
    put_unchanged(MISTAKES, FILES, monkeypatch)
    check_same(run_in(tmp_path, args, monkeypatch), expected)


# ---- What stops a run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "rounding", "too_far"), [("float32", 1e-5, 2e-3), ("bfloat16", 0.05, 0.2)])
def test_a_ratio_that_does_not_begin_at_one_is_an_error(dtype, rounding, too_far):
    processes.check_update({"ppo/val/first_ratio_gap": rounding}, 7, dtype)
    with pytest.raises(NumericalError):
        processes.check_update({"ppo/val/first_ratio_gap": too_far}, 7, dtype)


def test_a_sampler_that_disagrees_with_training_stops_the_run(args, tmp_path, monkeypatch):
    right = train_policy.generate

    def shifted(*arguments, **settings):
        responses, logprobs, hidden_states = right(*arguments, **settings)
        return responses, logprobs + 0.01, hidden_states

    monkeypatch.setattr(train_policy, "generate", shifted)
    with pytest.raises(NumericalError, match=r"the ratio is off 1 by 0\.01 on the first pass of update 0"):
        run_in(tmp_path, args, monkeypatch)
    assert not (tmp_path / "models").exists() and not list(tmp_path.glob("runs/*/checkpoints"))


DIFFERENT_COEFFICIENTS = """
import os
from ppo_rlhf import train_policy
from ppo_rlhf.lib import errors, processes
from ppo_rlhf.lib import command_line as cli

right = train_policy.AdaptiveKLController.update

def update(self, kl, episodes):
    right(self, kl, episodes)
    self.value *= 1 + 2**-50 * int(os.environ["RANK"])

train_policy.AdaptiveKLController.update = update
errors.run_script(lambda: train_policy.train(cli.parse_args(train_policy.PRESETS)))
"""


def test_what_is_wrong_on_one_process_stops_both(tiny_world, tiny_reward, tmp_path):
    """After the first update, the coefficients differ. test_traces.py has a function that fails on one process."""
    (tmp_path / "driver.py").write_text(DIFFERENT_COEFFICIENTS)
    words = [*world_arguments(tiny_world, tiny_reward), *policy_arguments()]
    first, second = launch_together(2, tmp_path / "driver.py", *words, folder=tmp_path)
    assert (first.status, second.status) == (2, 2), first.stderr + second.stderr
    assert (second.stdout, second.stderr) == ("", first.stderr)
    (line,) = first.stderr.splitlines()
    assert line.startswith("error: objective/kl_coef differs between processes: [0.1")
    assert len(metrics_of(only(tmp_path, "runs/*"))) == 1 and not (tmp_path / "models").exists()


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
    del SEEN[0]  # before the run, the function is tried out
    center, deviation = 0.0, 1.0
    if samples:
        of_language_model = SEEN.pop(0)
        center, deviation = mean(of_language_model), statistics.pstdev(of_language_model)
        assert len(of_language_model) == samples and deviation > 7
    for row, scores in zip(metrics, map(mean, SEEN), strict=True):
        assert row["objective/function_score"] == pytest.approx(scores, rel=1e-6)
        assert row["objective/score"] == pytest.approx((scores - center) / deviation, rel=1e-6, abs=1e-5)


@pytest.mark.parametrize(("scores", "mean"), [([], 0.0), ([0.1] * 3, 0.1)])
def test_a_scale_needs_scores_that_differ(scores, mean):
    """By more than rounding: the mean of three times 0.1 is not quite 0.1."""
    scale = Scale()
    scale.fit(torch.tensor(scores, dtype=torch.float64))
    assert (scale.mean, scale.std) == (pytest.approx(mean), 1.0)


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
    found = train_policy.with_newest_reward_model(args)
    assert found.rewards.trained_model == "models/other__sentiment__2__100/reward"
    resumed = replace(args, resume="runs/a")
    assert train_policy.with_newest_reward_model(resumed) is resumed
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(processes, "broadcast_object_list", lambda objects: ["models/of the first/reward"])
    assert train_policy.with_newest_reward_model(args).rewards.trained_model == "models/of the first/reward"


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


# ---- Reading what a policy writes: sample.py -------------------------------------------------------------------


def test_changes_are_paired():
    """Differences 1 and 2: mean 1.5, deviation sqrt(0.5), standard error 0.5."""
    shared = {"query": "q", "base": "a A", "policy": "a b"}
    rows = [shared | {"base score": 1.0, "policy score": 2.0}, shared | {"base score": 3.0, "policy score": 5.0}]
    score, distinct = sample.changes(rows)
    assert list(score.values()) == ["score", 2.0, 3.5, 1.5, pytest.approx(1.96 * 0.5)]
    assert list(distinct.values()) == ["distinct words", 0.5, 1.0, 0.5, 0.0]
    assert math.isnan(sample.changes(rows[:1])[0]["± 95 %"])  # one difference has no deviation


def test_sample_continues_held_out_queries_as_training_does(finished, tiny_world, tiny_reward):
    """At the task's temperature, up to the stop token, with both models, their scores and the KL."""
    folder = only(finished, "models/*/policy")
    comparison = sample.Comparison(sample.Args(policy=str(folder), seed=4))
    task, tokenizer = task_of(tiny_world), AutoTokenizer.from_pretrained(tiny_world / "model")
    pad, (stop,) = len(tokenizer), tokenizer.encode(".")
    stream = queries_in_order(stories_of(tiny_world)[49::50], tokenizer)
    queries = [next(stream) for _ in range(5)]
    prefix, suffix = tokenizer.encode(task.query_prefix), tokenizer.encode(task.query_suffix)
    contexts = torch.tensor([prefix + query + suffix for query in queries])  # (5, context_length)
    key = train_policy.keyed_generator(4, "sample", 0)
    noise = torch.rand(5, task.response_length, generator=key, dtype=torch.float64)
    reward_model = load_reward_model(tiny_reward, torch.float32)
    base, policy = (GPT2LMHeadModel.from_pretrained(path) for path in (tiny_world / "model", folder))

    expected: dict[str, list] = {"query": posts.to_texts(tokenizer, torch.tensor(queries), pad)}
    for name, model in (("base", base), ("policy", policy)):
        responses, _, _ = generate(model, contexts, noise, pad, pad, task.temperature)
        cut = truncate_at(responses, stop, task.truncate_after, pad)
        expected[name] = posts.to_texts(tokenizer, cut, pad)
        expected[f"{name} score"] = reward_model(torch.cat([torch.tensor(queries), cut], 1), pad).tolist()
    tokens = torch.cat([contexts, responses], 1)  # the policy's
    under_base, own = (
        response_logprobs(reader, tokens, pad, contexts.shape[1], task.temperature, pad)[0]
        for reader in (base, policy)
    )
    expected["kl"] = (own - under_base).sum(1).tolist()
    assert (cut == pad).any()

    rows = comparison.rows(comparison.queries(5))
    for name, values in expected.items():
        of_rows = [row[name] for row in rows]
        assert of_rows == (values if isinstance(values[0], str) else pytest.approx(values, rel=1e-4, abs=1e-5)), name


def test_each_part_of_many_queries_has_sampling_noise_of_its_own(finished, monkeypatch):
    """The same query six times, two at a time: another text for each, and the first two as if they were alone."""
    monkeypatch.setattr(sample, "AT_A_TIME", 2)
    comparison = sample.Comparison(
        sample.Args(policy=str(only(finished, "models/*/policy")), seed=4, temperature=3.0)
    )
    queries = comparison.queries(1) * 6
    rows = comparison.rows(queries)
    assert len({row["policy"] for row in rows}) == 6 and rows[:2] == comparison.rows(queries[:2])
    assert rows[2:4] == comparison.rows(queries[:2], 1)
