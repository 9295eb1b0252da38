"""A stand-in for a GPU: a device with the rules of CUDA whose tensors stay in the CPU's memory. It counts its work.

`install()` registers it under PyTorch's spare device type (privateuse1). The CPU computes every operation on its
tensors, so the numbers are the CPU's. On the way, each operation is checked and counted:

    refused    an operation that mixes tensors of this device and of the CPU, as CUDA refuses it. CUDA accepts numbers
               (0-d tensors) of the CPU in elementwise operations, and indices of the CPU. If asked for, float64, too,
               which Apple's GPUs don't have
    launches   operations that compute; views and new uninitialised memory are free. Some operations are several
               kernels on a GPU, but here each counts as one; optimisers and norms count once for 36 tensors
    copies     of tensors from the CPU to the device, and back
    waits      places where the host can't go on before the device is done, because it reads numbers (item, tolist,
               cpu) or needs sizes that depend on numbers (nonzero, unique, masks as indices)

It can't show what only hardware shows: speed, memory, how a kernel rounds, kernels that don't exist for a dtype, and
the order of several streams. PyTorch calls the registration experimental, so a later version may change it.
"""

import contextlib
import functools
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils, backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from ppo_rlhf.lib import processes, run

NAME = "standin"
DEVICE = torch.device("privateuseone", 0)  # has the name above once it is registered
PACKAGE = str(Path(__file__).resolve().parents[1] / "ppo_rlhf") + "/"
aten = torch.ops.aten

# What the host reads from the device before it goes on.
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount", "one_hot", "is_nonzero"}
WAITS |= {"unique", "_unique", "_unique2", "unique_dim", "unique_consecutive"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
COPYING = {"copy_", "_to_copy", "copy", "_copy_from"}
TAKES_A_NUMBER = {"fill_", "masked_fill", "masked_fill_", "where"}  # besides elementwise operations
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "detach"}
FREE |= {"lift_fresh"}


# ---- Tensors ---------------------------------------------------------------------------------------------------


class StandInTensor(Tensor):
    """A tensor that says it is on the device, and has its numbers in a tensor of the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers: Tensor):
        layout = {"strides": numbers.stride(), "storage_offset": numbers.storage_offset()}
        return Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=numbers.dtype, device=DEVICE, **layout)

    def __init__(self, numbers: Tensor):
        self.numbers = numbers

    # Libraries ask which tensors share memory before they save them.
    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def storage(self) -> torch.TypedStorage:
        return self.numbers.storage()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.numbers.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return compute(function, args, kwargs or {})


class Operations(TorchDispatchMode):
    """Sends operations on tensors of the device, and those that make such tensors, to `compute`."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        ours = is_ours(kwargs.get("device")) or any(map(on_device, leaves(args, kwargs)))
        return compute(function, args, kwargs) if ours else function(*args, **kwargs)


class Functions(TorchFunctionMode):
    """The few functions that never reach the dispatcher as one operation, or not at all."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (torch.tensor, torch.as_tensor, torch.scalar_tensor) and is_ours(kwargs.get("device")):
            return function(*args, **kwargs | {"device": "cpu"}).to(kwargs["device"])
        if args and isinstance(args[0], StandInTensor):
            if function is Tensor.new_tensor:
                kwargs = {"dtype": args[0].dtype} | kwargs
                return torch.tensor(*args[1:], **kwargs | {"device": "cpu"}).to(kwargs.get("device", args[0].device))
            if function is Tensor.tolist:
                return args[0].cpu().tolist()
            if function == Tensor.data.__set__ and on_device(args[1]):
                args[0].numbers = args[1].numbers
        return function(*args, **kwargs)


def is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def on_device(numbers: Any) -> bool:
    return isinstance(numbers, StandInTensor)


# PyTorch's own functions for trees of arguments take longer than most operations.


def leaves(args: Sequence, kwargs: dict[str, Any] | None = None) -> list[Any]:
    """The arguments or results of an operation, of which some may be lists."""
    found = []
    for x in (*args, *(kwargs or {}).values()):
        found += x if isinstance(x, list | tuple) else (x,)
    return found


def map_only(kind: type, function: Callable[[Any], Any], x: Any) -> Any:
    """The same arguments or results, where the function has replaced those of a kind."""
    if isinstance(x, kind):
        return function(x)
    if isinstance(x, dict):
        return {key: map_only(kind, function, one) for key, one in x.items()}
    return type(x)([map_only(kind, function, one) for one in x]) if isinstance(x, list | tuple) else x


library_attention = torch.nn.functional.scaled_dot_product_attention


def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args, **kwargs) -> Tensor:
    """Attention in one kernel where the CPU has one for it. On a device it doesn't know, PyTorch takes it apart."""
    if not on_device(query):
        return library_attention(query, key, value, attn_mask, *args, **kwargs)
    if torch.is_autocast_enabled(NAME):
        dtype = torch.get_autocast_dtype(NAME)
        query, key, value = (cast(states, dtype) for states in (query, key, value))
        attn_mask = attn_mask if attn_mask is None or attn_mask.dtype == torch.bool else cast(attn_mask, dtype)
    given = [x.numbers if on_device(x) else x for x in (query, key, value, attn_mask)]
    if torch._fused_sdp_choice(*given, *args, **kwargs) != torch.nn.attention.SDPBackend.FLASH_ATTENTION.value:
        with torch.autocast(NAME, enabled=False):
            return library_attention(query, key, value, attn_mask, *args, **kwargs)
    names = dict(zip(("dropout_p", "is_causal"), args, strict=False)) | kwargs
    own = {name: names[name] for name in ("dropout_p", "is_causal", "scale") if name in names}
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -math.inf)
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=attn_mask, **own)[0]


# ---- One operation ---------------------------------------------------------------------------------------------


def compute(function: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Check and count an operation, and let the CPU do it."""
    name = function._schema.name.removeprefix("aten::")
    check(function, name, args, kwargs)
    wrapped: dict[int, StandInTensor] = {}

    def unwrap(tensor: StandInTensor) -> Tensor:
        wrapped[id(tensor.numbers)] = tensor
        return tensor.numbers

    plain, options = map_only(StandInTensor, unwrap, (args, kwargs))
    device = options.get("device")
    if device is not None:
        options = options | {"device": torch.device("cpu")}
    result = function(*plain, **options)
    # A result is on the device unless it was asked for elsewhere, or is written to a tensor of the CPU.
    to_cpu = (device is not None and not is_ours(device)) or (name == "copy_" and not on_device(args[0]))
    count(function, name, args, to_cpu=to_cpu)
    if to_cpu:
        return args[0] if name == "copy_" else result
    made = [x.dtype for x in leaves((result,)) if isinstance(x, Tensor)]
    if NAME in processes.WITHOUT_FLOAT64 and torch.float64 in made:
        raise RuntimeError(f"{name} makes float64, which the device does not have")
    return map_only(Tensor, lambda x: wrapped[id(x)] if id(x) in wrapped else StandInTensor(x), result)


def check(function: torch._ops.OpOverload, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise a RuntimeError if CUDA would refuse the operation, because its tensors are on different devices."""
    if name in COPYING:
        return
    tensors = [x for x in leaves(args, kwargs) if isinstance(x, Tensor)]
    if name in INDEXING and on_device(args[0]):
        values = args[2:3] if "put" in name else ()
        tensors = [args[0], *(x for x in values if x.dim())]  # indices may be on the CPU, and so may a number
    elif torch.Tag.pointwise in function.tags or name in TAKES_A_NUMBER or name.startswith("_foreach"):
        tensors = [x for x in tensors if x.dim() or on_device(x)]
    if len({on_device(x) for x in tensors}) > 1:
        shapes = [f"{x.device.type} {tuple(x.shape)}" for x in tensors]
        raise RuntimeError(f"{name} mixes tensors of the device and of the CPU: {', '.join(shapes)}")


# ---- What is counted -------------------------------------------------------------------------------------------

Kind = Literal["launch", "copy to device", "copy to host", "wait"]
Place = tuple[str, ...]  # lines of the package, from the outermost call to the innermost: file:line:function
counts: Counter[tuple[Kind, Place]] = Counter()


def count(function: torch._ops.OpOverload, name: str, args: tuple, *, to_cpu: bool) -> None:
    if function.is_view or name in FREE:
        return
    found: Counter[Kind] = Counter()
    if name in COPYING and to_cpu:
        found.update({"copy to host": 1, "wait": 1})
    elif name in COPYING and not all(on_device(x) for x in args[: 2 if name == "copy_" else 1]):
        found["copy to device"] = 1
    elif name.startswith(("_foreach", "_fused_adam")):
        found["launch"] = math.ceil(len(args[0]) / 36)
    else:
        found["launch"] = 1
    if name in WAITS or (name == "repeat_interleave" and function._overloadname == "Tensor"):
        found["wait"] = 1
    if name in INDEXING:
        indices = [x for x in args[1] if x is not None]
        found["copy to device"] += sum(not on_device(x) for x in indices)
        # A mask as an index is a search for where it is True; but one number for all these places needs no search.
        one_number = "put" in name and args[2].numel() == 1
        found["wait"] += sum(x.dtype in (torch.bool, torch.uint8) for x in indices) * (not one_number)
    place = our_lines()
    for kind, number in found.items():
        if number:
            counts[kind, place] += number


@functools.cache
def name_of(file: str) -> str:
    """Where a file is in the package; empty elsewhere."""
    return file.removeprefix(PACKAGE) if file.startswith(PACKAGE) else ""


def our_lines() -> Place:
    """Where the package is, as the keys of `counts` say it."""
    frame, lines = sys._getframe(2), []
    while frame:
        code = frame.f_code
        if name := name_of(code.co_filename):
            lines.append(f"{name}:{frame.f_lineno}:{code.co_name}")
        frame = frame.f_back
    return tuple(reversed(lines))


@contextlib.contextmanager
def count_updates() -> Iterator[list[Counter[tuple[Kind, Place]]]]:
    """Within the block, the list gets the counts of each update when its metrics have been logged."""
    found, before = [], counts.copy()
    log = run.Run.log

    def log_and_count(this_run: run.Run, step: int, metrics: dict[str, float]) -> None:
        nonlocal before
        log(this_run, step, metrics)
        found.append(counts - before)
        before = counts.copy()

    run.Run.log = log_and_count
    try:
        yield found
    finally:
        run.Run.log = log


def save(file: Path, updates: list[Counter]) -> None:
    """Write what `count_updates` found: for each update, rows of kind, place and number."""
    file.write_text(json.dumps([[[kind, place, n] for (kind, place), n in one.items()] for one in updates]))


def load(file: Path) -> list[Counter[tuple[Kind, Place]]]:
    """The inverse of `save`."""
    return [Counter({(kind, tuple(place)): n for kind, place, n in one}) for one in json.loads(file.read_text())]


# A function on the way to a line says to which step the line belongs; the first that is found counts. Training reads
# log-probs with the reference's function, so it comes first.
STEPS = {
    "passes": ("ppo_update", "update"),
    "trace": ("record_trace",),
    "evaluate": ("evaluate",),
    "reference": ("reference_logprobs", "logprobs", "response_logprobs"),
    "generate": ("respond", "generate"),
    "read": ("read_responses",),
    "score": ("score", "score_responses"),
    "advantages": ("compute_advantages", "token_rewards", "compute_rewards"),
    "log": ("update_metrics", "run_metrics", "end_of_update"),
}


def by_step(update: Counter[tuple[Kind, Place]]) -> dict[str, Counter[Kind]]:
    """The counts of an update by the step of the algorithm."""
    found: dict[str, Counter[Kind]] = {}
    for (kind, place), number in update.items():
        functions = {line.rsplit(":", 1)[1] for line in place}
        step = next((step for step, names in STEPS.items() if functions & set(names)), "other")
        found.setdefault(step, Counter())[kind] += number
    return found


# ---- Autocast --------------------------------------------------------------------------------------------------

# What autocast does on CUDA and on the CPU to operations that the scripts or their models use; see ATen's
# autocast_mode.h. In low precision; in float32; all arguments in the widest dtype that one of them has.
LOW = "addmm addmv matmul mm mv linear baddbmm bmm addbmm"
FULL = {
    "cuda": "exp expm1 log log1p reciprocal rsqrt softplus layer_norm native_layer_norm pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar rms_norm logsumexp nll_loss mse_loss softmax.int log_softmax.int cumsum sum "
    "sum.dim_IntList prod prod.dim_int binary_cross_entropy_with_logits kl_div linalg_vector_norm",
    "cpu": "prod prod.dim_int mse_loss nll_loss kl_div",
}
WIDEST = {"cuda": "addcdiv addcmul dot index_put scatter_add", "cpu": "stack cat index_copy"}
casts: dict[int, tuple[Tensor, Tensor]] = {}  # weights and what they were cast to, until autocast ends


def may_cast(x: Any) -> bool:
    return isinstance(x, Tensor) and on_device(x) and x.is_floating_point() and x.dtype != torch.float64


def cast(x: Any, dtype: torch.dtype) -> Any:
    """As autocast does it: weights are cast once."""
    if not may_cast(x) or x.dtype == dtype:
        return x
    kept = torch.is_autocast_cache_enabled() and x.dtype == torch.float32 and x.requires_grad and x.is_leaf
    if not kept or x._is_view():
        return x.to(dtype)
    if id(x) not in casts:
        casts[id(x)] = x, x.to(dtype)
    return casts[id(x)][1]


def cast_then_call(function: torch._ops.OpOverload, how: str, *args, **kwargs) -> Any:
    given = [x for x in leaves(args, kwargs) if may_cast(x)]
    dtype = {"low": torch.get_autocast_dtype(NAME), "full": torch.float32}.get(how)
    if how == "widest":
        dtype = max((x.dtype for x in given), key=lambda dtype: dtype.itemsize, default=None)
    with torch._C._DisableAutocast():
        if dtype is not None and kwargs.get("dtype") is None:
            args, kwargs = map_only(Tensor, lambda x: cast(x, dtype), (args, kwargs))
        return function(*args, **kwargs)


def register_autocast(rules: Literal["cpu", "cuda"]) -> list[torch.library.Library]:
    others, library = (torch.library.Library(name, "IMPL", "AutocastPrivateUse1") for name in ("_", "aten"))
    others.fallback(torch.library.fallthrough_kernel)
    for how, names in (("low", LOW), ("full", FULL[rules]), ("widest", WIDEST[rules])):
        for name in names.split():
            packet, _, overload = name.partition(".")
            function = getattr(getattr(aten, packet), overload or "default")
            library.impl(name, partial(cast_then_call, function, how))
    return [others, library]


# ---- Operations that PyTorch would take apart ------------------------------------------------------------------

# Derivatives that have a kernel on the CPU and on CUDA. On a device it doesn't know, PyTorch computes them in several
# operations, which round differently.
WHOLE = ("silu_backward",)


def call_whole(function: torch._ops.OpOverload, *args) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        return function(*args)


def register_whole() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL", "AutogradPrivateUse1")
    for name in WHOLE:
        library.impl(name, partial(call_whole, getattr(aten, name).default))
    return library


# ---- Install ---------------------------------------------------------------------------------------------------


class Module(backend_registration._DummyBackendModule):
    """A substitute for torch.cuda."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


kept: list[Any] = []  # what has to live as long as the process


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Within the block, which is of one thread, operations that make tensors of the device are possible."""
    with Operations(), Functions():
        yield


def install(*, autocast: Literal["cpu", "cuda"] = "cuda", float64: bool = True) -> None:
    """Register the device, once in a process, and make the scripts use it in place of a GPU.

    autocast: whose rules it has. Those of the CPU give the CPU's numbers. float64: whether it has that.
    """
    if not float64:
        processes.WITHOUT_FLOAT64.add(NAME)
    backend_registration._setup_privateuseone_for_python_backend(NAME, Module())
    kept.append([register_autocast(autocast), register_whole()])
    forget, prepare = torch.clear_autocast_cache, Accelerator.__init__
    device = torch.device(NAME, 0)

    def clear_autocast_cache() -> None:
        casts.clear()
        forget()

    def prepare_for_device(accelerator: Accelerator, **options: Any) -> None:
        prepare(accelerator, **options)
        accelerator.state.device = device

    torch.nn.functional.scaled_dot_product_attention = attention
    torch.clear_autocast_cache = clear_autocast_cache
    Accelerator.__init__, processes.default_device = prepare_for_device, lambda: device
    _foreach_utils._foreach_supported_types.append(StandInTensor)
    torch.__future__.set_swap_module_params_on_conversion(True)  # tied weights stay tied
    # In the thread that calls, so that a backward pass has our lines, and the modes, above it.
    kept.append(torch.autograd.set_multithreading_enabled(False))
    kept.append(contextlib.ExitStack())
    kept[-1].enter_context(checked())
