"""A number that is not finite stops the run in its update, by name, and leaves the last good checkpoint."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from runs import (
    meta_of,
    metrics_of,
    only,
    policy_arguments,
    posts_arguments,
    reward_arguments,
    trained,
    world_arguments,
)
from safetensors.torch import load_file

from ppo_rlhf import train_policy, train_reward
from ppo_rlhf.tldr import reward as tldr_reward, sft as tldr_sft
from ppo_rlhf.train_policy import write_json


@pytest.fixture
def arguments(tiny_world, tiny_posts, tiny_reward, in_a_fresh_folder) -> Callable[[ModuleType], list[str]]:
    """A script's arguments for a small run in an empty folder: 4 updates, 5 steps, or one step on 16 rows."""
    one_step = [*posts_arguments(tiny_posts), "--base_model", f"{tiny_posts}/model"]
    one_step += ["--num_train", "16", "--batch_size", "16"]
    words = {
        train_policy: [*world_arguments(tiny_world, tiny_reward), *policy_arguments()],
        train_reward: [*world_arguments(tiny_world), *reward_arguments(tiny_world)],
        tldr_sft: [*one_step, "--eval_posts", "2"],
        tldr_reward: [*one_step, "--normalize_posts", "2"],
    }
    return words.__getitem__


def spoiled(result: Any) -> Any:
    """What a function returned, with NaN as one number of the first tensor, or as the first mean."""
    if isinstance(result, tuple):
        first, *others = result
        return (spoiled(first), *others)
    if isinstance(result, dict):
        return result | {next(iter(result)): math.nan}
    result = result.clone()
    result.view(-1)[0] = math.nan
    return result


# What is broken: the script; a function, and what holds it; after which step; and what is named.
BROKEN = {
    "score": (train_policy, train_policy.RewardModel, "forward", 2, "objective/raw_score"),
    "loss": (train_policy, train_policy, "policy_loss", 2, "ppo/loss/policy"),
    "gradient": (train_policy, torch.nn.utils, "get_total_norm", 2, "ppo/gradient_norm"),
    "loss of labels": (train_reward, train_reward, "label_loss", 2, "train/loss"),
    "held-out labels": (train_reward, train_reward, "score_samples", 5, "test_loss"),
    "summaries": (tldr_sft, tldr_sft, "summarise_held_out", 1, "validation/sft/loss"),
    "held-out pairs": (tldr_reward, tldr_reward, "score_pairs", 1, "validation/chosen_reward"),
    "references": (tldr_reward, tldr_reward, "shift_to_references", 1, "eval/rm/shift"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_number_that_is_not_finite_stops_the_run(what, arguments, monkeypatch):
    """All steps before it are logged, the last good checkpoint is kept, and no model is saved."""
    script, holder, name, step, named = BROKEN[what]
    function = getattr(holder, name)

    def broken_after_the_step(*values, **named_values):
        result = function(*values, **named_values)
        return spoiled(result) if list(Path("runs").glob(f"*/checkpoints/{step}")) else result

    monkeypatch.setattr(holder, name, broken_after_the_step)
    # No response stops, so no score counts; the one that is not finite is seen all the same.
    monkeypatch.setattr(train_policy, "has_stop", lambda responses, *_: torch.zeros(len(responses), dtype=torch.bool))
    with pytest.raises(ValueError, match=rf"{named} is nan.* in step {step};.* a lower (--lr|learning rate)$"):
        trained(script, Path(), arguments(script))
    run = only(Path("runs"), "*")
    assert [row["step"] for row in metrics_of(run)] == list(range(step))
    tensors = load_file(run / f"checkpoints/{step}/tensors.safetensors")
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert not meta_of(run)["finished"] and not list(run.glob("evaluation*")) and not Path("models").exists()


def test_json_holds_numbers_only(tmp_path):
    write_json(tmp_path / "a.json", {"a": 1.5})
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", {"a": math.nan})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1.5}
