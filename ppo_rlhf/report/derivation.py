"""Every number of a token, from its log-prob to its loss, in plain arithmetic that a pocket calculator can follow.

The training scripts compute with tensors, many episodes at a time. This module computes the same numbers slowly, one
token after the other, from what the models said. It shares no code with the scripts, and tests compare the two.
derivation.toml has the steps: each is an expression, which gives the number and also the text of the formula.
"""

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import CodeType
from typing import Any

NAN = float("nan")
TABLE = tomllib.loads((Path(__file__).parent / "derivation.toml").read_text("utf-8"))
NAMES = re.compile(r"(?<![\w.])[a-z]\w*")  # in an expression

CHAPTERS = {"train": 1, "tldr": 2, "rlvr": 3}  # by the beginning of a script's name
WHITENED = ("gae", "gdpo", "reinforce++", "reinforce++-baseline")  # estimators, unless the arguments say otherwise
GROUPS = ("grpo", "dr_grpo", "rloo", "opo", "maxrl", "reinforce++-baseline")  # estimators with one total per response
OWN_TARGETS = ("critic_lam", "lam_alpha")  # with one of these, the critic has targets of its own
RECORDED = ("kl", "rewards", "returns", "advantages")  # which a trace holds, too
ROUNDING = 2e-5  # of the largest number in a line, and of 0.1 at least


def clip(number: float, low: float, high: float) -> float:
    return min(max(number, low), high)


# The scripts bound exponents in the same way.
FUNCTIONS = {"exp": lambda x: math.exp(clip(x, -20, 20)), "clip": clip, "sum": math.fsum}
FUNCTIONS |= {"abs": abs, "max": max, "min": min}


class Numbers(dict):
    """Numbers of a token by name. What a trace lacks is NaN."""

    def __missing__(self, name: str) -> float:
        return NAN

    def evaluate(self, expression: CodeType) -> Any:
        return eval(expression, {"__builtins__": {}}, self)


# ---- The steps of a run ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Step:
    """A line of a derivation."""

    name: str  # of the number that it gives
    title: str
    formula: str
    filled: str  # the formula with {name} for each number
    sentence: str
    place: str  # file, function and mark
    recorded: str  # the number of the trace that must be equal; empty if there is none
    names: list[str]  # of the numbers in the expression
    expression: CodeType
    only: CodeType  # whether a token has this line


DEFAULTS = {  # of arguments that not every script has
    "ppo": {
        "advantage": "gae",
        "loss": "ppo",
        "gamma": NAN,
        "lam": NAN,
        "lam_alpha": None,
        "critic_lam": None,  # lam
        "whiten_rewards": False,
        "whiten_advantages": None,
        "cliprange": NAN,
        "cliprange_low": None,
        "cliprange_high": None,
        "dual_clip": None,
        "trust_region": 0.3,
        "cliprange_value": None,
        "nll_coef": 0.0,
        "loss_aggregation": "token-mean",
    },
    "rewards": {
        "kl_coef": 1.0,
        "kl_estimator": "k1",
        "kl_loss_coef": 0.0,
        "kl_loss_estimator": "k3",
        "format": None,
        "trained_model": None,
        "trained_weight": 1.0,
        "teacher": "",
    },
}
OF_SAMPLING = {  # rlvr/asynchronous.py: an older policy may have sampled
    "correction": "none",
    "correction_cap": 0,
    "off_policy_mask": None,
    "staleness": 0,
}


def settings_of(args: Mapping[str, Any], script: str) -> dict[str, Any]:
    """The arguments that a derivation needs, and what follows from them. args, script: of meta.json."""
    s = {name: args.get(name, default) for name, default in OF_SAMPLING.items()}
    for group, defaults in DEFAULTS.items():
        s |= {name: args.get(group, {}).get(name, default) for name, default in defaults.items()}
    s["chapter"] = CHAPTERS[script.split("_")[0]]
    if s["chapter"] < 3:
        s["cliprange_low"] = s["cliprange_high"] = s["cliprange"]
    elif s["cliprange_low"] is None:
        s["cliprange_low"] = 1.0 if s["loss"] == "cispo" else 0.2
    if s["whiten_advantages"] is None:
        s["whiten_advantages"] = s["advantage"] in WHITENED
    if s["correction"] == "auto":
        s["correction"] = "decoupled" if s["staleness"] else "none"
    exact = s["teacher"] and s["kl_estimator"] == "full"
    if s["teacher"]:
        s |= {"kl_coef": 1.0, "kl_loss_coef": 1.0 if exact else 0.0, "kl_loss_estimator": "full"}
    s["has_exact_baseline"] = bool(exact) and s["advantage"] != "gae"
    s["sources"] = {"verifier": 0.0 if s["teacher"] else 1.0}
    s["sources"] |= {"format": 1.0} if s["format"] else {}
    s["sources"] |= {"reward_model": s["trained_weight"]} if s["trained_model"] else {}
    # Chapter 3 loads no reference where nothing is penalised.
    s["reference"] = s["chapter"] < 3 or bool(s["kl_coef"] or s["kl_loss_coef"])
    return s


KL_FORMS = {
    "k1": "{} - ref_logprobs",
    "abs": "abs({} - ref_logprobs)",
    "k2": "({} - ref_logprobs) ** 2 / 2",
    "k3": "exp(ref_logprobs - {0}) - 1 + {0} - ref_logprobs",
}
DIVISORS = {
    "token-mean": "tokens",
    "seq-mean-token-sum": "sequences",
    "seq-mean-token-mean": "(sequences * response_tokens)",
    "seq-mean-token-sum-norm": "(episodes * length)",
}


def forms_of(s: Mapping[str, Any]) -> dict[str, str]:
    """The meaning of some words in derivation.toml, by the settings of a run."""
    advantages = "advantages" if s["whiten_advantages"] else "raw_advantages"
    old = "sampler_logprobs" if s["correction"] == "bypass" else "logprobs"
    weighted = s["correction"] == "decoupled" or (s["correction"] == "bypass" and s["loss"] == "reinforce")
    has_own_targets = any(s[name] is not None for name in OWN_TARGETS)
    form = s["kl_loss_estimator"]
    kl_loss = "new_exact_kl" if form == "full" else KL_FORMS[form.removesuffix("+")].format("new_logprobs")
    leaves = {"ipo": "abs(moved)", "dppo": f"(moved if {advantages} > 0 else -moved)"}.get(s["loss"])
    dual = s["loss"] == "ppo" and s["dual_clip"] is not None
    return {
        "kl_form": "exact_kl" if s["kl_estimator"] == "full" else KL_FORMS[s["kl_estimator"]].format("logprobs"),
        "kl_loss_form": f"({kl_loss}) * exp(new_logprobs - {old})" if form.endswith("+") else kl_loss,
        "used_rewards": "whitened_rewards" if s["whiten_rewards"] else "rewards",
        "policy_lam": "lam" if s["lam_alpha"] is None else "length_lam",
        "target_advantages": "own_targets" if has_own_targets else "raw_advantages",
        "weighted_sources": " + ".join(f"weight_{name} * scaled_{name}" for name in s["sources"]),
        "used_advantages": advantages,
        "used_sums": "sums + exact_kl" if s["has_exact_baseline"] else "sums",
        "old_logprobs": old,
        "dual": f"({advantages} < 0 and max(unclipped, clipped) > -{advantages} * dual_clip)" if dual else "False",
        "leaves": f"({leaves} > trust_region and {advantages} != 0)",
        "masked": "False" if s["off_policy_mask"] is None else f"({advantages} < 0 and too_unlikely)",
        "weighted_gradient": "weights * gradient" if weighted else "gradient",
        "weighted_loss": "weights * loss" if weighted else "loss",
        "weighted_kl_loss": "weights * kl_loss" if weighted and form != "full" else "kl_loss",
        "divisor": DIVISORS[s["loss_aggregation"]],
        "value_error": "value_free" if s["cliprange_value"] is None else "max(value_free, value_clipped)",
        "value_divisor": "value_count" if s["chapter"] < 3 else DIVISORS[s["loss_aggregation"]],
    }


def steps_of(settings: Mapping[str, Any]) -> list[Step]:
    """The lines of a run's derivations, in the order of the algorithm."""
    forms, found = forms_of(settings), []
    rows = [row for row in TABLE["step"] if eval(row.get("when", "True"), {"GROUPS": GROUPS}, dict(settings))]
    sources = {True: list(settings["sources"]), False: [""]}
    rows = [
        {key: text.replace("SOURCE", source) if isinstance(text, str) else text for key, text in row.items()}
        for row in rows
        for source in sources["SOURCE" in row["name"]]
    ]
    symbols = TABLE["symbols"] | {row["name"]: row["symbol"] for row in rows}
    symbols |= {f"next_{name}": symbol.replace("_t", "_t+1") for name, symbol in symbols.items()}
    for row in rows:
        expression, only = (
            NAMES.sub(lambda match: forms.get(match[0], match[0]), text)
            for text in (row["expression"], row.get("only", "True"))
        )
        file, function, mark = row["where"][min(settings["chapter"], len(row["where"])) - 1].split()
        recorded = "advantages" if row["name"] == forms["used_advantages"] else row["name"]
        formula = NAMES.sub(lambda match: symbols.get(match[0], match[0]), with_signs(expression, total="Σ"))
        filled = NAMES.sub(
            lambda match: match[0] if match[0] in FUNCTIONS else f"{{{match[0]}}}", with_signs(expression)
        )
        found.append(
            Step(
                name=row["name"],
                title=row["title"].replace("_", " "),
                formula=row.get(
                    "formula", row["symbol"] if expression == row["name"] else f"{row['symbol']} = {formula}"
                ),
                filled=filled,
                sentence=row["sentence"],
                place=f"ppo_rlhf/{file} {function} [{mark}]",
                recorded=recorded if recorded in RECORDED else "",
                names=[name for name in dict.fromkeys(NAMES.findall(expression)) if name not in FUNCTIONS],
                expression=compile(expression, "derivation.toml", "eval"),
                only=compile(only, "derivation.toml", "eval"),
            )
        )
    return found


def with_signs(expression: str, total: str = "") -> str:
    """An expression as it is written on paper. total: the sign of a sum over the group."""
    for code, sign in (("1e-6", "10⁻⁶"), (" ** 2", "²"), ("*", "·"), ("-", "−"), ("sum(", f"{total}(")):
        expression = expression.replace(code, sign)
    return expression


# ---- The numbers of an episode ---------------------------------------------------------------------------------


def row_of(values: Sequence[float | None] | None, n: int) -> list[float]:
    return [NAN] * n if values is None else [NAN if value is None else value for value in values]


def marks(tokens: Mapping[str, Sequence[int]], n: int, chapter: int) -> dict[str, list[bool]]:
    """Which tokens pay for the KL, have a reward and a value, are in the policy loss, and in the value loss."""
    names = ("mask", "value_mask", "scored")
    mask, value_mask, scored = ([bool(x) for x in tokens.get(name, [True] * n)] for name in names)
    if chapter == 3:
        return {"pays": scored, "rewarded": scored, "learns": mask, "value_learns": mask}
    # Chapter 1 has no masks: everything counts.
    return {"pays": mask, "rewarded": value_mask, "learns": mask, "value_learns": value_mask}


def derive(
    episode: Mapping[str, Any],
    settings: Mapping[str, Any],
    steps: Sequence[Step],
    epoch: int = -1,
    group: Sequence[Mapping[str, Any]] = (),
) -> list[Numbers]:
    """All numbers of each token of an episode in an epoch, by default the last.

    episode: as page.py reads it from a trace. steps: of `steps_of`. group: the episodes of its group, this one too.
    """
    tokens, n = episode["tokens"], len(episode["places"])
    names = ("logprobs", "ref_logprobs", "values", "sampler_logprobs", "exact_kl")
    rows = {name: row_of(tokens.get(name), n) for name in names}
    rows["weights"] = row_of(tokens.get("weights", [1.0] * n), n)
    rows |= {f"new_{name.removeprefix('new_')}": row_of(x[epoch], n) for name, x in episode.get("epochs", {}).items()}
    rows |= marks(tokens, n, settings["chapter"])
    last = max((t for t in range(n) if rows["rewarded"][t]), default=-1)
    rows["last"] = [t == last for t in range(n)]
    earned = rows["token_scores"] = row_of(tokens.get("token_scores", [0.0] * n), n)
    rows["earns"] = [score != 0 for score in earned]
    numbers, shared = episode["numbers"], episode.get("statistics", {})
    is_kept = shared.get("kept", 1)  # else it was rejected whole, and has no advantages
    rows["valued"] = [bool(rewarded and is_kept) for rewarded in rows["rewarded"]]
    rows["right"] = [learns and (numbers.get("verifier") or 0) > 0 for learns in rows["learns"]]

    whole = {name: x for name, x in settings.items() if isinstance(x, int | float)}
    whole |= FUNCTIONS | numbers_of_response(rows, settings) | numbers_of_group(episode, group, settings)
    left = row_of([numbers.get("scores")], 1)[0] - math.fsum(earned[:last])  # for the last token
    whole |= {"score": left, "kl": 0.0, "kl_coef": NAN}
    for name, value in shared.items():
        value = value[epoch] if isinstance(value, list) else value
        if value is not None:
            whole["value_count" if name == "values" else name] = value

    found: list[Numbers] = []
    following: Mapping[str, float] = {}  # numbers of the next token that has a value: a tool's tokens have none
    for t in reversed(range(n)):
        of_token = Numbers(whole | {name: row[t] for name, row in rows.items()})
        for name in ("values", "raw_advantages", "own_targets", "sums"):
            of_token[f"next_{name}"] = following.get(name, 0.0)
        for step in steps:
            if of_token.evaluate(step.only):
                of_token[step.name] = of_token.evaluate(step.expression)
        following = of_token if of_token["valued"] else following
        found.insert(0, of_token)
    return found


def numbers_of_response(rows: Mapping[str, list], settings: Mapping[str, Any]) -> dict[str, float]:
    """Counts and sums over the tokens of a response, and the lambda of the critic's targets."""
    new, old = rows.get("new_logprobs", [NAN] * len(rows["learns"])), rows["logprobs"]
    if settings["correction"] == "bypass":
        old = rows["sampler_logprobs"]
    learns = [t for t, counts in enumerate(rows["learns"]) if counts]
    count = max(len(learns), 1)
    moved = math.fsum(new[t] - old[t] for t in learns)
    fell = math.fsum(rows["sampler_logprobs"][t] - new[t] for t in learns) / count
    delta = settings["off_policy_mask"]
    return {
        "valued_tokens": sum(rows["valued"]),
        "response_tokens": count,
        "log_ratio": moved / count,
        "too_unlikely": delta is not None and fell > delta,
        "critic_lam": settings["lam"] if settings["critic_lam"] is None else settings["critic_lam"],
    }


def numbers_of_group(
    episode: Mapping[str, Any], group: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The group that a response is compared with. Episodes that were left out whole don't belong to it."""
    group = [other for other in group if other.get("statistics", {}).get("kept", 1)] or [episode]
    totals, lengths = zip(*map(total_of, group), strict=True)
    mean = math.fsum(totals) / len(totals)
    least_mean = 1e-5 * math.fsum(map(abs, totals)) / len(totals)  # 0, but for rounding
    found = {
        "total": total_of(episode)[0],
        "totals": list(totals),
        "group_size": len(totals),
        "group_deviation": deviation(totals),
        "group_weighted_mean": math.fsum(map(math.prod, zip(totals, lengths, strict=True))) / max(sum(lengths), 1),
        # Without known scores, this is unknown, too.
        "differ": not (max(totals) <= min(totals) or (settings["advantage"] == "maxrl" and mean <= least_mean)),
    }
    for name, weight in settings["sources"].items():
        said = row_of([other["numbers"].get(name) for other in group], len(group))
        found[name] = row_of([episode["numbers"].get(name)], 1)[0]
        found[f"weight_{name}"] = weight
        found[f"mean_{name}"] = math.fsum(said) / len(said)
        found[f"deviation_{name}"] = deviation(said)
    return found


def deviation(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1))


def total_of(episode: Mapping[str, Any]) -> tuple[float, int]:
    """The sum of an episode's recorded rewards, and how many tokens have one."""
    counts = marks(episode["tokens"], len(episode["places"]), 3)["rewarded"]
    rewards = row_of(episode["tokens"].get("rewards"), len(counts))
    return math.fsum(reward for reward, count in zip(rewards, counts, strict=True) if count), sum(counts)


# ---- Lines: formula, numbers, result ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Line:
    """A step with the numbers of one token."""

    step: Step
    numbers: dict[str, str]  # as they are written
    result: str  # with as many digits as follow from `numbers`; ? if the trace lacks what it needs
    value: float
    recorded: float  # by the run; NaN if it was not
    tolerance: float  # of the difference between the two

    @property
    def filled(self) -> str:
        return self.step.filled.format(**self.numbers)

    @property
    def is_read(self) -> bool:
        """Whether there is nothing to compute."""
        return not re.search(r"[^{}\w]", self.step.filled)

    @property
    def wrong(self) -> bool:
        """Whether it differs from the recorded number by more than rounding."""
        return abs(self.value - self.recorded) > self.tolerance


def lines_of(
    episode: Mapping[str, Any], steps: Sequence[Step], numbers: Sequence[Numbers], epoch: int = -1
) -> list[list[Line]]:
    """The lines of each token of an episode. numbers: of `derive`."""
    recorded = episode["tokens"] | {name: rows[epoch] for name, rows in episode.get("epochs", {}).items()}
    rows = {name: row_of(recorded.get(name), len(numbers)) for name in RECORDED}
    return [
        [
            line_of(step, of_token, rows[step.recorded][t] if step.recorded else NAN)
            for step in steps
            if of_token.evaluate(step.only)
        ]
        for t, of_token in enumerate(numbers)
    ]


def line_of(step: Step, numbers: Numbers, recorded: float) -> Line:
    value = numbers[step.name]
    used = {name: numbers[name] for name in step.names}
    texts = {name: written(x) for name, x in used.items()}
    known = [x for one in (*used.values(), value) for x in (one if isinstance(one, list) else [one])]
    smallest = min([1, *(x for name, x in used.items() if "deviation" in name)])
    return Line(
        step=step,
        numbers={name: f"({text})" if text.startswith("-") else text for name, text in texts.items()},
        result="?" if any(map(math.isnan, known)) else result_of(step, numbers, texts),
        value=value,
        recorded=recorded,
        tolerance=ROUNDING * max(map(abs, [*known, 0.1])) / smallest,
    )


def result_of(step: Step, numbers: Numbers, texts: Mapping[str, str]) -> str:
    """Four digits, or as many as a reader finds who computes with the numbers as they are written."""
    as_written = {name: [*map(float, text.split(" + "))] for name, text in texts.items()}
    as_written = {name: x if isinstance(numbers[name], list) else x[0] for name, x in as_written.items()}
    again = Numbers(FUNCTIONS | as_written).evaluate(step.expression)
    digits = 4
    while digits > 1 and written(numbers[step.name], digits) != written(again, digits):
        digits -= 1
    return written(again, digits)


def written(number: float | list[float], digits: int = 6) -> str:
    """With so many significant digits, and never as 1e-5."""
    if isinstance(number, list):
        return " + ".join(map(written, number))
    return format(Decimal(f"{number + 0.0:.{digits}g}"), "f")


def packed(steps: Sequence[Step], lines: Sequence[Sequence[Line]]) -> dict[str, Any]:
    """The lines of an episode's tokens for the page: as texts, a row for each result and for each number.

    A row has a text for each token, divided by semicolons; the text is empty where there is no line. A number that is
    the same everywhere has one text.
    """
    numbers: dict[str, list[str]] = {}
    results = [[""] * len(lines) for _ in steps]
    places = {id(step): row for step, row in zip(steps, results, strict=True)}
    for t, of_token in enumerate(lines):
        for line in of_token:
            is_checked = not math.isnan(line.value - line.recorded)
            verdict = f" ✗ recorded: {written(line.recorded)}" if line.wrong else " ✓"
            check = verdict if is_checked else ""
            places[id(line.step)][t] = line.result + check
            for name, text in line.numbers.items():
                numbers.setdefault(name, [""] * len(lines))[t] = text
    for name, row in numbers.items():
        if len(different := {*row} - {""}) == 1:
            numbers[name] = [*different]
    return {
        "results": [";".join(row) for row in results],
        "numbers_of_lines": {name: ";".join(row) for name, row in numbers.items()},
    }
