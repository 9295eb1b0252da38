"""Reward models from elsewhere, for chapters 2 and 3: any AutoModelForSequenceClassification as a scorer.

A score is the logit that the library's model gives a text by itself. What the model reads:

    messages     in its own chat template, if it has one: what was asked, and the response as the last turn
    text         otherwise: what was asked and the response, as its tokenizer encodes texts, with its special tokens
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from ppo_rlhf.tldr import chat_templates, models
from ppo_rlhf.train_policy import InputError, input_errors, load_pretrained, weights_dtype

ROWS = 16  # texts of a pass


def is_foreign(model: str) -> bool:
    """Whether this names a reward model that was not trained here."""
    return bool(model) and not models.was_trained_here(model)


class Classifier:
    """A sequence classifier, the label whose logit is the score, and its tokenizer."""

    def __init__(
        self,
        model: str,
        label: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        trust_remote_code: bool,
        field: str = "rewards.trained_model",
    ) -> None:
        """model, label: --rewards.trained_model, or what else the field is, and --rewards.label."""
        self.what = f"--{field} {model}"
        self.device = device
        with models.named(field):
            self.model = load_pretrained(model, dtype, trust_remote_code, AutoModelForSequenceClassification)
            self.tokenizer = models.load_tokenizer(model, trust_remote_code)
        self.model.requires_grad_(False).to(device)
        self.label = self.find_label(label)
        text_config = self.model.config.get_text_config(decoder=True)
        text_config.use_cache = False  # nobody reads keys and values again
        # The library finds a text's end by this id. Without one, it reads no two texts at a time.
        pad_id = getattr(text_config, "pad_token_id", None)
        pad_token = None if pad_id is None else self.tokenizer.convert_ids_to_tokens(pad_id)
        self.rows = ROWS if pad_token else 1
        if pad_token:
            self.tokenizer.pad_token = pad_token
        self.tokenizer.truncation_side = "left"
        # XLNet says -1, because it reads texts of any length.
        places = getattr(text_config, "max_position_embeddings", None) or -1
        self.longest = min(places if places > 0 else 2**31, self.tokenizer.model_max_length)

    def find_label(self, label: str) -> int:
        """The column of the logits with this label; of one column, no label need be named."""
        labels = [self.model.config.id2label[i] for i in range(self.model.config.num_labels)]
        if label in labels:
            return labels.index(label)
        if label or len(labels) > 1:
            raise InputError(
                f"--rewards.label {label}: {self.what} has the labels {', '.join(map(str, labels))}; name the one "
                f"whose logit is the score"
            )
        return 0

    @torch.no_grad()
    def of_ids(self, rows: Sequence[list[int]]) -> Tensor:
        """Scores (rows,) of token ids without padding, each as if it were read alone."""
        scores = torch.empty(len(rows))
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        for start in range(0, len(order), self.rows):
            inds = order[start : start + self.rows]
            batch = self.tokenizer.pad(
                {"input_ids": [rows[i] for i in inds]}, padding=self.rows > 1, return_tensors="pt"
            )
            logits = self.model(**batch.to(self.device)).logits
            scores[inds] = logits[:, self.label].float().cpu()
        if not scores.isfinite().all():
            raise InputError(f"{self.what} gives scores that are not finite")
        return scores.to(self.device)

    def encode(self, dialogue: chat_templates.Messages, response: str, *, plain: bool) -> list[int]:
        """Token ids of a response with what was asked. Of a text that is too long for the model, the end is read.

        dialogue: messages, of which the last is the beginning of the reply, which may be empty. plain: whether the
        response continues a text, and is no turn of its own.
        """
        *asked, begun = dialogue
        reply = begun["content"] + response
        if self.tokenizer.chat_template is None:
            text = "\n".join(one["content"] for one in asked)
            text += reply if plain else f"\n{reply.strip()}"
            # [V114] The names of special tokens are letters, here and in templates.
            return self.tokenizer.encode(
                text, split_special_tokens=True, truncation=True, max_length=self.longest, verbose=False
            )
        messages = [*asked, {"role": "assistant", "content": reply.strip()}]
        # [V114] A policy that writes the mark of a turn's end does not end its turn before the judge.
        letters = [one | {"content": chat_templates.as_letters(one["content"], self.tokenizer)} for one in messages]
        text = chat_templates.apply(self.tokenizer, letters, f"{self.what}: its chat template")
        return chat_templates.encode(text, self.tokenizer)[-self.longest :]

    def try_out(self, dialogues: Iterable[chat_templates.Messages], length: int, *, plain: bool) -> None:
        """Read a short and a long response to one of each kind of these; raise an InputError if that fails."""
        # One for each sequence of roles: a template may refuse some.
        kinds = {tuple(message["role"] for message in one): one for one in dialogues}
        with input_errors(
            f"{self.what} cannot read a text of {length} tokens; model_max_length in its tokenizer_config.json may "
            f"say that it reads fewer"
        ):
            for dialogue in kinds.values():
                rows = [self.encode(dialogue, "a " * n, plain=plain) for n in (4, length)]
                alone = torch.cat([self.of_ids([row]) for row in rows])
                # Some models read a text's score at the last place, padding or not (XLNet).
                near = torch.finfo(self.model.dtype).eps ** 0.5
                if not torch.allclose(self.of_ids(rows), alone, rtol=near, atol=near):
                    self.rows = 1


def load_scorer(
    args: Any,
    tokenizer: PreTrainedTokenizerBase,
    pad_id: int,
    device: torch.device,
    *,
    bare: Callable[[Tensor], Tensor] | None = None,
    dialogues: Iterable[chat_templates.Messages] = (),
) -> Callable[..., Tensor]:
    """A scorer with the classifier that args.rewards names; what it scores: see scorer_of."""
    judge = Classifier(
        args.rewards.trained_model,
        args.rewards.label,
        dtype=weights_dtype(args, frozen=True),
        device=device,
        trust_remote_code=args.trust_remote_code,
    )
    return scorer_of(judge, tokenizer, pad_id, args.task, bare=bare, dialogues=dialogues)


def scorer_of(
    judge: Classifier,
    tokenizer: PreTrainedTokenizerBase,
    pad_id: int,
    task: chat_templates.FormatArgs,
    *,
    bare: Callable[[Tensor], Tensor] | None = None,
    dialogues: Iterable[chat_templates.Messages] = (),
) -> Callable[..., Tensor]:
    """A scorer: token ids of queries and responses (batch, length), with our padding, to scores (batch,).

    It may get `messages`, a dialogue for each row, as Classifier.encode does. Otherwise the text of a query is the
    user's. bare: takes what is around that text out of a query. dialogues: what will come, to be tried now.
    """
    plain = task.prompt_format == "plain"
    ends = models.end_ids(tokenizer)

    def without_padding(tokens: Tensor) -> list[list[int]]:
        return [[token for token in row if token != pad_id] for row in tokens.tolist()]

    def dialogue_of(text: str) -> chat_templates.Messages:
        asked = [*chat_templates.system_of(task), {"role": "user", "content": text}]
        return [*asked, {"role": "assistant", "content": ""}]

    def score(
        queries: Tensor, responses: Tensor, *_: Any, messages: list[chat_templates.Messages] | None = None
    ) -> Tensor:
        asked = without_padding(bare(queries) if bare else queries)
        # What follows an end of text is not part of the response, and its sign is the policy's own.
        replies = [list(itertools.takewhile(lambda i: i not in ends, row)) for row in without_padding(responses)]
        # Decoded in one, because some tokenizers drop the space that a text begins with.
        wholes = [tokenizer.decode([*a, *b]) for a, b in zip(asked, replies, strict=True)]
        texts = [tokenizer.decode(row) for row in asked]
        messages = messages or [dialogue_of(text) for text in texts]
        parts = zip(messages, wholes, texts, strict=True)
        return judge.of_ids([judge.encode(one, whole[len(text) :], plain=plain) for one, whole, text in parts])

    judge.try_out([*dialogues] or [dialogue_of("a")], task.response_length, plain=plain)
    return score
