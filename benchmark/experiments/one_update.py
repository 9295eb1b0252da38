"""One update of chapter 1 in numbers: the tables of docs/chapter1.md.

    python benchmark/experiments/one_update.py              # print every number that the page shows
    python benchmark/experiments/one_update.py --record     # run train_policy.py again and record the update anew

A run of train_policy.py on the small world of tales recorded the update: eight responses of six tokens, the world's
own formula in place of a reward model. The file holds what the models said, and what train_policy.py computed. The
tables are computed from what the models said, by ppo_rlhf/lib/derivation.py.
"""

import contextlib
import csv
import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tyro

from ppo_rlhf import train_policy
from ppo_rlhf.lib import cli, derivation, models, traces
from ppo_rlhf.lib.files import read_json, replace_file
from ppo_rlhf.lib.run import commit, cpu_name
from ppo_rlhf.worlds import tales

ROOT = Path(__file__).parents[2]
RECORDING = Path("benchmark/results/one_update.json")
COMMAND = """\
python ppo_rlhf/train_policy.py --preset tales --rewards.function ppo_rlhf.worlds.tales:sentiment.gold_scores
--task.query_length 6 --task.end_text None --task.response_length 6 --task.truncate_after 2
--ppo.batch_size 8 --ppo.whiten_groups 1 --ppo.total_episodes 320 --rewards.adaptive_kl.target 2 --trace_interval 0"""
UPDATE = 7
SHOWN = (1, 3)  # episodes with a table of their own


@dataclass(frozen=True)
class Args:
    record: bool = False
    """run train_policy.py, for half a minute, and write what it says to the recording"""


# ---- Record ----------------------------------------------------------------------------------------------------


def record() -> dict[int, dict[str, Any]]:
    """Run COMMAND and keep every update: what the models said, and the numbers that train_policy.py made of it."""
    losses, updates = [], {}
    tokenizer = models.load_tokenizer(str(tales.find_world() / "model"))
    ppo_loss, update_metrics = train_policy.ppo_loss, train_policy.update_metrics

    def recorded_loss(new_logprobs, entropies, new_values, logprobs, *others):
        tensors = {"new_logprobs": new_logprobs, "new_values": new_values}
        for i, row in enumerate(logprobs.tolist()):
            losses.append((row, {name: tensor[i].tolist() for name, tensor in tensors.items()}))
        return ppo_loss(new_logprobs, entropies, new_values, logprobs, *others)

    def recorded_metrics(this_run, args, update, ids, rollout, episodes, stats):
        metrics = update_metrics(this_run, args, update, ids, rollout, episodes, stats)
        logprobs, length = rollout.logprobs.tolist(), args.task.response_length
        # Every epoch visits each episode once, in another order.
        read = [[told for row, told in losses if row == episode] for episode in logprobs]
        losses.clear()
        responses = rollout.context_responses[:, -length:].tolist()
        updates[update] = {
            "settings": {
                **{"kl_coef": episodes.kl_coef, **vars(args.rewards.adaptive_kl)},
                **{name: getattr(args.task, name) for name in ("truncate_after", "penalty_reward_value")},
                **{name: getattr(args.ppo, name) for name in ("gamma", "lam", "cliprange", "cliprange_value")},
                "vf_coef": args.ppo.vf_coef,
            },
            "queries": [tokenizer.decode([t for t in row if t != ids.pad]) for row in episodes.queries.tolist()],
            "tokens": [traces.pieces(tokenizer, row, ids.pad) for row in responses],
            "scored": (episodes.responses != ids.pad).tolist(),
            "raw_scores": episodes.raw_scores.tolist(),
            "stopped": episodes.stopped.tolist(),
            "logprobs": logprobs,
            "ref_logprobs": episodes.ref_logprobs.tolist(),
            "values": rollout.values.tolist(),
            "epochs": [
                {name: [told[epoch][name] for told in read] for name in ("new_logprobs", "new_values")}
                for epoch in range(args.ppo.noptepochs)
            ],
            "train_policy": {"rewards": rollout.rewards.tolist()},
        }
        return metrics

    wrapped = patch.multiple(train_policy, ppo_loss=recorded_loss, update_metrics=recorded_metrics)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), wrapped:
        train_policy.train(cli.parse_args(train_policy.PRESETS, COMMAND.split()[2:]))
        [path] = Path("runs").glob("*/metrics.csv")
        with path.open() as file:
            rows = list(csv.DictReader(file))
    names = ("objective/kl", "objective/score", "ppo/loss/policy", "ppo/loss/value", "ppo/loss/total")
    names += ("ppo/policy/clipfrac", "ppo/val/clipfrac", "ppo/val/ratio", "ppo/returns/mean")
    for update, told in updates.items():
        told["train_policy"] |= {name: float(rows[update][name]) for name in names}
        if update + 1 < len(rows):
            told["train_policy"]["next_kl_coef"] = float(rows[update + 1]["objective/kl_coef"])
    return updates


def rounded(value: Any) -> Any:
    """Floats with nine digits, which is all that float32 has."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


# ---- Print -----------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Three decimals, and a minus sign only where they are not all 0."""
    return f"{value:.3f}".replace("-0.000", "0.000")


def term(value: float) -> str:
    """A number of a formula, in brackets if it is negative."""
    return f"({number(value)})" if number(value).startswith("-") else number(value)


def table(label: str, head: Sequence[str], rows: dict[str, Sequence[float | str]]) -> str:
    lines = [[label, *head], ["---"] + ["--:"] * len(head)]
    lines += [[name, *(x if isinstance(x, str) else number(x) for x in row)] for name, row in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def blocks(told: dict[str, Any]) -> list[str]:
    """Everything that docs/chapter1.md shows of the update, in its order: tables, and lines of arithmetic."""
    settings, update = told["settings"], derivation.update(told, told["settings"])
    heads = [[f"`{token.strip()}`" for token in row] for row in told["tokens"]]
    last, episodes = update.epochs[-1], len(heads)

    def episode_tables(rows_of) -> list[str]:
        return [table("token", heads[i], rows_of(i)) for i in SHOWN]

    def what_is_read(i: int) -> dict[str, Sequence[float | str]]:
        return {
            "reaches the scorer": ["yes" if scored else "no" for scored in told["scored"][i]],
            "log p": told["logprobs"][i],
            "log p_ref": told["ref_logprobs"][i],
            "KL": update.kl[i],
            "reward": update.rewards[i],
            "value": told["values"][i],
        }

    def what_is_learned(i: int) -> dict[str, Sequence[float | str]]:
        return {
            "reward, whitened": update.whitened_rewards.rows[i],
            "delta": update.deltas[i],
            "advantage": update.advantages[i],
            "return": update.returns[i],
            "advantage, whitened": update.whitened_advantages.rows[i],
        }

    def what_is_lost(i: int) -> dict[str, Sequence[float | str]]:
        policy, value = last.policy_terms[i], last.value_terms[i]
        return {
            "ratio": last.ratios[i],
            "-A' * ratio": [term.free for term in policy],
            "-A' * clipped ratio": [term.clipped for term in policy],
            "has a gradient": ["no" if term.is_clipped else "yes" for term in policy],
            "new value": told["epochs"][-1]["new_values"][i],
            "(V - R)^2": [term.loss for term in value],
        }

    scores = table(
        "response",
        [str(i + 1) for i in range(episodes)],
        {
            "raw score": told["raw_scores"],
            "stop token": ["yes" if stopped else "no" for stopped in told["stopped"]],
            "score": update.scores,
            "KL of the response": [sum(row) for row in update.kl],
        },
    )
    epochs = table(
        "epoch",
        [str(i + 1) for i in range(len(update.epochs))],
        {
            "mean ratio": [mean(one.ratios) for one in update.epochs],
            "clipped in the policy loss": [share(one.policy_terms) for one in update.epochs],
            "clipped in the value loss": [share(one.value_terms) for one in update.epochs],
            "policy loss": [one.policy_loss for one in update.epochs],
            "value loss": [one.value_loss for one in update.epochs],
            "total loss": [one.total_loss for one in update.epochs],
        },
    )
    return [
        scores,
        *episode_tables(what_is_read),
        whitening_lines(update),
        *episode_tables(what_is_learned),
        advantage_lines(update, told, SHOWN[0]),
        epochs,
        *episode_tables(what_is_lost),
        controller_lines(update, settings, episodes),
    ]


def mean(rows: Sequence[Sequence[float]]) -> float:
    return sum(sum(row) for row in rows) / sum(len(row) for row in rows)


def share(terms: list[list[derivation.Term]]) -> str:
    clipped = [term.is_clipped for row in terms for term in row]
    return f"{sum(clipped)} of {len(clipped)}"


def lines(*texts: str) -> str:
    return "\n".join(["```", *texts, "```"])


def whitening_lines(update: derivation.Update) -> str:
    rewards, advantages = update.whitened_rewards, update.whitened_advantages
    count = sum(len(row) for row in rewards.rows)
    return lines(
        f"{count} rewards:     mean {number(rewards.mean)}, deviation {number(rewards.deviation)}",
        f"{count} advantages:  mean {number(advantages.mean)}, deviation {number(advantages.deviation)}",
    )


def advantage_lines(update: derivation.Update, told: dict[str, Any], i: int) -> str:
    """The last token of a response from its log-prob to its whitened advantage, and the advantage before it."""
    settings, rewards, advantages = told["settings"], update.whitened_rewards, update.whitened_advantages
    kls, raw, whitened, deltas, advantage, values = (
        [term(value) for value in rows[i]]
        for rows in (update.kl, update.rewards, rewards.rows, update.deltas, update.advantages, told["values"])
    )
    n, gamma, decay = len(kls), f"{settings['gamma']:g}", f"{settings['gamma'] * settings['lam']:g}"
    found = [
        f"KL_{n}    = {term(told['logprobs'][i][-1])} - {term(told['ref_logprobs'][i][-1])} = {kls[-1]}",
        f"r_{n}     = -{settings['kl_coef']:.5f} * {kls[-1]} + {term(update.scores[i])} = {raw[-1]}",
        f"r_{n}'    = ({raw[-1]} - {term(rewards.mean)}) / {term(rewards.deviation)} + {term(rewards.mean)} "
        f"= {whitened[-1]}",
        f"delta_{n} = {whitened[-1]} + {gamma} * 0 - {values[-1]} = {deltas[-1]}",
        f"A_{n}     = {deltas[-1]} + {decay} * 0 = {advantage[-1]}",
        f"R_{n}     = {advantage[-1]} + {values[-1]} = {term(update.returns[i][-1])}",
        f"A_{n}'    = ({advantage[-1]} - {term(advantages.mean)}) / {term(advantages.deviation)} "
        f"= {term(advantages.rows[i][-1])}",
        f"delta_{n - 1} = {whitened[-2]} + {gamma} * {values[-1]} - {values[-2]} = {deltas[-2]}",
        f"A_{n - 1}     = {deltas[-2]} + {decay} * {advantage[-1]} = {advantage[-2]}",
    ]
    return lines(*(re.sub(r"= \((\S+)\)$", r"= \1", line) for line in found))


def controller_lines(update: derivation.Update, settings: dict[str, float], episodes: int) -> str:
    kl, target, beta = number(update.mean_kl), f"{settings['target']:g}", f"{settings['kl_coef']:.5f}"
    return lines(
        f"error = clip({kl} / {target} - 1, -0.2, 0.2) = {number(update.kl_error)}",
        f"beta  = {beta} * (1 + {number(update.kl_error)} * {episodes} / {settings['horizon']:g}) "
        f"= {update.next_kl_coef:.5f}",
    )


def main(args: Args) -> None:
    if args.record:
        made = {"command": " ".join(COMMAND.split()), "update": UPDATE, "commit": commit(), "cpu": cpu_name()}
        replace_file(ROOT / RECORDING, json.dumps(rounded(made | record()[UPDATE])) + "\n")
    print("\n\n".join(blocks(read_json(ROOT / RECORDING))))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
