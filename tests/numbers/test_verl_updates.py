"""Whole updates of chapter 3 against verl 0.9.1: GRPO, PPO with a critic, RLOO (golden/verl_updates).

rlvr/policy.py runs for one update of four optimiser steps, in float64. It samples the stored responses, and a
verifier gives the stored scores. Its losses, gradients and weights are those of verl's own workers on the same
responses.
"""

import json
import string
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from golden_models import close, golden, steering_uniforms, under
from runs import metrics_of, trained
from tokenizers import Regex, Tokenizer, models as tokenizer_models, pre_tokenizers
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from ppo_rlhf.rlvr import algebra, policy as rlvr_policy, problems

PAD, STOPS, LETTERS = 20, [0, 1], string.ascii_lowercase[:20]
SAMPLES, CONTEXT, RESPONSE, TEMPERATURE = 4, 5, 7, 0.75
TOLERANCE = 1e-9
SETTINGS = {  # arguments, and metrics that say which bounds act
    "grpo": (
        "--ppo.advantage grpo --ppo.dual_clip 3 --rewards.kl_coef 0 --rewards.kl_loss_coef 0.1",
        ["policy/clipfrac_avg"],
    ),
    "ppo": (
        "--ppo.advantage gae --ppo.lam 0.95 --ppo.dual_clip 3 --ppo.cliprange_value 0.2 --ppo.entropy_coef 0.01 "
        "--rewards.kl_coef 0.05",
        ["policy/clipfrac_avg", "val/clipfrac_avg"],
    ),
    "rloo": (
        "--ppo.advantage rloo --ppo.dual_clip 1.5 --ppo.loss_aggregation seq-mean-token-sum --rewards.kl_coef 0.05",
        ["policy/clipfrac_avg", "policy/clipfrac_low_avg"],
    ),
}
IN_ALL = (
    "--base_model model --dtype float64 --task.problems problems.jsonl --task.test_problems problems.jsonl "
    f"--task.answer_format whole --task.prompt_format plain --task.prompt_length {CONTEXT} "
    f"--task.response_length {RESPONSE} --task.temperature {TEMPERATURE} --rewards.verifier own_functions:known "
    f"--ppo.total_episodes 16 --ppo.batch_size 16 --ppo.samples_per_prompt {SAMPLES} --ppo.nminibatches 2 "
    "--ppo.noptepochs 2 --ppo.local_micro_batch_size 4 --ppo.lr 0.002 --ppo.critic_lr 0.004 "
    "--ppo.max_grad_norm 0.5 --ppo.entropy_coef 0 --eval_interval 0 --save_interval 0"
)
METRICS = {"policy/loss": "objective/loss", "policy/pg_loss": "loss/policy_avg", "policy/kl_loss": "loss/kl_avg"}
METRICS |= {"policy/entropy_loss": "loss/entropy_avg", "value/loss": "loss/value_avg"}
METRICS |= {name: name for name in ("policy/grad_norm", "value/grad_norm")}


def stored() -> dict[str, Tensor]:
    with np.load(golden("verl_updates/updates.npz")) as file:
        arrays = {key: torch.from_numpy(file[key]) for key in file.files}
    return {key: array.double() if array.is_floating_point() else array for key, array in arrays.items()}


same = partial(close, atol=TOLERANCE, rtol=0)


def learning(network: nn.Module) -> list[nn.Parameter]:
    """The parameters that learn, in the order of the stored numbers."""
    return [parameter for parameter in network.parameters() if parameter.requires_grad]


def flat(tensors) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def write_inputs(folder: Path, weights: Tensor, rollout: dict[str, Tensor]) -> Tensor:
    """The model to start from, and problems whose answers say what each response scores.

    Returns the uniform numbers with which the model samples the stored responses.
    """
    config = GPT2Config(
        vocab_size=PAD,
        n_positions=CONTEXT + RESPONSE,
        n_embd=12,
        n_layer=2,
        n_head=2,
        n_inner=24,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=STOPS,
    )
    model = GPT2LMHeadModel(config).double()
    nn.utils.vector_to_parameters(weights, model.parameters())
    model.save_pretrained(folder / "model")
    tokenizer = Tokenizer(tokenizer_models.WordLevel(dict(zip(LETTERS, range(PAD), strict=True)), unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "model")
    queries, responses = (
        ["".join(LETTERS[token] for token in row if token not in hidden) for row in rollout[name].tolist()]
        for name, hidden in (("queries", [PAD]), ("responses", [PAD, *STOPS]))
    )
    with (folder / "problems.jsonl").open("w") as file:
        for start in range(0, len(queries), SAMPLES):
            rows = slice(start, start + SAMPLES)
            scores = dict(zip(responses[rows], rollout["scores"][rows].tolist(), strict=True))
            file.write(json.dumps({"question": queries[start], "answer": json.dumps(scores)}) + "\n")
    # After the end of a response, any token will do.
    tokens = torch.cat([rollout["queries"], rollout["responses"].where(rollout["responses"] != PAD, 0)], dim=1)
    with torch.no_grad():
        return steering_uniforms(model, tokens, RESPONSE, PAD, PAD, TEMPERATURE)


def our_update(words: str, folder: Path, start: dict[str, Tensor], uniforms: Tensor, rows: Tensor) -> SimpleNamespace:
    """What a run of rlvr/policy.py computes. rows: of each minibatch, (epochs, minibatches, rows)."""
    networks, gradients = {}, []
    load_networks = rlvr_policy.load_networks
    whitens = rlvr_policy if hasattr(rlvr_policy, "whiten") else algebra

    def with_stored_weights(*arguments):
        actor_critic, reference, adapters = load_networks(*arguments)
        nn.utils.vector_to_parameters(start["reference"], reference.lm_backbone.parameters())
        networks["policy"] = actor_critic.lm_backbone
        if actor_critic.critic:
            networks["value"] = actor_critic.critic
            nn.utils.vector_to_parameters(start["value"], learning(actor_critic.critic))
        return actor_critic, reference, adapters

    def keep_gradients(_: nn.Module) -> None:
        """The mean over one process. Nothing is clipped yet."""
        gradients.append({name: flat(p.grad for p in learning(network)) for name, network in networks.items()})

    with (
        patch.object(rlvr_policy, "load_networks", with_stored_weights),
        patch.object(problems, "problems_of_batch", lambda *_: torch.arange(len(uniforms) // SAMPLES)),
        patch.object(rlvr_policy, "episode_noise", lambda *_: uniforms),
        patch.object(rlvr_policy, "draw_minibatches", lambda *_: rows),
        patch.object(rlvr_policy, "average_gradients", keep_gradients),
        patch.object(whitens, "whiten", partial(whiten_with_n_minus_1, whitens.whiten)),
    ):
        run = trained(rlvr_policy, folder, [*words.split(), "--task.prompt_suffix", ""])
    (metrics,) = metrics_of(run)
    return SimpleNamespace(
        metrics=metrics,
        gradients={name: [step[name] for step in gradients] for name in networks},
        weights={name: flat(learning(network)) for name, network in networks.items()},
    )


def whiten_with_n_minus_1(whiten, values: Tensor, mask: Tensor, **options) -> Tensor:
    """As verl has it [V45], which divides the two counts in float32."""
    count = mask.sum()
    return whiten(values, mask, **options) * (count / (count - 1)).double().rsqrt()


@pytest.mark.parametrize("name", SETTINGS)
def test_whole_updates_of_verl(tmp_path, name):
    arrays, (words, bounds) = stored(), SETTINGS[name]
    theirs, start = under(arrays, f"{name}/"), under(arrays, "start/")
    uniforms = write_inputs(tmp_path, start["policy"], under(arrays, "rollout/"))
    rows = theirs["rows"].view(2, 2, -1)
    ours = our_update(f"{IN_ALL} {words}", tmp_path, start, uniforms, rows)
    for key, metric in METRICS.items():
        if key in theirs:  # a number for each step
            same(theirs[key].new_tensor(ours.metrics[metric]), theirs[key].mean(), name=key)
    for network, gradients in ours.gradients.items():
        same(gradients[0], theirs[f"{network}/first_gradient"], name=f"first gradient of the {network}")
        norms = torch.stack([gradient.norm() for gradient in gradients])
        same(norms, theirs[f"{network}/grad_norm"], name=f"norms of the {network}'s gradients")
        same(ours.weights[network], theirs[f"{network}/weights"], name=f"weights of the {network}")
    assert all(ours.metrics[bound] > 0 for bound in bounds)  # or their clips would not be compared
