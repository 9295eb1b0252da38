"""python device_rules.py: the stand-in for a GPU accepts, refuses, casts and counts what CUDA does, case by case.

It ends with status 0 if it does, and with a traceback otherwise.
"""

from collections.abc import Callable

import pytest
import stand_in
import torch

stand_in.install(autocast="cuda")
there = {"device": stand_in.DEVICE}
here, x = torch.arange(6.0).view(2, 3), torch.arange(6.0, **there).view(2, 3)
mask, number, index = x > 2, torch.tensor(2.0), torch.tensor([1, 0])
layer = torch.nn.Linear(3, 3).to(stand_in.DEVICE)

REFUSED = [
    lambda: x + here,
    lambda: here * x,
    lambda: x.add_(here),
    lambda: x @ here.T,
    lambda: torch.cat([x, here]),
    lambda: torch.where(mask, x, here),
    lambda: torch.where(here > 2, x, 0.0),
    lambda: x.masked_fill(mask.cpu(), 0.0),
    lambda: x.gather(1, index[:, None]),
    lambda: x.index_select(0, index),
    lambda: x.scatter_add(1, index[:, None], x),
    lambda: torch.nn.functional.embedding(index, x),
    lambda: layer(here),
    lambda: here[index.to(stand_in.DEVICE)],
    lambda: torch.stack([x.sum(), number]),
    lambda: x.clamp(min=here),
    lambda: x.new_zeros(2, 3).copy_(x) + torch.tensor([1.0, 2.0, 3.0]),
]
ACCEPTED = [
    lambda: x + number,
    lambda: number * x,
    lambda: torch.where(mask, x, number),
    lambda: x.masked_fill(mask, number),
    lambda: x[index],
    lambda: x[mask.cpu()],
    lambda: x.index_put((index,), number),
    lambda: x.new_zeros(2, 3).copy_(here),
    lambda: here.to(stand_in.DEVICE) + torch.tensor([1.0, 2.0, 3.0], **there) + x.new_tensor([1.0, 2.0, 3.0]),
    lambda: torch.as_tensor(here, **there) + x,
    lambda: layer(x).sum().backward(),
]
for function in REFUSED:
    with pytest.raises(RuntimeError, match="mixes tensors of the device and of the CPU"):
        function()
for function in ACCEPTED:
    function()
with pytest.raises(RuntimeError, match="numpy"):
    x.numpy()
with torch.device("meta"):
    assert torch.tensor([1.0]).device.type == torch.zeros(2).device.type == "meta"
assert torch.equal(x[index].cpu(), here[index]) and x.tolist() == here.tolist()
assert torch.equal(layer.weight.grad.cpu(), here.sum(0).expand(3, 3))

# What is counted: launches, copies to the device, copies to the host, waits.
COUNTED: list[tuple[Callable, tuple[int, int, int, int]]] = [
    (lambda: x + 1, (1, 0, 0, 0)),
    (lambda: x.T.unsqueeze(0)[:, 1:].detach(), (0, 0, 0, 0)),
    (lambda: torch.empty(5, **there), (0, 0, 0, 0)),
    (lambda: here.to(stand_in.DEVICE), (0, 1, 0, 0)),
    (lambda: x.cpu(), (0, 0, 1, 1)),
    (lambda: x.tolist(), (0, 0, 1, 1)),
    (lambda: x[0, 0].item(), (1, 0, 0, 1)),
    (lambda: mask.nonzero(), (1, 0, 0, 1)),
    (lambda: x[mask], (1, 0, 0, 1)),
    (lambda: x[index], (1, 1, 0, 0)),
    (lambda: x.masked_fill(mask, 0.0), (1, 0, 0, 0)),
    (lambda: x.new_zeros(2, 3).masked_fill_(mask, 1.0).sum(), (3, 0, 0, 0)),
    (lambda: (x + x).sum().double(), (3, 0, 0, 0)),
    (lambda: torch._foreach_add([x] * 40, 1), (2, 0, 0, 0)),
]
for number_of_case, (function, expected) in enumerate(COUNTED):
    stand_in.counts.clear()
    function()
    kinds = ("launch", "copy to device", "copy to host", "wait")
    found = tuple(sum(n for (kind, _), n in stand_in.counts.items() if kind == name) for name in kinds)
    assert found == expected, (number_of_case, found, expected)

# Autocast: PyTorch's documentation names the operations that it runs in bfloat16 and in float32 on CUDA.
LOW, FULL = torch.bfloat16, torch.float32
with torch.autocast(stand_in.NAME, torch.bfloat16):
    half = x @ x.T
    assert half.dtype == layer(x).dtype == torch.baddbmm(x[None], x[None], x.T[None, :, :3] @ x[None]).dtype == LOW
    for function in (torch.exp, torch.log, torch.sum, torch.rsqrt, lambda y: y.softmax(1), lambda y: y.cumsum(1)):
        assert function(half).dtype == FULL
    assert torch.nn.functional.layer_norm(half, (2,)).dtype == FULL and (half**2).dtype == FULL
    assert (half + half).dtype == torch.relu(half).dtype == torch.nn.functional.silu(half).dtype == LOW
    assert (half + torch.ones(2, 2, **there)).dtype == FULL and (half.double() @ half.double()).dtype == torch.float64
    with torch.autocast(stand_in.NAME, enabled=False):
        assert (x @ x.T).dtype == FULL
assert (x @ x.T).dtype == FULL
