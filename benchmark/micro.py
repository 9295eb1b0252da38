"""The golden trajectory of small/micro.py, with which ports in other languages check themselves.

    python benchmark/micro.py > tests/golden/micro.json

The first entry of the file says what it holds.
"""

import json
from collections.abc import Iterator

from ppo_rlhf.small import micro

UPDATES = 20
NUMBERS = ("responses", "values", "advantages", "losses", "J", "score", "gold", "kl")  # of an update
FORMAT = (
    "What ppo_rlhf/small/micro.py computes with its default flags, up to update 20 of 50. A model has rows of "
    "weights: 'embedding' (for each word, and for an empty place), 'hidden' (last column: bias), 'words' (logits of "
    "the next word; last column: bias) and 'head' (score or value). A text is a list of indices into 'words'. "
    "'random_numbers': the first of the generator. 'start', 'language_model': weights before and after training. "
    "'choices': pairs of texts, first the one that was taken. 'scores': normalised scores of the texts number 0, "
    "100, 200, ... of all 6,561 in lexicographic order. 'optimum': J, score, gold score and KL of the best policy. "
    "'updates': sampled responses; values and whitened advantages of all tokens, response after response; the loss "
    "of each epoch; J, score, gold score and KL of the policy after the update. 'policy': weights after update 20. "
    "A port can draw everything from its own generator, or replay choices and responses. It should agree to 1e-9."
)


def rows_of(model: dict) -> dict[str, list[list[float]]]:
    return {name: [[weight.data for weight in row] for row in rows] for name, rows in model.items()}


def learned_from_people(args: micro.Args, randoms: Iterator[float]) -> tuple[dict, list, dict]:
    """The language model, the annotator's choices, and the scores of the reward model that learned from these."""
    reference = micro.train_language_model(randoms)
    pairs = [[micro.generate(reference, randoms) for _ in range(2)] for _ in range(args.choices)]
    choices = [micro.choose(pair, args.mistakes, randoms) for pair in pairs]
    return reference, choices, micro.train_reward_model(reference, choices, micro.probabilities(reference))


def trajectory(updates: int = UPDATES) -> dict:
    args = micro.Args()
    randoms = micro.random_numbers(args.seed)
    reference, choices, scores = learned_from_people(args, randoms)
    ref_probs = micro.probabilities(reference)
    best = micro.optimum(ref_probs, scores, args.kl_coef)
    rows = []
    for policy, computed in micro.train_policy(args, reference, scores, randoms):
        measured = micro.measure(micro.probabilities(policy), ref_probs, scores, args.kl_coef)
        rows.append(dict(zip(NUMBERS, (*computed, *measured), strict=True)))
        if len(rows) == updates:
            break
    fresh = micro.random_numbers(args.seed)
    return {
        "format": FORMAT,
        "flags": {name: value for name, value in vars(micro.Args).items() if name[0] != "_"},
        "random_numbers": [next(fresh) for _ in range(5)],
        "words": micro.WORDS,
        "start": rows_of(micro.train_language_model(micro.random_numbers(args.seed), count=0)),
        "language_model": rows_of(reference),
        "choices": choices,
        "scores": [scores[text] for text in micro.TEXTS[::100]],
        "optimum": micro.measure(best, ref_probs, scores, args.kl_coef),
        "updates": rows,
        "policy": rows_of(policy),
    }


if __name__ == "__main__":
    golden = trajectory()
    print("{" + ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in golden.items()) + "}")
