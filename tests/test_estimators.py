"""benchmark/experiments/estimators.py: what it runs, what it measures, and its arithmetic."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from processes import launch
from runs import metrics_of, only
from transformers import AutoModelForCausalLM

from benchmark.experiments import estimators
from ppo_rlhf import rlvr_checks, rlvr_math, rlvr_policy
from ppo_rlhf.lib import cli

SIZES = (
    "--dtype float64 --ppo.batch_size 16 --ppo.nminibatches 1 --eval_problems 4 --eval_samples 2 --eval_interval 0 "
    "--task.response_length 12 --log_interval 0 --trace_interval 0 --save_interval 0"
)


def arguments(world, updates: int) -> list[str]:
    where = f"--preset sums --base_model {world}/model --task.problems {world}"
    return f"{where} {SIZES} --ppo.total_episodes {16 * updates}".split()


def with_penalty(penalty: str, start, world, folder, updates: int = 1, *more: str) -> list[dict[str, float]]:
    (variant,) = [v for v in estimators.find_variants() if (v.part, v.name) == ("alone", penalty)]
    folder.mkdir()
    words = [*arguments(world, updates), *variant.words.split(), *more]
    result = launch(estimators.__file__, "with", penalty, str(start), *words, folder=folder)
    assert result.status == 0, result
    return metrics_of(only(folder, "runs/*"))


@pytest.fixture(scope="module")
def moved(tiny_sums, tmp_path_factory):
    """The language model of the tiny world with other weights."""
    folder = tmp_path_factory.mktemp("moved")
    model = AutoModelForCausalLM.from_pretrained(tiny_sums / "model")
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn_like(weight)
    model.save_pretrained(folder)
    return folder


def test_every_estimator_and_nothing_that_the_script_refuses():
    variants = estimators.find_variants()
    assert {v.name for v in variants if v.part == "estimators"} == set(rlvr_math.ESTIMATORS) - {"maxrl"}
    assert len({v.folder for v in variants}) == len(variants)
    for variant in variants:
        args = cli.parse_args(rlvr_policy.PRESETS, ["--preset", "sums", *variant.words.split()])
        rlvr_checks.check_arguments(args)
        coefficients = {args.rewards.kl_coef, args.rewards.kl_loss_coef}
        if variant.part in ("alone", "beside") and variant.name != "none":
            assert coefficients == {0, 0.3} and (args.rewards.kl_coef == 0) == ("loss" in variant.name)
        else:
            assert max(coefficients) < 1e-11
        assert (args.rewards.verifier_weight == 0) == (variant.part == "alone")


def test_distance_of_a_policy_that_starts_elsewhere(moved, tiny_sums, tmp_path):
    """By the script's own KL, which is k1's where k1 is the penalty; 0 if the policy starts from the reference."""
    at_home = with_penalty("k1 in the reward", "-", tiny_sums, tmp_path / "home")
    away = with_penalty("k1 in the reward", moved, tiny_sums, tmp_path / "away")
    assert at_home[0][estimators.TRUE_KL] == 0
    assert away[0][estimators.TRUE_KL] == pytest.approx(away[0]["objective/kl"], rel=1e-9)
    assert away[0][estimators.TRUE_KL] > 0.5
    other = with_penalty("k3 in the reward", moved, tiny_sums, tmp_path / "other")
    assert other[0][estimators.TRUE_KL] == pytest.approx(away[0][estimators.TRUE_KL], rel=1e-9)
    assert abs(other[0]["objective/kl"] - other[0][estimators.TRUE_KL]) > 0.05


def test_k1_in_the_loss_takes_the_place_of_k2(moved, tiny_sums, tmp_path):
    """Its mean over tokens is the mean KL per token; that of k2 is half the mean square."""
    k1, k2 = (with_penalty(f"{form} in the loss", moved, tiny_sums, tmp_path / form)[0] for form in ("k1", "k2"))
    tokens = k1["val/sequence_lengths"]
    assert k1["loss/kl_avg"] == pytest.approx(k1[estimators.TRUE_KL] / tokens, rel=1e-6)
    assert k2[estimators.TRUE_KL] == k1[estimators.TRUE_KL]
    assert k2["loss/kl_avg"] > k1["loss/kl_avg"] + 0.01


def kl_of(policy: list[np.ndarray], reference: list[np.ndarray]) -> float:
    """KL of responses of two tokens, by enumeration."""

    def probs(tables: list[np.ndarray]) -> np.ndarray:
        parts = [np.exp(table) / np.exp(table).sum(-1, keepdims=True) for table in tables]
        return parts[0][:, None] * parts[1]

    return float((probs(policy) * np.log(probs(policy) / probs(reference))).sum())


def test_exact_courses():
    """k1 in the reward goes down the gradient of the KL, by differences; k1 in the loss goes nowhere."""
    noise = torch.Generator().manual_seed(0)
    shapes = [(estimators.STARTS, 3), (estimators.STARTS, 3, 3)]
    reference, distance = (
        [torch.randn(*shape, generator=noise, dtype=torch.float64) for shape in shapes] for _ in "ab"
    )
    fixed = [table[0].numpy() for table in reference]
    start = [table + moved[0].numpy() for table, moved in zip(fixed, distance, strict=True)]
    kl, slopes = kl_of(start, fixed), [np.zeros_like(table) for table in start]
    for table, slope in zip(start, slopes, strict=True):
        for place in np.ndindex(table.shape):
            kept, ends = table[place], []
            for step in (1e-5, -1e-5):
                table[place] = kept + step
                ends.append(kl_of(start, fixed))
            table[place] = kept
            slope[place] = (ends[0] - ends[1]) / 2e-5
    after = [table - estimators.RATE * slope for table, slope in zip(start, slopes, strict=True)]
    courses = {name: estimators.exact_course(name) for name in estimators.PENALTIES if name != "none"}
    assert courses["k1 in the reward"][:2, 0].tolist() == pytest.approx([kl, kl_of(after, fixed)], rel=1e-6)
    assert torch.allclose(courses["k1 in the loss"], courses["k1 in the loss"][0], rtol=1e-12)
    first, last = courses["k1 in the loss"][0].mean(), {name: course[-1].mean() for name, course in courses.items()}
    for name in ("k1 in the reward", "k2 in the loss", "k3 in the loss"):
        assert last[name] < 0.05 * first
    for name in ("k2 in the reward", "k3 in the reward"):
        assert last[name] > first


def made_up(folder, part: str, name: str, seed: int, right: float) -> None:
    run = folder / f"{part}-{name}" / f"seed{seed}" / "runs/made_up"
    run.mkdir(parents=True)
    results = {"eval/mean@2": right, "eval/gsm8k_strict": right + 0.1}
    if part == "divide":
        results = {"eval/mean@16": right, "eval/gsm8k_strict": right + 0.1, "eval/pass@16": right + 0.2}
    (run / "meta.json").write_text(
        json.dumps({"finished": True, "commit": "0123456789", "args": {}, "results": results})
    )
    columns = {
        "step": range(5),
        "objective/verifiable_correct_rate": [0.1 * i for i in range(5)],
        "val/sequence_lengths_incorrect": [20 + seed] * 5,
        "val/sequence_lengths_correct": [10 + i for i in range(5)],
        "policy/entropy_avg": [1.0] * 5,
    }
    pd.DataFrame(columns).to_csv(run / "metrics.csv", index=False)


def test_report_of_made_up_runs(tmp_path):
    for seed, right in {1: 0.4, 2: 0.5, 3: 0.6}.items():
        made_up(tmp_path / "bench", "estimators", "gae", seed, right)
        made_up(tmp_path / "bench", "divide", "maxrl", seed, right + 0.1)
    where = "--folder", "bench", "--output", "out", "--pictures", "pictures"
    result = launch(estimators.__file__, "report", *where, folder=tmp_path)
    assert result.status == 0, result
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in result.stdout.splitlines() if "`" in line
    ]
    # Student's t with 2 degrees of freedom is 4.303; the standard error of 40, 50, 60 is 10 / sqrt(3).
    half = f"{4.3027 * 10 / math.sqrt(3):.1f}"
    tokens = [f"22.0 ± {4.3027 / math.sqrt(3):.1f}", "13.0 ± 0.0", "", ""]
    assert rows == [
        ["estimators", "`gae`", "3", f"50.0 ± {half}", f"60.0 ± {half}", "", *tokens],
        ["divide", "`maxrl`", "3", f"60.0 ± {half}", f"70.0 ± {half}", f"80.0 ± {half}", *tokens],
    ]
    assert "commit: 0123456" in (tmp_path / "out/estimators.md").read_text()
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {"estimators.png", "penalties.png"}
    again = launch(estimators.__file__, "draw", "--output", "out", "--pictures", "new", folder=tmp_path)
    assert again.status == 0 and again.stdout == result.stdout and (tmp_path / "new/estimators.png").exists()


def test_two_variants_from_run_to_report(tiny_sums, tmp_path):
    """Policies that are only penalised start where rloo ended; given again, nothing is run twice."""
    policy = " ".join(arguments(tiny_sums, 2))
    where = "--folder", "bench", "--output", "out", "--pictures", "out", "--only", "alone", "--seeds", "1"
    for _ in range(2):
        words = "--policy", policy, "--alone=--ppo.total_episodes 16"
        chosen = "--variants", "k1 in the loss", "k3 in the reward"
        result = launch(estimators.__file__, "run", *where, *words, *chosen, folder=tmp_path)
        assert result.status == 0, result
    jobs = {
        path.parent.parent.name: json.loads(path.read_text()) for path in (tmp_path / "bench").glob("*/*/job.json")
    }
    alone = ["alone-k1-in-the-loss", "alone-k3-in-the-reward"]
    assert set(jobs) == {"estimators-rloo", *alone}
    assert {job["starts"] for job in jobs.values()} == {1}
    (start,) = (tmp_path / "bench/estimators-rloo/seed1/models").glob("*/policy")
    assert all(str(start) in jobs[name]["command"] for name in alone)
    assert "k3 in the reward" in (tmp_path / "out/estimators.md").read_text()


def test_bad_input(tmp_path):
    for words, message in (
        (["report", "--folder", "nowhere"], "holds no finished run"),
        (["draw", "--output", "nowhere"], "--output nowhere"),
        (["run", "--only", "lengths", "--variants", "rloo"], "there are grpo, own length, grpo, greatest length"),
        (["with", "k4 in the reward", "-", "--preset", "sums"], "k4 in the reward"),
    ):
        result = launch(estimators.__file__, *words, folder=tmp_path)
        assert result.status == 2 and message in result.stderr and "Traceback" not in result.stderr, result
    assert launch(estimators.__file__, folder=tmp_path).status == 2
