"""Every script on a device that isn't the CPU: helpers/stand_in.py refuses what GPUs refuse, and counts waits."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from processes import HELPERS, SCRIPTS, launch
from runs import metrics_of, policy_arguments, posts_arguments, samples_of, world_arguments
from whole_runs import Whole

from ppo_rlhf import train_policy

STAND_IN = HELPERS / "stand_in.py"
LETTERS = "letters = lambda prompts, responses, answers: [float(len(text) % 2) for text in responses]"
LOW_PRECISION = ("--dtype", "bfloat16", "--frozen_bfloat16", "--gradient_checkpointing")


def on_device(folder: Path, script: str, *words: str) -> Whole:
    folder.mkdir(exist_ok=True)
    (folder / "letters.py").write_text(LETTERS)
    return Whole(folder, str(STAND_IN), [str(SCRIPTS / script), *words]).made()


def waits(run: Whole) -> dict[str, int]:
    """How often the host waited for the device within each function of the package."""
    return json.loads((run.folder / "waits.json").read_text())


def test_chapter_1(both, tmp_path):
    """The same start as on the CPU: metrics of the first step and update, and texts, which are drawn in float64."""
    there = on_device(tmp_path, "train_both.py", *both.arguments, "--policy.ppo.total_episodes", "32")
    for stage in ("train_reward", "train_policy"):
        found, expected = (metrics_of(run.run(stage))[0] for run in (there, both))
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)
    found, expected = ([row["response"] for row in samples_of(run.run("train_policy"))] for run in (there, both))
    assert len(found) > 3 and found[:4] == expected[:4]
    # Nothing is read back between the first token and the last optimiser step of an update, but texts to score.
    assert not {"generate", "response_logprobs", "group_advantages", "ppo_update"} & waits(there).keys()


def test_chapter_2(tiny_posts, tmp_path):
    words = (
        "--sft.batch_size 24 --sft.epochs 1 --sft.eval_posts 4 --sft.dtype bfloat16 --reward.batch_size 24 "
        "--reward.normalize_posts 4 --policy.dtype bfloat16 --policy.ppo.total_episodes 8 --policy.ppo.batch_size 8 "
        "--policy.ppo.nminibatches 2 --policy.ppo.noptepochs 2 --policy.eval_interval 1 --policy.eval_posts 4 "
        "--policy.trace_interval 1 --policy.lora.rank 2 --policy.lora.target_modules all-linear"
    )
    model = ["--base_model", str(tiny_posts / "model")]
    on_device(tmp_path, "tldr/all.py", *posts_arguments(tiny_posts), *model, *words.split())


def rlvr_words(world: Path, flags: str) -> list[str]:
    words = (
        f"--base_model {world}/model --task.problems {world} --ppo.total_episodes 32 --ppo.batch_size 16 "
        "--ppo.nminibatches 2 --save_interval 1 --log_interval 1 --trace_interval 1 --eval_problems 4 "
    )
    return (words + flags).split()


def numbers_of(run: Whole) -> list[dict[str, float]]:
    rows = metrics_of(run.run())
    return [{name: value for name, value in row.items() if "time/" not in name} for row in rows]


def test_chapter_3_with_older_weights_and_its_resumption(tiny_sums, tmp_path):
    flags = (
        "--preset sums --ppo.samples_per_prompt 4 --ppo.advantage remax --ppo.critic_warmup 0 --lora.rank 2 "
        "--rewards.kl_loss_coef 0.01 --rewards.kl_loss_estimator full --rewards.overlong_buffer 4 --staleness 1 "
        "--ppo.entropy_coef 0.01 --task.response_length 8 --rewards.verifier letters:letters --eval_interval 1"
    )
    run = on_device(tmp_path, "rlvr/asynchronous.py", *rlvr_words(tiny_sums, flags), *LOW_PRECISION)
    expected = numbers_of(run)
    assert len(expected) == 2
    assert waits(run)["ppo_update"] <= 30  # in two updates, each of two steps
    shutil.rmtree(run.run() / "checkpoints/2")
    dataclasses.replace(run, arguments=[run.arguments[0], "--resume", str(run.run())]).made()
    assert numbers_of(run) == expected


def test_tools_and_a_critic(tiny_tools, tmp_path):
    flags = (
        "--preset sums-tools --ppo.samples_per_prompt 2 --ppo.advantage gae --ppo.filter_groups "
        "--task.response_length 24 --eval_interval 0 --rewards.verifier letters:letters --ppo.total_episodes 16 "
        "--trace_interval 0"
    )
    on_device(tmp_path, "rlvr/tools.py", *rlvr_words(tiny_tools, flags))


def test_noise_is_where_there_is_float64():
    assert [str(train_policy.float64_device(torch.device(kind))) for kind in ("cuda", "mps")] == ["cuda", "cpu"]


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ("ids.pad)[mine].to(device)", "ids.pad)[mine]", "mixes tensors of"),
        ("uniforms.to(float64_device(device))", "uniforms.to(device)", "makes float64"),
    ],
)
def test_a_mistake_is_found(good, bad, message, tiny_world, tiny_reward, tmp_path):
    """A copy of a script that leaves queries on the CPU, or takes noise to a device that has no float64."""
    text = (SCRIPTS / "train_policy.py").read_text()
    assert text.count(good) == 1
    (tmp_path / "train_policy.py").write_text(text.replace(good, bad))
    words = [*world_arguments(tiny_world, tiny_reward), *policy_arguments()]
    result = launch(STAND_IN, str(tmp_path / "train_policy.py"), *words, folder=tmp_path)
    assert result.status and message in result.stderr, result.stderr
