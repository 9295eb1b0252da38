"""benchmark/experiments/critic.py and arithmetic.py: what they run, and what they compute."""

import dataclasses
import json
import shlex

import pandas as pd
from processes import launch

from benchmark.experiments import arithmetic, critic, estimators
from ppo_rlhf import rlvr_checks, rlvr_policy
from ppo_rlhf.lib import cli

UPDATES = 8


def test_variants_differ_in_their_method_alone(tmp_path):
    """As the script reads them from the command of a job: 32 updates of 128 episodes, no KL penalty."""
    read = {}
    for name in critic.VARIANTS:
        (job,) = critic.jobs_of(critic.Args(folder=tmp_path), name, [3])
        python, script, *words = shlex.split(job.command)
        assert (python, script, job.seed) == ("python", rlvr_policy.__file__, 3)
        read[name] = cli.parse_args(rlvr_policy.PRESETS, words)
        rlvr_checks.check_arguments(read[name])
        assert not [*rlvr_checks.doubts(read[name])] and rlvr_policy.ppo_sizes(read[name].ppo, 1).updates == 32
        assert read[name].base_model == read[name].task.problems == "sums-long" and read[name].rewards.kl_coef == 0
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


def made_up(folder, name: str, seed: int, right: float, alone: int) -> None:
    """A finished run, in which the policy stands still for some updates, and its critic explains more and more."""
    run = folder / name / f"seed{seed}" / "runs/made_up"
    run.mkdir(parents=True)
    results = {"eval/mean@2": right, "eval/gsm8k_strict": right + 0.1}
    meta = {"finished": True, "commit": "0123456789", "args": {}, "results": results}
    (run / "meta.json").write_text(json.dumps(meta))
    columns = {
        "step": range(UPDATES),
        "episode": [128 * (i + 1) for i in range(UPDATES)],
        "objective/verifiable_correct_rate": [right / 2] * UPDATES,
        "policy/approxkl_avg": [0.0] * alone + [1e-3] * (UPDATES - alone),
    }
    if name != "rloo":
        columns["val/explained_var"] = [0.1 * i for i in range(UPDATES)]
    pd.DataFrame(columns).to_csv(run / "metrics.csv", index=False)


def test_report_of_made_up_runs(tmp_path):
    """Numbers by hand. Student's t with 2 degrees of freedom is 4.3027."""
    for seed, right in {1: 0.4, 2: 0.5, 3: 0.6}.items():
        made_up(tmp_path / "bench", "gae", seed, right, 3)
        made_up(tmp_path / "bench", "all", seed, right + 0.1 * seed, 4)
        made_up(tmp_path / "bench", "rloo", seed, right, 0)
    where = "--folder", "bench", "--output", "out", "--pictures", "pictures"
    result = launch(critic.__file__, "report", *where, folder=tmp_path)
    assert result.status == 0, result
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in result.stdout.splitlines() if "|" in line
    ]
    explained = ["0.40 ± 0.00", "0.60 ± 0.00"]
    # 40, 50, 60 and 10, 20, 30: standard error 10 / sqrt(3). The last three updates explain 0.5, 0.6 and 0.7.
    assert rows == [
        ["`gae`", "3", "25.0 ± 12.4", "50.0 ± 24.8", "60.0 ± 24.8", "", "3.0 ± 0.0", "0.30 ± 0.00", "0.60 ± 0.00"],
        ["`all`", "3", "35.0 ± 24.8", "70.0 ± 49.7", "80.0 ± 49.7", "+20.0 ± 24.8", "4.0 ± 0.0", *explained],
        ["`rloo`", "3", "25.0 ± 12.4", "50.0 ± 24.8", "60.0 ± 24.8", "+0.0 ± 0.0", "", "", ""],
    ]
    assert len(head) == len(rows[0]) and "commit: 0123456\n" in (tmp_path / "out/critic.md").read_text()
    again = launch(critic.__file__, "draw", "--output", "out", "--pictures", "new", folder=tmp_path)
    assert again.status == 0 and again.stdout == result.stdout
    pictures = [(tmp_path / folder / "critic.png").read_bytes() for folder in ("pictures", "new")]
    assert pictures[0] == pictures[1]


def test_rows_of_runs_that_are_not_in_the_folder_are_kept(tmp_path):
    """Tables that other runs have filled: theirs stay, those of the same run are replaced, parts stay together."""
    whose = {"part": ["a", "a", "b"], "variant": ["x", "y", "x"], "seed": [1, 1, 1]}
    old = pd.DataFrame(whose | {"samples": [0.5, 0.25, 0.125]})
    estimators.keep_tables(tmp_path, old, old)
    fresh = pd.DataFrame({"part": ["a", "a"], "variant": ["z", "y"], "seed": [1, 1], "samples": [1.0, 2.0]})
    estimators.keep_tables(tmp_path, fresh, fresh)
    for table in estimators.kept_tables(tmp_path):
        assert table.to_numpy().tolist() == [
            ["a", "x", 1, 0.5],
            ["a", "z", 1, 1.0],
            ["a", "y", 1, 2.0],
            ["b", "x", 1, 0.125],
        ]


def test_bad_input(tmp_path):
    for words, message in (
        (["report", "--folder", "nowhere"], "holds no finished run"),
        (["draw", "--output", "nowhere"], "--output nowhere"),
        (["run", "--only", "ppo", "--folder", "nowhere"], "--only ppo: there are gae, critic_lam"),
    ):
        result = launch(critic.__file__, *words, folder=tmp_path)
        assert result.status == 2 and message in result.stderr and "Traceback" not in result.stderr, result
    assert launch(critic.__file__, folder=tmp_path).status == 2


def test_arithmetic_is_learned_by_three_methods(tmp_path):
    read = {}
    for name in arithmetic.VARIANTS:
        (job,) = arithmetic.jobs_of(arithmetic.Args(folder=tmp_path), name, [3])
        _, script, *words = shlex.split(job.command)
        assert (script, job.seed) == (rlvr_policy.__file__, 3)
        read[name] = cli.parse_args(rlvr_policy.PRESETS, words)
        rlvr_checks.check_arguments(read[name])
        assert not [*rlvr_checks.doubts(read[name])] and read[name].rewards.kl_loss_coef > 0
    plain = read["dr_grpo"]
    assert plain == dataclasses.replace(rlvr_policy.PRESETS["arithmetic"], log_interval=0)
    for name, change in {"gae": {"critic_warmup": 3}, "reinforce++": {}}.items():
        ppo = dataclasses.replace(plain.ppo, advantage=name, **change)
        assert read[name] == dataclasses.replace(plain, ppo=ppo), name


def test_table_of_made_up_runs_of_arithmetic(tmp_path):
    """Numbers by hand; a mean over two seeds that differ by 0.2 has an interval of 12.7062 times 0.1."""
    for seed, right in {1: 0.5, 2: 0.7}.items():
        run = tmp_path / f"bench/dr_grpo/seed{seed}/runs/made_up"
        run.mkdir(parents=True)
        after = {"eval/gsm8k_flexible": right, "eval/mean@4": right, "eval/pass@4": 0.9, "eval/stopped": 1.0}
        args = {"base_model": "smollm2-135m"}
        meta = {"finished": True, "commit": "0123456789", "args": args, "results": after, "wall_time": 120.0}
        (run / "meta.json").write_text(json.dumps(meta))
        columns = dict.fromkeys(after, [0.25] * 4) | {
            "step": range(4),
            "policy/entropy_avg": [1.0, 0.5, 0.25, 0.0],
            "val/groups_zero_std": [0.0, 0.5, 0.5, 0.5],
            "objective/kl": [0.0, 1.0, 2.0, 3.0],
        }
        pd.DataFrame(columns).to_csv(run / "metrics.csv", index=False)
        said = ["12", "I don't know", "The answer is -3.", "4 or 5"]
        (run / "evaluation.jsonl").write_text("".join(json.dumps({"response": text}) + "\n" for text in said))
        answers = [{"question": "Who?", "before": "I.", "after": "12"}]
        (run / "forgetting.json").write_text(json.dumps({"before": -0.5, "after": -1.5, "answers": answers}))
    result = launch(arithmetic.__file__, "table", "--folder", "bench", "--output", "out", folder=tmp_path)
    assert result.status == 0, result
    _, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in result.stdout.splitlines() if "|" in line
    ]
    none = " ± 0.0"
    after = f"75.0{none}", "0.25 ± 0.00", "2.00 ± 0.00", "-1.50 ± 0.00", f"2.0{none}"
    assert rows == [
        ["before", "2", *[f"25.0{none}"] * 4, f"0.0{none}", "", "1.00 ± 0.00", "0.00 ± 0.00", "-0.50 ± 0.00", ""],
        ["`dr_grpo`", "2", *["60.0 ± 127.1"] * 2, f"90.0{none}", f"100.0{none}", f"50.0{none}", *after],
    ]
    kept = [json.loads(line) for line in (tmp_path / "out/answers.jsonl").read_text().splitlines()]
    assert kept == [{"variant": "dr_grpo", "seed": seed, **answers[0]} for seed in (1, 2)]
    assert "commit: 0123456\n" in (tmp_path / "out/arithmetic.md").read_text()
