"""Whatever a label file and its sidecar hold, they are read as Labels or refused in one line."""

import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, Phase, configuration, given, settings, strategies as st

from ppo_rlhf.lib import label_files
from ppo_rlhf.lib.errors import InputError
from ppo_rlhf.lib.label_files import OPENAI_PAD_ID, OPENAI_VOCAB_SIZE, Labels
from ppo_rlhf.lib.texts import TaskArgs

# The same examples every time, and nothing kept from one time to the next.
FUZZ = settings(
    derandomize=True, deadline=None, database=None, max_examples=100, suppress_health_check=list(HealthCheck)
)
FIND = settings(FUZZ, phases=[Phase.generate], report_multiple_bugs=False)  # any one fault will do, small or not
# As soon as tests are collected, hypothesis writes down what constants it found in the sources.
configuration.set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "hypothesis")
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")  # of files that are nested deeply


class Vocabulary:
    """As much of a tokenizer as reading labels takes."""

    def __init__(self, size: int):
        self.size = size

    def get_vocab(self) -> dict[str, int]:
        return {"the last token": self.size - 1}


@dataclass(frozen=True)
class Files:
    """A label file, its sidecar, and the sizes that they are read with."""

    content: bytes = b""
    sidecar: bytes | None = None
    vocab_size: int = 10
    query_length: int = 3
    response_length: int = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("labels")


def read(files: Files, folder: Path) -> Labels:
    path, sidecar = folder / "labels.json", folder / "labels.meta.json"
    path.write_bytes(files.content)
    sidecar.unlink(missing_ok=True)
    if files.sidecar is not None:
        sidecar.write_bytes(files.sidecar)
    sizes = {"query_length": files.query_length, "response_length": files.response_length}
    return label_files.read_labels(str(path), TaskArgs(query_dataset="dummy", **sizes), Vocabulary(files.vocab_size))


# ---- Properties ------------------------------------------------------------------------------------------------


def padding_id(meta: dict[str, Any] | None) -> int:
    return (meta or {}).get("padding_id", OPENAI_PAD_ID)


def check_labels(labels: Labels, files: Files) -> None:
    """What Labels promise."""
    pad_id, (count, n, response_length) = files.vocab_size, labels.samples.shape
    assert labels.queries.shape == (count, files.query_length) and response_length == files.response_length
    assert labels.targets.shape == (count,) and count > 0
    for ids in (labels.queries, labels.samples):
        assert ids.dtype == torch.long
        assert ((ids >= 0) & (ids <= pad_id)).all()
        assert (ids[..., 0] != pad_id).all()
    if labels.kind == "best":
        assert labels.targets.dtype == torch.long and n >= 2
        assert ((labels.targets >= 0) & (labels.targets < n)).all()
    else:
        assert labels.targets.dtype == torch.float32 and labels.targets.isfinite().all()
        assert n == {"score": 1, "difference": 2}[labels.kind]
    assert labels.ceiling is None or 0 < labels.ceiling <= 1


def check_any(files: Files, folder: Path) -> None:
    """Labels that keep their promises, or an InputError of one line that names the file."""
    try:
        labels = read(files, folder)
    except InputError as error:
        assert str(folder / "labels.") in str(error)
        assert len(str(error).splitlines()) == 1
    else:
        check_labels(labels, files)


def check_valid(rows: list[dict[str, Any]], meta: dict[str, Any] | None, files: Files, folder: Path) -> None:
    """Valid files are read, and give back what was written."""
    labels = read(files, folder)
    check_labels(labels, files)

    def written(tokens: torch.Tensor) -> list[int]:
        return [padding_id(meta) if token == files.vocab_size else token for token in tokens.tolist()]

    for row, query, samples, target in zip(rows, labels.queries, labels.samples, labels.targets, strict=True):
        names = ["sample"] if labels.kind == "score" else [f"sample{i}" for i in range(len(samples))]
        assert written(query) == row["query"]
        assert [written(sample) for sample in samples] == [row[name] for name in names]
        assert set(row) - {"note"} == {"query", labels.kind, *names}
        assert target.item() == torch.tensor(row[labels.kind], dtype=labels.targets.dtype).item()
    assert labels.ceiling == (meta or {}).get("ceiling")


# ---- Files -----------------------------------------------------------------------------------------------------

KEYS = ["query", "sample", "sample0", "sample1", "sample2", "best", "score", "difference"]
ODD_KEYS = ["sample00", "sample٣", "sample-1", "sample" + "9" * 5_000, "", "Query", "\ud800"]
ODD_TEXTS = ["", "1", "two\nlines", "\ud800"]
ODD_NUMBERS = [
    *(-1, 0, 1, 2, 2**31, 2**63, -(2**63), 10**400, OPENAI_PAD_ID - 1, OPENAI_PAD_ID, OPENAI_PAD_ID + 1),
    *(0.0, -0.0, 1.0, 1e-320, 1e6, 1e7, 1e39, 1e308, float("nan"), float("inf"), -float("inf")),
]
ODD_OBJECTS = [None, True, False, [], {}, [[]], [[1]], {"query": [1]}]
odd_values = st.sampled_from([ODD_TEXTS, ODD_NUMBERS, ODD_OBJECTS]).flatmap(st.sampled_from)
any_keys = st.sampled_from([KEYS, ODD_KEYS]).flatmap(st.sampled_from)
json_values = st.recursive(
    odd_values | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_keys, inner, max_size=4),
    max_leaves=12,
)
json_rows = st.lists(st.dictionaries(any_keys, json_values, max_size=5), max_size=3)
too_deep = st.integers(1, 2).map(lambda kind: (b"[", b'{"":')[kind - 1] * 50_000)


def to_json(value: Any) -> bytes:
    return json.dumps(value).encode()


@st.composite
def valid_files(draw: st.DrawFn) -> tuple[list[dict[str, Any]], dict[str, Any] | None, Files]:
    """Rows, what stands beside them, and both as files."""
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
        optional={"ceiling": st.floats(0.01, 1.0), "note": odd_values, **may},
    )
    # Without a sidecar, the ids are GPT-2's if the vocabulary is larger than GPT-2's.
    meta = draw(meta if vocab_size > OPENAI_VOCAB_SIZE else st.none() | meta)

    def ids(length: int) -> list[int]:
        real = rng.randint(1, length)
        return [rng.randrange(vocab_size) for _ in range(real)] + [padding_id(meta)] * (length - real)

    rows = []
    for _ in range(draw(st.integers(1, 3))):
        names = ["sample"] if kind == "score" else [f"sample{i}" for i in range(n)]
        row = {"query": ids(query_length)} | {name: ids(response_length) for name in names}
        row |= {kind: draw(targets)} | draw(st.dictionaries(st.just("note"), odd_values, max_size=1))
        rows.append(dict(rng.sample(list(row.items()), len(row))))
    sidecar = None if meta is None else to_json(meta)
    return rows, meta, Files(to_json(rows), sidecar, vocab_size, query_length, response_length)


@st.composite
def damaged_files(draw: st.DrawFn) -> Files:
    """Valid files, to which one thing has happened."""
    rows, meta, files = draw(valid_files())
    row = draw(st.sampled_from(rows))
    key = draw(st.sampled_from(list(row)))

    def with_row(changed: dict[str, Any]) -> Files:
        return replace(files, content=to_json([changed if other is row else other for other in rows]))

    def drop_key() -> Files:
        return with_row({name: value for name, value in row.items() if name != key})

    def change_value() -> Files:
        return with_row(row | {key: draw(json_values)})

    def change_target() -> Files:
        (kind,) = {"best", "score", "difference"} & set(row)
        return with_row(row | {kind: draw(st.sampled_from(ODD_NUMBERS) | odd_values | st.floats())})

    def add_key() -> Files:
        return with_row(row | {draw(any_keys): row[key]})

    def change_ids() -> Files:
        name = draw(st.sampled_from([name for name in row if name == "query" or name.startswith("sample")]))
        ids, odd = list(row[name]), st.integers(-1, files.vocab_size + 1) | odd_values
        where = draw(st.integers(0, len(ids) - 1))
        length = draw(st.integers(0, 2))  # 0 shortens the list, 2 lengthens it
        ids[where : where + 1] = [draw(odd) for _ in range(length)]
        return with_row(row | {name: ids})

    def double_key() -> Files:
        """JSON allows a key to stand twice in an object."""
        twice = b"[{" + to_json(key) + b":" + to_json(draw(odd_values)) + b"," + files.content[2:]
        return replace(files, content=twice)

    def add_row() -> Files:
        return replace(files, content=to_json([*rows, draw(json_values)]))

    def change_bytes() -> Files:
        where = draw(st.integers(0, len(files.content) - 1))
        before, after = files.content[:where], files.content[where:]
        after = draw(st.just(b"") | st.binary(min_size=1, max_size=1).map(lambda byte: byte + after[1:]) | too_deep)
        return replace(files, content=before + after)

    def change_sidecar() -> Files:
        name = draw(st.sampled_from(["vocab_size", "padding_id", "ceiling", "note"]))
        return replace(files, sidecar=to_json((meta or {}) | {name: draw(odd_values)}))

    def break_sidecar() -> Files:
        return replace(files, sidecar=draw(st.binary(max_size=8) | json_values.map(to_json) | too_deep))

    ways: list[Callable[[], Files]] = [drop_key, change_value, change_target, add_key, change_ids, double_key]
    return draw(st.sampled_from([*ways, add_row, change_bytes, change_sidecar, break_sidecar]))()


byte_files = st.builds(Files, st.binary(max_size=200) | too_deep, st.none() | st.binary(max_size=40))
json_files = st.builds(
    Files, (json_values | json_rows).map(to_json), st.none() | json_values.map(to_json), query_length=st.just(1)
)

# ---- Tests -----------------------------------------------------------------------------------------------------


@FUZZ
@given(files=byte_files)
def test_any_bytes(files: Files, folder: Path) -> None:
    check_any(files, folder)


@FUZZ
@given(files=json_files)
def test_any_json(files: Files, folder: Path) -> None:
    check_any(files, folder)


@settings(FUZZ, max_examples=250)
@given(files=damaged_files())
def test_valid_files_with_damage(files: Files, folder: Path) -> None:
    check_any(files, folder)


@FUZZ
@given(written=valid_files())
def test_valid_files(written: tuple, folder: Path) -> None:
    check_valid(*written, folder)


def two_lines(*_: Any) -> None:
    raise InputError("labels.json: two\nlines")


# What a broken reader would do: the name of a part of label_files.py, and what stands in its place.
BROKEN_FOR_ANY = {
    "does not check the rows": ("check_label", lambda *_: None),
    "does not check the sidecar": (
        "read_sidecar",
        lambda path: json.loads(path.read_text()) if path.exists() else {},
    ),
    "writes two lines": ("check_label", two_lines),
    "takes infinite ratings": ("LARGEST_RATING", float("inf")),
}
BROKEN_FOR_VALID = {
    "takes another id for padding": ("OPENAI_PAD_ID", OPENAI_PAD_ID + 1),
    "orders samples by name": ("sample_keys_of", lambda row, kind: sorted(k for k in row if k.startswith("sample"))),
    "refuses whole numbers as ratings": ("LARGEST_RATING", 1.0),
    "takes every vocabulary for GPT-2's": ("OPENAI_VOCAB_SIZE", 9),
}
FAULTS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@pytest.mark.parametrize(("name", "broken"), BROKEN_FOR_ANY.values(), ids=BROKEN_FOR_ANY)
def test_a_broken_reader_is_caught_by_damaged_files(name: str, broken: Any, folder: Path) -> None:
    @settings(FIND, max_examples=3_000)
    @given(files=damaged_files())
    def search(files: Files) -> None:
        check_any(files, folder)

    with patch.object(label_files, name, broken), pytest.raises(FAULTS):
        search()


@pytest.mark.parametrize(("name", "broken"), BROKEN_FOR_VALID.values(), ids=BROKEN_FOR_VALID)
def test_a_broken_reader_is_caught_by_valid_files(name: str, broken: Any, folder: Path) -> None:
    @FIND
    @given(written=valid_files())
    def search(written: tuple) -> None:
        check_valid(*written, folder)

    with patch.object(label_files, name, broken), pytest.raises(FAULTS):
        search()
