"""GEMM kernels compiled ahead of time, for GPUs that are not here: registers, spills, shared memory, opcodes."""

from __future__ import annotations

from quantbench.kernels.compile import KernelResources, compile_kernel
from quantbench.kernels.gemm import kernels as gemm_kernels
from quantbench.kernels.gemm.config import Config, Operands, backend_options, constexprs

KERNELS = {
    "data_parallel": gemm_kernels.gemm_data_parallel,
    "split_k": gemm_kernels.gemm_data_parallel,
    "persistent": gemm_kernels.gemm_persistent,
    "stream_k": gemm_kernels.gemm_stream_k,
}

_TRITON_TYPES = {"fp16": "fp16", "bf16": "bf16", "fp32": "fp32", "tf32": "fp32", "fp8": "fp8e4nv"}


def compile_gemm(operands: Operands, config: Config, arch: int) -> KernelResources:
    """Compile the kernel of `config` for sm_`arch` as a launch with `operands` would."""
    options = backend_options(config)
    return compile_kernel(
        KERNELS[config.schedule],
        signature(operands, config),
        constexprs(operands, config),
        arch,
        options.pop("num_warps"),
        options.pop("num_stages"),
        **options,
    )


def signature(operands: Operands, config: Config) -> dict[str, str]:
    """Types of the run-time arguments in triton's notation, specialised as a launch specialises them."""
    gemm, tile = operands.gemm, config.tile
    inputs, output = _TRITON_TYPES[gemm.dtype], _TRITON_TYPES[gemm.output_dtype]
    boxes = box_shapes(operands, config)
    types = {}
    for name in "ab":
        types[name] = _descriptor(inputs, boxes[name]) if config.load_descriptors else f"*{inputs}:16"
    if config.store_descriptors:
        types["c"] = _descriptor(output, boxes["c"])
    else:
        types["c"] = "*fp32:16" if tile.split_k > 1 else f"*{output}:16"
    if config.schedule == "stream_k":
        types |= {"partials": "*fp32:16", "ready": "*i32:16", "streamed_tiles": "i32"}
    sizes = {
        "batches": gemm.batch, "m": gemm.m, "n": gemm.n, "k": gemm.k,
        "lda": operands.a.leading, "ldb": operands.b.leading, "ldc": operands.c.leading,
        "batch_stride_a": operands.a.batch_stride, "batch_stride_b": operands.b.batch_stride,
        "batch_stride_c": operands.c.batch_stride,
    }  # fmt: skip
    return types | {name: _integer(value) for name, value in sizes.items()}


def box_shapes(operands: Operands, config: Config) -> dict[str, list[int]]:
    """What one descriptor load or store moves, in stored order, with a leading 1 for batched products."""
    tile = config.tile
    assert tile.block_k is not None
    boxes = {
        "a": [tile.block_m, tile.block_k],
        "b": [tile.block_k, tile.block_n],
        "c": [tile.block_m, tile.block_n // config.subtiles],
    }
    for name, matrix in (("a", operands.a), ("b", operands.b)):
        if matrix.transposed:
            boxes[name].reverse()
    return {name: [1, *box] if operands.gemm.batch > 1 else box for name, box in boxes.items()}


def _descriptor(dtype: str, box: list[int]) -> str:
    return f"tensordesc<{dtype}[{', '.join(map(str, box))}]>"


def _integer(value: int) -> str:
    width = "i32" if value < 2**31 else "i64"
    return f"{width}:1" if value == 1 else f"{width}:16" if value % 16 == 0 else width
