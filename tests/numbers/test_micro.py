"""small/micro.py computes what an independent version with torch does, and what its golden trajectory says."""

import json
import math
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from benchmark import credit, micro as benchmark
from ppo_rlhf.small import micro

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/micro.json").read_text())

# ---- An independent version: batches of token ids, torch's autograd and optimiser, another way to draw -------------

EMPTY = 9  # the id of a place that has no word yet
GRAMMAR = [text for q in (5, 6, 7, 8) for n in (1, 2) for text in ([0, n, 3, q], [0, q, n, 4])]
ALL = torch.cartesian_prod(*[torch.arange(9)] * 4)  # (6561, 4), in the order of micro.TEXTS
GOLD = torch.tensor([1.0 if text in GRAMMAR[:8] else -1.0 for text in ALL.tolist()])
Weights = dict[str, Tensor]


class Uniforms:
    def __init__(self, seed: int):
        self.state = seed

    def __call__(self, *shape: int) -> Tensor:
        numbers = []
        for _ in range(math.prod(shape)):
            self.state = (1664525 * self.state + 1013904223) % 2**32  # the generator of Numerical Recipes
            numbers.append(self.state / 2**32)
        return torch.tensor(numbers, dtype=torch.float64).view(shape)


def affine(rows: Tensor, inputs: Tensor) -> Tensor:
    return inputs @ rows[:, :-1].T + rows[:, -1]


def outputs(model: Weights, texts: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of all next words (batch, 9), and scores (batch,), after texts (batch, length)."""
    states = torch.tanh(affine(model["hidden"], model["embedding"][texts].flatten(1)))
    return affine(model["words"], states).log_softmax(1), affine(model["head"], states).squeeze(1)


def outputs_before_words(model: Weights, texts: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of the words of texts, and the values before them: both (batch, length)."""
    is_known = torch.ones(texts.shape[1], texts.shape[1]).tril(-1).bool()
    logprobs, values = outputs(model, torch.where(is_known, texts[:, None], EMPTY).flatten(0, 1))
    return logprobs.gather(1, texts.reshape(-1, 1)).view(texts.shape), values.view(texts.shape)


class Optimizer:
    """torch's Adam adds epsilon after the bias correction, so it gets another epsilon in each step."""

    def __init__(self, model: Weights):
        self.adam = torch.optim.Adam(model.values())
        self.steps = 0

    def step(self, loss: Tensor, lr: float) -> None:
        self.steps += 1
        self.adam.param_groups[0].update(lr=lr, eps=1e-5 / math.sqrt(1 - 0.999**self.steps))
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()


def cloned(model: Weights) -> Weights:
    return {name: rows.detach().clone().requires_grad_() for name, rows in model.items()}


def sample(model: Weights, count: int, uniforms: Uniforms) -> Tensor:
    texts = torch.full((count, 4), EMPTY)
    randoms = uniforms(count, 4)
    for t in range(4):
        cdf = outputs(model, texts)[0].exp().cumsum(1)
        texts[:, t] = (cdf / cdf[:, -1:] <= randoms[:, t : t + 1]).sum(1)
    return texts


def train_language_model(uniforms: Uniforms) -> Weights:
    shapes = {"embedding": ((10, 4), 1.0), "hidden": ((10, 17), 0.5), "words": ((9, 11), 0.5), "head": ((1, 11), 0.0)}
    model = {name: ((2 * uniforms(*shape) - 1) * scale).requires_grad_() for name, (shape, scale) in shapes.items()}
    texts = []
    for _ in range(3200):
        text = GRAMMAR[int(16 * uniforms(1))]
        texts.append([int(9 * uniforms(1)) if uniforms(1) < 0.05 else word for word in text])
    optimizer = Optimizer(model)
    for step, batch in enumerate(torch.tensor(texts).split(8)):
        optimizer.step(-outputs_before_words(model, batch)[0].mean(), 0.02 * (1 - step / 400))
    return model


def train_reward_model(language_model: Weights, choices: Tensor, ref_probs: Tensor) -> Tensor:
    """The scores (6561,) that a model learns from choices (300, 2, 4)."""
    model = cloned(language_model)
    optimizer = Optimizer(model)
    for step, pairs in enumerate(choices.repeat(5, 1, 1).split(10)):
        scores = outputs(model, pairs.flatten(0, 1))[1].view(-1, 2)
        loss = torch.nn.functional.softplus(scores[:, 1] - scores[:, 0]).mean()  # -log sigmoid of the difference
        optimizer.step(loss, 0.02 * (1 - step / 150))
    scores = outputs(model, ALL)[1].detach()
    centred = scores - ref_probs @ scores
    return centred / (ref_probs @ centred**2).sqrt()


def rollout(policy: Weights, reference: Weights, scores: Tensor, uniforms: Uniforms) -> tuple[Tensor, ...]:
    responses = sample(policy, 32, uniforms)
    logprobs, values = outputs_before_words(policy, responses)
    rewards = 0.3 * (outputs_before_words(reference, responses)[0] - logprobs)
    rewards[:, 3] += scores[responses @ torch.tensor([729, 81, 9, 1])]
    # GAE as its definition: the sum of all later temporal differences, times 0.95 for each token between.
    deltas = rewards + torch.nn.functional.pad(values[:, 1:], (0, 1)) - values
    powers = [[0.95 ** (j - i) if j >= i else 0.0 for i in range(4)] for j in range(4)]
    advantages = deltas @ torch.tensor(powers, dtype=torch.float64)
    whitened = (advantages - advantages.mean()) / (advantages.var(correction=0) + 1e-8).sqrt()
    return responses, logprobs, values, advantages + values, whitened


def measure(policy: Weights, reference: Weights, scores: Tensor) -> dict[str, Tensor]:
    logprobs, ref_logprobs = (outputs_before_words(model, ALL)[0].sum(1) for model in (policy, reference))
    score, gold, kl = (logprobs.exp() @ x for x in (scores, GOLD.double(), logprobs - ref_logprobs))
    return {"score": score, "gold": gold, "kl": kl, "J": score - 0.3 * kl}


def trajectory() -> dict:
    """What benchmark/micro.py writes, but for its first entries and the optimum."""
    uniforms = Uniforms(1)
    reference = train_language_model(uniforms)
    pairs = sample(reference, 600, uniforms).view(300, 2, 4)
    better = GOLD[pairs @ torch.tensor([729, 81, 9, 1])].diff(dim=1).view(-1) / -2  # 1 if the first text is
    is_first = uniforms(300) < 0.5 + 0.4 * better
    choices = torch.where(is_first[:, None, None], pairs, pairs.flip(1))
    ref_probs = outputs_before_words(reference, ALL)[0].sum(1).exp().detach()
    scores = train_reward_model(reference, choices, ref_probs)
    policy = cloned(reference)
    optimizer = Optimizer(policy)
    updates = []
    for update in range(20):
        with torch.no_grad():
            responses, logprobs, values, returns, advantages = rollout(policy, reference, scores, uniforms)
        losses = []
        for _ in range(4):
            new_logprobs, new_values = outputs_before_words(policy, responses)
            ratio = torch.exp(new_logprobs - logprobs)
            surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            losses.append(0.05 * ((new_values - returns) ** 2).mean() - surrogate.mean())
            optimizer.step(losses[-1], 0.01 * (1 - update / 50))
        computed = {"responses": responses, "values": values, "advantages": advantages, "losses": losses}
        updates.append(computed | measure(policy, reference, scores))
    entries = {"language_model": reference, "choices": choices, "scores": scores[::100]}
    return entries | {"updates": updates, "policy": policy}


# ---- Comparisons ---------------------------------------------------------------------------------------------------


def numbers(entry) -> list[float]:
    if isinstance(entry, dict):
        return numbers([entry[name] for name in sorted(entry)])
    if isinstance(entry, list | tuple):
        return [number for part in entry for number in numbers(part)]
    return entry.flatten().tolist() if isinstance(entry, Tensor) else [entry]


def differing(ours: dict, theirs: dict) -> list[str]:
    """Names of entries of theirs that differ from ours by more than 1e-10."""
    return [name for name in theirs if numbers(ours[name]) != pytest.approx(numbers(theirs[name]), rel=0, abs=1e-10)]


def test_torch_computes_the_golden_file():
    assert differing(GOLDEN, trajectory()) == []


def test_the_program_computes_the_golden_file():
    """Of its updates the first six, to save time."""
    ours = benchmark.trajectory(6)
    assert json.loads(json.dumps(ours)).keys() == GOLDEN.keys()
    for name in ("format", "flags", "words"):
        assert ours.pop(name) == GOLDEN[name]
    ours.pop("policy")
    assert differing(GOLDEN | {"updates": GOLDEN["updates"][:6]}, ours) == []


# ---- Its parts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kl_coef", [0.0, 0.05, 0.3, 2.0])
def test_no_policy_is_better_than_the_optimum(kl_coef):
    """The highest J is kl_coef times the log of the reference's mean of exp(score / kl_coef)."""
    torch.manual_seed(0)
    ref_probs, scores = torch.randn(2, 6561, dtype=torch.float64)
    ref_probs = ref_probs.softmax(0)
    by_text = [dict(zip(micro.TEXTS, x.tolist(), strict=True)) for x in (ref_probs, scores)]
    best = micro.optimum(*by_text, kl_coef)
    highest = kl_coef * (ref_probs.log() + scores / kl_coef).logsumexp(0) if kl_coef else scores.max()
    assert sum(best.values()) == pytest.approx(1)
    assert micro.measure(best, *by_text, kl_coef)[0] == pytest.approx(highest.item())


@pytest.mark.parametrize(("chance", "first"), [(0.79, 0), (0.81, 1)])
def test_the_annotator_errs_as_often_as_told(chance, first):
    pair = [micro.SENTENCES[0], micro.SENTENCES[-1]]  # good and bad
    assert micro.choose(pair, 0.2, iter([chance]))[first] == micro.SENTENCES[0]


# ---- Estimators, in a world of texts of two words, where all pairs of texts can be listed, too ---------------------


def estimators(policy: Weights, reference: Weights, scores: Tensor, kl_coef: float) -> dict[str, tuple]:
    """The bias and noise of gradients from two texts. Gradients of true J and KL are those of sums over all texts."""
    texts = torch.cartesian_prod(torch.arange(9), torch.arange(9))  # (81, 2)

    def gradient(loss: Tensor) -> Tensor:
        parts = torch.autograd.grad(loss, list(policy.values()), retain_graph=True, materialize_grads=True)
        return torch.nn.utils.parameters_to_vector(parts)

    logprobs, values = outputs_before_words(policy, texts)
    d = logprobs - outputs_before_words(reference, texts)[0].detach()
    probs = logprobs.sum(1).exp()
    kl = probs @ d.sum(1)
    truth = {"KL": gradient(kl), "J:": gradient(probs @ scores - kl_coef * kl)}
    losses = {}
    for k, loss in {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}.items():
        penalty = loss.detach()
        losses[f"KL: {k} in the reward"] = logprobs[:, 0] * penalty.sum(1) + logprobs[:, 1] * penalty[:, 1]
        losses[f"KL: {k} as a loss"] = loss.sum(1)
    first, last = -kl_coef * d.detach().T
    last = last + scores
    first_value, last_value = values.detach().T
    losses["J: all rewards"] = logprobs.sum(1) * (first + last)
    for lam in ("1", "0.95", "0"):
        advantage = first + last_value - first_value + float(lam) * (last - last_value)
        losses[f"J: GAE, lambda {lam}"] = logprobs[:, 0] * advantage + logprobs[:, 1] * (last - last_value)
    samples = {name: torch.stack([gradient(x) for x in loss]) for name, loss in losses.items()}  # (81, weights)
    pairs = {name: (rows[:, None] + rows[None, :]) / 2 for name, rows in samples.items()}  # (81, 81, weights)
    slopes = torch.stack([gradient(x) for x in logprobs.sum(1)])
    centred = ((first + last)[:, None] - (first + last)[None, :]) / 2  # the first text's return, less the pair's mean
    pairs["J: all rewards, less the mean of the group"] = centred[:, :, None] * (slopes[:, None] - slopes[None]) / 2
    found = {}
    weight = (probs[:, None] * probs[None, :]).detach()[:, :, None]
    for name, estimates in pairs.items():
        true = truth[name[:2]]
        mean = (weight * estimates).sum((0, 1))
        noise = (weight * (estimates - mean) ** 2).sum().sqrt()
        found[name] = [100 * (x / true.norm()).item() for x in ((mean - true).norm(), noise)]
    return found


def test_bias_and_noise_of_estimators_are_those_of_a_list_of_all_pairs(capsys):
    program = ModuleType("micro")
    exec(Path(micro.__file__).read_text().replace("LENGTH = 4", "LENGTH = 2"), vars(program))
    randoms = program.random_numbers(1)
    policy, reference = (program.train_language_model(randoms, width=3, hidden=4, count=0) for _ in range(2))
    policy["head"] = program.random_rows(1, 5, 0.9, randoms)  # which is 0 at first
    scores = {text: 2 * next(randoms) for text in program.TEXTS}
    program.compare_estimators(policy, reference, scores, 0.4, n=2)
    printed = re.findall(r"(.+?) +bias +([\d.]+), noise +([\d.]+)", capsys.readouterr().out)
    models = [
        {name: torch.tensor(rows, dtype=torch.float64, requires_grad=True) for name, rows in weights.items()}
        for weights in map(benchmark.rows_of, (policy, reference))
    ]
    expected = estimators(*models, torch.tensor(list(scores.values()), dtype=torch.float64), 0.4)
    assert len(expected) == 11
    assert {name: [float(x) for x in found] for name, *found in printed} == {
        name: pytest.approx(found, abs=0.051) for name, found in expected.items()
    }


# ---- The credit of words, for a picture of chapter 1 --------------------------------------------------------------


def true_values(probs: Tensor, rewards: Tensor) -> Tensor:
    """Before each word of each text and after the last one (6561, 5): means over all texts that begin in this way."""
    found = torch.zeros(6561, 5, dtype=torch.float64)
    for t in range(4):
        weights = probs.view(9**t, -1)
        means = (weights * rewards[:, t:].sum(1).view(9**t, -1)).sum(1) / weights.sum(1)
        found[:, t] = means.repeat_interleave(9 ** (4 - t))
    return found


def test_values_and_advantages_of_words_are_those_of_sums_over_all_texts():
    models = [GOLDEN["policy"], GOLDEN["language_model"]]
    scalars = [{name: [[micro.Scalar(x) for x in row] for row in rows] for name, rows in m.items()} for m in models]
    tensors = [{name: torch.tensor(rows, dtype=torch.float64) for name, rows in m.items()} for m in models]
    torch.manual_seed(0)
    scores = torch.randn(6561, dtype=torch.float64)
    by_text = dict(zip(micro.TEXTS, scores.tolist(), strict=True))
    tree = credit.make_tree(*scalars, by_text, 0.3)

    (logprobs, values), (ref_logprobs, _) = (outputs_before_words(model, ALL) for model in tensors)
    rewards = 0.3 * (ref_logprobs - logprobs)
    rewards[:, 3] += scores
    probs = logprobs.sum(1).exp()
    true = true_values(probs, rewards)
    for t in range(4):
        beginnings = [text for text in micro.BEGINNINGS if len(text) == t]
        found = [[row[x] for x in beginnings] for row in (tree.probs, tree.values, tree.true_values)]
        step = 9 ** (4 - t)
        expected = probs.view(9**t, -1).sum(1), values[::step, t], true[::step, t]
        assert found == [pytest.approx(row.tolist(), abs=1e-9) for row in expected]

    truth = rewards + true[:, 1:] - true[:, :4]
    deltas = rewards + torch.nn.functional.pad(values[:, 1:], (0, 1)) - values
    i = 4321
    assert credit.advantages(tree, micro.TEXTS[i]) == {
        "truth": pytest.approx(truth[i].tolist()),
        "0": pytest.approx(deltas[i].tolist()),
        "0.95": pytest.approx([sum(0.95**k * x for k, x in enumerate(deltas[i, t:].tolist())) for t in range(4)]),
        "1": pytest.approx([(rewards[i, t:].sum() - values[i, t]).item() for t in range(4)]),
    }
    is_spoilt = (scores < 0) & (truth.argmin(1) < 3)
    assert credit.spoilt(tree, by_text) == micro.TEXTS[(probs * is_spoilt).argmax()]


@pytest.mark.parametrize("update", ["1", "10", "50"])
def test_the_committed_credit_fits_the_golden_trajectory_and_itself(update):
    """The golden values of an update are those of the policy before it, and J is the true value before any word."""
    found = json.loads(credit.RESULTS.read_text())
    text, beginnings, advantages = found["text"].split(), *found["updates"][update].values()
    if int(update) < len(GOLDEN["updates"]):
        assert beginnings[""][2] == pytest.approx(GOLDEN["updates"][int(update) - 1]["J"], abs=1e-4)
        following = GOLDEN["updates"][int(update)]
        starts = [" ".join(micro.WORDS[w] for w in words[:t]) for words in following["responses"] for t in range(4)]
        both = [(beginnings[x][1], y) for x, y in zip(starts, following["values"], strict=True) if x in beginnings]
        assert len(both) > 100
        assert [x for x, _ in both] == pytest.approx([y for _, y in both], abs=1e-4)
    rows = [beginnings[" ".join(text[:t])] for t in range(4)]
    v, true = ([*(row[i] for row in rows), 0.0] for i in (1, 2))
    rewards = [advantages["0"][t] + v[t] - v[t + 1] for t in range(4)]
    expected = {
        "truth": [rewards[t] + true[t + 1] - true[t] for t in range(4)],
        "0.95": [sum(0.95**k * x for k, x in enumerate(advantages["0"][t:])) for t in range(4)],
        "1": [sum(rewards[t:]) - v[t] for t in range(4)],
    }
    for name, row in expected.items():
        assert advantages[name] == pytest.approx(row, abs=1e-3)


# ---- The command ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", ["--updates 0", "--lr nan", "--lr inf", "--lr -1", "--seed", "--nothing 1", "--__doc__ 1"]
)
def test_a_bad_flag_ends_in_one_line(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        micro.read_flags(words.split())
    assert stopped.value.code == 2
    assert re.fullmatch(rf"error: {words} ?.*--estimators.*--kl_coef.*\n", capsys.readouterr().err)


def test_flags_are_read():
    args = micro.read_flags(["--seed", "2", "--kl_coef", "0"])
    assert (args.seed, args.kl_coef, args.updates, micro.Args.seed) == (2, 0.0, 50, 1)
