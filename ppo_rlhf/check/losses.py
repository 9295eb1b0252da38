"""Which formula made the losses of a dump, and whether ratios are what they must be: see doctor.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ppo_rlhf.check import forms
from ppo_rlhf.check.doctor import Arrays, Candidate, Doctor, root_mean_square, wiring
from ppo_rlhf.report.derivation import written
from ppo_rlhf.rlvr import algebra

RANGES = [(0.2, 0.2), (0.2, 0.28), (0.1, 0.1), (0.3, 0.3), (3e-4, 4e-4)]
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
FAR = 0.3  # nats per token: farther than an update moves a policy
COEFFICIENTS = [digit * 10.0**power for power in range(-4, 1) for digit in (1, 2, 4, 5)]


def check_ratio(doctor: Doctor) -> None:
    """Whether the ratio is 1, or near it."""
    found, mask = doctor.arrays, doctor.mask
    if {"new_logprobs", "logprobs"} <= found.keys() and mask.any():
        gap = found["new_logprobs"] - found["logprobs"]
        said = [f for f in doctor.findings if f.array in ("new_logprobs", "logprobs")]
        if any("one token" in name.name for f in said for name in f.names):
            return
        largest, size = float(gap[mask].abs().max()), root_mean_square(gap[mask])
        rounding = 1e-4 + 2 * max(doctor.batch.eps[name] for name in ("new_logprobs", "logprobs")) * float(
            found["logprobs"][mask].abs().max()
        )
        ratio = gap[mask].exp()
        is_first = doctor.batch.settings.get("first") == 1
        names = wiring("the ratio is not 1") if largest > rounding and (is_first or size > FAR) else ()
        words = (
            "the ratio to logprobs is 1"
            if largest <= rounding
            else f"the ratio to logprobs is from {written(float(ratio.min()), 3)} to {written(float(ratio.max()), 3)}"
        )
        if largest > rounding and not names and "first" not in doctor.batch.settings:
            words += "; before the first step, it must be 1"
        doctor.add(
            "new_logprobs",
            words,
            names=list(names),
            where=doctor.place("new_logprobs", found["logprobs"], mask) if names else "",
        )
        if "ratio" in found:
            best, far, ok = doctor.choose(
                "ratio",
                [
                    Candidate(
                        words="exp(new_logprobs - logprobs)",
                        predict=lambda a: (a["new_logprobs"] - a["logprobs"]).exp(),
                    )
                ],
                mask,
            )
            doctor.add(
                "ratio",
                best.words,
                gap=far,
                names=[] if ok else list(wiring("the ratio of other log-probs")),
                where="" if ok else doctor.place("ratio", best.predict, mask),
            )


def clip_ranges(doctor: Doctor) -> list[tuple[float, float]]:
    told = doctor.batch.settings.get("cliprange")
    return [(told, told)] if told else RANGES


def policy_losses(doctor: Doctor) -> Iterator[Candidate]:
    """Losses of the policy as one number, or by token."""
    by_token = doctor.arrays["loss"].ndim == 2
    mask = doctor.mask
    old = "logprobs" if "logprobs" in doctor.arrays else "new_logprobs"
    for low, high in clip_ranges(doctor):
        for kind in ("ppo", "gspo", "cispo", "reinforce"):
            for mode in ("",) if by_token else MODES:

                def predict(a: Arrays, kind=kind, mode=mode, low=low, high=high) -> Tensor:
                    losses, _, _ = algebra.token_losses(
                        a["new_logprobs"], a[old], a["advantages"], mask, kind, low=low, high=high
                    )
                    return losses if by_token else forms.aggregate(losses, mask, mode)

                yield Candidate(
                    words=f"{kind} with the bounds {low:g} and {high:g}, {mode}".strip(", "), predict=predict
                )
        for f, names in doctor.variants("policy_loss") if not by_token else ():
            if len(names) == 1 and not any(n.name in ("whitens",) for n in names):
                names = wiring("the clip never acts") if names[0].name == "without a clip" else names

                def predict(a: Arrays, f=f, low=low, high=high) -> Tensor:
                    return f(a["new_logprobs"], a[old], a["advantages"], mask, low, high)

                yield Candidate(
                    words=f"ppo with the bounds {low:g} and {high:g}, token-mean", predict=predict, names=names
                )
        for mode in MODES if not by_token else ():

            def unclipped(a: Arrays, mode=mode) -> Tensor:
                return forms.aggregate(-a["advantages"] * (a["new_logprobs"] - a[old]).exp(), mask, mode)

            yield Candidate(words=f"-A * ratio, {mode}", predict=unclipped, names=wiring("the clip never acts"))
        if by_token:
            yield Candidate(
                words="-A * ratio",
                predict=lambda a: -a["advantages"] * (a["new_logprobs"] - a[old]).exp(),
                names=wiring("the clip never acts"),
            )


def additions(doctor: Doctor) -> Iterator[tuple[str, Callable[[Arrays], Tensor], tuple]]:
    """What else may be in the loss: the KL, and the critic's."""
    found, mask = doctor.arrays, doctor.mask
    penalised = any(f.array == "rewards" and " * (" in f.words for f in doctor.findings)
    if "ref_logprobs" in found:
        for name, mode in itertools.product(("k3", "k1", "k2"), MODES[:2]):
            yield (
                f"{name}, {mode}",
                lambda a, n=name, m=mode: forms.aggregate(
                    forms.kl_estimate(a["new_logprobs"], a["ref_logprobs"], mask, n), mask, m
                ),
                wiring("KL in reward and loss") if penalised else (),
            )
    if {"new_values", "values", "returns"} <= found.keys():
        yield "the critic's loss", lambda a: forms.value_loss(a["new_values"], a["values"], a["returns"], mask), ()


def check_loss(doctor: Doctor) -> None:
    found, mask = doctor.arrays, doctor.mask
    assumed = "new_logprobs" not in found
    if "advantages" not in found or (assumed and "logprobs" not in found):
        doctor.add("loss", lacks="advantages and new_logprobs")
        return
    if assumed:
        found["new_logprobs"] = found["logprobs"]
    where = mask if found["loss"].ndim == 2 else torch.ones((), dtype=torch.bool)
    plain = list(policy_losses(doctor))
    best, gap, ok = doctor.choose("loss", plain, where)
    if not ok and found["loss"].ndim == 0:
        more = []
        coefficients = [c for c in [doctor.batch.settings.get("kl_coef")] if c] + COEFFICIENTS
        for base in plain:
            if base.names and "clip never" not in base.names[0].name:
                continue
            rest = found["loss"] - base.predict(found)
            for words, extra, names in additions(doctor):
                size = float(extra(found))
                close = [
                    c
                    for c in coefficients
                    if size and abs(c * size - float(rest)) < 2e-5 * max(abs(float(found["loss"])), abs(c * size))
                ]
                more += [
                    Candidate(
                        words=f"{base.words}, + {c:g} * {words}",
                        predict=lambda a, b=base, e=extra, c=c: b.predict(a) + c * e(a),
                        names=(*base.names, *names),
                    )
                    for c in close[:1]
                ]
        best, gap, ok = doctor.choose("loss", [*plain, *more], where)
    if not ok:
        by_token = "" if found["loss"].ndim else "losses by token, because one number fits many formulas"
        doctor.unexplained("loss", best, gap, "new_logprobs" if assumed else by_token, where)
    else:
        names = list(best.names)
        ratio = (found["new_logprobs"] - found.get("logprobs", found["new_logprobs"]))[mask].abs()
        if float(ratio.max()) < 1e-4:
            names = [n for n in names if n.name not in ("the clip never acts",)]
        doctor.add("loss", best.words, gap=gap, names=names)
    if "gradient" in found and ok:
        check_gradient(doctor, best)


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


def check_value_loss(doctor: Doctor) -> None:
    found, mask = doctor.arrays, doctor.mask
    if not {"values", "returns"} <= found.keys():
        doctor.add("value_loss", lacks="values and returns")
        return
    new = "new_values" if "new_values" in found else "values"
    further = mask | doctor.following(mask)
    told = doctor.batch.settings.get("cliprange")
    candidates = []
    for m, after in ((mask, ""), (further, ", the step after the end too")):
        for bound in ([told] if told else []) + [0.2, 0.5, 1e9]:
            for f, names in doctor.variants("value_loss"):
                if len(names) > 1 or (names and "half" not in names[0].name and m is further):
                    continue
                words = (
                    f"half the squared error, clipped to {bound:g}{after}"
                    if bound < 1e9
                    else f"half the squared error{after}"
                )
                candidates.append(
                    Candidate(
                        words=words,
                        predict=lambda a, f=f, m=m, b=bound: f(a[new], a["values"], a["returns"], m, b),
                        names=names,
                    )
                )
    where = torch.ones((), dtype=torch.bool)
    if found["value_loss"].ndim:
        doctor.add("value_loss", lacks="one number")
        return
    best, gap, ok = doctor.choose("value_loss", candidates, where)
    if ok:
        doctor.add("value_loss", best.words, gap=gap, names=list(best.names))
    else:
        doctor.add("value_loss", lacks="new_values, or the coefficient")
