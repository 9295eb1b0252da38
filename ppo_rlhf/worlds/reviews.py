"""Reviews: a real language model, and what people said of sentences from film reviews.

Unlike the small worlds, nothing here was made for this project, and no formula knows the truth:

1. The language model is SmolLM2-135M-Instruct (smollm.py).
2. 10,605 sentences from film reviews were rated by people from -4 (extremely negative) to 4 (extremely positive), by
   15 to 29 people each. C. J. Hutto and E. Gilbert collected the ratings for "VADER: A Parsimonious Rule-based Model
   for Sentiment Analysis of Social Media Text" (ICWSM 2014). They are in the source distribution of vaderSentiment.
3. VADER itself, a lexicon with rules, is an independent if simple judge: nothing is ever trained on it here.

Both come from the package index. 1,000 sentences are held out. The others are split into two halves, and so are the
ratings of every sentence. The reward model learns from one half of the ratings; a second reward model, the judge,
learns from the other half of the ratings of the other half of the sentences. So the two share neither.

For chapter 2, a post is the beginning of a sentence and its summary the rest. People rated single sentences, so a
comparison is made of two ratings: one person's of one sentence and another person's of another sentence; equal ones
are left out. Two sentences have no beginning in common, so the query of a comparison is empty, and the sentences as
a whole are the two summaries. A reward model reads the same tokens of query and response together.

    python ppo_rlhf/worlds/reviews.py     # fetch model and sentences, once, and say how well people agree

They get into $PPO_RLHF_CACHE or ~/.cache/ppo_rlhf, as `smollm2-135m` and `reviews`, where the scripts find them.
"""

import ast
import functools
import json
import random
import shutil
import statistics
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_rlhf import worlds
from ppo_rlhf.worlds import smollm

RATINGS = smollm.IndexFile(
    project="vaderSentiment",
    version="3.3.2",
    distribution="vaderSentiment-3.3.2.tar.gz",
    sha256="5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
    size=2_466_783,
    member="additional_resources/hutto_ICWSM_2014.tar.gz",
    member_sha256="d5bb07d87474b3eb8d30b4deccbc23f19d742a6c5718fbacc65485b70b95c5fa",
    licence="MIT",
)
TEXTS, SINGLE_RATINGS = "movieReviewSnippets_GroundTruth.txt", "movieReviewSnippets_anonDataRatings.txt"
HELD_OUT = 1_000  # sentences
QUERY_WORDS = 6  # of a sentence that are the query; what follows is the response
LEAST_WORDS = 10  # of a sentence whose beginning the policy continues
COMPARED = 2  # times that each sentence is compared with another one


@dataclass(frozen=True, kw_only=True)
class Sentence:
    text: str
    ratings: tuple[int, ...]  # of single people, in random order

    @property
    def halves(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ratings that the reward model may learn from, and those that the judge may learn from."""
        middle = len(self.ratings) // 2
        return self.ratings[:middle], self.ratings[middle:]

    @property
    def parts(self) -> tuple[str, str]:
        """The beginning, which is the query, and the rest, with the space before it. A single word is all rest."""
        words = self.text.split(" ")
        cut = min(QUERY_WORDS, len(words) - 1)
        return " ".join(words[:cut]), " " * (cut > 0) + " ".join(words[cut:])

    @property
    def is_long(self) -> bool:
        """Whether the policy continues its beginning."""
        return len(self.text.split(" ")) >= LEAST_WORDS


# ---- Read the ratings ------------------------------------------------------------------------------------------


def read_sentences(archive: Path) -> list[Sentence]:
    """All sentences with their ratings, in an order that depends on nothing but the archive."""

    def rows(files: tarfile.TarFile, name: str) -> list[list[str]]:
        member = next(member for member in files.getnames() if member.endswith(name))
        return [line.split("\t") for line in files.extractfile(member).read().decode().splitlines() if line]

    with tarfile.open(archive) as files:
        texts = {number: text for number, _, text in rows(files, TEXTS)}
        ratings = {number: ast.literal_eval(row) for number, _, _, row in rows(files, SINGLE_RATINGS)}
    if texts.keys() != ratings.keys():
        raise ValueError(f"{archive}: {TEXTS} and {SINGLE_RATINGS} have different sentences")
    rng = random.Random(1)
    sentences = []
    for number in sorted(texts, key=int):
        text = " ".join(texts[number].replace("''", '"').split())
        sentences.append(Sentence(text=text, ratings=tuple(rng.sample(ratings[number], len(ratings[number])))))
    rng.shuffle(sentences)
    return sentences


def build_world(place: Path) -> None:
    """Write all files."""
    archive = smollm.fetch(RATINGS, place)
    sentences = read_sentences(archive)
    archive.unlink()
    held_out, learned = sentences[:HELD_OUT], sentences[HELD_OUT:]
    ours, the_judges = learned[: len(learned) // 2], learned[len(learned) // 2 :]
    for name, some in {"stories": learned, "stories_test": held_out}.items():
        beginnings = [s.parts[0] for s in some if s.is_long]
        (place / f"{name}.txt").write_text("".join(beginning + "\n" for beginning in beginnings))
    label_sets = {
        "mean": [(s, statistics.fmean(s.halves[0])) for s in ours + the_judges],
        "single": [(s, s.halves[0][0]) for s in ours + the_judges],
        "judge": [(s, statistics.fmean(s.halves[1])) for s in the_judges],
    }
    (place / "labels" / "people").mkdir(parents=True)
    for name, rated in label_sets.items():
        labels = [label(sentence, score) for sentence, score in rated]
        labels += [label(sentence, statistics.fmean(sentence.ratings)) for sentence in held_out]
        path = place / "labels" / "people" / f"{name}.json"
        path.write_text(json.dumps(labels))
        path.with_suffix(".meta.json").write_text(json.dumps({"held_out": len(held_out)}))
    middle = len(held_out) // 2
    for split, some in {"train": learned, "validation": held_out[:middle], "test": held_out[middle:]}.items():
        rows = [dict(zip(("post", "summary"), s.parts, strict=True)) for s in some if s.is_long]
        (place / f"posts_{split}.jsonl").write_text(json_lines(rows))
    comparisons = {split: compare(some, split) for split, some in {"train": ours, "validation": held_out}.items()}
    for split, (rows, _) in comparisons.items():
        (place / f"comparisons_{split}.jsonl").write_text(json_lines(rows))
    described = {"sentences": len(sentences), "held_out": len(held_out), **agreement(held_out)}
    described["ceiling"] = comparisons["validation"][1]
    (place / "world.json").write_text(json.dumps(described, indent=2) + "\n")


def json_lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def label(sentence: Sentence, score: float) -> dict[str, Any]:
    """A row of a label file, as texts."""
    query, rest = sentence.parts
    return {"query": query, "sample": rest, "score": score}


def compare(sentences: list[Sentence], split: str) -> tuple[list[dict[str, Any]], float]:
    """Comparisons for chapter 2, and how often everybody else agrees with them.

    Each sentence is compared COMPARED times, by one rating from its first half. `confidence` is by how many points
    the two ratings differ. Everybody else prefers the sentence whose other ratings have the higher mean; where the
    means are equal, that is half an agreement.
    """
    rng = random.Random(f"comparisons {split}")
    rows, agreed = [], 0.0
    for _ in range(COMPARED):
        order = rng.sample(sentences, len(sentences))
        for pair in zip(order[::2], order[1::2], strict=False):
            first, second = (rng.choice(sentence.halves[0]) for sentence in pair)
            if first == second:
                continue
            others = [
                (sum(sentence.ratings) - rating) / (len(sentence.ratings) - 1)
                for sentence, rating in zip(pair, (first, second), strict=True)
            ]
            choice = int(second > first)
            agreed += 0.5 if others[0] == others[1] else choice == (others[1] > others[0])
            rows.append(
                {
                    "info": {"post": ""},
                    "summaries": [{"text": sentence.text, "policy": "review"} for sentence in pair],
                    "choice": choice,
                    "batch": "ratings",
                    "split": split,
                    "extra": {"confidence": abs(first - second)},
                }
            )
    return rows, agreed / len(rows)


def agreement(sentences: list[Sentence]) -> dict[str, float]:
    """Correlations with what people say on average: of one person, with the mean of the others; and of VADER."""
    one = [sentence.ratings[0] for sentence in sentences]
    others = [statistics.fmean(sentence.ratings[1:]) for sentence in sentences]
    everybody = [statistics.fmean(sentence.ratings) for sentence in sentences]
    vaders = vader([""] * len(sentences), [sentence.text for sentence in sentences])
    return {"one_person": statistics.correlation(one, others), "vader": statistics.correlation(vaders, everybody)}


# ---- Judges of texts -------------------------------------------------------------------------------------------


def vader(queries: list[str], responses: list[str]) -> list[float]:
    """VADER's judgement of each response, from -1 (negative) to 1 (positive)."""
    return [analyzer().polarity_scores(response)["compound"] for response in responses]


@functools.cache
def analyzer() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as error:
        raise ImportError("vaderSentiment is missing; install the extra `real`: pip install -e '.[real]'") from error
    return SentimentIntensityAnalyzer()


# ---- Fetch -----------------------------------------------------------------------------------------------------


def fetch(name: str, build: Callable[[Path], None]) -> Path:
    """The folder of this name in the cache; if it isn't there, `build` fills it."""
    folder = worlds.cache_folder() / name
    if not folder.is_dir():
        started = time.monotonic()
        folder.parent.mkdir(parents=True, exist_ok=True)
        # It gets its name when it is complete, so that nobody reads half a world.
        place = Path(tempfile.mkdtemp(prefix=f"{name}.", suffix=".tmp", dir=folder.parent))
        try:
            build(place)
            place.rename(folder)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        print(f"{name}: {folder} is ready after {time.monotonic() - started:.0f} s", flush=True)
    return folder


def main() -> None:
    print(f"{fetch('smollm2-135m', smollm.build_model)}: SmolLM2-135M-Instruct")
    folder = fetch("reviews", build_world)
    known = json.loads((folder / "world.json").read_text())
    print(f"{folder}: {known['sentences']:,} sentences, {known['held_out']:,} of them held out")
    print(
        f"On these, one person's rating has a correlation of {known['one_person']:.3f} with the mean of the others, "
        f"and VADER of {known['vader']:.3f} with the mean of all."
    )


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError, ImportError, tarfile.TarError, zipfile.BadZipFile) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
