"""GRPO (group relative policy optimisation) with verifiable rewards in one file, to read from top to bottom.

A small language model solves word problems. It has learned from careless pupils, so it is often wrong. Now it learns
from its own attempts: it solves each problem eight times, a program checks the answers, and training makes correct
solutions more likely and wrong ones less likely. There is no reward model and no critic.

    python ppo_rlhf/worlds/sums.py     # writes problems and the pupils' solutions, trains the language model
    python ppo_rlhf/small/grpo.py      # about ten minutes; no GPU, no network; --help lists what you can change

GRPO is from "DeepSeekMath" (Shao et al., 2024, arXiv 2402.03300). Two parts of it are left out here:

    The KL penalty in the loss. It holds the policy where a reward model can be trusted. A program that checks answers
    can be trusted everywhere, so there is nothing to hold, and no reference model to compute.
    The mean over responses. The paper averages the loss over the tokens of each response first. So a token of a long
    response counts less, and long wrong responses get away lightly. Here, all tokens of a minibatch count the same.

`rlvr_policy.py --preset sums-grpo` is the same algorithm: both train the same weights, but for rounding
(tests/test_small.py). Its marks, such as [V33], lead to docs/reference/chapter3.md.
"""

import argparse
import hashlib
import json
import os
import re
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

RESPONSE_LENGTH, PAD = 88, -1  # tokens after which a response is cut off; our padding id
BETAS, MAX_GRAD_NORM = (0.9, 0.95), 1.0  # of AdamW; largest norm of the gradient


def read_problems(world: Path, split: str) -> list[tuple[str, str]]:
    """Questions and answers, such as ("Ilse has 7 apples. She buys 2. How many apples does Ilse have?", "9")."""
    rows = map(json.loads, (world / f"problems_{split}.jsonl").read_text().splitlines())
    return [(row["question"] + "\n", row["answer"].split("#### ")[1]) for row in rows]  # "7+2=9\\n#### 9" ends in 9


def is_right(response: str, answer: str) -> bool:
    """The verifier: a response is correct if its last number after #### is the answer."""
    return [int(number) for number in re.findall(r"#### (-?[0-9]+)", response)][-1:] == [int(answer)]


def keyed_generator(*key: int | str) -> torch.Generator:
    """Random numbers that depend on this key alone, so that a run can be repeated exactly."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


def left_pad(rows: list[list[int]]) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[PAD] * (longest - len(row)) + row for row in rows])  # (rows, longest)


@torch.no_grad()
def generate(policy: PreTrainedModel, prompts: list, temperature: float, *key: int | str) -> list[list[int]]:
    """Sample a response to each prompt, up to the end-of-text token or RESPONSE_LENGTH."""
    noise = torch.rand(len(prompts), RESPONSE_LENGTH, generator=keyed_generator(*key), dtype=torch.float64)
    tokens, end = left_pad(prompts), policy.config.eos_token_id  # (prompts, longest)
    mask = tokens != PAD  # (prompts, longest)
    tokens, positions = tokens.masked_fill(~mask, 0), mask.cumsum(1) - mask.long()  # (prompts, longest) each
    cache = DynamicCache(config=policy.config)  # of keys and values, so that each step only reads the newest token
    responses, rows = torch.full(noise.shape, PAD), torch.arange(len(noise))  # rows: those that are still sampled
    for column in range(RESPONSE_LENGTH):
        states = policy.model(tokens, mask, positions, cache).last_hidden_state[:, -1]  # (rows, width)
        # Sample by inverse CDF: take the first token whose cumulative probability exceeds the random number.
        cdf = (policy.lm_head(states) / temperature).double().softmax(1).cumsum(1)  # (rows, vocabulary)
        tokens = torch.searchsorted(cdf, noise[rows, column, None] * cdf[:, -1:], right=True)  # (rows, 1)
        responses[rows, column] = tokens[:, 0]
        mask, positions = nn.functional.pad(mask, (0, 1), value=True), positions[:, -1:] + 1
        going = (responses[rows] != end).all(1)  # (rows,)
        if column % 4 == 3 and 2 * going.sum() <= len(rows):  # now and then, responses that have ended leave
            rows, tokens, mask, positions = rows[going], tokens[going], mask[going], positions[going]
            cache.batch_select_indices(going)
        if not len(rows):
            break
    return [row[: row.index(end) + 1] if end in row else row for row in responses.tolist()]


def read_logprobs(policy: PreTrainedModel, tokens: Tensor, in_response: Tensor) -> Tensor:
    """Log-probs of the tokens that belong to responses, 0 for the others. All tensors are (rows, length)."""
    mask = tokens != PAD  # (rows, length)
    positions = mask.cumsum(1) - mask.long()  # (rows, length); counts the real tokens before
    # The state at one position predicts the token at the next position; hence the shift by one.
    states = policy.model(tokens.masked_fill(~mask, 0), mask, positions, use_cache=False)[0]  # (rows, length, width)
    logits = policy.lm_head(states[:, :-1][in_response[:, 1:]])  # (response tokens, vocabulary)
    logprobs = logits.log_softmax(1).gather(1, tokens[in_response].unsqueeze(1)).squeeze(1)  # (response tokens,)
    return logprobs.new_zeros(tokens.shape).masked_scatter(in_response, logprobs)


def train(args: argparse.Namespace, policy: PreTrainedModel, tokenizer, problems: list[tuple[str, str]]) -> None:
    optimizer = torch.optim.AdamW(policy.parameters(), args.lr, BETAS, weight_decay=0.0, fused=True)
    problem_order = torch.randperm(len(problems), generator=keyed_generator(args.seed, "problems", 0))
    for update in range(args.updates):
        # 1. Draw problems. All updates together need fewer than there are, so each is new to the policy.
        chosen = problem_order[update * args.prompts :][: args.prompts]  # (prompts,)
        drawn = [problems[i] for i in chosen for _ in range(args.group)]
        prompts = [tokenizer.encode(question) for question, _ in drawn]

        # 2. Generate responses. Keep their log-probs: step 7 measures how far the policy has moved since.
        responses = generate(policy, prompts, 1.0, args.seed, "policy", update)
        tokens = left_pad([prompt + row for prompt, row in zip(prompts, responses, strict=True)])  # (batch, length)
        sizes = torch.tensor([len(response) for response in responses]).unsqueeze(1)  # (batch, 1)
        in_response = torch.arange(tokens.shape[1], 0, -1) <= sizes  # (batch, length); the last columns
        with torch.no_grad():
            logprobs = read_logprobs(policy, tokens, in_response)  # (batch, length)

        # 3. There is no reference: the verifier cannot be fooled, so the policy may move as far as it likes.
        # 4. Score each response: 1 if its answer is correct, otherwise 0.
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        right = [is_right(text, answer) for text, (_, answer) in zip(texts, drawn, strict=True)]
        scores = torch.tensor(right).double().view(args.prompts, args.group)

        # 5. Per-token rewards: the last token gets the score. Without discount, it is the return of every token.
        # 6. Advantages: how much better is a response than its group? The group's mean tells how well the policy
        #    usually does on this problem, so no critic has to. If all are correct, or all are wrong, none is better.
        mean, std = scores.mean(1, keepdim=True), scores.std(1, keepdim=True)  # (prompts, 1) each
        advantages = ((scores - mean) / (std + 1e-6)).view(-1, 1)  # (batch, 1), the same for all tokens of a response

        # 7. One epoch over minibatches. The ratio, 1 in the first, says how much likelier a token has become since it
        #    was sampled. Clipping removes the incentive to move it further: the advantages are the old policy's.
        generator = keyed_generator(args.seed, "minibatches", update, 0)
        order = torch.rand(len(drawn) // args.minibatches, args.minibatches, generator=generator).argsort(1)
        order += torch.arange(0, len(drawn), args.minibatches).unsqueeze(1)  # (minibatch, minibatches)
        for mb_inds in order.T:  # (minibatch,); of so many neighbours, each minibatch has one, so it has all groups
            mb_mask, mb_advantages = in_response[mb_inds], advantages[mb_inds]  # (minibatch, length), (minibatch, 1)
            new_logprobs = read_logprobs(policy, tokens[mb_inds], mb_mask)  # (minibatch, length)
            ratio = torch.exp(new_logprobs - logprobs[mb_inds])  # (minibatch, length)
            clipped_ratio = ratio.clamp(1 - args.clip, 1 + args.clip)  # (minibatch, length)
            loss = torch.maximum(-mb_advantages * ratio, -mb_advantages * clipped_ratio)[mb_mask].mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
            optimizer.step()

        # 8. Log. There is no KL coefficient to adapt.
        print(f"update {update + 1}: {scores.mean():.0%} correct, {sizes.double().mean():.1f} tokens", flush=True)


def evaluate(policy: PreTrainedModel, tokenizer, problems: list[tuple[str, str]]) -> None:
    """Print how many problems the policy solves with its most likely responses, and its response to the longest."""
    prompts = [tokenizer.encode(question) for question, _ in problems]
    responses = generate(policy, prompts, 1e-6, "greedy")  # so cold that the most likely token always wins
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    right = [is_right(text, answer) for text, (_, answer) in zip(texts, problems, strict=True)]
    print(f"{sum(right) / len(right):.1%} of the held-out problems solved. The first:\n{problems[0][0]}{texts[0]}\n")


def main() -> None:
    cache = Path(os.environ.get("PPO_RLHF_CACHE") or os.path.expanduser("~/.cache/ppo_rlhf"))
    newest = max(cache.glob("sums-????????????"), key=os.path.getmtime, default=cache / "sums")
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--world", type=Path, default=newest, help="folder of a sums world")
    add("--seed", type=int, default=1, help="seed of all random numbers")
    add("--updates", type=int, default=70, help="updates of the policy")
    add("--prompts", type=int, default=32, help="problems per update")
    add("--group", type=int, default=8, help="responses to each problem")
    add("--minibatches", type=int, default=2, help="optimiser steps per update")
    add("--lr", type=float, default=3e-4, help="learning rate")
    add("--clip", type=float, default=0.2, help="clip range of the probability ratio, around 1")
    args = parser.parse_args()
    if not (args.world / "problems_train.jsonl").is_file():
        parser.exit(2, f"error: there is no world in {args.world}; build one with python ppo_rlhf/worlds/sums.py\n")
    problems, held_out = read_problems(args.world, "train"), read_problems(args.world, "test")[:512]
    if len(problems) < args.updates * args.prompts or not held_out:
        found = f"{args.world} has {len(problems)} problems and {len(held_out)} held-out ones"
        parser.exit(2, f"error: {found}; at least {args.updates * args.prompts} and 1 are needed\n")
    tokenizer = AutoTokenizer.from_pretrained(args.world / "model")
    policy = AutoModelForCausalLM.from_pretrained(args.world / "model")
    evaluate(policy, tokenizer, held_out)
    train(args, policy, tokenizer, problems)
    evaluate(policy, tokenizer, held_out)


if __name__ == "__main__":
    main()
