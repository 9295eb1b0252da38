"""Posts to summarise, for chapter 2: a small world with a known truth, like tales.py, that needs no network.

Somebody tells in a forum what a few people did, with details that do not matter. A summary should tell what they
did, and nothing else:

    SUBREDDIT: r/harbour

    TITLE: Ilse and bakers

    POST: That winter Mara robbed sailors. Ilse thanked bakers in the narrow mill. It was a gloomy week.
    In the valley Jonas watched healers. All night there was music near the tower. ...

    TL;DR: Ilse thanked bakers. Mara robbed sailors.

1. A grammar writes posts. A fact is a sentence in which somebody did something; three of its words matter, and each
   person of a post does one thing.
2. People have written the reference summaries. They mention the first facts, and sometimes invent one.
3. `gold_scores`: what a good summary is, as a formula. One point for each fact of the post that it mentions; less one
   for each statement that the post does not make; less a tenth for each word.
4. A simulated annotator has read two summaries of different quality and preferred the one with the higher gold score,
   with noise: P(first) = sigmoid((gold_1 - gold_2) / temperature). No judge can be expected to agree with it more
   often than the mean of max(P, 1 - P): the ceiling.
5. A small GPT-NeoX, the architecture of Pythia, has learned to write such threads from scratch: posts with replies
   that quote them and, where they say something twice, add "again". It has never seen a `TL;DR:`, nor the end-of-text
   token; SFT teaches both.

All of it is in the folder data/posts, in the formats of the data sets that chapter 2 reads from the hub, and read by
the same code. benchmark/worlds.py has written it.
"""

import re

from ppo_rlhf.worlds import tales

DEEDS = tales.words_of(*(taste["verb"] for taste in (tales.PLEASANT, tales.UNPLEASANT, tales.NEUTRAL)))
PEOPLE = tales.words_of(
    "friends heroes angels healers singers saints",
    "thieves liars villains bullies monsters traitors",
    "bakers farmers sailors widows millers shepherds",
)
FACT = re.compile(rf"\b({'|'.join(tales.NAMES.split())}) ({'|'.join(DEEDS)}) ({'|'.join(PEOPLE)})\b")


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
