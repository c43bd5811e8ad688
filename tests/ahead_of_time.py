"""Compiles kernels ahead of time, for a GPU that need not be present, and reads their resources:
`compile_kernel`.

Registers, spills, stack, shared memory and opcodes come from the compiled binary (`cuobjdump`,
which the triton wheel carries), warnings from ptxas. Works without a GPU, in a process without
TRITON_INTERPRET.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import triton
from quantbench.kernels import softmax
from quantbench.kernels.attention import host as attention
from quantbench.kernels.attention.backward import (
    attention_backward_kv,
    attention_backward_q,
    attention_delta,
)
from quantbench.kernels.attention.forward import attention_forward
from quantbench.kernels.attention.menu import Setting
from quantbench.kernels.attention.operands import Checked
from quantbench.kernels.gemm import host as gemm
from quantbench.kernels.gemm.config import Config, Operands
from quantbench.kernels.launching import OPTIONS, TORCH_DTYPES, TRITON, widest
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quantbench.errors import UnsupportedError
from quantbench.launch import Tile
from quantbench.quantization import SM_LIMITS, TENSOR_MEMORY_COLUMNS, WARP_THREADS
from quantbench.workload import Attention
from quantbench.workload.dtypes import DTYPES

#: Whether all kernels are compiled (`make test-aot`), or a few of each kind (`make test`).
ALL_KERNELS = os.environ.get("QUANTBENCH_AOT") == "1"
in_test_aot = pytest.mark.skipif(not ALL_KERNELS, reason="make test-aot compiles all kernels")
_Case = TypeVar("_Case")


def few(cases: Sequence[_Case], count: int) -> Sequence[_Case]:
    """Returns `count` of the cases, evenly spaced; all of them in `make test-aot`."""
    return cases if ALL_KERNELS else cases[:: len(cases) // count][:count]


#: Shared memory that one block may ask for, bytes, by architecture (80 for sm_80): what the SM has,
#: less the 1 KiB that the driver keeps from compute capability 8.0 on. Source: see
#: `quantbench.occupancy`.
SHARED_MEMORY_LIMIT_BYTES = {
    10 * major + minor: limits.smem_bytes - (1024 if major >= 8 else 0)
    for (major, minor), limits in SM_LIMITS.items()
}

#: triton's names of the dtypes that kernels take by pointer
_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
#: a line of SASS: address, an optional predicate, the opcode with its modifiers
_SASS_OPCODE = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<opcode>[A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)"
)
_RESOURCES = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+)")


@dataclass(frozen=True)
class KernelResources:
    """What one compiled kernel needs of an SM.

    arch: compute capability, 80 for sm_80. registers: per thread. spills: load and store
        instructions to local memory,
    0 where all values fit into registers. stack_bytes: local memory per thread.
    shared_memory_bytes: per block, dynamic and static. tensor_memory_columns: per block, of
        Blackwell's 512. scratch_bytes: memory that a launch would need an
    allocator for (`triton.set_allocator`). threads: per block. opcodes: number of each SASS opcode,
    with its modifiers, in the code. warning: what ptxas says if it serialises Hopper's matrix
    instructions (C7510 to C7515), else empty.
    """

    name: str
    arch: int
    registers: int
    spills: int
    stack_bytes: int
    shared_memory_bytes: int
    tensor_memory_columns: int
    scratch_bytes: int
    threads: int
    opcodes: Mapping[str, int]
    warning: str

    def count(self, prefix: str) -> int:
        """Instructions whose opcode begins with `prefix`: `HMMA`, `HGMMA`, `UTCHMMA`, `HMMA.884`,
        `FFMA`.
        """
        return sum(
            n
            for opcode, n in self.opcodes.items()
            if opcode == prefix or opcode.startswith(prefix + ".")
        )


def check_fits(built: KernelResources) -> None:
    assert built.spills == 0
    assert built.stack_bytes == 0
    assert built.registers <= 255
    assert built.registers * built.threads <= 65_536
    assert built.shared_memory_bytes <= SHARED_MEMORY_LIMIT_BYTES[built.arch]
    assert built.tensor_memory_columns <= TENSOR_MEMORY_COLUMNS
    assert built.scratch_bytes == 0
    assert built.warning == ""


def compile_kernel(fn: Any, arguments: Mapping[str, Any], arch: int) -> KernelResources:
    """Compile a `triton.jit` function as a launch with `arguments` would, and read its resources.

    arguments: by name, with num_warps, num_stages and further backend options (`maxnreg`, …).
        Tensors may be on torch's
    meta device, so that they take no memory. Specialised as triton does: on arguments that are 1 or
    multiples of 16.
    arch: compute capability, 80 for sm_80.

    >>> x = torch.empty(64, 4096, dtype=torch.bfloat16, device="meta")
    >>> compile_kernel(softmax_kernel, {"x": x, "cols": 4096, "BLOCK": 4096, "num_warps": 4, "num_stages": 3}, 90)
    ... # doctest: +SKIP
    """
    options = OPTIONS | {
        name: value for name, value in arguments.items() if name not in fn.arg_names
    }
    target = GPUTarget("cuda", arch, WARP_THREADS)
    compiled = triton.compile(_source(fn, arguments), target=target, options=options)
    usage, opcodes = _inspect(compiled.asm["cubin"])
    return KernelResources(
        name=compiled.metadata.name,
        arch=arch,
        registers=usage[0],
        spills=sum(n for opcode, n in opcodes.items() if opcode.split(".")[0] in ("LDL", "STL")),
        stack_bytes=usage[1],
        shared_memory_bytes=compiled.metadata.shared,
        tensor_memory_columns=getattr(compiled.metadata, "tmem_size", None) or 0,
        scratch_bytes=getattr(compiled.metadata, "global_scratch_size", None) or 0,
        threads=compiled.metadata.num_warps * WARP_THREADS,
        opcodes=opcodes,
        warning=_serialised(compiled.asm["ptx"]) if arch == 90 else "",
    )


def _source(fn: Any, arguments: Mapping[str, Any]) -> ASTSource:
    """The compiler's input, in the form that the installed triton takes."""
    types, constants, divisible = {}, {}, []
    for index, parameter in enumerate(fn.params):
        value, specialise = arguments[parameter.name], not parameter.do_not_specialize
        number = isinstance(value, int)
        if parameter.is_constexpr or value is None or (specialise and number and value == 1):
            constants[parameter.name] = value
            continue
        types[parameter.name] = _type(value)
        if specialise and isinstance(value, int | torch.Tensor):
            divisible += [index] if (value if number else value.data_ptr()) % 16 == 0 else []
    if TRITON < (
        3,
        3,
    ):  # constants are left out of the signature, attributes have a class of their own
        from triton.backends.compiler import AttrsDescriptor

        attrs = AttrsDescriptor.from_hints(dict.fromkeys(divisible, 16))
        return ASTSource(fn=fn, signature=types, constants=constants, attrs=attrs)
    full = {name: types.get(name, "constexpr") for name in fn.arg_names}
    hints = {(index,): [["tt.divisibility", 16]] for index in divisible}
    return ASTSource(fn=fn, signature=full, constexprs=constants, attrs=hints)


def _type(value: Any) -> str:
    """The type of one run-time argument in triton's notation."""
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, int):
        return "i32" if value < 2**31 else "i64"
    return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>"  # a TensorDescriptor


def _inspect(cubin: bytes) -> tuple[tuple[int, int], dict[str, int]]:
    """(registers per thread, stack bytes per thread) and opcode counts of a binary with one
    kernel.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [_tool("cuobjdump"), "-sass", "-res-usage", file.name],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    usage = _RESOURCES.search(text)
    opcodes = Counter(m["opcode"] for m in map(_SASS_OPCODE.match, text.splitlines()) if m)
    if usage is None or not opcodes:
        raise UnsupportedError(
            "cuobjdump", "printed no resource usage or no code", "a binary with one kernel"
        )
    return (int(usage["registers"]), int(usage["stack"])), dict(opcodes)


def _serialised(ptx: str) -> str:
    """The warning that ptxas prints if it makes wgmma instructions wait for each other, or an empty
    string.

    triton discards it, and a binary from triton's cache has none, so ptxas runs once more.
    """
    if "wgmma.mma_async" not in ptx:
        return ""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        # triton 3.9 brings two; the older one cannot read what it generates.
        name = "ptxas-blackwell" if re.search(r"^\.version 9", ptx, re.M) else "ptxas"
        command = [_tool(name), "-v", "--gpu-name=sm_90a", file.name, "-o", os.devnull]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return next((line for line in log.splitlines() if "wgmma" in line and "serialized" in line), "")


def _tool(name: str) -> str:
    """Path of a CUDA binary utility: that of triton's wheel, or the first on PATH."""
    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    found = str(bundled) if bundled.exists() else shutil.which(name)
    if found is None:
        raise UnsupportedError(
            name, "not found in triton's wheel or on PATH", "the CUDA binary utilities"
        )
    return found


def compile_gemm(operands: Operands, config: Config, arch: int) -> KernelResources:
    """Compile the kernel of `config` for sm_`arch` as a launch with `operands` would."""
    work, split_k = operands.gemm, config.tile.split_k
    batch = (work.batch,) if work.batch > 1 else ()
    a = torch.empty(*batch, work.m, work.k, dtype=TORCH_DTYPES[work.dtype], device="meta")
    b = torch.empty(*batch, work.k, work.n, dtype=a.dtype, device="meta")
    output = torch.float32 if split_k > 1 else TORCH_DTYPES[work.output_dtype]
    c = torch.empty(*batch, work.m, work.n, dtype=output, device="meta")
    return compile_kernel(
        gemm.KERNELS[config.schedule], gemm.kernel_arguments(a, b, c, operands, config), arch
    )


def compile_softmax(
    cols: int, *, direction: str = "forward", mask: str = "causal", dtype: str = "fp16", arch: int
) -> KernelResources:
    """Compile for sm_`arch` what a launch on contiguous scores with `cols` columns and as many rows
    would run.

    mask: causal, full or none. direction: forward or backward.
    """
    x = torch.empty(1, 1, cols, cols, dtype=TORCH_DTYPES[dtype], device="meta")
    tile, causal = softmax.softmax_tile(cols, x.element_size(), direction), mask == "causal"
    if direction == "forward":
        kernel, dropped = softmax.softmax_forward, x.bool() if mask == "full" else None
        arguments = softmax.forward_arguments(x, dropped, x, 1.0, causal, tile)
    else:
        kernel = softmax.softmax_backward
        arguments = softmax.backward_arguments(x, x, x, 1.0, causal, tile)
    # 3 is no multiple of 16: the code is that for any number of rows.
    return compile_kernel(kernel, arguments | {"rows_in_all": 3}, arch)


def compile_forward(
    setting: Setting,
    head_dim: int,
    arch: int,
    *,
    dtype: str = "bf16",
    causal: bool = True,
    descriptors: bool,
) -> KernelResources:
    """Compile for sm_`arch` what forward on contiguous tensors runs; sequences that no block
    divides evenly.
    """
    checked, q, k, lse = _sample(head_dim, dtype, causal)
    given = attention.forward_arguments(q, k, k, q, lse, checked, setting, descriptors, 2**20)
    return compile_kernel(attention_forward, given, arch)


def compile_backward(
    tiles: tuple[Tile, Tile], head_dim: int, arch: int, *, descriptors: bool
) -> list[KernelResources]:
    """As `compile_forward`, for the kernels that keep k and v, and q. tiles: of the two."""
    checked, q, k, lse = _sample(head_dim, "bf16", causal=True)
    given = attention.backward_arguments(
        q, k, k, q, lse, lse, (q, k, k), checked, *tiles, descriptors
    )
    kernels = (attention_backward_kv, attention_backward_q)
    return [compile_kernel(*pair, arch) for pair in zip(kernels, given, strict=True)]


def compile_delta(head_dim: int, arch: int) -> KernelResources:
    """As `compile_forward`, for the kernel that adds up o · do."""
    checked, q, _, lse = _sample(head_dim, "bf16", causal=True)
    return compile_kernel(attention_delta, attention.delta_arguments(q, q, lse, checked), arch)


def _sample(
    head_dim: int, dtype: str, causal: bool
) -> tuple[Checked, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A problem without memory: q, k and the row sums on torch's meta device. Odd sizes, so that
    nothing but head_dim decides on alignment."""
    work = Attention(3, 9, 1001, 1001, head_dim, kv_heads=3, dtype=dtype, causal=causal)
    q, k = (
        torch.empty(3, heads, 1001, head_dim, dtype=TORCH_DTYPES[dtype], device="meta")
        for heads in (work.heads, work.kv_heads)
    )
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device="meta")
    return (
        Checked(work, 1.0, widest(16 // DTYPES[dtype].element_bytes, head_dim), descriptors=True),
        q,
        k,
        lse,
    )
