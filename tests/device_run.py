"""python device_run.py <script> <arguments>: runs a script of ppo_rlhf/ on the stand-in for a GPU.

Rows are divided into passes as on the CPU, so that sums have the same order. `counts.json` in the current folder gets
what was counted in each update: see benchmark/cost/stand_in.py. AUTOCAST in the environment says whose rules autocast has: cuda or cpu.
"""

import os
import runpy
import sys
from pathlib import Path

from benchmark.cost import stand_in
from ppo_rlhf.lib import packing, passes

stand_in.install(autocast=os.environ.get("AUTOCAST", "cuda"))
for costs in (passes.COST_OF_WEIGHTS, passes.COST_OF_LAUNCHES, packing.COST_OF_GROUP):
    costs["cuda"] = costs["cpu"]
sys.argv = sys.argv[1:]
with stand_in.count_updates() as updates:
    runpy.run_path(sys.argv[0], run_name="__main__")
stand_in.save(Path("counts.json"), updates)
