"""What single details do: each is turned off, and nothing else changes.

    python benchmark/experiments/ablations.py run --workers 2   # all of them on tales; repeat it to resume
    python benchmark/experiments/ablations.py report            # the table and picture of what has finished
    python benchmark/experiments/ablations.py list              # what there is
    # one ablation in a training script of chapter 1, here on GPT-2
    python benchmark/experiments/ablations.py with torch-adam ppo_rlhf/train_both.py --preset sentiment

The training scripts have no switches for this. Where an argument turns a detail off, it is given. Where none does,
the script's own lines are replaced before it runs, and the replacement is written here in full. Each ablation and the
baseline start from the same language model, see the same queries and draw with the same random numbers, seed by seed.
They share the reward model too, unless the detail concerns it. So the effect of a detail is the mean over seeds of a
difference, and its 95 % interval is Student's: with three seeds, 4.3 standard errors. An interval that holds 0 shows
nothing. One in twenty of the others is chance.
"""

import importlib.util
import math
import shlex
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import scipy.stats
import tyro
from matplotlib.figure import Figure

from benchmark.curves import many_seeds
from benchmark.curves.compare import markdown, read_numbers
from ppo_rlhf.lib import cli
from ppo_rlhf.lib.errors import InputError, exit_with, run_script
from ppo_rlhf.lib.run import read_meta

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("train_reward", "train_policy", "train_both")
LAST = 10  # updates at the end that are averaged
SEEDS = 3


@dataclass(frozen=True)
class Ablation:
    """One change against the baseline: arguments, or lines of the training scripts."""

    detail: str
    """id in docs/details/chapter1.md"""
    what: str
    """what is different, in words"""
    policy: tuple[str, ...] = ()
    """arguments of train_policy.py"""
    reward: tuple[str, ...] = ()
    """arguments of train_reward.py; the ablation gets a reward model of its own"""
    lines: dict[str, str] = field(default_factory=dict)
    """what to replace in the scripts, wherever it is"""
    own_reward_model: bool = False
    """whether the lines matter for the reward model too"""


POSITIONS = "position_ids = mask.cumsum(1) - mask.long()"
WHITENED = "torch.stack([whiten(group, keep_mean=False) for group in advantages.view_as(values)])"

ABLATIONS = {
    "baseline": Ablation("", "nothing"),
    "no-reward-whitening": Ablation("D55", "rewards are not whitened", policy=("--ppo.no-whiten_rewards",)),
    "no-advantage-whitening": Ablation(
        "D58", "advantages are not whitened", lines={WHITENED: "advantages.view_as(values)"}
    ),
    "no-value-clipping": Ablation("D59", "the value loss is not clipped", policy=("--ppo.cliprange_value", "1e9")),
    "no-policy-clipping": Ablation("D60", "the policy loss is not clipped", policy=("--ppo.cliprange", "1e9")),
    "fixed-kl": Ablation("D69", "the KL coefficient stays 0.15", policy=("--rewards.adaptive_kl.target", "None")),
    "no-kl": Ablation(
        "D51",
        "no KL penalty",
        policy=("--rewards.adaptive_kl.target", "None", "--rewards.kl_coef", "0"),
    ),
    "not-normalised-before": Ablation(
        "D34", "scores are not normalised before the reward model trains", reward=("--no-normalize_before",)
    ),
    "not-normalised-after": Ablation(
        "D38", "scores are not normalised after the reward model has trained", reward=("--no-normalize_after",)
    ),
    "never-normalised": Ablation("D39", "scores are never normalised", reward=("--normalize_samples", "0")),
    "torch-adam": Ablation(
        "D64",
        "Adam as PyTorch has it, with the same eps",
        lines={
            'group["eps"] = group["eps_tensorflow"] / math.sqrt(1 - group["betas"][1] ** group["steps"])': (
                'group["eps"] = group["eps_tensorflow"]'
            )
        },
    ),
    "positions-count-padding": Ablation(
        "D14",
        "position ids count the padding",
        # As if the padding of a query stood to its left and the library numbered the columns: a whole row is moved on
        # by its padding. In [x, pad, pad, a, b], x is at 2, a at 3, b at 4; without the ablation at 0, 1, 2.
        # The models are not tried first: they would be refused, because padding matters to them.
        lines={
            "    models.check_model(lm_backbone, args.base_model, longest, ids.pad, read_tokens)\n": "",
            "    models.check_model(language_model, args.base_model, longest, ids.pad, read_tokens)\n": "",
            # Nor does a pass cut padding, which would count less in it.
            "# ---- Arguments -": "passes.pack = lambda tokens, pad_id, longest: tokens\n# ---- Arguments -",
            POSITIONS: POSITIONS + " + (~mask & mask.flip(1).cummax(1).values.flip(1)).sum(1, keepdim=True)",
        },
        own_reward_model=True,
    ),
    "no-score-penalty": Ablation(
        "D50",
        "a response without a stop token keeps its score",
        lines={"scores = torch.where(stopped, raw_scores, task.penalty_reward_value)": "scores = raw_scores"},
    ),
    "constant-learning-rate": Ablation(
        "D63",
        "the learning rate stays where it starts",
        lines={"return ppo.lr * (1 - update / math.ceil(ppo.total_episodes / ppo.batch_size))": "return ppo.lr"},
    ),
    "random-value-head": Ablation(
        "D46",
        "the value head starts at random, like the reward head",
        lines={
            "nn.init.zeros_(self.value_head.weight)": (
                "nn.init.normal_(self.value_head.weight, std=1 / math.sqrt(lm_backbone.config.hidden_size + 1))"
            )
        },
    ),
    "lambda-1": Ablation("D56", "lambda = 1: advantages are returns minus values", policy=("--ppo.lam", "1")),
    "lambda-0": Ablation("D56", "lambda = 0: advantages look one token ahead", policy=("--ppo.lam", "0")),
    "gamma-0.9": Ablation("D56", "gamma = 0.9: the score fades over ten tokens", policy=("--ppo.gamma", "0.9")),
    "one-epoch": Ablation("D62", "one pass over each batch instead of four", policy=("--ppo.noptepochs", "1")),
}


# ---- One of them -----------------------------------------------------------------------------------------------


def replaced(source: str, lines: dict[str, str]) -> tuple[str, set[str]]:
    """A script's text with the lines of an ablation in it, and those that it had."""
    found = {old for old in lines if old in source}
    for old in found:
        source = source.replace(old, lines[old])
    return source, found


def change_scripts(ablation: Ablation) -> dict[str, types.ModuleType]:
    """The training scripts as modules, with the ablation's lines in them. Raises InputError if a line is nowhere."""
    specs = {name: importlib.util.find_spec(f"ppo_rlhf.{name}") for name in SCRIPTS}
    changed = {name: replaced(Path(spec.origin).read_text(), ablation.lines) for name, spec in specs.items()}
    if missing := set(ablation.lines).difference(*(found for _, found in changed.values())):
        raise InputError(f"no training script has what this ablation replaces: {'; '.join(sorted(missing))}")
    modules: dict[str, types.ModuleType] = {}
    for name, spec in specs.items():
        modules[name] = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = modules[name]  # train_both.py imports the other two
        setattr(sys.modules["ppo_rlhf"], name, modules[name])
        exec(compile(changed[name][0], spec.origin, "exec"), modules[name].__dict__)
    return modules


def with_ablation(name: str, script: str, argv: list[str]) -> Callable[[], Any]:
    """What `python <script> <argv>` does, with an ablation, as a function without arguments."""
    if name not in ABLATIONS:
        raise InputError(f"{name} is none of the ablations: {', '.join(ABLATIONS)}")
    kind = Path(script).stem
    if kind not in SCRIPTS:
        raise InputError(f"{script} is none of {', '.join(f'ppo_rlhf/{known}.py' for known in SCRIPTS)}")
    ablation = ABLATIONS[name]
    modules = change_scripts(ablation)
    if kind == "train_both":
        for part, words in (("policy", ablation.policy), ("reward", ablation.reward)):
            argv = [*argv, *(f"--{part}.{word.removeprefix('--')}" if word[:2] == "--" else word for word in words)]
        return lambda: modules["train_both"].train(modules["train_both"].parse(argv))
    words = ablation.policy if kind == "train_policy" else ablation.reward
    module = modules[kind]
    return lambda: module.train(cli.parse_args(module.PRESETS, [*argv, *words], module.__doc__))


# ---- All of them -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Args:
    only: tuple[str, ...] = tuple(ABLATIONS)
    """which ablations; the baseline always runs"""
    seeds: int = SEEDS
    """how many seeds of each"""
    workers: int = 1
    """how many runs at once"""
    folder: Path = ROOT / "benchmark" / "runs" / "ablations"
    """where runs are kept"""
    output: Path = ROOT / "benchmark" / "results" / "ablations"
    """folder that gets ablations.csv, ablations.md and ablations.png"""
    policy: str = "ppo_rlhf/train_policy.py --preset tales --ppo.total_episodes 3840 --log_interval 0"
    """what trains a policy: 60 updates"""
    reward: str = "ppo_rlhf/train_reward.py --preset tales"
    """what trains a reward model"""
    any_commit: bool = False
    """go on with runs that another commit of this project began"""


def trains_reward_model(name: str) -> bool:
    """Whether an ablation has reward models of its own; the others share the baseline's."""
    return name == "baseline" or bool(ABLATIONS[name].reward) or ABLATIONS[name].own_reward_model


def jobs_of(args: Args, name: str, kind: str, words: Callable[[int], str]) -> list[many_seeds.Job]:
    """The jobs of one ablation, one for each seed: its reward models or its policies."""
    jobs = []
    for seed in range(1, args.seeds + 1):
        experiment = many_seeds.Args(
            name=f"{kind}-{name}",
            command=f"python {shlex.quote(__file__)} with {name} {words(seed)} --exp_name {name}",
            num_seeds=1,
            start_seed=seed,
            folder=args.folder,
            any_commit=args.any_commit,
        )
        jobs += many_seeds.find_jobs(experiment)
    return jobs


def reward_model(args: Args, name: str, seed: int) -> str:
    """The reward model that an ablation's policy of this seed trains against."""
    owner = name if trains_reward_model(name) else "baseline"
    (folder,) = (args.folder / f"reward-{owner}" / f"seed{seed}" / "models").glob("*/reward")
    return str(folder)


def run(args: Args) -> int:
    """Train the reward models, then the policies, and report. Returns the exit status."""
    names = list(dict.fromkeys(["baseline", *args.only]))
    if unknown := sorted(set(names) - set(ABLATIONS)):
        raise InputError(f"--only {' '.join(unknown)}: there are {', '.join(ABLATIONS)}")
    rewards = [
        job
        for name in names
        if trains_reward_model(name)
        for job in jobs_of(args, name, "reward", lambda seed: args.reward)
    ]
    launcher = many_seeds.Args(name="ablations", workers=args.workers)
    many_seeds.run_here(launcher, rewards)
    if any(job.state != "finished" for job in rewards):
        return many_seeds.report(launcher, rewards)

    def train_policy(name: str) -> Callable[[int], str]:
        return lambda seed: f"{args.policy} --rewards.trained_model {shlex.quote(reward_model(args, name, seed))}"

    policies = [job for name in names for job in jobs_of(args, name, "policy", train_policy(name))]
    policies.sort(key=lambda job: job.seed)  # a whole comparison of one seed first
    many_seeds.run_here(launcher, policies)
    report(args)
    return many_seeds.report(launcher, policies)


# ---- Report ----------------------------------------------------------------------------------------------------

# Of a run: name, column of metrics.csv, what is taken of it.
EFFECTS: dict[str, tuple[str, Callable[[pd.Series], float]]] = {
    "gold score": ("objective/gold_scores", lambda values: values[-LAST:].mean()),
    "KL": ("objective/kl", lambda values: values[-LAST:].mean()),
    "highest KL": ("objective/kl", max),
    "explained variance": ("ppo/val/var_explained", lambda values: values[-LAST:].mean()),
}
LOGARITHMIC = {"KL": 1, "highest KL": 1}  # in the picture, beyond so much; without a penalty it is far away


def read_effects(args: Args) -> tuple[pd.DataFrame, set[str]]:
    """One row per finished policy: ablation, seed and its EFFECTS; and the commits they were made at."""
    rows, commits = [], set()
    for name in ABLATIONS:
        for seed in range(1, args.seeds + 1):
            for file in (args.folder / f"policy-{name}" / f"seed{seed}" / "runs").glob("*/meta.json"):
                meta = read_meta(file.parent)
                if not meta["finished"]:
                    continue
                table = read_numbers(file.with_name("metrics.csv"))
                commits.add(meta["commit"])
                effects = {effect: float(take(table[column])) for effect, (column, take) in EFFECTS.items()}
                rows.append({"ablation": name, "seed": seed, **effects})
    return pd.DataFrame(rows), commits


def failures(args: Args, name: str) -> int:
    """How many seeds of an ablation's policy ended in an error, such as a number that was not finite any more."""
    folders = [args.folder / f"policy-{name}" / f"seed{seed}" for seed in range(1, args.seeds + 1)]
    return sum(bool(many_seeds.read_record(folder).get("status")) for folder in folders)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval, by Student's distribution; nan with fewer than two values."""
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return mean, math.nan
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1) / count)
    return mean, float(scipy.stats.t.ppf(0.975, count - 1)) * error


def differences(effects: pd.DataFrame) -> pd.DataFrame:
    """Mean and interval of each ablation's difference from the baseline of the same seed; of the baseline, itself."""
    by_seed = effects.set_index(["ablation", "seed"])
    baseline = by_seed.loc["baseline"]
    rows = []
    for name in effects["ablation"].unique():
        own = by_seed.loc[name]
        values = own if name == "baseline" else (own - baseline).dropna()  # of seeds that both have
        if not len(values):
            continue
        row: dict[str, Any] = {"ablation": name, "detail": ABLATIONS[name].detail, "seeds": len(values)}
        for effect in EFFECTS:
            row[effect], row[f"{effect} +-"] = interval(list(values[effect]))
        rows.append(row)
    return pd.DataFrame(rows)


def row_of(name: str, effects: dict[str, Any] | None, failed: int) -> dict[str, str]:
    """An ablation's row of the table. effects: its row of `differences`; None if no seed is finished."""
    detail = ABLATIONS[name].detail
    cells = {
        "detail": f"[{detail}](../../../docs/details/chapter1.md#{detail})" if detail else "",
        "ablation": f"`{name}`",
        "what is different": ABLATIONS[name].what,
        "seeds": f"{effects['seeds'] if effects else 0}{f', {failed} failed' if failed else ''}",
    }
    for effect in EFFECTS:
        if not effects:
            cells[effect] = ""
            continue
        mean, half = effects[effect], effects[f"{effect} +-"]
        text = f"{mean:{'' if name == 'baseline' else '+'}.2f} ± {half:.2f}"
        cells[effect] = f"**{text}**" if name != "baseline" and abs(mean) > half else text
    return cells


def report(args: Args) -> int:
    """Write table and picture of what is finished."""
    effects, commits = read_effects(args)
    if effects.empty or "baseline" not in set(effects["ablation"]):
        raise InputError(f"no baseline in {args.folder} is finished yet")
    args.output.mkdir(parents=True, exist_ok=True)
    effects.to_csv(args.output / "ablations.csv", index=False, float_format="%.6g")
    table = differences(effects)
    finished = {row["ablation"]: row for row in table.to_dict("records")}
    failed = {name: failures(args, name) for name in ABLATIONS}
    names = [name for name in ABLATIONS if name in finished or failed[name]]
    text = markdown([row_of(name, finished.get(name), failed[name]) for name in names])
    (args.output / "ablations.md").write_text(f"{text}\ncommit: {', '.join(sorted(commits))}\n")
    draw(table, args.output / "ablations.png")
    print(text)
    return 0


def draw(table: pd.DataFrame, path: Path) -> None:
    """One row per ablation, one panel per effect; points with 95 % intervals, the baseline at 0."""
    others = table[table["ablation"] != "baseline"].iloc[::-1]
    figure = Figure(figsize=(10, 0.3 * len(others) + 1.2), layout="constrained")
    panels = figure.subplots(1, len(EFFECTS), sharey=True, squeeze=False)[0]
    for axes, effect in zip(panels, EFFECTS, strict=True):
        means, halves = others[effect], others[f"{effect} +-"]
        seen = [abs(mean) > half for mean, half in zip(means, halves, strict=True)]
        for i, (mean, half) in enumerate(zip(means, halves, strict=True)):
            axes.errorbar(mean, i, xerr=half, fmt="o", markersize=4, color="#d55e00" if seen[i] else "#888888")
        axes.axvline(0, color="black", linewidth=0.8)
        reach = 1.5 * max(1e-9, *(means.abs() + halves.where(seen, 0)))
        if effect in LOGARITHMIC:
            axes.set_xscale("symlog", linthresh=LOGARITHMIC[effect])
            axes.set_xticks([-100, -10, -1, 0, 1, 10, 100], ["-100", "-10", "-1", "0", "1", "10", "100"])
        axes.set_xlim(-reach, reach)
        axes.set_title(effect, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    panels[0].set_yticks(range(len(others)), others["ablation"], fontsize=8)
    figure.supxlabel("difference from the baseline; colour where the 95 % interval leaves out 0", fontsize=9)
    figure.savefig(path, dpi=110)


def main(argv: list[str]) -> int:
    command, words = (argv[0], argv[1:]) if argv else ("", [])
    if command == "with" and len(words) >= 2:
        run_script(with_ablation(words[0], words[1], words[2:]))
        return 0
    if command == "list":
        print(*(f"{name:26} {ablation.detail:5} {ablation.what}" for name, ablation in ABLATIONS.items()), sep="\n")
        return 0
    if command in ("run", "report"):
        args = tyro.cli(Args, args=words, description=__doc__)
        return run(args) if command == "run" else report(args)
    print(__doc__)
    return 0 if command in ("-h", "--help") else 2


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as error:
        exit_with(str(error))
