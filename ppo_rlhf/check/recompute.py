"""Log-probs of a dump, computed again with the model: see doctor.py."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ppo_rlhf.check import forms
from ppo_rlhf.check.doctor import Doctor, Finding, largest, last_columns, root_mean_square, wiring
from ppo_rlhf.check.dump import Batch
from ppo_rlhf.check.faults import Fault
from ppo_rlhf.report.derivation import written
from ppo_rlhf.train_policy import InputError

TEMPERATURES = [1.0, 0.7, 0.5, 0.6, 0.8, 0.9, 1.2, 1.5, 2.0]
SHARES = (0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995)  # of a nucleus
LARGEST_K = 1000
MISTAKES = ("times temperature", "not normalised", "divided after the softmax")
NEARER = 0.9  # of the difference: another precision that is nearer is the reason; engines share half of their errors
FINER = 0.25  # of the errors of bfloat16: a smaller difference is one of engines, or of weights that hardly differ


# ---- The model -------------------------------------------------------------------------------------------------


def load(folder: Path) -> PreTrainedModel:
    """The language model in a folder; an InputError if there is none."""
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", local_files_only=True, use_safetensors=True
        ).eval()
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"--model {folder} is no language model: {str(error).splitlines()[0][:200]}") from error


def end_ids(model: PreTrainedModel) -> list[int]:
    """The ids of a model's end tokens."""
    found = (model.generation_config or model.config).eos_token_id
    return [] if found is None else [found] if isinstance(found, int) else list(found)


def rows_of(batch: Batch) -> tuple[Tensor, Tensor, int]:
    """Tokens with contexts padded on the left, the attention mask, and the length of the contexts."""
    tokens, text, width = batch.tokens, batch.is_text.clone(), batch.mask.shape[1]
    text[:, -width:] &= torch.arange(width) <= last_columns(batch.mask).unsqueeze(1) + 1
    context = tokens.shape[1] - width
    # Contexts may be padded anywhere; the last token before the response must be text.
    order = text[:, :context].byte().argsort(dim=1, stable=True)
    tokens, text = (torch.cat([x[:, :context].gather(1, order), x[:, context:]], dim=1) for x in (tokens, text))
    if not context:  # prompts are in the same columns: the first token is read, not predicted
        tokens, text = (torch.nn.functional.pad(x, (1, 0)) for x in (tokens, text))
        context = 1
    return tokens.masked_fill(~text, 0), text, context


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: Tensor, text: Tensor, context: int) -> Tensor:
    """Logits of the responses, (rows, width, vocabulary) in float64, a few rows at a time."""
    size = model.get_input_embeddings().num_embeddings
    if int(tokens.max()) >= size:
        raise InputError(f"the model has {size} tokens, and the dump has the id {int(tokens.max())} in its text")
    found = []
    for rows, there in zip(tokens.split(8), text.split(8), strict=True):
        positions = (there.cumsum(1) - 1).clamp(min=0)
        out = model(input_ids=rows, attention_mask=there.long(), position_ids=positions).logits
        found.append(out[:, context - 1 : -1].float())
    return torch.cat(found).double()


# ---- What its log-probs are compared with ----------------------------------------------------------------------


class Reading(NamedTuple):
    """A way to read log-probs from the logits."""

    words: str
    names: tuple[Fault, ...]
    x: Tensor  # (rows, width)
    where: Tensor  # the entries that are compared


class Reader:
    """The model's logits, and the log-probs of the dump that they should explain."""

    def __init__(self, logits: Tensor, responses: Tensor, there: Tensor, mask: Tensor, told: float | None):
        """told: the temperature in the dump."""
        self.logits, self.responses, self.there, self.mask, self.told = logits, responses, there, mask, told

    def logprobs(self, temperature: float) -> Tensor:
        return forms.token_logprobs(self.logits, self.responses, temperature)

    def temperature(self, shift: int = 0) -> float:
        """The temperature at which the model is nearest, if the dump's log-probs are moved by some tokens.

        It is found by Newton's method on its logarithm; one that was told, or with few digits, is taken if it is as
        good.
        """
        where, there = self.inside(shift).roll(-shift, 1), self.there.roll(-shift, 1)

        def gap(t: float) -> Tensor:
            return (self.logprobs(t) - there)[where]

        told = [self.told] if self.told else []
        t = min(told + TEMPERATURES, key=lambda t: root_mean_square(gap(t)))
        for _ in range(6):
            here = gap(t)
            slope = (gap(t * 1.0001) - here) / 1e-4
            step = -float((here * slope).sum() / (slope * slope).sum().clamp(min=1e-12))
            new = t * math.exp(min(max(step, -0.5), 0.5))
            if not root_mean_square(gap(new)) < root_mean_square(here):
                break
            t = new
        enough = 1.02 * root_mean_square(gap(t)) + 1e-5
        nice = told + [float(f"{t:.{digits}g}") for digits in (1, 2, 3)]
        return next((other for other in nice if root_mean_square(gap(other)) <= enough), t)

    def inside(self, shift: int) -> Tensor:
        """The tokens of responses whose log-prob is that of another one, some tokens away."""
        there = self.mask & self.mask.roll(shift, 1)
        columns = torch.arange(self.mask.shape[1])
        return there & (columns >= shift) & (columns - shift < len(columns))

    def readings(self, doctor: Doctor) -> Iterator[Reading]:
        """Ways to read log-probs: at any temperature, of another token or row, or with a mistake."""
        mask = self.mask
        for shift, name in ((0, ""), (1, "log-probs one token late"), (-1, "log-probs one token early")):
            t = self.temperature(shift)
            names = wiring(name) if name else ()
            if self.told and abs(t - self.told) > 5e-3 * self.told:
                is_one = abs(t - 1) < 5e-3
                names += wiring(f"log-probs {'without' if is_one else 'at another'} temperature")
            words = f"at temperature {written(t, 4)}"
            yield Reading(words, names, self.logprobs(t).roll(shift, 1), self.inside(shift))
        for shift in (1, -1) if len(mask) > 1 else ():
            x, names = self.logprobs(self.told or 1.0), wiring("log-probs of another row")
            yield Reading("of another row", names, x.roll(shift, 0), mask & mask.roll(shift, 0))
        for t in dict.fromkeys([self.told or 1.0, 1.0]):
            words = f"at temperature {written(t, 4)}"
            for how, names, x in self.nuclei(t):
                yield Reading(f"{words}, {how}", names, x, mask)
            for f, names in doctor.mistakes("token_logprobs", *MISTAKES):
                yield Reading(words, names, f(self.logits, self.responses, t), mask)

    def nuclei(self, temperature: float) -> Iterator[tuple[str, tuple[Fault, ...], Tensor]]:
        """Log-probs among the k likeliest tokens, and within the likeliest that hold a share p."""
        x = self.logprobs(temperature)
        above = (self.there - x)[self.mask]
        if not above.numel() or float(above.min()) <= -1e-3 or float(above.mean()) <= 1e-3:
            return
        probs = (self.logits / temperature).softmax(-1).sort(-1, descending=True).values.cumsum(-1)
        lifted = probs[self.mask][:, :LARGEST_K].log() + above.unsqueeze(1)
        k = int((lifted**2).mean(0).argmin()) + 1
        of_k = x - probs[..., k - 1].log()
        yield f"among the {k} likeliest tokens", wiring("log-probs of the sampler's top k"), of_k
        for p in SHARES:
            count = (probs < p).sum(-1, keepdim=True).clamp(max=probs.shape[-1] - 1)
            of_p = x - probs.gather(-1, count).squeeze(-1).log()
            yield f"within the likeliest {p:g}", wiring("log-probs of the sampler's nucleus"), of_p


def compare(doctor: Doctor, name: str, folder: Path, model: PreTrainedModel | None = None) -> Finding:
    """What the log-probs of the dump are, given the model that should have them."""
    batch, mask, settings = doctor.batch, doctor.mask & doctor.true_mask, doctor.batch.settings
    if not batch.has_context and mask[:, 0].any() and not settings["context_length"]:
        return Finding(array=name, lacks="the prompts, without which the model cannot read the responses")
    model = model or load(folder)
    rows, there = rows_of(batch), doctor.arrays[name]
    reader = Reader(
        logits_of(model, *rows),
        responses=rows[0][:, -mask.shape[1] :],
        there=there,
        mask=mask,
        told=settings.get("temperature"),
    )
    best = min(
        reader.readings(doctor),
        key=lambda reading: max(root_mean_square((reading.x - there)[reading.where]), 2e-5) * 2 ** len(reading.names),
    )
    gap = (best.x - there)[best.where]
    # Another precision shows how far rounding moves log-probs.
    kind = next(model.parameters()).dtype
    other = copy.deepcopy(model).to(torch.bfloat16 if kind == torch.float32 else torch.float32)
    temperature = reader.temperature()
    rounded = forms.token_logprobs(logits_of(other, *rows), reader.responses, temperature)
    scatter = root_mean_square((rounded - reader.logprobs(temperature))[mask])
    limit = 2 * max(batch.eps[name] * largest(there[mask]), 1e-5) + 1e-4
    limit += 6 * scatter if kind != torch.float32 else 0
    finding = Finding(array=name, words=f"the model's, {best.words}", gap=largest(gap), names=best.names)
    if finding.gap <= limit:
        right = reader.logprobs(reader.told or 1.0)
        finding.where = doctor.place(name, right, mask) if best.names else ""
        return finding
    far, noise = written(root_mean_square(gap), 2), written(scatter, 2)
    is_nearer = root_mean_square((there - rounded)[mask]) < NEARER * root_mean_square(gap)
    if settings.get("step") != 0 and doctor.is_reference(name):
        finding.words, name_of_fault = "not the model's", "log-probs of the reference"
    elif not best.names and (is_nearer or root_mean_square(gap) < FINER * scatter):
        finding.words += f", with noise of {far} nats, where bfloat16 has {noise}"
        name_of_fault = "log-probs of other numerics"
    else:
        finding.words = f"the nearest reading of the model, {best.words}, is {far} nats away per token"
        name_of_fault = "log-probs of other weights"
    finding.names, finding.where = wiring(name_of_fault), doctor.place(name, best.x, mask)
    return finding
