"""Bad input ends in one line that says what is wrong, with status 2, and leaves the folder as it was.

A row of a table is one script, run in a folder of good files: with an argument or a variable that cannot be meant, or
with one of the files damaged. The last table holds commands that the same files let run to their end.
"""

import json
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Result, launch
from safetensors.torch import load_file, save_file

from ppo_rlhf.worlds import tales

REWARD_RUN, POLICY_RUN = "runs/train_reward__tales__1__7", "runs/train_policy__tales__1__7"
REWARD_META, POLICY_META = f"{REWARD_RUN}/meta.json", f"{POLICY_RUN}/meta.json"
LABELS_THERE = 24  # rows of labels.json, ratings.json and differences.json
DEEP = "[" * 100_000  # no JSON reader follows so many brackets

Damage = Callable[[Path], None]  # of the folder that the script runs in


@dataclass(frozen=True)
class Row:
    script: str
    arguments: list[str]
    words: tuple[str, ...] = ()
    """what the line must contain"""
    damage: Damage = lambda folder: None
    environment: dict[str, str] = field(default_factory=dict)
    box: bool = False
    """whether tyro answers, in a box"""


def command(script: str, good_arguments: str) -> Callable[..., Row]:
    """A function that makes rows of a script. Their arguments follow good ones, and of two the last counts."""

    def row(arguments: str = "", *words: str, damage: Damage = lambda folder: None, box=False, **environment: str):
        given = shlex.split(good_arguments) + shlex.split(arguments)
        return Row(script, given, words, damage, {"PPO_RLHF_CACHE": "cache", **environment}, box)

    return row


MODEL_AND_TEXTS = "--preset tales --base_model model --task.query_dataset stories.txt"
SMALL_PPO = "--ppo.total_episodes 32 --ppo.batch_size 16 --ppo.whiten_groups 2 --save_interval 1 --keep_checkpoints 2"
SMALL_REWARD = (
    "--num_train 16 --batch_size 8 --rollout_batch_size 16 --normalize_samples 16 --save_interval 1 "
    "--keep_checkpoints 2"
)
TINY_TALES = "--stories 60 --width 16 --layers 1 --heads 2 --lm_steps 2 --lm_batch_size 4"

function = command("train_policy.py", f"{MODEL_AND_TEXTS} {SMALL_PPO} --rewards.monitor ''")
policy = command(
    "train_policy.py", f"{MODEL_AND_TEXTS} {SMALL_PPO} --rewards.monitor '' --rewards.trained_model reward"
)
reward = command("train_reward.py", f"{MODEL_AND_TEXTS} {SMALL_REWARD} --label_dataset labels.json")
both = command(
    "train_both.py",
    f"{MODEL_AND_TEXTS} {SMALL_PPO.replace('--', '--policy.')} {SMALL_REWARD.replace('--', '--reward.')} "
    f"--reward.label_dataset labels.json",
)
sample = command("sample.py", "--policy policy --n 2")
world = command("worlds/tales.py", f"{TINY_TALES} --train_comparisons 8 --test_comparisons 4")
resumed_policy = command("train_policy.py", f"--resume {POLICY_RUN}")
resumed_reward = command("train_reward.py", f"--resume {REWARD_RUN}")
resumed_both = command("train_both.py", f"--resume {POLICY_RUN}")
tales_policy = command("train_policy.py", "--preset tales --rewards.trained_model reward --rewards.monitor ''")
tales_reward = command("train_reward.py", f"--preset tales {SMALL_REWARD}")

# ---- Damage ----------------------------------------------------------------------------------------------------


def all_of(*damages: Damage) -> Damage:
    def damage(folder: Path) -> None:
        for one in damages:
            one(folder)

    return damage


def remove(path: str) -> Damage:
    def damage(folder: Path) -> None:
        if (folder / path).is_dir():
            shutil.rmtree(folder / path)
        else:
            (folder / path).unlink(missing_ok=True)

    return damage


def write(path: str, content: Any) -> Damage:
    """A file with these bytes, this text or this JSON, in place of what was there."""

    def damage(folder: Path) -> None:
        remove(path)(folder)
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        (folder / path).write_bytes(text.encode() if isinstance(text, str) else text)

    return damage


def make_folder(path: str) -> Damage:
    """An empty folder, in place of what was there."""
    return all_of(remove(path), lambda folder: (folder / path).mkdir())


def link(path: str, target: str) -> Damage:
    """A symbolic link, in place of what was there."""
    return all_of(remove(path), lambda folder: (folder / path).symlink_to(target))


def edit(path: str, *keys: str | int, to: Any = KeyError) -> Damage:
    """Set a value deep in a JSON file; without `to`, remove it."""

    def damage(folder: Path) -> None:
        whole = inner = json.loads((folder / path).read_text())
        for key in keys[:-1]:
            inner = inner[key]
        if to is KeyError:
            del inner[keys[-1]]
        else:
            inner[keys[-1]] = to
        (folder / path).write_text(json.dumps(whole))

    return damage


def edit_bytes(path: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: write(path, change((folder / path).read_bytes()))(folder)


def cut(path: str) -> Damage:
    """Only the first half of a file, as a full disk leaves it."""
    return edit_bytes(path, lambda content: content[: len(content) // 2])


def flip(path: str) -> Damage:
    """One other byte, near the end of a file."""
    return edit_bytes(path, lambda content: content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])


def edit_tensors(path: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    """Change the tensors of a safetensors file in place."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / path)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / path, {"format": "pt"})

    return damage


def edit_weights(model: str, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    """Change one tensor of a model; name: the end of its name."""

    def change_one(tensors: dict[str, torch.Tensor]) -> None:
        (whole_name,) = (found for found in tensors if found.endswith(name))
        tensors[whole_name] = change(tensors[whole_name])

    return edit_tensors(f"{model}/model.safetensors", change_one)


def fewer_positions(model: str, positions: int) -> Damage:
    weights = edit_weights(model, "wpe.weight", lambda tensor: tensor[:positions])
    return all_of(weights, edit(f"{model}/config.json", "n_positions", to=positions))


def fewer_tokens(model: str, tokens: int) -> Damage:
    """A smaller embedding beside the same tokenizer."""
    weights = edit_weights(model, "wte.weight", lambda tensor: tensor[:tokens])
    return all_of(weights, edit(f"{model}/config.json", "vocab_size", to=tokens))


def other_words(model: str) -> Damage:
    """A tokenizer of as many tokens, two of which stand for each other."""

    def damage(folder: Path) -> None:
        vocab = json.loads((folder / model / "tokenizer.json").read_text())["model"]["vocab"]
        for token, other in (("a", "b"), ("b", "a")):
            edit(f"{model}/tokenizer.json", "model", "vocab", token, to=vocab[other])(folder)

    return damage


def edit_lines(path: str, change: Callable[[list[bytes]], list[bytes]]) -> Damage:
    return edit_bytes(path, lambda content: b"".join(change(content.splitlines(True))))


def unfinished(run: str) -> Damage:
    """As if a run had been cut off after its first checkpoint."""
    return all_of(remove(f"{run}/checkpoints/2"), edit(f"{run}/meta.json", "finished", to=False))


# ---- Arguments -------------------------------------------------------------------------------------------------

SIZES = {
    "batch is not whole groups": policy("--ppo.batch_size 63", "ppo.batch_size 63", "--ppo.batch_size 64"),
    "batch is not whole minibatches": policy("--ppo.nminibatches 3", "ppo.batch_size 16", "--ppo.batch_size 18"),
    "groups too small to whiten": policy("--ppo.nminibatches 2", "whiten_rewards", "--ppo.batch_size 32"),
    "batch below 0": policy("--ppo.batch_size -16", "ppo.batch_size is -16", "at least 1"),
    "no episodes": policy("--ppo.total_episodes 0", "ppo.total_episodes is 0", "at least 1"),
    "more episodes than a float can count": policy(f"--ppo.total_episodes 1{'0' * 400}", "total_episodes"),
    "micro-batch does not divide": policy(
        "--ppo.local_micro_batch_size 6", "ppo.local_micro_batch_size 6", "--ppo.local_micro_batch_size 2"
    ),
    "rollout batch does not divide": policy(
        "--ppo.local_rollout_batch_size 12", "ppo.local_rollout_batch_size 12", "--ppo.local_rollout_batch_size 4"
    ),
    "labels are not whole batches": reward("--num_train 15", "num_train 15", "--num_train 8"),
    "no labels": reward("--num_train 0", "num_train is 0", "at least 1"),
    "rollout batch 0": reward("--rollout_batch_size 0", "rollout_batch_size is 0", "at least 1"),
    "samples below 0": reward("--normalize_samples -1", "normalize_samples is -1", "at least 0"),
    "more samples than a float can count": reward(f"--normalize_samples 1{'0' * 400}", "normalize_samples"),
    "labels per micro-batch": reward(
        "--local_micro_batch_size 3", "local_micro_batch_size 3", "--local_micro_batch_size 1"
    ),
    "more labels than there are": reward("--num_train 800", "--num_train 800", "labels.json", "24 labels"),
    "both: batch of episodes": both(
        "--policy.ppo.batch_size 63", "--policy.ppo.batch_size 64", "(policy.ppo.whiten_groups"
    ),
    "both: batch of labels": both("--reward.num_train 15", "reward.num_train 15", "--reward.num_train 8"),
}

NUMBERS = {
    "learning rate 0": policy("--ppo.lr 0", "ppo.lr is 0.0", "above 0"),
    "learning rate nan": policy("--ppo.lr nan", "--ppo.lr is nan", "finite"),
    "learning rate below 0": reward("--lr=-1e-5", "lr is -1e-05", "above 0"),
    "KL coefficient below 0": policy("--rewards.kl_coef -1", "rewards.kl_coef is -1.0", "at least 0"),
    "KL horizon 0": policy("--rewards.adaptive_kl.horizon 0", "rewards.adaptive_kl.horizon is 0", "above 0"),
    "KL horizon too short": policy(
        "--rewards.adaptive_kl.horizon 3",
        "--rewards.adaptive_kl.horizon 3: an update of --ppo.batch_size 16",
        "--rewards.adaptive_kl.horizon 4",
    ),
    "both: KL horizon too short": both(
        "--policy.rewards.adaptive_kl.horizon 1",
        "--policy.rewards.adaptive_kl.horizon 1: an update of --policy.ppo.batch_size 16",
        "--policy.rewards.adaptive_kl.horizon 4",
    ),
    "penalty beyond float32": policy("--task.penalty_reward_value 1e39", "penalty_reward_value is 1e+39", "float32"),
    "penalty nan": policy("--task.penalty_reward_value nan", "--task.penalty_reward_value is nan"),
    "temperature 0": policy("--task.temperature 0", "--task.temperature is 0.0", "above 0"),
    "temperature inf": both("--task.temperature inf", "--task.temperature is inf"),
    "seed below 0": policy("--seed -1", "--seed is -1"),
    "seed beyond 64 bits": reward("--seed 9223372036854775808", "--seed is 9223372036854775808"),
    "no checkpoint is kept": reward("--keep_checkpoints 0", "keep_checkpoints is 0", "at least 1"),
    "save interval below 0": reward("--save_interval -1", "save_interval is -1", "at least 0"),
    "both: learning rate": both("--reward.lr nan", "--reward.lr is nan"),
    "both: KL coefficient": both("--policy.rewards.kl_coef nan", "--policy.rewards.kl_coef is nan"),
    "query length 0": policy("--task.query_length 0", "--task.query_length is 0", "above 0"),
    "response length below 0": reward("--task.response_length -1", "--task.response_length is -1", "above 0"),
    "truncation beyond the response": policy("--task.truncate_after 25", "--task.truncate_after is 25", "24"),
    "query too long for the model": policy("--task.query_length 5000", "160 tokens", "5024", "--task.query_length"),
    "response too long for the model": reward(
        "--task.response_length 300 --label_dataset long.json",
        "160 tokens",
        "324",
        "--task.response_length",
        damage=lambda folder: longer_samples(folder, 300),
    ),
    "prefix too long for the model": policy(f"--task.query_prefix '{'Mara ' * 200}'", "160 tokens"),
}


def longer_samples(folder: Path, length: int) -> None:
    rows = json.loads((folder / "labels.json").read_text())
    for row in rows:
        row |= {f"sample{i}": [1] * length for i in range(4)}
    (folder / "long.json").write_text(json.dumps(rows))


NAMES = {
    "preset": policy("--preset tale", "--preset tale", "tales-descriptiveness"),
    "preset of the reward model": reward("--preset=sentimental", "--preset sentimental", "sentiment,"),
    "both: empty preset": both("--preset ''", "--preset", "tales"),
    "stop text of two tokens": policy("--task.truncate_text 'two words'", "--task.truncate_text 'two words'"),
    "start text": reward("--task.start_text '. .'", "--task.start_text '. .'", "exactly one"),
    "end text": both("--task.end_text Xyzzy", "--task.end_text 'Xyzzy'", "exactly one"),
    "stop text is half a character": policy("--task.truncate_text '\udcff'", "--task.truncate_text", "Unicode"),
    "prefix is half a character": policy("--task.query_prefix '\udcff'", "--task.query_prefix", "Unicode"),
    "experiment is a path": policy("--exp_name a/b", "--exp_name 'a/b'", "not a path"),
    "experiment above the folder": reward("--exp_name ../up", "--exp_name '../up'", "not a path"),
    "experiment is half a character": reward("--exp_name '\udcff'", "--exp_name", "Unicode"),
    "experiment with a very long name": policy(f"--exp_name {'x' * 300}", "xxx", "too long"),
    "experiment that the hub would refuse": policy("--exp_name a--b --upload_model", "--exp_name", "Cannot have --"),
    "owner that the hub would refuse": reward("--hf_entity a/b --upload_model", "--hf_entity", "a/b/train_reward"),
    "experiment too long for the hub": reward(f"--exp_name {'x' * 80} --upload_model", "maximum length is 96"),
    "both: the policy's experiment, for the hub": both("--policy.exp_name a..b --policy.upload_model", "a..b"),
    "both: the policy's experiment is a path": both("--policy.exp_name a/b", "--policy.exp_name 'a/b'"),
    "both: one name for two runs": both("--policy.exp_name train_reward", "--policy.exp_name", "two names"),
    "two scorers": policy("--rewards.function rewards:length", "--rewards.trained_model", "--rewards.function"),
    "no scorer": policy("--rewards.trained_model '' --preset cnndm", "models/ has no reward model", "cnndm"),
    "monitor's name is taken": policy(
        "--rewards.monitor rewards:scores", "--rewards.monitor rewards:scores", "taken"
    ),
    "both: monitor's name is taken": both(
        "--policy.rewards.monitor rewards:entropy", "--policy.rewards.monitor", "the name entropy is taken"
    ),
}

SHARED_BY_BOTH = {
    f"both: --{flag}": both(f"--{flag}", f"--{re.split('[ =]', flag)[0]}: both parts share it")
    for flag in (
        "policy.seed 3",
        "reward.seed=3",
        "policy.preset tldr",
        "reward.base_model model",
        "reward.base-model model",
        "policy.task.temperature 0.5",
        "policy.trust_remote_code",
        "reward.no-trust-remote-code",
        "reward.resume runs/x",
    )
} | {
    "both: a reward function": both("--policy.rewards.function rewards:length", "--policy.rewards.function"),
    "both: a trained reward model": both("--policy.rewards.trained_model=reward", "--policy.rewards.trained_model"),
}

BOXES = {
    "unknown flag": policy("--learning_rate 1", "--learning-rate", box=True),
    "unknown flag of a part": both("--reward.ppo.lr 1", "--reward.ppo.lr", box=True),
    "flag of the other script": reward("--log_interval 1", "--log-interval", box=True),
    "dtype": policy("--dtype float16", "--dtype", "float16", box=True),
    "words for a number": policy("--ppo.batch_size many", "--ppo.batch-size", "many", box=True),
    "word after a switch": both("--policy.ppo.whiten_rewards yes", "yes", box=True),
    "no value": reward("--lr", "--lr", box=True),
    "sample: no policy": command("sample.py", "")("", "--policy", box=True),
    "sample: unknown flag": sample("--top_p 0.9", "--top-p", box=True),
    "tales: unknown flag": world("--preset tales", "--preset", box=True),
    "tales: words for a number": world("--stories many", "--stories", "many", box=True),
}

# ---- Label files -----------------------------------------------------------------------------------------------


def label(*keys: str | int, to: Any = KeyError) -> Damage:
    return edit("labels.json", *keys, to=to)


def bad_labels(damage: Damage, *words: str, file: str = "labels.json") -> Row:
    return reward(f"--label_dataset {file}", f"--label_dataset {file}", *words, damage=damage)


def bad_sidecar(damage: Damage, *words: str) -> Row:
    return reward("", "labels.meta.json", *words, damage=damage)


def every_row(file: str, *keys: str, to: Any = KeyError) -> Damage:
    return all_of(*(edit(file, row, *keys, to=to) for row in range(LABELS_THERE)))


LABELS = {
    "missing": bad_labels(remove("labels.json"), "--preset tales"),
    "of no task on the hub": reward("--label_dataset sentiment/none.json", "sentiment/none.json", "network"),
    "without a name": reward("--label_dataset ''", "--label_dataset"),
    "of no task of tales": tales_reward("--label_dataset polite/offline_5k.json", "descriptiveness/offline_5k.json"),
    "a folder": bad_labels(make_folder("labels.json"), "folder"),
    "empty": bad_labels(write("labels.json", "")),
    "not JSON": bad_labels(write("labels.json", "query,best\n1,2\n")),
    "binary": bad_labels(write("labels.json", bytes(range(256)))),
    "cut": bad_labels(cut("labels.json")),
    "nested without end": bad_labels(write("labels.json", DEEP)),
    "a number of 5,000 digits": bad_labels(write("labels.json", '[{"query": [' + "1" * 5_000 + "]}]")),
    "an empty list": bad_labels(write("labels.json", []), "not empty"),
    "no query": bad_labels(label(3, "query"), "row 3", "'query'"),
    "no best": bad_labels(label(3, "best"), "row 3", "best"),
    "no best at all": bad_labels(every_row("labels.json", "best"), "row 0", "best, score, difference"),
    "a sample is missing in every row": bad_labels(every_row("labels.json", "sample1"), "sample0, sample1"),
    "short query": bad_labels(label(2, "query", 23), "row 2", "23 ids in 'query'", "--task.query_length is 24"),
    "id beyond the vocabulary": bad_labels(label(4, "query", 1, to=40_000), "row 4", "id 40000", "'query'"),
    "id below 0": bad_labels(label(4, "sample3", 0, to=-1), "row 4", "id -1", "'sample3'"),
    "id is a truth value": bad_labels(label(4, "query", 1, to=True), "row 4", "'query'"),
    "best beyond the samples": bad_labels(label(5, "best", to=4), "row 5", "best 4", "0..3"),
    "best is a truth value": bad_labels(label(5, "best", to=True), "row 5", "best True"),
    "padding first": bad_labels(label(6, "sample2", 0, to=50_259), "row 6", "padding", "'sample2'"),
    "rating nan": bad_labels(edit("ratings.json", 1, "score", to=float("nan")), "row 1", "nan", file="ratings.json"),
    "rating of two samples": bad_labels(
        edit("ratings.json", 0, "sample1", to=[1] * 24), "row 0", "'score'", file="ratings.json"
    ),
    "ratings that are all the same": reward(
        "--label_dataset ratings.json", "score 0.5", damage=every_row("ratings.json", "score", to=0.5)
    ),
    "no difference": bad_labels(edit("differences.json", 7, "difference"), "row 7", file="differences.json"),
    "of another vocabulary": bad_labels(edit("labels.meta.json", "vocab_size", to=50_257), "50257"),
    "sidecar is not JSON": bad_sidecar(write("labels.meta.json", "{")),
    "sidecar is nested without end": bad_sidecar(write("labels.meta.json", DEEP)),
    "sidecar is a folder": bad_sidecar(make_folder("labels.meta.json"), "directory"),
    "ceiling above 1": bad_sidecar(edit("labels.meta.json", "ceiling", to=75.0), "ceiling", "75.0"),
    "both: cut": both("", "--reward.label_dataset", "labels.json", damage=cut("labels.json")),
    "both: too few": both("--reward.num_train 800", "--reward.num_train 800", "24 labels"),
}

# ---- Query files -----------------------------------------------------------------------------------------------


def bad_texts(name: str, content: Any, *words: str) -> Row:
    flag = f"--task.query_dataset {name}"
    return policy(flag, flag, *words, damage=write(name, content))


TEXTS = {
    "missing": policy("--task.query_dataset no.txt", "--task.query_dataset no.txt", "No such file"),
    "a folder": policy("--task.query_dataset x.txt", "x.txt", "No such file", damage=make_folder("x.txt")),
    "a folder without stories": policy(
        "--task.query_dataset model", "--task.query_dataset model/stories.txt", "No such file"
    ),
    "unknown name": policy("--task.query_dataset nothing", "nothing", "books", ".jsonl"),
    "unknown suffix": bad_texts("texts.csv", "Mara found a bell. She sang.", ".txt, .jsonl or .json"),
    "empty": bad_texts("texts.txt", "", "0 texts"),
    "no text with a full stop": bad_texts("texts.txt", "Mara\nTobias\n", "2 texts", "--task.start_text"),
    "no text is short enough": bad_texts("texts.txt", "A. " + "bell " * 40 + ".", "1 texts", "--task.end_text"),
    "bytes that are no text": bad_texts("texts.txt", b"Mara \xff found."),
    "not JSON": bad_texts("texts.json", "Mara found a bell. She sang."),
    "an object": bad_texts("texts.json", {"text": "Mara."}, "JSON array"),
    "nested without end": bad_texts("texts.json", DEEP),
    "a number among the texts": bad_texts("texts.json", ["Mara. She sang.", 7], "item 2"),
    "half a character": bad_texts("texts.json", ["Mara. She sang.", "Half \ud800."], "item 2", "Unicode"),
    "a broken line": bad_texts("texts.jsonl", '"Mara. She sang."\n{"text": "Mara\n', "item 2"),
    "both: none to hold out": both(
        "--task.query_dataset x.txt", "x.txt", "0 texts that are held out", damage=write("x.txt", "A. B.\n" * 49)
    ),
    "books without a network": policy("--task.query_dataset books", "--task.query_dataset books", ".jsonl"),
    "cnndm without a network": policy("--task.query_dataset cnndm", "--task.query_dataset cnndm", "--preset tales"),
}

# ---- Models ----------------------------------------------------------------------------------------------------

T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 1024}
BERT = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 1024}
OWN_CODE = {"model_type": "ours", "auto_map": {"AutoConfig": "ours.Config", "AutoModelForCausalLM": "ours.Model"}}
SHARDS = {"metadata": {}, "weight_map": {"transformer.wte.weight": "model-00001-of-00002.safetensors"}}
WEIGHTS = "model/model.safetensors"


def bad_model(damage: Damage, *words: str, command: Callable[..., Row] = policy) -> Row:
    return command("", "model", *words, damage=damage)


def only_a_pickle(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "model/pytorch_model.bin")
    (folder / WEIGHTS).unlink()


MODELS = {
    "no such folder": policy("--base_model nowhere/model", "--base_model nowhere/model"),
    "no such name": policy("--base_model some-gpt", "--base_model some-gpt", "network", "--preset tales"),
    "no name that the hub allows": reward("--base_model 'a/b/c d'", "--base_model a/b/c d"),
    "empty name": policy("--base_model ''", "--base_model"),
    "a file": policy("--base_model stories.txt", "--base_model stories.txt", "folder"),
    "an empty folder": policy("--base_model empty", "empty", damage=make_folder("empty")),
    "no config": bad_model(remove("model/config.json"), "config.json"),
    "the folder of a run": policy(
        "--base_model models/train_policy__tales__1__7", "config.json", "give models/train_policy__tales__1__7/policy"
    ),
    "the folder of a reward model's run": reward("--base_model models/train_reward__tales__1__7", "no config.json"),
    "damaged generation_config.json": reward("", "model is not", damage=write("model/generation_config.json", "{")),
    "a reward model": reward("--base_model reward", "--base_model reward is a reward model", "policy"),
    "config is not JSON": bad_model(write("model/config.json", "{"), "config.json"),
    "config has a text for a number": bad_model(edit("model/config.json", "n_embd", to="wide"), "n_embd"),
    "config of another width": bad_model(edit("model/config.json", "n_embd", to=32), "transformer."),
    "config of an encoder and decoder": bad_model(write("model/config.json", T5), "t5", command=reward),
    "config of an encoder": bad_model(write("model/config.json", BERT), "bert"),
    "code of its own": bad_model(write("model/config.json", OWN_CODE), "trust_remote_code"),
    "no weights": bad_model(remove(WEIGHTS), "safetensors"),
    "cut weights": bad_model(cut(WEIGHTS), "safetensors", command=reward),
    "only a pickle": bad_model(only_a_pickle, "safetensors"),
    "a pickle under the name of weights": bad_model(lambda folder: torch.save({}, folder / WEIGHTS), "safetensors"),
    "a part of the weights is missing": bad_model(
        all_of(remove(WEIGHTS), write(f"{WEIGHTS}.index.json", SHARDS)), "model-00001-of-00002.safetensors"
    ),
    "a tensor is missing": bad_model(
        edit_tensors(WEIGHTS, lambda tensors: tensors.pop("transformer.ln_f.weight")), "ln_f.weight"
    ),
    "weights that are not finite": bad_model(
        edit_weights("model", "ln_f.weight", lambda tensor: tensor * float("nan")), "finite"
    ),
    "too short": bad_model(fewer_positions("model", 40), "40 tokens", "48", "--task.query_length", command=reward),
    "fewer rows than tokens": bad_model(fewer_tokens("model", 500), "500 rows"),
    "no tokenizer": bad_model(all_of(remove("model/tokenizer.json"), remove("model/tokenizer_config.json")), "token"),
    "tokenizer is not JSON": bad_model(write("model/tokenizer.json", "{"), command=reward),
    "tokenizer's settings are a list": bad_model(write("model/tokenizer_config.json", [])),
    "both: cut weights": bad_model(cut(WEIGHTS), "safetensors", command=both),
}

# ---- Reward models ---------------------------------------------------------------------------------------------

HEAD = "reward/reward_head.safetensors"


def bad_reward_model(damage: Damage, *words: str) -> Row:
    return policy("", "reward", *words, damage=damage)


def edit_head(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return edit_tensors(HEAD, lambda tensors: tensors.update({name: change(tensors[name])}))


LARGER_VOCABULARY = edit("reward/tokenizer.json", "model", "vocab", "a", to=50_256)

REWARD_MODELS = {
    "no such folder": policy("--rewards.trained_model nowhere", "nowhere", "no such folder"),
    "a policy": policy("--rewards.trained_model policy", "policy is not a reward model"),
    "no head": bad_reward_model(remove(HEAD), "reward_head.safetensors"),
    "cut head": bad_reward_model(cut(HEAD), "reward_head.safetensors"),
    "head of another width": bad_reward_model(
        edit_head("reward_head.weight", lambda tensor: tensor[:, :8]), "reward_head.safetensors", "reward_head.weight"
    ),
    "head without a gain": bad_reward_model(edit_tensors(HEAD, lambda tensors: tensors.pop("gain")), HEAD, "gain"),
    "head that is not finite": bad_reward_model(edit_head("gain", lambda tensor: tensor * float("nan")), "finite"),
    "cut weights": bad_reward_model(cut("reward/model.safetensors"), "safetensors"),
    "too short": bad_reward_model(fewer_positions("reward", 40), "40 tokens", "48"),
    "fewer rows than tokens": bad_reward_model(fewer_tokens("reward", 500), "500 rows"),
    "a critic": bad_reward_model(edit("reward/ppo_rlhf.json", "kind", to="critic"), "critic", "be a reward model"),
    "another vocabulary": bad_reward_model(LARGER_VOCABULARY, "50257"),
    "other words of the same number": bad_reward_model(other_words("reward"), "'a'", "'b'"),
    "no ppo_rlhf.json": bad_reward_model(remove("reward/ppo_rlhf.json"), "ppo_rlhf.json"),
    "ppo_rlhf.json is a list": bad_reward_model(write("reward/ppo_rlhf.json", []), "ppo_rlhf.json"),
    "ppo_rlhf.json is nested without end": bad_reward_model(write("reward/ppo_rlhf.json", DEEP)),
    "ppo_rlhf.json with a text for a number": bad_reward_model(
        edit("reward/ppo_rlhf.json", "vocab_size", to="1024"), "ppo_rlhf.json"
    ),
}

# ---- Functions in place of a reward model ----------------------------------------------------------------------


def bad_function(code: str, *words: str, name: str = "mine:scores") -> Row:
    """A function of texts, in the module mine.py."""
    flag = f"--rewards.function {name}"
    return function(flag, flag, *words, damage=write("mine.py", code))


def bad_scores(expression: str, *words: str) -> Row:
    """A function that returns something else than a number for each response."""
    return bad_function(f"def scores(queries, responses):\n    return {expression}\n", *words)


FUNCTIONS = {
    "unknown module": bad_function("", "No module named 'yours'", name="yours:scores"),
    "no colon": bad_function("def scores(queries, responses): ...", "as in mine:name", name="mine.py"),
    "relative module": bad_function("", "package.module:name", name=".mine:scores"),
    "not in the module": bad_function("def score(queries, responses): ...", "scores"),
    "not a function": bad_function("scores = [1.0, 2.0]", "no function"),
    "a syntax error in the module": bad_function("def scores(queries, responses) return 1", "SyntaxError", "line 1"),
    "an import that fails in the module": bad_function("import no_such_package", "no_such_package"),
    "a module that fails": bad_function("1 / 0", "ZeroDivisionError"),
    "a module that ends the process": bad_function("import sys\nsys.exit(0)", "SystemExit"),
    "takes no texts": bad_function("def scores(): return []", "takes 0 positional arguments"),
    "raises several lines": bad_function(
        "def scores(queries, responses):\n    raise ValueError('one\\ntwo')", "ValueError: one two", "mine.py:2"
    ),
    "ends the process": bad_scores("exit(0)", "SystemExit"),
    "too few scores": bad_scores("[1.0] * (len(responses) - 1)", "returned 1 scores for 2"),
    "texts for scores": bad_scores("responses", "could not convert"),
    "one number for scores": bad_scores("1.0", "returned a float; it must return a list"),
    "nan for scores": bad_scores("[float('nan') for text in responses]", "nan"),
    "monitor fails": policy(
        "--rewards.monitor mine:tone",
        "--rewards.monitor mine:tone",
        "ZeroDivisionError",
        damage=write("mine.py", "def tone(queries, responses): 1 / 0"),
    ),
    "both: monitor fails": both(
        "--policy.rewards.monitor mine:tone", "--policy.rewards.monitor mine:tone", damage=write("mine.py", "1 / 0")
    ),
    "sample: the policy's function is gone": sample(
        "", "mine:scores", damage=edit("policy/ppo_rlhf.json", "function", to="mine:scores")
    ),
}

# ---- Runs to go on with ----------------------------------------------------------------------------------------

METRICS, RUN_SAMPLES = f"{POLICY_RUN}/metrics.csv", f"{POLICY_RUN}/samples.jsonl"
STATE, TENSORS = f"{POLICY_RUN}/checkpoints/2/state.json", f"{POLICY_RUN}/checkpoints/2/tensors.safetensors"


def bad_run(damage: Damage, *words: str) -> Row:
    return resumed_policy("", POLICY_RUN, *words, damage=damage)


def bad_argument(*keys: str, to: Any = KeyError) -> Row:
    """A saved argument that the script cannot have written."""
    words = ("its argument", keys[-1]) if to is KeyError else ("its argument", keys[-1], repr(to))
    return bad_run(edit(POLICY_META, "args", *keys, to=to), *words)


def bad_joint(*keys: str, to: Any = KeyError) -> Row:
    """Bad notes of train_both.py in the folder of one of its runs."""
    return resumed_both("", POLICY_RUN, keys[-1], damage=edit(POLICY_META, "joint", *keys, to=to))


RUNS = {
    "no such run": resumed_policy("--resume runs/none", "runs/none"),
    "both: no such run": resumed_both("--resume runs/none", "runs/none"),
    "a file": resumed_policy("--resume stories.txt", "stories.txt"),
    "run of the other script": resumed_policy(f"--resume {REWARD_RUN}", REWARD_RUN, "its argument"),
    "run of train_policy": resumed_reward(f"--resume {POLICY_RUN}", POLICY_RUN, "its argument"),
    "both: run of one part": resumed_both("", POLICY_RUN, "own script", damage=edit(POLICY_META, "joint", to=None)),
    "no meta.json": bad_run(remove(POLICY_META), "meta.json"),
    "cut meta.json": bad_run(cut(POLICY_META)),
    "meta.json is nested without end": bad_run(write(POLICY_META, DEEP)),
    "meta.json without arguments": bad_run(edit(POLICY_META, "args"), "meta.json", "arguments"),
    "an argument is missing": bad_argument("ppo", "lam"),
    "an argument too many": bad_run(edit(POLICY_META, "args", "top_p", to=1), "its argument", "top_p"),
    "an argument is a text": bad_argument("ppo", "lr", to="fast"),
    "a group of arguments is a number": bad_run(edit(POLICY_META, "args", "ppo", to=3), "its argument"),
    "a saved size does not divide": resumed_policy(
        "", "ppo.batch_size 63", damage=edit(POLICY_META, "args", "ppo", "batch_size", to=63)
    ),
    "a saved number is nan": resumed_policy(
        "", "ppo.lr is nan", damage=edit(POLICY_META, "args", "ppo", "lr", to=float("nan"))
    ),
    "wall time is a text": bad_run(edit(POLICY_META, "wall_time", to="long"), "wall_time", "'long'"),
    "both: no joint arguments": bad_joint("args"),
    "both: no time": bad_joint("timestamp"),
    "both: time is a text": bad_joint("timestamp", to="now"),
    "both: joint arguments are damaged": bad_joint("args", "seed", to="one"),
    "both: the other run's meta.json is cut": resumed_both("", REWARD_RUN, damage=cut(REWARD_META)),
    "both: the reward model is gone": resumed_both(
        "", f"models/{Path(REWARD_RUN).name}/reward", damage=all_of(remove("models"), unfinished(POLICY_RUN))
    ),
    "another learning rate": resumed_policy("--ppo.lr 0.5", "ppo.lr 0.0002 -> 0.5", "another run"),
    "another seed": resumed_reward("--seed 2", "seed 1 -> 2", "another run"),
    "both: another learning rate": resumed_both("--reward.lr 0.5", "reward.lr 0.001 -> 0.5"),
    "fewer episodes than it has made": resumed_policy(
        "--ppo.total_episodes 16", "--ppo.total_episodes", "1 updates", "--ppo.total_episodes 32"
    ),
    "cut checkpoint": bad_run(cut(TENSORS), "checkpoints/2", "remove"),
    "checkpoint with one other byte": bad_run(flip(TENSORS), "checkpoints/2"),
    "checkpoint with an edited state": bad_run(edit(STATE, "kl_coef", to=0.5), "checkpoints/2"),
    "checkpoint's state is nested without end": bad_run(write(STATE, DEEP), "checkpoints/2"),
    "cut checkpoint of a reward run": resumed_reward(
        "", "checkpoints/2", damage=cut(f"{REWARD_RUN}/checkpoints/2/tensors.safetensors")
    ),
    "another model": resumed_policy("", "is not what --base_model was", damage=fewer_positions("model", 100)),
    "another first text": resumed_policy(
        "",
        "stories.txt is not what --task.query_dataset was",
        damage=edit_lines("stories.txt", lambda lines: lines[1::-1] + lines[2:]),
    ),
    "another first text of a reward run": resumed_reward(
        "",
        "stories.txt is not what --task.query_dataset was",
        damage=edit_lines("stories.txt", lambda lines: lines[1::-1] + lines[2:]),
    ),
    "another label": resumed_reward("", "labels.json is not what --label_dataset was", damage=label(0, "best", to=0)),
    "checkpoint of another model": resumed_policy(
        "", "checkpoint", "tensors", damage=all_of(fewer_positions("model", 100), edit(POLICY_META, "inputs"))
    ),
    "no metrics": bad_run(remove(METRICS), "metrics.csv"),
    "a word among the metrics": bad_run(
        edit_bytes(METRICS, lambda text: text.replace(b"\n1,", b"\none,")), "metrics.csv"
    ),
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
    "the reward model is gone": resumed_policy("", "no such folder", damage=remove("models")),
    "the texts are gone": resumed_policy("", "stories.txt", damage=remove("stories.txt")),
    "the labels are gone": resumed_reward("", "labels.json", damage=remove("labels.json")),
    "the base model is gone": resumed_both("--policy.ppo.total_episodes 48", "model", damage=remove("model")),
}

# ---- Environment -----------------------------------------------------------------------------------------------

DANGLING_RUNS, DANGLING_MODELS = (link(path, "nowhere/at/all") for path in ("runs", "models"))

ENVIRONMENT = {
    "threads: words": policy("", "PPO_RLHF_THREADS", "many", PPO_RLHF_THREADS="many"),
    "threads: 0": reward("", "PPO_RLHF_THREADS is '0'", PPO_RLHF_THREADS="0"),
    "threads: -1": both("", "PPO_RLHF_THREADS is '-1'", PPO_RLHF_THREADS="-1"),
    "threads: a digit that is no number": policy("", "PPO_RLHF_THREADS", PPO_RLHF_THREADS="²"),
    "threads: beyond 64 bits": policy("", "PPO_RLHF_THREADS", PPO_RLHF_THREADS="9" * 20),
    "processes without a launcher": policy("", "WORLD_SIZE", "torchrun", WORLD_SIZE="2"),
    "processes: words": policy("", "WORLD_SIZE", "two", WORLD_SIZE="two"),
    "processes: 0": reward("", "WORLD_SIZE", WORLD_SIZE="0"),
    "rank: words": policy("", "RANK", "first", RANK="first"),
    "rank: words, in tales.py": world("--seed 5", "RANK", "first", RANK="first"),
    "processes of this machine: 0": policy("", "LOCAL_WORLD_SIZE", LOCAL_WORLD_SIZE="0"),
    "processes of this machine: words": policy("", "LOCAL_WORLD_SIZE", "two", LOCAL_WORLD_SIZE="two"),
    "cache is a file": world("", "stories.txt", PPO_RLHF_CACHE="stories.txt"),
    "cache of the model is a file": tales_policy("", "stories.txt", PPO_RLHF_CACHE="stories.txt"),
    "cache is a dangling link": world("", "cache", damage=link("cache", "nowhere/at/all")),
    "runs is a file": policy("", "runs", damage=write("runs", "")),
    "runs is a dangling link": reward("", "runs", "link", damage=DANGLING_RUNS),
    "models is a file": policy("", "models", damage=write("models", "")),
    "both: models is a dangling link": both("", "models", damage=DANGLING_MODELS),
    "wandb mode": policy("--track", "--track", "WANDB_MODE", WANDB_MODE="nonsense"),
    "wandb project": reward("--track --wandb_project_name 'a/b:c'", "--track", "project", WANDB_MODE="offline"),
    "both: wandb mode": both("--policy.track", "--policy.track", "WANDB_MODE", WANDB_MODE="nonsense"),
}

# ---- sample.py and tales.py ------------------------------------------------------------------------------------

INFO = "policy/ppo_rlhf.json"


def bad_info(*keys: str, to: Any = KeyError, words: tuple[str, ...] = ()) -> Row:
    """A policy whose ppo_rlhf.json is damaged."""
    return sample("", INFO, *words, damage=edit(INFO, *keys, to=to))


SAMPLES = {
    "no such policy": sample("--policy nowhere", "nowhere"),
    "a reward model": sample("--policy reward", "--policy reward", "reward model"),
    "no queries": sample("--n 0", "--n 0", "at least 1"),
    "temperature below 0": sample("--temperature -1", "--temperature -1.0", "at least 0"),
    "temperature nan": sample("--temperature nan", "--temperature is nan"),
    "temperature inf": sample("--temperature inf", "--temperature is inf"),
    "empty prompt": sample("--prompt ''", "--prompt", "at least one token"),
    "half a character": sample("--prompt 'Mara \udcff'", "--prompt", "Unicode"),
    "out in a missing folder": sample("--out nowhere/rows.jsonl", "nowhere/rows.jsonl"),
    "out is a folder": sample("--out models", "models"),
    "no such policy, and rows to write": sample("--policy nowhere --out rows.jsonl", "nowhere"),
    "bad prompt, and rows to write over": sample("--prompt '' --out labels.json", "--prompt"),
    "base model is gone": sample("", "--base_model model", damage=remove("model")),
    "base model too short": sample("", "model", "40 tokens", damage=fewer_positions("model", 40)),
    "base model with fewer rows": sample("", "model", "500 rows", damage=fewer_tokens("model", 500)),
    "base model of another vocabulary": sample(
        "", "--base_model model", "that of policy", "the same kind of model", damage=other_words("model")
    ),
    "a function of nobody's": sample("", "boxed", "--trust_remote_code", damage=edit(INFO, "function", to="boxed")),
    "no such reward model": sample("--reward_model nowhere", "nowhere", "no such folder"),
    "reward model is a policy": sample("--reward_model policy", "policy is not a reward model"),
    "reward model too short": sample("", "reward", "40 tokens", damage=fewer_positions("reward", 40)),
    "reward model of another vocabulary": sample("", "reward", "50257", damage=LARGER_VOCABULARY),
    "reward model of other words": sample("", "--reward_model reward", "'a'", damage=other_words("reward")),
    "reward model is a critic": sample("", "critic", damage=edit("reward/ppo_rlhf.json", "kind", to="critic")),
    "no such texts": sample("--query_dataset no.txt", "--query_dataset no.txt"),
    "cut weights": sample("", "policy", "safetensors", damage=cut("policy/model.safetensors")),
    "cut ppo_rlhf.json": sample("", "policy", damage=cut(INFO)),
    "ppo_rlhf.json is a list": sample("", INFO, damage=write(INFO, [])),
    "base model in ppo_rlhf.json is a number": bad_info("base_model", to=2),
    "task in ppo_rlhf.json lacks a field": bad_info("task", "response_length", words=("response_length",)),
    "task in ppo_rlhf.json has a text for a number": bad_info(
        "task", "response_length", to="long", words=("'long'",)
    ),
    "task in ppo_rlhf.json has a length of 0": sample(
        "", "response_length is 0", damage=edit(INFO, "task", "response_length", to=0)
    ),
}

built_world = command("worlds/tales.py", "")  # with the default settings: the one that is in the folder


def in_the_cache(name: str, damage: Callable[[str], Damage]) -> Damage:
    """Damage to a file of the tales world."""
    return lambda folder: damage(str(next(folder.glob(f"cache/*/{name}")).relative_to(folder)))(folder)


def drop_lines(path: str) -> Damage:
    """Only the first ten lines of a file, as a copy that broke off leaves it."""
    return edit_bytes(path, lambda content: b"".join(content.splitlines(keepends=True)[:10]))


TALES = {
    "no stories": world("--stories 0", "stories is 0", "at least 1"),
    "heads do not divide": world("--heads 3", "heads 3", "width 16"),
    "learning rate 0": world("--lm_lr 0", "lm_lr is 0.0", "above 0"),
    "temperature inf": world("--temperature inf", "--temperature is inf"),
    "annotator's temperature 0": world("--annotator_temperature 0", "annotator_temperature is 0.0"),
    "seed below 0": world("--seed -1", "--seed is -1"),
    "windows longer than the model": world("--max_positions 32", "max_positions", "32"),
    "comparisons longer than the model": world("--response_length 150", "max_positions", "160"),
    "windows longer than the stories": world(
        "--lm_sequence_length 150 --sentences_per_story 2", "lm_sequence_length"
    ),
    "truncation beyond the response": world("--truncate_after 25", "truncate_after", "25"),
    "no query is short enough": world("--query_length 1", "query_length"),
    "a built world without its facts": built_world("", "world.json", damage=in_the_cache("world.json", remove)),
    "a built world with cut facts": built_world("", "world.json", damage=in_the_cache("world.json", cut)),
    "a built world without a model": tales_policy("", "built again", damage=in_the_cache("model", remove)),
    "a built world without stories": tales_policy("", "stories.txt", damage=in_the_cache("stories.txt", remove)),
    "a built world that has lost lines": tales_policy(
        "", "stories.txt is damaged or gone", "built again", damage=in_the_cache("stories.txt", drop_lines)
    ),
}

KINDS = {
    "sizes": SIZES,
    "numbers": NUMBERS,
    "names": NAMES,
    "shared": SHARED_BY_BOTH,
    "boxes": BOXES,
    "labels": LABELS,
    "texts": TEXTS,
    "models": MODELS,
    "reward models": REWARD_MODELS,
    "functions": FUNCTIONS,
    "runs": RUNS,
    "environment": ENVIRONMENT,
    "sample": SAMPLES,
    "tales": TALES,
}
BAD_INPUT = {f"{kind}: {name}": row for kind, rows in KINDS.items() for name, row in rows.items()}

# Commands that the undamaged files let run to their end.
GOOD = {
    "train_policy": policy(),
    "train_policy with a function": function("--rewards.function rewards:length --rewards.monitor rewards:length"),
    "train_policy of the tales": tales_policy("--ppo.total_episodes 64"),
    "train_reward": reward(),
    "train_reward with ratings": reward("--label_dataset ratings.json"),
    "train_reward with differences": reward("--label_dataset differences.json"),
    "train_reward of the tales": tales_reward(),
    "train_both": both(),
    "sample": sample("--out rows.jsonl"),
    "sample with a prompt": sample("--prompt 'Mara found a bell.' --temperature 0.5 --reward_model reward"),
    "tales": world(),
    "tales that are there": built_world(),
    "train_policy --resume": resumed_policy(),
    "train_reward --resume": resumed_reward(),
    "train_both --resume": resumed_both(),
}

# ---- Tests -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good_files(tiny_world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, texts, labels of each kind, a function, the runs of train_both.py, and a tales world."""
    folder = tmp_path_factory.mktemp("good")
    shutil.copytree(tiny_world / "model", folder / "model")
    shutil.copy(tiny_world / "stories.txt", folder)
    with pytest.MonkeyPatch.context() as patch:
        # The world that the scripts build by default takes minutes; under its name, the tiny one does.
        patch.setenv("PPO_RLHF_CACHE", str(folder / "cache"))
        patch.setattr(tales, "build_world", lambda default, args: shutil.copytree(tiny_world, default))
        tales.find_world()
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
    names = ("length", "scores", "kl", "entropy")
    code = "def length(queries, responses):\n    return [float(len(text)) for text in responses]\n"
    (folder / "rewards.py").write_text(code + "".join(f"{name} = length\n" for name in names[1:]))

    result = run(GOOD["train_both"], folder)
    assert result.status == 0, result.stderr
    timestamp = next((folder / "runs").iterdir()).name.rsplit("__", 1)[1]
    for path in [*folder.glob(f"*/*__{timestamp}")]:
        path.rename(path.with_name(path.name.replace(timestamp, "7")))
    for path in [*folder.glob("runs/*/meta.json"), *folder.glob("models/*/*/ppo_rlhf.json")]:
        path.write_text(path.read_text().replace(timestamp, "7"))
    for kind in ("reward", "policy"):
        shutil.copytree(folder / f"models/train_{kind}__tales__1__7/{kind}", folder / kind)
    edit("policy/ppo_rlhf.json", "reward_model", to="reward")(folder)
    return folder


def run(row: Row, folder: Path) -> Result:
    return launch(row.script, *row.arguments, folder=folder, **row.environment)


def contents(folder: Path) -> dict[str, bytes | str | None]:
    """Everything in a folder: bytes of files, targets of links, None for folders; not what Python's imports leave."""
    return {
        str(path.relative_to(folder)): str(path.readlink())
        if path.is_symlink()
        else (path.read_bytes() if path.is_file() else None)
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


@pytest.fixture
def folder(good_files: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good_files, tmp_path / "here")


@pytest.mark.parametrize("row", BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_ends_in_one_line_and_leaves_nothing(row: Row, folder: Path) -> None:
    row.damage(folder)
    before = contents(folder)
    result = run(row, folder)
    assert "Traceback" not in result.stdout + result.stderr
    assert result.status == 2, result.stderr
    if not row.box:
        (line,) = [line for line in result.stderr.splitlines() if line.strip()]
        assert line.startswith("error: ")
    for word in row.words:
        assert word in result.stderr
    after = contents(folder)
    assert sorted(after) == sorted(before)
    assert [path for path in before if before[path] != after[path]] == []


@pytest.mark.parametrize("row", GOOD.values(), ids=GOOD)
def test_the_same_files_undamaged_run_to_the_end(row: Row, folder: Path) -> None:
    result = run(row, folder)
    assert result.status == 0, result.stderr
    assert "error" not in result.stderr and "Traceback" not in result.stderr


def test_the_tables_are_large_and_name_every_script() -> None:
    assert len(BAD_INPUT) == sum(map(len, KINDS.values())) >= 60
    scripts = {"train_policy.py", "train_reward.py", "train_both.py", "sample.py", "worlds/tales.py"}
    assert {row.script for row in BAD_INPUT.values()} == {row.script for row in GOOD.values()} == scripts
    no_words = [name for name, row in BAD_INPUT.items() if not row.words]
    assert not no_words
    commands = [(row.script, *row.arguments) for row in GOOD.values()]
    assert len(set(commands)) == len(commands)
