"""Calling somebody else's function: the arguments that it takes, in the form that it takes, and what it returned."""

import dataclasses
import inspect
import re
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


class Refused(Exception):
    """The function is called in no case, so nothing is known of its numbers. The message says why."""


class Wrong(Exception):
    """The result cannot be compared. The message says why."""


Answer = dict[str, Tensor] | str | LeftOut | Refused
"""what a function gave in a case, what is wrong with it, or why it was not asked"""


def outputs_of(function: Callable, case: Any, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The results of a function in a case, by the names of what is expected: float64 tensors on the CPU.

    It is called with float32 tensors of which one requires a gradient. If that raises, it is called with float64
    tensors, then without gradients, then with NumPy arrays. A dtype asks for a single call.
    """
    takes = signature_of(function, case.function)
    attempts = [(dtype, True, False)] if dtype else ATTEMPTS[-1:] if takes.only_arrays else ATTEMPTS
    first: Exception | None = None
    for attempt in attempts:
        try:
            return attempted(function, takes, case, *attempt)
        except (LeftOut, Wrong):
            raise
        except NotImplementedError as error:
            raise LeftOut(f"not implemented{f': {error}' if str(error) else ''}") from error
        except Exception as error:  # whatever somebody else's code may raise
            first, last = first or error, error
    raise first if "numpy" in str(last) else last  # code that has no use for arrays says so: 'numpy.ndarray' ...


ATTEMPTS = (  # dtype, with gradients, as arrays
    (torch.float32, True, False),
    (torch.float64, True, False),
    (torch.float64, False, False),
    (torch.float64, False, True),
)


def attempted(
    function: Callable, takes: "Signature", case: Any, dtype: torch.dtype, with_gradient: bool, as_arrays: bool
) -> dict[str, Tensor]:
    arguments = converted(case.arguments, dtype)
    before = converted(arguments, dtype)
    leaves = leaves_of(arguments, case.gradient_of) if case.gradient_of and with_gradient else []
    with torch.set_grad_enabled(with_gradient):
        results = results_of(case.run(bound(function, takes, case.function, as_arrays), arguments), case, leaves)
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

    Where one result is expected, a list is that result unless it holds metrics, and the first entry of a tuple is.
    """
    if isinstance(returned, tuple) and returned and isinstance(returned[0], tuple) and isinstance(returned[-1], dict):
        returned = returned[0]  # of ((advantages, returns), metrics)
    fields = fields_of(returned)
    if fields is not None:
        named = next((keys for keys in (names, ["loss"]) if any(key in fields for key in keys)), None)
        return [fields.get(name) for name in named] if named else list(fields.values())[: len(names)]
    if isinstance(returned, list) and len(names) == 1 and not any(isinstance(x, dict) for x in returned):
        return [torch.stack(returned) if returned and isinstance(returned[0], Tensor) else returned]
    return list(returned)[: len(names)] if isinstance(returned, tuple | list) else [returned]


def fields_of(returned: Any) -> dict[str, Any] | None:
    """The entries of a dict, named tuple, dataclass or other plain object by name."""
    if isinstance(returned, dict):
        return returned
    if hasattr(returned, "_asdict"):
        return returned._asdict()
    if dataclasses.is_dataclass(returned):  # also one with slots
        return {field.name: getattr(returned, field.name) for field in dataclasses.fields(returned)}
    return None if isinstance(returned, Tensor | np.ndarray) else getattr(returned, "__dict__", None) or None


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signature:
    """Which arguments of its form a function gets by position, in this order, and which by name.

    parameters: those of the function itself. If it hides others, only a call shows which ones it takes.
    """

    positions: list[str]
    names: list[str]
    parameters: Mapping[str, Parameter]

    @property
    def only_arrays(self) -> bool:
        kinds = [str(p.annotation).lower() for p in self.parameters.values()]
        return any("ndarray" in kind and "tensor" not in kind for kind in kinds)


JIT = (torch.jit.ScriptFunction, torch.jit.ScriptModule, torch.ScriptMethod)
UNREADABLE = {"args": Parameter("args", Parameter.VAR_POSITIONAL)}


def signature_of(function: Callable, name: str) -> Signature:
    """How to call a function. name: its form."""
    form = inspect.signature(getattr(forms, name)).parameters
    if isinstance(getattr(function, "func", function), JIT):  # also of a partial
        raise Refused(f"torch.jit is not supported; wrap it in a Python function of ({', '.join(form)})")
    try:
        whole = inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function).parameters
    except (TypeError, ValueError):  # compiled code, such as torch.sub
        whole = UNREADABLE
    kinds = {kind: [key for key, p in whole.items() if p.kind is kind] for kind in type(Parameter.VAR_KEYWORD)}
    positions, either, names = kinds[Parameter.POSITIONAL_ONLY], kinds[Parameter.POSITIONAL_OR_KEYWORD], []
    if kinds[Parameter.VAR_POSITIONAL] and not kinds[Parameter.VAR_KEYWORD]:
        order = [key for key in form if key not in kinds[Parameter.KEYWORD_ONLY]]
        if any(key in form and key != place for key, place in zip(positions + either, order, strict=False)):
            raise Refused(f"because of *args, its arguments must have the order {', '.join(order)}")
        positions, either = order, []
    elif not form.keys() & {*positions}:
        positions = [*form][: len(positions)]  # nobody can call them by their own names
    names = either + kinds[Parameter.KEYWORD_ONLY]
    strange = [key for key in positions + names if key not in form and whole[key].default is Parameter.empty]
    if strange:
        raise Refused(f"it takes {', '.join(strange)}; the arguments of {name} are {', '.join(form)}")
    names = [key for key in form if key not in positions and (key in names or kinds[Parameter.VAR_KEYWORD])]
    return Signature(positions=positions, names=names, parameters=whole)


REFUSED = re.compile(r"unexpected keyword argument '(\w+)'")
ONLY_BY_POSITION = re.compile(r"positional-only arguments passed as keyword arguments: '([\w, ]+)'")
TOO_MANY = re.compile(r"positional arguments? but|arguments?,? (got|\()|combination of arguments")


def bound(function: Callable, takes: Signature, name: str, as_arrays: bool) -> Callable:
    """The function, for calls with all arguments of its form by name: it gets those that it takes."""
    form = inspect.signature(getattr(forms, name)).parameters
    own = {key: p.default for key, p in takes.parameters.items() if key not in form}
    defaults = own | {key: p.default for key, p in form.items() if p.default is not p.empty}

    def given(x: Any) -> Any:
        if as_arrays and isinstance(x, list):
            return [given(part) for part in x]
        return x.numpy() if as_arrays and isinstance(x, Tensor) else x

    def call(**arguments: Any) -> Any:
        arguments = defaults | arguments  # the function's own defaults may be others
        positions, names, values = [*takes.positions], [*takes.names], dict(arguments)
        refused: dict[str, TypeError] = {}
        while True:
            taken = positions + names
            groups = takes.parameters.get("groups")
            by_size = "group_size" in taken and (groups is None or groups.default is None)
            if "groups" in arguments and arguments["groups"] is None and not by_size:
                raise LeftOut("no group_size alone")
            for key in [key for key in form if key in arguments and key not in taken]:
                in_groups = key == "groups" and "group_size" in taken and arguments.get("group_size")
                if key not in EXTRA and not in_groups and not is_neutral(arguments[key], form[key].default):
                    raise LeftOut(f"no {key}")
            first = [given(values[key]) for key in positions if key in values]
            try:
                returned = function(*first, **{key: given(values[key]) for key in names if key in values})
            except TypeError as error:
                moved = ONLY_BY_POSITION.search(str(error))
                if moved and {*moved[1].split(", ")} <= {*names} - takes.parameters.keys():
                    positions += moved[1].split(", ")
                    names = [key for key in names if key not in positions]
                    continue
                found = REFUSED.search(str(error))
                key = found[1] if found else positions[-1] if positions and TOO_MANY.search(str(error)) else ""
                if key not in taken or key in takes.parameters:
                    raise
                if key in defaults and key not in refused:  # is it only this value that it refuses?
                    refused[key], values[key] = error, defaults[key]
                else:
                    refused.pop(key, None)
                    (names if key in names else positions).remove(key)
                continue
            for error in refused.values():
                raise error
            return returned

    return call


def is_neutral(x: Any, default: Any) -> bool:
    """Whether an argument says no more than its default: a full mask, or the same value."""
    if isinstance(x, list):
        return all(is_neutral(part, default) for part in x)
    if isinstance(x, Tensor):
        return x.dtype == torch.bool and bool(x.all())
    return x is default or x == default
