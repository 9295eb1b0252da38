"""How wrong, and how noisy, are gradients that are estimated from eight texts? This goes on where micro.py ends.

    python ppo_rlhf/small/estimators.py    # half a minute; it has the flags of micro.py

In the world of micro.py, the mean of an estimate over all texts can be computed, and so can its variance. We do
this for the policy after three updates. An estimate is a sum over tokens: a factor times the gradient of the
token's log-prob. The lines "J" estimate the gradient of the mean sum of rewards, and differ in what they take for
the advantage. The lines "KL" estimate the gradient of the KL divergence from the reference. They start from three
estimates of its value, of which k1 and k3 are right on average, and k2 nearly:

    d = log-prob of a token under the policy, less that under the reference
    k1 = d    k2 = d * d / 2    k3 = exp(-d) - 1 + d

In the reward, a token's factor is the sum of k over this token and those to come, as in a policy gradient. As a
loss, it is the derivative of k by d, so only the token's own k counts.
"""

import math
from itertools import islice

from micro import (
    BEGINNINGS,
    LENGTH,
    TEXTS,
    Adam,
    choose,
    compute_gae,
    forward,
    generate,
    gradient,
    measure,
    probabilities,
    random_numbers,
    read_flags,
    tokens_of,
    train_language_model,
    train_policy,
    train_reward_model,
)


def to_come(xs):
    return [sum(xs[t:]) for t in range(LENGTH)]


def factors_of(kl, values, score, kl_coef, j, n):
    """The factors of a text's tokens, by the name of the estimate."""
    rewards = [-kl_coef * k for k in kl]
    rewards[-1] += score
    total = sum(rewards)
    return {
        "KL: k1 in the reward": to_come(kl),
        "KL: k2 in the reward": to_come([k * k / 2 for k in kl]),
        "KL: k3 in the reward": to_come([math.exp(-k) - 1 + k for k in kl]),
        "KL: k1 as a loss": [1.0] * LENGTH,
        "KL: k2 as a loss": kl,
        "KL: k3 as a loss": [1 - math.exp(-k) for k in kl],
        "J: all rewards": [total] * LENGTH,
        # The text is itself one of the n of its group, so less of its total is left.
        "J: all rewards, less the mean of the group": [(total - j) * (1 - 1 / n)] * LENGTH,
        "J: GAE, lambda 1": compute_gae(rewards, values, 1.0),
        "J: GAE, lambda 0.95": compute_gae(rewards, values, 0.95),
        "J: GAE, lambda 0": compute_gae(rewards, values, 0.0),
    }


TRUE = {"KL": "KL: k1 in the reward", "J:": "J: all rewards"}  # They have no bias: their means are the gradients.


def combine(factors, vectors):
    """The sum of vectors, each times its factor."""
    columns = zip(*vectors, strict=True)
    return [sum([f * x for f, x in zip(factors, column, strict=True)]) for column in columns]


def compare_estimators(policy, reference, scores, kl_coef, n=8):
    weights = Adam(policy).weights
    probs = probabilities(policy)
    j = measure(probs, probabilities(reference), scores, kl_coef)[0]
    tokens = {}  # of each: the gradient of its log-prob, its part of the KL, and the value before it
    for text in BEGINNINGS:
        for word, ref_logprob in enumerate(forward(reference, text)[0]):
            logprobs, value = forward(policy, text)
            kl = logprobs[word].data - ref_logprob.data
            tokens[text, word] = gradient(logprobs[word], weights), kl, value.data

    slopes = {}  # of each text: the gradients of its tokens' log-probs
    factors = {}
    for text in TEXTS:
        slopes[text], kl, values = zip(*[tokens[token] for token in tokens_of(text)], strict=True)
        factors[text] = factors_of(kl, values, scores[text], kl_coef, j, n)

    means = {}
    squares = {}  # the mean squared lengths of estimates from one text
    for name in factors[text]:
        samples = [combine(factors[text][name], slopes[text]) for text in TEXTS]
        means[name] = combine(probs.values(), samples)
        squares[name] = sum([p * math.hypot(*x) ** 2 for p, x in zip(probs.values(), samples, strict=True)])

    print(f"The mean error (bias) of gradients from {n} texts, and their standard deviation (noise),")
    print("in percent of the length of the true gradient:")
    for name, average in means.items():
        true = means[TRUE[name[:2]]]
        length = math.hypot(*average)
        variance = squares[name] - length**2
        if "group" in name:
            # The mean of the group is noisy, too. With it, the estimate has n * (n - 1) more terms, each -1 / n**2
            # times one text's slope times another's (total - j). Their mean is 0, and this is their variance.
            spread = sum([probs[text] * factors[text][name][0] ** 2 for text in TEXTS])
            variance += (spread * squares["KL: k1 as a loss"] + length**2) / (n - 1)
        bias = math.dist(average, true)
        noise = (variance / n) ** 0.5
        percent = math.hypot(*true) / 100
        print(f"{name:45} bias {bias / percent:5.1f}, noise {noise / percent:5.1f}")


def main():
    args = read_flags()
    randoms = random_numbers(args.seed)
    reference = train_language_model(randoms)
    pairs = [[generate(reference, randoms) for _ in range(2)] for _ in range(args.choices)]
    choices = [choose(pair, args.mistakes, randoms) for pair in pairs]
    scores = train_reward_model(reference, choices, probabilities(reference))
    *_, (policy, _) = islice(train_policy(args, reference, scores, randoms), 3)
    compare_estimators(policy, reference, scores, args.kl_coef)


if __name__ == "__main__":
    main()
