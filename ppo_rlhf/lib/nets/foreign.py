"""Reward models from elsewhere: any AutoModelForSequenceClassification, from a folder or the hub, as a scorer.

A score is the logit that the library's model gives a text by itself. What the model reads:

    token ids        if its tokenizer has the policy's tokens, and no chat template but the policy's
    messages         in its own chat template, if it has another one: the query is the user's, the response its reply
    text             otherwise: query and response in one, as its tokenizer encodes texts, with its special tokens
"""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from ppo_rlhf.lib.base import hub
from ppo_rlhf.lib.base.errors import InputError, NumericalError, flag, typed_as
from ppo_rlhf.lib.nets import pretrained, templates

TOKENS_AT_A_TIME = 2**13  # of a pass, with padding
POSITIONS_AFTER_PADDING = ("roberta", "xlm-roberta", "camembert")  # the first position of a text is padding's id + 1
Messages = list[dict[str, str]]


def is_foreign(model: str) -> bool:
    """Whether this names a reward model that was not trained here."""
    ours = ("ppo_rlhf.json", "reward_head.safetensors")
    return bool(model) and not any((Path(model) / name).is_file() for name in ours)


def check_name(model: str, field: str = "rewards.trained_model") -> None:
    """Raise unless this can name a reward model from elsewhere. It reads config.json at most."""
    folder, what = Path(model), f"{flag(field)} {model}"
    remedy = "give models/<run>/reward, or the folder or the name on the hub of a sequence classifier"
    if not folder.is_dir():
        if "/" not in model or not hub.HUB_NAME.fullmatch(model):
            raise InputError(f"{what}: no such folder; {remedy}")
        return
    if not (folder / "config.json").is_file():
        raise InputError(f"{what} is not the folder of a model: it has no config.json; {remedy}")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kinds = [str(name) for name in config.get("architectures") or []]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise InputError(f"{what}: its config.json cannot be read: {error}") from error
    if any(kind.endswith(("ForCausalLM", "LMHeadModel")) for kind in kinds):
        raise InputError(f"{what} is a language model ({kinds[0]}), not a reward model; {remedy}")


class Classifier:
    """A sequence classifier, the label whose logit is the score, and its tokenizer."""

    def __init__(
        self, model: str, label: str, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool, field: str
    ):
        """field: the argument that names the model, such as rewards.trained_model; the label is next to it.

        On the device `meta` no weights are read: what the other files say can be checked, but it gives no scores.
        """
        self.what, self.device = f"{flag(field)} {model}", device
        check_name(model, field)
        with typed_as({"base_model": field}), pretrained.model_errors(model) as (path, revision):
            kind = AutoModelForSequenceClassification
            config = pretrained.read_config(path, revision, trust_remote_code, auto_class=kind)
            if device.type == "meta":
                loaded, loading = pretrained.without_weights(kind, config, dtype, trust_remote_code), None
            else:
                loaded, loading = kind.from_pretrained(
                    path,
                    revision=revision,
                    config=config,
                    dtype=dtype,
                    trust_remote_code=trust_remote_code,
                    output_loading_info=True,
                    **pretrained.SAFETENSORS_ONLY,
                )
            self.model = pretrained.checked_model(loaded, loading, {}).requires_grad_(False).to(device)
            self.tokenizer = pretrained.load_tokenizer(model, trust_remote_code)
        self.tokenizer.truncation_side = "left"
        self.label = self.find_label(label, flag(f"{field.rpartition('.')[0]}.label".removeprefix(".")))
        text_config = self.model.config.get_text_config(decoder=True)
        # The library finds a text's end by this id. Without one, it reads no two texts at a time.
        self.pad_id = getattr(text_config, "pad_token_id", None)
        places = getattr(text_config, "max_position_embeddings", None)
        self.longest = min(places or 2**31, self.tokenizer.model_max_length)
        if text_config.model_type in POSITIONS_AFTER_PADDING:
            self.longest = min(self.longest, places - (self.pad_id or 0) - 1)

    def find_label(self, label: str, argument: str) -> int:
        """The column of the logits with this label; of one column, no label need be named."""
        labels = [self.model.config.id2label[i] for i in range(self.model.config.num_labels)]
        if label in labels:
            return labels.index(label)
        if label:
            raise InputError(f"{argument} {label}: {self.what} has the labels {', '.join(map(str, labels))}")
        if len(labels) > 1:
            raise InputError(
                f"{self.what} has {len(labels)} labels, {', '.join(map(str, labels))}; say which one's logit is the "
                f"score: {argument} {labels[-1]}"
            )
        return 0

    def shares_tokens(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether it reads the policy's token ids: the same tokens, and no chat template but the policy's."""
        ours = {id_: text for text, id_ in tokenizer.get_vocab().items() if text != pretrained.PAD_TOKEN}
        theirs = {id_: text for text, id_ in self.tokenizer.get_vocab().items()}
        rows = self.model.get_input_embeddings().num_embeddings
        same = all(theirs.get(id_) == text for id_, text in ours.items()) and max(ours) < rows
        return same and self.tokenizer.chat_template in (None, tokenizer.chat_template)

    def of_ids(self, rows: Sequence[list[int]]) -> Tensor:
        """Scores (rows,) of token ids without padding, each as if it were read alone."""
        scores, order = torch.empty(len(rows)), sorted(range(len(rows)), key=lambda i: len(rows[i]))
        while order:
            longest = len(rows[order[-1]])
            at_a_time = max(1, TOKENS_AT_A_TIME // longest) if self.pad_id is not None else 1
            order, inds = order[:-at_a_time], order[-at_a_time:]
            mask = torch.tensor([[1] * len(rows[i]) + [0] * (longest - len(rows[i])) for i in inds])
            ids = torch.tensor([rows[i] + [self.pad_id or 0] * (longest - len(rows[i])) for i in inds])
            with torch.no_grad():
                logits = self.model(input_ids=ids.to(self.device), attention_mask=mask.to(self.device)).logits
            scores[inds] = logits[:, self.label].float().cpu()
        if not scores.isfinite().all():
            raise NumericalError(f"{self.what} gives scores that are not finite; the run stops")
        return scores.to(self.device)

    def of_texts(self, queries: Sequence[str | Messages], responses: Sequence[str]) -> Tensor:
        """Scores (rows,) of responses as texts. A query is a text or messages. Of a text that is too long for the
        model, the end is read.
        """
        rows = [self.encode(query, response) for query, response in zip(queries, responses, strict=True)]
        return self.of_ids(rows)

    def encode(self, query: str | Messages, response: str) -> list[int]:
        if self.tokenizer.chat_template is not None:
            messages = [{"role": "user", "content": query.strip()}] if isinstance(query, str) else query
            messages = [*messages, {"role": "assistant", "content": response.strip()}]
            # [V114] A policy that writes the mark of a turn's end does not end its turn before the judge.
            letters = [one | {"content": templates.as_letters(one["content"], self.tokenizer)} for one in messages]
            try:
                text = self.tokenizer.apply_chat_template(letters, tokenize=False)
            except Exception as error:  # a template is a program, and may raise anything
                said = " ".join(f"{type(error).__name__}: {error}".split())
                raise InputError(f"{self.what}: its chat template fails on a query and a response: {said}") from error
            return templates.encode(text, self.tokenizer)[-self.longest :]
        if isinstance(query, str):
            text = query + response
        else:
            text = "\n".join([*(message["content"] for message in query), response])
        return self.tokenizer.encode(text, truncation=True, max_length=self.longest)


def load_scorer(
    args: Any,
    tokenizer: PreTrainedTokenizerBase,
    pad_id: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    messages_of: Callable[[str], Messages] | None = None,
    bare: Callable[[Tensor], Tensor] | None = None,
) -> Callable[..., Tensor]:
    """A scorer with the classifier that args.rewards names: token ids of queries and responses (batch, length), with
    our padding, to scores (batch,).

    messages_of: makes messages of the text of a query that is rendered in the policy's chat template. bare: takes the
    tokens of the policy's own template out of queries that a judge reads as texts.
    """
    judge = Classifier(
        args.rewards.trained_model,
        args.rewards.label,
        dtype=dtype,
        device=device,
        trust_remote_code=args.trust_remote_code,
        field="rewards.trained_model",
    )
    length = args.task.query_length + args.task.response_length
    return scorer_of(judge, tokenizer, pad_id, length, messages_of, bare=bare)


def scorer_of(
    judge: Classifier,
    tokenizer: PreTrainedTokenizerBase,
    pad_id: int,
    length: int,
    messages_of: Callable[[str], Messages] | None = None,
    bare: Callable[[Tensor], Tensor] | None = None,
) -> Callable[..., Tensor]:
    """As load_scorer. length: the most tokens of a query and its response."""
    by_ids, ends = judge.shares_tokens(tokenizer), templates.end_ids(tokenizer)
    first = templates.first_ids(tokenizer)
    if by_ids and len(first) + length > judge.longest:
        raise InputError(
            f"{judge.what} reads at most {judge.longest} tokens, but query and response are {length}; shorten "
            f"{flag('task.query_length')} or {flag('task.response_length')}"
        )

    def without_padding(tokens: Tensor) -> list[list[int]]:
        return [[token for token in row if token != pad_id] for row in tokens.tolist()]

    def score(queries: Tensor, responses: Tensor, *_: Any) -> Tensor:
        if by_ids:
            rows = without_padding(torch.cat([queries, responses], dim=1))
            # [X19] Chapter 1's queries come without the token that begins every text.
            return judge.of_ids([row if row[: len(first)] == first else [*first, *row] for row in rows])
        asked = without_padding(bare(queries) if bare else queries)
        # What follows an end of text is not part of the response, and its sign is the policy's own.
        said = [list(itertools.takewhile(lambda i: i not in ends, row)) for row in without_padding(responses)]
        texts = [tokenizer.decode(row) for row in asked]
        if messages_of:
            return judge.of_texts([messages_of(text) for text in texts], [tokenizer.decode(row) for row in said])
        # Decoded in one, because some tokenizers drop the space that a text begins with.
        wholes = [tokenizer.decode([*a, *b]) for a, b in zip(asked, said, strict=True)]
        return judge.of_texts(texts, [w[len(t) :] for w, t in zip(wholes, texts, strict=True)])

    if judge.device.type != "meta":
        score(torch.tensor([[0]]), torch.tensor([[1]]))  # what it cannot read is found before training
    return score
