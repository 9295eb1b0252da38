"""Memory of a loop of one's own with each kind of critic: measured with a small model, computed for one of 7B.

    python benchmark/cost/loop_memory.py smollm2-135m       # each kind in a process of its own, for minutes

Writes benchmark/results/loop_memory.json. Computed are weights, gradients and Adam's moments: 16 bytes for each
weight that learns, and 4 for each that doesn't, or 2 in bfloat16. Measured is the peak of two optimiser steps, with
loading and activations, less what a process without a model takes.
"""

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from ppo_rlhf.loop import PPO
from ppo_rlhf.train_policy import commit, find, write_json

RESULTS = Path(__file__).resolve().parents[1] / "results/loop_memory.json"
LORA = {"lora": {"rank": 16, "target_modules": "all-linear"}, "frozen_bfloat16": True, "dtype": "bfloat16"}
KINDS: dict[str, dict[str, Any]] = {
    "separate": {},
    "shared": {"critic": "shared"},
    "adapters": LORA,
    "shared with adapters": {"critic": "shared", **LORA},
}
LLAMA_7B = LlamaConfig()  # its defaults are those of Llama 2 7B


def computed(config: Any) -> dict[str, float]:
    """Gigabytes of each kind with a model of this configuration, which takes no memory here."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
        weights, trunk = (sum(x.numel() for x in part.parameters()) for part in (lm, lm.base_model))
        adapted = get_peft_model(lm, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    adapter, head = sum(x.numel() for x in adapted.parameters() if x.requires_grad), config.hidden_size + 1
    learning = {
        "separate": weights + trunk + head,
        "shared": weights + head,
        "adapters": 2 * adapter + head,
        "shared with adapters": adapter + head,
    }
    frozen = {kind: 2 if "adapters" in kind else 4 for kind in KINDS}  # bytes of each of the reference's
    return {kind: (16 * learning[kind] + frozen[kind] * weights) / 1e9 for kind in KINDS}


def peak(model: str, kind: str) -> float:
    """Gigabytes that this process has taken at most; an empty kind has no model."""
    torch.set_num_threads(1)
    if kind:
        ppo = PPO(model, response_length=24, noptepochs=2, local_micro_batch_size=1, **KINDS[kind])
        ppo.step(ppo.generate(["The movie was", "I had hoped that"]), [1.0, -1.0])
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def measured(model: str, kind: str) -> float:
    command = [sys.executable, __file__, model, kind]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main(model: str) -> None:
    small, large = computed(AutoConfig.from_pretrained(find(model) or model)), computed(LLAMA_7B)
    without = 0.0 if torch.cuda.is_available() else measured(model, "")
    rows = {}
    for kind in KINDS:
        rows[kind] = {"computed": small[kind], "measured": measured(model, kind) - without, "of 7B": large[kind]}
        print(kind, json.dumps(rows[kind]), flush=True)
    write_json(RESULTS, {"model": model, "commit": commit(), "gigabytes": rows})


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(peak(*sys.argv[1:]))
    else:
        main(sys.argv[1])
