"""train_policy.py as a whole: a run against its replay from proven parts, and mistakes that the replay rejects.

The replay is the algorithm written out once more, in plain loops. What it takes from train_policy.py are functions
that the golden numbers prove (the forward pass, the sampler, whitening, GAE, the losses, Adam) and two that tests of
their own prove (noise and permutations).
"""

import contextlib
import csv
import dataclasses
import io
import itertools
import json
import math
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from mistakes import put, put_unchanged, titles
from processes import launch_together
from runs import both_arguments, metrics_of, only, policy_arguments, samples_of, world_arguments
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoTokenizer, GPT2LMHeadModel, PreTrainedTokenizerBase

from ppo_rlhf import sample, train_both, train_policy, train_reward
from ppo_rlhf.lib import errors, learning_curves, processes, reward_functions, run
from ppo_rlhf.lib.command_line import AdaptiveKLArgs, parse_args
from ppo_rlhf.lib.errors import InputError, NumericalError
from ppo_rlhf.tldr.models import load_reward_model
from ppo_rlhf.train_policy import (
    AdamTensorFlowStyle,
    Args,
    PolicyWithValueHead,
    PpoArgs,
    RewardsArgs,
    Scale,
    TaskArgs,
    compute_gae,
    draw_permutations,
    episode_noise,
    generate,
    policy_loss,
    response_logprobs,
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


def policy_args(world: Path, reward: Path) -> Args:
    """Three updates, the last of which is only half asked for."""
    return Args(
        seed=2,
        base_model=f"{world}/model",
        dtype="float64",
        log_interval=2,
        save_interval=0,
        task=task_of(world),
        rewards=RewardsArgs(
            trained_model=str(reward),
            monitor="ppo_rlhf.worlds.tales:sentiment.gold_scores",
            adaptive_kl=AdaptiveKLArgs(target=6.0, horizon=100),
        ),
        ppo=PpoArgs(
            total_episodes=UPDATES * BATCH - 16,
            batch_size=BATCH,
            nminibatches=MINIBATCHES,
            noptepochs=EPOCHS,
            whiten_groups=GROUPS,
            lr=1e-2,
            value_head_lr=3e-2,
            cliprange=0.05,
            cliprange_value=0.05,
            gamma=0.99,
        ),
    )


# ---- The replay ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Left:
    """What a run leaves, or should."""

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


def cut_after_stop(response: list[int], stop: int, after: int, pad: int) -> tuple[list[int], bool]:
    """A response with padding after its first stop token at index >= after, and whether it has one."""
    for i in range(after, len(response)):
        if response[i] == stop:
            return response[: i + 1] + [pad] * (len(response) - i - 1), True
    return response, False


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
            cut = [cut_after_stop(response, stop, task.truncate_after, pad) for response in responses.tolist()]
            scored = [query + response for query, (response, _) in zip(queries, cut, strict=True)]
            raw_scores = reward_model(torch.tensor(scored), pad)
        stopped = [has_stopped for _, has_stopped in cut]
        scores = raw_scores.clone()
        for i in range(BATCH):
            if not stopped[i]:
                scores[i] = task.penalty_reward_value
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
                            "val/vpred": new_values.detach().mean(),
                            "val/error": ((new_values.detach() - returns) ** 2).mean(),
                            "val/mean": values[inds].mean(),
                            "val/var": ((values[inds] - values[inds].mean()) ** 2).mean(),
                            "val/advantage": advantages.mean(),
                            "val/advantage_var": ((advantages - advantages.mean()) ** 2).mean(),
                            "returns/mean": returns.mean(),
                            "returns/var": ((returns - returns.mean()) ** 2).mean(),
                        }
                    )
                norms.append(math.sqrt(sum(float((p.grad**2).sum()) for p in policy.parameters())))
                for part, lr in zip(optimizer.param_groups, (ppo.lr, ppo.value_head_lr), strict=True):
                    part["lr"] = lr * (1 - update / UPDATES)
                optimizer.step()

        of_epochs = {name: mean([row[name] for row in stats]) for name in stats[0]}
        texts = [tokenizer.decode([token for token in response if token != pad]) for response, _ in cut]
        row = {
            "step": update,
            "objective/kl": mean(kl.sum(1)),
            "objective/kl_coef": kl_coef,
            "objective/entropy": mean(-logprobs.sum(1)),
            "objective/score": mean(scores),
            "objective/scores": mean(scores),
            "objective/raw_score": mean(raw_scores),
            "objective/non_score_reward": -kl_coef * mean(kl.sum(1)),
            "objective/score_total": mean(scores) - kl_coef * mean(kl.sum(1)),
            "objective/stopped": mean(stopped),
            "objective/response_length": mean([sum(token != pad for token in response) for response, _ in cut]),
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
            "ppo/val/var_explained": 1 - of_epochs["val/error"] / of_epochs["returns/var"],
            "ppo/val/num_eos_tokens": responses.flatten().tolist().count(tokenizer.eos_token_id),
            "ppo/val/first_ratio_gap": float(((torch.stack(ratios[:GROUPS]) - 1) ** 2).mean().sqrt()),
            "ppo/gradient_norm": mean(norms),
            "ppo/lr": ppo.lr * (1 - update / UPDATES),
            "ppo/global_step": update,
            "ppo/episode": (update + 1) * BATCH,
            "elapsed/episodes": (update + 1) * BATCH,
            "elapsed/updates": update + 1,
            "elapsed/steps/serial": (update + 1) * task.response_length,
            "elapsed/steps/total": (update + 1) * task.response_length * BATCH,
        }
        metrics.append(row)
        if update % args.log_interval == 0:
            for i in range(3):
                query = tokenizer.decode([token for token in queries[i] if token != pad])
                numbers = {"score": float(scores[i]), "kl": float(kl[i].sum())}
                total = {"score - kl_coef * kl": numbers["score"] - kl_coef * numbers["kl"]}
                samples.append({"step": update, "query": query, "response": texts[i]} | numbers | total)
        error = min(max(row["objective/kl"] / args.rewards.adaptive_kl.target - 1, -0.2), 0.2)
        kl_coef *= 1 + error * BATCH / args.rewards.adaptive_kl.horizon
    weights = {f"lm_backbone.{name}": tensor for name, tensor in model.state_dict().items()}
    weights |= {f"value_head.{name}": tensor for name, tensor in policy.value_head.state_dict().items()}
    return Left(metrics, samples, weights)


# ---- A run is its replay ---------------------------------------------------------------------------------------


def run_in(folder: Path, args: Args, patch: pytest.MonkeyPatch) -> Left:
    """Run train_policy.train in this process, without its picture."""
    patch.chdir(folder)
    patch.setattr(learning_curves, "draw_learning_curves", lambda *_: None)
    policy_folder = train_policy.train(args)
    backbone, head = (load_file(policy_folder / f"{name}.safetensors") for name in ("model", "value_head"))
    weights = {f"lm_backbone.{name}": tensor for name, tensor in backbone.items()}
    weights |= {f"value_head.{name}": tensor for name, tensor in head.items()}
    return Left(metrics_of(only(folder, "runs/*")), samples_of(only(folder, "runs/*")), weights)


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
def args(tiny_world: Path, tiny_reward: Path) -> Args:
    """With a target near the KL of update 1, so that the next coefficient depends on that KL.

    That KL does not depend on the target: the KL of update 0 is 0, and the change after it is the largest there is.
    """
    args = policy_args(tiny_world, tiny_reward)
    target = 1.1 * replay(args, tiny_world).metrics[1]["objective/kl"]
    return dataclasses.replace(
        args, rewards=dataclasses.replace(args.rewards, adaptive_kl=AdaptiveKLArgs(target=target, horizon=100))
    )


@pytest.fixture(scope="module")
def expected(args: Args, tiny_world: Path) -> Left:
    return replay(args, tiny_world)


@dataclass(frozen=True)
class Finished:
    left: Left
    folder: Path
    stdout: str


@pytest.fixture(scope="module")
def finished(args: Args, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder, stdout = tmp_path_factory.mktemp("policy"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(stdout):
        return Finished(run_in(folder, args, patch), folder, stdout.getvalue())


def test_a_policy_run_is_its_replay(finished: Finished, expected: Left):
    check_same(finished.left, expected)


def test_a_run_that_failed_goes_on_while_its_error_is_kept(
    args: Args, finished: Finished, tmp_path: Path, monkeypatch
):
    """Who keeps the exception keeps the run that failed, but not its lock."""
    ppo_update, updates = train_policy.ppo_update, iter(range(UPDATES + 1))

    def fail_in_the_third(*arguments, **named):
        if next(updates) == 2:
            raise MemoryError
        return ppo_update(*arguments, **named)

    monkeypatch.setattr(train_policy, "ppo_update", fail_in_the_third)
    args = dataclasses.replace(args, save_interval=1)
    with pytest.raises(MemoryError) as kept:
        run_in(tmp_path, args, monkeypatch)
    train_policy.train(dataclasses.replace(args, resume=str(only(tmp_path, "runs/*"))))
    assert metrics_of(only(tmp_path, "runs/*")) == finished.left.metrics and kept


# What a checkpoint may have to hold: every preset as it is, and every option that changes what is kept.
HELD = {name: f"--preset {name}" for name in train_policy.PRESETS} | {
    "cnndm": "--preset cnndm --task.end_text .",  # a story has no line break at which a query could end
    "head": "--preset tales --ppo.value_head_lr 0.01 --frozen_bfloat16 --trace_interval 1",
    "low precision": "--preset reviews --dtype bfloat16 --gradient_checkpointing",
    "function": "--preset tales --rewards.function test_train_policy:length_of --rewards.normalize_samples 16",
    "no responses that stop": "--preset tales --task.truncate_text Mara",
}


@pytest.mark.parametrize("words", HELD.values(), ids=HELD)
def test_a_checkpoint_takes_whatever_a_run_holds(
    words: str, tiny_world: Path, tiny_reward: Path, tmp_path: Path, monkeypatch
):
    scorer = "" if "function" in words else f"--rewards.trained_model {tiny_reward}"
    words += f" {scorer} --base_model {tiny_world}/model --task.query_dataset {tiny_world}/stories.txt"
    words += " --task.query_length 16 --task.response_length 12 --task.truncate_after 0"
    words += " --ppo.batch_size 16 --ppo.whiten_groups 1 --ppo.total_episodes 32"
    words += " --ppo.local_micro_batch_size 16"
    words += " --save_interval 1 --log_interval 1"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(learning_curves, "draw_learning_curves", lambda *_: None)
    train_policy.train(parse_args(train_policy.PRESETS, words.split()))
    folder = only(tmp_path, "runs/*")
    expected, weights = metrics_of(folder), load_file(only(tmp_path, "models/*/policy/model.safetensors"))
    shutil.rmtree(folder / "checkpoints/2")
    train_policy.train(parse_args(train_policy.PRESETS, ["--resume", str(folder)]))
    assert len(expected) == 2 and metrics_of(folder) == expected
    for name, weight in load_file(only(tmp_path, "models/*/policy/model.safetensors")).items():
        assert torch.equal(weight, weights[name])


def test_the_replayed_run_leaves_nothing_out(expected: Left, args: Args):
    """So that the comparison compares something."""
    kls, kl_coefs, stopped, clipped, clipped_values = (
        [row[name] for row in expected.metrics]
        for name in (
            "objective/kl",
            "objective/kl_coef",
            "objective/stopped",
            "ppo/policy/clipfrac",
            "ppo/val/clipfrac",
        )
    )
    assert abs(kls[0]) < 1e-12
    assert min(abs(kl) for kl in kls[1:]) > 0.01
    assert all(0 < share < 1 for share in (*stopped, *clipped, *clipped_values))
    assert len(expected.metrics) == UPDATES
    assert len(expected.samples) == 6  # of updates 0 and 2
    changes = [after / before - 1 for before, after in itertools.pairwise(kl_coefs)]
    largest = 0.2 * BATCH / args.rewards.adaptive_kl.horizon
    assert changes == pytest.approx([-largest, largest * (1 / 1.1 - 1) / 0.2])


# ---- Negative controls: the replay rejects each of these mistakes ----------------------------------------------


FILES = ("train_policy.py",)
WHERE = ("train", "group_advantages", "draw_permutations", "ppo_update", "ppo_sizes", "sample_rows")
MISTAKES = titles("train_policy.py", *WHERE)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_detected(mistake: str, args: Args, expected: Left, tmp_path: Path, monkeypatch):
    put(mistake, FILES, monkeypatch)
    with pytest.raises((AssertionError, NumericalError)):
        check_same(run_in(tmp_path, args, monkeypatch), expected)


def test_a_function_without_a_mistake_passes(args: Args, expected: Left, tmp_path: Path, monkeypatch):
    put_unchanged(MISTAKES, FILES, monkeypatch)
    check_same(run_in(tmp_path, args, monkeypatch), expected)


# ---- What a run shows ------------------------------------------------------------------------------------------


def test_the_console_shows_the_progress(finished: Finished):
    """In a log file at intervals of time, and the last update always."""
    shown = re.findall(
        rf"PPO: 100%.* {UPDATES}/{UPDATES} .* (\d+) episodes/s, score (\S+), KL (\S+), (\d+) % end\]", finished.stdout
    )
    ((speed, score, kl, ended),) = shown
    with (only(finished.folder, "runs/*") / "metrics.csv").open() as file:
        *_, last = csv.DictReader(file)
    # The line is printed a little later than the row is written.
    assert 0 < int(speed) <= float(last["elapsed/fps"]) / 24 + 1
    row = finished.left.metrics[-1]
    assert score == f"{row['objective/score']:+.2f}"
    assert kl == f"{row['objective/kl']:.2f}" and int(ended) == round(100 * row["objective/stopped"])


def test_a_monitor_replaces_nothing(finished: Finished, tiny_tokenizer):
    """The names that are refused are those that a run logs anyhow."""
    names = {name.removeprefix("objective/") for name in finished.left.metrics[0] if name.startswith("objective/")}
    assert len(names) == 12
    for name in names - {"gold_scores"}:
        with pytest.raises(InputError, match=f"--rewards.monitor mine:{name}: the name {name} is taken"):
            train_policy.load_monitor(f"mine:{name}", tiny_tokenizer, len(tiny_tokenizer))


def test_the_console_shows_the_samples(finished: Finished):
    for row in finished.left.samples:
        for number in (row["score"], row["kl"], row["score - kl_coef * kl"]):
            assert f" {number:+.2f} " in finished.stdout
    assert re.findall(r"^ +(step \d+) +$", finished.stdout, re.MULTILINE) == ["step 0", "step 2"]


def test_three_episodes_are_shown(tiny_tokenizer):
    pad = len(tiny_tokenizer)
    queries = torch.tensor([[0, 1, pad], [2, pad, pad], [3, 4, 5], [6, 7, 8], [9, 9, 9]])
    responses = torch.tensor([[10, 11], [12, pad], [13, 26], [14, 15], [16, 17]])
    numbers = {"score": torch.arange(5.0), "kl": -torch.arange(5.0), "non_score_reward": torch.ones(5)}
    unused = dict.fromkeys(("context_responses", "logprobs", "values", "rewards"))
    batch = train_policy.Rollout(queries=queries, truncated_responses=responses, objectives=numbers, **unused)
    rows = train_policy.sample_rows(tiny_tokenizer, pad, batch)
    assert rows == [
        {"query": query, "response": response, "score": float(i), "kl": -float(i), "score - kl_coef * kl": i + 1.0}
        for i, (query, response) in enumerate([("a b", "k l"), ("c", "m"), ("d e f", "n .")])
    ]


def test_a_table_shows_sign_two_decimals_and_line_breaks_as_marks(args: Args, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shown = run.Run(args, processes.make_accelerator(), {"batch": 1})
    shown.start_logging(0)
    shown.log_samples(
        0, [{"query": "one\n\ntwo", "score": 1.005, "kl": -0.125}, {"query": "", "score": 0.0, "kl": 20.0}]
    )
    shown.finish()
    printed = capsys.readouterr().out
    for cell in ("one⏎⏎two", "+1.00", "-0.12", "+0.00", "+20.00"):
        assert re.search(rf"[ │]{re.escape(cell)}[ │]", printed), cell
    assert samples_of(shown.folder)[0] == {"step": 0, "query": "one\n\ntwo", "score": 1.005, "kl": -0.125}


# ---- What stops a run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "rounding", "too_far"), [("float64", 1e-12, 2e-3), ("float32", 1e-5, 2e-3), ("bfloat16", 0.05, 0.2)]
)
def test_a_ratio_that_does_not_begin_at_one_is_an_error(dtype: str, rounding: float, too_far: float):
    processes.check_update({"ppo/val/first_ratio_gap": rounding}, 7, dtype)
    with pytest.raises(NumericalError, match=r"ratio .* update 7"):
        processes.check_update({"ppo/val/first_ratio_gap": too_far}, 7, dtype)


def ends_with_one_line(call: Callable[[], object], capsys) -> str:
    """The line on stderr of a script that ends with status 2."""
    with pytest.raises(SystemExit) as caught:
        errors.run_script(call)
    assert caught.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


def test_a_sampler_that_disagrees_with_training_stops_the_run(args: Args, tmp_path: Path, monkeypatch, capsys):
    right = train_policy.generate

    def shifted(*arguments, **settings):
        responses, logprobs, hidden_states = right(*arguments, **settings)
        return responses, logprobs + 0.01, hidden_states

    monkeypatch.setattr(train_policy, "generate", shifted)
    monkeypatch.chdir(tmp_path)
    line = ends_with_one_line(lambda: train_policy.train(args), capsys)
    assert "the ratio is off 1 by 0.01 on the first pass of update 0" in line
    assert not (tmp_path / "models").exists()
    assert not list(tmp_path.glob("runs/*/checkpoints"))


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
FAILS_LATER = """
import os

calls = 0

def score(queries, responses):
    global calls
    calls += 1
    if calls == 4 and os.environ["RANK"] == "1":
        raise RuntimeError("no more")
    return [0.0] * len(responses)
"""


def stopped_pair(script: str | Path, world: Path, folder: Path, *arguments: str) -> str:
    """The one line with which each of two processes ends, with status 2."""
    words = [*world_arguments(world), *policy_arguments(), "--rewards.function", "fails_later:score", *arguments]
    first, second = launch_together(2, script, *words, folder=folder, OMP_NUM_THREADS="1")
    assert (first.status, second.status) == (2, 2), first.stderr + second.stderr
    assert (second.stdout, second.stderr) == ("", first.stderr)
    (line,) = first.stderr.splitlines()
    assert not (folder / "models").exists()
    return line


def test_coefficients_that_differ_stop_both_processes(tiny_world: Path, tmp_path: Path):
    (tmp_path / "driver.py").write_text(DIFFERENT_COEFFICIENTS)
    (tmp_path / "fails_later.py").write_text(FAILS_LATER.replace("calls == 4", "False"))
    line = stopped_pair(tmp_path / "driver.py", tiny_world, tmp_path)
    assert line.startswith("error: objective/kl_coef differs between processes: [0.1")
    assert len(metrics_of(only(tmp_path, "runs/*"))) == 1  # the first update has the same coefficient everywhere


def test_what_fails_on_one_process_stops_both(tiny_world: Path, tmp_path: Path):
    (tmp_path / "fails_later.py").write_text(FAILS_LATER)
    line = stopped_pair("train_policy.py", tiny_world, tmp_path)
    start = "error: --rewards.function fails_later:score failed when called with 8 texts: RuntimeError: no more ("
    assert line.startswith(start)
    assert len(metrics_of(only(tmp_path, "runs/*"))) == 1


# ---- The scale of a function -----------------------------------------------------------------------------------


def length_of(queries: list[str], responses: list[str]) -> list[float]:
    return [1000.0 + 7 * len(response) for response in responses]


def test_scores_of_a_function_are_put_on_the_scale_of_a_reward_model(args: Args, tmp_path: Path, monkeypatch):
    """On texts of the language model they have mean 0 and deviation 1, and a resumed run keeps that scale."""
    rewards = dataclasses.replace(
        args.rewards,
        trained_model="",
        function="test_train_policy:length_of",
        monitor="",
        normalize_samples=24,
    )
    task = dataclasses.replace(args.task, truncate_text=None)  # so that no penalty takes the place of a score
    args = dataclasses.replace(args, rewards=rewards, task=task, save_interval=1, log_interval=0)
    seen = []
    text_scorer = reward_functions.text_scorer

    def spy(*arguments, **settings):
        score = text_scorer(*arguments, **settings)
        return lambda *tokens: seen.append(score(*tokens)) or seen[-1]

    monkeypatch.setattr(reward_functions, "text_scorer", spy)
    run_in(tmp_path, args, monkeypatch)
    folder = only(tmp_path, "runs/*")
    of_language_model, *of_updates = [scores.numpy() for scores in seen]
    center, deviation = of_language_model.mean(dtype=float), of_language_model.std(dtype=float)
    assert len(of_language_model) == 24 and deviation > 7
    for row, scores in zip(metrics_of(folder), of_updates, strict=True):
        assert row["objective/function_score"] == pytest.approx(scores.mean(), rel=1e-6)
        assert row["objective/score"] == pytest.approx((scores.mean() - center) / deviation, abs=1e-5)
    state = json.loads((folder / f"checkpoints/{UPDATES}/state.json").read_text())
    assert state["score_scale"] == pytest.approx([center, deviation], rel=1e-12)

    seen.clear()
    longer = dataclasses.replace(args.ppo, total_episodes=(UPDATES + 1) * BATCH)
    train_policy.train(dataclasses.replace(args, ppo=longer, resume=str(folder)))
    (scores,) = seen  # it does not look at the language model again
    last = metrics_of(folder)[-1]
    assert last["objective/score"] == pytest.approx((scores.mean().item() - center) / deviation, abs=1e-5)


@pytest.mark.parametrize(("scores", "mean"), [([], 0.0), ([3.0, 3.0], 3.0), ([0.1] * 3, 0.1)])
def test_a_scale_needs_scores_that_differ(scores: list[float], mean: float):
    """By more than rounding: the mean of three times 0.1 is not quite 0.1."""
    scale, found = Scale(), torch.tensor(scores, dtype=torch.float64)
    scale.fit(found)
    assert (scale.mean, scale.std) == (pytest.approx(mean), 1.0)
    assert scale.undo(scale.apply(torch.tensor([5.0]))).item() == pytest.approx(5.0)


def test_without_samples_a_function_keeps_its_scale(args: Args, tmp_path: Path, monkeypatch):
    rewards = dataclasses.replace(
        args.rewards, trained_model="", function="test_train_policy:length_of", normalize_samples=0
    )
    run_in(tmp_path, dataclasses.replace(args, rewards=rewards, log_interval=0), monkeypatch)
    rows = metrics_of(only(tmp_path, "runs/*"))
    assert all(row["objective/function_score"] == row["objective/raw_score"] > 1000 for row in rows)


# ---- One source of scores, one task ----------------------------------------------------------------------------


def test_a_policy_has_one_scorer_and_finds_the_newest_reward_model(args: Args, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    wrong = replace(args, rewards=replace(args.rewards, function="math:sqrt"))
    line = ends_with_one_line(lambda: train_policy.train(wrong), capsys)
    assert line == "error: give one of --rewards.trained_model and --rewards.function"
    unnamed = replace(args, base_model="nobody/none", rewards=replace(args.rewards, trained_model=""))
    line = ends_with_one_line(lambda: train_policy.train(unnamed), capsys)
    assert line.startswith(
        "error: models/ has no reward model of the preset sentiment; train one with train_reward.py"
    )
    assert not list(tmp_path.iterdir())
    names = ["train_reward__sentiment__1__20", "other__sentiment__2__100", "train_reward__tales__1__999"]
    names += ["my__sentiment__1__tales__1__998", "tldr_reward__sentiment__1__997"]
    for name in names:
        info = {"kind": "reward model", "base_model": "", "vocab_size": 1}
        info["task"] = {"comparisons": ""} if name.startswith("tldr") else {"query_dataset": ""}
        (tmp_path / "models" / name / "reward").mkdir(parents=True)
        (tmp_path / "models" / name / "reward/ppo_rlhf.json").write_text(json.dumps(info))
    (tmp_path / "models/train_reward__sentiment__1__1000/reward").mkdir(parents=True)  # not saved yet
    found = train_policy.with_newest_reward_model(unnamed)
    assert found.rewards.trained_model == "models/other__sentiment__2__100/reward"
    assert "models/other__sentiment__2__100/reward, the newest of the preset sentiment" in capsys.readouterr().out
    resumed = replace(unnamed, resume="runs/a")
    assert train_policy.with_newest_reward_model(resumed) is resumed


@pytest.mark.parametrize("part", ["reward", "policy"])
@pytest.mark.parametrize(
    "flag",
    [
        *("task.temperature", "task.query-length", "seed", "base_model", "base-model", "preset", "resume"),
        *("trust_remote_code", "trust-remote-code", "no-trust-remote-code"),
    ],
)
def test_a_joint_run_refuses_what_both_parts_share(part: str, flag: str):
    for words in ([f"--{part}.{flag}", "1"], [f"--{part}.{flag}=1"]):
        with pytest.raises(InputError, match=rf"^--{part}\.{flag}: all stages share it; give --{flag}$"):
            train_both.parse(["--preset", "tales", *words])


@pytest.mark.parametrize("flag", ["trained_model", "trained-model", "function"])
def test_a_joint_run_refuses_another_scorer(flag: str):
    for words in ([f"--policy.rewards.{flag}", "x"], [f"--policy.rewards.{flag}=x"]):
        with pytest.raises(InputError, match=rf"^--policy\.rewards\.{flag}: the reward model is trained here"):
            train_both.parse(["--preset", "tales", *words])


def test_a_joint_run_gives_both_parts_one_task(tiny_world: Path, tmp_path: Path, monkeypatch):
    """And the policy the reward model that was just trained."""
    monkeypatch.chdir(tmp_path)
    parts: list = []
    for module, name in ((train_reward, "reward"), (train_policy, "policy")):
        monkeypatch.setattr(module, "train", lambda args, joint, name=name: parts.append(args) or Path(name))
    monkeypatch.setattr(train_both, "report", lambda *_: None)
    words = [*both_arguments(tiny_world), "--task.temperature", "0.9", "--seed", "5"]
    joint = train_both.parse(words)
    assert train_both.train(joint) == (Path("reward"), Path("policy"))
    reward_args, policy_args = parts
    assert reward_args.task == policy_args.task == joint.task
    assert joint.task == replace(
        train_policy.PRESETS["tales"].task, query_dataset=f"{tiny_world}/stories.txt", temperature=0.9
    )
    assert (reward_args.seed, policy_args.seed) == (5, 5)
    assert reward_args.base_model == policy_args.base_model == f"{tiny_world}/model"
    assert (policy_args.rewards.trained_model, policy_args.rewards.function) == ("reward", "")


# ---- Reading what a policy writes: sample.py -------------------------------------------------------------------


def test_changes_are_paired():
    """Differences 1 and 2: mean 1.5, deviation sqrt(0.5), standard error 0.5."""
    rows = [
        {"query": "q", "base": "a A", "base score": 1.0, "policy": "a b", "policy score": 2.0, "kl": 3.0},
        {"query": "q", "base": "c c", "base score": 3.0, "policy": "", "policy score": 5.0, "kl": 5.0},
    ]
    score, distinct = sample.changes(rows)
    assert list(score.values()) == ["score", 2.0, 3.5, 1.5, pytest.approx(1.96 * 0.5)]
    assert list(distinct.values()) == ["distinct words", 0.5, 0.5, 0.0, pytest.approx(1.96 * 0.5)]  # +0.5 and -0.5
    assert math.isnan(sample.changes(rows[:1])[0]["± 95 %"])  # one difference has no deviation


def test_sample_continues_held_out_queries_as_training_does(finished: Finished, tiny_world: Path, tiny_reward: Path):
    """At the task's temperature, up to the stop token, with both models, their scores and the KL."""
    folder = only(finished.folder, "models/*/policy")
    comparison = sample.Comparison(sample.Args(policy=str(folder), seed=4))
    task, tokenizer = task_of(tiny_world), AutoTokenizer.from_pretrained(tiny_world / "model")
    pad, (stop,) = len(tokenizer), tokenizer.encode(".")
    stream = queries_in_order(stories_of(tiny_world)[49::50], tokenizer)
    queries = [next(stream) for _ in range(5)]
    assert [query.tokens for query in comparison.queries(5)] == [[t for t in row if t != pad] for row in queries]

    prefix, suffix = tokenizer.encode(task.query_prefix), tokenizer.encode(task.query_suffix)
    contexts = torch.tensor([prefix + query + suffix for query in queries])
    noise = torch.rand(
        5, task.response_length, generator=train_policy.keyed_generator(4, "sample", 0), dtype=torch.float64
    )
    reward_model = load_reward_model(tiny_reward, torch.float32)
    models = {
        name: GPT2LMHeadModel.from_pretrained(path, dtype=torch.float32)
        for name, path in (("base", tiny_world / "model"), ("policy", folder))
    }
    expected: dict[str, list] = {"query": [tokenizer.decode([t for t in row if t != pad]) for row in queries]}
    cuts = 0

    def logprobs_of(model: GPT2LMHeadModel, responses: torch.Tensor) -> torch.Tensor:
        tokens = torch.cat([contexts, responses], 1)
        return response_logprobs(model, tokens, pad, contexts.shape[1], task.temperature, pad)[0]

    for name, model in models.items():
        responses, _, _ = generate(model, contexts, noise, pad, pad, task.temperature)
        cut = [cut_after_stop(response, stop, task.truncate_after, pad)[0] for response in responses.tolist()]
        cuts += sum(pad in response for response in cut)
        texts = [tokenizer.decode([token for token in response if token != pad]) for response in cut]
        scored = torch.tensor([query + response for query, response in zip(queries, cut, strict=True)])
        with torch.no_grad():
            expected |= {name: texts, f"{name} score": reward_model(scored, pad).tolist()}
        expected[f"{name} gold"] = sentiment.gold_scores([], texts)
        under_base = logprobs_of(models["base"], responses)
        expected[f"{name} log-prob"] = under_base.mean(1).tolist()
    expected["kl"] = (logprobs_of(models["policy"], responses) - under_base).sum(1).tolist()
    assert 0 < cuts < 10

    rows = comparison.rows(comparison.queries(5))
    assert all(set(row) == set(expected) for row in rows)
    for name, values in expected.items():
        of_rows = [row[name] for row in rows]
        assert of_rows == (values if isinstance(values[0], str) else pytest.approx(values, rel=1e-4, abs=1e-5)), name


def test_all_processes_take_the_reward_model_that_the_first_finds(in_a_fresh_folder, monkeypatch):
    """The others may find none, or a newer one."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(processes, "broadcast_object_list", lambda objects: ["models/of the first/reward"])
    args = train_policy.with_newest_reward_model(train_policy.PRESETS["tales"])
    assert args.rewards.trained_model == "models/of the first/reward"
