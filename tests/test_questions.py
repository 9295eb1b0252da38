"""Each answer of docs/questions.md holds a measured number: here it is computed again from the file it comes from.

The healthy curves of the last question have a test in test_readme.py, and the run that repeats itself in
test_readme_tldr.py. One number has no file: that with a repetition penalty only one token in seven has a ratio of 1.
"""

import ast
import json
import re
from pathlib import Path

import pandas as pd
import pytest
import scipy.stats

from ppo_rlhf import rlvr_async
from ppo_rlhf.lib import engine, processes
from ppo_rlhf.lib.errors import InputError

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmark/results"
PAGE = (ROOT / "docs/questions.md").read_text()
PARTS = dict(part.split("\n", 1) for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:])
ENGINES = json.loads((RESULTS / "engines/engines.json").read_text())


def answer(question: str) -> str:
    """The prose of an answer: links are only their words, and lines are joined."""
    (found,) = [part for name, part in PARTS.items() if name.startswith(question)]
    return " ".join(re.sub(r"\]\([^)\s]*\)|[\[`*]", "", found).split())


def interval(values: pd.Series, places: int, scale: float = 1) -> str:
    """Mean and half of the 95 % interval, as the page writes them."""
    found = scipy.stats.ttest_1samp(scale * values, 0).confidence_interval(0.95)
    return f"{(found.low + found.high) / 2:.{places}f} ± {(found.high - found.low) / 2:.{places}f}"


def check(question: str, *sentences: str) -> None:
    said = answer(question)
    for sentence in sentences:
        assert sentence in said, (sentence, said)


def estimators(part: str, variant: str, column: str) -> pd.Series:
    runs = pd.read_csv(RESULTS / "estimators/runs.csv")
    return runs[(runs["part"] == part) & (runs["variant"] == variant)][column]


def ablation(name: str) -> pd.Series:
    """Effects on the gold score, seed by seed."""
    gold = pd.read_csv(RESULTS / "ablations/ablations.csv").pivot(
        index="seed", columns="ablation", values="gold score"
    )
    return gold[name] - gold["baseline"]


def staleness(updates: int, way: str, column: str) -> pd.Series:
    runs = pd.read_csv(RESULTS / "staleness/runs.csv").set_index("seed")
    return runs[(runs["staleness"] == updates) & (runs["way"] == way)][column]


def metrics(demo: str) -> pd.DataFrame:
    return pd.read_csv(ROOT / f"static/{demo}/metrics.csv")


def source_of(path: str, function: str) -> str:
    text = (ROOT / path).read_text()
    (found,) = [node for node in ast.parse(text).body if getattr(node, "name", "") == function]
    return ast.get_source_segment(text, found) or ""


def checks_of_engines(words: str) -> list[float]:
    return [row["difference"] for row in ENGINES["checks"] if words in row["name"]]


def test_a_number_that_differs_is_found():
    with pytest.raises(AssertionError):
        check("Why is the value loss", "by -0.01 ± 0.03")


def test_losses_and_ratios():
    run = metrics("demo-rlvr")
    after = json.loads((ROOT / "static/demo-rlvr/meta.json").read_text())["results"]
    loss, norm = run["loss/policy_avg"], run["policy/grad_norm"][5:]
    shares = [100 * x["eval/mean@16"] for x in (run.iloc[0], after)]
    check(
        "Why is the loss 0",
        f"between {loss.min():.3f} and {loss.max():.3f} for all {len(run)} updates",
        "from {:.1f} % to {:.1f} %".format(*shares),
        f"between {norm.min():.2f} and {norm.max():.2f}.",
    )
    limits = processes.FIRST_RATIO_TOLERANCE
    check(
        "Why isn't the ratio 1",
        f"{run['val/first_ratio_gap'].max():.0e} at most in {len(run)} updates",
        f"above {limits['float32']}, or {limits['bfloat16']} in bfloat16",
    )
    assert '"atol": 1e-9, "rtol": 0' in source_of("tests/test_rlvr_update.py", "same_parameters")
    check("Why do results change", "agree to 1e-9")


def test_average_of_the_loss():
    """A token's weight: 1 / 10 tokens; 1 / 2 responses / 2 tokens and 1 / 2 responses / 8 tokens."""
    updates = pd.read_csv(RESULTS / "estimators/updates.csv").query("part == 'lengths'")
    means = updates.groupby(["variant", "seed"])["val/sequence_lengths_incorrect"].mean()
    longer = means["dr_grpo, own length"] - means["dr_grpo, greatest length"]
    assert 0.04 < (longer / means["dr_grpo, greatest length"]).mean() < 0.05
    check(
        "Over what",
        f"the weight 1/{2 + 8}.",
        f"1/{2 * 2} in the short response and 1/{2 * 8} in the long one",
        f"by {interval(longer, 2)} tokens, four to five percent",
    )


def test_clipping():
    check(
        "Why is the value loss",
        f"changes by {interval(ablation('no-value-clipping'), 2)},",
        f"by {interval(ablation('no-policy-clipping'), 2)}.",
        f"λ = 0 lowers it by {-ablation('lambda-0').mean():.2f}",
    )


def test_kl():
    kl = "objective/true_kl"
    alone = {name: interval(estimators("alone", name, kl), 2) for name in ("k1 in the reward", "k3 in the reward")}
    alone |= {name: interval(estimators("alone", name, kl), 2) for name in ("k1 in the loss", "k2 in the loss")}
    check(
        "Which KL",
        f"from a KL of {estimators('alone', 'k1 in the reward', 'first_kl').mean():.2f} nats",
        f"brings the KL down to {alone['k1 in the reward']}, and k2 in the loss to {alone['k2 in the loss']}",
        f"drives it up to {alone['k3 in the reward']}",
        f"ends at {alone['k1 in the loss']}",
    )
    beside = [interval(estimators("beside", f"{name} in the reward", kl), 2) for name in ("k3", "k1")]
    check(
        "Why does k3", "leaves the policy {} nats from the reference, and k1 with the same".format(*beside), beside[1]
    )
    run = metrics("demo")
    first, *others = run["objective/kl"]
    assert abs(first) < 1e-6 and min(others) > 0
    check(
        "Why is my KL",
        f"In the {len(run)} updates",
        f"averages {run['objective/kl'].iloc[-10:].mean():.1f} nats over the last ten",
    )


def test_unbiased_kl():
    name = "test_k3_with_a_plus_is_the_unbiased_estimate_of_deepseek_v32"
    assert "atol=1e-15" in source_of("tests/test_readme_rlvr.py", name)
    name = "test_gradient_of_the_kl_in_the_loss_when_another_policy_samples"
    assert "atol=2e-10" in source_of("tests/test_rlvr_math.py", name)
    check("What is the unbiased", "agree with the paper's formula to 1e-15", "finds this gradient to 2e-10")


def test_engines():
    gap, control = max(checks_of_engines("largest difference")), min(checks_of_engines("read with the others"))
    gap = f"{gap:.1e}".replace("e-0", "e-")
    cap = rlvr_async.Args().correction_cap
    check(
        "Why does the importance", f"{gap} at most", f"{control:.1f} nats or more", f"A cap of {cap:g} on the weight"
    )
    check("Which log-probs", "at most 0.001 nats, or 0.05 in bfloat16", f"in float32 is {gap}")
    for limit, dtype in ((0.001, "float32"), (0.05, "bfloat16")):
        engine.check_gap(limit, dtype)
        with pytest.raises(InputError):
            engine.check_gap(1.001 * limit, dtype)
    check("Does the engine", f"{control:.1f} nats or more", "the weights times 1.05")
    assert "parameter.mul_(1.05)" in (ROOT / "ppo_rlhf/lib/engine.py").read_text()
    (differ,), rows = checks_of_engines("responses that differ"), ENGINES["arguments"]["rows"]
    check("May I tokenise", f"{rows - differ} of {rows} responses")
    runs = pd.DataFrame(ENGINES["runs"]).set_index("engine")
    shares = {name: interval(runs.loc[name, "samples"], 1, 100) for name in ("vllm", "built-in")}
    check(
        "Can the mismatch",
        f"{runs.loc['vllm', 'first_gap'].max():.0e} nats",
        f"Three seeds end with {shares['vllm']} % correct samples,",
        f"with the built-in engine {shares['built-in']} %",
    )
    assert len(runs.loc["vllm"]) == 3


def test_sampling_with_a_repetition_penalty():
    assert "only one token in seven has a ratio of 1" in (ROOT / "docs/reference/chapter3.md").read_text()
    check("May I sample", "penalty of 1.1 in Qwen2.5's generation config, only one token in seven has a ratio of 1")


def test_what_may_be_stale():
    fresh = staleness(0, "any", "samples")
    lost = {(age, way): staleness(age, way, "samples") - fresh for age in (1, 8) for way in ("decoupled", "none")}
    check(
        "What may be stale",
        f"by {interval(lost[1, 'decoupled'], 1, 100)} points with",
        f"eight updates by {interval(lost[8, 'decoupled'], 1, 100)}",
        f"costs {interval(-lost[1, 'none'], 1, 100)} and {interval(-lost[8, 'none'], 1, 100)} points",
        f"the clipped share is {100 * staleness(8, 'none', 'policy/clipfrac_avg').mean():.2f} %",
        f"does, at {staleness(8, 'none', 'async/kl').mean():.3f} nats",
    )
    check(
        "What do healthy",
        f"level: {staleness(1, 'decoupled', 'async/kl').mean():.4f} nats per token at staleness 1",
        f"rising: {staleness(8, 'none', 'async/kl').mean():.3f} at staleness 8",
        f"where {-100 * lost[8, 'none'].mean():.0f} points of accuracy",
    )


def test_estimators_and_seeds():
    runs = pd.read_csv(RESULTS / "estimators/runs.csv").query("part == 'estimators'")
    means = 100 * runs.groupby("variant")["samples"].mean()
    six = means.drop(["gae", "remax"])
    gae, remax = (interval(estimators("estimators", name, "samples"), 1, 100) for name in ("gae", "remax"))
    check(
        "Which advantage",
        f"{six.min():.1f} to {six.max():.1f} % correct samples",
        f"gae ends at {gae} % and remax at {remax} %",
        f"λ = 1 raises the gold score by {interval(ablation('lambda-1'), 2)} over λ = 0.95",
    )
    assert len(six) == 6
    name = "test_estimators_agree_with_loops_over_what_counts"
    assert "atol=1e-12" in source_of("tests/test_rlvr_math.py", name)
    runs = pd.read_csv(RESULTS / "tools/runs.csv").pivot(index="seed", columns="variant", values="samples")
    lost = interval(runs["masked"] - runs["in-the-loss"], 1, 100)
    check("How should tokens", "agree to 1e-12 with loops", f"{lost} points fewer samples are correct at the end")
    curve = pd.read_csv(RESULTS / "tales/curves.csv").query("task == 'tales' and metric == 'objective/gold_scores'")
    ends = curve[curve["update"] >= 0.95 * curve["update"].max()]
    check("Why does the same", f"a gold score of {ends['mean'].mean():.2f} ± {ends['std'].mean():.2f}")


def test_the_numbers_of_sick_curves():
    kl = pd.read_csv(RESULTS / "ablations/ablations.csv").pivot(index="seed", columns="ablation", values="KL")
    check("What do healthy", f"it ends {(kl['no-kl'] - kl['baseline']).mean():.0f} nats higher")
    runs = pd.read_csv(RESULTS / "overoptimisation/overoptimisation.csv").query("experiment == '320 labels'")
    ends = runs.groupby("seed")[["gold", "proxy", "accuracy"]].apply(lambda run: run.iloc[-5:].mean())
    ends = ends[ends["accuracy"] > 30].sort_values("proxy")
    assert (ends["gold"].abs() < 0.1).all() and len(ends) == 2
    check("What do healthy", "two of four scores rose by {:.0f} and {:.0f} standard".format(*ends["proxy"]))


def test_models_in_trl():
    differences = {
        row["name"]: row["difference"] for row in json.loads((RESULTS / "interop/interop.json").read_text())["checks"]
    }
    of = {
        word: [x for name, x in differences.items() if name.endswith(word) and "control" not in name]
        for word in ("scores", "values", "log-probs")
    }
    check("Moving from", "scores and values agree to about 1e-6, log-probs to about 1e-5")
    assert max(of["scores"] + of["values"]) < 1.5e-6 and 1e-6 < max(of["log-probs"]) < 1.5e-5
