"""What `--dtype` means: the precision of weights, of matrix products, and of what a sampler remembers."""

import contextlib

import torch
from torch import Tensor
from transformers import StaticCache


def mixed_precision(device: torch.device, *, enabled: bool) -> contextlib.AbstractContextManager[None]:
    """Within the block, matrix products are in bfloat16, if that is enabled; weights stay in their precision."""
    if not enabled:
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


class KeyValueCache(StaticCache):
    """Keys and values, both in the precision of the values."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Add those of new tokens; return those of all tokens."""
        # Under autocast, rotary positions make keys float32, and attention casts them back. A cache holds one dtype.
        return super().update(key_states.to(value_states.dtype), value_states, *args, **kwargs)

    def take(self, other: StaticCache, batch: int, rows: Tensor, columns: slice) -> None:
        """Copy the cache of some rows to these columns of the batch's. The next token comes after the columns."""
        for layer, part in zip(self.layers, other.layers, strict=True):
            if not layer.is_initialized:
                states = (part.keys, part.values)
                layer.lazy_initialization(*(x.new_empty(batch, *x.shape[1:]) for x in states))
            layer.keys[rows, :, columns], layer.values[rows, :, columns] = part.keys, part.values
            layer.cumulative_length.fill_(columns.stop)
