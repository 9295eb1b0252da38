"""docs/reference agrees with the marks in the code, the tests, the golden files and the results."""

import re

import pytest
import register
from register import README, TO_ROOT, Files, pages, problems, read_files, updated

FILES = read_files()
PROBLEMS = {*problems(FILES)}
CHAPTER1, GOLDEN_PAGE, ATLAS = (f"docs/reference/{name}.md" for name in ("chapter1", "golden", "atlas"))


def test_nothing_differs():
    assert not PROBLEMS


def test_line_numbers_are_current():
    assert updated(FILES) == FILES


# ---- What counts as a mark -------------------------------------------------------------------------------------

SCRIPT = '''"""A module's docstring speaks of marks like [D99]."""


class Args:
    size: int = 3
    """so many at a time [X03]"""


def whiten(x):
    """Mean 0 and variance 1 [D54]."""
    # [D55] Every time.
    # [D56] [D57] After that.
    return "[D98]", x  # [D67] as it is
'''


OPENAI, SUMMARIZE, TRL, *_ = register.ORIGINALS


def test_marks_are_in_comments_and_docstrings_but_not_in_that_of_the_module():
    lines = {name: [line for _, line in places] for name, places in register.marks({"ppo_rlhf/x.py": SCRIPT}).items()}
    expected = {"X03": 6, "D54": 10, "D55": 11, "D56": 12, "D57": 12, "D67": 13}
    assert lines == {name: [line] for name, line in expected.items()}


WITH_LINES = '''"""The original is openai/lm-human-preferences
at commit cbfd210. Marks are like [D99]   core.py#L1.
"""


def whiten(x):
    """Mean 0 and variance 1 [D54].   utils/core.py#L336-L341"""
    # [D55] Every time, but not in the original.
    # [D56] After that.   train_policy.py#L3
    # [D57] [D58] And this, which takes
    #       two lines.   train_policy.py#L5, core.py#L6-L7
    # and a third   core.py#L8
    # [D59] launch.py#L9
    # [D61]  openai/lm-human-preferences launch.py#L2
    return x  # [D67] as it is   core.py#L10
'''


def test_a_reference_belongs_to_the_marks_of_its_line_or_the_nearest_above():
    assert register.originals({"ppo_rlhf/x.py": WITH_LINES}) == {
        name: {(OPENAI, lines) for lines in references.split(", ")}
        for name, references in {
            "D54": "utils/core.py#L336-L341",
            "D56": "train_policy.py#L3",
            "D57": "train_policy.py#L5, core.py#L6-L7, core.py#L8",
            "D58": "train_policy.py#L5, core.py#L6-L7, core.py#L8",
            "D59": "launch.py#L9",
            "D61": "launch.py#L2",
            "D67": "core.py#L10",
        }.items()
    }
    assert not [*register.reference_problems({"ppo_rlhf/x.py": WITH_LINES})]


BASES = """The original is vwxyzjn/summarize_from_feedback_details at commit ee77a9a. OAI is
openai/lm-human-preferences at commit cbfd210, and TRL is huggingface/trl at
commit f2cd57710ae3."""
FIRST_TOO = BASES.replace("The original is", "SFFD is")


@pytest.mark.parametrize(
    ("docstring", "text", "expected"),
    [
        (BASES, "[T39] This.   OAI x.py#L9, TRL ppo.py#L1-L2", [(OPENAI, "x.py#L9"), (TRL, "ppo.py#L1-L2")]),
        (BASES, "[T39] This.   ppo.py#L9", [(SUMMARIZE, "ppo.py#L9")]),
        (FIRST_TOO, "[T39] This.   SFFD ppo.py#L9", [(SUMMARIZE, "ppo.py#L9")]),
        (f"SFFD: {SUMMARIZE} @ee77a9a.", "[T39] SFFD ppo.py#L9", [(SUMMARIZE, "ppo.py#L9")]),
        (FIRST_TOO, "[T39] This.   ppo.py#L9", [("", "ppo.py#L9")]),
        (BASES, "[T39] This.   XYZ ppo.py#L9", [("", "ppo.py#L9")]),
        (BASES.replace("OAI is", "It is"), "[T39] This.   ppo.py#L9", [("", "ppo.py#L9")]),
        ("No base.", "[T39] This.   ppo.py#L9", [("", "ppo.py#L9")]),
        (BASES, "[T39] The words of OAI launch.py#L9 are read as the claim.", []),
        (BASES, "[T39] This is too close. launch.py#L9", []),
    ],
)
def test_short_names_of_repositories(docstring, text, expected):
    source = f'"""{docstring}"""\n# {text}\n'
    known = register.bases(source)
    assert register.references_in(f"# {text}", known) == expected
    wrong = list(register.reference_problems({"ppo_rlhf/x.py": source}))
    assert bool(wrong) == (not expected or ("", "ppo.py#L9") in expected), wrong


def test_the_only_repository_needs_no_short_name():
    known = register.bases('"""OAI is openai/lm-human-preferences at commit cbfd210."""')
    assert {repository for repository, _ in known.values()} == {OPENAI} and {"", "OAI", OPENAI} == set(known)


@pytest.mark.parametrize(
    ("reference", "same"),
    [
        ((OPENAI, "lm_human_preferences/utils/core.py#L3"), True),
        ((OPENAI, "core.py#L3"), True),
        ((OPENAI, "ore.py#L3"), False),
        ((OPENAI, "core.py#L3-L4"), False),
        ((TRL, "core.py#L3"), False),
        (("", "core.py#L3"), False),
    ],
)
def test_a_reference_may_lack_the_first_folders(reference, same):
    assert register.same_lines(reference, (OPENAI, "lm_human_preferences/utils/core.py#L3")) == same


# ---- Negative controls: each damage to a copy is named ---------------------------------------------------------

CODE, GOLDEN = "ppo_rlhf/train_policy.py", "tests/test_golden.py"


def damaged(where: str, old: str, new: str) -> Files:
    """The files, but a text is replaced throughout one of them or, if an id is given, in its row of the register."""
    path, part = where, FILES.get(where, "")
    if not part:
        (row,) = (row for row in register.rows(FILES) if row.id == where)
        path = row.page
        part = "\n".join(FILES[path].split("\n")[row.line : max(row.lines.values()) + 1])
    assert old in part
    return FILES | {path: FILES[path].replace(part, part.replace(old, new))}


# difference: (file or id, text, what replaces it, beginning of the problem)
DAMAGE = {
    "an id without a row": ("D54", 'id="D54"', "", "D54 is marked at [train_policy.py#L"),
    "a deviation without a row": ("X17", 'id="X17"', "", "X17 is marked at [train_policy.py#L"),
    "a row without a mark": (CODE, "[D54]", "", "D54 has no mark"),
    "a mark of an unknown id": (CODE, "[D54]", "[D89]", "D89 is marked at"),
    "two rows": ("D55", "D55", "D54", "D54 has two rows"),
    "a field too many": ("D54", "- *here*", "- *more*: x\n- *here*", "D54 does not have its fields"),
    "a row without a reason": ("D54", "- *why*", "- why", "D54 does not have its fields"),
    "a deviation without a reason": ("X17", "- *why*", "- why", "X17 does not have its fields"),
    "a field twice": ("D63", "*without it*", "*why*", "D63 does not have its fields"),
    "a field in another place": ("D54", "- *here*", "- *measured*: x\n- *here*", "D54 does not have its fields"),
    "an empty field": ("D67", "*original*: none", "*original*: -", "D67 has an empty field"),
    "a row of the atlas that is not linked": ("D51", "[`no-kl`]", "`no-kl`", "D51 does not name [`no-kl`]"),
    "another row of the atlas": (ATLAS, "tales-no-kl", "tales-no-kl-2", "D51 does not name [`no-kl`]"),
    "another id in bold": ("D54", "**D54**", "**D55**", "D54 does not have its fields"),
    "a mark that has moved": (CODE, '"""PPO', '"""\nPPO', "D54 is marked at [train_policy.py#L"),
    "a wrong line": ("D54", "/ppo_rlhf/train_policy.py#L", "/ppo_rlhf/train_policy.py#L1", "D54 is marked at"),
    "a wrong file": ("D54", "ppo_rlhf/train_policy.py", "ppo_rlhf/train_reward.py", "D54 is marked at"),
    "other lines of the original": ("D54", "#L336-L341", "#L336-L340", "D54 has utils/core.py#L"),
    "other lines at the mark": (CODE, "core.py#L336-L341", "core.py#L336", "D54 has utils/core.py#L336 "),
    "no lines at the mark": (CODE, "   utils/core.py#L336-L341", "", "D54 has lines of the original in its row, but"),
    "no original": ("D67", "*original*: none", "*original*: ", "D67 has neither lines of the original nor `none`"),
    "a link with a wrong name": ("D54", "[core.py#L336", "[core.py#L335", "D54 links [core.py#L335"),
    "a link that may move": ("D54", f"/{register.ORIGINALS[OPENAI]}/", "/master/", "D54 links [core.py#L336"),
    "another commit in a docstring": (CODE, "commit cbfd210", "commit cbfd211", f"{CODE} is about openai/lm-human"),
    "a reference in no form": (CODE, "core.py#L336-L341", "core.py#L1 or so", f"{CODE} has a reference in line"),
    "a reference to no repository": (
        CODE,
        "   utils/core.py#L336-L341",
        "   ABC utils/core.py#L336-L341",
        f"{CODE} does not name the repository",
    ),
    "a script of another length": (README, " lines", "0 lines", "ppo_rlhf/train_policy.py has about"),
    "a script that is gone": (
        README,
        "ppo_rlhf/train_policy.py",
        "ppo_rlhf/gone.py",
        "README.md names ppo_rlhf/gone",
    ),
    "a test that is gone": (GOLDEN, "def test_whiten(", "def test_white(", f"{GOLDEN} has no test_whiten"),
    "a test of another file": ("D54", GOLDEN, "tests/test_run.py", "tests/test_run.py has no test_whiten"),
    "a test that has moved": (GOLDEN, '"""Our', '"""\nOur', "test_whiten is in line"),
    "a row without a test": ("D54", "[test_", "[the_test_", "D54 is not proven"),
    "a row that lacks a test": ("D54", "[test_whiten]", "MISSING: all, [test_whiten]", "D54 is not proven"),
    "a row without a golden file": (GOLDEN_PAGE, "`case1_whiten.npz`", "`x.npz`", "no golden file is called x.npz"),
    "a golden file without a row": (
        GOLDEN_PAGE,
        "`case1_whiten.npz`",
        "`x`",
        "ppo_rlhf/check/golden/case1_whiten.npz has no row",
    ),
}


@pytest.mark.parametrize("difference", DAMAGE)
def test_a_difference_is_named(difference):
    *damage, beginning = DAMAGE[difference]
    new = set(problems(damaged(*damage))) - PROBLEMS
    assert any(problem.startswith(beginning) for problem in new), new


# ---- Updating --------------------------------------------------------------------------------------------------


def with_pages(change) -> Files:
    return FILES | {page: change(FILES[page]) for page in pages(FILES)}


def test_shifted_lines_are_updated():
    """Each line of our code and of the tests changes, and none of the original."""
    ours = re.compile(rf"(\({re.escape(TO_ROOT)}(?:ppo_rlhf|tests)/[\w/]+\.py#L)(\d+)")
    shifted = with_pages(lambda text: ours.sub(lambda link: f"{link[1]}{int(link[2]) + 7}", text))
    for page, least in ((CHAPTER1, 200), ("docs/reference/chapter2.md", 150)):
        assert len(ours.findall(shifted[page])) > least and shifted[page] != FILES[page]
    assert updated(shifted) == FILES


def test_line_numbers_follow_code_and_tests():
    moved = FILES | {path: "\n\n" + FILES[path] for path in (CODE, GOLDEN)}
    assert len(problems(moved)) > len(PROBLEMS) + 50
    assert problems(updated(moved)) == problems(updated(FILES))


def test_the_length_of_a_script_is_updated():
    """It is rounded to fifty, so a few lines more or less change nothing."""
    longer = FILES | {CODE: FILES[CODE] + "#\n" * 1000}
    assert [problem for problem in problems(longer) if problem.startswith(f"{CODE} has about")]
    assert problems(updated(longer)) == []
    rounded = [register.nearest_fifty("\n" * n) for n in (3, 74, 76, 1020, 1030)]
    assert rounded == ["50", "50", "100", "1,000", "1,050"]


def test_links_to_the_atlas_are_updated():
    """A changed row replaces its link, links to results stay, and a row of a detail never measured makes a field."""
    row = '| [D65](chapter1.md#D65) | <a id="posts-x-1.5"></a>`x-1.5`: y | z | +1.25 ± 2.50 |'
    renamed = FILES[ATLAS].replace('<a id="tales-fixed-kl"></a>`fixed-kl`', '<a id="tales-fixed"></a>`fixed`')
    new = updated(FILES | {ATLAS: f"{renamed}\n{row}\n"})
    rows = {row.id: row for row in register.rows(new)}
    assert rows["D65"].complete and rows["D65"].fields["measured"] == "[`x-1.5`](atlas.md#posts-x-1.5)"
    links = "[ten seeds](../results.md#ten-seeds), [`fixed`](atlas.md#tales-fixed)"
    assert rows["D69"].fields["measured"] == links
    assert updated(new) == new and problems(new) == []


def test_what_cannot_be_updated_stays():
    without = damaged(CODE, "[D54]", "") | {GOLDEN: ""}
    assert "[test_whiten](../../tests/test_golden.py#L" in updated(without)[CHAPTER1]
    assert "D54 has no mark in ppo_rlhf/**/*.py" in problems(updated(without))
    assert f"{GOLDEN} has no test_whiten" in problems(updated(without))
