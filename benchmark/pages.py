"""Write the pages whose numbers and tables come from code and results:

    python benchmark/pages.py

docs/results.md and docs/questions.md are rendered with jinja2 from templates next to them (*.md.jinja), which quote
the CSVs and JSONs of benchmark/results and static. docs/reference/metrics.md and docs/reference/arguments.md are made
from ppo_rlhf/metrics.toml and the classes of arguments. Edit those, never the pages. README.md gets a link to
the site.
"""

import ast
import dataclasses
import inspect
import itertools
import json
import re
import runpy
import statistics
import textwrap
import typing
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmark import lab
from ppo_rlhf.report import learning_curves

ROOT = Path(__file__).parent.parent
SCRIPTS = ("train_reward", "train_policy", "train_both", "tldr/sft", "tldr/reward", "tldr/policy", "tldr/all")
SCRIPTS += ("rlvr/policy", "rlvr/asynchronous", "rlvr/tools", "sample", "judge", "from_trl", "report/__main__")


# ---- Numbers: what the templates call --------------------------------------------------------------------------


@cache
def table(name: str) -> pd.DataFrame:
    """A committed CSV, below benchmark/results or static, without its ending."""
    paths = (ROOT / folder / f"{name}.csv" for folder in ("benchmark/results", "static"))
    return pd.read_csv(next(path for path in paths if path.exists()), dtype={"commit": str, "variant": str})


def by_seed(name: str, query: str, column: str) -> pd.Series:
    """A number of each seed; the mean if a seed has several rows."""
    rows = table(name).query(query)
    assert len(rows), f"{name} has no rows with {query}"
    return rows.groupby("seed")[column].mean()


def paired(name: str, column: str, one: str, other: str) -> pd.Series:
    """One minus the other, seed by seed. one, other: queries."""
    gap = by_seed(name, one, column) - by_seed(name, other, column)
    assert gap.notna().all(), f"{name}: {one} and {other} have other seeds"
    return gap


def shown(values: pd.Series, places: int = 1, scale: float = 1, sign: bool = False) -> str:
    """Mean and half of the 95 % interval."""
    mean, half = lab.interval(list(scale * values))
    return f"{mean:{'+' if sign else ''}.{places}f} ± {half:.{places}f}"


def of(name: str, column: str, query: str, places: int = 1, scale: float = 1) -> str:
    return shown(by_seed(name, query, column), places, scale)


def less(name: str, column: str, one: str, other: str, places: int = 1, scale: float = 1) -> str:
    """One minus the other, seed by seed."""
    return shown(paired(name, column, one, other), places, scale, sign=True)


def starred(gaps: list[pd.Series], places: int = 1, scale: float = 1) -> list[str]:
    """Differences by seed; a star: significant at 5 %, after Holm's correction for all of them."""
    kept = lab.holm([p_value(gap) for gap in gaps])
    return [shown(gap, places, scale, True) + (" *" if p < 0.05 else "") for gap, p in zip(gaps, kept, strict=True)]


def differences(name: str, column: str, pairs: list[list[str]], places: int = 1, scale: float = 1) -> list[str]:
    return starred([paired(name, column, one, other) for one, other in pairs], places, scale)


def against(query: str, names: list[str], base: str) -> list[list[str]]:
    """Pairs of queries: each name, and what it is compared with. query: with %s where the name belongs."""
    return [[query % name, query % base] for name in names]


def stale_against(way: str, other: str) -> list[list[str]]:
    """Pairs of queries for 1, 2, 4 and 8 updates of staleness; "any": fresh batches, for which the way is all one."""
    pair = "staleness == {0} and way == '{1}'".format
    return [[pair(k, way), pair(0 if other == "any" else k, other)] for k in (1, 2, 4, 8)]


def p_value(values: pd.Series) -> float:
    return lab.p_value(list(values))


def gained(name: str, column: str, variant: str) -> str:
    """After minus before, in points."""
    runs = table(name).query(f"variant == '{variant}'").set_index("seed")
    return shown(runs[f"{column} after"] - runs[f"{column} before"], 1, 100)


def ablation(world: str, name: str, column: str, against: str = "baseline", places: int = 2) -> str:
    file = "ablations/" + {"tales": "ablations"}.get(world, world)
    return less(file, column, f"ablation == '{name}'", f"ablation == '{against}'", places)


def end_of_curve(metric: str) -> tuple[float, float, float]:
    """Of ten seeds of tales: the first mean; mean and deviation over the last twentieth."""
    curve = table("tales/curves").query(f"task == 'tales' and metric == '{metric}'")
    last = curve[curve["update"] >= 0.95 * curve["update"].max()]
    return curve["mean"].iloc[0], last["mean"].mean(), last["std"].mean()


def best_of_n(method: str, setting: float) -> pd.Series:
    """Gold score minus that of best-of-n with the same reward model at the same KL, interpolated, by seed."""
    rows = table("methods/points")
    ends = rows[(rows["method"] == method) & (rows["setting"] == setting)].sort_values("at").groupby("seed").last()
    curves = rows[rows["method"] == "best-of-n"].sort_values("kl").groupby("seed")
    gold = {seed: np.interp(ends["kl"][seed], curve["kl"], curve["gold"]) for seed, curve in curves}
    return ends["gold"] - pd.Series(gold)


@cache
def facts(name: str) -> dict:
    """A committed JSON file, below benchmark/results, without its ending."""
    return json.loads((ROOT / f"benchmark/results/{name}.json").read_text())


def rate(name: str, side: str, column: str = "episodes/s") -> float:
    """The median of the runs."""
    return float(next(row for row in facts(f"speed/{name}")["speed"] if row[""] == side)[column].split()[0])


def times(name: str, side: str, peer: str) -> str:
    """How many times as fast, by pairs of runs: the median, the least and the most."""
    runs = facts(f"speed/{name}")["runs"]
    pairs = zip(runs[side], runs[peer], strict=True)
    ratios = [ours["episodes_per_second"] / theirs["episodes_per_second"] for ours, theirs in pairs]
    return f"{statistics.median(ratios):.1f} [{min(ratios):.1f}, {max(ratios):.1f}]"


def commits(name: str, query: str = "index >= 0") -> str:
    return ", ".join(dict.fromkeys(table(name).query(query)["commit"].dropna()))


def engines(words: str) -> list[float]:
    """Measured differences of vLLM from our forward pass, in nats."""
    return [row["difference"] for row in facts("engines/engines")["checks"] if words in row["name"]]


FUNCTIONS = [table, by_seed, shown, starred, of, less, differences, against, stale_against, p_value, ablation, gained]
FUNCTIONS += [end_of_curve, best_of_n, facts, rate, times, commits, engines]
WIDTH = 128


def filled(text: str) -> str:
    """The same page with lines of at most WIDTH characters; tables, headings, pictures and code stay as they are.

    Browsers may not break a line inside `1.0 ± 0.2` or before %.
    """
    parts = re.split(r"(^```.*?^```$|\n{2,})", text, flags=re.MULTILINE | re.DOTALL)  # code and gaps between blocks
    for i in range(0, len(parts), 2):
        words = re.sub(r"(?<=\d) (?=[±%])|(?<=±) (?=\d)", "\u00a0", parts[i])
        if not re.match(r"\s*([|#!<]|$)", words):
            entries = re.split(r"\n(?=\s*(?:-|\d+\.) )", words.strip("\n"))
            words = words.replace(words.strip("\n"), "\n".join(map(filled_entry, entries)))
        parts[i] = words
    return "".join(parts)


def filled_entry(text: str) -> str:
    """A paragraph, or an entry of a list, whose lines are indented like the first word of the first one."""
    first = re.match(r"\s*(?:(?:-|\d+\.) )?", text)[0]
    return textwrap.fill(
        " ".join(re.split(r"[ \n]+", text[len(first) :].strip())),
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )


def rendered(template: Path) -> str:
    environment = Environment(
        loader=FileSystemLoader(template.parent), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= {function.__name__: function for function in FUNCTIONS}
    return filled(environment.get_template(template.name).render()).strip() + "\n"


# ---- Reference -------------------------------------------------------------------------------------------------


def metrics_page() -> str:
    parts, panels = learning_curves.METRICS["meanings"], learning_curves.METRICS["panel"]
    chapters = [f"Chapter {part['chapter']}" for part in parts]
    lines = [
        "# Metrics",
        "",
        "`python benchmark/pages.py` makes this page from [metrics.toml](../../ppo_rlhf/metrics.toml).",
        "`report/` shows how to read each panel next to the curves of a run.",
        "",
    ]
    lines += [f"- [{name}](#{name.lower().replace(' ', '-')})" for name in (*chapters, "How to read the curves")]
    for chapter, part in zip(chapters, parts, strict=True):
        lines += ["", f"## {chapter}", "", part["about"], "", "| metric | meaning |", "|---|---|"]
        for names, meaning in part["rows"]:
            lines.append(f"| {', '.join(f'`{name}`' for name in names.split('; '))} | {meaning} |")
    lines += ["", "## How to read the curves", "", "| panel of the report | healthy | sick |", "|---|---|---|"]
    for panel in panels:
        lines.append(f"| {' | '.join(panel[key].strip() for key in ('title', 'healthy', 'sick'))} |")
    return "\n".join(lines) + "\n"


def docstrings(cls: type) -> dict[str, str]:
    """The docstring under each field of a dataclass and of its bases."""
    found: dict[str, str] = {}
    for base in filter(dataclasses.is_dataclass, reversed(cls.__mro__)):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[field.target.id] = " ".join(text.value.value.split())
    return found


def arguments(cls: type, group: Any = None, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Name, default and meaning of each argument, nested ones too, but not those of the stages of a joint script."""
    texts, kinds = docstrings(cls), typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        made = field.default_factory if callable(field.default_factory) else lambda field=field: field.default
        value = getattr(group, field.name) if group else made()
        if type(value).__name__ == "Args":  # a stage
            continue
        if dataclasses.is_dataclass(value):
            yield from arguments(type(value), value, f"{prefix}{field.name}.")
        elif not dataclasses.is_dataclass(kinds[field.name]):
            choices = typing.get_args(kinds[field.name]) if typing.get_origin(kinds[field.name]) is Literal else ()
            shown = "" if value in ("", ()) or value is dataclasses.MISSING else f"`{value}`"
            others = [f"`{choice}`" for choice in choices if choice != value]
            is_positional = "Positional" in str(field.type)
            name = f"<{field.name}>" if is_positional else f"--{prefix}{field.name}"
            yield name, " or ".join([shown, *others]), texts[field.name]


def arguments_page() -> str:
    lines = [
        "# Arguments",
        "",
        "`python benchmark/pages.py` makes this page from the classes of arguments; `--help` says the",
        "same, with the values of a preset. A row is under the first script that has it.",
        "`train_both.py` and `tldr/all.py` also take the arguments of their stages, such as `--policy.ppo.lr`.",
        "",
    ]
    lines += [f"- [`{name}.py`](#{name.replace('/', '')}py)" for name in SCRIPTS]
    seen: set[tuple[str, str, str]] = set()
    for name in SCRIPTS:
        lines += ["", f"## `{name}.py`", "", "| argument | default | meaning |", "|---|---|---|"]
        for row in arguments(import_module(f"ppo_rlhf.{name.replace('/', '.')}").Args):
            if row not in seen:
                flag, default, meaning = row
                lines.append(f"| `{flag}` | {default} | {meaning} |")
                seen.add(row)
    return "\n".join(lines) + "\n"


def with_site(page: str, repository: str) -> str:
    """README.md, with a link to what .github/workflows/site.yml publishes if a repository is named."""
    owner, _, name = repository.removeprefix("https://github.com/").partition("/")
    shown = f"[project's site](https://{owner}.github.io/{name}/)" if repository else "project's site"
    return re.sub(r"\[?project's site(\]\(.*?\))?", shown, page)


def pages() -> dict[str, str]:
    """Each page that is made here, by its path, with its text."""
    repository = runpy.run_path(str(ROOT / "docs/conf.py"))["REPOSITORY"]
    found = {"README.md": with_site((ROOT / "README.md").read_text(), repository)}
    found |= {"docs/reference/metrics.md": metrics_page(), "docs/reference/arguments.md": arguments_page()}
    for template in sorted((ROOT / "docs").glob("*.md.jinja")):
        found[f"docs/{template.stem}"] = rendered(template)
    return found


def main() -> None:
    for name, text in pages().items():
        path = ROOT / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"written: {name}")


if __name__ == "__main__":
    main()
