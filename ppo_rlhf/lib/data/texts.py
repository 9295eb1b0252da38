"""Chapter 1's queries and responses as token ids, as in its scripts, for the worlds and for sample.py.

Files and lines next to marks are those of openai/lm-human-preferences at commit cbfd210.
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.lib.base.errors import InputError
from ppo_rlhf.lib.data import sources
from ppo_rlhf.lib.nets import pretrained, templates
from ppo_rlhf.lib.nets.pretrained import vocabulary_size


@dataclass(frozen=True, kw_only=True)
class TaskArgs(templates.FormatArgs):
    query_dataset: str = "books"
    """texts: books, cnndm, tldr, tales, reviews, dummy, a .txt, .jsonl or .json file, or a folder with stories.txt"""
    reshuffle: bool = False
    """give each pass over the texts an order of its own"""
    query_length: int = 64
    """longest query, in tokens; shorter ones are padded"""
    query_prefix: str = ""
    """text before each query, and in its turn of a chat; the policy reads it, the reward model does not"""
    query_suffix: str = ""
    """text after each query, and in its turn of a chat; the policy reads it, the reward model does not"""
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


@dataclass(frozen=True, kw_only=True)
class TaskIds:
    """The task's texts as token ids of one tokenizer."""

    pad: int  # one above the largest id of the tokenizer: all below it can be sampled
    eos: int  # -1 if the tokenizer has none
    stop: int | tuple[int, ...] | None  # several if it is the end of text, and the model names more
    prefix: list[int]
    suffix: list[int]
    context_length: int  # prefix, padded query and suffix


def task_ids(task: TaskArgs, tokenizer: PreTrainedTokenizerBase) -> TaskIds:
    """Check the task's numbers and encode its texts."""
    templates.check_task(task)
    prefix, suffix = templates.affixes(task, tokenizer, task.query_prefix, task.query_suffix)
    return TaskIds(
        # GPT-2 and Pythia have no padding token, and their end of text may be sampled. So padding gets an id that no
        # text has and no model samples, one above the largest.
        pad=vocabulary_size(tokenizer),
        eos=-1 if tokenizer.eos_token_id is None else tokenizer.eos_token_id,
        stop=templates.all_ends(tokenizer, pretrained.one_token(tokenizer, task.truncate_text, "truncate_text")),
        prefix=prefix,
        suffix=suffix,
        context_length=len(prefix) + task.query_length + len(suffix),
    )


class QueryStream:
    """An endless stream of queries: the texts in one shuffled order, again and again, unless the task reshuffles.

    The order depends neither on the run's seed nor on the number of processes. `position` counts the texts read; a
    stream that starts at the position of another one continues where that one stopped.
    """

    def __init__(self, task: TaskArgs, tokenizer: PreTrainedTokenizerBase, position: int = 0, split: str = "train"):
        self.texts = sources.load_texts(task.query_dataset, split)
        self.task = task
        self.tokenizer = tokenizer
        self.position = position
        self.order = []  # of the texts in one pass
        self.number = -1  # which order it is
        self.start_id = pretrained.one_token(tokenizer, task.start_text, "start_text")
        self.end_id = pretrained.one_token(tokenizer, task.end_text, "end_text")
        if not self.first(1, pad_id=0).numel():
            raise InputError(sources.no_query(self, split))

    def tokens(self, place: int) -> list[int]:
        """Token ids of a text, by its place among all that are read, pass after pass."""
        # [D02] All runs and processes use the same order.   language/datasets.py#L27-L46
        number = place // len(self.texts) if self.task.reshuffle else 0
        if number != self.number:
            self.order = list(range(len(self.texts)))
            self.number = number
            random.Random(number).shuffle(self.order)
        # The texts are data: no special tokens are added, and the name of one is ordinary text.
        text = self.texts[self.order[place % len(self.order)]]
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)

    def trim(self, tokens: list[int]) -> list[int] | None:
        return trim_query(tokens, self.task.query_length, self.start_id, self.end_id)

    def next_query(self) -> list[int] | None:
        """The next query; None if a whole pass over the texts gives none."""
        for _ in range(len(self.texts)):
            self.position += 1
            if query := self.trim(self.tokens(self.position - 1)):
                return query
        return None

    def next_batch(self, batch_size: int, pad_id: int) -> Tensor:
        """The next queries, padded on the right: (batch_size, query_length)."""
        # [D08] [D10] [X04] Process r of W takes its slice of a batch that is the same for every W.
        #       language/datasets.py#L66-L85
        return padded([self.next_query() for _ in range(batch_size)], pad_id, self.task.query_length)

    def first(self, n: int, pad_id: int) -> Tensor:
        """The first n queries of all, or as many as there are: (n, query_length). The position stays the same."""
        position = self.position
        self.position = 0
        queries = []
        while len(queries) < n and (query := self.next_query()) and self.position <= len(self.texts):
            queries.append(query)
        self.position = position
        return padded(queries, pad_id, self.task.query_length)


def padded(rows: list[list[int]], pad_id: int, length: int | None = None) -> Tensor:
    """Rows of token ids, padded on the right to a length, or to that of the longest: (rows, length)."""
    longest = max(map(len, rows), default=0) if length is None else length
    return torch.tensor([row + [pad_id] * (longest - len(row)) for row in rows], dtype=torch.long).view(-1, longest)


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


def add_affixes(queries: Tensor, prefix: list[int], suffix: list[int]) -> Tensor:
    """Contexts for the policy: [prefix, query with its padding, suffix]. (batch, context_length)"""
    # [D09] There may be padding between query and suffix.   lm_tasks.py#L68-L80
    parts = [torch.tensor(ids, dtype=queries.dtype, device=queries.device) for ids in (prefix, suffix)]
    before, after = (part.expand(len(queries), -1) for part in parts)
    return torch.cat([before, queries, after], dim=1)


def to_texts(tokenizer: PreTrainedTokenizerBase, tokens: Tensor, pad_id: int) -> list[str]:
    """Decode each row without its padding."""
    return [tokenizer.decode([token for token in row if token != pad_id]) for row in tokens.tolist()]
