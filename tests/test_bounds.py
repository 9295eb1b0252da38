"""Values outside the bounds of a field end in one line that names the field, with status 2, and nothing is written.

The fields of all scripts' arguments are gone through, and each says in its own type what it may be.
"""

import dataclasses
import importlib
import math
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from annotated_types import Ge, Gt, Le, Lt
from refusals import Row, contents, run, with_value

from ppo_rlhf.lib import command_line
from ppo_rlhf.lib.errors import InputError

NEEDED = {"sample": ["--policy", "x"], "judge": ["--candidate", "x"]}  # without which a command does not begin
TRAINING = [
    *("train_reward", "train_policy", "train_both", "tldr/sft", "tldr/reward", "tldr/policy", "tldr/all"),
    *("rlvr/policy", "rlvr/asynchronous", "rlvr/tools"),
]
SCRIPTS = [*TRAINING, *NEEDED]
# A number without bounds is probably one whose bounds were forgotten, but for these.
ANY_NUMBER = {
    "task.penalty_reward_value",
    "rewards.trained_weight",
    "rejection_high",  # it has a bound together with rejection_low
}
TOO_LARGE = {int: [2**63, 10**400], float: [math.nan, math.inf, -math.inf, 1e39]}


def arguments_of(script: str) -> Any:
    module = importlib.import_module(f"ppo_rlhf.{script.replace('/', '.')}")
    if script in NEEDED:
        return module.Args(**{NEEDED[script][0][2:]: "x"})
    return next(iter(module.PRESETS.values()))


def numbers(group: Any, prefix: str = "") -> Iterator[tuple[str, type, list[Any]]]:
    """The name of each number among the arguments, as ppo.lr; its type; and its bounds."""
    for name, hint in typing.get_type_hints(type(group), include_extras=True).items():
        if dataclasses.is_dataclass(hint):
            yield from numbers(getattr(group, name), f"{prefix}{name}.")
        for kind in [hint, *(typing.get_args(hint) if typing.get_origin(hint) is not typing.Annotated else ())]:
            bounds = list(getattr(kind, "__metadata__", ()))
            if (bare := typing.get_args(kind)[0] if bounds else kind) in (int, float):
                yield prefix + name, bare, bounds


def outside(kind: type, bounds: list[Any]) -> Iterator[float]:
    """Values next to the bounds, where they are refused."""
    step = 1 if kind is int else 1e-9
    for bound in bounds:
        match bound:
            case Gt(limit) | Lt(limit):
                yield kind(limit)
            case Ge(limit):
                yield kind(limit - step)
            case Le(limit):
                yield kind(limit + 1)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_number_outside_its_bounds_is_refused_by_its_name(script):
    args = arguments_of(script)
    command_line.check_bounds(args)
    for name, kind, bounds in numbers(args):
        own_name = name.removeprefix("sft.").removeprefix("reward.").removeprefix("policy.")
        assert bounds or own_name in ANY_NUMBER, f"--{name} has no bound"
        for value in (*outside(kind, bounds), *TOO_LARGE[kind]):
            with pytest.raises(InputError, match=rf"^--{name} is .*; it must be [^\n]*$"):
                command_line.check_bounds(with_value(args, name, value))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_command_refuses_it_in_one_line_and_writes_nothing(script, tmp_path):
    """One value of each number."""
    for name, kind, bounds in numbers(arguments_of(script)):
        value = next(outside(kind, bounds), TOO_LARGE[kind][0])
        words = [*NEEDED.get(script, []), f"--{name}={value}"]
        result = run(Row(chapter=0, script=f"{script}.py", arguments=words), tmp_path)
        assert result.status == 2 and not result.stdout
        assert (
            result.stderr.startswith((f"error: --{name} is ", f"error: --{name}: all stages share it"))
            and result.stderr.count("\n") == 1
        )
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("script", TRAINING)
def test_a_call_of_train_refuses_it_too(script, tmp_path, monkeypatch):
    """Where no command line has been read."""
    monkeypatch.chdir(tmp_path)
    args, module = arguments_of(script), importlib.import_module(f"ppo_rlhf.{script.replace('/', '.')}")
    with pytest.raises(InputError, match=r"seed is -1; it must be at least 0"):
        module.train(dataclasses.replace(args, seed=-1))
    assert contents(tmp_path) == {}


def test_bounds_of_a_field_that_may_be_none():
    args = command_line.AdaptiveKLArgs(target=None)
    command_line.check_bounds(args)
    with pytest.raises(InputError, match=r"^--target is 0.0; it must be above 0$"):
        command_line.check_bounds(dataclasses.replace(args, target=0.0))


def test_text_that_is_not_unicode_is_refused():
    with pytest.raises(InputError, match=r"^--wandb_project_name '\\udcff' is not valid Unicode"):
        command_line.check_bounds(command_line.RunArgs(wandb_project_name="\udcff"))


def test_arguments_from_json_have_bounds_too():
    values = {"target": 1.0, "horizon": 0}
    with pytest.raises(InputError, match=r"^--horizon is 0; it must be above 0$"):
        command_line.from_dict(command_line.AdaptiveKLArgs, values)


def test_a_bound_that_nobody_knows_is_not_passed_over():
    """Only the four kinds that check_bounds knows are used."""
    of_all = [bound for script in SCRIPTS for _, _, bounds in numbers(arguments_of(script)) for bound in bounds]
    assert of_all and all(isinstance(bound, Ge | Gt | Le | Lt) for bound in of_all)
