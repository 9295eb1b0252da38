"""benchmark/lab.py and the experiments that are declared with it: what they run, what they measure, their tables."""

import dataclasses
import json
import math
import shlex
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from benchmark import lab
from benchmark.experiments import arithmetic, people, summaries, value_head
from ppo_rlhf import sample, train_policy, train_reward
from ppo_rlhf.lib.base.errors import InputError
from ppo_rlhf.lib.services import cli, traces
from ppo_rlhf.rlvr import checks as rlvr_checks, policy as rlvr_policy
from ppo_rlhf.tldr import policy as tldr_policy, reward as tldr_reward, sft as tldr_sft

# Its training script never starts.
TOY = lab.Experiment(
    name="toy",
    script="ppo_rlhf/rlvr/policy.py",
    common="--preset sums",
    variants={"10": "", "20": "--ppo.lr 1e-3"},
    curves=("x",),
    measure=lambda run, meta, table: {"x": table["x"].iloc[-1]},
    table=lambda runs: [{"mean": lab.cell(runs["x"], ".2f")}],
)


# ---- What is run -----------------------------------------------------------------------------------------------


def arguments(experiment: lab.Experiment, module: ModuleType, folder: Path) -> dict:
    """Of each variant, the arguments that the script reads from the command of a job."""
    found = {}
    for variant in experiment.variants:
        (job,) = lab.jobs_of(experiment, lab.Args(folder=folder, seeds=1, first_seed=3), variant)
        python, path, *words = shlex.split(job.command)
        assert (python, path) == ("python", module.__file__)
        assert (job.seed, job.folder) == (3, folder / variant / "seed3")
        found[variant] = cli.parse_args(module.PRESETS, words)
    return found


def test_arithmetic_is_learned_by_three_methods(tmp_path):
    read = arguments(arithmetic.EXPERIMENT, rlvr_policy, tmp_path)
    for args in read.values():
        rlvr_checks.check_arguments(args)
    plain = read["dr_grpo"]
    assert plain == dataclasses.replace(rlvr_policy.PRESETS["arithmetic"], log_interval=0)
    for name, change in {"gae": {"critic_warmup": 3}, "reinforce++": {}}.items():
        ppo = dataclasses.replace(plain.ppo, advantage=name, **change)
        assert read[name] == dataclasses.replace(plain, ppo=ppo), name
        assert not [*rlvr_checks.doubts(read[name])] and read[name].rewards.kl_loss_coef > 0


def test_policies_of_people_differ_in_their_reward_model_and_its_penalty_alone(tmp_path):
    read = arguments(people.EXPERIMENT, train_policy, tmp_path)
    for args in read.values():
        assert args.trace_episodes == args.ppo.batch_size // args.ppo.whiten_groups  # all that the judge sees
    learned_from = {name: args.rewards.trained_model.rpartition("/")[2] for name, args in read.items()}
    assert learned_from == {"preset": "4800"} | {name: name for name in ("200", "1000", "4800", "4800-single")}
    preset = read["preset"]
    plain = {"log_interval": 0, "trace_interval": 4, "trace_episodes": 128, "max_memory": 8}
    plain["rewards"] = preset.rewards
    assert preset == dataclasses.replace(train_policy.PRESETS["reviews"], **plain)
    ppo = dataclasses.replace(preset.ppo, lr=3e-4, batch_size=64, total_episodes=768)
    without = dataclasses.replace(preset.rewards.adaptive_kl, target=None)
    for name in read.keys() - {"preset"}:
        shaping = {"trained_model": f"../../rewards/{name}", "kl_coef": 0.01, "adaptive_kl": without}
        rewards = dataclasses.replace(preset.rewards, **shaping)
        assert read[name] == dataclasses.replace(
            preset, trace_interval=1, trace_episodes=64, ppo=ppo, rewards=rewards
        )


def test_value_heads_differ_in_their_learning_rate_alone(tmp_path):
    read = arguments(value_head.EXPERIMENT, train_policy, tmp_path)
    assert read["2019"].ppo == train_policy.PRESETS["tales"].ppo
    for name, args in read.items():
        ppo = dataclasses.replace(args.ppo, value_head_lr=None if name == "2019" else float(name))
        assert args == dataclasses.replace(read["2019"], ppo=ppo)


def test_variants_are_chosen_by_name():
    assert lab.chosen(TOY, lab.Args()) == ["10", "20"] and lab.chosen(TOY, lab.Args(only=("20", "20"))) == ["20"]
    with pytest.raises(InputError, match="--only 2: there are 10, 20"):
        lab.chosen(TOY, lab.Args(only=("2",)))


# ---- What is measured ------------------------------------------------------------------------------------------


def made_up(
    folder: Path, name: str, seed: int, results: dict, columns: dict, responses: list[str] = (), **arguments: dict
) -> Path:
    """A finished run; its folder."""
    run = folder / name / f"seed{seed}" / "runs/made_up"
    run.mkdir(parents=True)
    args = {"base_model": "smollm2-135m"} | arguments
    meta = {"finished": True, "commit": "0123456789", "args": args, "results": results, "wall_time": 120.0}
    (run / "meta.json").write_text(json.dumps(meta))
    pd.DataFrame({"step": range(8), "episode": range(128, 1152, 128)} | columns).to_csv(
        run / "metrics.csv", index=False
    )
    (run / "evaluation.jsonl").write_text("".join(json.dumps({"response": text}) + "\n" for text in responses))
    return run


def reported(experiment: lab.Experiment, folder: Path, capsys) -> list[list[str]]:
    """The rows of the table; the same, and the same picture, when it is drawn once more."""
    args = lab.Args(folder=folder / "runs", output=folder / "out", pictures=folder / "pictures", seeds=3)
    assert lab.report(experiment, args) == 0
    text, pictures = capsys.readouterr().out, [*(folder / "pictures").glob("*.png")]
    before = [picture.read_bytes() for picture in pictures]
    assert lab.draw(experiment, args) == 0 and capsys.readouterr().out == text
    assert [picture.read_bytes() for picture in pictures] == before and bool(before) == bool(experiment.picture)
    assert "commit: 0123456\n" in (folder / f"out/{experiment.name}.md").read_text()
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    assert len({len(line) for line in lines}) == 1
    return lines[2:]


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
        run = made_up(tmp_path / "runs", "dr_grpo", seed, after, columns, said)
        (run / "forgetting.json").write_text(json.dumps({"before": -0.5, "after": -1.5, "answers": answers}))
    none = " ± 0.0"
    after = f"75.0{none}", "0.25 ± 0.00", "2.00 ± 0.00", "-1.50 ± 0.00", f"2.0{none}"
    assert reported(arithmetic.EXPERIMENT, tmp_path, capsys) == [
        ["before", "2", *[f"25.0{none}"] * 4, f"0.0{none}", "", "1.00 ± 0.00", "0.00 ± 0.00", "-0.50 ± 0.00", ""],
        ["`dr_grpo`", "2", *["60.0 ± 127.1"] * 2, f"90.0{none}", f"100.0{none}", f"50.0{none}", *after],
    ]
    found = [{"variant": "dr_grpo", "seed": seed, **answers[0]} for seed in (1, 2)]
    file, other = tmp_path / "out/answers.jsonl", {"variant": "gae", "seed": 1, **answers[0]}
    assert [json.loads(line) for line in file.read_text().splitlines()] == found
    file.write_text("".join(json.dumps(row) + "\n" for row in (found[0] | {"after": "13"}, other)))
    reported(arithmetic.EXPERIMENT, tmp_path, capsys)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [other, *found]


def test_summaries_start_from_models_of_the_same_preset(tmp_path):
    read = arguments(summaries.EXPERIMENT, tldr_policy, tmp_path)["preset"]
    start = {"base_model": "../../sfts/reviews", "log_interval": 0, "max_memory": 8}
    rewards = dataclasses.replace(read.rewards, trained_model="../../rewards/pairs")
    assert read == dataclasses.replace(tldr_policy.PRESETS["reviews"], rewards=rewards, **start)
    modules = (tldr_sft, tldr_reward, train_reward)
    for line, module in zip([*summaries.SFT.values(), *summaries.REWARDS.values()], modules, strict=True):
        script, *words = shlex.split(line)
        assert str(lab.ROOT / script) == module.__file__
        assert cli.parse_args(module.PRESETS, words).preset == "reviews"


def test_what_variants_share_is_trained_once(tmp_path, monkeypatch):
    """Two scripts of one line: one leaves a model, with its command in it, the other fails."""
    trains = "import pathlib, sys; pathlib.Path('runs/r').mkdir(parents=True); "
    trains += "pathlib.Path('runs/r/meta.json').write_text('{\"finished\": true}'); "
    trains += "pathlib.Path('models/r/reward').mkdir(parents=True); print(*sys.argv[1:])"
    (tmp_path / "trains.py").write_text(trains)
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(lab, "ROOT", tmp_path)
    args, commands = lab.Args(folder=tmp_path / "runs"), {"good": "trains.py --num_train 7"}
    for _ in range(2):  # the second time, the script would fail, because its folders are there
        assert lab.train_first(TOY, args, "reward", commands)
    assert (tmp_path / "runs/rewards/good").resolve() == tmp_path / "runs/reward-good/seed1/models/r/reward"
    assert "\n--num_train 7 --seed 1\n" in (tmp_path / "runs/reward-good/seed1/log.txt").read_text()
    assert not lab.train_first(TOY, args, "reward", commands | {"bad": "fails.py"})
    assert not (tmp_path / "runs/rewards/bad").is_symlink()


def test_report_of_people(tmp_path, monkeypatch, capsys):
    """Eight updates; the judge saw every third, liked the second best, and its means are of up to three of them.
    This judge reads the number that a text is.
    """
    monkeypatch.setattr(people, "judge", lambda folder, texts: [*map(float, texts)])
    runs = tmp_path / "runs"
    made_up(runs, "reward-200", 1, {"test_corr": 0.5}, {})
    for seed, end in {1: 1.0, 2: 3.0}.items():
        curves = {"objective/score": [9.0, 9.0] + [end] * 6, "objective/kl": [0.0, 1, 2, 3, 4, 5, 6, 7]}
        curves |= {"objective/vader": [0.5] * 8, "ppo/val/var_explained": [0.25] * 8}
        run = made_up(runs, "200", seed, {}, curves, rewards={"trained_model": "../../rewards/200"})
        for update, mean in {0: 0.0, 3: end, 6: -end}.items():
            nothing = {"tokens": {}, "episodes": {}, "texts": {}}
            batch = {"queries": ["", "-"], "responses": [[f"{10 + 2 * mean}", ""], ["1", "0"]]}  # 10 + 2 mean; -10
            traces.write(run, traces.Trace(update=update, again=False, **batch, **nothing))
            same = {"queries": ["9"], "responses": [["9"]]}  # what is asked each time is not of the batch
            traces.write(run, traces.Trace(update=update, again=True, **same, **nothing))
    # The judge: of the last three, one was read, -end. The means are 0, end / 2 and 0, with KL 0, 1.5 and 3.
    expected = ["2.00 ± 12.71", "-2.00 ± 12.71", "0.50 ± 0.00", "6.00 ± 0.00", "1.00 ± 6.35", "1.50 ± 0.00"]
    assert reported(people.EXPERIMENT, tmp_path, capsys) == [["`200`", "2", "0.500", *expected]]
    assert pd.read_csv(tmp_path / "out/updates.csv")["judge"].dropna().tolist() == [0, 1, -1, 0, 3, -3]


def test_held_out_texts_of_people(tmp_path, capsys):
    """15 of 60 texts have the word before, in any case, and all after. How often a text has one doesn't count, nor
    words that most had before, nor short ones. The first fifty are kept."""
    runs = tmp_path / "runs"
    made_up(runs, "reward-4800", 1, {"test_corr": 0.5}, {})
    curves = dict.fromkeys([*people.CURVES.values(), "ppo/val/var_explained"], 1.0)
    run = made_up(runs, "preset", 2, {}, curves, rewards={"trained_model": "../../rewards/4800"})
    (run / "judged.json").write_text('{"7": 0.5}')
    (run / "held_out.json").write_text('[{"": "score", "before": 0.0, "after": 1.5, "± 95 %": 0.25}]')
    texts = {"base": "Think, think.", "policy": "So so: thoughts, that's thought-provoking; think think think."}
    rows = [{"query": f"{i}", **texts} for i in range(60)]
    for row in rows[:15]:
        row["base"] += " A THOUGHT-PROVOKING film. That's it. Thoughts"
    for row in rows[15:30]:
        row["base"] += " That's. Thoughts."
    (run / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reported(people.EXPERIMENT, tmp_path, capsys)
    (found,) = pd.read_csv(tmp_path / "out/runs.csv").to_dict("records")
    assert (found["score after"], found["score ± 95 %"]) == (1.5, 0.25)
    assert (found["habit"], found["habit before"], found["habit after"]) == ("thought-provoking", 0.25, 1.0)
    kept = [json.loads(line) for line in (tmp_path / "out/texts.jsonl").read_text().splitlines()]
    assert kept == [{"variant": "preset", "seed": 2, **row} for row in rows[:50]]


def test_report_of_summaries(tmp_path, monkeypatch, capsys):
    """Three of four endings are longer after PPO, and this judge likes what is long."""
    monkeypatch.setattr(people, "judge", lambda folder, texts: [float(len(text)) for text in texts])
    texts = [{"query": "A film", "base": " is.", "policy": " is" + end} for end in (".", "!!!", " wonderful.", "...")]
    said = {"base score": 0.0, "policy score": 1.0, "base vader": 0.25, "policy vader": 0.5, "kl": 3.0}
    monkeypatch.setattr(sample, "sample", lambda args: [] if args.judge else [row | said for row in texts])
    runs = tmp_path / "runs"
    made_up(runs, "sft-reviews", 1, {"validation/sft/eos_rate": 0.5}, {})
    made_up(runs, "reward-pairs", 1, {"eval/rm/validation/accuracy": 0.75, "ceiling": 0.875}, {})
    made_up(runs, "preset", 1, {"validation/eos_rate": 1.0}, dict.fromkeys(summaries.CURVES.values(), 2.0))
    (row,) = reported(summaries.EXPERIMENT, tmp_path, capsys)
    assert row == ["`preset`", "1", *[f"{value:.2f} ± nan" for value in (2, 2, 2, 0.75, 3.5, 0.25, 3)]]
    (found,) = pd.read_csv(tmp_path / "out/runs.csv").to_dict("records")
    assert (found["accuracy"], found["ceiling"], found["ends before"], found["ends after"]) == (0.75, 0.875, 0.5, 1)
    kept = [json.loads(line) for line in (tmp_path / "out/texts.jsonl").read_text().splitlines()]
    assert kept == [
        {"variant": "preset", "seed": 1, **row, **said, "base judge": 10.0, "policy judge": 6.0 + len(row["policy"])}
        for row in texts
    ]


def test_report_of_value_heads(tmp_path, capsys):
    """What the critic explains in updates 0 to 19, 20 to 59 and from 60 on; score and KL of the last twenty."""
    curves = {"step": range(200), "episode": range(200)}
    curves |= {value_head.EXPLAINED: [0.0] * 20 + [0.25] * 40 + [0.5] * 140, value_head.KL: [9.0] * 180 + [4.0] * 20}
    for seed in (1, 2):
        made_up(tmp_path / "runs", "3e-3", seed, {}, curves | {value_head.SCORE: [9.0] * 180 + [2.0 * seed] * 20})
    explained = ["0.00 ± 0.00", "0.25 ± 0.00", "0.50 ± 0.00"]
    expected = ["`3e-3`", "2", *explained, "3.00 ± 12.71", "4.00 ± 0.00"]
    assert reported(value_head.EXPERIMENT, tmp_path, capsys) == [expected]


def test_rows_of_runs_that_are_not_in_the_folder_are_kept(tmp_path):
    """Tables that other runs have filled: theirs stay, those of the same run are replaced, a variant's stay together.
    Names and commits of digits alone are no numbers.
    """
    whose = {"variant": ["10", "10", "20"], "seed": [1, 2, 1]}
    old = pd.DataFrame(whose | {"x": [0.5, 0.25, 0.125], "commit": "01"})
    lab.keep_tables(tmp_path, old, old)
    fresh = pd.DataFrame({"variant": ["10", "10"], "seed": [3, 2], "x": [1.0, 2.0], "commit": "12"})
    lab.keep_tables(tmp_path, fresh, fresh)
    rows = [["10", 1, 0.5, "01"], ["10", 3, 1.0, "12"], ["10", 2, 2.0, "12"], ["20", 1, 0.125, "01"]]
    for name in ("runs", "updates"):
        assert lab.kept_table(tmp_path / f"{name}.csv").to_numpy().tolist() == rows


def test_committed_tables_follow_from_committed_numbers(tmp_path):
    committed = lab.ROOT / "benchmark/results/arithmetic"
    for table in ("runs", "updates"):
        (tmp_path / f"{table}.csv").write_bytes((committed / f"{table}.csv").read_bytes())
    lab.draw(arithmetic.EXPERIMENT, lab.Args(output=tmp_path))
    assert (tmp_path / "arithmetic.md").read_bytes() == (committed / "arithmetic.md").read_bytes()


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
    args = lab.Args(folder=tmp_path / "runs", output=tmp_path / "out", seeds=2)
    for name in TOY.variants:
        for job in lab.jobs_of(TOY, args, name):
            made_up(tmp_path / "runs", name, job.seed, {}, {"x": [0.5] * 8, "y": [0.0] * 8})
            record = {"command": job.command, "commit": "0123456789", "finished": True, "status": 0, "starts": 1}
            (job.folder / "job.json").write_text(json.dumps(record))
    assert lab.run(TOY, args) == 0
    runs = [[name, seed, 0.5, "0123456"] for name in TOY.variants for seed in (1, 2)]
    assert lab.kept_table(tmp_path / "out/runs.csv").to_numpy().tolist() == runs
    updates = lab.kept_table(tmp_path / "out/updates.csv")
    assert list(updates) == ["step", "episode", "x", "variant", "seed"] and len(updates) == 4 * 8
    assert not list((tmp_path / "runs").glob("*/*/log.txt"))
    with pytest.raises(InputError, match="another command's run"):
        lab.run(dataclasses.replace(TOY, common="--preset sums --ppo.lam 1"), args)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report", "--folder", "nowhere"], "nowhere holds no finished run"),
        (["draw", "--output", "nowhere"], "nowhere/runs.csv cannot be read"),
        (["run", "--only", "ppo", "--folder", "nowhere"], "--only ppo: there are 10, 20"),
        (["run", "--seeds", "0"], "--seeds is 0; it must be at least 1"),
        ([], ""),
    ],
)
def test_bad_input_ends_in_one_line(words, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["toy.py", *words])
    with pytest.raises(SystemExit) as ended:
        lab.main(TOY, "Toys.")
    said = capsys.readouterr()
    assert ended.value.code == 2 and message in said.err and len(said.err.splitlines()) == (1 if words else 0)
