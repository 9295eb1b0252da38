"""The small files train the same weights as the big scripts, and print the same numbers.

Both run on tiny worlds, with constants and flags that let each part of the algorithm act within a few updates.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
from golden_models import recorded
from mistakes import edited_file, named, titles
from runs import TINY_SUMS, build_tiny_sums, metrics_of
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from whole_runs import Whole

import ppo_rlhf
from benchmark import worlds
from ppo_rlhf import train_both, train_policy, train_reward, worlds as packaged
from ppo_rlhf.rlvr import policy as rlvr_policy, rewards
from ppo_rlhf.tldr.models import load_reward_model
from ppo_rlhf.train_policy import read_meta
from ppo_rlhf.worlds import tales

SMALL = Path(ppo_rlhf.__file__).parent / "small"

# Each constant and flag of a small file, the argument of the big script that it is, and its value here, if another
PPO = {
    "QUERY_LENGTH": ("task.query_length", None),
    "RESPONSE_LENGTH": ("task.response_length", None),
    "STOP_AFTER": ("task.truncate_after", None),
    "NO_STOP_SCORE": ("task.penalty_reward_value", None),
    "TEMPERATURE": ("task.temperature", None),
    "RM_BATCH": ("reward.batch_size", 8),
    "RM_LR": ("reward.lr", None),
    "RM_SAMPLES": ("reward.rollout_batch_size", 32),
    "choices": ("reward.num_train", 40),
    "batch": ("policy.ppo.batch_size", 32),
    "epochs": ("policy.ppo.noptepochs", 2),
    "minibatches": ("policy.ppo.nminibatches", None),
    "lr": ("policy.ppo.lr", 1e-3),
    "clip": ("policy.ppo.cliprange", 0.01),
    "value_clip": ("policy.ppo.cliprange_value", 0.02),
    "value_coef": ("policy.ppo.vf_coef", None),
    "gamma": ("policy.ppo.gamma", 0.97),
    "lam": ("policy.ppo.lam", None),
    "kl_coef": ("policy.rewards.kl_coef", None),
    "kl_target": ("policy.rewards.adaptive_kl.target", 0.01),
    "kl_horizon": ("policy.rewards.adaptive_kl.horizon", 100),
}
GRPO = {
    "RESPONSE_LENGTH": ("task.response_length", 30),
    "MAX_GRAD_NORM": ("ppo.max_grad_norm", 0.1),
    "group": ("ppo.samples_per_prompt", None),
    "minibatches": ("ppo.nminibatches", None),
    "lr": ("ppo.lr", 3e-3),
    "clip": ("ppo.cliprange_high", 0.01),
}
UPDATES, PROMPTS = 3, 4  # in these tests
EPISODES = PROMPTS * rlvr_policy.PRESETS["sums-grpo"].ppo.samples_per_prompt


def flags_of(constants: dict) -> list[str]:
    return [f"--{field}={value}" for field, value in constants.values() if value is not None]


def source_of(name: str, *mistakes: str) -> str:
    """A small file's text, with mistakes of the book."""
    edits = {place: pair for title in mistakes for place, pair in named(title).edits.items()}
    return edited_file(f"small/{name}.py", edits)


def small_file(name: str, constants: dict, *mistakes: str) -> ModuleType:
    """A small file as a module, with the values of these tests."""
    module = ModuleType(name)
    module.__file__ = str(SMALL / f"{name}.py")
    exec(compile(source_of(name, *mistakes), module.__file__, "exec"), vars(module))
    for constant, (_, value) in constants.items():
        if constant.isupper() and value is not None:
            assert hasattr(module, constant)
            setattr(module, constant, value)
    return module


ROUNDING, CLEAR = 1e-12, 1e-9  # largest difference of a tensor's entries if they agree, smallest if they don't


def differences(model: torch.nn.Module, saved: torch.nn.Module, tolerance: float) -> list[str]:
    """Names of the weights that differ. saved: by a big script, where an embedding may have a row for the padding."""
    pairs = zip(model.named_parameters(), saved.parameters(), strict=True)
    return [
        name
        for (name, weight), expected in pairs
        if not torch.allclose(weight, expected[: len(weight)] if weight.dim() else expected, tolerance, tolerance)
    ]


def words_of(constants: dict, world: Path, **changes: int) -> list[str]:
    """The command line with the flags of these tests."""
    flags = {name: value for name, (_, value) in constants.items() if name.islower() and value is not None}
    flags |= {"world": world, "updates": UPDATES} | changes
    return [f"--{name}={value}" for name, value in flags.items()]


def arguments_of(module: ModuleType, words: list[str]) -> argparse.Namespace:
    """What a small file's main() makes of a command line."""
    stopped = patch.object(argparse.ArgumentParser, "parse_args", autospec=True, side_effect=InterruptedError)
    with stopped as parsed, contextlib.suppress(InterruptedError):
        module.main()
    return argparse.ArgumentParser.parse_args(parsed.call_args.args[0], words)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ---- Chapter 1: equal but for rounding, in float64 ---------------------------------------------------------------
# The small file does step 6 for a batch, the big script for each minibatch. They agree if there is one minibatch, or
# if nothing is whitened. Both are tried.

UNWHITENED = """
import runpy

from ppo_rlhf import train_policy

train_policy.whiten = lambda values, *, keep_mean: values
runpy.run_module("ppo_rlhf.train_both", run_name="__main__")
"""


@pytest.fixture(scope="module")
def world(tiny_world, tmp_path_factory) -> Path:
    """The tiny world, with its model in float64."""
    copy = shutil.copytree(tiny_world, tmp_path_factory.mktemp("cache") / tiny_world.name)
    AutoModelForCausalLM.from_pretrained(copy / "model").double().save_pretrained(copy / "model")
    return copy


def run_train_both(script: str, world: Path, folder: Path, *more: str) -> Whole:
    """A run of train_both.py in a folder."""
    where = f"--preset tales --base_model {world}/model --task.query_dataset {world} --policy.ppo.whiten_groups 1 "
    where += f"--reward.normalize_samples {PPO['RM_SAMPLES'][1]} --reward.dtype float64 --policy.dtype float64 "
    where += f"--policy.ppo.total_episodes {UPDATES * PPO['batch'][1]}"
    return Whole(folder, script, [*where.split(), *flags_of(PPO), *more]).made()


@pytest.fixture(scope="module")
def big_ppo(world, tmp_path_factory) -> Whole:
    return run_train_both("train_both.py", world, tmp_path_factory.mktemp("big_ppo"))


def saved_policy(run: Whole) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(run.model("policy"))


@pytest.fixture(scope="module")
def big_reward(big_ppo) -> torch.nn.Module:
    return load_reward_model(big_ppo.model("reward"), torch.float64)


@pytest.fixture(scope="module")
def big_policies(big_ppo, world, tmp_path_factory) -> dict[int, torch.nn.Module]:
    """Policies of train_policy.py with one minibatch, and with two but without whitening."""
    folder = tmp_path_factory.mktemp("unwhitened")
    (script := folder / "unwhitened.py").write_text(UNWHITENED)
    unwhitened = run_train_both(str(script), world, folder, "--policy.ppo.nminibatches", "2")
    return {1: saved_policy(big_ppo), 2: saved_policy(unwhitened)}


def small_ppo(*mistakes: str) -> ModuleType:
    """The small file. Its permutations are those of the first of train_both.py's groups."""
    module = small_file("ppo", PPO, *mistakes)
    keyed, reward_model = module.keyed_generator, module.RewardModel

    def in_float32_first(*arguments):  # in which train_reward.py draws the head's weights
        with default_dtype(torch.float32):
            return reward_model(*arguments).double()

    module.keyed_generator = lambda *key: keyed(*key, *[0][: "permutation" in key])
    module.RewardModel = in_float32_first
    return module


def start(module: ModuleType, world: Path) -> tuple:
    """Tokenizer, queries and language model."""
    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    model = AutoModelForCausalLM.from_pretrained(world / "model", **module.GELU)
    return tokenizer, module.read_queries(world, tokenizer), model


@pytest.fixture(scope="module")
def reward_model(world, tmp_path_factory):
    """The reward model of the small file, which its PPO can begin with."""
    return small_reward(small_ppo(), world, tmp_path_factory.mktemp("cache"))


def small_reward(module: ModuleType, world: Path, cache: Path) -> torch.nn.Module:
    module.CACHE, (_, queries, language_model) = cache, start(module, world)
    choices = json.loads((world / "labels/sentiment/offline_5k.json").read_text())
    with default_dtype(torch.float64):
        return module.train_reward_model(arguments_of(module, words_of(PPO, world)), choices, queries, language_model)


def small_policy(world: Path, reward_model: torch.nn.Module, minibatches: int, *mistakes: str) -> torch.nn.Module:
    module = small_ppo(*mistakes)
    if minibatches > 1:
        module.whiten = lambda x, *, keep_mean: x
    args = arguments_of(module, words_of(PPO, world, minibatches=minibatches))
    with default_dtype(torch.float64):
        return module.train_policy(args, *start(module, world), reward_model)


def test_ppo_trains_the_weights_of_train_both_and_prints_its_numbers(
    world, big_ppo, big_reward, big_policies, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["ppo.py", *words_of(PPO, world)])
    module = small_ppo()
    with (
        default_dtype(torch.float64),
        recorded(module, "train_reward_model") as rewards,
        recorded(module, "train_policy") as policies,
    ):
        module.main()
    assert differences(rewards[0][1], big_reward, ROUNDING) == []
    assert differences(policies[0][1], big_policies[1], ROUNDING) == []
    shown, (reward_run, policy_run) = (
        capsys.readouterr().out,
        (big_ppo.run(f"train_{x}") for x in ("reward", "policy")),
    )
    losses = [
        f"reward model, step {row['step'] + 1:.0f}: loss {row['train/loss']:.3f}" for row in metrics_of(reward_run)
    ]
    accuracy = read_meta(reward_run)["results"]["test_accuracy"]
    updates = [
        f"update {row['step'] + 1:.0f}: score {row['objective/score']:.2f}, gold score "
        f"{row['objective/gold_scores']:.2f}, KL {row['objective/kl']:.2f}, KL coefficient "
        f"{row['objective/kl_coef']:.4f}, {row['ppo/policy/clipfrac']:.2%} clipped, value loss "
        f"{row['ppo/loss/value']:.4f}"
        for row in metrics_of(policy_run)
    ]
    assert len(updates) == UPDATES and len({*updates}) == UPDATES
    for line in (
        *losses,
        f"The reward model predicts {accuracy:.1%} of the held-out choices; chance is 25%.",
        *updates,
    ):
        assert f"{line}\n".replace("KL -0.00,", "KL 0.00,") in shown.replace("KL -0.00,", "KL 0.00,")


REWARD = ("RewardModel", "train_reward_model", "read", "adam_step")  # what trains the reward model


@pytest.mark.parametrize("mistake", titles("small/ppo.py", *REWARD))
def test_a_mistake_in_the_reward_model_is_found(mistake, world, tmp_path, big_reward):
    assert differences(small_reward(small_ppo(mistake), world, tmp_path), big_reward, CLEAR)


@pytest.mark.parametrize("mistake", titles("small/ppo.py", without=(*REWARD, "main")))
def test_a_mistake_in_ppo_is_found(mistake, world, reward_model, big_policies):
    assert any(
        differences(small_policy(world, reward_model, n, mistake), big_policies[n], CLEAR) for n in big_policies
    )


def test_without_a_mistake_the_parts_of_ppo_agree_too(world, tmp_path, reward_model, big_reward, big_policies):
    """So it is the mistakes that the tests above find."""
    assert differences(small_reward(small_ppo(), world, tmp_path), big_reward, ROUNDING) == []
    for n in big_policies:
        assert differences(small_policy(world, reward_model, n), big_policies[n], ROUNDING) == []


def test_ppo_has_the_constants_of_the_preset():
    args, module = train_both.PRESETS["tales"], small_file("ppo", {})
    flags = vars(arguments_of(module, []))
    for name, (field, _) in PPO.items():
        assert (getattr(module, name) if name.isupper() else flags[name]) == attrgetter(field)(args), name
    assert flags["updates"] == math.ceil(args.policy.ppo.total_episodes / args.policy.ppo.batch_size)
    assert 0 < args.reward.normalize_samples <= args.reward.rollout_batch_size  # so that one batch is all
    assert args.task == train_policy.TASKS["tales"] and module.LABELS_PAD == train_reward.OPENAI_PAD_ID


def test_a_reward_model_is_kept_in_a_file(world, tmp_path, monkeypatch, capsys):
    """The first run makes the file, and the second takes it, whatever its own seed is."""
    scores, file = [], tmp_path / "reward.safetensors"  # what the reward model of each run says about a text
    for seed in ("1", "2"):
        module = small_file("ppo", PPO)
        module.train_policy = lambda *arguments: (
            scores.append(arguments[-1](torch.tensor([[5, 6, 7]]))) or arguments[3]
        )
        words = [*words_of(PPO, world), "--seed", seed, "--reward_model", str(file)]
        monkeypatch.setattr(sys, "argv", ["ppo.py", *words])
        with default_dtype(torch.float64):
            module.main()
        assert ("step 1: loss" in capsys.readouterr().out) == (seed == "1")
    assert torch.equal(*scores) and not scores[0].requires_grad


class Counts(torch.nn.Module):
    """A reward model that counts tokens."""

    def forward(self, tokens: Tensor) -> Tensor:
        return (tokens != -1).double().sum(1)


def last_lines(world: Path, monkeypatch, capsys, *mistakes: str) -> tuple[list[str], list[str]]:
    """What ppo.py prints after the training, and what it should print by the big scripts' functions.

    Its trained policy is the language model with other weights.
    """
    module = small_file("ppo", PPO, *mistakes)
    tokenizer, _, model = start(module, world)
    _, _, policy = start(module, world)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.3)
    monkeypatch.setattr(module, "train_reward_model", lambda *_: Counts())
    monkeypatch.setattr(module, "train_policy", lambda *_: policy)
    monkeypatch.setattr(sys, "argv", ["ppo.py", *words_of(PPO, world), "--seed", "7"])
    module.main()
    task = dataclasses.replace(train_policy.TASKS["tales"], query_dataset=str(world))
    ids = train_policy.task_ids(task, tokenizer)
    held_out = train_both.held_out_queries(task, tokenizer, 10**6)
    queries = train_policy.padded(held_out, ids.pad, task.query_length)
    n, key = len(queries), train_policy.keyed_generator(7, "held-out")
    noise = torch.rand(n, task.response_length, generator=key, dtype=torch.float64)
    expected, stories = [], train_policy.to_texts(tokenizer, queries, ids.pad)
    for name, writer in (("The language model", model), ("The policy", policy)):
        responses = train_policy.generate(writer, queries, noise, ids.pad, ids.pad, task.temperature)[0]
        responses = train_policy.truncate_at(responses, ids.stop, task.truncate_after, ids.pad)
        shown = train_policy.to_texts(tokenizer, responses, ids.pad)
        gold = sum(tales.sentiment.gold_scores(shown, shown)) / n
        score = (torch.cat([queries, responses], 1) != ids.pad).sum() / n
        expected += ["", f"A held-out story: {stories[0]}", f"{name} continues: {shown[0]}"]
        expected.append(f"    Over {n} stories, the mean score is {score:.2f}, and the mean gold score {gold:.2f}.")
    return capsys.readouterr().out.splitlines(), expected


@pytest.mark.parametrize("mistake", [None, *titles("small/ppo.py", "main")])
def test_what_ppo_prints_at_the_end(mistake, tiny_world, monkeypatch, capsys):
    shown, expected = last_lines(tiny_world, monkeypatch, capsys, *([mistake] if mistake else []))
    assert (shown == expected) == (mistake is None)


# ---- Chapter 3 -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def easy_sums(tmp_path_factory) -> Path:
    """A world of sums in float64. Its problems have one step, and its model solves some of them in some samples."""
    few = {"train_problems": 200, "test_problems": 200, "lm_short_steps": 200, "lm_batch_size": 16}
    sizes = dataclasses.replace(TINY_SUMS, **few, largest=2, largest_first=3, hasty=1.0, wordy=0.0)
    world = build_tiny_sums(tmp_path_factory.mktemp("easy_sums"), sizes)
    for path in world.glob("problems_*.jsonl"):
        rows = path.read_text().splitlines(keepends=True)
        path.write_text("".join(row for row in rows if json.loads(row)["steps"] == 1))
    worlds.compress(world)
    model = AutoModelForCausalLM.from_pretrained(world / "model")
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)  # larger logits, so that samples are less random
    model.double().save_pretrained(world / "model")
    return world


@pytest.fixture(scope="module")
def big_grpo(easy_sums, tmp_path_factory) -> Whole:
    """A run of rlvr/policy.py."""
    sizes = f"--ppo.batch_size {EPISODES} --ppo.total_episodes {UPDATES * EPISODES} --eval_samples 0 "
    sizes += f"--dtype float64 --ppo.no-share_prefixes --ppo.cliprange_low {GRPO['clip'][1]}"
    where = f"--preset sums-grpo --base_model {easy_sums}/model --task.problems {easy_sums}".split()
    arguments = [*where, *flags_of(GRPO), *sizes.split()]
    return Whole(tmp_path_factory.mktemp("big_grpo"), "rlvr/policy.py", arguments).made()


def small_grpo(world: Path, *mistakes: str) -> torch.nn.Module:
    """The policy that the small file trains."""
    module = small_file("grpo", GRPO, *mistakes)
    policy, tokenizer = (kind.from_pretrained(world / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    args = arguments_of(module, words_of(GRPO, world, prompts=PROMPTS))
    module.train(args, policy, tokenizer, module.read_problems(world, "train"))
    return policy


def test_grpo_trains_the_weights_of_rlvr_policy_and_prints_its_numbers(easy_sums, big_grpo, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["grpo.py", *words_of(GRPO, easy_sums, prompts=PROMPTS)])
    module = small_file("grpo", GRPO)
    with recorded(module, "train") as trained:
        module.main()
    assert differences(trained[0][0][1], saved_policy(big_grpo), ROUNDING) == []
    shown, this_run = capsys.readouterr().out, big_grpo.run()
    rows = metrics_of(this_run)
    assert all(0 < row["objective/scores"] < 1 and row["val/groups_zero_std"] < 1 for row in rows)  # it can learn
    solved = [rows[0]["eval/gsm8k_strict"], read_meta(this_run)["results"]["eval/gsm8k_strict"]]
    assert re.findall(r"([\d.]+%) of the held-out", shown) == [f"{share:.1%}" for share in solved]
    updates = [
        f"update {row['step'] + 1:.0f}: {row['objective/scores']:.0%} correct, "
        f"{row['val/sequence_lengths']:.1f} tokens"
        for row in rows
    ]
    assert all(f"{line}\n" in shown for line in updates) and len({*updates}) == UPDATES


@pytest.mark.parametrize("mistake", titles("small/grpo.py"))
def test_a_mistake_in_grpo_is_found(mistake, easy_sums, big_grpo):
    assert differences(small_grpo(easy_sums, mistake), saved_policy(big_grpo), CLEAR)


def test_without_a_mistake_the_training_of_grpo_agrees_too(easy_sums, big_grpo):
    """So it is the mistakes that the tests above find."""
    assert differences(small_grpo(easy_sums), saved_policy(big_grpo), ROUNDING) == []


def test_grpo_has_the_constants_of_the_preset():
    args, module = rlvr_policy.PRESETS["sums-grpo"], small_file("grpo", {})
    flags, ppo = vars(arguments_of(module, [])), args.ppo
    for name, (field, _) in GRPO.items():
        assert (getattr(module, name) if name.isupper() else flags[name]) == attrgetter(field)(args), name
    assert flags["updates"] == ppo.total_episodes // ppo.batch_size
    assert flags["prompts"] == ppo.batch_size // ppo.samples_per_prompt
    assert (0.9, ppo.beta2) == module.BETAS and ppo.weight_decay == 0
    assert ppo.cliprange_low is None and flags["clip"] == 0.2  # which None means
    assert (ppo.noptepochs, ppo.advantage, args.task.temperature) == (1, "grpo", 1)
    assert f'"test")[:{args.eval_problems}]' in source_of("grpo") and args.rewards.verifier == "gsm8k_strict"


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("7+2=9\n#### 9", True),
        ("#### 8\n#### 9", True),
        ("#### 9\n#### 8", False),
        ("9", False),
        ("#### 09 ", True),
        ("#### -9", False),
        ("#### \n####", False),
        ("She buys 2. 7+2=9\n#### 9.", True),
    ],
)
def test_the_verifier_is_gsm8k_strict(response, right):
    assert small_file("grpo", {}).is_right(response, "9") is right is bool(rewards.gsm8k_strict(response, "9"))


# ---- A world that is not there, or is too small ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "world", "file"), [("ppo", "tales", "stories.txt.xz"), ("grpo", "sums", "problems_train.jsonl.xz")]
)
def test_a_world_that_is_not_there_is_one_line(name, world, file, tmp_path, monkeypatch, capsys):
    module = small_file(name, {})
    assert arguments_of(module, []).world == module.WORLD == packaged.DATA / world
    (tmp_path / "model").mkdir()  # of another kind of world
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--world", str(tmp_path)])
    with pytest.raises(SystemExit):
        module.main()
    said = f"error: {tmp_path} has no {file}; {packaged.DATA / world} is a world\n"
    assert capsys.readouterr().err == said


HAS = "294 queries, 6 held-out ones and 96 choices"
TOO_SMALL = {
    "ppo": ("", f"{HAS}; at least 1024, 1 and 4993"),
    "ppo, too large a batch": ("--batch 2000", f"{HAS}; at least 2000, 1 and 4993"),
    "grpo": ("", "64 problems and 32 held-out ones; at least 2240 and 1"),
}


@pytest.mark.parametrize("name", TOO_SMALL)
def test_a_world_that_is_too_small_is_refused_before_training(name, tiny_world, tiny_sums, monkeypatch, capsys):
    file, (flags, found) = name.partition(",")[0], TOO_SMALL[name]
    module, world = small_file(file, {}), {"ppo": tiny_world, "grpo": tiny_sums}[file]
    module.evaluate = module.train_reward_model = lambda *_: pytest.fail("it has begun")
    monkeypatch.setattr(sys, "argv", [f"{file}.py", "--world", str(world), *flags.split()])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {world} has {found} are needed\n"
