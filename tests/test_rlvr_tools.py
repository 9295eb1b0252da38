"""rlvr/tools.py: conversations with a tool, what they leave out of the training, and tools that misbehave."""

import dataclasses
import json
import math
import random
import re
import shutil
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from processes import launch_together
from runs import TINY_TOOLS, error_line, explained_metrics, interrupt, metrics_of, only
from test_rlvr_math import batch_from
from transformers import AutoTokenizer

from benchmark import worlds
from ppo_rlhf import sample
from ppo_rlhf.lib import command_line, learning_curves, tools, traces
from ppo_rlhf.lib.errors import InputError
from ppo_rlhf.report import derivation, page
from ppo_rlhf.rlvr import (
    arguments as rlvr_arguments,
    metrics as rlvr_metrics,
    policy as rlvr_policy,
    problems,
    tools as rlvr_tools,
)
from ppo_rlhf.tldr import responses as tldr_responses

# ---- Conversations ---------------------------------------------------------------------------------------------

PAD, END, STOP, WIDTH = 29, 4, 28, 14  # 29 ids; END ends a call


def odd_answer(written: list[int]) -> list[int]:
    """Answers of 0 to 3 tokens, which depend on all that was written."""
    total = sum((place + 1) * token for place, token in enumerate(written))
    return [(total + i) % 20 + 5 for i in range(total % 4)]


def slow_conversation(model, prompt: list[int], noise: np.ndarray, max_calls: int, temperature: float) -> tuple:
    """A response token by token, each from a forward pass over everything before it."""
    response, logprobs, begun, calls = [], [], 0, 0
    while len(response) < WIDTH:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0, -1, :PAD].numpy() / temperature
        p = np.exp(logits - logits.max())
        p /= p.sum()
        token = int(np.searchsorted(np.cumsum(p), noise[len(response)] * np.cumsum(p)[-1], side="right"))
        response.append(token)
        logprobs.append(math.log(p[token]))
        if token == STOP or (token == END and calls == max_calls):
            break
        if token == END:
            calls += 1
            answer = odd_answer(response[begun:])[: WIDTH - len(response)]
            response += answer
            logprobs += [math.nan] * len(answer)
            begun = len(response)
    padding = WIDTH - len(response)
    return response + [PAD] * padding, logprobs + [0.0] * padding


def test_a_conversation_agrees_with_a_slow_loop_of_each_row_alone(tiny_models):
    max_calls, generator = 3, torch.Generator().manual_seed(1)
    model = tiny_models("llama").double().eval()
    with torch.no_grad():
        model.lm_head.weight[END] *= 3  # so that it ends one token in four with the end of a call
    prompts = [torch.randint(5, 28, (n,), generator=generator).tolist() for n in (1, 4, 2, 6, 3, 5) * 4]
    contexts = torch.tensor([[PAD] * (6 - len(prompt)) + prompt for prompt in prompts])
    uniforms = torch.rand(len(prompts), WIDTH, generator=generator, dtype=torch.float64)
    talk = rlvr_tools.Conversation(call_end=END, max_calls=max_calls, answer=odd_answer)

    def converse(rows: list[int]) -> tuple:
        return rlvr_tools.converse(model, contexts[rows], uniforms[rows], PAD, PAD, 1.5, [STOP], talk)

    everyone = list(range(len(prompts)))
    responses, logprobs = converse(everyone)
    for row, prompt in enumerate(prompts):
        expected, expected_logprobs = slow_conversation(model, prompt, uniforms[row].numpy(), max_calls, 1.5)
        assert responses[row].tolist() == expected
        assert logprobs[row].numpy() == pytest.approx(expected_logprobs, abs=1e-9, nan_ok=True)
    # Whoever is sampled together, and in which order, changes nothing.
    for rows in (everyone[::-1], everyone[:5], [7]):
        again, _ = converse(rows)
        assert torch.equal(again, responses[rows])
    # All that can happen has happened.
    calls = (responses == END) & ~logprobs.isnan()
    assert logprobs.isnan().any() and (calls.sum(1) > max_calls).any() and (responses == STOP).any()
    assert (responses[:, -1] != PAD).any() and (calls.sum(1) == 0).any()
    assert logprobs[:, -1].isnan().any()  # an answer that is cut off by the greatest length


def test_every_answered_call_counts_even_with_an_empty_answer(tiny_tools, monkeypatch):
    """At most MAX_CALLS, not the tool's own text, and not a call in the last place."""
    monkeypatch.setattr(tools, "MAX_CALLS", 2)
    setup = setup_with(tiny_tools)
    (end,) = setup.tokenizer.encode("]")
    responses = torch.tensor([[end, 3, end, 5, end], [3, end, end, 5, 6], [3, 4, 5, 6, end], [end, 4, end, end, 6]])
    from_tool = torch.tensor([[0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    assert rlvr_metrics.answered_calls(setup, responses, from_tool).tolist() == [2, 1, 0, 2]


# ---- What is trained on ----------------------------------------------------------------------------------------

ARGUMENTS = (
    "--preset sums-tools --dtype float64 --ppo.batch_size 16 --ppo.total_episodes 48 --save_interval 1 "
    "--log_interval 1 --eval_interval 2 --eval_samples 2 --eval_problems 8 "
    "--task.response_length 24 --trace_interval 1 --ppo.advantage gae --ppo.samples_per_prompt 2 --ppo.lam 0.9 "
    "--ppo.gamma 0.95 --ppo.critic_lr 1e-3 --rewards.kl_coef 0.1 --ppo.lr 1e-3 "
    "--rewards.verifier own_functions:letters"
)


def arguments(world: Path) -> list[str]:
    return [*ARGUMENTS.split(), "--base_model", f"{world}/model", "--task.problems", str(world)]


@pytest.fixture
def episodes(tiny_tools, tmp_path, monkeypatch):
    """A rollout of sixteen episodes, of which the first two were written by hand, with its setup and networks."""
    monkeypatch.chdir(tmp_path)
    args = command_line.parse_args(rlvr_tools.PRESETS, arguments(tiny_tools))
    setup, actor_critic, reference = rlvr_policy.load(args)
    with torch.no_grad():  # the critic's head starts at 0, the policy at its reference
        actor_critic.critic.reward_head.weight.copy_(torch.linspace(-1, 1, 16)[None])
        actor_critic.lm_backbone.base_model.embed_tokens.weight.mul_(1.2)
    tokenizer, talk = setup.tokenizer, talk_of(setup)
    ids = [talk.call_end, *setup.ids.stops]
    one, two = (tokenizer.encode(text) for text in ("[7+5]", "#### 12"))
    own = [one, two + ids[1:], tokenizer.encode("[7]")]
    assert one[-1] == ids[0] and talk.answer(one) == tokenizer.encode("12")
    error = talk.answer(own[2])
    assert tokenizer.decode(error) == "error: failed" or tokenizer.decode(error) == "7"
    tool = tools.load_tool(args.tools.tool, "tools.tool")
    sampler, draw = rlvr_tools.sampler_with_tool(setup, actor_critic, tool), rlvr_policy.draw_problems(setup, 0, 0)
    with actor_critic.sampling():
        samples = sampler.sample(draw)
        ((responses, logprobs),) = samples.answers
        written = [one + tokenizer.encode("12") + own[1], own[2] + error]
        masks = [[1] * len(one) + [0, 0] + [1] * len(own[1]), [1] * len(own[2]) + [0] * len(error)]
        for row, tokens in enumerate(written):
            responses[row] = setup.ids.pad
            responses[row, : len(tokens)] = torch.tensor(tokens)
        # The log-probs that the sampler would have recorded of what was written by hand.
        whole = torch.cat([draw.requests[0].contexts, responses], 1)
        told = (whole, responses, setup.ids.pad, 1.0, setup.ids.pad)
        read = tldr_responses.response_statistics(actor_critic.lm_backbone, *told)[0]
        for row, mask in enumerate(masks):
            of_tool = ~torch.tensor(mask).bool()
            logprobs[row] = read[row].masked_fill(torch.arange(24) >= len(mask), 0)
            logprobs[row, : len(mask)].masked_fill_(of_tool, math.nan)
        networks = {"actor_critic": actor_critic, "reference": reference}
        rollout = rlvr_policy.make_rollout(setup, samples, **networks)
    expected = torch.zeros(2, 24, dtype=torch.bool)
    for row, mask in enumerate(masks):
        expected[row, : len(mask)] = torch.tensor(mask).bool()
    return setup, actor_critic, reference, rollout, expected


def test_masks_scores_and_kl_of_conversations(episodes):
    _, _, _, rollout, expected = episodes
    for mask in (rollout.mask, rollout.loss_mask):
        assert torch.equal(mask[:2], expected)
    assert rollout.stopped[:2].tolist() == [True, False]
    assert not (rollout.from_tool[2:] & rollout.mask[2:]).any()
    rewards, non_score_rewards, kl = rlvr_policy.token_rewards(rollout, 0.1, "k1")
    # The score is on the last token that the policy wrote: in the second row that is the end of its call.
    places = [int(row.nonzero()[-1]) for row in expected]
    assert (
        expected[0, places[0] - 1] and not expected[1, places[1] + 1] and rollout.responses[1, places[1] + 1] != 400
    )
    for row, place in enumerate(places):
        assert rewards[row, place] - non_score_rewards[row, place] == rollout.scores[row]
    assert (kl[~rollout.mask] == 0).all() and (rewards[~rollout.mask] == 0).all() and (kl[rollout.mask] != 0).any()
    for name in ("logprobs", "ref_logprobs", "values"):
        assert (getattr(rollout, name)[~rollout.mask] == 0).all() and getattr(rollout, name)[rollout.mask].all()


def test_lengths_that_are_punished_include_the_tools_tokens(episodes):
    """response_length includes them, too. The punishment rises to 1 at 24 tokens."""
    setup, actor_critic, reference, rollout, expected = episodes
    shaping = dataclasses.replace(setup.args.rewards, overlong_buffer=24)
    setup = dataclasses.replace(setup, args=dataclasses.replace(setup.args, rewards=shaping))
    answers = [(rollout.responses, rollout.sampler_logprobs.masked_fill(rollout.from_tool, math.nan))]
    draw = rlvr_policy.draw_problems(setup, 0, 0)
    samples = rlvr_policy.Samples(draw=draw, answers=answers, version=0, on_policy=True)
    again = rlvr_policy.make_rollout(setup, samples, actor_critic=actor_critic, reference=reference)
    lengths = (expected | rollout.from_tool[:2]).sum(1)
    assert rollout.from_tool[:2].any(1).all()
    torch.testing.assert_close((again.raw_scores - again.scores)[:2], lengths / 24, check_dtype=False)


def gradients_of(
    episodes, spoil: float | None = None, change: int | None = None, masked: bool = True
) -> torch.Tensor:
    """The gradient of one step. spoil: numbers of the tool's tokens; change: another answer in the first episode."""
    setup, actor_critic, reference, rollout, expected = episodes
    rewards = rlvr_policy.token_rewards(rollout, 0.1, "k1")
    found = rlvr_policy.compute_advantages(rollout, rewards[0], setup.args.ppo, torch.clone)
    batch = batch_from(rlvr_policy.Correction(episodes=rollout), rewards[0], found)
    if spoil is not None:
        names = ("logprobs", "ref_logprobs", "values", "advantages", "returns", "rewards", "kl", "weights")
        spoilt = {name: getattr(batch, name).masked_fill(~batch.mask, spoil) for name in names}
        batch = dataclasses.replace(batch, **spoilt)
    if change is not None:
        tokens = batch.query_responses.clone()
        tokens[0, -24 + int((~expected[0]).nonzero()[0])] = change
        batch = dataclasses.replace(batch, query_responses=tokens)
    if not masked:
        batch = dataclasses.replace(batch, mask=batch.responses != setup.ids.pad, loss_mask=batch.responses != 400)
    optimizers = {"policy": torch.optim.SGD(actor_critic.parameters(), lr=0.0)}
    rlvr_policy.update(
        setup,
        batch,
        actor_critic=actor_critic,
        reference=reference,
        optimizers=optimizers,
        minibatches=torch.arange(16)[None, None],
        policy_learns=True,
    )
    return torch.cat([p.grad.flatten() for p in actor_critic.parameters() if p.grad is not None])


def test_the_tools_tokens_are_context_and_nothing_else(episodes):
    gradient = gradients_of(episodes)
    assert gradient.isfinite().all() and gradient.any()
    for spoil in (math.nan, 1e9):  # no number of theirs reaches the gradient
        assert torch.equal(gradients_of(episodes, spoil), gradient)
    # But they are read: with another answer, the tokens after it have other log-probs.
    assert not torch.allclose(gradients_of(episodes, change=7), gradient)
    # The check rejects a loss over all tokens.
    assert not torch.allclose(gradients_of(episodes, masked=False), gradient)


# ---- Whole runs ------------------------------------------------------------------------------------------------


def run_in(folder: Path, monkeypatch, *words: str) -> Path:
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(learning_curves, "draw_learning_curves", lambda *_: None)  # which takes longer than the run
    rlvr_tools.train(command_line.parse_args(rlvr_tools.PRESETS, list(words)))
    return only(folder, "runs/*")


@pytest.fixture(scope="module")
def whole_run(tiny_tools, tmp_path_factory) -> Path:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return run_in(tmp_path_factory.mktemp("whole"), monkeypatch, *arguments(tiny_tools))


def test_a_run_leaves_calls_in_metrics_evaluation_and_traces(whole_run):
    rows = metrics_of(whole_run)
    assert len(rows) == 3 and all(row["val/tool_tokens"] > row["val/tool_calls"] > 0 for row in rows)
    assert all(row["objective/sampler_gap"] < 1e-9 and row["val/first_ratio_gap"] < 1e-9 for row in rows)
    assert (
        {name for name in rows[0] if "tool" in name} == {"val/tool_calls", "val/tool_tokens"} <= explained_metrics(3)
    )
    solved = [json.loads(line) for line in (whole_run / "evaluation.jsonl").read_text().splitlines()]
    assert any(re.search(r"\](error: |\d)", str(row)) for row in solved)
    trace = traces.read(whole_run, 0)
    assert trace.tokens["tool"].any() and not (trace.tokens["tool"] & trace.tokens["mask"]).any()
    # Before an answer, the next value is that of the token after it: the tool's tokens have none.
    settings = page.settings_of(page.read_run(whole_run))
    steps = derivation.steps_of(settings)
    for episode in page.episodes_of(trace, 0.1):
        numbers = derivation.derive(episode, settings, steps)
        assert not any(line.wrong for line in chain(*derivation.lines_of(episode, steps, numbers)))


def test_sample_says_that_a_policy_had_a_tool(whole_run, capsys):
    policy = only(whole_run.parent.parent, "models/*/policy")
    with pytest.raises(InputError, match="own_functions:letters"):
        sample.Comparison(sample.Args(policy=str(policy)))
    sample.Comparison(sample.Args(policy=str(policy)), trusted=True)
    said = capsys.readouterr().out
    assert "was trained with the tool" in said and "here nothing answers its calls" in said


def test_a_resumed_run_is_the_same_bit_for_bit(whole_run, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(whole_run.parents[1], tmp_path / "copy"))
    shutil.rmtree(folder / "models")
    copy = only(folder, "runs/*")
    interrupt(copy)
    run_in(folder, monkeypatch, "--resume", str(copy))
    assert metrics_of(copy) == metrics_of(whole_run)
    path = "models/*/policy/model.safetensors"
    assert only(folder, path).read_bytes() == only(whole_run.parents[1], path).read_bytes()


def test_passes_and_processes_change_nothing_but_rounding(whole_run, tiny_tools, tmp_path):
    chunks = ["--ppo.local_micro_batch_size", "2", "--ppo.local_rollout_batch_size", "4"]
    for result in launch_together(2, "rlvr/tools.py", *arguments(tiny_tools), *chunks, folder=tmp_path):
        assert result.status == 0, result.stderr
    for row, expected in zip(metrics_of(only(tmp_path, "runs/*")), metrics_of(whole_run), strict=True):
        assert row == pytest.approx(expected, rel=1e-9, abs=1e-9)


# ---- Tools -----------------------------------------------------------------------------------------------------


CALLS = {"12 * (7+5)": "144", "7/2": "3.5", "1/3": "0.333333", "-(2)": "-2", "0.1+0.2": "0.3", "7/0": tools.FAILED}
CALLS |= {"999999*999999": "999998000001", "9999999*999999": tools.TOO_LONG}  # 12 characters, and 13
WRONG = ("", "7+5=", "7 5", "2**9", "7//2", "seven", "5(3)", "(1,2)", "07+1", "1" * 101, "__import__('os')", "\0")
CALLS |= dict.fromkeys(WRONG, tools.SYNTAX)


def test_the_calculator():
    assert {call: tools.calculator(call) for call in CALLS} == CALLS


BAD = """
import os, signal, sys, time
class Unspeakable(Exception):
    def __str__(self): raise RuntimeError
def tool(call):
    print("noise"); print("more", file=sys.stderr)
    if call == "raise": raise RuntimeError("secret")
    if call == "\\n": raise Unspeakable
    if call == "nothing": return None
    if call == "loop":
        while True: pass
    if call == "crash": os.kill(os.getpid(), signal.SIGSEGV)
    if call == "deaf":
        signal.alarm(0)
        time.sleep(600)
    if call == "very long": return "7" * 10**7
    return call.upper()
"""


def test_a_tool_that_misbehaves_gives_a_short_text_and_works_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad_tools.py").write_text(BAD)
    for seconds, calls in (
        (600, {"raise": tools.FAILED, "crash": tools.FAILED, "very long": tools.TOO_LONG}),
        (1, {"loop": tools.TOO_SLOW, "deaf": tools.TOO_SLOW}),
    ):
        monkeypatch.setattr(tools, "SECONDS", seconds)
        tool = tools.load_tool("bad_tools:tool", "tools.tool")
        for call, text in calls.items():
            assert (call, tool(call)) == (call, text)
    assert tool("again\n\0") == "AGAIN\n\0"


def test_the_first_failure_of_a_tool_is_shown(tmp_path, monkeypatch, capsys):
    """In one line, whatever the exception says; the model reads none of it."""
    monkeypatch.setattr(tools, "SECONDS", 600)
    monkeypatch.chdir(tmp_path)
    Path("bad_tools.py").write_text(BAD)
    for call, shown in {
        "raise": "bad_tools:tool failed on 'raise': 'RuntimeError: secret'",
        "nothing": "bad_tools:tool failed on 'nothing': 'TypeError: it returns NoneType, not str'",
        "crash": "bad_tools:tool failed on 'crash': 'its process ended with status -11'",
        "\n": r"bad_tools:tool failed on '\n': 'bad_tools.Unspeakable: <exception str() failed>'",
    }.items():
        tool = tools.load_tool("bad_tools:tool", "tools.tool")
        assert [tool(call), tool(call)] == [tools.FAILED] * 2
        said = capsys.readouterr().out
        assert said.startswith(shown) and said.count("\n") == 1


def test_what_is_no_tool_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ends.py").write_text("import os\nos._exit(0)\n")
    for name in ("calculate", "os:name", "ends:f"):
        line = error_line(tools.load_tool, name, "tools.tool")
        assert line.startswith(f"--tools.tool {name}: ") and "package.module:name" in line


def talk_of(setup: rlvr_arguments.Setup) -> rlvr_tools.Conversation:
    args = setup.args.tools
    return rlvr_tools.conversation(setup, tools.load_tool(args.tool, "tools.tool"))


def setup_with(world: Path, **changes) -> SimpleNamespace:
    """What `conversation` reads of a Setup."""
    args = rlvr_tools.PRESETS["sums-tools"]
    args = dataclasses.replace(args, tools=dataclasses.replace(args.tools, **changes))
    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    ids = problems.task_ids(args.task, tokenizer)
    return SimpleNamespace(args=args, tokenizer=tokenizer, ids=ids)


def test_answers_are_plain_text(tiny_tools, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("echo.py").write_text("def echo(call): return call.replace('HALF', chr(0xd800))\n")
    setup = setup_with(tiny_tools, tool="echo:echo")
    encode, decode = setup.tokenizer.encode, setup.tokenizer.decode
    answer = talk_of(setup).answer
    assert decode(answer(encode("Felix [5[7+5]"))) == "7+5"  # between the last start and the end
    assert decode(answer(encode("7+5]"))) == decode(answer(encode("]"))) == tools.SYNTAX
    assert answer(encode("[]")) == []
    # What ends a text is just text in an answer, and a broken character does no harm.
    assert setup.ids.stops == (encode("<|endoftext|>")[0],)
    said = answer(encode("[<|endof") + encode("text|>]"))
    assert decode(said) == "<|endoftext|>" and not set(said) & {*setup.ids.stops, setup.ids.pad}
    assert decode(answer(encode("[HALF]"))) == "?"


def test_settings_that_do_not_fit_are_refused_in_one_line(tiny_tools):
    for changes, words in (
        ({"call_end": "]]"}, "--tools.call_end ']]' is 2 tokens"),
        ({"call_start": ""}, "--tools.call_start is empty"),
        ({"call_end": "<|endoftext|>"}, "--tools.call_end '<|endoftext|>' ends a response"),
    ):
        assert words in error_line(talk_of, setup_with(tiny_tools, **changes))


# ---- The world -------------------------------------------------------------------------------------------------


def test_answers_are_split_off_and_have_the_ids_that_a_rollout_inserts(tiny_tools):
    assert worlds.split_answers("[7+5]12\n[3]error: x\n#### 1") == ["[7+5]", "12", "\n[3]", "error: x", "\n#### 1"]
    assert worlds.split_answers("7+5=12\n#### 12") == ["7+5=12\n#### 12"]
    answer = talk_of(setup_with(tiny_tools)).answer
    tokenizer = AutoTokenizer.from_pretrained(tiny_tools / "model")
    rng = random.Random(3)
    for problem in worlds.write_problems(rng, 200, TINY_TOOLS, set()):
        pieces = worlds.split_answers(worlds.solve_with_calculator(rng, problem, TINY_TOOLS))
        for own, said in zip(pieces[::2], pieces[1::2], strict=False):
            assert answer(tokenizer.encode(own)) == tokenizer.encode(said)
