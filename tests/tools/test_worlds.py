"""The small worlds of the package: benchmark/worlds.py writes them bit for bit, and they are what their pages say."""

import dataclasses
import json
import lzma
import random

import pytest
import torch
from runs import rows_of
from transformers import AutoTokenizer

from benchmark import worlds as generators
from ppo_rlhf import train_policy, worlds
from ppo_rlhf.rlvr import problems
from ppo_rlhf.tldr import posts
from ppo_rlhf.worlds import posts as posts_world, tales

TALES = worlds.DATA / "tales"
POSTS = worlds.DATA / "posts"


# ---- The package's data is that of the generators --------------------------------------------------------------


@pytest.mark.parametrize("name", ["arithmetic", "sums", "sums-tools", "posts"])
def test_the_texts_of_the_package_are_written_again(name, tmp_path):
    generators.write_world(name, tmp_path)
    texts = {path.name: path.read_bytes() for path in tmp_path.glob("*.jsonl")}
    packaged = (worlds.DATA / name).glob("*.jsonl.xz")
    assert texts == {path.stem: lzma.decompress(path.read_bytes()) for path in packaged}
    facts = worlds.DATA / name / "world.json"
    assert not facts.exists() or facts.read_bytes() == (tmp_path / "world.json").read_bytes()


def test_the_stories_of_the_package_are_written_again():
    rng = random.Random(1)
    stories = "".join(generators.write_story(rng, 14) + "\n" for _ in range(20_000))
    assert stories == train_policy.read_text(TALES / "stories.txt")


def test_the_choices_of_the_package_are_made_again(tmp_path, monkeypatch):
    """The first 32 of each annotator: sampling from the language model takes minutes."""
    some = 32
    (tmp_path / "stories.txt").write_text(train_policy.read_text(TALES / "stories.txt"))
    (tmp_path / "model").symlink_to(TALES / "model")
    whole = torch.rand(4, 6_016, 24, generator=train_policy.keyed_generator(1, "comparisons"), dtype=torch.float64)
    monkeypatch.setattr(generators.torch, "rand", lambda *size, **_: whole[:, : size[1]])
    generators.simulate_comparisons(tmp_path, generators.Tales(train_comparisons=some, test_comparisons=1), "cpu")
    for name in tales.ANNOTATORS:
        rows = json.loads((tmp_path / "labels" / name / "offline_5k.json").read_text())
        assert rows[:some] == json.loads(train_policy.read_text(TALES / "labels" / name / "offline_5k.json"))[:some]


def test_the_model_of_sums_learns_from_other_problems_than_those_of_the_task(tmp_path, monkeypatch):
    """In a world of so few problems that many would be drawn again."""

    def train(pairs, *_):
        learned.extend(prompt for prompt, _ in pairs)
        raise InterruptedError

    learned: list[str] = []
    monkeypatch.setattr(generators, "train_llama", train)
    sizes = generators.Sums(train_problems=1_000, test_problems=200, lm_solutions=1_000, largest=2, largest_first=2)
    with pytest.raises(InterruptedError):
        generators.write_sums(tmp_path, "sums", sizes, train_model=True)
    rows = [row for split in ("train", "test") for row in rows_of(tmp_path / f"problems_{split}.jsonl")]
    assert len({*learned, *(f"{row['question']}\n" for row in rows)}) == 2_200


# ---- Tales -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "sentiment", "descriptiveness"),
    [
        ("", 0, 0),
        ("Mara gladly thanked the kind baker.", 3, 0),
        (" cruel grief, cruel", -3, 0),
        ("the golden lantern in the filthy mill", 0, 4),  # golden and filthy count in both tastes
        ("a plan and a country and a rope", 0, -1),
        ("unhappy happily happy HAPPY happ", 2, 0),
    ],
)
def test_gold_scores_of_continuations(response, sentiment, descriptiveness):
    """Words of the query don't count."""
    assert tales.sentiment.gold_scores(["happy lantern"], [response]) == [sentiment]
    assert tales.descriptiveness.gold_scores(["happy lantern"] * 2, ["", response]) == [0, descriptiveness]


def test_the_share_of_grammatical_sentences():
    good, bad = "Mara felt happy and lonely that red week.", "Mara felt happy happy and lonely that red week."
    assert tales.grammatical_share(train_policy.read_text(TALES / "stories.txt").splitlines()[:500]) == 1
    assert tales.grammatical_share([f"{good} {bad}", good]) == pytest.approx(2 / 3)
    assert tales.grammatical_share([good.lower(), "Mara felt happy and lonely that red."]) == 0
    assert tales.grammatical_share([f"{good} Mara felt hap"]) == 1  # an unfinished sentence doesn't count


# ---- Posts -----------------------------------------------------------------------------------------------------

QUERY = (
    "SUBREDDIT: r/harbour\n\nTITLE: Jonas watched healers\n\nPOST: Ilse thanked bakers in the narrow mill. "
    "It was a gloomy week.\nThat winter Mara robbed sailors.\n\nTL;DR:"
)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("  \n", 0),
        (" Mara robbed sailors. Ilse thanked bakers.", 2 - 0.6),
        (" Ilse thanked bakers. Ilse thanked bakers.", 1 - 0.6),  # a fact counts once, its words twice
        (" Jonas watched healers. Jonas watched healers.", -2 - 0.6),  # only the title says so
        (" Ilse robbed sailors.", -1 - 0.3),  # of two facts
        (" Ilse thanked bakers. Mara rob", 1 - 1 - 0.5),  # what is not finished is a statement too,
        (" Ilse thanked bakers. Mara robbed sailors", 2 - 0.6),  # and may be a fact
        (" It was a gloomy week.", -1 - 0.5),  # what the post says by the way is no fact
        (" ilse thanked bakers.", -1 - 0.3),
    ],
)
def test_gold_scores_of_summaries(response, expected):
    assert posts_world.gold_scores([QUERY, ""], [response, ""]) == [pytest.approx(expected), 0]


def test_posts_and_summaries_fit_the_task():
    task = dataclasses.replace(posts.TASKS["posts"], posts=str(POSTS), comparisons=str(POSTS))
    tokenizer = AutoTokenizer.from_pretrained(POSTS / "model")
    held_out = posts.read_posts(task, tokenizer, "validation")
    assert len(held_out) == 512 and held_out.too_long == 0
    comparisons = posts.read_comparisons(task, tokenizer, "validation")
    assert comparisons.cut == 0
    pad_id = posts.task_ids(task, tokenizer).pad
    assert (torch.cat([held_out.queries, comparisons.queries])[:, 0] == pad_id).all()  # no post was cut


# ---- Sums ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sums", "sums-tools"])
def test_sums_fit_the_task(name):
    task = dataclasses.replace(problems.TASKS[name], problems=str(worlds.DATA / name))
    tokenizer = AutoTokenizer.from_pretrained(worlds.DATA / name / "model")
    held_out = problems.read_problems(task, tokenizer, "test")
    assert (len(held_out), held_out.too_long, held_out.unscorable) == (1_024, 0, 0)
    assert set(held_out.kinds) == {"1", "2", "3", "4"}
