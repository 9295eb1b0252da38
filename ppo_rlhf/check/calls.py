"""Calling somebody else's function: the arguments that it takes, in the form that it takes, and what it returned."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppo_rlhf.check import forms

EXTRA = {"generation_tokens", "group_size"}  # a function may do without them


class LeftOut(Exception):
    """The function cannot be asked this. The message says why."""


class Wrong(Exception):
    """The result cannot be compared. The message says why."""


def outputs_of(function: Callable, case: Any, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The results of a function in a case, by the names of what is expected: float64 tensors on the CPU.

    It is called with float32 tensors. Where that raises, it is called again with float64, without gradients, and with
    arrays; a dtype asks for that one only.
    """
    first: Exception | None = None
    for attempt in [(dtype, True, False)] if dtype else ATTEMPTS:
        try:
            return attempted(function, case, *attempt)
        except (LeftOut, Wrong):
            raise
        except NotImplementedError as error:
            raise LeftOut(f"not implemented{f': {error}' if str(error) else ''}") from error
        except Exception as error:  # whatever somebody else's code may raise
            first = first or error
    raise first


ATTEMPTS = [  # dtype, with gradients, as arrays
    (torch.float32, True, False),
    (torch.float64, True, False),
    (torch.float32, False, False),
    (torch.float64, False, False),
    (torch.float64, False, True),
]


def attempted(
    function: Callable, case: Any, dtype: torch.dtype, with_gradient: bool, as_arrays: bool
) -> dict[str, Tensor]:
    arguments = {name: converted(x, dtype) for name, x in case.arguments.items()}
    leaf = arguments[case.gradient_of].requires_grad_() if case.gradient_of and with_gradient else None
    before = {name: snapshot(x) for name, x in arguments.items()}
    with torch.set_grad_enabled(with_gradient):
        returned = case.run(bound(function, case.function, as_arrays), arguments)
    changed = [name for name, x in arguments.items() if not same(snapshot(x), before[name])]
    if changed:
        raise Wrong(f"it changed its argument {', '.join(changed)}")
    names = [name for name in case.expected if name != "gradient"] or names_of(returned)
    found = {}
    for name, x in zip(names, several(returned, names), strict=False):
        if x is not None:
            found[name] = as_tensor(x)
            expected = case.expected.get(name)
            if expected is not None and found[name].shape != expected.shape:
                if found[name].numel() != 1 or expected.numel() != 1:
                    raise Wrong(f"shape {tuple(found[name].shape)} where {tuple(expected.shape)} is expected")
                found[name] = found[name].reshape(expected.shape)
    if not found:
        raise Wrong("it returned None")
    result = several(returned, names[:1])[0]
    if leaf is not None and isinstance(result, Tensor) and result.requires_grad:
        (gradient,) = torch.autograd.grad(result.sum(), leaf, allow_unused=True)
        found["gradient"] = torch.zeros_like(leaf).double() if gradient is None else gradient.double()
    return found


def converted(x: Any, dtype: torch.dtype) -> Any:
    """A copy of an argument, with real numbers in a dtype."""
    if isinstance(x, list):
        return [converted(part, dtype) for part in x]
    if isinstance(x, dict):
        return {name: converted(part, dtype) for name, part in x.items()}
    if not isinstance(x, Tensor):
        return x
    return x.detach().to(dtype, copy=True) if x.is_floating_point() else x.clone()


def snapshot(x: Any) -> Any:
    if isinstance(x, list):
        return [snapshot(part) for part in x]
    return x.detach().clone() if isinstance(x, Tensor) else None


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return all(same(*pair) for pair in zip(one, other, strict=True))
    return one is None or torch.equal(one.nan_to_num(), other.nan_to_num())


def several(returned: Any, names: list[str]) -> list[Any]:
    """The results that a function returned: one, those of a tuple, or of a dict, by name if it has the names."""
    if isinstance(returned, dict):
        named = any(name in returned for name in names)
        returned = tuple(map(returned.get, names) if named else returned.values())
    if isinstance(returned, tuple) or (isinstance(returned, list) and len(names) > 1):
        return list(returned)
    return [returned]


def names_of(returned: Any) -> list[str]:
    """Names for the results of a form, which may be a pair."""
    return ["advantages", "returns"] if isinstance(returned, tuple) else ["result"]


def as_tensor(x: Any) -> Tensor:
    try:
        return (
            x.detach().cpu().double() if isinstance(x, Tensor) else torch.from_numpy(np.asarray(x, dtype=np.float64))
        )
    except (TypeError, ValueError) as error:
        raise Wrong(f"it returned {type(x).__name__}, which holds no numbers") from error


def bound(function: Callable, name: str, as_arrays: bool) -> Callable:
    """The function, for calls with all arguments of its form: it gets those that it takes."""
    form = inspect.signature(getattr(forms, name)).parameters
    defaults = {key: p.default for key, p in form.items() if p.default is not p.empty}
    try:
        takes = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C: all arguments, by position
        return lambda **arguments: function(*(given(arguments[key]) for key in form if key in arguments))

    def given(x: Any) -> Any:
        if as_arrays:
            return [given(part) for part in x] if isinstance(x, list) else x.numpy() if isinstance(x, Tensor) else x
        return x

    everything = any(p.kind is p.VAR_KEYWORD for p in takes)
    names = [p.name for p in takes if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    strange = [p.name for p in takes if p.name in names and p.name not in form and p.default is p.empty]
    positional = {p.name for p in takes if p.kind is p.POSITIONAL_ONLY}

    def call(**arguments: Any) -> Any:
        arguments = defaults | arguments  # the function's own defaults may be others
        if strange:
            raise Wrong(f"it takes {', '.join(strange)}; the arguments of {name} are {', '.join(form)}")
        lacking = [] if everything else [key for key in arguments if key not in names]
        for key in lacking:
            in_groups = key == "groups" and "group_size" in names and arguments.get("group_size")
            if key not in EXTRA and not in_groups and not is_neutral(arguments[key], form[key].default):
                raise LeftOut(f"no {key}")
        kept = {key: given(x) for key, x in arguments.items() if key not in lacking}
        first = [kept.pop(key) for key in names if key in positional and key in kept]
        return function(*first, **kept)

    return call


def is_neutral(x: Any, default: Any) -> bool:
    """Whether an argument says no more than its default: a full mask, or the same value."""
    if isinstance(x, list):
        return all(is_neutral(part, default) for part in x)
    if isinstance(x, Tensor):
        return x.dtype == torch.bool and bool(x.all())
    return x is default or x == default
