"""python sharded_run.py <script> <arguments>: a script of chapter 2, keeping what sharding makes of its networks.

`sharding/<rank>.json` has a row for each network that was given to `processes.shard`: how many parts of it FSDP
wraps, and which share of its numbers this process keeps.
"""

import json
import os
import runpy
import sys
from pathlib import Path

from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ppo_rlhf.lib import processes

shard = processes.shard
seen: list[dict[str, float]] = []


def recorded_shard(model, *arguments):
    shard(model, *arguments)
    kept = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
    parts = sum(isinstance(module, FSDPModule) for module in model.modules())
    seen.append({"parts": parts, "share": kept / sum(p.numel() for p in model.parameters())})


processes.shard = recorded_shard
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
folder = Path("sharding")
folder.mkdir(exist_ok=True)
(folder / f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(seen))
