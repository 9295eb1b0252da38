"""vLLM as an engine, with a stand-in for vLLM in the other process: what is asked for, answered, refused.

benchmark/interoperability/engines.py tries vLLM itself.
"""

import dataclasses
import re
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import ForkingPopen
from runs import error_line

from ppo_rlhf.lib.base import checkpoints
from ppo_rlhf.lib.base.errors import InputError
from ppo_rlhf.rlvr import engine, engine_vllm, problems
from ppo_rlhf.rlvr.asynchronous import Args, check_arguments, correction_of
from ppo_rlhf.tldr import models

FAKE = str(Path(__file__).with_name("fake_vllm"))
PAD, STOP = 30, 0


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """Its process is a fork of this one. test_rlvr_async.py starts an interpreter."""
    monkeypatch.setenv("PYTHONPATH", FAKE)
    monkeypatch.setattr(subprocess, "Popen", ForkingPopen)


def spec_of(world: Path, **settings) -> engine.Spec:
    return engine.Spec(
        base_model=f"{world}/model",
        dtype="float32",
        pad=PAD,
        stops=(STOP,),
        vllm_python=sys.executable,
        length=24,
        **settings,
    )


def test_vllm_answers_with_the_log_probs_of_the_weights_that_were_loaded(tiny_sums):
    """Of the distribution at this temperature, to the stop id, from prompts without their padding."""
    vllm, model = engine.VLLM(spec_of(tiny_sums)), models.load_base_model(Args(base_model=f"{tiny_sums}/model"))
    start = {name: tensor.detach().clone() for name, tensor in checkpoints.trained_parameters(model).items()}
    prompts, noise = np.array([[PAD, PAD, 5, 7], [3, 9, 8, 4]]), np.random.default_rng(0).random((6, 8))
    drawn = []
    for version, scale in ((4, 1.0), (5, 1.5), (7, 1.0)):
        weights = {name: (scale * tensor).numpy() for name, tensor in start.items()}
        vllm.load(weights, version)
        model.load_state_dict({name: torch.tensor(array) for name, array in weights.items()}, strict=False)
        responses, logprobs, finished, versions = vllm.sample(prompts, 3, noise, 0.7, version)
        assert (
            responses.shape == logprobs.shape == (6, 8) and (versions == version).all() and versions.shape == (6, 2)
        )
        for row in range(6):
            ended = STOP in responses[row]
            length = list(responses[row]).index(STOP) + 1 if ended else 8
            assert finished[row] == ended and (responses[row, length:] == PAD).all()
            prompt = [5, 7] if row < 3 else [3, 9, 8, 4]
            ids = torch.tensor([[*prompt, *responses[row, :length].tolist()]])
            with torch.no_grad():
                logits = model(ids).logits[0, len(prompt) - 1 : -1, :PAD] / 0.7
            expected = logits.log_softmax(1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            np.testing.assert_allclose(logprobs[row, :length], expected, atol=1e-5)
            assert (logprobs[row, length:] == 0).all()
        drawn.append(responses)
    assert (drawn[0] == drawn[2]).all() and (drawn[0] != drawn[1]).any()  # noise and weights settle what is drawn
    assert len({tuple(row) for row in drawn[0]}) > 2  # each response has its own
    likeliest = vllm.sample(prompts, 1, noise[:2], problems.GREEDY, 7).responses[:, 0]
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).logits[0, -1, :PAD].argmax() for ids in ([5, 7], [3, 9, 8, 4])]
    assert likeliest.tolist() == expected
    again = vllm.sample(prompts[1:], 3, noise[3:], 0.7, 7)
    assert (again.responses == drawn[2][3:]).all()  # whatever else is asked for beside it
    assert vllm.describe() == engine.description() | {"vllm": "0.0.fake"}

    with pytest.raises(RuntimeError, match="version 5 of the weights is asked for, but version 7 is loaded"):
        vllm.sample(prompts, 3, noise, 0.7, 5)
    name = next(iter(weights))
    with pytest.raises(RuntimeError, match=f"{name} is missing"):
        vllm.load({other: array for other, array in weights.items() if other != name}, 8)
    assert vllm.process.poll() is None
    vllm.process.kill()
    with pytest.raises(engine.Lost, match="ended by signal 9"):
        vllm.load(weights, 8)


def test_vllm_ends_with_who_asks(tiny_sums):
    vllm = engine.VLLM(spec_of(tiny_sums))
    vllm.pipe.close()
    assert vllm.process.wait(60) == 0
    ours, theirs = Pipe()  # and in the middle of an answer: here it is asked nothing, and its parent is another
    command = [sys.executable, engine_vllm.__file__, str(theirs.fileno()), "1"]
    assert subprocess.run(command, pass_fds=[theirs.fileno()], timeout=60).returncode == 1
    ours.close()


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("leaves at once", "vLLM has ended: MemoryError: there is no room$"),
        ("remembers", "vLLM has ended: RuntimeError: vLLM did not give up what the old weights had"),
        ("keeps the old weights", "computes other log-probs than the learner"),
    ],
)
def test_what_ends_vllm_is_said_in_one_line(tiny_sums, monkeypatch, trouble, words):
    monkeypatch.setenv("FAKE_VLLM", trouble)
    assert re.search(words, error_line(engine.VLLM, spec_of(tiny_sums)))


def test_bad_input_about_vllm_is_refused(tiny_sums):
    nowhere = dataclasses.replace(spec_of(tiny_sums), vllm_python="/nowhere/python")
    assert "--vllm_python /nowhere/python: No such file" in error_line(engine.VLLM, nowhere)
    vllm = {"engine": "vllm", "vllm_python": "python"}
    check_arguments(Args(**vllm, dtype="bfloat16", gpus_per_worker=1))
    for bad, words in (
        ({"vllm_python": ""}, "--engine vllm needs --vllm_python"),
        ({"dtype": "float64"}, "--engine vllm goes with --lora.rank 0, and --dtype float32 or"),
        ({"lora": models.LoraArgs(rank=4)}, "--engine vllm goes with --lora.rank 0, and --dtype float32 or"),
        ({"gpus_per_worker": 0.5}, "--gpus_per_worker 0.5: vLLM takes a whole GPU"),
        ({"task": dataclasses.replace(Args().task, temperature=3)}, "--task.temperature 3: vLLM takes 0.01 to 2"),
    ):
        assert words in error_line(check_arguments, Args(**vllm | bad))
    # Without staleness, only what the learner samples itself needs no correction.
    assert [correction_of(Args(staleness=0, **more)) for more in ({}, vllm)] == ["none", "decoupled"]


def test_a_sampler_must_find_the_learners_log_probs():
    for dtype, gap in (("float32", 9e-4), ("bfloat16", 0.04)):
        engine.check_gap(gap, dtype)
        for wrong in (4 * gap, float("nan")):
            with pytest.raises(InputError, match="computes other log-probs than the learner"):
                engine.check_gap(wrong, dtype)
