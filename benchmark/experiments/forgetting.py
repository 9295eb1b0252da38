"""What else has a chat model forgotten? Its answers to fifty questions of all kinds, before and after training.

    python benchmark/experiments/forgetting.py --policy models/<run>/policy --base_model smollm2-135m

The base model answers QUESTIONS in its chat template, with the likeliest tokens. The measure is the log-prob of the
tokens of these answers, under the base model and under the policy, mean over tokens (nats, at a temperature of 1). If
the policy's is much lower, it no longer speaks as it did. SHOWN of its own answers are printed, too.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf import worlds
from ppo_rlhf.lib.data import posts, problems
from ppo_rlhf.lib.nets import lm, models, pretrained
from ppo_rlhf.lib.services import cli

QUESTIONS = """
What is the capital of France?
Who wrote Romeo and Juliet?
Why is the sky blue?
Name three colours.
How do I boil an egg?
What do bees make?
Write a short poem about the sea.
What is the opposite of hot?
How many days are there in a week?
Which planet is closest to the Sun?
What is a dictionary for?
Give me a tip for sleeping better.
Translate "good morning" into Spanish.
What is photosynthesis?
Who was the first person on the Moon?
What should I wear when it rains?
Name an animal that can fly.
How does a bicycle stay upright?
What is the largest ocean?
Write a sentence with the word "lantern".
What do you need to bake bread?
Why do leaves fall in autumn?
Explain what a computer is to a child.
Which language is spoken in Brazil?
What is the freezing point of water?
Suggest a name for a cat.
What does a doctor do?
How can I thank a friend?
Name a famous painter.
What is a democracy?
Where do penguins live?
How do you greet somebody politely?
What is the difference between a lake and a river?
Tell me a joke.
Which instrument has black and white keys?
What happened in 1969?
How do plants drink water?
What is your name?
Name a country in Africa.
Why should I brush my teeth?
Describe a sunset in one sentence.
What is money used for?
Which season comes after winter?
Who painted the Mona Lisa?
How can I learn a new language?
What is a metaphor?
Name a fruit that is yellow.
What is the heart for?
Is a tomato a fruit or a vegetable?
Write a headline about a lost dog.
""".strip().splitlines()
LENGTH = 32  # tokens of an answer, at most
SHOWN = 5


@dataclass(frozen=True)
class Args:
    policy: str
    """folder of a policy of chapter 3: models/<run>/policy"""
    base_model: str = "smollm2-135m"
    """what it was trained from"""


@torch.no_grad()
def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: list[str]
) -> tuple[torch.Tensor, torch.Tensor, problems.TaskIds]:
    """The likeliest answers: contexts (questions, longest), answers (questions, LENGTH), and the ids they have."""
    task = problems.TaskArgs(prompt_suffix="")
    ids = problems.task_ids(task, tokenizer, model.generation_config)
    prompts = [problems.render_prompt(question, task, tokenizer) for question in questions]
    rows = [problems.encode_prompt(prompt, task, tokenizer) for prompt in prompts]
    contexts = posts.pad_rows(rows, max(map(len, rows)), ids.pad, left=True)
    noise = torch.full((len(rows), LENGTH), 0.5, dtype=torch.float64)
    limits = (ids.pad, ids.vocab_size, problems.GREEDY, ids.stops)
    return contexts, lm.generate_until(model, contexts, noise, *limits)[0], ids


@torch.no_grad()
def mean_logprob(model: PreTrainedModel, contexts: torch.Tensor, answers: torch.Tensor, pad_id: int) -> float:
    """Nats per token of answers, which are read a few rows at a time."""
    rows = zip(torch.cat([contexts, answers], 1).split(10), answers.split(10), strict=True)
    found = [lm.response_statistics(model, *pair, pad_id, 1.0, pad_id)[0] for pair in rows]
    return torch.cat(found)[answers != pad_id].mean().item()


def measure(policy: str, base_model: str) -> dict[str, Any]:
    """Log-probs before and after, and the first answers of both."""
    base_model = worlds.find_value("base_model", base_model, Path.cwd())
    tokenizer = pretrained.load_tokenizer(base_model)
    base, trained = (models.load_pretrained(folder, torch.float32).eval() for folder in (base_model, policy))
    contexts, answers, ids = answer(base, tokenizer, QUESTIONS)
    found = {"before": mean_logprob(base, contexts, answers, ids.pad)}
    found["after"] = mean_logprob(trained, contexts, answers, ids.pad)
    both = answers[:SHOWN], answer(trained, tokenizer, QUESTIONS[:SHOWN])[1]
    told = zip(QUESTIONS, *(problems.to_texts(tokenizer, rows, ids) for rows in both), strict=False)
    return found | {"answers": [dict(zip(("question", "before", "after"), row, strict=True)) for row in told]}


def main(args: Args) -> None:
    print(json.dumps(measure(args.policy, args.base_model), indent=2))


if __name__ == "__main__":
    cli.run_script(main, lambda argv: tyro.cli(Args, args=argv, description=__doc__))
