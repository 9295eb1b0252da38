"""A real language model learns arithmetic: rlvr_policy.py with the preset arithmetic, five seeds of three methods.

    python benchmark/experiments/arithmetic.py run                     # all of them; repeat it to resume
    python benchmark/experiments/arithmetic.py run --only dr_grpo      # some of them, by name
    python benchmark/experiments/arithmetic.py table                   # the table of what has finished

`dr_grpo` is the preset. `gae` has a critic in place of the groups' means, which learns alone at first, and
`reinforce++` has neither. All else is the same, and so are the problems and the noise of a seed.

Next to what is learned, the table has what is forgotten: the log-prob of the language model's own answers to general
questions (forgetting.py). Means have 95 % intervals over seeds, Student's.
"""

import json
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from benchmark.curves import many_seeds
from benchmark.curves.compare import markdown, read_numbers
from benchmark.experiments import forgetting
from benchmark.experiments.estimators import cell
from ppo_rlhf.lib import rewards
from ppo_rlhf.lib.errors import InputError, exit_with
from ppo_rlhf.lib.files import read_json, write_json
from ppo_rlhf.lib.run import read_meta

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "ppo_rlhf/rlvr_policy.py"
VARIANTS = {
    "dr_grpo": "",
    "gae": "--ppo.advantage gae --ppo.critic_warmup 3",
    "reinforce++": "--ppo.advantage reinforce++",
}


@dataclass(frozen=True)
class Args:
    only: tuple[str, ...] = tuple(VARIANTS)
    """which runs"""
    seeds: int = 5
    """how many seeds of each"""
    first_seed: int = 1
    """the first of them"""
    workers: int = 1
    """how many runs at once"""
    folder: Path = ROOT / "benchmark" / "runs" / "arithmetic"
    """where runs are kept"""
    output: Path = ROOT / "benchmark" / "results" / "arithmetic"
    """folder that gets runs.csv, answers.jsonl and arithmetic.md"""
    policy: str = "--preset arithmetic --log_interval 0"
    """what all runs have in common: arguments of rlvr_policy.py"""
    any_commit: bool = False
    """go on with runs that another commit of this project began"""


def jobs_of(args: Args, name: str, seeds: Iterable[int]) -> list[many_seeds.Job]:
    """The jobs of one variant, one for each seed."""
    command = f"python {shlex.quote(str(SCRIPT))} {args.policy} {VARIANTS[name]}"
    common = {"name": name, "command": command, "num_seeds": 1, "folder": args.folder}
    experiments = (many_seeds.Args(**common, start_seed=seed, any_commit=args.any_commit) for seed in seeds)
    return [job for experiment in experiments for job in many_seeds.find_jobs(experiment)]


def seeds_of(args: Args) -> range:
    return range(args.first_seed, args.first_seed + args.seeds)


def run(args: Args) -> int:
    """Train all policies and write the table. Returns the exit status."""
    if unknown := set(args.only) - set(VARIANTS):
        raise InputError(f"--only {' '.join(sorted(unknown))}: there are {', '.join(VARIANTS)}")
    jobs = [job for name in args.only for job in jobs_of(args, name, seeds_of(args))]
    jobs.sort(key=lambda job: job.seed)  # a whole comparison of one seed first
    launcher = many_seeds.Args(name="arithmetic", workers=args.workers)
    many_seeds.run_here(launcher, jobs)
    if any(job.state == "finished" for job in jobs):
        table(args)
    return many_seeds.report(launcher, jobs)


def what_is_forgotten(run: Path, base_model: str) -> dict[str, Any]:
    """Of the policy of a run: forgetting.measure, which is kept next to the run's other results."""
    kept = run / "forgetting.json"
    if not kept.is_file():
        write_json(kept, forgetting.measure(str(run.parents[1] / "models" / run.name / "policy"), base_model))
    return read_json(kept)


LAST = 3  # updates at the end that are averaged
SHARES = {"greedy": "eval/gsm8k_flexible", "samples": "eval/mean@4", "pass@4": "eval/pass@4", "ends": "eval/stopped"}
CURVES = {"entropy": "policy/entropy_avg", "equal groups": "val/groups_zero_std", "KL": "objective/kl"}


def row_of(run: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a finished run, before and after."""
    table, after = read_numbers(run / "metrics.csv"), meta["results"]
    found: dict[str, Any] = {}
    for name, column in SHARES.items():
        found |= {f"{name} before": table[column].iloc[0], f"{name} after": after[column]}
    for name, column in CURVES.items():
        found |= {f"{name} before": table[column].iloc[0], f"{name} after": table[column].tail(LAST).mean()}
    solved = [json.loads(line) for line in (run / "evaluation.jsonl").read_text().splitlines()]
    numbers = [rewards.last_number(rewards.NUMBER, row["response"]) is not None for row in solved]
    lost = what_is_forgotten(run, meta["args"]["base_model"])
    found |= {"a number after": sum(numbers) / len(numbers)}
    found |= {f"own answers {when}": lost[when] for when in ("before", "after")}
    return found | {"minutes": meta["wall_time"] / 60, "commit": meta["commit"][:7]}


def table(args: Args) -> int:
    """Write runs.csv, answers.jsonl and the table of what is finished."""
    rows, answers = [], []
    for name in args.only:
        for seed in seeds_of(args):
            for file in (args.folder / name / f"seed{seed}" / "runs").glob("*/meta.json"):
                meta, whose = read_meta(file.parent), {"variant": name, "seed": seed}
                if meta["finished"]:
                    rows.append(whose | row_of(file.parent, meta))
                    answers += [whose | row for row in what_is_forgotten(file.parent, "")["answers"]]
    if not rows:
        raise InputError(f"{args.folder} holds no finished run")
    args.output.mkdir(parents=True, exist_ok=True)
    runs = pd.DataFrame(rows)
    runs.to_csv(args.output / "runs.csv", index=False, float_format="%.6g")
    (args.output / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    text = markdown(means_of(runs))
    commits = ", ".join(sorted(set(runs["commit"])))
    (args.output / "arithmetic.md").write_text(f"{text}\n± is a 95 % interval over seeds. commit: {commits}\n")
    print(text)
    return 0


def means_of(runs: pd.DataFrame) -> list[dict[str, str]]:
    """One row for each variant, and one for what all started from."""
    first = runs.drop_duplicates("seed").assign(variant="before")
    rows = []
    for name, own in [("before", first), *runs.groupby("variant", sort=False)]:
        when = "before" if name == "before" else "after"
        row = {"variant": f"`{name}`" if when == "after" else name, "seeds": str(len(own))}
        row |= {f"{share} (%)": cell(100 * own[f"{share} {when}"], ".1f") for share in (*SHARES, "equal groups")}
        row |= {"a number (%)": cell(100 * own["a number after"], ".1f") if when == "after" else ""}
        row |= {of: cell(own[f"{of} {when}"], ".2f") for of in ("entropy", "KL", "own answers")}
        rows.append(row | {"minutes": cell(own["minutes"], ".1f") if when == "after" else ""})
    return rows


COMMANDS = {"run": run, "table": table}

if __name__ == "__main__":
    try:
        sys.exit(many_seeds.command_line(COMMANDS, Args, __doc__, sys.argv[1:]))
    except InputError as error:
        exit_with(str(error))
