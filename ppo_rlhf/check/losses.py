"""Which formula made the losses of a dump, and whether ratios are what they must be: see doctor.py."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from ppo_rlhf.check import faults, forms
from ppo_rlhf.check.doctor import Arrays, Candidate, Doctor, root_mean_square, wiring
from ppo_rlhf.check.faults import Fault
from ppo_rlhf.report.derivation import written
from ppo_rlhf.rlvr import algebra

RANGES = [(0.2, 0.2), (0.2, 0.28), (0.1, 0.1), (0.3, 0.3), (3e-4, 4e-4)]
MODES: dict[str, tuple[Fault, ...]] = {
    "token-mean": (),
    "seq-mean-token-mean": tuple(fault for fault in faults.of("policy_loss") if fault.choice),
    "seq-mean-token-sum": wiring("a sum over tokens"),
    "seq-mean-token-sum-norm": wiring("divided by the width"),
}
NEVER = wiring("the clip never acts")
FAR = 0.3  # nats per token: farther than an update moves a policy
KINDS = ("ppo", "gspo", "cispo", "reinforce")
COEFFICIENTS = [digit * 10.0**power for power in range(-4, 1) for digit in (1, 2, 4, 5)]


def check_ratio(doctor: Doctor) -> None:
    """Whether the ratio is 1, or near it."""
    found, mask, settings = doctor.arrays, doctor.mask, doctor.batch.settings
    names = [name.name for f in doctor.findings if f.array in ("new_logprobs", "logprobs") for name in f.names]
    if not {"new_logprobs", "logprobs"} <= found.keys() or not mask.any() or any("one token" in x for x in names):
        return
    gap, ratio = (found["new_logprobs"] - found["logprobs"])[mask], ratios(found)[mask]
    eps = max(doctor.batch.eps[name] for name in ("new_logprobs", "logprobs"))
    is_one = float(gap.abs().max()) <= 1e-4 + 2 * eps * float(found["logprobs"][mask].abs().max())
    is_wrong = not is_one and (settings.get("first") == 1 or root_mean_square(gap) > FAR)
    words = "1" if is_one else f"from {written(float(ratio.min()), 3)} to {written(float(ratio.max()), 3)}"
    if not is_one and not is_wrong and "first" not in settings:
        words += "; before the first step, it must be 1"
    doctor.add(
        "new_logprobs",
        f"the ratio to logprobs is {words}",
        names=list(wiring("the ratio is not 1")) if is_wrong else [],
        where=doctor.place("new_logprobs", found["logprobs"], mask) if is_wrong else "",
    )
    if "ratio" in found:
        best = Candidate(words="exp(new_logprobs - logprobs)", predict=ratios)
        _, far, is_right = doctor.choose("ratio", [best], mask)
        names = () if is_right else wiring("the ratio of other log-probs")
        doctor.explained("ratio", dataclasses.replace(best, names=names), far, ratios, mask)


def ratios(a: Arrays, old: str = "logprobs") -> Tensor:
    return (a["new_logprobs"] - a[old]).exp()


# ---- The policy's loss -----------------------------------------------------------------------------------------


def losses_by_token(doctor: Doctor, old: str, low: float, high: float) -> Iterator[Candidate]:
    """Losses of the policy by token, with the bounds 1 - low and 1 + high."""

    def predict(a: Arrays, kind: str) -> Tensor:
        new, advantages = a["new_logprobs"], a["advantages"]
        return algebra.token_losses(new, a[old], advantages, doctor.mask, kind, low=low, high=high)[0]

    for kind in KINDS:
        words = f"{kind} with the bounds {low:g} and {high:g}"
        names = wiring("another loss") if kind != "ppo" else ()
        yield Candidate(words=words, predict=partial(predict, kind=kind), names=names)
    yield Candidate(words="-A * ratio", predict=lambda a: -a["advantages"] * ratios(a, old), names=NEVER)


def aggregated(losses: Candidate, mask: Tensor, mode: str) -> Candidate:
    """One number from losses by token."""
    return Candidate(
        words=f"{losses.words}, {mode}",
        predict=lambda a: forms.aggregate(losses.predict(a), mask, mode),
        names=(*losses.names, *MODES[mode]),
    )


def policy_losses(doctor: Doctor) -> Iterator[Candidate]:
    """Losses of the policy as one number, or by token."""
    mask, told = doctor.mask, doctor.batch.settings.get("cliprange")
    old = "logprobs" if "logprobs" in doctor.arrays else "new_logprobs"

    def predict(a: Arrays, f: Callable, low: float, high: float) -> Tensor:
        return f(a["new_logprobs"], a[old], a["advantages"], mask, low, high)

    for low, high in [(told, told)] if told else RANGES:
        by_token = list(losses_by_token(doctor, old, low, high))
        if doctor.arrays["loss"].ndim == 2:
            yield from by_token
            continue
        yield from (aggregated(losses, mask, mode) for losses, mode in itertools.product(by_token, MODES))
        for f, names in doctor.variants("policy_loss"):
            if not all(name.choice for name in names):  # those are above
                yield Candidate(
                    words=f"ppo with the bounds {low:g} and {high:g}",
                    predict=partial(predict, f=f, low=low, high=high),
                    names=tuple(NEVER[0] if name.name == "without a clip" else name for name in names),
                )


def additions(doctor: Doctor) -> Iterator[Candidate]:
    """What else may be in the loss: the KL, and the critic's."""
    found, mask = doctor.arrays, doctor.mask
    is_penalised = any(f.array == "rewards" and " * (" in f.words for f in doctor.findings)
    names = wiring("KL in reward and loss") if is_penalised else ()

    def kl(a: Arrays, name: str) -> Tensor:
        return forms.kl_estimate(a["new_logprobs"], a["ref_logprobs"], mask, name)

    for name, mode in itertools.product(("k3", "k1", "k2"), list(MODES)[:2]) if "ref_logprobs" in found else ():
        by_token = Candidate(words=name, predict=partial(kl, name=name))
        yield dataclasses.replace(aggregated(by_token, mask, mode), names=names)
    if {"new_values", "values", "returns"} <= found.keys():
        critic = lambda a: forms.value_loss(a["new_values"], a["values"], a["returns"], mask)  # noqa: E731
        yield Candidate(words="the critic's loss", predict=critic)


def with_additions(doctor: Doctor, losses: list[Candidate]) -> Iterator[Candidate]:
    """Losses of the policy with a KL or the critic's loss, whose coefficient is a number with one digit."""
    loss = float(doctor.arrays["loss"])
    told = doctor.batch.settings.get("kl_coef")
    for base, extra in itertools.product(losses, additions(doctor)):
        size, rest = float(extra.predict(doctor.arrays)), loss - float(base.predict(doctor.arrays))
        for c in [told, *COEFFICIENTS] if told else COEFFICIENTS:
            is_near = abs(c * size - rest) < 2e-5 * max(abs(loss), abs(c * size))
            if size and is_near and (not base.is_wrong or NEVER[0] in base.names):
                yield plus(base, extra, c)
                break


def plus(base: Candidate, extra: Candidate, c: float) -> Candidate:
    """A loss with c times another one."""
    return Candidate(
        words=f"{base.words}, + {c:g} * {extra.words}",
        predict=lambda a: base.predict(a) + c * extra.predict(a),
        names=(*base.names, *extra.names),
    )


def check_loss(doctor: Doctor) -> None:
    """Explain the policy's loss, and its gradient."""
    found, mask = doctor.arrays, doctor.mask
    assumed = "new_logprobs" not in found
    if "advantages" not in found or (assumed and "logprobs" not in found):
        doctor.add("loss", lacks="advantages and new_logprobs")
        return
    if assumed:
        found["new_logprobs"] = found["logprobs"]
    where = mask if found["loss"].ndim == 2 else torch.ones((), dtype=torch.bool)
    gap = (found["new_logprobs"] - found.get("logprobs", found["new_logprobs"]))[mask].abs()
    losses = [c for c in policy_losses(doctor) if float(gap.max()) >= 1e-4 or NEVER[0] not in c.names]
    fits = doctor.fitting("loss", losses, where)
    if not fits and found["loss"].ndim == 0:
        fits = doctor.fitting("loss", with_additions(doctor, losses), where)
    if not fits:
        best, far, _ = doctor.choose("loss", losses, where)
        by_token = "" if found["loss"].ndim else "losses by token, because one number fits many formulas"
        doctor.unexplained("loss", best, far, "new_logprobs" if assumed else by_token, where)
        return
    say_which(doctor, losses[0], fits, where)
    if "gradient" in found:
        check_gradient(doctor, fits[0])


def say_which(doctor: Doctor, reference: Candidate, fits: list[Candidate], where: Tensor) -> None:
    """Say which loss fits, and which mistakes one number cannot exclude."""
    best, wrong = fits[0], [c for c in fits if c.is_wrong]
    is_reference = best.words == reference.words and not best.names
    if is_reference:  # a mistake that changes nothing here is none
        value = best.predict(doctor.arrays)
        least = 1e-5 * value.abs().max()
        wrong = [c for c in wrong if (c.predict(doctor.arrays) - value).abs().max() > least]
    names = dict.fromkeys(name for c in wrong for name in c.names if not name.choice and name not in best.names)
    words = f"{best.words}; {len(wrong)} formulas with a mistake fit as well" if names else best.words
    gap = float(doctor.gap("loss", best, where).abs().max())
    doctor.add("loss", words, gap=gap, names=list(best.names))
    if names and not is_reference:
        doctor.add("loss", names=list(names)[:3], asks=True)


def check_gradient(doctor: Doctor, best: Candidate) -> None:
    """Compare the gradient by new log-probs with that of the formula that explains the loss."""
    found, mask = doctor.arrays, doctor.mask
    leaf = found["new_logprobs"].clone().requires_grad_()
    (expected,) = torch.autograd.grad(best.predict(found | {"new_logprobs": leaf}).sum(), leaf)
    candidate = Candidate(words="the gradient of that loss", predict=lambda a: expected)
    _, gap, _ = doctor.choose("gradient", [candidate], mask)
    ok = gap <= 1e-4 * float(expected.abs().max()) + 2 * doctor.batch.eps["gradient"] * float(
        found["gradient"][mask].abs().max()
    )
    if ok:
        doctor.add("gradient", candidate.words, gap=gap)
        return
    nothing = float(found["gradient"][mask].abs().max()) < 1e-9 < float(expected.abs().max())
    name = "the loss has no gradient" if nothing else "advantages are not detached"
    doctor.add(
        "gradient",
        "not that of the loss",
        gap=gap,
        names=list(wiring(name)),
        where=doctor.place("gradient", expected, mask),
    )


def value_losses(doctor: Doctor) -> Iterator[Candidate]:
    """Losses of the critic, on tokens, or on the step after the end, too."""
    mask, told = doctor.mask, doctor.batch.settings.get("cliprange")
    new = "new_values" if "new_values" in doctor.arrays else "values"

    def predict(a: Arrays, f: Callable, m: Tensor, bound: float) -> Tensor:
        return f(a[new], a["values"], a["returns"], m, bound)

    further = mask | doctor.following(mask)
    for (m, after), bound in itertools.product(
        ((mask, ""), (further, ", the step after the end too")), [*([told] if told else []), 0.2, 0.5, math.inf]
    ):
        clipped = f", clipped to {bound:g}" if bound < math.inf else ""
        for f, names in doctor.variants("value_loss"):
            if m is mask or not names or names[0].name == "without its half":
                words = f"half the squared error{clipped}{after}"
                yield Candidate(words=words, predict=partial(predict, f=f, m=m, bound=bound), names=names)


def check_value_loss(doctor: Doctor) -> None:
    """Explain the critic's loss."""
    found = doctor.arrays
    if not {"values", "returns"} <= found.keys():
        doctor.add("value_loss", lacks="values and returns")
    elif found["value_loss"].ndim:
        doctor.add("value_loss", lacks="one number")
    else:
        best, gap, is_explained = doctor.choose("value_loss", value_losses(doctor), torch.ones((), dtype=torch.bool))
        if is_explained:
            doctor.add("value_loss", best.words, gap=gap, names=list(best.names))
        else:
            doctor.add("value_loss", lacks="new_values, or the coefficient")
