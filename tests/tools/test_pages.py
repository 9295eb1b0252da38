"""benchmark/pages.py writes pages from code and committed numbers, which are those of scipy and of the files."""

import runpy

import pandas as pd
import pytest
import scipy.stats
from jinja2 import UndefinedError

from benchmark import pages, unsourced
from ppo_rlhf.rlvr import asynchronous as rlvr_async

ROOT = pages.ROOT
RESULTS = ROOT / "benchmark/results"
STALENESS = (
    pd.read_csv(RESULTS / "staleness/runs.csv").set_index(["way", "staleness", "seed"]).sort_index()["samples"]
)
FRESH = "staleness == 0 and way == 'any'"


def test_pages_are_as_they_are_rendered():
    """Run python benchmark/pages.py after a change of a template, of a class of arguments or of results."""
    for name, text in pages.pages().items():
        assert (ROOT / name).read_text() == text, name


def test_differences_are_by_seed_and_corrected():
    """The direct difference of none and decoupled, as scipy says; Holm by hand: only the smallest of four p-values is
    below.
    """
    gaps = [100 * (STALENESS["none", k] - STALENESS["decoupled", k]) for k in (1, 2, 4, 8)]
    p_values = [scipy.stats.ttest_1samp(gap, 0).pvalue for gap in gaps]
    assert 4 * p_values[3] < 0.05 < 3 * sorted(p_values)[1]
    pairs = [[f"staleness == {k} and way == '{way}'" for way in ("none", "decoupled")] for k in (1, 2, 4, 8)]
    shown = pages.differences("staleness/runs", "samples", pairs, 1, 100)
    assert shown == ["-2.4 ± 3.3", "-11.7 ± 23.0", "-16.9 ± 18.7", "-25.0 ± 14.4 *"]
    assert pages.stale_against("none", "decoupled") == pairs


def test_best_of_n_is_compared_at_the_same_kl():
    """Seed 1 of PPO with 0.2, between the two points of best-of-n around its KL, by hand."""
    rows = pd.read_csv(RESULTS / "methods/points.csv").query("seed == 1").sort_values("at")
    end = rows.query("method == 'ppo' and setting == 0.2").iloc[-1]
    curve = rows[rows["method"] == "best-of-n"]
    below, above = curve[curve["kl"] <= end["kl"]].iloc[-1], curve[curve["kl"] > end["kl"]].iloc[0]
    share = (end["kl"] - below["kl"]) / (above["kl"] - below["kl"])
    gold = below["gold"] + share * (above["gold"] - below["gold"])
    assert pages.best_of_n("ppo", 0.2)[1] == pytest.approx(end["gold"] - gold)


def test_numbers_without_rows_or_with_other_seeds_are_refused(tmp_path):
    with pytest.raises(AssertionError, match="no rows"):
        pages.of("staleness/runs", "samples", "staleness == 3")
    with pytest.raises(AssertionError, match="other seeds"):
        pages.less("staleness/runs", "samples", FRESH + " and seed < 3", FRESH)
    (tmp_path / "page.md.jinja").write_text("{{ nobody }}")
    with pytest.raises(UndefinedError, match="nobody"):
        pages.rendered(tmp_path / "page.md.jinja")


def test_the_site_is_linked_once_somebody_publishes_it():
    plain, linked = "the project's site.", "the [project's site](https://o.github.io/n/)."
    for page in (plain, linked):
        assert pages.with_site(page, "https://github.com/o/n") == linked
        assert pages.with_site(page, "") == plain


LINKS = {  # of docs/chapter1.md -> where they lead on the site; None: left as text
    "#the-clip": "#the-clip",
    "https://x.org/y.md": "https://x.org/y.md",
    "../README.md": "../index.html",
    "README.md#licences": "../docs/index.html#licences",
    "reference/chapter1.md#D54": "../docs/reference/chapter1.html#D54",
    "../static/demo/report.html": "../static/demo/report.html",
    "../static/demo-tools": None,
    "../benchmark/results/tales/curves.csv": "../benchmark/results/tales/curves.csv",
    "../benchmark/results/tools/tools.md": None,
    "../ppo_rlhf/loop.py": None,
    "../benchmark/README.md#x": None,
}


@pytest.mark.parametrize("uri", LINKS)
def test_links_of_the_site(uri):
    """Those that leave it lead to the repository, if one is named."""
    link = runpy.run_path(str(ROOT / "docs/conf.py"))["link"]
    link.__globals__["REPOSITORY"] = ""
    assert link("docs/chapter1.md", uri) == LINKS[uri]
    link.__globals__["REPOSITORY"] = "https://x.org/r"
    outside = f"https://x.org/r/blob/HEAD/{uri.removeprefix('../')}"
    assert link("docs/chapter1.md", uri) == (LINKS[uri] or outside)


def test_arguments_have_their_defaults():
    page = (ROOT / "docs/reference/arguments.md").read_text()
    assert f"| `--correction_cap` | `{rlvr_async.Args().correction_cap}` | " in page
    assert "| `--rewards.adaptive_kl.target` | `6.0` | " in page


def test_numbers_that_no_linked_file_has_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"0.868 or 86.8 %,\nnot 0.869, not 12 %, 3 `0.5` [x]({RESULTS}/people/world.json#x).\n")
    assert unsourced.without_source(page) == [(2, "0.869"), (2, "12")]
