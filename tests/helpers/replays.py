"""What the replays of chapter 1 share: tasks, labels and queries, read once more, and a plain reward model."""

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file
from transformers import GPT2Model, PreTrainedTokenizerBase

from ppo_rlhf.train_policy import TaskArgs


def task_of(world: Path) -> TaskArgs:
    """Queries with padding between prefix and suffix, and responses some of which stop."""
    affixes = {"query_prefix": "Mara smiled.", "query_suffix": " Then"}
    return TaskArgs(
        query_dataset=f"{world}/stories.txt", query_length=24, truncate_after=4, temperature=0.8, **affixes
    )


def stories_of(world: Path) -> list[str]:
    return (world / "stories.txt").read_text().splitlines()


def trained_on(stories: list[str]) -> list[str]:
    """Without those that are held out: 49, 99, ..."""
    return [story for number, story in enumerate(stories) if number % 50 != 49]


def queries_in_order(stories: list[str], tokenizer: PreTrainedTokenizerBase, length: int = 24) -> Iterator[list[int]]:
    """The queries of a stage, from the first on, without end: whole sentences of stories, padded on the right."""
    stories = list(stories)
    random.Random(0).shuffle(stories)
    (stop,) = tokenizer.encode(".")
    for story in itertools.cycle(stories):
        tokens = tokenizer.encode(story)
        tokens = tokens[tokens.index(stop) + 1 :][:length]
        while tokens and tokens[-1] != stop:
            tokens.pop()
        if tokens:
            yield tokens + [len(tokenizer)] * (length - len(tokens))


def to_texts(tokenizer: PreTrainedTokenizerBase, tokens: torch.Tensor) -> list[str]:
    return [tokenizer.decode([token for token in row if token != len(tokenizer)]) for row in tokens.tolist()]


def mean(numbers) -> float:
    return sum(float(number) for number in numbers) / len(numbers)


class RewardModel:
    """A saved reward model. It reads one text after the other, without padding."""

    def __init__(self, folder: Path):
        self.lm_backbone = GPT2Model.from_pretrained(folder, dtype=torch.float64)
        tensors = load_file(folder / "reward_head.safetensors")
        names = {f"lm_backbone.{name}" for name in self.lm_backbone.state_dict()}
        self.lm_backbone.load_state_dict(
            {name.removeprefix("lm_backbone."): tensors[name] for name in names & tensors.keys()}, strict=False
        )
        parts = ("reward_head.weight", "reward_head.bias", "gain", "bias")
        self.weight, self.head_bias, self.gain, self.bias = (tensors[name].double() for name in parts)

    def score(self, text: list[int]) -> float:
        hidden_state = self.lm_backbone(torch.tensor([text])).last_hidden_state[0, -1]
        return (self.gain * (self.weight[0] @ hidden_state + self.head_bias) + self.bias).item()


LabelKind = Literal["best", "score", "difference"]


def labels_of(world: Path, kind: LabelKind) -> list[dict]:
    """96 labels of a kind; those that are no choices are made of the world's choices."""
    rows = json.loads((world / "labels/sentiment/offline_5k.json").read_text())
    if kind == "score":
        return [{"query": row["query"], "sample": row["sample0"], "score": 1.5 - row["best"] / 2} for row in rows]
    if kind == "difference":
        keys = ("query", "sample0", "sample1")
        return [{key: row[key] for key in keys} | {"difference": row["best"] - 1.25} for row in rows]
    return rows
