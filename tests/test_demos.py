"""Numbers of the pages of chapters 2 and 3 are those that static/demo-* hold; their code and commands work."""

import csv
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import rows_of

from ppo_rlhf import judge
from ppo_rlhf.lib import tools
from ppo_rlhf.tldr import all as tldr_all
from ppo_rlhf.tldr.posts import rouge
from ppo_rlhf.worlds.posts import gold_scores

ROOT = Path(__file__).parent.parent
CHAPTER2, CHAPTER3 = ((ROOT / f"docs/chapter{number}.md").read_text() for number in (2, 3))
SFT, PPO = (rows_of(ROOT / f"static/demo-tldr/{name}.jsonl") for name in ("sft_evaluation", "evaluation"))
GOLD = "ppo_rlhf.worlds.posts:gold_scores"


def meta_of(demo: str, name: str = "meta") -> dict[str, Any]:
    return json.loads((ROOT / f"static/{demo}/{name}.json").read_text())


def numbers(first_words: str, page: str = CHAPTER2) -> list[float]:
    """The numbers of the row of a table that begins so, without its first cell."""
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {first_words}")]
    return [float(number) for number in re.findall(r"[-+]?\d+(?:\.\d+)?", row.split("|", 2)[2])]


def mean_gold_score(rows: list[dict[str, str]], side: str) -> float:
    return statistics.fmean(gold_scores([row["query"] for row in rows], [row[side] for row in rows]))


def test_the_table_of_chapter_2(tmp_path, monkeypatch):
    assert "on 512 held-out posts" in CHAPTER2 and len(PPO) == len(SFT) == 512
    sides = [(PPO, "reference", "reference_tokens"), (SFT, "response", "tokens"), (PPO, "response", "tokens")]
    golds = [mean_gold_score(rows, side) for rows, side, _ in sides]
    assert numbers("gold score |") == pytest.approx(golds, abs=0.0051)
    lengths = [statistics.fmean(row[tokens] for row in rows) for rows, _, tokens in sides]
    assert numbers("length in tokens |") == pytest.approx(lengths, abs=0.051)
    overlap = [*rouge(SFT).values(), *rouge(PPO).values()]
    assert numbers("ROUGE-1, -2, -L") == pytest.approx(overlap, abs=0.00051)
    results = meta_of("demo-tldr", "reward_meta")["results"]
    accuracy, ceiling = (f"{100 * results[name]:.1f} %" for name in ("eval/rm/validation/accuracy", "ceiling"))
    assert re.search(rf"annotator in {accuracy} of 1,019 .* would reach {ceiling} ", " ".join(CHAPTER2.split()))
    monkeypatch.chdir(tmp_path)
    rates = []
    for baseline in ("reference", str(ROOT / "static/demo-tldr/sft_evaluation.jsonl")):
        Path("evaluation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PPO))
        report = judge.judge(judge.Args(candidate="evaluation.jsonl", baseline=baseline, gold=GOLD), shown=False)
        rates += [100 * report[name] for name in ("win_rate", "win_rate_low", "win_rate_high")]
    assert numbers("win rate of PPO against it") == pytest.approx(rates, abs=0.051)


def test_three_posts_of_chapter_2():
    after_sft = {row["query"]: row["response"] for row in SFT}
    for row in PPO[:3]:
        post = row["query"].partition("POST: ")[2].removesuffix("\n\nTL;DR:").replace("\n", " ")
        texts = (row["reference"], after_sft[row["query"]], row["response"])
        assert f"| {' | '.join([post, *(text.strip().replace(chr(10), '⏎') for text in texts)])} |" in CHAPTER2


SHARES = {"correct, mean of 16 samples: pass@1": "mean@16", "pass@4": "pass@4", "pass@16": "pass@16"}
SHARES |= {"greedy accuracy": "gsm8k_strict"}


@pytest.mark.parametrize(("demo", "updates"), [("demo-rlvr", 70), ("demo-tools", 60)])
def test_the_tables_of_chapter_3(demo, updates):
    """Before the first update, from the first row of the metrics; after the last, from meta.json."""
    with (ROOT / f"static/{demo}/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    after = meta_of(demo)["results"]
    table = CHAPTER3[CHAPTER3.index(f"| language model | after {updates} updates") :].partition("\n\n")[0]
    assert len(rows) == updates
    for words, name in SHARES.items():
        shares = [100 * float(results[f"eval/{name}"]) for results in (rows[0], after)]
        assert numbers(words, table) == pytest.approx(shares, abs=0.051)
    lengths = [float(results["eval/length"]) for results in (rows[0], after)]
    assert numbers("tokens of the likeliest", table) == pytest.approx(lengths, abs=0.051)


def test_the_verifier_and_the_tool_of_chapter_3_work(tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.+?)```", CHAPTER3, re.DOTALL)
    module: dict[str, Any] = {}
    exec(next(block for block in blocks if "def right" in block), module)
    assert module["right"](["Two and two?"] * 3, ["2+2=4\n#### 4", "4 or 5", ""], ["4"] * 3) == [1.0, 0.0, 0.0]
    (tmp_path / "my_tools.py").write_text(next(block for block in blocks if "def add" in block))
    monkeypatch.chdir(tmp_path)
    tool = tools.load_tool("my_tools:add", "tools.tool")
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
        args = tldr_all.parse(shlex.split(line.partition("ppo_rlhf/tldr/all.py")[2]))
        assert args.policy.dtype == args.sft.dtype == args.reward.dtype == "bfloat16"
    assert len(said) == 4
