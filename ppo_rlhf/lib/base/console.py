"""What the first process prints: lines and tables."""

from typing import Any

from torch import Tensor

from ppo_rlhf.lib.base import errors


def say(line: str) -> None:
    """Print a line, once however many processes there are."""
    if errors.is_first_process():
        print(line)


def one_line(value: Any) -> Any:
    """A text with its line breaks shown as marks, for a table; anything else as it is."""
    return value.replace("\n", "⏎") if isinstance(value, str) else value


def print_table(title: str, rows: list[dict[str, Any]], console: Any = None, show_lines: bool = True) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(errors.visible(title)) if title else None, show_lines=show_lines)
    for name in rows[0]:
        numeric = all(isinstance(row[name], float | int) for row in rows)
        table.add_column(name, justify="right" if numeric else "left", min_width=6 if numeric else None)
    for row in rows:
        cells = (f"{value:+.2f}" if isinstance(value, float) else str(value) for value in row.values())
        table.add_row(*(Text(errors.visible(cell)) for cell in cells))
    (console or Console()).print(table)


def rows_of_lengths(pad_id: int, **texts: Tensor) -> list[dict[str, Any]]:
    """How many tokens texts have. texts: by name, (..., length) with padding."""
    lengths = {name: (tokens != pad_id).sum(-1).flatten().double() for name, tokens in texts.items()}
    return [
        {"text": name, "texts": len(x), "fewest": int(x.min()), "mean": x.mean().item(), "most": int(x.max())}
        for name, x in lengths.items()
    ]
