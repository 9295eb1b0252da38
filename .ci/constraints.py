"""Print the versions of poetry.lock as a constraints file for pip.

So a plain `pip install -c` gives everybody the versions that were tested, without poetry. The CUDA packages are left
out, because torch itself pins the versions that it was built with.
"""

import re
import sys
from collections import Counter
from pathlib import Path

if not (3, 11) <= sys.version_info < (3, 15):
    found = ".".join(map(str, sys.version_info[:2]))
    sys.exit(f"this is Python {found}; ppo_rlhf needs 3.11 to 3.14: name one, as in `make demo PYTHON=python3.13`")

import tomllib

PINNED_BY_TORCH = re.compile("nvidia-|cuda-|triton")

lock = tomllib.loads((Path(__file__).parent.parent / "poetry.lock").read_text())
packages = [package for package in lock["package"] if not PINNED_BY_TORCH.match(package["name"])]
versions = Counter(package["name"] for package in packages)
for package in packages:
    # Markers tell apart the versions that a package has for several Pythons. pip knows nothing of extras here.
    marker = re.sub(r' and extra == "[^"]*"', "", f" ; {package['markers']}") if versions[package["name"]] > 1 else ""
    print(f"{package['name']}=={package['version']}{marker}")
