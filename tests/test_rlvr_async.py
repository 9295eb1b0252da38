"""Rollouts apart from the learner: the same numbers whatever becomes of the workers; corrections; what goes wrong.

Runs share one Ray cluster. They are compared bit for bit, in float32, with the synchronous script and with a slow
version of staleness, in this process, which keeps a copy of the policy for every version.
"""

import copy
import dataclasses
import itertools
import math
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from oracles import on_processes, slow_gae, slow_whiten
from processes import Launched, launch_together
from runs import explained_metrics, metrics_of, only
from test_engine_vllm import FAKE
from test_rlvr_math import ALONE, numbers, rollout_of
from test_rlvr_runs import LETTERS, sums_arguments
from torch.testing import assert_close

from ppo_rlhf.lib.base import checkpoints
from ppo_rlhf.lib.base.errors import InputError
from ppo_rlhf.lib.services import cli, plots, traces
from ppo_rlhf.report import derivation, page
from ppo_rlhf.rlvr import asynchronous as rlvr_async, engine, episodes as rlvr_episodes, policy as rlvr_policy
from ppo_rlhf.rlvr.asynchronous import Args, Workers, correct
from ppo_rlhf.tldr import responses as tldr_responses

ray = pytest.importorskip("ray")

FOUR_UPDATES = (
    "--dtype float32 --ppo.total_episodes 64 --ppo.local_rollout_batch_size 4 --ppo.lr 0.01 --ppo.critic_lr 0.01 "
    "--eval_interval 0 --eval_samples 0 --eval_problems 4 --log_interval 0 --trace_interval 0 --rewards.kl_coef 0.1 "
    "--rewards.verifier letters:letters --ppo.critic_warmup 0"
)
IN_PAIRS = ["--ppo.advantage", "remax", "--ppo.samples_per_prompt", "2"]
DOUBLE = ["--dtype", "float64"]
OLDER = [*DOUBLE, "--staleness", "2", "--correction", "none"]


@pytest.fixture(scope="session")
def cluster():
    """Ray on this machine, which the runs of this file find."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}  # other processes have no token
    os.environ |= {"RAY_worker_niceness": "0"}  # else a busy machine starves workers: any other process goes first
    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not find this file
    ray.init(address="local", num_cpus=4, object_store_memory=80 * 2**20, **options)
    yield
    ray.shutdown()


def train_by(script, world: Path, folder: Path, *words: str) -> Path:
    """Train in a folder, or go on with the run that is there; returns the folder."""
    arguments = [*sums_arguments(world), *FOUR_UPDATES.split(), *words]
    if list(folder.glob("runs/*")):
        arguments = ["--resume", str(only(folder, "runs/*")), *words]
    folder.mkdir(exist_ok=True)
    (folder / "letters.py").write_text(LETTERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        patch.delitem(sys.modules, "letters", raising=False)
        patch.setattr(plots, "draw_learning_curves", lambda *_: None)  # which takes longer than the run
        script.train(cli.parse_args(script.PRESETS, arguments))
    return folder


def numbers_of(folder: Path) -> list[dict[str, float]]:
    """The metrics of each update, but for seconds."""
    return [{k: v for k, v in row.items() if "time/" not in k} for row in metrics_of(only(folder, "runs/*"))]


def check_equal(folder: Path, expected: Path) -> None:
    """Metrics that both runs have, and the policy's weights, bit for bit."""
    ours, theirs = numbers_of(folder), numbers_of(expected)
    assert len(ours) == len(theirs) == 4
    assert all(theirs[i].items() <= ours[i].items() for i in range(4)), [
        {k: (ours[i].get(k), v) for k, v in theirs[i].items() if ours[i].get(k) != v} for i in range(4)
    ]
    for name in ("policy", "value"):
        assert len(list(folder.glob(f"models/*/{name}"))) == len(list(expected.glob(f"models/*/{name}")))
        for file in expected.glob(f"models/*/{name}/*.safetensors"):
            assert only(folder, f"models/*/{name}/{file.name}").read_bytes() == file.read_bytes()


class Kept(engine.BuiltIn):
    """An engine whose process serves run after run; it may be told to die in one of them by kill -9."""

    def begin(self, spec):
        engine.BuiltIn.__init__(self, spec)

    def die(self, calls, place):
        """Of the processes that are told so, the first that is asked for so many pieces dies in the middle of it."""
        self.calls, self.place, self.tokens = calls, place, 0

    def sample(self, **piece):
        self.calls -= 1
        if self.calls == 0 and not os.path.exists(self.place):
            open(self.place, "w").close()
            read = self.model.base_model.forward

            def read_a_little(*arguments, **options):
                self.tokens += 1
                if self.tokens > 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                return read(*arguments, **options)

            self.model.base_model.forward = read_a_little
        return engine.BuiltIn.sample(self, **piece)


@pytest.fixture(scope="module")
def spare() -> list:
    """Workers that the last run has left."""
    return []


@pytest.fixture
def kept(cluster, spare, monkeypatch):
    """Processes of workers, from run to run: PyTorch takes longer to import than a run. `dies`: see Kept.die."""
    start, told = Workers.start, SimpleNamespace(dies=(0, ""))

    def start_or_take(workers):
        if spare:
            workers.actors.append(spare.pop())
            ray.get(workers.actors[-1].begin.remote(workers.spec))
            worker = rlvr_async.Worker(actor=workers.actors[-1])
        else:
            worker = start(workers)
        worker.actor.die.remote(*told.dies)
        return worker

    def keep(workers):
        workers.threads.shutdown()
        spare.extend(worker.actor for _ in range(workers.free.qsize()) if (worker := workers.free.get()))

    monkeypatch.setattr(engine, "BuiltIn", Kept)
    monkeypatch.setattr(Workers, "start", start_or_take)
    monkeypatch.setattr(Workers, "close", keep)
    return told


# ---- The same numbers ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def synchronous(tiny_sums, tmp_path_factory):
    """A run of the synchronous script, with one response more for each prompt, its greedy one."""
    return train_by(rlvr_policy, tiny_sums, tmp_path_factory.mktemp("run"), *IN_PAIRS)


def test_without_staleness_it_is_the_synchronous_script(kept, synchronous, tiny_sums, tmp_path):
    folder = train_by(rlvr_async, tiny_sums, tmp_path / "run", *IN_PAIRS, "--staleness", "0")
    check_equal(folder, synchronous)
    for row in numbers_of(folder):
        assert row["async/staleness_max"] == 0 and row["async/largest_gap"] < 1e-5


@pytest.fixture(scope="module")
def two_updates_late(tiny_sums, tmp_path_factory):
    """The slow version: each round is sampled by a copy of the policy from two updates before."""
    policies: list[torch.nn.Module] = []

    class LateSampler(rlvr_policy.Sampler):
        def sample(self, draw):
            policies.append(copy.deepcopy(self.actor_critic.lm_backbone))
            old, ids, answers = policies[max(len(policies) - 3, 0)], self.setup.ids, []
            for contexts, uniforms, temperature in draw.requests:
                pieces = [
                    tldr_responses.generate_until(old, *rows, ids.pad, ids.vocab_size, temperature, ids.stops)
                    for rows in zip(contexts.split(4), uniforms.split(4), strict=True)
                ]
                answers.append(tuple(map(torch.cat, zip(*pieces, strict=True))))
            version = max(self.version - 2, 0)
            return rlvr_episodes.Samples(draw=draw, answers=answers, version=version, on_policy=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rlvr_policy, "Sampler", LateSampler)
        return train_by(rlvr_policy, tiny_sums, tmp_path_factory.mktemp("run"), *DOUBLE)


def test_a_batch_is_sampled_by_the_weights_of_two_updates_before(
    kept, two_updates_late, tiny_sums, monkeypatch, tmp_path, capfd
):
    """By two workers, of which one dies."""
    monkeypatch.setattr(kept, "dies", (5, str(tmp_path / "died")))
    folder = train_by(rlvr_async, tiny_sums, tmp_path / "run", *OLDER, "--workers", "2")
    check_equal(folder, two_updates_late)
    assert (tmp_path / "died").exists() and "a worker is lost" in capfd.readouterr().out
    rows = numbers_of(folder)
    assert (
        [row["async/staleness_max"] for row in rows] == [0, 1, 2, 2] == [row["async/staleness_mean"] for row in rows]
    )
    assert rows[0]["async/largest_gap"] < 1e-5 < 1e-2 < rows[3]["async/largest_gap"]
    assert rows[0]["async/ess"] == pytest.approx(1, abs=1e-5) and rows[3]["async/ess"] < 0.999


def test_a_resumed_learner_trains_on_what_the_old_weights_sample(kept, two_updates_late, tiny_sums, tmp_path):
    folder = train_by(rlvr_async, tiny_sums, tmp_path / "run", *OLDER, "--ppo.total_episodes", "32")
    assert len(numbers_of(folder)) == 2
    check_equal(train_by(rlvr_async, tiny_sums, folder, "--ppo.total_episodes", "64"), two_updates_late)


def test_a_score_that_fails_costs_no_update_and_no_version(kept, two_updates_late, tiny_sums, monkeypatch, tmp_path):
    """It fails when the third update's batch is sampled already, by old weights that the fourth doesn't need."""
    calls = iter(range(100))

    def fail_once(*arguments, **options):
        if next(calls) == 2:
            raise InputError("no answer")
        return score_responses(*arguments, **options)

    score_responses = rlvr_policy.score_responses
    monkeypatch.setattr(rlvr_policy, "score_responses", fail_once)
    with pytest.raises(InputError, match=r"no answer; the run stops after update 2, with a checkpoint; .*--resume"):
        train_by(rlvr_async, tiny_sums, tmp_path / "run", *OLDER, "--save_interval", "0")
    check_equal(train_by(rlvr_async, tiny_sums, tmp_path / "run"), two_updates_late)


def test_a_score_that_fails_in_a_second_round_costs_no_update(tiny_sums, monkeypatch, tmp_path):
    """[V78] What is left over of one batch, and the number of rounds, are those of the last finished update."""
    words = ["--ppo.filter_groups", "--ppo.prompts_per_round", "4", "--save_interval", "0"]
    words += ["--ppo.advantage", "grpo", "--ppo.samples_per_prompt", "4", "--ppo.batch_size", "16"]
    whole = train_by(rlvr_policy, tiny_sums, tmp_path / "whole", *words)
    rounds = [int(row["train/rounds"]) for row in numbers_of(whole)]
    update = next(i for i, n in enumerate(rounds) if i and n > 1)
    last, calls = sum(rounds[:update]) + 1, iter(range(1000))  # the second round of that update

    def fail_once(*arguments, **options):
        if next(calls) == last:
            raise InputError("no answer")
        return score_responses(*arguments, **options)

    score_responses = rlvr_policy.score_responses
    monkeypatch.setattr(rlvr_policy, "score_responses", fail_once)
    with pytest.raises(InputError, match=f"stops after update {update}, with a checkpoint"):
        train_by(rlvr_policy, tiny_sums, tmp_path / "run", *words)
    check_equal(train_by(rlvr_policy, tiny_sums, tmp_path / "run"), whole)


def test_traces_and_means_are_of_what_the_losses_had(kept, tiny_sums, tmp_path):
    """With bypass the ratio is new / mu; responses that were rejected whole have no advantages and returns."""
    whole_batch = "--trace_interval 1 --trace_episodes 16"
    words = "--staleness 2 --correction bypass --rejection sequence --rejection_low 0.99 --rejection_high 1.01"
    folder = train_by(rlvr_async, tiny_sums, tmp_path / "run", *DOUBLE, *words.split(), *whole_batch.split())
    rows, partly = numbers_of(folder), 0
    for update, row in enumerate(rows):
        trace = traces.read(only(folder, "runs/*"), update)
        x = {name: tensor.numpy() for name, tensor in trace.tokens.items()}
        scored, in_loss = x["scored"], x["mask"]
        log_ratios = (x["logprobs"] - x["sampler_logprobs"]) * scored
        means = log_ratios.sum(1, keepdims=True) / scored.sum(1, keepdims=True)
        np.testing.assert_array_equal(in_loss, scored & (np.abs(np.exp(means) - 1) <= 0.01))
        partly += 0 < in_loss.sum() < scored.sum()
        np.testing.assert_allclose(x["ratio"][scored], np.exp(x["new_logprobs"] - x["sampler_logprobs"])[scored])
        beyond = (x["advantages"] > 0) & (x["ratio"] > 1.2) | (x["advantages"] < 0) & (x["ratio"] < 0.8)
        np.testing.assert_array_equal(x["clipped"], beyond & in_loss)
        advantages, values = x["advantages"][in_loss], x["values"][in_loss]
        unwhitened = [
            slow_gae(x["rewards"][i, None, :n], x["values"][i, None, :n], [n], gamma=1.0, lam=0.95)[0]
            for i, n in enumerate(in_loss.sum(1))
        ]
        raw = np.concatenate(unwhitened)
        returns = values + raw
        np.testing.assert_allclose(advantages, slow_whiten(raw[None], [len(raw)])[0], rtol=1e-6)
        expected = {"val/advantages_mean": advantages.mean(), "val/advantages_abs_mean": np.abs(advantages).mean()}
        expected |= {"val/mean": values.mean(), "val/returns": returns.mean()}
        expected["val/explained_var"] = 1 - (returns - values).var() / returns.var()
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert partly
    one_run, checked = page.read_run(only(folder, "runs/*")), 0
    settings = page.settings_of(one_run)
    steps = derivation.steps_of(settings)
    for update in one_run.kept():
        episodes = one_run.episodes(update)
        for episode in episodes:
            group = page.group_of(episode, episodes)
            numbers = derivation.derive(episode, settings, steps, epoch=0, group=group)
            for line in (line for lines in derivation.lines_of(episode, steps, numbers, 0) for line in lines):
                assert not line.wrong, (update, line)
                checked += bool(line.step.recorded)
    assert checked > 500


def test_the_off_policy_mask_leaves_out_blame_of_what_became_unlikely(kept, tiny_sums, tmp_path):
    """In one step per update, the newest policy is the learner's; the share and every derivation say the same."""
    words = "--staleness 2 --correction bypass --off_policy_mask 0.002 --ppo.nminibatches 1 --ppo.noptepochs 1"
    words += " --trace_interval 1 --trace_episodes 16"
    folder = train_by(rlvr_async, tiny_sums, tmp_path / "run", *DOUBLE, *words.split())
    one_run, some = page.read_run(only(folder, "runs/*")), 0
    settings = page.settings_of(one_run)
    steps = derivation.steps_of(settings)
    for number, row in enumerate(numbers_of(folder)):
        x = {name: tensor.numpy() for name, tensor in traces.read(only(folder, "runs/*"), number).tokens.items()}
        gaps = ((x["sampler_logprobs"] - x["logprobs"]) * x["mask"]).sum(1) / x["mask"].sum(1)
        masked = (gaps[:, None] > 0.002) & (x["advantages"] < 0) & x["mask"]
        assert row["async/masked_share"] == pytest.approx(masked.sum() / x["mask"].sum(), abs=1e-9)
        some += 0 < masked.sum() < x["mask"].sum()
        episodes = [episode for episode in one_run.episodes(number) if not episode["again"]]
        for episode, expected in zip(episodes, masked, strict=True):
            group = page.group_of(episode, episodes)
            found = derivation.derive(episode, settings, steps, epoch=0, group=group)
            for of_token, is_masked in zip(found, expected, strict=False):
                assert not of_token["learns"] or is_masked == (of_token["share"] == 0 != of_token["loss"])
    assert some


def test_two_learners_are_one_but_for_rounding(kept, tiny_sums, tmp_path):
    """Under torchrun; the first process has the workers and publishes the weights."""
    words = [*OLDER, "--off_policy_mask", "0.002"]
    one_learner = train_by(rlvr_async, tiny_sums, tmp_path / "one", *words)
    (tmp_path / "letters.py").write_text(LETTERS)
    words += ["--ray_address", ray.get_runtime_context().gcs_address]
    results = launch_together(
        2,
        "rlvr/asynchronous.py",
        *sums_arguments(tiny_sums),
        *FOUR_UPDATES.split(),
        *words,
        folder=tmp_path,
    )
    assert all(result.status == 0 for result in results), results[0].stderr + results[1].stderr
    for two, one in zip(numbers_of(tmp_path), numbers_of(one_learner), strict=True):
        assert {name: two[name] for name in one} == pytest.approx(one, rel=1e-7, abs=1e-9)
    assert any(0 < row["async/masked_share"] < 1 for row in numbers_of(one_learner))


def test_a_run_with_vllm_corrects_what_is_rounded_otherwise(cluster, tiny_sums, tmp_path):
    """A stand-in for vLLM. test_engine_vllm.py has those that are refused."""
    interpreter = tmp_path / "python"
    interpreter.touch(0o755)
    interpreter.write_text(f'#!/bin/sh\nPYTHONPATH={FAKE} exec {sys.executable} "$@"\n')
    words = ["--engine", "vllm", "--vllm_python", str(interpreter), "--staleness", "0", "--ppo.total_episodes", "32"]
    rows = numbers_of(train_by(rlvr_async, tiny_sums, tmp_path / "run", *words))
    assert len(rows) == 2  # the second by weights that were sent anew
    for row in rows:
        assert row["async/staleness_max"] == 0 < row["async/largest_gap"] < 1e-4
        assert row["async/weight_mean"] == pytest.approx(1, abs=1e-4)


# ---- Workers that are lost, hang, or are others ----------------------------------------------------------------


@pytest.fixture
def workers_of(cluster, monkeypatch):
    """A function that makes workers of an engine which has no model, and so starts quickly."""
    monkeypatch.setattr(engine, "Spec", lambda **_: None)
    made = []

    def make(light: type, workers: int = 1, **settings) -> Workers:
        monkeypatch.setattr(engine, "BuiltIn", light)
        args = Args(base_model="nowhere", workers=workers, gpus_per_worker=0, **settings)
        accelerator = SimpleNamespace(device=torch.device("cpu"))
        made.append(
            Workers(SimpleNamespace(args=args, ids=SimpleNamespace(pad=9, stops=(8,)), accelerator=accelerator), ray)
        )
        return made[-1]

    yield make
    for workers in made:
        workers.close()


OURS = engine.description()


def light_engine(told: dict[str, str], **methods) -> type:
    """Engines that say which weights they were given, and what they were asked for."""

    class Light:
        def __init__(self, spec):
            self.loaded = []

        def describe(self):
            return told

        def load(self, weights, version):
            self.loaded.append((weights["w"], version))

        def sample(self, prompts, n, noise, temperature, version):
            return int(prompts[0]), version, self.loaded

    for name, method in methods.items():
        setattr(Light, name, method)
    return Light


def ask(workers: Workers, number: int, version: int, weight: float):
    weights = ray.put({"w": weight})
    piece = {"prompts": np.array([number]), "n": 1, "noise": np.zeros((1, 1)), "temperature": 1.0}
    return workers.ask(weights, piece | {"version": version})


def test_pieces_come_in_order_each_from_its_version(workers_of):
    workers = workers_of(light_engine(OURS))
    pieces = [ask(workers, number, version, version / 2) for number, version in enumerate([0, 0, 1, 0, 3])]
    found = [piece.result(60) for piece in pieces]
    assert [piece[:2] for piece in found] == [(0, 0), (1, 0), (2, 1), (3, 0), (4, 3)]
    assert found[-1][2] == [(0.0, 0), (0.5, 1), (0.0, 0), (1.5, 3)]  # loaded only where it is another


@pytest.mark.parametrize("way", ["hangs", "dies"])
def test_the_piece_of_a_lost_worker_is_sampled_again_by_the_weights_that_it_had(
    workers_of, monkeypatch, tmp_path, way
):
    def sample(self, prompts, n, noise, temperature, version):
        if int(prompts[0]) == 2 and not (tmp_path / "gone").exists():
            (tmp_path / "gone").touch()
            time.sleep(1_000) if way == "hangs" else os.kill(os.getpid(), signal.SIGKILL)
        return int(prompts[0]), version, self.loaded

    calls = itertools.count(1)

    def limit(workers):
        """Short for the one call that never ends, once it is under way: describe, load and two samples come first."""
        if next(calls) != 5 or way == "dies":
            return 600.0
        while not (tmp_path / "gone").exists():
            time.sleep(0.02)
        return 0.1

    monkeypatch.setattr(Workers, "time_out", property(limit, lambda *_: None), raising=False)
    workers = workers_of(light_engine(OURS, sample=sample))
    pieces = [ask(workers, number, 4, 0.25) for number in range(4)]
    assert [piece.result(300) for piece in pieces] == [(number, 4, [(0.25, 4)]) for number in range(4)]
    assert workers.lost == 1


def dies(self, prompts, n, noise, temperature, version):
    os.kill(os.getpid(), signal.SIGKILL)


def finds_no_paper(self, prompts, n, noise, temperature, version):
    raise InputError("there is no paper")


def finds_no_house(self, spec):
    raise InputError("there is no house")


TROUBLE = {
    "a piece of a batch has cost 5 workers": {"sample": dies},
    "a worker says: there is no paper": {"sample": finds_no_paper},
    "a worker cannot start: there is no house": {"__init__": finds_no_house},
    "has torch 0.1, the learner": {"describe": lambda _: OURS | {"torch": "0.1"}},
    "has ppo_rlhf 123, the learner": {"describe": lambda _: OURS | {"ppo_rlhf": "123"}},
}


@pytest.mark.parametrize("words", TROUBLE)
def test_what_no_other_worker_could_mend_ends_in_one_line(workers_of, words):
    workers = workers_of(light_engine(OURS, **TROUBLE[words]))
    with pytest.raises(InputError) as caught:
        ask(workers, 0, 0, 1.0).result(300)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_rays_own_troubles_end_in_one_line(monkeypatch):
    there = ray.exceptions
    for error, words in {
        there.ObjectStoreFullError("no\nroom"): "Ray's object store has no room for the weights",
        there.OutOfDiskError("no\nroom"): "Ray's object store has no room for the weights",
        there.RaySystemError("gone\nfar"): "Ray is gone: ",
    }.items():
        with pytest.raises(InputError, match=words) as caught, rlvr_async.ray_errors(ray):
            raise error
        assert "\n" not in str(caught.value)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    for problem in (ConnectionError("nobody\nthere"), RuntimeError("Version mismatch"), ValueError("no address")):
        monkeypatch.setattr(ray, "init", lambda problem=problem, **_: exec("raise problem", {"problem": problem}))
        words = f"--ray_address far: {str(problem).split()[0]}"
        with pytest.raises(InputError, match=words), rlvr_async.connected(Args(ray_address="far")):
            pass
    monkeypatch.setitem(sys.modules, "ray", None)
    words = r"needs Ray: pip install -e '.\[async\]'"
    with pytest.raises(InputError, match=words), rlvr_async.connected(Args()):
        pass


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://localhost:{}", "127.0.0.1:7{}"])
def test_an_address_where_nothing_listens_ends_in_one_line_at_once(monkeypatch, form):
    """Ray itself would try for twelve minutes. The third one is no port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = form.format(listening.getsockname()[1])
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was asked"))
    with pytest.raises(InputError) as caught, rlvr_async.connected(Args(ray_address=address)):
        pass
    line = str(caught.value)
    assert line.startswith(f"--ray_address {address}: ") and "`ray start --head`" in line and "\n" not in line


RAY = """
import pathlib, signal, sys, threading, time

def is_initialized():
    return False

def init(**_):  # as Ray's does, if it is called in the main thread
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
    print("starts", flush=True)
    time.sleep(0.5)
    print("has started", flush=True)

def shutdown():
    print("is ended", flush=True)
"""
CONNECTS = """
import sys, threading, time
sys.path.insert(0, "")
start = threading.Thread.start  # it takes a while, so that the signal comes before it returns
threading.Thread.start = lambda thread: (start(thread), time.sleep(0.2))
from ppo_rlhf.rlvr import asynchronous as rlvr_async
from ppo_rlhf.lib.base import errors

def main():
    with rlvr_async.connected(rlvr_async.Args()):
        time.sleep(1_000)

errors.run_script(main)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_while_ray_starts_ends_the_run_in_order(tmp_path, number, status):
    (tmp_path / "ray.py").write_text(RAY)
    (tmp_path / "connects.py").write_text(CONNECTS)
    launched = Launched(tmp_path / "connects.py", folder=tmp_path)
    while "starts" not in launched.stdout() and launched.process.is_alive():
        time.sleep(0.02)
    os.kill(launched.process.pid, number)
    result = launched.wait(60)
    assert result.status == status, result
    said = {"stopped by SIGTERM": result.stdout, "error: interrupted": result.stderr}
    assert [words for words in said if words in said[words]] == [list(said)[status > 0]]
    assert result.stdout.startswith("starts\nhas started\nis ended\n")


@pytest.mark.parametrize(("staleness", "workers", "crowded"), [(0, 1, False), (1, 1, True), (0, 2, True)])
def test_more_threads_than_cores_are_said(monkeypatch, capsys, staleness, workers, crowded):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    rlvr_async.check_arguments(Args(staleness=staleness, workers=workers))
    said, words = (
        capsys.readouterr().out,
        "2 processes of 2 threads each share 2 cores and slow each other down; PPO_",
    )
    assert (f"{words}RLHF_THREADS=1" in said) == ("slow each other down" in said) == crowded


def test_an_engine_takes_whole_weights_and_samples_by_no_others(tiny_sums):
    model = checkpoints.trained_parameters(engine.models.load_base_model(Args(base_model=f"{tiny_sums}/model")))
    weights = {name: parameter.detach().numpy() for name, parameter in model.items()}
    built_in = engine.BuiltIn(engine.Spec(base_model=f"{tiny_sums}/model", dtype="float32", pad=30, stops=(0,)))
    prompts, noise = np.full((2, 3), 5), np.random.default_rng(0).random((4, 6))
    with pytest.raises(RuntimeError, match="version 0 of the weights is asked for, but version -1 is loaded"):
        built_in.sample(prompts, 2, noise, 1.0, 0)
    first, *_ = weights
    for wrong, words in (
        ({name: x for name, x in weights.items() if name != first}, f"{first} is missing"),
        (weights | {"module.x": weights[first]}, "module.x is unexpected"),
        (weights | {first: weights[first][:1]}, f"{first} was sent in the shape"),
    ):
        with pytest.raises(RuntimeError, match=words):
            built_in.load(wrong, 0)
    found = []
    for version, scale in ((0, 1.0), (1, 3.0), (2, 1.0)):
        built_in.load({name: scale * x for name, x in weights.items()}, version)
        found.append(built_in.sample(prompts, 2, noise, 1.0, version))
        assert (found[-1].versions == version).all() and found[-1].versions.shape == (4, 2)
        assert (found[-1].finished == (found[-1].responses == 0).any(1)).all()
    assert (found[0].logprobs != found[1].logprobs).any()
    assert all((one == other).all() for one, other in zip(found[0][:3], found[2][:3], strict=True))


# ---- Corrections -----------------------------------------------------------------------------------------------

RATIOS = [[0.25, 1.0, 3.0], [1.0, 1.0, 1.0], [4.0, 4.0, 9.0]]  # prox / mu; the last 9 is masked
LIVE = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0]]).bool()


def stale_batch():
    logprobs = -numbers(1, 3, 3).abs()
    mu = (logprobs - torch.tensor(RATIOS, dtype=torch.float64).log()).masked_fill(~LIVE, math.nan)
    versions = torch.tensor([3, 3, 5])
    return rollout_of(LIVE, logprobs=logprobs, sampler_logprobs=mu, loss_mask=LIVE, versions=versions)


def args_of(**settings) -> Args:
    return Args(staleness=2, **settings)


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({}, [[0.25, 1, 2], [1, 1, 1], [2, 2, 0]]),
        ({"correction_cap": 3.5}, [[0.25, 1, 3], [1, 1, 1], [3.5, 3.5, 0]]),
        ({"correction_level": "sequence"}, [[0.75] * 3, [1] * 3, [2, 2, 0]]),
        (
            {"correction_normalised": True},
            [[x * 8 / 10.25 for x in row] for row in [[0.25, 1, 2], [1] * 3, [2, 2, 0]]],
        ),
        (
            {"correction_level": "sequence", "correction_normalised": True},
            [[0.6] * 3, [0.8] * 3, [1.6, 1.6, 0]],  # of 0.75, 1 and 2, whose mean is 1.25
        ),
    ],
)
def test_weights_of_decoupled_ppo(settings, weights):
    batch = stale_batch()
    correction = correct(batch, args_of(**settings), 5, ALONE)
    trained, metrics = correction.episodes, correction.metrics
    assert_close(correction.weights, torch.tensor(weights, dtype=torch.float64), atol=1e-12, rtol=0)
    assert trained.logprobs is batch.logprobs and trained.mask.equal(LIVE) and trained.loss_mask.equal(LIVE)
    if not settings:
        assert metrics["async/weight_mean"] == pytest.approx(10.25 / 8)
        assert metrics["async/clipped_share"] == 3 / 8 and metrics["async/rejected_share"] == 0
        at_the_cap = correct(batch, args_of(correction_cap=3.0), 5, ALONE).metrics  # one ratio is 3
        assert at_the_cap["async/clipped_share"] == 2 / 8
        assert metrics["async/staleness_mean"] == pytest.approx(4 / 3) and metrics["async/staleness_max"] == 2
        ratios = torch.tensor(RATIOS, dtype=torch.float64)[LIVE]
        assert metrics["async/chi2_token"] == pytest.approx(float((ratios**2).mean()) - 1)
        assert metrics["async/kl"] == pytest.approx(float(-ratios.log().mean()))


def test_without_a_correction_nothing_changes_and_bypass_takes_the_samplers_word():
    batch = stale_batch()
    for args in (Args(staleness=0), args_of(correction="none")):
        same = correct(batch, args, 5, ALONE)
        assert same.weights is same.reweigh is None
        assert same.episodes.logprobs is batch.logprobs and same.episodes.loss_mask.equal(LIVE)
    bypass = correct(batch, args_of(correction="bypass"), 5, ALONE)
    assert bypass.weights is bypass.reweigh is None and bypass.episodes.logprobs is batch.sampler_logprobs
    # The loss reinforce has no ratio; its weights are those of the newest policy, here twice as likely as prox.
    for level, expected in {"token": [0.5, 2, 4], "sequence": [4] * 3}.items():
        settings = {"correction_level": level, "correction_cap": 4.0, "ppo": rlvr_policy.PpoArgs(loss="reinforce")}
        bypass = correct(batch, args_of(correction="bypass", **settings), 5, ALONE)
        assert bypass.episodes.logprobs is batch.sampler_logprobs and bypass.weights is None
        twice_as_likely = bypass.reweigh(batch.logprobs + math.log(2), bypass.episodes)
        assert twice_as_likely[0].tolist() == pytest.approx(expected)
    assert correct(batch, Args(staleness=0, correction="decoupled"), 5, ALONE).weights is not None


@pytest.mark.parametrize("way", ["decoupled", "bypass", "none"])
def test_blame_of_what_became_unlikely_is_left_out_of_the_policys_loss_alone(way):
    """Whatever the old policy of the ratio is, the sampler's log-probs count, and those of the newest policy."""
    batch, zeros = stale_batch(), torch.zeros(3, 3, dtype=torch.float64)
    args = args_of(correction=way, off_policy_mask=0.5)
    correction = correct(batch, args, 5, ALONE)
    advantages = torch.tensor([[-1.0, 1, -1], [-1, -1, -1], [-1, -1, -1]]).double()
    mb = rlvr_episodes.make_batch(correction, (zeros, zeros, zeros), (advantages, zeros), 5)
    for fall, expected in (
        (0.4, [[1, 1, 1], [1, 1, 1], [1, 1, 1]]),
        (0.6, [[0, 1, 0], [0, 0, 0], [0, 0, 1]]),  # the last token of the third is padding
    ):
        found = mb.reweigh(batch.sampler_logprobs - fall, mb)
        assert found.tolist() == expected
    # Prox is further from the sampler than that; what counts is the newest policy.
    assert (mb.reweigh(batch.logprobs - 10, mb)[LIVE & (advantages < 0)] == 0).all()
    ppo = rlvr_policy.PpoArgs(loss="reinforce")
    if way == "bypass":
        both = correct(batch, dataclasses.replace(args, ppo=ppo), 5, ALONE)
        found = both.reweigh(batch.sampler_logprobs - 0.6, mb)
        assert found[0].tolist() == pytest.approx([0, math.exp(-0.6), 0])


def test_a_rejection_narrows_the_loss_and_a_response_without_a_token_leaves_its_group():
    kept = torch.tensor([[0, 1, 0], [1, 1, 1], [0, 0, 0]]).bool()
    correction = correct(stale_batch(), args_of(rejection="token"), 5, ALONE)
    trained, metrics = correction.episodes, correction.metrics
    assert trained.loss_mask.equal(kept) and trained.mask.any(1).tolist() == [True, True, False]
    assert trained.mask[:2].equal(LIVE[:2]) and metrics["async/rejected_share"] == pytest.approx(4 / 8)
    sizes = {"rejection_low": 0.2, "rejection_high": 3.2}
    assert correct(stale_batch(), args_of(rejection="token", **sizes), 5, ALONE).episodes.mask.any(1).sum() == 2
    # Geometric means: 0.75 ** (1 / 3) = 0.91, 1 and 4.
    by_response = correct(stale_batch(), args_of(rejection="sequence", rejection_low=0.9), 5, ALONE).episodes
    assert by_response.loss_mask.any(1).tolist() == [True, True, False] and by_response.loss_mask[:2].all()
    by_response = correct(stale_batch(), args_of(rejection="sequence", rejection_low=0.95), 5, ALONE).episodes
    assert by_response.loss_mask.any(1).tolist() == [False, True, False]
    # The advantages of what is kept are those of all tokens.
    rewards = numbers(2, 3, 3)
    for batch, expected in ((stale_batch(), LIVE), (trained, LIVE & kept.any(1, keepdim=True))):
        batch = dataclasses.replace(batch, groups=torch.zeros(3, dtype=torch.long))
        ppo = rlvr_policy.PpoArgs(advantage="dr_grpo")
        advantages, _ = rlvr_policy.compute_advantages(batch, rewards, ppo, torch.clone)
        totals = rewards.masked_fill(~expected, 0).sum(1)
        mean = totals[expected.any(1)].mean()
        assert_close(advantages, (totals - mean).unsqueeze(1).expand(3, 3).masked_fill(~expected, 0))


@pytest.mark.parametrize("normalised", [False, True])
def test_a_batch_of_which_nothing_can_be_scored_corrects_nothing(normalised):
    batch = dataclasses.replace(stale_batch(), mask=torch.zeros_like(LIVE), loss_mask=torch.zeros_like(LIVE))
    args = args_of(correction_normalised=normalised, rejection="token")
    correction = correct(batch, args, 5, ALONE)
    assert not correction.episodes.loss_mask.any() and not correction.weights.any()
    numbers = {name: value for name, value in correction.metrics.items() if "staleness" not in name}
    assert len(numbers) == 12 and set(numbers.values()) == {0.0}


def test_processes_find_the_same_weights_of_the_whole_batch():
    batch, settings = stale_batch(), {"correction_normalised": True, "rejection": "token"}
    batch = dataclasses.replace(batch, **{n: torch.cat([t, t[:1]]) for n, t in batch.tensors().items()})
    whole = correct(batch, args_of(**settings), 5, ALONE)

    def on_process(process):
        rows = slice(2 * process.process_index, 2 * process.process_index + 2)
        part = dataclasses.replace(batch, **{name: tensor[rows] for name, tensor in batch.tensors().items()})
        return correct(part, args_of(**settings), 5, process)

    parts = on_processes(2, on_process)
    assert_close(torch.cat([part.weights for part in parts]), whole.weights)
    assert torch.cat([part.episodes.loss_mask for part in parts]).equal(whole.episodes.loss_mask)
    assert all(part.metrics == pytest.approx(whole.metrics) for part in parts)
    assert whole.metrics["async/rejected_share"] == 6 / 11  # of 11 tokens, in float64


# ---- Arguments, metrics ----------------------------------------------------------------------------------------


def test_presets_are_those_of_the_synchronous_script(capsys):
    for name, args in rlvr_async.PRESETS.items():
        rlvr_async.check_arguments(args)
        other = rlvr_policy.PRESETS[name]
        names = [field.name for field in dataclasses.fields(other) if field.name != "exp_name"]
        assert all(getattr(args, field) == getattr(other, field) for field in names) and args.exp_name == "rlvr_async"
    assert not capsys.readouterr().out
    rlvr_async.check_arguments(args_of(rejection="token", rejection_low=0.0))  # no lower bound
    rlvr_async.check_arguments(args_of(correction="none"))
    assert "nothing makes up for that" in capsys.readouterr().out


def test_every_metric_of_asynchrony_is_explained(two_updates_late):
    metrics = correct(stale_batch(), args_of(), 5, ALONE).metrics.keys() | {"time/waiting", "time/weight_sync"}
    metrics |= {"async/masked_share"}  # of the mask, whose share the passes count
    explained = {name for name in explained_metrics(3) if name.startswith(("async/", "time/"))}
    assert metrics == explained - {"time/training", "time/from_scratch"}  # which every script of chapter 3 logs
