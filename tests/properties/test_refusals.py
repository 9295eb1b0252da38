"""Bad input ends in one line that says what is wrong, with status 2, and leaves the folder as it was.

Numbers outside their bounds are tried for each field of each script. A row of the table is one script in a folder of
good files, with an argument or a variable that cannot be meant, or with a damaged file. There is a row for each
message that the scripts or their helpers can give; rows of data files are in test_rows.py.
"""

import dataclasses
import functools
import importlib
import json
import math
import re
import shutil
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from annotated_types import Ge, Gt, Le, Lt
from processes import Result, launch, launch_together
from refusals import (
    Damage,
    Row,
    all_of,
    command,
    contents,
    edit,
    edit_lines,
    edit_tensors,
    remove,
    run,
    seal,
    with_value,
    write,
)
from runs import only
from transformers import PreTrainedTokenizerBase

from ppo_rlhf import train_policy, train_reward
from ppo_rlhf.rlvr import tools as rlvr_tools
from ppo_rlhf.train_both import messages_of
from ppo_rlhf.train_policy import InputError

POLICY_RUN = "runs/train_policy__tales__1__7"
POLICY_META = f"{POLICY_RUN}/meta.json"

# ---- Commands --------------------------------------------------------------------------------------------------

MODEL_AND_TEXTS = "--preset tales --base_model model --task.query_dataset stories.txt"
SMALL_PPO = "--ppo.total_episodes 32 --ppo.batch_size 16 --ppo.whiten_groups 2"
SMALL_REWARD = "--num_train 16 --batch_size 8 --rollout_batch_size 16 --normalize_samples 16"
POSTS = "--preset posts --task.posts world --task.comparisons world"
SUMS = (
    "--preset sums --base_model tiny/model --task.problems tiny --ppo.batch_size 16 --ppo.total_episodes 48 "
    "--task.response_length 20"
)

policy = command(1, "train_policy.py", f"{MODEL_AND_TEXTS} {SMALL_PPO} --rewards.trained_model reward")
function = command(1, "train_policy.py", f"{MODEL_AND_TEXTS} {SMALL_PPO} --rewards.monitor ''")
reward = command(1, "train_reward.py", f"{MODEL_AND_TEXTS} {SMALL_REWARD} --label_dataset labels.json")
both = command(
    1,
    "train_both.py",
    f"{MODEL_AND_TEXTS} {SMALL_PPO.replace('--', '--policy.')} {SMALL_REWARD.replace('--', '--reward.')} "
    f"--reward.label_dataset labels.json",
)
sample = command(1, "sample.py", "--policy policy --n 2")
resumed_policy = command(1, "train_policy.py", f"--resume {POLICY_RUN}")
resumed_both = command(1, "train_both.py", f"--resume {POLICY_RUN}")
sft = command(2, "tldr/sft.py", f"{POSTS} --base_model world/model --batch_size 16 --eval_posts 1")
summary_reward = command(2, "tldr/reward.py", f"{POSTS} --base_model sft --batch_size 16 --normalize_posts 4")
summary_policy = command(
    2,
    "tldr/policy.py",
    f"{POSTS} --base_model sft --rewards.trained_model reward --ppo.total_episodes 16 --ppo.batch_size 16",
)
all_three = command(
    2,
    "tldr/all.py",
    f"{POSTS} --base_model world/model --sft.batch_size 16 --reward.batch_size 16 --policy.ppo.total_episodes 32 "
    f"--policy.ppo.batch_size 16",
)
rlvr = command(3, "rlvr/policy.py", SUMS)
rlvr_async = command(3, "rlvr/asynchronous.py", SUMS)

# ---- Chapter 1 -------------------------------------------------------------------------------------------------


def labels(*rows: dict[str, Any]) -> Damage:
    return write("labels.json", rows)


def own_function(code: str, *words: str, name: str = "mine:scores") -> Row:
    """A function of texts, in the module mine.py."""
    return function(f"--rewards.function {name}", f"--rewards.function {name}", *words, damage=write("mine.py", code))


ARGUMENTS = {
    "unknown preset": policy("--preset tale", "--preset tale", "tales-descriptiveness"),
    "experiment above the folder": reward("--exp_name ../up", "--exp_name ../up: String should match"),
    "experiment with a very long name": both(f"--policy.exp_name {'x' * 300}", "--policy.exp_name xxx", "{1,150}"),
    "one name for two runs": both("--policy.exp_name train_reward", "--policy.exp_name", "name of its own"),
    "truncation beyond the response": policy("--task.truncate_after 25", "--task.truncate_after 25", "24"),
    "stop text of two tokens": policy("--task.truncate_text 'two words'", "--task.truncate_text 'two", "exactly one"),
    "coefficient below 0": both(
        "--policy.rewards.adaptive_kl.target 6 --policy.rewards.adaptive_kl.horizon 3",
        *("--policy.rewards.adaptive_kl.horizon 3", "4 would do"),
    ),
    "batch is not whole minibatches": both(
        "--policy.ppo.batch_size 34 --policy.ppo.nminibatches 2",
        *("policy.ppo.batch_size 34", "whiten_groups x nminibatches", "36 does"),
    ),
    "groups too small to whiten": policy("--ppo.nminibatches 2", "whiten_rewards", "32 is enough"),
    "labels are not whole batches": both("--reward.num_train 15", "num_train 15", "--reward.num_train 8 is"),
    "no labels": reward("--label_dataset no.json", "--label_dataset no.json"),
    "more labels held out than there are": reward(
        "", "--num_train 16", "of which 96 are held out", damage=write("labels.meta.json", {"held_out": 400})
    ),
    "labels that are all the same": reward(
        "", "score 0.5", damage=labels(*[{"query": "Mara", "sample": " found.", "score": 0.5}] * 24)
    ),
    "labels longer than the model reads": reward(
        "",
        "24 others have more than the model's 160 tokens",
        damage=labels(*[{"query": "Mara" + " Mara" * 199, "sample0": ".", "sample1": ".", "best": 0}] * 24),
    ),
    "unknown texts": policy("--task.query_dataset nothing", "--task.query_dataset nothing", ".jsonl"),
    "no texts to hold out": both(
        "--task.query_dataset x.txt", "x.txt", "none of its 0 texts", damage=write("x.txt", "A. B.\n" * 49)
    ),
    "function without a module": own_function("", "no attribute 'py'", name="mine.py"),
    "function whose module ends the process": own_function("import sys\nsys.exit(0)", "SystemExit"),
    "function that raises two lines": function(
        "--rewards.function mine:scores",
        *("the function scores: ValueError: one two", "mine.py:2"),
        damage=write("mine.py", "def scores(queries, responses):\n    raise ValueError('one\\ntwo')"),
    ),
    "monitor's name is taken": both(
        "--policy.rewards.monitor mine:kl", "--policy.rewards.monitor mine:kl: objective/kl is another metric"
    ),
}

WEIGHTS, HEAD = "model/model.safetensors", "reward/reward_head.safetensors"

MODELS = {
    "model that is nowhere": policy("--base_model some-gpt", "--base_model some-gpt", "give a folder", "or tales"),
    "model is the folder of a run": policy("--base_model models", "--base_model models cannot be loaded"),
    "model is a reward model": policy("--base_model reward", "--base_model reward is a reward model"),
    "model of another width": policy("", "--base_model model", damage=edit("model/config.json", "n_embd", to=32)),
    "model without a tensor": policy(
        "", "ln_f.weight", damage=edit_tensors(WEIGHTS, lambda tensors: tensors.pop("transformer.ln_f.weight"))
    ),
    "model with fewer rows than tokens": policy(
        "", "model has an embedding of", damage=edit("model/tokenizer.json", "model", "vocab", "zzz", to=5_000)
    ),
    "model without a tokenizer": policy(
        "", "token", damage=all_of(remove("model/tokenizer.json"), remove("model/tokenizer_config.json"))
    ),
    "reward model is a policy": policy("--rewards.trained_model policy", "no policy/reward_head.safetensors"),
    "reward model of another vocabulary": policy(
        "",
        "--rewards.trained_model reward has another tokenizer than model",
        damage=edit("reward/tokenizer.json", "model", "vocab", "a", to=50_256),
    ),
    "head without a gain": policy("", HEAD, "gain", damage=edit_tensors(HEAD, lambda tensors: tensors.pop("gain"))),
    "ppo_rlhf.json is a list": policy(
        "", "reward is not the folder of a model", damage=write("reward/ppo_rlhf.json", [])
    ),
}


def bad_run(damage: Damage, *words: str) -> Row:
    return resumed_policy("", POLICY_RUN, *words, damage=damage)


def with_other_tensors(folder: Path) -> None:
    """A checkpoint that lacks a weight, with a checksum that fits."""
    checkpoint = folder / POLICY_RUN / "checkpoints/4"
    edit_tensors("tensors.safetensors", lambda tensors: tensors.pop("model.value_head.weight"))(checkpoint)
    seal(checkpoint)


CHECKPOINT = f"{POLICY_RUN}/checkpoints/4"
RUNS = {
    "no such run": resumed_both("--resume runs/none", "runs/none is not the folder of a run"),
    "run that began alone": resumed_both("", POLICY_RUN, damage=remove("runs/train_both__tales__1__7.json")),
    "meta.json is a list": bad_run(write(POLICY_META, []), "is not the folder of a run"),
    "a saved argument is a text": bad_run(edit(POLICY_META, "args", "ppo", "lr", to="fast"), "--ppo.lr fast"),
    "a saved number is nan": bad_run(edit(POLICY_META, "args", "ppo", "lr", to=math.nan), "--ppo.lr nan"),
    "another run": resumed_policy(
        "--rewards.adaptive-kl.target None --track",
        "--rewards.adaptive_kl.target None: the run to resume has 6.0",
        *("only these may change", "ppo.total_episodes", "ppo.local_micro_batch_size", "track", "save_interval"),
    ),
    "another learning rate for one of two": resumed_both("--reward.lr 0.5", "--reward.lr", "its own script"),
    "fewer episodes than were made": resumed_policy(
        "--ppo.total_episodes 32", "the run has made 4 steps, more than the 2"
    ),
    "no checkpoint of a finished run": bad_run(remove(f"{POLICY_RUN}/checkpoints"), "its checkpoints are gone"),
    "checkpoint with another number": bad_run(
        edit(f"{CHECKPOINT}/state.json", "kl_coef", to=0.5),
        *(
            "checkpoints/4 is damaged",
            "its files are not what was written",
            "remove it to resume from the one before",
        ),
    ),
    "checkpoint of other tensors": resumed_policy(
        "", "checkpoints/4 is damaged", "model.value_head.weight", damage=with_other_tensors
    ),
}
INFO = "policy/ppo_rlhf.json"
SAMPLES = {
    "sample of a reward model": sample("--policy reward", "--policy reward is a reward model"),
    "sample into a folder": sample("--out models", "models"),
    "sample of an empty prompt, over a file": sample("--prompt '' --out labels.json", "--prompt", "at least one"),
    "sample with nobody's function": sample("", "--trust_remote_code", damage=edit(INFO, "function", to="m:f")),
}

# ---- Chapters 2 and 3 ------------------------------------------------------------------------------------------


ARTICLE = {
    "info": {"article": "Mara robbed sailors.\n" * 100},
    "summaries": [{"text": " One."}, {"text": " Two."}],
    "choice": 0,
}
LONG_ARTICLE = edit_lines(
    "world/comparisons_validation.jsonl", lambda lines: [*lines, json.dumps(ARTICLE).encode() + b"\n"]
)

CHAPTER_2 = {
    "reward model that starts from nothing": summary_reward("--base_model ''", "--base_model is empty"),
    "fewer episodes than a batch": summary_policy(
        "--ppo.total_episodes 15", "--ppo.total_episodes 15 is less than an update", "16 would do"
    ),
    "label of our own reward model": summary_policy("--rewards.label GOOD", "--rewards.label GOOD does nothing"),
    "neither reward model nor function": summary_policy(
        "--base_model x --rewards.trained_model ''", "give one of --rewards.trained_model and --rewards.function"
    ),
    "posts that are nowhere": sft("--task.posts nowhere", "--task.posts nowhere: unknown"),
    "no comparisons": all_three("", "no train row compares", damage=write("world/comparisons_train.jsonl", "")),
    "articles longer than the model reads": summary_reward(
        "", "256 tokens", "--task.article_query_length or --task.comparison_length", damage=LONG_ARTICLE
    ),
    "adapters on no layer": all_three(
        "--policy.lora.rank 2 --policy.lora.target_modules nothing",
        "--policy.lora.target_modules 'nothing': the base model has no layer 'nothing'",
    ),
    "critic that is nowhere": all_three("--policy.rewards.value_model x", "--policy.rewards.value_model x is no rew"),
    "monitor of a taken name": all_three(
        "--policy.rewards.monitor m:kl", "--policy.rewards.monitor m:kl: the name kl is taken"
    ),
    "one name for two stages": all_three("--policy.exp_name tldr_sft", "give each stage a name of its own"),
    "task of one stage": all_three("--policy.task.query_length 9", "--policy.task", "give --task.query_length"),
    "reward model where one is trained": all_three("--policy.rewards.function m:f", "--policy.rewards.function"),
}

FULL = "--rewards.kl_coef 0.1 --rewards.kl_estimator full"
RLOO = "--ppo.advantage rloo --ppo.samples_per_prompt 4 --ppo.critic_warmup 0"
GDPO = f"{RLOO} --rewards.format gsm8k_format".replace("rloo", "gdpo")
RLVR = {
    "--ppo.batch_size 128 --ppo.total_episodes 128": "--task.problems has 64 problems, fewer than the 128",
    "--ppo.advantage grpo": "--ppo.advantage grpo needs --ppo.samples_per_prompt 2 or more",
    GDPO.replace("--rewards.format gsm8k_format", ""): "add --rewards.format or --rewards.trained_model",
    f"{GDPO} --rewards.kl_coef 0.1": "--ppo.advantage gdpo has no --rewards.kl_coef",
    f"{GDPO} --ppo.filter_groups": "which --ppo.filter_groups drops",
    "--ppo.filter_groups": "--ppo.samples_per_prompt 2 or more",
    f"{RLOO} --ppo.filter_groups --rewards.trained_model x": "--ppo.filter_groups never acts",
    FULL: "--rewards.kl_estimator full needs --rewards.kl_loss_estimator full",
    f"{FULL} --rewards.kl_loss_coef 0.1 --rewards.kl_loss_estimator full": "--ppo.whiten_advantages False",
    "--rewards.adaptive_kl.target 3": "--rewards.adaptive_kl.target moves --rewards.kl_coef, which is 0",
    "--ppo.advantage reinforce++": "--ppo.critic_warmup 5: --ppo.advantage reinforce++ has no critic",
    "--ppo.dual_clip 1.1": "above 1 + --ppo.cliprange_high",
    "--ppo.loss gspo": "--ppo.loss gspo goes with",
    f"{RLOO} --rewards.teacher x": "--ppo.advantage rloo compares responses, but --rewards.teacher judges",
    f"{RLOO} --rewards.steps own_functions:hundredths": "--rewards.steps judges single steps, but --ppo.advantage rl",
    f"{RLOO} --rewards.verifier own_functions:one_for_each_token": "returned rewards of single tokens, but --ppo.adv",
    "--rewards.steps own_functions:letters": "--rewards.steps own_functions:letters failed: TypeError",
    "--rewards.steps x": "--rewards.steps",
    "--rewards.teacher x --rewards.kl_estimator k3": "--rewards.teacher: with --rewards.kl_estimator k3",
    "--rewards.overlong_buffer 21": "--rewards.overlong_buffer must be at most --task.response_length 20",
    "--rewards.kl_coef 0.1 --rewards.adaptive_kl.target 3 --rewards.adaptive_kl.horizon 3": "horizon 3: at least 4",
    "--ppo.total_episodes 15": "--ppo.total_episodes is less than an update",
}
CHAPTER_3 = {arguments: rlvr(arguments, words) for arguments, words in RLVR.items()} | {
    "teacher of another vocabulary": rlvr(
        "--rewards.teacher other",
        "--rewards.teacher other has another tokenizer than the policy",
        damage=all_of(
            lambda folder: shutil.copytree(folder / "tiny/model", folder / "other"),
            edit("other/tokenizer.json", "model", "vocab", "a", to=200),
        ),
    ),
    "groups that are sampled ahead": rlvr_async(
        f"{RLOO} --ppo.filter_groups --staleness 1", "--ppo.filter_groups goes with --staleness 0"
    ),
}

REFUSALS = ARGUMENTS | MODELS | RUNS | SAMPLES | CHAPTER_2 | CHAPTER_3
IN_A_PROCESS = ["function whose module ends the process", "sample into a folder"]
# Commands in which nothing is wrong with the same files.
GOOD = {
    "train_policy": policy(),
    "train_policy with a function": function("--rewards.function rewards:length --rewards.monitor rewards:length"),
    "train_reward": reward(),
    "train_both": both(),
    "sample": sample("--out rows.jsonl --reward_model reward"),
    "train_policy --resume": resumed_policy(),
    "train_both --resume": resumed_both(),
    "tldr/sft": sft(),
    "tldr/reward": summary_reward("--task.comparison_length 300"),
    "tldr/policy": summary_policy(),
    "tldr/all": all_three(),
    "rlvr/policy": rlvr(),
    "rlvr/asynchronous": rlvr_async(),
}

# ---- Good files ------------------------------------------------------------------------------------------------


def make_files_1(folder: Path, world: Path, runs: Path) -> None:
    """A model, texts, labels, a function, and the runs and models of train_both.py, whose time stamp becomes 7."""
    shutil.copytree(world / "model", folder / "model")
    shutil.copy(world / "stories.txt", folder)
    shutil.copy(world / "labels/sentiment/offline_5k.json", folder / "labels.json")
    shutil.copy(world / "labels/sentiment/offline_5k.meta.json", folder / "labels.meta.json")
    (folder / "rewards.py").write_text("def length(queries, responses):\n    return list(map(len, responses))\n")
    for kind in ("runs", "models"):
        for whole in (runs / kind).glob("*/"):
            name, _, timestamp = whole.name.rpartition("__")
            shutil.copytree(whole, folder / f"{kind}/{name}__7")
    shutil.copy(only(runs, "runs/*.json"), folder / "runs/train_both__tales__1__7.json")
    for path in [*folder.glob("runs/*/meta.json"), *folder.glob("models/*/*/ppo_rlhf.json")]:
        path.write_text(path.read_text().replace(timestamp, "7"))
    for kind in ("reward", "policy"):
        shutil.copytree(only(folder, f"models/*/{kind}"), folder / kind)
    edit(INFO, "reward_model", to="reward")(folder)
    edit(INFO, "base_model", to="model")(folder)


@pytest.fixture(scope="module")
def good_files(tmp_path_factory, request) -> Callable[[int], Path]:
    """The folder with good files for the scripts of a chapter."""

    @functools.cache
    def files(chapter: int) -> Path:
        folder, whole = tmp_path_factory.mktemp("good"), request.getfixturevalue
        if chapter == 1:
            make_files_1(folder, whole("tiny_world"), whole("both").folder)
        elif chapter == 2:
            shutil.copytree(whole("tiny_posts"), folder / "world")
            for kind in ("sft", "reward"):
                shutil.copytree(whole("all_three").model(kind), folder / kind)
        else:
            shutil.copytree(whole("tiny_sums"), folder / "tiny")
        return folder

    return files


@pytest.fixture
def copy(good_files, tmp_path) -> Callable[[Row], Path]:
    """A copy of the good files for a row, with its damage."""

    def copied(row: Row) -> Path:
        folder = Path(shutil.copytree(good_files(row.chapter), tmp_path / "copy"))
        row.damage(folder)
        return folder

    return copied


# ---- Tests -----------------------------------------------------------------------------------------------------


def check_refused(row: Row, folder: Path, run: Callable[[Row, Path], Result] = run) -> None:
    before = contents(folder)
    result = run(row, folder)
    assert "Traceback" not in result.stdout + result.stderr
    assert result.status == 2, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.strip()]
    assert line.startswith("error: ")
    for word in row.words:
        assert word in line
    assert contents(folder) == before


@pytest.mark.parametrize("row", REFUSALS.values(), ids=REFUSALS)
def test_bad_input_ends_in_one_line_and_leaves_nothing(row, copy):
    assert row.words
    check_refused(row, copy(row))


@pytest.mark.parametrize("name", IN_A_PROCESS)
def test_bad_input_in_a_process_of_its_own(name, copy):
    def start(row: Row, folder: Path) -> Result:
        return launch(row.script, *row.arguments, folder=folder, PYTHONDONTWRITEBYTECODE="1", **row.environment)

    check_refused(REFUSALS[name], copy(REFUSALS[name]), start)


def test_the_first_of_two_processes_says_it(copy):
    """Both end."""

    def start(row: Row, folder: Path) -> Result:
        first, second = launch_together(2, row.script, *row.arguments, folder=folder, **row.environment)
        assert (second.status, second.stderr) == (2, "")
        return first

    row = all_three("--reward.batch_size 15", "--reward.batch_size 15", "2 (processes", "16 does")
    check_refused(row, copy(row), start)


@pytest.mark.parametrize("row", GOOD.values(), ids=GOOD)
def test_nothing_is_wrong_with_the_undamaged_files(row, copy):
    result = run(row, copy(row))
    assert result.status == 0 and "error" not in result.stderr, result.stderr


@pytest.mark.parametrize("command", [policy, reward, sft, summary_reward, summary_policy, rlvr])
def test_what_cannot_be_saved_is_refused_before_the_training(command, copy, monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("no file for this")

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", refuse)
    row = command("", "could not be saved: ValueError: no file for this")
    check_refused(row, copy(row))


# ---- Numbers ---------------------------------------------------------------------------------------------------

NEEDED = {"sample": ["--policy", "x"], "judge": ["--candidate", "x"]}  # without which a command does not begin
TRAINING = ["train_reward", "train_policy", "train_both", "tldr/sft", "tldr/reward", "tldr/policy", "tldr/all"]
TRAINING += ["rlvr/policy", "rlvr/asynchronous", "rlvr/tools"]
# A number without bounds is probably one whose bounds were forgotten, but for these.
ANY_NUMBER = {
    "task.penalty_reward_value",
    "rewards.trained_weight",
    "rejection_high",  # it has a bound together with rejection_low
}
NOT_FINITE = [math.nan, math.inf, -math.inf]


def arguments_of(script: str) -> Any:
    module = importlib.import_module(f"ppo_rlhf.{script.replace('/', '.')}")
    if script in NEEDED:
        return module.Args(**{NEEDED[script][0][2:]: "x"})
    return next(iter(module.PRESETS.values()))


def numbers(group: Any, prefix: str = "") -> Iterator[tuple[str, type, list[Any]]]:
    """The name of each number among the arguments, as ppo.lr; its type; and its bounds."""
    for name, hint in typing.get_type_hints(type(group), include_extras=True).items():
        if dataclasses.is_dataclass(hint):
            yield from numbers(getattr(group, name), f"{prefix}{name}.")
        for kind in [hint, *(typing.get_args(hint) if typing.get_origin(hint) is not typing.Annotated else ())]:
            bounds = list(getattr(kind, "__metadata__", ()))
            bounds = [bound for each in bounds for bound in getattr(each, "metadata", [each])]  # of pydantic's Field
            if (bare := typing.get_args(kind)[0] if bounds else kind) in (int, float):
                yield prefix + name, bare, bounds


def outside(kind: type, bounds: list[Any]) -> Iterator[float]:
    """Values next to the bounds, where they are refused."""
    step = 1 if kind is int else 1e-9
    for bound in bounds:
        match bound:
            case Gt(limit) | Lt(limit):
                yield kind(limit)
            case Ge(limit):
                yield kind(limit - step)
            case Le(limit):
                yield kind(limit + 1)
            case _:
                pytest.fail(f"this test doesn't know {bound}")


@pytest.mark.parametrize("script", [*TRAINING, *NEEDED])
def test_a_number_outside_its_bounds_is_refused_by_its_name(script, tmp_path):
    """One value of each number is given to the command."""
    args = arguments_of(script)
    train_policy.checked(args)
    for name, kind, bounds in numbers(args):
        assert bounds or re.sub(r"^(sft|reward|policy)\.", "", name) in ANY_NUMBER, f"--{name} has no bound"
        assert Le(1) in bounds or not name.endswith(("gamma", "lam")), f"--{name} may be above 1"
        values = [*outside(kind, bounds), *(NOT_FINITE if kind is float else [])]
        for value in values:
            with pytest.raises(InputError, match=rf"^--{name} [^\n]*: Input should be [^\n]*$"):
                train_policy.checked(with_value(args, name, value))
        words = [*NEEDED.get(script, []), f"--{name}={values[0]}"]
        check_refused(Row(chapter=0, script=f"{script}.py", arguments=words, words=(f"--{name}",)), tmp_path)


@pytest.mark.parametrize("script", TRAINING)
def test_a_call_of_train_refuses_it_too(script, in_a_fresh_folder):
    """Where no command line has been read."""
    module = importlib.import_module(f"ppo_rlhf.{script.replace('/', '.')}")
    with pytest.raises(ValueError, match=r"seed -1: .*greater than or equal to 0"):
        module.train(dataclasses.replace(arguments_of(script), seed=-1))
    assert contents(Path()) == {}


@pytest.mark.parametrize(
    ("script", "without", "message"),
    [
        ("rlvr_policy", None, "it is a run of rlvr_policy; resume"),
        ("rlvr_tools", "seed", "another version lacks --seed"),
    ],
)
def test_a_run_is_resumed_by_the_script_that_began_it(script, without, message, tmp_path):
    """Else arguments that it lacks would get defaults, such as a tool."""
    args = dataclasses.asdict(rlvr_tools.PRESETS["sums-tools"])
    args.pop(without, None)
    (tmp_path / "meta.json").write_text(json.dumps({"script": script, "args": args, "wall_time": 1.0}))
    with pytest.raises(InputError, match=message):
        train_policy.parse_args(rlvr_tools.PRESETS, ["--resume", str(tmp_path)])


def test_a_seed_fits_into_64_bits():
    for module in (train_policy, train_reward):
        with pytest.raises(ValueError, match=r"^--seed 9223372036854775808: "):
            module.checked(dataclasses.replace(module.Args(), seed=2**63))


def test_a_model_that_reads_too_few_tokens_is_refused(tiny_models):
    model = tiny_models("gpt2", 29)
    longest = model.config.max_position_embeddings
    train_policy.check_length(model, "x", longest)
    with pytest.raises(InputError, match=f"^x reads at most {longest} tokens"):
        train_policy.check_length(model, "x", longest + 1)


@pytest.mark.parametrize("kind", ["critic", None])
def test_a_critic_is_no_reward_model(kind, tiny_reward, tmp_path):
    """Nor is what ppo_rlhf.json doesn't call one."""
    folder = shutil.copytree(tiny_reward, tmp_path / "value")
    info = train_policy.read_info(folder) | {"kind": kind}
    train_policy.write_json(folder / "ppo_rlhf.json", info)
    args = train_policy.Args(rewards=train_policy.RewardsArgs(trained_model=str(folder)))
    with pytest.raises(InputError, match=f"value is a {kind}; it must be a reward model"):
        train_policy.load_reward_model(args, tokenizer=None, device=None)


# ---- Names of arguments ----------------------------------------------------------------------------------------


def test_an_argument_has_the_name_of_its_stage():
    """Those of all stages, and of none here, have their own."""
    with pytest.raises(InputError) as caught, messages_of("policy", train_policy.Args()):
        raise train_reward.InputError(
            "--rewards.kl_coef 1, ppo.lr, --task.temperature, --base_model, a dtype, lora.rank"
        )
    named = "--policy.rewards.kl_coef 1, policy.ppo.lr, --task.temperature, --base_model, a dtype, lora.rank"
    assert str(caught.value) == named
