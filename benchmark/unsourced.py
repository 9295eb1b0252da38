"""Print the numbers of a page that no committed file has:

    python benchmark/unsourced.py docs/real.md docs/running.md

Checked are numbers with a decimal point and percentages, outside code. What a template or a script writes has a
source. Any other number has one if a file of results that the page links, or a file in a folder that it links, has a
number that rounds to it; shares may be printed in percent. That may be chance: this finds what has no source, not
what has one.
"""

import re
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
NUMBER = re.compile(r"(?<![\w.,#])[-+]?\d{1,3}(?:,?\d{3})*(?:\.\d+)?(?![\w.]*\d)")
DATA = (".csv", ".json", ".jsonl", ".md")


def source_of(page: Path) -> str:
    """The template of a page, without what it computes, or the page; without code and the targets of links."""
    template = page.with_suffix(".md.jinja")
    text = template.read_text() if template.exists() else page.read_text()
    hidden = (r"^```.*?^```", r"<!-- tables.*?<!-- end -->", r"\{%.*?%\}", r"\{\{.*?\}\}", r"`[^`]*`", r"\]\([^)]*\)")
    for pattern in hidden:  # lines stay where they are
        text = re.sub(pattern, lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    return text


def known_numbers(page: Path) -> np.ndarray:
    """The absolute numbers of all data that a page links."""
    found: set[str] = set()
    for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        place = (page.parent / link).resolve()
        if place.is_relative_to(ROOT / "benchmark/results") or place.is_relative_to(ROOT / "static"):
            for file in [place, *place.rglob("*")]:
                if file.suffix in DATA:
                    found.update(re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", file.read_text()))
    return np.array(list(found), dtype=float)


def without_source(page: Path) -> list[tuple[int, str]]:
    """Line and number of each number of a page that no linked data has."""
    known, missing = known_numbers(page), []
    for line, words in enumerate(source_of(page).splitlines(), 1):
        for match in NUMBER.finditer(words):
            is_share = bool(re.match(r"\s?%", words[match.end() :]))
            places = len(match[0].partition(".")[2])
            value, half = abs(float(match[0].replace(",", ""))), 0.501 * 10.0**-places
            has_source = (abs(known - value) <= half).any() or (is_share and (abs(100 * known - value) <= half).any())
            if (places or is_share) and not has_source:
                missing.append((line, match[0]))
    return missing


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for line, number in without_source(Path(name).resolve()):
            print(f"{name}:{line}: {number}")
