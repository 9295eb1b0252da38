"""One file is one program: copied into an empty folder, without ppo_rlhf, it runs as in the checkout.

The package is installed for the tests, so its import is blocked: by a sitecustomize.py in a Python of its own; and by
the same lines in forks of a server that has imported it already, which need no seconds to start.
"""

import ast
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import SCRIPTS, Result, launch, launch_together
from runs import check_close, metrics_of, only
from whole_runs import check_same_weights

BLOCKED = """
import os, signal, sys

class Blocked:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "ppo_rlhf":
            raise ModuleNotFoundError(f"{name} is blocked")

for name in [*sys.modules]:
    if name.partition(".")[0] == "ppo_rlhf":
        del sys.modules[name]
sys.meta_path.insert(0, Blocked)
"""
# Dies within its second checkpoint, of which each has two files.
DIES = """
fsync, calls = os.fsync, []

def fsync_or_die(file):
    calls.append(file)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(file)

os.fsync = fsync_or_die
"""
RUN = """
import runpy

sys.argv = sys.argv[1:]
sys.path[0] = ""
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# A function of the user's, which fails in the third update, after it has scored the samples for its scale.
OWN = """
import os

calls = []

def score(queries, responses):
    calls.append(responses)
    if os.environ.get("FAILS") == os.environ.get("RANK", "0") and len(calls) == 4:
        raise TimeoutError("no answer")
    return [float(response.count("e")) for response in responses]

def length(queries, responses):
    return list(map(len, responses))
"""
NUMBERS = random.Random(0)
SENTENCES = [
    "".join(NUMBERS.choices("abcdefghijklmnopqrstuvwxyz ", k=NUMBERS.randint(3, 7))) + "." for _ in range(600)
]
TEXTS = [" ".join(SENTENCES[i : i + 6]) for i in range(0, 600, 6)]
TASK = "--task.query_length 8 --task.response_length 8 --task.truncate_after 0"
POLICY = (
    f"{TASK} --ppo.batch_size 16 --ppo.total_episodes 64 --ppo.whiten_groups 2 --ppo.nminibatches 1 "
    "--ppo.noptepochs 2 --ppo.lr 1e-3 --save_interval 1 --log_interval 1 --trace_interval 2 "
    "--rewards.function own:score --rewards.monitor own:length --rewards.normalize_samples 8"
)
REWARD = (
    f"{TASK} --task.query_dataset texts.txt --num_train 24 --batch_size 8 --rollout_batch_size 16 "
    "--normalize_samples 16 --lr 1e-3 --save_interval 1"
)
BOTH = (
    f"{TASK} --task.query_dataset texts.jsonl --reward.num_train 24 --reward.batch_size 8 "
    "--reward.rollout_batch_size 16 --reward.normalize_samples 16 --reward.save_interval 1 "
    "--policy.ppo.batch_size 16 --policy.ppo.total_episodes 64 --policy.ppo.whiten_groups 2 "
    "--policy.save_interval 1 --reward.label_dataset"
)
PAIRS = [
    (TEXTS[i][:8], TEXTS[i][8:16], TEXTS[i][16:24], i % 2) for i in range(32)
]  # query, two samples, the better one


def ids(text: str) -> list[int]:
    """As the tiny tokenizer has them."""
    return ["abcdefghijklmnopqrstuvwxyz. ".index(letter) for letter in text]


LABELS = {
    "ids.json": [{"query": ids(q), "sample0": ids(a), "sample1": ids(b), "best": best} for q, a, b, best in PAIRS],
    "texts.json": [{"query": q, "sample0": a, "sample1": b, "best": best} for q, a, b, best in PAIRS],
    "preferences.json": [{"prompt": q, "chosen": a, "rejected": b} for q, a, b, _ in PAIRS],
    "ratings.json": [{"query": q, "sample": a, "score": len(a.split()) / 3} for q, a, _, _ in PAIRS],
    "differences.json": [
        {"query": q, "sample0": a, "sample1": b, "difference": best - 0.5} for q, a, b, best in PAIRS
    ],
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A small run of a script."""

    script: str
    neighbours: tuple[str, ...] = ()  # that it imports
    architecture: str = "gpt2"
    words: str


ROWS = {
    "policy of GPT-2": Row(script="train_policy.py", words=f"{POLICY} --task.query_dataset texts.txt"),
    "policy of GPT-NeoX": Row(
        script="train_policy.py", architecture="gpt_neox", words=f"{POLICY} --task.query_dataset texts.jsonl"
    ),
    "policy of Llama": Row(
        script="train_policy.py", architecture="llama", words=f"{POLICY} --task.query_dataset texts.txt"
    ),
    **{
        f"reward model of {name}": Row(script="train_reward.py", words=f"{REWARD} --label_dataset {name}")
        for name in LABELS
    },
    "both": Row(
        script="train_both.py",
        neighbours=("train_reward.py", "train_policy.py"),
        architecture="gpt_neox",
        words=f"{BOTH} texts.json",
    ),
}
FIRST_ROWS = {row.script: row for row in reversed(ROWS.values())}  # of each script


@pytest.fixture
def copied(tiny_models, tiny_tokenizer, tmp_path) -> Callable[..., Path]:
    """A function (row, name) -> a folder with copies of the scripts, and the files that the user has."""

    def make(row: Row, name: str = "alone") -> Path:
        folder = tmp_path / name
        tiny_models(row.architecture).save_pretrained(folder / "model")
        tiny_tokenizer.save_pretrained(folder / "model")
        (folder / "texts.txt").write_text("\n".join(TEXTS))
        (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
        for label_file, labels in LABELS.items():
            (folder / label_file).write_text(json.dumps(labels))
        (folder / "ids.meta.json").write_text(json.dumps({"vocab_size": len(tiny_tokenizer)}))
        (folder / "own.py").write_text(OWN)
        (folder / "blocked.py").write_text(BLOCKED + RUN)
        (folder / "dies.py").write_text(BLOCKED + DIES + RUN)
        for script in (row.script, *row.neighbours):
            shutil.copy(SCRIPTS / script, folder)
        return folder

    return make


def words_of(row: Row) -> list[str]:
    return ["--base_model", "model", *row.words.split()]


def alone(row: Row, folder: Path, *words: str, driver: str = "blocked.py", **environment: str) -> Result:
    return launch(folder / driver, row.script, *(words or words_of(row)), folder=folder, **environment)


def in_the_checkout(row: Row, folder: Path) -> Path:
    result = launch(row.script, *words_of(row), folder=folder)
    assert result.status == 0, result.stderr
    return folder


def check_same_runs(folder: Path, expected: Path) -> None:
    runs, expected_runs = (sorted(each.glob("runs/*/")) for each in (folder, expected))
    for run, expected_run in zip(runs, expected_runs, strict=True):
        assert metrics_of(run) == metrics_of(expected_run) and len(metrics_of(run)) > 2
        assert (run / "samples.jsonl").read_text() == (expected_run / "samples.jsonl").read_text()
    check_same_weights(folder, expected)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_script_alone_runs_as_in_the_checkout(row, copied):
    folder = copied(row)
    result = alone(row, folder)
    assert result.status == 0, result.stderr
    check_same_runs(folder, in_the_checkout(row, copied(row, "checkout")))


def own_python(row: Row, folder: Path, *words: str) -> Result:
    """In a Python of its own, as the user would run it."""
    (folder / "site" / "sitecustomize.py").parent.mkdir()
    (folder / "site" / "sitecustomize.py").write_text(BLOCKED)
    environment = os.environ | {"PYTHONPATH": str(folder / "site"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, row.script, *words_of(row), *words]
    ran = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, timeout=600)
    return Result(ran.returncode, ran.stdout, ran.stderr)


@pytest.mark.parametrize("row", FIRST_ROWS.values(), ids=FIRST_ROWS)
def test_a_script_alone_in_a_python_of_its_own(row, copied):
    folder = copied(row)
    result = own_python(row, folder)
    assert result.status == 0, result.stderr
    for run in folder.glob("runs/*/"):
        assert json.loads((run / "meta.json").read_text())["finished"]


@pytest.mark.parametrize("row", FIRST_ROWS.values(), ids=FIRST_ROWS)
def test_what_imports_the_package_fails_there(row, copied):
    """Else the other tests would prove nothing."""
    folder = copied(row)
    (folder / row.script).write_text("from ppo_rlhf import train_policy\n")
    assert "ModuleNotFoundError: ppo_rlhf is blocked" in alone(row, folder).stderr


@pytest.mark.parametrize("row", FIRST_ROWS.values(), ids=FIRST_ROWS)
def test_a_script_imports_nothing_of_ours_but_its_neighbours(row):
    ours = {path.stem for path in SCRIPTS.iterdir()} | {"ppo_rlhf", "benchmark", "tests"}
    imported = set()
    for node in ast.walk(ast.parse((SCRIPTS / row.script).read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level
            names = [alias.name for alias in node.names] if node.module == "ppo_rlhf" else [node.module]
            imported |= {name.partition(".")[0] for name in names}
    assert "torch" in imported and imported & ours <= {Path(name).stem for name in row.neighbours}


@pytest.mark.parametrize("row", FIRST_ROWS.values(), ids=FIRST_ROWS)
def test_a_script_that_is_killed_within_a_checkpoint_resumes(row, copied):
    folder = copied(row)
    assert alone(row, folder, driver="dies.py").status == -9
    run = only(folder, "runs/*/")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["1", "new.tmp"]
    result = alone(row, folder, "--resume", str(run))
    assert result.status == 0, result.stderr
    check_same_runs(folder, in_the_checkout(row, copied(row, "checkout")))


def test_a_function_that_fails_on_one_of_two_processes_costs_no_update(copied):
    """A run of two processes has the numbers of one."""
    row = FIRST_ROWS["train_policy.py"]
    folder, driver = copied(row), "blocked.py"
    words = [row.script, *words_of(row), "--save_interval", "0"]
    first, second = launch_together(2, folder / driver, *words, folder=folder, FAILS="1")
    run = only(folder, "runs/*")
    assert (first.status, second.status) == (2, 2), first.stderr + second.stderr
    line = first.stderr.splitlines()[-1]
    assert line.startswith(f"error: the function score: TimeoutError: no answer ({folder}/own.py:9)")
    assert line.endswith(f"resume after update 2 with --resume {run}") and "Traceback" not in first.stderr
    assert not second.stderr and len(metrics_of(run)) == 2
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["2"]
    for result in launch_together(2, folder / driver, row.script, "--resume", str(run), folder=folder):
        assert result.status == 0, result.stderr
    expected = in_the_checkout(row, copied(row, "checkout"))
    check_close(run, only(expected, "runs/*"), rel=1e-4, abs=1e-5)


MISTAKES = {
    "--ppo.lr 0": "--ppo.lr 0",
    "--ppo.lr inf": "--ppo.lr inf",
    "--seed -1": "--seed -1",
    "--base_model nowhere": "--base_model nowhere",
    "--task.query_dataset missing.txt": "--task.query_dataset missing.txt",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_users_mistake_ends_in_one_line(words, copied):
    row = FIRST_ROWS["train_policy.py"]
    folder = copied(row)
    result = alone(row, folder, *words_of(row), *words.split())
    (line,) = result.stderr.splitlines()
    assert result.status == 2 and line.startswith("error: ") and MISTAKES[words] in line
    assert not (folder / "runs").exists()
