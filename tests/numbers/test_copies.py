"""What stands twice has the same text; what chapters 2 and 3 write anew agrees with chapter 1."""

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
    *("RewardModel", "RewardModel.__init__"),  # with random numbers where it is trained
    "Run",  # the policy's also writes traces; their other methods are the same
    "prepare",  # only a policy may be compiled
}


def definitions(source: str) -> dict[str, str]:
    """The text of each function, class, method and top-level constant, from its first decorator on."""
    lines, found = source.splitlines(), {}

    def collect(body: list[ast.stmt], owner: str = "") -> None:
        for node in body:
            stored = [x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)]
            names = [owner + node.name] if hasattr(node, "name") else stored
            start = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
            found.update(dict.fromkeys(names, "\n".join(lines[start - 1 : node.end_lineno])))
            if isinstance(node, ast.ClassDef):
                collect([part for part in node.body if isinstance(part, ast.FunctionDef)], f"{node.name}.")

    collect(ast.parse(source).body)
    return found


def differences(one: dict[str, str], other: dict[str, str]) -> set[str]:
    """Names that both sources define, with different texts."""
    return {name for name in one.keys() & other.keys() if one[name] != other[name]}


def test_the_scripts_of_chapter_1_have_the_same_text():
    folder = Path(ppo_rlhf.__file__).parent
    policy, reward = (definitions((folder / name).read_text()) for name in ("train_policy.py", "train_reward.py"))
    assert differences(policy, reward) <= DIFFERENT
    assert policy.keys() & reward.keys() > {"read_tokens", "generate", "QueryStream.next_batch", "Run.log"}


@pytest.mark.parametrize(
    "other", ["@g\ndef f(x):\n    return x", "def f(x):\n    # why\n    return x", "f = 1  # why"]
)
def test_a_difference_is_found(other):
    for one in ("def f(x):\n    return x", "f = 1"):
        assert differences(definitions(one), definitions(other)) == {"f"}
    classes = [definitions("class C:\n    def f(self): return " + text) for text in "12"]
    assert differences(*classes) == {"C", "C.f"}


# ---- The same numbers ------------------------------------------------------------------------------------------


def test_the_chapters_agree_where_nothing_is_masked():
    """Golden numbers, in test_golden*.py, prove each; only the count of clipped values in chapter 3 has none."""
    values, moves, returns = (numbers(seed, 8, 5) for seed in range(3))
    scores, mask = numbers(3, 8), torch.ones(8, 5, dtype=torch.bool)
    expected = train_policy.compute_rewards(scores, values, moves, 0.15)
    for module in (tldr_policy, algebra):
        assert_close(module.compute_rewards(scores, values, moves, mask, 0.15, "k1"), expected)
    gae = train_policy.compute_gae(returns, values, 0.9, 0.8)
    assert_close(tldr_policy.compute_gae(returns, values, mask, 0.9, 0.8), gae)
    new_values = values + 0.3 * moves
    losses, clipped = algebra.value_losses(new_values, values, returns, mask, 0.2)
    found = losses.mean(), clipped.double().mean()
    assert_close(found, train_policy.value_loss(new_values, values, returns, 0.2))
