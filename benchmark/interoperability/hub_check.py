"""Is everything there that the presets take from the Hugging Face hub?

    python benchmark/interoperability/hub_check.py   # or make hub-check
    python benchmark/interoperability/hub_check.py --base_model gpt2-medium EleutherAI/pythia-2.8b-deduped

Looks for the files of all texts, labels, posts, comparisons, problems, tokenizers and models of the presets, and
reads the first row of each, but of archives. The big files are not downloaded, so this takes a minute or two.
The exit status is 1 if something is missing, and 2 without a network.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO

import tyro
from huggingface_hub import HfApi, HfFileSystem
from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError

from ppo_rlhf import train_both
from ppo_rlhf.lib.errors import InputError, run_script
from ppo_rlhf.lib.hub import HubFiles, hub_is_reachable
from ppo_rlhf.lib.pretrained import load_tokenizer
from ppo_rlhf.rlvr.problems import GSM8K_FILES
from ppo_rlhf.tldr import all as tldr_all
from ppo_rlhf.tldr.posts import COMPARISON_FILES, POSTS_REPOSITORY
from ppo_rlhf.train_policy import OPENAI_DATA

WORLDS = ("tales", "posts", "smollm2-135m")
TEXTS = (  # of chapter 1, as train_policy.load_texts downloads them: data set, files, splits, keys of a row
    ("rojagtap/bookcorpus", ("books_large_p1.txt", "books_large_p2.txt"), ("",), ()),
    ("ccdv/cnn_dailymail", ("cnn_stories.tgz", "dailymail_stories.tgz"), ("",), ()),
    ("abisee/cnn_dailymail", ("3.0.0/{split}-*.parquet",), ("train", "test"), ("id",)),
    (OPENAI_DATA, ("tldr/{split}-subset.json",), ("train", "valid"), ("content",)),
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


def look_at_files(files: HubFiles, split: str, keys: tuple[str, ...] = ()) -> str:
    """Size and first row of files. keys: what a row has. Raises what the hub's clients raise, and a KeyError."""
    info = HfApi().dataset_info(files.repository, revision=files.revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings}
    names = files.matching(sizes, split)
    root = f"datasets/{files.repository}@{info.sha}"
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
    tokens = len(load_tokenizer(base_model))
    name, _, revision = base_model.partition("@")
    weights = HfApi().get_safetensors_metadata(name, revision=revision or None)
    return f"{tokens:,} tokens, {sum(weights.parameter_count.values()):,} parameters"


def shown(row: Any, keys: tuple[str, ...]) -> str:
    """The beginning of a row, or of the value of its first key. Raises a KeyError if a row lacks one of the keys."""
    values = [row[key] for key in keys]
    return json.dumps(values[0] if keys else row)[:SHOWN]


def checks(args: Args) -> Iterator[tuple[str, str, Callable[[], str]]]:
    """What is looked for, where it should lie, and the function that looks."""

    def files(what: str, files: HubFiles, split: str = "", keys: tuple[str, ...] = ()) -> tuple:
        where = f"{files.repository}: {', '.join(files.names).format(split=split)}"
        return f"{what} {split}".rstrip(), where, lambda: look_at_files(files, split, keys)

    for repository, names, splits, keys in TEXTS:
        for split in splits:
            yield files("texts", HubFiles(repository=repository, names=names), split, keys)
    chapter_1, chapter_2 = (
        [preset for preset in script.PRESETS.values() if preset.base_model not in WORLDS]
        for script in (train_both, tldr_all)
    )
    for preset in chapter_1:
        labels = HubFiles(repository=OPENAI_DATA, names=(preset.reward.label_dataset,))
        yield files(f"labels {preset.preset}", labels, "", ("query", "sample0", "sample3", "best"))
    for split in ("train", "validation", "test"):
        yield f"posts {split}", POSTS_REPOSITORY, lambda split=split: look_at_posts(split)
    for split in ("train", "validation"):
        yield files("comparisons", COMPARISON_FILES, split, ("info", "summaries", "choice"))
    for split in ("train", "test"):
        yield files("gsm8k", GSM8K_FILES, split, ("question", "answer"))
    for name in dict.fromkeys([*(preset.base_model for preset in chapter_1 + chapter_2), *args.base_model]):
        yield "model", name, lambda name=name: look_at_model(name)


def main(args: Args) -> None:
    if not hub_is_reachable():
        raise InputError("the hub cannot be reached, or HF_HUB_OFFLINE is set; this needs a network")
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
