"""tales.py: the grammar, the annotators, and the world that is built from them."""

import dataclasses
import json
import math
import os
import random
import re
import shutil
import time
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo_rlhf import train_policy
from ppo_rlhf.lib.data.label_files import read_labels
from ppo_rlhf.lib.data.texts import QueryStream, TaskArgs, to_texts
from ppo_rlhf.worlds import building, tales

SENTENCES = 14


@pytest.fixture(scope="module")
def stories() -> list[str]:
    rng = random.Random(5)
    return [tales.write_story(rng, SENTENCES) for _ in range(4000)]


@pytest.fixture(scope="module")
def words(stories) -> Counter:
    return Counter(word for story in stories for word in re.findall(r"\w+", story))


# ---- Stories ---------------------------------------------------------------------------------------------------


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
        assert len(sentences) == SENTENCES
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


def test_the_same_seed_writes_the_same_story():
    first, again, other = (tales.write_story(random.Random(seed), SENTENCES) for seed in (1, 1, 2))
    assert first == again != other


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


# ---- The annotators --------------------------------------------------------------------------------------------


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
    best, largest = tales.sentiment.choose_best(torch.tensor([gold_scores] * draws).float(), temperature, rng)
    counts = torch.bincount(best, minlength=len(expected)).double()
    probabilities = torch.tensor(expected).double()
    deviation = (probabilities * (1 - probabilities) * draws).sqrt()
    assert ((counts - probabilities * draws).abs() <= 4 * deviation + 1e-9).all()
    torch.testing.assert_close(largest, torch.full((draws,), max(expected)).double(), atol=1e-6, rtol=0)


def test_the_annotator_reads_each_row_by_itself():
    gold_scores = torch.tensor([[0.0, 50.0], [50.0, 0.0], [0.0, 50.0]])
    best, largest = tales.sentiment.choose_best(gold_scores, 0.5, torch.Generator())
    assert best.tolist() == [1, 0, 1]
    assert largest.tolist() == [1, 1, 1]


# ---- The tokenizer ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(stories):
    return tales.train_tokenizer(stories, tales.TalesArgs().vocab_size)


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
    assert len(tokenizer) <= tales.TalesArgs().vocab_size
    assert tokenizer.eos_token_id == 0


# ---- The world -------------------------------------------------------------------------------------------------


def label_bytes(world) -> dict[str, bytes]:
    return {name: (world / "labels" / name / "offline_5k.json").read_bytes() for name in tales.ANNOTATORS}


def test_the_default_world_has_published_sizes():
    args = tales.TalesArgs()
    assert (args.train_comparisons, args.test_comparisons) == (4992, 1024)
    assert args.stories >= 20_000


def test_a_world_holds_stories_model_and_labels(tiny_world, tiny_world_args):
    rng = random.Random(tiny_world_args.seed)
    stories = (tiny_world / "stories.txt").read_text().splitlines()
    assert stories == [tales.write_story(rng, SENTENCES) for _ in range(tiny_world_args.stories)]
    tokenizer = AutoTokenizer.from_pretrained(tiny_world / "model")
    model = AutoModelForCausalLM.from_pretrained(tiny_world / "model")
    assert model.config.vocab_size == len(tokenizer)
    assert (model.config.hidden_size, model.config.num_hidden_layers) == (16, 1)
    facts = json.loads((tiny_world / "world.json").read_text())
    assert facts["settings"] == dataclasses.asdict(tiny_world_args)
    assert facts["parameters"] == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["sentiment", "descriptiveness"])
def test_labels_are_read_like_those_of_people(tiny_world, tiny_world_args, name):
    path = tiny_world / "labels" / name / "offline_5k.json"
    tokenizer = AutoTokenizer.from_pretrained(tiny_world / "model")
    pad_id = len(tokenizer)
    task = TaskArgs(query_dataset=str(tiny_world / "stories.txt"), query_length=24)
    labels = read_labels(str(path), task, tokenizer)
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
    temperature = tiny_world_args.annotator_temperature
    largest = [1 / sum(math.exp((score - max(four)) / temperature) for score in four) for four in fours]
    assert labels.ceiling == pytest.approx(sum(largest) / len(largest), abs=1e-9)


def test_continuations_are_cut_after_a_full_stop(tmp_path, monkeypatch, tiny_world, tiny_world_args):
    tokenizer = AutoTokenizer.from_pretrained(tiny_world / "model")
    (full_stop,) = tokenizer.encode(".")

    def generate(model, queries, uniforms, *_):
        return (torch.where(uniforms < 0.2, full_stop, 300),)

    monkeypatch.setattr(train_policy, "generate", generate)
    world = shutil.copytree(tiny_world, tmp_path / "world", ignore=shutil.ignore_patterns("labels"))
    tales.simulate_comparisons(world, tiny_world_args, "cpu")
    rows = json.loads((world / "labels" / "sentiment" / "offline_5k.json").read_text())
    lengths = Counter()
    for sample in [row[f"sample{i}"] for row in rows for i in range(4)]:
        length = sample.index(50259) if 50259 in sample else 24
        assert set(sample[length:]) <= {50259}
        assert full_stop not in sample[16 : length - 1]
        assert length == 24 or sample[length - 1] == full_stop
        lengths[length] += 1
    assert set(lengths) == set(range(17, 25))  # the first place where it may be cut is after index 16


def test_the_world_is_built_once(tmp_path, monkeypatch):
    built = []

    def build(folder, args):
        built.append(args)
        folder.mkdir(parents=True)

    monkeypatch.setenv("PPO_RLHF_CACHE", str(tmp_path))
    monkeypatch.setattr(tales, "build_world", build)
    first, again, other = (tales.find_world(tales.TalesArgs(seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert first.parent == tmp_path
    assert [args.seed for args in built] == [1, 2]


def test_another_grammar_makes_another_world(tmp_path, monkeypatch):
    monkeypatch.setenv("PPO_RLHF_CACHE", str(tmp_path))
    monkeypatch.setattr(tales, "build_world", lambda folder, args: folder.mkdir(parents=True))
    first = tales.find_world()
    monkeypatch.setattr(tales, "TEMPLATES", tales.TEMPLATES[:5])
    assert tales.find_world() != first


def test_only_the_first_process_builds(tmp_path, monkeypatch):
    monkeypatch.setenv("PPO_RLHF_CACHE", str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    waits = []

    def first_process_builds(seconds):
        waits.append(seconds)
        monkeypatch.setenv("RANK", "0")
        tales.find_world()
        monkeypatch.setenv("RANK", "1")

    monkeypatch.setattr(tales, "build_world", lambda folder, args: folder.mkdir(parents=True))
    monkeypatch.setattr(building.time, "sleep", first_process_builds)
    assert tales.find_world().exists()
    assert len(waits) == 1


@pytest.mark.parametrize("stage", ["train_tokenizer", "train_language_model", "simulate_comparisons"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_nothing_half_built(tmp_path, monkeypatch, tiny_world_args, stage, error):
    def fail(*_):
        raise error

    monkeypatch.setenv("PPO_RLHF_CACHE", str(tmp_path))
    monkeypatch.setattr(tales, stage, fail)
    with pytest.raises(error):
        tales.find_world(dataclasses.replace(tiny_world_args, stories=40, lm_steps=1))
    assert list(tmp_path.iterdir()) == []


def test_what_killed_builds_have_left_is_removed(tmp_path, monkeypatch):
    """But not what may still be built, nor what belongs to another world."""
    for name in ("world.a.tmp", "world.b.tmp", "world", "world2.a.tmp", "my-world.a.tmp", "world.a"):
        (tmp_path / name / "model").mkdir(parents=True)
        os.utime(tmp_path / name, (0, time.time() - 3600 * (1 if ".b." in name else 25)))
    found = building.begin_building(tmp_path / "world")
    left = {"world.b.tmp", "world", "world2.a.tmp", "my-world.a.tmp", "world.a", found.name}
    assert {path.name for path in tmp_path.iterdir()} == left and list(found.iterdir()) == []


def test_the_same_settings_give_the_same_world(tmp_path, monkeypatch, tiny_world, tiny_world_args):
    monkeypatch.setenv("PPO_RLHF_CACHE", str(tmp_path))
    torch.rand(7)  # the state of the global generator must not matter
    again = tales.find_world(tiny_world_args)
    assert again.name == tiny_world.name
    assert again != tiny_world
    assert label_bytes(again) == label_bytes(tiny_world)
    for file in ("stories.txt", "world.json", "model/model.safetensors", "model/tokenizer.json"):
        assert (again / file).read_bytes() == (tiny_world / file).read_bytes()


def test_another_seed_gives_another_world(tmp_path, monkeypatch, tiny_world, tiny_world_args):
    monkeypatch.setenv("PPO_RLHF_CACHE", str(tmp_path))
    other = tales.find_world(dataclasses.replace(tiny_world_args, seed=2))
    for name, content in label_bytes(other).items():
        assert content != label_bytes(tiny_world)[name]
    assert (other / "stories.txt").read_text() != (tiny_world / "stories.txt").read_text()


def test_a_world_that_cannot_get_its_name_is_an_error(tiny_world_args, tmp_path, monkeypatch):
    def refuse(path, target):
        raise PermissionError(13, "Permission denied", str(target))

    monkeypatch.setattr(tales, "train_language_model", lambda *args: (FakeModel(), 1.0))
    monkeypatch.setattr(tales, "simulate_comparisons", lambda *args: {})
    monkeypatch.setattr(tales.Path, "rename", refuse)
    with pytest.raises(PermissionError):
        tales.build_world(tmp_path / "world", tiny_world_args)
    assert list(tmp_path.iterdir()) == []


class FakeModel:
    def save_pretrained(self, folder):
        pass

    def num_parameters(self):
        return 0
