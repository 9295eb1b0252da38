"""The sources of chapter 1's texts: data sets on the hub, local files, and worlds.

`--task.query_dataset` names a source:

    books, cnndm, tldr     hub data sets (lib/published_texts.py)
    dummy                  random letters, for tests
    <file>.txt             one text per line
    <file>.jsonl           one JSON string per line, or an object with "text"
    <file>.json            a JSON array of strings or of such objects
    <file>.parquet, .csv   rows with "text"
    <owner>/<name>         a data set on the hub with such rows, or <owner>/<name>:<configuration>
    <folder>               a world: stories.txt, one text per line, and perhaps stories_test.txt

--task.query_column names another key than "text". What it holds may be the messages of a chat. In its place, a row
may have a preference, whose prompt is the text (lib/preferences.py says how both become texts).

For each .txt, .jsonl and .json file, a copy that xz has compressed will do, such as stories.txt.xz.

`cnndm`, `tldr`, folders with stories_test.txt and data sets with a split `test` have separate texts for tests. For
any other source, PPO never sees every 50th text.

Files and lines next to marks are those of openai/lm-human-preferences at commit cbfd210.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Subset

from ppo_rlhf import worlds
from ppo_rlhf.lib import data_files, preferences
from ppo_rlhf.lib.errors import InputError, flag, input_errors
from ppo_rlhf.lib.files import read_text

HUB_TEXTS = ("books", "cnndm", "tldr")


def load_texts(query_dataset: str, split: str = "train", column: str = "text") -> Sequence[str]:
    """The texts of a data set, in the order of its files. split: train, or test for texts that PPO never sees [X12].

    Only cnndm, tldr, folders with stories_test.txt and some data sets on the hub have files for each split. Of all
    other sources every 50th text is held out, and `all` gives both splits. column: the key of a row's text.
    """
    # The name says where the texts come from.   datasets/books.py#L7-L17
    path = Path(worlds.find_value("task.query_dataset", query_dataset))
    if query_dataset in HUB_TEXTS:
        from ppo_rlhf.lib import published_texts

        texts: Sequence[str] = published_texts.HubTexts(query_dataset, split)
        if query_dataset != "books":
            return texts
    elif path.is_dir():
        texts = read_text_file(path / "stories.txt")
        if (test := path / "stories_test.txt").is_file():
            held_out = read_text_file(test)
            return {"train": texts, "test": held_out, "all": texts + held_out}[split]
    elif query_dataset == "dummy":
        texts = dummy_texts()
    elif path.suffix in {".txt", ".jsonl", ".json"}:
        texts = read_text_file(path, column)
    elif path.suffix in data_files.FORMATS or data_files.is_on_hub(query_dataset):
        remedy = "give a file of texts, or use --preset tales"
        rows = data_files.load_split(query_dataset, "task.query_dataset", split, remedy)
        found = [text_of(row, column, f"{flag('task.query_dataset')} {where}") for where, row in rows]
        return [text for text in found if text.strip()]
    else:
        raise InputError(
            f"{flag('task.query_dataset')} {query_dataset}: unknown; there are {', '.join(HUB_TEXTS)}, tales, "
            f"reviews, dummy, data sets on the hub, and files: .txt, {', '.join(data_files.FORMATS)}"
        )
    if split == "all":
        return texts
    is_test = [i % data_files.HELD_OUT == data_files.HELD_OUT - 1 for i in range(len(texts))]
    return Subset(texts, [i for i in range(len(texts)) if is_test[i] == (split == "test")])


def dummy_texts() -> list[str]:
    """Random strings of 40 letters and full stops."""
    # For tests without downloads.   language/datasets.py#L109-L116
    rng = random.Random(0)
    return ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz.", k=40)) for _ in range(10_000)]


def text_of(row: dict[str, Any], column: str, what: str) -> str:
    """The text of a row, which may be messages, or the prompt of a preference. what: the row, for messages."""
    if column == "text" and "text" not in row and preferences.is_preference(row):
        prompt, _, _ = preferences.read_preference(row, what).texts()
        return prompt
    _, value = data_files.find(row, (column,), what)
    if isinstance(value, list):
        return preferences.as_prompt(data_files.as_messages(value, "user", f"{what}, {column!r},"))
    data_files.check_row({column: value}, (column,), what)
    return value


def read_text_file(path: Path, column: str = "text") -> list[str]:
    """Texts of a .txt file (one per line), a .jsonl file or a .json array (strings, or objects with the column)."""
    what = f"{flag('task.query_dataset')} {path}"
    with input_errors(what, OSError, ValueError, RecursionError):
        content = read_text(path)
        rows = json.loads(content) if path.suffix == ".json" else content.split("\n")
    if not isinstance(rows, list):
        raise InputError(f"{what}: holds no JSON array")
    texts = []
    for number, row in enumerate(rows, 1):
        with input_errors(f"{what}: row {number}", ValueError, KeyError, TypeError, AttributeError, RecursionError):
            if path.suffix == ".jsonl" and row.strip():
                row = json.loads(row)
            text = row if isinstance(row, str) else text_of(row, column, "it")
            text.encode()  # a lone surrogate, which no tokenizer accepts, is a ValueError
            texts.append(text)
    return [text for text in texts if text.strip()]
