"""What changes memory, and what it may change besides: logits in pieces, gradient checkpointing, frozen models in
bfloat16.
"""

from types import SimpleNamespace

import pytest
import torch
from processes import HELPERS, SCRIPTS
from runs import metrics_of, policy_arguments, posts_arguments, world_arguments
from whole_runs import Whole

from ppo_rlhf.tldr import models, packing
from ppo_rlhf.tldr.policy import ActorCritic
from ppo_rlhf.train_reward import RewardModel, prepare, save_reward_model

VOCAB = PAD = 29
TOKENS = torch.randint(1, VOCAB, (3, 11), generator=torch.Generator().manual_seed(0))
TOKENS[0, :4] = TOKENS[1, 8:] = PAD
RUN = HELPERS / "checkpointed_run.py"


def one_pass(network: ActorCritic) -> tuple[list[torch.Tensor], int]:
    """Results and gradients of a pass forward and backward; how many numbers it keeps in between."""
    kept = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.numel() if tensor.requires_grad and not tensor.is_leaf else 0
        return tensor

    network.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        results = network(TOKENS, TOKENS[:, 6:], PAD, 0.7)
    sum((tensor * tensor).sum() for tensor in results if tensor.requires_grad).backward()
    return [*results, *(p.grad for p in network.parameters() if p.grad is not None)], kept


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox", "llama", "qwen2"])
def test_what_keeps_less_gives_the_same(architecture, tiny_models, monkeypatch):
    policy, other = (tiny_models(architecture, seed=seed).eval().double() for seed in (0, 1))
    network = ActorCritic(policy, RewardModel(other.base_model).double(), VOCAB)
    expected, all_kept = one_pass(network)
    monkeypatch.setattr(packing, "MOST_LOGITS", 2 * 5 * VOCAB + 1)  # of two rows
    in_pieces, fewer = one_pass(network)
    assert fewer < all_kept
    torch.testing.assert_close(in_pieces, expected, rtol=1e-12, atol=1e-13)
    monkeypatch.undo()
    for backbone in (policy, network.critic.lm_backbone):
        prepare(backbone, SimpleNamespace(gradient_checkpointing=True, dtype="float64"))
    actual, kept = one_pass(network)
    assert all(map(torch.equal, actual, expected)) and kept < 0.5 * all_kept


POSTS = (
    "--sft.batch_size 16 --sft.epochs 1 --sft.eval_posts 4 --reward.batch_size 16 --reward.normalize_posts 4 "
    "--policy.ppo.total_episodes 16 --policy.ppo.batch_size 8 --policy.ppo.nminibatches 1 --policy.eval_interval 0 "
    "--policy.eval_posts 4"
)


@pytest.mark.parametrize("chapter", [1, 2])
def test_every_stage_computes_layers_twice_if_it_is_to(chapter, both, tiny_posts, tmp_path):
    """In chapter 1, the numbers are those of a run that keeps everything. The models have one layer."""
    if chapter == 1:
        script, words, stages = "train_both.py", both.arguments, ("reward", "policy")
        layers = 5 + 4 * 4  # steps of the reward model; updates of four epochs
    else:
        words = [*posts_arguments(tiny_posts), "--base_model", str(tiny_posts / "model"), *POSTS.split()]
        script, stages = "tldr/all.py", ("sft", "reward", "policy")
        # Steps of 16 posts; of 16 pairs, in two passes; updates of four epochs, of policy and critic.
        layers = 3 + 2 * 3 + 2 * 4 * 2
    flags = [f"--{stage}.gradient_checkpointing" for stage in stages]
    run = Whole(tmp_path / "run", str(RUN), [str(SCRIPTS / script), *words, *flags]).made()
    assert int((run.folder / "checkpoints").read_text()) == layers
    for stage in stages if chapter == 1 else ():
        assert metrics_of(run.run(f"train_{stage}")) == metrics_of(both.run(f"train_{stage}"))


def test_a_frozen_reward_model_has_a_head_in_full_precision(tiny_models, tiny_tokenizer, tmp_path):
    saved = RewardModel(tiny_models("llama").base_model.eval())
    torch.nn.init.constant_(saved.bias, 1.5)
    save_reward_model(tmp_path, saved, tiny_tokenizer, {})
    exact, rounded = (models.load_reward_model(tmp_path, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert {parameter.dtype for parameter in rounded.lm_backbone.parameters()} == {torch.bfloat16}
    own = [rounded.gain, rounded.bias, *rounded.reward_head.parameters(), *rounded.buffers()]
    assert {tensor.dtype for tensor in own} == {torch.float32}
    scores, expected = rounded(TOKENS, PAD), exact(TOKENS, PAD)
    assert scores.dtype == torch.float32 and not torch.equal(scores, expected)
    torch.testing.assert_close(scores, expected, rtol=0, atol=0.1)


def test_a_run_of_chapter_1_with_frozen_models_in_bfloat16(both, tiny_world, tiny_reward, tmp_path):
    words = [*world_arguments(tiny_world, tiny_reward), *policy_arguments(), "--ppo.total_episodes", "16"]
    run = Whole(tmp_path / "run", "train_policy.py", [*words, "--frozen_bfloat16"]).made()
    exact, rounded = (metrics_of(each.run("train_policy"))[0] for each in (both, run))
    assert abs(exact["objective/kl"]) < 1e-5 < abs(rounded["objective/kl"]) < 0.05
    assert exact["objective/score"] != rounded["objective/score"]
    assert rounded["objective/score"] == pytest.approx(exact["objective/score"], abs=0.05)
