"""Rollouts apart from the learner: the same numbers, also if a worker dies; corrections; what goes wrong.

Runs share one Ray cluster. They are compared bit for bit, in float32, with the synchronous script and with a slow
version of staleness, in this process, which keeps a copy of the policy for every version.
"""

import copy
import dataclasses
import math
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from oracles import numbers
from processes import HELPERS
from rollouts import ALONE, rollout_of
from runs import explained_metrics, lines_of, metrics_of, only, sums_arguments, trained
from safetensors.torch import load_file
from torch.testing import assert_close
from whole_runs import Whole, check_same_weights

from ppo_rlhf.rlvr import (
    asynchronous as rlvr_async,
    policy as rlvr_policy,
    problems,
    samplers,
    vllm_sampler,
)
from ppo_rlhf.rlvr.asynchronous import Args, correct, newest_factors
from ppo_rlhf.tldr import responses as tldr_responses
from ppo_rlhf.train_policy import InputError

FAKE = str(HELPERS / "fake_vllm")
ray = pytest.importorskip("ray")

FOUR_UPDATES = (
    "--dtype float32 --ppo.total_episodes 64 --ppo.local_rollout_batch_size 4 --ppo.lr 0.01 --ppo.critic_lr 0.01 "
    "--eval_interval 0 --eval_samples 0 --eval_problems 4 --log_interval 0 --trace_interval 0 --rewards.kl_coef 0.1 "
    "--rewards.verifier own_functions:letters --ppo.critic_warmup 0 --save_interval 1"
)
IN_PAIRS = ["--ppo.advantage", "remax", "--ppo.samples_per_prompt", "2"]
DOUBLE = ["--dtype", "float64"]
OLDER = [*DOUBLE, "--staleness", "2", "--correction", "none"]


@pytest.fixture(scope="session")
def cluster():
    """Ray on this machine, which the runs of this file find."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}  # other processes have no token
    # Workers find the stand-in for vLLM, and a busy machine does not starve them: any other process would go first.
    os.environ |= {"PYTHONPATH": FAKE, "RAY_worker_niceness": "0"}
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
    trained(script, folder, arguments)
    return folder


def numbers_of(folder: Path) -> list[dict[str, float]]:
    """The metrics of each update, but for seconds."""
    return [{k: v for k, v in row.items() if "time/" not in k} for row in metrics_of(only(folder, "runs/*"))]


def check_equal(folder: Path, expected: Path) -> None:
    """Metrics that both runs have, and the weights of policy and critic, bit for bit."""
    ours, theirs = numbers_of(folder), numbers_of(expected)
    assert len(theirs) == 4
    assert [{name: row.get(name) for name in theirs[0]} for row in ours] == theirs
    check_same_weights(folder, expected)


class Kept:
    def begin(self, args, ids, threads):
        sampler = vllm_sampler.VLLMSampler if args.engine == "vllm" else samplers.TorchSampler
        self.sampler = sampler(args, ids, threads)

    def sample(self, **piece):
        return self.sampler.sample(**piece)


@pytest.fixture(scope="module")
def worker(cluster):
    """A process that samples for run after run: PyTorch takes longer to import than a run."""
    return ray.remote(Kept).remote()


@pytest.fixture
def kept(worker, monkeypatch):
    def begin(library, args, ids):
        ray.get(worker.begin.remote(args, ids, torch.get_num_threads()))
        return [worker]

    monkeypatch.setattr(rlvr_async, "start_workers", begin)


class Dies(samplers.TorchSampler):
    """The first process that is asked for a fifth piece dies, by kill -9."""

    place = ""  # a file that says that one has died
    calls = 0

    def sample(self, **piece):
        self.calls += 1
        if self.calls == 5 and not os.path.exists(self.place):
            open(self.place, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return samplers.TorchSampler.sample(self, **piece)


# ---- The same numbers ------------------------------------------------------------------------------------------


def test_without_staleness_it_is_the_synchronous_script(kept, tiny_sums, tmp_path):
    """With one response more for each prompt, its greedy one."""
    folder = train_by(rlvr_async, tiny_sums, tmp_path / "run", *IN_PAIRS, "--staleness", "0")
    check_equal(folder, train_by(rlvr_policy, tiny_sums, tmp_path / "synchronous", *IN_PAIRS))
    for row in numbers_of(folder):
        assert row["async/staleness_max"] == 0 and row["async/largest_gap"] < 1e-5


@pytest.fixture(scope="module")
def two_updates_late(tiny_sums, tmp_path_factory):
    """The slow version: each round is sampled by a copy of the policy from two updates before."""
    policies: list[torch.nn.Module] = []

    class LateSampler(rlvr_policy.Sampler):
        def sample(self, round_number, contexts, uniforms, temperature):
            policies.append(copy.deepcopy(self.lm_backbone))
            old, ids = policies[max(len(policies) - 3, 0)], self.ids
            pieces = [
                tldr_responses.generate_until(old, *rows, ids.pad, ids.vocab_size, temperature, ids.stops)
                for rows in zip(contexts.split(4), uniforms.split(4), strict=True)
            ]
            return tuple(map(torch.cat, zip(*pieces, strict=True)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rlvr_policy, "Sampler", LateSampler)
        return train_by(rlvr_policy, tiny_sums, tmp_path_factory.mktemp("run"), *DOUBLE)


def test_a_batch_is_sampled_by_the_weights_of_two_updates_before(
    cluster, two_updates_late, tiny_sums, monkeypatch, tmp_path
):
    """By two workers, of which one dies."""
    monkeypatch.setattr(Dies, "place", str(tmp_path / "died"))
    monkeypatch.setattr(samplers, "TorchSampler", Dies)
    folder = train_by(rlvr_async, tiny_sums, tmp_path / "run", *OLDER, "--workers", "2")
    check_equal(folder, two_updates_late)
    assert (tmp_path / "died").exists()
    rows = numbers_of(folder)
    for name in ("max", "mean"):
        assert [row[f"async/staleness_{name}"] for row in rows] == [0, 1, 2, 2]
    assert rows[0]["async/largest_gap"] < 1e-5 < 1e-2 < rows[3]["async/largest_gap"]
    assert rows[0]["async/ess"] == pytest.approx(1, abs=1e-5) and rows[3]["async/ess"] < 0.999


def test_a_resumed_learner_trains_on_what_the_old_weights_sample(kept, two_updates_late, tiny_sums, tmp_path):
    folder = train_by(rlvr_async, tiny_sums, tmp_path / "run", *OLDER, "--ppo.total_episodes", "32")
    assert len(numbers_of(folder)) == 2
    check_equal(train_by(rlvr_async, tiny_sums, folder, "--ppo.total_episodes", "64"), two_updates_late)


def fail_once(monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    """Let the scores of a call fail, counted from 0."""
    calls, score_responses = iter(range(1000)), rlvr_policy.score_responses

    def score_or_fail(*arguments, **options):
        if next(calls) == last:
            raise InputError("no answer")
        return score_responses(*arguments, **options)

    monkeypatch.setattr(rlvr_policy, "score_responses", score_or_fail)


def test_a_score_that_fails_costs_no_update_and_no_version(kept, two_updates_late, tiny_sums, monkeypatch, tmp_path):
    """It fails when the third update's batch is sampled already, by old weights that the fourth doesn't need."""
    fail_once(monkeypatch, 2)
    with pytest.raises(InputError, match=r"no answer; resume after update 2 with --resume"):
        train_by(rlvr_async, tiny_sums, tmp_path / "run", *OLDER, "--save_interval", "0")
    check_equal(train_by(rlvr_async, tiny_sums, tmp_path / "run"), two_updates_late)


def test_a_score_that_fails_in_a_second_round_costs_no_update(tiny_sums, monkeypatch, tmp_path):
    """[V78] What is left over of one batch, and the number of rounds, are those of the last finished update."""
    words = ["--ppo.filter_groups", "--save_interval", "0", "--ppo.advantage", "grpo", *IN_PAIRS[2:]]
    whole = train_by(rlvr_policy, tiny_sums, tmp_path / "whole", *words)
    rounds = [int(row["train/rounds"]) for row in numbers_of(whole)]
    update = next(i for i, n in enumerate(rounds) if i and n > 1)
    fail_once(monkeypatch, sum(rounds[:update]) + 1)  # in the second round of that update
    with pytest.raises(InputError, match=f"resume after update {update} with"):
        train_by(rlvr_policy, tiny_sums, tmp_path / "run", *words)
    check_equal(train_by(rlvr_policy, tiny_sums, tmp_path / "run"), whole)


def test_traces_and_means_are_of_what_the_losses_had(kept, tiny_sums, tmp_path):
    """With bypass the ratio is new / mu. A response is rejected whole, or is not blamed for what became unlikely.

    In one step per update, the newest policy is the learner's.
    """
    words = "--staleness 2 --correction bypass --rejection sequence --rejection_low 0.97 --rejection_high 1.03 "
    words += "--off_policy_mask 0.01 --ppo.nminibatches 1 --ppo.noptepochs 1 --trace_interval 1 --trace_episodes 16"
    run = only(train_by(rlvr_async, tiny_sums, tmp_path / "run", *DOUBLE, *words.split()), "runs/*")
    partly_rejected = partly_masked = 0
    for update, row in enumerate(metrics_of(run)):
        trace = load_file(run / f"traces/{update}.safetensors")
        x = {name.removeprefix("tokens."): x.numpy() for name, x in trace.items() if name.startswith("tokens.")}
        scored, in_loss = x["scored"], x["mask"]
        log_ratios = (x["logprobs"] - x["sampler_logprobs"]) * scored
        means = log_ratios.sum(1, keepdims=True) / scored.sum(1, keepdims=True)
        np.testing.assert_array_equal(in_loss, scored & (np.abs(np.exp(means) - 1) <= 0.03))
        masked = in_loss & (means < -0.01) & (x["advantages"] < 0)
        assert row["async/masked_share"] == pytest.approx(masked.sum() / in_loss.sum(), abs=1e-9)
        assert row["val/mean"] == pytest.approx(x["values"][in_loss].mean(), rel=1e-6, abs=1e-9)
        partly_rejected += 0 < in_loss.sum() < scored.sum()
        partly_masked += 0 < masked.sum() < in_loss.sum()
    assert partly_rejected and partly_masked
    lines = [line for _, line in lines_of(run)]
    assert not [line for line in lines if line.wrong] and sum(bool(line.step.recorded) for line in lines) > 400


def test_two_learners_are_one_but_for_rounding(kept, tiny_sums, tmp_path):
    """Under torchrun; the first process has the workers and publishes the weights."""
    words = [*OLDER, "--correction", "decoupled", "--rejection", "token", "--off_policy_mask", "0.002"]
    expected = numbers_of(train_by(rlvr_async, tiny_sums, tmp_path / "one", *words))
    words += [*sums_arguments(tiny_sums), *FOUR_UPDATES.split()]
    words += [*DOUBLE, "--ray_address", ray.get_runtime_context().gcs_address]
    folder = Whole(tmp_path / "two", "rlvr/asynchronous.py", words, processes=2).made().folder
    for two, one in zip(numbers_of(folder), expected, strict=True):
        assert {name: two[name] for name in one} == pytest.approx(one, rel=1e-7, abs=1e-9)
    for name in ("masked_share", "rejected_share"):
        assert any(0 < row[f"async/{name}"] < 1 for row in expected)


def test_a_run_with_vllm_corrects_what_is_rounded_otherwise(kept, tiny_sums, monkeypatch, tmp_path):
    """A stand-in for vLLM. test_vllm_sampler.py has what it is asked."""
    words = ["--engine", "vllm", "--staleness", "0", "--ppo.total_episodes", "32"]
    monkeypatch.syspath_prepend(FAKE)
    rows = numbers_of(train_by(rlvr_async, tiny_sums, tmp_path / "run", *words))
    assert len(rows) == 2  # the second by weights that were sent anew
    for row in rows:
        assert row["async/staleness_max"] == 0 < row["async/largest_gap"] < 1e-4
        assert row["async/weight_mean"] == pytest.approx(1, abs=1e-4)


# ---- What goes wrong -------------------------------------------------------------------------------------------


class HasNoHouse:
    def __init__(self):
        raise InputError("there is no house")

    def sample(self):
        pass


class HasNoPaper:
    def sample(self):
        raise ValueError("there is no paper")


@pytest.mark.parametrize(
    ("worker", "error", "words"),
    [
        (HasNoHouse, InputError, "^sampling has failed: .*there is no house$"),
        (HasNoPaper, ray.exceptions.RayTaskError, "there is no paper"),  # a fault of ours, with its traceback
    ],
)
def test_what_no_new_worker_could_mend_ends_the_run(cluster, worker, error, words):
    actor = ray.remote(**rlvr_async.REPLACED)(worker).remote()
    sampler = rlvr_async.SamplerAhead(ray)
    sampler.asked[3, False] = [[actor.sample.remote()]]
    with pytest.raises(error, match=words):
        sampler.wait(3, greedy=False)


def test_workers_share_the_gpus_and_are_of_the_engine():
    """Three on two GPUs: two share one."""
    library = SimpleNamespace(
        cluster_resources=lambda: {"GPU": 2},
        remote=lambda num_gpus, **_: lambda sampler: SimpleNamespace(remote=lambda *_: (sampler, num_gpus)),
    )
    for engine, sampler in (("vllm", vllm_sampler.VLLMSampler), ("built-in", samplers.TorchSampler)):
        assert rlvr_async.start_workers(library, Args(engine=engine, workers=3), None) == [(sampler, 0.5)] * 3


def test_without_ray_or_its_cluster_a_run_ends_in_one_line(monkeypatch):
    def init(**_):
        raise ConnectionError("nobody is there")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(InputError, match=r"^--ray_address far: nobody is there$"):
        rlvr_async.connect(Args(ray_address="far"))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"needs Ray: pip install -e '.\[async\]'"):
        rlvr_async.connect(Args())


def test_a_sampler_takes_whole_weights_and_samples_by_no_others(tiny_sums):
    args = Args(base_model=f"{tiny_sums}/model", dtype="float32")
    sampler = samplers.TorchSampler(args, problems.TaskIds(pad=30, stops=(0,)), threads=1)
    (first, weight), *others = sampler.model.named_parameters()
    for wrong in ([], [(first, weight), ("module.x", weight)], [(first, weight[:1])]):
        with pytest.raises(RuntimeError, match=f"are not the model's: see .*({first}|module.x)"):
            sampler.load({name: x.detach().numpy() for name, x in [*wrong, *others]})


def test_a_sampler_must_find_the_learners_log_probs():
    """The limits are those of docs/questions.md."""
    for dtype, gap in (("float32", 0.001), ("bfloat16", 0.05)):
        rlvr_async.check_gap(gap, dtype)
        for wrong in (1.001 * gap, float("nan")):
            with pytest.raises(InputError, match="computes other log-probs than the learner"):
                rlvr_async.check_gap(wrong, dtype)


# ---- Corrections -----------------------------------------------------------------------------------------------

RATIOS = [[0.25, 1.0, 3.0], [1.0, 1.0, 1.0], [4.0, 4.0, 9.0]]  # prox / mu; the last 9 is masked
LIVE = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0]]).bool()


def stale_batch():
    logprobs = -numbers(1, 3, 3).abs()
    mu = (logprobs - torch.tensor(RATIOS, dtype=torch.float64).log()).masked_fill(~LIVE, math.nan)
    age = torch.tensor([2, 2, 0])
    return rollout_of(LIVE, logprobs=logprobs, sampler_logprobs=mu, loss_mask=LIVE, age=age)


def args_of(**settings) -> Args:
    return Args(staleness=2, **settings)


def test_weights_of_decoupled_ppo():
    batch = stale_batch()
    trained, metrics = correct(batch, args_of(), ALONE)
    weights = torch.tensor([[0.25, 1, 2], [1, 1, 1], [2, 2, 0]], dtype=torch.float64)
    assert_close(trained.weights, weights, atol=1e-12, rtol=0)
    assert trained.logprobs is batch.logprobs and trained.mask.equal(LIVE) and trained.loss_mask.equal(LIVE)
    ratios = torch.tensor(RATIOS, dtype=torch.float64)[LIVE]
    expected = {"weight_mean": 10.25 / 8, "clipped_share": 3 / 8, "rejected_share": 0}
    expected |= {"staleness_mean": 4 / 3, "staleness_max": 2}
    expected |= {"chi2_token": float((ratios**2).mean()) - 1, "kl": float(-ratios.log().mean())}
    assert {name: metrics[f"async/{name}"] for name in expected} == pytest.approx(expected)
    _, at_the_cap = correct(batch, args_of(correction_cap=3.0), ALONE)  # one ratio is 3
    assert at_the_cap["async/clipped_share"] == 2 / 8


def test_without_a_correction_nothing_changes_and_bypass_takes_the_samplers_word():
    batch = stale_batch()
    for args in (Args(staleness=0), args_of(correction="none")):
        same, _ = correct(batch, args, ALONE)
        assert same.weights.eq(1).all() and newest_factors(batch.logprobs, same, args) is None
        assert same.logprobs is batch.logprobs and same.loss_mask.equal(LIVE)
    args = args_of(correction="bypass")
    bypass, _ = correct(batch, args, ALONE)
    assert bypass.weights.eq(1).all() and bypass.logprobs is batch.sampler_logprobs
    assert newest_factors(batch.logprobs, bypass, args) is None
    # The loss reinforce has no ratio; its weights are those of the newest policy, here twice as likely as prox.
    args = args_of(correction="bypass", correction_cap=4.0, ppo=rlvr_policy.PpoArgs(loss="reinforce"))
    bypass, _ = correct(batch, args, ALONE)
    assert bypass.logprobs is batch.sampler_logprobs and bypass.weights.eq(1).all()
    twice_as_likely = newest_factors(batch.logprobs + math.log(2), bypass, args)
    assert twice_as_likely[0].tolist() == pytest.approx([0.5, 2, 4])
    assert correct(batch, Args(staleness=0, correction="decoupled"), ALONE)[0].weights.ne(1).any()


@pytest.mark.parametrize("way", ["decoupled", "bypass", "none"])
def test_blame_of_what_became_unlikely_is_left_out_of_the_policys_loss_alone(way):
    """Whatever the old policy of the ratio is, the sampler's log-probs count, and those of the newest policy."""
    batch, args = stale_batch(), args_of(correction=way, off_policy_mask=0.5)
    advantages = torch.tensor([[-1.0, 1, -1], [-1, -1, -1], [-1, -1, -1]]).double()
    mb = dataclasses.replace(correct(batch, args, ALONE)[0], advantages=advantages)
    assert newest_factors(batch.sampler_logprobs - 0.4, mb, args).eq(1).all()
    # The last token of the third is padding.
    found = newest_factors(batch.sampler_logprobs - 0.6, mb, args)
    assert found.tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 1]]


def test_a_rejection_narrows_the_loss_and_a_response_without_a_token_leaves_its_group():
    kept = torch.tensor([[0, 1, 0], [1, 1, 1], [0, 0, 0]]).bool()
    trained, metrics = correct(stale_batch(), args_of(rejection="token"), ALONE)
    assert trained.loss_mask.equal(kept) and trained.mask.any(1).tolist() == [True, True, False]
    assert trained.mask[:2].equal(LIVE[:2]) and metrics["async/rejected_share"] == pytest.approx(4 / 8)
    wider = args_of(rejection="token", rejection_low=0.2, rejection_high=3.2)
    assert correct(stale_batch(), wider, ALONE)[0].mask.any(1).sum() == 2


def test_a_batch_of_which_nothing_can_be_scored_corrects_nothing():
    batch = dataclasses.replace(stale_batch(), mask=torch.zeros_like(LIVE), loss_mask=torch.zeros_like(LIVE))
    trained, metrics = correct(batch, args_of(rejection="token"), ALONE)
    assert not trained.loss_mask.any() and not trained.weights.any()
    assert {value for name, value in metrics.items() if "staleness" not in name} == {0.0}


# ---- Arguments, metrics ----------------------------------------------------------------------------------------


def test_presets_pass_the_checks():
    for args in rlvr_async.PRESETS.values():
        rlvr_async.check_arguments(args)


def test_every_metric_of_asynchrony_is_explained(two_updates_late):
    metrics = correct(stale_batch(), args_of(), ALONE)[1].keys() | {"time/waiting", "time/weight_sync"}
    metrics |= {"async/masked_share"}  # of the mask, whose share the passes count
    explained = {name for name in explained_metrics(3) if name.startswith(("async/", "time/"))}
    assert metrics == explained - {"time/training", "time/from_scratch"}  # which every script of chapter 3 logs
