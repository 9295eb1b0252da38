"""Best-of-n, DPO and PPO on the same truth: chapter 2's small posts, where a formula says how good a summary is.

    python benchmark/experiments/methods.py run --workers 2             # everything; repeat it to resume
    python benchmark/experiments/methods.py run --seeds 2 --only dpo    # a part of it, and what it needs
    python benchmark/experiments/methods.py report                      # table and picture of what has finished
    python benchmark/experiments/methods.py draw                        # the same from the committed tables

All three start from one fine-tuned model, which is also the reference, and see the same COMPARISONS comparisons. A
seed is that of a reward model, of its best-of-n, of DPO and of PPO:

    best-of-n   the score chooses among n samples of the fine-tuned model; nothing is trained
    DPO         dpo.py on the comparisons, for every beta in BETAS
    PPO         tldr_policy.py with the reward model, for every coefficient of the KL penalty in KL_COEFS

Each policy is measured on the way, and at its end compared with best-of-n at the same KL. It summarises POSTS
held-out posts once, at the temperature of PPO. KL is log p(policy) - log p(reference) of what it wrote, summed over a
summary, which estimates the KL divergence, in nats. Gold score, score and length are those of the same summaries. The
score is the one that PPO sees: the reward model's, or -1 if the summary does not end.

Best-of-n is computed from SAMPLES samples of each post, sorted by the score. If n of the SAMPLES are
drawn without replacement, sample number i of the order, from 1, is the best of them with probability
C(i - 1, n - 1) / C(SAMPLES, n). The mean of the gold scores with these weights has no bias. The KL divergence is at
most log n - (n - 1) / n, and equal to it if no two samples are the same (Beirami et al. 2024, arXiv 2401.01879).
"""

import json
import math
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from benchmark.curves import many_seeds
from benchmark.curves.compare import markdown, read_numbers
from benchmark.experiments import dpo
from benchmark.experiments.ablations import interval
from ppo_rlhf import tldr_policy, worlds
from ppo_rlhf.lib import cli, lm, models, networks, posts
from ppo_rlhf.lib.errors import InputError, exit_with
from ppo_rlhf.lib.run import commit, read_meta

ROOT = Path(__file__).resolve().parents[2]
COMPARISONS = 2_048
POSTS = 256
SAMPLES = 64
NUMBERS = (1, 2, 4, 8, 16, 32, 64)  # of n
BETAS = (0.3, 1.0)
STAGES = (1 / 8, 1 / 4, 1 / 2, 1)  # of DPO's training, at which it is measured
KL_COEFS = (0.2, 0.6)
METHODS = ("best-of-n", "dpo", "ppo")
TASK = posts.TASKS["posts"]
MEASURED = ("kl", "gold", "score", "length", "ended")
PENALTY = 1.0  # a summary that does not end has the score -PENALTY


# ---- What is measured ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judge:
    """Everything that measures a policy: held-out posts, the reference, a reward model and the gold score."""

    held_out: posts.Posts
    ids: posts.TaskIds
    reference: PreTrainedModel
    reward_model: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (queries, responses) -> (rows,)
    gold: Callable[..., torch.Tensor]  # the same

    @classmethod
    def load(cls, sft: str, reward: str) -> "Judge":
        """With the fine-tuned model and the reward model in these folders."""
        tokenizer = models.load_tokenizer(sft)
        ids = posts.task_ids(TASK, tokenizer)
        task = worlds.find_paths(dpo.Args(task=TASK)).task
        reward_model = models.load_reward_model(Path(reward), torch.float32)
        return cls(
            held_out=posts.read_posts(task, tokenizer, "validation", POSTS),
            ids=ids,
            reference=models.load_pretrained(sft, torch.float32).requires_grad_(False),
            reward_model=networks.response_scorer(reward_model, ids.pad),
            gold=posts.text_scorer("ppo_rlhf.worlds.posts:gold_scores", "rewards.monitor", tokenizer, ids),
        )

    def sample(self, policy: PreTrainedModel, queries: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
        """Summaries (rows, response_length) of queries (rows, query_length) that are padded on the left."""
        uniforms = torch.rand(len(queries), TASK.response_length, generator=noise, dtype=torch.float64)
        contexts = posts.trim_padding(queries, pad_id=self.ids.pad)
        given = (contexts, uniforms, self.ids.pad, self.ids.vocab_size, TASK.temperature, {self.ids.stop})
        return lm.generate_until(policy, *given)[0]

    def score(self, queries: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """The reward model's score, or -PENALTY if a summary does not end: (rows,)."""
        ended = lm.has_stop(responses, self.ids.stop, 0)
        return tldr_policy.punish_missing_eos(self.reward_model(queries, responses), ended, "replace", PENALTY)

    @torch.no_grad()
    def measure(self, policy: PreTrainedModel) -> dict[str, float]:
        """MEASURED of a policy: means over the held-out posts. The noise is the same for all policies."""
        queries = self.held_out.queries
        responses = self.sample(policy, queries, lm.keyed_generator("methods", "measure"))
        mask, tokens = responses != self.ids.pad, torch.cat([queries, responses], dim=1)
        reading = (tokens, responses, self.ids.pad, TASK.temperature, self.ids.vocab_size)
        logprobs, ref_logprobs = (lm.response_statistics(model, *reading)[0] for model in (policy, self.reference))
        numbers = {
            "kl": (logprobs - ref_logprobs).masked_fill(~mask, 0).sum(1),
            "gold": self.gold(queries, responses),
            "score": self.score(queries, responses),
            "length": mask.sum(1),
            "ended": lm.has_stop(responses, self.ids.stop, 0),
        }
        return {name: values.double().mean().item() for name, values in numbers.items()}


def best_of_n(scores: np.ndarray, numbers: np.ndarray, n: int) -> np.ndarray:
    """The number of the sample with the highest score among n, drawn without replacement: expectations (posts,).

    scores, numbers: (posts, samples). Samples with equal scores keep their order.
    """
    samples = scores.shape[1]
    weights = np.array([math.comb(i, n - 1) / math.comb(samples, n) for i in range(samples)])
    order = np.argsort(scores, axis=1, kind="stable")
    return np.take_along_axis(numbers, order, axis=1) @ weights


def best_of_n_kl(n: int) -> float:
    """KL divergence of best-of-n from what it chooses from, in nats, if no two samples are the same."""
    return math.log(n) - (n - 1) / n


# ---- One run of each method ------------------------------------------------------------------------------------


def run_samples(sft: str) -> None:
    """samples.safetensors: the fine-tuned model's summaries of held-out posts, (posts, samples, response_length)."""
    tokenizer = models.load_tokenizer(sft)
    ids = posts.task_ids(TASK, tokenizer)
    held_out = posts.read_posts(worlds.find_paths(dpo.Args(task=TASK)).task, tokenizer, "validation", POSTS)
    judge = Judge(held_out, ids, models.load_pretrained(sft, torch.float32), None, None)
    noise = lm.keyed_generator("methods", "samples")
    parts = [
        judge.sample(judge.reference, queries.repeat_interleave(SAMPLES, 0), noise).view(len(queries), SAMPLES, -1)
        for queries in held_out.queries.split(16)
    ]
    save_file({"responses": torch.cat(parts)}, "samples.safetensors")


def run_best_of_n(sft: str, reward: str, samples: str) -> None:
    """points.json of best-of-n with a reward model."""
    judge, responses = Judge.load(sft, reward), load_file(samples)["responses"]
    numbers: dict[str, list] = {name: [] for name in MEASURED if name != "kl"}
    for queries, own in zip(judge.held_out.queries, responses, strict=True):
        queries = queries.expand(SAMPLES, -1)
        numbers["score"].append(judge.score(queries, own).numpy())
        numbers["gold"].append(judge.gold(queries, own).numpy())
        numbers["length"].append((own != judge.ids.pad).sum(1).numpy())
        numbers["ended"].append(lm.has_stop(own, judge.ids.stop, 0).numpy())
    tables = {name: np.stack(rows).astype(np.float64) for name, rows in numbers.items()}  # (posts, samples) each
    points = [
        {"at": n, "kl": best_of_n_kl(n)}
        | {name: float(best_of_n(tables["score"], table, n).mean()) for name, table in tables.items()}
        for n in NUMBERS
    ]
    keep_points(points)


def run_dpo(sft: str, reward: str, beta: float, argv: list[str]) -> None:
    """points.json of DPO, at STAGES of its training."""
    judge, points = Judge.load(sft, reward), []

    def watch(step: int, steps: int, policy: PreTrainedModel) -> None:
        if step in [round(stage * steps) for stage in STAGES]:
            points.append({"at": step} | judge.measure(policy))

    words = ["--base_model", sft, "--beta", str(beta), "--num_train", str(COMPARISONS), *argv]
    metrics = dpo.train(cli.parse_args(dpo.PRESETS, words, dpo.__doc__), watch)
    keep_points(points, last_losses=[step["loss"] for step in metrics[-32:]])


def run_ppo(sft: str, reward: str, argv: list[str]) -> None:
    """tldr_policy.py, whose evaluations are measurements; the last one is in its meta.json."""
    judge, plain = Judge.load(sft, reward), tldr_policy.evaluate_policy

    def evaluate_policy(
        setup: Any, this_run: Any, actor_critic: Any, held_out: Any, references: dict, update: int
    ) -> tuple[dict[str, float], list[dict]]:
        last = update == setup.sizes.updates
        means, rows = plain(setup, this_run, actor_critic, held_out, references, update) if last else ({}, [])
        with actor_critic.sampling():
            measured = judge.measure(actor_critic.sampler)
        return means | {f"eval/measured/{name}": value for name, value in measured.items()}, rows

    tldr_policy.evaluate_policy = evaluate_policy
    words = ["--preset", "posts", "--base_model", sft, "--rewards.trained_model", reward, *argv]
    tldr_policy.train(cli.parse_args(tldr_policy.PRESETS, words, tldr_policy.__doc__))


def keep_points(points: list[dict[str, float]], **others: Any) -> None:
    Path("points.json").write_text(json.dumps({"commit": commit(), "points": points, **others}, indent=1))


# ---- All of them -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Args:
    only: tuple[Literal["best-of-n", "dpo", "ppo"], ...] = METHODS
    """which methods"""
    seeds: int = 5
    """how many seeds of each"""
    betas: tuple[float, ...] = BETAS
    """of DPO"""
    workers: int = 1
    """how many runs at once"""
    folder: Path = ROOT / "benchmark" / "runs" / "methods"
    """where runs are kept"""
    output: Path = ROOT / "benchmark" / "results" / "methods"
    """folder that gets points.csv and methods.md"""
    picture: Path = ROOT / "static" / "methods.png"
    """the figure"""
    policy: str = "--eval_interval 6 --eval_posts 64 --trace_interval 0 --log_interval 0"
    """what all runs of PPO have in common: arguments of tldr_policy.py"""
    any_commit: bool = False
    """go on with runs that another commit of this project began"""


def jobs_of(args: Args, name: str, command: str, seed: int) -> list[many_seeds.Job]:
    """A job, as a list."""
    experiment = many_seeds.Args(
        name=name, command=command, num_seeds=1, start_seed=seed, folder=args.folder, any_commit=args.any_commit
    )
    return many_seeds.find_jobs(experiment)


def model_of(args: Args, name: str, seed: int, kind: str) -> str:
    """The folder of the model that a finished job has saved."""
    (folder,) = (args.folder.resolve() / name / f"seed{seed}" / "models").glob(f"*/{kind}")
    return shlex.quote(str(folder))


def run(args: Args) -> int:
    """Train everything and report. Returns the exit status."""
    script, seeds = f"python {shlex.quote(__file__)}", range(1, args.seeds + 1)
    scripts = shlex.quote(str(ROOT / "ppo_rlhf"))
    launcher = many_seeds.Args(name="methods", workers=args.workers)

    def status_of(jobs: list[many_seeds.Job]) -> int:
        many_seeds.run_here(launcher, jobs)
        return 0 if all(job.state == "finished" for job in jobs) else many_seeds.report(launcher, jobs)

    if status_of(jobs_of(args, "sft", f"python {scripts}/tldr_sft.py --preset posts --eval_posts 64", 1)):
        return 1
    sft = model_of(args, "sft", 1, "sft")
    words = f"--preset posts --base_model {sft} --num_train {COMPARISONS}"
    train_reward = f"python {scripts}/tldr_reward.py {words}"
    needed = [job for seed in seeds for job in jobs_of(args, "reward", train_reward, seed)]
    if "best-of-n" in args.only:
        needed += jobs_of(args, "samples", f"{script} samples {sft}", 1)
    if status_of(needed):
        return 1
    jobs = []
    for seed in seeds:  # a whole comparison of one seed first
        given = f"{sft} {model_of(args, 'reward', seed, 'reward')}"
        if "best-of-n" in args.only:
            samples = shlex.quote(str(args.folder.resolve() / "samples" / "seed1" / "samples.safetensors"))
            jobs += jobs_of(args, "best-of-n", f"{script} best-of-n {given} {samples}", seed)
        if "dpo" in args.only:
            for beta in args.betas:
                jobs += jobs_of(args, f"dpo-{beta:g}", f"{script} dpo {given} {beta:g}", seed)
        if "ppo" in args.only:
            for coef in KL_COEFS:
                command = f"{script} ppo {given} {args.policy} --rewards.kl_coef {coef:g}"
                jobs += jobs_of(args, f"ppo-{coef:g}", command, seed)
    many_seeds.run_here(launcher, jobs)
    if any(job.state == "finished" for job in jobs):
        report(args)
    return many_seeds.report(launcher, jobs)


# ---- Report ----------------------------------------------------------------------------------------------------


def read_points(args: Args) -> pd.DataFrame:
    """One row for each measurement of each finished run: method, setting, seed, at (n, step or update), MEASURED."""
    rows: list[dict[str, Any]] = []
    for seed in range(1, args.seeds + 1):
        folders = {("best-of-n", PENALTY): "best-of-n"}
        folders |= {("dpo", beta): f"dpo-{beta:g}" for beta in BETAS}
        for (method, setting), name in folders.items():
            folder = args.folder / name / f"seed{seed}"
            if not many_seeds.read_record(folder).get("finished"):
                continue
            found = json.loads((folder / "points.json").read_text())
            whose = {"method": method, "setting": setting, "seed": seed}
            rows += [whose | point | {"commit": found["commit"][:7]} for point in found["points"]]
        for coef in KL_COEFS:
            for file in (args.folder / f"ppo-{coef:g}" / f"seed{seed}" / "runs").glob("*/meta.json"):
                rows += read_ppo(file.parent, coef, seed)
    if not rows:
        raise InputError(f"{args.folder} holds no finished run")
    return pd.DataFrame(rows)


def read_ppo(folder: Path, coef: float, seed: int) -> list[dict[str, Any]]:
    """The measurements of a run of PPO; none if it has not finished."""
    meta, table = read_meta(folder), read_numbers(folder / "metrics.csv")
    if not meta["finished"]:
        return []
    between = meta["args"]["eval_interval"]
    points = {
        int(row["step"]): {name: row[f"eval/measured/{name}"] for name in MEASURED}
        for _, row in table.iterrows()
        if row["step"] % between == 0
    }
    points[len(table)] = {name: meta["results"][f"validation/measured/{name}"] for name in MEASURED}
    whose = {"method": "ppo", "setting": coef, "seed": seed, "commit": meta["commit"][:7]}
    return [whose | {"at": update} | point for update, point in points.items()]


def report(args: Args) -> int:
    """Write points.csv, table and picture of what has finished."""
    points = read_points(args)
    args.output.mkdir(parents=True, exist_ok=True)
    columns = ["method", "setting", "seed", "at", *MEASURED, "commit"]
    points[columns].to_csv(args.output / "points.csv", index=False, float_format="%.5g")
    return draw(args)


def name_of(method: str, setting: float) -> str:
    if method == "best-of-n":
        return method
    return f"DPO, beta {setting:g}" if method == "dpo" else f"PPO, kl_coef {setting:g}"


def cell(values: pd.Series, form: str = ".2f") -> str:
    """Mean and 95 % interval over seeds."""
    mean, half = interval(list(values))
    return f"{mean:{form}} ± {half:.2f}" if math.isfinite(half) else f"{mean:{form}}"


def table_of(points: pd.DataFrame) -> list[dict[str, str]]:
    """One row for each n of best-of-n and for the end of each other setting, which is compared with best-of-n.

    A comparison needs all seeds of the setting.
    """
    rows = []
    curves = points[points["method"] == "best-of-n"]
    for (method, setting), own in points.groupby(["method", "setting"], sort=False):
        shown = NUMBERS if method == "best-of-n" else [own["at"].max()]
        for at in shown:
            here = own[own["at"] == at]
            name = name_of(method, setting).replace("best-of-n", f"best of {at}")
            cells = {"policy": name, "seeds": str(len(here)), "KL (nats)": cell(here["kl"])}
            others = [gold_at(curves[curves["seed"] == end.seed], end.kl) for end in here.itertuples()]
            better = here["gold"] - others
            shown_better = "" if method == "best-of-n" or better.isna().any() else cell(better, "+.2f")
            cells |= {"gold score": cell(here["gold"]), "minus best-of-n at the same KL": shown_better}
            cells |= {"score": cell(here["score"]), "tokens": cell(here["length"])}
            rows.append(cells | {"end (%)": cell(100 * here["ended"], ".1f")})
    return rows


def gold_at(curve: pd.DataFrame, kl: float) -> float:
    """Gold score of best-of-n with one reward model at a KL, by linear interpolation; nan beyond the largest n."""
    return float(np.interp(kl, curve["kl"], curve["gold"], right=math.nan))


def with_start(points: pd.DataFrame) -> pd.DataFrame:
    """The same with a row of the fine-tuned model, best of 1, at the beginning of each run that has none."""
    start = points[(points["method"] == "best-of-n") & (points["at"] == 1)].set_index("seed")
    begun = [points]
    for (method, setting, seed), own in points.groupby(["method", "setting", "seed"]):
        if seed in start.index and not (own["kl"] == 0).any():
            row = start.loc[seed, list(MEASURED)].to_dict()
            begun.append(pd.DataFrame([{"method": method, "setting": setting, "seed": seed, "at": 0, **row}]))
    return pd.concat(begun, ignore_index=True)


COLORS = {
    "best-of-n": ["#0072b2"],
    "dpo": ["#f0b27a", "#d35400"],
    "ppo": ["#7dcea0", "#145a32"],
}


def picture_of(points: pd.DataFrame) -> Figure:
    """Gold score and score over KL: lines are means over seeds, up to a large point; pale points are seeds' ends."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = figure.subplots(1, 2)
    points, seen = with_start(points), dict.fromkeys(METHODS, 0)
    for (method, setting), own in points.groupby(["method", "setting"], sort=False):
        color, seen[method] = COLORS[method][seen[method] % len(COLORS[method])], seen[method] + 1
        mean, ends = own.groupby("at")[["kl", "gold", "score"]].mean(), own[own["at"] == own["at"].max()]
        for axes, column in zip(panels, ("gold", "score"), strict=True):
            axes.plot(ends["kl"], ends[column], "o", color=color, ms=5, alpha=0.35, mew=0)
            axes.plot(mean["kl"], mean[column], color=color, lw=1.8, marker="o", ms=2.5)
            last = mean.iloc[-1:]
            axes.plot(last["kl"], last[column], "o", color=color, ms=9, label=name_of(method, setting))
    titles = ("gold score: the truth", "score: what best-of-n and PPO see")
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("KL from the fine-tuned model (nats per summary)", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=8, frameon=False)
    return figure


def draw(args: Args) -> int:
    """Tables and picture from points.csv."""
    try:
        points = pd.read_csv(args.output / "points.csv", dtype={"commit": str})
    except OSError as error:
        raise InputError(f"--output {args.output}: {error}") from error
    text = markdown(table_of(points))
    commits = ", ".join(sorted(set(points["commit"])))
    (args.output / "methods.md").write_text(f"{text}\n± is a 95 % interval over seeds. commit: {commits}\n")
    args.picture.parent.mkdir(parents=True, exist_ok=True)
    picture_of(points).savefig(args.picture, dpi=110)
    print(text)
    return 0


def main(argv: list[str]) -> int:
    command, words = (argv[0], argv[1:]) if argv else ("", [])
    if command == "samples" and words:
        run_samples(words[0])
    elif command == "best-of-n" and len(words) >= 3:
        run_best_of_n(*words[:3])
    elif command == "dpo" and len(words) >= 3:
        run_dpo(words[0], words[1], float(words[2]), words[3:])
    elif command == "ppo" and len(words) >= 2:
        run_ppo(words[0], words[1], words[2:])
    else:
        commands = {"run": run, "report": report, "draw": draw}
        return many_seeds.command_line(commands, Args, __doc__, argv)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as error:
        exit_with(str(error))
