"""Bad input ends in one line that says what is wrong, with status 2, and leaves the folder as it was.

A row of a table is one script in a folder of good files: with an argument or a variable that cannot be meant, or with
a damaged file. Numbers outside their bounds are in test_bounds.py.
"""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Result, launch, launch_together
from refusals import (
    Damage,
    GoodFiles,
    Row,
    all_of,
    command,
    contents,
    cut,
    edit,
    edit_bytes,
    edit_lines,
    edit_row,
    edit_tensor,
    edit_tensors,
    fewer_positions,
    fewer_tokens,
    flip,
    link,
    make_folder,
    other_words,
    remove,
    run,
    write,
)
from safetensors.torch import load_file

REWARD_RUN, POLICY_RUN = "runs/train_reward__tales__1__7", "runs/train_policy__tales__1__7"
REWARD_META, POLICY_META = f"{REWARD_RUN}/meta.json", f"{POLICY_RUN}/meta.json"
LABELS_THERE = 24  # rows of labels.json, ratings.json and differences.json

# ---- Commands --------------------------------------------------------------------------------------------------

MODEL_AND_TEXTS = "--preset tales --base_model model --task.query_dataset stories.txt"
SMALL_PPO = "--ppo.total_episodes 32 --ppo.batch_size 16 --ppo.whiten_groups 2 --save_interval 1"
SMALL_REWARD = "--num_train 16 --batch_size 8 --rollout_batch_size 16 --normalize_samples 16 --save_interval 1"
POSTS = "--preset posts --task.posts world --task.comparisons world"
SUMS = "--preset sums --base_model tiny/model --task.problems tiny"
RLVR_SIZES = (
    "--ppo.batch_size 16 --ppo.total_episodes 48 --eval_samples 2 --eval_problems 8 --task.response_length 20"
)
STAGES = "--sft.batch_size 16 --reward.batch_size 16 --policy.ppo.total_episodes 32 --policy.ppo.batch_size 16"

function = command(1, "train_policy.py", f"{MODEL_AND_TEXTS} {SMALL_PPO} --rewards.monitor ''")
policy = command(
    1, "train_policy.py", f"{MODEL_AND_TEXTS} {SMALL_PPO} --rewards.monitor '' --rewards.trained_model reward"
)
reward = command(1, "train_reward.py", f"{MODEL_AND_TEXTS} {SMALL_REWARD} --label_dataset labels.json")
both = command(
    1,
    "train_both.py",
    f"{MODEL_AND_TEXTS} {SMALL_PPO.replace('--', '--policy.')} {SMALL_REWARD.replace('--', '--reward.')} "
    f"--reward.label_dataset labels.json",
)
sample = command(1, "sample.py", "--policy policy --n 2")
resumed_policy = command(1, "train_policy.py", f"--resume {POLICY_RUN}")
resumed_reward = command(1, "train_reward.py", f"--resume {REWARD_RUN}")
resumed_both = command(1, "train_both.py", f"--resume {POLICY_RUN}")
tales_policy = command(1, "train_policy.py", "--preset tales --rewards.function rewards:length --rewards.monitor ''")
tales_reward = command(1, "train_reward.py", f"--preset tales {SMALL_REWARD}")

sft = command(2, "tldr/sft.py", f"{POSTS} --base_model world/model --batch_size 16 --eval_posts 1")
summary_reward = command(2, "tldr/reward.py", f"{POSTS} --base_model sft --batch_size 16 --normalize_posts 4")
summary_policy = command(
    2,
    "tldr/policy.py",
    f"{POSTS} --base_model sft --rewards.trained_model reward --ppo.total_episodes 16 --ppo.batch_size 16",
)
all_three = command(2, "tldr/all.py", f"{POSTS} --base_model world/model {STAGES}")

rlvr = command(3, "rlvr/policy.py", f"{SUMS} {RLVR_SIZES}")
rlvr_async = command(3, "rlvr/asynchronous.py", f"{SUMS} {RLVR_SIZES}")

# ---- Arguments -------------------------------------------------------------------------------------------------

SIZES = {
    "batch is not whole minibatches of whole groups": policy(
        "--ppo.batch_size 18 --ppo.nminibatches 2", "ppo.batch_size 18", "--ppo.batch_size 20"
    ),
    "groups too small to whiten": policy("--ppo.nminibatches 2", "whiten_rewards", "--ppo.batch_size 32"),
    "labels are not whole batches": reward("--num_train 15", "num_train 15", "--num_train 8"),
}

NUMBERS = {
    "truncation beyond the response": policy("--task.truncate_after 25", "--task.truncate_after is 25", "24"),
    "prefix too long for the model": policy(
        f"--task.query_prefix '{'Mara ' * 200}'", "160 tokens", "249", "--task.query_length"
    ),
}


NAMES = {
    "preset": policy("--preset tale", "--preset tale", "tales-descriptiveness"),
    "both: empty preset": both("--preset ''", "--preset", "tales"),
    "stop text of two tokens": policy("--task.truncate_text 'two words'", "--task.truncate_text 'two words'"),
    "start text": reward("--task.start_text '. .'", "--task.start_text '. .'", "exactly one"),
    "end text": both("--task.end_text Xyzzy", "--task.end_text 'Xyzzy'", "exactly one"),
    "experiment above the folder": reward("--exp_name ../up", "--exp_name '../up'", "not a path"),
    "experiment with a very long name": policy(f"--exp_name {'x' * 300}", "xxx", "too long"),
    "owner that the hub would refuse": reward("--hf_entity a/b --upload_model", "--hf_entity", "a/b/train_reward"),
    "both: one name for two runs": both("--policy.exp_name train_reward", "--policy.exp_name", "name of its own"),
    "two scorers": policy("--rewards.function rewards:length", "--rewards.trained_model", "--rewards.function"),
    "no scorer": policy("--rewards.trained_model '' --preset cnndm", "models/ has no reward model", "cnndm"),
    "both: experiment with a very long name": both(
        f"--policy.exp_name {'x' * 300}", "--policy.exp_name xxx", "too long"
    ),
    "both: monitor's name is taken": both(
        "--policy.rewards.monitor rewards:scores", "--policy.rewards.monitor", "the name scores is taken"
    ),
}

BOXES = {
    "unknown flag": policy("--learning_rate 1", "--learning-rate", box=True),
    "unknown flag of a part": both("--reward.ppo.lr 1", "--reward.ppo.lr", box=True),
    "dtype": policy("--dtype float16", "--dtype", "float16", box=True),
    "sample: no policy": command(1, "sample.py", "")("", "--policy", box=True),
}

# ---- Label files -----------------------------------------------------------------------------------------------


def bad_labels(damage: Damage, *words: str, file: str = "labels.json") -> Row:
    return reward(f"--label_dataset {file}", f"--label_dataset {file}", *words, damage=damage)


def every_row(file: str, *keys: str, to: Any = KeyError) -> Damage:
    return all_of(*(edit(file, row, *keys, to=to) for row in range(LABELS_THERE)))


def long_texts(*too_long: int) -> Damage:
    """Labels with a query or a sample of 100 tokens, in turn; in these rows, both have as many."""
    rows = [{"query": "Mara", "sample0": " Mara", "sample1": " Mara", "best": 0} for _ in range(LABELS_THERE)]
    for number, row in enumerate(rows):
        for key in ("query", "sample1") if number in too_long else (("query", "sample1")[number % 2],):
            row[key] += " Mara" * 99
    return write("labels.json", rows)


LABELS = {
    "without a name": reward("--label_dataset ''", "--label_dataset"),
    "a folder": bad_labels(make_folder("labels.json"), "no such file"),
    "ratings that are all the same": reward(
        "--label_dataset ratings.json", "score 0.5", damage=every_row("ratings.json", "score", to=0.5)
    ),
    "both: cut": both("", "--reward.label_dataset", "labels.json", damage=cut("labels.json")),
    "both: too few": both("--reward.num_train 800", "--reward.num_train 800", "24 labels"),
    "more held out than there are": reward(
        "",
        "--num_train 16",
        "24 labels, and its held_out is 400",
        damage=edit("labels.meta.json", "held_out", to=400),
    ),
    "texts longer than the model": reward(
        "--label_dataset labels.json",
        "reads at most 160 tokens",
        "are 200",
        damage=long_texts(5, 7),
    ),
}

# ---- Query files -----------------------------------------------------------------------------------------------


def bad_texts(name: str, content: Any, *words: str) -> Row:
    flag = f"--task.query_dataset {name}"
    return policy(flag, flag, *words, damage=write(name, content))


TEXTS = {
    "a folder": policy("--task.query_dataset x.txt", "x.txt", "No such file", damage=make_folder("x.txt")),
    "unknown name": policy("--task.query_dataset nothing", "nothing", "books", ".jsonl"),
    "unknown suffix": bad_texts("texts.csv", "Mara found a bell. She sang.", ".txt, .jsonl or .json"),
    "no text is short enough": bad_texts("texts.txt", "A. " + "bell " * 40 + ".", "1 texts", "--task.end_text"),
    "bytes that are no text": bad_texts("texts.txt", b"Mara \xff found."),
    "a broken line": bad_texts("texts.jsonl", '"Mara. She sang."\n{"text": "Mara\n', "row 2"),
    "both: none to hold out": both(
        "--task.query_dataset x.txt", "x.txt", "none of its 0 texts", damage=write("x.txt", "A. B.\n" * 49)
    ),
}

# ---- Models ----------------------------------------------------------------------------------------------------

OWN_CODE = {"model_type": "ours", "auto_map": {"AutoConfig": "ours.Config", "AutoModelForCausalLM": "ours.Model"}}
WEIGHTS = "model/model.safetensors"


def bad_model(damage: Damage, *words: str, command: Callable[..., Row] = policy) -> Row:
    return command("", "model", *words, damage=damage)


def only_a_pickle(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "model/pytorch_model.bin")
    (folder / WEIGHTS).unlink()


MODELS = {
    "no such name": policy("--base_model some-gpt", "--base_model some-gpt", "network", "--preset tales"),
    "empty name": policy("--base_model ''", "--base_model"),
    "the folder of a run": policy("--base_model models/train_policy__tales__1__7", "no config.json"),
    "the folder of a reward model's run": reward("--base_model models/train_reward__tales__1__7", "no config.json"),
    "a reward model": reward("--base_model reward", "--base_model reward is a reward model", "policy"),
    "config is not JSON": bad_model(write("model/config.json", "{"), "config.json"),
    "config has a text for a number": bad_model(edit("model/config.json", "n_embd", to="wide"), "n_embd"),
    "config of another width": bad_model(edit("model/config.json", "n_embd", to=32), "transformer."),
    "code of its own": bad_model(write("model/config.json", OWN_CODE), "trust_remote_code"),
    "cut weights": bad_model(cut(WEIGHTS), "safetensors", command=reward),
    "only a pickle": bad_model(only_a_pickle, "safetensors"),
    "a pickle under the name of weights": bad_model(lambda folder: torch.save({}, folder / WEIGHTS), "safetensors"),
    "a tensor is missing": bad_model(
        edit_tensors(WEIGHTS, lambda tensors: tensors.pop("transformer.ln_f.weight")), "ln_f.weight"
    ),
    "too short": bad_model(fewer_positions("model", 40), "40 tokens", "48", "--task.query_length", command=reward),
    "fewer rows than tokens": bad_model(fewer_tokens("model", 500), "500 rows"),
    "no tokenizer": bad_model(all_of(remove("model/tokenizer.json"), remove("model/tokenizer_config.json")), "token"),
    "tokenizer is not JSON": bad_model(write("model/tokenizer.json", "{"), command=reward),
    "tokenizer's settings are a list": bad_model(write("model/tokenizer_config.json", [])),
}

# ---- Reward models ---------------------------------------------------------------------------------------------

HEAD = "reward/reward_head.safetensors"


def bad_reward_model(damage: Damage, *words: str) -> Row:
    return policy("", "reward", *words, damage=damage)


LARGER_VOCABULARY = edit("reward/tokenizer.json", "model", "vocab", "a", to=50_256)

REWARD_MODELS = {
    "a policy": policy("--rewards.trained_model policy", "policy is no reward model"),
    "cut head": bad_reward_model(cut(HEAD), "reward_head.safetensors"),
    "head of another width": bad_reward_model(
        edit_tensor(HEAD, "reward_head.weight", lambda tensor: tensor[:, :8]),
        "reward_head.safetensors",
        "reward_head.weight",
    ),
    "head without a gain": bad_reward_model(edit_tensors(HEAD, lambda tensors: tensors.pop("gain")), HEAD, "gain"),
    "a critic": bad_reward_model(edit("reward/ppo_rlhf.json", "kind", to="critic"), "critic", "be a reward model"),
    "another vocabulary": bad_reward_model(LARGER_VOCABULARY, "is None, that of model 'a'", "they have 882"),
    "no ppo_rlhf.json": bad_reward_model(remove("reward/ppo_rlhf.json"), "ppo_rlhf.json"),
    "ppo_rlhf.json is a list": bad_reward_model(write("reward/ppo_rlhf.json", []), "ppo_rlhf.json"),
}

# ---- Functions in place of a reward model ----------------------------------------------------------------------


def bad_function(code: str, *words: str, name: str = "mine:scores") -> Row:
    """A function of texts, in the module mine.py."""
    flag = f"--rewards.function {name}"
    return function(flag, flag, *words, damage=write("mine.py", code))


FUNCTIONS = {
    "no colon": bad_function("def scores(queries, responses): ...", "write package.module:name", name="mine.py"),
    "relative module": bad_function("", "write package.module:name", name=".mine:scores"),
    "not a function": bad_function("scores = [1.0, 2.0]", "no function"),
    "a module that ends the process": bad_function("import sys\nsys.exit(0)", "SystemExit"),
    "raises several lines": bad_function(
        "def scores(queries, responses):\n    raise ValueError('one\\ntwo')", "ValueError: one two", "mine.py:2"
    ),
    "ends the process": bad_function("def scores(queries, responses): exit(0)", "SystemExit"),
    "both: monitor fails": both(
        "--policy.rewards.monitor mine:tone",
        "--policy.rewards.monitor mine:tone",
        "ZeroDivisionError",
        damage=write("mine.py", "def tone(queries, responses): 1 / 0"),
    ),
}

# ---- Runs to go on with ----------------------------------------------------------------------------------------

METRICS, RUN_SAMPLES = f"{POLICY_RUN}/metrics.csv", f"{POLICY_RUN}/samples.jsonl"
STATE, TENSORS = f"{POLICY_RUN}/checkpoints/2/state.json", f"{POLICY_RUN}/checkpoints/2/tensors.safetensors"


def bad_run(damage: Damage, *words: str) -> Row:
    return resumed_policy("", POLICY_RUN, *words, damage=damage)


def bad_joint(*keys: str, to: Any = KeyError) -> Row:
    """Bad notes of train_both.py in the folder of one of its runs."""
    return resumed_both("", POLICY_RUN, keys[-1], damage=edit(POLICY_META, "joint", *keys, to=to))


def unfinished(run: str) -> Damage:
    """As if a run had been cut off after its first checkpoint."""
    return all_of(remove(f"{run}/checkpoints/2"), edit(f"{run}/meta.json", "finished", to=False))


RUNS = {
    "no such run": resumed_policy("--resume runs/none", "runs/none is not the folder of a run"),
    "both: no such run": resumed_both("--resume runs/none", "runs/none"),
    "run of the other script": resumed_policy(f"--resume {REWARD_RUN}", REWARD_RUN, "its argument"),
    "both: run of one part": resumed_both("", POLICY_RUN, "own script", damage=edit(POLICY_META, "joint", to=None)),
    "meta.json is a list": bad_run(write(POLICY_META, []), "meta.json"),
    "meta.json without arguments": bad_run(edit(POLICY_META, "args"), "meta.json", "arguments"),
    "an argument too many": bad_run(edit(POLICY_META, "args", "top_p", to=1), "its argument", "top_p"),
    "an argument is a text": bad_run(
        edit(POLICY_META, "args", "ppo", "lr", to="fast"), "its argument", "lr", "'fast'"
    ),
    "a saved number is nan": resumed_policy(
        "", "ppo.lr is nan", damage=edit(POLICY_META, "args", "ppo", "lr", to=float("nan"))
    ),
    "both: joint arguments are damaged": bad_joint("args", "seed", to="one"),
    "both: the other run's meta.json is cut": resumed_both("", REWARD_RUN, damage=cut(REWARD_META)),
    "both: the reward model is gone": resumed_both(
        "", f"models/{Path(REWARD_RUN).name}/reward", damage=all_of(remove("models"), unfinished(POLICY_RUN))
    ),
    "no KL target any more": resumed_policy(
        "--rewards.adaptive-kl.target None --track",
        "rewards.adaptive_kl.target 6.0 -> None would make it another run",
        *("only these may change", "ppo.total_episodes", "ppo.local_micro_batch_size", "track", "save_interval"),
    ),
    "both: another learning rate": resumed_both("--reward.lr 0.5", "--reward.lr", "its own script"),
    "fewer episodes than it has made": resumed_policy(
        "--ppo.total_episodes 16", "1 updates", "this run has made 2", "--ppo.total_episodes 32 is enough"
    ),
    "checkpoint with one other byte": bad_run(
        flip(TENSORS),
        *("checkpoints/2", "its files are not what was written", "remove that folder to resume from the one before"),
    ),
    "checkpoint with an edited state": bad_run(edit(STATE, "kl_coef", to=0.5), "checkpoints/2"),
    "checkpoint without a checksum": bad_run(
        edit_bytes(STATE, lambda text: text.replace(b"sha256", b"sha255")), "checkpoints/2", "remove"
    ),
    "checkpoint's state is a list": bad_run(write(STATE, [1]), "checkpoints/2", "remove"),
    "checkpoint without its tensors": bad_run(remove(TENSORS), "checkpoints/2", "remove"),
    "checkpoint of another model": resumed_policy("", "checkpoint", "tensors", damage=fewer_positions("model", 100)),
    "metrics without a header": bad_run(edit_lines(METRICS, lambda lines: lines[1:]), "metrics.csv"),
    "a row of metrics is missing": bad_run(
        edit_lines(METRICS, lambda lines: lines[:-1]), "metrics.csv", "1 of the 2 steps"
    ),
    "a row of metrics is short": bad_run(
        edit_lines(METRICS, lambda lines: [lines[0], b"0,1\n", lines[2]]), "metrics.csv"
    ),
    "no samples": bad_run(remove(RUN_SAMPLES), "samples.jsonl"),
    "a broken line among the samples": bad_run(
        edit_lines(RUN_SAMPLES, lambda lines: [lines[0][:40] + b"\n", *lines]), "samples.jsonl"
    ),
}

# ---- Environment -----------------------------------------------------------------------------------------------

ENVIRONMENT = {
    "threads: words": policy("", "PPO_RLHF_THREADS", "many", PPO_RLHF_THREADS="many"),
    "threads: 0": reward("", "PPO_RLHF_THREADS is '0'", PPO_RLHF_THREADS="0"),
    "cache is a file": policy("--base_model smollm2-135m", "stories.txt", PPO_RLHF_CACHE="stories.txt"),
    "cache is a dangling link": policy("--base_model smollm2-135m", "cache", damage=link("cache", "nowhere/at/all")),
    "runs is a dangling link": reward("", "runs", damage=link("runs", "nowhere/at/all")),
    "wandb mode": policy("--track", "--track", "nonsense", WANDB_MODE="nonsense"),
    "wandb project": reward("--track --wandb_project_name 'a/b:c'", "--track", "project", WANDB_MODE="offline"),
}

# ---- sample.py ------------------------------------------------------------------------------------------------

INFO = "policy/ppo_rlhf.json"


SAMPLES = {
    "a reward model": sample("--policy reward", "--policy reward", "reward model"),
    "half a character": sample("--prompt 'Mara \udcff'", "--prompt", "Unicode"),
    "out in a missing folder": sample("--out nowhere/rows.jsonl", "nowhere/rows.jsonl"),
    "out is a folder": sample("--out models", "models"),
    "no such policy, and rows to write": sample("--policy nowhere --out rows.jsonl", "nowhere"),
    "empty prompt, and rows to write over": sample("--prompt '' --out labels.json", "--prompt", "at least one token"),
    "base model too short": sample("", "model", "40 tokens", damage=fewer_positions("model", 40)),
    "base model of another vocabulary": sample(
        "", "the base model model", "that of policy", "the same kind of model", damage=other_words("model")
    ),
    "a function of nobody's": sample("", "m:f", "--trust_remote_code", damage=edit(INFO, "function", to="m:f")),
    "no such reward model": sample("--reward_model nowhere", "nowhere is no reward model"),
    "reward model is a policy": sample("--reward_model policy", "--reward_model policy is no reward model"),
    "reward model of other words": sample("", "--reward_model reward", "'a'", damage=other_words("reward")),
    "reward model is a critic": sample("", "critic", damage=edit("reward/ppo_rlhf.json", "kind", to="critic")),
    "cut ppo_rlhf.json": sample("", "policy", damage=cut(INFO)),
    "task in ppo_rlhf.json lacks a field": sample(
        "", INFO, "response_length", damage=edit(INFO, "task", "response_length")
    ),
    "task in ppo_rlhf.json has a length of 0": sample(
        "", "response_length is 0", damage=edit(INFO, "task", "response_length", to=0)
    ),
}

# ---- Chapter 2 -------------------------------------------------------------------------------------------------


def long_summary(folder: Path) -> None:
    """One of a pair has more than 200 tokens."""
    summaries = json.loads((folder / "world/comparisons_train.jsonl").read_text().splitlines()[5])["summaries"]
    summaries[1]["text"] = " Mara robbed sailors." * 55
    edit_row("world/comparisons_train.jsonl", 5, summaries=summaries)(folder)


# A validation comparison is of a news article of more than 256 tokens.
LONG_ARTICLE = edit_row("world/comparisons_validation.jsonl", 0, info={"article": "Mara robbed sailors.\n" * 100})


CHAPTER_2 = {
    "policy: fewer than a batch": summary_policy("--ppo.total_episodes 15", "ppo.total_episodes is 15", "16"),
    "sft: two processes": sft("--batch_size 15", "batch_size 15", "2 (processes", "--batch_size 16", processes=2),
    "policy: a label of our own reward model": summary_policy("--rewards.label GOOD", "--rewards.label GOOD does"),
    "policy: two processes": summary_policy(
        "--ppo.batch_size 14 --ppo.nminibatches 2", "4 (processes", "--ppo.batch_size 16", processes=2
    ),
    "all: the same name twice": all_three("--sft.exp_name x --policy.exp_name x", "--sft.exp_name", "its own"),
    # what the stages share
    "all: seed of one stage": all_three("--sft.seed 2", "--sft.seed", "give --seed"),
    "all: base model of one stage": all_three("--reward.base_model=sft", "--reward.base_model", "give --base_model"),
    "all: task of one stage": all_three("--policy.task.query_length 9", "--policy.task", "--task.query_length"),
    "all: preset of one stage": all_three("--sft.preset posts", "--sft.preset", "give --preset"),
    "all: resume of one stage": all_three("--policy.resume x", "--policy.resume", "give --resume"),
    "all: a reward model": all_three("--policy.rewards.trained_model reward", "--policy.rewards.trained_model"),
    "all: a function": all_three("--policy.rewards.function m:f", "--policy.rewards.function", "tldr/policy.py"),
    # what only a later stage needs
    "all: experiment with a very long name": all_three(f"--reward.exp_name {'x' * 300}", "--reward.exp_name xxx"),
    "all: adapters for no layer": all_three(
        "--policy.lora.rank 2 --policy.lora.target_modules q", "--policy.lora.target_modules 'q': ", "no layer 'q'"
    ),
    "all: a critic that is not there": all_three(
        "--policy.rewards.value_model nowhere", "nowhere is no reward model"
    ),
    "all: critic of another tokenizer": all_three(
        "--policy.rewards.value_model critic",
        "--policy.rewards.value_model critic",
        "the same kind of model",
        damage=all_of(lambda folder: shutil.copytree(folder / "reward", folder / "critic"), other_words("critic")),
    ),
    "all: monitor of a taken name": all_three("--policy.rewards.monitor mine:kl", "--policy.rewards.monitor mine:kl"),
    "all: monitor fails": all_three(
        "--policy.rewards.monitor bad:tone",
        "--policy.rewards.monitor bad:tone",
        "ZeroDivisionError",
        damage=write("bad.py", "def tone(queries, responses): 1 / 0"),
    ),
    "all: no comparisons": all_three(
        "", "comparisons_train.jsonl", "No such file", damage=remove("world/comparisons_train.jsonl")
    ),
    "all: comparisons longer than the model reads": all_three(
        "--task.comparison_length 300",
        "256 tokens",
        "--task.query_length or --task.comparison_length",
        damage=long_summary,
    ),
    "all: articles longer than the model reads": all_three(
        "", "256 tokens", "--task.article_query_length or --task.comparison_length", damage=LONG_ARTICLE
    ),
    # posts and comparisons
    "no test posts": sft("", "world/posts_test.jsonl", "No such file", damage=remove("world/posts_test.jsonl")),
    "a damaged ceiling": summary_reward("", "world.json", "1.5", damage=edit("world/world.json", "ceiling", to=1.5)),
    "references that are all too long": sft("--task.response_length 3", "response_length 3", "48 are longer"),
    "queries that cannot fit": summary_policy("--task.query_length 5", "query_length 5"),
    "longer than the model reads": sft("--task.query_length 5000", "256 tokens", "5024", "--task.query_length"),
    "comparisons longer than the model reads": summary_reward(
        "--task.comparison_length 300",
        "256 tokens",
        "--base_model sft",
        "--task.query_length or --task.comparison_length",
        damage=long_summary,
    ),
    "articles longer than the model reads": summary_reward(
        "", "256 tokens", "--task.article_query_length or --task.comparison_length", damage=LONG_ARTICLE
    ),
    # models
    "reward: no base model": summary_reward("--base_model ''", "--base_model is empty", "models/<run>/sft"),
    "policy: no base model": summary_policy("--base_model ''", "--base_model is empty", "models/<run>/sft"),
    "neither reward model nor function": summary_policy("--rewards.trained_model ''", "one of", "--rewards.function"),
    "critic that is a language model": summary_policy(
        "--rewards.value_model sft", "--rewards.value_model sft is no reward model", "models/<run>/reward"
    ),
    "critic of another tokenizer": summary_policy(
        "--rewards.value_model critic",
        "--rewards.value_model critic",
        "the same kind of model",
        damage=all_of(lambda folder: shutil.copytree(folder / "reward", folder / "critic"), other_words("critic")),
    ),
    "adapters for no layer": summary_policy(
        "--lora.rank 2 --lora.target_modules q,v", "--lora.target_modules 'q,v': ", "no layer 'q'"
    ),
    "monitor of a taken name": summary_policy(
        "--rewards.monitor mine:kl", "--rewards.monitor mine:kl", "kl is taken"
    ),
}

# ---- Chapter 3 -------------------------------------------------------------------------------------------------

FULL = "--rewards.kl_coef 0.1 --rewards.kl_estimator full"
RLOO = "--ppo.advantage rloo --ppo.samples_per_prompt 4 --ppo.critic_warmup 0"
GDPO = f"{RLOO} --rewards.format gsm8k_format".replace("rloo", "gdpo")
RLVR = {
    "--ppo.advantage reinforce++ --ppo.critic_warmup 0 --ppo.critic_lam 1": "--ppo.critic_lam 1.0 does nothing",
    "--ppo.advantage reinforce++ --ppo.critic_warmup 0 --ppo.lam_alpha 1": "--ppo.lam_alpha 1.0 does nothing",
    "--ppo.lam 0.9 --ppo.lam_alpha 1 --ppo.critic_lam 1": "--ppo.lam 0.9 does nothing without",
    "--ppo.advantage maxrl": "compares the responses to a problem; --ppo.samples_per_prompt 1 must be at least 2",
    "--ppo.advantage grpo": "--ppo.samples_per_prompt 1 must be at least 2",
    GDPO.replace("--rewards.format gsm8k_format", ""): "--rewards.format or --rewards.trained_model, or take grpo",
    f"{GDPO} --rewards.kl_coef 0.1": "--rewards.kl_coef 0.1 does nothing with --ppo.advantage gdpo",
    f"{GDPO} --rewards.missing_stop replace": "--rewards.missing_stop replace does nothing with --ppo.advantage gdpo",
    f"{GDPO} --rewards.overlong_buffer 4": "--rewards.overlong_buffer 4 does nothing with --ppo.advantage gdpo",
    f"{GDPO} --ppo.filter_groups": "from which --ppo.advantage gdpo learns; leave one of the two out",
    "--ppo.trust_region 0.1": "--ppo.trust_region 0.1 does nothing without --ppo.loss ipo or dppo",
    "--ppo.loss dppo --ppo.cliprange_high 0.3": "--ppo.cliprange_high 0.3 does nothing without --ppo.loss ppo, gspo",
    "--ppo.advantage rloo --ppo.critic_warmup 0 --ppo.samples_per_prompt 3": "--ppo.batch_size 18 does",
    "--ppo.filter_groups": "--ppo.samples_per_prompt 2 or more",
    "--ppo.batch_size 128 --ppo.total_episodes 128": "--task.problems has 64 problems, fewer than the 128",
    FULL: "--rewards.kl_estimator full goes with",
    f"{FULL} --rewards.kl_loss_coef 0.01 --rewards.kl_loss_estimator full": "kl_loss_coef that is --rewards.kl_coef",
    "--ppo.advantage reinforce++": "--ppo.critic_warmup 5 is for a critic",
    f"{RLOO} --ppo.critic_warmup 5": "0 switches it off",
    "--rewards.adaptive_kl.target 3": "--rewards.adaptive_kl.target moves --rewards.kl_coef, which is 0",
    "--ppo.loss cispo --ppo.dual_clip 3": "--ppo.dual_clip 3.0 is for --ppo.loss ppo",
    "--ppo.dual_clip 1.1": "above 1 + --ppo.cliprange_high",
    "--ppo.loss gspo": "--ppo.loss gspo goes with",
    "--rewards.overlong_buffer 21": "--rewards.overlong_buffer 21 is more than --task.response_length 20",
    "--ppo.nminibatches 3": "--ppo.batch_size 18 does",
    "--rewards.verifier mine:nothing": "--rewards.verifier mine:nothing",
    f"{RLOO} --rewards.value_model nowhere": "--rewards.value_model nowhere does nothing without --ppo.advantage gae",
    f"{RLOO} --ppo.lam 0.9": "--ppo.lam 0.9 does nothing without --ppo.advantage gae; leave it at 0.95",
    f"{RLOO} --ppo.cliprange_value 0.5": "--ppo.cliprange_value 0.5 does nothing",
    f"{RLOO} --ppo.gamma 0.9": "--ppo.gamma 0.9 does nothing",
    "--ppo.loss reinforce --ppo.cliprange_low 0.1": "--ppo.cliprange_low 0.1 does nothing",
    "--rewards.missing_stop_penalty 2": "--rewards.missing_stop_penalty 2.0 does nothing",
    "--rewards.trained_model reward --rewards.label GOOD": "--rewards.label GOOD does nothing without",
    "--rewards.trained_weight 2": "--rewards.trained_weight 2.0 does nothing",
    "--rewards.kl_loss_estimator k2": "--rewards.kl_loss_estimator k2 does nothing without --rewards.kl_loss_coef",
    "--rewards.kl_estimator k3": "--rewards.kl_estimator k3 does nothing",
    "--rewards.adaptive_kl.horizon 99": "--rewards.adaptive_kl.horizon 99 does nothing",
    f"{RLOO} --ppo.filter_groups --rewards.trained_model x": "leave one of the two out",
    f"{FULL} --rewards.kl_loss_coef 0.1 --rewards.kl_loss_estimator full": "--ppo.whiten_advantages False",
    "--task.prompt_length 150 --task.response_length 150": "shorten --task.prompt_length or --task.response_length",
}
ASYNC = {
    "--rejection_low 0.4": "--rejection_low 0.4 does nothing with --correction decoupled and --rejection none",
    "--correction bypass --correction_cap 3": "--correction_cap 3.0 does nothing with --correction bypass",
    "--staleness 0 --correction_cap 3": "--correction_cap 3.0 does nothing with --correction none",
    "--ppo.advantage rloo --ppo.critic_warmup 0 --ppo.samples_per_prompt 2 --ppo.filter_groups --staleness 1": (
        "--ppo.filter_groups goes with --staleness 0"
    ),
}
CHAPTER_3 = {arguments: rlvr(arguments, words) for arguments, words in RLVR.items()}
CHAPTER_3 |= {f"async: {arguments}": rlvr_async(arguments, words) for arguments, words in ASYNC.items()}

KINDS = {
    "sizes": SIZES,
    "numbers": NUMBERS,
    "names": NAMES,
    "boxes": BOXES,
    "labels": LABELS,
    "texts": TEXTS,
    "models": MODELS,
    "reward models": REWARD_MODELS,
    "functions": FUNCTIONS,
    "runs": RUNS,
    "environment": ENVIRONMENT,
    "sample": SAMPLES,
    "chapter 2": CHAPTER_2,
    "chapter 3": CHAPTER_3,
}
REFUSALS = {f"{kind}: {name}": row for kind, rows in KINDS.items() for name, row in rows.items()}
IN_A_PROCESS = [
    "functions: a module that ends the process",
    "environment: threads: words",
    "sample: out is a folder",
]
# Commands in which nothing is wrong with the same files.
GOOD = {
    "train_policy": policy(),
    "train_policy with a function": function("--rewards.function rewards:length --rewards.monitor rewards:length"),
    "train_policy of the tales": tales_policy(),
    "train_reward": reward(),
    "train_reward with ratings": reward("--label_dataset ratings.json"),
    "train_reward with differences": reward("--label_dataset differences.json"),
    "train_reward with a long query and a long sample": reward("", damage=long_texts()),
    "train_reward of the tales": tales_reward(),
    "train_both": both(),
    "sample": sample("--out rows.jsonl"),
    "sample with a prompt": sample("--prompt 'Mara found a bell.' --temperature 0.5 --reward_model reward"),
    "train_policy --resume": resumed_policy(),
    "train_reward --resume": resumed_reward(),
    "train_both --resume": resumed_both(),
    "tldr_sft": sft(),
    "tldr_reward": summary_reward("--task.comparison_length 300"),
    "tldr_policy": summary_policy(),
    "tldr_all": all_three(),
    "rlvr_policy": rlvr(),
    "rlvr_async": rlvr_async(),
}

# ---- Good files ------------------------------------------------------------------------------------------------


def train(row: Row, folder: Path) -> None:
    """Run a command of the table to its end."""
    result = run(row, folder, to_the_end=True)
    assert result.status == 0, result.stderr


def make_files_1(folder: Path, tiny_world: Path) -> None:
    """A model, texts, labels of each kind, a function, and the runs of train_both.py."""
    shutil.copytree(tiny_world / "model", folder / "model")
    shutil.copy(tiny_world / "stories.txt", folder)
    labels = tiny_world / "labels" / "sentiment" / "offline_5k.json"
    rows = json.loads(labels.read_text())[:LABELS_THERE]
    for name in ("labels", "ratings", "differences"):
        shutil.copy(labels.with_suffix(".meta.json"), folder / f"{name}.meta.json")
    ratings = [{"query": row["query"], "sample": row["sample0"], "score": i / 10} for i, row in enumerate(rows)]
    differences = [
        {key: row[key] for key in ("query", "sample0", "sample1")} | {"difference": i - 11.5}
        for i, row in enumerate(rows)
    ]
    for name, kind in (("labels", rows), ("ratings", ratings), ("differences", differences)):
        (folder / f"{name}.json").write_text(json.dumps(kind))
    code = "def length(queries, responses):\n    return [float(len(text)) for text in responses]\n"
    (folder / "rewards.py").write_text(f"{code}scores = length\n")

    train(both(), folder)
    timestamp = next((folder / "runs").iterdir()).name.rsplit("__", 1)[1]
    for path in [*folder.glob(f"*/*__{timestamp}")]:
        path.rename(path.with_name(path.name.replace(timestamp, "7")))
    for path in [*folder.glob("runs/*/meta.json"), *folder.glob("models/*/*/ppo_rlhf.json")]:
        path.write_text(path.read_text().replace(timestamp, "7"))
    for kind in ("reward", "policy"):
        shutil.copytree(folder / f"models/train_{kind}__tales__1__7/{kind}", folder / kind)
    edit("policy/ppo_rlhf.json", "reward_model", to="reward")(folder)


def make_files_2(folder: Path, tiny_posts: Path) -> None:
    """A world of posts, what SFT and reward modelling made of it, and a function."""
    shutil.copytree(tiny_posts, folder / "world")
    (folder / "mine.py").write_text("def kl(queries, responses):\n    return [1.0] * len(responses)\n")
    for row, kind in ((sft("--num_train 16"), "sft"), (summary_reward("--num_train 16"), "reward")):
        train(row, folder)
        shutil.copytree(next(folder.glob(f"models/*/{kind}")), folder / kind)
        shutil.rmtree(folder / "models")
        shutil.rmtree(folder / "runs")


@pytest.fixture(scope="module")
def good_files(tiny_world, tiny_posts, tiny_sums, tmp_path_factory) -> Callable[[int], GoodFiles]:
    """The folder of a chapter."""

    @functools.cache
    def files(chapter: int) -> GoodFiles:
        folder = tmp_path_factory.mktemp("good")
        if chapter == 3:
            shutil.copytree(tiny_sums, folder / "tiny")
            (folder / "mine.py").touch()
            (folder / "reward").mkdir()
            (folder / "reward/ppo_rlhf.json").touch()
        else:
            (make_files_1, make_files_2)[chapter - 1](folder, (tiny_world, tiny_posts)[chapter - 1])
        return GoodFiles(folder)

    return files


# ---- Tests -----------------------------------------------------------------------------------------------------


def check_refused(row: Row, files: GoodFiles, run: Callable[[Row, Path], Result]) -> None:
    try:
        row.damage(files.folder)
        before = contents(files.folder)
        result = run(row, files.folder)
        assert "Traceback" not in result.stdout + result.stderr
        assert result.status == 2, result.stderr
        if not row.box:
            (line,) = [line for line in result.stderr.splitlines() if line.strip()]
            assert line.startswith("error: ")
        for word in row.words:
            assert word in result.stderr
        after = contents(files.folder)
        assert [path for path in {*before, *after} if before.get(path, "") != after.get(path, "")] == []
    finally:
        files.restore()


@pytest.mark.parametrize("row", REFUSALS.values(), ids=REFUSALS)
def test_bad_input_ends_in_one_line_and_leaves_nothing(row: Row, good_files) -> None:
    assert row.words
    check_refused(row, good_files(row.chapter), run)


@pytest.mark.parametrize("name", IN_A_PROCESS)
def test_bad_input_in_a_process_of_its_own(name: str, good_files) -> None:
    def start(row: Row, folder: Path) -> Result:
        return launch(row.script, *row.arguments, folder=folder, PYTHONDONTWRITEBYTECODE="1", **row.environment)

    check_refused(REFUSALS[name], good_files(REFUSALS[name].chapter), start)


@pytest.mark.parametrize("row", GOOD.values(), ids=GOOD)
def test_nothing_is_wrong_with_the_undamaged_files(row: Row, good_files) -> None:
    files = good_files(row.chapter)
    try:
        row.damage(files.folder)
        result = run(row, files.folder)
    finally:
        files.restore()
    assert result.status == 0 and "error" not in result.stderr, result.stderr


def test_each_of_two_processes_says_it(good_files) -> None:
    """Either may be the only one in which something is wrong."""
    row, files = all_three("--reward.batch_size 15", "--reward.batch_size 16", "2 (processes"), good_files(2)

    def start(row: Row, folder: Path) -> Result:
        first, second = launch_together(2, row.script, *row.arguments, folder=folder, **row.environment)
        assert (second.status, second.stderr) == (first.status, first.stderr)
        return first

    check_refused(row, files, start)
