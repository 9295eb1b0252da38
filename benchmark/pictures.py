"""Draw the pictures of the pages again, from committed files alone; from finished runs, first make the examples.

    python benchmark/pictures.py                # static/*.png and the learning curves of the demos; needs chromium
    python benchmark/pictures.py --runs runs    # before that, takes the newest run of each demo, with its report

The second also takes static/derivation.png from chapter 1's report. The diagrams, static/*.svg, have no numbers: edit
them.
"""

import hashlib
import io
import json
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import pandas as pd
import tyro
from matplotlib import image
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from playwright.sync_api import Page, sync_playwright

from benchmark import lab, pages
from ppo_rlhf.report import __main__ as report, learning_curves
from ppo_rlhf.train_policy import InputError, read_meta, run_script

ROOT = Path(__file__).parents[1]
STATIC = ROOT / "static"
WIDTH, DPI = 8.3, 200  # inches: 1,660 pixels, for 830 on a page
BLUE, ORANGE, GREEN, PINK, YELLOW = learning_curves.COLORS[:5]
STYLE = {"font.size": 9.5, "axes.titlesize": 10, "axes.grid": True, "grid.alpha": 0.3, "legend.frameon": False}


@dataclass(frozen=True)
class Args:
    runs: Path | None = None
    """folder with finished runs of make demo, demo-tldr, demo-rlvr and demo-tools"""


# ---- From runs -------------------------------------------------------------------------------------------------

# Folder below static, beginning of a run's name, what its files' names begin with there, and these files.
EXAMPLES = [
    ("demo", "train_reward__tales__", "reward_", ["meta.json"]),
    ("demo", "train_policy__tales__", "", ["meta.json", "metrics.csv", "comparison.jsonl"]),
    ("demo-tldr", "tldr_sft__posts__", "sft_", ["meta.json", "metrics.csv", "evaluation.jsonl"]),
    ("demo-tldr", "tldr_reward__posts__", "reward_", ["meta.json", "metrics.csv"]),
    ("demo-tldr", "tldr_policy__posts__", "policy_", ["meta.json", "metrics.csv"]),
    ("demo-tldr", "tldr_policy__posts__", "", ["evaluation.jsonl"]),
    ("demo-rlvr", "rlvr_policy__sums__", "", ["meta.json", "metrics.csv", "evaluation.jsonl"]),
    ("demo-tools", "rlvr_tools__sums-tools__", "", ["meta.json", "metrics.csv"]),
]
REPORTS = {"demo": "train_policy__tales__", "demo-tldr": "tldr_policy__posts__", "demo-rlvr": "rlvr_policy__sums__"}


def newest(runs: Path, name: str) -> Path:
    """The newest run whose name begins so; an InputError if it hasn't finished, or there is none."""
    metas = sorted(runs.glob(f"{name}*/meta.json"), key=lambda path: path.stat().st_mtime)
    if not metas or not read_meta(metas[-1].parent).get("finished"):
        raise InputError(f"--runs {runs}: the newest run {name}* is missing or not finished; make examples makes all")
    return metas[-1].parent


def take_examples(runs: Path) -> None:
    """Copy what static keeps of the newest run of each stage, and make the reports of the three chapters."""
    found = {name: newest(runs, name) for _, name, *_ in EXAMPLES}
    for folder, name, prefix, kept in EXAMPLES:
        for file in kept:
            shutil.copyfile(found[name] / file, STATIC / folder / f"{prefix}{file}")
    for folder, name in REPORTS.items():
        report.report(report.Args(run=str(found[name]), out=str(STATIC / folder / "report.html")))


# ---- From committed numbers ------------------------------------------------------------------------------------


def draw_front_page(figure: Figure) -> None:
    """The demo of chapter 1: thin lines are single updates, thick ones means of ten."""
    metrics, (scores, kl) = pages.table("demo/metrics"), figure.subplots(1, 2)
    target = read_meta(STATIC / "demo")["args"]["rewards"]["adaptive_kl"]["target"]
    for axes, name, label, color in (
        (scores, "objective/gold_scores", "gold score", ORANGE),
        (scores, "objective/scores", "reward model's score", BLUE),
        (kl, "objective/kl", "KL", BLUE),
    ):
        axes.plot(metrics["step"], metrics[name], color=color, alpha=0.3, linewidth=0.8)
        smooth = metrics[name].rolling(10, min_periods=1).mean()
        axes.plot(metrics["step"], smooth, color=color, linewidth=2, label=label)
    kl.axhline(target, color="black", linestyle="--", linewidth=1.2, label=f"its target, {target:g}")
    scores.set(title="score of the responses", xlabel="update", ylabel="points")
    kl.set(title="KL divergence from the language model", xlabel="update", ylabel="nats per response")
    for axes in (scores, kl):
        axes.plot([], [], color="gray", alpha=0.5, linewidth=0.8, label="thin: single updates; thick: mean of ten")
        axes.legend(loc="lower right")


LEARNING = {
    "objective/scores": "PPO raises the reward model's score of its texts,",
    "objective/gold_scores": "and with it the gold score, which it never sees",
}


def draw_learning(figure: Figure) -> None:
    """The demo of chapter 1 for the first page: what PPO is told of its texts, and what it is never told."""
    metrics, panels = pages.table("demo/metrics"), figure.subplots(1, 2)
    for axes, (name, title), color in zip(panels, LEARNING.items(), (BLUE, ORANGE), strict=True):
        axes.plot(metrics["step"], metrics[name], color=color, alpha=0.3, linewidth=0.8)
        axes.plot(metrics["step"], metrics[name].rolling(10, min_periods=1).mean(), color=color, linewidth=2)
        axes.set(title=title, xlabel="update")
    panels[0].set_ylabel("points (thick: mean of ten)")


SHAPES = {
    "objective/scores": "reward model's score",
    "objective/kl": "KL (nats per response)",
    "objective/kl_coef": "KL coefficient",
    "ppo/policy/entropy": "entropy (nats per token)",
    "objective/gold_scores": "gold score (only ours has one)",
}


def draw_tales(figure: Figure) -> None:
    """Ten seeds of ours, and ten of OpenAI's as they were read from a published figure."""
    ours = pages.table("tales/curves").query("task == 'tales'")
    theirs = pd.read_csv(ROOT / "benchmark/curves/reference/lm_human_preferences.csv").query(
        "implementation == 'openai/lm-human-preferences' and source_figure == 'ours1.png' and task == 'sentiment'"
    )
    sides = (
        (ours, BLUE, "this project, tales,\n200 updates"),
        (theirs, "black", "OpenAI, sentiment,\n1,953 updates"),
    )
    *panels, legend = figure.subplots(2, 3).flat
    for axes, (metric, title) in zip(panels, SHAPES.items(), strict=True):
        for side, color, _ in sides:
            curve = side[side["metric"] == metric].dropna(subset="update")
            share = 100 * curve["update"] / side["update"].max()
            draw_band(axes, share, curve["mean"], curve["std"], color=color)
        axes.set(title=title, xlabel="share of the training (%)")
    for _, color, label in sides:
        legend.plot([], [], color=color, label=label)
    legend.fill_between([], [], color="gray", alpha=0.3, label="a standard deviation\nover ten seeds each")
    legend.set_axis_off()
    legend.legend(loc="center")


def draw_band(axes: Axes, x: pd.Series, mean: pd.Series, deviation: pd.Series, *, color: str) -> None:
    axes.fill_between(x, mean - deviation, mean + deviation, color=color, alpha=0.2, linewidth=0)
    axes.plot(x, mean, color=color, linewidth=1.5)


RATINGS = {  # label, colour, how much higher than the line's end it is written
    "preset": ("small steps and a penalty:\n4,800 sentences rated", BLUE, 0),
    "4800": ("large steps, hardly a penalty:\n4,800 sentences rated", ORANGE, 8),
    "4800-single": ("4,800, by one person each", GREEN, -8),
    "1000": ("1,000", PINK, 8),
    "200": ("200", YELLOW, -4),
}


def draw_people(figure: Figure) -> None:
    """Means over seeds, and over up to three of the updates that were judged."""
    updates, axes = pages.table("people/updates").dropna(subset="judge"), figure.subplots()
    for name, (label, color, up) in RATINGS.items():
        means = updates[updates["variant"] == name].groupby("step")[["objective/kl", "judge"]].mean()
        means = means.rolling(3, min_periods=1).mean()
        axes.plot(means["objective/kl"], means["judge"], marker=".", color=color)
        name_end(axes, means.iloc[-1], label, color, beside=(8, up))
    axes.set(xlabel="KL from the language model (nats per response)", ylabel="the judge's score")
    axes.set(xlim=(-1, 27), ylim=(-0.32, 0.85))
    axes.set_title("Small steps and a penalty matter more than how many sentences people have rated")


def name_end(axes: Axes, end: Sequence[float], label: str, color: str, *, beside: tuple[float, float]) -> None:
    """Write what a line or a point is next to it. beside: shift to the right and up, in points."""
    align = "left" if beside[0] > 0 else "right"
    axes.annotate(label, end, beside, textcoords="offset points", color=color, va="center", ha=align)


METHODS = {  # label, colour, and where it is written
    ("dpo", 0.3): ("DPO on a long leash\n(β = 0.3)", ORANGE, (10, 18)),
    ("dpo", 1): ("DPO on a short leash\n(β = 1)", YELLOW, (-10, 26)),
    ("ppo", 0.2): ("PPO on a long leash\n(KL coefficient 0.2)", GREEN, (-8, 18)),
    ("ppo", 0.6): ("PPO on a short leash\n(KL coefficient 0.6)", PINK, (12, -22)),
}


def draw_methods(figure: Figure) -> None:
    """The ends of training, with 95 % intervals, and best-of-n for all n: five seeds."""
    points, axes = pages.table("methods/points"), figure.subplots()
    best = points[points["method"] == "best-of-n"].groupby("at")[["kl", "gold"]].mean()
    axes.plot(best["kl"], best["gold"], color=BLUE, marker=".")
    for n, label in ((1, "one sample, no training"), (64, "best of 64 samples")):
        name_end(axes, best.loc[n], label, BLUE, beside=(10, -2))
    for (method, setting), (label, color, beside) in METHODS.items():
        own = points[(points["method"] == method) & (points["setting"] == setting)]
        ends = own[own["at"] == own["at"].max()]
        (kl, kl_half), (gold, gold_half) = (lab.interval(list(ends[column])) for column in ("kl", "gold"))
        axes.errorbar(kl, gold, xerr=kl_half, yerr=gold_half, fmt="o", color=color, capsize=3)
        name_end(axes, (kl, gold), label, color, beside=beside)
    axes.set(xlabel="KL from the fine-tuned model (nats per summary)", ylabel="gold score")
    axes.set(xlim=(-0.8, 5), ylim=(1.6, 2.85))
    axes.set_title("At the same distance from the model, PPO and DPO write about as well as the best of n samples")


REMEDIES = {
    "nll": "a likelihood loss on correct responses",
    "lam_alpha": "the policy's λ by length",
    "all": "all four at once",
    "critic_lam": "λ = 1 for the critic",
    "pretraining": "the critic learns alone first",
    "rloo": "no critic at all (RLOO)",
}


def draw_critic(figure: Figure) -> None:
    """Differences from PPO with GAE, seed by seed, as in the table of the older studies."""
    axes = figure.subplots()
    pairs = pages.against("variant == '%s'", list(REMEDIES), "gae")
    gaps = [pages.paired("critic/runs", "samples", one, other) for one, other in pairs]
    chances = lab.holm([pages.p_value(gap) for gap in gaps])
    for place, (gap, p) in enumerate(zip(gaps, chances, strict=True)):
        draw_difference(axes, place, *lab.interval(list(100 * gap)), is_significant=p < 0.05)
    name_rows(axes, REMEDIES.values())
    figure.supxlabel(
        "change of the correct samples (points): 95 % intervals over five seeds; filled: significant",
        fontsize=STYLE["font.size"],
    )
    figure.suptitle("Of VAPO's four changes to PPO, only a likelihood loss on correct responses helped here")


def draw_difference(axes: Axes, place: int, mean: float, half: float, *, is_significant: bool) -> None:
    color = ORANGE if mean < 0 else BLUE
    face = color if is_significant else "white"
    axes.errorbar(mean, place, xerr=half, fmt="o", color=color, markerfacecolor=face, capsize=3)


def name_rows(axes: Axes, names: Collection[str]) -> None:
    """From top to bottom, with a line at no difference."""
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)


def draw_overoptimisation(figure: Figure) -> None:
    """Four policies of each number of comparisons, a line each; means over ten updates."""
    runs, panels = pages.table("overoptimisation/overoptimisation"), figure.subplots(1, 3, sharey=True)
    for axes, (labels, of_size) in zip(panels, runs.groupby("experiment", sort=False), strict=True):
        for column, label, color in (("proxy", "reward model's score", BLUE), ("gold", "gold score", ORANGE)):
            for _, policy in of_size.groupby("seed"):
                smooth = policy[column].rolling(10, min_periods=1).mean()
                axes.plot(policy["update"], smooth, color=color, linewidth=1.2, label=label)
                label = None
        axes.set(title=labels.replace("labels", "comparisons"), xlabel="update")
    panels[0].set_ylabel("gain (deviations of the\nlanguage model's scores)")
    figure.suptitle(
        "With 320 comparisons, two of four policies raise the reward model's score while the gold score falls"
    )
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)


LAMBDAS = {"truth": ("truth", "black"), "0": ("λ = 0", BLUE), "0.95": ("λ = 0.95", GREEN), "1": ("λ = 1", YELLOW)}


def draw_credit(figure: Figure) -> None:
    """The critic of small/micro.py and its advantages, next to the truth."""
    found = pages.facts("credit")
    text, words = found["text"], found["text"].split()
    upper, lower = figure.subfigures(2, 1, height_ratios=(1.15, 1))
    upper.suptitle("A critic learns what beginnings are worth, if the policy often writes them")
    lower.suptitle(
        f"Only “{words[1]}” spoils “{text}”. λ = 1 blames its neighbours, too;\n"
        "λ = 0 blames the word at which the critic notices"
    )
    critics = upper.subplots(1, 3, sharex=True, sharey=True)
    bars = lower.subplots(1, 3, sharey=True)
    for critic, axes, (update, computed) in zip(critics, bars, found["updates"].items(), strict=True):
        rows = pd.DataFrame.from_dict(computed["beginnings"], "index", columns=["prob", "value", "true"])
        is_spoilt = rows.index.map(lambda start: text.startswith(start) and len(start.split()) > 1)
        dots = (
            (rows[~is_spoilt], BLUE, "a beginning; the larger, the more frequent"),
            (rows[is_spoilt], ORANGE, "“the mean …”"),
        )
        for shown, color, label in dots:
            critic.scatter(
                shown["true"],
                shown["value"],
                s=20 + 150 * shown["prob"],
                color=color,
                alpha=0.7,
                linewidth=0,
                label=label,
            )
        critic.axline((0, 0), slope=1, color="black", linewidth=0.8, label="a perfect critic")
        critic.set(title=f"after {update} update{'s' * (update != '1')}", xlabel="true value")
        for i, (name, (label, color)) in enumerate(LAMBDAS.items()):
            places = [place + 0.2 * (i - 1.5) for place in range(len(words))]
            axes.bar(places, computed["advantages"][name], width=0.2, color=color, label=label)
        axes.set_xticks(range(len(words)), words)
        axes.axhline(0, color="black", linewidth=0.8)
    critics[0].set_ylabel("critic's value")
    bars[0].set_ylabel("advantage")
    for part, panel in ((upper, critic), (lower, axes)):
        part.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=4)


ATLAS = {
    ("tales", "chapter 1, tales: change of the gold score (points)"): {
        "lambda-0": "λ = 0 instead of 0.95",
        "gamma-0.9": "γ = 0.9 instead of 1",
        "one-epoch": "one epoch per batch instead of four",
        "no-policy-clipping": "policy loss not clipped",
        "lambda-1": "λ = 1 instead of 0.95",
        "no-kl": "no KL penalty",
    },
    ("posts", "chapter 2, posts: change of the gold score (points)"): {
        "no-kl": "no KL penalty",
        "temperature-1": "temperature 1 instead of 0.7",
        "comparisons-256": "256 comparisons instead of 2,048",
    },
    ("sums", "chapter 3, sums: change of the share of correct samples (percentage points)"): {
        "critic-lambda-0": "critic with λ = 0 instead of 0.95",
        "many-steps": "32 optimiser steps per batch instead of 2",
        "no-clip": "policy loss not clipped",
    },
}


def draw_atlas(figure: Figure) -> None:
    """Effects on the reward, as the tables of the atlas have them."""
    page = (ROOT / "docs/reference/atlas.md").read_text()
    panels = figure.subplots(3, 1, height_ratios=[len(changes) for changes in ATLAS.values()])
    for axes, ((world, title), changes) in zip(panels, ATLAS.items(), strict=True):
        for place, name in enumerate(changes):
            row = page.partition(f'<a id="{world}-{name}">')[2].partition("\n")[0]
            mean, half = map(float, re.search(r"([-+][\d.]+) ± ([\d.]+)", row).groups())
            is_significant = float(row.split(" | ")[-2].strip("< ")) < 0.05  # after Holm's correction
            draw_difference(axes, place, mean, half, is_significant=is_significant)
        name_rows(axes, changes.values())
        axes.set_title(title, loc="left")
    figure.supxlabel(
        "bars: 95 % intervals over five seeds; filled: significant after Holm's correction for all 81 changes\n"
        "orange: lower than the unchanged script; blue: higher",
        fontsize=STYLE["font.size"],
    )


PICTURES: dict[str, tuple[str, float, Callable[[Figure], None]]] = {  # its data, its height in inches
    "front_page": ("static/demo/metrics.csv", 3.2, draw_front_page),
    "learning": ("static/demo/metrics.csv", 2.6, draw_learning),
    "tales": ("benchmark/results/tales/curves.csv", 4.6, draw_tales),
    "people": ("benchmark/results/people/updates.csv", 3.9, draw_people),
    "methods": ("benchmark/results/methods/points.csv", 4.3, draw_methods),
    "critic": ("benchmark/results/critic/runs.csv", 2.7, draw_critic),
    "overoptimisation": ("benchmark/results/overoptimisation/overoptimisation.csv", 3.6, draw_overoptimisation),
    "credit": ("benchmark/results/credit.json", 6.8, draw_credit),
    "atlas": ("docs/reference/atlas.md", 5, draw_atlas),
}


# ---- From pages in a browser -----------------------------------------------------------------------------------

SHOWN = {"episode": 2, "token": 18}  # counted from 0: " splendid", in the middle of a response with a good score
DERIVATION = ("KL", "reward", "whitened reward", "temporal difference", "advantage", "whitened advantage")


@contextmanager
def browsed(path: Path, width: int) -> Iterator[Page]:
    """A page in chromium, with two pixels of the picture for each of its own."""
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 1000}, device_scale_factor=2)
        page.add_init_script("Math.random = () => 0.5")  # the seed of the annotator's page
        page.goto(path.as_uri())
        yield page
        browser.close()


def draw_derivation() -> None:
    """Some lines of a token of chapter 1's example report, of the update on which it opens."""
    with browsed(STATIC / "demo/report.html", width=830) as page:
        page.evaluate("token => choose(token)", SHOWN)
        titles = list(DERIVATION)
        page.evaluate(
            """titles => {
                for (const line of document.querySelectorAll("#lines .line"))
                    if (!titles.includes(line.querySelector("b").textContent)) line.remove();
                const panel = document.getElementById("panel");
                document.body.replaceChildren(panel);
                panel.style = "position: static; max-height: none; box-shadow: none";
            }""",
            titles,
        )
        page.locator("#panel").screenshot(path=STATIC / "derivation.png")


# The reader likes pleasant sentences, and takes neither text if both are, or none.
READER = """([left, right]) => {
    const gold = (id) => GOLD[number_of($(id).firstChild.textContent.split(" ").map((word) => WORDS.indexOf(word)))];
    while (!$(left).disabled) {
        const better = gold(right) - gold(left);
        keys[better > 0 ? "ArrowRight" : better < 0 ? "ArrowLeft" : "ArrowDown"]();
    }
}"""


ANNOTATOR = (
    "You like pleasant sentences. A reward model saw 24 of your choices. A language model practises to please it."
)


def draw_annotator() -> None:
    """What practice makes of the reader's texts without a leash and with one; with the hash of the page."""
    path = STATIC / "annotate.html"
    with browsed(path, width=720) as page:
        page.locator("#begin").click()
        page.evaluate(READER, ["left", "right"])
        for go_on in ("#enough", "#again"):
            page.locator(go_on).click()
            page.locator("#guess").select_option("1")
            page.locator("#run").click()
            page.locator("#ask:enabled").click(timeout=120_000)
            page.evaluate(READER, ["left2", "right2"])
        page.locator("#verdict .row").evaluate("buttons => buttons.remove()")
        page.locator("#so-far").evaluate("(heading, title) => { heading.textContent = title; }", ANNOTATOR)
        page.locator("#verdict").evaluate("verdict => verdict.style.padding = '12px'")
        pixels = image.imread(io.BytesIO(page.locator("#verdict").screenshot()))
    image.imsave(STATIC / "annotate.png", pixels, metadata=told_of(path))


def told_of(path: Path) -> dict[str, str | None]:
    """What a picture says of itself: the hash of what it was drawn from."""
    return {"Description": hashlib.sha256(path.read_bytes()).hexdigest(), "Software": None}


def main(args: Args) -> None:
    if args.runs:
        take_examples(args.runs)
        draw_derivation()
    draw_annotator()
    for name, (data, height, draw) in PICTURES.items():
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=(WIDTH, height), layout="constrained")
            draw(figure)
            figure.savefig(STATIC / f"{name}.png", dpi=DPI, metadata=told_of(ROOT / data))
    for folder, prefix in (("demo", ""), ("demo-tldr", "policy_"), ("demo-rlvr", ""), ("demo-tools", "")):
        rows = pages.table(f"{folder}/{prefix}metrics").to_dict("records")
        settings = json.loads((STATIC / folder / f"{prefix}meta.json").read_text())["args"]
        learning_curves.draw_learning_curves(STATIC / folder, rows, settings)


if __name__ == "__main__":
    run_script(lambda: main(tyro.cli(Args, description=__doc__)))
