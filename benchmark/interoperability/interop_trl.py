"""The process that interop.py starts in an environment with TRL: score, train with PPOTrainer, save the policy.

    python interop_trl.py <settings.json> <result.json>

settings.json is made by interop.py. The result holds what TRL says of the same rows of tokens as we do: `scores` by
its get_reward, `values` and `logprobs`, as it computes them in a rollout, and `new_logprobs` after training; and
`updates`, its metrics, one row for each update. Nothing of ppo_rlhf is imported here: models cross as folders.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer
from trl.experimental.ppo.ppo_trainer import forward
from trl.experimental.utils import get_reward
from trl.trainer.utils import selective_log_softmax


def padded_tokenizer(folder: str, pad_id: int) -> PreTrainedTokenizerBase:
    """Our tokenizer as TRL wants it: it pads queries on the left, with a token that it has.

    Ours has no padding token; our padding id is its length. The next token that is added gets that very id. So both
    sides agree on it, and the models stay as they are: TRL masks padding and looks it up as token 0, as we do. The
    policy's embedding needs no row for it, and must not get one: a row more is a logit more, and could be sampled.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    if tokenizer.pad_token_id != pad_id:
        raise ValueError(f"the padding token has id {tokenizer.pad_token_id}; the reward model pads with {pad_id}")
    return tokenizer


@torch.no_grad()
def logprobs_of(
    policy: PreTrainedModel, queries: torch.Tensor, responses: torch.Tensor, pad_id: int, temperature: float
) -> list[list[float]]:
    """Log-probs of responses, as PPOTrainer.train() computes those of the reference; at padding they mean nothing."""
    output = forward(policy, torch.cat([queries, responses], dim=1), pad_id)
    logits = output.logits[:, queries.shape[1] - 1 : -1] / (temperature + 1e-7)
    # No logit belongs to the padding id, so padding asks for that of token 0.
    return selective_log_softmax(logits, responses.masked_fill(responses == pad_id, 0)).tolist()


def main(settings: dict[str, Any]) -> dict[str, Any]:
    queries, responses = torch.tensor(settings["queries"]), torch.tensor(settings["responses"])
    context_length = queries.shape[1]
    policy, reference = (AutoModelForCausalLM.from_pretrained(settings[name]) for name in ("policy", "reference"))
    reward, value = (
        AutoModelForSequenceClassification.from_pretrained(settings[name], num_labels=1).eval()
        for name in ("reward", "value")
    )
    pad_id = reward.config.pad_token_id
    tokenizer = padded_tokenizer(settings["policy"], pad_id)
    query_responses = torch.cat([queries, responses], dim=1)
    with torch.no_grad():
        _, scores, _ = get_reward(reward, query_responses, pad_id, context_length)
        values, _, _ = get_reward(value, query_responses, pad_id, context_length)
    rows = (queries, responses, pad_id, settings["temperature"])
    result = {
        "versions": {name: version(name) for name in ("trl", "torch", "transformers", "accelerate")},
        "pad_id": tokenizer.pad_token_id,
        "scores": scores.tolist(),
        "values": values[:, context_length - 1 : -1].squeeze(-1).tolist(),
        "logprobs": logprobs_of(policy.eval(), *rows),
    }
    config = PPOConfig(
        output_dir=settings["output"],
        total_episodes=settings["batch_size"] * settings["updates"],
        per_device_train_batch_size=settings["batch_size"],
        gradient_accumulation_steps=1,
        # One pass of generation for a batch. TRL puts padding after the shorter of several, and then asks for the
        # log-prob of the padding id, for which no logit is there.
        local_rollout_forward_batch_size=settings["batch_size"],
        response_length=settings["response_length"],
        stop_token="eos",
        temperature=settings["temperature"],
        missing_eos_penalty=1.0,
        kl_coef=0.05,
        learning_rate=settings["lr"],
        seed=1,
        bf16=False,
        use_cpu=True,
        num_sample_generations=0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    dataset = Dataset.from_dict({"input_ids": settings["training_queries"]})
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=reward,
        value_model=value,
        train_dataset=dataset,
        eval_dataset=dataset,
    )
    trainer.train()
    result["updates"] = [row for row in trainer.state.log_history if "objective/kl" in row]
    result["new_logprobs"] = logprobs_of(policy.eval(), *rows)
    trainer.save_model(settings["output"])
    # The only conversion: TRL has saved its tokenizer, which has one token more than the policy; ours goes back.
    AutoTokenizer.from_pretrained(settings["policy"]).save_pretrained(settings["output"])
    return result


if __name__ == "__main__":
    settings_file, result_file = sys.argv[1:]
    result = main(json.loads(Path(settings_file).read_text()))
    Path(result_file).write_text(json.dumps(result))
