"""Dumps of one update with a known mistake in each, for `python -m ppo_rlhf.check --batch`, and how many it names.

    python benchmark/doctor.py --save /tmp/corpus       # writes the dumps, and what is wrong in each to truth.csv
    python benchmark/doctor.py                          # examines them all; results/doctor.csv

A small language model writes responses of different lengths to prompts of different lengths. From its log-probs and
values, an update computes rewards, advantages, returns and losses with the plain functions of check/forms.py, or with
one mistake in them: of a function (ppo_rlhf/check/faults.toml) or in what it is given (WIRING below). INVISIBLE has
the mistakes that no batch can show.
"""

import argparse
import csv
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ppo_rlhf.check import batch as doctor, dump, faults, forms
from ppo_rlhf.loop import PPO

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "ppo_rlhf/worlds/data/tales/model"
QUERIES = ("Mara gladly helped the", "Bruno and the", "Hanna gave Mara a", "There was")
GAMMA, LAM, KL_COEF, TEMPERATURE = 0.99, 0.9, 0.1, 0.7
GROUP = 4  # responses to a prompt
INVISIBLE = {
    "values at the response tokens": "the dump has the shifted values, and what follows from them is consistent",
    "whitened twice in the same way": "the second time changes nothing but rounding",
    "gamma applied twice": "the advantages are those of another lambda, unless the dump has lambda",
    "returns of one lambda": "where gamma and lambda are 1, most recursions agree",
    "a mean over micro-batches": "one number of a part of a batch does not say what the others are divided by",
    "the optimiser, the learning rate, the order of minibatches": "they act after the batch",
    "a reward model that reads too much": "scores are taken as they are",
}
Arrays = dict[str, Tensor]


@cache
def rollout(rows: int = 16) -> Arrays:
    """What the models say of some responses: arrays by name, float64."""
    torch.manual_seed(1)
    ppo = PPO(str(MODEL), response_length=20, dtype="float64", temperature=TEMPERATURE)
    with torch.no_grad():
        for parameter in ppo.reference.lm_backbone.parameters():
            parameter += 0.3 * parameter.std().nan_to_num(0) * torch.randn_like(parameter)
    queries = [query for query in QUERIES for _ in range(rows // len(QUERIES) or 1)][:rows]
    stop = ppo.tokenizer.encode(".")[-1]
    # A response ends with the first sentence that ends after its fifth token.
    written = [r[: r.index(stop, 5) + 1] if stop in r[5:] else r for r in ppo.generate(queries).response_ids]
    made = ppo.batch([ppo.tokenizer.encode(query) for query in queries], written)
    found = made.rollout
    noise = torch.randn(found.values.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return {
        "query_responses": found.query_responses,
        "mask": found.mask,
        "logprobs": found.logprobs.detach().masked_fill(~found.mask, 0),
        "ref_logprobs": made.ref_logprobs.detach().masked_fill(~found.mask, 0),
        "values": (0.3 * noise.cumsum(1)),
        "scores": torch.tensor(
            [r.count(" and") + len(r) / 20 + 0.1 * (i % 3) for i, r in enumerate(made.responses)], dtype=torch.float64
        ),
        "groups": torch.arange(rows) // GROUP,
    }


def update(arrays: Arrays, functions: dict[str, Callable], wiring: dict[str, Callable], kind: str) -> Arrays:
    """The arrays of one update. functions: in place of those of forms.py; wiring: what is done to an argument."""
    f = {
        name: functions.get(name, getattr(forms, name))
        for name in (
            "kl_estimate",
            "token_rewards",
            "gae",
            "whiten",
            "group_advantages",
            "policy_loss",
            "reward_to_go",
            "value_loss",
        )
    }
    change = lambda name, x: wiring[name](x, arrays) if name in wiring else x  # noqa: E731
    found = dict(arrays)
    found["mask"] = mask = change("mask", found["mask"])
    old, ref, values = found["logprobs"], change("reference", found["ref_logprobs"]), found["values"]
    found["ref_logprobs"] = ref
    kl_mask = change("kl_mask", mask)
    kl = change("kl", f["kl_estimate"](old, ref, kl_mask, "k1"))
    nothing = torch.zeros_like(kl)
    scores = change("scores", found["scores"])
    penalty = f["token_rewards"](0 * scores, kl, nothing, kl_mask, KL_COEF)
    score = change("score", f["token_rewards"](scores, nothing, nothing, change("score_mask", mask), 0.0))
    rewards = penalty + score
    if kind == "grpo":
        advantages = f["group_advantages"](scores, change("groups", found["groups"]), None, "grpo")
        advantages = change("advantages", advantages).unsqueeze(1) * mask
        for name in ("values", "ref_logprobs"):
            del found[name]
        found |= {"advantages": advantages}
    else:
        used = change("gae_values", values) if kind == "critic" else nothing
        paid = change("gae_rewards", rewards)
        if "across" in wiring:
            flat = [x.reshape(1, -1) for x in (paid, used, mask)]
            raw = forms.gae(*flat, GAMMA, LAM)[0].reshape(mask.shape)
        elif kind == "critic":
            raw, _ = f["gae"](paid, used, change("gae_mask", mask), GAMMA, LAM)
        else:
            raw = f["reward_to_go"](paid, mask, GAMMA)
        whitened = change("whitened", raw) if "whitened" in wiring else f["whiten"](raw, mask) * mask
        found |= {"rewards": rewards, "advantages": whitened * mask}
        if kind == "critic":
            found["returns"] = (
                change("returns", raw + values) if "returns" not in wiring else wiring["returns"](raw, found)
            )
        else:
            del found["values"]
    new = found["logprobs"] + 0.2 * torch.randn(
        mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    found["new_logprobs"] = new.clamp(max=-1e-4)
    found["loss"] = f["policy_loss"](found["new_logprobs"], old, found["advantages"], mask)
    settings = {"kl_coef": KL_COEF, "step": 5} | (
        {"gamma": GAMMA, "lam": LAM} if kind == "critic" else {"gamma": GAMMA}
    )
    found |= {name: torch.tensor(value, dtype=torch.float32) for name, value in settings.items()}
    for name in ("logprobs", "new_logprobs", "dumped_advantages"):
        if f"dump_{name}" in wiring:
            found[name] = wiring[f"dump_{name}"](found[name], found)
    return found


def last(mask: Tensor) -> Tensor:
    return mask & (mask.flip(1).cumsum(1).flip(1) == 1)


def after(mask: Tensor) -> Tensor:
    return last(mask).roll(1, 1) & ~mask


WIRING: dict[str, dict[str, Callable]] = {  # by their names in ppo_rlhf/check/batch.toml
    "the mask is without the end": {"mask": lambda x, a: x & ~(last(x) & ~x[:, -1:])},
    "the mask is one too long": {"mask": lambda x, a: x | after(x)},
    "the reference is the policy": {"reference": lambda x, a: a["logprobs"]},
    "KL with the wrong sign": {"kl": lambda x, a: -x},
    "KL twice": {"kl": lambda x, a: 2 * x},
    "score of another row": {"scores": lambda x, a: x.roll(1)},
    "score on the token before the last": {"score_mask": lambda x, a: x & ~last(x)},
    "score on the first token": {"score_mask": lambda x, a: x & (x.cumsum(1) == 1)},
    "without the score": {"scores": lambda x, a: 0 * x},
    "score twice": {"scores": lambda x, a: 2 * x},
    "values one token early": {"gae_values": lambda x, a: x.roll(-1, 1)},
    "values one token late": {"gae_values": lambda x, a: x.roll(1, 1)},
    "values of another row": {"gae_values": lambda x, a: x.roll(1, 0)},
    "rewards one token late": {"gae_rewards": lambda x, a: x.roll(1, 1)},
    "bootstrapped past the end": {"gae_mask": lambda x, a: x | after(x)},
    "bootstrapped from padding": {"gae_mask": lambda x, a: torch.ones_like(x)},
    "GAE across episodes": {"across": lambda x, a: x},
    "the KL does not reach the advantages": {
        "gae_rewards": lambda x, a: forms.token_rewards(a["scores"], 0 * x, 0 * x, a["mask"], 0.0)
    },
    "whitened per process": {
        "whitened": lambda x, a: torch.cat(
            [forms.whiten(y, m) for y, m in zip(x.chunk(2), a["mask"].chunk(2), strict=True)]
        )
    },
    "returns of whitened advantages": {"returns": lambda raw, a: a["advantages"] + a["values"]},
    "returns without values": {"returns": lambda raw, a: raw},
    "returns are rewards": {"returns": lambda raw, a: a["rewards"]},
    "returns with values one token early": {"returns": lambda raw, a: raw + a["values"].roll(-1, 1)},
    "log-probs one token late": {"dump_logprobs": lambda x, a: x.roll(1, 1)},
    "log-probs one token early": {"dump_logprobs": lambda x, a: x.roll(-1, 1)},
    "log-probs of another row": {"dump_logprobs": lambda x, a: x.roll(1, 0)},
    "the ratio is not 1": {"dump_new_logprobs": lambda x, a: 2 * x},
}
OF_GROUPS: dict[str, dict[str, Callable]] = {
    "groups over the wrong rows": {"groups": lambda x, a: torch.arange(len(x)) % (len(x) // GROUP)},
    "statistics of the batch": {"groups": lambda x, a: 0 * x},
    "score of another row": {"scores": lambda x, a: x.roll(1)},
    "advantages of another row": {"advantages": lambda x, a: x.roll(1)},
    "normalised twice": {"advantages": lambda x, a: (x - x.mean()) / x.std()},
    "without a baseline": {"advantages": lambda x, a: a["scores"]},
}
SETTINGS = (
    ("float32", 16, "critic"),
    ("bfloat16", 16, "critic"),
    ("float32", 16, "no critic"),
    ("float32", 1, "critic"),
)
OF_GROUP_SETTINGS = (("float32", 16, "grpo"), ("bfloat16", 16, "grpo"))


def corpus() -> Iterator[tuple[str, str, Arrays]]:
    """Dumps: what is wrong in each (empty: nothing), what it is made of, and its arrays."""
    functions = ("kl_estimate", "token_rewards", "gae", "whiten", "policy_loss", "reward_to_go")
    for dtype, rows, kind in (*SETTINGS, *OF_GROUP_SETTINGS):
        arrays = {name: x[:rows] for name, x in rollout().items()}
        words = f"{dtype}, {rows} rows, {kind}"
        make = partial(update, arrays, kind=kind)
        right = make(functions={}, wiring={})
        yield "", words, cast(right, dtype)
        of_kind = ("group_advantages", "policy_loss") if kind == "grpo" else functions
        cases: list[tuple[str, dict, dict]] = [
            (fault.title, {fault.function: fault.compiled}, {}) for name in of_kind for fault in faults.of(name)
        ]
        cases += [(name, {}, change) for name, change in (OF_GROUPS if kind == "grpo" else WIRING).items()]
        for name, functions_, change in cases:
            try:
                wrong = make(functions=functions_, wiring=change)
            except (RuntimeError, TypeError):  # shapes that it cannot have, or an argument of other estimators
                continue
            if differs(wrong, right):
                yield name, words, cast(wrong, dtype)


def differs(a: Arrays, b: Arrays) -> bool:
    return a.keys() != b.keys() or any(
        (x - b[name])
        .abs()
        .nan_to_num(1)[a["mask"] | b["mask"] if x.ndim == 2 and x.shape == a["mask"].shape else ...]
        .max()
        > 1e-3
        for name, x in a.items()
        if x.is_floating_point()
    )


def cast(arrays: Arrays, dtype: str) -> Arrays:
    kind = getattr(torch, dtype)
    return {name: (x.to(kind) if x.dtype == torch.float64 else x).contiguous().clone() for name, x in arrays.items()}


def named(arrays: Arrays) -> tuple[int, list[str]]:
    """The exit status of the doctor, and the names that it gives."""
    found = doctor.examine(dump.arranged(arrays))
    return found.status, [fault.title.removeprefix("wiring: ") for f in found.findings for fault in f.names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the dumps here instead")
    args = parser.parse_args()
    rows: list[list[Any]] = []
    for number, (truth, words, arrays) in enumerate(corpus()):
        if args.save:
            args.save.mkdir(parents=True, exist_ok=True)
            save_file(arrays, args.save / f"{number}.safetensors")
            rows.append([f"{number}.safetensors", truth, words])
        else:
            status, names = named(arrays)
            rows.append([truth, words, status, "; ".join(names)])
            print(rows[-1], flush=True)
    path = args.save / "truth.csv" if args.save else ROOT / "benchmark/results/doctor.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
