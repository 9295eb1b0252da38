"""Scorers of texts that are the user's functions: import them, call them, and say in one line what they do wrong.

Such a function may raise anything and return anything, so its results are checked and its side effects undone.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.lib.base import errors, launch
from ppo_rlhf.lib.base.errors import InputError, flag
from ppo_rlhf.lib.nets import templates

# Token ids of queries, truncated responses and, if the data has them, reference answers -> scores (batch,)
Scorer = Callable[..., torch.Tensor]

# Losses add up the squares of scores, in float32.
LARGEST_SCORE = 1e15

# Older runs name these modules as they were called then.
MOVED = {"ppo_rlhf.tales": "ppo_rlhf.worlds.tales", "ppo_rlhf.tldr_tales": "ppo_rlhf.worlds.posts"}


def text_scorer(
    name: str,
    field: str,
    tokenizer: PreTrainedTokenizerBase,
    pad_id: int,
    *,
    with_references: bool = False,
    on_all_processes: bool = False,
) -> Scorer:
    """A scorer that calls the function `package.module:name`: (queries, truncated responses) -> list of floats.

    The function gets nothing of a response from its first end-of-text token on.

    A function that asks for them (see arguments_of) also gets the reference answers, or a list of None if the data
    has none. with_references: whether the data has reference answers.

    on_all_processes: all processes call the scorer together, each with its own texts. If it fails on one, it fails on
    all.
    """
    what = f"{flag(field)} {name}"
    function = import_function(name, field)

    def decode(tokens: torch.Tensor) -> list[str]:
        return [tokenizer.decode([token for token in row if token != pad_id]) for row in tokens.tolist()]

    def score(queries: torch.Tensor, responses: torch.Tensor, references: torch.Tensor | None = None) -> torch.Tensor:
        ends = responses.new_tensor(templates.end_ids(tokenizer))
        written = responses.masked_fill(torch.isin(responses, ends).cumsum(1) > 0, pad_id)
        decoded = [decode(tokens) for tokens in (queries, written)]
        answers = [None] * len(queries) if references is None else decode(references)
        scores = scores_of(function, what, *decoded, answers, on_all_processes=on_all_processes)
        return torch.tensor(scores).to(queries.device)

    answers = ["A reference."] * 2 if with_references else [None] * 2
    with contextlib.chdir("."):
        scores_of(function, what, ["A query."] * 2, ["A response.", "Another one."], answers)
    return score


def load_monitor(name: str, taken: Collection[str], of_texts: Callable[[str, str], Scorer]) -> dict[str, Scorer]:
    """The scorer of a function that is only logged, under the function's name. Empty if no function is named.

    Where the function fails, the scores are NaN. The first time, a line says so.

    taken: names that the run logs anyway. of_texts: makes a scorer, as text_scorer does, from the function's name and
    the argument's.
    """
    if not name:
        return {}
    own_name = re.split("[:.]", name)[-1]
    if own_name in taken:
        raise InputError(f"{flag('rewards.monitor')} {name}: the name {own_name} is taken; rename the function")
    score, failed = of_texts(name, "rewards.monitor"), False

    def score_if_it_can(queries: torch.Tensor, *texts: torch.Tensor | None) -> torch.Tensor:
        nonlocal failed
        try:
            return score(queries, *texts)
        except InputError as error:  # training doesn't depend on it, so it goes on
            if not failed:
                errors.say(f"{error}; where it fails, {own_name} is logged as NaN")
            failed = True
            return torch.full((len(queries),), math.nan, device=queries.device)

    return {own_name: score_if_it_can}


def import_function(name: str, field: str) -> Callable:
    """The function `package.module:name`. The module may be in the current folder, and the name may have dots."""
    module, _, path = name.partition(":")
    module = MOVED.get(module, module)
    if not path or module.endswith(".py") or module.startswith("."):
        module = ".".join(Path(module.removesuffix(".py")).parts).lstrip(".")
        wanted = f"{module}:{path or 'name'}"
        raise InputError(f"{flag(field)} {name}: write a module and the name of a function in it, as in {wanted}")
    try:
        if importlib.util.find_spec(module.split(".")[0]) is None:
            sys.path.append("")
        with contextlib.chdir("."), contained():  # the import may change the current folder
            function = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (Exception, SystemExit) as error:  # the module is the user's and may raise anything
        said = f"{type(error).__name__}: {error}"
        if place := place_in_code(error):
            raise InputError(f"{flag(field)} {name}: {module} could not be imported: {said} ({place})") from error
        raise InputError(f"{flag(field)} {name}: {said}; write package.module:name") from error
    if not callable(function):
        raise InputError(f"{flag(field)} {name}: that is no function")
    return function


def import_functions(shaping: Any) -> None:
    """Import the functions that these arguments of a script, its `rewards`, name, and drop them.

    An InputError says which is not there, before a script loads or downloads anything else.
    """
    for field in ("function", "monitor"):
        if name := getattr(shaping, field, ""):
            import_function(name, f"rewards.{field}")


def place_in_code(error: BaseException) -> str:
    """File and line of the user's code that raised an error, or of its syntax error; empty if it is from here."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    machinery = ("<frozen ", __file__, importlib.__file__)
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{frame.filename}:{frame.lineno}" for frame in frames if not frame.filename.startswith(machinery)]
    return places[-1] if places else ""


def scores_of(
    function: Callable, what: str, *texts: Sequence, none: float | None = None, on_all_processes: bool = False
) -> list[float]:
    """The scores that score_texts returns. If it says what is wrong, that is an InputError, with on_all_processes on
    every process, all of which must then call this. texts: queries, responses and references.
    """
    scores, problem = score_texts(function, what, *texts, none=none)
    if on_all_processes:
        launch.fail_together(problem)
    elif problem:
        raise InputError(problem)
    return scores


def score_texts(
    function: Callable,
    what: str,
    queries: list[str],
    responses: list[str],
    references: Sequence[str | None],
    none: float | None = None,
) -> tuple[list[float], str]:
    """Returns a function's scores, one finite number per response, and an empty text; or no scores and a line that
    says what is wrong.

    The function gets copies of the lists that it asks for (see arguments_of). what: the function as the line names
    it. none: the number that replaces None among the scores; if none is None, the function must not return None. If
    none is NaN, the function may return NaN too.
    """
    try:
        called_with = arguments_of(function, queries, responses, references)
    except TypeError as error:
        return [], f"{what}: {error}"
    try:
        with contained():
            returned = function(*called_with.args, **called_with.kwargs)
            # A loop over a text, a dict or a set gives no scores.
            if isinstance(returned, str | bytes | Mapping | Set) or not isinstance(returned, Iterable):
                kind = type(returned).__name__
                return [], f"{what} returned a {kind}; it must return a list, one number per response"
            scores = [float(none if score is None else score) for score in returned]
    except (Exception, SystemExit) as error:  # the function is the user's and may raise anything
        where = f" ({place})" if (place := place_in_code(error)) else ""
        return [], f"{what} failed when called with {len(queries)} texts: {type(error).__name__}: {error}{where}"
    if len(scores) != len(responses):
        return [], f"{what} returned {len(scores)} scores for {len(responses)} responses"
    nan_counts_nowhere = none is not None and math.isnan(none)
    for number, score in enumerate(scores):
        if not abs(score) <= LARGEST_SCORE and not (math.isnan(score) and nan_counts_nowhere):
            allowed = f"at most {LARGEST_SCORE:g} in size" + (", NaN or None" if nan_counts_nowhere else "")
            return [], f"{what} returned {score} for text {number + 1} of {len(scores)}; scores must be {allowed}"
    if sys.stdout.closed:
        return [], f"{what} closed sys.stdout, which the run prints to; it must leave that open"
    return scores, ""


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
    "ground_truth": 2,
    "solution": 2,
}


def arguments_of(function: Callable, *texts: Sequence) -> inspect.BoundArguments:
    """What a user's function is called with. texts: of queries, of responses, and references, as copies.

    If any of its parameters has a name from NAMES, each gets what its name says, in whatever order they come. If none
    has, it gets queries and responses by position and, with a third positional parameter, the references. Raises a
    TypeError if the function cannot be called like that.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have no signature
        signature = inspect.signature(lambda *texts: None)
    own, fixed = [*signature.parameters.values()], getattr(function, "keywords", {})  # fixed by functools.partial
    own = [p for p in own if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in fixed]
    if named := {p.name: list(texts[NAMES[p.name]]) for p in own if p.name in NAMES}:
        if unknown := [p.name for p in own if p.name not in NAMES and p.default is p.empty]:
            raise TypeError(
                f"its parameter {unknown[0]} has neither a default nor a known name; a function is called with "
                f"{', '.join(NAMES)}, whichever its parameters are named after"
            )
        return inspect.BoundArguments(signature, named)
    wants_references = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in own) > 2
    try:
        return signature.bind(*map(list, texts[: 3 if wants_references else 2]))
    except TypeError as error:
        raise TypeError(
            f"{error}; its parameters have none of the names {', '.join(NAMES)}, so it is called by position with "
            f"the texts of queries and of responses{', and references' if wants_references else ''}"
        ) from error


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Undo side effects of the user's code.

    These are whether gradients are computed, where print() writes to, and the default dtype and device of tensors.
    """
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()), contextlib.redirect_stdout(sys.stdout):
            yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(device)
