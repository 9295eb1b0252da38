"""Read a dump of one batch of any trainer: arrays under the names that people give them. docs/check.md explains it.

batch.toml has the names. Responses are the last columns of the token ids, and every array by token belongs to them.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from ppo_rlhf.check import faults
from ppo_rlhf.train_policy import InputError

NAMES = faults.tomllib.loads(Path(__file__).with_name("batch.toml").read_text())["names"]
CANONICAL = {alias: name for name, aliases in NAMES.items() for alias in (name, *aliases.split())}
SETTINGS = "gamma lam kl_coef cliprange cliprange_high temperature pad_id eos_id group_size step first context_length"
PER_ROW = ("scores", "groups", "baselines", "packs")
WHOLE = ("query_responses", "prompt_completion_ids", "query_response_ids", "prompt_response_ids", "sequences")
OF_SHAPE = ("ids", "queries", "responses", "mask", "padding_mask", "attention_mask")  # they are no arrays by token
EXACT = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(kw_only=True)
class Batch:
    """One batch. Arrays are float64, (rows, width) by token, (rows,) by response, or 0-d; masked NaN is 0."""

    tokens: Tensor  # (rows, context + width), the responses in the last columns
    mask: Tensor  # (rows, width) bool
    is_text: Tensor  # (rows, context + width) bool: no padding
    eps: dict[str, float]  # relative rounding of each array, by its dtype
    settings: dict[str, Any]
    arrays: dict[str, Tensor] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)  # names that mean nothing here
    not_finite: list[str] = field(default_factory=list)  # arrays with NaN or infinity where the mask is True
    unscored: Tensor | None = None  # (rows,) bool: responses that no function judged, whose score is NaN

    @property
    def responses(self) -> Tensor:
        return self.tokens[:, -self.mask.shape[1] :]

    @property
    def prompts(self) -> Tensor | None:
        """A number for each row, equal where prompts are; None where the dump has no prompts."""
        start, found = self.tokens.shape[1] - self.mask.shape[1], []
        for tokens, is_text, mask in zip(self.tokens, self.is_text, self.mask, strict=True):
            first = start + int(mask.byte().argmax())
            first = max(first, self.settings["context_length"]) if start == 0 else first
            found.append(tuple(tokens[:first][is_text[:first]].tolist()))
        return torch.tensor([found.index(x) for x in found]) if any(found) else None

    @property
    def has_context(self) -> bool:
        return self.tokens.shape[1] > self.mask.shape[1]


def read(path: Path) -> Batch:
    """The batch of a .safetensors, .pt (by weights_only), .jsonl, .json or .parquet file; an InputError if there is
    none."""
    try:
        return arranged(contents(path))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (RuntimeError, IndexError, ValueError, OverflowError) as error:  # of torch, about shapes
        raise InputError(f"{path}: its arrays do not fit together: {str(error).splitlines()[0][:200]}") from error


def rows_of_json(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]


def tensors_and_metadata(path: Path) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {}) | {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


READERS: dict[str, Callable[[Path], Any]] = {
    ".safetensors": tensors_and_metadata,
    ".pt": partial(torch.load, map_location="cpu", weights_only=True),
    ".pth": partial(torch.load, map_location="cpu", weights_only=True),
    ".jsonl": rows_of_json,
    ".json": lambda path: json.loads(path.read_text("utf-8")),
    ".parquet": lambda path: pyarrow.parquet.read_table(path).to_pydict(),
}


def contents(path: Path) -> dict[str, Any]:
    """What a file holds, by name: tensors, lists of rows, or numbers."""
    kind = path.suffix
    if not path.is_file():
        raise InputError("there is no such file")
    if kind not in READERS:
        raise InputError("a dump is a .safetensors, .pt, .jsonl, .json or .parquet file")
    try:
        found = READERS[kind](path)
    except (SafetensorError, ValueError, RuntimeError, EOFError, KeyError, pyarrow.ArrowException) as error:
        raise InputError(f"it cannot be read as {kind}: {str(error).strip().splitlines()[0][:200]}") from error
    except Exception as error:  # of torch's unpickler, which refuses what is no tensor
        raise InputError(f"it cannot be read as {kind} with weights_only: {type(error).__name__}") from error
    if isinstance(found, Sequence) and found and all(isinstance(row, Mapping) for row in found):
        names = dict.fromkeys(name for row in found for name in row)
        found = {name: [row.get(name) for row in found] for name in names}
    if not isinstance(found, Mapping) or not found:
        raise InputError("it must hold arrays by name")
    flat: dict[str, Any] = {}
    for name, value in found.items():
        flat |= {str(key): x for key, x in value.items()} if isinstance(value, Mapping) else {str(name): value}
    return flat


def plain(name: str) -> str:
    return name.lower().replace("-", "_").replace("/", ".").split(".")[-1].removeprefix("mb_").removeprefix("b_")


def as_tensor(value: Any, *, left: bool = False) -> Tensor | None:
    """A tensor, of lists too, with NaN after (left: before) the shorter ones; texts become numbers."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool | int | float):
        return torch.tensor(value)
    if not isinstance(value, Sequence) or isinstance(value, str) or not len(value):
        return None
    if all(isinstance(x, str) for x in value):
        return torch.tensor([value.index(x) for x in value])
    if all(isinstance(x, Tensor) for x in value):
        value = [x.tolist() for x in value]
    try:
        if not all(isinstance(row, Sequence) for row in value):
            return numbers(value)
        side = "left" if left else "right"
        return pad_sequence([numbers(row) for row in value], True, padding_value=math.nan, padding_side=side)
    except (TypeError, ValueError):
        return None


def numbers(values: Sequence[Any]) -> Tensor:
    return torch.tensor([math.nan if x is None else float(x) for x in values], dtype=torch.float64)


def rounding(x: Tensor) -> float:
    """Of numbers, relative: that of the coarsest dtype that holds all of them; float32's at least, because that is
    what trainers compute in."""
    if not x.is_floating_point() or not (x != x.round()).any():
        return 2**-23
    kind = next(kind for kind in EXACT if (x.to(kind).to(x.dtype) == x).logical_or(x.isnan()).all())
    return max(torch.finfo(kind).eps / 2, 2**-23)


def renamed(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], str]:
    """Arrays under our names, the names that mean nothing here, and the name that the token ids had."""
    found: dict[str, Any] = {}
    unread, name_of_ids = [], ""
    order = {alias: number for number, alias in enumerate(CANONICAL)}
    for given in sorted(raw, key=lambda name: (not plain(name).startswith("old"), order.get(plain(name), 0))):
        name = CANONICAL.get(plain(given))
        if name == "logprobs" and name in found:  # next to the old ones, those without a name are the new ones
            name = "new_logprobs"
        if name is not None and name not in found:
            found[name] = raw[given]
            name_of_ids = plain(given) if name == "ids" else name_of_ids
        elif plain(given) not in ("format", "prompt_mask"):
            unread.append(given)
    return found, unread, name_of_ids


def arranged(raw: Mapping[str, Any]) -> Batch:
    """Names, shapes and dtypes as the doctor needs them."""
    found, unread, name_of_ids = renamed(raw)
    settings = {name: x for name in SETTINGS.split() if (x := setting(found.pop(name, None))) is not None}
    read = {name: as_tensor(value, left=name == "queries") for name, value in found.items()}
    tensors = {name: x.detach().cpu() for name, x in read.items() if x is not None}
    eps = {name: rounding(x) for name, x in tensors.items()}
    tensors = unpacked({name: x.to(torch.float64) for name, x in tensors.items()})
    if not {"ids", "responses"} & tensors.keys():
        raise InputError("token ids are missing, such as query_responses, input_ids, or prompts and responses")
    mask = mask_of(tensors, any(plain(name) == "completion_mask" for name in raw) and "mask" in tensors)
    ids = ids_of(tensors, mask)
    if not mask.any():
        raise InputError("the mask counts no token")
    context = settings.get("context_length", tensors["queries"].shape[1] if "queries" in tensors else 0)
    attention = tensors.get("attention_mask")
    has_attention = attention is not None and attention.shape == ids.shape
    batch = Batch(
        tokens=ids.nan_to_num(-1).long(),
        mask=mask,
        is_text=~ids.isnan(),
        eps=eps,
        settings=settings | {"context_length": int(context), "ids_name": name_of_ids, "has_attention": has_attention},
        unread=unread + [name for name, x in read.items() if x is None],
    )
    if has_attention:
        batch.is_text &= attention > 0.5
    else:  # a token of the padding id is text where the mask counts it: it may be the end token, too
        counts = pad(mask, (ids.shape[1] - mask.shape[1], 0))
        batch.is_text &= (batch.tokens >= 0) & ((batch.tokens != pad_of(batch)) | counts)
    for name, x in tensors.items():
        if name not in OF_SHAPE:
            put(batch, name, x)
    return batch


def mask_of(tensors: dict[str, Tensor], is_completion: bool) -> Tensor:
    """The policy's tokens: the mask of the dump, or what its padding shows.

    is_completion: the mask counts every token of a completion, as `completion_mask` does, and a tool mask is apart.
    """
    responses, attention = tensors.get("responses"), tensors.get("attention_mask")
    source = tensors.get("mask")
    if is_completion and "tool_mask" in tensors:  # TRL keeps the two apart
        source = source * tensors.pop("tool_mask").nan_to_num(0)
    if source is None and "padding_mask" in tensors:
        source = 1 - tensors["padding_mask"]
    if source is None and responses is not None and responses.isnan().any():
        source = (~responses.isnan()).double()  # lists of different lengths have no padding
    if source is None and attention is not None and responses is not None:
        source = attention[:, -responses.shape[1] :]
    if source is None or source.ndim != 2:
        raise InputError("a mask (rows, tokens) is missing, such as response_mask: True for the policy's tokens")
    return source.nan_to_num(0) > 0.5


def ids_of(tensors: dict[str, Tensor], mask: Tensor) -> Tensor:
    """Token ids (rows, context + width) with NaN at padding of lists, the contexts first where the dump has them."""
    ids, queries, responses = (tensors.get(name) for name in ("ids", "queries", "responses"))
    if ids is None:
        ids = responses if queries is None else torch.cat([queries, responses], dim=1)
    elif responses is not None and ids.shape[1] <= responses.shape[1] >= mask.shape[1]:
        ids = responses
    if ids.ndim != 2 or len(ids) != len(mask) or ids.shape[1] < mask.shape[1]:
        raise InputError(f"token ids are {tuple(ids.shape)}, and the mask is {tuple(mask.shape)}; they must fit")
    return ids


def setting(value: Any) -> Any:
    """A number, or a text, that is given once, or for each row."""
    if isinstance(value, Tensor):
        value = value.flatten().tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = next((x for x in value if x is not None), None)
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if abs(number) < 2**53 else None


def pad_of(batch: Batch) -> int:
    """The padding id: what was said, or the token after most responses that are shorter than the widest."""
    if "pad_id" in batch.settings:
        return int(batch.settings["pad_id"])
    short = ~batch.mask[:, -1] & batch.mask.any(1)
    last = batch.responses[short, -1]
    return int(last.mode().values) if len(last) else -1


def put(batch: Batch, name: str, x: Tensor) -> None:
    """Add an array, cut to the columns of the responses."""
    rows, width = batch.mask.shape
    is_one = x.numel() == 1 or (x.shape == (rows,) and x.unique().numel() == 1)  # repeated in every row of a file
    if name in ("loss", "value_loss") and is_one:
        if x.isfinite().all():
            batch.arrays[name] = x.flatten()[0]
        else:
            batch.not_finite.append(name)
        return
    if x.ndim == 3 and x.shape[2] == 1:
        x = x.squeeze(2)
    if x.shape == (rows, 1) and width > 1:
        x = x.squeeze(1)
    if x.shape == (rows, width - 1):
        x = pad(x, (1, 0), value=float(name == "tool_mask"))  # of the tokens from the second on
    is_by_token = x.ndim == 2 and len(x) == rows and x.shape[1] >= width
    if not is_by_token and x.shape != (rows,):
        raise InputError(f"{name} is {tuple(x.shape)}; the mask is {(rows, width)}")
    x = x[:, -width:] if is_by_token else x
    if name in ("scores", "rewards") and not is_by_token and x.isnan().any():
        batch.unscored, x = x.isnan(), x.nan_to_num(0)
    if not x[batch.mask if is_by_token else ...].isfinite().all() and name != "sampler_logprobs":
        batch.not_finite.append(name)
    x = x.nan_to_num(0, 0, 0)
    if is_by_token and name in PER_ROW:
        x = x.sum(1) if name == "scores" else x[:, -1]
    if x.ndim == 1 and name == "rewards":
        name = "scores"  # one number for each response
    if x.ndim == 1 and name not in (*PER_ROW, "advantages"):
        raise InputError(f"{name} has one number for each response; it must have one for each token")
    if name not in batch.arrays:
        batch.arrays[name] = x
        batch.eps.setdefault(name, batch.eps.get("rewards", 2**-23))


def unpacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows that hold several episodes, told apart by `segments`, as a row for each; other arrays stay."""
    segments = tensors.pop("segments", None)
    if segments is None:
        return tensors
    pieces = [(row, segments[row] == n) for row in range(len(segments)) for n in segments[row].unique() if n > 0]

    def cut(x: Tensor) -> Tensor:
        return pad_sequence([x[row][columns] for row, columns in pieces], batch_first=True, padding_value=math.nan)

    packs = {"packs": torch.tensor([float(row) for row, _ in pieces])}  # the row that each piece is from
    return {name: cut(x) if x.shape == segments.shape else x for name, x in tensors.items()} | packs
