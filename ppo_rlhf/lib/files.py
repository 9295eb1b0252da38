"""Text and JSON files, and what was read from one."""

import csv
import io
import json
import lzma
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ppo_rlhf.lib import errors


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"ppo": {"lr": 1}} becomes {"ppo.lr": 1}."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def fits(value: Any, hint: Any) -> bool:
    """Whether a value that was read from JSON has the type of a field."""
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(fits(value, choice) for choice in typing.get_args(hint))
    return type(value) is hint or (hint is float and type(value) is int)


def stored(path: Path) -> Path:
    """A file, or <name>.xz, its compressed copy, if only that is there: the package holds its worlds so."""
    packed = Path(f"{path}.xz")
    return packed if packed.is_file() and not path.exists() else path


def read_text(path: Path) -> str:
    """The text of a file or of its compressed copy, without a byte order mark. Raises OSError or ValueError."""
    there = stored(path)
    if there == path:
        return path.read_text(encoding="utf-8-sig")
    try:
        return lzma.decompress(there.read_bytes()).decode()
    except lzma.LZMAError as error:
        raise ValueError(f"{there.name} is damaged: {error}") from error


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises OSError or ValueError."""
    return json.loads(read_text(path))


def replace_file(path: Path, text: str) -> None:
    """Write to a temporary name, then rename: a reader never sees half a file."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file. Its numbers must be finite: JSON has no others."""
    replace_file(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def without_nan(numbers: dict[str, Any]) -> dict[str, Any]:
    """For JSON, which has no NaN: None in its place, as for a monitor that has failed."""
    return {name: None if value != value else value for name, value in numbers.items()}


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Rows, the first often a header, as the text of a CSV file."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def json_lines(rows: Iterable[Any]) -> str:
    """The text of a file of JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def check_text(text: str, what: str) -> None:
    """Refuse a text with a lone surrogate, which no tokenizer accepts."""
    with errors.input_errors(f"{what} is not valid Unicode", UnicodeEncodeError):
        text.encode("utf-8")
