"""GRPO (group relative policy optimisation) with verifiable rewards in one file, to read from top to bottom.

A small language model solves word problems. It has learned from careless pupils, so it is often wrong. Now it learns
from its own attempts: it solves each problem eight times, a program checks the answers, and training makes correct
solutions more likely and wrong ones less likely. There is no reward model and no critic.

    python ppo_rlhf/worlds/sums.py     # writes problems and the pupils' solutions, trains the language model
    python ppo_rlhf/small/grpo.py      # about ten minutes; no GPU, no network

`rlvr_policy.py --preset sums-grpo` is the same algorithm, with other models, problems and verifiers, a critic, KL
penalties, other advantages and losses, several GPUs, checkpoints, metrics and error checks. Its marks, such as [V33],
lead to docs/details/chapter3.md. tests/test_small.py runs both on a tiny world: they train the same weights, bit for
bit, if the prompts and each minibatch are read in a single pass.
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

UPDATES, PROMPTS, GROUP = 70, 32, 8  # in an update: so many problems, with so many responses to each
MINIBATCHES, RESPONSE_LENGTH = 2, 88  # optimiser steps per update; tokens after which a response is cut off
LR, BETAS = 3e-4, (0.9, 0.95)  # of AdamW
CLIP, MAX_GRAD_NORM = 0.2, 1.0  # clip range of the probability ratio, around 1; largest norm of the gradient
PAD = -1  # our padding id


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
def generate(policy: PreTrainedModel, prompts: list, n: int, temperature: float, *key: int | str) -> tuple:
    """Sample n responses to each prompt, up to the end-of-text token or RESPONSE_LENGTH; lists, and log-probs."""
    noise = torch.rand(len(prompts) * n, RESPONSE_LENGTH, generator=keyed_generator(*key), dtype=torch.float64)
    tokens, end = left_pad(prompts), policy.config.eos_token_id  # (prompts, longest)
    mask = tokens != PAD  # (prompts, longest)
    tokens, positions = tokens.masked_fill(~mask, 0), mask.cumsum(1) - mask.long()  # (prompts, longest) each
    # The cache keeps the keys and values of earlier tokens, so that each step only has to read the newest token.
    cache = DynamicCache(config=policy.config)
    states = policy.model(tokens, mask, positions, cache).last_hidden_state[:, -1]  # (prompts, width)
    cache.batch_repeat_interleave(n)  # each prompt is read once for its n responses
    states, mask, positions = (x.repeat_interleave(n, 0) for x in (states, mask, positions[:, -1:]))
    responses, logprobs = torch.full(noise.shape, PAD), torch.zeros(noise.shape)  # (rows, RESPONSE_LENGTH) each
    rows = torch.arange(len(noise))  # those that are still sampled
    for column in range(RESPONSE_LENGTH):
        # Sample by inverse CDF: take the first token whose cumulative probability exceeds the random number.
        all_logprobs = (policy.lm_head(states) / temperature).log_softmax(1)  # (rows, vocabulary)
        cdf = all_logprobs.double().exp().cumsum(1)  # (rows, vocabulary)
        tokens = torch.searchsorted(cdf, noise[rows, column, None] * cdf[:, -1:], right=True)  # (rows, 1)
        responses[rows, column], logprobs[rows, column] = tokens[:, 0], all_logprobs.gather(1, tokens)[:, 0]
        mask, positions = nn.functional.pad(mask, (0, 1), value=True), positions + 1
        going = (responses[rows] != end).all(1)  # (rows,)
        if column % 4 == 3 and 2 * going.sum() <= len(rows):  # now and then, responses that have ended leave
            rows, tokens, mask, positions = rows[going], tokens[going], mask[going], positions[going]
            cache.batch_select_indices(going)
        if not len(rows):
            break
        states = policy.model(tokens, mask, positions, cache).last_hidden_state[:, -1]  # (rows, width)
    return [row[: row.index(end) + 1] if end in row else row for row in responses.tolist()], logprobs


def read_logprobs(policy: PreTrainedModel, tokens: Tensor, in_response: Tensor) -> Tensor:
    """Log-probs of the tokens that belong to responses, 0 for the others. All tensors are (rows, length)."""
    mask = tokens != PAD  # (rows, length)
    positions = mask.cumsum(1) - mask.long()  # (rows, length); counts the real tokens before
    # The state at one position predicts the token at the next position; hence the shift by one.
    states = policy.model(tokens.masked_fill(~mask, 0), mask, positions, use_cache=False)[0]  # (rows, length, width)
    logits = policy.lm_head(states[:, :-1][in_response[:, 1:]])  # (response tokens, vocabulary)
    logprobs = logits.log_softmax(1).gather(1, tokens[in_response].unsqueeze(1)).squeeze(1)  # (response tokens,)
    return torch.zeros(tokens.shape).masked_scatter(in_response, logprobs)


def train(policy: PreTrainedModel, tokenizer, problems: list[tuple[str, str]], seed: int) -> None:
    optimizer = torch.optim.AdamW(policy.parameters(), LR, BETAS, weight_decay=0.0, fused=True)
    problem_order = torch.randperm(len(problems), generator=keyed_generator(seed, "problems", 0))
    for update in range(UPDATES):
        # 1. Draw problems. All updates together need fewer than there are, so each is new to the policy.
        drawn = [problems[i] for i in problem_order[update * PROMPTS :][:PROMPTS] for _ in range(GROUP)]
        prompts = [tokenizer.encode(question) for question, _ in drawn[::GROUP]]

        # 2. Generate responses, and record their log-probs: step 7 measures how far the policy has moved since.
        responses, recorded = generate(policy, prompts, GROUP, 1.0, seed, "policy", update)
        tokens = left_pad([prompts[i // GROUP] + response for i, response in enumerate(responses)])  # (batch, length)
        sizes = torch.tensor([len(response) for response in responses]).unsqueeze(1)  # (batch, 1)
        in_response = torch.arange(tokens.shape[1], 0, -1) <= sizes  # (batch, length); the last columns
        logprobs = torch.zeros(tokens.shape)  # (batch, length)
        logprobs[in_response] = recorded[torch.arange(RESPONSE_LENGTH) < sizes]

        # 3. There is no reference: the verifier cannot be fooled, so the policy may move as far as it likes.
        # 4. Score each response: 1 if its answer is correct, otherwise 0.
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        right = [is_right(text, answer) for text, (_, answer) in zip(texts, drawn, strict=True)]
        scores = torch.tensor(right).float().view(PROMPTS, GROUP)

        # 5. Per-token rewards: the last token gets the score. Without discount, it is the return of every token.
        # 6. Advantages: how much better is a response than its group? The group's mean tells how well the policy
        #    usually does on this problem, so no critic has to. If all are correct, or all are wrong, none is better.
        centred = scores - scores.mean(1, keepdim=True)  # (PROMPTS, GROUP)
        std = (centred.square().sum(1, keepdim=True) / (GROUP - 1)).sqrt()  # (PROMPTS, 1)
        advantages = (centred / (std + 1e-6)).view(-1, 1)  # (batch, 1), the same for all tokens of a response

        # 7. An epoch over minibatches. The ratio says how much more likely a token has become since it was sampled.
        #    Clipping removes the incentive to move it further from 1: the advantages are those of the old policy.
        lengths = (tokens != PAD).sum(1)  # (batch,)
        generator = keyed_generator(seed, "minibatches", update, 0)
        order = torch.rand(len(drawn) // MINIBATCHES, MINIBATCHES, generator=generator).argsort(1)
        order += torch.arange(0, len(drawn), MINIBATCHES).unsqueeze(1)  # (minibatch, MINIBATCHES)
        for inds in order.T:  # (minibatch,); one of each MINIBATCHES neighbours, so that no group is left out
            inds = inds[lengths[inds].argsort(descending=True, stable=True)]  # sums then round as in the big script
            columns = slice(-int(lengths[inds[0]]), None)  # those that the longest row needs
            mb_mask, mb_logprobs = in_response[inds, columns], logprobs[inds, columns]  # (minibatch, longest) each
            new_logprobs = read_logprobs(policy, tokens[inds, columns], mb_mask)  # (minibatch, longest)
            ratio = torch.exp(new_logprobs - mb_logprobs)  # (minibatch, longest)
            clipped_ratio = ratio.clamp(1 - CLIP, 1 + CLIP)  # (minibatch, longest)
            loss = torch.maximum(-advantages[inds] * ratio, -advantages[inds] * clipped_ratio)[mb_mask].mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
            optimizer.step()

        # 8. Log. There is no KL coefficient to adapt.
        print(f"update {update + 1}: {scores.mean():.0%} correct, {sizes.double().mean():.1f} tokens", flush=True)


def evaluate(policy: PreTrainedModel, tokenizer, problems: list[tuple[str, str]]) -> None:
    """Print how many problems the policy solves with its most likely responses, and its response to the longest."""
    prompts = [tokenizer.encode(question) for question, _ in problems]
    responses, _ = generate(policy, prompts, 1, 1e-6, "greedy")  # so cold that the most likely token always wins
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    right = [is_right(text, answer) for text, (_, answer) in zip(texts, problems, strict=True)]
    print(f"{sum(right) / len(right):.1%} of the held-out problems solved. The first:\n{problems[0][0]}{texts[0]}\n")


def main() -> None:
    cache = Path(os.environ.get("PPO_RLHF_CACHE") or os.path.expanduser("~/.cache/ppo_rlhf"))
    newest = max(cache.glob("sums-????????????"), key=os.path.getmtime, default=cache / "sums")
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=Path, default=newest, help=f"folder of a sums world; default: {newest}")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if not (args.world / "problems_train.jsonl").is_file():
        parser.error(f"there is no world in {args.world}; build one with python ppo_rlhf/worlds/sums.py")
    problems = read_problems(args.world, "train")
    if len(problems) < UPDATES * PROMPTS:
        parser.error(f"{args.world} has {len(problems)} problems; {UPDATES} updates of {PROMPTS} need more")
    tokenizer = AutoTokenizer.from_pretrained(args.world / "model")
    policy = AutoModelForCausalLM.from_pretrained(args.world / "model")
    evaluate(policy, tokenizer, read_problems(args.world, "test")[:512])
    train(policy, tokenizer, problems, args.seed)
    evaluate(policy, tokenizer, read_problems(args.world, "test")[:512])


if __name__ == "__main__":
    main()
