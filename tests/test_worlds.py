"""The small worlds of the package: benchmark/worlds.py writes them bit for bit, and they are what their pages say."""

import dataclasses
import json
import lzma
import random
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmark import worlds as generators
from ppo_rlhf import train_policy, worlds
from ppo_rlhf.lib import files, label_files
from ppo_rlhf.rlvr import problems
from ppo_rlhf.tldr import posts
from ppo_rlhf.train_policy import QueryStream
from ppo_rlhf.worlds import posts as posts_world, tales

TALES = worlds.DATA / "tales"
POSTS = worlds.DATA / "posts"


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """The rows of <name>.jsonl, which may be compressed."""
    return [json.loads(line) for line in files.read_text(folder / f"{name}.jsonl").splitlines()]


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
    assert stories == files.read_text(TALES / "stories.txt")


def test_the_choices_of_the_package_are_made_again(tmp_path, monkeypatch):
    """The first 32 of each annotator: sampling from the language model takes minutes."""
    some = 32
    (tmp_path / "stories.txt").write_text(files.read_text(TALES / "stories.txt"))
    (tmp_path / "model").symlink_to(TALES / "model")
    whole = torch.rand(4, 6_016, 24, generator=train_policy.keyed_generator(1, "comparisons"), dtype=torch.float64)
    monkeypatch.setattr(generators.torch, "rand", lambda *size, **_: whole[:, : size[1]])
    generators.simulate_comparisons(tmp_path, generators.Tales(train_comparisons=some, test_comparisons=1), "cpu")
    for name in tales.ANNOTATORS:
        rows = files.read_json(tmp_path / "labels" / name / "offline_5k.json")
        assert rows[:some] == files.read_json(TALES / "labels" / name / "offline_5k.json")[:some]


# ---- Language models -------------------------------------------------------------------------------------------


def new_texts(name: str) -> list[list[str]]:
    """Texts such as the language model learned from, by another seed: pieces that are read and learned in turn."""
    rng = random.Random(1234)
    if name == "tales":
        return [["", generators.write_story(rng, 3)] for _ in range(40)]
    if name == "posts":
        return [["", generators.write_thread(rng)] for _ in range(20)]
    sizes = generators.SUMS[name]
    return [
        [f"{problem.question}\n", *generators.split_answers(generators.write_solution(rng, problem, sizes))]
        for problem in generators.write_problems(rng, 80, sizes, set())
    ]


@torch.no_grad()
def loss_of(model: torch.nn.Module, tokenizer, text: list[str]) -> list[float]:
    """-log p of every token of the pieces 1, 3, 5 ... after the first token of all."""
    pieces = [tokenizer.encode(piece) for piece in text]
    ids = torch.tensor([token for piece in pieces for token in piece])
    learned = torch.tensor([number % 2 for number, piece in enumerate(pieces) for _ in piece], dtype=torch.bool)
    logits = model(ids[None]).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")[learned[1:]].tolist()


@pytest.mark.parametrize("name", ["tales", "posts", "sums", "sums-tools"])
def test_a_model_has_learned_the_texts_of_its_world(name):
    """Its loss on texts that it has not seen is the recorded one of its last steps."""
    facts = files.read_json(worlds.DATA / name / "world.json")
    model = AutoModelForCausalLM.from_pretrained(worlds.DATA / name / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(worlds.DATA / name / "model")
    assert facts["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    losses = [loss for text in new_texts(name) for loss in loss_of(model, tokenizer, text)]
    assert statistics.fmean(losses) == pytest.approx(facts["lm_loss"], abs=0.06)


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
    rows = [row for split in ("train", "test") for row in rows_of(tmp_path, f"problems_{split}")]
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
    assert tales.grammatical_share(files.read_text(TALES / "stories.txt").splitlines()[:500]) == 1
    assert tales.grammatical_share([f"{good} {bad}", good]) == pytest.approx(2 / 3)
    assert tales.grammatical_share([good.lower(), "Mara felt happy and lonely that red."]) == 0
    assert tales.grammatical_share([f"{good} Mara felt hap"]) == 1  # an unfinished sentence doesn't count


def test_words_and_full_stops_are_one_token():
    """In one form, so that a response is truncated at every full stop."""
    tokenizer = AutoTokenizer.from_pretrained(TALES / "model")
    assert [token for token in tokenizer.get_vocab() if "." in token] == ["."]
    words = [word for lists in tales.SLOTS.values() for words in lists for word in words]
    assert all(len(tokenizer.encode(f" {word}")) == 1 for word in [*words, *tales.NAMES.split()])


@pytest.mark.parametrize("name", tales.ANNOTATORS)
def test_an_annotator_of_tales_chooses_as_the_world_says(name):
    """With the probabilities of the formula, among continuations that end after a full stop."""
    tokenizer = AutoTokenizer.from_pretrained(TALES / "model")
    task, pad_id = dataclasses.replace(train_policy.PRESETS["tales"].task, query_dataset=str(TALES)), len(tokenizer)
    labels = label_files.read_labels(f"{name}/offline_5k.json", task, tokenizer, num_train=4_992)
    assert labels.queries[:512].equal(QueryStream(task, tokenizer, split="all").next_batch(512, pad_id))
    (full_stop,) = tokenizer.encode(".")
    ends = (labels.samples == full_stop) & (torch.arange(24) >= 16)
    assert ((labels.samples == pad_id) == (ends.cumsum(2) - ends.int() > 0)).all()

    held_out = torch.arange(4_992, 6_016)
    assert labels.held_out == len(held_out)
    texts = posts.to_texts(tokenizer, labels.samples[held_out].flatten(0, 1), pad_id)
    gold_scores = torch.tensor(tales.ANNOTATORS[name].gold_scores([""] * len(texts), texts)).double().view(-1, 4)
    weights = (gold_scores / 0.5).exp()
    likeliest, place = (weights / weights.sum(1, keepdim=True)).max(1)  # (held-out labels,)
    assert labels.ceiling == pytest.approx(likeliest.mean().item(), abs=1e-9)
    deviation = (likeliest * (1 - likeliest)).sum().sqrt()
    assert abs((labels.targets[held_out] == place).sum() - likeliest.sum()) < 4 * deviation


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


def test_the_annotator_of_posts_chooses_as_the_world_says():
    """With the probabilities of the formula; that of the likelier summary is the ceiling on average."""
    rows = rows_of(POSTS, "comparisons_validation")
    queries = [f"POST: {row['info']['post']}" for row in rows for _ in range(2)]
    texts = [summary["text"] for row in rows for summary in row["summaries"]]
    gold_scores = torch.tensor(posts_world.gold_scores(queries, texts)).double().view(-1, 2)
    difference = gold_scores[:, 0] - gold_scores[:, 1]
    likelier = 1 / (1 + (-difference.abs() / 0.3).exp())  # (comparisons,)
    assert files.read_json(POSTS / "world.json")["ceiling"] == pytest.approx(likelier.mean().item(), abs=1e-9)
    chosen = torch.tensor([row["choice"] for row in rows]) == (difference < 0).long()
    deviation = (likelier * (1 - likelier)).sum().sqrt()
    assert abs(chosen.sum() - likelier.sum()) < 4 * deviation


def test_no_post_is_in_two_files_or_twice_in_one():
    names = ("posts_train", "posts_validation", "posts_test", "comparisons_train", "comparisons_validation")
    found = [row.get("info", row)["post"] for name in names for row in rows_of(POSTS, name)]
    assert len(set(found)) == len(found) == 8_192 + 512 + 512 + 12_288 + 1_024


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


def result_of(question: str) -> tuple[int, int]:
    """How many things there are at the end of a story, and after how many steps, by its verbs."""
    first, *events, _ = question.split(". ")
    result = int(re.search(r"\d+", first)[0])
    for event in events:
        number = int(re.search(r"\d+", event)[0])
        if "times as many" in event:
            result *= number
        else:
            result += number if re.search(r"gives (her|him) |finds|buys", event) else -number
    return result, len(events)


def test_answers_of_sums_are_correct_and_no_problem_is_held_out_and_trained_on():
    rows = [row for split in ("train", "test") for row in rows_of(worlds.DATA / "sums", f"problems_{split}")]
    assert len({row["question"] for row in rows}) == len(rows) == 8_192 + 1_024
    for row in rows:
        result, steps = result_of(row["question"])
        assert row["answer"].endswith(f"\n#### {result}") and row["steps"] == steps


@pytest.mark.parametrize("name", ["sums", "sums-tools"])
def test_sums_fit_the_task(name):
    task = dataclasses.replace(problems.TASKS[name], problems=str(worlds.DATA / name))
    tokenizer = AutoTokenizer.from_pretrained(worlds.DATA / name / "model")
    held_out = problems.read_problems(task, tokenizer, "test")
    assert (len(held_out), held_out.too_long, held_out.unscorable) == (1_024, 0, 0)
    assert set(held_out.kinds) == {"1", "2", "3", "4"}
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("12+7=19")) == list("12+7=19")


def test_sums_is_the_name_of_model_and_problems(in_a_fresh_folder):
    """Unless a model that was trained here is in a folder of that name."""
    world = worlds.DATA / "sums"
    assert worlds.find_value("base_model", "sums") == f"{world}/model"
    where, _ = next(iter(problems.load_rows("sums", "problems", "train")))
    assert where.startswith(f"{world}/problems_train.jsonl")
    assert worlds.find_value("task.problems", "gsm8k") == "gsm8k"
    Path("sums").mkdir()
    Path("sums/ppo_rlhf.json").touch()
    assert worlds.find_value("base_model", "sums") == "sums"
