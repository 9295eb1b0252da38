"""The derivations of report.html and `report.py --explain`: every number of small runs, in a browser."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import only, policy_arguments, posts_arguments, world_arguments
from test_report import browser, data_of, opened  # noqa: F401, they are fixtures

from ppo_rlhf import report, rlvr_policy, tldr_policy, train_policy
from ppo_rlhf.lib import cli

RUNS = {
    "1": "--rewards.function ppo_rlhf.worlds.tales:sentiment.gold_scores --ppo.lr 0.01 --ppo.gamma 0.9",
    "1 minibatches": "--rewards.function ppo_rlhf.worlds.tales:sentiment.gold_scores --ppo.lr 0.01 --ppo.gamma 0.9 "
    "--ppo.nminibatches 2 --ppo.no-whiten_rewards --rewards.adaptive_kl.target 1",
    "2": "--ppo.lr 0.01 --ppo.nminibatches 2",
    "2 k3": "--ppo.lr 0.01 --ppo.nminibatches 2 --ppo.whiten_rewards --ppo.gamma 0.9 --rewards.kl_estimator k3 "
    "--rewards.missing_eos subtract",
    "gae": "--ppo.advantage gae --ppo.lam 0.8 --ppo.gamma 0.9 --ppo.cliprange_value 0.01 --rewards.kl_coef 0.1",
    "grpo": "--ppo.advantage grpo --rewards.kl_coef 0.1 --rewards.kl_estimator k3 --ppo.dual_clip 1.25 "
    "--rewards.kl_loss_coef 0.1 --rewards.kl_loss_estimator k3 --ppo.loss_aggregation seq-mean-token-mean",
    "dr_grpo": "--ppo.advantage dr_grpo --ppo.loss cispo --rewards.kl_loss_coef 0.1 --rewards.kl_loss_estimator k2 "
    "--ppo.loss_aggregation seq-mean-token-sum-norm",
    "rloo": "--ppo.advantage rloo --rewards.kl_coef 0.1 --rewards.kl_estimator k2 --ppo.loss reinforce "
    "--ppo.loss_aggregation seq-mean-token-sum",
    "opo": "--ppo.advantage opo --rewards.kl_coef 0.1 --rewards.kl_estimator abs --ppo.loss gspo "
    "--ppo.cliprange_low 0.0003 --ppo.cliprange_high 0.0004 --rewards.kl_loss_coef 0.1 --rewards.kl_loss_estimator abs "
    "--ppo.loss_aggregation seq-mean-token-mean",
    "reinforce++": "--ppo.advantage reinforce++ --ppo.gamma 0.9 --rewards.kl_coef 0.1 --rewards.kl_loss_coef 0.1 "
    "--rewards.kl_loss_estimator k3+ --rewards.mask_truncated",
    "reinforce++-baseline": "--ppo.advantage reinforce++-baseline --rewards.kl_coef 0.1 --rewards.kl_loss_coef 0.1 "
    "--rewards.kl_loss_estimator k1+",
    "remax": "--ppo.advantage remax --rewards.kl_coef 0.1 --rewards.kl_estimator full --rewards.kl_loss_coef 0.1 "
    "--rewards.kl_loss_estimator full",
}
GROUPS = (
    "--preset sums-grpo --rewards.verifier test_explain:odd --ppo.lr 0.01 --ppo.batch_size 16 --ppo.noptepochs 2 "
    "--ppo.samples_per_prompt 4 --ppo.total_episodes 48 --ppo.nminibatches 2 --save_interval 0 --log_interval 0 "
    "--eval_interval 0 --eval_samples 0 --eval_problems 4 --task.response_length 12 --trace_interval 2"
)
SUMMARIES = (
    "--rewards.function ppo_rlhf.worlds.posts:gold_scores --ppo.total_episodes 48 --ppo.batch_size 16 "
    "--save_interval 0 --log_interval 0 --eval_interval 0 --eval_posts 8 --trace_interval 2"
)


def odd(prompts, responses, answers):
    """A verifier that even an untrained model satisfies now and then."""
    return [float(sum(map(str.isalnum, response)) % 2) for response in responses]


def script_of(name: str):
    return train_policy if name[0] == "1" else tldr_policy if name[0] == "2" else rlvr_policy


@pytest.fixture(scope="session")
def trained(request, tmp_path_factory):
    """A function name -> the folder of that run; each is made once."""
    made = {}

    def train(name: str) -> Path:
        if name not in made:
            script, folder = script_of(name), tmp_path_factory.mktemp("explained")
            if script is train_policy:
                arguments = [*world_arguments(request.getfixturevalue("tiny_world")), *policy_arguments()]
                arguments += ["--trace_interval", "3"]
            elif script is tldr_policy:
                world = request.getfixturevalue("tiny_posts")
                arguments = [*posts_arguments(world), "--base_model", f"{world}/model", *SUMMARIES.split()]
            else:
                world = request.getfixturevalue("tiny_sums")
                arguments = [*GROUPS.split(), "--base_model", f"{world}/model", "--task.problems", str(world)]
            with contextlib.chdir(folder):
                script.train(cli.parse_args(script.PRESETS, [*arguments, *RUNS[name].split()]))
            made[name] = only(folder, "runs/*")
        return made[name]

    return train


@pytest.mark.parametrize("name", RUNS)
def test_every_number_of_every_token_is_derived(name, trained, opened):  # noqa: F811
    folder = trained(name)
    report.report(report.Args(str(folder)))
    page = opened(folder / "report.html")
    found = page.evaluate("differences()")
    assert found["wrong"] == []
    assert found["checked"] > 300 and found["lines"] > 2 * found["checked"]
