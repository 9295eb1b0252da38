"""Problems as other projects keep them, answers that no verifier can represent, and reasoning-gym's generators."""

import dataclasses
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow
import pytest
import small_problems
import torch
from pyarrow import parquet
from runs import error_line, write_rows
from small_problems import byte_tokenizer

from ppo_rlhf.rlvr import arguments as rlvr_arguments, problem_rows, problems, rewards
from ppo_rlhf.rlvr.confined_worker import Worker
from ppo_rlhf.tldr import data_files
from ppo_rlhf.train_policy import InputError

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2+2?"}],
    "reward_model": {"ground_truth": "4", "style": "rule"},
}
read = partial(small_problems.read, prompt_suffix="", prompt_format="plain")
SYSTEM = {"role": "system", "content": "Be brief."}


def written(path: Path, rows: list[dict]) -> Path:
    """The rows in the form that the name asks for."""
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        write_rows(path, *rows)
    return path


@pytest.mark.parametrize(
    "row",
    [
        {"question": "2+2?", "answer": 4},
        {"problem": "2+2?", "solution": "#### 4"},
        {"prompt": "2+2?", "completion": " 2 and 2\n#### 4"},
        {"prompt": [{"role": "user", "content": "2+2?"}], "completion": [{"role": "assistant", "content": "#### 4"}]},
        VERL,
    ],
    ids=["integer", "MATH", "TRL", "TRL, messages", "verl"],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_forms_of_a_row(tmp_path, row, suffix):
    found = read(written(tmp_path / f"rows{suffix}", [row]), test_problems="other.jsonl")
    assert (found.texts, found.answers, found.unscorable) == (["2+2?"], ["4"], 0)


def test_csv_holds_texts(tmp_path):
    (tmp_path / "rows.csv").write_text('question,answer\n"49, ""x""\n+0?",49\n')
    found = read(tmp_path / "rows.csv", test_problems="other.jsonl")
    assert (found.texts, found.answers) == (['49, "x"\n+0?'], ["49"])


def test_other_columns_are_named_with_dots(tmp_path):
    row = {"a": {"b": {"c": "2+2?"}}, "d.e": 4}
    path = written(tmp_path / "rows.jsonl", [row])
    found = read(path, question_column="a.b.c", answer_column="d.e", test_problems="other.jsonl")
    assert (found.texts, found.answers) == (["2+2?"], ["4"])


def test_a_conversation_is_rendered_with_its_system_message(tmp_path):
    user, assistant = {"role": "user", "content": "2?"}, {"role": "assistant", "content": "2"}
    row = {"prompt": [SYSTEM, user, assistant, {"role": "user", "content": "+2?"}], "answer": 4}
    chat = {"prompt_format": "chat", "prompt_suffix": " Say.", "system_prompt": "Be kind."}
    (text,) = read(written(tmp_path / "rows.jsonl", [row]), **chat, test_problems="other.jsonl").texts
    expected = [SYSTEM, user, assistant, {"role": "user", "content": "+2? Say."}]
    assert text == byte_tokenizer().apply_chat_template(expected, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "a"}, r"rows\.jsonl, line 1: ValueError: it has nothing under 'answer', but 'question'"),
        ({"prompt": [SYSTEM], "answer": "4"}, "the last message is the system's; it must be the user's"),
        ({"prompt": ["2?"]}, "line 1: TypeError: "),
    ],
)
def test_what_is_no_problem_ends_in_one_line(tmp_path, row, message):
    line = error_line(read, written(tmp_path / "rows.jsonl", [row]), test_problems="other.jsonl")
    assert re.match(f"--task.problems .*{message}", line)


@pytest.mark.parametrize("gold", [{"target": 98, "numbers": [44, 19, 35]}, ["1", "-2"], True])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_function_reads_golds_that_are_objects_or_lists_as_json(tmp_path, gold, suffix):
    """Whatever --task.answer_format says. All columns are kept, and that of the answer holds the answer."""
    rows = [VERL | {"reward_model": {"ground_truth": gold}}] * 50
    path = written(tmp_path / f"rows{suffix}", rows)
    for answer_format in ("hashes", "boxed", "whole"):
        found = read(path, verifier="my:function", answer_format=answer_format)
        assert json.loads(found.answers[0]) == gold and found.rows[0] == rows[0]
    with pytest.raises(InputError, match=r"'reward_model.ground_truth' must .* --rewards.verifier package.module"):
        read(path, verifier="boxed")
    row = {"question": "2+2?", "answer": "2+2\n#### 4"}
    found = read(written(tmp_path / "other.jsonl", [row]), verifier="my:function", test_problems="x.jsonl")
    assert found.rows == [{"question": "2+2?", "answer": "4"}]


CUT = ["3/4", "12:30", "2 1/2", "10-15", "7 and 8", "1,2"]


def test_golds_that_are_no_number_are_left_out_and_counted(tmp_path):
    """What was cut to its first number before: `#### 3/4` trained on 3."""
    rows = [{"question": "a", "answer": f"####{gold}"} for gold in [*CUT, "72", " 1,000", " -3"]]
    found = read(written(tmp_path / "rows.jsonl", rows), test_problems="other.jsonl")
    assert found.answers == ["72", "1000", "-3"] and found.unscorable == len(CUT)


# ---- reasoning-gym ---------------------------------------------------------------------------------------------


# In place of the library: sums of two numbers, whose scorers evaluate an answer. `countdown` is known to do so.
LIBRARY = """
import random
class Sums:
    def __init__(self, size, seed, most=99, broken_from=10**6):
        self.seed, self.most, self.broken_from = seed, most, broken_from
        assert most > 9, "most must be above 9"
        self.size = size
    def __len__(self): return self.size
    def __getitem__(self, number):
        assert number < self.broken_from, "no more"
        draw = random.Random(self.seed + number)
        a, b = (draw.randint(0, self.most) for _ in range(2))
        return {"question": f"{a}+{b}?", "answer": f"{a}+{b}", "metadata": {("sum", 0): a + b}}
    def score_answer(self, answer, entry):
        return 1.0 if eval(answer) == entry["metadata"]["sum", 0] else 0.05
def create_dataset(name, **config):
    return Sums(**config)
"""


@pytest.fixture
def workers(tmp_path, monkeypatch) -> Iterator[list[str]]:
    """Fresh processes that make and score, and an empty cache; what they are asked."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    asked, ask = [], Worker.ask
    monkeypatch.setattr(Worker, "ask", lambda self, *request: asked.append(request[0]) or ask(self, *request))
    found = {"MAKER": 60, "SCORER": 2}  # seconds of processor time
    for name, computing in found.items():
        found[name] = Worker("ppo_rlhf.rlvr.reasoning_gym_calls:call", computing=computing, seconds=600)
        monkeypatch.setattr(problem_rows, name, found[name])
    yield asked
    for worker in found.values():
        worker.close()


@pytest.fixture
def library(workers, tmp_path, monkeypatch) -> list[str]:
    """A stand-in for reasoning-gym."""
    (tmp_path / "reasoning_gym").mkdir()
    (tmp_path / "reasoning_gym/__init__.py").write_text(LIBRARY)
    (tmp_path / "reasoning_gym/factory.py").write_text("DATASETS = ['countdown', 'sums']")
    (tmp_path / "reasoning_gym-0.1.dist-info").mkdir()
    (tmp_path / "reasoning_gym-0.1.dist-info/METADATA").write_text("Name: reasoning-gym\nVersion: 0.1\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return workers


SUMS = "reasoning_gym:sums,size=30,most=20"


def test_problems_are_made_once_and_those_held_out_are_not_trained_on(library, tmp_path):
    """Once for a version of the library."""
    train, test = (read(SUMS, split, verifier="reasoning_gym") for split in ("train", "test"))
    assert library == ["describe"] + ["make"] * 530 + ["describe"]
    assert 0 < len(train) < 30 and len(test) == len({*test.texts}) and not {*train.texts} & {*test.texts}
    assert len(train) + len(test) > 300  # of 441 sums
    (tmp_path / "reasoning_gym-0.1.dist-info/METADATA").write_text("Name: reasoning-gym\nVersion: 0.2\n")
    problem_rows.MAKER.close()
    library.clear()
    read(SUMS, verifier="exact")
    assert library == ["describe"] + ["make"] * 530


def test_what_fails_while_it_is_made_ends_in_one_line(library):
    with pytest.raises(InputError, match=r"^--task\.problems reasoning_gym:.*says: AssertionError: no more; write"):
        read("reasoning_gym:sums,broken_from=20")


def test_a_response_that_attacks_its_scorer_gets_nothing(library, tmp_path):
    """And the run goes on."""
    for task in ("sums", "countdown"):
        gold = read(f"reasoning_gym:{task},size=5", verifier="reasoning_gym").answers[0]
        attacks = (
            f"__import__('os').mkdir('{tmp_path}/{task}')",
            "__import__('os')._exit(0)",
            "2**(2**40)",
        )
        assert rewards.reasoning_gym(f"({gold})", gold) == rewards.reasoning_gym(gold, gold) == 1.0
        for attack in attacks:
            assert rewards.reasoning_gym(attack, gold) in (0.0, 0.05)
    assert (tmp_path / "sums").exists(), "the attack would work where nothing is known of a scorer"
    assert not (tmp_path / "countdown").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("exp(x)*asin(x)/sqrt(2.5) - log(x)", True),
        ("_ Q _\nQ _ _", True),
        ("[[1, 0], [0, 1]]", True),
        ("x.y", False),
        ("__import__", False),
        ("eval(x)", False),
        ('S("x")', False),
        ("f`x`", False),
        ("[x for x in y]", False),
        ("\N{FULLWIDTH LATIN SMALL LETTER X}", False),
        ("\\", False),
    ],
)
def test_what_is_arithmetic(text, expected):
    assert bool(problem_rows.ARITHMETIC.fullmatch(text)) is expected


@pytest.mark.parametrize("name", ["problems", "test_problems"])
def test_a_task_that_evaluates_text_needs_a_flag(name):
    task = dataclasses.replace(problems.TaskArgs(), **{name: "reasoning_gym:countdown,size=9"})

    def check(**changes) -> None:
        shaping = dataclasses.replace(rlvr_arguments.RewardsArgs(), **changes)
        preset = rlvr_arguments.PRESETS["gsm8k"]
        rlvr_arguments.check_arguments(dataclasses.replace(preset, task=task, rewards=shaping))

    for judge in ("verifier", "format"):
        with pytest.raises(InputError, match=r"^--task\.\w+ reasoning_gym:countdown,size=9: .*evaluate_text$"):
            check(**{judge: "reasoning_gym"})
        check(**{judge: "reasoning_gym"}, evaluate_text=True)
    check(verifier="exact")


def test_the_generator_s_own_scores(workers):
    """Less than 1 is a share for what is nearly correct."""
    pytest.importorskip("reasoning_gym", reason="it is the extra `gym`")
    found = read("reasoning_gym:spell_backward,size=5,seed=3", verifier="reasoning_gym")
    score = rewards.load_verifier("reasoning_gym", "rewards.verifier")
    gold = found.answers[0]
    said = [gold, f"<think>a</think><answer>{gold}</answer>", "x" * len(gold), ""]
    values = torch.tensor(score([""] * 4, said, [gold] * 4))
    assert values[0] == values[1] == 1 and (values[2:] < 1).all()
    assert rewards.is_right(values, "reasoning_gym").tolist() == [True, True, False, False]
    assert rewards.is_right(torch.tensor([0.3, 0.0]), "gsm8k_strict").tolist() == [True, False]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reasoning_gym:sum", "there is no sum, but sums"),
        ("reasoning_gym:sums,most=1", "says: AssertionError: most must be above 9; write"),
        ("reasoning_gym:sums,size", "; write reasoning_gym:<task>,<setting>=<value>"),
    ],
)
def test_a_generator_that_is_not_there(library, name, message):
    assert message in error_line(read, name)
    assert library == ["describe"]  # the first of all requests fails


def test_without_the_package_a_line_names_the_extra(library, tmp_path):
    (tmp_path / "reasoning_gym/__init__.py").write_text("raise ImportError('No module named reasoning_gym')")
    with pytest.raises(InputError, match=r"needs the extra `gym`: pip install -e '\.\[gym\]'"):
        read("reasoning_gym:countdown")


def test_names_of_the_hub_and_paths():
    kinds = {"openai/gsm8k": True, "owner/name:main": True, "sums": False, "a/b/c": False, "data/rows.jsonl": False}
    assert {name: data_files.is_on_hub(name) for name in kinds} == kinds
