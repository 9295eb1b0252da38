"""The mistake of benchmark/experiments/tools.py is the one it says. What the pages say of tools is measured."""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from benchmark import lab
from benchmark.experiments import tools
from ppo_rlhf import rlvr_tools
from ppo_rlhf.lib import tools as lib_tools
from ppo_rlhf.lib.errors import InputError


def test_the_mistake_gives_the_tools_tokens_the_log_probs_of_the_policy(tiny_models):
    """Against a pass over each row alone. All else stays as it is."""
    model, pad, temperature = tiny_models("llama").double().eval(), 29, 0.7
    contexts = torch.tensor([[pad, 7, 8], [9, 10, 11]])
    responses = torch.tensor([[5, 4, 12, 13, 6, 28], [5, 6, 4, 14, pad, pad]])
    from_tool = torch.tensor([[0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 0, 0]]).bool()
    recorded = torch.full(responses.shape, -0.5, dtype=torch.float64).masked_fill(from_tool, torch.nan)

    def converse(*_, talk):
        assert talk == "talk"
        return responses, recorded

    told = (model, contexts, torch.rand(2, 6), pad, pad, temperature, [28])
    again, logprobs = tools.without_holes(converse)(*told, talk="talk")
    assert torch.equal(again, responses) and (logprobs[~from_tool] == -0.5).all()
    for row, place in from_tool.nonzero().tolist():
        tokens = [token for token in contexts[row].tolist() if token != pad] + responses[row, :place].tolist()
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens])).logits[0, -1, :pad].numpy() / temperature
        expected = logits[responses[row, place]] - np.log(np.exp(logits).sum())
        assert logprobs[row, place].item() == pytest.approx(expected, abs=1e-9)


def test_only_the_mistake_changes_the_sampler(monkeypatch):
    plain = rlvr_tools.converse
    monkeypatch.setattr(rlvr_tools, "converse", plain)  # so that it is restored
    tools.with_mistake("masked", [])
    assert rlvr_tools.converse is plain
    tools.with_mistake("in-the-loss", [])
    assert rlvr_tools.converse is not plain
    with pytest.raises(InputError, match="in-loss is none of masked, in-the-loss"):
        tools.with_mistake("in-loss", [])


# ---- The pages -------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parent.parent
CHAPTER3, RESULTS = ((ROOT / "docs" / name).read_text() for name in ("chapter3.md", "results.md"))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|\n ").split("|")]


def test_numbers_of_the_demo():
    """The table of chapter 3: before the first update, after the last."""
    lines = CHAPTER3[CHAPTER3.index("| on 512 held-out problems |") :].split("\n\n")[0].splitlines()[2:]
    rows = {words: numbers for words, *numbers in map(cells, lines)}
    meta = json.loads((ROOT / "static/demo-tools/meta.json").read_text())
    metrics = pd.read_csv(ROOT / "static/demo-tools/metrics.csv")
    before, after = metrics.iloc[0], meta["results"]
    names = {"correct, mean of 16 samples: pass@1": "eval/mean@16", "pass@4": "eval/pass@4"}
    names |= {"pass@16: one of 16 samples, or more": "eval/pass@16"}
    names |= {"greedy accuracy: the likeliest response": "eval/gsm8k_strict"}
    names |= {f"problems of {n} step{'s' * (n > 1)}": f"eval/gsm8k_strict_steps_{n}" for n in (1, 2, 3, 4)}
    assert len(rows) == len(names) + 2
    for words, name in names.items():
        assert rows[words] == [f"{100 * before[name]:.1f} %", f"{100 * after[name]:.1f} %"]
    length = "tokens of the likeliest response, mean"
    assert rows[length] == [f"{before['eval/length']:.1f}", f"{after['eval/length']:.1f}"]
    (calls,) = (row for words, row in rows.items() if words.startswith("answered calls"))
    assert calls == [f"{part.mean():.2f}" for part in (metrics["val/tool_calls"][:3], metrics["val/tool_calls"][-3:])]
    assert len(metrics) == meta["sizes"]["updates"] == 60 and meta["args"]["preset"] == "sums-tools"
    assert f"seed {meta['args']['seed']} at commit {meta['commit'][:7]}" in CHAPTER3


def test_numbers_of_the_mistake():
    runs = pd.read_csv(ROOT / "benchmark/results/tools/runs.csv", dtype={"commit": str})
    (commit,) = set(runs["commit"])
    assert Counter(runs["variant"]) == {"masked": 5, "in-the-loss": 5} and f"at commit {commit}" in RESULTS
    shown = [cells(line) for line in RESULTS.splitlines() if line.startswith(("| masked |", "| in the loss |"))]
    assert shown == [list(row.values()) for row in tools.table_of(runs)]
    differences = {
        column: runs.pivot(index="seed", columns="variant", values=column) for column in (lab.CORRECT, "samples")
    }
    lost = [lab.cell(100 * (x["masked"] - x["in-the-loss"]), ".1f") for x in differences.values()]
    said = " ".join(RESULTS[RESULTS.index("## What a tool") :].split())
    assert f"{lost[0]} points fewer while it learns, and {lost[1]} after it, among samples" in said
    assert f"cost {lost[1]} points of correct samples" in RESULTS
    means = runs.groupby("variant")[["policy/grad_norm", "policy/clipfrac_avg"]].mean()
    norms, clipped = (means[column][["masked", "in-the-loss"]] for column in means)
    assert "rises from {:.2f} to {:.2f},".format(*norms) in said
    assert "{1:.2f} % of the tokens are clipped, not {0:.2f} %".format(*(100 * clipped)) in said


def test_the_tool_of_the_page_is_one(tmp_path, monkeypatch):
    (source,) = (block for block in re.findall(r"```python\n(.+?)```", CHAPTER3, re.DOTALL) if "def add" in block)
    (tmp_path / "my_tools.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    tool = lib_tools.load_tool("my_tools:add", "tools.tool", 5.0)
    assert [tool(call) for call in ("7+5", "1+2+3", "7*5")] == ["12", "6", "error: failed"]
    tool.close()
