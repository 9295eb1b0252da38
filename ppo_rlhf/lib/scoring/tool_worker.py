"""The process in which a user's tool runs, for lib/scoring/tools.py.

    python tool_worker.py package.module:name <seconds> <descriptor>

It writes a JSON text to the descriptor: empty, or what is wrong with the function. Then it reads calls, each a JSON
text on a line of stdin, and answers each with a JSON list on a line: the text that the model reads, and why the
function failed, if it did. If a call takes longer than so many seconds, the kernel ends the process, whatever the
function does at that time. Whoever asked begins another.
"""

import functools
import importlib
import json
import os
import signal
import sys
import traceback

LONGEST = 4_096  # characters of an answer


def import_function(name: str):
    module, _, path = name.partition(":")
    sys.path.append("")
    function = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    if not callable(function):
        raise TypeError("that is no function")
    return function


def answer(function, call: str) -> tuple[str, str]:
    """The text that the model reads, and why the function failed; empty if it did not."""
    try:
        text = function(call)
        if not isinstance(text, str):
            raise TypeError(f"it returns {type(text).__name__}, not str")
        return text if len(text) <= LONGEST else "error: too long", ""
    except Exception as error:
        return "error: failed", traceback.format_exception_only(error)[-1].strip()[:LONGEST]


def main() -> None:
    name, seconds, descriptor = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    replies, calls = os.fdopen(descriptor, "w"), os.fdopen(os.dup(0), "r")
    sys.stdin = open(os.devnull)  # noqa: SIM115

    def reply(said: str | tuple[str, str]) -> None:
        replies.write(json.dumps(said) + "\n")
        replies.flush()

    try:
        function = import_function(name)
    except BaseException as error:
        reply(f"{type(error).__name__}: {error}")
        return
    reply("")
    for line in calls:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process
        signal.setitimer(signal.ITIMER_REAL, seconds)
        said = answer(function, json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply(said)


if __name__ == "__main__":
    main()
