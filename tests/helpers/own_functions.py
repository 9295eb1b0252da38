"""Functions of a user's own, for --rewards.function, --rewards.verifier and --rewards.monitor."""

import json
import math


def letters(prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
    """1 for an odd number of letters, which an untrained model writes now and then. calls.txt counts its texts."""
    with open("calls.txt", "a") as file:
        file.write(f"{len(responses)}\n")
    return [float(sum(map(str.isalpha, response)) % 2) for response in responses]


def letters_at_the_end(
    prompts: list[str], responses: list[str], answers: list[str], completion_ids: list[list[int]]
) -> list[list[float]]:
    """The same for the last token, and 0 for every other."""
    scores = letters(prompts, responses, answers)
    return [[*[0.0] * (len(ids) - 1), score] for ids, score in zip(completion_ids, scores, strict=True)]


def one_for_each_token(responses: list[str], completion_ids: list[list[int]]) -> list[list[float]]:
    return [[1.0] * len(ids) for ids in completion_ids]


def hundredths(problem: str, steps: list[str]) -> float:
    """Of the newest step, its length, and how many there were before it."""
    assert problem.startswith("A ") or problem.endswith("\n")
    return len(steps[-1]) / 100 + len(steps) - 1


def constant(queries: list[str], responses: list[str], references: list[str]) -> list[float]:
    """3 for all. seen.jsonl keeps what it has read."""
    with open("seen.jsonl", "a") as file:
        file.write(json.dumps([queries, responses, references]) + "\n")
    return [3.0] * len(queries)


def no_references(queries: list[str], responses: list[str], references: list[str]) -> list[float]:
    """NaN for the references, which only an evaluation scores."""
    return [math.nan if pair[0] == pair[1] else 1.0 for pair in zip(responses, references, strict=True)]


# ---- Verifiers -------------------------------------------------------------------------------------------------


def some(prompts: list[str], responses: list[str], answers: list[str]) -> list[float | None]:
    """1, or None for a third of the responses."""
    return [None if len(response) % 3 == 0 else 1.0 for response in responses]


def some_of_three(prompts: list[str], responses: list[str], answers: list[str]) -> list[float | None]:
    """0, 1 or 2, or None for a third of the responses."""
    sums = [sum(map(ord, response)) for response in responses]
    return [
        None if total % 3 == 0 else float(len(response) % 3) for total, response in zip(sums, responses, strict=True)
    ]


def silent(prompts: list[str], responses: list[str], answers: list[str]) -> list[None]:
    return [None] * len(responses)


def never(prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
    return [0.0] * len(responses)


def one_of_eight_is_none(prompts: list[str], responses: list[str], answers: list[str]) -> list[float | None]:
    """None for the first of eight responses, and 1 for all others, however many there are."""
    return [None if (len(responses), place) == (8, 0) else 1.0 for place in range(len(responses))]


def three_groups(prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
    """One correct response in each of the first three groups of four."""
    return [float(place in (0, 4, 8)) for place in range(len(responses))]


def countdown(
    prompts: list[str], completions: list[str], ground_truth: list[str], number: list[int], **columns: list
) -> list[float]:
    """1 for an odd number of letters. golds.jsonl keeps what it is called with, **columns under their names."""
    with open("golds.jsonl", "a") as file:
        for prompt, gold, place, source in zip(prompts, ground_truth, number, columns["data_source"], strict=True):
            file.write(json.dumps([prompt, gold, place, source]) + "\n")
    return [float(sum(map(str.isalpha, completion)) % 2) for completion in completions]


def first(prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
    """Only the first response is correct."""
    return [float(place == 0) for place in range(len(responses))]


def known(prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
    """The number that the answer has for the response, spaces apart; 0 if it has none."""
    texts = [response.replace(" ", "") for response in responses]
    return [json.loads(answer).get(text, 0.0) for text, answer in zip(texts, answers, strict=True)]
