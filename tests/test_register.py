"""DETAILS.md, the marks in the code, the tests and the golden files agree; and a difference is found."""

import re

import pytest
import register
import test_golden
import test_golden_tldr
from register import REGISTER, Files, mended, problems, read_files

FILES = read_files()


def test_nothing_differs():
    assert problems(FILES) == []


def test_there_is_nothing_to_mend():
    assert mended(FILES) == FILES[REGISTER]


def test_the_mistakes_are_those_of_the_negative_controls():
    table = re.findall(r"^\| ([\w -]+) \| [^|]+ \| (`check_[^|]+`) \|$", FILES[REGISTER], re.MULTILINE)
    named = {mistake: set(re.findall(r"`(\w+)`", checks)) for mistake, checks in table}
    mistakes = [*test_golden.MISTAKES.items(), *test_golden_tldr.MISTAKES.items()]
    expected = {mistake: checks for mistake, (*_, checks) in mistakes}
    assert len(expected) == len(mistakes)
    assert named == {
        mistake: {getattr(check, "func", check).__name__ for check in checks} for mistake, checks in expected.items()
    }


# ----------------------------------------------------------------------------------------------------------------
# What counts as a mark
# ----------------------------------------------------------------------------------------------------------------

SCRIPT = '''"""A module's docstring speaks of marks like [D99]."""


class Args:
    size: int = 3
    """so many at a time [X03]"""


def whiten(x):
    """Mean 0 and variance 1 [D54]."""
    # [D55] Every time.
    # [D56] [D57] After that.
    #       openai/lm-human-preferences lm_human_preferences/train_policy.py#L3 @cbfd210
    # [D58] openai/lm-human-preferences utils/core.py#L1-L2, utils/core.py#L4 @cbfd210
    return "[D98]", x  # [D67] as it is
    # [D59] openai/lm-human-preferences launch.py#L9 @cbfd210
'''


def test_marks_stand_in_comments_and_docstrings_but_not_in_that_of_the_module():
    lines = {name: [line for _, line in places] for name, places in register.marks({"ppo_rlhf/x.py": SCRIPT}).items()}
    expected = {"X03": 6, "D54": 10, "D55": 11, "D56": 12, "D57": 12, "D58": 14, "D67": 15, "D59": 16}
    assert lines == {name: [line] for name, line in expected.items()}


def test_a_reference_belongs_to_the_marks_above_it():
    first = {"lm_human_preferences/train_policy.py#L3"}
    assert register.originals({"ppo_rlhf/x.py": SCRIPT}) == {
        "D55": first,
        "D56": first,
        "D57": first,
        "D58": {"utils/core.py#L1-L2", "utils/core.py#L4"},
        "D59": {"launch.py#L9"},
    }


# ----------------------------------------------------------------------------------------------------------------
# Negative controls: each damage to a copy is named
# ----------------------------------------------------------------------------------------------------------------

CODE, GOLDEN = "ppo_rlhf/train_policy.py", "tests/test_golden.py"


def damaged(where: str, old: str, new: str) -> Files:
    """The files, but a text is replaced throughout one of them or, if an id is given, in that row of the register."""
    path, part = where, FILES.get(where, "")
    if not part:
        (row,) = (row for row in register.rows(FILES[REGISTER]) if row.id == where)
        path, part = REGISTER, FILES[REGISTER].split("\n")[row.line]
    assert old in part
    return FILES | {path: FILES[path].replace(part, part.replace(old, new))}


# difference: (file or id, text, what stands there instead, beginning of the problem)
DAMAGE = {
    "an id without a row": ("D54", 'id="D54"', "", "D54 is marked at [train_policy.py#L"),
    "a deviation without a row": ("X06", 'id="X06"', "", "X06 is marked at [train_policy.py#L"),
    "a row without a mark": (CODE, "[D54]", "", "D54 has no mark"),
    "a mark of an unknown id": (CODE, "[D54]", "[D89]", "D89 is marked at"),
    "an id without row and sentence": (REGISTER, "D85 has no row", "No row", "D85 has no row"),
    "a row and a sentence": (REGISTER, "D85 has no row", "D54 has no row", "D54 has two rows"),
    "two rows": ("D55", "D55", "D54", "D54 has two rows"),
    "a cell too many": ("D54", "| [core.py", "| more | [core.py", "D54 does not have the columns of its table"),
    "a mark that has moved": (CODE, '"""PPO', '"""\nPPO', "D54 stands at [train_policy.py#L"),
    "a wrong line": ("D54", "(ppo_rlhf/train_policy.py#L", "(ppo_rlhf/train_policy.py#L1", "D54 stands at"),
    "a wrong file": ("D54", "ppo_rlhf/train_policy.py", "ppo_rlhf/train_reward.py", "D54 stands at"),
    "other lines of the original": (
        "D54",
        "#L336-L341",
        "#L336-L340",
        "D54 has lm_human_preferences/utils/core.py#L",
    ),
    "other lines beside the mark": (CODE, "core.py#L336-L341", "core.py#L336", "D54 has lm_human_preferences/utils"),
    "no lines beside the mark": (
        CODE,
        "#L336-L341 @",
        "#L336-L341 at ",
        "D54 has lines of the original in its row, but",
    ),
    "no original": ("D67", "| none |", "| |", "D67 has neither lines of the original nor `none`"),
    "a link with a wrong name": ("D54", "[core.py#L336", "[core.py#L335", "D54 links [core.py#L335"),
    "a link that may move": (
        "D54",
        "/cbfd210bb8b08f6bc5c26878c10984b90f516c66/",
        "/master/",
        "D54 links [core.py#L336",
    ),
    "a test that is gone": (GOLDEN, "def test_whiten(", "def test_white(", f"{GOLDEN} has no test_whiten"),
    "a test of another file": ("D54", GOLDEN, "tests/test_run.py", "tests/test_run.py has no test_whiten"),
    "a test that has moved": (GOLDEN, '"""Our', '"""\nOur', "test_whiten stands in line"),
    "a row without a test": ("D54", "[test_", "[the_test_", "D54 is not proven"),
    "a row that lacks a test": ("D54", "[test_whiten]", "MISSING: all, [test_whiten]", "D54 is not proven"),
    "a row without a golden file": (REGISTER, "`case1_whiten.npz`", "`case0.npz`", "tests/golden has no case0.npz"),
    "a golden file without a row": (
        REGISTER,
        "`case1_whiten.npz`",
        "`x`",
        "tests/golden/case1_whiten.npz has no row",
    ),
}


@pytest.mark.parametrize("difference", DAMAGE)
def test_a_difference_is_named(difference):
    *damage, beginning = DAMAGE[difference]
    new = set(problems(damaged(*damage))) - set(problems(FILES))
    assert any(problem.startswith(beginning) for problem in new), new


# ----------------------------------------------------------------------------------------------------------------
# Mending
# ----------------------------------------------------------------------------------------------------------------


def test_shifted_lines_are_mended():
    """Each line of our code and of the tests, and none of the original."""
    ours = re.compile(r"(\((?:ppo_rlhf|tests)/\w+\.py#L)(\d+)")
    shifted = ours.sub(lambda link: f"{link[1]}{int(link[2]) + 7}", FILES[REGISTER])
    assert len(ours.findall(shifted)) > 300
    assert mended(FILES | {REGISTER: shifted}) == mended(FILES) != shifted


def test_mending_follows_code_and_tests():
    moved = FILES | {path: "\n\n" + FILES[path] for path in (CODE, GOLDEN)}
    assert len(problems(moved)) > len(problems(FILES)) + 50
    assert problems(moved | {REGISTER: mended(moved)}) == problems(FILES | {REGISTER: mended(FILES)})


def test_what_cannot_be_mended_stays():
    without = damaged(CODE, "[D54]", "") | {GOLDEN: ""}
    assert "[test_whiten](tests/test_golden.py#L" in mended(without)
    assert "D54 has no mark in ppo_rlhf/*.py" in problems(without | {REGISTER: mended(without)})
    assert f"{GOLDEN} has no test_whiten" in problems(without | {REGISTER: mended(without)})
