"""docs/reference agrees with the marks in the code, the tests, the golden files and the atlas."""

import pytest
import register
from register import problems, updated

FILES = register.read_files()
CODE, TEST = "ppo_rlhf/train_policy.py", "tests/numbers/test_golden.py"
PAGE, ATLAS, GOLDEN = (f"docs/reference/{name}.md" for name in ("chapter1", "atlas", "golden"))
COMMIT = register.ORIGINALS["openai/lm-human-preferences"]


def test_nothing_differs():
    """Run python tests/register.py after a change of a mark."""
    assert updated(FILES) == FILES and problems(FILES) == []


SCRIPT = '''"""A module's docstring speaks of marks like [D99]   core.py#L1."""


class Args:
    size: int = 3
    """so many at a time [X03]"""

    def whiten(self, x):
        """Mean 0 and variance 1 [D54].   utils/core.py#L336-L341"""
        # [D56] [D57] This takes
        #       two lines.   train_policy.py#L5, OAI core.py#L6-L7
        return [x for x in y]  # [D67] as it is


# This has no mark.   launch.py#L9
SIZE = 3  # [D68]
'''


def test_marks_have_the_name_around_them_and_the_lines_of_their_comment():
    here, originals = register.marks({"ppo_rlhf/room/x.py": SCRIPT})
    two = {"train_policy.py#L5", "core.py#L6-L7"}
    expected = {"X03": set(), "D54": {"utils/core.py#L336-L341"}, "D56": two, "D57": two, "D67": set(), "D68": set()}
    assert originals == expected
    link = "[room/x.py](../../ppo_rlhf/room/x.py)"
    assert here == dict.fromkeys(expected, f"{link}: `Args.whiten`") | {"X03": f"{link}: `Args`", "D68": link}


# difference: (file, text, what replaces it everywhere in the file, beginning of the problem)
DAMAGE = {
    "an id without a row": (PAGE, 'id="D54"', "", "D54 is marked in [train_policy.py]"),
    "a row without a mark": (CODE, "[D54]", "", "D54 has no mark"),
    "two rows": (PAGE, '<a id="D55"></a>**D55**', '<a id="D54"></a>**D54**', "D54 has two rows"),
    "a row without a reason": (PAGE, "*why*", "*because*", "D54 has no line why"),
    "other lines of the original": (PAGE, "#L336-L341", "#L336-L340", "D54 has utils/core.py#L336-L341 at its mark"),
    "no lines at the mark": (CODE, "   utils/core.py#L336-L341", "", "D54 has lines of the original in its row, but"),
    "a link that may move": (PAGE, f"/{COMMIT}/", "/master/", "D54 links [core.py#L336"),
    "another commit": (CODE, "commit cbfd210", "commit cbfd211", f"{CODE} is about openai/lm-human"),
    "a row of the atlas without a link": (
        PAGE,
        "atlas.md#tales-no-kl)",
        "atlas.md)",
        "D51 does not name tales-no-kl",
    ),
    "a row of a detail that is not there": (ATLAS, "| [D51]", "| [D89]", "D89 does not name tales-no-kl"),
    "a test that is gone": (TEST, "def test_whiten(", "def test_white(", f"{TEST} has no test_whiten"),
    "a row without a test": (PAGE, "[test_", "[the_test_", "D54 is not proven"),
    "a golden file without a row": (
        GOLDEN,
        "`case1_whiten.npz`",
        "`x.npz`",
        "ppo_rlhf/check/golden/case1_whiten.npz",
    ),
    "a row without a golden file": (GOLDEN, "`case1_whiten.npz`", "`x.npz`", "no golden file is called x.npz"),
}


@pytest.mark.parametrize("difference", DAMAGE)
def test_a_difference_is_named(difference):
    path, old, new, beginning = DAMAGE[difference]
    damaged = FILES | {path: FILES[path].replace(old, new)}
    assert any(problem.startswith(beginning) for problem in problems(damaged)), problems(damaged)


def test_places_are_updated_and_moved_lines_change_nothing():
    assert updated(FILES | {CODE: FILES[CODE].replace("\n\n\n", "\n\n\n\n")})[PAGE] == FILES[PAGE]
    renamed = FILES | {CODE: FILES[CODE].replace("def whiten(", "def whitened(")}
    page = updated(renamed)[PAGE]
    assert page != FILES[PAGE] and ": `whitened`\n" in page
    assert updated(FILES | {PAGE: page}) == FILES
