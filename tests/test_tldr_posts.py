"""worlds/posts.py: the posts, the writers, the annotator, and the world that is built from them."""

import dataclasses
import json
import math
import random
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import rows_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo_rlhf.lib.base.errors import InputError
from ppo_rlhf.lib.data.posts import TASKS
from ppo_rlhf.worlds import building, posts as posts_world, tales
from ppo_rlhf.worlds.posts import PostsArgs

DEFAULT = PostsArgs()


NAMES, DEEDS, PEOPLE = set(tales.NAMES.split()), set(posts_world.DEEDS), set(posts_world.PEOPLE)


def facts_of(text: str) -> list[str]:
    """The facts of a text, found word by word: a name, a deed and people in a row."""
    words = text.replace(".", " .").split()
    threes = zip(words, words[1:], words[2:], strict=False)
    return [f"{a} {b} {c}" for a, b, c in threes if a in NAMES and b in DEEDS and c in PEOPLE]


def gold(post: str, summary: str) -> float:
    """The gold score of a summary whose statements all end, counted one by one."""
    score, mentioned, facts = 0.0, set(), facts_of(post)
    for statement in summary.strip().split(". "):
        statement = statement.strip(". ")
        if statement not in facts:
            score -= 1
        elif statement not in mentioned:
            score += 1
        mentioned.add(statement)
        score -= len(statement.split()) / 10
    return score


# ---- Posts -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def posts() -> list[tuple[list[posts_world.Fact], dict[str, str]]]:
    rng = random.Random(5)
    return [posts_world.write_post(rng, DEFAULT.facts, DEFAULT.asides) for _ in range(1000)]


def test_a_post_tells_its_facts_and_no_others(posts):
    for told, post in posts:
        facts = [" ".join(fact) for fact in told]
        assert facts_of(post["post"]) == facts
        assert [" ".join(match.groups()) for match in posts_world.FACT.finditer(post["post"])] == facts
        assert len(facts) == DEFAULT.facts
        assert all(len(set(words)) == DEFAULT.facts for words in zip(*told, strict=True))  # each does one thing


def test_a_post_is_two_lines_of_sentences_about_two_of_its_people(posts):
    places = {word for words in tales.SLOTS["place"] for word in words}
    for told, post in posts:
        assert set(post) == {"subreddit", "title", "post"}
        first, second = post["post"].split("\n")
        assert first.endswith(".") and second.endswith(".")
        assert post["post"].count(".") == DEFAULT.facts + DEFAULT.asides
        assert post["title"] in {f"{who} and {whom}" for who, _, whom in told}
        assert post["subreddit"] in places
        assert "{" not in post["post"]
    assert len({post["post"] for _, post in posts}) == len(posts)


def test_inventions_are_no_facts(posts):
    rng = random.Random(6)
    for told, _ in posts[:300]:
        invention = posts_world.invent(rng, told)
        assert all(word not in known for word, known in zip(invention, zip(*told, strict=True), strict=True))
        assert facts_of(" ".join(invention)) == [" ".join(invention)]


@pytest.mark.parametrize("mentioned", [1, 4, 6, 7])
def test_a_summary_has_the_facts_in_the_order_of_the_post(posts, mentioned):
    rng = random.Random(7)
    for told, _ in posts[:100]:
        statements = posts_world.write_summary(rng, told, mentioned, 0.0, 0.0).removesuffix(".").split(". ")
        facts = [" ".join(fact) for fact in told]
        assert len(statements) == min(mentioned, 6) and set(statements) <= set(facts)
        assert statements == sorted(set(statements), key=facts.index)


def test_inventions_and_repetitions_take_the_place_of_facts(posts):
    rng = random.Random(17)
    invented = repeated = 0
    for told, _ in posts:
        facts = {" ".join(fact) for fact in told}
        statements = posts_world.write_summary(rng, told, 5, 0.5, 0.0).removesuffix(".").split(". ")
        invented += sum(statement not in facts for statement in statements)
        assert len(statements) == 5
        statements = posts_world.write_summary(rng, told, 5, 0.0, 0.25).removesuffix(".").split(". ")
        repeated += 5 - len(set(statements))
        assert len(statements) == 5 and set(statements) <= facts
    assert invented / 5000 == pytest.approx(0.5, abs=4 * math.sqrt(0.25 / 5000))
    assert repeated / 4000 == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / 4000))  # the first never is one


def test_people_mention_the_first_two_to_five_of_six_facts_and_invent_one_in_seven(posts):
    rng = random.Random(8)
    lengths, invented = [], 0
    for told, _ in posts:
        statements = posts_world.write_reference(rng, told).removesuffix(".").split(". ")
        facts = [" ".join(fact) for fact in told]
        lengths.append(len(statements))
        invented += sum(statement not in facts for statement in statements)
        assert all(a == b or a not in facts for a, b in zip(statements, facts, strict=False))
    assert set(lengths) == {2, 3, 4, 5}
    assert invented / sum(lengths) == pytest.approx(0.15, abs=4 * math.sqrt(0.15 * 0.85 / sum(lengths)))


# ---- The gold score --------------------------------------------------------------------------------------------

QUERY = (
    "SUBREDDIT: r/harbour\n\nTITLE: Ilse and bakers\n\nPOST: Ilse thanked bakers in the narrow mill. "
    "It was a gloomy week.\nThat winter Mara robbed sailors.\n\nTL;DR:"
)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("", 0),
        ("  \n", 0),
        (" Ilse thanked bakers.", 1 - 0.3),
        (" Mara robbed sailors. Ilse thanked bakers.", 2 - 0.6),
        (" Ilse thanked bakers. Ilse thanked bakers.", 1 - 0.6),  # a fact counts once, its words twice
        (" Jonas watched healers.", -1 - 0.3),
        (" Jonas watched healers. Jonas watched healers.", -2 - 0.6),
        (" Ilse robbed sailors.", -1 - 0.3),  # of two facts
        (" Ilse thanked bakers. Jonas watched healers.", 1 - 1 - 0.6),
        (" Ilse thanked bakers. Mara rob", 1 - 1 - 0.5),  # what is not finished is a statement too,
        (" Ilse thanked bakers. Mara robbed sailors", 2 - 0.6),  # and may be a fact
        (" Ilse thanked bakers", 1 - 0.3),
        (" It was a gloomy week.", -1 - 0.5),  # what the post says by the way is no fact
        (" Ilse thanked bakers in the narrow mill.", -1 - 0.7),
        (" ilse thanked bakers.", -1 - 0.3),
        (" Ilse and bakers.", -1 - 0.3),  # nor is its title
    ],
)
def test_gold_scores(response, expected):
    assert posts_world.gold_scores([QUERY], [response]) == [pytest.approx(expected)]


def test_gold_scores_read_the_post_only_and_each_row_by_itself():
    title = QUERY.replace("TITLE: Ilse and bakers", "TITLE: Jonas watched healers")
    queries = [QUERY, title, "", "POST: Jonas watched healers."]
    scores = posts_world.gold_scores(queries, [" Jonas watched healers."] * 4)
    assert scores == pytest.approx([-1.3, -1.3, -1.3, 0.7])
    assert all(type(score) is float for score in scores)


def test_all_facts_of_a_post_are_worth_a_point_each(posts):
    for told, post in posts[:200]:
        query = f"SUBREDDIT: r/{post['subreddit']}\n\nTITLE: {post['title']}\n\nPOST: {post['post']}\n\nTL;DR:"
        facts = [" ".join(fact) + "." for fact in told]
        assert posts_world.gold_scores([query] * 6, facts) == pytest.approx([0.7] * 6)
        assert posts_world.gold_scores([query], [" ".join(reversed(facts))]) == pytest.approx([6 * 0.7])


# ---- The annotator ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def comparisons() -> tuple[list[dict[str, Any]], float]:
    return posts_world.write_comparisons(random.Random(9), 4000, DEFAULT, "train")


def probabilities(rows: list[dict[str, Any]], temperature: float) -> list[float]:
    """The annotator's probability of the first summary, by the formula."""
    found = []
    for row in rows:
        first, second = (gold(row["info"]["post"], summary["text"]) for summary in row["summaries"])
        found.append(1 / (1 + math.exp((second - first) / temperature)))
    return found


def test_writers_differ_in_their_mean_gold_score(comparisons):
    """Expected by hand: a fact is worth 0.7, an invention -1.3, and a fact once more -0.3.

    A sentence of the post is no statement that it makes: -1, and a tenth for each of its words, 6 on average where
    it is about a fact, and 7 where it is not.
    """
    scores = defaultdict(list)
    for row in comparisons[0]:
        for summary in row["summaries"]:
            scores[summary["policy"]].append(gold(row["info"]["post"], summary["text"]))
    expected = {
        "careful": 4 * 0.7,
        "thorough": 5 * 0.7,
        "brief": 1.5 * 0.7,
        "careless": 3.5 * (0.7 * 0.7 - 0.3 * 1.3),
        "inventive": 4 * (0.4 * 0.7 - 0.6 * 1.3),
        "forgetful": 0.7 + 3.5 * (0.8 * 0.7 - 0.2 * 0.3),
        "repetitive": 0.7 + 3.5 * (0.5 * 0.7 - 0.5 * 0.3),
        "copying": 2 * (-1 - (6 * 6 + 7) / 7 / 10),
        "ref": 3.5 * (0.85 * 0.7 - 0.15 * 1.3),
    }
    assert set(scores) == set(expected)
    for writer, values in scores.items():
        error = statistics.stdev(values) / math.sqrt(len(values))
        assert statistics.fmean(values) == pytest.approx(expected[writer], abs=4 * error + 1e-9)
        assert len(values) == pytest.approx(8000 / 9, rel=0.1)
    assert all(row["summaries"][0]["policy"] != row["summaries"][1]["policy"] for row in comparisons[0])


def test_the_annotator_chooses_with_the_stated_probability(comparisons):
    rows = comparisons[0]
    firsts = probabilities(rows, DEFAULT.annotator_temperature)
    for low, high in ((0, 1), (0, 0.05), (0.05, 0.3), (0.3, 0.7), (0.7, 0.95), (0.95, 1)):
        chosen = [(p, row["choice"] == 0) for p, row in zip(firsts, rows, strict=True) if low <= p <= high]
        expected = sum(p for p, _ in chosen)
        deviation = math.sqrt(sum(p * (1 - p) for p, _ in chosen))
        assert abs(sum(first for _, first in chosen) - expected) < 4 * deviation
        assert len(chosen) > 100


@pytest.mark.parametrize("temperature", [0.05, 0.5, 5.0])
def test_the_ceiling_is_the_mean_of_the_larger_probability(temperature):
    args = dataclasses.replace(DEFAULT, annotator_temperature=temperature)
    rows, ceiling = posts_world.write_comparisons(random.Random(3), 200, args, "train")
    larger = [max(p, 1 - p) for p in probabilities(rows, temperature)]
    assert ceiling == pytest.approx(statistics.fmean(larger), abs=1e-9)
    # A judge who knows the formula reaches it.
    right = sum(
        (p > 0.5) == (row["choice"] == 0) for p, row in zip(probabilities(rows, temperature), rows, strict=True)
    )
    assert right / 200 == pytest.approx(ceiling, abs=4 * math.sqrt(0.25 / 200))


def test_confidence_is_one_to_nine():
    seen = set()
    noisier = dataclasses.replace(DEFAULT, annotator_temperature=0.5)
    rows, _ = posts_world.write_comparisons(random.Random(9), 4000, noisier, "train")
    for row, p in zip(rows, probabilities(rows, 0.5), strict=True):
        confidence, sure = row["extra"]["confidence"], max(p, 1 - p)
        seen.add(confidence)
        assert abs((confidence - 1) / 8 - (2 * sure - 1)) <= 1 / 16 + 1e-9  # the nearest of nine steps
    assert seen == set(range(1, 10))


def test_comparisons_have_the_format_of_the_published_ones(comparisons):
    for number, row in enumerate(comparisons[0]):
        assert set(row) == {"info", "summaries", "choice", "worker", "batch", "split", "extra"}
        assert set(row["info"]) == {"id", "subreddit", "title", "post"}
        assert all(set(summary) == {"text", "policy"} for summary in row["summaries"])
        assert all(summary["text"].startswith(" ") and summary["text"].endswith(".") for summary in row["summaries"])
        assert row["split"] == "train" and row["batch"] == f"batch{number // 1000}"


# ---- The world -------------------------------------------------------------------------------------------------


def test_a_world_holds_posts_comparisons_model_and_facts(tiny_posts):
    kinds = {"posts_train": 48, "posts_validation": 16, "posts_test": 16}
    kinds |= {"comparisons_train": 48, "comparisons_validation": 16}
    files = {name: rows_of(tiny_posts / f"{name}.jsonl") for name in kinds}
    assert {name: len(rows) for name, rows in files.items()} == kinds
    facts = json.loads((tiny_posts / "world.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(tiny_posts / "model")
    tokenizer = AutoTokenizer.from_pretrained(tiny_posts / "model")
    assert model.config.vocab_size == len(tokenizer) <= 1024
    assert (model.config.hidden_size, model.config.num_hidden_layers) == (16, 1)
    assert facts["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert facts["settings"]["train_posts"] == 48

    # What the world says of its own truth, by the formulas.
    sure = [max(p, 1 - p) for p in probabilities(files["comparisons_validation"], DEFAULT.annotator_temperature)]
    assert facts["ceiling"] == pytest.approx(statistics.fmean(sure), abs=1e-9)
    references = [gold(row["post"], row["summary"]) for name in kinds if "posts" in name for row in files[name]]
    assert facts["reference_gold"] == pytest.approx(statistics.fmean(references), abs=1e-9)
    texts = [row.get("post") or row["info"]["post"] for rows in files.values() for row in rows]
    assert len(set(texts)) == len(texts)  # no split sees a post of another


def test_posts_and_summaries_fit_the_task(tiny_posts, posts, comparisons):
    """With the tokenizer of the default world, which sees as many texts."""
    tokenizer, task, rng = AutoTokenizer.from_pretrained(tiny_posts / "model"), TASKS["posts"], random.Random(4)
    lengths = defaultdict(int)
    for told, post in posts:
        query = f"SUBREDDIT: r/{post['subreddit']}\n\nTITLE: {post['title']}\n\nPOST: {post['post']}\n\nTL;DR:"
        reference = f" {posts_world.write_reference(rng, told)}<|endoftext|>"
        for name, text in (("query", query), ("reference", reference)):
            lengths[name] = max(lengths[name], len(tokenizer(text)["input_ids"]))
    for row in comparisons[0]:
        for summary in row["summaries"]:
            ids = tokenizer(summary["text"] + "<|endoftext|>")["input_ids"]
            assert ids[-1] == tokenizer.eos_token_id
            lengths["summary"] = max(lengths["summary"], len(ids))
    assert lengths["query"] <= task.query_length
    assert lengths["reference"] <= task.response_length
    assert lengths["summary"] <= task.comparison_length
    assert task.query_length + max(task.comparison_length, task.response_length) <= DEFAULT.max_positions
    assert (task.posts, task.comparisons) == ("posts", "posts")


SMALL = dataclasses.replace(
    DEFAULT, train_posts=20, validation_posts=5, test_posts=5, train_comparisons=20, validation_comparisons=8
)


def written(folder: Path, args: PostsArgs) -> dict[str, bytes]:
    folder.mkdir()
    facts = posts_world.write_texts(folder, args)
    return {file.name: file.read_bytes() for file in folder.iterdir()} | {"facts": json.dumps(facts).encode()}


def test_the_same_seed_writes_the_same_files(tmp_path):
    first = written(tmp_path / "first", SMALL)
    random.random()  # the state of the global generator must not matter
    again = written(tmp_path / "again", SMALL)
    other = written(tmp_path / "other", dataclasses.replace(SMALL, seed=2))
    assert len(first) == 6
    assert again == first
    assert all(other[name] != first[name] for name in first)


def test_one_size_leaves_the_other_files_as_they_are(tmp_path):
    first = written(tmp_path / "first", SMALL)
    more = written(tmp_path / "more", dataclasses.replace(SMALL, train_posts=30))
    assert more["posts_train.jsonl"].startswith(first["posts_train.jsonl"])
    assert [name for name in first if more[name] != first[name]] == ["posts_train.jsonl", "facts"]


def test_the_same_seed_trains_the_same_language_model(tiny_posts):
    tokenizer = AutoTokenizer.from_pretrained(tiny_posts / "model")
    args = dataclasses.replace(
        SMALL, width=8, layers=1, heads=2, lm_quote_steps=2, lm_thread_steps=2, lm_batch_size=2
    )
    rng = random.Random(1)
    quotes = [posts_world.write_quotes(rng) for _ in range(4)]
    threads = [posts_world.write_thread(rng, args) for _ in range(4)]
    assert all("TL;DR" not in text and "endoftext" not in text for text in quotes + threads)
    models = []
    for seed in (1, 1, 2):
        torch.rand(7)  # nor here
        seeded = dataclasses.replace(args, seed=seed)
        models.append(posts_world.train_language_model(quotes, threads, tokenizer, seeded, "cpu"))
    (first, first_loss), (again, again_loss), (other, _) = models
    assert again_loss == first_loss
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.get_input_embeddings().weight, other.get_input_embeddings().weight)


def check_reply(reply: str, facts: list[str]) -> list[str]:
    """A reply's facts without repetitions, of which each says "again" and comes after what it repeats."""
    said: list[str] = []
    for sentence in reply.removesuffix(".").split(". "):
        fact, again = sentence.removesuffix(" again"), sentence.endswith(" again")
        assert fact in facts and again == (fact in said)
        said += [fact] * (not again)
    return said


def test_a_thread_is_a_post_with_four_replies_that_quote_it():
    rng, again = random.Random(2), 0
    for _ in range(50):
        post, *replies = posts_world.write_thread(rng, DEFAULT).split("\n\nREPLY: ")
        assert post.startswith("SUBREDDIT: r/") and "\n\nTITLE: " in post and "\n\nPOST: " in post
        facts = facts_of(post)
        assert len(replies) == 4 and len(facts) == 6
        for reply in replies:
            said = check_reply(reply, facts)
            assert 2 <= len(said) <= 6 and said == sorted(said, key=facts.index)
            again += reply.count(" again.")
    assert again / (50 * 4 * 4) == pytest.approx(0.2, abs=4 * math.sqrt(0.2 * 0.8 / 800))  # of four facts on average


def test_quotes_tell_five_facts_three_times():
    rng = random.Random(3)
    for _ in range(50):
        text = posts_world.write_quotes(rng)
        facts = facts_of(text)[-5:]
        first, rest = text[: -2 * len(" ".join(facts)) - 12], text[-2 * len(" ".join(facts)) - 11 :]
        assert set(check_reply(first, facts)) == set(facts) and len(set(facts)) == 5
        assert set(facts_of(rest)[:5]) == set(facts) and len(facts_of(rest)) == 10 and "again" not in rest


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, in which a world is an empty folder."""
    monkeypatch.setenv("PPO_RLHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(posts_world, "build_world", lambda folder, args: folder.mkdir(parents=True))
    return tmp_path / "cache"


def test_every_setting_makes_another_world(cache):
    folders = [posts_world.find_world()]
    for name, value in dataclasses.asdict(DEFAULT).items():
        other = value + 1 if name == "facts" else value * 2
        folders.append(posts_world.find_world(dataclasses.replace(DEFAULT, **{name: other})))
    assert len(set(folders)) == len(folders) == len(dataclasses.fields(DEFAULT)) + 1


@pytest.mark.parametrize("name", ["WRITERS", "FACT_TEMPLATES", "ASIDE_TEMPLATES", "DEEDS", "PEOPLE", "NAMES"])
def test_another_grammar_makes_another_world(cache, monkeypatch, name):
    module = tales if name == "NAMES" else posts_world
    first, old = posts_world.find_world(), getattr(module, name)
    changed = dict(list(old.items())[:3]) if name == "WRITERS" else old[:-1]
    monkeypatch.setattr(module, name, changed)
    assert posts_world.find_world() != first


def test_two_runs_may_build_the_same_world(tmp_path):
    """The first to have it ready gives it its name."""
    with building.new_world(tmp_path / "world", "posts") as place:
        (place / "second").touch()
        (tmp_path / "world").mkdir()
        (tmp_path / "world" / "first").touch()
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")} == {"world", "world/first"}


BAD_SETTINGS = {
    "two facts": ({"facts": 2}, "facts is 2"),
    "more facts than names": ({"facts": 12}, "facts is 12"),
    "heads of odd width": ({"width": 6, "heads": 2}, "heads 2"),
}


@pytest.mark.parametrize(("settings", "words"), BAD_SETTINGS.values(), ids=BAD_SETTINGS)
def test_bad_settings_are_refused_in_one_line(cache, settings, words):
    with pytest.raises(InputError) as caught:
        posts_world.find_world(dataclasses.replace(DEFAULT, **settings))
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not cache.exists()


@pytest.mark.parametrize("facts", [3, 11])
def test_few_and_many_facts(tmp_path, facts):
    """What is not refused works."""
    written(tmp_path / "world", dataclasses.replace(SMALL, facts=facts))
    for row in rows_of(tmp_path / "world" / "posts_train.jsonl"):
        assert len(facts_of(row["post"])) == facts
