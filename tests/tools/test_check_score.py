"""`python -m ppo_rlhf.check` on mistakes that were written without a look at its book, and on odd but correct code.

check_mistakes.toml has them in the form of the book, without sentences.
"""

import collections
import dataclasses
import functools
import inspect
import math
import re
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from checked import report_of, run

from ppo_rlhf.check import cases, diagnosis, faults, forms

HERE = Path(__file__).parent
MISTAKES = {mistake.title: mistake for mistake in faults.read_all(HERE / "check_mistakes.toml")}
ODD = re.split(r"^# ---- ", (HERE / "check_odd_forms.txt").read_text(), flags=re.MULTILINE)[1:]


def title(block: str) -> str:
    return block.partition("\n")[0]


def fails(function: Callable, case: cases.Case) -> bool:
    """Whether a function does not match in a case, or gives no gradient there."""
    answer = diagnosis.answer_of(function, case)
    if isinstance(answer, str) or not answer.keys() >= case.expected.keys() - {"returns"}:
        return True
    errors = [diagnosis.distance(x, case.expected[name], case.mask) for name, x in answer.items()]
    return not max(errors) <= cases.TOLERANCE


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake):
    wrong = MISTAKES[mistake]
    assert any(fails(wrong, case) for case in cases.all_cases()[wrong.function])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", ODD, ids=title)
def test_correct_code_in_an_odd_form_matches(block):
    """Each is a small adapter."""
    known = (np, torch, math, forms, collections, dataclasses, types, functools)
    namespace = {module.__name__.rpartition(".")[2]: module for module in known} | {"np": np, "__name__": "builtins"}
    exec(block.partition("\n")[2], namespace)
    name = title(block).partition(":")[0]
    report = report_of(name, namespace[name])
    assert report.ok and report.cases >= 2, report


IMPORTED = """
import argparse, os, random, sys
import numpy as np
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
random.seed(parser.parse_args().seed)
torch.manual_seed(1)
torch.set_default_dtype(torch.float64)
torch.set_grad_enabled(False)
np.seterr(all="raise")
print("loaded")
os.chdir("/")


@torch.compile
def whiten(values, mask, keep_mean):
    n = mask.sum().clamp(min=1)
    x = torch.where(mask, values, 0)
    mean = x.sum() / n
    x = torch.where(mask, x - mean, 0) / ((torch.where(mask, x - mean, 0) ** 2).sum() / n + 1e-8) ** 0.5
    return x + mean if keep_mean else x


def value_loss(new_values, values, returns, mask, cliprange):
    new_values, values, returns = new_values[mask], values[mask], returns[mask]
    clipped = values + (new_values - values).clamp(-cliprange, cliprange)
    return 0.5 * torch.maximum((new_values - returns) ** 2, (clipped - returns) ** 2).mean()
"""


def test_an_adapter_may_change_what_it_likes_when_it_is_imported(tmp_path):
    """The default dtype, gradients, random numbers, the working folder; and it may read its arguments."""
    (tmp_path / "adapter.py").write_text(IMPORTED)
    done = run("adapter.py", folder=tmp_path)
    assert done.status == 0 and "values only" not in done.stdout, done.stdout + done.stderr


# A function may do without these, or nothing that they change is compared.
NEEDLESS = {("kl_estimate", "mask"), ("accumulate", "generation_tokens")}
ARGUMENTS = [
    (name, key)
    for name in cases.NAMES
    for key in inspect.signature(getattr(forms, name)).parameters
    if key != "model" and (name, key) not in NEEDLESS
]


@pytest.mark.parametrize(("name", "ignored"), ARGUMENTS)
def test_a_function_that_ignores_an_argument_fails(name, ignored):
    """It has the default in its place, or what the first call gave; tensors of numbers are 0."""
    form, first = getattr(forms, name), []
    default = inspect.signature(form).parameters[ignored].default

    def function(**arguments):
        x = arguments.get(ignored, default)
        if default is not inspect.Parameter.empty:
            x = default
        elif isinstance(x, torch.Tensor):
            x = x * 0 if x.dtype != torch.bool else torch.ones_like(x)
        elif isinstance(x, list):
            x = [each * 0 if each.dtype != torch.bool else torch.ones_like(each) for each in x]
        else:
            first.append(x)
            x = first[0]
        return form(**(arguments | {ignored: x}))

    assert any(fails(function, case) for case in cases.all_cases()[name])


def test_a_function_of_which_no_gradient_is_compared_is_told_so():
    """Numbers have none, and a KL estimate may be for the reward; a loss without one fails."""
    numbers = report_of("entropy", lambda logits, temperature: forms.entropy(logits, temperature).detach().numpy())
    estimate = report_of("kl_estimate", lambda **x: forms.kl_estimate(**x).detach())
    assert numbers.ok and not numbers.gradients and estimate.ok and not estimate.gradients
    assert not report_of("policy_loss", lambda **x: forms.policy_loss(**x).detach()).ok
    weights = report_of("importance_weights", lambda **x: forms.importance_weights(**x).numpy())
    assert weights.ok and weights.gradients  # they must have none


def test_a_clamp_is_seen_whatever_its_bound():
    assert not report_of("whiten", lambda **x: forms.whiten(**x).clamp(max=1.7)).ok
