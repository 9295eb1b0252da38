"""posts.py: queries, posts and comparisons as token ids, texts and ROUGE, and what bad input gets."""

import json
import random
from typing import Any

import pytest
import torch
from refusals import changed
from runs import error_line, write_rows
from small_posts import COMPARISON, EOS, PAD, POST, Letters, task, texts_of
from transformers import AutoTokenizer

from ppo_rlhf.tldr import posts
from ppo_rlhf.tldr.posts import CUT_MARGIN, TaskArgs

IDS = posts.TaskIds(pad=PAD, eos=EOS, stops=(EOS,))


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


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


# ---- Posts [T07] -----------------------------------------------------------------------------------------


def test_references_that_are_too_long_are_left_out_and_counted(tmp_path):
    summaries = ["a" * 12, "b" * 13, "c", "d" * 99]  # 12 letters, a space and the end: 14 tokens
    write_rows(tmp_path / "posts_train.jsonl", *(changed(POST, "summary", to=text) for text in summaries))
    found = posts.read_posts(task(tmp_path), Letters(), "train")
    assert found.too_long == 2 and len(found.queries) == 2
    assert texts_of(found.references) == [" " + "a" * 12 + "\0", " c\0"]
    limited = posts.read_posts(task(tmp_path), Letters(), "train", limit=2)
    assert len(limited) == limited.too_long == 1
    line = error_line(posts.read_posts, task(tmp_path, response_length=2), Letters(), "train")
    assert "--task.posts" in line and "--task.response_length 2" in line and "4 are longer" in line


# ---- Comparisons -----------------------------------------------------------------------------------


def test_summaries_are_cut_without_their_end_and_pairs_of_one_summary_are_left_out(tmp_path):
    """A summary has room for 12 tokens. Both are counted, the former in what is left out, too."""

    def pair(rejected: str, chosen: str) -> dict[str, Any]:
        return changed(changed(COMPARISON, "summaries", 0, "text", to=rejected), "summaries", 1, "text", to=chosen)

    different = [COMPARISON, pair("a" * 11, "b" * 50), pair("a" * 10, "a" * 11)]
    same = [pair(" Wet.", "Wet."), pair("a" * 11 + "bcd", "a" * 11 + "x")]
    article = changed(COMPARISON, "info", to={"article": "Rain."})
    write_rows(tmp_path / "comparisons_validation.jsonl", *same, *different, article)
    (tmp_path / "world.json").write_text(json.dumps({"ceiling": 0.8125}))
    found = posts.read_comparisons(task(tmp_path), Letters(), "validation")
    assert (found.cut, found.identical, len(found)) == (5, 2, 3) and len(found.groups) == 3
    assert found.ceiling == 0.8125  # where the world says it
    assert texts_of(found.chosen) == [" Dry hay.\0", " " + "b" * 11, " " + "a" * 11]
    assert texts_of(found.rejected) == [" Wet.\0", " " + "a" * 11, " " + "a" * 10 + "\0"]
    of_articles = posts.read_comparisons(task(tmp_path), Letters(), "validation", articles=True)
    assert of_articles.queries.shape == (1, 60) and found.queries.shape == (3, 80)
    assert len(posts.read_comparisons(task(tmp_path), Letters(), "validation", limit=4)) == 2  # of the first four
    line = error_line(posts.read_comparisons, task(tmp_path), Letters(), "validation", limit=2)
    assert "--task.comparisons" in line and "validation" in line and "different" in line


# ---- Bad input -------------------------------------------------------------------------------------------------


def test_without_a_network_one_line_names_the_file_and_the_preset_that_needs_none():
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
    queries = torch.tensor([[PAD, PAD, *letters("ab:")]])
    response, reference = (torch.tensor([[*letters(text), PAD]]) for text in (" c.\0", " e\0"))
    scores = torch.tensor([0.5])
    # A function of the user's may have a parameter's name.
    rows = posts.evaluation_rows(Letters(), IDS, queries, response, reference, scores=scores, queries=scores)
    shown = {"query": "ab:", "response": " c.", "reference": " e", "scores": 0.5, "queries": 0.5}
    assert rows == [shown | {"tokens": 4, "reference_tokens": 3}] and posts.sample_table(rows) == [shown]


def test_rouge_by_hand():
    """[T23] The cat sat / the cat ran: two words of three, one pair of words of two, a common subsequence of two."""

    def rouge(*pairs: tuple[str, str]) -> dict[str, float]:
        return posts.rouge([dict(zip(("response", "reference"), pair, strict=True)) for pair in pairs])

    first = {"rouge1": 2 / 3, "rouge2": 1 / 2, "rougeL": 2 / 3}
    # Mean over the pairs, and an empty summary has none of it.
    mean = {name: value / 2 for name, value in first.items()}
    assert rouge(("The cat sat.", "the cat ran"), ("", "a b")) == pytest.approx(mean)
    assert rouge(("b a", "a b"))["rougeL"] == 1 / 2 and rouge(("cats", "cat"))["rouge1"] == 0  # order; no stemming
