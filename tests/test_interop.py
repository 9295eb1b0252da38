"""interoperability/interop.py without its runs: rows of tokens, the table, what counts as a difference."""

import json
import math

import pytest
import torch

from benchmark.interoperability import interop
from benchmark.interoperability.interop import (
    Check,
    check_table,
    count_not_finite,
    exit_status,
    largest_difference,
    with_endless_rows,
)
from ppo_rlhf.lib.posts import TaskIds

PASS, FAIL, UNKNOWN = Check("a", 1e-6, 1e-4), Check("b", 2e-4, 1e-4), Check("c", math.nan, 1e-4)
MOVED, STILL = Check("d", 0.5, 0.01, above=True), Check("e", 0.0, 0.0, above=True)
RESULTS = interop.ROOT / "benchmark/results/interop/interop.json"


def test_one_failed_check_decides():
    assert [row["passed"] for row in check_table([PASS, FAIL, UNKNOWN, MOVED, STILL])] == [
        *("yes", "**no**", "**no**", "yes", "**no**")
    ]
    assert exit_status([PASS, MOVED]) == 0
    for failed in (FAIL, UNKNOWN, STILL, Check("f", math.nan, 0, above=True)):
        assert exit_status([PASS, failed, MOVED]) == 1


def test_a_difference_counts_where_the_mask_is_true():
    ours, mask = torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[True, True, False]])
    assert largest_difference(ours, [[1.5, 2.0, math.nan]], mask) == 0.5
    assert math.isnan(largest_difference(ours, [[1.5, math.nan, 9.0]], mask))
    with pytest.raises(RuntimeError):
        largest_difference(ours, [[1.0, 2.0]])


def test_no_metrics_are_not_finite_metrics():
    assert count_not_finite([{"a": 1.0}, {"a": 2, "b": -3.5}]) == 0
    assert count_not_finite([{"a": math.nan}, {"a": -math.inf, "b": 1.0}]) == 2
    assert count_not_finite([]) == 1


@pytest.mark.parametrize("eos", [0, 4, 8])
def test_every_fourth_row_never_ends(eos):
    ids = TaskIds(pad=9, eos=eos, stop=eos)
    references = torch.full((8, 50), ids.pad)
    references[:, 0], references[:, 1] = 5, eos
    rows = with_endless_rows(references, ids)
    ends = (rows == eos).any(1)
    assert ends.tolist() == 2 * [True, True, True, False]
    assert torch.equal(rows[ends], references[ends])
    assert set(rows[~ends].unique().tolist()) == set(range(9)) - {eos}


@pytest.mark.skipif(not RESULTS.exists(), reason="benchmark/interoperability/interop.py has not been run here")
def test_the_committed_result_says_what_its_checks_say():
    report = json.loads(RESULTS.read_text())
    for row in report["checks"]:
        assert row.pop("passed") and Check(**row).passed, row
    assert report["rows"]["padded queries"] and 0 < report["rows"]["responses that end"] < report["rows"]["queries"]
