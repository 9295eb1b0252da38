"""Checkpoints: everything that a run needs to be resumed, in checkpoints/<step> of its folder.

tensors.safetensors holds the weights that learn and the optimiser's moments, and state.json the rest and a checksum.
A checkpoint is written under a temporary name and renamed when it is complete, so kill -9 never leaves half of one.
"""

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ppo_rlhf.lib import files
from ppo_rlhf.lib.errors import InputError

KEPT = 2  # the newest checkpoints of a run; if the last is damaged, the one before it is there


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in a run's folder, in order."""
    return sorted(int(path.name) for path in (folder / "checkpoints").glob("*") if re.fullmatch("[0-9]+", path.name))


def write(run_folder: Path, step: int, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
    """Write checkpoints/<step> completely, then give it its name; keep the newest few."""
    folder = run_folder / "checkpoints"
    temporary = folder / f"{step}.tmp"
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file(contiguous, temporary / "tensors.safetensors")
        state = {"step": step, **state}
        files.write_json(temporary / "state.json", sealed(state, temporary / "tensors.safetensors"))
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise InputError(
            f"the checkpoint of step {step} cannot be written ({error}); those before it are kept"
        ) from error
    shutil.rmtree(folder / str(step), ignore_errors=True)
    temporary.rename(folder / str(step))
    for old in checkpoint_steps(run_folder)[:-KEPT]:
        shutil.rmtree(folder / str(old))


def read(run_folder: Path, step: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the state of a checkpoint. Raises an InputError if it is damaged."""
    folder = run_folder / "checkpoints" / str(step)
    file = folder / "tensors.safetensors"
    try:
        state = files.read_json(folder / "state.json")
        unsealed = {name: value for name, value in state.items() if name != "sha256"}
        if sealed(unsealed, file) != state:
            raise ValueError("its files are not what was written")
        return load_file(file), unsealed
    except (OSError, ValueError, AttributeError, SafetensorError) as error:
        raise InputError(
            f"checkpoint {folder} cannot be read ({type(error).__name__}: {error}); "
            f"remove that folder to resume from the one before"
        ) from error


def sealed(state: dict[str, Any], file: Path) -> dict[str, Any]:
    """A checkpoint's state with a checksum of the state and of the file with its tensors."""
    with file.open("rb") as tensors:
        digest = hashlib.file_digest(tensors, "sha256")
    digest.update(json.dumps(state).encode())
    return state | {"sha256": digest.hexdigest()}


# ---- What learns, as tensors -----------------------------------------------------------------------------------


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that learn, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Trained weights and the optimiser's moments for a checkpoint, by flat names."""
    tensors = {f"model.{name}": parameter for name, parameter in trained_parameters(model).items()}
    for index, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": tensor for name, tensor in moments.items()}
    return tensors


@torch.no_grad()
def restore_training_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]
) -> None:
    """The inverse of training_state.

    The optimiser must have the model's trained parameters, in their order. It needn't have made a step.
    """
    trained = trained_parameters(model)
    shapes = {f"model.{name}": parameter.shape for name, parameter in trained.items()}
    if shapes != {name: tensor.shape for name, tensor in tensors.items() if name.startswith("model.")}:
        raise InputError("the checkpoint holds other tensors than the model that its arguments name")
    for name, parameter in trained.items():
        parameter.copy_(tensors[f"model.{name}"])
    state = optimizer.state_dict()
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, moment = name.split(".")
            state["state"].setdefault(int(index), {})[moment] = tensor
    for group in state["param_groups"]:
        if "steps" in group:  # an AdamTensorFlowStyle counts them
            (group["steps"],) = {int(tensor) for name, tensor in tensors.items() if name.endswith(".step")}
    optimizer.load_state_dict(state)
