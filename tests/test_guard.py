"""A number that is not finite stops the run in its update, by name, and leaves the last good checkpoint."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from runs import metrics_of, only
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from ppo_rlhf import train_policy, train_reward
from ppo_rlhf.lib import learning_curves, processes
from ppo_rlhf.lib.errors import InputError, NumericalError
from ppo_rlhf.lib.files import write_json
from ppo_rlhf.rlvr import policy as rlvr_policy
from ppo_rlhf.tldr import policy as tldr_policy, reward as tldr_reward, sft as tldr_sft

BROKEN_UPDATE = 2  # of 0, 1, 2, 3


@pytest.fixture(autouse=True)
def without_pictures(in_a_fresh_folder, monkeypatch):
    monkeypatch.setattr(learning_curves, "draw_learning_curves", lambda *_: None)


@pytest.fixture
def policy_args(tiny_world: Path, tiny_reward: Path) -> train_policy.Args:
    """Four updates of 16 episodes, each with two passes and a checkpoint."""
    preset = train_policy.PRESETS["tales"]
    return dataclasses.replace(
        preset,
        base_model=str(tiny_world / "model"),
        save_interval=1,
        log_interval=0,
        trace_interval=0,
        task=dataclasses.replace(preset.task, query_dataset=str(tiny_world / "stories.txt")),
        rewards=dataclasses.replace(preset.rewards, trained_model=str(tiny_reward)),
        ppo=dataclasses.replace(preset.ppo, total_episodes=64, batch_size=16, whiten_groups=2, noptepochs=2),
    )


@pytest.fixture
def reward_args(tiny_world: Path) -> train_reward.Args:
    """Four steps of 8 labels, each with a checkpoint."""
    preset = train_reward.PRESETS["tales"]
    return dataclasses.replace(
        preset,
        base_model=str(tiny_world / "model"),
        label_dataset=str(tiny_world / "labels/sentiment/offline_5k.json"),
        save_interval=1,
        num_train=32,
        local_micro_batch_size=8,
        batch_size=8,
        rollout_batch_size=32,
        normalize_samples=32,
        task=dataclasses.replace(preset.task, query_dataset=str(tiny_world / "stories.txt")),
    )


def breaks(function, call: int, spoil):
    """The function, but what its call of this number (from 0) returns is spoilt."""
    calls = iter(range(1_000_000))

    def wrapper(*arguments, **keywords):
        result = function(*arguments, **keywords)
        return spoil(result) if next(calls) == call else result

    return wrapper


def spoil_one(value: float):
    """Put a number into the first place of a tensor, or of the first tensor of several."""

    def spoil(result):
        first, *others = result if isinstance(result, tuple) else [result]
        first = first + torch.zeros_like(first).flatten().index_fill(0, torch.tensor([0]), value).view_as(first)
        return (first, *others) if isinstance(result, tuple) else first

    return spoil


def spoil_all(value: float):
    """Multiply all numbers of a tensor, and its gradient, by a number."""
    return lambda result: result * value


def check_stopped(train, args, *names: str) -> None:
    """The run stops in the broken update and names these quantities; its checkpoints are good; it saves no model."""
    with pytest.raises(NumericalError) as caught:
        train(args)
    assert f"in step {BROKEN_UPDATE}" in str(caught.value)
    for name in names:
        assert f"{name} is " in str(caught.value)
    run = only(Path("runs"), "*")
    assert [row["step"] for row in metrics_of(run)] == [0, 1]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["1", "2"]
    tensors = load_file(run / "checkpoints/2/tensors.safetensors")
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert not Path("models").exists()


# what is broken: (whose function, its name, calls in one update, which of them, how, what is named)
UPDATES = {
    "score": (train_policy.RewardModel, "forward", 1, 0, spoil_all(math.nan), ["objective/score"]),
    # of the reference, then of the policy
    "KL": (train_policy, "response_logprobs", 3, 0, spoil_one(-math.inf), ["objective/kl"]),
    "policy loss": (train_policy, "policy_loss", 2, 1, spoil_one(math.nan), ["ppo/loss/policy", "ppo/loss/total"]),
    "value loss": (train_policy, "value_loss", 2, 1, spoil_one(math.inf), ["ppo/loss/value", "ppo/loss/total"]),
    "advantage": (train_policy, "group_advantages", 2, 1, spoil_one(math.nan), ["ppo/loss/policy"]),
    # for the gradient, then for the statistics
    "label's loss": (train_reward, "label_loss", 2, 0, spoil_all(math.inf), ["train/gradient_norm"]),
    "label's score": (train_reward, "score_samples", 1, 0, spoil_one(math.nan), ["train/loss"]),
}


@pytest.mark.parametrize("what", UPDATES)
def test_update(what, request, monkeypatch):
    holder, name, calls, which, spoil, names = UPDATES[what]
    call = BROKEN_UPDATE * calls + which
    monkeypatch.setattr(holder, name, breaks(getattr(holder, name), call, spoil))
    script, args = (train_reward, "reward_args") if holder is train_reward else (train_policy, "policy_args")
    check_stopped(script.train, request.getfixturevalue(args), *names)


def test_gradient_of_the_policy(policy_args, monkeypatch):
    """In the last pass nothing but the gradient is broken."""
    averages = iter(range(1_000_000))

    def average_gradients(model):
        if next(averages) == 2 * BROKEN_UPDATE + 1:
            model.value_head.weight.grad[0, 0] = math.nan

    monkeypatch.setattr(train_policy, "average_gradients", average_gradients)
    check_stopped(train_policy.train, policy_args, "ppo/gradient_norm")


def test_a_score_that_the_penalty_replaces_is_seen(policy_args, monkeypatch):
    """No response stops, so no score counts; one of them is not finite all the same."""
    forward = train_policy.RewardModel.forward
    monkeypatch.setattr(train_policy.RewardModel, "forward", breaks(forward, BROKEN_UPDATE, spoil_one(math.nan)))
    monkeypatch.setattr(train_policy, "has_stop", lambda responses, *_: torch.zeros(len(responses), dtype=torch.bool))
    check_stopped(train_policy.train, policy_args, "objective/raw_score")


@pytest.mark.parametrize("call, checkpoints", [(0, []), (1, ["3", "4"])])
def test_scores_to_normalise_on(call, checkpoints, reward_args, monkeypatch):
    """Before training, nothing is saved; after it, the checkpoint of the last step stays."""
    gain_and_bias, spoil = train_reward.gain_and_bias, breaks(torch.clone, call, spoil_one(math.nan))
    monkeypatch.setattr(train_reward, "gain_and_bias", lambda scores, *scale: gain_and_bias(spoil(scores), *scale))
    with pytest.raises(NumericalError, match="mean nan"):
        train_reward.train(reward_args)
    run = only(Path("runs"), "*")
    assert sorted(path.name for path in run.glob("checkpoints/*")) == checkpoints
    assert not Path("models").exists()


@pytest.fixture
def sft_args(tiny_posts: Path) -> tldr_sft.Args:
    """One step on 16 posts."""
    preset = tldr_sft.PRESETS["posts"]
    task = dataclasses.replace(preset.task, posts=str(tiny_posts))
    base_model, sizes = str(tiny_posts / "model"), {"num_train": 16, "batch_size": 16, "epochs": 1, "eval_posts": 2}
    return dataclasses.replace(preset, base_model=base_model, task=task, **sizes)


@pytest.fixture
def pair_args(tiny_posts: Path) -> tldr_reward.Args:
    """One step on 16 comparisons."""
    preset = tldr_reward.PRESETS["posts"]
    task = dataclasses.replace(preset.task, posts=str(tiny_posts), comparisons=str(tiny_posts))
    sizes = {"num_train": 16, "batch_size": 16, "local_micro_batch_size": 16, "normalize_posts": 2}
    return dataclasses.replace(preset, base_model=str(tiny_posts / "model"), task=task, **sizes)


@pytest.fixture
def summary_args(tiny_posts: Path) -> tldr_policy.Args:
    preset = tldr_policy.PRESETS["posts"]
    task = dataclasses.replace(preset.task, posts=str(tiny_posts))
    rewards = dataclasses.replace(preset.rewards, function="ppo_rlhf.worlds.posts:gold_scores")
    return dataclasses.replace(preset, base_model=str(tiny_posts / "model"), task=task, rewards=rewards)


@pytest.fixture
def sums_args(tiny_sums: Path) -> rlvr_policy.Args:
    preset = rlvr_policy.PRESETS["sums"]
    task = dataclasses.replace(preset.task, problems=str(tiny_sums))
    ppo = dataclasses.replace(preset.ppo, batch_size=16)
    return dataclasses.replace(preset, base_model=str(tiny_sums / "model"), task=task, ppo=ppo)


SCRIPTS = {train_policy: "policy_args", train_reward: "reward_args", tldr_sft: "sft_args", tldr_reward: "pair_args"}
SCRIPTS |= {tldr_policy: "summary_args", rlvr_policy: "sums_args"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_cannot_be_saved_is_refused_before_the_training(script, request, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("no file for this")

    args = request.getfixturevalue(SCRIPTS[script])
    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", refuse)
    with pytest.raises(InputError, match=r"--base_model .* could not be saved: ValueError: no file for this"):
        script.train(args)
    assert not Path("runs").exists() and not Path("models").exists()


MOODY = """
def mood(queries, responses):
    return [float("nan") if len(queries) > 2 else 0.0 for _ in responses]
"""


def test_a_monitor_may_be_nan(policy_args):
    """Whenever it is called with more than the two texts with which it is tried; nothing else is NaN."""
    Path("moody.py").write_text(MOODY)
    rewards = dataclasses.replace(policy_args.rewards, monitor="moody:mood")
    train_policy.train(dataclasses.replace(policy_args, rewards=rewards))
    for row in metrics_of(only(Path("runs"), "*")):
        assert [name for name, value in row.items() if math.isnan(value)] == ["objective/mood"]


def spoil_loss(result):
    means, rows = result
    return {**means, "validation/sft/loss": math.nan}, rows


# what is broken after the last step: (script, its arguments, function, which call, how, what is named, in which step)
EVALUATIONS = {
    "chapter 1": (train_reward, "reward_args", "score_samples", 4, spoil_one(math.nan), "test_loss is nan", 4),
    "summaries": (tldr_sft, "sft_args", "summarise_held_out", 0, spoil_loss, "validation/sft/loss is nan", 1),
    "pairs": (tldr_reward, "pair_args", "score_pairs", 1, spoil_one(math.inf), "validation/chosen_reward is inf", 1),
    "references": (tldr_reward, "pair_args", "map_rows", 1, spoil_one(math.nan), "eval/rm/shift is nan", 1),
}


@pytest.mark.parametrize("what", EVALUATIONS)
def test_an_evaluation_after_training(what, request, monkeypatch):
    """The run is not finished, and no model is saved; the last checkpoint is there to go on from."""
    script, args, function, call, spoil, named, step = EVALUATIONS[what]
    where = processes if function == "map_rows" else script
    monkeypatch.setattr(where, function, breaks(getattr(where, function), call, spoil))
    with pytest.raises(NumericalError, match=f"{named}.* in step {step};"):
        script.train(request.getfixturevalue(args))
    run = only(Path("runs"), "*")
    assert (run / f"checkpoints/{step}").is_dir() and not Path("models").exists()
    assert not json.loads((run / "meta.json").read_text())["finished"] and not list(run.glob("evaluation*"))


def test_json_holds_numbers_only():
    write_json(Path("a.json"), {"a": 1.5})
    with pytest.raises(ValueError, match="JSON"):
        write_json(Path("a.json"), {"a": math.nan})
    assert json.loads(Path("a.json").read_text()) == {"a": 1.5}
