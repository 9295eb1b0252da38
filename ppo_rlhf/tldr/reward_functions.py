"""Scorers of texts that are the user's functions: import them, call them, and say in one line what they do wrong."""

import copy
import inspect
import itertools
import json
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import PreTrainedTokenizerBase

from ppo_rlhf import train_policy
from ppo_rlhf.tldr import models
from ppo_rlhf.train_policy import InputError, to_texts

# Token ids of queries, truncated responses and, if the data has them, reference answers -> scores (batch,)
Scorer = Callable[..., torch.Tensor]

# Losses add up the squares of scores, in float32.
LARGEST_SCORE = 1e15


def text_scorer(
    name: str,
    field: str,
    tokenizer: PreTrainedTokenizerBase,
    pad_id: int,
    *,
    with_references: bool = False,
) -> Scorer:
    """A scorer that calls the function `package.module:name`: (queries, truncated responses) -> list of floats.

    The function gets nothing of a response from its first end-of-text token on. One that asks for them (see
    arguments_of) also gets the reference answers, or a list of None if the data has none. with_references: whether
    the data has reference answers.

    All processes call the scorer together, each with its own texts. If it fails on one, it fails on all.
    """
    what = f"--{field} {name}"
    function = import_function(name, field)

    def score(queries: torch.Tensor, responses: torch.Tensor, references: torch.Tensor | None = None) -> torch.Tensor:
        ends = responses.new_tensor(models.end_ids(tokenizer))
        written = responses.masked_fill(torch.isin(responses, ends).cumsum(1) > 0, pad_id)
        texts = [to_texts(tokenizer, tokens, pad_id) for tokens in (queries, written)]
        answers = [None] * len(queries) if references is None else to_texts(tokenizer, references, pad_id)
        scores = scores_of(function, what, *texts, answers, on_all_processes=True)
        return torch.tensor(scores).to(queries.device)

    # A function that cannot be called is refused before the run begins.
    answers = ["A reference."] * 2 if with_references else [None] * 2
    scores_of(function, what, ["A query."] * 2, ["A response.", "Another one."], answers)
    return score


def import_function(name: str, field: str) -> Callable:
    """The function `package.module:name`. The module may be in the current folder, and the name may have dots."""
    # Python puts the script's folder first. Its modules may have the name of a user's: rewards, tools, policy.
    package = Path(__file__).parents[1]
    sys.path[:] = [place for place in sys.path if not Path(place).is_relative_to(package)]
    if not callable(function := train_policy.import_function(name, field)):
        raise InputError(f"--{field} {name!r} is no function; write package.module:name")
    return function


def scores_of(
    function: Callable,
    what: str,
    queries: list[str],
    responses: list[str],
    references: Sequence[str | None],
    *,
    rows: Sequence[Mapping[str, Any]] = (),
    none: float | None = None,
    number_of: Callable[[Any, Mapping[str, Any]], float] = lambda score, row: float(score),
    on_all_processes: bool = False,
) -> list[float]:
    """A function's scores, one finite number per response. Raises an InputError that says what is wrong.

    The function gets copies of the lists that it asks for (see arguments_of). One that has a parameter solution_str
    is called once for each text (see text_by_text). what: the function as messages name it. rows: of the data, one
    per response, whose columns the function may ask for. none: the number that replaces None among the scores; if it
    is None, the function must not return None. If it is NaN, the function may return NaN too. number_of: what a
    score that the function returned for a row is as a number. on_all_processes: all processes call this, and fail
    together.
    """
    scores, problem = [], ""
    try:
        if "solution_str" in inspect.signature(function).parameters:
            function = text_by_text(function)
        arguments = arguments_of(function, queries, responses, references, rows=rows)
        with torch.no_grad():
            returned = function(*arguments.args, **arguments.kwargs)
        if isinstance(returned, str | dict):  # a loop over them would give numbers, but no scores
            raise TypeError(
                f"it returned a {type(returned).__name__}; it must return a list, one number per response"
            )
        pairs = zip(returned, itertools.chain(rows, itertools.repeat({})), strict=False)
        scores = [number_of(none if score is None else score, row) for score, row in pairs]
    except InputError as error:  # of number_of
        problem = f"returned {error}"
    except Exception as error:  # the function is the user's and may raise anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"failed: {type(error).__name__}: {error} ({place.filename}:{place.lineno})"
    may_be_nan = none is not None and math.isnan(none)
    wrong = [score for score in scores if not (abs(score) <= LARGEST_SCORE or (may_be_nan and math.isnan(score)))]
    if not problem and len(scores) != len(responses):
        problem = f"returned {len(scores)} scores for {len(responses)} responses"
    elif wrong:
        problem = f"returned {wrong[0]} for text {scores.index(wrong[0]) + 1}"
    problems = gather_object([problem]) if on_all_processes else [problem]
    if problem := next(filter(None, problems), ""):
        raise InputError(f"{what} {problem}")
    return scores


# The names of parameters that say what they get: texts of queries, texts of responses, or reference answers.
NAMES = {
    "queries": 0,
    "query": 0,
    "prompts": 0,
    "prompt": 0,
    "responses": 1,
    "response": 1,
    "completions": 1,
    "completion": 1,
    "references": 2,
    "reference": 2,
    "answers": 2,
    "answer": 2,
    "ground_truths": 2,
    "ground_truth": 2,
    "solutions": 2,
    "solution": 2,
    "labels": 2,
}


class JsonText(str):
    """A reference answer that is an object, a list or a boolean, as JSON text."""


def arguments_of(
    function: Callable, *texts: Sequence, rows: Sequence[Mapping[str, Any]] = ()
) -> inspect.BoundArguments:
    """What a user's function is called with. texts: of queries, of responses, and references, as copies.

    If any of its parameters is named after an entry of NAMES or a column of the rows, or if it takes nothing but
    **kwargs, each parameter gets what its name says, in whatever order they come, and **kwargs gets all the others. A
    column counts more than another name of the answer. If no parameter has such a name, the function gets queries and
    responses by position and, with a third positional parameter, the references. As in OpenRLHF, `queries` are the
    texts of prompt and response where the function also has a parameter `prompts`. Raises a TypeError if the function
    cannot be called like that, or would see no response.
    """
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    columns = dict.fromkeys(column for row in rows for column in row)
    kinds = {p.kind for p in parameters}
    try:
        if kinds == {inspect.Parameter.VAR_KEYWORD} or signature.parameters.keys() & {*NAMES, *columns}:
            given = {column: [copy.deepcopy(row.get(column)) for row in rows] for column in asked(signature, columns)}
            for name in asked(signature, NAMES):
                if NAMES[name] < 2 or name not in columns:
                    given[name] = list(texts[NAMES[name]])
            if {"queries", "prompts"} <= signature.parameters.keys():
                given["queries"] = [query + response for query, response in zip(*texts[:2], strict=True)]
            elif all(NAMES.get(name) != 1 for name in given):
                raise TypeError("none of its arguments gets the responses")
            return signature.bind(**given)
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        return signature.bind(*map(list, texts[: 3 if len(positional) > 2 else 2]))
    except TypeError as error:
        raise TypeError(
            f"{error}; a function is called by the names of its parameters, any of {', '.join([*NAMES, *columns])}, "
            f"or, if it has none of these, with two lists"
        ) from error


def asked(signature: inspect.Signature, names: Iterable[str]) -> list[str]:
    """Those of the names that a function has parameters for: all of them if it takes **kwargs."""
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    return [name for name in names if takes_all or name in signature.parameters]


def text_by_text(function: Callable) -> Callable:
    """A function of lists that calls a function of one text, such as compute_score, by the names of verl 0.9.1.

    data_source and extra_info are the columns of these names, or an empty text and an empty object. A reference that
    is JSON text is passed as the object. The score is a number, or under "score" in an object.
    """
    signature = inspect.signature(function)

    def of_lists(
        responses: list[str],
        references: list[str | None],
        data_source: Sequence[str] = (),
        extra_info: Sequence[dict | None] = (),
    ) -> list[float | None]:
        scores = []
        for response, reference, source, info in itertools.zip_longest(
            responses, references, data_source, extra_info
        ):
            given = {
                "data_source": source or "",
                "solution_str": response,
                "ground_truth": json.loads(reference) if isinstance(reference, JsonText) else reference,
                "extra_info": info or {},
            }
            try:
                arguments = signature.bind(**{name: given[name] for name in asked(signature, given)})
            except TypeError as error:
                raise TypeError(f"{error}; a function of solution_str is called with {', '.join(given)}") from error
            score = function(*arguments.args, **arguments.kwargs)
            scores.append(score["score"] if isinstance(score, dict) else score)
        return scores

    return of_lists
