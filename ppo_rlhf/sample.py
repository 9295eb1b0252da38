"""Show what a trained policy writes, next to what the model that it started from writes.

Both continue the same queries with the same sampling noise, and what scored the policy in its training scores both.

    python ppo_rlhf/sample.py --policy models/<run>/policy                     # the task's held-out queries
    python ppo_rlhf/sample.py --policy models/<run>/policy --n 20 --out samples.jsonl
    python ppo_rlhf/sample.py --policy models/<run>/policy --prompt "Mara gladly helped the old miller."
    python ppo_rlhf/sample.py --policy models/<run>/policy --interactive       # type queries; an empty line ends

A query is a text to continue in chapter 1, a post to summarise in chapter 2, and a problem to solve in chapter 3.
There, the score is 1 if the verifier takes the solution for correct, and 0 otherwise.

Files and lines next to marks are those of openai/lm-human-preferences at commit cbfd210.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf import train_both, train_policy
from ppo_rlhf.rlvr import problem_rows, problems, rewards
from ppo_rlhf.tldr import chat_templates, models, posts
from ppo_rlhf.train_policy import InputError

SHOWN = 50  # rows that are printed, of more
AT_A_TIME = 64  # queries


@dataclass(frozen=True, kw_only=True)
class Args(train_policy.Arguments):
    policy: str
    """a trained policy, models/<run>/policy; with --task_of, any causal language model, in a folder or on the hub"""
    n: PositiveInt = 5
    """number of queries"""
    temperature: NonNegativeFloat | None = None
    """sampling temperature; 0: the likeliest token each time; None: the task's, in chapter 2 that of evaluations"""
    seed: NonNegativeInt = 1
    """seed of the sampling noise; both models get the same"""
    prompt: tuple[str, ...] = ()
    """texts to continue, posts to summarise or questions to answer, in place of the task's"""
    interactive: bool = False
    """ask for queries until an empty line"""
    out: str = ""
    """file to write the rows to, as JSON lines"""
    task_of: str = ""
    """folder of a policy whose task and base model count; needed if `policy` is any causal language model"""
    reward_model: str = ""
    """a reward model of chapter 1 or 2 that scores the texts; empty: what scored the policy, if it is there"""
    trust_remote_code: bool = False
    """run Python code that comes with the models, functions that the policy names, and answers that are evaluated
    to score them"""


# ---- Queries ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Query:
    context: list[int]  # token ids that the models continue
    tokens: list[int]  # the same without what the task puts around a query
    reference: str | None = None  # a summary that a person wrote, or the correct answer
    row: rewards.Columns = field(default_factory=dict)  # of a problem, for verifiers that ask for its columns


def read_queries(
    task: Any, ids: Any, tokenizer: PreTrainedTokenizerBase, *, n: int = 0, prompts: Sequence[str] = ()
) -> list[Query]:
    """The first n queries of a policy's task that it was not trained on, or those that somebody types.

    task, ids: the TaskArgs of a chapter and their special tokens.
    """
    references: Sequence[str | None] = [None] * len(prompts)
    if isinstance(task, train_policy.TaskArgs):
        rows = [chat_templates.encode_text(tokenizer, prompt)[: task.query_length] for prompt in prompts]
        if not prompts:
            rows = train_both.held_out_queries(task, tokenizer, n)
        return [Query(context=[*ids.prefix, *row, *ids.suffix], tokens=row) for row in rows]
    if isinstance(task, posts.TaskArgs):
        encoder = posts.Encoder(tokenizer, ids)
        rows = [encoder.query({"subreddit": "", "title": "", "post": prompt}, task) for prompt in prompts]
        if not prompts:
            held_out = posts.read_posts(task, tokenizer, "test", n)
            rows = without_padding(held_out.queries, ids.pad)
            references = to_texts(held_out.references, tokenizer, ids.pad)
        inside = [row[len(ids.prefix) : len(row) - len(ids.suffix)] for row in rows]
    else:
        rendered = [problems.render_prompt(prompt, task, tokenizer) for prompt in prompts]
        rows = [problems.encode_prompt(text, task, tokenizer) for text in rendered]
        if not prompts:
            held_out = problems.read_problems(task, tokenizer, "test")
            known = zip(held_out.prompts[:n], held_out.answers, held_out.rows, strict=False)
            return [Query(context=row, tokens=row, reference=answer, row=columns) for row, answer, columns in known]
        inside = rows
    parts = zip(rows, inside, references, strict=True)
    return [Query(context=row, tokens=tokens, reference=reference) for row, tokens, reference in parts]


def without_padding(tokens: Tensor, pad_id: int) -> list[list[int]]:
    return [[token for token in row if token != pad_id] for row in tokens.tolist()]


def to_texts(responses: Tensor, tokenizer: PreTrainedTokenizerBase, pad_id: int) -> list[str]:
    """Responses (n, response_length) as people and functions read them: up to the end of the text."""
    ends = models.end_ids(tokenizer)
    rows = without_padding(responses, pad_id)
    return [tokenizer.decode(list(itertools.takewhile(lambda token: token not in ends, row))) for row in rows]


# ---- Samples and scores ----------------------------------------------------------------------------------------

CHAPTERS = {"query_dataset": train_policy, "posts": posts, "problems": problems}  # by a field of their tasks
# Queries, responses (n, response_length) and their texts -> scores
Scorer = Callable[[list[Query], Tensor, list[str]], list[float]]


class Comparison:
    """A policy, the model that it started from, and what scores them."""

    # [X11] Held-out queries, at the task's temperature.   sample.py#L16-L66

    def __init__(self, args: Args, trusted: bool = False):
        """trusted: whether functions that the policy names may run, and not just those of ppo_rlhf."""
        folder, trust = args.task_of or args.policy, args.trust_remote_code
        info = train_policy.read_info(folder)
        if info.get("kind") != "policy":
            argument = "--task_of" if args.task_of else "--policy"
            raise InputError(f"{argument} {folder} is a {info.get('kind')}, not a policy that was trained here")
        damaged = f"{folder}/ppo_rlhf.json is of another version"
        with train_policy.input_errors(damaged):
            base_model, reward_model = info["base_model"], info["reward_model"]
            function, monitor = info["function"], info["monitor"]
            self.chapter = next(chapter for field, chapter in CHAPTERS.items() if field in info["task"])
        self.task = task = train_policy.from_json(self.chapter.TaskArgs, json.dumps(info["task"]), f"{damaged}: ")
        evaluated = [task.problems, task.test_problems] if function == "reasoning_gym" else []
        runs_code = any(map(problem_rows.evaluates_text, evaluated)) or not rewards.keeps_nothing(function, monitor)
        if runs_code and not (trust or trusted):
            raise InputError(
                f"{folder} is scored by code that is not ours ({function} {monitor}) or by answers that are "
                f"evaluated as Python; if you trust them, add --trust_remote_code"
            )
        if info.get("tool"):
            print(f"{folder} was trained with the tool {info['tool']}; here nothing answers its calls")
        self.seed, self.device = args.seed, train_policy.make_accelerator("float32").device
        with models.named("policy"):
            self.tokenizer = models.load_tokenizer(args.policy, trust)
        self.ids = self.chapter.task_ids(task, self.tokenizer)
        self.pad_id = self.ids.pad
        usual = getattr(task, "eval_temperature", task.temperature)
        self.temperature = usual if args.temperature is None else args.temperature
        models.check_vocabulary(base_model, "base_model", self.tokenizer, trust)
        self.longest = getattr(self.ids, "context_length", task.query_length)  # context, in tokens
        self.models: dict[str, PreTrainedModel] = {}
        for name, model, argument in (("base", base_model, "base_model"), ("policy", args.policy, "policy")):
            with models.named(argument):
                self.models[name] = train_policy.load_pretrained(model, torch.float32, trust).to(self.device)
                length = self.longest + task.response_length
                train_policy.check_model(self.models[name], model, length, self.pad_id)
        self.scorers: dict[str, Scorer] = {}
        if function and not args.reward_model:
            self.scorers["score"] = self.score_of_texts(function, "rewards.function")
        elif args.reward_model or Path(reward_model, "reward_head.safetensors").is_file():
            self.scorers["score"] = self.score_of_model(args.reward_model or reward_model, trust)
        else:
            print(f"the texts get no scores: {reward_model} is no reward model of ours; --reward_model names another")
        if monitor:
            name = re.split("[:.]", monitor)[-1].replace("gold_scores", "gold")
            self.scorers[name] = self.score_of_texts(monitor, "rewards.monitor")

    def score_of_texts(self, name: str, field: str) -> Scorer:
        """Score with a function or a verifier. In chapter 3, a score is 1 if the solution is correct, and else 0."""
        if self.chapter is train_policy:
            of_two = train_policy.import_function(name, field)
        elif self.chapter is problems:
            function = rewards.load_verifier(name, field, partial(problems.response_start, self.task), trial=None)
        else:
            function = rewards.load_verifier(name, field)

        def score(queries: list[Query], responses: Tensor, texts: list[str]) -> list[float]:
            asked = [self.tokenizer.decode(query.tokens) for query in queries]
            if self.chapter is train_policy:
                return train_policy.call(of_two, asked, texts).tolist()
            references, rows = [query.reference for query in queries], [query.row for query in queries]
            if self.chapter is problems:
                rows = problems.with_tokens(rows, responses, self.pad_id)
            values = function(asked, texts, references, rows)
            return [float(rewards.is_right(value, name)) for value in values] if self.chapter is problems else values

        return score

    def score_of_model(self, folder: str, trust_remote_code: bool) -> Scorer:
        """Score with the reward model in a folder."""
        with models.named("reward_model"):
            model = models.load_reward_model(folder, torch.float32, trust_remote_code).to(self.device)
        models.check_vocabulary(folder, "reward_model", self.tokenizer, trust_remote_code)
        whole = self.chapter is not train_policy  # in chapters 2 and 3, our reward models read the whole context

        def score(queries: list[Query], responses: Tensor, texts: list[str]) -> list[float]:
            rows = [query.context if whole else query.tokens for query in queries]
            tokens = train_policy.padded(rows, self.pad_id).to(self.device)
            return model(torch.cat([tokens, responses], dim=1), self.pad_id).tolist()

        return score

    def queries(self, n: int = 0, prompts: Sequence[str] = ()) -> list[Query]:
        """The first n held-out queries of the policy's task, or those that somebody types."""
        queries = read_queries(self.task, self.ids, self.tokenizer, n=n, prompts=prompts)
        if not all(query.tokens for query in queries):
            raise InputError("--prompt: a query needs at least one token")
        if (length := max(len(query.context) for query in queries)) > self.longest:
            raise InputError(f"--prompt: {length} tokens are more than the {self.longest} of the policy's task")
        return queries

    def rows(self, queries: list[Query], first_key: int = 0) -> list[dict[str, Any]]:
        """Continue each query with both models, a few at a time. One row per query: texts, scores and KL.

        first_key: of the sampling noise; each part has its own. log-prob: of a text under the base model, mean over
        its tokens. kl: log-prob of the policy's text under the policy minus that under the base model. Both are at
        the temperature of training, in nats.
        """
        parts = [queries[start : start + AT_A_TIME] for start in range(0, len(queries), AT_A_TIME)]
        return [row for key, part in enumerate(parts, first_key) for row in self.rows_of_part(part, key)]

    @torch.no_grad()
    def rows_of_part(self, queries: list[Query], key: int) -> list[dict[str, Any]]:
        contexts = train_policy.padded([query.context for query in queries], self.pad_id).to(self.device)
        generator = train_policy.keyed_generator(self.seed, "sample", key)
        noise = torch.rand(len(queries), self.task.response_length, generator=generator, dtype=torch.float64)
        noise = noise.to(train_policy.float64_device(self.device))
        columns: dict[str, list[Any]] = {"query": [self.tokenizer.decode(query.tokens) for query in queries]}
        known = any(query.reference for query in queries)
        if known:
            columns["reference"] = [query.reference for query in queries]
        for name, model in self.models.items():
            responses, _ = train_policy.generate(
                model, contexts, noise, self.pad_id, self.pad_id, max(self.temperature, problems.GREEDY)
            )
            is_chapter_1 = self.chapter is train_policy
            stops = self.ids.stop if is_chapter_1 else self.ids.stops
            after = self.task.truncate_after if is_chapter_1 else 0
            truncated = train_policy.truncate_at(responses, stops, after, self.pad_id)
            texts = columns[name] = to_texts(truncated, self.tokenizer, self.pad_id)
            for score_name, score in self.scorers.items():
                if known or self.chapter is not problems:  # a verifier needs an answer
                    columns[f"{name} {score_name}"] = score(queries, truncated, texts)
            counted = responses if is_chapter_1 else truncated  # in chapter 1, the KL includes tokens after the stop
            under_base = self.logprobs("base", contexts, counted)
            tokens = (counted != self.pad_id).sum(1).clamp(min=1)
            columns[f"{name} log-prob"] = (under_base.sum(1) / tokens).tolist()
        # under_base is that of the policy's texts, because the policy comes last.
        columns["kl"] = (self.logprobs("policy", contexts, counted) - under_base).sum(1).tolist()
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def logprobs(self, name: str, contexts: Tensor, responses: Tensor) -> Tensor:
        """Log-probs of responses (n, response_length) under a model, at training's temperature; 0 for padding."""
        logprobs, _, _ = train_policy.response_logprobs(
            self.models[name],
            torch.cat([contexts, responses], dim=1),
            self.pad_id,
            contexts.shape[1],
            self.task.temperature,
            self.pad_id,
        )
        return logprobs.masked_fill(responses == self.pad_id, 0)


# ---- Print -----------------------------------------------------------------------------------------------------


def typed_queries() -> Iterator[str]:
    """Queries that somebody types, until an empty line or the end of the input."""
    with contextlib.suppress(EOFError):
        yield from iter(lambda: input("query> "), "")


def sample(args: Args) -> list[dict[str, Any]]:
    """Print the comparison, write it to args.out, and return its rows."""
    args = train_policy.checked(args)
    comparison = Comparison(args)
    if args.interactive:
        rows = []
        for key, prompt in enumerate(typed_queries()):
            rows += comparison.rows(comparison.queries(prompts=[prompt]), key)
            train_both.print_row(rows[-1])
    else:
        queries = comparison.queries(args.n, args.prompt)
        if args.out:
            Path(args.out).open("a").close()  # fail now, not after the sampling
        rows = comparison.rows(queries)
        print(f"{args.policy}, temperature {comparison.temperature}")
        for row in rows[:SHOWN]:
            train_both.print_row(row)
        if len(rows) > SHOWN:
            train_both.print_changes(rows)
    if args.out:
        without_nan = ({name: None if x != x else x for name, x in row.items()} for row in rows)  # JSON has none
        Path(args.out).write_text("".join(json.dumps(row) + "\n" for row in without_nan))
    return rows


if __name__ == "__main__":
    train_policy.run_script(lambda: sample(tyro.cli(Args, description=__doc__)))
