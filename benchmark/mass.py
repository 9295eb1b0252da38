"""How much there is to read: tokens of Python, folder by folder, and what a script runs outside its own page.

    python benchmark/mass.py                        # tokens of ppo_rlhf, benchmark and tests
    python benchmark/mass.py ppo_rlhf               # of each file
    python benchmark/mass.py --run ppo_rlhf/train_reward.py --preset tales --num_train 64 --batch_size 32 \\
        --normalize_samples 64

Comments and docstrings are no tokens, so that nobody saves by deleting an explanation, and nobody gains by folding
lines. A run is counted by the functions of ppo_rlhf that it enters in other files than its own; give few episodes.
"""

import importlib
import io
import runpy
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LAYOUT = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER"}


def tokens_of(source: str) -> int:
    """The tokens of a module; a statement that is a text alone is a docstring."""
    count = 0
    statement: list[int] = []  # kinds of the tokens of the current one
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NEWLINE, tokenize.ENDMARKER):
            if set(statement) != {tokenize.STRING}:
                count += len(statement)
            statement = []
        elif tokenize.tok_name[token.type] not in LAYOUT:
            statement.append(token.type)
    return count


def tokens_of_files(folder: str) -> dict[str, int]:
    """The tokens of each Python file below a folder that git knows."""
    command = ["git", "-C", str(ROOT), "ls-files", "--", folder]
    names = subprocess.check_output(command, text=True).split()
    return {name: tokens_of((ROOT / name).read_text()) for name in names if name.endswith(".py")}


def print_outside(script: Path) -> None:
    """Run a script with the words of sys.argv; print the functions and lines that it enters outside its own file."""
    package = str(ROOT / "ppo_rlhf")
    entered = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        entered.add(frame.f_code)

    for library in ("torch", "transformers", "accelerate", "datasets", "torch.utils.tensorboard"):
        importlib.import_module(library)  # once sys.setprofile looks on, this takes three times as long
    sys.setprofile(note)
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.setprofile(None)
    functions, lines = 0, Counter()
    for code in entered:
        file = code.co_filename
        # Comprehensions and lambdas are part of a function; bodies of modules and classes are none.
        if file.startswith(package) and file != str(script) and code.co_name[0] != "<" and code.co_flags & 2:
            functions += 1
            lines[file] += max(line for *_, line in code.co_lines() if line) - code.co_firstlineno + 1
    for file, count in lines.most_common():
        print(f"{count:6,} lines  {file}")
    print(f"outside: {functions} functions, {lines.total()} lines, {len(lines)} files")


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["--run"]:
        sys.argv = words[1:]
        print_outside(Path(words[1]).resolve())
        return
    for folder in words or ("ppo_rlhf", "benchmark", "tests"):
        counts = tokens_of_files(folder)
        if words:
            for name, count in sorted(counts.items(), key=lambda item: -item[1]):
                print(f"{count:8,} {name}")
        print(f"{sum(counts.values()):8,} tokens in {len(counts)} files of {folder}")


if __name__ == "__main__":
    main()
