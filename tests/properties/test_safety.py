"""What a run must never do: load a pickle, run code that came with a model, write down a secret.

The files that the scripts read are made hostile, and the scripts themselves run on them.
"""

import base64
import contextlib
import importlib.metadata
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import refusals
import torch
import transformers.dynamic_module_utils
from processes import OFFLINE, SCRIPTS, Result
from refusals import Hostile
from runs import both_arguments, interrupt, only, policy_arguments, reward_arguments, world_arguments
from transformers import AutoModelForCausalLM

from ppo_rlhf import train_policy

# ---- Watching --------------------------------------------------------------------------------------------------

WATCHES: list[list[str]] = []  # while a test watches: the files that are opened, and what is unpickled


def on_event(event: str, arguments: tuple) -> None:
    if WATCHES and event == "open" and isinstance(arguments[0], str | bytes):
        WATCHES[-1].append(os.path.basename(os.fsdecode(arguments[0])))
    elif WATCHES and event == "pickle.find_class":
        WATCHES[-1].append(f"unpickled {arguments[0]}.{arguments[1]}")


sys.addaudithook(on_event)  # which can't be removed


@contextlib.contextmanager
def watch() -> Iterator[list[str]]:
    """Notes what happens in this process within the block."""
    WATCHES.append([])
    try:
        yield WATCHES[-1]
    finally:
        WATCHES.pop()


Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path, marker, monkeypatch) -> Run:
    """A function (script, arguments, folder) that runs a script to its end, in this process.

    Whatever asks is answered yes. Nothing may ask or unpickle, or open a pickle by its name, unless it may_open.
    """
    asked: list[tuple] = []
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or "yes")
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))

    def run_script(script: str, *arguments: str | Path, folder: Path, may_open: bool = False) -> Result:
        folder.mkdir(exist_ok=True)
        row = refusals.Row(chapter=1, script=script, arguments=[*map(str, arguments)])
        with watch() as notes:
            result = refusals.run(row, folder, to_the_end=True)
        assert not asked and not [note for note in notes if note.startswith("unpickled")]
        assert may_open or not set(PICKLES) & set(notes)
        return result

    return run_script


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


@pytest.fixture
def model(tiny_world, tmp_path) -> Path:
    """A copy of the tiny world's model, to be spoilt."""
    return Path(shutil.copytree(tiny_world / "model", tmp_path / "model"))


@pytest.fixture
def work(both, model, tmp_path) -> Path:
    """A copy of the folder in which train_both ran; the policy's run was cut off after its second update.

    The policy names the copy of the base model.
    """
    work = both.copy(tmp_path / "work").folder
    edit_json(only(work, "models/train_policy__*/policy") / "ppo_rlhf.json", base_model=str(model))
    interrupt(only(work, "runs/train_policy__*"))
    return work


@pytest.fixture
def marker(tmp_path) -> Path:
    """A file that hostile files leave when they are loaded."""
    return tmp_path / "marker"


@pytest.fixture
def places(model, work) -> dict[str, Path]:
    """The folders that the scripts read."""
    return {
        "base model": model,
        "reward model": only(work, "models/train_reward__*/reward"),
        "policy": only(work, "models/train_policy__*/policy"),
        "checkpoint": only(work, "runs/train_policy__*/checkpoints/2"),
    }


@pytest.fixture
def commands(tiny_world, places) -> dict[str, list[str]]:
    """Scripts, with the arguments with which they read every model that they can read."""
    base = [*world_arguments(tiny_world), "--base_model", str(places["base model"])]
    return {
        "train_reward.py": [*base, *reward_arguments(tiny_world), "--num_train", "8"],
        "train_policy.py": [*base, *policy_arguments(), "--rewards.trained_model", str(places["reward model"])],
        "sample.py": ["--policy", str(places["policy"]), "--reward_model", str(places["reward model"]), "--n", "2"],
    }


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


def torch_pickled(marker: Path) -> bytes:
    """In the format of torch.save, an archive with a pickle in it."""
    file = io.BytesIO()
    torch.save(Hostile(marker), file)
    return file.getvalue()


def plant_pickles(folder: Path, marker: Path) -> None:
    """Lay hostile pickles into a folder under all names, half of them in PyTorch's format."""
    for number, name in enumerate(PICKLES):
        (folder / name).write_bytes(pickle.dumps(Hostile(marker)) if number % 2 else torch_pickled(marker))
    shards = {"transformer.wte.weight": "pytorch_model-00001-of-00002.bin", "x": "pytorch_model-00002-of-00002.bin"}
    index = {"metadata": {"total_size": 8}, "weight_map": shards}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def test_a_hostile_pickle_runs_its_code_and_is_noted(tmp_path, marker):
    """Opened without care. Else the other tests would prove nothing."""
    plant_pickles(tmp_path, marker)
    for name in PICKLES:
        marker.unlink(missing_ok=True)
        with watch() as notes:
            try:
                torch.load(tmp_path / name, weights_only=False)
            except RuntimeError:
                pickle.loads((tmp_path / name).read_bytes())
        opened = {"unpickled io.open", "unpickled _io.open"}  # its name until Python 3.12, and after it
        assert marker.exists() and name in notes and opened & {*notes}, name


def test_pickles_beside_the_weights_are_not_opened(run, commands, places, work, marker):
    """In the folders of all models, of the checkpoint that a run goes on from, and in the current folder."""
    checkpoint = places["checkpoint"]
    for folder in (*places.values(), checkpoint.parent, checkpoint.parents[1], work):
        plant_pickles(folder, marker)
    commands["train_both.py"] = ["--resume", f"runs/{checkpoint.parents[1].name}"]
    for script, arguments in commands.items():
        ended_well(run(script, *arguments, folder=work))
    assert not marker.exists()


def index_of_honest_pickles(folder: Path, marker: Path) -> None:
    """The right weights, which PyTorch loads without complaint."""
    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    torch.save(weights, folder / "pytorch_model.bin")
    index = {"metadata": {"total_size": 8}, "weight_map": dict.fromkeys(weights, "pytorch_model.bin")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def weights_named_by_the_configuration(folder: Path, marker: Path) -> None:
    plant_pickles(folder, marker)
    edit_json(folder / "config.json", transformers_weights="adapter_model.bin")


def adapter(folder: Path, marker: Path) -> None:
    plant_pickles(folder, marker)
    config = {"peft_type": "LORA", "base_model_name_or_path": str(folder), "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def distributed_checkpoint(folder: Path, marker: Path) -> None:
    """The format whose table of contents is a pickle."""
    for name in (".metadata", "__0_0.distcp", "shard-00001-model-00001-of-00001.safetensors"):
        (folder / name).write_bytes(pickle.dumps(Hostile(marker)))


@pytest.mark.parametrize(
    "plant",
    [
        plant_pickles,
        index_of_honest_pickles,
        weights_named_by_the_configuration,
        adapter,
        distributed_checkpoint,
    ],
)
def test_pickles_do_not_take_the_place_of_weights(plant, run, commands, model, tmp_path, marker):
    plant(model, marker)
    (model / "model.safetensors").unlink()
    arguments = commands["train_policy.py"]
    line = error_of(run("train_policy.py", *arguments, folder=tmp_path / "here", may_open=True))
    assert ("safetensors" in line or "has adapters" in line) and str(model) in line
    assert not marker.exists() and not list((tmp_path / "here").iterdir())


REPLACED = {
    "base model": ["model.safetensors", "config.json", "tokenizer.json"],
    "reward model": ["model.safetensors", "reward_head.safetensors", "ppo_rlhf.json", "config.json"],
    "policy": ["model.safetensors", "ppo_rlhf.json", "tokenizer.json"],
    "checkpoint": [
        "tensors.safetensors",
        "state.json",
        "../../meta.json",
        "../../metrics.csv",
        "../../samples.jsonl",
    ],
}


@pytest.mark.parametrize(("what", "file"), [(what, file) for what, files in REPLACED.items() for file in files])
def test_a_pickle_does_not_take_the_place_of_a_file(what, file, run, commands, places, work, tmp_path, marker):
    """Under its name, with a checksum that fits."""
    folder, script, here = places[what], "sample.py" if what == "policy" else "train_policy.py", tmp_path / "here"
    (folder / file).write_bytes(torch_pickled(marker))
    if what == "checkpoint":
        here, commands[script] = work, ["--resume", str(folder.parents[1])]
        if file == "tensors.safetensors":
            refusals.seal(folder)
    line = error_of(run(script, *commands[script], folder=here))
    assert str(folder.parents[1] if what == "checkpoint" else folder) in line and not marker.exists()


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


SCRIPTS_THAT_READ = ["train_reward.py", "train_policy.py", "sample.py"]


@pytest.mark.parametrize("script", SCRIPTS_THAT_READ)
def test_code_beside_models_of_a_known_type_runs_only_if_it_is_trusted(
    script, run, commands, places, tmp_path, marker
):
    for what in ("base model", "reward model", "policy"):
        add_code(places[what], marker, KNOWN)
    here = tmp_path / "here"
    ended_well(run(script, *commands[script], folder=here))
    assert not marker.exists() and not list(here.rglob("*.py"))
    for saved in here.glob("models/*/policy/config.json"):
        assert json.loads(saved.read_text())["architectures"] == ["GPT2LMHeadModel"]
    ended_well(run(script, *commands[script], "--trust_remote_code", folder=tmp_path / "trusted"))
    assert marker.exists()


EACH_READING = [*((script, "base model") for script in SCRIPTS_THAT_READ), ("train_policy.py", "reward model")]
EACH_READING += [("sample.py", "reward model"), ("sample.py", "policy")]


@pytest.mark.parametrize(("script", "what"), EACH_READING)
def test_a_model_that_needs_its_own_code_is_refused_unless_it_is_trusted(
    script, what, run, commands, places, tmp_path, marker
):
    add_code(places[what], marker, UNKNOWN)
    here = tmp_path / "here"
    line = error_of(run(script, *commands[script], folder=here))
    assert not marker.exists() and not list(here.iterdir())
    assert str(places[what]) in line and "--trust_remote_code" in line
    ended_well(run(script, *commands[script], "--trust_remote_code", folder=here))
    assert marker.exists()


def test_a_configuration_does_not_fetch_code_for_attention(run, commands, model, tmp_path):
    edit_json(model / "config.json", attn_implementation="kernels-community/flash-attn3")
    line = error_of(run("train_policy.py", *commands["train_policy.py"], folder=tmp_path / "here"))
    assert str(model) in line and "--trust_remote_code" in line


def test_a_policy_does_not_choose_code_to_run(run, places, marker):
    """Its ppo_rlhf.json names scoring functions, and somebody samples from it in the folder that it came in."""
    policy = places["policy"]
    module = (
        f"open({str(marker)!r}, 'w').close()\ndef score(queries, responses):\n    return [0.0] * len(responses)\n"
    )
    (policy / "scores.py").write_text(module)
    edit_json(policy / "ppo_rlhf.json", monitor="scores:score")
    assert "scores:score" in error_of(run("sample.py", "--policy", ".", "--n", "2", folder=policy))
    assert not marker.exists()


# ---- Libraries and secrets -------------------------------------------------------------------------------------

NOT_INSTALLED = """
    attr backports bottleneck brotli cloudpickle colorama cupy deepspeed flash_attn flax h2 hqq jax kernels librosa
    lz4 mlflow mistral_common numexpr onnx optuna peft pynvml pytz scipy sentencepiece sitecustomize sklearn snappy
    soundfile tabulate tensorboardX tensorflow tensorrt tiktoken torchao torchaudio torchvision torch_npu torch_xla
    trio triton usercustomize winreg xarray zstandard
"""


def plant_namesakes(folder: Path) -> None:
    """Modules with the names of all libraries, also of those that a library would use if it were installed."""
    # A namespace package such as nvidia, which torch's CUDA build brings, may be listed as nvidia/cusparselt.
    installed = {name.partition("/")[0] for name in importlib.metadata.packages_distributions()}
    for name in {*sys.stdlib_module_names, *installed, *NOT_INSTALLED.split()}:
        code = f"open({name + '.imported'!r}, 'w').close()\nraise ImportError({name!r})\n"
        (folder / f"{name}.py").write_text(code)


SECRETS = {
    "HF_TOKEN": "hf_EnvironmentTokenOfTheHub0123456789ab",
    "HUGGING_FACE_HUB_TOKEN": "hf_OlderNameOfTheTokenOfTheHub987654321",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "token file": "hf_TokenInTheFileUnderTheHome0123456789",
    "netrc": "fedcba9876543210fedcba9876543210fedcba98",
    "git remote": "ghp_TokenInTheAddressOfTheGitRemote01234",
    "uncommitted change": "sk-SecretInAChangeThatIsNotCommitted0123",
}


def forms(secret: str) -> list[bytes]:
    """How a secret may look in a file: as it is, and in base64 at any offset."""
    encoded = [base64.b64encode(b"?" * offset + secret.encode())[4 * (offset > 0) :] for offset in range(3)]
    return [secret.encode(), *(code.rstrip(b"=")[:-1] for code in encoded)]


def secrets_in(contents: Iterable[bytes]) -> set[str]:
    said = b"\n".join(contents)
    return {name for name, secret in SECRETS.items() if any(form in said for form in forms(secret))}


def contents_of(folder: Path) -> dict[Path, bytes]:
    """Names and contents of all files."""
    return {path: str(path).encode() + path.read_bytes() for path in folder.rglob("*") if path.is_file()}


SOURCES = (".py", ".patch", ".diff", ".ipynb")


def leave_secrets(work: Path, home: Path) -> dict[str, str]:
    """Leave secrets where they usually lie: in files under the home, in a checkout, and in the environment."""
    (home / "hub").mkdir(parents=True)
    (home / "hub" / "token").write_text(SECRETS["token file"])
    (home / ".netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {SECRETS['netrc']}\n")
    (home / ".netrc").chmod(0o600)
    (work / "notes.txt").write_text("nothing\n")
    author = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
    remote = f"https://user:{SECRETS['git remote']}@example.com/user/project.git"
    environment = os.environ | OFFLINE | {"HOME": str(home), "HF_HOME": str(home / "hub")}
    # The tracker would save the file as the program's code.
    environment |= {"WANDB_SAVE_CODE": "true", "WANDB_PROGRAM": f"{work}/notes.txt"}
    environment |= {name: secret for name, secret in SECRETS.items() if name.isupper()}
    commit = [["init"], ["remote", "add", "origin", remote], ["add", "notes.txt"], [*author, "commit", "-m", "A"]]
    for words in commit:
        subprocess.run(["git", *words], cwd=work, env=environment, check=True, capture_output=True)
    (work / "notes.txt").write_text(SECRETS["uncommitted change"])
    return environment


# Runs a script in which whatever unpickles ends the process, from the first import on.
WITHOUT_PICKLES = """
import pickle, runpy, sys

def forbidden(event, arguments):
    if event == "pickle.find_class":
        raise SystemExit(f"{arguments} is unpickled")

sys.addaudithook(forbidden)
sys.argv = sys.argv[1:]
sys.path[0] = sys.argv[0].rpartition("/")[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_tracked_run_imports_nothing_from_the_current_folder_and_leaves_no_secret(tiny_world, tmp_path):
    """Of train_both with Weights & Biases; it unpickles nothing and saves no source code either."""
    here, driver = tmp_path / "here", tmp_path / "driver.py"
    here.mkdir()
    plant_namesakes(here)
    driver.write_text(WITHOUT_PICKLES)
    environment = leave_secrets(here, tmp_path / "home")
    there = contents_of(tmp_path)
    assert secrets_in(there.values()) == SECRETS.keys() - environment.keys()  # those that are in files are found
    words = [sys.executable, driver, SCRIPTS / "train_both.py", *both_arguments(tiny_world)]
    words += ["--reward.num_train", "8", "--policy.ppo.total_episodes", "16", "--reward.track", "--policy.track"]
    options = {"cwd": here, "env": environment, "stdin": subprocess.DEVNULL, "timeout": 600}  # nobody ever answers it
    ran = subprocess.run(words, text=True, capture_output=True, **options)
    assert sorted(path.stem for path in here.glob("*.imported")) == []
    ended_well(Result(ran.returncode, ran.stdout, ran.stderr))
    assert len(list(here.glob("runs/*/events.out.tfevents.*"))) == 2
    written = {path: content for path, content in contents_of(tmp_path).items() if path not in there}
    assert sum(path.suffix == ".wandb" for path in written) == 2
    assert not secrets_in([*written.values(), ran.stdout.encode(), ran.stderr.encode()])
    assert not [path for path in written if path.suffix in SOURCES or b"\ndef train(" in written[path]]


def test_a_message_shows_no_password(capsys):
    """In the address of a mirror of the hub."""

    def refused() -> None:
        raise train_policy.InputError(f"no answer from https://user:{SECRETS['git remote']}@mirror.test/owner/name")

    with pytest.raises(SystemExit, match="2"):
        train_policy.run_script(refused)
    assert capsys.readouterr().err == "error: no answer from https://mirror.test/owner/name\n"
