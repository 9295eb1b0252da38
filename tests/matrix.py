"""Which test files reject which mistakes of the book (ppo_rlhf/check/faults.toml): writes tests/matrix.csv.

    python tests/matrix.py                                  # all; hours. Started again, it goes on where it was
    python tests/matrix.py "gae: next value 0" "whiten: with n minus 1"

Each mistake is put into one of our functions in a temporary copy of the repository. Each test file that calls the
function runs there until the first failure, without the tests that put mistakes into the code themselves. To know
what a test file calls, it runs once with functions that leave a trace; tests/matrix_calls.csv keeps what it called.

A row of matrix.csv has a mistake, where it was, a test file, the first test that failed (empty: none did) and the
seconds that this took. Mistakes in check/forms.py are left out: tests/test_check.py is about them.
"""

import argparse
import ast
import csv
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ppo_rlhf.check import faults

ROOT = Path(__file__).parent.parent
MATRIX, CALLS = ROOT / "tests/matrix.csv", ROOT / "tests/matrix_calls.csv"
MUTANTS = [(fault.title, place) for fault in faults.BOOK for place in fault.edits if not place.startswith("check/")]
INJECTING = "mistake_is_detected or a_mistake_in"  # tests that fail because the text to be replaced is gone
PLACES = sorted({place for _, place in MUTANTS})


def rows_of(path: Path) -> list[list[str]]:
    with path.open() as file:
        return list(csv.reader(file))[1:]


def add_row(path: Path, *row: object) -> None:
    with path.open("a", newline="") as file:
        csv.writer(file).writerow(row)


def start(path: Path, *columns: str) -> None:
    if not path.exists():
        add_row(path, *columns)


def copy_repository(folder: Path) -> None:
    """The files that git knows, as they are now."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def first_failure(folder: Path, test: str, *options: str) -> str:
    """The first test of a file that fails in the copy; empty if none does."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider", "--tb=no", "-rfE"]
    command += [*options, "-k", f"not ({INJECTING})", f"tests/{test}"]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode in (0, 5):  # 5: nothing was left to run
        return ""
    named = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return named[0].rpartition("::")[2] if named else f"pytest ended with status {done.returncode}"


def leaving_traces(file: str, folder: Path) -> str:
    """The text of a file whose functions, where the book has mistakes in them, touch a file in a folder."""
    lines = (ROOT / "ppo_rlhf" / file).read_text().splitlines(keepends=True)
    inserted = {}
    for place in PLACES:
        if place.startswith(f"{file}::"):
            node = faults.node_of(place)
            node = (
                next(x for x in node.body if isinstance(x, ast.FunctionDef))
                if isinstance(node, ast.ClassDef)
                else node
            )
            first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
            trace = f"__import__('pathlib').Path({str(folder / place.replace('/', '|'))!r}).touch()"
            inserted[first.lineno] = " " * first.col_offset + trace + "\n"
    return "".join(inserted.get(number, "") + line for number, line in enumerate(lines, start=1))


def find_calls(folder: Path, tests: list[str]) -> dict[str, set[str]]:
    """The places of the book that each test file calls."""
    start(CALLS, "test", "places")
    known = {test: set(places.split()) for test, places in rows_of(CALLS)}
    for test in [test for test in tests if test not in known]:
        seen = folder / "seen"
        seen.mkdir()
        for file in {place.partition("::")[0] for place in PLACES}:
            (folder / "ppo_rlhf" / file).write_text(leaving_traces(file, seen))
        first_failure(folder, test)
        known[test] = {path.name.replace("|", "/") for path in seen.iterdir()}
        add_row(CALLS, test, " ".join(sorted(known[test])))
        print(f"{test} calls {len(known[test])} of {len(PLACES)}", flush=True)
        shutil.rmtree(seen)
    for file in {place.partition("::")[0] for place in PLACES}:
        shutil.copy2(ROOT / "ppo_rlhf" / file, folder / "ppo_rlhf" / file)
    return known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mistakes", nargs="*", help="titles of mistakes; all, if there is none")
    parser.add_argument("--tests", nargs="+", help="test files; all, if there is none")
    args = parser.parse_args()
    tests = args.tests or sorted(path.name for path in (ROOT / "tests").glob("test_*.py"))
    mutants = [(title, place) for title, place in MUTANTS if not args.mistakes or title in args.mistakes]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_repository(folder)
        calls = find_calls(folder, tests)
        start(MATRIX, "mistake", "place", "test", "rejected_by", "seconds")
        done = {tuple(row[:3]) for row in rows_of(MATRIX)}
        for title, place in mutants:
            file = place.partition("::")[0]
            edits = {place: faults.named(title).edits[place]}
            (folder / "ppo_rlhf" / file).write_text(faults.edited_file(file, edits))
            for test in tests:
                if place in calls[test] and (title, place, test) not in done:
                    began = time.monotonic()
                    failed = first_failure(folder, test, "-x")
                    add_row(MATRIX, title, place, test, failed, f"{time.monotonic() - began:.0f}")
                    print(
                        f"{title}, in {place}: {test} {f'rejects it by {failed}' if failed else 'passes'}", flush=True
                    )
            shutil.copy2(ROOT / "ppo_rlhf" / file, folder / "ppo_rlhf" / file)


if __name__ == "__main__":
    main()
