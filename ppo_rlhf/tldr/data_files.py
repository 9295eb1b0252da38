"""Rows of data, each with its place for messages, from local files and from the hub; and token ids as one tensor.

.jsonl                   an object per line; the file may be compressed by xz
.parquet, .csv, .json    whatever the library `datasets` reads of them
<owner>/<name>           a data set on the hub, or <owner>/<name>:<configuration>
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset

from ppo_rlhf import train_reward
from ppo_rlhf.tldr.chat_templates import Messages
from ppo_rlhf.train_policy import HELD_OUT, InputError, input_errors, read_text

Row = tuple[str, dict[str, Any]]  # its place, and its columns
FORMATS = (".jsonl", ".parquet", ".csv", ".json")
ON_HUB = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")  # owner, name and configuration of a data set
# Data sets on the hub have these names for a split; the first that is there counts.
SPLIT_NAMES = {
    "train": ("train", "train_prefs"),
    "validation": ("validation", "test", "test_prefs"),
    "test": ("test", "test_prefs", "validation"),
}

# ---- Files and the hub -----------------------------------------------------------------------------------------


def is_on_hub(source: str) -> bool:
    """Whether this names a data set on the hub."""
    is_file = source.endswith(FORMATS) or Path(source).exists()
    return ON_HUB.fullmatch(source) is not None and not is_file


def read_file(path: Path, argument: str) -> list[Row]:
    """The rows of a file in one of FORMATS. argument: the one that names it, such as task.posts."""
    with input_errors(f"--{argument} {path} cannot be read"):
        if path.suffix != ".jsonl":
            return list(with_places(load_dataset(path.suffix[1:], data_files=str(path), split="train"), f"{path},"))
        rows = []
        for number, line in enumerate(read_text(path).split("\n"), 1):
            where = f"{path}, line {number}"
            if line.strip():
                with input_errors(f"--{argument} {where}"):
                    rows.append((where, {**json.loads(line)}))
        return rows


def load_split(source: str, argument: str, split: str, remedy: str) -> Iterable[Row]:
    """Rows of a file in one of FORMATS or of a data set on the hub. split: train, validation or test.

    Without a split for tests, the last of every HELD_OUT rows is held out, for validation and for tests. remedy: what
    would do where the source is not there, or has too few rows for that.
    """
    what = f"--{argument} {source}"
    if not is_on_hub(source):
        return hold_out(read_file(Path(source), argument), what, split, remedy)
    with input_errors(f"{what} cannot be read; {remedy}"):
        name, _, configuration = source.partition(":")
        found = load_dataset(name, configuration or None)
    if len(found) == 1:
        ((name, rows),) = found.items()
        return hold_out(list(with_places(rows, f"{source}, {name}")), what, split, remedy)
    names = [name for name in SPLIT_NAMES[split] if name in found]
    if not names:
        wanted = " or ".join(SPLIT_NAMES[split])
        raise InputError(f"{what} has no split {wanted}, but {', '.join(found)}; {remedy}")
    return with_places(found[names[0]], f"{source}, {names[0]}")


def hold_out(rows: Sequence[Row], what: str, split: str, remedy: str) -> Sequence[Row]:
    """The rows of a split of a source that has only one. what: the source, for messages."""
    if split != "train" and len(rows) < HELD_OUT:
        raise InputError(
            f"{what} has {len(rows)} rows; every {HELD_OUT}th row is held out, so give {HELD_OUT} rows or more, "
            f"or {remedy}"
        )
    return [row for i, row in enumerate(rows) if (i % HELD_OUT == HELD_OUT - 1) == (split != "train")]


def with_places(rows: Iterable[dict[str, Any]], where: str) -> Iterable[Row]:
    return ((f"{where} row {number}", row) for number, row in enumerate(rows, 1))


# ---- Columns: what is wrong in a row is a ValueError, or whatever Python says of it ----------------------------


def value_at(row: Mapping[str, Any], column: str) -> Any:
    """What a row has under a column, or under one within another, as a name with dots says; None if nothing."""
    value: Any = row
    for part in [column] if column in row else column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def find(row: Mapping[str, Any], *columns: str) -> tuple[str, Any]:
    """The first of these columns that a row has, and what is in it."""
    for column in columns:
        if (value := value_at(row, column)) is not None:
            return column, value
    raise ValueError(f"it has nothing under {columns[0]!r}, but {', '.join(map(repr, row))}")


def as_text(value: Any) -> str:
    """A text or a number as a text."""
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value != value:
        raise ValueError(f"there must be a text or a number, not {str(value)[:60]!r}")
    return value if isinstance(value, str) else str(value)


def as_messages(value: Any, role: str) -> Messages:
    """The messages of a chat; a text or a number is a message of this role."""
    return train_reward.as_messages(value if isinstance(value, list) else as_text(value), role)


def check_row(row: dict[str, Any], columns: Iterable[str]) -> None:
    """Refuse a row that lacks one of these texts."""
    for column in columns:
        if not isinstance(row.get(column), str):
            raise ValueError(f"it has no text under {column!r}, but {', '.join(map(repr, row))}")


# ---- Tokens ----------------------------------------------------------------------------------------------------


def pad_rows(rows: list[list[int]], length: int, pad_id: int, *, left: bool = False) -> torch.Tensor:
    """Rows of token ids as one tensor (rows, length), padded on the right, or on the left."""
    padded = torch.full((len(rows), length), pad_id)
    for row, tokens in zip(padded, rows, strict=True):
        if tokens:
            row[slice(-len(tokens), None) if left else slice(len(tokens))] = torch.tensor(tokens)
    return padded
