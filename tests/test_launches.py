"""The page of launches and waits: tables follow from the committed counts, and bounds from calculations by hand."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmark.cost import launches
from benchmark.cost.launches import CARDS, SHAPES

ROOT = Path(__file__).parent.parent
REPORT = json.loads((ROOT / "benchmark/results/launches/launches.json").read_text())
COUNTS = {name: launches.counts_of(SHAPES[name], fit) for name, fit in REPORT["coefficients"].items()}


def test_the_page_has_the_tables_of_the_committed_counts():
    page = (ROOT / "benchmark/cost/launches.md").read_text()
    for table in launches.tables(COUNTS).values():
        assert table in page
    assert re.fullmatch("[0-9a-f]{40}", REPORT["commit"])


def test_a_count_is_linear_in_layers_and_in_tokens():
    """By hand: GPT-2 has 12 layers and answers with 24 tokens, in 4 passes."""
    fit = {
        "generate": {kind: [10.0, 2.0, 3.0, 0.5] for kind in launches.KINDS},
        "passes": {kind: [8.0, 4.0, 1.0, 0.0] for kind in launches.KINDS},
    }
    found = launches.counts_of(SHAPES["gpt2"], fit)
    assert {step: kinds["wait"] for step, kinds in found.items()} == {
        "generate, context": 10 + 2 * 12,
        "generate, each token": 3 + 0.5 * 12,
        "update, each pass": (8 + 4 * 12 + 24) / 4,
    }


def test_the_bound_of_the_host():
    counts = {
        "generate, context": {"launch": 100, "wait": 2},
        "generate, each token": {"launch": 50, "wait": 0.25},
        "update, each pass": {"launch": 1000, "wait": 1},
        "log": {"launch": 10, "wait": 5},
        "trace": {"launch": 10**9, "wait": 10**9},
    }
    shape = replace(SHAPES["gpt2"], response=4, passes=3)
    found = launches.host_seconds(shape, counts)
    assert found["generation"] == pytest.approx(5e-6 * (100 + 4 * 50) + 20e-6 * (2 + 1))
    assert found["the rest"] == pytest.approx(5e-6 * (3 * 1000 + 10) + 20e-6 * (3 + 5))
    graph = launches.host_seconds(shape, counts, graph=True)
    assert graph["generation"] == pytest.approx(5e-6 * (100 + 4) + 20e-6 * 3)


def test_the_bound_of_the_device():
    """By hand, for GPT-2 on eight H100: 64 episodes each, of 64 + 24 tokens."""
    found = launches.device_seconds(SHAPES["gpt2"], CARDS["H100"], 8)
    trunk, head = 12 * 12 * 768**2, 768 * 50257  # weights of the layers' matrix products, and of the output layer
    keys = sum(range(1, 89))
    one_pass = 2 * trunk * 88 + 4 * 768 * 12 * keys
    logits = 2 * head * 24
    bytes_of_pass, bytes_of_logits = 64 * 88 * 12 * 768 * 30 * 4, 64 * 24 * 50257 * 4
    cache = 24 * 64 * 76 * 12 * 2 * 768 * 2
    weights = 24 * 2 * 124_439_808
    assert 64 * (one_pass + logits) / 989e12 < weights / 3.35e12  # so the weights bind while tokens are sampled
    assert found["generation"] == pytest.approx((weights + bytes_of_pass + cache + 16 * bytes_of_logits) / 3.35e12)
    rest = 64 * ((2 + 12) * one_pass + (1 + 12) * logits) / 989e12
    rest += ((2 + 12) * bytes_of_pass + (6 + 64) * bytes_of_logits) / 3.35e12
    assert found["the rest"] == pytest.approx(rest)


def test_what_the_page_says_of_graphs():
    rows = {(row["model"], row["GPUs"]): row for row in launches.bound_rows(COUNTS)}
    page = " ".join((ROOT / "benchmark/cost/launches.md").read_text().split())
    told = {
        ("gpt2", "8 H100"): "from {} to {} ms on H100, and",
        ("gpt2", "8 H200"): "from {} to {} ms on H200.",
        ("qwen2.5-0.5b", "1 H100"): "from {} to {} ms on one H100, and",
        ("qwen2.5-0.5b", "8 H100"): "from {} to {} ms on eight.",
    }
    for place, sentence in told.items():
        assert sentence.format(rows[place]["an update, ms"], rows[place]["with a graph, ms"]) in page
    waits = {
        name: sum(
            launches.TIMES.get(step, lambda _: 1)(SHAPES[name]) * kinds["wait"] for step, kinds in steps.items()
        )
        for name, steps in COUNTS.items()
    }
    # Without traces.
    waits = {name: number - COUNTS[name]["trace"]["wait"] for name, number in waits.items()}
    assert waits["gpt2"] == 8 and 80 <= waits["qwen2.5-0.5b"] <= 100 and 100 * launches.WAIT <= 2e-3
