"""RLHF with PPO in one file, to read from top to bottom.

A small language model can continue short stories. An annotator has compared four continuations of each
of 6,000 queries, the beginnings of stories, and picked the best. (The annotator is simulated: it likes
pleasant words and dislikes unpleasant ones, but its choices are noisy.) From these choices alone, the
model learns what to write:

    Part 1: A reward model learns to predict the choices. It reads a text and returns a score, a number.
    Part 2: A policy, which starts as a copy of the language model, learns with PPO to write texts with
            high scores.

In the words of reinforcement learning, writing is a game with one move per token. The state is the
query and what has been written so far. An action is the next token, and the policy is the language
model, which gives each action a probability. An episode is one response. Its reward is the score, which
comes with the last action, less a penalty for actions that the language model would hardly have taken.
PPO makes actions that went better than expected likelier.

    python ppo_rlhf/small/ppo.py                   # about ten minutes; --help has more flags
    python ppo_rlhf/small/ppo.py --updates 20      # gold score from -0.1 to 2.4, KL 1.7
    python ppo_rlhf/small/ppo.py --updates 20 --kl_coef 0    # 3.8, but at KL 8.0

"The original" is "Fine-Tuning Language Models from Human Preferences" (Ziegler et al., 2019, arXiv
1909.08593) with its code, openai/lm-human-preferences on GitHub. It had eight processes, and each did
step 6 for its own part of a minibatch; here, it is done for the batch. Otherwise, `train_both.py
--preset tales` is the same algorithm: with --policy.ppo.whiten_groups 1, both train the same weights,
but for rounding (tests/numbers/test_small.py).
"""

import argparse
import hashlib
import json
import lzma
import random
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

# ---- Part 1: the reward model ------------------------------------------------------------------------

RM_BATCH = 32  # choices per optimiser step
RM_LR = 1e-3  # learning rate of the first step; it falls linearly
RM_SAMPLES = 512  # texts by the language model on which the scores are normalised
GELU = {"activation_function": "gelu_pytorch_tanh"}  # the fastest form of GPT-2's


class RewardModel(nn.Module):
    """A language model with a linear head: score = gain * head(last state) + bias."""

    def __init__(self, backbone: PreTrainedModel, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        width = backbone.config.hidden_size
        self.backbone = backbone
        self.head = nn.Linear(width, 1)
        # The first scores have a variance of about 1.
        nn.init.normal_(self.head.weight, std=(width + 1) ** -0.5)
        nn.init.zeros_(self.head.bias)
        self.gain = nn.Parameter(torch.ones(()))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores (batch,) of tokens (batch, length)."""
        last = read(self.backbone, tokens)[:, -1]  # (batch, width)
        return self.gain * self.head(last).squeeze(1) + self.bias

    @torch.no_grad()
    def normalize(self, tokens: Tensor) -> None:
        """Make the scores of these texts have mean 0 and variance 1."""
        scores = self(tokens).double()  # (batch,)
        self.gain.div_(scores.std(unbiased=False))
        self.bias.sub_(scores.mean()).div_(scores.std(unbiased=False))


def train_reward_model(args, choices: list[dict], queries: Tensor, language_model: PreTrainedModel) -> RewardModel:
    reward_model = RewardModel(AutoModel.from_pretrained(args.world / "model", **GELU), args.seed)
    texts = [[row["query"] + row[f"sample{i}"] for i in range(4)] for row in choices]
    texts = torch.tensor(texts)  # (choices, 4, QUERY_LENGTH + RESPONSE_LENGTH)
    texts = texts.masked_fill(texts == LABELS_PAD, PAD)
    best = torch.tensor([row["best"] for row in choices])  # (choices,), in 0..3
    optimizer = torch.optim.Adam(reward_model.parameters(), fused=True)

    # Choices tell which score should be higher, but not how high scores should be. So we normalise them:
    # before training, to start on a known scale, and after it, because PPO weighs the scores against a KL
    # penalty.
    before, after = queries[: 2 * RM_SAMPLES].split(RM_SAMPLES)
    reward_model.normalize(generate(language_model, before, args.seed, "normalize", "before"))

    order = torch.randperm(args.choices, generator=keyed_generator(args.seed, "labels"))
    for step, inds in enumerate(order.split(RM_BATCH)):  # (RM_BATCH,)
        scores = reward_model(texts[inds].flatten(0, 1)).view(-1, 4)  # (RM_BATCH, 4)
        # softmax(scores) is how likely each text is to be picked. With two texts, this is the Bradley-Terry
        # model.
        loss = nn.functional.cross_entropy(scores, best[inds])
        adam_step(optimizer, loss, RM_LR * (1 - step * RM_BATCH / args.choices))
        print(f"reward model, step {step + 1}: loss {loss:.3f}", flush=True)

    reward_model.normalize(generate(language_model, after, args.seed, "normalize", "after"))
    guesses = torch.stack([reward_model(four).argmax() for four in texts[args.choices :]])
    accuracy = (guesses == best[args.choices :]).double().mean()
    print(f"The reward model predicts {accuracy:.1%} of the held-out choices; chance is 25%.\n")
    return reward_model


# ---- Part 2: PPO -------------------------------------------------------------------------------------


def train_policy(
    args, tokenizer, all_queries: Tensor, reference: PreTrainedModel, reward_model: RewardModel
) -> PreTrainedModel:
    # Dropout is off, as from_pretrained leaves it. With it, the ratio in step 7 would be random from the
    # start.
    policy = AutoModelForCausalLM.from_pretrained(args.world / "model", **GELU)
    # The value head is the critic, which predicts the sum of future rewards. All its first values are 0.
    value_head = nn.Linear(policy.config.hidden_size, 1)
    nn.init.zeros_(value_head.weight)
    nn.init.zeros_(value_head.bias)
    optimizer = torch.optim.Adam([*policy.parameters(), *value_head.parameters()], fused=True)
    stop = tokenizer.encode(".")[0]
    kl_coef = args.kl_coef

    for update in range(args.updates):
        with torch.no_grad():
            # 1. The next queries, in random order. None comes again before all were used, so that none is
            #    learned by heart.
            queries = all_queries.roll(-update * args.batch, dims=0)[: args.batch]

            # 2. Generate responses. Compute log-probs and values, as step 7 will, which measures how far
            #    they move. Both: (batch, RESPONSE_LENGTH).
            tokens = generate(policy, queries, args.seed, "policy", update)
            logprobs, states = read_responses(policy, tokens)
            values = value_head(states).squeeze(2)

            # 3. Compute the log-probs of the reference, the language model, which is never trained.
            ref_logprobs, _ = read_responses(reference, tokens)

            # 4. Truncate and score. Without a stop token the score is low, so that the policy learns to
            #    finish.
            truncated, stopped = truncate(tokens, stop)
            raw_scores = reward_model(truncated)  # (batch,)
            scores = torch.where(stopped, raw_scores, NO_STOP_SCORE)

            # 5. Per-token rewards. The score judges the response as a whole, so the last token gets it.
            #    Every token pays for its part of the KL divergence from the reference: the reward model
            #    only knows texts like the reference's, and far from them the policy could find high scores
            #    for bad texts. As in the original, tokens after the stop are trained like the others: the
            #    score is blind to them, but they pay.
            kl = logprobs - ref_logprobs  # (batch, RESPONSE_LENGTH), in nats
            rewards = -kl_coef * kl  # (batch, RESPONSE_LENGTH)
            rewards[:, -1] += scores

            # 6. Advantages and returns. A return estimates the sum of the rewards from a token on; the
            #    critic learns to predict it. An advantage says how much better it went than predicted, so a
            #    token is credited with what it changed, not with an easy query. Whitening keeps returns,
            #    and the size of steps, on one scale whatever that of the scores. Rewards keep their mean:
            #    it is part of every return.
            rewards = whiten(rewards, keep_mean=True)
            advantages, returns = compute_gae(rewards, values, args.gamma, args.lam)
            advantages = whiten(advantages, keep_mean=False)

        # 7. Epochs over minibatches. The ratio, 1 at first, says how much likelier a token has become since
        #    it was sampled. Advantages A are those of the old policy, so the new one must stay near it:
        #    where A > 0, a ratio above 1 + clip gains nothing more, and where A < 0, one below 1 - clip.
        #    The maximum sees to it that nothing else is clipped: a token that has gone the wrong way keeps
        #    its gradient, which pulls it back.
        lr = args.lr * (1 - update / args.updates)
        clipped = []
        value_losses = []
        for epoch in range(args.epochs):
            noise = keyed_generator(args.seed, "permutation", update, epoch)
            b_inds = torch.randperm(args.batch, generator=noise)
            for mb_inds in b_inds.chunk(args.minibatches):  # (minibatch,)
                # All that follows is (minibatch, RESPONSE_LENGTH).
                new_logprobs, states = read_responses(policy, tokens[mb_inds])
                ratio = torch.exp(new_logprobs - logprobs[mb_inds])
                losses = -advantages[mb_inds] * ratio
                clipped_losses = -advantages[mb_inds] * ratio.clamp(1 - args.clip, 1 + args.clip)
                policy_loss = torch.maximum(losses, clipped_losses).mean()

                # Values are clipped too, with the same maximum: returns are noisy, so no batch may move
                # them far. The 0.5 makes the gradient the error. Critic and policy share a network, hence
                # its small weight.
                mb_values = values[mb_inds]
                new_values = value_head(states).squeeze(2)
                clipped_values = new_values.clamp(mb_values - args.value_clip, mb_values + args.value_clip)
                errors = (new_values - returns[mb_inds]) ** 2
                clipped_errors = (clipped_values - returns[mb_inds]) ** 2
                value_loss = 0.5 * torch.maximum(errors, clipped_errors).mean()

                loss = policy_loss + args.value_coef * value_loss
                adam_step(optimizer, loss, lr)
                clipped.append((clipped_losses > losses).double().mean())
                value_losses.append(value_loss.detach())

        # 8. Log, and adapt the KL coefficient: it rises while the KL is above its target, and falls while
        #    it is below.
        mean_kl = kl.sum(1).double().mean().item()
        gold = gold_score(to_texts(tokenizer, truncated)[1])
        print(f"update {update + 1}: score {scores.mean():.2f}, gold score {gold:.2f}, KL {mean_kl:.2f}", end=", ")
        print(f"KL coefficient {kl_coef:.4f}, {torch.stack(clipped).mean():.2%} clipped", end=", ")
        print(f"value loss {torch.stack(value_losses).mean():.4f}", flush=True)
        error = min(max(mean_kl / args.kl_target - 1, -0.2), 0.2)
        kl_coef *= 1 + error * args.batch / args.kl_horizon
    return policy


def whiten(x: Tensor, *, keep_mean: bool) -> Tensor:
    """Scale to variance 1 and shift to mean 0, or keep the mean."""
    whitened = (x - x.mean()) * torch.rsqrt(x.var(unbiased=False) + 1e-8)
    return whitened + x.mean() if keep_mean else whitened


def compute_gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages A and returns R by generalised advantage estimation, all (batch, RESPONSE_LENGTH).

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t = delta_t + gamma * lambda * A_{t+1}
        R_t = A_t + V_t

    delta is how much better a step went than the values V predicted. With lambda 0, A is the token's own
    delta: it has little noise, but is wrong where V is. With lambda 1, A is the sum of all rewards from t on,
    minus V_t: right on average even if V is wrong, but with the noise of all later tokens. Lambda trades one
    for the other.
    """
    advantages = torch.zeros_like(values)
    next_advantage = torch.zeros_like(values[:, 0])  # (batch,)
    next_value = torch.zeros_like(values[:, 0])  # nothing follows the last token
    for t in reversed(range(RESPONSE_LENGTH)):
        delta = rewards[:, t] + gamma * next_value - values[:, t]  # (batch,)
        next_advantage = delta + gamma * lam * next_advantage
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages, advantages + values


def adam_step(optimizer: torch.optim.Adam, loss: Tensor, lr: float) -> None:
    """One step of TensorFlow's Adam, as in the original: it adds epsilon before the bias correction, not after."""
    group = optimizer.param_groups[0]
    group["steps"] = group.get("steps", 0) + 1
    group["lr"] = lr
    group["eps"] = 1e-5 / (1 - 0.999 ** group["steps"]) ** 0.5
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# ---- How a model reads and writes --------------------------------------------------------------------

QUERY_LENGTH = 24  # tokens; shorter queries are padded
RESPONSE_LENGTH = 24  # tokens of all responses
STOP_AFTER = 16  # truncate after the first full stop from this index on
NO_STOP_SCORE = -1.0  # if there is none
TEMPERATURE = 0.7  # logits are divided by this; below 1, samples are less random
PAD = -1


@torch.no_grad()
def generate(model: PreTrainedModel, queries: Tensor, *key: int | str) -> Tensor:
    """Sample responses to queries (batch, QUERY_LENGTH). Return both, (batch, QUERY_LENGTH + RESPONSE_LENGTH)."""
    shape = (len(queries), RESPONSE_LENGTH)
    noise = torch.rand(shape, generator=keyed_generator(*key), dtype=torch.float64)
    tokens = queries
    cache = DynamicCache(config=model.config)
    for uniform in noise.split(1, dim=1):  # (batch, 1), in [0, 1)
        logits = model.lm_head(read(model, tokens, cache)[:, -1])  # (batch, vocabulary)
        # Sample the first token whose cumulative probability exceeds the random number. With
        # torch.multinomial, the smallest change of the policy would lead to other samples, and runs would
        # be harder to compare.
        cdf = (logits / TEMPERATURE).double().softmax(1).cumsum(1)
        sampled = torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True)
        tokens = torch.cat([tokens, sampled], dim=1)
    return tokens


def read_responses(model: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of the responses (batch, RESPONSE_LENGTH), and the hidden states that predict them."""
    # The state at one position predicts the token at the next position; hence the shift by one.
    states = read(model, tokens)[:, -RESPONSE_LENGTH - 1 : -1]
    logits = model.lm_head(states) / TEMPERATURE
    all_logprobs = logits.log_softmax(2)  # (batch, RESPONSE_LENGTH, vocabulary)
    responses = tokens[:, -RESPONSE_LENGTH:].unsqueeze(2)  # (batch, RESPONSE_LENGTH, 1)
    return all_logprobs.gather(2, responses).squeeze(2), states


def read(model: PreTrainedModel, tokens: Tensor, cache: DynamicCache | None = None) -> Tensor:
    """Hidden states (batch, longest, width) of tokens (batch, length), without the columns in the cache."""
    # Padding is moved to the left: [[5, PAD, PAD], [6, PAD, 7]] becomes [[PAD, 5], [6, 7]]. The mask hides
    # it, and positions count real tokens only.
    longest = (tokens != PAD).sum(1).max()
    order = (tokens != PAD).int().argsort(dim=1, stable=True)  # (batch, length)
    tokens = tokens.gather(1, order)[:, -longest:]  # (batch, longest)
    mask = tokens != PAD
    positions = mask.cumsum(1) - mask.long()  # (batch, longest)
    known = 0 if cache is None else cache.get_seq_length()  # columns
    output = model.base_model(
        input_ids=tokens.masked_fill(~mask, 0)[:, known:],
        position_ids=positions[:, known:],
        attention_mask=mask,
        past_key_values=cache,
    )
    return output.last_hidden_state


def truncate(tokens: Tensor, stop: int) -> tuple[Tensor, Tensor]:
    """Pad what follows the stop token of a response; tell which have one, (batch,)."""
    columns = torch.arange(tokens.shape[1])
    counts = columns >= QUERY_LENGTH + STOP_AFTER
    stops = (tokens == stop) & counts  # (batch, length)
    stops_before = stops.cumsum(1) - stops.long()
    return tokens.masked_fill(stops_before > 0, PAD), stops.any(1)


def keyed_generator(*key: int | str) -> torch.Generator:
    """Random numbers that depend on this key alone: a change of one part leaves the noise of others as it is."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


def to_texts(tokenizer, tokens: Tensor) -> list[list[str]]:
    """The texts of queries, and those of responses."""
    parts = tokens.split(QUERY_LENGTH, dim=1)
    return [[tokenizer.decode(row[row != PAD]) for row in part] for part in parts]


# ---- The world: queries, choices, and what the annotator likes ---------------------------------------

WORLD = Path(__file__).parents[1] / "worlds/data/tales"
LABELS = "labels/sentiment/offline_5k.json.xz"
LABELS_PAD = 50259  # the padding id in files of choices, which have the original's form


def read_queries(world: Path, tokenizer, *, held_out: bool = False) -> Tensor:
    """Queries (n, QUERY_LENGTH): a story's second sentence and all that fit after it."""
    stories = lzma.decompress((world / "stories.txt.xz").read_bytes()).decode().splitlines()
    stories = [s for i, s in enumerate(stories) if (i % 50 == 49) == held_out]
    random.Random(0).shuffle(stories)
    stop = tokenizer.encode(".")[0]
    rows = []
    for tokens in tokenizer(stories).input_ids:
        tokens = tokens[tokens.index(stop) + 1 :][:QUERY_LENGTH]
        if stop in tokens:
            tokens = tokens[: len(tokens) - tokens[::-1].index(stop)]  # up to the last
            rows.append(tokens + [PAD] * (QUERY_LENGTH - len(tokens)))
    return torch.tensor(rows)


PLEASANT = """
    lovely gentle cheerful golden sweet bright kind charming splendid cosy merry peaceful noble tender
    gladly kindly happily warmly proudly gracefully praised helped thanked kissed cheered healed rescued
    happy hopeful grateful loved calm delighted laughter music joy luck friendship comfort friend hero
    angel healer singer saint
"""
UNPLEASANT = """
    gloomy cruel rotten bitter wicked nasty hateful dreadful filthy broken miserable deadly vile mean
    sadly rudely coldly angrily cruelly painfully cursed robbed mocked cheated hurt betrayed insulted
    lonely afraid ashamed furious sick hopeless hunger grief fear trouble pain misery thief liar villain
    bully monster traitor
"""


def gold_score(texts: list[str]) -> float:
    """How good texts truly are for the annotator, on average. We only print it: of real people, nobody knows it."""
    words = re.findall(r"\w+", " ".join(texts))
    good = sum(word in PLEASANT.split() for word in words)
    bad = sum(word in UNPLEASANT.split() for word in words)
    return (good - bad) / len(texts)


# ---- The command -------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--world", type=Path, default=WORLD, help="folder of a tales world")
    add("--seed", type=int, default=1, help="seed of all random numbers")
    add("--choices", type=int, default=4_992, help="choices that train the reward model")
    add("--reward_model", default="", help="a file that keeps the reward model for later runs")
    add("--updates", type=int, default=200, help="PPO updates")
    add("--batch", type=int, default=64, help="episodes per update")
    add("--epochs", type=int, default=4, help="passes over the batch per update")
    add("--minibatches", type=int, default=1, help="optimiser steps per pass")
    add("--lr", type=float, default=2e-4, help="learning rate of the first update; it falls linearly")
    add("--clip", type=float, default=0.2, help="clip range of probability ratios, around 1")
    add("--value_clip", type=float, default=0.2, help="clip range of values, around the old value")
    add("--value_coef", type=float, default=0.1, help="weight of the value loss")
    add("--gamma", type=float, default=1.0, help="discount of later rewards, per token")
    add("--lam", type=float, default=0.95, help="lambda of GAE; compute_gae says what it does")
    add("--kl_coef", type=float, default=0.15, help="weight of the KL penalty in the first update")
    add("--kl_target", type=float, default=6.0, help="the KL controller's target, in nats per response")
    add("--kl_horizon", type=float, default=1_000, help="the KL controller's time scale, in episodes")
    args = parser.parse_args()
    if not (args.world / "stories.txt.xz").is_file():
        parser.exit(2, f"error: {args.world} has no stories.txt.xz; {WORLD} is a world\n")

    tokenizer = AutoTokenizer.from_pretrained(args.world / "model")
    queries = read_queries(args.world, tokenizer)
    held_out = read_queries(args.world, tokenizer, held_out=True)
    choices = json.loads(lzma.decompress((args.world / LABELS).read_bytes()))
    least = max(2 * RM_SAMPLES, args.batch)
    if len(queries) < least or len(choices) <= args.choices or not len(held_out):
        found = f"{args.world} has {len(queries)} queries, {len(held_out)} held-out ones and {len(choices)} choices"
        parser.exit(2, f"error: {found}; at least {least}, 1 and {args.choices + 1} are needed\n")

    language_model = AutoModelForCausalLM.from_pretrained(args.world / "model", **GELU)
    if args.reward_model and Path(args.reward_model).is_file():
        reward_model = RewardModel(AutoModel.from_pretrained(args.world / "model", **GELU), args.seed)
        reward_model.load_state_dict(load_file(args.reward_model))
    else:
        reward_model = train_reward_model(args, choices, queries, language_model)
        if args.reward_model:
            save_file(reward_model.state_dict(), args.reward_model)
    reward_model.requires_grad_(False)
    policy = train_policy(args, tokenizer, queries, language_model, reward_model)
    for name, model in {"language model": language_model, "policy": policy}.items():
        tokens = generate(model, held_out, args.seed, "held-out")
        truncated, _ = truncate(tokens, tokenizer.encode(".")[0])
        stories, texts = to_texts(tokenizer, truncated)
        print(f"\nA held-out story: {stories[0]}")
        print(f"The {name} continues: {texts[0]}")
        score, gold = reward_model(truncated).mean(), gold_score(texts)
        print(f"    Over {len(texts)} stories, the mean score is {score:.2f}, and the mean gold score {gold:.2f}.")


if __name__ == "__main__":
    main()
