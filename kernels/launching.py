"""Checks, compiles and launches this package's Triton kernels, and finds the fastest configuration.

The modules for GEMM, attention and softmax use these functions to build a `Plan`: work that is
ready to run. Our kernels need Triton 3.2 on Volta and Turing, and Triton 3.6 or newer on later
GPUs.
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

#: Version of the installed Triton: (major, minor).
TRITON = tuple(int(number) for number in triton.__version__.split(".")[:2])

#: Whether this Triton passes tensor descriptors to kernels. With descriptors, the TMA unit (the
#: GPU's bulk copy engine) loads and stores whole tiles.
HAS_TENSOR_DESCRIPTOR = TRITON >= (3, 6)

#: Maps our dtype names to torch's dtypes. tf32 is stored as fp32.
TORCH_DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}

#: Whether Triton's interpreter runs the kernels, in Python on CPU tensors. Triton reads the
#: environment variable at import. A later change of the variable breaks Triton.
INTERPRETER = os.environ.get("TRITON_INTERPRET", "0") == "1"

#: Alignment in bytes that TMA requires of a tensor's address and of every stride except the last.
#: Source: cuTensorMapEncodeTiled, CUDA driver API.
TMA_ALIGN_BYTES = 16

#: Maximum number of registers per thread, on every compute capability. Source: CUDA C++ Programming
#: Guide 13.0.
MAX_REGISTERS = 255
#: Options of every launch. `enable_fp_fusion` compiles a·b + c to one instruction. Triton does so
#: by default only up to version 3.9.
OPTIONS = {"enable_fp_fusion": True}
_NEEDS_GPU = "CUDA tensors, or TRITON_INTERPRET=1 set before triton is imported"
#: Function that returns why a compute capability is not supported, or None if it is supported.
Reason = Callable[[tuple[int, int]], str | None]

# Time for which `fastest` runs each configuration to warm up, and then to time it.
_AUTOTUNE_WARMUP_MS = 20
_AUTOTUNE_MS = 80


def unsupported_architecture(
    capability: tuple[int, int], version: tuple[int, ...] = TRITON
) -> str | None:
    """Returns why our kernels do not run on a compute capability, or None if they do.

    The limits were found by compiling (`make test-aot`, `make test-volta`). Triton 3.2 is the last
    version with tensor-core code for sm_70 and sm_75. Triton 3.3 to 3.5 spill registers in stream_k
    or attention, or do not compile them.

    version: Triton's version.

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
    """Returns why Triton's interpreter computes wrong GEMMs in a dtype, or None if it does not."""
    return "triton's interpreter multiplies the bit patterns of bf16" if dtype == "bf16" else None


@dataclass(frozen=True)
class Gpu:
    """GPU properties on which a kernel's configuration depends."""

    capability: tuple[int, int]
    sm_count: int
    l2_bytes: int


def gpu_of(x: torch.Tensor, interpreted: Gpu) -> Gpu:
    """Returns the properties of the GPU that holds a tensor.

    x: tensor that `require_support` has accepted.
    interpreted: GPU that the interpreter simulates; returned for a CPU tensor.
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
    """Raises UnsupportedError unless our kernels run on the device of x.

    who: name of the operation, for error messages.
    name: name of the tensor, for error messages.
    dtype: dtype of tl.dot's operands, which is checked in the interpreter; "" for a kernel without
        tl.dot.
    reasons: the kernel's own checks of the compute capability.
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
    """Returns why a compute capability is not supported, or None if it is supported.

    reasons: checks that are tried in order, before `unsupported_architecture`.
    """
    for reason in (*reasons, unsupported_architecture):
        if found := reason(capability):
            return found
    return None


def _capability(who: str, name: str, x: torch.Tensor) -> tuple[int, int]:
    """Returns the compute capability of x's GPU. Raises UnsupportedError if x is not on a GPU."""
    if not x.is_cuda:
        raise UnsupportedError(who, f"{name} on {x.device}", _NEEDS_GPU)
    return torch.cuda.get_device_capability(x.device)


def widest(most: int, *sizes: int) -> int:
    """Returns the largest power of two up to `most` that divides all sizes.

    most: upper limit, which is a power of two.
    sizes: numbers to divide; zeros are ignored.

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
    """Returns `out`, or a new contiguous tensor if `out` is None.

    Raises InputError unless `out` is contiguous and has this shape, dtype and device.
    """
    if out is None:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    require_like(who, name, out, shape, dtype, device)
    require_contiguous(who, name, out)
    return out


def short(dtype: torch.dtype) -> str:
    """Returns the name of a torch dtype without `torch.`, for error messages."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Step:
    """One prepared kernel launch.

    launch: description of the launch.
    call: enqueues the launch on the current stream.
    """

    launch: Launch
    call: Callable[[], object]


@dataclass(frozen=True)
class Plan:
    """Work that is checked, compiled and allocated, and can run any number of times.

    outputs: tensors that `run` writes.
    steps: kernel launches of one run, in order.
    """

    outputs: tuple[torch.Tensor, ...]
    steps: tuple[Step, ...]

    @property
    def out(self) -> torch.Tensor:
        """First output tensor."""
        return self.outputs[0]

    @property
    def launch(self) -> Launch:
        """Launch of the first kernel, which does most of the work.

        In the interpreter, the launch's registers and occupancy are None.
        """
        return self.steps[0].launch

    def run(self) -> None:
        """Enqueues all kernels once on the current stream, without allocating or synchronising."""
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
    """Compiles a kernel and returns its launch as a step.

    who: name of the operation, for error messages.
    grid: number of blocks.
    arguments: arguments of the kernel by name, including num_warps and num_stages.
    tile: tile that each block computes, for the step's Launch; None if there is none.

    Raises InputError if a block does not fit on one SM.
    """
    return enqueue(kernel, (grid, 1, 1), arguments, describe(who, kernel, arguments, device, tile))


def describe(
    who: str,
    kernel: Any,
    arguments: Mapping[str, Any],
    device: torch.device,
    tile: Tile | None = None,
) -> Launch:
    """Compiles a kernel for these arguments and describes it as a Launch without a grid.

    The arguments are those of `step`. In the interpreter, registers and occupancy are None.

    Raises InputError if a block does not fit on one SM, or if the device is no GPU and the kernel
    is not interpreted.
    """
    if INTERPRETER:
        return Launch(kernel.fn.__name__, tile=tile)
    if device.type != "cuda":
        raise InputError(who, f"tensors on {device}", _NEEDS_GPU)
    with torch.cuda.device(device):
        compiled = kernel.warmup(grid=(1, 1, 1), **arguments, **OPTIONS)
        try:
            compiled._init_handles()  # loads the binary, after which Triton knows its registers
        except OutOfResources as error:
            raise InputError(who, f"tile {tile}: {error}", "a tile that fits on one SM") from None
    metadata = compiled.metadata
    threads = WARP_THREADS * metadata.num_warps
    blocks = resident_blocks(
        torch.cuda.get_device_capability(device),
        threads=threads,
        registers=compiled.n_regs,
        shared_memory_bytes=metadata.shared,
        # A block that finds no free tensor memory waits on the SM without running, so it does not
        # count as resident.
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
    """Returns the step that launches a kernel on a grid.

    described: result of `describe` for this kernel.
    """
    launcher = kernel[grid]
    return Step(replace(described, grid=grid), lambda: launcher(**arguments, **OPTIONS))


_Choice = TypeVar("_Choice")
# Results of `fastest` in this process, by (who, *key).
_FASTEST: dict[tuple[Any, ...], Any] = {}


def fastest(
    who: str, build: Callable[[_Choice], Plan], choices: Iterable[_Choice], key: tuple[Any, ...]
) -> _Choice:
    """Returns the configuration with the shortest median time on this device.

    who: name of the operation.
    build: function that makes the plan for a configuration.
    choices: configurations to time.
    key: identity of the problem, such as its shape and dtype. The result is cached by `who` and
        `key`, so a process times each problem once.

    Raises UnsupportedError in the interpreter.
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
