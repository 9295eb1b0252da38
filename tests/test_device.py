"""All scripts on a device that isn't the CPU: benchmark/cost/stand_in.py refuses what CUDA refuses.

Each script makes two updates on it and on the CPU, with the same metrics. Float32 and bfloat16 are compared bit for
bit in chapters 1 and 2. Chapter 3's model rounds otherwise when its operations are called one by one, so its runs are
in float64.
"""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from processes import Launched, Result, launch
from runs import metrics_of, only, policy_arguments, posts_arguments, reward_arguments, samples_of, world_arguments
from test_rlvr_runs import LETTERS
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from ppo_rlhf.lib import traces

SCRIPTS = Path(__file__).parent.parent / "ppo_rlhf"
ON_DEVICE = Path(__file__).with_name("device_run.py")
TLDR_POLICY = (
    "--ppo.total_episodes 32 --ppo.batch_size 16 --ppo.nminibatches 2 --ppo.noptepochs 2 --ppo.lr 1e-3 "
    "--save_interval 1 --eval_interval 1 --eval_prompts 8 --eval_posts 8 --log_interval 1 --trace_interval 1"
)
RLVR = (
    "--preset sums --ppo.total_episodes 32 --ppo.batch_size 16 --ppo.nminibatches 2 --save_interval 1 "
    "--log_interval 1 --eval_interval 1 --eval_samples 1 --eval_problems 4 --task.response_length 8 "
    "--trace_interval 1 --rewards.verifier letters:letters"
)


def run_both(folder: Path, script: str, arguments: list[str], **environment: str) -> tuple[Path, Path]:
    """Run a script here and on the device, at the same time; the folders in which they ran."""
    here, there = folder / "cpu", folder / "device"
    for place in (here, there):
        place.mkdir(parents=True)
        (place / "letters.py").write_text(LETTERS)
    runs = [
        Launched(script, *arguments, folder=here),
        Launched(ON_DEVICE, str(SCRIPTS / script), *arguments, folder=there, **environment),
    ]
    for one in runs:
        ended(one.wait())
    return here, there


def ended(result: Result) -> None:
    assert result.status == 0, result.stdout + result.stderr


def assert_same_numbers(here: Path, there: Path, exact: bool = True) -> None:
    expected, found = (metrics_of(only(folder, "runs/*")) for folder in (here, there))
    assert len(expected) == 2
    if exact:
        assert found == expected
    else:
        assert [row.keys() for row in found] == [row.keys() for row in expected]
        for row, other in zip(found, expected, strict=True):
            assert row == pytest.approx(other, rel=1e-9, abs=1e-12, nan_ok=True)


# ---- Chapter 1 -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chapter_1(tiny_world, tmp_path_factory) -> tuple[Path, Path]:
    """The folders of train_reward.py on the CPU and on the device."""
    sizes = "--num_train 16 --save_interval 1".split()
    arguments = [*world_arguments(tiny_world), *reward_arguments(tiny_world), *sizes]
    return run_both(tmp_path_factory.mktemp("reward"), "train_reward.py", arguments)


def policy_words(world: Path, reward: Path, more: str = "") -> list[str]:
    sizes = f"--ppo.total_episodes 32 --save_interval 1 --trace_interval 1 --rewards.trained_model {reward}"
    return [*world_arguments(world), *policy_arguments(), *sizes.split(), *more.split()]


def test_the_reward_model_of_chapter_1(chapter_1):
    assert_same_numbers(*chapter_1)


def test_the_policy_of_chapter_1_and_its_resumption(chapter_1, tiny_world, tmp_path):
    reward = only(chapter_1[1], "models/*/reward")
    here, there = run_both(tmp_path, "train_policy.py", policy_words(tiny_world, reward))
    assert_same_numbers(here, there)
    first, second = (traces.read(only(folder, "runs/*"), 1) for folder in (here, there))
    assert all(torch.equal(first.tokens[name], second.tokens[name]) for name in first.tokens)
    shutil.rmtree(only(there, "runs/*/checkpoints/2"))
    ended(launch(ON_DEVICE, str(SCRIPTS / "train_policy.py"), "--resume", str(only(there, "runs/*")), folder=there))
    assert_same_numbers(here, there)
    assert samples_of(only(there, "runs/*")) == samples_of(only(here, "runs/*"))


def test_the_policy_of_chapter_1_in_bfloat16(chapter_1, tiny_world, tmp_path):
    reward = only(chapter_1[0], "models/*/reward")
    words = policy_words(tiny_world, reward, "--dtype bfloat16 --frozen_bfloat16 --gradient_checkpointing")
    assert_same_numbers(*run_both(tmp_path, "train_policy.py", words, AUTOCAST="cpu"))


# ---- Chapter 2 -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chapter_2(tiny_posts, tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """The folders of tldr_sft.py and tldr_reward.py."""
    folder, common = tmp_path_factory.mktemp("tldr"), posts_arguments(tiny_posts)
    sft = f"--base_model {tiny_posts}/model --batch_size 24 --epochs 1 --lr 0.03 --save_interval 1 --eval_posts 8"
    found = {"sft": run_both(folder / "sft", "tldr_sft.py", [*common, *sft.split()])}
    base = only(found["sft"][1], "models/*/sft")
    reward = f"--base_model {base} --batch_size 24 --lr 0.01 --save_interval 1 --normalize_posts 0"
    return found | {"reward": run_both(folder / "reward", "tldr_reward.py", [*common, *reward.split()])}


def tldr_words(world: Path, stages: dict[str, tuple[Path, Path]], more: str = "") -> list[str]:
    base, reward = only(stages["sft"][0], "models/*/sft"), only(stages["reward"][0], "models/*/reward")
    models = f"--base_model {base} --rewards.trained_model {reward}"
    return [*posts_arguments(world), *models.split(), *TLDR_POLICY.split(), *more.split()]


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_the_first_stages_of_chapter_2(chapter_2, stage):
    assert_same_numbers(*chapter_2[stage])


@pytest.mark.parametrize(
    "more",
    ["", "--lora.rank 2 --lora.target_modules all-linear --gradient_checkpointing --dtype bfloat16 --frozen_bfloat16"],
    ids=["whole", "adapters"],
)
def test_the_policy_of_chapter_2(chapter_2, tiny_posts, tmp_path, more):
    words = tldr_words(tiny_posts, chapter_2, more)
    assert_same_numbers(*run_both(tmp_path, "tldr_policy.py", words, AUTOCAST="cpu"))


# ---- Chapter 3 -------------------------------------------------------------------------------------------------


CRITIC = "--rewards.kl_coef 0.1 --ppo.critic_warmup 1 --rewards.adaptive_kl.target 1"
GROUPS = (
    "--ppo.samples_per_prompt 4 --ppo.advantage remax --ppo.critic_warmup 0 --ppo.filter_groups --ppo.entropy_coef 0.01 "
    "--rewards.kl_loss_coef 0.01 --rewards.kl_loss_estimator full --rewards.overlong_buffer 4 --lora.rank 2 "
    "--gradient_checkpointing"
)
GRPO = "--ppo.samples_per_prompt 4 --ppo.advantage grpo --ppo.critic_warmup 0 --rewards.kl_loss_coef 0.01 --eval_interval 0"


@pytest.fixture(scope="module")
def wide_model(tiny_sums, tmp_path_factory) -> Path:
    """A model of the world's tokenizer that is wide enough to read no padding."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_sums / "model")
    sizes = {"hidden_size": 512, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8}
    torch.manual_seed(0)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **ids))
    folder = tmp_path_factory.mktemp("wide")
    for saved in (model, tokenizer):
        saved.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("more", [CRITIC, GROUPS], ids=["critic", "groups"])
def test_chapter_3(tiny_sums, tmp_path, more):
    words = [*RLVR.split(), *f"--base_model {tiny_sums}/model --task.problems {tiny_sums}".split(), *more.split()]
    assert_same_numbers(*run_both(tmp_path, "rlvr_policy.py", [*words, "--dtype", "float64"]), exact=False)


def test_chapter_3_without_padding(tiny_sums, wide_model, tmp_path):
    words = [*RLVR.split(), *f"--base_model {wide_model} --task.problems {tiny_sums}".split(), *GRPO.split()]
    assert_same_numbers(*run_both(tmp_path, "rlvr_policy.py", [*words, "--dtype", "float64"]), exact=False)
