"""A response may call a tool, such as a calculator: chapter 3 with responses of several turns.

This is rlvr/policy.py with another sampler, step 2. The policy writes a call, such as `[7+5]`. Generation stops at
the end of the call, the tool's answer is inserted, and generation continues:

    Petra has 7 apples. Felix gives her 5. She loses 3. How many apples does Petra have?
    [7+5]12
    [12-3]9           the policy wrote `[12-3]` and the line break, the tool wrote `9`
    #### 9

`converse` below is the whole method. Three things matter:

    1. Token ids go in, token ids come out. Only the tool reads text. Responses are never tokenised again,
       because the tokenizer might choose other ids for the same text, which the policy has not sampled.
    2. The tool's tokens are context for all later tokens, and nothing else: they are in no loss, no KL and no
       advantage, because the policy did not choose them. Their log-prob is NaN, and `rollout` removes such tokens
       from the mask of the response. GAE and REINFORCE++ skip the hole: for them, the end of a call is followed by
       the first token after the answer.
    3. A tool never ends a run. A call that fails is answered by a short error text, from which the policy can learn
       to call correctly. See lib/scoring/tools.py.

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
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ppo_rlhf.lib.base import errors
from ppo_rlhf.lib.base.errors import InputError
from ppo_rlhf.lib.nets import pretrained, templates
from ppo_rlhf.lib.scoring import tools
from ppo_rlhf.lib.services import cli
from ppo_rlhf.rlvr import arguments as rlvr_arguments, episodes as rlvr_episodes, policy as rlvr_policy, problems
from ppo_rlhf.tldr import packing
from ppo_rlhf.tldr.responses import generate_until

# ---- Arguments -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Args(rlvr_arguments.Args):
    preset: str = "sums-tools"
    """names a set of defaults: sums-tools"""
    exp_name: str = "rlvr_tools"
    tools: rlvr_arguments.ToolsArgs = field(default_factory=rlvr_arguments.ToolsArgs)
    """the tool and how it is called"""


SUMS_GRPO = rlvr_arguments.PRESETS["sums-grpo"]
SUMS_TOOLS = {part.name: getattr(SUMS_GRPO, part.name) for part in dataclasses.fields(rlvr_arguments.Args)}
SUMS_TOOLS |= {
    "preset": "sums-tools",
    "exp_name": Args.exp_name,
    "base_model": "sums-tools",
    "task": problems.TASKS["sums-tools"],
    "ppo": rlvr_arguments.PpoArgs(
        total_episodes=60 * 256,
        samples_per_prompt=8,
        nminibatches=2,
        lr=3e-4,
        beta2=0.95,
        weight_decay=0.0,
        advantage="grpo",
    ),
}
PRESETS = {"sums-tools": Args(**SUMS_TOOLS)}

# ---- Train -----------------------------------------------------------------------------------------------------


def train(args: Args) -> Path:
    """As `train` of rlvr/policy.py, where responses may call a tool."""
    tool = tools.load_tool(args.tools.tool, "tools.tool", args.tools.time_limit)  # found before any model is loaded
    return rlvr_policy.train(args, partial(sampler_with_tool, tool=tool))


def sampler_with_tool(
    setup: rlvr_episodes.Setup, actor_critic: rlvr_policy.ActorCritic, tool: tools.Tool
) -> rlvr_policy.Sampler:
    """Step 2 with the answers of a tool in the responses."""
    generate = partial(converse, conversation=conversation(setup, tool))
    return rlvr_policy.Sampler(setup, actor_critic, generate)


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
    responses = contexts.new_full(uniforms.shape, pad_id)
    logprobs = contexts.new_zeros(uniforms.shape, dtype=torch.promote_types(lm_backbone.dtype, torch.float32))
    lengths = torch.zeros(len(contexts), dtype=torch.long, device=contexts.device)  # tokens of each response so far
    rows = torch.arange(len(contexts), device=contexts.device)  # those that continue
    for turn in range(conversation.max_calls + 1):
        # [V102] Read the ids of prompt and response so far as they are, then generate up to a call or the end.
        so_far = torch.cat([contexts[rows], responses[rows]], 1)
        so_far = packing.pack(so_far, pad_id, int((so_far != pad_id).sum(1).max()))
        # The noise of a token belongs to its place in the response, so it depends neither on the number of
        #        turns before it nor on the rows that are sampled together.
        places = lengths[rows, None] + torch.arange(width, device=rows.device)  # (rows, width), of the next tokens
        room = width - int(lengths[rows].min())
        at = places.clamp(max=width - 1).to(uniforms.device)
        noise = uniforms[rows.to(uniforms.device)].gather(1, at)[:, :room]
        settings = {"pad_id": pad_id, "vocab_size": vocab_size, "stop_ids": pauses, "temperature": temperature}
        new, new_logprobs = generate_until(lm_backbone, so_far, noise, **settings)
        fits = (places[:, :room] < width) & (new != pad_id)  # (rows, room)
        responses[rows] = put(responses[rows], new, places=places, fits=fits)
        logprobs[rows] = put(logprobs[rows], new_logprobs, places=places, fits=fits)
        begun, lengths[rows] = lengths[rows], lengths[rows] + fits.sum(1)

        # Answer the rows that have called and have room for more.
        last = responses[rows, lengths[rows] - 1]  # (rows,); each row has a new token
        calls = (last == conversation.call_end) & (lengths[rows] < width)
        rows, begun = rows[calls], begun[calls]
        if turn == conversation.max_calls:
            break
        for row, start in zip(rows.tolist(), begun.tolist(), strict=True):
            end = int(lengths[row])
            answer = conversation.answer(responses[row, start:end].tolist())[: width - end]
            responses[row, end : end + len(answer)] = torch.tensor(answer, dtype=responses.dtype)
            logprobs[row, end : end + len(answer)] = math.nan
            lengths[row] += len(answer)
        rows = rows[lengths[rows] < width]
        if not len(rows):
            break
    return responses, logprobs


def put(whole: Tensor, new: Tensor, places: Tensor, fits: Tensor) -> Tensor:
    """A copy of `whole` (rows, width) with the new numbers (rows, room) that fit at their places (rows, width)."""
    spare = F.pad(whole, (0, 1))  # what does not fit goes to a column that is dropped
    targets = places[:, : new.shape[1]].masked_fill(~fits, whole.shape[1])
    return spare.scatter(1, targets, new.to(whole.dtype))[:, :-1]


# ---- The tool --------------------------------------------------------------------------------------------------


def conversation(setup: rlvr_episodes.Setup, tool: tools.Tool) -> Conversation:
    """What a tool needs to answer calls. Raises an InputError if something does not fit."""
    args, tokenizer, ids = setup.args.tools, setup.tokenizer, setup.ids
    with errors.typed_as({"task.call_end": "tools.call_end"}):
        call_end = pretrained.one_token(tokenizer, args.call_end, "call_end")
    if call_end in ids.stops:
        raise InputError(
            f"{errors.flag('tools.call_end')} {args.call_end!r} ends a response; a call must end otherwise"
        )
    if not args.call_start:
        raise InputError(f"{errors.flag('tools.call_start')} is empty; a call begins with a text, such as [")

    def encode(text: str) -> list[int]:
        return [i for i in templates.encode_text(tokenizer, text) if i not in ids.stops]

    most = max(len(encode(error)) for error in tools.ERRORS)
    if args.max_answer < most:
        raise InputError(f"{errors.flag('tools.max_answer')} {args.max_answer}: error texts have up to {most} tokens")

    def answer(written: list[int]) -> list[int]:
        turn = tokenizer.decode(written).removesuffix(args.call_end)
        _, start, call = turn.rpartition(args.call_start)
        said = tool(call) if start else tools.SYNTAX
        # [V104] An answer is plain text of bounded length. Whatever its text, it holds no id that ends a response.
        tokens = encode(said.encode(errors="replace").decode())
        return tokens if len(tokens) <= args.max_answer else encode(tools.TOO_LONG)

    return Conversation(call_end=call_end, max_calls=args.max_calls, answer=answer)


if __name__ == "__main__":
    cli.run_script(train, lambda argv: cli.parse_args(PRESETS, argv, __doc__))
