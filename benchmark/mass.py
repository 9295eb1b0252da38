"""How much there is to read: tokens of Python, folder by folder.

    python benchmark/mass.py                        # tokens of ppo_rlhf, benchmark and tests
    python benchmark/mass.py --files ppo_rlhf       # of each file

Comments and docstrings are no tokens, so that nobody saves by deleting an explanation, and nobody gains by folding
lines.
"""

import io
import subprocess
import sys
import tokenize
from pathlib import Path

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


def main() -> None:
    words = sys.argv[1:]
    for folder in [word for word in words if word != "--files"] or FOLDERS:
        counts = tokens_of_files(folder)
        if "--files" in words:
            for name, count in sorted(counts.items(), key=lambda item: -item[1]):
                print(f"{count:8,} {name}")
        print(f"{sum(counts.values()):8,} tokens in {len(counts)} files of {folder}")


if __name__ == "__main__":
    main()
