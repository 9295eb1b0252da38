"""Small worlds with a known truth, and a real language model with real people's ratings.

A world is a plain folder, read like any local files. Its name may be used in place of a path: `--base_model tales` is
the language model in data/tales, `--task.posts posts` are the posts in data/posts. What loads a model or reads data
finds the folder by `find` of chapter 1's scripts. So a run's arguments stay as they were typed, and its folder can be
moved. Nothing in this folder imports anything of ours from outside it.

    tales         stories and choices among their continuations, for chapter 1; tales.py says what is chosen
    posts         posts, summaries and comparisons, for chapter 2; posts.py says which are preferred
    reviews       sentences from film reviews that people have rated, for chapters 1 and 2: reviews.py
    sums          word problems of one to four steps, for chapter 3, as GSM8K has them. The language model has learned
                  from pupils who err, and most of whom are in a hurry and stop after two steps
    sums-tools    the same problems; the pupils err more often, but sometimes call a calculator: `[7+5]`
    arithmetic    sums and differences of two numbers of at most 19, for smollm.py
"""

import os
from pathlib import Path

DATA = Path(__file__).with_name("data")  # benchmark/worlds.py has written it


def cache_folder() -> Path:
    """The folder of what reviews.py fetches, $PPO_RLHF_CACHE or ~/.cache/ppo_rlhf."""
    return Path(os.environ.get("PPO_RLHF_CACHE") or Path.home() / ".cache" / "ppo_rlhf")
