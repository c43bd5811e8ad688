"""Compiles a kernel ahead of time, for a GPU that need not be present, and reads its resources: `compile_kernel`.

Registers, spills, stack, shared memory and opcodes come from the compiled binary (`cuobjdump`, which the triton wheel
carries). `compile_launch` compiles what a launch with given arguments would run. Works without a GPU, in a process
without TRITON_INTERPRET.
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
}
_HINT = re.compile(r"^(?P<type>.*?)(?::(?P<hint>1|16))?$")
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


def compile_kernel(
    fn: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    arch: int,
    num_warps: int,
    num_stages: int,
    **options: Any,
) -> KernelResources:
    """Compile the `triton.jit` function `fn` for compute capability `arch` (80 for sm_80) and read its resources.

    signature: for every parameter that is no constexpr, in triton's notation: `*fp16`, `i32`, `fp32`,
    `tensordesc<bf16[128, 64]>`; a suffix `:16` promises divisibility by 16 (pointers: alignment; a torch allocation
    always has it), `:1` makes the argument the constant 1 (as triton itself does with a stride of 1).
    constexprs: values of all tl.constexpr parameters. options: further backend options (`maxnreg`, …).

    >>> compile_kernel(softmax_kernel, {"x": "*bf16:16", "cols": "i32:16"}, {"BLOCK": 1024}, 90, 4, 3)  # doctest: +SKIP
    """
    if INTERPRETER:
        raise UnsupportedError("compile_kernel", "TRITON_INTERPRET=1 is set", "a process without the interpreter")
    source = _source(fn, signature, constexprs)
    settings = {"num_warps": num_warps, "num_stages": num_stages, **options}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, WARP_THREADS), options=settings)
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


def compile_launch(fn: Any, arguments: Mapping[str, Any], arch: int) -> KernelResources:
    """Compile `fn` for compute capability `arch` as a launch with `arguments` would, specialised as triton does.

    arguments: by name, with num_warps and num_stages; tensors may be on torch's meta device.
    """
    parameters = {parameter.name: parameter for parameter in getattr(fn, "params", ())}  # none in the interpreter
    types, constants, options = {}, {}, {}
    for name, value in arguments.items():
        if name not in parameters:
            options[name] = value
        elif parameters[name].is_constexpr or value is None:
            constants[name] = value
        else:
            types[name] = _type(value, hint=not parameters[name].do_not_specialize)
    return compile_kernel(fn, types, constants, arch, options.pop("num_warps"), options.pop("num_stages"), **options)


def _type(value: Any, hint: bool) -> str:
    """The type of one run-time argument in the notation of `compile_kernel`. hint: with what triton specialises on."""
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}" + (":16" if hint and value.data_ptr() % 16 == 0 else "")
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, int):
        width = "i32" if value < 2**31 else "i64"
        return f"{width}:1" if hint and value == 1 else f"{width}:16" if hint and value % 16 == 0 else width
    return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>"


def _source(fn: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any]) -> ASTSource:
    """The compiler's input, in the form that the installed triton takes."""
    missing = [name for name in fn.arg_names if name not in signature and name not in constexprs]
    unknown = [name for name in (*signature, *constexprs) if name not in fn.arg_names]
    if missing or unknown:
        problem = f"no type for {missing[0]!r}" if missing else f"a type or value for {unknown[0]!r}"
        raise InputError(f"compile {fn.__name__}", problem, "exactly the parameters " + ", ".join(fn.arg_names))
    types, constants, divisible = {}, dict(constexprs), []
    for index, name in enumerate(fn.arg_names):
        if name in constexprs:
            continue
        match = _HINT.match(signature[name])
        if match["hint"] == "1":
            constants[name] = 1
        else:
            types[name] = match["type"]
            if match["hint"] == "16":
                divisible.append(index)
    if TRITON < (3, 3):  # constants are left out of the signature, attributes have a class of their own
        from triton.backends.compiler import AttrsDescriptor

        attrs = AttrsDescriptor.from_hints(dict.fromkeys(divisible, 16))
        return ASTSource(fn=fn, signature=types, constants=constants, attrs=attrs)
    full = {name: types.get(name, "constexpr") for name in fn.arg_names}
    hints = {(index,): [["tt.divisibility", 16]] for index in divisible}
    return ASTSource(fn=fn, signature=full, constexprs=constants, attrs=hints)


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
