"""What the estimators of advantages do, and the forms of the KL penalty: chapter 3 on sums, five seeds of each.

    python benchmark/experiments/estimators.py run --workers 2    # all of them; repeat it to resume
    python benchmark/experiments/estimators.py run --only alone   # one part, and the runs that it needs
    python benchmark/experiments/estimators.py run --only divide --variants maxrl    # one of a part
    python benchmark/experiments/estimators.py report             # the tables and pictures of what has finished
    python benchmark/experiments/estimators.py draw               # the pictures again, from their tables

There are six parts. The runs of a part and a seed differ in what the part is about, and in nothing else:

    estimators   every estimator of advantages but maxrl, without a KL penalty
    divide       three answers to "divide by what?": dr_grpo by nothing, grpo by the standard deviation, maxrl by the
                 mean; with 16 samples of each problem at the end
    lengths      the group's scores divided by their standard deviation or not (grpo, dr_grpo); the losses of a
                 response divided by its own length or by the greatest
    beside       every form of the KL penalty, together with the score
    alone        the same without a score: nothing but the penalty acts. The policy starts where the run of rloo with
                 this seed has ended; the reference is the language model, as ever
    exact        the same without a language model and without chance, from STARTS starts: three tokens, responses of
                 two, the expected gradient by enumeration of all nine; see exact_course

All have the same number of episodes. Estimators that compare the responses to a prompt get GROUP of them to each, the
others get one response to each prompt.

The distance from the reference is measured in one way, whatever the penalty: log p(policy) - log p(reference), summed
over a response, mean over the batch, before the steps of the update. Its expectation is the KL divergence, in nats.

Means have 95 % intervals over seeds, Student's: with five seeds, 2.8 standard errors.
"""

import itertools
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM

from benchmark.curves import many_seeds
from benchmark.curves.compare import COLORS, markdown, read_numbers
from benchmark.experiments.ablations import interval
from ppo_rlhf import rlvr_data, rlvr_math, rlvr_metrics, rlvr_policy
from ppo_rlhf.lib import cli
from ppo_rlhf.lib.errors import InputError, exit_with, run_script
from ppo_rlhf.lib.run import read_meta

ROOT = Path(__file__).resolve().parents[2]
GROUP = 8
COEF = 0.3  # of the KL penalties: reward or loss per nat
TRUE_KL = "objective/true_kl"

# ---- What is run -----------------------------------------------------------------------------------------------

# Forms of the KL penalty, as arguments. Where nothing is penalised, there must be a reference to measure with.
PENALTIES = {
    "none": "--rewards.kl_coef 1e-12",
    "k1 in the reward": f"--rewards.kl_coef {COEF} --rewards.kl_estimator k1",
    "k2 in the reward": f"--rewards.kl_coef {COEF} --rewards.kl_estimator k2",
    "k3 in the reward": f"--rewards.kl_coef {COEF} --rewards.kl_estimator k3",
    "k1 in the loss": f"--rewards.kl_loss_coef {COEF} --rewards.kl_loss_estimator k2",  # see with_penalty
    "k2 in the loss": f"--rewards.kl_loss_coef {COEF} --rewards.kl_loss_estimator k2",
    "k3 in the loss": f"--rewards.kl_loss_coef {COEF} --rewards.kl_loss_estimator k3",
}


@dataclass(frozen=True)
class Variant:
    """Runs that differ in the seed alone."""

    part: str
    name: str
    words: str
    """arguments of rlvr_policy.py"""

    @property
    def folder(self) -> str:
        return f"{self.part}-{self.name}".replace(", ", "-").replace(" ", "-")


def advantage(name: str) -> str:
    """The arguments of an estimator."""
    group = f"--ppo.samples_per_prompt {GROUP} " if name in rlvr_math.IN_GROUPS else ""
    return f"{group}--ppo.critic_warmup {3 if name == 'gae' else 0} --ppo.advantage {name}"


def find_variants() -> list[Variant]:
    """All of them."""
    found = [Variant("estimators", name, advantage(name)) for name in rlvr_math.ESTIMATORS if name != "maxrl"]
    found += [Variant("divide", name, f"{advantage(name)} --eval_samples 16") for name in DIVIDED]
    for name in ("grpo", "dr_grpo"):
        for length, mode in {"own": "seq-mean-token-mean", "greatest": "seq-mean-token-sum-norm"}.items():
            words = f"{advantage(name)} --ppo.loss_aggregation {mode}"
            found.append(Variant("lengths", f"{name}, {length} length", words))
    penalties = {name: f"{advantage('rloo')} {words}" for name, words in PENALTIES.items()}
    found += [Variant("beside", name, words) for name, words in penalties.items()]
    found += [
        Variant("alone", name, f"{words} --rewards.verifier_weight 0")
        for name, words in penalties.items()
        if name != "none"
    ]
    return found


DIVIDED = ("dr_grpo", "grpo", "maxrl")
PARTS = ("estimators", "divide", "lengths", "beside", "alone")


def with_penalty(penalty: str, start: str, argv: list[str]) -> Callable[[], Any]:
    """What rlvr_policy.py does with these arguments and two changes, as a function without arguments.

    The metrics have TRUE_KL, and the policy starts with the weights in the folder start, if there is one; the
    reference does not. With `k1 in the loss`, which the script refuses, that takes the place of k2.
    """
    if penalty not in PENALTIES:
        raise InputError(f"{penalty} is none of the penalties: {', '.join(PENALTIES)}")
    plain = rlvr_policy.load_networks, rlvr_metrics.update_metrics

    def load_networks(*given: Any) -> tuple[Any, ...]:
        actor_critic, *others = plain[0](*given)
        if start != "-":
            actor_critic.lm_backbone.load_state_dict(AutoModelForCausalLM.from_pretrained(start).state_dict())
        return actor_critic, *others

    def update_metrics(*given: Any, episodes: rlvr_data.Rollout, **others: Any) -> dict[str, float]:
        kl = (episodes.logprobs - episodes.ref_logprobs).masked_fill(~episodes.mask, 0).sum(1)
        return plain[1](*given, episodes=episodes, **others) | {TRUE_KL: kl.mean().item()}

    def kl_in_loss(new_logprobs: Any, mb: rlvr_data.Batch, **_: Any) -> Any:
        return rlvr_math.kl_estimate(new_logprobs, mb.ref_logprobs, mb.loss_mask, "k1")

    rlvr_policy.load_networks, rlvr_metrics.update_metrics = load_networks, update_metrics
    if penalty == "k1 in the loss":
        rlvr_policy.kl_in_loss = kl_in_loss
    return lambda: rlvr_policy.train(cli.parse_args(rlvr_policy.PRESETS, argv, rlvr_policy.__doc__))


# ---- All of them -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Args:
    only: tuple[Literal["estimators", "divide", "lengths", "beside", "alone"], ...] = PARTS
    """which parts"""
    variants: tuple[str, ...] = ()
    """which variants of these parts, by name; empty: all of them"""
    seeds: int = 5
    """how many seeds of each"""
    workers: int = 1
    """how many runs at once"""
    folder: Path = ROOT / "benchmark" / "runs" / "estimators"
    """where runs are kept"""
    output: Path = ROOT / "benchmark" / "results" / "estimators"
    """folder that gets runs.csv, updates.csv and estimators.md"""
    pictures: Path = ROOT / "static"
    """folder that gets estimators.png, lengths.png and penalties.png"""
    policy: str = "--preset sums --ppo.total_episodes 4096"
    """what all runs have in common: arguments of rlvr_policy.py"""
    alone: str = "--ppo.total_episodes 2048"
    """what those without a score have besides"""
    any_commit: bool = False
    """go on with runs that another commit of this project began"""


EVALUATION = "--eval_samples 2 --eval_interval 0"  # at the end
QUIET = "--log_interval 0 --trace_interval 0 --save_interval 0"


def jobs_of(args: Args, variant: Variant, seeds: Iterable[int]) -> list[many_seeds.Job]:
    """The jobs of one variant, one for each seed."""
    jobs = []
    for seed in seeds:
        script, words = shlex.quote(str(ROOT / "ppo_rlhf/rlvr_policy.py")), variant.words
        if variant.part in ("beside", "alone"):
            start = "-"
            if variant.part == "alone":
                start, words = shlex.quote(str(last_policy(args, seed))), f"{words} {args.alone}"
            script = f"{shlex.quote(__file__)} with '{variant.name}' {start}"
        experiment = many_seeds.Args(
            name=variant.folder,
            command=f"python {script} {args.policy} {EVALUATION} {QUIET} {words}",
            num_seeds=1,
            start_seed=seed,
            folder=args.folder,
            any_commit=args.any_commit,
        )
        jobs += many_seeds.find_jobs(experiment)
    return jobs


def last_policy(args: Args, seed: int) -> Path:
    """Where the run of rloo with this seed has left its policy."""
    (folder,) = (args.folder.resolve() / "estimators-rloo" / f"seed{seed}" / "models").glob("*/policy")
    return folder


def run(args: Args) -> int:
    """Train all policies and report. Returns the exit status."""
    chosen = [variant for variant in find_variants() if variant.part in args.only]
    if unknown := set(args.variants) - {variant.name for variant in chosen}:
        names = ", ".join(variant.name for variant in chosen)
        raise InputError(f"--variants {' '.join(sorted(unknown))}: there are {names}")
    chosen = [variant for variant in chosen if variant.name in args.variants or not args.variants]
    seeds, launcher = range(1, args.seeds + 1), many_seeds.Args(name="estimators", workers=args.workers)
    starts = Variant("estimators", "rloo", advantage("rloo"))
    jobs = jobs_of(args, starts, seeds) if "alone" in args.only else []
    many_seeds.run_here(launcher, jobs)
    if all(job.state == "finished" for job in jobs):
        jobs = [job for variant in chosen for job in jobs_of(args, variant, seeds)]
        jobs.sort(key=lambda job: job.seed)  # a whole comparison of one seed first
        many_seeds.run_here(launcher, jobs)
    if any(job.state == "finished" for job in jobs):
        report(args)
    return many_seeds.report(launcher, jobs)


# ---- Exactly ---------------------------------------------------------------------------------------------------

STARTS, STEPS, RATE = 20, 100, 0.5


def exact_course(penalty: str) -> torch.Tensor:
    """KL in nats (STEPS + 1, STARTS) of a policy that only this penalty moves, by steps along its expected gradient.

    A policy is a table of logits, 3 for the first token and 3 for the second after each first one. The reference's
    are standard normal, and so is the distance of the policy's from them.
    """
    form, in_reward = penalty.split()[0], penalty.endswith("reward")
    noise = torch.Generator().manual_seed(0)
    reference = [torch.randn(STARTS, *shape, generator=noise, dtype=torch.float64) for shape in ((3,), (3, 3))]
    policy = [table + torch.randn(table.shape, generator=noise, dtype=torch.float64) for table in reference]
    first, second = torch.cartesian_prod(torch.arange(3), torch.arange(3)).T  # (9,) each

    def logprobs(tables: list[torch.Tensor]) -> torch.Tensor:  # (STARTS * 9, 2)
        both = tables[0].log_softmax(1)[:, first], tables[1].log_softmax(2)[:, first, second]
        return torch.stack(both, 2).flatten(0, 1)

    ref_logprobs, course = logprobs(reference), []
    mask, nothing = torch.ones_like(ref_logprobs, dtype=torch.bool), torch.zeros(9 * STARTS, dtype=torch.float64)
    for _ in range(STEPS + 1):
        policy = [table.detach().requires_grad_() for table in policy]
        new = logprobs(policy)
        old, probs = new.detach(), new.detach().sum(1).exp()
        course.append((probs * (old - ref_logprobs).sum(1)).view(STARTS, 9).sum(1))
        if in_reward:
            rewards, *_ = rlvr_math.compute_rewards(nothing, old, ref_logprobs, mask, 1.0, form)
            advantages, _ = rlvr_math.reinforce_pp(rewards, mask, nothing)
            losses, *_ = rlvr_math.token_losses(new, old, advantages, mask, "reinforce", low=0.2, high=0.2)
        else:
            losses = rlvr_math.kl_estimate(new, ref_logprobs, mask, form)
        gradients = torch.autograd.grad((probs * losses.sum(1)).sum(), policy)
        policy = [table - RATE * gradient for table, gradient in zip(policy, gradients, strict=True)]
    return torch.stack(course)


# ---- Report ----------------------------------------------------------------------------------------------------

SAMPLES, GREEDY, ANY = "eval/mean@2", "eval/gsm8k_strict", "pass@16"  # of the last evaluation
RIGHT, WRONG_LENGTH, RIGHT_LENGTH = (
    "objective/verifiable_correct_rate",
    "val/sequence_lengths_incorrect",
    "val/sequence_lengths_correct",
)
CURVES = (RIGHT, WRONG_LENGTH, RIGHT_LENGTH, "policy/entropy_avg", TRUE_KL)
LAST = 3  # updates at the end that are averaged


def read_runs(args: Args) -> tuple[pd.DataFrame, pd.DataFrame]:
    """One row per finished run, with its last evaluation; and one per update of them, with CURVES."""
    runs, updates = [], []
    for variant in find_variants():
        for seed in range(1, args.seeds + 1):
            for file in (args.folder / variant.folder / f"seed{seed}" / "runs").glob("*/meta.json"):
                meta = read_meta(file.parent)
                if not meta["finished"]:
                    continue
                table = read_numbers(file.with_name("metrics.csv"))
                whose = {"part": variant.part, "variant": variant.name, "seed": seed}
                results = meta["results"]
                found = {"samples": results[SAMPLES if SAMPLES in results else "eval/mean@16"]}
                found |= {"greedy": results[GREEDY]}
                found |= {ANY: results[f"eval/{ANY}"]} if f"eval/{ANY}" in results else {}
                last = {name: table[name].tail(LAST).mean() for name in CURVES if name in table}
                last |= {"first_kl": table[TRUE_KL].iloc[0]} if TRUE_KL in table else {}
                runs.append(whose | found | last | {"commit": meta["commit"][:7]})
                updates.append(table[["step", *(name for name in CURVES if name in table)]].assign(**whose))
    if not runs:
        raise InputError(f"{args.folder} holds no finished run")
    for penalty in PENALTIES:
        course = exact_course(penalty) if penalty != "none" else torch.empty(0, 0)
        for start, kl in enumerate(course.T.tolist(), 1):
            whose = {"part": "exact", "variant": penalty, "seed": start}
            runs.append(whose | {"first_kl": kl[0], TRUE_KL: kl[-1]})
            updates.append(pd.DataFrame({"step": range(STEPS + 1), TRUE_KL: kl}).assign(**whose))
    return pd.DataFrame(runs), pd.concat(updates, ignore_index=True)


def cell(values: pd.Series, form: str) -> str:
    """Mean and interval as a cell of a table; nothing where nothing was measured."""
    values = values.dropna()
    if not len(values):
        return ""
    mean, half = interval(list(values))
    return f"{mean:{form}} ± {half:{form.removeprefix('+')}}"


def table_of(runs: pd.DataFrame) -> list[dict[str, str]]:
    """One row for each variant."""
    rows = []
    for (part, variant), own in runs.groupby(["part", "variant"], sort=False):
        right = {f"right, {of} (%)": cell(100 * own[of], ".1f") for of in ("samples", "greedy")}
        if ANY in own:
            right["one of 16 samples (%)"] = cell(100 * own[ANY], ".1f")
        lengths = {"wrong": WRONG_LENGTH, "right": RIGHT_LENGTH}
        rows.append(
            {
                "part": part,
                "what": f"`{variant}`" if part in ("estimators", "divide") else variant,
                "seeds": str(len(own)),
            }
            | right
            | {f"tokens, {of}": cell(own[name], ".1f") for of, name in lengths.items()}
            | {"KL (nats)": cell(own[TRUE_KL], ".2f"), "its change": cell(own[TRUE_KL] - own["first_kl"], "+.2f")}
        )
    return rows


def report(args: Args) -> int:
    """Write tables and pictures of what is finished."""
    keep_tables(args.output, *read_runs(args))
    return draw(args)


def keep_tables(folder: Path, runs: pd.DataFrame, updates: pd.DataFrame) -> None:
    """runs.csv and updates.csv of a folder. Rows of other runs that they have already are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, fresh, form in (("runs", runs, "%.6g"), ("updates", updates, "%.5g")):
        path, whose = folder / f"{name}.csv", [key for key in KEYS if key in fresh]
        if path.is_file():
            old = pd.read_csv(path, dtype={"commit": str})
            others = old[~pd.MultiIndex.from_frame(old[whose]).isin(pd.MultiIndex.from_frame(fresh[whose]))]
            fresh = pd.concat([others, fresh], ignore_index=True)
            places = {value: place for place, value in enumerate(fresh[whose[0]].unique())}
            fresh = fresh.sort_values(whose[0], key=lambda column, places=places: column.map(places), kind="stable")
        fresh.to_csv(path, index=False, float_format=form)


KEYS = ("part", "staleness", "variant", "way", "seed")  # whose run a row is, those of them that a table has


def kept_tables(folder: Path) -> list[pd.DataFrame]:
    """Both of them, as they were kept."""
    try:
        return [pd.read_csv(folder / f"{name}.csv", dtype={"commit": str}) for name in ("runs", "updates")]
    except OSError as error:
        raise InputError(f"--output {folder}: {error}") from error


def draw(args: Args) -> int:
    """Table and pictures once more, from runs.csv and updates.csv."""
    runs, updates = kept_tables(args.output)
    text = markdown(table_of(runs))
    commits = ", ".join(sorted(set(runs["commit"].dropna())))
    (args.output / "estimators.md").write_text(f"{text}\n± is a 95 % interval over seeds. commit: {commits}\n")
    args.pictures.mkdir(parents=True, exist_ok=True)
    parts = set(runs["part"])
    for name, (needed, draw_it) in PICTURES.items():
        if needed in parts:
            draw_it(runs, updates).savefig(args.pictures / f"{name}.png", dpi=110)
    print(text)
    return 0


def draw_curve(
    axes: Axes, updates: pd.DataFrame, part: str, variant: str, column: str, *, band: bool = True, **style: Any
) -> None:
    """Mean over seeds at each update, each seed smoothed over LAST updates, and the 95 % interval as a band."""
    own = updates[(updates["part"] == part) & (updates["variant"] == variant)]
    seeds = own.pivot(index="step", columns="seed", values=column).rolling(LAST, center=True, min_periods=1).mean()
    means, halves = map(list, zip(*(interval(list(row)) for row in seeds.dropna().to_numpy()), strict=True))
    steps = seeds.dropna().index
    (line,) = axes.plot(steps, means, label=variant, linewidth=1.6, **style)
    low, high = (pd.Series(means) + sign * pd.Series(halves) for sign in (-1, 1))
    if band:
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.13, linewidth=0)


def finish_panel(axes: Axes, title: str, xlabel: str = "update") -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(xlabel, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)


def draw_estimators(runs: pd.DataFrame, updates: pd.DataFrame) -> Figure:
    """Right samples over updates, and held-out problems after the last."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    curves, final = figure.subplots(1, 2, width_ratios=(1.5, 1))
    own = runs[runs["part"] == "estimators"]
    names = list(own["variant"].unique())
    colors = dict(zip(names, itertools.cycle(mpl.color_sequences["tab10"])))
    for name in names:
        draw_curve(curves, updates, "estimators", name, RIGHT, band=False, color=colors[name])
    finish_panel(curves, "right samples, problems not seen before")
    curves.legend(fontsize=8, frameon=False)
    for i, name in enumerate(reversed(names)):
        for what, marker in {"samples": "o", "greedy": "D"}.items():
            mean, half = interval(list(own.loc[own["variant"] == name, what]))
            final.errorbar(mean, i, xerr=half, fmt=marker, markersize=5, capsize=2, color=colors[name])
    final.set_yticks(range(len(names)), reversed(names), fontsize=8)
    finish_panel(final, "held-out problems: samples (o), greedy (◇)", "right")
    return figure


def draw_lengths(runs: pd.DataFrame, updates: pd.DataFrame) -> Figure:
    """Tokens of wrong responses over updates; and how many more than Dr. GRPO's of the same seed, wrong and right."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    panels = figure.subplots(1, 3)
    own = updates[updates["part"] == "lengths"]
    base = own[own["variant"] == DR_GRPO].set_index(["seed", "step"])
    more = own.set_index(["seed", "step"])
    for column in (WRONG_LENGTH, RIGHT_LENGTH):
        more[column] = more[column] - base[column].reindex(more.index)
    more = more.reset_index()
    for axes, (title, (column, differences)) in zip(panels, LENGTH_PANELS.items(), strict=True):
        for name in runs.loc[runs["part"] == "lengths", "variant"].unique():
            if not differences or name != DR_GRPO:
                style = {"color": COLORS[name.startswith("dr_grpo")], "linestyle": "-" if "own" in name else "--"}
                draw_curve(axes, more if differences else own, "lengths", name, column, band=differences, **style)
        if differences:
            axes.axhline(0, color=COLORS[1], linestyle="--", linewidth=1.6)
        finish_panel(axes, title)
    panels[0].legend(fontsize=8, frameon=False)
    return figure


def draw_penalties(runs: pd.DataFrame, updates: pd.DataFrame) -> Figure:
    """The distance from the reference over updates: with the penalty alone, and together with the score."""
    titles = {
        "exact": "only the penalty acts:\nthree tokens, expected gradient",
        "alone": "only the penalty acts:\nlanguage model, samples",
        "beside": "penalty beside the score:\nlanguage model, samples",
    }
    parts = [part for part in titles if part in set(runs["part"])]
    figure = Figure(figsize=(4 * len(parts), 4), layout="constrained")
    panels = figure.subplots(1, len(parts), squeeze=False)[0]
    for axes, part in zip(panels, parts, strict=True):
        for name in runs.loc[runs["part"] == part, "variant"].unique():
            color = {"k1": "#0072b2", "k2": "#d55e00", "k3": "#009e73"}.get(name[:2], "#888888")
            style = {"color": color, "linestyle": "--" if "loss" in name else "-"}
            draw_curve(axes, updates, part, name, TRUE_KL, band=(part, name) not in FAR, **style)
        finish_panel(axes, titles[part])
        others = updates[(updates["part"] == part) & (updates["variant"] != FAR[0][1])]
        axes.set_ylim(0, 1.5 * others.groupby(["variant", "step"])[TRUE_KL].mean().max())
    panels[0].set_ylabel("KL from the reference (nats per response)", fontsize=9)
    panels[0].legend(fontsize=8, frameon=False)
    if none := [line for line in panels[-1].lines if line.get_label() == "none"]:
        panels[-1].legend(handles=none, fontsize=8, frameon=False)
    return figure


FAR = (("alone", "k1 in the loss"), ("beside", "k1 in the loss"))  # these go out of the picture
DR_GRPO = "dr_grpo, greatest length"
LENGTH_PANELS = {  # metric; whether it is the difference from Dr. GRPO that is drawn
    "tokens of wrong responses": (WRONG_LENGTH, False),
    "wrong ones: more than Dr. GRPO's": (WRONG_LENGTH, True),
    "right ones: more than Dr. GRPO's": (RIGHT_LENGTH, True),
}
PICTURES = {
    "estimators": ("estimators", draw_estimators),
    "lengths": ("lengths", draw_lengths),
    "penalties": ("exact", draw_penalties),
}


COMMANDS = {"run": run, "report": report, "draw": draw}


def main(argv: list[str]) -> int:
    if argv[:1] == ["with"] and len(argv) >= 3:
        run_script(with_penalty(argv[1], argv[2], argv[3:]))
        return 0
    return many_seeds.command_line(COMMANDS, Args, __doc__, argv)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as error:
        exit_with(str(error))
