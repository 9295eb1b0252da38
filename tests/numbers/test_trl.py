"""Our models in TRL 1.12, the last release with a PPO trainer: scores, values and log-probs are the same as here.

Skipped where that version isn't installed, as in `make test`. With it, next to the environment of the other tests:

    bash .ci/peers
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ppo_rlhf.tldr.models import load_reward_model, save_language_model
from ppo_rlhf.tldr.policy import ActorCritic, response_masks
from ppo_rlhf.train_policy import load_pretrained, vocabulary_size
from ppo_rlhf.train_reward import RewardModel, save_reward_model

ppo_trainer = pytest.importorskip("trl.experimental.ppo.ppo_trainer", reason="TRL 1.12 isn't installed")
from trl.experimental.utils import get_reward  # noqa: E402
from trl.trainer.utils import selective_log_softmax  # noqa: E402

QUERY, TEMPERATURE = 6, 0.7


@pytest.mark.filterwarnings("ignore")  # TRL warns that its experimental part may change
@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox", "llama"])
@torch.no_grad()
def test_both_sides_say_the_same(architecture, tiny_models, tiny_tokenizer, tmp_path):
    pad, eos = vocabulary_size(tiny_tokenizer), tiny_tokenizer.eos_token_id
    save_language_model(tmp_path / "policy", tiny_models(architecture), tiny_tokenizer, info={"kind": "sft model"})
    for seed, name in enumerate(("reward", "value"), 1):
        torch.manual_seed(seed)  # of the head: with some heads, four scores are nearly equal
        model = RewardModel(tiny_models(architecture, seed=seed).base_model)
        model.gain.fill_(1.5 * seed)
        model.bias.fill_(-0.5 * seed)
        save_reward_model(tmp_path / name, model, tiny_tokenizer, info={"kind": "critic"})
    queries = torch.randint(26, (4, QUERY), generator=torch.Generator().manual_seed(1))
    queries[1, :4] = pad
    letters = torch.randint(26, (4, 9), generator=torch.Generator().manual_seed(2))
    ends = torch.tensor([[8], [3], [0], [99]])  # of responses; the last has none
    columns = torch.arange(9)
    responses = letters.masked_fill(columns == ends, eos).masked_fill(columns > ends, pad)
    query_responses = torch.cat([queries, responses], dim=1)

    policy = load_pretrained(str(tmp_path / "policy"), torch.float32)
    reward, critic = (load_reward_model(tmp_path / name, torch.float32) for name in ("reward", "value"))
    scores = reward(query_responses, pad)
    logprobs, _, values = ActorCritic(policy, critic, pad)(query_responses, responses, pad, TEMPERATURE)

    their_policy = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").eval()
    their_reward, their_critic = (
        AutoModelForSequenceClassification.from_pretrained(tmp_path / name, num_labels=1).eval()
        for name in ("reward", "value")
    )
    _, their_scores, _ = get_reward(their_reward, query_responses, pad, QUERY)
    networks = ppo_trainer.PolicyAndValueWrapper(their_policy, their_critic)
    output, their_values = ppo_trainer.forward(networks, query_responses, pad)
    logits = output.logits[:, QUERY - 1 : -1] / TEMPERATURE
    # The padding id has no logit; the mask leaves out what is looked up in its place.
    their_logprobs = selective_log_softmax(logits, responses.masked_fill(responses == pad, 0))
    their_values = their_values[:, QUERY - 1 : -1].squeeze(-1)

    mask, value_mask = response_masks(responses, pad)
    # Llama's last norm has no bias, so what is constant in a score or value is in the configuration.
    constants = [model.config.score_constant for model in (their_reward, their_critic)]
    assert (architecture == "llama") == all(constants)
    torch.testing.assert_close(scores, their_scores + constants[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(values[value_mask], their_values[value_mask] + constants[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(logprobs[mask], their_logprobs[mask], rtol=0, atol=1e-5)
    assert min(x.std() for x in (scores, values[value_mask], logprobs[mask])) > 0.1  # far more than the tolerance
