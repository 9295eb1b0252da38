"""Problems as other projects keep them, answers that no verifier can represent, and reasoning-gym's generators."""

import csv
import dataclasses
import json
import sys
from decimal import Decimal
from pathlib import Path

import pyarrow
import pytest
import torch
from pyarrow import parquet
from test_problems import TOKENIZER, byte_tokenizer

from ppo_rlhf import worlds
from ppo_rlhf.lib import rewards
from ppo_rlhf.lib.base.errors import InputError
from ppo_rlhf.lib.data import problem_rows, problems

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2+2?"}],
    "reward_model": {"ground_truth": "4", "style": "rule"},
}
SYSTEM = {"role": "system", "content": "Be brief."}


def read(path: Path | str, split: str = "train", verifier: str = "gsm8k_strict", **changes) -> problems.Problems:
    task = dataclasses.replace(
        problems.TaskArgs(problems=str(path), prompt_suffix="", prompt_format="plain"), **changes
    )
    return problems.read_problems(task, TOKENIZER, split, verifier=verifier)


def written(path: Path, rows: list[dict]) -> Path:
    """The rows in the form that the name asks for."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, default=float) + "\n" for row in rows))  # default: of a Decimal
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0]])
            writer.writeheader()
            writer.writerows(rows)
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize(
    "row",
    [
        {"question": "2+2?", "answer": "so #### 4"},
        {"question": "2+2?", "answer": 4},
        {"question": "2+2?", "answer": 4.0},
        {"problem": "2+2?", "solution": "#### 4"},
        {"prompt": "2+2?", "completion": " 2 and 2\n#### 4"},
        {"prompt": [{"role": "user", "content": "2+2?"}], "completion": [{"role": "assistant", "content": "#### 4"}]},
        VERL,
        {"question": "2+2?", "reward_model": json.dumps({"ground_truth": ["4"]})},
        {"question": "2+2?", "answer": Decimal("4.00")},
        {
            "prompt": [{"role": "user", "content": [{"type": "text", "text": text} for text in ("2+", "2?")]}],
            "answer": 4,
        },
    ],
    ids=["GSM8K", "integer", "float", "MATH", "TRL", "TRL, messages", "verl", "verl, as JSON", "decimal", "parts"],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_forms_of_a_row(tmp_path, row, suffix):
    found = read(written(tmp_path / f"rows{suffix}", [row]), test_problems="other.jsonl")
    assert (found.texts, found.answers, found.unscorable) == (["2+2?"], ["4"], 0)


@pytest.mark.parametrize(("number", "text"), [("1.50", "1.5"), ("1E+2", "100"), ("-0.25", "-0.25"), ("1000", "1000")])
def test_a_decimal_is_written_as_a_number_is(number, text):
    assert problem_rows.as_text(Decimal(number), "x") == text


def test_csv_holds_texts_and_a_file_holds_rows_out(tmp_path):
    path = written(tmp_path / "rows.csv", [{"question": f'{i}, "x"\n+0?', "answer": i} for i in range(100)])
    train, test = read(path), read(path, "test")
    assert len(train) == 98 and test.answers == ["49", "99"] and test.texts[0] == '49, "x"\n+0?'


def test_other_columns_are_named_with_dots(tmp_path):
    row = {"a": {"b": {"c": "2+2?"}}, "d.e": 4}
    path = written(tmp_path / "rows.jsonl", [row])
    found = read(path, question_column="a.b.c", answer_column="d.e", test_problems="other.jsonl")
    assert (found.texts, found.answers) == (["2+2?"], ["4"])


def test_a_conversation_is_rendered_with_its_system_message(tmp_path):
    turns = [
        SYSTEM,
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "+2?"},
    ]
    path = written(tmp_path / "rows.jsonl", [{"prompt": turns, "answer": 4}])
    chat = {
        "prompt_format": "chat",
        "prompt_suffix": " Say.",
        "test_problems": "x.jsonl",
        "system_prompt": "Be kind.",
    }
    (text,) = read(path, **chat).texts
    expected = [*turns[:3], {"role": "user", "content": "+2? Say."}]
    assert text == byte_tokenizer().apply_chat_template(expected, tokenize=False, add_generation_prompt=True)
    assert "Be kind." not in text and text.index("Be brief.") < text.index("2?") < text.index("+2? Say.")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "a"}, r"rows\.jsonl, line 1 has nothing under 'answer'; it has 'question'"),
        ({"prompt": [SYSTEM], "answer": "4"}, "the last message is the system's; it must be the user's"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "2?"}]}]},
            "line 1, 'prompt', a message's content, must be a text or a number; it is .*image",
        ),
    ],
)
def test_what_is_no_problem_ends_in_one_line(tmp_path, row, message):
    with pytest.raises(InputError, match=message) as raised:
        read(written(tmp_path / "rows.jsonl", [row]), test_problems="other.jsonl")
    assert "\n" not in str(raised.value) and str(raised.value).startswith("--task.problems ")


def test_a_file_that_is_another(tmp_path):
    (tmp_path / "rows.parquet").write_text("no")
    with pytest.raises(InputError, match=r"rows\.parquet: cannot be read"):
        read(tmp_path / "rows.parquet")
    with pytest.raises(InputError, match=r"rows\.txt: unknown; .* files: \.jsonl, \.parquet, \.csv"):
        read(tmp_path / "rows.txt")


CUT = ["3/4", "12:30", "2024-05-01", "50%", "2 1/2", "10-15", "1e6", "7 and 8", "1,2", "5 or 6", "1.234.567"]


def test_golds_that_are_no_number_are_left_out_and_named(tmp_path):
    """What was cut to its first number before: `#### 3/4` trained on 3."""
    rows = [{"question": "a", "answer": f"####{gold}"} for gold in [*CUT, "72", " 1,000", " -3"]]
    found = read(written(tmp_path / "rows.jsonl", rows), test_problems="other.jsonl")
    assert found.answers == ["72", "1000", "-3"] and found.unscorable == len(CUT) and found.refused == CUT
    said, _ = problems.doubts(found, "train", "gsm8k_strict")
    assert said == (
        "11 of 14 problems to train on are left out, because --rewards.verifier gsm8k_strict accepts no response to "
        "them (such as '3/4', '12:30', '2024-05-01')"
    )
    with pytest.raises(InputError, match=r"hashes .*\(such as '3/4', '12:30', '2024-05-01'\)"):
        read(written(tmp_path / "none.jsonl", rows[:11]), test_problems="other.jsonl")


# ---- The audit -------------------------------------------------------------------------------------------------


def test_the_audit_names_what_a_verifier_takes_for_another(monkeypatch):
    monkeypatch.setitem(rewards.VERIFIERS, "exact", lambda response, answer: float(response[:1] == answer[:1]))
    assert rewards.audit("exact", ["01", "12", "13", "2"]) == {
        "0": ["01"],
        "an empty answer": [],
        "another problem's answer": ["12 takes 13", "13 takes 12"],
    }
    assert problems.audit_line("exact", ["01", "12", "13", "2"]) == (
        "--rewards.verifier exact, of 4 answers: 1 accept 0 (such as 01), 0 accept an empty answer, "
        "2 accept another problem's answer (such as 12 takes 13)"
    )


@pytest.mark.parametrize("verifier", ["gsm8k_strict", "exact", "answer_line", "boxed"])
def test_the_audit_of_our_verifiers_finds_nothing_in_numbers(verifier):
    assert not any(rewards.audit(verifier, ["72", "1000", "-3", "0", "0.5"]).values())


def test_functions_and_formats_have_no_audit():
    assert problems.audit_line("mine:function", ["1"]) == problems.audit_line("think_answer", ["1"]) == ""


# ---- reasoning-gym ---------------------------------------------------------------------------------------------


@pytest.fixture
def gym():
    pytest.importorskip("reasoning_gym", reason="it is the extra `gym`")
    problem_rows.generate.cache_clear()


def test_a_generator_that_fails_on_a_response_gives_it_nothing():
    """But one that fails on its own answer, too, has no problem that can be used."""

    def score(answer: str) -> float:
        return {"42": 1.0}[answer]

    gold, unreadable = rewards.Gold("42"), rewards.Gold("43")
    gold.score = unreadable.score = score
    assert (rewards.reasoning_gym("42", gold), rewards.reasoning_gym("(", gold)) == (1.0, 0.0)
    assert rewards.can_be_right("reasoning_gym", gold) and not rewards.can_be_right("reasoning_gym", unreadable)


SPELL = "reasoning_gym:spell_backward,size=600,max_word_len=3,min_word_len=3"


def test_a_generator_s_held_out_problems_are_not_trained_on(gym):
    """There are few words of three letters, so both parts would share many."""
    kinds = {"verifier": "reasoning_gym"}
    train, held_out = read(SPELL, **kinds), read(SPELL, "test", **kinds)
    assert 0 < len(train) < 600 and 0 < len(held_out) <= problem_rows.HELD_OUT
    assert not {*train.texts} & {*held_out.texts}
    problem_rows.generate.cache_clear()
    assert read(SPELL, **kinds).texts == train.texts
    assert read(f"{SPELL},seed=1", **kinds).texts != train.texts
    word = train.texts[0].rpartition(": ")[2]
    assert train.answers[0] == word[::-1]


def test_the_generator_s_own_scores(gym):
    found = read("reasoning_gym:spell_backward,size=5,seed=3", verifier="reasoning_gym")
    score = rewards.load_verifier("reasoning_gym", "rewards.verifier")
    gold = found.answers[0]
    said = [gold, f"<think>a</think><answer>{gold}</answer>", "x" * len(gold), ""]
    values = torch.tensor(score([""] * 4, said, [gold] * 4))
    assert values[0] == values[1] == 1 and (values[2:] < 1).all()
    assert rewards.is_right(values, "reasoning_gym").tolist() == [True, True, False, False]
    assert rewards.is_right(torch.tensor([0.3, 0.0]), "gsm8k_strict").tolist() == [True, False]


def test_answers_that_only_the_generator_can_judge(gym):
    """Many expressions solve a countdown; its gold is one of them."""
    found = read("reasoning_gym:countdown,size=3,seed=1", verifier="reasoning_gym")
    gold = found.answers[0]
    assert rewards.reasoning_gym(f"({gold})", gold) == 1.0
    assert rewards.reasoning_gym("no expression (", gold) < 1
    assert rewards.reasoning_gym("<think></think><answer></answer>", gold) == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reasoning_gym:spell_backwards", "reasoning-gym has no spell_backwards; it has spell_backward"),
        ("reasoning_gym:spell_backward,size=0", "makes no problem that is not held out"),
        ("reasoning_gym:spell_backward,length=3", "refuses these settings: .*length"),
        ("reasoning_gym:spell_backward,size", "write <setting>=<value>"),
    ],
)
def test_a_generator_that_is_not_there(gym, tmp_path, name, message):
    with pytest.raises(InputError, match=message) as raised:
        worlds.check_name("task.problems", name, tmp_path)
    assert "\n" not in str(raised.value)


def test_without_the_package_a_line_names_the_extra(monkeypatch):
    problem_rows.generate.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(InputError, match=r"needs the extra `gym`: pip install -e '\.\[gym\]'"):
        problem_rows.check_name("reasoning_gym:countdown", "problems")


def test_names_of_the_hub_and_paths():
    kinds = {"openai/gsm8k": True, "owner/name:main": True, "sums": False, "a/b/c": False, "data/rows.jsonl": False}
    assert {name: problem_rows.is_elsewhere(name) for name in kinds} == kinds
