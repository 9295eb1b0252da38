"""Preferences as they are published: rows with a chosen and a rejected answer, as texts or as messages of a chat.

    {"prompt": "The sky is", "chosen": " blue.", "rejected": " up."}
    {"chosen": "The sky is blue.", "rejected": "The sky is up."}                     the prompt is implicit
    {"prompt": messages, "chosen": messages, "rejected": messages}
    {"prompt": a text, or nothing, "chosen": messages, "rejected": messages}         both begin with the prompt

A message is {"role": "user", "content": "Why?"}; other keys and columns don't count. Texts are read as they are, so
an answer begins with its space. An implicit prompt is the common beginning of the two answers:

    texts with turns, as HH-RLHF has them    up to and including the last "\\n\\nAssistant:" that both have
    other texts                              up to the last white space that both have, which begins the answers
    messages                                 those that both have, without an assistant's at their end

Where no chat template is in use, messages become texts in the form of HH-RLHF:
"\\n\\nHuman: Why?\\n\\nAssistant:" is a prompt, and " So." an answer to it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from ppo_rlhf.lib.errors import InputError
from ppo_rlhf.tldr import data_files
from ppo_rlhf.tldr.chat_templates import Messages

FORMS = "docs/running.md lists the forms of rows, under Preferences"
SPEAKERS = {"user": "Human", "assistant": "Assistant"}
ANSWER = "\n\nAssistant:"  # where the answer begins


@dataclass(frozen=True, kw_only=True)
class Preference:
    """A prompt with two answers: three texts, or three lists of messages."""

    prompt: str | Messages
    chosen: str | Messages
    rejected: str | Messages

    def texts(self) -> tuple[str, str, str]:
        """Prompt, chosen and rejected answer as plain texts."""
        if isinstance(self.prompt, str):
            return self.prompt, self.chosen, self.rejected
        answers = (plain_text(side).removeprefix(ANSWER) for side in (self.chosen, self.rejected))
        return as_prompt(self.prompt), *answers


def is_preference(row: Any) -> bool:
    return isinstance(row, Mapping) and "chosen" in row and "rejected" in row


def plain_text(messages: Messages) -> str:
    """Messages in the form of HH-RLHF."""
    return "".join(f"\n\n{SPEAKERS.get(one['role'], one['role'].capitalize())}: {one['content']}" for one in messages)


def as_prompt(messages: Messages) -> str:
    """Messages as the text that an answer continues."""
    return plain_text(messages) + ANSWER


def read_preference(row: Mapping[str, Any], what: str, column: str = "prompt") -> Preference:
    """The preference of a row. what: the row, for messages; column: the key of its prompt, where it has one."""
    if column != "prompt":  # a name that somebody typed is there, or it is a slip
        data_files.find(row, (column,), what)
    values = {"chosen": row["chosen"], "rejected": row["rejected"]}
    if (prompt := data_files.value_at(row, column)) is not None:
        values[column] = prompt
    if all(isinstance(value, str) for value in values.values()):
        data_files.check_row(values, values, what)
        prompt = common_text(values["chosen"], values["rejected"]) if prompt is None else ""
        chosen, rejected = (values[side].removeprefix(prompt) for side in ("chosen", "rejected"))
        return Preference(prompt=values.get(column, prompt), chosen=chosen, rejected=rejected)
    turns = {
        key: data_files.as_messages(value, "user" if key == column else "assistant", f"{what}, {key!r},")
        for key, value in values.items()
    }
    common = common_messages(turns["chosen"], turns["rejected"])
    sides = {side: turns[side][len(common) :] for side in ("chosen", "rejected")}
    # Answers that don't begin with the assistant's turn repeat the prompt.
    if (before := turns.get(column)) and (turns["chosen"][0]["role"] == "assistant" or before[-1] not in common):
        common = [*before, *common]
    if not common or common[-1]["role"] == "assistant":
        raise InputError(f"{what} has no prompt: no message of the user's that both answers follow; {FORMS}")
    for side, messages in sides.items():
        if not messages or messages[0]["role"] != "assistant":
            raise InputError(f"{what}, {side!r}, has no message of the assistant's after the prompt; {FORMS}")
    return Preference(prompt=common, **sides)


def common_text(chosen: str, rejected: str) -> str:
    """The implicit prompt of two texts."""
    common = "".join(common_beginning(chosen, rejected))
    if ANSWER in common:
        return common[: common.rindex(ANSWER) + len(ANSWER)]
    if not common[-1:].isspace():  # Two words may begin with the same letters, so the last one may not be whole.
        common = common.removesuffix("".join(common.split()[-1:]))
    return common.rstrip()


def common_messages(chosen: Messages, rejected: Messages) -> Messages:
    """The implicit prompt of two lists of messages; there may be none."""
    common = common_beginning(chosen, rejected)
    while common and common[-1]["role"] == "assistant":
        common.pop()
    return common


def common_beginning(one: Sequence[Any], other: Sequence[Any]) -> list[Any]:
    """The letters or messages with which both begin."""
    return [mine for mine, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]
