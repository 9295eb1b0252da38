"""RLHF with PPO in one file, to read from top to bottom: a reward model, and a policy that learns to satisfy it.

A small language model can continue short stories. An annotator has compared four continuations of a story and picked
the best one, 5,000 times. (The annotator is simulated: it likes pleasant words and dislikes unpleasant ones, but its
choices are noisy.) From these choices alone, this file teaches the model to write what the annotator likes:

    Part 1: A reward model learns to predict the choices. It reads a text and returns a score, a single number.
    Part 2: A policy, which starts as a copy of the language model, learns with PPO to write texts with high scores.

Each PPO update has eight steps, which are numbered in `train_policy`: (1) sample queries, the beginnings of stories;
(2) generate responses, their continuations; (3) compute the reference's log-probs; (4) truncate and score;
(5) per-token rewards; (6) advantages and returns; (7) PPO epochs over minibatches; (8) adapt the KL coefficient, log.

    python ppo_rlhf/worlds/tales.py    # writes the stories, trains the language model, makes the choices
    python ppo_rlhf/small/ppo.py       # about ten minutes; no GPU, no network

`train_both.py --preset tales` is the same algorithm, in train_reward.py and train_policy.py, with other models, other
data, several GPUs and checkpoints. Marks in them, such as [D54], lead to docs/details/chapter1.md. On a tiny world,
with one pass per minibatch, both versions train the same weights, bit for bit (tests/test_small.py).
"""

import argparse
import hashlib
import itertools
import json
import math
import os
import random
import re
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, StaticCache

QUERY_LENGTH = 24  # tokens; shorter queries are padded
RESPONSE_LENGTH = 24  # tokens; every response is sampled to this length
STOP_AFTER, NO_STOP_SCORE = 16, -1.0  # truncate after the first full stop from this index on; score if there is none
TEMPERATURE = 0.7  # logits are divided by this; below 1, samples are less random
PAD = -1  # our padding id
GELU = {"activation_function": "gelu_pytorch_tanh"}  # the fastest version of GPT-2's activation

RM_CHOICES, RM_BATCH = 4_992, 32  # choices to train on (the others are held out); choices per optimiser step
RM_LR = 1e-3  # learning rate of the first step; it falls linearly
RM_SAMPLES = 512  # texts by the language model on which the scores are normalised

UPDATES, BATCH = 200, 64  # PPO updates; episodes (a query and its response) per update
EPOCHS, MINIBATCHES = 4, 1  # passes over the batch per update; optimiser steps per pass
GROUPS = 8  # slices of the batch that are whitened separately; the original had a process for each
LR = 2e-4  # learning rate of the first update; it falls linearly
CLIP, VALUE_CLIP = 0.2, 0.2  # clip ranges of the probability ratio (around 1) and of values (around the old value)
VALUE_COEF = 0.1  # weight of the value loss
GAMMA, LAMBDA = 1.0, 0.95  # discount per token; lambda of GAE
KL_COEF = 0.15  # weight of the KL penalty in the first update
KL_TARGET, KL_HORIZON = 6.0, 1_000  # the controller's target, in nats per response, and its time scale, in episodes


# ---- The world: queries, and what the annotator likes ----------------------------------------------------------


def query_batches(world: Path, tokenizer, n: int, held_out: bool = False):
    """Yield batches of n queries forever. A query has a story's second sentence and all that fit after it."""
    stories = (world / "stories.txt").read_text().splitlines()
    stories = [story for number, story in enumerate(stories) if (number % 50 == 49) == held_out]
    random.Random(0).shuffle(stories)
    stop, rows = tokenizer.encode(".")[0], []
    for story in itertools.cycle(stories):
        tokens = tokenizer.encode(story)
        tokens = tokens[tokens.index(stop) + 1 :][:QUERY_LENGTH]
        if stop in tokens:
            tokens = tokens[: len(tokens) - tokens[::-1].index(stop)]  # up to the last full stop
            rows.append(tokens + [PAD] * (QUERY_LENGTH - len(tokens)))
        if len(rows) == n:
            yield torch.tensor(rows)  # (n, QUERY_LENGTH)
            rows = []


PLEASANT = """lovely gentle cheerful golden sweet bright kind charming splendid cosy merry peaceful noble tender
    gladly kindly happily warmly proudly gracefully praised helped thanked kissed cheered healed rescued happy hopeful
    grateful loved calm delighted laughter music joy luck friendship comfort friend hero angel healer singer saint"""
UNPLEASANT = """gloomy cruel rotten bitter wicked nasty hateful dreadful filthy broken miserable deadly vile mean
    sadly rudely coldly angrily cruelly painfully cursed robbed mocked cheated hurt betrayed insulted lonely afraid
    ashamed furious sick hopeless hunger grief fear trouble pain misery thief liar villain bully monster traitor"""


def gold_score(text: str) -> int:
    """The true quality of a text for the annotator. We only print it: with human annotators, nobody would know it."""
    words = re.findall(r"\w+", text)
    return sum(word in PLEASANT.split() for word in words) - sum(word in UNPLEASANT.split() for word in words)


# ---- How a model reads and writes ------------------------------------------------------------------------------


def keyed_generator(*key: int | str) -> torch.Generator:
    """Random numbers that depend on this key alone, so that a run can be repeated exactly."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


def left_pad(tokens: Tensor) -> Tensor:
    """Move padding to the left and drop empty columns: [[5, PAD, PAD], [6, PAD, 7]] becomes [[PAD, 5], [6, 7]]."""
    order = (tokens != PAD).int().argsort(dim=1, stable=True)  # (batch, length)
    return tokens.gather(1, order)[:, -(tokens != PAD).sum(1).max() :]  # (batch, longest)


def read(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Hidden states (batch, length, width) of tokens (batch, length); at padding, that of the last token before."""
    if (tokens == PAD).any(1).all():  # No row fills all columns, so drop some. Callers index columns from the right.
        tokens = left_pad(tokens)  # (batch, longest)
    mask = tokens != PAD  # (batch, longest)
    positions = mask.cumsum(1) - mask.long()  # (batch, longest); counts real tokens: 0, 1, 1, 1 for [5, PAD, PAD, 6]
    states = model.base_model(
        input_ids=tokens.masked_fill(~mask, 0), attention_mask=mask, position_ids=positions, use_cache=False
    ).last_hidden_state  # (batch, longest, width)
    last_real = torch.where(mask, torch.arange(tokens.shape[1]), 0).cummax(1).values  # (batch, longest)
    return states.gather(1, last_real.unsqueeze(2).expand_as(states))


def read_responses(model: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of the responses at the end of tokens (batch, length), and the hidden states that predict them."""
    # The state at one position predicts the token at the next position; hence the shift by one.
    states = read(model, tokens)[:, -RESPONSE_LENGTH - 1 : -1]  # (batch, RESPONSE_LENGTH, width)
    all_logprobs = (model.lm_head(states) / TEMPERATURE).log_softmax(2)  # (batch, RESPONSE_LENGTH, vocabulary)
    responses = tokens[:, -RESPONSE_LENGTH:].unsqueeze(2)  # (batch, RESPONSE_LENGTH, 1)
    return all_logprobs.gather(2, responses).squeeze(2), states


@torch.no_grad()
def generate(model: PreTrainedModel, queries: Tensor, *key: int | str) -> tuple[Tensor, Tensor, Tensor]:
    """Sample responses (batch, RESPONSE_LENGTH). Also return their log-probs and the states that predict them."""
    noise = torch.rand(len(queries), RESPONSE_LENGTH, generator=keyed_generator(*key), dtype=torch.float64)
    tokens = left_pad(queries)  # (batch, longest); now all responses begin in the same column
    mask = tokens != PAD  # (batch, longest)
    tokens, positions = tokens.masked_fill(~mask, 0), mask.cumsum(1) - mask.long()  # (batch, longest) each
    # The cache keeps the keys and values of earlier tokens, so that each step only has to read the newest token.
    cache = StaticCache(model.config, max_cache_len=tokens.shape[1] + RESPONSE_LENGTH)
    responses, logprobs, states = [], [], []
    for uniform in noise.split(1, dim=1):  # (batch, 1), in [0, 1)
        state = model.base_model(
            input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        ).last_hidden_state[:, -1]  # (batch, width)
        all_logprobs = (model.lm_head(state) / TEMPERATURE).log_softmax(1)  # (batch, vocabulary)
        # Sample by inverse CDF: take the first token whose cumulative probability exceeds the random number.
        cdf = all_logprobs.double().exp().cumsum(1)  # (batch, vocabulary)
        tokens = torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True)  # (batch, 1)
        responses.append(tokens)
        logprobs.append(all_logprobs.gather(1, tokens))
        states.append(state)
        mask, positions = nn.functional.pad(mask, (0, 1), value=True), positions[:, -1:] + 1
    return torch.cat(responses, 1), torch.cat(logprobs, 1), torch.stack(states, 1)


def adam_step(optimizer: torch.optim.Adam, lr: float) -> None:
    """One step of TensorFlow's Adam. It adds epsilon to sqrt(v) before the bias correction; PyTorch adds it after."""
    group = optimizer.param_groups[0]
    group["steps"] = group.get("steps", 0) + 1
    group |= {"lr": lr, "eps": 1e-5 / math.sqrt(1 - 0.999 ** group["steps"])}
    optimizer.step()


# ---- Part 1: the reward model ----------------------------------------------------------------------------------


class RewardModel(nn.Module):
    """The language model with a linear head on the last token's state: score = gain * head(state) + bias."""

    def __init__(self, backbone: PreTrainedModel):
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(backbone.config.hidden_size, 1)
        nn.init.normal_(self.head.weight, std=1 / math.sqrt(backbone.config.hidden_size + 1))  # variance about 1
        nn.init.zeros_(self.head.bias)
        self.gain, self.bias = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gain * self.head(read(self.backbone, tokens)[:, -1]).squeeze(1) + self.bias  # (batch,)


@torch.no_grad()
def normalize(reward_model: RewardModel, language_model: PreTrainedModel, queries: Tensor, *key: int | str) -> None:
    """Set gain and bias so that texts written by the language model have scores with mean 0 and variance 1."""
    responses, _, _ = generate(language_model, queries, *key)  # (RM_SAMPLES, RESPONSE_LENGTH)
    reward_model.gain.fill_(1.0)
    reward_model.bias.fill_(0.0)
    scores = reward_model(torch.cat([queries, responses], dim=1)).double()  # (RM_SAMPLES,)
    gain = 1 / scores.std(unbiased=False).item()
    reward_model.gain.fill_(gain)
    reward_model.bias.fill_(-gain * scores.mean().item())


def train_reward_model(world: Path, tokenizer, language_model: PreTrainedModel, seed: int) -> RewardModel:
    rows = json.loads((world / "labels/sentiment/offline_5k.json").read_text())
    if len(rows) <= RM_CHOICES:
        raise SystemExit(f"{world} has {len(rows)} choices; {RM_CHOICES} to train on and some to hold out are needed")
    texts = torch.tensor([[row["query"] + row[f"sample{i}"] for i in range(4)] for row in rows])
    texts = texts.masked_fill(texts == 50259, PAD)  # (choices, 4, QUERY_LENGTH + RESPONSE_LENGTH); 50259 is padding
    best = torch.tensor([row["best"] for row in rows])  # (choices,), in 0..3
    lengths = (texts != PAD).sum(2).amax(1)  # (choices,); tokens of the longest of the four texts
    torch.manual_seed(seed)  # for the head's random weights
    reward_model = RewardModel(AutoModel.from_pretrained(world / "model", **GELU))
    optimizer = torch.optim.Adam(reward_model.parameters(), fused=True)
    # Choices tell which score should be higher, but not how high scores should be. So we normalise them: before
    # training, to start on a known scale, and after it, because PPO weighs the scores against a KL penalty.
    queries = query_batches(world, tokenizer, RM_SAMPLES)
    normalize(reward_model, language_model, next(queries), seed, "normalize", "before")
    order = torch.randperm(RM_CHOICES, generator=keyed_generator(seed, "labels"))
    for step, inds in enumerate(order.split(RM_BATCH)):
        inds = inds[lengths[inds].argsort(descending=True, stable=True)]  # (RM_BATCH,); sorted as in step 7 below
        scores = reward_model(texts[inds].flatten(0, 1)).view(-1, 4)  # (RM_BATCH, 4)
        loss = nn.functional.cross_entropy(scores, best[inds])  # softmax(scores): how likely each choice is
        optimizer.zero_grad()
        loss.backward()
        adam_step(optimizer, RM_LR * (1 - step * RM_BATCH / RM_CHOICES))
        print(f"reward model, step {step + 1}: loss {loss:.3f}", flush=True)
    normalize(reward_model, language_model, next(queries), seed, "normalize", "after")
    with torch.no_grad():
        guesses = torch.stack([reward_model(four).argmax() for four in texts[RM_CHOICES:]])  # (held-out choices,)
    accuracy = (guesses == best[RM_CHOICES:]).double().mean()
    print(f"The reward model predicts {accuracy:.1%} of the held-out choices; chance is 25%.\n")
    return reward_model


# ---- Part 2: PPO -----------------------------------------------------------------------------------------------


def truncate(responses: Tensor, stop: int) -> tuple[Tensor, Tensor]:
    """Pad what follows the stop token, (batch, RESPONSE_LENGTH), and tell which responses have one, (batch,)."""
    stops = (responses == stop) & (torch.arange(RESPONSE_LENGTH) >= STOP_AFTER)  # (batch, RESPONSE_LENGTH)
    stops_before = stops.cumsum(1) - stops.long()  # (batch, RESPONSE_LENGTH)
    return responses.masked_fill(stops_before > 0, PAD), stops.any(1)


def whiten(x: Tensor, *, keep_mean: bool) -> Tensor:
    """Scale to variance 1 and shift to mean 0, or keep the mean."""
    whitened = (x - x.mean()) * torch.rsqrt(x.var(unbiased=False) + 1e-8)
    return whitened + x.mean() if keep_mean else whitened


def compute_gae(rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages A and returns R by generalised advantage estimation. All tensors are (batch, RESPONSE_LENGTH).

    delta_t = r_t + gamma * V_{t+1} - V_t        A_t = delta_t + gamma * lambda * A_{t+1}        R_t = A_t + V_t
    """
    advantages = torch.zeros_like(values)
    next_advantage = next_value = torch.zeros_like(values[:, 0])  # (batch,); nothing follows the last token
    for t in reversed(range(RESPONSE_LENGTH)):
        delta = rewards[:, t] + GAMMA * next_value - values[:, t]  # (batch,)
        advantages[:, t] = next_advantage = delta + GAMMA * LAMBDA * next_advantage
        next_value = values[:, t]
    return advantages, advantages + values


def train_policy(world: Path, tokenizer, reference: PreTrainedModel, reward_model: RewardModel, seed: int):
    policy = AutoModelForCausalLM.from_pretrained(world / "model", **GELU)
    value_head = nn.Linear(policy.config.hidden_size, 1)  # the critic, which predicts the sum of future rewards
    for parameter in value_head.parameters():
        nn.init.zeros_(parameter)  # all first values are 0
    optimizer = torch.optim.Adam([*policy.parameters(), *value_head.parameters()], fused=True)
    batches, stop, kl_coef = query_batches(world, tokenizer, BATCH), tokenizer.encode(".")[0], KL_COEF
    for update in range(UPDATES):
        with torch.no_grad():
            # 1. Sample queries. Each update has new ones, so that the policy learns to continue any story.
            queries = next(batches)  # (BATCH, QUERY_LENGTH)

            # 2. Generate responses. Record log-probs and values: step 7 measures how far both have moved since.
            responses, logprobs, states = generate(policy, queries, seed, "policy", update)
            values = value_head(states).squeeze(2)  # (BATCH, RESPONSE_LENGTH), like responses and logprobs
            tokens = torch.cat([queries, responses], dim=1)  # (BATCH, QUERY_LENGTH + RESPONSE_LENGTH)

            # 3. Compute the log-probs of the reference, the original language model, which is never trained.
            ref_logprobs, _ = read_responses(reference, tokens)  # (BATCH, RESPONSE_LENGTH)

            # 4. Truncate and score. Without a stop token the score is low, so that the policy learns to finish.
            truncated, stopped = truncate(responses, stop)  # (BATCH, RESPONSE_LENGTH), (BATCH,)
            raw_scores = reward_model(torch.cat([queries, truncated], dim=1))  # (BATCH,)
            scores = torch.where(stopped, raw_scores, NO_STOP_SCORE)  # (BATCH,)

            # 5. Per-token rewards. The score judges the response as a whole, so the last token gets it. Every token,
            #    even after the stop, pays for its part of the KL divergence from the reference: the reward model only
            #    knows texts like the reference's, and far from them the policy could find high scores for bad texts.
            kl = logprobs - ref_logprobs  # (BATCH, RESPONSE_LENGTH), in nats
            rewards = -kl_coef * kl  # (BATCH, RESPONSE_LENGTH)
            rewards[:, -1] += scores

        lengths, size = (tokens != PAD).sum(1), BATCH // GROUPS  # (BATCH,); episodes per group
        advantages, returns = torch.zeros_like(values), torch.zeros_like(values)  # (BATCH, RESPONSE_LENGTH)
        for epoch in range(EPOCHS):
            keys = [(seed, "permutation", update, epoch, group) for group in range(GROUPS)]
            orders = torch.stack([torch.randperm(size, generator=keyed_generator(*key)) for key in keys])
            orders += size * torch.arange(GROUPS).unsqueeze(1)  # (GROUPS, size); each group's episodes, shuffled
            for mb_inds in orders.chunk(MINIBATCHES, dim=1):  # (GROUPS, size / MINIBATCHES)
                # 6. Advantages and returns. An advantage says how much better things went than the critic predicted,
                #    so a token is credited with what it changed, not with how easy the query was. Whitened, the
                #    steps do not depend on the scale of rewards. Rewards keep their mean, as in the original.
                for inds in mb_inds:  # (size / MINIBATCHES,)
                    group_rewards = whiten(rewards[inds], keep_mean=True)  # (size / MINIBATCHES, RESPONSE_LENGTH)
                    group_advantages, returns[inds] = compute_gae(group_rewards, values[inds])
                    advantages[inds] = whiten(group_advantages, keep_mean=False)

                # 7. One optimiser step. The ratio says how much more likely a token has become since it was sampled.
                #    Clipping removes the incentive to move it away from 1 by more than CLIP, because the advantages
                #    were measured under the old policy, and mean less as the policy changes. Values are clipped too.
                inds = mb_inds.flatten()  # (minibatch,); sorted by length so that sums round as in the big script:
                inds = inds[lengths[inds].argsort(descending=True, stable=True)]
                new_logprobs, states = read_responses(policy, tokens[inds])  # (minibatch, RESPONSE_LENGTH)
                ratio = torch.exp(new_logprobs - logprobs[inds])  # (minibatch, RESPONSE_LENGTH)
                losses = -advantages[inds] * ratio  # (minibatch, RESPONSE_LENGTH)
                clipped_losses = -advantages[inds] * ratio.clamp(1 - CLIP, 1 + CLIP)
                policy_loss = torch.maximum(losses, clipped_losses).mean()
                new_values = value_head(states).squeeze(2)  # (minibatch, RESPONSE_LENGTH)
                clipped_values = new_values.clamp(values[inds] - VALUE_CLIP, values[inds] + VALUE_CLIP)
                errors, clipped_errors = (new_values - returns[inds]) ** 2, (clipped_values - returns[inds]) ** 2
                value_loss = 0.5 * torch.maximum(errors, clipped_errors).mean()
                optimizer.zero_grad()
                (policy_loss + VALUE_COEF * value_loss).backward()
                adam_step(optimizer, LR * (1 - update / UPDATES))

        # 8. Log, and adapt the KL coefficient: it rises while the KL is above its target, and falls while below.
        mean_kl = kl.sum(1).double().mean().item()
        gold = sum(gold_score(tokenizer.decode(row[row != PAD])) for row in truncated) / BATCH
        print(f"update {update + 1}: score {scores.mean():.2f}, gold score {gold:.2f}, KL {mean_kl:.2f}", flush=True)
        kl_coef *= 1 + min(max(mean_kl / KL_TARGET - 1, -0.2), 0.2) * BATCH / KL_HORIZON
    return policy


def main() -> None:
    cache = Path(os.environ.get("PPO_RLHF_CACHE") or os.path.expanduser("~/.cache/ppo_rlhf"))
    newest = max(cache.glob("tales-????????????"), key=os.path.getmtime, default=cache / "tales")
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=Path, default=newest, help=f"folder of a tales world; default: {newest}")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if not (args.world / "stories.txt").is_file():
        parser.error(f"there is no world in {args.world}; build one with python ppo_rlhf/worlds/tales.py")
    tokenizer = AutoTokenizer.from_pretrained(args.world / "model")
    language_model = AutoModelForCausalLM.from_pretrained(args.world / "model", **GELU)
    reward_model = train_reward_model(args.world, tokenizer, language_model, args.seed)
    policy = train_policy(args.world, tokenizer, language_model, reward_model, args.seed)

    queries = next(query_batches(args.world, tokenizer, 400, held_out=True))  # (400, QUERY_LENGTH)
    print(f"\nA held-out story: {tokenizer.decode(queries[0][queries[0] != PAD])}")
    for name, model in {"The language model": language_model, "The policy": policy}.items():
        responses, _ = truncate(generate(model, queries, args.seed, "held-out")[0], tokenizer.encode(".")[0])
        texts = [tokenizer.decode(row[row != PAD]) for row in responses]
        gold = sum(map(gold_score, texts)) / len(texts)
        print(f"{name} continues: {texts[0]}\n    Mean gold score over {len(texts)} held-out stories: {gold:.2f}")


if __name__ == "__main__":
    main()
