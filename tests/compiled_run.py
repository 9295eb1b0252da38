"""train_policy.py with --compile, without the minutes of a C++ compiler: graphs are traced, and run as they are.

`graphs` in the current folder holds how many were traced.
"""

from pathlib import Path

import torch
from torch._dynamo.backends.debugging import aot_eager

from ppo_rlhf import train_policy
from ppo_rlhf.lib import command_line, errors

compile_module = torch.nn.Module.compile
graphs = 0


def traced(graph, inputs):
    global graphs
    graphs += 1
    return aot_eager(graph, inputs)


torch.nn.Module.compile = lambda module, **options: compile_module(module, backend=traced, **options)
errors.run_script(lambda: train_policy.train(command_line.parse_args(train_policy.PRESETS)))
Path("graphs").write_text(str(graphs))
