"""Resolve what the README's commands install, for every promised system and Python, from the plain package index.

    python .ci/resolve.py             # needs uv, and a network; downloads metadata only

A package may be built from source only if it is pure Python, so no compiler is ever needed. Local wheels and other
indexes are ignored, because a reader doesn't have them. Prints one line per combination; exits with 1 if one fails.
"""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parent.parent
SYSTEMS = ["x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "aarch64-apple-darwin", "x86_64-pc-windows-msvc"]
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
# Those of `make test`. As all versions are pinned, `make demo`, which installs fewer, resolves as well.
EXTRAS = ["math", "async", "real", "judge", "dev", "benchmark"]
PURE_PYTHON = ["rouge-score", "rliable", "expt"]  # published as source alone, without anything to compile


def resolve(system: str, python: str, constraints: Path) -> str:
    """The error, or an empty text."""
    command = ["uv", "pip", "compile", "--quiet", "--no-config", "--constraint", str(constraints)]
    command += ["--python-platform", system, "--python-version", python, "--only-binary", ":all:"]
    command += [word for name in PURE_PYTHON for word in ("--no-binary", name)]
    command += [word for extra in EXTRAS for word in ("--extra", extra)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    environment["MACOSX_DEPLOYMENT_TARGET"] = "14.0"  # the oldest macOS that torch has wheels for
    result = subprocess.run([*command, "pyproject.toml"], cwd=ROOT, env=environment, capture_output=True, text=True)
    return result.stderr.strip() if result.returncode else ""


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        printed = subprocess.run([sys.executable, ROOT / ".ci/constraints.py"], check=True, capture_output=True)
        constraints.write_bytes(printed.stdout)
        combinations = list(product(SYSTEMS, PYTHONS))
        with ThreadPoolExecutor(8) as pool:  # they mostly wait for the network
            errors = list(pool.map(lambda combination: resolve(*combination, constraints), combinations))
    for (system, python), error in zip(combinations, errors, strict=True):
        print(f"Python {python}, {system}: {error or 'resolves'}")
    return int(any(errors))


if __name__ == "__main__":
    sys.exit(main())
