"""Tools that a response may call: a calculator, or a function `(call text) -> text` of the user's.

Whatever goes wrong becomes a short error text, which the policy reads like any other result: a call that cannot be
understood, a tool that raises an exception, never returns, ends its process, or answers at great length. The
calculator is safe by itself. A user's function runs in a process of its own, tool_worker.py, which the kernel ends
when a call takes too long; the next call starts another. The first exception that it raises is shown to the user, who
may have made a mistake in the function. So is the end of its process, if that comes first.
"""

import ast
import contextlib
import json
import operator
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from ppo_rlhf.lib.base.errors import InputError, flag

# [V104] These are the answers to calls that fail. No call raises an exception.
SYNTAX, FAILED, TOO_SLOW, TOO_LONG = (f"error: {why}" for why in ("syntax", "failed", "too slow", "too long"))
ERRORS = (SYNTAX, FAILED, TOO_SLOW, TOO_LONG)
Tool = Callable[[str], str]

# ---- The calculator --------------------------------------------------------------------------------------------

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
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"


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

LONGEST_LIMIT = 86_400.0  # seconds that a call may be given; the kernel's timers take no number however large


class OwnTool:
    """The function `package.module:name` in a process of its own; the module may be in the current folder."""

    def __init__(self, name: str, field: str, seconds: float):
        """field: the argument that names it, for messages. seconds: that a call may take."""
        self.name, self.seconds, self.process, self.failure_shown = name, seconds, None, False
        problem = self.start()
        if problem:
            raise InputError(f"{flag(field)} {name}: {problem}; write package.module:name of a function of a text")

    def start(self) -> str:
        """Start the process. Returns what is wrong with the function, or nothing."""
        ours, theirs = os.pipe()
        program = Path(__file__).with_name("tool_worker.py")
        self.process = subprocess.Popen(
            [sys.executable, "-P", program, self.name, str(self.seconds), str(theirs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs],
            start_new_session=True,  # so that a Ctrl-C reaches the script alone
        )
        os.close(theirs)
        self.answers = os.fdopen(ours, "rb")
        return json.loads(self.answers.readline() or '"its process ends while it is imported"')

    def __call__(self, call: str) -> str:
        reply, asked = b"", time.monotonic()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(call).encode() + b"\n")
            self.process.stdin.flush()
            # The kernel ends the process after so many seconds, unless the function has changed its alarm.
            if select.select([self.answers], [], [], self.seconds + 1)[0]:
                reply = self.answers.readline()
        if reply.endswith(b"\n"):
            text, problem = json.loads(reply)
            self.tell(call, problem)
            return text
        slow = time.monotonic() - asked >= self.seconds
        if not slow:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)  # it has closed its end, but may not have ended yet
            self.tell(call, f"its process ended with status {self.process.returncode}")
        self.close()
        self.start()
        return TOO_SLOW if slow else FAILED

    def tell(self, call: str, problem: str) -> None:
        """Show the first problem, if there is one."""
        if problem and not self.failure_shown:
            self.failure_shown = True
            print(f"{self.name} failed on {call[:LONGEST_CALL]!r}: {problem!r}. Later failures are not shown.")

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()
        self.answers.close()


def load_tool(name: str, field: str, seconds: float) -> Tool:
    """The tool of an argument: `calculator`, or a function of the user's."""
    if name == "calculator":
        return calculator
    if ":" not in name:
        raise InputError(f"{flag(field)} {name}: unknown; there are calculator and package.module:name")
    return OwnTool(name, field, seconds)
