"""What small changes of small/ppo.py and small/grpo.py do in ten updates: the numbers of docs/experiments.md.

    python benchmark/experiments/small_changes.py --only off-by-one --seeds 1
    python benchmark/experiments/small_changes.py --output benchmark/results/small_changes/runs.csv \
        --page docs/experiments.md

A change is a set of flags, or an edit that is made in memory; the small files stay as they are. All seeds of
small/ppo.py share the reward model of seed 1. A row of the CSV is one run: means over its last three updates, and for
small/grpo.py the share of held-out problems solved. Runs that the CSV has are not made again. The tables are printed,
and written into the page.
"""

import argparse
import contextlib
import functools
import io
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pandas as pd
import tyro

from benchmark import lab

ROOT = Path(__file__).resolve().parents[2]
LAST = 3  # updates that are averaged
UPDATE = re.compile(
    r"(score|gold score|KL|value loss) (-?[\d.]+|nan)|([\d.]+|nan)% (clipped|correct)|([\d.]+) (tokens)"
)
HELD_OUT = re.compile(r"([\d.]+)% of the held-out problems")
KEYS = ("change", "seed", "commit")
BEGIN, END = "<!-- tables of small_changes.py -->", "<!-- end -->"
COLUMNS = ("score", "gold score", "KL", "largest KL", "clipped", "value loss", "correct", "tokens", "held out")


@dataclass(frozen=True)
class Args:
    only: tuple[str, ...] = ()
    """which changes; none: all"""
    seeds: int = 3
    """how many seeds of each"""
    updates: int = 10
    """updates of each run"""
    output: Path | None = None
    """the CSV that gets a row for each run"""
    page: Path | None = None
    """the page that gets the tables"""


@dataclass(frozen=True, kw_only=True)
class Change:
    flags: str = ""
    old: str = ""
    new: str = ""
    """text that takes the place of `old`, which the file has once"""
    file: str = "ppo"


SCORES = "raw_scores = reward_model(truncated)"
LENGTHS = "raw_scores = ((truncated[:, QUERY_LENGTH:] != PAD).sum(1) - 20) / 4"
WHITENED = "            advantages = whiten(advantages, keep_mean=False)\n"
CHANGES = {
    "ppo": Change(),
    "no-penalty": Change(flags="--kl_coef 0"),
    "lambda-0": Change(flags="--lam 0"),
    "lambda-1": Change(flags="--lam 1"),
    "no-critic": Change(flags="--value_coef 0"),
    "16-epochs": Change(flags="--epochs 16"),
    "16-epochs-no-clip": Change(flags="--epochs 16 --clip 1e9"),
    "rate-times-10": Change(flags="--lr 2e-3"),
    "length": Change(old=SCORES, new=LENGTHS),
    "scores-plus-10": Change(old=SCORES, new=SCORES.replace("(truncated)", "(truncated) + 10")),
    "off-by-one": Change(old="[:, -RESPONSE_LENGTH - 1 : -1]", new="[:, -RESPONSE_LENGTH:]"),
    "not-whitened": Change(old=WHITENED),
    "wrong-stop": Change(
        old='stop = tokenizer.encode(".")[0]\n    kl_coef', new='stop = tokenizer.encode("!")[0]\n    kl_coef'
    ),
    "k3-in-the-reward": Change(old="rewards = -kl_coef * kl ", new="rewards = -kl_coef * (torch.exp(-kl) - 1 + kl) "),
    "grpo": Change(file="grpo"),
    "groups-of-2": Change(flags="--group 2 --prompts 128", file="grpo"),
    "groups-of-16": Change(flags="--group 16 --prompts 16", file="grpo"),
}


# ---- One run ---------------------------------------------------------------------------------------------------


def source_of(change: Change) -> str:
    text = (ROOT / f"ppo_rlhf/small/{change.file}.py").read_text()
    if change.old:
        assert text.count(change.old) == 1, change.old
        text = text.replace(change.old, change.new)
    return text


def module_of(change: Change) -> ModuleType:
    """The small file with a change. What all runs share is made once; the evaluation before training is skipped."""
    module = ModuleType(change.file)
    module.__file__ = str(ROOT / f"ppo_rlhf/small/{change.file}.py")  # Its world is found next to it.
    exec(compile(source_of(change), module.__file__, "exec"), vars(module))
    if change.file == "ppo":
        module.read_queries = functools.partial(once, "queries", few_held_out(module.read_queries))
        module.train_reward_model = functools.partial(once, "reward model", with_seed_1(module.train_reward_model))
    else:
        evaluations = iter([lambda *_: None, module.evaluate])  # before training, and after it
        module.evaluate = lambda *arguments: next(evaluations)(*arguments)
    return module


MADE: dict[tuple, object] = {}


def once(name: str, make, first, *rest, **options):
    """What make returns, kept by the folder of its world."""
    key = (name, str(getattr(first, "world", first)), *options.items())
    if key not in MADE:
        MADE[key] = make(first, *rest, **options)
    return MADE[key]


def with_seed_1(train):
    return lambda args, *rest: train(argparse.Namespace(**vars(args) | {"seed": 1}), *rest)


def few_held_out(read_queries):
    return lambda *where, held_out=False: read_queries(*where, held_out=held_out)[: 1 if held_out else None]


class Echo(io.StringIO):
    """Keeps what is printed, and prints it."""

    def write(self, text: str) -> int:
        sys.__stdout__.write(text)
        return super().write(text)


def measure(name: str, words: list[str]) -> dict[str, float]:
    """Run a change with further words of the command line, and read what it prints."""
    change, printed = CHANGES[name], Echo()
    module = module_of(change)
    with patch.object(sys, "argv", [name, *change.flags.split(), *words]), contextlib.redirect_stdout(printed):
        module.main()
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("update ")]
    rows = [{a or d or f: float(b or c or e) for a, b, c, d, e, f in UPDATE.findall(line)} for line in lines]
    table = pd.DataFrame(rows)
    found = table.tail(LAST).mean().to_dict()
    if "KL" in table:
        found["largest KL"] = table["KL"].max()
    return found | dict(zip(["held out"], map(float, HELD_OUT.findall(printed.getvalue())), strict=False))


# ---- All runs, and their tables --------------------------------------------------------------------------------


def cell(values: pd.Series) -> str:
    """The mean, and half of its 95 % interval by Student's t."""
    if values.isna().any():
        return ""
    mean, half = lab.interval(list(values))  # half is NaN for one seed
    digits = 1 if abs(mean) >= 10 or half >= 10 else 2
    return f"{mean:.{digits}f}" + f"\u00a0±\u00a0{half:.{digits}f}" * (len(values) > 1)


def tables(runs: pd.DataFrame) -> str:
    shown = {"ppo": ["score", "gold score", "KL", "largest KL", "clipped", "value loss"]}
    shown["grpo"] = ["correct", "tokens", "held out"]
    found = []
    for file, columns in shown.items():
        found.append("| change | seeds | " + " | ".join(columns) + " |\n|---|" + "--:|" * (1 + len(columns)))
        for name in (name for name, change in CHANGES.items() if change.file == file):
            own = runs[runs["change"] == name]
            if len(own):
                found[-1] += (
                    f"\n| `{name}` | {len(own)} | " + " | ".join(cell(own[column]) for column in columns) + " |"
                )
    return "\n\n".join(found)


def main(args: Args) -> None:
    commit = subprocess.run(
        ["git", "log", "-1", "--format=%h", "--abbrev=7", "--", "ppo_rlhf/small"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    runs = pd.read_csv(args.output).to_dict("records") if args.output and args.output.is_file() else []
    for seed in range(1, args.seeds + 1):
        for name in args.only or CHANGES:
            if any((row["change"], row["seed"]) == (name, seed) for row in runs):
                continue
            print(f"\n{name}, seed {seed}", flush=True)
            found = measure(name, ["--updates", str(args.updates), "--seed", str(seed)])
            runs.append({"change": name, "seed": seed, "commit": commit.stdout.strip()} | found)
            if args.output:
                pd.DataFrame(runs, columns=[*KEYS, *COLUMNS]).round(4).to_csv(args.output, index=False)
    found = tables(pd.DataFrame(runs, columns=[*KEYS, *COLUMNS]))
    print(f"\n{found}")
    if args.page:
        before, after = args.page.read_text().split(f"{BEGIN}\n")[0], args.page.read_text().split(END)[1]
        args.page.write_text(f"{before}{BEGIN}\n{found}\n{END}{after}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
