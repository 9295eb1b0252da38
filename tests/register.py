"""The register DETAILS.md: for every detail, where it stands in our code and which tests prove it.

    python tests/register.py

mends the line numbers in DETAILS.md: those of our code from the marks in ppo_rlhf/*.py, those of the tests from the
test files. It prints what it changed and what only a person can mend, and exits with 1 if there is any of the latter.

A mark is `[D54]` in a comment, or in the docstring of a function, a class or a field; what a module's docstring says
is about marks and none itself. `openai/lm-human-preferences <file>#L1-L2 @cbfd210` in the same comment belongs to the
marks on its line and on the lines above, back to the previous such reference; so does one to
`vwxyzjn/summarize_from_feedback_details <file>#L1-L2 @ee77a9a`.
"""

import ast
import io
import itertools
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
REGISTER = "DETAILS.md"
DETAILS = [f"D{number:02d}" for number in range(1, 89)] + [f"T{number:02d}" for number in range(1, 60)]
SUMMARIZE = (
    "https://github.com/vwxyzjn/summarize_from_feedback_details/blob/ee77a9abc31f5338365ee087945c5bcafac7f1ca/"
)
ORIGINALS = (  # of chapter 1; of chapter 2, where code names the files of the package without its folder
    "https://github.com/openai/lm-human-preferences/blob/cbfd210bb8b08f6bc5c26878c10984b90f516c66/",
    f"{SUMMARIZE}summarize_from_feedback_details/",
    SUMMARIZE,
)

MARK = re.compile(r"\[([DTX]\d\d)\]")
REFERENCE = re.compile(
    r"(?:openai/lm-human-preferences|vwxyzjn/summarize_from_feedback_details) "
    r"((?:\S+#L\d+(?:-L\d+)?(?:, )?)+) @(?:cbfd210|ee77a9a)"
)
ROW = re.compile(r'\| <a id="(\w+)"></a>\1 \|')
LINK = re.compile(r"\[([^]]+)\]\(([^)]+)\)")
TEST_LINK = re.compile(r"\[(test_\w+)\]\((tests/test_\w+\.py)(?:#L(\d+))?\)")
GOLDEN_ROW = re.compile(r"^\| (`[\w*/]+\.(?:npz|json)`.*?) \|", re.MULTILINE)

Files = dict[str, str]  # path below the root -> text; of the golden files only the path
Places = list[tuple[str, int]]  # path and line
Comment = list[tuple[str, int, str]]  # path, line and text of each line of a comment or a docstring


@dataclass(frozen=True)
class Row:
    """A row about one detail or deviation."""

    id: str
    line: int  # 0-based
    cells: dict[str, str]  # under the names of its table's columns
    complete: bool  # whether it has as many cells as its table has columns


def read_files() -> Files:
    found = [ROOT / REGISTER, *ROOT.glob("ppo_rlhf/*.py"), *ROOT.glob("tests/test_*.py")]
    golden = [path for path in ROOT.glob("tests/golden/**/*") if path.is_file() and path.name != "README.md"]
    files = {path: path.read_text() for path in sorted(found)} | dict.fromkeys(sorted(golden), "")
    return {path.relative_to(ROOT).as_posix(): text for path, text in files.items()}


@cache
def comments(path: str, source: str) -> list[Comment]:
    """Comments and docstrings of a file, but not the module's docstring."""
    lines, module = source.split("\n"), ast.parse(source)
    found: list[Comment] = []
    previous = 0  # the line of a comment that the next line may go on with
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            alone = not lines[line - 1][:column].strip()
            if not alone or line != previous + 1:
                found.append([])
            found[-1].append((path, line, token.string))
            previous = line if alone else 0
    for node in ast.walk(module):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node is not module.body[0]:
            found.append([(path, n, lines[n - 1]) for n in range(node.lineno, (node.end_lineno or 0) + 1)])
    return found


def our_comments(files: Files) -> list[Comment]:
    return [comment for path in files if path.startswith("ppo_rlhf/") for comment in comments(path, files[path])]


def marks(files: Files) -> dict[str, Places]:
    """Where our code has the mark of each id."""
    found: dict[str, set[tuple[str, int]]] = {}
    for path, line, text in itertools.chain(*our_comments(files)):
        for name in MARK.findall(text):
            found.setdefault(name, set()).add((path, line))
    return {name: sorted(places) for name, places in found.items()}


def originals(files: Files) -> dict[str, set[str]]:
    """The references beside the marks of each id: `<file>#L1-L2`."""
    found: dict[str, set[str]] = {}
    for comment in our_comments(files):
        names: list[str] = []
        answered = False
        for _, _, text in comment:
            if new := MARK.findall(text):
                names, answered = (new if answered else names + new), False
            if reference := REFERENCE.search(text):
                answered = True
                for name in names:
                    found.setdefault(name, set()).update(reference[1].split(", "))
    return found


@cache
def tests_of(path: str, source: str) -> dict[tuple[str, str], int]:
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    return {(path, function.name): function.lineno for function in functions}


def tests(files: Files) -> dict[tuple[str, str], int]:
    """The line of each (path, test function)."""
    paths = [path for path in files if path.startswith("tests/test_")]
    return dict(itertools.chain(*(tests_of(path, files[path]).items() for path in paths)))


def rows(text: str) -> list[Row]:
    found, columns = [], []
    for number, line in enumerate(text.split("\n")):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| id |"):
            columns = cells
        elif match := ROW.match(line):
            found.append(Row(match[1], number, dict(zip(columns, cells, strict=False)), len(cells) == len(columns)))
    return found


def links(places: Places) -> str:
    return ", ".join(f"[{Path(path).name}#L{line}]({path}#L{line})" for path, line in places)


def mended(files: Files) -> str:
    """The register with the right lines of our code and of the tests, wherever there are any."""
    lines, places, test_lines = files[REGISTER].split("\n"), marks(files), tests(files)
    for row in rows(files[REGISTER]):
        if row.complete and row.id in places:
            lines[row.line] = f"| {' | '.join((row.cells | {'here': links(places[row.id])}).values())} |"

    def test_link(old: re.Match[str]) -> str:
        line = test_lines.get((old[2], old[1]))
        return f"[{old[1]}]({old[2]}#L{line})" if line else old[0]

    return TEST_LINK.sub(test_link, "\n".join(lines))


def without_repository(link: str) -> str:
    """A link to lines of an original at its fixed commit as `<file>#L1-L2`; another link as it is."""
    return next((link.removeprefix(original) for original in ORIGINALS if link.startswith(original)), link)


def row_problems(row: Row, places: Places, references: set[str]) -> Iterator[str]:
    """What is wrong with a row. places: of its marks; references: beside them."""
    if not row.complete:
        yield "does not have the columns of its table"
        return
    if not places:
        yield "has no mark in ppo_rlhf/*.py"
    elif row.cells["here"] != links(places):
        yield f"stands at {links(places)}, not at {row.cells['here']}"
    linked = {without_repository(target): label for label, target in LINK.findall(row.cells["original"])}
    for target, label in linked.items():
        if label != target.split("/")[-1] or "://" in target:
            yield f"links [{label}]({target}) as the original"
    for reference in sorted(references - set(linked)):
        yield f"has {reference} beside its mark, but not in its row"
    if row.id in DETAILS and linked and not references:
        yield "has lines of the original in its row, but none beside its mark"
    if row.id in DETAILS and not linked and row.cells["original"] != "none":
        yield "has neither lines of the original nor `none`"
    proof = row.cells["proven by"]
    if "MISSING" in proof or not TEST_LINK.search(proof):
        yield "is not proven: " + LINK.sub(r"\1", proof)


def problems(files: Files) -> list[str]:
    """Where the register and code, tests and golden files differ."""
    text, places, references, test_lines = files[REGISTER], marks(files), originals(files), tests(files)
    found: list[str] = []
    for row in rows(text):
        wrong = row_problems(row, places.get(row.id, []), references.get(row.id, set()))
        found += [f"{row.id} {problem}" for problem in wrong]
    names = [row.id for row in rows(text)]
    without_row = re.findall(r"^([DT]\d\d) has no row", text, re.MULTILINE)
    found += [f"{name} is marked at {links(places[name])}, but has no row" for name in places if name not in names]
    found += [f"{name} has no row" for name in DETAILS if name not in [*names, *without_row, *places]]
    found += [f"{name} has two rows" for name in set(names) if [*names, *without_row].count(name) > 1]
    for name, path, line in TEST_LINK.findall(text):
        if (path, name) not in test_lines:
            found.append(f"{path} has no {name}")
        elif line != str(test_lines[path, name]):
            found.append(f"{name} stands in line {test_lines[path, name]} of {path}, not in {line}")
    golden = [path.removeprefix("tests/golden/") for path in files if path.startswith("tests/golden/")]
    patterns = {pattern.strip("`") for cell in GOLDEN_ROW.findall(text) for pattern in cell.split(", ")}
    found += [f"tests/golden/{name} has no row" for name in golden if not any(fnmatch(name, p) for p in patterns)]
    found += [f"tests/golden has no {p}" for p in sorted(patterns) if not any(fnmatch(name, p) for name in golden)]
    return found


def main() -> int:
    files = read_files()
    old, new = files[REGISTER], mended(files)
    for before, after in zip(old.split("\n"), new.split("\n"), strict=True):
        for (label, was), (_, now) in zip(LINK.findall(before), LINK.findall(after), strict=False):
            if was != now:
                print(f"mended: {label} {was} -> {now}")
    (ROOT / REGISTER).write_text(new)
    left = problems(files | {REGISTER: new})
    print("\n".join(left) or f"{REGISTER} is right")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
