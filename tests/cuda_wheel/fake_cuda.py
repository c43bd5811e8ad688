"""A CUDA device that is not there, for torch's CUDA build on a machine without a driver: `h100`.

Tensors are torch's fake tensors, which have a shape, a dtype and the device that they claim, and no
memory: an operation on tensors of two devices raises. What would ask the driver is replaced by
stand-ins with the same signatures; triton's kernels are bound to their parameters, not launched.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import DEFAULT, create_autospec

import numpy as np
import pytest
import torch

if torch.version.cuda is None:
    pytest.skip("this torch is no CUDA build; see make test-cuda-wheel", allow_module_level=True)

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.backends.nvidia.compiler import CUDAOptions
from triton.runtime.jit import JITFunction

from quantbench.device import lookup
from quantbench.providers import audit, torch_attention

CUDA = torch.device("cuda", 0)
H100 = lookup("h100-sxm5-80gb")

aten = torch.ops.aten
COPIES = (aten.copy_.default, aten._to_copy.default)
INDEXING = (aten.index.Tensor, aten.index_put_.default)


def properties() -> Any:
    """Returns the properties of an H100, as many of them as this torch has."""
    values = {
        "name": "NVIDIA H100 80GB HBM3",
        "major": 9,
        "minor": 0,
        "multi_processor_count": H100.sm_count,
        "total_memory": H100.memory_bytes,
        "L2_cache_size": H100.l2_bytes,
        "shared_memory_per_multiprocessor": H100.smem_per_sm_bytes,
        "shared_memory_per_block_optin": H100.smem_per_block_bytes,
        "clock_rate": 1_980_000,
        "memory_clock_rate": 2_619_000,
        "memory_bus_width": 5120,
        "uuid": "01234567-89ab-cdef-0123-456789abcdef",
    }
    real = torch._C._CudaDeviceProperties
    return SimpleNamespace(**{name: value for name, value in values.items() if hasattr(real, name)})


#: what torch.cuda's functions return; DEFAULT: a double, of a class one with its methods
ANSWERS: dict[str, Any] = {
    "CUDAGraph": DEFAULT,
    "Event": DEFAULT,
    "Stream": DEFAULT,
    "_sleep": DEFAULT,
    "current_device": 0,
    "current_stream": DEFAULT,
    "device": DEFAULT,
    "get_device_capability": H100.compute_capability,
    "get_device_properties": properties(),
    "graph": DEFAULT,
    "is_current_stream_capturing": False,
    "set_device": DEFAULT,
    "stream": DEFAULT,
    "synchronize": DEFAULT,
}
#: time between two events, so long that a batch is one sample
EVENT_MS = 10.0


class MixedDevicesError(RuntimeError):
    """A tensor or a generator of one device was used with one of another."""


class Generator(torch.Generator):
    """A generator of the CPU that claims a device. torch makes none for CUDA without a driver."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        made = super().__new__(cls)
        made.claimed = CUDA if torch.device(device).type == "cuda" else torch.device("cpu")
        return made

    @property
    def device(self) -> torch.device:
        return self.claimed


class Device(TorchDispatchMode):
    """Sees every operation before fake tensors do: refuses what CUDA refuses, answers what needs
    numbers.

    python_asked: whether the project asks for the meta device in this call.
    """

    python_asked = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        args = tree_map_only(torch.Tensor, _as_fake, args)
        require_one_device(func, args, kwargs)
        if func is aten._local_scalar_dense.default:
            return (
                True if args[0].dtype is torch.bool else 0.0 if args[0].is_floating_point() else 0
            )
        if func is aten.index.Tensor and any(
            i is not None and i.dtype is torch.bool for i in args[1]
        ):
            return args[0].clone()  # a mask that is True everywhere
        if func is aten.equal.default:
            return True
        if func is aten._unique2.default:
            return args[0].clone(), args[0].new_empty(0), args[0].new_empty(0)  # all distinct
        # torch's C++ code asks for tensors where it sees the fake ones to be, on the meta device.
        if not self.python_asked and kwargs.get("device") == torch.device("meta"):
            kwargs["device"] = CUDA
        if func is aten._scaled_mm.out:  # has no fake kernel
            out = kwargs.pop("out")
            return out.copy_(aten._scaled_mm.default(*args, **kwargs).view(out.shape))
        found = func(*args, **kwargs)
        if kwargs.get("pin_memory"):
            found.pinned = True
        return found


class Asked(TorchFunctionMode):
    """Sees every call from Python: tells `Device` which of them ask for the meta device, and checks
    generators."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._device.python_asked = str(kwargs.get("device")) == "meta"
        found = func(*args, **kwargs)
        require_own_generator(kwargs.get("generator"), found)
        return found


def require_one_device(func: Any, args: Any, kwargs: Any) -> None:
    """Raises MixedDevicesError for tensors of two devices, beside what torch takes: copies, indices
    on the CPU, and in pointwise operations numbers on the CPU. Fake tensors take more than that."""
    if func in COPIES:
        return
    if func in INDEXING:
        here = [index for index in args[1] if index is not None and index.device.type != "cpu"]
        args = (args[0], here, *args[2:])
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    devices = {tensor.device.type for tensor in tensors}
    if len(devices) < 2:
        return
    numbers = all(tensor.dim() == 0 for tensor in tensors if tensor.device.type == "cpu")
    if not (numbers and torch.Tag.pointwise in func.tags):
        raise MixedDevicesError(f"{func} on tensors of devices {sorted(devices)}")


def require_own_generator(generator: torch.Generator | None, drawn: Any) -> None:
    """Raises MixedDevicesError unless numbers were drawn by a generator of their device."""
    if generator is not None and generator.device != drawn.device:
        raise MixedDevicesError(f"two devices: {generator.device} draws for {drawn.device}")


class Launches:
    """The launches of triton's kernels (names, and arguments by name), and the options of each,
    compiled or launched."""

    def __init__(self) -> None:
        self.made: list[tuple[str, dict[str, Any]]] = []
        self.options: list[dict[str, Any]] = []

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        """Stands for `JITFunction.run`, which compiles, and launches unless `warmup`."""
        options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
        self.options.append(options)
        unknown = set(options) - set(CUDAOptions.__dataclass_fields__)
        if unknown:
            raise TypeError(
                f"{kernel.fn.__name__}: {', '.join(sorted(unknown))}: no option of this triton"
            )
        named = {name: value for name, value in kwargs.items() if name not in options}
        bound = inspect.signature(kernel.fn).bind(*args, **named)
        for name, value in bound.arguments.items():
            base = getattr(value, "base", value)  # of a tensor descriptor
            if isinstance(base, torch.Tensor) and not (
                base.is_cuda or getattr(base, "pinned", False)
            ):
                raise MixedDevicesError(f"{kernel.fn.__name__}: {name} on {base.device}")
        if not warmup:
            self.made.append((kernel.fn.__name__, dict(bound.arguments)))
        metadata = SimpleNamespace(
            name=kernel.fn.__name__, num_warps=options.get("num_warps", 4), shared=1024
        )
        return SimpleNamespace(metadata=metadata, n_regs=64, _init_handles=lambda: None)


@contextmanager
def h100(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Makes `cuda` an H100 of fake tensors."""
    mode = FakeTensorMode()
    mode.allow_meta = True
    _keep_from_driver(monkeypatch)
    for name, answer in ANSWERS.items():
        stand_in(monkeypatch, torch.cuda, name, answer)
    torch.cuda.Event.return_value.elapsed_time.return_value = EVENT_MS
    monkeypatch.setattr(torch, "Generator", Generator)
    backends = {
        name: (backend, _can_use) for name, (backend, _) in torch_attention.BACKENDS.items()
    }
    monkeypatch.setattr(torch_attention, "BACKENDS", backends)
    launches = Launches()
    monkeypatch.setattr(
        JITFunction, "run", lambda kernel, *args, **kwargs: launches.run(kernel, *args, **kwargs)
    )
    device = Device()
    with mode, device, Asked(device):
        yield launches


def stand_in(
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    answer: Any = DEFAULT,
    check: Any = None,
) -> None:
    """Replaces a function or class by a double with the same methods, which refuses arguments that
    the real one does not take and returns `answer`. check: function called with the arguments."""
    real = getattr(module, name)
    signature = inspect.signature(real)

    def call(*args: Any, **kwargs: Any) -> Any:
        signature.bind(*args, **kwargs)
        if check is not None:
            check(*args, **kwargs)
        return answer

    double = create_autospec(real)
    double.side_effect = call
    monkeypatch.setattr(module, name, double)


def _keep_from_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """To C++ fake tensors are on the meta device, so that no device guard, stream or autograd
    thread asks the driver; to Python they are on CUDA."""
    make_subclass, randperm = torch.Tensor._make_subclass, torch.randperm

    def on_meta(cls: Any, data: Any, requires_grad: bool = False, **_: Any) -> Any:
        return make_subclass(cls, data, requires_grad)

    def permute(n: int, *, device: Any, generator: Any, out: Any = None) -> Any:
        drawn = randperm(n, device=device, generator=generator)
        require_own_generator(generator, drawn)
        return drawn if out is None else out.copy_(drawn)

    monkeypatch.setattr(torch.Tensor, "_make_subclass", staticmethod(on_meta))
    monkeypatch.setattr(torch, "randperm", permute)  # C++ compares out= with the device
    monkeypatch.setattr(
        FakeTensor, "is_cuda", property(lambda tensor: tensor.device.type == "cuda")
    )
    monkeypatch.setattr(FakeTensor, "data_ptr", _address)
    monkeypatch.setattr(FakeTensor, "numpy", _numbers)
    # The audit takes plain tensors only.
    monkeypatch.setattr(
        audit, "type", lambda x: torch.Tensor if type(x) is FakeTensor else type(x), raising=False
    )


def _as_fake(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a fake tensor on CUDA for one that C++ made on the meta device, from a list of
    indices.
    """
    if type(tensor) is FakeTensor or tensor.device.type != "meta":
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CUDA)


def _address(tensor: FakeTensor) -> int:
    """An address for each storage, far from all others."""
    return (tensor.untyped_storage()._cdata << 32) + tensor.storage_offset() * tensor.element_size()


def _numbers(tensor: FakeTensor) -> Any:
    """Returns zeros for a CPU tensor."""
    if tensor.is_cuda:
        raise TypeError("can't convert cuda device type tensor to numpy")
    return np.zeros(tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def _can_use(params: torch.backends.cuda.SDPAParams, debug: bool) -> bool:
    """Stands for torch's checks of its attention kernels: all but grouped heads are taken."""
    return not params.enable_gqa
