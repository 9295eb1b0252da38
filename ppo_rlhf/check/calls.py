"""Calling somebody else's function: the arguments that its signature names, and what it returned."""

import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppo_rlhf.check import forms

EXTRA = {"generation_tokens", "group_size"}  # a function may do without them
MAY_DETACH = {"kl_estimate", "response_logprobs"}  # which rewards and rollouts use without a gradient


class LeftOut(Exception):
    """The function cannot be asked this. The message says why."""


class Wrong(Exception):
    """The result cannot be compared. The message says why."""


Answer = dict[str, Tensor] | str | LeftOut
"""what a function gave in a case, what is wrong with it, or why it was not asked"""


def outputs_of(function: Callable, case: Any, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The results of a function in a case, by the names of what is expected: float64 tensors on the CPU.

    It is called with float32 tensors of which one requires a gradient. If that raises, as in code that converts them
    to NumPy arrays, it is called with float64 tensors and without gradients. A dtype asks for a single call.
    """
    first: Exception | None = None
    for attempt in [(dtype, True)] if dtype else ATTEMPTS:
        try:
            return attempted(function, case, *attempt)
        except (LeftOut, Wrong):
            raise
        except NotImplementedError as error:
            raise LeftOut(f"not implemented{f': {error}' if str(error) else ''}") from error
        except Exception as error:  # whatever somebody else's code may raise
            first = first or error
    raise first


ATTEMPTS = ((torch.float32, True), (torch.float64, False))  # dtype, with gradients


def attempted(function: Callable, case: Any, dtype: torch.dtype, with_gradient: bool) -> dict[str, Tensor]:
    arguments = converted(case.arguments, dtype)
    before = converted(arguments, dtype)
    leaves = leaves_of(arguments, case.gradient_of) if case.gradient_of and with_gradient else []
    with torch.set_grad_enabled(with_gradient):
        results = results_of(case.run(bound(function, case.function), arguments), case, leaves)
    changed = [name for name, x in arguments.items() if not same(x, before[name])]
    if changed:
        raise Wrong(f"it changed its argument {', '.join(changed)}")
    return results


def results_of(returned: Any, case: Any, leaves: list[Tensor]) -> dict[str, Tensor]:
    """What a function returned, by the names of what is expected, with the gradient of the first result."""
    names = [name for name in case.expected if name != "gradient"] or names_of(returned)
    results = several(returned, names)
    found = {}
    for name, x in zip(names, results, strict=False):
        if x is not None:
            found[name] = fitted(x, case.expected.get(name))
    if not found:
        raise Wrong("it returned None")
    if leaves:
        counts = case.mask if case.mask is not None and case.mask.shape == found[names[0]].shape else None
        gradient = gradient_of(results[0], leaves, counts, may_detach=case.function in MAY_DETACH)
        if gradient is not None:
            found["gradient"] = gradient
    return found


def leaves_of(arguments: dict[str, Any], name: str) -> list[Tensor]:
    """The tensors of an argument, which from now on require a gradient. name: weights/x is an entry of a dict."""
    name, _, entry = name.partition("/")
    x = arguments[name][entry] if entry else arguments[name]
    return [each.requires_grad_() for each in (x if isinstance(x, list) else [x])]


def gradient_of(result: Any, leaves: list[Tensor], counts: Tensor | None, *, may_detach: bool) -> Tensor | None:
    """The gradient of the sum of what counts of a result, or the one that the function's own backward() has left.

    None if the result is an array or a number, which can have none. A tensor without a graph has the gradient 0.
    """
    if not isinstance(result, Tensor) or not result.requires_grad:
        if all(leaf.grad is None for leaf in leaves) and (may_detach or not isinstance(result, Tensor)):
            return None
        parts = [leaf.grad for leaf in leaves]
    else:
        total = result.sum() if counts is None else result.reshape(counts.shape)[counts].sum()
        parts = torch.autograd.grad(total, leaves, allow_unused=True)
    parts = [torch.zeros_like(leaf) if x is None else x for x, leaf in zip(parts, leaves, strict=True)]
    return (parts[0] if len(parts) == 1 else torch.cat([x.flatten() for x in parts])).double()


def converted(x: Any, dtype: torch.dtype) -> Any:
    """A copy of an argument, with real numbers in a dtype."""
    if isinstance(x, list):
        return [converted(part, dtype) for part in x]
    if isinstance(x, dict):
        return {name: converted(part, dtype) for name, part in x.items()}
    if not isinstance(x, Tensor):
        return x
    return x.detach().to(dtype, copy=True) if x.is_floating_point() else x.clone()


def same(one: Any, other: Any) -> bool:
    """Whether two arguments, if they are tensors, hold the same."""
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return not isinstance(one, Tensor) or torch.equal(one.nan_to_num(), other.nan_to_num())


def several(returned: Any, names: list[str]) -> list[Any]:
    """The results that a function returned: one, or those of a tuple, list, dict or object, by name if possible.

    Where one result is expected, a list is that result, and the first entry of a tuple is.
    """
    fields = fields_of(returned)
    if fields is not None:
        named = next((keys for keys in (names, ["loss"]) if any(key in fields for key in keys)), None)
        return [fields.get(name) for name in named] if named else list(fields.values())
    if isinstance(returned, list) and len(names) == 1:
        return [torch.stack(returned) if returned and isinstance(returned[0], Tensor) else returned]
    return list(returned) if isinstance(returned, tuple | list) else [returned]


def fields_of(returned: Any) -> dict[str, Any] | None:
    """The entries of a dict, named tuple, dataclass or other plain object by name."""
    if isinstance(returned, dict):
        return returned
    if hasattr(returned, "_asdict"):
        return returned._asdict()
    return None if isinstance(returned, Tensor | np.ndarray) else getattr(returned, "__dict__", None)


def fitted(x: Any, expected: Tensor | None) -> Tensor:
    """A result as a tensor of the expected shape. One column is as good as a vector, and (1,) as a number."""
    x = as_tensor(x)
    if expected is None or x.shape == expected.shape:
        return x
    if (x.numel() == expected.numel() == 1) or x.shape == (*expected.shape, 1) == (len(x), 1):
        return x.reshape(expected.shape)
    raise Wrong(f"shape {tuple(x.shape)} where {tuple(expected.shape)} is expected")


def names_of(returned: Any) -> list[str]:
    """Names for the results of a form, which may be a pair."""
    return ["advantages", "returns"] if isinstance(returned, tuple) else ["result"]


def as_tensor(x: Any) -> Tensor:
    try:
        x = x.detach().cpu().double().numpy() if isinstance(x, Tensor) else np.array(x, dtype=np.float64)
        return torch.from_numpy(x)  # so a class of the adapter's own ends here
    except (TypeError, ValueError) as error:
        raise Wrong(f"it returned {type(x).__name__}, which holds no numbers") from error


def bound(function: Callable, name: str) -> Callable:
    """The function, for calls with all arguments of its form: it gets those that its signature names."""
    form = inspect.signature(getattr(forms, name)).parameters
    defaults = {key: p.default for key, p in form.items() if p.default is not p.empty}
    takes = parameters_of(function, ", ".join(form))
    names = {*form} if any(p.kind is p.VAR_KEYWORD for p in takes.values()) else {*takes}
    strange = [key for key, p in takes.items() if key in names - {*form} and p.default is p.empty]
    if strange:
        raise Wrong(f"it takes {', '.join(strange)}; the arguments of {name} are {', '.join(form)}")
    by_size = "group_size" in names and ("groups" not in names or takes["groups"].default is None)

    def call(**arguments: Any) -> Any:
        arguments = defaults | arguments  # the function's own defaults may be others
        if "groups" in arguments and arguments["groups"] is None and not by_size:
            raise LeftOut("no group_size alone")
        for key in [key for key in form if key in arguments and key not in names]:
            in_groups = key == "groups" and "group_size" in names and arguments.get("group_size")
            if key not in EXTRA and not in_groups and not is_neutral(arguments[key], form[key].default):
                raise LeftOut(f"no {key}")
        return function(**{key: x for key, x in arguments.items() if key in names})

    return call


def parameters_of(function: Callable, expected: str) -> Mapping[str, Parameter]:
    """What a function takes, if its signature has it all by name."""
    try:
        takes = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin, such as torch.sub
        takes = {}
    if not takes or any(p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL) for p in takes.values()):
        raise Wrong(f"its signature does not name its arguments; wrap it in a function of ({expected})")
    return takes


def is_neutral(x: Any, default: Any) -> bool:
    """Whether an argument says no more than its default: a full mask, or the same value."""
    if isinstance(x, list):
        return all(is_neutral(part, default) for part in x)
    if isinstance(x, Tensor):
        return x.dtype == torch.bool and bool(x.all())
    return x is default or x == default
