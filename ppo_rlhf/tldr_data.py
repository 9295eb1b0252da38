"""Where the posts, summaries and comparisons of chapter 2 come from: the Hugging Face hub, local files, or tales.

    --task.posts, --task.comparisons
        tldr        OpenAI's filtered Reddit TL;DR and its comparisons, from the hub (POSTS_REPOSITORY, ...)
        tales       the built-in world of tldr_tales.py
        <folder>    posts_<split>.jsonl and comparisons_<split>.jsonl in the format of those

A row of posts is {"id", "subreddit", "title", "post", "summary"}. A row of comparisons is {"info": a post without a
summary, "summaries": [{"text", "policy"}, {"text", "policy"}], "choice": 0 or 1, "batch", "split", "extra":
{"confidence"}}; `info` may have an "article" in place of the post.
"""

import bisect
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ppo_rlhf import tldr_tales
from ppo_rlhf.data import (
    CUT_MARGIN,
    HubFiles,
    check_text,
    encode_text,
    hub_data_errors,
    one_token,
    to_texts,
    vocabulary_size,
)
from ppo_rlhf.run import InputError, flag, read_json

POSTS_REPOSITORY = "vwxyzjn/summarize_from_feedback_tldr_3_filtered"  # loads without a loading script
COMPARISON_FILES = HubFiles(
    "openai/summarize_from_feedback", ("comparisons/{split}/*.parquet",), revision="refs/convert/parquet"
)

# ----------------------------------------------------------------------------------------------------------------
# Task
# ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TldrTaskArgs:
    posts: str = "tldr"
    """where posts and reference summaries come from: tldr, tales, or a folder with posts_<split>.jsonl"""
    comparisons: str = "tldr"
    """where comparisons come from: tldr, tales, or a folder with comparisons_<split>.jsonl"""
    query_length: int = 512
    """tokens of a query, padded on the left; posts that are too long are cut"""
    response_length: int = 53
    """tokens of a sampled summary, and the most that a reference may have, with its end-of-text token"""
    comparison_length: int = 169
    """the most tokens of a compared summary, with its end-of-text token; longer ones are cut"""
    article_query_length: int = 1_919
    """as query_length, for the news articles among the validation comparisons"""
    stop_text: str | None = None
    """text of the one token that ends a sampled summary; None: the tokenizer's end-of-text token, where the reward
    model has learned to be read"""
    temperature: float = 0.7
    """sampling temperature of the policy and of the reference in PPO"""
    eval_temperature: float = 0.01
    """sampling temperature of evaluations: nearly the likeliest token"""


TASKS = {
    "tldr": TldrTaskArgs(),
    "tales": TldrTaskArgs(
        posts="tales", comparisons="tales", query_length=84, response_length=24, comparison_length=28
    ),
}


@dataclass(frozen=True)
class TldrIds:
    """The task's special tokens as ids of one tokenizer."""

    pad: int  # one above the largest id of the tokenizer
    eos: int
    stop: int  # ends a sampled summary

    @property
    def vocab_size(self) -> int:
        """How many ids can be sampled: those below the padding. The output layer of a model may have more rows."""
        return self.pad


def tldr_ids(task: TldrTaskArgs, tokenizer: PreTrainedTokenizerBase) -> TldrIds:
    """Check the task's numbers and find its special tokens."""
    for name in ("query_length", "response_length", "comparison_length", "article_query_length"):
        if not getattr(task, name) > 0:
            raise InputError(f"{flag(f'task.{name}')} is {getattr(task, name)}; it must be above 0")
    for name in ("temperature", "eval_temperature"):
        if not getattr(task, name) > 0:
            raise InputError(f"{flag(f'task.{name}')} is {getattr(task, name)}; it must be above 0")
    # [T13] Padding is not the end-of-text token, or the loss would never teach a summary to end.
    #       vwxyzjn/summarize_from_feedback_details sft.py#L300-L308 @ee77a9a
    eos = tokenizer.eos_token_id
    if eos is None:
        raise InputError("the tokenizer has no end-of-text token, which summaries must end with")
    stop = one_token(tokenizer, task.stop_text, "stop_text")
    return TldrIds(pad=vocabulary_size(tokenizer), eos=eos, stop=eos if stop is None else stop)


# ----------------------------------------------------------------------------------------------------------------
# Queries
# ----------------------------------------------------------------------------------------------------------------


def format_post(subreddit: str, title: str, post: str) -> str:
    """The text of a query. Its last character is a colon: the space before a summary belongs to the summary."""
    # [T03] vwxyzjn/summarize_from_feedback_details tldr_dataset.py#L68-L93 @ee77a9a
    return f"SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"


def format_article(article: str) -> str:
    """The text of a query about a news article. The newline at its end only counts when the article is cut."""
    return f"Article:\n{article}\n\nTL;DR:\n"


def fit_query(
    post: str, format_query: Callable[[str], str], encode: Callable[[str], list[int]], query_length: int
) -> list[int]:
    """Token ids of a query whose post is cut until they are at most query_length.

    A post loses what follows its last newline, and the newline; one without a newline loses its last character. What
    stands around the post is never cut: if it alone is too long, an InputError says so. White space at the end of the
    query has a share in its length, but is left out.
    """
    # [T04] vwxyzjn/summarize_from_feedback_details tldr_dataset.py#L125-L151 @ee77a9a
    newlines = [match.start() for match in re.finditer("\n", post)]
    line_by_line, in_the_first_line = reversed(newlines), reversed(range(newlines[0] if newlines else len(post)))
    ends = [len(post), *line_by_line, *in_the_first_line]
    # A shorter post has fewer tokens, up to a few at the cut: those with many too many need not be tried one by one.
    first = bisect.bisect_left(
        ends, True, key=lambda end: len(encode(format_query(post[:end]))) <= query_length + CUT_MARGIN
    )
    for end in ends[first:]:
        if len(tokens := encode(text := format_query(post[:end]))) <= query_length:
            # [T03] The summary of an article follows the colon too, with a space and no newline between them.
            #       vwxyzjn/summarize_from_feedback_details tldr_dataset.py#L298-L313 @ee77a9a
            return tokens if text == text.rstrip() else encode(text.rstrip())
    raise InputError(
        f"query_length {query_length} does not hold a query whose post is empty, of "
        f"{len(encode(format_query('')))} tokens: {format_query('')[:60]!r}"
    )


def pad_rows(rows: list[list[int]], length: int, pad_id: int, *, left: bool = False) -> torch.Tensor:
    """Rows of token ids as one tensor (rows, length), padded on the right, or on the left."""
    padded = torch.full((len(rows), length), pad_id)
    for row, tokens in zip(padded, rows, strict=True):
        if tokens:
            row[slice(-len(tokens), None) if left else slice(len(tokens))] = torch.tensor(tokens)
    return padded


class Encoder:
    """Encodes queries and summaries with one tokenizer, without special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_id: int):
        self.tokenizer, self.eos_id = tokenizer, eos_id

    def encode(self, text: str) -> list[int]:
        # [X30] Each text is encoded once, as it is: all three stages read the same tokens of a query.
        #       vwxyzjn/summarize_from_feedback_details tldr_dataset.py#L154, tldr_dataset.py#L202-L212 @ee77a9a
        return encode_text(self.tokenizer, text)

    def query(self, row: dict[str, Any], task: TldrTaskArgs) -> list[int]:
        """The query of a row with subreddit, title and post, or with an article."""
        if row.get("article"):
            return fit_query(row["article"], format_article, self.encode, task.article_query_length)
        return fit_query(
            row["post"],
            lambda post: format_post(row["subreddit"], row["title"], post),
            self.encode,
            task.query_length,
        )

    def summary(self, text: str) -> list[int]:
        """A summary, with a space before it and the end-of-text token after it."""
        # [T07] vwxyzjn/summarize_from_feedback_details tldr_dataset.py#L187-L190, tldr_dataset.py#L262-L266 @ee77a9a
        return [*self.encode(text if text.startswith(" ") else f" {text}"), self.eos_id]


# ----------------------------------------------------------------------------------------------------------------
# Posts
# ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Posts:
    """Posts with their reference summaries."""

    queries: torch.Tensor  # (posts, query_length), padded on the left
    references: torch.Tensor  # (posts, response_length), the end-of-text token, then padding on the right
    too_long: int  # posts that were left out, because their reference has more than response_length tokens

    def __len__(self) -> int:
        return len(self.queries)

    def first(self, n: int) -> "Posts":
        """The first n posts."""
        return Posts(self.queries[:n], self.references[:n], 0)

    def longest(self, pad_id: int) -> int:
        """Tokens of the longest post and reference."""
        return int(((self.queries != pad_id).sum(1) + (self.references != pad_id).sum(1)).max())


def read_jsonl(path: Path, field: str) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file."""
    rows: list[dict[str, Any]] = []
    try:
        for line in filter(str.strip, path.read_text(encoding="utf-8-sig").split("\n")):
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("is not a JSON object")
            rows.append(row)
    except (OSError, ValueError, RecursionError) as error:
        where = f", row {len(rows)}" if path.is_file() else ""
        raise InputError(f"{flag(f'task.{field}')} {path}{where}: {error}") from error
    return rows


def load_rows(source: str, field: str, split: str) -> Iterable[dict[str, Any]]:
    """Rows of --task.posts or --task.comparisons. split: train, validation or test."""
    if source == "tldr":
        remedy = f"give a folder with {field}_{split}.jsonl, or use --preset tales"
        with hub_data_errors(f"{flag(f'task.{field}')} tldr", remedy):
            from datasets import load_dataset

            if field == "posts":
                return load_dataset(POSTS_REPOSITORY, split=split)
            return load_dataset("parquet", data_files=list(COMPARISON_FILES.download(split)), split="train")
    folder = tldr_tales.find_world() if source == "tales" else Path(source)
    if not folder.is_dir():
        raise InputError(
            f"{flag(f'task.{field}')} {source}: unknown; there are tldr, tales and folders with {field}_*.jsonl"
        )
    return read_jsonl(folder / f"{field}_{split}.jsonl", field)


def check_row(row: dict[str, Any], keys: tuple[str, ...], what: str) -> None:
    """Refuse a row that lacks a text, or has one that is not valid Unicode."""
    for key in keys:
        if not isinstance(row.get(key), str):
            raise InputError(f"{what} has no text under {key!r}")
        check_text(row[key], f"{what}, {key!r},")


def read_posts(task: TldrTaskArgs, tokenizer: PreTrainedTokenizerBase, split: str, limit: int = 0) -> Posts:
    """Posts of a split as token ids. limit: only the first so many rows; 0: all.

    A post whose reference has more than response_length tokens is left out and counted: cut, it would lose the
    end-of-text token, and teach that summaries need not end.
    """
    # [T01] [T08] vwxyzjn/summarize_from_feedback_details tldr_dataset.py#L184, tldr_dataset.py#L409-L418 @ee77a9a
    ids = tldr_ids(task, tokenizer)
    encoder = Encoder(tokenizer, ids.eos)
    queries, references, too_long = [], [], 0
    for number, row in enumerate(load_rows(task.posts, "posts", split)):
        if limit and number >= limit:
            break
        check_row(
            row, ("subreddit", "title", "post", "summary"), f"{flag('task.posts')} {task.posts}: {split} row {number}"
        )
        reference = encoder.summary(row["summary"])
        if len(reference) > task.response_length:
            too_long += 1
            continue
        references.append(reference)
        queries.append(encoder.query(row, task))
    if not queries:
        raise InputError(
            f"{flag('task.posts')} {task.posts}: none of the {split} rows has a summary of at most "
            f"{flag('task.response_length')} {task.response_length} tokens ({too_long} are longer)"
        )
    # [T05] vwxyzjn/summarize_from_feedback_details tldr_dataset.py#L96-L118, tldr_dataset.py#L153 @ee77a9a
    return Posts(
        queries=pad_rows(queries, task.query_length, ids.pad, left=True),
        references=pad_rows(references, task.response_length, ids.pad),
        too_long=too_long,
    )


# ----------------------------------------------------------------------------------------------------------------
# Comparisons
# ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparisons:
    """Pairs of summaries, and which of the two a person preferred."""

    queries: torch.Tensor  # (comparisons, query_length), padded on the left
    chosen: torch.Tensor  # (comparisons, comparison_length), padded on the right
    rejected: torch.Tensor  # (comparisons, comparison_length), padded on the right
    groups: list[dict[str, str]]  # of each comparison: split, batch, confidence
    cut: int  # summaries that were longer than comparison_length
    identical: int  # comparisons that were left out, because their two summaries are the same
    ceiling: float | None  # accuracy of a perfect judge, where it is known

    def __len__(self) -> int:
        return len(self.queries)

    def longest(self, pad_id: int) -> int:
        """Tokens of the longest post and summary."""
        queries, chosen, rejected = ((t != pad_id).sum(1) for t in (self.queries, self.chosen, self.rejected))
        return int((queries + torch.maximum(chosen, rejected)).max())


def check_comparison(row: dict[str, Any], what: str) -> None:
    """Refuse a row that is not a comparison."""
    info, summaries, choice = (row.get(key) for key in ("info", "summaries", "choice"))
    if not isinstance(info, dict):
        raise InputError(f"{what} has no object under 'info'")
    check_row(info, ("article",) if info.get("article") else ("subreddit", "title", "post"), what)
    if not isinstance(summaries, list) or len(summaries) != 2 or not all(isinstance(s, dict) for s in summaries):
        raise InputError(f"{what} has no two summaries")
    for summary in summaries:
        check_row(summary, ("text",), what)
    if type(choice) is not int or choice not in (0, 1):
        raise InputError(f"{what} has choice {choice!r}; it must be 0 or 1")


def read_comparisons(
    task: TldrTaskArgs, tokenizer: PreTrainedTokenizerBase, split: str, limit: int = 0, *, articles: bool = False
) -> Comparisons:
    """Comparisons of a split as token ids. limit: only the first so many rows; 0: all.

    articles: those of news articles, in place of posts.

    A summary of more than comparison_length tokens is cut and has no end-of-text token then. A comparison whose two
    summaries are the same ids, by that or from the start, says nothing and is left out [X29].
    """
    # [T02] [T11] vwxyzjn/summarize_from_feedback_details tldr_dataset.py#L256-L259 @ee77a9a
    ids = tldr_ids(task, tokenizer)
    encoder = Encoder(tokenizer, ids.eos)
    queries, pairs, groups, cut, identical = [], [], [], 0, 0
    for number, row in enumerate(load_rows(task.comparisons, "comparisons", split)):
        if limit and number >= limit:
            break
        check_comparison(row, f"{flag('task.comparisons')} {task.comparisons}: {split} row {number}")
        if bool(row["info"].get("article")) != articles:
            continue
        summaries = [encoder.summary(summary["text"]) for summary in row["summaries"]]
        cut += sum(len(summary) > task.comparison_length for summary in summaries)
        summaries = [summary[: task.comparison_length] for summary in summaries]
        if summaries[0] == summaries[1]:
            identical += 1
            continue
        queries.append(encoder.query(row["info"], task))
        pairs.append((summaries[row["choice"]], summaries[1 - row["choice"]]))
        extra = row.get("extra") or {}
        groups.append(
            {
                "split": str(row.get("split")),
                "batch": str(row.get("batch")),
                "confidence": str(extra.get("confidence") if isinstance(extra, dict) else None),
            }
        )
    if not queries and not articles:
        raise InputError(
            f"{flag('task.comparisons')} {task.comparisons}: no {split} row compares two different summaries"
        )
    chosen, rejected = ([pair[side] for pair in pairs] for side in (0, 1))
    return Comparisons(
        queries=pad_rows(queries, task.article_query_length if articles else task.query_length, ids.pad, left=True),
        chosen=pad_rows(chosen, task.comparison_length, ids.pad),
        rejected=pad_rows(rejected, task.comparison_length, ids.pad),
        groups=groups,
        cut=cut,
        identical=identical,
        ceiling=known_ceiling(task.comparisons),
    )


def known_ceiling(source: str) -> float | None:
    """The accuracy of a perfect judge on the validation comparisons, which world.json of a tales world gives."""
    folder = tldr_tales.find_world() if source == "tales" else Path(source)
    if not (folder / "world.json").is_file():
        return None
    try:
        ceiling = read_json(folder / "world.json").get("ceiling")
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{folder / 'world.json'} is damaged: {error}") from error
    if not isinstance(ceiling, float) or not 0 < ceiling <= 1:
        raise InputError(f"{folder / 'world.json'}: the ceiling is {ceiling!r}; it must be a number in 0..1")
    return ceiling


# ----------------------------------------------------------------------------------------------------------------
# Texts
# ----------------------------------------------------------------------------------------------------------------


def trim_padding(*tokens: torch.Tensor, pad_id: int) -> torch.Tensor:
    """Tensors (n, ...) of token ids side by side, without the columns that are padding in every row.

    The first column stays, so that there is one.
    """
    joined = torch.cat(tokens, dim=1)
    kept = (joined != pad_id).any(0)
    kept[0] = True
    return joined[:, kept]


def evaluation_rows(
    tokenizer: PreTrainedTokenizerBase,
    pad_id: int,
    queries: torch.Tensor,
    responses: torch.Tensor,
    references: torch.Tensor,
    /,
    **numbers: torch.Tensor,
) -> list[dict[str, Any]]:
    """What evaluation.jsonl holds, one row for each query: texts without special tokens, and their lengths.

    queries: (n, query_length); responses, truncated, and references: (n, response_length); numbers: (n,).
    """
    # [T06] vwxyzjn/summarize_from_feedback_details tldr_dataset.py#L154 @ee77a9a
    eos = tokenizer.eos_token_id
    columns: dict[str, list[Any]] = {"query": to_texts(tokenizer, queries, pad_id)}
    for name, tokens in (("response", responses), ("reference", references)):
        without_eos = tokens.masked_fill(tokens == eos, pad_id)
        columns[name] = to_texts(tokenizer, without_eos, pad_id)
    columns["tokens"] = (responses != pad_id).sum(1).tolist()
    columns["reference_tokens"] = (references != pad_id).sum(1).tolist()
    columns |= {name: values.tolist() for name, values in numbers.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def sample_table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of evaluation.jsonl without the lengths, for printing."""
    return [{k: v for k, v in row.items() if k not in ("tokens", "reference_tokens")} for row in rows]


def rouge(responses: list[str], references: list[str]) -> dict[str, float]:
    """Mean ROUGE-1, ROUGE-2 and ROUGE-L F-measure over all pairs, without stemming."""
    # [T23] [X20] Mean over examples.
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise InputError("the evaluation needs the package `rouge-score`") from error
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
    scores = [scorer.score(reference, response) for reference, response in zip(references, responses, strict=True)]
    return {name: math.fsum(score[name].fmeasure for score in scores) / len(scores) for name in scores[0]}
