"""benchmark/lab.py and the experiments that are declared with it: what they run, what they measure, their tables."""

import dataclasses
import json
import math
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from matplotlib.figure import Figure

from benchmark import lab
from benchmark.experiments import arithmetic, critic, estimators, gdpo_and_ipo, people, staleness
from ppo_rlhf import rlvr_async, rlvr_checks, rlvr_math, rlvr_policy, train_policy
from ppo_rlhf.lib.base.errors import InputError
from ppo_rlhf.lib.services import cli

DECLARED = critic.EXPERIMENT, staleness.EXPERIMENT, estimators.EXPERIMENT, arithmetic.EXPERIMENT
DECLARED += gdpo_and_ipo.EXPERIMENT, people.EXPERIMENT
EXPERIMENTS = {experiment.name: experiment for experiment in DECLARED}


# ---- What is run -----------------------------------------------------------------------------------------------


def arguments(name: str, folder: Path) -> dict:
    """Of each variant, the arguments that the script reads from the command of a job."""
    experiment, found = EXPERIMENTS[name], {}
    script = rlvr_async if name == "staleness" else rlvr_policy
    for variant in experiment.variants:
        (job,) = lab.jobs_of(experiment, lab.Args(folder=folder, seeds=1, first_seed=3), variant)
        python, path, *words = shlex.split(job.command)
        assert (python, path) == ("python", script.__file__)
        assert (job.seed, job.folder) == (3, folder / variant / "seed3")
        found[variant] = args = cli.parse_args(script.PRESETS, words)
        rlvr_checks.check_arguments(args)
        if name not in ("arithmetic", "gdpo-and-ipo"):
            updates = 16 if name == "estimators" else 32
            assert rlvr_policy.ppo_sizes(args.ppo, 1).updates == updates and args.rewards.kl_coef < 1e-11
            assert (args.eval_interval, args.save_interval, args.log_interval, args.trace_interval) == (0, 0, 0, 0)
            assert args.eval_samples == (16 if variant.startswith("divide") else 2)
    return found


def test_variants_of_the_critic_differ_in_their_method_alone(tmp_path):
    read = arguments("critic", tmp_path)
    plain = read["gae"].ppo
    assert (plain.lam, plain.critic_lam, plain.lam_alpha, plain.critic_explains, plain.nll_coef) == (
        *(0.95, None, None, None, 0.0),
    )
    changes = {
        "critic_lam": {"critic_lam": 1.0},
        "lam_alpha": {"lam_alpha": 1.0},
        "pretraining": {"critic_warmup": 12, "critic_explains": 0.3},
        "nll": {"nll_coef": 0.1},
    }
    everything = {name: value for change in changes.values() for name, value in change.items()}
    for name, change in (changes | {"all": everything}).items():
        assert read[name] == dataclasses.replace(read["gae"], ppo=dataclasses.replace(plain, **change)), name
    assert (read["rloo"].ppo.advantage, read["rloo"].ppo.samples_per_prompt) == ("rloo", 8)
    assert all(args.base_model == args.task.problems == "sums-long" for args in read.values())


def test_variants_of_staleness_differ_in_age_and_way_alone(tmp_path):
    read = arguments("staleness", tmp_path)
    assert len(read) == 17 and set(staleness.SHOWN) <= set(read)
    common = []
    for name, args in read.items():
        rlvr_async.check_arguments(args)
        age, _, way = name.partition("-")
        assert (args.staleness, args.correction) == (int(age), {"": "none", "masked": "bypass"}.get(way, way))
        assert args.off_policy_mask == (0.05 if way == "masked" else None)
        common.append(dataclasses.replace(args, staleness=0, correction="auto", off_policy_mask=None))
    assert all(args == common[0] for args in common)
    assert (common[0].ppo.advantage, common[0].ppo.samples_per_prompt, common[0].workers) == ("rloo", 8, 1)


def test_every_estimator_is_run_and_every_division(tmp_path):
    parts: dict[str, dict] = {}
    for name, args in arguments("estimators", tmp_path).items():
        found = estimators.labels(name)
        parts.setdefault(found["part"], {})[found["variant"]] = args.ppo.advantage, args.ppo.loss_aggregation
    assert {name: advantage for name, (advantage, _) in parts["estimators"].items()} == {
        name: name for name in rlvr_math.ESTIMATORS if name not in ("maxrl", "gdpo")
    }
    assert list(parts["divide"]) == list(estimators.DIVIDED)
    assert parts["lengths"] == {
        f"{name}, {length} length": (name, mode)
        for name in ("grpo", "dr_grpo")
        for length, mode in (("own", "seq-mean-token-mean"), ("greatest", "seq-mean-token-sum-norm"))
    }


def test_gdpo_and_ipo_differ_from_what_they_replace_in_the_method_alone(tmp_path):
    read = arguments("gdpo-and-ipo", tmp_path)
    for part, field in {"sources": "advantage", "loss": "loss"}.items():
        plain = read[f"{part}-{gdpo_and_ipo.BASELINES[part]}"]
        sizes = rlvr_policy.ppo_sizes(plain.ppo, 1)
        assert (sizes.updates, sizes.steps_per_update) == {"advantage": (10, 2), "loss": (6, 16)}[field]
        for name, args in read.items():
            if name.startswith(part):
                ppo = dataclasses.replace(plain.ppo, **{field: name.removeprefix(f"{part}-")})
                assert args == dataclasses.replace(plain, ppo=ppo), name
    texts = ["She finds 6. 8+6=14\n#### 14", "8+6=14\n#### 14", "She finds 6. 8+6=14\n14-2=12\n#### 12", "#### 3"]
    assert gdpo_and_ipo.retells(texts, texts, texts) == [1, 0, 0, 0]


def test_arithmetic_is_learned_by_three_methods(tmp_path):
    read = arguments("arithmetic", tmp_path)
    plain = read["dr_grpo"]
    assert plain == dataclasses.replace(rlvr_policy.PRESETS["arithmetic"], log_interval=0)
    for name, change in {"gae": {"critic_warmup": 3}, "reinforce++": {}}.items():
        ppo = dataclasses.replace(plain.ppo, advantage=name, **change)
        assert read[name] == dataclasses.replace(plain, ppo=ppo), name
        assert not [*rlvr_checks.doubts(read[name])] and read[name].rewards.kl_loss_coef > 0


def test_policies_of_people_differ_in_their_reward_model_and_its_penalty_alone(tmp_path):
    read = {}
    for name in people.VARIANTS:
        (job,) = lab.jobs_of(people.EXPERIMENT, lab.Args(folder=tmp_path, seeds=1), name)
        read[name] = args = cli.parse_args(train_policy.PRESETS, shlex.split(job.command)[2:])
        assert args.trace_episodes == args.ppo.batch_size // args.ppo.whiten_groups  # all that the judge sees
    learned_from = {name: args.rewards.trained_model.rpartition("/")[2] for name, args in read.items()}
    assert learned_from == {"preset": "4800"} | {name: name for name in ("200", "1000", "4800", "4800-single")}
    preset = read["preset"]
    plain = {"log_interval": 0, "trace_interval": 3, "trace_episodes": 64, "rewards": preset.rewards}
    assert preset == dataclasses.replace(train_policy.PRESETS["reviews"], **plain)
    ppo = dataclasses.replace(preset.ppo, lr=1e-4, total_episodes=1280)
    without = dataclasses.replace(preset.rewards.adaptive_kl, target=None)
    for name in read.keys() - {"preset"}:
        shaping = {"trained_model": f"../../rewards/{name}", "kl_coef": 0.01, "adaptive_kl": without}
        rewards = dataclasses.replace(preset.rewards, **shaping)
        assert read[name] == dataclasses.replace(preset, ppo=ppo, rewards=rewards)


def test_variants_are_chosen_by_name_or_by_what_the_name_begins_with():
    def chosen(name, *only):
        return lab.chosen(EXPERIMENTS[name], lab.Args(only=only))

    assert chosen("critic") == list(critic.VARIANTS) and chosen("critic", "rloo", "gae") == ["rloo", "gae"]
    assert chosen("staleness", "0", "8") == ["0", "8-decoupled", "8-bypass", "8-masked", "8-none"]
    assert chosen("estimators", "divide", "divide-grpo") == ["divide-dr_grpo", "divide-grpo", "divide-maxrl"]
    with pytest.raises(InputError, match="--only lam: there are gae, critic_lam"):
        chosen("critic", "lam")


# ---- What is measured ------------------------------------------------------------------------------------------


def made_up(folder: Path, name: str, seed: int, results: dict, columns: dict, responses: list[str] = ()) -> None:
    """A finished run."""
    run = folder / name / f"seed{seed}" / "runs/made_up"
    run.mkdir(parents=True)
    args = {"ppo": {"lr": 0.0005}, "base_model": "smollm2-135m"}
    meta = {"finished": True, "commit": "0123456789", "args": args, "results": results, "wall_time": 120.0}
    (run / "meta.json").write_text(json.dumps(meta))
    pd.DataFrame({"step": range(8), "episode": range(128, 1152, 128)} | columns).to_csv(
        run / "metrics.csv", index=False
    )
    (run / "evaluation.jsonl").write_text("".join(json.dumps({"response": text}) + "\n" for text in responses))


def reported(name: str, folder: Path, capsys) -> list[list[str]]:
    """The rows of the table; the same, and the same picture, when it is drawn once more."""
    args = lab.Args(folder=folder / "runs", output=folder / "out", pictures=folder / "pictures", seeds=3)
    assert lab.report(EXPERIMENTS[name], args) == 0
    text, pictures = capsys.readouterr().out, [*(folder / "pictures").glob("*.png")]
    before = [picture.read_bytes() for picture in pictures]
    assert lab.draw(EXPERIMENTS[name], args) == 0 and capsys.readouterr().out == text
    assert [picture.read_bytes() for picture in pictures] == before and bool(before) == (name != "arithmetic")
    assert "commit: 0123456\n" in (folder / f"out/{name}.md").read_text()
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    assert len({len(line) for line in lines}) == 1
    return lines[2:]


def evaluated(right: float) -> dict[str, float]:
    return {"eval/mean@2": right, "eval/gsm8k_strict": right + 0.1}


def test_report_of_the_critic(tmp_path, capsys):
    """Numbers by hand. Student's t with 2 degrees of freedom is 4.3027."""
    for seed, right in {1: 0.4, 2: 0.5, 3: 0.6}.items():
        for name, more, alone in (("gae", 0, 3), ("all", 0.1 * seed, 4), ("rloo", 0, 0)):
            columns = {critic.CORRECT: [(right + more) / 2] * 8, critic.MOVED: [0.0] * alone + [1e-3] * (8 - alone)}
            if name != "rloo":
                columns[critic.EXPLAINED] = [0.1 * i for i in range(8)]
            made_up(tmp_path / "runs", name, seed, evaluated(right + more), columns)
    explained = ["0.40 ± 0.00", "0.60 ± 0.00"]
    # 40, 50, 60 and 10, 20, 30: standard error 10 / sqrt(3). The last three updates explain 0.5, 0.6 and 0.7.
    assert reported("critic", tmp_path, capsys) == [
        ["`gae`", "3", "25.0 ± 12.4", "50.0 ± 24.8", "60.0 ± 24.8", "", "3.0 ± 0.0", "0.30 ± 0.00", "0.60 ± 0.00"],
        ["`all`", "3", "35.0 ± 24.8", "70.0 ± 49.7", "80.0 ± 49.7", "+20.0 ± 24.8", "4.0 ± 0.0", *explained],
        ["`rloo`", "3", "25.0 ± 12.4", "50.0 ± 24.8", "60.0 ± 24.8", "+0.0 ± 0.0", "", "", ""],
    ]


def test_report_of_staleness(tmp_path, capsys):
    """The first two updates, a quarter, are like nothing else: only the curves hold them."""
    for seed, right in {1: 0.4, 2: 0.5, 3: 0.6}.items():
        for name, more, kl in (("0", 0, 0.0), ("8-none", -0.1 * seed, 0.01 * seed)):
            levels = {staleness.KL: kl, staleness.ESS: 0.5, staleness.CLIPPED: 0.02, staleness.APPROX_KL: 0.001}
            columns = {column: [99.0] * 2 + [level] * 6 for column, level in levels.items()}
            columns[staleness.CORRECT] = [0.1 * i for i in range(8)]
            made_up(tmp_path / "runs", name, seed, evaluated(right + more), columns)
    rest = ["0.500 ± 0.000", "2.00 ± 0.00", "0.00100 ± 0.00000"]
    assert reported("staleness", tmp_path, capsys) == [
        ["0", "any", "3", "50.0 ± 24.8", "60.0 ± 24.8", "", "0.0000 ± 0.0000", *rest],
        ["8", "none", "3", "30.0 ± 0.0", "40.0 ± 0.0", "-20.0 ± 24.8", "0.0200 ± 0.0248", *rest],
    ]
    assert "learning rate: 0.0005; commit" in (tmp_path / "out/staleness.md").read_text()
    assert len(pd.read_csv(tmp_path / "out/updates.csv")) == 6 * 8


def test_report_of_the_estimators(tmp_path, capsys):
    for seed, right in {1: 0.4, 2: 0.5, 3: 0.6}.items():
        lengths = dict(zip(estimators.LENGTHS.values(), ([20 + seed] * 8, [10 + i for i in range(8)]), strict=True))
        columns = {estimators.CORRECT: [0.1] * 8, "policy/entropy_avg": [1.0] * 8} | lengths
        made_up(tmp_path / "runs", "estimators-gae", seed, evaluated(right), columns)
        results = {"eval/mean@16": right, "eval/gsm8k_strict": right, "eval/pass@16": right + 0.2}
        made_up(tmp_path / "runs", "divide-maxrl", seed, results, columns)
    tokens = ["22.0 ± 2.5", "16.0 ± 0.0"]  # 4.3027 / sqrt(3); 15, 16 and 17
    assert reported("estimators", tmp_path, capsys) == [
        ["estimators", "`gae`", "3", "50.0 ± 24.8", "60.0 ± 24.8", "", *tokens],
        ["divide", "`maxrl`", "3", "50.0 ± 24.8", "50.0 ± 24.8", "70.0 ± 24.8", *tokens],
    ]


def test_report_of_arithmetic(tmp_path, capsys):
    """Before and after; a mean over two seeds that differ by 0.2 has an interval of 12.7062 times 0.1."""
    answers = [{"question": "Who?", "before": "I.", "after": "12"}]
    for seed, right in {1: 0.5, 2: 0.7}.items():
        after = {"eval/gsm8k_flexible": right, "eval/mean@4": right, "eval/pass@4": 0.9, "eval/stopped": 1.0}
        columns = dict.fromkeys(after, [0.25] * 8) | {
            "policy/entropy_avg": [1.0, 0, 0, 0, 0, 0.5, 0.25, 0.0],
            "val/groups_zero_std": [0.0, 0, 0, 0, 0, 0.5, 0.5, 0.5],
            "objective/kl": [0.0, 0, 0, 0, 0, 1.0, 2.0, 3.0],
        }
        said = ["12", "I don't know", "The answer is -3.", "4 or 5"]
        made_up(tmp_path / "runs", "dr_grpo", seed, after, columns, said)
        (run,) = (tmp_path / f"runs/dr_grpo/seed{seed}/runs").iterdir()
        (run / "forgetting.json").write_text(json.dumps({"before": -0.5, "after": -1.5, "answers": answers}))
    none = " ± 0.0"
    after = f"75.0{none}", "0.25 ± 0.00", "2.00 ± 0.00", "-1.50 ± 0.00", f"2.0{none}"
    assert reported("arithmetic", tmp_path, capsys) == [
        ["before", "2", *[f"25.0{none}"] * 4, f"0.0{none}", "", "1.00 ± 0.00", "0.00 ± 0.00", "-0.50 ± 0.00", ""],
        ["`dr_grpo`", "2", *["60.0 ± 127.1"] * 2, f"90.0{none}", f"100.0{none}", f"50.0{none}", *after],
    ]
    kept = [json.loads(line) for line in (tmp_path / "out/answers.jsonl").read_text().splitlines()]
    assert kept == [{"variant": "dr_grpo", "seed": seed, **answers[0]} for seed in (1, 2)]


def test_report_of_people(tmp_path, capsys):
    """Eight updates; the judge saw every third, liked the second best, and its means are of up to three of them."""
    runs = tmp_path / "runs"
    made_up(runs, "reward-200", 1, {"test_corr": 0.5}, {})
    for seed, end in {1: 1.0, 2: 3.0}.items():
        curves = {"objective/score": [9.0, 9.0] + [end] * 6, "objective/kl": [0.0, 1, 2, 3, 4, 5, 6, 7]}
        curves |= {"objective/vader": [0.5] * 8, "ppo/val/var_explained": [0.25] * 8}
        made_up(runs, "200", seed, {}, curves)
        (run,) = (runs / f"200/seed{seed}/runs").iterdir()
        meta = json.loads((run / "meta.json").read_text())
        meta["args"]["rewards"] = {"trained_model": "../../rewards/200"}
        (run / "meta.json").write_text(json.dumps(meta))
        (run / "judged.json").write_text(json.dumps({"0": 0.0, "3": end, "6": -end}))
    # The judge: end and -end are in the last six. The means are 0, end / 2 and 0, with KL 0, 1.5 and 3.
    expected = ["2.00 ± 12.71", "0.00 ± 0.00", "0.50 ± 0.00", "4.50 ± 0.00", "1.00 ± 6.35", "1.50 ± 0.00"]
    assert reported("people", tmp_path, capsys) == [["`200`", "2", "0.500", *expected]]
    assert pd.read_csv(tmp_path / "out/updates.csv")["judge"].dropna().tolist() == [0, 1, -1, 0, 3, -3]


def test_rows_of_runs_that_are_not_in_the_folder_are_kept(tmp_path):
    """Tables that other runs have filled: theirs stay, those of the same run are replaced, parts stay together."""
    whose = {"part": ["a", "a", "b"], "variant": ["x", "y", "x"], "seed": [1, 1, 1]}
    old = pd.DataFrame(whose | {"samples": [0.5, 0.25, 0.125]})
    lab.keep_tables(tmp_path, old, old)
    fresh = pd.DataFrame({"part": ["a", "a"], "variant": ["z", "y"], "seed": [1, 1], "samples": [1.0, 2.0]})
    lab.keep_tables(tmp_path, fresh, fresh)
    rows = [["a", "x", 1, 0.5], ["a", "z", 1, 1.0], ["a", "y", 1, 2.0], ["b", "x", 1, 0.125]]
    for name in ("runs", "updates"):
        assert lab.kept_table(tmp_path / f"{name}.csv").to_numpy().tolist() == rows


@pytest.mark.parametrize("folder", ["critic", "staleness", "staleness-masked", "estimators"])
def test_committed_tables_follow_from_committed_numbers(folder, tmp_path):
    name = folder.removesuffix("-masked")
    plain = dataclasses.replace(EXPERIMENTS[name], picture=None)
    for table in ("runs", "updates"):
        (tmp_path / f"{table}.csv").write_bytes((lab.RESULTS / folder / f"{table}.csv").read_bytes())
    lab.draw(plain, lab.Args(output=tmp_path))
    assert (tmp_path / f"{name}.md").read_bytes() == (lab.RESULTS / folder / f"{name}.md").read_bytes()


def test_a_curve_by_hand():
    """Smoothed seeds, their mean and interval, against numpy: 2.7764 is Student's t with 4 degrees of freedom."""
    noise, axes = np.random.default_rng(0), Figure().subplots()
    seeds = noise.random((5, 20))
    own = pd.concat([pd.DataFrame({"step": range(20), "x": x}).assign(seed=i) for i, x in enumerate(seeds)])
    lab.draw_curve(axes, own, "curve", column="x", band=0.1)
    lab.draw_curve(axes, own[:0], "none", column="x")
    (line,) = axes.lines
    at = [seeds[:, 0].mean(), seeds[:, 4:11].mean(), seeds[:, -7:].mean()]  # nothing looks ahead
    assert line.get_label() == "curve" and line.get_ydata()[[0, 10, 19]] == pytest.approx(at)
    band = axes.collections[0].get_paths()[0].vertices
    half = 2.7764 * seeds[:, 4:11].mean(1).std(ddof=1) / np.sqrt(5)
    assert sorted(band[band[:, 0] == 10, 1])[:: len(band[band[:, 0] == 10]) - 1] == pytest.approx(
        [at[1] - half, at[1] + half], rel=1e-4
    )


def test_intervals_and_p_values_are_scipys():
    for count in (2, 5, 20):
        values = np.random.default_rng(count).normal(1, 2, count)
        found, test = lab.interval(list(values)), scipy.stats.ttest_1samp(values, 0)
        low, high = test.confidence_interval(0.95)
        assert found == pytest.approx([(low + high) / 2, (high - low) / 2])
        assert lab.p_value(list(values)) == pytest.approx(test.pvalue)
    assert lab.p_value([0.0, 0.0]) == 1 and lab.p_value([0.5, 0.5]) == 0
    assert all(map(math.isnan, (lab.p_value([0.0]), lab.interval([1.0])[1])))


def test_holm_by_hand():
    """Three of 0.01, 0.04, 0.03: 3 x 0.01; 2 x 0.03; then 0.04, but not below 0.06. nan is no comparison."""
    found = lab.holm([0.01, math.nan, 0.04, 0.03])
    assert found[0] == pytest.approx(0.03) and math.isnan(found[1])
    assert found[2:] == pytest.approx([0.06, 0.06]) and lab.holm([0.6, 0.9]) == [1, 1]


# ---- Running ---------------------------------------------------------------------------------------------------


def test_finished_runs_are_not_run_again(tmp_path, capsys):
    """What is chosen is run, with the arguments of its name; a job that says it is finished is left alone."""
    args = lab.Args(folder=tmp_path / "runs", output=tmp_path / "out", pictures=tmp_path, seeds=1)
    for name in critic.VARIANTS:
        made_up(tmp_path / "runs", name, 1, evaluated(0.5), {critic.CORRECT: [0.5] * 8})
        (job,) = lab.jobs_of(critic.EXPERIMENT, args, name)
        record = {"command": job.command, "commit": "0123456789", "finished": True, "status": 0, "starts": 1}
        (job.folder / "job.json").write_text(json.dumps(record))
    assert lab.run(critic.EXPERIMENT, args) == 0
    assert len(pd.read_csv(tmp_path / "out/runs.csv")) == 7 and not list((tmp_path / "runs").glob("*/*/log.txt"))
    with pytest.raises(InputError, match="another command's run"):
        lab.run(critic.EXPERIMENT, dataclasses.replace(args, policy="--preset sums --ppo.lr 1e-3"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report", "--folder", "nowhere"], "nowhere holds no finished run"),
        (["draw", "--output", "nowhere"], "nowhere/runs.csv cannot be read"),
        (["run", "--only", "ppo", "--folder", "nowhere"], "--only ppo: there are gae, critic_lam"),
        (["run", "--seeds", "0"], "--seeds is 0; it must be at least 1"),
        ([], ""),
    ],
)
def test_bad_input_ends_in_one_line(words, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["critic.py", *words])
    with pytest.raises(SystemExit) as ended:
        lab.main(critic.EXPERIMENT, critic.__doc__)
    said = capsys.readouterr()
    assert ended.value.code == 2 and message in said.err and len(said.err.splitlines()) == (1 if words else 0)
