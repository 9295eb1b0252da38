"""Which test files reject which mistakes of the book (ppo_rlhf/check/faults.toml): writes tests/matrix.csv.

    python tests/matrix.py --workers 2                     # all; an hour or two. Started again, it goes on
    python tests/matrix.py "gae: next value 0" "whiten: with n minus 1"

First, each test file runs once with functions that leave a trace: tests/matrix_calls.csv (not committed) keeps what
each test called, and how long it took. Then each mistake is put into one of our functions in a temporary copy of the
repository, and the tests that call the function run there, the fastest of a file first and up to its first failure.
Tests of more than a second, with the fixtures that their file has set up so far, run only if no fast one rejects the
mistake, a file at a time, until one does: first the files that have rejected another mistake in the same script, then
the fastest. Left out are tests that put mistakes into the code themselves, tests that fail in the copy without any,
and mistakes in check/forms.py, which are for test_check.py.

A row of matrix.csv has a mistake, where it was, a test file, the first of its tests that failed (empty: none did),
and how many of them ran.
"""

import argparse
import ast
import csv
import json
import multiprocessing
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mistakes
import pytest

from ppo_rlhf.check import faults

ROOT = Path(__file__).parent.parent
MATRIX, CALLS = ROOT / "tests/matrix.csv", ROOT / "tests/matrix_calls.csv"
MUTANTS = [(fault.title, place) for fault in faults.BOOK for place in fault.edits if not place.startswith("check/")]
PLACES = sorted({place for _, place in MUTANTS})
INJECTING = "not (mistake_is_detected or a_mistake_in)"  # what these replace is gone
FAST = 1.0  # seconds
# These take longest to import, and no mistake is in them.
HEAVY = "pytest torch transformers accelerate tyro hypothesis pandas scipy.stats matplotlib.figure"

server = multiprocessing.get_context("forkserver")


# ---- In the process of the tests -------------------------------------------------------------------------------


class Record:
    """A plugin of pytest that writes a row of matrix_calls.csv for each test: what touched a file in `seen`."""

    def __init__(self, seen: str, rows: str) -> None:
        self.seen, self.rows = Path(seen), Path(rows)
        self.by_fixtures: set[str] = set()  # they may serve all tests of the file
        self.setup_seconds = 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        touched = {path.name.replace("|", "/") for path in self.seen.iterdir()}
        for path in self.seen.iterdir():
            path.unlink()
        if report.when == "setup":
            self.by_fixtures |= touched
            self.setup_seconds += report.duration
        elif report.when == "call":
            places = " ".join(sorted(touched | self.by_fixtures))
            seconds = f"{report.duration + self.setup_seconds:.2f}"
            add_row(self.rows, report.nodeid, seconds, report.outcome, places)


class Reject:
    """A plugin of pytest that runs some tests, each file's up to the first failure, and writes what it found."""

    def __init__(self, seconds: dict[str, float], found: str) -> None:
        self.seconds, self.found = seconds, Path(found)
        self.failed: dict[str, str] = {}
        self.ran: dict[str, int] = defaultdict(int)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in self.seconds])
        items[:] = [item for item in items if item.nodeid in self.seconds]
        items.sort(key=lambda item: (item.path.name, self.seconds[item.nodeid]))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item.path.name in self.failed:
            pytest.skip("a test of this file has failed")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        signal.signal(signal.SIGALRM, too_long)
        signal.alarm(60 + round(20 * self.seconds[item.nodeid]))
        try:
            return (yield)
        finally:
            signal.alarm(0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, _, test = report.nodeid.removeprefix("tests/").partition("::")
        self.ran[file] += report.when == "setup" and not report.skipped
        if report.failed:
            self.failed.setdefault(file, test)

    def pytest_sessionfinish(self) -> None:
        self.found.write_text(json.dumps({file: [self.failed.get(file, ""), n] for file, n in self.ran.items()}))


def too_long(number: int, frame: object) -> None:
    raise TimeoutError("a mistake may make a function that never ends")


def pytest_configure(config: pytest.Config) -> None:
    """Called where this file is loaded with -p."""
    wanted = json.loads(Path(os.environ["MATRIX"]).read_text())
    config.pluginmanager.register(Record(**wanted) if "rows" in wanted else Reject(**wanted))


# ---- What starts them ------------------------------------------------------------------------------------------


def rows_of(path: Path) -> list[list[str]]:
    with path.open() as file:
        return list(csv.reader(file))[1:]


def add_row(path: Path, *row: object) -> None:
    with path.open("a", newline="") as file:
        csv.writer(file).writerow(row)


def copy_repository(folder: Path) -> None:
    """The files that git knows, as they are now."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def run_tests(folder: Path, files: Iterable[str], **plugin: object) -> None:
    """Run test files in a copy of the repository with one of the plugins."""
    wanted = folder / "matrix.json"
    wanted.write_text(json.dumps(plugin))
    words = ["-o", "addopts=", "-q", "-p", "no:cacheprovider", "-p", "matrix", "--tb=no", "-k", INJECTING]
    process = server.Process(target=run_pytest, args=(folder, [*words, *(f"tests/{file}" for file in files)]))
    process.start()
    process.join()


def run_pytest(folder: Path, words: list[str]) -> None:
    """What `python -m pytest <words>` does in a folder, in this process, which imports nothing of ours elsewhere."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("ppo_rlhf", "mistakes")]:
        del sys.modules[name]
    os.chdir(folder)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    paths = [str(folder), f"{folder}/tests"]
    sys.path[:] = [*paths, *(path for path in sys.path if path not in (str(ROOT), str(ROOT / "tests")))]
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "MATRIX": str(folder / "matrix.json")}
    sys.exit(pytest.main(words))


def leaving_traces(file: str, folder: Path) -> str:
    """The text of a file whose functions, where the book has mistakes in them, touch a file in a folder."""
    lines = (ROOT / "ppo_rlhf" / file).read_text().splitlines(keepends=True)
    inserted = {}
    for place in PLACES:
        if place.startswith(f"{file}::"):
            node = mistakes.node_of(place)
            node = (
                next(x for x in node.body if isinstance(x, ast.FunctionDef))
                if isinstance(node, ast.ClassDef)
                else node
            )
            first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
            trace = f"__import__('pathlib').Path({str(folder / place.replace('/', '|'))!r}).touch()"
            inserted[first.lineno] = " " * first.col_offset + trace + "\n"
    return "".join(inserted.get(number, "") + line for number, line in enumerate(lines, start=1))


def record(folder: Path, test: str) -> None:
    """Add rows of matrix_calls.csv: what the tests of a file call."""
    seen, rows = folder / "seen", folder / "rows.csv"
    seen.mkdir(exist_ok=True)
    rows.write_text("\n")
    for file in {place.partition("::")[0] for place in PLACES}:
        (folder / "ppo_rlhf" / file).write_text(leaving_traces(file, seen))
    run_tests(folder, [test], seen=str(seen), rows=str(rows))
    for row in rows_of(rows) or [[f"tests/{test}", "0", "none", ""]]:
        add_row(CALLS, *row)
    print(f"{test}: {len(rows_of(rows))} tests", flush=True)


def reject(folder: Path, title: str, place: str, tests: dict[str, float]) -> None:
    """Add rows of matrix.csv for a mistake. tests: those that call the place, with their seconds."""
    file = place.partition("::")[0]
    (folder / "ppo_rlhf" / file).write_text(mistakes.edited_file(file, {place: mistakes.named(title).edits[place]}))
    fast = {test: seconds for test, seconds in tests.items() if seconds <= FAST}
    slow: dict[str, dict[str, float]] = defaultdict(dict)  # of each file
    for test in tests.keys() - fast.keys():
        slow[file_of(test)][test] = tests[test]
    found, all_found = folder / "found.json", {}
    rejecting = {test for _, where, test, by, _ in rows_of(MATRIX) if by and where.startswith(f"{file}::")}
    in_order = sorted(slow, key=lambda test: (test not in rejecting, max(slow[test].values())))
    for chosen in (fast, *(slow[test] for test in in_order)):
        if chosen and not any(by for by, _ in all_found.values()):
            files = sorted({file_of(test) for test in chosen})
            found.write_text(json.dumps({name: ["no test could run", 0] for name in files}))
            run_tests(folder, files, seconds=chosen, found=str(found))
            for test, (by, ran) in json.loads(found.read_text()).items():
                earlier, before = all_found.get(test, ["", 0])
                all_found[test] = [earlier or by, before + ran]
    for test, (by, ran) in (all_found or {"": ["", 0]}).items():
        add_row(MATRIX, title, place, test, by, ran)
    shutil.copy2(ROOT / "ppo_rlhf" / file, folder / "ppo_rlhf" / file)
    print(f"{title}, in {place}: {sum(bool(by) for by, _ in all_found.values())} of {len(all_found)}", flush=True)


def file_of(test: str) -> str:
    return test.removeprefix("tests/").partition("::")[0]


def work(workers: int, tasks: list[tuple], do: Callable[..., None]) -> None:
    """Do tasks side by side, each in a copy of the repository that nobody else uses."""
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(workers) as pool:
        free: queue.Queue[Path] = queue.Queue()
        for number in range(workers):
            copy_repository(Path(name) / str(number))
            free.put(Path(name) / str(number))

        def one(task: tuple) -> None:
            folder = free.get()
            try:
                do(folder, *task)
            finally:
                free.put(folder)

        list(pool.map(one, tasks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mistakes", nargs="*", help="titles of mistakes; all, if there is none")
    parser.add_argument("--workers", type=int, default=1, help="how many at once")
    args = parser.parse_args()
    server.set_forkserver_preload(HEAVY.split())
    os.environ["HF_HUB_OFFLINE"] = "1"  # which one of them reads now, before conftest.py sets it
    for path, columns in ((CALLS, "test seconds outcome places"), (MATRIX, "mistake place test rejected_by ran")):
        if not path.exists():
            add_row(path, *columns.split())
    known = {file_of(row[0]) for row in rows_of(CALLS)}
    files = sorted(path.name for path in (ROOT / "tests").glob("test_*.py"))
    work(args.workers, [(file,) for file in files if file not in known], record)
    calls = [
        (test, float(seconds), set(places.split()))
        for test, seconds, state, places in rows_of(CALLS)
        if state == "passed"
    ]
    done = {tuple(row[:2]) for row in rows_of(MATRIX)}
    tasks = [
        (title, place, {test: seconds for test, seconds, places in calls if place in places})
        for title, place in MUTANTS
        if (title, place) not in done and (not args.mistakes or title in args.mistakes)
    ]
    work(args.workers, tasks, reject)


if __name__ == "__main__":
    main()
