"""rlvr/tools.py: conversations with a tool, what they leave out of the training, and tools that misbehave."""

import dataclasses
import math
import random
import re
from pathlib import Path

import pytest
import torch
from runs import TINY_TOOLS, check_close, error_line, explained_metrics, lines_of, metrics_of, only, rows_of, trained
from safetensors.torch import load_file
from transformers import AutoTokenizer

from benchmark import worlds
from ppo_rlhf import sample, train_policy
from ppo_rlhf.rlvr import policy as rlvr_policy, problems, tool_functions, tools as rlvr_tools
from ppo_rlhf.train_policy import InputError

# ---- Conversations ---------------------------------------------------------------------------------------------

PAD, END, STOP, WIDTH = 29, 4, 28, 14  # 29 ids; END ends a call


def odd_answer(written: list[int]) -> list[int]:
    """Answers of 0 to 3 tokens, which depend on all that was written."""
    total = sum((place + 1) * token for place, token in enumerate(written))
    return [(total + i) % 20 + 5 for i in range(total % 4)]


def slow_conversation(model, prompt: list[int], uniforms: torch.Tensor, max_calls: int, temperature: float) -> tuple:
    """A response token by token, each from a forward pass over everything before it."""
    response, logprobs, begun, calls = [], [], 0, 0
    while len(response) < WIDTH:
        before, uniform = torch.tensor([prompt + response]), uniforms[len(response)].view(1, 1)
        found, logprob = train_policy.generate(model, before, uniform, PAD, PAD, temperature)
        token = found.item()
        response.append(token)
        logprobs.append(logprob.item())
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
        expected, expected_logprobs = slow_conversation(model, prompt, uniforms[row], max_calls, 1.5)
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


def test_every_answered_call_counts_even_with_an_empty_answer(monkeypatch):
    """At most MAX_CALLS, not the tool's own text, and not a call in the last place."""
    monkeypatch.setattr(tool_functions, "MAX_CALLS", 2)
    end = 4
    responses = torch.tensor([[end, 3, end, 5, end], [3, end, end, 5, 6], [3, 7, 5, 6, end], [end, 7, end, end, 6]])
    from_tool = torch.zeros(4, 5, dtype=torch.bool)
    from_tool[0, 1] = from_tool[1, 2] = True
    assert rlvr_tools.answered_calls(responses, from_tool, end).tolist() == [2, 1, 0, 2]


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


class WritesTwo(rlvr_tools.SamplerWithTool):
    """The first two responses of a batch are written by hand: a correct call, and one too many."""

    def respond(self, contexts, uniforms, temperature):
        responses, logprobs = super().respond(contexts, uniforms, temperature)
        if len(responses) == 16:
            for row, rest in enumerate(("#### 12", "")):
                call = self.tokenizer.encode("[7+]" if row else "[7+5]")
                ours = [] if row else [*self.tokenizer.encode(rest), *self.ids.stops]  # after the answer
                said = self.conversation.answer(call)
                mask = torch.tensor([1] * len(call) + [0] * len(said) + [1] * len(ours)).bool()
                responses[row], logprobs[row] = self.ids.pad, 0
                responses[row, : len(mask)] = torch.tensor([*call, *said, *ours])
                logprobs[row, : len(mask)].masked_fill_(~mask, math.nan)
        return responses, logprobs


def test_rewards_of_tokens_are_not_for_what_a_tool_wrote(tiny_tools, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*arguments(tiny_tools), "--eval_interval", "0"]
    tokens = ("--rewards.verifier", "own_functions:one_for_each_token"), "token 5, which the policy did not write"
    steps = (
        ("--rewards.steps", "own_functions:hundredths"),
        "--rewards.steps: lines with a tool's answer are no steps",
    )
    for more, message in (tokens, steps):
        args = train_policy.parse_args(rlvr_tools.PRESETS, [*words, *more])
        with pytest.raises(InputError, match=message):
            rlvr_policy.train(args, WritesTwo(tool_functions.load_tool(args.tools.tool, "tools.tool")))


def test_masks_and_scores_of_conversations(tiny_tools, tmp_path, monkeypatch):
    """Of sixteen episodes, of which the first two are written by hand; a punishment rises to 1 at 24 tokens."""
    monkeypatch.chdir(tmp_path)
    words = [*arguments(tiny_tools), "--rewards.overlong_buffer", "24", "--ppo.total_episodes", "16"]
    args = train_policy.parse_args(rlvr_tools.PRESETS, words)
    rlvr_policy.train(args, WritesTwo(tool_functions.load_tool(args.tools.tool, "tools.tool")))
    trace = load_file(only(tmp_path, "runs/*/traces/0.safetensors"))
    tokens = {name.removeprefix("tokens."): x for name, x in trace.items() if name.startswith("tokens.")}
    encode = AutoTokenizer.from_pretrained(tiny_tools / "model").encode
    for row, (call, answer, rest) in enumerate((("[7+5]", "12", "#### 12"), ("[7+]", tool_functions.SYNTAX, ""))):
        call, said, ours = len(encode(call)), len(encode(answer)), 0 if row else len(encode(rest)) + 1
        expected = torch.tensor([1] * call + [0] * said + [1] * ours + [0] * (24 - call - said - ours)).bool()
        assert tokens["scored"][row].equal(expected) and tokens["mask"][row].equal(expected)
        assert tokens["tool"][row].nonzero()[:, 0].tolist() == [*range(call, call + said)]
        # The punished length includes the tool's tokens.
        punishment = trace["episodes.raw_scores"][row] - trace["episodes.scores"][row]
        assert punishment.item() == pytest.approx((call + said + ours) / 24)
        # The score is on the last token that the policy wrote: in the second row that is the end of its call.
        place = int(expected.nonzero()[-1])
        score = tokens["rewards"][row] + 0.1 * tokens["kl"][row]
        assert score[place].item() == pytest.approx(trace["episodes.scores"][row].item())
        assert score.count_nonzero() <= 1 or score.abs().sort().values[-2] < 1e-12
    assert trace["episodes.stopped"][:2].tolist() == [True, False]
    assert not (tokens["tool"] & tokens["scored"]).any()
    for name in ("rewards", "logprobs", "ref_logprobs"):
        assert (tokens[name][~tokens["scored"]] == 0).all() and (tokens[name][tokens["scored"]] != 0).any()


# ---- Whole runs ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_run(tiny_tools, tmp_path_factory) -> Path:
    return trained(rlvr_tools, tmp_path_factory.mktemp("whole"), arguments(tiny_tools))


def test_a_run_leaves_calls_in_metrics_evaluation_and_traces(whole_run):
    rows = metrics_of(whole_run)
    assert len(rows) == 3 and all(row["val/tool_tokens"] > row["val/tool_calls"] > 0 for row in rows)
    assert all(row["objective/sampler_gap"] < 1e-9 and row["val/first_ratio_gap"] < 1e-9 for row in rows)
    assert {name for name in rows[0] if "tool" in name} <= explained_metrics(3)
    assert any(re.search(r"\](error: |\d)", str(row)) for row in rows_of(whole_run / "evaluation.jsonl"))
    # Before an answer, the next value is that of the token after it: the tool's tokens have none.
    assert not [line for _, line in lines_of(whole_run) if line.wrong]


def test_sample_says_that_a_policy_had_a_tool(whole_run, in_a_fresh_folder, capsys):
    policy = only(whole_run.parent.parent, "models/*/policy")
    with pytest.raises(InputError, match="own_functions:letters"):
        sample.Comparison(sample.Args(policy=str(policy)))
    sample.Comparison(sample.Args(policy=str(policy)), trusted=True)
    said = capsys.readouterr().out
    assert "was trained with the tool" in said and "here nothing answers its calls" in said


def test_passes_change_nothing_but_rounding(whole_run, tiny_tools, tmp_path):
    """Also how many conversations go on together."""
    chunks = ["--ppo.local_micro_batch_size", "2", "--ppo.local_rollout_batch_size", "4"]
    in_chunks = trained(rlvr_tools, tmp_path, [*arguments(tiny_tools), *chunks])
    check_close(in_chunks, whole_run, rel=1e-9, abs=1e-9)


# ---- Tools -----------------------------------------------------------------------------------------------------


CALLS = {
    "12 * (7+5)": "144",
    "7/2": "3.5",
    "1/3": "0.333333",
    "-(2)": "-2",
    "0.1+0.2": "0.3",
    "7/0": tool_functions.FAILED,
}
CALLS |= {"999999*999999": "999998000001", "9999999*999999": tool_functions.TOO_LONG}  # 12 characters, and 13
WRONG = ("", "7+5=", "7 5", "2**9", "7//2", "seven", "5(3)", "(1,2)", "07+1", "1" * 101, "__import__('os')", "\0")
CALLS |= dict.fromkeys(WRONG, tool_functions.SYNTAX)


def test_the_calculator():
    assert {call: tool_functions.calculator(call) for call in CALLS} == CALLS


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


def test_a_tool_that_misbehaves_gives_a_short_text_and_works_again(in_a_fresh_folder, monkeypatch, capsys):
    """Its first failure is shown in one line, whatever the exception says; the model reads none of it."""
    Path("bad_tools.py").write_text(BAD)
    shown = {
        "raise": "bad_tools:tool failed on 'raise': 'RuntimeError: secret'",
        "nothing": "bad_tools:tool failed on 'nothing': 'TypeError: it returns NoneType, not str'",
        "crash": "bad_tools:tool failed on 'crash': 'its process ended with status -11'",
        "\n": r"bad_tools:tool failed on '\n': 'bad_tools.Unspeakable: <exception str() failed>'",
    }
    monkeypatch.setattr(tool_functions, "SECONDS", 600)
    for call, line in shown.items():
        tool = tool_functions.load_tool("bad_tools:tool", "tools.tool")
        assert [tool(call), tool(call)] == [tool_functions.FAILED] * 2
        said = capsys.readouterr().out
        assert said.startswith(line) and said.count("\n") == 1
    assert tool("very long") == tool_functions.TOO_LONG
    monkeypatch.setattr(tool_functions, "SECONDS", 1)
    tool = tool_functions.load_tool("bad_tools:tool", "tools.tool")
    assert [tool(call) for call in ("loop", "deaf")] == [tool_functions.TOO_SLOW] * 2
    assert tool("again\n\0") == "AGAIN\n\0"


def test_what_is_no_tool_is_refused_in_one_line(in_a_fresh_folder):
    Path("ends.py").write_text("import os\nos._exit(0)\n")
    for name in ("calculate", "os:name", "ends:f"):
        line = error_line(tool_functions.load_tool, name, "tools.tool")
        assert line.startswith(f"--tools.tool {name}: ") and "package.module:name" in line


def talk_of(world: Path, **changes: str) -> rlvr_tools.Conversation:
    """What a tool needs to answer calls. changes: of the tool's arguments."""
    args = rlvr_tools.PRESETS["sums-tools"]
    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    tools = dataclasses.replace(args.tools, **changes)
    tool = tool_functions.load_tool(tools.tool, "tools.tool")
    return rlvr_tools.conversation(tools, tool, tokenizer, problems.task_ids(args.task, tokenizer))


def test_answers_are_plain_text(tiny_tools, in_a_fresh_folder):
    Path("echo.py").write_text("def echo(call): return call.replace('HALF', chr(0xd800))\n")
    tokenizer = AutoTokenizer.from_pretrained(tiny_tools / "model")
    encode, decode = tokenizer.encode, tokenizer.decode
    answer = talk_of(tiny_tools, tool="echo:echo").answer
    assert decode(answer(encode("Felix [5[7+5]"))) == "7+5"  # between the last start and the end
    assert decode(answer(encode("7+5]"))) == decode(answer(encode("]"))) == tool_functions.SYNTAX
    assert answer(encode("[]")) == []
    # What ends a text is just text in an answer, and a broken character does no harm.
    (stop,) = encode("<|endoftext|>")
    said = answer(encode("[<|endof") + encode("text|>]"))
    assert decode(said) == "<|endoftext|>" and stop not in said
    assert decode(answer(encode("[HALF]"))) == "?"


def test_settings_that_do_not_fit_are_refused_in_one_line(tiny_tools):
    for changes, words in (
        ({"call_end": "]]"}, "--tools.call_end ']]' is 2 tokens"),
        ({"call_start": ""}, "--tools.call_start is empty"),
        ({"call_end": "<|endoftext|>"}, "--tools.call_end '<|endoftext|>' ends a response"),
    ):
        assert words in error_line(talk_of, tiny_tools, **changes)


# ---- The world -------------------------------------------------------------------------------------------------


def test_answers_are_split_off_and_have_the_ids_that_a_rollout_inserts(tiny_tools):
    assert worlds.split_answers("[7+5]12\n[3]error: x\n#### 1") == ["[7+5]", "12", "\n[3]", "error: x", "\n#### 1"]
    assert worlds.split_answers("7+5=12\n#### 12") == ["7+5=12\n#### 12"]
    answer = talk_of(tiny_tools).answer
    tokenizer = AutoTokenizer.from_pretrained(tiny_tools / "model")
    rng = random.Random(3)
    for problem in worlds.write_problems(rng, 200, TINY_TOOLS, set()):
        pieces = worlds.split_answers(worlds.solve_with_calculator(rng, problem, TINY_TOOLS))
        for own, said in zip(pieces[::2], pieces[1::2], strict=False):
            assert answer(tokenizer.encode(own)) == tokenizer.encode(said)
