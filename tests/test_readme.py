"""README.md and docs/ keep to what they speak of: committed numbers, files, anchors and flags that exist."""

import ast
import csv
import dataclasses
import importlib
import json
import random
import re
import statistics
import sys
from pathlib import Path

import pandas as pd
import pytest
import scipy.stats
import torch
import tyro
from runs import explained_metrics, metrics_of, only

from benchmark import diagrams, lab, train_worlds
from benchmark.curves import front_page
from benchmark.experiments import ablations, critic, estimators, staleness
from ppo_rlhf import (
    judge,
    rlvr_async,
    rlvr_math,
    rlvr_policy,
    rlvr_tools,
    sample,
    tldr_all,
    tldr_policy,
    tldr_reward,
    tldr_sft,
    train_both,
    train_policy,
    train_reward,
)
from ppo_rlhf.lib import cli, plots
from ppo_rlhf.lib.files import flatten
from ppo_rlhf.worlds import building, tales

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CHAPTER1, RESULTS = ((ROOT / "docs" / name).read_text() for name in ("chapter1.md", "results.md"))
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("benchmark/**/*.md"))]
DOCS = "\n".join(page.read_text() for page in PAGES if page.parent.name in (ROOT.name, "docs"))
BENCHMARK = [page for page in PAGES if page.is_relative_to(ROOT / "benchmark") and "results" not in page.parts]
DEMO = ROOT / "static/demo"


def demo_rows() -> list[dict]:
    return [json.loads(line) for line in (DEMO / "comparison.jsonl").read_text().splitlines()]


def demo_metrics() -> list[dict[str, float]]:
    with (DEMO / "metrics.csv").open() as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def printed(first_words: str) -> list[float]:
    """The numbers of a line in chapter 1's block of what the demo prints, without those of its first words."""
    (block,) = [block for block in blocks(CHAPTER1) if block.startswith("The reward model")]
    (row,) = [line for line in block.splitlines() if line.startswith(first_words)]
    return [float(number) for number in re.findall(r"[-+]?\d+(?:\.\d+)?", row.removeprefix(first_words))]


def test_gold_score_and_score():
    rows = demo_rows()
    assert len(rows) == 400
    base, policy = ([row[f"{name} gold"] for row in rows] for name in ("base", "policy"))
    means = [statistics.fmean(base), statistics.fmean(policy)]
    expected = [*means, (means[1] - means[0]) / statistics.stdev(base)]
    assert printed("The gold score, which PPO never saw,") == pytest.approx(expected, abs=0.05)
    assert printed("The gold score, which PPO never saw,")[:2] == pytest.approx(means, abs=0.005)
    expected = [statistics.fmean(row[f"{name} score"] for row in rows) for name in ("base", "policy")]
    assert printed("On 400 held-out queries,") == pytest.approx(expected, abs=0.005)


def test_grammar():
    shares = [tales.grammatical_share([row[name] for row in demo_rows()]) for name in ("base", "policy")]
    assert printed("The grammar could") == pytest.approx([100 * share for share in shares], abs=0.05)


def test_kl_of_the_last_updates():
    kl = [row["objective/kl"] for row in demo_metrics()]
    assert printed("The policy is") == pytest.approx([statistics.fmean(kl[-10:]), 6], abs=0.05)


def test_over_optimisation():
    """The sentences about the three numbers of labels hold in the committed curves."""
    table = pd.read_csv(ROOT / "benchmark/results/overoptimisation/overoptimisation.csv")
    ends, peaks, accuracy = {}, {}, {}
    for (labels, seed), run in table.groupby(["experiment", "seed"]):
        smooth = run[["d", "gold", "proxy"]].rolling(5).mean()
        ends[labels, seed], peaks[labels, seed] = smooth.iloc[-1], smooth.loc[smooth["gold"].idxmax()]
        accuracy[labels, seed] = run["accuracy"].iloc[0]
    text = " ".join(RESULTS.split())
    for words in (
        "(46 % and 38 % of held-out",
        "d ≈ 9 and 11 and",
        "rises by 6 and 5.",
        "(32, 28, 52 and 46 %)",
        "1.6 and 0.9",
    ):
        assert words in text
    learned = [key for key in ends if key[0] == "320 labels" and accuracy[key] > 30]
    assert [round(accuracy[key]) for key in learned] == [46, 38]
    for key, proxy in zip(learned, (6, 5), strict=True):
        assert 0.9 < peaks[key]["gold"] < 1.3 and 8.5 < peaks[key]["d"] < 11 and abs(ends[key]["gold"]) < 0.1
        assert ends[key]["proxy"] == pytest.approx(proxy, abs=0.1)
    of_640 = {key: round(accuracy[key]) for key in ends if key[0] == "640 labels"}
    assert list(of_640.values()) == [32, 28, 52, 46]
    ahead = {accuracy: ends[key]["proxy"] - ends[key]["gold"] for key, accuracy in of_640.items()}
    assert [round(ahead[accuracy], 1) for accuracy in (32, 46)] == [1.6, 0.9]
    assert ahead[28] < 0.1 and ahead[52] < 0
    gained = {accuracy: ends[key]["gold"] for key, accuracy in of_640.items()}
    assert gained[28] > gained[46]  # the worst and the second best
    for key in ends:
        if key[0] == "640 labels":
            assert ends[key]["gold"] > peaks[key]["gold"] - 0.5
        if key[0] == "4,992 labels":
            assert ends[key]["gold"] > ends[key]["proxy"] + 1 and ends[key]["gold"] > peaks[key]["gold"] - 0.5
            assert round(accuracy[key]) in (79, 80)


def interval_of(values: pd.Series) -> tuple[float, float]:
    """Mean, and half of the 95 % interval."""
    assert len(values) in (2, 3, 5, 20)
    found = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)
    return values.mean(), (found.high - found.low) / 2


def table_under(header: str) -> dict[str, list[str]]:
    """The cells of a table of docs/results.md by the first of each row. header: how its first line begins."""
    lines = RESULTS[RESULTS.index(header) :].splitlines()[2:]
    rows = [line.strip("| ").split(" |") for line in lines[: lines.index("")]]
    return {first: [cell.strip() for cell in cells] for first, *cells in rows}


def check_cell(cell: str, values: pd.Series, places: int) -> None:
    numbers = [float(number) for number in re.findall(r"[-+]?\d+\.\d+", cell)]
    assert numbers == pytest.approx(interval_of(values), abs=0.51 * 10**-places), cell


def test_table_of_gdpo_and_ipo():
    runs = pd.read_csv(ROOT / "benchmark/results/gdpo-and-ipo/runs.csv")
    assert f"all at {runs['commit'].unique().item()}" in " ".join(RESULTS.split())
    rows, own = table_under("| | seeds | correct"), {name: x.set_index("seed") for name, x in runs.groupby("variant")}
    assert [name.strip("`") for name in rows] == list(runs["variant"].unique())
    for name, cells in rows.items():
        of, than = own[name.strip("`")], own[{"`gdpo`": "grpo", "`ipo`": "ppo"}.get(name, name.strip("`"))]
        assert cells[0] == str(len(of))
        for cell, column in zip(cells[1::2], ("course", "retells_course"), strict=True):
            assert bool(cell) == (column == "course" or name in ("`grpo`", "`gdpo`"))
            check_cell(cell, 100 * of[column], 1) if cell else None
        for cell, column in zip(cells[2::2], ("course", "retells_course"), strict=True):
            check_cell(cell, 100 * (of[column] - than[column]).dropna(), 1) if cell else None


def test_demo_of_chapter_3():
    """Before and after: the first row of the metrics, and meta.json."""
    folder, page = ROOT / "static/demo-rlvr", (ROOT / "docs/chapter3.md").read_text()
    meta = json.loads((folder / "meta.json").read_text())
    after, before = meta["results"], pd.read_csv(folder / "metrics.csv").iloc[0]
    assert f"at commit {meta['commit'][:7]}, seed {meta['args']['seed']}" in page and meta["sizes"]["updates"] == 70
    names = {"the likeliest response |": "gsm8k_strict", "tokens of the likeliest": "length"}
    names |= {f"pass@{k}": f"pass@{k}" for k in (1, 2, 4, 8, 16)}
    names |= {f"{k} step": f"gsm8k_strict_steps_{k}" for k in (1, 2, 3, 4)}
    table = page[page.index("| | language model | after 70") :].split("\n\n")[0]
    for words, name in names.items():
        scale = 1 if name == "length" else 100
        (row,) = [line for line in table.splitlines() if re.search(rf"{re.escape(words)}(?!\d)", line)]
        numbers = [float(cell.removesuffix(" %")) for cell in row.strip("| ").split(" | ")[1:]]
        assert numbers == pytest.approx([scale * x[f"eval/{name}"] for x in (before, after)], abs=0.051), row
    for name in ("gsm8k_strict", "mean@16"):
        shown = "from {:.1f} % to {:.1f} %".format(*(100 * x[f"eval/{name}"] for x in (before, after)))
        assert shown in " ".join(RESULTS.split())
    errors = [100 * x[f"eval/{name}"] for name in ("mean_standard_error", "standard_error") for x in (before, after)]
    shown = "is {:.1f} points before training and {:.1f} after; that of the greedy accuracy is {:.1f} and {:.1f}."
    assert shown.format(*errors) in " ".join(page.split())
    solved = [json.loads(line) for line in (folder / "evaluation.jsonl").read_text().splitlines()]
    solved = {row["prompt"].strip(): row for row in solved}
    demo = page.partition("## The demo\n")[2].partition("\n## ")[0]
    shown = [line.strip("| ").split(" | ") for line in demo.splitlines() if "#### " in line and line.startswith("|")]
    assert len(shown) == 3
    for problem, *samples in shown:
        found = [" ".join(solved[problem][f"a_{which}_sample"].split()) for which in ("right", "wrong")]
        assert [sample.replace("\\*", "*") for sample in samples] == found


SHOWN = ["samples", "pass@16", "greedy"]  # of the runs that are divided by something
LENGTHS = ("grpo, own length", "dr_grpo, own length", "grpo, greatest length")  # rows of the page


def test_tables_of_the_estimators():
    folder = ROOT / "benchmark/results/estimators"
    runs, updates = (pd.read_csv(folder / f"{name}.csv") for name in ("runs", "updates"))
    commits = runs.dropna(subset="commit").groupby(runs["part"] == "divide")["commit"].agg(set)
    named = (
        f"{words}, at commit (\\w+)"
        for words in ("of this section and of the estimators", r"those of \*Divide by what\?\*")
    )
    assert [{re.search(name, " ".join(RESULTS.split()))[1]} for name in named] == list(commits)
    parts = {part: own.groupby("variant") for part, own in runs.groupby("part")}
    rows = table_under("| `--ppo.advantage` | correct samples (%)")
    names = {name.strip("`") for name in rows}
    assert names == set(rlvr_math.ESTIMATORS) - {"maxrl", "gdpo"} == set(parts["estimators"].groups)
    for name, cells in rows.items():
        own = parts["estimators"].get_group(name.strip("`"))
        for cell, column in zip(cells, ("samples", "greedy"), strict=True):
            check_cell(cell, 100 * own[column], 1)

    divided = {name: 100 * own.set_index("seed")[SHOWN] for name, own in parts["divide"]}
    rows = table_under("| | correct samples (%) | difference | one of 16")
    assert [name.strip("`") for name in rows] == list(divided) == list(estimators.DIVIDED)
    for name, own in divided.items():
        samples, more, one_of_16, more_of_16, greedy = rows[f"`{name}`"]
        for cell, column in ((samples, "samples"), (one_of_16, "pass@16"), (greedy, "greedy")):
            check_cell(cell, own[column], 1)
        if name != "dr_grpo":
            check_cell(more, own["samples"] - divided["dr_grpo"]["samples"], 1)
            check_cell(more_of_16, own["pass@16"] - divided["dr_grpo"]["pass@16"], 1)

    rows = table_under("| | tokens more, wrong responses")
    for name, cells in zip(LENGTHS, rows.values(), strict=True):
        for cell, right in zip(cells, ("incorrect", "correct"), strict=True):
            means = updates.groupby(["part", "variant", "seed"])[f"val/sequence_lengths_{right}"].mean()["lengths"]
            check_cell(cell, means[name] - means["dr_grpo, greatest length"], 2)

    rows, kl = table_under("| penalty | three tokens: 0.40"), "objective/true_kl"
    assert set(rows) == set(parts["beside"].groups)
    for name, (exact, alone, beside, right) in rows.items():
        own = parts["beside"].get_group(name)
        check_cell(beside, own[kl], 2)
        check_cell(right, 100 * own["samples"], 1)
        assert (name == "none") == (exact == "") == (alone == "")
        for cell, part in ((exact, "exact"), (alone, "alone")):
            if cell:
                check_cell(cell, parts[part].get_group(name)[kl], 2)
    starts = runs[runs["part"].isin(["exact", "alone"])].groupby("part")["first_kl"].mean()
    assert starts.round(2).to_dict() == {"exact": 0.40, "alone": 1.48}


def test_sentences_about_the_estimators():
    runs = pd.read_csv(ROOT / "benchmark/results/estimators/runs.csv").query("part == 'estimators'")
    text = " ".join(RESULTS.split())

    def distances(column: str) -> dict[str, tuple[float, float]]:
        scores = 100 * runs.pivot(index="seed", columns="variant", values=column)
        return {name: interval_of(scores[name] - scores["rloo"]) for name in scores if name != "rloo"}

    samples, greedy = distances("samples"), distances("greedy")
    means, halves = zip(*(gap for name, gap in samples.items() if name not in ("gae", "remax")), strict=True)
    assert len(means) == 5 and max(means) < 0
    shown = f"by {-max(means):.1f} to {-min(means):.1f} points on average among samples, "
    assert f"{shown}with intervals of ±{min(halves):.1f} to ±{max(halves):.1f}." in text
    assert "`gae` has {:.1f} ± {:.1f} points fewer".format(-samples["gae"][0], samples["gae"][1]) in text
    assert greedy["gae"][0] > 0
    numbers = [-samples["remax"][0], samples["remax"][1], -greedy["remax"][0], greedy["remax"][1]]
    assert "{:.1f} ± {:.1f} points fewer among samples, {:.1f} ± {:.1f} among greedy".format(*numbers) in text


def test_what_is_said_of_the_critic():
    runs = pd.read_csv(ROOT / "benchmark/results/critic/runs.csv", dtype={"commit": str})
    page = RESULTS[RESULTS.index("## What methods for the critic do") : RESULTS.index("## What the forms of the KL")]
    assert set(runs["commit"]) == {re.search(r"at commit (\w+)", page)[1]} and len(runs) == 5 * len(critic.VARIANTS)
    runs[["course", "samples", "greedy"]] *= 100
    own = {name: rows.set_index("seed") for name, rows in runs.groupby("variant")}
    rows = table_under("| | changed | correct while it learns (%)")
    assert [name.strip("`") for name in rows] == list(critic.VARIANTS)
    for name, (changed, course, samples, difference, greedy) in rows.items():
        variant = name.strip("`")
        assert changed.strip("`") == critic.METHODS.get(variant, changed.strip("`"))
        for cell, column in ((course, "course"), (samples, "samples"), (greedy, "greedy")):
            check_cell(cell, own[variant][column], 1)
        if variant != "gae":
            check_cell(difference, own[variant]["samples"] - own["gae"]["samples"], 1)

    more = {name: table["samples"] - own["gae"]["samples"] for name, table in own.items() if name != "gae"}
    p_values = {name: scipy.stats.ttest_1samp(values, 0).pvalue for name, values in more.items()}
    excluding = [name for name, values in more.items() if abs(interval_of(values)[0]) > interval_of(values)[1]]
    assert excluding == ["nll"] and 6 * p_values["nll"] < 0.05 and len(more) == 6 and (more["nll"] > 0).all()
    for words, values in {
        "The likelihood loss helps**: {:.1f} ± {:.1f} points more": more["nll"],
        "if at all**: {:+.1f} ± {:.1f} points while it learns": own["lam_alpha"]["course"] - own["gae"]["course"],
        "learns alone for {:.1f} ± {:.1f} updates instead of 3": own["pretraining"]["alone"],
        "while it learns, {:.1f} ± {:.1f} points fewer": own["gae"]["course"] - own["pretraining"]["course"],
        "the critic explains {:.2f} ± {:.2f} of the variance of its targets, which": own["pretraining"]["explained"],
        "that of `gae` {:.2f} ± {:.2f}.": own["gae"]["explained"],
        "the critic explains {:.2f} ± {:.2f} of the variance of its targets at": own["critic_lam"]["explained_last"],
        "and `gae`'s {:.2f} ± {:.2f}.": own["gae"]["explained_last"],
        "`rloo` has {:.1f} ± {:.1f} points fewer correct samples": -more["rloo"],
    }.items():
        assert words.format(*interval_of(values)) in " ".join(page.split()), words
    assert set(own["gae"]["alone"]) == {3}
    updates = pd.read_csv(ROOT / "benchmark/results/critic/updates.csv").set_index(["variant", "step"]).sort_index()
    assert round(100 * updates.loc["gae", 0]["objective/verifiable_correct_rate"].mean()) == 33
    explained = updates.loc["gae", 7]["val/explained_var"].mean()
    assert f"in the eighth update, `gae`'s critic explains {explained:.2f}" in " ".join(page.split())


def test_table_of_staleness():
    runs = pd.read_csv(ROOT / "benchmark/results/staleness/runs.csv", dtype={"commit": str})
    page = RESULTS[RESULTS.index("## What staleness does") : RESULTS.index("Does DeepSeek's off-policy mask")]
    page += RESULTS[RESULTS.index("[benchmark/results/staleness]") :]
    assert set(runs["commit"]) == {re.search(r"at commit (\w+)", page)[1]}
    rows = [line.strip("| ").split(" |") for line in page.splitlines() if re.match(r"\| \d \|", line)]
    assert (
        len(rows) == 13 == len([v for v in staleness.EXPERIMENT.variants if "masked" not in v])
    )  # which was not yet run
    fresh = 100 * runs[runs["staleness"] == 0].set_index("seed")
    for age, way, *cells in rows:
        own = runs[(runs["staleness"] == int(age)) & (runs["way"] == (way.strip(" `") or "any"))].set_index("seed")
        for (right, difference), column in zip((cells[:2], cells[2:4]), ("samples", "greedy"), strict=True):
            check_cell(right, 100 * own[column], 1)
            if age != "0":
                check_cell(difference, 100 * own[column] - fresh[column], 1)
        if age != "0":
            check_cell(cells[4], own["async/kl"], 4)
            check_cell(cells[5], own["async/ess"], 3)


def test_what_is_said_of_the_off_policy_mask():
    folder = ROOT / "benchmark/results/staleness-masked"
    runs = pd.read_csv(folder / "runs.csv", dtype={"commit": str})
    page = RESULTS[RESULTS.index("Does DeepSeek's off-policy mask") : RESULTS.index("## What a tool's tokens")]
    assert set(runs["commit"]) == {re.search(r"those\sof\sthe\ssecond,\sat\scommit\s(\w+)", page)[1]}
    runs[["samples", "greedy"]] *= 100
    share = 100 * runs.query("way == 'masked'").groupby("staleness")["async/masked_share"].mean()
    runs = runs.set_index(["way", "staleness", "seed"])[["samples", "greedy"]].sort_index()
    check_cell(re.search(r"where\s(.*) % of the samples", page)[1], runs.loc["any", 0]["samples"], 1)
    rows, more = table_under("| staleness | without the mask"), runs.loc["masked"] - runs.loc["bypass"]
    assert list(rows) == ["1", "2", "4", "8"]
    for age, (without, masked, difference, tokens) in rows.items():
        assert tokens == f"{share[int(age)]:.1f}"
        check_cell(without, runs.loc["bypass", int(age)]["samples"], 1)
        check_cell(masked, runs.loc["masked", int(age)]["samples"], 1)
        check_cell(difference, more.loc[int(age)]["samples"], 1)
    overall = {column: interval_of(more[column].groupby("seed").mean()) for column in more}
    words = "{:+.1f} ± {:.1f} points, averaged over the four stalenesses, and {:+.1f} ± {:.1f} among greedy"
    assert words.format(*overall["samples"], *overall["greedy"]) in " ".join(page.split())
    lost = {age: runs.loc["any", 0]["samples"] - runs.loc["bypass", age]["samples"] for age in (4, 8)}
    words = "four updates cost {:.1f} ± {:.1f} points and eight {:.1f} ± {:.1f}, not 7 and 11"
    assert words.format(*interval_of(lost[4]), *interval_of(lost[8])) in " ".join(page.split())
    excluding = [age for age, own in more["samples"].groupby("staleness") if abs(own.mean()) > interval_of(own)[1]]
    assert excluding == [4]


def test_bypass_and_decoupled_are_alike_in_one_column_of_two():
    runs = pd.read_csv(ROOT / "benchmark/results/staleness/runs.csv").set_index(["way", "staleness", "seed"])
    runs = runs[["samples", "greedy"]]
    ahead = 100 * (runs.loc["bypass"] - runs.loc["decoupled"])
    assert len(ahead) == 20
    overall = {column: interval_of(ahead[column].groupby("seed").mean()) for column in ahead}
    by_age, page = ahead["greedy"].groupby("staleness").mean(), " ".join(RESULTS.split())
    for words in (
        "alike among samples**: with `bypass`, {:.1f} ± {:.1f} points more are correct".format(*overall["samples"]),
        "by {:.1f}, {:.1f}, {:.1f} and {:.1f} points".format(*by_age),
        f"in {(ahead['greedy'] > 0).sum()} of the 20 pairs of runs",
        "Averaged over the stalenesses it is {:.1f} ± {:.1f} points".format(*overall["greedy"]),
    ):
        assert words in page
    assert overall["greedy"][0] < overall["greedy"][1]  # "just includes 0"


TALES = ablations.WORLDS["tales"]


def effects_of_ablations() -> dict[str, dict[str, tuple[float, float]]]:
    """Of each ablation and effect: mean and half of the 95 % interval, from the committed numbers of single runs."""
    runs = pd.read_csv(ROOT / "benchmark/results/ablations/ablations.csv").set_index("seed").drop(columns="commit")
    runs = runs[[not ablations.is_setting(TALES, name) for name in runs["ablation"]]]
    baseline = runs[runs["ablation"] == "baseline"].drop(columns="ablation")
    effects = {}
    for name, own in runs.groupby("ablation"):
        values = own.drop(columns="ablation") - (0 if name == "baseline" else baseline)
        assert sorted(values.index) == [1, 2, 3, 4, 5]
        tests = {effect: scipy.stats.ttest_1samp(values[effect], 0).confidence_interval(0.95) for effect in values}
        effects[name] = {effect: ((i.low + i.high) / 2, (i.high - i.low) / 2) for effect, i in tests.items()}
    return effects


def test_sentences_about_ablations():
    """The lists name every effect whose interval leaves out 0, with its size, and every ablation that has none."""
    effects, text = effects_of_ablations(), " ".join(RESULTS.split())
    for words in ("gold score of 3.6 at a KL of 3.7", "34 points more"):
        assert words in text
    baseline = effects.pop("baseline")
    assert [round(baseline[effect][0], 1) for effect in ("gold score", "KL")] == [3.6, 3.7]
    assert baseline["explained variance"][0] < 0
    section = RESULTS.partition("These are all the effects")[2].partition("\n\nSome of these details")[0]
    *lists, nothing = (" ".join(part.split()) for part in section.split("\n- **")[1:])
    left = set(effects)
    for effect, shown in zip(baseline, lists, strict=True):
        assert shown.lower().startswith(effect.lower())
        means = {name: own[effect][0] for name, own in effects.items() if abs(own[effect][0]) > own[effect][1]}
        left -= set(means)
        assert set(re.findall(r"`([\w.-]+)`,? ([+-][\d.]+\d)", shown)) == {(n, f"{x:+.2f}") for n, x in means.items()}
    assert sorted(re.findall(r"`([\w.-]+)`", nothing)) == sorted(left)
    curves = pd.read_csv(ROOT / "benchmark/results/tales/curves.csv")
    critic = curves.query("task == 'tales' and metric == 'ppo/val/var_explained'")["mean"].iloc[-1]
    assert f"of the ten seeds above, {100 * critic:.0f} %" in text


def last_twentieth(curve: pd.DataFrame) -> tuple[float, float]:
    """Mean of mean and deviation over the last 5 % of the updates."""
    rows = curve[curve["update"] >= 0.95 * curve["update"].max()]
    return rows["mean"].mean(), rows["std"].mean()


def test_ten_seeds_beside_the_original():
    """The table's numbers are those of the committed curves and of the published ones, rounded."""
    ours = pd.read_csv(ROOT / "benchmark/results/tales/curves.csv").query("task == 'tales'")
    assert set(ours["seeds"]) == {10}
    of_original = "task == 'sentiment' and source_figure == 'ours1.png' and implementation.str.startswith('openai')"
    reference = ROOT / "benchmark/curves/reference"
    theirs = pd.read_csv(reference / "lm_human_preferences.csv").query(of_original)
    first = pd.read_csv(reference / "first_update.csv").query(of_original).set_index("metric")["mean"]
    rows = [line.split("|")[1:-1] for line in RESULTS.splitlines() if line.startswith("| `") and "→" in line]
    assert len(rows) == 5
    for name, their_cell, our_cell in rows:
        metric = name.strip(" `")
        curve = ours[ours["metric"] == metric]
        sides = [(our_cell, [float(curve["mean"].iloc[0]), *last_twentieth(curve)])]
        if metric != "objective/gold_scores":
            sides.append((their_cell, [first[metric], *last_twentieth(theirs[theirs["metric"] == metric])]))
        for cell, expected in sides:
            shown = re.findall(r"-?\d+\.\d+", cell)
            assert [float(number) for number in shown] == [
                pytest.approx(value, abs=0.51 * 10 ** -len(number.partition(".")[2]))
                for number, value in zip(shown, expected, strict=True)
            ], name


def test_curves_of_the_questions():
    """Healthy numbers of two demos: first update, mean of the last ten, least, most and median."""
    page = (ROOT / "docs/questions.md").read_text()
    one, three = (pd.read_csv(ROOT / f"static/{name}/metrics.csv") for name in ("demo", "demo-rlvr"))
    assert (len(one), len(three)) == (200, 70)
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ")[1] for line in page.splitlines() if line[:2] == "| "}

    def ends(values: pd.Series) -> list[float]:
        return [values.iloc[0], values.iloc[-10:].mean()]

    right = 100 * three["objective/verifiable_correct_rate"]
    explained = [one["ppo/val/var_explained"], three["val/explained_var"]]
    expected = {
        "score": (ends(one["objective/score"]) + ends(right), 0.5),
        "KL from the reference": ([0, *ends(one["objective/kl"])[1:]], 0.05),
        "`first_ratio_gap`": ([one["ppo/val/first_ratio_gap"].max(), three["val/first_ratio_gap"].max()], 5e-8),
        "clipped share": ([100 * one["ppo/policy/clipfrac"].max(), 100 * three["policy/clipfrac_avg"].max()], 0.05),
        "`approxkl`": ([one["ppo/policy/approxkl"].median(), three["policy/approxkl_avg"].median()], 5e-5),
        "policy loss": (
            [
                one["ppo/loss/policy"].min(),
                one["ppo/loss/policy"].max(),
                three["loss/policy_avg"].min(),
                three["loss/policy_avg"].max(),
            ],
            6e-4,
        ),
        "value loss": (ends(one["ppo/loss/value"]) + ends(three["loss/value_avg"]), 0.03),
        "explained variance": ([0, *[ends(values)[1] for values in explained]], 0.005),
        "entropy per token": (ends(one["ppo/policy/entropy"]) + ends(three["policy/entropy_avg"]), 0.005),
        "responses that end": ([ends(one["objective/stopped"])[1], ends(three["val/stop_token_rate"])[1]], 0.005),
    }
    for name, (values, tolerance) in expected.items():
        cell = rows[name]
        shown = [float(number) for number in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e-\d+)?", cell)]
        found = shown[-len(values) :]
        assert found == pytest.approx(values, abs=tolerance), name
    first, last = ends(one["objective/score"])
    assert f"{first:.2f} → {last:.2f}; {right.iloc[0]:.0f} → {right.iloc[-10:].mean():.0f} % correct" in page
    values = [*ends(one["ppo/loss/value"]), *ends(three["loss/value_avg"])]
    assert "{:.1f} → {:.2f}; {:.2f} → {:.3f}".format(*values) in page
    assert (three["policy/approxkl_avg"][:5] < 1e-12).all() and three["policy/approxkl_avg"][5] > 1e-4
    assert f"the highest in chapter 1 is {one['ppo/policy/approxkl'].max():.2f}," in page


def test_reward_model_and_commit():
    policy, reward = (json.loads((DEMO / name).read_text()) for name in ("meta.json", "reward_meta.json"))
    assert policy["commit"] == reward["commit"]
    assert f"at commit {policy['commit'][:7]}, seed 1" in RESULTS
    assert f"(seed 1, commit {policy['commit'][:7]};" in README
    assert f"For seed 1, commit {policy['commit'][:7]}," in " ".join(CHAPTER1.split())
    learned = reward["results"]
    assert printed("The reward model finds")[0] == pytest.approx(100 * learned["test_accuracy"], abs=0.05)
    assert printed("The annotator is noisy:")[0] == pytest.approx(100 * learned["ceiling"], abs=0.05)


def test_four_pairs_of_continuations_the_first_in_chapter_1():
    for number, row in enumerate(demo_rows()[:4]):
        cells = [row["query"].strip()]
        cells += [f"{row[name].strip()} (gold {row[f'{name} gold']:+.0f})" for name in ("base", "policy")]
        assert (f"| {' | '.join(cells)} |" in RESULTS) == (number > 0)
        shown = f"| query | {cells[0]} |\n|---|---|\n| before | {cells[1]} |\n| after | {cells[2]} |\n"
        assert (shown in CHAPTER1) == (number == 0)


def test_results_at_a_glance():
    """The list at the top of docs/results.md repeats numbers of the page, which have their own tests."""
    glance = " ".join(RESULTS.partition("## At a glance")[2].partition("## The demo")[0].split())
    ours = pd.read_csv(ROOT / "benchmark/results/tales/curves.csv").query("task == 'tales'")
    gold, kl = (ours[ours["metric"] == f"objective/{name}"] for name in ("gold_scores", "kl"))
    ends = [f"{mean:.2f} ± {deviation:.2f}" for mean, deviation in (last_twentieth(gold), last_twentieth(kl))]
    assert f"gold score rises from {gold['mean'].iloc[0]:.2f} to {ends[0]}," in glance
    assert f"brings the KL to {ends[1]}; its target is 6." in glance
    effects = effects_of_ablations()
    gold = {name for name, own in effects.items() if abs(own["gold score"][0]) > own["gold score"][1]} - {"baseline"}
    of_kl_and_scores = {"fixed-kl", "no-kl", "not-normalised-after", "never-normalised"}
    assert gold == {"lambda-0", "lambda-1", "gamma-0.9", "one-epoch"} | of_kl_and_scores
    shown = "the number of epochs, the KL penalty and its controller, and the normalisation of scores"
    assert f"the intervals of λ, γ, {shown} leave out 0" in glance


def test_speed_of_chapter_3():
    four, two = (
        json.loads((ROOT / f"benchmark/results/speed/sums-64+88{ending}.json").read_text())
        for ending in ("", "-two-updates")
    )
    assert (four["arguments"]["updates"], two["arguments"]["updates"]) == (4, 2)

    def times_as_fast(report: dict, name: str) -> str:
        pairs = zip(report["runs"][name], report["runs"]["trl"], strict=True)
        ratios = [run["episodes_per_second"] / trl["episodes_per_second"] for run, trl in pairs]
        assert len(ratios) == 5
        return f"{statistics.median(ratios):.1f} [{min(ratios):.1f}, {max(ratios):.1f}]"

    rows = table_under("| | episodes per second | times as fast as TRL")
    for row, (speed, times, tokens, memory) in zip(four["speed"], rows.values(), strict=True):
        assert times == (times_as_fast(four, row[""]) if row[""] != "trl" else "")
        assert speed == row["episodes/s"] and row["tokens of a response"].startswith(f"{tokens} ")
        assert memory == f"{float(row['peak memory of a process, GB'].split()[0]):.2f}"
    each, shared = ("ours, each row", "ours, shared prefixes")
    text = " ".join(RESULTS.split())
    assert f"it was {times_as_fast(two, each)}, and {times_as_fast(two, shared)} with shared" in text
    assert [times_as_fast(four, name).split()[0] for name in (each, shared)] == ["3.5", "4.6"]
    assert "3.5 times those of `GRPOTrainer` in TRL 1.16, and 4.6 times with shared prefixes" in text


def rates(name: str) -> dict[str, float]:
    """Episodes per second of each implementation, from the committed measurements."""
    rows = json.loads((ROOT / f"benchmark/results/speed/{name}.json").read_text())["speed"]
    return {row[""]: float(row["episodes/s"].split()[0]) for row in rows}


SPEED_ROWS = {
    "GPT-2 of 957k parameters, 64 + 24": ("tales-64+24", "ours"),
    "the same, 24 + 24": ("tales-24+24", "ours"),
    "the same, 24 to 64 + 24": ("tales-24to64+24", "ours"),
    "GPT-2 124M, 24 + 24, 16, float32": ("gpt2-24+24", "ours, float32"),
    "the same, bfloat16": ("gpt2-24+24", "ours, bfloat16"),
}


def test_speed():
    """Rates to the digits shown; how many times as fast, to what medians of ratios and ratios of medians differ."""
    times: dict[str, list[float]] = {"trl": [], "details": []}
    for first_words, (name, side) in SPEED_ROWS.items():
        (row,) = [line for line in RESULTS.splitlines() if line.startswith(f"| {first_words}")]
        ours, *peers = row.strip("|").split("|")[1:4]
        measured = rates(name)
        assert float(ours) == pytest.approx(measured[side], rel=0.005)
        for peer, cell in zip(("trl", "details"), peers, strict=True):
            numbers = [float(number) for number in re.findall(r"[\d.]+", cell)]
            assert bool(numbers) == (peer in measured)
            if numbers:
                assert numbers[0] == pytest.approx(measured[peer], rel=0.01)
                assert numbers[1] == pytest.approx(measured[side] / measured[peer], abs=0.11)
                times[peer] += [] if "bfloat16" in first_words else [numbers[1]]
    lowest, highest = ({peer: pick(of_peer) for peer, of_peer in times.items()} for pick in (min, max))
    shown = f"{lowest['trl']} to {highest['trl']} times the episodes per second of TRL 1.12, {lowest['details']} to "
    assert f"{shown}{highest['details']} times those of lm-human-preference-details" in " ".join(RESULTS.split())


def test_memory_next_to_others():
    """Median peaks of all rows, as shares of the others'; in the last row, ours is in bfloat16 and does not count."""
    shares: dict[str, set[str]] = {"trl": set(), "details": set()}
    for name, side in list(SPEED_ROWS.values())[:-1]:
        rows = json.loads((ROOT / f"benchmark/results/speed/{name}.json").read_text())["speed"]
        peaks = {row[""]: float(row["peak memory of a process, GB"].split()[0]) for row in rows}
        for peer in shares.keys() & peaks:
            shares[peer].add(f"{peaks[side] / peaks[peer]:.2f}")
    trl, details = (f"{min(found)} to {max(found)}" for found in shares.values())
    assert f"- Peak memory is {trl} of TRL's and {details} of lm-human-preference-details', " in RESULTS


def anchors(text: str) -> set[str]:
    """What a link to a page can name: anchors that it sets, and its headings as GitHub names them."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    named = [
        re.sub(r"[^\w -]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).strip().lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    ]
    again = {f"{name}-{number}" for name in named for number in range(1, named.count(name))}
    return {*named, *again, *re.findall(r'<a id="([^"]+)">', text)}


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links of a page that lead to no file, no anchor of a page or no line of a file."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent.joinpath(path) if path else page
        if not target.exists() or not target.resolve().is_relative_to(ROOT):
            broken.append(link)
        elif lines := re.fullmatch(r"L(\d+)", anchor):
            if int(lines[1]) > len(target.read_text().splitlines()):
                broken.append(link)
        elif anchor and anchor not in anchors(text if target == page else target.read_text()):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def test_links_lead_somewhere(page):
    assert broken_links(page, page.read_text()) == []


def test_broken_links_are_found():
    page = ROOT / "docs/results.md"
    good = [
        "results.md",
        "../README.md#where-to-begin",
        "reference/chapter1.md#D54",
        "#ten-seeds",
        "https://x.org/y#z",
    ]
    good += ["../benchmark/results", "../tests/register.py#L3", "reference/README.md"]
    bad = ["result.md", "LICENSE", "../README.md#where-to-write", "reference/chapter1.md#D89", "#eleven-seeds"]
    bad += ["../tests/register.py#L99999", "reference/chapter1.md#d54", "/etc/hostname", "../../.."]
    links = " ".join(f"[x]({link})" for link in good + bad)
    assert broken_links(page, f"## Ten seeds\n{links}\n```\n[x](y)\n```\n") == bad
    assert anchors("# A\n## A b, c\n## A\n```\n# d\n```\n") == {"a", "a-1", "a-b-c"}


def test_every_page_is_reached_from_the_first():
    reached, new = set(), {ROOT / "README.md"}
    while new:
        reached |= new
        links = [(page, link) for page in new for link in re.findall(r"\]\(([^)#\s]+\.md)", page.read_text())]
        new = {page.parent.joinpath(link).resolve() for page, link in links if "://" not in link} - reached
    assert {page for page in PAGES if "docs" in page.parts[len(ROOT.parts) :]} <= reached


def test_twenty_questions_name_code_and_tests_that_exist():
    page = (ROOT / "docs/questions.md").read_text()
    questions = re.findall(r"^\d+\. \[(.+)\]\(#", page, re.MULTILINE)
    parts = dict(part.split("\n", 1) for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:])
    assert list(parts)[:-1] == questions and len(questions) == 20
    for question in questions:
        named = re.findall(r"\[`(\w+)`\]\(\.\./([\w/]+\.py)\)", parts[question])
        for name, path in named:
            defined = {node.name for node in ast.parse((ROOT / path).read_text()).body if hasattr(node, "name")}
            assert name in defined, (name, path)
        assert "Code: " in parts[question] and any(path.startswith("tests/") for _, path in named), question
        assert re.search(r"\d", parts[question]) and "https://github.com/" in parts[question].partition("Thread")[2]


def test_arguments_of_trl_have_counterparts_that_exist():
    table = (ROOT / "docs/questions.md").read_text().partition("| `PPOConfig` of TRL 1.12")[2].split("\n\n")[0]
    ours = [name for row in table.splitlines()[2:] for name in re.findall(r"`([\w.]+)`", row.split(" | ")[1])]
    assert len(ours) > 25 and set(ours) <= flags_of(tldr_policy), set(ours) - flags_of(tldr_policy)
    metrics = (ROOT / "docs/questions.md").read_text().partition("| TRL 1.12 | here |")[2].split("\n\n")[0]
    names = set(re.findall(r"`([\w/]+)`", metrics))
    header = (ROOT / "static/demo-tldr/policy_metrics.csv").read_text().partition("\n")[0].split(",")
    assert names <= set(header), names - set(header)


def test_change_this_names_functions_that_exist():
    part = (ROOT / "docs/README.md").read_text().partition("## Change this")[2].partition("\n## ")[0]
    named = re.findall(r"\]\(../(ppo_rlhf/[\w/]+\.py)\): ((?:`\w+`(?:, )?)+)", part)
    assert len(named) > 5
    for path, names in named:
        defined = {node.name for node in ast.parse((ROOT / path).read_text()).body if hasattr(node, "name")}
        assert set(re.findall(r"`(\w+)`", names)) <= defined, path


def test_the_first_page_is_short():
    assert len(README.splitlines()) <= 110
    assert len(README.split()) <= 850


def test_the_picture_of_the_first_page_is_of_the_demo():
    """It was drawn from the committed numbers; its lines pass through them, and the target is the controller's."""
    assert "](static/front_page.png)" in README
    picture = (ROOT / "static/front_page.png").read_bytes()
    assert b"Description\0" + front_page.digest(DEMO).encode() in picture  # a text chunk of the PNG
    left, right = front_page.draw(DEMO).axes
    for axes, metric, line in ((left, "gold_scores", 0), (left, "scores", 2), (right, "kl", 0)):
        expected = [row[f"objective/{metric}"] for row in demo_metrics()]
        assert list(axes.lines[line].get_ydata()) == pytest.approx(expected)
        smooth = axes.lines[line + 1].get_ydata()  # each a mean of up to ten updates so far
        assert smooth[[0, 100]] == pytest.approx([expected[0], statistics.fmean(expected[91:101])])
    assert [*right.lines[2].get_ydata()] == [6, 6]


def test_the_picture_of_the_clip_shows_the_loss_and_where_it_has_no_gradient():
    """Of a token with one advantage and many ratios, by train_policy.py."""
    for axes, advantage in zip(diagrams.clip().axes, (1.0, -1.0), strict=True):
        ratio, loss = map(torch.tensor, axes.lines[2].get_data())
        new_logprobs = ratio.log().requires_grad_()
        for one, expected in zip(new_logprobs, loss, strict=True):
            ours, *_ = train_policy.policy_loss(one, torch.zeros(()), torch.tensor(advantage), diagrams.CLIP)
            ours.backward()
            assert ours.item() == pytest.approx(expected.item())
        without = ratio[new_logprobs.grad == 0]
        assert without.numel() > 100 and axes.lines[3].get_xdata() == pytest.approx(without.numpy(), abs=0.003)


def blocks(text: str, language: str = "") -> list[str]:
    """The code blocks of a page that name this language, or none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for name, block in found if name == language]


def test_what_the_demo_prints_is_on_the_page_of_chapter_1():
    reward, policy = (json.loads((DEMO / name).read_text()) for name in ("reward_meta.json", "meta.json"))
    (shown,) = [block for block in blocks(CHAPTER1) if block.startswith("The reward model")]
    assert shown.splitlines() == train_both.summary(demo_rows(), reward, policy)


def test_the_code_on_the_first_page_is_that_of_the_small_file():
    """Four lines, word for word, one after another."""
    source = [line.strip() for line in (ROOT / "ppo_rlhf/small/ppo.py").read_text().splitlines()]
    shown = blocks(README, "python")[0].splitlines()
    start = source.index(shown[0])
    assert len(shown) == 4 and shown == source[start : start + 4]


def test_the_first_page_repeats_the_numbers_of_the_real_model():
    shown = re.findall(r"(\d\.\d+) ± (\d\.\d+)", README)
    table = (ROOT / "docs/real.md").read_text().partition("| | before | after, seed 1")[2].split("\n\n")[0]
    rows = [re.findall(r"\+(\d\.\d+) ± (\d\.\d+)", line) for line in table.splitlines()[2:4]]
    assert shown == [*rows[0], *rows[1]] and len(shown) == 4


def test_results_of_the_first_page():
    """The numbers of the sentence on staleness; those on over-optimisation are in that test, the others have none."""
    runs = pd.read_csv(ROOT / "benchmark/results/staleness/runs.csv")
    means = 100 * runs.groupby(["staleness", "way"], dropna=False)["samples"].mean()
    fresh = 100 * runs[runs["staleness"] == 0]["samples"].mean()
    lost = [fresh - means[8, way] for way in ("decoupled", "bypass", "none")]
    assert [round(points) for points in lost] == [11, 11, 36]
    assert round(fresh - means[1, "none"]) == 3
    sentence = "cost 11 points of accuracy. Without it, one update costs 3 points, and eight cost 36."
    assert sentence in " ".join(RESULTS.split())


def test_the_algorithm_box_is_that_of_the_script():
    """Eight steps in README.md, in the docstring of train_policy.py and in its code."""
    script = (ROOT / "ppo_rlhf/train_policy.py").read_text()
    (box,) = [block for block in blocks(README) if block.startswith("train a reward model")]
    box = re.findall(r"^    (\d)  ", box, re.MULTILINE)
    docstring = re.findall(r"^    (\d)\. ", ast.get_docstring(ast.parse(script)), re.MULTILINE)
    train = script.partition("\ndef train(")[2].partition("\ndef ")[0]
    code = re.findall(r"(?:# |, |and )(\d)\. ", "\n".join(re.findall(r"^ *# .*$", train, re.MULTILINE)))
    assert box == docstring == code == [str(step) for step in range(1, 9)]


def test_the_reward_of_the_first_page_is_one():
    source = blocks(README, "python")[1]
    module: dict = {}
    exec(source, module)
    assert module["score"](["a b", "c"], [" one two one", ""]) == [2.0, 0.0]


def test_the_reward_of_the_first_page_gains(tmp_path, monkeypatch):
    """By its own measure, in half of the updates of its command; an unscaled score of 16 made it fall to 15 in 20."""
    (command,) = re.findall(
        r"^python ppo_rlhf/train_policy.py (--preset tales .*my_rewards:score)$", README, re.MULTILINE
    )
    (tmp_path / "my_rewards.py").write_text(blocks(README, "python")[1])
    stories = (tales.write_story(random.Random(seed), 3) for seed in range(2_000))
    (tmp_path / "stories.txt").write_text("\n".join(stories) + "\n")
    model = building.TRAINED / building.name_with_hash("tales", train_worlds.WORLDS["tales"][1])
    shorter = f"--base_model {model}/model --task.query_dataset stories.txt --ppo.total_episodes 6400"
    shorter += " --trace_interval 0"
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)  # of another test
    monkeypatch.setattr(plots, "draw_learning_curves", lambda *_: None)
    train_policy.train(
        cli.parse_args(train_policy.PRESETS, [*command.split(), *shorter.split(), "--log_interval", "0"])
    )
    words = [row["objective/function_score"] for row in metrics_of(only(tmp_path, "runs/*"))]
    # A batch of 64 texts has a mean with an error of 0.16, the mean of ten batches one of 0.05.
    assert statistics.fmean(words[-10:]) > statistics.fmean(words[:10]) + 0.5


def test_every_metric_of_the_demo_is_explained():
    named = explained_metrics(1)
    patterns = [name for name in named if "*" in name]
    for name in demo_metrics()[0]:
        explained = name in named or any(re.fullmatch(p.replace("*", ".+"), name) for p in patterns)
        assert explained or name in ("step", "objective/gold_scores"), name


def test_flags_exist():
    chapter1, chapter2 = (
        (train_both, train_policy, train_reward, sample),
        (tldr_all, tldr_sft, tldr_reward, tldr_policy),
    )
    scripts = (*chapter1, *chapter2, rlvr_policy, rlvr_async, rlvr_tools, judge)
    flags = {module.__name__.split(".")[1]: flags_of(module) for module in scripts} | {
        "report": {"run", "with", "out", "explain"}
    }
    everything = set().union(*flags.values())
    commands = re.findall(r"ppo_rlhf/(\w+)\.py((?: +--?[\w.]+(?:[ =][^\s`-]\S*)?)*)", DOCS)
    assert len(commands) > 6
    for script, words in commands:
        for flag in re.findall(r"--([\w.]+)", words):
            assert flag in flags[script], (script, flag)
    launchers = {"num_processes", "nproc_per_node", "mixed_precision", "help"}
    for path in (*ROOT.glob("ppo_rlhf/small/*.py"), ROOT / "ppo_rlhf/check/__main__.py"):
        launchers |= set(re.findall(r'"--(\w+)"', path.read_text()))
    for flag in re.findall(r"`--([\w.]+)", DOCS):
        known = everything | launchers
        assert flag in known or f"policy.{flag}" in known, flag


PROJECTS = ("verl", "verl-recipe", "TRL", "open-instruct", "OpenRLHF", "lm-human-preference-details")


def undated(text: str) -> set[str]:
    """Other projects that a text names without saying of any commit or release that it is about that one."""
    plain = " ".join(re.sub(r"\]\([^)]*\)|[`#]", "", text).split())
    named = {name for name in PROJECTS if re.search(rf"(?<![\w/-]){name}(?![\w/-])", plain)}
    dated = rf"(?![\w-])(?:(?!{'|'.join(PROJECTS)})[^|.]){{0,40}}?\b(?:[0-9a-f]{{7}}|\d\.\d+)\b"
    return {name for name in named if not re.search(rf"(?<![\w-]){name}{dated}", plain)}


DATED = [page for page in PAGES if page.parent.name == "docs"]  # README.md only recommends them
DATED += [page for page in BENCHMARK if page.parent.name != "reference"]  # its page is about two published pictures
DATED += sorted(ROOT.glob("ppo_rlhf/**/*.py"))


@pytest.mark.parametrize("path", DATED, ids=[path.relative_to(ROOT).as_posix() for path in DATED])
def test_other_projects_come_with_a_commit_or_a_release(path):
    assert undated(path.read_text()) == set()


def test_each_difference_from_another_project_says_where_it_was_read():
    table = (ROOT / "docs/differences.md").read_text().partition("| there | where | here | detail |")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n\n")[0].splitlines()[2:]]
    assert len(rows) > 20
    for there, where, here, _ in rows:
        assert not any(name in there for name in PROJECTS), there
        assert any(name in where for name in PROJECTS) or re.search("verl-data|math-verify", where), where
        assert not undated(where) | undated(here), where
        for clause in re.sub(r"\([^)]*\)", "", where).split(";"):
            assert re.search(r"\b([0-9a-f]{7}|\d\.\d+)\b", clause), where


def test_a_project_without_a_commit_is_found():
    text = "verl, as (TRL 1.16) has it, and [open-instruct](https://x.org/1.2) since 7917d41. OpenRLHF does."
    assert undated(f"{text} See `verl/x.py`.") == {"verl", "OpenRLHF"}
    assert undated("verl at commit\n# b178a3c") == set()


NO_COMMANDS = {"experiments/ablation_list", "cost/speed_runs"}


def test_flags_of_the_benchmark_exist():
    """And every script has a command on some page, but for those that another script starts."""
    pages = DOCS + "\n".join(page.read_text() for page in BENCHMARK)
    commands = re.findall(r"(?<!:)benchmark/(\w+/\w+)\.py((?:[^`\n]|\\\n)*)", pages)  # git show x:y is none
    scripts = {f"{path.parent.name}/{path.stem}" for path in ROOT.glob("benchmark/*/*.py")}
    commands = [(script, words) for script, words in commands if script not in NO_COMMANDS]
    assert {script for script, _ in commands} == scripts - NO_COMMANDS
    for script, words in commands:
        module = importlib.import_module(f"benchmark.{script.replace('/', '.')}")
        fields = {field.name for field in dataclasses.fields(getattr(module, "Args", lab.Args))}
        own = re.sub(r'"[^"]*"|ppo_rlhf/.*', "", words)  # what another script gets
        for flag in re.findall(r"--(\w+)", own):
            assert flag in fields, (script, flag)


def flags_of(module) -> set[str]:
    if module in (sample, judge):
        needed = {"policy": "x"} if module is sample else {"candidate": "x"}
        return set(flatten(dataclasses.asdict(module.Args(**needed))))
    return set(flatten(dataclasses.asdict(next(iter(module.PRESETS.values())))))


@dataclasses.dataclass
class Few:
    """Arguments of a script without many."""

    number: int = 1


SCRIPTS = sorted([*ROOT.glob("ppo_rlhf/**/*.py"), *ROOT.glob("benchmark/*/*.py")])
DESCRIBED = [path for path in SCRIPTS if re.search(r"(description=|argv, )__doc__", path.read_text())]


@pytest.mark.parametrize("path", DESCRIBED, ids=[path.name for path in DESCRIBED])
def test_help_shows_a_docstring_as_it_is_written(path, monkeypatch, capsys):
    """Indented lines and lists keep their lines; prose is filled, but a line keeps its own if no letter begins it."""
    described = ast.get_docstring(ast.parse(path.read_text()), clean=False)
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        tyro.cli(Few, args=["--help"], description=described)
    shown = {line.rstrip() for line in capsys.readouterr().out.splitlines()}
    for paragraph in described.split("\n\n"):
        lines = [line for line in paragraph.splitlines() if line]
        kept = all(re.match(r" |\d\. ", line) for line in lines)
        assert set(lines if kept else [" ".join(lines)]) <= shown
        assert kept or not re.search(r"(python|bash|launch|torchrun) .*(ppo_rlhf|benchmark)/", paragraph)


@pytest.mark.parametrize(
    "path", [path for path in DESCRIBED if "benchmark" not in path.parts], ids=lambda path: path.name
)
def test_help_breaks_no_command(path, monkeypatch, capsys):
    """However narrow the terminal is, a command is one line, and shown once."""
    described = ast.get_docstring(ast.parse(path.read_text()))
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit):
        cli.parse(Few, ["--help"], description=described)
    shown = capsys.readouterr().out.splitlines()
    commands = re.findall(r"^ +(?:python|torchrun|accelerate) .*", described, re.MULTILINE)
    assert commands and {shown.count(command) for command in commands} == {1}
