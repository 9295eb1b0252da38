"""The changes of docs/experiments.md: each does something, and the page has it and the numbers of the CSV."""

import functools

import pandas as pd
import pytest
import torch
from runs import ROOT

from benchmark.experiments import small_changes
from benchmark.experiments.small_changes import CHANGES

PAGE = (ROOT / "docs/experiments.md").read_text()
RUNS = pd.read_csv(ROOT / "benchmark/results/small_changes/runs.csv", dtype={"commit": str})
FLAGS = {
    "ppo": "--choices 40 --batch 8 --updates 3 --seed 1 --kl_target 0.01",
    "grpo": "--prompts 4 --updates 2 --seed 1 --lr 0.01",
}


@pytest.fixture(scope="module")
def made() -> dict:
    """What all runs have in common."""
    return {}


@pytest.fixture
def run(tiny_world, tiny_sums, made, monkeypatch):
    """A change, shortened, in tiny worlds: what is measured of it."""
    monkeypatch.setattr(small_changes, "module_of", functools.partial(with_small_sizes, small_changes.module_of))
    monkeypatch.setattr(small_changes, "MADE", made)
    worlds = {"ppo": tiny_world, "grpo": tiny_sums}

    def measured(name: str) -> dict[str, float]:
        file = CHANGES[name].file
        return small_changes.measure(name, [*FLAGS[file].split(), "--world", str(worlds[file])])

    return measured


def with_small_sizes(module_of, change):
    module = module_of(change)
    if change.file == "ppo":
        module.RM_SAMPLES, module.RM_BATCH = 32, 8
    else:
        module.RESPONSE_LENGTH = 30
        # Tiny policies solve nothing. That some responses are called correct lets a change act.
        module.is_right = lambda response, answer: len(response) % 2 == 0
    return module


@pytest.fixture(scope="module")
def baselines() -> dict[str, dict]:
    return {}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_does_something(name, run, baselines):
    baseline = {"ppo": "ppo", "grpo": "grpo"}[CHANGES[name].file]
    found = baselines[name] = run(name)
    other = baselines.get(baseline) or run(baseline)
    shown = {"ppo": small_changes.COLUMNS[:6], "grpo": small_changes.COLUMNS[6:]}[CHANGES[name].file]
    assert found.keys() == set(shown) and torch.tensor(list(found.values())).isfinite().all()
    assert (found == other) == (name == baseline)
    expected = {"wrong-stop": {"score": -1.0}, "16-epochs-no-clip": {"clipped": 0.0}}.get(name, {})
    assert found | expected == found


def test_the_page_has_every_change_and_its_numbers():
    page = " ".join(PAGE.split())
    for change in CHANGES.values():
        assert change.flags in page and f"small/{change.file}.py" in page
        old = change.old.strip().partition("  #")[0]
        for text in (old, change.new.strip()):
            assert f"`{text}`" in page or not text or "kl_coef" in text.splitlines()[-1], text
    assert set(RUNS["change"]) <= set(CHANGES)
    assert not RUNS.duplicated(["change", "seed"]).any()
    assert f"{small_changes.BEGIN}\n{small_changes.tables(RUNS)}\n{small_changes.END}" in PAGE


def test_an_edit_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setitem(CHANGES, "odd", small_changes.Change(old="no such text", new=""))
    with pytest.raises(AssertionError, match="no such text"):
        small_changes.source_of(CHANGES["odd"])
