"""Chapter 1's tasks, and its queries and responses as token ids.

Files and lines next to marks are those of openai/lm-human-preferences at commit cbfd210.
"""

import random
from collections import Counter
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.lib import models, sources
from ppo_rlhf.lib.errors import InputError, flag

# In tokens. A cut in a text changes how the text before it is tokenized, but only within this distance of the cut.
CUT_MARGIN = 100
LOOKED_AT = 1_000  # texts, to say how many give no query


# ---- Tasks -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskArgs:
    query_dataset: str = "books"
    """where queries come from: books, cnndm, tldr, tales, reviews, dummy, a .txt, .jsonl or .json file, or a folder
    with stories.txt"""
    query_length: int = 64
    """longest query, in tokens; shorter ones are padded"""
    query_prefix: str = ""
    """text before each query; the policy sees it, the reward model does not"""
    query_suffix: str = ""
    """text after each query; the policy sees it, the reward model does not"""
    start_text: str | None = "."
    """queries begin after the first such token of their text; None: at the beginning"""
    end_text: str | None = "."
    """queries end with the last such token; None: wherever they are cut"""
    response_length: int = 24
    """length of every response, in tokens"""
    truncate_text: str | None = "."
    """responses are cut after this token before they are scored; None: never"""
    truncate_after: int = 16
    """only such a token at or after this index counts, in tokens"""
    penalty_reward_value: float = -1.0
    """score of a response without such a token"""
    temperature: float = 0.7
    """sampling temperature of the policy and of the reference"""


SUMMARIES_TASK = {
    "query_length": 500,
    "query_suffix": "\n\nTL;DR:",
    "start_text": None,
    "response_length": 75,
    "truncate_text": "\n",
    "truncate_after": 55,
}

TASKS = {
    "sentiment": TaskArgs(),
    "descriptiveness": TaskArgs(),
    "cnndm": TaskArgs(
        **SUMMARIES_TASK, query_dataset="cnndm", query_prefix="Article:\n\n", end_text="\n", temperature=0.5
    ),
    "tldr": TaskArgs(**SUMMARIES_TASK, query_dataset="tldr", end_text=None),
    "tales": TaskArgs(query_dataset="tales", query_length=24),
    "tales-descriptiveness": TaskArgs(query_dataset="tales", query_length=24),
    # The first six words of a sentence from a review, and the next 20 tokens. They are not cut at a stop token: the
    # score is on the last token, so tokens behind a stop would get most of the credit for what came before it.
    "reviews": TaskArgs(
        query_dataset="reviews",
        query_length=12,
        start_text=None,
        end_text=None,
        response_length=20,
        truncate_text=None,
        truncate_after=0,
    ),
}


@dataclass(frozen=True)
class TaskIds:
    """The task's texts as token ids of one tokenizer."""

    pad: int  # one above the largest id of the tokenizer
    eos: int  # -1 if the tokenizer has none
    stop: int | None
    prefix: list[int]
    suffix: list[int]
    context_length: int  # prefix, padded query and suffix

    @property
    def vocab_size(self) -> int:
        """How many ids can be sampled: all below the padding id. A model's output layer may have more rows."""
        return self.pad


def task_ids(task: TaskArgs, tokenizer: PreTrainedTokenizerBase) -> TaskIds:
    """Check the task's numbers and encode its texts."""
    for name in ("query_length", "response_length", "temperature"):
        if not getattr(task, name) > 0:
            raise InputError(f"{flag(f'task.{name}')} is {getattr(task, name)}; it must be above 0")
    if not 0 <= task.truncate_after <= task.response_length:
        raise InputError(
            f"{flag('task.truncate_after')} is {task.truncate_after}; it must be in 0..{task.response_length}"
        )
    prefix, suffix = (
        tokenizer.encode(text, add_special_tokens=False) for text in (task.query_prefix, task.query_suffix)
    )
    return TaskIds(
        pad=models.vocabulary_size(tokenizer),
        eos=-1 if tokenizer.eos_token_id is None else tokenizer.eos_token_id,
        stop=one_token(tokenizer, task.truncate_text, "truncate_text"),
        prefix=prefix,
        suffix=suffix,
        context_length=len(prefix) + task.query_length + len(suffix),
    )


def one_token(tokenizer: PreTrainedTokenizerBase, text: str | None, field: str) -> int | None:
    """The id of a text that must be exactly one token; None for None."""
    if text is None:
        return None
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise InputError(
            f"{flag(f'task.{field}')} {text!r} is {len(ids)} tokens ({ids}) for this tokenizer; "
            f"it must be exactly one"
        )
    return ids[0]


# ---- Queries ---------------------------------------------------------------------------------------------------


class QueryStream:
    """An endless stream of queries: the texts in one shuffled order, again and again.

    The order depends neither on the run's seed nor on the number of processes. `position` counts the texts that have
    been read. A stream that starts at the position of another one continues where that one stopped.
    """

    def __init__(self, task: TaskArgs, tokenizer: PreTrainedTokenizerBase, position: int = 0, split: str = "train"):
        self.texts = sources.load_texts(task.query_dataset, split)
        self.task, self.tokenizer, self.position = task, tokenizer, position
        self.start_id = one_token(tokenizer, task.start_text, "start_text")
        self.end_id = one_token(tokenizer, task.end_text, "end_text")
        # [D02] All runs and processes use the same order.   language/datasets.py#L27-L46
        self.order = list(range(len(self.texts)))
        random.Random(0).shuffle(self.order)
        if len(self.texts) == 0 or self._next_usable() is None:
            which = f"texts that are held out, one of {sources.HELD_OUT}," if split == "test" else "texts"
            raise InputError(
                f"{flag('task.query_dataset')} {task.query_dataset}: none of its {len(self.texts)} {which} gives a "
                f"query; give more texts, or see {flag('task.start_text')} and {flag('task.end_text')}"
            )
        self.position = position

    def _next_usable(self) -> list[int] | None:
        """The next query; None if a whole pass over the texts gives none."""
        for _ in range(len(self.order)):
            text = self.texts[self.order[self.position % len(self.order)]]
            self.position += 1
            tokens = encode_for_query(self.tokenizer, text, self.task.query_length, self.start_id)
            query = trim_query(tokens, self.task.query_length, self.start_id, self.end_id)
            if query:
                return query
        return None

    def left_out(self) -> str:
        """A line that says how many of the first texts give no query, and why; empty if all of them do."""
        looked_at, reasons = self.order[:LOOKED_AT], Counter()
        for text in (self.texts[i] for i in looked_at):
            tokens = encode_for_query(self.tokenizer, text, self.task.query_length, self.start_id)
            if trim_query(tokens, self.task.query_length, self.start_id, self.end_id):
                continue
            if not tokens:
                reasons["are empty"] += 1
            elif self.start_id is not None and self.start_id not in tokens:
                reasons[f"have no {self.task.start_text!r} to begin after ({flag('task.start_text')})"] += 1
            else:
                where = f"within {flag('task.query_length')} {self.task.query_length}"
                reasons[f"have no {self.task.end_text!r} to end with {where} ({flag('task.end_text')})"] += 1
        if not reasons:
            return ""
        why = " and ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items()))
        return f"queries: of the first {len(looked_at):,} texts, {reasons.total():,} give none: {why}"

    def next_batch(self, batch_size: int, pad_id: int) -> torch.Tensor:
        """The next queries, padded on the right: (batch_size, query_length)."""
        # [D08] [D10] [X04] Process r of W takes its slice of a batch that is the same for every W.
        #       language/datasets.py#L66-L85
        return self._padded([self._next_usable() for _ in range(batch_size)], pad_id)

    def first(self, n: int, pad_id: int) -> torch.Tensor:
        """The first n queries of all, or as many as there are: (n, query_length). The position stays the same."""
        position, self.position = self.position, 0
        queries = []
        while len(queries) < n:
            query = self._next_usable()
            if self.position > len(self.order):  # a second pass over the texts has begun
                break
            queries.append(query)
        self.position = position
        return self._padded(queries, pad_id)

    def _padded(self, queries: list[list[int]], pad_id: int) -> torch.Tensor:
        return padded(queries, pad_id, self.task.query_length)


def padded(rows: list[list[int]], pad_id: int, length: int | None = None) -> torch.Tensor:
    """Rows of token ids, padded on the right to a length, or to that of the longest: (rows, length)."""
    longest = max(map(len, rows), default=0) if length is None else length
    return torch.tensor([row + [pad_id] * (longest - len(row)) for row in rows], dtype=torch.long).view(-1, longest)


def encode_for_query(
    tokenizer: PreTrainedTokenizerBase, text: str, query_length: int, start_id: int | None
) -> list[int]:
    """Token ids of a text. Of a long text it encodes only the beginning, enough for `trim_query` to give the same."""
    needed = query_length + CUT_MARGIN
    characters = 8 * needed
    while characters < len(text):
        tokens = encode_text(tokenizer, text[:characters])
        before = 0  # tokens before the query
        if start_id is not None:
            before = tokens.index(start_id) + 1 if start_id in tokens else len(tokens)
        if len(tokens) >= before + needed:
            return tokens
        characters *= 4
    return encode_text(tokenizer, text)


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text that is data. Adds no special tokens, and treats the name of one as ordinary text."""
    return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)


def trim_query(tokens: list[int], query_length: int, start_id: int | None, end_id: int | None) -> list[int] | None:
    """Cut a text's tokens to a query: after the first start token, at most query_length, up to the last end token.

    Returns None if the text has no start token, or no end token within the cut. Golden example, both ids 13:
    `One. Two words. Three more` gives ` Two words.`; `Only end.` is kept whole.
    """
    # [D05] After the first start token; if that is the last one, from the beginning.   language/datasets.py#L49-L55
    if start_id is not None:
        if start_id not in tokens:
            return None
        first = tokens.index(start_id)
        if first < len(tokens) - 1:
            tokens = tokens[first + 1 :]
    # [D06] At most so many of them.   language/datasets.py#L57
    tokens = tokens[:query_length]
    # [D07] Up to the last end token within the cut.   language/datasets.py#L59-L64
    if end_id is not None:
        if end_id not in tokens:
            return None
        tokens = tokens[: len(tokens) - tokens[::-1].index(end_id)]
    return tokens


def add_affixes(queries: torch.Tensor, prefix: list[int], suffix: list[int]) -> torch.Tensor:
    """Contexts for the policy: [prefix, query with its padding, suffix]. (batch, context_length)"""
    # [D09] There may be padding between query and suffix.   lm_tasks.py#L68-L80
    parts = [torch.tensor(ids, dtype=queries.dtype, device=queries.device) for ids in (prefix, suffix)]
    before, after = (part.expand(len(queries), -1) for part in parts)
    return torch.cat([before, queries, after], dim=1)


# ---- Decoding --------------------------------------------------------------------------------------------------


def to_texts(tokenizer: PreTrainedTokenizerBase, tokens: torch.Tensor, pad_id: int) -> list[str]:
    """Decode each row without its padding."""
    return [tokenizer.decode([token for token in row if token != pad_id]) for row in tokens.tolist()]


def sample_rows(
    tokenizer: PreTrainedTokenizerBase,
    ids: TaskIds,
    queries: torch.Tensor,
    responses: torch.Tensor,
    **numbers: torch.Tensor,
) -> list[dict]:
    """The first three episodes as texts, with their numbers (batch,)."""
    # [D80] The log shows some samples at intervals.   train_policy.py#L264-L279
    columns = {
        "query": to_texts(tokenizer, queries[:3], ids.pad),
        "response": to_texts(tokenizer, responses[:3], ids.pad),
        **{name: values[:3].tolist() for name, values in numbers.items()},
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
