"""Each script through its command line, on a tiny world: what it leaves, two processes, and bad numbers."""

import json
import shutil

import pytest
import torch
from processes import SCRIPTS, launch
from runs import (
    check_close,
    interrupt,
    meta_of,
    metrics_of,
    only,
    policy_arguments,
    rows_of,
    samples_of,
    world_arguments,
)
from safetensors.torch import load_file
from torch.distributed import run as torchrun
from transformers import AutoModelForCausalLM, AutoTokenizer
from whole_runs import Whole, check_same

from ppo_rlhf import sample, train_both


def test_a_run_leaves_what_the_readme_says(both):
    for kind, steps in (("reward", 5), ("policy", 4)):
        run = both.run(f"train_{kind}")
        meta = meta_of(run)
        assert run.name.startswith(f"train_{kind}__tales__1__") and meta["script"] == f"train_{kind}"
        assert meta["finished"] and meta["num_processes"] == 1 and meta["args"]["seed"] == 1
        assert str(both.folder) not in json.dumps(meta)  # it may be moved, and shown
        assert [row["step"] for row in metrics_of(run)] == list(range(steps))
        assert len(list(run.glob("events.out.tfevents.*"))) == 1
        checkpoints = sorted(path.name for path in (run / "checkpoints").iterdir())
        assert checkpoints == {"reward": ["4", "5"], "policy": ["2", "4"]}[kind]
    runs = [path.name for path in (both.folder / "runs").iterdir()]
    assert len({name.rsplit("__", 1)[1].removesuffix(".json") for name in runs}) == 1  # one time stamp
    assert {row["step"] for row in samples_of(run)} == {0, 1, 2, 3}
    assert meta["sizes"]["updates"] == 4 and "wall_time" in meta and meta["versions"]["torch"] == torch.__version__


def test_the_policy_opens_as_an_ordinary_language_model(both):
    """test_traces.py reads texts with it."""
    folder = both.model("policy")
    policy, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert policy.get_input_embeddings().num_embeddings == len(tokenizer)
    assert load_file(folder / "value_head.safetensors")["weight"].abs().max() > 0
    assert json.loads((folder / "ppo_rlhf.json").read_text())["reward_model"].startswith("models/train_reward__")


def test_the_summary_is_about_queries_that_were_held_out(both, tiny_world):
    """Each once, although it asks for more than there are. Of a single one the scores have no deviation."""
    stories = (tiny_world / "stories.txt").read_text().splitlines()
    rows = rows_of(both.run("train_policy") / "comparison.jsonl")
    queries = [row["query"] for row in rows]
    assert len(queries) == len(set(queries)) == len(stories) // 50
    assert all(any(query in story for story in stories[49::50]) for query in queries)
    printed = (both.folder / "stdout").read_text()
    assert f"On {len(queries)} held-out queries, PPO took its score" in printed
    assert "standard deviations of the language model's own" in " ".join(printed.split())
    metas = (meta_of(both.run(f"train_{kind}")) for kind in ("reward", "policy"))
    of_one = {"words" if "gold" in name else name: value for name, value in rows[0].items()}
    of_one |= {"base words": 1.0, "policy words": 2.0}
    said = " ".join(train_both.summary([of_one], *metas))
    assert "On 1 held-out query, PPO took its score" in said and "standard deviations" not in said
    assert "The function words, which PPO never saw, went from +1.00 to +2.00." in said


def test_torchrun_with_two_processes_gives_the_run_of_one(both, tmp_path):
    """test_invariance.py has the ways to divide a batch."""
    command = ["--standalone", "--nproc_per_node", "2", str(SCRIPTS / both.script), *both.arguments]
    on_two = Whole(tmp_path / "two", torchrun.__file__, command).made()
    for kind in ("reward", "policy"):
        one, two = both.run(f"train_{kind}"), on_two.run(f"train_{kind}")
        assert meta_of(two)["num_processes"] == 2
        check_close(two, one, rel=1e-4, abs=1e-6)
    for sample_of_one, sample_of_two in zip(samples_of(one), samples_of(two), strict=True):
        assert sample_of_two["response"] == sample_of_one["response"]


@pytest.mark.parametrize("cut_off", ["policy", "reward"])
def test_a_joint_run_is_resumed_by_either_of_its_runs(cut_off, both, tmp_path):
    """A finished part is skipped; the other resumes from its last checkpoint, or begins."""
    copy = both.copy(tmp_path / "copy")
    reward, policy = copy.run("train_reward"), copy.run("train_policy")
    interrupt(policy if cut_off == "policy" else reward)
    if cut_off == "reward":
        shutil.rmtree(policy)
    result = copy.resumed(reward if cut_off == "policy" else policy)
    assert (f"finished {reward}" in result.stdout) == (cut_off == "reward")
    assert f"finished {policy}" in result.stdout
    check_same(copy, both)


CHANGES_FOLDER = """
import os

def length(queries, responses):
    if os.path.exists("runs"):  # the run has begun
        os.makedirs("elsewhere")
        os.chdir("elsewhere")
    return [float(len(response)) for response in responses]
"""


def test_a_function_takes_the_place_of_the_reward_model(tiny_world, tiny_models, tmp_path):
    """Although it changes the current folder once the run has begun, the run is in one place.

    The base model is one with rotary positions, in bfloat16.
    """
    tokenizer = AutoTokenizer.from_pretrained(tiny_world / "model")
    tiny_models("llama", len(tokenizer)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "mine.py").write_text(CHANGES_FOLDER)
    arguments = [*world_arguments(tiny_world), "--rewards.function", "mine:length", *policy_arguments()]
    arguments += ["--rewards.monitor", "mine:length", "--base_model", "base", "--dtype", "bfloat16", "--track"]
    result = launch("train_policy.py", *arguments, folder=tmp_path)
    assert result.status == 0, result.stdout + result.stderr
    assert (tmp_path / "elsewhere").exists() and not list((tmp_path / "elsewhere").iterdir())
    run = only(tmp_path, "runs/*")
    for row in metrics_of(run):
        assert row["objective/length"] == pytest.approx(row["objective/function_score"], rel=1e-5)
        assert row["objective/length"] > 10
        # The resolution of log-probs between -8 and -4.
        assert row["objective/sampler_gap"] < 2**-5 and row["ppo/val/first_ratio_gap"] < 2**-5
    assert meta_of(run)["finished"] and samples_of(run) and list(run.glob("wandb/offline-run-*"))
    assert {path.name for path in run.iterdir()} >= {"checkpoints", "metrics.csv"}
    assert only(tmp_path, "models/*/policy/model.safetensors")


def test_sample_prints_and_writes_a_comparison(both, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(both.folder)
    policy, file = str(both.model("policy")), tmp_path / "rows.jsonl"
    rows = sample.sample(sample.Args(policy=policy, n=3, out=str(file)))
    assert rows == rows_of(file) and len(rows) == 3
    for row, of_both in zip(rows, rows_of(both.run("train_policy") / "comparison.jsonl"), strict=False):
        assert row == {name: x if isinstance(x, str) else pytest.approx(x, abs=1e-4) for name, x in of_both.items()}
    numbers = [f"{name} {number}" for name in ("base", "policy") for number in ("score", "gold", "log-prob")]
    assert all(set(row) == {"query", "base", "policy", *numbers, "kl"} for row in rows)
    capsys.readouterr()
    sample.sample(sample.Args(policy=policy, prompt=("Mara found a bell.",), temperature=0.5))
    assert "Mara found" in capsys.readouterr().out


def test_sample_without_the_reward_model_and_of_any_model(both, tiny_world, tmp_path, monkeypatch):
    """The base model as the policy differs from itself in nothing."""
    copy = both.copy(tmp_path / "copy")
    shutil.rmtree(only(copy.folder, "models/train_reward__*"))
    monkeypatch.chdir(copy.folder)
    policy = str(copy.model("policy"))
    without = sample.sample(sample.Args(policy=policy, n=2))
    assert "policy score" not in without[0] and "policy gold" in without[0]
    rows = sample.sample(sample.Args(policy=str(tiny_world / "model"), task_of=policy, n=2))
    assert [row["policy"] for row in rows] == [row["base"] for row in without] and not any(row["kl"] for row in rows)
