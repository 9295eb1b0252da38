"""Error messages name arguments as they are typed, --ppo.lr or --policy.ppo.lr, and leave all other text alone."""

import ast
import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import with_value

from ppo_rlhf import train_both, train_policy, train_reward
from ppo_rlhf.lib import pretrained, several_stages
from ppo_rlhf.lib.errors import InputError, NumericalError, flag, typed, typed_as
from ppo_rlhf.lib.files import flatten
from ppo_rlhf.lib.processes import check_finite
from ppo_rlhf.lib.several_stages import flags_of
from ppo_rlhf.tldr import (
    all as tldr_all,
    models,
    policy as tldr_policy,
    posts,
    reward as tldr_reward,
    sft as tldr_sft,
)
from ppo_rlhf.train_policy import task_ids
from ppo_rlhf.worlds import smollm

STAGES = {train_both: ("reward", "policy"), tldr_all: ("sft", "reward", "policy")}
PRESET = {train_both: "tales", tldr_all: "posts"}
NAMES = {script: set(flatten(dataclasses.asdict(script.PRESETS[PRESET[script]]))) for script in STAGES}


class Trains(Exception):
    """A script found nothing wrong with its arguments."""


@pytest.fixture
def until_training(monkeypatch, tiny_tokenizer, tmp_path):
    """The scripts with several stages stop once they have checked the arguments of all."""

    def stop(*_, **__):
        raise Trains

    monkeypatch.setattr(several_stages.Stages, "train", stop)
    monkeypatch.setattr(pretrained, "load_tokenizer", lambda *_: tiny_tokenizer)
    monkeypatch.setattr(train_policy, "QueryStream", stop)
    for module, name in ((posts, "read_posts"), (pretrained, "empty_model")):
        monkeypatch.setattr(module, name, stop)
    monkeypatch.chdir(tmp_path)


# ---- What is not an argument -----------------------------------------------------------------------------------

FOREIGN = [
    "ppo.lr begins this one",
    "there is no ppo.lr, --ppo.lr or (ppo.lr here",
    "/data of/ ppo.lr.json: [Errno 2] No such file or directory: '/data of/ ppo.lr.json'",
    "ModuleNotFoundError: No module named 'lora'; see lora.rank and rewards.monitor.__doc__",
    "{'ppo.lr': 1, 'seed': 2} --seed task.posts --task.posts",
]


@pytest.mark.parametrize("kind", [InputError, NumericalError])
@pytest.mark.parametrize("text", FOREIGN)
def test_foreign_text_passes_a_stage_unaltered(text, kind):
    with pytest.raises(kind, match=f"^{re.escape(text)}$"), flags_of("policy", train_policy.Args()):
        raise kind(text)


def test_a_module_may_be_named_like_an_argument(until_training):
    args = train_both.PRESETS["tales"]
    rewards = replace(args.policy.rewards, monitor="ppo.lr:task.mean")
    with pytest.raises(InputError) as caught:
        train_both.train(replace(args, policy=replace(args.policy, rewards=rewards)))
    assert str(caught.value) == (
        "--policy.rewards.monitor ppo.lr:task.mean: ModuleNotFoundError: No module named 'ppo'"
    )


# ---- What is not there -----------------------------------------------------------------------------------------

NOT_THERE = [
    (train_reward, "", {"label_dataset": "no.json"}, "--label_dataset no.json: no such file"),
    (train_policy, "", {}, "models/ has no reward model of the preset sentiment"),
    (tldr_policy, "", {"base_model": "gpt2"}, "give one of --rewards.trained_model and --rewards.function"),
]


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """A folder in which nothing can be loaded, built or downloaded."""
    loads = [(pretrained, "load_tokenizer"), (train_policy, "load_pretrained"), (models, "load_pretrained")]
    for module, name in (*loads, (smollm, "find_model")):
        monkeypatch.setattr(module, name, lambda *_, name=name, **__: pytest.fail(f"{name} is called"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("script", "preset", "changes", "words"), NOT_THERE)
def test_what_is_not_there_is_found_before_anything_is_loaded(script, preset, changes, words, offline):
    args = script.PRESETS[preset] if preset else script.Args()
    for name, value in changes.items():
        args = with_value(args, name, value)
    with pytest.raises(InputError, match=re.escape(words)):
        script.train(args)
    assert sorted(path.name for path in offline.iterdir() if path.suffix) == []


# ---- What is one -----------------------------------------------------------------------------------------------


def test_an_argument_has_the_name_of_its_stage():
    assert (typed("ppo.lr"), flag("ppo.lr")) == ("ppo.lr", "--ppo.lr")
    with flags_of("policy", train_policy.Args()):
        assert (typed("ppo.lr"), flag("rewards.kl_coef")) == ("policy.ppo.lr", "--policy.rewards.kl_coef")
        for name in ("task.temperature", "base_model", "resume", "lora.rank"):  # of all stages, and of none here
            assert typed(name) == name
        with flags_of("reward", train_reward.Args()):
            assert (typed("lr"), typed("ppo.lr")) == ("reward.lr", "ppo.lr")
        assert typed("ppo.lr") == "policy.ppo.lr"
    with pytest.raises(ZeroDivisionError), flags_of("policy", train_policy.Args()):
        raise ZeroDivisionError
    assert typed("ppo.lr") == "ppo.lr"


@pytest.mark.parametrize("stage", ["", "policy."])
def test_a_broken_number_is_followed_by_the_argument_to_lower(stage):
    names = {"ppo.lr": "policy.ppo.lr"} if stage else {}
    with pytest.raises(NumericalError) as caught, typed_as(names):
        check_finite({"objective/ppo.lr": math.nan}, 3, "ppo.lr")
    assert str(caught.value) == (
        "objective/ppo.lr is nan in step 3; the run stops and saves nothing more; "
        f"if it happens again after --resume, start again with a lower --{stage}ppo.lr"
    )


def test_what_all_stages_share_keeps_its_name(tiny_tokenizer):
    args = train_policy.PRESETS["tales"]
    with pytest.raises(InputError, match=r"^--task.truncate_text "), flags_of("policy", args):
        task_ids(replace(args.task, truncate_text="ab"), tiny_tokenizer)


def wrong_values(script) -> Iterator[tuple[str, object]]:
    """Numbers of the stages' own arguments that few of them take, and texts that none does."""
    for name, value in flatten(dataclasses.asdict(script.PRESETS[PRESET[script]])).items():
        stage, _, own = name.partition(".")
        if stage in STAGES[script] and own.split(".")[0] not in several_stages.SHARED:
            if type(value) in (int, float):
                yield from ((name, number) for number in (-1, 0, 1, 3, 10**9 + 7, 2**63))
            if type(value) is float:
                yield from ((name, number) for number in (-math.inf, math.nan))
            if type(value) is str:
                yield name, "\udcff"


@pytest.mark.parametrize("script", STAGES)
def test_every_argument_in_a_message_is_one_of_the_script(script, until_training):
    """Each message about the arguments of a stage: whatever looks like an argument's name can be typed."""
    named = {}
    for name, value in wrong_values(script):
        try:
            script.train(with_value(script.PRESETS[PRESET[script]], name, value))
        except InputError as error:
            words = named[name, value] = re.findall(r"[a-z]\w+(?:\.[a-z]\w+)+|(?<=--)\w+", str(error))
            assert set(words) <= NAMES[script], error
            # A batch may be larger than what there is to learn from, which is named then.
            assert {name, "policy.ppo.total_episodes", "reward.num_train"} & set(words), error
        except Trains:
            pass
    refused_by_all = (2**63, -math.inf, "\udcff")
    assert {(name, value) for name, value in wrong_values(script) if value in refused_by_all} <= set(named)


def test_an_address_on_the_hub_may_hold_what_looks_like_an_argument(until_training):
    args = with_value(
        with_value(tldr_all.PRESETS["posts"], "policy.upload_model", True), "policy.exp_name", "x--seed"
    )
    with pytest.raises(InputError) as caught:
        tldr_all.train(args)
    assert re.fullmatch(
        r"--policy\.upload_model: .*'owner/x--seed__posts__1__\d+-policy'\. "
        r"--policy\.exp_name and --policy\.hf_entity say what it is called",
        str(caught.value),
    )


# ---- The source ------------------------------------------------------------------------------------------------

FOLDER = Path(train_policy.__file__).parent
IN_STAGES = [
    *(f"lib/{name}" for name in ("checkpoints", "files", "hub", "processes")),
    *("lib/label_files", "lib/text_sources", "tldr/posts", "tldr/models"),
    *(f"lib/{name}" for name in ("chat_templates", "rewards", "reward_functions")),
    *(f"lib/{name}" for name in ("command_line", "run")),
    "train_reward",
    "train_policy",
    "tldr_sft",
    "tldr_reward",
    "tldr_policy",
]
ALL = set().union(
    *(
        flatten(dataclasses.asdict(next(iter(script.PRESETS.values()))))
        for script in (train_reward, train_policy, tldr_sft, tldr_reward, tldr_policy)
    )
)
EVERYWHERE = {"resume", "preset"}  # all scripts have them, under these names
OF_OTHERS = {"nproc_per_node", "always", "dirty", "abbrev", "full"}  # torchrun, git


@pytest.mark.parametrize("module", IN_STAGES)
def test_texts_name_arguments_by_what_is_typed(module):
    """No text of a module that stages run has an argument's name in it; what names one is given none else."""
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    described = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in described
    ]
    flags = {name for text in texts for name in re.findall(r"--(\w[\w.]*)", text)}
    assert flags <= EVERYWHERE | OF_OTHERS
    inside = [text for text in texts if " " in text and re.search(r"(?<![\w/.])(ppo|task|rewards|lora)\.[a-z]", text)]
    assert not inside
    functions = {"flag", "typed", "check_finite", "split_evenly", "rows_at_a_time"}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in functions]
    named = {call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)}
    assert named - {"", "ppo."} <= ALL  # but for prefixes
