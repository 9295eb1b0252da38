"""The correct forms with one expression changed, as faults that no list has: what mutation testing calls mutants.

If a function has the numbers of a form with `lam` where `gamma` belongs, that is what is wrong with it, or something
that cannot be told apart from it. The same changes show whether the cases are enough: each must fail one of them.
"""

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ppo_rlhf.check import faults, forms

BINARY = (ast.Add, ast.Sub, ast.Mult, ast.Div)
COMPARED = (ast.Gt, ast.GtE, ast.Lt, ast.LtE, ast.Eq)
OTHERS = {"sum": ["mean"], "mean": ["sum", "median"], "maximum": ["minimum"], "minimum": ["maximum"], "max": ["min"]}
OTHERS |= {"min": ["max"], "any": ["all"], "amax": ["amin"], "var": ["std"], "log_softmax": ["softmax"]}
TEXTS = {"name", "mode", "kind", "style", "score_at", "model"}  # arguments that are no numbers
AROUND = ("{}.detach()", "{}.abs()", "-{}", "{}.clamp(min=0)", "{}.clamp(max=1)", "{}.exp()", "{}**2")
AROUND += ("{}.bfloat16().to({}.dtype)", "{}.max()")
ENTRY = ("{}.detach()", "{}.abs()", "{} - {}.mean()", "{}.clamp(-1, 1)", "{}.roll(1, -1)", "{}.roll(-1, -1)")
ENTRY += ("{}.bfloat16().to({}.dtype)", "{} / {}.std()", "{}.flip(1)", "0 * {}")


@dataclass(kw_only=True)
class Change:
    """A function with one change. Its words and its text are to be asked for before the next one is made."""

    call: Callable
    words: Callable[[], str]
    text: Callable[[], str]


def of(function: str, text: str = "") -> Iterator[Change]:
    """All changes of a form, or of the text of a faulty one."""
    tree = ast.parse(text or faults.text_of(faults.form(function)))
    body = tree.body[0].body
    for place in ast.walk(tree):
        for child in ast.iter_child_nodes(place):
            child.parent = place
    for line in entries(function):
        body.insert(1, ast.parse(line).body[0])  # after the docstring
        yield from compiled(tree, function, lambda line=line: f"`{line}` at its beginning")
        del body[1]
    names = names_of(tree.body[0])
    for statement in body[1:]:
        for old in list(ast.walk(statement)):
            if isinstance(old, ast.expr) and not isinstance(getattr(old, "ctx", None), ast.Store):
                for new in replacements(old, names):
                    inside = getattr(new, "parent", None)  # if a part of the expression takes its place
                    ast.fix_missing_locations(new)
                    replace(old, new)
                    yield from compiled(tree, function, lambda old=old, new=new: in_words(old, new))
                    replace(new, old)
                    new.parent = inside


def compiled(tree: ast.Module, function: str, words: Callable[[], str]) -> Iterator[Change]:
    """One change, or none if the tree is no program."""
    namespace = dict(vars(forms))
    try:
        exec(compile(tree, f"<{function}, changed>", "exec"), namespace)
    except (SyntaxError, ValueError, TypeError):
        return
    yield Change(call=namespace[function], words=words, text=lambda: ast.unparse(tree))


def in_words(old: ast.expr, new: ast.expr) -> str:
    """What takes the place of what, each with as much around it."""
    steps = steps_around(new)
    replace(new, old)
    steps = max(steps, steps_around(old))
    instead = around(old, steps)
    replace(old, new)
    return f"`{around(new, steps)}` in place of `{instead}`"


def entries(function: str) -> Iterator[str]:
    """Lines for the beginning: an argument is ignored, two are swapped, or a tensor is not what it should be."""
    parameters = inspect.signature(getattr(forms, function)).parameters
    for name, parameter in parameters.items():
        if parameter.default is not parameter.empty:
            yield f"{name} = {parameter.default!r}" if name != "cap" else "cap = math.inf"
        if parameter.annotation is forms.Tensor:
            yield from (f"{name} = {form.replace('{}', name)}" for form in ENTRY)
    alike: dict[Any, list[str]] = {}
    for name, parameter in parameters.items():
        alike.setdefault(str(parameter.annotation).removesuffix(" | None"), []).append(name)
    for group in alike.values():
        yield from (f"{a}, {b} = {b}, {a}" for i, a in enumerate(group) for b in group[i + 1 :])


def names_of(definition: ast.FunctionDef) -> list[str]:
    """Arguments and variables that may be confused."""
    stored = [x.id for x in ast.walk(definition) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)]
    parameters = [x.arg for x in definition.args.args]
    return [name for name in dict.fromkeys([*parameters, *stored]) if name not in TEXTS]


def replacements(node: ast.expr, names: list[str]) -> Iterator[ast.expr]:
    """What may be in the place of an expression."""
    if isinstance(node, ast.Name):
        if node.id not in names:
            return
        yield from (ast.Name(name, ast.Load()) for name in names if name != node.id)
        yield from (ast.BinOp(ast.Name(node.id, ast.Load()), kind(), ast.Constant(1)) for kind in (ast.Add, ast.Sub))
    elif isinstance(node, ast.Constant):
        x = node.value
        if isinstance(x, bool) or not isinstance(x, int | float):
            return
        values = [x + 1, x - 1, 2 * x, x / 2, -x, 0] if isinstance(x, int) else [x / 2, 2 * x, 1e-2, 0.1, 0.5]
        values += [] if isinstance(x, int) else [1e-4, 1e-5, 1e-6, 1e-8, 0.0, 1.0]
        yield from (number(value) for value in values if value != x)
        return
    elif isinstance(node, ast.BinOp):
        yield from (node.left, node.right)
        kinds = BINARY if isinstance(node.op, BINARY) else (ast.BitAnd, ast.BitOr, ast.Mult)
        yield from (ast.BinOp(node.left, kind(), node.right) for kind in kinds if not isinstance(node.op, kind))
        if isinstance(node.op, ast.Sub | ast.Div):
            yield ast.BinOp(node.right, node.op, node.left)
        if isinstance(node.op, ast.Div):
            yield ast.BinOp(node.left, ast.FloorDiv(), node.right)
        if isinstance(node.op, ast.Pow):
            yield ast.parse("{0} * {0}.detach()".format(ast.unparse(node.left)), mode="eval").body
    elif isinstance(node, ast.Compare):
        for kind in COMPARED:
            if not isinstance(node.ops[0], kind):
                yield ast.Compare(node.left, [kind()], node.comparators)
        yield from (ast.Constant(True), ast.Constant(False))
        return
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield from (node.body, node.orelse)
    elif isinstance(node, ast.Call):
        yield from of_call(node)
    elif not isinstance(node, ast.Subscript):
        return
    if not isinstance(node.parent, ast.Attribute | ast.keyword | ast.Slice) and not isinstance(node, ast.IfExp):
        text = ast.unparse(node)
        text = f"({text})" if isinstance(node, ast.BinOp | ast.UnaryOp) else text
        yield from (ast.parse(form.replace("{}", text), mode="eval").body for form in AROUND)


def number(x: float) -> ast.expr:
    return ast.Constant(x) if x >= 0 else ast.UnaryOp(ast.USub(), ast.Constant(-x))


def of_call(node: ast.Call) -> Iterator[ast.expr]:
    """Calls without the function, of another function, and with fewer arguments."""
    method = isinstance(node.func, ast.Attribute)
    on_module = method and isinstance(node.func.value, ast.Name) and node.func.value.id in ("torch", "math")
    if method and not on_module:
        yield node.func.value
    elif node.args:
        yield from node.args[:2]
    if method:
        for other in OTHERS.get(node.func.attr, []):
            yield ast.Call(ast.Attribute(node.func.value, other, ast.Load()), node.args, node.keywords)
        if node.func.attr in ("maximum", "minimum"):
            yield ast.parse("({} + {}) / 2".format(*map(ast.unparse, node.args)), mode="eval").body
        if node.func.attr == "clamp" and len(node.args) == 2:
            for key, x in zip(("min", "max"), node.args, strict=True):
                yield ast.Call(node.func, [], [ast.keyword(key, x)])
    elif isinstance(node.func, ast.Name) and node.func.id in OTHERS:
        yield ast.Call(ast.Name(OTHERS[node.func.id][0], ast.Load()), node.args, node.keywords)
    for key in node.keywords:
        yield ast.Call(node.func, node.args, [other for other in node.keywords if other is not key])


def replace(old: ast.expr, new: ast.expr) -> None:
    """Put one expression in the place of another."""
    parent = old.parent
    for name, value in ast.iter_fields(parent):
        if value is old:
            setattr(parent, name, new)
        elif isinstance(value, list) and any(x is old for x in value):
            value[next(i for i, x in enumerate(value) if x is old)] = new
        else:
            continue
        break
    new.parent = parent


def steps_around(node: ast.AST) -> int:
    """How many times the expression around an expression is to be taken, until it can be found in a text."""
    if not isinstance(node.parent, ast.expr | ast.keyword):
        return 0 if len(ast.unparse(node.parent).splitlines()[0]) >= 90 else 1
    small = len(ast.unparse(node)) < 24 or isinstance(node, ast.Tuple | ast.Slice | ast.keyword)
    return 1 + steps_around(node.parent) if small else 0


def around(node: ast.AST, steps: int) -> str:
    for _ in range(steps):
        node = node.parent
    return ast.unparse(node).splitlines()[0]
