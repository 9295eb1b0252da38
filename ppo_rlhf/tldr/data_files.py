"""Rows of data, each with its place for messages, from local files and from the hub; and token ids as one tensor.

.jsonl                   an object per line; the file may be compressed by xz
.parquet, .csv, .json    whatever the library `datasets` reads of them
<owner>/<name>           a data set on the hub, or <owner>/<name>:<configuration>
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ppo_rlhf.lib import files, hub
from ppo_rlhf.lib.errors import InputError, flag
from ppo_rlhf.tldr.chat_templates import Messages

Row = tuple[str, dict[str, Any]]  # its place, and its columns
FORMATS = (".jsonl", ".parquet", ".csv", ".json")
ON_HUB = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")  # owner, name and configuration of a data set
HELD_OUT = 50  # where a source has no test split, the last of every 50 rows is held out
# The names that data sets of the hub have for a split; the first that is there counts.
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


def read_jsonl(path: Path, argument: str) -> list[Row]:
    """The objects of a JSON-lines file. argument: the one that names it, such as task.posts."""
    rows: list[Row] = []
    where = str(path)
    try:
        for number, line in enumerate(files.read_text(path).split("\n"), 1):
            where = f"{path}, line {number}"
            if line.strip():
                rows.append((where, json.loads(line)))
                if not isinstance(rows[-1][1], dict):
                    raise ValueError("is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{flag(argument)} {where}: {error}") from error
    return rows


def read_file(path: Path, argument: str) -> list[Row]:
    """The rows of a file in one of FORMATS."""
    if path.suffix == ".jsonl":
        return read_jsonl(path, argument)
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        rows = load_dataset(path.suffix[1:], data_files=str(path), split="train")
    except (DatasetGenerationError, OSError, ValueError) as error:
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        raise InputError(f"{flag(argument)} {path}: cannot be read: {reason}") from error
    return list(with_places(rows, f"{path},"))


def from_hub(
    source: str, argument: str, split: str, remedy: str, data: str | hub.HubFiles, configuration: str | None = None
) -> Iterable[Row]:
    """The rows of a split of a data set on the hub. source: what the argument calls it; data: its name there, or
    parquet files.
    """
    with hub.hub_data_errors(f"{flag(argument)} {source}", remedy):
        from datasets import load_dataset

        if isinstance(data, str):
            rows = load_dataset(data, configuration, split=split)
        else:
            rows = load_dataset("parquet", data_files=list(data.download(split)), split="train")
    return with_places(rows, f"{source}, {split}")


def load_split(source: str, argument: str, split: str, remedy: str) -> Iterable[Row]:
    """Rows of a file in one of FORMATS or of a data set on the hub. split: train, validation, test, or all of them.

    Without a split for tests, the last of every HELD_OUT rows is held out, for validation and for tests. remedy: what
    would do where the source is not there, or has too few rows for that.
    """
    what = f"{flag(argument)} {source}"
    if not is_on_hub(source):
        return hold_out(read_file(Path(source), argument), what, split, remedy)
    name, _, configuration = source.partition(":")
    with hub.hub_data_errors(what, remedy):
        from datasets import load_dataset

        found = load_dataset(name, configuration or None)
    if len(found) == 1:
        ((name, rows),) = found.items()
        return hold_out(list(with_places(rows, f"{source}, {name}")), what, split, remedy)
    kept = list(SPLIT_NAMES) if split == "all" else [split]
    names = [next((name for name in SPLIT_NAMES[one] if name in found), None) for one in kept]
    if None in names:
        wanted = " or ".join(SPLIT_NAMES[kept[names.index(None)]])
        raise InputError(f"{what} has no split {wanted}, but {', '.join(found)}; {remedy}")
    return chain.from_iterable(with_places(found[name], f"{source}, {name}") for name in dict.fromkeys(names))


def hold_out(rows: Sequence[Row], what: str, split: str, remedy: str) -> Sequence[Row]:
    """The rows of a split of a source that has only one. what: the source, for messages."""
    if split == "all":
        return rows
    if split != "train" and len(rows) < HELD_OUT:
        raise InputError(
            f"{what} has {len(rows)} rows; every {HELD_OUT}th row is held out, so give {HELD_OUT} rows or more, "
            f"or {remedy}"
        )
    return [row for i, row in enumerate(rows) if (i % HELD_OUT == HELD_OUT - 1) == (split != "train")]


def with_places(rows: Iterable[dict[str, Any]], where: str) -> Iterable[Row]:
    return ((f"{where} row {number}", row) for number, row in enumerate(rows, 1))


# ---- Columns ---------------------------------------------------------------------------------------------------


def value_at(row: Mapping[str, Any], column: str) -> Any:
    """What a row has under a column, or under one within another, as a name with dots says; None if nothing."""
    value: Any = row
    for part in [column] if column in row else column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def find(row: Mapping[str, Any], columns: Sequence[str], what: str) -> tuple[str, Any]:
    """The first of these columns that a row has, and what is in it."""
    for column in columns:
        if (value := value_at(row, column)) is not None:
            return column, value
    raise InputError(f"{what} has nothing under {columns[0]!r}; it has {', '.join(map(repr, row))}")


def as_text(value: Any, what: str) -> str:
    """A text or a number as a text."""
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value != value:
        raise InputError(f"{what} must be a text or a number; it is {str(value)[:60]!r}")
    text = value if isinstance(value, str) else str(value)
    files.check_text(text, what)
    return text


def as_messages(value: Any, role: str, what: str) -> Messages:
    """The messages of a chat; a text or a number is a message of this role."""
    if not isinstance(value, list):
        value = [{"role": role, "content": value}]
    if not value or not all(isinstance(message, Mapping) for message in value):
        raise InputError(f"{what} must be a text, a number, or messages; it is {str(value)[:60]!r}")
    return [
        {key: as_text(message.get(key), f"{what} a message's {key},") for key in ("role", "content")}
        for message in value
    ]


def check_row(row: dict[str, Any], columns: Iterable[str], what: str) -> None:
    """Refuse a row that lacks a text, or has one that is not valid Unicode. what: its name for messages."""
    for column in columns:
        if not isinstance(row.get(column), str):
            raise InputError(f"{what} has no text under {column!r}; it has {', '.join(map(repr, row))}")
        files.check_text(row[column], f"{what}, {column!r},")


# ---- Tokens ----------------------------------------------------------------------------------------------------


def pad_rows(rows: list[list[int]], length: int, pad_id: int, *, left: bool = False) -> torch.Tensor:
    """Rows of token ids as one tensor (rows, length), padded on the right, or on the left."""
    padded = torch.full((len(rows), length), pad_id)
    for row, tokens in zip(padded, rows, strict=True):
        if tokens:
            row[slice(-len(tokens), None) if left else slice(len(tokens))] = torch.tensor(tokens)
    return padded
