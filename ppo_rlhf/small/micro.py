"""RLHF with PPO in plain Python, in a world so small that the reward model's best policy is known.

A language model writes texts of four words. An annotator compares 300 pairs of them, and errs in every tenth choice.
From these, a reward model learns to give texts a score, and PPO teaches the language model to write texts with high
scores. There are only 6,561 texts, so we can list them all: each update prints how good the policy truly is, and how
far it has come on the way from the language model to the reward model's optimum.

    python ppo_rlhf/small/micro.py                         # half a minute; PyPy needs a quarter of it
    python ppo_rlhf/small/micro.py --kl_coef 0 --seed 2    # without the penalty, the policy cheats the reward model
    python ppo_rlhf/small/micro.py --estimators            # bias and noise of eleven gradients

PPO has the steps, names and constants of small/ppo.py. That has more: queries, truncation, minibatches, whitening of
rewards, clipping of values, and a controller for the KL coefficient.
"""

import math
import sys


class Args:
    """Each is a flag, such as --seed 2."""

    seed = 1
    choices = 300  # choices that train the reward model
    mistakes = 0.1  # how often the annotator takes the worse text
    updates = 50  # PPO updates
    batch = 32  # episodes per update
    epochs = 4  # passes over the batch per update
    lr = 0.01  # learning rate of the first update; it falls linearly
    clip = 0.2  # clip range of probability ratios, around 1
    value_coef = 0.1  # weight of the value loss
    lam = 0.95  # lambda of GAE
    kl_coef = 0.3  # weight of the KL penalty


# ---- Numbers that remember how they were made ------------------------------------------------------------------

TAPE = []  # all numbers since the last gradient, in the order in which they were made


class Scalar:
    """A number, the numbers that it was made from (parents), and its derivatives by them (slopes)."""

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

    def clamp(self, low, high):
        return Scalar(min(max(self.data, low), high), (self,), (float(low <= self.data <= high),))


def gradient(loss, weights):
    """Derivatives of the loss by the weights: the chain rule, from the last number back to the first."""
    for weight in weights:
        weight.grad = 0.0
    loss.grad = 1.0
    for number in reversed(TAPE):
        for parent, slope in zip(number.parents, number.slopes, strict=True):
            parent.grad += slope * number.grad
    TAPE.clear()
    return [weight.grad for weight in weights]


def dot(xs, ys):
    total = sum([x.data * y.data for x, y in zip(xs, ys, strict=True)])
    return Scalar(total, (*xs, *ys), [number.data for number in (*ys, *xs)])


def mean(xs):
    return Scalar(sum([x.data for x in xs]) / len(xs), xs, [1 / len(xs)] * len(xs))


def log_softmax(xs):
    """Shift numbers so that they are log-probs: their exponentials add up to 1."""
    top = max([x.data for x in xs])
    exps = [math.exp(x.data - top) for x in xs]
    total = Scalar(top + math.log(sum(exps)), xs, [e / sum(exps) for e in exps])
    return [x - total for x in xs]


class Adam:
    """The optimiser. It divides a gradient by its usual size, so steps are about as large as the learning rate."""

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


def random_numbers(seed):
    """Uniform in [0, 1). Any language with 64-bit floats can make the same numbers."""
    while True:
        seed = (1664525 * seed + 1013904223) % 2**32
        yield seed / 2**32


def draw(weights, noise):
    """A random index, with probabilities in proportion to the weights."""
    rest = next(noise) * sum(weights)
    index = 0
    while rest >= weights[index] and index + 1 < len(weights):
        rest -= weights[index]
        index += 1
    return index


# ---- The world: texts, and what the annotator likes ------------------------------------------------------------

WORDS = ["the", "cat", "dog", "is", "sleeps", "kind", "happy", "mean", "sad"]
LENGTH = 4  # words of a text, which is a tuple of indices of WORDS
BEGINNINGS = []  # all texts of 0 to 3 words
TEXTS = [()]  # all texts of 4 words, after this loop
for _ in range(LENGTH):
    BEGINNINGS += TEXTS
    TEXTS = [(*text, word) for text in TEXTS for word in range(len(WORDS))]


def sentences(*qualities):
    lines = [line for q in qualities for n in ("cat", "dog") for line in (f"the {n} is {q}", f"the {q} {n} sleeps")]
    return [tuple(WORDS.index(word) for word in line.split()) for line in lines]


PLEASANT = sentences("kind", "happy")
SENTENCES = PLEASANT + sentences("mean", "sad")


def gold_score(text):
    """What the annotator wants: pleasant sentences. Unpleasant ones are bad, and so is nonsense."""
    return 1.0 if text in PLEASANT else -1.0


def choose(pair, mistakes, noise):
    """Put the text that the annotator takes first. If both are equally good, each has the same chance."""
    chance = 0.5 + (0.5 - mistakes) * (gold_score(pair[0]) - gold_score(pair[1])) / 2
    return pair if next(noise) < chance else pair[::-1]


# ---- Language model and reward model ---------------------------------------------------------------------------

ONE = Scalar(1.0)  # the input whose weight is a bias


def rows(count, length, size, noise):
    return [[Scalar(size * (2 * next(noise) - 1)) for _ in range(length)] for _ in range(count)]


def copy(model):
    return {name: [[Scalar(weight.data) for weight in row] for row in model[name]] for name in model}


def read(model, text):
    """The network's hidden state after up to four words. Places that are still empty have an embedding, too."""
    padded = (*text, *[len(WORDS)] * (LENGTH - len(text)))
    inputs = [number for word in padded for number in model["embedding"][word]]
    return [dot(row, [*inputs, ONE]).tanh() for row in model["hidden"]] + [ONE]


def next_word(model, state):
    """Log-probs of all words that may come next."""
    return log_softmax([dot(row, state) for row in model["words"]])


def head(model, state):
    """A number about the text: the reward model's score, or the critic's value."""
    return dot(model["head"][0], state)


def generate(model, noise):
    text = ()
    while len(text) < LENGTH:
        text += (draw([math.exp(logprob.data) for logprob in next_word(model, read(model, text))], noise),)
    return text


def train(model, examples, logprob, batch, lr=0.02):
    """How both models learn from people: what people did becomes likelier."""
    adam = Adam(model)
    for i in range(0, len(examples), batch):
        logprobs = [logprob(*example) for example in examples[i : i + batch]]
        adam.step(Scalar(-1.0) * mean(logprobs), lr * (1 - i / len(examples)))


def train_language_model(noise, width=4, hidden=10, count=3200, typos=0.05):
    """It learns to predict the next word of sentences with typos."""
    model = {
        "embedding": rows(len(WORDS) + 1, width, 1.0, noise),
        "hidden": rows(hidden, LENGTH * width + 1, 0.5, noise),
        "words": rows(len(WORDS), hidden + 1, 0.5, noise),
        "head": rows(1, hidden + 1, 0.0, noise),
    }
    examples = []  # beginnings of texts, and the next word
    for _ in range(count):
        sentence = SENTENCES[draw([1] * len(SENTENCES), noise)]
        text = tuple(draw([1] * len(WORDS), noise) if next(noise) < typos else word for word in sentence)
        examples += [(text[:t], text[t]) for t in range(LENGTH)]
    train(model, examples, lambda text, word: next_word(model, read(model, text))[word], batch=32)
    return model


def train_reward_model(language_model, choices, ref_probs):
    """It learns to predict choices: softmax of two scores is how likely each is to be taken. Returns all scores."""
    model = copy(language_model)

    def taken(*pair):
        return log_softmax([head(model, read(model, text)) for text in pair])[0]

    train(model, choices * 5, taken, batch=10)
    # Choices don't tell how high scores are. So we shift and scale them to mean 0 and variance 1 under the reference.
    scores = {text: head(model, read(model, text)).data for text in TEXTS}
    average = sum([ref_probs[text] * scores[text] for text in TEXTS])
    variance = sum([ref_probs[text] * (scores[text] - average) ** 2 for text in TEXTS])
    return {text: (score - average) / variance**0.5 for text, score in scores.items()}


# ---- The truth, from all texts ---------------------------------------------------------------------------------


def probabilities(model):
    """The probabilities of all texts."""
    probs = {(): 1.0}
    for text in BEGINNINGS:
        for word, logprob in enumerate(next_word(model, read(model, text))):
            probs[(*text, word)] = probs[text] * math.exp(logprob.data)
    return {text: probs[text] for text in TEXTS}


def optimum(ref_probs, scores, kl_coef):
    """The policy with the highest J = E[score] - kl_coef * KL is the reference times exp(score / kl_coef), scaled.

    For J is a constant less kl_coef * KL(policy, optimum), and that KL is 0 only if both are equal, else above 0.
    """
    top = max(scores.values())
    weights = {text: ref_probs[text] * math.exp((scores[text] - top) / max(kl_coef, 1e-9)) for text in TEXTS}
    total = sum(weights.values())
    return {text: weight / total for text, weight in weights.items()}


def measure(probs, ref_probs, scores, kl_coef):
    """J, the mean score, the mean gold score, and the KL divergence from the reference in nats."""
    score = sum([prob * scores[text] for text, prob in probs.items()])
    gold = sum([prob * gold_score(text) for text, prob in probs.items()])
    kl = sum([prob * math.log(prob / ref_probs[text]) for text, prob in probs.items() if prob])
    return score - kl_coef * kl, score, gold, kl


# ---- PPO -------------------------------------------------------------------------------------------------------


def train_policy(args, reference, scores, noise):
    """After each update, yield the policy and what the update computed."""
    policy = copy(reference)  # Its head is the critic, which learns to predict the sum of the rewards to come.
    adam = Adam(policy)
    for update in range(args.updates):
        # 1. There are no queries. 2. Generate responses; compute log-probs and values of their tokens.
        responses = [generate(policy, noise) for _ in range(args.batch)]
        tokens = [(text[:t], text[t]) for text in responses for t in range(LENGTH)]
        logprobs = [next_word(policy, read(policy, text))[word].data for text, word in tokens]
        values = [head(policy, read(policy, text)).data for text, _ in tokens]

        # 3. Compute the log-probs of the reference, the language model. 4. Score the responses. 5. Per-token rewards:
        #    the last token gets the score, and all pay for their part of the KL divergence, because the reward model
        #    only knows texts like the reference's.
        ref_logprobs = [next_word(reference, read(reference, text))[word].data for text, word in tokens]
        rewards = [-args.kl_coef * (logprob - ref) for logprob, ref in zip(logprobs, ref_logprobs, strict=True)]
        for i, text in enumerate(responses):
            rewards[LENGTH * i + LENGTH - 1] += scores[text]

        # 6. An advantage says how much better it went than predicted, a return what should have been predicted.
        advantages = compute_gae(rewards, values, args.lam)
        returns = [advantage + value for advantage, value in zip(advantages, values, strict=True)]
        advantages = whiten(advantages)

        # 7. Epochs. The ratio, 1 at first, says how much likelier a token has become since it was sampled. If it has
        #    gone too far in the direction of the advantage, it has no gradient, so the policy stays near the old one.
        epoch_losses = []
        for _ in range(args.epochs):
            losses = []
            for (text, word), logprob, advantage, target in zip(tokens, logprobs, advantages, returns, strict=True):
                state = read(policy, text)
                ratio = (next_word(policy, state)[word] - Scalar(logprob)).exp()
                loss = Scalar(-advantage) * ratio
                clipped_loss = Scalar(-advantage) * ratio.clamp(1 - args.clip, 1 + args.clip)
                policy_loss = max(loss, clipped_loss, key=lambda x: x.data)
                error = head(policy, state) - Scalar(target)
                losses.append(policy_loss + Scalar(0.5 * args.value_coef) * error * error)
            epoch_losses.append(mean(losses).data)
            adam.step(mean(losses), args.lr * (1 - update / args.updates))

        # 8. Log.
        yield policy, {"responses": responses, "values": values, "advantages": advantages, "losses": epoch_losses}


def compute_gae(rewards, values, lam):
    """Advantages: how much better it went than predicted, at this token and, times lambda each, at later ones."""
    advantages = [0.0] * len(rewards)
    for t in reversed(range(len(rewards))):
        last = t % LENGTH == LENGTH - 1
        delta = rewards[t] + (0.0 if last else values[t + 1]) - values[t]
        advantages[t] = delta + (0.0 if last else lam * advantages[t + 1])
    return advantages


def whiten(xs):
    """Scale to variance 1 and shift to mean 0."""
    average = sum(xs) / len(xs)
    variance = sum([(x - average) ** 2 for x in xs]) / len(xs)
    return [(x - average) * (variance + 1e-8) ** -0.5 for x in xs]


# ---- The command -----------------------------------------------------------------------------------------------


def read_flags(words):
    args = Args()
    for flag, value in zip(words[::2], words[1::2] + ["nothing"] * (len(words) % 2), strict=True):
        try:
            number = type(vars(Args)[flag[2:]])(value)
            if not isinstance(number, int) <= number <= 1e6:
                raise ValueError
            setattr(args, flag[2:], number)
        except (KeyError, TypeError, ValueError):
            flags = " --".join(name for name in vars(Args) if name[0] != "_")
            known = f"--estimators, or with a number from 0 (whole ones from 1) to a million: --{flags}"
            print(f"error: {flag} {value}; flags are {known}", file=sys.stderr)
            sys.exit(2)
    return args


def main():
    args = read_flags([word for word in sys.argv[1:] if word != "--estimators"])
    noise = random_numbers(args.seed)
    reference = train_language_model(noise)
    ref_probs = probabilities(reference)
    pairs = [(generate(reference, noise), generate(reference, noise)) for _ in range(args.choices)]
    choices = [choose(pair, args.mistakes, noise) for pair in pairs]
    scores = train_reward_model(reference, choices, ref_probs)
    best = optimum(ref_probs, scores, args.kl_coef)
    best_j = measure(best, ref_probs, scores, args.kl_coef)[0]

    def report(name, probs):
        j, score, gold, kl = measure(probs, ref_probs, scores, args.kl_coef)
        text = " ".join(WORDS[word] for word in max(probs, key=probs.get))
        print(f"{name}: score {score:.2f}, gold score {gold:.2f}, KL {kl:.2f}, J {j:.3f}", end=", ")
        print(f"{j / best_j:.1%} of the way; likeliest text: {text}", flush=True)

    report("language model", ref_probs)
    for update, (policy, _) in enumerate(train_policy(args, reference, scores, noise), 1):
        report(f"update {update}", probabilities(policy))
        if "--estimators" in sys.argv and update == 3:
            return compare_estimators(policy, reference, scores, args.kl_coef)
    report("optimum", best)


# ---- Estimators of the gradient --------------------------------------------------------------------------------


def to_come(xs):
    return [sum(xs[t:]) for t in range(LENGTH)]


# An estimator multiplies the gradient of each token's log-prob by a weight. It gets, of all tokens of a text, the
# KL (log-prob less reference log-prob), rewards and values.
ESTIMATORS = {
    "KL: k1 in the reward": lambda kl, rewards, values: to_come(kl),
    "KL: k2 in the reward": lambda kl, rewards, values: to_come([k * k / 2 for k in kl]),
    "KL: k3 in the reward": lambda kl, rewards, values: to_come([math.exp(-k) - 1 + k for k in kl]),
    "KL: k1 as a loss": lambda kl, rewards, values: [1.0] * LENGTH,
    "KL: k2 as a loss": lambda kl, rewards, values: kl,
    "KL: k3 as a loss": lambda kl, rewards, values: [1 - math.exp(-k) for k in kl],
    "J: all rewards": lambda kl, rewards, values: [sum(rewards)] * LENGTH,
    "J: all rewards, less the mean of the group": lambda kl, rewards, values: [sum(rewards)] * LENGTH,
    "J: GAE, lambda 1": lambda kl, rewards, values: compute_gae(rewards, values, 1.0),
    "J: GAE, lambda 0.95": lambda kl, rewards, values: compute_gae(rewards, values, 0.95),
    "J: GAE, lambda 0": lambda kl, rewards, values: compute_gae(rewards, values, 0.0),
}


def compare_estimators(policy, reference, scores, kl_coef, n=8):
    """Bias and noise of gradients from n texts, in percent of the true gradient: exact, as sums over all texts."""
    weights = Adam(policy).weights
    probs = probabilities(policy)
    j = measure(probs, probabilities(reference), scores, kl_coef)[0]
    tokens = {}
    for text in BEGINNINGS:
        for word, ref_logprob in enumerate(next_word(reference, read(reference, text))):
            state = read(policy, text)
            value = head(policy, state).data
            logprob = next_word(policy, state)[word]
            tokens[text, word] = gradient(logprob, weights), logprob.data - ref_logprob.data, value
    truth = {}
    for name, weigh in ESTIMATORS.items():
        average = [0.0] * len(weights)
        square = spread = fisher = 0.0
        group = "group" in name
        for text, prob in probs.items():
            slopes, kl, values = zip(*[tokens[text[:t], text[t]] for t in range(LENGTH)], strict=True)
            rewards = [-kl_coef * k for k in kl]
            rewards[-1] += scores[text]
            factors = weigh(kl, rewards, values)
            if group:
                factors = [sum(rewards) - j] * LENGTH
                spread += prob * factors[0] ** 2
                fisher += prob * sum([sum(column) ** 2 for column in zip(*slopes, strict=True)])
            sample = [
                sum([f * slope for f, slope in zip(factors, column, strict=True)])
                for column in zip(*slopes, strict=True)
            ]
            average = [a + prob * x for a, x in zip(average, sample, strict=True)]
            square += prob * sum([x * x for x in sample])
        length = sum([a * a for a in average])
        variance = (square - length) / n
        if group:  # the variance of a covariance of n samples
            variance = ((n - 1) / n) ** 2 * (variance + (length + spread * fisher) / (n * (n - 1)))
            average = [(n - 1) / n * a for a in average]
        true = truth.setdefault(name[:2], average)
        scale = 100 / sum([a * a for a in true]) ** 0.5
        bias = sum([(a - b) ** 2 for a, b in zip(average, true, strict=True)]) ** 0.5
        print(f"{name:45} bias {scale * bias:5.1f}, noise {scale * variance**0.5:5.1f}")


if __name__ == "__main__":
    main()
