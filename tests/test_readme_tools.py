"""What the pages say of tools is measured."""

import json
import re
from pathlib import Path

import pandas as pd

from ppo_rlhf.lib.scoring import tools as lib_tools

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


def test_the_tool_of_the_page_is_one(tmp_path, monkeypatch):
    (source,) = (block for block in re.findall(r"```python\n(.+?)```", CHAPTER3, re.DOTALL) if "def add" in block)
    (tmp_path / "my_tools.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    tool = lib_tools.load_tool("my_tools:add", "tools.tool", 5.0)
    assert [tool(call) for call in ("7+5", "1+2+3", "7*5")] == ["12", "6", "error: failed"]
    tool.close()
