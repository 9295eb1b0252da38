"""Where the problems of chapter 3 come from, and how they become prompts.

--task.problems, --task.test_problems
    gsm8k              grade-school word problems, from the hub
    sums, sums-tools   word problems, of a built-in world
    arithmetic         sums and differences of two small numbers, of another
    reasoning_gym:<task>  a generator of reasoning-gym, an extra; see problem_rows.py, also for the forms of rows
    <owner>/<name>     a data set on the hub, or <owner>/<name>:<configuration>
    <folder>           problems_train.jsonl and problems_test.jsonl
    <file>             .jsonl, .parquet, .csv or .json; each 50th row is held out, unless --task.test_problems
                       says what is

A row is an object with a question and an answer, which holds what a response must say:

    {"question": "Petra has 7 apples. Felix gives her 5. How many ...", "answer": "7+5=12\\n#### 12"}

Files and lines next to marks are those of verl-project/verl at commit b178a3c.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field as dataclass_field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from accelerate import Accelerator
from datasets import load_dataset
from pydantic import Field, PositiveInt
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ppo_rlhf.rlvr import problem_rows, rewards
from ppo_rlhf.tldr import chat_templates, data_files, models, posts, reward_functions
from ppo_rlhf.tldr.shares import map_rows, widened
from ppo_rlhf.train_policy import (
    InputError,
    find,
    float64_device,
    hub_files,
    input_errors,
    keyed_generator,
    padded,
    start_of_texts,
    vocabulary_size,
)

# ---- Task ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TaskArgs(chat_templates.FormatArgs):
    problems: str = "gsm8k"
    """where problems come from: gsm8k, sums, arithmetic, reasoning_gym:<task>, a data set on the hub, a folder with
    problems_<split>.jsonl, or a file: .jsonl, .parquet, .csv or .json"""
    test_problems: str = ""
    """where the held-out problems come from; empty: the test split of the same"""
    question_column: str = "question"
    """key of a row's question; where it isn't there, prompt or problem"""
    answer_column: str = "answer"
    """key of a row's answer, with dots for nested ones; where it isn't there, reward_model.ground_truth, solution or
    completion"""
    kind_column: str = ""
    """key by whose values evaluations group problems, such as steps; empty: no groups"""
    answer_format: Literal["hashes", "boxed", "whole"] = "hashes"
    """the part of an answer that a response must give: the number after ####, or all of it if that is a number; the
    content of its last box, or all of it if it has none; or the whole text"""
    prompt_format: Literal["chat", "plain"] = "chat"
    """whether the tokenizer's chat template is put around a question"""
    prompt_suffix: str = ' Let\'s think step by step and output the final answer after "####".'
    """text after each question"""
    response_prefix: str = ""
    """text that every response begins with, such as <think>: the policy reads it at the end of its prompt"""
    prompt_length: PositiveInt = 1_024
    """the most tokens of a prompt; longer ones are left out"""
    response_length: PositiveInt = 512
    """the most tokens of a response, with the token that ends it"""
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """sampling temperature of the policy and of the reference"""

    @property
    def query_length(self) -> int:
        """The prompt_length, as other chapters call it."""
        return self.prompt_length


SUMS_TASK = {"prompt_format": "plain", "prompt_suffix": "\n", "prompt_length": 64, "response_length": 88}
TASKS = {
    "gsm8k": TaskArgs(),
    "sums": TaskArgs(problems="sums", kind_column="steps", **SUMS_TASK),
    "sums-tools": TaskArgs(problems="sums-tools", kind_column="steps", **SUMS_TASK | {"response_length": 96}),
    "arithmetic": TaskArgs(
        problems="arithmetic",
        kind_column="operation",
        answer_format="whole",
        system_prompt="You are a calculator. You answer with a number only.",
        prompt_suffix="",
        response_prefix="The answer is ",
        prompt_length=64,
        response_length=8,
        temperature=0.7,  # at 1, this small and quantised model writes garbage
    ),
}


TaskIds = posts.SamplingIds


def task_ids(
    task: TaskArgs, tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None = None
) -> TaskIds:
    """Find the task's special tokens. generation_config: that of the model."""
    if not (stops := models.end_ids(tokenizer, generation_config)):
        raise InputError("neither the tokenizer nor the model names a token that ends a response")
    return TaskIds(pad=vocabulary_size(tokenizer), stops=stops)


# ---- Prompts ---------------------------------------------------------------------------------------------------


def messages_of(
    question: str | chat_templates.Messages, task: TaskArgs, as_data: Callable[[str], str] = str
) -> chat_templates.Messages:
    """The messages that ask a question, which is a text or messages of its own; the last is the user's.

    as_data: changes what the row says, but not what the task adds.
    """
    turns = [{"role": "user", "content": question}] if isinstance(question, str) else question
    turns = [one | {"content": as_data(one["content"])} for one in turns]
    own = [one for one in turns if one["role"] == "system"]
    *earlier, last = [one for one in turns if one["role"] != "system"]
    # [V03] The suffix follows the question as it is.   examples/data_preprocess/gsm8k.py#L57-L69
    last["content"] += task.prompt_suffix
    return [*(own or chat_templates.system_of(task)), *earlier, last]


def render_prompt(question: str | chat_templates.Messages, task: TaskArgs, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text that a response continues. question: a text, or messages, of which the last is the user's.

    In a chat, the names of special tokens in the question are marked for `encode_prompt`; templates.shown takes the
    marks out.
    """
    chat_templates.check(task)
    if task.prompt_format == "plain":
        text = "\n".join(message["content"] for message in messages_of(question, task))
    else:
        messages = messages_of(question, task, partial(chat_templates.as_letters, tokenizer=tokenizer))
        text = chat_templates.render(messages, task, tokenizer)
    return text + task.response_prefix


def response_start(task: TaskArgs, prompt: str) -> str:
    """The end of a prompt that belongs to its response: a <think> that is open, and the response_prefix."""
    # [V21] A template may end with the opening tag, and so may a question in plain text.
    opened = re.search(r"<think>\s*\Z", prompt.removesuffix(task.response_prefix))
    if opened and task.response_prefix.startswith("<think>"):
        raise InputError(
            f"--task.response_prefix {task.response_prefix!r}: the prompt ends with a <think> already; leave it out"
        )
    return (opened[0] if opened else "") + task.response_prefix


def dialogue(question: str | chat_templates.Messages, task: TaskArgs, prompt: str) -> chat_templates.Messages:
    """What a reward model with a template of its own reads before a response: the messages that ask the question,
    and last the beginning of the reply, which is the end of the prompt.
    """
    *earlier, last = messages_of(question, task)
    start = response_start(task, prompt)
    if task.prompt_format == "plain":  # [V21] Of the question, its end may belong to the response.
        last["content"] = (last["content"] + task.response_prefix).removesuffix(start)
    return [*earlier, last, {"role": "assistant", "content": start}]


def encode_prompt(prompt: str, task: TaskArgs, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a rendered prompt. Those of a chat hold special tokens; plain text begins with one at most."""
    if task.prompt_format == "plain":
        return [*start_of_texts(tokenizer), *chat_templates.encode_text(tokenizer, prompt)]
    return chat_templates.encode(prompt, tokenizer)


# ---- Problems --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Problems:
    """Prompts, and the answers of correct responses."""

    prompts: list[list[int]]  # token ids, of different lengths
    texts: list[str]  # the same as texts, as they were rendered
    messages: list[chat_templates.Messages]  # the same for reward models with a template of their own: see dialogue
    answers: list[str]  # what verifiers compare responses with
    kinds: list[str]  # the values under task.kind_column
    too_long: int  # problems that were left out, because their prompt has more than prompt_length tokens
    unscorable: int  # problems that were left out, because no response to them can be correct
    empty: int  # problems that were left out, because their prompt has no token
    # Their columns, for functions of the user's; that of the answer holds what answer_format took. Empty: not kept.
    rows: list[rewards.Columns] = dataclass_field(default_factory=list)

    def __len__(self) -> int:
        return len(self.prompts)

    def trial(self, tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], list[str], list[rewards.Columns]]:
        """What verifiers know of two problems, and of the responses of rewards.TRIED to them."""
        prompts, answers, rows = self.known_of([0, -1])
        tokens = [chat_templates.encode_text(tokenizer, text) for text in rewards.TRIED]
        return prompts, answers, with_tokens(rows, padded(tokens, -1), -1)

    def known_of(self, inds: Iterable[int]) -> tuple[list[str], list[str], list[rewards.Columns]]:
        """What verifiers know of these problems besides responses: prompts as texts, answers, and rows or none."""
        inds = [*inds]
        rows = [self.rows[i] for i in inds] if self.rows else []
        return [self.texts[i] for i in inds], [self.answers[i] for i in inds], rows

    def batch(self, inds: Iterable[int], pad_id: int) -> torch.Tensor:
        """Prompts with these numbers, padded on the left to the longest of them: (prompts, longest)."""
        # To the longest of the whole batch: its shape does not depend on how it is split.
        #       experimental/agent_loop/agent_loop.py#L534-L586
        prompts = [self.prompts[i] for i in inds]
        return data_files.pad_rows(prompts, max(map(len, prompts)), pad_id, left=True)


def with_tokens(
    rows: list[rewards.Columns], responses: torch.Tensor, pad_id: int, written: torch.Tensor | None = None
) -> list[rewards.Columns]:
    """Columns of problems, or none, with two more for functions that reward tokens: completion_ids, the token ids of
    a response, and completion_mask, which of them the policy wrote.

    responses: (rows, response_length); written: of that shape, bool; None: all tokens.
    """
    if not rows:
        return rows
    lengths = (responses != pad_id).sum(1).tolist()  # padding is at the end
    written = responses != pad_id if written is None else written
    each = zip(rows, responses.tolist(), written.tolist(), lengths, strict=True)
    return [row | {"completion_ids": ids[:n], "completion_mask": own[:n]} for row, ids, own, n in each]


def load_rows(source: str, field: str, split: str) -> Iterable[data_files.Row]:
    """Rows of --task.problems or --task.test_problems. split: train or test; of a single file empty: all of it."""
    argument, what, split_or_test = f"task.{field}", f"--task.{field} {source}", split or "test"
    if source.startswith(problem_rows.GENERATOR):
        return problem_rows.generate(source, field, split_or_test)
    if source != "gsm8k" and (folder := find(source)):
        return data_files.read_file(folder / f"problems_{split_or_test}.jsonl", argument)
    if source == "gsm8k" or data_files.is_on_hub(source):
        with input_errors(
            f"{what} cannot be read from the hub; give a file or a folder with problems_<split>.jsonl, name another "
            f"split's rows by --task.test_problems, or use --preset sums"
        ):
            if source == "gsm8k":
                files = hub_files("openai/gsm8k", f"main/{split_or_test}-*.parquet")
                rows = load_dataset("parquet", data_files=files, split="train")
            else:
                name, _, configuration = source.partition(":")
                rows = load_dataset(name, configuration or None, split=split_or_test)
        return data_files.with_places(rows, f"{source}, {split_or_test}")
    if Path(source).suffix not in data_files.FORMATS:
        raise InputError(
            f"{what}: unknown; there are gsm8k, sums, sums-tools, arithmetic, reasoning_gym:<task>, data sets on the "
            f"hub, folders with problems_<split>.jsonl, and files: {', '.join(data_files.FORMATS)}"
        )
    rows = data_files.read_file(Path(source), argument)
    remedy = "name a file of held-out problems: --task.test_problems <file>.jsonl"
    return data_files.hold_out(rows, what, split, remedy) if split else rows


def answer_of(solution: str, answer_format: str) -> str:
    """The text that a correct response must contain; empty if the solution doesn't give it in this format."""
    if isinstance(solution, rewards.Gold | reward_functions.JsonText):
        return solution
    match answer_format:
        case "hashes":
            # [V04] The number after the hashes, without commas.   examples/data_preprocess/gsm8k.py#L30-L35
            #       Where more is there than a number, as in 3/4 or 12:30, nothing of it is the answer.
            return rewards.hashed_answer(solution)
        case "boxed":
            content = rewards.last_boxed(solution)
            return solution.strip() if content is None else content
        case _:
            return solution.strip()


def read_problems(
    task: TaskArgs,
    tokenizer: PreTrainedTokenizerBase,
    split: str,
    limit: int = 0,
    verifier: str = "",
    *,
    keep_rows: bool = True,
) -> Problems:
    """Problems of a split. split: train or test. limit: only the first so many rows; 0: all.

    A problem is left out and counted if its prompt is too long or empty, or if no response to it can be correct.
    verifier: the one that says so; empty: any answer will do. keep_rows: for functions that ask for columns.
    """
    source, field = task.problems, "problems"
    if split == "test" and task.test_problems:
        source, field, split = task.test_problems, "test_problems", ""
    elif split == "train" and task.test_problems and Path(source).suffix in data_files.FORMATS:
        split = ""  # nothing of it is held out
    kept: dict[str, list] = {name: [] for name in ("prompts", "texts", "messages", "answers", "kinds", "rows")}
    too_long = unscorable = empty = 0
    for where, row in islice(load_rows(source, field, split), limit or None):
        with input_errors(f"--task.{field} {where}"):
            question = problem_rows.question_of(row, task.question_column)
            by_function = verifier not in rewards.VERIFIERS
            column, solution = problem_rows.answer_of(row, task.answer_column, by_function=by_function)
            answer = answer_of(solution, task.answer_format)
            # [V04] [V19] The verifier must accept the answer itself. gsm8k_strict never accepts 12:00, for example.
            if not answer or not rewards.can_be_right(verifier, answer):
                unscorable += 1
                continue
            prompt = render_prompt(question, task, tokenizer)
            tokens = encode_prompt(prompt, task, tokenizer)
        if not tokens:  # there is nothing that the first token could follow
            empty += 1
            continue
        # [V06] A prompt that is too long is left out, never cut.   utils/dataset/rl_dataset.py#L181-L258
        if len(tokens) > task.prompt_length:
            too_long += 1
            continue
        kept["prompts"].append(tokens)
        kept["texts"].append(chat_templates.shown(prompt))
        kept["messages"].append(dialogue(question, task, prompt))
        kept["answers"].append(answer)
        kept["kinds"].append(str(row.get(task.kind_column, "")))
        if keep_rows:
            kept["rows"].append({**row, column: answer} if column in row else row)
    if not kept["prompts"]:
        by = f" that --rewards.verifier {verifier} can accept" if verifier else ""
        raise InputError(
            f"--task.{field} {source}: none of its {split or 'test'} rows can be used: {unscorable} give no answer "
            f"in the format --task.answer_format {task.answer_format}{by}, {empty} have a prompt of no tokens, and "
            f"{too_long} one of more than --task.prompt_length {task.prompt_length}"
        )
    return Problems(**kept, too_long=too_long, unscorable=unscorable, empty=empty)


def problems_of_batch(problems: int, batch: int, number: int, seed: int) -> torch.Tensor:
    """Which problems make a batch: (batch,). number: how many batches came before it, since the run began."""
    # Each epoch has an order of its own, by seed and epoch alone; what does not fill a batch is left out of it.
    #       trainer/main_ppo.py#L411-L442
    epoch, place = divmod(number, problems // batch)
    order = torch.randperm(problems, generator=keyed_generator(seed, "problems", epoch))
    return order[place * batch : (place + 1) * batch]


# ---- Evaluation ------------------------------------------------------------------------------------------------

GREEDY = 1e-6  # temperature at which the likeliest token is drawn


def to_texts(tokenizer: PreTrainedTokenizerBase, responses: torch.Tensor, ids: TaskIds) -> list[str]:
    """Responses (rows, response_length) as verifiers and people read them, without what ends them."""
    hidden = {ids.pad, *ids.stops}
    kept = [[token for token in row if token not in hidden] for row in responses.tolist()]
    # [V21] Some tokenizers have the tags of thought and answer among their special tokens.
    return [tokenizer.decode(row) for row in kept]


@dataclass(frozen=True, kw_only=True)
class Solved:
    """A response to each problem."""

    texts: list[str]
    lengths: torch.Tensor  # (problems,), tokens with the stop id
    stopped: torch.Tensor  # (problems,), 1 where the response ends with one
    right: torch.Tensor  # (problems, verifiers), 1 where the response is correct


def solve(
    held_out: Problems,
    sample: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    verifiers: list[Callable[..., list[float]]],
    tokenizer: PreTrainedTokenizerBase,
    ids: TaskIds,
    local_batch: int,
    accelerator: Accelerator,
    temperature: float,
    uniforms: torch.Tensor,
) -> list[Solved]:
    """Sample responses to each problem, with uniforms (problems, responses, response_length).

    local_batch: how many responses at a time, on one process. Every process must call this.
    """
    n = uniforms.shape[1]

    def of_rows(inds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # The responses to a prompt are next to each other, so it is read once for all of them.
        rows = inds.repeat_interleave(n)
        contexts = held_out.batch(rows.tolist(), ids.pad).to(accelerator.device)
        responses, logprobs = sample(
            contexts,
            uniforms[inds].flatten(0, 1).to(float64_device(contexts.device)),
            temperature=temperature,
        )
        prompts, answers, columns = held_out.known_of(rows.tolist())
        columns = with_tokens(columns, responses, ids.pad, ~logprobs.isnan())
        texts = to_texts(tokenizer, responses, ids)
        values = [torch.tensor(verifier(prompts, texts, answers, columns)) for verifier in verifiers]
        names = [getattr(verifier, "verifier", "") for verifier in verifiers]
        right = torch.stack([rewards.is_right(*pair) for pair in zip(values, names, strict=True)], 1)
        return responses.unflatten(0, (-1, n)), widened(right.to(responses.device)).unflatten(0, (-1, n))

    found = map_rows(of_rows, len(held_out), max(1, local_batch // n), accelerator)
    return [solved(tokenizer, ids, *rows) for rows in zip(*(part.unbind(1) for part in found), strict=True)]


def solved(tokenizer: PreTrainedTokenizerBase, ids: TaskIds, responses: torch.Tensor, right: torch.Tensor) -> Solved:
    stopped = torch.isin(responses, torch.tensor(ids.stops)).any(1)
    return Solved(
        texts=to_texts(tokenizer, responses, ids),
        lengths=(responses != ids.pad).sum(1),
        stopped=stopped.double(),
        right=right,
    )


def evaluation(
    held_out: Problems, kind_column: str, names: list[str], greedy: Solved, samples: list[Solved]
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Means of an evaluation, and the rows of evaluation.jsonl. names: of the verifiers, that of the run first."""
    n, accuracy = len(held_out), greedy.right.mean(0)  # (verifiers,)
    means = {f"eval/{name}": value for name, value in zip(names, accuracy.tolist(), strict=True)}
    means["eval/standard_error"] = (accuracy[0] * (1 - accuracy[0]) / n).sqrt().item()
    means |= {"eval/stopped": greedy.stopped.mean().item(), "eval/length": greedy.lengths.double().mean().item()}
    means["eval/length_max"] = greedy.lengths.max().item()
    for kind in sorted({*held_out.kinds} - {""}):
        of_kind = torch.tensor([other == kind for other in held_out.kinds])
        printable = repr(kind)[1:-1]  # a line break becomes \\n
        means[f"eval/{names[0]}_{kind_column}_{printable}"] = greedy.right[of_kind, 0].mean().item()
    columns = {"prompt": held_out.texts, "answer": held_out.answers, "kind": held_out.kinds}
    columns |= {"response": greedy.texts, "tokens": greedy.lengths.tolist()}
    columns |= {name: greedy.right[:, i].tolist() for i, name in enumerate(names)}
    if samples:
        right = torch.stack([one.right[:, 0] for one in samples], 1)  # (problems, samples)
        correct = right.sum(1).long().tolist()
        # [V98] The mean of all samples, and how often one of k would be correct.
        #       trainer/ppo/metric_utils.py#L420-L640
        means[f"eval/mean@{len(samples)}"] = right.mean().item()
        if n > 1:  # one problem has no spread
            means["eval/mean_standard_error"] = right.mean(1).std().item() / n**0.5
        for k in (2**power for power in range(len(samples).bit_length())):
            means[f"eval/pass@{k}"] = sum(rewards.pass_at_k(len(samples), c, k) for c in correct) / n
        means["eval/sampled_length"] = torch.stack([one.lengths for one in samples]).double().mean().item()
        columns["right_samples"] = correct
        for name, wanted in (("a_right_sample", 1), ("a_wrong_sample", 0)):  # the first such, if there is one
            numbers = [row.index(wanted) if wanted in row else None for row in right.tolist()]
            columns[name] = [None if k is None else samples[k].texts[i] for i, k in enumerate(numbers)]
    return means, [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
