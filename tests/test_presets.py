"""Presets and sizes of both scripts, against the published hyperparameters written out by hand."""

import re
from dataclasses import replace
from functools import reduce

import pytest
from transformers import GPT2Config

from ppo_rlhf import train_policy, train_reward
from ppo_rlhf.lib.command_line import parse_args
from ppo_rlhf.lib.errors import InputError
from ppo_rlhf.train_policy import PpoArgs, ppo_sizes
from ppo_rlhf.train_reward import learning_rate_at, reward_sizes

PUBLISHED = ["sentiment", "descriptiveness", "cnndm", "tldr"]
ALL = [*PUBLISHED, "tales", "tales-descriptiveness", "reviews"]
SCRIPTS = [train_policy, train_reward]

# Field: sentiment, descriptiveness, cnndm, tldr. openai/lm-human-preferences launch.py @cbfd210
TASK = {
    "query_dataset": ("books", "books", "cnndm", "tldr"),
    "query_length": (64, 64, 500, 500),
    "query_prefix": ("", "", "Article:\n\n", ""),
    "query_suffix": ("", "", "\n\nTL;DR:", "\n\nTL;DR:"),
    "start_text": (".", ".", None, None),
    "end_text": (".", ".", "\n", None),
    "response_length": (24, 24, 75, 75),
    "truncate_text": (".", ".", "\n", "\n"),
    "truncate_after": (16, 16, 55, 55),
    "penalty_reward_value": (-1, -1, -1, -1),
    "temperature": (0.7, 0.7, 0.5, 0.7),
}
REWARD = {
    "base_model": ("gpt2", "gpt2", "gpt2", "gpt2"),
    "label_dataset": (
        "sentiment/offline_5k.json",
        "descriptiveness/offline_5k.json",
        "cnndm/online_45k.json",
        "tldr/online_45k.json",
    ),
    "num_train": (4_992, 4_992, 46_000, 46_000),
    "batch_size": (32, 32, 16, 16),
    "lr": (5e-5, 5e-5, 2.5e-5, 2.5e-5),
    "rollout_batch_size": (512, 512, 128, 128),
    "normalize_samples": (256, 256, 256, 256),
    "normalize_before": (True, True, True, True),
    "normalize_after": (True, True, True, True),
    "dtype": ("float32", "float32", "float32", "float32"),
    "seed": (1, 1, 1, 1),
    "save_interval": (50, 50, 50, 50),
}
POLICY = {
    "base_model": ("gpt2", "gpt2", "gpt2", "gpt2"),
    "dtype": ("float32", "float32", "float32", "float32"),
    "ppo.total_episodes": (1_000_000, 1_000_000, 1_000_000, 1_000_000),
    "ppo.batch_size": (512, 512, 32, 32),
    "ppo.nminibatches": (1, 1, 1, 1),
    "ppo.noptepochs": (4, 4, 4, 4),
    "ppo.lr": (1e-5, 1e-5, 2e-6, 2e-6),
    "ppo.vf_coef": (0.1, 0.1, 0.1, 0.1),
    "ppo.cliprange": (0.2, 0.2, 0.2, 0.2),
    "ppo.cliprange_value": (0.2, 0.2, 0.2, 0.2),
    "ppo.gamma": (1, 1, 1, 1),
    "ppo.lam": (0.95, 0.95, 0.95, 0.95),
    "ppo.whiten_rewards": (True, True, False, False),
    "ppo.whiten_groups": (8, 8, 8, 8),
    "rewards.kl_coef": (0.15, 0.15, 0.01, 0.03),
    "rewards.adaptive_kl.target": (6.0, 6.0, None, None),
    "rewards.adaptive_kl.horizon": (10_000, 10_000, 10_000, 10_000),
    "seed": (1, 1, 1, 1),
    "log_interval": (10, 10, 10, 10),
    "save_interval": (50, 50, 50, 50),
}


def rows(table):
    return [(name, field, values[i]) for field, values in table.items() for i, name in enumerate(PUBLISHED)]


def get(args, field):
    return reduce(getattr, field.split("."), args)


@pytest.mark.parametrize(("name", "field", "value"), rows(TASK))
def test_task(name, field, value):
    assert get(train_policy.PRESETS[name].task, field) == value


@pytest.mark.parametrize(("name", "field", "value"), rows(REWARD))
def test_reward_training(name, field, value):
    assert get(train_reward.PRESETS[name], field) == value


@pytest.mark.parametrize(("name", "field", "value"), rows(POLICY))
def test_policy_training(name, field, value):
    assert get(train_policy.PRESETS[name], field) == value


def test_the_table_leaves_no_task_field_out():
    assert set(vars(train_policy.PRESETS["sentiment"].task)) == set(TASK)


def test_the_librarys_gpt2_is_the_published_network():
    """What `gpt2` says of itself are the library's defaults; attention scores are divided by sqrt(64)."""
    config = GPT2Config()
    published = {"n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    published |= {"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "tie_word_embeddings": True}
    published |= {"n_inner": None, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
    assert {name: getattr(config, name) for name in published} == published


@pytest.mark.parametrize("script", SCRIPTS)
def test_there_are_seven_presets(script):
    assert list(script.PRESETS) == ALL
    assert [args.preset for args in script.PRESETS.values()] == ALL


@pytest.mark.parametrize("name", ALL)
def test_both_scripts_have_the_same_task_and_model(name):
    policy, reward = train_policy.PRESETS[name], train_reward.PRESETS[name]
    assert vars(policy.task) == vars(reward.task)
    assert policy.base_model == reward.base_model


@pytest.mark.parametrize(
    ("name", "annotator"), [("tales", "sentiment"), ("tales-descriptiveness", "descriptiveness")]
)
def test_tales_needs_no_network(name, annotator):
    policy, reward = train_policy.PRESETS[name], train_reward.PRESETS[name]
    assert (policy.base_model, policy.task.query_dataset) == ("tales", "tales")
    assert reward.label_dataset == f"{annotator}/offline_5k.json"
    assert policy.rewards.monitor == f"ppo_rlhf.worlds.tales:{annotator}.gold_scores"


# ---- What follows from the presets -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "updates", "optimizer_steps", "per_process"),
    [
        ("sentiment", 1954, 7816, 64),
        ("descriptiveness", 1954, 7816, 64),
        ("cnndm", 31250, 125_000, 4),
        ("tldr", 31250, 125_000, 4),
    ],
)
def test_policy_sizes(name, updates, optimizer_steps, per_process):
    ppo = train_policy.PRESETS[name].ppo
    sizes = ppo_sizes(ppo, 8)
    assert sizes.updates == updates
    assert sizes.updates * ppo.noptepochs * ppo.nminibatches == optimizer_steps
    assert (sizes.local_batch, sizes.local_groups, sizes.group_batch) == (per_process, 1, per_process)


@pytest.mark.parametrize(
    ("name", "steps", "per_process", "normalize_samples", "last_lr"),
    [
        ("sentiment", 156, 4, 512, 3.205e-7),
        ("descriptiveness", 156, 4, 512, 3.205e-7),
        ("cnndm", 2875, 2, 256, 8.696e-9),
        ("tldr", 2875, 2, 256, 8.696e-9),
    ],
)
def test_reward_sizes(name, steps, per_process, normalize_samples, last_lr):
    args = train_reward.PRESETS[name]
    sizes = reward_sizes(args, 8)
    assert (sizes.steps, sizes.local_batch) == (steps, per_process)
    assert (sizes.normalize_samples, sizes.local_normalize_samples) == (normalize_samples, normalize_samples // 8)
    assert learning_rate_at(args, 0) == args.lr
    assert learning_rate_at(args, steps - 1) == pytest.approx(last_lr, rel=2e-4)


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
@pytest.mark.parametrize("name", [name for name in ALL if name != "reviews"])  # whose batches are too small for 8
def test_every_preset_divides(name, processes):
    ppo, reward = train_policy.PRESETS[name].ppo, train_reward.PRESETS[name]
    sizes = ppo_sizes(ppo, processes)
    assert sizes.local_batch * processes == sizes.batch == ppo.batch_size
    assert sizes.local_groups * processes == 8
    assert sizes.local_groups * sizes.group_batch == sizes.local_batch
    sizes = reward_sizes(reward, processes)
    assert sizes.local_batch * processes == sizes.batch == reward.batch_size
    assert sizes.steps * sizes.batch == reward.num_train


def test_sizes_by_hand():
    ppo = PpoArgs(
        total_episodes=1000,
        batch_size=192,
        nminibatches=3,
        whiten_groups=4,
        local_micro_batch_size=8,
        local_rollout_batch_size=24,
    )
    sizes = ppo_sizes(ppo, 2)
    assert vars(sizes) == {
        "updates": 6,  # 5.2, rounded up
        "batch": 192,
        "local_batch": 96,
        "local_groups": 2,
        "group_batch": 48,
    }


# ---- Sizes that do not divide: the message offers a value, and the value works ---------------------------------


def follow_offers(sizes, args, processes, group=""):
    """Change what each message offers until the sizes divide; the flags that were offered."""
    offered = {}
    for _ in range(3):
        try:
            sizes(args, processes)
            return offered
        except InputError as error:
            assert "\n" not in str(error)
            offer = re.search(rf"--{group}(\w+) (\d+)", str(error))
            assert offer, f"no offer in: {error}"
            flag, value = offer.groups()
            offered[flag] = int(value)
            args = replace(args, **{flag: int(value)})
    raise AssertionError(f"following {offered} does not lead to sizes that divide")


@pytest.mark.parametrize(
    ("changes", "processes", "offered"),
    [
        ({"whiten_groups": 4}, 8, {"whiten_groups": 8}),
        ({"whiten_groups": 3}, 2, {"whiten_groups": 4}),
        ({}, 3, {"whiten_groups": 9, "batch_size": 513}),
        ({"batch_size": 100}, 1, {"batch_size": 104}),
        ({"batch_size": 500, "nminibatches": 3}, 2, {"batch_size": 504}),
        ({"batch_size": 32}, 1, {"batch_size": 64}),
        ({"batch_size": 96, "nminibatches": 4}, 8, {"batch_size": 256}),
        ({"batch_size": 30, "whiten_rewards": False}, 8, {"batch_size": 32}),
    ],
)
def test_ppo_sizes_offer_what_divides(changes, processes, offered):
    assert follow_offers(ppo_sizes, PpoArgs(**changes), processes, group="ppo.") == offered


@pytest.mark.parametrize(
    ("changes", "processes", "offered"),
    [
        ({"batch_size": 36}, 8, {"batch_size": 40, "num_train": 4960}),
        ({"rollout_batch_size": 500}, 8, {"rollout_batch_size": 504}),
        ({"num_train": 5000}, 1, {"num_train": 4992}),
        ({"num_train": 20}, 1, {"num_train": 32}),
    ],
)
def test_reward_sizes_offer_what_divides(changes, processes, offered):
    args = replace(train_reward.PRESETS["sentiment"], **changes)
    assert follow_offers(reward_sizes, args, processes) == offered


# ---- Command lines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("spelling", [["--preset", "{}"], ["--preset={}"]])
def test_a_preset_is_parsed(script, name, spelling):
    assert parse_args(script.PRESETS, [word.format(name) for word in spelling]) == script.PRESETS[name]


@pytest.mark.parametrize("script", SCRIPTS)
def test_sentiment_is_the_default(script):
    assert parse_args(script.PRESETS, []) == script.PRESETS["sentiment"]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("flags_first", [True, False])
def test_flags_override_the_preset(script, flags_first):
    flags, preset = ["--seed", "7", "--task.temperature", "0.9"], ["--preset", "tldr"]
    args = parse_args(script.PRESETS, flags + preset if flags_first else preset + flags)
    expected = script.PRESETS["tldr"]
    assert args == replace(expected, seed=7, task=replace(expected.task, temperature=0.9))


def test_nested_flags_override_the_preset():
    words = "--preset tales --ppo.lr 1e-3 --ppo.no-whiten-rewards --rewards.adaptive-kl.target None"
    args = parse_args(train_policy.PRESETS, words.split())
    assert args.ppo == replace(train_policy.PRESETS["tales"].ppo, lr=1e-3, whiten_rewards=False)
    assert args.rewards.adaptive_kl.target is None
    assert args.rewards.monitor == "ppo_rlhf.worlds.tales:sentiment.gold_scores"
