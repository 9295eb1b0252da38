"""Steps of PPO in a loop, each process with its share of the queries; the first one writes the metrics.

Each kind of critic gets its own loop. The last batch of the first is broken on one process.
"""

import json
import math
import sys
from pathlib import Path

import torch

from ppo_rlhf.loop import PPO
from ppo_rlhf.train_policy import InputError

model, out = sys.argv[1:]
torch.set_num_threads(1)
ADAPTERS = {"rank": 2, "target_modules": "all-linear"}
KINDS = [{}, {"critic": "shared"}, {"lora": ADAPTERS}, {"critic": "shared", "lora": ADAPTERS}]
SIZES = {"response_length": 8, "nminibatches": 2, "noptepochs": 2}
texts = [f"Mara {verb} the old miller" for verb in ("helped", "saw", "met", "thanked")] * 2
answers = ["He left.", "She", "The bell rang twice.", "Then", "No", "Yes.", "No", "A"]  # one half has the longest
lengths = [8, 3, 5, 1, 9, 2, 4, 4]
rows = []
for kind in KINDS:
    ppo = PPO(model, dtype="float64", lr=1e-3, kl_coef=0.2, kl_target=0.03, kl_horizon=100, **SIZES, **kind)
    rank, count = ppo.accelerator.process_index, ppo.accelerator.num_processes
    share = slice(rank * len(texts) // count, (rank + 1) * len(texts) // count)
    for step in range(2 if kind else 4):
        if step % 2 == 0:
            batch = ppo.batch(texts[share], answers[share])
        else:
            batch = ppo.generate(texts[share], lengths[share] if step == 1 else None)
        if step == 3 and rank == count - 1:
            batch.rollout.values[-1, 0] = math.nan
        scores = [float(response.count("e")) for response in batch.responses]
        rewards = [[(0, 0.5)] * (len(ids) > 2) for ids in batch.response_ids] if step == 1 else None
        try:
            row = ppo.step(batch, scores, rewards)
        except InputError as error:
            row = {"error": str(error)}
        rows.append(row | {"kl_coef": ppo.controller.value, "kind": str(kind)})
    if kind:
        ppo.save(Path(out).parent / "mine")
        assert (Path(out).parent / "mine/critic/ppo_rlhf.json").is_file()  # every process finds it
if rank == 0:
    with open(out, "w") as file:
        json.dump(rows, file)
