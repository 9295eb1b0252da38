"""The layers of language models, and gradient checkpointing."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel


def layers(network: nn.Module) -> list[nn.Module]:
    """The layers of the language models in a network, which are alike and follow each other."""
    parts = list(network.modules())
    names = {name for part in parts if isinstance(part, PreTrainedModel) for name in part._no_split_modules or ()}
    return [part for part in parts if type(part).__name__ in names]


def checkpoint_layers(network: nn.Module) -> None:
    """Let passes with gradients keep only the inputs of a layer; the backward pass computes the rest again.

    Here and not by the library, which does so in train mode, and there for rollouts too, whose cache it refuses.
    """

    def checkpointed(forward: Callable) -> Callable:
        def forward_twice(*arguments: Any, **options: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*arguments, **options)
            return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False, **options)

        return forward_twice

    for layer in layers(network):
        layer.forward = checkpointed(layer.forward)
