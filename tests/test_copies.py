"""What stands twice has the same text; what is written anew in chapters 2 and 3 agrees with chapter 1."""

import ast
from pathlib import Path

import pytest
import torch
from oracles import numbers
from torch.testing import assert_close

import ppo_rlhf
from ppo_rlhf import train_policy
from ppo_rlhf.rlvr import algebra
from ppo_rlhf.tldr import policy as tldr_policy

# ---- The same text ---------------------------------------------------------------------------------------------

DIFFERENT = {
    *("Args", "PRESETS", "train"),  # what makes a script
    "RewardModel",  # written out where it is trained
}


def definitions(source: str) -> dict[str, str]:
    """The text of each function, class and constant at the top level, from its first decorator on."""
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        stored = [name for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)]
        names = [node.name] if hasattr(node, "name") else [name.id for name in stored]
        start = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        found |= dict.fromkeys(names, "\n".join(lines[start - 1 : node.end_lineno]))
    return found


def differences(one: dict[str, str], other: dict[str, str]) -> set[str]:
    """Names that both sources define, with different texts."""
    return {name for name in one.keys() & other.keys() if one[name] != other[name]}


def test_the_scripts_of_chapter_1_have_the_same_text():
    folder = Path(ppo_rlhf.__file__).parent
    policy, reward = (definitions((folder / name).read_text()) for name in ("train_policy.py", "train_reward.py"))
    assert differences(policy, reward) <= DIFFERENT
    assert policy.keys() & reward.keys() > {"read_tokens", "generate", "QueryStream", "AdamTensorFlowStyle"}


@pytest.mark.parametrize(
    "other", ["@g\ndef f(x):\n    return x", "def f(x):\n    # why\n    return x", "f = 1  # why"]
)
def test_a_difference_is_found(other):
    for one in ("def f(x):\n    return x", "f = 1"):
        assert differences(definitions(one), definitions(other)) == {"f"}


# ---- The same numbers: an all-true mask, k1, the score on the last token ---------------------------------------


def test_the_chapters_agree_where_nothing_is_masked():
    """Golden numbers and mistakes that they reject are in test_golden*.py, one file for each chapter."""
    first, second, third = (numbers(seed, 8, 5) for seed in range(3))
    near, scores = first + 0.3 * second, numbers(3, 8)
    mask = torch.ones(8, 5, dtype=torch.bool)
    count = mask.sum()

    whitened = train_policy.whiten(first, keep_mean=True)
    assert_close(tldr_policy.whiten(first, mask, keep_mean=True, reduce=torch.clone), whitened)
    assert_close(algebra.whiten(first, mask, keep_mean=True), whitened)

    rewards = train_policy.compute_rewards(scores, first, second, 0.15)
    for module in (tldr_policy, algebra):
        assert_close(module.compute_rewards(scores, first, second, mask, 0.15, "k1"), rewards)

    gae = train_policy.compute_gae(first, second, 0.9, 0.8)
    assert_close(tldr_policy.compute_gae(first, second, mask, 0.9, 0.8), gae)
    assert_close(algebra.ESTIMATORS["gae"](first, mask, count, values=second, gamma=0.9, lam=0.8), gae)

    policy_loss = train_policy.policy_loss(near, first, third, 0.2)
    assert_close(tldr_policy.policy_loss(near, first, third, mask, 0.2, count), policy_loss)
    losses, clipped, _ = algebra.token_losses(near, first, third, mask, "ppo", low=0.2, high=0.2)
    assert_close((losses.mean(), clipped.double().mean()), policy_loss[:2])

    value_loss = train_policy.value_loss(near, first, third, 0.2)
    assert_close(tldr_policy.value_loss(near, first, third, mask, 0.2, count), value_loss)
    losses, clipped = algebra.value_losses(near, first, third, mask, 0.2)
    assert_close((losses.mean(), clipped.double().mean()), value_loss)
