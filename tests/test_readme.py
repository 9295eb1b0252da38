"""README.md keeps to what it speaks of: the numbers of static/demo, files that exist, flags that the scripts have."""

import ast
import csv
import dataclasses
import json
import re
import statistics
from pathlib import Path

import ablations
import compare
import interop
import overoptimisation
import pandas as pd
import pytest
import replay
import scipy.stats
import speed
import tyro

import benchmark
from ppo_rlhf import (
    judge,
    sample,
    tales,
    tldr_all,
    tldr_policy,
    tldr_reward,
    tldr_sft,
    train_both,
    train_policy,
    train_reward,
)
from ppo_rlhf.run import flatten

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BENCHMARK = (ROOT / "benchmark/README.md").read_text()
DEMO = ROOT / "static/demo"


def demo_rows() -> list[dict]:
    return [json.loads(line) for line in (DEMO / "comparison.jsonl").read_text().splitlines()]


def demo_metrics() -> list[dict[str, float]]:
    with (DEMO / "metrics.csv").open() as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def numbers_of(first_words: str) -> list[float]:
    """The numbers of a table's row, those of its first cell too."""
    (row,) = [line for line in README.splitlines() if line.startswith(f"| {first_words}")]
    return [float(number) for number in re.findall(r"[-+]?\d+(?:\.\d+)?", row)]


def test_gold_score_and_score():
    rows = demo_rows()
    base, policy = ([row[f"{name} gold"] for row in rows] for name in ("base", "policy"))
    expected = [len(rows), statistics.stdev(base), statistics.fmean(base), statistics.fmean(policy)]
    assert numbers_of("gold score, mean over") == pytest.approx(expected, abs=0.005)
    expected = [statistics.fmean(row[f"{name} score"] for row in rows) for name in ("base", "policy")]
    assert numbers_of("score of the reward model") == pytest.approx(expected, abs=0.005)


def test_grammar():
    shares = [tales.grammatical_share([row[name] for row in demo_rows()]) for name in ("base", "policy")]
    assert numbers_of("sentences that the grammar") == pytest.approx([100 * share for share in shares], abs=0.05)


def test_kl_of_the_last_updates():
    kl = [row["objective/kl"] for row in demo_metrics()]
    assert numbers_of("KL from the language model, last ten")[-1] == pytest.approx(
        statistics.fmean(kl[-10:]), abs=0.05
    )


def test_over_optimisation():
    """The sentences about the three numbers of labels hold in the committed curves."""
    table = pd.read_csv(ROOT / "benchmark/results/overoptimisation/overoptimisation.csv")
    ends, peaks, accuracy = {}, {}, {}
    for (labels, seed), run in table.groupby(["experiment", "seed"]):
        smooth = run[["d", "gold", "proxy"]].rolling(5).mean()
        ends[labels, seed], peaks[labels, seed] = smooth.iloc[-1], smooth.loc[smooth["gold"].idxmax()]
        accuracy[labels, seed] = run["accuracy"].iloc[0]
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


def effects_of_ablations() -> dict[str, dict[str, tuple[float, float]]]:
    """Of each ablation and effect: mean and half of the 95 % interval, from the committed numbers of single runs."""
    runs = pd.read_csv(ROOT / "benchmark/results/ablations/ablations.csv").set_index("seed")
    baseline = runs[runs["ablation"] == "baseline"].drop(columns="ablation")
    effects = {}
    for name, own in runs.groupby("ablation"):
        values = own.drop(columns="ablation") - (0 if name == "baseline" else baseline)
        assert sorted(values.index) == [1, 2, 3]
        tests = {effect: scipy.stats.ttest_1samp(values[effect], 0).confidence_interval(0.95) for effect in values}
        effects[name] = {effect: ((i.low + i.high) / 2, (i.high - i.low) / 2) for effect, i in tests.items()}
    return effects


def test_table_of_ablations():
    table = (ROOT / "benchmark/results/ablations/ablations.md").read_text()
    effects = effects_of_ablations()
    assert set(effects) == set(ablations.ABLATIONS)
    for name, expected in effects.items():
        (row,) = [line for line in table.splitlines() if f"| `{name}` |" in line]
        cells = [cell.strip() for cell in row.split("|")][5:-1]
        for cell, (mean, half) in zip(cells, expected.values(), strict=True):
            numbers = [float(number) for number in re.findall(r"-?\d+\.\d+", cell)]
            assert numbers == pytest.approx([mean, half], abs=0.0051)
            assert cell.startswith("**") == (name != "baseline" and abs(mean) > half)


def test_sentences_about_ablations():
    effects = effects_of_ablations()

    def seen(name: str, effect: str) -> bool:
        mean, half = effects[name][effect]
        return abs(mean) > half

    assert [round(effects["baseline"][effect][0], 1) for effect in ("gold score", "KL")] == [3.5, 3.4]
    gold = {"lambda-0": -3.6, "gamma-0.9": -2.0, "one-epoch": -1.9, "lambda-1": 1.0}
    kl = {"no-kl": 76.3, "not-normalised-after": 5.2, "constant-learning-rate": 2.7, "fixed-kl": -1.3}
    for effect, changes in {"gold score": gold, "KL": kl}.items():
        for name, change in changes.items():
            assert seen(name, effect) and effects[name][effect][0] == pytest.approx(change, abs=0.06)
    assert seen("random-value-head", "explained variance")
    assert round(effects["random-value-head"]["explained variance"][0], 2) == 0.35
    assert effects["baseline"]["explained variance"][0] < 0
    curves = pd.read_csv(ROOT / "benchmark/results/tales/curves.csv")
    critic = curves.query("task == 'tales' and metric == 'ppo/val/var_explained'")["mean"].iloc[-1]
    assert round(critic, 2) == 0.63
    nothing = ("no-policy-clipping", "no-value-clipping", "no-advantage-whitening", "torch-adam", "no-score-penalty")
    for name in (*nothing, "not-normalised-before", "positions-count-padding"):
        assert not any(seen(name, effect) for effect in ("gold score", "KL", "highest KL")), name


def last_twentieth(curve: pd.DataFrame) -> tuple[float, float]:
    """Mean of mean and deviation over the last 5 % of the updates."""
    rows = curve[curve["update"] >= 0.95 * curve["update"].max()]
    return rows["mean"].mean(), rows["std"].mean()


def test_ten_seeds_beside_the_original():
    """The table's numbers are those of the committed curves and of the published ones, rounded."""
    ours = pd.read_csv(ROOT / "benchmark/results/tales/curves.csv").query("task == 'tales'")
    assert set(ours["seeds"]) == {10}
    of_original = "task == 'sentiment' and source_figure == 'ours1.png' and implementation.str.startswith('openai')"
    reference = ROOT / "benchmark/reference"
    theirs = pd.read_csv(reference / "lm_human_preferences.csv").query(of_original)
    first = pd.read_csv(reference / "first_update.csv").query(of_original).set_index("metric")["mean"]
    rows = [line.split("|")[1:-1] for line in README.splitlines() if line.startswith("| `") and "→" in line]
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


def test_reward_model_and_commit():
    policy, reward = (json.loads((DEMO / name).read_text()) for name in ("meta.json", "reward_meta.json"))
    assert policy["commit"] == reward["commit"] and f"at commit {policy['commit'][:7]}, seed 1" in README
    learned = reward["results"]
    assert f"choice in {learned['test_accuracy']:.1%}".replace("%", " %") in README
    assert f"would reach {learned['ceiling']:.1%}".replace("%", " %") in " ".join(README.split())


def test_four_pairs():
    for row in demo_rows()[:4]:
        cells = [row["query"].strip()]
        cells += [f"{row[name].strip()} (gold {row[f'{name} gold']:+.0f})" for name in ("base", "policy")]
        assert f"| {' | '.join(cells)} |" in README


@pytest.mark.parametrize("path", ["README.md", "benchmark/README.md", "benchmark/reference/README.md"])
def test_links_lead_to_files(path):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / path).read_text())
    for link in links:
        assert "://" in link or (ROOT / path).parent.joinpath(link).exists(), link


def test_every_metric_of_the_demo_is_explained():
    """A row names a metric in full, or after another of the same kind by its last part."""
    named = set()
    for row in re.findall(r"^\| (`[^|]+`) \|", README, re.MULTILINE):
        folder = ""
        for name in re.findall(r"`([^`]+)`", row):
            folder = name.rpartition("/")[0] or folder
            named.add(f"{folder}/{name}" if folder and "/" not in name else name)
    patterns = [name for name in named if "*" in name]
    for name in demo_metrics()[0]:
        explained = name in named or any(re.fullmatch(p.replace("*", ".+"), name) for p in patterns)
        assert explained or name in ("step", "objective/gold_scores"), name


def test_flags_exist():
    chapter1, chapter2 = (
        (train_both, train_policy, train_reward, sample),
        (tldr_all, tldr_sft, tldr_reward, tldr_policy),
    )
    flags = {module.__name__.split(".")[1]: flags_of(module) for module in (*chapter1, *chapter2, judge)}
    everything = set().union(*flags.values())
    commands = re.findall(r"ppo_rlhf/(\w+)\.py((?: +--?[\w.]+(?:[ =][^\s`-]\S*)?)*)", README)
    assert len(commands) > 6
    for script, words in commands:
        for flag in re.findall(r"--([\w.]+)", words):
            assert flag in flags[script], (script, flag)
    launchers = {"num_processes", "nproc_per_node", "mixed_precision", "help"}
    for flag in re.findall(r"`--([\w.]+)", README):
        known = everything | launchers
        assert flag in known or f"policy.{flag}" in known, flag


def test_flags_of_the_benchmark_exist():
    scripts = (ablations, benchmark, compare, interop, overoptimisation, replay, speed)
    scripts = {script.__name__: script for script in scripts}
    commands = re.findall(r"benchmark/(\w+)\.py((?:[^`\n]|\\\n)*)", README + BENCHMARK)
    assert {script for script, _ in commands} == set(scripts)
    for script, words in commands:
        fields = {field.name for field in dataclasses.fields(scripts[script].Args)}
        own = re.sub(r'"[^"]*"|ppo_rlhf/.*', "", words)  # what another script gets
        for flag in re.findall(r"--(\w+)", own):
            assert flag in fields, (script, flag)


def flags_of(module) -> set[str]:
    if module in (sample, judge):
        return set(flatten(dataclasses.asdict(module.Args("x"))))
    return set(flatten(dataclasses.asdict(module.PRESETS["tales"])))


@dataclasses.dataclass
class Few:
    """Arguments of a script without many."""

    number: int = 1


SCRIPTS = sorted([*ROOT.glob("ppo_rlhf/*.py"), *ROOT.glob("benchmark/*.py")])
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
