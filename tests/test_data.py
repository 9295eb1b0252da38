"""text_sources.py, label_files.py and models.py: texts, queries, label files, and what bad input gets."""

import copy
import dataclasses
import functools
import json
import random
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
import torch
from runs import error_line
from tokenizers.processors import TemplateProcessing

from ppo_rlhf import sample, train_policy, worlds
from ppo_rlhf.lib import hub, label_files, pretrained, published_texts, reward_functions, text_sources
from ppo_rlhf.tldr import posts, posts as posts_of_chapter_2
from ppo_rlhf.train_policy import QueryStream, TaskArgs

PAD = 95


class Letters:
    """A tokenizer of printable ASCII characters: " " is 0, "." is 14, "a" is 65."""

    eos_token_id = None

    def get_vocab(self) -> dict[str, int]:
        return {chr(token + 32): token for token in range(95)}

    def encode(self, text: str, **_) -> list[int]:
        return [ord(letter) - 32 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(token + 32) for token in ids)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# ---- Cleaning --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("By . Ann Writer .\nPUBLISHED: .\nStory.\nMore.", "Story.\nMore."),
        ("Bystanders ran.\nSecond.\nThird.", "Third."),  # the original looks at two letters only
        ("Not By anyone.\nSecond.", "Not By anyone.\nSecond."),
        ("London (CNN) -- It rained.", "It rained."),
        ("London (CNN)    -- It rained.", "It rained."),
        ("A\n(CNN) -- One.\nB (CNN) -- Two.", "Two."),
        ("London (CNN) It rained.", "It rained."),
        ("(CNN)One (CNN)Two.", "Two."),
        ("x" * 100 + " (CNN) It rained.", "x" * 100 + " (CNN) It rained."),
        ("x" * 95 + "(CNN) Rain.", "Rain."),  # characters 95 to 99: just within the first hundred
        ("x" * 96 + "(CNN) Rain.", "x" * 96 + "(CNN) Rain."),
        ("and Reporter\nIt rained.", "It rained."),
        ("and two words\nIt rained.", "and two words\nIt rained."),
        ("It rained.\nand Reporter\nEnd.", "It rained.\nand Reporter\nEnd."),
        ("PUBLISHED: 1 May .\nUPDATED: 09:15 EST, 5 June 2013 .\nRain.", ".\nRain."),
        ("Old.\nUPDATED:\n\n21:45 GMT, 7 March 2012\nMid.\nUPDATED: 07:00 GMT, 8 March 2012\nNew.", "New."),
        ("UPDATED: today\nRain.", "UPDATED: today\nRain."),
        ("He said \u2018no\u2019.", "He said 'no'."),
        ("\n  Rain.  \n", "Rain."),
        ("It cost Â£5 & more.", "It cost £5 & more."),
        ("One.\n\nTwo.\n\n\n\n\nThree.", "One.\n\nTwo.\n\nThree."),
        ("Rain.\n\n@highlight\n\nWet.\n\n@highlight\n\nVery.", "Rain."),
        (
            "By Ann\n\nUPDATED: 10:00 EST, 1 May 2012\n\n\u2018Rain\u2019 fell.\n\n\n\nWind.\n\n@highlight\n\nWet.",
            "'Rain' fell.\n\nWind.",
        ),
    ],
)
def test_clean_cnndm(text, expected):
    assert published_texts.clean_cnndm(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  one\n\n\n\ntwo \n", "one\n\ntwo"),
        ("one\n\n\ntwo", "one\n\ntwo"),
        ("one\n\ntwo\nthree", "one\n\ntwo\nthree"),
        ("itâ€™s “fine”", 'it\'s "fine"'),
        ("By me\nsecond\nthird @highlight", "By me\nsecond\nthird @highlight"),
    ],
)
def test_clean_tldr(text, expected):
    assert published_texts.clean_tldr(text) == expected


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (["it rained .", "he slept ."], "it rained. he slept."),
        (["`` i do n't know , '' he said .\n"], '"i don\'t know," he said.'),
        (["she 'd left ; it 's late : they 're here , i 'm sure , we 've time , you 'll see !"],
         "she'd left; it's late: they're here, i'm sure, we've time, you'll see!"),
        (["why ?", "( it cost $ 5 [ or 6 % ] )"], "why? (it cost $5 [or 6%])"),
        (["the 'some ' word"], "the 'some ' word"),
    ],
)  # fmt: skip
def test_join_book_rows(rows, expected):
    assert published_texts.join_book_rows(rows) == expected


# ---- Texts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("t.txt", "one.\n\n  \ntwo é.\r\nthree", ["one.", "two é.", "three"]),
        ("t.jsonl", '"one"\n\n{"text": "two\\nlines", "id": 7}\n" "\n', ["one", "two\nlines"]),
        ("t.jsonl", '"one\u2028line"\n"two"\n', ["one\u2028line", "two"]),
        ("t.json", '["one", {"text": "two"}, ""]', ["one", "two"]),
        ("t.json", "[]", []),
    ],
)
def test_read_text_file(tmp_path, name, content, expected):
    path = write(tmp_path / name, content)
    assert text_sources.read_text_file(path) == expected
    assert list(text_sources.load_texts(str(path))) == expected


def test_dummy_texts_are_forty_letters_and_full_stops():
    found = text_sources.load_texts("dummy")
    assert all(len(text) == 40 and set(text) <= set("abcdefghijklmnopqrstuvwxyz.") for text in found)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("source", [".", "stories.txt", "s.jsonl", "s.json"])
def test_every_fiftieth_story_is_held_out(tmp_path, source):
    stories = [f"story {number}" for number in range(120)]
    write(tmp_path / "stories.txt", "\n".join(stories) + "\n")
    write(tmp_path / "s.jsonl", "\n".join(map(json.dumps, stories)))
    write(tmp_path / "s.json", json.dumps(stories))
    train, test, both = (
        list(text_sources.load_texts(str(tmp_path / source), split)) for split in ("train", "test", "all")
    )
    assert test == ["story 49", "story 99"]
    assert train == [story for story in stories if story not in ("story 49", "story 99")]
    assert both == stories


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tldr", b'[{"content": "one"}, {"content": ', "JSONDecodeError"),
        ("tldr", b'[{"text": "one"}]', "content"),
        ("cnndm", b"no archive", "ReadError"),
    ],
)
def test_what_came_from_the_hub_broken_is_an_error(monkeypatch, tmp_path, name, content, reason):
    """And no half of a table is left that the next start would take for the whole."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "broken").write_bytes(content)
    ids = tmp_path / "ids.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": ["a"]}), ids)
    downloads = {"tldr": "broken", "cnndm": "broken", "cnndm splits": "ids.parquet"}
    for key, file in downloads.items():
        given = SimpleNamespace(download=lambda split="", file=file: (str(tmp_path / file),))
        monkeypatch.setitem(published_texts.HUB_FILES, key, given)
    for _ in range(2):
        message = error_line(text_sources.load_texts, name)
        assert f"--task.query_dataset {name}" in message and reason in message


@pytest.fixture
def connections(monkeypatch):
    """Hosts that somebody tried to reach; nobody reaches them."""
    hosts = []

    def getaddrinfo(host, *_, **__):
        hosts.append(host)
        raise socket.gaierror("tests have no network")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    hub.hub_is_reachable.cache_clear()
    return hosts


@pytest.mark.parametrize("name", ["books", "cnndm", "tldr"])
def test_texts_that_the_hub_does_not_give(monkeypatch, connections, name):
    nowhere = hub.HubFiles(repository="nobody/no-such-texts", names=("none.txt",))
    monkeypatch.setitem(published_texts.HUB_FILES, name, nowhere)
    message = error_line(text_sources.load_texts, name)
    assert f"--task.query_dataset {name}" in message
    for advice in ("without a network", ".txt, .jsonl or .json file", "--preset tales"):
        assert advice in message
    assert not connections  # the tests set HF_HUB_OFFLINE


def test_a_folder_may_have_an_at_sign_in_its_name(monkeypatch, tiny_world, tmp_path):
    """It names no revision."""
    shutil.copytree(tiny_world / "model", tmp_path / "model@refs")
    monkeypatch.chdir(tmp_path)
    assert len(pretrained.load_tokenizer("model@refs")) == len(pretrained.load_tokenizer(str(tiny_world / "model")))
    assert train_policy.load_pretrained("model@refs", torch.float32).config.n_layer == 1


@pytest.mark.parametrize("path", ["models/a-run/sft", "./model", "../model", "/no/such/model", "~/model", "model/"])
def test_of_a_model_that_is_meant_to_be_a_folder_nothing_is_said_of_the_hub(connections, path):
    message = error_line(pretrained.load_tokenizer, path)
    assert message.startswith(f"--base_model {path}: no such folder; give the folder") and "hub" not in message
    assert not connections


# ---- Paths -----------------------------------------------------------------------------------------------------


def test_names_of_worlds_become_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tales").mkdir()  # a world, though a folder of that name lies here
    for argument, value in (("base_model", "gpt3"), ("label_dataset", "tales"), ("task.posts", "tales")):
        assert worlds.find_value(argument, value) == value
    world = worlds.DATA / "tales"
    with pretrained.model_errors("tales") as place:
        assert place == (f"{world}/model", None)
    labels = label_files.find_label_file("sentiment/offline_5k.json", "tales")
    assert labels == world / "labels/sentiment/offline_5k.json"
    assert list(text_sources.load_texts("tales")) == list(text_sources.load_texts(str(world)))
    where, _ = next(iter(posts_of_chapter_2.load_rows("posts", "comparisons", "train")))
    assert where.startswith(f"{worlds.DATA}/posts/comparisons_train.jsonl")
    assert posts_of_chapter_2.known_ceiling("posts") > 0.5


# ---- Queries ---------------------------------------------------------------------------------------------------


def test_ids_may_have_a_hole(tokenizer_with_a_hole, tmp_path):
    """The padding id is above all of them, so that it is none."""
    tokenizer = tokenizer_with_a_hole
    assert len(tokenizer) == 29 and tokenizer.encode("z") == [29]
    write(tmp_path / "texts.txt", "a z b.")
    task = TaskArgs(
        query_dataset=str(tmp_path / "texts.txt"),
        query_length=8,
        response_length=2,
        start_text=None,
        truncate_after=0,
    )
    ids = train_policy.task_ids(task, tokenizer)
    assert ids.pad == 30 and posts_of_chapter_2.task_ids(posts_of_chapter_2.TaskArgs(), tokenizer).pad == 30
    assert QueryStream(task, tokenizer).next_batch(1, ids.pad).tolist() == [[0, 27, 29, 27, 1, 26, 30, 30]]
    row = {"query": [29] + [50259] * 7, "sample0": [29, 1], "sample1": [1, 50259], "best": 0}
    write(tmp_path / "labels.json", json.dumps([row]))
    write(tmp_path / "labels.meta.json", '{"vocab_size": 30}')
    labels = label_files.read_labels(str(tmp_path / "labels.json"), task, tokenizer)
    assert (labels.queries.tolist(), labels.samples.tolist()) == ([[29] + [30] * 7], [[[29, 1], [1, 30]]])


def test_a_special_token_whose_name_stands_in_a_text_is_text(tiny_tokenizer, tmp_path):
    """In queries and prompts. Arguments may name one on purpose."""
    as_text = [26, 4, 14, 18, 26]  # < and > are none of its letters and read as the full stop
    write(tmp_path / "texts.txt", "a<eos>b")
    task = TaskArgs(
        query_dataset=str(tmp_path / "texts.txt"), query_length=7, query_prefix="<eos>", truncate_text="<eos>"
    )
    task = dataclasses.replace(task, start_text=None, end_text=None)
    ids = train_policy.task_ids(task, tiny_tokenizer)
    assert (ids.stop, ids.prefix) == (28, [28])
    assert QueryStream(task, tiny_tokenizer).next_batch(1, ids.pad).tolist() == [[0, *as_text, 1]]
    (query,) = sample.read_queries(task, ids, tiny_tokenizer, prompts=["a<eos>b"])
    assert query.tokens == [0, *as_text, 1]


def make_stream(path: Path, texts: list[str], position: int = 0, split: str = "train", **task) -> QueryStream:
    write(path, json.dumps(texts))
    task = {"query_length": 6, "start_text": None, "end_text": None} | task
    return QueryStream(TaskArgs(query_dataset=str(path), **task), Letters(), position, split)


def as_texts(queries: torch.Tensor) -> list[str]:
    return posts.to_texts(Letters(), queries, PAD)


def batch_texts(stream: QueryStream, size: int) -> list[str]:
    return as_texts(stream.next_batch(size, PAD))


@pytest.fixture
def texts_file(tmp_path):
    return tmp_path / "texts.json"


def test_a_folder_may_have_texts_of_its_own_for_tests(tmp_path):
    write(tmp_path / "stories.txt", "\n".join(f"train {number}" for number in range(60)))
    write(tmp_path / "stories_test.txt", "one\ntwo\n")
    splits = {split: list(text_sources.load_texts(str(tmp_path), split)) for split in ("train", "test", "all")}
    assert splits["test"] == ["one", "two"]
    assert len(splits["train"]) == 60  # none of these is held out
    assert splits["all"] == splits["train"] + splits["test"]


def test_the_order_of_queries_depends_on_nothing_but_their_number(texts_file):
    texts = [f"t{number}" for number in range(30)]
    order = list(range(30))
    random.Random(0).shuffle(order)
    for seed in (1, 2):
        random.seed(seed)
        torch.manual_seed(seed)
        assert batch_texts(make_stream(texts_file, texts), 30) == [texts[i] for i in order]


def test_a_stream_leaves_the_global_random_state_alone(texts_file):
    before = random.getstate()
    batch_texts(make_stream(texts_file, ["a", "b"]), 3)
    assert random.getstate() == before


@pytest.mark.parametrize("batches_before", [0, 1, 4])
def test_a_stream_goes_on_where_another_stopped(texts_file, batches_before):
    texts = [f"x.t{number}." if number % 3 else f"no stop {number}" for number in range(11)]
    task = {"start_text": ".", "end_text": "."}
    whole = make_stream(texts_file, texts, **task)
    for _ in range(batches_before):
        whole.next_batch(4, PAD)
    rest = make_stream(texts_file, texts, position=whole.position, **task)
    assert rest.position == whole.position
    for _ in range(5):
        torch.testing.assert_close(rest.next_batch(4, PAD), whole.next_batch(4, PAD))
    assert rest.position == whole.position


def test_the_batches_of_several_processes_are_slices_of_one(texts_file):
    texts = [f"t{number}" for number in range(10)]
    streams = [make_stream(texts_file, texts) for _ in range(2)]
    halves = [stream.next_batch(8, PAD)[rows] for stream, rows in zip(streams, (slice(4), slice(4, 8)), strict=True)]
    torch.testing.assert_close(torch.cat(halves), make_stream(texts_file, texts).next_batch(8, PAD))


def test_the_first_queries_are_no_more_than_there_are(texts_file):
    texts = ["x.one.", "no stop", "x.two.", "x.three."]
    stream = make_stream(texts_file, texts, start_text=".", end_text=".")
    stream.next_batch(2, PAD)
    position = stream.position
    assert sorted(as_texts(stream.first(9, PAD))) == ["one.", "three.", "two."]
    assert as_texts(stream.first(2, PAD)) == as_texts(stream.first(9, PAD))[:2]
    assert stream.position == position


def test_unusable_texts_are_skipped_and_counted(texts_file):
    texts = ["x.good one.", "no stop", "x.", "x.much too long."]
    stream = make_stream(texts_file, texts, start_text=".", end_text=".", query_length=9)
    assert stream.position == 0
    assert sorted(batch_texts(stream, 4)) == ["good one.", "good one.", "x.", "x."]
    assert stream.position - 4 in (2, 3, 4)


def test_a_text_without_tokens_is_skipped(texts_file, monkeypatch):
    monkeypatch.setattr(text_sources, "load_texts", lambda *_: ["", "ab", ""])
    stream = make_stream(texts_file, [])
    assert batch_texts(stream, 3) == ["ab"] * 3
    assert stream.position - 3 >= 4


def test_task_ids():
    task = TaskArgs(query_length=6, query_prefix="ab", query_suffix="c", truncate_text=".")
    ids = train_policy.task_ids(task, Letters())
    assert (ids.pad, ids.eos, ids.stop) == (95, -1, 14)
    assert (ids.prefix, ids.suffix, ids.context_length) == ([65, 66], [67], 9)


def test_a_tokenizer_s_first_token_is_first_in_the_context_and_nowhere_else(tiny_tokenizer, tmp_path):
    """Not in queries, which reward models read, nor in suffix, stop or prompts."""
    adds_one = copy.deepcopy(tiny_tokenizer)
    adds_one.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", adds_one.eos_token_id)]
    )
    assert adds_one.encode("ab") == [28, 0, 1]
    write(tmp_path / "texts.txt", "a.bc.d")
    task = TaskArgs(query_dataset=str(tmp_path / "texts.txt"), query_length=3, query_prefix="x", query_suffix="yz")
    ids = train_policy.task_ids(task, adds_one)
    assert (ids.prefix, ids.suffix, ids.stop, ids.context_length) == ([28, 23], [24, 25], 26, 7)
    assert QueryStream(task, adds_one).next_batch(1, ids.pad).tolist() == [[1, 2, 26]]
    whole = dataclasses.replace(task, start_text=None, end_text=None)
    assert QueryStream(whole, adds_one).next_batch(1, ids.pad).tolist() == [[0, 26, 1]]
    typed = sample.read_queries(task, ids, adds_one, prompts=["bc", "wxyz"])
    assert [query.tokens for query in typed] == [[1, 2], [22, 23, 24]]
    assert typed[0].context == [28, 23, 1, 2, 24, 25]


def test_texts_are_decoded_without_padding():
    assert posts.to_texts(Letters(), torch.tensor([[65, PAD, 66], [PAD, PAD, PAD]]), PAD) == ["ab", ""]


def double_length(queries, responses):
    return [2 * len(query + response) for query, response in zip(queries, responses, strict=True)]


def too_few(queries, responses):
    return [1.0]


def test_a_scoring_function_sees_texts():
    score = reward_functions.text_scorer("test_data:double_length", "rewards.function", Letters(), PAD)
    scores = score(torch.tensor([[65, PAD], [65, 66]]), torch.tensor([[67, PAD], [67, 68]]))
    assert scores.tolist() == [4.0, 8.0]
    message = error_line(reward_functions.text_scorer, "test_data:too_few", "rewards.function", Letters(), PAD)
    assert message == "--rewards.function test_data:too_few returned 1 scores for 2 responses"


def two(queries, responses):
    return [2.0] * len(responses)


def three(queries, responses, references):
    return [len(reference or "") for reference in references]


def three_with_a_default(queries, responses, references=None):
    return three(queries, responses, references)


def option(queries, responses, *, references=None):
    return [0.0 if references is None else 1.0 for _ in responses]


def wrapped(function):
    """The function in a wrapper that takes anything, with and without a word about what it wraps."""

    def wrapper(*texts, **options):
        return function(*texts, **options)

    return wrapper


class Callables:
    def method(self, queries, responses, references):
        return three(queries, responses, references)

    def __call__(self, queries, responses):
        return two(queries, responses)


def trl(completions, ground_truth, **kwargs):
    return [2.0 * completion.endswith(answer) for completion, answer in zip(completions, ground_truth, strict=True)]


@pytest.mark.parametrize(
    ("function", "positional", "by_name"),
    [
        (two, "qr", {}),
        (three, "qra", {}),
        (three_with_a_default, "qra", {}),
        (option, "qr", {"references": "a"}),
        (wrapped(two), "qr", {}),
        (functools.wraps(three)(wrapped(three)), "qra", {}),
        (functools.partial(lambda scale, q, r: r, 2.0), "qr", {}),
        (Callables().method, "qra", {}),
        (Callables(), "qr", {}),
        (lambda q, r, /, *rest, **options: r, "qr", {}),
        (lambda q, r, a, more=1: r, "qra", {}),
        # Names count more than places.
        (lambda completions, **columns: completions, "r", {}),
        (trl, "ra", {}),
        (lambda responses, queries: responses, "rq", {}),
        (lambda completions, prompts, answer: prompts, "rqa", {}),
        (lambda completions, scale=1.0, answer=None: scale, "r", {"answer": "a"}),
        (lambda *texts, answers, **columns: answers, "", {"answers": "a"}),
    ],
)
def test_a_function_gets_what_its_parameters_are_named_after(function, positional, by_name):
    """Or, where they have other names, queries and responses and, if there is a third, references."""
    given = reward_functions.arguments_of(function, ["q"], ["r"], ["a"])
    assert list(given.args) == [[text] for text in positional]
    assert given.kwargs == {name: [text] for name, text in by_name.items()}


def test_a_reward_function_of_another_library_sees_its_columns():
    score = reward_functions.text_scorer("test_data:trl", "rewards.function", Letters(), PAD, with_references=True)
    tokens = [torch.tensor([[letter]]) for letter in (65, 66, 66)]
    assert score(*tokens).tolist() == [2.0]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda completions, guess: 1.0, "missing a required argument: 'guess'"),
        (lambda texts: texts, "too many positional arguments"),
        (lambda a, b, c, d: a, "missing a required argument: 'd'"),
    ],
)
def test_a_function_that_cannot_be_called_so_is_told_what_there_is(function, words):
    said = error_line(reward_functions.scores_of, function, "--rewards.function m:f", ["q"], ["r"], ["a"])
    assert said.startswith("--rewards.function m:f ") and words in said
    assert all(name in said for name in reward_functions.NAMES) and "\n" not in said


def test_references_are_texts_or_none():
    queries = responses = torch.tensor([[65, PAD], [65, 66]])
    references = torch.tensor([[66, 67], [PAD, PAD]])
    for name in ("three", "three_with_a_default"):
        score = reward_functions.text_scorer(
            f"test_data:{name}", "rewards.function", Letters(), PAD, with_references=True
        )
        assert score(queries, responses, references).tolist() == [2.0, 0.0]
    score = reward_functions.text_scorer("test_data:three", "rewards.function", Letters(), PAD)
    assert score(queries, responses).tolist() == [0.0, 0.0]
    score = reward_functions.text_scorer("test_data:two", "rewards.function", Letters(), PAD, with_references=True)
    assert score(queries, responses, references).tolist() == [2.0, 2.0]


def empties(queries, responses, references):
    scores = [1.0 for _ in responses]
    for given in (queries, responses, references):
        given.clear()
    return scores


def test_a_function_may_empty_its_lists():
    """They are its own, and how many there were is known."""
    score = reward_functions.text_scorer("test_data:empties", "rewards.function", Letters(), PAD)
    assert score(torch.full((3, 2), 65), torch.full((3, 2), 66)).tolist() == [1.0, 1.0, 1.0]
    texts = [["q"], ["r"], ["a"]]
    assert reward_functions.scores_of(empties, "f", *texts) == [1.0]
    assert texts == [["q"], ["r"], ["a"]]


def not_a_number_for_c(queries, responses):
    return [{"c": float("nan"), "d": 1e300}.get(response, 1.0) for response in responses]  # 1e300: inf in float32


def test_a_function_whose_score_is_not_finite_is_named_in_the_middle_of_a_run():
    score = reward_functions.text_scorer("test_data:not_a_number_for_c", "rewards.function", Letters(), PAD)
    assert score(torch.tensor([[65]]), torch.tensor([[66]])).tolist() == [1.0]
    message = error_line(score, torch.tensor([[65]] * 3), torch.tensor([[66], [67], [68]]))
    expected = "returned nan for text 2; scores must be at most 1e+15 in size"
    assert message == f"--rewards.function test_data:not_a_number_for_c {expected}"
    message = error_line(score, torch.tensor([[65]]), torch.tensor([[68]]))
    assert "not_a_number_for_c returned 1e+300 for text 1; scores must be at most" in message


def letters(queries: list[str], responses: list[str]) -> list[float]:
    return [float(len(response)) for response in responses]


def test_a_function_sees_nothing_from_the_end_of_a_text_on(monkeypatch):
    monkeypatch.setattr(Letters, "eos_token_id", 67, raising=False)
    score = reward_functions.text_scorer("test_data:letters", "rewards.function", Letters(), PAD)
    assert score(torch.tensor([[65]] * 2), torch.tensor([[66, 67, 68], [66, 68, 68]])).tolist() == [1.0, 3.0]


# ---- Labels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sentiment/no_such_file.json", "no_such_file.json", "/no/such/file.json"])
def test_a_missing_label_file_says_what_to_do(connections, name):
    message = error_line(label_files.find_label_file, name, "dummy")
    assert f"--label_dataset {name}" in message
    for advice in ("path", "--preset tales"):
        assert advice in message
    on_the_hub = name.startswith("sentiment/")  # the others are meant to be local files
    assert ("without a network" in message) == ("hub" in message) == on_the_hub
    assert not connections


def test_a_world_says_which_labels_it_has(tmp_path):
    there = [tmp_path / "labels" / name / "offline_5k.json" for name in ("sentiment", "descriptiveness")]
    for path in there:
        path.parent.mkdir(parents=True)
        write(path, "[]")
        write(path.with_suffix(".meta.json"), "{}")
    message = error_line(label_files.find_label_file, "politeness/offline_5k.json", str(tmp_path))
    assert "--label_dataset politeness/offline_5k.json" in message
    assert message.endswith("has descriptiveness/offline_5k.json, sentiment/offline_5k.json")
    assert label_files.find_label_file("sentiment/offline_5k.json", str(tmp_path)) == there[0]
