"""Tales: a small world with a known truth, so that all of RLHF runs on a laptop without a network.

What CartPole is to reinforcement learning, this is to RLHF. The language model really samples, the reward model
really learns from comparisons, and yet the thing that people want is known in closed form:

1. A grammar writes short stories. Every sentence has slots. Those for an adjective, an adverb, a verb, a feeling, an
   event or a person get a pleasant, an unpleasant or a neutral word, independently of what came before.
2. A byte-level BPE tokenizer and a small GPT-2 were trained on the stories from scratch.
3. `Annotator.gold_scores`: what the simulated annotator wants, as a formula.
4. The annotator has read four continuations sampled from the language model and picked the best, with noise: P(i) is
   proportional to exp(gold_i / temperature). So nobody, not even a judge that knows the formula, can predict more
   than the mean of the largest of the four probabilities: the ceiling.

All of it is in the folder data/tales. The comparisons are JSON in the format of OpenAI's label files, and read by the
same code. benchmark/worlds.py has written them.
"""

import re
from dataclasses import dataclass

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
