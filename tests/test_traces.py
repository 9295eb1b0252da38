"""Traces: they hold the numbers of the run, change nothing in it, leave nothing when off, and survive a resume."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from processes import launch_together
from runs import (
    interrupt,
    meta_of,
    metrics_of,
    only,
    policy_arguments,
    posts_arguments,
    rows_of,
    samples_of,
    sums_arguments,
    trained,
    world_arguments,
)
from torch.testing import assert_close
from transformers import AutoModelForCausalLM
from whole_runs import Whole, check_same

from ppo_rlhf import train_policy
from ppo_rlhf.lib import pretrained
from ppo_rlhf.lib.errors import InputError
from ppo_rlhf.lib.traces import Trace, path_of, pieces
from ppo_rlhf.report import page, traces
from ppo_rlhf.rlvr import policy as rlvr_policy

UPDATES = (0, 2, 3)  # every second update, and the last
KEPT = [(update, again) for update in UPDATES for again in (False, True)]  # in chapters 2 and 3


@pytest.fixture(params=["both", "all_three", "groups"])
def traced(request) -> Whole:
    """A run of each chapter."""
    return request.getfixturevalue(request.param)


def policy_run(of: Whole) -> Path:
    return of.run("*policy")


def numbers_of(trace: Trace) -> dict[str, torch.Tensor]:
    return trace.tokens | trace.episodes


def test_a_resumed_run_has_the_same_traces_and_without_traces_nothing_changes(traced, tmp_path):
    """A function of the user's, which may keep something from call to call, is called no more often for a trace."""
    original, calls = policy_run(traced), []
    script = meta_of(original)["script"].replace("tldr_", "tldr/").replace("rlvr_", "rlvr/")
    kept_at_all = [(update, False) for update in UPDATES] if traced.script == "train_both.py" else KEPT
    assert traces.kept(original) == kept_at_all
    for interval in (2, 0):
        copy = traced.copy(tmp_path / str(interval))
        run = policy_run(copy)
        interrupt(run)
        shutil.rmtree(run / "traces")
        shutil.rmtree(copy.model("policy").parent)
        copy.resumed(run, "--trace_interval", str(interval), script=f"{script}.py")
        check_same(copy, traced)
        assert traces.kept(run) == [kept for kept in kept_at_all if interval and kept[0] >= 2]  # after the checkpoint
        for kept in traces.kept(run):
            assert path_of(run, *kept).read_bytes() == path_of(original, *kept).read_bytes()
        calls.append([path.read_text() for path in copy.folder.glob("calls.txt")])
    assert calls[0] == calls[1]


FAILING = """
import os
from pathlib import Path

def updates():
    return [file.read_text().count("\\n") - 1 for file in Path().glob("runs/*/metrics.csv")]

def score(queries, responses, answers=None):
    if os.environ.get("FAILS") == os.environ.get("RANK", "0") and max(updates(), default=0) > 0:
        raise TimeoutError("no answer")
    return [float(sum(map(str.isalnum, response)) % 2) for response in responses]

def own(queries, responses):
    if len(responses) > 2:  # it is tried with two
        raise TimeoutError("no answer")
    return [1.0] * len(responses)
"""


@pytest.mark.parametrize(
    ("script", "processes"), [("train_policy.py", 2), ("tldr/policy.py", 1), ("rlvr/policy.py", 1)]
)
def test_a_function_that_fails_costs_no_update(script, processes, tiny_world, tiny_posts, tiny_sums, tmp_path):
    """It fails in the second update, of two processes on one; a trace does not call it. No checkpoint is due.

    In chapter 2, a monitor that fails is NaN.
    """
    (tmp_path / "failing.py").write_text(FAILING)
    flags = "--ppo.batch_size 16 --ppo.total_episodes 32 --ppo.nminibatches 1 --save_interval 0 --trace_interval 1 "
    if script == "train_policy.py":
        arguments = [*world_arguments(tiny_world), *policy_arguments()]
        flags += "--rewards.function failing:score"
    elif script == "tldr/policy.py":
        arguments = [*posts_arguments(tiny_posts), "--base_model", f"{tiny_posts}/model"]
        flags += "--rewards.function failing:score --rewards.monitor failing:own --eval_posts 4 --eval_interval 1"
    else:
        arguments = sums_arguments(tiny_sums)
        flags += "--rewards.verifier failing:score"
    arguments += flags.split()
    results = launch_together(processes, script, *arguments, folder=tmp_path, FAILS=str(processes - 1))
    assert [result.status for result in results] == [2] * processes, results
    line, run = results[0].stderr.splitlines()[-1], only(tmp_path, "runs/*")
    assert "TimeoutError: no answer" in line and " after update 1" in line
    assert line.endswith(f" with --resume {run}") and len(metrics_of(run)) == 1
    results = launch_together(processes, script, "--resume", str(run), folder=tmp_path)
    assert [result.status for result in results] == [0] * processes, results
    assert [row["step"] for row in metrics_of(run)] == [0, 1]
    if script == "rlvr/policy.py":
        return
    for row in metrics_of(run):
        assert {name for name, value in row.items() if math.isnan(value)} == {name for name in row if "own" in name}
    for file in (run / "meta.json", *run.glob("checkpoints/*/state.json")):  # JSON has no NaN
        json.loads(file.read_text(), parse_constant=pytest.fail)
    for table in run.glob("evaluation.jsonl"):
        assert [row["own"] for row in rows_of(table)] == [None] * 4
    assert page.render(page.read_run(run))


def test_two_processes_leave_the_traces_of_one(groups, groups_on_two):
    for kept in KEPT:
        one, two = (traces.read(policy_run(run), *kept) for run in (groups, groups_on_two))
        assert (one.queries, one.responses, one.texts) == (two.queries, two.responses, two.texts)
        for name, expected in numbers_of(one).items():
            assert_close(numbers_of(two)[name], expected, rtol=1e-7, atol=1e-9, equal_nan=True)


def test_clipping_and_samples_of_continuations(both):
    """The first group, all of which the trace holds here: 16 episodes in 2 groups."""
    run, clipped = policy_run(both), 0
    for update in (0, 2, 3):
        trace = traces.read(run, update)
        x = numbers_of(trace)
        assert_close(x["ratio"], torch.exp(x["new_logprobs"] - x["logprobs"]))
        expected = (x["advantages"] > 0) & (x["ratio"] > 1.01) | (x["advantages"] < 0) & (x["ratio"] < 0.99)
        assert torch.equal(x["clipped"].bool(), expected)
        clipped += expected.sum()
        three = [sample for sample in samples_of(run) if sample["step"] == update]
        assert x["kl"].sum(1)[:3].tolist() == pytest.approx([sample["kl"] for sample in three], rel=1e-4)
        assert x["scores"][:3].tolist() == pytest.approx([sample["score"] for sample in three], rel=1e-6)
        for shown_pieces, scored, query, sample in zip(
            trace.responses, x["scored"], trace.queries, three, strict=False
        ):
            shown = "".join(piece for piece, counts in zip(shown_pieces, scored, strict=True) if counts)
            assert (query, shown) == (sample["query"], sample["response"])
    assert clipped


def test_the_ratio_is_that_of_the_policy_after_the_update(both):
    """After the last update it is the policy that was saved."""
    trace, folder = traces.read(policy_run(both), 3), both.model("policy")
    policy = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = pretrained.load_tokenizer(str(folder))
    temperature = meta_of(policy_run(both))["args"]["task"]["temperature"]
    for query, ids, new_logprobs in zip(
        trace.queries, trace.tokens["ids"], trace.tokens["new_logprobs"], strict=True
    ):
        context = tokenizer.encode(query)
        logits = policy(torch.tensor([[*context, *ids.tolist()]])).logits[0, len(context) - 1 : -1] / temperature
        expected = logits.log_softmax(1).gather(1, ids.unsqueeze(1)).squeeze(1)
        assert_close(new_logprobs, expected, rtol=1e-5, atol=1e-4, check_dtype=False)


def test_each_minibatch_of_a_group_has_its_own_statistics():
    """Chapter 1's whitening, undone: 2 epochs of 3 minibatches, which have 2 episodes of each of 2 groups."""
    ppo = train_policy.PpoArgs(batch_size=12, nminibatches=3, noptepochs=2, whiten_groups=2)
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 12, 5, generator=generator).double()
    permutations = train_policy.draw_permutations(1, 0, ppo.noptepochs, range(2), group_batch=6)
    returns, advantages, whitened = torch.zeros(3, 2, 12, 5).double()
    for epoch in range(2):
        for k in range(3):
            inds = permutations[epoch, :, 2 * k : 2 * k + 2] + torch.tensor([[0], [6]])  # (groups, 2)
            found = train_policy.group_advantages(rewards[inds], values[inds], ppo)
            advantages[epoch, inds], returns[epoch, inds] = found
            for rows in inds:
                whitened[epoch, rows] = train_policy.whiten(rewards[rows], keep_mean=True)
    tokens = {"rewards": rewards, "values": values}
    x = traces.statistics(tokens, returns, permutations, dataclasses.asdict(ppo), shown=12)
    x = {name: tensor.T.unsqueeze(2) for name, tensor in x.items()}  # (epochs, 12, 1)
    assert_close((rewards - x["reward_mean"]) / x["reward_deviation"] + x["reward_mean"], whitened)
    assert_close((returns - values - x["advantage_mean"]) / x["advantage_deviation"], advantages)
    assert set(x["tokens"].flatten().tolist()) == set(x["values"].flatten().tolist()) == {4 * 5}


def test_summaries_end_and_have_references(all_three):
    trace = traces.read(policy_run(all_three), 0)
    for response, length in zip(trace.responses, trace.tokens["mask"].sum(1), strict=True):
        assert any(response[:length]) and not any(response[length:])
    assert trace.episodes["stopped"].any()
    assert len(trace.texts["reference"]) == 8 and all(trace.texts["reference"])


def test_groups_are_whole_and_a_users_verifier_scores_no_trace(groups):
    for kept in KEPT:
        trace = traces.read(policy_run(groups), *kept)
        x = numbers_of(trace)
        assert [x["groups"].tolist().count(group) for group in dict.fromkeys(x["groups"].tolist())] == [4, 4]
        assert len(set(trace.queries)) == 2 and all(trace.texts["answer"])
        assert x["scores"].isnan().all() == trace.again and ("advantages" in x) != trace.again


@pytest.mark.parametrize("traced", ["all_three", "groups"], indirect=True)
def test_the_same_queries_are_answered_again_with_the_same_noise(traced):
    run = policy_run(traced)
    repeated = [traces.read(run, *kept) for kept in KEPT if kept[1]]
    for trace in repeated:
        x = trace.tokens
        mask = x.get("mask", torch.ones_like(x["kl"])).bool()
        assert trace.queries == repeated[0].queries and len(set(trace.queries)) in (2, 8)
        assert_close(x["kl"][mask], (x["logprobs"] - x["ref_logprobs"])[mask])
        if trace.update < 3 and "rewards" in x:
            kl_coef = metrics_of(run)[trace.update + 1]["objective/kl_coef"]
            expected = trace.episodes["scores"] - kl_coef * (x["kl"] * mask).sum(1)
            assert_close(x["rewards"].sum(1), expected, equal_nan=True, check_dtype=False)


def test_without_a_reference_nothing_is_said_of_one(tiny_sums, tmp_path):
    settings = "--rewards.kl_coef 0 --ppo.advantage grpo --ppo.samples_per_prompt 4 --ppo.critic_warmup 0 "
    settings += "--ppo.total_episodes 16 --trace_interval 1 --eval_interval 0"
    run = trained(rlvr_policy, tmp_path, [*sums_arguments(tiny_sums), *settings.split()])
    for again in (False, True):
        assert not {"ref_logprobs", "kl"} & traces.read(run, 0, again).tokens.keys()
    one_run = page.read_run(run)
    rendered, text = page.render(one_run), page.explained(one_run, 0, 1, 1)
    assert "reward: r_t = " in text and "WRONG" not in text
    for said in (text, rendered.partition('"steps":')[2].partition("</script>")[0]):
        assert "log-prob, reference" not in said and 'title":"KL"' not in said and "\nKL: " not in said


def test_a_trace_that_is_damaged_is_named(both, tmp_path):
    (tmp_path / "traces").mkdir()
    whole = path_of(policy_run(both), 0).read_bytes()
    for content in (b"", whole[:-1]):
        path_of(tmp_path, 0).write_bytes(content)
        with pytest.raises(InputError, match=r"0\.safetensors is damaged"):
            traces.read(tmp_path, 0)


def test_the_pieces_of_a_text_make_the_text(tiny_world):
    tokenizer = pretrained.load_tokenizer(f"{tiny_world}/model")
    text = "Mara gave Ömer a 🦜. "
    tokens, pad = tokenizer.encode(text), pretrained.vocabulary_size(tokenizer)
    assert len(tokens) > len(text.split())
    found = pieces(tokenizer, [*tokens[:3], pad, *tokens[3:], pad], pad)
    assert "".join(found) == text and found[3] == found[-1] == "" and "🦜" in "".join(found[-8:])
    assert "\ufffd" in "".join(pieces(tokenizer, tokenizer.encode("🦜")[:1], pad))  # not whole to the end
    # Chapter 1 keeps the beginnings of a text.
    for part in (tokens, tokens[:-3]):
        beginnings = [tokenizer.decode(part[: end + 1]) for end in range(len(part))]
        assert traces.pieces(beginnings) == pieces(tokenizer, part, pad)
