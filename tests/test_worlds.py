"""The small worlds of the package: that benchmark/worlds.py writes them, and that they are as they should be."""

import dataclasses
import itertools
import json
import lzma
import math
import random
import re
import statistics
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from runs import TINY_SUMS, TINY_WORLD, rows_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmark import worlds as generators
from ppo_rlhf import train_policy, worlds
from ppo_rlhf.lib import files, label_files
from ppo_rlhf.rlvr import problems
from ppo_rlhf.tldr.posts import TASKS, to_texts
from ppo_rlhf.train_policy import QueryStream, TaskArgs
from ppo_rlhf.worlds import posts as posts_world, tales

# ---- What the package has --------------------------------------------------------------------------------------

TRAINED = ("tales", "posts", "sums", "sums-tools")


@pytest.mark.parametrize("name", ["arithmetic", "sums", "sums-tools", "posts"])
def test_the_texts_of_the_package_are_written_again(name, tmp_path):
    generators.write_world(name, tmp_path)
    texts = {path.name: path.read_bytes() for path in tmp_path.glob("*.jsonl")}
    packaged = (worlds.DATA / name).glob("*.jsonl.xz")
    assert texts == {path.stem: lzma.decompress(path.read_bytes()) for path in packaged}
    facts = worlds.DATA / name / "world.json"
    assert not facts.exists() or facts.read_bytes() == (tmp_path / "world.json").read_bytes()


def test_the_stories_of_the_package_are_written_again():
    rng, world = random.Random(1), worlds.DATA / "tales"
    stories = "".join(generators.write_story(rng, 14) + "\n" for _ in range(20_000))
    assert stories == files.read_text(world / "stories.txt")


def test_the_choices_of_the_package_are_made_again(tmp_path, monkeypatch):
    """The first 32 of each annotator: sampling from the language model takes minutes."""
    world, some = worlds.DATA / "tales", 32
    (tmp_path / "stories.txt").write_text(files.read_text(world / "stories.txt"))
    (tmp_path / "model").symlink_to(world / "model")
    whole = torch.rand(4, 6_016, 24, generator=train_policy.keyed_generator(1, "comparisons"), dtype=torch.float64)
    monkeypatch.setattr(generators.torch, "rand", lambda *size, **_: whole[:, : size[1]])
    generators.simulate_comparisons(tmp_path, generators.Tales(train_comparisons=some, test_comparisons=1), "cpu")
    for name in tales.ANNOTATORS:
        rows = files.read_json(tmp_path / "labels" / name / "offline_5k.json")
        assert rows[:some] == files.read_json(world / "labels" / name / "offline_5k.json")[:some]


def test_the_texts_of_the_package_are_small():
    assert sum(path.stat().st_size for path in worlds.DATA.rglob("*.xz")) < 6e6


def new_texts(name: str) -> list[list[str]]:
    """Texts such as the language model learnt from, by another seed: pieces that are read and learnt in turn."""
    rng = random.Random(1234)
    if name == "tales":
        return [["", generators.write_story(rng, 3)] for _ in range(40)]
    if name == "posts":
        return [["", generators.write_thread(rng)] for _ in range(20)]
    sizes, found = generators.SUMS[name], []
    for problem in generators.write_problems(rng, 200, sizes, set()):
        solution = generators.write_solution(rng, problem, sizes)
        found.append([f"{problem.question}\n", *generators.split_answers(solution)])
    return found


def loss_of(model: torch.nn.Module, tokenizer, text: list[str]) -> list[float]:
    """-log p of every token of the pieces 1, 3, 5 ... after the first token of all."""
    pieces = [tokenizer.encode(piece) for piece in text]
    ids = torch.tensor([token for piece in pieces for token in piece])
    learnt = [number % 2 for number, piece in enumerate(pieces) for _ in piece][1:]
    with torch.no_grad():
        log_probs = model(ids[None]).logits[0, :-1].log_softmax(1)
    losses = -log_probs[torch.arange(len(ids) - 1), ids[1:]]
    return [loss for loss, counts in zip(losses.tolist(), learnt, strict=True) if counts]


@pytest.mark.parametrize("name", TRAINED)
def test_a_model_has_learnt_the_texts_of_its_world(name):
    """Its loss on texts that it has not seen is the recorded one of its last steps."""
    facts = files.read_json(worlds.DATA / name / "world.json")
    model = AutoModelForCausalLM.from_pretrained(worlds.DATA / name / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(worlds.DATA / name / "model")
    assert facts["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    losses = [loss for text in new_texts(name) for loss in loss_of(model, tokenizer, text)]
    assert statistics.fmean(losses) == pytest.approx(facts["lm_loss"], abs=0.06)


# ---- Tales: stories --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stories() -> list[str]:
    rng = random.Random(5)
    return [generators.write_story(rng, generators.SENTENCES) for _ in range(4000)]


@pytest.fixture(scope="module")
def words(stories) -> Counter:
    return Counter(word for story in stories for word in re.findall(r"\w+", story))


def as_regex(template: str) -> str:
    """What a template can become: a slot takes any word of its kind, names and places are the story's."""
    words = {slot: "|".join(" ".join(map(" ".join, lists)).split()) for slot, lists in tales.SLOTS.items()}
    names = "|".join(tales.NAMES.split())
    return template.replace(".", "[.]").format(
        **{slot: f"({options})" for slot, options in words.items()},
        name=f"(?P<name>{names})",
        other=f"(?P<other>{names})",
        home=f"(?P<home>{words['place']})",
    )


def test_stories_keep_to_the_grammar_and_their_cast(stories):
    patterns = [re.compile(as_regex(template)) for template in tales.TEMPLATES]
    for story in stories[:500]:
        cast = {"name": set(), "other": set(), "home": set()}
        sentences = re.findall(r"[^.]+[.]", story)
        assert len(sentences) == generators.SENTENCES
        for sentence in sentences:
            matches = [match for pattern in patterns if (match := pattern.fullmatch(sentence.strip()))]
            assert len(matches) == 1
            for role, person in matches[0].groupdict().items():
                cast[role].add(person)
        assert all(len(members) <= 1 for members in cast.values())
        assert not cast["name"] & cast["other"]
    assert tales.grammatical_share(stories[:500]) == 1


GOOD, BAD = "Mara felt happy and lonely that red week.", "Mara felt happy happy and lonely that red week."


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([GOOD], 1),
        ([BAD], 0),
        ([GOOD.lower()], 0),
        (["Mara felt happy and lonely that red."], 0),
        ([f"{GOOD} {BAD}", GOOD], 2 / 3),
        ([f" All night there was rain and joy near the mill. {BAD} Mara felt hap"], 1 / 2),  # the rest does not count
    ],
)
def test_grammatical_share(texts, expected):
    assert tales.grammatical_share(texts) == pytest.approx(expected)


def test_stories_differ(stories):
    assert len(set(stories)) == len(stories)
    beginnings = {". ".join(story.split(". ")[:3]) for story in stories}
    assert len(beginnings) > 0.99 * len(stories)


SENTIMENTS = {"pleasant": tales.PLEASANT, "unpleasant": tales.UNPLEASANT, "neutral": tales.NEUTRAL}
WORDS = {name: " ".join(sentiment.values()).split() for name, sentiment in SENTIMENTS.items()}


def test_every_word_of_the_grammar_is_used(words):
    listed = [*tales.THINGS.values(), *tales.PLACES.values(), tales.TIMES, tales.NAMES]
    assert all(words[word] for texts in WORDS.values() for word in texts)
    assert all(words[word] for text in listed for word in text.split())


def test_no_word_has_two_sentiments():
    listed = [word for words in WORDS.values() for word in words]
    assert len(listed) == len(set(listed))


def test_sentiments_are_equally_frequent(words):
    counts = {name: sum(words[word] for word in listed) for name, listed in WORDS.items()}
    for count in counts.values():
        assert count / sum(counts.values()) == pytest.approx(1 / 3, abs=0.01)


def halves(stories: list[str]) -> tuple[list[float], list[float]]:
    sentences = [story.split(". ") for story in stories]
    first, second = ([" ".join(story[rows]) for story in sentences] for rows in (slice(7), slice(7, None)))
    return tales.sentiment.gold_scores([], first), tales.sentiment.gold_scores([], second)


def correlation(x: list[float], y: list[float]) -> float:
    return torch.corrcoef(torch.tensor([x, y]))[0, 1].item()


def test_a_beginning_does_not_settle_the_sentiment_of_its_continuation(stories):
    first, second = halves(stories)
    assert abs(correlation(first, second)) < 4 / math.sqrt(len(stories))
    assert correlation(first, first) > 0.99
    assert torch.tensor(first).std() > 2


# ---- Tales: the annotators -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "sentiment", "descriptiveness"),
    [
        ("", 0, 0),
        ("Mara felt happy and lonely that red week.", 0, 1),
        ("Mara gladly thanked the kind baker.", 3, 0),
        (" cruel grief, cruel", -3, 0),
        ("the golden lantern in the filthy mill", 0, 4),  # golden and filthy count in both tastes
        ("a plan and a country and a rope", 0, -1),
        ("unhappy happily happy", 2, 0),
        ("HAPPY happ", 0, 0),
    ],
)  # fmt: skip
def test_gold_scores(response, sentiment, descriptiveness):
    assert tales.sentiment.gold_scores(["happy lantern"], [response]) == [sentiment]
    assert tales.descriptiveness.gold_scores(["happy lantern"], [response]) == [descriptiveness]


def test_gold_scores_are_floats_one_for_each_response():
    scores = tales.sentiment.gold_scores(["", ""], ["happy", "sick"])
    assert scores == [1.0, -1.0]
    assert all(type(score) is float for score in scores)


@pytest.mark.parametrize(
    ("gold_scores", "temperature", "expected"),
    [
        ([0, 1, 2, -1], 0.5, [0.015842, 0.117059, 0.864955, 0.002144]),  # exp of 0, 2, 4, -2, over 63.122541
        ([1, 1, 1, 1], 0.5, [0.25, 0.25, 0.25, 0.25]),
        ([3, 3, 2, 2], 1.0, [0.365529, 0.365529, 0.134471, 0.134471]),  # e / (2 e + 2)
        ([5, -5], 100.0, [0.524979, 0.475021]),
        ([900, 0, 0], 0.5, [1.0, 0.0, 0.0]),
    ],
)
def test_the_annotator_chooses_with_boltzmann_probabilities(gold_scores, temperature, expected):
    draws = 20_000
    rng = torch.Generator().manual_seed(3)
    best, largest = generators.choose_best(torch.tensor([gold_scores] * draws).float(), temperature, rng)
    counts = torch.bincount(best, minlength=len(expected)).double()
    probabilities = torch.tensor(expected).double()
    deviation = (probabilities * (1 - probabilities) * draws).sqrt()
    assert ((counts - probabilities * draws).abs() <= 4 * deviation + 1e-9).all()
    torch.testing.assert_close(largest, torch.full((draws,), max(expected)).double(), atol=1e-6, rtol=0)


def test_the_annotator_reads_each_row_by_itself():
    gold_scores = torch.tensor([[0.0, 50.0], [50.0, 0.0], [0.0, 50.0]])
    best, largest = generators.choose_best(gold_scores, 0.5, torch.Generator())
    assert best.tolist() == [1, 0, 1]
    assert largest.tolist() == [1, 1, 1]


@pytest.fixture(scope="module")
def tokenizer(stories):
    return generators.train_tokenizer(stories, 1_024)


def test_every_word_is_one_token(tokenizer, words):
    assert [word for word in words if len(tokenizer.encode(" " + word)) != 1] == []


def test_the_full_stop_is_one_token_in_one_form(tokenizer, stories):
    assert [token for token in tokenizer.get_vocab() if "." in token] == ["."]
    (full_stop,) = tokenizer.encode(".")
    assert all(tokenizer.encode(story).count(full_stop) == story.count(".") for story in stories[:50])


def test_stories_survive_the_tokenizer(tokenizer, stories):
    for story in stories[:50]:
        ids = tokenizer.encode(story)
        assert tokenizer.decode(ids) == story
        assert tokenizer.eos_token_id not in ids
    assert len(tokenizer) <= 1_024
    assert tokenizer.eos_token_id == 0


@pytest.mark.parametrize("name", ["sentiment", "descriptiveness"])
def test_labels_are_read_like_those_of_people(tiny_world, name):
    path = tiny_world / "labels" / name / "offline_5k.json"
    tokenizer = AutoTokenizer.from_pretrained(tiny_world / "model")
    pad_id = len(tokenizer)
    task = TaskArgs(query_dataset=str(tiny_world / "stories.txt"), query_length=24)
    labels = label_files.read_labels(str(path), task, tokenizer)
    rows = json.loads(path.read_text())
    assert set(rows[0]) == {"query", "sample0", "sample1", "sample2", "sample3", "best"}
    assert labels.targets.tolist() == [row["best"] for row in rows]
    assert labels.queries.shape == (96, 24)
    assert labels.samples.shape == (96, 4, 24)
    torch.testing.assert_close(labels.queries, QueryStream(task, tokenizer, split="all").next_batch(96, pad_id))

    # The ceiling by the formula, over the 32 held-out rows.
    texts = to_texts(tokenizer, labels.samples[64:].flatten(0, 1), pad_id)
    gold = tales.ANNOTATORS[name].gold_scores([""] * len(texts), texts)
    fours = [gold[i : i + 4] for i in range(0, len(gold), 4)]
    temperature = generators.CHOICE_NOISE
    largest = [1 / sum(math.exp((score - max(four)) / temperature) for score in four) for four in fours]
    assert labels.ceiling == pytest.approx(sum(largest) / len(largest), abs=1e-9)


def test_continuations_are_cut_after_a_full_stop(tmp_path, monkeypatch, tiny_world):
    tokenizer = AutoTokenizer.from_pretrained(tiny_world / "model")
    (full_stop,) = tokenizer.encode(".")

    def generate(model, queries, uniforms, *_):
        return (torch.where(uniforms < 0.2, full_stop, 300),)

    monkeypatch.setattr(generators, "generate", generate)
    world = tmp_path
    for part in ("stories.txt", "model"):
        (world / part).symlink_to(tiny_world / part)
    generators.simulate_comparisons(world, TINY_WORLD, "cpu")
    rows = json.loads((world / "labels" / "sentiment" / "offline_5k.json").read_text())
    lengths = Counter()
    for sample in [row[f"sample{i}"] for row in rows for i in range(4)]:
        length = sample.index(50259) if 50259 in sample else 24
        assert set(sample[length:]) <= {50259}
        assert full_stop not in sample[16 : length - 1]
        assert length == 24 or sample[length - 1] == full_stop
        lengths[length] += 1
    assert set(lengths) == set(range(17, 25))  # the first place where it may be cut is after index 16


# ---- Posts: posts and summaries --------------------------------------------------------------------------------

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


@pytest.fixture(scope="module")
def posts() -> list[tuple[list[generators.Fact], dict[str, str]]]:
    rng = random.Random(5)
    return [generators.write_post(rng) for _ in range(1000)]


def test_a_post_tells_its_facts_and_no_others(posts):
    for told, post in posts:
        facts = [" ".join(fact) for fact in told]
        assert facts_of(post["post"]) == facts
        assert [" ".join(match.groups()) for match in posts_world.FACT.finditer(post["post"])] == facts
        assert len(facts) == generators.FACTS
        assert all(len(set(words)) == generators.FACTS for words in zip(*told, strict=True))  # each does one thing


def test_a_post_is_two_lines_of_sentences_about_two_of_its_people(posts):
    places = {word for words in tales.SLOTS["place"] for word in words}
    for told, post in posts:
        assert set(post) == {"subreddit", "title", "post"}
        first, second = post["post"].split("\n")
        assert first.endswith(".") and second.endswith(".")
        assert post["post"].count(".") == generators.FACTS + generators.ASIDES
        assert post["title"] in {f"{who} and {whom}" for who, _, whom in told}
        assert post["subreddit"] in places
        assert "{" not in post["post"]
    assert len({post["post"] for _, post in posts}) == len(posts)


def test_inventions_are_no_facts(posts):
    rng = random.Random(6)
    for told, _ in posts[:300]:
        invention = generators.invent(rng, told)
        assert all(word not in known for word, known in zip(invention, zip(*told, strict=True), strict=True))
        assert facts_of(" ".join(invention)) == [" ".join(invention)]


@pytest.mark.parametrize("mentioned", [1, 4, 6, 7])
def test_a_summary_has_the_facts_in_the_order_of_the_post(posts, mentioned):
    rng = random.Random(7)
    for told, _ in posts[:100]:
        statements = generators.write_summary(rng, told, mentioned, 0.0, 0.0).removesuffix(".").split(". ")
        facts = [" ".join(fact) for fact in told]
        assert len(statements) == min(mentioned, 6) and set(statements) <= set(facts)
        assert statements == sorted(set(statements), key=facts.index)


def test_inventions_and_repetitions_take_the_place_of_facts(posts):
    rng = random.Random(17)
    invented = repeated = 0
    for told, _ in posts:
        facts = {" ".join(fact) for fact in told}
        statements = generators.write_summary(rng, told, 5, 0.5, 0.0).removesuffix(".").split(". ")
        invented += sum(statement not in facts for statement in statements)
        assert len(statements) == 5
        statements = generators.write_summary(rng, told, 5, 0.0, 0.25).removesuffix(".").split(". ")
        repeated += 5 - len(set(statements))
        assert len(statements) == 5 and set(statements) <= facts
    assert invented / 5000 == pytest.approx(0.5, abs=4 * math.sqrt(0.25 / 5000))
    assert repeated / 4000 == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / 4000))  # the first never is one


def test_people_mention_the_first_two_to_five_of_six_facts_and_invent_one_in_seven(posts):
    rng = random.Random(8)
    lengths, invented = [], 0
    for told, _ in posts:
        statements = generators.write_reference(rng, told).removesuffix(".").split(". ")
        facts = [" ".join(fact) for fact in told]
        lengths.append(len(statements))
        invented += sum(statement not in facts for statement in statements)
        assert all(a == b or a not in facts for a, b in zip(statements, facts, strict=False))
    assert set(lengths) == {2, 3, 4, 5}
    assert invented / sum(lengths) == pytest.approx(0.15, abs=4 * math.sqrt(0.15 * 0.85 / sum(lengths)))


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
def test_gold_scores_of_summaries(response, expected):
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


@pytest.fixture(scope="module")
def comparisons() -> tuple[list[dict[str, Any]], float]:
    return generators.write_comparisons(random.Random(9), 4000, "train")


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
    firsts = probabilities(rows, generators.PREFERENCE_NOISE)
    for low, high in ((0, 1), (0, 0.05), (0.05, 0.3), (0.3, 0.7), (0.7, 0.95), (0.95, 1)):
        chosen = [(p, row["choice"] == 0) for p, row in zip(firsts, rows, strict=True) if low <= p <= high]
        expected = sum(p for p, _ in chosen)
        deviation = math.sqrt(sum(p * (1 - p) for p, _ in chosen))
        assert abs(sum(first for _, first in chosen) - expected) < 4 * deviation
        assert len(chosen) > 100


@pytest.mark.parametrize("temperature", [0.05, 0.5, 5.0])
def test_the_ceiling_is_the_mean_of_the_larger_probability(temperature):
    rows, ceiling = generators.write_comparisons(random.Random(3), 200, "train", temperature)
    larger = [max(p, 1 - p) for p in probabilities(rows, temperature)]
    assert ceiling == pytest.approx(statistics.fmean(larger), abs=1e-9)
    # A judge who knows the formula reaches it.
    right = sum(
        (p > 0.5) == (row["choice"] == 0) for p, row in zip(probabilities(rows, temperature), rows, strict=True)
    )
    assert right / 200 == pytest.approx(ceiling, abs=4 * math.sqrt(0.25 / 200))


def test_confidence_is_one_to_nine():
    seen = set()
    rows, _ = generators.write_comparisons(random.Random(9), 4000, "train", 0.5)
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

    # What the world says of its own truth, by the formulas.
    sure = [max(p, 1 - p) for p in probabilities(files["comparisons_validation"], generators.PREFERENCE_NOISE)]
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
        reference = f" {generators.write_reference(rng, told)}<|endoftext|>"
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
    assert task.query_length + max(task.comparison_length, task.response_length) <= 256
    assert (task.posts, task.comparisons) == ("posts", "posts")


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
        post, *replies = generators.write_thread(rng).split("\n\nREPLY: ")
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
        text = generators.write_quotes(rng)
        facts = facts_of(text)[-5:]
        first, rest = text[: -2 * len(" ".join(facts)) - 12], text[-2 * len(" ".join(facts)) - 11 :]
        assert set(check_reply(first, facts)) == set(facts) and len(set(facts)) == 5
        assert set(facts_of(rest)[:5]) == set(facts) and len(facts_of(rest)) == 10 and "again" not in rest


# ---- Sums: problems and pupils ---------------------------------------------------------------------------------

SUMS = generators.Sums()
ANY_NAME = "|".join(tales.NAMES.split())

MEANINGS = [
    (rf"(?:{ANY_NAME}) gives (?:her|him) (\d+)\.", lambda n, by: n + by),
    (r"(?:She|He) (?:finds|buys) (\d+)\.", lambda n, by: n + by),
    (rf"(?:She|He) gives (?:{ANY_NAME}) (\d+)\.", lambda n, by: n - by),
    (r"(?:She|He) (?:loses|sells) (\d+)\.", lambda n, by: n - by),
    (r"Then (?:she|he) has (\d+) times as many\.", lambda n, by: n * by),
    (rf"(?:{ANY_NAME}) makes them (\d+) times as many\.", lambda n, by: n * by),
]
WOMEN = {"Mara", "Ilse", "Petra", "Hanna", "Dorothea", "Clara"}


def read_problem(question: str) -> list[int]:
    """How many things there are at first and after each sentence."""
    first, *events, asked = re.findall(r"[^.?]+[.?]", question)
    name, number, things = re.fullmatch(rf"({ANY_NAME}) has (\d+) (\w+)\.", first).groups()
    assert asked == f" How many {things} does {name} have?"
    others = r"\b[Hh](e|im)\b" if name in WOMEN else r"\b([Ss]he|her)\b"
    assert not re.search(others, question) and question.count(name) == 2
    numbers = [int(number)]
    for event in events:
        (found,) = [
            means(numbers[-1], int(match[1]))
            for pattern, means in MEANINGS
            if (match := re.fullmatch(pattern, event.strip()))
        ]
        numbers.append(found)
    return numbers


def equations(solution: str) -> list[tuple[int, str, int, int]]:
    return [(int(a), o, int(b), int(c)) for a, o, b, c in re.findall(r"(\d+)([-+*])(\d+)=(\d+)", solution)]


def holds(equation: tuple[int, str, int, int]) -> bool:
    a, operation, b, c = equation
    return {"+": a + b, "-": a - b, "*": a * b}[operation] == c


@pytest.fixture(scope="module")
def found() -> list[generators.Problem]:
    return generators.write_problems(random.Random(3), 2_000, SUMS, set())


def test_a_problem_says_what_its_steps_do(found):
    for problem in found:
        numbers = read_problem(problem.question)
        assert numbers[0] == problem.first and 2 <= problem.first <= SUMS.largest_first
        for (operation, by), before, after in zip(problem.steps, numbers[:-1], numbers[1:], strict=True):
            assert generators.apply((operation, by), before) == after and 2 <= by <= SUMS.largest
        assert all(0 < number <= generators.MOST for number in numbers)


def test_one_to_four_steps_are_equally_likely_and_all_operations_occur(found):
    counts = Counter(len(problem.steps) for problem in found)
    assert set(counts) == {1, 2, 3, 4}
    # Fewer problems of one step differ from each other.
    assert all(count == pytest.approx(500, abs=4 * math.sqrt(2_000 * 0.25 * 0.75)) for count in counts.values())
    operations = Counter(operation for problem in found for operation, _ in problem.steps)
    assert min(operations[operation] for operation in "+-*") > 500


def test_no_two_problems_are_equal(found):
    taken = {problem.question for problem in found}
    assert len(taken) == len(found)
    more = generators.write_problems(random.Random(3), 300, SUMS, taken)  # begins with the same ones
    assert len(taken) == len(found) + 300
    assert not {problem.question for problem in more} & {problem.question for problem in found}


def test_who_never_errs_is_right_step_by_step(found):
    rng = random.Random(4)
    for problem in found[:500]:
        numbers = read_problem(problem.question)
        terse, wordy = (generators.solve(rng, problem, 0.0, share) for share in (0.0, 1.0))
        assert terse.splitlines()[-1] == wordy.splitlines()[-1] == f"#### {numbers[-1]}"
        assert equations(terse) == equations(wordy) and all(map(holds, equations(terse)))
        assert [(a, c) for a, _, _, c in equations(terse)] == list(itertools.pairwise(numbers))
        assert re.fullmatch(r"(\d+[-+*]\d+=\d+\n)+#### \d+", terse)
        assert re.sub(r"^[A-Z].*\. (?=\d)", "", wordy, flags=re.MULTILINE) == terse
        said = [line[: line.index(". ") + 1] for line in wordy.splitlines()[:-1]]
        assert said == [event.strip() for event in re.findall(r"[^.?]+[.?]", problem.question)[1:-1]]


def test_every_error_is_one(found):
    """A false equation, a right one of another step, or none: and the number is not the one that the step gives."""
    rng, kinds = random.Random(5), Counter()
    for problem in found:
        (operation, by), before = problem.steps[0], problem.first
        line, after = generators.err(rng, (operation, by), before)
        assert after != read_problem(problem.question)[1] and 0 <= after <= generators.MOST_OF_PUPILS
        if not line:
            kinds["forgets"] += 1
            assert after == before
            continue
        ((a, o, b, c),) = equations(line)
        assert a == before and c == after
        kind = "confuses" if o != operation else "misreads" if b != by else "slips"
        assert holds((a, o, b, c)) == (kind != "slips")
        kinds[kind] += 1
    assert set(kinds) == set(generators.ERRORS) and min(kinds.values()) > 300


def test_who_errs_goes_on_with_the_wrong_number(found):
    rng = random.Random(6)
    for problem in found:
        solution = generators.solve(rng, problem, 0.5, 0.0)
        numbers, lines = [problem.first], equations(solution)
        for a, _, _, c in lines:
            assert a == numbers[-1]
            numbers.append(c)
        assert solution.splitlines()[-1] == f"#### {numbers[-1]}"
        assert all(0 <= number <= generators.MOST_OF_PUPILS for number in numbers)


@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_a_pupil_errs_as_often_as_the_world_says(found, rate):
    rng = random.Random(7)
    alone = [problem for problem in found if len(problem.steps) == 1] * 4
    wrong = sum(generators.solve(rng, p, rate, 0.0).split()[-1] != str(read_problem(p.question)[1]) for p in alone)
    deviation = math.sqrt(rate * (1 - rate) / len(alone))
    assert wrong / len(alone) == pytest.approx(rate, abs=4 * deviation + 1e-9)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_some_pupils_say_what_happened(found, share):
    rng = random.Random(8)
    wordy = sum("." in generators.solve(rng, problem, 0.0, share) for problem in found)
    assert wordy / len(found) == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / len(found)))


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_some_pupils_stop_after_two_steps(found, share):
    """What they write is right as far as it goes, and they say that it is all."""
    rng, stopped, long = random.Random(10), 0, 0
    for problem in found:
        numbers = read_problem(problem.question)
        solution = generators.solve(rng, problem, 0.0, 0.5, share)
        done = len(equations(solution))
        assert done in {len(numbers) - 1, min(len(numbers) - 1, 2)} and solution.endswith(f"\n#### {numbers[done]}")
        stopped, long = stopped + (done < len(numbers) - 1), long + (len(numbers) > 3)
    assert stopped / long == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / long))


def test_a_world_holds_problems_model_and_facts(tiny_sums):
    train, test = (rows_of(tiny_sums / f"problems_{split}.jsonl") for split in ("train", "test"))
    assert (len(train), len(test)) == (64, 32)
    questions = [row["question"] for row in train + test]
    assert len(set(questions)) == 96  # nothing that is held out is trained on
    for row in train + test:
        numbers = read_problem(row["question"])
        assert row["answer"].endswith(f"\n#### {numbers[-1]}") and row["steps"] == len(numbers) - 1
    facts = json.loads((tiny_sums / "world.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(tiny_sums / "model")
    assert facts["parameters"] == sum(parameter.numel() for parameter in model.parameters())


def test_the_task_reads_the_world_and_all_of_it_fits(tiny_sums, found):
    task = dataclasses.replace(problems.TASKS["sums"], problems=str(tiny_sums))
    tokenizer = AutoTokenizer.from_pretrained(tiny_sums / "model")
    train, test = (problems.read_problems(task, tokenizer, split) for split in ("train", "test"))
    assert (len(train), len(test), train.too_long, train.unscorable) == (64, 32, 0, 0)
    assert test.texts[0].endswith("have?\n") and set(train.kinds) == {"1", "2", "3", "4"}
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("12+7=19")) == list("12+7=19")
    rng = random.Random(9)
    lengths = [
        (len(tokenizer.encode(f"{p.question}\n")), len(tokenizer.encode(generators.solve(rng, p, 0.1, 0.5))) + 1)
        for p in found
    ]
    prompt, response = (max(column) for column in zip(*lengths, strict=True))
    assert prompt <= task.prompt_length and response <= task.response_length
    assert task.prompt_length + task.response_length <= 160
    right = [len(tokenizer.encode(generators.solve(rng, p, 0.0, 0.5))) + 1 for p in found]
    assert max(right) >= 4 * min(right)  # so that what lengths do shows


def test_a_model_learns_to_end(tiny_sums):
    """It reads prompts and learns solutions only, and the end behind them."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_sums / "model")
    args = dataclasses.replace(TINY_SUMS, lm_steps=200, lm_lr=1e-2)
    model, loss = generators.train_llama([("12?\n", "#### 7"), ("345?\n", "#### 89")], tokenizer, args, "cpu")
    assert loss < 0.1
    for prompt, solution in (("12?\n", "#### 7<|endoftext|>"), ("345?\n", "#### 89<|endoftext|>")):
        ids = torch.tensor([tokenizer.encode(prompt)])
        for _ in tokenizer.encode(solution):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(2)], dim=1)
        assert tokenizer.decode(ids[0]) == prompt + solution


def test_sums_is_the_name_of_model_and_problems():
    world = worlds.DATA / "sums"
    assert worlds.find_value("base_model", "sums") == f"{world}/model"
    where, _ = next(iter(problems.load_rows("sums", "problems", "train")))
    assert where.startswith(f"{world}/problems_train.jsonl")
    assert worlds.find_value("task.problems", "gsm8k") == "gsm8k"
