"""Chapter 1's queries and labels: where texts come from, and how they become token ids.

    query_dataset   books, cnndm, tldr     hub data sets (the table HUB_FILES)
                    dummy                  random letters, for tests
                    <file>.txt             one text per line
                    <file>.jsonl           one JSON string per line, or an object with "text"
                    <file>.json            a JSON array of strings or of such objects
                    <folder>               a world: stories.txt, one text per line
    label_dataset   <task>/<file>.json     OpenAI's human labels, from the hub copy OPENAI_REPOSITORY; where the
                                           queries come from a world: its simulated labels, of the same names
                    <file>.json            a local file in the same format

`cnndm` and `tldr` have texts of their own for tests. Of any other source, PPO never sees every 50th text.

The books file of the original is lost. `books` stands in for it: a copy of BookCorpus, whose rows are single
sentences with spaces around punctuation. We join BOOK_ROWS rows to a passage and undo the spaces, because the task
needs passages with ordinary full stops. Its letters stay lower case: PPO's queries are, those of the labels are not.

`cnndm` are the raw stories. The usual parquet files say which split a story belongs to; their articles are single
lines, which leaves nothing to end queries at. `tldr` are OpenAI's own files. Both are copied once to a table in the
cache of `datasets`, which all processes read from disk; whoever comes while one copies waits for it at a lock.

Files and lines beside marks are those of openai/lm-human-preferences at commit cbfd210.
"""

import io
import json
import random
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TextIO, get_args

import ftfy
import torch
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.lib import files, hub, models
from ppo_rlhf.lib.errors import InputError, flag

HUB_FILES = {
    "books": hub.HubFiles("rojagtap/bookcorpus", ("books_large_p1.txt", "books_large_p2.txt")),
    "cnndm": hub.HubFiles("ccdv/cnn_dailymail", ("cnn_stories.tgz", "dailymail_stories.tgz")),
    "cnndm splits": hub.HubFiles("abisee/cnn_dailymail", ("3.0.0/{split}-*.parquet",)),
    "tldr": hub.HubFiles(hub.OPENAI_REPOSITORY, ("tldr/{split}-subset.json",)),
}
HUB_TEXTS = ("books", "cnndm", "tldr")
BOOK_ROWS = 16
HELD_OUT = 50  # of a source without a test split, the last of each 50 texts is held out for comparisons
OPENAI_PAD_ID = 50259
OPENAI_VOCAB_SIZE = 50257
LARGEST_RATING = 1e6
CUT_MARGIN = 100  # tokens; further from the end of a text, a cut there does not change how it is split into tokens

# ---- Tasks -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskArgs:
    query_dataset: str = "books"
    """where queries come from: books, cnndm, tldr, tales, dummy, a .txt, .jsonl or .json file, or a folder
    with stories.txt"""
    query_length: int = 64
    """longest query, in tokens; shorter ones are padded"""
    query_prefix: str = ""
    """text before each query; the policy sees it, the reward model does not"""
    query_suffix: str = ""
    """text after each query; the policy sees it, the reward model does not"""
    start_text: str | None = "."
    """queries begin after the first such token of their text; None: at the beginning"""
    end_text: str | None = "."
    """queries end with the last such token; None: wherever they are cut"""
    response_length: int = 24
    """length of every response, in tokens"""
    truncate_text: str | None = "."
    """responses are cut after this token before they are scored; None: never"""
    truncate_after: int = 16
    """only such a token at or after this index counts, in tokens"""
    penalty_reward_value: float = -1.0
    """score of a response without such a token"""
    temperature: float = 0.7
    """sampling temperature of the policy and of the reference"""


SUMMARIES_TASK = {
    "query_length": 500,
    "query_suffix": "\n\nTL;DR:",
    "start_text": None,
    "response_length": 75,
    "truncate_text": "\n",
    "truncate_after": 55,
}
TASKS = {
    "sentiment": TaskArgs(),
    "descriptiveness": TaskArgs(),
    "cnndm": TaskArgs(
        **SUMMARIES_TASK, query_dataset="cnndm", query_prefix="Article:\n\n", end_text="\n", temperature=0.5
    ),
    "tldr": TaskArgs(**SUMMARIES_TASK, query_dataset="tldr", end_text=None),
    "tales": TaskArgs(query_dataset="tales", query_length=24),
    "tales-descriptiveness": TaskArgs(query_dataset="tales", query_length=24),
}


# ---- Texts -----------------------------------------------------------------------------------------------------


def clean_cnndm(text: str) -> str:
    """Remove bylines, datelines, update notices and highlights from a CNN/Daily Mail story."""
    # [D03] In the original's order.   datasets/cnndm.py#L70-L103
    if text.startswith("By"):
        text = "\n".join(text.split("\n")[2:])
    text = re.sub(r"(?s).*\(CNN\) +--", "", text)
    text = text[:100].rpartition("(CNN)")[2] + text[100:]
    text = re.sub(r"^and \w+\n", "", text)
    text = re.sub(r"(?s).*UPDATED:\s+\d\d:\d\d[^\n]*201\d", "", text)
    text = clean_tldr(re.sub("[\u2018\u2019]", "'", text).strip())
    return text.split("@highlight")[0].strip()


def clean_tldr(text: str) -> str:
    """Mend broken characters, leave at most one empty line in a row."""
    # [D04] Broken characters, line breaks, space at both ends.   datasets/tldr.py#L24-L29
    return re.sub(r"\n{3,}", "\n\n", ftfy.fix_text(text)).strip()


def join_book_rows(rows: Sequence[str]) -> str:
    """A passage of ordinary text from rows of BookCorpus, sentences with spaces around punctuation [X08]."""
    text = " ".join(row.strip() for row in rows).replace("`` ", '"').replace(" ''", '"')
    text = re.sub(r" ([.,;:!?%)\]]|n't\b|'(?:s|m|d|re|ve|ll)\b)", r"\1", text)
    return re.sub(r"([(\[$]) ", r"\1", text)


def read_json_array(file: TextIO, chunk: int = 2**22) -> Iterator[Any]:
    """The items of a JSON array, one by one, since it may be larger than memory. chunk: longest item, in characters.

    Raises a ValueError where the file is no such array.
    """
    decode, between, after = json.JSONDecoder().raw_decode, re.compile(r"[\s,]*"), re.compile(r"\s*[],]")
    text, position = file.read(chunk).lstrip(), 1
    if not text.startswith("["):
        raise ValueError("holds no JSON array")
    while True:
        position = between.match(text, position).end()
        if text.startswith("]", position):
            return
        try:
            item, end = decode(text, position)
        except ValueError:  # broken, or the rest of it is in the next chunk
            end = len(text)
        if after.match(text, end):
            yield item
            position = end
            continue
        following = file.read(chunk)
        if not following or len(text) - position > chunk:
            raise ValueError(f"holds no JSON array: it breaks off at {text[position : position + 60]!r}")
        text, position = text[position:] + following, 0


def raw_stories(archives: tuple[str, ...], parquet_files: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """The stories of a split, in the order of the archives. A file's name is the id, which the parquet files list."""
    from pyarrow.parquet import read_table

    ids = {name for file in parquet_files for name in read_table(file, columns=["id"])["id"].to_pylist()}
    for archive in archives:
        with tarfile.open(archive) as members:
            for member in members:
                if PurePosixPath(member.name).stem in ids and (story := members.extractfile(member)):
                    yield {"text": io.TextIOWrapper(story, encoding="utf-8").read()}


def raw_posts(files: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """The texts of OpenAI's Reddit posts. Halves of characters, which no table holds, become U+FFFD."""
    for path in files:
        with open(path, encoding="utf-8") as file:
            for row in read_json_array(file):
                yield {"text": ftfy.fixes.fix_surrogates(row["content"])}


class HubTexts(Sequence):
    """Cleaned texts of a hub data set, read from disk as they are asked for."""

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


def check_text(text: str, what: str) -> None:
    """Refuse a text that holds half a character, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{what} is not valid Unicode: {error}") from error


def read_text_file(path: Path) -> list[str]:
    """Texts of a .txt file (one per line), a .jsonl file or a .json array (strings, or objects with "text")."""
    items: Any = []
    try:
        content = path.read_text(encoding="utf-8-sig")
        lines = content.split("\n")  # not splitlines, which also breaks at separators that JSON strings may hold
        if path.suffix == ".txt":
            items = lines
        elif path.suffix == ".jsonl":
            for line in filter(str.strip, lines):
                items.append(json.loads(line))
        else:
            items = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        where = f", item {len(items) + 1}" if path.suffix == ".jsonl" else ""
        raise InputError(f"{flag('task.query_dataset')} {path}{where}: {error}") from error
    if not isinstance(items, list):
        raise InputError(f"{flag('task.query_dataset')} {path}: holds no JSON array")
    texts = [item.get("text") if isinstance(item, dict) else item for item in items]
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise InputError(
                f'{flag("task.query_dataset")} {path}: item {number} is neither a string nor an object with "text"'
            )
        check_text(text, f"{flag('task.query_dataset')} {path}: item {number}")
    return [text for text in texts if text.strip()]


def dummy_texts() -> list[str]:
    """Random strings of 40 letters and full stops."""
    # [D86] For tests without downloads.   language/datasets.py#L109-L116
    rng = random.Random(0)
    return ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz.", k=40)) for _ in range(10_000)]


class Subset(Sequence):
    def __init__(self, texts: Sequence[str], indices: Sequence[int]):
        self.texts, self.indices = texts, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> str:
        return self.texts[self.indices[index]]


def load_texts(query_dataset: str, split: str = "train") -> Sequence[str]:
    """The texts of a data set, in the order of its files. split: train, or test for texts that PPO never sees [X12].

    Only cnndm and tldr have files for each. Of all others every 50th text is held out, and `all` gives both splits.
    """
    # [D01] The name says where texts come from.   datasets/books.py#L7-L17
    if query_dataset in HUB_TEXTS:
        texts: Sequence[str] = HubTexts(query_dataset, split)
        if query_dataset != "books":
            return texts
    elif Path(query_dataset).is_dir():
        texts = read_text_file(Path(query_dataset, "stories.txt"))
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


# ---- Queries ---------------------------------------------------------------------------------------------------


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text that is data: no special token is added, and one whose name stands in it is just text."""
    return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)


def one_token(tokenizer: PreTrainedTokenizerBase, text: str | None, field: str) -> int | None:
    """The id of a text that must be exactly one token; None for None."""
    if text is None:
        return None
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise InputError(
            f"{flag(f'task.{field}')} {text!r} is {len(ids)} tokens ({ids}) for this tokenizer; "
            f"it must be exactly one"
        )
    return ids[0]


def trim_query(tokens: list[int], query_length: int, start_id: int | None, end_id: int | None) -> list[int] | None:
    """Cut a text's tokens to a query: after the first start token, at most query_length, up to the last end token.

    Returns None if the text has no start token, or no end token within the cut. Golden example, both ids 13:
    `One. Two words. Three more` gives ` Two words.`; `Only end.` is kept whole.
    """
    # [D05] After the first start token; if that is the last one, from the beginning.   language/datasets.py#L49-L55
    if start_id is not None:
        if start_id not in tokens:
            return None
        first = tokens.index(start_id)
        if first < len(tokens) - 1:
            tokens = tokens[first + 1 :]
    # [D06] At most so many of them.   language/datasets.py#L57
    tokens = tokens[:query_length]
    # [D07] Up to the last end token within the cut.   language/datasets.py#L59-L64
    if end_id is not None:
        if end_id not in tokens:
            return None
        tokens = tokens[: len(tokens) - tokens[::-1].index(end_id)]
    return tokens


def encode_for_query(
    tokenizer: PreTrainedTokenizerBase, text: str, query_length: int, start_id: int | None
) -> list[int]:
    """Token ids of a text or, if it is long, of so much of its beginning that `trim_query` gives the same."""
    needed = query_length + CUT_MARGIN
    characters = 8 * needed
    while characters < len(text):
        tokens = encode_text(tokenizer, text[:characters])
        before = 0  # tokens before the query
        if start_id is not None:
            before = tokens.index(start_id) + 1 if start_id in tokens else len(tokens)
        if len(tokens) >= before + needed:
            return tokens
        characters *= 4
    return encode_text(tokenizer, text)


class QueryStream:
    """An endless stream of queries: the texts in one shuffled order, again and again.

    The order depends neither on the run's seed nor on the number of processes. `position` counts the texts that
    were looked at; a stream that starts there goes on where another stopped.
    """

    def __init__(self, task: TaskArgs, tokenizer: PreTrainedTokenizerBase, position: int = 0, split: str = "train"):
        self.texts = load_texts(task.query_dataset, split)
        self.task, self.tokenizer, self.position = task, tokenizer, position
        self.start_id = one_token(tokenizer, task.start_text, "start_text")
        self.end_id = one_token(tokenizer, task.end_text, "end_text")
        # [D02] One order for all.   language/datasets.py#L27-L46
        self.order = list(range(len(self.texts)))
        random.Random(0).shuffle(self.order)
        if len(self.texts) == 0 or self._next_usable() is None:
            which = f"texts that are held out, one of {HELD_OUT}," if split == "test" else "texts"
            raise InputError(
                f"{flag('task.query_dataset')} {task.query_dataset}: none of its {len(self.texts)} {which} gives a "
                f"query; give more texts, or see {flag('task.start_text')} and {flag('task.end_text')}"
            )
        self.position = position

    def _next_usable(self) -> list[int] | None:
        """The next query; None if a whole pass over the texts gives none."""
        for _ in range(len(self.order)):
            text = self.texts[self.order[self.position % len(self.order)]]
            self.position += 1
            tokens = encode_for_query(self.tokenizer, text, self.task.query_length, self.start_id)
            query = trim_query(tokens, self.task.query_length, self.start_id, self.end_id)
            if query:
                return query
        return None

    def next_batch(self, batch_size: int, pad_id: int) -> torch.Tensor:
        """The next queries, padded on the right: (batch_size, query_length)."""
        # [D08] [D10] [X04] Process r of W takes its slice of a batch that is the same for every W.
        #       language/datasets.py#L66-L85
        return self._padded([self._next_usable() for _ in range(batch_size)], pad_id)

    def first(self, n: int, pad_id: int) -> torch.Tensor:
        """The first queries of all, wherever the stream stands: (n, query_length), or as many as the texts give."""
        position, self.position = self.position, 0
        queries = []
        while len(queries) < n:
            query = self._next_usable()
            if self.position > len(self.order):  # a second pass over the texts has begun
                break
            queries.append(query)
        self.position = position
        return self._padded(queries, pad_id)

    def _padded(self, queries: list[list[int]], pad_id: int) -> torch.Tensor:
        padded = torch.full((len(queries), self.task.query_length), pad_id)
        for row, query in zip(padded, queries, strict=True):
            row[: len(query)] = torch.tensor(query)
        return padded


@dataclass(frozen=True)
class TaskIds:
    """The task's texts as token ids of one tokenizer."""

    pad: int  # one above the largest id of the tokenizer
    eos: int  # -1 if the tokenizer has none
    stop: int | None
    prefix: list[int]
    suffix: list[int]
    context_length: int  # prefix, padded query and suffix

    @property
    def vocab_size(self) -> int:
        """How many ids can be sampled: those below the padding. The output layer of a model may have more rows."""
        return self.pad


def task_ids(task: TaskArgs, tokenizer: PreTrainedTokenizerBase) -> TaskIds:
    """Check the task's numbers and encode its texts."""
    for name in ("query_length", "response_length", "temperature"):
        if not getattr(task, name) > 0:
            raise InputError(f"{flag(f'task.{name}')} is {getattr(task, name)}; it must be above 0")
    if not 0 <= task.truncate_after <= task.response_length:
        raise InputError(
            f"{flag('task.truncate_after')} is {task.truncate_after}; it must be in 0..{task.response_length}"
        )
    prefix, suffix = (
        tokenizer.encode(text, add_special_tokens=False) for text in (task.query_prefix, task.query_suffix)
    )
    return TaskIds(
        pad=models.vocabulary_size(tokenizer),
        eos=-1 if tokenizer.eos_token_id is None else tokenizer.eos_token_id,
        stop=one_token(tokenizer, task.truncate_text, "truncate_text"),
        prefix=prefix,
        suffix=suffix,
        context_length=len(prefix) + task.query_length + len(suffix),
    )


def add_affixes(queries: torch.Tensor, prefix: list[int], suffix: list[int]) -> torch.Tensor:
    """Contexts for the policy: [prefix, query with its padding, suffix]. (batch, context_length)"""
    # [D09] Padding may stand between query and suffix.   lm_tasks.py#L68-L80
    parts = [torch.tensor(ids, dtype=queries.dtype, device=queries.device) for ids in (prefix, suffix)]
    before, after = (part.expand(len(queries), -1) for part in parts)
    return torch.cat([before, queries, after], dim=1)


def to_texts(tokenizer: PreTrainedTokenizerBase, tokens: torch.Tensor, pad_id: int) -> list[str]:
    """Decode each row without its padding."""
    return [tokenizer.decode([token for token in row if token != pad_id]) for row in tokens.tolist()]


def sample_rows(
    tokenizer: PreTrainedTokenizerBase,
    ids: TaskIds,
    queries: torch.Tensor,
    responses: torch.Tensor,
    **numbers: torch.Tensor,
) -> list[dict]:
    """The first three episodes as texts, with their numbers (batch,)."""
    # [D80] What the log shows at times.   train_policy.py#L264-L279
    columns = {
        "query": to_texts(tokenizer, queries[:3], ids.pad),
        "response": to_texts(tokenizer, responses[:3], ids.pad),
        **{name: values[:3].tolist() for name, values in numbers.items()},
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


# ---- Labels ----------------------------------------------------------------------------------------------------


LabelKind = Literal["best", "score", "difference"]


@dataclass(frozen=True)
class Labels:
    """What people said of n continuations of each query. A target is, by the kind of label,

    best         which of the n is best, in [0, n)
    score        how good the only one is
    difference   how much better the second of two is than the first
    """

    queries: torch.Tensor  # (labels, query_length), padded with pad_id
    samples: torch.Tensor  # (labels, n, response_length), padded with pad_id
    targets: torch.Tensor  # (labels,), integers for best, else floats
    ceiling: float | None  # accuracy of a perfect judge on the held-out labels, where it is known
    kind: LabelKind = "best"


def find_label_file(label_dataset: str, query_dataset: str) -> Path:
    if Path(label_dataset).is_file():
        return Path(label_dataset)
    if label_dataset and Path(label_dataset).is_dir():
        raise InputError(f"{flag('label_dataset')} {label_dataset}: that is a folder")
    if (labels := Path(query_dataset, "labels")).is_dir():  # beside the texts of a world
        if (labels / label_dataset).is_file():
            return labels / label_dataset
        there = ", ".join(sorted(path.relative_to(labels).as_posix() for path in labels.glob("*/offline_5k.json")))
        raise InputError(f"{flag('label_dataset')} {label_dataset}: no such file, and {labels} has {there}")
    remedy = "give the path of a label file, or use --preset tales"
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*\.json", label_dataset):  # the hub's have such names
        raise InputError(f"{flag('label_dataset')} {label_dataset}: no such file; {remedy}")
    from huggingface_hub import hf_hub_download

    with hub.hub_errors(f"{flag('label_dataset')} {label_dataset}", remedy):
        return Path(hf_hub_download(hub.OPENAI_REPOSITORY, label_dataset, repo_type="dataset"))


def read_sidecar(path: Path) -> dict[str, Any]:
    """What the file beside a label file says; nothing if there is none."""
    if not path.exists():
        return {}
    try:
        meta = files.read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {error}") from error
    if not isinstance(meta, dict):
        raise InputError(f"{path}: must be a JSON object")
    for name in ("vocab_size", "padding_id"):
        if type(meta.get(name, 1)) is not int:
            raise InputError(f"{path}: the {name} is {meta[name]!r}; it must be a whole number")
    if not isinstance(meta.get("ceiling", 1.0), float) or not 0 < meta.get("ceiling", 1.0) <= 1:
        raise InputError(f"{path}: the ceiling is {meta['ceiling']!r}; it must be a number above 0 and at most 1.0")
    return meta


def sample_keys_of(row: dict[str, Any], kind: LabelKind) -> list[str]:
    """The keys of a row that hold continuations; an InputError if they are not those of this kind of label."""
    found = sorted((key for key in row if re.fullmatch("sample[0-9]*", key)), key=lambda key: (len(key), key))
    if kind == "best":
        expected, needed = [f"sample{i}" for i in range(max(2, len(found)))], "sample0, sample1, ... (two or more)"
    else:
        expected = ["sample"] if kind == "score" else ["sample0", "sample1"]
        needed = " and ".join(expected)
    if found != expected:
        raise InputError(f"row 0 has {kind!r} and the samples {found}; it needs {needed}")
    return expected


def check_label(
    row: dict[str, Any], kind: LabelKind, lengths: dict[str, tuple[str, int]], vocab_size: int, padding_id: int
) -> None:
    """Raise an InputError if a row of a label file does not hold what its first row and the task promise.

    lengths: what each key with token ids must hold, and the argument that says so.
    """
    for key, (field, length) in lengths.items():
        ids = row.get(key)
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise InputError(f"has no list of token ids under {key!r}")
        if len(ids) != length:
            raise InputError(f"has {len(ids)} ids in {key!r}, but {flag(f'task.{field}')} is {length}")
        if outside := [token for token in ids if not 0 <= token < vocab_size and token != padding_id]:
            raise InputError(
                f"has id {outside[0]} in {key!r}, outside the tokenizer's {vocab_size}; "
                f"is it written with another tokenizer?"
            )
        if ids[0] == padding_id:
            raise InputError(f"has padding at the beginning of {key!r}")
    target = row.get(kind)
    if kind == "best":
        n = len(lengths) - 1
        if type(target) is not int or not 0 <= target < n:
            raise InputError(f"has best {target!r}; it must be in 0..{n - 1}")
    elif type(target) not in (int, float) or not abs(target) <= LARGEST_RATING:
        raise InputError(f"has {kind} {target!r}; it must be a number of at most {LARGEST_RATING:g} in size")


def read_labels(label_dataset: str, task: TaskArgs, tokenizer: PreTrainedTokenizerBase) -> Labels:
    """Read a label file in OpenAI's format and check every row. One row is one of

        {"query": ids, "sample0": ids, "sample1": ids, ..., "best": 1}             the best of n
        {"query": ids, "sample": ids, "score": 0.7}                                a rating
        {"query": ids, "sample0": ids, "sample1": ids, "difference": -1.5}         how much better sample1 is

    Queries hold task.query_length token ids and samples task.response_length, padded on the right. A file beside it,
    `<name>.meta.json`, may give the `vocab_size` of the ids' tokenizer (one above its largest id), the `padding_id`
    and the `ceiling` of accuracy. Without a vocab_size, the ids are taken for GPT-2's if the tokenizer is larger than
    GPT-2's, and must all lie in its vocabulary if it is not. Without a padding_id, 50259 is padding, as in OpenAI's
    files; where that is a token, padding_id must be given, and be no token.
    """
    # [D19] Choices among samples.   label_types.py#L33-L55
    # [D21] Ratings and differences.   label_types.py#L58-L120
    path = find_label_file(label_dataset, task.query_dataset)
    what, vocab_size = f"{flag('label_dataset')} {path}", models.vocabulary_size(tokenizer)
    try:
        rows = files.read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{what}: {error}") from error
    meta = read_sidecar(path.with_suffix(".meta.json"))
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{what}: must be a JSON array of objects, and not empty")
    their_vocab_size = meta.get("vocab_size", OPENAI_VOCAB_SIZE if vocab_size > OPENAI_VOCAB_SIZE else vocab_size)
    if their_vocab_size != vocab_size:
        raise InputError(
            f"{what}: holds ids of a vocabulary of {their_vocab_size}, but the tokenizer of the base model has "
            f"{vocab_size}; use the model whose tokenizer wrote the file"
        )
    padding_id = meta.get("padding_id", OPENAI_PAD_ID)
    if 0 <= padding_id < vocab_size:
        raise InputError(
            f"{what}: its padding id {padding_id} is one of the tokenizer's {vocab_size} ids; pad with another, such "
            f'as {vocab_size}, and name it in {path.with_suffix(".meta.json").name}: "padding_id": {vocab_size}'
        )
    kind = next((kind for kind in get_args(LabelKind) if kind in rows[0]), None)
    if kind is None:
        raise InputError(f"{what}: row 0 has none of the keys {', '.join(get_args(LabelKind))}")
    try:
        sample_keys = sample_keys_of(rows[0], kind)
    except InputError as error:
        raise InputError(f"{what}: {error}") from error
    lengths = {"query": ("query_length", task.query_length)}
    lengths |= dict.fromkeys(sample_keys, ("response_length", task.response_length))
    for number, row in enumerate(rows):
        try:
            check_label(row, kind, lengths, vocab_size, padding_id)
        except InputError as error:
            raise InputError(f"{what}: row {number} {error}") from error

    def tokens(key: str) -> torch.Tensor:
        return torch.tensor([[vocab_size if token == padding_id else token for token in row[key]] for row in rows])

    return Labels(
        queries=tokens("query"),
        samples=torch.stack([tokens(key) for key in sample_keys], dim=1),
        targets=torch.tensor([row[kind] for row in rows], dtype=torch.long if kind == "best" else torch.float32),
        ceiling=meta.get("ceiling"),
        kind=kind,
    )
