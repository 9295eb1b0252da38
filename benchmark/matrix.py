"""Which tests reject which mistakes of the book (ppo_rlhf/check/faults.toml): writes tests/matrix.csv.

    python benchmark/matrix.py                                                    # all, in some hours
    python benchmark/matrix.py "gae: next value 0" "whiten: with n minus 1"       # these again

Each mistake is put into one of our functions, in a copy of what git has of the repository. The files in FAST run
whole there. If none of their tests fails, the other test files run, those first that reject another mistake in the
same script, up to the first failure. Left out are tests that edit the code or look at its text, and mistakes in
check/forms.py, which are for test_check.py.

A row of matrix.csv has a mistake, where it was put, a test file, its first test that failed, and how many did.
If it is started again, it goes on with the mistakes that have no row yet.
"""

import csv
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from ppo_rlhf.check import faults
from tests import mistakes

ROOT = Path(__file__).parent.parent
MUTANTS = [(fault.title, place) for fault in faults.BOOK for place in fault.edits if not place.startswith("check/")]
FAST = ["golden", "golden_tldr", "golden_verl", "check", "policy_math", "reward_math", "tldr_math", "rlvr_math"]
FAILED = re.compile(r"^(?:FAILED|ERROR) tests/(test_\w+\.py)(?:::(.+?))?(?: - .*)?$", re.MULTILINE)
COLUMNS = ["mistake", "place", "test", "rejected_by", "failures"]


def failures(folder: Path, files: list[str], *options: str) -> list[tuple[str, str]]:
    """Files and names of the tests that fail in a copy of the repository."""
    injecting = "not (mistake_is_detected or a_mistake_in or rebuilt_functions or parts_of_the_text)"
    words = ["-m", "pytest", "-p", "no:cacheprovider", "--tb=no", "-rfE", "-k", injecting, *options]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, *words, *(f"tests/{file}" for file in files)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, 1, 5):  # 5: the options leave no test of these files
        raise RuntimeError(f"pytest ended with status {done.returncode}: {done.stderr[-1000:]}")
    return FAILED.findall(done.stdout)


def rejections(title: str, place: str) -> list[list[str]]:
    """The rows of a mistake."""
    script = place.partition("::")[0]
    fast = [f"test_{name}.py" for name in FAST]
    known = Counter(row[2] for row in mistakes.rows_of_matrix() if row[3] and row[1].startswith(f"{script}::"))
    others = sorted({path.name for path in (ROOT / "tests").glob("test_*.py")} - {*fast}, key=lambda x: -known[x])
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "checkout-index", "--all", f"--prefix={folder}/"], cwd=ROOT, check=True)
        wrong = mistakes.edited_file(script, {place: mistakes.named(title).edits[place]})
        Path(folder, "ppo_rlhf", script).write_text(wrong)
        failed = failures(Path(folder), fast)
        for file in [] if failed else others:
            failed = failed or failures(Path(folder), [file], "--exitfirst")
    first = dict(reversed(failed))
    counts = Counter(file for file, _ in failed)
    return [[title, place, file, first[file], str(counts[file])] for file in sorted(first)] or [
        [title, place, "", "", "0"]
    ]


def main() -> None:
    for title, place in MUTANTS:
        rows = mistakes.rows_of_matrix()
        again = title in sys.argv[1:]
        if again or (not sys.argv[1:] and [title, place] not in [row[:2] for row in rows]):
            found = rejections(title, place)
            print(title, place, *(row[2] for row in found), flush=True)
            rows = [row for row in rows if row[:2] != [title, place]] + found
            with mistakes.MATRIX.open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


if __name__ == "__main__":
    main()
