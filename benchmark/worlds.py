"""Write the data of the small worlds, which are part of the package: ppo_rlhf/worlds/data.

    python benchmark/worlds.py tales --out build/tales                 # also posts, sums, sums-tools, arithmetic
    python benchmark/worlds.py tales --out build/tales --train_model   # with another language model

Texts and choices are those of the package bit for bit: seeded grammars write them, and tales' continuations are
sampled from the language model of the package. That is copied, because training it on another processor gives another
model: rounding differs, and training amplifies it. Then runs differ by much more than two seeds do.

    tales        stories; choices among four continuations that were sampled from a small GPT-2
    posts        posts and reference summaries; comparisons of summaries by writers of different quality
    sums         word problems; a small Llama has learned from pupils who err
    sums-tools   the same problems; here pupils may call a calculator
    arithmetic   sums and differences of two small numbers, for a real language model

Where a grammar or a size changes, everything that was measured in that world must be measured again.
"""

import argparse
import itertools
import json
import lzma
import math
import random
import re
import shutil
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from ppo_rlhf import worlds
from ppo_rlhf.rlvr import tool_functions
from ppo_rlhf.train_policy import generate, keyed_generator, padded, to_texts, trim_query, truncate_at
from ppo_rlhf.train_reward import OPENAI_PAD_ID
from ppo_rlhf.worlds import posts, tales

SEED = 1  # of everything in the worlds; not the seed of a training run, so that all runs share them


def json_lines(rows: Iterable[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


# ---- Language models -------------------------------------------------------------------------------------------


def train_tokenizer(learned: list[str], vocab_size: int, *, digits: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE like GPT-2's; `<|endoftext|>` is token 0, and no text contains it.

    digits: whether each digit is a token of its own.
    """
    tokenizer = Tokenizer(models.BPE())
    by_bytes, by_digits = pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Digits(True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([by_digits, by_bytes]) if digits else by_bytes
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(learned, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>")


def default_device() -> torch.device:
    """Where models run: on a GPU if PyTorch finds one, NVIDIA's, AMD's or Apple's, otherwise on the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def add_model(folder: Path, name: str, train: Callable[[], tuple[Any, Any, float]] | None) -> dict[str, Any]:
    """Write tokenizer and language model of a world. Returns facts about them.

    train: returns tokenizer, model and its last loss, nats per token; None: they are copied from the package.
    """
    if train is None:
        shutil.copytree(worlds.DATA / name / "model", folder / "model", copy_function=shutil.copyfile)
        facts = json.loads((worlds.DATA / name / "world.json").read_text())
        return {key: facts[key] for key in ("parameters", "lm_loss")}
    print(f"{name}: training its language model", flush=True)
    tokenizer, model, loss = train()
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    return {"parameters": model.num_parameters(), "lm_loss": loss}


# ---- Tales: stories --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tales:
    """Sizes of the world; tests take smaller ones."""

    stories: int = 20_000
    train_comparisons: int = 4_992
    test_comparisons: int = 1_024
    width: int = 128
    layers: int = 4
    heads: int = 4
    lm_steps: int = 400
    lm_batch_size: int = 64


SENTENCES = 14  # of a story
LM_LENGTH = 64  # tokens of a text from which the GPT-2 learns
QUERY_LENGTH = RESPONSE_LENGTH = 24  # tokens
TRUNCATE_AFTER = 16  # continuations are cut after the first full stop at or after this index
CHOICE_NOISE = 0.5  # of the annotator, in units of gold score: at 0 it would always pick the best


def write_story(rng: random.Random, sentences: int) -> str:
    """A story of so many sentences. Pleasant, unpleasant and neutral words are equally likely."""
    name, other = rng.sample(tales.NAMES.split(), 2)
    cast = {"name": name, "other": other, "home": rng.choice(rng.choice(tales.SLOTS["place"]))}

    def fill(slot: re.Match) -> str:
        return cast[slot[1]] if slot[1] in cast else rng.choice(rng.choice(tales.SLOTS[slot[1]]))

    return " ".join(re.sub(r"{(\w+)}", fill, rng.choice(tales.TEMPLATES)) for _ in range(sentences))


def train_gpt2(
    stories: list[str], tokenizer: PreTrainedTokenizerFast, sizes: Tales, device: torch.device
) -> tuple[GPT2LMHeadModel, float]:
    """A small GPT-2, trained from scratch on windows of the stories. Returns it and its last loss, nats per token."""
    full_stop = tokenizer.encode(".")[0]
    rows = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(tokenizer.encode(story)) for story in stories], batch_first=True, padding_value=-1
    )  # (stories, tokens)
    # A window begins where a sentence begins, as queries do, and stays within one story.
    sentence_starts = torch.cat([torch.ones_like(rows[:, :1]), rows[:, :-1] == full_stop], dim=1).bool()
    fits = torch.nn.functional.pad(rows[:, LM_LENGTH:], (0, LM_LENGTH), value=-1) >= 0
    starts = (sentence_starts & fits).nonzero()  # (windows, 2): story and column
    torch.manual_seed(SEED)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=160,
            n_embd=sizes.width,
            n_layer=sizes.layers,
            n_head=sizes.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    warmup = max(1, sizes.lm_steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * step / sizes.lm_steps))),
    )
    window = torch.arange(LM_LENGTH)
    losses = []
    for _ in range(sizes.lm_steps):
        story, column = starts[torch.randint(len(starts), (sizes.lm_batch_size,))].unbind(1)
        tokens = rows[story.unsqueeze(1), column.unsqueeze(1) + window].to(device)  # (batch, sequence_length)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return model.eval(), statistics.fmean(losses[-20:])


def choose_best(
    gold_scores: torch.Tensor, temperature: float, rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick one of n continuations with Boltzmann noise.

    gold_scores: (batch, n). Returns the choices (batch,) and, for each, the probability of the likeliest one:
    its mean is the accuracy that a perfect judge reaches.
    """
    probabilities = torch.softmax(gold_scores.double() / temperature, dim=1)  # (batch, n)
    return torch.multinomial(probabilities, 1, generator=rng).squeeze(1), probabilities.amax(1)


def simulate_comparisons(folder: Path, sizes: Tales, device: torch.device) -> dict[str, dict[str, float]]:
    """Sample four continuations for each query, let both annotators choose, write the label files.

    Returns, for each task, the ceiling of accuracy on the held-out comparisons, and mean and deviation of the
    language model's own gold score.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    model = GPT2LMHeadModel.from_pretrained(folder / "model").to(device)
    pad_id, count = len(tokenizer), sizes.train_comparisons + sizes.test_comparisons
    (stop_id,) = tokenizer.encode(".")
    stories = (folder / "stories.txt").read_text().splitlines()  # those that PPO never sees, too
    random.Random(0).shuffle(stories)
    trimmed = (trim_query(tokenizer.encode(story), QUERY_LENGTH, stop_id, stop_id) for story in stories)
    rows = list(itertools.islice(filter(None, trimmed), count))
    queries = padded(rows, pad_id, QUERY_LENGTH)  # (count, query_length)
    generator = keyed_generator(SEED, "comparisons")
    uniforms = torch.rand(4, count, RESPONSE_LENGTH, generator=generator, dtype=torch.float64)
    samples = torch.stack(
        [
            torch.cat(
                [
                    generate(model, q.to(device), u.to(device), pad_id, pad_id, 0.7)[0].cpu()
                    for q, u in zip(queries.split(512), noise.split(512), strict=True)
                ]
            )
            for noise in uniforms
        ],
        dim=1,
    )  # (count, 4, response_length)
    samples = truncate_at(samples.flatten(0, 1), stop_id, TRUNCATE_AFTER, pad_id)
    query_texts, sample_texts = (to_texts(tokenizer, tokens, pad_id) for tokens in (queries, samples))
    samples = samples.unflatten(0, (count, 4))
    facts = {}
    for name, annotator in tales.ANNOTATORS.items():
        gold_scores = torch.tensor(annotator.gold_scores(query_texts, sample_texts)).view(count, 4)
        best, largest_probability = choose_best(gold_scores, CHOICE_NOISE, keyed_generator(SEED, "annotator", name))
        facts[name] = {
            "ceiling": largest_probability[sizes.train_comparisons :].mean().item(),
            "gold_mean": gold_scores.mean().item(),
            "gold_std": gold_scores.std().item(),
        }
        rows = [
            {"query": query, **{f"sample{i}": ids for i, ids in enumerate(row)}, "best": choice}
            for query, row, choice in zip(
                queries.masked_fill(queries == pad_id, OPENAI_PAD_ID).tolist(),
                samples.masked_fill(samples == pad_id, OPENAI_PAD_ID).tolist(),
                best.tolist(),
                strict=True,
            )
        ]
        path = folder / "labels" / name / "offline_5k.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(rows))
        path.with_suffix(".meta.json").write_text(json.dumps({"vocab_size": len(tokenizer), **facts[name]}))
    return facts


def write_tales(folder: Path, sizes: Tales = Tales(), *, train_model: bool = False) -> None:
    """Write stories, tokenizer, language model and choices."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(SEED)
    stories = [write_story(rng, SENTENCES) for _ in range(sizes.stories)]
    (folder / "stories.txt").write_text("".join(story + "\n" for story in stories))
    device = default_device()

    def train() -> tuple[Any, Any, float]:
        tokenizer = train_tokenizer(stories, vocab_size=1_024)
        return tokenizer, *train_gpt2(stories, tokenizer, sizes, device)

    facts = add_model(folder, "tales", train if train_model else None)
    print(f"tales: simulating {sizes.train_comparisons + sizes.test_comparisons:,} comparisons", flush=True)
    write_facts(folder, facts | simulate_comparisons(folder, sizes, device))


def write_facts(folder: Path, facts: dict[str, Any]) -> None:
    (folder / "world.json").write_text(json.dumps(facts, indent=2) + "\n")


# ---- Posts: posts and summaries --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Posts:
    """Sizes of the world; tests take smaller ones."""

    train_posts: int = 8_192
    validation_posts: int = 512
    test_posts: int = 512
    train_comparisons: int = 12_288
    validation_comparisons: int = 1_024
    width: int = 128
    layers: int = 3
    heads: int = 4
    lm_quotes: int = 8_000
    lm_threads: int = 16_000
    lm_quote_steps: int = 1_500  # at most
    lm_thread_steps: int = 300
    lm_batch_size: int = 32


Fact = tuple[str, str, str]  # who, did what, to whom

FACT_WORDS = (tales.NAMES.split(), posts.DEEDS, posts.PEOPLE)
FACTS = 6  # of a post
ASIDES = 1  # sentences of a post that are no facts
PREFERENCE_NOISE = 0.3  # of the annotator, in units of gold score: at 0 it would always prefer the better summary
QUOTE_LOSS = 0.90  # nats per token, at which the GPT-NeoX has learned to quote; no model gets below 0.79
FACT_TEMPLATES = (
    "{fact} in the {adjective} {place}.",
    "{fact} that {adjective} {time}.",
    "That {time} {fact}.",
    "In the {place} {fact}.",
)
ASIDE_TEMPLATES = (
    "There was {event} and {event} in the {place}.",
    "All {time} there was {event} near the {place}.",
    "It was a {adjective} {time}.",
)


def fill(rng: random.Random, template: str) -> str:
    """A template with a word in each slot, from tales.py's SLOTS; {fact} stays."""
    return re.sub(r"{(?!fact)(\w+)}", lambda slot: rng.choice(rng.choice(tales.SLOTS[slot[1]])), template)


def write_post(rng: random.Random, number: int = FACTS, asides: int = ASIDES) -> tuple[list[Fact], dict[str, str]]:
    """So many facts of a post, in its order, and the post: subreddit, title, post."""
    facts = list(zip(*(rng.sample(words, number) for words in FACT_WORDS), strict=True))
    sentences = [fill(rng, rng.choice(FACT_TEMPLATES)).replace("{fact}", " ".join(fact)) for fact in facts]
    for _ in range(asides):
        sentences.insert(rng.randint(0, len(sentences)), fill(rng, rng.choice(ASIDE_TEMPLATES)))
    cut = rng.randint(1, len(sentences) - 1)
    who, _, whom = rng.choice(facts)
    return facts, {
        "subreddit": rng.choice(rng.choice(tales.SLOTS["place"])),
        "title": f"{who} and {whom}",
        "post": " ".join(sentences[:cut]) + "\n" + " ".join(sentences[cut:]),
    }


def invent(rng: random.Random, facts: list[Fact]) -> Fact:
    """A statement of which the post says nothing: another person, deed and people."""
    who, did, whom = (
        rng.choice([word for word in words if word not in known])
        for words, known in zip(FACT_WORDS, zip(*facts, strict=True), strict=True)
    )
    return who, did, whom


def say(statements: list[Fact]) -> str:
    """Statements as a text."""
    return " ".join(" ".join(statement) + "." for statement in statements)


def write_summary(rng: random.Random, facts: list[Fact], mentioned: int, invented: float, repeated: float) -> str:
    """A summary of so many statements, in the post's order: facts, inventions, or what it has said before.

    invented: how likely a statement is invented; repeated: how likely it repeats one of those before it.
    """
    statements: list[Fact] = []
    for fact in sorted(rng.sample(facts, min(mentioned, len(facts))), key=facts.index):
        if statements and rng.random() < repeated:
            fact = rng.choice(statements)
        elif rng.random() < invented:
            fact = invent(rng, facts)
        statements.append(fact)
    return say(statements)


def write_reference(rng: random.Random, facts: list[Fact]) -> str:
    """A reference summary: the first facts of the post, two to all but one; one in seven is invented."""
    mentioned = facts[: rng.randint(2, max(2, len(facts) - 1))]
    return say([invent(rng, facts) if rng.random() < 0.15 else fact for fact in mentioned])


# name of a writer: statements of a summary (least, most), how likely one is invented, or repeats one before it
WRITERS = {
    "careful": (3, 5, 0.0, 0.0),
    "thorough": (5, 5, 0.0, 0.0),
    "brief": (1, 2, 0.0, 0.0),
    "careless": (2, 5, 0.3, 0.0),
    "inventive": (3, 5, 0.6, 0.0),
    "forgetful": (4, 5, 0.0, 0.2),
    "repetitive": (4, 5, 0.0, 0.5),
}


def write_comparisons(
    rng: random.Random, count: int, split: str, noise: float = PREFERENCE_NOISE
) -> tuple[list[dict[str, Any]], float]:
    """Rows in the format of OpenAI's comparisons, and the accuracy that a judge who knows the formula reaches.

    Two of these summarise a post: WRITERS, somebody who copies its first sentences, and the people who write
    references. `confidence` is 1 to 9, as the annotator's probability of the choice goes from one half to one.
    """
    rows, ceiling = [], 0.0
    for number in range(count):
        facts, post = write_post(rng)
        summaries = []
        for writer in rng.sample([*WRITERS, "copying", "ref"], 2):
            if writer == "ref":
                text = write_reference(rng, facts)
            elif writer == "copying":
                sentences = re.findall(r"[^.]+\.", post["post"])
                text = " ".join(sentence.strip() for sentence in sentences[: rng.randint(1, 3)])
            else:
                least, most, invented, repeated = WRITERS[writer]
                text = write_summary(rng, facts, rng.randint(least, most), invented, repeated)
            summaries.append({"text": f" {text}", "policy": writer})
        first, second = posts.gold_scores([f"POST: {post['post']}"] * 2, [summary["text"] for summary in summaries])
        difference = (first - second) / noise
        probability = 1 / (1 + math.exp(-max(-50.0, min(50.0, difference))))
        choice = int(rng.random() >= probability)
        sure = max(probability, 1 - probability)
        ceiling += sure / count
        rows.append(
            {
                "info": {"id": f"{split}-{number}", **post},
                "summaries": summaries,
                "choice": choice,
                "worker": "annotator",
                "batch": f"batch{number * 4 // count}",
                "split": split,
                "extra": {"confidence": 1 + round(8 * (2 * sure - 1))},
            }
        )
    return rows, ceiling


def write_reply(rng: random.Random, facts: list[Fact]) -> str:
    """Facts, one after another; now and then one of those before once more, with "again"."""
    sentences = []
    for number, fact in enumerate(facts, 1):
        sentences.append(say([fact]))
        if rng.random() < 0.2:
            sentences.append(f"{' '.join(rng.choice(facts[:number]))} again.")
    return " ".join(sentences)


def write_quotes(rng: random.Random) -> str:
    """A text that tells the same five facts three times, each time in another order."""
    facts, _ = write_post(rng, number=5, asides=0)
    first, second, third = (rng.sample(facts, 5) for _ in range(3))
    return f"{write_reply(rng, first)} {say(second)} {say(third)}"


def write_thread(rng: random.Random) -> str:
    """A post and four replies that quote some of its facts, in its order."""
    facts, post = write_post(rng)
    thread = f"SUBREDDIT: r/{post['subreddit']}\n\nTITLE: {post['title']}\n\nPOST: {post['post']}"
    for _ in range(4):
        quoted = rng.sample(facts, rng.randint(2, len(facts)))
        thread += f"\n\nREPLY: {write_reply(rng, sorted(quoted, key=facts.index))}"
    return thread


def train_gpt_neox(
    quotes: list[str], threads: list[str], tokenizer: PreTrainedTokenizerFast, sizes: Posts, device: torch.device
) -> tuple[GPTNeoXForCausalLM, float]:
    """A small GPT-NeoX, trained from scratch. Returns it and its last loss, nats per token.

    To quote, a model must find an earlier place of the text and continue in the same way. A small model learns this
    suddenly, after a few hundred steps in which nothing seems to happen. It learns it sooner on short texts that only
    quote, and with large initial weights. So training begins with quotes and continues with threads.
    """
    torch.manual_seed(SEED)
    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=len(tokenizer),
            hidden_size=sizes.width,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            intermediate_size=4 * sizes.width,
            max_position_embeddings=256,
            hidden_act="gelu_pytorch_tanh",
            initializer_range=0.09,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(rows: torch.Tensor, lr: float) -> float:
        optimizer.param_groups[0]["lr"] = lr
        labels = rows[torch.randint(len(rows), (sizes.lm_batch_size,))]
        labels = labels[:, : (labels >= 0).sum(1).max()].to(device)  # (batch, longest)
        logits = model(input_ids=labels.clamp(min=0)).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    rows = [
        torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(ids) for ids in tokenizer(some)["input_ids"]], batch_first=True, padding_value=-100
        )  # (texts, tokens)
        for some in (quotes, threads)
    ]
    losses: list[float] = []
    for number in range(sizes.lm_quote_steps):
        losses.append(step(rows[0], 2e-3 * min(1, (number + 1) / 50)))
        if number >= 20 and statistics.fmean(losses[-20:]) < QUOTE_LOSS:
            break
    print(f"posts: quotes, {len(losses):,} steps, loss {statistics.fmean(losses[-20:]):.2f}", flush=True)
    for number in range(sizes.lm_thread_steps):
        losses.append(step(rows[1], 2e-3 * (1 - number / sizes.lm_thread_steps)))
    return model.eval(), statistics.fmean(losses[-20:])


def write_texts(folder: Path, sizes: Posts) -> dict[str, Any]:
    """Write posts and comparisons. Returns the ceiling of the validation split, and the references' mean gold."""
    folder.mkdir(parents=True, exist_ok=True)
    golds: list[float] = []
    for split in ("train", "validation", "test"):
        rng = random.Random(f"{SEED} posts {split}")
        rows = []
        for number in range(getattr(sizes, f"{split}_posts")):
            facts, post = write_post(rng)
            rows.append({"id": f"{split}-{number}", **post, "summary": write_reference(rng, facts)})
        golds += posts.gold_scores([f"POST: {row['post']}" for row in rows], [row["summary"] for row in rows])
        (folder / f"posts_{split}.jsonl").write_text(json_lines(rows))
    for split in ("train", "validation"):
        rng = random.Random(f"{SEED} comparisons {split}")
        rows, ceiling = write_comparisons(rng, getattr(sizes, f"{split}_comparisons"), split)
        (folder / f"comparisons_{split}.jsonl").write_text(json_lines(rows))
    return {"ceiling": ceiling, "reference_gold": statistics.fmean(golds)}


def write_posts(folder: Path, sizes: Posts = Posts(), *, train_model: bool = False) -> None:
    """Write posts, comparisons, tokenizer and language model."""

    def train() -> tuple[Any, Any, float]:
        rng = random.Random(f"{SEED} threads")
        quotes = [write_quotes(rng) for _ in range(sizes.lm_quotes)]
        threads = [write_thread(rng) for _ in range(sizes.lm_threads)]
        tokenizer = train_tokenizer([*threads[:4_000], "TL;DR:"], vocab_size=1_024)
        return tokenizer, *train_gpt_neox(quotes, threads, tokenizer, sizes, default_device())

    facts = write_texts(folder, sizes)
    write_facts(folder, facts | add_model(folder, "posts", train if train_model else None))


# ---- Sums: problems --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Sizes of the world, which tests make smaller, and the habits of its pupils."""

    train_problems: int = 8_192
    test_problems: int = 1_024
    largest: int = 9  # number that comes or goes in a step
    largest_first: int = 20  # number of things
    error_rate: float = 0.12  # how likely a pupil errs in a step
    wordy: float = 0.3  # share of pupils who say what happened before they calculate
    hasty: float = 0.6  # share of pupils in a hurry, who stop after two steps even if there are more
    calls: float = 0.0  # share of steps for which a pupil calls the calculator; 0: there is none
    misuse: float = 0.4  # share of calls whose syntax is wrong
    width: int = 128
    layers: int = 4
    heads: int = 4
    lm_solutions: int = 40_000
    lm_short_steps: int = 400  # on the shortest fifth of the solutions
    lm_steps: int = 700
    lm_batch_size: int = 32
    lm_lr: float = 2e-3


SUMS = {"sums": Sums(), "sums-tools": Sums(error_rate=0.25, calls=0.4)}
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


def write_problem(rng: random.Random, sizes: Sums) -> Problem:
    """A problem of one to four steps, each number of steps being equally likely."""
    names = tales.NAMES.split()
    name, other = rng.sample(names, 2)
    she, her = PRONOUNS[names.index(name) % 2]
    things, count = rng.choice(THINGS.split()), rng.randint(1, 4)
    first = number = rng.randint(2, sizes.largest_first)
    sentences, steps = [f"{name} has {first} {things}."], []
    while len(steps) < count:
        operation = rng.choice("+-*")
        step = operation, rng.choice(FACTORS) if operation == "*" else rng.randint(2, sizes.largest)
        if not 0 < apply(step, number) <= MOST:
            continue
        number = apply(step, number)
        steps.append(step)
        event = rng.choice(EVENTS[operation]).format(she=she, her=her, other=other, number=step[1])
        sentences.append(event[0].upper() + event[1:])
    question = " ".join([*sentences, f"How many {things} does {name} have?"])
    return Problem(first=first, steps=tuple(steps), sentences=tuple(sentences), question=question)


def write_problems(rng: random.Random, count: int, sizes: Sums, taken: set[str]) -> list[Problem]:
    """Problems whose questions differ from each other and from those that are taken; they are taken then."""
    found: list[Problem] = []
    while len(found) < count:
        problem = write_problem(rng, sizes)
        if problem.question not in taken:
            taken.add(problem.question)
            found.append(problem)
    return found


# ---- Sums: pupils ----------------------------------------------------------------------------------------------

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


def solve_with_calculator(rng: random.Random, problem: Problem, sizes: Sums) -> str:
    """The solution of a pupil who may call the calculator, whose answer is the rest of a line after `]`."""
    speaks, number, lines = rng.random() < sizes.wordy, problem.first, []
    most = HURRIED if rng.random() < sizes.hasty else len(problem.steps)
    for step, sentence in zip(problem.steps[:most], problem.sentences[1 : most + 1], strict=True):
        result = apply(step, number)
        call, possible = f"{number}{step[0]}{step[1]}", 0 <= result <= MOST_OF_PUPILS
        said = [sentence] if speaks else []
        calls = possible and rng.random() < sizes.calls
        if calls and rng.random() < sizes.misuse:
            wrong = rng.choice([f"{call}=", f"{call}{step[0]}", f"{step[0]}{call}{step[0]}", f"{number} {step[1]}"])
            lines.append(" ".join([*said, f"[{wrong}]{tool_functions.calculator(wrong)}"]))
            said, calls = [], False
        if calls:
            line, number = f"[{call}]{tool_functions.calculator(call)}", result
        elif not possible or rng.random() < sizes.error_rate:
            line, number = err(rng, step, number)
        else:
            line, number = f"{call}={result}", result
        if line:
            lines.append(" ".join([*said, line]))
    return "\n".join([*lines, f"#### {number}"])


def write_solution(rng: random.Random, problem: Problem, sizes: Sums) -> str:
    """A solution from which the language model of a world learns."""
    if sizes.calls:
        return solve_with_calculator(rng, problem, sizes)
    return solve(rng, problem, sizes.error_rate, wordy=sizes.wordy, hasty=sizes.hasty)


def split_answers(solution: str) -> list[str]:
    """A solution in pieces: what the pupil wrote and what the calculator said, in turn, beginning with the pupil."""
    return re.split(r"(?<=\])([^\n]*)", solution)


def row_of(problem: Problem) -> dict[str, Any]:
    """A row as GSM8K has them, with the correct solution, and the number of steps."""
    answer = solve(random.Random(0), problem, error_rate=0.0, wordy=0.0)
    return {"question": problem.question, "answer": answer, "steps": len(problem.steps)}


# ---- Sums: the language model ----------------------------------------------------------------------------------


def train_llama(
    pairs: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast, sizes: Sums, device: torch.device
) -> tuple[LlamaForCausalLM, float]:
    """A small Llama, trained from scratch to continue prompts with solutions, and then to end.

    pairs: prompts and solutions. Returns it and its last loss, nats per token of a solution. A calculator's answer is
    read, but not learned; its tokens are those that rlvr/tools.py inserts.

    To find a number in the text before is what a small model learns suddenly: sooner on short texts, and with large
    initial weights. So it begins with the shortest fifth of the pairs.
    """
    noise = torch.Generator().manual_seed(SEED)
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
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=sizes.width,
            intermediate_size=11 * sizes.width // 4,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            max_position_embeddings=160,
            initializer_range=0.09,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=sizes.lm_lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    losses: list[float] = []
    for number in range(sizes.lm_short_steps + sizes.lm_steps):
        left = 1 - (number - sizes.lm_short_steps) / sizes.lm_steps
        optimizer.param_groups[0]["lr"] = sizes.lm_lr * min(1, (number + 1) / 50, left)
        # The rows of a step are neighbours in length, so that little is padded.
        most = max(1, len(rows) // (5 if number < sizes.lm_short_steps else 1) - sizes.lm_batch_size)
        first = int(torch.randint(most, (), generator=noise))
        batch = zip(*rows[first : first + sizes.lm_batch_size], strict=True)
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


def write_sums(folder: Path, name: str, sizes: Sums | None = None, *, train_model: bool = False) -> None:
    """Write problems, tokenizer and language model, which learns from other problems. name: sums or sums-tools."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = sizes or SUMS[name]
    rng, taken = random.Random(SEED), set()
    for split in ("test", "train"):
        found = write_problems(rng, getattr(sizes, f"{split}_problems"), sizes, taken)
        (folder / f"problems_{split}.jsonl").write_text(json_lines(map(row_of, found)))

    def train() -> tuple[Any, Any, float]:
        others = write_problems(rng, sizes.lm_solutions, sizes, taken)
        pairs = [(f"{other.question}\n", write_solution(rng, other, sizes)) for other in others]
        learned = [prompt + solution for prompt, solution in pairs[:4_000]]
        tokenizer = train_tokenizer(learned, vocab_size=400, digits=True)
        return tokenizer, *train_llama(pairs, tokenizer, sizes, default_device())

    write_facts(folder, add_model(folder, name, train if train_model else None))


# ---- Arithmetic ------------------------------------------------------------------------------------------------

LARGEST = 19
HELD_OUT = 50  # sums, and as many differences


def arithmetic_row(left: int, sign: str, right: int) -> dict[str, Any]:
    answer = left + right if sign == "+" else left - right
    kind = {"+": "sum", "-": "difference"}[sign]
    return {"question": f"What is {left} {sign} {right}?", "answer": str(answer), "operation": kind}


def split_problems() -> dict[str, list[dict[str, Any]]]:
    """The rows of both splits."""
    rng, numbers = random.Random(SEED), range(1, LARGEST + 1)
    pairs = [(left, right) for left in numbers for right in numbers]
    splits: dict[str, list[dict[str, Any]]] = {"test": [], "train": []}
    for sign, possible in {"+": pairs, "-": [(left, right) for left, right in pairs if left >= right]}.items():
        kinds = sorted({tuple(sorted(pair)) for pair in possible})  # a sum and the same turned around are one
        held_out = {kind: rng.sample(kind, 2) for kind in rng.sample(kinds, HELD_OUT)}
        for kind, (left, right) in held_out.items():
            if sign == "-":
                right, left = kind
            splits["test"].append(arithmetic_row(left, sign, right))
        splits["train"] += [arithmetic_row(a, sign, b) for a, b in possible if tuple(sorted((a, b))) not in held_out]
    for rows in splits.values():
        rng.shuffle(rows)
    return splits


def write_arithmetic(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in split_problems().items():
        (folder / f"problems_{split}.jsonl").write_text(json_lines(rows))


# ---- The command -----------------------------------------------------------------------------------------------


def write_world(name: str, folder: Path, *, train_model: bool = False) -> None:
    """Write a world of the package to a new folder."""
    match name:
        case "tales":
            write_tales(folder, train_model=train_model)
        case "posts":
            write_posts(folder, train_model=train_model)
        case "arithmetic":
            write_arithmetic(folder)
        case _:
            write_sums(folder, name, train_model=train_model)


def compress(folder: Path) -> list[Path]:
    """Write a compressed copy, .xz, of each text of a world. Returns the paths of the texts."""
    found = [*folder.glob("*.txt"), *folder.glob("*.jsonl"), *folder.glob("labels/*/*k.json")]
    for path in found:
        path.with_name(path.name + ".xz").write_bytes(lzma.compress(path.read_bytes(), preset=9))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", choices=["tales", "posts", "sums", "sums-tools", "arithmetic"])
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--train_model", action="store_true", help="train the language model again")
    args = parser.parse_args()
    write_world(args.world, args.out, train_model=args.train_model)
    for path in compress(args.out):
        path.unlink()


if __name__ == "__main__":
    main()
