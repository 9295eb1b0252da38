"""benchmark/lab.py and the experiments that are declared with it: what they run, what they measure, their tables."""

import dataclasses
import json
import math
import shlex

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from runs import write_rows

from benchmark import lab
from benchmark.experiments import arithmetic, posts, steps
from ppo_rlhf.rlvr import arguments as rlvr_arguments, policy as rlvr_policy
from ppo_rlhf.train_policy import parse_args

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


def test_arithmetic_is_learned_by_three_methods(tmp_path):
    read = {}
    for variant in arithmetic.EXPERIMENT.variants:
        (job,) = lab.jobs_of(arithmetic.EXPERIMENT, lab.Args(folder=str(tmp_path), seeds=1, first_seed=3), variant)
        python, path, *words = shlex.split(job.command)
        assert (python, path, job.seed) == ("python", rlvr_policy.__file__, 3)
        read[variant] = parse_args(rlvr_arguments.PRESETS, words)
        rlvr_arguments.check_arguments(read[variant])
    assert read["dr_grpo"] == dataclasses.replace(rlvr_arguments.PRESETS["arithmetic"], log_interval=0)
    assert {name: args.ppo.advantage for name, args in read.items() if name != "dr_grpo"} == {
        "gae": "gae",
        "reinforce++": "reinforce++",
    }


PROMPT = "Jonas has 20 apples. Then he has 2 times as many. He finds 8. He buys 5. How many apples does Jonas have?\n"
RIGHT = "20*2=40\n40+8=48\n48+5=53\n#### 53"


def test_each_right_line_earns_a_share_wherever_it_is_paid():
    texts = [RIGHT, "20*2=40\nHe finds 8. 40+8=48\n48+5=54\n#### 54", f"20*2=40\n{RIGHT}", f"{RIGHT}\n20*2=40", ""]
    prompts, ids = [PROMPT] * 5, [steps.tokenizer_of_sums().encode(text) for text in texts]
    assert steps.at_the_end(prompts, texts, [""] * 5) == [1.0, 0.5, 0.25, 1.0, 0.0]
    paid = steps.at_each_step(prompts, texts, ids)
    assert [sum(share for _, share in pairs) for pairs in paid] == [1.0, 0.5, 0.25, 1.0, 0.0]
    for own, pairs in zip(ids, paid, strict=True):
        ends = [i for i, token in enumerate(own) if steps.tokenizer_of_sums().decode([token]) == "\n"]
        assert {place for place, share in pairs if share} <= {*ends, len(own) - 1}


def test_a_true_equation_earns_its_share_again_or_only_once():
    said = ["20*2=40", "He finds 8. 40+8=47", "9-12=3", "3-1=2", "3-1=2", "#### 2", "2==2", "x+1=2"]
    earned = [
        [function(PROMPT, said[: i + 1]) for i in range(8)] for function in (steps.equation, steps.new_equation)
    ]
    assert earned == [[0.2, 0, 0, 0.2, 0.2, 0, 0, 0], [0.2, 0, 0, 0.2, 0, 0, 0, 0]]


# ---- What is measured ------------------------------------------------------------------------------------------


def test_what_is_measured_of_arithmetic(tmp_path):
    """Before the first update, and after the last; of what changes all the time, the mean of the last three."""
    said = ["12", "I don't know", "The answer is -3.", "4 or 5"]
    write_rows(tmp_path / "evaluation.jsonl", *({"response": text} for text in said))
    after = {"eval/gsm8k_flexible": 0.5, "eval/mean@4": 0.625, "eval/pass@4": 0.9, "eval/stopped": 1.0}
    columns = dict.fromkeys(after, [0.25] * 4) | {
        "policy/entropy_avg": [1.0, 0.5, 0.25, 0.0],
        "val/groups_zero_std": [0.0, 0.5, 0.5, 0.5],
        "objective/kl": [0.0, 1.0, 2.0, 3.0],
    }
    shares = {"greedy": 0.5, "samples": 0.625, "pass@4": 0.9, "ends": 1.0}
    changes = {"entropy": (1.0, 0.25), "equal groups": (0.0, 0.5), "KL": (0.0, 2.0)}
    changes |= {name: (0.25, share) for name, share in shares.items()}
    expected = {
        f"{name} {when}": x for name, xs in changes.items() for when, x in zip(("before", "after"), xs, strict=True)
    }
    expected |= {"a number after": 0.75, "minutes": 2.0}
    meta = {"results": after, "wall_time": 120.0}
    assert arithmetic.measure(tmp_path, meta, pd.DataFrame(columns)) == expected


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
    (tmp_path / "runs.csv").write_bytes((committed / "runs.csv").read_bytes())
    lab.draw(arithmetic.EXPERIMENT, lab.Args(output=str(tmp_path)))
    assert (tmp_path / "arithmetic.md").read_bytes() == (committed / "arithmetic.md").read_bytes()


def test_intervals_and_p_values_are_scipys():
    for count in (2, 5, 20):
        values = np.random.default_rng(count).normal(1, 2, count)
        found, test = lab.interval(list(values)), scipy.stats.ttest_1samp(values, 0)
        low, high = test.confidence_interval(0.95)
        assert found == pytest.approx([(low + high) / 2, (high - low) / 2])
        assert lab.p_value(list(values)) == pytest.approx(test.pvalue)
    assert lab.p_value([0.0, 0.0]) == 1 and math.isnan(lab.p_value([0.0]))


def test_holm_by_hand():
    """Three of 0.01, 0.04, 0.03: 3 x 0.01; 2 x 0.03; then 0.04, but not below 0.06. nan is no comparison."""
    found = lab.holm([0.01, math.nan, 0.04, 0.03])
    assert found[0] == pytest.approx(0.03) and math.isnan(found[1])
    assert found[2:] == pytest.approx([0.06, 0.06]) and lab.holm([0.6, 0.9]) == [1, 1]


# ---- Running ---------------------------------------------------------------------------------------------------


def test_finished_runs_are_not_run_again(tmp_path):
    """What is chosen is run, with the arguments of its name; a job that says it is finished is left alone."""
    args = lab.Args(folder=str(tmp_path / "runs"), output=str(tmp_path / "out"), seeds=2)
    for job in [job for name in TOY.variants for job in lab.jobs_of(TOY, args, name)]:
        run = job.folder / "runs/made_up"
        run.mkdir(parents=True)
        meta = {"finished": True, "commit": "0123456789", "args": {}, "wall_time": 1}
        (run / "meta.json").write_text(json.dumps(meta))
        pd.DataFrame({"step": range(8), "x": 0.5, "y": 0.0}).to_csv(run / "metrics.csv", index=False)
        record = {"command": job.command, "commit": "0123456789", "finished": True, "status": 0, "starts": 1}
        (job.folder / "job.json").write_text(json.dumps(record))
    assert lab.run(TOY, args) == 0
    runs = [[name, seed, 0.5, "0123456"] for name in TOY.variants for seed in (1, 2)]
    assert lab.kept_table(tmp_path / "out/runs.csv").to_numpy().tolist() == runs
    updates = lab.kept_table(tmp_path / "out/updates.csv")
    assert list(updates) == ["step", "x", "variant", "seed"] and len(updates) == 4 * 8
    assert not list((tmp_path / "runs").glob("*/*/log.txt"))


def test_the_rate_at_equal_length_lies_between_those_of_two_lengths():
    """With two differences in length, the fitted line goes through the logits of both rates."""

    def logit(rate: float) -> float:
        return math.log(rate / (1 - rate))

    results, differences = np.array([1, 1, 1, 0, 0.5, 0, 0, 0]), np.array([2, 2, 2, 2, -1, -1, -1, -1])
    rate, low, high = posts.rate_at_equal_length(results, differences)
    assert logit(rate) == pytest.approx(logit(0.125) + (logit(0.75) - logit(0.125)) / 3)
    # Each length says how large the error of its logit is: 1 / sqrt(rows * rate * (1 - rate)).
    errors = [1 / (4 * p * (1 - p)) for p in (0.125, 0.75)]
    deviation = math.sqrt(errors[0] * (2 / 3) ** 2 + errors[1] / 9)
    assert [logit(low), logit(high)] == pytest.approx([logit(rate) + sign * 1.96 * deviation for sign in (-1, 1)])
