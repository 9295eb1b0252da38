"""Rows of data files, in any format: they are read as they were meant, or refused in one line that names them."""

import json
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, Phase, configuration, given, settings, strategies as st
from runs import error_line
from test_problems import TOKENIZER
from test_tldr_data import COMPARISON, POST, changed

from ppo_rlhf import train_policy
from ppo_rlhf.lib import data_files, label_files, pretrained, text_sources
from ppo_rlhf.lib.errors import InputError
from ppo_rlhf.lib.label_files import OPENAI_PAD_ID, OPENAI_VOCAB_SIZE, Labels
from ppo_rlhf.rlvr import problems
from ppo_rlhf.tldr import posts

# The same examples every time, and nothing kept from one time to the next.
FUZZ = settings(
    derandomize=True, deadline=None, database=None, max_examples=250, suppress_health_check=list(HealthCheck)
)
FIND = settings(FUZZ, phases=[Phase.generate], report_multiple_bugs=False)  # any one fault will do, small or not
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


def read_labels(path: Path, vocab_size: int = 10, query_length: int = 3, response_length: int = 2) -> Labels:
    task = train_policy.TaskArgs(query_dataset="dummy", query_length=query_length, response_length=response_length)
    return label_files.read_labels(str(path), task, Vocabulary(vocab_size))


def check_labels(labels: Labels, vocab_size: int = 10, query_length: int = 3, length: int = 2) -> None:
    """What Labels promise."""
    count, n, response_length = labels.samples.shape
    assert labels.queries.shape == (count, query_length) and response_length == length
    assert labels.targets.shape == (count,) and count > 0
    for ids in (labels.queries, labels.samples):
        assert ids.dtype == torch.long
        assert ((ids >= 0) & (ids <= vocab_size)).all()
    if labels.kind == "best":
        assert labels.targets.dtype == torch.long
        assert ((labels.targets >= 0) & (labels.targets < n)).all()
    else:
        assert labels.targets.dtype == torch.float32 and labels.targets.isfinite().all()
        assert n == {"score": 1, "difference": 2}[labels.kind]


def of_posts(read: Callable) -> Callable[[Path], Any]:
    sizes = {"query_length": 80, "response_length": 14, "comparison_length": 12, "article_query_length": 60}

    def read_file(path: Path) -> Any:
        task = posts.TaskArgs(posts=str(path.parent), comparisons=str(path.parent), **sizes)
        return read(task, Vocabulary(128), "train")

    return read_file


def check_posts(found: posts.Posts) -> None:
    assert found.queries.shape == (len(found), 80) and found.references.shape == (len(found), 14) and len(found)


def check_comparisons(found: posts.Comparisons) -> None:
    assert found.queries.shape == (len(found), 80) and found.chosen.shape == found.rejected.shape == (len(found), 12)
    assert (found.chosen != found.rejected).any(1).all() and len(found) == len(found.groups) > 0
    assert found.ceiling is None or 0 <= found.ceiling <= 1


def read_problems(path: Path) -> problems.Problems:
    task = problems.TaskArgs(problems=str(path), test_problems="other.jsonl", prompt_format="plain", prompt_suffix="")
    return problems.read_problems(task, TOKENIZER, "train", verifier="gsm8k_strict")


def check_problems(found: problems.Problems) -> None:
    assert len(found.texts) == len(found.answers) == len(found.prompts) > 0 and all(found.prompts)
    assert all(float(answer) == float(answer) for answer in found.answers)


def check_texts(found: list[str]) -> None:
    assert all(type(text) is str and text.strip() and text.encode() for text in found)


def lines_of(rows: list[Any]) -> bytes:
    return b"".join(to_json(row) + b"\n" for row in rows)


def to_json(value: Any) -> bytes:
    return json.dumps(value).encode()


@dataclass(frozen=True, kw_only=True)
class Format:
    rows: list[Any]
    file: str
    read: Callable[[Path], Any]
    check: Callable[[Any], None]
    """of what was read"""
    place: str
    """what a message calls the second row"""
    written: Callable[[list[Any]], bytes] = lines_of
    sidecar: str = ""
    """name of the file that holds facts about this one, if there may be one"""


CHOICES = [
    {"query": [1, 2, OPENAI_PAD_ID], "sample0": [3, 4], "sample1": [5, OPENAI_PAD_ID], "sample2": [0, 9], "best": 2},
    {"query": [7, 8, 9], "sample0": [1, 1], "sample1": [2, 2], "sample2": [3, 3], "best": 0, "note": "extra"},
]
RATINGS = [{"query": row["query"], "sample": row["sample0"], "score": 1.5 - i} for i, row in enumerate(CHOICES)]
DIFFERENCES = [{"difference": -2} | {key: row[key] for key in ("query", "sample1", "sample0")} for row in CHOICES]
LABELS = {
    "file": "labels.json",
    "read": read_labels,
    "check": check_labels,
    "place": ": row 1 is no label",
    "written": to_json,
}
FORMATS = {
    "choices": Format(rows=CHOICES, **LABELS),
    "ratings": Format(rows=RATINGS, **LABELS),
    "differences": Format(rows=DIFFERENCES, **LABELS),
    "posts": Format(
        rows=[POST, POST],
        file="posts_train.jsonl",
        read=of_posts(posts.read_posts),
        check=check_posts,
        place=", line 2",
    ),
    "comparisons": Format(
        rows=[COMPARISON, COMPARISON],
        file="comparisons_train.jsonl",
        read=of_posts(posts.read_comparisons),
        check=check_comparisons,
        place=", line 2",
        sidecar="world.json",
    ),
    "problems": Format(
        rows=[{"question": f"{i}+{i}?", "answer": f"#### {2 * i}"} for i in range(2)],
        file="problems.jsonl",
        read=read_problems,
        check=check_problems,
        place=", line 2",
    ),
    "texts": Format(
        rows=["One.", {"text": "Two."}],
        file="texts.json",
        read=text_sources.read_text_file,
        check=check_texts,
        place="row 2",
        written=to_json,
    ),
    "texts in lines": Format(
        rows=["One.", {"text": "Two."}],
        file="texts.jsonl",
        read=text_sources.read_text_file,
        check=check_texts,
        place="row 2",
    ),
}


def refused(kind: str, content: bytes, folder: Path) -> str:
    """The one line about a file with this content, which names it."""
    form = FORMATS[kind]
    (folder / form.file).write_bytes(content)
    line = error_line(form.read, folder / form.file)
    assert line.startswith("--") and str(folder / form.file) in line
    return line


# ---- Damage that a message describes ---------------------------------------------------------------------------

GONE = KeyError  # as changed() has it: nothing is there
HALF = "Wet \udcff"  # half a character


PAIR = [{"text": "a"}, {"text": "b"}]
IDS = [[1, 2, "3"], [1, 2, None], [1, 2, [3]], [1, 2, -1]]
BAD = {  # format: places in a row, and what they cannot hold
    "choices": {
        "query": [GONE, [1, 2], [1, 2, 3, 4], *IDS],
        "sample0": [[]],
        "sample1": [GONE, [1, 11], [1, OPENAI_PAD_ID - 1], [1, OPENAI_PAD_ID + 1], [1, 10**30]],
        "sample2": [[1]],
        "best": [GONE, 3, -1, "1"],
    },
    "ratings": {"score": [GONE, "1", None, float("nan"), float("inf"), 1e39], "sample": [GONE, [1]]},
    "differences": {"difference": [GONE, "1", float("-inf")], "sample1": [GONE, [1]]},
    "posts": {"title": [GONE, 3], "post": [GONE, None], "summary": [GONE, HALF], "subreddit": [HALF]},
    "comparisons": {
        "info": [GONE, "mill"],
        "info/post": [GONE],
        "info/subreddit": [GONE],
        "info/article": [7],
        "info/title": [HALF],
        "summaries": [GONE, PAIR[:1], [*PAIR, *PAIR], ["a", "b"]],
        "summaries/1/text": [GONE, HALF],
        "choice": [GONE, 2, -1, True, "1"],
    },
    "problems": {"question": [GONE, None, "\ud83d"], "answer": [GONE, [1, 2], True, float("nan")]},
    "texts": {"": [3, None, {"content": "Two."}, {"text": 1}, "Half \ud800"]},
    "texts in lines": {"": [3, None, {"content": "Two."}, {"text": 1}, "Half \ud800"]},
}


def bad_rows() -> Iterator[tuple[str, str, Any]]:
    return ((kind, path, value) for kind, rows in BAD.items() for path, values in rows.items() for value in values)


@pytest.mark.parametrize(("kind", "path", "value"), list(bad_rows()))
def test_a_bad_row_is_named(tmp_path, kind, path, value):
    form, keys = FORMATS[kind], [int(key) if key.isdigit() else key for key in filter(None, path.split("/"))]
    row = changed(form.rows[1], *keys, to=value) if keys else value
    line = refused(kind, form.written([form.rows[0], row]), tmp_path)
    assert form.place in line


@pytest.mark.parametrize("kind", FORMATS)
def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path, kind):
    """Windows puts one before UTF-8."""
    form, mark = FORMATS[kind], b"\xef\xbb\xbf"
    (tmp_path / form.file).write_bytes(mark + form.written(form.rows))
    if form.sidecar:
        (tmp_path / form.sidecar).write_bytes(mark + b'{"ceiling": 0.5}')
    form.check(form.read(tmp_path / form.file))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_of_another_kind_is_named(tmp_path, kind):
    good = FORMATS[kind].written(FORMATS[kind].rows)
    for content in (good[:-9], b"wet", b"7\n", b"\xff\xfe\x00" + good, b"[" * 100_000):
        refused(kind, content, tmp_path)
    if FORMATS[kind].written is to_json:
        for content in (b"", b"{}", b"null", b'"One."'):
            refused(kind, content, tmp_path)
    else:
        assert FORMATS[kind].place in refused(kind, lines_of(FORMATS[kind].rows[:1]) + b"{", tmp_path)
    if not kind.startswith("texts"):
        for content in (to_json([1]), to_json(["row"]), to_json([[1]])):
            refused(kind, content, tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"3", b"\xff", b'{"ceiling": "high"}', b'{"ceiling": 1.5}'])
def test_a_damaged_file_of_facts_is_named(tmp_path, content):
    form = FORMATS["comparisons"]
    (tmp_path / form.file).write_bytes(form.written(form.rows))
    (tmp_path / form.sidecar).write_bytes(content)
    with pytest.raises(InputError, match=f"^[^\n]*{form.sidecar}[^\n]*$"):
        form.read(tmp_path / form.file)


# ---- Labels that a message describes ---------------------------------------------------------------------------


def labels_of(folder: Path, rows: list[dict[str, Any]], meta: Any = None, *sizes: int) -> Labels:
    """What is read of these rows. meta: the facts about them. sizes: as read_labels takes them."""
    path, sidecar = folder / "labels.json", folder / "labels.meta.json"
    path.write_bytes(to_json(rows))
    sidecar.unlink(missing_ok=True)
    if meta is not None:
        sidecar.write_bytes(to_json(meta))
    return read_labels(path, *sizes)


def test_a_file_of_texts_is_that_of_their_ids(tmp_path, monkeypatch):
    """Each text is encoded on its own, and the longest gives the width."""
    monkeypatch.setattr(Vocabulary, "encode", lambda self, text, **_: [int(digit) for digit in text])
    texts = [
        {"query": "123", "sample0": "45", "sample1": "6", "best": 1},
        {"query": "", "sample0": "789", "sample1": "1", "best": 0},
    ]
    labels = labels_of(tmp_path, texts)
    assert labels.queries.tolist() == [[1, 2, 3], [10, 10, 10]]
    assert labels.samples.tolist() == [[[4, 5, 10], [6, 10, 10]], [[7, 8, 9], [1, 10, 10]]]
    assert labels.targets.tolist() == [1, 0] and labels.held_out == 2
    assert labels_of(tmp_path, texts, meta={"held_out": 1}).held_out == 1
    for value in ([7], None):
        assert "row 1 " in error_line(labels_of, tmp_path, [texts[0], texts[1] | {"query": value}])


@pytest.mark.parametrize(
    ("kind", "samples", "words"),
    [
        ("best", ["sample0", "sample2"], "row 0 is no label: KeyError: 'sample1'"),
        ("score", ["sample0", "sample1"], "row 0 is no label: KeyError: 'sample'"),
        ("note", ["sample0", "sample1"], "row 0 has none of the keys best, score, difference"),
    ],
)
def test_samples_are_those_of_the_kind_of_label(tmp_path, kind, samples, words):
    row = {"query": [1, 2, 3], kind: 0} | {sample: [1, 2] for sample in samples}
    assert words in error_line(labels_of, tmp_path, [row])


@pytest.mark.parametrize(("vocab_size", "meta"), [(10, {"vocab_size": 11}), (60_000, None), (60_000, {})])
def test_labels_of_another_tokenizer_are_refused(tmp_path, vocab_size, meta):
    message = error_line(labels_of, tmp_path, CHOICES, meta, vocab_size)
    assert f"a vocabulary of {11 if meta else 50257}, but" in message and f"has {vocab_size};" in message


def test_a_large_vocabulary_names_its_padding(tmp_path):
    """GPT-2's padding id, 50259, is one of its tokens and may be in a text."""
    rows = [{"query": [1, 50259, 60_003], "sample0": [50259, 3], "sample1": [4, 60_003], "best": 0}]
    labels = labels_of(tmp_path, rows, {"vocab_size": 60_003, "padding_id": 60_003}, 60_003)
    assert labels.queries.tolist() == [[1, 50259, 60_003]]
    assert labels.samples.tolist() == [[[50259, 3], [4, 60_003]]]
    rows = [{"query": [1, 2, -100], "sample0": [5, 3], "sample1": [4, -100], "best": 0}]
    assert labels_of(tmp_path, rows, {"vocab_size": 10, "padding_id": -100}).queries.tolist() == [[1, 2, 10]]
    for meta, padding in (({}, 50259), ({"padding_id": 7}, 7)):
        message = error_line(labels_of, tmp_path, rows, {"vocab_size": 60_003, **meta}, 60_003)
        assert f"its padding id {padding} is one of the tokenizer's 60003 ids" in message
        assert 'labels.meta.json: "padding_id": 60003' in message


# ---- Damage of any kind ----------------------------------------------------------------------------------------

ODD_KEYS = ["sample00", "sample٣", "sample-1", "sample" + "9" * 5_000, "sample", "score", "", "Query", "\ud800"]
ODD_TEXTS = ["", "1", "two\nlines", "\ud800"]
ODD_NUMBERS = [
    *(-1, 0, 1, 2, 2**31, 2**63, -(2**63), 10**400, OPENAI_PAD_ID - 1, OPENAI_PAD_ID, OPENAI_PAD_ID + 1),
    *(0.0, -0.0, 1.0, 1e-320, 1e6, 1e7, 1e39, 1e308, float("nan"), float("inf"), -float("inf")),
]
ODD_OBJECTS = [None, True, False, [], {}, [[]], [[1]], {"query": [1]}]
odd_values = st.sampled_from([ODD_TEXTS, ODD_NUMBERS, ODD_OBJECTS]).flatmap(st.sampled_from)
json_values = st.recursive(
    odd_values | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(ODD_KEYS), inner, max_size=4),
    max_leaves=12,
)
too_deep = st.sampled_from([b"[", b'{"":']).map(lambda part: part * 50_000)


def places_in(value: Any, path: tuple = ()) -> Iterator[tuple]:
    yield path
    items = value.items() if type(value) is dict else enumerate(value) if type(value) is list else ()
    for key, inner in items:
        yield from places_in(inner, (*path, key))


@st.composite
def damaged(draw: st.DrawFn, kinds: tuple[str, ...] = tuple(FORMATS)) -> tuple[str, bytes, bytes | None]:
    """A format, a file to which one thing has happened, and what is in the file of facts."""
    kind = draw(st.sampled_from(kinds))
    form = FORMATS[kind]
    path = draw(st.sampled_from([path for path in places_in(form.rows) if path]))
    content, facts = form.written(form.rows), None

    def change() -> bytes:
        return form.written(changed(form.rows, *path, to=draw(odd_values | json_values)))

    def remove() -> bytes:
        return form.written(changed(form.rows, *path))

    def add_key() -> bytes:
        row = form.rows[0] if type(form.rows[0]) is dict else {}
        return form.written([row | {draw(st.sampled_from(ODD_KEYS)): draw(odd_values)}, *form.rows[1:]])

    def double_key() -> bytes:
        """JSON allows a key to stand twice in an object."""
        twice = b'{"' + draw(st.sampled_from(["query", "best", "title", "text"])).encode() + b'":'
        return content.replace(b"{", twice + to_json(draw(odd_values)) + b",", 1)

    def change_bytes() -> bytes:
        where = draw(st.integers(0, len(content) - 1))
        byte = st.binary(min_size=1, max_size=1).map(lambda byte: byte + content[where + 1 :])
        return content[:where] + draw(st.just(b"") | byte | too_deep)

    ways = [change, change, remove, add_key, double_key, change_bytes]
    if form.sidecar and draw(st.booleans()):
        name = draw(st.sampled_from(["vocab_size", "padding_id", "ceiling", "held_out", "note"]))
        facts = draw(st.binary(max_size=8) | json_values.map(to_json) | odd_values.map(lambda x: to_json({name: x})))
        return kind, content, facts
    return kind, draw(st.sampled_from(ways))(), None


def check_any(kind: str, content: bytes, facts: bytes | None, folder: Path) -> None:
    """What was read keeps its promises, or an InputError of one line names the file."""
    form = FORMATS[kind]
    (folder / form.file).write_bytes(content)
    if form.sidecar:
        (folder / form.sidecar).unlink(missing_ok=True)
        if facts is not None:
            (folder / form.sidecar).write_bytes(facts)
    try:
        found = form.read(folder / form.file)
    except InputError as error:
        # Where no row is left, it names the folder.
        assert str(folder) in str(error) and len(str(error).splitlines()) == 1
    else:
        form.check(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@settings(FUZZ, max_examples=900)
@given(file=damaged())
def test_files_with_any_damage(file: tuple, folder: Path) -> None:
    check_any(*file, folder)


@FUZZ
@given(kind=st.sampled_from(list(FORMATS)), content=st.binary(max_size=200) | too_deep | json_values.map(to_json))
def test_any_bytes_and_any_json(kind: str, content: bytes, folder: Path) -> None:
    check_any(kind, content, None, folder)


# ---- Valid labels of any size ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    rows: list[dict[str, Any]]
    meta: dict[str, Any] | None
    sizes: tuple[int, int, int]
    """of the vocabulary, a query and a response"""

    @property
    def padding_id(self) -> int:
        return (self.meta or {}).get("padding_id", OPENAI_PAD_ID)


@st.composite
def valid_labels(draw: st.DrawFn) -> Written:
    vocab_size = draw(st.sampled_from([1, 2, 10, 1_000, 50_256, 50_257, 50_258, 60_000]))
    query_length, response_length = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["best", "score", "difference"]))
    n = {"best": draw(st.sampled_from([2, 3, 4, 11])), "score": 1, "difference": 2}[kind]
    targets = st.integers(0, n - 1) if kind == "best" else st.floats(-1e6, 1e6) | st.integers(-(10**6), 10**6)
    rng = random.Random(draw(st.integers(0, 2**32)))
    padding = {"padding_id": st.sampled_from([vocab_size, vocab_size + 7, -1])}
    must, may = ({}, padding) if vocab_size <= OPENAI_PAD_ID else (padding, {})
    meta = st.fixed_dictionaries(
        {"vocab_size": st.just(vocab_size), **must},
        optional={"ceiling": st.floats(0.01, 1.0), "gold_mean": st.floats(-1, 1), **may},
    )
    # Without a sidecar, the ids are GPT-2's if the vocabulary is larger than GPT-2's.
    meta = draw(meta if vocab_size > OPENAI_VOCAB_SIZE else st.none() | meta)
    written = Written([], meta, (vocab_size, query_length, response_length))

    def ids(length: int) -> list[int]:
        real = rng.randint(1, length)
        return [rng.randrange(vocab_size) for _ in range(real)] + [written.padding_id] * (length - real)

    for _ in range(draw(st.integers(1, 3))):
        names = ["sample"] if kind == "score" else [f"sample{i}" for i in range(n)]
        row = {"query": ids(query_length)} | {name: ids(response_length) for name in names}
        row |= {kind: draw(targets)} | draw(st.dictionaries(st.just("note"), odd_values, max_size=1))
        written.rows.append(dict(rng.sample(list(row.items()), len(row))))
    return written


def check_valid(written: Written, folder: Path) -> None:
    """Valid files are read, and give back what was written."""
    labels = labels_of(folder, written.rows, written.meta, *written.sizes)
    check_labels(labels, *written.sizes)

    def ids(tokens: torch.Tensor) -> list[int]:
        return [written.padding_id if token == written.sizes[0] else token for token in tokens.tolist()]

    for row, query, samples, target in zip(written.rows, labels.queries, labels.samples, labels.targets, strict=True):
        names = ["sample"] if labels.kind == "score" else [f"sample{i}" for i in range(len(samples))]
        assert ids(query) == row["query"]
        assert [ids(sample) for sample in samples] == [row[name] for name in names]
        assert set(row) - {"note"} == {"query", labels.kind, *names}
        assert target.item() == torch.tensor(row[labels.kind], dtype=labels.targets.dtype).item()
    assert labels.ceiling == (written.meta or {}).get("ceiling")


@FUZZ
@given(written=valid_labels())
def test_valid_labels(written: Written, folder: Path) -> None:
    check_valid(written, folder)


# ---- Negative controls -----------------------------------------------------------------------------------------


def two_lines(*_: Any) -> None:
    raise InputError("labels.json: two\nlines")


# What a broken reader would do: the module, the name of a part of it, what is in its place, and of which files.
BROKEN_FOR_ANY = {
    "writes two lines": (pretrained, "vocabulary_size", two_lines, "choices"),
    "does not check comparisons": (posts, "check_comparison", lambda *_: None, "comparisons"),
    "does not check posts": (data_files, "check_row", lambda *_: None, "posts"),
}
BROKEN_FOR_VALID = {
    "takes another id for padding": ("OPENAI_PAD_ID", OPENAI_PAD_ID + 1),
    "refuses whole numbers as ratings": ("LARGEST_RATING", 1.0),
    "takes every vocabulary for GPT-2's": ("OPENAI_VOCAB_SIZE", 9),
}
FAULTS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@pytest.mark.parametrize(("module", "name", "broken", "kind"), BROKEN_FOR_ANY.values(), ids=BROKEN_FOR_ANY)
def test_a_broken_reader_is_caught_by_damaged_files(module: Any, name: str, broken: Any, kind: str, folder: Path):
    @settings(FIND, max_examples=3_000)
    @given(file=damaged((kind,)))
    def search(file: tuple) -> None:
        check_any(*file, folder)

    with patch.object(module, name, broken), pytest.raises(FAULTS):
        search()


@pytest.mark.parametrize(("name", "broken"), BROKEN_FOR_VALID.values(), ids=BROKEN_FOR_VALID)
def test_a_broken_reader_is_caught_by_valid_files(name: str, broken: Any, folder: Path) -> None:
    @settings(FIND, max_examples=3_000)
    @given(written=valid_labels())
    def search(written: Written) -> None:
        check_valid(written, folder)

    with patch.object(label_files, name, broken), pytest.raises(FAULTS):
        search()
