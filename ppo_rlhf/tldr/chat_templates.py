"""What is around a query of chapters 2 and 3: a chat template, or the token that a model expects first.

--task.prompt_format is one of

    plain   a query is the text itself, after the token that the tokenizer puts before every text, if it has one
    chat    a query is the user's turn in the tokenizer's chat template, and the response is the assistant's turn

Special tokens come from the template and from what was typed. In the texts of a data set their names are letters.

Files and lines next to marks are those of verl-project/verl at commit b178a3c.
"""

import functools
import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from ppo_rlhf.train_policy import Arguments, InputError, input_errors, start_of_texts

Messages = list[dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class FormatArgs(Arguments):
    """The task's arguments that say how a query becomes a prompt."""

    prompt_format: Literal["plain", "chat"] = "plain"
    """plain: a response continues the text of a query; chat: the query is the user's turn in the tokenizer's chat
    template, and the response the assistant's"""
    system_prompt: str | None = None
    """first message of a chat, which may be empty; None: left to the chat template, which may have its own"""
    template_options: str = ""
    """variables of the chat template, separated by commas, such as enable_thinking=false"""


def check(task: FormatArgs) -> None:
    """Refuse arguments of a chat where prompts are plain."""
    if task.prompt_format == "plain" and (task.system_prompt is not None or task.template_options):
        raise InputError("--task.system_prompt and --task.template_options need --task.prompt_format chat")


def options_of(task: FormatArgs) -> dict[str, Any]:
    """The template's variables. A value is JSON, such as false or 3, or else a text."""
    options: dict[str, Any] = {}
    for option in filter(None, map(str.strip, task.template_options.split(","))):
        name, equals, value = map(str.strip, option.partition("="))
        if not equals or not name.isidentifier():
            raise InputError(f"--task.template_options {option!r} is not name=value, such as enable_thinking=false")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


# ---- Plain texts, and a template around a text -----------------------------------------------------------------


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text that is data. Adds no special tokens, and treats the name of one as ordinary text."""
    text.encode()  # half a character, which no tokenizer accepts, is a ValueError
    return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)


PLACE = "\ue000query\ue000"  # in place of a query: private characters, which no template and no argument has


def affixes(task: FormatArgs, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Token ids that come before and after every query."""
    check(task)
    if task.prompt_format == "plain":
        return start_of_texts(tokenizer), []
    around = render([*system_of(task), {"role": "user", "content": PLACE}], task, tokenizer).split(PLACE)
    if len(around) != 2:
        raise InputError(
            f"the tokenizer's chat template shows a message {len(around) - 1} times; it must be once, or "
            f"--task.prompt_format plain"
        )
    return tuple(tokenizer.encode(text, add_special_tokens=False) for text in around)


def system_of(task: FormatArgs) -> Messages:
    # [V02] No system message differs from an empty one: without one, some templates insert a text.
    return [] if task.system_prompt is None else [{"role": "system", "content": task.system_prompt}]


def render(messages: Messages, task: FormatArgs, tokenizer: PreTrainedTokenizerBase) -> str:
    """Messages in the tokenizer's chat template, up to the beginning of the reply."""
    if tokenizer.chat_template is None:
        raise InputError("--task.prompt_format chat: the tokenizer has no chat template; plain prompts need none")
    options = options_of(task)
    for name in options:
        if not re.search(rf"\b{name}\b", str(tokenizer.chat_template)):
            raise InputError(f"--task.template_options {name}: the tokenizer's chat template has no such variable")
    # [V01] The messages, and the beginning of the reply.   utils/dataset/rl_dataset.py#L247
    return apply(tokenizer, messages, "the tokenizer's chat template", add_generation_prompt=True, **options)


def apply(tokenizer: PreTrainedTokenizerBase, messages: Messages, what: str, **options: Any) -> str:
    """Messages in a tokenizer's chat template. what: the template, as errors name it."""
    with input_errors(f"{what} fails on messages of {', '.join(one['role'] for one in messages)}"):
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)


# ---- Names of special tokens in texts that people wrote --------------------------------------------------------

BREAK = "\ufdd0"  # a code point that is no character; within the name of a special token it makes letters of it


@functools.lru_cache(maxsize=8)
def names_of_special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Longest first, as the tokenizer finds them."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(added | {*tokenizer.all_special_tokens}, key=len, reverse=True)


def as_letters(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A text for a template's message in which `encode` reads the names of special tokens as letters."""
    # [V114] Nobody ends a turn by writing its mark.
    names = "|".join(map(re.escape, names_of_special_tokens(tokenizer)))
    return re.sub(names, lambda found: f"{found[0][0]}{BREAK}{found[0][1:]}", text) if names else text


def encode(rendered: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a rendered template. What went through as_letters is text; all else may name special tokens."""
    rendered.encode()  # as above
    names = "|".join(re.escape(f"{name[0]}{BREAK}{name[1:]}") for name in names_of_special_tokens(tokenizer))
    parts = re.split(f"({names})", rendered) if BREAK in rendered else [rendered]
    ids = [
        encode_text(tokenizer, shown(part))
        if i % 2
        else tokenizer.encode(part, add_special_tokens=False, verbose=False)
        for i, part in enumerate(parts)
    ]
    return [token for part in ids for token in part]


def shown(rendered: str) -> str:
    """A rendered template as people read it."""
    return rendered.replace(BREAK, "")
