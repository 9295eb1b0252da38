"""Show what a trained policy writes, next to what the model that it started from writes.

Both continue the same queries with the same sampling noise, and the reward model scores what they write.

    python ppo_rlhf/sample.py --policy models/<run>/policy                     # queries of the task's held-out texts
    python ppo_rlhf/sample.py --policy models/<run>/policy --n 20 --out samples.jsonl
    python ppo_rlhf/sample.py --policy models/<run>/policy --prompt "Mara gladly helped the old miller."
    python ppo_rlhf/sample.py --policy models/<run>/policy --interactive       # type queries; an empty line ends

A policy of chapter 1 continues texts, at the task's temperature.

One of chapter 2 summarises posts of the test split, at the temperature of evaluations. There, --prompt is the text
of a post, or a whole query as evaluation.jsonl has it, from SUBREDDIT: to TL;DR:

One of chapter 3 solves held-out problems, at the task's temperature, and its verifier checks the solutions.
With --temperature 0 they are those of evaluation.jsonl. There, --prompt is a question, and becomes a prompt as in the
run.

Files and lines next to marks are those of openai/lm-human-preferences at commit cbfd210.
"""

import contextlib
import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf import worlds
from ppo_rlhf.lib import rewards
from ppo_rlhf.lib.base import errors, files, processes
from ppo_rlhf.lib.base.bounds import NonNegativeFloat, NonNegativeInt, PositiveInt
from ppo_rlhf.lib.base.errors import InputError, NumericalError
from ppo_rlhf.lib.nets import foreign, pretrained, templates
from ppo_rlhf.lib.scoring import scorers
from ppo_rlhf.lib.services import cli, run
from ppo_rlhf.rlvr import problems
from ppo_rlhf.tldr import models, packing, posts
from ppo_rlhf.tldr.posts import to_texts
from ppo_rlhf.tldr.responses import generate_until, response_statistics
from ppo_rlhf.train_policy import QueryStream, TaskArgs, add_affixes, generate, keyed_generator, task_ids, truncate_at
from ppo_rlhf.train_reward import RewardModel

SHOWN = 50  # rows that are printed, of more


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
    base_model: str = ""
    """model to compare with; empty: the one that the policy started from"""
    task_of: str = ""
    """folder of a policy whose task, base model and scorers count; needed if `policy` is any causal language model"""
    reward_model: str = ""
    """a reward model, also one from elsewhere; empty: the one that the policy was trained with, if it is there"""
    judge: str = ""
    """another reward model, which judges the texts too; the policy should never have seen it"""
    label: str = ""
    """the label whose logit is the score, for a judge from elsewhere; without --judge, for the reward model, which
    otherwise has the label of its training"""
    query_dataset: str = ""
    """where queries come from; empty: the texts that the task's data set holds out"""
    trust_remote_code: bool = False
    """run Python code that comes with the base model, functions that the policy names, and answers that are evaluated
    to score them"""


class Continuations:
    """Chapter 1: a text is continued, and the continuation is scored up to a stop token."""

    source = "query_dataset"  # where held-out queries come from: a field of the task
    verdict = "score"  # what the function that the policy names gives
    own_functions: Collection[str] = ()  # names of functions of ours, in addition to those that begin with ppo_rlhf

    def __init__(self, task: dict[str, Any], tokenizer: PreTrainedTokenizerBase, source: str):
        """task: as ppo_rlhf.json has it; source: where held-out queries come from, if not from the task's."""
        # Models from earlier versions may have an argument more.
        known = {field.name for field in dataclasses.fields(TaskArgs)}
        task = {name: value for name, value in task.items() if name in known}
        self.task, self.tokenizer = cli.from_dict(TaskArgs, task), tokenizer
        trained_on = Path(self.task.query_dataset).resolve()
        source = worlds.find_value("task.query_dataset", source or self.task.query_dataset)
        # Of another file than that which PPO trained on, every text is new.
        self.split = "all" if Path(source).is_file() and Path(source).resolve() != trained_on else "test"
        self.task = dataclasses.replace(self.task, query_dataset=source)
        self.ids = task_ids(self.task, tokenizer)
        self.context_length, self.eval_temperature = self.ids.context_length, self.task.temperature

    def held_out(self, n: int) -> tuple[torch.Tensor, torch.Tensor | list[str] | None]:
        """The first n queries that PPO did not see (n, query_length), and references, if the data has any."""
        return QueryStream(self.task, self.tokenizer, split=self.split).first(n, self.ids.pad), None

    def query(self, prompt: str) -> list[int]:
        """Token ids of a query, at most query_length."""
        return templates.encode_text(self.tokenizer, prompt)[: self.task.query_length]

    def contexts(self, queries: torch.Tensor) -> torch.Tensor:
        """The context that the models read for queries (n, query_length): (n, context_length)."""
        return add_affixes(queries, self.ids.prefix, self.ids.suffix)

    def respond(
        self, model: PreTrainedModel, contexts: torch.Tensor, noise: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        """The responses (n, response_length) of a model after contexts (n, context_length)."""
        return generate(model, contexts, noise, self.ids.pad, self.ids.pad, temperature)[0]

    def cut(self, responses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of responses: what counts for the KL, what is scored, and what is shown: three of (n, response_length)."""
        truncated = truncate_at(responses, self.ids.stop, self.task.truncate_after, self.ids.pad)
        return responses, truncated, truncated

    def bare(self, queries: torch.Tensor) -> torch.Tensor:
        """Queries as they are shown, without what the task puts around them."""
        return queries

    def dialogues(self, queries: torch.Tensor) -> list[list[dict[str, str]]] | None:
        """What a reward model from elsewhere reads of queries; None: their text is the user's."""
        return None

    def as_texts(self, shown: torch.Tensor) -> list[str]:
        """The part of responses that is shown, as texts."""
        return to_texts(self.tokenizer, shown, self.ids.pad)

    def scorer(self, name: str, field: str) -> scorers.Scorer:
        """The function that the policy names: of queries, what is shown of responses, and references or None."""
        return scorers.text_scorer(name, field, self.tokenizer, self.ids.pad)


class Summaries(Continuations):
    """Chapter 2: a post is summarised, and what comes after the end of the summary counts nowhere."""

    source = "posts"

    def __init__(self, task: dict[str, Any], tokenizer: PreTrainedTokenizerBase, source: str):
        self.task, self.tokenizer = cli.from_dict(posts.TaskArgs, task), tokenizer
        self.task = dataclasses.replace(self.task, posts=worlds.find_value("task.posts", source or self.task.posts))
        self.ids = posts.task_ids(self.task, tokenizer)
        self.context_length, self.eval_temperature = self.task.query_length, self.task.eval_temperature

    def held_out(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        summaries = posts.read_posts(self.task, self.tokenizer, "test", n)
        return summaries.queries, posts.without_ends(summaries.references, self.tokenizer, self.ids)

    def query(self, prompt: str) -> list[int]:
        if self.task.query_format == "plain":
            return posts.Encoder(self.tokenizer, self.ids).query({"post": prompt}, self.task)
        whole = re.fullmatch(posts.format_post("(.*?)", "(.*?)", "(.*)"), prompt, re.DOTALL)
        row = dict(zip(("subreddit", "title", "post"), whole.groups() if whole else ("", "", prompt), strict=True))
        return posts.Encoder(self.tokenizer, self.ids).query(row, self.task)

    def contexts(self, queries: torch.Tensor) -> torch.Tensor:
        return queries

    def cut(self, responses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        truncated = truncate_at(responses, self.ids.stops, 0, self.ids.pad)
        return truncated, truncated, posts.without_ends(truncated, self.tokenizer, self.ids)

    def bare(self, queries: torch.Tensor) -> torch.Tensor:
        return posts.bare(queries, self.ids)

    def scorer(self, name: str, field: str) -> scorers.Scorer:
        return posts.text_scorer(name, field, self.tokenizer, self.ids)


class Solutions(Continuations):
    """Chapter 3: a problem is solved, up to a stop token, and a verifier says whether the solution is correct.

    Queries are prompts as the policy's run rendered them; references are the answers, as texts.
    """

    source = "test_problems"  # or problems, if the task names none that are held out
    verdict = "right"
    own_functions = rewards.VERIFIERS

    def __init__(
        self,
        task: dict[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        source: str,
        generation_config: GenerationConfig,
    ):
        """generation_config: of the policy; it may name more stop ids."""
        self.task, self.tokenizer = cli.from_dict(problems.TaskArgs, task), tokenizer
        of_train = worlds.find_value("task.problems", self.task.problems)
        of_test = worlds.find_value("task.test_problems", source or self.task.test_problems)
        self.task = dataclasses.replace(self.task, problems=of_train, test_problems=of_test)
        self.source = "test_problems" if of_test else "problems"
        self.ids = problems.task_ids(self.task, tokenizer, generation_config)
        self.context_length, self.eval_temperature = self.task.prompt_length, self.task.temperature
        self.asked: dict[tuple[int, ...], list[dict[str, str]]] = {}  # by the tokens of their prompts

    def held_out(self, n: int) -> tuple[torch.Tensor, list[str]]:
        found = problems.read_problems(self.task, self.tokenizer, "test")
        self.asked |= zip(map(tuple, found.prompts), found.messages, strict=True)
        return found.batch(range(min(n, len(found))), self.ids.pad), found.answers[:n]

    def query(self, prompt: str) -> list[int]:
        rendered = problems.render_prompt(prompt, self.task, self.tokenizer)
        tokens = problems.encode_prompt(rendered, self.task, self.tokenizer)
        if len(tokens) > self.task.prompt_length:  # the run left out such problems, and cut none
            raise InputError(
                f"--prompt: a prompt of {len(tokens)} tokens; the policy's task has at most {self.task.prompt_length}"
            )
        self.asked[tuple(tokens)] = problems.dialogue(prompt, self.task, rendered)
        return tokens

    def dialogues(self, queries: torch.Tensor) -> list[list[dict[str, str]]]:
        return [self.asked[tuple(row[row != self.ids.pad].tolist())] for row in queries]

    def contexts(self, queries: torch.Tensor) -> torch.Tensor:
        return packing.pack(queries, self.ids.pad, int((queries != self.ids.pad).sum(1).max()))

    def respond(
        self, model: PreTrainedModel, contexts: torch.Tensor, noise: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        responses, _ = generate_until(
            model,
            contexts,
            noise,
            pad_id=self.ids.pad,
            vocab_size=self.ids.vocab_size,
            temperature=temperature,
            stop_ids=self.ids.stops,
        )
        return responses

    def cut(self, responses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return responses, responses, responses

    def as_texts(self, shown: torch.Tensor) -> list[str]:
        return problems.to_texts(self.tokenizer, shown, self.ids)

    def scorer(self, name: str, field: str) -> scorers.Scorer:
        verifier = rewards.load_verifier(name, field, partial(problems.response_start, self.task))

        def is_right(queries: torch.Tensor, shown: torch.Tensor, answers: list[str] | None) -> torch.Tensor | None:
            if answers is None:
                return None
            prompts = to_texts(self.tokenizer, queries, self.ids.pad)
            # As in evaluations, what the verifier cannot judge is wrong.
            return rewards.is_right(torch.tensor(verifier(prompts, self.as_texts(shown), answers)), name).double()

        return is_right


def load_judge(
    argument: str,
    model: str,
    label: str,
    *,
    texts: Continuations,
    policy: str,
    device: torch.device,
    trust_remote_code: bool,
) -> Callable[..., torch.Tensor]:
    """What a reward model says of queries and what is scored of responses.

    argument: what names the model. label: of one from elsewhere. policy: a model with the tokenizer of the texts. On
    the device `meta` all is checked that can be without the weights, which are not read.
    """
    pad_id, length = texts.ids.pad, texts.task.query_length + texts.task.response_length
    if foreign.is_foreign(model) and isinstance(texts.task, templates.FormatArgs):
        kind = {"dtype": torch.float32, "device": device, "trust_remote_code": trust_remote_code, "field": argument}
        classifier = foreign.Classifier(model, label, **kind)
        score = foreign.scorer_of(classifier, texts.tokenizer, pad_id, texts.task, bare=texts.bare)
        return lambda queries, scored, *_: score(queries, scored, messages=texts.dialogues(queries))
    what, folder = f"--{argument} {model}", Path(model)
    pretrained.find_head(folder, what)
    pretrained.check_kind(folder, what, "reward model")
    pretrained.check_vocabulary(model, what, policy, trust_remote_code)
    backbone = pretrained.empty_model(model, trust_remote_code, AutoModel)
    pretrained.check_size(backbone, what, length, pad_id)
    scorer = RewardModel(backbone)
    if device.type != "meta":
        scorer = models.load_reward_model(folder, torch.float32, trust_remote_code).to(device)
    return lambda queries, scored, *_: scorer(torch.cat([queries, scored], dim=1), pad_id)


class Comparison:
    """A policy, the model that it started from, and what scores them."""

    # [X11] Held-out queries, at the task's temperature.   sample.py#L16-L66

    def __init__(self, args: Args, trust_functions: bool = False):
        """trust_functions: whether the functions that the policy names may run, and not just those of ppo_rlhf."""
        folder, argument = Path(args.task_of or args.policy), "--task_of" if args.task_of else "--policy"
        if not args.task_of and not (folder / "ppo_rlhf.json").is_file():
            raise InputError(
                f"--policy {folder} was not trained here, so it has no task; add --task_of models/<run>/policy, "
                f"whose queries it then continues"
            )
        info = pretrained.read_info(folder)
        if info["kind"] != "policy":
            raise InputError(f"{argument} {folder} is a {info['kind']}, not a policy that was trained here")
        kind = next((kind for kind in (Solutions, Summaries) if kind.source in info["task"]), Continuations)
        for field in ("function", "monitor"):
            ours = info[field].startswith("ppo_rlhf.") or info[field] in kind.own_functions
            if info[field] and not (ours or args.trust_remote_code or trust_functions):
                raise InputError(
                    f"{folder} names the function {info[field]}; if you trust it, add --trust_remote_code"
                )
            if info[field] and info[field] not in kind.own_functions:
                scorers.import_function(info[field], f"rewards.{field}")
        if info.get("tool"):
            errors.say(f"{folder} was trained with the tool {info['tool']}; here nothing answers its calls")
        reward_model = worlds.find_value("rewards.trained_model", args.reward_model or info["reward_model"])
        judges = {"reward_model": reward_model, "judge": args.judge}
        for argument, judge in judges.items():
            if argument == "reward_model" and not args.reward_model and not Path(judge).is_dir():
                continue  # it may be on the hub, or gone, and the policy can be sampled without it
            if judge and not foreign.is_foreign(judge):
                pretrained.check_kind(Path(judge), f"--{argument} {judge}", "reward model")
        base_model = worlds.find_value("base_model", args.base_model or info["base_model"])
        self.device = processes.default_device()
        with errors.typed_as({"base_model": "policy"}):
            self.tokenizer = pretrained.load_tokenizer(args.policy, args.trust_remote_code)
            policy = models.load_pretrained(args.policy, torch.float32, args.trust_remote_code).to(self.device)
        more = {"generation_config": policy.generation_config} if kind is Solutions else {}
        with errors.input_errors(f"{folder / 'ppo_rlhf.json'} was damaged", InputError):
            task = dataclasses.asdict(templates.FormatArgs()) | info["task"]  # older policies know no format
            self.texts = kind(task, self.tokenizer, source=args.query_dataset, **more)
        self.task, self.pad_id, self.seed = self.texts.task, self.texts.ids.pad, args.seed
        by_scorer = kind is Solutions and info["function"] == "reasoning_gym"
        asked = (self.task.problems, self.task.test_problems) if by_scorer else ()
        evaluated = [name for name in asked if problems.problem_rows.evaluates_text(name)]
        if evaluated and not (args.trust_remote_code or trust_functions):
            raise InputError(
                f"{folder} is scored by {evaluated[0]}, which evaluates answers as Python; if you accept the risk, "
                f"add --trust_remote_code"
            )
        self.temperature = self.texts.eval_temperature if args.temperature is None else args.temperature
        trust, vocab_size = args.trust_remote_code, self.pad_id
        length = self.texts.context_length + self.task.response_length
        self.models: dict[str, PreTrainedModel] = {
            "base": models.load_pretrained(base_model, torch.float32, trust).to(self.device),
            "policy": policy,
        }
        pretrained.check_vocabulary(base_model, f"--base_model {base_model}", args.policy, trust)
        pretrained.check_size(self.models["base"], f"--base_model {base_model}", length, vocab_size)
        pretrained.check_size(self.models["policy"], f"--policy {args.policy}", length, vocab_size)
        # Each gets queries, of the responses what is scored and what is shown, and references or None; and may give
        # None, if it has nothing to say.
        self.scorers: dict[str, Callable[..., torch.Tensor | None]] = {}
        of_training = info.get("label", "")
        labels = {"reward_model": of_training if args.judge else args.label or of_training, "judge": args.label}
        for argument, judge in judges.items():
            if not judge:
                continue
            name = "judge" if argument == "judge" else "score"
            try:
                self.scorers[name] = load_judge(
                    argument,
                    judge,
                    labels[argument],
                    texts=self.texts,
                    policy=args.policy,
                    device=self.device,
                    trust_remote_code=trust,
                )
            except InputError as error:
                if argument == "judge" or args.reward_model or Path(judge).is_dir():
                    raise
                errors.say(f"the texts get no scores, unless --reward_model says whose: {error}")
        own_name = re.split("[:.]", info["monitor"])[-1]
        taken = own_name in (*self.scorers, self.texts.verdict, "log-prob", "KL")
        monitor = "gold" if own_name == "gold_scores" or taken else own_name
        for name, field in ((self.texts.verdict, "function"), (monitor, "monitor")):
            if info[field]:
                scorer = self.texts.scorer(info[field], f"rewards.{field}")
                self.scorers[name] = lambda queries, scored, shown, references, scorer=scorer: scorer(
                    queries, shown, references
                )

    @torch.no_grad()
    def rows(
        self, queries: torch.Tensor, key: int = 0, references: torch.Tensor | list[str] | None = None
    ) -> list[dict[str, Any]]:
        """Continue each query (n, query_length) with both models. One row per query: texts, scores and KL.

        key: of the sampling noise. references: (n, response_length), or n texts, for functions that want them.
        The scores are those of the truncated texts, without the penalty for a missing stop token.
        log-prob: of a text under the base model, mean over its tokens. kl: log-prob of the policy's text under the
        policy minus that under the base model. Both are at the temperature of training, in nats.
        """
        queries = queries.to(self.device)
        contexts = self.texts.contexts(queries)  # (n, context_length)
        generator = keyed_generator(self.seed, "sample", key)
        noise = torch.rand(len(queries), self.task.response_length, generator=generator, dtype=torch.float64)
        noise, temperature = noise.to(processes.device_of_noise(self.device)), max(self.temperature, problems.GREEDY)
        asked = to_texts(self.tokenizer, self.texts.bare(queries), self.pad_id)
        columns: dict[str, list[Any]] = {"query": asked}
        if references is not None:
            as_answers = {"answer": references} if isinstance(references, list) else {}
            columns |= as_answers or {"reference": self.texts.as_texts(references)}
        counted: dict[str, torch.Tensor] = {}
        for name, model in self.models.items():
            responses = self.texts.respond(model, contexts, noise, temperature)
            counted[name], scored, shown = self.texts.cut(responses)
            columns[name] = self.texts.as_texts(shown)
            for score_name, scorer in self.scorers.items():
                said = scorer(queries, scored, shown, references)
                if said is None:
                    continue
                scores = columns[f"{name} {score_name}"] = said.tolist()
                if broken := [score for score in scores if not math.isfinite(score)]:
                    raise NumericalError(
                        f"the {score_name} of a text by the {name} model is {broken[0]}, not a number"
                    )
            under_base = self.logprobs("base", contexts, counted[name])
            tokens = (counted[name] != self.pad_id).sum(1).clamp(min=1)
            columns[f"{name} log-prob"] = (under_base.sum(1) / tokens).tolist()
        # under_base is that of the policy's texts, because the policy comes last.
        log_ratio = self.logprobs("policy", contexts, counted["policy"]) - under_base
        columns["kl"] = log_ratio.sum(1).tolist()
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def logprobs(self, name: str, contexts: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """Log-probs of responses (n, response_length) under a model, at training's temperature; 0 for padding."""
        logprobs = response_statistics(
            self.models[name],
            torch.cat([contexts, responses], dim=1),
            responses,
            self.pad_id,
            self.task.temperature,
            self.pad_id,
        )[0]
        return logprobs.masked_fill(responses == self.pad_id, 0)

    def task_queries(self, n: int) -> tuple[torch.Tensor, torch.Tensor | list[str] | None]:
        """The first n queries of the task's held-out texts (n, query_length), and their references, if it has any."""
        with errors.typed_as({f"task.{self.texts.source}": "query_dataset"}):
            return self.texts.held_out(n)

    def prompt_queries(self, prompts: tuple[str, ...]) -> torch.Tensor:
        """Texts as queries, cut to query_length tokens: (n, query_length)."""
        queries = torch.full((len(prompts), self.task.query_length), self.pad_id)
        for row, prompt in zip(queries, prompts, strict=True):
            files.check_text(prompt, "--prompt")
            tokens = self.texts.query(prompt)
            if not tokens:
                raise InputError("--prompt: a query needs at least one token")
            row[: len(tokens)] = torch.tensor(tokens)
        return queries


def print_rows(title: str, rows: list[dict[str, Any]]) -> None:
    """Print a query, the two continuations and, below each, its numbers."""

    def cell(row: dict[str, Any], name: str) -> str:
        numbers = {key.split(" ")[1]: value for key, value in row.items() if key.startswith(f"{name} ")}
        numbers |= {"KL": row["kl"]} if name == "policy" else {}
        shown = ", ".join(f"{key} {value:+.2f}" for key, value in numbers.items())
        return f"{run.one_line(row[name].strip())}\n\n{shown}"

    cells = []
    for row in rows:
        before = {name: run.one_line(row[name].strip()) for name in ("query", "answer") if name in row}
        cells.append({**before, "base model": cell(row, "base"), "policy": cell(row, "policy")})
    run.print_table(title, cells)


def changes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What training changed: a line for each number that both texts have, and for their share of distinct words.

    Differences are paired, since both models continue the same queries with the same noise. The interval is 1.96
    standard errors of the mean difference: it says how well these queries represent others, not other seeds.
    """
    names = [key.removeprefix("policy ") for key in rows[0] if key.startswith("policy ")]
    pairs = {name: [(row[f"base {name}"], row[f"policy {name}"]) for row in rows] for name in names}
    pairs["distinct words"] = [(distinct_words(row["base"]), distinct_words(row["policy"])) for row in rows]
    lines = []
    for name, numbers in pairs.items():
        differences = [after - before for before, after in numbers]
        error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
        before, after = (statistics.fmean(side) for side in zip(*numbers, strict=True))
        lines.append(
            {"": name, "before": before, "after": after, "difference": after - before, "± 95 %": 1.96 * error}
        )
    return lines


def distinct_words(text: str) -> float:
    """The share of a text's words that it has not used before."""
    words = text.lower().split()
    return len(set(words)) / max(len(words), 1)


def print_changes(rows: list[dict[str, Any]]) -> None:
    run.print_table(f"{len(rows)} held-out queries, before and after", changes(rows), lines=False)
    print(f"KL from the base model: {statistics.fmean(row['kl'] for row in rows):.2f} nats per response")


def typed_queries() -> Iterator[str]:
    """Queries that somebody types, until an empty line or the end of the input."""
    with contextlib.suppress(EOFError):
        yield from iter(lambda: input("query> "), "")


def sample(args: Args) -> list[dict[str, Any]]:
    """Print the comparison as a table, write it to args.out, and return its rows."""
    comparison = Comparison(args)
    if args.interactive:
        rows = []
        for key, query in enumerate(typed_queries()):
            rows += comparison.rows(comparison.prompt_queries((query,)), key)
            print_rows("", rows[-1:])
    else:
        prompts = args.prompt and comparison.prompt_queries(args.prompt)
        queries, references = (prompts, None) if args.prompt else comparison.task_queries(args.n)
        if args.out:
            Path(args.out).open("a").close()  # fail now, not after the sampling
        rows = comparison.rows(queries, references=references)
        print_rows(f"{args.policy}, temperature {comparison.temperature}", rows[:SHOWN])
        if len(rows) > SHOWN:
            print_changes(rows)
    if args.out:
        Path(args.out).write_text(files.json_lines(rows))
    return rows


if __name__ == "__main__":
    cli.run_script(sample, lambda argv: cli.parse(Args, argv, description=__doc__))
