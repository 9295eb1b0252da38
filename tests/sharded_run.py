"""python sharded_run.py <script> <arguments>: a script of chapter 2, keeping what sharding makes of its networks.

`sharding/<rank>.json` has a row for each network that was given to `models.place`: how many parts of it FSDP wraps,
which share of its numbers this process keeps, and the precisions of its weights. No process may read a whole network.
With LEAST_WIDTH, networks that are so wide read no padding; `passes-<rank>.json` has how many of their passes
sampled, trained, and did neither.
"""

import json
import os
import runpy
import sys
from collections import Counter
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ppo_rlhf.tldr import models, packing

place = models.place
seen: list[dict] = []


def recorded_place(network, accelerator):
    place(network, accelerator)
    weights = list(network.parameters())
    kept = sum((weight.to_local() if isinstance(weight, DTensor) else weight).numel() for weight in weights)
    parts = sum(isinstance(module, FSDPModule) for module in network.modules())
    dtypes = sorted({str(weight.dtype) for weight in weights if weight.dim() > 1})
    seen.append({"parts": parts, "share": kept / sum(weight.numel() for weight in weights), "dtypes": dtypes})


def refuse(*_):
    raise AssertionError("a whole network")


def counted_read(lm_backbone, input_ids, position_ids, mask, cache=None, *shared):
    passes["sampled" if cache is not None else "trained" if torch.is_grad_enabled() else "scored"] += 1
    return read(lm_backbone, input_ids, position_ids, mask, cache, *shared)


packing.LEAST_WIDTH = int(os.environ.get("LEAST_WIDTH", packing.LEAST_WIDTH))
passes, read, packing.read = Counter(), packing.read, counted_read
models.place = recorded_place
if os.environ.get("ACCELERATE_USE_FSDP") == "true":
    models.read_whole = refuse
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
folder = Path("sharding")
folder.mkdir(exist_ok=True)
(folder / f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(seen))
(folder / f"passes-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(passes))
