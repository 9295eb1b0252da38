"""Rows of data, each with its place for messages, from local files and from the hub; and token ids as one tensor.

.jsonl                   an object per line; the file may be compressed by xz
.parquet, .csv, .json    whatever the library `datasets` reads of them
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ppo_rlhf.lib import files, hub
from ppo_rlhf.lib.errors import InputError, flag

Row = tuple[str, dict[str, Any]]  # its place, and its columns
FORMATS = (".jsonl", ".parquet", ".csv", ".json")


def read_jsonl(path: Path, field: str) -> list[Row]:
    """The objects of a JSON-lines file. field: the argument that names it."""
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
        raise InputError(f"{flag(f'task.{field}')} {where}: {error}") from error
    return rows


def read_file(path: Path, field: str) -> list[Row]:
    """The rows of a file in one of FORMATS."""
    if path.suffix == ".jsonl":
        return read_jsonl(path, field)
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        rows = load_dataset(path.suffix[1:], data_files=str(path), split="train")
    except (DatasetGenerationError, OSError, ValueError) as error:
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        raise InputError(f"{flag(f'task.{field}')} {path}: cannot be read: {reason}") from error
    return list(with_places(rows, f"{path},"))


def from_hub(
    source: str, field: str, split: str, remedy: str, data: str | hub.HubFiles, configuration: str | None = None
) -> Iterable[Row]:
    """The rows of a split of a data set on the hub. source: what the argument calls it; data: its name there, or
    parquet files.
    """
    with hub.hub_data_errors(f"{flag(f'task.{field}')} {source}", remedy):
        from datasets import load_dataset

        if isinstance(data, str):
            rows = load_dataset(data, configuration, split=split)
        else:
            rows = load_dataset("parquet", data_files=list(data.download(split)), split="train")
    return with_places(rows, f"{source}, {split}")


def with_places(rows: Iterable[dict[str, Any]], where: str) -> Iterable[Row]:
    return ((f"{where} row {number}", row) for number, row in enumerate(rows, 1))


def check_row(row: dict[str, Any], columns: Iterable[str], what: str) -> None:
    """Refuse a row that lacks a text, or has one that is not valid Unicode. what: its name for messages."""
    for column in columns:
        if not isinstance(row.get(column), str):
            raise InputError(f"{what} has no text under {column!r}")
        files.check_text(row[column], f"{what}, {column!r},")


def pad_rows(rows: list[list[int]], length: int, pad_id: int, *, left: bool = False) -> torch.Tensor:
    """Rows of token ids as one tensor (rows, length), padded on the right, or on the left."""
    padded = torch.full((len(rows), length), pad_id)
    for row, tokens in zip(padded, rows, strict=True):
        if tokens:
            row[slice(-len(tokens), None) if left else slice(len(tokens))] = torch.tensor(tokens)
    return padded
