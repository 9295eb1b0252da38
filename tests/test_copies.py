"""What stands twice has the same text; what is written anew in chapter 2 agrees with chapter 1 where they overlap."""

import ast
import functools
from collections.abc import Callable
from pathlib import Path

import mistakes
import pytest
import torch
from oracles import on_processes
from torch.testing import assert_close

import ppo_rlhf
from ppo_rlhf import train_policy
from ppo_rlhf.rlvr import algebra
from ppo_rlhf.tldr import policy as tldr_policy

# ---- The same text ---------------------------------------------------------------------------------------------

FOLDER = Path(ppo_rlhf.__file__).parent
CHAPTER_1 = [(FOLDER / name).read_text() for name in ("train_policy.py", "train_reward.py")]
DIFFERENT = {
    *("Args", "PRESETS", "train"),  # what makes a script
    "RewardModel",  # written out where it is trained
}


def names_of(node: ast.stmt) -> list[str]:
    """The names that a statement at the top level defines: a function, a class or constants."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = (
        node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    )
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


@functools.cache
def definitions(source: str) -> dict[str, str]:
    """The text of each definition at the top level, from its first decorator on."""
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        start = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        found |= dict.fromkeys(names_of(node), "\n".join(lines[start - 1 : node.end_lineno]))
    return found


def differences(one: str, other: str) -> set[str]:
    """Names that both sources define, with different texts."""
    first, second = definitions(one), definitions(other)
    return {name for name in first.keys() & second.keys() if first[name] != second[name]}


def test_the_scripts_of_chapter_1_have_the_same_text():
    assert differences(*CHAPTER_1) <= DIFFERENT
    same = {
        "causal_mask",
        "read_tokens",
        "scaled_logits",
        "generate",
        "TaskArgs",
        "QueryStream",
        "AdamTensorFlowStyle",
    }
    assert same <= definitions(CHAPTER_1[0]).keys() & definitions(CHAPTER_1[1]).keys()


@pytest.mark.parametrize(
    "other",
    [
        *("def f(x):\n    return x + 1", "def f(x):\n    # why\n    return x", "@g\ndef f(x):\n    return x"),
        *("f = 2", "f = 1  # why", "f: int = 1", "f = g = 1", "(f, g) = 1, 2", "f = (\n    1\n)"),
    ],
)
def test_a_difference_is_found(other):
    assert differences("def f(x):\n    return x", other) == differences("f = 1", other) == {"f"}
    assert differences(other, other) == set()


# ---- The same numbers and gradients: an all-true mask, one group, k1, the score on the last token --------------

ROWS, LENGTH, CONTEXT = 8, 5, 2
ALL = torch.ones(ROWS, LENGTH, dtype=torch.bool)


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape or (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check_agreement(first: Callable, second: Callable, *tensors: torch.Tensor) -> None:
    """Two functions give the same tensors, and the same gradients of a weighted sum of all that have one."""
    found = []
    for function in (first, second):
        given = [tensor.clone().requires_grad_(True) for tensor in tensors]
        results = function(*given)
        results = results if isinstance(results, tuple) else (results,)
        total = sum((x * numbers(90 + i, *x.shape)).sum() for i, x in enumerate(results) if x.requires_grad)
        found.append([*results, *torch.autograd.grad(total, given, allow_unused=True)])
    for one, two in zip(*found, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            assert_close(two, one, atol=1e-12, rtol=1e-12)


def check_whiten() -> None:
    for keep_mean in (False, True):
        check_agreement(
            lambda x, keep_mean=keep_mean: train_policy.whiten(x, keep_mean=keep_mean),
            lambda x, keep_mean=keep_mean: tldr_policy.whiten(x, ALL, keep_mean=keep_mean, reduce=torch.clone),
            3 + 2 * numbers(1),
        )


def check_rewards() -> None:
    check_agreement(
        lambda *tensors: train_policy.compute_rewards(*tensors, 0.15),
        lambda *tensors: tldr_policy.compute_rewards(*tensors, ALL, 0.15, "k1"),
        *(numbers(1, ROWS), numbers(2), numbers(3)),
    )


def check_gae() -> None:
    check_agreement(
        lambda *tensors: train_policy.compute_gae(*tensors, 0.9, 0.8),
        lambda *tensors: tldr_policy.compute_gae(*tensors, ALL, 0.9, 0.8),
        *(numbers(1), numbers(2)),
    )


def check_policy_loss() -> None:
    logprobs = numbers(1)
    check_agreement(
        lambda *tensors: train_policy.policy_loss(*tensors, 0.2),
        lambda *tensors: tldr_policy.policy_loss(*tensors, ALL, 0.2, ALL.sum()),
        *(logprobs + 0.3 * numbers(2), logprobs, numbers(3)),
    )


def check_value_loss() -> None:
    values = numbers(1)
    check_agreement(
        lambda *tensors: train_policy.value_loss(*tensors, 0.2),
        lambda *tensors: tldr_policy.value_loss(*tensors, ALL, 0.2, ALL.sum()),
        *(values + 0.3 * numbers(2), values, numbers(3)),
    )


class Tables(torch.nn.Module):
    """In place of networks: numbers for each episode, which the first token of its row names."""

    def __init__(self):
        super().__init__()
        self.logprobs, self.values = (torch.nn.Parameter(numbers(seed)) for seed in (1, 2))

    def forward(self, query_responses: torch.Tensor, *_) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = query_responses[:, 0]
        return self.logprobs[rows], self.logprobs[rows].detach().abs(), self.values[rows]


def check_update() -> None:
    """Weights and last gradients after two epochs of two minibatches of two micro-batches."""
    tokens = torch.arange(ROWS).unsqueeze(1).expand(ROWS, CONTEXT + LENGTH)
    stored = (tokens, numbers(1) + 0.2 * numbers(3), numbers(2) + 0.2 * numbers(4), numbers(5))
    logprobs, values, rewards = stored[1:]
    of_chapter_2 = tldr_policy.Rollout(
        query_responses=tokens, logprobs=logprobs, values=values, rewards=rewards, mask=ALL, value_mask=ALL
    )
    settings = {"batch_size": ROWS, "nminibatches": 2, "noptepochs": 2, "local_micro_batch_size": 2}
    settings |= {"whiten_rewards": True, "gamma": 0.9, "lam": 0.8, "vf_coef": 0.3}
    orders = torch.stack([torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)])
    rollout = train_policy.Rollout(
        **dict(zip(("context_responses", "logprobs", "values", "rewards"), stored, strict=True))
    )
    first, second = Tables(), Tables()
    train_policy.ppo_update(
        *(first, torch.optim.SGD(first.parameters(), lr=0.5), rollout, orders.unsqueeze(1)),
        *(train_policy.PpoArgs(**settings, whiten_groups=1), -1, 1.0),
    )
    on_processes(
        1,
        lambda process: tldr_policy.ppo_update(
            *(second, torch.optim.SGD(second.parameters(), lr=0.5), of_chapter_2),
            *(orders.view(2, 2, ROWS // 2), tldr_policy.PpoArgs(**settings), -1, 1.0, process),
        ),
    )
    start = Tables()
    for name, parameter in first.named_parameters():
        assert (parameter - start.get_parameter(name)).abs().max() > 0.01  # it has learnt something
        assert_close(second.get_parameter(name), parameter, atol=1e-12, rtol=1e-12)
        assert_close(second.get_parameter(name).grad, parameter.grad, atol=1e-12, rtol=1e-12)


CHECKS = [*(check_whiten, check_rewards, check_gae, check_policy_loss, check_value_loss, check_update)]


def rlvr_policy_loss(new_logprobs, logprobs, advantages):
    losses, clipped, _ = algebra.token_losses(new_logprobs, logprobs, advantages, ALL, "ppo", low=0.2, high=0.2)
    approxkl = 0.5 * algebra.aggregate((new_logprobs - logprobs) ** 2, ALL, "token-mean")
    mean = algebra.aggregate(losses, ALL, "token-mean")
    return mean, algebra.aggregate(clipped.double(), ALL, "token-mean"), approxkl.detach()


def rlvr_value_loss(new_values, values, returns):
    losses, clipped = algebra.value_losses(new_values, values, returns, ALL, 0.2)
    return tuple(algebra.aggregate(x.double(), ALL, "token-mean") for x in (losses, clipped))


def test_chapter_3_agrees_with_chapter_1():
    first, second, third = numbers(1), numbers(2), numbers(3)
    check_agreement(
        lambda x: train_policy.whiten(x, keep_mean=False),
        lambda x: algebra.whiten(x, ALL, keep_mean=False),
        3 + 2 * first,
    )
    with torch.no_grad():  # chapter 3 takes rewards as given
        rewards = train_policy.compute_rewards(numbers(4, ROWS), first, second, 0.15)
        for one, two in zip(
            rewards, algebra.compute_rewards(numbers(4, ROWS), first, second, ALL, 0.15, "k1"), strict=True
        ):
            assert_close(two, one, atol=1e-12, rtol=0)
        settings = {"values": second, "gamma": 0.9, "lam": 0.8}
        found = algebra.ESTIMATORS["gae"](first, ALL, torch.zeros(ROWS), **settings)
        for one, two in zip(train_policy.compute_gae(first, second, 0.9, 0.8), found, strict=True):
            assert_close(two, one, atol=1e-12, rtol=0)
    given = (first + 0.3 * second, first, third)
    check_agreement(lambda *tensors: train_policy.policy_loss(*tensors, 0.2), rlvr_policy_loss, *given)
    check_agreement(lambda *tensors: train_policy.value_loss(*tensors, 0.2), rlvr_value_loss, *given)


@pytest.mark.parametrize("check", CHECKS)
def test_chapter_2_agrees_with_chapter_1(check):
    check()


# A mistake is a function of chapter 2, a part of its text, the text that replaces it, and the checks that must fail.
MISTAKES = [
    ("whiten", "mask.sum()", "mask.sum() - 1", [check_whiten, check_update]),
    ("whiten", "(values - mean) * torch", "(values - mean.detach()) * torch", [check_whiten]),
    ("compute_rewards", "mask.shape[1] - 1", "mask.shape[1] - 2", [check_rewards]),
    ("compute_rewards", '== "k1"', '!= "k1"', [check_rewards]),
    ("compute_gae", "reversed(range(", "reversed(range(1, ", [check_gae, check_update]),
    ("policy_loss", "torch.maximum", "torch.minimum", [check_policy_loss, check_update]),
    ("value_loss", "return 0.5 * ", "return ", [check_value_loss, check_update]),
    ("value_loss", "losses), mask, count)", "losses), mask, mask.sum())", [check_update]),  # means of micro-batches
]


@pytest.mark.parametrize(("function", "right", "wrong", "checks"), MISTAKES)
def test_a_disagreement_is_found(function, right, wrong, checks, monkeypatch):
    mistakes.replace(f"tldr/policy.py::{function}", (), monkeypatch)  # rebuilt from its text
    for check in checks:
        check()
    mistakes.replace(f"tldr/policy.py::{function}", ((right, wrong),), monkeypatch)
    for check in checks:
        with pytest.raises(AssertionError):
            check()
