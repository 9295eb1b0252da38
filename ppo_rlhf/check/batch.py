"""Examine one batch of any trainer: which formula made each array, and where it differs from the reference.

    python -m ppo_rlhf.check --batch dump.safetensors
    python -m ppo_rlhf.check --batch dump.jsonl --model models/policy     # recomputes log-probs, too

dump.py reads the file; doctor.py, advantages.py and losses.py explain its arrays, and recompute.py asks the model.
"""

from collections.abc import Iterator
from pathlib import Path

from ppo_rlhf.check import advantages, losses, recompute
from ppo_rlhf.check.doctor import Doctor, wiring
from ppo_rlhf.check.dump import Batch

TAKEN = {
    "logprobs": "taken as they are; --model recomputes them",
    "ref_logprobs": "taken as they are",
    "new_logprobs": "taken as they are",
    "sampler_logprobs": "taken as they are",
    "values": "taken as they are",
    "new_values": "taken as they are",
    "scores": "taken as they are",
    "groups": "taken as they are",
    "baselines": "taken as they are",
}


def examine(batch: Batch, model: Path | None = None, reference: Path | None = None) -> Doctor:
    """All findings about a batch."""
    doctor = Doctor(batch)
    loaded = recompute.load(model) if model else None
    doctor.check_mask(recompute.end_ids(loaded) if loaded else ())
    doctor.check_logprobs()
    if loaded is not None:
        name = "logprobs" if "logprobs" in batch.arrays else "new_logprobs"
        if name in batch.arrays:
            found = recompute.compare(doctor, name, model, loaded)
            doctor.replace(found)
    if reference is not None and "ref_logprobs" in batch.arrays:
        doctor.replace(recompute.compare(doctor, "ref_logprobs", reference))
    losses.check_ratio(doctor)
    if "rewards" in batch.arrays:
        doctor.check_rewards()
    if "groups" in batch.arrays:
        prompts = advantages.prompts_of(doctor)
        groups = batch.arrays["groups"]
        if prompts is not None and any(prompts[groups == g].unique().numel() > 1 for g in groups.unique()):
            doctor.add("groups", names=list(wiring("groups over the wrong rows")))
    made = advantages.check_advantages(doctor) if "advantages" in batch.arrays else None
    if "returns" in batch.arrays:
        advantages.check_returns(doctor, made)
    if "loss" in batch.arrays:
        losses.check_loss(doctor)
    if "value_loss" in batch.arrays:
        losses.check_value_loss(doctor)
    if "advantages_grad" in batch.arrays and batch.arrays["advantages_grad"].any():
        doctor.add("advantages_grad", names=list(wiring("advantages are not detached")))
    return doctor


def lines_of(doctor: Doctor) -> Iterator[str]:
    """What is printed: how each array was made, then what differs, then what is not explained."""
    batch = doctor.batch
    done = {finding.array for finding in doctor.findings}
    width = max(map(len, [*done, *batch.arrays]), default=0)
    for finding in doctor.findings:
        if finding.words:
            gap = f": largest difference {finding.gap:.1e}" if finding.gap is not None else ""
            yield f"{finding.array:{width}}  {finding.words}{gap}"
    for name in batch.arrays:
        if name not in done and name in TAKEN:
            yield f"{name:{width}}  {TAKEN[name]}"
    for finding in doctor.findings:
        if finding.lacks:
            yield f"Not explained: {finding.array}. It would need {finding.lacks}."
        if finding.unexplained:
            where = f" ({finding.where})" if finding.where else ""
            yield f"Not explained: {finding.array}; {finding.unexplained}{where}."
        for name in finding.names:
            kind = "Perhaps" if finding.asks else "Choice" if name.choice else "Fault"
            where = f" Seen best at {finding.where}." if finding.where and not name.choice else ""
            yield f"{kind} in {finding.array}: {name.name}. {name.says}{where} [{name.mark}] {name.page}"
    if batch.unread:
        yield f"Not read, because the names are not known: {', '.join(map(str, batch.unread))}."
    yield doctor.verdict()
