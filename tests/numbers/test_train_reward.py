"""train_reward.py as a whole: runs against their replay from proven parts, and mistakes that the replay rejects.

The replay is the algorithm written out once more, in plain loops. What it takes from train_reward.py are functions
that the golden numbers prove: the sampler, the model's forward pass and Adam.
"""

import contextlib
import io
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from mistakes import put, put_unchanged, titles
from replays import LabelKind, labels_of, mean, queries_in_order, stories_of, task_of, trained_on
from runs import metrics_of, only, samples_of
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModel, AutoTokenizer, GPT2LMHeadModel, GPT2Model

from ppo_rlhf import train_reward
from ppo_rlhf.train_reward import (
    AdamTensorFlowStyle,
    Args,
    RewardModel,
    generate,
    keyed_generator,
    load_pretrained,
    vocabulary_size,
)

STEPS, BATCH, TRAINED, SAMPLES = 5, 8, 40, 32
HELD_OUT: dict[LabelKind, int] = {"best": 56, "score": 50, "difference": 56}  # of 96; six ratings are not used at all
KINDS: dict[LabelKind, dict[str, bool]] = {
    "best": {"normalize_before": True, "normalize_after": True},
    "score": {"normalize_before": True, "normalize_after": True},
    "difference": {"normalize_before": True, "normalize_after": False},
}


def reward_args(world: Path, labels: Path, kind: LabelKind = "best") -> Args:
    """Five steps; twenty samples to normalise on are asked for, and two rollout batches of 16 make 32."""
    return Args(
        base_model=f"{world}/model",
        dtype="float64",
        save_interval=0,
        label_dataset=str(labels),
        num_train=TRAINED,
        batch_size=BATCH,
        lr=1e-2,
        normalize_samples=20,
        rollout_batch_size=SAMPLES // 2,
        task=task_of(world),
        **KINDS[kind],
    )


# ---- The replay ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Left:
    """What a run leaves, or should."""

    metrics: list[dict[str, float]]
    results: dict
    weights: dict[str, torch.Tensor]


def statistics_of(kind: LabelKind, scores: torch.Tensor, targets: list) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of scores (batch, n), with its gradient, and what else is logged of them."""
    losses = []
    for row, target in zip(scores, targets, strict=True):
        if kind == "best":
            losses.append(row.exp().sum().log() - row[target])
        else:
            losses.append((target - (row[0] if kind == "score" else row[1] - row[0])) ** 2)
    loss, numbers = sum(losses) / len(losses), scores.tolist()
    if kind == "score":
        predictions = [row[0] for row in numbers]
        corr = np.corrcoef(targets, predictions)[0, 1]
        return loss, {"label_mean": np.mean(targets), "label_var": np.var(targets), "corr": corr}
    if kind == "best":
        right = [row.index(max(row)) == target for row, target in zip(numbers, targets, strict=True)]
    else:
        right = [(row[1] > row[0]) == (target > 0) for row, target in zip(numbers, targets, strict=True)]
    return loss, {"accuracy": mean(right)}


def replay(args: Args, world: Path, kind: LabelKind) -> Left:
    """What a run with these arguments must leave, on one process or on many."""
    task = args.task
    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    pad = len(tokenizer)
    prefix, suffix = tokenizer.encode(task.query_prefix), tokenizer.encode(task.query_suffix)
    language_model = GPT2LMHeadModel.from_pretrained(world / "model", dtype=torch.float64)
    torch.manual_seed(args.seed)
    reward_model = RewardModel(GPT2Model.from_pretrained(world / "model", dtype=torch.float64)).double()
    optimizer = AdamTensorFlowStyle(reward_model.parameters(), lr=0.0)
    rows = [
        {
            key: [pad if i == 50259 else i for i in value] if isinstance(value, list) else value
            for key, value in r.items()
        }
        for r in json.loads(Path(args.label_dataset).read_text())
    ]
    sample_keys = {"best": ["sample0", "sample1", "sample2", "sample3"], "score": ["sample"]}.get(
        kind, ["sample0", "sample1"]
    )
    stream = queries_in_order(trained_on(stories_of(world)), tokenizer)

    def score(chosen: list[dict]) -> torch.Tensor:
        texts = [row["query"] + row[key] for row in chosen for key in sample_keys]
        return reward_model(torch.tensor(texts), pad).view(len(chosen), -1)

    @torch.no_grad()
    def normalize(stage: str, target_mean: float, target_std: float) -> None:
        queries = [next(stream) for _ in range(SAMPLES)]
        contexts = torch.tensor([prefix + query + suffix for query in queries])
        generator = keyed_generator(args.seed, "normalize", stage)
        noise = torch.rand(SAMPLES, task.response_length, generator=generator, dtype=torch.float64)
        responses, _ = generate(language_model, contexts, noise, pad, pad, task.temperature)
        reward_model.gain.fill_(1)
        reward_model.bias.fill_(0)
        scores = reward_model(torch.cat([torch.tensor(queries), responses], dim=1), pad).numpy()
        reward_model.gain.fill_(target_std / scores.std())
        reward_model.bias.fill_(target_mean - target_std / scores.std() * scores.mean())

    if args.normalize_before:
        targets = np.array([row[kind] for row in rows[:TRAINED]]) / (2 if kind == "difference" else 1)
        normalize("before", *((0, 1) if kind == "best" else (targets.mean(), targets.std())))
    order = torch.randperm(TRAINED, generator=keyed_generator(args.seed, "labels")).tolist()
    metrics = []
    for step in range(STEPS):
        chosen = [rows[i] for i in order[step * BATCH : (step + 1) * BATCH]]
        loss, others = statistics_of(kind, score(chosen), [row[kind] for row in chosen])
        optimizer.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(float((p.grad**2).sum()) for p in reward_model.parameters()))
        lr = args.lr * (1 - step * BATCH / TRAINED)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        named = {"loss": loss.item(), **others, "gradient_norm": norm, "lr": lr}
        named |= {"gain": reward_model.gain.item(), "bias": reward_model.bias.item()}
        metrics.append(
            {"step": step}
            | {f"train/{name}": number for name, number in named.items()}
            | {f"train_reward/minibatch/{name}": loss.item() for name in ("loss", "error")}
        )
    with torch.no_grad():
        held_out = rows[-HELD_OUT[kind] :]
        scores, targets = score(held_out), [row[kind] for row in held_out]
        loss, others = statistics_of(kind, scores, targets)
    if args.normalize_after:
        normalize("after", 0, 1)
    results = {"test_loss": loss.item(), "test_labels": len(held_out)}
    if kind == "score":
        spearman = scipy.stats.spearmanr(scores[:, 0].numpy(), targets).statistic
        results |= {"test_corr": others["corr"], "test_spearman": spearman}
    else:
        results |= {"test_accuracy": others["accuracy"], "chance": 1 / len(sample_keys)}
    return Left(metrics, results | {"ceiling": 0.75, "skipped_queries": 0}, reward_model.state_dict())


# ---- A run is its replay ---------------------------------------------------------------------------------------


def saved_model(folder: Path) -> RewardModel:
    model = RewardModel(load_pretrained(str(folder), torch.float64, auto_class=AutoModel)).double()
    model.load_state_dict(load_file(folder / "reward_head.safetensors"), strict=False)
    return model


def run_in(folder: Path, args: Args, patch: pytest.MonkeyPatch) -> Left:
    """Run train_reward.train in this process, without its output."""
    patch.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        saved = train_reward.train(args)
    weights = saved_model(saved).state_dict() | load_file(saved / "reward_head.safetensors")
    results = json.loads((only(folder, "runs/*") / "meta.json").read_text())["results"]
    return Left(metrics_of(only(folder, "runs/*")), results, weights)


def check_same(left: Left, expected: Left) -> None:
    assert len(left.metrics) == len(expected.metrics)
    for row, expected_row in zip(left.metrics, expected.metrics, strict=True):
        assert row == pytest.approx(expected_row, rel=1e-9, abs=1e-12)
    assert left.results == pytest.approx(expected.results, rel=1e-9)
    assert set(left.weights) == set(expected.weights)
    for name, weight in expected.weights.items():
        rows = slice(len(weight)) if name == "lm_backbone.wte.weight" else ...  # a row for the padding was added
        assert_close(left.weights[name][rows], weight, rtol=1e-9, atol=1e-12)


@pytest.fixture(scope="module")
def all_args(tiny_world, tmp_path_factory) -> dict[LabelKind, Args]:
    folder, made = tmp_path_factory.mktemp("labels"), {}
    for kind in KINDS:
        (folder / f"{kind}.json").write_text(json.dumps(labels_of(tiny_world, kind)))
        facts = {"ceiling": 0.75} | ({"held_out": HELD_OUT[kind]} if kind == "score" else {})
        (folder / f"{kind}.meta.json").write_text(json.dumps(facts))
        made[kind] = reward_args(tiny_world, folder / f"{kind}.json", kind)
    return made


@pytest.fixture(scope="module")
def expected(all_args, tiny_world) -> dict[LabelKind, Left]:
    return {kind: replay(args, tiny_world, kind) for kind, args in all_args.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_reward_run_is_its_replay(kind, all_args, expected, tiny_world, tmp_path, monkeypatch):
    check_same(run_in(tmp_path, all_args[kind], monkeypatch), expected[kind])
    # [D80] As a policy's run, it shows samples: of the first label that is held out, with what the saved model says.
    label = labels_of(tiny_world, kind)[-HELD_OUT[kind]]
    saved = saved_model(only(tmp_path, "models/*/reward"))
    tokenizer = AutoTokenizer.from_pretrained(all_args[kind].base_model)
    keys = [key for key in label if key.startswith("sample")]
    for row, key in zip(samples_of(only(tmp_path, "runs/*")), keys, strict=False):
        query, sample = ([token for token in label[name] if token != 50259] for name in ("query", key))
        assert (row["query"], row["sample"]) == (tokenizer.decode(query), tokenizer.decode(sample))
        score = saved(torch.tensor([query + sample]), vocabulary_size(tokenizer))
        assert row["score"] == pytest.approx(score.item(), abs=1e-9)


# ---- Negative controls: the replay rejects each of these mistakes ----------------------------------------------

FILES = ("train_reward.py",)
MISTAKES = titles(
    "train_reward.py",
    *("train", "sample_query_responses", "normalize", "gain_and_bias", "target_scale", "label_loss", "load_models"),
    *("evaluate", "reward_sizes", "learning_rate_at"),
)
KIND_OF: dict[str, LabelKind] = {  # of label, where it isn't a choice
    "normalize: learned bias is kept": "score",
    "normalize: ratings on another scale": "score",
    "normalize: scale of the whole file": "score",
    "normalize: scale of the whole differences": "difference",
    "normalize: the scale of the labels again": "score",
    "labels: the first sample is the better one": "difference",
    "held_out: loss of ratings on another scale": "score",
    "held_out: ranks are ratings": "score",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_detected(mistake, all_args, expected, tmp_path, monkeypatch):
    kind = KIND_OF.get(mistake, "best")
    put(mistake, FILES, monkeypatch)
    left = run_in(tmp_path, all_args[kind], monkeypatch)
    with pytest.raises(AssertionError):
        check_same(left, expected[kind])


def test_a_function_without_a_mistake_passes(all_args, expected, tmp_path, monkeypatch):
    put_unchanged(MISTAKES, FILES, monkeypatch)
    check_same(run_in(tmp_path, all_args["best"], monkeypatch), expected["best"])


# ---- Where training begins, and what is saved ------------------------------------------------------------------


def test_without_learning_and_normalising_the_model_is_the_pretrained_one(
    all_args, tiny_world, tmp_path, monkeypatch
):
    args = replace(all_args["best"], lr=1e-300, normalize_before=False, normalize_after=False)
    weights = run_in(tmp_path, args, monkeypatch).weights
    assert weights["gain"] == 1 and weights["bias"].abs() < 1e-299
    for name, weight in GPT2Model.from_pretrained(tiny_world / "model").state_dict().items():
        left = weights[f"lm_backbone.{name}"][: len(weight)]  # a row for the padding was added
        assert_close(left, weight.double(), rtol=0, atol=1e-299, msg=name)


# ---- Ratings and differences by hand ---------------------------------------------------------------------------


def test_ranks():
    """Equal values share the mean of their ranks: the two 5s have ranks 2 and 3."""
    assert train_reward.ranks(torch.tensor([5.0, 1.0, 5.0, 9.0])).tolist() == [2.5, 1.0, 2.5, 4.0]


def test_equal_scores_have_no_correlation():
    assert train_reward.label_statistics("score", torch.ones(3, 1), torch.arange(3.0))["corr"] == 0
