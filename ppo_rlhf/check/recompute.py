"""Log-probs of a dump, computed again with the model: see doctor.py."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ppo_rlhf.check import forms
from ppo_rlhf.check.doctor import WIRING, Doctor, Finding, root_mean_square, wiring
from ppo_rlhf.check.dump import Batch
from ppo_rlhf.check.faults import Fault
from ppo_rlhf.report.derivation import written
from ppo_rlhf.train_policy import InputError

TEMPERATURES = [1.0, 0.7, 0.5, 0.6, 0.8, 0.9, 1.2, 1.5, 2.0]
LARGEST_K = 1000
NEARER = 0.9  # of the difference: another precision that is nearer is the reason; engines share half of their errors
FINER = 0.25  # of the errors of bfloat16: a smaller difference is one of engines, or of weights that hardly differ


def load(folder: Path) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", local_files_only=True, use_safetensors=True
        ).eval()
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"--model {folder} is no language model: {str(error).splitlines()[0][:200]}") from error


def end_ids(model: PreTrainedModel) -> list[int]:
    found = model.generation_config.eos_token_id if model.generation_config else model.config.eos_token_id
    return [] if found is None else [found] if isinstance(found, int) else list(found)


def rows_of(batch: Batch) -> tuple[Tensor, Tensor, int]:
    """Tokens with contexts padded on the left, the attention mask, and the length of the contexts."""
    tokens, text = batch.tokens, batch.is_text.clone()
    width = batch.mask.shape[1]
    columns = torch.arange(width)
    last = torch.where(batch.mask, columns, -1).amax(1, keepdim=True)
    text[:, -width:] &= columns <= last + 1
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
    """Logits of the responses, (rows, width, vocabulary) in float32, a few rows at a time."""
    size = model.get_input_embeddings().num_embeddings
    if int(tokens.max()) >= size:
        raise InputError(f"the model has {size} tokens, and the dump has the id {int(tokens.max())} in its text")
    found = []
    for rows, there in zip(tokens.split(8), text.split(8), strict=True):
        positions = (there.cumsum(1) - 1).clamp(min=0)
        out = model(input_ids=rows, attention_mask=there.long(), position_ids=positions).logits
        found.append(out[:, context - 1 : -1].float())
    return torch.cat(found)


def compare(doctor: Doctor, name: str, folder: Path, model: PreTrainedModel | None = None) -> Finding:
    """What the log-probs of the dump are, given the model that should have them."""
    model = model or load(folder)
    batch, mask = doctor.batch, doctor.mask & doctor.true_mask
    tokens, text, context = rows_of(batch)
    responses = tokens[:, context:] if context + mask.shape[1] == tokens.shape[1] else tokens[:, -mask.shape[1] :]
    if batch.tokens.shape[1] == mask.shape[1] and mask[:, 0].any() and not batch.settings["context_length"]:
        return Finding(array=name, lacks="the prompts, without which the model cannot read the responses")
    logits = logits_of(model, tokens, text, context).double()
    there, told = doctor.arrays[name], batch.settings.get("temperature")
    where = mask
    best: tuple[float, str, tuple[Fault, ...], Tensor] | None = None
    for words, names, x, part in readings(doctor, logits, responses, there, where, told):
        error = root_mean_square((x - there)[part])
        cost = max(error, 2e-5) * 2.0 ** len(names)
        if best is None or cost < best[0] * (1 - 1e-9):
            best = cost, words, names, x
            gap = float((x - there)[part].abs().max()) if part.any() else 0.0
            rms = error
    assert best is not None
    _, words, names, x = best
    weights = next(model.parameters()).dtype
    temperature = refined(logits, responses, there, mask, told or 1.0, told)
    first = forms.token_logprobs(logits, responses, temperature)
    rounded = forms.token_logprobs(other_precision(model, tokens, text, context), responses, temperature)
    scatter = root_mean_square((rounded - first)[mask])
    eps = max(batch.eps[name] * float(there[mask].abs().max()), 1e-5)
    limit = 2 * eps + 1e-4 + (6 * scatter if weights != torch.float32 else 0)
    finding = Finding(array=name, words=f"the model's, {words}", gap=gap, names=list(names))
    if gap <= limit:
        if names:
            finding.where = doctor.place(name, forms.token_logprobs(logits, responses, told or 1.0), mask)
        return finding
    finding.words = "not the model's"
    same = (
        "ref_logprobs" in doctor.arrays
        and name != "ref_logprobs"
        and float((there - doctor.arrays["ref_logprobs"])[mask].abs().max()) < 1e-6
    )
    if same and doctor.batch.settings.get("step") != 0:
        kind = "log-probs of the reference"
    elif not names and (root_mean_square((there - rounded)[mask]) < NEARER * rms or rms < FINER * scatter):
        kind = "log-probs of other numerics"
        finding.words = (
            f"the model's, {words}, with noise of {written(rms, 2)} nats, where bfloat16 has {written(scatter, 2)}"
        )
    else:
        kind = "log-probs of other weights"
        finding.words = f"the nearest reading of the model, {words}, is {written(rms, 2)} nats away per token"
    finding.names = [WIRING[kind]]
    finding.where = doctor.place(name, x, mask)
    return finding


def readings(
    doctor: Doctor, logits: Tensor, responses: Tensor, there: Tensor, mask: Tensor, told: float | None
) -> Iterator[tuple[str, tuple[Fault, ...], Tensor, Tensor]]:
    """Ways to read log-probs from the model's logits, and the entries that they are compared at."""
    inner_late, inner_early = mask.clone(), mask.clone()
    inner_late[:, 0] = False
    inner_early &= mask.roll(-1, 1)
    inner_early[:, -1] = False
    late, early = there.roll(-1, 1), there.roll(1, 1)
    for part, shifted, names in (
        (mask, there, ()),
        (inner_late, late, wiring("log-probs one token late")),
        (inner_early, early, wiring("log-probs one token early")),
    ):
        source = part.roll(-1 if names and "late" in names[0].name else 1, 1) & mask if names else part
        starts = ([told] if told else []) + TEMPERATURES
        errors = {t: root_mean_square((forms.token_logprobs(logits, responses, t) - shifted)[source]) for t in starts}
        temperature = refined(logits, responses, shifted, source, min(errors, key=errors.__getitem__), told)
        x = forms.token_logprobs(logits, responses, temperature)
        of_t: tuple[Fault, ...] = ()
        if told and abs(temperature - told) > 5e-3 * told:
            of_t = wiring(
                "log-probs without temperature" if abs(temperature - 1) < 5e-3 else "log-probs at another temperature"
            )
        shift = (1 if "late" in names[0].name else -1) if names else 0
        yield (
            f"at temperature {written(temperature, 4)}",
            (*names, *of_t),
            x.roll(shift, 1),
            part if shift <= 0 else part & mask.roll(1, 1),
        )
    n = len(there)
    for shift in (1, -1) if n > 1 else ():
        x = forms.token_logprobs(logits, responses, told or 1.0).roll(shift, 0)
        yield "of another row", wiring("log-probs of another row"), x, mask & mask.roll(shift, 0)
    for temperature in dict.fromkeys([told or 1.0, 1.0]):
        x = forms.token_logprobs(logits, responses, temperature)
        of_k = (there - x)[mask]
        if of_k.numel() and float(of_k.min()) > -1e-3 and float(of_k.mean()) > 1e-3:
            yield from nuclei(logits / temperature, x, there, mask, temperature)
        for f, names in doctor.variants("token_logprobs"):
            if len(names) == 1 and names[0].name in (
                "times temperature",
                "not normalised",
                "divided after the softmax",
            ):
                yield f"at temperature {written(temperature, 4)}", names, f(logits, responses, temperature), mask


def refined(
    logits: Tensor, responses: Tensor, there: Tensor, mask: Tensor, start: float, told: float | None
) -> float:
    """The temperature at which the model is nearest, by Newton's method on its logarithm."""
    t = torch.tensor(start, dtype=torch.float64)

    def error(t: Tensor) -> float:
        return root_mean_square((forms.token_logprobs(logits, responses, float(t)) - there)[mask])

    for _ in range(6):
        here = (forms.token_logprobs(logits, responses, float(t)) - there)[mask]
        slope = ((forms.token_logprobs(logits, responses, float(t) * 1.0001) - there)[mask] - here) / 1e-4
        step = -float((here * slope).sum() / (slope * slope).sum().clamp(min=1e-12))
        new = t * float(torch.tensor(min(max(step, -0.5), 0.5)).exp())
        if not error(new) < error(t):
            break
        t = new
    least = error(t)
    for nice in (*([told] if told else []), *(float(f"{float(t):.{digits}g}") for digits in (1, 2, 3))):
        if error(torch.tensor(nice)) <= 1.02 * least + 1e-5:
            return nice
    return float(t)


def nuclei(
    logits: Tensor, x: Tensor, there: Tensor, mask: Tensor, temperature: float
) -> Iterator[tuple[str, tuple[Fault, ...], Tensor, Tensor]]:
    """Log-probs among the k likeliest tokens, and within the likeliest that hold a share p."""
    probs = logits.softmax(-1).sort(-1, descending=True).values.cumsum(-1)  # (rows, width, vocabulary)
    lifted = (x - there)[mask].unsqueeze(1) - probs[mask][:, :LARGEST_K].log() * -1
    k = int((lifted**2).mean(0).argmin()) + 1
    x_k = x - probs[..., min(k, probs.shape[-1]) - 1].log()
    yield (
        f"at temperature {written(temperature, 4)}, among the {k} likeliest tokens",
        wiring("log-probs of the sampler's top k"),
        x_k,
        mask,
    )
    for p in (0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995):
        count = (probs < p).sum(-1, keepdim=True).clamp(max=probs.shape[-1] - 1)
        x_p = x - probs.gather(-1, count).squeeze(-1).log()
        yield (
            f"at temperature {written(temperature, 4)}, within the likeliest {p:g}",
            wiring("log-probs of the sampler's nucleus"),
            x_p,
            mask,
        )


def other_precision(model: PreTrainedModel, tokens: Tensor, text: Tensor, context: int) -> Tensor:
    """Logits of the model in bfloat16, or in float32 if it is in bfloat16."""
    kind = next(model.parameters()).dtype
    other = copy.deepcopy(model).to(torch.bfloat16 if kind == torch.float32 else torch.float32)
    return logits_of(other, tokens, text, context).double()
