"""Rows of data files, in any format: they are read as they were meant, or refused in one line that names them."""

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, configuration, given, settings, strategies as st
from refusals import changed
from runs import error_line
from small_posts import COMPARISON, POST, task
from small_problems import TOKENIZER

from ppo_rlhf import train_policy, train_reward
from ppo_rlhf.rlvr import problems
from ppo_rlhf.tldr import posts
from ppo_rlhf.train_reward import OPENAI_PAD_ID, Labels

# The same examples every time, and nothing kept from one time to the next.
FUZZ = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=150,
    phases=[Phase.generate],  # any one fault will do, small or not
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
# As soon as tests are collected, hypothesis writes down what constants it found in the sources.
configuration.set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "hypothesis")
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")  # of files that are nested deeply


class Vocabulary:
    """As much of a tokenizer as reading rows takes: a token is a character's code, and code 0 ends a text."""

    eos_token_id = 0

    def __init__(self, size: int):
        self.size = size

    def get_vocab(self) -> dict[str, int]:
        return {"the last token": self.size - 1}

    def encode(self, text: str, **_) -> list[int]:
        return [ord(letter) % self.size for letter in text]


# ---- Formats ---------------------------------------------------------------------------------------------------


def read_labels(path: Path, vocab_size: int = 10) -> Labels:
    task = train_reward.TaskArgs(query_length=3, response_length=2)
    return train_reward.read_labels(str(path), task, Vocabulary(vocab_size))


def read_problems(path: Path) -> problems.Problems:
    source = problems.TaskArgs(
        problems=str(path), test_problems="other.jsonl", prompt_format="plain", prompt_suffix=""
    )
    return problems.read_problems(source, TOKENIZER, "train", verifier="gsm8k_strict")


def load_texts(path: Path) -> Sequence[str]:
    return train_policy.load_texts(str(path), "train")


def to_json(value: Any) -> bytes:
    return json.dumps(value).encode()


@dataclass(frozen=True)
class Format:
    file: str
    rows: list[Any]
    read: Callable[[Path], Any]
    place: str = ", line 2"
    """what a message calls the second row"""
    sidecar: str = ""
    """name of the file that holds facts about this one, if there may be one"""

    def written(self, rows: list[Any]) -> bytes:
        return to_json(rows) if self.file.endswith(".json") else b"".join(to_json(row) + b"\n" for row in rows)


def labels_format(*rows: dict[str, Any]) -> Format:
    return Format("labels.json", list(rows), read_labels, ", row 2, is no label", sidecar="labels.meta.json")


CHOICES = [
    {"query": [1, 2, OPENAI_PAD_ID], "sample0": [3, 4], "sample1": [5, OPENAI_PAD_ID], "sample2": [0, 9], "best": 2},
    {"query": [7, 8, 9], "sample0": [1, 1], "sample1": [2, 2], "sample2": [3, 3], "best": 0, "note": "extra"},
]
TEXTS = ["One.", {"text": "Two."}]
FORMATS = {
    "choices": labels_format(*CHOICES),
    "ratings": labels_format(*({"query": [1, 2, 3], "sample": [3, 4], "score": 1.5 - i} for i in range(2))),
    "differences": labels_format(*[{"query": [1, 2, 3], "sample0": [3, 4], "sample1": [5, 6], "difference": -2}] * 2),
    "posts": Format(
        "posts_train.jsonl",
        [POST, POST],
        lambda path: posts.read_posts(task(path.parent), Vocabulary(128), "train"),
    ),
    "comparisons": Format(
        "comparisons_train.jsonl",
        [COMPARISON, COMPARISON],
        lambda path: posts.read_comparisons(task(path.parent), Vocabulary(128), "train"),
        sidecar="world.json",
    ),
    "problems": Format(
        "problems.jsonl",
        [{"question": f"{i}+{i}?", "answer": f"#### {2 * i}"} for i in range(2)],
        read_problems,
    ),
    "texts": Format("texts.json", TEXTS, load_texts, ""),
    "texts in lines": Format("texts.jsonl", TEXTS, load_texts, ""),
}


# ---- Damage that a message describes ---------------------------------------------------------------------------

GONE = KeyError  # as changed() has it: nothing is there
HALF = "Wet \udcff"  # half a character
PAIR = [{"text": "a"}, {"text": "b"}]
BAD = {  # format: places in a row, and what they cannot hold
    "choices": {
        "query": [GONE, [1, 2], [1, 2, "3"]],
        "sample1": [[1, 11], [1, OPENAI_PAD_ID + 1], [1, 10**30]],
        "best": [GONE, 3, -1, "1"],
    },
    "ratings": {"score": ["1", float("nan"), 1e39], "sample": [GONE]},
    "differences": {"difference": [float("-inf")], "sample1": [GONE]},
    "posts": {"title": [GONE, 3], "summary": [HALF]},
    "comparisons": {
        "info": [GONE, "mill"],
        "info/article": [7],
        "summaries": [PAIR[:1], [*PAIR, *PAIR], ["a", "b"]],
        "summaries/1/text": [HALF],
        "choice": [2, True],
    },
    "problems": {"question": [GONE, HALF], "answer": [[1, 2], True, float("nan")]},
    "texts": {"": [3, {"content": "Two."}, HALF]},
    "texts in lines": {"": [None, {"text": 1}, HALF]},
}


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [(kind, path, value) for kind, rows in BAD.items() for path, values in rows.items() for value in values],
)
def test_a_bad_row_is_named(tmp_path, kind, path, value):
    form, keys = FORMATS[kind], [int(key) if key.isdigit() else key for key in filter(None, path.split("/"))]
    row = changed(form.rows[1], *keys, to=value) if keys else value
    file = tmp_path / form.file
    file.write_bytes(form.written([form.rows[0], row]))
    line = error_line(form.read, file)
    assert line.startswith("--") and str(file) in line and form.place in line


@pytest.mark.parametrize("kind", FORMATS)
def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path, kind):
    """Windows puts one before UTF-8."""
    form, mark = FORMATS[kind], b"\xef\xbb\xbf"
    (tmp_path / form.file).write_bytes(mark + form.written(form.rows))
    if form.sidecar:
        (tmp_path / form.sidecar).write_bytes(mark + b'{"ceiling": 0.5}')
    form.read(tmp_path / form.file)


# ---- Damage of any kind ----------------------------------------------------------------------------------------

ODD_KEYS = ["sample00", "sample٣", "sample-1", "sample" + "9" * 5_000, "sample", "score", "", "Query", "\ud800"]
ODD_VALUES = [
    *("", "1", "two\nlines", "\ud800", None, True, False, [], {}, [[]], [[1]], {"query": [1]}),
    *(-1, 0, 1, 2, 2**31, 2**63, -(2**63), 10**400, OPENAI_PAD_ID - 1, OPENAI_PAD_ID, OPENAI_PAD_ID + 1),
    *(-0.0, 1.0, 1e-320, 1e7, 1e39, 1e308, float("nan"), float("inf"), -float("inf")),
]
json_values = st.recursive(
    st.sampled_from(ODD_VALUES) | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(ODD_KEYS), inner, max_size=4),
    max_leaves=12,
)
facts = st.dictionaries(st.sampled_from(["vocab_size", "padding_id", "ceiling", "held_out", "note"]), json_values)
any_bytes = st.binary(max_size=200) | st.sampled_from([b"[", b'{"":']).map(lambda part: part * 50_000)


def places_in(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Where there is something, and where an object might hold something odd."""
    yield path
    items = list(value.items() if type(value) is dict else enumerate(value) if type(value) is list else ())
    items += [(key, None) for key in ODD_KEYS] if type(value) is dict else []
    for key, inner in items:
        yield from places_in(inner, (*path, key))


@st.composite
def damaged(draw: st.DrawFn, kind: str) -> tuple[bytes, bytes | None]:
    """A file to which one thing has happened, and what is in the file of facts about it, if there is one."""
    form = FORMATS[kind]
    path = draw(st.sampled_from([path for path in places_in(form.rows) if path]))
    content = form.written(form.rows)
    where = draw(st.integers(0, len(content) - 1))
    broken = draw(
        json_values.map(lambda value: form.written(changed(form.rows, *path, to=value)))
        | json_values.map(to_json)
        | any_bytes
        | st.binary(max_size=1).map(lambda byte: content[:where] + byte + content[where + 1 :])
        | st.just(content[:where])
    )
    return draw(st.tuples(st.just(broken), st.none()) | st.tuples(st.just(content), any_bytes | facts.map(to_json)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("rows")


@pytest.mark.parametrize("kind", ["choices", "posts", "comparisons", "problems", "texts in lines"])
def test_files_with_any_damage(kind, folder):
    """They can be read, or an InputError of one line names the file."""
    form = FORMATS[kind]

    @FUZZ
    @given(damaged(kind))
    def search(file: tuple[bytes, bytes | None]) -> None:
        content, facts = file
        (folder / form.file).write_bytes(content)
        if form.sidecar:
            (folder / form.sidecar).write_bytes(facts or b"{}")
        try:
            form.read(folder / form.file)
        except (train_policy.InputError, train_reward.InputError) as error:
            # Where no row is left, it names the folder.
            assert str(folder) in str(error) and len(str(error).splitlines()) == 1

    search()


# ---- Labels ----------------------------------------------------------------------------------------------------


def labels_of(folder: Path, rows: list[dict[str, Any]], meta: Any, vocab_size: int = 10) -> Labels:
    (folder / "labels.json").write_bytes(to_json(rows))
    (folder / "labels.meta.json").write_bytes(to_json(meta))
    return read_labels(folder / "labels.json", vocab_size)


@pytest.mark.parametrize(("kind", "target", "samples"), [("best", 10, 11), ("score", -1.5, 1), ("difference", 7, 2)])
@pytest.mark.parametrize(("vocab_size", "padding_id"), [(2, 2), (2, -1), (60_000, 60_007)])
def test_valid_labels_are_read_as_they_were_written(tmp_path, kind, target, samples, vocab_size, padding_id):
    """A row without padding and one with it; eleven samples are in the order of their numbers."""
    names = [f"sample{i}" for i in range(samples)] if samples > 1 else ["sample"]
    rows = [
        {"query": query, kind: target - i} | {name: [(i + j) % 2, last] for j, name in enumerate(names)}
        for i, (query, last) in enumerate([([0, 1, vocab_size - 1], 1), ([1, padding_id, padding_id], padding_id)])
    ]
    labels = labels_of(tmp_path, rows, {"vocab_size": vocab_size, "padding_id": padding_id}, vocab_size)

    def ids(tokens: torch.Tensor) -> list[int]:
        return [padding_id if token == vocab_size else token for token in tokens.tolist()]

    for row, query, of_row, read_target in zip(rows, labels.queries, labels.samples, labels.targets, strict=True):
        found = {"query": ids(query), labels.kind: read_target.item()}
        assert row == found | dict(zip(names, map(ids, of_row), strict=True))


def test_a_file_of_texts_is_that_of_their_ids(tmp_path, monkeypatch):
    """Each text is encoded on its own, and the longest gives the width."""
    monkeypatch.setattr(Vocabulary, "encode", lambda self, text, **_: [int(digit) for digit in text])
    texts = [
        {"query": "123", "sample0": "45", "sample1": "6", "best": 1},
        {"query": "", "sample0": "789", "sample1": "1", "best": 0},
    ]
    labels = labels_of(tmp_path, texts, {"held_out": 1})
    assert labels.queries.tolist() == [[1, 2, 3], [10, 10, 10]]
    assert labels.samples.tolist() == [[[4, 5, 10], [6, 10, 10]], [[7, 8, 9], [1, 10, 10]]]
    assert labels.targets.tolist() == [1, 0] and labels.held_out == 1
    assert labels_of(tmp_path, texts[1:], {}).queries.shape == (1, 0)  # no row has a query


@pytest.mark.parametrize(
    ("vocab_size", "meta", "words"),
    [
        (10, {"vocab_size": 11}, "a vocabulary of 11, but the base model's tokenizer has 10;"),
        (60_000, {}, "a vocabulary of 50257, but the base model's tokenizer has 60000;"),
        (60_000, {"vocab_size": 60_000}, "its padding id 50259 is one of the tokenizer's 60000 ids"),
        (10, {"held_out": -1}, "held_out Input should be greater than or equal to 0"),
    ],
)
def test_what_the_sidecar_of_labels_says_is_refused_if_it_cannot_be(tmp_path, vocab_size, meta, words):
    assert words in error_line(labels_of, tmp_path, CHOICES, meta, vocab_size)
