"""What test_hub.py starts as a process of its own: load whatever the presets load from the hub, and upload.

    HF_ENDPOINT=<address> HF_HOME=<folder> python hub_client.py <folder of a model to upload, or empty>

Prints a JSON object: of each thing, under its name, what was read, or the InputError that it ended in. Beside it, the
warnings. Any other failure ends it.
"""

import contextlib
import io
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmark.interoperability import hub_check
from ppo_rlhf import train_both, train_policy
from ppo_rlhf.lib import errors, label_files, pretrained, text_sources
from ppo_rlhf.lib.tracking import upload_model
from ppo_rlhf.rlvr import problems
from ppo_rlhf.tldr import all as tldr_all, posts

CHAPTER_1 = ("sentiment", "descriptiveness", "cnndm", "tldr")


def labels(name: str) -> Any:
    preset = train_both.PRESETS[name]
    read = label_files.read_labels(
        preset.reward.label_dataset, preset.task, pretrained.load_tokenizer(preset.base_model)
    )
    return [list(read.queries.shape), list(read.samples.shape), read.targets.tolist(), read.queries[0, :3].tolist()]


def queries(name: str) -> Any:
    preset = train_both.PRESETS[name]
    tokenizer = pretrained.load_tokenizer(preset.base_model)
    tokens = train_policy.QueryStream(preset.task, tokenizer).next_batch(3, len(tokenizer))
    return sorted(posts.to_texts(tokenizer, tokens, len(tokenizer)))


def posts_of(split: str) -> Any:
    preset = tldr_all.PRESETS["tldr"]
    tokenizer = pretrained.load_tokenizer(preset.base_model)
    read = posts.read_posts(preset.task, tokenizer, split)
    return [
        posts.to_texts(tokenizer, read.queries, len(tokenizer)),
        posts.to_texts(tokenizer, read.references, len(tokenizer)),
    ]


def comparisons(split: str, articles: bool = False) -> Any:
    preset = tldr_all.PRESETS["tldr"]
    tokenizer = pretrained.load_tokenizer(preset.base_model)
    read = posts.read_comparisons(preset.task, tokenizer, split, articles=articles)
    columns = (
        posts.to_texts(tokenizer, tokens, len(tokenizer)) for tokens in (read.queries, read.chosen, read.rejected)
    )
    return [*columns, read.groups]


def problems_of(split: str) -> Any:
    read = problems.read_problems(problems.TaskArgs(prompt_format="plain"), pretrained.load_tokenizer("gpt2"), split)
    return [read.texts, read.answers]


def logits(name: str) -> Any:
    model = train_policy.load_pretrained(name, torch.float32).eval()
    with torch.no_grad():
        return model(torch.arange(5).unsqueeze(0)).logits[0, -1, :4].tolist()


def upload(folder: str) -> Any:
    for entity in ("", "company", "company"):  # the last one is there already
        upload_model(Path(folder), entity, "train_policy__tales__1__1700000000")


LOADS: dict[str, Callable[[], Any]] = {
    **{f"labels of {name}": lambda name=name: labels(name) for name in CHAPTER_1},
    **{f"queries of {name}": lambda name=name: queries(name) for name in CHAPTER_1},
    **{
        f"{name}, {split}": lambda name=name, split=split: list(text_sources.load_texts(name, split))
        for name in text_sources.HUB_TEXTS
        for split in ("train", "test")
    },
    **{f"posts, {split}": lambda split=split: posts_of(split) for split in ("train", "validation", "test")},
    **{f"comparisons, {split}": lambda split=split: comparisons(split) for split in ("train", "validation")},
    "comparisons, articles": lambda: comparisons("validation", articles=True),
    **{f"problems, {split}": lambda split=split: problems_of(split) for split in ("train", "test")},
    **{name: lambda name=name: logits(name) for name in ("gpt2", "EleutherAI/pythia-1b-deduped")},
    "pickle": lambda: logits("somebody/pickle"),
    "pickle's safe revision": lambda: (
        [len(pretrained.load_tokenizer("somebody/pickle@refs/pr/2")), *logits("somebody/pickle@refs/pr/2")]
    ),
    "no such revision": lambda: logits("gpt2@v7"),
    "uploaded": lambda: logits("somebody/train_policy__tales__1__1700000000"),
    "uploaded to company": lambda: logits("company/train_policy__tales__1__1700000000"),
}


def hub_check_says() -> list[str]:
    """Its lines, and its exit status."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            hub_check.main(hub_check.Args())
        except SystemExit as end:
            print(end.code)
    return said.getvalue().splitlines()


def main(folder: str) -> None:
    answers: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps = {"upload": lambda: upload(folder), **LOADS, "hub check": hub_check_says} if folder else LOADS
        for name, load in steps.items():
            try:
                answers[name] = load()
            except errors.InputError as error:
                answers[name] = f"error: {error}"
    answers["warnings"] = [str(warning.message) for warning in caught]
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
