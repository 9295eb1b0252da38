"""Label files of chapter 1: what people, or the annotators of a world, said about continuations of queries.

`--label_dataset` names a file:

    <task>/<file>.json     OpenAI's human labels, from the hub copy OPENAI_REPOSITORY. If the queries come from a
                           world, its simulated labels, which have the same names
    <file>.json            a local file in the same format, or with texts in place of token ids

Files and lines next to marks are those of openai/lm-human-preferences at commit cbfd210.
"""

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.lib.base import errors, files, hub
from ppo_rlhf.lib.base.errors import InputError, flag
from ppo_rlhf.lib.nets import pretrained, templates

OPENAI_PAD_ID = 50259
OPENAI_VOCAB_SIZE = 50257
LARGEST_RATING = 1e6
SIDECAR_KEYS = ("vocab_size", "padding_id", "held_out", "ceiling", "gold_mean", "gold_std")  # tales has the last two
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

    @property
    def known(self) -> dict[str, float | None]:
        """What a model's accuracy is compared with."""
        return {"ceiling": self.ceiling} | ({} if self.kind == "score" else {"chance": 1 / self.samples.shape[1]})

    def lengths(self, pad_id: int) -> torch.Tensor:
        """Tokens of each label's query and of the longest of its samples, together: (labels,)."""
        return (self.queries != pad_id).sum(1) + (self.samples != pad_id).sum(2).amax(1)

    def longest(self, args: Any, base_model: PreTrainedModel, pad_id: int) -> int:
        """The largest of these lengths. Raises an InputError for a text that the base model cannot read."""
        most = getattr(base_model.config, "max_position_embeddings", None) or math.inf
        lengths = self.lengths(pad_id).tolist()
        of_task = args.task.query_length + args.task.response_length  # ids have no more, and the caller checks these
        if too_long := [row for row, length in enumerate(lengths) if length > max(most, of_task)]:
            raise InputError(
                f"{flag('label_dataset')} {args.label_dataset}: row {too_long[0]} has {lengths[too_long[0]]} tokens, "
                f"query and longest sample, but {flag('base_model')} {args.base_model} reads at most {most}; shorten "
                f"or leave out {len(too_long)} of {len(lengths)} rows"
            )
        return max(lengths)


SHOWN = 3  # labels


@torch.no_grad()
def tables_of(
    labels: Labels, tokenizer: PreTrainedTokenizerBase, pad_id: int, score: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Samples of a few labels, if possible held-out ones, with their scores; and how long all texts are, in tokens.

    score: indices of labels (batch,) -> scores of their samples (batch, n).
    """
    held_out = len(labels.targets) - labels.held_out
    inds = torch.arange(len(labels.targets))[held_out if labels.held_out else 0 :][:SHOWN]
    rows = []
    for i, scores in zip(inds.tolist(), score(inds).tolist(), strict=True):
        query, *samples = (
            tokenizer.decode([token for token in tokens.tolist() if token != pad_id])
            for tokens in (labels.queries[i], *labels.samples[i])
        )
        target, of_best = labels.targets[i].item(), labels.kind == "best"
        for j, (text, value) in enumerate(zip(samples, scores, strict=True)):
            label = ("best" if j == target else "") if of_best else f"{target:+.2f}"  # of a difference: of the second
            rows.append({"query": query, "sample": text, "label": label, "score": value})
    texts = {"query": labels.queries, "sample": labels.samples}
    if labels.kind == "best":  # raters may have a taste for length
        texts["best sample"] = labels.samples[torch.arange(len(labels.targets)), labels.targets.long()]
    return rows, rows_of_lengths(pad_id, **texts)


def rows_of_lengths(pad_id: int, **texts: torch.Tensor) -> list[dict[str, Any]]:
    """How many tokens texts have. texts: by name, (..., length) with padding."""
    lengths = {name: (tokens != pad_id).sum(-1).flatten().double() for name, tokens in texts.items()}
    return [
        {"text": name, "texts": len(x), "fewest": int(x.min()), "mean": x.mean().item(), "most": int(x.max())}
        for name, x in lengths.items()
    ]


def read_labels(label_dataset: str, task: Any, tokenizer: PreTrainedTokenizerBase, num_train: int = 0) -> Labels:
    """Read a label file in OpenAI's format and check every row.

    num_train: how many there must be, besides those that are held out. A row has one of these forms:

        {"query": ids, "sample0": ids, "sample1": ids, ..., "best": 1}             the best of n
        {"query": ids, "sample": ids, "score": 0.7}                                a rating
        {"query": ids, "sample0": ids, "sample1": ids, "difference": -1.5}         how much better sample1 is

    In place of token ids, all rows may hold texts, of any length that the model can read:

        {"query": "The plot", "sample": " makes no sense.", "score": -2.1}

    They are encoded one by one, so a sample begins with its space, if there is one between it and the query. A query
    may be empty.

    Queries of ids hold task.query_length of them and samples task.response_length, padded on the right. A file next
    to it, `<name>.meta.json`, may give the `vocab_size` of the ids' tokenizer (one above its largest id), the
    `padding_id`, the `ceiling` of accuracy, and how many labels at the end are `held_out`, by default all after the
    first num_train. Other keys are refused. Without a vocab_size, the ids are read as GPT-2's if the tokenizer is
    larger than GPT-2's. If it is not, all ids must be in its vocabulary. Without a padding_id, 50259 is padding, as
    in OpenAI's files. If 50259 is a token, padding_id must be given, and it must not be a token.
    """
    # A choice among samples.   label_types.py#L33-L55
    # [D21] A rating, or a difference.   label_types.py#L58-L120
    path = find_label_file(label_dataset, task.query_dataset)
    what, vocab_size = f"{flag('label_dataset')} {path}", pretrained.vocabulary_size(tokenizer)
    with errors.input_errors(what, OSError, ValueError):
        rows = files.read_json(path)
    meta = read_sidecar(path.with_suffix(".meta.json"))
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{what}: must be a JSON array of objects, and not empty")
    as_texts = isinstance(rows[0].get("sample", rows[0].get("sample0")), str)
    their_vocab_size = meta.get("vocab_size", OPENAI_VOCAB_SIZE if vocab_size > OPENAI_VOCAB_SIZE else vocab_size)
    if not as_texts and their_vocab_size != vocab_size:
        raise InputError(
            f"{what}: holds ids of a vocabulary of {their_vocab_size}, but the tokenizer of the base model has "
            f"{vocab_size}; use the model whose tokenizer wrote the file"
        )
    padding_id = meta.get("padding_id", OPENAI_PAD_ID)
    if not as_texts and 0 <= padding_id < vocab_size:
        raise InputError(
            f"{what}: its padding id {padding_id} is one of the tokenizer's {vocab_size} ids; pad with another, such "
            f'as {vocab_size}, and name it in {path.with_suffix(".meta.json").name}: "padding_id": {vocab_size}'
        )
    kind = next((kind for kind in get_args(LabelKind) if kind in rows[0]), None)
    if kind is None:
        raise InputError(f"{what}: row 0 has none of the keys {', '.join(get_args(LabelKind))}")
    with errors.input_errors(what, InputError):
        sample_keys = sample_keys_of(rows[0], kind)
    lengths = {"query": ("query_length", task.query_length)}
    lengths |= dict.fromkeys(sample_keys, ("response_length", task.response_length))
    for number, row in enumerate(rows):
        try:
            check_label(row, kind, lengths, vocab_size, padding_id, as_texts)
        except InputError as error:
            raise InputError(f"{what}: row {number} {error}") from error

    equal = sum(kind != "score" and all(row[key] == row["sample0"] for key in sample_keys) for row in rows)
    if equal:  # they stay, because OpenAI's num_train counts all labels of a file
        errors.say_once(f"{what}: the samples of {equal} of {len(rows)} labels are all equal, which teaches nothing")
    # [D20] A file with fewer labels than num_train is refused.   train_reward.py#L94-L96
    if len(rows) - meta.get("held_out", 0) < num_train:
        there = f"{len(rows)} labels" + (f", and its held_out is {meta['held_out']}" if "held_out" in meta else "")
        raise InputError(f"{flag('num_train')} {num_train}: {flag('label_dataset')} {label_dataset} has {there}")

    def tokens(*keys: str) -> torch.Tensor:
        """What all rows hold under these keys: (labels, keys, longest length)."""
        found = [row[key] for row in rows for key in keys]
        if as_texts:
            found = [templates.encode_text(tokenizer, text) for text in found]
        else:
            found = [[vocab_size if token == padding_id else token for token in ids] for ids in found]
        tensors = [torch.tensor(ids, dtype=torch.long) for ids in found]
        padded = nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=vocab_size)
        return padded.unflatten(0, (-1, len(keys)))

    return Labels(
        queries=tokens("query").squeeze(1),
        samples=tokens(*sample_keys),
        targets=torch.tensor([row[kind] for row in rows], dtype=torch.long if kind == "best" else torch.float32),
        ceiling=meta.get("ceiling"),
        kind=kind,
        held_out=meta.get("held_out", len(rows) - num_train),
    )


def find_label_file(label_dataset: str, query_dataset: str) -> Path:
    if files.stored(Path(label_dataset)).is_file():
        return Path(label_dataset)
    if label_dataset and Path(label_dataset).is_dir():
        raise InputError(f"{flag('label_dataset')} {label_dataset}: that is a folder")
    if (labels := Path(query_dataset, "labels")).is_dir():  # next to the texts of a world
        if files.stored(labels / label_dataset).is_file():
            return labels / label_dataset
        found = [*labels.glob("*/*.json"), *labels.glob("*/*.json.xz")]
        names = (path.relative_to(labels).as_posix().removesuffix(".xz") for path in found)
        there = ", ".join(sorted(name for name in names if not name.endswith(".meta.json")))
        raise InputError(f"{flag('label_dataset')} {label_dataset}: no such file, and {labels} has {there}")
    remedy = "give the path of a label file, or use --preset tales"
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*\.json", label_dataset):  # files on the hub have such names
        raise InputError(f"{flag('label_dataset')} {label_dataset}: no such file; {remedy}")
    from huggingface_hub import hf_hub_download

    with hub.hub_errors(f"{flag('label_dataset')} {label_dataset}", remedy):
        return Path(hf_hub_download(hub.OPENAI_REPOSITORY, label_dataset, repo_type="dataset"))


def preset_of(args: Any, presets: dict[str, Any], default: Any) -> Any:
    """The preset that has these arguments' labels and the default preset's queries; the default if there is none.

    So what the reward model learns, the name of the run and the function that watches the policy are of one task.
    """

    def labels_of(args: Any) -> str:
        return getattr(getattr(args, "reward", args), "label_dataset", "")

    named, task = labels_of(args), labels_of(args).partition("/")[0]
    fitting = [preset for preset in presets.values() if labels_of(preset).partition("/")[0] == task]
    if not fitting or default in fitting:
        return default
    same_queries = [preset for preset in fitting if preset.task.query_dataset == default.task.query_dataset]
    if not same_queries:
        errors.say_once(
            f"label_dataset {named} does not fit the preset {default.preset}, whose queries and names remain; "
            f"--preset {fitting[0].preset} is made for it"
        )
        return default
    errors.say_once(f"label_dataset {named}: the preset is {same_queries[0].preset}")
    return same_queries[0]


def read_sidecar(path: Path) -> dict[str, Any]:
    """The content of the file next to a label file; empty if there is none."""
    if not path.exists():
        return {}
    with errors.input_errors(str(path), OSError, ValueError):
        meta = files.read_json(path)
    if not isinstance(meta, dict):
        raise InputError(f"{path}: must be a JSON object")
    if unknown := [name for name in meta if name not in SIDECAR_KEYS]:
        raise InputError(f"{path}: {unknown[0]!r} is unknown; there are {', '.join(SIDECAR_KEYS[:4])}")
    for name in ("vocab_size", "padding_id", "held_out"):
        if type(meta.get(name, 1)) is not int:
            raise InputError(f"{path}: the {name} is {meta[name]!r}; it must be a whole number")
    if meta.get("held_out", 1) < 1:
        raise InputError(f"{path}: held_out is {meta['held_out']}; it must be at least 1")
    if not isinstance(meta.get("ceiling", 1.0), float) or not 0 < meta.get("ceiling", 1.0) <= 1:
        raise InputError(f"{path}: the ceiling is {meta['ceiling']!r}; it must be a number above 0 and at most 1.0")
    return meta


def sample_keys_of(row: dict[str, Any], kind: LabelKind) -> list[str]:
    """The keys of a row that hold continuations. Raises an InputError if this kind of label needs other keys."""
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
    row: dict[str, Any],
    kind: LabelKind,
    lengths: dict[str, tuple[str, int]],
    vocab_size: int,
    padding_id: int,
    as_texts: bool,
) -> None:
    """Raise an InputError if a row of a label file does not fit the file's first row and the task.

    lengths: for each key with token ids, the argument that says how many it must hold, and that number.
    """
    if as_texts:
        check_texts(row, lengths)
    else:
        check_ids(row, lengths, vocab_size, padding_id)
    target = row.get(kind)
    if kind == "best":
        n = len(lengths) - 1
        if type(target) is not int or not 0 <= target < n:
            raise InputError(f"has best {target!r}; it must be in 0..{n - 1}")
    elif type(target) not in (int, float) or not abs(target) <= LARGEST_RATING:
        raise InputError(f"has {kind} {target!r}; it must be a number of at most {LARGEST_RATING:g} in size")


def check_ids(row: dict[str, Any], lengths: dict[str, tuple[str, int]], vocab_size: int, padding_id: int) -> None:
    """Raise an InputError if the token ids in a row do not fit the task. lengths: as in check_label."""
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
        text = ids[: ids.index(padding_id)] if padding_id in ids else ids
        if not text or set(ids[len(text) :]) - {padding_id}:
            raise InputError(f"has padding at the beginning or within {key!r}; it must be on the right")


def check_texts(row: dict[str, Any], keys: Collection[str]) -> None:
    """Raise an InputError if a row lacks a text under one of these keys; only the query may be empty."""
    for key in keys:
        if not isinstance(row.get(key), str) or not (row[key] or key == "query"):
            raise InputError(f"has no text under {key!r}")
        files.check_text(row[key], f"with its {key}")
