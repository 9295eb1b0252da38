"""What people give to loop.py: queries, responses, scores, rewards and arguments, each in several forms.

Each is read into one form, or refused in one line that names it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ppo_rlhf.tldr.reward_functions import LARGEST_SCORE
from ppo_rlhf.train_policy import InputError, input_errors, start_of_texts, vocabulary_size

Text = str | Sequence[int] | Tensor  # a text, or its token ids, which are taken as they are
Chat = Sequence[Mapping[str, str]]  # messages, to which the response is the assistant's reply
Reward = float | tuple[int, float]  # of a token; or the index of a token in its response, and a reward


# ---- Queries and responses -------------------------------------------------------------------------------------


def token_rows(rows: Sequence[Text | Chat], what: str, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of each row; of queries with what the tokenizer puts before them."""
    no_list = isinstance(rows, str | Mapping) or not isinstance(rows, Iterable) or getattr(rows, "ndim", 1) == 0
    each = [] if no_list else [*rows]
    if not each:
        raise InputError(
            f"{what} must be a list with a text, messages or a list of token ids for each episode, such as the "
            f"input_ids that a tokenizer returns without padding"
        )
    pad = tokenizer.pad_token_id
    if getattr(rows, "ndim", 1) == 2 and pad is not None:  # a tensor, maybe of a collator that pads
        for column in (rows[:, 0] == pad, rows[:, -1] == pad):
            if column.any() and not column.all():
                raise InputError(f"{what} are padded with token {pad}; give lists of token ids without padding")
    start = start_of_texts(tokenizer) if what == "queries" else []
    return [token_ids(row, f"{what}: number {number}", tokenizer, start) for number, row in enumerate(each, 1)]


def token_ids(row: Text | Chat, what: str, tokenizer: PreTrainedTokenizerBase, start: list[int]) -> list[int]:
    """Token ids of a text, of messages, or as they are. start: what comes before every text."""
    if isinstance(row, list | tuple) and row and all(isinstance(message, Mapping) for message in row):
        with input_errors(f"{what} is no chat for the tokenizer's template"):
            row = tokenizer.apply_chat_template([*row], tokenize=False, add_generation_prompt=True)
    if isinstance(row, str):
        tokens = tokenizer.encode(row, add_special_tokens=False)
        if tokens[: len(start)] != start:  # what a chat template has made begins with it
            tokens = [*start, *tokens]
    else:
        tokens = row.tolist() if hasattr(row, "tolist") else row  # of torch or numpy
    is_list, largest = isinstance(tokens, list | tuple) and len(tokens) > 0, vocabulary_size(tokenizer) - 1
    if not is_list or not all(type(token) is int and 0 <= token <= largest for token in tokens):
        raise InputError(f"{what} must be a text or a list of ids in 0..{largest}, not empty")
    return [*tokens]


# ---- Scores and rewards ----------------------------------------------------------------------------------------


def listed(numbers: Any, what: str) -> list[Any]:
    """What is in a list, a tensor, a column or a generator."""
    no_list = isinstance(numbers, str | bytes | Mapping | set | frozenset) or not isinstance(numbers, Iterable)
    if no_list or getattr(numbers, "ndim", 1) == 0:  # a tensor of one number
        raise InputError(f"{what} must be a list of numbers, not a {type(numbers).__name__}")
    return [number.detach() if isinstance(number, Tensor) else number for number in numbers]


def finite(number: Any, what: str) -> float:
    try:
        number = float(number)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # RuntimeError: of a longer tensor
        raise InputError(f"{what} is no number; give a list of numbers: {error}") from error
    if not abs(number) <= LARGEST_SCORE:
        raise InputError(f"{what} is {number}; it must be a finite number")
    return number


def read_scores(scores: Any, batch: int) -> Tensor:
    """Scores (batch,) in float64, finite."""
    numbers = [finite(score, f"score {place}") for place, score in enumerate(listed(scores, "scores"), 1)]
    if len(numbers) != batch:
        raise InputError(f"there are {len(numbers)} scores for {batch} responses")
    return torch.tensor(numbers, dtype=torch.float64)


def read_mask(mask: Any, lengths: list[int]) -> list[list[int]]:
    """1 for each token of the policy's, 0 for others. lengths: tokens of each response."""
    rows = [listed(row, f"mask of response {number}") for number, row in enumerate(listed(mask, "mask"), 1)]
    if [len(row) for row in rows] != lengths:
        raise InputError("mask must have one entry for each token of each response")
    return [[int(finite(entry, "an entry of mask") != 0) for entry in row] for row in rows]


def place_rewards(mask: Tensor, lengths: list[int], rewards: Any) -> Tensor:
    """Rewards (batch, response_length) in float64, each at its token or at the step after the last one; 0 elsewhere.

    mask: (batch, response_length), of the policy's tokens. lengths: tokens of each response. rewards: as `PPO.step`
    gets them; None: there are none.
    """
    placed = torch.zeros(mask.shape, dtype=torch.float64)
    if rewards is None:
        return placed
    rows = listed(rewards, "rewards")
    if len(rows) != len(mask):
        raise InputError(f"there are {len(rows)} lists of rewards for {len(mask)} responses")
    for row, (given, length) in enumerate(zip(rows, lengths, strict=True)):
        what = f"rewards of response {row + 1}"
        for index, reward in pairs_of(given, length, what):
            # The step after the last token is that of the policy's last one, whoever speaks after it.
            column = int(mask[row].nonzero().max()) + 1 if index == length else index
            if not 0 <= index <= length or (index < length and not mask[row, index]):
                raise InputError(f"{what}: {index} is no token of the policy's, nor {length}, the step after all")
            placed[row, column] += finite(reward, f"{what}: that of {index}")
    return placed


def pairs_of(given: Any, length: int, what: str) -> list[tuple[int, Any]]:
    """Pairs of an index and a reward, from pairs or from a number for each of `length` tokens."""
    entries = listed(given, what)
    if any(isinstance(entry, tuple | list) for entry in entries):
        try:
            return [(operator.index(index), reward) for index, reward in entries]
        except (TypeError, ValueError) as error:
            raise InputError(f"{what} must be numbers, or pairs of an index and a number: {error}") from error
    if entries and len(entries) != length:
        raise InputError(f"{what}: there are {len(entries)} for {length} tokens; each needs its own, or give pairs")
    # A token of somebody else has 0 in such a list, which is no reward.
    numbers = [finite(reward, f"{what}: that of {index}") for index, reward in enumerate(entries)]
    return [(index, reward) for index, reward in enumerate(numbers) if reward != 0]


# ---- Arguments -------------------------------------------------------------------------------------------------

NOT_HERE = {
    "top_k": "the ratio and the KL divergence are of the whole distribution; a lower temperature avoids rare tokens",
    "top_p": "the ratio and the KL divergence are of the whole distribution; a lower temperature avoids rare tokens",
    "max_new_tokens": "it is response_length here",
    "batch_size": "a batch is as large as the list that step gets",
}


def refuse(others: dict[str, Any], what: str) -> None:
    """Raise an InputError if there are arguments that nothing here has."""
    for name in others:
        reason = NOT_HERE.get(name, "docs/from_trl.md says what TRL's arguments are called here")
        raise InputError(f"{what} has no argument {name}: {reason}")


def name_of(model: Any) -> str:
    """Of a model, for messages and for what is saved next to it."""
    if isinstance(model, str | Path):
        return str(model)
    return str(getattr(model, "name_or_path", "") or type(model).__name__)


def plain(value: Any) -> Any:
    """Arguments with Python's numbers in place of NumPy's and PyTorch's."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value.item() if hasattr(value, "item") else value


@contextlib.contextmanager
def in_arguments_of_loop() -> Iterator[None]:
    """Within the block, messages name the arguments of PPO in place of a script's: --ppo.lr becomes lr."""
    try:
        yield
    except InputError as error:
        names = {"base_model": "model", "target": "kl_target", "horizon": "kl_horizon"}
        message = re.sub(r"--(?:\w+\.)*(\w+)", lambda found: names.get(found[1], found[1]), str(error))
        raise InputError(message) from error


@contextlib.contextmanager
def as_a_guest() -> Iterator[None]:
    """Within the block, transformers prints no tables and no bars; after it, PyTorch's random numbers go on."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
