"""Compiles a kernel ahead of time, for a GPU that need not be present, and reads its resources: `compile_kernel`.

Registers, spills, stack, shared memory and opcodes come from the compiled binary (`cuobjdump`, which the triton wheel
carries). Works without a GPU, in a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from quantbench.kernels.launching import INTERPRETER, TRITON
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quantbench.errors import InputError, UnsupportedError
from quantbench.occupancy import WARP_THREADS

#: Shared memory that one block may ask for, bytes. Source: CUDA C++ Programming Guide 13.0, table "Technical
#: Specifications per Compute Capability" ("Maximum amount of shared memory per thread block": 96, 64, 163, 99, 99,
#: 227, 227, 99 KiB).
SHARED_MEMORY_LIMIT_BYTES: dict[int, int] = {
    70: 96 * 1024,
    75: 64 * 1024,
    80: 163 * 1024,
    86: 99 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    120: 99 * 1024,
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
_SASS_OPCODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<opcode>[A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)")
_RESOURCES = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+)")


@dataclass(frozen=True)
class KernelResources:
    """What one compiled kernel needs of an SM.

    arch: compute capability, 80 for sm_80. registers: per thread. spills: load and store instructions to local memory,
    0 where all values fit into registers. stack_bytes: local memory per thread. shared_memory_bytes: per block, dynamic
    and static. threads: per block. opcodes: number of each SASS opcode, with its modifiers, in the code.
    """

    name: str
    arch: int
    registers: int
    spills: int
    stack_bytes: int
    shared_memory_bytes: int
    threads: int
    opcodes: Mapping[str, int]

    def count(self, prefix: str) -> int:
        """Instructions whose opcode begins with `prefix`: `HMMA`, `HGMMA`, `UTCHMMA`, `HMMA.884`, `FFMA`."""
        return sum(n for opcode, n in self.opcodes.items() if opcode == prefix or opcode.startswith(prefix + "."))


def compile_kernel(fn: Any, arguments: Mapping[str, Any], arch: int) -> KernelResources:
    """Compile a `triton.jit` function as a launch with `arguments` would, and read its resources.

    arguments: by name, with num_warps, num_stages and further backend options (`maxnreg`, …). Tensors may be on torch's
    meta device, so that they take no memory. Specialised as triton does: on arguments that are 1 or multiples of 16.
    arch: compute capability, 80 for sm_80.

    >>> x = torch.empty(64, 4096, dtype=torch.bfloat16, device="meta")
    >>> compile_kernel(softmax_kernel, {"x": x, "cols": 4096, "BLOCK": 4096, "num_warps": 4, "num_stages": 3}, 90)
    ... # doctest: +SKIP
    """
    if INTERPRETER:
        raise UnsupportedError("compile_kernel", "TRITON_INTERPRET=1 is set", "a process without the interpreter")
    missing = [name for name in (*fn.arg_names, "num_warps", "num_stages") if name not in arguments]
    if missing:
        expected = ", ".join([*fn.arg_names, "num_warps", "num_stages"])
        raise InputError(f"compile {fn.__name__}", f"no value for {missing[0]!r}", f"the parameters {expected}")
    options = {name: value for name, value in arguments.items() if name not in fn.arg_names}
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
        threads=compiled.metadata.num_warps * WARP_THREADS,
        opcodes=opcodes,
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
    if TRITON < (3, 3):  # constants are left out of the signature, attributes have a class of their own
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
    """(registers per thread, stack bytes per thread) and opcode counts of a binary with one kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [_cuobjdump(), "-sass", "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    usage = _RESOURCES.search(text)
    opcodes = Counter(m["opcode"] for m in map(_SASS_OPCODE.match, text.splitlines()) if m)
    if usage is None or not opcodes:
        raise UnsupportedError("cuobjdump", "printed no resource usage or no code", "a binary with one kernel")
    return (int(usage["registers"]), int(usage["stack"])), dict(opcodes)


def _cuobjdump() -> str:
    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    found = str(bundled) if bundled.exists() else shutil.which("cuobjdump")
    if found is None:
        raise UnsupportedError("cuobjdump", "not found in triton's wheel or on PATH", "the CUDA binary utilities")
    return found
