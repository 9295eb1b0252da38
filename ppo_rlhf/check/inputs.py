"""What the mask and the log-probs of a dump show, which no formula makes: see doctor.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ppo_rlhf.check import dump
from ppo_rlhf.check.doctor import Doctor, last_columns, root_mean_square, wiring
from ppo_rlhf.report.derivation import written

LOGPROBS = ("logprobs", "ref_logprobs", "new_logprobs", "sampler_logprobs")


# ---- The mask --------------------------------------------------------------------------------------------------


def check_mask(doctor: Doctor, end_ids: Sequence[int] = ()) -> None:
    """Compare the mask with what the token ids show: padding, the end token, prompts, tools."""
    batch, mask, pad = doctor.batch, doctor.mask, dump.pad_of(doctor.batch)
    told = [int(batch.settings["eos_id"])] if "eos_id" in batch.settings else []
    ends = torch.tensor([*end_ids, *told], dtype=batch.tokens.dtype)
    last = last_columns(mask)
    token, before = in_columns(batch.responses, last), in_columns(batch.responses, last - 1)
    short = mask.any(1) & (last < mask.shape[1] - 1)  # rows that end before the last column
    text, beyond = batch.responses != pad, mask & False
    if batch.settings["has_attention"]:
        text = batch.is_text[:, -mask.shape[1] :]
        beyond = mask & ~text
    is_end, is_pad = torch.isin(token, ends), (token == pad) & (mask.sum(1) > 1)
    lacks_end = one_is_left(mask, text, short) or (short.any() and pad in ends and not is_end[short].any())
    # The last token is padding: the one before is the end, or log-probs are a filling there.
    is_over = short.any() and is_pad[short].all()
    is_known = torch.isin(before[short], ends).all() or is_filled(doctor, last, short)
    if lacks_end:
        doctor.true_mask = mask | doctor.following(mask)
    elif beyond.any():
        doctor.true_mask = mask & ~beyond
    elif is_over and is_known:
        doctor.true_mask = mask & ~doctor.only_last(mask)
    elif is_over and not len(ends) and short.sum() > 2 and before[short].unique().numel() == 1:
        doctor.add("mask", names=wiring("the mask is one too long"), asks=True)
    shown = {
        "the mask is without the end": lacks_end,
        "the mask is one too long": beyond.any() or (is_over and is_known),
        "the mask includes the prompt": includes_prompt(doctor),
        "the mask includes tokens of tools": includes_tools(doctor),
    }
    names = wiring(*(name for name, is_so in shown.items() if is_so))
    words = f"{mask.sum()} tokens in {mask.any(1).sum()} responses"
    words += f"; {is_end.sum()} of them end with an end token" if len(ends) else ""
    row = int(short.byte().argmax())
    doctor.add("mask", words, names=names, where=f"row {row} counts up to token {last[row]}, id {token[row]}")


def in_columns(x: Tensor, columns: Tensor) -> Tensor:
    """The entry of each row in a column of its own, the first for those before it: (rows,)."""
    return x.gather(1, columns.clamp(min=0).unsqueeze(1))[:, 0]


def one_is_left(mask: Tensor, text: Tensor, short: Tensor) -> bool:
    """Whether one token of text is after the mask in most rows, and none has more."""
    last = last_columns(mask)
    after = text & (torch.arange(mask.shape[1]) > last.unsqueeze(1))
    is_next = (after == Doctor.following(mask)).all(1)[short]
    has_room = (last[short] < mask.shape[1] - 2).any()
    return bool(has_room and (after.sum(1) <= 1).all() and is_next.sum() * 2 > len(is_next))


def is_filled(doctor: Doctor, last: Tensor, short: Tensor) -> bool:
    """Whether log-probs are the same at the end of all short rows."""
    there = [doctor.arrays[name] for name in LOGPROBS[:2] if name in doctor.arrays and short.sum() > 1]
    return bool(there) and all(in_columns(x, last)[short].unique().numel() == 1 for x in there)


def includes_prompt(doctor: Doctor) -> bool:
    """Whether the mask counts tokens of the prompt, where both are in the same columns."""
    batch, mask = doctor.batch, doctor.mask
    starts = in_columns(mask, batch.is_text.byte().argmax(1)) & (batch.settings["ids_name"] in dump.WHOLE)
    prompt = mask[:, : batch.settings["context_length"]]
    return not batch.has_context and bool(prompt.any() or starts.all())


def includes_tools(doctor: Doctor) -> bool:
    """Whether the mask counts tokens that the policy did not sample."""
    sampled = doctor.arrays.pop("tool_mask", None)
    if sampled is None and doctor.has("sampler_logprobs", "logprobs"):  # engines write 0 where they did not sample
        sampled = (doctor.arrays["sampler_logprobs"] != 0) | (doctor.arrays["logprobs"] >= -0.1)
    return sampled is not None and bool((doctor.mask & (sampled < 0.5)).any())


# ---- Log-probs -------------------------------------------------------------------------------------------------


def check_logprobs(doctor: Doctor) -> None:
    """Compare the log-probs in the dump with each other."""
    mask, found = doctor.mask, doctor.arrays
    names = [name for name in LOGPROBS if name in found]
    for name in names:
        above = mask & (found[name] > 1e-3)
        if above.any():
            where = doctor.place(name, 0 * found[name], above).split(", the")[0]
            doctor.add(name, names=wiring("log-probs above 0"), where=where)
    for name in names:
        kind = "reference log-probs" if name == "ref_logprobs" else "log-probs"
        others = [other for other in names if other != name]
        # Of two arrays, the reference is right.
        is_late = len(others) > (name == "ref_logprobs") and all(moves(doctor, name, x) for x in others)
        is_early = len(others) > (name == "ref_logprobs") and all(moves(doctor, x, name) for x in others)
        if is_late or is_early:
            where = versus(doctor, name, others[0], -1 if is_late else 1)
            doctor.add(name, names=wiring(f"{kind} one token {'late' if is_late else 'early'}"), where=where)
        elif others and all(is_of_other_rows(doctor, name, x) for x in others):
            doctor.add(name, names=wiring("log-probs of another row"))
            break
    if doctor.has("logprobs", "ref_logprobs") and mask.any():
        check_reference(doctor)
    if doctor.has("logprobs", "sampler_logprobs"):
        check_sampler(doctor)


def moves(doctor: Doctor, name: str, other: str) -> bool:
    """Whether one array is nearer to another if it is moved to the token before."""
    x, y, mask = doctor.arrays[name], doctor.arrays[other], doctor.mask
    apart, both = root_mean_square((x - y)[mask]), mask[:, 1:] & mask[:, :-1]
    moved = root_mean_square((x[:, 1:] - y[:, :-1])[both])
    return bool(both.sum() > 4 and apart > 0.1 and moved < 0.3 * apart)


def is_of_other_rows(doctor: Doctor, name: str, other: str) -> bool:
    """Whether most rows of an array are those of another one in another order."""
    x, y, mask = doctor.arrays[name], doctor.arrays[other], doctor.mask
    if len(mask) < 3 or root_mean_square((x - y)[mask]) <= 0.5:
        return False
    fits = 0
    for row in range(len(mask)):
        both = mask[row] & mask
        squares = ((x[row] - y) ** 2).masked_fill(~both, 0).sum(1) / both.sum(1)
        gaps = squares.sqrt().nan_to_num(torch.inf)  # to each row of y
        fits += bool(gaps.min() < 0.3 * gaps[row])
    return fits * 2 > len(mask)


def versus(doctor: Doctor, name: str, other: str, shift: int) -> str:
    """Where a shifted array is farthest from another one, and what fits there."""
    x, y = doctor.arrays[name], doctor.arrays[other]
    moved = y.roll(-shift, 1)
    gap = ((x - y).abs() - (x - moved).abs()).masked_fill(~doctor.mask, -1)
    gap[:, 0 if shift < 0 else -1] = -1
    row, column = divmod(int(gap.argmax()), gap.shape[1])
    is_, has, fits = (written(float(z[row, column]), 4) for z in (x, y, moved))
    return f"row {row}, token {column}: {is_}; {other} has {has} there, and {fits} at token {column + shift}"


def check_reference(doctor: Doctor) -> None:
    """Say how far the policy is from the reference, unless the reference's log-probs are wrong."""
    if any(finding.array == "ref_logprobs" for finding in doctor.findings):
        return
    gap = (doctor.arrays["logprobs"] - doctor.arrays["ref_logprobs"])[doctor.mask]
    step = doctor.batch.settings.get("step")
    names = wiring("the reference is the policy") if doctor.is_reference("logprobs") and step != 0 else ()
    words = f"KL from logprobs: {written(float(gap.mean()), 3)} nats per token"
    doctor.add("ref_logprobs", words, names=names, asks=step is None)


def check_sampler(doctor: Doctor) -> None:
    """Compare the sampler's log-probs with the training pass's, unless they are wrong."""
    sampler = doctor.arrays["sampler_logprobs"]
    gap = (sampler - doctor.arrays["logprobs"])[doctor.mask & (sampler != 0)]
    if not gap.numel() or any(finding.array == "sampler_logprobs" for finding in doctor.findings):
        return
    is_larger = gap.numel() > 9 and float(gap.min()) > -1e-3 and float(gap.mean()) > 0.01
    words = f"logprobs + noise of {written(root_mean_square(gap), 2)} nats" if gap.any() else "equal to logprobs"
    doctor.add("sampler_logprobs", words, names=wiring("log-probs of the sampler's nucleus") if is_larger else ())
