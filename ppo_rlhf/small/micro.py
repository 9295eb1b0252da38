"""RLHF with PPO in plain Python, in a world so small that the best policy is known.

A language model writes texts of four words. An annotator compares 300 pairs of them, and errs in a tenth of
the choices. A reward model learns from these to score texts, and PPO teaches the language model to write texts
with high scores. As only 6,561 texts exist, each update prints exact means, and how near the best policy is.

    python ppo_rlhf/small/micro.py                         # half a minute; PyPy: a quarter of it
    python ppo_rlhf/small/micro.py --kl_coef 0 --seed 2    # the policy cheats the reward model

PPO has the steps and names of small/ppo.py. It leaves out queries, truncation, minibatches, the discount of
later rewards, whitening of rewards, clipping of values, and the controller of the KL coefficient. When you
know this file, small/estimators.py shows how biased and how noisy its gradients are.
"""

import argparse
import math
from bisect import bisect
from copy import deepcopy
from itertools import accumulate

TAPE = []  # all numbers since the last gradient, in the order in which they were made


class Scalar:
    """A number, the numbers that it was made from, and its derivatives by them, the slopes."""

    def __init__(self, data, parents=(), slopes=()):
        self.data = data
        self.parents = parents
        self.slopes = slopes
        self.grad = 0.0
        TAPE.append(self)

    def __add__(self, other):
        return Scalar(self.data + other.data, (self, other), (1.0, 1.0))

    def __sub__(self, other):
        return Scalar(self.data - other.data, (self, other), (1.0, -1.0))

    def __mul__(self, other):
        return Scalar(self.data * other.data, (self, other), (other.data, self.data))

    def exp(self):
        return Scalar(math.exp(self.data), (self,), (math.exp(self.data),))

    def tanh(self):
        return Scalar(math.tanh(self.data), (self,), (1 - math.tanh(self.data) ** 2,))


def gradient(loss, weights):
    """Derivatives by the weights: the chain rule, from the last number back to the first."""
    for weight in weights:
        weight.grad = 0.0
    loss.grad = 1.0
    for number in reversed(TAPE):
        if number.grad != 0.0:  # The loss doesn't depend on others, such as those of generate().
            for parent, slope in zip(number.parents, number.slopes, strict=True):
                parent.grad += slope * number.grad
    TAPE.clear()
    return [weight.grad for weight in weights]


def dot(xs, ys):
    total = sum([x.data * y.data for x, y in zip(xs, ys, strict=True)])
    return Scalar(total, (*xs, *ys), [number.data for number in (*ys, *xs)])


def mean(xs):
    return dot(xs, [Scalar(1 / len(xs))] * len(xs))


def log_softmax(xs):
    """Shift numbers so that they are log-probs: their exponentials add up to 1."""
    top = max([x.data for x in xs])
    exps = [math.exp(x.data - top) for x in xs]
    log_total = Scalar(top + math.log(sum(exps)), xs, [e / sum(exps) for e in exps])
    return [x - log_total for x in xs]


class Adam:
    """It divides a gradient by its usual size, so steps are about as large as the learning rate."""

    def __init__(self, model):
        self.weights = [weight for rows in model.values() for row in rows for weight in row]
        self.m = [0.0] * len(self.weights)
        self.v = [0.0] * len(self.weights)
        self.steps = 0

    def step(self, loss, lr):
        self.steps += 1
        lr *= (1 - 0.999**self.steps) ** 0.5 / (1 - 0.9**self.steps)
        for i, grad in enumerate(gradient(loss, self.weights)):
            self.m[i] += 0.1 * (grad - self.m[i])
            self.v[i] += 0.001 * (grad**2 - self.v[i])
            self.weights[i].data -= lr * self.m[i] / (self.v[i] ** 0.5 + 1e-5)


# ---- The world: texts, and what the annotator likes --------------------------------------------------------

WORDS = ["the", "cat", "dog", "is", "sleeps", "kind", "happy", "mean", "sad"]
LENGTH = 4  # words of a text, which is a tuple of indices of WORDS
BEGINNINGS = []  # all texts of 0 to 3 words
TEXTS = [()]  # all texts of 4 words, after this loop
for _ in range(LENGTH):
    BEGINNINGS += TEXTS
    TEXTS = [(*text, word) for text in TEXTS for word in range(len(WORDS))]
PATTERNS = ["the cat is {}", "the {} cat sleeps", "the dog is {}", "the {} dog sleeps"]
LINES = [pattern.format(quality) for quality in WORDS[5:] for pattern in PATTERNS]
SENTENCES = [tuple([WORDS.index(word) for word in line.split()]) for line in LINES]
# The annotator wants sentences with "kind" or "happy". Others are bad, and so is nonsense.
GOLD_SCORES = {text: 1.0 if text in SENTENCES[:8] else -1.0 for text in TEXTS}


def random_numbers(seed):
    """Uniform in [0, 1). Any language with 64-bit floats can make the same numbers."""
    while True:
        seed = (1664525 * seed + 1013904223) % 2**32
        yield seed / 2**32


def draw(chances, randoms):
    """A random index, with probabilities in proportion to the chances."""
    return bisect(list(accumulate(chances))[:-1], next(randoms) * sum(chances))


def choose(pair, mistakes, randoms):
    """Put the text that the annotator takes first. Of equally good ones, it takes either."""
    better = (GOLD_SCORES[pair[0]] - GOLD_SCORES[pair[1]]) / 2  # 1 if the first text is, -1 if the second is
    return pair if next(randoms) < 0.5 + (0.5 - mistakes) * better else pair[::-1]


def in_words(text):
    return " ".join([WORDS[word] for word in text])


# ---- Language model and reward model -----------------------------------------------------------------------


def random_rows(count, length, size, randoms):
    return [[Scalar(size * (2 * next(randoms) - 1)) for _ in range(length)] for _ in range(count)]


def tokens_of(text):
    """Each word, after the words before it."""
    return [(text[:t], text[t]) for t in range(LENGTH)]


def forward(model, text):
    """Log-probs of all words that may come next, and a number: a score, or the critic's value."""
    # The network is a multilayer perceptron with one hidden layer. Each of the four places has its own weights,
    # so attention, with which Transformers read texts of any length, isn't needed.
    padded = (*text, *[len(WORDS)] * (LENGTH - len(text)))  # An empty place has an embedding, too.
    inputs = [number for word in padded for number in model["embedding"][word]] + [Scalar(1.0)]
    state = [dot(row, inputs).tanh() for row in model["hidden"]] + [Scalar(1.0)]  # Its weight is a bias.
    return log_softmax([dot(row, state) for row in model["words"]]), dot(model["head"][0], state)


def generate(model, randoms):
    text = ()
    while len(text) < LENGTH:
        chances = [math.exp(logprob.data) for logprob in forward(model, text)[0]]
        text += (draw(chances, randoms),)
    return text


def train(model, examples, predict, batch, lr=0.02):
    """How both models learn from people: what people did becomes likelier."""
    adam = Adam(model)
    for i in range(0, len(examples), batch):
        logprobs = [predict(given)[done] for given, done in examples[i : i + batch]]
        adam.step(Scalar(-1.0) * mean(logprobs), lr * (1 - i / len(examples)))


def train_language_model(randoms, width=4, hidden=10, count=3200, typos=0.05):
    """It learns to predict the next word of sentences with typos."""
    model = {
        "embedding": random_rows(len(WORDS) + 1, width, 1.0, randoms),
        "hidden": random_rows(hidden, LENGTH * width + 1, 0.5, randoms),
        "words": random_rows(len(WORDS), hidden + 1, 0.5, randoms),
        "head": random_rows(1, hidden + 1, 0.0, randoms),
    }
    examples = []
    for _ in range(count):
        sentence = SENTENCES[draw([1] * len(SENTENCES), randoms)]
        text = [draw([1] * len(WORDS), randoms) if next(randoms) < typos else w for w in sentence]
        examples += tokens_of(text)
    train(model, examples, lambda text: forward(model, text)[0], batch=32)
    return model


def train_reward_model(language_model, choices, ref_probs):
    """It learns to predict choices. Return the scores of all texts."""
    # Softmax of two scores says how likely each text is to be taken. This is the Bradley-Terry model.
    model = deepcopy(language_model)
    examples = [(pair, 0) for pair in choices * 5]  # five passes; text 0 of each pair was taken
    train(model, examples, lambda pair: log_softmax([forward(model, t)[1] for t in pair]), batch=10)
    scores = [forward(model, text)[1].data for text in TEXTS]
    # Choices don't tell how high scores are, so their mean becomes 0 and their variance 1.
    return dict(zip(TEXTS, whiten(scores, ref_probs.values()), strict=True))


def whiten(xs, probs, epsilon=0.0):
    """Shift and scale numbers, which have these probabilities, to mean 0 and variance 1."""
    average = sum([prob * x for prob, x in zip(probs, xs, strict=True)])
    variance = sum([prob * (x - average) ** 2 for prob, x in zip(probs, xs, strict=True)])
    return [(x - average) / (variance + epsilon) ** 0.5 for x in xs]


def probabilities(model):
    probs = {(): 1.0}
    for text in BEGINNINGS:
        for word, logprob in enumerate(forward(model, text)[0]):
            probs[(*text, word)] = probs[text] * math.exp(logprob.data)
    return {text: probs[text] for text in TEXTS}


def optimum(ref_probs, scores, kl_coef):
    """The policy p with the highest J = E[score] - kl_coef * KL(p, reference)."""
    # It is p* = reference * exp(score / kl_coef) / Z, where Z makes the sum 1. For any p, a line of algebra gives
    # J = kl_coef * (log Z - KL(p, p*)), and that KL is 0 only if p is p*; otherwise it is positive.
    # Subtracting the top score changes only Z, and keeps exp from overflowing when kl_coef is almost 0.
    top = max(scores.values())
    odds = {t: ref_probs[t] * math.exp((scores[t] - top) / max(kl_coef, 1e-9)) for t in TEXTS}
    total = sum(odds.values())
    return {text: odds[text] / total for text in TEXTS}


def measure(probs, ref_probs, scores, kl_coef):
    """J, the mean score, the mean gold score, and the KL divergence from the reference in nats."""
    score = sum([prob * scores[text] for text, prob in probs.items()])
    gold = sum([prob * GOLD_SCORES[text] for text, prob in probs.items()])
    kl = sum([prob * math.log(prob / ref_probs[text]) for text, prob in probs.items() if prob])
    return score - kl_coef * kl, score, gold, kl


# ---- PPO ---------------------------------------------------------------------------------------------------


def train_policy(args, reference, scores, randoms):
    """After each update, yield the policy and what the update computed."""
    policy = deepcopy(reference)  # Its head is the critic, which shares all other weights with it.
    adam = Adam(policy)
    for update in range(args.updates):
        # 1. There are no queries. 2. Generate responses; compute log-probs and values of tokens.
        responses = [generate(policy, randoms) for _ in range(args.batch)]
        tokens = [token for text in responses for token in tokens_of(text)]
        logprobs = [forward(policy, text)[0][word].data for text, word in tokens]
        values = [forward(policy, text)[1].data for text, _ in tokens]

        # 3. Compute the log-probs of the reference, the language model.
        ref_logprobs = [forward(reference, text)[0][word].data for text, word in tokens]

        # 4. Score the responses. 5. Per-token rewards: the last token gets the score. All pay for their part
        #    of the KL, since the reward model only knows texts like the reference's.
        kl = [logprob - ref for logprob, ref in zip(logprobs, ref_logprobs, strict=True)]
        rewards = [-args.kl_coef * k for k in kl]
        for i, text in enumerate(responses):
            rewards[LENGTH * i + LENGTH - 1] += scores[text]

        # 6. An advantage says how much better it went than the critic predicted, a return what it should have
        #    predicted. Whitening makes the size of steps independent of the scores' scale.
        advantages = compute_gae(rewards, values, args.lam)
        returns = [advantage + value for advantage, value in zip(advantages, values, strict=True)]
        advantages = whiten(advantages, [1 / len(tokens)] * len(tokens), epsilon=1e-8)

        # 7. Epochs. The ratio, 1 at first, says how much likelier a token has become since it was sampled.
        #    Once it is beyond the clip in the direction of the advantage, the clipped one counts, a mere
        #    number without a gradient. So the policy stays near the old one.
        batch = list(zip(tokens, logprobs, advantages, returns, strict=True))
        epoch_losses = []
        for _ in range(args.epochs):
            losses = []
            for (text, word), logprob, advantage, return_ in batch:
                new_logprobs, value = forward(policy, text)
                ratio = (new_logprobs[word] - Scalar(logprob)).exp()
                clipped = Scalar(min(max(ratio.data, 1 - args.clip), 1 + args.clip))
                loss = Scalar(-advantage) * ratio
                clipped_loss = Scalar(-advantage) * clipped
                # Inside the clip the two are equal. Only the first has a gradient, so it must win the tie.
                policy_loss = loss if loss.data >= clipped_loss.data else clipped_loss
                error = value - Scalar(return_)
                losses.append(policy_loss + Scalar(0.5 * args.value_coef) * error * error)
            epoch_losses.append(mean(losses).data)
            adam.step(mean(losses), args.lr * (1 - update / args.updates))

        yield policy, (responses, values, advantages, epoch_losses)  # 8. Log.


def compute_gae(rewards, values, lam):
    """How much better it went than predicted: here and, times lambda each, at later tokens."""
    advantages = [0.0] * len(rewards)
    for t in reversed(range(len(rewards))):
        last = t % LENGTH == LENGTH - 1
        delta = rewards[t] + (0.0 if last else values[t + 1]) - values[t]
        advantages[t] = delta + (0.0 if last else lam * advantages[t + 1])
    return advantages


def read_flags(words=None):
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--seed", type=int, default=1, help="seed of all random numbers")
    add("--choices", type=int, default=300, help="choices that train the reward model")
    add("--mistakes", type=float, default=0.1, help="how often the annotator takes the worse text")
    add("--updates", type=int, default=50, help="PPO updates")
    add("--batch", type=int, default=32, help="episodes per update")
    add("--epochs", type=int, default=4, help="passes over the batch per update")
    add("--lr", type=float, default=0.01, help="learning rate at first; it falls linearly")
    add("--clip", type=float, default=0.2, help="clip range of probability ratios, around 1")
    add("--value_coef", type=float, default=0.1, help="weight of the value loss")
    add("--lam", type=float, default=0.95, help="lambda of GAE; compute_gae says what it does")
    add("--kl_coef", type=float, default=0.3, help="weight of the KL penalty")
    args = parser.parse_args(words)
    counts = args.choices, args.updates, args.batch, args.epochs
    if min(counts) < 1 or not all(0 <= number <= 1e6 for number in vars(args).values()):
        parser.exit(2, "error: numbers go from 0 to a million, and counts, such as --updates, from 1\n")
    return args


def main():
    args = read_flags()
    randoms = random_numbers(args.seed)
    reference = train_language_model(randoms)
    ref_probs = probabilities(reference)
    pairs = [[generate(reference, randoms) for _ in range(2)] for _ in range(args.choices)]
    choices = [choose(pair, args.mistakes, randoms) for pair in pairs]
    for choice in choices[:3]:
        taken, other = [f"{in_words(text)} (gold score {GOLD_SCORES[text]:.0f})" for text in choice]
        print(f"The annotator takes: {taken}, not: {other}", flush=True)
    scores = train_reward_model(reference, choices, ref_probs)
    print(f"The reward model likes best: {in_words(max(scores, key=scores.get))}")
    best = optimum(ref_probs, scores, args.kl_coef)
    best_j = measure(best, ref_probs, scores, args.kl_coef)[0]

    def report(name, probs):
        j, score, gold, kl = measure(probs, ref_probs, scores, args.kl_coef)
        print(f"{name}: score {score:z.2f}, gold score {gold:.2f}, KL {kl:.2f}, J {j:z.3f}", end=", ")
        print(f"{j / best_j:z.1%} of the way; likeliest text: {in_words(max(probs, key=probs.get))}", flush=True)

    report("language model", ref_probs)
    for update, (policy, _) in enumerate(train_policy(args, reference, scores, randoms), 1):
        report(f"update {update}", probabilities(policy))
    report("optimum", best)
    for name, model in {"language model": reference, "policy": policy}.items():
        texts = [in_words(generate(model, randoms)) for _ in range(5)]
        print(f"Texts of the {name}:", *texts, sep="\n    ")


if __name__ == "__main__":
    main()
