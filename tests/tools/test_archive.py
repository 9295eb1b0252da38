"""Results that were measured once, by code that is gone: their data, pictures and tables must stay as they were."""

import hashlib
import json
import re

import pytest
from runs import ROOT

ARCHIVE = json.loads((ROOT / "benchmark/results/archive.json").read_text())


def section(page: str, name: str) -> str:
    """A part of a page, from its heading to the next one of the same level; without a name, the whole page."""
    text = (ROOT / page).read_text()
    return re.split(r"^## ", text.split(f"\n## {name}\n", 1)[1], flags=re.MULTILINE)[0] if name else text


def fingerprint(kept: dict) -> str:
    """A hash of the files and of the rows of the tables; of the chapters' pages, of rows and formulas."""
    found = hashlib.sha256()
    for file in kept["files"]:
        found.update((ROOT / file).read_bytes())
    rows = kept.get("rows", r"^\|.*\|$")
    for row in re.findall(rows, section(kept["page"], kept["section"]), re.MULTILINE):
        found.update(row.replace("\u00a0", " ").encode())
    return found.hexdigest()[:16]


@pytest.mark.parametrize("name", ARCHIVE)
def test_what_is_archived_stays(name):
    """The tables were compared with the files by tests of the code, until the commit that is named."""
    kept = ARCHIVE[name]
    assert fingerprint(kept) == kept["sha256"], "its code is gone, so nobody can have measured this again"
    for code in kept["code"]:
        assert f"git show {kept['commit']}:{code}" in " ".join((ROOT / kept["page"]).read_text().split())
