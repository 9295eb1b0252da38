"""Numbers of the pages of chapters 2 and 3 are those that static/demo-* hold; their code and commands work."""

import csv
import os
import re
import shlex
import shutil
import subprocess
import sys
from typing import Any

import pytest
from runs import ROOT, meta_of, rows_of

from ppo_rlhf import judge, train_both
from ppo_rlhf.rlvr import tool_functions
from ppo_rlhf.tldr import all as tldr_all
from ppo_rlhf.tldr.posts import rouge

CHAPTER2, CHAPTER3 = ((ROOT / f"docs/chapter{number}.md").read_text() for number in (2, 3))
DEMO = ROOT / "static/demo-tldr/evaluation.jsonl"
PPO, SFT = rows_of(DEMO), rows_of(DEMO.with_name("sft_evaluation.jsonl"))
GOLD = "ppo_rlhf.worlds.posts:gold_scores"


def numbers(first_words: str, page: str = CHAPTER2) -> list[float]:
    """The numbers of the row of a table that begins so, without its first cell."""
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {first_words}")]
    return [float(number) for number in re.findall(r"[-+]?\d+(?:\.\d+)?", row.split("|", 2)[2])]


def test_the_table_of_chapter_2(tmp_path, monkeypatch):
    """What judge.py says of the committed summaries, against the references and against those after SFT."""
    assert "on 512 held-out posts" in CHAPTER2 and len(PPO) == len(SFT) == 512
    monkeypatch.chdir(tmp_path)
    shutil.copy(DEMO, "evaluation.jsonl")
    reports = [
        judge.judge(judge.Args(candidate="evaluation.jsonl", baseline=baseline, gold=GOLD), shown=False)
        for baseline in ("reference", str(DEMO.with_name("sft_evaluation.jsonl")))
    ]
    for words, name, tolerance in (("gold score |", "score", 0.0051), ("length in tokens |", "length", 0.051)):
        means = [*(report[f"baseline_{name}"] for report in reports), reports[0][f"candidate_{name}"]]
        assert numbers(words) == pytest.approx(means, abs=tolerance)
    rates = [100 * report[name] for report in reports for name in ("win_rate", "win_rate_low", "win_rate_high")]
    assert numbers("win rate of PPO against it") == pytest.approx(rates, abs=0.051)
    assert numbers("ROUGE-1, -2, -L") == pytest.approx([*rouge(SFT).values(), *rouge(PPO).values()], abs=0.00051)


ROWS = {  # of the tables, and what they show
    "correct, mean of 16 samples: pass@1": ("mean@16", 100),
    "pass@4": ("pass@4", 100),
    "pass@16": ("pass@16", 100),
    "greedy accuracy": ("gsm8k_strict", 100),
    "tokens of the likeliest": ("length", 1),
}


@pytest.mark.parametrize(("demo", "updates"), [("demo-rlvr", 70), ("demo-tools", 60)])
def test_the_tables_of_chapter_3(demo, updates):
    """Before the first update, from the first row of the metrics; after the last, from meta.json."""
    with (ROOT / f"static/{demo}/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    after = meta_of(ROOT / f"static/{demo}")["results"]
    table = CHAPTER3[CHAPTER3.index(f"| language model | after {updates} updates") :].partition("\n\n")[0]
    assert len(rows) == updates
    for words, (name, factor) in ROWS.items():
        shown = [factor * float(results[f"eval/{name}"]) for results in (rows[0], after)]
        assert numbers(words, table) == pytest.approx(shown, abs=0.051)


def test_the_verifier_and_the_tool_of_chapter_3_work(tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.+?)```", CHAPTER3, re.DOTALL)
    module: dict[str, Any] = {}
    exec(next(block for block in blocks if "def right" in block), module)
    assert module["right"](["Two and two?"] * 3, ["2+2=4\n#### 4", "4 or 5", ""], ["4"] * 3) == [1.0, 0.0, 0.0]
    (tmp_path / "my_tools.py").write_text(next(block for block in blocks if "def add" in block))
    monkeypatch.chdir(tmp_path)
    tool = tool_functions.load_tool("my_tools:add", "tools.tool")
    assert [tool(call) for call in ("7+5", "7*5")] == ["12", "error: failed"]


def test_the_script_takes_the_commands_of_the_paper(tmp_path):
    """Those of benchmark/curves/chapter2.sh."""
    stub = tmp_path / "python"
    stub.write_text(f"#!{sys.executable}\nimport sys\nprint(sys.argv[-3])\n")
    stub.chmod(0o755)
    command = ["bash", str(ROOT / "benchmark/curves/chapter2.sh"), "1b", "1b-lora", "1b-subtract", "1b-k3"]
    environment = os.environ | {"PYTHON": str(stub)}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    for line in said:
        args = train_both.parse(shlex.split(line.partition("ppo_rlhf/tldr/all.py")[2]), tldr_all.PRESETS)
        assert args.policy.dtype == args.sft.dtype == args.reward.dtype == "bfloat16"
    assert len(said) == 4
