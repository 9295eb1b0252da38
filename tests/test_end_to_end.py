"""Each script through its command line, on a tiny world: what it leaves, two processes, resume, bad input."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.run
from processes import OFFLINE, SCRIPTS, launch
from runs import (
    both_arguments,
    meta_of,
    metrics_of,
    only,
    policy_arguments,
    rows_of,
    samples_of,
    world_arguments,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from ppo_rlhf import sample, train_both
from ppo_rlhf.lib import several_stages
from ppo_rlhf.tldr.models import load_reward_model


def run_script(name: str, *arguments: str, folder: Path, **options: str | bool) -> str:
    result = launch(name, *arguments, folder=folder, **options)
    assert result.status == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="session")
def both_run(tiny_world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which train_both ran, as one process."""
    folder = tmp_path_factory.mktemp("both")
    arguments = [*both_arguments(tiny_world), "--policy.trace_interval", "20"]
    stdout = run_script("train_both.py", *arguments, folder=folder, pictures=True)
    (folder / "stdout").write_text(stdout)
    return folder


def test_a_run_leaves_what_the_readme_says(both_run: Path) -> None:
    for kind, steps in (("reward", 5), ("policy", 4)):
        run = only(both_run, f"runs/train_{kind}__tales__1__*")
        meta = meta_of(run)
        assert meta["finished"] and meta["num_processes"] == 1 and meta["args"]["seed"] == 1
        assert meta["script"] == f"train_{kind}"
        assert str(both_run) not in json.dumps(meta)  # it may be moved, and shown
        assert [row["step"] for row in metrics_of(run)] == list(range(steps))
        assert len(list(run.glob("events.out.tfevents.*"))) == 1
        assert (run / "learning_curves.png").stat().st_size > 10_000
        checkpoints = sorted(path.name for path in (run / "checkpoints").iterdir())
        assert checkpoints == {"reward": ["4", "5"], "policy": ["2", "4"]}[kind]
    runs = [path.name for path in (both_run / "runs").iterdir()]
    assert len({name.rsplit("__", 1)[1] for name in runs}) == 1  # one time stamp
    assert {row["step"] for row in samples_of(run)} == {0, 1, 2, 3}
    assert "wall_time" in meta and meta["versions"]["torch"] == torch.__version__


def test_the_policy_opens_as_an_ordinary_language_model(both_run: Path, tiny_world: Path) -> None:
    folder = only(both_run, "models/train_policy__*/policy")
    before = AutoModelForCausalLM.from_pretrained(tiny_world / "model")
    after = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert after.get_input_embeddings().num_embeddings == len(tokenizer)
    assert all(
        not torch.equal(old, new)
        for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True)
        if "wpe" not in name
    )
    assert load_file(folder / "value_head.safetensors")["weight"].abs().max() > 0
    assert json.loads((folder / "ppo_rlhf.json").read_text())["reward_model"].startswith("models/train_reward__")


def test_the_reward_model_opens_as_a_classifier_with_the_same_scores(both_run: Path) -> None:
    folder = only(both_run, "models/train_reward__*/reward")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = ["Mara found a bell.", "All night there was joy and luck near the mill."]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    classifier = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        theirs = classifier(**batch).logits[:, 0]
        ours = load_reward_model(folder, torch.float32)(batch["input_ids"], classifier.config.pad_token_id)
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)


def test_the_summary_names_what_was_learned_and_where_it_lies(both_run: Path) -> None:
    stdout = (both_run / "stdout").read_text()
    for words in ("held-out comparisons", "perfect judge", "gold score", "nats per response", "minutes"):
        assert words in stdout
    for name in ("learning_curves.png", "comparison.jsonl", "/policy", "/reward"):
        assert name in stdout


def held_out_queries(policy_run: Path) -> list[str]:
    return [row["query"] for row in rows_of(policy_run / "comparison.jsonl")]


def test_the_summary_is_about_queries_that_were_held_out(both_run: Path, tiny_world: Path) -> None:
    """Each once, although it asks for more than there are."""
    stories = (tiny_world / "stories.txt").read_text().splitlines()
    queries = held_out_queries(only(both_run, "runs/train_policy__*"))
    assert len(queries) == len(set(queries)) == len(stories) // 50
    assert all(any(query in story for story in stories[49::50]) for query in queries)
    assert f"On {len(queries)} held-out queries, PPO took its score" in (both_run / "stdout").read_text()


def test_the_summary_of_one_held_out_query(both_run: Path, tiny_world: Path, tmp_path: Path, capsys) -> None:
    """Whose scores have no deviation."""
    shutil.copytree(both_run, tmp_path, dirs_exist_ok=True)
    stories = (tiny_world / "stories.txt").read_text().splitlines()[:60]
    (tmp_path / "few.txt").write_text("\n".join(stories))
    reward, policy = (only(tmp_path, f"models/train_{kind}__*/{kind}") for kind in ("reward", "policy"))
    info = json.loads((policy / "ppo_rlhf.json").read_text())
    info["task"]["query_dataset"] = str(tmp_path / "few.txt")
    (policy / "ppo_rlhf.json").write_text(json.dumps(info))
    stages = several_stages.Stages(train_both.Args(), "reward", "policy")
    stages.folders = {folder.name: tmp_path / "runs" / folder.parent.name for folder in (reward, policy)}
    train_both.report(stages, reward, policy, train_both.Args())
    (query,) = held_out_queries(only(tmp_path, "runs/train_policy__*"))
    assert query in stories[49]
    said = capsys.readouterr().out
    assert "On 1 held-out query, PPO took its score" in said and "standard deviations" not in said


def test_torchrun_with_two_processes_gives_the_run_of_one(both_run: Path, tiny_world: Path, tmp_path: Path) -> None:
    """The launcher itself; test_invariance.py has the ways to divide a batch."""
    command = ["--standalone", "--nproc_per_node", "2", str(SCRIPTS / "train_both.py"), *both_arguments(tiny_world)]
    result = launch(torch.distributed.run.__file__, *command, folder=tmp_path)
    assert result.status == 0, result.stdout + result.stderr
    for kind in ("reward", "policy"):
        one, two = only(both_run, f"runs/train_{kind}__*"), only(tmp_path, f"runs/train_{kind}__*")
        assert meta_of(two)["num_processes"] == 2
        for row_of_one, row_of_two in zip(metrics_of(one), metrics_of(two), strict=True):
            assert row_of_two == pytest.approx(row_of_one, rel=1e-4, abs=1e-6)
    for sample_of_one, sample_of_two in zip(samples_of(one), samples_of(two), strict=True):
        assert sample_of_two["response"] == sample_of_one["response"]


def test_bfloat16_with_rotary_positions(tiny_world: Path, tiny_models, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_world / "model")
    tiny_models("llama", len(tokenizer)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    dtypes = ["--reward.dtype", "bfloat16", "--policy.dtype", "bfloat16"]
    arguments = [*both_arguments(tiny_world), "--base_model", str(tmp_path / "base"), *dtypes]
    run_script("train_both.py", *arguments, folder=tmp_path)  # both parts sample
    for row in metrics_of(only(tmp_path, "runs/train_policy__*")):
        # The resolution of log-probs between -8 and -4.
        assert row["objective/sampler_gap"] < 2**-5 and row["ppo/val/first_ratio_gap"] < 2**-5
    run_script("sample.py", "--policy", str(only(tmp_path, "models/*/policy")), folder=tmp_path)


@pytest.fixture
def elsewhere(tiny_world: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Two folders: `there` with the files of a run, `here` with others of the same names."""
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there, here):
        shutil.copytree(tiny_world / "model", folder / "m")
    weights = load_file(here / "m" / "model.safetensors")
    save_file({k: 2 * v for k, v in weights.items()}, here / "m" / "model.safetensors", metadata={"format": "pt"})
    stories = (tiny_world / "stories.txt").read_text().splitlines()
    (there / "texts.txt").write_text("\n".join(line for story in stories for line in ("no stop here", story)))
    (here / "texts.txt").write_text("\n".join(reversed(stories)))
    return there, here


CHANGES_FOLDER = """
import os

def length(queries, responses):
    if os.path.exists("runs"):  # the run has begun
        os.makedirs("elsewhere")
        os.chdir("elsewhere")
    return [float(len(response)) for response in responses]
"""


def test_a_function_takes_the_place_of_the_reward_model(tiny_world: Path, tmp_path: Path) -> None:
    """Although it changes the current folder once the run has begun, the run is in one place."""
    (tmp_path / "mine.py").write_text(CHANGES_FOLDER)
    arguments = [*world_arguments(tiny_world), "--rewards.function", "mine:length", *policy_arguments()]
    arguments += ["--rewards.monitor", "mine:length", "--dtype", "bfloat16", "--track"]
    run_script("train_policy.py", *arguments, folder=tmp_path, pictures=True)
    assert (tmp_path / "elsewhere").exists() and not list((tmp_path / "elsewhere").iterdir())
    run = only(tmp_path, "runs/*")
    for row in metrics_of(run):
        assert row["objective/length"] == pytest.approx(row["objective/function_score"], rel=1e-5)
        assert row["objective/length"] > 10
        assert row["ppo/val/ratio"] == pytest.approx(1, abs=0.2)
    assert meta_of(run)["finished"] and samples_of(run) and list(run.glob("wandb/offline-run-*"))
    assert {path.name for path in run.iterdir()} >= {"checkpoints", "learning_curves.png", "metrics.csv"}
    assert only(tmp_path, "models/*/policy/model.safetensors")


def test_sample_prints_and_writes_a_comparison(both_run: Path) -> None:
    policy = str(only(both_run, "models/train_policy__*/policy"))
    sample = ("--policy", policy)
    run_script("sample.py", *sample, "--n", "3", "--out", "rows.jsonl", folder=both_run)
    rows = rows_of(both_run / "rows.jsonl")
    assert len(rows) == 3
    numbers = [f"{name} {number}" for name in ("base", "policy") for number in ("score", "gold", "log-prob")]
    columns = ("query", "base", "policy", *numbers, "kl")
    assert all(set(row) == set(columns) for row in rows)
    prompt = ("--prompt", "Mara found a bell.", "--temperature", "0.5")
    assert "Mara found" in run_script("sample.py", *sample, *prompt, folder=both_run)


def test_sample_without_the_reward_model_and_of_any_model(
    both_run: Path, tiny_world: Path, tmp_path: Path, monkeypatch
):
    """The base model as the policy differs from itself in nothing."""
    shutil.copytree(both_run / "models", tmp_path / "models")
    shutil.rmtree(only(tmp_path, "models/train_reward__*"))
    monkeypatch.chdir(tmp_path)
    policy = str(only(tmp_path, "models/train_policy__*/policy"))
    without = sample.sample(sample.Args(policy=policy, n=2))
    assert "policy score" not in without[0] and "policy gold" in without[0]
    rows = sample.sample(sample.Args(policy=str(tiny_world / "model"), task_of=policy, n=2))
    assert [row["policy"] for row in rows] == [row["base"] for row in without] and not any(row["kl"] for row in rows)


def test_sample_calls_a_users_monitor_by_its_name(both_run: Path, tmp_path: Path, monkeypatch) -> None:
    shutil.copytree(both_run, tmp_path, dirs_exist_ok=True)
    (tmp_path / "my_rewards.py").write_text("def words(queries, responses):\n    return [2.0] * len(responses)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    policy = only(tmp_path, "models/train_policy__*/policy")
    info = json.loads((policy / "ppo_rlhf.json").read_text()) | {"monitor": "my_rewards:words"}
    (policy / "ppo_rlhf.json").write_text(json.dumps(info))
    rows = sample.sample(sample.Args(policy=str(policy), n=2, trust_remote_code=True))
    assert all(row["base words"] == row["policy words"] == 2.0 and "base gold" not in row for row in rows)
    metas = (meta_of(only(tmp_path, f"runs/train_{kind}__*")) for kind in ("reward", "policy"))
    assert "The function words, which PPO never saw, went from +2.00 to +2.00." in train_both.summary(rows, *metas)


def test_a_run_that_diverges_stops_and_saves_nothing_more(tiny_world: Path, tmp_path: Path) -> None:
    sizes = "--ppo.total_episodes 64 --ppo.batch_size 16 --ppo.whiten_groups 2 --ppo.noptepochs 1 --save_interval 1"
    function = "--rewards.function ppo_rlhf.worlds.tales:sentiment.gold_scores --rewards.normalize_samples 16"
    function += " --ppo.lr 1000"
    arguments = [*world_arguments(tiny_world), *f"{sizes} {function}".split()]
    result = launch("train_policy.py", *arguments, folder=tmp_path)
    assert result.status == 2
    (line,) = [line for line in result.stderr.splitlines() if line.strip()]
    assert re.match(r"error: \S+ is (nan|inf|not finite)", line)
    assert not (tmp_path / "models").exists()
    for file in tmp_path.glob("runs/*/checkpoints/*/tensors.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(file).values())


def test_the_script_itself_ends_with_status_2(tiny_world: Path, tmp_path: Path) -> None:
    """In an ordinary process; test_refusals.py has the inputs."""
    command = [
        sys.executable,
        str(SCRIPTS / "train_policy.py"),
        *world_arguments(tiny_world),
        *("--rewards.function", "ppo_rlhf.worlds.tales:sentiment.gold_scores"),
        *("--ppo.batch_size", "63"),
    ]
    result = subprocess.run(command, cwd=tmp_path, env=os.environ | OFFLINE, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ppo.batch_size 63") and result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
