"""small/micro.py computes what an independent version with torch does, and what its golden trajectory says."""

import json
import math
import subprocess
import sys
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
EMPTY = 9  # what stands in places without a word
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
