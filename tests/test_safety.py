"""What a run must never do: load a pickle, run code that came with a model, write down a secret.

The files that the scripts read are made hostile, and the scripts themselves run on them.
"""

import base64
import importlib.metadata
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hub import Hub, serve
from processes import OFFLINE, SCRIPTS, Launched, Result
from runs import both_arguments, interrupt, metrics_of, only, world_arguments
from transformers import AutoModelForCausalLM

from ppo_rlhf.lib.checkpoints import sealed

TIME_LIMIT = 300  # seconds
GOLD = ["--rewards.function", "ppo_rlhf.worlds.tales:sentiment.gold_scores"]

# Runs a script and notes which files it opens, what it unpickles and what it asks. It answers yes to every question.
# With WATCH_FORBIDS, whatever unpickles ends the process. WATCH_CACHE takes the place of the hub's cache.
WATCH = """
import io
import os
import pickle
import runpy
import sys

import huggingface_hub.constants
import torch
import transformers.dynamic_module_utils

log = os.open(os.environ["WATCH_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(*words):
    os.write(log, (" ".join(words) + "\\n").encode())


def on_event(event, arguments):
    if event == "open" and isinstance(arguments[0], str | bytes):
        note("opened", os.path.basename(os.fsdecode(arguments[0])))
    elif event == "pickle.find_class":
        note("unpickled", *arguments)


def watched(name, function):
    def call(*arguments, **options):
        note("unpickled", name)
        if "WATCH_FORBIDS" in os.environ:
            raise SystemExit(f"{name} is forbidden")
        return function(*arguments, **options)

    return call


class SaysYes(io.TextIOBase):
    def readline(self, size=-1):
        note("asked")
        return "yes\\n"


sys.addaudithook(on_event)
sys.stdin = SaysYes()
pickle.load, pickle.loads = watched("pickle.load", pickle.load), watched("pickle.loads", pickle.loads)
pickle._Unpickler.load = watched("pickle._Unpickler", pickle._Unpickler.load)
load = watched("pickle.Unpickler", pickle.Unpickler.load)
pickle.Unpickler = type("Unpickler", (pickle.Unpickler,), {"load": load})
torch.load = torch.serialization.load = watched("torch.load", torch.load)
torch.jit.load = watched("torch.jit.load", torch.jit.load)
huggingface_hub.constants.HF_HUB_CACHE = os.environ["WATCH_CACHE"] + "/hub"
transformers.dynamic_module_utils.HF_MODULES_CACHE = os.environ["WATCH_CACHE"] + "/modules"
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Watched(Result):
    notes: list[str]

    def noted(self, what: str) -> set[str]:
        """What was opened or unpickled."""
        return {note.partition(" ")[2] for note in self.notes if note.split(" ")[0] == what}


def run(script: str | Path, *arguments: str | Path, folder: Path, **environment: str) -> Watched:
    """Run a script under WATCH; fail if it asks something or takes too long."""
    folder.mkdir(exist_ok=True)
    driver, log = folder.parent / f"{folder.name}.watch.py", folder.parent / f"{folder.name}.watch.log"
    driver.write_text(WATCH)
    log.unlink(missing_ok=True)
    command = [str(SCRIPTS / script), *map(str, arguments)]
    watch = {"WATCH_LOG": str(log), "WATCH_CACHE": str(folder.parent / "cache")}
    result = Launched(driver, *command, folder=folder, **watch, **environment).wait(TIME_LIMIT)
    watched = Watched(result.status, result.stdout, result.stderr, log.read_text().splitlines())
    assert "asked" not in watched.notes, result.stdout + result.stderr
    return watched


def ended_well(result: Result) -> None:
    assert result.status == 0, result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr


def error_of(result: Result) -> str:
    """The one line that a script says of bad input."""
    assert result.status == 2, result.stdout + result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.strip()]
    assert line.startswith("error: ") and "Traceback" not in result.stdout
    return line


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(scope="module")
def trained(tiny_world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which train_both ran."""
    folder = tmp_path_factory.mktemp("trained") / "work"
    ended_well(run("train_both.py", *both_arguments(tiny_world), folder=folder))
    return folder


@pytest.fixture
def model(tiny_world: Path, tmp_path: Path) -> Path:
    """A copy of the tiny world's model, to be spoilt."""
    return Path(shutil.copytree(tiny_world / "model", tmp_path / "model"))


@pytest.fixture
def work(trained: Path, model: Path, tmp_path: Path) -> Path:
    """A copy of the folder in which train_both ran; the policy's run was cut off after its second update.

    The policy names the copy of the base model.
    """
    work = Path(shutil.copytree(trained, tmp_path / "work"))
    edit_json(only(work, "models/train_policy__*/policy") / "ppo_rlhf.json", base_model=str(model))
    interrupt(only(work, "runs/train_policy__*"))
    return work


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that hostile files leave when they are loaded."""
    return tmp_path / "marker"


def words(prefix: str, values: dict[str, object]) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{prefix}{name}", str(value))]


SMALL_REWARD = {"num_train": 8, "batch_size": 8, "rollout_batch_size": 32, "normalize_samples": 32}
SMALL_POLICY = {"ppo.total_episodes": 16, "ppo.batch_size": 16, "ppo.whiten_groups": 2, "log_interval": 0}
SMALL_POLICY["rewards.normalize_samples"] = 16


def reward_arguments(world: Path, *arguments: str | Path) -> list[str]:
    """train_reward.py: one step of 8 labels."""
    labels = {"label_dataset": world / "labels/sentiment/offline_5k.json"}
    return [*world_arguments(world), *words("", labels | SMALL_REWARD), *map(str, arguments)]


def policy_arguments(world: Path, *arguments: str | Path) -> list[str]:
    """train_policy.py: one update of 16 episodes."""
    return [*world_arguments(world), *words("", SMALL_POLICY), *map(str, arguments)]


def small_both_arguments(world: Path, *arguments: str | Path) -> list[str]:
    small = [*words("reward.", SMALL_REWARD), *words("policy.", SMALL_POLICY)]
    return [*both_arguments(world), *small, *map(str, arguments)]


def sample_arguments(work: Path, *arguments: str | Path) -> list[str]:
    return ["--policy", str(only(work, "models/train_policy__*/policy")), "--n", "2", *map(str, arguments)]


def folders(base_model: Path, work: Path) -> dict[str, Path]:
    """Of the models that the scripts read."""
    trained = {"reward model": "models/train_reward__*/reward", "policy": "models/train_policy__*/policy"}
    return {"base model": base_model} | {name: only(work, pattern) for name, pattern in trained.items()}


def arguments_of(script: str, world: Path, base_model: Path, work: Path) -> list[str]:
    """With which a script reads every model that it can read."""
    base = ("--base_model", base_model)
    reward = ("--rewards.trained_model", folders(base_model, work)["reward model"])
    return {
        "train_reward.py": reward_arguments(world, *base),
        "train_policy.py": policy_arguments(world, *base, *reward),
        "train_both.py": small_both_arguments(world, *base),
        "sample.py": sample_arguments(work, "--reward_model", reward[1]),
    }[script]


# ---- Pickles ---------------------------------------------------------------------------------------------------

NAMES_OF_PICKLES = """
    pytorch_model.bin pytorch_model.fp32.bin pytorch_model-00001-of-00002.bin pytorch_model-00002-of-00002.bin
    model.bin model.pt model.pth model.ckpt model.pkl model.pickle model weights.bin data.pkl consolidated.00.pth
    tf_model.h5 flax_model.msgpack model.ckpt.index model.onnx model.gguf adapter_model.bin adapter.bin
    training_args.bin trainer_state.pt optimizer.bin optimizer.pt scheduler.bin scheduler.pt scaler.pt rng_state.pth
    random_states_0.pkl custom_checkpoint_0.pkl sampler.bin .metadata __0_0.distcp state.pkl state.pt
    tensors.pt tensors.bin tensors.pkl value_head.pt value_head.bin reward_head.pt reward_head.bin ppo_rlhf.pkl
    tokenizer.pkl tokenizer.model tokenizer.bin spiece.model sentencepiece.bpe.model vocab.pkl vocab.bin vocab.txt
    tiktoken.model vocab.json merges.txt generation_config.pkl config.pkl
"""
PICKLES = NAMES_OF_PICKLES.split()


class Hostile:
    """Leaves a file when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple:
        return open, (str(self.marker), "w")


def pickled(marker: Path, protocol: int = pickle.DEFAULT_PROTOCOL) -> bytes:
    return pickle.dumps(Hostile(marker), protocol)


def torch_pickled(marker: Path) -> bytes:
    """In the format of torch.save, an archive with a pickle in it."""
    file = io.BytesIO()
    torch.save(Hostile(marker), file)
    return file.getvalue()


def plant_pickles(folder: Path, marker: Path) -> None:
    """Lay hostile pickles into a folder under all names, half of them in PyTorch's format."""
    for number, name in enumerate(PICKLES):
        (folder / name).write_bytes((pickled if number % 2 else torch_pickled)(marker))
    shards = {"transformer.wte.weight": "pytorch_model-00001-of-00002.bin", "x": "pytorch_model-00002-of-00002.bin"}
    index = {"metadata": {"total_size": 8}, "weight_map": shards}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(folder), "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))


def no_pickle_was_loaded(result: Watched, marker: Path) -> None:
    assert not marker.exists() and not result.noted("unpickled"), result.stdout + result.stderr


def no_pickle_was_opened(result: Watched, marker: Path) -> None:
    no_pickle_was_loaded(result, marker)
    assert not result.noted("opened") & set(PICKLES)


def test_the_hostile_pickles_work(tmp_path: Path, marker: Path) -> None:
    """Opened without care, each of our own pickles runs its code: else the other tests would prove nothing."""
    plant_pickles(tmp_path, marker)
    for name in PICKLES:
        marker.unlink(missing_ok=True)
        try:
            torch.load(tmp_path / name, weights_only=False)
        except RuntimeError:
            pickle.loads((tmp_path / name).read_bytes())
        assert marker.exists(), name
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        marker.unlink()
        pickle.loads(pickled(marker, protocol))
        assert marker.exists()


def test_the_watch_sees_what_is_read(tmp_path: Path, marker: Path) -> None:
    """Every way to read a pickle is noted, and ends where it is forbidden. The pickles are our own."""
    here, script = tmp_path / "here", tmp_path / "script.py"
    here.mkdir()
    (here / "model.pt").write_bytes(torch_pickled(marker))
    (here / "data.pkl").write_bytes(pickled(marker))
    torch.save({"weight": torch.zeros(1)}, here / "weights.bin")
    ways = {
        "torch.load('weights.bin')": "weights.bin",
        "torch.load('model.pt', weights_only=False)": "model.pt",
        "pickle.load(open('data.pkl', 'rb'))": "data.pkl",
        "pickle.loads(open('data.pkl', 'rb').read())": "data.pkl",
        "pickle.Unpickler(open('data.pkl', 'rb')).load()": "data.pkl",
    }
    attempts = [f"try:\n    {way}\nexcept SystemExit as forbidden:\n    print(forbidden)" for way in ways]
    script.write_text("\n".join(["import pickle", "import torch", *attempts]))
    forbidden = run(script, folder=here, WATCH_FORBIDS="1")
    assert forbidden.stdout.count("is forbidden") == len(ways) and not marker.exists()
    assert forbidden.noted("unpickled") == {way.split("(")[0] for way in ways}
    script.write_text("\n".join(["import pickle", "import torch", *ways, "input()"]))
    with pytest.raises(AssertionError):
        run(script, folder=here)
    notes = (tmp_path / "here.watch.log").read_text().splitlines()
    assert "asked" in notes and marker.exists()
    assert {f"opened {name}" for name in ways.values()} <= set(notes)
    assert {f"unpickled {way.split('(')[0]}" for way in ways} | {f"unpickled {open.__module__} open"} <= set(notes)


def test_pickles_beside_the_weights_are_not_opened(trained, tiny_world, model, work, tmp_path, marker) -> None:
    """In the folders of all models, of the checkpoint that a run goes on from, and in the current folder."""
    cut_off = only(work, "runs/train_policy__*")
    scripts = ("train_reward.py", "train_policy.py", "sample.py")
    runs = {script: arguments_of(script, tiny_world, model, work) for script in scripts}
    runs |= {"train_both.py": ["--resume", f"runs/{cut_off.name}"]}
    for folder in (*folders(model, work).values(), work, cut_off, cut_off / "checkpoints", cut_off / "checkpoints/2"):
        plant_pickles(folder, marker)
    for script, arguments in runs.items():
        result = run(script, *arguments, folder=work)
        ended_well(result)
        no_pickle_was_opened(result, marker)
    assert len(metrics_of(cut_off)) == len(metrics_of(only(trained, "runs/train_policy__*")))


def index_of_honest_pickles(folder: Path, marker: Path) -> None:
    """The right weights, which PyTorch loads without complaint."""
    weights = AutoModelForCausalLM.from_pretrained(folder.parent / "whole").state_dict()
    torch.save(weights, folder / "pytorch_model.bin")
    index = {"metadata": {"total_size": 8}, "weight_map": dict.fromkeys(weights, "pytorch_model.bin")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def adapter_named_by_the_configuration(folder: Path, marker: Path) -> None:
    plant_pickles(folder, marker)
    edit_json(folder / "config.json", transformers_weights="adapter_model.bin")


def torch_format_called_safetensors(folder: Path, marker: Path) -> None:
    (folder / "model.safetensors").write_bytes(torch_pickled(marker))


def distributed_checkpoint(folder: Path, marker: Path) -> None:
    """The format whose table of contents is a pickle."""
    for name in (".metadata", "__0_0.distcp", "shard-00001-model-00001-of-00001.safetensors"):
        (folder / name).write_bytes(pickled(marker))


INSTEAD_OF_WEIGHTS = [
    plant_pickles,
    index_of_honest_pickles,
    adapter_named_by_the_configuration,
    torch_format_called_safetensors,
    distributed_checkpoint,
]


@pytest.mark.parametrize("plant", INSTEAD_OF_WEIGHTS, ids=lambda plant: plant.__name__)
def test_pickles_do_not_take_the_place_of_a_base_models_weights(plant, tiny_world, model, tmp_path, marker) -> None:
    shutil.copytree(model, tmp_path / "whole")
    (model / "model.safetensors").unlink()
    plant(model, marker)
    here = tmp_path / "here"
    result = run("train_policy.py", *policy_arguments(tiny_world, *GOLD, "--base_model", model), folder=here)
    no_pickle_was_loaded(result, marker)
    line = error_of(result)
    assert "safetensors" in line and str(model) in line and not list(here.iterdir())


def put_on_the_hub(model: Path, cache: Path) -> str:
    """As if a model had been downloaded from the hub. Returns its name."""
    stored = cache / "hub" / "models--somebody--model"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text("0" * 40)
    shutil.copytree(model, stored / "snapshots" / ("0" * 40))
    return "somebody/model"


def test_a_model_from_the_hub_is_loaded_from_safetensors_only(tiny_world, model, tmp_path, marker) -> None:
    """An honest model from there is in test_code_of_a_model_from_the_hub_is_not_run."""
    shutil.copytree(model, tmp_path / "whole")
    (model / "model.safetensors").unlink()
    index_of_honest_pickles(model, marker)
    name = put_on_the_hub(model, tmp_path / "cache")
    arguments = policy_arguments(tiny_world, *GOLD, "--base_model", name)
    result = run("train_policy.py", *arguments, folder=tmp_path / "here")
    no_pickle_was_loaded(result, marker)
    assert name in error_of(result)


def replace_by_pickles(file: Path, marker: Path, same_name: bool) -> None:
    """Hostile pickles in place of a file, under that very name or under all others."""
    plant_pickles(file.parent, marker)
    file.unlink(missing_ok=True)
    if same_name:
        file.write_bytes(torch_pickled(marker))


def reseal(checkpoint: Path) -> None:
    """Make a checkpoint's checksum fit the files that it holds now."""
    state = json.loads((checkpoint / "state.json").read_text())
    state.pop("sha256")
    (checkpoint / "state.json").write_text(json.dumps(sealed(state, checkpoint / "tensors.safetensors")))


RUN_FILES = ["meta.json", "metrics.csv", "samples.jsonl"]
NEEDED = {
    "reward model": ["model.safetensors", "reward_head.safetensors", "ppo_rlhf.json", "config.json"],
    "policy": ["model.safetensors", "ppo_rlhf.json", "config.json", "tokenizer.json"],
    "checkpoint": ["tensors.safetensors", "state.json", *(f"../../{name}" for name in RUN_FILES)],
}
# Of a base model. Some of them may be missing.
SMALL_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
SMALL_FILES += ["special_tokens_map.json", "added_tokens.json"]
REPLACED = [(what, file, same_name) for what in NEEDED for file in NEEDED[what] for same_name in (False, True)]
REPLACED += [("base model", file, True) for file in SMALL_FILES]


@pytest.mark.parametrize("what, file, same_name", REPLACED)
def test_pickles_do_not_take_the_place_of_a_file(
    what, file, same_name, tiny_world, model, work, tmp_path, marker
) -> None:
    cut_off = only(work, "runs/train_policy__*")
    folder = (folders(model, work) | {"checkpoint": cut_off / "checkpoints/2"})[what]
    replace_by_pickles(folder / file, marker, same_name)
    if what == "checkpoint":
        if same_name and file == "tensors.safetensors":
            reseal(folder)  # else it would not be read
        result = run("train_policy.py", "--resume", f"runs/{cut_off.name}", folder=work)
    else:
        script, here = "sample.py" if what == "policy" else "train_policy.py", tmp_path / "here"
        result = run(script, *arguments_of(script, tiny_world, model, work), folder=here)
        assert not list(here.iterdir())
    no_pickle_was_opened(result, marker)
    assert (cut_off.name if what == "checkpoint" else str(folder)) in error_of(result)


def test_label_and_query_files_may_be_pickles_and_are_not_loaded(tiny_world, tmp_path, marker) -> None:
    labels = tmp_path / "labels.json"
    shutil.copy(tiny_world / "labels" / "sentiment" / "offline_5k.json", labels)
    hostile = {suffix: tmp_path / f"hostile.{suffix}" for suffix in ("json", "jsonl", "txt")}
    for path in (*hostile.values(), tmp_path / "labels.meta.json"):
        path.write_bytes(pickled(marker))
    runs = [("train_reward.py", "--label_dataset", path) for path in (labels, hostile["json"])]
    runs += [("train_policy.py", "--task.query_dataset", path) for path in hostile.values()]
    for script, flag, path in runs:
        arguments = (
            reward_arguments(tiny_world) if script == "train_reward.py" else policy_arguments(tiny_world, *GOLD)
        )
        result = run(script, *arguments, flag, path, folder=tmp_path / "here")
        no_pickle_was_opened(result, marker)
        named = tmp_path / "labels.meta.json" if path == labels else path
        assert str(named) in error_of(result)


def run_afresh(command: list[str | Path], folder: Path, **environment: str) -> Result:
    """Run a command in an interpreter of its own, which reads the environment anew. Nobody ever answers it."""
    folder.mkdir(exist_ok=True)
    answers, nobody = os.pipe()
    try:
        result = subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=folder,
            env=os.environ | OFFLINE | environment,
            stdin=answers,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
        )
    finally:
        os.close(answers)
        os.close(nobody)
    return Result(result.returncode, result.stdout, result.stderr)


def test_training_from_beginning_to_end_unpickles_nothing(tracked: tuple["Machine", Watched]) -> None:
    """In a process in which whatever unpickles is replaced from the first import on."""
    machine, result = tracked
    ended_well(result)
    assert only(machine.work, "models/train_policy__*/policy/model.safetensors")
    assert "opened state.json.tmp" in result.notes
    assert [note for note in result.notes if not note.startswith("opened ")] == []


# ---- Code that comes with a model ------------------------------------------------------------------------------

HOSTILE_MODULE = """
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, GPT2Model
from transformers import PreTrainedTokenizerFast

open({marker!r}, "a").close()


class Config(GPT2Config):
    model_type = {model_type!r}


class Base(GPT2Model):
    config_class = Config


class Causal(GPT2LMHeadModel):
    config_class = Config


class Classifier(GPT2ForSequenceClassification):
    config_class = Config


class Tokenizer(PreTrainedTokenizerFast):
    pass
"""
HOSTILE_CLASSES = {
    "AutoConfig": "Config",
    "AutoModel": "Base",
    "AutoModelForCausalLM": "Causal",
    "AutoModelForSequenceClassification": "Classifier",
}
KNOWN, UNKNOWN = "gpt2", "unheard_of"  # model types


def add_code(folder: Path, marker: Path, model_type: str) -> None:
    """Make the folder of a model bring its own classes, which leave the marker when they are imported."""
    (folder / "hostile.py").write_text(HOSTILE_MODULE.format(marker=str(marker), model_type=model_type))
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(
        f"open({str(marker)!r}, 'a').close()\ndef generate(model, *arguments, **options):\n    return model\n"
    )
    auto_map: dict = {name: f"hostile.{kind}" for name, kind in HOSTILE_CLASSES.items()}
    tokenizer = {"AutoTokenizer": ["hostile.Tokenizer", "hostile.Tokenizer"]}
    edit_json(folder / "config.json", model_type=model_type, auto_map=auto_map | tokenizer)
    edit_json(folder / "tokenizer_config.json", auto_map=tokenizer)
    if (folder / "generation_config.json").exists():
        edit_json(folder / "generation_config.json", auto_map=auto_map, custom_generate=str(folder))


EACH_SCRIPT = ["train_reward.py", "train_policy.py", "train_both.py", "sample.py"]
EACH_READING = [*((script, "base model") for script in EACH_SCRIPT), ("train_policy.py", "reward model")]
EACH_READING += [("sample.py", "reward model"), ("sample.py", "policy")]


@pytest.mark.parametrize("script", EACH_SCRIPT)
def test_code_beside_models_of_a_known_type_runs_only_if_it_is_trusted(
    script, tiny_world, model, work, tmp_path, marker
) -> None:
    here = tmp_path / "here"
    for folder in folders(model, work).values():
        add_code(folder, marker, KNOWN)
    arguments = arguments_of(script, tiny_world, model, work)
    ended_well(run(script, *arguments, folder=here))
    assert not marker.exists() and not list(here.rglob("*.py"))
    for saved in here.glob("models/*/policy/config.json"):
        assert json.loads(saved.read_text())["architectures"] == ["GPT2LMHeadModel"]
    ended_well(run(script, *arguments, "--trust_remote_code", folder=tmp_path / "trusted"))
    assert marker.exists()


@pytest.mark.parametrize("script, what", EACH_READING)
def test_a_model_that_needs_its_own_code_is_refused_unless_it_is_trusted(
    script, what, tiny_world, model, work, tmp_path, marker
) -> None:
    folder, here = folders(model, work)[what], tmp_path / "here"
    add_code(folder, marker, UNKNOWN)
    arguments = arguments_of(script, tiny_world, model, work)
    line = error_of(run(script, *arguments, folder=here))
    assert not marker.exists() and not list(here.iterdir())
    flag = "--reward_model" if script == "sample.py" else "--rewards.trained_model"
    assert (f"{flag} {folder}" if what == "reward model" else str(folder)) in line and "--trust_remote_code" in line
    ended_well(run(script, *arguments, "--trust_remote_code", folder=here))
    assert marker.exists()


@pytest.mark.parametrize("model_type", [KNOWN, UNKNOWN])
def test_code_of_a_model_from_the_hub_is_not_run(model_type, tiny_world, model, tmp_path, marker) -> None:
    add_code(model, marker, model_type)
    name = put_on_the_hub(model, tmp_path / "cache")
    arguments = policy_arguments(tiny_world, *GOLD, "--base_model", name)
    result = run("train_policy.py", *arguments, folder=tmp_path / "here")
    assert not marker.exists()
    if model_type == KNOWN:
        ended_well(result)
    else:
        assert name in error_of(result) and "--trust_remote_code" in result.stderr


def test_a_configuration_does_not_fetch_code_for_attention(tiny_world, model, tmp_path) -> None:
    edit_json(model / "config.json", attn_implementation="kernels-community/flash-attn3")
    arguments = policy_arguments(tiny_world, *GOLD, "--base_model", model)
    line = error_of(run("train_policy.py", *arguments, folder=tmp_path / "here"))
    assert str(model) in line and "--trust_remote_code" in line


def test_a_policy_does_not_choose_code_to_run(work: Path, marker: Path) -> None:
    """Its ppo_rlhf.json names scoring functions, and somebody samples from it in the folder that it came in."""
    policy = only(work, "models/train_policy__*/policy")
    module = (
        f"open({str(marker)!r}, 'w').close()\ndef score(queries, responses):\n    return [0.0] * len(responses)\n"
    )
    (policy / "scores.py").write_text(module)
    edit_json(policy / "ppo_rlhf.json", monitor="scores:score")
    arguments = ["--policy", ".", "--n", "2", "--reward_model", str(only(work, "models/train_reward__*/reward"))]
    result = run("sample.py", *arguments, folder=policy)
    assert not marker.exists()
    assert "scores:score" in error_of(result)


NOT_INSTALLED = """
    attr backports bottleneck brotli cloudpickle colorama cupy deepspeed flash_attn flax h2 hqq jax kernels librosa
    lz4 mlflow mistral_common numexpr onnx optuna peft pynvml pytz scipy sentencepiece sitecustomize sklearn snappy
    soundfile tabulate tensorboardX tensorflow tensorrt tiktoken torchao torchaudio torchvision torch_npu torch_xla
    trio triton usercustomize winreg xarray zstandard
"""


def plant_namesakes(folder: Path) -> list[Path]:
    """Modules with the names of all libraries, also of those that a library would use if it were installed."""
    # A namespace package such as nvidia, which torch's CUDA build brings, may be listed as nvidia/cusparselt.
    installed = {name.partition("/")[0] for name in importlib.metadata.packages_distributions()}
    planted = []
    for name in {*sys.stdlib_module_names, *installed, *NOT_INSTALLED.split()}:
        planted.append(folder / f"{name}.py")
        planted[-1].write_text(f"open({name + '.imported'!r}, 'w').close()\nraise ImportError({name!r})\n")
    return planted


def test_namesakes_of_libraries_are_imported_by_others(tmp_path: Path) -> None:
    plant_namesakes(tmp_path)
    control = subprocess.run([sys.executable, "-c", "import tensorboard"], cwd=tmp_path, capture_output=True)
    # tensorboard; with Python 3.13 linecache, which `python -c` imports before it
    assert control.returncode == 1 and list(tmp_path.glob("*.imported"))


# ---- Secrets ---------------------------------------------------------------------------------------------------

SECRETS = {
    "HF_TOKEN": "hf_EnvironmentTokenOfTheHub0123456789ab",
    "HUGGING_FACE_HUB_TOKEN": "hf_OlderNameOfTheTokenOfTheHub987654321",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "token file": "hf_TokenInTheFileUnderTheHome0123456789",
    "netrc": "fedcba9876543210fedcba9876543210fedcba98",
    "hub address": "PasswordInTheAddressOfAMirrorOfTheHub01",
    "git remote": "ghp_TokenInTheAddressOfTheGitRemote01234",
    "uncommitted change": "sk-SecretInAChangeThatIsNotCommitted0123",
}


def forms(secret: str) -> list[bytes]:
    """How a secret may look in a file: as it is, in UTF-16, and in base64 at any offset."""
    encoded = [base64.b64encode(b"?" * offset + secret.encode())[4 * (offset > 0) :] for offset in range(3)]
    return [secret.encode(), secret.encode("utf-16-le"), *(code.rstrip(b"=")[:-1] for code in encoded)]


def leaks(*places: Path | str, known: tuple[Path, ...] = ()) -> list[str]:
    """Each secret in a text, or in a file or a file's name under a folder; known: files that are to hold one."""
    contents: dict[str, bytes] = {}
    for place in places:
        if isinstance(place, str):
            contents[place] = place.encode()
        else:
            files = [path for path in place.rglob("*") if path.is_file() and path not in known]
            contents |= {str(path): str(path).encode() + path.read_bytes() for path in files}
    return [
        f"{name}: {place[-300:]}"
        for place, content in contents.items()
        for name, secret in SECRETS.items()
        if any(form in content for form in forms(secret))
    ]


def scripts() -> list[Path]:
    """Those of all chapters; the paths of older versions have no function."""
    folders = (SCRIPTS, SCRIPTS / "tldr", SCRIPTS / "rlvr")
    return [path for folder in folders for path in folder.glob("*.py") if "\ndef " in path.read_text()]


def sources_in(folder: Path) -> list[Path]:
    """Files that hold the longest definition of one of the scripts, or changes to a checkout."""
    functions = [re.findall(r"^def .*", path.read_text(), re.MULTILINE) for path in scripts()]
    lines = [max(found, key=len).encode() for found in functions]
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [
        path
        for path in files
        if path.suffix in (".py", ".patch", ".diff", ".ipynb") or any(line in path.read_bytes() for line in lines)
    ]


@dataclass(frozen=True)
class Machine:
    """A machine with secrets where they usually lie: in the environment, in files under the home, in a checkout."""

    home: Path
    work: Path
    environment: dict[str, str]

    def leaks(self, result: Result) -> list[str]:
        """The secrets in what a run said or wrote."""
        known = (
            self.home / ".netrc",
            self.home / "hub" / "token",
            self.work / "notes.txt",
            self.work / ".git/config",
        )
        return leaks(self.home, self.work, result.stdout, result.stderr, known=known)


def machine_in(folder: Path) -> Machine:
    home, work = folder / "home", folder / "work"
    (home / "hub").mkdir(parents=True)
    (home / "hub" / "token").write_text(SECRETS["token file"])
    (home / ".netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {SECRETS['netrc']}\n")
    (home / ".netrc").chmod(0o600)
    work.mkdir()
    (work / "notes.txt").write_text("nothing\n")
    author = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
    remotes = [f"https://{user}{SECRETS['git remote']}@example.com/user/project.git" for user in ("", "user:")]
    commands = [["init"], ["remote", "add", "origin", remotes[0]], ["remote", "add", "fork", remotes[1]]]
    for command in [*commands, ["add", "notes.txt"], [*author, "commit", "-m", "A"]]:
        subprocess.run(
            ["git", *command], cwd=work, env=os.environ | {"HOME": str(home)}, check=True, capture_output=True
        )
    (work / "notes.txt").write_text(SECRETS["uncommitted change"])
    variables = {name: SECRETS[name] for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")}
    return Machine(
        home, work, variables | {"HOME": str(home), "HF_HOME": str(home / "hub"), "WANDB_SAVE_CODE": "true"}
    )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return machine_in(tmp_path)


@pytest.fixture(scope="module")
def tracked(tiny_world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Machine, Watched]:
    """A machine on which train_both ran with Weights & Biases among namesakes of libraries, and what it printed.

    An interpreter of its own runs it under WATCH, which forbids to unpickle.
    """
    folder = tmp_path_factory.mktemp("tracked")
    machine, driver, log = machine_in(folder), folder / "watch.py", folder / "watch.log"
    driver.write_text(WATCH)
    planted = plant_namesakes(machine.work)
    arguments = small_both_arguments(tiny_world, "--policy.log_interval", "1", "--reward.track", "--policy.track")
    watch = {"WATCH_LOG": str(log), "WATCH_CACHE": str(machine.home / "cache"), "WATCH_FORBIDS": "1"}
    command = [driver, SCRIPTS / "train_both.py", *arguments]
    result = run_afresh(command, machine.work, **machine.environment, **watch)
    for path in planted:
        path.unlink()
    return machine, Watched(result.status, result.stdout, result.stderr, log.read_text().splitlines())


def test_the_search_finds_secrets_and_sources(tmp_path: Path) -> None:
    assert leaks(tmp_path, "nothing") == [] and sources_in(tmp_path) == []
    for number, (name, secret) in enumerate(SECRETS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert leaks(f"x{secret}x") == [f"{name}: x{secret}x"]
        assert len(leaks(base64.b64encode(f"user:{secret}".encode()).decode())) == 1
        for content in (
            b"\0\xff" + secret.encode() + b"\xfe",
            secret.encode("utf-16"),
            base64.b64encode(secret.encode()),
        ):
            (folder / "file").write_bytes(content)
            assert leaks(folder) == [f"{name}: {folder / 'file'}"] and leaks(folder, known=(folder / "file",)) == []
        (folder / "file").unlink()
        (folder / f"run-{secret}").touch()
        assert len(leaks(folder)) == 1
    for script in scripts():
        (tmp_path / "run.wandb").write_bytes(b"\0" + script.read_bytes())
        assert sources_in(tmp_path) == [tmp_path / "run.wandb"]


def test_no_library_is_taken_from_the_current_folder(tracked: tuple[Machine, Watched]) -> None:
    machine, result = tracked
    assert sorted(path.stem for path in machine.work.glob("*.imported")) == []
    ended_well(result)
    assert len(list(machine.work.glob("runs/*/events.out.tfevents.*"))) == 2


def test_a_tracked_run_leaves_no_secret(tracked: tuple[Machine, Watched]) -> None:
    machine, result = tracked
    ended_well(result)
    assert len(list(machine.work.glob("runs/*/wandb/offline-run-*/run-*.wandb"))) == 2
    assert machine.leaks(result) == []


def test_a_tracked_run_saves_no_source_code(tracked: tuple[Machine, Watched]) -> None:
    machine, _ = tracked
    assert sources_in(machine.work) == []


def test_left_to_itself_the_tracker_does_save_secrets_and_source_code(machine: Machine) -> None:
    """What the two tests above look for is what Weights & Biases saves on such a machine by default."""
    script = machine.work / "script.py"
    script.write_text("import wandb\nwandb.init().finish()\n")
    result = run_afresh([script], machine.work, **machine.environment)
    ended_well(result)
    assert {leak.split(":")[0] for leak in machine.leaks(result)} == {"uncommitted change"}
    assert {path.name for path in sources_in(machine.work / "wandb")} == {"script.py", "diff.patch"}


def test_sampling_and_a_run_that_diverges_leave_no_secret(machine: Machine, tiny_world: Path, trained: Path) -> None:
    sampling = run(
        "sample.py", *sample_arguments(trained, "--out", "rows.jsonl"), folder=machine.work, **machine.environment
    )
    ended_well(sampling)
    diverging = {"ppo.total_episodes": 64, "ppo.noptepochs": 1, "ppo.lr": 1000, "save_interval": 1}
    arguments = policy_arguments(tiny_world, *GOLD, *words("", diverging))
    diverged = run("train_policy.py", *arguments, folder=machine.work, **machine.environment)
    assert "not finite" in error_of(diverged) or re.search(r" is -?(nan|inf)", error_of(diverged))
    assert machine.leaks(sampling) == machine.leaks(diverged) == []


@pytest.fixture
def empty_hub(tmp_path: Path) -> Iterator[Hub]:
    with serve(tmp_path / "hub") as hub:
        yield hub


def test_an_unknown_model_is_asked_for_with_the_token_and_reported_without(machine, empty_hub, tiny_world) -> None:
    arguments = policy_arguments(tiny_world, *GOLD, "--base_model", "somebody/nothing")
    environment = machine.environment | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": empty_hub.address}
    result = Launched("train_policy.py", *arguments, folder=machine.work, **environment).wait()
    assert "somebody/nothing" in error_of(result)
    assert any(SECRETS["HF_TOKEN"] in asked for asked in empty_hub.asked_with)
    assert machine.leaks(result) == []


def test_an_upload_that_fails_shows_no_password(machine: Machine, empty_hub: Hub, tiny_world: Path) -> None:
    """Neither the token nor the password in the address of a mirror of the hub."""
    arguments = policy_arguments(tiny_world, *GOLD, "--upload_model", "--hf_entity", "somebody")
    address = empty_hub.address.replace("//", f"//user:{SECRETS['hub address']}@")
    environment = machine.environment | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": address}
    result = Launched("train_policy.py", *arguments, folder=machine.work, **environment).wait()
    assert "could not be pushed" in error_of(result)
    password = base64.b64encode(f"user:{SECRETS['hub address']}".encode()).decode()
    assert f"Basic {password}" in empty_hub.asked_with
    assert machine.leaks(result) == []
