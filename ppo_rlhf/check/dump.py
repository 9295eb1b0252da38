"""Read a dump of one batch of any trainer: arrays under the names that people give them. docs/check.md explains it.

batch.toml has the names. Responses are the last columns of the token ids, and every array by token belongs to them.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ppo_rlhf.check import faults
from ppo_rlhf.train_policy import InputError

NAMES = faults.tomllib.loads(Path(__file__).with_name("batch.toml").read_text())["names"]
CANONICAL = {alias: name for name, aliases in NAMES.items() for alias in (name, *aliases.split())}
SETTINGS = "gamma lam kl_coef cliprange temperature pad_id eos_id group_size step first context_length"
PER_ROW = ("scores", "groups", "baselines")
WHOLE = ("query_responses", "prompt_completion_ids", "query_response_ids", "prompt_response_ids", "sequences")
EXACT = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(kw_only=True)
class Batch:
    """One batch. Arrays are float64, (rows, width) by token, (rows,) by response, or 0-d; masked NaN is 0."""

    tokens: Tensor  # (rows, context + width), the responses in the last columns
    mask: Tensor  # (rows, width) bool
    is_text: Tensor  # (rows, context + width) bool: no padding
    arrays: dict[str, Tensor]
    eps: dict[str, float]  # relative rounding of each array, by its dtype
    settings: dict[str, Any]
    has_context: bool
    unread: list[str] = field(default_factory=list)  # names that mean nothing here
    not_finite: list[str] = field(default_factory=list)  # arrays with NaN or infinity where the mask is True

    @property
    def responses(self) -> Tensor:
        return self.tokens[:, -self.mask.shape[1] :]


def read(path: Path) -> Batch:
    """The batch of a .safetensors, .pt (by weights_only), .jsonl, .json or .parquet file; an InputError if there is
    none."""
    try:
        return arranged(contents(path))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def contents(path: Path) -> dict[str, Any]:
    """What a file holds, by name: tensors, lists of rows, or numbers."""
    if not path.is_file():
        raise InputError("there is no such file")
    kind = path.suffix
    try:
        if kind == ".safetensors":
            with safe_open(path, "pt") as file:
                return dict(file.metadata() or {}) | {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if kind in (".pt", ".pth"):
            found = torch.load(path, map_location="cpu", weights_only=True)
        elif kind == ".parquet":
            found = pyarrow.parquet.read_table(path).to_pydict()
        elif kind in (".jsonl", ".json"):
            text = path.read_text("utf-8")
            found = (
                [json.loads(line) for line in text.splitlines() if line.strip()]
                if kind == ".jsonl"
                else json.loads(text)
            )
        else:
            raise InputError("a dump is a .safetensors, .pt, .jsonl, .json or .parquet file")
    except (SafetensorError, ValueError, RuntimeError, EOFError, KeyError, pyarrow.ArrowException) as error:
        if isinstance(error, InputError):
            raise
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
            return torch.tensor([float("nan") if x is None else x for x in value], dtype=torch.float64)
        width = max(map(len, value))
        rows = [[float("nan") if x is None else float(x) for x in row] for row in value]
        fill = [[float("nan")] * (width - len(row)) for row in rows]
        return torch.tensor([f + r if left else r + f for r, f in zip(rows, fill, strict=True)], dtype=torch.float64)
    except (TypeError, ValueError):
        return None


def rounding(x: Tensor) -> float:
    """Of numbers, relative: that of the coarsest dtype that holds all of them; float32's at least, because that is
    what trainers compute in."""
    if not x.is_floating_point() or not (x != x.round()).any():
        return 2**-23
    kind = next(kind for kind in EXACT if (x.to(kind).to(x.dtype) == x).logical_or(x.isnan()).all())
    return max(torch.finfo(kind).eps / 2, 2**-23)


def arranged(raw: Mapping[str, Any]) -> Batch:
    """Names, shapes and dtypes as the doctor needs them."""
    found: dict[str, Any] = {}
    unread, ids_name = [], ""
    order = {alias: number for number, alias in enumerate(CANONICAL)}
    for given in sorted(raw, key=lambda name: order.get(plain(name), 0)):
        name = CANONICAL.get(plain(given))
        if plain(given) in ("format", "prompt_mask"):
            continue
        if name is None or name in found:
            unread.append(given)
        else:
            found[name] = raw[given]
            ids_name = plain(given) if name == "ids" else ids_name
    settings = {name: setting(found.pop(name)) for name in SETTINGS.split() if name in found}
    settings = {name: value for name, value in settings.items() if value is not None}
    tensors = {name: as_tensor(value, left=name == "queries") for name, value in found.items()}
    unread += [name for name, x in tensors.items() if x is None]
    tensors = {name: x.detach().cpu() for name, x in tensors.items() if x is not None}
    eps = {name: rounding(x) for name, x in tensors.items()}
    tensors = {name: x.to(torch.float64) for name, x in tensors.items()}
    tensors = unpacked(tensors)
    ids, queries, responses = (tensors.pop(name, None) for name in ("ids", "queries", "responses"))
    if ids is None and responses is None:
        raise InputError("token ids are missing, such as query_responses, input_ids, or prompts and responses")
    padding = tensors.pop("padding_mask", None)
    if "mask" not in tensors and padding is not None:
        tensors["mask"] = 1 - padding
    attention = tensors.pop("attention_mask", None)
    source = tensors.get("mask")
    if source is None and responses is not None and responses.isnan().any():
        source = (~responses.isnan()).double()  # lists of different lengths have no padding
    if source is None and attention is not None and responses is not None:
        source = attention[:, -responses.shape[1] :]
    if source is None or source.ndim != 2:
        raise InputError("a mask (rows, tokens) is missing, such as response_mask: True for the policy's tokens")
    mask = source.nan_to_num(0) > 0.5
    rows, width = mask.shape
    if ids is None:
        ids = responses if queries is None else torch.cat([queries, responses], dim=1)
    elif responses is not None and responses.shape[1] >= width and ids.shape[1] <= responses.shape[1]:
        ids = responses
    if ids.ndim != 2 or len(ids) != rows or ids.shape[1] < width:
        raise InputError(f"token ids are {tuple(ids.shape)}, and the mask is {tuple(mask.shape)}; they must fit")
    context = settings.get("context_length", queries.shape[1] if queries is not None else 0)
    batch = Batch(
        tokens=ids.nan_to_num(-1).long(),
        mask=mask,
        is_text=~ids.isnan(),
        arrays={},
        eps=eps,
        settings=settings | {"context_length": int(context), "ids_name": ids_name},
        has_context=ids.shape[1] > width,
        unread=unread,
    )
    if attention is not None and attention.shape == ids.shape:
        batch.is_text &= attention > 0.5
        settings["attention"] = True
    else:
        pads = pad_of(batch)
        batch.is_text &= (batch.tokens >= 0) & ((batch.tokens != pads) | in_middle(batch))
    batch.settings["has_attention"] = settings.pop("attention", False)
    for name, x in tensors.items():
        if name != "mask":
            put(batch, name, x)
    return batch


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
    return number if math.isfinite(number) else None


def pad_of(batch: Batch) -> int:
    """The padding id: what was said, or the token after most responses that are shorter than the widest."""
    if "pad_id" in batch.settings:
        return int(batch.settings["pad_id"])
    short = ~batch.mask[:, -1] & batch.mask.any(1)
    last = batch.responses[short, -1]
    return int(last.mode().values) if len(last) else -1


def in_middle(batch: Batch) -> Tensor:
    """Whether a token of the padding id is text: where the mask counts it (it may be the end token, too)."""
    inside = torch.zeros_like(batch.is_text)
    inside[:, -batch.mask.shape[1] :] = batch.mask
    return inside


def put(batch: Batch, name: str, x: Tensor) -> None:
    """Add an array, cut to the columns of the responses."""
    (rows, width), n = batch.mask.shape, x.numel()
    if name in ("loss", "value_loss") and (n == 1 or (x.shape == (rows,) and x.unique().numel() == 1)):
        batch.arrays[name] = x.flatten()[0]  # it may be repeated in every row of a file
        return
    if x.ndim == 3 and x.shape[2] == 1:
        x = x.squeeze(2)
    if x.ndim == 2 and x.shape == (rows, 1) and width > 1:
        x = x.squeeze(1)
    if x.ndim == 2 and x.shape[0] == rows and x.shape[1] == width - 1:
        x = torch.nn.functional.pad(x, (1, 0))  # of the tokens from the second on
    if x.ndim == 2 and x.shape[0] == rows and x.shape[1] >= width:
        x = x[:, -width:]
        if not x[batch.mask].isfinite().all() and name != "sampler_logprobs":
            batch.not_finite.append(name)
        x = x.nan_to_num(0, 0, 0)
        if name in PER_ROW:
            x = x.sum(1) if name == "scores" else x[:, -1]
    elif x.shape != (rows,):
        raise InputError(f"{name} is {tuple(x.shape)}; the mask is {(rows, width)}")
    elif not x.isfinite().all():
        batch.not_finite.append(name)
        x = x.nan_to_num(0, 0, 0)
    if x.ndim == 1 and name == "rewards":
        name = "scores"  # one number for each response
    if x.ndim == 1 and name not in (*PER_ROW, "advantages", "scores"):
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
    width = max(int(columns.sum()) for _, columns in pieces)

    def cut(x: Tensor) -> Tensor:
        rows = [x[row][columns] for row, columns in pieces]
        return torch.stack([torch.nn.functional.pad(row, (0, width - len(row)), value=float("nan")) for row in rows])

    return {name: cut(x) if x.shape == segments.shape else x for name, x in tensors.items()}
