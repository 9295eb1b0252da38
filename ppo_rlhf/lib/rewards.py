"""Scores of texts by a function."""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable, Collection, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.lib import processes, texts
from ppo_rlhf.lib.errors import InputError, flag

# Queries, truncated responses and, where the data has them, reference answers (token ids) -> scores (batch,)
Scorer = Callable[..., torch.Tensor]


MOVED = {"ppo_rlhf.tales": "ppo_rlhf.worlds.tales", "ppo_rlhf.tldr_tales": "ppo_rlhf.worlds.posts"}  # in older runs


def import_function(name: str, field: str) -> Callable:
    """The function `package.module:name`. The module may lie in the current folder; the name may have dots."""
    module, _, path = name.partition(":")
    module = MOVED.get(module, module)
    try:
        if importlib.util.find_spec(module.split(".")[0]) is None:
            sys.path.append("")
        function = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (Exception, SystemExit) as error:  # the module is the user's and may raise anything
        raise InputError(
            f"{flag(field)} {name}: {type(error).__name__}: {error}; write package.module:name"
        ) from error
    if not callable(function):
        raise InputError(f"{flag(field)} {name}: that is no function")
    return function


def takes_references(function: Callable) -> bool:
    """Whether a function of texts has a third parameter: one that is given by position, with a default or without.

    *args and parameters that are given by name only are not counted: wrappers take any number, and options are not
    meant for texts.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of some built-in functions
        return False
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) > 2


def score_texts(
    function: Callable, what: str, queries: list[str], responses: list[str], references: Sequence[str | None]
) -> tuple[list[float], str]:
    """What a function says of responses, one number each, and an empty text; or what is wrong with it, in one line.

    The function gets lists of its own: queries, responses and, if it has a third parameter, references. what: names
    the function.
    """
    try:
        texts = [queries, responses, references] if takes_references(function) else [queries, responses]
        scores = [float(score) for score in function(*map(list, texts))]
    except (Exception, SystemExit) as error:  # the function is the user's and may raise anything
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        return [], f"{what} failed on {len(queries)} texts: {type(error).__name__}: {error}{where}"
    if len(scores) != len(responses):
        return [], f"{what} returned {len(scores)} scores for {len(responses)} responses"
    return scores, ""


def text_scorer(
    name: str,
    field: str,
    tokenizer: PreTrainedTokenizerBase,
    pad_id: int,
    *,
    with_references: bool = False,
    on_all_processes: bool = False,
) -> Scorer:
    """Score with the function `package.module:name` of texts: (queries, truncated responses) -> list of floats.

    A function with a third parameter (see takes_references) also gets the reference answers: texts, or a list of None
    where the data has none. with_references: whether it has.

    on_all_processes: they call the scorer together, each with its own texts, and if it fails on one, it fails on all.
    """
    what = f"{flag(field)} {name}"
    with contextlib.chdir("."):  # it may change the current folder, where the run will begin
        function = import_function(name, field)

    def score(queries: torch.Tensor, responses: torch.Tensor, references: torch.Tensor | None = None) -> torch.Tensor:
        decoded = [texts.to_texts(tokenizer, tokens, pad_id) for tokens in (queries, responses)]
        answers = [None] * len(queries) if references is None else texts.to_texts(tokenizer, references, pad_id)
        scores, problem = score_texts(function, what, *decoded, answers)
        if on_all_processes:
            processes.fail_together(problem)
        elif problem:
            raise InputError(problem)
        return torch.tensor(scores).to(queries.device)

    answers = ["A reference."] * 2 if with_references else [None] * 2
    with contextlib.chdir("."):
        scores, problem = score_texts(function, what, ["A query."] * 2, ["A response.", "Another one."], answers)
    if problem:
        raise InputError(problem)
    if not all(map(math.isfinite, scores)):
        raise InputError(f"{what} returned {scores} for two texts; scores must be finite")
    return score


def load_monitor(name: str, taken: Collection[str], of_texts: Callable[[str, str], Scorer]) -> dict[str, Scorer]:
    """A function that is only logged, under its own name; an empty dictionary if no function is named.

    taken: names under which a run logs anyway. of_texts: makes a scorer, as text_scorer does, from the function's
    name and that of the argument.
    """
    if not name:
        return {}
    own_name = re.split("[:.]", name)[-1]
    if own_name in taken:
        raise InputError(f"{flag('rewards.monitor')} {name}: the name {own_name} is taken; rename the function")
    return {own_name: of_texts(name, "rewards.monitor")}
