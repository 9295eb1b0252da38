"""openrlbenchmark without a network: our run folders and the published curves, as it would find them on W&B.

    # our runs against OpenAI's curves, all metrics of the published figure; draws replay.png and more.
    # Runs of tales are drawn next to OpenAI's task sentiment: another task and another model, for the shapes only
    python benchmark/curves/replay.py --runs 'benchmark/runs/sentiment/*/runs/train_policy*'
    # other arguments of openrlbenchmark.rlops_multi_metrics, which chapters 2 and 3 need, after two dashes
    python benchmark/curves/replay.py --runs 'runs/train_policy*' -- --env-ids tales --filters \\
        '?we=local&wpn=ppo_rlhf&xaxis=_step&ceik=preset&cen=exp_name&metrics=objective/kl' train_policy

openrlbenchmark 0.3.1 has an offline mode: it looks runs up in a database and reads their metrics from a cache next to
it, both inside its own package. This script writes the two into a folder of ours, points the package there, and
starts `openrlbenchmark.rlops_multi_metrics --offline --scan-history`. In that folder:

    dataset/local/ppo_rlhf/                                     our runs: xaxis=_step, cen=exp_name, ceik=preset
    dataset/openrlbenchmark/lm-human-preferences/               OpenAI's: xaxis=_step, ceik=task_id,
                                                                cen=task.value.policy.initial_model, name 124M
    dataset/openrlbenchmark/lm_human_preference_details/        the reproduction's: ceik=rewards.value.label_dataset,
                                                                cen=exp_name, name train_policy_accelerate

Entities, projects, keys and metric names of the two published sets are those on W&B, so that their published commands
find them. The single published runs are not known, only their mean and deviation. So there are as many stand-ins as
there were seeds, half of them above the mean and half below, with exactly that mean and deviation; without a
deviation all are the mean. The curves were smoothed when they were drawn, and the tool smooths them once more. Where
the time of a published run is not known, its `_runtime` is its update: do not read those panels.

`seed=`, `user=` and a second `tag=` in a filter do not work in the tool's offline mode.
"""

import glob
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tyro

from ppo_rlhf.train_policy import InputError, flatten, read_info, read_meta, run_script

REFERENCE = Path(__file__).resolve().parent / "reference" / "lm_human_preferences.csv"
TASKS = ("sentiment", "descriptiveness")  # the published figure has these two, with ten seeds
SEEDS = 10
MARK = "made_by_replay"  # an empty file in a folder that this script may replace
OPENAI, DETAILS = "openai/lm-human-preferences", "lm-human-preference-details"

# Of the published figure: name in our runs, in OpenAI's on W&B, in those of the reproduction.
METRICS = (
    ("objective/scores", "ppo/objective/score", "objective/scores"),
    ("objective/kl", "ppo/objective/kl", "objective/kl"),
    ("objective/entropy", "ppo/objective/entropy", "objective/entropy"),
    ("objective/score_total", "ppo/objective/score_total", "objective/score_total"),
    ("objective/kl_coef", "ppo/objective/kl_coef", "objective/kl_coef"),
    ("ppo/loss/total", "ppo/ppo/loss/total", "ppo/loss/total"),
    ("ppo/loss/value", "ppo/ppo/loss/value", "ppo/loss/value"),
    ("ppo/loss/policy", "ppo/ppo/loss/policy", "ppo/loss/policy_avg"),
    ("ppo/policy/clipfrac", "ppo/ppo/policy/clipfrac", "ppo/policy/clipfrac_avg"),
    ("ppo/policy/entropy", "ppo/ppo/policy/entropy", "ppo/policy/entropy_avg"),
    ("ppo/returns/mean", "ppo/ppo/returns/mean", "ppo/returns/mean"),
    ("ppo/policy/approxkl", "ppo/ppo/policy/approxkl", "ppo/policy/approxkl_avg"),
    ("ppo/val/clipfrac", "ppo/ppo/val/clipfrac", "ppo/val/clipfrac_avg"),
    ("ppo/val/error", "ppo/ppo/val/error", "ppo/val/error"),
    ("ppo/val/mean", "ppo/ppo/val/mean", "ppo/val/mean"),
    ("ppo/returns/var", "ppo/ppo/returns/var", "ppo/returns/var"),
    ("ppo/val/vpred", "ppo/ppo/val/vpred", "ppo/val/vpred"),
)


@dataclass(frozen=True)
class Args:
    runs: tuple[str, ...]
    """folders of policy runs (patterns in quotes)"""
    output: Path = Path("replay")
    """name of the pictures and tables, without an ending"""
    folder: Path = Path("openrlbenchmark_offline")
    """where database and cache are written; one that this script wrote before is replaced"""


@dataclass(frozen=True)
class CachedRun:
    """A run as openrlbenchmark knows it."""

    entity: str
    project: str
    id: str
    name: str
    url: str
    state: str
    """finished, or running: the tool leaves those out"""
    config: dict[str, Any]
    tags: tuple[str, ...]
    table: pd.DataFrame
    """one row per step: `_step`, `_runtime` (seconds) and every metric"""


def dotted(config: dict[str, Any]) -> dict[str, Any]:
    """Configuration with the keys that the tool asks for: {"ppo": {"lr": 1}} becomes {"ppo.value.lr": 1}."""
    keys = {}
    for name, value in flatten(config).items():
        first, dot, rest = name.partition(".")
        keys[f"{first}.value{dot}{rest}"] = value
    return keys


def our_run(folder: Path) -> CachedRun:
    """A policy run of ours, as --track would have sent it to W&B."""
    meta = read_meta(folder)
    try:
        table = pd.read_csv(folder / "metrics.csv")
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} is not the folder of a run: {error}") from error
    seconds = next((name for name in ("elapsed/time", "time") if name in table), None)
    if seconds is None:
        raise InputError(f"{folder} is not the run of a policy")
    config = meta["args"]
    if trained_model := config["rewards"]["trained_model"]:
        info = read_info(folder.resolve().parent.parent / trained_model)
        config["rewards"]["label_dataset"] = info["label_dataset"]
    table = table.rename(columns={"step": "_step"}).assign(_runtime=table[seconds])
    name, state = folder.name, "finished" if meta["finished"] else "running"
    return CachedRun("local", "ppo_rlhf", name, name, str(folder), state, dotted(config), tuple(meta["tags"]), table)


def published_runs() -> list[CachedRun]:
    """Stand-ins for the runs of the published curves: see above."""
    reference = pd.read_csv(REFERENCE, keep_default_na=False, na_values=["NaN", ""])
    runs = []
    for task in TASKS:
        of_task = reference[reference["task"] == task]
        time = of_task[of_task["metric"] == "ppo/elapsed/time"]
        for implementation, column in ((OPENAI, 1), (DETAILS, 2)):
            drawn = of_task[(of_task["implementation"] == implementation) & (of_task["source_figure"] == "ours1.png")]
            names = {names[0]: names[column] for names in METRICS}
            mean, std = (drawn.pivot(index="update", columns="metric", values=value) for value in ("mean", "std"))
            deviation = std.fillna(0.0) * math.sqrt((SEEDS - 1) / SEEDS)
            for seed in range(1, SEEDS + 1):
                table = (mean + (deviation if seed % 2 else -deviation)).rename(columns=names)
                table = table[list(names.values())].rename_axis("_step").reset_index()
                seconds = np.interp(table["_step"], [0, *time["update"]], [0, *time["mean"]])
                table["_runtime"] = seconds if implementation == OPENAI else table["_step"]
                runs.append(published_run(implementation, task, seed, table))
    return runs


def published_run(implementation: str, task: str, seed: int, table: pd.DataFrame) -> CachedRun:
    if implementation == OPENAI:
        project, config = "lm-human-preferences", {"task_id.value": task, "task.value.policy.initial_model": "124M"}
    else:
        project = "lm_human_preference_details"
        config = {
            "exp_name.value": "train_policy_accelerate",
            "rewards.value.label_dataset": f"{task}/offline_5k.json",
        }
    name = f"{task}-stand-in-{seed}"
    return CachedRun("openrlbenchmark", project, name, name, "published figure", "finished", config, (), table)


def write_cache(folder: Path, runs: Iterable[CachedRun]) -> None:
    """Database and cache, in the layout of openrlbenchmark 0.3.1."""
    try:
        import peewee
        from openrlbenchmark.offline_db import OfflineRun, OfflineRunTag, Tag, database_proxy
    except ImportError as error:
        raise InputError(
            f"openrlbenchmark is needed ({error}): pip install -e '.[benchmark]', with Python 3.11 to 3.13"
        ) from error
    projects: dict[tuple[str, str], list[CachedRun]] = {}
    for run in runs:
        projects.setdefault((run.entity, run.project), []).append(run)
    for (entity, project), members in projects.items():
        place = folder / "dataset" / entity / project
        place.mkdir(parents=True)
        database = peewee.SqliteDatabase(place / "offline.sqlite")
        database_proxy.initialize(database)
        with database, database.bind_ctx([OfflineRun, OfflineRunTag, Tag]):
            database.create_tables([OfflineRun, OfflineRunTag, Tag])
            for run in members:
                (place / run.id).mkdir()
                run.table.to_csv(place / run.id / "run_df.csv")
                facts = {
                    "id": run.id,
                    "name": run.name,
                    "state": run.state,
                    "url": run.url,
                    "path": [entity, project, run.id],
                    "project": project,
                    "entity": entity,
                    "config": run.config,
                }
                user = {"username": "local", "name": "local"}
                (place / run.id / "run.json").write_text(json.dumps(facts | {"tags": list(run.tags), "user": user}))
                OfflineRun.create(**facts, username="local")


def default_arguments(ours: Sequence[CachedRun]) -> list[str]:
    """The published command: our runs against OpenAI's, all metrics, one column per task."""
    if "elapsed/time" not in ours[0].table:
        raise InputError("runs of chapters 2 and 3 have other metrics: openrlbenchmark.sh names them")
    presets = sorted({run.config["preset.value"] for run in ours}, key=lambda preset: preset != "sentiment")
    names = sorted({run.config["exp_name.value"] for run in ours})
    columns = max(1, 6 // len(presets)) * len(presets)  # a metric's panels side by side, about six in a line

    def query(place: str, column: int) -> str:
        return f"?{place}&xaxis=_step&" + "&".join(f"metrics={metric[column]}" for metric in METRICS)

    our_place = "we=local&wpn=ppo_rlhf&ceik=preset&cen=exp_name"
    labels = [f"{name}?cl=ppo_rlhf, {name}" for name in names]
    their_place = "we=openrlbenchmark&wpn=lm-human-preferences&ceik=task_id&cen=task.value.policy.initial_model"
    arguments = ["--filters", query(our_place, 0), *labels]
    arguments += ["--filters", query(their_place, 1), f"124M?cl={OPENAI}, 124M"]
    # Theirs is the same task, or the one that the small world imitates.
    tasks = [preset.removeprefix("tales-").replace("tales", "sentiment") for preset in presets]
    arguments += ["--env-ids", *presets, "--env-ids", *tasks]
    arguments += ["--no-check-empty-runs", "--pc.ncols", str(columns), "--pc.ncols-legend", "1"]
    return [*arguments, "--pc.xlabel", "update"]


TOOL = """
import runpy, sys
import openrlbenchmark
openrlbenchmark.__path__.insert(0, sys.argv.pop(1))
runpy.run_module("openrlbenchmark.rlops_multi_metrics", run_name="__main__", alter_sys=True)
"""


def main(args: Args, tool_arguments: list[str]) -> int:
    folders = sorted({Path(match) for pattern in args.runs for match in glob.glob(pattern)})
    if not folders:
        raise InputError(f"--runs {' '.join(args.runs)}: no such folder")
    ours = [our_run(folder) for folder in folders]
    if twice := [run.name for i, run in enumerate(ours) if run.name in {other.name for other in ours[:i]}]:
        raise InputError(f"--runs: {twice[0]} is there twice")
    mark = args.folder / MARK
    if args.folder.exists() and not mark.exists():
        raise InputError(f"--folder {args.folder} was not made by this script; give another one")
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    mark.touch()
    write_cache(args.folder, [*ours, *published_runs()])
    command = [sys.executable, "-c", TOOL, str(args.folder.resolve())]
    command += [*(tool_arguments or default_arguments(ours)), "--output-filename", str(args.output)]
    environment = os.environ | {"MPLBACKEND": "agg", "WANDB_MODE": "offline"}
    return subprocess.run([*command, "--offline", "--scan-history"], env=environment).returncode


if __name__ == "__main__":
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    run_script(lambda: sys.exit(main(tyro.cli(Args, args=words[:split], description=__doc__), words[split + 1 :])))
