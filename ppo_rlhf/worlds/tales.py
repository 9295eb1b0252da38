"""Tales: a small world with a known truth, so that all of RLHF runs on a laptop without a network.

What CartPole is to reinforcement learning, this is to RLHF. The language model really samples, the reward model
really learns from comparisons, and yet the thing that people want is known in closed form:

1. `write_story`: a seeded grammar writes short stories. Every sentence has slots. Those for an adjective,
   an adverb, a verb, a feeling, an event or a person get a pleasant, an unpleasant or a neutral word, independently
   of what came before.
2. `train_model`: a byte-level BPE tokenizer and a small GPT-2 are trained on the stories from scratch. With the usual
   settings the trained model is part of the package (building.py).
3. `Annotator.gold_scores`: what the simulated annotator wants, as a formula.
4. `Annotator.choose_best`: the annotator reads four continuations sampled from the language model and picks the best,
   with noise: P(i) is proportional to exp(gold_i / annotator_temperature). So nobody, not even a judge that
   knows the formula, can predict more than the mean of the largest of the four probabilities: the ceiling.

The comparisons are written as JSON in the format of OpenAI's label files, and read by the same code.

    python ppo_rlhf/worlds/tales.py    # build the world, unless it is there, and read a little of it
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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from ppo_rlhf.lib.base import errors, launch
from ppo_rlhf.lib.base.errors import InputError
from ppo_rlhf.lib.data import label_files, texts
from ppo_rlhf.lib.nets import lm
from ppo_rlhf.lib.services import cli
from ppo_rlhf.worlds import building

# ---- Arguments -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TalesArgs:
    """The settings of a world. Worlds with other settings live in other folders of the cache."""

    seed: int = 1
    """seed of everything in the world; not the seed of a training run, so that many runs share one world"""
    stories: int = 20_000
    """number of stories"""
    sentences_per_story: int = 14
    """number of sentences of a story"""
    vocab_size: int = 1024
    """tokens of the byte-level BPE"""
    width: int = 128
    """width of the GPT-2"""
    layers: int = 4
    """layers of the GPT-2"""
    heads: int = 4
    """attention heads of a layer"""
    max_positions: int = 160
    """the longest sequence that the GPT-2 can read, in tokens"""
    lm_steps: int = 400
    """optimiser steps of language-model training"""
    lm_batch_size: int = 64
    """sequences per step"""
    lm_sequence_length: int = 64
    """tokens per sequence; each begins at the start of a sentence"""
    lm_lr: float = 3e-3
    """highest learning rate of language-model training (AdamW, linear warm-up, cosine to zero)"""
    query_length: int = 24
    """tokens of the longest query in the comparisons"""
    response_length: int = 24
    """tokens of each continuation in the comparisons"""
    truncate_after: int = 16
    """continuations are cut after the first full stop at or after this index"""
    temperature: float = 0.7
    """sampling temperature of the continuations"""
    train_comparisons: int = 4_992
    """comparisons to train on"""
    test_comparisons: int = 1_024
    """comparisons held out"""
    annotator_temperature: float = 0.5
    """noise of the annotator, in units of gold score: 0 would always pick the best"""


# ---- Stories ---------------------------------------------------------------------------------------------------

PLEASANT = {
    "adjective": "lovely gentle cheerful golden sweet bright kind charming splendid cosy merry peaceful noble tender",
    "adverb": "gladly kindly happily warmly proudly gracefully",
    "verb": "praised helped thanked kissed cheered healed rescued",
    "feeling": "happy hopeful grateful loved calm delighted",
    "event": "laughter music joy luck friendship comfort",
    "person": "friend hero angel healer singer saint",
}
UNPLEASANT = {
    "adjective": "gloomy cruel rotten bitter wicked nasty hateful dreadful filthy broken miserable deadly vile mean",
    "adverb": "sadly rudely coldly angrily cruelly painfully",
    "verb": "cursed robbed mocked cheated hurt betrayed insulted",
    "feeling": "lonely afraid ashamed furious sick hopeless",
    "event": "hunger grief fear trouble pain misery",
    "person": "thief liar villain bully monster traitor",
}
NEUTRAL = {
    "adjective": "wooden red tall round copper striped usual common second certain former local double narrow",
    "adverb": "slowly quietly briefly often soon again",
    "verb": "passed met followed called watched visited noticed",
    "feeling": "awake busy ready tired curious quiet",
    "event": "work news traffic smoke rain talk",
    "person": "baker farmer sailor widow miller shepherd",
}
THINGS = {
    "concrete": "lantern kettle rope basket ladder blanket hammer mirror barrel candle boat bell",
    "abstract": "plan rumour promise story question secret custom reason habit wish debt title",
}
PLACES = {
    "concrete": "mill bridge forest harbour garden tower kitchen orchard cellar meadow",
    "abstract": "village kingdom country region world district parish town valley land",
}
TIMES = "morning evening winter summer night week"
NAMES = "Mara Tobias Ilse Conrad Petra Ruben Hanna Felix Dorothea Jonas Clara Emil"

# A slot in braces takes a word of that kind; {name} and {other} are the two people of the story, {home} its place.
TEMPLATES = (
    "{name} {adverb} {verb} the {adjective} {person}.",
    "The {adjective} {person} {verb} {name} and the {adjective} {person}.",
    "{name} found a {adjective} {thing} in the {adjective} {home}.",
    "There was {event} and {event} in the {adjective} {place}.",
    "{name} felt {feeling} and {feeling} that {adjective} {time}.",
    "They {adverb} carried the {adjective} {thing} to the {adjective} {place}.",
    "{other} {verb} the {adjective} {person} and felt {feeling}.",
    "All {time} there was {event} and {event} near the {home}.",
    "{other} gave {name} a {adjective} {thing} and a {adjective} {thing}.",
    "The {adjective} {thing} of the {person} made {other} {feeling}.",
)

# slot: lists of words; one of the lists is drawn first, each with the same probability, then a word of it
SLOTS = {
    **{kind: [sentiment[kind].split() for sentiment in (PLEASANT, UNPLEASANT, NEUTRAL)] for kind in PLEASANT},
    "thing": [words.split() for words in THINGS.values()],
    "place": [words.split() for words in PLACES.values()],
    "time": [TIMES.split()],
}


def write_story(rng: random.Random, sentences: int) -> str:
    """A story of so many sentences. Pleasant, unpleasant and neutral words are equally likely."""
    name, other = rng.sample(NAMES.split(), 2)
    cast = {"name": name, "other": other, "home": rng.choice(rng.choice(SLOTS["place"]))}

    def fill(slot: re.Match) -> str:
        return cast[slot[1]] if slot[1] in cast else rng.choice(rng.choice(SLOTS[slot[1]]))

    return " ".join(re.sub(r"{(\w+)}", fill, rng.choice(TEMPLATES)) for _ in range(sentences))


def words_that_fit(slot: str) -> list[str]:
    if slot in ("name", "other"):
        return NAMES.split()
    return [word for words in SLOTS["place" if slot == "home" else slot] for word in words]


SENTENCE = re.compile(
    "|".join(
        re.sub(r"\\{(\w+)\\}", lambda slot: f"(?:{'|'.join(words_that_fit(slot[1]))})", re.escape(template))
        for template in TEMPLATES
    )
)


def grammatical_share(texts: list[str]) -> float:
    """The share of the texts' finished sentences that the grammar could have written."""
    sentences = [sentence.strip() + "." for text in texts for sentence in text.split(".")[:-1]]
    return sum(bool(SENTENCE.fullmatch(sentence)) for sentence in sentences) / max(1, len(sentences))


# ---- The annotator ---------------------------------------------------------------------------------------------


def words_of(*lists: str) -> tuple[str, ...]:
    return tuple(word for words in lists for word in words.split())


@dataclass(frozen=True, kw_only=True)
class Annotator:
    """A simulated person, whose taste is a formula: wanted words minus unwanted words."""

    wanted: tuple[str, ...]
    unwanted: tuple[str, ...]

    def gold_scores(self, queries: list[str], responses: list[str]) -> list[float]:
        """Wanted minus unwanted words of each response; the queries do not count. What PPO should really raise."""
        return [
            float(sum((word in self.wanted) - (word in self.unwanted) for word in re.findall(r"\w+", response)))
            for response in responses
        ]

    def choose_best(
        self, gold_scores: torch.Tensor, temperature: float, rng: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pick one of n continuations with Boltzmann noise.

        gold_scores: (batch, n). Returns the choices (batch,) and, for each, the probability of the likeliest one:
        its mean is the accuracy that a perfect judge reaches.
        """
        probabilities = torch.softmax(gold_scores.double() / temperature, dim=1)  # (batch, n)
        return torch.multinomial(probabilities, 1, generator=rng).squeeze(1), probabilities.amax(1)


sentiment = Annotator(wanted=words_of(*PLEASANT.values()), unwanted=words_of(*UNPLEASANT.values()))
descriptiveness = Annotator(
    wanted=words_of(
        THINGS["concrete"],
        PLACES["concrete"],
        "wooden red tall round copper striped golden bright filthy broken smoke",
    ),
    unwanted=words_of(THINGS["abstract"], PLACES["abstract"]),
)
ANNOTATORS = {"sentiment": sentiment, "descriptiveness": descriptiveness}

# ---- The world -------------------------------------------------------------------------------------------------


def train_tokenizer(stories: list[str], vocab_size: int, *, digits: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE like GPT-2's; `<|endoftext|>` is token 0, and no story contains it.

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
    tokenizer.train_from_iterator(stories, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>")


def train_language_model(
    stories: list[str], tokenizer: PreTrainedTokenizerFast, args: TalesArgs, device: torch.device
) -> tuple[GPT2LMHeadModel, float]:
    """A small GPT-2, trained from scratch on windows of the stories. Returns it and its last loss, nats per token."""
    full_stop = tokenizer.encode(".")[0]
    rows = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(tokenizer.encode(story)) for story in stories], batch_first=True, padding_value=-1
    )  # (stories, tokens)
    # A window begins where a sentence begins, as queries do, and stays within one story.
    sentence_starts = torch.cat([torch.ones_like(rows[:, :1]), rows[:, :-1] == full_stop], dim=1).bool()
    length = args.lm_sequence_length
    fits = torch.nn.functional.pad(rows[:, length:], (0, min(length, rows.shape[1])), value=-1) >= 0
    starts = (sentence_starts & fits).nonzero()  # (windows, 2): story and column
    if not len(starts):
        raise InputError(f"no story continues for lm_sequence_length {length} tokens after the start of a sentence")
    torch.manual_seed(args.seed)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=args.max_positions,
            n_embd=args.width,
            n_layer=args.layers,
            n_head=args.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lm_lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    warmup = max(1, args.lm_steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * step / args.lm_steps))),
    )
    window = torch.arange(args.lm_sequence_length)
    losses = []
    for _ in range(args.lm_steps):
        story, column = starts[torch.randint(len(starts), (args.lm_batch_size,))].unbind(1)
        tokens = rows[story.unsqueeze(1), column.unsqueeze(1) + window].to(device)  # (batch, sequence_length)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return model.eval(), statistics.fmean(losses[-20:])


def simulate_comparisons(folder: Path, args: TalesArgs, device: torch.device) -> dict[str, dict[str, float]]:
    """Sample four continuations for each query, let both annotators choose, write the label files.

    Returns, for each task, the ceiling of accuracy on the held-out comparisons, and mean and deviation of the
    language model's own gold score.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    model = GPT2LMHeadModel.from_pretrained(folder / "model").to(device)
    pad_id, count = len(tokenizer), args.train_comparisons + args.test_comparisons
    task = texts.TaskArgs(query_dataset=str(folder / "stories.txt"), query_length=args.query_length)
    try:
        queries = texts.QueryStream(task, tokenizer, split="all").next_batch(count, pad_id)  # (count, query_length)
    except InputError as error:
        raise InputError(f"no story has a sentence of query_length {args.query_length} tokens or fewer") from error
    generator = lm.keyed_generator(args.seed, "comparisons")
    uniforms = torch.rand(4, count, args.response_length, generator=generator, dtype=torch.float64)
    samples = torch.stack(
        [
            torch.cat(
                [
                    lm.generate(model, q.to(device), u.to(device), pad_id, pad_id, args.temperature)[0].cpu()
                    for q, u in zip(queries.split(512), noise.split(512), strict=True)
                ]
            )
            for noise in uniforms
        ],
        dim=1,
    )  # (count, 4, response_length)
    stop_id = tokenizer.encode(".")[0]
    samples = lm.truncate_at(samples.flatten(0, 1), stop_id, args.truncate_after, pad_id)
    query_texts, sample_texts = (texts.to_texts(tokenizer, tokens, pad_id) for tokens in (queries, samples))
    samples = samples.unflatten(0, (count, 4))
    facts = {}
    for name, annotator in ANNOTATORS.items():
        gold_scores = torch.tensor(annotator.gold_scores(query_texts, sample_texts)).view(count, 4)
        best, largest_probability = annotator.choose_best(
            gold_scores, args.annotator_temperature, lm.keyed_generator(args.seed, "annotator", name)
        )
        facts[name] = {
            "ceiling": largest_probability[args.train_comparisons :].mean().item(),
            "gold_mean": gold_scores.mean().item(),
            "gold_std": gold_scores.std().item(),
        }
        rows = [
            {"query": query, **{f"sample{i}": ids for i, ids in enumerate(row)}, "best": choice}
            for query, row, choice in zip(
                queries.masked_fill(queries == pad_id, label_files.OPENAI_PAD_ID).tolist(),
                samples.masked_fill(samples == pad_id, label_files.OPENAI_PAD_ID).tolist(),
                best.tolist(),
                strict=True,
            )
        ]
        path = folder / "labels" / name / "offline_5k.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(rows))
        path.with_suffix(".meta.json").write_text(json.dumps({"vocab_size": len(tokenizer), **facts[name]}))
    return facts


def train_model(place: Path, stories: list[str], args: TalesArgs, device: torch.device) -> dict[str, Any]:
    """Write the tokenizer and the language model of a world. Returns facts about them."""
    tokenizer = train_tokenizer(stories, args.vocab_size)
    tokenizer.save_pretrained(place / "model")
    print(f"tales: training a GPT-2 on them, {args.lm_steps} steps", flush=True)
    model, loss = train_language_model(stories, tokenizer, args, device)
    model.save_pretrained(place / "model")
    return {"settings": dataclasses.asdict(args), "parameters": model.num_parameters(), "lm_loss": loss}


def build_world(folder: Path, args: TalesArgs) -> None:
    """Write stories, tokenizer, language model and comparisons to a new folder; it appears when all is there."""
    device = launch.default_device()
    with building.new_world(folder, "tales") as place:
        print(f"tales: writing {args.stories:,} stories", flush=True)
        rng = random.Random(args.seed)
        stories = [write_story(rng, args.sentences_per_story) for _ in range(args.stories)]
        (place / "stories.txt").write_text("".join(story + "\n" for story in stories))
        trained = building.find_trained("tales", made_of(args))
        facts = building.copy_trained(trained, place) if trained else train_model(place, stories, args, device)
        print(f"tales: simulating {args.train_comparisons + args.test_comparisons:,} comparisons", flush=True)
        facts |= simulate_comparisons(place, args, device)
        (place / "world.json").write_text(json.dumps(facts, indent=2) + "\n")


def made_of(args: TalesArgs) -> list[Any]:
    """Settings and grammar: what makes a world the same world."""
    return [dataclasses.asdict(args), SLOTS, NAMES, TEMPLATES, repr(ANNOTATORS)]


def find_world(args: TalesArgs | None = None) -> Path:
    """The folder of the world with these settings; it is built if it does not exist."""
    args = args or TalesArgs()
    cli.check_values(args)
    cli.at_least(1, "", args, *(name for name, value in dataclasses.asdict(args).items() if type(value) is int))
    cli.above_zero("", args, "lm_lr", "temperature", "annotator_temperature")
    if args.width % args.heads:
        raise InputError(f"heads {args.heads} does not divide width {args.width}")
    for name, length in (
        ("lm_sequence_length", args.lm_sequence_length),
        ("query_length + response_length", args.query_length + args.response_length),
    ):
        if length > args.max_positions:
            raise InputError(f"{name} is {length}; it must be at most max_positions {args.max_positions}")
    if args.truncate_after > args.response_length:
        raise InputError(f"truncate_after is {args.truncate_after}; it must be in 1..{args.response_length}")
    return building.find("tales", made_of(args), lambda folder: build_world(folder, args))


def main() -> None:
    world = find_world(cli.parse(TalesArgs, description=__doc__))
    facts = building.read_facts(world)
    print(
        f"{world}: {facts['settings']['stories']:,} stories, a GPT-2 of {facts['parameters']:,} parameters", end=" "
    )
    print(f"(loss {facts['lm_loss']:.2f} nats per token). The first story:\n")
    print((world / "stories.txt").read_text().splitlines()[0])


if __name__ == "__main__":
    errors.run_script(main)
