"""Traces: they hold the numbers of the run, change nothing in it, leave nothing when off, and survive a resume."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from invented_traces import write_meta, write_trace
from processes import launch_together
from runs import (
    interrupt,
    meta_of,
    metrics_of,
    only,
    policy_arguments,
    posts_arguments,
    samples_of,
    sums_arguments,
    trained,
    world_arguments,
)
from torch.testing import assert_close
from transformers import AutoModelForCausalLM
from whole_runs import Whole, check_same

from ppo_rlhf import train_policy
from ppo_rlhf.report import derivation, page, traces
from ppo_rlhf.rlvr import policy as rlvr_policy

UPDATES = [0, 2, 3]  # every second update, and the last


@pytest.fixture(params=["both", "all_three", "groups"])
def traced(request) -> Whole:
    """A run of each chapter."""
    return request.getfixturevalue(request.param)


def policy_run(of: Whole) -> Path:
    return of.run("*policy")


def numbers_of(trace: traces.Trace) -> dict[str, torch.Tensor]:
    return trace.tokens | trace.episodes


def test_a_resumed_run_has_the_same_traces_and_without_traces_nothing_changes(traced, tmp_path):
    """A function of the user's, which may keep something from call to call, is called no more often for a trace."""
    original, calls = policy_run(traced), []
    script = meta_of(original)["script"].replace("tldr_", "tldr/").replace("rlvr_", "rlvr/")
    assert traces.kept(original) == UPDATES
    for interval in (2, 0):
        copy = traced.copy(tmp_path / str(interval))
        run = policy_run(copy)
        interrupt(run)
        shutil.rmtree(run / "traces")
        shutil.rmtree(copy.model("policy").parent)
        copy.resumed(run, "--trace_interval", str(interval), script=f"{script}.py")
        check_same(copy, traced)
        assert traces.kept(run) == [update for update in UPDATES if interval and update >= 2]  # after the checkpoint
        for update in traces.kept(run):
            assert traces.path_of(run, update).read_bytes() == traces.path_of(original, update).read_bytes()
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
"""


@pytest.mark.parametrize(
    ("script", "processes"), [("train_policy.py", 2), ("tldr/policy.py", 1), ("rlvr/policy.py", 1)]
)
def test_a_function_that_fails_costs_no_update(script, processes, tiny_world, tiny_posts, tiny_sums, tmp_path):
    """It fails in the second update, of two processes on one; a trace does not call it. No checkpoint is due."""
    (tmp_path / "failing.py").write_text(FAILING)
    flags = "--ppo.batch_size 16 --ppo.total_episodes 32 --ppo.nminibatches 1 --save_interval 0 --trace_interval 1 "
    if script == "train_policy.py":
        arguments = [*world_arguments(tiny_world), *policy_arguments()]
        flags += "--rewards.function failing:score"
    elif script == "tldr/policy.py":
        arguments = [*posts_arguments(tiny_posts), "--base_model", f"{tiny_posts}/model"]
        flags += "--rewards.function failing:score --eval_posts 4 --eval_interval 1"
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
    assert page.render(page.read_run(run))


def test_two_processes_leave_the_traces_of_one(groups, groups_on_two):
    for update in UPDATES:
        one, two = (traces.read(policy_run(run), update) for run in (groups, groups_on_two))
        assert (one.queries, one.responses, one.texts) == (two.queries, two.responses, two.texts)
        for part in ("tokens", "episodes", "epochs", "statistics"):
            assert_close(getattr(two, part), getattr(one, part), rtol=1e-7, atol=1e-9, equal_nan=True)


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
    tokenizer = train_policy.load_tokenizer(str(folder), trust_remote_code=False)
    temperature = meta_of(policy_run(both))["args"]["task"]["temperature"]
    for query, ids, new_logprobs in zip(
        trace.queries, trace.tokens["ids"], trace.tokens["new_logprobs"], strict=True
    ):
        context = tokenizer.encode(query)
        logits = policy(torch.tensor([[*context, *ids.tolist()]])).logits[0, len(context) - 1 : -1] / temperature
        expected = logits.log_softmax(1).gather(1, ids.unsqueeze(1)).squeeze(1)
        assert_close(new_logprobs, expected, rtol=1e-5, atol=1e-4, check_dtype=False)


def whiten_by_hand(values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, float, float]:
    """Whitened values, 0 where the mask is False; mean and deviation."""
    mean = values[mask].mean().item()
    deviation = math.sqrt(values[mask].var(unbiased=False).item() + 1e-8)
    return ((values - mean) / deviation).masked_fill(~mask, 0), mean, deviation


def traced_half(folder: Path, script: str, args: dict, half: int, **parts: dict[str, torch.Tensor]) -> traces.Trace:
    """The trace of an update by a process that has the first `half` rows of parts. There are texts of four rows."""
    write_meta(folder, script, **args)
    tokens = {name: tensor[:half].contiguous() for name, tensor in parts["tokens"].items()}
    epochs = {name: x[:, :half] if x.dim() == 3 and x.shape[2] == 6 else x for name, x in parts["epochs"].items()}
    episodes = {name: tensor[:half] for name, tensor in parts["episodes"].items()}
    words = {"queries": [*"abcd"], "responses": [[*"efghij"]] * 4}
    write_trace(folder, 0, **words, tokens=tokens, episodes=episodes, epochs=epochs)
    return traces.read(folder, 0)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=["double", "float"])
@pytest.mark.parametrize(
    ("script", "half"),
    [("train_policy", 12), ("tldr_policy", 12), ("tldr_policy", 6)],
    ids=["chapter 1", "chapter 2", "one process of two"],
)
def test_mean_and_deviation_are_those_of_everything_that_was_whitened_together(script, half, dtype, rtol, tmp_path):
    """Two epochs of three minibatches. In chapter 1, two groups of six rows are each whitened by themselves."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([6, 1, 2, 3, 4, 5]).repeat(2).unsqueeze(1)
    mask, value_mask = torch.arange(6) < lengths, torch.arange(6) < lengths + 1
    if script == "train_policy":
        mask = value_mask = torch.ones(12, 6, dtype=torch.bool)
    rewards, values = torch.randn(2, 12, 6, generator=generator).to(dtype).masked_fill(~value_mask, 0)
    orders = torch.stack([torch.randperm(6, generator=generator) for _ in range(4)]).view(2, 2, 6)
    thirds = (orders + torch.tensor([[0], [6]])).view(2, 2, 3, 2)  # (epochs, halves, minibatches, rows)
    returns, advantages = torch.zeros(2, 2, 12, 6, dtype=dtype)
    expected = {}
    for epoch in range(2):
        for k in range(3):
            for rows in thirds[epoch, :, k] if script == "train_policy" else thirds[epoch, :, k].reshape(1, 4):
                r, mean, deviation = whiten_by_hand(rewards[rows], value_mask[rows])
                r = (r + mean).masked_fill(~value_mask[rows], 0)
                raw, returns[epoch, rows] = train_policy.compute_gae(r, values[rows], 0.9, 0.8)
                advantages[epoch, rows], *of_advantages = whiten_by_hand(raw, mask[rows])
                counts = (mask[rows].sum(), value_mask[rows].sum())
                if script == "train_policy":
                    counts = (24, 24)  # tokens of the minibatch, two rows of each group
                expected |= {(epoch, row): (mean, deviation, *of_advantages, *counts) for row in rows.tolist()}
    epochs = {"advantages": advantages, "returns": returns, "new_logprobs": values, "new_values": values}
    epochs |= {"new_logprobs": torch.zeros(2, 12, 6), "new_values": torch.zeros(2, 12, 6)}
    if script == "train_policy":
        epochs["permutations"] = orders
    else:
        epochs["minibatches"] = thirds[:, 0] if half == 6 else thirds.transpose(1, 2).reshape(2, 3, 4)
        both = thirds.transpose(1, 2).reshape(2, 3, 4)
        epochs["token_counts"], epochs["value_counts"] = (x[both].sum((2, 3)) for x in (mask, value_mask))
    tokens = {"scored": mask, "rewards": rewards, "values": values, "logprobs": torch.zeros(12, 6)}
    tokens |= {"new_logprobs": torch.zeros(12, 6)} | ({"value_mask": value_mask} if script != "train_policy" else {})
    ppo = {"batch_size": 12, "nminibatches": 3, "whiten_rewards": True, "gamma": 0.9, "lam": 0.8, "cliprange": 0.2}
    trace = traced_half(tmp_path, script, {"ppo": ppo}, half, tokens=tokens, epochs=epochs, episodes={})
    names = ("reward_mean", "reward_deviation", "advantage_mean", "advantage_deviation", "tokens", "values")
    assert trace.statistics.keys() == {*names}
    for (epoch, row), numbers in expected.items():
        if row < 4:
            found = [trace.statistics[name][row, epoch].item() for name in names]
            assert found == pytest.approx([float(number) for number in numbers], rel=rtol, abs=rtol)


@pytest.mark.parametrize(("half", "same"), [(12, 0), (6, 0), (6, 6), (6, 12)])
def test_groups_divisors_and_whitening_of_chapter_3(half, same, tmp_path):
    """Groups of three, the second with a text of one response. The advantages of so many rows are all the same."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(6) < torch.randint(1, 7, (12, 1), generator=generator)
    scores, drawn = torch.rand(2, 12, generator=generator).double()
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    raw = torch.randn(12, 6, generator=generator).double()
    raw[:same] = 0.5
    is_kept = torch.arange(12) != 5
    whitened, mean, deviation = whiten_by_hand(raw, mask & is_kept.unsqueeze(1))
    minibatches = torch.stack([torch.randperm(half, generator=generator).view(3, -1) for _ in range(2)])
    names = ("tokens", "sequences", "episodes", "right_tokens")
    counts = torch.randint(1, 99, (4, 2, 3), generator=generator)
    zeros = torch.zeros(12, 6)
    tokens = {"scored": mask, "mask": mask.clone(), "logprobs": zeros, "new_logprobs": zeros.clone()}
    tokens |= {"rewards": scores.unsqueeze(1) * last, "advantages": whitened, "raw_advantages": raw}
    episodes = {"scores": scores, "groups": torch.arange(12) // 3, "kept": is_kept, "baselines": drawn}
    epochs = dict(zip(names, counts, strict=True)) | {
        "minibatches": minibatches,
        "new_logprobs": torch.zeros(2, 12, 6),
    }
    args = {"ppo": {"advantage": "reinforce++-baseline", "cliprange_high": 0.2}, "rewards": {"kl_coef": 0.0}}
    trace = traced_half(tmp_path, "rlvr_policy", args, half, tokens=tokens, epochs=epochs, episodes=episodes)
    x = trace.statistics
    for row in range(4):
        for epoch in range(2):
            k = [row in rows.tolist() for rows in minibatches[epoch]].index(True)
            found = [x[name][row, epoch].item() for name in (*names, "length")]
            assert found == [*counts[:, epoch, k].tolist(), 6]
        assert (x["kept"][row].item(), x["baselines"][row].item()) == (True, drawn[row].item())
        found = [x[f"advantage_{name}"][row].item() for name in ("mean", "deviation")]
        if same == half:  # one point, which does not tell of others
            assert math.isnan(found[1])
        else:
            assert found == pytest.approx([mean, deviation], rel=1e-9)
    assert "kept" not in trace.episodes and "baselines" not in trace.episodes
    # What a response is compared with is its whole group, but for a response that was left out.
    settings = derivation.settings_of(args, "rlvr_policy")
    steps, found = derivation.steps_of(settings), [*page.with_groups(page.episodes_of(trace, None))]
    assert len(found) == 4
    for row, (episode, group) in enumerate(found):
        numbers = derivation.derive(episode, settings, steps, group=group)[0]
        others = scores[:3] if row < 3 else scores[3:5]
        expected = [others.mean().item(), others.std().item(), len(others)]
        assert [numbers[name] for name in ("group_mean", "group_deviation", "group_size")] == pytest.approx(expected)


def test_summaries_end_and_have_references(all_three):
    trace = traces.read(policy_run(all_three), 0)
    for response, length in zip(trace.responses, trace.tokens["mask"].sum(1), strict=True):
        assert any(response[:length]) and not any(response[length:])
    assert trace.episodes["stopped"].any()
    assert len(trace.texts["reference"]) == 8 and all(trace.texts["reference"])


def test_groups_are_whole(groups):
    for update in UPDATES:
        trace = traces.read(policy_run(groups), update)
        numbers = trace.episodes["groups"].tolist()
        assert [numbers.count(group) for group in dict.fromkeys(numbers)] == [4, 4]
        assert len(set(trace.queries)) == 2 and all(trace.texts["answer"])


def test_without_a_reference_nothing_is_said_of_one(tiny_sums, tmp_path):
    settings = "--rewards.kl_coef 0 --ppo.advantage grpo --ppo.samples_per_prompt 4 --ppo.critic_warmup 0 "
    settings += "--ppo.total_episodes 16 --trace_interval 1 --eval_interval 0"
    run = trained(rlvr_policy, tmp_path, [*sums_arguments(tiny_sums), *settings.split()])
    assert not {"ref_logprobs", "kl"} & traces.read(run, 0).tokens.keys()
    one_run = page.read_run(run)
    rendered, text = page.render(one_run), page.explained(one_run, 0, 1, 1)
    assert "reward: r_t = " in text and "WRONG" not in text
    for said in (text, rendered.partition('"steps":')[2].partition("</script>")[0]):
        assert "log-prob, reference" not in said and 'title":"KL"' not in said and "\nKL: " not in said


def test_the_pieces_of_a_text_make_the_text(tiny_world):
    tokenizer = train_policy.load_tokenizer(f"{tiny_world}/model", trust_remote_code=False)
    text = "Mara gave Ömer a 🦜. "
    tokens = tokenizer.encode(text)
    assert len(tokens) > len(text.split())
    beginnings = [tokenizer.decode(tokens[: end + 1]) for end in range(len(tokens))]
    found = traces.pieces(beginnings)
    assert "".join(found) == text and "🦜" in found  # whole, on the last of its tokens
    assert traces.pieces([*beginnings, text]) == [*found, ""]  # padding
    end = found.index("🦜")
    assert traces.pieces(beginnings[:end])[-1] == "\ufffd"  # not whole to the end
