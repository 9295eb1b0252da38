"""docs/reference/trl.md: its names and defaults are those of the releases and of the code, and its formulas hold."""

import ast
import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import ROOT
from transformers import TrainingArguments

from ppo_rlhf.loop import PPO
from ppo_rlhf.rlvr import arguments, asynchronous, tools
from ppo_rlhf.tldr import policy
from ppo_rlhf.train_policy import flatten

PAGE = (ROOT / "docs/reference/trl.md").read_text()
# What those releases call their arguments, verl's in short; with the defaults of TRL's, null where there is none.
ELSEWHERE = json.loads(Path(__file__).with_name("names_elsewhere.json").read_text())
ELSEWHERE = {
    release: names if isinstance(names, dict) else dict.fromkeys(names) for release, names in ELSEWHERE.items()
}
INHERITED = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}


def defaults(args: Any) -> dict[str, Any]:
    return flatten(dataclasses.asdict(args))


OF_LOOP = {name: argument.default for name, argument in inspect.signature(PPO).parameters.items()}
OF_LOOP |= defaults(policy.PpoArgs())
OF_POLICY = defaults(policy.PRESETS["tldr"])
OF_GRPO = defaults(tools.Args()) | defaults(asynchronous.Args())  # and so of rlvr/policy.py
# Heading of a table: the names of that release that need a row, others that it may have, and ours.
RELEASES = {
    "PPOConfig of TRL 0.11": (ELSEWHERE["TRL 0.11.4 PPOConfig"], {}, OF_LOOP),
    "PPOTrainer of TRL 1.12": (
        ELSEWHERE["TRL 1.12 PPO"],
        INHERITED,
        defaults(policy.Args(task=policy.posts.TASKS["tldr"])),
    ),
    "GRPO in TRL 1.16": (ELSEWHERE["TRL 1.16 GRPO"], INHERITED, OF_GRPO),
    "verl": ({}, ELSEWHERE["verl 0.9.1"], OF_GRPO),
    "open-instruct": ({}, ELSEWHERE["open-instruct e6c3044 GRPO"], OF_GRPO),
}


def section_of(heading: str) -> str:
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def rows_of(heading: str) -> list[list[str]]:
    """Theirs, ours and what differs, of each row of the tables below a heading."""
    rows = re.sub(r"(?m)^\|.*\n\|---.*$", "", section_of(heading))  # without heads
    cells = [[cell.strip() for cell in row.split("|")] for row in re.findall(r"(?m)^\|(.*)\|$", rows)]
    return [[theirs, theirs if ours == "the same" else ours, more] for theirs, ours, more in cells]


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([\w./]+)`", cell)


def stated_in(cell: str) -> dict[str, str]:
    """The default after each name that has one, as in: `learning_rate` 1e-6."""
    return dict(re.findall(r"`([\w.]+)` ([^\s,|]+)", cell))


def is_default(text: str, default: Any) -> bool:
    if default is None or isinstance(default, str | bool):
        return text == str("none" if default is None else default)
    return ast.literal_eval(text) == default


@pytest.mark.parametrize("heading", RELEASES)
def test_names_exist_and_every_name_of_a_release_is_there(heading):
    needed, others, ours = RELEASES[heading]
    rows = rows_of(heading)
    without = section_of(heading).partition("No counterpart: ")[2].partition("\n\n")[0]
    theirs = {name for row in rows for name in names_in(row[0])} | {*names_in(without)}
    assert rows and theirs <= needed.keys() | others.keys() and needed.keys() <= theirs
    for row in rows:
        assert {*names_in(row[1])} <= ours.keys(), row
        dotted = {name for name in names_in(row[2]) if "." in name and "/" not in name and "jsonl" not in name}
        assert {name for name in dotted if not name.startswith("batch.")} <= ours.keys() | others.keys(), row


@pytest.mark.parametrize("heading", RELEASES)
def test_defaults_are_right_and_given_where_they_differ(heading):
    needed, others, ours = RELEASES[heading]
    known = others | needed
    for row in rows_of(heading):
        stated = [stated_in(cell) for cell in row[:2]]
        for names, of_release in zip(stated, (known, ours), strict=True):
            assert all(is_default(text, of_release[name]) for name, text in names.items()), row
        pairs = [names_in(cell) for cell in row[:2]]
        for one, other in zip(*pairs, strict=True) if len(pairs[0]) == len(pairs[1]) else ():
            values = known[one], ours[other]
            if not {None, "", dataclasses.MISSING} & {*values} and values[0] != values[1]:
                assert one in stated[0] and other in stated[1], row


def test_statistics_exist(tiny_models, tiny_tokenizer):
    """Those that `step` returns; the KL penalty is a mean per token in TRL, and a sum over a response here."""
    ppo = PPO(tiny_models("gpt2"), tokenizer=tiny_tokenizer, response_length=4, lr=1e-2, kl_coef=0.5)
    ppo.step(ppo.generate(["a cat", "b"]), [1.0, 2.0])
    batch = ppo.generate(["a cat", "b"])
    metrics, rollout = ppo.step(batch, [1.0, 2.0]), batch.rollout
    of_trl = -0.5 * (rollout.logprobs - batch.ref_logprobs)[rollout.mask].mean().item()
    ours = metrics["objective/non_score_reward"]
    assert ours == pytest.approx(of_trl * metrics["objective/response_length"], rel=1e-5) and abs(ours) > 1e-3
    rows = rows_of("Statistics of TRL 0.11")
    theirs = [name for row in rows for name in names_in(row[0])]
    assert sorted(theirs) == sorted(ELSEWHERE["TRL 0.11.4 stats"])
    assert {name for row in rows for name in names_in(row[1])} <= metrics.keys()


# ---- Formulas --------------------------------------------------------------------------------------------------


def translated(heading: str, settings: dict[str, float]) -> dict[str, float]:
    """Settings of a release, and ours that the formulas below a heading give, such as `a` = `b` / (`c` × `d`)."""
    part = r"\(?(?:`[\w.]+`|processes)\)?"
    for ours, formula in re.findall(rf"`([\w.]+)` = ({part}(?: [/×] {part})*)", section_of(heading)):
        for name in re.findall(r"[a-z][\w.]*", formula):
            formula = re.sub(rf"`{name}`|\b{name}\b", str(settings[name]), formula)
        settings = settings | {ours: eval(formula.replace("×", "*"))}
    return settings


def sizes_of(settings: dict[str, float]) -> arguments.PpoSizes:
    names = ("batch_size", "nminibatches", "noptepochs", "total_episodes")
    ours = {name: settings[f"ppo.{name}"] for name in names}
    assert all(value == int(value) for value in ours.values())
    ppo = arguments.PpoArgs(**{name: int(value) for name, value in ours.items()})
    return arguments.ppo_sizes(arguments.Args(ppo=ppo), 2)


@pytest.mark.parametrize(("passes", "accumulation", "iterations"), [(4, 2, 1), (8, 8, 1), (4, 2, 3), (6, 1, 2)])
def test_grpo_makes_as_many_steps_as_trls_loop(passes, accumulation, iterations):
    """3 episodes per pass on each of 2 processes, as in the figure of TRL's `_get_train_sampler`."""
    done = steps = generations = 0
    while steps < 48:  # max_steps: every pass reads a slice of the batch, which is generated anew now and then
        generations += done % (passes * iterations) == 0
        done += 1
        steps += done % accumulation == 0
    settings = {"generation_batch_size": 3 * passes * 2, "max_steps": 48, "ppo.noptepochs": iterations}
    settings |= {"steps_per_generation": passes, "gradient_accumulation_steps": accumulation}
    sizes = sizes_of(translated("GRPO in TRL 1.16", settings))
    assert (sizes.batch, sizes.updates) == (6 * passes, generations)
    assert sizes.updates * sizes.steps_per_update == steps


def test_sizes_of_ppo_and_of_verl():
    """By hand: 128 episodes in steps of 16 x 2; 8 x 4 x 2 episodes; 96 prompts x 5 responses in steps of 24 x 5."""
    settings = {"batch_size": 128, "mini_batch_size": 16, "gradient_accumulation_steps": 2}
    assert translated("PPOConfig of TRL 0.11", settings)["nminibatches"] == 4
    settings = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "processes": 2}
    assert translated("PPOTrainer of TRL 1.12", settings)["ppo.batch_size"] == 64
    settings = {"data.train_batch_size": 96, "rollout.n": 5, "actor.ppo_mini_batch_size": 24, "ppo.noptepochs": 1}
    sizes = sizes_of(translated("verl", settings | {"trainer.total_training_steps": 10}))
    assert (sizes.batch, sizes.updates, sizes.steps_per_update) == (480, 10, 4)


# ---- docs/from_trl.md ------------------------------------------------------------------------------------------


def test_the_arguments_nearest_to_trls_defaults(tiny_models, tiny_tokenizer):
    page = (ROOT / "docs/from_trl.md").read_text()
    given = eval(re.search(r"ppo = PPO\(\s*model, (lr=.*)\n\)\n", page).expand(r"dict(\1)"))
    trl, adam = ELSEWHERE["TRL 0.11.4 PPOConfig"], inspect.signature(torch.optim.Adam).parameters
    assert given == {
        "lr": trl["learning_rate"],
        "adam_eps": adam["eps"].default,
        "weight_decay": adam["weight_decay"].default,
        "kl_coef": trl["init_kl_coef"],
        "kl_target": trl["target"],
        "temperature": 1.0,
        "critic": "shared",  # a head, of AutoModelForCausalLMWithValueHead
    }
    ppo = PPO(tiny_models("gpt2"), tokenizer=tiny_tokenizer, **given)
    group = ppo.optimizer.param_groups[0]
    assert (group["lr"], group["eps"], group["weight_decay"]) == (1.41e-5, 1e-8, 0)
