"""benchmark/experiments/staleness.py: what it runs, and its arithmetic."""

import dataclasses
import json
import shlex
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from processes import launch

from benchmark.experiments import staleness
from ppo_rlhf import rlvr_async, rlvr_checks, rlvr_policy
from ppo_rlhf.lib import cli

UPDATES = 8


def test_every_way_at_every_staleness_and_one_run_without():
    ages = Counter(variant.staleness for variant in staleness.VARIANTS)
    assert ages == {0: 1, 1: 4, 2: 4, 4: 4, 8: 4}
    assert len({variant.name for variant in staleness.VARIANTS}) == 17
    assert set(staleness.SHOWN) <= {variant.name for variant in staleness.VARIANTS}


def test_arguments_differ_in_age_and_way_alone(tmp_path):
    """As the script itself reads them from the command of a job: 32 updates of groups of 8, no critic, no penalty."""
    common = []
    for variant in staleness.VARIANTS:
        args = staleness.Args(folder=tmp_path, policy=f"{staleness.Args.policy} --ppo.lr 0.001")
        (job,) = staleness.jobs_of(args, variant, [3])
        python, script, *words = shlex.split(job.command)
        assert (python, script, job.seed) == ("python", rlvr_async.__file__, 3)
        read = cli.parse_args(rlvr_async.PRESETS, words)
        rlvr_async.check_arguments(read)
        rlvr_checks.check_arguments(read)
        way = {"any": "none", "masked": "bypass"}.get(variant.way, variant.way)
        assert (read.staleness, read.correction) == (variant.staleness, way)
        assert read.off_policy_mask == (0.05 if variant.way == "masked" else None)
        common.append(dataclasses.replace(read, staleness=0, correction="auto", off_policy_mask=None))
        assert rlvr_policy.ppo_sizes(read.ppo, 1).updates == 32 and read.ppo.lr == 0.001 and read.workers == 1
        assert (read.ppo.advantage, read.ppo.samples_per_prompt, read.ppo.critic_warmup) == ("rloo", 8, 0)
        assert read.rewards.kl_coef == read.rewards.kl_loss_coef == 0
        assert (read.eval_samples, read.eval_interval, read.save_interval, read.log_interval) == (2, 0, 0, 0)
    assert all(read == common[0] for read in common)


def made_up(folder, name: str, seed: int, right: float, kl: float) -> None:
    """A finished run. Its first two updates, a quarter, are like nothing else: only the curves hold them."""
    run = folder / name / f"seed{seed}" / "runs/made_up"
    run.mkdir(parents=True)
    results = {"eval/mean@2": right, "eval/gsm8k_strict": right + 0.1}
    meta = {"finished": True, "commit": "0123456789", "args": {"ppo": {"lr": 0.0005}}, "results": results}
    (run / "meta.json").write_text(json.dumps(meta))
    later = [99.0] * 2 + [1.0] * (UPDATES - 2)
    columns = {
        "step": range(UPDATES),
        "episode": [128 * (i + 1) for i in range(UPDATES)],
        "objective/verifiable_correct_rate": [0.1 * i for i in range(UPDATES)],
        "async/kl": [kl * x for x in later],
        "async/ess": [0.5 * x for x in later],
        "policy/clipfrac_avg": [0.02 * x for x in later],
        "policy/approxkl_avg": [0.001 * x for x in later],
    }
    pd.DataFrame(columns).to_csv(run / "metrics.csv", index=False)


def test_report_of_made_up_runs(tmp_path):
    """Numbers by hand. Student's t with 2 degrees of freedom is 4.3027."""
    for seed, right in {1: 0.4, 2: 0.5, 3: 0.6}.items():
        made_up(tmp_path / "bench", "0", seed, right, 0.0)
        made_up(tmp_path / "bench", "8-none", seed, right - 0.1 * seed, 0.01 * seed)
    where = "--folder", "bench", "--output", "out", "--pictures", "pictures"
    result = launch(staleness.__file__, "report", *where, folder=tmp_path)
    assert result.status == 0, result
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in result.stdout.splitlines() if "|" in line
    ]
    # 40, 50, 60 and -10, -20, -30: standard error 10 / sqrt(3). 0.01, 0.02, 0.03: 0.01 / sqrt(3).
    rest = ["0.500 ± 0.000", "2.00 ± 0.00", "0.00100 ± 0.00000"]
    assert rows == [
        ["0", "any", "3", "50.0 ± 24.8", "60.0 ± 24.8", "", "0.0000 ± 0.0000", *rest],
        ["8", "none", "3", "30.0 ± 0.0", "40.0 ± 0.0", "-20.0 ± 24.8", "0.0200 ± 0.0248", *rest],
    ]
    assert len(head) == len(rows[0])
    text = (tmp_path / "out/staleness.md").read_text()
    assert "learning rate: 0.0005; commit: 0123456\n" in text
    updates = pd.read_csv(tmp_path / "out/updates.csv")
    assert len(updates) == 6 * UPDATES and set(updates["episode"]) == {128 * (i + 1) for i in range(UPDATES)}
    again = launch(staleness.__file__, "draw", "--output", "out", "--pictures", "new", folder=tmp_path)
    assert again.status == 0 and again.stdout == result.stdout
    pictures = [(tmp_path / folder / "staleness.png").read_bytes() for folder in ("pictures", "new")]
    assert pictures[0] == pictures[1]


def test_picture_of_made_up_numbers():
    """Lines and intervals against numpy: 2.7764 is Student's t with 4 degrees of freedom."""
    noise, runs, updates = np.random.default_rng(0), [], []
    for variant in staleness.VARIANTS:
        for seed in range(1, 6):
            whose = {"staleness": variant.staleness, "way": variant.way, "seed": seed}
            runs.append(whose | {"samples": noise.random(), staleness.KL: noise.random()})
            curve = {"step": range(20), staleness.RIGHT: noise.random(20)}
            updates.append(pd.DataFrame(curve).assign(**whose))
    runs, updates = pd.DataFrame(runs), pd.concat(updates)
    curves, final, distance = staleness.picture_of(runs, updates).axes

    drawn = {line.get_label(): line.get_ydata() for line in curves.lines}
    assert set(drawn) == {"0", "2, decoupled", "8, decoupled", "8, bypass", "8, none"}
    own = updates[(updates["staleness"] == 8) & (updates["way"] == "bypass")]
    seeds = own[staleness.RIGHT].to_numpy().reshape(5, 20)
    assert drawn["8, bypass"][[0, 10, 19]] == pytest.approx(
        [seeds[:, :4].mean(), seeds[:, 7:14].mean(), seeds[:, -4:].mean()]
    )
    smoothed = np.array([seed[7:14].mean() for seed in seeds])
    band = curves.collections[list(drawn).index("8, bypass")].get_paths()[0].vertices
    at_10 = sorted(band[band[:, 0] == 10, 1])
    half = 2.7764 * smoothed.std(ddof=1) / np.sqrt(5)
    assert at_10 == pytest.approx([smoothed.mean() - half, smoothed.mean() + half], rel=1e-4)

    for axes, column, names in (
        (final, "samples", {"0", *staleness.WAYS}),
        (distance, staleness.KL, {*staleness.WAYS}),
    ):
        bars = {container.get_label(): container for container in axes.containers}
        assert set(bars) == names
        own = runs[runs["way"] == "none"].groupby("staleness")[column]
        line, _, (intervals,) = bars["none"].lines
        assert line.get_ydata() == pytest.approx(own.mean())
        assert np.round(list(line.get_xdata())) == pytest.approx([1, 2, 3, 4])
        lengths = [segment[1, 1] - segment[0, 1] for segment in intervals.get_segments()]
        assert lengths == pytest.approx(2 * 2.7764 * own.std() / np.sqrt(5), rel=1e-4)


def test_finished_runs_are_not_run_again(tmp_path):
    """What is chosen is run, with the arguments of its name; a job that says it is finished is left alone."""
    for variant in staleness.VARIANTS:
        made_up(tmp_path / "bench", variant.name, 1, 0.5, 0.01)
        args = staleness.Args(folder=tmp_path / "bench")
        (job,) = staleness.jobs_of(args, variant, [1])
        assert job.state == "waiting" and job.folder == tmp_path / "bench" / variant.name / "seed1"
        record = {"command": job.command, "commit": "0123456789", "finished": True, "status": 0, "starts": 1}
        (job.folder / "job.json").write_text(json.dumps(record))
    where = "--folder", "bench", "--output", "out", "--pictures", "out", "--seeds", "1"
    result = launch(staleness.__file__, "run", *where, folder=tmp_path)
    assert result.status == 0, result
    assert len(pd.read_csv(tmp_path / "out/runs.csv")) == 17
    assert not list((tmp_path / "bench").glob("*/*/log.txt"))
    result = launch(staleness.__file__, "run", *where, "--policy", "--preset sums --ppo.lr 1e-3", folder=tmp_path)
    assert result.status == 2 and "another command's run" in result.stderr


def test_bad_input(tmp_path):
    for words, message in (
        (["report", "--folder", "nowhere"], "holds no finished run"),
        (["draw", "--output", "nowhere"], "--output nowhere"),
        (["run", "--only", "8", "--folder", "nowhere"], "--only 8: there are 0, 1-decoupled"),
    ):
        result = launch(staleness.__file__, *words, folder=tmp_path)
        assert result.status == 2 and message in result.stderr and "Traceback" not in result.stderr, result
    assert launch(staleness.__file__, folder=tmp_path).status == 2
