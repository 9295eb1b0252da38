"""What changes memory, and what it may change besides: logits in pieces, gradient checkpointing, frozen models in
bfloat16.
"""

import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import SCRIPTS, launch
from runs import metrics_of, only, policy_arguments, posts_arguments, reward_arguments, world_arguments

from ppo_rlhf import train_policy, train_reward
from ppo_rlhf.lib import errors, processes, reward_model_files
from ppo_rlhf.lib.layers import checkpoint_layers
from ppo_rlhf.tldr import models, packing, responses as tldr_responses
from ppo_rlhf.tldr.policy import ActorCritic

VOCAB = PAD = 29
TOKENS = torch.randint(1, VOCAB, (3, 11), generator=torch.Generator().manual_seed(0))
TOKENS[0, :4] = TOKENS[1, 8:] = PAD
CONTEXT = 6
RUN = Path(__file__).parent / "checkpointed_run.py"


# ---- Too much of it -------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux has another count of it")
def test_the_most_that_a_process_has_held():
    with mmap.mmap(-1, 2**28) as mapped:  # 256 MiB, which are free again, whatever the C library keeps
        for start in range(0, 2**28, mmap.PAGESIZE):
            mapped[start] = 1
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    most = int(lines["VmHWM"].split()[0]) * 1024
    assert processes.peak_memory() == pytest.approx(most, rel=0.01)


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory.\nTried ...")])
def test_one_line_says_what_needs_less_memory(error, capsys):
    def fail() -> None:
        raise error

    with pytest.raises(SystemExit):
        errors.run_script(fail)
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "local_micro_batch_size" in line and "local_rollout_batch_size" in line


# ---- Gradient checkpointing ------------------------------------------------------------------------------------


def one_pass(network: ActorCritic) -> tuple[list[torch.Tensor], int]:
    """Results and gradients of a pass forward and backward; how many numbers it keeps in between."""
    kept = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.numel() if tensor.requires_grad and not tensor.is_leaf else 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        results = network(TOKENS, TOKENS[:, CONTEXT:], PAD, 0.7)
    sum((tensor * tensor).sum() for tensor in results if tensor.requires_grad).backward()
    return [*results, *(p.grad for p in network.parameters() if p.grad is not None)], kept


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox", "llama", "qwen2"])
def test_gradient_checkpointing_keeps_less_and_gives_the_same(architecture, tiny_models):
    networks = [
        ActorCritic(
            tiny_models(architecture).eval(),
            train_reward.RewardModel(tiny_models(architecture, seed=1).base_model),
            VOCAB,
        )
        for _ in range(2)
    ]
    networks[1].load_state_dict(networks[0].state_dict())
    checkpoint_layers(networks[1])
    (expected, all_kept), (actual, kept) = map(one_pass, networks)
    assert len(expected) == len(actual) and all(map(torch.equal, actual, expected))
    assert kept < 0.5 * all_kept
    uniforms = torch.rand(3, 5, generator=torch.Generator().manual_seed(1))
    sampled = [train_policy.generate(network.lm_backbone, TOKENS, uniforms, PAD, VOCAB, 0.7) for network in networks]
    assert all(map(torch.equal, *sampled))  # with its cache


@pytest.mark.parametrize("rows", [1, 2])
def test_logits_in_pieces_give_the_same(rows, tiny_models, monkeypatch):
    """Those of a row or two at a time, and once more in the backward pass."""
    network = ActorCritic(
        tiny_models("gpt2").double(), train_reward.RewardModel(tiny_models("gpt2").base_model).double(), VOCAB
    )
    expected, _ = one_pass(network)
    network.zero_grad()
    length = TOKENS.shape[1] - CONTEXT
    monkeypatch.setattr(packing, "MOST_LOGITS", rows * length * VOCAB + 1)
    monkeypatch.setattr(tldr_responses, "scaled_logits", counted := Counted(train_policy.scaled_logits))
    actual, _ = one_pass(network)
    for tensor, expected_tensor in zip(actual, expected, strict=True):
        torch.testing.assert_close(tensor, expected_tensor, rtol=1e-12, atol=1e-13)
    assert sorted(counted.rows) == sorted(2 * {1: [1, 1, 1], 2: [2, 1]}[rows])


class Counted:
    def __init__(self, function: Callable):
        self.function, self.rows = function, []

    def __call__(self, lm_backbone, rows, *arguments):
        self.rows.append(len(rows))
        return self.function(lm_backbone, rows, *arguments)


SMALL = {  # a script, and what makes a run of it small
    "tldr/sft.py": "--batch_size 16 --epochs 1 --eval_posts 4 --lr 0.01",
    "tldr/reward.py": "--batch_size 16 --lr 0.01 --normalize_posts 4",
    "tldr/policy.py": "--ppo.total_episodes 16 --ppo.batch_size 8 --ppo.nminibatches 1 --ppo.lr 0.01 "
    "--eval_interval 0 --eval_posts 4 --rewards.function ppo_rlhf.worlds.posts:gold_scores --rewards.monitor=",
    "train_reward.py": "--save_interval 0",
    "train_policy.py": "--ppo.total_episodes 32 --save_interval 0 --ppo.lr 0.01 "
    "--rewards.function ppo_rlhf.worlds.tales:sentiment.gold_scores --rewards.monitor=",
}
STEPS = {"tldr/sft.py": 3, "tldr/reward.py": 3, "tldr/policy.py": 8, "train_reward.py": 5, "train_policy.py": 8}


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
    layers_of_a_pass = 2 if script == "tldr/policy.py" else 1  # policy and critic, of one layer each
    assert checkpoints[0] == 0 and checkpoints[1] >= layers_of_a_pass * STEPS[script]


# ---- Frozen models in bfloat16 ---------------------------------------------------------------------------------


@pytest.fixture(params=["gpt2", "gpt_neox", "llama", "qwen2"])
def saved(request, tiny_models, tiny_tokenizer, tmp_path: Path) -> Path:
    """The folders sft and reward: a language model, and a reward model with another."""
    language_model = tiny_models(request.param).eval()
    language_model.save_pretrained(tmp_path / "sft")
    reward_model = train_reward.RewardModel(tiny_models(request.param, seed=1).base_model.eval())
    with torch.no_grad():
        reward_model.bias.fill_(1.5)
    reward_model_files.save_reward_model(tmp_path / "reward", reward_model, tiny_tokenizer, {})
    return tmp_path


def test_a_frozen_reward_model_has_a_head_in_full_precision(saved: Path):
    exact, rounded = (models.load_reward_model(saved / "reward", dtype) for dtype in (torch.float32, torch.bfloat16))
    assert {parameter.dtype for parameter in rounded.lm_backbone.parameters()} == {torch.bfloat16}
    own = [rounded.gain, rounded.bias, *rounded.reward_head.parameters(), *rounded.buffers()]
    assert {tensor.dtype for tensor in own} == {torch.float32}
    scores, expected = rounded(TOKENS, PAD), exact(TOKENS, PAD)
    assert scores.dtype == torch.float32 and not torch.equal(scores, expected)
    torch.testing.assert_close(scores, expected, rtol=0, atol=0.1)


def test_a_run_of_chapter_1_with_frozen_models_in_bfloat16(tiny_world: Path, tiny_reward: Path, tmp_path: Path):
    words = [*world_arguments(tiny_world, tiny_reward), *policy_arguments()]
    rows = []
    for name, flags in {"without": [], "with": ["--frozen_bfloat16"]}.items():
        (tmp_path / name).mkdir()
        result = launch("train_policy.py", *words, *flags, folder=tmp_path / name)
        assert result.status == 0, result.stderr
        rows.append(metrics_of(only(tmp_path / name, "runs/*"))[0])
    assert abs(rows[0]["objective/kl"]) < 1e-5 < abs(rows[1]["objective/kl"]) < 0.05
    assert rows[0]["objective/score"] != rows[1]["objective/score"]
    assert rows[1]["objective/score"] == pytest.approx(rows[0]["objective/score"], abs=0.05)
