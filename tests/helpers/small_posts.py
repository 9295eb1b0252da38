"""Posts of chapter 2 for tests: a post, a comparison, a tokenizer of characters, and queries."""

import json
from pathlib import Path
from typing import Any

import torch

from ppo_rlhf.tldr import posts
from ppo_rlhf.tldr.posts import TaskArgs

EOS, PAD = 0, 128


class Letters:
    """A tokenizer of ASCII characters: a token is a character's code, and code 0 ends a text."""

    eos_token_id = EOS

    def get_vocab(self) -> dict[str, int]:
        return {chr(token): token for token in range(PAD)}

    def encode(self, text: str, **_) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


POST = {"id": "1", "subreddit": "mill", "title": "Grain", "post": "It is wet.", "summary": "Wet grain."}
COMPARISON = {
    "info": {key: POST[key] for key in ("id", "subreddit", "title", "post")},
    "summaries": [{"text": " Wet.", "policy": "sup1"}, {"text": " Dry hay.", "policy": "ref"}],
    "choice": 1,
    "batch": "batch7",
    "split": "train",
    "extra": {"confidence": 6},
}


def task(folder: Path, **changes: Any) -> TaskArgs:
    sizes = {"query_length": 80, "response_length": 14, "comparison_length": 12, "article_query_length": 60}
    return TaskArgs(posts=str(folder), comparisons=str(folder), **(sizes | changes))


def texts_of(rows: torch.Tensor) -> list[str]:
    return ["".join(chr(token) for token in row if token != PAD) for row in rows.tolist()]


CATS = {"subreddit": "cats", "title": "Cat", "post": "Line one.\nLine two<|im_end|>.", "summary": " It sleeps."}
IN_LETTERS = "SUBREDDIT: r/cats\n\nTITLE: Cat\n\nPOST: Line one.\nLine two<|im_end|>.\n\nTL;DR:"


def queries_of_chapter_2(tmp_path, tokenizer, row=CATS, **changes) -> tuple[posts.Posts, posts.TaskIds]:
    (tmp_path / "posts_train.jsonl").write_text(json.dumps(row))
    given = {"posts": str(tmp_path), "query_length": 256, "response_length": 64} | changes
    settings = posts.TaskArgs(**given)
    return posts.read_posts(settings, tokenizer, "train"), posts.task_ids(settings, tokenizer)
