"""The sources of chapter 1's texts: data sets on the hub, local files, and worlds.

`--task.query_dataset` names a source:

    books, cnndm, tldr     hub data sets (lib/data/published.py)
    dummy                  random letters, for tests
    <file>.txt             one text per line
    <file>.jsonl           one JSON string per line, or an object with "text"
    <file>.json            a JSON array of strings or of such objects
    <folder>               a world: stories.txt, one text per line, and perhaps stories_test.txt

For each of these files, a copy that xz has compressed will do, such as stories.txt.xz.

`cnndm`, `tldr` and folders with stories_test.txt have separate texts for tests. For any other source, PPO never sees
every 50th text.

Files and lines next to marks are those of openai/lm-human-preferences at commit cbfd210.
"""

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Subset

from ppo_rlhf.lib.base.errors import InputError, flag
from ppo_rlhf.lib.base.files import check_text, read_text

HUB_TEXTS = ("books", "cnndm", "tldr")
HELD_OUT = 50  # where a source has no test split, the last of every 50 texts is held out for comparisons


def load_texts(query_dataset: str, split: str = "train") -> Sequence[str]:
    """The texts of a data set, in the order of its files. split: train, or test for texts that PPO never sees [X12].

    Only cnndm, tldr and folders with stories_test.txt have files for each split. Of all other sources every 50th text
    is held out, and `all` gives both splits.
    """
    # The name says where the texts come from.   datasets/books.py#L7-L17
    if query_dataset in HUB_TEXTS:
        from ppo_rlhf.lib.data import published

        texts: Sequence[str] = published.HubTexts(query_dataset, split)
        if query_dataset != "books":
            return texts
    elif Path(query_dataset).is_dir():
        texts = read_text_file(Path(query_dataset, "stories.txt"))
        if (test := Path(query_dataset, "stories_test.txt")).is_file():
            held_out = read_text_file(test)
            return {"train": texts, "test": held_out, "all": texts + held_out}[split]
    elif query_dataset == "dummy":
        texts = dummy_texts()
    elif Path(query_dataset).suffix in {".txt", ".jsonl", ".json"}:
        texts = read_text_file(Path(query_dataset))
    else:
        raise InputError(
            f"{flag('task.query_dataset')} {query_dataset}: unknown; there are {', '.join(HUB_TEXTS)}, tales, dummy, "
            f"and files that end in .txt, .jsonl or .json"
        )
    if split == "all":
        return texts
    held_out = range(HELD_OUT - 1, len(texts), HELD_OUT)
    return Subset(
        texts, held_out if split == "test" else [i for i in range(len(texts)) if i % HELD_OUT != HELD_OUT - 1]
    )


LOOKED_AT = 1_000  # texts, to say how many give no query


def no_query(stream: Any, split: str) -> str:
    """What is wrong if no text of a QueryStream gives a query."""
    which = f"texts that are held out, one of {HELD_OUT}," if split == "test" else "texts"
    return (
        f"{flag('task.query_dataset')} {stream.task.query_dataset}: none of its {len(stream.texts)} {which} gives a "
        f"query; give more texts, or see {flag('task.start_text')} and {flag('task.end_text')}"
    )


def left_out(stream: Any) -> str:
    """A line that says how many of the first texts of a QueryStream give no query, and why; empty if all do."""
    reasons, looked_at, task = Counter(), min(LOOKED_AT, len(stream.texts)), stream.task
    for tokens in map(stream.tokens, range(looked_at)):
        if stream.trim(tokens):
            continue
        if not tokens:
            reasons["are empty"] += 1
        elif stream.start_id is not None and stream.start_id not in tokens:
            reasons[f"have no {task.start_text!r} to begin after ({flag('task.start_text')})"] += 1
        else:
            where = f"within {flag('task.query_length')} {task.query_length}"
            reasons[f"have no {task.end_text!r} to end with {where} ({flag('task.end_text')})"] += 1
    if not reasons:
        return ""
    why = " and ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items()))
    return f"queries: of the first {looked_at:,} texts, {reasons.total():,} give none: {why}"


def dummy_texts() -> list[str]:
    """Random strings of 40 letters and full stops."""
    # For tests without downloads.   language/datasets.py#L109-L116
    rng = random.Random(0)
    return ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz.", k=40)) for _ in range(10_000)]


# ---- Local files -----------------------------------------------------------------------------------------------


def read_text_file(path: Path) -> list[str]:
    """Texts of a .txt file (one per line), a .jsonl file or a .json array (strings, or objects with "text")."""
    items: Any = []
    try:
        content = read_text(path)
        lines = content.split("\n")  # not splitlines, which also breaks at separators that JSON strings may hold
        if path.suffix == ".txt":
            items = lines
        elif path.suffix == ".jsonl":
            for line in filter(str.strip, lines):
                items.append(json.loads(line))
        else:
            items = json.loads(content)
    except OSError as error:
        raise InputError(f"{flag('task.query_dataset')} {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        where = f", item {len(items) + 1}" if path.suffix == ".jsonl" else ""
        raise InputError(f"{flag('task.query_dataset')} {path}{where}: {error}") from error
    if not isinstance(items, list):
        raise InputError(f"{flag('task.query_dataset')} {path}: holds no JSON array")
    texts = [item.get("text") if isinstance(item, dict) else item for item in items]
    for number, (item, text) in enumerate(zip(items, texts, strict=True), 1):
        where = f"{flag('task.query_dataset')} {path}: item {number}"
        if not isinstance(text, str):
            keys = f", which has {', '.join(map(repr, item))}," if isinstance(item, dict) else ""
            raise InputError(f'{where}{keys} is neither a string nor an object with "text"')
        check_text(text, where)
    return [text for text in texts if text.strip()]
