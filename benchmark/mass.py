"""How much there is to read, in tokens of Python.

    python benchmark/mass.py                        # of ppo_rlhf, benchmark and tests
    python benchmark/mass.py ppo_rlhf               # of each file

Comments and docstrings are no tokens, so that nobody saves by deleting an explanation, and nobody gains by folding
lines.
"""

import io
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAYOUT = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER"}


def tokens_of(source: str) -> int:
    """The tokens of a module; a statement that is a text alone is a docstring."""
    count = depth = 0
    statement: list[int] = []  # kinds of the tokens of the current one
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        name = tokenize.tok_name[token.type]
        # From Python 3.12 on, an f-string has tokens inside; here it is one text, as before.
        depth += (name == "FSTRING_START") - (name == "FSTRING_END")
        if name == "FSTRING_END" and not depth:
            statement.append(tokenize.STRING)
        elif depth:
            continue
        elif token.type in (tokenize.NEWLINE, tokenize.ENDMARKER):
            if set(statement) != {tokenize.STRING}:
                count += len(statement)
            statement = []
        elif name not in LAYOUT:
            statement.append(token.type)
    return count


def tokens_of_files(folder: str) -> dict[str, int]:
    """The tokens of each Python file below a folder that git knows."""
    command = ["git", "-C", str(ROOT), "ls-files", "--", folder]
    names = subprocess.check_output(command, text=True).split()
    return {name: tokens_of((ROOT / name).read_text()) for name in names if name.endswith(".py")}


if __name__ == "__main__":
    words = sys.argv[1:]
    for folder in words or ("ppo_rlhf", "benchmark", "tests"):
        counts = tokens_of_files(folder)
        if words:
            for name, count in sorted(counts.items(), key=lambda item: -item[1]):
                print(f"{count:8,} {name}")
        print(f"{sum(counts.values()):8,} tokens in {len(counts)} files of {folder}")
