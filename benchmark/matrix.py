"""Which tests reject which mistakes of the book (ppo_rlhf/check/faults.toml): writes tests/matrix.csv.

    python benchmark/matrix.py                                                    # all, in some hours
    python benchmark/matrix.py "gae: next value 0" "whiten: with n minus 1"       # these again

Each mistake is put into one of our functions, in a copy of what git has of the repository. Those files in FAST that
reject some mistake in the same script, by the matrix that git has, run whole. If none of their tests fails, the other
files run up to the first failure: first those that rejected this mistake, then those that rejected others in the
script. Their failure counts if the test passes once the mistake is taken out again. Left out are tests that edit the
code or look at its text, and mistakes in check/forms.py, which are for test_check.py.

A row of matrix.csv has a mistake, where it was put, a test file, its first test that failed, and how many did. A test
that does not end counts as failed, and the row says so. If the program is started again, it goes on with the mistakes
that have no row yet; without the file, with all.
"""

import contextlib
import csv
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from ppo_rlhf.check import faults
from tests.helpers import mistakes

ROOT = Path(__file__).parent.parent
MUTANTS = [(fault.title, place) for fault in faults.BOOK for place in fault.edits if not place.startswith("check/")]
FAST = ["golden", "golden_tldr", "golden_verl", "check", "policy_math", "reward_math", "tldr_math", "rlvr_math"]
ABOUT_TEXT = [f"test_{name}.py" for name in ("house", "matrix", "pages", "readme", "register", "small_changes")]
LEFT_OUT = "not (mistake_is_detected or a_mistake_in or rebuilt_functions or parts_of_the_text or have_the_same_text)"
LIMIT = 1800  # seconds that the tests of a file may take on a busy machine
HANGS = "(does not end)"
FAILED = re.compile(r"^(?:FAILED|ERROR) tests/\w+/(test_\w+\.py)(?:::(.+?))?(?: - .*)?$", re.MULTILINE)
STARTED = re.compile(r"^tests/\w+/(test_\w+\.py)::(.*\S)", re.MULTILINE)
COLUMNS = ["mistake", "place", "test", "rejected_by", "failures"]


def paths_of_tests(folder: Path) -> dict[str, str]:
    """Of each test file of a copy of the repository its name, and its path in the copy."""
    return {path.name: path.relative_to(folder).as_posix() for path in folder.glob("tests/*/test_*.py")}


def failures(folder: Path, tests: list[str], *options: str) -> list[tuple[str, str]]:
    """Files and names of the tests that fail in a copy of the repository, or of the one that does not end.

    tests: such as test_hub.py or test_hub.py::test_split; no two files have the same name.
    """
    words = ["-m", "pytest", "-p", "no:cacheprovider", "--tb=no", "-v", "-rfE", "-k", LEFT_OUT, *options]
    paths = paths_of_tests(folder)
    named = [(paths[file], rest) for file, *rest in (test.split("::", 1) for test in tests)]
    command = [sys.executable, *words, *("::".join([path, *rest]) for path, rest in named)]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, start_new_session=True)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LIMIT)
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing of it is left
                os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        text = output.read()
    if process.returncode is None:
        file, name = (STARTED.findall(text) or [(tests[0], "")])[-1]
        return [(file, f"{name} {HANGS}".strip())]
    failed = FAILED.findall(text)
    if not failed and process.returncode not in (0, 5):  # 5: the options leave no test of these files
        raise RuntimeError(f"pytest ended with status {process.returncode}: {text[-1000:]}")
    return failed


def rejections(title: str, place: str) -> list[list[str]]:
    """The rows of a mistake."""
    script = place.partition("::")[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(["git", "checkout-index", "--all", f"--prefix={folder}/"], cwd=ROOT, check=True)
        known = [row for row in mistakes.rows_of_matrix(folder / "tests/matrix.csv") if row[3]]
        before = {file for *mistake, file, _, _ in known if mistake == [title, place]}
        in_script = Counter(file for _, there, file, _, _ in known if there.startswith(f"{script}::"))
        fast = [f"test_{name}.py" for name in FAST if f"test_{name}.py" in in_script]
        others = paths_of_tests(folder).keys() - {*fast, *ABOUT_TEXT}
        others = sorted(others, key=lambda file: (file not in before, -in_script[file], file))
        path = folder / "ppo_rlhf" / script
        correct = path.read_text()
        wrong = mistakes.edited_file(script, {place: mistakes.named(title).edits[place]})
        path.write_text(wrong)
        failed = failures(folder, fast) if fast else []
        for file in [] if failed else others:
            failed = failures(folder, [file], "--exitfirst")
            if failed:
                path.write_text(correct)
                tests = ["::".join(filter(None, (file, name.removesuffix(HANGS).strip()))) for file, name in failed]
                if not failures(folder, tests):
                    break
                failed = []
                path.write_text(wrong)
    first, counts = dict(reversed(failed)), Counter(file for file, _ in failed)
    rows = [[title, place, file, first[file], str(counts[file])] for file in sorted(first)]
    return rows or [[title, place, "", "", "0"]]


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a test that runs is ended, as by Ctrl-C
    for title, place in MUTANTS:
        rows = mistakes.rows_of_matrix() if mistakes.MATRIX.exists() else []
        again = title in sys.argv[1:]
        if again or (not sys.argv[1:] and [title, place] not in [row[:2] for row in rows]):
            found = rejections(title, place)
            print(title, place, *(row[2] for row in found), flush=True)
            rows = [row for row in rows if row[:2] != [title, place]] + found
            temporary = mistakes.MATRIX.with_suffix(".tmp")
            with temporary.open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
            temporary.replace(mistakes.MATRIX)


if __name__ == "__main__":
    main()
