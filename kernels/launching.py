"""Compiles, describes and launches kernels with triton: 3.2 on Volta and Turing, 3.6 and newer on
later GPUs.

`step` compiles and describes one kernel as a `Step`, and a `Plan` runs one or more. All checks of
the triton version and of the GPU belong here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, TypeVar

import torch
import triton
from triton.runtime import OutOfResources

from quantbench.errors import InputError, UnsupportedError
from quantbench.launch import Launch, Tile
from quantbench.quantization import WARP_THREADS, resident_blocks

#: Major and minor version of triton.
TRITON = tuple(int(number) for number in triton.__version__.split(".")[:2])

#: Whether kernels take tensor descriptors as arguments (loads and stores by the TMA unit)
HAS_TENSOR_DESCRIPTOR = TRITON >= (3, 6)

#: torch dtypes by our names; tf32 is stored as fp32.
TORCH_DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}

#: Whether kernels run in Python on CPU tensors. Fixed when triton is imported; changing it later
#: breaks triton.
INTERPRETER = os.environ.get("TRITON_INTERPRET", "0") == "1"

#: Bytes. A TMA descriptor needs the first element and every stride but the last at a multiple of
#: it. Source: cuTensorMapEncodeTiled, CUDA driver API.
TMA_ALIGN_BYTES = 16

#: Registers per thread, every compute capability. Source: CUDA C++ Programming Guide 13.0
MAX_REGISTERS = 255
#: Options of every launch. a·b + c is one instruction: triton's default up to 3.9, and no longer
#: from 3.10 on.
OPTIONS = {"enable_fp_fusion": True}
#: Function of a compute capability that returns why it is not supported, or None.
Reason = Callable[[tuple[int, int]], str | None]

_AUTOTUNE_WARMUP_MS = 20
_AUTOTUNE_MS = 80


def unsupported_architecture(
    capability: tuple[int, int], version: tuple[int, ...] = TRITON
) -> str | None:
    """Returns None if our kernels run on a compute capability with triton `version`, otherwise the
    reason.

    Found by compiling (`make test-aot`, `make test-volta`): 3.2 is the last with tensor-core code
    for sm_70 and sm_75. 3.3 to 3.5 spill registers in stream_k or attention, or compile them not at
    all.

    >>> print(unsupported_architecture((7, 0), (3, 6)))
    our kernels do not run on sm_70 with triton 3.6; it needs triton 3.2 (torch 2.6)
    """
    architecture = f"sm_{capability[0]}{capability[1]}"
    if capability < (7, 0):
        return (
            f"{architecture} has no tensor cores; it needs a GPU of compute capability 7.0 or newer"
        )
    if capability < (8, 0):
        fits = version == (3, 2)
        needs = "triton 3.2 (torch 2.6)"
    else:
        fits = version >= (3, 6)
        needs = "triton 3.6 or newer (torch 2.10)"
    if fits:
        return None
    found = f"triton {version[0]}.{version[1]}"
    return f"our kernels do not run on {architecture} with {found}; it needs {needs}"


def wrong_in_interpreter(dtype: str) -> str | None:
    """Returns why triton's interpreter computes wrong GEMMs in this dtype, or None."""
    return "triton's interpreter multiplies the bit patterns of bf16" if dtype == "bf16" else None


@dataclass(frozen=True)
class Gpu:
    """What a kernel is configured for: a GPU's compute capability, number of SMs and size of the L2
    cache.
    """

    capability: tuple[int, int]
    sm_count: int
    l2_bytes: int


def gpu_of(x: torch.Tensor, interpreted: Gpu) -> Gpu:
    """Returns the GPU that a checked tensor is on. interpreted: the one that the interpreter
    simulates.
    """
    if not x.is_cuda:
        return interpreted
    properties = torch.cuda.get_device_properties(x.device)
    return Gpu(
        (properties.major, properties.minor),
        properties.multi_processor_count,
        properties.L2_cache_size,
    )


def require_support(
    who: str,
    name: str,
    x: torch.Tensor,
    dtype: str,
    *reasons: Reason,
) -> None:
    """Raises UnsupportedError unless triton runs kernels where x is.

    dtype: of the kernel's products, "" for none.
    reasons: further conditions on the GPU.
    """
    if INTERPRETER:
        reason = wrong_in_interpreter(dtype)
    else:
        capability = _capability(who, name, x)
        reason = first_reason(capability, *reasons)
    if reason is not None:
        found, _, needs = reason.partition("; it needs ")
        raise UnsupportedError(who, found, needs or "another dtype, GPU or version of triton")


def first_reason(capability: tuple[int, int], *reasons: Reason) -> str | None:
    """Returns the first reason, or that of `unsupported_architecture`, against a compute
    capability; None if there is none.
    """
    for reason in (*reasons, unsupported_architecture):
        if found := reason(capability):
            return found
    return None


def _capability(who: str, name: str, x: torch.Tensor) -> tuple[int, int]:
    """Returns the compute capability of x's GPU. Raises UnsupportedError if x is not on a GPU."""
    if not x.is_cuda:
        raise UnsupportedError(
            who,
            f"{name} on {x.device}",
            "CUDA tensors, or TRITON_INTERPRET=1 set before triton is imported",
        )
    return torch.cuda.get_device_capability(x.device)


def widest(most: int, *sizes: int) -> int:
    """Returns the largest power of two up to `most`, itself one, that divides all sizes; ignores
    zeros.

    >>> widest(16, 24, 0, 64), widest(8, 2049)
    (8, 1)
    """
    return gcd(most, *sizes)


def require_like(
    who: str,
    name: str,
    x: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raises InputError unless x has this shape, dtype and device."""
    if (tuple(x.shape), x.dtype, x.device) != (tuple(shape), dtype, device):
        found = f"{name} of shape {tuple(x.shape)} in {short(x.dtype)} on {x.device}"
        raise InputError(who, found, f"{tuple(shape)} in {short(dtype)} on {device}")


def require_contiguous(who: str, name: str, x: torch.Tensor) -> None:
    """Raises InputError unless x is contiguous."""
    if not x.is_contiguous():
        raise InputError(who, f"{name} with strides {tuple(x.stride())}", "a contiguous tensor")


def result(
    who: str,
    name: str,
    out: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Returns `out` after checking it, or a new contiguous tensor if `out` is None."""
    if out is None:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    require_like(who, name, out, shape, dtype, device)
    require_contiguous(who, name, out)
    return out


def short(dtype: torch.dtype) -> str:
    """Formats a torch dtype without `torch.`, for error messages."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Step:
    """One prepared kernel launch: `call` enqueues it on the current stream, `launch` describes
    it.
    """

    launch: Launch
    call: Callable[[], object]


@dataclass(frozen=True)
class Plan:
    """Validated, compiled and allocated work that can run any number of times.

    outputs: tensors that `run` writes.
    steps: kernels of one run, in order.
    """

    outputs: tuple[torch.Tensor, ...]
    steps: tuple[Step, ...]

    @property
    def out(self) -> torch.Tensor:
        return self.outputs[0]

    @property
    def launch(self) -> Launch:
        """Launch of the kernel that does most of the work. Registers and occupancy are None in the
        interpreter.
        """
        return self.steps[0].launch

    def run(self) -> None:
        """Enqueues all kernels once on the current stream: launches only, no allocation, no
        synchronisation.
        """
        with torch.cuda.device(self.out.device) if self.out.is_cuda else nullcontext():
            for each in self.steps:
                each.call()


def step(
    who: str,
    kernel: Any,
    grid: int,
    arguments: Mapping[str, Any],
    device: torch.device,
    tile: Tile | None = None,
) -> Step:
    """Compiles `kernel` for `arguments` (including num_warps and num_stages) and a grid of `grid`
    blocks.

    who: operation name in error messages. Raises InputError when a block does not fit on one SM.
    """
    return enqueue(kernel, (grid, 1, 1), arguments, describe(who, kernel, arguments, device, tile))


def describe(
    who: str,
    kernel: Any,
    arguments: Mapping[str, Any],
    device: torch.device,
    tile: Tile | None = None,
) -> Launch:
    """Compiles `kernel` for these arguments and returns its Launch without a grid.

    Registers and occupancy are None in the interpreter.
    """
    if INTERPRETER:
        return Launch(kernel.fn.__name__, tile=tile)
    with torch.cuda.device(device):
        compiled = kernel.warmup(grid=(1, 1, 1), **arguments, **OPTIONS)
        try:
            compiled._init_handles()  # loads the binary, which is when triton learns its registers
        except OutOfResources as error:
            raise InputError(who, f"tile {tile}: {error}", "a tile that fits on one SM") from None
    metadata = compiled.metadata
    threads = WARP_THREADS * metadata.num_warps
    blocks = resident_blocks(
        torch.cuda.get_device_capability(device),
        threads=threads,
        registers=compiled.n_regs,
        shared_memory_bytes=metadata.shared,
        # A block that finds no free tensor memory waits for it: it is on the SM without running.
        tensor_memory_columns=getattr(metadata, "tmem_size", None) or 0,
    )
    return Launch(
        kernel=metadata.name,
        block=(threads, 1, 1),
        registers=compiled.n_regs,
        shared_memory_bytes=metadata.shared,
        blocks_per_sm=blocks,
        tile=tile,
    )


def enqueue(
    kernel: Any, grid: tuple[int, int, int], arguments: Mapping[str, Any], described: Launch
) -> Step:
    """Builds the step that launches a described kernel on a grid."""
    launcher = kernel[grid]
    return Step(replace(described, grid=grid), lambda: launcher(**arguments, **OPTIONS))


_Choice = TypeVar("_Choice")
_FASTEST: dict[tuple[Any, ...], Any] = {}


def fastest(
    who: str, build: Callable[[_Choice], Plan], choices: Iterable[_Choice], key: tuple[Any, ...]
) -> _Choice:
    """Returns the choice whose plan has the shortest median time on this device; times once per key
    and process.
    """
    if INTERPRETER:
        raise UnsupportedError(who, "autotune in the interpreter", "a GPU to time on")
    if (who, *key) not in _FASTEST:
        from triton.testing import do_bench

        def time_ms(choice: _Choice) -> float:
            run = build(choice).run
            return float(
                do_bench(run, warmup=_AUTOTUNE_WARMUP_MS, rep=_AUTOTUNE_MS, return_mode="median")
            )

        _FASTEST[who, *key] = min(choices, key=time_ms)
    chosen: _Choice = _FASTEST[who, *key]
    return chosen
