"""Label files of chapter 1: what people, or the annotators of a world, said about continuations of queries.

`--label_dataset` names a file:

    <task>/<file>.json     OpenAI's human labels, from the hub copy OPENAI_REPOSITORY. If the queries come from a
                           world, its simulated labels, which have the same names
    <file>                 a local .json, .jsonl, .parquet or .csv file in the same format, or with texts in place of
                           token ids, or with preferences as they are published (lib/preferences.py)
    <owner>/<name>         a data set of preferences on the hub, or <owner>/<name>:<configuration>

Files and lines next to marks are those of openai/lm-human-preferences at commit cbfd210.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ppo_rlhf import worlds
from ppo_rlhf.lib import chat_templates, data_files, errors, files, hub, preferences, pretrained
from ppo_rlhf.lib.errors import InputError, flag

OPENAI_PAD_ID = 50259
OPENAI_VOCAB_SIZE = 50257
LARGEST_RATING = 1e6
FACTS = {"vocab_size": int, "padding_id": int, "held_out": int, "ceiling": float | None}  # in <name>.meta.json
LabelKind = Literal["best", "score", "difference"]


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Judgements of n continuations of each query. The kind of label says what a target means:

    best         which of the n is the best, in [0, n)
    score        how good the only one is
    difference   how much better the second of two is than the first
    """

    queries: torch.Tensor  # (labels, query_length), padded with pad_id
    samples: torch.Tensor  # (labels, n, response_length), padded with pad_id
    targets: torch.Tensor  # (labels,), integers for best, else floats
    ceiling: float | None  # accuracy of a perfect judge on the held-out labels, if it is known
    kind: LabelKind = "best"
    held_out: int = 0  # so many labels, the last ones, are never trained on
    too_long: int = 0  # labels of texts that were left out, because the model cannot read them
    identical: int = 0  # preferences that were left out, because their two answers are the same

    @property
    def known(self) -> dict[str, float | None]:
        """What a model's accuracy is compared with."""
        return {"ceiling": self.ceiling} | ({} if self.kind == "score" else {"chance": 1 / self.samples.shape[1]})

    @property
    def left_out(self) -> dict[str, int]:
        """How many labels were left out, where some were."""
        counts = {"too_long": self.too_long, "identical": self.identical}
        return {name: count for name, count in counts.items() if count}

    def lengths(self, pad_id: int) -> torch.Tensor:
        """Tokens of each label's query and of the longest of its samples, together: (labels,)."""
        return (self.queries != pad_id).sum(1) + (self.samples != pad_id).sum(2).amax(1)


def shown_labels(labels: Labels) -> torch.Tensor:
    """Indices of three labels to show, if possible held-out ones."""
    first = len(labels.targets) - labels.held_out if labels.held_out else 0
    return torch.arange(len(labels.targets))[first:][:3]


def sample_rows(
    labels: Labels, inds: torch.Tensor, scores: torch.Tensor, tokenizer: PreTrainedTokenizerBase, pad_id: int
) -> list[dict[str, Any]]:
    """The samples of the labels with these indices (batch,) as texts, with their scores (batch, n)."""
    rows = []
    for i, own_scores in zip(inds.tolist(), scores.tolist(), strict=True):
        query, *samples = (
            tokenizer.decode([token for token in tokens.tolist() if token != pad_id])
            for tokens in (labels.queries[i], *labels.samples[i])
        )
        target = labels.targets[i].item()
        for j, (text, score) in enumerate(zip(samples, own_scores, strict=True)):
            label = f"{target:+.2f}"  # of a difference: of the second
            if labels.kind == "best":
                label = "best" if j == target else ""
            rows.append({"query": query, "sample": text, "label": label, "score": score})
    return rows


def read_labels(
    label_dataset: str,
    task: Any,
    tokenizer: PreTrainedTokenizerBase,
    num_train: int = 0,
    longest: int | None = None,
) -> Labels:
    """Read a label file in OpenAI's format, or preferences, and check every row.

    num_train: how many there must be, besides those that are held out. longest: the most tokens of a query and a
    sample; labels of texts that have more are left out and counted. A row has one of these forms:

        {"query": ids, "sample0": ids, "sample1": ids, ..., "best": 1}             the best of n
        {"query": ids, "sample": ids, "score": 0.7}                                a rating
        {"query": ids, "sample0": ids, "sample1": ids, "difference": -1.5}         how much better sample1 is

    In place of token ids, all rows may hold texts, of any length that the model can read:

        {"query": "The plot", "sample": " makes no sense.", "score": -2.1}

    They are encoded one by one, so a sample begins with its space, if there is one between it and the query. A query
    may be empty. A preference is a choice between two texts, the chosen and the rejected one; of a data set on the
    hub, the first num_train of the split `train` are read, and what is held out is its split `test`, if it has one.

    Queries of ids hold task.query_length of them and samples task.response_length, padded on the right. A file next
    to it, `<name>.meta.json`, may give the `vocab_size` of the ids' tokenizer (one above its largest id), the
    `padding_id`, the `ceiling` of accuracy, and how many labels at the end are `held_out`, by default all after the
    first num_train. Without a vocab_size, the ids are read as GPT-2's if the tokenizer is larger than GPT-2's. If
    it is not, all ids must be in its vocabulary. Without a padding_id, 50259 is padding, as in OpenAI's files. If
    50259 is a token, padding_id must be given, and it must not be a token.
    """
    # A choice among samples.   label_types.py#L33-L55
    # [D21] A rating, or a difference.   label_types.py#L58-L120
    path = find_label_file(label_dataset, task.query_dataset)
    what = f"{flag('label_dataset')} {path or label_dataset}"
    vocab_size = pretrained.vocabulary_size(tokenizer)
    meta = read_sidecar(path) if path else {}
    # Of a data set on the hub, what is trained on and what is held out; of a file, all rows.
    parts = [read_rows(path)] if path else [read_split(label_dataset, split) for split in ("train", "test")]
    _, first = parts[0][0]
    their_vocab_size = meta.get("vocab_size", OPENAI_VOCAB_SIZE if vocab_size > OPENAI_VOCAB_SIZE else vocab_size)
    padding_id = meta.get("padding_id", OPENAI_PAD_ID)
    as_preferences = preferences.is_preference(first)
    as_texts = as_preferences or isinstance(first.get("query"), str)
    if not as_texts:
        if their_vocab_size != vocab_size:
            raise InputError(
                f"{what}: holds ids of a vocabulary of {their_vocab_size}, but the tokenizer of the base model has "
                f"{vocab_size}; use the model whose tokenizer wrote the file"
            )
        if 0 <= padding_id < vocab_size:
            raise InputError(
                f"{what}: its padding id {padding_id} is one of the tokenizer's {vocab_size} ids; pad with another, "
                f'such as {vocab_size}, and name it in {sidecar_of(path).name}: "padding_id": {vocab_size}'
            )
    kind = "best" if as_preferences else next((kind for kind in get_args(LabelKind) if kind in first), None)
    if kind is None:
        raise InputError(
            f"{what}: its first row has none of the keys {', '.join(get_args(LabelKind))}, chosen; it has "
            f"{', '.join(map(repr, first))}; {preferences.FORMS}"
        )
    number_of_samples = 2 if as_preferences else sum(key.startswith("sample") for key in first)
    sample_keys = {
        "best": [f"sample{i}" for i in range(number_of_samples)],
        "score": ["sample"],
        "difference": ["sample0", "sample1"],
    }[kind]

    def token_ids(content: str | list[int], length: int) -> torch.Tensor:
        """A text or ids of a row, with our padding. length: the number of ids that there must be."""
        if isinstance(content, str) != as_texts:
            raise TypeError("all rows hold texts, or all hold token ids")
        if as_texts:
            return torch.tensor(chat_templates.encode_text(tokenizer, content), dtype=torch.long)
        ids = torch.tensor([vocab_size if token == padding_id else token for token in content], dtype=torch.long)
        if ids.shape != (length,) or not 0 <= ids.min() <= ids.max() <= vocab_size:
            raise ValueError(f"there must be {length} ids below {vocab_size}, the size of the vocabulary, or padding")
        return ids

    queries, samples, targets = [], [], []
    held_out = identical = 0
    too_long = []
    for part, rows in enumerate(parts):
        for number, (where, row) in enumerate(rows):
            if path is None and part == 0 and len(queries) == num_train > 0:
                break
            try:
                if as_preferences:
                    row = as_choice(row, f"{flag('label_dataset')} {where}")
                query = token_ids(row["query"], task.query_length)
                own_samples = [token_ids(row[key], task.response_length) for key in sample_keys]
                if not (row[kind] in range(len(sample_keys)) if kind == "best" else abs(row[kind]) <= LARGEST_RATING):
                    raise ValueError(f"{kind} is {row[kind]!r}")
            except InputError:
                raise
            except (KeyError, TypeError, ValueError, RuntimeError) as error:
                message = f"is no label: {type(error).__name__}: {error}"
                raise InputError(f"{flag('label_dataset')} {where} {message}") from error
            length = len(query) + max(map(len, own_samples))
            if as_texts and longest and length > longest:
                too_long.append(f"{where} has {length}")
            elif as_preferences and own_samples[0].equal(own_samples[1]):
                identical += 1
            else:
                queries.append(query)
                samples += own_samples
                targets.append(row[kind])
                held_out += part == 1 or number >= len(rows) - meta.get("held_out", 0)
    # [D20] A file with fewer labels than num_train is refused.   train_reward.py#L94-L96
    if not queries or len(queries) - held_out < num_train:
        there = f"{len(queries)} labels"
        if held_out:
            there += f", and its held_out is {meta.get('held_out', held_out)}"
        if too_long:
            there += f"; {len(too_long)} others have more than the model's {longest} tokens, such as {too_long[0]}"
        raise InputError(f"{flag('num_train')} {num_train}: {flag('label_dataset')} {label_dataset} has {there}")

    def padded(rows: list[torch.Tensor]) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=vocab_size)

    return Labels(
        queries=padded(queries),
        samples=padded(samples).unflatten(0, (-1, len(sample_keys))),
        targets=torch.tensor(targets, dtype=torch.long if kind == "best" else torch.float32),
        ceiling=meta.get("ceiling"),
        kind=kind,
        held_out=held_out if path is None or "held_out" in meta else len(queries) - num_train,
        too_long=len(too_long),
        identical=identical,
    )


def as_choice(row: dict[str, Any], what: str) -> dict[str, Any]:
    """A preference as a choice between two texts."""
    if not preferences.is_preference(row):
        raise InputError(f"{what} has no chosen and rejected; it has {', '.join(map(repr, row))}")
    query, chosen, rejected = preferences.read_preference(row, what).texts()
    return {"query": query, "sample0": chosen, "sample1": rejected, "best": 0}


def sidecar_of(path: Path) -> Path:
    return path.with_suffix(".meta.json")


def read_sidecar(path: Path) -> dict[str, Any]:
    """The facts about a label file, which may be next to it."""
    sidecar = sidecar_of(path)
    with errors.input_errors(str(sidecar), OSError, ValueError, RecursionError):
        meta = files.read_json(sidecar) if sidecar.is_file() else {}
        if not isinstance(meta, dict):
            raise ValueError("must be a JSON object")
        if wrong := [name for name, kind in FACTS.items() if name in meta and not files.fits(meta[name], kind)]:
            raise ValueError(
                f"{wrong[0]} is {str(meta[wrong[0]])[:60]!r}; it must be a number, and a whole one of ids"
            )
        if meta.get("held_out", 0) < 0:
            raise ValueError(f"held_out is {meta['held_out']}; it must be at least 0")
    return meta


def read_rows(path: Path) -> list[data_files.Row]:
    """The rows of a label file: there is one, and it is an object."""
    what = f"{flag('label_dataset')} {path}"
    if path.suffix in data_files.FORMATS and path.suffix != ".json":
        rows = data_files.read_file(path, "label_dataset")
    else:
        with errors.input_errors(what, OSError, ValueError, RecursionError):
            content = files.read_json(path)
        rows = [(f"{path}: row {i}", row) for i, row in enumerate(content)] if isinstance(content, list) else []
    if not rows or not isinstance(rows[0][1], dict):
        raise InputError(f"{what}: must be a JSON array of objects, or one of them per line, and not empty")
    return rows


def read_split(name: str, split: str) -> list[data_files.Row]:
    """The rows of a split of a data set on the hub."""
    rows = list(data_files.load_split(name, "label_dataset", split, "give the path of a label file"))
    if not rows:
        raise InputError(f"{flag('label_dataset')} {name}: its split {split} is empty")
    return rows


def find_label_file(label_dataset: str, query_dataset: str) -> Path | None:
    """The file that this names: a local one, one next to the texts of a world, or one of OpenAI's on the hub.

    None if it is a data set on the hub.
    """
    what = f"{flag('label_dataset')} {label_dataset}"
    labels = Path(worlds.find_value("task.query_dataset", query_dataset), "labels")
    for path in (Path(label_dataset), labels / label_dataset):
        if files.stored(path).is_file():
            return path
    if data_files.is_on_hub(label_dataset):
        return None
    if labels.is_dir():
        there = sorted(path.relative_to(labels).as_posix().removesuffix(".xz") for path in labels.glob("*/*.json*"))
        there = [name for name in there if not name.endswith(".meta.json")]
        raise InputError(f"{what}: no such file, and {labels} has {', '.join(there)}")
    remedy = "give the path of a label file, or use --preset tales"
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*\.json", label_dataset):  # files on the hub have such names
        raise InputError(f"{what}: no such file; {remedy}")
    from huggingface_hub import hf_hub_download

    with hub.hub_errors(what, remedy):
        return Path(hf_hub_download(hub.OPENAI_REPOSITORY, label_dataset, repo_type="dataset"))
