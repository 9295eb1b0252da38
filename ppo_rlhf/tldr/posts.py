"""Where the posts, summaries and comparisons of chapter 2 come from: the Hugging Face hub, local files, or a world.

    --task.posts, --task.comparisons
        tldr        OpenAI's filtered Reddit TL;DR and its comparisons, from the hub (POSTS_REPOSITORY, ...)
        posts       a built-in world: worlds/posts.py
        reviews     sentences from film reviews, which people have rated: worlds/reviews.py
        <folder>    posts_<split>.jsonl and comparisons_<split>.jsonl in the format of those, or .parquet, .csv, .json
        <file>      .jsonl, .parquet, .csv or .json, of which each 50th row is held out
        <owner>/<name>  a data set on the hub, or <owner>/<name>:<configuration>

A row of posts is {"id", "subreddit", "title", "post", "summary"}. A row of comparisons is {"info": a post without a
summary, "summaries": [{"text", "policy"}, {"text", "policy"}], "choice": 0 or 1, "batch", "split", "extra":
{"confidence"}}; `info` may have an "article" in place of the post.

With `--task.query_format plain`, any prompts and completions can take their place: {"post": prompt, "summary":
completion}, both read as they are. A completion then begins with its space. The "post" of a comparison may be empty.
In place of post and summary, a row may have a prompt and a completion, as texts or messages, and a preference, in
one of the forms of train_reward.py, may take the place of a comparison or, with its chosen answer, of a post.

Files and lines next to marks are those of vwxyzjn/summarize_from_feedback_details at commit ee77a9a.
"""

import bisect
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from accelerate import Accelerator
from datasets import load_dataset
from huggingface_hub import snapshot_download
from pydantic import Field, PositiveInt
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.tldr import chat_templates, data_files, models, preferences, reward_functions
from ppo_rlhf.tldr.responses import generate_until
from ppo_rlhf.tldr.shares import map_rows
from ppo_rlhf.train_policy import InputError, find, float64_device, input_errors, read_text, to_texts, vocabulary_size

POSTS_REPOSITORY = "vwxyzjn/summarize_from_feedback_tldr_3_filtered"  # loads without a loading script
COMPARISONS_REPOSITORY = "openai/summarize_from_feedback"
COMPARISONS_REVISION = "refs/convert/parquet"  # the hub's copy, which needs no loading script either

# A cut in a text changes how the text before it is tokenized, but only within so many tokens of the cut.
CUT_MARGIN = 100

# ---- Task ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TaskArgs(chat_templates.FormatArgs):
    posts: str = "tldr"
    """where posts and reference summaries come from: tldr, posts, reviews, a folder with posts_<split>.jsonl, a file
    (.jsonl, .parquet, .csv, .json), or a data set on the hub, <owner>/<name>"""
    comparisons: str = "tldr"
    """where comparisons come from: tldr, posts, reviews, a folder with comparisons_<split>.jsonl, a file or a data
    set on the hub, of rows like those or with chosen and rejected"""
    query_format: Literal["tldr", "plain"] = "tldr"
    """tldr: a query is SUBREDDIT, TITLE, POST and TL;DR:, and a summary begins with a space, unless it is the turn of
    a chat; plain: a query is the post alone, and post and summary are read as they are"""
    query_column: str = "prompt"
    """key of a row's prompt where the format is plain and there is no post, with dots for nested ones"""
    query_length: PositiveInt = 512
    """tokens of a query, with its chat template, padded on the left; posts that are too long are cut at their end,
    plain ones at their beginning"""
    response_length: PositiveInt = 53
    """tokens of a sampled summary, and the most that a reference may have, with its end-of-text token"""
    comparison_length: PositiveInt = 169
    """the most tokens of a compared summary, with its end-of-text token; longer ones are cut"""
    article_query_length: PositiveInt = 1_919
    """as query_length, for the news articles among the validation comparisons"""
    temperature: Annotated[float, Field(ge=0.01)] = 0.7
    """sampling temperature of the policy and of the reference in PPO"""
    eval_temperature: Annotated[float, Field(ge=1e-6)] = 0.01
    """sampling temperature of evaluations: nearly the likeliest token"""


TASKS = {
    "tldr": TaskArgs(),
    "posts": TaskArgs(posts="posts", comparisons="posts", query_length=84, response_length=24, comparison_length=28),
    # All beginnings and sentences fit, and so do 97 % of the continuations.
    "reviews": TaskArgs(
        posts="reviews",
        comparisons="reviews",
        query_format="plain",
        query_length=24,
        response_length=40,
        comparison_length=72,
    ),
}


@dataclass(frozen=True, kw_only=True)
class SamplingIds:
    """The task's special tokens that sampling needs, as ids of one tokenizer."""

    pad: int  # one above the largest id of the tokenizer
    stops: tuple[int, ...]  # each of them ends a sampled response

    @property
    def vocab_size(self) -> int:
        """How many ids can be sampled: those below the padding. The output layer of a model may have more rows."""
        return self.pad


@dataclass(frozen=True, kw_only=True)
class TaskIds(SamplingIds):
    """All of the task's special tokens."""

    eos: int  # ends a reference
    prefix: Sequence[int] = ()  # of every query: a first token, or the beginning of a chat template
    suffix: Sequence[int] = ()


def task_ids(task: TaskArgs, tokenizer: PreTrainedTokenizerBase) -> TaskIds:
    """Find the task's special tokens."""
    # [T13] Padding is not the end-of-text token, or the loss would never teach a summary to end.   sft.py#L300-L308
    eos = tokenizer.eos_token_id
    if eos is None:
        raise InputError("the tokenizer has no end-of-text token, which summaries must end with")
    prefix, suffix = chat_templates.affixes(task, tokenizer)
    if len(prefix) + len(suffix) >= task.query_length:
        raise InputError(
            f"--task.query_length {task.query_length} has no room for a post: what is around it has "
            f"{len(prefix) + len(suffix)} tokens"
        )
    return TaskIds(
        pad=vocabulary_size(tokenizer),
        eos=eos,
        # The end-of-text token, where the reward model has learned to be read, and others that the model names.
        stops=models.end_ids(tokenizer),
        prefix=prefix,
        suffix=suffix,
    )


# ---- Queries ---------------------------------------------------------------------------------------------------


def format_post(subreddit: str, title: str, post: str) -> str:
    """The text of a query. Its last character is a colon: the space before a summary belongs to the summary."""
    # [T03] Subreddit, title, post and TL;DR, with blank lines between them.   tldr_dataset.py#L68-L93
    return f"SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"


def format_article(article: str) -> str:
    """The text of a query about a news article. The newline at its end only counts when the article is cut."""
    return f"Article:\n{article}\n\nTL;DR:\n"


def fit_query(
    post: str, format_query: Callable[[str], str], encode: Callable[[str], list[int]], query_length: int
) -> list[int]:
    """Token ids of a query whose post is cut until they are at most query_length.

    A post loses what follows its last newline, and the newline; one without a newline loses its last character. What
    is around the post is never cut: if it alone is too long, an InputError says so. White space at the end of the
    query has a share in its length, but is left out.
    """
    # [T04] Only the post is cut, line by line, then by characters.   tldr_dataset.py#L125-L151
    newlines = [match.start() for match in re.finditer("\n", post)]
    line_by_line, in_the_first_line = reversed(newlines), reversed(range(newlines[0] if newlines else len(post)))
    ends = [len(post), *line_by_line, *in_the_first_line]
    # A shorter post has fewer tokens, up to a few at the cut: those with many too many need not be tried one by one.
    # Most posts fit as they are.
    whole = len(encode(format_query(post)))
    first = 0
    if whole > query_length:
        first = bisect.bisect_left(
            ends, True, key=lambda end: len(encode(format_query(post[:end]))) <= query_length + CUT_MARGIN
        )
    for end in ends[first:]:
        if len(tokens := encode(text := format_query(post[:end]))) <= query_length:
            # [T03] The summary of an article follows the colon too, with a space and no newline between them.
            #       tldr_dataset.py#L298-L313
            return tokens if text == text.rstrip() else encode(text.rstrip())
    raise InputError(
        f"query_length {query_length} does not hold a query whose post is empty, of "
        f"{len(encode(format_query('')))} tokens: {format_query('')[:60]!r}"
    )


class Encoder:
    """Encodes queries and summaries with one tokenizer; special tokens are only around a query, and at the end."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ids: TaskIds):
        self.tokenizer, self.ids = tokenizer, ids

    def encode(self, text: str) -> list[int]:
        # [X30] Each text is encoded once, as it is: all three stages read the same tokens of a query.
        #       tldr_dataset.py#L154, tldr_dataset.py#L202-L212
        return chat_templates.encode_text(self.tokenizer, text)

    def in_place(self, text: str) -> list[int]:
        """The text of a query in its chat template, or after the first token."""
        return [*self.ids.prefix, *self.encode(text), *self.ids.suffix]

    def query(self, row: dict[str, Any], task: TaskArgs) -> list[int]:
        """The query of a row with subreddit, title and post, or with an article."""
        if row.get("article"):
            return fit_query(row["article"], format_article, self.in_place, task.article_query_length)
        if task.query_format == "plain":
            prefix, suffix = self.ids.prefix, self.ids.suffix
            room = task.query_length - len(prefix) - len(suffix)
            post = row["post"]
            tokens = self.encode(post) if isinstance(post, str) else self.conversation(post, task)
            return [*prefix, *tokens[-room:], *suffix]
        return fit_query(
            row["post"],
            lambda post: format_post(row["subreddit"], row["title"], post),
            self.in_place,
            task.query_length,
        )

    def conversation(self, messages: chat_templates.Messages, task: TaskArgs) -> list[int]:
        """The messages of a chat in its template, without what is around every query."""
        own = [one | {"content": chat_templates.as_letters(one["content"], self.tokenizer)} for one in messages]
        if own[0]["role"] != "system":
            own = [*chat_templates.system_of(task), *own]
        tokens = chat_templates.encode(chat_templates.render(own, task, self.tokenizer), self.tokenizer)
        prefix, suffix = list(self.ids.prefix), list(self.ids.suffix)
        end = len(tokens) - len(suffix)
        if tokens[: len(prefix)] != prefix or tokens[end:] != suffix:
            raise ValueError(
                f"a conversation of {', '.join(one['role'] for one in own)} is not between what the chat template "
                f"puts around a query; its system message must be --task.system_prompt, and the last one the user's; "
                f"or give --task.prompt_format plain"
            )
        return tokens[len(prefix) : end]

    def summary(self, text: str, query_format: Literal["tldr", "plain"] = "tldr") -> list[int]:
        """A summary, with a space before it, unless the format is plain, and the end-of-text token after it.

        In a chat, where the template has an end, it begins a turn, without a space.
        """
        # [T07] It begins with a space and ends with the end-of-text token.
        #       tldr_dataset.py#L187-L190, tldr_dataset.py#L262-L266
        if query_format == "tldr":
            text = text.removeprefix(" ") if self.ids.suffix else f" {text.removeprefix(' ')}"
        return [*self.encode(text), self.ids.eos]


def bare(queries: torch.Tensor, ids: TaskIds) -> torch.Tensor:
    """Queries (n, query_length) as people and functions of texts read them: padding in place of what is around."""
    place = (queries != ids.pad).cumsum(1)  # (n, query_length), from 1 on
    inside = (place > len(ids.prefix)) & (place <= place[:, -1:] - len(ids.suffix))
    return queries.masked_fill(~inside, ids.pad)


# ---- Posts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Posts:
    """Posts with their reference summaries."""

    queries: torch.Tensor  # (posts, query_length), padded on the left
    references: torch.Tensor  # (posts, response_length), the end-of-text token, then padding on the right
    too_long: int  # posts that were left out, because their reference has more than response_length tokens

    def __len__(self) -> int:
        return len(self.queries)

    def rows(self, inds: torch.Tensor | slice) -> "Posts":
        return Posts(queries=self.queries[inds], references=self.references[inds], too_long=0)

    def first(self, n: int) -> "Posts":
        """The first n posts."""
        return self.rows(slice(n))

    def lengths(self, pad_id: int) -> torch.Tensor:
        """Tokens of each post with its reference: (posts,)."""
        return (self.queries != pad_id).sum(1) + (self.references != pad_id).sum(1)


QUERY_COLUMNS = {"tldr": ("subreddit", "title", "post"), "plain": ("post",)}  # by --task.query_format


def load_rows(source: str, field: str, split: str) -> Iterable[data_files.Row]:
    """Rows of --task.posts or --task.comparisons. split: train, validation or test."""
    argument, remedy = f"task.{field}", f"give a folder with {field}_{split}.jsonl, or use --preset posts"
    if source == "tldr":
        with input_errors(f"--{argument} tldr cannot be read from the hub; {remedy}"):
            if field == "posts":
                rows = load_dataset(POSTS_REPOSITORY, split=split)
            else:
                files = f"comparisons/{split}/*.parquet"
                folder = snapshot_download(
                    COMPARISONS_REPOSITORY,
                    repo_type="dataset",
                    revision=COMPARISONS_REVISION,
                    allow_patterns=files,
                )
                rows = load_dataset("parquet", data_files=f"{folder}/{files}", split="train")
        return data_files.with_places(rows, f"tldr, {split}")
    if folder := find(source):
        names = [f"{field}_{split}{suffix}" for suffix in data_files.FORMATS]
        name = next((name for name in names if list(folder.glob(f"{name}*"))), names[0])
        return data_files.read_file(folder / name, argument)
    if Path(source).suffix not in data_files.FORMATS and not data_files.is_on_hub(source):
        raise InputError(
            f"--{argument} {source}: unknown; there are tldr, posts, reviews (python ppo_rlhf/worlds/reviews.py "
            f"fetches it), folders with {field}_*.jsonl, data sets on the hub, and files: "
            f"{', '.join(data_files.FORMATS)}"
        )
    return data_files.load_split(source, argument, split, remedy)


def read_preference(row: dict[str, Any], task: TaskArgs) -> tuple[str | chat_templates.Messages, str, str]:
    """Prompt, chosen and rejected answer of a row. In a chat, the prompt may be messages (Encoder.conversation)."""
    if task.query_format != "plain":
        raise ValueError("it has a prompt, but no post; such rows need --task.query_format plain")
    return preferences.read_preference(row, task.query_column, chat=task.prompt_format == "chat")


def post_and_summary(row: dict[str, Any], task: TaskArgs) -> dict[str, Any]:
    """A row of posts; a prompt and its answer take the place of post and summary."""
    if "post" in row or (task.query_format == "tldr" and not preferences.is_preference(row)):
        data_files.check_row(row, (*QUERY_COLUMNS[task.query_format], "summary"))
        return row
    if not preferences.is_preference(row):
        _, prompt = data_files.find(row, task.query_column)
        _, answer = data_files.find(row, "completion", "summary")
        row = {task.query_column: prompt, "chosen": answer, "rejected": answer}
    prompt, answer, _ = read_preference(row, task)
    return {"post": prompt, "summary": answer}


def read_posts(task: TaskArgs, tokenizer: PreTrainedTokenizerBase, split: str, limit: int = 0) -> Posts:
    """Posts of a split as token ids. limit: only the first so many rows; 0: all.

    A post whose reference has more than response_length tokens is left out and counted: cut, it would lose the
    end-of-text token, and teach that summaries need not end.
    """
    # A post with one reference; none loses its end-of-text token.
    #       tldr_dataset.py#L184, tldr_dataset.py#L409-L418
    ids = task_ids(task, tokenizer)
    encoder = Encoder(tokenizer, ids)
    queries, references, too_long = [], [], 0
    for where, row in islice(load_rows(task.posts, "posts", split), limit or None):
        with input_errors(f"--task.posts {where}"):
            row = post_and_summary(row, task)
            reference = encoder.summary(row["summary"], task.query_format)
            if len(reference) > task.response_length:
                too_long += 1
                continue
            references.append(reference)
            queries.append(encoder.query(row, task))
            if not queries[-1]:
                raise ValueError("its query is empty, so that there is nothing to continue")
    if not queries:
        raise InputError(
            f"--task.posts {task.posts}: none of the {split} rows has a summary of at most --task.response_length "
            f"{task.response_length} tokens ({too_long} are longer)"
        )
    # [T05] Queries are padded on the left, to exactly query_length.   tldr_dataset.py#L96-L118, tldr_dataset.py#L153
    return Posts(
        queries=data_files.pad_rows(queries, task.query_length, ids.pad, left=True),
        references=data_files.pad_rows(references, task.response_length, ids.pad),
        too_long=too_long,
    )


# ---- Comparisons -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
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

    def tokens(self, inds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Posts, chosen and rejected summaries of some of the comparisons."""
        return self.queries[inds], self.chosen[inds], self.rejected[inds]

    def lengths(self, pad_id: int) -> torch.Tensor:
        """Tokens of each post with the longer of its summaries: (comparisons,)."""
        queries, chosen, rejected = ((t != pad_id).sum(1) for t in (self.queries, self.chosen, self.rejected))
        return queries + torch.maximum(chosen, rejected)


def as_comparison(row: dict[str, Any], task: TaskArgs) -> tuple[dict[str, Any], list[str], int]:
    """The post of a row of comparisons, its two summaries, and which of them is preferred."""
    if preferences.is_preference(row):
        prompt, *answers = read_preference(row, task)
        return {"post": prompt}, answers, 0
    if "info" not in row:
        raise ValueError(f"it is no comparison; docs/running.md lists the forms; it has {', '.join(map(repr, row))}")
    info, (one, other), choice = row["info"], row["summaries"], row["choice"]
    data_files.check_row(info, ("article",) if info.get("article") else QUERY_COLUMNS[task.query_format])
    for summary in (one, other):
        data_files.check_row(summary, ("text",))
    if type(choice) is not int or choice not in (0, 1):
        raise ValueError(f"its choice is {choice!r}; it must be 0 or 1")
    return info, [one["text"], other["text"]], choice


def read_comparisons(
    task: TaskArgs, tokenizer: PreTrainedTokenizerBase, split: str, limit: int = 0, *, articles: bool = False
) -> Comparisons:
    """Comparisons of a split as token ids. limit: only the first so many rows; 0: all.

    articles: those of news articles, in place of posts.

    A summary of more than comparison_length tokens is cut and has no end-of-text token then. A comparison whose two
    summaries are the same ids, by that or from the start, says nothing and is left out.
    """
    # A post, two summaries and a choice; compared summaries may be longer than sampled ones.
    #       tldr_dataset.py#L256-L259
    ids = task_ids(task, tokenizer)
    encoder = Encoder(tokenizer, ids)
    queries, pairs, groups, cut, identical = [], [], [], 0, 0
    for where, row in islice(load_rows(task.comparisons, "comparisons", split), limit or None):
        with input_errors(f"--task.comparisons {where}"):
            info, texts, choice = as_comparison(row, task)
            if bool(info.get("article")) != articles:
                continue
            summaries = [encoder.summary(text, task.query_format) for text in texts]
            cut += sum(len(summary) > task.comparison_length for summary in summaries)
            summaries = [summary[: task.comparison_length] for summary in summaries]
            if summaries[0] == summaries[1]:
                identical += 1
                continue
            queries.append(encoder.query(info, task))
            pairs.append((summaries[choice], summaries[1 - choice]))
            confidence = (row.get("extra") or {}).get("confidence")
            group = {"split": row.get("split"), "batch": row.get("batch"), "confidence": confidence}
            groups.append({name: str(value) for name, value in group.items()})
    if not queries and not articles:
        raise InputError(f"--task.comparisons {task.comparisons}: no {split} row compares two different summaries")
    chosen, rejected = ([pair[side] for pair in pairs] for side in (0, 1))
    query_length = task.article_query_length if articles else task.query_length
    return Comparisons(
        queries=data_files.pad_rows(queries, query_length, ids.pad, left=True),
        chosen=data_files.pad_rows(chosen, task.comparison_length, ids.pad),
        rejected=data_files.pad_rows(rejected, task.comparison_length, ids.pad),
        groups=groups,
        cut=cut,
        identical=identical,
        ceiling=known_ceiling(task.comparisons),
    )


def known_ceiling(source: str) -> float | None:
    """The accuracy of a perfect judge on the validation comparisons, which world.json of a world of posts gives."""
    facts = Path(find(source) or source, "world.json")
    if not facts.is_file():
        return None
    with input_errors(f"{facts} is damaged"):
        ceiling = json.loads(read_text(facts)).get("ceiling")
        if not 0 < ceiling <= 1:
            raise ValueError(f"the ceiling is {ceiling!r}; it must be a number in 0..1")
    return ceiling


# ---- Texts -----------------------------------------------------------------------------------------------------


def trim_padding(*tokens: torch.Tensor, pad_id: int) -> torch.Tensor:
    """Tensors (n, ...) of token ids side by side, without the columns that are padding in every row.

    The first column stays, so that there is one.
    """
    joined = torch.cat(tokens, dim=1)
    kept = (joined != pad_id).any(0)
    kept[0] = True
    return joined[:, kept]


def without_ends(tokens: torch.Tensor, tokenizer: PreTrainedTokenizerBase, ids: TaskIds) -> torch.Tensor:
    """Summaries with padding in place of the tokens that end a text."""
    ends = tokens.new_tensor(models.end_ids(tokenizer))
    return tokens.masked_fill(torch.isin(tokens, ends), ids.pad)


COLUMNS = ("query", "response", "reference", "tokens", "reference_tokens")


def evaluation_rows(
    tokenizer: PreTrainedTokenizerBase,
    ids: TaskIds,
    queries: torch.Tensor,
    responses: torch.Tensor,
    references: torch.Tensor,
    /,
    **numbers: torch.Tensor,
) -> list[dict[str, Any]]:
    """The rows of evaluation.jsonl, one for each query: texts without special tokens, and their lengths.

    queries: (n, query_length); responses, truncated, and references: (n, response_length); numbers: (n,).
    """
    # Texts for people have neither padding nor the end-of-text token.   tldr_dataset.py#L154
    summaries = [without_ends(tokens, tokenizer, ids) for tokens in (responses, references)]
    decoded = [to_texts(tokenizer, tokens, ids.pad) for tokens in (bare(queries, ids), *summaries)]
    lengths = [(tokens != ids.pad).sum(1).tolist() for tokens in (responses, references)]
    columns = [*decoded, *lengths, *(values.tolist() for values in numbers.values())]
    return [dict(zip((*COLUMNS, *numbers), row, strict=True)) for row in zip(*columns, strict=True)]


@torch.no_grad()
def summarise(
    lm_backbone: PreTrainedModel,
    held_out: Posts,
    ids: TaskIds,
    task: TaskArgs,
    generator: torch.Generator,
    chunk: int,
    accelerator: Accelerator,
    measure: Callable[..., Iterable[torch.Tensor]],
    temperature: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """Summarise posts, chunk posts of each process at a time. temperature: None is that of evaluations.

    measure: (queries, truncated responses, references) of a chunk -> numbers (rows,). Returns the responses
    (posts, response_length), truncated, and all such numbers (posts,). Every process must call this.
    """
    uniforms = torch.rand(len(held_out), task.response_length, generator=generator, dtype=torch.float64)
    temperature = task.eval_temperature if temperature is None else temperature

    def of_rows(inds: torch.Tensor) -> tuple[torch.Tensor, ...]:
        contexts = trim_padding(held_out.queries[inds], pad_id=ids.pad)
        tensors = (held_out.queries[inds], held_out.references[inds], contexts)
        queries, references, contexts = (tensor.to(accelerator.device) for tensor in tensors)
        responses, _ = generate_until(
            lm_backbone,
            contexts,
            uniforms[inds].to(float64_device(accelerator.device)),
            pad_id=ids.pad,
            vocab_size=ids.vocab_size,
            temperature=temperature,
            stop_ids=ids.stops,
        )
        return responses, *measure(queries, responses, references)

    lengths = (held_out.queries != ids.pad).sum(1)
    return map_rows(of_rows, len(held_out), chunk, accelerator, lengths)


def text_scorer(name: str, field: str, tokenizer: PreTrainedTokenizerBase, ids: TaskIds) -> reward_functions.Scorer:
    """Score with a function of texts; the texts do not show the end-of-text token."""
    scorer = reward_functions.text_scorer(name, field, tokenizer, ids.pad, with_references=True)

    def score(queries: torch.Tensor, responses: torch.Tensor, references: torch.Tensor | None = None) -> torch.Tensor:
        if references is not None:  # a prompt that somebody types has none
            references = without_ends(references, tokenizer, ids)
        return scorer(bare(queries, ids), without_ends(responses, tokenizer, ids), references)

    return score


def sample_table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of evaluation.jsonl without the lengths, for printing."""
    return [{k: v for k, v in row.items() if k not in ("tokens", "reference_tokens")} for row in rows]


def rouge(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Mean ROUGE-1, ROUGE-2 and ROUGE-L F-measure of rows of evaluation.jsonl, without stemming."""
    from rouge_score.rouge_scorer import RougeScorer  # slow

    # [T23] Mean over examples.
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
    scores = [scorer.score(row["reference"], row["response"]) for row in rows]
    return {name: math.fsum(score[name].fmeasure for score in scores) / len(scores) for name in scores[0]}
