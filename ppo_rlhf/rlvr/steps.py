"""Process rewards, --rewards.steps: a line of a response is a step, whose last token gets what a judge says of it.

The judge is a function of the user's, (problem, steps so far) -> float, or a sequence classifier, which reads the
problem and the response up to the end of the step. Rewards of steps add up. So a policy may find a step that is
rewarded and leads nowhere, and write it again and again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.rlvr import problems
from ppo_rlhf.rlvr.arguments import Args
from ppo_rlhf.tldr import classifiers, reward_functions
from ppo_rlhf.train_policy import weights_dtype


def lines_of(text: str) -> list[str]:
    """The lines that are not empty."""
    return [line for line in text.split("\n") if line.strip()]


@functools.cache
def ends_line(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    return "\n" in tokenizer.decode([token])


def ends_of_steps(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], hidden: Collection[int]
) -> list[tuple[int, str]]:
    """Of each step of a response, the index of its last token, and the text up to its end.

    hidden: ids that are no text, such as that which ends a response. They belong to the last step.
    """
    ends: list[tuple[int, str]] = []
    count = 0
    for i, token in enumerate(tokens):
        is_last = i + 1 == len(tokens)
        if is_last or ends_line(tokenizer, token):
            text = tokenizer.decode([one for one in tokens[: i + 1] if one not in hidden])
            # A token may hold a line's end and the beginning of the next.
            text = text if is_last else text.rpartition("\n")[0]
            if len(lines_of(text)) > count:
                count = len(lines_of(text))
                ends.append((i, text))
    return ends


def load_judge(
    args: Args,
    tokenizer: PreTrainedTokenizerBase,
    ids: problems.TaskIds,
    problem_set: problems.Problems,
    device: torch.device,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """A source of scores, as rlvr/policy.py has them, whose value is the sum of the rewards of all steps."""
    name, task = args.rewards.steps, args.task
    what = f"--rewards.steps {name}"

    if ":" in name:
        function = reward_functions.import_function(name, "rewards.steps")

        def of_each(asked: list[str], steps: list[list[str]]) -> list[float]:
            return [function(problem, own) for problem, own in zip(asked, steps, strict=True)]

        def judge(prompts: list[str], messages: list[Any], texts: list[str], *, alone: bool = False) -> list[float]:
            none, steps = [None] * len(texts), [lines_of(text) for text in texts]
            return reward_functions.scores_of(of_each, what, prompts, steps, none, on_all_processes=not alone)

        judge(problem_set.texts[:1], problem_set.messages[:1], ["A step.\nAnother one."], alone=True)
    else:
        classifier = classifiers.Classifier(
            name,
            args.rewards.label,
            dtype=weights_dtype(args, frozen=True),
            device=device,
            trust_remote_code=args.trust_remote_code,
            field="rewards.steps",
        )
        plain = task.prompt_format == "plain"
        classifier.try_out(problem_set.messages, task.response_length, plain=plain)

        def judge(prompts: list[str], messages: list[Any], texts: list[str]) -> list[float]:
            rows = zip(messages, texts, strict=True)
            return classifier.of_ids([classifier.encode(*row, plain=plain) for row in rows]).tolist()

    def score(
        prompts: list[str], *_: Any, responses: Tensor, messages: list[Any], **__: Any
    ) -> tuple[Tensor, Tensor]:
        of_tokens = torch.zeros(responses.shape, dtype=torch.float64)
        tokens = [[token for token in row if token != ids.pad] for row in responses.tolist()]
        steps = [(row, *end) for row, own in enumerate(tokens) for end in ends_of_steps(tokenizer, own, ids.stops)]
        rows, places, texts = zip(*steps, strict=True) if steps else ((), (), ())
        found = judge([prompts[row] for row in rows], [messages[row] for row in rows], [*texts])
        of_tokens[[*rows], [*places]] = torch.tensor(found, dtype=torch.float64)
        return of_tokens.sum(1), of_tokens

    return score
