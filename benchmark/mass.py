"""How much there is to read: tokens of Python, folder by folder, and what a script runs outside its own page.

    python benchmark/mass.py                                        # tokens of ppo_rlhf, benchmark and tests
    python benchmark/mass.py --files ppo_rlhf                       # of each file
    python benchmark/mass.py --run ppo_rlhf/train_reward.py --preset tales --num_train 64 --batch_size 32 \\
        --normalize_samples 64

Comments and docstrings are no tokens, so that nobody saves by deleting an explanation, and nobody gains by folding
lines. A run is counted by the functions of ppo_rlhf that it enters, in the script's own file and in others; give few
episodes.
"""

import io
import runpy
import subprocess
import sys
import threading
import tokenize
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ["ppo_rlhf", "benchmark", "tests"]
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def tokens_of(source: str) -> int:
    """The tokens of a module; a statement that is a text alone is a docstring."""
    count = 0
    statement: list[int] = []  # kinds of the tokens of the current one
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NEWLINE, tokenize.ENDMARKER):
            if set(statement) != {tokenize.STRING}:
                count += len(statement)
            statement = []
        elif token.type not in LAYOUT:
            statement.append(token.type)
    return count


def tokens_of_files(folder: str) -> dict[str, int]:
    """The tokens of each Python file below a folder that git knows."""
    command = ["git", "-C", str(ROOT), "ls-files", "--", folder]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return {name: tokens_of((ROOT / name).read_text()) for name in names if name.endswith(".py")}


def functions_of_run(script: Path, words: list[str]) -> dict[str, Counter[str]]:
    """Run a script with these words; the functions of ppo_rlhf that it enters, and their lines, by file."""
    package = f"{ROOT / 'ppo_rlhf'}/"
    entered: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package) and code.co_flags & 2:  # no module, no class
            entered.add(code)

    sys.argv = [str(script), *words]
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    found: dict[str, Counter[str]] = {}
    for code in entered:
        if not code.co_name.startswith("<"):  # comprehensions and lambdas are part of a function
            last = max(line for *_, line in code.co_lines() if line)
            counts = found.setdefault(code.co_filename.removeprefix(package), Counter())
            counts.update(functions=1, lines=last - code.co_firstlineno + 1)
    return found


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["--run"]:
        script = Path(words[1]).resolve()
        found = functions_of_run(script, words[2:])
        own = found.pop(str(script.relative_to(ROOT / "ppo_rlhf")))
        for file, counts in sorted(found.items(), key=lambda item: -item[1]["lines"]):
            print(f"{counts['functions']:5} functions {counts['lines']:6,} lines  {file}")
        outside = sum(found.values(), Counter())
        print(f"{script.name}: {own['functions']} functions with {own['lines']:,} lines")
        print(f"outside: {outside['functions']} functions with {outside['lines']:,} lines in {len(found)} files")
        return
    for folder in [word for word in words if word != "--files"] or FOLDERS:
        counts = tokens_of_files(folder)
        if "--files" in words:
            for name, count in sorted(counts.items(), key=lambda item: -item[1]):
                print(f"{count:8,} {name}")
        print(f"{sum(counts.values()):8,} tokens in {len(counts)} files of {folder}")


if __name__ == "__main__":
    main()
