"""A stand-in for a GPU: a device whose tensors stay in the CPU's memory. It refuses what GPUs refuse.

    python stand_in.py <script> <arguments>

runs a script of ppo_rlhf/ on it. `install()` registers it under PyTorch's spare device type (privateuse1). The CPU
computes every operation on its tensors. On the way it refuses

- an operation that mixes tensors of different devices. CUDA accepts numbers (0-d tensors) of the CPU in elementwise
  operations, and indices of the CPU, and so does this.
- float64 on the first of its two devices, where models run: Apple's GPUs don't have it. Random numbers need it. They
  are on the second device, so that they must be moved there and back. On a real GPU that has float64, both are one.
- autocast for another kind of device.

`waits.json` in the current folder says how often the host had to wait for the device, because it read numbers (item,
tolist, cpu) or needed sizes that depend on numbers (nonzero, unique, masks as indices), while each of our functions
was being called. Asynchronous workers are in the same process.

It can't show what only hardware shows: speed, memory, how a kernel rounds, kernels that don't exist for a dtype, and
the order of several streams. PyTorch calls the registration experimental, so a later version may change it.
"""

import importlib.util
import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from refusals import main_of
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils, backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

import ppo_rlhf.rlvr.asynchronous
import ppo_rlhf.rlvr.tools
import ppo_rlhf.tldr.all
import ppo_rlhf.train_both  # noqa: F401, so that all scripts are there

NAME = "standin"
PACKAGE = str(Path(__file__).resolve().parents[2] / "ppo_rlhf") + "/"
aten = torch.ops.aten

COPYING = {"copy_", "_to_copy", "copy", "_copy_from"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
TAKES_A_NUMBER = {"fill_", "masked_fill", "masked_fill_", "where"}  # besides elementwise operations
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount", "unique_dim", "_unique2"}
waits: Counter[str] = Counter()  # of each function of the package


class StandIn(Tensor):
    """A tensor that says it is on the device, and has its numbers in a tensor of the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers: Tensor, device: torch.device):
        layout = {"strides": numbers.stride(), "storage_offset": numbers.storage_offset()}
        return Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=numbers.dtype, device=device, **layout)

    def __init__(self, numbers: Tensor, device: torch.device):
        self.numbers = numbers

    # Libraries ask which tensors share memory before they save them.
    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.numbers.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return compute(function, args, kwargs or {})


class Operations(TorchDispatchMode):
    """Sends operations that make tensors of the device out of nothing to `compute`, too."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        ours = is_ours(kwargs.get("device")) or any(issubclass(kind, StandIn) for kind in types)
        return compute(function, args, kwargs) if ours else function(*args, **kwargs)


class Functions(TorchFunctionMode):
    """The few functions that never reach the dispatcher as one operation, or not at all."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (torch.tensor, torch.as_tensor) and is_ours(kwargs.get("device")):
            return function(*args, **kwargs | {"device": "cpu"}).to(kwargs["device"])
        if args and isinstance(args[0], StandIn):
            if function is Tensor.new_tensor:
                return torch.tensor(*args[1:], **{"dtype": args[0].dtype} | kwargs).to(args[0].device)
            if function is Tensor.tolist:
                return args[0].cpu().tolist()
            if function == Tensor.data.__set__ and isinstance(args[1], StandIn):
                args[0].numbers = args[1].numbers
        return function(*args, **kwargs)


def is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


# PyTorch's own functions for trees of arguments take longer than most operations.


def leaves(*args: Any) -> list[Any]:
    """The arguments of an operation, of which some may be lists."""
    return [x for each in args for x in (each if isinstance(each, list | tuple) else (each,))]


def map_only(kind: type, function: Callable[[Any], Any], x: Any) -> Any:
    """The same arguments or results, where the function has replaced those of a kind."""
    if isinstance(x, kind):
        return function(x)
    return type(x)([map_only(kind, function, one) for one in x]) if isinstance(x, list | tuple) else x


def compute(function: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Check an operation, and let the CPU do it."""
    name = function._schema.name.removeprefix("aten::")
    tensors = [x for x in leaves(*args, *kwargs.values()) if isinstance(x, Tensor)]
    wrapped = {id(x.numbers): x for x in tensors if isinstance(x, StandIn)}
    asked = kwargs.get("device")
    if asked is not None:
        asked = torch.device(asked)
        device = torch.device(NAME, asked.index or 0) if asked.type == NAME else asked
        kwargs = kwargs | {"device": torch.device("cpu")}
    else:
        device = (args[0] if name == "copy_" else next(iter(wrapped.values()))).device
    if name not in COPYING:
        refuse_mixtures(function, name, args, tensors)
    if name in WAITS or (name in COPYING and device.type == "cpu") or searches(name, args):
        frames = (frame for frame, _ in traceback.walk_stack(None))
        waits.update({f.f_code.co_name for f in frames if f.f_code.co_filename.startswith(PACKAGE)})
    plain, options = (map_only(StandIn, lambda x: x.numbers, list(x)) for x in (args, kwargs.values()))
    result = function(*plain, **dict(zip(kwargs, options, strict=True)))
    if device.type == "cpu":
        return args[0] if name == "copy_" else result

    def wrap(x: Tensor) -> Tensor:
        if x.dtype == torch.float64 and device == DEVICE:
            raise RuntimeError(f"{name} makes float64, which the device does not have")
        return wrapped[id(x)] if id(x) in wrapped else StandIn(x, device)

    return map_only(Tensor, wrap, result)


def refuse_mixtures(function: torch._ops.OpOverload, name: str, args: tuple, tensors: list[Tensor]) -> None:
    """Raise a RuntimeError if CUDA would refuse the operation, because its tensors are on different devices."""
    if name in INDEXING and isinstance(args[0], StandIn):
        tensors = [args[0], *(x for x in args[2:3] if "put" in name and x.dim())]
    elif torch.Tag.pointwise in function.tags or name in TAKES_A_NUMBER or name.startswith("_foreach"):
        tensors = [x for x in tensors if x.dim() or x.device.type != "cpu"]
    if len({x.device for x in tensors}) > 1:
        raise RuntimeError(f"{name} mixes tensors of {', '.join(str(x.device) for x in tensors)}")


def searches(name: str, args: tuple) -> bool:
    """Whether a mask is used as an index, to read, or to write several numbers."""
    if name not in INDEXING or ("put" in name and args[2].numel() == 1):
        return False
    return any(x is not None and x.dtype == torch.bool for x in args[1])


# ---- Autocast --------------------------------------------------------------------------------------------------

# Operations that CUDA's autocast does in low precision, and those that it does in float32.
LOW = "addmm addmv matmul mm mv linear baddbmm bmm addbmm scaled_dot_product_attention"
FULL = (
    "exp expm1 log log1p reciprocal rsqrt softplus layer_norm native_layer_norm pow.Tensor_Scalar pow.Tensor_Tensor "
    "pow.Scalar rms_norm logsumexp softmax.int log_softmax.int cumsum sum sum.dim_IntList prod linalg_vector_norm"
)


def cast_and_call(function: torch._ops.OpOverload, low: bool, *args, **kwargs) -> Any:
    dtype = torch.get_autocast_dtype(NAME) if low else torch.float32

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

    with torch._C._DisableAutocast():
        return function(
            *map_only(Tensor, cast, args), **{name: map_only(Tensor, cast, x) for name, x in kwargs.items()}
        )


def register_autocast() -> list[torch.library.Library]:
    others, library = (torch.library.Library(name, "IMPL", "AutocastPrivateUse1") for name in ("_", "aten"))
    others.fallback(torch.library.fallthrough_kernel)
    for names in (LOW, FULL):
        for name in names.split():
            packet, _, overload = name.partition(".")
            function = getattr(getattr(aten, packet), overload or "default")
            library.impl(name, partial(cast_and_call, function, names == LOW))
    return [others, library]


# ---- Install ---------------------------------------------------------------------------------------------------


class Module(backend_registration._DummyBackendModule):
    """A substitute for torch.cuda."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


kept: list[Any] = []  # what has to live as long as the process


def install() -> None:
    """Register the device, once in a process, and make the scripts use it in place of a GPU."""
    global DEVICE
    backend_registration._setup_privateuseone_for_python_backend(NAME, Module())
    DEVICE = torch.device(NAME, 0)
    for module in [module for name, module in sys.modules.items() if name.startswith("ppo_rlhf.")]:
        if hasattr(module, "float64_device"):
            has_float64(module)
    prepare, begin = Accelerator.__init__, torch.autocast.__init__

    def prepare_for_device(accelerator: Accelerator, **options: Any) -> None:
        prepare(accelerator, **options)
        accelerator.state.device = DEVICE

    def begin_of_our_kind(autocast: torch.autocast, device_type: str, *args: Any, **options: Any) -> None:
        if device_type != NAME and sys._getframe(1).f_code.co_filename.startswith(PACKAGE):
            raise RuntimeError(f"autocast for {device_type}, which is another device")
        begin(autocast, device_type, *args, **options)

    Accelerator.__init__, torch.autocast.__init__ = prepare_for_device, begin_of_our_kind
    _foreach_utils._foreach_supported_types.append(StandIn)
    torch.__future__.set_swap_module_params_on_conversion(True)  # tied weights stay tied
    # In the thread that calls, so that a backward pass has the modes above it.
    kept.extend([register_autocast(), torch.autograd.set_multithreading_enabled(False), Operations(), Functions()])
    for mode in kept[-2:]:
        mode.__enter__()


def has_float64(script: ModuleType) -> None:
    """Let a script find the device for float64."""
    script.float64_device = lambda device: torch.device(NAME, 1) if device.type == NAME else device


# ---- Ray, in this process --------------------------------------------------------------------------------------


class Actor:
    def __init__(self, kind: type, *arguments: Any):
        self.engine = kind(*arguments)

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=getattr(self.engine, name))


RAY = SimpleNamespace(
    is_initialized=lambda: True,
    cluster_resources=dict,
    remote=lambda **_: lambda kind: SimpleNamespace(remote=partial(Actor, kind)),
    put=lambda x: x,
    get=lambda x: x,
    exceptions=SimpleNamespace(RayError=InterruptedError, RayTaskError=InterruptedError),
)


def module_of(script: Path) -> ModuleType:
    """A script that isn't in the package, such as a copy of one of chapter 1."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = sys.modules[script.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    has_float64(module)
    return module


if __name__ == "__main__":
    install()
    sys.modules["ray"] = RAY
    sys.argv = sys.argv[1:]
    file = Path(sys.argv[0])
    main, module = main_of(str(file.relative_to(PACKAGE)) if file.is_relative_to(PACKAGE) else module_of(file))
    exec(main, vars(module))
    Path("waits.json").write_text(json.dumps(waits))
