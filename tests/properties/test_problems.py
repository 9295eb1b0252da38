"""rlvr/problems.py: rows of problems, prompts, answers, batches."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
import runs
import torch
from small_problems import GSM8K, TOKENIZER, byte_tokenizer, read, task
from transformers import GenerationConfig

from ppo_rlhf import train_policy
from ppo_rlhf.rlvr import problems
from ppo_rlhf.train_policy import InputError

DEFAULT = "<|im_start|>system\nBe good.<|im_end|>\n"
SUFFIX = ' Let\'s think step by step and output the final answer after "####".'


def written(folder: Path, rows: list, name: str = "problems_train.jsonl") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join((row if type(row) is str else json.dumps(row)) + "\n" for row in rows))
    return folder / name


def sums(count: int, **columns) -> list[dict]:
    return [{"question": f"{i}+{i}?", "answer": f"#### {2 * i}", **columns} for i in range(count)]


error_line = partial(runs.error_line, read)

# ---- Prompts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {},
            f"{DEFAULT}<|im_start|>user\nWhy?{SUFFIX}<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            {"system_prompt": "", "prompt_suffix": "!", "response_prefix": "<think>"},
            "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nWhy?!<|im_end|>\n<|im_start|>assistant\n<think>",
        ),
        ({"prompt_format": "plain", "prompt_suffix": "\n", "response_prefix": "<think>"}, "Why?\n<think>"),
    ],
)
def test_prompts(changes, expected):
    assert problems.render_prompt("Why?", task(**changes), TOKENIZER) == expected


def test_the_ids_of_a_chat_are_those_of_the_template():
    train = read(GSM8K)
    rows = [json.loads(line) for line in (GSM8K / "problems_train.jsonl").read_text().splitlines()]
    assert len(train) == len(rows) == 32
    for row, tokens, text in zip(rows, train.prompts, train.texts, strict=True):
        messages = [{"role": "user", "content": row["question"] + SUFFIX}]
        assert tokens == TOKENIZER.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert TOKENIZER.decode(tokens) == text


def test_a_plain_prompt_has_no_system_message():
    line = runs.error_line(problems.render_prompt, "Why?", task(prompt_format="plain", system_prompt=""), TOKENIZER)
    assert "--task.system_prompt" in line


# ---- Special tokens --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("eos", "expected"), [([258, 256], (256, 258)), (None, (258,))])
def test_stop_ids_are_the_tokenizer_s_and_the_model_s(eos, expected):
    ids = problems.task_ids(task(), TOKENIZER, GenerationConfig(eos_token_id=eos, pad_token_id=256))
    assert ids.stops == expected and ids.pad == ids.vocab_size == 259


def test_a_response_needs_something_that_ends_it():
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(InputError, match="ends a response"):
        problems.task_ids(task(), tokenizer)


# ---- Rows ------------------------------------------------------------------------------------------------------


def test_answers_are_the_numbers_behind_the_hashes():
    train, test = read(GSM8K), read(GSM8K, "test")
    assert train.answers[:4] == ["72", "10", "5", "42"] and test.answers[:4] == ["18", "3", "70000", "540"]
    assert (train.too_long, train.unscorable, len(test)) == (0, 0, 16)


@pytest.mark.parametrize(
    ("answer", "answer_format", "verifier", "expected"),
    [
        ("1,000+200=1,200\n#### 1,200", "hashes", "gsm8k_strict", "1200"),
        ("It is 5.", "hashes", "my_rewards:right", None),
        (r"It is \boxed{3}, no, \boxed{\frac{1}{2}}.", "boxed", "boxed", r"\frac{1}{2}"),
        (r"\boxed{}", "boxed", "boxed", None),
        (r"\frac{", "boxed", "boxed", None),
        (" by heart ", "whole", "boxed", "by heart"),
    ],
)
def test_what_a_response_must_say(tmp_path, answer, answer_format, verifier, expected):
    right = "7" if answer_format == "whole" else r"\boxed{7} #### 7"
    rows = [{"question": "Why?", "answer": answer}, {"question": "And?", "answer": right}]
    found = read(written(tmp_path, rows).parent, answer_format=answer_format, verifier=verifier)
    assert found.unscorable == (expected is None)
    assert found.answers == [expected] * (expected is not None) + ["7"]


def test_prompts_that_are_long_or_have_no_token_are_left_out_and_counted_and_never_cut(tmp_path):
    rows, plain = sums(4), {"prompt_format": "plain", "prompt_suffix": ""}
    rows[1]["question"], rows[3]["question"] = "x" * 30, ""
    found = read(written(tmp_path, rows).parent, **plain, prompt_length=29)
    assert (found.texts, found.answers) == (["0+0?", "2+2?"], ["0", "4"])
    assert (found.too_long, found.empty) == (1, 1)
    found = read(tmp_path, prompt_format="plain", prompt_suffix="\n", prompt_length=31)
    assert len(found) == 4 and found.too_long == found.empty == 0


def test_columns_may_have_other_names_and_kinds_are_told_apart(tmp_path):
    rows = [{"asked": "1+1?", "says": "#### 2", "level": level} for level in (1, "hard")]
    names = {"question_column": "asked", "answer_column": "says", "kind_column": "level"}
    found = read(written(tmp_path, rows).parent, **names)
    assert found.answers == ["2", "2"] and found.kinds == ["1", "hard"]
    assert "'question'" in error_line(tmp_path)


def test_of_a_single_file_every_50th_row_is_held_out(tmp_path):
    file = written(tmp_path, sums(120), "sums.jsonl")
    train, test = read(file), read(file, "test")
    assert test.answers == ["98", "198"] and len(train) == 118 and "98" not in train.answers
    other = str(written(tmp_path, sums(3), "other.jsonl"))
    assert len(read(file, test_problems=other)) == 120
    assert read(file, "test", test_problems=other).answers == ["0", "2", "4"]
    rows = sums(61)
    rows[60] = {"question": "60+60?"}  # the 60th of those that are trained on
    line = error_line(written(tmp_path, rows, "sums.jsonl"))
    assert f"--task.problems {file}, line 61: ValueError: it has nothing" in line


def test_a_limit_takes_the_first_rows(tmp_path):
    assert read(written(tmp_path, sums(9)).parent, limit=2).answers == ["0", "2"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([*sums(1), "", {"question": None, "answer": "#### 5"}], "line 3: ValueError: it has nothing under"),
        ([{"question": "Why?", "answer": "five"}], "none of its train rows can be used: 1 give no answer"),
    ],
)
def test_bad_rows_are_named(tmp_path, rows, words):
    line = error_line(written(tmp_path, rows).parent)
    assert line.startswith("--task.problems") and words in line


def test_an_unknown_source_is_named():
    line = error_line(Path("texts.txt"))
    assert "--task.problems texts.txt" in line and "gsm8k, sums" in line


def test_a_missing_split_is_named(tmp_path):
    assert "problems_test.jsonl" in error_line(written(tmp_path, sums(3)).parent, "test")
    file = written(tmp_path, sums(49), "sums.jsonl")
    line = error_line(file, "test")
    assert f"--task.problems {file} has 49 rows" in line and "--task.test_problems" in line
    assert "--task.test_problems nothing" in error_line(file, "test", test_problems="nothing")


def test_without_a_network_one_line_says_what_to_do(monkeypatch, tmp_path):
    def not_there(*arguments, **options):
        raise OSError("no network")

    monkeypatch.setattr(train_policy, "snapshot_download", not_there)
    line = error_line(Path("gsm8k"))
    assert line.startswith("--task.problems gsm8k") and "--preset sums" in line


# ---- Evaluation ------------------------------------------------------------------------------------------------


def test_standard_errors_are_those_of_the_run_s_own_verifier_over_problems():
    """Samples of one problem are alike, so they count as one: their means are 1, 1/2, 0 and 1."""
    held_out = problems.Problems(
        prompts=[[1]] * 4,
        texts="abcd",
        answers="wxyz",
        kinds=[""] * 4,
        messages=[],
        too_long=0,
        unscorable=0,
        empty=0,
    )

    def solved(*right: list[float]) -> problems.Solved:
        one = torch.ones(4)
        return problems.Solved(texts=["t"] * 4, lengths=one.long(), stopped=one, right=torch.tensor(right).double())

    greedy = solved([1, 1], [1, 1], [1, 0], [0, 0])
    samples = [solved([1, 0], [1, 0], [0, 0], [1, 0]), solved([1, 0], [0, 0], [0, 0], [1, 0])]
    means, _ = problems.evaluation(held_out, "kind", ["first", "second"], greedy, samples)
    assert (means["eval/first"], means["eval/second"], means["eval/mean@2"]) == (0.75, 0.5, 0.625)
    assert means["eval/standard_error"] == pytest.approx(math.sqrt(0.75 * 0.25 / 4))
    # Squares of the distances from 5/8: 9/64, 1/64, 25/64 and 9/64; their sum over 3 is the variance.
    assert means["eval/mean_standard_error"] == pytest.approx(math.sqrt(44 / 64 / 3 / 4))


# ---- Batches ---------------------------------------------------------------------------------------------------


def test_prompts_are_padded_on_the_left_to_the_longest_of_the_batch(tmp_path):
    rows = sums(12)
    found = read(written(tmp_path, rows).parent, prompt_format="plain", prompt_suffix="")
    batch = found.batch([9, 10, 0], pad_id=300)
    assert batch.shape == (3, 6)  # "10+10?" is one token for each byte
    assert (batch == 300).sum(1).tolist() == [2, 0, 2]
    assert found.batch([9, 0], pad_id=300).shape == (2, 4)
    for row, text in zip(batch, ("9+9?", "10+10?", "0+0?"), strict=True):
        assert TOKENIZER.decode(row[-len(text) :]) == text and (row[: 6 - len(text)] == 300).all()


def test_an_epoch_is_dealt_in_batches_and_shuffled_again():
    """7 problems, batches of 3: one is left out of each epoch."""
    batches = [problems.problems_of_batch(7, 3, number, seed=1) for number in range(8)]
    epochs = [torch.cat(batches[i : i + 2]).tolist() for i in range(0, 8, 2)]
    assert all(len(set(epoch)) == 6 and set(epoch) <= set(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    again = [problems.problems_of_batch(7, 3, number, seed=1) for number in (5, 0)]  # in any order, as after a resume
    assert torch.equal(again[0], batches[5]) and torch.equal(again[1], batches[0])
    assert any(not torch.equal(problems.problems_of_batch(7, 3, i, seed=2), batches[i]) for i in range(3))


def test_the_suffix_of_gsm8k_is_that_of_the_published_runs():
    assert problems.TASKS["gsm8k"].prompt_suffix == SUFFIX
    assert (problems.TASKS["gsm8k"].prompt_length, problems.TASKS["gsm8k"].response_length) == (1024, 512)
