"""README.md and docs/ keep to what they speak of: committed numbers, files, anchors and flags that exist."""

import ast
import csv
import dataclasses
import hashlib
import importlib
import json
import re
import statistics
import sys
from pathlib import Path

import pandas as pd
import pytest
import tyro
from runs import TINY_WORLD, explained_metrics, metrics_of, only

from benchmark import lab, worlds
from ppo_rlhf import judge, sample, train_both, train_policy, train_reward
from ppo_rlhf.lib import command_line, learning_curves
from ppo_rlhf.lib.files import flatten
from ppo_rlhf.rlvr import (
    arguments as rlvr_arguments,
    asynchronous as rlvr_async,
    policy as rlvr_policy,
    tools as rlvr_tools,
)
from ppo_rlhf.tldr import all as tldr_all, policy as tldr_policy, reward as tldr_reward, sft as tldr_sft
from ppo_rlhf.worlds import tales

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CHAPTER1 = (ROOT / "docs/chapter1.md").read_text()
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("benchmark/**/*.md"))]
DOCS = "\n".join(page.read_text() for page in PAGES if page.parent.name in (ROOT.name, "docs"))
BENCHMARK = [page for page in PAGES if page.is_relative_to(ROOT / "benchmark") and "results" not in page.parts]
DEMO = ROOT / "static/demo"


def demo_rows() -> list[dict]:
    return [json.loads(line) for line in (DEMO / "comparison.jsonl").read_text().splitlines()]


def demo_metrics() -> list[dict[str, float]]:
    with (DEMO / "metrics.csv").open() as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def test_what_the_demo_prints():
    """Chapter 1 shows the lines that train_both.py makes of the committed files; their numbers are counted here."""
    rows = demo_rows()
    reward, policy = (json.loads((DEMO / name).read_text()) for name in ("reward_meta.json", "meta.json"))
    (shown,) = (block.splitlines() for block in blocks(CHAPTER1) if block.startswith("The reward model"))
    assert shown == train_both.summary(rows, reward, policy) and len(rows) == 400
    score, gold = ([[row[f"{name} {of}"] for row in rows] for name in ("base", "policy")] for of in ("score", "gold"))
    golds = [statistics.fmean(gold[0]), statistics.fmean(gold[1])]
    kl = [row["objective/kl"] for row in demo_metrics()]
    expected = {
        "The reward model finds": [100 * reward["results"]["test_accuracy"]],
        "The annotator is noisy:": [100 * reward["results"]["ceiling"]],
        "On 400 held-out queries,": [statistics.fmean(score[0]), statistics.fmean(score[1])],
        "The gold score, which PPO never saw,": [*golds, (golds[1] - golds[0]) / statistics.stdev(gold[0])],
        "The grammar could": [
            100 * tales.grammatical_share([row[name] for row in rows]) for name in ("base", "policy")
        ],
        "The policy is": [statistics.fmean(kl[-10:]), 6],
    }
    for words, numbers in expected.items():
        (line,) = (line for line in shown if line.startswith(words))
        printed = re.findall(r"[-+]?\d+(?:\.\d+)?", line.removeprefix(words))
        for text, number in zip(printed[: len(numbers)], numbers, strict=True):
            half_a_unit = 0.5 * 10 ** -len(text.partition(".")[2])
            assert float(text) == pytest.approx(number, abs=min(0.05, half_a_unit)), words


def test_the_commit_of_the_demo():
    policy, reward = (json.loads((DEMO / name).read_text()) for name in ("meta.json", "reward_meta.json"))
    assert policy["commit"] == reward["commit"]
    assert f"(seed 1, commit {policy['commit'][:7]};" in README
    assert f"For seed 1, commit {policy['commit'][:7]}," in " ".join(CHAPTER1.split())


def test_the_first_pair_of_continuations_is_in_chapter_1():
    row = demo_rows()[0]
    before, after = (f"{row[name].strip()} (gold {row[f'{name} gold']:+.0f})" for name in ("base", "policy"))
    shown = f"| query | {row['query'].strip()} |\n|---|---|\n| before | {before} |\n| after | {after} |\n"
    assert shown in CHAPTER1


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
    good = ["results.md", "../README.md#where-to-begin", "reference/chapter1.md#D54", "#ten-seeds"]
    good += ["https://x.org/y#z", "../benchmark/results", "../tests/register.py#L3", "reference/README.md"]
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


def names_in(path: str) -> set[str]:
    """What a file of ours defines."""
    return {node.name for node in ast.parse((ROOT / path).read_text()).body if hasattr(node, "name")}


def test_questions_name_code_and_tests_that_exist():
    page = (ROOT / "docs/questions.md").read_text()
    questions = re.findall(r"^\d+\. \[(.+)\]\(#", page, re.MULTILINE)
    parts = dict(part.split("\n", 1) for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:])
    assert list(parts) == questions and len(questions) > 10
    for question in questions:
        named = re.findall(r"\[`(\w+)`\]\(\.\./([\w/]+\.py)\)", parts[question])
        assert [(name, path) for name, path in named if name not in names_in(path)] == []
        assert "Code: " in parts[question] and any(path.startswith("tests/") for _, path in named), question
        assert "https://github.com/" in parts[question].partition("Thread")[2]


def test_change_this_names_functions_that_exist():
    part = (ROOT / "docs/README.md").read_text().partition("## Change this")[2].partition("\n## ")[0]
    named = re.findall(r"\]\(../(ppo_rlhf/[\w/]+\.py)\): ((?:`\w+`(?:, )?)+)", part)
    assert len(named) > 5
    for path, names in named:
        assert set(re.findall(r"`(\w+)`", names)) <= names_in(path), path


def test_the_first_page_is_short():
    assert len(README.splitlines()) <= 110
    assert len(README.split()) <= 850


BUDGETS = {"README": 300, "chapter1": 3_200, "chapter2": 1_750, "chapter3": 2_800, "check": 1_150, "status": 250}
BUDGETS |= {"differences": 850, "experiments": 850, "questions": 2_000, "real": 2_200}
BUDGETS |= {"results": 2_850, "running": 2_300}


def words_by_hand(page: Path) -> int:
    """Words of a page, or of its template, without code, addresses, pictures and what is computed."""
    template = page.with_name(f"{page.name}.jinja")
    text = (template if template.exists() else page).read_text()
    removed = r"^ *```.*?^ *```$|\{[%{].*?[%}]\}|<!-- tables.*?<!-- end -->|!\[.*?\]\(.*?\)|\]\(.*?\)"
    text = re.sub(removed, " ", text, flags=re.MULTILINE | re.DOTALL)
    return sum(re.search("[a-zA-Z]", word) is not None for word in text.split())


def test_pages_can_be_read_in_an_evening(tmp_path):
    """Together at most 22,000 words; a page whose budget is too large would grow unseen."""
    pages = {page.stem: words_by_hand(page) for page in ROOT.glob("docs/*.md")}
    assert pages.keys() == BUDGETS.keys() and sum(BUDGETS.values()) <= 22_000
    assert {name: words for name, words in pages.items() if not BUDGETS[name] - 300 < words <= BUDGETS[name]} == {}
    (tmp_path / "page.md").write_text("A [b c](d/e.md) 1.0 | ± f.\n```\nno no\n```\n![p q](r.png) s")
    assert words_by_hand(tmp_path / "page.md") == 5


def test_pages_say_when_to_use_each_argument_of_chapter_3():
    pages = [*ROOT.glob("docs/*.md"), ROOT / "docs/reference/methods.md", ROOT / "benchmark/experiments/README.md"]
    text = "\n".join(page.read_text() for page in pages)
    classes = [getattr(rlvr_arguments.Args(), name) for name in ("rewards", "ppo", "task")]
    fields = {
        field.name
        for group in [*classes, rlvr_arguments.ToolsArgs(), rlvr_async.Args()]
        for field in dataclasses.fields(group)
    }
    of_all_runs = {field.name for field in dataclasses.fields(command_line.RunArgs)} | {
        "preset",
        "exp_name",
        "task",
        "ppo",
    }
    assert [name for name in sorted(fields - of_all_runs) if not re.search(rf"\b{name}\b", text)] == []


def test_the_picture_of_the_first_page_is_of_the_demo():
    """The program that drew it wrote the hash of the numbers into the picture."""
    assert "](static/front_page.png)" in README
    digest = hashlib.sha256((DEMO / "metrics.csv").read_bytes()).hexdigest()
    picture = (ROOT / "static/front_page.png").read_bytes()
    assert b"Description\0" + digest.encode() in picture  # a text chunk of the PNG


def blocks(text: str, language: str = "") -> list[str]:
    """The code blocks of a page that name this language, or none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for name, block in found if name == language]


def test_the_code_on_the_first_page_is_that_of_the_small_file():
    """Four lines, word for word, one after another."""
    source = [line.strip() for line in (ROOT / "ppo_rlhf/small/ppo.py").read_text().splitlines()]
    shown = blocks(README, "python")[0].splitlines()
    start = source.index(shown[0])
    assert len(shown) == 4 and shown == source[start : start + 4]


def test_the_first_page_repeats_the_numbers_of_the_real_model():
    shown = README.partition("## A real language model")[2].partition("## ")[0]
    gains = pd.read_csv(ROOT / "benchmark/results/people/runs.csv").query("variant == 'preset'")["judge difference"]
    half = 4.303 * gains.sem()  # Student's t of two degrees of freedom
    assert len(gains) == 3 and f"{gains.mean():.2f} ± {half:.2f}" in shown


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
    """By its own measure, in a small world and with large steps; its command needs some 100 updates of 64 texts."""
    (command,) = re.findall(
        r"^python ppo_rlhf/train_policy.py (--preset tales .*my_rewards:score)$", README, re.MULTILINE
    )
    (tmp_path / "my_rewards.py").write_text(blocks(README, "python")[1])
    world = tmp_path / "world"
    worlds.write_tales(world, dataclasses.replace(TINY_WORLD, lm_steps=250, lm_batch_size=16), train_model=True)
    where = f"--base_model {world}/model --task.query_dataset {world}/stories.txt --log_interval 0"
    sizes = "--ppo.total_episodes 1536 --ppo.batch_size 64 --ppo.whiten_groups 4 --rewards.normalize_samples 64"
    steps = "--ppo.lr 0.005 --rewards.kl_coef 0.03 --trace_interval 0"
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)  # of another test
    monkeypatch.setattr(learning_curves, "draw_learning_curves", lambda *_: None)
    words = f"{command} {where} {sizes} {steps}".split()
    train_policy.train(command_line.parse_args(train_policy.PRESETS, words))
    words = [row["objective/function_score"] for row in metrics_of(only(tmp_path, "runs/*"))]
    # A batch of 64 texts has a mean with an error of 0.2, the mean of eight batches one of 0.07.
    assert statistics.fmean(words[-8:]) > statistics.fmean(words[:8]) + 0.4


@pytest.mark.parametrize(
    ("path", "chapter"),
    [("demo/metrics.csv", 1), *((f"demo-tldr/{run}_metrics.csv", 2) for run in ("sft", "reward", "policy"))],
)
def test_every_metric_of_a_demo_is_explained(path, chapter):
    explained = explained_metrics(chapter) - {"eval/*"}  # which would be every metric of an evaluation
    patterns = [re.escape(name).replace(r"\*", ".+") for name in explained]
    patterns += ["step", "objective/gold_scores"] if chapter == 1 else ["step", "(objective/|eval/.*)gold_scores"]
    names = next(csv.reader((ROOT / "static" / path).read_text().splitlines()))
    assert [name for name in names if not any(re.fullmatch(pattern, name) for pattern in patterns)] == []


def test_flags_exist():
    scripts = [train_both, train_policy, train_reward, sample, tldr_all, tldr_sft, tldr_reward, tldr_policy]
    scripts += [rlvr_policy, rlvr_async, rlvr_tools, judge]
    flags = {module.__name__.removeprefix("ppo_rlhf.").replace(".", "/"): flags_of(module) for module in scripts}
    flags["report"] = {"out", "explain"}
    for name in ("ppo", "grpo"):
        flags[f"small/{name}"] = set(re.findall(r'"--(\w+)"', (ROOT / f"ppo_rlhf/small/{name}.py").read_text()))
    everything = set().union(*flags.values())
    commands = re.findall(r"ppo_rlhf/([\w/]+)\.py((?: +--?[\w.]+(?:[ =][^\s`-]\S*)?)*)", DOCS)
    assert len(commands) > 6
    for script, words in commands:
        for flag in re.findall(r"--([\w.]+)", words):
            assert script.startswith("worlds/") or flag in flags[script], (script, flag)
    launchers = {"num_processes", "nproc_per_node", "mixed_precision", "help"}
    for path in (*ROOT.glob("ppo_rlhf/small/*.py"), ROOT / "ppo_rlhf/check/__main__.py"):
        launchers |= set(re.findall(r'"--(\w+)"', path.read_text()))
    for flag in re.findall(r"`--([\w.]+)", DOCS.replace(".no-", ".")):  # --ppo.no-share_prefixes
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
    assert len(rows) > 10
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


NO_COMMANDS = {"cost/speed_runs"}


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
        command_line.parse(Few, ["--help"], description=described)
    shown = capsys.readouterr().out.splitlines()
    commands = re.findall(r"^ +(?:python|torchrun|accelerate) .*", described, re.MULTILINE)
    assert commands and {shown.count(command) for command in commands} == {1}
