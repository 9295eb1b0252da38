"""GRPO (group relative policy optimisation) with verifiable rewards in one file, to read from top to bottom.

A small language model solves word problems. It has learned from careless pupils, so it is often wrong. Now it learns
from its own attempts: it solves each problem eight times, a program checks the answers, and training makes correct
solutions more likely and wrong ones less likely. There is no reward model and no critic.

    python ppo_rlhf/small/grpo.py      # about ten minutes; no GPU, no network; --help lists what you can change

GRPO is from "DeepSeekMath" (Shao et al., 2024, arXiv 2402.03300). Two parts of it are left out here:

    The KL penalty in the loss. It holds the policy where a reward model can be trusted. A program that checks answers
    can be trusted everywhere, so there is nothing to hold, and no reference model to compute.
    The mean over responses. The paper averages the loss over the tokens of each response first. So a token of a long
    response counts less, and long wrong responses get away lightly. Here, all tokens of a minibatch count the same.

`rlvr/policy.py --preset sums-grpo` is the same algorithm: both train the same weights, but for rounding
(tests/numbers/test_small.py). Its marks, such as [V33], lead to docs/reference/chapter3.md.
"""

import argparse
import hashlib
import json
import lzma
import re
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

RESPONSE_LENGTH = 88  # tokens after which a response is cut off
BETAS = (0.9, 0.95)  # of AdamW
MAX_GRAD_NORM = 1.0  # largest norm of the gradient
PAD = -1
WORLD = Path(__file__).parents[1] / "worlds/data/sums"


def train(args, policy: PreTrainedModel, tokenizer, problems: list[tuple[str, str]]) -> None:
    optimizer = torch.optim.AdamW(policy.parameters(), args.lr, BETAS, weight_decay=0.0, fused=True)
    noise = keyed_generator(args.seed, "problems", 0)
    problem_order = torch.randperm(len(problems), generator=noise)

    for update in range(args.updates):
        # 1. Draw problems. All updates together need fewer than there are, so each is new to the policy.
        chosen = problem_order[update * args.prompts :][: args.prompts]  # (prompts,)
        drawn = [problems[i] for i in chosen for _ in range(args.group)]
        prompts = [tokenizer.encode(question) for question, _ in drawn]

        # 2. Generate responses, the last columns of `tokens`. Keep their log-probs: step 7 measures how far
        #    the policy has moved since.
        responses = generate(policy, prompts, 1.0, args.seed, "policy", update)
        rows = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        tokens = left_pad(rows)  # (batch, length)
        sizes = torch.tensor([len(response) for response in responses]).unsqueeze(1)  # (batch, 1)
        in_response = torch.arange(tokens.shape[1], 0, -1) <= sizes  # (batch, length)
        with torch.no_grad():
            logprobs = read_logprobs(policy, tokens, in_response)  # (batch, length)

        # 3. There is no reference: the verifier cannot be fooled, so the policy may move as far as it
        #    likes.

        # 4. Score each response: 1 if its answer is correct, otherwise 0.
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        right = [is_right(text, answer) for text, (_, answer) in zip(texts, drawn, strict=True)]
        scores = torch.tensor(right).double().view(args.prompts, args.group)

        # 5. Per-token rewards: the last token gets the score. Without discount, it is the return of every
        #    token.

        # 6. Advantages: how much better is a response than its group? The group's mean tells how well the
        #    policy usually does on this problem, so no critic has to. If all are correct, or all are wrong,
        #    none is better. All tokens of a response have the same advantage.
        mean = scores.mean(1, keepdim=True)  # (prompts, 1)
        std = scores.std(1, keepdim=True)  # (prompts, 1)
        advantages = ((scores - mean) / (std + 1e-6)).view(-1, 1)  # (batch, 1)

        # 7. One epoch over minibatches. The ratio, 1 in the first, says how much likelier a token has become
        #    since it was sampled. Clipping removes the incentive to move it further: the advantages are the
        #    old policy's.
        for mb_inds in draw_minibatches(args, update):  # (minibatch,)
            mb_mask = in_response[mb_inds]  # (minibatch, length)
            mb_advantages = advantages[mb_inds]  # (minibatch, 1)
            new_logprobs = read_logprobs(policy, tokens[mb_inds], mb_mask)  # (minibatch, length)
            ratio = torch.exp(new_logprobs - logprobs[mb_inds])  # (minibatch, length)
            clipped_ratio = ratio.clamp(1 - args.clip, 1 + args.clip)
            losses = torch.maximum(-mb_advantages * ratio, -mb_advantages * clipped_ratio)
            loss = losses[mb_mask].mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
            optimizer.step()

        # 8. Log. There is no KL coefficient to adapt.
        tokens_each = sizes.double().mean()
        print(f"update {update + 1}: {scores.mean():.0%} correct", end=", ")
        print(f"{tokens_each:.1f} tokens", flush=True)


def is_right(response: str, answer: str) -> bool:
    """The verifier: a response is correct if its last number after #### is the answer."""
    numbers = re.findall(r"#### *(-?[0-9]+)", response)
    return bool(numbers) and int(numbers[-1]) == int(answer)


def draw_minibatches(args, update: int) -> Tensor:
    """Which episodes each minibatch has: (minibatches, minibatch).

    Of so many neighbours, each minibatch has one, so it has some of every group.
    """
    minibatch = args.prompts * args.group // args.minibatches
    generator = keyed_generator(args.seed, "minibatches", update, 0)
    order = torch.rand(minibatch, args.minibatches, generator=generator).argsort(1)
    first = torch.arange(minibatch).unsqueeze(1) * args.minibatches  # (minibatch, 1)
    return (first + order).T


# ---- How a model reads and writes ----------------------------------------------------------------------------


@torch.no_grad()
def generate(policy: PreTrainedModel, prompts: list, temperature: float, *key: int | str) -> list[list[int]]:
    """Sample a response to each prompt, up to the end-of-text token or RESPONSE_LENGTH."""
    shape = (len(prompts), RESPONSE_LENGTH)
    noise = torch.rand(shape, generator=keyed_generator(*key), dtype=torch.float64)
    tokens = left_pad(prompts)  # (prompts, longest)
    mask = tokens != PAD
    tokens = tokens.masked_fill(~mask, 0)
    positions = mask.cumsum(1) - mask.long()  # (prompts, longest)
    end = policy.config.eos_token_id
    ended = torch.zeros(len(prompts), 1, dtype=torch.bool)
    # The cache has keys and values, so that each step only reads the newest token.
    cache = DynamicCache(config=policy.config)
    responses = []
    for uniform in noise.split(1, dim=1):  # (prompts, 1), in [0, 1)
        states = policy.model(tokens, mask, positions, cache).last_hidden_state[:, -1]
        # Sample by inverse CDF: take the first token whose cumulative probability exceeds the random
        # number.
        probs = (policy.lm_head(states) / temperature).double().softmax(1)
        cdf = probs.cumsum(1)  # (prompts, vocabulary)
        tokens = torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True)  # (prompts, 1)
        responses.append(tokens)
        ended = ended | (tokens == end)
        if ended.all():
            break
        mask = nn.functional.pad(mask, (0, 1), value=True)
        positions = positions[:, -1:] + 1
    rows = torch.cat(responses, dim=1).tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def read_logprobs(policy: PreTrainedModel, tokens: Tensor, in_response: Tensor) -> Tensor:
    """Log-probs of the tokens of responses, 0 for the others. All tensors are (rows, length)."""
    mask = tokens != PAD
    positions = mask.cumsum(1) - mask.long()  # counts the real tokens before
    inputs = tokens.masked_fill(~mask, 0)
    states = policy.model(inputs, mask, positions, use_cache=False)[0]  # (rows, length, width)
    # The state at one position predicts the token at the next position; hence the shift.
    states = states[:, :-1][in_response[:, 1:]]  # (response tokens, width)
    all_logprobs = policy.lm_head(states).log_softmax(1)  # (response tokens, vocabulary)
    sampled = tokens[in_response].unsqueeze(1)  # (response tokens, 1)
    logprobs = all_logprobs.gather(1, sampled).squeeze(1)
    return logprobs.new_zeros(tokens.shape).masked_scatter(in_response, logprobs)


def left_pad(rows: list[list[int]]) -> Tensor:
    """Rows of token ids, padded on the left to the longest: (rows, longest)."""
    longest = max(map(len, rows))
    return torch.tensor([[PAD] * (longest - len(row)) + row for row in rows])


def keyed_generator(*key: int | str) -> torch.Generator:
    """Random numbers that depend on this key alone, so that a run can be repeated exactly."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


# ---- The command ---------------------------------------------------------------------------------------------


def read_problems(world: Path, split: str) -> list[tuple[str, str]]:
    """Questions and answers: ("Ilse has 7 apples. She buys 2. How many apples does Ilse have?", "9")."""
    lines = lzma.decompress((world / f"problems_{split}.jsonl.xz").read_bytes()).decode().splitlines()
    rows = [json.loads(line) for line in lines]
    # The solution "7+2=9\n#### 9" ends in the answer.
    return [(row["question"] + "\n", row["answer"].split("#### ")[1]) for row in rows]


def evaluate(policy: PreTrainedModel, tokenizer, problems: list[tuple[str, str]]) -> None:
    """Print how many problems the policy solves with its likeliest responses, and the first."""
    prompts = [tokenizer.encode(question) for question, _ in problems]
    # At a temperature so low, the likeliest token always wins.
    responses = generate(policy, prompts, 1e-6, "greedy")
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    right = [is_right(text, answer) for text, (_, answer) in zip(texts, problems, strict=True)]
    print(f"{sum(right) / len(right):.1%} of the held-out problems solved. The first:")
    print(f"{problems[0][0]}{texts[0]}\n")


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--world", type=Path, default=WORLD, help="folder of a sums world")
    add("--seed", type=int, default=1, help="seed of all random numbers")
    add("--updates", type=int, default=70, help="updates of the policy")
    add("--prompts", type=int, default=32, help="problems per update")
    add("--group", type=int, default=8, help="responses to each problem")
    add("--minibatches", type=int, default=2, help="optimiser steps per update")
    add("--lr", type=float, default=3e-4, help="learning rate")
    add("--clip", type=float, default=0.2, help="clip range of the probability ratio, around 1")
    args = parser.parse_args()
    if not (args.world / "problems_train.jsonl.xz").is_file():
        parser.exit(2, f"error: {args.world} has no problems_train.jsonl.xz; {WORLD} is a world\n")
    problems = read_problems(args.world, "train")
    held_out = read_problems(args.world, "test")[:512]
    least = args.updates * args.prompts
    if len(problems) < least or not held_out:
        found = f"{args.world} has {len(problems)} problems and {len(held_out)} held-out ones"
        parser.exit(2, f"error: {found}; at least {least} and 1 are needed\n")
    tokenizer = AutoTokenizer.from_pretrained(args.world / "model")
    policy = AutoModelForCausalLM.from_pretrained(args.world / "model")
    evaluate(policy, tokenizer, held_out)
    train(args, policy, tokenizer, problems)
    evaluate(policy, tokenizer, held_out)


if __name__ == "__main__":
    main()
