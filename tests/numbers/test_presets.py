"""Presets and sizes of both scripts, against the published hyperparameters written out by hand."""

import re
from dataclasses import replace
from functools import reduce

import pytest

from ppo_rlhf import train_policy, train_reward
from ppo_rlhf.train_policy import ppo_sizes
from ppo_rlhf.train_reward import learning_rate_at, reward_sizes

PUBLISHED = ["sentiment", "descriptiveness", "cnndm", "tldr"]

# Field: sentiment, descriptiveness, cnndm, tldr; or that of all four. openai/lm-human-preferences launch.py @cbfd210
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
    "penalty_reward_value": -1,
    "temperature": (0.7, 0.7, 0.5, 0.7),
}
REWARD = {
    "base_model": "gpt2",
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
    "normalize_samples": 256,
    "normalize_before": True,
    "normalize_after": True,
    "dtype": "float32",
    "seed": 1,
    "save_interval": 50,
}
POLICY = {
    "base_model": "gpt2",
    "dtype": "float32",
    "ppo.total_episodes": 1_000_000,
    "ppo.batch_size": (512, 512, 32, 32),
    "ppo.nminibatches": 1,
    "ppo.noptepochs": 4,
    "ppo.lr": (1e-5, 1e-5, 2e-6, 2e-6),
    "ppo.vf_coef": 0.1,
    "ppo.cliprange": 0.2,
    "ppo.cliprange_value": 0.2,
    "ppo.gamma": 1,
    "ppo.lam": 0.95,
    "ppo.whiten_rewards": (True, True, False, False),
    "ppo.whiten_groups": 8,
    "rewards.kl_coef": (0.15, 0.15, 0.01, 0.03),
    "rewards.adaptive_kl.target": (6.0, 6.0, None, None),
    "rewards.adaptive_kl.horizon": 10_000,
    "seed": 1,
    "log_interval": 10,
    "save_interval": 50,
}


def get(args, field):
    return reduce(getattr, field.split("."), args)


@pytest.mark.parametrize(("column", "name"), list(enumerate(PUBLISHED)))
def test_published_hyperparameters(column, name):
    policy, reward = train_policy.PRESETS[name], train_reward.PRESETS[name]
    for table, args in ((TASK, policy.task), (REWARD, reward), (POLICY, policy)):
        expected = {field: x[column] if isinstance(x, tuple) else x for field, x in table.items()}
        assert {field: get(args, field) for field in table} == expected
    assert set(vars(policy.task)) == set(TASK) | {"query_column"}  # which names the key of a row of a file


@pytest.mark.parametrize("name", list(train_policy.PRESETS))
def test_both_scripts_have_the_same_task_and_model(name):
    policy, reward = train_policy.PRESETS[name], train_reward.PRESETS[name]
    assert (vars(policy.task), policy.base_model) == (vars(reward.task), reward.base_model)
    assert policy.preset == reward.preset == name


# ---- What follows from the presets -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "updates", "per_process", "steps", "labels", "last_lr"),
    [("sentiment", 1954, 64, 156, 4, 3.205e-7), ("tldr", 31250, 4, 2875, 2, 8.696e-9)],
)
def test_sizes_on_eight_processes(name, updates, per_process, steps, labels, last_lr):
    """The last update is a whole batch, and so are the samples for normalisation."""
    policy, reward = train_policy.PRESETS[name], train_reward.PRESETS[name]
    sizes = ppo_sizes(policy, 8)
    assert (sizes.updates, sizes.local_batch, sizes.local_groups, sizes.group_batch) == (
        *(updates, per_process, 1, per_process),
    )
    sizes = reward_sizes(reward, 8)
    assert (sizes.steps, sizes.local_batch) == (steps, labels)
    # 256 were asked for; as many batches of rollouts as that takes.
    assert sizes.normalize_samples == 8 * sizes.local_normalize_samples == max(256, reward.rollout_batch_size)
    assert learning_rate_at(reward, 0) == reward.lr
    assert learning_rate_at(reward, steps - 1) == pytest.approx(last_lr, rel=2e-4)


# ---- Sizes that do not divide: the message offers a value, and the value works ---------------------------------


OFFER = re.compile(
    r"(\w+) \d+ does not divide by .*; (\d+) does|--(?:ppo\.)?(\w+) \d+ gives fewer; (\d+) is|--(\w+) (\d+) is"
)


@pytest.mark.parametrize(
    ("script", "changes", "processes", "offered"),
    [
        (train_policy, {}, 3, {"whiten_groups": 9, "batch_size": 513}),
        (train_policy, {"batch_size": 500, "nminibatches": 3}, 2, {"batch_size": 504}),
        (train_policy, {"batch_size": 32}, 1, {"batch_size": 64}),
        (train_policy, {"batch_size": 30, "whiten_rewards": False}, 8, {"batch_size": 32}),
        (train_reward, {"batch_size": 36}, 8, {"batch_size": 40, "num_train": 4960}),
        (train_reward, {"rollout_batch_size": 500}, 8, {"rollout_batch_size": 504}),
    ],
)
def test_sizes_that_do_not_divide_offer_what_does(script, changes, processes, offered):
    def sizes(changes: dict[str, int]):
        if script is train_reward:
            return reward_sizes(replace(train_reward.Args(), **changes), processes)
        return ppo_sizes(replace(train_policy.Args(), ppo=train_policy.PpoArgs(**changes)), processes)

    found = {}
    for _ in offered:
        with pytest.raises(script.InputError) as caught:
            sizes(changes | found)
        name, value = filter(None, OFFER.search(str(caught.value)).groups())
        found[name] = int(value)
    assert found == offered
    sizes(changes | found)


# ---- Command lines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [train_policy, train_reward])
def test_presets_and_flags_on_the_command_line(script):
    """Wherever the flags are; sentiment is the default."""
    expected = script.PRESETS["tldr"]
    assert script.parse_args(script.PRESETS, []) == script.PRESETS["sentiment"]
    assert script.parse_args(script.PRESETS, ["--preset=tldr"]) == expected
    flags, preset = ["--seed", "7", "--task.temperature", "0.9"], ["--preset", "tldr"]
    for words in (flags + preset, preset + flags):
        args = script.parse_args(script.PRESETS, words)
        assert args == replace(expected, seed=7, task=replace(expected.task, temperature=0.9))
