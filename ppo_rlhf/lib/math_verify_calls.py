"""Compares mathematics with the library math-verify. It runs in a worker, see confined_worker.py."""

import sys

from math_verify import LatexExtractionConfig, parse, verify

sys.set_int_max_str_digits(0)  # a number may have any number of digits; the worker's time is the limit


def equal(*contents: str) -> bool:
    """Whether the contents of two boxes, the correct answer first, are both mathematics and equal."""
    # [V19] First the correct answer is read, then the other; verify() takes them in this order.
    latex = [LatexExtractionConfig(boxed_match_priority=0)]
    parsed = []
    for text in contents:
        text = text.replace(r"\bmod", r"\mod")  # the library knows only the second
        box = f"\\boxed{{{text}}}"
        parsed.append(parse(box, latex, fallback_mode="no_fallback", parsing_timeout=None))
    return all(parsed) and verify(*parsed, timeout_seconds=None)


if not equal("2", "1+1"):
    raise ImportError("it cannot calculate")
