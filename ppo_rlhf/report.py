"""Look inside a run: writes report.html, one file that any browser opens, without a network.

It shows what was run; the learning curves, and how to read each; and, if the run was started with --trace_interval, a
few episodes of its updates token by token: log-probs, KL penalty, reward, value, advantage, ratio. A click on a token
shows where each of these numbers comes from.

    python ppo_rlhf/report.py                                     # the newest run below runs/
    python ppo_rlhf/report.py --run runs/<run>                    # of any script and chapter, finished or not
    python ppo_rlhf/report.py --run runs/<run> --with runs/<run>  # two runs: curves and episodes side by side
    python ppo_rlhf/report.py --explain 20 1 5                    # where the numbers of one token come from, as text
"""

import functools
import itertools
import json
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from jinja2 import Environment, FileSystemLoader

from ppo_rlhf.lib import cli, derivation, errors, files, run, traces
from ppo_rlhf.lib.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Args:
    run: str = ""
    """folder of a run; empty: the newest below runs/"""
    other: Annotated[str, tyro.conf.arg(name="with")] = ""
    """folder of another run, to compare it with; empty: none"""
    out: str = ""
    """file to write; empty: report.html in the run's folder"""
    explain: tuple[int, ...] = ()
    """<update> <episode> <token>: print where the numbers of that token come from, and write no page. The update must
    be one that was traced; episodes and tokens are counted from 1, as on the page"""


def report(args: Args) -> Path:
    """Write the page and return its path. An InputError if a folder is not that of a run."""
    folder = Path(args.run) if args.run else newest_run(Path("runs"))
    if args.explain:
        try:
            print(explained(read_run(folder), args.explain), flush=True)
        except BrokenPipeError:  # the reader, such as head, has had enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return folder
    folders = [folder, *([Path(args.other)] if args.other else [])]
    path = Path(args.out) if args.out else folders[0] / "report.html"
    if path.is_dir():
        raise InputError(f"--out {path} is a folder; name a file in it, such as {path / 'report.html'}")
    if args.out and not path.parent.is_dir():
        raise InputError(f"--out {path}: there is no folder {path.parent}; name a file in a folder that exists")
    runs = [read_run(folder) for folder in folders]
    traced = [one_run.traced(TRACE_BYTES // len(runs)) for one_run in runs]
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    # In the order that they have here, since they are not told to be sorted.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    text = environment.get_template("report.html").render(
        runs=runs,
        facts=side_by_side([one_run.facts for one_run in runs]),
        arguments=side_by_side([files.flatten(one_run.meta["args"]) for one_run in runs]),
        panels=(panels := draw_panels(runs)),
        most_points=MOST_POINTS,
        thinned=any(len(one_run.steps) > MOST_POINTS for one_run in runs),
        data={
            "figures": [figure for _, figure in panels],
            "runs": [one_run.data(of_run) for one_run, of_run in zip(runs, traced, strict=True)],
            "quantities": QUANTITIES,
            "numbers": NUMBERS,
        },
        every=[one_run.every(one_trace) for one_run, one_trace in zip(runs, traced, strict=True)],
        held_out=held_out_texts(runs),
        script="".join((Path(__file__).parent / name).read_text("utf-8") for name in SCRIPTS),
    )
    files.replace_file(path, text.encode(errors="replace").decode())  # half a character has no place in a file
    print(f"report  {run.shown(path.absolute())}")
    return path


SCRIPTS = ("lib/derivation.js", "lib/charts.js", "report.js")


def newest_run(runs: Path) -> Path:
    """The run that was written to last."""
    metas = sorted(runs.glob("*/meta.json"), key=lambda path: path.stat().st_mtime)
    if not metas:
        raise InputError(f"there is no run below {run.shown(runs.absolute())}; name one with --run")
    return metas[-1].parent


# ---- What a run left -------------------------------------------------------------------------------------------

TRACE_BYTES = 1_500_000  # of traces on a page; beyond, updates are left out
MOST_POINTS = 2_000  # of a curve; beyond, rows are left out, but none that is a spike
KINDS = {  # by script
    "train_reward": "training of a reward model (chapter 1)",
    "train_policy": "PPO on continuations, against a reward model (chapter 1)",
    "tldr_sft": "fine-tuning on reference summaries (chapter 2)",
    "tldr_reward": "training of a reward model (chapter 2)",
    "tldr_policy": "PPO on summaries, against a reward model (chapter 2)",
    "rlvr_policy": "PPO with verifiable rewards (chapter 3)",
    "rlvr_async": "asynchronous PPO with verifiable rewards (chapter 3)",
    "rlvr_tools": "PPO with verifiable rewards and a tool (chapter 3)",
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
    def facts(self) -> dict[str, Any]:
        """A description of the run, in words and numbers."""
        meta, args = self.meta, files.flatten(self.meta["args"])
        labels = {f"rewards.{name}": "scored by" for name in ("trained_model", "function", "verifier")}
        labels |= {"rewards.monitor": "watched by", "base_model": "starts from"}
        labels |= {f"task.{name}": "texts" for name in ("query_dataset", "posts", "problems")}
        labels |= {"task.response_length": "tokens of a response, at most", "preset": "preset", "seed": "seed"}
        facts, sizes = {"run": self.name, "what": KINDS[self.meta["script"]]}, meta.get("sizes", {})
        if {"updates", "batch"} <= set(sizes):
            facts["updates"] = f"{sizes['updates']:,} of {sizes['batch']:,} episodes each"
        facts["state"] = "finished" if meta.get("finished") else f"not finished: {len(self.steps):,} steps are logged"
        facts |= {label: args[name] for name, label in labels.items() if args.get(name) not in (None, "")}
        facts["time"] = f"{meta.get('wall_time', 0) / 60:.1f} minutes"
        for name in ("device", "num_processes", "threads", "commit"):
            facts[name.replace("num_", "")] = meta.get(name) or "unknown"
        facts["arithmetic"] = args.get("dtype", "unknown")
        facts |= {f"size: {name}": size for name, size in sizes.items()}
        facts |= {f"result: {name}": value for name, value in meta.get("results", {}).items()}
        return facts | {f"version: {name}": version for name, version in meta.get("versions", {}).items()}

    def kept(self) -> list[list[tuple[int, bool]]]:
        """The names of its traces, update by update."""
        return [list(names) for _, names in itertools.groupby(traces.kept(self.folder), lambda name: name[0])]

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
        return {"update": kept[0][0], "episodes": episodes}

    def every(self, shown: list[dict[str, Any]]) -> str:
        """The content of the token view, as a sentence."""
        kept = len(self.kept())
        if "ppo" not in self.meta["args"]:
            return "Only PPO leaves traces."
        if not kept:
            return "The run left no traces: it was started without --trace_interval."
        left_out = f" {kept - len(shown)} more were kept, but would make the page too large." * (kept > len(shown))
        watched = sum(episode["again"] for episode in shown[0]["episodes"])
        of_batch = f"{len(shown)} updates, and the first {len(shown[0]['episodes']) - watched} episodes of each."
        again = (
            f" Then {watched} responses to queries that are the same each time, sampled after the update, with the "
        )
        again += "same noise; they are not trained on, and what training makes of an episode is not known of them."
        return of_batch + again * (watched > 0) + left_out


def read_run(folder: Path) -> OneRun:
    """The content of the folder of a run, finished or not."""
    meta, path = run.read_meta(folder), folder / "metrics.csv"
    check_meta(folder / "meta.json", meta)
    try:
        header, *rows = (run.read_records(path) if path.exists() else []) or [[]]
        columns = [[*map(float, column)] for column in zip(*rows, strict=True)]
        metrics = dict(zip(header, columns, strict=True)) if rows else {}
        if meta["args"].get("ppo", {}).get("samples_per_prompt") == 1:  # groups of one say nothing
            metrics = {name: values for name, values in metrics.items() if not name.startswith("val/groups_")}
        return OneRun(
            folder=folder, meta=meta, steps=[int(step) for step in metrics.pop("step", [])], metrics=metrics
        )
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise InputError(f"{path} is damaged: {error}") from error


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


def side_by_side(columns: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Rows (name, a value of each run as text)."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, [as_text(column.get(name, "")) for column in columns]) for name in names]


def as_text(value: Any) -> str:
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.6g}"
    return f"{value:,}" if type(value) is int else errors.visible(str(value))


# ---- Traces ----------------------------------------------------------------------------------------------------

# name: title, the number without colour, and how to read it
QUANTITIES = {
    "kl": ("KL", 0, "Nats by which the policy likes the token better than the reference does; what is penalised."),
    "logprobs": ("log-prob, policy", 0, "Of the policy that sampled. Far below 0: a surprise."),
    "ref_logprobs": ("log-prob, reference", 0, "Of the model that training started from."),
    "rewards": ("reward", 0, "The KL penalty of each token; the score is on the last, or on the step after it."),
    "values": ("value", 0, "What the critic expects from here on, before it learned from this episode."),
    "returns": ("return", 0, "What the critic should have said."),
    "advantages": ("advantage", 0, "Above 0, the token becomes more likely."),
    "ratio": ("ratio after the update", 1, "How much more likely the update made the token."),
    "clipped": ("clipped", 0, "1 where the ratio left its range in the direction that pays: no gradient any more."),
    "new_logprobs": ("log-prob after the update", 0, "Of the policy after all epochs of this update."),
    "new_values": ("value after the update", 0, "What the critic says after all epochs of this update."),
    "entropies": ("entropy after the update", 0, "How undecided the policy is at this place, in nats."),
    "sampler_logprobs": ("log-prob, sampler", 0, "What the sampler had, where its arithmetic differs."),
}
NUMBERS = {  # of an episode: title
    "scores": "score",
    "raw_scores": "score without penalties",
    "stopped": "ends (1: yes)",
    "groups": "group",
    "verifier": "by the verifier (above 0: correct)",
}
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
        known = ", ".join(map(str, updates)) or "none: it was started without --trace_interval"
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
    lines, missing = derivation.explain(episode, settings, epochs - 1, t, group_of(episode, episodes))
    heads = f"update {place[0]}, episode {place[1]}, token {place[2]}: {json.dumps(episode['pieces'][t])}"
    explained = [f"{heads}, epoch {epochs} of {epochs}"]
    for line in lines:
        where = line.step.where[min(settings["chapter"], len(line.step.where)) - 1]
        result = derivation.written(line.value)
        filled = line.numbers if line.numbers == result else f"{line.numbers} = {result.strip('()')}"
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
    line = next((n for n, text in enumerate(source.split("\n"), 1) if f"def {function}(" in text), 1)
    text, home = f"{path}#L{line} {function} [{mark}]", git("config", "--get", "remote.origin.url")
    found = re.fullmatch(r"(?:https://|git@)([\w.-]+)[:/](.+?)(?:\.git)?", home)
    if not found or not commit:
        return {"place": text, "href": ""}
    return {"place": text, "href": f"https://{found[1]}/{found[2]}/blob/{commit}/{path}#L{line}"}


def scales(traced: list[dict[str, Any]]) -> dict[str, float]:
    """For each quantity the distance from its middle that has full colour: 98 of 100 tokens are not farther."""
    distances: dict[str, list[float]] = {}
    for update in traced:
        for episode in update["episodes"]:
            for name in QUANTITIES.keys() & episode["tokens"].keys():
                values = (value for value in episode["tokens"][name] if value is not None)
                distances.setdefault(name, []).extend(abs(value - QUANTITIES[name][1]) for value in values)
    return {name: sorted(found)[int(0.98 * (len(found) - 1))] for name, found in distances.items() if found}


# ---- Texts of held-out queries ---------------------------------------------------------------------------------

HELD_OUT = 20


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
                label = name.replace("_", " ") + f", run {i}" * (not alike)
                found[-1][not isinstance(value, str)][errors.visible(label)] = as_text(value)
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
    try:
        lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
        rows = [json.loads(line) for line in lines if line]
        return {str(row.get("query") or row["prompt"]): row for row in rows}
    except (ValueError, RecursionError, AttributeError, KeyError, OSError) as error:
        raise InputError(f"{path} is damaged: {error}") from error


# ---- Learning curves -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Panel:
    title: str
    metrics: str  # their names, or beginnings that end in *
    healthy: str
    sick: str


PANELS = [
    Panel(
        title="Score",
        metrics="objective/score objective/scores objective/gold_scores objective/verifiable_correct_rate",
        healthy="Rises steadily and flattens; what only watches (gold) rises with it.",
        sick="Score up while gold falls: the reward model is being exploited. Raise the KL coefficient or stop "
        "earlier. Flat: look at the advantages, at groups without a signal, and whether responses end at all.",
    ),
    Panel(
        title="KL from the reference (nats per response)",
        metrics="objective/kl",
        healthy="Starts at 0, rises, and stays near the target (dashed), if there is one.",
        sick="Shoots up: the text leaves the language; lower the learning rate or raise the KL coefficient. Not 0 "
        "in the first update, or below 0 for long: sampler and training pass disagree. Only where older weights "
        "sample may it be a little below 0 at first.",
    ),
    Panel(
        title="KL coefficient",
        metrics="objective/kl_coef",
        healthy="Drifts until the divergence holds its target; constant without one.",
        sick="Falls or rises without end: the target cannot be reached. Take another target, another learning rate "
        "or a shorter horizon.",
    ),
    Panel(
        title="Score less penalty",
        metrics="objective/score_total objective/rlhf_reward",
        healthy="What PPO maximises: rises.",
        sick="Falls while the score rises: the penalty wins; lower the KL coefficient or wait for the controller.",
    ),
    Panel(
        title="Responses that end",
        metrics="objective/stopped objective/eos_rate val/stop_token_rate eval/eos_rate eval/stopped",
        healthy="Near 1 soon: a response without its stop token is punished or, in chapter 3, rarely correct.",
        sick="Falls: the policy has found that long responses pay. Check the penalty and response_length.",
    ),
    Panel(
        title="Length (tokens)",
        metrics="objective/response_length eval/response_length val/sequence_lengths val/sequence_lengths_correct "
        "val/sequence_lengths_incorrect",
        healthy="Settles.",
        sick="Grows along with the score and without end: length itself is being rewarded. Compare texts of equal "
        "length.",
    ),
    Panel(
        title="Held-out queries",
        metrics="eval/scores eval/gold_scores eval/reference_gold_scores eval/gsm8k_strict eval/gsm8k_flexible "
        "eval/mean@* eval/pass@*",
        healthy="Follows the training score.",
        sick="Lags behind: the policy has memorised the training queries, or the reward model is wrong elsewhere. "
        "Stop earlier, take more queries, or label what the policy writes now.",
    ),
    Panel(
        title="Groups without a signal",
        metrics="val/groups_zero_std val/groups_all_right val/groups_all_wrong",
        healthy="Well below 1. Groups that are all wrong become rarer, and groups that are all correct slowly more "
        "frequent.",
        sick="groups_zero_std near 1: in nearly every group all responses have the same score, and nothing is "
        "learned from them. Take easier or harder prompts, more samples per prompt, or filter_groups.",
    ),
    Panel(
        title="Entropy of the policy (nats per token)",
        metrics="ppo/policy/entropy policy/entropy_avg",
        healthy="Falls slowly.",
        sick="Falls to near 0: the policy says one thing only. Lower the learning rate, raise the KL coefficient. "
        "Rises without end: it comes apart.",
    ),
    Panel(
        title="Clipped share of tokens",
        metrics="ppo/policy/clipfrac policy/clipfrac_avg policy/clipfrac_low_avg ppo/val/clipfrac val/clipfrac_avg",
        healthy="For the policy a few in a hundred, up to about 0.2. With one step per update 0, since no ratio "
        "has moved yet, unless the correction bypass counts the age of the weights too.",
        sick="For the policy above 0.3: steps are too large; lower the learning rate or the epochs. Always 0 with "
        "many steps per update: steps are very small, or the clip range is wider than any ratio. For the values "
        "near 1: the critic may not move as far as it has to.",
    ),
    Panel(
        title="Size of an update",
        metrics="ppo/policy/approxkl policy/approxkl_avg ppo/val/ratio_var val/ratio_var",
        healthy="Small and even.",
        sick="Spikes come before collapses: lower the learning rate. Not finite soon after: the run has stopped "
        "itself.",
    ),
    Panel(
        title="Ratio before the first step, less 1",
        metrics="ppo/val/first_ratio_gap val/first_ratio_gap",
        healthy="0 but for rounding: the first pass of training finds the log-probs that the rollout was given.",
        sick="Far above rounding: padding, positions, temperature or precision differ between rollout and "
        "training. Above 0.001, in bfloat16 above 0.1, the run stops by itself.",
    ),
    Panel(
        title="Distance of the sampler's log-probs (nats per token)",
        metrics="objective/sampler_gap",
        healthy="Rounding, where the weights that sample are those that learn: far below 0.001 in float32 and, "
        "averaged over tokens, about 0.02 in bfloat16. With older weights also what the updates since then have "
        "changed.",
        sick="Large although the weights are the same: the sampler computes another policy than the one that learns. "
        "Check temperature, precision, and which weights the engine has. Rising although the age of the weights "
        "stays: the policy moves too fast for samples of that age.",
    ),
    Panel(
        title="Age of the weights that sampled (updates)",
        metrics="async/staleness_mean async/staleness_max train/staleness_mean",
        healthy="0 in rlvr_policy.py, but for groups that filter_groups keeps for the next update. In "
        "rlvr_async.py it rises to the staleness that was asked for, and stays there.",
        sick="Old weights cost accuracy: lower the staleness. With filter_groups: sample fewer prompts at a time "
        "(prompts_per_round), so that fewer groups are left over.",
    ),
    Panel(
        title="Divergence of the sampler from the learner (nats per token)",
        metrics="async/kl async/k3 async/chi2_token async/log_perplexity_gap",
        healthy="Near 0 and level. kl and k3 are two estimates of one number; chi2 is about twice that where it is "
        "small.",
        sick="Rises with every update: the learner runs away from the policy that samples. Lower the staleness or "
        "the learning rate. The ratio and the clipped share need not show this. k3 or chi2 far above kl: a few "
        "tokens have weights far from 1.",
    ),
    Panel(
        title="Spread of the weights of whole responses (chi2)",
        metrics="async/chi2_sequence",
        healthy="Below 1, and level.",
        sick="Above 1: few responses outweigh the others, so with correction_level sequence an update would be "
        "mostly noise. Take token, or younger weights.",
    ),
    Panel(
        title="Effective sample size (share), and mean weight",
        metrics="async/ess async/weight_mean",
        healthy="Both near 1: all tokens count about alike.",
        sick="The sample size falls towards 0: a few tokens count for all others. Lower the staleness or the "
        "learning rate. The mean weight falls well below 1: the cap takes away a part of the update.",
    ),
    Panel(
        title="Weights that are capped, tokens that are rejected or masked (shares)",
        metrics="async/clipped_share async/rejected_share async/masked_share",
        healthy="0, or a few in a hundred.",
        sick="Grows: the corrections now change what is learned. Lower the staleness; a higher cap or wider bounds "
        "only trade this bias for variance.",
    ),
    Panel(
        title="Largest distance of two log-probs of a token (nats)",
        metrics="async/largest_gap",
        healthy="Level. Rounding, where the weights are the same; with older weights it may be several nats.",
        sick="Jumps: some token became very much likelier or less likely than when it was sampled. With the same "
        "weights: the engine is at fault.",
    ),
    Panel(
        title="Perplexity of the responses",
        metrics="async/perplexity async/sampler_perplexity",
        healthy="Both fall slowly, together.",
        sick="They part: learner and sampler no longer agree about the same texts.",
    ),
    Panel(
        title="Time of an update spent waiting (seconds)",
        metrics="time/waiting time/weight_sync",
        healthy="Waiting is near 0, if the staleness is 1 or more: batches are there when the learner wants them.",
        sick="Waiting takes most of an update: sampling is slower than learning. Add workers, or a staleness of 1 "
        "more.",
    ),
    Panel(
        title="Policy loss",
        metrics="ppo/loss/policy loss/policy_avg",
        healthy="Near 0, above or below; it need not fall. With the losses ppo and gspo, an update begins at minus "
        "the mean advantage, since all ratios are 1, and whitening, or the mean of a group, makes that 0 or nearly "
        "0. A loss of 0 trains nevertheless: it is a sum in which positive and negative advantages cancel, but in "
        "the gradient each is multiplied by the gradient of its own token's log-prob, and these differ. Tokens "
        "that did better than expected become likelier, the others less likely.",
        sick="Moves far from 0 and stays there: the policy is far from the one that sampled. Lower the learning "
        "rate or the epochs. Whether the policy learns shows in score and gradient norm, not here; it learns "
        "nothing where all advantages are 0: see groups without a signal.",
    ),
    Panel(
        title="Value loss",
        metrics="ppo/loss/value loss/value_avg",
        healthy="Falls, or follows the spread of the scores.",
        sick="Grows while that does not: lower the critic's learning rate.",
    ),
    Panel(
        title="Explained variance of returns",
        metrics="ppo/val/var_explained val/var_explained val/explained_var",
        healthy="Rises from 0 towards 1.",
        sick="Stays at 0 or below: the critic predicts no better than a constant, so advantages are noisy. Give it "
        "more steps, a higher learning rate, or a better start.",
    ),
    Panel(
        title="Gradient norm",
        metrics="ppo/gradient_norm gradient_norm policy/grad_norm value/grad_norm train/gradient_norm "
        "train/sft/gradient_norm train/rm/gradient_norm",
        healthy="Even, and above 0.",
        sick="Spikes: look at the texts of these updates; lower the learning rate if they are ordinary. The policy's "
        "is 0, although it is no longer waiting for the critic: all advantages are 0, and nothing is learned.",
    ),
    Panel(
        title="Loss",
        metrics="train/loss train/rm/loss train/sft/loss",
        healthy="Falls and flattens.",
        sick="Flat from the start: check the labels and the learning rate.",
    ),
    Panel(
        title="Accuracy",
        metrics="train/accuracy train/rm/accuracy",
        healthy="Rises well above chance (1/2 for pairs, 1/4 for four).",
        sick="At chance: labels and texts do not belong together, or the tokenizer differs.",
    ),
    Panel(
        title="Scores of preferred and other texts",
        metrics="train/rm/chosen_rewards train/rm/rejected_rewards",
        healthy="Move apart.",
        sick="On top of each other: nothing is learned. Check the labels and the learning rate.",
    ),
    Panel(
        title="Learning rate",
        metrics="ppo/lr lr train/lr train/rm/lr train/sft/lr",
        healthy="Follows the schedule that was asked for.",
        sick="Another course: check total_episodes, which stretches the schedule.",
    ),
]


def draw_panels(runs: list[OneRun]) -> list[tuple[Panel, dict[str, Any]]]:
    """The panels that the runs have metrics for, each with what lib/charts.js draws."""
    known = list(dict.fromkeys(name for one_run in runs for name in one_run.metrics))
    rewards = [one_run.meta["args"].get("rewards", {}) for one_run in runs]
    monitors = (of_run.get("monitor", "") for of_run in rewards)
    watched = [f"objective/{monitor.rsplit('.', 1)[-1].rsplit(':', 1)[-1]}" for monitor in monitors if monitor]
    verifiers = [f"eval/{of_run['verifier']}" for of_run in rewards if "verifier" in of_run]
    of_the_runs = {"Score": watched, "Held-out queries": verifiers}
    drawn = []
    for panel in PANELS:
        wanted = panel.metrics.split() + of_the_runs.get(panel.title, [])
        names = [name for name in known if any(matches(name, pattern) for pattern in wanted)]
        names = [name for name in names if name != "objective/scores" or "objective/score" not in names]  # the same
        if not names:
            continue
        curves = []
        for number, one_run in enumerate(runs):
            rows = rows_to_draw([one_run.metrics[name] for name in names if name in one_run.metrics])
            for color, name in enumerate(names):
                if name not in one_run.metrics:
                    continue
                label = name if len(runs) == 1 else f"{name}, run {number + 1}"
                x, values = ([column[row] for row in rows] for column in (one_run.steps, one_run.metrics[name]))
                y = [value if math.isfinite(value) else None for value in values]
                look = {"color": COLORS[color % len(COLORS)], "dotted": number == 1}
                curves.append({"name": label, "x": x, "y": y} | look)
        wanted = (of_run.get("adaptive_kl", {}).get("target") for of_run in rewards)
        targets = {target for target in wanted if target and math.isfinite(target)}
        drawn.append((panel, {"data": curves, "targets": sorted(targets) if panel.metrics == "objective/kl" else []}))
    return drawn


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


COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]  # told apart by colour-blind people too


def matches(name: str, pattern: str) -> bool:
    """Whether a metric is meant: by its name, or by its beginning where the pattern ends in *."""
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


if __name__ == "__main__":
    cli.run_script(report, lambda argv: cli.parse(Args, argv, description=__doc__))
