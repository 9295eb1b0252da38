"""How many tokens a pass may have, so that a process stays within its memory.

A pass is one call of a model. `limit_passes` finds out, before training, how many bytes are left for a pass beside
weights, gradients and Adam's moments. `tokens_that_fit` says how many tokens that is. The limit decides how rows are
divided among passes, never what is computed.

In the forward pass of training, a layer of Llama keeps for each token, with h the width of the model, q that of all
heads together and i that of the MLP:

    4 h    of each of the two norms, the input and the input divided by its root mean square
    2 h    what the norms return, once; in mixed precision, each of the five products makes a copy for itself: 5 h
    5 q    queries, keys and values of all heads, what attention returns, and the same as input of the next product
    4 i    gate, activated gate, what the gate is multiplied with, and the result

Norms of queries and keys (Qwen3) come on top. GPT-2 keeps a tenth more, because of its activation function, and
GPT-NeoX a third less. The backward pass of a layer needs about as much again while it runs. Without gradients, a
layer's numbers are freed when the next layer runs. On a CPU, the process was measured to grow by a sixth more than
that: 1.72 MiB for each token of 30 layers with h = q = 576 and i = 1536 in float32, where the formula has 1.48.
"""

import contextlib
import math
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from ppo_rlhf.lib.base import errors
from ppo_rlhf.lib.base.errors import InputError, flag

Use = Literal["training", "reading", "sampling"]  # a pass with gradients, one without, and keys and values to sample

GIB = 2**30
SHARE = 0.8  # of the memory that is free, for all that a process will take
LEAST = GIB  # bytes that a pass may always have, unless --max_memory says otherwise
MOST_LOGITS = 2**28  # numbers that are held at a time: in float32, a gigabyte
COPIES_OF_LOGITS = 3  # such as log-probs and their gradients
GAPS = 1.2  # memory that is taken for each byte of a layer's numbers: what is freed leaves gaps

budget = math.inf  # bytes of a pass; set by limit_passes


# ---- What a pass holds -----------------------------------------------------------------------------------------


def bytes_per_token(
    config: PreTrainedConfig, use: Use, *, wide: int = 4, narrow: int = 4, checkpointed: bool = False
) -> int:
    """Bytes that a pass holds for each token, without logits.

    wide, narrow: bytes of a number outside and inside of matrix products, 4 and 2 if these are in bfloat16.
    checkpointed: whether layers keep only their inputs for the backward pass. Returns 0 if the config lacks a size.
    """

    def size(name: str, otherwise: int = 0) -> int:
        value = getattr(config, name, None)
        return value if isinstance(value, int) else otherwise

    h, heads, layers = size("hidden_size"), size("num_attention_heads"), size("num_hidden_layers")
    if not (h and heads and layers):
        return 0
    head, i = size("head_dim", h // heads), size("intermediate_size", 4 * h)
    q, kv = heads * head, size("num_key_value_heads", heads) * head
    layer = 4 * h * wide + ((2 if wide == narrow else 5) * h + 5 * q + 4 * i) * narrow
    if config.model_type == "qwen3":  # norms of queries and keys
        layer += (q + kv) * (wide + narrow)
    if use == "training":
        # An input that stays among numbers that are freed was measured to take four times its size.
        return 4 * layers * h * wide + 2 * layer if checkpointed else (layers + 1) * layer
    cache = 2 * layers * kv * narrow
    return cache if use == "sampling" else cache + layer


def pass_bytes(model: nn.Module, tokens: int, use: Use) -> int:
    """Bytes that a pass of a model with so many tokens holds; 0 if there is no language model in it."""
    per_token, logits = costs(model, use)
    return tokens * per_token + min(tokens * logits, COPIES_OF_LOGITS * 4 * MOST_LOGITS)


def tokens_that_fit(model: nn.Module, budget: float, use: Use) -> float:
    """How many tokens a pass of a model may have that holds so many bytes at most; at least 1.

    It is a power of two, so that a little more or less memory does not change how rows are divided.
    """
    per_token, logits = costs(model, use)
    if budget == math.inf or not per_token:
        return math.inf
    tokens = max(budget / (per_token + logits), (budget - COPIES_OF_LOGITS * 4 * MOST_LOGITS) / per_token)
    return 2 ** int(math.log2(max(tokens, 1)))


def costs(model: nn.Module, use: Use) -> tuple[int, int]:
    """Bytes that a pass of a model holds for each token: without logits, and of logits.

    A pass of training keeps the numbers of all language models in a network until its backward pass.
    """
    per_token, vocabulary = [0], 0
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part is part.base_model:
            weights = next(part.parameters())
            autocast = torch.is_autocast_enabled("cuda" if weights.is_cuda else "cpu")
            low_precision, wide = getattr(model, "low_precision", False) or autocast, weights.element_size()
            checkpointed = any(getattr(layer, "is_checkpointed", False) for layer in part.modules())
            sizes = {"wide": wide, "narrow": 2 if low_precision else wide, "checkpointed": checkpointed}
            per_token.append(bytes_per_token(part.config, use, **sizes))
        elif isinstance(part, PreTrainedModel) and part.get_output_embeddings() is not None and use != "sampling":
            vocabulary = max(vocabulary, part.config.vocab_size)
    numbers = sum(per_token) if use == "training" else max(per_token)
    return round(GAPS * numbers), COPIES_OF_LOGITS * 4 * vocabulary


# ---- What is left for a pass -----------------------------------------------------------------------------------


def limit_passes(
    args: Any, accelerator: Accelerator, network: nn.Module, *, rows: int, length: int, tokens: float = math.inf
) -> dict[str, int]:
    """Set the budget of all passes from here on; to be called once the networks are loaded, by every process.

    args: with max_memory and the sizes of a micro-batch. network: what learns. rows, length: of a minibatch of this
    process, at most. tokens: of that minibatch, if beginnings are shared. Returns, for the table of sizes, what the
    largest pass of training and the process are expected to take.
    """
    global budget
    knobs, device = getattr(args, "ppo", args), accelerator.device
    micro_batch = flag("ppo.local_micro_batch_size" if knobs is not args else "local_micro_batch_size")
    errors.how_to_need_less = f"a smaller {flag('max_memory')} or {micro_batch} needs less"
    sharing = gather_object([place_of(device)])  # all have loaded their networks
    held, coming = held_memory(device), states_to_come(network)
    if args.max_memory:
        room = args.max_memory * GIB - held - coming
        if room <= 0:
            least = (held + coming) / GIB
            raise InputError(
                f"{flag('max_memory')} is {args.max_memory:g} GiB, but weights, gradients and Adam's moments take "
                f"{least:.1f}; {flag('max_memory')} {math.ceil(least) + 1} may do"
            )
    else:
        free = free_memory(device) / sharing.count(place_of(device))
        if (room := SHARE * free - coming) < LEAST:
            errors.say_once(
                f"little memory is free: {free / GIB:.1f} GiB, and training takes {coming / GIB:.1f} before any pass"
            )
        room = max(room, LEAST)
    budget = min(gather_object([room]))  # the same on all processes, which divide alike
    tokens = min(tokens, min(knobs.local_micro_batch_size or rows, rows) * length)
    tokens = min(tokens, knobs.local_micro_batch_tokens or tokens, tokens_that_fit(network, budget, "training"))
    tokens = max(int(tokens), length)  # a row is never divided
    largest = pass_bytes(network, tokens, "training")
    mebibytes = {"largest_pass_mib": largest, "process_mib": held + coming + largest}
    return {"largest_pass_tokens": tokens} | {name: round(size / 2**20) for name, size in mebibytes.items()}


def rows_that_fit(
    args: Any,
    accelerator: Accelerator,
    network: nn.Module,
    *,
    frozen: Sequence[Any] = (),
    length: int,
    local_batch: int,
    local_rollout_batch: int = 0,
) -> dict[str, int]:
    """Chapter 1's sizes: rows of a micro-batch, rows of a pass without gradients, and what limit_passes returns.

    frozen: what else reads, models or functions; length: tokens of each row; local_batch: rows of a batch of this
    process; local_rollout_batch: rows of a pass without gradients, unless they don't fit; 0: those of the batch.
    """
    ppo = getattr(args, "ppo", args)
    minibatch = local_batch // getattr(ppo, "nminibatches", 1)
    limits = limit_passes(args, accelerator, network, rows=minibatch, length=length)
    readers = [network, *(model for model in frozen if isinstance(model, nn.Module))]
    fitting = max(1, min(tokens_that_fit(model, budget / 2, "reading") for model in readers) / length)
    sizes = {"local_micro_batch": limits["largest_pass_tokens"] // length}
    return (
        sizes
        | {
            "local_rollout_batch": int(
                min(ppo.local_rollout_batch_size or local_rollout_batch or local_batch, fitting)
            )
        }
        | limits
    )


def states_to_come(network: nn.Module) -> int:
    """Bytes that training will take in addition to the weights: gradients, Adam's two moments, and a gradient that
    is added to another one, at most that of the largest tensor."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    own = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in trained]
    sizes = [parameter.numel() * parameter.element_size() for parameter in own]
    return 3 * sum(sizes) + max(sizes, default=0)


def place_of(device: torch.device) -> tuple[str, str]:
    """A name of the memory that a process uses, which it may share with others."""
    on_gpu = device.type == "cuda"
    return platform.node(), str(torch.cuda.get_device_properties(device).uuid) if on_gpu else "cpu"


def held_memory(device: torch.device) -> int:
    """Bytes that this process holds."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return most_held()


def most_held() -> int:
    """The most bytes that this process has held so far: of its GPU, if it has used one."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    import resource  # not on every system

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def free_memory(device: torch.device) -> float:
    """Bytes that are free on a device, with those that PyTorch has taken but does not use."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return free_on_cpu(Path("/"))


def free_on_cpu(root: Path) -> float:
    """Bytes that processes may still take, on Linux by the kernel and the limits of containers.

    root: of the file system. On other systems, half of the memory there is.
    """
    with contextlib.suppress(OSError, KeyError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        kilobytes = {line.split(":")[0]: line.split()[1] for line in lines}
        return min([int(kilobytes["MemAvailable"]) * 1024, *room_in_cgroups(root)])
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
    return math.inf


# Of a control group: its limit, what it uses, and the part of that which the kernel can drop.
CGROUP_FILES = {2: ("memory.max", "memory.current", "inactive_file")}
CGROUP_FILES |= {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")}


def room_in_cgroups(root: Path) -> Iterator[int]:
    """Bytes that are left in each control group of this process that has a limit."""
    file = root / "proc/self/cgroup"
    for line in file.read_text().splitlines() if file.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        limit, usage, cache = CGROUP_FILES[1 if controllers else 2]
        folder = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        for part in ["", *Path(path).parts[1:]]:
            folder = folder / part
            with contextlib.suppress(OSError, ValueError, KeyError):  # ValueError: the limit is "max"
                most, used = (int((folder / name).read_text()) for name in (limit, usage))
                statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                yield most - used + int(statistics[cache])
