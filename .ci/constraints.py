"""Print the versions of poetry.lock as a constraints file for pip.

So a plain `pip install -c` gives everybody the versions that were tested, without poetry.
"""

import re
import tomllib
from collections import Counter
from pathlib import Path

lock = tomllib.loads((Path(__file__).parent.parent / "poetry.lock").read_text())
versions = Counter(package["name"] for package in lock["package"])
for package in lock["package"]:
    # Markers tell apart the versions that a package has for several Pythons; elsewhere they are not needed, and of an
    # extra pip knows nothing here.
    marker = re.sub(r' and extra == "[^"]*"', "", f" ; {package['markers']}") if versions[package["name"]] > 1 else ""
    print(f"{package['name']}=={package['version']}{marker}")
