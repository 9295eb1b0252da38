"""Traces of updates that never were, written as the scripts write them; and edited."""

import json
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ppo_rlhf.train_policy import Run

Tensors = dict[str, torch.Tensor]


class Words:
    """A tokenizer whose tokens are these texts."""

    def __init__(self, texts: list[str]):
        self.texts = texts

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.texts[token] for token in tokens)

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(len(self.texts))}


def write_trace(
    folder: Path,
    update: int,
    *,
    queries: list[str],
    responses: list[list[str]],
    tokens: Tensors,
    episodes: Tensors,
    epochs: Tensors,
    **texts: list[str],
) -> None:
    """What a script leaves of an update. queries: texts of the first episodes; responses: those of their tokens."""
    words = Words([*queries, *chain(*responses)])
    ids = torch.zeros(next(iter(tokens.values())).shape, dtype=torch.long)
    ids[: len(responses)] = torch.arange(len(queries), len(words.texts)).view(len(responses), -1)
    run = SimpleNamespace(is_main=True, args=SimpleNamespace(trace_episodes=len(responses)), folder=folder)
    contexts = torch.arange(len(queries)).unsqueeze(1)
    Run.write_trace(
        run, update, words, contexts, tokens={"ids": ids} | tokens, episodes=episodes, epochs=epochs, **texts
    )


def tensors_of(path: Path) -> Tensors:
    """What a trace holds, under the names of the file."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def change(path: Path, **tensors: torch.Tensor) -> None:
    """Give a trace other numbers, under the names of the file."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file(tensors_of(path) | tensors, path, metadata)


def write_meta(folder: Path, script: str, **args) -> None:
    (folder / "meta.json").write_text(json.dumps({"script": script, "args": args, "wall_time": 60.0}))
