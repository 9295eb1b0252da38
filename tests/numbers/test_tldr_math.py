"""Chapter 2 by enumeration and by hand: the penalty, rates, batches, pairs. Golden numbers prove the rest."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from golden_models import load_json
from oracles import double, masks_of, numbers, on_processes, spoil
from torch.testing import assert_close

from ppo_rlhf.tldr import policy, posts
from ppo_rlhf.tldr.policy import compute_gae, compute_rewards, policy_loss, posts_of_update, value_loss
from ppo_rlhf.tldr.posts import trim_padding
from ppo_rlhf.tldr.responses import draw_minibatches
from ppo_rlhf.tldr.reward import pairwise_losses, prefers_chosen
from ppo_rlhf.tldr.sft import cosine_lr, next_token_mask
from ppo_rlhf.tldr.shares import map_rows
from ppo_rlhf.train_policy import episode_noise, make_accelerator, parse_args

EOS, PAD = 28, 29


# ---- What the penalty does to a policy, by going through all 9 sequences of 2 tokens out of 3 ------------------

SEQUENCES = torch.cartesian_prod(torch.arange(3), torch.arange(3))  # (9, 2)
ENUMERATION = load_json("kl_enumeration")


def sequence_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """Log-probs (9, 2) of the tokens. logits: (4, 3), those of the first token, then those after each first token."""
    table, (first, second) = logits.log_softmax(1), SEQUENCES.T
    return torch.stack([table[0, first], table[1 + first, second]], dim=1)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_only_k1_has_the_gradient_of_the_divergence(estimator):
    """The expected policy gradient of the penalty alone. Far from the reference, that of k3 even points away."""
    logits, ref_logits = (double(*ENUMERATION[name]) for name in ("logits", "ref_logits"))
    logprobs, mask = sequence_logprobs(logits.requires_grad_()), torch.ones(9, 2, dtype=torch.bool)
    old, zeros = logprobs.detach(), torch.zeros(9, 2, dtype=torch.float64)
    rewards, _, _ = compute_rewards(zeros[:, 0], old, sequence_logprobs(ref_logits), mask, 1.0, estimator)
    to_come, _ = compute_gae(rewards, zeros, mask, gamma=1.0, lam=1.0)  # (9, 2)
    gradient = -torch.autograd.grad((old.sum(1).exp() * (logprobs * to_come).sum(1)).sum(), logits)[0]
    golden = ENUMERATION["gradients"]
    assert_close(gradient, double(*golden[f"{estimator} in the reward"]["grad"]), atol=1e-11, rtol=0)
    true = double(*golden["true"]["grad"])
    assert torch.allclose(gradient, true, atol=1e-11) == (estimator == "k1")
    assert ((gradient * true).sum() > 0) == (estimator == "k1")


# ---- Losses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [policy_loss, value_loss])
def test_what_is_in_masked_places_does_not_matter(loss):
    mask, _ = masks_of([1, 7, 4, 2], 7)
    clean, found = [numbers(i, 4, 7) for i in range(3)], []
    for tensors in (clean, [spoil(x, mask, i) for i, x in enumerate(clean)]):
        new = tensors[0].clone().requires_grad_()
        results = loss(new, *tensors[1:], mask, 0.2, mask.sum())
        found.append([*results, torch.autograd.grad(results[0], new)[0]])
    assert all(map(torch.equal, *found))


# ---- Learning rate, posts, minibatches, shares of processes ----------------------------------------------------


def test_cosine_lr():
    """1.1: from the full rate, without warm-up; 0 would come after the last step."""
    rates = [4.0, 2 + math.sqrt(2), 2.0, 2 - math.sqrt(2)]
    assert [cosine_lr(4.0, step, 4) for step in range(4)] == pytest.approx(rates)


@pytest.mark.parametrize(("posts", "batch"), [(10, 4), (5, 5), (3, 8)])
def test_posts_come_in_passes_without_a_gap(posts, batch):
    """Batches may lie across passes; each pass has every post once, in an order of its own."""
    drawn = [posts_of_update(3, posts, update, batch) for update in range(6 * posts)]
    assert all(len(inds) == batch for inds in drawn)
    passes = torch.cat(drawn)[: 6 * posts * batch].view(-1, posts).tolist()
    assert all(sorted(order) == list(range(posts)) for order in passes)
    if posts > 4:
        assert len({tuple(order) for order in passes}) > len(passes) / 2
        assert posts_of_update(4, posts, 0, batch).tolist() != drawn[0].tolist()


@pytest.mark.parametrize(("batch", "nminibatches"), [(16, 1), (24, 3), (8, 8)])
def test_minibatches_share_the_batch_out(batch, nminibatches):
    """T48: every episode once per epoch; of nminibatches episodes in a row each minibatch gets one."""
    (inds,) = draw_minibatches(1, 0, 1, slice(0, batch), nminibatches)
    assert sorted(inds.flatten().tolist()) == list(range(batch))
    for minibatch in inds.tolist():
        assert sorted(i // nminibatches for i in minibatch) == list(range(batch // nminibatches))


def test_minibatches_and_noise_belong_to_seed_update_and_epoch():
    drawn = [draw_minibatches(*key, 2, slice(0, 64), 2).tolist() for key in ((1, 0), (2, 0), (1, 1))]
    assert len({str(inds) for epochs in drawn for inds in epochs}) == 6
    assert drawn[0][:1] == draw_minibatches(1, 0, 1, slice(0, 64), 2).tolist()
    first, second, other = (episode_noise(seed, 3, 8, 5) for seed in (1, 1, 2))
    assert torch.equal(first, second) and not torch.equal(first, other)


@pytest.mark.parametrize(("processes", "rows"), [(2, 8), (3, 1), (3, 11)])
def test_map_rows_gives_every_row_once_and_in_order(processes, rows):
    """Defect 1: rows that fill up the last batch are dropped again."""
    for tens, inds in on_processes(processes, partial(map_rows, lambda inds: (10 * inds, inds), rows, 4)):
        assert inds.tolist() == list(range(rows)) and tens.equal(10 * inds)


# ---- Pairs, next tokens, padding -------------------------------------------------------------------------------


def test_pairwise_losses_by_hand():
    """T25; also where exp would overflow."""
    losses = pairwise_losses(double(1.0, 0.0, 900.0, -900.0), double(0.0, 1.0, -900.0, 900.0))
    assert losses.tolist() == pytest.approx([math.log1p(math.exp(-1)), 1 + math.log1p(math.exp(-1)), 0, 1800])


def test_a_tie_is_wrong():
    assert prefers_chosen(double(1.0, 1.0, 1.0), double(1.0, 1.0 - 1e-9, 1.0 + 1e-9)).tolist() == [False, True, False]


def test_tokens_that_are_predicted():
    """T21: those with a token before them, the first of a row and what follows padding apart; EOS is one of them."""
    tokens = torch.tensor([[PAD, PAD, 5, 6, EOS, PAD], [1, 2, 3, 4, 5, EOS], [7, PAD, PAD, PAD, PAD, PAD]])
    expected = [[0, 0, 1, 1, 0], [1, 1, 1, 1, 1], [0] * 5]
    assert next_token_mask(tokens, PAD).int().tolist() == expected


def test_columns_that_are_padding_in_every_row_go():
    """But for the first one."""
    left, right = torch.tensor([[PAD, PAD, 1], [PAD, PAD, 1]]), torch.tensor([[2, PAD, PAD], [3, 4, PAD]])
    assert trim_padding(left, right, pad_id=PAD).tolist() == [[PAD, 1, 2, PAD], [PAD, 1, 3, 4]]
    assert trim_padding(torch.full((2, 4), PAD), pad_id=PAD).tolist() == [[PAD], [PAD]]


# ---- The scale of a function ------------------------------------------------------------------------------------


def test_the_scale_of_a_function_is_that_of_training(tiny_models, tiny_tokenizer):
    """Its texts are sampled at the temperature of training, whatever that of evaluations is."""
    networks = SimpleNamespace(lm_backbone=tiny_models("gpt2").eval())
    ids = posts.TaskIds(pad=PAD, stops=(EOS,), eos=EOS)
    rows = posts.Posts(queries=torch.tensor([[1, 2]] * 9), references=torch.tensor([[5, 6, EOS]] * 9), too_long=0)
    seen = []

    def score(queries: torch.Tensor, responses: torch.Tensor, references: torch.Tensor) -> torch.Tensor:
        seen.append(responses.double().sum(1))
        return seen[-1]

    def scale(temperature: float, eval_temperature: float) -> tuple[float, float]:
        words = (
            f"--task.temperature {temperature} --task.eval_temperature {eval_temperature} --task.response_length 3"
        )
        args = parse_args(policy.PRESETS, f"{words} --task.query_length 2 --rewards.normalize_samples 8".split())
        return policy.scale_of_scores(args, ids, rows, networks, score, make_accelerator("float64"))

    found = scale(1.0, 0.01)
    assert len(seen[0]) == 8 and found == pytest.approx((float(seen[0].mean()), float(seen[0].std(correction=0))))
    assert found == scale(1.0, 3.0) != scale(0.01, 3.0)
