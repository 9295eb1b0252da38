"""Sums: word problems for chapter 3, a small world with a known truth, like tales.py, that needs no network.

Somebody has some things, and a few things happen. A solution shows its steps and ends as those of GSM8K do:

    Petra has 7 apples. Felix gives her 5. She loses 3. How many apples does Petra have?
    7+5=12
    12-3=9
    #### 9

1. `write_problem`: a seeded grammar writes problems of one to four steps.
2. `solve`: pupils write solutions. Some just calculate, others say first what happened (`Felix gives her 5. 7+5=12`);
   and in each step they may err (ERRORS). A pupil who errs continues with the wrong number. Most are in a hurry, and
   stop after two steps.
3. `train_language_model`: a small Llama learns from scratch to write like the pupils. So it is sometimes correct, and
   more often if it takes the likeliest token than if it samples; but it leaves most of the long problems unfinished.
   Reinforcement learning has to make it careful, and patient. With the usual settings the trained model is part of
   the package (building.py).
4. `measure_start`: how often it is correct on held-out problems, before reinforcement learning.

The problems are written in GSM8K's format, and read by the same code.

The problems of the variant sums-long have up to six steps, and fewer pupils are in a hurry.

In the variant sums-tools, for rlvr/tools.py, pupils may call a calculator instead of calculating: `[7+5]`, and the
calculator adds `12`. Its answer is always correct, but pupils rarely call it. Some calls have an error in their
syntax; then the calculator says so, and the pupil calculates after all. By themselves pupils err often.

    python ppo_rlhf/worlds/sums.py    # build the world, unless it is there, and read a little of it
"""

import dataclasses
import json
import random
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ppo_rlhf.lib import rewards
from ppo_rlhf.lib.base import errors, files, launch
from ppo_rlhf.lib.base.errors import InputError
from ppo_rlhf.lib.data import problems, texts
from ppo_rlhf.lib.nets import lm
from ppo_rlhf.lib.scoring import tools
from ppo_rlhf.lib.services import cli
from ppo_rlhf.worlds import building, tales

# ---- Arguments -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SumsArgs:
    """The settings of a world. Worlds with other settings live in other folders of the cache."""

    seed: int = 1
    """seed of everything in the world; not the seed of a training run, so that many runs share one world"""
    train_problems: int = 8_192
    """problems to train on"""
    test_problems: int = 1_024
    """problems held out"""
    largest: int = 9
    """the largest number that comes or goes in a step"""
    largest_first: int = 20
    """the largest number at first"""
    error_rate: float = 0.12
    """how likely a pupil errs in a step"""
    wordy: float = 0.3
    """share of pupils who say what happened before they calculate"""
    hasty: float = 0.6
    """share of pupils in a hurry, who stop after two steps even if there are more"""
    vocab_size: int = 400
    """largest number of tokens of the byte-level BPE, in which a digit is a token"""
    width: int = 128
    """width of the Llama"""
    layers: int = 4
    """layers of the Llama"""
    heads: int = 4
    """attention heads of a layer"""
    max_positions: int = 160
    """the longest sequence that the Llama can read, in tokens"""
    lm_solutions: int = 40_000
    """pupils' solutions to learn from, each of another problem"""
    lm_short_steps: int = 400
    """optimiser steps of language-model training on short solutions"""
    lm_steps: int = 700
    """further steps, on all"""
    lm_batch_size: int = 32
    """solutions per step"""
    lm_lr: float = 2e-3
    """learning rate of language-model training (AdamW); on all solutions it falls linearly to zero"""
    start_problems: int = 512
    """held-out problems on which the start is measured"""


@dataclass(frozen=True, kw_only=True)
class ToolsArgs(SumsArgs):
    """The settings of the variant in which pupils have a calculator."""

    error_rate: float = 0.25
    """how likely a pupil errs in a step without the calculator"""
    calls: float = 0.4
    """share of steps for which a pupil calls the calculator"""
    misuse: float = 0.4
    """share of calls whose syntax is wrong"""


@dataclass(frozen=True, kw_only=True)
class LongArgs(SumsArgs):
    """The settings of the variant with longer chains of steps."""

    most_steps: int = 6
    """the most steps of a problem"""
    hasty: float = 0.3
    """share of pupils in a hurry"""
    max_positions: int = 192
    """the longest sequence that the Llama can read, in tokens"""


# ---- Problems --------------------------------------------------------------------------------------------------

THINGS = "apples lanterns kettles ropes baskets ladders blankets hammers mirrors barrels candles boats bells"
Step = tuple[str, int]  # + - or *, and by how much

# The events: {she} has the things, {other} is somebody else
EVENTS = {
    "+": ("{other} gives {her} {number}.", "{she} finds {number}.", "{she} buys {number}."),
    "-": ("{she} gives {other} {number}.", "{she} loses {number}.", "{she} sells {number}."),
    "*": ("Then {she} has {number} times as many.", "{other} makes them {number} times as many."),
}
PRONOUNS = (("she", "her"), ("he", "him"))  # the names of tales are those of women and men in turn
FACTORS = (2, 3)
MOST = 99  # nobody ever has more,
MOST_OF_PUPILS = 999  # nor do pupils who err write more


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A word problem: how many things there are first, what happens then, and the sentences that say so."""

    first: int
    steps: tuple[Step, ...]
    sentences: tuple[str, ...]  # one for the beginning, one for each step
    question: str  # all of them, and what is asked


def apply(step: Step, number: int) -> int:
    """How many there are after a step."""
    operation, by = step
    return {"+": number + by, "-": number - by, "*": number * by}[operation]


def write_problem(rng: random.Random, args: SumsArgs) -> Problem:
    """A problem of one to four steps, or to most_steps, each number of steps being equally likely."""
    names = tales.NAMES.split()
    name, other = rng.sample(names, 2)
    she, her = PRONOUNS[names.index(name) % 2]
    things, count = rng.choice(THINGS.split()), rng.randint(1, getattr(args, "most_steps", 4))
    first = number = rng.randint(2, args.largest_first)
    sentences, steps = [f"{name} has {first} {things}."], []
    while len(steps) < count:
        operation = rng.choice("+-*")
        step = operation, rng.choice(FACTORS) if operation == "*" else rng.randint(2, args.largest)
        if not 0 < apply(step, number) <= MOST:
            continue
        number = apply(step, number)
        steps.append(step)
        event = rng.choice(EVENTS[operation]).format(she=she, her=her, other=other, number=step[1])
        sentences.append(event[0].upper() + event[1:])
    question = " ".join([*sentences, f"How many {things} does {name} have?"])
    return Problem(first=first, steps=tuple(steps), sentences=tuple(sentences), question=question)


def write_problems(rng: random.Random, count: int, args: SumsArgs, taken: set[str]) -> list[Problem]:
    """Problems whose questions differ from each other and from those that are taken; they are taken then."""
    found: list[Problem] = []
    while len(found) < count:
        problem = write_problem(rng, args)
        if problem.question not in taken:
            taken.add(problem.question)
            found.append(problem)
    return found


# ---- Pupils ----------------------------------------------------------------------------------------------------

# The errors in a step: its result, its number, its operation, or that it is there at all
ERRORS = ("slips", "misreads", "confuses", "forgets")
HURRIED = 2  # the most steps of a pupil in a hurry


def err(rng: random.Random, step: Step, number: int) -> tuple[str, int]:
    """The text that an erring pupil writes for a step, and the number of things after it."""
    operation, by = step
    while True:
        written, slip = step, 0
        match rng.choice(ERRORS):
            case "slips":
                slip = rng.choice([-10, -2, -1, 1, 2, 10])
            case "misreads":
                written = operation, by + rng.choice([-2, -1, 1, 2])
            case "confuses":
                written = rng.choice("+-*".replace(operation, "")), by
            case "forgets" if number != apply(step, number):
                return "", number
        result = apply(written, number) + slip
        if 0 <= result <= MOST_OF_PUPILS and result != apply(step, number):
            return f"{number}{written[0]}{written[1]}={result}", result


def solve(rng: random.Random, problem: Problem, error_rate: float, wordy: float, hasty: float = 0.0) -> str:
    """A pupil's solution: a line for each step, and the answer after the hashes."""
    speaks, number, lines = rng.random() < wordy, problem.first, []
    most = HURRIED if rng.random() < hasty else len(problem.steps)
    for step, sentence in zip(problem.steps[:most], problem.sentences[1 : most + 1], strict=True):
        if rng.random() < error_rate or not 0 <= apply(step, number) <= MOST_OF_PUPILS:
            line, number = err(rng, step, number)
        else:
            line = f"{number}{step[0]}{step[1]}={apply(step, number)}"
            number = apply(step, number)
        if line:
            lines.append(f"{sentence} {line}" if speaks else line)
    return "\n".join([*lines, f"#### {number}"])


def solve_with_calculator(rng: random.Random, problem: Problem, args: ToolsArgs) -> str:
    """The solution of a pupil who may call the calculator, whose answer is the rest of a line after `]`."""
    speaks, number, lines = rng.random() < args.wordy, problem.first, []
    most = HURRIED if rng.random() < args.hasty else len(problem.steps)
    for step, sentence in zip(problem.steps[:most], problem.sentences[1 : most + 1], strict=True):
        result = apply(step, number)
        call, possible = f"{number}{step[0]}{step[1]}", 0 <= result <= MOST_OF_PUPILS
        said = [sentence] if speaks else []
        calls = possible and rng.random() < args.calls
        if calls and rng.random() < args.misuse:
            wrong = rng.choice([f"{call}=", f"{call}{step[0]}", f"{step[0]}{call}{step[0]}", f"{number} {step[1]}"])
            lines.append(" ".join([*said, f"[{wrong}]{tools.calculator(wrong)}"]))
            said, calls = [], False
        if calls:
            line, number = f"[{call}]{tools.calculator(call)}", result
        elif not possible or rng.random() < args.error_rate:
            line, number = err(rng, step, number)
        else:
            line, number = f"{call}={result}", result
        if line:
            lines.append(" ".join([*said, line]))
    return "\n".join([*lines, f"#### {number}"])


def split_answers(solution: str) -> list[str]:
    """A solution in pieces: what the pupil wrote and what the calculator said, in turn, beginning with the pupil."""
    return re.split(r"(?<=\])([^\n]*)", solution)


def row_of(problem: Problem) -> dict[str, Any]:
    """A row as GSM8K has them, with the correct solution, and the number of steps."""
    answer = solve(random.Random(0), problem, error_rate=0.0, wordy=0.0)
    return {"question": problem.question, "answer": answer, "steps": len(problem.steps)}


# ---- The language model ----------------------------------------------------------------------------------------


def train_language_model(
    pairs: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast, args: SumsArgs, device: torch.device
) -> tuple[LlamaForCausalLM, float]:
    """A small Llama, trained from scratch to continue prompts with solutions, and then to end.

    pairs: prompts and solutions. Returns it and its last loss, nats per token of a solution. A calculator's answer is
    read, but not learned; its tokens are those that rlvr/tools.py inserts.

    To find a number in the text before is what a small model learns suddenly: sooner on short texts, and with large
    initial weights. So it begins with the shortest fifth of the pairs.
    """
    noise = torch.Generator().manual_seed(args.seed)
    whole = [[prompt, *split_answers(solution)] for prompt, solution in pairs]
    encoded = iter(tokenizer([piece for pieces in whole for piece in pieces])["input_ids"])
    rows = []  # token ids and labels, the shortest first
    for pieces in whole:
        ids, labels = [], []
        for number in range(len(pieces)):
            tokens = next(encoded)
            ids += tokens
            labels += tokens if number % 2 else [-100] * len(tokens)  # the pupil's are the pieces 1, 3, 5 ...
        end = [tokenizer.eos_token_id]
        rows.append((torch.tensor(ids + end), torch.tensor(labels + end)))
    rows.sort(key=lambda row: len(row[0]))
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=args.width,
            intermediate_size=11 * args.width // 4,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            max_position_embeddings=args.max_positions,
            initializer_range=0.09,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lm_lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    losses: list[float] = []
    for number in range(args.lm_short_steps + args.lm_steps):
        left = 1 - (number - args.lm_short_steps) / args.lm_steps
        optimizer.param_groups[0]["lr"] = args.lm_lr * min(1, (number + 1) / 50, left)
        # The rows of a step are neighbours in length, so that little is padded.
        most = max(1, len(rows) // (5 if number < args.lm_short_steps else 1) - args.lm_batch_size)
        first = int(torch.randint(most, (), generator=noise))
        batch = zip(*rows[first : first + args.lm_batch_size], strict=True)
        tokens, labels = (
            torch.nn.utils.rnn.pad_sequence(part, batch_first=True, padding_value=-100).to(device) for part in batch
        )  # (batch, longest)
        logits = model(input_ids=tokens.clamp(min=0), use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return model.eval(), statistics.fmean(losses[-20:])


# ---- The world -------------------------------------------------------------------------------------------------


def measure_start(
    folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, args: SumsArgs
) -> dict[str, dict[str, float]]:
    """The share of correct responses to held-out problems, of all and by number of steps; tokens of a response."""
    task = dataclasses.replace(problems.TASKS[name_of(args)], problems=str(folder))
    held_out = problems.read_problems(task, tokenizer, "test", args.start_problems)
    pad_id, noise = len(tokenizer), lm.keyed_generator(args.seed, "start")
    prompts = held_out.batch(range(len(held_out)), pad_id).to(model.device)
    uniforms = torch.rand(len(held_out), task.response_length, generator=noise, dtype=torch.float64)
    start = {}
    for name, temperature in {"greedy": 0.01, "samples": task.temperature}.items():
        responses, _, _ = lm.generate(
            model, prompts, uniforms.to(launch.device_of_noise(model.device)), pad_id, pad_id, temperature
        )
        responses = lm.truncate_at(responses, tokenizer.eos_token_id, 0, pad_id)
        right = list(map(rewards.gsm8k_strict, texts.to_texts(tokenizer, responses, pad_id), held_out.answers))
        lengths = (responses != pad_id).sum(1).tolist()
        of_kind = {
            f"{kind} steps": statistics.fmean(r for r, k in zip(right, held_out.kinds, strict=True) if k == kind)
            for kind in sorted(set(held_out.kinds))
        }
        tokens = {"least": min(lengths), "mean": statistics.fmean(lengths), "most": max(lengths)}
        start[name] = {"right": statistics.fmean(right), **of_kind, **{f"{k} tokens": n for k, n in tokens.items()}}
    return start


def write_rows(path: Path, found: list[Problem]) -> None:
    path.write_text(files.json_lines(map(row_of, found)))


def train_model(place: Path, rng: random.Random, args: SumsArgs, taken: set[str]) -> dict[str, Any]:
    """Write tokenizer and language model, which learns from other problems than the world's. Returns facts."""
    others = write_problems(rng, args.lm_solutions, args, taken)
    suffix = problems.TASKS[name_of(args)].prompt_suffix
    habits = args.error_rate, args.wordy, args.hasty
    with_tools = isinstance(args, ToolsArgs)
    solutions = (
        solve_with_calculator(rng, other, args) if with_tools else solve(rng, other, *habits) for other in others
    )
    pairs = [(other.question + suffix, solution) for other, solution in zip(others, solutions, strict=True)]
    solved = [prompt + solution for prompt, solution in pairs[:4_000]]
    tokenizer = tales.train_tokenizer(solved, args.vocab_size, digits=True)
    print(f"sums: training a Llama on {len(pairs):,} solutions, {args.lm_steps} steps", flush=True)
    model, loss = train_language_model(pairs, tokenizer, args, launch.default_device())
    model.save_pretrained(place / "model")
    tokenizer.save_pretrained(place / "model")
    return {
        "settings": dataclasses.asdict(args),
        "parameters": model.num_parameters(),
        "lm_loss": loss,
        # With tools, the first evaluation of a run shows it: nothing here answers calls.
        "start": {} if with_tools else measure_start(place, model, tokenizer, args),
    }


def build_world(folder: Path, args: SumsArgs) -> None:
    """Write problems, tokenizer and language model to a new folder; it appears when all is there."""
    with building.new_world(folder, "sums") as place:
        print(f"sums: writing {args.train_problems + args.test_problems:,} problems", flush=True)
        rng, taken = random.Random(args.seed), set()
        for split in ("test", "train"):
            found = write_problems(rng, getattr(args, f"{split}_problems"), args, taken)
            write_rows(place / f"problems_{split}.jsonl", found)
        trained = building.find_trained(name_of(args), made_of(args))
        facts = building.copy_trained(trained, place) if trained else train_model(place, rng, args, taken)
        (place / "world.json").write_text(json.dumps(facts, indent=2) + "\n")


def name_of(args: SumsArgs) -> str:
    return {ToolsArgs: "sums-tools", LongArgs: "sums-long"}.get(type(args), "sums")


def made_of(args: SumsArgs) -> list[Any]:
    """Settings and grammar: what makes a world the same world."""
    grammar = [tales.NAMES, THINGS, EVENTS, PRONOUNS, FACTORS, MOST, MOST_OF_PUPILS, ERRORS, HURRIED]
    return [dataclasses.asdict(args), *grammar]


def find_world(args: SumsArgs | None = None) -> Path:
    """The folder of the world with these settings; it is built if it does not exist."""
    args = args or SumsArgs()
    cli.check_values(args)
    sizes = {name for name, value in dataclasses.asdict(args).items() if type(value) is int} - {"seed"}
    cli.at_least(1, "", args, *sorted(sizes))
    cli.above_zero("", args, "lm_lr")
    for name in ("error_rate", "wordy", "hasty", "calls", "misuse"):
        if not 0 <= getattr(args, name, 0) <= 1:
            raise InputError(f"{name} is {getattr(args, name)}; it must be in 0..1")
    if not 2 <= args.largest <= MOST:
        raise InputError(f"largest is {args.largest}; it must be in 2..{MOST}")
    if args.width % (4 * args.heads):
        raise InputError(f"width {args.width} is no multiple of 4 x heads {args.heads}")
    return building.find(name_of(args), made_of(args), lambda folder: build_world(folder, args))


def main() -> None:
    world = find_world(cli.parse(SumsArgs, description=__doc__))
    facts = building.read_facts(world)
    greedy, samples = (facts["start"][name]["right"] for name in ("greedy", "samples"))
    print(f"{world}: a Llama of {facts['parameters']:,} parameters, correct in {samples:.0%} of its samples", end=" ")
    print(f"and {greedy:.0%} of its likeliest responses. A problem and its solution:\n")
    with (world / "problems_train.jsonl").open() as file:
        row = json.loads(file.readline())
    print(f"{row['question']}\n{row['answer']}")


if __name__ == "__main__":
    errors.run_script(main)
