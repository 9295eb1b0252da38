"""Examine one batch of any trainer: which formula made each array, and where it differs from the reference.

    python -m ppo_rlhf.check --batch dump.safetensors
    python -m ppo_rlhf.check --batch dump.jsonl --model models/policy     # recomputes log-probs, too

dump.py reads the file. inputs.py looks at the mask and the log-probs, which recompute.py compares with the model.
rewards.py, advantages.py and losses.py explain the other arrays by the candidates that doctor.py judges.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from ppo_rlhf.check import advantages, inputs, losses, recompute, rewards
from ppo_rlhf.check.doctor import Doctor, Finding, wiring
from ppo_rlhf.check.dump import Batch

TAKEN = (*inputs.LOGPROBS, "values", "new_values", "scores", "groups", "baselines")


def examine(batch: Batch, model: Path | None = None, reference: Path | None = None) -> Doctor:
    """All findings about a batch."""
    doctor = Doctor(batch)
    loaded = recompute.load(model) if model else None
    inputs.check_mask(doctor, recompute.end_ids(loaded) if loaded else ())
    if batch.unscored is not None:
        none, rows = int(batch.unscored.sum()), len(batch.unscored)
        doctor.add("scores", f"NaN for {none} of {rows} responses: nothing judged them")
    for name in batch.not_finite:
        doctor.add(name, names=wiring("not finite"))
    inputs.check_logprobs(doctor)
    policy = "logprobs" if doctor.has("logprobs") else "new_logprobs"
    if loaded is not None and doctor.has(policy):
        replace(doctor, recompute.compare(doctor, policy, model, loaded))
    if reference is not None and doctor.has("ref_logprobs"):
        replace(doctor, recompute.compare(doctor, "ref_logprobs", reference))
    losses.check_ratio(doctor)
    if doctor.has("rewards"):
        rewards.check_rewards(doctor)
    if doctor.has("groups"):
        check_groups(doctor)
    made = advantages.check_advantages(doctor) if doctor.has("advantages") else None
    if doctor.has("returns"):
        advantages.check_returns(doctor, made)
    if doctor.has("loss"):
        losses.check_loss(doctor)
    settle_penalty(doctor)
    if doctor.has("value_loss"):
        losses.check_value_loss(doctor)
    if doctor.has("advantages_grad") and batch.arrays["advantages_grad"].any():
        doctor.add("advantages_grad", names=wiring("advantages are not detached"))
    return doctor


def replace(doctor: Doctor, finding: Finding) -> None:
    """Say what the model shows of an array, in place of what a comparison of arrays has said."""

    def stays(other: Finding) -> bool:
        return other.array != finding.array or bool(other.names and not other.asks and not finding.names)

    doctor.findings = [*filter(stays, doctor.findings), finding]


def settle_penalty(doctor: Doctor) -> None:
    """Whether a penalty that the rewards do not hold is in the loss, if the dump shows it."""
    lost = wiring("without a penalty")
    losses_of = [finding.words for finding in doctor.findings if finding.array == "loss" and finding.words]
    is_there = any(re.search(r"\bk[123]\b|KL", words) for words in losses_of)
    for finding in [finding for finding in doctor.findings if lost[0] in finding.names]:
        if is_there or not losses_of:
            finding.names = [name for name in finding.names if name not in lost]
        if not losses_of and doctor.has("values"):  # without a critic, the loss has it nearly always
            doctor.add("rewards", names=lost, asks=True, where="the loss, which may have it, but does not show it")


def check_groups(doctor: Doctor) -> None:
    """Whether the responses of each group answer one prompt."""
    prompts, groups = doctor.batch.prompts, doctor.arrays["groups"]
    if prompts is not None and any(prompts[groups == g].unique().numel() > 1 for g in groups.unique()):
        doctor.add("groups", names=wiring("groups over the wrong rows"))


def lines_of(doctor: Doctor) -> Iterator[str]:
    """What is printed: how each array was made, then what differs, then what is not explained."""
    arrays, unread = doctor.batch.arrays, doctor.batch.unread
    done = {finding.array for finding in doctor.findings}
    width = max(map(len, [*done, *arrays]), default=0)
    for finding in doctor.findings:
        if finding.words:
            gap = f": largest difference {finding.gap:.1e}" if finding.gap is not None else ""
            yield f"{finding.array:{width}}  {finding.words}{gap}"
    for name in arrays:
        if name not in done and name in TAKEN:
            yield f"{name:{width}}  input, not checked{'; --model recomputes them' if name == 'logprobs' else ''}"
    for finding in doctor.findings:
        if finding.lacks:
            yield f"Not explained: {finding.array}. It would need {finding.lacks}."
        if finding.unexplained:
            where = f" ({finding.where})" if finding.where else ""
            yield f"Not explained: {finding.array}; {finding.unexplained}{where}."
        for name in finding.names:
            kind = "Choice" if name.choice else "Perhaps" if finding.asks else "Fault"
            where = f" Seen best at {finding.where}." if finding.where and not name.choice else ""
            yield f"{kind} in {finding.array}: {name.name}. {name.says}{where} [{name.mark}] {name.page}"
    if unread:
        yield f"Not read, because the names are not known: {', '.join(map(str, unread))}."
    yield doctor.verdict()
