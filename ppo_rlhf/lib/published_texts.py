"""Published data sets of texts on the hub: a table of their names, files and columns, and how they are read.

The original's file of books is lost. `books` replaces it with a copy of BookCorpus, whose rows are single sentences
with spaces around punctuation. We join BOOK_ROWS rows into a passage and remove those spaces, because the task needs
passages with ordinary full stops. The copy is in lower case. So PPO's queries are in lower case, but those of the
labels are not.

`cnndm` holds the raw stories. The usual parquet files say which split a story belongs to, but their articles are
single lines, which leaves nothing to end queries at. `tldr` holds OpenAI's own files. Both are copied once to a table
in the cache of `datasets`, which all processes read from disk.
While one process copies, a lock makes the others wait.

Files and lines next to marks are those of openai/lm-human-preferences at commit cbfd210.
"""

import io
import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import ftfy

from ppo_rlhf.lib import hub
from ppo_rlhf.lib.errors import flag

HUB_FILES = {
    "books": hub.HubFiles(repository="rojagtap/bookcorpus", names=("books_large_p1.txt", "books_large_p2.txt")),
    "cnndm": hub.HubFiles(repository="ccdv/cnn_dailymail", names=("cnn_stories.tgz", "dailymail_stories.tgz")),
    "cnndm splits": hub.HubFiles(repository="abisee/cnn_dailymail", names=("3.0.0/{split}-*.parquet",)),
    "tldr": hub.HubFiles(repository=hub.OPENAI_REPOSITORY, names=("tldr/{split}-subset.json",)),
}
BOOK_ROWS = 16


class HubTexts(Sequence):
    """Cleaned texts of a hub data set, each read from disk when it is needed."""

    def __init__(self, name: str, split: str):
        with hub.hub_data_errors(
            f"{flag('task.query_dataset')} {name}",
            "give a .txt, .jsonl or .json file of texts, or use --preset tales",
        ):
            from datasets import Dataset, load_dataset

            if name == "books":
                rows = load_dataset("text", data_files=list(HUB_FILES[name].download()), split="train")
            elif name == "cnndm":
                files = {
                    "archives": HUB_FILES[name].download(),
                    "parquet_files": HUB_FILES["cnndm splits"].download(split),
                }
                rows = Dataset.from_generator(raw_stories, gen_kwargs=files)
            else:
                files = {"files": HUB_FILES[name].download("valid" if split == "test" else split)}
                rows = Dataset.from_generator(raw_posts, gen_kwargs=files)
        self.name, self.rows = name, rows["text"]

    def __len__(self) -> int:
        return len(self.rows) // (BOOK_ROWS if self.name == "books" else 1)

    def __getitem__(self, index: int) -> str:
        if self.name == "books":
            return join_book_rows(self.rows[index * BOOK_ROWS : (index + 1) * BOOK_ROWS])
        return (clean_cnndm if self.name == "cnndm" else clean_tldr)(self.rows[index])


def raw_stories(archives: tuple[str, ...], parquet_files: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """The stories of a split, in the order of the archives. The parquet files list their ids, the names of files."""
    from pyarrow.parquet import read_table

    ids = {name for file in parquet_files for name in read_table(file, columns=["id"])["id"].to_pylist()}
    for archive in archives:
        with tarfile.open(archive) as members:
            for member in members:
                if PurePosixPath(member.name).stem in ids and (story := members.extractfile(member)):
                    yield {"text": io.TextIOWrapper(story, encoding="utf-8").read()}


def raw_posts(files: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """The texts of OpenAI's Reddit posts. Lone surrogates, which no table can hold, become U+FFFD."""
    for path in files:
        for row in json.loads(Path(path).read_text(encoding="utf-8")):
            yield {"text": ftfy.fixes.fix_surrogates(row["content"])}


def join_book_rows(rows: Sequence[str]) -> str:
    """Join rows of BookCorpus, sentences with spaces around punctuation, to a passage of ordinary text."""
    text = " ".join(row.strip() for row in rows).replace("`` ", '"').replace(" ''", '"')
    text = re.sub(r" ([.,;:!?%)\]]|n't\b|'(?:s|m|d|re|ve|ll)\b)", r"\1", text)
    return re.sub(r"([(\[$]) ", r"\1", text)


def clean_cnndm(text: str) -> str:
    """Remove bylines, datelines, update notices and highlights from a CNN/Daily Mail story."""
    # The rules apply in the original's order.   datasets/cnndm.py#L70-L103
    if text.startswith("By"):
        text = "\n".join(text.split("\n")[2:])
    text = re.sub(r"(?s).*\(CNN\) +--", "", text)
    text = text[:100].rpartition("(CNN)")[2] + text[100:]
    text = re.sub(r"^and \w+\n", "", text)
    text = re.sub(r"(?s).*UPDATED:\s+\d\d:\d\d[^\n]*201\d", "", text)
    text = clean_tldr(re.sub("[\u2018\u2019]", "'", text).strip())
    return text.split("@highlight")[0].strip()


def clean_tldr(text: str) -> str:
    """Fix broken characters, and leave at most one empty line in a row."""
    # Fix characters and line breaks, and strip space at both ends.   datasets/tldr.py#L24-L29
    return re.sub(r"\n{3,}", "\n\n", ftfy.fix_text(text)).strip()
