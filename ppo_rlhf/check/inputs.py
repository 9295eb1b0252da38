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
    batch, mask = doctor.batch, doctor.mask
    told = [int(batch.settings["eos_id"])] if "eos_id" in batch.settings else []
    ends = torch.tensor([*end_ids, *told], dtype=batch.tokens.dtype)
    pad, last = pad_of(doctor), last_columns(mask)
    token, before = in_columns(batch.responses, last), in_columns(batch.responses, last - 1)
    short = mask.any(1) & (last < mask.shape[1] - 1)  # rows that end before the last column
    padding = (batch.responses == pad).flip(1).cumprod(1).flip(1).bool()  # that the ids show
    text, shown = batch.responses != pad, ~padding
    if len(ends) == 0 or pad in ends or "pad_id" not in batch.settings:  # the first of them may be the end
        shown |= padding & (padding.cumsum(1) == 1)
    if batch.settings["has_attention"]:
        text = shown = batch.is_text[:, -mask.shape[1] :]
    beyond = mask & ~shown
    is_end, is_pad = torch.isin(token, ends), (token == pad) & (mask.sum(1) > 1)
    is_left = one_is_left(mask, text, short)
    lacks_end = is_left or (short.any() and pad in ends and not is_end[short].any())
    # Two cases are doubtful. Every array may stand one column before its token, as in AReaL. And if the end token has
    # the id of padding, the response may have been cut off without it.
    is_moved_left = not batch.has_context and not mask[:, [0, -1]].any() and text[:, -1].any()
    is_doubtful = lacks_end and (is_moved_left or not is_left)
    # The last token is padding: the one before is the end, or log-probs are a filling there.
    is_over = short.any() and is_pad[short].all()
    is_known = torch.isin(before[short], ends).all() or is_filled(doctor, last, short)
    if is_over and not len(ends) and short.sum() > 2 and before[short].unique().numel() == 1:
        # A token that is nowhere else ends the responses.
        end = before[short][0]
        at_end = torch.stack([before, token])[:, ~short] == end
        is_known |= (batch.tokens == end).sum() == short.sum() + at_end.sum()
        if not is_known:
            doctor.add("mask", names=wiring("the mask is one too long"), asks=True)
    is_moved = is_of_another_row(mask, padding)
    if is_moved or is_doubtful:
        doctor.true_mask = mask
    elif lacks_end:
        doctor.true_mask = mask | doctor.following(mask)
    elif beyond.any():
        doctor.true_mask = mask & ~beyond
    elif is_over and is_known:
        doctor.true_mask = mask & ~doctor.only_last(mask)
    is_wide = int(beyond.sum(1).max()) > 1
    inside, outside = (batch.responses[there].unique().numel() for there in (mask, ~mask))
    is_inverted = mask.sum() > 3 and inside == 1 < outside
    if is_inverted:
        doctor.true_mask = mask
    names = {
        "the mask is upside down": is_inverted,
        "the mask of another row": is_moved,
        "the mask is without the end": lacks_end and not (is_moved or is_doubtful),
        "the mask includes padding": is_wide and not is_moved,
        "the mask is one too long": (beyond.any() or (is_over and is_known)) and not (is_wide or is_moved),
        "the mask is without the first token": lacks_first(doctor),
        "the mask includes the prompt": includes_prompt(doctor),
        "the mask includes tokens of tools": includes_tools(doctor),
    }
    words = f"{mask.sum()} tokens in {mask.any(1).sum()} responses"
    words += f"; {is_end.sum()} of them end with an end token" if len(ends) else ""
    row = int((beyond.any(1) if beyond.any() else short).byte().argmax())
    where = f"row {row} counts tokens {int(mask[row].byte().argmax())} to {last[row]}, whose id is {token[row]}"
    doctor.add("mask", words, names=wiring(*(name for name, is_so in names.items() if is_so)), where=where)
    if is_doubtful and not is_moved:
        other = "each array may stand one column early" if is_left else "the end token has the id of padding"
        doctor.add("mask", names=wiring("the mask is without the end"), asks=True, where=f"{where}; {other}")


def pad_of(doctor: Doctor) -> int:
    """The padding id. If the mask counts every token, it is an id that only ends responses, several times in each."""
    pad, ids = dump.pad_of(doctor.batch), doctor.batch.responses
    if pad >= 0 or not doctor.mask.all() or not ids.numel():
        return pad
    for x in ids[:, -1].unique():
        run = (ids == x).flip(1).cumprod(1).flip(1)
        if (run.sum(1) > 2).sum() > 1 and run.sum() == (ids == x).sum():
            return int(x)
    return pad


def is_of_another_row(mask: Tensor, padding: Tensor) -> bool:
    """Whether responses are as long as the mask says, but in another order."""
    counted, there = last_columns(mask) + 1, (~padding).sum(1)
    for ended in (there, (there + 1).clamp(max=mask.shape[1])):  # the end may have the id of padding
        gap = counted - ended
        if (gap > 0).any() and (gap < 0).any() and counted.sort().values.equal(ended.sort().values):
            return True
    return False


def lacks_first(doctor: Doctor) -> bool:
    """Whether no row counts the first token after the prompts, but each the second."""
    batch, mask = doctor.batch, doctor.mask
    before = batch.is_text[:, : -mask.shape[1]].any(1)
    starts = mask[:, 1] if mask.shape[1] > 1 else mask[:, 0]
    return bool(before.all() and starts.all() and not mask[:, 0].any())


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
        kinds = no_logprobs(found[name], mask)
        if kinds:
            where = doctor.place(name, 0 * found[name], mask).split(", the")[0]
            doctor.add(name, names=wiring(*kinds), where=where)
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
            both = [x for x in names if len(others) > 1 or disagreement(doctor, x) is not False]
            wrong = [x for x in both if disagreement(doctor, x)] or both
            doctor.add(name if len(others) > 1 else " or ".join(wrong), names=wiring("log-probs of another row"))
            break
    if doctor.has("ref_logprobs") and mask.any():
        check_reference(doctor)
    if doctor.has("logprobs", "sampler_logprobs"):
        check_sampler(doctor)
    same = doctor.has("logprobs", "new_logprobs") and (found["logprobs"] == found["new_logprobs"])[mask].all()
    if same and doctor.batch.settings.get("first") == 0 and mask.any():
        doctor.add("new_logprobs", names=wiring("new log-probs are the old ones"))


def no_logprobs(x: Tensor, mask: Tensor) -> list[str]:
    """What numbers are that cannot be the log-probs of tokens."""
    inner, both = x[mask], mask[:, 1:] & mask[:, :-1]
    steps = (x[:, 1:] - x[:, :-1])[both]
    if (inner > 1e-3).any():
        is_probability = len(inner) > 4 and (inner >= 0).all() and (inner <= 1).all()
        is_negative = len(inner) > 4 and (inner >= -1e-3).all()
        return ["probabilities" if is_probability else "negative log-probs" if is_negative else "log-probs above 0"]
    if len(steps) > 9 and (steps <= 0).all() and inner.any():
        return ["one log-prob for the whole response" if not steps.any() else "log-probs added up"]
    return []


def disagreement(doctor: Doctor, name: str) -> bool | None:
    """Whether log-probs differ where prompts and responses are equal up to a token; None if none are."""
    prompts, x, mask, ids = doctor.batch.prompts, doctor.arrays[name], doctor.mask, doctor.batch.responses
    if prompts is None:
        return None
    equal = (ids.unsqueeze(0) == ids.unsqueeze(1)).byte().cumprod(2).bool() & mask & mask.unsqueeze(1)
    equal &= (prompts.unsqueeze(0) == prompts.unsqueeze(1)).triu(1).unsqueeze(2)
    gaps = (x.unsqueeze(0) - x.unsqueeze(1)).abs()[equal]
    return bool((gaps > 0.1).float().mean() > 0.5) if len(gaps) > 2 else None


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
    policy = "logprobs" if doctor.has("logprobs") else "new_logprobs"
    if not doctor.has(policy) or any("ref_logprobs" in finding.array for finding in doctor.findings):
        return
    gap = (doctor.arrays[policy] - doctor.arrays["ref_logprobs"])[doctor.mask]
    step, names = doctor.batch.settings.get("step"), ()
    if doctor.is_reference(policy):
        names = wiring("the reference is the policy") if step != 0 else ()
    elif doctor.is_reference("new_logprobs"):
        names = wiring("the reference is the policy that is trained")
    words = f"the mean of {policy} - ref_logprobs, an estimate of the KL, is {written(float(gap.mean()), 3)} nats"
    doctor.add("ref_logprobs", words, names=names, asks=step is None and doctor.is_reference(policy))


def check_sampler(doctor: Doctor) -> None:
    """Compare the sampler's log-probs with the training pass's, unless one of them is wrong."""
    sampler, logprobs = doctor.arrays["sampler_logprobs"], doctor.arrays["logprobs"]
    there = doctor.mask & (sampler != 0)
    x, y = logprobs[there], sampler[there]
    wrong = {finding.array for finding in doctor.findings if finding.names}
    if not len(x) or wrong & {"sampler_logprobs", "logprobs"}:
        return
    gap, factor = y - x, float((x * y).sum() / (x * x).sum().clamp(min=1e-30))
    is_near = root_mean_square(y - factor * x) < 0.3 * root_mean_square(gap)
    is_scaled = len(x) > 9 and abs(factor - 1) > 0.1 and is_near
    is_larger = len(x) > 9 and float(gap.min()) > -1e-3 and float(gap.mean()) > 0.01
    words = f"logprobs + noise of {written(root_mean_square(gap), 2)} nats" if gap.any() else "equal to logprobs"
    words = f"{written(factor, 3)} * logprobs" if is_scaled else words
    names = ("the sampler's log-probs times a factor",) if is_scaled else ("log-probs of the sampler's nucleus",)
    doctor.add("sampler_logprobs", words, names=wiring(*names) if is_scaled or is_larger else ())
