"""Look inside a run: writes report.html, one file that any browser opens, without a network.

It opens with what training changed: the scores before and after, and an answer before and after. If the run was
started with --trace_interval, a few episodes follow token by token, and each number of the chosen token is derived
from what the models said. Then come all learning curves with notes on how to read them, and what was run.

    python ppo_rlhf/report.py                                     # the newest run below runs/
    python ppo_rlhf/report.py --run runs/<run>                    # of any script and chapter, finished or not
    python ppo_rlhf/report.py --run runs/<run> --with runs/<run>  # two runs, side by side
    python ppo_rlhf/report.py --explain 20 1 5                    # where the numbers of one token come from, as text
"""

import functools
import itertools
import json
import math
import re
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from jinja2 import Environment, FileSystemLoader

from ppo_rlhf.lib.base import errors, files
from ppo_rlhf.lib.base.errors import InputError
from ppo_rlhf.lib.services import cli, derivation, plots, run, traces


@dataclass(frozen=True, kw_only=True)
class Args:
    run: str = ""
    """folder of a run; empty: the newest below runs/"""
    other: Annotated[str, tyro.conf.arg(name="with")] = ""
    """folder of another run, to compare it with; empty: none"""
    out: str = ""
    """file to write; empty: report.html in the run's folder, or report_with_<other run>.html"""
    explain: tuple[int, ...] = ()
    """<update> <episode> <token>: print where the numbers of that token come from, and write no page. The update must
    be one that was traced; episodes and tokens are counted from 1, as on the page"""


def report(args: Args) -> Path:
    """Write the page and return its path. An InputError if a folder is not that of a run."""
    folder = Path(args.run) if args.run else newest_run(Path("runs"))
    if args.explain:
        print(explained(read_run(folder), args.explain), flush=True)
        return folder
    folders = [folder, *([Path(args.other)] if args.other else [])]
    name = "_with_".join(["report", *(folder.resolve().name for folder in folders[1:])]) + ".html"
    path = Path(args.out) if args.out else folders[0] / name
    if path.is_dir():
        raise InputError(f"--out {path} is a folder; name a file in it, such as {path / 'report.html'}")
    if args.out and not path.parent.is_dir():
        raise InputError(f"--out {path}: there is no folder {path.parent}; name a file in a folder that exists")
    runs = [read_run(folder) for folder in folders]
    traced = [one_run.traced(TRACE_BYTES // len(runs)) for one_run in runs]
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    # In the order that they have here, since they are not told to be sorted.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    panels = draw_panels(runs)
    first = sorted(range(len(panels)), key=lambda i: (*FIRST, panels[i][0]["title"]).index(panels[i][0]["title"]))[:2]
    text = environment.get_template("report.html").render(
        runs=runs,
        title=title_of(runs),
        outcomes=outcomes(runs),
        examples=[example(one_run, of_run) for one_run, of_run in zip(runs, traced, strict=True)],
        first=first,
        tables=tables_of(runs),
        panels=panels,
        most_points=MOST_POINTS,
        thinned=any(len(one_run.steps) > MOST_POINTS for one_run in runs),
        data={
            "figures": [figure for _, figure in panels],
            "name": path.stem,
            "runs": [one_run.data(of_run) for one_run, of_run in zip(runs, traced, strict=True)],
            "quantities": QUANTITIES,
            "numbers": NUMBERS,
        },
        every=[one_run.every(one_trace) for one_run, one_trace in zip(runs, traced, strict=True)],
        held_out=held_out_texts(runs),
        script="".join((Path(__file__).parent / name).read_text("utf-8") for name in SCRIPTS),
    )
    files.replace_file(path, text.encode(errors="replace").decode())  # half a character has no place in a file
    print(f"report  {path}")
    return path


SCRIPTS = ("lib/services/derivation.js", "lib/services/charts.js", "report.js")


def title_of(runs: list["OneRun"]) -> str:
    titles = dict.fromkeys(one_run.title for one_run in runs)
    return " with ".join(titles) + ": two runs" * (len(titles) < len(runs))


def newest_run(runs: Path) -> Path:
    """The run that was written to last."""
    metas = sorted(runs.glob("*/meta.json"), key=lambda path: path.stat().st_mtime)
    if not metas:
        raise InputError(f"there is no run below {runs}; name one with --run")
    return metas[-1].parent


# ---- What a run left -------------------------------------------------------------------------------------------

TRACE_BYTES = 1_600_000  # of traces on a page; beyond, updates are left out
MOST_POINTS = 2_000  # of a curve; beyond, rows are left out, but none that is a spike
KINDS = {  # by script: what is trained, and the chapter
    "train_reward": ("A reward model for {}", 1),
    "train_policy": ("PPO on {}, against a reward model", 1),
    "tldr_sft": ("Fine-tuning on reference summaries of {}", 2),
    "tldr_reward": ("A reward model for summaries of {}", 2),
    "tldr_policy": ("PPO on summaries of {}, against a reward model", 2),
    "rlvr_policy": ("PPO on {}, with verifiable rewards", 3),
    "rlvr_async": ("Asynchronous PPO on {}, with verifiable rewards", 3),
    "rlvr_tools": ("PPO on {}, with verifiable rewards and a tool", 3),
}


@dataclass(frozen=True, kw_only=True)
class OneRun:
    folder: Path
    meta: dict[str, Any]
    steps: list[int] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)  # of the steps

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def title(self) -> str:
        """What was trained on which texts, in words."""
        kind, _ = KINDS[self.meta["script"]]
        task = self.meta["args"].get("task", {})
        texts = (task.get(name) for name in ("query_dataset", "posts", "problems"))
        texts = str(next(filter(None, [*texts, self.meta["args"].get("preset")]), "texts"))
        estimator = self.meta["args"].get("ppo", {}).get("advantage", "gae")
        kind = kind if estimator == "gae" else kind.replace("PPO", estimator)
        return errors.visible(kind.format(Path(texts).name or texts))

    @property
    def story(self) -> str:
        """Size, time and models of the run, as sentences."""
        meta, args, sizes = self.meta, files.flatten(self.meta["args"]), self.meta.get("sizes", {})
        took = f"{meta.get('wall_time', 0) / 60:.1f} minutes on {meta.get('device') or 'an unknown device'}"
        size = (
            "{updates:,} updates of {batch:,} episodes, ".format(**sizes) if {"updates", "batch"} <= {*sizes} else ""
        )
        found = [f"Chapter {KINDS[meta['script']][1]}: {size}{took}."]
        if start := str(args.get("base_model") or ""):
            model = f"the language model {'/'.join(Path(start).parts[-2:])}"
            if start.startswith("models/"):
                model = "the fine-tuned model" if start.startswith("models/tldr_sft") else "the model of another run"
            found.append(f"Training started from {model}.")
        scorers = ["a reward model"] * bool(args.get("rewards.trained_model"))
        scorers += [str(args[name]) for name in ("rewards.function", "rewards.verifier") if args.get(name)]
        if scorers:
            found.append(f"Responses were scored by {' and '.join(scorers)}.")
        if not meta.get("finished"):
            found.append(f"The run is not finished: {len(self.steps):,} steps are logged.")
        return errors.visible(" ".join(found))

    @property
    def facts(self) -> dict[str, Any]:
        """How and with what it was run."""
        meta = self.meta
        facts = {"run": self.name, "script": f"{meta['script']}.py (chapter {KINDS[meta['script']][1]})"}
        facts["state"] = "finished" if meta.get("finished") else f"not finished: {len(self.steps):,} steps are logged"
        facts["time"] = f"{meta.get('wall_time', 0) / 60:.1f} minutes"
        if "peak_mib" in meta:  # old runs have none
            facts["memory"] = f"at most {meta['peak_mib']:,} MiB"
        for name in ("device", "num_processes", "threads", "commit"):
            facts[name.replace("num_", "")] = meta.get(name) or "unknown"
        return facts

    def kept(self) -> list[list[tuple[int, bool]]]:
        """The names of its traces, update by update. Those of an update that metrics.csv lacks are left out."""
        logged = set(self.steps)
        found = itertools.groupby(traces.kept(self.folder), lambda name: name[0])
        return [list(names) for update, names in found if update in logged]

    def traced(self, most_bytes: int) -> list[dict[str, Any]]:
        """Its traces as the page gets them; first, last and every second or fourth ... if all are too much."""
        found = [self.traced_update(kept) for kept in self.kept()]
        while len(found) > 2 and len(json.dumps(found, separators=(",", ":"))) > most_bytes:
            found = found[:-1:2] + found[-1:]
        return found

    def data(self, traced: list[dict[str, Any]]) -> dict[str, Any]:
        """The data of the run that the page's script needs."""
        found = {"name": self.name, "traces": traced, "scales": scales(traced)}
        if not traced:
            return found
        settings = derivation.settings_of(self.meta["args"], self.meta["script"])
        steps = [
            vars(step) | place_of(step.where[min(settings["chapter"], len(step.where)) - 1], self.meta.get("commit"))
            for step in derivation.steps(settings)
        ]
        settings = {name: rounded(x) if isinstance(x, float) else x for name, x in settings.items()}
        return found | {"settings": settings, "steps": steps}

    def traced_update(self, kept: list[tuple[int, bool]]) -> dict[str, Any]:
        """An update of the token view, from its traces: names that `traces.kept` gives."""
        episodes, coefficients = [], dict(zip(self.steps, self.metrics.get("objective/kl_coef", []), strict=False))
        for update, again in kept:
            trace = traces.read(self.folder, update, again)
            try:
                episodes += traced_episodes(trace, None if again else coefficients.get(update))
            except (LookupError, TypeError, AttributeError) as error:
                path = traces.path_of(self.folder, update, again)
                raise InputError(f"{path} is damaged: its numbers do not fit its texts; remove it") from error
        add_push(episodes, derivation.settings_of(self.meta["args"], self.meta["script"]))
        return {"update": kept[0][0], "episodes": episodes}

    def every(self, shown: list[dict[str, Any]]) -> str:
        """The content of the token view, as a sentence."""
        kept = len(self.kept())
        if "ppo" not in self.meta["args"]:
            return "Only PPO leaves traces."
        if not kept and traces.kept(self.folder):
            return "The traces are of updates that metrics.csv has no row of."
        if not kept:
            return "The run left no traces: it was started without --trace_interval."
        left_out = f" {kept - len(shown)} more were kept, but would make the page too large." * (kept > len(shown))
        watched = sum(episode["again"] for episode in shown[0]["episodes"])
        of_batch = f"For {len(shown)} updates you can see {len(shown[0]['episodes']) - watched} episodes that were "
        again = f"trained on, and the policy's answers to {watched} fixed queries, which were not."
        return of_batch + (again if watched else "trained on.") + left_out


def read_run(folder: Path) -> OneRun:
    """The content of the folder of a run, finished or not."""
    meta, path = run.read_meta(folder), folder / "metrics.csv"
    check_meta(folder / "meta.json", meta)
    with errors.input_errors(f"{path} is damaged", ValueError, TypeError, KeyError, OSError):
        header, *rows = (run.read_records(path) if path.exists() else []) or [[]]
        columns = [[*map(float, column)] for column in zip(*rows, strict=True)]
        metrics = dict(zip(header, columns, strict=True)) if rows else {}
        metrics = {name: metrics[name] for name in plots.without_groups_of_one(metrics, meta["args"])}
        return OneRun(
            folder=folder, meta=meta, steps=[int(step) for step in metrics.pop("step", [])], metrics=metrics
        )


def check_meta(path: Path, meta: dict[str, Any]) -> None:
    """Raise an InputError if something that the page uses is not there or has a type that no run writes."""
    if meta.get("script") not in KINDS:
        raise InputError(f"{path} names no training script; an older version of this package made the run")
    values = files.flatten(meta)  # a part that is a dictionary is not in it, its values are
    parts = ("args.ppo", "args.rewards", "args.rewards.adaptive_kl", "args.task", "sizes", "versions")
    kinds = dict.fromkeys(parts, dict) | {name: int for name in values if name.startswith("sizes.")}
    kinds |= {"args.rewards.monitor": str, "args.rewards.verifier": str}
    kinds |= {"args.rewards.adaptive_kl.target": float | None}
    if broken := [name for name in kinds if name in values and not files.fits(values[name], kinds[name])]:
        raise InputError(f"{path} was damaged: {broken[0]} is {values[broken[0]]!r}")


def tables_of(runs: list[OneRun]) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """What was run, as tables: for each title rows (name, a value of each run as text)."""
    columns = {
        "Run": [one_run.facts for one_run in runs],
        "Results": [one_run.meta.get("results", {}) for one_run in runs],
        "Arguments": [files.flatten(one_run.meta["args"]) for one_run in runs],
        "Sizes": [one_run.meta.get("sizes", {}) for one_run in runs],
        "Versions": [one_run.meta.get("versions", {}) for one_run in runs],
    }
    names = {title: dict.fromkeys(name for one in of_runs for name in one) for title, of_runs in columns.items()}
    return [
        (title, [(name, [as_text(one.get(name, "")) for one in columns[title]]) for name in names[title]])
        for title in columns
        if names[title]
    ]


def as_text(value: Any) -> str:
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.6g}"
    return f"{value:,}" if type(value) is int else errors.visible(str(value))


# ---- What happened ---------------------------------------------------------------------------------------------

FIRST = ("Score", "Held-out queries", "KL from the reference (nats per response)", "Loss", "Accuracy")  # panels
LAST = 10  # updates, whose mean is what a run has reached


def outcomes(runs: list[OneRun]) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """The numbers to look at first: title, meaning, and for each run the number before and after."""
    found = []
    for title, meaning, names in outcomes_of(runs):
        before_and_after = []
        for one_run in runs:
            name = next((name for name in names if name in one_run.metrics), "")
            known = [x for x in one_run.metrics.get(name, []) if math.isfinite(x)]
            if not known:
                before_and_after.append(("–", "–"))
                continue
            after = known[-1] if name.startswith("eval/") else statistics.fmean(known[-LAST:])
            after = one_run.meta.get("results", {}).get(name, after)
            before_and_after.append((f"{known[0]:.2f}".replace("-0.00", "0.00"), f"{after:.2f}"))
        if not set(before_and_after) <= {("–", "–"), ("0.00", "0.00")}:
            found.append((title, meaning, before_and_after))
    return found


def outcomes_of(runs: list[OneRun]) -> list[tuple[str, str, list[str]]]:
    """Title, meaning, and metrics of which the first that a run has is taken."""
    own = plots.own_metrics([one_run.meta["args"] for one_run in runs])
    trust = "what counts: nothing is trained on it"
    on_held_out = any("eval/gold_scores" in one_run.metrics for one_run in runs)
    monitors = [] if on_held_out else own["Score"]  # the same on the batch
    return [
        ("Score", "what training raises", ["objective/scores"]),
        ("Held-out accuracy", "share of problems that no update saw", own["Held-out queries"]),
        ("Held-out gold score", trust, ["eval/gold_scores"]),
        *(
            (name.partition("/")[2].replace("_", " ").removesuffix("s").capitalize(), trust, [name])
            for name in monitors
        ),
        ("KL", "nats per response, from the reference", ["objective/kl"]),
        (
            "Responses that end",
            "share of the batch",
            ["objective/stopped", "objective/eos_rate", "val/stop_token_rate"],
        ),
        ("Loss", "over the training texts", ["train/loss", "train/rm/loss", "train/sft/loss"]),
        ("Accuracy", "share of comparisons", ["train/accuracy", "train/rm/accuracy"]),
    ]


# Names in a row of held-out answers: text and score before training, then after.
BEFORE_AND_AFTER = (
    ("base", "base score", "policy", "policy score"),
    ("response before PPO", "scores before PPO", "response", "scores"),
)


def example(one_run: OneRun, traced: list[dict[str, Any]]) -> dict[str, Any] | None:
    """A query, its answer and score before and after, and a sentence on how many others did better or worse.

    If the run kept no answers before training, those of the first and the last traced update are taken.
    """
    rows = [
        {"query": query, "before": row[a], "after": row[c], "scores": (row[b], row[d])}
        for query, row in answers_of(one_run).items()
        for a, b, c, d in BEFORE_AND_AFTER
        if {a, b, c, d} <= row.keys()
    ]
    where, kind = ("before training", "after training"), "held-out queries"
    if not rows and len(traced) > 1:
        where, kind = tuple(f"after update {traced[k]['update']}" for k in (0, -1)), "fixed queries"
        both = ([episode for episode in traced[k]["episodes"] if episode["again"]] for k in (0, -1))
        rows = [
            {"query": one["query"], "before": shown_text(one), "after": shown_text(other)}
            | {"scores": (one["numbers"].get("scores"), other["numbers"].get("scores"))}
            for one, other in zip(*both, strict=False)
            if one["query"] == other["query"]
        ]
    changes = [(row["scores"][1] - row["scores"][0], row) for row in rows if None not in row["scores"]]
    changed = sorted((change for change in changes if change[0]), key=lambda change: change[0])
    if not changed:
        return None
    better = sum(change > 0 for change, _ in changed)
    note = f"Score higher than before: {better} of {len(rows)} {kind}; lower: {len(changed) - better}. "
    note += "Shown here: the median of those that changed."
    median = changed[len(changed) // 2][1].items()
    row = {name: errors.visible(x).strip() if isinstance(x, str) else x for name, x in median}
    return row | {"where": where, "note": note, "scores": [f"{score:.2f}" for score in row["scores"]]}


def shown_text(episode: dict[str, Any]) -> str:
    """A response without what was cut away."""
    counts = episode["tokens"].get("scored") or episode["tokens"].get("mask") or [1] * len(episode["pieces"])
    text = "".join(piece for piece, count in zip(episode["pieces"], counts, strict=True) if count)
    return re.sub(r"<[|/]?\w+\|?>$", "", text)  # the stop token


# ---- Traces ----------------------------------------------------------------------------------------------------

# name: title, unit, the number without colour, and how to read it
QUANTITIES = {
    "push": (
        "pushed up or down",
        "",
        0,
        "Minus the gradient of the policy loss by the token's log-prob, averaged over the epochs. Above 0, the loss "
        "made the token likelier, below 0 less likely.",
    ),
    "advantages": ("advantage", "", 0, "How much better than expected. Above 0, the token becomes likelier."),
    "kl": ("KL", "nats", 0, "Log-prob under the policy minus log-prob under the reference."),
    "logprobs": (
        "log-prob, policy",
        "nats",
        0,
        "How likely the sampling policy thought the token. Far below 0: a surprise.",
    ),
    "ref_logprobs": ("log-prob, reference", "nats", 0, "Of the model that training started from."),
    "rewards": ("reward", "", 0, "The KL penalty of each token; the score is on the last, or on the step after it."),
    "values": ("value", "", 0, "What the critic expects from here on, before it learned from this episode."),
    "returns": ("return", "", 0, "What the critic should have said."),
    "ratio": ("ratio after the update", "", 1, "How many times likelier the update made the token."),
    "clipped": (
        "clipped",
        "",
        0,
        "1 where the ratio left its range in the direction that pays: no gradient any more.",
    ),
    "new_logprobs": ("log-prob after the update", "nats", 0, "Of the policy after all epochs of this update."),
    "new_values": ("value after the update", "", 0, "What the critic says after all epochs of this update."),
    "entropies": ("entropy after the update", "nats", 0, "How undecided the policy is at this place."),
    "sampler_logprobs": ("log-prob, sampler", "nats", 0, "What the sampler had, where its arithmetic differs."),
}
NUMBERS = {  # of an episode: title
    "scores": "score",
    "raw_scores": "score without penalties",
    "gold_scores": "gold score",
    "stopped": "ends",
    "groups": "group",
    "verifier": "by the verifier (above 0: correct)",
}
UNTRAINED = ("advantages", "returns")  # what an episode that is not trained on has not, even if its trace does
MARKS = ("mask", "value_mask", "scored", "tool")  # tool: tokens that a tool wrote


def traced_episodes(trace: traces.Trace, kl_coef: float | None) -> list[dict[str, Any]]:
    """Episodes with their texts, their numbers, and the text and numbers of each token that is shown.

    kl_coef: of the update. Numbers are rounded to eight digits.
    """
    rows = {name: tensor.tolist() for name, tensor in trace.tokens.items()}
    numbers = {name: tensor.tolist() for name, tensor in trace.episodes.items()}
    episodes = []
    for i, pieces in enumerate(trace.responses):
        marks = [rows[name][i] for name in MARKS if name in rows] or [[True] * len(pieces)]
        all_count = "mask" not in rows  # chapter 1 has no mask: tokens that are cut away are trained on, too
        places = [k for k in range(len(pieces)) if all_count or any(mark[k] for mark in marks)]
        episode = {"query": errors.visible(trace.queries[i]), "places": places, "again": trace.again}
        episode["pieces"] = [errors.visible(pieces[k]) for k in places]
        episode["texts"] = {name: errors.visible(str(values[i])) for name, values in trace.texts.items()}
        episode["numbers"] = {name: rounded(values[i]) for name, values in numbers.items()}
        episode["tokens"] = {
            name: [rounded(values[i][k]) for k in places]
            for name, values in rows.items()
            if name in QUANTITIES or name in MARKS or name in ("ids", "exact_kl", "weights")
            if not (trace.again and name in UNTRAINED)
        }
        if trace.epochs:
            episode["epochs"] = {
                name: [[rounded(epoch[k]) for k in places] for epoch in tensor[i].tolist()]
                for name, tensor in trace.epochs.items()
            }
        episode["statistics"] = {"kl_coef": kl_coef} | {
            name: [rounded(one) for one in x] if isinstance(x := tensor[i].tolist(), list) else rounded(x)
            for name, tensor in trace.statistics.items()
        }
        episodes.append(episode)
    return episodes


def add_push(episodes: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    """Add to each episode that was trained on how far each token's log-prob was pushed up or down."""
    for episode in episodes:
        epochs = range(len(episode.get("epochs", {}).get("new_logprobs", [])))
        group = group_of(episode, episodes)
        found = [derivation.derive(episode, settings, epoch, group) for epoch in epochs]
        if not found:
            continue
        rows = zip(*([one[name] for one in found] for name in ("gradient", "weights", "is_kept")), strict=True)
        pushes = [[-g * w * kept for g, w, kept in zip(*row, strict=True)] for row in rows]
        means = [float(f"{statistics.fmean(of_token):.5g}") for of_token in zip(*pushes, strict=True)]
        episode["tokens"]["push"] = [
            x if learns else None for x, learns in zip(means, found[0]["learns"], strict=True)
        ]


def rounded(value: float) -> float | int | None:
    """To eight digits; None for what JSON cannot say."""
    if isinstance(value, bool | int):
        return int(value)
    return float(f"{value:.8g}") if math.isfinite(value) else None


def explained(one_run: OneRun, place: tuple[int, ...]) -> str:
    """The derivation of a token's numbers as text, for the last epoch. place: update, episode, token."""
    if len(place) != 3:
        raise InputError("--explain takes three numbers, such as --explain 0 1 5: update, episode and token")
    updates = {names[0][0]: names for names in one_run.kept()}
    if place[0] not in updates:
        known = ", ".join(map(str, updates)) or "none"
        raise InputError(f"--explain: there is no trace of update {place[0]}; the run left those of {known}")
    episodes = one_run.traced_update(updates[place[0]])["episodes"]
    if not 1 <= place[1] <= len(episodes):
        raise InputError(f"--explain: episode {place[1]} is not one of 1 to {len(episodes)}")
    episode = episodes[place[1] - 1]
    numbers = [where + 1 for where in episode["places"]]
    if not numbers:
        raise InputError(f"--explain: episode {place[1]} has no token that counts")
    if place[2] not in numbers:
        raise InputError(f"--explain: token {place[2]} is not one of {numbers[0]} to {numbers[-1]}")
    t, settings = numbers.index(place[2]), derivation.settings_of(one_run.meta["args"], one_run.meta["script"])
    epochs = max(1, len(episode.get("epochs", {}).get("new_logprobs", [])))
    ((lines, missing),) = derivation.explain(episode, settings, epochs - 1, [t], group_of(episode, episodes))
    heads = f"update {place[0]}, episode {place[1]}, token {place[2]}: {json.dumps(episode['pieces'][t])}"
    explained = [f"{heads}, epoch {epochs} of {epochs}"]
    for line in lines:
        where = line.step.where[min(settings["chapter"], len(line.step.where)) - 1]
        filled = f"{line.numbers} = {line.result}" if re.search("[^{}\\w]", line.step.numbers) else line.result
        verdict = f"   WRONG by {line.difference:.3g}" if line.wrong else ""
        explained.append(f"\n{line.step.title}: {line.step.formula}\n    {filled}{verdict}\n    {line.step.sentence}")
        explained.append(f"    {place_of(where, one_run.meta.get('commit'))['place']}")
    return "\n".join([*explained, *([f"\nnot known: {', '.join(missing)}"] if missing else [])])


git = functools.cache(run.git)


def group_of(episode: dict[str, Any], episodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The episodes of the same group, this one too."""
    groups = [(other["again"], other["numbers"].get("groups")) for other in episodes]
    mine = episode["again"], episode["numbers"].get("groups")
    return [other for other, key in zip(episodes, groups, strict=True) if key == mine]


def place_of(where: str, commit: str | None) -> dict[str, str]:
    """Where a step is computed, as text and, if the checkout knows its home on the web, as a link.

    where: file, function and mark. commit: of the run; the lines are those of that commit.
    """
    file, function, mark = where.split()
    path, commit = f"ppo_rlhf/{file}", (commit or "").removesuffix("-dirty")
    source = git("show", f"{commit}:{path}") if commit else ""
    source = source or (Path(__file__).parent / file).read_text("utf-8")
    line = next((f"#L{n}" for n, text in enumerate(source.split("\n"), 1) if f"def {function}(" in text), "")
    text, home = f"{path}{line} {function} [{mark}]", git("config", "--get", "remote.origin.url")
    found = re.fullmatch(r"(?:https://|git@)([\w.-]+)[:/](.+?)(?:\.git)?", home)
    if not found or not commit:
        return {"place": text, "href": ""}
    return {"place": text, "href": f"https://{found[1]}/{found[2]}/blob/{commit}/{path}{line}"}


def scales(traced: list[dict[str, Any]]) -> dict[str, list[float]]:
    """For each quantity the lowest and highest number with full colour: 98 of 100 tokens are not farther off.

    Both are as far from the number without colour, but for a side on which there are no numbers.
    """
    found: dict[str, list[float]] = {}
    episodes = [episode["tokens"] for update in traced for episode in update["episodes"]]
    for name, (_, _, middle, _) in QUANTITIES.items():
        numbers = [x - middle for tokens in episodes for x in tokens.get(name, []) if x is not None]
        if numbers:
            most = sorted(map(abs, numbers))[int(0.98 * (len(numbers) - 1))]
            found[name] = [middle - most * (min(numbers) < 0), middle + most * (max(numbers) > 0)]
    return found


# ---- Texts of held-out queries ---------------------------------------------------------------------------------

HELD_OUT = 20


def label_of(name: str) -> str:
    """A name of a row in words: those of comparison.jsonl say base and policy."""
    model, _, number = name.partition(" ")
    when = {"base": "before training", "policy": "after training"}.get(model)
    return f"{number or 'response'} {when}" if when else {"kl": "KL"}.get(name, name.replace("_", " "))


def held_out_texts(runs: list[OneRun]) -> list[tuple[dict[str, str], dict[str, str]]]:
    """Texts and numbers of the first held-out queries after the training; those first that all runs have.

    A value that two runs share is listed once, and all others with the number of their run.
    """
    answers = [answers_of(one_run) for one_run in runs]
    queries = dict.fromkeys(query for of_run in answers for query in of_run)
    found: list[tuple[dict[str, str], dict[str, str]]] = []
    for query in sorted(queries, key=lambda query: sum(query not in of_run for of_run in answers))[:HELD_OUT]:
        found.append(({}, {}))
        rows = [of_run.get(query, {}) for of_run in answers]
        for name in dict.fromkeys(name for row in rows for name in row):
            values = {i: row[name] for i, row in enumerate(rows, 1) if row.get(name) is not None}
            alike = len(values) == len(runs) and all(value == row[name] for row in rows for value in values.values())
            alike = alike or name in ("query", "prompt")
            for i, value in list(values.items())[: 1 if alike else None]:
                label = label_of(name) + f", run {i}" * (not alike)
                shown = f"{value:.4g}" if isinstance(value, float) else as_text(value)
                found[-1][not isinstance(value, str)][errors.visible(label)] = shown
    return found


def answers_of(one_run: OneRun) -> dict[str, dict[str, Any]]:
    """Held-out queries with what the policy answers; in chapter 2 also what the fine-tuned model did before PPO."""
    files_of_a_chapter = (one_run.folder / name for name in ("evaluation.jsonl", "comparison.jsonl"))
    answers = next((rows for path in files_of_a_chapter if (rows := read_lines(path))), {})
    for query, row in read_lines(one_run.folder / "evaluation_before.jsonl").items():
        query_side = {name: value for name, value in row.items() if name == "query" or name.startswith("reference")}
        before = {f"{name} before PPO": value for name, value in row.items() if name not in query_side}
        answers[query] = query_side | before | answers.get(query, {})
    return answers


def read_lines(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of a file of JSON lines by their query, in chapter 3 their prompt; none if there is no such file."""
    damaged = f"{path} is damaged"
    with errors.input_errors(damaged, ValueError, RecursionError, AttributeError, KeyError, OSError):
        lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
        rows = [json.loads(line) for line in lines if line]
        return {str(row.get("query") or row["prompt"]): row for row in rows}


# ---- Learning curves -------------------------------------------------------------------------------------------

BLUE, ORANGE, *OTHERS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#888888"]


def full_names(cell: str) -> list[str]:
    """Names in full of a cell of metrics.toml, `loss/policy; value`: a folder holds for the names after it."""
    names: list[str] = []
    for name in cell.split("; "):
        folder = names[-1].rpartition("/")[0] if names and "/" not in name else ""
        names.append(f"{folder}/{name}" if folder else name)
    return names


def meanings(names: list[str], chapter: int) -> list[tuple[str, str]]:
    """What metrics mean in a chapter: rows of metrics.toml that have one of these names, or a pattern of one.

    A row is whole, since its sentence goes through all of its names. A pattern has parts such as <name>; of several
    patterns, the one that is most exact counts.
    """
    (rows,) = (table["rows"] for table in plots.METRICS["meanings"] if table["chapter"] == chapter)
    row_of = {name: k for k, (cell, _) in enumerate(rows) for name in full_names(cell)}
    patterns = [name for name in row_of if name.count("<") == 1]
    patterns.sort(key=lambda name: -len(re.sub("<.*?>", "", name)))
    wanted = set()
    for name in names:
        fits = (pattern for pattern in patterns if re.fullmatch(re.sub("<.*?>", ".+", pattern), name))
        wanted.add(row_of.get(name, row_of.get(next(fits, ""))))
    return [(cell, meaning.replace("`", "")) for k, (cell, meaning) in enumerate(rows) if k in wanted]


def draw_panels(runs: list[OneRun]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The panels of metrics.toml that the runs have metrics for, each with what lib/services/charts.js draws."""
    known = list(dict.fromkeys(name for one_run in runs for name in one_run.metrics))
    args = [one_run.meta["args"] for one_run in runs]
    wanted = (of_run.get("rewards", {}).get("adaptive_kl", {}).get("target") for of_run in args)
    targets = sorted({target for target in wanted if target and math.isfinite(target)})
    own = plots.own_metrics(args)
    drawn = []
    for panel, names in plots.panels_of(known, own):
        # As in all pictures, the judge is blue and what is trained on is orange.
        judges = own.get(panel["title"], [])
        judged = [name for name in names if "reference" not in name and ("gold" in name or name in judges)]
        has_blue = judged or len(names) == 1 or panel["title"] != "Score"
        colors = [BLUE, ORANGE, *OTHERS] if has_blue else [ORANGE, *OTHERS]
        color_of = dict(zip([*judged, *(name for name in names if name not in judged)], itertools.cycle(colors)))
        curves = []
        for number, one_run in enumerate(runs):
            of_run = [name for name in names if name in one_run.metrics]
            rows = rows_to_draw([one_run.metrics[name] for name in of_run])
            for name in of_run:
                label = name if len(runs) == 1 else f"{name}, run {number + 1}"
                x, values = ([column[row] for row in rows] for column in (one_run.steps, one_run.metrics[name]))
                if name.startswith("eval/") and "reference" not in name:
                    x, values = evaluated(x, values, one_run.meta.get("results", {}).get(name))
                y = [value if math.isfinite(value) else None for value in values]
                curves.append({"name": label, "x": x, "y": y, "color": color_of[name], "dotted": number == 1})
        targets_here = targets if panel["metrics"] == ["objective/kl"] else []
        panel = panel | {"meanings": meanings(names, KINDS[runs[0].meta["script"]][1])}
        drawn.append((panel, {"data": joined(curves), "targets": targets_here}))
    return drawn


def joined(curves: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Curves with the same points, unless they are flat, are one with the names of all: only one would be seen."""
    kept: list[dict[str, Any]] = []
    for curve in curves:
        same = [one for one in kept if all(one[key] == curve[key] for key in ("x", "y", "dotted"))]
        if same and len(set(curve["y"])) > 1:
            same[0]["name"] += f" = {curve['name']}"
        else:
            kept.append(curve)
    return kept


def evaluated(steps: list[int], values: list[float], final: float | None) -> tuple[list[int], list[float]]:
    """Only the evaluations, as steps and values: rows between two of them repeat the first. final: after training."""
    new = [k for k in range(len(steps)) if k == 0 or values[k] != values[k - 1]]
    last = [] if final is None else [(steps[-1] + 1, final)]
    found = [*((steps[k], values[k]) for k in new), *last]
    return [step for step, _ in found], [value for _, value in found]


def rows_to_draw(curves: list[list[float]]) -> list[int]:
    """Which rows of curves with the same steps are drawn: all of them, or of more than MOST_POINTS the telling ones.

    The rows are divided into stretches of equal length. In each stretch, the lowest and the highest value of every
    curve are kept, and the first one that is not finite. So a spike of a single update is always drawn.
    """
    count = len(curves[0]) if curves else 0
    if count <= MOST_POINTS:
        return list(range(count))
    stretches = MOST_POINTS // (2 * len(curves))
    kept = {0, count - 1}
    for k in range(stretches):
        stretch = range(count * k // stretches, count * (k + 1) // stretches)
        for curve in curves:
            finite = [row for row in stretch if math.isfinite(curve[row])]
            kept |= {extreme(finite, key=curve.__getitem__) for extreme in (min, max) if finite}
            kept |= set([row for row in stretch if not math.isfinite(curve[row])][:1])
    return sorted(kept)


if __name__ == "__main__":
    cli.run_script(report, lambda argv: cli.parse(Args, argv, description=__doc__))
