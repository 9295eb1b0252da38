"""Steps of PPO in a loop, each process with its share of the queries; the first one writes the metrics.

The last batch is broken on one process.
"""

import json
import math
import sys

import torch

from ppo_rlhf.loop import PPO
from ppo_rlhf.train_policy import InputError

model, out = sys.argv[1:]
torch.set_num_threads(1)
sizes = {"response_length": 8, "nminibatches": 2, "noptepochs": 2}
ppo = PPO(model, dtype="float64", lr=1e-3, kl_coef=0.2, kl_target=0.03, kl_horizon=100, **sizes)
rank, count = ppo.accelerator.process_index, ppo.accelerator.num_processes
texts = [f"Mara {verb} the old miller" for verb in ("helped", "saw", "met", "thanked")] * 2
answers = ["He left.", "She", "The bell rang twice.", "Then", "No", "Yes.", "No", "A"]  # one half has the longest
share = slice(rank * len(texts) // count, (rank + 1) * len(texts) // count)
rows = []
for step in range(4):
    batch = ppo.batch(texts[share], answers[share]) if step % 2 == 0 else ppo.generate(texts[share])
    if step == 3 and rank == count - 1:
        batch.rollout.values[-1, 0] = math.nan
    try:
        row = ppo.step(batch, [float(response.count("e")) for response in batch.responses])
    except InputError as error:
        row = {"error": str(error)}
    rows.append(row | {"kl_coef": ppo.controller.value})
if rank == 0:
    with open(out, "w") as file:
        json.dump(rows, file)
