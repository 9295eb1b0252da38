"""The cases that an adapter's functions are compared with: golden numbers, exact enumeration, and properties.

The golden numbers were computed by openai/lm-human-preferences at cbfd210, vwxyzjn/summarize_from_feedback_details
at ee77a9a and verl at b178a3c. A property repeats a case in another way that must not change its result, or compares
with forms.py, which the tests hold against the golden numbers.

Inputs are float32, as in most code, so each operation may round by 6e-8 of its result. Numbers agree if they differ
by less than 1e-5 of the largest expected one. That leaves room for any order of operations, because no case amplifies
rounding more than a hundredfold.
"""

import inspect
import itertools
import json
import re
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppo_rlhf.check import calls, forms

GOLDEN = Path(__file__).parent / "golden"
NAMES = [name for name, form in vars(forms).items() if inspect.isfunction(form)]
TOLERANCE = 1e-5
Arguments = dict[str, Any]
Outputs = dict[str, Tensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class Case:
    """One comparison."""

    function: str
    name: str
    """what is special about it"""
    source: str
    """where the expected numbers come from: golden, enumeration, or the property that must hold"""
    arguments: Arguments
    expected: Mapping[str, Tensor]
    run: Callable[[Callable, Arguments], Any]
    """calls the function, once or several times, and returns what is compared, in the order of `expected`"""
    mask: Tensor | None = None
    """entries that are compared; None: all"""
    gradient_of: str = ""
    """argument for which the gradient of the result is compared too, if the function gives one"""


class Computed(UserDict):
    """What a form gives in a case, in float64. It is computed when it is first asked for."""

    def __init__(self, case: Case):
        self.case = case

    @cached_property
    def data(self) -> Outputs:
        return calls.outputs_of(getattr(forms, self.case.function), self.case, torch.float64)


# ---- Ways to call ----------------------------------------------------------------------------------------------


def once(function: Callable, arguments: Arguments) -> Any:
    return function(**arguments)


def first(returned: Any, name: str = "result") -> Any:
    return calls.several(returned, [name])[0]


def with_gradient(returned: Any) -> Tensor:
    result = first(returned)
    if not getattr(result, "requires_grad", False):
        raise calls.LeftOut("no gradient")
    return result


def in_parts(function: Callable, arguments: Arguments) -> Any:
    """The sum over the first row and the others, each with the counts of all."""
    rows = {name: x for name, x in arguments.items() if getattr(x, "ndim", 0) == 2}
    others = {name: x for name, x in arguments.items() if name not in rows}
    parts = [{name: x[part] for name, x in rows.items()} for part in (slice(0, 1), slice(1, None))]
    return sum(first(function(**part, **others)) for part in parts)


def controlled(function: Callable, arguments: Arguments) -> list[float]:
    """The coefficients after each of several batches, each from the coefficient that is correct before it."""
    found, coefficient = [], arguments["kl_coef"]
    for kl, episodes in zip(arguments["kl"].tolist(), arguments["episodes"].tolist(), strict=True):
        inputs = arguments | {"kl_coef": coefficient, "kl": kl, "episodes": int(episodes)}
        found.append(calls.as_tensor(first(function(**inputs), "kl_coef")).item())
        coefficient = forms.kl_controller(**inputs)
    return found


def descended(function: Callable, arguments: Arguments) -> list[Tensor]:
    """The parameters after each step on the loss sum of curvature / 2 * (x - target)^2."""
    x, curvature, target = (arguments[name] for name in ("x0", "curvature", "target"))
    m, v, found = x * 0, x * 0, []
    moments = {name: arguments[name] for name in ("beta1", "beta2", "eps") if name in arguments}
    for step, lr in enumerate(arguments["lr"].tolist(), start=1):
        gradient = curvature * (x - target)
        returned = function(  # which may write into what it is given
            parameter=x.clone(), gradient=gradient, m=m, v=v, step=step, lr=lr, style=arguments["style"], **moments
        )
        x, m, v = (torch.as_tensor(each) for each in calls.several(returned, ["parameter", "m", "v"]))
        found.append(x)
    return torch.stack(found)


SEQUENCES = torch.tensor(list(itertools.product(range(3), repeat=2)))  # all of two tokens out of three
STATES = torch.stack([torch.zeros(9, dtype=torch.long), 1 + SEQUENCES[:, 0]], 1)  # row of the table at each token


def of_sequences(logits: Tensor) -> Tensor:
    """Log-probs (9, 2) of the tokens of all sequences under a table of logits (4, 3)."""
    return logits.log_softmax(1)[STATES].gather(2, SEQUENCES.unsqueeze(2)).squeeze(2)


def expected_gradient(function: Callable, arguments: Arguments) -> Tensor:
    """Expected gradient (4, 3) of a loss per token, over all sequences as often as the sampler draws them."""
    logits = arguments["logits"].detach().requires_grad_()
    logprobs, ref_logprobs, sampler = (of_sequences(x) for x in (logits, *(arguments[n] for n in TABLES[1:])))
    inputs = {"logprobs": logprobs, "ref_logprobs": ref_logprobs, "mask": arguments["mask"]}
    if "name" in arguments:
        inputs["name"] = arguments["name"]
    else:
        inputs["sampler_logprobs"] = sampler
    losses = with_gradient(function(**inputs))
    return torch.autograd.grad((sampler.sum(1).exp().detach() * losses.sum(1)).sum(), logits)[0]


def pull(function: Callable, arguments: Arguments) -> Tensor:
    """Which way the gradient of the estimate points at each token: -1, 0 or 1."""
    logprobs = arguments["logprobs"].detach().requires_grad_()
    values = with_gradient(function(**(arguments | {"logprobs": logprobs})))
    return torch.autograd.grad(values.sum(), logprobs)[0].sign()


@torch.enable_grad()  # the gradient is that of the log-probs here, also if the rewards are arrays
def gradient_in_reward(function: Callable, arguments: Arguments) -> Tensor:
    """Gradient (4, 3) of the penalty: over all sequences, grad log p of a token times minus its rewards to go."""
    logits = arguments["logits"].detach().requires_grad_()
    logprobs, ref_logprobs = of_sequences(logits), of_sequences(arguments["ref_logits"])
    rewards = function(
        scores=torch.zeros(9, dtype=logprobs.dtype),
        logprobs=logprobs.detach(),
        ref_logprobs=ref_logprobs,
        mask=arguments["mask"],
        kl_coef=1.0,
    )
    to_go = torch.as_tensor(first(rewards)).flip(1).cumsum(1).flip(1).detach()
    objective = (logprobs.detach().sum(1).exp() * (logprobs * to_go).sum(1)).sum()
    return -torch.autograd.grad(objective, logits)[0]


TABLES = ("logits", "ref_logits", "sampler_logits")


def read_by_model(function: Callable, arguments: Arguments) -> Any:
    """Log-probs under a tiny GPT-2 with stored weights."""
    arguments = dict(arguments)
    model = language_model(arguments.pop("weights"), arguments.pop("heads"))
    return function(model=model, **arguments)


def language_model(weights: dict[str, Tensor], heads: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel  # takes seconds, and only this function needs it

    (vocab_size, width), positions = weights["wte.weight"].shape, len(weights["wpe.weight"])
    layers = sum(name.endswith("ln_1.weight") for name in weights)
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=positions,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config).eval()
    model.transformer.load_state_dict(weights)
    if weights["wpe.weight"].requires_grad:  # the one that a gradient is asked of
        del model.transformer.wpe.weight
        model.transformer.wpe.weight = weights["wpe.weight"]
    return model.to(weights["wpe.weight"].dtype)


# ---- Golden numbers --------------------------------------------------------------------------------------------


@cache
def arrays(name: str) -> dict[str, Tensor]:
    """The arrays of a file. Texts, such as those that name a prompt, become numbers."""
    with np.load(GOLDEN / f"{name}.npz") as file:
        return {key: torch.from_numpy(numbers_of(x)) for key, x in file.items()}


def numbers_of(x: np.ndarray) -> np.ndarray:
    return np.unique(x, return_inverse=True)[1] if x.dtype.kind in "US" else x


@cache
def table(name: str) -> Any:
    return json.loads((GOLDEN / f"{name}.json").read_text())


def under(name: str, prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): x for key, x in arrays(name).items() if key.startswith(prefix)}


def golden(
    function: str,
    name: str,
    expected: Tensor | Outputs,
    stored: Outputs,
    run: Callable[[Callable, Arguments], Any] = once,
    source: str = "golden",
    gradient_of: str = "",
    /,
    **others: Any,
) -> Case:
    """A case whose numbers are stored: those arguments that `stored` has under their names, and others.

    The mask is full if there is none.
    """
    names = inspect.signature(getattr(forms, function)).parameters
    arguments = {key: stored[key] for key in names if key in stored} | others
    if "mask" in names and "mask" not in arguments:
        arguments["mask"] = full(arguments[next(key for key in names if key != "scores")])
    return Case(
        function=function,
        name=name,
        source=source,
        arguments=arguments,
        expected={"result": expected} if isinstance(expected, Tensor) else expected,
        run=run,
        mask=arguments.get("mask") if function in PER_TOKEN else None,
        gradient_of=gradient_of,
    )


def chapter_1() -> Iterator[Case]:
    """Numbers of openai/lm-human-preferences."""
    for name in sorted({key.partition("/")[0] for key in arrays("case1_whiten")}):
        # A variance may be a mean of squares less the square of the mean, whose rounding is amplified by
        # (mean / deviation)^2. That is a million or more in these two, so float32 leaves nothing to compare.
        if name in ("near_constant_8x8", "large_mean_16x4"):
            continue
        x = under("case1_whiten", f"{name}/")
        for keep_mean in (False, True):
            expected = x["shift_mean_false" if keep_mean else "shift_mean_true"]
            yield golden("whiten", name, expected, {"values": x["input"]}, keep_mean=keep_mean)
    for name in ("default", "gamma_lam", "no_whiten", "no_noise_first_epoch", "constant_rewards", "rlen1"):
        x, settings = arrays(f"case2_loss_{name}"), table("case2_loss_meta")[name]
        rewards = {"rewards": x["rewards_after_whitening"]}
        expected = {"advantages": x["advantages_raw"], "returns": x["returns"]}
        yield golden("gae", name, expected, x | rewards, gamma=float(settings["gamma"]), lam=settings["lam"])
        yield golden("policy_loss", name, x["stats/loss/policy"], x, cliprange=settings["cliprange"])
        yield golden("value_loss", name, x["stats/loss/value"], x, cliprange=settings["cliprange_value"])
    x = arrays("case1b_logits_helpers")
    yield golden("token_logprobs", "temperature 1", x["logprobs"], x, tokens=x["labels"].long())
    yield golden("entropy", "temperature 1", x["entropies"], x)
    for name in ("test_nopad_t07", "test_nopad_t1"):
        x = arrays(f"case3_forward_{name}")
        tokens, context = x["full_tokens"].long(), x["queries"].shape[1]
        temperature = round(x["temperature"].item(), 6)
        rows = (tokens != 0).all(1)  # code may take any 0 for padding
        inputs = {"tokens": tokens[rows], "attention_mask": full(tokens[rows]), "context_length": context}
        yield golden(
            "response_logprobs",
            name,
            x["logprobs"][rows],
            inputs,
            read_by_model,
            weights=openai_weights("weights_test_policy"),
            heads=table("models")["test"]["hparams"]["n_head"],
            temperature=temperature,
        )
        inputs = {"logits": x["full_logits"][:, context - 1 : -1], "tokens": x["responses"].long()}
        yield golden("token_logprobs", name, x["logprobs"], inputs, temperature=temperature)
        yield golden("entropy", name, x["entropies"], inputs, temperature=temperature)
    x = arrays("case4_reward_loss_best_of_4_test")
    inputs = {"scores": x["rewards_per_sample"], "best": x["labels/best"].long()}
    yield golden("best_of_n_loss", "best of 4", x["stats/loss"], inputs)
    responses = arrays("case5_postprocess")["responses"].long()
    for name, settings in table("case5_postprocess_meta").items():
        if name != "crafted_rows" and settings["truncate_token"] is not None:
            x = under("case5_postprocess", f"{name}/")
            inputs = {
                "responses": responses,
                "stop_id": settings["truncate_token"],
                "after": settings["truncate_after"],
                "pad_id": settings["padding_token"],
            }
            yield golden("truncate", name, x["postprocessed"], inputs)
            yield golden("has_stop", name, x["filter_on_raw"], inputs)
    for name, x in table("case6_kl_controller").items():
        if x.get("target"):
            kl, expected = (torch.tensor(values, dtype=torch.float64) for values in (x["kl"], x["values"][1:]))
            episodes = torch.tensor(x["n_steps"]).expand(len(kl)).clone()
            inputs = x | {"kl_coef": x["init"], "kl": kl, "episodes": episodes}
            yield golden("kl_controller", name, expected, inputs, controlled)
    for name in sorted({key.partition("/")[0] for key in arrays("case7_adam")}):
        x = under("case7_adam", f"{name}/")
        inputs = {key: x[key] for key in ("x0", "target", "curvature", "lr")}
        for style, key in (("tensorflow", "trajectory_tf"), ("torch", "trajectory_torch_adam_eps1e-5")):
            yield golden("adam_step", f"{style}, {name}", x[key][1:], {}, descended, **inputs, style=style, eps=1e-5)
    # Another, adaptive_after_kl9_512, differs from the first in the coefficient only; kl_controller has such steps.
    for name in ("coef015", "coef0", "coef02_len1"):
        x = under("case8_compute_rewards", f"{name}/")
        yield golden("token_rewards", name, x["rewards"], x, kl_coef=round(x["kl_coef"].item(), 6))


def openai_weights(name: str) -> dict[str, Tensor]:
    """Weights of the language model under the names of GPT2Model."""
    found = {}
    for key, x in under(name, "model/").items():
        if not key.startswith("heads/"):
            key = re.sub(r"^h(\d+)", r"h.\1", key.replace("/", "."))  # h0/ln_1/g: the gain of a norm in layer 0
            key = re.sub(r"\.[gw]$|(?<=wte|wpe)$", ".weight", key)
            found[re.sub(r"\.b$", ".bias", key)] = x[0] if x.ndim == 3 else x
    return found


def chapter_2() -> Iterator[Case]:
    """Numbers of vwxyzjn/summarize_from_feedback_details."""
    for i in range(4):
        x = under("tldr/helpers", f"whiten{i}/")
        yield golden("whiten", f"masked {i}", x["shifted"], x)
        yield golden("whiten", f"masked {i}", x["kept"], x, keep_mean=True)
        x = under("tldr/helpers", f"truncate{i}/")
        inputs = {"responses": x["responses"].long(), "stop_id": 0, "pad_id": 40}
        yield golden("truncate", f"responses {i}", x["truncated"], inputs)
    for name in ("default", "gamma_lam", "full", "all_missing", "one_token", "whiten_rewards", "no_penalty"):
        x, settings = arrays(f"tldr/advantages_{name}"), table("tldr/cases")[f"advantages_{name}"]["ppo"]
        inputs = under(f"tldr/advantages_{name}", "in/")
        if not settings["whiten_rewards"]:  # those that are stored are whitened
            yield golden(
                "token_rewards",
                name,
                x["out/rewards"],
                inputs | {"scores": x["out/scores"], "mask": ~x["out/padding_mask"]},
                kl_coef=settings["kl_coef"],
                score_at="next",
            )
        yield golden(
            "gae",
            f"chapter 2, {name}",
            {"advantages": x["out/returns"] - x["out/values"], "returns": x["out/returns"]},
            inputs | {"rewards": x["out/rewards"], "mask": ~x["out/padding_mask_p1"]},
            gamma=float(settings["gamma"]),
            lam=settings["lam"],
        )
    for name in ("default", "wide", "full"):
        x, settings = arrays(f"tldr/losses_{name}"), table("tldr/cases")[f"losses_{name}"]
        inputs, ppo = under(f"tldr/losses_{name}", "in/"), settings["ppo"]
        inputs |= {"new_logprobs": x["out/new_logprobs"], "mask": ~inputs["padding_mask"]}
        yield golden("policy_loss", name, x["out/pg_loss_stats"], inputs, cliprange=ppo["cliprange"])
        new_values = inputs["vpred"][:, settings["context"] - 1 : -1, 0]
        inputs |= {"new_values": new_values, "mask": ~inputs["padding_mask_p1"]}
        yield golden("value_loss", name, x["out/vf_loss_stats"], inputs, cliprange=ppo["cliprange_value"])
    x = arrays("tldr/forward_gpt2_leftpad")
    tokens = torch.cat([x["in/queries"], x["in/responses"]], 1).long()
    mask = tokens != 40
    weights = {key.removeprefix("policy/transformer."): w for key, w in x.items() if "policy/trans" in key}
    renamed = torch.arange(40)  # 0 and 4, which no row has: then 0 is nothing but padding
    renamed[[0, 4]] = renamed[[4, 0]]
    tokens = renamed[tokens.masked_fill(~mask, 4)]
    weights["wte.weight"] = weights["wte.weight"][renamed]
    context = x["in/queries"].shape[1]
    inputs = {"tokens": tokens, "attention_mask": mask, "context_length": context, "temperature": 0.7}
    case = golden(
        "response_logprobs",
        "padded on the left",
        x["out/unpadded_logprobs"],
        inputs,
        read_by_model,
        weights=weights,
        heads=2,
    )
    case = replace(case, mask=mask[:, context:])
    # Code without a temperature can be asked this one only. Its numbers are those of the form, in float64. They are
    # stored, because computing them takes seconds to import the model.
    yield case
    yield replace(
        case,
        name="padded on the left, temperature 1",
        source="padding on the left",
        arguments=case.arguments | {"temperature": 1.0},
        expected=arrays("tldr/forward_gpt2_leftpad_at_1"),
        gradient_of="weights/wpe.weight",
    )


VERL = {  # its names for what an adapter's functions get
    "response_mask": "mask",
    "loss_mask": "mask",
    "loss_mat": "losses",
    "token_level_rewards": "rewards",
    "logprob": "logprobs",
    "ref_logprob": "ref_logprobs",
    "log_prob": "new_logprobs",
    "old_log_prob": "logprobs",
    "log_ratio": "logprobs",
    "vpreds": "new_values",
    "response_id": "responses",
    "index": "groups",
}


def verl(name: str) -> dict[str, Tensor]:
    """A stored case: masks as bool, numbers in float32 and expected ones in float64."""
    found = {}
    for key, x in arrays(f"verl/{name}").items():
        if key.startswith("in/"):
            key = VERL.get(key.removeprefix("in/"), key.removeprefix("in/"))
            x = x.float() if x.is_floating_point() else x
        found[key] = x.bool() if key == "mask" else x
    return found


def chapter_3() -> Iterator[Case]:
    """Numbers of verl. Where verl differs on purpose, those that the specification asks for."""
    for name, keep_mean in (("whiten_shift", False), ("whiten_keep_mean", True), ("whiten_one_token", False)):
        x = verl(name)
        yield golden("whiten", name, x["spec/whitened"], x, keep_mean=keep_mean)
    for name, lam in (("gae_ragged", 0.95), ("gae_gamma1_lam1", 1.0)):
        x = verl(name)
        expected = {"advantages": x["spec/advantages_raw"], "returns": x["out/returns"]}
        yield golden("gae", name, expected, x, lam=lam)
    for name in ("reinforce_pp", "reinforce_pp_interior_mask"):
        x = verl(name)
        expected, values = x["spec/returns"], x["rewards"] * 0
        yield golden("reward_to_go", name, expected, x)
        expected = {"advantages": expected, "returns": expected}
        yield golden("gae", f"{name}, values 0", expected, x, values=values, gamma=1.0, lam=1.0)
    for name, form in (("grpo_std", "grpo"), ("grpo_no_std", "dr_grpo"), ("rloo", "rloo")):
        x = verl(name)
        scores = x["rewards"].masked_fill(~x["mask"], 0).sum(1)
        expected = x["spec/advantages"].gather(1, x["mask"].long().argmax(1, keepdim=True)).squeeze(1)
        yield golden("group_advantages", name, expected, x, scores=scores, name=form)
    for stored in ("kl_values_and_gradients", "kl_extreme"):
        x = verl(stored)
        for form in ("k1", "abs", "k2", "k3"):
            if (stored, form) == ("kl_extreme", "k3"):  # where a slope is a choice
                continue
            expected = {"result": x[f"out/{form}/value"], "gradient": x[f"out/{form}/grad"]}
            inputs = x | {"name": form}
            yield golden("kl_estimate", f"{stored}, {form}", expected, inputs, once, "golden", "logprobs")
    d = torch.tensor([[-12.0, -4.0, -1.0], [1.0, 4.0, 12.0]])  # beyond clamps that some code has
    inputs = {"logprobs": d - 20, "ref_logprobs": torch.full_like(d, -20.0), "name": "k3"}
    yield golden("kl_estimate", "k3 pulls back", d.sign(), inputs, pull, "far from the reference")
    x = verl("adaptive_kl")
    inputs = {"kl_coef": 0.2, "kl": x["kl"].double(), "target": 6.0, "episodes": x["n"], "horizon": 10000}
    yield golden("kl_controller", "adaptive_kl", x["out/coef"], inputs, controlled)
    for name, function, settings in (
        ("policy_vanilla", "policy_loss", {"dual_clip": 3.0}),
        ("policy_dual_clip", "policy_loss", {"dual_clip": 1.5}),
        ("policy_gspo", "gspo_loss", {"cliprange": 0.05, "cliprange_high": 0.08}),
        ("policy_cispo", "cispo_loss", {}),
    ):
        x = verl(name)
        expected = {"result": x["out/loss"], "gradient": x["out/grad_log_prob"]}
        yield golden(function, name, expected, x | settings, once, "golden", "new_logprobs")
    x = verl("value_loss")
    expected = {"result": x["out/loss"], "gradient": x["out/grad_vpreds"]}
    yield golden("value_loss", "verl", expected, x, once, "golden", "new_values", cliprange=0.5)
    for name in ("agg_modes", "agg_all_masked"):
        x = verl(name)
        for mode in MODES:
            expected = x.get(f"spec/{mode}", x[f"out/{mode}"])
            yield golden("aggregate", f"{name}, {mode}", expected, x, mode=mode)
    x = verl("agg_micro_batches")
    counts = {"tokens": int(x["mask"].sum()), "sequences": int(x["mask"].any(1).sum())}
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        inputs = x | counts | {"mode": mode}
        yield golden("aggregate", f"in parts, {mode}", x[f"out/{mode}"], inputs, in_parts, "parts add up")
    inputs = {"losses": list(x["losses"].split([1, 3])), "masks": list(x["mask"].split([1, 3]))}
    yield golden("accumulate", "parts of 1 and 3 rows", x["out/token-mean"], inputs, generation_tokens=50)
    for kind in ("token", "sequence"):
        x = verl(f"is_{kind}")
        inputs = x | {"sampler_logprobs": x["logprobs"] * 0, "kind": kind, "cap": 2.0}
        yield golden("importance_weights", kind, x["out/weights"], inputs)
    for name, kind, low, high in (
        ("reject_token_k1", "token", 0.5, 2.0),
        ("reject_seq_mean_k1", "sequence", 0.8, 1.25),
        ("reject_token_k1_asymmetric", "token", 1 / 3, 1 / 0.9),
    ):
        x = verl(name)
        inputs = x | {"sampler_logprobs": x["logprobs"] * 0, "kind": kind, "low": low, "high": high}
        yield golden("rejection_mask", name, x["out/mask"].bool(), inputs)
    x = verl("response_mask_one_eos")
    yield golden("response_mask", "one stop id", x["out/mask"].bool(), x, stop_id=2)
    x = verl("overlong_punishment")
    inputs = {"lengths": x["lengths"].long(), "max_length": 20, "buffer": 4, "factor": 1.0}
    yield golden("overlong_penalty", "verl", x["out/reward"] - 1, inputs)


MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def enumeration() -> Iterator[Case]:
    """Expected gradients over all 9 sequences of two tokens out of three, in closed form."""
    stored = table("verl/kl_enumeration")
    tables = {name: torch.tensor(stored[name]) for name in TABLES} | {"mask": full(SEQUENCES)}
    on_policy = tables | {"sampler_logits": tables["logits"]}

    def gradient(
        function: str,
        title: str,
        stored_as: str,
        inputs: Arguments = on_policy,
        run: Callable[[Callable, Arguments], Any] = expected_gradient,
    ) -> Case:
        where = "on_policy" if inputs["sampler_logits"] is tables["logits"] else "off_policy"
        (found,) = [one for one in stored[where] if one["name"] == stored_as]
        expected = torch.tensor(found["grad"], dtype=torch.float64)
        return golden(function, title, expected, {}, run, "enumeration", **inputs)

    for form in ("k1", "abs", "k2", "k3", "k1+", "k3+"):
        what = f"(value of {form[:2]}, gradient of k2)" if form.endswith("+") else "per token"
        yield gradient("kl_estimate", f"{form} as a loss", f"{form} {what} as loss", on_policy | {"name": form})
    in_reward = "k1 in the reward, gamma = lambda = 1"
    yield gradient("token_rewards", "the penalty", in_reward, run=gradient_in_reward)
    held = "true gradient, prefixes of the sampler held fixed"
    yield gradient("kl_loss", "another sampler", held, tables)
    yield gradient("kl_loss", "the policy samples", "true gradient, prefixes held fixed")
    ended = torch.stack([torch.ones(9, dtype=torch.bool), SEQUENCES[:, 0] != 0], 1)  # the token 0 stops a response
    yield like_the_form("kl_loss", "padding", tables | {"mask": ended}, run=expected_gradient)
    apart = {name: 4 * x if name in TABLES else x for name, x in tables.items()}
    yield like_the_form("kl_loss", "far apart", apart, run=expected_gradient)


# ---- Properties ------------------------------------------------------------------------------------------------


def full(x: Tensor) -> Tensor:
    return torch.ones(x.shape, dtype=torch.bool)


SHAPES = {"B < T": (3, 5), "B > T": (6, 4), "B = T": (4, 4), "one row": (1, 5), "one token": (5, 1)}
HOLES = torch.tensor(
    [[1, 1, 0, 0, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1], [1, 0, 1, 0, 0, 0, 0], [0, 1, 1, 0, 1, 0, 0]]
).bool()
RAGGED = torch.arange(6) < torch.tensor([[6], [2], [4], [1], [6]])
LOGPROBS = ("logprobs", "ref_logprobs", "new_logprobs", "sampler_logprobs")
SETTINGS: dict[str, list[Arguments]] = {  # of each function for its properties
    "whiten": [{}, {"keep_mean": True}],
    "gae": [{"gamma": 0.9, "lam": 0.8}, {}],
    "reward_to_go": [{"gamma": 0.9}, {}],
    "token_rewards": [{"kl_coef": 3.0}],
    "kl_estimate": [{"name": name} for name in ("k1", "abs", "k2", "k3", "k1+", "k2+", "k3+")],
    "policy_loss": [{}, {"cliprange": 0.1}, {"cliprange": 0.2, "cliprange_high": 0.3}, {"dual_clip": 1.5}],
    "gspo_loss": [{"cliprange": 0.05}, {"cliprange": 0.05, "cliprange_high": 0.08}],
    "cispo_loss": [{}, {"cliprange": 1.0, "cliprange_high": 0.1}],
    "value_loss": [{}],
    "aggregate": [{"mode": mode} for mode in MODES],
    "importance_weights": [{}, {"cap": 1.5}, {"kind": "sequence"}, {"kind": "sequence", "cap": 1.5}],
    "rejection_mask": [{"kind": kind, "low": 0.6, "high": 1.4} for kind in ("token", "sequence")],
}
GRADIENT_OF = {
    "kl_estimate": "logprobs",
    "policy_loss": "new_logprobs",
    "gspo_loss": "new_logprobs",
    "cispo_loss": "new_logprobs",
    "value_loss": "new_values",
    "aggregate": "losses",
    "entropy": "logits",
    "token_logprobs": "logits",
    "best_of_n_loss": "scores",
    "accumulate": "losses",
    "importance_weights": "logprobs",  # which must be 0
}
PARTS = {"policy_loss", "value_loss", "aggregate"}
PER_TOKEN = {"whiten", "gae", "reward_to_go", "kl_estimate", "importance_weights"}  # what is masked is not compared


def random_arguments(
    function: str, shape: tuple[int, int], generator: torch.Generator, apart: float = 0.3
) -> Arguments:
    """Float32 tensors for the function's arguments that are (batch, response_length), and scores (batch,).

    apart: how far log-probs of one token are apart, in nats.
    """
    found, base = {}, -3 * torch.rand(shape, generator=generator) - 0.1
    for name, parameter in inspect.signature(getattr(forms, function)).parameters.items():
        if parameter.annotation is Tensor and name != "mask":
            x = torch.randn(shape[0] if name == "scores" else shape, generator=generator)
            found[name] = (base + apart * x).clamp(max=-0.01) if name in LOGPROBS else x
    if function == "gspo_loss":
        found["advantages"] = found["advantages"][:, :1].expand(shape).clone()
    return found


def properties() -> Iterator[Case]:
    for function, settings in SETTINGS.items():
        for shape_name, shape in SHAPES.items():
            x = random_arguments(function, shape, torch.Generator().manual_seed(sum(map(ord, function))))
            x["mask"] = full(torch.zeros(shape))
            yield from (like_the_form(function, shape_name, x | s) for s in settings)
        for mask_name, mask in (("padding", RAGGED), ("holes in the mask", HOLES)):
            x = random_arguments(function, mask.shape, torch.Generator().manual_seed(1 + len(function)))
            for s in settings:
                case = like_the_form(function, mask_name, {**x, "mask": mask, **s})
                yield case
                yield with_masked(case, "masked entries don't matter", 1e3)
                yield with_masked(case, "NaN in padding", torch.nan)
        x = random_arguments(function, RAGGED.shape, torch.Generator().manual_seed(3), apart=1.5)
        if any(name in LOGPROBS for name in x) and function != "kl_estimate":  # where slopes far away are a choice
            yield from (like_the_form(function, "far apart", x | {"mask": RAGGED} | s) for s in settings)
        if function in PARTS:
            for s in settings:
                x = random_arguments(function, RAGGED.shape, torch.Generator().manual_seed(2)) | {"mask": RAGGED} | s
                case = like_the_form(function, "parts add up", x)
                counts = {"tokens": int(RAGGED.sum())}
                if function == "aggregate":
                    counts["sequences"] = len(RAGGED)
                expected = {"result": case.expected["result"]}
                yield replace(case, arguments=x | counts, expected=expected, run=in_parts, gradient_of="")


def like_the_form(
    function: str, name: str, arguments: Arguments, source: str = "", run: Callable[[Callable, Arguments], Any] = once
) -> Case:
    """A case whose numbers forms.py computes in float64."""
    case = golden(function, name, {}, {}, run, source or name, GRADIENT_OF.get(function, ""), **arguments)
    return replace(case, expected=Computed(case))


def with_masked(case: Case, name: str, value: float) -> Case:
    """The same case with something else in the masked entries."""
    mask = case.arguments["mask"]
    changed = {
        key: x.masked_fill(~mask, value)
        for key, x in case.arguments.items()
        if isinstance(x, Tensor) and x.shape == mask.shape and x.is_floating_point()
    }
    return replace(case, name=name, source=name, arguments=case.arguments | changed)


def other_properties() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(5)
    scores = torch.randint(0, 3, (12,), generator=generator).float() * 2 - 1
    consecutive, mixed = torch.arange(12) // 4, torch.tensor([2, 0, 1, 0, 2, 1, 0, 2, 1, 0, 2, 1])
    pairs = torch.arange(12) // 2
    equal, sizes = torch.ones(12), torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 3, 3, 3, 4])
    for name in ("grpo", "dr_grpo", "rloo"):
        for what, x, groups, size in (
            ("consecutive groups", scores, consecutive, 4),
            ("groups by their size alone", scores, None, 4),
            ("groups of two", scores, pairs, 2),
            ("mixed groups", scores, mixed, None),
            ("groups of different sizes, one of one", scores, sizes, None),
            ("equal scores", equal, consecutive, 4),
            ("one row", scores[2:3], consecutive[:1], 1),
        ):
            inputs = {"scores": x, "groups": groups, "group_size": size, "name": name}
            yield like_the_form("group_advantages", what, inputs)
    # The stop id is also the padding, responses are shorter than the width, and one does not end.
    responses = torch.tensor(
        [[5, 6, 2, 2, 2, 2], [5, 2, 2, 2, 2, 2], [5, 6, 7, 8, 9, 5], [2, 2, 2, 2, 2, 2], [5, 6, 7, 8, 9, 2]]
    )
    inner = torch.tensor([[5, 2, 6, 2, 9, 9], [2, 5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 5], [5, 5, 5, 5, 5, 2]])
    for name, x in (("the stop id is the padding", responses), ("tokens after the stop id", inner)):
        yield like_the_form("response_mask", name, {"responses": x, "stop_id": 2})
        yield like_the_form("response_mask", "another stop id", {"responses": x, "stop_id": 6})
        yield like_the_form("has_stop", name, {"responses": x, "stop_id": 2, "after": 0})
        yield like_the_form("truncate", name, {"responses": x, "stop_id": 2, "pad_id": 2, "after": 0})
    lost = torch.tensor([[5, 6, 7, 8, 0, 0], [5, 6, 2, 0, 0, 0], [5, 6, 7, 8, 9, 2], [5, 6, 7, 8, 9, 3]])
    yield like_the_form("has_stop", "cut off, then padded", {"responses": lost, "stop_id": 2, "after": 0})
    empty = RAGGED & (torch.arange(5) != 1).unsqueeze(1)
    x = random_arguments("aggregate", empty.shape, generator)["losses"]
    for mode in MODES:
        # What seq-mean-token-sum-norm divides by is said, because libraries differ in it.
        counts = {"sequences": len(empty)} if mode == "seq-mean-token-sum-norm" else {}
        inputs = {"losses": x, "mask": empty, "mode": mode} | counts
        yield like_the_form("aggregate", "an empty row", inputs)
        if mode == "seq-mean-token-sum-norm":
            yield like_the_form("aggregate", "another length", inputs | {"length": 9})
    x = random_arguments("token_rewards", empty.shape, generator)
    yield like_the_form("token_rewards", "an empty row", x | {"mask": empty, "kl_coef": 0.3})
    x = random_arguments("gspo_loss", empty.shape, generator)
    yield like_the_form("gspo_loss", "an empty row", x | {"mask": empty})
    losses = torch.randn(RAGGED.shape, generator=generator)
    for name, sizes in (("one part", [5]), ("a part for each row", [1] * 5), ("parts of 3 and 2 rows", [3, 2])):
        inputs = {"losses": list(losses.split(sizes)), "masks": list(RAGGED.split(sizes)), "generation_tokens": 40}
        yield like_the_form("accumulate", name, inputs, "parts add up")
        masks = [full(x) for x in inputs["masks"]]
        yield like_the_form("accumulate", f"{name}, all full", inputs | {"masks": masks}, "parts add up")
        returns, values = (torch.randn(RAGGED.shape, generator=generator) for _ in range(2))
        off = values / 2 + 0.1 if len(sizes) < 3 else 1.5 * values  # a critic that is worse than a constant
        inputs = {
            "values": list((returns + off).split(sizes)),
            "returns": list(returns.split(sizes)),
            "masks": list(RAGGED.split(sizes)),
        }
        yield like_the_form("explained_variance", name, inputs, "parts add up")
    x = torch.full(RAGGED.shape, -1.5)
    for low, high in ((1.0, 1.5), (0.5, 1.0)):
        inputs = {"logprobs": x, "sampler_logprobs": x, "mask": RAGGED, "low": low, "high": high}
        yield like_the_form("rejection_mask", "a ratio of 1 at the bound", inputs | {"kind": "token"})
    lengths = torch.tensor([0, 5, 15, 16, 17, 18, 20])
    inputs = {"lengths": lengths, "max_length": 20, "buffer": 5, "factor": 0.5}
    yield like_the_form("overlong_penalty", "factor 0.5", inputs)
    inputs = {"lengths": lengths, "max_length": 16, "buffer": 8}
    yield like_the_form("overlong_penalty", "another length", inputs)
    kl = torch.tensor([0.1, 2.4, 2.6, 9.0, 0.0, 2.2], dtype=torch.float64)
    for name, coefficient in (("a small coefficient", 1e-4), ("a large coefficient", 20.0)):
        inputs = {"kl_coef": coefficient, "kl": kl, "target": 2.5, "episodes": torch.full((6,), 40), "horizon": 100}
        yield like_the_form("kl_controller", name, inputs, run=controlled)
    for style in ("torch", "tensorflow"):
        inputs = {
            "x0": torch.randn(4, generator=generator),
            "target": torch.randn(4, generator=generator),
            "curvature": torch.tensor([0.01, 1.0, 3.0, 10.0]),
            "lr": torch.tensor([0.1, 0.1, 0.05, 0.2, 0.01]),
            "style": style,
            "beta1": 0.7,
            "beta2": 0.95,
            "eps": 1e-3,
        }
        yield like_the_form("adam_step", f"{style}, other moments", inputs, run=descended)
    for name, shape in SHAPES.items():
        logits, tokens = torch.randn(*shape, 4, generator=generator), torch.randint(0, 4, shape, generator=generator)
        inputs = {"logits": logits, "temperature": 0.7}
        yield like_the_form("entropy", name, inputs)
        yield like_the_form("entropy", name, {"logits": 4 * logits})
        for more in (inputs, {"logits": 9 * logits}):  # also tokens that are very unlikely
            yield like_the_form("token_logprobs", name, more | {"tokens": tokens})
        best = torch.randint(0, shape[1], shape[:1], generator=generator)
        yield like_the_form("best_of_n_loss", name, {"scores": logits[..., 0], "best": best})


@cache
def all_cases() -> dict[str, list[Case]]:
    """The cases of each function."""
    found = [*chapter_1(), *chapter_2(), *chapter_3(), *enumeration(), *properties(), *other_properties()]
    return {name: [case for case in found if case.function == name] for name in NAMES}
