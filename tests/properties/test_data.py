"""Texts, queries, label files, and what bad input gets."""

import copy
import dataclasses
import functools
import json
import re
import socket
from pathlib import Path

import pytest
import torch
from runs import error_line, write_rows
from small_posts import PAD, Letters
from tokenizers.processors import TemplateProcessing

from ppo_rlhf import sample, train_policy, train_reward, worlds
from ppo_rlhf.rlvr import problems
from ppo_rlhf.tldr import models, posts, reward_functions
from ppo_rlhf.train_policy import QueryStream, TaskArgs


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# ---- Cleaning --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("By . Ann Writer .\nPUBLISHED: .\nStory.\nMore.", "Story.\nMore."),
        ("London (CNN)    -- It rained.", "It rained."),
        ("A\n(CNN) -- One.\nB (CNN) -- Two.", "Two."),
        ("(CNN)One (CNN)Two.", "Two."),
        ("x" * 95 + "(CNN) Rain.", "Rain."),  # characters 95 to 99: just within the first hundred
        ("x" * 96 + "(CNN) Rain.", "x" * 96 + "(CNN) Rain."),
        ("and Reporter\nIt rained.", "It rained."),
        ("It rained.\nand Reporter\nEnd.", "It rained.\nand Reporter\nEnd."),
        ("Old.\nUPDATED:\n\n21:45 GMT, 7 March 2012\nMid.\nUPDATED: 07:00 GMT, 8 March 2012\nNew.", "New."),
        ("UPDATED: today\nRain.", "UPDATED: today\nRain."),
        (
            "By Ann\n\nUPDATED: 10:00 EST, 1 May 2012\n\n\u2018Rain\u2019 fell.\n\n\n\nWind.\n\n@highlight\n\nWet.",
            "'Rain' fell.\n\nWind.",
        ),
    ],
)
def test_clean_cnndm(text, expected):
    assert train_policy.clean_cnndm(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  one\n\n\n\ntwo \n", "one\n\ntwo"),
        ("itâ€™s “fine”", 'it\'s "fine"'),
        ("By me\nsecond\nthird @highlight", "By me\nsecond\nthird @highlight"),
    ],
)
def test_clean_tldr(text, expected):
    assert train_policy.clean_tldr(text) == expected


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (["`` i do n't know , '' he said .\n"], '"i don\'t know," he said.'),
        (["she 'd left ; it 's late : they 're here , i 'm sure , we 've time , you 'll see !"],
         "she'd left; it's late: they're here, i'm sure, we've time, you'll see!"),
        (["why ?", "( it cost $ 5 [ or 6 % ] )"], "why? (it cost $5 [or 6%])"),
        (["the 'some ' word"], "the 'some ' word"),
    ],
)  # fmt: skip
def test_join_book_rows(rows, expected):
    assert train_policy.join_book_rows(*rows) == expected


# ---- Texts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("t.txt", "one.\n\n  \ntwo é.\r\nthree", ["one.", "two é.", "three"]),
        ("t.jsonl", '"one"\n\n{"text": "two\\nlines", "id": 7}\n" "\n', ["one", "two\nlines"]),
        ("t.jsonl", '"one\u2028line"\n"two"\n', ["one\u2028line", "two"]),
        ("t.json", '["one", {"text": "two"}, ""]', ["one", "two"]),
    ],
)
def test_texts_of_a_file(tmp_path, name, content, expected):
    path = write(tmp_path / name, content)
    assert list(train_policy.load_texts(str(path), "train")) == expected


def splits_of(source: Path) -> list[list[str]]:
    return [list(train_policy.load_texts(str(source), split)) for split in ("train", "test")]


def test_every_fiftieth_story_is_held_out(tmp_path):
    """Of a file, and of a folder that has no texts of its own for tests."""
    stories = [f"story {number}" for number in range(120)]
    file = write(tmp_path / "stories.txt", "\n".join(stories))
    train = [story for story in stories if story not in ("story 49", "story 99")]
    assert splits_of(file) == splits_of(tmp_path) == [train, ["story 49", "story 99"]]
    write(tmp_path / "stories_test.txt", "one\ntwo\n")
    assert splits_of(tmp_path) == [stories, ["one", "two"]]


@pytest.mark.parametrize("content", [b'[{"content": "one"}, {"content": ', b'[{"text": "one"}]'])
def test_what_came_from_the_hub_broken_is_an_error(monkeypatch, tmp_path, content):
    """And no half of a table is left that the next start would take for the whole."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "broken").write_bytes(content)
    monkeypatch.setattr(train_policy, "hub_files", lambda *_: [str(tmp_path / "broken")])
    for _ in range(2):
        assert error_line(train_policy.load_texts, "tldr", "train").startswith(
            "--task.query_dataset tldr cannot be read"
        )


@pytest.fixture
def connections(monkeypatch):
    """Hosts that somebody tried to reach; nobody reaches them."""
    hosts = []

    def getaddrinfo(host, *_, **__):
        hosts.append(host)
        raise socket.gaierror("tests have no network")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return hosts


@pytest.mark.parametrize(
    ("find", "words", "message"),
    [
        (train_policy.load_texts, ["books", "train"], "--task.query_dataset books.*hub"),
        (
            train_reward.find_label_file,
            ["sentiment/no.json", "nowhere"],
            "--label_dataset sentiment/no.json.*hub",
        ),
        (train_reward.find_label_file, ["/no/such.json", "nowhere"], "--label_dataset /no/such.json(?!.*hub)"),
        (models.load_tokenizer, ["models/a-run/sft"], "--base_model models/a-run/sft cannot be loaded"),
    ],
)
def test_what_is_not_there_is_named_and_nobody_is_asked_for_it(
    monkeypatch, tmp_path, connections, find, words, message
):
    """The tests set HF_HUB_OFFLINE. Of a file, nothing is said of the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert re.match(message, error_line(find, *words)) and not connections


def test_a_folder_may_have_an_at_sign_in_its_name(in_a_fresh_folder, tiny_tokenizer, tiny_models):
    """It names no revision."""
    tiny_models("gpt2").save_pretrained("model@refs")
    tiny_tokenizer.save_pretrained("model@refs")
    assert len(models.load_tokenizer("model@refs")) == len(tiny_tokenizer)


# ---- Paths -----------------------------------------------------------------------------------------------------


def test_names_of_worlds_become_paths(in_a_fresh_folder):
    """Unless there is a folder of that name."""
    world = worlds.DATA / "tales"
    labels = train_reward.find_label_file("sentiment/offline_5k.json", "tales")
    assert labels == world / "labels/sentiment/offline_5k.json"
    assert train_policy.load_texts("tales", "train")[0] == train_policy.load_texts(str(world), "train")[0]
    with train_policy.model_errors("tales") as place:
        assert place == (f"{world}/model", None)
    for load_rows, name, kind in (
        (posts.load_rows, "posts", "comparisons"),
        (problems.load_rows, "sums", "problems"),
    ):
        where, _ = next(iter(load_rows(name, kind, "train")))
        assert where.startswith(f"{worlds.DATA}/{name}/{kind}_train.jsonl")
    assert posts.known_ceiling("posts") > 0.5
    for load_rows, name, kind in (
        (posts.load_rows, "posts", "comparisons"),
        (problems.load_rows, "sums", "problems"),
    ):
        write_rows(f"{name}/{kind}_train.jsonl", {"own": kind})
        assert load_rows(name, kind, "train") == [(f"{name}/{kind}_train.jsonl, line 1", {"own": kind})]


# ---- Queries ---------------------------------------------------------------------------------------------------


def test_ids_may_have_a_hole(tokenizer_with_a_hole, tmp_path):
    """The padding id is above all of them, so that it is none."""
    tokenizer = tokenizer_with_a_hole
    assert len(tokenizer) == 29 and tokenizer.encode("z") == [29]
    write(tmp_path / "texts.txt", "a z b.")
    task = TaskArgs(query_dataset=str(tmp_path / "texts.txt"), query_length=8, start_text=None)
    ids = train_policy.task_ids(task, tokenizer)
    assert ids.pad == 30 and posts.task_ids(posts.TaskArgs(), tokenizer).pad == 30
    assert QueryStream(task, tokenizer).next_batch(1, ids.pad).tolist() == [[0, 27, 29, 27, 1, 26, 30, 30]]


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


@pytest.fixture
def make_stream(tmp_path):
    """A function (texts, position, fields of the task) -> the stream of their queries."""

    def make(texts: list[str], position: int = 0, **task) -> QueryStream:
        file = write(tmp_path / "texts.json", json.dumps(texts))
        task = {"query_length": 6, "start_text": None, "end_text": None} | task
        stream = QueryStream(TaskArgs(query_dataset=str(file), **task), Letters())
        stream.position = position
        return stream

    return make


def as_texts(queries: torch.Tensor) -> list[str]:
    return train_policy.to_texts(Letters(), queries, PAD)


def batch_texts(stream: QueryStream, size: int) -> list[str]:
    return as_texts(stream.next_batch(size, PAD))


def test_a_stream_goes_on_where_another_stopped(make_stream):
    texts = [f"x.t{number}." if number % 3 else f"no stop {number}" for number in range(11)]
    task = {"start_text": ".", "end_text": "."}
    whole = make_stream(texts, **task)
    for _ in range(4):  # more than one pass over the texts
        whole.next_batch(4, PAD)
    rest = make_stream(texts, position=whole.position, **task)
    assert rest.position == whole.position
    for _ in range(5):
        torch.testing.assert_close(rest.next_batch(4, PAD), whole.next_batch(4, PAD))
    assert rest.position == whole.position


def test_unusable_texts_are_skipped_and_counted(make_stream):
    texts = ["x.good one.", "no stop", "x.", "x.much too long."]
    stream = make_stream(texts, start_text=".", end_text=".", query_length=9)
    assert stream.position == 0
    assert sorted(batch_texts(stream, 4)) == ["good one.", "good one.", "x.", "x."]
    assert stream.position - 4 in (2, 3, 4)


def test_a_tokenizer_s_first_token_is_first_in_the_context_and_nowhere_else(tiny_tokenizer, tmp_path):
    """Not in queries, which reward models read, nor in suffix, stop or prompts."""
    adds_one = copy.deepcopy(tiny_tokenizer)
    adds_one.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", adds_one.eos_token_id)]
    )
    assert adds_one.encode("ab") == [28, 0, 1]
    write(tmp_path / "texts.txt", "a.bc.d")
    affixes = {"query_prefix": "x", "query_suffix": "yz", "start_text": None, "end_text": None}
    task = TaskArgs(query_dataset=str(tmp_path / "texts.txt"), query_length=3, **affixes)
    ids = train_policy.task_ids(task, adds_one)
    assert (ids.prefix, ids.suffix, ids.stop, ids.context_length) == ([28, 23], [24, 25], 26, 7)
    assert QueryStream(task, adds_one).next_batch(1, ids.pad).tolist() == [[0, 26, 1]]
    typed = sample.read_queries(task, ids, adds_one, prompts=["bc", "wxyz"])
    assert [query.tokens for query in typed] == [[1, 2], [22, 23, 24]]
    assert typed[0].context == [28, 23, 1, 2, 24, 25]


# ---- Functions -------------------------------------------------------------------------------------------------


def of_three(queries, responses, references):
    return responses


@pytest.mark.parametrize("with_references", [True, False])
def test_a_scoring_function_sees_texts_up_to_their_end(monkeypatch, with_references):
    seen = []

    def remember(*texts):
        seen.extend(map(list, texts))
        for lists in texts:
            lists.clear()  # they are its own
        return [1.0, 2.0]

    monkeypatch.setattr(reward_functions, "import_function", lambda *_: lambda q, r, a: remember(q, r, a))
    monkeypatch.setattr(Letters, "eos_token_id", 99)
    score = reward_functions.text_scorer("m:f", "f", Letters(), PAD, with_references=with_references)
    queries, responses = torch.tensor([[97, PAD], [97, 98]]), torch.tensor([[98, 99, 100], [98, 100, PAD]])
    references = [torch.tensor([[98, 100], [PAD, PAD]])] * with_references
    assert score(queries, responses, *references).tolist() == [1.0, 2.0]
    # After a trial with other texts.
    assert seen[-3:] == [["a", "ab"], ["b", "bd"], ["bd", ""] if with_references else [None, None]]


def test_a_user_s_module_may_have_the_name_of_ours(in_a_fresh_folder, monkeypatch):
    """Also where rlvr/policy.py is run as a file, for which Python looks into its folder first."""
    Path("vllm_sampler.py").write_text("def score(queries, responses):\n    pass\n")
    monkeypatch.syspath_prepend(Path(problems.__file__).parent)
    assert reward_functions.import_function("vllm_sampler:score", "f").__name__ == "score"


def wrapped(function):
    """The function in a wrapper that takes anything, with and without a word about what it wraps."""

    def wrapper(*texts, **options):
        return function(*texts, **options)

    return wrapper


@pytest.mark.parametrize(
    ("function", "positional", "by_name"),
    [
        (wrapped(of_three), "qr", {}),
        (functools.wraps(of_three)(wrapped(of_three)), "qra", {}),
        (lambda q, r, /, *rest, **options: r, "qr", {}),
        # Names count more than places.
        (lambda completions, prompts, answer: prompts, "rqa", {}),
        (lambda completions, scale=1.0, answer=None: scale, "r", {"answer": "a"}),
        (lambda *texts, response, scale=1.0: response, "", {"response": "r"}),
        # OpenRLHF's queries are prompt and response.
        (lambda queries, prompts, labels: labels, ["qr", "q", "a"], {}),
        (lambda labels, queries, responses: labels, "aqr", {}),
    ],
)
def test_a_function_gets_what_its_parameters_are_named_after(function, positional, by_name):
    """Or, where they have other names, queries and responses and, if there is a third, references."""
    given = reward_functions.arguments_of(function, ["q"], ["r"], ["a"])
    assert list(given.args) == [[text] for text in positional]
    assert given.kwargs == {name: [text] for name, text in by_name.items()}


# What sees no response: it would score all alike, and train on that.
BLIND = [
    lambda prompts: [1.0, 2.0],
    lambda queries, labels: [1.0, 2.0],
    lambda prompts, outputs=None: [1.0, 2.0],
    lambda *texts, answers: [1.0, 2.0],
]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda texts: texts, "too many positional arguments"),
        *[(function, "none of its arguments gets the responses") for function in BLIND],
        (lambda q, r: [1.0], "returned 1 scores for 2 responses"),
        (lambda q, r: "12", "returned a str"),
        (lambda q, r: [1e300, 1.0], "returned 1e+300 for text 1"),  # infinite in float32
    ],
)
def test_what_a_function_does_wrong_is_said_in_one_line(function, words):
    texts = (["q"] * 2, ["r"] * 2, ["a"] * 2)
    said = error_line(reward_functions.scores_of, function, "--rewards.function m:f", *texts)
    assert said.startswith("--rewards.function m:f ") and words in said
    assert ("argument" in words) == all(name in said for name in reward_functions.NAMES)
