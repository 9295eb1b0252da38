"""benchmark/experiments/methods.py and dpo.py: DPO against TRL's numbers, best-of-n by enumeration, and the pages."""

import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from golden_models import close, load_arrays, under
from processes import launch
from runs import posts_arguments
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from benchmark.experiments import dpo, methods

ROOT = Path(methods.__file__).parents[2]
TRL, ARRAYS = json.loads((ROOT / "tests/golden/trl_dpo/cases.json").read_text()), load_arrays("trl_dpo/cases")
PAD = TRL["config"]["vocab_size"]


# ---- DPO -------------------------------------------------------------------------------------------------------


def golden_model(name: str) -> GPTNeoXForCausalLM:
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**TRL["config"])).double()
    with torch.no_grad():
        for parameter, array in under(ARRAYS, f"{name}/").items():
            model.get_parameter(parameter).copy_(array)
    return model


def texts() -> list[torch.Tensor]:
    """Queries, padded on the left, and chosen and rejected summaries, padded on the right."""
    queries, *summaries = ([row[f"{name}_ids"] for row in TRL["rows"]] for name in ("prompt", "chosen", "rejected"))
    padded = [torch.tensor([[PAD] * (6 - len(row)) + row for row in queries])]
    return padded + [torch.tensor([row + [PAD] * (6 - len(row)) for row in rows]) for rows in summaries]


@pytest.mark.parametrize("beta", TRL["cases"])
def test_dpo_gives_trls_numbers(beta):
    """Loss, rewards, log-probs and gradient of TRL's trainer; the two log-ratios have their own metrics there."""
    expected, policy, reference = TRL["cases"][beta], golden_model("policy"), golden_model("reference")
    reading = {"pad_id": PAD, "temperature": 1.0, "vocab_size": PAD}
    logprobs = dpo.pair_logprobs(policy, *texts(), **reading)
    with torch.no_grad():
        ref_logprobs = dpo.pair_logprobs(reference, *texts(), **reading)
    losses, margins = dpo.dpo_losses(*logprobs, *ref_logprobs, float(beta))
    losses.mean().backward()
    rewards = [float(beta) * (ours - ref).mean() for ours, ref in zip(logprobs, ref_logprobs, strict=True)]
    for name, value in {
        "loss": losses.mean(),
        "logps/chosen": logprobs[0].mean(),
        "logps/rejected": logprobs[1].mean(),
        "rewards/chosen": rewards[0],
        "rewards/rejected": rewards[1],
        "rewards/margins": margins.mean(),
        "rewards/accuracies": (margins > 0).double().mean(),
    }.items():
        close(value.detach(), torch.tensor(expected[name]).double(), atol=5e-6, name=name)
    for name, gradient in under(ARRAYS, f"gradient/{beta}/").items():
        close(policy.get_parameter(name).grad, gradient, atol=5e-6, name=name)


def test_dpo_losses_by_hand():
    """Log-ratios 1 and -1: the margin is 2 beta. With beta = log(3) / 2 the loss is -log(3 / 4)."""
    losses, margins = dpo.dpo_losses(*(torch.tensor([x]) for x in (-4.0, -7.0, -5.0, -6.0)), beta=math.log(3) / 2)
    assert margins.item() == pytest.approx(math.log(3)) and losses.item() == pytest.approx(math.log(4 / 3))
    worse, _ = dpo.dpo_losses(*(torch.tensor([x]) for x in (-7.0, -4.0, -6.0, -5.0)), beta=math.log(3) / 2)
    assert worse.item() == pytest.approx(math.log(4))


def test_a_temperature_divides_the_logits():
    half, whole = golden_model("policy"), golden_model("policy")
    with torch.no_grad():
        whole.get_output_embeddings().weight.mul_(2)
    reading = {"pad_id": PAD, "vocab_size": PAD}
    for ours, theirs in zip(
        dpo.pair_logprobs(half, *texts(), temperature=0.5, **reading),
        dpo.pair_logprobs(whole, *texts(), temperature=1.0, **reading),
        strict=True,
    ):
        close(ours, theirs, atol=1e-12)


def test_dpo_learns_the_comparisons(tiny_posts, tmp_path):
    """The first loss is log 2, because the policy is the reference; after many passes over few pairs it is lower."""
    words = [*posts_arguments(tiny_posts), "--base_model", str(tiny_posts / "model"), "--output", "policy"]
    words += ["--num_train", "8", "--epochs", "12", "--beta", "0.5", "--lr", "0.01"]
    result = launch(Path(dpo.__file__), *words, folder=tmp_path)
    assert result.status == 0, result
    assert launch(Path(dpo.__file__), *words, "--output", "again", folder=tmp_path).status == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("policy", "again")]
    assert weights[0] == weights[1]
    args = dpo.cli.parse_args(dpo.PRESETS, [*words, "--output", str(tmp_path / "here")])
    steps = []
    metrics = dpo.train(args, lambda step, steps_in_all, policy: steps.append((step, steps_in_all)))
    assert steps == [(step, 12) for step in range(13)]
    assert metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-6) and metrics[-1]["loss"] < 0.5


# ---- Best-of-n -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_best_of_n_is_the_mean_over_all_subsets(n):
    random = np.random.default_rng(n)
    proxy, gold = random.normal(size=(2, 4, 5))
    subsets = list(itertools.combinations(range(5), n))
    best = [[max(subset, key=own.__getitem__) for subset in subsets] for own in proxy]
    expected = [np.mean(own[chosen]) for own, chosen in zip(gold, best, strict=True)]
    np.testing.assert_allclose(methods.best_of_n(proxy, gold, n), expected)


def test_kl_of_best_of_n_by_counting():
    """Among 2,000 equally likely samples, number i is the best of n with probability (i^n - (i - 1)^n) / 2000^n."""
    for n in (1, 2, 4, 16):
        i, size = np.arange(1, 2_001), 2_000
        probs = (i / size) ** n - ((i - 1) / size) ** n
        probs = probs[probs > 0]
        assert methods.best_of_n_kl(n) == pytest.approx((probs * np.log(probs * size)).sum(), abs=2e-3)


# ---- Points ----------------------------------------------------------------------------------------------------


def test_gold_at_a_distance_by_hand():
    curve = pd.DataFrame({"kl": [0.0, 1.0, 2.0], "gold": [1.0, 1.5, 3.0]})
    assert methods.gold_at(curve, 0.5) == 1.25 and methods.gold_at(curve, 1.5) == 2.25
    assert math.isnan(methods.gold_at(curve, 2.5))


# ---- The committed pages ---------------------------------------------------------------------------------------

RESULTS = ROOT / "benchmark/results/methods"
if_run = pytest.mark.skipif(not (RESULTS / "points.csv").exists(), reason="methods.py has not been run yet")
SECTION = (ROOT / "docs/results.md").read_text().partition("## Best-of-n, DPO and PPO")[2].partition("\n## ")[0]


def rows_under(text: str, header: str) -> dict[str, list[str]]:
    """The cells of a table by the first of each row. header: how its first line begins."""
    lines = text[text.index(header) :].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines[: lines.index("")]]
    return {first: cells for first, *cells in rows}


def check_cell(cell: str, values: list[float], places: int) -> None:
    """Mean and 95 % interval over seeds."""
    numbers = [float(number) for number in re.findall(r"-?\d+\.\d+", cell)]
    assert numbers[0] == pytest.approx(np.mean(values), abs=0.51 * 10**-places), cell
    if len(values) > 1:
        error = np.std(values, ddof=1) / math.sqrt(len(values))
        assert numbers[1] == pytest.approx(scipy.stats.t.ppf(0.975, len(values) - 1) * error, abs=0.0051), cell


def gold_by_hand(curve: pd.DataFrame, kl: float) -> float:
    """The line between the two neighbouring points, in the order of their KL."""
    below, above = curve[curve["kl"] <= kl], curve[curve["kl"] > kl]
    if above.empty:
        return math.nan
    (x0, y0), (x1, y1) = (
        own[["kl", "gold"]].to_numpy()[i] for own, i in ((below.sort_values("kl"), -1), (above.sort_values("kl"), 0))
    )
    return y0 + (y1 - y0) * (kl - x0) / (x1 - x0)


@if_run
def test_tables_of_the_methods():
    points, page = pd.read_csv(RESULTS / "points.csv"), (RESULTS / "methods.md").read_text()
    table, best = rows_under(page, "| policy | seeds"), points.query("method == 'best-of-n'")
    for (method, setting), own in points.groupby(["method", "setting"], sort=False):
        for at in methods.NUMBERS if method == "best-of-n" else [own["at"].max()]:
            here = own[own["at"] == at]
            name = methods.name_of(method, setting).replace("best-of-n", f"best of {at}")
            seeds, kl, gold, better, *others = table.pop(name)
            assert seeds == str(len(here))
            columns = [("kl", 1, 2), ("gold", 1, 2), ("score", 1, 2), ("length", 1, 2), ("ended", 100, 1)]
            for cell, (column, scale, places) in zip([kl, gold, *others], columns, strict=True):
                check_cell(cell, list(scale * here[column]), places)
            golds = [gold_by_hand(best[best["seed"] == end.seed], end.kl) for end in here.itertuples()]
            if method == "best-of-n" or np.isnan(golds).any():
                assert better == ""
            else:
                check_cell(better, list(here["gold"] - golds), 2)
    assert not table


@if_run
def test_kl_of_best_of_n_in_the_table():
    points = pd.read_csv(RESULTS / "points.csv").query("method == 'best-of-n'")
    assert points["kl"].to_numpy() == pytest.approx([math.log(n) - 1 + 1 / n for n in points["at"]], rel=1e-4)


@if_run
def test_the_section_has_the_numbers_of_the_table():
    """The section takes its table, and every mean with an interval, from methods.md."""
    page = (RESULTS / "methods.md").read_text()
    assert page.split("\n\n")[0] in SECTION
    figures = re.findall(r"-?\d+\.\d+ ± \d+\.\d+", " ".join(SECTION.split()))
    assert figures and all(figure in page for figure in figures)
    commits = set(pd.read_csv(RESULTS / "points.csv")["commit"].astype(str))
    assert all(commit in page for commit in commits)


def test_the_section_says_whether_it_was_run():
    assert ("not been run yet" in " ".join(SECTION.split())) != (RESULTS / "points.csv").exists()
