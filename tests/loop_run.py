"""Two steps of PPO in a loop, each process with its share of the queries; the first one writes the metrics."""

import json
import sys

import torch

from ppo_rlhf.loop import PPO

model, out = sys.argv[1:]
torch.set_num_threads(1)
ppo = PPO(model, dtype="float64", lr=1e-3, response_length=8, nminibatches=2, noptepochs=2, kl_coef=0.2)
rank, count = ppo.accelerator.process_index, ppo.accelerator.num_processes
texts = [f"Mara {verb} the old miller" for verb in ("helped", "saw", "met", "thanked")] * 2
share = len(texts) // count
rows = []
for _ in range(2):
    batch = ppo.generate(texts[rank * share : (rank + 1) * share])
    rows.append(ppo.step(batch, [float(response.count("e")) for response in batch.responses]))
if rank == 0:
    with open(out, "w") as file:
        json.dump(rows, file)
