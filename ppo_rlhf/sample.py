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
import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf import train_both, train_policy
from ppo_rlhf.lib import command_line, errors, files, pretrained, processes, run
from ppo_rlhf.lib.bounds import NonNegativeFloat, NonNegativeInt, PositiveInt
from ppo_rlhf.lib.errors import InputError
from ppo_rlhf.rlvr import problem_rows, problems, rewards
from ppo_rlhf.tldr import chat_templates, posts

SHOWN = 50  # rows that are printed, of more
AT_A_TIME = 64  # queries


@dataclass(frozen=True, kw_only=True)
class Args:
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
    ends = pretrained.end_ids(tokenizer)
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
        folder, trust = Path(args.task_of or args.policy), args.trust_remote_code
        info = pretrained.read_info(folder)
        if info["kind"] != "policy":
            argument = "--task_of" if args.task_of else "--policy"
            raise InputError(f"{argument} {folder} is a {info['kind']}, not a policy that was trained here")
        self.chapter = next((chapter for field, chapter in CHAPTERS.items() if field in info["task"]), train_policy)
        file = folder / "ppo_rlhf.json"
        if self.chapter is train_policy:
            task = train_policy.from_json(train_policy.TaskArgs, json.dumps(info["task"]), f"{file} was damaged: ")
        else:
            with errors.input_errors(f"{file} was damaged", InputError):
                task = command_line.from_dict(self.chapter.TaskArgs, info["task"])
        evaluated = [task.problems, task.test_problems] if info["function"] == "reasoning_gym" else []
        runs_code = any(map(problem_rows.evaluates_text, evaluated))
        runs_code = runs_code or not rewards.keeps_nothing(info["function"], info["monitor"])
        if runs_code and not (trust or trusted):
            raise InputError(
                f"{folder} is scored by code that is not ours ({info['function']} {info['monitor']}) or by answers "
                f"that are evaluated as Python; if you trust them, add --trust_remote_code"
            )
        if info.get("tool"):
            errors.say(f"{folder} was trained with the tool {info['tool']}; here nothing answers its calls")
        saved = train_policy.Args(
            base_model=info["base_model"],
            trust_remote_code=trust,
            task=task,
            rewards=train_policy.RewardsArgs(trained_model=info["reward_model"]),
        )
        self.task = task
        with errors.typed_as({"base_model": "policy"}):
            self.tokenizer = pretrained.load_tokenizer(args.policy, trust)
        self.ids = self.chapter.task_ids(self.task, self.tokenizer)
        self.pad_id, self.seed, self.device = self.ids.pad, args.seed, processes.default_device()
        usual = getattr(task, "eval_temperature", task.temperature)
        self.temperature = usual if args.temperature is None else args.temperature
        self.models: dict[str, PreTrainedModel] = {}
        for name, model in (("base", saved.base_model), ("policy", args.policy)):
            pretrained.check_vocabulary(model, f"the {name} model {model}", args.policy, trust)
            self.models[name] = train_policy.load_pretrained(model, torch.float32, trust).to(self.device)
        self.scorers: dict[str, Scorer] = {}
        reward_model = args.reward_model or saved.rewards.trained_model
        if info["function"] and not args.reward_model:
            self.scorers["score"] = self.score_of_texts(info["function"], "rewards.function")
        elif args.reward_model or (Path(reward_model) / "reward_head.safetensors").is_file():
            shaping = dataclasses.replace(saved.rewards, trained_model=reward_model)
            try:
                self.scorers["score"] = self.score_of_model(
                    dataclasses.replace(saved, base_model=args.policy, rewards=shaping)
                )
            except InputError as error:
                raise InputError(str(error).replace("--rewards.trained_model", "--reward_model")) from error
        else:
            errors.say(
                f"the texts get no scores: {reward_model} is no reward model of ours; --reward_model names another"
            )
        if info["monitor"]:
            name = re.split("[:.]", info["monitor"])[-1]
            name = "gold" if name == "gold_scores" else name
            self.scorers[name] = self.score_of_texts(info["monitor"], "rewards.monitor")

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
            values = function(asked, texts, references, rows)
            return [float(rewards.is_right(value, name)) for value in values] if self.chapter is problems else values

        return score

    def score_of_model(self, args: train_policy.Args) -> Scorer:
        """Score with the reward model that args.rewards names."""
        model = train_policy.load_reward_model(args, self.tokenizer, self.device)
        whole = self.chapter is not train_policy  # in chapters 2 and 3, our reward models read the whole context

        def score(queries: list[Query], responses: Tensor, texts: list[str]) -> list[float]:
            rows = [query.context if whole else query.tokens for query in queries]
            tokens = train_policy.padded(rows, self.pad_id).to(self.device)
            return model(torch.cat([tokens, responses], dim=1), self.pad_id).tolist()

        return score

    def queries(self, n: int = 0, prompts: Sequence[str] = ()) -> list[Query]:
        """The first n held-out queries of the policy's task, or those that somebody types."""
        for prompt in prompts:
            files.check_text(prompt, "--prompt")
        queries = read_queries(self.task, self.ids, self.tokenizer, n=n, prompts=prompts)
        if not all(query.tokens for query in queries):
            raise InputError("--prompt: a query needs at least one token")
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
        length = contexts.shape[1] + self.task.response_length
        generator = train_policy.keyed_generator(self.seed, "sample", key)
        noise = torch.rand(len(queries), self.task.response_length, generator=generator, dtype=torch.float64)
        noise = noise.to(processes.device_of_noise(self.device))
        columns: dict[str, list[Any]] = {"query": [self.tokenizer.decode(query.tokens) for query in queries]}
        known = any(query.reference for query in queries)
        if known:
            columns["reference"] = [query.reference for query in queries]
        for name, model in self.models.items():
            pretrained.check_size(model, f"the {name} model", length, self.pad_id)
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
            counted = responses if is_chapter_1 else truncated  # in chapter 1, tokens after the stop count for the KL
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
    """Print the comparison as a table, write it to args.out, and return its rows."""
    comparison = Comparison(args)
    if args.interactive:
        rows = []
        for key, prompt in enumerate(typed_queries()):
            rows += comparison.rows(comparison.queries(prompts=[prompt]), key)
            run.print_pairs("", rows[-1:])
    else:
        queries = comparison.queries(args.n, args.prompt)
        if args.out:
            Path(args.out).open("a").close()  # fail now, not after the sampling
        rows = comparison.rows(queries)
        run.print_pairs(f"{args.policy}, temperature {comparison.temperature}", rows[:SHOWN])
        if len(rows) > SHOWN:
            train_both.print_changes(rows)
    if args.out:
        Path(args.out).write_text(files.json_lines(map(files.without_nan, rows)))
    return rows


if __name__ == "__main__":
    errors.run_script(lambda: sample(command_line.parse(Args, description=__doc__)))
