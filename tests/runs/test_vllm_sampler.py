"""vLLM as a sampler, with a stand-in for vLLM: what is asked for, answered, refused."""

import dataclasses
import sys

import numpy as np
import pytest
import torch
from processes import HELPERS
from runs import error_line

from ppo_rlhf.rlvr import problems
from ppo_rlhf.rlvr.asynchronous import Args, check_arguments, correction_of
from ppo_rlhf.rlvr.vllm_sampler import VLLMSampler
from ppo_rlhf.tldr import models

FAKE = str(HELPERS / "fake_vllm")
PAD, STOP = 30, 0


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.syspath_prepend(FAKE)


def test_vllm_answers_with_the_log_probs_of_the_weights_that_were_sent(stand_in, tiny_sums, monkeypatch):
    """Of the distribution at this temperature, to the stop id, from prompts without their padding."""
    args = Args(base_model=f"{tiny_sums}/model", dtype="float32")
    vllm, model = VLLMSampler(args, problems.TaskIds(pad=PAD, stops=(STOP,)), threads=1), models.load_base_model(args)
    start = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    prompts, noise = np.array([[PAD, PAD, 5, 7], [3, 9, 8, 4]]), np.random.default_rng(0).random((6, 8))
    drawn = []
    for version, scale in ((4, 1.0), (7, 1.5)):
        weights = {name: (scale * tensor).numpy() for name, tensor in start.items()}
        model.load_state_dict({name: torch.tensor(array) for name, array in weights.items()}, strict=False)
        responses, logprobs = vllm.sample(weights, version, prompts, 3, noise, 0.7)
        for row, response in enumerate(responses.tolist()):
            length = response.index(STOP) + 1 if STOP in response else 8
            prompt = [5, 7] if row < 3 else [3, 9, 8, 4]
            ids = torch.tensor([[*prompt, *response[:length]]])
            with torch.no_grad():
                logits = model(ids).logits[0, len(prompt) - 1 : -1, :PAD] / 0.7
            expected = logits.log_softmax(1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            np.testing.assert_allclose(logprobs[row, :length], expected, atol=1e-5)
            assert (responses[row, length:] == PAD).all() and (logprobs[row, length:] == 0).all()
        drawn.append(responses)
    assert (drawn[0] != drawn[1]).any() and len({tuple(row) for row in drawn[0]}) > 2  # each has its own noise
    again, _ = vllm.sample(weights, 7, prompts[1:], 3, noise[3:], 0.7)
    assert (again == drawn[1][3:]).all()  # whatever else is asked for with it
    likeliest = vllm.sample(weights, 7, prompts[1:], 1, noise[:1], problems.GREEDY)[0][0, 0]
    with torch.no_grad():
        assert likeliest == model(torch.tensor([[3, 9, 8, 4]])).logits[0, -1, :PAD].argmax()
    monkeypatch.setattr(vllm.llm, "reset_prefix_cache", lambda: False)
    with pytest.raises(RuntimeError, match="vLLM did not give up what the old weights had read"):
        vllm.sample(weights, 8, prompts, 3, noise, 0.7)


def test_bad_input_about_vllm_is_refused(stand_in, monkeypatch):
    check_arguments(Args(engine="vllm", dtype="bfloat16"))
    assert "--engine vllm goes with" in error_line(check_arguments, Args(engine="vllm", lora=models.LoraArgs(rank=4)))
    hot = dataclasses.replace(Args().task, temperature=3)
    assert "vLLM takes 0.01 to 2" in error_line(check_arguments, Args(engine="vllm", task=hot))
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert "--engine vllm needs vLLM in this environment" in error_line(check_arguments, Args(engine="vllm"))
    # Without staleness, only what the learner's own code samples needs no correction.
    corrections = [correction_of(Args(staleness=0, engine=engine)) for engine in ("built-in", "vllm")]
    assert corrections == ["none", "decoupled"]
