"""benchmark/experiments/overoptimisation.py: its arithmetic, and what it makes of made-up runs."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from processes import launch

from benchmark.experiments import overoptimisation


def test_fit_finds_what_was_put_in():
    d = np.linspace(0, 6, 50)
    gold = np.where(d > 0, d * (1.5 - 0.7 * np.log(np.maximum(d, 1e-9))), 0)
    assert overoptimisation.fit(d, gold) == pytest.approx((1.5, 0.7))


def test_overoptimisation_of_made_up_runs(tmp_path):
    """Gold scores of deviation 2 and mean 1 in the language model, on the curve with alpha 1.5 and beta 0.5."""
    for seed in (1, 2, 3):
        run = tmp_path / f"runs/{seed}"
        run.mkdir(parents=True)
        d = np.linspace(0.1, 5, 40) + 0.01 * seed
        gold = 1 + 2 * d * (1.5 - 0.5 * np.log(d))
        columns = {
            "step": range(40),
            "objective/kl": d**2,
            "objective/gold_scores": gold,
            "objective/raw_score": 3 * d,
        }
        pd.DataFrame(columns).to_csv(run / "metrics.csv", index=False)
        args = {"seed": seed, "rewards": {"trained_model": f"models/reward{seed}/reward"}}
        (run / "meta.json").write_text(json.dumps({"args": args, "commit": "abc"}))
        (tmp_path / f"runs/reward{seed}").mkdir()
        reward = {"args": {}, "results": {"test_accuracy": seed / 10}}
        (tmp_path / f"runs/reward{seed}/meta.json").write_text(json.dumps(reward))
        own = [{"base gold": 1 + sign * math.sqrt(2), "base score": sign / math.sqrt(2)} for sign in (-1, 1)]
        (run / "comparison.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    script = overoptimisation.__file__
    result = launch(script, "--runs", "made up=runs/*", "--output", "out", folder=tmp_path)
    assert result.status == 0, result
    row, *seeds = [line for line in result.stdout.splitlines() if "made up" in line]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:5] == ["3", "10 %, 20 %, 30 %", "1.50 [1.50, 1.50]", "0.50 [0.50, 0.50]"]
    assert cells[6] == "not seen"  # exp(alpha / beta - 1) is 7.4, and d ends at 5
    table = pd.read_csv(tmp_path / "out/overoptimisation.csv")
    np.testing.assert_allclose(table["proxy"], 3 * table["d"], rtol=1e-3)
    assert [line.split(" | ")[1:3] for line in seeds] == [["1", "10 %"], ["2", "20 %"], ["3", "30 %"]]
    d = 5.03 - 2 * 4.9 / 39  # the middle of the last five updates of seed 3; a mean of five is a little lower
    assert seeds[2].split(" | ")[3] == f"{d * (1.5 - 0.5 * math.log(d)):.1f} at d = {d:.1f}"
    assert (tmp_path / "out/overoptimisation.png").exists()
    more = "--runs", "out/overoptimisation.csv", "--output", "again", "--figure", "new/picture.png"
    again = launch(script, *more, folder=tmp_path)
    assert again.status == 0 and again.stdout == result.stdout and (tmp_path / "new/picture.png").exists()
    csvs = [(tmp_path / f"{folder}/overoptimisation.csv").read_text() for folder in ("out", "again")]
    assert csvs[0] == csvs[1]
    (tmp_path / "damaged.csv").write_text("a,b\n1,2\n")
    assert launch(script, "--runs", "damaged.csv", folder=tmp_path).status == 2
    assert launch(script, "--runs", "x=nowhere/*", "--output", "out", folder=tmp_path).status == 2
