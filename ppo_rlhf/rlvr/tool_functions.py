"""Tools that a response may call: a calculator, or a function `(call text) -> text` of the user's.

Whatever goes wrong becomes a short error text, which the policy reads like any other result: a call that cannot be
understood, a tool that raises an exception, never returns, ends its process, or answers at great length. The
calculator is safe by itself. A user's function runs in a process of its own, see confined_worker.py, which the kernel
ends when a call takes too long; the next call starts another. The first exception that it raises is shown to the
user, who may have made a mistake in the function. So is the end of its process, if that comes first.
"""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from ppo_rlhf.rlvr import confined_worker
from ppo_rlhf.train_policy import InputError, input_errors

# [V104] These are the answers to calls that fail. No call raises an exception.
SYNTAX, FAILED, TOO_SLOW, TOO_LONG = (f"error: {why}" for why in ("syntax", "failed", "too slow", "too long"))
Tool = Callable[[str], str]

MAX_CALLS = 8  # that are answered in a response; it ends at the next one

# ---- The calculator --------------------------------------------------------------------------------------------

LONGEST_VALUE = 12  # characters
LONGEST_CALL = 100  # characters; of numbers and + - * / alone, these stay small enough to compute at once
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculator(call: str) -> str:
    """The value of an expression of numbers, + - * / and parentheses: `12*(7+5)` gives 144, `7/2` gives 3.5."""
    if len(call) > LONGEST_CALL or not re.fullmatch(r"[0-9.+*/() -]+", call):
        return SYNTAX
    try:
        value = compute(ast.parse(call.strip(), mode="eval").body)
    except ZeroDivisionError:
        return FAILED
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):  # the last two: too deeply nested
        return SYNTAX
    text = str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"
    return text if len(text) <= LONGEST_VALUE else TOO_LONG


def compute(node: ast.expr) -> Fraction:
    """The value of a parsed expression; a ValueError if it has something else than `calculator` allows."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return Fraction(str(number))  # of 0.1 a tenth, not the nearest float
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -compute(operand)
        case ast.BinOp(op=operation) if type(operation) in OPERATIONS:
            return OPERATIONS[type(operation)](compute(node.left), compute(node.right))
    raise ValueError(ast.dump(node))


# ---- The user's ------------------------------------------------------------------------------------------------

SECONDS = 5.0  # that a call may take
LONGEST_ANSWER = 4_096  # characters


class OwnTool:
    """The function `package.module:name` in a process of its own; the module may be in the current folder."""

    def __init__(self, name: str, field: str):
        """field: the argument that names it, for messages."""
        self.name, self.failure_shown = name, False
        self.worker = confined_worker.Worker(name, computing=0, seconds=SECONDS, confined=False)
        with input_errors(f"--{field} {name}: give package.module:name of a function of a text"):
            self.worker.start()

    def __call__(self, call: str) -> str:
        try:
            text, problem = self.worker.ask(call)
        except ImportError as error:
            text, problem = None, str(error)
        if problem == confined_worker.SLOW:
            return TOO_SLOW
        if problem == confined_worker.LONG:
            return TOO_LONG
        if not problem and not isinstance(text, str):
            problem = f"TypeError: it returns {type(text).__name__}, not str"
        if not problem:
            return text if len(text) <= LONGEST_ANSWER else TOO_LONG
        if not self.failure_shown:
            self.failure_shown = True
            print(f"{self.name} failed on {call[:LONGEST_CALL]!r}: {problem!r}. Later failures are not shown.")
        return FAILED


def load_tool(name: str, field: str) -> Tool:
    """The tool of an argument: `calculator`, or a function of the user's."""
    if name == "calculator":
        return calculator
    if ":" not in name:
        raise InputError(f"--{field} {name}: unknown; there are calculator and package.module:name")
    return OwnTool(name, field)
