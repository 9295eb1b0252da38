"""The page of a run: reads what the run left, and renders report.html."""

import ast
import csv
import functools
import json
import math
import re
import statistics
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from ppo_rlhf.report import derivation, learning_curves, traces
from ppo_rlhf.train_policy import InputError, flatten, input_errors, read_meta

HERE = Path(__file__).parent
TRACE_BYTES = 1_800_000  # of traces on a page; beyond, updates are left out


# ---- What a run left -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OneRun:
    folder: Path
    meta: dict[str, Any]
    steps: list[int] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)  # of the steps

    @property
    def chapter(self) -> int:
        return derivation.CHAPTERS[self.meta["script"].split("_")[0]]

    @property
    def title(self) -> str:
        """The method and its texts."""
        args, part = self.meta["args"], self.meta["script"].partition("_")[2]
        names = [args.get("task", {}).get(name) for name in ("query_dataset", "posts", "problems")]
        texts = str(next(filter(None, [*names, args.get("preset")]), "texts"))
        estimator = args.get("ppo", {}).get("advantage", "gae")
        method = "PPO" if estimator == "gae" else estimator.upper()
        method = {"reward": "A reward model", "sft": "Supervised fine-tuning"}.get(part, method)
        return f"{method} on {Path(texts).name or texts}"

    @property
    def device(self) -> str:
        """Where it ran, in words."""
        kind, _, name = self.meta.get("device", "").partition(": ")
        return name if kind == "cuda" else "a CPU" if kind == "cpu" else "an unknown device"

    @property
    def facts(self) -> dict[str, Any]:
        """How and with what it was run."""
        meta = self.meta
        return {
            "run": self.folder.resolve().name,
            "script": f"{meta['script']} (chapter {self.chapter})",
            "state": "finished" if meta.get("finished") else f"not finished: {len(self.steps):,} steps are logged",
            "time": f"{meta.get('wall_time', 0) / 60:.1f} minutes",
            **{name: meta.get(name) or "unknown" for name in ("device", "num_processes", "threads", "commit")},
        }

    @property
    def rows(self) -> list[dict[str, float]]:
        """The metrics of each step."""
        return [
            {"step": step} | {name: values[k] for name, values in self.metrics.items()}
            for k, step in enumerate(self.steps)
        ]

    def kept(self) -> list[int]:
        """The updates that have a trace. Those that metrics.csv lacks are left out."""
        return [update for update in traces.kept(self.folder) if update in self.steps]

    def episodes(self, update: int) -> list[dict[str, Any]]:
        """The episodes of an update's trace; the first ones have texts."""
        coefficients = dict(zip(self.steps, self.metrics.get("objective/kl_coef", []), strict=False))
        with input_errors(f"{traces.path_of(self.folder, update)} is damaged; remove it"):
            return episodes_of(traces.read(self.folder, update), coefficients.get(update))


def read_run(folder: Path) -> OneRun:
    """The content of the folder of a run, finished or not."""
    meta, path = read_meta(folder), folder / "metrics.csv"
    if str(meta.get("script")).split("_")[0] not in derivation.CHAPTERS:
        raise InputError(f"{folder / 'meta.json'} names no training script; an older version made the run")
    with input_errors(f"{path} is damaged"):
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        # The run may be writing the last line, or kill -9 may have cut it off.
        header, *rows = [*csv.reader(line for line in lines if line.endswith("\n"))] or [[]]
        columns = [[*map(float, column)] for column in zip(*rows, strict=True)]
        metrics = dict(zip(header, columns, strict=True)) if rows else {}
        metrics = {name: metrics[name] for name in learning_curves.without_groups_of_one(metrics, meta["args"])}
        steps = [int(step) for step in metrics.pop("step", [])]
    return OneRun(folder=folder, meta=meta, steps=steps, metrics=metrics)


def render(one_run: OneRun) -> str:
    """The page. Texts of the run reach it escaped: here by Jinja, in the script through textContent."""
    environment = Environment(loader=FileSystemLoader(HERE), autoescape=True)
    # Jinja would sort keys. Here they keep their order.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    panels, shown = draw_panels(one_run), shown_updates(one_run)
    panels.sort(key=lambda panel: (*FIRST, "").index(panel["title"] if panel["title"] in FIRST else ""))
    found = outcomes(one_run)
    steps = derivation.steps_of(settings_of(one_run)) if shown else []
    text = environment.get_template("report.html").render(
        run=one_run,
        headline=headline(found) or one_run.title,
        outcomes=found,
        example=example(one_run),
        panels=panels,
        tables=tables_of(one_run),
        left_out=len(one_run.kept()) - len(shown),
        held_out=held_out_texts(one_run),
        data={
            "figures": [panel["figure"] for panel in panels],
            "updates": shown,
            "scales": scales(shown),
            "quantities": QUANTITIES,
            "numbers": NUMBERS,
            "steps": [
                {name: getattr(step, name) for name in ("title", "formula", "filled", "sentence", "place")}
                | {"source": source_of(step.place, one_run.meta.get("commit", ""))}
                for step in steps
            ],
            "commit": one_run.meta.get("commit", ""),
        },
        script="".join((HERE / name).read_text("utf-8") for name in ("charts.js", "report.js")),
    )
    # Half characters, and those that could command a terminal, are replaced.
    return re.sub(r"[^\n\t\x20-\x7e\xa0-\U0010ffff]", "\ufffd", text.encode(errors="replace").decode())


SOURCE_LINES = 12  # at most, of a place


def source_of(place: str, commit: str) -> str:
    """The numbered lines of a place, a step's file, function and mark, in the commit that ran.

    Empty where this is no checkout with that commit. If the mark is above the function, its first lines.
    """
    path, name, mark = place.split()
    text = file_of_commit(path, commit.removesuffix("-dirty"))
    found, lines = [], text.splitlines()
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef) and function.name == name:
            first = function.body[0].end_lineno + 1 if ast.get_docstring(function) else function.lineno
            of_function = range(first, function.end_lineno + 1)
            marked = [k for k in of_function if mark in lines[k - 1]]
            found.append((not marked, of_function[(marked or [first])[0] - first :][:SOURCE_LINES]))
    return "\n".join(f"{k} {lines[k - 1]}" for k in min(found)[1]) if found else ""


@functools.cache
def file_of_commit(path: str, commit: str) -> str:
    command = ["git", "-C", str(HERE), "show", f"{commit}:{path}"]
    try:
        return subprocess.run(command, capture_output=True, check=True).stdout.decode() if commit else ""
    except (OSError, subprocess.CalledProcessError):  # no git, no checkout, or not its commit
        return ""


def tables_of(one_run: OneRun) -> dict[str, dict[str, str]]:
    """What was run, as tables of names and values."""
    meta = one_run.meta
    tables = {"Run": one_run.facts, "Arguments": flatten(meta["args"])}
    tables |= {name.capitalize(): meta.get(name, {}) for name in ("results", "sizes", "versions")}
    return {title: {name: as_text(value) for name, value in rows.items()} for title, rows in tables.items() if rows}


def as_text(value: Any) -> str:
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.6g}"
    return f"{value:,}" if type(value) is int else str(value)


# ---- What happened ---------------------------------------------------------------------------------------------

FIRST = ("Score", "Held-out queries", "KL from the reference (nats per response)", "Loss", "Accuracy")  # panels
LAST = 10  # updates, whose mean is what a run has reached


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A number to look at first."""

    title: str
    meaning: str
    said: str  # the subject of a sentence about it; empty if the headline has none
    before: float
    after: float
    curve: str  # from points
    color: str

    @property
    def sentence(self) -> str:
        digits = ".0%" if "share" in self.said else ".1f" if max(abs(self.before), abs(self.after)) >= 1 else ".2f"
        before, after = (f"{x:z{digits}}".replace("%", "\u00a0%") for x in (self.before, self.after))
        if before == after:
            return f"{self.said} stayed at {after}"
        return f"{self.said} {'rose' if self.after > self.before else 'fell'} from {before} to {after}"


def outcomes(one_run: OneRun) -> list[Outcome]:
    """The numbers to look at first."""
    args = one_run.meta["args"]
    own = learning_curves.own_metrics([args])
    panels = learning_curves.panels_of(one_run.metrics, own)
    legend = {name: (label, color) for _, lines in panels for name, label, color in lines}
    score = "a reward model's score" if args.get("rewards", {}).get("trained_model") else "the score"
    correct = "the share of correct answers to problems that no update saw"
    choices = "the share of choices that a reward model gets right"
    ratings = "the correlation of a reward model's scores with ratings"
    watched = "".join(legend[name][0] for name in own["Score"] if name in legend)
    gold = f"what people would say, the {watched}," if watched == "gold score" else f"{watched}, which only watches,"
    of_each = [  # title, meaning, subject of a sentence, metrics
        ("Held-out accuracy", "first and last evaluation", correct, own["Held-out queries"]),
        ("Score", "what training raises", score, ["objective/score", "objective/scores"]),
        (watched[:1].upper() + watched[1:], "nothing is trained on it", gold, own["Score"]),
        ("KL", "nats from the reference", "", ["objective/kl"]),
        ("Responses that end", "share", "", ["objective/stopped", "objective/eos_rate", "val/stop_token_rate"]),
        ("Accuracy", "share of comparisons", choices, ["train/accuracy", "train/rm/accuracy"]),
        ("Correlation", "with the ratings", ratings, ["train/corr"]),
        ("Loss", "over the training texts", "the loss", ["train/loss", "train/rm/loss", "train/sft/loss"]),
    ]
    found = []
    for title, meaning, said, names in of_each:
        name = next((name for name in names if name in one_run.metrics), "")
        known = [x for x in one_run.metrics.get(name, []) if math.isfinite(x)]
        if any(known):
            after = known[-1] if name.startswith("eval/") else statistics.fmean(known[-LAST:])
            outcome = Outcome(
                title=title,
                meaning=meaning,
                said=said,
                before=known[0],
                after=one_run.meta.get("results", {}).get(name, after),
                curve=points(known),
                color=legend[name][1],
            )
            found.append(outcome)
    return found


def headline(found: list[Outcome]) -> str:
    """What happened, in a sentence of at most two numbers; empty if nothing is known."""
    sentence = "; ".join([outcome.sentence for outcome in found if outcome.said][:2])
    return sentence[:1].upper() + sentence[1:]


def points(values: list[float]) -> str:
    """Values as an SVG polyline, 100 wide and 20 high, whose range includes 0."""
    values = values[:: -(-len(values) // 100)]
    low, high = min(0, *values), max(0, *values)
    places = ((100 * k / max(len(values) - 1, 1), 20 * (high - x) / (high - low)) for k, x in enumerate(values))
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def words_of_numbers(one_run: OneRun) -> dict[str, str]:
    """What the numbers of held-out answers are called, by their names in rows. What only watches is first."""
    own = learning_curves.own_metrics([one_run.meta["args"]])
    monitors, verifiers = ([name.partition("/")[2] for name in own[title]] for title in ("Score", "Held-out queries"))
    words = {"gold": "gold score"} | {name: name.replace("gold_scores", "gold score") for name in monitors}
    return words | dict.fromkeys(("score", "scores", *verifiers), "score")


def example(one_run: OneRun) -> dict[str, Any] | None:
    """A query with its answers and their scores before and after: that of the median gain.

    The gain is that of the gold score, and then of the score; if there is no gold score, that of the score. If the
    median is 0, it is that of the gains that are not, so that one sees a change. If the run kept no answers before
    training, the first and the last sample that was printed.
    """
    words, found = words_of_numbers(one_run), []
    for row in answers_of(one_run).values():
        names = [name for name in words if None not in (row.get(name), row.get(name + BEFORE))]
        if names and "response" + BEFORE in row:
            found.append(([row[name] - row[name + BEFORE] for name in names], names, row))
    if not found:
        return example_of_samples(one_run)
    found.sort(key=lambda one: one[0])
    gains = [gain for (gain, *_), _, _ in found]
    changed = [one for one in found if one[0][0]]
    is_median_of_changed = changed and gains[len(gains) // 2] == 0
    _, names, row = changed[len(changed) // 2] if is_median_of_changed else found[len(found) // 2]
    chosen = (
        f"Of {len(found)} queries that were answered before and after training, the {words[names[0]]} of the answer "
        f"rose for {sum(gain > 0 for gain in gains)} and fell for {sum(gain < 0 for gain in gains)}. "
        f"This one has the median gain{' of those that changed' * bool(is_median_of_changed)}."
    )
    answers = [
        {
            "when": when,
            "text": row["response" + column].strip(),
            "numbers": ", ".join(f"{words[name]} {row[name + column]:z.2f}" for name in reversed(names)),
        }
        for when, column in (("before training", BEFORE), ("after training", ""))
    ]
    return {"title": "One query", "query": query_of(row).strip(), "answers": answers, "chosen": chosen}


def example_of_samples(one_run: OneRun) -> dict[str, Any] | None:
    """The first and the last row of samples.jsonl."""
    path = one_run.folder / "samples.jsonl"
    with input_errors(f"{path} is damaged"):
        scored = [row for row in read_rows(path) if "response" in row and row.keys() & {"score", "scores"}]
        rows = [scored[k] for k in (0, -1)] if scored else []
        answers = [
            {
                "query": query_of(row).strip(),
                "when": f"in update {row['step']}",
                "text": row["response"].strip(),
                "numbers": f"score {row.get('scores', row.get('score')):.2f}",
            }
            for row in rows
        ]
    if not rows or rows[0]["step"] == rows[1]["step"]:
        return None
    chosen = "The first and the last row of samples.jsonl. They answer different queries."
    return {"title": "Two samples", "query": "", "answers": answers, "chosen": chosen}


def held_out_texts(one_run: OneRun) -> list[tuple[str, str, dict[str, str]]]:
    """Of the first held-out queries: the answer, its numbers, and all that is known, by names in words."""
    words, found = words_of_numbers(one_run), []
    for row in list(answers_of(one_run).values())[:20]:
        row = {name: value for name, value in row.items() if value is not None}
        numbers = [
            f"{words[name]} {' → '.join(f'{row[key]:.3g}' for key in (name + BEFORE, name) if key in row)}"
            for name in reversed(words)
            if row.keys() & {name, name + BEFORE}
        ]
        answer = row.get("response", row.get("response" + BEFORE, query_of(row)))
        shown = {name.replace("_", " "): as_text(value) for name, value in row.items()}
        found.append((answer, ", ".join(numbers), shown))
    return found


BEFORE = " before"  # ends the name of what is known of the model before this training


def answers_of(one_run: OneRun) -> dict[str, dict[str, Any]]:
    """Held-out queries with what the policy answers, and what the model that it started from did."""
    compared = read_lines(one_run.folder / "comparison.jsonl")
    answers = {query: {renamed(name): value for name, value in row.items()} for query, row in compared.items()}
    answers = read_lines(one_run.folder / "evaluation.jsonl") or answers
    for query, row in read_lines(one_run.folder / "evaluation_before.jsonl").items():
        of_query = ("query", "prompt", "answer", "kind")
        query_side = {name: value for name, value in row.items() if name in of_query or name.startswith("reference")}
        before = {name + BEFORE: value for name, value in row.items() if name not in query_side}
        answers[query] = query_side | before | answers.get(query, {})
    return answers


def renamed(column: str) -> str:
    """A column of chapter 1's comparison.jsonl, as the other chapters call it: "base" is "response before"."""
    model, _, name = column.partition(" ")
    return {"base": f"{name or 'response'}{BEFORE}", "policy": name or "response"}.get(model, column)


def read_lines(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of a file of JSON lines by their query; none if there is no such file."""
    with input_errors(f"{path} is damaged"):
        return {query_of(row): row for row in read_rows(path)}


def query_of(row: dict[str, Any]) -> str:
    """In chapter 3 it is called prompt."""
    return str(row.get("query") or row["prompt"])


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines; none if there is no such file."""
    with input_errors(f"{path} is damaged"):
        lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
        return [json.loads(line) for line in lines if line]


# ---- Traces ----------------------------------------------------------------------------------------------------

# name: title, the number without colour, and how to read it
QUANTITIES = {
    "push": (
        "pushed up or down",
        0,
        "Minus the gradient of the policy loss by the token's log-prob, averaged over the epochs. Above 0 the loss "
        "pushed the token up, below 0 down. It may have moved the other way, since all tokens share the weights: see "
        "the ratio after the update.",
    ),
    "advantages": ("advantage", 0, "How much better than expected, as the last epoch's loss had it."),
    "kl": (
        "KL",
        0,
        "Log-prob under the policy minus log-prob under the reference, in nats, or another estimate of the KL.",
    ),
    "logprobs": (
        "log-prob, policy",
        0,
        "How likely the sampling policy thought the token, in nats. Far below 0: a surprise.",
    ),
    "ref_logprobs": ("log-prob, reference", 0, "Of the model that training started from."),
    "rewards": ("reward", 0, "The KL penalty of each token; the score is on the last, or on the step after it."),
    "values": ("value", 0, "What the critic expects from here on, before it learned from this episode."),
    "returns": ("return", 0, "What the critic should have said."),
    "ratio": ("ratio after the update", 1, "How many times likelier the update made the token."),
    "clipped": ("clipped", 0, "1 where the ratio left its range in the direction that pays: no gradient any more."),
    "new_logprobs": ("log-prob after the update", 0, "Of the policy after all epochs of this update."),
    "new_values": ("value after the update", 0, "What the critic says after all epochs of this update."),
    "entropies": ("entropy after the update", 0, "How undecided the policy is at this place, in nats."),
    "sampler_logprobs": ("log-prob, sampler", 0, "What the sampler had, where its arithmetic differs."),
}
NUMBERS = {  # of an episode: title
    "scores": "score",
    "raw_scores": "score without penalties",
    "gold_scores": "gold score",
    "stopped": "ends",
    "groups": "group",
    "verifier": "by the verifier (above 0: accepted)",
}
MARKS = ("mask", "value_mask", "scored", "tool")  # tool: tokens that a tool wrote


def settings_of(one_run: OneRun) -> dict[str, Any]:
    return derivation.settings_of(one_run.meta["args"], one_run.meta["script"])


def episodes_of(trace: traces.Trace, kl_coef: float | None) -> list[dict[str, Any]]:
    """Episodes with the numbers of each token that is shown; the first ones with texts, too.

    kl_coef: of the update. Numbers are rounded to eight digits.
    """
    rows = {name: tensor.tolist() for name, tensor in trace.tokens.items()}
    episodes = []
    for i, ids in enumerate(rows["ids"]):
        marks = [rows[name][i] for name in MARKS if name in rows]
        all_count = "mask" not in rows  # chapter 1 has no mask: tokens that are cut away are trained on, too
        places = [k for k in range(len(ids)) if all_count or any(mark[k] for mark in marks)]
        shared = {name: rounded(tensor[i].tolist()) for name, tensor in trace.statistics.items()}
        episode = {
            "places": places,
            "numbers": {name: rounded(tensor[i].item()) for name, tensor in trace.episodes.items()},
            "tokens": {name: rounded([values[i][k] for k in places]) for name, values in rows.items()},
            "epochs": {
                name: rounded([[epoch[k] for k in places] for epoch in tensor[i].tolist()])
                for name, tensor in trace.epochs.items()
            },
            "statistics": {"kl_coef": kl_coef} | shared,
        }
        if i < len(trace.responses):
            episode["query"] = trace.queries[i]
            episode["pieces"] = [trace.responses[i][k] for k in places]
            episode["texts"] = {name: str(texts[i]) for name, texts in trace.texts.items()}
        episodes.append(episode)
    return episodes


def rounded(value: Any, digits: int = 8) -> Any:
    """To so many digits, also in lists; None for what JSON cannot say."""
    if isinstance(value, list):
        return [rounded(one, digits) for one in value]
    if isinstance(value, bool | int | None):
        return None if value is None else int(value)
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def with_groups(episodes: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each episode that has texts, with all episodes of its group."""
    for episode in episodes:
        if "pieces" in episode:
            number = episode["numbers"].get("groups")
            yield episode, [other for other in episodes if other["numbers"].get("groups") == number]


def shown_updates(one_run: OneRun) -> list[dict[str, Any]]:
    """The traces as the page gets them; first, last and every second or fourth ... if all are too much."""
    found = [{"update": update, "episodes": shown_episodes(one_run, update)} for update in one_run.kept()]
    while len(found) > 2 and len(json.dumps(found, separators=(",", ":"))) > TRACE_BYTES:
        found = found[:-1:2] + found[-1:]
    return found


def shown_episodes(one_run: OneRun, update: int) -> list[dict[str, Any]]:
    """The episodes of an update with what the page colours, and with the derivation of every token."""
    settings, found = settings_of(one_run), []
    steps = derivation.steps_of(settings)
    for episode, group in with_groups(one_run.episodes(update)):
        count = len(episode["epochs"].get("new_logprobs", []))
        epochs = [
            derivation.derive(episode, settings, steps, epoch=epoch, group=group) for epoch in range(max(count, 1))
        ]
        lines = derivation.lines_of(episode, steps, epochs[-1])
        tokens = {name: row for name, row in episode["tokens"].items() if name in (*QUANTITIES, *MARKS, "ids")}
        if count:
            pushes = [[of_token.get("push", 0.0) for of_token in epoch] for epoch in epochs]
            tokens = {"push": [*map(statistics.fmean, zip(*pushes, strict=True))]} | tokens
        shown = {name: episode[name] for name in ("query", "places", "pieces", "texts", "numbers")}
        shown["tokens"] = {name: rounded(row, 6) for name, row in tokens.items()}
        if episode["numbers"].get("verifier"):
            shown["luck"] = wrong_calculation("".join(episode["pieces"]))
        found.append(shown | derivation.packed(steps, lines))
    return found


def wrong_calculation(text: str) -> str:
    """The first wrong calculation in a text, such as 3+2=6; empty if there is none."""
    found = re.finditer(r"(?<![\w.*/+-])(\d+) ?([-+*]) ?(\d+) ?= ?(-?\d+)(?![\w*/+-]|[.,]\d)", text)
    calculate = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    wrong = (match for match in found if calculate[match[2]](int(match[1]), int(match[3])) != int(match[4]))
    return next((match[0] for match in wrong), "")


def explained(one_run: OneRun, update: int, number: int, token: int) -> str:
    """The derivation of a token's numbers as text, for the last epoch. number, token: counted from 1."""
    updates = one_run.kept()
    if update not in updates:
        known = ", ".join(map(str, updates)) or "none"
        raise InputError(f"--explain: there is no trace of update {update}; the run left those of {known}")
    episodes = [*with_groups(one_run.episodes(update))]
    if not 1 <= number <= len(episodes):
        raise InputError(f"--explain: episode {number} is not one of 1 to {len(episodes)}")
    episode, group = episodes[number - 1]
    if token - 1 not in episode["places"]:
        numbers = ", ".join(str(place + 1) for place in episode["places"]) or "none"
        raise InputError(f"--explain: token {token} of episode {number} is not known; there are {numbers}")
    t, settings = episode["places"].index(token - 1), settings_of(one_run)
    steps = derivation.steps_of(settings)
    numbers = derivation.derive(episode, settings, steps, group=group)
    lines = derivation.lines_of(episode, steps, numbers)[t]
    found = [f"update {update}, episode {number}, token {token}: {json.dumps(episode['pieces'][t])}, last epoch"]
    for line in lines:
        if line.result == "?":
            continue
        filled = line.result if line.is_read else f"{line.filled} = {line.result}"
        verdict = f"   WRONG: recorded {derivation.written(line.recorded)}" if line.wrong else ""
        found.append(f"\n{line.step.title}: {line.step.formula}\n    {filled}{verdict}\n    {line.step.sentence}")
        found.append(f"    {line.step.place}")
    missing = dict.fromkeys(line.step.title for line in lines if line.result == "?")
    return "\n".join([*found, *([f"\nnot known: {', '.join(missing)}"] if missing else [])])


def scales(shown: list[dict[str, Any]]) -> dict[str, list[float]]:
    """For each quantity the lowest and highest number with full colour: 98 of 100 tokens are not farther off.

    Both are as far from the number without colour, but for a side on which there are no numbers.
    """
    found: dict[str, list[float]] = {}
    episodes = [episode["tokens"] for update in shown for episode in update["episodes"]]
    for name, (_, middle, _) in QUANTITIES.items():
        numbers = [x - middle for tokens in episodes for x in tokens.get(name, []) if x is not None]
        if numbers:
            most = sorted(map(abs, numbers))[int(0.98 * (len(numbers) - 1))]
            found[name] = [middle - most * (min(numbers) < 0), middle + most * (max(numbers) > 0)]
    return found


# ---- Learning curves -------------------------------------------------------------------------------------------


def draw_panels(one_run: OneRun) -> list[dict[str, Any]]:
    """The panels of metrics.toml that the run has metrics for, each with what charts.js draws."""
    args = one_run.meta["args"]
    target = args.get("rewards", {}).get("adaptive_kl", {}).get("target")
    panels = []
    for panel, lines in learning_curves.panels_of(one_run.metrics, learning_curves.own_metrics([args])):
        curves = []
        for name, label, color in lines:
            x, values = one_run.steps, one_run.metrics[name]
            if name.startswith("eval/") and "reference" not in name:
                x, values = evaluated(x, values, one_run.meta.get("results", {}).get(name))
            curves.append({"name": label, "metric": name, "x": x, "y": rounded(values), "color": color})
        targets = [target] if target and "objective/kl" in panel["metrics"] else []
        figure = {"data": curves, "targets": targets}
        panels.append(panel | {"figure": figure})
    return panels


def evaluated(steps: list[int], values: list[float], final: float | None) -> tuple[list[int], list[float]]:
    """Only the evaluations, as steps and values: rows between two of them repeat the first. final: after training."""
    new = [k for k in range(len(steps)) if k == 0 or values[k] != values[k - 1]]
    last = [] if final is None else [(steps[-1] + 1, final)]
    found = [*((steps[k], values[k]) for k in new), *last]
    return [step for step, _ in found], [value for _, value in found]
