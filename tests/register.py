"""The register docs/reference: for every detail, why it exists, where our code has it and which tests prove it.

    python tests/register.py

updates the lines *here* of docs/reference/chapter*.md from the marks in ppo_rlhf/**/*.py. These lines name the files
and the functions or classes that have the marks, so the pages change only when a mark moves to another function. Then
it prints what only a person can fix; if there is anything, it exits with 1.

A mark is `[D54]`, in a comment or a docstring. A module's docstring has no marks, so it can speak about them. The
lines of the original follow a mark, on its line or below it, before the next one:

    # [D52] The score counts once, on the last token.   lm_human_preferences/train_policy.py#L149-L154

They are names of files at the commit that the module's docstring names, as `openai/lm-human-preferences at commit
cbfd210`. A path may lack its first folders.

docs/reference/README.md describes the entries.
"""

import ast
import re
import sys
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = tuple(f"docs/reference/{name}.md" for name in ("chapter1", "chapter2", "chapter3", "golden"))
GOLDEN = ("tests/golden/", "ppo_rlhf/check/golden/")
TO_ROOT = "../../"  # from a page
FIELDS = ("why", "original", "here", "proven by")
ORIGINALS = {
    "openai/lm-human-preferences": "cbfd210bb8b08f6bc5c26878c10984b90f516c66",
    "vwxyzjn/summarize_from_feedback_details": "ee77a9abc31f5338365ee087945c5bcafac7f1ca",
    "huggingface/trl": "f2cd57710ae345ea6428ae95363267fcf38a3dc8",
    "verl-project/verl": "b178a3cd56f58b2d502255daba591e92833930a7",
    "NVlabs/GDPO": "b080e63d0126870ad08acc8ebc3f04b728175a9e",
    "PrimeIntellect-ai/prime-rl": "559b44772e471d1538537b8805cc77f3824a5e64",
}

MARK = re.compile(r"\[([DTVX]\d{2,3})\]")
LINES = re.compile(r"[\w./-]+\.\w+#L\d+(?:-L\d+)?")
COMMIT = re.compile(rf"({'|'.join(ORIGINALS)})\s+(?:at\s+commit\s+|@)([0-9a-f]{{7,40}})\b")
ROW = re.compile(r'<a id="([DTVX]\d+)"></a>\*\*\1\*\* .*?(?=<a id=|\n#|\Z)', re.DOTALL)
LINK = re.compile(r"\[([^]]+)\]\((https://[^)]+#L[^)]+)\)")
TEST_LINK = re.compile(rf"\[(test_\w+)\]\({re.escape(TO_ROOT)}(tests/\w+/test_\w+\.py)\)")
ATLAS_ROW = re.compile(r'^\| \[(\w+)\].*<a id="([^"]+)">', re.MULTILINE)
GOLDEN_ROW = re.compile(r"^\| (`[\w*/.]+\.(?:npz|jsonl?|xz)`.*?) \|", re.MULTILINE)

Files = dict[str, str]  # path below the root -> text; of the golden files only the path


def read_files() -> Files:
    paths = [*ROOT.glob("docs/reference/*.md"), *ROOT.glob("ppo_rlhf/**/*.py"), *ROOT.glob("tests/*/test_*.py")]
    files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(paths)}
    golden = [path for folder in GOLDEN for path in sorted(ROOT.glob(f"{folder}**/*.*")) if path.suffix != ".md"]
    return files | {path.relative_to(ROOT).as_posix(): "" for path in golden}


@cache
def marks_of(source: str) -> list[tuple[str, str, list[str]]]:
    """Each mark of a module: its id, the function, class or method around it, and its lines of the original."""
    module, lines = ast.parse(source), source.splitlines()
    owners = [""] * len(lines)

    def own(nodes: list[ast.stmt], outer: str) -> None:
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                name = outer + node.name
                owners[node.lineno - 1 : node.end_lineno] = [name] * (node.end_lineno - node.lineno + 1)
                own(node.body if isinstance(node, ast.ClassDef) else [], f"{name}.")

    own(module.body, "")
    found = []
    nearest: list[str] = []  # marks of this comment
    for number, line in enumerate(lines):
        if number >= (module.body[0].end_lineno if ast.get_docstring(module) else 0):
            goes_on = line.lstrip().startswith("#") and lines[number - 1].lstrip().startswith("#")
            nearest = MARK.findall(line) or (nearest if goes_on else [])
            found += [(name, owners[number], LINES.findall(line)) for name in nearest]
    return found


def marks(files: Files) -> tuple[dict[str, str], dict[str, set[str]]]:
    """Of each id that our code marks: what its line *here* says, and the lines of the original."""
    places: dict[str, dict[str, list[str]]] = {}  # id -> file -> names in it, in their order
    originals: dict[str, set[str]] = {}
    for path in files:
        for name, owner, lines in marks_of(files[path]) if path.startswith("ppo_rlhf/") and files[path] else []:
            owners = places.setdefault(name, {}).setdefault(path, [])
            if owner and f"`{owner}`" not in owners:
                owners.append(f"`{owner}`")
            originals.setdefault(name, set()).update(lines)
    here = {}
    for name, found in places.items():
        links = {path: f"[{path.removeprefix('ppo_rlhf/')}]({TO_ROOT}{path})" for path in found}
        here[name] = "; ".join(": ".join([links[path], ", ".join(found[path])]).removesuffix(": ") for path in found)
    return here, originals


def updated(files: Files) -> Files:
    """The pages with the current places of our marks."""
    here, _ = marks(files)

    def row(old: re.Match[str]) -> str:
        return re.sub(r"(?<=\n- \*here\*: ).*", lambda said: here.get(old[1], said[0]), old[0])

    return files | {page: ROW.sub(row, files[page]) for page in PAGES}


def row_problems(name: str, row: str, originals: set[str] | None) -> list[str]:
    """What is wrong with a row. originals: lines of the original at its marks; None if there is no mark."""
    fields = dict(re.findall(r"\n- \*([\w ]+)\*: (.*\w.*)", row))
    found = [f"has no line {field}" for field in FIELDS if field not in fields]
    if originals is None:
        found.append("has no mark in ppo_rlhf/**/*.py")
    ends = []
    for label, target in LINK.findall(fields.get("original", "")):
        bases = tuple(f"https://github.com/{project}/blob/{commit}/" for project, commit in ORIGINALS.items())
        if target.startswith(bases) and target.endswith(f"/{label}"):
            ends.append(target)
        else:
            found.append(f"links [{label}]({target}) as the original")
    for lines in sorted(originals or ()):
        if not any(end.endswith(f"/{lines}") for end in ends):
            found.append(f"has {lines} at its mark, but not in its row")
    if ends and not originals and name[0] != "X":
        found.append("has lines of the original in its row, but none at its mark")
    proof = fields.get("proven by", "")
    if "MISSING" in proof or (proof and not TEST_LINK.search(proof)):
        found.append(f"is not proven: {proof}")
    return found


def problems(files: Files) -> list[str]:
    """Differences of the register from code, tests, golden files and the atlas that a person must settle."""
    here, originals = marks(files)
    text = "\n".join(files[page] for page in PAGES)
    rows = {row[1]: row[0] for row in ROW.finditer(text)}
    names = [row[1] for row in ROW.finditer(text)]
    found = [f"{name} has two rows" for name in rows if names.count(name) > 1]
    found += [f"{name} is marked in {here[name]}, but has no row" for name in here if name not in rows]
    for name, row in rows.items():
        found += [f"{name} {problem}" for problem in row_problems(name, row, originals.get(name))]
    for name, anchor in ATLAS_ROW.findall(files["docs/reference/atlas.md"]):
        if f"(atlas.md#{anchor})" not in rows.get(name, ""):
            found.append(f"{name} does not name {anchor} of the atlas")
    for name, path in TEST_LINK.findall(text):
        if f"def {name}(" not in files.get(path, ""):
            found.append(f"{path} has no {name}")
    for path in files:
        for project, commit in COMMIT.findall(files[path]) if path.startswith("ppo_rlhf/") else []:
            if not ORIGINALS[project].startswith(commit):
                found.append(f"{path} is about {project} at commit {commit}, the register is not")
    golden = {path.partition("golden/")[2]: path for path in files if path.startswith(GOLDEN)}
    patterns = {pattern.strip("`") for cell in GOLDEN_ROW.findall(text) for pattern in cell.split(", ")}
    found += [f"{golden[name]} has no row" for name in golden if not any(fnmatch(name, p) for p in patterns)]
    return found + [f"no golden file is called {p}" for p in patterns if not any(fnmatch(name, p) for name in golden)]


def main() -> int:
    old = read_files()
    new = updated(old)
    for page in PAGES:
        if old[page] != new[page]:
            (ROOT / page).write_text(new[page])
            print(f"updated: {page}")
    left = problems(new)
    print("\n".join(left) or "docs/reference agrees with code, tests, golden files and the atlas")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
