"""Every script on a device that isn't the CPU: tests/stand_in.py refuses what CUDA refuses, and counts.

Each script makes two updates on it and on the CPU, in float32 or in bfloat16, with the same metrics bit for bit. Only
rlvr/tools.py is compared in float64, up to rounding.
"""

import shutil
from pathlib import Path

import pytest
import stand_in
import torch
from processes import Result, launch
from runs import metrics_of, only, policy_arguments, posts_arguments, reward_arguments, samples_of, world_arguments
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from ppo_rlhf.lib import traces

SCRIPTS = Path(__file__).parent.parent / "ppo_rlhf"
ON_DEVICE = Path(__file__).with_name("device_run.py")


def run_there(folder: Path, script: str, words: list[str], **environment: str) -> Path:
    """Run a script on the device; the folder in which it ran."""
    folder.mkdir(parents=True, exist_ok=True)
    check_ended(launch(ON_DEVICE, str(SCRIPTS / script), *words, folder=folder, **environment))
    return folder


def run_both(folder: Path, script: str, words: list[str], **environment: str) -> tuple[Path, Path]:
    """Run a script on the CPU and on the device; the folders in which they ran."""
    here = run_there(folder / "cpu", script, words, STAND_IN="no")
    return here, run_there(folder / "device", script, words, **environment)


SINGLE = 1e-4  # relative rounding of sums that are made in float32


def check_ended(result: Result) -> None:
    assert result.status == 0, result.stdout + result.stderr


def check_numbers(
    here: Path, there: Path, runs: str = "runs/*", *, rounding: float = 0, updates: int | None = None
) -> None:
    """The metrics of both runs are equal, bit for bit or up to rounding: of two updates, or of the first ones."""
    expected, found = (metrics_of(only(folder, runs)) for folder in (here, there))
    assert len(expected) == 2
    expected = expected[:updates]
    assert [row.keys() for row in found] == [row.keys() for row in expected]
    for row, other in zip(found, expected, strict=True):
        row, other = ({k: v for k, v in one.items() if "time/" not in k} for one in (row, other))
        assert row == pytest.approx(other, rel=rounding, abs=rounding, nan_ok=True)


def check_waits(folder: Path, bounds: dict[str, int]) -> None:
    """How often the host waited in the second update of a run on the device, by step; at most so often."""
    found = stand_in.by_step(stand_in.load(folder / "counts.json")[1])
    assert {step: found[step]["wait"] for step in bounds if found[step]["wait"] > bounds[step]} == {}


def check_resumption(here: Path, there: Path, script: str, **environment: str) -> None:
    """The second update, once more on the device, from the checkpoint after the first."""
    this_run = only(there, "runs/*")
    shutil.rmtree(this_run / "checkpoints/2")
    words = [str(SCRIPTS / script), "--resume", str(this_run)]
    check_ended(launch(ON_DEVICE, *words, folder=there, **environment))
    check_numbers(here, there)
    assert samples_of(this_run) == samples_of(only(here, "runs/*"))


def test_the_rules_are_those_of_cuda(tmp_path):
    check_ended(launch(ON_DEVICE.with_name("device_rules.py"), folder=tmp_path))


# ---- Chapter 1 -------------------------------------------------------------------------------------------------


BOTH = (
    "--reward.num_train 16 --reward.save_interval 1 --policy.ppo.total_episodes 32 --policy.save_interval 1 "
    "--policy.trace_interval 1"
)
IN_BFLOAT16 = ("--dtype", "bfloat16", "--frozen_bfloat16", "--gradient_checkpointing")


def both_words(world: Path) -> list[str]:
    stages = [*reward_arguments(world, "--reward."), *policy_arguments("--policy.")]
    return [*world_arguments(world), *stages, *BOTH.split()]


@pytest.fixture(scope="module")
def chapter_1(tiny_world, tmp_path_factory) -> tuple[Path, Path]:
    """The folders of train_both.py, which trains a reward model and a policy and samples from the policy."""
    return run_both(tmp_path_factory.mktemp("both"), "train_both.py", both_words(tiny_world))


@pytest.mark.parametrize("stage", ["reward", "policy"])
def test_chapter_1(chapter_1, stage):
    check_numbers(*chapter_1, f"runs/train_{stage}__*")


def test_traces_of_chapter_1(chapter_1):
    first, second = (traces.read(only(folder, "runs/train_policy__*"), 1) for folder in chapter_1)
    assert first.tokens and all(torch.equal(first.tokens[name], second.tokens[name]) for name in first.tokens)


def policy_words(world: Path, chapter_1: tuple[Path, Path], *more: str) -> list[str]:
    reward = only(chapter_1[0], "models/*/reward")
    sizes = f"--ppo.total_episodes 32 --save_interval 1 --trace_interval 2 --rewards.trained_model {reward}"
    return [*world_arguments(world), *policy_arguments(), *sizes.split(), *more]


def test_the_policy_of_chapter_1_in_bfloat16_and_its_resumption(chapter_1, tiny_world, tmp_path):
    words = policy_words(tiny_world, chapter_1, *IN_BFLOAT16)
    folders = run_both(tmp_path, "train_policy.py", words, AUTOCAST="cpu")
    check_numbers(*folders)
    # The monitor reads texts, so queries and responses are decoded.
    check_waits(folders[1], {"generate": 0, "reference": 0, "score": 2, "advantages": 0, "passes": 0})
    check_resumption(*folders, "train_policy.py", AUTOCAST="cpu")


# ---- Chapter 2 -------------------------------------------------------------------------------------------------

TLDR = (
    "--{0}ppo.total_episodes 32 --{0}ppo.batch_size 16 --{0}ppo.nminibatches 2 --{0}ppo.noptepochs 2 "
    "--{0}ppo.lr 1e-3 --{0}save_interval 1 --{0}eval_interval 1 --{0}eval_posts 4 "
    "--{0}trace_interval 1"
)
ADAPTERS = (
    "--lora.rank 2 --lora.target_modules all-linear --ppo.noptepochs 1 --eval_interval 0 --eval_posts 0 "
    "--trace_interval 0"
)
STAGES = (
    "--sft.batch_size 24 --sft.epochs 1 --sft.lr 0.03 --sft.save_interval 1 --sft.eval_posts 4 "
    "--reward.batch_size 24 --reward.lr 0.01 --reward.save_interval 1 --reward.normalize_posts 0"
)


def all_words(world: Path) -> list[str]:
    words = [*posts_arguments(world), "--base_model", f"{world}/model", *STAGES.split()]
    return [*words, *TLDR.format("policy.").split()]


@pytest.fixture(scope="module")
def chapter_2(tiny_posts, tmp_path_factory) -> tuple[Path, Path]:
    """The folders of tldr/all.py: SFT, reward model and policy."""
    return run_both(tmp_path_factory.mktemp("tldr"), "tldr/all.py", all_words(tiny_posts))


@pytest.mark.parametrize("stage", ["sft", "reward", "policy"])
def test_chapter_2(chapter_2, stage):
    check_numbers(*chapter_2, f"runs/tldr_{stage}__*")


def tldr_words(world: Path, chapter_2: tuple[Path, Path], *more: str) -> list[str]:
    base, reward = (only(chapter_2[0], f"models/*/{stage}") for stage in ("sft", "reward"))
    models = ["--base_model", str(base), "--rewards.trained_model", str(reward)]
    return [*posts_arguments(world), *models, *TLDR.format("").split(), *more]


def test_adapters_of_chapter_2_and_their_resumption(chapter_2, tiny_posts, tmp_path):
    words = tldr_words(tiny_posts, chapter_2, *IN_BFLOAT16, *ADAPTERS.split())
    folders = run_both(tmp_path, "tldr/policy.py", words, AUTOCAST="cpu")
    check_numbers(*folders)
    check_resumption(*folders, "tldr/policy.py", AUTOCAST="cpu")


# ---- Chapter 3 -------------------------------------------------------------------------------------------------

RLVR = (
    "--preset sums --ppo.total_episodes 32 --ppo.batch_size 16 --ppo.nminibatches 2 "
    "--save_interval 1 --log_interval 1 --eval_interval 1 --eval_samples 1 --eval_problems 4 "
    "--task.response_length 8 --trace_interval 1 --rewards.verifier own_functions:letters"
)
CRITIC = "--rewards.kl_coef 0.1 --ppo.critic_warmup 1 --rewards.adaptive_kl.target 1"
GROUPS = (
    "--ppo.samples_per_prompt 4 --ppo.advantage remax --ppo.critic_warmup 0 --ppo.filter_groups --lora.rank 2 "
    "--rewards.kl_loss_coef 0.01 --rewards.kl_loss_estimator full --rewards.overlong_buffer 4 "
    "--ppo.entropy_coef 0.01 --gradient_checkpointing"
)
GRPO = (
    "--ppo.samples_per_prompt 4 --ppo.advantage grpo --ppo.critic_warmup 0 --rewards.kl_loss_coef 0.01 "
    "--eval_interval 0 --trace_interval 0 --save_interval 0 --log_interval 0"
)
ASYNCHRONOUS = "--staleness 1 --eval_interval 0 --trace_interval 0 --ppo.critic_warmup 0"
TOOLS = RLVR.replace("sums", "sums-tools") + " --ppo.samples_per_prompt 2 --task.response_length 24 --eval_interval 0"


def rlvr_words(world: Path, *more: str, model: Path | None = None, common: str = RLVR) -> list[str]:
    places = ["--base_model", str(model or world / "model"), "--task.problems", str(world)]
    return [*common.split(), *places, *more]


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


@pytest.fixture(scope="module", params=[CRITIC, GROUPS], ids=["critic", "groups"])
def chapter_3(request, tiny_sums, tmp_path_factory) -> tuple[str, Path, Path]:
    """The script's flags, and the folders in which it ran with them."""
    words = rlvr_words(tiny_sums, *request.param.split())
    return request.param, *run_both(tmp_path_factory.mktemp("rlvr"), "rlvr/policy.py", words)


def test_chapter_3_and_its_resumption(chapter_3):
    flags, *folders = chapter_3
    check_numbers(*folders)
    if flags == GROUPS:
        check_resumption(*folders, "rlvr/policy.py")


def test_chapter_3_without_padding(tiny_sums, wide_model, tmp_path):
    words = rlvr_words(tiny_sums, *GRPO.split(), model=wide_model)
    folders = run_both(tmp_path, "rlvr/policy.py", words)
    check_numbers(*folders)
    # Two passes of training, each with five waits: for the minibatch's number of tokens, for the tokens that are
    # read, for the lengths of rows that packing needs, and twice for the tokens, which are compared to find what rows
    # begin with: by the plan of passes and by the model. Sampling 8 tokens looks once whether rows have ended.
    check_waits(
        folders[1], {"generate": 4, "read": 1, "reference": 3, "score": 1, "advantages": 0, "passes": 11, "log": 7}
    )
    launched = stand_in.by_step(stand_in.load(folders[1] / "counts.json")[1])["generate"]["launch"]
    assert launched <= 710  # 8 tokens and a layer


@pytest.fixture(scope="module")
def asynchronous(tiny_sums, tmp_path_factory) -> Path:
    """The folder of a run on the CPU. tests/device_run.py says what replaces Ray."""
    words = rlvr_words(tiny_sums, *ASYNCHRONOUS.split())
    return run_there(tmp_path_factory.mktemp("async"), "rlvr/asynchronous.py", words, STAND_IN="no")


@pytest.mark.parametrize(("float64", "rounding"), [("yes", 0), ("no", SINGLE)])
def test_asynchronous_rollouts(asynchronous, tiny_sums, tmp_path, float64, rounding):
    """Learner and workers, both on the device and both on the CPU."""
    words = rlvr_words(tiny_sums, *ASYNCHRONOUS.split())
    there = run_there(tmp_path, "rlvr/asynchronous.py", words, FLOAT64=float64)
    check_numbers(asynchronous, there, rounding=rounding)


def test_mixed_precision_as_on_cuda(tiny_sums, tmp_path):
    """CUDA's autocast casts other operations than the CPU's. With its rules, the loss is almost the same."""
    words = rlvr_words(tiny_sums, *GRPO.split(), *IN_BFLOAT16)
    rows = [metrics_of(only(folder, "runs/*")) for folder in run_both(tmp_path, "rlvr/policy.py", words)]
    for name in ("objective/entropy", "policy/entropy_avg", "loss/policy_avg"):
        assert rows[1][0][name] == pytest.approx(rows[0][0][name], rel=0.02, abs=1e-3)
    assert all(row["val/first_ratio_gap"] < 0.05 for row in rows[1])


def test_responses_that_call_tools(tiny_sums, tmp_path):
    """In float64, and in float32 on a device that has nothing else."""
    for place, dtype, float64, rounding in (("double", "float64", "yes", 1e-9), ("single", "float32", "no", SINGLE)):
        words = rlvr_words(tiny_sums, "--dtype", dtype, common=TOOLS)
        check_numbers(*run_both(tmp_path / place, "rlvr/tools.py", words, FLOAT64=float64), rounding=rounding)


# ---- Without float64, as on Apple's GPUs -----------------------------------------------------------------------


def test_scripts_of_chapter_1_without_float64(chapter_1, tiny_world, tmp_path):
    """The same numbers up to rounding, and the same texts: they are drawn in float64 on the CPU."""
    words = [*both_words(tiny_world), "--policy.ppo.total_episodes", "16"]
    here, there = chapter_1[0], run_there(tmp_path, "train_both.py", words, FLOAT64="no")
    check_numbers(here, there, "runs/train_reward__*", rounding=SINGLE)
    check_numbers(here, there, "runs/train_policy__*", rounding=SINGLE, updates=1)
    expected, texts = (samples_of(only(folder, "runs/train_policy__*")) for folder in (here, there))
    assert texts and [row["response"] for row in texts] == [row["response"] for row in expected[: len(texts)]]


def test_scripts_of_chapter_2_without_float64(chapter_2, tiny_posts, tmp_path):
    words = [*all_words(tiny_posts), "--policy.ppo.total_episodes", "16"]
    there = run_there(tmp_path, "tldr/all.py", words, FLOAT64="no")
    for stage, updates in (("sft", 2), ("reward", 2), ("policy", 1)):
        check_numbers(chapter_2[0], there, f"runs/tldr_{stage}__*", rounding=SINGLE, updates=updates)


def test_chapter_3_without_float64(chapter_3, tiny_sums, tmp_path):
    flags, here, _ = chapter_3
    there = run_there(tmp_path, "rlvr/policy.py", rlvr_words(tiny_sums, *flags.split()), FLOAT64="no")
    check_numbers(here, there, rounding=SINGLE)


# ---- The checks can fail ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ("ids.pad)[rows].to(device)", "ids.pad)[rows]", "mixes tensors of the device and of the CPU"),
        ("noise_device = processes.device_of_noise(device)", "noise_device = device", "makes float64"),
    ],
)
def test_a_mistake_is_found(good, bad, message, chapter_1, tiny_world, tmp_path):
    """A copy of a script that leaves queries on the CPU, or takes noise to a device that has no float64."""
    text = (SCRIPTS / "train_policy.py").read_text()
    assert text.count(good) == 1
    (tmp_path / "train_policy.py").write_text(text.replace(good, bad))
    words = policy_words(tiny_world, chapter_1)
    result = launch(ON_DEVICE, str(tmp_path / "train_policy.py"), *words, folder=tmp_path, FLOAT64="no")
    assert result.status and message in result.stderr, result.stderr
