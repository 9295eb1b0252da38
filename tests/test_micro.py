"""small/micro.py computes what an independent version with torch does, and what its golden trajectory says."""

import ast
import itertools
import json
import math
import random
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmark import micro as benchmark
from ppo_rlhf.small import micro

PATH = Path(micro.__file__)
UPDATES = 20
PRECISION = 1e-10

# ---- An independent version: batches of token ids, torch's autograd and optimiser, another way to draw -------------

LCG = (1664525, 1013904223, 2**32)  # Numerical Recipes' generator
EMPTY = 9  # the id of a place that has no word yet
NOUNS, GOOD, BAD = (1, 2), (5, 6), (7, 8)
GRAMMAR = [text for q in GOOD + BAD for n in NOUNS for text in ((0, n, 3, q), (0, q, n, 4))]
ALL = torch.cartesian_prod(*[torch.arange(9)] * 4)  # (6561, 4), in the order of micro.TEXTS
IS_PLEASANT = torch.tensor([tuple(row) in GRAMMAR[:8] for row in ALL.tolist()])
Weights = dict[str, Tensor]


class Uniforms:
    def __init__(self, seed: int):
        self.state = seed

    def __call__(self, *shape: int) -> Tensor:
        numbers = []
        for _ in range(math.prod(shape)):
            self.state = (LCG[0] * self.state + LCG[1]) % LCG[2]
            numbers.append(self.state / LCG[2])
        return torch.tensor(numbers, dtype=torch.float64).view(shape)

    def whole(self, below: int) -> int:
        return int(self(1).item() * below)


def hidden(model: Weights, texts: Tensor) -> Tensor:
    """(batch, hidden) of texts (batch, 4)"""
    weight, bias = model["hidden"][:, :-1], model["hidden"][:, -1]
    return torch.tanh(model["embedding"][texts].flatten(1) @ weight.T + bias)


def affine(rows: Tensor, states: Tensor) -> Tensor:
    return states @ rows[:, :-1].T + rows[:, -1]


def prefixes(texts: Tensor) -> Tensor:
    """(batch, 4, 4): the first 0 to 3 words of texts (batch, 4), with EMPTY behind them"""
    keep = torch.arange(4)[None, :] < torch.arange(4)[:, None]
    return torch.where(keep, texts[:, None, :], EMPTY)


def logprobs_and_values(model: Weights, texts: Tensor) -> tuple[Tensor, Tensor]:
    """both (batch, 4)"""
    states = hidden(model, prefixes(texts).flatten(0, 1))
    logprobs = affine(model["words"], states).log_softmax(1).view(-1, 4, 9)
    return logprobs.gather(2, texts[:, :, None]).squeeze(2), affine(model["head"], states).view(-1, 4)


class Optimizer:
    """torch's Adam adds epsilon after the bias correction, so it gets another epsilon in each step."""

    def __init__(self, model: Weights):
        self.adam = torch.optim.Adam(model.values(), betas=(0.9, 0.999))
        self.steps = 0

    def step(self, loss: Tensor, lr: float) -> None:
        self.steps += 1
        group = self.adam.param_groups[0]
        group.update(lr=lr, eps=1e-5 / math.sqrt(1 - 0.999**self.steps))
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()


def cloned(model: Weights) -> Weights:
    return {name: rows.detach().clone().requires_grad_() for name, rows in model.items()}


def sample(model: Weights, count: int, uniforms: Uniforms) -> Tensor:
    texts = torch.full((count, 4), EMPTY)
    noise = uniforms(count, 4)
    with torch.no_grad():
        for t in range(4):
            cdf = affine(model["words"], hidden(model, texts)).softmax(1).cumsum(1)
            texts[:, t] = (cdf / cdf[:, -1:] <= noise[:, t : t + 1]).sum(1)
    return texts


def torch_language_model(uniforms: Uniforms) -> Weights:
    shapes = {"embedding": ((10, 4), 1.0), "hidden": ((10, 17), 0.5), "words": ((9, 11), 0.5), "head": ((1, 11), 0.0)}
    model = {name: ((2 * uniforms(*shape) - 1) * scale).requires_grad_() for name, (shape, scale) in shapes.items()}
    rows = []
    for _ in range(3200):
        words = list(GRAMMAR[uniforms.whole(16)])
        for t in range(4):
            if uniforms(1) < 0.05:
                words[t] = uniforms.whole(9)
        rows.append(words)
    optimizer = Optimizer(model)
    for step, texts in enumerate(torch.tensor(rows).split(8)):
        optimizer.step(-logprobs_and_values(model, texts)[0].mean(), 0.02 * (1 - step / 400))
    return model


def torch_scores(language_model: Weights, choices: Tensor, ref_probs: Tensor) -> Tensor:
    """(6561,) from choices (300, 2, 4)"""
    model = cloned(language_model)
    optimizer = Optimizer(model)
    for step, pairs in enumerate(choices.repeat(5, 1, 1).split(10)):
        scores = affine(model["head"], hidden(model, pairs.flatten(0, 1))).view(-1, 2)
        loss = torch.nn.functional.softplus(scores[:, 1] - scores[:, 0]).mean()  # -log sigmoid of the difference
        optimizer.step(loss, 0.02 * (1 - step / 150))
    scores = affine(model["head"], hidden(model, ALL)).squeeze(1).detach()
    centred = scores - (ref_probs * scores).sum()
    return centred / (ref_probs * centred**2).sum().sqrt()


def torch_update(
    policy: Weights, reference: Weights, scores: Tensor, optimizer: Optimizer, lr: float, uniforms
) -> dict:
    responses = sample(policy, 32, uniforms)
    with torch.no_grad():
        logprobs, values = logprobs_and_values(policy, responses)
        rewards = 0.3 * (logprobs_and_values(reference, responses)[0] - logprobs)
        rewards[:, 3] += scores[(responses * torch.tensor([729, 81, 9, 1])).sum(1)]
        # GAE as its definition: the sum of all later temporal differences, times 0.95 for each token between.
        deltas = rewards + torch.cat([values[:, 1:], torch.zeros(32, 1)], dim=1) - values
        powers = torch.tensor(
            [[0.95 ** (j - i) if j >= i else 0.0 for i in range(4)] for j in range(4)], dtype=torch.float64
        )
        advantages = deltas @ powers
        returns = advantages + values
        advantages = (advantages - advantages.mean()) / (advantages.var(unbiased=False) + 1e-8).sqrt()
    losses = []
    for _ in range(4):
        new_logprobs, new_values = logprobs_and_values(policy, responses)
        ratio = torch.exp(new_logprobs - logprobs)
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = 0.05 * ((new_values - returns) ** 2).mean() - surrogate.mean()
        optimizer.step(loss, lr)
        losses.append(loss.item())
    return {"responses": responses, "values": values, "advantages": advantages, "losses": losses}


def torch_measure(policy: Weights, reference: Weights, scores: Tensor) -> dict:
    with torch.no_grad():
        logprobs, ref_logprobs = (logprobs_and_values(model, ALL)[0].sum(1) for model in (policy, reference))
    probs = logprobs.exp()
    kl = (probs * (logprobs - ref_logprobs)).sum()
    score = (probs * scores).sum()
    gold = (probs * torch.where(IS_PLEASANT, 1.0, -1.0)).sum()
    return {"score": score, "kl": kl, "gold": gold, "J": score - 0.3 * kl}


def torch_trajectory(seed: int) -> dict:
    """What benchmark/micro.py writes, but for its first entries."""
    uniforms = Uniforms(seed)
    language_model = torch_language_model(uniforms)
    ref_probs = logprobs_and_values(language_model, ALL)[0].sum(1).exp().detach()
    pairs = sample(language_model, 600, uniforms).view(300, 2, 4)
    flip = []
    for pair in pairs.tolist():
        better, worse = (tuple(text) in GRAMMAR[:8] for text in pair)
        flip.append(uniforms(1).item() >= {1: 0.9, 0: 0.5, -1: 0.1}[better - worse])
    choices = torch.where(torch.tensor(flip)[:, None, None], pairs.flip(1), pairs)
    scores = torch_scores(language_model, choices, ref_probs)
    policy = cloned(language_model)
    optimizer = Optimizer(policy)
    updates = []
    for update in range(UPDATES):
        lr = 0.01 * (1 - update / 50)
        row = torch_update(policy, language_model, scores, optimizer, lr, uniforms)
        updates.append(row | torch_measure(policy, language_model, scores))
    return {
        "language_model": language_model,
        "choices": choices,
        "scores": scores[::100],
        "updates": updates,
        "policy": policy,
    }


# ---- Comparisons ---------------------------------------------------------------------------------------------------


def largest_difference(ours, theirs) -> float:
    """Of numbers in nested lists and dictionaries, of which theirs may be tensors; infinite if shapes differ."""
    if isinstance(ours, dict):
        return max(largest_difference(ours[name], theirs[name]) for name in theirs)
    if isinstance(ours, list) and isinstance(ours[0], dict):
        pairs = zip(ours, theirs, strict=True)
        return max(largest_difference(a, b) for a, b in pairs)
    ours, theirs = torch.tensor(ours, dtype=torch.float64), torch.as_tensor(theirs, dtype=torch.float64)
    return (ours.flatten() - theirs.flatten()).abs().max().item() if ours.numel() == theirs.numel() else math.inf


@pytest.fixture(scope="module")
def trajectory() -> dict:
    return json.loads(json.dumps(benchmark.trajectory(UPDATES)))


def test_the_golden_file_is_what_the_program_computes(trajectory):
    golden = json.loads((Path(__file__).parent / "golden/micro.json").read_text())
    assert golden.keys() == trajectory.keys()
    for name in ("format", "flags", "random_numbers", "words", "choices"):
        assert golden[name] == trajectory[name]
    for name in golden.keys() - {"format", "flags", "words"}:
        assert largest_difference(trajectory[name], golden[name]) < PRECISION, name


def test_torch_computes_the_same(trajectory):
    expected = torch_trajectory(seed=1)
    for name, theirs in expected.items():
        difference = largest_difference(trajectory[name], theirs)
        assert difference < PRECISION, f"{name}: {difference}"


# ---- Its parts -----------------------------------------------------------------------------------------------------


def test_gradients_are_those_of_finite_differences():
    """Of a loss in which every operation acts. Each weight is moved by 1e-6 in both directions."""
    noise = micro.random_numbers(3)
    model = {"embedding": micro.rows(10, 2, 1.0, noise), "hidden": micro.rows(3, 9, 1.0, noise)}
    model |= {"words": micro.rows(9, 4, 1.0, noise), "head": micro.rows(1, 4, 1.0, noise)}

    def loss() -> micro.Scalar:
        state = micro.read(model, (1, 8, 3))
        ratios = [(logprob - micro.Scalar(-2.0)).exp() for logprob in micro.next_word(model, state)]
        clamped = [ratio.clamp(0.8, 1.2) * ratio for ratio in ratios]
        assert {ratio.data < 0.8 for ratio in ratios} == {True, False} and any(0.8 < r.data < 1.2 for r in ratios)
        return micro.mean(clamped) + micro.head(model, state) * micro.head(model, state)

    weights = micro.Adam(model).weights
    for weight, slope in zip(weights, micro.gradient(loss(), weights), strict=True):
        around = []
        for moved in (weight.data + 1e-6, weight.data - 1e-6):
            before, weight.data = weight.data, moved
            around.append(loss().data)
            weight.data = before
        assert slope == pytest.approx((around[0] - around[1]) / 2e-6, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("kl_coef", [0.05, 0.3, 2.0])
def test_the_optimum_is_better_than_any_policy_by_its_distance(kl_coef):
    """J of the optimum is J of any policy, plus kl_coef times its KL divergence from the optimum."""
    rng = random.Random(0)
    ref_probs, probs = ([rng.random() ** 3 for _ in micro.TEXTS] for _ in range(2))
    ref_probs, probs = ([p / sum(numbers) for p in numbers] for numbers in (ref_probs, probs))
    scores = [rng.gauss(0, 1) for _ in micro.TEXTS]
    by_text = [dict(zip(micro.TEXTS, numbers, strict=True)) for numbers in (ref_probs, scores)]
    best = micro.optimum(*by_text, kl_coef)
    best_j = micro.measure(best, *by_text, kl_coef)[0]
    kl = sum(p * math.log(p / q) for p, q in zip(probs, ref_probs, strict=True))
    j = sum(p * score for p, score in zip(probs, scores, strict=True)) - kl_coef * kl
    distance = sum(p * math.log(p / q) for p, q in zip(probs, best.values(), strict=True))
    assert sum(best.values()) == pytest.approx(1) and best_j == pytest.approx(j + kl_coef * distance)


def test_without_a_penalty_the_optimum_is_the_favourite_text():
    favourite = micro.TEXTS[99]
    ref_probs = dict.fromkeys(micro.TEXTS, 1 / 6561)
    best = micro.optimum(ref_probs, {text: float(text == favourite) for text in micro.TEXTS}, kl_coef=0.0)
    assert best[favourite] == pytest.approx(1)


def test_the_annotator_errs_as_often_as_told():
    good, bad, nonsense = (0, 1, 3, 5), (0, 1, 3, 7), (5, 5, 5, 5)
    noise = micro.random_numbers(1)
    for pair, share in (((good, bad), 0.8), ((nonsense, good), 0.2), ((bad, nonsense), 0.5)):
        taken = [micro.choose(pair, 0.2, noise)[0] == pair[0] for _ in range(4_000)]
        assert sum(taken) / len(taken) == pytest.approx(share, abs=0.03)


# ---- Estimators, in a world of texts of two words, where all pairs of texts can be listed, too ---------------------


def torch_estimators(policy: Weights, reference: Weights, scores: Tensor, kl_coef: float) -> dict[str, tuple]:
    """The bias and noise of gradients from two texts. Gradients of true J and KL are those of sums over all texts."""
    texts = torch.cartesian_prod(torch.arange(9), torch.arange(9))  # (81, 2)
    begun = torch.stack([torch.full_like(texts, EMPTY), torch.stack([texts[:, 0], torch.full((81,), EMPTY)], 1)], 1)

    def logprobs_of(model: Weights) -> Tensor:
        logits = affine(model["words"], hidden(model, begun.flatten(0, 1)))
        return logits.log_softmax(1).view(81, 2, 9).gather(2, texts[:, :, None]).squeeze(2)

    def gradient(loss: Tensor) -> Tensor:
        parts = torch.autograd.grad(loss, list(policy.values()), retain_graph=True, allow_unused=True)
        parts = [torch.zeros_like(w) if g is None else g for g, w in zip(parts, policy.values(), strict=True)]
        return torch.cat([part.flatten() for part in parts])

    logprobs, ref_logprobs = logprobs_of(policy), logprobs_of(reference).detach()
    values = affine(policy["head"], hidden(policy, begun.flatten(0, 1))).view(81, 2).detach()
    d = logprobs - ref_logprobs
    probs = logprobs.sum(1).exp()
    kl = (probs * d.sum(1)).sum()
    true_kl = gradient(kl)
    true_j = gradient((probs * scores).sum() - kl_coef * kl)
    losses = {}
    for k, loss in {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}.items():
        penalty = loss.detach()
        losses[f"KL: {k} in the reward"] = logprobs[:, 0] * penalty.sum(1) + logprobs[:, 1] * penalty[:, 1]
        losses[f"KL: {k} as a loss"] = loss.sum(1)
    first = -kl_coef * d[:, 0].detach()
    last = scores - kl_coef * d[:, 1].detach()
    delta = first + values[:, 1] - values[:, 0]
    last_delta = last - values[:, 1]
    losses["J: all rewards"] = logprobs.sum(1) * (first + last)
    for lam in ("1", "0.95", "0"):
        first_advantage = delta + float(lam) * last_delta
        losses[f"J: GAE, lambda {lam}"] = logprobs[:, 0] * first_advantage + logprobs[:, 1] * last_delta
    samples = {name: torch.stack([gradient(x) for x in loss]) for name, loss in losses.items()}  # (81, weights)
    pairs = {name: (rows[:, None] + rows[None, :]) / 2 for name, rows in samples.items()}  # (81, 81, weights)
    slopes = torch.stack([gradient(x) for x in logprobs.sum(1)])
    centred = ((first + last)[:, None] - (first + last)[None, :]) / 2  # the first text's return, less the pair's mean
    pairs["J: all rewards, less the mean of the group"] = centred[:, :, None] * (slopes[:, None] - slopes[None]) / 2
    found = {}
    weight = (probs[:, None] * probs[None, :]).detach()[:, :, None]
    for name, estimates in pairs.items():
        true = true_kl if name.startswith("KL") else true_j
        mean = (weight * estimates).sum((0, 1))
        noise = (weight * (estimates - mean) ** 2).sum().sqrt()
        found[name] = 100 * (mean - true).norm().item() / true.norm().item(), 100 * (noise / true.norm()).item()
    return found


def test_bias_and_noise_of_estimators_are_those_of_a_list_of_all_pairs(monkeypatch, capsys):
    monkeypatch.setattr(micro, "LENGTH", 2)
    monkeypatch.setattr(micro, "BEGINNINGS", [text for text in micro.BEGINNINGS if len(text) < 2])
    monkeypatch.setattr(micro, "TEXTS", list(itertools.product(range(9), repeat=2)))
    noise = micro.random_numbers(1)
    sizes = {"embedding": (10, 3), "hidden": (4, 7), "words": (9, 5), "head": (1, 5)}
    policy, reference = ({name: micro.rows(*size, 0.9, noise) for name, size in sizes.items()} for _ in range(2))
    scores = [2 * next(noise) for _ in micro.TEXTS]
    micro.compare_estimators(policy, reference, dict(zip(micro.TEXTS, scores, strict=True)), 0.4, n=2)
    printed = re.findall(r"(.+?) +bias +([\d.]+), noise +([\d.]+)", capsys.readouterr().out)
    models = [
        {name: torch.tensor(rows, dtype=torch.float64) for name, rows in benchmark.rows_of(model).items()}
        for model in (policy, reference)
    ]
    expected = torch_estimators(*map(cloned, models), torch.tensor(scores, dtype=torch.float64), 0.4)
    assert {name for name, _, _ in printed} == expected.keys() == micro.ESTIMATORS.keys()
    for name, *numbers in printed:
        assert [float(number) for number in numbers] == pytest.approx(expected[name], abs=0.051), name


# ---- The file and its command --------------------------------------------------------------------------------------


def test_it_is_short_and_imports_two_modules():
    source = PATH.read_text()
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [ast.unparse(node) for node in imports] == ["import math", "import sys"]
    lines = [line for line in source.splitlines() if line]
    assert sum(map(len, lines)) / len(lines) <= 66


@pytest.mark.parametrize("words", ["--updates 0", "--lr nan", "--lr -1", "--seed", "--nothing 1", "--__doc__ 1"])
def test_a_bad_flag_ends_in_one_line(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        micro.read_flags(words.split())
    assert stopped.value.code == 2
    assert re.fullmatch(rf"error: {words} ?.*--estimators.*--kl_coef\n", capsys.readouterr().err)


def test_flags_are_read():
    args = micro.read_flags(["--seed", "2", "--kl_coef", "0"])
    assert (args.seed, args.kl_coef, args.updates, micro.Args.seed) == (2, 0.0, 50, 1)
