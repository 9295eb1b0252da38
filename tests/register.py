"""The register docs/reference: for every detail, why it exists, where our code has it and which tests prove it.

    python tests/register.py

updates docs/reference/: the line numbers of our code from the marks in ppo_rlhf/**/*.py, those of the tests from
the test files, and the links to the rows of the atlas. In README.md it updates how many lines a script has, to the
nearest fifty. It prints which pages it changed and what only a person can fix; if there is any, it exits with 1.

A mark is `[D54]` in a comment, or in the docstring of a function, a class or a field. A module's docstring has no
marks, so it can speak about them. The lines of the original follow a mark:

    # [D52] The score counts once, on the last token.   lm_human_preferences/train_policy.py#L149-L154

They are at the end of a line, after two spaces or more, or directly after the mark. They belong to the marks of their
line or, on a line without any, to those of the nearest line above. Several are separated by commas.
The module's docstring names repository and commit, as `openai/lm-human-preferences at commit cbfd210`. If it names
several repositories, all but one have a short name there, as in `TRL is huggingface/trl at commit f2cd577` or `TRL:
huggingface/trl @f2cd577`, and their references begin with it: `TRL trl/experimental/ppo/ppo_trainer.py#L758`. A path
may lack its first folders.

docs/reference/README.md describes the entries.
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
README = "README.md"
PAGES = "docs/reference/"
GOLDEN = ("tests/golden/", "ppo_rlhf/check/golden/")
TO_ROOT = "../../"  # from a page
FIELDS = ["why", "without it", "measured", "original", "here", "proven by"]
OPTIONAL = ("without it", "measured")
ORIGINALS = {
    "openai/lm-human-preferences": "cbfd210bb8b08f6bc5c26878c10984b90f516c66",
    "vwxyzjn/summarize_from_feedback_details": "ee77a9abc31f5338365ee087945c5bcafac7f1ca",
    "huggingface/trl": "f2cd57710ae345ea6428ae95363267fcf38a3dc8",
    "verl-project/verl": "b178a3cd56f58b2d502255daba591e92833930a7",
    "NVlabs/GDPO": "b080e63d0126870ad08acc8ebc3f04b728175a9e",
    "PrimeIntellect-ai/prime-rl": "559b44772e471d1538537b8805cc77f3824a5e64",
}

MARK = re.compile(r"\[([DTVX]\d{2,3})\]")
LINES = r"[\w./-]+#L\d+(?:-L\d+)?"
SHORT_NAME = r"[A-Z]{2,}"
SHORT = rf"(?:(?:{SHORT_NAME}|{'|'.join(ORIGINALS)}) )?{LINES}"
REFERENCES = re.compile(rf"(?:\s\s|\] |^\W*)({SHORT}(?:, {SHORT})*)\W*$")
BASE = re.compile(
    rf"(?:\b({SHORT_NAME})(?:\s+is|:)\s+)?({'|'.join(ORIGINALS)})\s+(?:at\s+commit\s+|@)([0-9a-f]{{7,40}})\b"
)
HEAD = re.compile(r'<a id="(\w+)"></a>\*\*(\w+)\*\* ')
FIELD = re.compile(r"- \*([\w ]+)\*: (.*)")
LINK = re.compile(r"\[([^]]+)\]\(([^)]+)\)")
TEST_LINK = re.compile(rf"\[(test_\w+)\]\({re.escape(TO_ROOT)}(tests/test_\w+\.py)(?:#L(\d+))?\)")
GOLDEN_ROW = re.compile(r"^\| (`[\w*/.]+\.(?:npz|jsonl?|xz)`.*?) \|", re.MULTILINE)
LENGTH = re.compile(r"(\]\((ppo_rlhf/[\w/]+\.py)\), )([\d,]+)( lines)")

Files = dict[str, str]  # path below the root -> text; of the golden files only the path
Places = list[tuple[str, int]]  # path and line
Comment = list[tuple[str, int, str]]  # path, line and text of each line of a comment or a docstring
Reference = tuple[str, str]  # repository; `<file>#L1-L2`


@dataclass(frozen=True)
class Row:
    """What a page says about one detail or deviation."""

    id: str
    page: str
    line: int  # 0-based; of the claim
    fields: dict[str, str]
    lines: dict[str, int]  # of the fields
    complete: bool  # whether it has its fields, in their order


# ---- The code --------------------------------------------------------------------------------------------------


def read_files() -> Files:
    found = [ROOT / README, *ROOT.glob(f"{PAGES}*.md"), *ROOT.glob("ppo_rlhf/**/*.py"), *ROOT.glob("tests/test_*.py")]
    golden = [path for folder in GOLDEN for path in ROOT.glob(f"{folder}**/*")]
    golden = [path for path in golden if path.is_file() and path.name != "README.md"]
    files = {path: path.read_text() for path in sorted(found)} | dict.fromkeys(sorted(golden), "")
    return {path.relative_to(ROOT).as_posix(): text for path, text in files.items()}


def ours(files: Files) -> list[str]:
    return [path for path in files if path.startswith("ppo_rlhf/") and path.endswith(".py")]


def pages(files: Files) -> list[str]:
    names = ("README", "chapter1", "chapter2", "chapter3", "golden")
    return [path for path in (f"{PAGES}{name}.md" for name in names) if path in files]


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
    return [comment for path in ours(files) for comment in comments(path, files[path])]


def marks(files: Files) -> dict[str, Places]:
    """The places of the marks of each id in our code."""
    found: dict[str, set[tuple[str, int]]] = {}
    for path, line, text in itertools.chain(*our_comments(files)):
        for name in MARK.findall(text):
            found.setdefault(name, set()).add((path, line))
    return {name: sorted(places) for name, places in found.items()}


@cache
def bases(source: str) -> dict[str, tuple[str, str]]:
    """Repository and commit of each name in the module's docstring; of "" if only one repository can be meant."""
    docstring = ast.get_docstring(ast.parse(source)) or ""
    named = [(short, (repository, commit)) for short, repository, commit in BASE.findall(docstring)]
    found = {name: base for short, base in named for name in (short, base[0]) if name}
    nameless = {base for short, base in named if not short} or {base for _, base in named}
    return found | ({"": nameless.pop()} if len(nameless) == 1 else {})


def references_in(text: str, known: dict[str, tuple[str, str]]) -> list[Reference]:
    """The references at the end of a line, with an empty repository if it is unknown."""
    found = []
    if match := REFERENCES.search(text):
        for reference in match[1].split(", "):
            name, _, lines = reference.rpartition(" ")
            found.append((known.get(name, ("", ""))[0], lines))
    return found


def originals(files: Files) -> dict[str, set[Reference]]:
    """The references that belong to the marks of each id."""
    found: dict[str, set[Reference]] = {}
    for comment in our_comments(files):
        known = bases(files[comment[0][0]])
        nearest: list[str] = []
        for _, _, text in comment:
            nearest = MARK.findall(text) or nearest
            for name, reference in itertools.product(nearest, references_in(text, known)):
                found.setdefault(name, set()).add(reference)
    return found


def reference_problems(files: Files) -> Iterator[str]:
    """References that cannot be read, or of another commit than the register's."""
    for path in ours(files):
        known = bases(files[path])
        for repository, commit in sorted(set(known.values())):
            if not ORIGINALS[repository].startswith(commit):
                expected = ORIGINALS[repository][: len(commit)]
                yield f"{path} is about {repository} at commit {commit}, the register about {expected}"
        for _, line, text in itertools.chain(*comments(path, files[path])):
            references = references_in(text, known)
            if not references and re.search(LINES, text):
                yield f"{path} has a reference in line {line} that cannot be read"
            if any(not repository for repository, _ in references):
                yield f"{path} does not name the repository of the reference in line {line}"


@cache
def tests_of(path: str, source: str) -> dict[tuple[str, str], int]:
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    return {(path, function.name): function.lineno for function in functions}


def tests(files: Files) -> dict[tuple[str, str], int]:
    """The line of each (path, test function)."""
    paths = [path for path in files if path.startswith("tests/test_")]
    return dict(itertools.chain(*(tests_of(path, files[path]).items() for path in paths)))


# ---- The pages -------------------------------------------------------------------------------------------------


def rows(files: Files) -> list[Row]:
    found = []
    for page in pages(files):
        lines = files[page].split("\n")
        heads = [number for number, line in enumerate(lines) if HEAD.match(line)]
        for head, end in itertools.pairwise([*heads, len(lines)]):
            name, shown = HEAD.match(lines[head]).groups()
            fields, places, names = {}, {}, []
            for number in range(head + 1, end):
                if lines[number].startswith("#"):
                    break
                if match := FIELD.match(lines[number]):
                    names.append(match[1])
                    fields[match[1]], places[match[1]] = match[2], number
            complete = names == [field for field in FIELDS if field in names or field not in OPTIONAL]
            found.append(Row(name, page, head, fields, places, complete and shown == name))
    return found


def links(places: Places) -> str:
    return ", ".join(f"[{path.removeprefix('ppo_rlhf/')}#L{line}]({TO_ROOT}{path}#L{line})" for path, line in places)


def nearest_fifty(text: str) -> str:
    return f"{max(50, round(len(text.splitlines()) / 50) * 50):,}"


def measurements(files: Files) -> dict[str, list[str]]:
    """Of each id, links to the rows of the atlas in which its detail is changed."""
    found: dict[str, list[str]] = {}
    for row in re.findall(r"^\| \[.*", files.get(f"{PAGES}atlas.md", ""), re.MULTILINE):
        (name, _), (anchor, change) = (
            LINK.search(row).groups(),
            re.search(r'<a id="([^"]+)"></a>(`[^`]+`)', row).groups(),
        )
        found.setdefault(name, []).append(f"[{change}](atlas.md#{anchor})")
    return found


def updated(files: Files) -> Files:
    """README and pages with the current lines of our code and of the tests, and links to the atlas."""
    places, test_lines, measured = marks(files), tests(files), measurements(files)
    lines = {page: files[page].split("\n") for page in pages(files)}
    for row in rows(files):
        if "here" in row.fields and row.id in places:
            lines[row.page][row.lines["here"]] = f"- *here*: {links(places[row.id])}"
        if row.complete and row.id in measured:
            others = [
                f"[{name}]({link})" for name, link in LINK.findall(row.fields.get("measured", "")) if "#" in link
            ]
            kept = [link for link in others if "(atlas.md" not in link]
            text = f"- *measured*: {', '.join([*kept, *measured[row.id]])}"
            before = next(name for name in ("measured", "without it", "why") if name in row.fields)
            line = lines[row.page][row.lines[before]]
            lines[row.page][row.lines[before]] = text if before == "measured" else f"{line}\n{text}"

    def test_link(old: re.Match[str]) -> str:
        line = test_lines.get((old[2], old[1]))
        return f"[{old[1]}]({TO_ROOT}{old[2]}#L{line})" if line else old[0]

    def length(old: re.Match[str]) -> str:
        return f"{old[1]}{nearest_fifty(files[old[2]])}{old[4]}" if old[2] in files else old[0]

    new = {page: TEST_LINK.sub(test_link, "\n".join(text)) for page, text in lines.items()}
    return files | new | {README: LENGTH.sub(length, files[README])}


def repository_of(link: str) -> Reference | None:
    """Of a link to lines of an original at its fixed commit: repository and `<file>#L1-L2`."""
    for repository, commit in ORIGINALS.items():
        base = f"https://github.com/{repository}/blob/{commit}/"
        if link.startswith(base):
            return repository, link.removeprefix(base)
    return None


def same_lines(reference: Reference, linked: Reference) -> bool:
    """Whether they name the same lines; the reference may lack the first folders."""
    return reference[0] == linked[0] and f"/{linked[1]}".endswith(f"/{reference[1]}")


def row_problems(row: Row, places: Places, references: set[Reference]) -> Iterator[str]:
    """What is wrong with a row. places: of its marks; references: those that belong to the marks."""
    if not row.complete:
        yield f"does not have its fields in {row.page}, in their order: {', '.join(FIELDS)}"
        return
    for name, text in row.fields.items():
        if not re.search(r"\w", text):
            yield f"has an empty field: {name}"
    if not places:
        yield "has no mark in ppo_rlhf/**/*.py"
    elif row.fields["here"] != links(places):
        yield f"is marked at {links(places)}, but its row says {row.fields['here']}"
    shown = [(label, target) for label, target in LINK.findall(row.fields["original"]) if "://" in target]
    for label, target in shown:
        if label != target.split("/")[-1] or not repository_of(target):
            yield f"links [{label}]({target}) as the original"
    linked = {reference for _, target in shown if (reference := repository_of(target))}
    for repository, lines in sorted(references):
        if not any(same_lines((repository, lines), other) for other in linked):
            yield f"has {lines} of {repository} at its mark, but not in its row"
    if row.id[0] != "X" and linked and not references:
        yield "has lines of the original in its row, but none at its mark"
    if row.id[0] != "X" and not linked and row.fields["original"] != "none":
        yield "has neither lines of the original nor `none`"
    proof = row.fields["proven by"]
    if "MISSING" in proof or not TEST_LINK.search(proof):
        yield "is not proven: " + LINK.sub(r"\1", proof)


def problems(files: Files) -> list[str]:
    """Differences between the register and the code, the tests, the golden files and the results."""
    text = "\n".join(files[page] for page in pages(files))
    places, references, test_lines = marks(files), originals(files), tests(files)
    found = list(reference_problems(files))
    for row in rows(files):
        wrong = row_problems(row, places.get(row.id, []), references.get(row.id, set()))
        found += [f"{row.id} {problem}" for problem in wrong]
    names = [row.id for row in rows(files)]
    found += [f"{name} is marked at {links(places[name])}, but has no row" for name in places if name not in names]
    found += [f"{name} has two rows" for name in set(names) if names.count(name) > 1]
    fields = {row.id: row.fields for row in rows(files)}
    for name, changes in measurements(files).items():
        said = fields.get(name, {}).get("measured", "")
        found += [f"{name} does not name {change} of the atlas" for change in changes if change not in said]
    for name, path, line in TEST_LINK.findall(text):
        if (path, name) not in test_lines:
            found.append(f"{path} has no {name}")
        elif line != str(test_lines[path, name]):
            found.append(f"{name} is in line {test_lines[path, name]} of {path}, not in {line}")
    for _, path, lines, _ in LENGTH.findall(files[README]):
        if path not in files:
            found.append(f"{README} names {path}, which does not exist")
        elif lines != nearest_fifty(files[path]):
            found.append(f"{path} has about {nearest_fifty(files[path])} lines, not {lines}")
    golden = {path: path.partition("golden/")[2] for path in files if path.startswith(GOLDEN)}
    patterns = {pattern.strip("`") for cell in GOLDEN_ROW.findall(text) for pattern in cell.split(", ")}
    found += [f"{path} has no row" for path in golden if not any(fnmatch(golden[path], p) for p in patterns)]
    present = golden.values()
    found += [
        f"no golden file is called {p}" for p in sorted(patterns) if not any(fnmatch(name, p) for name in present)
    ]
    return found


def main() -> int:
    old = read_files()
    new = updated(old)
    for path in (README, *pages(old)):
        if old[path] != new[path]:
            (ROOT / path).write_text(new[path])
            print(f"updated: {path}")
    left = problems(new)
    print("\n".join(left) or f"{PAGES} agrees with code, tests and results")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
