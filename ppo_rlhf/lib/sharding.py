"""Sharded networks (FSDP2): each process keeps a slice of every weight, gradient and Adam moment.

`processes.sharding()` says whether the launcher asks for them.
"""

import contextlib
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from accelerate import Accelerator
from safetensors import safe_open
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from ppo_rlhf.lib import errors, files, models, packing, processes
from ppo_rlhf.lib.errors import InputError


def place(network: nn.Module, accelerator: Accelerator) -> None:
    """Move a network to this process's device: the whole or, if the launcher asks for it, a slice of each weight.

    No process ever holds a whole sharded network: each reads its slices from the files.
    """
    if not processes.sharding():
        network.to(accelerator.device)
        return
    backbones = [part for part in network.modules() if isinstance(part, PreTrainedModel) and hasattr(part, "source")]
    for tensor in (*network.parameters(), *network.buffers()):
        if not tensor.is_meta:
            tensor.data = tensor.data.to(accelerator.device)
    shard(network, models.layers(network))
    for backbone in backbones:
        read_slices(backbone, accelerator.device)
    make_outermost(network)


@torch.no_grad()
def read_slices(model: PreTrainedModel, device: torch.device) -> None:
    """Give a sharded model on the meta device this process's slices of its weights, from safetensors."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    model.tie_weights()
    for name, buffer in buffers.items():
        model.get_buffer(name).copy_(buffer)
    prefix, finite = f"{model.base_model_prefix}.", True
    with models.model_errors(model.source) as (path, revision), contextlib.ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, "pt")) for file in files_with_weights(path, revision)]
        found = {key: file for file in opened for key in [*file.keys()]}
        for name, parameter in model.named_parameters():
            # A weight in reward_head.safetensors takes precedence: see save_reward_model. The other files may belong
            # to a model with or without a head, and GPT-NeoX's have an older name for the output layer.
            names = (f"lm_backbone.{name}", name, name.removeprefix(prefix), prefix + name)
            names += (name.replace("lm_head.", "embed_out."),)
            key = next((other for other in names if other in found), None)
            if key is None:
                raise OSError(f"its weights lack {name}")
            weight = found[key].get_slice(key)
            if weight.get_shape() != list(parameter.shape):
                there, wanted = tuple(weight.get_shape()), tuple(parameter.shape)
                raise OSError(f"its weights hold {name} of shape {there}, but config.json means {wanted}")
            copy_slice(weight, parameter)
            finite = finite and bool(parameter.to_local().isfinite().all())
    processes.fail_together("" if finite else f"{model.source}: its weights hold numbers that are not finite")


def files_with_weights(path: str, revision: str | None) -> list[Path]:
    """The safetensors of a model in a folder or on the hub. Raises an OSError if it has none."""
    from huggingface_hub import snapshot_download

    folder = Path(path)
    if not folder.is_dir():
        folder = Path(snapshot_download(path, revision=revision, allow_patterns=["model*.safetensors*"]))
    index = folder / "model.safetensors.index.json"
    names = set(files.read_json(index)["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    if not all((folder / name).is_file() for name in names):
        raise OSError("it cannot be loaded with `safetensors`: it has none")
    return [*(folder / name for name in sorted(names)), *folder.glob("reward_head.safetensors")]


def shard(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Shard a model over all processes. layers: the parts that are gathered one by one.

    With `fsdp_reshard_after_forward: false`, weights that learn stay whole between forward and backward pass. Only
    gradients and moments are sliced: ZeRO-2. A parameter that is a single number, such as a gain, stays whole, and it
    must not learn.
    """
    if os.environ.get("FSDP_VERSION", "2") != "2" or os.environ.get("FSDP_OFFLOAD_PARAMS", "false") == "true":
        raise InputError("of FSDP, version 2 without offloading is supported: benchmark/accelerate/fsdp2.yaml")
    # FSDP2 warns about in-place operations on the output of a module. No network here has any.
    warnings.filterwarnings("ignore", message=".* returned a view tensor", category=UserWarning)
    scalars = {parameter for parameter in model.parameters() if parameter.dim() == 0}  # cannot be sliced
    for module in [*layers, model]:
        fully_shard(module, reshard_after_forward=reshards_after_forward(model), ignored_params=scalars)


def reshards_after_forward(model: nn.Module) -> bool:
    """Whether weights are sliced again after a forward pass. Frozen weights are, because no backward pass follows."""
    learns = any(parameter.requires_grad for parameter in model.parameters())
    return not learns or os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "true"


def make_outermost(model: nn.Module) -> None:
    """Mark this model as the FSDP root. Otherwise whichever submodule runs first becomes the root."""
    model.begin = lambda: None
    register_fsdp_forward_method(model, "begin")
    model.begin()
    model.reshard()  # otherwise the weights that begin() gathered would stay whole forever


# ---- Gather the weights ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Within the block, parts of a sharded model may be called: all weights outside its layers are whole.

    Layers are gathered when they are called. After the block, all weights are sliced again.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    model.set_reshard_after_forward(False, recurse=False)
    model.unshard()
    yield
    model.set_reshard_after_forward(reshards_after_forward(model), recurse=False)
    reshard(model)


def reshard(model: nn.Module) -> None:
    """Keep only this process's slices of a sharded model."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def whole_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A whole copy of a sharded model in this precision, gathered weight by weight. Every process must call this."""
    with torch.device("meta"):
        whole = type(model)(model.config)
    for parameter in whole.parameters():
        parameter.data = parameter.data.to(dtype)
    whole.to_empty(device=model.device)
    whole.tie_weights()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in (*whole.named_parameters(), *whole.named_buffers()):
        tensor.copy_(full_tensor(tensors[name]))
    packing.prepare(whole)
    return whole.eval()


# ---- Slices and whole tensors ----------------------------------------------------------------------------------


def copy_slice(whole: Any, parameter: DTensor) -> None:
    """Copy this process's slice of a tensor into a sharded parameter. whole: anything that can be sliced."""
    local, mesh = parameter.to_local(), parameter.device_mesh
    first = mesh.get_local_rank() * math.ceil(parameter.shape[0] / mesh.size())
    if len(local):
        local.copy_(whole[first : first + len(local)])


def sliced_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The inverse of full_tensor: this process's slice of a tensor if `other` is sharded, else the tensor."""
    if isinstance(other, DTensor):
        return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements)
    return tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, from the slices of all processes. Every process must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state to save, with tied weights once.

    If the model is sharded, only the first process gets it. Every process must call this.
    """
    names = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    return {name: gather_for_saving(tensor) for name, tensor in model.state_dict().items() if name in names}


def gather_for_saving(tensor: torch.Tensor) -> torch.Tensor:
    """As full_tensor, but on the CPU of the first process, which saves.

    Of a sharded tensor, the others get the sum, which shows whether it is finite.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    whole = tensor.full_tensor()
    return (whole if errors.is_first_process() else whole.sum()).cpu()


def clip_gradients(optimizer: torch.optim.Optimizer, most: float) -> torch.Tensor:
    """Scale the gradients of an optimiser's parameters to a norm of at most `most`. Returns the norm before, 0-d."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return full_tensor(nn.utils.clip_grad_norm_(parameters, most))
