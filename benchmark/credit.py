"""Who gets the credit: the critic of small/micro.py next to the truth, which so small a world can be asked for.

    python benchmark/credit.py    # half a minute; writes benchmark/results/credit.json, for static/credit.png

The true value of a beginning is the mean sum of the rewards that follow, over all of its continuations.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

from benchmark.micro import learned_from_people
from ppo_rlhf.small import micro

RESULTS = Path(__file__).parent / "results/credit.json"
UPDATES = (1, 10, 50)
LAMBDAS = (0.0, 0.95, 1.0)
FREQUENT = 0.0005  # Beginnings that the policy writes less often are left out.
Text = tuple[int, ...]


class Tree(NamedTuple):
    """What is known of each beginning of a text and of each whole text."""

    probs: dict[Text, float]
    rewards: dict[Text, float]  # of its last word
    values: dict[Text, float]  # the critic's; whole texts have none
    true_values: dict[Text, float]


def make_tree(policy: dict, reference: dict, scores: dict[Text, float], kl_coef: float) -> Tree:
    tree = Tree({(): 1.0}, {}, {}, dict.fromkeys(micro.TEXTS, 0.0))
    chances = {}
    for text in micro.BEGINNINGS:
        logprobs, value = micro.forward(policy, text)
        ref_logprobs, _ = micro.forward(reference, text)
        tree.values[text] = value.data
        for word in range(len(micro.WORDS)):
            longer = (*text, word)
            chances[longer] = math.exp(logprobs[word].data)
            tree.probs[longer] = tree.probs[text] * chances[longer]
            kl = logprobs[word].data - ref_logprobs[word].data
            tree.rewards[longer] = scores.get(longer, 0.0) - kl_coef * kl
    for text in reversed(micro.BEGINNINGS):
        nexts = [(*text, word) for word in range(len(micro.WORDS))]
        tree.true_values[text] = sum(chances[x] * (tree.rewards[x] + tree.true_values[x]) for x in nexts)
    return tree


def advantages(tree: Tree, text: Text) -> dict[str, list[float]]:
    """Of each word: the true advantage, and GAE's by lambda. With true values, lambda 0 gives the truth."""
    before, after = [text[:t] for t in range(len(text))], [text[: t + 1] for t in range(len(text))]
    rewards = [tree.rewards[x] for x in after]
    found = {"truth": micro.compute_gae(rewards, [tree.true_values[x] for x in before], 0.0)}
    values = [tree.values[x] for x in before]
    return found | {f"{lam:g}": micro.compute_gae(rewards, values, lam) for lam in LAMBDAS}


def spoilt(tree: Tree, scores: dict[Text, float]) -> Text:
    """The likeliest text with a negative score whose worst word, in truth, isn't the last."""
    for text in sorted(micro.TEXTS, key=tree.probs.get, reverse=True):
        truth = advantages(tree, text)["truth"]
        if scores[text] < 0 and truth[-1] > min(truth):
            return text
    raise ValueError("no such text")


def in_words(text: Text) -> str:
    return " ".join(micro.WORDS[word] for word in text)


def credit(updates: tuple[int, ...] = UPDATES) -> dict:
    """The text of the first of these updates that is spoilt before its end; and for each update what is drawn."""
    args = micro.Args()
    randoms = micro.random_numbers(args.seed)
    reference, _, scores = learned_from_people(args, randoms)
    trees = {}
    for update, (policy, _) in enumerate(micro.train_policy(args, reference, scores, randoms), 1):
        if update in updates:
            trees[update] = make_tree(policy, reference, scores, args.kl_coef)
        if update == updates[-1]:
            break
    text = spoilt(trees[updates[0]], scores)
    found = {"text": in_words(text), "updates": {}}
    for update, tree in trees.items():
        shown = [x for x in micro.BEGINNINGS if tree.probs[x] >= FREQUENT]
        found["updates"][f"{update}"] = {
            "beginnings": {
                in_words(x): [round(row[x], 4) for row in (tree.probs, tree.values, tree.true_values)] for x in shown
            },
            "advantages": {name: [round(x, 4) for x in row] for name, row in advantages(tree, text).items()},
        }
    return found


if __name__ == "__main__":
    RESULTS.write_text(json.dumps(credit()) + "\n")
