"""Compares mathematics with the library math-verify. It runs in a worker, see confined_worker.py.

The library leaves out units and rounds to six decimals. So units are compared here, and tiny numbers get more digits.
"""

import re
import sys

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Expr, MatrixBase, S, Symbol, log, preorder_traversal
from sympy.physics import units

sys.set_int_max_str_digits(0)  # a number may have any number of digits; the worker's time is the limit

# Names that sympy's units don't have, after the name that they mean.
ALIASES = """
    meter metre metres, liter litre litres, inch in, pound lb lbs, ounce ounces oz, gram gm gms, second sec secs
    minute min mins, hour hr hrs, week weeks, month months, year yr yrs, acre acres, gallon gallons gal, ton tons
    percent % pct, dollar dollars, cent cents, celsius C Celsius, fahrenheit F Fahrenheit, calorie calories cal
    kilocalorie kilocalories kcal, kilowatt kilowatts kW, megawatt megawatts MW, kilojoule kilojoules kJ
    kilonewton kilonewtons kN, kilovolt kilovolts kV, millivolt millivolts mV, milliampere milliamperes mA
    kilohertz kHz, megahertz MHz, gigahertz GHz, kilobyte kilobytes kB, megabyte megabytes MB, gigabyte gigabytes GB
"""
NAMES = {name: line.split()[0] for line in re.split(",|\n", ALIASES) for name in line.split()}
REWRITTEN = {
    r"\\\$\s*([0-9.,]+)": r"\1 dollar",
    r"\\%": "%",
    r"}\s*{": "/",  # of \frac{m}{s}
    r"\\[A-Za-z]+|\\.|~": " ",  # what is left of \text{ cm}, \,\mathrm{cm} and 5~cm is the unit
    r"[{}]": "",
    r"\b(?:square|sq)\b\.? *([A-Za-z]+)": r"\1^2",
    r"\b(?:cubic|cu)\b\.? *([A-Za-z]+)": r"\1^3",
    r"\bmph\b": "mile/hour",
    r"\bper\b": "/",
}


def unit(text: str) -> Expr | None:
    """The unit after the number of an answer: meter/second for `v = 5\\text{ m/s}`; None if none is known."""
    text = text.rpartition("=")[2]
    for pattern, new in REWRITTEN.items():
        text = re.sub(pattern, new, text)
    number, first, rest = re.match(r"([^A-Za-z%]*)([A-Za-z%]?)(.*)", text, re.DOTALL).groups()
    if not first or not re.search("[0-9]", number):
        return None
    product, sign = S.One, 1
    for part, name, power in re.findall(r"(([A-Za-z]+|%)(?: *\^ *(-?[0-9]{1,3}))?|\S)", first + rest):
        if part == "/":
            sign = -1
            continue
        known = getattr(units, NAMES.get(name, name) or "_", None)
        if not isinstance(known, units.Quantity):
            if name not in NAMES:
                return None
            known = Symbol(NAMES[name])
        product *= known ** (sign * int(power or 1))
    return product


def decimals(expressions: list[Basic | MatrixBase]) -> int:
    """The place of the first digit of the smallest number in them, if it is below 0.001; else 0."""
    places = [0]
    for expression in expressions:
        walk = preorder_traversal(expression)
        for part in walk:
            if isinstance(part, Expr) and part.is_number:
                walk.skip()  # 10^{-4} in 5000 * 10^{-4} is no number of its own
                size = abs(part.evalf(3))
                if size.is_Float and 0 < size < 0.001:
                    places.append(-int(log(size, 10)))
    return max(places)


def equal(*contents: str) -> bool:
    """Whether the contents of two boxes, the correct answer first, are both mathematics and equal.

    Units are compared if both have one. Numbers below 0.001 must agree to 12 digits, others to six decimals.
    """
    # [V19] Without this, 5 m is 5 km: math-verify leaves out what it takes for a unit.
    of_gold, other = map(unit, contents)
    if of_gold is not None and other is not None and of_gold != other:
        return False
    # [V19] First the correct answer is read, then the other; verify() takes them in this order.
    latex = [LatexExtractionConfig(boxed_match_priority=0)]
    parsed = []
    for text in contents:
        text = text.replace(r"\bmod", r"\mod")  # the library knows only the second
        box = f"\\boxed{{{text}}}"
        parsed.append(parse(box, latex, fallback_mode="no_fallback", parsing_timeout=None))
    if not all(parsed):
        return False
    # [V19] Without more decimals, 10^{-20} is 10^{-30}.
    places = decimals([expression for expressions in parsed for expression in expressions])
    rounding = {"float_rounding": 12 + places, "numeric_precision": 15 + places} if places else {}
    return verify(*parsed, **rounding, timeout_seconds=None)


if not equal("2", "1+1"):
    raise ImportError("it cannot calculate")
