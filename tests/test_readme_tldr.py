"""What docs/chapter2.md says of its demo is what static/demo-tldr holds: numbers of one run of `make demo-tldr`."""

import json
import re
import shutil
import statistics
from pathlib import Path

import pytest
from runs import rows_of

from ppo_rlhf import judge
from ppo_rlhf.tldr.posts import rouge
from ppo_rlhf.worlds.posts import gold_scores

ROOT = Path(__file__).parent.parent
CHAPTER2 = (ROOT / "docs/chapter2.md").read_text()
RUNNING = (ROOT / "docs/running.md").read_text()
DEMO = ROOT / "static/demo-tldr"
RUNS = ("sft", "reward", "policy")


def repeats_itself(summary: str) -> bool:
    statements = [statement.strip() for statement in summary.split(".") if statement.strip()]
    return len(set(statements)) < len(statements)


def numbers(first_words: str) -> list[float]:
    """The numbers of a row of the table, without its first cell."""
    (row,) = [line for line in CHAPTER2.splitlines() if line.startswith(f"| {first_words}")]
    return [float(number) for number in re.findall(r"[-+]?\d+(?:\.\d+)?", row.split("|", 2)[2])]


META = {run: json.loads((DEMO / f"{run}_meta.json").read_text()) for run in RUNS}
SFT, PPO = rows_of(DEMO / "sft_evaluation.jsonl"), rows_of(DEMO / "evaluation.jsonl")


def test_one_commit_made_it():
    (commit,) = {META[run]["commit"] for run in RUNS}
    assert re.fullmatch("[0-9a-f]{40}", commit) and f"`make demo-tldr` at commit {commit[:7]}, seed 1" in CHAPTER2
    assert all(META[run]["finished"] and META[run]["args"]["preset"] == "posts" for run in RUNS)


def test_gold_scores_lengths_and_ends():
    queries = [row["query"] for row in PPO]
    assert len(queries) == 512 and "on 512 held-out posts" in CHAPTER2
    assert sorted(queries) == sorted(row["query"] for row in SFT)
    sides = [(PPO, "reference"), (SFT, "response"), (PPO, "response")]
    golds = [gold_scores([row["query"] for row in rows], [row[side] for row in rows]) for rows, side in sides]
    assert numbers("gold score |") == pytest.approx([statistics.fmean(gold) for gold in golds], abs=0.0051)
    tokens = {"reference": "reference_tokens", "response": "tokens"}
    lengths = [statistics.fmean(row[tokens[side]] for row in rows) for rows, side in sides]
    assert numbers("length in tokens |") == pytest.approx(lengths, abs=0.051)
    ends = [META["sft"]["results"]["validation/sft/eos_rate"], META["policy"]["results"]["validation/eos_rate"]]
    assert numbers("summaries that end |") == pytest.approx([100, 100 * ends[0], 100 * ends[1]], abs=0.051)
    repeats = [100 * statistics.fmean(repeats_itself(row[side]) for row in rows) for rows, side in sides]
    assert numbers("summaries that repeat a statement |") == pytest.approx(repeats, abs=0.051)


def test_rouge_scores():
    expected = []
    for rows in (SFT, PPO):
        expected += rouge(rows).values()
    assert numbers("ROUGE-1, -2, -L") == pytest.approx(expected, abs=0.00051)


def test_win_rates(tmp_path, monkeypatch, capsys):
    """Counted here, ties as half. The intervals are judge.py's; docs/running.md has the code for equal length."""
    monkeypatch.chdir(tmp_path)
    for file in ("evaluation.jsonl", "sft_evaluation.jsonl"):
        shutil.copy(DEMO / file, file)
    (code,) = re.findall(r"## Win rates at equal length\n.*?```python\n(.*?)```", RUNNING, re.DOTALL)
    queries, expected, shown = [row["query"] for row in PPO], [], []
    after_sft = {row["query"]: row["response"] for row in SFT}
    ours = gold_scores(queries, [row["response"] for row in PPO])
    for baseline, summaries in (
        ("reference", [row["reference"] for row in PPO]),
        ("sft_evaluation.jsonl", [after_sft[query] for query in queries]),
    ):
        theirs = gold_scores(queries, summaries)
        wins = statistics.fmean((a > b) + (a == b) / 2 for a, b in zip(ours, theirs, strict=True))
        gold = "ppo_rlhf.worlds.posts:gold_scores"
        report = judge.judge(judge.Args(candidate="evaluation.jsonl", baseline=baseline, gold=gold), shown=False)
        assert report["win_rate"] == pytest.approx(wins)
        expected += [100 * report[name] for name in ("win_rate", "win_rate_low", "win_rate_high")]
        (results,) = tmp_path.glob(f"evaluation__against_{baseline.removesuffix('.jsonl')}__by_*/judgement.jsonl")
        exec(code.replace("runs/<run>/evaluation__against_<baseline>__by_<judge>/judgement.jsonl", str(results)), {})
        rate, low, high = (100 * float(number) for number in re.findall(r"0\.\d+", capsys.readouterr().out))
        shown.append(f"{rate:.1f} % [{low:.1f}, {high:.1f}] against")
    assert numbers("win rate of PPO against it") == pytest.approx(expected, abs=0.051)
    assert f"{shown[0]} the references, {shown[1]} SFT" in " ".join(CHAPTER2.split())


def test_reward_model():
    results, text = META["reward"]["results"], " ".join(CHAPTER2.split())
    accuracy, ceiling = results["eval/rm/validation/accuracy"], results["ceiling"]
    assert f"agrees with the annotator in {100 * accuracy:.1f} % of 1,019 held-out" in text
    assert f"formula would reach {100 * ceiling:.1f} %" in text


def test_three_posts():
    for row in PPO[:3]:
        after_sft = {r["query"]: r["response"] for r in SFT}[row["query"]]
        post = row["query"].partition("POST: ")[2].removesuffix("\n\nTL;DR:").replace("\n", " ")
        cells = [post, *(text.strip().replace("\n", "⏎") for text in (row["reference"], after_sft, row["response"]))]
        assert f"| {' | '.join(cells)} |" in CHAPTER2


def test_the_run_whose_reward_model_was_misled():
    before = ROOT / "static/demo-tldr-before"
    assert json.loads((before / "policy_meta.json").read_text())["commit"].startswith("e2a5dd9")
    rows = rows_of(before / "evaluation.jsonl")
    assert len(rows) == 256
    for first_words, group in (
        ("PPO, summaries that repeat a statement |", [row for row in rows if repeats_itself(row["response"])]),
        ("PPO, the others |", [row for row in rows if not repeats_itself(row["response"])]),
    ):
        means = [statistics.fmean(row[name] for row in group) for name in ("scores", "gold_scores")]
        golds = gold_scores([row["query"] for row in group], [row["response"] for row in group])
        assert means[1] == pytest.approx(statistics.fmean(golds), abs=1e-5)
        share, *shown = numbers(first_words)
        assert share == pytest.approx(100 * len(group) / 256, abs=0.051)
        assert shown == pytest.approx(means, abs=0.0051)
    means = [statistics.fmean(row[f"reference_{name}"] for row in rows) for name in ("scores", "gold_scores")]
    assert numbers("references |") == pytest.approx(means, abs=0.0051)
