"""train_policy.py with --compile, without the minutes of a C++ compiler: graphs are traced, and run as they are.

`graphs` in the current folder holds how many were traced.
"""

from pathlib import Path

import torch
from torch._dynamo.backends.debugging import aot_eager

from ppo_rlhf.train_policy import PRESETS, parse_args, run_script, train

compile_module = torch.nn.Module.compile
graphs = 0


def traced(graph, inputs):
    global graphs
    graphs += 1
    return aot_eager(graph, inputs)


torch.nn.Module.compile = lambda module, **options: compile_module(module, backend=traced, **options)
run_script(lambda: train(parse_args(PRESETS)))
Path("graphs").write_text(str(graphs))
