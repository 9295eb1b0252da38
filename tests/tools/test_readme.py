"""README.md and docs/ speak of files, anchors and flags that exist, and of numbers that files have."""

import dataclasses
import importlib
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
import torch
from runs import ROOT

from benchmark import lab
from ppo_rlhf import loop, train_both, train_policy
from ppo_rlhf.train_policy import flatten

PAGES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "tests/README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("benchmark/**/*.md")),
]
TEXTS = {page: page.read_text() for page in PAGES}
README, CHAPTER1 = TEXTS[ROOT / "README.md"], TEXTS[ROOT / "docs/chapter1.md"]
CURRENT = [page for page in PAGES if page.parent.name != "reference" and "results" not in page.parts]
DEMO = ROOT / "static/demo"


def blocks(text: str, language: str = "") -> list[str]:
    """The code blocks of a page that name this language, or none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for name, block in found if name == language]


# ---- Links -----------------------------------------------------------------------------------------------------


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """What a link to a page can name: anchors that it sets, and its headings as GitHub names them."""
    titles = re.findall(r"^#+ (.+)$", without_code(text), re.MULTILINE)
    shown = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).strip().lower() for title in titles]
    named = [re.sub(r"[^\w -]", "", title).replace(" ", "-") for title in shown]
    again = {f"{name}-{number}" for name in named for number in range(1, named.count(name))}
    return {*named, *again, *re.findall(r'<a id="([^"]+)">', text)}


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links of a page that lead to no file of the project, or to no anchor of a page."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        path, _, anchor = link.partition("#")
        target = page.parent.joinpath(path) if path else page
        if re.match(r"https?://", link):
            continue
        exists = target.exists() and target.resolve().is_relative_to(ROOT)
        if not exists or (anchor and anchor not in anchors(target.read_text())):
            broken.append(link)
    return broken


def test_links_lead_somewhere():
    assert [(page, link) for page, text in TEXTS.items() for link in broken_links(page, text)] == []


def test_broken_links_are_found():
    good = [
        "results.md",
        "../README.md#where-to-begin",
        "reference/chapter1.md#D54",
        "#ten-seeds",
        "https://x.org/y#z",
    ]
    bad = ["result.md", "../README.md#where-to-write", "reference/chapter1.md#D89", "#eleven-seeds", "../../.."]
    links = " ".join(f"[x]({link})" for link in good + bad)
    assert broken_links(ROOT / "docs/results.md", f"{links}\n```\n[x](y)\n```\n") == bad
    assert anchors("# A\n## A b, c\n## A\n```\n# d\n```\n") == {"a", "a-1", "a-b-c"}


# ---- Flags -----------------------------------------------------------------------------------------------------


@cache
def flags(script: str) -> set[str]:
    """The flags of a script: of a parser of its own, or of a class of arguments."""
    module = importlib.import_module(script.replace("/", "."))
    if hasattr(module, "PRESETS"):
        return set(flatten(dataclasses.asdict(next(iter(module.PRESETS.values())))))
    source = (ROOT / f"{script}.py").read_text()
    if "ArgumentParser" in source:
        return set(re.findall(r'\(\s*"--([\w-]+)"', source))
    return {field.name for field in dataclasses.fields(getattr(module, "Args", lab.Args))}


def test_flags_of_commands_exist():
    """Not in what was archived: git show x:y is no command."""
    text = "\n".join(TEXTS[page] for page in CURRENT)
    commands = re.findall(r"(?<!:)\b((?:ppo_rlhf|benchmark)/[\w/]+)\.py((?:[^`\n#]|\\\n)*)", text)
    assert len(commands) > 100
    for script, words in commands:
        own = re.sub(r'"[^"]*"|ppo_rlhf/.*', "", words)  # without what another script gets
        for flag in re.findall(r" --([\w.]+)", own):
            assert {flag, flag.partition(".")[0]} & flags(script), (script, flag)


def test_flags_in_sentences_exist():
    """Also of launchers, and of joint scripts, which add the name of a stage."""
    known = {"num_processes", "nproc_per_node", "mixed_precision", "help"}
    known |= flags("ppo_rlhf/small/ppo") | flags("ppo_rlhf/small/grpo") | flags("ppo_rlhf/small/micro")
    known |= flags("ppo_rlhf/check/__main__")
    known |= set(re.findall(r"^\| `--([\w.]+)` ", TEXTS[ROOT / "docs/reference/arguments.md"], re.MULTILINE))
    for page in (page for page in PAGES if page.parent in (ROOT, ROOT / "docs")):
        for flag in re.findall(r"`--([\w.]+)", TEXTS[page].replace(".no-", ".")):  # as --ppo.no-share_prefixes
            assert {flag, re.sub(r"^(policy|reward|sft)\.", "", flag)} & known, (page.name, flag)


# ---- Numbers and code of the first pages -----------------------------------------------------------------------


def test_chapter_1_shows_what_the_demo_printed():
    """Its lines, its first pair of continuations, its commit."""
    rows = [json.loads(line) for line in (DEMO / "comparison.jsonl").read_text().splitlines()]
    reward, policy = (json.loads((DEMO / name).read_text()) for name in ("reward_meta.json", "meta.json"))
    (shown,) = (block.splitlines() for block in blocks(CHAPTER1) if block.startswith("The reward model"))
    assert shown == train_both.summary(rows, reward, policy)
    texts = [f"{rows[0][name].strip()} (gold {rows[0][f'{name} gold']:+.0f})" for name in ("base", "policy")]
    assert f"| {rows[0]['query'].strip()} |\n|---|---|\n| before | {texts[0]} |\n| after | {texts[1]} |\n" in CHAPTER1
    assert policy["commit"] == reward["commit"] and f"commit {policy['commit'][:7]}" in " ".join(CHAPTER1.split())


def test_the_first_commands_are_the_demo_and_the_tests():
    """Each installs what it needs, so they work after a clone."""
    first = next(iter(blocks(README)))
    assert re.findall(r"^(.+?) +# .*\d+ minutes", first, re.MULTILINE) == ["make demo", "make test"]
    assert first.count("\n") == 2


def test_the_first_page_repeats_the_numbers_of_the_real_model():
    gains = pd.read_csv(ROOT / "benchmark/results/people/runs.csv").query("variant == 'preset'")["judge difference"]
    half = 4.303 * gains.sem()  # Student's t of two degrees of freedom
    assert len(gains) == 3 and f"{gains.mean():.2f} ± {half:.2f}" in " ".join(README.split())


def test_the_code_on_the_first_page_runs(tiny_world, monkeypatch):
    reward, of_loop = blocks(README, "python")
    module: dict = {}
    exec(reward, module)
    assert module["score"](["a b", "c"], [" one and two and one", ""]) == [2.0, 0.0]
    module["PPO"] = lambda model, lr: loop.PPO(tiny_world / model.replace("gpt2", "model"), lr=lr, response_length=4)
    exec(of_loop.replace("* 64", "* 2"), module)
    assert module["metrics"]["objective/kl"] == pytest.approx(0, abs=1e-3)


# ---- docs/running.md: functions that were written for other libraries -------------------------------------------


def wrapped(name: str, **theirs: Callable) -> list[float]:
    """What chapter 1 gets of another library's function, by the wrapper that the page shows."""
    (block,) = re.findall(r"```python\n(def from_trl.*?)```", TEXTS[ROOT / "docs/running.md"], re.DOTALL)
    exec(block, names := dict(theirs))
    return train_policy.call(names[name], ["ab", "c"], ["d", "efg"]).tolist()


def test_functions_of_other_libraries_score_the_responses():
    """Each gives the length of the response, and of the prompt in hundreds."""

    def for_trl(prompts, completions, **kwargs):
        return [100 * len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]

    def for_verl(data_source, solution_str, ground_truth, extra_info=None):
        return len(solution_str)

    def for_openrlhf(queries, prompts, labels):
        return torch.tensor([99 * len(p) + len(q) for q, p in zip(queries, prompts, strict=True)])

    assert wrapped("from_trl", reward_func=for_trl) == [201.0, 103.0]
    assert wrapped("from_verl", compute_score=for_verl) == [1.0, 3.0]
    assert wrapped("from_openrlhf", reward_func=for_openrlhf) == [201.0, 103.0]
