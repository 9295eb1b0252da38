"""One update of each chapter in numbers: the tables of docs/chapter1.md, chapter2.md and chapter3.md.

    python benchmark/experiments/one_update.py                # print every number that the pages show
    python benchmark/experiments/one_update.py --chapter 3    # of one chapter only

Each update has eight responses. Recordings of it hold what the models computed (log-probs and values) and, for
comparison, what the script made of it. The tables are computed from the former by ppo_rlhf/lib/derivation.py.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from ppo_rlhf.lib import derivation
from ppo_rlhf.lib.files import read_json

ROOT = Path(__file__).parents[2]
NAMES = {1: "one_update", 2: "tldr_policy_update", 3: "rlvr_policy_update"}
RECORDINGS = {chapter: ROOT / f"benchmark/results/{name}.json" for chapter, name in NAMES.items()}
SHOWN = {1: (1, 3), 2: (2, 5), 3: (7,)}  # episodes with a table of their own


@dataclass(frozen=True)
class Args:
    chapter: Literal[1, 2, 3] | None = None
    """whose numbers to print; None: those of all three"""


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
        return [table("token", heads[i], rows_of(i)) for i in SHOWN[1]]

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
        advantage_lines(update, told, SHOWN[1][0]),
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


# ---- Print chapters 2 and 3 ------------------------------------------------------------------------------------


def grid(head: Sequence[str], rows: Sequence[Sequence[float | str]]) -> str:
    """A table whose first two columns hold words, and the others numbers."""
    lines = [[*head], ["---", "---"] + ["--:"] * (len(head) - 2)]
    lines += [[x if isinstance(x, str) else str(x) if isinstance(x, int) else number(x) for x in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def derived(told: dict[str, Any], epoch: int = 0) -> list[dict[str, Any]]:
    """Every number of the episodes of a recording in an epoch."""
    settings, episodes = derivation.settings_of(told["args"], told["script"]), told["episodes"]
    group = episodes if settings["chapter"] == 3 else ()
    return [derivation.derive(episode, settings, epoch, group) for episode in episodes]


def word(piece: str) -> str:
    """A token as the tables show it."""
    return {END: "*end*", "\n": "*newline*"}.get(piece, f"`{piece.strip()}`")


END = "<|endoftext|>"


def text(episode: dict[str, Any]) -> str:
    """A response on one line, without the token that ends it."""
    return "".join(episode["pieces"]).replace(END, "").strip().replace("\n", " / ")


def only(found: dict[str, Any], name: str, flag: str) -> list[Any]:
    """The entries of a row where a flag is set."""
    return [value for value, keep in zip(found[name], found[flag], strict=True) if keep]


def total(found: Sequence[dict[str, Any]], name: str, flag: str) -> float:
    return math.fsum(value for one in found for value in only(one, name, flag))


def blocks_of_summaries(told: dict[str, Any]) -> list[str]:
    """Everything that docs/chapter2.md shows of the update, in its order."""
    episodes, settings, found = told["episodes"], derivation.settings_of(told["args"], told["script"]), derived(told)
    head = ("", "summary", "tokens", "ends", "raw score", "score", "KL")
    summaries = [
        (
            *(str(i + 1), text(episode), sum(one["learns"]), "yes" if episode["numbers"]["stopped"] else "no"),
            *(episode["numbers"]["raw_scores"], one["score"], math.fsum(one["kl"])),
        )
        for i, (episode, one) in enumerate(zip(episodes, found, strict=True))
    ]
    tables = []
    for i in SHOWN[2]:
        episode, one, rows = episodes[i], found[i], []
        for t, piece in enumerate(episode["pieces"]):
            is_token = one["learns"][t]
            of_token = [one[name][t] if is_token else "" for name in ("logprobs", "ref_logprobs", "kl")]
            of_value = [one[name][t] for name in ("rewards", "values", "deltas", "raw_advantages", "returns")]
            whitened = one["advantages"][t] if is_token else ""
            rows.append((str(t + 1), word(piece) if is_token else "", *of_token, *of_value, whitened))
        names = ("log p", "log p_ref", "KL", "reward", "value", "delta", "advantage", "return", "A'")
        tables.append(grid(("t", "token", *names), rows))
    tokens, values = (sum(sum(one[name]) for one in found) for name in ("learns", "value_learns"))
    ended, cut = SHOWN[2]
    return [
        grid(head, summaries),
        tables[0],
        end_lines(told, found[ended], settings),
        tables[1],
        cut_lines(found[cut], settings),
        lines(
            f"{tokens} tokens:      mean {number(found[0]['advantage_mean'])}, "
            f"deviation {number(found[0]['advantage_deviation'])}"
        ),
        epoch_table(told, tokens, values),
        table(
            "update",
            [str(update) for update in range(len(told["eos_rate"]))],
            {"ended": [f"{rate * len(episodes):g} of {len(episodes)}" for rate in told["eos_rate"]]},
        ),
    ]


def end_lines(told: dict[str, Any], one: dict[str, Any], settings: dict[str, Any]) -> str:
    """The step after the end, and the token that ends the summary."""
    n, decay, gamma = sum(one["learns"]), f"{settings['gamma'] * settings['lam']:g}", f"{settings['gamma']:g}"
    r, v, d, a, returns = (
        [term(value) for value in one[name]] for name in ("rewards", "values", "deltas", "raw_advantages", "returns")
    )
    mean, deviation = term(one["advantage_mean"]), term(one["advantage_deviation"])
    return lines(
        f"r_{n + 1}     = {term(one['score'])}",
        f"delta_{n + 1} = {r[n]} + {gamma} * 0 - {v[n]} = {bare(d[n])}",
        f"A_{n + 1}     = {d[n]} + {decay} * 0 = {bare(a[n])}",
        f"R_{n + 1}     = {a[n]} + {v[n]} = {bare(returns[n])}",
        f"r_{n}     = -{one['kl_coef']:g} * {term(one['kl'][n - 1])} = {bare(r[n - 1])}",
        f"delta_{n} = {r[n - 1]} + {gamma} * {v[n]} - {v[n - 1]} = {bare(d[n - 1])}",
        f"A_{n}     = {d[n - 1]} + {decay} * {a[n]} = {bare(a[n - 1])}",
        f"A_{n}'    = ({a[n - 1]} - {mean}) / {deviation} = {number(one['advantages'][n - 1])}",
    )


def cut_lines(one: dict[str, Any], settings: dict[str, Any]) -> str:
    """The last token of a summary that does not end."""
    n, gamma = sum(one["learns"]), f"{settings['gamma']:g}"
    r, v, d = ([term(value) for value in one[name]] for name in ("rewards", "values", "deltas"))
    return lines(
        f"r_{n}     = -{one['kl_coef']:g} * {term(one['kl'][-1])} + {term(one['score'])} = {bare(r[-1])}",
        f"delta_{n} = {r[-1]} + {gamma} * 0 - {v[-1]} = {bare(d[-1])}",
    )


def bare(text: str) -> str:
    """A number without its brackets."""
    return text.strip("()")


def epoch_table(told: dict[str, Any], tokens: int, values: int) -> str:
    epochs = [derived(told, k) for k in range(len(told["episodes"][0]["epochs"]["new_logprobs"]))]
    policy, value = ([total(one, *names) for one in epochs] for names in SHARES)
    clipped, value_clipped = (
        [f"{int(total(one, flag, kind))} of {count}" for one in epochs]
        for flag, kind, count in (("is_clipped", "learns", tokens), ("value_is_clipped", "value_learns", values))
    )
    coefficient = derivation.settings_of(told["args"], told["script"])["vf_coef"]
    return table(
        "epoch",
        [str(k + 1) for k in range(len(epochs))],
        {
            "mean ratio": [total(one, "ratio", "learns") / tokens for one in epochs],
            "clipped in the policy loss": clipped,
            "clipped in the value loss": value_clipped,
            "policy loss": policy,
            "value loss": value,
            "total loss": [a + coefficient * b for a, b in zip(policy, value, strict=True)],
        },
    )


SHARES = (("share", "learns"), ("value_share", "value_learns"))


def blocks_of_solutions(told: dict[str, Any]) -> list[str]:
    """Everything that docs/chapter3.md shows of the update, in its order."""
    episodes, found, [best] = told["episodes"], derived(told), SHOWN[3]
    solutions, steps, weights = [], [], []
    for i, (episode, one) in enumerate(zip(episodes, found, strict=True)):
        before, after = (math.fsum(only(row, "row", "flag")) for row in read_twice(episode, one))
        solutions.append((str(i + 1), f"`{text(episode)}`", sum(one["learns"]), one["total"], one["advantages"][0]))
        share, slope = math.fsum(only(one, "share", "learns")), one["gradient"][0] / one["divisor"]
        steps.append((str(i + 1), f"{sum(one['learns'])}", share, f"{slope:.5f}", before, after, after - before))
    one, episode = found[best], episodes[best]
    new = episode["tokens"]["new_logprobs"]
    moved = [
        (
            str(t + 1),
            context(episode["pieces"], t),
            *map(math.exp, (one["logprobs"][t], new[t])),
            new[t] - one["logprobs"][t],
        )
        for t in range(len(new))
        if abs(new[t] - one["logprobs"][t]) >= MOVED
    ]
    settings = derivation.settings_of(told["args"], told["script"])
    counts = {name: one[name] for name in ("tokens", "sequences", "episodes", "length")}
    short = min(range(len(found)), key=lambda i: sum(found[i]["learns"]))
    for name in derivation.DIVISORS:
        divisors = [derivation.divisor(name, sum(other["learns"]), counts) for other in found]
        loss = math.fsum(math.fsum(only(x, "loss", "learns")) / d for x, d in zip(found, divisors, strict=True))
        weights.append((f"`{name}`", *(f"1 / {int(divisors[i])}" for i in (short, best)), loss))
    assert settings["estimator"] == "grpo"
    return [
        grid(("", "response", "tokens", "R", "A"), solutions),
        group_lines(found, best),
        grid(("", "tokens", "share of the loss", "gradient per token", "log p before", "after", "change"), steps),
        step_lines(told, episodes[best], one, best),
        grid(("t", "token", "probability before", "after", "change of log p"), moved),
        grid(("", f"weight of a token of response {short + 1}", f"of response {best + 1}", "policy loss"), weights),
    ]


def step_lines(told: dict[str, Any], episode: dict[str, Any], one: dict[str, Any], best: int) -> str:
    before, after = (math.fsum(only(row, "row", "flag")) for row in read_twice(episode, one))
    logged = told["logged"]
    return lines(
        f"policy loss      {number(logged['loss/policy_avg'])}",
        f"gradient norm    {number(logged['policy/grad_norm'])}",
        f"response {best + 1}       exp({number(before)}) = {100 * math.exp(before):.1f} % before the step, "
        f"exp({number(after)}) = {100 * math.exp(after):.1f} % after it",
    )


MOVED = 0.05  # nats, by which a token must move to be shown


def read_twice(episode: dict[str, Any], one: dict[str, Any]) -> list[dict[str, Any]]:
    """The log-probs of a response before the update and after it."""
    rows = one["logprobs"], episode["tokens"]["new_logprobs"]
    return [{"row": row, "flag": one["learns"]} for row in rows]


def context(pieces: Sequence[str], t: int) -> str:
    """A token with its line up to there."""
    before = "".join(pieces[:t]).rpartition("\n")[2]
    return (
        f"{word(pieces[t])} after `{before}`"
        if before
        else f"{word(pieces[t])} at the start of line {''.join(pieces[:t]).count(chr(10)) + 1}"
    )


def group_lines(found: Sequence[dict[str, Any]], best: int) -> str:
    one, other = found[best], found[(best + 1) % len(found)]
    n, mean, deviation = one["group_size"], term(one["group_mean"]), term(one["group_deviation"])
    squares = f"{n - 1} * {mean}^2 + ({term(one['total'])} - {mean})^2"
    return lines(
        f"mean      = ({n - 1} * {term(other['total'])} + {term(one['total'])}) / {n} = {mean}",
        f"deviation = sqrt(({squares}) / {n - 1}) = {deviation}",
        f"A         = ({term(one['total'])} - {mean}) / {deviation} = {number(one['advantages'][0])}     correct",
        f"A         = ({term(other['total'])} - {mean}) / {deviation} = {number(other['advantages'][0])}    wrong",
    )


BLOCKS = {1: blocks, 2: blocks_of_summaries, 3: blocks_of_solutions}


def main(args: Args) -> None:
    for chapter, blocks_of in BLOCKS.items():
        if args.chapter in (None, chapter):
            print("\n\n".join(blocks_of(read_json(RECORDINGS[chapter]))), end="\n\n")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
