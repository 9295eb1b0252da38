"""Hold functions of other libraries against the numbers of `python -m ppo_rlhf.check`, each in its own environment.

    python benchmark/interoperability/others.py                       # all; makes the environments first
    python benchmark/interoperability/others.py --only verl_0_9_1     # one adapter of others/

It writes a file for each adapter to benchmark/results/others and prints the tables of its README.
"""

import json
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path

import tyro

from ppo_rlhf.lib import run

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmark/results/others"
ADAPTERS = Path(__file__).parent / "others"
TRANSFORMERS = f"transformers=={version('transformers')}"
# OpenRLHF and verl ask for packages that need a GPU; so they are installed alone, with what their functions import.
ALONE = ["packaging", "tqdm", "ray==2.55.0", "accelerate", "datasets"]
VERL = ["tensordict", "omegaconf", "hydra-core", "codetiming", "pandas", "peft", "orjson", "pybase64"]
OPENRLHF = ["transformers==5.15.0", "einops", "pylatexenc", "sympy"]
PACKAGES = {  # of each adapter: the library, and what else
    "trl_1_12_ppo": ("trl==1.12.0", [TRANSFORMERS], True),
    "trl_1_16_grpo": ("trl==1.16.0", [TRANSFORMERS], True),
    "trl_1_16_rloo": ("trl==1.16.0", [TRANSFORMERS], True),
    "verl_0_9_1": ("verl==0.9.1", [*ALONE, TRANSFORMERS, *VERL], False),
    "openrlhf_0_11_2": ("openrlhf==0.11.2", [*ALONE, *OPENRLHF], False),
}


@dataclass
class Args:
    only: list[str] = field(default_factory=lambda: list(PACKAGES))
    """adapters to run"""
    folder: Path = Path("runs")
    """where the environments are made"""


def environment(adapter: str, folder: Path) -> Path:
    """The interpreter of an environment with a library, made once."""
    library, others, with_dependencies = PACKAGES[adapter]
    place = folder / f"others-{library}"
    python = place / "bin/python"
    if not (place / "installed").exists():
        venv.create(place, with_pip=True, clear=True)
        install = [python, "-m", "pip", "install", "--quiet"]
        torch = f"torch=={version('torch').split('+')[0]}"
        subprocess.run([*install, torch, "numpy"], check=True)
        subprocess.run([*install, torch, *others], check=True)
        subprocess.run([*install, *([] if with_dependencies else ["--no-deps"]), library], check=True)
        (place / "installed").touch()
    return python


def checked(adapter: str, python: Path) -> dict:
    """What the command says of an adapter, with the versions."""
    path = ADAPTERS / f"{adapter}.py"
    command = [sys.executable, "-m", "ppo_rlhf.check", path, "--json", "--python", python.absolute()]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1):
        sys.exit(f"{path} could not be checked")
    asked = "import torch, transformers; print(torch.__version__, transformers.__version__)"
    versions = subprocess.run([python, "-c", asked], stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    found = {"library": PACKAGES[adapter][0], "date": date.today().isoformat(), "commit": run.commit()}
    found |= dict(zip(("torch", "transformers"), versions, strict=True))
    return found | {"functions": json.loads(done.stdout)["functions"]}


def finding(function: dict) -> str:
    """What the command says about a function in few words, with links to the register."""
    if function["ok"]:
        return ""
    if not function["diagnoses"]:
        return "no known fault has these numbers"
    names = [
        f"{fault['name']} [{fault['mark']}](../../../{fault['page']}){' (a choice)' if fault['choice'] else ''}"
        for fault in function["diagnoses"][0]
    ]
    return " and ".join(names)


def table(found: dict) -> str:
    """Markdown: a row for each function that was compared."""
    lines = ["| function | cases | match | what differs |", "|---|---|---|---|"]
    for function in found["functions"]:
        cells = (f"`{function['function']}`", function["cases"], function["matches"], finding(function))
        lines.append(f"| {' | '.join(map(str, cells))} |".replace("|  |", "| |"))
    return "\n".join(lines)


def main(args: Args) -> None:
    RESULTS.mkdir(exist_ok=True)
    for adapter in args.only:
        found = checked(adapter, environment(adapter, args.folder))
        (RESULTS / f"{adapter}.json").write_text(json.dumps(found, indent=1) + "\n")
        print(f"{adapter}, {found['date']}\n\n{table(found)}\n", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
