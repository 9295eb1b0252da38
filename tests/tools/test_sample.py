"""sample.py: what both models write and how it is scored, against the steps of a training update, one by one.

test_end_to_end.py runs it on the models of a whole run.
"""

import dataclasses
import json
import math
import shutil

import pytest
import torch
from replays import RewardModel, queries_in_order, stories_of, task_of, to_texts
from transformers import AutoTokenizer, GPT2LMHeadModel

from ppo_rlhf import sample, train_both, train_policy
from ppo_rlhf.train_policy import generate, response_logprobs, truncate_at


def test_changes_are_paired():
    """Differences 1 and 2: mean 1.5, deviation sqrt(0.5), standard error 0.5."""
    shared = {"query": "q", "base": "a A", "policy": "a b"}
    rows = [shared | {"base score": 1.0, "policy score": 2.0}, shared | {"base score": 3.0, "policy score": 5.0}]
    score, distinct = train_both.changes(rows)
    assert list(score.values()) == ["score", 2.0, 3.5, 1.5, pytest.approx(1.96 * 0.5)]
    assert list(distinct.values()) == ["distinct words", 0.5, 1.0, 0.5, 0.0]
    assert math.isnan(train_both.changes(rows[:1])[0]["± 95 %"])  # one difference has no deviation


def test_sample_continues_held_out_queries_as_training_does(both, tiny_world, tiny_reward, tmp_path):
    """At the task's temperature, up to the stop token, with both models, their scores and the KL."""
    task, folder = task_of(tiny_world), shutil.copytree(both.model("policy"), tmp_path / "policy")
    info = json.loads((folder / "ppo_rlhf.json").read_text())
    info |= {"task": dataclasses.asdict(task), "reward_model": str(tiny_reward)}
    (folder / "ppo_rlhf.json").write_text(json.dumps(info))
    comparison = sample.Comparison(sample.Args(policy=str(folder), seed=4))

    tokenizer = AutoTokenizer.from_pretrained(tiny_world / "model")
    pad, (stop,) = len(tokenizer), tokenizer.encode(".")
    stream = queries_in_order(stories_of(tiny_world)[49::50], tokenizer)
    queries = [next(stream) for _ in range(5)]
    prefix, suffix = tokenizer.encode(task.query_prefix), tokenizer.encode(task.query_suffix)
    contexts = torch.tensor([prefix + query + suffix for query in queries])  # (5, context_length)
    key = train_policy.keyed_generator(4, "sample", 0)
    noise = torch.rand(5, task.response_length, generator=key, dtype=torch.float64)
    reward_model = RewardModel(tiny_reward)
    base, policy = (GPT2LMHeadModel.from_pretrained(path) for path in (tiny_world / "model", folder))

    expected: dict[str, list] = {"query": to_texts(tokenizer, torch.tensor(queries))}
    for name, model in (("base", base), ("policy", policy)):
        responses, _ = generate(model, contexts, noise, pad, pad, task.temperature)
        cut = truncate_at(responses, stop, task.truncate_after, pad)
        expected[name] = to_texts(tokenizer, cut)
        scored = torch.cat([torch.tensor(queries), cut], 1).tolist()
        scores = [reward_model.score([token for token in row if token != pad]) for row in scored]
        expected[f"{name} score"] = scores
    tokens = torch.cat([contexts, responses], 1)  # the policy's
    under_base, own = (
        response_logprobs(reader, tokens, pad, contexts.shape[1], task.temperature, pad)[0]
        for reader in (base, policy)
    )
    expected["kl"] = (own - under_base).sum(1).tolist()
    assert (cut == pad).any()

    rows = comparison.rows(comparison.queries(5))
    for name, values in expected.items():
        of_rows = [row[name] for row in rows]
        assert of_rows == (values if isinstance(values[0], str) else pytest.approx(values, rel=1e-4, abs=1e-5)), name


def test_each_part_of_many_queries_has_sampling_noise_of_its_own(both, monkeypatch):
    """The same query six times, two at a time: another text for each, and the first two as if they were alone."""
    monkeypatch.setattr(sample, "AT_A_TIME", 2)
    comparison = sample.Comparison(sample.Args(policy=str(both.model("policy")), seed=4, temperature=3.0))
    queries = comparison.queries(1) * 6
    rows = comparison.rows(queries)
    assert len({row["policy"] for row in rows}) == 6 and rows[:2] == comparison.rows(queries[:2])
    assert rows[2:4] == comparison.rows(queries[:2], 1)
