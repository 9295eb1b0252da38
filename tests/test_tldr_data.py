"""posts.py: queries, posts and comparisons as token ids, texts and ROUGE, and what bad input gets."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import error_line
from transformers import AutoTokenizer

from ppo_rlhf.lib import data_files
from ppo_rlhf.tldr import posts
from ppo_rlhf.tldr.posts import CUT_MARGIN, TaskArgs

EOS, PAD = 0, 128
IDS = posts.TaskIds(pad=PAD, eos=EOS, stops=(EOS,))


class Letters:
    """A tokenizer of ASCII characters: a token is a character's code, and code 0 ends a text."""

    eos_token_id = EOS

    def get_vocab(self) -> dict[str, int]:
        return {chr(token): token for token in range(PAD)}

    def encode(self, text: str, **_) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def write_rows(folder: Path, kind: str, split: str, rows: list[dict[str, Any]]) -> Path:
    (folder / f"{kind}_{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


POST = {"id": "1", "subreddit": "mill", "title": "Grain", "post": "It is wet.", "summary": "Wet grain."}
COMPARISON = {
    "info": {key: POST[key] for key in ("id", "subreddit", "title", "post")},
    "summaries": [{"text": " Wet.", "policy": "sup1"}, {"text": " Dry hay.", "policy": "ref"}],
    "choice": 1,
    "batch": "batch7",
    "split": "train",
    "extra": {"confidence": 6},
}


def task(folder: Path, **changes: Any) -> TaskArgs:
    sizes = {"query_length": 80, "response_length": 14, "comparison_length": 12, "article_query_length": 60}
    return TaskArgs(posts=str(folder), comparisons=str(folder), **(sizes | changes))


def changed(row: Any, *keys: str | int, to: Any = KeyError) -> Any:
    """A copy of a row, or of several, with another value deep inside; without `to`, with none."""
    whole = inner = copy.deepcopy(row)
    for key in keys[:-1]:
        inner = inner[key]
    if to is KeyError:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = to
    return whole


def texts_of(rows: torch.Tensor) -> list[str]:
    return ["".join(chr(token) for token in row if token != PAD) for row in rows.tolist()]


# ---- Queries [T03] [T04] [T05] ---------------------------------------------------------------------------------


def short_form(post: str) -> str:
    return f"P: {post}\n\nTL;DR:"


def cut_step_by_step(post: str, format_query, encode, limit: int) -> list[int]:
    """While the query is too long, the post loses its last line or, if it has one line, its last character [T04]."""
    while len(tokens := encode(format_query(post))) > limit:
        post = post.rpartition("\n")[0] if "\n" in post else post[:-1]
    return tokens


def test_a_long_post_is_cut_as_step_by_step(tiny_posts):
    tokenizer = AutoTokenizer.from_pretrained(tiny_posts / "model")
    rng, longer = random.Random(3), 0
    rare = ["\n", ".", "  ", "-" * 30, "ü"]
    for _ in range(12):
        line, parts = rng.choice([20, 200]), rng.randint(50, 300)
        post = "".join(rng.choice(rare if rng.random() < 5 / line else [" wet", "gra", "in"]) for _ in range(parts))
        expected = cut_step_by_step(post, short_form, tokenizer.encode, 40)
        assert posts.fit_query(post, short_form, tokenizer.encode, 40) == expected
        longer += len(tokenizer.encode(post)) > 40 + 2 * CUT_MARGIN
    assert longer > 3


def test_a_post_of_a_megabyte_is_cut_in_few_steps():
    encoded = []

    def encode(text: str) -> list[int]:
        encoded.append(len(text))
        return letters(text)

    assert len(posts.fit_query("wet grain " * 100_000, short_form, encode, 500)) == 500
    assert len(encoded) < 200 and sum(encoded) < 3_500_000


def test_a_special_token_whose_name_stands_in_a_post_is_text(tiny_tokenizer):
    encoder = posts.Encoder(tiny_tokenizer, posts.TaskIds(pad=29, eos=28, stops=(28,)))
    as_text = [26, 4, 14, 18, 26]  # < and > read as the full stop
    assert encoder.summary("a<eos>b") == [27, 0, *as_text, 1, 28]
    query = encoder.query({"article": "a<eos>b"}, TaskArgs())
    assert query == encoder.encode("Article:\na") + as_text + encoder.encode("b\n\nTL;DR:")


def test_rows_are_padded_on_one_side():
    assert data_files.pad_rows([[5], [], [6, 7, 8]], 3, 9, left=True).tolist() == [[9, 9, 5], [9, 9, 9], [6, 7, 8]]
    assert data_files.pad_rows([[5], [], [6, 7, 8]], 3, 9, left=False).tolist() == [[5, 9, 9], [9, 9, 9], [6, 7, 8]]


# ---- Posts [T07] -----------------------------------------------------------------------------------------


def test_references_that_are_too_long_are_left_out_and_counted(tmp_path):
    summaries = ["a" * 12, "b" * 13, "c", "d" * 99, "e" * 12]  # 12 letters, a space and the end: 14 tokens
    write_rows(tmp_path, "posts", "train", [changed(POST, "summary", to=text) for text in summaries])
    found = posts.read_posts(task(tmp_path), Letters(), "train")
    assert found.too_long == 2 and len(found.queries) == 3
    assert texts_of(found.references) == [" " + "a" * 12 + "\0", " c\0", " " + "e" * 12 + "\0"]
    limited = posts.read_posts(task(tmp_path), Letters(), "train", limit=2)
    assert texts_of(limited.references) == [" " + "a" * 12 + "\0"]  # of the first two rows
    line = error_line(posts.read_posts, task(tmp_path, response_length=2), Letters(), "train")
    assert "--task.posts" in line and "--task.response_length 2" in line and "5 are longer" in line


# ---- Comparisons -----------------------------------------------------------------------------------


def read_comparisons(folder: Path, rows: list[dict[str, Any]], articles: bool = False, **changes: Any):
    write_rows(folder, "comparisons", "validation", rows)
    return posts.read_comparisons(task(folder, **changes), Letters(), "validation", articles=articles)


def test_summaries_that_are_cut_have_no_end_and_are_counted(tmp_path):
    long, longer = "a" * 11, "b" * 50  # with space and end 13 and 52 tokens, of which 12 fit
    both = changed(changed(COMPARISON, "summaries", 0, "text", to=long), "summaries", 1, "text", to=longer)
    one = changed(COMPARISON, "summaries", 0, "text", to=long)
    fits = changed(COMPARISON, "summaries", 0, "text", to="a" * 10)
    comparisons = read_comparisons(tmp_path, [both, one, fits])
    assert comparisons.cut == 3
    assert texts_of(comparisons.chosen) == [" " + "b" * 11, " Dry hay.\0", " Dry hay.\0"]
    assert texts_of(comparisons.rejected) == [" " + "a" * 11, " " + "a" * 11, " " + "a" * 10 + "\0"]


def test_pairs_of_the_same_summary_are_left_out_and_counted(tmp_path):
    def pair(first: str, second: str) -> dict[str, Any]:
        return changed(changed(COMPARISON, "summaries", 0, "text", to=first), "summaries", 1, "text", to=second)

    same = [pair("Wet.", "Wet."), pair(" Wet.", "Wet."), pair("a" * 11 + "bcd", "a" * 11 + "x")]
    different = [COMPARISON, pair("a" * 10 + "b", "a" * 10 + "c"), pair("a" * 11, "a" * 10)]
    (tmp_path / "world.json").write_text(json.dumps({"ceiling": 0.8125}))
    comparisons = read_comparisons(tmp_path, [*same, *different])
    assert comparisons.ceiling == 0.8125  # where the world says it
    assert len(posts.read_comparisons(task(tmp_path), Letters(), "validation", 5)) == 2  # of the first five
    assert comparisons.identical == 3 and len(comparisons) == len(comparisons.groups) == len(comparisons.queries) == 3
    assert texts_of(comparisons.chosen) == [" Dry hay.\0", " " + "a" * 10 + "c", " " + "a" * 10 + "\0"]
    line = error_line(read_comparisons, tmp_path, same)
    assert "--task.comparisons" in line and "validation" in line and "different" in line


def test_articles_stand_apart_from_posts(tmp_path):
    article = changed(COMPARISON, "info", to={"id": "2", "article": "Rain.\nWind.", "post": None, "title": "x"})
    article = changed(article, "batch", to="cnndm0")
    no_article = changed(COMPARISON, "info", "article", to=None)
    rows = [COMPARISON, article, no_article]
    of_posts, of_articles = (read_comparisons(tmp_path, rows, articles=articles) for articles in (False, True))
    assert len(of_posts) == 2 and of_posts.queries.shape == (2, 80)
    assert texts_of(of_articles.queries) == ["Article:\nRain.\nWind.\n\nTL;DR:"]  # then a summary and its space
    assert of_articles.queries.shape == (1, 60) and of_articles.chosen.shape == (1, 12)
    assert [group["batch"] for group in of_articles.groups] == ["cnndm0"]
    long_article = changed(article, "info", "article", to="Rain.\n" + "x" * 60)
    assert texts_of(read_comparisons(tmp_path, [long_article], articles=True).queries) == [
        "Article:\nRain.\n\nTL;DR:"
    ]


# ---- Bad input -------------------------------------------------------------------------------------------------


def test_a_missing_file_is_named(tmp_path):
    for kind, read in (("posts", posts.read_posts), ("comparisons", posts.read_comparisons)):
        for damage in (lambda file: None, Path.touch):  # not there, and empty
            damage(tmp_path / f"{kind}_validation.jsonl")
            assert f"--task.{kind} {tmp_path}" in error_line(read, task(tmp_path), Letters(), "validation")


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path):
    line = json.dumps(POST).encode()
    (tmp_path / "posts_train.jsonl").write_bytes(b"\xef\xbb\xbf\n" + line + b"\n  \n" + line)
    assert len(posts.read_posts(task(tmp_path), Letters(), "train")) == 2


def test_an_unknown_source_and_a_hub_without_a_network_are_errors(tmp_path):
    line = error_line(posts.load_rows, str(tmp_path / "none"), "posts", "train")
    assert f"--task.posts {tmp_path / 'none'}" in line and "tldr, posts" in line
    line = error_line(posts.load_rows, "tldr", "comparisons", "train")
    assert "--task.comparisons tldr" in line and "comparisons_train.jsonl" in line and "--preset posts" in line


# ---- Special tokens [T13] --------------------------------------------------------------------------------------


def test_padding_is_no_token_and_a_summary_ends_with_the_end_of_text():
    tokenizer = Letters()
    ids = posts.task_ids(TaskArgs(), tokenizer)
    assert (ids.pad, ids.eos, ids.stops) == (128, 0, (0,))
    tokenizer.eos_token_id = None
    assert "end-of-text" in error_line(posts.task_ids, TaskArgs(), tokenizer)


# ---- Texts -----------------------------------------------------------------------------------------------------


def test_rows_of_an_evaluation_are_texts_without_special_tokens_and_lengths():
    def tokens(*texts: str) -> torch.Tensor:
        return torch.tensor([letters(text) + [PAD] * (6 - len(text)) for text in texts])

    queries = torch.tensor([[PAD, PAD, *letters("ab:")], letters("TLDR:")])
    texts, scores = (queries, tokens(" c.\0", " dddd."), tokens(" e\0", " f.\0")), torch.tensor([0.5, -1.0])
    rows = posts.evaluation_rows(Letters(), IDS, *texts, scores=scores)
    shown = [
        {"query": "ab:", "response": " c.", "reference": " e", "scores": 0.5},
        {"query": "TLDR:", "response": " dddd.", "reference": " f.", "scores": -1.0},
    ]
    lengths = [{"tokens": 4, "reference_tokens": 3}, {"tokens": 6, "reference_tokens": 4}]
    assert rows == [row | more for row, more in zip(shown, lengths, strict=True)]
    assert posts.sample_table(rows) == shown
    rows = posts.evaluation_rows(Letters(), IDS, *texts, queries=scores)  # a function may have a parameter's name
    assert [row["queries"] for row in rows] == scores.tolist()


def test_rouge_by_hand():
    """[T23] The cat sat / the cat ran: two words of three, one pair of words of two, a common subsequence of two."""

    def rouge(*pairs: tuple[str, str]) -> dict[str, float]:
        return posts.rouge([dict(zip(("response", "reference"), pair, strict=True)) for pair in pairs])

    first = {"rouge1": 2 / 3, "rouge2": 1 / 2, "rougeL": 2 / 3}
    assert rouge(("The cat sat.", "the cat ran")) == pytest.approx(first)
    # Precision 1, recall 1/2; of the pairs, 1 and 1/3.
    assert rouge(("a b", "a b c d")) == pytest.approx({"rouge1": 2 / 3, "rouge2": 1 / 2, "rougeL": 2 / 3})
    # Mean over the pairs, and an empty summary has none of it.
    mean = {name: value / 2 for name, value in first.items()}
    assert rouge(("The cat sat.", "the cat ran"), ("", "a b")) == pytest.approx(mean)
    assert rouge(("b a", "a b"))["rougeL"] == 1 / 2 and rouge(("cats", "cat"))["rouge1"] == 0  # order; no stemming
