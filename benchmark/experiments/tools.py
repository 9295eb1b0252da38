"""What happens if the tool's tokens are trained on: rlvr_tools.py on sums-tools, five seeds of each.

    python benchmark/experiments/tools.py run --workers 2           # all of them; repeat it to resume
    python benchmark/experiments/tools.py report                    # the table of what has finished
    python benchmark/experiments/tools.py draw                      # the picture again, from its tables
    # the mistake alone, with arguments of rlvr_tools.py
    python benchmark/experiments/tools.py with in-the-loss --preset sums-tools

A run with the mistake treats the tool's tokens as if the policy had sampled them: they are in loss, KL and advantage.
Their old log-probs are those of the policy that sampled the rest. Everything else is the same: problems, their order,
sampling noise, and the language model that all runs start from. In that model's training, the tool's tokens were
masked, too.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure

from benchmark import lab
from benchmark.lab import CORRECT, GREEDY, SAMPLES, Column
from ppo_rlhf import rlvr_tools
from ppo_rlhf.lib import cli, lm
from ppo_rlhf.lib.errors import InputError, run_script

MASKED, MISTAKE = VARIANTS = ("masked", "in-the-loss")
CURVES = (CORRECT, "policy/grad_norm", "policy/approxkl_avg", "policy/clipfrac_avg")
COLUMNS = [
    Column(head=f"{head} {words}{' (%)' * (not paired)}", of=column, form="+.1f" if paired else ".1f", paired=paired)
    for words, column in {
        "while it learns": CORRECT,
        "samples after it": "samples",
        "greedy after it": "greedy",
    }.items()
    for head, paired in (("right,", False), ("difference,", True))
] + [
    Column(head="calls per response", of="calls", form=".2f", scale=1),
    Column(head="errors per response", of="errors", form=".3f", scale=1),
    Column(head="gradient norm", of="policy/grad_norm", form=".2f", scale=1),
    Column(head="clipped (%)", of="policy/clipfrac_avg", form=".2f"),
]


def with_mistake(name: str, argv: list[str]) -> Callable[[], Any]:
    """What rlvr_tools.py does with these arguments and, in-the-loss, the mistake: a function without arguments."""
    if name not in VARIANTS:
        raise InputError(f"{name} is none of {', '.join(VARIANTS)}")
    if name == MISTAKE:
        rlvr_tools.converse = without_holes(rlvr_tools.converse)
    return lambda: rlvr_tools.train(cli.parse_args(rlvr_tools.PRESETS, argv, rlvr_tools.__doc__))


def without_holes(converse: Callable) -> Callable:
    """A sampler that gives the tool's tokens the log-probs that the policy has for them, in place of NaN."""

    @torch.no_grad()
    def changed(
        model: Any,
        contexts: Any,
        uniforms: Any,
        pad_id: int,
        vocab_size: int,
        temperature: float,
        *others: Any,
        **talk: Any,
    ) -> Any:
        responses, logprobs = converse(model, contexts, uniforms, pad_id, vocab_size, temperature, *others, **talk)
        whole = torch.cat([contexts, responses], 1)
        read, _ = lm.response_statistics(model, whole, responses, pad_id, temperature, vocab_size)
        return responses, torch.where(logprobs.isnan(), read.to(logprobs.dtype), logprobs)

    return changed


def measure(folder: Path, meta: dict[str, Any], table: pd.DataFrame) -> dict[str, Any]:
    """The share of correct samples while it learns is the mean of all updates: of two policies that end with the same
    share, it tells which was faster.
    """
    texts = [json.loads(line)["response"] for line in (folder / "evaluation.jsonl").read_text().splitlines()]
    found = {"samples": meta["results"][SAMPLES], "greedy": meta["results"][GREEDY]}
    found |= {name: sum(map(str.count, texts, [x] * len(texts))) / len(texts) for name, x in SIGNS.items()}
    return found | {column: table[column].mean() for column in CURVES}


SIGNS = {"calls": "]", "errors": "error: "}  # of them in a response


def table_of(runs: pd.DataFrame) -> list[dict[str, str]]:
    rows = lab.rows_of(runs, COLUMNS, baseline="variant == 'masked'")
    return [{"the tool's tokens": name.replace("-", " ")} | row for (name,), row in rows]


def picture_of(runs: pd.DataFrame, updates: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, color in zip(VARIANTS, ("#0072b2", "#d55e00"), strict=True):
        lab.draw_curve(axes, updates[updates["variant"] == name], name.replace("-", " "), band=0.15, color=color)
    lab.finish_panel(axes, "right samples,\nproblems not seen before")
    axes.legend(fontsize=8, frameon=False, title="the tool's tokens", title_fontsize=8)
    return figure


EXPERIMENT = lab.Experiment(
    name="tools",
    script="benchmark/experiments/tools.py with {variant}",
    common="--preset sums-tools",
    variants=dict.fromkeys(VARIANTS, ""),
    curves=CURVES,
    measure=measure,
    table=table_of,
    picture=picture_of,
)

if __name__ == "__main__":
    if sys.argv[1:2] == ["with"] and len(sys.argv) > 2:
        run_script(lambda: with_mistake(sys.argv[2], sys.argv[3:])())
    else:
        lab.main(EXPERIMENT, __doc__)
