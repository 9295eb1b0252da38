"""What single details do: each is changed in a small world, and nothing else changes. ablation_list.py has the list.

    python benchmark/experiments/ablations.py run --workers 2     # all three worlds; repeat it to resume
    python benchmark/experiments/ablations.py run --world sums --only group-2 critic-lambda-0 --seeds 3    # a part
    python benchmark/experiments/ablations.py report     # tables and pictures of what has finished
    python benchmark/experiments/ablations.py list       # what there is, what has run, how long the rest takes
    # one ablation in a training script, here chapter 1's on GPT-2
    python benchmark/experiments/ablations.py with torch-adam ppo_rlhf/train_both.py --preset sentiment

The training scripts have no switches for this. Where an argument turns a detail off, it is given. Where none does,
the script's own lines are replaced before it runs, and the replacement is written in ablation_list.py in full. Each
ablation and what it is compared with start from the same models, see the same queries and draw with the same random
numbers, seed by seed. They share the reward model too, unless the detail concerns it. So the effect of a detail is
the mean over seeds of a difference, and its 95 % interval is Student's: with three seeds, 4.3 standard errors.

One in twenty intervals of nothing leaves out 0. So the page also says which effects on the reward are left after
Holm's correction for the number of comparisons, over all worlds together. The other columns are not corrected.

Results are kept in a CSV for each world. What is there is not run again, even where the folder of its run is gone, so
several machines can fill it: `--again` runs it once more.
"""

import importlib.util
import math
import shlex
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from matplotlib.figure import Figure

from benchmark import lab
from benchmark.curves import many_seeds
from benchmark.curves.compare import markdown, read_numbers
from benchmark.experiments import ablation_list
from benchmark.experiments.ablation_list import Ablation
from ppo_rlhf.lib import cli
from ppo_rlhf.lib.errors import InputError, exit_with, run_script
from ppo_rlhf.lib.run import read_meta

ROOT = Path(__file__).resolve().parents[2]

# ---- The worlds ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effect:
    """What is measured of a run: a column of metrics.csv, as the mean of the last updates or the highest of all."""

    column: str
    highest: bool = False
    unit: float = 1.0
    """what the column is divided by"""


@dataclass(frozen=True)
class World:
    """A small world, the scripts that train in it, and what is measured of a run."""

    chapter: int
    scripts: tuple[str, ...]
    """training scripts; the lines of an ablation may be in any of them"""
    stages: dict[str, str]
    """name of a stage: its script and the arguments of all runs. {sft} and {reward} are the models of earlier ones"""
    effects: dict[str, Effect]
    """what is measured; the first is the reward, whose effects are corrected for the number of comparisons"""
    last: int
    """updates at the end that are averaged"""
    seeds: int
    """how many seeds are planned"""
    minutes: float
    """of one policy, on one core"""
    file: str
    """name of its CSV and of its table"""

    @property
    def ablations(self) -> dict[str, Ablation]:
        return LISTS[self.file]

    @property
    def reward(self) -> str:
        return next(iter(self.effects))


LISTS = {"ablations": ablation_list.TALES, "posts": ablation_list.POSTS, "sums": ablation_list.SUMS}
QUIET = "--log_interval 0 --trace_interval 0"
WORLDS = {
    "tales": World(
        chapter=1,
        scripts=("train_reward", "train_policy", "train_both"),
        stages={
            "reward": "ppo_rlhf/train_reward.py --preset tales",
            "policy": f"ppo_rlhf/train_policy.py --preset tales --ppo.total_episodes 3840 {QUIET} "
            "--rewards.trained_model {reward}",
        },
        effects={
            "gold score": Effect("objective/gold_scores"),
            "KL": Effect("objective/kl"),
            "highest KL": Effect("objective/kl", highest=True),
            "end (%)": Effect("objective/stopped", unit=0.01),
            "explained variance": Effect("ppo/val/var_explained"),
        },
        last=10,
        seeds=5,
        minutes=3.0,
        file="ablations",
    ),
    "posts": World(
        chapter=2,
        scripts=("tldr_sft", "tldr_reward", "tldr_policy"),
        stages={
            "sft": "ppo_rlhf/tldr_sft.py --preset posts --eval_posts 64",
            "reward": "ppo_rlhf/tldr_reward.py --preset posts --num_train 2048 --base_model {sft}",
            "policy": f"ppo_rlhf/tldr_policy.py --preset posts --ppo.total_episodes 1536 {QUIET} --eval_interval 0 "
            "--eval_posts 64 --base_model {sft} --rewards.trained_model {reward}",
        },
        effects={
            "gold score": Effect("objective/gold_scores"),
            "KL": Effect("objective/kl"),
            "highest KL": Effect("objective/kl", highest=True),
            "length": Effect("objective/response_length"),
            "end (%)": Effect("val/num_eos_tokens", unit=0.64),  # of 64 summaries
            "explained variance": Effect("val/var_explained"),
        },
        last=5,
        seeds=5,
        minutes=2.5,
        file="posts",
    ),
    "sums": World(
        chapter=3,
        scripts=("rlvr_policy",),
        stages={
            # The coefficient is there because the KL is only measured where it is penalised.
            "policy": f"ppo_rlhf/rlvr_policy.py --preset sums-grpo --ppo.total_episodes 4096 {QUIET} "
            "--save_interval 0 --eval_samples 1 --eval_interval 0 --rewards.kl_coef 1e-12",
        },
        effects={
            "correct (%)": Effect("objective/verifiable_correct_rate", unit=0.01),
            "KL": Effect("objective/kl"),
            "highest KL": Effect("objective/kl", highest=True),
            "length": Effect("val/sequence_lengths"),
            "entropy": Effect("policy/entropy_avg"),
            "sampler gap (0.001 nats)": Effect("objective/sampler_gap", unit=0.001),
        },
        last=3,
        seeds=5,
        minutes=1.0,
        file="sums",
    ),
}
SHARED_STAGE = "sft"  # one model for all seeds, as they share one world
LEAST_MINUTES = {"sft": 2.0, "reward": 1.0}  # of an earlier stage, on one core


def chain(world: World, name: str) -> list[str]:
    """An ablation after those that it is compared with, one after another, the baseline first."""
    return [name] if name == "baseline" else [*chain(world, world.ablations[name].against), name]


def merged(world: World, name: str) -> Ablation:
    """An ablation with the changes of what it is compared with."""
    own, parts = world.ablations[name], [world.ablations[part] for part in chain(world, name)]
    return Ablation(
        *(own.detail, own.what),
        policy=tuple(word for part in parts for word in part.policy),
        reward=tuple(word for part in parts for word in part.reward),
        lines={old: new for part in parts for old, new in part.lines.items()},
        own_reward_model=any(part.own_reward_model for part in parts),
        against=own.against,
    )


def is_setting(world: World, name: str) -> bool:
    """Whether others are compared with it, or it is one of those that are."""
    ablations = world.ablations
    settings = {ablation.against for ablation in ablations.values()} - {"baseline"}
    return name in settings or ablations[name].against in settings


# ---- One of them -----------------------------------------------------------------------------------------------


def replaced(source: str, lines: dict[str, str]) -> tuple[str, set[str]]:
    """A script's text with the lines of an ablation in it, and those that it had."""
    found = {old for old in lines if old in source}
    for old in found:
        source = source.replace(old, lines[old])
    return source, found


def change_scripts(ablation: Ablation, scripts: Sequence[str]) -> dict[str, types.ModuleType]:
    """The training scripts as modules, with the ablation's lines in them. Raises InputError if a line is nowhere."""
    specs = {name: importlib.util.find_spec(f"ppo_rlhf.{name}") for name in scripts}
    changed = {name: replaced(Path(spec.origin).read_text(), ablation.lines) for name, spec in specs.items()}
    if missing := set(ablation.lines).difference(*(found for _, found in changed.values())):
        raise InputError(f"no training script has what this ablation replaces: {'; '.join(sorted(missing))}")
    modules: dict[str, types.ModuleType] = {}
    for name, spec in specs.items():
        modules[name] = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = modules[name]  # train_both.py imports the other two
        setattr(sys.modules["ppo_rlhf"], name, modules[name])
        exec(compile(changed[name][0], spec.origin, "exec", dont_inherit=True), modules[name].__dict__)
    return modules


def world_of(script: str) -> World:
    """The world in whose scripts this one is."""
    for world in WORLDS.values():
        if Path(script).stem in world.scripts:
            return world
    known = [f"ppo_rlhf/{name}.py" for world in WORLDS.values() for name in world.scripts]
    raise InputError(f"{script} is none of {', '.join(known)}")


def with_ablation(name: str, script: str, argv: list[str]) -> Callable[[], Any]:
    """What `python <script> <argv>` does, with an ablation, as a function without arguments."""
    world, kind = world_of(script), Path(script).stem
    if name not in world.ablations:
        raise InputError(f"{name} is none of the ablations of chapter {world.chapter}: {', '.join(world.ablations)}")
    ablation = merged(world, name)
    module = change_scripts(ablation, world.scripts)[kind]
    if kind == "train_both":
        for part, words in (("policy", ablation.policy), ("reward", ablation.reward)):
            argv = [*argv, *(f"--{part}.{word.removeprefix('--')}" if word[:2] == "--" else word for word in words)]
        return lambda: module.train(module.parse(argv))
    words = {"policy": ablation.policy, "reward": ablation.reward}.get(kind.rpartition("_")[2], ())
    return lambda: module.train(cli.parse_args(module.PRESETS, [*argv, *words], module.__doc__))


# ---- All of them -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Args:
    world: tuple[Literal["tales", "posts", "sums"], ...] = ("tales", "posts", "sums")
    """which worlds"""
    only: tuple[str, ...] = ()
    """which ablations, with what they are compared with; empty: all of those worlds"""
    seeds: int = 0
    """how many seeds of each; 0: as many as the world plans"""
    workers: int = 1
    """how many runs at once"""
    folder: Path = ROOT / "benchmark" / "runs" / "ablations"
    """where runs are kept"""
    output: Path = ROOT / "benchmark" / "results" / "ablations"
    """folder that gets a CSV and a table for each world"""
    atlas: Path = ROOT / "docs/reference/atlas.md"
    """page whose generated tables are replaced; it must exist"""
    pictures: Path = ROOT / "static"
    """folder that gets atlas.png"""
    stages: tuple[str, ...] = ()
    """other commands of stages than the world's, as world.stage=command; for tests"""
    again: bool = False
    """run what the CSVs have, too"""
    any_commit: bool = False
    """go on with runs that another commit of this project began"""


def stages_of(args: Args, kind: str) -> dict[str, str]:
    """The commands of a world's stages."""
    given = dict(word.split("=", 1) for word in args.stages)
    return {stage: given.get(f"{kind}.{stage}", command) for stage, command in WORLDS[kind].stages.items()}


def owner(world: World, name: str, stage: str) -> str:
    """The ablation whose model of an earlier stage an ablation uses: the first one with the same changes to it."""
    own = merged(world, name)
    if stage == "reward" and (own.reward or own.own_reward_model):
        return name
    return "baseline"


def jobs_of(args: Args, kind: str, stage: str, name: str, seed: int) -> list[many_seeds.Job]:
    """The job of one stage of one ablation with one seed. Models of earlier stages must be there."""
    command, world = stages_of(args, kind)[stage], WORLDS[kind]
    for earlier in world.stages:
        if "{" + earlier + "}" in command:
            command = command.replace("{" + earlier + "}", model_of(args, kind, earlier, name, seed))
    experiment = many_seeds.Args(
        name=f"{stage}-{name}",
        command=f"python {shlex.quote(__file__)} with {name} {command} --exp_name {name}",
        num_seeds=1,
        start_seed=seed,
        folder=args.folder / kind,
        any_commit=args.any_commit,
    )
    return many_seeds.find_jobs(experiment)


def model_of(args: Args, kind: str, stage: str, name: str, seed: int) -> str:
    """The folder of the model that an earlier stage has trained for an ablation."""
    job = f"{stage}-{owner(WORLDS[kind], name, stage)}"
    seed = 1 if stage == SHARED_STAGE else seed
    (folder,) = ((args.folder / kind).resolve() / job / f"seed{seed}" / "models").glob(f"*/{stage}")
    return shlex.quote(str(folder))


def wanted(args: Args, kind: str) -> list[tuple[str, int]]:
    """Which ablations and seeds of a world are to be trained: what was asked for and is not in the CSV yet."""
    world, names = WORLDS[kind], dict.fromkeys(["baseline"])
    for name in args.only or world.ablations:
        if name in world.ablations:
            names |= dict.fromkeys(chain(world, name))
    kept = pd.DataFrame() if args.again else kept_effects(args, kind)
    had = set() if kept.empty else set(zip(kept["ablation"], kept["seed"], strict=True))
    seeds = range(1, (args.seeds or world.seeds) + 1)
    return [(name, seed) for seed in seeds for name in names if (name, seed) not in had]  # a seed of all first


def run(args: Args) -> int:
    """Train the models of earlier stages, then the policies, and report. Returns the exit status."""
    known = [name for kind in args.world for name in WORLDS[kind].ablations]
    if unknown := sorted(set(args.only) - set(known)):
        raise InputError(f"--only {' '.join(unknown)}: there are {', '.join(dict.fromkeys(known))}")
    launcher, done = many_seeds.Args(name="ablations", workers=args.workers), []
    for kind in args.world:
        world, pairs = WORLDS[kind], wanted(args, kind)
        for stage in world.stages:
            of_stage = pairs
            if stage != "policy":
                of_stage = [(owner(world, name, stage), seed) for name, seed in pairs]
            if stage == SHARED_STAGE:
                of_stage = [(name, 1) for name, _ in of_stage]
            jobs = [job for pair in dict.fromkeys(of_stage) for job in jobs_of(args, kind, stage, *pair)]
            many_seeds.run_here(launcher, jobs)
            if stage != "policy" and any(job.state != "finished" for job in jobs):
                return many_seeds.report(launcher, jobs)
        done += jobs
    report(args)
    return many_seeds.report(launcher, done) if done else 0


# ---- Report ----------------------------------------------------------------------------------------------------


def kept_effects(args: Args, kind: str) -> pd.DataFrame:
    """The rows of a world's CSV; none if there is no CSV."""
    path = args.output / f"{WORLDS[kind].file}.csv"
    return pd.read_csv(path, dtype={"commit": str}) if path.exists() else pd.DataFrame()


def read_effects(args: Args, kind: str) -> pd.DataFrame:
    """One row per finished policy: ablation, seed, effects and commit. Rows of the CSV stay where none is newer."""
    world, rows = WORLDS[kind], []
    for name in world.ablations:
        for file in sorted((args.folder / kind / f"policy-{name}").glob("seed*/runs/*/meta.json")):
            meta = read_meta(file.parent)
            if not meta["finished"]:
                continue
            table = read_numbers(file.with_name("metrics.csv"))
            effects = {}
            for label, effect in world.effects.items():
                column = table[effect.column]
                found = column.max() if effect.highest else column.tail(world.last).mean()
                effects[label] = float(f"{float(found) / effect.unit:.6g}")  # the CSV keeps no more
            seed = int(file.parents[2].name.removeprefix("seed"))
            rows.append({"ablation": name, "seed": seed, **effects, "commit": meta["commit"][:7]})
    both = pd.concat([kept_effects(args, kind), pd.DataFrame(rows)], ignore_index=True)
    if both.empty:
        return both
    both = both.drop_duplicates(["ablation", "seed"], keep="last")
    order = {name: number for number, name in enumerate(world.ablations)}
    both = both.assign(order=both["ablation"].map(order)).sort_values(["order", "seed"], ignore_index=True)
    return both[["ablation", "seed", *world.effects, "commit"]]


def failures(args: Args, kind: str, name: str) -> int:
    """How many seeds of an ablation's policy ended in an error, such as a number that was not finite any more."""
    folders = (args.folder / kind / f"policy-{name}").glob("seed*")
    return sum(bool(many_seeds.read_record(folder).get("status")) for folder in folders)


def differences(effects: pd.DataFrame, world: World) -> pd.DataFrame:
    """Mean and interval of each ablation's difference from what it is compared with, seed by seed; `p` of the reward.

    Of the baseline, itself.
    """
    measured = list(world.effects)
    by_seed = {name: own.set_index("seed")[measured] for name, own in effects.groupby("ablation", sort=False)}
    rows = []
    for name, own in by_seed.items():
        values, against = own, world.ablations[name].against
        if name != "baseline":
            if against not in by_seed:
                continue
            values = (own - by_seed[against]).dropna(how="all")  # of seeds that both have
        if not len(values):
            continue
        row: dict[str, Any] = {"ablation": name, "detail": world.ablations[name].detail, "seeds": len(values)}
        for effect in measured:
            row[effect], row[f"{effect} +-"] = lab.interval(list(values[effect]))
        row["p"] = math.nan if name == "baseline" else lab.p_value(list(values[world.reward]))
        rows.append(row)
    return pd.DataFrame(rows)


def cell(mean: float, half: float, *, sign: bool, bold: bool) -> str:
    """Mean and interval; in bold where the interval leaves out 0, if asked for."""
    text = f"{mean:{'+' if sign else ''}.2f} ± {half:.2f}" if math.isfinite(half) else f"{mean:{'+' * sign}.2f}"
    return f"**{text}**" if bold and abs(mean) > half else text


def row_of(world: World, name: str, effects: dict[str, Any] | None, failed: int) -> dict[str, str]:
    """An ablation's row of the table. effects: its row of `differences`; None if no seed is finished."""
    ablation = world.ablations[name]
    cells = {
        "detail": f"[{ablation.detail}](../../../docs/reference/chapter{world.chapter}.md#{ablation.detail})",
        "ablation": f"`{name}`",
        "what is different": ablation.what,
        "seeds": f"{effects['seeds'] if effects else 0}{f', {failed} failed' if failed else ''}",
    }
    cells["detail"] = cells["detail"] if ablation.detail else ""
    if is_setting(world, name):
        cells["compared with"] = f"`{ablation.against}`"
    for effect in world.effects:
        plain = name != "baseline"
        cells[effect] = cell(effects[effect], effects[f"{effect} +-"], sign=plain, bold=plain) if effects else ""
    return cells


def report(args: Args) -> int:
    """Write tables and pictures of what is finished, and the generated parts of the atlas."""
    tables: dict[str, pd.DataFrame] = {}
    for kind in args.world:
        effects = read_effects(args, kind)
        if effects.empty or "baseline" not in set(effects["ablation"]):
            continue
        world, tables[kind] = WORLDS[kind], differences(effects, WORLDS[kind])
        args.output.mkdir(parents=True, exist_ok=True)
        effects.to_csv(args.output / f"{world.file}.csv", index=False, float_format="%.6g")
        finished = {row["ablation"]: row for row in tables[kind].to_dict("records")}
        failed = {name: failures(args, kind, name) for name in world.ablations}
        commits = f"commit: {', '.join(sorted(set(effects['commit'])))}"
        for ending, special in (("", False), ("-settings", True)):
            names = [name for name in world.ablations if is_setting(world, name) == special]
            if shown := [name for name in names if name in finished or failed[name]]:
                text = markdown([row_of(world, name, finished.get(name), failed[name]) for name in shown])
                (args.output / f"{world.file}{ending}.md").write_text(f"{text}\n{commits}\n")
                print(text)
    if not tables:
        raise InputError(f"no baseline in {args.folder} or {args.output} is finished yet")
    args.pictures.mkdir(parents=True, exist_ok=True)
    if args.atlas.exists():
        write_atlas(args, tables)
    return 0


# ---- The atlas -------------------------------------------------------------------------------------------------

BEGIN, END = "<!-- generated by ablations.py: {} -->\n", "<!-- end -->\n"


def all_differences(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """The effects of all worlds on the reward, without baselines, with Holm's correction over all of them."""
    rows = []
    for kind, table in tables.items():
        world = WORLDS[kind]
        for row in table[table["ablation"] != "baseline"].to_dict("records"):
            effect = {"effect": row[world.reward], "half": row[f"{world.reward} +-"]}
            rows.append({"world": kind, "name": row["ablation"], "seeds": row["seeds"], "p": row["p"], **effect})
    found = pd.DataFrame(rows)
    return found.assign(holm=lab.holm(list(found["p"]))) if len(found) else found


def atlas_rows(kind: str, table: pd.DataFrame | None, every: pd.DataFrame) -> list[dict[str, str]]:
    """A row for each ablation of a world, those that have not been run too."""
    world, rows = WORLDS[kind], []
    finished = {} if table is None else {row["ablation"]: row for row in table.to_dict("records")}
    corrected = {} if every.empty else every[every["world"] == kind].set_index("name")["holm"].to_dict()
    for name, ablation in world.ablations.items():
        if name == "baseline":
            continue
        row, own = finished.get(name), f'<a id="{kind}-{name}"></a>`{name}`: {ablation.what}'
        cells = {
            "detail": f"[{ablation.detail}](chapter{world.chapter}.md#{ablation.detail})",
            "change": own if ablation.against == "baseline" else f"{own}, compared with `{ablation.against}`",
            "why": ablation.why or world.ablations[ablation.against].why,
        }
        for effect in [e for e in world.effects if e in (world.reward, "KL", "highest KL", "length", "end (%)")]:
            shown = cell(row[effect], row[f"{effect} +-"], sign=True, bold=True) if row else "not yet run"
            cells[effect] = shown if row or effect == world.reward else ""
        p = corrected.get(name, math.nan)
        cells["p, Holm"] = "" if math.isnan(p) else f"{p:.3f}" if p >= 0.001 else "< 0.001"
        rows.append(cells | {"seeds": str(row["seeds"]) if row else "0"})
    return rows


def write_atlas(args: Args, tables: dict[str, pd.DataFrame]) -> None:
    """Replace the generated parts of the page, from the CSVs of all worlds, and draw its picture."""
    for kind in WORLDS:
        effects = kept_effects(args, kind)
        if kind not in tables and not effects.empty:
            tables[kind] = differences(effects, WORLDS[kind])
    tables = {kind: tables[kind] for kind in WORLDS if kind in tables}
    every, page = all_differences(tables), args.atlas.read_text()
    counted = 0 if every.empty else int(every["p"].notna().sum())
    left = [] if every.empty else list(every[every["holm"] < 0.05].sort_values("holm")["name"])
    planned = sum(len(world.ablations) - 1 for world in WORLDS.values())
    parts = {kind: markdown(atlas_rows(kind, tables.get(kind), every)) for kind in WORLDS}
    parts["count"] = (
        f"{len(every)} of {planned} changes have been run, {counted} of them with two seeds or more. After Holm's "
        f"correction for {counted} comparisons, {len(left)} effects on the reward are left at the 5 % level"
        + (f": {', '.join(f'`{name}`' for name in left)}.\n" if left else ".\n")
    )
    for name, text in parts.items():
        before, begin, rest = page.partition(BEGIN.format(name))
        if not begin:
            raise InputError(f"{args.atlas} has no line {BEGIN.format(name).strip()}")
        page = f"{before}{begin}\n{text}\n{END}{rest.partition(END)[2]}"
    args.atlas.write_text(page)
    if not every.empty:
        draw_atlas(every, args.pictures / "atlas.png")


PICTURE = {  # twelve changes in words: those that people ask about, with and without an effect
    "tales": {
        "lambda-0": "λ = 0 instead of 0.95",
        "gamma-0.9": "γ = 0.9 instead of 1",
        "one-epoch": "one epoch per batch instead of four",
        "no-policy-clipping": "policy loss not clipped",
        "lambda-1": "λ = 1 instead of 0.95",
        "no-kl": "no KL penalty",
    },
    "posts": {
        "no-kl": "no KL penalty",
        "temperature-1": "temperature 1 instead of 0.7",
        "comparisons-256": "256 comparisons instead of 2,048",
    },
    "sums": {
        "critic-lambda-0": "critic with λ = 0 instead of 0.95",
        "many-steps": "32 optimiser steps per batch instead of 2",
        "no-clip": "policy loss not clipped",
    },
}
UNITS = {"tales": "gold score", "posts": "gold score", "sums": "correct samples, points"}


def draw_atlas(every: pd.DataFrame, path: Path) -> None:
    """The effects of PICTURE on the reward, one panel per world in its own unit; filled where Holm leaves them."""
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    panels = figure.subplots(len(PICTURE), 1, height_ratios=[len(names) for names in PICTURE.values()])
    for axes, (kind, words) in zip(panels, PICTURE.items(), strict=True):
        rows = every[every["world"] == kind].set_index("name")
        for i, name in enumerate(name for name in words if name in rows.index):
            row = rows.loc[name]
            color = "black" if math.isnan(row["half"]) else "#d55e00" if row["effect"] < 0 else "#0072b2"
            face = color if row["holm"] < 0.05 else "white"
            axes.errorbar(row["effect"], i, xerr=row["half"], fmt="o", ms=6, color=color, mfc=face, lw=1.5, capsize=3)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_yticks(range(len(words)), words.values(), fontsize=9)
        axes.set_ylim(len(words) - 0.5, -0.5)
        axes.set_title(f"chapter {WORLDS[kind].chapter}, {kind}: change of the {UNITS[kind]}", fontsize=9, loc="left")
        axes.tick_params(axis="x", labelsize=8)
        axes.grid(axis="x", alpha=0.3)
    note = f"95 % intervals over five seeds; filled: significant after Holm's correction for all {len(every)} changes"
    figure.supxlabel(note, fontsize=9)
    figure.savefig(path, dpi=110)


def list_all(args: Args) -> int:
    """Print all ablations with the number of seeds that have run, and how long the others would take."""
    total = 0.0
    for kind in args.world:
        world, kept = WORLDS[kind], kept_effects(args, kind)
        counts = {} if kept.empty else kept["ablation"].value_counts().to_dict()
        missing = len(wanted(args, kind))
        minutes = missing * world.minutes + sum(
            LEAST_MINUTES[stage] * (1 if stage == SHARED_STAGE else world.seeds * (1 + own_reward_models(world)))
            for stage in world.stages
            if stage != "policy" and missing
        )
        total += minutes
        print(f"\n{kind}, chapter {world.chapter}: {minutes / 60:.1f} hours of one core are left")
        for name, own in world.ablations.items():
            print(f"{counts.get(name, 0)} of {world.seeds} seeds  {name:42} {own.detail:5} {own.what}")
    print(f"\nall: {total / 60:.1f} hours of one core")
    return 0


def own_reward_models(world: World) -> int:
    """How many ablations have reward models of their own."""
    return sum(owner(world, name, "reward") == name for name in world.ablations if name != "baseline")


def main(argv: list[str]) -> int:
    if argv[:1] == ["with"] and len(argv) >= 3:
        run_script(with_ablation(argv[1], argv[2], argv[3:]))
        return 0
    return lab.command_line({"run": run, "report": report, "list": list_all}, Args, __doc__, argv)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as error:
        exit_with(str(error))
