"""Posts to summarise, for chapter 2: a small world with a known truth, like tales.py, that needs no network.

Somebody tells in a forum what a few people did, with details that do not matter. A summary should tell what they
did, and nothing else:

    SUBREDDIT: r/harbour

    TITLE: Ilse and bakers

    POST: That winter Mara robbed sailors. Ilse thanked bakers in the narrow mill. It was a gloomy week.
    In the valley Jonas watched healers. All night there was music near the tower. ...

    TL;DR: Ilse thanked bakers. Mara robbed sailors.

1. `write_post`: a seeded grammar writes posts. A fact is a sentence in which somebody did something; three of its
   words matter, and each person of a post does one thing.
2. `write_reference`: people write the reference summaries. They mention the first facts, and sometimes invent one.
3. `gold_scores`: what a good summary is, as a formula. One point for each fact of the post that it mentions; less one
   for each statement that the post does not make; less a tenth for each word.
4. `write_comparisons`: a simulated annotator reads two summaries of different quality and prefers the one with the
   higher gold score, with noise: P(first) = sigmoid((gold_1 - gold_2) / annotator_temperature). No judge can
   be expected to agree with it more often than the mean of max(P, 1 - P): the ceiling.
5. `train_language_model`: a small GPT-NeoX, the architecture of Pythia, learns to write such threads from scratch:
   posts with replies that quote them and, where they say something twice, add "again". It has never seen a `TL;DR:`,
   nor the end-of-text token; SFT teaches both. With the usual settings the trained model is part of the package
   (building.py).

Everything is written in the formats of the data sets that chapter 2 reads from the hub, and read by the same code.

    python ppo_rlhf/worlds/posts.py    # build the world, unless it is there, and read a little of it
"""

import dataclasses
import json
import math
import random
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

from ppo_rlhf.lib.base import errors, files, launch
from ppo_rlhf.lib.base.errors import InputError
from ppo_rlhf.lib.services import cli
from ppo_rlhf.worlds import building, tales

# ---- Arguments -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PostsArgs:
    """The settings of a world. Worlds with other settings live in other folders of the cache."""

    seed: int = 1
    """seed of everything in the world; not the seed of a training run, so that many runs share one world"""
    train_posts: int = 8_192
    """posts with a reference summary to train on"""
    validation_posts: int = 512
    """such posts held out"""
    test_posts: int = 512
    """more such posts held out"""
    train_comparisons: int = 12_288
    """comparisons to train on"""
    validation_comparisons: int = 1_024
    """comparisons held out"""
    facts: int = 6
    """facts of a post"""
    asides: int = 1
    """sentences of a post that are no facts"""
    annotator_temperature: float = 0.3
    """noise of the annotator, in units of gold score: 0 would always prefer the better summary"""
    vocab_size: int = 1_024
    """largest number of tokens of the byte-level BPE"""
    width: int = 128
    """width of the GPT-NeoX"""
    layers: int = 3
    """layers of the GPT-NeoX"""
    heads: int = 4
    """attention heads of a layer"""
    max_positions: int = 256
    """the longest sequence that the GPT-NeoX can read, in tokens"""
    lm_quote_steps: int = 1_500
    """most steps of the language model on texts that only repeat facts, where it learns to quote"""
    lm_quote_loss: float = 0.90
    """loss, nats per token, at which it has learned that, and these steps end; no model gets below 0.79"""
    lm_thread_steps: int = 300
    """further steps, on whole threads"""
    lm_quotes: int = 8_000
    """texts that only repeat facts"""
    lm_threads: int = 16_000
    """threads"""
    lm_batch_size: int = 32
    """texts per step"""
    lm_lr: float = 2e-3
    """learning rate of language-model training (AdamW); on threads it falls linearly to zero"""


# ---- Posts and summaries ---------------------------------------------------------------------------------------

Fact = tuple[str, str, str]  # who, did what, to whom

DEEDS = tales.words_of(*(taste["verb"] for taste in (tales.PLEASANT, tales.UNPLEASANT, tales.NEUTRAL)))
PEOPLE = tales.words_of(
    "friends heroes angels healers singers saints",
    "thieves liars villains bullies monsters traitors",
    "bakers farmers sailors widows millers shepherds",
)
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
FACT = re.compile(rf"\b({'|'.join(tales.NAMES.split())}) ({'|'.join(DEEDS)}) ({'|'.join(PEOPLE)})\b")


def fill(rng: random.Random, template: str) -> str:
    """A template with a word in each slot, from tales.py's SLOTS; {fact} stays."""
    return re.sub(r"{(?!fact)(\w+)}", lambda slot: rng.choice(rng.choice(tales.SLOTS[slot[1]])), template)


def write_post(rng: random.Random, number: int, asides: int) -> tuple[list[Fact], dict[str, str]]:
    """So many facts of a post, in its order, and the post: subreddit, title, post."""
    facts = list(zip(*(rng.sample(words, number) for words in (tales.NAMES.split(), DEEDS, PEOPLE)), strict=True))
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
        for words, known in zip((tales.NAMES.split(), DEEDS, PEOPLE), zip(*facts, strict=True), strict=True)
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


# ---- The annotator ---------------------------------------------------------------------------------------------


def gold_scores(queries: list[str], responses: list[str]) -> list[float]:
    """Of each summary: facts of the post that it mentions, minus statements that are no facts, minus words / 10.

    queries: texts with a post, as the policy reads them. A statement ends with a full stop; what comes after the last
    one is a statement too, if it is anything. A fact that is mentioned twice counts once.
    """
    scores = []
    for query, response in zip(queries, responses, strict=True):
        facts = {" ".join(match.groups()) for match in FACT.finditer(query.partition("POST:")[2])}
        statements = [statement.strip() for statement in response.split(".") if statement.strip()]
        covered = len(facts & set(statements))
        invented = sum(statement not in facts for statement in statements)
        scores.append(covered - invented - len(response.split()) / 10)
    return scores


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
    rng: random.Random, count: int, args: PostsArgs, split: str
) -> tuple[list[dict[str, Any]], float]:
    """Rows in the format of OpenAI's comparisons, and the accuracy that a judge who knows the formula reaches.

    Two of these summarise a post: WRITERS, somebody who copies its first sentences, and the people who write
    references. `confidence` is 1 to 9, as the annotator's probability of the choice goes from one half to one.
    """
    rows, ceiling = [], 0.0
    for number in range(count):
        facts, post = write_post(rng, args.facts, args.asides)
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
        first, second = gold_scores([f"POST: {post['post']}"] * 2, [summary["text"] for summary in summaries])
        difference = (first - second) / args.annotator_temperature
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


# ---- The language model ----------------------------------------------------------------------------------------


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


def write_thread(rng: random.Random, args: PostsArgs) -> str:
    """A post and four replies that quote some of its facts, in its order."""
    facts, post = write_post(rng, args.facts, args.asides)
    thread = f"SUBREDDIT: r/{post['subreddit']}\n\nTITLE: {post['title']}\n\nPOST: {post['post']}"
    for _ in range(4):
        quoted = rng.sample(facts, rng.randint(2, len(facts)))
        thread += f"\n\nREPLY: {write_reply(rng, sorted(quoted, key=facts.index))}"
    return thread


def train_language_model(
    quotes: list[str], threads: list[str], tokenizer: PreTrainedTokenizerFast, args: PostsArgs, device: torch.device
) -> tuple[GPTNeoXForCausalLM, float]:
    """A small GPT-NeoX, trained from scratch. Returns it and its last loss, nats per token.

    To quote, a model must find an earlier place of the text and continue in the same way. A small model learns this
    suddenly, after a few hundred steps in which nothing seems to happen. It learns it sooner on short texts that only
    quote, and with large initial weights. So training begins with quotes and continues with threads.
    """
    torch.manual_seed(args.seed)
    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=len(tokenizer),
            hidden_size=args.width,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            intermediate_size=4 * args.width,
            max_position_embeddings=args.max_positions,
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lm_lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(rows: torch.Tensor, lr: float) -> float:
        optimizer.param_groups[0]["lr"] = lr
        labels = rows[torch.randint(len(rows), (args.lm_batch_size,))]
        labels = labels[:, : (labels >= 0).sum(1).max()].to(device)  # (batch, longest)
        logits = model(input_ids=labels.clamp(min=0)).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    rows = [
        torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(ids) for ids in tokenizer(texts)["input_ids"]], batch_first=True, padding_value=-100
        )  # (texts, tokens)
        for texts in (quotes, threads)
    ]
    losses: list[float] = []
    for number in range(args.lm_quote_steps):
        losses.append(step(rows[0], args.lm_lr * min(1, (number + 1) / 50)))
        if number >= 20 and statistics.fmean(losses[-20:]) < args.lm_quote_loss:
            break
    print(f"posts: quotes, {len(losses):,} steps, loss {statistics.fmean(losses[-20:]):.2f}", flush=True)
    for number in range(args.lm_thread_steps):
        losses.append(step(rows[1], args.lm_lr * (1 - number / args.lm_thread_steps)))
    return model.eval(), statistics.fmean(losses[-20:])


# ---- The world -------------------------------------------------------------------------------------------------


def write_texts(folder: Path, args: PostsArgs) -> dict[str, Any]:
    """Write posts and comparisons; returns the ceiling of the validation split, and the references' mean gold."""
    golds: list[float] = []
    for split in ("train", "validation", "test"):
        rng = random.Random(f"{args.seed} posts {split}")
        rows = []
        for number in range(getattr(args, f"{split}_posts")):
            facts, post = write_post(rng, args.facts, args.asides)
            rows.append({"id": f"{split}-{number}", **post, "summary": write_reference(rng, facts)})
        golds += gold_scores([f"POST: {row['post']}" for row in rows], [row["summary"] for row in rows])
        (folder / f"posts_{split}.jsonl").write_text(files.json_lines(rows))
    for split in ("train", "validation"):
        rng = random.Random(f"{args.seed} comparisons {split}")
        rows, ceiling = write_comparisons(rng, getattr(args, f"{split}_comparisons"), args, split)
        (folder / f"comparisons_{split}.jsonl").write_text(files.json_lines(rows))
    return {"ceiling": ceiling, "reference_gold": statistics.fmean(golds)}


def train_model(place: Path, args: PostsArgs) -> dict[str, Any]:
    """Write the tokenizer and the language model of a world. Returns facts about them."""
    rng = random.Random(f"{args.seed} threads")
    quotes = [write_quotes(rng) for _ in range(args.lm_quotes)]
    threads = [write_thread(rng, args) for _ in range(args.lm_threads)]
    tokenizer = tales.train_tokenizer([*threads[:4_000], "TL;DR:"], args.vocab_size)
    print("posts: training a GPT-NeoX", flush=True)
    model, loss = train_language_model(quotes, threads, tokenizer, args, launch.default_device())
    model.save_pretrained(place / "model")
    tokenizer.save_pretrained(place / "model")
    return {"settings": dataclasses.asdict(args), "parameters": model.num_parameters(), "lm_loss": loss}


def build_world(folder: Path, args: PostsArgs) -> None:
    """Write posts, comparisons, tokenizer and language model to a new folder; it appears when all is there."""
    with building.new_world(folder, "posts") as place:
        print(f"posts: writing {args.train_posts:,} posts, {args.train_comparisons:,} comparisons", flush=True)
        facts = write_texts(place, args)
        trained = building.find_trained("posts", made_of(args))
        facts |= building.copy_trained(trained, place) if trained else train_model(place, args)
        (place / "world.json").write_text(json.dumps(facts, indent=2) + "\n")


def made_of(args: PostsArgs) -> list[Any]:
    """Settings and grammar: what makes a world the same world."""
    grammar = [tales.SLOTS, tales.NAMES, DEEDS, PEOPLE, FACT_TEMPLATES, ASIDE_TEMPLATES, WRITERS]
    return [dataclasses.asdict(args), *grammar]


def find_world(args: PostsArgs | None = None) -> Path:
    """The folder of the world with these settings; it is built if it does not exist."""
    args = args or PostsArgs()
    cli.check_values(args)
    sizes = {name for name, value in dataclasses.asdict(args).items() if type(value) is int} - {"seed", "asides"}
    cli.at_least(1, "", args, *sorted(sizes))
    cli.at_least(0, "", args, "asides")
    cli.above_zero("", args, "lm_lr", "lm_quote_loss", "annotator_temperature")
    cli.at_least(3, "", args, "facts")
    names = len(tales.NAMES.split())
    if args.facts >= names:
        raise InputError(f"facts is {args.facts}; it must be below {names}, the number of names")
    if args.width % (2 * args.heads):
        raise InputError(f"heads {args.heads} does not divide width {args.width} into even parts")
    return building.find("posts", made_of(args), lambda folder: build_world(folder, args))


def main() -> None:
    world = find_world(cli.parse(PostsArgs, description=__doc__))
    facts = building.read_facts(world)
    with (world / "posts_train.jsonl").open() as file:
        post = json.loads(file.readline())
    print(f"{world}: a GPT-NeoX of {facts['parameters']:,} parameters (loss {facts['lm_loss']:.2f} nats per token).")
    print(f"The first post and its reference summary:\n\n{post['post']}\n\nTL;DR: {post['summary']}")


if __name__ == "__main__":
    errors.run_script(main)
