"""Is everything there that the presets take from the Hugging Face hub?

    python benchmark/interoperability/hub_check.py   # or make hub-check
    python benchmark/interoperability/hub_check.py --base_model gpt2-medium EleutherAI/pythia-2.8b-deduped

Looks for the files of all texts, labels, posts, comparisons, problems, tokenizers and models of the presets, and
reads the first row of each, but of archives. The big files are not downloaded, so this takes a minute or two.
The exit status is 1 if something is missing, and 2 without a network.
"""

import fnmatch
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any, BinaryIO

import tyro
from huggingface_hub import HfApi, HfFileSystem
from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError

from ppo_rlhf import train_both
from ppo_rlhf.tldr import all as tldr_all
from ppo_rlhf.tldr.posts import POSTS_REPOSITORY
from ppo_rlhf.train_policy import OPENAI_DATA, input_errors, load_tokenizer, run_script

WORLDS = ("tales", "posts", "smollm2-135m")
FILES = (  # as the chapters download them: what, data set, files, splits, keys of a row
    ("texts", "rojagtap/bookcorpus", ("books_large_p1.txt", "books_large_p2.txt"), ("",), ()),
    ("texts", "ccdv/cnn_dailymail", ("cnn_stories.tgz", "dailymail_stories.tgz"), ("",), ()),
    ("texts", "abisee/cnn_dailymail", ("3.0.0/{split}-*.parquet",), ("train", "test"), ("id",)),
    ("texts", OPENAI_DATA, ("tldr/{split}-subset.json",), ("train", "valid"), ("content",)),
    (
        "comparisons",
        "openai/summarize_from_feedback@refs/convert/parquet",
        ("comparisons/{split}/*.parquet",),
        ("train", "validation"),
        ("info", "summaries", "choice"),
    ),
    ("gsm8k", "openai/gsm8k", ("main/{split}-*.parquet",), ("train", "test"), ("question", "answer")),
)
SHOWN = 60  # characters of a first row
MISSING = (OSError, ValueError, KeyError, StopIteration, HfHubHTTPError, NotASafetensorsRepoError)  # what is raised


@dataclass(frozen=True)
class Args:
    base_model: tuple[str, ...] = ()
    """further models to look for: names on the hub, or name@revision"""


def first_row(file: BinaryIO, name: str, keys: tuple[str, ...]) -> Any:
    """The first entry of a file: a line, an item, or a row's columns under these keys."""
    match PurePosixPath(name).suffix:
        case ".txt":
            return file.readline().decode()
        case ".json":
            beginning = file.read(2**20).decode(errors="ignore").lstrip("[ \n")
            return json.JSONDecoder().raw_decode(beginning)[0]
        case ".parquet":
            from pyarrow.parquet import ParquetFile

            return next(ParquetFile(file).iter_batches(1, columns=list(keys))).to_pylist()[0]
        case ".tgz":
            return "an archive, not read"


def look_at_files(data_set: str, patterns: list[str], keys: tuple[str, ...]) -> str:
    """Size and first row of files. keys: what a row has. Raises what the hub's clients raise, and a KeyError."""
    repository, _, revision = data_set.partition("@")
    info = HfApi().dataset_info(repository, revision=revision or None, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings}
    names = []
    for pattern in patterns:
        if not (matches := fnmatch.filter(sizes, pattern)):
            raise FileNotFoundError(f"the hub's {repository} has no {pattern}")
        names += sorted(matches)
    root = f"datasets/{repository}@{info.sha}"
    rows = []
    for name in names:
        with HfFileSystem().open(f"{root}/{name}") as file:
            rows.append(first_row(file, name, keys))
    return f"{sum(sizes[name] for name in names) / 1e6:,.1f} MB, {shown(rows[0], keys)}"


def look_at_posts(split: str) -> str:
    from datasets import load_dataset

    row = next(iter(load_dataset(POSTS_REPOSITORY, split=split, streaming=True)))
    return shown(row, ("subreddit", "title", "post", "summary"))


def look_at_model(base_model: str) -> str:
    tokens = len(load_tokenizer(base_model, trust_remote_code=False))
    name, _, revision = base_model.partition("@")
    weights = HfApi().get_safetensors_metadata(name, revision=revision or None)
    return f"{tokens:,} tokens, {sum(weights.parameter_count.values()):,} parameters"


def shown(row: Any, keys: tuple[str, ...]) -> str:
    """The beginning of a row, or of the value of its first key. Raises a KeyError if a row lacks one of the keys."""
    values = [row[key] for key in keys]
    return json.dumps(values[0] if keys else row)[:SHOWN]


def checks(args: Args) -> Iterator[tuple[str, str, Callable[[], str]]]:
    """What is looked for, where it should lie, and the function that looks."""
    chapter_1, chapter_2 = (
        [preset for preset in script.PRESETS.values() if preset.base_model not in WORLDS]
        for script in (train_both, tldr_all)
    )
    labels = [
        (f"labels {preset.preset}", OPENAI_DATA, (preset.reward.label_dataset,), ("",), ("query", "sample0", "best"))
        for preset in chapter_1
    ]
    for what, data_set, patterns, splits, keys in [*FILES, *labels]:
        for split in splits:
            names = [pattern.format(split=split) for pattern in patterns]
            look = partial(look_at_files, data_set, names, keys)
            yield f"{what} {split}".rstrip(), f"{data_set}: {', '.join(names)}", look
    for split in ("train", "validation", "test"):
        yield f"posts {split}", POSTS_REPOSITORY, partial(look_at_posts, split)
    for name in dict.fromkeys([*(preset.base_model for preset in chapter_1 + chapter_2), *args.base_model]):
        yield "model", name, partial(look_at_model, name)


def main(args: Args) -> None:
    with input_errors("the hub cannot be asked"):
        HfApi().dataset_info(OPENAI_DATA, revision=None, files_metadata=False)
    count = missing = 0
    for what, where, look in checks(args):
        try:
            found = f"there    {what:<24} {where}: {look()}"
        except MISSING as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            found, missing = f"MISSING  {what:<24} {where}: {reason}", missing + 1
        print(found, flush=True)
        count += 1
    print(f"{missing} of {count} are missing" if missing else f"all {count} are there")
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    run_script(lambda: main(tyro.cli(Args, description=__doc__)))
