"""python device_run.py <script> <arguments>: runs a script of ppo_rlhf/ on the stand-in for a GPU.

Rows are divided into passes as on the CPU, so that sums have the same order. `counts.json` in the current folder gets
what was counted in each update: see tests/stand_in.py. Asynchronous workers are threads of this process and use the
device, too. Environment: AUTOCAST says whose rules autocast has, cuda or cpu; with FLOAT64=no, the device has no
float64; with STAND_IN=no, everything is on the CPU.
"""

import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import stand_in

from ppo_rlhf.tldr import packing


class Method:
    def __init__(self, function):
        self.function = function

    def remote(self, *arguments, **options):
        with stand_in.checked():
            return self.function(*arguments, **options)


class Actor:
    def __init__(self, *arguments):
        with stand_in.checked():
            self.engine = self.kind(*arguments)

    def __getattr__(self, name):
        return Method(getattr(self.engine, name))


def actor_class(**_):
    """As ray.remote: the function makes a class whose `remote` starts an actor."""
    return lambda kind: SimpleNamespace(remote=type("", (Actor,), {"kind": kind}))


class Never(Exception):
    """Stands for the errors of workers that are lost."""


RAY = SimpleNamespace(
    is_initialized=lambda: True,
    cluster_resources=dict,
    remote=actor_class,
    put=lambda x: x,
    get=lambda x: x,
    exceptions=SimpleNamespace(RayError=Never, RayTaskError=Never),
)


if __name__ == "__main__":
    if os.environ.get("STAND_IN") != "no":
        stand_in.install(autocast=os.environ.get("AUTOCAST", "cuda"), float64=os.environ.get("FLOAT64") != "no")
    for costs in (packing.COST_OF_PASS, packing.COST_OF_GROUP):
        costs["cuda"] = costs["cpu"]
    sys.modules["ray"] = RAY
    sys.argv = sys.argv[1:]
    with stand_in.count_updates() as updates:
        runpy.run_path(sys.argv[0], run_name="__main__")
    stand_in.save(Path("counts.json"), updates)
