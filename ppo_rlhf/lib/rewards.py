"""Scores of texts: by a function of the user's, and by the verifiers of chapter 3.

Files and lines beside marks of chapter 3 (V01 to V99) are those of verl-project/verl at commit b178a3c.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import json
import math
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from decimal import Decimal
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.lib import processes, texts
from ppo_rlhf.lib.errors import InputError, flag

# Queries, truncated responses and, where the data has them, reference answers (token ids) -> scores (batch,)
Scorer = Callable[..., torch.Tensor]


MOVED = {"ppo_rlhf.tales": "ppo_rlhf.worlds.tales", "ppo_rlhf.tldr_tales": "ppo_rlhf.worlds.posts"}  # in older runs


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Undo what the user's code changes in passing.

    That is whether gradients are computed, where print() writes to, and of which type and where new tensors are.
    """
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()), contextlib.redirect_stdout(sys.stdout):
            yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(device)


def import_function(name: str, field: str) -> Callable:
    """The function `package.module:name`. The module may lie in the current folder; the name may have dots."""
    module, _, path = name.partition(":")
    module = MOVED.get(module, module)
    try:
        if importlib.util.find_spec(module.split(".")[0]) is None:
            sys.path.append("")
        with contained():
            function = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (Exception, SystemExit) as error:  # the module is the user's and may raise anything
        raise InputError(
            f"{flag(field)} {name}: {type(error).__name__}: {error}; write package.module:name"
        ) from error
    if not callable(function):
        raise InputError(f"{flag(field)} {name}: that is no function")
    return function


def keeps_nothing(*names: str) -> bool:
    """Whether these functions, if any are named, are this package's own, which keep nothing from call to call."""
    modules = [name.split(":")[0] for name in names if name and name not in VERIFIERS]
    return all(MOVED.get(module, module).startswith("ppo_rlhf.") for module in modules)


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
    function: Callable,
    what: str,
    queries: list[str],
    responses: list[str],
    references: Sequence[str | None],
    none: float | None = None,
) -> tuple[list[float], str]:
    """The scores of a function, one finite number per response, and an empty text; or what is wrong, in one line.

    The function gets lists of its own: queries, responses and, if it has a third parameter, references. what: names
    the function. none: the number that a None of the function stands for; None: the function must not return None. If
    none is NaN, the function may return NaN too.
    """
    try:
        texts = [queries, responses, references] if takes_references(function) else [queries, responses]
        with contained():
            returned = function(*map(list, texts))
            if isinstance(returned, str | bytes | Mapping | Set):  # a loop over these gives no scores
                kind = type(returned).__name__
                return [], f"{what} returned a {kind}; it must return a list, one number per response"
            scores = [float(none if score is None else score) for score in returned]
    except (Exception, SystemExit) as error:  # the function is the user's and may raise anything
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        return [], f"{what} failed on {len(queries)} texts: {type(error).__name__}: {error}{where}"
    if len(scores) != len(responses):
        return [], f"{what} returned {len(scores)} scores for {len(responses)} responses"
    nan_counts_nowhere = none is not None and math.isnan(none)
    for number, score in enumerate(scores):
        if not math.isfinite(score) and not (math.isnan(score) and nan_counts_nowhere):
            allowed = "finite, NaN or None" if nan_counts_nowhere else "finite"
            return [], f"{what} returned {score} for text {number} of {len(scores)}; scores must be {allowed}"
    if sys.stdout.closed:
        return [], f"{what} closed sys.stdout, which the run prints to; it must leave that open"
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
        _, problem = score_texts(function, what, ["A query."] * 2, ["A response.", "Another one."], answers)
    if problem:
        raise InputError(problem)
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


# ---- Verifiers: chapter 3 --------------------------------------------------------------------------------------

# [V18] A verifier reads the response alone, never the prompt.   reward_manager/naive.py#L74-L91
Verifier = Callable[[str, str], float]  # response, answer -> value

# [V16] A sign, dollars, digits with commas, decimals; a full stop at the end isn't part of the number. It may begin
#       with its point, as .5 does, unless the point ends something else, as in `so...5` or `no.5`.
#       reward_score/gsm8k.py#L20-L70
NUMBER = r"[-+\u2212]?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|(?<![\w.)\]}])\.[0-9]+)"


def last_number(pattern: str, text: str) -> str | None:
    """The last number that a pattern finds in a text, in plain digits: -1,234.50 for `\u2212$1,234.50`."""
    found = re.findall(pattern, text)
    return found[-1].translate({ord("\u2212"): "-", ord("$"): None, ord(","): None}) if found else None


def hashed_number(text: str) -> str | None:
    """The last number that stands behind four hashes and a space, as GSM8K's solutions end; None: there is none."""
    # [V16] The last one counts: who corrects himself means that.
    return last_number(f"#### ({NUMBER})", text)


def equal_numbers(number: str | None, answer: str) -> float:
    """1 if they are the same number, such as 72, 72.00 and 072; else 0, also if one of them is none."""
    answer = answer.strip()
    gold = last_number(NUMBER, answer) if re.fullmatch(NUMBER, answer) else None
    return float(number is not None and gold is not None and Decimal(number) == Decimal(gold))


def gsm8k_strict(response: str, answer: str) -> float:
    """1 if the last number behind `#### ` is the answer, else 0."""
    return equal_numbers(hashed_number(response), answer)


def gsm8k_flexible(response: str, answer: str) -> float:
    """1 if the last number of all is the answer, else 0."""
    # [V17] Whatever stands before and behind it.   reward_score/gsm8k.py#L20-L70
    return equal_numbers(last_number(NUMBER, response), answer)


def gsm8k_format(response: str, answer: str) -> float:
    """1 if there is a number behind `#### `, right or wrong."""
    return float(hashed_number(response) is not None)


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{...} whose braces are balanced; None if there is no box.

    Of boxes next to each other, the last one counts too. The command may have two backslashes, as JSON writes them.
    Only where no box has braces, the word after the last \\boxed is its content, without the punctuation at its end.
    """
    opened, boxes = [], {}
    for mark in re.finditer(r"(\\+boxed\s*{)|\\.|([{}])", text, re.DOTALL):  # \{ and \} are no braces
        if mark[1] or mark[2] == "{":
            opened.append(mark)
        elif mark[2] and opened and (begin := opened.pop())[1]:
            boxes[begin.start()] = text[begin.end() : mark.start()]
    if boxes:
        return boxes[max(boxes)].strip()
    words = re.findall(r"\\boxed(?![A-Za-z])\s*([^\s${}]+(?:{[^{}]*}[^\s${}]*)*)", text)
    return words[-1].rstrip(".,;:!?") if words else None


class Killed(Exception):
    """The process of math-verify was ended from outside, as the kernel does when the machine runs out of memory."""


class MathVerify:
    """The library math-verify in a process of its own, which ends when an expression takes too long."""

    process: subprocess.Popen[str] | None = None

    def ask(self, gold: str, content: str) -> bool:
        """Whether both contents of boxes are mathematics, and equal. Raises Killed if that can't be known."""
        if self.process is None:
            self.process = self.start()
        reply = ""
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps([gold, content]) + "\n")
            self.process.stdin.flush()
            reply = self.process.stdout.readline()
        if not reply:
            process, self.process = self.process, None
            stderr_of(process)
        return reply == "True\n"

    def start(self) -> subprocess.Popen[str]:
        program = Path(__file__).with_name("math_worker.py")
        process = subprocess.Popen(
            [sys.executable, "-P", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that a Ctrl-C reaches the script alone
        )
        if process.stdout.readline() != "ready\n":
            reason = (stderr_of(process) or "it has ended").splitlines()[-1]
            raise InputError(f"boxed answers need math-verify ({reason}): pip install -e '.[math]'")
        return process


def stderr_of(process: subprocess.Popen[str]) -> str:
    """What a process that has ended wrote to its stderr. Raises Killed if it was ended from outside.

    If an expression takes too much time or memory, the process ends with another status.
    """
    words = process.communicate()[1].strip()
    if process.returncode in (-signal.SIGKILL, -signal.SIGTERM):
        raise Killed
    return words


MATH_VERIFY = MathVerify()


@functools.lru_cache(maxsize=2**16)
def verdict(gold: str, content: str) -> bool:
    return MATH_VERIFY.ask(gold, content)  # the cache keeps no verdict of a process that was killed


def same_mathematics(gold: str, content: str) -> bool:
    """Whether math-verify finds the contents of two boxes equal. If its process is killed, another one is asked."""
    for _ in range(2):
        with contextlib.suppress(Killed):
            return verdict(gold, content)
    return False


def letters(text: str) -> str:
    """The letters of a text in lower case, if it consists of letters and spaces only; else nothing."""
    joined = "".join(text.split())
    return joined.casefold() if joined.isalpha() else ""


def boxed(response: str, answer: str) -> float:
    """1 if the last \\boxed{...} holds what equals the answer, else 0. Raises an InputError without math-verify.

    answer: mathematics or words, with a box around it or without.
    """
    content, gold = last_boxed(response), last_boxed(answer)
    gold = answer if gold is None else gold
    if content is None:
        return 0.0
    # [V19] Words are compared letter by letter: as mathematics, they would be products, and `on` the same as `no`.
    if letters(content) and letters(gold):
        return float(letters(content) == letters(gold))
    # [V19] What is no mathematics, or takes too long, is wrong.   reward_score/math_verify.py#L20-L40
    return float(same_mathematics(gold, content))


# [V20] What DAPO's verifier replaces in an answer, and what it removes then, in this order.
#       reward_score/math_dapo.py#L66-L162
REPLACED = {"an ": "", "a ": "", ".$": "$", r"\$": "", r"\ ": "", " ": "", "mbox": "text"}
REPLACED |= {r",\text{and}": ",", r"\text{and}": ",", r"\text{m}": r"\text{}"}
REMOVED = r"""
    square ways integers dollars mph inches hours km units \ldots sue points feet minutes digits cents degrees cm gm
    pounds meters meals edges students childrentickets multiples \text{s} \text{.} \text{}^2 \text{}^3 \text{}
    \mathrm{th} ^\circ ^{\circ} \; ,\! {,} " \dots
"""


def bare_answer(text: str) -> str:
    """An answer as DAPO's verifier compares it: without units, spaces, LaTeX around it, and what an `=` ends."""
    text = text.rpartition("=")[2]
    for old, new in (REPLACED | dict.fromkeys(REMOVED.split(), "")).items():
        text = text.replace(old, new)
    text = re.sub(r".*?\$(.*?)\$.*", r"$\1$", text)
    for command in ("text", "textbf", "overline"):
        text = re.sub(rf"\\{command}{{(.*?)}}", r"\1", text)
    text = re.sub(r"\\boxed{(.*)}", r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)  # \frac12 is \frac{1}{2}
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    number = text.replace(",", "")
    return (number if number.isdigit() else text).strip()


LONGEST_LINE = 300  # characters


def answer_line(response: str, answer: str) -> float:
    """1 if the last `Answer: x` says the answer, letter by letter after what bare_answer does to both; else -1."""
    # [V20] As DAPO has it: a scale of -1 and 1. A longer line is never right there, because only the last 300
    #       characters of a response are read.   reward_score/math_dapo.py#L220-L272
    found = re.findall(r"(?i)answer\s*:\s*([^\n]+)", response)
    said = bare_answer(found[-1]) if found and len(found[-1]) <= LONGEST_LINE else ""
    return 1.0 if said and said == bare_answer(answer) else -1.0


BLOCK = r"<{0}>(?:(?!</?(?:think|answer)>).)*</{0}>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def think_answer(response: str, answer: str) -> float:
    """1 if the response is a think block and an answer block, with nothing but space between them; else 0."""
    # [V21] The whole response, from its first character to its last.
    form = BLOCK.format("think") + r"\s*" + BLOCK.format("answer")
    return float(re.fullmatch(form, response, re.DOTALL) is not None)


def think_answer_tags(response: str, answer: str) -> float:
    """A quarter for each of the four tags of these blocks that stands in the response exactly once."""
    return sum(response.count(tag) == 1 for tag in TAGS) / len(TAGS)


VERIFIERS: dict[str, Verifier] = {
    function.__name__: function
    for function in (
        gsm8k_strict,
        gsm8k_flexible,
        gsm8k_format,
        boxed,
        answer_line,
        think_answer,
        think_answer_tags,
    )
}


# How the shortest response says its answer. Other verifiers look at the form alone, or are functions of the user's.
ANSWER_FORMS = {
    "gsm8k_strict": "#### {}",
    "gsm8k_flexible": "{}",
    "boxed": r"\boxed{{{}}}",
    "answer_line": "Answer: {}",
}


def can_be_right(verifier: str, answer: str) -> bool:
    """Whether a response can be right: one that says nothing but the answer must score 1."""
    form = ANSWER_FORMS.get(verifier)
    return form is None or VERIFIERS[verifier](form.format(answer), answer) == 1


def load_verifier(
    name: str, field: str, response_prefix: str = "", *, on_all_processes: bool = False
) -> Callable[[list[str], list[str], list[str]], list[float]]:
    """One of VERIFIERS, or the function `package.module:name` of texts, for whole batches.

    It takes prompts, responses and answers, and returns a number for each response; NaN: it cannot be scored. A
    function of the user's says None or NaN of such a response; what else it does wrong ends in an InputError.
    response_prefix: what the prompts end with that belongs to the responses, such as <think>.

    on_all_processes: they call it together, each with its own texts, and if it fails on one, it fails on all.
    """
    # [V22] Once for the whole batch. None and NaN: the row takes no part; other numbers must be finite.
    what = f"{flag(field)} {name}"
    if name in VERIFIERS:
        verifier = VERIFIERS[name]

        def function(prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
            return [verifier(response, answer) for response, answer in zip(responses, answers, strict=True)]
    elif ":" not in name:
        raise InputError(f"{what}: unknown; there are {', '.join(VERIFIERS)} and package.module:name")
    else:
        with contextlib.chdir("."):  # it may change the current folder, where the run will begin
            function = import_function(name, field)

    def score(prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
        # [V21] A tag that the prompt's template has opened is put back.
        responses = [response_prefix + response for response in responses]
        if name in VERIFIERS:
            return function(prompts, responses, answers)
        scores, problem = score_texts(function, what, prompts, responses, answers, none=math.nan)
        if on_all_processes:
            processes.fail_together(problem)
        elif problem:
            raise InputError(problem)
        return scores

    with contextlib.chdir("."):
        score(["A prompt."] * 2, ["A response.", r"Another one: \boxed{5}"], ["4", "5"])
    return score


def overlong_punishment(lengths: torch.Tensor, response_length: int, buffer: int, factor: float) -> torch.Tensor:
    """What a response near its greatest length loses: 0 to -factor, to be added to its score. (batch,), float64.

    lengths: (batch,) tokens, the stop id included. Nothing up to response_length - buffer tokens, then more and more.
    """
    # [V26] A line from 0 to -factor over the last `buffer` tokens.   reward_manager/dapo.py#L116-L127
    return factor * ((response_length - buffer - lengths.double()) / buffer).clamp(max=0)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The probability that at least one of k of a prompt's samples is right, if so many of them are."""
    # [V98] Drawn without replacement: at k = samples it is 0 or 1.
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)
