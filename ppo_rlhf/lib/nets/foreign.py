"""Reward models from elsewhere: any AutoModelForSequenceClassification, from a folder or the hub, as a scorer.

A score is the logit that the library's model gives a text by itself. What the model reads:

    messages     in its own chat template, if it has one: what was asked, and the response as the last turn
    token ids    if it has none, prompts are plain, and its tokenizer has the policy's tokens
    text         otherwise: what was asked and the response, as its tokenizer encodes texts, with its special tokens
"""

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from ppo_rlhf.lib.base import hub
from ppo_rlhf.lib.base.errors import InputError, NumericalError, flag, typed_as
from ppo_rlhf.lib.nets import pretrained, templates

TOKENS_AT_A_TIME = 2**13  # of a pass, with padding


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
        raise InputError(f"{what} is not the folder of a model: {pretrained.without_config(folder)}; {remedy}")
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
            config.get_text_config(decoder=True).use_cache = False  # nobody reads keys and values again
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
        self.pads_texts = self.pad_id is not None
        places = getattr(text_config, "max_position_embeddings", None) or -1
        for table in self.model.modules():  # RoBERTa's first position is the one after the padding's id
            if getattr(table, "padding_idx", None) is not None and len(getattr(table, "weight", ())) == places:
                places -= table.padding_idx + 1
                break
        # XLNet says -1, because it reads texts of any length.
        self.longest = min(places if places > 0 else 2**31, self.tokenizer.model_max_length)
        special = templates.names_of_special_tokens(self.tokenizer)
        largest = max(id_ for text, id_ in self.tokenizer.get_vocab().items() if text not in special)
        self.rows = len(self.model.get_input_embeddings().weight)
        if largest >= self.rows:
            raise InputError(
                f"{self.what} has an embedding of {self.rows} rows, but its tokenizer has a token {largest}; save it "
                f"with the tokenizer that it was trained with"
            )

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
        """Whether its tokenizer has the policy's tokens."""
        ours = {id_: text for text, id_ in tokenizer.get_vocab().items() if text != pretrained.PAD_TOKEN}
        theirs = {id_: text for text, id_ in self.tokenizer.get_vocab().items()}
        return all(theirs.get(id_) == text for id_, text in ours.items()) and max(ours) < self.rows

    def of_ids(self, rows: Sequence[list[int]]) -> Tensor:
        """Scores (rows,) of token ids without padding, each as if it were read alone."""
        scores, order = torch.empty(len(rows)), sorted(range(len(rows)), key=lambda i: len(rows[i]))
        while order:
            longest = len(rows[order[-1]])
            at_a_time = max(1, TOKENS_AT_A_TIME // longest) if self.pads_texts else 1
            order, inds = order[:-at_a_time], order[-at_a_time:]
            mask = torch.tensor([[1] * len(rows[i]) + [0] * (longest - len(rows[i])) for i in inds])
            ids = torch.tensor([rows[i] + [self.pad_id or 0] * (longest - len(rows[i])) for i in inds])
            with torch.no_grad():
                logits = self.model(input_ids=ids.to(self.device), attention_mask=mask.to(self.device)).logits
            scores[inds] = logits[:, self.label].float().cpu()
        if not scores.isfinite().all():
            raise NumericalError(f"{self.what} gives scores that are not finite; the run stops")
        return scores.to(self.device)

    def encode(self, dialogue: templates.Messages, response: str, *, plain: bool) -> list[int]:
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
        letters = [one | {"content": templates.as_letters(one["content"], self.tokenizer)} for one in messages]
        try:
            text = self.tokenizer.apply_chat_template(letters, tokenize=False)
        except Exception as error:  # a template is a program, and may raise anything
            said = " ".join(f"{type(error).__name__}: {error}".split())
            roles = ", ".join(one["role"] for one in messages)
            raise InputError(f"{self.what}: its chat template fails on messages of {roles}: {said}") from error
        return templates.encode(text, self.tokenizer)[-self.longest :]

    def try_out(self, rows_of: Callable[[int], list[list[int]]], length: int) -> None:
        """Read texts of this length, and short ones; raise if that fails.

        rows_of: makes texts of so many tokens, or somewhat more. length: the most that the policy makes, in its
        tokens. This model may need more for the same text, so as many as it can read are tried, if they are few.
        """
        length = self.longest if self.longest <= TOKENS_AT_A_TIME else min(length, self.longest)
        try:
            self.of_ids(rows_of(length)[:1])
            short = [rows_of(4)[0], rows_of(8)[0]]
            alone = torch.cat([self.of_ids([row]) for row in short])
            # Some read a text's score at the last place, padding or not (XLNet).
            near = torch.finfo(self.model.dtype).eps ** 0.5
            self.pads_texts = self.pads_texts and torch.allclose(self.of_ids(short), alone, rtol=near, atol=near)
        except (InputError, NumericalError):
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise InputError(
                f"{self.what} cannot read a text of {length} tokens: {said}; model_max_length in its "
                f"tokenizer_config.json may say that it reads fewer"
            ) from error


def load_scorer(
    args: Any, tokenizer: PreTrainedTokenizerBase, pad_id: int, device: torch.device, **what_is_asked: Any
) -> Callable[..., Tensor]:
    """A scorer with the classifier that args.rewards names; what_is_asked: for scorer_of."""
    judge = Classifier(
        args.rewards.trained_model,
        args.rewards.label,
        dtype=pretrained.dtype_of_weights(args, frozen=True),
        device=device,
        trust_remote_code=args.trust_remote_code,
        field="rewards.trained_model",
    )
    return scorer_of(judge, tokenizer, pad_id, args.task, **what_is_asked)


def scorer_of(
    judge: Classifier,
    tokenizer: PreTrainedTokenizerBase,
    pad_id: int,
    task: Any,
    *,
    bare: Callable[[Tensor], Tensor] | None = None,
    dialogues: Iterable[templates.Messages] = (),
) -> Callable[..., Tensor]:
    """A scorer: token ids of queries and responses (batch, length), with our padding, to scores (batch,).

    It may get `messages`, a dialogue for each row, as Classifier.encode does. Otherwise the text of a query is the
    user's. bare: takes what is around that text out of a query. dialogues: what will come, to be tried now.
    """
    plain, ends = task.prompt_format == "plain", templates.end_ids(tokenizer)
    first, length = templates.first_ids(tokenizer), task.query_length + task.response_length
    by_ids = plain and judge.tokenizer.chat_template is None and judge.shares_tokens(tokenizer)
    if by_ids and len(first) + length > judge.longest:
        raise InputError(
            f"{judge.what} reads at most {judge.longest} tokens, but query and response are {length}; shorten "
            f"{flag('task.query_length')} or {flag('task.response_length')}"
        )

    def without_padding(tokens: Tensor) -> list[list[int]]:
        return [[token for token in row if token != pad_id] for row in tokens.tolist()]

    def dialogue_of(text: str) -> templates.Messages:
        asked = [*templates.system_of(task), {"role": "user", "content": text}]
        return [*asked, {"role": "assistant", "content": ""}]

    def score(
        queries: Tensor, responses: Tensor, *_: Any, messages: list[templates.Messages] | None = None
    ) -> Tensor:
        if by_ids:
            rows = without_padding(torch.cat([queries, responses], dim=1))
            # [X19] Chapter 1's queries come without the token that begins every text.
            return judge.of_ids([row if row[: len(first)] == first else [*first, *row] for row in rows])
        asked = without_padding(bare(queries) if bare else queries)
        # What follows an end of text is not part of the response, and its sign is the policy's own.
        said = [list(itertools.takewhile(lambda i: i not in ends, row)) for row in without_padding(responses)]
        # Decoded in one, because some tokenizers drop the space that a text begins with.
        wholes = [tokenizer.decode([*a, *b]) for a, b in zip(asked, said, strict=True)]
        texts = [tokenizer.decode(row) for row in asked]
        messages = messages or [dialogue_of(text) for text in texts]
        parts = zip(messages, wholes, texts, strict=True)
        return judge.of_ids([judge.encode(one, w[len(text) :], plain=plain) for one, w, text in parts])

    # Of dialogues, one for each sequence of roles: a template may refuse some.
    kinds = {tuple(message["role"] for message in one): one for one in dialogues} or {(): dialogue_of("a")}

    def rows_of(n: int) -> list[list[int]]:
        if by_ids:
            return [[pad_id - 1 - i % pad_id for i in range(n)]]
        return [judge.encode(one, "a " * n, plain=plain) for one in kinds.values()]

    if judge.device.type != "meta":
        judge.try_out(rows_of, len(first) + length)
    return score
