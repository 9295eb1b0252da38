"""FSDP2, which chapter 2 has and chapter 1 refuses: two processes with half of everything each, and the same run."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from processes import SCRIPTS, launch, launch_together
from runs import metrics_of, only, policy_arguments, posts_arguments, reward_arguments, world_arguments

RUN = Path(__file__).parent / "sharded_run.py"
SHARDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
POLICY = (
    "--ppo.total_episodes 64 --ppo.batch_size 16 --ppo.nminibatches 2 --ppo.noptepochs 2 --ppo.lr 1e-3 "
    "--save_interval 2 --eval_interval 0 --eval_posts 4 --log_interval 0 --trace_interval 0 "
    "--dtype float64 "
    "--rewards.normalize_samples 16 "
    "--rewards.function ppo_rlhf.worlds.posts:gold_scores --rewards.monitor "
)


def policy_words(world: Path) -> list[str]:
    return [*posts_arguments(world), "--base_model", str(world / "model"), *POLICY.split(), ""]


def check_same(run: Path, expected: Path) -> None:
    rows, expected_rows = metrics_of(run), metrics_of(expected)
    assert len(rows) == len(expected_rows) == 4
    for row, expected_row in zip(rows, expected_rows, strict=True):
        assert row == pytest.approx(expected_row, rel=1e-9, abs=1e-12)


@pytest.fixture(scope="module")
def alone(tiny_posts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("alone")
    result = launch("tldr/policy.py", *policy_words(tiny_posts), folder=folder)
    assert result.status == 0, result.stderr
    return only(folder, "runs/*")


def run_two(folder: Path, *arguments: str, **environment: str) -> Path:
    results = launch_together(2, RUN, str(SCRIPTS / "tldr/policy.py"), *arguments, folder=folder, **environment)
    assert [result.status for result in results] == [0, 0], results[0].stderr + results[1].stderr
    assert "view tensor" not in results[0].stderr + results[1].stderr
    return only(folder, "runs/*")


WAYS = {
    "sharded": SHARDED,
    "sharded, without padding": SHARDED | {"FSDP_RESHARD_AFTER_FORWARD": "false"},
    "whole": {},
}


@pytest.fixture(scope="module", params=WAYS)
def two(request, tiny_posts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A run of two processes: with weights given back between forward and backward, without that, without FSDP2."""
    more = {} if request.param == "sharded" else {"LEAST_WIDTH": "1"}  # whoever is wider reads no padding
    folder = tmp_path_factory.mktemp("two")
    run_two(folder, *policy_words(tiny_posts), **WAYS[request.param], **more)
    return request.param, folder


def test_two_processes_give_the_run_of_one(two: tuple[str, Path], alone: Path):
    """Sharded, each keeps half: of the reference, and of policy and critic together."""
    way, folder = two
    check_same(only(folder, "runs/*"), alone)
    for rank in range(2):
        networks = json.loads((folder / f"sharding/{rank}.json").read_text())
        assert len(networks) == 2
        for network in networks:
            assert network["parts"] >= 2 if WAYS[way] else network["parts"] == 0  # layers, and what is around them
            assert network["share"] == pytest.approx(0.5 if WAYS[way] else 1, abs=0.02)  # odd rows go to one process
            assert network["dtypes"] == ["torch.float64"]
        if way != "sharded":
            passes = Counter(json.loads((folder / f"sharding/passes-{rank}.json").read_text()))
            assert passes["trained"] == 2 * 4 * 2 * 2  # policy and critic: updates, epochs, minibatches
            # Each rollout; the reference's and the critic's.
            assert passes["sampled"] >= 4 and passes["scored"] >= 2 * 4


@pytest.mark.parametrize("two", ["sharded"], indirect=True)
def test_two_sharded_processes_go_on_as_one_and_one_as_two(two: tuple[str, Path], alone: Path, tmp_path: Path):
    for processes, source in ((1, two[1]), (2, alone.parent.parent)):
        folder = Path(shutil.copytree(source, tmp_path / str(processes)))
        run = only(folder, "runs/*")
        shutil.rmtree(run / "checkpoints" / "4")
        if processes == 1:
            assert launch("tldr/policy.py", "--resume", str(run), folder=folder).status == 0
        else:
            run_two(folder, "--resume", str(run), **SHARDED)
            assert json.loads((run / "meta.json").read_text())["num_processes"] == 2
        check_same(run, alone)


@pytest.mark.parametrize("script", ["train_reward.py", "train_policy.py"])
def test_chapter_1_refuses_it(script: str, tiny_world: Path, tmp_path: Path):
    own = reward_arguments(tiny_world) if script == "train_reward.py" else policy_arguments()
    first, second = launch_together(2, script, *world_arguments(tiny_world), *own, folder=tmp_path, **SHARDED)
    assert (first.status, second.status) == (2, 2)
    assert first.stderr.startswith("error: chapter 1 keeps whole models") and len(first.stderr.splitlines()) == 1
    assert (second.stdout, second.stderr) == ("", "")
    assert not list(tmp_path.iterdir())


def test_one_process_has_nothing_to_share(tiny_world: Path, tmp_path: Path):
    arguments = [*world_arguments(tiny_world), *reward_arguments(tiny_world)]
    assert launch("train_reward.py", *arguments, folder=tmp_path, **SHARDED).status == 0
