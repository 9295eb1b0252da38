"""Traces: they hold the numbers of the run, change nothing in it, leave nothing when off, and survive a resume."""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import launch, launch_together
from runs import metrics_of, only, policy_arguments, posts_arguments, samples_of, world_arguments
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ppo_rlhf import train_policy
from ppo_rlhf.lib import pretrained, traces
from ppo_rlhf.lib.errors import InputError
from ppo_rlhf.report import derivation, page
from ppo_rlhf.rlvr import policy as rlvr_policy
from ppo_rlhf.tldr import policy as tldr_policy

CONTINUATIONS = (
    "--rewards.function letters:gold --rewards.monitor ppo_rlhf.worlds.tales:sentiment.gold_scores --dtype float64 "
    "--ppo.lr 0.01"
)
SUMMARIES = (
    "--rewards.function ppo_rlhf.worlds.posts:gold_scores --rewards.monitor letters:own --dtype float64 "
    "--ppo.lr 0.01 --ppo.total_episodes 64 "
    "--ppo.batch_size 16 --ppo.nminibatches 1 --save_interval 2 --log_interval 1 --eval_interval 0 --eval_posts 8"
)
GROUPS = (
    "--rewards.verifier letters:letters --rewards.kl_coef 0.1 --dtype float64 --ppo.lr 0.01 --ppo.batch_size 16 "
    "--ppo.samples_per_prompt 4 --ppo.total_episodes 64 --ppo.nminibatches 1 --save_interval 2 --log_interval 1 "
    "--eval_interval 0 --eval_samples 0 --eval_problems 4 --task.response_length 20 --ppo.local_micro_batch_size 256"
)
LETTERS = """
import os
from ppo_rlhf.worlds import posts, tales

calls = {"score": 0, "own": 0}
fails = {"score": range(0), "own": range(0)}
if wanted := os.environ.get(f"FAILS_{os.environ.get('RANK', '0')}"):  # whose calls, and which: from one, to another
    name, first, last = wanted.split()
    fails[name] = range(int(first), int(last) + 1)

def count(responses, name="score"):
    calls[name] += 1
    if calls[name] in fails[name]:
        raise TimeoutError("no answer")
    with open("calls.txt", "a") as file:
        file.write(f"{len(responses)}\\n")

def letters(prompts, responses, answers):
    count(responses)
    return [float(sum(map(str.isalnum, response)) % 2) for response in responses]

def gold(queries, responses):
    count(responses)
    return tales.sentiment.gold_scores(queries, responses)

def gold_of_posts(queries, responses):
    count(responses)
    return posts.gold_scores(queries, responses)

def own(queries, responses):
    count(responses, "own")
    return [float(len(response)) for response in responses]
"""
UNSCORED = {
    "train_policy.py": "raw_scores",
    "tldr/policy.py": "own",
    "rlvr/policy.py": "verifier",
}  # if answered again
KEPT = [(update, again) for update in (0, 2, 3) for again in (False, True)]  # every second update, and the last


@dataclass(frozen=True)
class Traced:
    script: str
    arguments: list[str]
    folder: Path  # where it was started
    calls: list[str]  # of functions of the user's, how many texts each time

    @property
    def run(self) -> Path:
        return only(self.folder, "runs/*")


def start(script: str, arguments: list[str], folder: Path) -> Traced:
    folder.mkdir(exist_ok=True)
    (folder / "letters.py").write_text(LETTERS)
    result = launch(script, *arguments, folder=folder)
    assert result.status == 0, result.stdout + result.stderr
    return Traced(script, arguments, folder, (folder / "calls.txt").read_text().splitlines())


@pytest.fixture(scope="session")
def continuations(tiny_world, tmp_path_factory) -> Traced:
    arguments = [*world_arguments(tiny_world), *policy_arguments(), *CONTINUATIONS.split(), "--trace_interval", "2"]
    return start("train_policy.py", arguments, tmp_path_factory.mktemp("continuations"))


@pytest.fixture(scope="session")
def summaries(tiny_posts, tmp_path_factory) -> Traced:
    arguments = [*posts_arguments(tiny_posts), "--base_model", f"{tiny_posts}/model", *SUMMARIES.split()]
    return start("tldr/policy.py", [*arguments, "--trace_interval", "2"], tmp_path_factory.mktemp("summaries"))


@pytest.fixture(scope="session")
def groups(tiny_sums, tmp_path_factory) -> Traced:
    arguments = ["--preset", "sums-grpo", "--base_model", f"{tiny_sums}/model", "--task.problems", str(tiny_sums)]
    arguments += [*GROUPS.split(), "--trace_interval", "2"]
    return start("rlvr/policy.py", arguments, tmp_path_factory.mktemp("groups"))


@pytest.fixture(params=["continuations", "summaries", "groups"])
def traced(request) -> Traced:
    return request.getfixturevalue(request.param)


def test_a_trace_changes_nothing_in_the_run_and_none_leaves_nothing(traced, tmp_path):
    off = start(traced.script, [*traced.arguments, "--trace_interval", "0"], tmp_path / "off")
    assert traces.kept(traced.run) == KEPT
    assert not (off.run / "traces").exists()
    assert metrics_of(off.run) == metrics_of(traced.run)
    # A function of the user's may keep something from call to call, so it is called no more often.
    assert len(off.calls) > 4 and off.calls == traced.calls
    for update, again in KEPT:
        scores = traces.read(traced.run, update, again).episodes
        known = {name for name in scores if scores[name].isfinite().any()}
        assert again == (UNSCORED[traced.script] not in known) and "stopped" in known


def test_a_resumed_run_has_the_traces_of_one_that_nothing_happened_to(traced, tmp_path):
    run = tmp_path / "runs" / traced.run.name
    shutil.copytree(traced.run, run)
    shutil.rmtree(run / "checkpoints" / "4")
    for update, again in KEPT[2:]:  # after the checkpoint
        traces.path_of(run, update, again).write_bytes(b"of another course")
    result = launch(traced.script, "--resume", str(run), folder=traced.folder)
    assert result.status == 0, result.stderr
    assert traces.kept(run) == KEPT
    for kept in KEPT:
        assert traces.path_of(run, *kept).read_bytes() == traces.path_of(traced.run, *kept).read_bytes()


# The call of the function in the last update, after those that try it and that normalise its scores.
LAST_UPDATE = {"train_policy.py": 6, "tldr/policy.py": 8, "rlvr/policy.py": 5}


@pytest.mark.parametrize("processes", [1, 2])
def test_a_function_that_fails_once_costs_no_update(traced, processes, tmp_path):
    """Of two processes, one fails. Checkpoints are due after two and four updates, and the last update fails."""
    if processes == 2 and traced.script != "train_policy.py":
        pytest.skip("all chapters save what is finished in the same way")
    (tmp_path / "letters.py").write_text(LETTERS)
    function, call = "ppo_rlhf.worlds.posts:gold_scores", LAST_UPDATE[traced.script]
    arguments = ["letters:gold_of_posts" if word == function else word for word in traced.arguments]
    failure = {f"FAILS_{processes - 1}": f"score {call} {call}"}
    results = launch_together(processes, traced.script, *arguments, folder=tmp_path, **failure)
    assert [result.status for result in results] == [2] * processes, results
    line, run = results[0].stderr.splitlines()[-1], only(tmp_path, "runs/*")
    assert "TimeoutError: no answer" in line and "stops after update 3, with a checkpoint" in line
    assert line.endswith(f"resume with --resume {run}") and len(metrics_of(run)) == 3
    assert (run / "checkpoints/3").is_dir()
    results = launch_together(processes, traced.script, "--resume", str(run), folder=tmp_path)
    assert [result.status for result in results] == [0] * processes, results
    if processes == 1:
        assert metrics_of(run) == metrics_of(traced.run)
        weights = [only(folder, "models/*/policy/model.safetensors") for folder in (tmp_path, traced.folder)]
        assert weights[0].read_bytes() == weights[1].read_bytes()
    else:
        for row, expected in zip(metrics_of(run), metrics_of(traced.run), strict=True):
            assert row == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_monitor_that_fails_is_nan_and_changes_nothing_else(summaries, tmp_path):
    """It fails whenever it is called but when it is tried. JSON has no NaN, and a resumed run knows what was NaN."""
    (tmp_path / "letters.py").write_text(LETTERS)
    arguments, failure = [*summaries.arguments, "--eval_interval", "3"], "own 2 999"
    result = launch(summaries.script, *arguments, folder=tmp_path, FAILS_0=failure)
    assert result.status == 0, result.stderr
    assert result.stdout.count("TimeoutError: no answer") == 1 and "own is logged as NaN" in result.stdout
    run = only(tmp_path, "runs/*")
    rows, names = metrics_of(run), {"objective/own", "eval/own", "eval/reference_own"}
    for row, expected in zip(rows, metrics_of(summaries.run), strict=True):
        assert {name for name, value in row.items() if math.isnan(value)} == names
        assert {name: row[name] for name in expected.keys() - names}.items() <= expected.items()
    shutil.rmtree(run / "checkpoints" / "4")
    assert launch(summaries.script, "--resume", str(run), folder=tmp_path, FAILS_0=failure).status == 0
    assert str(metrics_of(run)) == str(rows)
    for file in (run / "meta.json", run / "checkpoints/4/state.json"):
        json.loads(file.read_text(), parse_constant=pytest.fail)
    for line in (run / "evaluation.jsonl").read_text().splitlines():
        assert json.loads(line, parse_constant=pytest.fail)["own"] is None
    assert page.render(page.read_run(run))


def test_without_a_reference_nothing_is_said_of_one(tiny_sums, tmp_path):
    arguments = ["--preset", "sums-grpo", "--base_model", f"{tiny_sums}/model", "--task.problems", str(tiny_sums)]
    arguments += [*GROUPS.replace("kl_coef 0.1", "kl_coef 0").replace("episodes 64", "episodes 16").split()]
    run = start("rlvr/policy.py", [*arguments, "--trace_interval", "1"], tmp_path / "run").run
    for again in (False, True):
        assert not {"ref_logprobs", "kl"} & traces.read(run, 0, again).tokens.keys()
    one_run = page.read_run(run)
    rendered = page.render(one_run)
    text = page.explained(one_run, 0, 1, 1)
    assert "reward: r_t = " in text and "WRONG" not in text
    for said in (text, rendered.partition('"steps":')[2].partition("</script>")[0]):
        assert "log-prob, reference" not in said and 'title":"KL"' not in said and "\nKL: " not in said


def test_two_processes_leave_the_traces_of_one(traced, tmp_path):
    (tmp_path / "letters.py").write_text(LETTERS)
    arguments = [*traced.arguments, "--ppo.local_micro_batch_size", "4"]
    for result in launch_together(2, traced.script, *arguments, folder=tmp_path):
        assert result.status == 0, result.stderr
    run = only(tmp_path, "runs/*")
    for kept in KEPT:
        one, two = traces.read(traced.run, *kept), traces.read(run, *kept)
        assert (one.queries, one.responses, one.texts) == (two.queries, two.responses, two.texts)
        for name, expected in (one.tokens | one.episodes).items():
            found = (two.tokens | two.episodes)[name]
            torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9, equal_nan=True)


def exactly(value, digits=8):
    """What page.rounded does, without rounding."""
    if isinstance(value, list):
        return [exactly(one) for one in value]
    return value if math.isfinite(value) else None


def derived(run: Path) -> Iterator[tuple[dict, list[derivation.Line]]]:
    """The derivation of every token in the traces of a run, in each epoch, with its episode."""
    one_run = page.read_run(run)
    settings = page.settings_of(one_run)
    steps = derivation.steps_of(settings)
    for update in one_run.kept():
        episodes = one_run.episodes(update)
        for episode in episodes:
            for epoch in range(max(len(episode["epochs"].get("new_logprobs", [])), 1)):
                group = page.group_of(episode, episodes)
                numbers = derivation.derive(episode, settings, steps, epoch, group)
                for lines in derivation.lines_of(episode, steps, numbers, epoch):
                    yield episode, lines


def test_numbers_of_a_trace_follow_from_each_other(traced, monkeypatch):
    """Every token of a trace of each chapter: KL, rewards, advantages and returns are those that the run recorded."""
    monkeypatch.setattr(page, "rounded", exactly)
    checked = dict.fromkeys(derivation.RECORDED, 0)
    for episode, lines in derived(traced.run):
        for line in lines:
            assert episode["again"] or line.result != "?", line.step.title
            if line.recorded == line.recorded:
                assert line.value == pytest.approx(line.recorded, rel=0, abs=1e-12), line.step.name
                checked[line.step.recorded] += 1
    assert min(checked[name] for name in ("kl", "rewards", "advantages")) > 400
    assert (checked["returns"] > 500) == (traced.script != "rlvr/policy.py")


MISTAKES = {  # in the text of an expression, which every chapter has
    "score on every token": ("-kl_coef * kl", "-kl_coef * kl + score"),
    "no score": ("-kl_coef * kl + score", "-kl_coef * kl"),
    "another estimate of the KL": ("kl_form", "abs(kl_form)"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_differs_from_what_was_recorded(mistake, traced, monkeypatch):
    right, wrong = MISTAKES[mistake]
    for row in [row for row in derivation.TABLE["step"] if row["expression"] == right]:
        monkeypatch.setitem(row, "expression", wrong)
    assert sum(line.wrong for _, lines in derived(traced.run) for line in lines) > 5


def test_clipping_and_samples_of_continuations(continuations):
    """The first group, all of which the trace holds here: 16 episodes in 2 groups."""
    samples = samples_of(continuations.run)
    for update in (0, 2, 3):
        trace = traces.read(continuations.run, update)
        x = {name: tensor.double().numpy() for name, tensor in (trace.tokens | trace.episodes).items()}
        np.testing.assert_allclose(x["ratio"], np.exp(x["new_logprobs"] - x["logprobs"]), rtol=1e-12)
        above, below = x["ratio"] > 1.2, x["ratio"] < 0.8
        clipped = (x["advantages"] > 0) & above | (x["advantages"] < 0) & below
        np.testing.assert_array_equal(x["clipped"].astype(bool), clipped)
        three = [sample for sample in samples if sample["step"] == update]
        np.testing.assert_allclose(x["kl"].sum(1)[:3], [sample["kl"] for sample in three], rtol=1e-9)
        np.testing.assert_allclose(x["scores"][:3], [sample["score"] for sample in three])
        for episode, sample in enumerate(three):
            pieces = trace.responses[episode]
            shown = "".join(piece for piece, scored in zip(pieces, x["scored"][episode], strict=True) if scored)
            assert (trace.queries[episode], shown) == (sample["query"], sample["response"])


def test_the_ratio_is_that_of_the_policy_after_the_update(continuations, tiny_world):
    """After the last update it is the policy that was saved."""
    trace = traces.read(continuations.run, 3)
    folder = only(continuations.folder, "models/*/policy")
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = pretrained.load_tokenizer(str(folder))
    temperature = json.loads((continuations.run / "meta.json").read_text())["args"]["task"]["temperature"]
    for query, ids, new_logprobs in zip(
        trace.queries, trace.tokens["ids"], trace.tokens["new_logprobs"], strict=True
    ):
        context = tokenizer.encode(query)
        logits = policy(torch.tensor([[*context, *ids.tolist()]])).logits[0, len(context) - 1 : -1] / temperature
        expected = logits.log_softmax(1).gather(1, ids.unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(new_logprobs, expected, rtol=1e-5, atol=1e-5)


def test_masks_of_summaries(summaries):
    """What stands after the end of a summary counts nowhere, but for the value of the state after it."""
    ended = 0
    for update in (0, 2, 3):
        trace = traces.read(summaries.run, update)
        x = {name: tensor.numpy() for name, tensor in (trace.tokens | trace.episodes).items()}
        for i, length in enumerate(x["mask"].sum(1)):
            assert x["mask"][i, :length].all() and not x["mask"][i, length:].any()
            assert x["value_mask"][i].sum() == min(length + 1, x["mask"].shape[1])
            assert any(trace.responses[i][:length]) and not any(trace.responses[i][length:])
            ended += x["stopped"][i]
        assert len(trace.texts["reference"]) == 8 and all(trace.texts["reference"])
    assert ended


def test_groups_are_whole(groups):
    """A response is better or worse than the others to its prompt, in all its tokens alike."""
    differ = 0
    for kept in KEPT:
        trace = traces.read(groups.run, *kept)
        x = trace.tokens | trace.episodes
        assert [x["groups"].tolist().count(group) for group in dict.fromkeys(x["groups"].tolist())] == [4, 4]
        assert len(set(trace.queries)) == 2 and all(trace.texts["answer"])
        if trace.again:
            assert "advantages" not in x and x["scores"].isnan().all()
            continue
        mask = x["mask"].bool()
        ratio = torch.exp(x["new_logprobs"] - x["logprobs"])
        torch.testing.assert_close(x["ratio"][mask], ratio[mask], rtol=1e-12, atol=0)
        differ += len(set(x["scores"].tolist())) > 1
    assert differ


def test_the_same_queries_are_answered_again_with_the_same_noise(traced):
    first = traces.read(traced.run, 0)
    repeated = [traces.read(traced.run, *kept) for kept in KEPT if kept[1]]
    for trace in repeated:
        x = trace.tokens
        mask = x.get("mask", torch.ones_like(x["kl"])).bool()
        assert trace.queries == repeated[0].queries and len(set(trace.queries)) in (2, 8)
        torch.testing.assert_close(x["kl"][mask], (x["logprobs"] - x["ref_logprobs"])[mask], rtol=0, atol=1e-12)
        penalty = metrics_of(traced.run)[trace.update + 1]["objective/kl_coef"] if trace.update < 3 else None
        if penalty is not None:
            expected = trace.episodes["scores"] - penalty * (x["kl"] * mask).sum(1)
            torch.testing.assert_close(x["rewards"].sum(1), expected, rtol=1e-9, atol=1e-9, equal_nan=True)
    if traced.script == "train_policy.py":  # chapter 1 takes the first queries, chapter 2 held-out posts
        assert first.queries == repeated[0].queries


def test_a_trace_that_is_damaged_is_named(continuations, tmp_path):
    (tmp_path / "traces").mkdir()
    whole = traces.path_of(continuations.run, 0).read_bytes()
    for content in (b"", whole[:100], whole[:-1]):
        traces.path_of(tmp_path, 0).write_bytes(content)
        with pytest.raises(InputError, match=r"0\.safetensors is damaged"):
            traces.read(tmp_path, 0)


def test_tensors_can_be_read_without_us(continuations):
    tensors = load_file(traces.path_of(continuations.run, 0))
    assert tensors["tokens.logprobs"].shape == (8, 24) and tensors["episodes.scores"].shape == (8,)


def test_the_pieces_of_a_text_make_the_text(tiny_world):
    tokenizer = pretrained.load_tokenizer(f"{tiny_world}/model")
    text = "Mara gave Ömer a 🦜. "
    tokens, pad = tokenizer.encode(text), pretrained.vocabulary_size(tokenizer)
    assert len(tokens) > len(text.split())
    pieces = traces.pieces(tokenizer, [*tokens[:3], pad, *tokens[3:], pad], pad)
    assert "".join(pieces) == text and pieces[3] == pieces[-1] == "" and "🦜" in "".join(pieces[-8:])
    assert "\ufffd" in "".join(traces.pieces(tokenizer, tokenizer.encode("🦜")[:1], pad))  # not whole to the end


@pytest.mark.parametrize("script", [train_policy, tldr_policy, rlvr_policy])
def test_only_the_worlds_leave_traces_unasked(script):
    tracing = {name for name, args in script.PRESETS.items() if args.trace_interval}
    assert tracing == {name for name in script.PRESETS if name.startswith(("tales", "posts", "sums", "reviews"))}
