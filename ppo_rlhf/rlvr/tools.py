"""A response may call a tool, such as a calculator: chapter 3 with responses of several turns.

This is rlvr/policy.py with another `Sampler`, step 2. The policy writes a call, such as `[7+5]`. Generation stops at
the end of the call, the tool's answer is inserted, and generation continues:

    Petra has 7 apples. Felix gives her 5. She loses 3. How many apples does Petra have?
    [7+5]12
    [12-3]9           the policy wrote `[12-3]` and the line break, the tool wrote `9`
    #### 9

`converse` below is the whole method. Three things matter:

    1. Token ids go in, token ids come out. Only the tool reads text. Responses are never tokenised again,
       because the tokenizer might choose other ids for the same text, which the policy has not sampled.
    2. The tool's tokens are context for all later tokens, and nothing else: they are in no loss, no KL and no
       advantage, because the policy did not choose them. Their log-prob is NaN, and `train` of rlvr/policy.py takes
       such tokens out of the mask of the response. GAE and REINFORCE++ skip the hole: for them, the end of a call is
       followed by the first token after the answer.
    3. A tool never ends a run. A call that fails is answered by a short error text, from which the policy can learn
       to call correctly. See rlvr/tool_functions.py.

A response ends at its stop id, at response_length tokens (the tool's included), or at one call too many.

Your own tool is a function `(call text) -> text`. Its answer must depend on the call alone, otherwise a resumed run
differs from one that was not interrupted. Evaluations call it, too.

    python ppo_rlhf/rlvr/tools.py --preset sums-tools           # no network: word problems and a calculator, minutes
    python ppo_rlhf/rlvr/tools.py --preset sums-tools --tools.tool my_tools:calculate
    python ppo_rlhf/rlvr/tools.py --resume runs/<run>           # resume after an interruption

Marks like [V101] name an implementation detail; see docs/reference.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.rlvr import arguments as rlvr_arguments, policy as rlvr_policy, problems, tool_functions
from ppo_rlhf.rlvr.algebra import Rollout
from ppo_rlhf.tldr import chat_templates
from ppo_rlhf.tldr.responses import generate_until
from ppo_rlhf.train_policy import Arguments, InputError, one_token, parse_args, run_script

# ---- Arguments -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ToolsArgs(Arguments):
    tool: str = "calculator"
    """what answers calls: calculator, or package.module:name of a function (call text) -> text"""
    call_start: str = "["
    """text before a call. The call is the text between the last call_start of a turn and call_end"""
    call_end: str = "]"
    """text that ends a call: exactly one token, at which generation stops"""


@dataclass(frozen=True, kw_only=True)
class Args(rlvr_arguments.Args):
    preset: str = "sums-tools"
    """names a set of defaults: sums-tools"""
    exp_name: Annotated[str, Field(pattern=r"^[\w.+ -]{1,150}$")] = "rlvr_tools"
    tools: ToolsArgs = field(default_factory=ToolsArgs)
    """the tool and how it is called"""


SUMS_GRPO = rlvr_arguments.PRESETS["sums-grpo"]
PRESETS = {
    "sums-tools": Args(
        **vars(SUMS_GRPO)
        | {
            "preset": "sums-tools",
            "exp_name": Args.exp_name,
            "base_model": "sums-tools",
            "task": problems.TASKS["sums-tools"],
            "ppo": dataclasses.replace(SUMS_GRPO.ppo, total_episodes=60 * 256),
        }
    )
}

# ---- Train -----------------------------------------------------------------------------------------------------


def train(args: Args, timestamp: int | None = None) -> Path:
    """As `train` of rlvr/policy.py, where responses may call a tool."""
    tool = tool_functions.load_tool(args.tools.tool, "tools.tool")  # found before any model is loaded
    return rlvr_policy.train(args, SamplerWithTool(tool), timestamp)


class SamplerWithTool(rlvr_policy.Sampler):
    """Step 2 with the answers of a tool in the responses."""

    def __init__(self, tool: tool_functions.Tool):
        self.tool = tool

    def begin(self, args, lm_backbone, tokenizer, ids, *more, **options) -> None:
        super().begin(args, lm_backbone, tokenizer, ids, *more, **options)
        self.conversation = conversation(args.tools, self.tool, tokenizer, ids)

    def respond(self, contexts: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        ids = self.ids
        return converse(
            self.lm_backbone,
            contexts,
            uniforms,
            ids.pad,
            ids.vocab_size,
            temperature,
            ids.stops,
            conversation=self.conversation,
        )

    def objectives(self, rollout: Rollout) -> dict[str, Tensor]:
        from_tool = (rollout.responses != self.ids.pad) & ~rollout.written
        calls = answered_calls(rollout.responses, from_tool, self.conversation.call_end)
        return {"val/tool_tokens": from_tool.sum(1), "val/tool_calls": calls}


def answered_calls(responses: Tensor, from_tool: Tensor, call_end: int) -> Tensor:
    """How many calls the tool answered in each response (rows,), empty answers included.

    responses: (rows, response_length); from_tool: of that shape, the tokens that the tool wrote.
    """
    ends = (responses == call_end) & ~from_tool  # (rows, response_length), each ends a call
    # A call at the very end of a response has no room for an answer, and one after MAX_CALLS ends the response.
    return ends[:, :-1].sum(1).clamp(max=tool_functions.MAX_CALLS)


# ---- Step 2: generate, call, continue --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What `converse` needs to know about calls."""

    call_end: int  # the id that ends a call
    max_calls: int
    answer: Callable[[list[int]], list[int]]  # from the ids of the policy's turn, up to call_end, to the answer's ids


@torch.no_grad()
def converse(
    lm_backbone: PreTrainedModel,
    contexts: Tensor,
    uniforms: Tensor,
    pad_id: int,
    vocab_size: int,
    temperature: float,
    stop_ids: Collection[int],
    conversation: Conversation,
) -> tuple[Tensor, Tensor]:
    """Sample responses as generate_until does, with the tool's answers in them.

    contexts: (rows, context_length); uniforms: (rows, response_length). Returns responses and their log-probs, (rows,
    response_length). The log-prob of a token from the tool is NaN; after the end of a response it is 0.
    """
    width, pauses = uniforms.shape[1], {*stop_ids, conversation.call_end}
    texts = [context[context != pad_id].tolist() for context in contexts]  # ids of prompt and response so far
    logprobs: list[list[float]] = [[] for _ in texts]  # of the tokens of each response so far
    rows = list(range(len(texts)))  # those that continue
    for turn in range(conversation.max_calls + 1):
        # [V102] Read the ids of prompt and response so far as they are, then generate up to a call or the end.
        longest = max(len(texts[row]) for row in rows)
        so_far = contexts.new_tensor([[pad_id] * (longest - len(texts[row])) + texts[row] for row in rows])
        # The noise of a token belongs to its place in the response, so it depends neither on the number of
        #        turns before it nor on the rows that are sampled together.
        begun = [len(logprobs[row]) for row in rows]
        noise = uniforms.new_zeros(len(rows), width - min(begun))
        for of_row, row, start in zip(noise, rows, begun, strict=True):
            of_row[: width - start] = uniforms[row, start:]
        new, new_logprobs = generate_until(
            lm_backbone,
            so_far,
            noise,
            pad_id=pad_id,
            vocab_size=vocab_size,
            temperature=temperature,
            stop_ids=pauses,
        )
        continuing = []
        for row, start, ids, of_ids in zip(rows, begun, new.tolist(), new_logprobs.tolist(), strict=True):
            written = [token for token in ids if token != pad_id][: width - start]
            texts[row] += written
            logprobs[row] += of_ids[: len(written)]
            # Answer the rows that have called and have room for more.
            room = width - start - len(written)
            if written[-1] == conversation.call_end and room and turn < conversation.max_calls:
                answer = conversation.answer(written)[:room]
                texts[row] += answer
                logprobs[row] += [math.nan] * len(answer)
                if len(answer) < room:
                    continuing.append(row)
        if not continuing:
            break
        rows = continuing
    responses = contexts.new_full(uniforms.shape, pad_id)
    of_responses = new_logprobs.new_zeros(uniforms.shape)
    for row, (text, of_text) in enumerate(zip(texts, logprobs, strict=True)):
        responses[row, : len(of_text)] = torch.tensor(text[-len(of_text) :])
        of_responses[row, : len(of_text)] = new_logprobs.new_tensor(of_text)
    return responses, of_responses


# ---- The tool --------------------------------------------------------------------------------------------------


def conversation(
    args: ToolsArgs, tool: tool_functions.Tool, tokenizer: PreTrainedTokenizerBase, ids: problems.TaskIds
) -> Conversation:
    """What a tool needs to answer calls. Raises an InputError if something does not fit."""
    call_end = one_token(tokenizer, args.call_end, "tools.call_end")
    if call_end in ids.stops:
        raise InputError(f"--tools.call_end {args.call_end!r} ends a response; a call must end otherwise")
    if not args.call_start:
        raise InputError("--tools.call_start is empty; a call begins with a text, such as [")

    def encode(text: str) -> list[int]:
        return [i for i in chat_templates.encode_text(tokenizer, text) if i not in ids.stops]

    def answer(written: list[int]) -> list[int]:
        turn = tokenizer.decode(written).removesuffix(args.call_end)
        _, start, call = turn.rpartition(args.call_start)
        said = tool(call) if start else tool_functions.SYNTAX
        # [V104] Whatever the text of an answer is, it holds no id that ends a response.
        return encode(said.encode(errors="replace").decode())

    return Conversation(call_end=call_end, max_calls=tool_functions.MAX_CALLS, answer=answer)


if __name__ == "__main__":
    run_script(lambda: train(parse_args(PRESETS, description=__doc__, may_change=rlvr_policy.MAY_CHANGE)))
