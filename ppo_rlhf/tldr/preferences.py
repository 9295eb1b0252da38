"""Preferences as they are published: rows with a chosen and a rejected answer, as texts or as messages of a chat.

`read_preference` of chapter 1's train_reward.py lists the forms of a row, and says how the beginning that both
answers have becomes their prompt. Without a chat template, messages become texts in the form of HH-RLHF here, too.
"""

from collections.abc import Mapping
from typing import Any

from ppo_rlhf import train_reward
from ppo_rlhf.tldr import data_files
from ppo_rlhf.tldr.chat_templates import Messages


def is_preference(row: Any) -> bool:
    return isinstance(row, Mapping) and "chosen" in row and "rejected" in row


def read_preference(
    row: Mapping[str, Any], column: str = "prompt", *, chat: bool = False
) -> tuple[str | Messages, str, str]:
    """Prompt, chosen and rejected answer of a row, as texts; in a chat, the prompt may be messages.

    column: the key of its prompt, where it has one. Raises a ValueError, or whatever Python says, if the row is none.
    """
    # A name that somebody typed is there, or it is a slip.
    prompt = data_files.value_at(row, column) if column == "prompt" else data_files.find(row, column)[1]
    if not chat:
        return train_reward.read_preference({**row, "prompt": prompt})
    prompt, *answers = train_reward.split_preference(prompt, row["chosen"], row["rejected"])
    if isinstance(prompt, str):
        return prompt, *answers
    if max(map(len, answers)) > 1:
        raise ValueError("an answer has several messages; in a chat it is one; or give --task.prompt_format plain")
    is_one_turn = [one["role"] for one in prompt] == ["user"]
    return prompt[0]["content"] if is_one_turn else prompt, *(answer[0]["content"] for answer in answers)
