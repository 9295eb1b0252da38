"""Rewards that a rule computes: verifiers, which check a response against the known answer, and overlong punishment.

A verifier is a function of this module, or one of the user's.

Files and lines next to marks of chapter 3, such as V01, are those of verl-project/verl at commit b178a3c.
"""

import functools
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import torch

from ppo_rlhf.rlvr.confined_worker import Worker
from ppo_rlhf.tldr import reward_functions
from ppo_rlhf.tldr.shares import widened
from ppo_rlhf.train_policy import InputError, input_errors

# [V18] A verifier reads the response alone, never the prompt.   reward_manager/naive.py#L74-L91
Verifier = Callable[[str, str], float]  # response, answer -> value


def conclusion(response: str) -> str:
    """What follows the last </think>, where the answer is looked for; nothing if a thought hasn't ended."""
    # [V18] What a model tries out in its thoughts is no answer.
    said = response.rpartition("</think>")[2]
    return "" if "<think>" in said else said


# ---- GSM8K: the number after four hashes -----------------------------------------------------------------------

# [V16] A sign, dollars, digits with commas, decimals; a full stop at the end isn't part of the number. It may begin
#       with its point, as .5 does, unless the point ends something else, as in `so...5` or `no.5`.
#       reward_score/gsm8k.py#L20-L70
DASHES = "\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d"  # that people and models write for a minus
NUMBER = rf"[-+{DASHES}]?\$?(?:[0-9]+(?:,[0-9]+)*(?:\.[0-9]+)?|(?<![\w.)\]}}])\.[0-9]+)"
# What makes another thing of a number before it: 3/4, 12:30, 2024-05-01, 10-15, 72e3, 1.234.567, 1 234.
GOES_ON = rf"(?![0-9]| ?[/:^] ?[0-9]|[-{DASHES}.][0-9]|[eE][-+]?[0-9]|[ \u00a0\u202f][0-9])"
BEFORE = re.compile(r"[0-9](?: ?[/:^] ?|[eE][-+]?)?\Z")  # a number may end a longer one, as the 4 does in 3/4
IN_GROUPS = r"[0-9]+|[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}"  # the whole part: 1234567, 1,234,567, 12,34,567


def plain_number(text: str) -> str | None:
    """A number in plain digits, -1234.50 for `\u2212$1,234.50`; None if the text is another thing, such as 1,2."""
    digits = text.translate({ord("$"): None} | dict.fromkeys(map(ord, DASHES), "-"))
    whole = digits.lstrip("+-").partition(".")[0]
    return digits.replace(",", "") if not whole or re.fullmatch(IN_GROUPS, whole) else None


def last_number(pattern: str, text: str) -> str | None:
    """The last number that a pattern finds in a text, in plain digits; None if there is none, or it goes on."""
    text = conclusion(text)
    found = [*re.finditer(pattern, text)]
    if not found or not re.compile(GOES_ON).match(text, found[-1].end(1)):
        return None
    if BEFORE.search(text[max(0, found[-1].start(1) - 9) : found[-1].start(1)]):
        return None
    return plain_number(found[-1][1])


def hashed_number(text: str) -> str | None:
    """The last number after four hashes, which is how GSM8K's solutions end; None if there is none."""
    # [V16] The last one counts, because a response may correct itself. It may be bold, or its dollar escaped.
    return last_number(rf"#### *(?:\*\*)?\\?(?:\$ )?({NUMBER})", text)


def hashed_answer(solution: str) -> str:
    """The number after the last hashes of a solution, or all of it; empty if that is no number, or more than one."""
    said = solution.rpartition("####")[2].strip()
    return (plain_number(said) or "") if re.fullmatch(NUMBER, said) else ""


def equal_numbers(number: str | None, answer: str) -> float:
    """1 if both are the same number, such as 72, 72.00 and 072; 0 if they differ or one of them is no number."""
    answer = answer.strip()
    gold = plain_number(answer) if re.fullmatch(NUMBER, answer) else None
    return float(number is not None and gold is not None and Decimal(number) == Decimal(gold))


def gsm8k_strict(response: str, answer: str) -> float:
    """1 if the last number after `####` is the answer, else 0."""
    return equal_numbers(hashed_number(response), answer)


def gsm8k_flexible(response: str, answer: str) -> float:
    """1 if the last number in the response is the answer, else 0."""
    # [V17] The text before and after it doesn't matter.   reward_score/gsm8k.py#L20-L70
    return equal_numbers(last_number(rf"({NUMBER})", response), answer)


def gsm8k_format(response: str, answer: str) -> float:
    """1 if there is a number after `####`, whether or not it is the answer."""
    return float(hashed_number(response) is not None)


# ---- Boxed answers ---------------------------------------------------------------------------------------------


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{...} or \\fbox{...} whose braces are balanced; None if there is no box.

    Of boxes next to each other, the last one counts too. The command may have two backslashes, as JSON writes them.
    Only where no box has braces, the word after the last \\boxed is its content, without the punctuation at its end.
    """
    text, opened, boxes = conclusion(text), [], {}
    # \{ and \} are no braces. A run of backslashes is read once, from its first one.
    for mark in re.finditer(r"((?<!\\)\\+(?:boxed|fbox)\s*{)|\\.|([{}])", text, re.DOTALL):
        if mark[1] or mark[2] == "{":
            opened.append(mark)
        elif mark[2] and opened and (begin := opened.pop())[1]:
            boxes[begin.start()] = text[begin.end() : mark.start()]
    if boxes:
        return boxes[max(boxes)].strip()
    words = re.findall(r"\\boxed(?![A-Za-z])\s*([^\s${}]+(?:{[^{}]*}[^\s${}]*)*)", text)
    return words[-1].rstrip(".,;:!?") if words else None


MATHEMATICS = Worker("ppo_rlhf.rlvr.math_verify_calls:equal", computing=5, seconds=60)


@functools.lru_cache(maxsize=2**16)
def same_mathematics(gold: str, content: str) -> bool:
    """Whether math-verify finds the contents of two boxes equal. What takes it too long isn't."""
    with input_errors("boxed answers need math-verify: pip install -e '.[math]'"):
        return MATHEMATICS.ask(gold, content)[0] is True


def words(text: str) -> list[str]:
    """The words of a list in lower case, without spaces; empty if one isn't a word such as `forty two` or `CO2`."""
    parts = ["".join(part.split()).casefold() for part in text.split(",")]
    return sorted(parts) if all(part.isalnum() and not part[0].isdigit() for part in parts) else []


# What is compared digit by digit, because math-verify would calculate with its parts.
# Anywhere in a text: 5 7 4, 1.2.0, 2024-05-01, 5/1/2024, and a literal that REWRITTEN doesn't know, such as 0b12.
# The first number of `\log_2 8`, `2^3 5` and `\frac 1 2` begins no row.
ROWS_AND_DATES = re.compile(
    r"(?<![A-Za-z_^])(?<![A-Za-z_^] )[0-9] [0-9]"
    r"|[0-9]\.[0-9]+\.[0-9]|[0-9]{4}([-/])[0-9]{1,2}\1[0-9]|[0-9]([-/])[0-9]{1,2}\2[0-9]{4}"
    r"|(?<![\w.])0[xXoObB][0-9a-fA-F]"
)
# An answer as a whole: 2:30, 2:30 pm, 5 am, 3-1, 5/1/24
AM_OR_PM = r"\s*(?i:\\(?:text|mathrm)\s*{\s*[ap]\.?m\.?\s*}|[ap]\.?m\.?)"
TIMES = re.compile(rf"[0-9]+(?:(?:\s*[:-]\s*[0-9]+)+(?:{AM_OR_PM})?|{AM_OR_PM}|(?:/[0-9]+){{2,}})")
BASES = re.compile(r"[0-9]\s*_")  # 110_2

LONGEST = 10_000  # characters of a box that is compared as mathematics

REWRITTEN = {  # what math-verify doesn't read, or reads as something else
    rf"[{DASHES}]": "-",
    r"\A(?:\\[,;:!])+|(?<![.\s,;:!])(?:\\[,;:!]|[.\s])+\Z": "",  # thin spaces around, and a full stop
    r"\A\\(?:text|textbf|mathrm|mathbf|mbox)\s*{([^{}]*)}\Z": r"\1",
    r"\\(?:text|mathrm|mbox)\s*{\s*(\\?\$)\s*}": r"\1",
    r"{:}": ":",
    "\xb0": r"^\\circ",  # the sign of degrees
    r"\b0(?:[xX][0-9a-fA-F]{1,64}|[oO][0-7]{1,64}|[bB][01]{1,64})\b": lambda found: str(int(found[0], 0)),
    r"(?<=[0-9])_\s*(?:{\s*10\s*}|10(?![0-9]))": "",  # the base of ordinary numbers
    r"(?<=[0-9])_\s*{\s*([0-9]+)\s*}": r"_\1",
    r"(?<=[0-9])[eE]\+?(-?[0-9]{1,3})\Z": r"\\cdot10^{\1}",
    r"(?<=[0-9])i\b": " i",
    "([\u2070\xb9\xb2\xb3\u2074-\u2079]+)": r"^{\1}",  # raised digits
    "([\xbc-\xbe\u2150-\u215e])": r"{\1}",  # fractions in one character
}


def plain_mathematics(text: str) -> str:
    """A text of mathematics in the signs that math-verify reads: 300000 for `3e5`, 1234 for `1\\,234`."""
    for pattern, new in REWRITTEN.items():
        text = re.sub(pattern, new, text)
    marks = r"\{,}|,\\!\s*|\\,"
    if not re.search(r"[(\[]|\\{", text):  # (1,234) is a pair
        marks += r"|[,\s]"
    thousands = rf"(?<![0-9.])[1-9][0-9]{{0,2}}(?:(?:{marks})[0-9]{{3}})+(?![0-9])"
    text = re.sub(thousands, lambda found: re.sub(r"\D", "", found[0]), text)
    text = re.sub(r"(?<=[0-9])(?:\s|~|\\[ ,;:]|\\q?quad)+(?=[0-9])", " ", text)
    return unicodedata.normalize("NFKC", text).replace("\u2044", "/")


def boxed(response: str, answer: str) -> float:
    """1 if the content of the last \\boxed{...} equals the answer, else 0. Raises an InputError without math-verify.

    answer: mathematics or words, with a box around it or without.
    """
    gold, content = last_boxed(answer), last_boxed(response)
    if content is None or len(content) > LONGEST:
        return 0.0
    gold = plain_mathematics(answer if gold is None else gold)
    content = plain_mathematics(content)
    if not content:
        return 0.0
    # Spaces count only between digits.
    if re.findall(r"[0-9]+|\S", content) == re.findall(r"[0-9]+|\S", gold):
        return 1.0
    # [V19] Words are compared letter by letter. As mathematics they would be products, and `on` would equal `no`.
    if words(content) and words(gold):
        return float(words(content) == words(gold))
    # [V19] 6 isn't `1 2 3`, 2018 isn't 2024-05-01, and 1:15 isn't 2:30, although math-verify calculates so.
    if ROWS_AND_DATES.search(content) or ROWS_AND_DATES.search(gold):
        return 0.0
    # [V19] 0.4 isn't 12:30, and 11 isn't 11_2. But 7:32 may be a ratio, so 7/32, with the same digits, may equal it.
    other_digits = re.sub("[^0-9]", "", content) != re.sub("[^0-9]", "", gold)
    if (TIMES.fullmatch(gold) or BASES.search(gold)) and (TIMES.fullmatch(content) or other_digits):
        return 0.0
    # [V19] An answer that isn't mathematics, or takes too long, is wrong.   reward_score/math_verify.py#L20-L40
    return float(same_mathematics(gold, content))


# ---- The text itself -------------------------------------------------------------------------------------------


def answer_text(response: str) -> str:
    """The answer of a response: its last answer block, or else all after its thoughts, without space around."""
    response = conclusion(response)
    found = re.findall(r"<answer>((?:(?!</?answer>).)*)</answer>", response, re.DOTALL)
    return (found[-1] if found else response).strip()


def exact(response: str, answer: str) -> float:
    """1 if the last <answer>...</answer>, or else all after the thoughts, is the answer letter by letter; else 0."""
    return float(answer_text(response) == answer.strip() != "")


# ---- Format ----------------------------------------------------------------------------------------------------

BLOCK = r"<{0}>(?:(?!</?(?:think|answer)>).)*</{0}>"


def think_answer(response: str, answer: str) -> float:
    """1 if the response is a think block and an answer block, with nothing but space between them; else 0."""
    # [V21] The pattern must match the whole response, but for space around it.
    form = BLOCK.format("think") + r"\s*" + BLOCK.format("answer")
    return float(re.fullmatch(form, response.strip(), re.DOTALL) is not None)


# ---- Verifiers by name -----------------------------------------------------------------------------------------


class Gold(str):
    """The answer of a problem of reasoning-gym, and how the problem's own scorer judges another."""

    score: Callable[[str], float]  # from a text to 0 to 1


def reasoning_gym(response: str, answer: str) -> float:
    """The score that the problem's own generator gives the answer of a response, 0 to 1; of other problems, as exact.

    answer: a Gold. Less than 1 is a share for what is nearly correct, or only has the form. A response that the
    generator cannot read gets 0.
    """
    if not isinstance(answer, Gold) or not answer_text(response):
        return exact(response, answer)
    return answer.score(answer_text(response))


WHOLE_TEXTS = ("exact", "reasoning_gym")  # verifiers that take the whole response for the answer


def is_right(values: torch.Tensor, verifier: str) -> torch.Tensor:
    """Which of a verifier's values mean a correct response: those above 0, or 1 where less is a share of a point."""
    return values >= 1 if verifier == "reasoning_gym" else values > 0


Columns = Mapping[str, Any]  # of a problem, and what `problems.with_tokens` says of a response to it

VERIFIERS: dict[str, Verifier] = {
    function.__name__: function
    for function in (
        gsm8k_strict,
        gsm8k_flexible,
        gsm8k_format,
        boxed,
        exact,
        reasoning_gym,
        think_answer,
    )
}

# The shortest response that gives an answer. Other verifiers check only the form, or aren't ours.
ANSWER_FORMS = {
    "gsm8k_strict": "#### {}",
    "gsm8k_flexible": "{}",
    "boxed": r"\boxed{{{}}}",
    "exact": "{}",
}


def can_be_right(verifier: str, answer: str) -> bool:
    """Whether any response can be correct: one that gives only the answer must score 1."""
    form = ANSWER_FORMS.get(verifier)
    return form is None or VERIFIERS[verifier](form.format(answer), answer) == 1


class TokenRewards(float):
    """The sum of the rewards that a verifier gives to the tokens of a response, and the reward of each."""

    of_tokens: list[float]


def value_of(value: Any, row: Columns, why_not: str = "") -> float:
    """What a user's function returned for a response, as a number: a list as TokenRewards.

    A list has one reward for each token, or pairs (index of a token, reward), or nothing. row: its completion_mask
    says which tokens of the response the policy wrote. why_not: why there must be no list. Raises an InputError.
    """
    value = value.tolist() if hasattr(value, "tolist") else value  # an array
    if not isinstance(value, list | tuple):
        return float(value)
    if why_not:
        raise InputError(f"rewards of single tokens, but {why_not}")
    own = row["completion_mask"]
    of_pairs = all(isinstance(one, list | tuple) for one in value)
    if not of_pairs and len(value) != len(own):
        raise InputError(f"{len(value)} rewards for a response of {len(own)} tokens; give one for each, or pairs")
    of_tokens = [0.0] * len(own)
    for index, reward in value if of_pairs else enumerate(value):
        if not 0 <= index < len(own):
            raise InputError(f"a reward for token {index} of a response of {len(own)} tokens")
        if not abs(reward) <= reward_functions.LARGEST_SCORE:
            raise InputError(f"the reward {reward} for token {index}")
        if reward and not own[index]:
            raise InputError(f"a reward for token {index}, which the policy did not write")
        of_tokens[index] += reward
    total = TokenRewards(math.fsum(of_tokens))
    total.of_tokens = of_tokens
    return total


def token_scores_of(values: Sequence[float], width: int) -> torch.Tensor:
    """Of verifiers' values, what they give to single tokens: (rows, width), float64; 0 where they don't."""
    rewards = torch.zeros(len(values), width, dtype=torch.float64)
    for row, value in zip(rewards, values, strict=True):
        if isinstance(value, TokenRewards):
            row[: len(value.of_tokens)] = torch.tensor(value.of_tokens)
    return rewards


# Two responses on which a function is tried, with prompts and answers of two problems, and their columns or none
TRIED = ("A response.", r"Another one: \boxed{5}")
MADE_UP = (["A prompt."] * 2, ["4", "5"], ())


def load_verifier(
    name: str,
    field: str,
    start_of: Callable[[str], str] = lambda prompt: "",
    *,
    trial: tuple[list[str], list[str], Sequence[Columns]] | None = MADE_UP,
    why_not_tokens: str = "",
    on_all_processes: bool = False,
) -> Callable[..., list[float]]:
    """One of VERIFIERS, or the user's function `package.module:name` of texts, applied to whole batches.

    It takes prompts, responses, answers and, if they are known, the columns of the problems, for which a user's
    function may ask. It returns a number for each response, or NaN if a response cannot be scored. A user's function
    returns None or NaN for such a response. It may also return a list, the rewards of its tokens (see value_of). Any
    mistake of it ends in an InputError.
    start_of: gives the end of a prompt that belongs to the response, such as <think>. Words without a tag, as in `The
    answer is`, are no part of an answer that is a whole response.

    trial: a function that cannot be called with these is refused at once; None: it isn't tried. why_not_tokens: why
    it must not return rewards of tokens. on_all_processes: all processes call it together, each with its own texts.
    If it fails on one, it fails on all.
    """
    # It is called once for the whole batch. A row with None or NaN is left out; other numbers must be finite.
    what = f"--{field} {name}"
    ours = VERIFIERS.get(name)
    function = None if ours else import_verifier(name, field)

    def score(
        prompts: list[str], responses: list[str], answers: list[str], rows: Sequence[Columns] = ()
    ) -> list[float]:
        # [V21] A tag that the prompt opened is part of the response.
        starts = [start if name not in WHOLE_TEXTS or "<" in start else "" for start in map(start_of, prompts)]
        responses = [start + response for start, response in zip(starts, responses, strict=True)]
        if ours:
            return [ours(response, answer) for response, answer in zip(responses, answers, strict=True)]
        return reward_functions.scores_of(
            function,
            what,
            prompts,
            responses,
            answers,
            rows=rows,
            none=math.nan,
            number_of=functools.partial(value_of, why_not=why_not_tokens),
            on_all_processes=on_all_processes,
        )

    if trial:
        prompts, answers, rows = trial
        score(prompts, [*TRIED], answers, rows)
    score.verifier = name
    return score


def import_verifier(name: str, field: str) -> Callable:
    """The user's function `package.module:name`."""
    if ":" not in name:
        raise InputError(f"--{field} {name}: unknown; there are {', '.join(VERIFIERS)} and package.module:name")
    return reward_functions.import_function(name, field)


def keeps_nothing(*names: str) -> bool:
    """Whether all functions with these names are this package's own, which keep no state between calls."""
    return all(name.startswith("ppo_rlhf.") for name in names if name and name not in VERIFIERS)


# ---- Lengths and pass@k ----------------------------------------------------------------------------------------


def overlong_punishment(lengths: torch.Tensor, response_length: int, buffer: int, factor: float) -> torch.Tensor:
    """The punishment of responses near the greatest length, 0 to -factor, to add to their scores: (batch,), float64.

    lengths: (batch,) tokens, including the stop id. Up to response_length - buffer tokens, there is no punishment.
    """
    # [V26] It falls linearly from 0 to -factor over the last `buffer` tokens.   reward_manager/dapo.py#L116-L127
    return factor * ((response_length - buffer - widened(lengths)) / buffer).clamp(-1, 0)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The probability that at least one of k samples of a prompt is correct, where `correct` of `samples` are."""
    # [V98] The k are drawn without replacement: at k = samples the probability is 0 or 1.
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)
