"""Which formula made the losses of a dump, and whether ratios are what they must be: see doctor.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

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
            of_kind = wiring("another loss") if kind != "ppo" else ()
            for mode, of_mode in MODES.items() if not by_token else [("", ())]:

                def predict(a: Arrays, kind=kind, mode=mode, low=low, high=high) -> Tensor:
                    losses, _, _ = algebra.token_losses(
                        a["new_logprobs"], a[old], a["advantages"], mask, kind, low=low, high=high
                    )
                    return losses if by_token else forms.aggregate(losses, mask, mode)

                yield Candidate(
                    words=f"{kind} with the bounds {low:g} and {high:g}, {mode}".strip(", "),
                    predict=predict,
                    names=(*of_kind, *of_mode),
                )
        for f, names in doctor.variants("policy_loss") if not by_token else ():
            if all(name.choice for name in names):  # as above
                continue
            names = tuple(NEVER[0] if name.name == "without a clip" else name for name in names)

            def predict(a: Arrays, f=f, low=low, high=high) -> Tensor:
                return f(a["new_logprobs"], a[old], a["advantages"], mask, low, high)

            yield Candidate(words=f"ppo with the bounds {low:g} and {high:g}", predict=predict, names=names)
        for mode, of_mode in MODES.items() if not by_token else ():

            def unclipped(a: Arrays, mode=mode) -> Tensor:
                return forms.aggregate(-a["advantages"] * (a["new_logprobs"] - a[old]).exp(), mask, mode)

            yield Candidate(words=f"-A * ratio, {mode}", predict=unclipped, names=(*NEVER, *of_mode))
        if by_token:
            yield Candidate(
                words="-A * ratio",
                predict=lambda a: -a["advantages"] * (a["new_logprobs"] - a[old]).exp(),
                names=NEVER,
            )


def additions(doctor: Doctor) -> Iterator[tuple[str, Callable[[Arrays], Tensor], tuple]]:
    """What else may be in the loss: the KL, and the critic's."""
    found, mask = doctor.arrays, doctor.mask
    penalised = any(f.array == "rewards" and " * (" in f.words for f in doctor.findings)
    if "ref_logprobs" in found:
        for name, mode in itertools.product(("k3", "k1", "k2"), list(MODES)[:2]):
            yield (
                f"{name}, {mode}",
                lambda a, n=name, m=mode: forms.aggregate(
                    forms.kl_estimate(a["new_logprobs"], a["ref_logprobs"], mask, n), mask, m
                ),
                wiring("KL in reward and loss") if penalised else (),
            )
    if {"new_values", "values", "returns"} <= found.keys():
        yield "the critic's loss", lambda a: forms.value_loss(a["new_values"], a["values"], a["returns"], mask), ()


def with_additions(doctor: Doctor, losses: list[Candidate]) -> Iterator[Candidate]:
    """Losses of the policy with a KL or the critic's loss, whose coefficient is a number with one digit."""
    loss = doctor.arrays["loss"]
    coefficients = [c for c in [doctor.batch.settings.get("kl_coef")] if c] + COEFFICIENTS
    for base, (words, extra, names) in itertools.product(losses, additions(doctor)):
        if base.is_wrong and NEVER[0] not in base.names:
            continue
        size, rest = float(extra(doctor.arrays)), float(loss - base.predict(doctor.arrays))
        for c in coefficients:
            if size and abs(c * size - rest) < 2e-5 * max(abs(float(loss)), abs(c * size)):
                yield Candidate(
                    words=f"{base.words}, + {c:g} * {words}",
                    predict=lambda a, b=base, e=extra, c=c: b.predict(a) + c * e(a),
                    names=(*base.names, *names),
                )
                break


def check_loss(doctor: Doctor) -> None:
    found, mask = doctor.arrays, doctor.mask
    assumed = "new_logprobs" not in found
    if "advantages" not in found or (assumed and "logprobs" not in found):
        doctor.add("loss", lacks="advantages and new_logprobs")
        return
    if assumed:
        found["new_logprobs"] = found["logprobs"]
    where = mask if found["loss"].ndim == 2 else torch.ones((), dtype=torch.bool)
    ratio = (found["new_logprobs"] - found.get("logprobs", found["new_logprobs"]))[mask].abs()
    forms_of_loss = [c for c in policy_losses(doctor) if float(ratio.max()) >= 1e-4 or NEVER[0] not in c.names]
    fits = doctor.fitting("loss", forms_of_loss, where)
    if not fits and found["loss"].ndim == 0:
        fits = doctor.fitting("loss", with_additions(doctor, forms_of_loss), where)
    if not fits:
        best, gap, _ = doctor.choose("loss", forms_of_loss, where)
        by_token = "" if found["loss"].ndim else "losses by token, because one number fits many formulas"
        doctor.unexplained("loss", best, gap, "new_logprobs" if assumed else by_token, where)
    else:
        best = fits[0]
        gap = float(doctor.gap("loss", best, where).abs().max())
        is_reference = best.words == forms_of_loss[0].words and not best.names
        others = [c for c in fits if c.is_wrong]
        if is_reference:  # a mistake that changes nothing here is none
            value = best.predict(found)
            others = [c for c in others if (c.predict(found) - value).abs().max() > 1e-5 * value.abs().max()]
        names = dict.fromkeys(name for c in others for name in c.names if not name.choice and name not in best.names)
        words = f"{best.words}; {len(others)} formulas with a mistake fit as well" if names else best.words
        doctor.add("loss", words, gap=gap, names=list(best.names))
        if names and not is_reference:
            doctor.add("loss", names=list(names)[:3], asks=True)
    if "gradient" in found and fits:
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
