"""The process in which math-verify reads and compares mathematics, for lib/rewards.py.

It writes "ready". Then it reads lines, each a JSON list of two texts, the correct answer first, and answers each with
True, if both are mathematics and equal, or False. A text is the content of a box.

Expressions from a language model may take for ever, and compute where no handler of Python's is called. So the kernel
ends the process after SECONDS of computing, or above MEMORY, and whoever asked begins another.
"""

import contextlib
import json
import os
import resource
import signal
import sys

from math_verify import LatexExtractionConfig, parse, verify

SECONDS = 5.0
MEMORY = 4 * 2**30  # bytes


def is_true(contents: list[str]) -> bool:
    # [V19] First the correct answer is read, then the other; verify() takes them in this order.
    latex = [LatexExtractionConfig(boxed_match_priority=0)]
    parsed = []
    for text in contents:
        text = text.replace(r"\bmod", r"\mod")  # the library knows only the second
        box = f"\\boxed{{{text}}}"
        parsed.append(parse(box, latex, fallback_mode="no_fallback", parsing_timeout=None))
    return all(parsed) and verify(*parsed, timeout_seconds=None)


def main() -> None:
    with contextlib.suppress(ValueError):  # where there is no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    sys.set_int_max_str_digits(0)  # a number may have any number of digits; SECONDS is the limit
    print("ready" if is_true(["2", "1+1"]) else "it cannot calculate", flush=True)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of this process's own time; what it does then ends it
        answer = is_true(json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
