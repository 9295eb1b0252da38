"""What changes memory and nothing else: gradient checkpointing, in all training scripts."""

from pathlib import Path

import pytest
import torch
from processes import SCRIPTS, launch
from runs import metrics_of, only, policy_arguments, posts_arguments, reward_arguments, world_arguments

from ppo_rlhf.lib import lm, models
from ppo_rlhf.tldr_policy import ActorCritic

VOCAB = PAD = 29
TOKENS = torch.randint(1, VOCAB, (3, 11), generator=torch.Generator().manual_seed(0))
TOKENS[0, :4] = TOKENS[1, 8:] = PAD
CONTEXT = 6
RUN = Path(__file__).parent / "checkpointed_run.py"


# ---- Gradient checkpointing ------------------------------------------------------------------------------------


def passes(network: ActorCritic) -> tuple[list[torch.Tensor], int]:
    """Results and gradients of a pass forward and backward; how many numbers it keeps in between."""
    kept = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.numel() if tensor.requires_grad and not tensor.is_leaf else 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        results = network(TOKENS, PAD, CONTEXT, 0.7)
    sum((tensor * tensor).sum() for tensor in results if tensor.requires_grad).backward()
    return [*results, *(p.grad for p in network.parameters() if p.grad is not None)], kept


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox", "llama", "qwen2"])
def test_gradient_checkpointing_keeps_less_and_gives_the_same(architecture, tiny_models):
    networks = [
        ActorCritic(
            tiny_models(architecture).eval(), lm.RewardModel(tiny_models(architecture, seed=1).base_model), VOCAB
        )
        for _ in range(2)
    ]
    networks[1].load_state_dict(networks[0].state_dict())
    models.checkpoint_layers(networks[1])
    (expected, all_kept), (actual, kept) = map(passes, networks)
    assert len(expected) == len(actual) and all(map(torch.equal, actual, expected))
    assert kept < 0.5 * all_kept
    uniforms = torch.rand(3, 5, generator=torch.Generator().manual_seed(1))
    sampled = [lm.generate(network.lm_backbone, TOKENS, uniforms, PAD, VOCAB, 0.7) for network in networks]
    assert all(map(torch.equal, *sampled))  # with its cache


SMALL = {  # a script, and what makes a run of it small
    "tldr_sft.py": "--batch_size 16 --epochs 1 --eval_posts 4 --lr 0.01",
    "tldr_reward.py": "--batch_size 16 --lr 0.01 --normalize_posts 4",
    "tldr_policy.py": "--ppo.total_episodes 16 --ppo.batch_size 8 --ppo.nminibatches 1 --ppo.lr 0.01 --eval_interval 0 "
    "--eval_posts 4 --rewards.function ppo_rlhf.worlds.posts:gold_scores --rewards.monitor=",
    "train_reward.py": "--save_interval 0",
    "train_policy.py": "--ppo.total_episodes 32 --save_interval 0 --ppo.lr 0.01 "
    "--rewards.function ppo_rlhf.worlds.tales:sentiment.gold_scores --rewards.monitor=",
}
PASSES = {"tldr_sft.py": 3, "tldr_reward.py": 3, "tldr_policy.py": 8, "train_reward.py": 5, "train_policy.py": 8}


@pytest.mark.parametrize("script", SMALL)
def test_metrics_are_the_same_with_gradient_checkpointing(script, tiny_world: Path, tiny_posts: Path, tmp_path: Path):
    if script.startswith("tldr"):
        words = [*posts_arguments(tiny_posts), "--base_model", str(tiny_posts / "model")]
    else:
        own = reward_arguments(tiny_world) if script == "train_reward.py" else policy_arguments()
        words = [*world_arguments(tiny_world), *own]
    rows, checkpoints = [], []
    for name, flags in {"without": [], "with": ["--gradient_checkpointing"]}.items():
        folder = tmp_path / name
        folder.mkdir()
        result = launch(RUN, str(SCRIPTS / script), *words, *SMALL[script].split(), *flags, folder=folder)
        assert result.status == 0, result.stderr
        rows.append(metrics_of(only(folder, "runs/*")))
        checkpoints.append(int((folder / "checkpoints").read_text()))
    assert rows[0] == rows[1] and len(rows[0]) >= 2
    layers_of_a_pass = 2 if script == "tldr_policy.py" else 1  # policy and critic, of one layer each
    assert checkpoints[0] == 0 and checkpoints[1] == layers_of_a_pass * PASSES[script]
