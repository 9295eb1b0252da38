"""PPO against reward models that learned from people: a real language model, chapter 1's preset `reviews`.

    python benchmark/experiments/people.py run --seeds 3                   # everything; repeat it to resume
    python benchmark/experiments/people.py run --seeds 3 --only preset     # the preset alone
    python benchmark/experiments/people.py report --seeds 3                # tables and picture of what has finished

`preset` is the preset. Its policies continue 400 held-out beginnings, before and after training.

The others look for over-optimisation (Gao et al. 2022): 12 updates of 64 with large steps and hardly any penalty,
against reward models that learned from 200, 1,000 or 4,800 sentences, each with the mean of half of its ratings;
`4800-single` learned from one person's rating of each. While the policy moves away from the language model, two
others judge its texts: VADER, and a second reward model, "the judge", which learned from other ratings and sentences.

The reward models and the judge have one seed, and are trained first; the policies of a variant share theirs.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from transformers import AutoTokenizer

from benchmark import lab
from benchmark.lab import Args, cell
from ppo_rlhf import sample
from ppo_rlhf.lib.base.files import read_json, write_json
from ppo_rlhf.lib.nets import models, pretrained
from ppo_rlhf.lib.services import traces

REWARDS = {  # few labels make small steps, so that there are at least 25
    "200": "--num_train 200 --batch_size 8",
    "1000": "--num_train 1000 --batch_size 20",
    "4800": "",
    "4800-single": "--label_dataset people/single.json",
    "judge": "--label_dataset people/judge.json",
}
LITTLE_PENALTY = "--rewards.kl_coef 0.01 --rewards.adaptive_kl.target None --ppo.lr 3e-4 --ppo.batch_size 64"
LITTLE_PENALTY += " --ppo.total_episodes 768 --trace_interval 1 --trace_episodes 64"
VARIANTS = {"preset": "--rewards.trained_model ../../rewards/4800 --trace_interval 4 --trace_episodes 128"} | {
    name: f"--rewards.trained_model ../../rewards/{name} {LITTLE_PENALTY}" for name in REWARDS if name != "judge"
}  # traces keep whole batches, for the judge
CURVES = {"score": "objective/score", "judge": "judge", "VADER": "objective/vader", "KL": "objective/kl"}
HELD_OUT = 400  # beginnings that the preset's policies continue
READ, LAST = 50, 3  # texts that are kept in texts.jsonl; updates at the end that are averaged
WORD = re.compile("[a-z][a-z'-]{4,}")  # long enough to say something


# ---- Reward models ---------------------------------------------------------------------------------------------


def train_rewards(args: Args) -> bool:
    """Train the judge and the reward models of the chosen variants. Returns whether all have finished."""
    names = dict.fromkeys(["judge", *("4800" if name == "preset" else name for name in lab.chosen(EXPERIMENT, args))])
    commands = {name: f"ppo_rlhf/train_reward.py --preset reviews {REWARDS[name]}".strip() for name in names}
    return lab.train_first(EXPERIMENT, args, "reward", commands)


@torch.no_grad()
def judge(folder: Path, texts: list[str]) -> list[float]:
    """What a reward model says of texts."""
    model = models.load_reward_model(folder, torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pad_id, scores = pretrained.vocabulary_size(tokenizer), []
    for start in range(0, len(texts), 32):
        rows = [torch.tensor(tokenizer.encode(text)) for text in texts[start : start + 32]]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id)
        scores += model(tokens, pad_id).tolist()
    return scores


# ---- Measure ---------------------------------------------------------------------------------------------------


def judged(run: Path, rewards: Path) -> dict[int, float]:
    """The judge's mean score of the batch at each traced update; kept next to the run's other results."""
    kept = run / "judged.json"
    if not kept.is_file():
        updates = [update for update, again in traces.kept(run) if not again]
        batches = [traces.read(run, update) for update in updates]
        texts = [
            query + "".join(response)
            for batch in batches
            for query, response in zip(batch.queries, batch.responses, strict=True)
        ]
        scores = judge(rewards / "judge", texts)
        size = len(batches[0].queries)
        means = [sum(scores[start : start + size]) / size for start in range(0, len(scores), size)]
        write_json(kept, dict(zip(updates, means, strict=True)))
    return {int(update): score for update, score in read_json(kept).items()}


def held_out(run: Path, rewards: Path) -> list[dict[str, Any]]:
    """What training changed on held-out beginnings: sample.changes, which is kept, next to held_out.jsonl."""
    kept = run / "held_out.json"
    if not kept.is_file():
        policy = str(run.parents[1] / "models" / run.name / "policy")
        wanted = sample.Args(policy=policy, judge=str(rewards / "judge"), n=HELD_OUT, out=str(run / "held_out.jsonl"))
        rows = sample.sample(wanted)
        distance = {"": "KL", "before": 0.0, "after": sum(row["kl"] for row in rows) / len(rows)}
        write_json(kept, [*sample.changes(rows), distance])
    return read_json(kept)


def texts_of(run: Path) -> list[dict[str, Any]]:
    """The rows of held_out.jsonl, one for each beginning."""
    return [json.loads(line) for line in (run / "held_out.jsonl").read_text().splitlines()]


def measure(run: Path, meta: dict[str, Any], table: pd.DataFrame) -> dict[str, Any]:
    """The numbers of a finished run. The table of its updates gets a column with what the judge says."""
    rewards = run.parents[3] / "rewards"
    table["judge"] = table["step"].map(judged(run, rewards))
    learned_from = Path(meta["args"]["rewards"]["trained_model"]).name
    (of_reward,) = (run.parents[3] / f"reward-{learned_from}" / "seed1" / "runs").glob("*/meta.json")
    found = {"correlation": read_json(of_reward)["results"]["test_corr"]}
    found |= {name: table[column].tail(LAST).mean() for name, column in CURVES.items()}
    best = table[["judge", CURVES["KL"]]].dropna().rolling(3, min_periods=1).mean()
    found |= {"best of the judge": best["judge"].max(), "KL there": best[CURVES["KL"]][best["judge"].idxmax()]}
    found |= {"explained": table["ppo/val/var_explained"].tail(LAST).mean(), "minutes": meta["wall_time"] / 60}
    if run.parents[2].name == "preset":
        for line in held_out(run, rewards):
            name = line.pop("")
            found |= {f"{name} {column}": value for column, value in line.items()}
        found |= habit(*([row[side] for row in texts_of(run)] for side in ("base", "policy")))
    return found


def habit(before: list[str], after: list[str]) -> dict[str, Any]:
    """Of all words, the one whose share of texts has grown most, and both shares."""
    old, new = (Counter(w for text in texts for w in {*WORD.findall(text.lower())}) for texts in (before, after))
    word = max(sorted(new), key=lambda word: new[word] / len(after) - old[word] / len(before))
    return {"habit": word, "habit before": old[word] / len(before), "habit after": new[word] / len(after)}


def keep_texts(experiment: lab.Experiment, args: Args) -> None:
    """texts.jsonl: the first held-out texts of the preset's policies."""
    runs = ((whose, run) for whose, run, _ in lab.finished_runs(experiment, args) if whose["variant"] == "preset")
    rows = [whose | row for whose, run in runs for row in texts_of(run)[:READ]]
    if rows:
        lab.keep_lines(experiment.of(args, output=True) / "texts.jsonl", rows)


# ---- Table and picture -----------------------------------------------------------------------------------------


def means_of(runs: pd.DataFrame) -> list[dict[str, str]]:
    """One row for each variant."""
    shown = [*CURVES, "best of the judge", "KL there"]
    return [
        {"variant": f"`{name}`", "seeds": str(len(own)), "correlation": f"{own['correlation'].iloc[0]:.3f}"}
        | {column: cell(own[column], ".2f") for column in shown}
        for name, own in runs.groupby("variant", sort=False)
    ]


def draw_against_kl(axes: Axes, updates: pd.DataFrame, column: str) -> None:
    """A line for each variant: means over seeds, and over up to three of the updates that were judged."""
    for name, own in updates.groupby("variant", sort=False):
        means = own.dropna(subset="judge").groupby("step")[[CURVES["KL"], column]].mean()
        means = means.rolling(3, min_periods=1).mean()
        axes.plot(means[CURVES["KL"]], means[column], marker=".", label=name, linewidth=1.4)


def picture(runs: pd.DataFrame, updates: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = {"score": "its reward model", "judge": "the judge", "VADER": "VADER"}
    for axes, (name, title) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        draw_against_kl(axes, updates, CURVES[name])
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("KL, nats", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


EXPERIMENT = lab.Experiment(
    name="people",
    script="ppo_rlhf/train_policy.py",
    common="--preset reviews --log_interval 0 --max_memory 8",
    variants=VARIANTS,
    curves=(*CURVES.values(), "objective/kl_coef", "ppo/val/var_explained"),
    measure=measure,
    table=means_of,
    picture=picture,
    also=lambda args: keep_texts(EXPERIMENT, args),
)


def run(experiment: lab.Experiment, args: Args) -> int:
    """Train reward models, then policies, and report. Returns the exit status."""
    return lab.run(experiment, args) if train_rewards(args) else 1


if __name__ == "__main__":
    lab.main(EXPERIMENT, __doc__, run)
