"""rlvr/rewards.py, the verifiers of chapter 3: numbers, boxes, formats, functions of texts, overlong responses."""

import json
import lzma
import math
import signal
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
import torch
from golden_models import golden, load_json
from hypothesis import given, settings, strategies as st
from runs import error_line

from ppo_rlhf import judge
from ppo_rlhf.rlvr import problem_rows, problems, rewards
from ppo_rlhf.rlvr.confined_worker import SLOW, Worker
from ppo_rlhf.tldr import reward_functions
from ppo_rlhf.train_policy import InputError

TABLES = load_json("verl/scorers")

# ---- Numbers ---------------------------------------------------------------------------------------------------


# In verl, marks of bold text are part of the answer, and a space must follow the hashes.
OTHERWISE = ("#### **72**", "####72")


@pytest.mark.parametrize("row", TABLES["gsm8k"], ids=lambda row: row["response"][:20])
def test_the_table_of_scorers(row):
    given = row["response"], row["answer"]
    assert rewards.gsm8k_strict(*given) == (row["strict"] if row["response"] not in OTHERWISE else 1)
    assert rewards.gsm8k_flexible(*given) == row["flexible"]


@pytest.mark.parametrize(("split", "rows"), [("train", 7473), ("test", 1319)])
def test_all_reference_solutions_of_gsm8k_are_right(split, rows):
    """By the part behind the hashes, which is split off here, and not by a pattern."""
    solutions = json.loads(lzma.decompress(golden(f"gsm8k/solutions_{split}.json.xz").read_bytes()))
    assert len(solutions) == rows
    for solution in solutions:
        _, _, answer = solution.rpartition("#### ")
        assert rewards.hashed_number(solution) == answer.replace(",", "")
        assert rewards.gsm8k_strict(solution, answer.replace(",", "")) == 1
        assert rewards.gsm8k_flexible(solution, answer) == 1
        assert rewards.gsm8k_strict(solution, f"{int(answer.replace(',', '')) + 1}") == 0


# ---- Boxes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", TABLES["boxed"], ids=lambda row: row["response"])
def test_the_table_of_boxes(row):
    """The original compares texts, and so misses the comma of 1,234."""
    expected = 1 if row["response"] == r"\boxed{1,234}" else row["verl_math_reward"]
    assert rewards.boxed(row["response"], row["answer"]) == expected


def test_a_number_may_have_more_digits_than_python_reads_by_itself():
    number = "7" * 5_000
    assert rewards.boxed(rf"\boxed{{{number}}}", number) == 1
    assert rewards.boxed(rf"\boxed{{{number}8}}", number) == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no box", None),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{\frac{1}{2}} {", r"\frac{1}{2}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\{1\}", None),  # a brace behind a backslash opens and closes nothing
        (r"\boxed{\} 1}", r"\} 1"),
        (r"\\boxed{4}", "4"),  # as JSON has it
        (r"\boxed{1}\boxed{2}", "2"),
        (r"$\boxed \frac{1}{2}$.", r"\frac{1}{2}"),
        (r"\boxed5 {\boxed7}", "7"),
        (r"\boxed{5}, which I \boxed as asked", "5"),  # a box with braces goes first
        (r"\boxed{1} and \fbox{2}", "2"),
    ],
)
def test_the_last_box(text, expected):
    assert rewards.last_boxed(text) == expected


def test_a_great_many_boxes_have_a_content():
    assert rewards.last_boxed(r"\boxed{" * 5_000 + "}" * 5_000) == ""
    assert rewards.last_boxed(r"\boxed{" * 20_000) is None
    assert rewards.last_boxed(r"\boxed a{" * 20_000) == "a"


# What a policy that has collapsed repeats.
REPEATED = [*"\\{}([#$.,7x \n\xb2\u2212", "\u0301\u0327"]
REPEATED += ["1 ", "1,", "1.", "1:", "1/2", "1,111", "1e", "0x", r"\,", r",\!"]
REPEATED += [r"\$", r"\quad", r"\text{", r"\boxed", r"\boxed{", r"\boxed{}", r"\boxed a{", "####", "#### "]
REPEATED += ["<think>", "<answer>", "</answer>"]
READERS = [rewards.gsm8k_strict, rewards.gsm8k_flexible, rewards.boxed, rewards.exact, rewards.think_answer]
READERS += [lambda response, answer: judge.parse_verdict(response)]
READERS += [lambda response, answer: problem_rows.ARITHMETIC.fullmatch(response)]
LETTERS, SECONDS = 100_000, 5  # a linear pattern takes up to 0.2 seconds, a quadratic one 20


@pytest.mark.parametrize("repeated", REPEATED)
def test_long_texts_are_read_in_linear_time(repeated, monkeypatch):
    """Processor time is limited, which does not depend on what else the machine does."""
    monkeypatch.setattr(rewards, "same_mathematics", lambda gold, content: False)
    if repeated.isascii():
        monkeypatch.setattr(rewards, "LONGEST", math.inf)  # only unicodedata.normalize needs the limit

    def stop(*_):
        raise AssertionError("it takes too long")

    before = signal.signal(signal.SIGVTALRM, stop)
    row = repeated * (LETTERS // len(repeated))
    try:
        for text in (f"{row}boxed", rf"\boxed{{5{row}x}}", rf"\boxed{row}{{5}}", f"#### {row}<answer>"):
            for reader in READERS:
                signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
                reader(text, "12:30")
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


EQUAL = "ppo_rlhf.rlvr.math_verify_calls:equal"


def test_what_takes_too_long_is_wrong_and_the_next_is_read_again():
    library = Worker(EQUAL, computing=2, seconds=600)
    assert library.ask("5", "9^{9^{9^{9}}}") == (None, SLOW)
    assert library.ask("5", "2+3") == (True, "") and library.ask("5", "6") == (False, "")
    library.close()


def test_without_the_library_one_line_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise ImportError('No module named math_verify')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(rewards, "MATHEMATICS", Worker(EQUAL, computing=5, seconds=600))
    line = error_line(rewards.boxed, r"\boxed{3}", "3+0+0+0+0")
    assert line.startswith("boxed answers need math-verify: pip install -e '.[math]': ImportError: ")
    assert line.endswith("No module named math_verify")
    with pytest.raises(InputError, match="boxed answers need math-verify"):
        rewards.load_verifier("boxed", "rewards.verifier", trial=(["p"] * 2, ["a word"] * 2, []))


CASES = (Path(__file__).parent / "verifier_cases.jsonl").read_text().splitlines()


@pytest.mark.parametrize(("verifier", "response", "answer", "expected"), [json.loads(line) for line in CASES])
def test_verdicts(verifier, response, answer, expected):
    """Most are reports about verl, TRL and math-verify: wrong answers that count, and correct ones that don't."""
    assert rewards.VERIFIERS[verifier](response, answer) == expected


@pytest.mark.parametrize(("verifier", "form"), [*rewards.ANSWER_FORMS.items(), ("reasoning_gym", "{}")])
def test_only_what_follows_the_thoughts_is_an_answer(verifier, form):
    verify, seven = rewards.VERIFIERS[verifier], form.format("7")
    none = verify("", "7")
    assert none <= 0
    for thought, expected in {
        f"<think>{seven}": none,
        f"<think>{form.format('8')}</think>{seven}": 1,
        f"{form.format('8')}</think>{seven}": 1,
        f"<think>{seven}</think>": none,
        f"{seven}</think> It is eight.": none,
        f"<think>a</think>{seven}<think>b": none,
        f"<think>{seven}</think><answer></answer>": none,
        "<think></think><answer></answer>": none,
    }.items():
        assert verify(thought, "7") == expected, thought


# ---- Formats ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verifier", "answer", "expected"),
    [
        ("gsm8k_strict", "$1,234", True),
        ("gsm8k_flexible", ".5", True),
        ("gsm8k_flexible", "5 or 6", False),
        ("boxed", "12:00", True),
        ("boxed", r"\frac{", False),
        ("think_answer", "12:00", True),
        ("", "12:00", True),
    ],
)
def test_which_answers_a_response_can_give(verifier, answer, expected):
    assert rewards.can_be_right(verifier, answer) is expected


@pytest.mark.parametrize(("verifier", "expected"), [("reasoning_gym", [0, 0, 1]), ("mine:half", [0, 1, 1])])
def test_less_than_a_point_is_no_correct_response_of_reasoning_gym(verifier, expected):
    assert rewards.is_right(torch.tensor([0.0, 0.5, 1.0]), verifier).tolist() == expected


# ---- Any text --------------------------------------------------------------------------------------------------

WHOLE = r"([0-9]{1,6}|[0-9]{1,3}(,[0-9]{3}){1,2})"
NUMBERS = st.from_regex(rf"[-+\u2212]?\$?({WHOLE}(\.[0-9]{{1,3}})?|\.[0-9]{{1,3}})", fullmatch=True)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
PIECES = st.one_of(
    st.sampled_from(["#### ", "####", r"\boxed{", "}", "{", "\\", "$", ",", ".", "-", "\n", " ", *TAGS]),
    NUMBERS,
    st.text(max_size=5),
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)
WITHOUT_LIBRARY = [name for name in rewards.VERIFIERS if name != "boxed"]  # a box that holds mathematics asks it


def exactly(number: str) -> Fraction:
    """A number by the rules of fractions, which know nothing of decimals' contexts."""
    return Fraction(number.translate({0x2212: "-", ord("$"): None, ord(","): None}))


@settings(max_examples=50, deadline=None)
@given(response=TEXTS, answer=TEXTS)
def test_any_text_has_a_finite_value(response, answer):
    for name in WITHOUT_LIBRARY:
        value = rewards.VERIFIERS[name](response, answer)
        assert type(value) is float and -1 <= value <= 1
    content = rewards.last_boxed(response)
    assert content is None or content in response


@settings(max_examples=30, deadline=None)
@given(content=st.text(alphabet="0123456789+-*/^_{}()\\abcfrx=,. ", max_size=12), answer=NUMBERS)
def test_any_box_has_a_value(content, answer):
    assert rewards.boxed(rf"\boxed{{{content}}}", answer) in (0, 1)


@settings(max_examples=100, deadline=None)
@given(text=TEXTS, number=NUMBERS, answer=NUMBERS)
def test_a_number_at_the_end_counts_whatever_stands_before(text, number, answer):
    expected = float(exactly(number) == exactly(answer))
    text = text.replace("<think>", "")
    assert rewards.gsm8k_strict(f"{text}\n#### {number}", answer) == expected
    assert rewards.gsm8k_flexible(f"{text}\n{number}", answer) == expected


@pytest.mark.parametrize("name", rewards.VERIFIERS)
def test_the_prompt_is_never_rewarded(name):
    prompt = r"<think>x</think><answer>5</answer> #### 5 \boxed{5}"
    score = rewards.load_verifier(name, "rewards.verifier")
    worst = rewards.VERIFIERS[name]("", "5")
    assert worst <= 0
    assert score([prompt, "", prompt], ["", "", "I do not know."], ["5", "5", "5"]) == [worst] * 3


# ---- Functions -------------------------------------------------------------------------------------------------


def of_two(prompts, responses):
    return [len(prompt) - len(response) for prompt, response in zip(prompts, responses, strict=True)]


def verl(data_source, solution_str, ground_truth, extra_info=None):
    """2 for the answer, 1 for another text, and what extra_info adds."""
    assert data_source in ("", "countdown")
    return {"score": 1 + (solution_str == str(ground_truth)) + extra_info.pop("bonus", 0), "acc": 0.0}


def verl_needs_more(data_source, solution_str, ground_truth, sandbox):
    return 1.0


def another_column(completions, target):
    return [1.0] * len(completions)


def by_number(prompts, responses, answers):
    return dict.fromkeys(range(len(responses)), 5.0)


def without_gradients(prompts, responses, answers):
    torch.set_grad_enabled(False)
    return [1.0] * len(responses)


def load(name: str, **options):
    return rewards.load_verifier(name, "rewards.verifier", **options)


COLUMNS = [
    {"question": "1+1?", "answer": "2", "level": 3, "solution": "2 it is", "extra_info": {"bonus": 0.5}},
    {"question": "2+2?", "answer": "4", "data_source": "countdown"},
]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda completions, **kwargs: list(map(str.endswith, completions, kwargs["ground_truth"])), [1, 0]),
        (lambda prompts, completions, answers, **kwargs: map(len, prompts), [5, 6]),
        (lambda **kwargs: map(len, kwargs["completions"]), [6, 7]),
        (lambda completions, level: level, [3, None]),
        (lambda completions, **kwargs: kwargs["level"], [3, None]),
        (lambda queries, prompts, labels: map(str.endswith, queries, labels), [1, 0]),
        # A column counts more than another name of the answer.
        (lambda completions, solution, answer: [len(answer[0] + solution[0]), solution[1]], [8, None]),
        (lambda solution_str, **kwargs: len(kwargs["data_source"]), [0, 9]),
        (lambda solution_str, ground_truth: {"score": None} if ground_truth == "4" else 1, [1, None]),
        (lambda q, r: map(len, q), [5, 6]),
    ],
)
def test_functions_are_called_as_other_libraries_call_them(function, expected):
    texts = (["1+1?.", "2+2?.."], ["#### 2", "##### 5"], ["2", "4"])
    scores = reward_functions.scores_of(function, "f", *texts, rows=COLUMNS, none=math.nan)
    assert scores == pytest.approx([math.nan if score is None else score for score in expected], nan_ok=True)


def test_compute_score_is_called_once_for_each_text():
    """An answer that is JSON text is the object again. A function gets copies of columns."""
    answers = ["2", reward_functions.JsonText("[4,5]")]
    for _ in range(2):
        assert load("test_verifiers:verl")(["p", "q"], ["2", "[4, 5]"], answers, COLUMNS) == [2.5, 2.0]
    assert load("test_verifiers:verl")(["p", "q"], ["1", "[4,5]"], answers) == [1.0, 1.0]


BAD = {
    "nothing": "unknown; there are .*gsm8k_strict.* and package.module:name",
    "test_verifiers:nothing": "module 'test_verifiers' has no attribute 'nothing'",
    "test_verifiers:verl_needs_more": "'sandbox'; a function of solution_str is called with data_source, solution",
    "test_verifiers:another_column": "'target'; a function is called by the names of its parameters, any of queries",
    "test_verifiers:by_number": "returned a dict; it must return a list, one number per response",
}


@pytest.mark.parametrize("name", BAD)
def test_what_never_works_is_refused_before_training(name):
    with pytest.raises(InputError, match=rf"^--rewards\.verifier {name}.*{BAD[name]}"):
        load(name)


def of_tokens(prompts, responses, answers, completion_ids):
    assert completion_ids[-1] == [7, 8, 9, 10]
    return [json.loads(response) if response[:1] in "[n" else 1.0 for response in responses]


OF_TWO = [{"completion_ids": [7, 8], "completion_mask": [True, True]}]
OF_FOUR = [{"completion_ids": [7, 8, 9, 10], "completion_mask": [True, True, False, True]}]


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("[0, 0.5, 0, -2]", [0, 0.5, 0, -2]),
        ("[[3, 1], [0, 0.25], [3, 0.5]]", [0.25, 0, 0, 1.5]),
        ("[[2, 0]]", [0, 0, 0, 0]),
        ("[]", [0, 0, 0, 0]),
        ("[1, 2, 3]", "3 rewards for a response of 4 tokens"),
        ("[0, 0, 0, 0, 1]", "5 rewards for a response of 4 tokens"),
        ("[[4, 1]]", "a reward for token 4 of a response of 4 tokens"),
        ("[[-1, 1]]", "a reward for token -1 of a response"),
        ("[[0, NaN]]", "the reward nan for token 0"),
        ("[0, 0, 0, Infinity]", "the reward inf for token 3"),
        ("[[2, 1]]", "a reward for token 2, which the policy did not write"),
        ("[0, 0, 1, 0]", "a reward for token 2, which the policy did not write"),
        ("[[0, 1], 2, [1, 1], 0]", "failed: TypeError"),
        ("[null, 0, 0, 0]", "failed: TypeError"),
    ],
)
def test_a_function_may_reward_tokens(response, expected):
    """With one number for each, or pairs; next to a response that gets one number, and one that cannot be scored."""
    score = partial(load("test_verifiers:of_tokens", trial=None), ["p"] * 3, answers=["1"] * 3)
    texts, rows = ["one", "null", response], OF_TWO * 2 + OF_FOUR
    if isinstance(expected, str):
        with pytest.raises(InputError, match=rf"^--rewards\.verifier test_verifiers:of_tokens .*{expected}"):
            score(texts, rows=rows)
        return
    values = score(texts, rows=rows)
    assert values == pytest.approx([1, math.nan, sum(expected)], nan_ok=True)
    assert rewards.token_scores_of(values, 5).tolist() == [[0] * 5, [0] * 5, [*expected, 0]]
    with pytest.raises(InputError, match="of_tokens returned rewards of single tokens, but I say so"):
        load("test_verifiers:of_tokens", trial=None, why_not_tokens="I say so")(["p"], [response], ["1"], OF_FOUR)


def test_gradients_that_a_function_switches_off_are_on_again():
    assert load("test_verifiers:without_gradients")(["p"], ["r"], ["1"]) == [1.0]
    assert torch.is_grad_enabled()


def test_what_the_prompt_ended_with_belongs_to_the_response():
    def with_prefix(name, prefix=""):
        return load(name, start_of=partial(problems.response_start, problems.TaskArgs(response_prefix=prefix)))

    response = "a</think><answer>b</answer>"
    said = with_prefix("think_answer")(["p", "p <think>", "p <think>\n"], [response] * 3, ["b"] * 3)
    assert said == [0.0, 1.0, 1.0]
    assert with_prefix("think_answer", "<think>")(["p <think>"], [response], ["b"]) == [1.0]
    said = with_prefix("exact", "It is ")(["<think>It is "] * 2, ["b", "a</think>b"], ["b"] * 2)
    assert said == [0.0, 1.0]
    for prefix, said in {"The answer is ": "14", "<answer>": "14</answer>", "": "14"}.items():
        for name in ("exact", "reasoning_gym"):
            assert with_prefix(name, prefix)(["p"] * 2, [said, "1"], ["14", "14"]) == [1.0, 0.0]
    assert with_prefix("test_verifiers:of_two", "<think>")(["p"], [response], ["b"]) == [1.0 - 34]


# ---- Lengths and counts ----------------------------------------------------------------------------------------


def test_pass_at_k():
    expected = {1: 3 / 8, 2: 1 - 10 / 28, 4: 1 - 5 / 70, 8: 1.0}
    assert {k: rewards.pass_at_k(8, 3, k) for k in expected} == pytest.approx(expected)
    assert rewards.pass_at_k(8, 0, 8) == 0 and rewards.pass_at_k(8, 8, 1) == 1
