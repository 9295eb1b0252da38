"""interoperability/engines.py without its runs: log-probs of padded rows, the table, the committed numbers."""

import json
from pathlib import Path

import pytest
import scipy.stats
import torch

from benchmark.interoperability import engines
from benchmark.interoperability.engines import TEMPERATURE, our_logprobs, table_of
from benchmark.interoperability.interop import Check
from ppo_rlhf.lib import models
from ppo_rlhf.lib.errors import InputError
from ppo_rlhf.rlvr_async import Args

RESULTS = engines.ROOT / "benchmark/results/engines/engines.json"
PAGE = Path(engines.__file__).with_name("README.md").read_text()


def test_log_probs_are_those_of_each_row_alone(tiny_sums):
    model, pad = models.load_base_model(Args(base_model=f"{tiny_sums}/model")), 30
    prompts, responses = torch.tensor([[pad, pad, 5], [7, 8, 9]]), torch.tensor([[3, 4, 6], [2, 0, pad]])
    found = our_logprobs(model, prompts, responses, pad)
    for row, (prompt, response) in enumerate((([5], [3, 4, 6]), ([7, 8, 9], [2, 0]))):
        for column, token in enumerate(response):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + response[:column]])).logits[0, -1, :pad] / TEMPERATURE
            expected = logits[token] - logits.exp().sum().log()
            torch.testing.assert_close(found[row, column], expected, atol=1e-5, rtol=0)


def test_the_table_has_means_and_intervals_over_seeds():
    shares = {"built-in": (0.6, 0.7, 0.65), "vllm": (0.5, 0.9, 0.7)}
    names = ("samples", "greedy", "first", "last")
    rows = [
        {"engine": engine, "seed": seed, "ess": 1.0, "first_gap": seed * 1e-6} | dict.fromkeys(names, share)
        for engine, own in shares.items()
        for seed, share in enumerate(own, 1)
    ]
    for row, own in zip(table_of(rows), shares.values(), strict=True):
        half = scipy.stats.t.ppf(0.975, 2) * torch.tensor(own).std().item() / 3**0.5
        assert row["held out, samples"] == f"{100 * sum(own) / 3:.1f} ± {100 * half:.1f}" == row["in the last"]
        assert row["seeds"] == "3" and row["first update: largest gap of log-probs"] == "3e-06"


def test_bad_input_is_refused(tmp_path):
    with pytest.raises(InputError, match="--python nowhere: no such file"):
        engines.main(engines.Args(python=Path("nowhere")))
    (tmp_path / "python").touch()
    with pytest.raises(InputError, match="--seeds 1: 0, or 2 and more"):
        engines.main(engines.Args(python=tmp_path / "python", seeds=1))


@pytest.mark.skipif(not RESULTS.exists(), reason="benchmark/interoperability/engines.py has not been run here")
def test_what_is_kept_says_what_the_page_says():
    kept = json.loads(RESULTS.read_text())
    checks = [Check(*(one[name] for name in ("name", "difference", "limit", "above"))) for one in kept["checks"]]
    assert all(check.passed for check in checks) and sum(check.above for check in checks) >= 5
    assert kept["versions"]["vllm"] in PAGE and kept["commit"][:7] in PAGE
    for row in table_of(kept["runs"]):
        assert f"| {' | '.join(row.values())} |" in PAGE
